/* Merge loop of the BPE and SentencePiece tokenizers. See token_merge.h.
 *
 * A queue entry has the value rank << 32 | left, so entries are ordered by rank and then by position. An entry is stale if the
 * pair that starts at `left` no longer exists or has a different rank. Two entries with equal rank and equal `left` are
 * interchangeable, because either of them merges the current pair at `left`.
 *
 * In long texts, pairs of equal rank are found from left to right, so their entries arrive in ascending order. The queue of a
 * long text therefore keeps entries in a few sorted runs, to which an entry is added in constant time. A heap contains the
 * entries that cannot be appended to any run in ascending order.
 *
 * Invariant: the number of queue entries is at most the number of initial symbols plus the number of merges, because each merge
 * removes one entry and adds at most two. It is therefore less than 2 * n_bytes.
 */
#include "token_merge.h"

#include <stdlib.h>

/* Buffer sizes are powers of two up to this limit. Larger buffers have exactly the requested size, because filling them costs
 * more than allocating them. */
static const uint64_t DOUBLING_BYTES = UINT64_C(1) << 20;

fkv_status fkv_scratch_need(fkv_scratch *scratch, uint64_t bytes) {
    if (bytes <= scratch->bytes) return FKV_OK;
    uint64_t wanted = 4096;
    while (wanted < bytes && wanted < DOUBLING_BYTES) wanted *= 2;
    if (wanted < bytes) wanted = bytes;
    free(scratch->block);
    scratch->bytes = 0;
    scratch->block = wanted <= SIZE_MAX ? malloc((size_t)wanted) : NULL;
    FKV_REQUIRE(scratch->block != NULL, FKV_NO_MEMORY,
                "out of memory allocating %llu bytes for tokenizing; divide the text into parts", (unsigned long long)wanted);
    scratch->bytes = wanted;
    return FKV_OK;
}

fkv_status fkv_scratch_grow(fkv_scratch *scratch, uint64_t used, uint64_t more) {
    if (used + more <= scratch->bytes) return FKV_OK;
    fkv_scratch grown = {0};
    FKV_TRY(fkv_scratch_need(&grown, 2 * (used + more)));
    if (used > 0) memcpy(grown.block, scratch->block, used);
    fkv_scratch_close(scratch);
    *scratch = grown;
    return FKV_OK;
}

void fkv_scratch_close(fkv_scratch *scratch) {
    free(scratch->block);
    scratch->block = NULL;
    scratch->bytes = 0;
}

/* Texts of LONG_TEXT bytes and more use sorted runs. A run is a linked list of chunks; each chunk contains CHUNK_VALUES - 1
 * values and the number of the next chunk. */
enum { LONG_TEXT = 1 << 12, N_RUNS = 8, CHUNK_VALUES = 64, LINK = CHUNK_VALUES - 1 };

fkv_status fkv_token_merge_prepare(fkv_token_merge *merge, uint32_t n_bytes) {
    const uint32_t n_chunks = n_bytes < LONG_TEXT ? 0 : 2 * n_bytes / CHUNK_VALUES;
    const uint64_t n_queue = 2 * (uint64_t)n_bytes + (uint64_t)n_chunks * CHUNK_VALUES;
    FKV_TRY(fkv_scratch_need(&merge->scratch, n_queue * sizeof *merge->heap + (uint64_t)n_bytes * sizeof *merge->symbols));
    merge->heap = merge->scratch.block;
    merge->chunks = merge->heap + 2 * (size_t)n_bytes;
    merge->symbols = (fkv_symbol *)(merge->heap + n_queue);
    merge->n_bytes = n_bytes;
    merge->n_chunks = n_chunks;
    return FKV_OK;
}

/* ---- priority queue ------------------------------------------------------------------------------------------ */

/* A queue of ascending values, stored in a linked list of chunks. */
typedef struct sorted_run {
    uint32_t first, last; /* chunks */
    uint32_t at, end;     /* index of the first value in chunk `first`, and end index of the values in chunk `last` */
    uint64_t largest;     /* the value that was added last */
} sorted_run;

typedef struct pair_queue {
    uint64_t *heap;
    size_t n_heap;
    uint64_t *chunks;
    uint32_t n_chunks, n_used; /* n_used: number of chunks that have been used at least once */
    uint32_t free;             /* first chunk in the list of released chunks; NO_CHUNK if the list is empty */
    uint64_t heads[N_RUNS];    /* smallest value of each run; NO_VALUE if the run is empty */
    sorted_run runs[N_RUNS];
} pair_queue;

static const uint32_t NO_CHUNK = UINT32_MAX;
static const uint64_t NO_VALUE = UINT64_MAX; /* not a valid queue entry, because its rank would be FKV_NO_MERGE */

static uint64_t *chunk_of(const pair_queue *queue, uint32_t chunk) { return queue->chunks + (size_t)chunk * CHUNK_VALUES; }

static uint32_t chunk_take(pair_queue *queue) {
    const uint32_t chunk = queue->free;
    if (chunk == NO_CHUNK) return queue->n_used < queue->n_chunks ? queue->n_used++ : NO_CHUNK;
    queue->free = (uint32_t)chunk_of(queue, chunk)[LINK];
    return chunk;
}

static void chunk_release(pair_queue *queue, uint32_t chunk) {
    chunk_of(queue, chunk)[LINK] = queue->free;
    queue->free = chunk;
}

/* Appends a value to a run. Returns false if no free chunk is left. */
static bool run_push(pair_queue *queue, int index, uint64_t value) {
    sorted_run *run = &queue->runs[index];
    const bool is_empty = queue->heads[index] == NO_VALUE;
    if (is_empty || run->end == LINK) {
        const uint32_t chunk = chunk_take(queue);
        if (chunk == NO_CHUNK) return false;
        if (is_empty)
            *run = (sorted_run){.first = chunk};
        else
            chunk_of(queue, run->last)[LINK] = chunk;
        run->last = chunk;
        run->end = 0;
    }
    if (is_empty) queue->heads[index] = value;
    chunk_of(queue, run->last)[run->end++] = value;
    run->largest = value;
    return true;
}

static uint64_t run_pop(pair_queue *queue, int index) {
    sorted_run *run = &queue->runs[index];
    const uint64_t value = queue->heads[index];
    const bool is_last = run->first == run->last;
    if (++run->at == (is_last ? run->end : LINK)) {
        const uint32_t done = run->first;
        run->first = is_last ? NO_CHUNK : (uint32_t)chunk_of(queue, done)[LINK];
        run->at = 0;
        chunk_release(queue, done);
    }
    queue->heads[index] = run->first == NO_CHUNK ? NO_VALUE : chunk_of(queue, run->first)[run->at];
    return value;
}

/* Adds a value to the queue. Among the runs whose last value does not exceed the new value, chooses the run with the largest last
 * value and appends the new value to it. If there is no such run, adds the new value to an empty run, or to the heap if no run is
 * empty. */
static void queue_push(pair_queue *queue, uint64_t value) {
    int best = -1;
    if (queue->n_chunks > 0) {
        int empty = -1;
        for (int i = 0; i < N_RUNS; i++) {
            if (queue->heads[i] == NO_VALUE)
                empty = i;
            else if (queue->runs[i].largest <= value && (best < 0 || queue->runs[i].largest > queue->runs[best].largest))
                best = i;
        }
        if (best < 0) best = empty;
    }
    if (best < 0 || !run_push(queue, best, value)) fkv_heap_push(queue->heap, &queue->n_heap, value);
}

/* Removes and returns the smallest value, or returns NO_VALUE if the queue is empty. */
static uint64_t queue_pop(pair_queue *queue) {
    int best = -1;
    uint64_t least = queue->n_heap > 0 ? queue->heap[0] : NO_VALUE;
    for (int i = 0; i < N_RUNS && queue->n_chunks > 0; i++) {
        if (queue->heads[i] >= least) continue;
        least = queue->heads[i];
        best = i;
    }
    if (best >= 0) return run_pop(queue, best);
    return queue->n_heap > 0 ? fkv_heap_pop(queue->heap, &queue->n_heap) : NO_VALUE;
}

/* ---- merging ------------------------------------------------------------------------------------------------- */

typedef struct merge_run {
    fkv_symbol *symbols;
    uint32_t n_bytes;
    pair_queue queue;
    fkv_pair_rank_fn pair_rank;
    const void *context;
} merge_run;

static void pair_push(merge_run *run, uint32_t left) {
    fkv_symbol *symbol = &run->symbols[left];
    symbol->rank = FKV_NO_MERGE;
    if (symbol->next == run->n_bytes) return;
    run->pair_rank(run->context, run->symbols, left, run->symbols[symbol->next].next);
    if (symbol->rank != FKV_NO_MERGE) queue_push(&run->queue, (uint64_t)symbol->rank << 32 | left);
}

void fkv_token_merge_run(fkv_token_merge *merge, fkv_pair_rank_fn pair_rank, const void *context) {
    fkv_symbol *symbols = merge->symbols;
    uint32_t n_bytes = merge->n_bytes;
    merge_run run = {.symbols = symbols, .n_bytes = n_bytes, .pair_rank = pair_rank, .context = context};
    run.queue.heap = merge->heap;
    run.queue.n_heap = 0;
    run.queue.chunks = merge->chunks;
    run.queue.n_chunks = merge->n_chunks;
    run.queue.n_used = 0;
    run.queue.free = NO_CHUNK;
    for (int i = 0; i < N_RUNS; i++) run.queue.heads[i] = NO_VALUE;
    for (uint32_t left = 0; left < n_bytes; left = symbols[left].next) pair_push(&run, left);
    for (uint64_t entry = queue_pop(&run.queue); entry != NO_VALUE; entry = queue_pop(&run.queue)) {
        FKV_ASSERT(run.queue.n_heap < 2 * (size_t)n_bytes);
        uint32_t left = (uint32_t)entry;
        fkv_symbol *symbol = &symbols[left];
        if (symbol->rank != entry >> 32) continue;
        fkv_symbol *right = &symbols[symbol->next];
        right->rank = FKV_NO_MERGE; /* queue entries for pairs that start at the right symbol become stale */
        symbol->id = symbol->merged_id;
        symbol->next = right->next;
        if (symbol->next < n_bytes) symbols[symbol->next].prev = left;
        if (symbol->prev != FKV_NO_SYMBOL) pair_push(&run, symbol->prev);
        pair_push(&run, left);
    }
}
