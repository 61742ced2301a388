/* Operations that the stress test performs between steps: open, fork, truncate, close, prefix operations, saving and loading of
 * page files, and calls that must be rejected.
 */
#include "stress_operations.h"

#include <string.h>

enum { TENANTS = 3 };

static bool admission_is_predictable(const stress_cache *c) {
    return STRESS_DOMAIN.pins_are_harmless || stress_cache_pinned(c) == 0;
}

static stress_seq *any_seq(stress_run *l, stress_cache *c) { return &c->seqs[stress_below(&l->random, c->n_seqs)]; }

static uint32_t draw_max_tokens(stress_run *l, const stress_cache *c) {
    uint32_t most = c->config.base.max_tokens;
    if (c->config.long_history) return most / 2;
    if (stress_chance(&l->random, 2)) return most + stress_between(&l->random, 1, 50);
    return stress_chance(&l->random, 10) ? most
                                         : stress_between(&l->random, 1, stress_chance(&l->random, 50) ? most : 1 + most / 3);
}

bool stress_admitted(stress_run *l, const stress_cache *c, uint32_t max_tokens, fkv_status status, const char *call) {
    const fkv_config *config = &c->config.base;
    bool too_long = max_tokens > config->max_tokens;
    bool too_many = c->n_seqs == config->max_seqs;
    bool sure = stress_cache_promised(c) + max_tokens <= config->max_tokens && admission_is_predictable(c);
    bool refused = (status == FKV_SEQS_FULL && too_many) || (status == FKV_POOL_FULL && !(sure && !too_long));
    if (status != FKV_OK && !refused)
        stress_fail("%s of %u tokens failed: %s (%s)", call, max_tokens, fkv_status_name(status), fkv_message());
    if (status == FKV_OK && (too_long || too_many))
        stress_fail("%s of %u tokens was admitted, although the sequence is too long or there are too many sequences", call,
                    max_tokens);
    l->counts->refusals += refused;
    return status == FKV_OK;
}

/* ---- sequences ---- */

static void reserve_seq(stress_run *l, stress_cache *c) {
    stress_seq *seq = any_seq(l, c);
    uint32_t before = seq->max_tokens;
    uint32_t after = stress_chance(&l->random, 50) ? draw_max_tokens(l, c) : stress_between(&l->random, seq->n, seq->max_tokens);
    fkv_status status = fkv_seq_reserve(c->cache, seq->number, after);
    if (after == 0 || after < seq->n) {
        stress_expect(status, FKV_BAD_ARGUMENT, "reserve of less than the length");
        return;
    }
    bool sure = after <= before ||
                (stress_cache_promised(c) - before + after <= c->config.base.max_tokens && admission_is_predictable(c));
    if (status == FKV_POOL_FULL && !sure) {
        l->counts->refusals++;
        return;
    }
    stress_expect(status, after > c->config.base.max_tokens ? FKV_POOL_FULL : FKV_OK, "reserve");
    stress_seq_resize(seq, after);
    stress_tree_settle(c);
    l->counts->reserves++;
}

static void close_seq(stress_run *l, stress_cache *c) {
    stress_seq *seq = any_seq(l, c);
    stress_expect(fkv_seq_close(c->cache, seq->number), FKV_OK, "close");
    stress_seq_remove(c, seq);
    l->counts->closes++;
}

static void open_seq(stress_run *l, stress_cache *c) {
    stress_random *r = &l->random;
    uint32_t document = stress_below(r, c->config.n_documents);
    fkv_seq_config config = {.max_tokens = draw_max_tokens(l, c),
                             .tenant = stress_chance(r, 70) ? 1 : stress_between(r, 1, TENANTS)};
    if (stress_chance(r, 85)) {
        uint32_t most = config.max_tokens < c->config.base.max_tokens ? config.max_tokens + 2 : c->config.base.max_tokens;
        config.n_prompt = c->config.long_history ? stress_between(r, STRESS_SPLITS_DOUBLE - 40, STRESS_SPLITS_DOUBLE)
                                                 : stress_between(r, 0, most);
        config.prompt = l->ids;
        for (uint32_t i = 0; i < config.n_prompt; i++) l->ids[i] = stress_document_token(&c->config, document, i);
        if (config.n_prompt > 0 && stress_chance(r, 20)) l->ids[stress_below(r, config.n_prompt)] ^= 1;
    }
    fkv_seq number = 0;
    uint32_t n_shared = UINT32_MAX;
    uint32_t predicted = UINT32_MAX;
    stress_expect(fkv_prefix_match(c->cache, &config, &predicted), FKV_OK, "match");
    fkv_status status = fkv_seq_open(c->cache, &config, &number, &n_shared);
    if (!stress_admitted(l, c, config.max_tokens, status, "open")) {
        if (c->n_seqs > 0 && stress_chance(r, 60)) close_seq(l, c); /* closes a sequence to make room for the next one */
        return;
    }

    uint32_t n_prompt = config.n_prompt < config.max_tokens ? config.n_prompt : config.max_tokens;
    uint32_t match = stress_tree_match(c, config.tenant, l->ids, n_prompt);
    if (n_shared > match || n_shared % c->config.base.page_tokens != 0 || (c->exact && n_shared != match) ||
        n_shared != predicted)
        stress_fail("the new sequence shares %u tokens, but this tenant has inserted %u and fkv_prefix_match() returned %u",
                    n_shared, match, predicted);
    stress_seq *seq = stress_seq_add(c, number, config.tenant, config.tenant, config.max_tokens);
    seq->document = document;
    seq->n_prompt = n_prompt;
    for (uint32_t i = 0; i < n_shared; i++) stress_seq_push(c, seq, l->ids[i]);
    seq->n_shared = n_shared;
    stress_seq_without_spare(c, seq);
    c->expected_stats.hits += n_shared > 0;
    c->expected_stats.hit_tokens += n_shared;
    l->counts->opened++;
    l->counts->hits += n_shared > 0;
    l->counts->state_hits += n_shared > 0 && c->config.n_states > 0;
    stress_tree_settle(c);
}

/* Checks that fkv_seq_reachable() returns the correct length. Returns true if the sequence can be truncated to n tokens. */
static bool is_reachable(const stress_cache *c, const stress_seq *seq, uint32_t n) {
    uint32_t at = UINT32_MAX;
    stress_expect(fkv_seq_reachable(c->cache, seq->number, n, &at), FKV_OK, "reachable");
    if (at > n || stress_is_gone(c, seq, at))
        stress_fail("for a sequence of %u tokens, fkv_seq_reachable() returned the invalid length %u for a target of %u", seq->n,
                    at, n);
    bool has_state = c->config.n_states == 0 || at == 0 || at == seq->n || stress_was_snapped(c, seq, at);
    if (!has_state) stress_fail("fkv_seq_reachable() returned %u tokens, but no snapshot was inserted at this length", at);
    bool is_sure = (n == seq->n || n == 0 || c->config.n_states == 0) && !stress_is_gone(c, seq, n);
    if (is_sure && at != n)
        stress_fail("a sequence of %u tokens can be truncated to %u, but fkv_seq_reachable() returned %u", seq->n, n, at);
    return at == n;
}

static void truncate_to(stress_run *l, stress_cache *c, stress_seq *seq, uint32_t n) {
    bool reachable = n <= seq->n && is_reachable(c, seq, n);
    fkv_status status = fkv_seq_truncate(c->cache, seq->number, n);
    if (n > seq->n) {
        stress_expect(status, FKV_BAD_ARGUMENT, "truncate to more than the length");
        return;
    }
    if (!reachable) {
        stress_expect(status, FKV_GONE, "truncate into dropped tokens");
        l->counts->gone++;
        l->counts->gone_open += !stress_has_window(&c->config) && c->config.n_states == 0;
        l->counts->state_gone += c->config.n_states > 0;
        return;
    }
    l->counts->state_truncates += c->config.n_states > 0 && n > 0 && n < seq->n;
    if (status == FKV_POOL_FULL && (stress_cache_promised(c) > c->config.base.max_tokens || !admission_is_predictable(c))) {
        l->counts->refusals++;
        return;
    }
    stress_expect(status, FKV_OK, "truncate");
    uint32_t whole_pages = n / c->config.base.page_tokens * c->config.base.page_tokens;
    if (seq->n_shared > whole_pages)
        seq->n_shared = whole_pages; /* only full pages can be shared with the tree, and truncation may leave fewer full pages */
    seq->n = n;
    stress_seq_cut(c, seq);
    l->counts->truncates++;
}

static void truncate_seq(stress_run *l, stress_cache *c) {
    stress_seq *seq = any_seq(l, c);
    uint32_t n = stress_between(&l->random, 0, seq->n + 1);
    if (c->config.n_states > 0 && stress_chance(&l->random, 60)) {
        n = stress_between(&l->random, 0, seq->n); /* the nearest snapshot */
        stress_expect(fkv_seq_reachable(c->cache, seq->number, n, &n), FKV_OK, "reachable");
    } else if (stress_chance(&l->random, 60))
        n = seq->n - stress_mostly_small(&l->random, 0, seq->n);
    /* the split size doubles at STRESS_SPLITS_DOUBLE tokens; a longer sequence is truncated to just below that length */
    if (seq->n > STRESS_SPLITS_DOUBLE) n = STRESS_SPLITS_DOUBLE - stress_below(&l->random, 20);
    truncate_to(l, c, seq, n);
}

static void fork_seq(stress_run *l, stress_cache *c) {
    const stress_seq *parent = any_seq(l, c);
    uint32_t max_tokens = draw_max_tokens(l, c);
    if (max_tokens < parent->n && stress_chance(&l->random, 90)) max_tokens = parent->n;
    fkv_seq number = 0;
    fkv_status status = fkv_seq_fork(c->cache, parent->number, max_tokens, &number);
    if (max_tokens < parent->n || max_tokens == 0) {
        stress_expect(status, FKV_BAD_ARGUMENT, "fork shorter than its parent");
        return;
    }
    if (!stress_admitted(l, c, max_tokens, status, "fork")) return;
    stress_seq *child = stress_seq_add(c, number, parent->tenant, parent->origin, max_tokens);
    memcpy((void *)child->tokens, (const void *)parent->tokens, parent->n * sizeof *child->tokens);
    child->n = parent->n;
    child->n_shared = parent->n_shared;
    child->open_from = parent->open_from;
    child->document = stress_chance(&l->random, 50) ? parent->document : stress_between(&l->random, 0, 1000);
    l->counts->forks++;
    stress_tree_settle(c);
    if (child->n > 0 &&
        stress_chance(&l->random, 30)) /* the child is truncated, so that it shares its last page with a longer parent */
        truncate_to(l, c, child, child->n - stress_between(&l->random, 1, child->n < 8 ? child->n : 8));
}

/* ---- prefixes ---- */

void stress_snapshot(stress_run *l, stress_cache *c) {
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        const stress_seq *seq = &c->seqs[i];
        if (seq->n == 0 || seq->n % c->config.base.page_tokens != 0 || seq->origin != seq->tenant) continue;
        for (uint32_t t = 0; t < seq->n; t++) l->ids[t] = seq->tokens[t]->id;
        stress_expect(fkv_prefix_insert(c->cache, seq->number, l->ids, seq->n), FKV_OK, "insert of a snapshot");
        stress_tree_offer(c, seq, seq->n);
        l->counts->inserts++;
    }
}

static void insert_prefix(stress_run *l, stress_cache *c) {
    const stress_seq *seq = any_seq(l, c);
    for (int i = 0; i < 3 && seq->n < c->config.base.page_tokens; i++) seq = any_seq(l, c);
    for (int i = 0; i < 5 && c->config.n_states > 0 && seq->n % c->config.base.page_tokens != 0; i++) seq = any_seq(l, c);
    if (seq->origin != seq->tenant)
        return; /* the rows were computed for another tenant, so they must not be inserted for this tenant */
    uint32_t n = stress_chance(&l->random, 70) ? seq->n : stress_between(&l->random, 0, seq->n);
    for (uint32_t i = 0; i < n; i++) l->ids[i] = seq->tokens[i]->id;
    uint32_t held = n < seq->n_shared ? n / c->config.base.page_tokens * c->config.base.page_tokens : seq->n_shared;
    if (held > 0 && stress_has_full_layer(&c->config) && stress_chance(&l->random, 10)) {
        l->ids[stress_below(&l->random, held)] ^= 1;
        stress_expect(fkv_prefix_insert(c->cache, seq->number, l->ids, n), FKV_BAD_ARGUMENT, "insert of wrong tokens");
        l->counts->bad_calls++;
        return;
    }
    stress_expect(fkv_prefix_insert(c->cache, seq->number, l->ids, n), FKV_OK, "insert");
    stress_tree_offer(c, seq, n);
    l->counts->inserts++;
}

/* Removes a snapshot, unless a sequence uses it. */
static void drop_snapshot(stress_run *l, stress_cache *c) {
    const stress_seq *seq = any_seq(l, c);
    const uint32_t n_pages = seq->n / c->config.base.page_tokens;
    if (c->config.n_states == 0 || n_pages == 0) return;
    const uint32_t n = stress_between(&l->random, 1, n_pages) * c->config.base.page_tokens;
    for (uint32_t i = 0; i < n; i++) l->ids[i] = seq->tokens[i]->id;
    stress_expect(fkv_snapshot_drop(c->cache, seq->tenant, l->ids, n), FKV_OK, "snapshot drop");
    l->counts->drops++;
}

static void clear_prefixes(stress_run *l, stress_cache *c) {
    stress_expect(fkv_prefix_clear(c->cache), FKV_OK, "clear");
    stress_tree_clear(c);
    fkv_stats now;
    stress_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    for (uint32_t g = 0; g < now.n_groups; g++)
        if (now.groups[g].cached != 0)
            stress_fail("fkv_prefix_clear() left %u cached pages in group %u", now.groups[g].cached, g);
    l->counts->clears++;
}

/* ---- rejected calls ---- */

static void bad_call(stress_run *l, stress_cache *c) {
    stress_random *r = &l->random;
    fkv_seq number = 0;
    uint32_t n = 0;
    fkv_step *step = NULL;
    fkv_seq unknown = stress_chance(r, 50) ? c->closed : stress_draw(r) | UINT64_C(1) << 63;
    fkv_seq_config none = {.max_tokens = 0};
    const stress_seq *seq = c->n_seqs > 0 ? any_seq(l, c) : NULL;
    uint32_t step_tokens = c->config.base.max_step_tokens;
    switch (stress_below(r, 10)) {
    case 0: stress_expect(fkv_seq_close(c->cache, unknown), FKV_BAD_SEQ, "close of an unknown sequence"); break;
    case 1: stress_expect(fkv_seq_truncate(c->cache, unknown, 0), FKV_BAD_SEQ, "truncate of an unknown sequence"); break;
    case 2: stress_expect(fkv_seq_fork(c->cache, unknown, 10, &number), FKV_BAD_SEQ, "fork of an unknown sequence"); break;
    case 3: stress_expect(fkv_seq_length(c->cache, unknown, &n), FKV_BAD_SEQ, "length of an unknown sequence"); break;
    case 4: stress_expect(fkv_prefix_insert(c->cache, unknown, l->ids, 0), FKV_BAD_SEQ, "insert of an unknown sequence"); break;
    case 5: stress_expect(fkv_seq_open(c->cache, &none, &number, &n), FKV_BAD_ARGUMENT, "open for no tokens"); break;
    case 6:
        if (seq != NULL && seq->max_tokens - seq->n > step_tokens)
            stress_expect(fkv_step_begin(c->cache, &(fkv_row){seq->number, step_tokens + 1}, 1, &step), FKV_STEP_FULL,
                          "step larger than max_step_tokens");
        break;
    case 7: stress_expect(fkv_seq_reserve(c->cache, unknown, 10), FKV_BAD_SEQ, "reserve of an unknown sequence"); break;
    case 8:
        if (seq != NULL)
            stress_expect(fkv_step_begin(c->cache, &(fkv_row){seq->number, seq->max_tokens - seq->n + 1}, 1, &step), FKV_SEQ_FULL,
                          "step beyond max_tokens");
        break;
    default:
        if (seq != NULL && seq->n < seq->max_tokens && c->config.base.max_seqs > 1) {
            fkv_row twice[2] = {{seq->number, 1}, {seq->number, 1}};
            stress_expect(fkv_step_begin(c->cache, twice, 2, &step), FKV_BAD_ARGUMENT, "step with a sequence twice");
        }
    }
    l->counts->bad_calls++;
}

/* ---- random operation ---- */

typedef struct operation {
    uint32_t weight;
    bool needs_seq;
    void (*run)(stress_run *l, stress_cache *c);
} operation;

static const operation OPERATIONS[] = {
    {14, false, open_seq},
    {6, true, fork_seq},
    {8, true, truncate_seq},
    {6, true, close_seq},
    {4, true, reserve_seq},
    {9, true, insert_prefix},
    {1, false, clear_prefixes},
    {5, true, stress_save},
    {5, false, stress_load},
    {5, false, bad_call},
    {1, true, drop_snapshot},
    {4, true, stress_store_prefix},
    {5, false, stress_restore_prefix},
};
enum { N_OPERATIONS = sizeof OPERATIONS / sizeof OPERATIONS[0], STEP_PERCENT = 50 };

static const operation *draw_operation(stress_random *r) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < N_OPERATIONS; i++) sum += OPERATIONS[i].weight;
    uint32_t at = stress_below(r, sum);
    for (uint32_t i = 0;; i++) {
        if (at < OPERATIONS[i].weight) return &OPERATIONS[i];
        at -= OPERATIONS[i].weight;
    }
}

void stress_operate(stress_run *l) {
    stress_cache *c = &l->caches[stress_below(&l->random, l->n_caches)];
    if (!stress_chance(&l->random, STEP_PERCENT) || !stress_step(l, c)) {
        const operation *o = draw_operation(&l->random);
        if (c->n_seqs > 0 || !o->needs_seq) o->run(l, c);
    }
    stress_cache_check(c, stress_chance(&l->random, 25));
}
