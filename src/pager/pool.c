/* Free list, reference counts and counters of a page pool. This file is independent of page tables and the prefix tree.
 *
 * To change a page, its old contribution is subtracted from the counters, the page is updated, and its new contribution is added.
 * Invariant: counts = sum over pages of contribution(refs, tails, node).
 */
#include "pool.h"

void fkv_pool_layout(fkv_carve *carve, fkv_pool *pool, uint32_t n_pages) {
    uint32_t *free = FKV_CARVE(carve, n_pages, uint32_t);
    uint32_t *refs = FKV_CARVE(carve, n_pages, uint32_t);
    uint32_t *tails = FKV_CARVE(carve, n_pages, uint32_t);
    uint32_t *node = FKV_CARVE(carve, n_pages, uint32_t);
    uint32_t *writers = FKV_CARVE(carve, n_pages, uint32_t);
    uint32_t *in_place = FKV_CARVE(carve, n_pages, uint32_t);
    if (pool == NULL) return;
    *pool = (fkv_pool){
        .n_pages = n_pages, .free = free, .refs = refs, .tails = tails, .node = node, .writers = writers, .in_place = in_place};
}

void fkv_pool_reset(fkv_pool *pool) {
    pool->n_free = pool->n_pages;
    for (uint32_t page = 0; page < pool->n_pages; page++) {
        pool->free[page] = pool->n_pages - 1 - page;
        pool->refs[page] = 0;
        pool->tails[page] = 0;
        pool->node[page] = FKV_NO_NODE;
        pool->writers[page] = 0;
        pool->in_place[page] = 0;
    }
}

uint32_t fkv_pool_copies(uint32_t refs, uint32_t tails) {
    if (tails == 0) return 0;
    return tails == refs ? tails - 1 : tails;
}

static fkv_pool_counts contribution(const fkv_pool *pool, uint32_t page) {
    bool in_tree = pool->node[page] != FKV_NO_NODE;
    return (fkv_pool_counts){.used = pool->refs[page] > (in_tree ? 1u : 0u),
                             .shared = pool->refs[page] >= 2,
                             .in_tree = in_tree,
                             .copies = fkv_pool_copies(pool->refs[page], pool->tails[page])};
}

static void add_counts(fkv_pool_counts *sum, fkv_pool_counts one) {
    sum->used += one.used;
    sum->shared += one.shared;
    sum->in_tree += one.in_tree;
    sum->copies += one.copies;
}

static void subtract_counts(fkv_pool_counts *sum, fkv_pool_counts one) {
    sum->used -= one.used;
    sum->shared -= one.shared;
    sum->in_tree -= one.in_tree;
    sum->copies -= one.copies;
}

static void change_page(fkv_pool *pool, uint32_t page, int d_refs, int d_tails, uint32_t node) {
    FKV_ASSERT(page < pool->n_pages);
    uint32_t before = pool->refs[page];
    subtract_counts(&pool->counts, contribution(pool, page));
    pool->refs[page] = before + (uint32_t)d_refs;
    pool->tails[page] += (uint32_t)d_tails;
    pool->node[page] = node;
    FKV_ASSERT(pool->refs[page] <= UINT16_MAX + 1u && pool->tails[page] <= pool->refs[page]);
    add_counts(&pool->counts, contribution(pool, page));

    uint32_t after = pool->refs[page];
    if (before == 0 && after != 0) {
        FKV_ASSERT(pool->n_free > 0 && pool->free[pool->n_free - 1] == page);
        pool->n_free--;
    } else if (before != 0 && after == 0) {
        pool->free[pool->n_free++] = page;
    }
}

void fkv_pool_change(fkv_pool *pool, uint32_t page, int d_refs, int d_tails) {
    change_page(pool, page, d_refs, d_tails, pool->node[page]);
}

uint32_t fkv_pool_take(fkv_pool *pool) {
    FKV_ASSERT(pool->n_free > 0);
    uint32_t page = pool->free[pool->n_free - 1];
    fkv_pool_change(pool, page, 1, 0);
    return page;
}

void fkv_pool_adopt(fkv_pool *pool, uint32_t page, uint32_t node) {
    FKV_ASSERT(pool->node[page] == FKV_NO_NODE && pool->refs[page] > 0);
    change_page(pool, page, 1, 0, node);
}

void fkv_pool_abandon(fkv_pool *pool, uint32_t page) {
    FKV_ASSERT(pool->node[page] != FKV_NO_NODE);
    change_page(pool, page, -1, 0, FKV_NO_NODE);
}

bool fkv_pool_consistent(const fkv_pool *pool, uint32_t *seen) {
    memset(seen, 0, pool->n_pages * sizeof *seen);
    if (pool->n_free > pool->n_pages) return false;
    for (uint32_t i = 0; i < pool->n_free; i++) {
        uint32_t page = pool->free[i];
        if (page >= pool->n_pages || seen[page]++ != 0) return false;
    }
    fkv_pool_counts sum = {0};
    for (uint32_t page = 0; page < pool->n_pages; page++) {
        if ((pool->refs[page] == 0) != (seen[page] == 1)) return false;
        if (pool->refs[page] == 0 && pool->node[page] != FKV_NO_NODE) return false;
        if (pool->tails[page] > pool->refs[page] || pool->writers[page] != 0 || pool->in_place[page] != 0) return false;
        add_counts(&sum, contribution(pool, page));
    }
    return sum.used == pool->counts.used && sum.shared == pool->counts.shared && sum.in_tree == pool->counts.in_tree &&
           sum.copies == pool->counts.copies;
}
