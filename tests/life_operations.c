/* Operations of the random-life test between steps: open, fork, truncate, close, prefixes, and calls that must be refused. */
#include "life_operations.h"

#include <string.h>

enum { TENANTS = 3 };

static bool may_be_sure(const life_cache *c) { return LIFE_DOMAIN.pins_are_harmless || life_cache_pinned(c) == 0; }

static life_seq *any_seq(life *l, life_cache *c) { return &c->seqs[life_below(&l->random, c->n_seqs)]; }

static uint32_t draw_max_tokens(life *l, const life_cache *c) {
    uint32_t most = c->config.base.max_tokens;
    if (c->config.long_history) return most / 2;
    if (life_chance(&l->random, 2)) return most + life_between(&l->random, 1, 50);
    return life_chance(&l->random, 10) ? most : life_between(&l->random, 1, life_chance(&l->random, 50) ? most : 1 + most / 3);
}

bool life_admitted(life *l, const life_cache *c, uint32_t max_tokens, fkv_status status, const char *call) {
    const fkv_config *config = &c->config.base;
    bool too_long = max_tokens > config->max_tokens;
    bool too_many = c->n_seqs == config->max_seqs;
    bool sure = life_cache_promised(c) + max_tokens <= config->max_tokens && may_be_sure(c);
    bool refused = (status == FKV_SEQS_FULL && too_many) || (status == FKV_POOL_FULL && !(sure && !too_long));
    if (status != FKV_OK && !refused)
        life_fail("%s of %u tokens: %s (%s)", call, max_tokens, fkv_status_name(status), fkv_message());
    if (status == FKV_OK && (too_long || too_many)) life_fail("%s of %u tokens was admitted", call, max_tokens);
    l->counts->refusals += refused;
    return status == FKV_OK;
}

/* ---- sequences ---- */

static void reserve_seq(life *l, life_cache *c) {
    life_seq *seq = any_seq(l, c);
    uint32_t before = seq->max_tokens;
    uint32_t after = life_chance(&l->random, 50) ? draw_max_tokens(l, c) : life_between(&l->random, seq->n, seq->max_tokens);
    fkv_status status = fkv_seq_reserve(c->cache, seq->number, after);
    if (after == 0 || after < seq->n) {
        life_expect(status, FKV_BAD_ARGUMENT, "reserve of less than there is");
        return;
    }
    bool sure = after <= before || (life_cache_promised(c) - before + after <= c->config.base.max_tokens && may_be_sure(c));
    if (status == FKV_POOL_FULL && !sure) {
        l->counts->refusals++;
        return;
    }
    life_expect(status, after > c->config.base.max_tokens ? FKV_POOL_FULL : FKV_OK, "reserve");
    life_seq_resize(seq, after);
    life_tree_settle(c);
    l->counts->reserves++;
}

static void close_seq(life *l, life_cache *c) {
    life_seq *seq = any_seq(l, c);
    life_expect(fkv_seq_close(c->cache, seq->number), FKV_OK, "close");
    life_seq_remove(c, seq);
    l->counts->closes++;
}

static void open_seq(life *l, life_cache *c) {
    life_random *r = &l->random;
    uint32_t document = life_below(r, c->config.n_documents);
    fkv_seq_config config = {.max_tokens = draw_max_tokens(l, c), .tenant = life_chance(r, 70) ? 1 : life_between(r, 1, TENANTS)};
    if (life_chance(r, 85)) {
        uint32_t most = config.max_tokens < c->config.base.max_tokens ? config.max_tokens + 2 : c->config.base.max_tokens;
        config.n_prompt =
            c->config.long_history ? life_between(r, LIFE_PIECES_DOUBLE - 40, LIFE_PIECES_DOUBLE) : life_between(r, 0, most);
        config.prompt = l->ids;
        for (uint32_t i = 0; i < config.n_prompt; i++) l->ids[i] = life_document_token(&c->config, document, i);
        if (config.n_prompt > 0 && life_chance(r, 20)) l->ids[life_below(r, config.n_prompt)] ^= 1;
    }
    fkv_seq number = 0;
    uint32_t n_shared = UINT32_MAX;
    uint32_t foretold = UINT32_MAX;
    life_expect(fkv_prefix_match(c->cache, &config, &foretold), FKV_OK, "match");
    fkv_status status = fkv_seq_open(c->cache, &config, &number, &n_shared);
    if (!life_admitted(l, c, config.max_tokens, status, "open")) {
        if (c->n_seqs > 0 && life_chance(r, 60)) close_seq(l, c); /* room for the next */
        return;
    }

    uint32_t n_prompt = config.n_prompt < config.max_tokens ? config.n_prompt : config.max_tokens;
    uint32_t match = life_tree_match(c, config.tenant, l->ids, n_prompt);
    if (n_shared > match || n_shared % c->config.base.page_tokens != 0 || (c->exact && n_shared != match) || n_shared != foretold)
        life_fail("open shares %u tokens, %u were offered by this tenant, match said %u", n_shared, match, foretold);
    life_seq *seq = life_seq_add(c, number, config.tenant, config.tenant, config.max_tokens);
    seq->document = document;
    seq->n_prompt = n_prompt;
    for (uint32_t i = 0; i < n_shared; i++) life_seq_push(c, seq, l->ids[i]);
    seq->n_shared = n_shared;
    life_seq_without_spare(c, seq);
    c->figures.hits += n_shared > 0;
    c->figures.hit_tokens += n_shared;
    l->counts->opened++;
    l->counts->hits += n_shared > 0;
    life_tree_settle(c);
}

static void truncate_to(life *l, life_cache *c, life_seq *seq, uint32_t n) {
    fkv_status status = fkv_seq_truncate(c->cache, seq->number, n);
    if (n > seq->n) {
        life_expect(status, FKV_BAD_ARGUMENT, "truncate to more");
        return;
    }
    if (life_is_gone(c, seq, n)) {
        life_expect(status, FKV_GONE, "truncate into what was dropped");
        l->counts->gone++;
        l->counts->gone_open += !life_has_window(&c->config);
        return;
    }
    if (status == FKV_POOL_FULL && (life_cache_promised(c) > c->config.base.max_tokens || !may_be_sure(c))) {
        l->counts->refusals++;
        return;
    }
    life_expect(status, FKV_OK, "truncate");
    uint32_t whole_pages = n / c->config.base.page_tokens * c->config.base.page_tokens;
    if (seq->n_shared > whole_pages) seq->n_shared = whole_pages; /* its last page may be its own from here on */
    seq->n = n;
    life_seq_cut(c, seq);
    l->counts->truncates++;
}

static void truncate_seq(life *l, life_cache *c) {
    life_seq *seq = any_seq(l, c);
    uint32_t n = life_between(&l->random, 0, seq->n + 1);
    if (life_chance(&l->random, 60)) n = seq->n - life_mostly_small(&l->random, 0, seq->n);
    if (seq->n > LIFE_PIECES_DOUBLE) n = LIFE_PIECES_DOUBLE - life_below(&l->random, 20); /* once more over the edge */
    truncate_to(l, c, seq, n);
}

static void fork_seq(life *l, life_cache *c) {
    const life_seq *parent = any_seq(l, c);
    uint32_t max_tokens = draw_max_tokens(l, c);
    if (max_tokens < parent->n && life_chance(&l->random, 90)) max_tokens = parent->n;
    fkv_seq number = 0;
    fkv_status status = fkv_seq_fork(c->cache, parent->number, max_tokens, &number);
    if (max_tokens < parent->n || max_tokens == 0) {
        life_expect(status, FKV_BAD_ARGUMENT, "fork shorter than its parent");
        return;
    }
    if (!life_admitted(l, c, max_tokens, status, "fork")) return;
    life_seq *child = life_seq_add(c, number, parent->tenant, parent->origin, max_tokens);
    memcpy((void *)child->tokens, (const void *)parent->tokens, parent->n * sizeof *child->tokens);
    child->n = parent->n;
    child->n_shared = parent->n_shared;
    child->open_from = parent->open_from;
    child->document = life_chance(&l->random, 50) ? parent->document : life_between(&l->random, 0, 1000);
    l->counts->forks++;
    life_tree_settle(c);
    if (child->n > 0 && life_chance(&l->random, 30)) /* two lengths in one last page */
        truncate_to(l, c, child, child->n - life_between(&l->random, 1, child->n < 8 ? child->n : 8));
}

/* ---- prefixes ---- */

static void insert_prefix(life *l, life_cache *c) {
    const life_seq *seq = any_seq(l, c);
    for (int i = 0; i < 3 && seq->n < c->config.base.page_tokens; i++) seq = any_seq(l, c);
    if (seq->origin != seq->tenant) return; /* rows of another tenant's history: not what this tenant's tokens give */
    uint32_t n = life_chance(&l->random, 70) ? seq->n : life_between(&l->random, 0, seq->n);
    for (uint32_t i = 0; i < n; i++) l->ids[i] = seq->tokens[i]->id;
    uint32_t held = n < seq->n_shared ? n / c->config.base.page_tokens * c->config.base.page_tokens : seq->n_shared;
    if (held > 0 && life_has_full_layer(&c->config) && life_chance(&l->random, 10)) {
        l->ids[life_below(&l->random, held)] ^= 1;
        life_expect(fkv_prefix_insert(c->cache, seq->number, l->ids, n), FKV_BAD_ARGUMENT, "insert that contradicts");
        l->counts->bad_calls++;
        return;
    }
    life_expect(fkv_prefix_insert(c->cache, seq->number, l->ids, n), FKV_OK, "insert");
    life_tree_offer(c, seq, n);
    l->counts->inserts++;
}

static void clear_prefixes(life *l, life_cache *c) {
    life_expect(fkv_prefix_clear(c->cache), FKV_OK, "clear");
    life_tree_clear(c);
    fkv_stats now;
    life_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    for (uint32_t g = 0; g < now.n_groups; g++)
        if (now.groups[g].cached != 0) life_fail("clear left %u cached pages in group %u", now.groups[g].cached, g);
    l->counts->clears++;
}

/* ---- refused ---- */

static void bad_call(life *l, life_cache *c) {
    life_random *r = &l->random;
    fkv_seq number = 0;
    uint32_t n = 0;
    fkv_step *step = NULL;
    fkv_seq unknown = life_chance(r, 50) ? c->closed : life_draw(r) | UINT64_C(1) << 63;
    fkv_seq_config none = {.max_tokens = 0};
    const life_seq *seq = c->n_seqs > 0 ? any_seq(l, c) : NULL;
    uint32_t step_tokens = c->config.base.max_step_tokens;
    switch (life_below(r, 10)) {
    case 0: life_expect(fkv_seq_close(c->cache, unknown), FKV_BAD_SEQ, "close of no sequence"); break;
    case 1: life_expect(fkv_seq_truncate(c->cache, unknown, 0), FKV_BAD_SEQ, "truncate of no sequence"); break;
    case 2: life_expect(fkv_seq_fork(c->cache, unknown, 10, &number), FKV_BAD_SEQ, "fork of no sequence"); break;
    case 3: life_expect(fkv_seq_length(c->cache, unknown, &n), FKV_BAD_SEQ, "length of no sequence"); break;
    case 4: life_expect(fkv_prefix_insert(c->cache, unknown, l->ids, 0), FKV_BAD_SEQ, "insert of no sequence"); break;
    case 5: life_expect(fkv_seq_open(c->cache, &none, &number, &n), FKV_BAD_ARGUMENT, "open for no tokens"); break;
    case 6:
        if (seq != NULL && seq->max_tokens - seq->n > step_tokens)
            life_expect(fkv_step_begin(c->cache, &(fkv_row){seq->number, step_tokens + 1}, 1, &step), FKV_STEP_FULL,
                        "large step");
        break;
    case 7: life_expect(fkv_seq_reserve(c->cache, unknown, 10), FKV_BAD_SEQ, "reserve of no sequence"); break;
    case 8:
        if (seq != NULL)
            life_expect(fkv_step_begin(c->cache, &(fkv_row){seq->number, seq->max_tokens - seq->n + 1}, 1, &step), FKV_SEQ_FULL,
                        "step beyond the end");
        break;
    default:
        if (seq != NULL && seq->n < seq->max_tokens && c->config.base.max_seqs > 1) {
            fkv_row twice[2] = {{seq->number, 1}, {seq->number, 1}};
            life_expect(fkv_step_begin(c->cache, twice, 2, &step), FKV_BAD_ARGUMENT, "a sequence twice");
        }
    }
    l->counts->bad_calls++;
}

/* ---- one of them ---- */

typedef struct operation {
    uint32_t weight;
    bool needs_seq;
    void (*run)(life *l, life_cache *c);
} operation;

static const operation OPERATIONS[] = {
    {14, false, open_seq},    {6, true, fork_seq},        {7, true, truncate_seq}, {6, true, close_seq},  {4, true, reserve_seq},
    {7, true, insert_prefix}, {1, false, clear_prefixes}, {5, true, life_save},    {5, false, life_load}, {5, false, bad_call},
};
enum { N_OPERATIONS = sizeof OPERATIONS / sizeof OPERATIONS[0], STEP_PERCENT = 50 };

static const operation *draw_operation(life_random *r) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < N_OPERATIONS; i++) sum += OPERATIONS[i].weight;
    uint32_t at = life_below(r, sum);
    for (uint32_t i = 0;; i++) {
        if (at < OPERATIONS[i].weight) return &OPERATIONS[i];
        at -= OPERATIONS[i].weight;
    }
}

void life_operate(life *l) {
    life_cache *c = &l->caches[life_below(&l->random, l->n_caches)];
    if (!life_chance(&l->random, STEP_PERCENT) || !life_step(l, c)) {
        const operation *o = draw_operation(&l->random);
        if (c->n_seqs > 0 || !o->needs_seq) o->run(l, c);
    }
    life_cache_check(c, life_chance(&l->random, 25));
}
