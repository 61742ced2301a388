/* Code shared by the AMX decode kernels: tile register assignment, prefetch schedule, and the code that keeps the matrix unit
 * powered up. Included by decode_scores_amx.h and decode_values_amx.h.
 *
 * If queries were the rows of an AMX tile, decode would leave most of the 16 rows empty. Instead, one operand matrix holds the
 * codes of a page, and the columns of the other operand hold the bytes of up to four query rows. Results are bit-identical to
 * those of kernels_vnni.h.
 *
 * With 8-bit keys and 4-bit values, decode is limited by the 16 line fill buffers of a core. With 4-bit keys and values, it is
 * limited by arithmetic.
 */
#ifndef FKV_DECODE_ROWS_AMX_H
#define FKV_DECODE_ROWS_AMX_H

#include "../../base/simd/amx_tiles.h"
#include "rows16_avx512.h"

enum {
    DECODE_ROWS = 11,                /* maximum number of query rows that the decode kernels process */
    COLUMN_ROWS = 4,                 /* number of query rows that share one matrix operand */
    N_BYTES = 3,                     /* number of bytes into which a query value is split */
    TILE_QUADS = FKV_TILE_TOKENS / 4 /* number of quads (groups of four tokens) per tile */
};

/* Prefetch schedule: while the current tile is processed, each phase prefetches this number of shares of the next tile. A share
 * is 1 / FKV_FETCH_SHARES of a tile. The phases that compute scores, rearrange strips of codes and process rows prefetch few
 * shares relative to their duration, because their own loads from L2 occupy some of the 16 line fill buffers of a core. More
 * shares are prefetched before and after the softmax, and before and after the weights are quantized. The hardware prefetcher
 * fetches the remaining lines, which are adjacent to prefetched lines. */
enum {
    FETCH_SCORES = 32,
    FETCH_BEFORE_SOFTMAX = 16,
    FETCH_AFTER_SOFTMAX = 16,
    FETCH_STRIP = 16,
    FETCH_BEFORE_WEIGHTS = 8,
    FETCH_AFTER_WEIGHTS = 20,
    FETCH_ROWS = 16
};

/* Numbers of the tile registers. They are macros, because AMX intrinsics require literal tile numbers. */
#define SCORES_EVEN 0  /* accumulators of scores in even steps */
#define SCORES_ODD 1   /* accumulators of scores in odd steps */
#define QUERIES 2      /* query operand: four rows, three bytes per value, one chunk of the head dimension */
#define KEYS 3         /* key operand: codes of 16 tokens, one chunk of the head dimension */
#define VALUES_WHOLE 4 /* accumulators for sums of weight * code byte */
#define VALUES_HIGH 5  /* accumulators for sums of weight * high nibble, for 4-bit codes */
#define CODES 6        /* value operand: 16 code bytes for each of 64 tokens */
#define WEIGHTS 7      /* weight operand: two bytes per weight, for four rows and 64 tokens */
#define QUERIES_ODD 6  /* query operand of the odd chunk in decode_score_pairs(); the same register later holds value codes */

/* Configures the AMX tiles. Called only once per pass over the pages, because it takes half as long as the matrix
 * multiplications for one tile of tokens. */
static void decode_tiles_open(const fkv_codec *k_codec) {
    fkv_tile_shapes shapes = {0};
    /* for sealed and TurboQuant keys, the query operand holds base-256 digits (signed bytes) of four rows; see sealed_amx.h */
    bool sealed = fkv_codec_is_sealed(k_codec) || k_codec->kind == FKV_CODEC_TURBO;
    uint32_t chunk_bytes = sealed ? 64 : chunk_numbers(k_codec); /* not used if K has no integer kernels */
    uint32_t sum_rows = sealed ? N_BYTES * COLUMN_ROWS : LANE_TOKENS;
    fkv_tile_shape(&shapes, SCORES_EVEN, sum_rows, 64);
    fkv_tile_shape(&shapes, SCORES_ODD, sum_rows, 64);
    fkv_tile_shape(&shapes, QUERIES, sealed ? sum_rows : chunk_bytes / 4, 64);
    fkv_tile_shape(&shapes, KEYS, sealed ? sum_rows : LANE_TOKENS,
                   chunk_bytes); /* for sealed and TurboQuant keys, this register holds the query digits of the odd chunk */
    fkv_tile_shape(&shapes, VALUES_WHOLE, 2 * COLUMN_ROWS, 64);
    fkv_tile_shape(&shapes, VALUES_HIGH, 2 * COLUMN_ROWS, 64);
    fkv_tile_shape(&shapes, CODES, TILE_QUADS, 64);
    fkv_tile_shape(&shapes, WEIGHTS, 2 * COLUMN_ROWS, 64);
    fkv_tiles_open(&shapes);
}

/* Keeps the matrix unit powered up by issuing a matrix multiplication whose result is discarded. The matrix unit powers down
 * after about 350 ns without a multiplication and takes 300 ns to wake up. */
FKV_INLINE void decode_stay_awake(void) { _tile_dpbsud(VALUES_HIGH, WEIGHTS, CODES); }

#endif
