/* Prefix tree: cached full pages, keyed by their exact tokens, with pinning and LRU eviction. */
#ifndef FKV_PREFIX_TREE_H
#define FKV_PREFIX_TREE_H

#include "pager_state.h"

/* Longest prefix of a prompt that a sequence can share. All its nodes are in the tree and have the pages that each group needs.
 */
typedef struct fkv_match {
    uint32_t node; /* deepest node, or FKV_NO_NODE if n_pages is 0 */
    uint32_t n_pages;
    uint32_t n_idle; /* number of cached pages on the path; a sequence that shares the path pins them */
} fkv_match;

/* Reserves memory for the tree (carve.h). tree is NULL in the counting pass. The number of nodes is the number of pages in the
 * full group or, without a full group, in the largest window group. */
void fkv_tree_layout(fkv_carve *carve, const fkv_pager_spec *spec, fkv_tree *tree);
void fkv_tree_reset(fkv_pager *pager);

/* Returns the child of `parent` that has exactly these page_tokens tokens, or FKV_NO_NODE if there is none. parent: FKV_NO_NODE
 * for the first page of a prompt. */
uint32_t fkv_tree_find(const fkv_tree *tree, uint64_t tenant, uint32_t parent, const uint32_t *tokens);

/* Returns the longest usable match within the first n_tokens tokens. Does not change the tree. */
fkv_match fkv_tree_match(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens);

/* Marks a node as most recently used by setting its last_use to the current value of the clock. The caller must increment the
 * clock first and must also call this function for all ancestors of the node. */
void fkv_tree_touch(fkv_pager *pager, uint32_t node);

/* Adds an idle node that has no pages yet, and marks it as most recently used. Returns FKV_NO_NODE if every node is busy or
 * belongs to the current insertion. */
uint32_t fkv_tree_add(fkv_pager *pager, uint64_t tenant, uint32_t parent, const uint32_t *tokens);

/* Assigns an allocated page to a node as the node's page in `group`. */
void fkv_tree_adopt(fkv_pager *pager, uint32_t node, uint32_t group, uint32_t page);

/* Removes the page of `group` from a node. In the full group, the caller must remove the node as well. */
void fkv_tree_abandon(fkv_pager *pager, uint32_t node, uint32_t group);

/* Calls fkv_pool_change(). If the page is in the tree, also updates busy counts, heaps and n_idle. In a window group, the tree
 * drops its reference to a page if all other references belong to sequences that can still append to the page. The last of these
 * sequences can then write to the page itself instead of to a copy. */
void fkv_tree_page_change(fkv_pager *pager, uint32_t group, uint32_t page, int d_refs, int d_tails);

void fkv_tree_evict_oldest(fkv_pager *pager);               /* the tree must have an idle leaf */
void fkv_tree_remove_leaf(fkv_pager *pager, uint32_t node); /* the node must be idle, or become idle when its pages are removed */
/* Returns the number of pages of a window group that only the tree references. */
uint32_t fkv_tree_cached_pages(const fkv_pager *pager, uint32_t group);

/* Returns the heap from which fkv_tree_strip_page() evicts. The heap is empty if the group has no cached page. */
const fkv_node_heap *fkv_tree_strip_heap(const fkv_pager *pager, uint32_t group);

/* Evicts one cached page of a window group: the oldest page or, in the state group, the least useful state. The group must have a
 * cached page. In a group with spare pages, sink pages and all other pages are separate sets. The page is evicted from the larger
 * set, or from the set of other pages if both sets have the same size. Without its sink page, no part of a prefix can be shared.
 * If another page is missing, the prefix can still be shared up to the preceding span. If there is a state group, pages that no
 * snapshot needs are evicted first. */
void fkv_tree_strip_page(fkv_pager *pager, uint32_t group);

/* Removes a node whose page is in use but whose descendants are all idle. First evicts idle leaves of the tree in LRU order until
 * the node has no children. */
void fkv_tree_forget(fkv_pager *pager, uint32_t node);

/* Checks the invariants of the tree. busy, n_children: [n_nodes] scratch memory. */
bool fkv_tree_consistent(const fkv_pager *pager, uint32_t *busy, uint32_t *n_children);

#endif
