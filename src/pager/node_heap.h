/* Which node is the oldest, in O(log n): a binary heap that knows where each of its nodes stands. */
#ifndef FKV_NODE_HEAP_H
#define FKV_NODE_HEAP_H

#include "pager_state.h"

void fkv_heap_layout(fkv_carve *carve, fkv_node_heap *heap, uint32_t n_nodes, uint32_t n_fixed);
void fkv_heap_reset(fkv_node_heap *heap, uint32_t n_nodes);

void fkv_heap_push(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node);   /* not in yet */
void fkv_heap_remove(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node); /* in */
void fkv_heap_aged(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node);   /* last_use grew; in or not */

FKV_INLINE bool fkv_heap_has(const fkv_node_heap *heap, uint32_t node) { return heap->place[node] != FKV_NO_PLACE; }

bool fkv_heap_consistent(const fkv_node_heap *heap, const fkv_node *nodes, uint32_t n_nodes);

#endif
