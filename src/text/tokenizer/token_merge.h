/* Merge loop of BPE and SentencePiece. Repeatedly merges the adjacent pair of symbols with the lowest rank, and the leftmost of
 * several pairs with equal rank. Symbols form a linked list, and a priority queue contains the pairs that can be merged. Merging
 * n symbols takes O(n log n) steps for any vocabulary.
 *
 * A symbol is identified by its first byte: symbols[i] covers bytes [i, symbols[i].next). Other entries of the array are unused.
 */
#ifndef FKV_TOKEN_MERGE_H
#define FKV_TOKEN_MERGE_H

#include "../../base/base.h"

enum { FKV_NO_SYMBOL = UINT32_MAX, FKV_NO_MERGE = UINT32_MAX };

/* A buffer that grows on demand. */
typedef struct fkv_scratch {
    void *block;
    uint64_t bytes;
} fkv_scratch;

/* Ensures that the buffer has at least the given size. If the buffer grows, its content is lost. */
fkv_status fkv_scratch_need(fkv_scratch *scratch, uint64_t bytes);

/* Ensures that the buffer has room for `more` bytes after its first `used` bytes. The content of the used bytes is kept. */
fkv_status fkv_scratch_grow(fkv_scratch *scratch, uint64_t used, uint64_t more);
void fkv_scratch_close(fkv_scratch *scratch);

typedef struct fkv_symbol {
    uint32_t prev; /* previous symbol; FKV_NO_SYMBOL for the first symbol */
    uint32_t next; /* next symbol; n_bytes for the last symbol */
    uint32_t id;   /* vocabulary id */
    uint32_t rank; /* merge rank of this symbol and the next symbol; FKV_NO_MERGE if they cannot be merged */
    uint32_t merged_id;
} fkv_symbol;

/* Determines whether symbols[left] can be merged with the next symbol, which ends at byte `end`. If so, sets rank and merged_id
 * of symbols[left]. */
typedef void (*fkv_pair_rank_fn)(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end);

typedef struct fkv_token_merge {
    fkv_symbol *symbols; /* [n_bytes] */
    uint64_t *heap;      /* [2 n_bytes] */
    uint64_t *chunks;    /* [n_chunks] chunks for the sorted runs of a long text; see token_merge.c */
    uint32_t n_chunks;
    uint32_t n_bytes;
    fkv_scratch scratch;
} fkv_token_merge;

/* Allocates the arrays for a text of n_bytes bytes. The caller then sets prev, next and id of the initial symbols. */
fkv_status fkv_token_merge_prepare(fkv_token_merge *merge, uint32_t n_bytes);

/* Merges symbols until no pair can be merged. The result is the linked list that starts at symbols[0]. */
void fkv_token_merge_run(fkv_token_merge *merge, fkv_pair_rank_fn pair_rank, const void *context);

/* ---- 4-ary min-heap --------------------------------------------------------------------- */

FKV_INLINE void fkv_heap_push(uint64_t *heap, size_t *n, uint64_t value) {
    size_t at = (*n)++;
    while (at > 0 && heap[(at - 1) / 4] > value) {
        heap[at] = heap[(at - 1) / 4];
        at = (at - 1) / 4;
    }
    heap[at] = value;
}

FKV_INLINE uint64_t fkv_heap_pop(uint64_t *heap, size_t *n) {
    uint64_t top = heap[0];
    uint64_t value = heap[--*n];
    size_t at = 0;
    for (size_t child = 1; child < *n; child = 4 * at + 1) {
        size_t least = child;
        size_t end = child + 4 < *n ? child + 4 : *n;
        for (size_t other = child + 1; other < end; other++) least = heap[other] < heap[least] ? other : least;
        if (heap[least] >= value) break;
        heap[at] = heap[least];
        at = least;
    }
    heap[at] = value;
    return top;
}

#endif
