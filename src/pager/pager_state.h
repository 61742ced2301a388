/* The private structs of the pager: one file, so that every counter stands beside the equation it keeps.
 *
 * Owned by the thread that drives the cache, except `figures`, which any thread reads. Pages, nodes and slots are numbers.
 * Nothing here points outside the carved block. Written by pool.c (fkv_pool), page_table.c (entries), node_heap.c and
 * prefix_tree.c (fkv_tree), sequence.c and step.c (fkv_sequence, fkv_step_state), pager.c (the rest).
 */
#ifndef FKV_PAGER_STATE_H
#define FKV_PAGER_STATE_H

#include "pager.h"

#include <stdatomic.h>

enum { FKV_NO_NODE = 0xffffffffu, FKV_NO_PLACE = 0xffffffffu, FKV_NO_GROUP = 0xffffffffu, FKV_NO_ROW = 0xffffffffu };

/* Sums over the pages of a pool. */
typedef struct fkv_pool_counts {
    uint64_t used;    /* pages with a holder beside the prefix tree */
    uint64_t shared;  /* pages with refs >= 2 */
    uint64_t in_tree; /* pages with a node */
    uint64_t copies;  /* sum of copies(page), the equation in pager.h */
} fkv_pool_counts;

/* refs = tables that hold the page + (node != FKV_NO_NODE) + copies of the open step that read it.
 * refs == 0 <=> the page is in free[0 .. n_free); tails <= refs. */
typedef struct fkv_pool {
    uint32_t n_pages;
    uint32_t n_free;
    uint32_t *free;     /* [n_pages] a stack: last given back, first taken */
    uint32_t *refs;     /* [n_pages] */
    uint32_t *tails;    /* [n_pages] sequences whose partly filled last page this is and that may still write */
    uint32_t *node;     /* [n_pages] the prefix tree's node that holds the page */
    uint32_t *writers;  /* [n_pages] step_begin: rows that append to the page; zero outside of it */
    uint32_t *in_place; /* [n_pages] step_begin: the row that may write in place; zero outside of it */
    fkv_pool_counts counts;
} fkv_pool;

/* One layer group. A sequence of length L holds logical pages [0, min(n_fixed, pages(L))) and
 * [max(n_fixed, first_held(L)), pages(L)), nothing else: the table's shape is a function of the length, and of spare_from in a
 * group with spare pages. first_held(L) = n_spare == 0 ? first_page(L) : max(first_page(L less n_spare pages), spare_from). */
typedef struct fkv_group {
    uint32_t window;  /* 0: full */
    uint32_t n_spare; /* pages */
    uint32_t span;    /* pages, at least 1 */
    uint32_t n_fixed;
    uint32_t n_ring;
    uint32_t width;    /* entries of one sequence: n_fixed + n_ring */
    uint32_t n_rest;   /* of which it fills at most these between steps */
    uint32_t n_step;   /* pages that one step can bring all sequences beyond that */
    uint32_t *entries; /* [max_seqs, width], FKV_NO_PAGE where nothing is held */
    fkv_pool pool;
    bool pins;         /* a node is busy while a sequence holds its page of this group */
    uint64_t reserved; /* sum over sequences: pages(max_tokens); in a window group rest(max_tokens) */
    uint64_t in_steps; /* sum over sequences: cap(max_tokens) - rest(max_tokens); 0 in the full group */
    uint64_t entered;  /* full: sum over sequences pages(length); window: 0 */
    uint64_t taken;    /* full: pages the open step took; window: 0 */
} fkv_group;

/* One full page of tokens under (tenant, parent).
 * busy = pinning groups whose page has refs > 1 + children with busy > 0. busy == 0: idle, so is everything below. */
typedef struct fkv_node {
    uint64_t tenant;
    uint64_t last_use; /* <= the parent's */
    uint32_t parent;   /* FKV_NO_NODE: the first page of a prompt */
    uint32_t depth;    /* logical page */
    uint32_t n_children;
    uint32_t busy;
    uint32_t next;                  /* in the bucket's chain */
    uint32_t hash;                  /* of tenant, parent and tokens; its low bits are the bucket */
    uint32_t used;                  /* bit g: page of group g has refs > 1 */
    uint32_t pages[FKV_MAX_GROUPS]; /* always there in the full group, FKV_NO_PAGE or a page in a window group */
    bool live;
} fkv_node;

/* A binary heap of nodes, oldest last_use on top; of equal age sink pages (depth < n_fixed) leave last, else the shallower first.
 * items[place[node]] == node, place[node] == FKV_NO_PLACE where the node is not in. */
typedef struct fkv_node_heap {
    uint32_t n;
    uint32_t n_fixed;
    uint32_t *items; /* [n_nodes] */
    uint32_t *place; /* [n_nodes] */
} fkv_node_heap;

typedef struct fkv_tree {
    uint32_t n_nodes;
    uint32_t n_free;
    uint32_t n_idle; /* live nodes with busy == 0: the cached pages of the full group */
    uint32_t n_buckets;
    uint32_t page_tokens;
    uint64_t hash_seed;
    uint64_t hash_mask; /* all ones; a test clears it to make all hashes equal */
    uint64_t clock;
    fkv_node *nodes;
    uint32_t *tokens;                     /* [n_nodes, page_tokens] */
    uint32_t *free;                       /* [n_nodes] a stack */
    uint32_t *buckets;                    /* [n_buckets] first node of the chain */
    fkv_node_heap leaves;                 /* idle, without children: can be evicted now */
    fkv_node_heap cached[FKV_MAX_GROUPS]; /* window groups: nodes whose page nobody else holds */
} fkv_tree;

/* seq = generation << 16 | slot. No two sequences of a process have the same generation, so a closed number and one of another
 * pager are recognised. open && generation == 0: closed while a step is open; it holds its pages until the step ends. */
typedef struct fkv_sequence {
    uint64_t generation; /* 48 bits; 0: closed */
    uint64_t tenant;
    uint32_t len;
    uint32_t max_tokens;
    uint32_t spare_from; /* logical page: spare pages before it are not there; <= fkv_table_joins(len) */
    uint32_t row;        /* in the open step, else FKV_NO_ROW */
    bool open;           /* has pages and promises */
} fkv_sequence;

/* Sequences opened by all pagers of the process; a test sets it to see what comes after very many. */
extern _Atomic uint64_t fkv_sequences_opened;

/* Zeroed whenever no step is open. */
typedef struct fkv_step_state {
    bool open;
    uint32_t n_rows;
    uint32_t n_copies;
    uint32_t n_closing;    /* sequences closed since the step began */
    fkv_step_row *rows;    /* [min(max_seqs, max_step_tokens)] */
    fkv_page_copy *copies; /* [rows * n_groups] */
} fkv_step_state;

/* What fkv_pager_stats() reads: one writer, relaxed. Groups and seqs are set at the end of every call that changed something. */
typedef struct fkv_group_figures {
    _Atomic uint32_t free, held, shared, cached, pinned, promised;
} fkv_group_figures;

typedef struct fkv_figures {
    fkv_group_figures groups[FKV_MAX_GROUPS];
    _Atomic uint32_t seqs;
    _Atomic uint64_t steps, aborts, tokens, page_copies, hit_tokens, hits, evictions;
} fkv_figures;

struct fkv_pager {
    fkv_pager_spec spec;
    uint32_t full;           /* the full group, or FKV_NO_GROUP */
    uint32_t n_seqs;         /* open, those that are closed when the step ends included */
    uint32_t *slots;         /* [max_seqs] a stack: the free ones are slots[n_seqs .. max_seqs) */
    uint32_t *audit;         /* [2, n_audit] of fkv_pager_consistent(); its contents mean nothing */
    uint32_t n_audit;        /* the most pages of a pool, the nodes */
    fkv_sequence *sequences; /* [max_seqs] */
    fkv_group groups[FKV_MAX_GROUPS];
    fkv_tree tree;
    fkv_step_state step;
    fkv_figures figures;
};

FKV_INLINE uint32_t fkv_pages_of(const fkv_pager *pager, uint32_t n_tokens) {
    return fkv_ceil_div(n_tokens, pager->spec.page_tokens);
}

/* A partly filled last page that the sequence may still write to. */
FKV_INLINE bool fkv_has_tail(const fkv_pager *pager, const fkv_sequence *s) {
    return s->len % pager->spec.page_tokens != 0 && s->len < s->max_tokens;
}

/* The single writer's addition. */
FKV_INLINE void fkv_figure_add(_Atomic uint64_t *figure, uint64_t n) {
    atomic_store_explicit(figure, atomic_load_explicit(figure, memory_order_relaxed) + n, memory_order_relaxed);
}

/* ---- pager.c: promises, shared by sequence.c, prefix.c and step.c ---- */

/* What the sequences reserve, those of a window group with their share of a step. */
FKV_INLINE uint64_t fkv_group_reserved(const fkv_group *group) {
    return group->reserved + (group->in_steps < group->n_step ? group->in_steps : group->n_step);
}

/* The two sides of the law of the pool. */
uint64_t fkv_group_promised(const fkv_pager *pager, uint32_t group);
uint64_t fkv_group_room(const fkv_pager *pager, uint32_t group); /* free + cached */

/* Gives up cached pages until n are free. They are there: n <= free + cached. */
void fkv_group_make_free(fkv_pager *pager, uint32_t group, uint64_t n);

/* Ends every call that changed something: replenishes, sets the figures, checks all where checks are deep. */
void fkv_pager_settle(fkv_pager *pager);
/* The same without replenishing, while a step is open. */
void fkv_pager_publish(fkv_pager *pager);

/* ---- sequence.c ---- */

/* Lets go of the sequences that were closed while a step was open. The step is over; the caller settles. */
void fkv_pager_end_closing(fkv_pager *pager);

#endif
