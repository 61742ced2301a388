/* Pager layout, the pool invariant (promised <= free + cached), replenishing of the free list, counters, and consistency checks.
 * Sequences are in sequence.c, prefixes in prefix.c and steps in step.c.
 */
#include "pager.h"

#include "page_table.h"
#include "pager_state.h"
#include "pool.h"
#include "prefix_tree.h"

static void reset_pager(fkv_pager *pager) {
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        fkv_group *group = &pager->groups[g];
        group->pins = pager->full == FKV_NO_GROUP || pager->full == g;
        fkv_pool_reset(&group->pool);
    }
    for (uint32_t slot = 0; slot < pager->spec.max_seqs; slot++) {
        pager->slots[slot] = slot;
        pager->sequences[slot] = (fkv_sequence){.row = FKV_NO_ROW};
    }
    fkv_tree_reset(pager);
    fkv_pager_publish(pager);
}

void fkv_pager_layout(fkv_carve *carve, const fkv_pager_spec *spec, fkv_pager **pager) {
    FKV_ASSERT(fkv_is_pow2(spec->page_tokens) && spec->max_seqs > 0 && spec->max_seqs <= UINT16_MAX);
    FKV_ASSERT(spec->max_seq_tokens > 0 && spec->max_step_tokens > 0);
    FKV_ASSERT(spec->n_groups > 0 && spec->n_groups <= FKV_MAX_GROUPS);

    fkv_pager *p = FKV_CARVE(carve, 1, fkv_pager);
    if (p != NULL) *p = (fkv_pager){.spec = *spec, .full = FKV_NO_GROUP, .state = FKV_NO_GROUP};
    uint32_t n_audit = 0;
    uint32_t n_with_spare = 0;
    uint32_t n_state = 0;
    for (uint32_t g = 0; g < spec->n_groups; g++) {
        fkv_group shape = {0};
        n_with_spare += spec->groups[g].n_spare > 0;
        n_state += spec->groups[g].is_state;
        FKV_ASSERT(!spec->groups[g].is_state || spec->groups[g].window == FKV_STATE_WINDOW);
        fkv_table_shape(spec, g, &shape);
        shape.entries = FKV_CARVE(carve, (uint64_t)spec->max_seqs * shape.width, uint32_t);
        fkv_pool_layout(carve, &shape.pool, spec->groups[g].n_pages);
        n_audit = fkv_max_u32(n_audit, spec->groups[g].n_pages);
        if (p == NULL) continue;
        p->groups[g] = shape;
        if (shape.is_state) p->state = g;
        if (shape.window != 0) continue;
        FKV_ASSERT(p->full == FKV_NO_GROUP);
        p->full = g;
    }
    FKV_ASSERT(n_with_spare <= 1 && n_state <= 1);
    (void)n_with_spare;
    fkv_tree_layout(carve, spec, p == NULL ? NULL : &p->tree);

    uint32_t n_rows = fkv_min_u32(spec->max_seqs, spec->max_step_tokens);
    uint32_t *slots = FKV_CARVE(carve, spec->max_seqs, uint32_t);
    fkv_sequence *sequences = FKV_CARVE(carve, spec->max_seqs, fkv_sequence);
    fkv_step_row *rows = FKV_CARVE(carve, n_rows, fkv_step_row);
    fkv_page_copy *copies = FKV_CARVE(carve, (uint64_t)n_rows * spec->n_groups, fkv_page_copy);
    fkv_state_move *states = n_state == 0 ? NULL : FKV_CARVE(carve, n_rows, fkv_state_move);
    uint32_t *audit = FKV_CARVE(carve, 2 * (uint64_t)n_audit, uint32_t);
    *pager = p;
    if (p == NULL) return;

    p->slots = slots;
    p->sequences = sequences;
    p->audit = audit;
    p->n_audit = n_audit;
    p->step = (fkv_step_state){.rows = rows, .copies = copies, .states = states};
    memset(rows, 0, n_rows * sizeof *rows);
    memset(copies, 0, (size_t)n_rows * spec->n_groups * sizeof *copies);
    if (states != NULL) memset(states, 0, n_rows * sizeof *states);
    reset_pager(p);
}

/* ---- pool invariant ---- */

uint64_t fkv_group_promised(const fkv_pager *pager, uint32_t group) {
    const fkv_group *g = &pager->groups[group];
    if (g->window != 0) return fkv_group_reserved(g) - g->pool.counts.used;
    return g->reserved - g->entered + g->pool.counts.copies - g->taken;
}

static uint32_t cached_pages(const fkv_pager *pager, uint32_t group) {
    return group == pager->full ? pager->tree.n_idle : fkv_tree_cached_pages(pager, group);
}

uint64_t fkv_group_room(const fkv_pager *pager, uint32_t group) {
    return (uint64_t)pager->groups[group].pool.n_free + cached_pages(pager, group);
}

void fkv_group_make_free(fkv_pager *pager, uint32_t group, uint64_t n) {
    while (pager->groups[group].pool.n_free < n) {
        if (group == pager->full)
            fkv_tree_evict_oldest(pager);
        else
            fkv_tree_strip_page(pager, group);
    }
}

/* Returns an upper bound on the number of pages that one step allocates. In the state group, a row allocates one page. In any
 * other group, a row of n tokens allocates at most 1 + ceil((n - 1) / page_tokens) <= n pages, including a copy of the partially
 * filled last page. */
static uint64_t max_step_pages(const fkv_pager *pager, uint32_t group) {
    uint64_t n_tokens = pager->spec.max_step_tokens;
    if (pager->groups[group].is_state) return n_tokens < pager->n_seqs ? n_tokens : pager->n_seqs;
    uint64_t by_rows = 2 * (uint64_t)pager->n_seqs + n_tokens / pager->spec.page_tokens;
    return n_tokens < by_rows ? n_tokens : by_rows;
}

static uint64_t pages_to_keep_free(const fkv_pager *pager, uint32_t group) {
    uint64_t promised = fkv_group_promised(pager, group);
    uint64_t step = max_step_pages(pager, group);
    return promised < step ? promised : step;
}

void fkv_pager_settle(fkv_pager *pager) {
    /* the full group comes first, because evicting a node also frees the node's window pages */
    if (pager->full != FKV_NO_GROUP) fkv_group_make_free(pager, pager->full, pages_to_keep_free(pager, pager->full));
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) fkv_group_make_free(pager, g, pages_to_keep_free(pager, g));
    fkv_pager_publish(pager);
}

/* ---- counters ---- */

static fkv_group_stats group_stats(const fkv_pager *pager, uint32_t group) {
    const fkv_pool *pool = &pager->groups[group].pool;
    uint32_t cached = cached_pages(pager, group);
    return (fkv_group_stats){.pages = pool->n_pages,
                             .free = pool->n_free,
                             .held = pool->n_pages - pool->n_free - cached,
                             .shared = (uint32_t)pool->counts.shared,
                             .cached = cached,
                             .pinned = (uint32_t)pool->counts.in_tree - cached,
                             .promised = (uint32_t)fkv_group_promised(pager, group)};
}

static void store_counter(_Atomic uint32_t *counter, uint32_t value) {
    atomic_store_explicit(counter, value, memory_order_relaxed);
}
static uint32_t load_counter(const _Atomic uint32_t *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }
static uint64_t load_counter64(const _Atomic uint64_t *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

void fkv_pager_publish(fkv_pager *pager) {
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        fkv_group_stats now = group_stats(pager, g);
        fkv_group_counters *counters = &pager->counters.groups[g];
        store_counter(&counters->free, now.free);
        store_counter(&counters->held, now.held);
        store_counter(&counters->shared, now.shared);
        store_counter(&counters->cached, now.cached);
        store_counter(&counters->pinned, now.pinned);
        store_counter(&counters->promised, now.promised);
    }
    store_counter(&pager->counters.seqs, pager->n_seqs - pager->step.n_closing);
    FKV_ASSERT_DEEP(fkv_pager_consistent(pager));
}

void fkv_pager_stats(const fkv_pager *pager, fkv_stats *stats) {
    const fkv_pager_counters *counters = &pager->counters;
    stats->n_groups = pager->spec.n_groups;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        stats->groups[g] = (fkv_group_stats){.pages = pager->spec.groups[g].n_pages,
                                             .free = load_counter(&counters->groups[g].free),
                                             .held = load_counter(&counters->groups[g].held),
                                             .shared = load_counter(&counters->groups[g].shared),
                                             .cached = load_counter(&counters->groups[g].cached),
                                             .pinned = load_counter(&counters->groups[g].pinned),
                                             .promised = load_counter(&counters->groups[g].promised)};
    }
    stats->seqs = load_counter(&counters->seqs);
    stats->steps = load_counter64(&counters->steps);
    stats->aborts = load_counter64(&counters->aborts);
    stats->tokens = load_counter64(&counters->tokens);
    stats->page_copies = load_counter64(&counters->page_copies);
    stats->hit_tokens = load_counter64(&counters->hit_tokens);
    stats->hits = load_counter64(&counters->hits);
    stats->evictions = load_counter64(&counters->evictions);
}

/* ---- consistency checks ---- */

/* For every page, counts the references and tails in the tables, the tree and the open step, and compares the results with refs
 * and tails in the pool. */
static bool refs_consistent(const fkv_pager *pager, uint32_t group) {
    const fkv_pool *pool = &pager->groups[group].pool;
    uint32_t *refs = pager->audit;
    uint32_t *tails = pager->audit + pager->n_audit;
    memset(refs, 0, pool->n_pages * sizeof *refs);
    memset(tails, 0, pool->n_pages * sizeof *tails);
    if (!fkv_table_consistent(pager, group, refs, tails)) return false;
    for (uint32_t i = 0; i < pager->step.n_copies; i++) {
        if (pager->step.copies[i].group != group) continue;
        refs[pager->step.copies[i].from]++;
        tails[pager->step.copies[i].from]++;
    }
    for (uint32_t r = 0; group == pager->state && r < pager->step.n_rows; r++)
        if (pager->step.states[r].from != FKV_NO_PAGE) refs[pager->step.states[r].from]++;
    for (uint32_t page = 0; page < pool->n_pages; page++) {
        refs[page] += pool->node[page] != FKV_NO_NODE;
        if (refs[page] != pool->refs[page] || tails[page] != pool->tails[page]) return false;
        bool written_by_all = tails[page] > 0 && tails[page] == refs[page] - 1;
        if (pager->groups[group].window != 0 && pool->node[page] != FKV_NO_NODE && written_by_all) return false;
    }
    return true;
}

static bool counters_consistent(const fkv_pager *pager) {
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        fkv_group_stats now = group_stats(pager, g);
        if (memcmp(&now, &stats.groups[g], sizeof now) != 0) return false;
    }
    return stats.seqs == pager->n_seqs - pager->step.n_closing;
}

static bool sequences_consistent(const fkv_pager *pager) {
    uint32_t n_open = 0;
    uint32_t n_closing = 0;
    uint32_t n_rows = 0;
    for (uint32_t slot = 0; slot < pager->spec.max_seqs; slot++) {
        const fkv_sequence *s = &pager->sequences[slot];
        n_open += s->open;
        n_closing += s->open && s->generation == 0;
        if (!s->open && s->generation != 0) return false;
        if (s->row == FKV_NO_ROW) continue;
        n_rows++;
        if (!s->open || s->row >= pager->step.n_rows || pager->step.rows[s->row].slot != slot) return false;
        if (pager->step.rows[s->row].start != s->len) return false;
    }
    for (uint32_t i = pager->n_seqs; i < pager->spec.max_seqs; i++)
        if (pager->slots[i] >= pager->spec.max_seqs || pager->sequences[pager->slots[i]].open) return false;
    if (n_closing != pager->step.n_closing || (n_closing > 0 && !pager->step.open)) return false;
    return n_open == pager->n_seqs && n_rows == pager->step.n_rows && pager->step.open == (n_rows > 0);
}

static fkv_page_info page_info(const fkv_pager *pager, const fkv_pool *pool, uint32_t page) {
    const uint32_t refs = pool->refs[page];
    if (refs == 0) return (fkv_page_info){.state = FKV_PAGE_FREE};
    if (pool->node[page] == FKV_NO_NODE) return (fkv_page_info){.state = refs > 1 ? FKV_PAGE_SHARED : FKV_PAGE_PRIVATE};
    const fkv_node *node = &pager->tree.nodes[pool->node[page]];
    const fkv_page_state held = refs > 2 ? FKV_PAGE_SHARED : FKV_PAGE_PINNED;
    return (fkv_page_info){.state = refs == 1 && node->busy == 0 ? FKV_PAGE_CACHED : held, .tenant = node->tenant};
}

uint32_t fkv_pager_pages(const fkv_pager *pager, uint32_t group, fkv_page_info *list, uint32_t capacity) {
    const fkv_group *g = &pager->groups[group];
    const uint64_t n_pages = g->pool.n_pages;
    const uint64_t n = n_pages < capacity ? n_pages : capacity;
    for (uint64_t i = 0; i < n; i++) list[i] = page_info(pager, &g->pool, (uint32_t)(i * n_pages / n));
    for (uint32_t slot = 0; n > 0 && slot < pager->spec.max_seqs;
         slot++) { /* a page outside of the tree has the tenant of its sequence */
        if (!pager->sequences[slot].open) continue;
        for (uint32_t place = 0; place < g->width; place++) {
            const uint64_t page = g->entries[(uint64_t)slot * g->width + place];
            const uint64_t i = page == FKV_NO_PAGE ? n : (page * n + n_pages - 1) / n_pages;
            if (i < n && i * n_pages / n == page) list[i].tenant = pager->sequences[slot].tenant;
        }
    }
    return (uint32_t)n;
}

bool fkv_pager_consistent(const fkv_pager *pager) {
    if (!sequences_consistent(pager)) return false;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (!fkv_pool_consistent(&pager->groups[g].pool, pager->audit) || !refs_consistent(pager, g)) return false;
        if (fkv_group_promised(pager, g) > fkv_group_room(pager, g)) return false;
        if (!pager->step.open) {
            if (pager->groups[g].taken != 0 || pager->groups[g].pool.n_free < pages_to_keep_free(pager, g)) return false;
        }
    }
    return fkv_tree_consistent(pager, pager->audit, pager->audit + pager->n_audit) && counters_consistent(pager);
}
