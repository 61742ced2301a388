/* Full pages by their exact tokens: finding, pinning, ageing, giving up. */
#ifndef FKV_PREFIX_TREE_H
#define FKV_PREFIX_TREE_H

#include "pager_state.h"

/* n_pages tokens of a prompt that the tree holds and whose pages every group can use. */
typedef struct fkv_match {
    uint32_t node; /* the deepest, FKV_NO_NODE where n_pages is 0 */
    uint32_t n_pages;
    uint32_t n_idle; /* of the path: cached pages that a sequence on it would pin */
} fkv_match;

/* tree NULL while counting. Nodes: as many as the full group has pages, else as the largest window group. */
void fkv_tree_layout(fkv_carve *carve, const fkv_pager_spec *spec, fkv_tree *tree);
void fkv_tree_reset(fkv_pager *pager);

/* The node of exactly these page_tokens tokens below parent (FKV_NO_NODE: at the front), or FKV_NO_NODE. */
uint32_t fkv_tree_find(const fkv_tree *tree, uint64_t tenant, uint32_t parent, const uint32_t *tokens);

/* The deepest usable match of at most n_tokens tokens. Changes nothing. */
fkv_match fkv_tree_match(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens);

/* The node was used now. The caller has moved the clock and touches all above it too. */
void fkv_tree_touch(fkv_pager *pager, uint32_t node);

/* A new idle node without pages, used now; FKV_NO_NODE where every node is in use by a sequence or by this very insertion. */
uint32_t fkv_tree_add(fkv_pager *pager, uint64_t tenant, uint32_t parent, const uint32_t *tokens);

/* Gives the node a page that a sequence holds. */
void fkv_tree_adopt(fkv_pager *pager, uint32_t node, uint32_t group, uint32_t page);

/* Lets go of a page of the node: in a window group, or of a node that is about to be removed. */
void fkv_tree_abandon(fkv_pager *pager, uint32_t node, uint32_t group);

/* fkv_pool_change() for pages that may be in the tree: keeps busy, heaps and idle counts. In a window group the tree gives up a
 * page when all its other holders are about to write to it: they are owed no copy for its sake. */
void fkv_tree_page_change(fkv_pager *pager, uint32_t group, uint32_t page, int d_refs, int d_tails);

void fkv_tree_evict_oldest(fkv_pager *pager);                 /* there is an idle leaf */
void fkv_tree_remove_leaf(fkv_pager *pager, uint32_t node);   /* idle or about to be: letting go of its pages unpins it */
void fkv_tree_strip_oldest(fkv_pager *pager, uint32_t group); /* there is a cached page in this window group */

/* Removes a node that one sequence alone uses; everything below it is idle and goes before it, oldest leaves first. */
void fkv_tree_forget(fkv_pager *pager, uint32_t node);

bool fkv_tree_consistent(const fkv_pager *pager, uint32_t *busy, uint32_t *n_children); /* scratch: [n_nodes] each */

#endif
