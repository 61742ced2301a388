/* Computes the size of the step table and fills the table on the host. common/step_words.h defines its layout. */
#ifndef FKV_STEP_TABLE_H
#define FKV_STEP_TABLE_H

#include "../attn.h"
#include "common/step_words.h"
#include "kernel_source.h"

/* Describes how the queries and the history of a step are divided into work items, for one layer. Layers with equal plans share a
 * step table. */
typedef struct fkv_step_plan {
    uint32_t page_tokens;
    uint32_t window; /* sliding window in tokens; 0 means no window */
    uint32_t n_sinks;
    uint32_t heads_per_kv;
    uint32_t blocks_per_kv; /* maximum number of splits per KV head, not counting splits of open pages */
    uint32_t tile_queries;  /* queries per prefill tile */
    bool latent;            /* true for a latent layer */
    bool items_only;        /* true for a latent layer without a prefill kernel, whose queries all become decode items */
    bool sealed;            /* true for a sealed layer; otherwise, fkv_attn_row.open is not read */
} fkv_step_plan;

/* Returns the plan of one layer. `tile_queries` is the result of fkv_prefill_queries() for the device. */
FKV_INTERNAL fkv_step_plan fkv_step_plan_of(const fkv_attn_layer *layer, uint32_t tile_queries);

/* Returns the number of pages per split for a query that attends to n_visible pages. `decode` is false for queries of a sequence
 * with more than FKV_ITEM_QUERIES new tokens. */
uint32_t fkv_step_split_pages(const fkv_step_plan *plan, uint32_t n_visible, bool decode);

/* Returns the size of a step's table in words. fkv_step_table_fill() writes exactly this number of words. */
FKV_INTERNAL uint32_t fkv_step_table_words(const fkv_step_plan *plan, const fkv_attn_row *rows, uint32_t n_rows);
FKV_INTERNAL void fkv_step_table_fill(const fkv_step_plan *plan, const fkv_attn_row *rows, uint32_t n_rows, uint32_t *words);

/* A change to a table: the number `add` is added to `count` words, at indices first, first + stride, and so on. */
typedef struct fkv_table_run {
    uint32_t first;
    uint32_t stride;
    uint32_t count;
    uint32_t add; /* modulo 2^32 */
} fkv_table_run;

/* Writes to `runs` the changes that turn table `from` into table `to`, both of n words. Returns the number of runs, or
 * max_runs + 1 if more than max_runs runs are needed. */
FKV_INTERNAL uint32_t fkv_step_table_changes(const uint32_t *from, const uint32_t *to, uint32_t n, fkv_table_run *runs,
                                             uint32_t max_runs);

/* Returns the size, in floats, of the partial results that decode passes to the merge kernel: output sums [splits, G, rows, D],
 * then {max, total} [G, rows, splits, 2], where rows = R * queries per item. */
FKV_INTERNAL uint64_t fkv_step_parts_floats(const fkv_attn_layer *layer, const uint32_t *words);

/* Returns true if decode of a step should use FKV_KERNEL_DECODE_MERGE, which is faster than separate kernels for decode and merge
 * if no item has many splits. The results are bit-identical. words: the step table, or at least its header. */
FKV_INTERNAL bool fkv_step_merges_in_decode(fkv_kernel_device device, const fkv_attn_layer *layer, const uint32_t *words);

#endif
