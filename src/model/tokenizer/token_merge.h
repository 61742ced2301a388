/* Merging of neighbours, best pair first and the leftmost of equals, which is what BPE and SentencePiece share: symbols in a
 * chain and a heap of the pairs that may become one. n symbols take O(n log n) look-ups and steps, whatever the vocabulary.
 *
 * A symbol is known by where it starts in the text: symbols[i] starts at byte i and ends at byte symbols[i].next; entries that
 * start no symbol are not looked at.
 */
#ifndef FKV_TOKEN_MERGE_H
#define FKV_TOKEN_MERGE_H

#include "../../base/base.h"

enum { FKV_NO_SYMBOL = UINT32_MAX, FKV_NO_MERGE = UINT32_MAX };

/* A block that grows and forgets its content then; belongs to one call. */
typedef struct fkv_scratch {
    void *block;
    uint64_t bytes;
} fkv_scratch;

fkv_status fkv_scratch_need(fkv_scratch *scratch, uint64_t bytes);
fkv_status fkv_scratch_grow(fkv_scratch *scratch, uint64_t used, uint64_t more); /* room behind the used bytes, which stay */
void fkv_scratch_close(fkv_scratch *scratch);

typedef struct fkv_symbol {
    uint32_t prev; /* FKV_NO_SYMBOL: the first */
    uint32_t next; /* n_bytes: the last */
    uint32_t id;   /* the vocabulary's number for it */
    uint32_t rank; /* of merging it with the next one, lower first; FKV_NO_MERGE: they do not merge */
    uint32_t merged_id;
} fkv_symbol;

/* Sets rank and merged_id of symbols[left], which has a next one ending at byte `end`. */
typedef void (*fkv_pair_rank_fn)(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end);

typedef struct fkv_token_merge {
    fkv_symbol *symbols; /* [n_bytes] */
    uint64_t *heap;      /* [2 n_bytes] */
    uint32_t n_bytes;
    fkv_scratch scratch;
} fkv_token_merge;

/* Room for a text of n_bytes; its symbols are then set by the caller (prev, next, id). */
fkv_status fkv_token_merge_prepare(fkv_token_merge *merge, uint32_t n_bytes);

/* Merges until no pair is left. The chain from symbols[0] on is the result. */
void fkv_token_merge_run(fkv_token_merge *merge, fkv_pair_rank_fn pair_rank, const void *context);

/* ---- a heap of numbers, the least on top --------------------------------------------------------------------- */

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
