/* Steps of the random-life test: any mix of prefill chunks and decode rows, layers in any order, answers to some or all layers,
 * calls that have no place in a step, commit or abort.
 */
#include "life_operations.h"

#include <string.h>

typedef struct plan {
    fkv_row rows[LIFE_MAX_SEQS];
    life_seq *seqs[LIFE_MAX_SEQS];
    uint32_t n_rows;
    uint32_t n_tokens;
    uint64_t work; /* of its answers */
} plan;

/* Tokens that a sequence gets, at most `most`: one, a few, or as many as may be. */
static uint32_t draw_tokens(life_random *r, const life_seq *seq, uint32_t most) {
    uint32_t prefill = seq->n < seq->n_prompt ? seq->n_prompt - seq->n : 0;
    if (seq->n_prompt + 100 > LIFE_PIECES_DOUBLE && prefill > 0) return prefill < most ? prefill : most;
    if (life_chance(r, prefill > 0 ? 10 : 60)) return 1;
    if (seq->n + 100 > LIFE_PIECES_DOUBLE) return life_between(r, 1, most < 30 ? most : 30);
    return life_chance(r, 30) ? most : life_mostly_small(r, 1, most);
}

static plan draw_plan(life *l, life_cache *c) {
    plan p = {.n_rows = 0};
    life_random *r = &l->random;
    uint32_t left = c->config.base.max_step_tokens;
    uint32_t keep = life_chance(r, 30) ? 100 : 60;
    uint32_t first = life_below(r, c->n_seqs);
    for (uint32_t i = 0; i < c->n_seqs && left > 0; i++) {
        life_seq *seq = &c->seqs[(first + i) % c->n_seqs];
        uint32_t room = seq->max_tokens - seq->n < left ? seq->max_tokens - seq->n : left;
        if (room == 0 || (p.n_rows > 0 && !life_chance(r, keep))) continue;
        uint32_t n = draw_tokens(r, seq, room);
        p.seqs[p.n_rows] = seq;
        p.rows[p.n_rows++] = (fkv_row){seq->number, n};
        p.n_tokens += n;
        p.work += (uint64_t)n * (seq->n + n / 2 + 1) * life_token_work(&c->config);
        left -= n;
    }
    return p;
}

/* The tokens are pushed at once; an abort takes them back. */
static void push_tokens(life *l, life_cache *c, const plan *p) {
    for (uint32_t i = 0; i < p->n_rows; i++) {
        life_seq *seq = p->seqs[i];
        uint32_t n = p->rows[i].n_tokens;
        uint32_t astray = life_chance(&l->random, 10) ? life_below(&l->random, n) : n; /* the one that is of no document */
        for (uint32_t t = 0; t < n; t++) {
            uint32_t id = life_document_token(&c->config, seq->document, seq->n);
            if (t == astray) id = life_below(&l->random, 3);
            life_seq_push(c, seq, id);
        }
    }
}

static void gather_rows(life *l, const plan *p, uint32_t layer, uint32_t what) {
    uint8_t *at = l->rows[what];
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const life_seq *seq = p->seqs[i];
        for (uint32_t t = seq->n - p->rows[i].n_tokens; t < seq->n; t++, at += life_rows_bytes(&l->world, layer, what))
            life_rows(&l->world, seq->tokens[t], layer, what, at);
    }
}

static void write_layer(life *l, const plan *p, fkv_step *step, uint32_t layer) {
    gather_rows(l, p, layer, LIFE_K);
    gather_rows(l, p, layer, LIFE_V);
    life_expect(fkv_write(step, layer, l->rows[LIFE_K], l->rows[LIFE_V]), FKV_OK, "write");
}

static void attend_layer(life *l, life_cache *c, const plan *p, fkv_step *step, uint32_t layer) {
    size_t token_bytes = life_rows_bytes(&l->world, layer, LIFE_Q);
    gather_rows(l, p, layer, LIFE_Q);
    uint8_t *out = l->rows[life_chance(&l->random, 25) ? LIFE_Q : 3];
    memset(l->rows[3], 0xff, l->rows_bytes);
    life_expect(fkv_attend(step, layer, l->rows[LIFE_Q], out), FKV_OK, "attend");
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const life_seq *seq = p->seqs[i];
        for (uint32_t n = seq->n - p->rows[i].n_tokens + 1; n <= seq->n; n++, out += token_bytes)
            life_check_answer(&l->world, seq->tokens, n, layer, out);
    }
    fkv_stats now;
    life_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    if (now.packed_bytes_read <= c->figures.packed_bytes_read) life_fail("attention read no packed bytes");
    c->figures.packed_bytes_read = now.packed_bytes_read;
}

/* What has no place in a step, whatever was written already. */
static void call_in_a_step(life *l, life_cache *c, const plan *p, fkv_step *step, const bool *written, uint32_t layer) {
    fkv_seq number = p->rows[0].seq;
    fkv_seq other = 0;
    fkv_step *second = NULL;
    uint32_t n = 0;
    fkv_seq_config config = {.max_tokens = 1};
    switch (life_below(&l->random, 12)) {
    case 0: life_expect(fkv_seq_open(c->cache, &config, &other, NULL), FKV_BAD_STATE, "open in a step"); break;
    case 1: life_expect(fkv_seq_fork(c->cache, number, p->seqs[0]->max_tokens, &other), FKV_BAD_STATE, "fork in a step"); break;
    case 2: life_expect(fkv_seq_truncate(c->cache, number, 0), FKV_BAD_STATE, "truncate in a step"); break;
    case 3: life_expect(fkv_prefix_clear(c->cache), FKV_BAD_STATE, "clear in a step"); break;
    case 4: life_expect(fkv_prefix_insert(c->cache, number, l->ids, 0), FKV_BAD_STATE, "insert in a step"); break;
    case 5: life_expect(fkv_step_begin(c->cache, p->rows, p->n_rows, &second), FKV_BAD_STATE, "step in a step"); break;
    case 6: life_expect(fkv_write(step, c->config.base.n_layers, l->rows[0], l->rows[1]), FKV_BAD_ARGUMENT, "write"); break;
    case 7: life_expect(fkv_seq_reserve(c->cache, number, 1), FKV_BAD_STATE, "reserve in a step"); break;
    case 8: life_expect(fkv_prefix_match(c->cache, &config, &n), FKV_OK, "match in a step"); break;
    case 9:
        if (written[layer]) life_expect(fkv_write(step, layer, l->rows[0], l->rows[1]), FKV_BAD_STATE, "second write");
        break;
    case 10:
        if (!written[layer]) life_expect(fkv_attend(step, layer, l->rows[2], l->rows[3]), FKV_BAD_STATE, "attend before write");
        break;
    default:
        for (uint32_t i = 0; i < c->config.base.n_layers; i++) {
            if (written[i]) continue;
            life_expect(fkv_step_commit(step), FKV_BAD_STATE, "early commit");
            break;
        }
    }
    l->counts->bad_calls++;
}

/* Any sequence, with rows in the step or without: its number is gone at once, its rows stay until the end. */
static void close_in_a_step(life *l, life_cache *c) {
    life_seq *seq = &c->seqs[life_below(&l->random, c->n_seqs)];
    uint32_t n = 0;
    fkv_stats now;
    if (seq->closing) return;
    life_expect(fkv_seq_close(c->cache, seq->number), FKV_OK, "close in a step");
    life_expect(fkv_seq_close(c->cache, seq->number), FKV_BAD_SEQ, "second close in a step");
    life_expect(fkv_seq_length(c->cache, seq->number, &n), FKV_BAD_SEQ, "length of what was closed in the step");
    seq->closing = true;
    uint32_t n_open = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) n_open += !c->seqs[i].closing;
    life_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    if (now.seqs != n_open) life_fail("%u sequences in a step, %u are open", now.seqs, n_open);
    l->counts->closes_in_steps++;
}

static void remove_closed(life_cache *c) {
    for (uint32_t i = c->n_seqs; i-- > 0;)
        if (c->seqs[i].closing) life_seq_remove(c, &c->seqs[i]);
}

static void end_step(life *l, life_cache *c, const plan *p, fkv_step *step, bool commit) {
    life_expect(commit ? fkv_step_commit(step) : fkv_step_abort(step), FKV_OK, commit ? "commit" : "abort");
    if (commit) {
        c->figures.steps++;
        for (uint32_t i = 0; i < p->n_rows; i++) {
            c->figures.tokens += p->seqs[i]->closing ? 0 : p->rows[i].n_tokens;
            life_seq_grown(c, p->seqs[i]);
        }
        l->counts->commits++;
    } else {
        for (uint32_t i = 0; i < p->n_rows; i++) p->seqs[i]->n -= p->rows[i].n_tokens;
        c->figures.aborts++;
        l->counts->aborts++;
    }
    if (life_chance(&l->random, 5)) {
        life_expect(fkv_step_commit(step), FKV_BAD_STATE, "commit after the end");
        life_expect(fkv_write(step, 0, l->rows[0], l->rows[1]), FKV_BAD_STATE, "write after the end");
    }
}

/* Rows that no step takes. */
static void refused_step(life *l, life_cache *c, plan p) {
    fkv_step *step = NULL;
    life_random *r = &l->random;
    fkv_row *row = &p.rows[life_below(r, p.n_rows)];
    fkv_status expected = FKV_BAD_ARGUMENT;
    switch (life_below(r, 4)) {
    case 0: row->n_tokens = 0; break;
    case 1:
        row->n_tokens = UINT32_MAX - life_below(r, 1000);
        expected = FKV_SEQ_FULL;
        break;
    case 2:
        row->seq = c->closed;
        expected = FKV_BAD_SEQ;
        break;
    default: p.n_rows = 0;
    }
    life_expect(fkv_step_begin(c->cache, p.rows, p.n_rows, &step), expected, "step of impossible rows");
    l->counts->refusals++;
}

bool life_step(life *l, life_cache *c) {
    if (c->n_seqs == 0) return false;
    life_random *r = &l->random;
    plan p = draw_plan(l, c);
    if (p.n_rows == 0) return false;
    if (life_chance(r, 4)) refused_step(l, c, p);
    fkv_step *step = NULL;
    life_expect(fkv_step_begin(c->cache, p.rows, p.n_rows, &step), FKV_OK, "step begin");
    push_tokens(l, c, &p);

    uint32_t n_layers = c->config.base.n_layers;
    uint32_t order[LIFE_MAX_LAYERS];
    bool written[LIFE_MAX_LAYERS] = {false};
    for (uint32_t i = 0; i < n_layers; i++) order[i] = i;
    if (life_chance(r, 20)) {
        uint32_t other = life_below(r, n_layers);
        order[0] = other;
        order[other] = 0;
    }
    bool silent = p.work > l->config.step_work || life_chance(r, 5); /* rows go in, nobody asks */
    bool late = life_chance(r, 20);                                  /* all layers are written first */
    bool commit = life_chance(r, 85);
    uint32_t n_written = commit ? n_layers : life_between(r, 0, n_layers);
    for (uint32_t i = 0; i < n_written; i++) {
        if (life_chance(r, 5)) call_in_a_step(l, c, &p, step, written, order[i]);
        if (life_chance(r, 3)) close_in_a_step(l, c);
        write_layer(l, &p, step, order[i]);
        written[order[i]] = true;
        if (!silent && !late) attend_layer(l, c, &p, step, order[i]);
    }
    for (uint32_t i = 0; i < n_written && !silent && (late || life_chance(r, 3)); i++) attend_layer(l, c, &p, step, order[i]);
    end_step(l, c, &p, step, commit);
    remove_closed(c);
    l->counts->steps++;
    return true;
}
