/* Attention of few rows (decode) over AMX: the codes of a page are the matrix, and the few rows that look at it are its columns.
 * Included by kernels_amx.c. Bits are those of kernels_vnni.h, as for many rows.
 *
 * Scores: A = 16 tokens x a chunk of the head dimension: of 8 bits the page itself, not touched before, of 4 bits unpacked. B =
 * the three bytes of four queries, a column each. The sums come out token by token and are transposed as they become floats.
 *
 * Values: A = two bytes of the weights of four rows for one group; B = 16 bytes of the group, in quads of tokens.
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

/* When the next tile is fetched, in shares of it: little with scores, strips and rows, whose own loads from the second cache need
 * some of the 16 places where a core waits for lines, more around softmax and weights. The few lines that are left over follow
 * others so closely that the processor fetches them by itself. */
enum {
    FETCH_SCORES = 32,
    FETCH_BEFORE_SOFTMAX = 16,
    FETCH_AFTER_SOFTMAX = 16,
    FETCH_STRIP = 16,
    FETCH_BEFORE_WEIGHTS = 8,
    FETCH_AFTER_WEIGHTS = 20,
    FETCH_ROWS = 16
};

/* Tiles 0 and 1: sums of scores; 2: queries and 3: keys, a chunk of each; 4 and 5: sums of values; 6: values; 7: weights. In
 * few_score_pairs() 6 has queries, too. Set once for a walk: setting them costs as much as half the products of a tile. */
static void few_tiles_open(const fkv_codec *k_codec) {
    fkv_tile_shapes shapes = {0};
    uint32_t bytes = chunk_numbers(k_codec); /* where K has no integer kernel, 2 and 3 are not used */
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

/* Rows of queries as columns. For 4 bits, first the even numbers of a chunk, then the odd ones, as few_unpack() has them. */
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

static void few_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    enum { MOST = FEW_ROWS * (3 * FKV_MAX_HEAD_DIM + FKV_MAX_HEAD_DIM / 8 + 4) + 5 * 64 };
    alignas(64) uint8_t as_rows[MOST];
    uint32_t dim = codec->dim;
    uint32_t chunk = chunk_numbers(codec);
    uint32_t n_blocks = fkv_ceil_div(n_rows, COLUMN_ROWS);
    int_prepare(codec, q, n_rows, as_rows);
    int_queries iq = queries_in(as_rows, n_rows, dim);
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
    tile t;
    const fkv_codec *codec;
    const uint8_t *const *part;
    column_queries queries;
    uint32_t n_tokens;
    uint32_t n_rows;
    uint32_t n_chunks;
    uint32_t chunk; /* numbers */
    float *scores;
    token_sums sums[2]; /* of this step and of the one before */
    /* codes of 4 bits, a byte each, of the 16 tokens at hand and of the next; of a chunk even numbers first, then odd ones */
    alignas(64) uint8_t unpacked[2][LANE_TOKENS * FKV_MAX_HEAD_DIM];
} few_score_job;

FKV_INLINE void few_unpack(few_score_job *j, uint32_t block) {
    size_t bytes = (size_t)LANE_TOKENS * j->t.row_bytes; /* a multiple of 256 */
    const uint8_t *from = j->t.codes + block * bytes;
    uint8_t *to = j->unpacked[block % 2];
    __m512i half = _mm512_set1_epi8(15);
    __m512i first = _mm512_setr_epi64(0, 1, 2, 3, 8, 9, 10, 11);
    __m512i second = _mm512_setr_epi64(4, 5, 6, 7, 12, 13, 14, 15);
    if (j->chunk == UNIT_NUMBERS) {
        first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    }
    for (const uint8_t *end = from + bytes; from < end; from += 256, to += 512) {
        FKV_UNROLL
        for (int i = 0; i < 4; i++) {
            __m512i packed = _mm512_loadu_si512(from + 64 * i);
            __m512i even = _mm512_and_si512(packed, half);
            __m512i odd = _mm512_and_si512(_mm512_srli_epi16(packed, 4), half);
            _mm512_store_si512(to + 128 * i, _mm512_permutex2var_epi64(even, first, odd));
            _mm512_store_si512(to + 128 * i + 64, _mm512_permutex2var_epi64(even, second, odd));
        }
    }
    fkv_tiles_see_stores();
}

/* The codes of 16 tokens, a byte each, dim of them a token. */
FKV_INLINE const uint8_t *few_codes(int bits, const few_score_job *j, uint32_t block) {
    return bits == 4 ? j->unpacked[block % 2] : j->t.codes + (size_t)block * LANE_TOKENS * j->t.row_bytes;
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

/* A step: 16 tokens, a chunk of the head dimension, and the block of rows from `first` on. */
typedef struct few_step {
    uint32_t block;
    uint32_t first;
    uint32_t chunk;
} few_step;

/* All chunks of some rows, all rows of some tokens, all tokens. */
FKV_INLINE void few_step_next(const few_score_job *j, few_step *s) {
    if (++s->chunk < j->n_chunks) return;
    s->chunk = 0;
    s->first += COLUMN_ROWS;
    if (s->first < j->n_rows) return;
    s->first = 0;
    s->block++;
}

/* n_rows rows of a step are added to their scores, as int_scores_chunk() ends. */
FKV_INLINE void few_scores_add(const few_score_job *j, few_step s, const token_sums *sums, uint32_t n_rows,
                               vf scores[COLUMN_ROWS]) {
    const tile *t = &j->t;
    uint32_t group = s.chunk * j->chunk >> t->group_shift;
    uint32_t token = s.block * LANE_TOKENS;
    const float *step = j->queries.step + s.first;
    const float *query_sum = j->queries.sum + (size_t)s.first * j->n_chunks + s.chunk;
    size_t n_chunks = j->n_chunks;
    vf scale = token_lanes(t->scales, group, token);
    vf bias = token_lanes(t->biases, group, token);
    __m512i by_token[COLUMN_ROWS]; /* four rows of every fourth token */
    __m512i by_row[COLUMN_ROWS];
    FKV_UNROLL
    for (int i = 0; i < 4; i++) by_token[i] = few_joined(&sums->at[i]);
    transpose_dwords(by_token, by_row);
    FKV_UNROLL
    for (uint32_t i = 0; i < COLUMN_ROWS; i++) {
        if (i >= n_rows) continue;
        vf score = vf_fma(bias, vf_set(query_sum[i * n_chunks]), scores[i]);
        scores[i] = vf_fma(_mm512_cvtepi32_ps(by_row[i]), vf_mul(scale, vf_set(step[i])), score);
    }
}

FKV_INLINE float *few_scores_at(const few_score_job *j, few_step s) {
    return j->scores + (size_t)s.first * FKV_TILE_TOKENS + s.block * LANE_TOKENS;
}

/* The same, in memory. */
FKV_INLINE void few_scores_rows(const few_score_job *j, few_step s, const token_sums *sums, uint32_t n_rows) {
    __mmask16 later = s.chunk == 0 ? 0 : 0xffff;
    float *to = few_scores_at(j, s);
    vf scores[COLUMN_ROWS];
    for (uint32_t i = 0; i < n_rows; i++) scores[i] = _mm512_maskz_loadu_ps(later, to + i * FKV_TILE_TOKENS);
    few_scores_add(j, s, sums, n_rows, scores);
    for (uint32_t i = 0; i < n_rows; i++) vf_store(to + i * FKV_TILE_TOKENS, scores[i]);
}

static void few_scores_some(const few_score_job *j, few_step s, const token_sums *sums) {
    few_scores_rows(j, s, sums, j->n_rows - s.first);
}

/* Two steps are under way at a time: the next one has been started, and the one after it is, before the sums of this one become
 * floats. Tiles 0 and 1 have the sums of even and odd steps. */
#define FEW_SCORE_START(into)                                                                                                    \
    do {                                                                                                                         \
        if (bits == 4 && start.chunk == 0 && start.first == 0) few_unpack(j, start.block);                                       \
        _tile_loadd(2, j->queries.bytes + (start.chunk * row_blocks + start.first / COLUMN_ROWS) * query_bytes, 64);             \
        _tile_loadd(3, few_codes(bits, j, start.block) + start.chunk * j->chunk, dim);                                           \
        _tile_zero(into);                                                                                                        \
        _tile_dpbusd(into, 3, 2);                                                                                                \
        few_step_next(j, &start);                                                                                                \
    } while (0)
#define FEW_SCORE_STEP(into)                                                                                                     \
    do {                                                                                                                         \
        _tile_stored(into, j->sums[into].at, 64);                                                                                \
        if (start.block < n_blocks) FEW_SCORE_START(into);                                                                       \
        if (now.chunk == 0 && now.first == 0) fkv_fetch_some(fetch, shares);                                                     \
        if (j->n_rows - now.first >= COLUMN_ROWS)                                                                                \
            few_scores_rows(j, now, &j->sums[into], COLUMN_ROWS);                                                                \
        else                                                                                                                     \
            few_scores_some(j, now, &j->sums[into]);                                                                             \
        few_step_next(j, &now);                                                                                                  \
    } while (0)

FKV_INLINE void few_score_steps(int bits, few_score_job *j) {
    uint32_t n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS);
    uint32_t row_blocks = fkv_ceil_div(j->n_rows, COLUMN_ROWS);
    uint32_t shares = FETCH_SCORES / n_blocks;
    fkv_fetch *fetch = j->t.next;
    size_t dim = (size_t)j->t.n_units * 16;
    size_t query_bytes = (size_t)j->chunk / 4 * 64; /* of a step */
    few_step start = {0, 0, 0};
    few_step now = start;
    FEW_SCORE_START(0);
    if (start.block < n_blocks) FEW_SCORE_START(1);
    tile_lanes(&j->t, j->codec, j->part, j->n_tokens);
    while (now.block < n_blocks) {
        FEW_SCORE_STEP(0);
        if (now.block < n_blocks) FEW_SCORE_STEP(1);
    }
    few_stay_awake();
}

/* Four rows by two chunks of 64 numbers, the most usual shape: even steps are one chunk, odd steps the other, so that queries
 * stay in their tiles and scores in registers. */
#define FEW_PAIR_START(into, queries, block)                                                                                     \
    do {                                                                                                                         \
        _tile_loadd(3, few_codes(bits, j, block) + (into) * 64, 128);                                                            \
        _tile_zero(into);                                                                                                        \
        _tile_dpbusd(into, 3, queries);                                                                                          \
    } while (0)
#define FEW_PAIR_STEP(into, queries)                                                                                             \
    do {                                                                                                                         \
        _tile_stored(into, j->sums[into].at, 64);                                                                                \
        if (block + 1 < n_blocks) FEW_PAIR_START(into, queries, block + 1);                                                      \
        if ((into) == 1) fkv_fetch_some(fetch, shares);                                                                          \
        few_scores_add(j, (few_step){block, 0, into}, &j->sums[into], COLUMN_ROWS, scores);                                      \
    } while (0)

FKV_INLINE void few_score_pairs(int bits, few_score_job *j) {
    uint32_t n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS);
    uint32_t shares = FETCH_SCORES / n_blocks;
    fkv_fetch *fetch = j->t.next;
    if (bits == 4) few_unpack(j, 0);
    _tile_loadd(2, j->queries.bytes, 64);
    _tile_loadd(6, j->queries.bytes + FKV_TILE_HEIGHT * FKV_TILE_BYTES, 64);
    FEW_PAIR_START(0, 2, 0);
    FEW_PAIR_START(1, 6, 0);
    tile_lanes(&j->t, j->codec, j->part, j->n_tokens);
    for (uint32_t block = 0; block < n_blocks; block++) {
        vf scores[COLUMN_ROWS] = {vf_set(0.0f), vf_set(0.0f), vf_set(0.0f), vf_set(0.0f)};
        if (bits == 4 && block + 1 < n_blocks) few_unpack(j, block + 1);
        FEW_PAIR_STEP(0, 2);
        FEW_PAIR_STEP(1, 6);
        float *to = few_scores_at(j, (few_step){block, 0, 0});
        for (int i = 0; i < COLUMN_ROWS; i++) vf_store(to + i * FKV_TILE_TOKENS, scores[i]);
    }
    few_stay_awake();
}

static void few_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                       const void *prepared, uint32_t n_rows, float *scores) {
    few_score_job j;
    tile_begin(&j.t, codec, part, next);
    j.codec = codec;
    j.part = part;
    j.n_tokens = n_tokens;
    j.n_rows = n_rows;
    j.chunk = chunk_numbers(codec);
    j.n_chunks = codec->dim / j.chunk;
    j.queries = columns_in((void *)(uintptr_t)prepared, n_rows, j.n_chunks);
    j.scores = scores;
    bool pairs = n_rows == COLUMN_ROWS && j.n_chunks == 2 && j.chunk == 64;
    if (codec->bits == 8 && pairs)
        few_score_pairs(8, &j);
    else if (codec->bits == 8)
        few_score_steps(8, &j);
    else if (pairs)
        few_score_pairs(4, &j);
    else
        few_score_steps(4, &j);
    fkv_fetch_some(next, FETCH_BEFORE_SOFTMAX);
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
        if (at == 0 && block % 2 == 1) fkv_fetch_some(next, FETCH_STRIP / 2);
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
FKV_INLINE void few_values_block(int bits, few_value_job *j, const float *p, uint32_t n_rows, float *out, bool fetches) {
    uint32_t n_groups = j->place.group[3] - j->place.group[0] + 1;
    uint32_t n_token_vecs = fkv_ceil_div(j->n_tokens, 16);
    if (fetches) fkv_fetch_some(j->t->next, FETCH_BEFORE_WEIGHTS);
    if (n_token_vecs == 4 && n_rows == COLUMN_ROWS && n_groups == 1)
        few_weigh_all(1, &j->weights, &j->facts, &j->place, p);
    else if (n_token_vecs == 4 && n_rows == COLUMN_ROWS && n_groups == 2)
        few_weigh_all(2, &j->weights, &j->facts, &j->place, p);
    else
        few_weigh_some(4, n_token_vecs, &j->weights, &j->facts, &j->place, p, n_rows);
    fkv_tiles_see_stores();
    if (fetches) fkv_fetch_some(j->t->next, FETCH_AFTER_WEIGHTS);
    uint32_t n_vecs = j->place.n_lanes;
    size_t dim = (size_t)j->t->n_units * 16;
    out += j->place.first;
    few_products_start(bits, j, 0);
    for (uint32_t vec = 0; vec < n_vecs; vec++, out += 128 / bits) {
        few_products_store(bits, j, vec);
        if (vec + 1 < n_vecs) few_products_start(bits, j, vec + 1);
        if (fetches && vec % 2 == 1) fkv_fetch_some(j->t->next, FETCH_ROWS / 2);
        for (uint32_t r = 0; r < n_rows; r++) few_values_row(bits, j, vec, r, out + r * dim);
    }
    few_stay_awake();
}

FKV_INLINE void few_values_bits(int bits, few_value_job *j, const float *p, uint32_t n_rows, float *out) {
    few_stay_awake();
    fkv_fetch_some(j->t->next, FETCH_AFTER_SOFTMAX);
    facts_open(&j->facts, j->t, (1u << bits) - 1, j->n_tokens);
    for (uint32_t at = 0; at < j->t->row_bytes; at += STRIP_BYTES) {
        few_strip_open(bits, j, at);
        few_stay_awake();
        for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
            uint32_t n = fkv_min_u32(COLUMN_ROWS, n_rows - row);
            bool fetches = at == 0 && row == 0;
            const float *of_rows = p + (size_t)row * FKV_TILE_TOKENS;
            float *to = out + (size_t)row * j->t->n_units * 16;
            if (n == COLUMN_ROWS) /* a constant */
                few_values_block(bits, j, of_rows, COLUMN_ROWS, to, fetches);
            else
                few_values_block(bits, j, of_rows, n, to, fetches);
        }
    }
}

static void few_values(const fkv_codec *codec, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {
    few_value_job j;
    j.t = t;
    j.n_tokens = n_tokens;
    if (codec->bits == 8)
        few_values_bits(8, &j, p, n_rows, out);
    else
        few_values_bits(4, &j, p, n_rows, out);
}

#endif
