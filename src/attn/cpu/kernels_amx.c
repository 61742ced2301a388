/* The kernels over AMX: tiles of many rows (prefill) multiply bytes by the matrix, 16 rows x 16 columns x 64 products at a time.
 * Few rows (decode), and sides without an integer kernel, take the kernels of kernels_vnni.h.
 *
 * Bits are those of kernels_vnni.h: sums of integers are exact in any order, and what happens to a sum afterwards is the same
 * float operations in the same order. Where a row is summed over its lanes, 16 rows go through one tree of the same shape.
 *
 * Scores: A = one byte of 16 queries x a chunk of the head dimension, as prepared; B = quads of codes x 16 tokens. Values: A =
 * one byte of the weights of 16 rows x 64 tokens; B = quads of tokens x 16 numbers. Codes of a tile are laid out once for all
 * rows.
 *
 * Sums lie in two sets of tiles in turn. The products of one set are started before the sums of the other are stored and read, so
 * that the matrix unit works while the vector unit makes floats of what it did before.
 */
#include "amx_tiles.h"
#include "kernels_vnni.h"

#include "product_amx.h"

enum {
    BLOCK_ROWS = FKV_TILE_HEIGHT,
    LEAST_ROWS = 8, /* below, rows on vectors are as quick */
    MAX_UNITS = FKV_MAX_HEAD_DIM / UNIT_NUMBERS,
    MAX_KEY_UNITS = FKV_TILE_TOKENS / LANE_TOKENS * MAX_UNITS,
    MAX_STEPS = FKV_MAX_HEAD_DIM / 16, /* of 16 numbers along the head dimension */
    TILE_QUADS = FKV_TILE_TOKENS / 4,  /* of tokens */
    MAX_WEIGHTS = 16,                  /* at once: groups x blocks of rows */
    N_BYTES = 3                        /* of a query */
};

/* Sums of 16 rows x 16 columns. */
typedef struct block_sums {
    alignas(64) int32_t at[BLOCK_ROWS][16];
} block_sums;

FKV_INLINE __m512i sums_of(const block_sums *sums, uint32_t row) { return _mm512_load_si512(sums->at[row]); }

/* x * 256, and x / 256 for what is not negative, by moving bytes: while tiles are worked on, shifts and floats share one port of
 * the processor and this has another. */
FKV_INLINE __m512i times_256(__m512i x) {
    return _mm512_shuffle_epi8(x, _mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080));
}
FKV_INLINE __m512i by_256(__m512i x) {
    return _mm512_shuffle_epi8(x, _mm512_set4_epi32((int)0x800f0e0d, (int)0x800b0a09, (int)0x80070605, (int)0x80030201));
}

/* Share `turn` of n_turns of the next tile's codes. */
FKV_INLINE void fetch_share(const tile *t, uint32_t n_tokens, uint32_t turn, uint32_t n_turns) {
    uint32_t lines = fkv_ceil_div(n_tokens * t->row_bytes, 64);
    uint32_t share = fkv_ceil_div(lines, n_turns);
    for (uint32_t i = turn * share; i < fkv_min_u32(lines, (turn + 1) * share); i++) FKV_PREFETCH(t->next + (size_t)i * 64);
}

/* ---- 16 rows at once ---- */

#define FOLD_16(op, x)                                                                                                           \
    do {                                                                                                                         \
        FKV_UNROLL                                                                                                               \
        for (int i = 0; i < 8; i++)                                                                                              \
            (x)[i] = op(_mm512_shuffle_f32x4((x)[2 * i], (x)[2 * i + 1], 0x44),                                                  \
                        _mm512_shuffle_f32x4((x)[2 * i], (x)[2 * i + 1], 0xee));                                                 \
        FKV_UNROLL                                                                                                               \
        for (int i = 0; i < 4; i++)                                                                                              \
            (x)[i] = op(_mm512_shuffle_f32x4((x)[2 * i], (x)[2 * i + 1], 0x88),                                                  \
                        _mm512_shuffle_f32x4((x)[2 * i], (x)[2 * i + 1], 0xdd));                                                 \
        FKV_UNROLL                                                                                                               \
        for (int i = 0; i < 2; i++) {                                                                                            \
            __m512d a = _mm512_castps_pd((x)[2 * i]);                                                                            \
            __m512d b = _mm512_castps_pd((x)[2 * i + 1]);                                                                        \
            (x)[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));                 \
        }                                                                                                                        \
        (x)[0] = op(_mm512_shuffle_ps((x)[0], (x)[1], 0x88), _mm512_shuffle_ps((x)[0], (x)[1], 0xdd));                           \
    } while (0)

/* Lane r of the result: all lanes of x[r] together, lane l with l + 8 first, then 4, 2 and 1 apart, as vf_reduce_add() does. x is
 * used up. */
FKV_INLINE vf in_row_order(vf x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}
FKV_INLINE vf add_whole(vf a, vf b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
FKV_INLINE vf row_sums(vf x[BLOCK_ROWS]) {
    FOLD_16(vf_add, x);
    return in_row_order(x[0]);
}
FKV_INLINE vf row_maxima(vf x[BLOCK_ROWS]) {
    FOLD_16(vf_max, x);
    return in_row_order(x[0]);
}

/* ---- scores ---- */

/* The keys of a tile: for each 16 tokens and each chunk of the head dimension (one unit, or two where groups are larger), quads
 * of codes as unit_quads() makes them; and for each chunk, scales and biases, a lane for each token. */
typedef struct key_blocks {
    uint32_t n_chunks;
    uint32_t units;                                           /* of a chunk */
    alignas(64) uint8_t codes[MAX_KEY_UNITS][UNIT_QUADS][64]; /* [16 tokens, unit] */
    alignas(64) float scale[MAX_UNITS][FKV_TILE_TOKENS];      /* [chunk] */
    alignas(64) float bias[MAX_UNITS][FKV_TILE_TOKENS];
} key_blocks;

FKV_INLINE void keys_open(int bits, key_blocks *keys, const tile *t, uint32_t n_tokens) {
    uint32_t n_units = t->n_units * 16 / UNIT_NUMBERS;
    keys->units = chunk_units(1u << t->group_shift);
    keys->n_chunks = n_units / keys->units;
    for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
        for (uint32_t unit = 0; unit < n_units; unit++) {
            __m512i quads[UNIT_QUADS];
            const uint8_t *codes = t->codes + (size_t)token * t->row_bytes + (size_t)unit * UNIT_NUMBERS * (size_t)bits / 8;
            unit_quads(bits, codes, t->row_bytes, quads);
            FKV_UNROLL
            for (int j = 0; j < UNIT_QUADS; j++)
                _mm512_store_si512(keys->codes[token / LANE_TOKENS * n_units + unit][j], quads[j]);
        }
        for (uint32_t c = 0; c < keys->n_chunks; c++) {
            uint32_t group = c * keys->units * UNIT_NUMBERS >> t->group_shift;
            vf_store(keys->scale[c] + token, token_lanes(t->scales, t->n_groups, group, token));
            vf_store(keys->bias[c] + token, token_lanes(t->biases, t->n_groups, group, token));
        }
    }
}

/* One tile of keys and the rows that look at it. Blocks of 16 rows x 16 tokens, the tokens of one block of rows first. */
typedef struct score_job {
    key_blocks keys;
    int_queries queries;
    uint32_t dim;
    uint32_t n_rows;
    uint32_t n_token_blocks;
    uint32_t n_blocks;
    float *scores;
    block_sums sums[MAX_UNITS][N_BYTES]; /* of one block */
} score_job;

/* Tiles 0-2: sums of the high, low and rest bytes, 3-5: the other set of them; 6: a byte of the queries; 7: codes. */
static void score_tiles_open(uint32_t units) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, BLOCK_ROWS, 64);
    fkv_tile_shape(&shapes, 6, BLOCK_ROWS, units * UNIT_NUMBERS);
    fkv_tile_shape(&shapes, 7, units * UNIT_QUADS, 64);
    fkv_tiles_open(&shapes);
}

/* Where the sums of low and rest bytes start: the latter never become negative, and what that adds to the whole is taken away
 * beforehand. One row, for all rows of a tile. */
enum { REST_START = 1 << 30, LOW_START = -(REST_START >> 8) };
#define ROW_OF(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
static alignas(64) const int32_t low_start[16] = ROW_OF(LOW_START);
static alignas(64) const int32_t rest_start[16] = ROW_OF(REST_START);

#define SCORE_PRODUCTS(a, b, c)                                                                                                  \
    do {                                                                                                                         \
        _tile_loadd(7, codes, 64);                                                                                               \
        _tile_loadd(6, j->queries.high + at, j->dim);                                                                            \
        _tile_zero(a);                                                                                                           \
        _tile_dpbsud(a, 6, 7);                                                                                                   \
        _tile_loadd(6, j->queries.low + at, j->dim);                                                                             \
        _tile_loadd(b, low_start, 0);                                                                                            \
        _tile_dpbsud(b, 6, 7);                                                                                                   \
        _tile_loadd(6, j->queries.rest + at, j->dim);                                                                            \
        _tile_loadd(c, rest_start, 0);                                                                                           \
        _tile_dpbsud(c, 6, 7);                                                                                                   \
    } while (0)

/* Starts the sums of one chunk of a block. */
FKV_INLINE void start_scores(const score_job *j, uint32_t set, uint32_t block, uint32_t chunk) {
    const uint8_t(*codes)[64] = j->keys.codes[(block % j->n_token_blocks * j->keys.n_chunks + chunk) * j->keys.units];
    size_t at = (size_t)(block / j->n_token_blocks) * BLOCK_ROWS * j->dim + (size_t)chunk * j->keys.units * UNIT_NUMBERS;
    if (set == 0)
        SCORE_PRODUCTS(0, 1, 2);
    else
        SCORE_PRODUCTS(3, 4, 5);
}

FKV_INLINE void store_scores(uint32_t set, block_sums to[N_BYTES]) {
    if (set == 0) {
        _tile_stored(0, to[0].at, 64);
        _tile_stored(1, to[1].at, 64);
        _tile_stored(2, to[2].at, 64);
    } else {
        _tile_stored(3, to[0].at, 64);
        _tile_stored(4, to[1].at, 64);
        _tile_stored(5, to[2].at, 64);
    }
}

/* A block, as int_scores_chunk() ends, chunk by chunk. */
FKV_INLINE void scores_from(const score_job *j, uint32_t n_chunks, uint32_t block) {
    const block_sums(*sums)[N_BYTES] = j->sums;
    uint32_t row = block / j->n_token_blocks * BLOCK_ROWS;
    uint32_t token = block % j->n_token_blocks * LANE_TOKENS;
    uint32_t end = fkv_min_u32(BLOCK_ROWS, j->n_rows - row);
    for (uint32_t r = 0; r < end; r++) {
        vf score = vf_set(0.0f);
        vf step = vf_set(j->queries.step[row + r]);
        const float *q_sum = j->queries.sum + (size_t)(row + r) * n_chunks;
        FKV_UNROLL
        for (uint32_t c = 0; c < n_chunks; c++) {
            __m512i sum = _mm512_add_epi32(times_256(sums_of(&sums[c][0], r)), sums_of(&sums[c][1], r));
            sum = _mm512_add_epi32(sum, by_256(sums_of(&sums[c][2], r)));
            score = vf_fma(vf_load(j->keys.bias[c] + token), vf_set(q_sum[c]), score);
            score = vf_fma(_mm512_cvtepi32_ps(sum), vf_mul(vf_load(j->keys.scale[c] + token), step), score);
        }
        vf_store(j->scores + (size_t)(row + r) * FKV_TILE_TOKENS + token, score);
    }
}

FKV_INLINE void score_blocks(score_job *j, const tile *t, uint32_t n_chunks) {
    uint32_t set = 0;
    start_scores(j, 0, 0, 0);
    for (uint32_t block = 0; block < j->n_blocks; block++) {
        for (uint32_t c = 0; c < n_chunks; c++) {
            if (c + 1 < n_chunks)
                start_scores(j, 1 - set, block, c + 1);
            else if (block + 1 < j->n_blocks)
                start_scores(j, 1 - set, block + 1, 0);
            store_scores(set, j->sums[c]);
            set = 1 - set;
        }
        scores_from(j, n_chunks, block);
        fetch_share(t, j->n_token_blocks * LANE_TOKENS, block, j->n_blocks);
    }
}

static void amx_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], const uint8_t *next, uint32_t n_tokens,
                       const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows < LEAST_ROWS || !has_integer_kernel(codec)) {
        int_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
        return;
    }
    tile t;
    score_job j;
    j.dim = codec->dim;
    j.n_rows = n_rows;
    j.n_token_blocks = fkv_ceil_div(n_tokens, LANE_TOKENS);
    j.n_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS) * j.n_token_blocks;
    j.scores = scores;
    j.queries = queries_in((void *)(uintptr_t)prepared, n_rows, j.dim);
    tile_open(&t, codec, part, next, j.n_token_blocks * LANE_TOKENS);
    if (codec->bits == 8)
        keys_open(8, &j.keys, &t, n_tokens);
    else
        keys_open(4, &j.keys, &t, n_tokens);
    score_tiles_open(j.keys.units);
    switch (j.keys.n_chunks) {
    case 1: score_blocks(&j, &t, 1); break;
    case 2: score_blocks(&j, &t, 2); break;
    case 4: score_blocks(&j, &t, 4); break;
    default: score_blocks(&j, &t, j.keys.n_chunks); break;
    }
    fkv_tiles_close();
}

/* ---- softmax ---- */

/* kernel_softmax() for 16 rows that see all of a full tile. */
static void softmax_block(float *scores, uint32_t dim, fkv_softmax state) {
    vf lanes[BLOCK_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
        lanes[r] = vf_set(-INFINITY);
        FKV_UNROLL
        for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) lanes[r] = vf_max(vf_load(scores + r * FKV_TILE_TOKENS + t), lanes[r]);
    }
    vf before = vf_load(state.max);
    vf now = row_maxima(lanes);
    __mmask16 grown = _mm512_cmp_ps_mask(now, before, _CMP_GT_OQ);
    if (grown != 0) {
        float factor[BLOCK_ROWS];
        now = _mm512_mask_mov_ps(before, grown, now);
        vf_store(factor, vf_exp(vf_sub(before, now)));
        vf_store(state.max, now);
        vf_store(state.sum, _mm512_mask_mul_ps(vf_load(state.sum), grown, vf_load(state.sum), vf_load(factor)));
        for (uint32_t left = grown; left != 0; left &= left - 1) {
            uint32_t r = (uint32_t)__builtin_ctz(left);
            scale_row(state.out + (size_t)r * dim, dim, factor[r]);
        }
    }
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
        vf base = vf_set(state.max[r]);
        lanes[r] = vf_set(0.0f);
        FKV_UNROLL
        for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) {
            vf p = vf_exp(vf_sub(vf_load(scores + r * FKV_TILE_TOKENS + t), base));
            vf_store(scores + r * FKV_TILE_TOKENS + t, p);
            lanes[r] = vf_add(lanes[r], p);
        }
    }
    vf_store(state.sum, vf_add(vf_load(state.sum), row_sums(lanes)));
}

static bool all_seen(const fkv_row_mask *masks, uint32_t n_rows) {
    bool all = true;
    for (uint32_t r = 0; r < n_rows; r++) all &= masks[r].end == FKV_TILE_TOKENS && masks[r].begin <= masks[r].sinks;
    return all;
}

static void amx_softmax(float *scores, uint32_t width, const fkv_row_mask *masks, uint32_t n_rows, uint32_t dim, float softcap,
                        fkv_softmax state) {
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        uint32_t block_rows = fkv_min_u32(BLOCK_ROWS, n_rows - row);
        float *block = scores + (size_t)row * FKV_TILE_TOKENS;
        fkv_softmax rows = {state.max + row, state.sum + row, state.out + (size_t)row * dim};
        if (block_rows == BLOCK_ROWS && softcap <= 0.0f && all_seen(masks + row, BLOCK_ROWS))
            softmax_block(block, dim, rows);
        else
            kernel_softmax(block, width, masks + row, block_rows, dim, softcap, rows);
    }
}

/* ---- values ---- */

/* The values of a tile: for each 16 numbers of the head dimension, quads of tokens, 16 numbers each. Quad k lies at
 * quad_place(k), where packing leaves the weights of its tokens. */
typedef struct value_blocks {
    alignas(64) uint8_t codes[MAX_STEPS][TILE_QUADS][64];
} value_blocks;

FKV_INLINE uint32_t quad_place(uint32_t quad) { return quad % 4 * 4 + quad / 4; }

/* 64 codes of a row from number `first` on, a byte each, dwords transposed 4x4; what is behind the row is 0. */
FKV_INLINE __m512i code_bytes(int bits, const uint8_t *row, uint32_t first, uint32_t dim) {
    uint32_t n = fkv_min_u32(64, dim - first);
    __m512i codes;
    if (bits == 8) {
        codes = _mm512_maskz_loadu_epi8(~(__mmask64)0 >> (64 - n), row + first);
    } else {
        __m256i packed = _mm256_maskz_loadu_epi8((__mmask32)(0xffffffffu >> (32 - n / 2)), row + first / 2);
        codes = _mm512_cvtepu8_epi16(packed);
        codes = _mm512_and_si512(_mm512_or_si512(codes, _mm512_slli_epi16(codes, 4)), _mm512_set1_epi8(15));
    }
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
}

FKV_INLINE void values_open(int bits, value_blocks *values, const tile *t, uint32_t n_tokens) {
    uint32_t dim = t->n_units * 16;
    for (uint32_t token = 0; token < n_tokens; token += 4) {
        const uint8_t *row = t->codes + (size_t)token * t->row_bytes;
        for (uint32_t first = 0; first < dim; first += 64) {
            __m512i a[4];
            FKV_UNROLL
            for (int i = 0; i < 4; i++) a[i] = code_bytes(bits, row + (size_t)i * t->row_bytes, first, dim);
            __m512i low01 = _mm512_unpacklo_epi8(a[0], a[1]);
            __m512i high01 = _mm512_unpackhi_epi8(a[0], a[1]);
            __m512i low23 = _mm512_unpacklo_epi8(a[2], a[3]);
            __m512i high23 = _mm512_unpackhi_epi8(a[2], a[3]);
            __m512i v[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23),
                            _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
            FKV_UNROLL
            for (uint32_t i = 0; i < 4; i++)
                if (first + 16 * i < dim) _mm512_store_si512(values->codes[first / 16 + i][quad_place(token / 4)], v[i]);
        }
    }
    for (uint32_t quad = fkv_ceil_div(n_tokens, 4); quad < TILE_QUADS; quad++)
        for (uint32_t i = 0; i < t->n_units; i++) _mm512_store_si512(values->codes[i][quad_place(quad)], _mm512_setzero_si512());
}

/* The weights of up to 16 rows for one group. */
typedef struct row_weights {
    alignas(64) int8_t high[BLOCK_ROWS][FKV_TILE_TOKENS];
    alignas(64) int8_t low[BLOCK_ROWS][FKV_TILE_TOKENS];
    alignas(64) float step[BLOCK_ROWS];
    alignas(64) float offset[BLOCK_ROWS]; /* sum of p * offset */
    alignas(64) int32_t zero[BLOCK_ROWS]; /* sum of weights * zero */
} row_weights;

/* 64 numbers of at most 16 bits to bytes, low ones or high ones, dword 4 L + k holding the numbers 16 k + 4 L and on: the order
 * in which packs leave them. */
typedef struct packed_words {
    __m512i words01;
    __m512i words23;
} packed_words;

FKV_INLINE packed_words pack_words(const __m512i whole[4]) {
    return (packed_words){_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3])};
}
FKV_INLINE __m512i low_bytes(packed_words x) {
    __m512i byte = _mm512_set1_epi16(255);
    return _mm512_packus_epi16(_mm512_and_si512(x.words01, byte), _mm512_and_si512(x.words23, byte));
}
/* Such that 256 * high + low is the number, low being signed. */
FKV_INLINE __m512i high_bytes(packed_words x) {
    __m512i half = _mm512_set1_epi16(128);
    return _mm512_packus_epi16(_mm512_srli_epi16(_mm512_add_epi16(x.words01, half), 8),
                               _mm512_srli_epi16(_mm512_add_epi16(x.words23, half), 8));
}

/* As weigh() does row by row. n_vecs: vectors of tokens that a row has. zero: the group's, in the order of packs. */
FKV_INLINE void weigh_block(uint32_t n_vecs, row_weights *w, const token_facts *f, uint32_t group, __m512i zero, const float *p,
                            uint32_t n_rows) {
    vf largest[BLOCK_ROWS];
    vf offset[BLOCK_ROWS];
    vf taken[BLOCK_ROWS]; /* of whole numbers */
    FKV_UNROLL
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) largest[r] = offset[r] = taken[r] = vf_set(0.0f);
    for (uint32_t r = 0; r < n_rows; r++) {
        const float *row = p + (size_t)r * FKV_TILE_TOKENS;
        vf most = vf_set(0.0f);
        vf sum = vf_set(0.0f);
        FKV_UNROLL
        for (uint32_t b = 0; b < n_vecs; b++) {
            vf probability = vf_load(row + b * 16);
            most = vf_max(most, _mm512_abs_ps(vf_mul(probability, vf_load(f->scale[group] + b * 16))));
            sum = vf_fma(probability, vf_load(f->offset[group] + b * 16), sum);
        }
        largest[r] = most;
        offset[r] = sum;
    }
    alignas(64) float inverse[BLOCK_ROWS];
    vf most = row_maxima(largest);
    vf_store(inverse, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, vf_set(SMALLEST), _CMP_GT_OQ), vf_set(LARGEST), most));
    vf_store(w->step, vf_div(most, vf_set(LARGEST)));
    vf_store(w->offset, row_sums(offset));
    for (uint32_t r = 0; r < n_rows; r++) {
        const float *row = p + (size_t)r * FKV_TILE_TOKENS;
        __m512i whole[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++) {
            whole[b] = _mm512_setzero_si512();
            if (b >= n_vecs) continue;
            vf weight = vf_mul(vf_load(row + b * 16), vf_load(f->scale[group] + b * 16));
            whole[b] = _mm512_cvtps_epi32(vf_mul(weight, vf_set(inverse[r])));
        }
        packed_words words = pack_words(whole);
        __m512i high = high_bytes(words);
        __m512i low = low_bytes(words);
        _mm512_store_si512(w->high[r], high);
        _mm512_store_si512(w->low[r], low);
        taken[r] = _mm512_castsi512_ps(join(_mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, high),
                                            _mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, low)));
    }
    FOLD_16(add_whole, taken);
    _mm512_store_si512(w->zero, _mm512_castps_si512(in_row_order(taken[0])));
}

/* One tile of values and the rows that look at it. First the weights of as many groups as there is room for, then their products:
 * the matrix unit falls asleep after some hundred nanoseconds and takes as long to wake up. */
typedef struct value_job {
    token_facts facts;
    value_blocks values;
    row_weights weights[MAX_WEIGHTS]; /* [groups, blocks of rows] */
    uint32_t dim;
    uint32_t group_steps; /* of 16 numbers */
    uint32_t n_tokens;
    uint32_t n_rows;
    uint32_t n_blocks; /* of rows */
    const float *p;
    float *out;
} value_job;

FKV_INLINE uint32_t block_rows(uint32_t n_rows, uint32_t block) { return fkv_min_u32(BLOCK_ROWS, n_rows - block * BLOCK_ROWS); }

static void weigh_group(value_job *j, uint32_t group, row_weights *of_blocks) {
    __m512i zero[4];
    for (uint32_t b = 0; b < 4; b++) zero[b] = _mm512_cvtepu8_epi32(load16(j->facts.zero[group] + b * 16));
    __m512i zeros = low_bytes(pack_words(zero));
    uint32_t n_vecs = fkv_ceil_div(j->n_tokens, 16);
    for (uint32_t block = 0; block < j->n_blocks; block++) {
        const float *p = j->p + (size_t)block * BLOCK_ROWS * FKV_TILE_TOKENS;
        if (n_vecs == 4)
            weigh_block(4, &of_blocks[block], &j->facts, group, zeros, p, block_rows(j->n_rows, block));
        else
            weigh_block(n_vecs, &of_blocks[block], &j->facts, group, zeros, p, block_rows(j->n_rows, block));
    }
}

/* Tiles 0, 1: sums of the high and low bytes, 2, 3: the other set of them; 4, 5: those bytes of the weights; 6: codes. */
static void value_tiles_open(void) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, BLOCK_ROWS, 64);
    fkv_tile_shape(&shapes, 6, TILE_QUADS, 64);
    fkv_tiles_open(&shapes);
}

/* Starts the sums of a block of rows with 16 numbers of the group, the next after which the weights of another block come. */
FKV_INLINE void start_values(const value_job *j, uint32_t set, const row_weights *w, uint32_t first, uint32_t step) {
    if (step == 0) {
        _tile_loadd(4, w->high, 64);
        _tile_loadd(5, w->low, 64);
    }
    _tile_loadd(6, j->values.codes[first + step], 64);
    if (set == 0) {
        _tile_zero(0);
        _tile_dpbsud(0, 4, 6);
        _tile_zero(1);
        _tile_dpbsud(1, 5, 6);
    } else {
        _tile_zero(2);
        _tile_dpbsud(2, 4, 6);
        _tile_zero(3);
        _tile_dpbsud(3, 5, 6);
    }
}

FKV_INLINE void store_values(uint32_t set, block_sums to[2]) {
    if (set == 0) {
        _tile_stored(0, to[0].at, 64);
        _tile_stored(1, to[1].at, 64);
    } else {
        _tile_stored(2, to[0].at, 64);
        _tile_stored(3, to[1].at, 64);
    }
}

/* As int_values_row() ends. out: of the first row, at the numbers that the sums are of. */
FKV_INLINE void add_values(const row_weights *w, const block_sums sums[2], uint32_t n_rows, uint32_t dim, float *out) {
    for (uint32_t r = 0; r < n_rows; r++) {
        __m512i sum = _mm512_add_epi32(times_256(sums_of(&sums[0], r)), sums_of(&sums[1], r));
        sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(w->zero[r]));
        vf x = vf_fma(_mm512_cvtepi32_ps(sum), vf_set(w->step[r]), vf_set(w->offset[r]));
        float *to = out + (size_t)r * dim;
        vf_store(to, vf_add(vf_load(to), x));
    }
}

static void values_group(const value_job *j, uint32_t group, const row_weights *of_blocks) {
    block_sums sums[2];
    uint32_t first = group * j->group_steps;
    uint32_t n = j->n_blocks * j->group_steps;
    fkv_tiles_see_stores();
    start_values(j, 0, of_blocks, first, 0);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t block = i / j->group_steps;
        uint32_t step = i % j->group_steps;
        if (i + 1 < n) start_values(j, (i + 1) % 2, &of_blocks[(i + 1) / j->group_steps], first, (i + 1) % j->group_steps);
        store_values(i % 2, sums);
        add_values(&of_blocks[block], sums, block_rows(j->n_rows, block), j->dim,
                   j->out + (size_t)block * BLOCK_ROWS * j->dim + (size_t)(first + step) * 16);
    }
}

static void amx_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], const uint8_t *next, uint32_t n_tokens,
                       const float *p, uint32_t n_rows, float *out) {
    if (n_rows < LEAST_ROWS || !has_integer_kernel(codec)) {
        int_values(codec, part, next, n_tokens, p, n_rows, out);
        return;
    }
    tile t;
    value_job j;
    tile_open(&t, codec, part, next, (uint32_t)fkv_align_up(n_tokens, LANE_TOKENS));
    facts_open(&j.facts, &t, (1u << codec->bits) - 1, n_tokens);
    if (codec->bits == 8)
        values_open(8, &j.values, &t, n_tokens);
    else
        values_open(4, &j.values, &t, n_tokens);
    j.dim = codec->dim;
    j.group_steps = codec->group / 16;
    j.n_tokens = n_tokens;
    j.n_rows = n_rows;
    j.n_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS);
    j.p = p;
    j.out = out;
    value_tiles_open();
    uint32_t at_once = fkv_max_u32(1, MAX_WEIGHTS / j.n_blocks);
    for (uint32_t group = 0; group < t.n_groups; group += at_once) {
        uint32_t n = fkv_min_u32(at_once, t.n_groups - group);
        for (uint32_t g = 0; g < n; g++) {
            fetch_share(&t, n_tokens, group + g, t.n_groups);
            weigh_group(&j, group + g, &j.weights[g * j.n_blocks]);
        }
        for (uint32_t g = 0; g < n; g++) values_group(&j, group + g, &j.weights[g * j.n_blocks]);
    }
    fkv_tiles_close();
}

const struct fkv_cpu_kernels fkv_kernels_amx = {"amx",       int_prepare,   amx_scores,         amx_softmax, amx_values,
                                                kernel_fold, kernel_encode, int_prepare_tokens, amx_product};
