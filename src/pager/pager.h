/* Which page holds which token: page pools, page tables, sequences, prefix tree, steps. Integers only; takes no memory after
 * fkv_pager_layout(); knows nothing of the bytes inside pages (copies are reported for the device to carry out).
 *
 * Words: a *group* is a set of layers whose pages live and die together. The full group (window 0) keeps every page of a
 * sequence. A window group keeps the pages with the first n_sinks tokens and those that the next query can still see, and lets go
 * of whole pages behind the window when a step commits. Where the group has spans, pages leave in spans of so many: a query sees
 * from the first page of a span on. A window group with spare pages also keeps what a query n_spare pages before sees, for
 * truncate() to go back to; a sequence may lack that (it was cut back behind it, shares a prefix, or came from a file), and the
 * prefix tree takes none but the sink pages of such a group, of which there is at most one. Logical page i of a sequence holds
 * tokens [i * page_tokens, (i + 1) * page_tokens).
 *
 * Page tables. Entry of logical page i in the table of (sequence, group): i itself where i < n_fixed, else
 * n_fixed + (i - n_fixed) % n_ring. Full: n_fixed = all pages, n_ring = 1. Window: n_fixed = sink pages, n_ring = the most pages
 * that a window and a step can touch at once, and the spare ones.
 *
 * Promises. A sequence is admitted for its whole life. In the full group
 *     promised = sum over sequences (pages(max_tokens) - pages in its table) + sum over pages copies(page),
 *     copies(page) = tails == 0 ? 0 : tails == refs ? tails - 1 : tails,
 * where tails counts the sequences that have the page as a partly filled last page and may still write to it: each writes into a
 * copy of its own, except the last when nobody else holds the page. In a window group
 *     promised = sum over sequences rest(sequence) + min(step, sum over sequences (cap - rest)) - pages held by sequences,
 *     rest = min(pages(max_tokens), n_rest),  cap = min(pages(max_tokens), n_fixed + n_ring):
 * between steps a sequence holds `rest` pages at most, and what a step writes beyond that is promised once, for all sequences
 * (page_table.c counts it).
 * The law of the pool, kept by every call:  promised <= free + cached  (cached: in the prefix tree and needed by no sequence).
 *
 * Prefix tree. A node is in use while a sequence holds its page of the full group (of any group where none is full), however it
 * came by it, or while a node below is in use; all other nodes are cached and leave leaf first, oldest first. Window pages that
 * the tree alone holds can leave before their node. Where only the tree stands between writers and their last page, the tree lets
 * go of the page: at once in a window group, whose law has no room for the copy; in the full group when truncate() or reserve()
 * would otherwise be refused.
 *
 * Steps are transactions. begin() never evicts: after every other call the pool is replenished so that
 *     free >= min(promised, the most pages one step can take).
 * So abort() can put everything back as it was: tables, counts, tree and the order of the free list.
 *
 * All calls validate their arguments and change nothing when they fail. While a step is open every call that changes sequences or
 * prefixes answers FKV_BAD_STATE, except close(): the number is refused from then on, the rest waits for the end of the step.
 */
#ifndef FKV_PAGER_H
#define FKV_PAGER_H

#include "../base/base.h"
#include "../base/carve.h"
#include "../base/page_view.h"

typedef struct fkv_pager fkv_pager;

enum { FKV_NO_PAGE = 0xffffffffu };

typedef struct fkv_group_spec {
    uint32_t window;  /* 0: full. At most one group is full */
    uint32_t n_sinks; /* tokens */
    uint32_t n_pages; /* of the pool */
    uint32_t n_spare; /* pages; 0 in the full group */
    uint32_t span;    /* pages; 0 counts as 1 */
} fkv_group_spec;

typedef struct fkv_pager_spec {
    uint32_t page_tokens;     /* power of two */
    uint32_t max_seqs;        /* open at once, <= 65535 */
    uint32_t max_seq_tokens;  /* longest sequence: sizes the full group's tables */
    uint32_t max_step_tokens; /* rows of one step over all sequences */
    uint32_t n_groups;
    fkv_group_spec groups[FKV_MAX_GROUPS];
} fkv_pager_spec;

/* Pages of a window group, never more for one sequence than pages(max_seq_tokens), which is the answer for the full group. */
typedef struct fkv_window_pages {
    uint32_t rest; /* that one sequence can hold between steps */
    uint32_t most; /* that it can hold at once: sinks, window and one whole step */
    uint32_t step; /* that one step can bring all sequences beyond `rest`, taken together */
} fkv_window_pages;

fkv_window_pages fkv_pager_window_pages(const fkv_pager_spec *spec, uint32_t group);

/* Carves all of the pager. While counting (carve->base NULL) *pager is set to NULL and nothing is touched. */
void fkv_pager_layout(fkv_carve *carve, const fkv_pager_spec *spec, fkv_pager **pager);

/* ---- sequences and prefixes: contracts as in flatkv.h ----
 * FKV_POOL_FULL also for max_tokens > max_seq_tokens; FKV_BAD_ARGUMENT for a fork shorter than its parent. */
fkv_status fkv_pager_open(fkv_pager *pager, const fkv_seq_config *config, fkv_seq *seq, uint32_t *n_shared);
fkv_status fkv_pager_fork(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens, fkv_seq *child);
fkv_status fkv_pager_reserve(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens);
fkv_status fkv_pager_truncate(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens);
fkv_status fkv_pager_close(fkv_pager *pager, fkv_seq seq);
fkv_status fkv_pager_length(const fkv_pager *pager, fkv_seq seq, uint32_t *n_tokens);
fkv_status fkv_pager_insert(fkv_pager *pager, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens);
fkv_status fkv_pager_clear(fkv_pager *pager);
fkv_status fkv_pager_match(const fkv_pager *pager, const fkv_seq_config *config, uint32_t *n_shared);

/* ---- single pages of the prefix tree, for who keeps them elsewhere: page n_pages - 1 of these tokens ---- */

/* The page of each group, FKV_NO_PAGE where the tree has none. False: the tree does not have these tokens. */
bool fkv_pager_prefix_page(const fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                           uint32_t pages[FKV_MAX_GROUPS]);

/* Whether the tree may have a page of these groups (bit g: group g) at logical page `logical`. */
bool fkv_pager_prefix_groups(const fkv_pager *pager, uint32_t logical, uint32_t groups);

/* Puts a page into the tree that no sequence has: takes free pages, or those of older prefixes, for the groups that the tree has
 * none of yet. pages: to be filled now, FKV_NO_PAGE where the tree has the page already; fkv_pager_prefix_end() follows before
 * any other call, with good = false if they could not be filled. FKV_GONE: the pages before it are not in the tree.
 * FKV_POOL_FULL: every page is in use, or younger than this. */
fkv_status fkv_pager_prefix_begin(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t groups,
                                  uint32_t pages[FKV_MAX_GROUPS]);
void fkv_pager_prefix_end(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                          const uint32_t pages[FKV_MAX_GROUPS], bool good);

/* Gives an empty sequence the pages of n_tokens tokens at once, for a loader to fill: in window groups only the pages that a
 * query at n_tokens can see (sinks included, spare pages not). The sequence then has that length. Cannot run out: the pages were
 * promised. FKV_SEQ_FULL beyond max_tokens, FKV_BAD_STATE if the sequence is not empty. */
fkv_status fkv_pager_fill(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens);

/* ---- steps ---- */
typedef struct fkv_page_copy {
    uint32_t group;
    uint32_t from;
    uint32_t to;
} fkv_page_copy;

typedef struct fkv_step_row {
    uint32_t slot;     /* of the sequence */
    uint32_t start;    /* its length before the step: position of the first new token */
    uint32_t n_tokens; /* new */
} fkv_step_row;

fkv_status fkv_pager_step_begin(fkv_pager *pager, const fkv_row *rows, uint32_t n_rows);
/* Pages the device must copy before the first write of the step. Valid until commit or abort. */
const fkv_page_copy *fkv_pager_step_copies(const fkv_pager *pager, uint32_t *n_copies);
const fkv_step_row *fkv_pager_step_rows(const fkv_pager *pager, uint32_t *n_rows);
fkv_status fkv_pager_step_commit(fkv_pager *pager);
fkv_status fkv_pager_step_abort(fkv_pager *pager);

/* ---- looking ---- */
fkv_page_view fkv_pager_view(const fkv_pager *pager, uint32_t group, uint32_t slot);
fkv_status fkv_pager_slot(const fkv_pager *pager, fkv_seq seq, uint32_t *slot); /* FKV_BAD_SEQ */

/* First logical page, sinks apart, that a query at position `position` of a window group sees; 0 in a full group. */
uint32_t fkv_pager_first_page(const fkv_pager *pager, uint32_t group, uint32_t position);

/* Whether every page that a query at n_tokens sees is still there: save and truncate need it. */
bool fkv_pager_covers(const fkv_pager *pager, uint32_t slot, uint32_t n_tokens);

/* Fills groups, seqs, steps, aborts, tokens, page_copies, hits, hit_tokens, evictions. Any thread. */
void fkv_pager_stats(const fkv_pager *pager, fkv_stats *stats);

/* See fkv_cache_pages(). */
uint32_t fkv_pager_pages(const fkv_pager *pager, uint32_t group, fkv_page_info *list, uint32_t capacity);

bool fkv_pager_consistent(const fkv_pager *pager);

#endif
