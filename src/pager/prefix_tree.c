/* Nodes of the prefix tree, the hash table over them, and the heaps that determine the eviction order. A node represents one full
 * page of tokens. It is identified by its tenant, parent and tokens, and holds a reference to a page in each group.
 *
 * Tokens are always compared; the hash only finds candidates. Hash collisions therefore cost time but never return a wrong page.
 * The hash is seeded with the address of the pager, which an attacker does not know.
 *
 * Pinning follows from the reference counts: a node is busy while a sequence references its page (refs > 1) or one of its
 * descendants is busy. Pages of the full group pin their node. If there is no full group, the pages of all window groups pin it.
 * All descendants of an idle node are idle, so evicting idle leaves in LRU order can eventually evict every idle node.
 */
#include "prefix_tree.h"

#include "node_heap.h"
#include "page_table.h"
#include "pool.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static uint32_t node_count(const fkv_pager_spec *spec) {
    uint32_t most = 0;
    for (uint32_t g = 0; g < spec->n_groups; g++) {
        if (spec->groups[g].window == 0) return spec->groups[g].n_pages;
        most = fkv_max_u32(most, spec->groups[g].n_pages);
    }
    return most;
}

void fkv_tree_layout(fkv_carve *carve, const fkv_pager_spec *spec, fkv_tree *tree) {
    uint32_t n_nodes = node_count(spec);
    uint32_t n_buckets = 1;
    while (n_buckets < n_nodes && n_buckets < UINT32_C(1) << 31) n_buckets *= 2;

    fkv_node *nodes = FKV_CARVE(carve, n_nodes, fkv_node);
    uint32_t *tokens = FKV_CARVE(carve, (uint64_t)n_nodes * spec->page_tokens, uint32_t);
    uint32_t *free = FKV_CARVE(carve, n_nodes, uint32_t);
    uint32_t *buckets = FKV_CARVE(carve, n_buckets, uint32_t);
    if (tree != NULL) {
        *tree = (fkv_tree){.n_nodes = n_nodes,
                           .n_buckets = n_buckets,
                           .page_tokens = spec->page_tokens,
                           .nodes = nodes,
                           .tokens = tokens,
                           .free = free,
                           .buckets = buckets};
    }
    fkv_heap_layout(carve, tree == NULL ? NULL : &tree->leaves, n_nodes, 0, false);
    for (uint32_t g = 0; g < spec->n_groups; g++) {
        if (spec->groups[g].window == 0) continue;
        fkv_group shape = {0};
        fkv_table_shape(spec, g, &shape);
        fkv_heap_layout(carve, tree == NULL ? NULL : &tree->cached[g], n_nodes, shape.n_fixed, shape.is_state);
        if (shape.n_spare > 0) fkv_heap_layout(carve, tree == NULL ? NULL : &tree->sinks, n_nodes, 0, false);
    }
}

void fkv_tree_reset(fkv_pager *pager) {
    fkv_tree *tree = &pager->tree;
    tree->n_free = tree->n_nodes;
    tree->hash_mask = UINT64_MAX;
    tree->hash_seed = (uint64_t)(uintptr_t)pager;
    memset(tree->nodes, 0, tree->n_nodes * sizeof *tree->nodes);
    for (uint32_t node = 0; node < tree->n_nodes; node++) tree->free[node] = tree->n_nodes - 1 - node;
    for (uint32_t bucket = 0; bucket < tree->n_buckets; bucket++) tree->buckets[bucket] = FKV_NO_NODE;
    fkv_heap_reset(&tree->leaves, tree->n_nodes);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (pager->groups[g].window != 0) fkv_heap_reset(&tree->cached[g], tree->n_nodes);
    if (tree->sinks.items != NULL) fkv_heap_reset(&tree->sinks, tree->n_nodes);
}

/* ---- lookup ---- */

static uint32_t *node_tokens(const fkv_tree *tree, uint32_t node) { return &tree->tokens[(uint64_t)node * tree->page_tokens]; }

static uint32_t node_hash(const fkv_tree *tree, uint64_t tenant, uint32_t parent, const uint32_t *tokens) {
    uint64_t above[2] = {tenant, parent};
    uint64_t seed = XXH3_64bits_withSeed(above, sizeof above, tree->hash_seed);
    uint64_t hash = XXH3_64bits_withSeed(tokens, tree->page_tokens * sizeof *tokens, seed);
    return (uint32_t)(hash & tree->hash_mask);
}

static uint32_t *tree_bucket(const fkv_tree *tree, uint32_t hash) { return &tree->buckets[hash & (tree->n_buckets - 1)]; }

uint32_t fkv_tree_find(const fkv_tree *tree, uint64_t tenant, uint32_t parent, const uint32_t *tokens) {
    uint32_t hash = node_hash(tree, tenant, parent, tokens);
    uint32_t node = *tree_bucket(tree, hash);
    for (; node != FKV_NO_NODE; node = tree->nodes[node].next) {
        const fkv_node *n = &tree->nodes[node];
        if (n->hash == hash && n->parent == parent && n->tenant == tenant &&
            memcmp(node_tokens(tree, node), tokens, tree->page_tokens * sizeof *tokens) == 0)
            break;
    }
    return node;
}

/* Availability of one group's pages along the path that is being matched. sinks: true if all nodes of sink pages on the path have
 * a page in this group. run: number of consecutive nodes, ending at the deepest node of the path, that have a page in this group.
 */
typedef struct path_pages {
    bool sinks;
    uint32_t run;
} path_pages;

fkv_match fkv_tree_match(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens) {
    const fkv_tree *tree = &pager->tree;
    uint32_t page_tokens = tree->page_tokens;
    path_pages path[FKV_MAX_GROUPS];
    for (uint32_t g = 0; g < FKV_MAX_GROUPS; g++) path[g] = (path_pages){.sinks = true};

    fkv_match best = {.node = FKV_NO_NODE};
    uint32_t n_idle = 0;
    uint32_t node = FKV_NO_NODE;
    for (uint32_t i = 0; i < n_tokens / page_tokens; i++) {
        node = fkv_tree_find(tree, tenant, node, tokens + (uint64_t)i * page_tokens);
        if (node == FKV_NO_NODE) break;
        const fkv_node *n = &tree->nodes[node];
        n_idle += n->busy == 0;

        bool usable = true;
        for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
            const fkv_group *group = &pager->groups[g];
            bool there = n->pages[g] != FKV_NO_PAGE;
            path[g].run = there ? path[g].run + 1 : 0;
            if (i < group->n_fixed) path[g].sinks &= there;
            uint32_t first = fkv_max_u32(group->n_fixed, fkv_table_first(group, page_tokens, (i + 1) * page_tokens));
            usable &= path[g].sinks && (first > i || path[g].run > i - first);
        }
        if (usable) best = (fkv_match){.node = node, .n_pages = i + 1, .n_idle = n_idle};
    }
    return best;
}

/* Returns the heap that contains the node while only the tree references the node's page in the given window group. */
static fkv_node_heap *page_heap(fkv_pager *pager, uint32_t node, uint32_t group) {
    const fkv_group *g = &pager->groups[group];
    const bool is_sink = g->n_spare > 0 && pager->tree.nodes[node].depth < g->n_fixed;
    return is_sink ? &pager->tree.sinks : &pager->tree.cached[group];
}

void fkv_tree_touch(fkv_pager *pager, uint32_t node) {
    fkv_tree *tree = &pager->tree;
    tree->nodes[node].last_use = tree->clock;
    fkv_heap_aged(&tree->leaves, tree->nodes, node);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (g != pager->full) fkv_heap_aged(page_heap(pager, node, g), tree->nodes, node);
}

/* ---- pinning ---- */

/* Adds the node to the heap of evictable leaves if it is an idle leaf; otherwise removes it from the heap. */
static void update_leaf(fkv_tree *tree, uint32_t node) {
    const fkv_node *n = &tree->nodes[node];
    bool leaf = n->busy == 0 && n->n_children == 0;
    if (leaf == fkv_heap_has(&tree->leaves, node)) return;
    if (leaf)
        fkv_heap_push(&tree->leaves, tree->nodes, node);
    else
        fkv_heap_remove(&tree->leaves, tree->nodes, node);
}

static void pin_node(fkv_tree *tree, uint32_t node) {
    for (; node != FKV_NO_NODE && tree->nodes[node].busy++ == 0; node = tree->nodes[node].parent) {
        tree->n_idle--;
        update_leaf(tree, node);
    }
}

static void unpin_node(fkv_tree *tree, uint32_t node) {
    for (; node != FKV_NO_NODE && --tree->nodes[node].busy == 0; node = tree->nodes[node].parent) {
        tree->n_idle++;
        update_leaf(tree, node);
    }
}

/* Records whether a sequence references the node's page in the given group. */
static void set_used(fkv_pager *pager, uint32_t node, uint32_t group, bool used) {
    fkv_tree *tree = &pager->tree;
    uint32_t bit = UINT32_C(1) << group;
    if (((tree->nodes[node].used & bit) != 0) == used) return;
    tree->nodes[node].used ^= bit;
    if (pager->groups[group].window != 0) {
        if (used)
            fkv_heap_remove(page_heap(pager, node, group), tree->nodes, node);
        else
            fkv_heap_push(page_heap(pager, node, group), tree->nodes, node);
    }
    if (!pager->groups[group].pins) return;
    if (used)
        pin_node(tree, node);
    else
        unpin_node(tree, node);
}

void fkv_tree_adopt(fkv_pager *pager, uint32_t node, uint32_t group, uint32_t page) {
    fkv_tree *tree = &pager->tree;
    FKV_ASSERT(tree->nodes[node].pages[group] == FKV_NO_PAGE);
    fkv_pool_adopt(&pager->groups[group].pool, page, node);
    tree->nodes[node].pages[group] = page;
    if (pager->groups[group].window != 0) fkv_heap_push(page_heap(pager, node, group), tree->nodes, node);
    set_used(pager, node, group, pager->groups[group].pool.refs[page] > 1);
}

void fkv_tree_abandon(fkv_pager *pager, uint32_t node, uint32_t group) {
    fkv_tree *tree = &pager->tree;
    uint32_t page = tree->nodes[node].pages[group];
    set_used(pager, node, group, false);
    if (pager->groups[group].window != 0) fkv_heap_remove(page_heap(pager, node, group), tree->nodes, node);
    tree->nodes[node].pages[group] = FKV_NO_PAGE;
    fkv_pool_abandon(&pager->groups[group].pool, page);
    fkv_counter_add(&pager->counters.evictions, 1);
}

void fkv_tree_page_change(fkv_pager *pager, uint32_t group, uint32_t page, int d_refs, int d_tails) {
    fkv_pool *pool = &pager->groups[group].pool;
    fkv_pool_change(pool, page, d_refs, d_tails);
    uint32_t node = pool->node[page];
    if (node == FKV_NO_NODE) return;
    if (pager->groups[group].window != 0 && pool->tails[page] > 0 && pool->tails[page] == pool->refs[page] - 1)
        fkv_tree_abandon(pager, node, group);
    else
        set_used(pager, node, group, pool->refs[page] > 1);
}

/* ---- insertion and eviction ---- */

uint32_t fkv_tree_add(fkv_pager *pager, uint64_t tenant, uint32_t parent, const uint32_t *tokens) {
    fkv_tree *tree = &pager->tree;
    if (tree->n_free == 0) {
        /* nodes whose last_use is the current clock value belong to the path that is being inserted */
        if (tree->leaves.n == 0 || tree->nodes[tree->leaves.items[0]].last_use == tree->clock) return FKV_NO_NODE;
        fkv_tree_evict_oldest(pager);
    }
    uint32_t node = tree->free[--tree->n_free];
    uint32_t hash = node_hash(tree, tenant, parent, tokens);
    uint32_t *bucket = tree_bucket(tree, hash);
    fkv_node *n = &tree->nodes[node];
    *n = (fkv_node){.tenant = tenant,
                    .last_use = tree->clock,
                    .parent = parent,
                    .depth = parent == FKV_NO_NODE ? 0 : tree->nodes[parent].depth + 1,
                    .next = *bucket,
                    .hash = hash,
                    .live = true};
    for (uint32_t g = 0; g < FKV_MAX_GROUPS; g++) n->pages[g] = FKV_NO_PAGE;
    memcpy(node_tokens(tree, node), tokens, tree->page_tokens * sizeof *tokens);
    *bucket = node;
    tree->n_idle++;
    update_leaf(tree, node);
    if (parent != FKV_NO_NODE) {
        tree->nodes[parent].n_children++;
        update_leaf(tree, parent);
    }
    return node;
}

void fkv_tree_remove_leaf(fkv_pager *pager, uint32_t node) {
    fkv_tree *tree = &pager->tree;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (tree->nodes[node].pages[g] != FKV_NO_PAGE) fkv_tree_abandon(pager, node, g);
    FKV_ASSERT(fkv_heap_has(&tree->leaves, node));
    fkv_heap_remove(&tree->leaves, tree->nodes, node);

    uint32_t *link = tree_bucket(tree, tree->nodes[node].hash);
    while (*link != node) link = &tree->nodes[*link].next;
    *link = tree->nodes[node].next;

    uint32_t parent = tree->nodes[node].parent;
    if (parent != FKV_NO_NODE) {
        tree->nodes[parent].n_children--;
        update_leaf(tree, parent);
    }
    tree->n_idle--;
    tree->nodes[node] = (fkv_node){0};
    tree->free[tree->n_free++] = node;
}

void fkv_tree_evict_oldest(fkv_pager *pager) {
    FKV_ASSERT(pager->tree.leaves.n > 0);
    fkv_tree_remove_leaf(pager, pager->tree.leaves.items[0]);
}

/* Returns the distance, in pages, from a node's state back to the nearest earlier state on its path, or to the start of the
 * sequence if there is none. If the node's state is evicted, a prompt that could have used it must recompute this number of
 * pages. */
static uint64_t state_gap(const fkv_tree *tree, uint32_t node, uint32_t group) {
    uint64_t n = 1;
    for (uint32_t above = tree->nodes[node].parent; above != FKV_NO_NODE; above = tree->nodes[above].parent, n++)
        if (tree->nodes[above].pages[group] != FKV_NO_PAGE) break;
    return n;
}

/* Returns the age of a state: the number of states released since this state was released, multiplied by the time since its path
 * was last used. The second factor is large for the states of answers that no later prompt contains. */
static uint64_t state_age(const fkv_tree *tree, uint32_t node, uint32_t group) {
    const uint64_t most = UINT64_C(1) << 20; /* limits the products in least_useful_state() to 64 bits */
    const uint64_t by_push = fkv_heap_age(&tree->cached[group], node);
    const uint64_t by_use = tree->clock - tree->nodes[node].last_use + 1;
    return (by_push < most ? by_push : most) * (by_use < most ? by_use : most);
}

/* Returns the node whose state is least useful: the node with the smallest ratio state_gap() / state_age(). As a result, older
 * states of a conversation are thinned out more than recent ones, and a state that saves many pages of computation is kept for a
 * long time. */
static uint32_t least_useful_state(const fkv_tree *tree, uint32_t group) {
    const fkv_node_heap *heap = &tree->cached[group];
    enum { MAX_COMPARED = 255 }; /* bounds the time of an eviction; the first heap items are among the oldest */
    uint32_t worst = heap->items[0];
    uint64_t worst_gap = 0;
    uint64_t worst_age = 1;
    for (uint32_t i = 0; i < heap->n && i < MAX_COMPARED; i++) {
        const uint64_t gap = state_gap(tree, heap->items[i], group);
        const uint64_t age = state_age(tree, heap->items[i], group);
        if (i > 0 && gap * worst_age >= worst_gap * age) continue;
        worst = heap->items[i];
        worst_gap = gap;
        worst_age = age;
    }
    return worst;
}

/* Returns whether a prefix that ends at a snapshot needs the node's page of `group`, which must be a group with spare pages. This
 * is true if the node or one of its descendants in the same span has a snapshot that is not at the end of the span. */
static bool snapshot_needs(const fkv_pager *pager, uint32_t node, uint32_t group) {
    const fkv_node *nodes = pager->tree.nodes;
    const fkv_pool *states = &pager->groups[pager->state].pool;
    const uint32_t span = pager->groups[group].span;
    for (uint32_t page = 0; page < states->n_pages; page++) {
        uint32_t at = states->node[page];
        if (at == FKV_NO_NODE || nodes[at].depth / span != nodes[node].depth / span || (nodes[at].depth + 1) % span == 0)
            continue;
        while (nodes[at].depth > nodes[node].depth) at = nodes[at].parent;
        if (at == node) return true;
    }
    return false;
}

/* Returns the node whose page in a group with spare pages should be evicted: the oldest page that no snapshot needs, or the
 * oldest page if there is none. Without a snapshot, no prefix can end in the span of the page. */
static uint32_t least_needed_page(const fkv_pager *pager, uint32_t group) {
    const fkv_tree *tree = &pager->tree;
    const fkv_node_heap *heap = &tree->cached[group];
    enum { MAX_COMPARED = 63 }; /* bounds the time of an eviction; the first heap items are among the oldest */
    uint32_t worst = FKV_NO_NODE;
    for (uint32_t i = 0; i < heap->n && i < MAX_COMPARED; i++) {
        const uint32_t node = heap->items[i];
        const uint64_t last_use = tree->nodes[node].last_use;
        const bool is_older = worst == FKV_NO_NODE || last_use < tree->nodes[worst].last_use;
        if (is_older && !snapshot_needs(pager, node, group)) worst = node;
    }
    return worst != FKV_NO_NODE ? worst : heap->items[0];
}

uint32_t fkv_tree_cached_pages(const fkv_pager *pager, uint32_t group) {
    return pager->tree.cached[group].n + (pager->groups[group].n_spare > 0 ? pager->tree.sinks.n : 0);
}

const fkv_node_heap *fkv_tree_strip_heap(const fkv_pager *pager, uint32_t group) {
    const fkv_tree *tree = &pager->tree;
    const bool is_sink = pager->groups[group].n_spare > 0 && tree->sinks.n > tree->cached[group].n;
    return is_sink ? &tree->sinks : &tree->cached[group];
}

void fkv_tree_strip_page(fkv_pager *pager, uint32_t group) {
    const fkv_node_heap *heap = fkv_tree_strip_heap(pager, group);
    FKV_ASSERT(heap->n > 0);
    uint32_t node = heap->items[0];
    if (pager->groups[group].is_state)
        node = least_useful_state(&pager->tree, group);
    else if (pager->state != FKV_NO_GROUP && pager->groups[group].n_spare > 0 && heap != &pager->tree.sinks)
        node = least_needed_page(pager, group);
    fkv_tree_abandon(pager, node, group);
}

void fkv_tree_forget(fkv_pager *pager, uint32_t node) {
    FKV_ASSERT(pager->tree.nodes[node].busy == 1);
    while (pager->tree.nodes[node].n_children > 0) fkv_tree_evict_oldest(pager);
    fkv_tree_remove_leaf(pager, node);
}

/* ---- consistency checks ---- */

static bool node_consistent(const fkv_pager *pager, uint32_t node) {
    const fkv_tree *tree = &pager->tree;
    const fkv_node *n = &tree->nodes[node];
    if (n->last_use > tree->clock || fkv_tree_find(tree, n->tenant, n->parent, node_tokens(tree, node)) != node) return false;
    if (n->parent == FKV_NO_NODE) {
        if (n->depth != 0) return false;
    } else {
        if (n->parent >= tree->n_nodes) return false;
        const fkv_node *above = &tree->nodes[n->parent];
        if (!above->live || above->tenant != n->tenant || above->depth + 1 != n->depth || above->last_use < n->last_use)
            return false;
    }
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        const fkv_group *group = &pager->groups[g];
        uint32_t page = n->pages[g];
        bool used = (n->used >> g & 1) != 0;
        bool is_sink = group->n_spare > 0 && n->depth < group->n_fixed;
        bool in_heap = group->window != 0 && fkv_heap_has(is_sink ? &tree->sinks : &tree->cached[g], node);
        if (group->n_spare > 0 && fkv_heap_has(is_sink ? &tree->cached[g] : &tree->sinks, node)) return false;
        if (page == FKV_NO_PAGE) {
            if (group->window == 0 || used || in_heap) return false;
            continue;
        }
        if (page >= group->pool.n_pages || group->pool.node[page] != node || used != (group->pool.refs[page] > 1)) return false;
        if (group->window != 0 && in_heap == used) return false;
    }
    return (n->busy == 0 && n->n_children == 0) == fkv_heap_has(&tree->leaves, node);
}

bool fkv_tree_consistent(const fkv_pager *pager, uint32_t *busy, uint32_t *n_children) {
    const fkv_tree *tree = &pager->tree;
    memset(busy, 0, tree->n_nodes * sizeof *busy);
    memset(n_children, 0, tree->n_nodes * sizeof *n_children);
    uint32_t n_live = 0;
    uint32_t n_idle = 0;
    uint64_t n_pages[FKV_MAX_GROUPS] = {0};
    for (uint32_t node = 0; node < tree->n_nodes; node++) {
        const fkv_node *n = &tree->nodes[node];
        if (!n->live) {
            if (fkv_heap_has(&tree->leaves, node)) return false;
            continue;
        }
        if (!node_consistent(pager, node)) return false;
        n_live++;
        n_idle += n->busy == 0;
        for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
            n_pages[g] += n->pages[g] != FKV_NO_PAGE;
            busy[node] += pager->groups[g].pins && (n->used >> g & 1) != 0;
        }
        if (n->parent == FKV_NO_NODE) continue;
        n_children[n->parent]++;
        busy[n->parent] += n->busy > 0;
    }
    for (uint32_t node = 0; node < tree->n_nodes; node++)
        if (busy[node] != tree->nodes[node].busy || n_children[node] != tree->nodes[node].n_children) return false;
    if (n_live + tree->n_free != tree->n_nodes || n_idle != tree->n_idle) return false;

    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (n_pages[g] != pager->groups[g].pool.counts.in_tree) return false;
        if (pager->groups[g].window == 0) continue;
        if (!fkv_heap_consistent(&tree->cached[g], tree->nodes, tree->n_nodes)) return false;
        if (pager->groups[g].n_spare > 0 && !fkv_heap_consistent(&tree->sinks, tree->nodes, tree->n_nodes)) return false;
    }
    return fkv_heap_consistent(&tree->leaves, tree->nodes, tree->n_nodes);
}
