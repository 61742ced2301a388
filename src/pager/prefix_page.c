/* Looks up and inserts single pages of the prefix tree, for prefix stores. These functions own neither nodes nor pages.
 *
 * An inserted page is idle: it changes from a free page to a cached page, so the pool invariant (promised <= free + cached) is
 * preserved. To make room for the page, only prefixes that were used less recently than the path of the page are evicted.
 */
#include "pager_state.h"
#include "pool.h"
#include "prefix_tree.h"

/* Returns the node of logical page n_pages - 1, or FKV_NO_NODE if the tree does not contain this page. */
static uint32_t find_page_node(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages) {
    uint32_t node = FKV_NO_NODE;
    for (uint32_t i = 0; i < n_pages; i++) {
        node = fkv_tree_find(&pager->tree, tenant, node, tokens + (uint64_t)i * pager->spec.page_tokens);
        if (node == FKV_NO_NODE) break;
    }
    return node;
}

bool fkv_pager_prefix_page(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                           uint32_t pages[FKV_MAX_GROUPS]) {
    uint32_t node = find_page_node(pager, tenant, tokens, n_pages);
    if (node == FKV_NO_NODE) return false;
    memcpy(pages, pager->tree.nodes[node].pages, sizeof pager->tree.nodes[node].pages);
    return true;
}

fkv_status fkv_pager_drop_state(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages) {
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    if (pager->state == FKV_NO_GROUP) return FKV_OK;
    const uint32_t node = find_page_node(pager, tenant, tokens, n_pages);
    const uint32_t page = node != FKV_NO_NODE ? pager->tree.nodes[node].pages[pager->state] : FKV_NO_PAGE;
    if (page == FKV_NO_PAGE || pager->groups[pager->state].pool.refs[page] > 1) return FKV_OK;
    fkv_tree_abandon(pager, node, pager->state);
    fkv_pager_settle(pager);
    return FKV_OK;
}

/* Returns whether pages of the group are inserted together with their node. Two kinds are inserted later
 * (fkv_pager_part_begin()): snapshots, and pages other than sink pages of a group with spare pages. */
static bool is_node_page(const fkv_pager *pager, uint32_t logical, uint32_t group) {
    const fkv_group *g = &pager->groups[group];
    return group < pager->spec.n_groups && !g->is_state && (g->n_spare == 0 || logical < g->n_fixed);
}

uint32_t fkv_pager_page_groups(const fkv_pager *pager, uint32_t logical) {
    uint32_t groups = 0;
    for (uint32_t g = 0; g < FKV_MAX_GROUPS; g++) groups |= (uint32_t)is_node_page(pager, logical, g) << g;
    return groups;
}

bool fkv_pager_prefix_groups(const fkv_pager *pager, uint32_t logical, uint32_t groups) {
    if (pager->full != FKV_NO_GROUP && (groups >> pager->full & 1) == 0) return false;
    return groups != 0 && (groups & ~fkv_pager_page_groups(pager, logical)) == 0;
}

/* Ensures that the group has a free page. To free a page, evicts only pages that were used less recently than the most recently
 * touched path. Returns false if no page can be freed. */
static bool ensure_free_page(fkv_pager *pager, uint32_t group) {
    const fkv_tree *tree = &pager->tree;
    if (pager->groups[group].pool.n_free > 0) return true;
    const fkv_node_heap *heap = group == pager->full ? &tree->leaves : fkv_tree_strip_heap(pager, group);
    if (heap->n == 0 || tree->nodes[heap->items[0]].last_use == tree->clock) return false;
    fkv_group_make_free(pager, group, 1);
    return true;
}

/* Marks the nodes of the first n_pages logical pages as most recently used. *above receives the last of these nodes. */
static fkv_status touch_path(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t *above) {
    *above = find_page_node(pager, tenant, tokens, n_pages);
    FKV_REQUIRE(n_pages == 0 || *above != FKV_NO_NODE, FKV_GONE,
                "some of the %u pages that precede this page are not in the prefix tree", n_pages);
    pager->tree.clock++;
    for (uint32_t node = *above; node != FKV_NO_NODE; node = pager->tree.nodes[node].parent) fkv_tree_touch(pager, node);
    return FKV_OK;
}

fkv_status fkv_pager_prefix_begin(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t groups,
                                  uint32_t pages[FKV_MAX_GROUPS]) {
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    FKV_ASSERT(n_pages > 0 && fkv_pager_prefix_groups(pager, n_pages - 1, groups));
    const uint32_t *last = tokens + (uint64_t)(n_pages - 1) * pager->spec.page_tokens;
    uint32_t above = FKV_NO_NODE;
    FKV_TRY(touch_path(pager, tenant, tokens, n_pages - 1, &above));
    uint32_t node = fkv_tree_find(&pager->tree, tenant, above, last);
    if (node != FKV_NO_NODE) fkv_tree_touch(pager, node);
    bool available = true;
    for (uint32_t g = 0; g < pager->spec.n_groups && available; g++)
        if ((groups >> g & 1) != 0 && (node == FKV_NO_NODE || pager->tree.nodes[node].pages[g] == FKV_NO_PAGE))
            available = ensure_free_page(pager, g);
    if (available && node == FKV_NO_NODE) node = fkv_tree_add(pager, tenant, above, last);
    if (!available || node == FKV_NO_NODE) {
        fkv_pager_settle(pager);
        return fkv_fail(FKV_POOL_FULL, "no page is free, and all cached pages were used more recently than this prefix");
    }
    for (uint32_t g = 0; g < FKV_MAX_GROUPS; g++) {
        pages[g] = FKV_NO_PAGE;
        if ((groups >> g & 1) == 0 || pager->tree.nodes[node].pages[g] != FKV_NO_PAGE) continue;
        pages[g] = fkv_pool_take(&pager->groups[g].pool);
        fkv_tree_adopt(pager, node, g, pages[g]);
        fkv_tree_page_change(pager, g, pages[g], -1, 0); /* now only the tree references the page */
    }
    return FKV_OK;
}

fkv_status fkv_pager_part_begin(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t group,
                                uint32_t pages[FKV_MAX_GROUPS]) {
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    FKV_ASSERT(n_pages > 0 && group < pager->spec.n_groups && !is_node_page(pager, n_pages - 1, group));
    uint32_t node = FKV_NO_NODE;
    for (uint32_t g = 0; g < FKV_MAX_GROUPS; g++) pages[g] = FKV_NO_PAGE;
    FKV_TRY(touch_path(pager, tenant, tokens, n_pages, &node));
    if (pager->tree.nodes[node].pages[group] != FKV_NO_PAGE) return FKV_OK;
    if (!ensure_free_page(pager, group)) {
        fkv_pager_settle(pager);
        return fkv_fail(FKV_POOL_FULL,
                        "no page of layer group %u is free, and all its cached pages were used more recently than this prefix",
                        group);
    }
    pages[group] = fkv_pool_take(&pager->groups[group].pool);
    fkv_tree_adopt(pager, node, group, pages[group]);
    fkv_tree_page_change(pager, group, pages[group], -1, 0); /* now only the tree references the page */
    return FKV_OK;
}

void fkv_pager_prefix_end(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                          const uint32_t pages[FKV_MAX_GROUPS], bool good) {
    uint32_t node = find_page_node(pager, tenant, tokens, n_pages);
    FKV_ASSERT(node != FKV_NO_NODE);
    const fkv_node *n = &pager->tree.nodes[node];
    bool is_empty = !good;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (!good && pages[g] != FKV_NO_PAGE) fkv_tree_abandon(pager, node, g);
        is_empty &= n->pages[g] == FKV_NO_PAGE;
    }
    if (is_empty && n->n_children == 0 && n->busy == 0) fkv_tree_remove_leaf(pager, node);
    fkv_pager_settle(pager);
}
