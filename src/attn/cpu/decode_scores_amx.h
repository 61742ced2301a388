/* AMX score kernels for decode-sized tiles. Included by kernels_amx.c; the value kernels are in decode_values_amx.h.
 *
 * Matrix A holds the codes of 16 tokens for one chunk of the head dimension. 8-bit codes are loaded directly from the page, and
 * 4-bit codes are unpacked first. Matrix B holds four query rows. Each row has three columns, one for each byte of its values.
 * The rows of the result are tokens, so the dot products are transposed while they are converted to float.
 *
 * A step covers 16 tokens, four query rows and one chunk. Two steps are in flight: the matrix multiplication of the next step
 * starts before the dot products of the current step are converted, so that the matrix unit and the vector units work in
 * parallel.
 */
#ifndef FKV_DECODE_SCORES_AMX_H
#define FKV_DECODE_SCORES_AMX_H

#include "decode_rows_amx.h"

/* ---- queries ---- */

/* Query rows, arranged as the columns of a matrix operand. For 4-bit keys, the even values of a chunk precede the odd values, in
 * the same order as the codes that unpack_keys() writes. */
typedef struct column_queries {
    uint32_t *n_by_float; /* see int_queries */
    uint32_t *by_float;
    float *step;   /* [rows] */
    float *sum;    /* [rows, chunks] */
    int8_t *bytes; /* [chunks, blocks of 4 rows, quads per chunk, 64]; for each quad: the high bytes of 4 rows, their low bytes,
                      their remainder bytes, and 16 zero bytes */
} column_queries;

static column_queries columns_in(void *prepared, uint32_t n_rows, uint32_t n_chunks) {
    uint8_t *at = prepared;
    column_queries cq;
    cq.n_by_float = (uint32_t *)(void *)at;
    cq.by_float = cq.n_by_float + 1;
    at += fkv_align_up((n_rows + 1) * sizeof(uint32_t), 64);
    cq.step = (float *)(void *)at;
    at += fkv_align_up(n_rows * sizeof(float), 64);
    cq.sum = (float *)(void *)at;
    at += fkv_align_up((size_t)n_rows * n_chunks * sizeof(float), 64);
    cq.bytes = (int8_t *)at;
    return cq;
}

/* Transposes 16 bytes (four quads) of four query rows, starting at row `first`: to[i * 64] receives quad i of all four rows. If
 * there are fewer rows, the last row is repeated, and the results of the repeated columns are ignored. */
FKV_INLINE void transpose_queries(const int8_t *bytes, uint32_t first, uint32_t n_rows, uint32_t dim, int8_t *to) {
    __m128 a[4];
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row = fkv_min_u32(first + i, n_rows - 1);
        a[i] = _mm_loadu_ps((const float *)(const void *)(bytes + (size_t)row * dim));
    }
    _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
    for (int i = 0; i < 4; i++) _mm_store_ps((float *)(void *)(to + i * 64), a[i]);
}

static void decode_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    enum { MOST = DECODE_ROWS * (3 * FKV_MAX_HEAD_DIM + FKV_MAX_HEAD_DIM / 8 + 8) + 6 * 64 };
    alignas(64) uint8_t as_rows[MOST];
    uint32_t dim = codec->dim;
    uint32_t chunk = chunk_numbers(codec);
    uint32_t n_blocks = fkv_ceil_div(n_rows, COLUMN_ROWS);
    int_prepare(codec, q, n_rows, as_rows);
    int_queries iq = queries_in(as_rows, n_rows, dim);
    column_queries cq = columns_in(prepared, n_rows, dim / chunk);
    memcpy(cq.n_by_float, iq.n_by_float, (n_rows + 1) * sizeof *cq.n_by_float);
    memcpy(cq.step, iq.step, n_rows * sizeof *cq.step);
    memcpy(cq.sum, iq.sum, (size_t)n_rows * (dim / chunk) * sizeof *cq.sum);
    const int8_t *bytes[N_BYTES] = {iq.high, iq.low, iq.remainder};
    for (uint32_t at = 0; at < dim; at += 16) {
        uint32_t place = at % chunk / 16;
        if (codec->bits == 4 && chunk == 64 && place % 3 != 0) place = 3 - place;
        for (uint32_t block = 0; block < n_blocks; block++) {
            int8_t *to = cq.bytes + ((size_t)(at / chunk * n_blocks + block) * (chunk / 4) + (size_t)place * 4) * 64;
            for (int b = 0; b < N_BYTES; b++) transpose_queries(bytes[b] + at, block * COLUMN_ROWS, n_rows, dim, to + b * 16);
            for (int i = 0; i < 4; i++) _mm_store_ps((float *)(void *)(to + i * 64 + N_BYTES * 16), _mm_setzero_ps());
        }
    }
}

/* ---- keys ---- */

/* Integer dot products of 16 tokens with four query rows, one column for each row and byte. */
typedef struct token_sums {
    alignas(64) int32_t at[LANE_TOKENS][16];
} token_sums;

/* A tile of keys and the query rows that attend to it. */
typedef struct decode_score_job {
    tile t;
    const fkv_codec *codec;
    const uint8_t *const *part;
    column_queries queries;
    uint32_t n_tokens;
    uint32_t n_rows;
    uint32_t n_chunks;
    uint32_t chunk; /* values per chunk */
    float *scores;
    token_sums sums[2]; /* integer dot products of the current and the previous step */
    /* 4-bit codes, unpacked to one byte each, for the current and the next 16 tokens; in each chunk, even values precede odd
     * values */
    alignas(64) uint8_t unpacked[2][LANE_TOKENS * FKV_MAX_HEAD_DIM];
} decode_score_job;

FKV_INLINE void unpack_keys(decode_score_job *j, uint32_t block) {
    size_t bytes = (size_t)LANE_TOKENS * j->t.row_bytes; /* multiple of 256, because the head dimension is a multiple of 32 */
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

/* Returns the address of the codes of a block of 16 tokens, with one byte per code and dim codes per token. */
FKV_INLINE const uint8_t *key_bytes(int bits, const decode_score_job *j, uint32_t block) {
    return bits == 4 ? j->unpacked[block % 2] : j->t.codes + (size_t)block * LANE_TOKENS * j->t.row_bytes;
}

/* ---- conversion of dot products to scores ---- */

/* A step computes the dot products of block `block` (16 tokens) with four query rows, starting at row `first`, over one chunk of
 * the head dimension. */
typedef struct score_step {
    uint32_t block;
    uint32_t first;
    uint32_t chunk;
} score_step;

/* Gathers the dot products of four query rows with tokens 0, 4, 8 and 12, and combines the three bytes. 128-bit lane L of the
 * result holds the dot products of token 4 * L. Loading whole rows and permuting their lanes takes half as many instructions as
 * loading each lane separately. */
FKV_INLINE __m512i joined_sums(const int32_t (*sums)[16]) {
    __m512i a = _mm512_load_si512(sums[0]);
    __m512i b = _mm512_load_si512(sums[4]);
    __m512i c = _mm512_load_si512(sums[8]);
    __m512i d = _mm512_load_si512(sums[12]);
    __m512i low_ab = _mm512_shuffle_i32x4(a, b, 0x44);
    __m512i low_cd = _mm512_shuffle_i32x4(c, d, 0x44);
    __m512i high = _mm512_shuffle_i32x4(low_ab, low_cd, 0x88);
    __m512i low = _mm512_shuffle_i32x4(low_ab, low_cd, 0xdd);
    __m512i remainder = _mm512_shuffle_i32x4(_mm512_shuffle_i32x4(a, b, 0xee), _mm512_shuffle_i32x4(c, d, 0xee), 0x88);
    return _mm512_add_epi32(join_bytes(high, low), _mm512_srai_epi32(remainder, 8));
}

/* Scales the dot products of a step and adds them to the scores of n_rows rows, with the same float operations as
 * int_scores_chunk(). */
FKV_INLINE void add_scores(const decode_score_job *j, score_step s, const token_sums *sums, uint32_t n_rows,
                           vf scores[COLUMN_ROWS]) {
    const tile *t = &j->t;
    uint32_t group = s.chunk * j->chunk >> t->group_shift;
    uint32_t token = s.block * LANE_TOKENS;
    const float *step = j->queries.step + s.first;
    const float *query_sum = j->queries.sum + (size_t)s.first * j->n_chunks + s.chunk;
    size_t n_chunks = j->n_chunks;
    vf scale = token_lanes(t->scales, group, token);
    vf bias = token_lanes(t->biases, group, token);
    __m512i by_token[COLUMN_ROWS]; /* dot products of four rows with every fourth token */
    __m512i by_row[COLUMN_ROWS];
    FKV_UNROLL
    for (int i = 0; i < 4; i++) by_token[i] = joined_sums(&sums->at[i]);
    transpose_dwords(by_token, by_row);
    FKV_UNROLL
    for (uint32_t i = 0; i < COLUMN_ROWS; i++) {
        if (i >= n_rows) continue;
        vf score = vf_fma(bias, vf_set(query_sum[i * n_chunks]), scores[i]);
        scores[i] = vf_fma(_mm512_cvtepi32_ps(by_row[i]), vf_mul(scale, vf_set(step[i])), score);
    }
}

FKV_INLINE float *scores_at(const decode_score_job *j, score_step s) {
    return j->scores + (size_t)s.first * FKV_TILE_TOKENS + s.block * LANE_TOKENS;
}

/* Loads scores from memory, adds the dot products of a step with add_scores(), and stores the sums. */
FKV_INLINE void add_scores_in_memory(const decode_score_job *j, score_step s, const token_sums *sums, uint32_t n_rows) {
    __mmask16 later = s.chunk == 0 ? 0 : 0xffff;
    float *to = scores_at(j, s);
    vf scores[COLUMN_ROWS];
    for (uint32_t i = 0; i < n_rows; i++) scores[i] = _mm512_maskz_loadu_ps(later, to + i * FKV_TILE_TOKENS);
    add_scores(j, s, sums, n_rows, scores);
    for (uint32_t i = 0; i < n_rows; i++) vf_store(to + i * FKV_TILE_TOKENS, scores[i]);
}

static void add_scores_of_some_rows(const decode_score_job *j, score_step s, const token_sums *sums) {
    add_scores_in_memory(j, s, sums, j->n_rows - s.first);
}

/* ---- general shapes ---- */

/* State of the loop over the steps of a tile. `start` is the next step to start, and `now` is the next step to finish. */
typedef struct score_steps {
    score_step start;
    score_step now;
    uint32_t n_blocks;   /* number of blocks of 16 tokens */
    uint32_t row_blocks; /* number of blocks of 4 query rows */
    uint32_t shares;     /* number of prefetch shares (kernels.h) per block of 16 tokens */
    size_t dim;
    size_t query_bytes; /* size of the query operand of one step, in bytes */
} score_steps;

/* Advances to the next step. Chunks vary fastest, then blocks of query rows, then blocks of tokens. */
FKV_INLINE void next_score_step(const decode_score_job *j, score_step *s) {
    if (++s->chunk < j->n_chunks) return;
    s->chunk = 0;
    s->first += COLUMN_ROWS;
    if (s->first < j->n_rows) return;
    s->first = 0;
    s->block++;
}

/* Starts the matrix multiplication of the step s->start. `odd` (a compile-time constant) selects the accumulator tile. */
FKV_INLINE void start_score_step(bool odd, int bits, decode_score_job *j, score_steps *s) {
    score_step at = s->start;
    if (bits == 4 && at.chunk == 0 && at.first == 0) unpack_keys(j, at.block);
    _tile_loadd(QUERIES, j->queries.bytes + (at.chunk * s->row_blocks + at.first / COLUMN_ROWS) * s->query_bytes, 64);
    _tile_loadd(KEYS, key_bytes(bits, j, at.block) + at.chunk * j->chunk, s->dim);
    if (odd) {
        _tile_zero(SCORES_ODD);
        _tile_dpbusd(SCORES_ODD, KEYS, QUERIES);
    } else {
        _tile_zero(SCORES_EVEN);
        _tile_dpbusd(SCORES_EVEN, KEYS, QUERIES);
    }
    next_score_step(j, &s->start);
}

/* Finishes the step s->now: stores its dot products, starts the step s->start, which reuses the same accumulator tile, and
 * converts the stored dot products to scores. */
FKV_INLINE void finish_score_step(bool odd, int bits, decode_score_job *j, score_steps *s) {
    token_sums *sums = &j->sums[odd];
    if (odd)
        _tile_stored(SCORES_ODD, sums->at, 64);
    else
        _tile_stored(SCORES_EVEN, sums->at, 64);
    if (s->start.block < s->n_blocks) start_score_step(odd, bits, j, s);
    if (s->now.chunk == 0 && s->now.first == 0) fkv_fetch_some(j->t.next, s->shares);
    if (j->n_rows - s->now.first >= COLUMN_ROWS)
        add_scores_in_memory(j, s->now, sums, COLUMN_ROWS);
    else
        add_scores_of_some_rows(j, s->now, sums);
    next_score_step(j, &s->now);
}

FKV_INLINE void decode_score_steps(int bits, decode_score_job *j) {
    score_steps s = {.n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS), .row_blocks = fkv_ceil_div(j->n_rows, COLUMN_ROWS)};
    s.shares = FETCH_SCORES / s.n_blocks;
    s.dim = (size_t)j->t.n_units * 16;
    s.query_bytes = (size_t)j->chunk / 4 * 64;
    start_score_step(false, bits, j, &s);
    if (s.start.block < s.n_blocks) start_score_step(true, bits, j, &s);
    tile_lanes(&j->t, j->codec, j->part, j->n_tokens);
    while (s.now.block < s.n_blocks) {
        finish_score_step(false, bits, j, &s);
        if (s.now.block < s.n_blocks) finish_score_step(true, bits, j, &s);
    }
    decode_stay_awake();
}

/* ---- most common shape ---- */

/* Computes scores for four query rows and a head dimension of two chunks (64 values each). Even steps process the first chunk and
 * odd steps the second chunk, so that the queries stay in tile registers and the scores in vector registers. */
FKV_INLINE void start_pair_step(bool odd, int bits, const decode_score_job *j, uint32_t block) {
    _tile_loadd(KEYS, key_bytes(bits, j, block) + (odd ? 64 : 0), 128);
    if (odd) {
        _tile_zero(SCORES_ODD);
        _tile_dpbusd(SCORES_ODD, KEYS, QUERIES_ODD);
    } else {
        _tile_zero(SCORES_EVEN);
        _tile_dpbusd(SCORES_EVEN, KEYS, QUERIES);
    }
}

FKV_INLINE void end_pair_step(bool odd, int bits, decode_score_job *j, uint32_t block, uint32_t n_blocks,
                              vf scores[COLUMN_ROWS]) {
    token_sums *sums = &j->sums[odd];
    if (odd)
        _tile_stored(SCORES_ODD, sums->at, 64);
    else
        _tile_stored(SCORES_EVEN, sums->at, 64);
    if (block + 1 < n_blocks) start_pair_step(odd, bits, j, block + 1);
    if (odd) fkv_fetch_some(j->t.next, FETCH_SCORES / n_blocks);
    add_scores(j, (score_step){block, 0, odd}, sums, COLUMN_ROWS, scores);
}

FKV_INLINE void decode_score_pairs(int bits, decode_score_job *j) {
    uint32_t n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS);
    if (bits == 4) unpack_keys(j, 0);
    _tile_loadd(QUERIES, j->queries.bytes, 64);
    _tile_loadd(QUERIES_ODD, j->queries.bytes + FKV_TILE_HEIGHT * FKV_TILE_BYTES, 64);
    start_pair_step(false, bits, j, 0);
    start_pair_step(true, bits, j, 0);
    tile_lanes(&j->t, j->codec, j->part, j->n_tokens);
    for (uint32_t block = 0; block < n_blocks; block++) {
        vf scores[COLUMN_ROWS] = {vf_set(0.0f), vf_set(0.0f), vf_set(0.0f), vf_set(0.0f)};
        if (bits == 4 && block + 1 < n_blocks) unpack_keys(j, block + 1);
        end_pair_step(false, bits, j, block, n_blocks, scores);
        end_pair_step(true, bits, j, block, n_blocks, scores);
        float *to = scores_at(j, (score_step){block, 0, 0});
        for (int i = 0; i < COLUMN_ROWS; i++) vf_store(to + i * FKV_TILE_TOKENS, scores[i]);
    }
    decode_stay_awake();
}

static void decode_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                          const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    decode_score_job j;
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
        decode_score_pairs(8, &j);
    else if (codec->bits == 8)
        decode_score_steps(8, &j);
    else if (pairs)
        decode_score_pairs(4, &j);
    else
        decode_score_steps(4, &j);
    fkv_fetch_some(next, FETCH_BEFORE_SOFTMAX);
    if (*j.queries.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *j.queries.n_by_float, j.queries.by_float, scores);
}

#endif
