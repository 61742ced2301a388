/* The merge loop of both tokenizers. See token_merge.h.
 *
 * A heap entry is rank << 32 | left: the order of merging and everything that must be remembered. An entry is stale when the pair
 * that starts at `left` now has another rank or is gone. Where an older pair of the same rank started at the same symbol, either
 * entry merges what is there now, at the same moment.
 *
 * Invariant: entries <= symbols + merges < 2 n_bytes, since a merge takes one out and puts at most two in.
 */
#include "token_merge.h"

#include <inttypes.h>
#include <stdlib.h>

/* Blocks double up to here. Larger ones are exact: whoever needs one works through all of it, so taking it anew costs no more. */
static const uint64_t DOUBLING_BYTES = UINT64_C(1) << 20;

fkv_status fkv_scratch_need(fkv_scratch *scratch, uint64_t bytes) {
    if (bytes <= scratch->bytes) return FKV_OK;
    uint64_t wanted = 4096;
    while (wanted < bytes && wanted < DOUBLING_BYTES) wanted *= 2;
    if (wanted < bytes) wanted = bytes;
    free(scratch->block);
    scratch->bytes = 0;
    scratch->block = wanted <= SIZE_MAX ? malloc((size_t)wanted) : NULL;
    FKV_REQUIRE(scratch->block != NULL, FKV_NO_MEMORY, "no memory for %" PRIu64 " bytes of tokenizing; cut the text into parts",
                wanted);
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

fkv_status fkv_token_merge_prepare(fkv_token_merge *merge, uint32_t n_bytes) {
    FKV_TRY(fkv_scratch_need(&merge->scratch, (uint64_t)n_bytes * (2 * sizeof *merge->heap + sizeof *merge->symbols)));
    merge->heap = merge->scratch.block;
    merge->symbols = (fkv_symbol *)(merge->heap + 2 * (size_t)n_bytes);
    merge->n_bytes = n_bytes;
    return FKV_OK;
}

typedef struct merge_run {
    fkv_symbol *symbols;
    uint64_t *heap;
    size_t n_heap;
    uint32_t n_bytes;
    fkv_pair_rank_fn pair_rank;
    const void *context;
} merge_run;

static void pair_push(merge_run *run, uint32_t left) {
    fkv_symbol *symbol = &run->symbols[left];
    symbol->rank = FKV_NO_MERGE;
    if (symbol->next == run->n_bytes) return;
    run->pair_rank(run->context, run->symbols, left, run->symbols[symbol->next].next);
    if (symbol->rank != FKV_NO_MERGE) fkv_heap_push(run->heap, &run->n_heap, (uint64_t)symbol->rank << 32 | left);
}

void fkv_token_merge_run(fkv_token_merge *merge, fkv_pair_rank_fn pair_rank, const void *context) {
    fkv_symbol *symbols = merge->symbols;
    uint32_t n_bytes = merge->n_bytes;
    merge_run run = {.symbols = symbols, .heap = merge->heap, .n_bytes = n_bytes, .pair_rank = pair_rank, .context = context};
    for (uint32_t left = 0; left < n_bytes; left = symbols[left].next) pair_push(&run, left);
    while (run.n_heap > 0) {
        FKV_ASSERT(run.n_heap < 2 * (size_t)n_bytes);
        uint64_t entry = fkv_heap_pop(run.heap, &run.n_heap);
        uint32_t left = (uint32_t)entry;
        fkv_symbol *symbol = &symbols[left];
        if (symbol->rank != entry >> 32) continue;
        fkv_symbol *right = &symbols[symbol->next];
        right->rank = FKV_NO_MERGE; /* its own entries are stale from here on */
        symbol->id = symbol->merged_id;
        symbol->next = right->next;
        if (symbol->next < n_bytes) symbols[symbol->next].prev = left;
        if (symbol->prev != FKV_NO_SYMBOL) pair_push(&run, symbol->prev);
        pair_push(&run, left);
    }
}
