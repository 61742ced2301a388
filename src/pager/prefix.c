/* Offers the pages of a sequence to the prefix tree, and empties the tree. Owns the rules of an offer, not the nodes:
 *
 * - what is there stays: where a node has the tokens already, the sequence keeps its page and the node its own;
 * - a page stands in the tree once: tokens that would put it elsewhere contradict what it was computed from;
 * - the law of the pool comes first: an offer that would pin cached pages which are promised to others ends there, quietly;
 * - of a group with spare pages the tree takes the sink pages: no sequence that joins needs another.
 */
#include "page_table.h"
#include "pager_state.h"
#include "prefix_tree.h"

/* The page of logical page i that the sequence still holds, or FKV_NO_PAGE. */
static uint32_t held_page(const fkv_pager *pager, uint32_t group, uint32_t slot, uint32_t i) {
    const fkv_group *g = &pager->groups[group];
    const fkv_sequence *s = &pager->sequences[slot];
    if (fkv_table_skip(g, pager->spec.page_tokens, s, s->len, i) != i) return FKV_NO_PAGE;
    return *fkv_table_entry(g, slot, i);
}

/* How far the tree has these tokens already. */
typedef struct known_path {
    uint32_t n_pages;
    uint32_t n_idle; /* cached pages that a new node below would pin */
} known_path;

static fkv_status check_offer(const fkv_pager *pager, uint32_t slot, const uint32_t *tokens, uint32_t n_pages,
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
            uint32_t stands = page == FKV_NO_PAGE ? FKV_NO_NODE : pager->groups[g].pool.node[page];
            FKV_REQUIRE(
                stands == FKV_NO_NODE || stands == node, FKV_BAD_ARGUMENT,
                "the page of tokens %u to %u is in the prefix tree under other tokens: pass the tokens it was computed from",
                i * page_tokens, (i + 1) * page_tokens - 1);
        }
    }
    return FKV_OK;
}

fkv_status fkv_pager_insert(fkv_pager *pager, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens) {
    uint32_t slot = 0;
    FKV_REQUIRE(tokens != NULL || n_tokens == 0, FKV_BAD_ARGUMENT, "tokens is NULL and n_tokens is %u: pass the tokens, or 0",
                n_tokens);
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open: commit or abort it first");
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    const fkv_sequence *s = &pager->sequences[slot];
    FKV_REQUIRE(n_tokens <= s->len, FKV_BAD_ARGUMENT, "n_tokens is %u and the sequence has %u: offer what is there", n_tokens,
                s->len);
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t n_pages = n_tokens / page_tokens;
    known_path known;
    FKV_TRY(check_offer(pager, slot, tokens, n_pages, &known));

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
            bool wanted = pager->groups[g].n_spare == 0 || i < pager->groups[g].n_fixed;
            if (wanted && page != FKV_NO_PAGE && pager->tree.nodes[node].pages[g] == FKV_NO_PAGE)
                fkv_tree_adopt(pager, node, g, page);
        }
        above = node;
    }
    fkv_pager_settle(pager);
    return FKV_OK;
}

fkv_status fkv_pager_clear(fkv_pager *pager) {
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open: commit or abort it first");
    while (pager->tree.leaves.n > 0) fkv_tree_evict_oldest(pager);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (g != pager->full)
            while (pager->tree.cached[g].n > 0) fkv_tree_strip_oldest(pager, g);
    fkv_pager_settle(pager);
    return FKV_OK;
}
