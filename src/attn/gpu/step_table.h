/* The step table on the host: how many words, and the words. See step_words.h for what they mean. */
#ifndef FKV_STEP_TABLE_H
#define FKV_STEP_TABLE_H

#include "../attn.h"
#include "common/step_words.h"

/* How the queries of a layer's step are cut; layers for which these are equal share a table. */
typedef struct fkv_step_cut {
    uint32_t page_tokens;
    uint32_t window; /* 0: all */
    uint32_t n_sinks;
    uint32_t heads_per_kv;  /* R = H / G */
    uint32_t blocks_per_kv; /* pieces of a long history */
    uint32_t tile_queries;  /* of a prefill tile */
    bool sealed;            /* the layer has open pages: fkv_attn_row.open counts */
} fkv_step_cut;

/* The cut of one layer. tile_queries: the prefill kernel's. */
FKV_SEAM fkv_step_cut fkv_step_cut_of(const fkv_attn_layer *layer, uint32_t tile_queries);

/* Seen pages of one piece for a query that sees n_seen pages. */
uint32_t fkv_step_piece_pages(const fkv_step_cut *cut, uint32_t n_seen);

/* Words of the table of a step; fkv_step_table_fill() fills exactly so many. */
FKV_SEAM uint32_t fkv_step_table_words(const fkv_step_cut *cut, const fkv_attn_row *rows, uint32_t n_rows);
FKV_SEAM void fkv_step_table_fill(const fkv_step_cut *cut, const fkv_attn_row *rows, uint32_t n_rows, uint32_t *words);

/* Floats that the decode kernel leaves for the merge kernel: sums [pieces, G, rows, D], then {max, total} [G, rows, pieces, 2],
 * where rows = R * queries of an item. */
FKV_SEAM uint64_t fkv_step_parts_floats(const fkv_attn_layer *layer, const uint32_t *words);

#endif
