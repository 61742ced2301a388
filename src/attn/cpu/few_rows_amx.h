/* Attention of few rows (decode) over AMX: the codes of a page are the matrix, and the few rows that look at it are its columns.
 * Included by kernels_amx.c. Bits are those of kernels_vnni.h, as for many rows.
 *
 * Scores: A = 16 tokens x a chunk of the head dimension, the page itself, not touched before; for 4 bits once more with the low
 * halves of its bytes alone. B = the three bytes of four queries, a column each. The sums come out token by token and are
 * transposed as they become floats.
 *
 * Values: A = two bytes of the weights of four rows for one group; B = 16 bytes of the group, in quads of tokens.
 */
#ifndef FKV_FEW_ROWS_AMX_H
#define FKV_FEW_ROWS_AMX_H

#include "amx_tiles.h"
#include "rows16_avx512.h"

enum {
    FEW_ROWS = 11,   /* at most */
    COLUMN_ROWS = 4, /* rows whose bytes are the columns of one matrix */
    N_BYTES = 3,     /* of a query */
    TOKEN_BLOCKS = FKV_TILE_TOKENS / LANE_TOKENS,
    TILE_QUADS = FKV_TILE_TOKENS / 4 /* of tokens */
};

/* Tiles 0 and 1: sums of scores; 2: queries and 3: keys, a chunk of each; 4 and 5: sums of values; 6: values; 7: weights. Set
 * once for a walk: setting them costs as much as half the products of a tile. */
static void few_tiles_open(const fkv_codec *k_codec) {
    fkv_tile_shapes shapes = {0};
    uint32_t bytes = 64; /* of a chunk */
    if (has_integer_kernel(k_codec)) bytes = chunk_units(k_codec->group) * UNIT_NUMBERS * k_codec->bits / 8;
    fkv_tile_shape(&shapes, 0, LANE_TOKENS, 64);
    fkv_tile_shape(&shapes, 1, LANE_TOKENS, 64);
    fkv_tile_shape(&shapes, 2, bytes / 4, 64);
    fkv_tile_shape(&shapes, 3, LANE_TOKENS, bytes);
    fkv_tile_shape(&shapes, 4, 2 * COLUMN_ROWS, 64);
    fkv_tile_shape(&shapes, 5, 2 * COLUMN_ROWS, 64);
    fkv_tile_shape(&shapes, 6, TILE_QUADS, 64);
    fkv_tile_shape(&shapes, 7, 2 * COLUMN_ROWS, 64);
    fkv_tiles_open(&shapes);
}

/* The matrix unit falls asleep after about 350 ns without a product and takes 300 to wake up: between products that are farther
 * apart there is one whose sums nobody reads. */
FKV_INLINE void few_stay_awake(void) { _tile_dpbsud(5, 7, 6); }

/* ---- scores ---- */

/* Rows of queries as columns. For 4 bits, first the quads of a chunk that meet whole bytes, then those that meet low halves. */
typedef struct column_queries {
    float *step;   /* [rows] */
    float *sum;    /* [rows, chunks] */
    int8_t *bytes; /* [chunks, blocks of 4 rows, quads of a chunk, 64]: a quad of 4 rows' high bytes, low bytes, rests, nothing */
} column_queries;

static column_queries columns_in(void *prepared, uint32_t n_rows, uint32_t n_chunks) {
    uint8_t *at = prepared;
    column_queries cq;
    cq.step = (float *)(void *)at;
    at += fkv_align_up(n_rows * sizeof(float), 64);
    cq.sum = (float *)(void *)at;
    at += fkv_align_up((size_t)n_rows * n_chunks * sizeof(float), 64);
    cq.bytes = (int8_t *)at;
    return cq;
}

FKV_INLINE uint32_t chunk_numbers(const fkv_codec *codec) { return chunk_units(codec->group) * UNIT_NUMBERS; }

/* A byte of two codes, low and high, is b = low + 16 * high, so even * low + odd * high = odd / 16 * b + (even - odd / 16) * low:
 * whole bytes, as they lie in the page, and low halves are what queries meet. Of each unit, its 16 even and 16 odd numbers become
 * these two factors. */
static void queries_for_bytes(const int_queries *iq, size_t n) {
    for (size_t at = 0; at < n; at += UNIT_NUMBERS) {
        __m512i x[2];
        FKV_UNROLL
        for (size_t i = 0; i < 2; i++) {
            __m512i high = _mm512_cvtepi8_epi32(load16((const uint8_t *)iq->high + at + 16 * i));
            __m512i low = _mm512_cvtepi8_epi32(load16((const uint8_t *)iq->low + at + 16 * i));
            x[i] = join(join(high, low), _mm512_cvtepi8_epi32(load16((const uint8_t *)iq->rest + at + 16 * i)));
        }
        x[1] = _mm512_srai_epi32(x[1], 4); /* exact */
        x[0] = _mm512_sub_epi32(x[0], x[1]);
        FKV_UNROLL
        for (size_t i = 0; i < 2; i++) {
            __m512i above = _mm512_srai_epi32(_mm512_add_epi32(x[1 - i], _mm512_set1_epi32(128)), 8);
            bytes2 bytes = split(above);
            _mm_storeu_si128((__m128i *)(iq->high + at + 16 * i), bytes.high);
            _mm_storeu_si128((__m128i *)(iq->low + at + 16 * i), bytes.low);
            _mm_storeu_si128((__m128i *)(iq->rest + at + 16 * i), _mm512_cvtepi32_epi8(x[1 - i]));
        }
    }
}

static void few_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    enum { MOST = FEW_ROWS * (3 * FKV_MAX_HEAD_DIM + FKV_MAX_HEAD_DIM / 8 + 4) + 5 * 64 };
    alignas(64) uint8_t as_rows[MOST];
    uint32_t dim = codec->dim;
    uint32_t chunk = chunk_numbers(codec);
    uint32_t n_blocks = fkv_ceil_div(n_rows, COLUMN_ROWS);
    int_prepare(codec, q, n_rows, as_rows);
    int_queries iq = queries_in(as_rows, n_rows, dim);
    if (codec->bits == 4) queries_for_bytes(&iq, (size_t)n_rows * dim);
    column_queries cq = columns_in(prepared, n_rows, dim / chunk);
    memcpy(cq.step, iq.step, n_rows * sizeof *cq.step);
    memcpy(cq.sum, iq.sum, (size_t)n_rows * (dim / chunk) * sizeof *cq.sum);
    const int8_t *bytes[N_BYTES] = {iq.high, iq.low, iq.rest};
    for (uint32_t at = 0; at < dim; at += 16) {
        uint32_t place = at % chunk / 16;
        if (codec->bits == 4 && chunk == 64 && place % 3 != 0) place = 3 - place;
        for (uint32_t block = 0; block < n_blocks; block++) {
            int8_t *to = cq.bytes + ((size_t)(at / chunk * n_blocks + block) * (chunk / 4) + (size_t)place * 4) * 64;
            for (int b = 0; b < N_BYTES; b++) {
                __m128 a[4]; /* columns behind the last row repeat it, and are not read */
                for (uint32_t i = 0; i < 4; i++) {
                    uint32_t row = fkv_min_u32(block * COLUMN_ROWS + i, n_rows - 1);
                    a[i] = _mm_loadu_ps((const float *)(const void *)(bytes[b] + (size_t)row * dim + at));
                }
                _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
                for (int i = 0; i < 4; i++) _mm_store_ps((float *)(void *)(to + i * 64 + b * 16), a[i]);
            }
            for (int i = 0; i < 4; i++) _mm_store_ps((float *)(void *)(to + i * 64 + N_BYTES * 16), _mm_setzero_ps());
        }
    }
}

/* Sums of 16 tokens: columns as in column_queries. */
typedef struct token_sums {
    alignas(64) int32_t at[LANE_TOKENS][16];
} token_sums;

/* One tile of keys and the rows that look at it. */
typedef struct few_score_job {
    const tile *t;
    column_queries queries;
    uint32_t n_tokens;
    uint32_t n_rows;
    uint32_t n_chunks;
    uint32_t chunk; /* numbers */
    float *scores;
    token_sums sums[2];                                                     /* of this step and of the one before */
    alignas(64) uint8_t low_halves[FKV_TILE_TOKENS * FKV_MAX_HEAD_DIM / 2]; /* of 4 bits */
} few_score_job;

/* The low halves of the codes of 4 bits, each where its byte is in the page. */
static void few_low_halves(const tile *t, uint32_t n_tokens, uint8_t *to) {
    const uint8_t *from = t->codes;
    const uint8_t *end = from + fkv_align_up((size_t)n_tokens, LANE_TOKENS) * t->row_bytes;
    __m512i half = _mm512_set1_epi8(15);
    for (; from < end; from += 256, to += 256) { /* 16 rows are a multiple of that */
        FKV_UNROLL
        for (int i = 0; i < 256; i += 64) _mm512_store_si512(to + i, _mm512_and_si512(_mm512_loadu_si512(from + i), half));
    }
    fkv_tiles_see_stores();
}

/* Of every fourth of 16 tokens the sums of four rows: 128-bit lane L is token 4 L. Whole rows are loaded and their lanes
 * exchanged: a load of each lane is twice the work. */
FKV_INLINE __m512i few_joined(const int32_t (*sums)[16]) {
    __m512i a = _mm512_load_si512(sums[0]);
    __m512i b = _mm512_load_si512(sums[4]);
    __m512i c = _mm512_load_si512(sums[8]);
    __m512i d = _mm512_load_si512(sums[12]);
    __m512i low_ab = _mm512_shuffle_i32x4(a, b, 0x44);
    __m512i low_cd = _mm512_shuffle_i32x4(c, d, 0x44);
    __m512i high = _mm512_shuffle_i32x4(low_ab, low_cd, 0x88);
    __m512i low = _mm512_shuffle_i32x4(low_ab, low_cd, 0xdd);
    __m512i rest = _mm512_shuffle_i32x4(_mm512_shuffle_i32x4(a, b, 0xee), _mm512_shuffle_i32x4(c, d, 0xee), 0x88);
    return _mm512_add_epi32(join(high, low), _mm512_srai_epi32(rest, 8));
}

/* 16 tokens of a chunk for rows [first, first + n_rows), as int_scores_chunk() ends. */
FKV_INLINE void few_scores_rows(const few_score_job *j, uint32_t token, uint32_t chunk, uint32_t first, uint32_t n_rows) {
    const tile *t = j->t;
    uint32_t group = chunk * j->chunk >> t->group_shift;
    const float *step = j->queries.step + first;
    const float *query_sum = j->queries.sum + (size_t)first * j->n_chunks + chunk;
    size_t n_chunks = j->n_chunks;
    float *to = j->scores + (size_t)first * FKV_TILE_TOKENS + token;
    vf scale = token_lanes(t->scales, t->n_groups, group, token);
    vf bias = token_lanes(t->biases, t->n_groups, group, token);
    __mmask16 later = chunk == 0 ? 0 : 0xffff;
    __m512i by_token[COLUMN_ROWS]; /* four rows of every fourth token */
    __m512i by_row[COLUMN_ROWS];
    FKV_UNROLL
    for (int i = 0; i < 4; i++) by_token[i] = few_joined(&j->sums[token / LANE_TOKENS % 2].at[i]);
    transpose_dwords(by_token, by_row);
    FKV_UNROLL
    for (uint32_t i = 0; i < COLUMN_ROWS; i++, to += FKV_TILE_TOKENS) {
        if (i >= n_rows) continue;
        vf score = vf_fma(bias, vf_set(query_sum[i * n_chunks]), _mm512_maskz_loadu_ps(later, to));
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(by_row[i]), vf_mul(scale, vf_set(step[i])), score));
    }
}

static void few_scores_some(const few_score_job *j, uint32_t token, uint32_t chunk, uint32_t first) {
    few_scores_rows(j, token, chunk, first, j->n_rows - first);
}

/* Products of 16 tokens with the queries in tile 2. */
#define FEW_SCORE_PRODUCT(into, codes, block)                                                                                    \
    do {                                                                                                                         \
        _tile_loadd(3, (codes) + (size_t)(block) * LANE_TOKENS * stride, stride);                                                \
        _tile_dpbusd(into, 3, 2);                                                                                                \
    } while (0)
#define FEW_SCORE_START(into, of, block)                                                                                         \
    do {                                                                                                                         \
        size_t at = (size_t)((of) / row_blocks) * j->chunk * (size_t)bits / 8; /* in a row of codes */                           \
        const int8_t *queries = j->queries.bytes + (of) * query_bytes;                                                           \
        _tile_loadd(2, queries, 64);                                                                                             \
        _tile_zero(into);                                                                                                        \
        FEW_SCORE_PRODUCT(into, j->t->codes + at, block);                                                                        \
        if (bits == 4) {                                                                                                         \
            _tile_loadd(2, queries + query_bytes / 2, 64);                                                                       \
            FEW_SCORE_PRODUCT(into, j->low_halves + at, block);                                                                  \
        }                                                                                                                        \
    } while (0)
/* Two steps are under way at a time: the next one has been started, and the one after it is, here. */
#define FEW_SCORE_STEP(into, block)                                                                                              \
    if (n_blocks > (block)) {                                                                                                    \
        _tile_stored(into, j->sums[into].at, 64);                                                                                \
        if (n_blocks > (block) + 2)                                                                                              \
            FEW_SCORE_START(into, turn, (block) + 2);                                                                            \
        else if (turn + 1 < n_turns)                                                                                             \
            FEW_SCORE_START(into, turn + 1, into);                                                                               \
        fkv_fetch_some(fetch, shares);                                                                                           \
        if (j->n_rows - first >= COLUMN_ROWS)                                                                                    \
            few_scores_rows(j, (block) * LANE_TOKENS, chunk, first, COLUMN_ROWS);                                                \
        else                                                                                                                     \
            few_scores_some(j, (block) * LANE_TOKENS, chunk, first);                                                             \
    }

/* A turn is one chunk and one block of rows, a step 16 tokens of it. Before its sums become floats, products of later steps are
 * started. */
FKV_INLINE void few_score_turns(int bits, few_score_job *j) {
    uint32_t n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS);
    uint32_t row_blocks = fkv_ceil_div(j->n_rows, COLUMN_ROWS);
    uint32_t n_turns = j->n_chunks * row_blocks;
    uint32_t shares = FKV_FETCH_SHARES / 2 / (n_turns * n_blocks); /* to fetch with a step */
    fkv_fetch *fetch = j->t->next;
    size_t stride = j->t->row_bytes;
    size_t query_bytes = (size_t)j->chunk / 4 * 64; /* of a turn; of 4 bits, the second half meets low halves */
    if (bits == 4) few_low_halves(j->t, j->n_tokens, j->low_halves);
    FEW_SCORE_START(0, 0, 0);
    if (n_blocks > 1) FEW_SCORE_START(1, 0, 1);
    for (uint32_t turn = 0; turn < n_turns; turn++) {
        uint32_t chunk = turn / row_blocks;
        uint32_t first = turn % row_blocks * COLUMN_ROWS; /* row */
        FEW_SCORE_STEP(0, 0)
        FEW_SCORE_STEP(1, 1)
        FEW_SCORE_STEP(0, 2)
        FEW_SCORE_STEP(1, 3)
    }
    few_stay_awake();
}

static void few_scores(const fkv_codec *codec, const tile *t, uint32_t n_tokens, const void *prepared, uint32_t n_rows,
                       float *scores) {
    few_score_job j;
    j.t = t;
    j.n_tokens = n_tokens;
    j.n_rows = n_rows;
    j.chunk = chunk_numbers(codec);
    j.n_chunks = codec->dim / j.chunk;
    j.queries = columns_in((void *)(uintptr_t)prepared, n_rows, j.n_chunks);
    j.scores = scores;
    if (codec->bits == 8)
        few_score_turns(8, &j);
    else
        few_score_turns(4, &j);
}

/* ---- values ---- */

/* The weights of up to four rows for the groups of a strip, as weigh() makes them: tokens in the order of packed_words. */
typedef struct few_weights {
    alignas(64) int8_t bytes[4][COLUMN_ROWS][2][FKV_TILE_TOKENS]; /* [groups, rows]: high and low */
    alignas(64) float step[4][COLUMN_ROWS];
    alignas(64) float offset[4][COLUMN_ROWS]; /* sum of p * offset */
    alignas(64) int32_t zero[4][COLUMN_ROWS]; /* sum of weights * zero */
} few_weights;

/* Of the tokens' codes that stand for 0, in the order of packed_words. */
FKV_INLINE __m512i packed_zeros(const token_facts *f, uint32_t group) {
    __m512i zeros[4];
    FKV_UNROLL
    for (uint32_t b = 0; b < 4; b++) zeros[b] = _mm512_cvtepu8_epi32(load16(f->zero[group] + b * 16));
    return low_bytes(pack_words(zeros));
}

/* All lanes of each of n_groups * COLUMN_ROWS registers together. */
FKV_INLINE vf fold_groups(fold how, int n_groups, vf (*x)[COLUMN_ROWS]) {
    if (n_groups == 1) return fold_rows(how, COLUMN_ROWS, x[0]);
    if (n_groups == 2) return fold_rows(how, 2 * COLUMN_ROWS, x[0]);
    return fold_rows(how, 4 * COLUMN_ROWS, x[0]);
}

/* n_vecs: vectors of tokens that a row has. Rows from n_rows on are there, but not looked at. */
FKV_INLINE void few_weigh(int n_groups, uint32_t n_vecs, few_weights *w, const token_facts *f, const strip_place *s,
                          const float *p, uint32_t n_rows) {
    enum { LARGER_SIZE = 0x0b }; /* of _mm512_range_ps: the larger of both, without signs */
    vf largest[4][COLUMN_ROWS];
    vf offset[4][COLUMN_ROWS];
    vf taken[4][COLUMN_ROWS]; /* of whole numbers */
    alignas(64) float inverse[4][COLUMN_ROWS];
    for (int g = 0; g < n_groups; g++) {
        uint32_t group = fkv_min_u32(s->group[0] + (uint32_t)g, s->group[3]);
        FKV_UNROLL
        for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
            largest[g][r] = offset[g][r] = taken[g][r] = vf_set(0.0f);
            if (r >= n_rows) continue;
            for (uint32_t b = 0; b < n_vecs; b++) {
                vf probability = vf_load(p + r * FKV_TILE_TOKENS + b * 16);
                vf weight = vf_mul(probability, vf_load(f->scale[group] + b * 16));
                largest[g][r] = _mm512_range_ps(largest[g][r], weight, LARGER_SIZE);
                offset[g][r] = vf_fma(probability, vf_load(f->offset[group] + b * 16), offset[g][r]);
            }
        }
    }
    vf most = fold_groups(LARGER, n_groups, largest);
    vf_store(inverse[0], _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, vf_set(SMALLEST), _CMP_GT_OQ), vf_set(LARGEST), most));
    vf_store(w->step[0], vf_div(most, vf_set(LARGEST)));
    vf_store(w->offset[0], fold_groups(SUM, n_groups, offset));
    for (int g = 0; g < n_groups; g++) {
        uint32_t group = fkv_min_u32(s->group[0] + (uint32_t)g, s->group[3]);
        __m512i zero = packed_zeros(f, group);
        for (uint32_t r = 0; r < n_rows; r++) {
            __m512i whole[4];
            FKV_UNROLL
            for (uint32_t b = 0; b < 4; b++) {
                whole[b] = _mm512_setzero_si512();
                if (b >= n_vecs) continue;
                vf weight = vf_mul(vf_load(p + r * FKV_TILE_TOKENS + b * 16), vf_load(f->scale[group] + b * 16));
                whole[b] = _mm512_cvtps_epi32(vf_mul(weight, vf_set(inverse[g][r])));
            }
            packed_words words = pack_words(whole);
            __m512i high = high_bytes(words);
            __m512i low = low_bytes(words);
            _mm512_store_si512(w->bytes[g][r][0], high);
            _mm512_store_si512(w->bytes[g][r][1], low);
            taken[g][r] = _mm512_castsi512_ps(join(_mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, high),
                                                   _mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, low)));
        }
    }
    _mm512_store_si512(w->zero, _mm512_castps_si512(fold_groups(WHOLE_SUM, n_groups, taken)));
}

static void few_weigh_all(int n_groups, few_weights *w, const token_facts *f, const strip_place *s, const float *p) {
    few_weigh(n_groups, 4, w, f, s, p, COLUMN_ROWS);
}

static void few_weigh_some(int n_groups, uint32_t n_vecs, few_weights *w, const token_facts *f, const strip_place *s,
                           const float *p, uint32_t n_rows) {
    few_weigh(n_groups, n_vecs, w, f, s, p, n_rows);
}

/* Sums of one vector for high and low bytes of the weights; of 4 bits, of whole bytes and of their high halves. */
typedef struct few_value_sums {
    alignas(64) int32_t at[2][COLUMN_ROWS][2][16];
} few_value_sums;

/* One tile of values and the rows that look at it, a strip at a time. What is used again and again is kept small: with the pages
 * that pass through it the nearest cache is full. */
typedef struct few_value_job {
    const tile *t;
    uint32_t n_tokens;
    uint32_t vec_shares; /* to fetch with a vector */
    strip_place place;
    token_facts facts;
    few_weights weights;
    /* Quads of tokens, 16 bytes of a row, each quad at its quad_place(). Of 4 bits the bytes are not cut into halves: vectors 0-3
     * are whole bytes, 4-7 what their high halves count in them, so that low halves are the difference of two sums. */
    alignas(64) uint8_t codes[MAX_STRIP_VECS][TILE_QUADS][STRIP_BYTES];
    few_value_sums sums[2]; /* of this vector and of the one before */
} few_value_job;

/* Tokens of the last 16 that are behind n_tokens weigh nothing, whatever their slots hold. */
FKV_INLINE void few_strip_open(int bits, few_value_job *j, uint32_t at) {
    j->place = strip_at(bits, j->t, at);
    fkv_fetch *next = j->t->next;
    __m512i high_half = _mm512_set1_epi8((char)0xf0);
    __m512i transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); /* so that v[i] is 16 bytes */
    __mmask64 there = strip_mask(&j->place);
    const uint8_t *rows = j->t->codes + at;
    size_t stride = j->t->row_bytes;
    uint8_t(*to)[TILE_QUADS][STRIP_BYTES] = j->codes;
    uint32_t n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS);
    for (uint32_t block = 0; block < n_blocks; block++) {
        if (at == 0) fkv_fetch_some(next, FKV_FETCH_SHARES / 4 / TOKEN_BLOCKS);
        FKV_UNROLL
        for (uint32_t quad = 0; quad < 4; quad++, rows += 4 * stride) {
            __m512i a[4];
            __m512i v[4];
            FKV_UNROLL
            for (size_t i = 0; i < 4; i++)
                a[i] = _mm512_permutexvar_epi32(transposed, _mm512_maskz_loadu_epi8(there, rows + i * stride));
            token_quads(a, v);
            FKV_UNROLL
            for (int i = 0; i < 4; i++) {
                _mm512_store_si512(to[i][4 * quad + block], v[i]); /* quad_place(4 * block + quad) */
                if (bits == 4) _mm512_store_si512(to[4 + i][4 * quad + block], _mm512_and_si512(v[i], high_half));
            }
        }
    }
    for (uint32_t quad = 4 * n_blocks; quad < TILE_QUADS; quad++)
        for (int i = 0; i < 32 / bits; i++) _mm512_store_si512(to[i][quad_place(quad)], _mm512_setzero_si512());
}

FKV_INLINE void few_products_start(int bits, const few_value_job *j, uint32_t vec) {
    _tile_loadd(7, j->weights.bytes[j->place.group[vec] - j->place.group[0]], 64);
    _tile_zero(4);
    _tile_loadd(6, j->codes[vec], 64);
    _tile_dpbsud(4, 7, 6);
    if (bits == 8) return;
    _tile_zero(5);
    _tile_loadd(6, j->codes[4 + vec], 64);
    _tile_dpbsud(5, 7, 6);
}

FKV_INLINE void few_products_store(int bits, few_value_job *j, uint32_t vec) {
    _tile_stored(4, j->sums[vec % 2].at[0], 64);
    if (bits == 4) _tile_stored(5, j->sums[vec % 2].at[1], 64);
}

FKV_INLINE __m512i few_sums(const int32_t (*of_bytes)[16]) {
    return _mm512_add_epi32(times_256(_mm512_load_si512(of_bytes[0])), _mm512_load_si512(of_bytes[1]));
}

/* The numbers of one vector, as int_values_row() ends. */
FKV_INLINE void few_values_row(int bits, const few_value_job *j, uint32_t vec, uint32_t row, float *out) {
    const few_weights *w = &j->weights;
    uint32_t group = j->place.group[vec] - j->place.group[0];
    __m512i zero = _mm512_set1_epi32(w->zero[group][row]);
    vf step = vf_set(w->step[group][row]);
    vf offset = vf_set(w->offset[group][row]);
    const few_value_sums *sums = &j->sums[vec % 2];
    __m512i whole = few_sums(sums->at[0][row]);
    if (bits == 8) {
        vf x = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero)), step, offset);
        vf_store(out, vf_add(vf_load(out), x));
        return;
    }
    __m512i highs = few_sums(sums->at[1][row]);
    __m512i lows = _mm512_sub_epi32(whole, highs);
    vf even = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(lows, zero)), step, offset);
    vf odd = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srai_epi32(highs, 4), zero)), step, offset);
    __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    vf_store(out, vf_add(vf_load(out), _mm512_permutex2var_ps(even, first, odd)));
    vf_store(out + 16, vf_add(vf_load(out + 16), _mm512_permutex2var_ps(even, second, odd)));
}

/* Rows of one block. The products of the next vector are started before the sums of one become floats. */
FKV_INLINE void few_values_block(int bits, few_value_job *j, const float *p, uint32_t n_rows, float *out) {
    uint32_t n_groups = j->place.group[3] - j->place.group[0] + 1;
    uint32_t n_token_vecs = fkv_ceil_div(j->n_tokens, 16);
    if (n_token_vecs == 4 && n_rows == COLUMN_ROWS && n_groups == 1)
        few_weigh_all(1, &j->weights, &j->facts, &j->place, p);
    else if (n_token_vecs == 4 && n_rows == COLUMN_ROWS && n_groups == 2)
        few_weigh_all(2, &j->weights, &j->facts, &j->place, p);
    else
        few_weigh_some(4, n_token_vecs, &j->weights, &j->facts, &j->place, p, n_rows);
    fkv_tiles_see_stores();
    uint32_t n_vecs = j->place.n_lanes;
    size_t dim = (size_t)j->t->n_units * 16;
    out += j->place.first;
    few_products_start(bits, j, 0);
    for (uint32_t vec = 0; vec < n_vecs; vec++, out += 128 / bits) {
        few_products_store(bits, j, vec);
        if (vec + 1 < n_vecs) few_products_start(bits, j, vec + 1);
        if (j->place.at == 0) fkv_fetch_some(j->t->next, j->vec_shares);
        for (uint32_t r = 0; r < n_rows; r++) few_values_row(bits, j, vec, r, out + r * dim);
    }
    few_stay_awake();
}

FKV_INLINE void few_values_bits(int bits, few_value_job *j, const float *p, uint32_t n_rows, float *out) {
    few_stay_awake();
    facts_open(&j->facts, j->t, (1u << bits) - 1, j->n_tokens);
    for (uint32_t at = 0; at < j->t->row_bytes; at += STRIP_BYTES) {
        few_strip_open(bits, j, at);
        few_stay_awake();
        for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
            uint32_t n = fkv_min_u32(COLUMN_ROWS, n_rows - row);
            const float *of_rows = p + (size_t)row * FKV_TILE_TOKENS;
            float *to = out + (size_t)row * j->t->n_units * 16;
            if (n == COLUMN_ROWS) /* a constant */
                few_values_block(bits, j, of_rows, COLUMN_ROWS, to);
            else
                few_values_block(bits, j, of_rows, n, to);
        }
    }
}

static void few_values(const fkv_codec *codec, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {
    few_value_job j;
    j.t = t;
    j.n_tokens = n_tokens;
    j.vec_shares = FKV_FETCH_SHARES / 4 / (fkv_ceil_div(n_rows, COLUMN_ROWS) * fkv_min_u32(4, t->row_bytes / 16));
    if (codec->bits == 8)
        few_values_bits(8, &j, p, n_rows, out);
    else
        few_values_bits(4, &j, p, n_rows, out);
}

#endif
