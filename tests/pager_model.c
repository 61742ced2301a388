/* Reference model of the pager, which predicts the contents of all token slots. See pager_model.h. */
#include "pager_model_state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Pager configurations. The fields in braces are page_tokens, max_seqs, max_seq_tokens, max_step_tokens and n_groups, followed by
 * {window, n_sinks, n_pages, n_spare, span} for each group. A state group has `true` as an additional field. */
const pager_model_spec pager_model_specs[] = {
    {"full", false, {16, 6, 256, 64, 1, {{0, 0, 32}}}},
    {"full, tiny pool", false, {16, 4, 96, 32, 1, {{0, 0, 7}}}},
    {"full, one bucket", true, {16, 6, 128, 48, 1, {{0, 0, 24}}}},
    {"full and window", false, {16, 6, 256, 48, 2, {{0, 0, 32}, {40, 4, 40}}}},
    {"window before full", false, {16, 5, 192, 40, 2, {{24, 20, 24}, {0, 0, 20}}}},
    {"several windows", false, {16, 6, 320, 64, 4, {{0, 0, 36}, {1, 0, 30}, {64, 0, 48}, {33, 17, 50}}}},
    {"window only", false, {16, 5, 400, 32, 1, {{48, 4, 30}}}},
    {"two windows only, tiny pools", true, {16, 3, 300, 24, 2, {{17, 0, 8}, {32, 33, 14}}}},
    {"window wider than any sequence", false, {16, 4, 128, 128, 2, {{0, 0, 20}, {4096, 8, 32}}}},
    {"pages of two tokens", false, {2, 5, 40, 9, 2, {{0, 0, 50}, {5, 3, 48}}}},
    {"full and open", false, {16, 6, 256, 48, 2, {{0, 0, 32}, {1, 1, 48, 1}}}},
    {"full, window and open", false, {16, 4, 256, 64, 3, {{0, 0, 30}, {40, 4, 40}, {1, 1, 32, 1}}}},
    {"window and open, tiny pools", true, {16, 3, 300, 24, 2, {{33, 0, 14}, {1, 1, 13, 1}}}},
    {"open with two spare pages of two tokens", false, {2, 5, 40, 9, 2, {{0, 0, 50}, {1, 1, 48, 2}}}},
    {"full and open in spans of two", false, {16, 6, 256, 48, 2, {{0, 0, 32}, {1, 1, 60, 1, 2}}}},
    {"full, window and open in spans of four", false, {16, 4, 256, 64, 3, {{0, 0, 30}, {40, 4, 40}, {1, 1, 44, 1, 4}}}},
    {"window and open in spans of three, tiny pools", true, {16, 3, 300, 24, 2, {{33, 0, 14}, {1, 1, 16, 1, 3}}}},
    {"open in spans of two with two spare pages of two tokens", false, {2, 5, 40, 9, 2, {{0, 0, 50}, {1, 1, 56, 2, 2}}}},
    {"pages of one token", false, {1, 4, 24, 6, 2, {{0, 0, 40}, {3, 2, 44}}}},
    {"full and states", false, {16, 6, 256, 64, 2, {{0, 0, 32}, {2, 0, 18, 0, 0, true}}}},
    {"full and states, no snapshots, tiny pools", true, {16, 4, 96, 32, 2, {{0, 0, 12}, {2, 0, 8, 0, 0, true}}}},
    {"too few states for all sequences", false, {16, 6, 256, 64, 2, {{0, 0, 40}, {2, 0, 7, 0, 0, true}}}},
    {"states before full and window", false, {16, 5, 192, 40, 3, {{2, 0, 14, 0, 0, true}, {0, 0, 24}, {24, 20, 24}}}},
    {"full, states and open in spans of two", false, {16, 6, 256, 48, 3, {{0, 0, 32}, {2, 0, 24, 0, 0, true}, {1, 1, 60, 1, 2}}}},
    {"window and states", false, {16, 5, 200, 32, 2, {{48, 4, 30}, {2, 0, 14, 0, 0, true}}}},
    {"states only", false, {16, 5, 200, 32, 1, {{2, 0, 16, 0, 0, true}}}},
    {"full and states, steps of three tokens", false, {2, 6, 40, 3, 2, {{0, 0, 60}, {2, 0, 16, 0, 0, true}}}},
    {"full and states, pages of one token", false, {1, 4, 24, 6, 2, {{0, 0, 40}, {2, 0, 16, 0, 0, true}}}},
};
const uint32_t pager_model_n_specs = sizeof pager_model_specs / sizeof pager_model_specs[0];

/* ---- choices ---- */

pager_choices pager_choices_seeded(uint64_t seed) { return (pager_choices){.state = seed}; }

pager_choices pager_choices_of(const uint8_t *bytes, size_t n_bytes) {
    static const uint8_t none[1];
    return (pager_choices){.bytes = bytes == NULL ? none : bytes, .n_bytes = n_bytes};
}

bool pager_choices_left(const pager_choices *choices) { return choices->bytes == NULL || choices->at < choices->n_bytes; }

uint64_t model_mix(uint64_t x) { /* splitmix64 */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

uint32_t pager_choose(pager_choices *choices, uint32_t n) {
    if (choices->bytes == NULL) return (uint32_t)(model_mix(choices->state++) % n);
    uint32_t value = 0;
    for (uint32_t range = 1; range < n && choices->at < choices->n_bytes; range *= 256)
        value = value << 8 | choices->bytes[choices->at++];
    return value % n;
}

bool model_one_in(pager_choices *choices, uint32_t n) { return pager_choose(choices, n) == n - 1; }

/* ---- faults ---- */

bool model_fault(pager_model *m, const char *format, ...) {
    int n = snprintf(m->fault, sizeof m->fault, "operation %llu: ", (unsigned long long)m->n_operations);
    va_list args;
    va_start(args, format);
    (void)vsnprintf(m->fault + n, sizeof m->fault - (size_t)n, format, args);
    va_end(args);
    return false;
}

void model_snapshot(pager_model *m) { memcpy(m->snapshot, m->block, m->block_bytes); }

/* Compares every byte of the pager with the snapshot, except for the scratch memory of fkv_pager_consistent() and the abort
 * counter. */
bool model_unchanged(pager_model *m) {
    fkv_pager *p = m->pager;
    uint64_t aborts = p->counters.aborts;
    memset(p->audit, 0, 2 * (size_t)p->n_audit * sizeof *p->audit);
    memset(m->snapshot + ((uint8_t *)p->audit - m->block), 0, 2 * (size_t)p->n_audit * sizeof *p->audit);
    p->counters.aborts = ((fkv_pager *)(void *)m->snapshot)->counters.aborts;
    bool same = memcmp(m->block, m->snapshot, m->block_bytes) == 0;
    p->counters.aborts = aborts;
    return same;
}

bool model_check_closed_only(pager_model *m) {
    memcpy(m->aside, m->block, m->block_bytes);
    memcpy(m->block, m->snapshot, m->block_bytes);
    for (uint32_t slot = 0; slot < m->spec.max_seqs; slot++)
        for (uint32_t s = 0; s < m->spec.max_seqs; s++)
            if (m->seqs[s].closing && m->seqs[s].slot == slot)
                EXPECT(fkv_pager_close(m->pager, m->seqs[s].seq) == FKV_OK, "fkv_pager_close() failed outside of a step");
    memcpy(m->snapshot, m->block, m->block_bytes);
    memcpy(m->block, m->aside, m->block_bytes);
    EXPECT(model_unchanged(m), "an aborted step changed more than the closed sequences");
    return true;
}

bool model_answered(pager_model *m, const char *call, fkv_status got, fkv_status expected) {
    EXPECT(got == expected, "%s returned %s, expected %s (%s)", call, fkv_status_name(got), fkv_status_name(expected),
           fkv_message());
    if (got == FKV_OK) return true;
    m->tally.bad_calls++;
    EXPECT(fkv_message()[0] != '\0', "%s failed without an error message", call);
    EXPECT(model_unchanged(m), "%s failed but changed the pager", call);
    return true;
}

/* ---- visible tokens ---- */

uint32_t model_pages(const pager_model *m, uint32_t n_tokens) {
    return (n_tokens + m->spec.page_tokens - 1) / m->spec.page_tokens;
}

/* Returns true if the pager must hold `token` for a query at `position`. A group without a window holds every token. A group with
 * a window holds the pages that contain sinks, and all pages from the start of the span in which the query's window begins up to
 * and including the query's own page. */
bool model_holds(const pager_model *m, uint32_t group, uint32_t position, uint32_t token) {
    const fkv_group_spec *g = &m->spec.groups[group];
    uint32_t page = token / m->spec.page_tokens;
    if (g->window == 0 || page * m->spec.page_tokens < g->n_sinks) return true;
    uint32_t reached = position < g->window ? 0 : position + 1 - g->window;
    uint32_t first = reached / m->spec.page_tokens;
    while (g->span > 1 && first % g->span != 0) first--;
    return page >= first && page * m->spec.page_tokens <= position;
}

void model_keep_spare(const pager_model *m, model_seq *q) {
    uint32_t g = 0; /* index of the group with spare pages */
    while (g < m->spec.n_groups && m->spec.groups[g].n_spare == 0) g++;
    for (uint32_t page = 0; g < m->spec.n_groups && page < MAX_TOKENS; page++) {
        uint32_t token = page * m->spec.page_tokens;
        bool there = page < model_pages(m, q->len);
        bool needed = there && model_holds(m, g, q->len, token);
        bool near = needed;
        for (uint32_t back = 1; there && back <= m->spec.groups[g].n_spare && back * m->spec.page_tokens <= q->len; back++)
            near |= model_holds(m, g, q->len - back * m->spec.page_tokens, token);
        q->spare[page] = needed || (near && q->spare[page]);
    }
}

bool model_check_sequence(pager_model *m, uint32_t s, uint32_t position) {
    model_seq *q = &m->seqs[s];
    uint32_t slot = q->slot;
    EXPECT(fkv_pager_slot(m->pager, q->seq, &slot) == (q->closing ? FKV_BAD_SEQ : FKV_OK) && slot == q->slot,
           "sequence %u: wrong status or slot from fkv_pager_slot()", s);
    for (uint32_t g = 0; g < m->spec.n_groups; g++) {
        if (g == m->n_state) {
            uint32_t page = model_state_page(m, q);
            EXPECT((page == FKV_NO_PAGE) == (q->state_len == 0), "sequence %u: no state, or the state of an empty sequence", s);
            if (page == FKV_NO_PAGE) continue;
            EXPECT(model_state(m, page)->prefix == q->prefix[q->state_len], "sequence %u: the state is not that of its %u tokens",
                   s, q->state_len);
            EXPECT(model_state(m, page)->write == q->state_write, "sequence %u: the state was overwritten", s);
            continue;
        }
        fkv_page_view view = fkv_pager_view(m->pager, g, slot);
        for (uint32_t i = 0; i < position; i++) {
            bool spare = m->spec.groups[g].n_spare > 0 && position == q->len && q->spare[i / m->spec.page_tokens];
            if (!model_holds(m, g, position, i) && !spare) continue;
            uint32_t page = fkv_page_at(view, i / m->spec.page_tokens);
            EXPECT(page < m->spec.groups[g].n_pages, "sequence %u, group %u, token %u: no page", s, g, i);
            written found = m->memory[g][page * m->spec.page_tokens + i % m->spec.page_tokens];
            EXPECT(found.prefix == q->prefix[i + 1],
                   "sequence %u, group %u, token %u for the query at %u: the page memory has tokens of another text", s, g, i,
                   position);
            EXPECT(found.write == q->writes[g][i],
                   "sequence %u, group %u, token %u for the query at %u: found write number %llu, expected %llu", s, g, i,
                   position, (unsigned long long)found.write, (unsigned long long)q->writes[g][i]);
        }
    }
    return true;
}

void model_extend(model_seq *q, uint32_t at, uint32_t token) {
    q->tokens[at] = token;
    q->prefix[at + 1] = model_mix(q->prefix[at] ^ model_mix(token));
}

/* Returns token i of the text with number `text`. Different texts have no tokens in common. */
uint32_t model_text(uint32_t text, uint32_t i) { return text * 100000 + i; }

void model_write(pager_model *m, model_seq *q, uint32_t slot, uint32_t i) {
    m->n_writes++;
    for (uint32_t g = 0; g < m->spec.n_groups; g++) {
        if (g == m->n_state) continue;
        uint32_t page = fkv_page_at(fkv_pager_view(m->pager, g, slot), i / m->spec.page_tokens);
        q->writes[g][i] = m->n_writes;
        /* after fkv_pager_fill(), masked tokens may have no page; model_check_sequence() checks that visible tokens have one */
        if (page == FKV_NO_PAGE) continue;
        m->memory[g][page * m->spec.page_tokens + i % m->spec.page_tokens] = (written){m->n_writes, q->prefix[i + 1]};
    }
}

/* ---- states ---- */

written *model_state(const pager_model *m, uint32_t page) { return &m->memory[m->n_state][page * m->spec.page_tokens]; }

uint32_t model_state_page(const pager_model *m, const model_seq *q) {
    return fkv_page_at(fkv_pager_view(m->pager, m->n_state, q->slot), 0);
}

bool model_write_state(pager_model *m, model_seq *q, uint32_t from, uint32_t n_from, uint32_t to, uint32_t len) {
    EXPECT((from == FKV_NO_PAGE) == (n_from == 0), "a step reads no state, or the state of an empty sequence");
    EXPECT(from != to && to < m->spec.groups[m->n_state].n_pages, "a step writes the state that it reads");
    uint64_t hash = from == FKV_NO_PAGE ? model_mix(q->tenant) : model_state(m, from)->prefix;
    EXPECT(hash == q->prefix[n_from], "a step reads the state of other tokens");
    for (uint32_t i = n_from; i < len; i++) hash = model_mix(hash ^ model_mix(q->tokens[i]));
    q->state_write = ++m->n_writes;
    q->state_len = len;
    *model_state(m, to) = (written){q->state_write, hash};
    return true;
}

bool model_has_state(const pager_model *m, const model_seq *q, uint32_t n_tokens) {
    if (m->n_state == m->spec.n_groups || n_tokens == q->len || n_tokens == 0) return true;
    if (m->n_full == m->spec.n_groups || n_tokens % m->spec.page_tokens != 0) return false;
    uint32_t page = fkv_page_at(fkv_pager_view(m->pager, m->n_full, q->slot), n_tokens / m->spec.page_tokens - 1);
    for (uint32_t node = 0; node < m->pager->tree.n_nodes; node++) {
        const fkv_node *n = &m->pager->tree.nodes[node];
        if (n->live && n->pages[m->n_full] == page) return n->pages[m->n_state] != FKV_NO_PAGE;
    }
    return false;
}

/* ---- pager equations ---- */

uint32_t model_shadows(const pager_model *m, shadow *shadows) {
    uint32_t n = 0;
    for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
        const model_seq *q = &m->seqs[s];
        uint32_t slot = 0;
        if (!q->open || fkv_pager_slot(m->pager, q->seq, &slot) != FKV_OK) continue;
        shadows[n].len = q->len;
        shadows[n].max_tokens = q->max_tokens;
        for (uint32_t i = 0; i < model_pages(m, q->len); i++)
            shadows[n].pages[i] = fkv_page_at(fkv_pager_view(m->pager, m->n_full, slot), i);
        n++;
    }
    return n;
}

/* Counts the promised, free and cached pages of the full-attention group. without: root of a subtree that is counted as if it had
 * been removed; FKV_NO_NODE for none. */
balance model_count(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t without) {
    balance b = {0};
    uint32_t refs[MAX_PAGES] = {0};
    uint32_t tails[MAX_PAGES] = {0};
    for (uint32_t s = 0; s < n; s++) {
        uint32_t n_pages = model_pages(m, shadows[s].len);
        for (uint32_t i = 0; i < n_pages; i++) refs[shadows[s].pages[i]]++;
        if (shadows[s].len % m->spec.page_tokens != 0 && shadows[s].len < shadows[s].max_tokens)
            tails[shadows[s].pages[n_pages - 1]]++;
        b.promised += model_pages(m, shadows[s].max_tokens) - n_pages;
    }
    const fkv_node *nodes = m->pager->tree.nodes;
    bool out[MAX_PAGES] = {false};
    for (uint32_t node = 0; node < m->pager->tree.n_nodes; node++)
        for (uint32_t up = node; nodes[node].live && up != FKV_NO_NODE; up = nodes[up].parent) out[node] |= up == without;
    for (uint32_t node = 0; node < m->pager->tree.n_nodes; node++)
        if (nodes[node].live && !out[node] && refs[nodes[node].pages[m->n_full]] > 0)
            for (uint32_t up = node; up != FKV_NO_NODE; up = nodes[up].parent) b.busy[up] = true;
    for (uint32_t node = 0; node < m->pager->tree.n_nodes; node++) {
        if (!nodes[node].live || out[node]) continue;
        refs[nodes[node].pages[m->n_full]]++;
        b.cached += !b.busy[node];
    }
    for (uint32_t page = 0; page < m->spec.groups[m->n_full].n_pages; page++) {
        b.free += refs[page] == 0;
        if (tails[page] > 0) b.promised += tails[page] == refs[page] ? tails[page] - 1 : tails[page];
    }
    return b;
}

bool model_fits(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t without) {
    balance b = model_count(m, shadows, n, without);
    return b.promised <= b.free + b.cached;
}

bool model_windows_fit(const pager_model *m, uint32_t max_tokens, const model_seq *instead) {
    for (uint32_t g = 0; g < m->spec.n_groups; g++) {
        if (g == m->n_full) continue;
        fkv_window_pages one = fkv_pager_window_pages(&m->spec, g);
        uint32_t rest = fkv_min_u32(one.rest, model_pages(m, max_tokens));
        bool is_state = g == m->n_state; /* a step needs two state pages per sequence, regardless of the sequence length */
        uint32_t most = is_state ? one.most : fkv_min_u32(one.most, model_pages(m, max_tokens));
        for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
            if (!m->seqs[s].open || &m->seqs[s] == instead) continue;
            rest += fkv_min_u32(one.rest, model_pages(m, m->seqs[s].max_tokens));
            most += is_state ? one.most : fkv_min_u32(one.most, model_pages(m, m->seqs[s].max_tokens));
        }
        if (fkv_min_u32(most, rest + one.step) > m->spec.groups[g].n_pages) return false;
    }
    return true;
}

/* ---- prefix tree ---- */

static uint32_t find_node(const pager_model *m, uint64_t tenant, uint32_t parent, const uint32_t *tokens) {
    const fkv_tree *tree = &m->pager->tree;
    size_t bytes = m->spec.page_tokens * sizeof *tokens;
    for (uint32_t node = 0; node < tree->n_nodes; node++) {
        const fkv_node *n = &tree->nodes[node];
        if (n->live && n->tenant == tenant && n->parent == parent &&
            memcmp(&tree->tokens[node * m->spec.page_tokens], tokens, bytes) == 0)
            return node;
    }
    return FKV_NO_NODE;
}

/* Returns the number of leading tokens, at most n, that match a path of tree nodes. Searches all nodes linearly. */
uint32_t model_find_path(const pager_model *m, uint64_t tenant, const uint32_t *tokens, uint32_t n, uint32_t *path) {
    uint32_t found = 0;
    for (; found < n; found++) {
        path[found] = find_node(m, tenant, found == 0 ? FKV_NO_NODE : path[found - 1], &tokens[found * m->spec.page_tokens]);
        if (path[found] == FKV_NO_NODE) break;
    }
    return found;
}

uint32_t model_usable_pages(const pager_model *m, const uint32_t *path, uint32_t n) {
    for (; n > 0; n--) {
        bool usable = true;
        for (uint32_t g = 0; g < m->spec.n_groups; g++)
            for (uint32_t i = 0; i < n; i++)
                if (model_holds(m, g, n * m->spec.page_tokens, i * m->spec.page_tokens))
                    usable &= m->pager->tree.nodes[path[i]].pages[g] != FKV_NO_PAGE;
        if (usable) break;
    }
    return n;
}

/* ---- checks ---- */

bool model_check_all(pager_model *m) {
    static shadow shadows[MAX_SEQS + 1];
    EXPECT(fkv_pager_consistent(m->pager), "inconsistent");
    uint32_t n_open = 0;
    for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
        const model_seq *q = &m->seqs[s];
        if (!q->open) continue;
        n_open++;
        uint32_t len = 0;
        EXPECT(fkv_pager_length(m->pager, q->seq, &len) == FKV_OK && len == q->len, "sequence %u has %u tokens, expected %u", s,
               len, q->len);
        if (!model_check_sequence(m, s, q->len)) return false;
    }
    fkv_stats stats = {0};
    fkv_pager_stats(m->pager, &stats);
    EXPECT(stats.seqs == n_open, "%u open sequences, expected %u", stats.seqs, n_open);
    for (uint32_t g = 0; g < m->spec.n_groups; g++) {
        const fkv_group_stats *s = &stats.groups[g];
        EXPECT(s->free + s->held + s->cached == s->pages, "group %u: free + held + cached differs from the number of pages", g);
        EXPECT(s->promised <= s->free + s->cached, "group %u: %u promised pages exceed free + cached", g, s->promised);
        if (g != m->n_full) continue;
        balance b = model_count(m, shadows, model_shadows(m, shadows), FKV_NO_NODE);
        EXPECT(s->promised == b.promised && s->free == b.free && s->cached == b.cached,
               "promised, free and cached pages are %u, %u and %u, expected %llu, %llu and %llu", s->promised, s->free, s->cached,
               (unsigned long long)b.promised, (unsigned long long)b.free, (unsigned long long)b.cached);
    }
    return true;
}

/* ---- model ---- */

static void *must(void *block) {
    if (block == NULL) abort();
    return block;
}

pager_model *pager_model_open(const pager_model_spec *spec) {
    pager_model *m = must(calloc(1, sizeof *m));
    m->spec = spec->spec;
    m->n_full = m->spec.n_groups;
    m->n_state = m->spec.n_groups;
    fkv_carve carve = {0};
    fkv_pager_layout(&carve, &m->spec, &m->pager);
    m->block_bytes = fkv_align_up(carve.used, FKV_CARVE_ALIGN);
    m->block = must(aligned_alloc(FKV_CARVE_ALIGN, m->block_bytes));
    m->snapshot = must(aligned_alloc(FKV_CARVE_ALIGN, m->block_bytes));
    m->aside = must(aligned_alloc(FKV_CARVE_ALIGN, m->block_bytes));
    memset(m->block, 0xa5, m->block_bytes);
    carve = (fkv_carve){.base = m->block, .size = m->block_bytes};
    fkv_pager_layout(&carve, &m->spec, &m->pager);
    if (spec->one_bucket) m->pager->tree.hash_mask = 0;
    for (uint32_t g = 0; g < m->spec.n_groups; g++) {
        m->memory[g] = must(calloc((size_t)m->spec.groups[g].n_pages * m->spec.page_tokens, sizeof(written)));
        if (m->spec.groups[g].window == 0) m->n_full = g;
        if (m->spec.groups[g].is_state) m->n_state = g;
    }
    return m;
}

void pager_model_close(pager_model *m) {
    for (uint32_t g = 0; g < m->spec.n_groups; g++) free(m->memory[g]);
    free(m->snapshot);
    free(m->aside);
    free(m->block);
    free(m);
}

const char *pager_model_fault(const pager_model *m) { return m->fault; }
const pager_model_tally *pager_model_tallied(const pager_model *m) { return &m->tally; }

void pager_model_tally_add(pager_model_tally *sum, const pager_model_tally *one) {
    sum->opened += one->opened;
    sum->shared += one->shared;
    sum->refused += one->refused;
    sum->forked += one->forked;
    sum->truncated += one->truncated;
    sum->truncate_refused += one->truncate_refused;
    sum->gone += one->gone;
    sum->inserted += one->inserted;
    sum->cleared += one->cleared;
    sum->filled += one->filled;
    sum->closed += one->closed;
    sum->committed += one->committed;
    sum->aborted += one->aborted;
    sum->copies += one->copies;
    sum->bad_calls += one->bad_calls;
    sum->contradicted += one->contradicted;
    sum->reserved += one->reserved;
    sum->reserve_refused += one->reserve_refused;
    sum->closed_in_step += one->closed_in_step;
    sum->matched += one->matched;
    sum->discarded += one->discarded;
    sum->to_snapshot += one->to_snapshot;
    sum->snapshots += one->snapshots;
}
