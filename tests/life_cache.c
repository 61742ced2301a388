/* See life_cache.h. */
#include "life_cache.h"

#include <stdlib.h>
#include <string.h>

void life_expect(fkv_status got, fkv_status expected, const char *call) {
    if (got != expected)
        life_fail("%s: %s instead of %s (%s)", call, fkv_status_name(got), fkv_status_name(expected), fkv_message());
}

/* By field: what lies between them is not the library's. */
static bool same_plan(const fkv_plan *a, const fkv_plan *b) {
    bool same = a->total_bytes == b->total_bytes && a->slab_bytes == b->slab_bytes && a->tables_bytes == b->tables_bytes &&
                a->scratch_bytes == b->scratch_bytes && a->stacks_bytes == b->stacks_bytes && a->token_bytes == b->token_bytes &&
                a->n_groups == b->n_groups && a->n_threads == b->n_threads;
    for (uint32_t g = 0; same && g < a->n_groups; g++)
        same = a->group_pages[g] == b->group_pages[g] && a->group_page_bytes[g] == b->group_page_bytes[g];
    return same;
}

void life_cache_open(life_cache *c, life_world *world, const life_config *config) {
    *c = (life_cache){.world = world, .config = *config, .exact = !life_has_window(config) && !life_has_sealed_layer(config)};
    fkv_config as_given = life_config_of(&c->config);
    fkv_plan again;
    life_expect(fkv_plan_make(&as_given, &c->plan), FKV_OK, "plan");
    life_expect(fkv_cache_open(&as_given, &c->cache), FKV_OK, "cache open");
    life_expect(fkv_plan_make(&as_given, &again), FKV_OK, "plan");
    const fkv_plan *p = &c->plan;
    if (!same_plan(p, &again)) life_fail("the plan changed");
    if (p->total_bytes != p->slab_bytes + p->tables_bytes + p->scratch_bytes + p->stacks_bytes)
        life_fail("the plan does not add up");
    life_expect(fkv_cache_stats(c->cache, &c->figures), FKV_OK, "stats");
    if (c->figures.planned_bytes != p->total_bytes || c->figures.n_groups != p->n_groups) life_fail("figures and plan differ");
}

void life_cache_close(life_cache *c) {
    fkv_cache_close(c->cache);
    for (uint32_t i = 0; i < c->n_seqs; i++) free((void *)c->seqs[i].tokens);
    free(c->offered);
}

/* ---- sequences ---- */

life_seq *life_seq_add(life_cache *c, fkv_seq number, uint64_t tenant, uint64_t origin, uint32_t max_tokens) {
    if (c->n_seqs == c->config.base.max_seqs) life_fail("more sequences than max_seqs");
    for (uint32_t i = 0; i < c->n_seqs; i++)
        if (c->seqs[i].number == number || number == 0) life_fail("a number that another sequence has, or 0");
    life_seq *seq = &c->seqs[c->n_seqs++];
    *seq = (life_seq){.number = number, .tenant = tenant, .origin = origin, .max_tokens = max_tokens};
    seq->tokens = (life_token **)calloc(max_tokens, sizeof *seq->tokens);
    if (seq->tokens == NULL) life_fail("no memory for a sequence");
    return seq;
}

void life_seq_remove(life_cache *c, life_seq *seq) {
    c->closed = seq->number;
    free((void *)seq->tokens);
    *seq = c->seqs[--c->n_seqs];
}

void life_seq_resize(life_seq *seq, uint32_t max_tokens) {
    seq->tokens = (life_token **)realloc((void *)seq->tokens, max_tokens * sizeof *seq->tokens);
    if (seq->tokens == NULL) life_fail("no memory for a sequence");
    seq->max_tokens = max_tokens;
}

uint64_t life_seq_chain(const life_cache *c, const life_seq *seq, uint32_t n) {
    return n == 0 ? life_chain_begin(c->world, seq->origin) : seq->tokens[n - 1]->chain;
}

void life_seq_push(life_cache *c, life_seq *seq, uint32_t id) {
    if (seq->n == seq->max_tokens) life_fail("more tokens than the sequence was opened for");
    seq->tokens[seq->n] = life_token_after(c->world, life_seq_chain(c, seq, seq->n), seq->n, id);
    seq->n++;
}

uint64_t life_cache_promised(const life_cache *c) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) sum += c->seqs[i].max_tokens;
    return sum;
}

uint32_t life_cache_pinned(const life_cache *c) {
    fkv_stats now;
    uint32_t pinned = 0;
    life_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    for (uint32_t g = 0; g < now.n_groups; g++) pinned += now.groups[g].pinned;
    return pinned;
}

/* The first page, sinks apart, that a query at `position` sees. */
static uint32_t first_page(const life_cache *c, uint32_t window, uint32_t position) {
    return position + 1 > window ? (position + 1 - window) / c->config.base.page_tokens : 0;
}

/* The first page of the span that token n is in. */
static uint32_t span_of(const life_cache *c, uint32_t n) { return n / c->config.base.page_tokens / LIFE_SPAN * LIFE_SPAN; }

void life_seq_grown(const life_cache *c, life_seq *seq) {
    uint32_t page_tokens = c->config.base.page_tokens;
    uint32_t kept = span_of(c, seq->n > page_tokens ? seq->n - page_tokens : 0);
    if (kept > seq->open_from) seq->open_from = kept;
}

void life_seq_without_spare(const life_cache *c, life_seq *seq) { seq->open_from = span_of(c, seq->n); }

void life_seq_cut(const life_cache *c, life_seq *seq) {
    if (span_of(c, seq->n) < seq->open_from) life_seq_without_spare(c, seq);
}

bool life_is_gone(const life_cache *c, const life_seq *seq, uint32_t n) {
    uint32_t page_tokens = c->config.base.page_tokens;
    uint32_t length = seq->n;
    uint32_t from = span_of(c, n) > 0 ? span_of(c, n) : 1; /* page 0 is always open */
    if (life_has_sealed_layer(&c->config) && from * page_tokens < n && from < seq->open_from) return true;
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

static bool was_offered(const life_cache *c, uint64_t chain) {
    for (uint32_t i = 0; i < c->n_offered; i++)
        if (c->offered[i] == chain) return true;
    return false;
}

uint32_t life_tree_match(const life_cache *c, uint64_t tenant, const uint32_t *prompt, uint32_t n_prompt) {
    uint32_t matched = 0;
    bool sealed = life_has_sealed_layer(&c->config); /* one joins where a span begins, or behind the first page */
    uint64_t chain = life_chain_begin(c->world, tenant);
    for (uint32_t i = 0; i < n_prompt; i++) {
        chain = life_mix(chain, prompt[i]);
        if ((i + 1) % c->config.base.page_tokens != 0) continue;
        if (!was_offered(c, chain)) break;
        uint32_t n_pages = (i + 1) / c->config.base.page_tokens;
        if (!sealed || n_pages == 1 || n_pages % LIFE_SPAN == 0) matched = i + 1;
    }
    return matched;
}

void life_tree_offer(life_cache *c, const life_seq *seq, uint32_t n_tokens) {
    uint32_t page_tokens = c->config.base.page_tokens;
    for (uint32_t end = page_tokens; end <= n_tokens; end += page_tokens) {
        uint64_t chain = life_seq_chain(c, seq, end);
        if (was_offered(c, chain)) continue;
        if (c->n_offered == c->most_offered) {
            c->most_offered = 2 * c->most_offered + 64;
            c->offered = realloc(c->offered, c->most_offered * sizeof *c->offered);
            if (c->offered == NULL) life_fail("no memory for the offered prefixes");
        }
        c->offered[c->n_offered++] = chain;
    }
    life_tree_settle(c);
}

void life_tree_clear(life_cache *c) {
    c->exact = c->n_seqs == 0 && !life_has_window(&c->config) && !life_has_sealed_layer(&c->config);
    if (c->n_seqs == 0) c->n_offered = 0;
}

void life_tree_settle(life_cache *c) {
    uint32_t page_tokens = c->config.base.page_tokens;
    uint64_t pages = c->n_offered;
    for (uint32_t i = 0; i < c->n_seqs; i++) pages += (c->seqs[i].max_tokens + page_tokens - 1) / page_tokens;
    if (pages > c->plan.group_pages[0]) c->exact = false; /* something may have been given up for a sequence */
}

/* Documents that prompts are from begin alike and then go their own ways. All others differ from the first token on. */
uint32_t life_document_token(const life_config *config, uint32_t document, uint32_t position) {
    uint32_t alike = document < config->n_documents ? (uint32_t)(life_mix(config->seed, document) % 150) : 0;
    return (uint32_t)(life_mix(config->seed + (position < alike ? 0 : document), position) % 50000);
}

/* ---- figures ---- */

static void check_groups(const life_cache *c, const fkv_stats *now) {
    for (uint32_t g = 0; g < now->n_groups; g++) {
        const fkv_group_stats *s = &now->groups[g];
        bool good = s->pages == c->plan.group_pages[g] && (uint64_t)s->free + s->held + s->cached == s->pages &&
                    s->shared <= s->held && s->pinned <= s->held && s->promised <= s->free + s->cached;
        if (!good)
            life_fail("group %u: pages %u free %u held %u shared %u cached %u pinned %u promised %u", g, s->pages, s->free,
                      s->held, s->shared, s->cached, s->pinned, s->promised);
    }
}

void life_cache_check(life_cache *c, bool whole) {
    fkv_stats now;
    const fkv_stats *before = &c->figures;
    life_expect(fkv_cache_stats(c->cache, &now), FKV_OK, "stats");
    if (now.planned_bytes != c->plan.total_bytes || now.n_groups != c->plan.n_groups) life_fail("the plan is not constant");
    if (now.seqs != c->n_seqs) life_fail("%u sequences, %u are open", now.seqs, c->n_seqs);
    if (now.steps != before->steps || now.aborts != before->aborts || now.tokens != before->tokens)
        life_fail("figures: steps %llu aborts %llu tokens %llu", (unsigned long long)now.steps, (unsigned long long)now.aborts,
                  (unsigned long long)now.tokens);
    if (now.hits != before->hits || now.hit_tokens != before->hit_tokens) life_fail("figures: hits");
    if (now.page_copies < before->page_copies || now.evictions < before->evictions ||
        now.packed_bytes_read < before->packed_bytes_read || strcmp(now.isa, before->isa) != 0)
        life_fail("a figure fell");
    check_groups(c, &now);
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        uint32_t n = UINT32_MAX;
        life_expect(fkv_seq_length(c->cache, c->seqs[i].number, &n), FKV_OK, "length");
        if (n != c->seqs[i].n) life_fail("a sequence has %u tokens instead of %u", n, c->seqs[i].n);
    }
    if (whole && !fkv_cache_consistent(c->cache)) life_fail("fkv_cache_consistent: %s", fkv_message());
    c->figures = now;
}
