/* Indexed binary heap over prefix-tree nodes. The heap stores node indices; the nodes themselves are in the tree.
 *
 * Invariants: no node is older than its parent in the heap; the arrays items and place are inverses of each other.
 */
#include "node_heap.h"

void fkv_heap_layout(fkv_carve *carve, fkv_node_heap *heap, uint32_t n_nodes, uint32_t n_fixed, bool by_push) {
    uint32_t *items = FKV_CARVE(carve, n_nodes, uint32_t);
    uint32_t *place = FKV_CARVE(carve, n_nodes, uint32_t);
    uint64_t *pushed = by_push ? FKV_CARVE(carve, (uint64_t)n_nodes + 1, uint64_t) : NULL;
    if (heap == NULL) return;
    *heap = (fkv_node_heap){.n_fixed = n_fixed, .items = items, .place = place, .pushed = pushed};
}

void fkv_heap_reset(fkv_node_heap *heap, uint32_t n_nodes) {
    for (uint32_t node = 0; node < n_nodes; node++) {
        heap->items[node] = 0;
        heap->place[node] = FKV_NO_PLACE;
    }
    if (heap->pushed != NULL) memset(heap->pushed, 0, ((size_t)n_nodes + 1) * sizeof *heap->pushed);
    heap->n_nodes = n_nodes;
}

/* Returns a node's rank among the nodes with the same last_use. The node with the lowest rank is evicted first. Nodes of sink
 * pages have the highest ranks, because sink pages are visible to every later query. */
static uint32_t eviction_rank(const fkv_node_heap *heap, const fkv_node *node) {
    return node->depth < heap->n_fixed ? UINT32_MAX - heap->n_fixed + node->depth : node->depth;
}

static bool is_older(const fkv_node_heap *heap, const fkv_node *nodes, uint32_t a, uint32_t b) {
    if (heap->pushed != NULL) return heap->pushed[a] < heap->pushed[b];
    if (nodes[a].last_use != nodes[b].last_use) return nodes[a].last_use < nodes[b].last_use;
    return eviction_rank(heap, &nodes[a]) < eviction_rank(heap, &nodes[b]);
}

static void set_heap_item(fkv_node_heap *heap, uint32_t place, uint32_t node) {
    heap->items[place] = node;
    heap->place[node] = place;
}

static void sift_node_up(fkv_node_heap *heap, const fkv_node *nodes, uint32_t place) {
    uint32_t node = heap->items[place];
    while (place > 0) {
        uint32_t above = (place - 1) / 2;
        if (!is_older(heap, nodes, node, heap->items[above])) break;
        set_heap_item(heap, place, heap->items[above]);
        place = above;
    }
    set_heap_item(heap, place, node);
}

static void sift_node_down(fkv_node_heap *heap, const fkv_node *nodes, uint32_t place) {
    uint32_t node = heap->items[place];
    for (;;) {
        uint32_t below = 2 * place + 1;
        if (below >= heap->n) break;
        if (below + 1 < heap->n && is_older(heap, nodes, heap->items[below + 1], heap->items[below])) below++;
        if (!is_older(heap, nodes, heap->items[below], node)) break;
        set_heap_item(heap, place, heap->items[below]);
        place = below;
    }
    set_heap_item(heap, place, node);
}

void fkv_heap_push(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node) {
    FKV_ASSERT(!fkv_heap_has(heap, node));
    if (heap->pushed != NULL) heap->pushed[node] = ++heap->pushed[heap->n_nodes];
    set_heap_item(heap, heap->n++, node);
    sift_node_up(heap, nodes, heap->n - 1);
}

void fkv_heap_remove(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node) {
    FKV_ASSERT(fkv_heap_has(heap, node));
    uint32_t place = heap->place[node];
    uint32_t last = heap->items[--heap->n];
    heap->place[node] = FKV_NO_PLACE;
    if (last == node) return;
    set_heap_item(heap, place, last);
    sift_node_up(heap, nodes, place);
    sift_node_down(heap, nodes, heap->place[last]);
}

void fkv_heap_aged(fkv_node_heap *heap, const fkv_node *nodes, uint32_t node) {
    if (fkv_heap_has(heap, node)) sift_node_down(heap, nodes, heap->place[node]);
}

bool fkv_heap_consistent(const fkv_node_heap *heap, const fkv_node *nodes, uint32_t n_nodes) {
    if (heap->n > n_nodes) return false;
    for (uint32_t place = 0; place < heap->n; place++) {
        uint32_t node = heap->items[place];
        if (node >= n_nodes || heap->place[node] != place) return false;
        if (place > 0 && is_older(heap, nodes, node, heap->items[(place - 1) / 2])) return false;
    }
    uint32_t n = 0;
    for (uint32_t node = 0; node < n_nodes; node++) n += fkv_heap_has(heap, node);
    return n == heap->n;
}
