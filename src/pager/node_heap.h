/* Indexed binary heap of prefix-tree nodes. Finds the oldest node in O(1), and adds, removes or updates a node in O(log n). */
#ifndef FKV_NODE_HEAP_H
#define FKV_NODE_HEAP_H

#include "pager_state.h"

/* Reserves memory for a heap (carve.h). If by_push is true, nodes are ordered by their last push instead of last_use.
 */
void fkv_heap_layout(fkv_carve *carve, fkv_node_heap *heap, uint32_t n_nodes, uint32_t n_fixed, bool by_push);
void fkv_heap_reset(fkv_node_heap *heap, uint32_t n_nodes);

void fkv_heap_push(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node);   /* node must not be in the heap */
void fkv_heap_remove(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node); /* node must be in the heap */
void fkv_heap_aged(fkv_node_heap *heap, const fkv_node *nodes,
                   uint32_t node); /* call after last_use has increased; does nothing if the node is not in the heap */

/* For a heap that is ordered by push time, returns the age of a node: 1 plus the number of pushes since the node was pushed.
 */
FKV_INLINE uint64_t fkv_heap_age(const fkv_node_heap *heap, uint32_t node) {
    return heap->pushed[heap->n_nodes] - heap->pushed[node] + 1;
}

FKV_INLINE bool fkv_heap_has(const fkv_node_heap *heap, uint32_t node) { return heap->place[node] != FKV_NO_PLACE; }

bool fkv_heap_consistent(const fkv_node_heap *heap, const fkv_node *nodes, uint32_t n_nodes);

#endif
