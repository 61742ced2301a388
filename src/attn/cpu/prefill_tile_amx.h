/* AMX prefill over one tile of 64 sealed or TurboQuant tokens that are visible to every query row. Scores, softmax and values are
 * computed for 16 rows at a time. Included by kernels_amx.c. Results are bit-identical to those of the separate kernels, which
 * process all other tiles.
 *
 * Keys and values are unpacked once per tile into matrix operands. Then each block of 16 rows passes through all steps, while its
 * query digits, scores, weights and sums stay in L1. Consecutive steps belong to different blocks, so that the vector units do
 * not wait for the matrix unit or for reductions. Accumulators alternate between two sets of tile registers.
 *
 * The vector units are the bottleneck. For each row and tile, they quantize D query values (sealed keys only), compute 64
 * exponentials, quantize 64 weights, and convert 64 scores and D values to float. The matrix unit powers down after about 350 ns
 * without a multiplication. To keep it powered up, the softmax code issues multiplications whose results are discarded.
 */
#ifndef FKV_PREFILL_TILE_AMX_H
#define FKV_PREFILL_TILE_AMX_H

#include "sealed_amx.h"

enum { MAX_FUSED_DIM = 256, MAX_FUSED_CHUNKS = MAX_FUSED_DIM / CHUNK_NUMBERS };

typedef struct fused_job {
    const fkv_tile_rows *in;
    const fkv_codec *k;
    const fkv_codec *v;
    digit_rows digits;                       /* query digits of the current block (sealed keys) or of all rows (TurboQuant) */
    sealed_page page;                        /* sealed keys only */
    sealed_rows rows;                        /* quantization state of the current block */
    alignas(64) float high_step[BLOCK_ROWS]; /* rows.step * 256 */
    alignas(64) float key_norms[FKV_TILE_TOKENS];                              /* TurboQuant keys only */
    alignas(64) uint8_t keys[TILE_BLOCKS * MAX_FUSED_CHUNKS][CHUNK_QUADS][64]; /* key codes by block of 16 tokens and chunk */
    alignas(64) int8_t block_digits[MAX_FUSED_CHUNKS][DIGITS][BLOCK_ROWS][CHUNK_NUMBERS];
    alignas(64) float scores[BLOCK_ROWS][FKV_TILE_TOKENS]; /* scores, later products of softmax weights and norms */
    alignas(64) int32_t sums[2][DIGITS][BLOCK_ROWS][16];
    sealed_norms norms;
    alignas(64) float weight_step[BLOCK_ROWS];
    alignas(64) uint8_t weights[2][BLOCK_ROWS][FKV_TILE_TOKENS]; /* high bytes of the weights, then low bytes */
    sealed_levels_tile levels;
} fused_job;

/* Keeps the matrix unit powered up by issuing a multiplication whose result is discarded. Overwrites tile 3. */
FKV_INLINE void fused_stay_awake(void) { _tile_dpbssd(3, 6, 7); }

/* Unpacks the keys and values of the tile, and sets j->digits to the location of the query digits. */
static void fused_open(uint32_t n_chunks, fused_job *j) {
    const fkv_tile_rows *in = j->in;
    const uint8_t *const *part = in->part[FKV_SIDE_K];
    bool turbo = j->k->kind == FKV_CODEC_TURBO;
    if (turbo) {
        turbo_queries tq = turbo_queries_in(in->prepared, in->n_rows);
        j->digits = (digit_rows){tq.digits, j->k->dim, (size_t)in->n_rows * j->k->dim, CHUNK_NUMBERS};
        widen_halves(j->k->type, part[FKV_PART_SCALES], FKV_TILE_TOKENS, j->key_norms);
    } else {
        j->digits =
            (digit_rows){j->block_digits[0][0][0], CHUNK_NUMBERS, sizeof j->block_digits[0][0], sizeof j->block_digits[0]};
        sealed_page_open(j->k, part, &j->page);
    }
    for (uint32_t block = 0; block < TILE_BLOCKS; block++) {
        sealed_quads *keys = (sealed_quads *)(void *)j->keys[block * n_chunks];
        uint32_t token = block * FKV_SEALED_TOKENS;
        if (turbo)
            turbo_keys_of(0, j->k, part, token, keys);
        else
            sealed_quads_of(j->k, &j->page, sealed_block(j->k, part, token), keys);
    }
    book_values_open(j->v, in->part[FKV_SIDE_V], FKV_TILE_TOKENS, &j->norms, &j->levels);
}

/* The functions below process one block of n rows, starting at `row`. n_chunks is a compile-time constant. */

/* ---- scores ---- */

/* Quantizes the queries for a sealed page. Sets bias[r] to the partial sums of q * bias of row r. */
FKV_INLINE void fused_make_digits(bool narrow, uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t n, vf *bias) {
    const float *q = j->in->q + (size_t)row * n_chunks * CHUNK_NUMBERS;
    for (uint32_t r = 0; r < n; r++)
        bias[r] = sealed_digits_of(narrow, 4 * n_chunks, &j->page, q + (size_t)r * n_chunks * CHUNK_NUMBERS, j->rows.inverse[r],
                                   j->block_digits[0][0][r], sizeof j->block_digits[0][0], sizeof j->block_digits[0]);
}

/* Quantizes the queries. For sealed keys, multiplies them by the scales of the page first. */
FKV_INLINE void fused_queries(uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t n) {
    const fkv_tile_rows *in = j->in;
    if (j->k->kind == FKV_CODEC_TURBO) {
        turbo_queries tq = turbo_queries_in(in->prepared, in->n_rows);
        vf_store(j->rows.step, _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), tq.step + row));
        vf_store(j->rows.bias, vf_set(0.0f));
        j->rows.by_float = 0;
        j->rows.narrow = false;
        for (uint32_t i = 0; i < *tq.n_by_float; i++)
            if (tq.by_float[i] - row < n) j->rows.by_float |= 1u << (tq.by_float[i] - row);
    } else {
        vf bias[BLOCK_ROWS];
        sealed_rows_open(&j->page, in->prepared, in->n_rows, row, &j->rows);
        FKV_UNROLL
        for (uint32_t r = 0; r < BLOCK_ROWS; r++) bias[r] = vf_set(0.0f);
        if (j->rows.narrow)
            fused_make_digits(true, n_chunks, j, row, n, bias);
        else
            fused_make_digits(false, n_chunks, j, row, n, bias);
        vf_store(j->rows.bias, fold_rows(FOLD_SUM, BLOCK_ROWS, bias));
        fkv_tiles_see_stores();
    }
    vf_store(j->high_step, vf_mul(vf_load(j->rows.step), vf_set(256.0f)));
}

FKV_INLINE digit_rows fused_digits(const fused_job *j, uint32_t row) {
    return j->k->kind == FKV_CODEC_TURBO ? digits_from(j->digits, row) : j->digits;
}

/* Starts to multiply queries whose high digits are 0 by 16 keys. Tiles 0 and 1 accumulate the products with the middle and low
 * digits, and tiles 2 and 3 are a second set of accumulators. Tiles 4 and 5 hold the query digits of the first 64 channels and
 * are loaded only once, for block 0. Tile 6 holds the digits of the other channels, and tile 7 holds keys. */
FKV_INLINE void narrow_start(int set, uint32_t n_chunks, const fused_job *j, uint32_t block) {
    if (block == 0) {
        _tile_loadd(4, j->block_digits[0][1], CHUNK_NUMBERS);
        _tile_loadd(5, j->block_digits[0][2], CHUNK_NUMBERS);
    }
    _tile_loadd(7, j->keys[block * n_chunks], 64);
    if (set == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_dpbssd(0, 4, 7);
        _tile_dpbssd(1, 5, 7);
    } else {
        _tile_zero(2);
        _tile_zero(3);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    for (uint32_t chunk = 1; chunk < n_chunks; chunk++) {
        _tile_loadd(7, j->keys[block * n_chunks + chunk], 64);
        _tile_loadd(6, j->block_digits[chunk][1], CHUNK_NUMBERS);
        if (set == 0)
            _tile_dpbssd(0, 6, 7);
        else
            _tile_dpbssd(2, 6, 7);
        _tile_loadd(6, j->block_digits[chunk][2], CHUNK_NUMBERS);
        if (set == 0)
            _tile_dpbssd(1, 6, 7);
        else
            _tile_dpbssd(3, 6, 7);
    }
}

FKV_INLINE void fused_start_scores(bool narrow, int set, uint32_t n_chunks, const fused_job *j, uint32_t row, uint32_t block) {
    if (narrow)
        narrow_start(set, n_chunks, j, block);
    else
        prefill_start(set, n_chunks, fused_digits(j, row), (const sealed_quads *)(const void *)j->keys[block * n_chunks]);
}

/* Kinds of query digits: three digits of queries for sealed keys, two digits of such queries if all high digits are 0, and three
 * digits of queries for TurboQuant keys. The code is specialized for each kind at compile time. */
typedef enum fused_kind { WIDE, NARROW, TURBO } fused_kind;

/* Converts the dot products with 16 tokens to scores, using the same float operations as sealed_score(). */
FKV_INLINE void fused_score_rows(fused_kind kind, int set, fused_job *j, uint32_t token, uint32_t n) {
    vf norms = vf_load(j->key_norms + token);
    for (uint32_t r = 0; r < n; r++) {
        __m512i high = _mm512_load_si512(j->sums[set][1][r]);
        if (kind != NARROW) high = _mm512_add_epi32(times_256(_mm512_load_si512(j->sums[set][0][r])), high);
        vf low = _mm512_cvtepi32_ps(_mm512_load_si512(j->sums[set][2][r]));
        vf score = vf_fma(low, vf_set(j->rows.step[r]), vf_set(j->rows.bias[r]));
        score = vf_fma(_mm512_cvtepi32_ps(high), vf_set(j->high_step[r]), score);
        vf_store(j->scores[r] + token, kind == TURBO ? vf_mul(score, norms) : score);
    }
}

FKV_INLINE void fused_store_sums(fused_kind kind, int set, fused_job *j) {
    if (kind == NARROW && set == 0) {
        _tile_stored(0, j->sums[0][1], 64);
        _tile_stored(1, j->sums[0][2], 64);
    } else if (kind == NARROW) {
        _tile_stored(2, j->sums[1][1], 64);
        _tile_stored(3, j->sums[1][2], 64);
    } else if (set == 0) {
        _tile_stored(0, j->sums[0][0], 64);
        _tile_stored(1, j->sums[0][1], 64);
        _tile_stored(2, j->sums[0][2], 64);
    } else {
        _tile_stored(3, j->sums[1][0], 64);
        _tile_stored(4, j->sums[1][1], 64);
        _tile_stored(5, j->sums[1][2], 64);
    }
    fkv_tiles_see_stores();
}

FKV_INLINE void fused_score_step(fused_kind kind, int set, uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t block,
                                 uint32_t n) {
    if (block + 1 < TILE_BLOCKS) fused_start_scores(kind == NARROW, 1 - set, n_chunks, j, row, block + 1);
    fused_store_sums(kind, set, j);
    fused_score_rows(kind, set, j, block * FKV_SEALED_TOKENS, n);
}

FKV_INLINE void fused_score_block(fused_kind kind, uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t n) {
    fused_score_step(kind, 0, n_chunks, j, row, 0, n);
    fused_score_step(kind, 1, n_chunks, j, row, 1, n);
    fused_score_step(kind, 0, n_chunks, j, row, 2, n);
    fused_score_step(kind, 1, n_chunks, j, row, 3, n);
}

/* Computes the scores. The matrix products of the first 16 tokens are already running. */
FKV_INLINE void fused_scores(uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t n) {
    const fkv_tile_rows *in = j->in;
    const uint8_t *const *part = in->part[FKV_SIDE_K];
    const float *q = in->q + (size_t)row * n_chunks * CHUNK_NUMBERS;
    if (j->k->kind == FKV_CODEC_TURBO) {
        fused_score_block(TURBO, n_chunks, j, row, n);
        for (uint32_t left = j->rows.by_float; left != 0; left &= left - 1) {
            uint32_t r = (uint32_t)__builtin_ctz(left);
            scores_by_float(j->k, part, FKV_TILE_TOKENS, q, 1, &r, j->scores[0]);
        }
        return;
    }
    if (j->rows.narrow)
        fused_score_block(NARROW, n_chunks, j, row, n);
    else
        fused_score_block(WIDE, n_chunks, j, row, n);
    if (j->rows.by_float != 0) sealed_by_float(j->k, part, FKV_TILE_TOKENS, q, 0, j->rows.by_float, j->scores[0]);
}

/* ---- softmax and weights ---- */

/* Computes the softmax weights, multiplies them by the norms of the values, and quantizes the products, using the same float
 * operations as softmax_block() and sealed_weigh(). */
FKV_INLINE void fused_softmax(uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t n) {
    const uint32_t dim = n_chunks * CHUNK_NUMBERS;
    fkv_softmax state = {j->in->state.max + row, j->in->state.sum + row, j->in->state.out + (size_t)row * dim};
    vf lanes[BLOCK_ROWS];
    vf largest[BLOCK_ROWS];
    float factor[BLOCK_ROWS];
    uint32_t grown = softmax_largest(BLOCK_ROWS, j->scores[0], n, state, factor);
    softmax_rescale(grown, factor, dim, state.out);
    FKV_UNROLL
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) lanes[r] = largest[r] = vf_set(0.0f);
    for (uint32_t r = 0; r < n; r++) {
        vf base = vf_set(state.max[r]);
        vf sum = vf_set(0.0f);
        __m512i most = _mm512_setzero_si512();
        FKV_UNROLL
        for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) {
            vf p = exp_weight(vf_sub(vf_load(j->scores[r] + t), base));
            vf weight = vf_mul(p, vf_load(j->norms.at + t));
            sum = vf_add(sum, p);
            most = _mm512_max_epu32(most, _mm512_castps_si512(weight)); /* NaN compares as the largest value */
            vf_store(j->scores[r] + t, weight);
        }
        lanes[r] = sum;
        largest[r] = _mm512_castsi512_ps(abs_bits_of(_mm512_castsi512_ps(most)));
        if (r == BLOCK_ROWS / 2) fused_stay_awake();
    }
    fused_stay_awake();
    softmax_add(BLOCK_ROWS, n, lanes, state);
    alignas(64) float inverse[BLOCK_ROWS];
    sealed_steps(BLOCK_ROWS, j->norms.unit, largest, inverse, j->weight_step);
    for (uint32_t r = 0; r < n; r++) {
        __m512i bits[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++) bits[b] = weight_bits(vf_load(j->scores[r] + b * VL), vf_set(inverse[r]));
        sealed_weight_bytes(bits, j->weights[0][r], sizeof j->weights[0]);
    }
    fkv_tiles_see_stores();
}

/* ---- values ---- */

FKV_INLINE void fused_start_block_values(const fused_job *j) {
    _tile_loadd(4, j->weights[0], 64);
    _tile_loadd(5, j->weights[1], 64);
    prefill_start_values(0, &j->levels, 0);
}

/* Adds the weighted values to the outputs. The matrix products of the first 16 channels are already running. */
FKV_INLINE void fused_values(uint32_t n_chunks, fused_job *j, uint32_t row, uint32_t n) {
    const uint32_t dim = n_chunks * CHUNK_NUMBERS;
    float *out = j->in->state.out + (size_t)row * dim;
    for (uint32_t unit = 0; unit < dim / 16; unit += 2) {
        prefill_end_values(0, &j->levels, j->sums[0], unit, n, j->weight_step, dim, out);
        prefill_end_values(1, &j->levels, j->sums[1], unit + 1, n, j->weight_step, dim, out);
    }
}

/* ---- tile ---- */

/* Returns the number of rows in the block that starts at `row`. */
FKV_INLINE uint32_t fused_rows(const fused_job *j, uint32_t row) { return fkv_min_u32(BLOCK_ROWS, j->in->n_rows - row); }

FKV_INLINE void fused_tile(uint32_t n_chunks, fused_job *j) {
    const uint32_t n_rows = j->in->n_rows;
    const uint32_t n_shares = FKV_FETCH_SHARES / (4 * fkv_ceil_div(n_rows, BLOCK_ROWS)) + 1;
    fused_open(n_chunks, j);
    prefill_tiles_open();
    fused_queries(n_chunks, j, 0, fused_rows(j, 0));
    fused_start_scores(j->rows.narrow, 0, n_chunks, j, 0, 0);
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        const uint32_t next = row + BLOCK_ROWS;
        fused_scores(n_chunks, j, row, fused_rows(j, row));
        fkv_fetch_some(j->in->next, n_shares);
        if (row > 0) fused_start_block_values(j);
        if (next < n_rows) fused_queries(n_chunks, j, next, fused_rows(j, next));
        fkv_fetch_some(j->in->next, n_shares);
        if (row > 0) fused_values(n_chunks, j, row - BLOCK_ROWS, BLOCK_ROWS);
        if (next < n_rows) fused_start_scores(j->rows.narrow, 0, n_chunks, j, next, 0);
        fkv_fetch_some(j->in->next, n_shares);
        fused_softmax(n_chunks, j, row, fused_rows(j, row));
        fkv_fetch_some(j->in->next, n_shares);
    }
    const uint32_t last = (n_rows - 1) / BLOCK_ROWS * BLOCK_ROWS;
    fused_start_block_values(j);
    fused_values(n_chunks, j, last, fused_rows(j, last));
    fkv_tiles_close();
}

static bool amx_fuses(const fkv_block *block, uint32_t n_rows) {
    const fkv_codec *k = &block->codec[FKV_SIDE_K];
    const fkv_codec *v = &block->codec[FKV_SIDE_V];
    return n_rows > DECODE_ROWS && (k->dim == 64 || k->dim == 128 || k->dim == 256) && k->dim == v->dim &&
           (fkv_codec_is_sealed(k) || k->kind == FKV_CODEC_TURBO) &&
           (v->kind == FKV_CODEC_SEALED_V || v->kind == FKV_CODEC_TURBO);
}

static void amx_tile(const fkv_tile_rows *in) {
    fused_job j;
    j.in = in;
    j.k = &in->block->codec[FKV_SIDE_K];
    j.v = &in->block->codec[FKV_SIDE_V];
    if (j.k->dim == 64)
        fused_tile(1, &j);
    else if (j.k->dim == 128)
        fused_tile(2, &j);
    else
        fused_tile(4, &j);
}

#endif
