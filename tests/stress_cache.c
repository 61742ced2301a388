/* See stress_cache.h. */
#include "stress_cache.h"

#include <stdlib.h>
#include <string.h>

void stress_expect(fkv_status got, fkv_status expected, const char *call) {
    if (got != expected)
        stress_fail("%s returned %s, expected %s (%s)", call, fkv_status_name(got), fkv_status_name(expected), fkv_message());
}

/* Compares field by field instead of with memcmp(), because padding bytes have undefined values. */
static bool same_plan(const fkv_plan *a, const fkv_plan *b) {
    bool same = a->total_bytes == b->total_bytes && a->slab_bytes == b->slab_bytes && a->tables_bytes == b->tables_bytes &&
                a->scratch_bytes == b->scratch_bytes && a->stacks_bytes == b->stacks_bytes && a->token_bytes == b->token_bytes &&
                a->n_groups == b->n_groups && a->n_threads == b->n_threads;
    for (uint32_t g = 0; same && g < a->n_groups; g++)
        same = a->group_pages[g] == b->group_pages[g] && a->group_page_bytes[g] == b->group_page_bytes[g];
    return same;
}

void stress_cache_open(stress_cache *c, stress_fixture *fixture, const stress_config *config) {
    *c = (stress_cache){.fixture = fixture, .config = *config};
    stress_tree_clear(c);
    fkv_config as_given = stress_config_of(&c->config);
    fkv_plan again;
    stress_expect(fkv_plan_make(&as_given, &c->plan), FKV_OK, "plan");
    stress_expect(fkv_cache_open(&as_given, &c->cache), FKV_OK, "cache open");
    stress_expect(fkv_plan_make(&as_given, &again), FKV_OK, "plan");
    const fkv_plan *p = &c->plan;
    if (!same_plan(p, &again)) stress_fail("the plan changed");
    if (p->total_bytes != p->slab_bytes + p->tables_bytes + p->scratch_bytes + p->stacks_bytes)
        stress_fail("total_bytes of the plan is not the sum of the other sizes");
    stress_expect(fkv_cache_stats(c->cache, &c->expected_stats), FKV_OK, "stats");
    if (c->expected_stats.planned_bytes != p->total_bytes || c->expected_stats.n_groups != p->n_groups)
        stress_fail("the statistics and the plan differ");
}

void stress_cache_close(stress_cache *c) {
    fkv_cache_close(c->cache);
    for (uint32_t i = 0; i < c->n_seqs; i++) free((void *)c->seqs[i].tokens);
    free(c->offered.chains);
    free(c->snapped.chains);
}

/* ---- sequences ---- */

stress_seq *stress_seq_add(stress_cache *c, fkv_seq number, uint64_t tenant, uint64_t origin, uint32_t max_tokens) {
    if (c->n_seqs == c->config.base.max_seqs) stress_fail("there are more sequences than max_seqs");
    for (uint32_t i = 0; i < c->n_seqs; i++)
        if (c->seqs[i].number == number || number == 0)
            stress_fail("the new sequence has ID 0 or the ID of another open sequence");
    stress_seq *seq = &c->seqs[c->n_seqs++];
    *seq = (stress_seq){.number = number, .tenant = tenant, .origin = origin, .max_tokens = max_tokens};
    seq->tokens = (stress_token **)calloc(max_tokens, sizeof *seq->tokens);
    if (seq->tokens == NULL) stress_fail("out of memory allocating a sequence");
    return seq;
}

void stress_seq_remove(stress_cache *c, stress_seq *seq) {
    c->closed = seq->number;
    free((void *)seq->tokens);
    *seq = c->seqs[--c->n_seqs];
}

void stress_seq_resize(stress_seq *seq, uint32_t max_tokens) {
    seq->tokens = (stress_token **)realloc((void *)seq->tokens, max_tokens * sizeof *seq->tokens);
    if (seq->tokens == NULL) stress_fail("out of memory allocating a sequence");
    seq->max_tokens = max_tokens;
}

uint64_t stress_seq_chain(const stress_cache *c, const stress_seq *seq, uint32_t n) {
    return n == 0 ? stress_chain_begin(c->fixture, seq->origin) : seq->tokens[n - 1]->chain;
}

void stress_seq_push(stress_cache *c, stress_seq *seq, uint32_t id) {
    if (seq->n == seq->max_tokens) stress_fail("a token was added to a sequence that already has max_tokens tokens");
    seq->tokens[seq->n] = stress_token_after(c->fixture, stress_seq_chain(c, seq, seq->n), seq->n, id);
    seq->n++;
}

uint64_t stress_cache_promised(const stress_cache *c) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) sum += c->seqs[i].max_tokens;
    return sum;
}

uint32_t stress_cache_pinned(const stress_cache *c) {
    fkv_stats now;
    uint32_t pinned = 0;
    stress_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    for (uint32_t g = 0; g < now.n_groups; g++) pinned += now.groups[g].pinned;
    return pinned;
}

/* Returns the index of the first page that a query at `position` sees through its window, ignoring the sinks. */
static uint32_t first_page(const stress_cache *c, uint32_t window, uint32_t position) {
    return position + 1 > window ? (position + 1 - window) / c->config.base.page_tokens : 0;
}

/* Returns the index of the first page of the span that contains token n. */
static uint32_t span_of(const stress_cache *c, uint32_t n) { return n / c->config.base.page_tokens / STRESS_SPAN * STRESS_SPAN; }

void stress_seq_grown(const stress_cache *c, stress_seq *seq) {
    uint32_t page_tokens = c->config.base.page_tokens;
    uint32_t kept = span_of(c, seq->n > page_tokens ? seq->n - page_tokens : 0);
    if (kept > seq->open_from) seq->open_from = kept;
}

void stress_seq_without_spare(const stress_cache *c, stress_seq *seq) { seq->open_from = span_of(c, seq->n); }

void stress_seq_cut(const stress_cache *c, stress_seq *seq) {
    if (span_of(c, seq->n) < seq->open_from) stress_seq_without_spare(c, seq);
}

bool stress_is_gone(const stress_cache *c, const stress_seq *seq, uint32_t n) {
    uint32_t page_tokens = c->config.base.page_tokens;
    uint32_t length = seq->n;
    uint32_t from = span_of(c, n) > 0 ? span_of(c, n) : 1; /* page 0 is always open */
    if (stress_has_sealed_layer(&c->config) && from * page_tokens < n && from < seq->open_from) return true;
    for (uint32_t i = 0; i < c->config.base.n_layers; i++) {
        const fkv_layer_config *l = &c->config.layers[i];
        if (l->window == 0) continue;
        uint32_t n_sink_pages = (l->n_sinks + page_tokens - 1) / page_tokens;
        for (uint32_t p = first_page(c, l->window, n); p * page_tokens < n; p++)
            if (p >= n_sink_pages && p < first_page(c, l->window, length)) return true;
    }
    return false;
}

/* ---- prefix tree ---- */

static bool has_chain(const stress_chains *set, uint64_t chain) {
    for (uint32_t i = 0; i < set->n; i++)
        if (set->chains[i] == chain) return true;
    return false;
}

static void add_chain(stress_chains *set, uint64_t chain) {
    if (has_chain(set, chain)) return;
    if (set->n == set->most) {
        set->most = 2 * set->most + 64;
        set->chains = realloc(set->chains, set->most * sizeof *set->chains);
        if (set->chains == NULL) stress_fail("out of memory allocating the list of prefixes");
    }
    set->chains[set->n++] = chain;
}

bool stress_was_snapped(const stress_cache *c, const stress_seq *seq, uint32_t n) {
    return n > 0 && has_chain(&c->snapped, stress_seq_chain(c, seq, n));
}

uint32_t stress_tree_match(const stress_cache *c, uint64_t tenant, const uint32_t *prompt, uint32_t n_prompt) {
    uint32_t matched = 0;
    uint64_t chain = stress_chain_begin(c->fixture, tenant);
    for (uint32_t i = 0; i < n_prompt; i++) {
        chain = stress_mix(chain, prompt[i]);
        if ((i + 1) % c->config.base.page_tokens != 0) continue;
        if (!has_chain(&c->offered, chain)) break;
        if (c->config.n_states == 0 || has_chain(&c->snapped, chain)) matched = i + 1;
    }
    return matched;
}

void stress_tree_offer(stress_cache *c, const stress_seq *seq, uint32_t n_tokens) {
    uint32_t page_tokens = c->config.base.page_tokens;
    for (uint32_t end = page_tokens; end <= n_tokens; end += page_tokens) add_chain(&c->offered, stress_seq_chain(c, seq, end));
    /* the only state of a sequence is the state after its last token; the tree stores it as a snapshot */
    if (c->config.n_states > 0 && n_tokens == seq->n && n_tokens > 0 && n_tokens % page_tokens == 0)
        add_chain(&c->snapped, stress_seq_chain(c, seq, n_tokens));
    stress_tree_settle(c);
}

void stress_tree_restored(stress_cache *c, uint64_t tenant, const uint32_t *ids, uint32_t n_tokens, bool has_state) {
    uint64_t chain = stress_chain_begin(c->fixture, tenant);
    for (uint32_t i = 0; i < n_tokens; i++) {
        chain = stress_mix(chain, ids[i]);
        if ((i + 1) % c->config.base.page_tokens == 0) add_chain(&c->offered, chain);
    }
    if (has_state) add_chain(&c->snapped, chain);
    c->exact = false;
}

void stress_tree_clear(stress_cache *c) {
    c->exact =
        c->n_seqs == 0 && !stress_has_window(&c->config) && !stress_has_sealed_layer(&c->config) && c->config.n_states == 0;
    if (c->n_seqs == 0) c->offered.n = c->snapped.n = 0;
}

void stress_tree_settle(stress_cache *c) {
    uint32_t page_tokens = c->config.base.page_tokens;
    uint64_t pages = c->offered.n;
    for (uint32_t i = 0; i < c->n_seqs; i++) pages += (c->seqs[i].max_tokens + page_tokens - 1) / page_tokens;
    /* if the pool is too small for all pages, inserted pages may have been evicted to make room for a sequence */
    if (pages > c->plan.group_pages[0]) c->exact = false;
}

/* Returns a token of a document. The first n_documents documents, from which prompts are taken, share a common beginning and then
 * diverge; all other documents differ from the first token on. */
uint32_t stress_document_token(const stress_config *config, uint32_t document, uint32_t position) {
    uint32_t alike = document < config->n_documents ? (uint32_t)(stress_mix(config->seed, document) % 150) : 0;
    return (uint32_t)(stress_mix(config->seed + (position < alike ? 0 : document), position) % 50000);
}

/* ---- statistics ---- */

static void check_groups(const stress_cache *c, const fkv_stats *now) {
    for (uint32_t g = 0; g < now->n_groups; g++) {
        const fkv_group_stats *s = &now->groups[g];
        bool good = s->pages == c->plan.group_pages[g] && (uint64_t)s->free + s->held + s->cached == s->pages &&
                    s->shared <= s->held && s->pinned <= s->held && s->promised <= s->free + s->cached;
        if (!good)
            stress_fail("inconsistent statistics of group %u: pages %u free %u held %u shared %u cached %u pinned %u promised %u",
                        g, s->pages, s->free, s->held, s->shared, s->cached, s->pinned, s->promised);
    }
}

void stress_cache_check(stress_cache *c, bool whole) {
    fkv_stats now;
    const fkv_stats *before = &c->expected_stats;
    stress_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    if (now.planned_bytes != c->plan.total_bytes || now.n_groups != c->plan.n_groups)
        stress_fail("planned_bytes or n_groups of the statistics no longer matches the plan");
    if (now.seqs != c->n_seqs) stress_fail("the statistics count %u sequences, expected %u", now.seqs, c->n_seqs);
    if (now.steps != before->steps || now.aborts != before->aborts || now.tokens != before->tokens)
        stress_fail("wrong statistics: steps %llu aborts %llu tokens %llu", (unsigned long long)now.steps,
                    (unsigned long long)now.aborts, (unsigned long long)now.tokens);
    if (now.hits != before->hits || now.hit_tokens != before->hit_tokens)
        stress_fail("wrong number of prefix hits in the statistics");
    if (now.page_copies < before->page_copies || now.evictions < before->evictions ||
        now.packed_bytes_read < before->packed_bytes_read || strcmp(now.isa, before->isa) != 0)
        stress_fail("a counter decreased");
    check_groups(c, &now);
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        uint32_t n = UINT32_MAX;
        stress_expect(fkv_seq_length(c->cache, c->seqs[i].number, &n), FKV_OK, "length");
        if (n != c->seqs[i].n) stress_fail("a sequence has %u tokens, expected %u", n, c->seqs[i].n);
    }
    if (whole && !fkv_cache_consistent(c->cache)) stress_fail("fkv_cache_consistent: %s", fkv_message());
    c->expected_stats = now;
}
