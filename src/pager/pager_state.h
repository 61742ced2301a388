/* Private data structures of the pager. The invariant of each counter is stated next to it.
 *
 * Only the thread that uses the cache may access these structures, except for `counters`, which any thread may read. Pages, nodes
 * and slots are identified by indices, and all pointers refer to the pager's own block of memory. fkv_pool is modified only by
 * pool.c, the shapes of page tables by page_table.c, fkv_tree by node_heap.c and prefix_tree.c, fkv_sequence and fkv_step_state
 * by sequence.c and step.c, and everything else by pager.c.
 */
#ifndef FKV_PAGER_STATE_H
#define FKV_PAGER_STATE_H

#include "pager.h"

#include <stdatomic.h>

enum { FKV_NO_NODE = 0xffffffffu, FKV_NO_PLACE = 0xffffffffu, FKV_NO_GROUP = 0xffffffffu, FKV_NO_ROW = 0xffffffffu };

/* Counters over all pages of a pool. */
typedef struct fkv_pool_counts {
    uint64_t used;    /* number of pages that a page table or the open step references */
    uint64_t shared;  /* number of pages with refs >= 2 */
    uint64_t in_tree; /* number of pages that a prefix-tree node references */
    uint64_t copies;  /* sum of copies(page) as defined in pager.h */
} fkv_pool_counts;

/* refs = number of tables that hold the page + (node != FKV_NO_NODE) + number of page copies and state moves in the open step
 * that read the page. refs == 0 <=> the page is in free[0 .. n_free); tails <= refs. */
typedef struct fkv_pool {
    uint32_t n_pages;
    uint32_t n_free;
    uint32_t *free;     /* [n_pages] stack of free pages */
    uint32_t *refs;     /* [n_pages] reference counts */
    uint32_t *tails;    /* [n_pages] number of sequences whose last page is this page and that may still append to it */
    uint32_t *node;     /* [n_pages] prefix-tree node of the page, or FKV_NO_NODE */
    uint32_t *writers;  /* [n_pages] number of rows that append to the page; all 0 except during step_begin() */
    uint32_t *in_place; /* [n_pages] index of the row that may write to the page without a copy; valid only if writers > 0 */
    fkv_pool_counts counts;
} fkv_pool;

/* One layer group. A sequence of length L holds exactly the logical pages [0, min(n_fixed, pages(L))) and
 * [max(n_fixed, first_held(L)), pages(L)). The table contents are therefore a function of the length and, in a group with spare
 * pages, of spare_from: first_held(L) = n_spare == 0 ? first_page(L) : max(first_page(L minus n_spare pages), spare_from). */
typedef struct fkv_group {
    uint32_t window;  /* 0 for the full group */
    uint32_t n_spare; /* number of spare pages */
    uint32_t span;    /* pages per span, at least 1 */
    uint32_t n_fixed;
    uint32_t n_ring;
    uint32_t width;    /* number of table entries per sequence: n_fixed + n_ring */
    uint32_t n_rest;   /* maximum number of entries that a sequence uses between steps */
    uint32_t n_step;   /* maximum number of pages that one step adds beyond n_rest, over all sequences */
    uint32_t *entries; /* [max_seqs, width], FKV_NO_PAGE if no page is held; rows from n_slots_used on are uninitialized */
    fkv_pool pool;
    bool pins;         /* true if a sequence keeps a node busy by referencing the node's page in this group */
    bool is_state;     /* true for the state group, in which a sequence has one page (table entry 0) and tails are always 0 */
    uint64_t reserved; /* sum of pages(max_tokens) over all sequences; in a window group, sum of rest(max_tokens) */
    uint64_t in_steps; /* sum of cap(max_tokens) - rest(max_tokens) over all sequences; 0 in the full group */
    uint64_t entered;  /* full group: sum of pages(length) over all sequences; window group: always 0 */
    uint64_t taken;    /* full group: number of pages that the open step has allocated; window group: always 0 */
} fkv_group;

/* Prefix-tree node: one full page of tokens, identified by tenant, parent and tokens. busy = (number of groups with `pins` set in
 * which the node's page has refs > 1) + (number of busy children). A node with busy == 0 is idle, and so are all its
 * descendants. */
typedef struct fkv_node {
    uint64_t tenant;
    uint64_t last_use; /* value of the LRU clock at the last use; at most last_use of the parent */
    uint32_t parent;   /* FKV_NO_NODE for the first page of a prompt */
    uint32_t depth;    /* logical page number */
    uint32_t n_children;
    uint32_t busy;
    uint32_t next;                  /* next node in the hash bucket */
    uint32_t hash;                  /* hash of tenant, parent and tokens; its low bits select the bucket */
    uint32_t used;                  /* bit g is set if the node's page in group g has refs > 1 */
    uint32_t pages[FKV_MAX_GROUPS]; /* the node's page in each group; may be FKV_NO_PAGE in a window group */
    bool live;
} fkv_node;

/* Binary heap of nodes, with the smallest last_use on top. Among nodes with the same last_use, shallower nodes come first, and
 * nodes of sink pages (depth < n_fixed) come last. items[place[node]] == node; place[node] == FKV_NO_PLACE if the node is not in
 * the heap. */
typedef struct fkv_node_heap {
    uint32_t n;
    uint32_t n_fixed;
    uint32_t *items;  /* [n_nodes] */
    uint32_t *place;  /* [n_nodes] */
    uint64_t *pushed; /* [n_nodes + 1] serial number of each node's last push, followed by the total number of pushes; NULL if
                         nodes are ordered by last_use */
    uint32_t n_nodes;
} fkv_node_heap;

typedef struct fkv_tree {
    uint32_t n_nodes;
    uint32_t n_free;
    uint32_t n_idle; /* number of live nodes with busy == 0; their pages are cached pages of the group of full-attention layers */
    uint32_t n_buckets;
    uint32_t page_tokens;
    uint64_t hash_seed;
    uint64_t hash_mask; /* mask with all bits set; tests clear bits to force hash collisions */
    uint64_t clock;
    fkv_node *nodes;
    uint32_t *tokens;                     /* [n_nodes, page_tokens] */
    uint32_t *free;                       /* [n_nodes] stack of free nodes */
    uint32_t *buckets;                    /* [n_buckets] first node of each chain */
    fkv_node_heap leaves;                 /* idle nodes without children, which can be evicted */
    fkv_node_heap cached[FKV_MAX_GROUPS]; /* for each window group, the nodes whose page in that group is referenced only by the
                                             tree. A state is pushed when the last sequence that uses it releases it, so states
                                             are ordered by last use */
    fkv_node_heap sinks; /* like `cached`, but for the sink pages of the group with spare pages; `cached` excludes them */
} fkv_tree;

/* State of a slot. The handle of a sequence is generation << 16 | slot. Generations are unique within the process, so handles of
 * closed sequences and of other pagers are detected. If `open` is true and the generation is 0, the sequence was closed during
 * the open step and keeps its pages until the step ends. */
typedef struct fkv_sequence {
    uint64_t generation; /* 48-bit generation number; 0 if the sequence is closed */
    uint64_t tenant;
    uint32_t len;
    uint32_t max_tokens;
    uint32_t spare_from; /* first logical page, apart from sink pages, that the sequence may hold in a group with spare pages; <=
                            fkv_table_joins(len) */
    uint32_t row;        /* index of the sequence's row in the open step; FKV_NO_ROW if the step has no row for it */
    bool open;           /* true while the sequence holds pages and a reservation */
} fkv_sequence;

/* Number of sequences opened by all pagers of the process. Tests set it to check the wraparound of generations. */
extern _Atomic uint64_t fkv_sequences_opened;

/* State of the open step; all fields are 0 if no step is open. */
typedef struct fkv_step_state {
    bool open;
    uint32_t n_rows;
    uint32_t n_copies;
    uint32_t n_closing;     /* number of sequences closed since the step began */
    fkv_step_row *rows;     /* [min(max_seqs, max_step_tokens)] */
    fkv_page_copy *copies;  /* [rows * n_groups] */
    fkv_state_move *states; /* [rows] states that each row reads and writes, or NULL if there is no state group */
} fkv_step_state;

/* Counters for fkv_pager_stats(). They are relaxed atomics with a single writer. `groups` and `seqs` are updated at the end of
 * every call that modifies the pager. */
typedef struct fkv_group_counters {
    _Atomic uint32_t free, held, shared, cached, pinned, promised;
} fkv_group_counters;

typedef struct fkv_pager_counters {
    fkv_group_counters groups[FKV_MAX_GROUPS];
    _Atomic uint32_t seqs;
    _Atomic uint64_t steps, aborts, tokens, page_copies, hit_tokens, hits, evictions;
} fkv_pager_counters;

struct fkv_pager {
    fkv_pager_spec spec;
    uint32_t full;           /* index of the full group, or FKV_NO_GROUP */
    uint32_t state;          /* index of the state group, or FKV_NO_GROUP */
    uint32_t n_seqs;         /* number of open sequences, including those that will be released at the end of the step */
    uint32_t *slots;         /* [max_seqs] stack of slot indices; the free slots are slots[n_seqs .. max_seqs) */
    uint32_t n_slots_used;   /* slots [n_slots_used, max_seqs) have never been used; new slots are used in ascending order */
    uint32_t *audit;         /* [2, n_audit] scratch memory for fkv_pager_consistent() */
    uint32_t n_audit;        /* number of pages in the largest pool */
    fkv_sequence *sequences; /* [max_seqs] */
    fkv_group groups[FKV_MAX_GROUPS];
    fkv_tree tree;
    fkv_step_state step;
    fkv_pager_counters counters;
};

/* Returns the number of pages that n_tokens tokens occupy. */
FKV_INLINE uint32_t fkv_pages_of(const fkv_pager *pager, uint32_t n_tokens) {
    return fkv_ceil_div(n_tokens, pager->spec.page_tokens);
}

/* Returns whether the sequence has a partially filled last page to which it may still append. */
FKV_INLINE bool fkv_has_tail(const fkv_pager *pager, const fkv_sequence *s) {
    return s->len % pager->spec.page_tokens != 0 && s->len < s->max_tokens;
}

/* Returns whether logical page i of the group is the partially filled last page to which the sequence may still append. Pages of
 * the state group are never written in place, so they are never tails. */
FKV_INLINE bool fkv_is_tail(const fkv_pager *pager, const fkv_group *group, const fkv_sequence *s, uint32_t i) {
    return !group->is_state && fkv_has_tail(pager, s) && i == s->len / pager->spec.page_tokens;
}

/* Adds to a counter that has a single writer. */
FKV_INLINE void fkv_counter_add(_Atomic uint64_t *counter, uint64_t n) {
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

/* ---- pager.c: reservations ---- */

/* Returns the number of pages reserved by all sequences, including the shared step pages of a window group. */
FKV_INLINE uint64_t fkv_group_reserved(const fkv_group *group) {
    return group->reserved + (group->in_steps < group->n_step ? group->in_steps : group->n_step);
}

/* Return the left-hand and the right-hand side of the pool invariant promised <= free + cached. */
uint64_t fkv_group_promised(const fkv_pager *pager, uint32_t group);
uint64_t fkv_group_room(const fkv_pager *pager, uint32_t group); /* free + cached */

/* Evicts cached pages until n pages are free; n <= free + cached. */
void fkv_group_make_free(fkv_pager *pager, uint32_t group, uint64_t n);

/* Called at the end of every function that modifies the pager. Replenishes the free list and publishes the counters. If
 * FKV_DEEP_CHECKS is defined, also checks all invariants. */
void fkv_pager_settle(fkv_pager *pager);
/* Publishes the counters without replenishing the free list. Used instead of fkv_pager_settle() while a step is open. */
void fkv_pager_publish(fkv_pager *pager);

/* ---- sequence.c ---- */

/* Releases the sequences that were closed during the step. Must be called after the step has ended and before fkv_pager_settle().
 */
void fkv_pager_end_closing(fkv_pager *pager);

#endif
