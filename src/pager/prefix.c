/* Inserts pages of a sequence into the prefix tree, and clears the tree. Insertion follows these rules:
 *
 * - Existing nodes are kept: if a node with the same tokens exists, the sequence and the node each keep their own page.
 * - A page is in the tree at most once. Inserting it again with different tokens is an error, because a page is computed from
 * only one token sequence.
 * - The pool invariant takes precedence: an insertion ends early, without an error, if it would pin cached pages that are
 * promised to other sequences.
 * - In a window group, only pages that the sequence still holds are inserted. A prefix can therefore be shared up to the end of a
 * page only if it was inserted while the sequence held all pages that a query after this page attends to.
 */
#include "page_table.h"
#include "pager_state.h"
#include "prefix_tree.h"

/* Returns the pool page that holds logical page i of the sequence, or FKV_NO_PAGE if the sequence does not hold logical page
 * i. */
static uint32_t held_page(const fkv_pager *pager, uint32_t group, uint32_t slot, uint32_t i) {
    const fkv_group *g = &pager->groups[group];
    const fkv_sequence *s = &pager->sequences[slot];
    if (fkv_table_skip(g, pager->spec.page_tokens, s, s->len, i) != i) return FKV_NO_PAGE;
    return *fkv_table_entry(g, slot, i);
}

/* Longest path in the tree whose tokens match the beginning of the given tokens. */
typedef struct known_path {
    uint32_t n_pages;
    uint32_t n_idle; /* number of cached pages on the path that a new descendant would pin */
} known_path;

/* Checks that no page of the sequence is already in the tree with different tokens, and finds the existing path. */
static fkv_status check_insertion(const fkv_pager *pager, uint32_t slot, const uint32_t *tokens, uint32_t n_pages,
                                  known_path *known) {
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t node = FKV_NO_NODE;
    *known = (known_path){0};
    for (uint32_t i = 0; i < n_pages; i++) {
        if (known->n_pages == i) {
            node = fkv_tree_find(&pager->tree, pager->sequences[slot].tenant, node, tokens + (uint64_t)i * page_tokens);
            if (node != FKV_NO_NODE) {
                known->n_pages++;
                known->n_idle += pager->tree.nodes[node].busy == 0;
            }
        }
        for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
            uint32_t page = held_page(pager, g, slot, i);
            uint32_t present = page == FKV_NO_PAGE ? FKV_NO_NODE : pager->groups[g].pool.node[page];
            FKV_REQUIRE(
                present == FKV_NO_NODE || present == node, FKV_BAD_ARGUMENT,
                "the page that holds positions %u to %u is in the prefix tree with different tokens; pass the tokens from which the page was computed",
                i * page_tokens, (i + 1) * page_tokens - 1);
        }
    }
    return FKV_OK;
}

fkv_status fkv_pager_insert(fkv_pager *pager, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens) {
    uint32_t slot = 0;
    FKV_REQUIRE(tokens != NULL || n_tokens == 0, FKV_BAD_ARGUMENT,
                "tokens is NULL but n_tokens is %u; pass the tokens, or set n_tokens to 0", n_tokens);
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    const fkv_sequence *s = &pager->sequences[slot];
    FKV_REQUIRE(n_tokens <= s->len, FKV_BAD_ARGUMENT, "n_tokens is %u but the sequence has only %u tokens", n_tokens, s->len);
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t n_pages = n_tokens / page_tokens;
    known_path known;
    FKV_TRY(check_insertion(pager, slot, tokens, n_pages, &known));

    if (pager->full != FKV_NO_GROUP && fkv_group_promised(pager, pager->full) + known.n_idle > fkv_group_room(pager, pager->full))
        n_pages = fkv_min_u32(n_pages, known.n_pages);

    pager->tree.clock++;
    uint32_t above = FKV_NO_NODE;
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint32_t *page_of_tokens = tokens + (uint64_t)i * page_tokens;
        uint32_t node = FKV_NO_NODE;
        if (i < known.n_pages) {
            node = fkv_tree_find(&pager->tree, s->tenant, above, page_of_tokens);
            fkv_tree_touch(pager, node);
        } else {
            node = fkv_tree_add(pager, s->tenant, above, page_of_tokens);
            if (node == FKV_NO_NODE) break;
        }
        for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
            uint32_t page = held_page(pager, g, slot, i);
            if (page != FKV_NO_PAGE && pager->tree.nodes[node].pages[g] == FKV_NO_PAGE) fkv_tree_adopt(pager, node, g, page);
        }
        above = node;
    }
    fkv_pager_settle(pager);
    return FKV_OK;
}

fkv_status fkv_pager_clear(fkv_pager *pager) {
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    while (pager->tree.leaves.n > 0) fkv_tree_evict_oldest(pager);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (g != pager->full)
            while (fkv_tree_cached_pages(pager, g) > 0) fkv_tree_strip_page(pager, g);
    fkv_pager_settle(pager);
    return FKV_OK;
}
