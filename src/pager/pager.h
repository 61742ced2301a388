/* Pager: page pools, page tables, sequences, prefix tree and steps. The pager performs only integer arithmetic. It allocates no
 * memory after fkv_pager_layout() and does not access page contents; it only reports which pages the device has to copy.
 *
 * Groups. A *group* is a set of layers whose pages are allocated and released together. The full group (window 0) keeps every
 * page of a sequence. A window group keeps the pages of the first n_sinks tokens and the pages that the next query can attend to,
 * and releases older pages when a step commits. In a group with `span` > 1, the first page that a query attends to is rounded
 * down to a multiple of `span`, so pages are released in whole spans. A group with spare pages (n_spare > 0) also keeps the pages
 * that a query at a position n_spare pages earlier would attend to, so that truncate() can shorten a sequence by up to n_spare
 * pages. A sequence can lack spare pages if it was truncated, shares a prefix, or was loaded from a file. At most one group has
 * spare pages. Logical page i of a sequence holds tokens [i * page_tokens, (i + 1) * page_tokens).
 *
 * State group. At most one group is a state group: its pages are not rows of tokens but whole recurrent states. A state is a
 * function of all tokens before it. A sequence of length L > 0 holds exactly one page of this group, the state after its first L
 * tokens; an empty sequence holds none. A step never writes a state in place. It reads the page `from` and writes a new page `to`
 * (fkv_state_move), regardless of the number of tokens in the row. Commit releases `from`, and abort releases `to`, so forks,
 * snapshots and aborts only change reference counts. The prefix-tree node of logical page i may hold the state after (i + 1) *
 * page_tokens tokens (a snapshot), and a prefix can be shared only up to a node that holds one. A state group is a window group
 * with a window of 2 tokens, so logical page i is the only page that a query at position (i + 1) * page_tokens needs. If no page
 * of this group is free, the least useful snapshot is evicted (see prefix_tree.c). The age of a snapshot is measured from the
 * last time a sequence used this snapshot, not from the last use of a deeper snapshot on the same path.
 *
 * Page tables. Each sequence has one table per group. Logical page i is in entry i if i < n_fixed, otherwise in entry n_fixed +
 * (i - n_fixed) % n_ring. In the full group, n_fixed is the maximum number of pages of a sequence, and n_ring is 1. In a window
 * group, n_fixed is the number of sink pages, and n_ring is the maximum number of pages that a window and a step can touch, plus
 * the spare pages.
 *
 * Reservations. A sequence is admitted with pages for max_tokens. *Promised* pages are reserved but not yet allocated. In the
 * full group,
 *     promised = sum over sequences (pages(max_tokens) - pages in its table) + sum over pages copies(page)
 *     copies(page) = tails == 0 ? 0 : tails == refs ? tails - 1 : tails
 * where tails is the number of sequences that have the page as their partially filled last page and may still write to it. Each
 * of these sequences writes to a private copy, except that the last of them writes to the page itself if nothing else references
 * the page. In a window group,
 *     promised = sum over sequences rest + min(step, sum over sequences (cap - rest)) - pages held by sequences
 *     rest = min(pages(max_tokens), n_rest)
 *     cap = min(pages(max_tokens), n_fixed + n_ring)
 * where `step` is the maximum number of pages that one step adds, over all sequences (fkv_window_pages.step). Between steps, a
 * sequence holds at most `rest` pages. The pages that a step needs beyond `rest` are promised once for all sequences together
 * (see page_table.c). In the state group, rest = 1, cap = 2, and step is the maximum number of rows. The pool invariant,
 * maintained by every call, is promised <= free + cached, where a cached page is a page that is in the prefix tree and not needed
 * by any sequence.
 *
 * Prefix tree. A node is busy while a sequence references its page of the full group (of any group if there is no full group), or
 * while one of its descendants is busy. All other nodes are cached; they are evicted in LRU order, leaves first. Window pages
 * that only the tree references can be evicted before their node. The tree drops its reference to a page if all other references
 * belong to sequences that may write to the page. In a window group, the tree drops its reference as soon as this condition is
 * true, because reservations do not include a copy of the page. In the full group, it does so only if truncate() or reserve()
 * would fail otherwise.
 *
 * Steps are transactions. begin() never evicts, because after every other call the pool is replenished so that
 *     free >= min(promised, maximum number of pages that one step allocates).
 * Therefore abort() can restore everything exactly: tables, counts, tree and the order of the free list.
 *
 * All calls validate their arguments and have no effect if they fail. While a step is open, every call that changes sequences or
 * prefixes returns FKV_BAD_STATE, except close(), which invalidates the handle immediately and releases the sequence at the end
 * of the step.
 */
#ifndef FKV_PAGER_H
#define FKV_PAGER_H

#include "../base/base.h"
#include "../base/carve.h"
#include "../base/page_view.h"

typedef struct fkv_pager fkv_pager;

enum { FKV_NO_PAGE = 0xffffffffu, FKV_STATE_WINDOW = 2 };

typedef struct fkv_group_spec {
    uint32_t window;  /* window size in tokens; 0 for the full group (at most one group is full) */
    uint32_t n_sinks; /* number of sink tokens at the start of a sequence */
    uint32_t n_pages; /* number of pages in the pool */
    uint32_t n_spare; /* number of spare pages; 0 in the full group */
    uint32_t span;    /* pages per span; 0 means 1 */
    bool is_state;    /* state group: window must be FKV_STATE_WINDOW, and n_sinks, n_spare and span must be 0 */
} fkv_group_spec;

typedef struct fkv_pager_spec {
    uint32_t page_tokens;     /* tokens per page, a power of two */
    uint32_t max_seqs;        /* maximum number of open sequences, at most 65535 */
    uint32_t max_seq_tokens;  /* maximum length of a sequence; determines the size of the full group's tables */
    uint32_t max_step_tokens; /* maximum number of tokens in one step, over all sequences */
    uint32_t n_groups;
    fkv_group_spec groups[FKV_MAX_GROUPS];
} fkv_pager_spec;

/* Page requirements of a window group or of the state group. In a window group, `rest` and `most` never exceed the number of
 * pages of a sequence with max_seq_tokens tokens. */
typedef struct fkv_window_pages {
    uint32_t rest; /* maximum number of pages that one sequence holds between steps */
    uint32_t most; /* maximum number of pages that one sequence holds during a step: sink pages, window and the largest step */
    uint32_t step; /* maximum number of pages that one step adds beyond `rest`, summed over all sequences */
} fkv_window_pages;

fkv_window_pages fkv_pager_window_pages(const fkv_pager_spec *spec, uint32_t group);

/* Reserves memory for the pager (carve.h) and initializes it. In the counting pass (carve->base is NULL), sets *pager to NULL and
 * accesses no memory. */
void fkv_pager_layout(fkv_carve *carve, const fkv_pager_spec *spec, fkv_pager **pager);

/* ---- sequences and prefixes ---- */

/* These functions implement the functions of the same names in flatkv.h, where they are documented. In addition, they return
 * FKV_POOL_FULL if max_tokens > max_seq_tokens, and FKV_BAD_ARGUMENT if max_tokens of a fork is less than the length of its
 * parent. */
fkv_status fkv_pager_open(fkv_pager *pager, const fkv_seq_config *config, fkv_seq *seq, uint32_t *n_shared);
fkv_status fkv_pager_fork(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens, fkv_seq *child);
fkv_status fkv_pager_reserve(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens);
fkv_status fkv_pager_truncate(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens);
fkv_status fkv_pager_reachable(const fkv_pager *pager, fkv_seq seq, uint32_t n_tokens, uint32_t *length);
fkv_status fkv_pager_close(fkv_pager *pager, fkv_seq seq);
fkv_status fkv_pager_length(const fkv_pager *pager, fkv_seq seq, uint32_t *n_tokens);
fkv_status fkv_pager_insert(fkv_pager *pager, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens);
fkv_status fkv_pager_clear(fkv_pager *pager);
fkv_status fkv_pager_match(const fkv_pager *pager, const fkv_seq_config *config, uint32_t *n_shared);

/* Computes the number of prompt tokens whose pages are in the prefix tree, whether or not a sequence could share them. */
fkv_status fkv_pager_overlap(const fkv_pager *pager, const fkv_seq_config *config, uint32_t *n_tokens);

/* ---- single prefix pages ---- */

/* The following functions are used to move pages to and from prefix stores. All of them refer to logical page n_pages - 1 of the
 * given tokens. */

/* Looks up the prefix-tree node of the page. pages[g] receives the node's pool page in group g, or FKV_NO_PAGE if the node has
 * none in that group. Returns false if the tokens are not in the tree. */
bool fkv_pager_prefix_page(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                           uint32_t pages[FKV_MAX_GROUPS]);

/* Returns a bit mask of the groups whose pages fkv_pager_prefix_begin() inserts for logical page `logical`: all groups except the
 * state group and, unless the page is a sink page, the group with spare pages. */
uint32_t fkv_pager_page_groups(const fkv_pager *pager, uint32_t logical);

/* Returns whether `groups` is a valid argument of fkv_pager_prefix_begin() for logical page `logical`. */
bool fkv_pager_prefix_groups(const fkv_pager *pager, uint32_t logical, uint32_t groups);

/* Inserts a page of one group into a node that is already in the tree: a snapshot (a page of the state group) or a page of the
 * group with spare pages that is not a sink page. Otherwise works in the same way as fkv_pager_prefix_begin(). */
fkv_status fkv_pager_part_begin(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t group,
                                uint32_t pages[FKV_MAX_GROUPS]);

/* Inserts the last of n_pages logical pages into the tree, without a sequence. For each group in which the tree does not have
 * this logical page, allocates a physical page, evicting older prefixes if no page is free. pages[g] receives the physical page
 * that the caller has to fill, or FKV_NO_PAGE if group g needs none. The caller must call fkv_pager_prefix_end() before any other
 * call, with good = false if filling failed. Returns FKV_GONE if the preceding pages are not in the tree, and FKV_POOL_FULL if no
 * page is free and none can be evicted. */
fkv_status fkv_pager_prefix_begin(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t groups,
                                  uint32_t pages[FKV_MAX_GROUPS]);
void fkv_pager_prefix_end(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                          const uint32_t pages[FKV_MAX_GROUPS], bool good);

/* Removes the page's snapshot from the tree, unless a sequence uses the snapshot. Returns FKV_BAD_STATE if a step is open. */
fkv_status fkv_pager_drop_state(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages);

/* Sets the length of an empty sequence to n_tokens and allocates its pages. The caller then fills the pages from a file. In
 * window groups, allocates only the pages that a query at n_tokens attends to, including sinks but not spare pages. The pool
 * cannot run out of pages here, because the sequence has reserved them. Returns FKV_SEQ_FULL if n_tokens exceeds max_tokens, and
 * FKV_BAD_STATE if the sequence is not empty. */
fkv_status fkv_pager_fill(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens);

/* ---- steps ---- */
typedef struct fkv_page_copy {
    uint32_t group;
    uint32_t from;
    uint32_t to;
} fkv_page_copy;

typedef struct fkv_step_row {
    uint32_t slot;     /* slot of the sequence */
    uint32_t start;    /* length of the sequence before the step, which is the position of the first new token */
    uint32_t n_tokens; /* number of new tokens */
    uint32_t n_kept;   /* number of leading new tokens that commit() appends */
} fkv_step_row;

/* Recurrent states that one row of a step reads and writes. */
typedef struct fkv_state_move {
    uint32_t from; /* page that the step reads, or FKV_NO_PAGE if the sequence is empty */
    uint32_t to;   /* page that the step writes */
} fkv_state_move;

fkv_status fkv_pager_step_begin(fkv_pager *pager, const fkv_row *rows, uint32_t n_rows);
/* Returns the pages that the device must copy before the first write of the step. The array is valid until commit or abort. */
const fkv_page_copy *fkv_pager_step_copies(const fkv_pager *pager, uint32_t *n_copies);
const fkv_step_row *fkv_pager_step_rows(const fkv_pager *pager, uint32_t *n_rows);
/* Returns the states of the step's rows, or NULL if there is no state group. The array is valid until commit or abort. */
const fkv_state_move *fkv_pager_step_states(const fkv_pager *pager);
/* Sets n_kept of every row. n_kept: [n_rows], each from 1 to n_tokens. *changed receives whether a value of n_kept changed. */
fkv_status fkv_pager_step_keep(fkv_pager *pager, const uint32_t *n_kept, bool *changed);
fkv_status fkv_pager_step_commit(fkv_pager *pager);
fkv_status fkv_pager_step_abort(fkv_pager *pager);

/* ---- queries ---- */
fkv_page_view fkv_pager_view(const fkv_pager *pager, uint32_t group, uint32_t slot);

/* Looks up the slot of a sequence. Returns FKV_BAD_SEQ if the handle is invalid. */
fkv_status fkv_pager_slot(const fkv_pager *pager, fkv_seq seq, uint32_t *slot);

/* Returns the first logical page, apart from sink pages, that a query at `position` attends to; 0 in the full group. */
uint32_t fkv_pager_first_page(const fkv_pager *pager, uint32_t group, uint32_t position);

/* Returns whether the sequence still holds every page that a query at position n_tokens attends to, and whether its state after
 * n_tokens tokens is available. Saving and truncating a sequence require this. */
bool fkv_pager_covers(const fkv_pager *pager, uint32_t slot, uint32_t n_tokens);

/* Sets the fields groups, seqs, steps, aborts, tokens, page_copies, hits, hit_tokens and evictions. Thread-safe. */
void fkv_pager_stats(const fkv_pager *pager, fkv_stats *stats);

/* Implements fkv_cache_pages(). */
uint32_t fkv_pager_pages(const fkv_pager *pager, uint32_t group, fkv_page_info *list, uint32_t capacity);

/* Returns whether all invariants hold. Slow, because it visits every page, table entry and node. */
bool fkv_pager_consistent(const fkv_pager *pager);

#endif
