/* Computes the shapes of page tables, and checks which pages a table contains. A table consists of fixed entries for sink pages
 * (in the full group, for all pages), followed by a ring of entries. Tables do not own pages.
 *
 * Ring size. In the following formulas, `page` is the number of tokens per page. A step that appends n tokens to a sequence of
 * length L accesses positions L - window + 1 to L + n - 1, which are window - 1 + n tokens. Pages are released only at commit. T
 * consecutive tokens occupy at most (T + page - 2) / page + 1 pages. The ring also has entries for the spare pages, and for the
 * pages between the start of a span and the first accessed page.
 *
 * n_step pages are reserved once for all sequences together, not once per sequence. A sequence with n new tokens uses at most
 *     held(n) = (window - 1 + n + page - 2) / page + (spare pages and span)
 * entries. Let n0 be the value of n, from 1 to page, for which the division has no remainder. For n >= n0, held(n) - held(n0) is
 * at most (n - n0) / page, rounded down; for n < n0, held(n) is not larger than held(n0). All rows of a step together have at
 * most max_step_tokens tokens. Beyond held(n0) entries per row, they therefore use at most (max_step_tokens - n0) / page entries
 * in total.
 *
 * The table of a state group has one entry, because a sequence holds one state. During a step, the entry is the state that the
 * step writes.
 */
#include "page_table.h"

void fkv_table_shape(const fkv_pager_spec *spec, uint32_t group, fkv_group *shape) {
    const fkv_group_spec *g = &spec->groups[group];
    uint32_t n_pages = fkv_ceil_div(spec->max_seq_tokens, spec->page_tokens);
    shape->window = g->window;
    shape->n_spare = g->n_spare;
    shape->span = fkv_max_u32(g->span, 1);
    shape->is_state = g->is_state;
    if (g->is_state) {
        shape->n_ring = 1;
        shape->n_rest = 1;
        shape->n_step = fkv_min_u32(spec->max_seqs, spec->max_step_tokens);
    } else if (g->window == 0) {
        shape->n_fixed = n_pages;
        shape->n_ring = 1;
        shape->n_rest = n_pages + 1;
    } else {
        uint64_t n_touched = (uint64_t)g->window - 1 + spec->max_step_tokens;
        uint64_t n_ring = (n_touched + spec->page_tokens - 2) / spec->page_tokens + g->n_spare + shape->span;
        shape->n_fixed = fkv_min_u32(fkv_ceil_div(g->n_sinks, spec->page_tokens), n_pages);
        uint32_t rest = fkv_max_u32(n_pages - shape->n_fixed, 1);
        shape->n_ring = n_ring < rest ? (uint32_t)n_ring : rest;
        uint32_t n0 =
            spec->page_tokens - (uint32_t)(((uint64_t)g->window + 3 * (uint64_t)spec->page_tokens - 3) % spec->page_tokens);
        shape->n_step = spec->max_step_tokens > n0 ? (spec->max_step_tokens - n0) / spec->page_tokens : 0;
        n_ring -= shape->n_step;
        shape->n_rest = shape->n_fixed + (n_ring < rest ? (uint32_t)n_ring : rest);
    }
    shape->width = shape->n_fixed + shape->n_ring;
}

uint32_t fkv_table_joins(const fkv_pager *pager, uint32_t n_tokens) {
    uint32_t page_tokens = pager->spec.page_tokens;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (pager->groups[g].n_spare > 0) return fkv_table_first(&pager->groups[g], page_tokens, n_tokens);
    return n_tokens / page_tokens;
}

fkv_window_pages fkv_pager_window_pages(const fkv_pager_spec *spec, uint32_t group) {
    fkv_group shape = {0};
    fkv_table_shape(spec, group, &shape);
    uint32_t n_pages = fkv_ceil_div(spec->max_seq_tokens, spec->page_tokens);
    if (shape.is_state) return (fkv_window_pages){shape.n_rest, FKV_STATES_IN_STEP, shape.n_step};
    return (fkv_window_pages){fkv_min_u32(shape.n_rest, n_pages), fkv_min_u32(shape.width, n_pages), shape.n_step};
}

/* Returns the maximum number of pages that a sequence of max_tokens holds between steps. */
static uint32_t pages_between_steps(const fkv_pager *pager, uint32_t group, uint32_t max_tokens) {
    return fkv_min_u32(fkv_pages_of(pager, max_tokens), pager->groups[group].n_rest);
}

/* Returns the maximum number of pages that a sequence of max_tokens holds during a step. */
static uint32_t pages_within_step(const fkv_pager *pager, uint32_t group, uint32_t max_tokens) {
    if (pager->groups[group].is_state) return max_tokens > 0 ? FKV_STATES_IN_STEP : 0;
    return fkv_min_u32(fkv_pages_of(pager, max_tokens), pager->groups[group].width);
}

fkv_group fkv_table_reserve(const fkv_pager *pager, uint32_t group, uint32_t more, uint32_t less) {
    fkv_group g = pager->groups[group];
    uint32_t rest[] = {pages_between_steps(pager, group, more), pages_between_steps(pager, group, less)};
    g.reserved = g.reserved + rest[0] - rest[1];
    g.in_steps =
        g.in_steps + (pages_within_step(pager, group, more) - rest[0]) - (pages_within_step(pager, group, less) - rest[1]);
    return g;
}

void fkv_table_prepare(fkv_pager *pager, uint32_t slot) {
    if (slot < pager->n_slots_used) return;
    FKV_ASSERT(slot == pager->n_slots_used);
    pager->n_slots_used++;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        const fkv_group *group = &pager->groups[g];
        for (uint32_t i = 0; i < group->width; i++) group->entries[(uint64_t)slot * group->width + i] = FKV_NO_PAGE;
    }
}

uint32_t fkv_table_snapshot(const fkv_pager *pager, const fkv_sequence *s, uint32_t n_tokens) {
    uint32_t page_tokens = pager->spec.page_tokens;
    if (pager->state == FKV_NO_GROUP || pager->full == FKV_NO_GROUP) return FKV_NO_PAGE;
    if (n_tokens == 0 || n_tokens > s->len || n_tokens % page_tokens != 0) return FKV_NO_PAGE;
    const fkv_group *full = &pager->groups[pager->full];
    const uint32_t slot = (uint32_t)(s - pager->sequences);
    const uint32_t node = full->pool.node[*fkv_table_entry(full, slot, n_tokens / page_tokens - 1)];
    return node != FKV_NO_NODE ? pager->tree.nodes[node].pages[pager->state] : FKV_NO_PAGE;
}

bool fkv_table_covers(const fkv_pager *pager, uint32_t group, const fkv_sequence *s, uint32_t n_wanted) {
    const fkv_group *g = &pager->groups[group];
    uint32_t page_tokens = pager->spec.page_tokens;
    if (g->is_state) return n_wanted == s->len || n_wanted == 0 || fkv_table_snapshot(pager, s, n_wanted) != FKV_NO_PAGE;
    uint32_t wanted = fkv_max_u32(g->n_fixed, fkv_table_first(g, page_tokens, n_wanted));
    return wanted >= fkv_pages_of(pager, n_wanted) || wanted >= fkv_table_skip(g, page_tokens, s, s->len, g->n_fixed);
}

bool fkv_table_consistent(const fkv_pager *pager, uint32_t group, uint32_t *refs, uint32_t *tails) {
    const fkv_group *g = &pager->groups[group];
    uint32_t page_tokens = pager->spec.page_tokens;
    uint64_t reserved = 0;
    uint64_t in_steps = 0;
    uint64_t entered = 0;
    for (uint32_t slot = 0; slot < pager->spec.max_seqs; slot++) {
        const fkv_sequence *s = &pager->sequences[slot];
        if (slot >= pager->n_slots_used) {
            if (s->open) return false;
            continue;
        }
        uint32_t n_expected = 0;
        if (s->open) {
            if (s->len > s->max_tokens || s->spare_from > fkv_table_joins(pager, s->len)) return false;
            uint32_t added = s->row == FKV_NO_ROW ? 0 : pager->step.rows[s->row].n_tokens;
            uint32_t n_pages = fkv_pages_of(pager, s->len + added);
            /* the single entry of a state group holds the state after the last token */
            uint32_t held_at = g->is_state ? s->len + added : s->len;
            for (uint32_t i = fkv_table_skip(g, page_tokens, s, held_at, 0); i < n_pages;
                 i = fkv_table_skip(g, page_tokens, s, held_at, i + 1)) {
                uint32_t page = *fkv_table_entry(g, slot, i);
                if (page >= g->pool.n_pages) return false;
                refs[page]++;
                tails[page] += fkv_is_tail(pager, g, s, i);
                n_expected++;
            }
            uint32_t rest = pages_between_steps(pager, group, s->max_tokens);
            uint32_t cap = pages_within_step(pager, group, s->max_tokens);
            if (n_expected > (s->row == FKV_NO_ROW ? rest : cap)) return false;
            reserved += rest;
            in_steps += cap - rest;
            entered += g->window == 0 ? fkv_pages_of(pager, s->len) : 0;
        }
        uint32_t n_found = 0;
        for (uint32_t i = 0; i < g->width; i++) n_found += g->entries[(uint64_t)slot * g->width + i] != FKV_NO_PAGE;
        if (n_found != n_expected) return false;
    }
    return reserved == g->reserved && in_steps == g->in_steps && entered == g->entered;
}
