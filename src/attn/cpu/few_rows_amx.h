/* What scores and values of few rows (decode) over AMX share: which tile register holds what, when the next page is prefetched,
 * and how the matrix unit is kept awake. Included by few_scores_amx.h and few_values_amx.h.
 *
 * Many rows of queries fill the 16 rows of a tile; four do not. So here the codes of a page are the matrix and the few rows that
 * look at it are its columns. Bits are those of kernels_vnni.h, as for many rows.
 *
 * Ladder: decode of 16384 tokens, 32 q / 8 kv / 128, two threads, pages in memory. The first three rows are of one hour, the next
 * two of another, the last of a third.
 *
 *   step                                                                                  K8/V4     K4/V4
 *   VNNI                                                                                  3.90 ms
 *   the page is the matrix; tiles set once for a walk; the matrix unit kept awake         3.62 ms
 *   the next tile prefetched evenly, all of it, into L2                                   2.55 ms
 *   the same build                                                                        2.45 ms   2.40 ms
 *   the next products start before sums become floats; a vector of values is 16 bytes
 *   of one group; fewer instructions around the vectors                                   1.85 ms   1.72 ms
 *   all chunks of 16 tokens together, queries stay in tiles and scores in registers;
 *   most of the prefetch around softmax and weights; 4-bit keys unpacked once             1.77 ms   1.51 ms
 */
#ifndef FKV_FEW_ROWS_AMX_H
#define FKV_FEW_ROWS_AMX_H

#include "../../base/simd/amx_tiles.h"
#include "rows16_avx512.h"

enum {
    FEW_ROWS = 11,                   /* at most */
    COLUMN_ROWS = 4,                 /* rows whose bytes are the columns of one matrix */
    N_BYTES = 3,                     /* of a query */
    TILE_QUADS = FKV_TILE_TOKENS / 4 /* of tokens */
};

/* When the next tile is prefetched, in shares of it: little with scores, strips and rows, whose own loads from L2 need some of
 * the 16 line fill buffers of a core; more around softmax and weights. The few lines that are left over follow others so closely
 * that the hardware prefetcher takes them. */
enum {
    FETCH_SCORES = 32,
    FETCH_BEFORE_SOFTMAX = 16,
    FETCH_AFTER_SOFTMAX = 16,
    FETCH_STRIP = 16,
    FETCH_BEFORE_WEIGHTS = 8,
    FETCH_AFTER_WEIGHTS = 20,
    FETCH_ROWS = 16
};

/* Tile registers. Macros, because their numbers become text of an instruction. */
#define SCORES_EVEN 0  /* sums of even steps */
#define SCORES_ODD 1   /* sums of odd steps */
#define QUERIES 2      /* a chunk of the head dimension, three bytes of four rows */
#define KEYS 3         /* the same chunk of 16 tokens */
#define VALUES_WHOLE 4 /* sums over whole bytes */
#define VALUES_HIGH 5  /* 4 bits: sums over the high halves of the bytes */
#define CODES 6        /* of values: 64 tokens of 16 bytes */
#define WEIGHTS 7      /* two bytes of four rows for 64 tokens */
#define QUERIES_ODD 6  /* of the odd chunk in few_score_pairs(): values come later */

/* The shapes are set once for a walk: setting them costs as much as half the products of a tile. */
static void few_tiles_open(const fkv_codec *k_codec) {
    fkv_tile_shapes shapes = {0};
    bool sealed = fkv_codec_is_sealed(k_codec) || k_codec->kind == FKV_CODEC_TURBO; /* digits of four rows: sealed_amx.h */
    uint32_t chunk_bytes = sealed ? 64 : chunk_numbers(k_codec); /* where K has no integer kernel, they are not used */
    uint32_t sum_rows = sealed ? N_BYTES * COLUMN_ROWS : LANE_TOKENS;
    fkv_tile_shape(&shapes, SCORES_EVEN, sum_rows, 64);
    fkv_tile_shape(&shapes, SCORES_ODD, sum_rows, 64);
    fkv_tile_shape(&shapes, QUERIES, sealed ? sum_rows : chunk_bytes / 4, 64);
    fkv_tile_shape(&shapes, KEYS, sealed ? sum_rows : LANE_TOKENS, chunk_bytes); /* sealed: more digits */
    fkv_tile_shape(&shapes, VALUES_WHOLE, 2 * COLUMN_ROWS, 64);
    fkv_tile_shape(&shapes, VALUES_HIGH, 2 * COLUMN_ROWS, 64);
    fkv_tile_shape(&shapes, CODES, TILE_QUADS, 64);
    fkv_tile_shape(&shapes, WEIGHTS, 2 * COLUMN_ROWS, 64);
    fkv_tiles_open(&shapes);
}

/* The matrix unit powers down after about 350 ns without a product and takes 300 ns to wake up: between products that are farther
 * apart there is one whose sums nobody reads. */
FKV_INLINE void few_stay_awake(void) { _tile_dpbsud(VALUES_HIGH, WEIGHTS, CODES); }

#endif
