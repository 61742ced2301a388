/* Steps of the stress test. A step has any mix of prefill chunks and decode rows, layers in any order, attention in some or all
 * layers, and calls that are invalid during a step. Then it is committed or aborted.
 */
#include "stress_operations.h"

#include <string.h>

typedef struct plan {
    fkv_row rows[STRESS_MAX_SEQS];
    stress_seq *seqs[STRESS_MAX_SEQS];
    uint32_t n_rows;
    uint32_t n_tokens;
    uint64_t work; /* number of multiplications that the reference needs for the step's outputs */
} plan;

/* Draws the number of new tokens of a sequence: one, a few, or `most`. In caches with states, many steps end at a page boundary,
 * because snapshots are possible only there. */
static uint32_t draw_tokens(stress_random *r, const stress_config *c, const stress_seq *seq, uint32_t most) {
    const uint32_t to_boundary = c->base.page_tokens - seq->n % c->base.page_tokens;
    if (c->n_states > 0 && to_boundary <= most && stress_chance(r, 60))
        return to_boundary + stress_mostly_small(r, 0, (most - to_boundary) / c->base.page_tokens) * c->base.page_tokens;
    uint32_t prefill = seq->n < seq->n_prompt ? seq->n_prompt - seq->n : 0;
    if (seq->n_prompt + 100 > STRESS_SPLITS_DOUBLE && prefill > 0) return prefill < most ? prefill : most;
    if (stress_chance(r, prefill > 0 ? 10 : 60)) return 1;
    if (seq->n + 100 > STRESS_SPLITS_DOUBLE) return stress_between(r, 1, most < 30 ? most : 30);
    return stress_chance(r, 30) ? most : stress_mostly_small(r, 1, most);
}

static plan draw_plan(stress_run *l, stress_cache *c) {
    plan p = {.n_rows = 0};
    stress_random *r = &l->random;
    uint32_t left = c->config.base.max_step_tokens;
    uint32_t keep = stress_chance(r, 30) ? 100 : 60;
    uint32_t first = stress_below(r, c->n_seqs);
    for (uint32_t i = 0; i < c->n_seqs && left > 0; i++) {
        stress_seq *seq = &c->seqs[(first + i) % c->n_seqs];
        uint32_t capacity = seq->max_tokens - seq->n < left ? seq->max_tokens - seq->n : left;
        if (capacity == 0 || (p.n_rows > 0 && !stress_chance(r, keep))) continue;
        uint32_t n = draw_tokens(r, &c->config, seq, capacity);
        p.seqs[p.n_rows] = seq;
        p.rows[p.n_rows++] = (fkv_row){seq->number, n};
        p.n_tokens += n;
        p.work += (uint64_t)n * (seq->n + n / 2 + 1) * stress_token_work(&c->config);
        left -= n;
    }
    return p;
}

/* Appends the new tokens to the expected sequences when the step begins. If the step is aborted, they are removed again. */
static void push_tokens(stress_run *l, stress_cache *c, const plan *p) {
    for (uint32_t i = 0; i < p->n_rows; i++) {
        stress_seq *seq = p->seqs[i];
        uint32_t n = p->rows[i].n_tokens;
        /* index of the new token that is not taken from the document; n if all new tokens are taken from the document */
        uint32_t astray = stress_chance(&l->random, 10) ? stress_below(&l->random, n) : n;
        for (uint32_t t = 0; t < n; t++) {
            uint32_t id = stress_document_token(&c->config, seq->document, seq->n);
            if (t == astray) id = stress_below(&l->random, 3);
            stress_seq_push(c, seq, id);
        }
    }
}

static void gather_rows(stress_run *l, const plan *p, uint32_t layer, uint32_t what) {
    uint8_t *at = l->rows[what];
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const stress_seq *seq = p->seqs[i];
        for (uint32_t t = seq->n - p->rows[i].n_tokens; t < seq->n; t++, at += stress_rows_bytes(&l->fixture, layer, what))
            stress_rows(&l->fixture, seq->tokens[t], layer, what, at);
    }
}

static bool is_state(const stress_run *l, uint32_t layer) { return layer >= l->config.base.n_layers; }

/* Returns word i of the state that a layer must have after the tokens with chain hash `chain`. */
static uint64_t state_word(uint64_t chain, uint32_t layer, size_t i) { return stress_mix(stress_mix(chain, layer + 100), i); }

static bool is_state_of(const uint8_t *state, uint64_t chain, uint32_t layer, size_t n_words) {
    for (size_t i = 0; i < n_words; i++) {
        const uint64_t word = state_word(chain, layer, i);
        if (memcmp(state + i * sizeof word, &word, sizeof word) != 0) return false;
    }
    return true;
}

/* Checks the states that the step reads, and writes the new states. */
static void write_states(stress_run *l, stress_cache *c, const plan *p, fkv_step *step, uint32_t layer) {
    fkv_state_row rows[STRESS_MAX_SEQS];
    const size_t n_words = c->config.state_bytes[layer - c->config.base.n_layers] / sizeof(uint64_t);
    stress_expect(fkv_state_rows(step, c->config.at[layer], rows), FKV_OK, "state rows");
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const stress_seq *seq = p->seqs[i];
        const uint32_t before = seq->n - p->rows[i].n_tokens;
        if ((rows[i].in == NULL) != (before == 0))
            stress_fail("an empty sequence has a state, or a sequence with tokens has no state (%u tokens)", before);
        if (before > 0 && !is_state_of(rows[i].in, stress_seq_chain(c, seq, before), layer, n_words))
            stress_fail("the state of a sequence does not match its %u tokens", before);
        uint8_t *out = rows[i].out;
        for (size_t k = 0; k < n_words; k++) {
            const uint64_t word = state_word(stress_seq_chain(c, seq, seq->n), layer, k);
            memcpy(out + k * sizeof word, &word, sizeof word);
        }
        l->counts->states++;
    }
}

/* Returns the V rows of a layer, or NULL if the layer is latent. */
static const uint8_t *v_rows(const stress_run *l, uint32_t layer) {
    return stress_layer_is_latent(&l->config, layer) ? NULL : l->rows[STRESS_V];
}

static void write_layer(stress_run *l, stress_cache *c, const plan *p, fkv_step *step, uint32_t layer) {
    if (is_state(l, layer)) {
        write_states(l, c, p, step, layer);
        return;
    }
    gather_rows(l, p, layer, STRESS_K);
    gather_rows(l, p, layer, STRESS_V);
    stress_expect(fkv_write(step, c->config.at[layer], l->rows[STRESS_K], v_rows(l, layer)), FKV_OK, "write");
}

static void attend_layer(stress_run *l, stress_cache *c, const plan *p, fkv_step *step, uint32_t layer) {
    if (is_state(l, layer)) return;
    size_t token_bytes = stress_answer_bytes(&l->fixture, layer);
    gather_rows(l, p, layer, STRESS_Q);
    uint8_t *out = l->rows[stress_chance(&l->random, 25) ? STRESS_Q : 3];
    if (out != l->rows[3] && stress_layer_is_latent(&l->config, layer)) {
        stress_expect(fkv_attend(step, c->config.at[layer], l->rows[STRESS_Q], out), FKV_BAD_ARGUMENT, "attend in place");
        out = l->rows[3];
    }
    memset(l->rows[3], 0xff, l->rows_bytes);
    stress_expect(fkv_attend(step, c->config.at[layer], l->rows[STRESS_Q], out), FKV_OK, "attend");
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const stress_seq *seq = p->seqs[i];
        for (uint32_t n = seq->n - p->rows[i].n_tokens + 1; n <= seq->n; n++, out += token_bytes)
            stress_check_answer(&l->fixture, seq->tokens, n, layer, out);
    }
    fkv_stats now;
    stress_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    if (now.packed_bytes_read <= c->expected_stats.packed_bytes_read) stress_fail("attention read no packed bytes");
    c->expected_stats.packed_bytes_read = now.packed_bytes_read;
}

/* Discards tokens at the ends of some rows, and writes the states again. Updates the plan and the expected sequences. */
static void keep_tokens(stress_run *l, stress_cache *c, plan *p, fkv_step *step) {
    uint32_t n_kept[STRESS_MAX_SEQS];
    bool changed = false;
    for (uint32_t i = 0; i < p->n_rows; i++) {
        n_kept[i] = stress_chance(&l->random, 50) ? p->rows[i].n_tokens : stress_between(&l->random, 1, p->rows[i].n_tokens);
        changed = changed || n_kept[i] < p->rows[i].n_tokens;
    }
    stress_expect(fkv_step_keep(step, n_kept), FKV_OK, "keep");
    for (uint32_t i = 0; i < p->n_rows; i++) {
        l->counts->discarded += p->rows[i].n_tokens - n_kept[i];
        p->seqs[i]->n -= p->rows[i].n_tokens - n_kept[i];
        p->rows[i].n_tokens = n_kept[i];
    }
    if (!changed || c->config.n_states == 0) return;
    stress_expect(fkv_step_commit(step), FKV_BAD_STATE, "commit without the states of shortened rows");
    for (uint32_t layer = c->config.base.n_layers; layer < c->config.base.n_layers + c->config.n_states; layer++)
        write_states(l, c, p, step, layer);
}

/* Makes a call that must be rejected during a step, or a call that must not affect the step. */
static void call_in_a_step(stress_run *l, stress_cache *c, const plan *p, fkv_step *step, const bool *written, uint32_t layer) {
    fkv_seq number = p->rows[0].seq;
    fkv_seq other = 0;
    fkv_step *second = NULL;
    uint32_t n = 0;
    fkv_state_row states[STRESS_MAX_SEQS];
    const uint32_t n_layers = c->config.base.n_layers + c->config.n_states;
    const uint32_t at = c->config.at[layer];
    fkv_seq_config config = {.max_tokens = 1};
    switch (stress_below(&l->random, 12)) {
    case 0: stress_expect(fkv_seq_open(c->cache, &config, &other, NULL), FKV_BAD_STATE, "open in a step"); break;
    case 1: stress_expect(fkv_seq_fork(c->cache, number, p->seqs[0]->max_tokens, &other), FKV_BAD_STATE, "fork in a step"); break;
    case 2: stress_expect(fkv_seq_truncate(c->cache, number, 0), FKV_BAD_STATE, "truncate in a step"); break;
    case 3: stress_expect(fkv_prefix_clear(c->cache), FKV_BAD_STATE, "clear in a step"); break;
    case 4: stress_expect(fkv_prefix_insert(c->cache, number, l->ids, 0), FKV_BAD_STATE, "insert in a step"); break;
    case 5: stress_expect(fkv_step_begin(c->cache, p->rows, p->n_rows, &second), FKV_BAD_STATE, "step in a step"); break;
    case 6: stress_expect(fkv_write(step, n_layers, l->rows[0], l->rows[1]), FKV_BAD_ARGUMENT, "write"); break;
    case 7: stress_expect(fkv_seq_reserve(c->cache, number, 1), FKV_BAD_STATE, "reserve in a step"); break;
    case 8: stress_expect(fkv_prefix_match(c->cache, &config, &n), FKV_OK, "match in a step"); break;
    case 9:
        if (written[layer] && is_state(l, layer))
            stress_expect(fkv_state_rows(step, at, states), FKV_BAD_STATE, "second call for states");
        else if (written[layer])
            stress_expect(fkv_write(step, at, l->rows[0], v_rows(l, layer)), FKV_BAD_STATE, "second write");
        break;
    case 10:
        if (is_state(l, layer))
            stress_expect(fkv_attend(step, at, l->rows[2], l->rows[3]), FKV_BAD_ARGUMENT, "attend of a state layer");
        else if (!written[layer])
            stress_expect(fkv_attend(step, at, l->rows[2], l->rows[3]), FKV_BAD_STATE, "attend before write");
        break;
    default:
        for (uint32_t i = 0; i < n_layers; i++) {
            if (written[i]) continue;
            stress_expect(fkv_step_commit(step), FKV_BAD_STATE, "early commit");
            break;
        }
    }
    l->counts->bad_calls++;
}

/* Closes any sequence, with or without rows in the step. Its ID becomes invalid immediately, while its rows stay until the end of
 * the step. */
static void close_in_a_step(stress_run *l, stress_cache *c) {
    stress_seq *seq = &c->seqs[stress_below(&l->random, c->n_seqs)];
    uint32_t n = 0;
    fkv_stats now;
    if (seq->closing) return;
    stress_expect(fkv_seq_close(c->cache, seq->number), FKV_OK, "close in a step");
    stress_expect(fkv_seq_close(c->cache, seq->number), FKV_BAD_SEQ, "second close in a step");
    stress_expect(fkv_seq_length(c->cache, seq->number, &n), FKV_BAD_SEQ, "length of a sequence closed in the step");
    seq->closing = true;
    uint32_t n_open = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) n_open += !c->seqs[i].closing;
    stress_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    if (now.seqs != n_open) stress_fail("the statistics count %u sequences in a step, expected %u", now.seqs, n_open);
    l->counts->closes_in_steps++;
}

static void remove_closed(stress_cache *c) {
    for (uint32_t i = c->n_seqs; i-- > 0;)
        if (c->seqs[i].closing) stress_seq_remove(c, &c->seqs[i]);
}

static void end_step(stress_run *l, stress_cache *c, const plan *p, fkv_step *step, bool commit) {
    stress_expect(commit ? fkv_step_commit(step) : fkv_step_abort(step), FKV_OK, commit ? "commit" : "abort");
    if (commit) {
        c->expected_stats.steps++;
        for (uint32_t i = 0; i < p->n_rows; i++) {
            c->expected_stats.tokens += p->seqs[i]->closing ? 0 : p->rows[i].n_tokens;
            stress_seq_grown(c, p->seqs[i]);
        }
        l->counts->commits++;
    } else {
        for (uint32_t i = 0; i < p->n_rows; i++) p->seqs[i]->n -= p->rows[i].n_tokens;
        c->expected_stats.aborts++;
        l->counts->aborts++;
    }
    if (stress_chance(&l->random, 5)) {
        stress_expect(fkv_step_commit(step), FKV_BAD_STATE, "commit after the end");
        stress_expect(fkv_write(step, c->config.at[0], l->rows[0], l->rows[1]), FKV_BAD_STATE, "write after the end");
    }
}

/* Begins a step with invalid rows, which must be rejected. */
static void refused_step(stress_run *l, stress_cache *c, plan p) {
    fkv_step *step = NULL;
    stress_random *r = &l->random;
    fkv_row *row = &p.rows[stress_below(r, p.n_rows)];
    fkv_status expected = FKV_BAD_ARGUMENT;
    switch (stress_below(r, 4)) {
    case 0: row->n_tokens = 0; break;
    case 1:
        row->n_tokens = UINT32_MAX - stress_below(r, 1000);
        expected = FKV_SEQ_FULL;
        break;
    case 2:
        row->seq = c->closed;
        expected = FKV_BAD_SEQ;
        break;
    default: p.n_rows = 0;
    }
    stress_expect(fkv_step_begin(c->cache, p.rows, p.n_rows, &step), expected, "step of impossible rows");
    l->counts->refusals++;
}

bool stress_step(stress_run *l, stress_cache *c) {
    if (c->n_seqs == 0) return false;
    stress_random *r = &l->random;
    plan p = draw_plan(l, c);
    if (p.n_rows == 0) return false;
    if (stress_chance(r, 4)) refused_step(l, c, p);
    fkv_step *step = NULL;
    stress_expect(fkv_step_begin(c->cache, p.rows, p.n_rows, &step), FKV_OK, "step begin");
    push_tokens(l, c, &p);

    uint32_t n_layers = c->config.base.n_layers + c->config.n_states;
    uint32_t order[STRESS_MAX_ALL_LAYERS];
    bool written[STRESS_MAX_ALL_LAYERS] = {false};
    for (uint32_t i = 0; i < n_layers; i++) order[i] = i;
    if (stress_chance(r, 20)) {
        uint32_t other = stress_below(r, n_layers);
        order[0] = other;
        order[other] = 0;
    }
    /* true if the step writes rows without computing attention */
    bool silent = p.work > l->config.step_work || stress_chance(r, 5);
    bool late = stress_chance(r, 20); /* true if all layers are written before attention is first computed */
    bool commit = stress_chance(r, 85);
    uint32_t n_written = commit ? n_layers : stress_between(r, 0, n_layers);
    for (uint32_t i = 0; i < n_written; i++) {
        if (stress_chance(r, 5)) call_in_a_step(l, c, &p, step, written, order[i]);
        if (stress_chance(r, 3)) close_in_a_step(l, c);
        write_layer(l, c, &p, step, order[i]);
        written[order[i]] = true;
        if (!silent && !late) attend_layer(l, c, &p, step, order[i]);
    }
    for (uint32_t i = 0; i < n_written && !silent && (late || stress_chance(r, 3)); i++) attend_layer(l, c, &p, step, order[i]);
    if (n_written == n_layers && stress_chance(r, 25)) keep_tokens(l, c, &p, step);
    end_step(l, c, &p, step, commit);
    remove_closed(c);
    if (c->config.n_states > 0 && stress_chance(r, 40)) stress_snapshot(l, c);
    l->counts->steps++;
    return true;
}
