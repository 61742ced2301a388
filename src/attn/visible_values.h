/* Computes weighted sums of values in tiles with masked tokens. A masked token must not affect a row, even if its stored bytes
 * are arbitrary. However, kernels multiply masked values by a weight of 0, and 0 * NaN is NaN. Tiles with masked tokens are
 * therefore checked first. If a masked value is non-finite, each query reads a copy of the tile in which the tokens that
 * are masked for this query are zero. */
#ifndef FKV_VISIBLE_VALUES_H
#define FKV_VISIBLE_VALUES_H

#include "attn.h"
#include "cpu/kernels.h"

/* A tile of values and the query rows that attend to it. There are `heads` rows per query. Queries are sorted by position, so
 * each mask begins and ends no earlier than the mask of the previous query. */
typedef struct fkv_value_tile {
    const fkv_cpu_kernels *kernels;
    void (*values)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                   const float *p, uint32_t n_rows, float *out); /* value kernel of `codec` */
    const fkv_codec *k_codec;                                    /* the K codec that was passed to enter() */
    const fkv_codec *codec;                                      /* codec of the value rows */
    const uint8_t *part[FKV_N_PARTS];
    uint32_t n_tokens;
    const fkv_row_mask *masks; /* [rows] */
    uint32_t n_rows;
    uint32_t heads;
    const float *p; /* [rows, FKV_TILE_TOKENS] softmax weights */
    float *out;     /* [rows, D] */
} fkv_value_tile;

/* Returns whether any of the tile's n_tokens tokens is masked for at least one row. Checking the first and the last row suffices,
 * because mask bounds never decrease from row to row. */
FKV_INLINE bool fkv_masks_hide(const fkv_row_mask *masks, uint32_t n_rows, uint32_t n_tokens) {
    return masks[0].end < n_tokens || masks[n_rows - 1].begin > masks[n_rows - 1].sinks;
}

/* Computes the weighted values of the tile and adds them to `out`. Masked tokens have no effect on the result. Must be called
 * between enter() and leave() for the same rows. */
void fkv_attn_visible_values(const fkv_value_tile *tile, fkv_fetch *next);

#endif
