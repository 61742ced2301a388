/* AMX kernels for sealed blocks and TurboQuant rows. Included by kernels_amx.c. Results are bit-identical to those of the VNNI
 * kernels, because integer dot products are exact and the float operations are the same.
 *
 * The codes of a sealed page are stored in the layout of the right-hand matrix and only need to be widened to bytes. The
 * left-hand matrix holds query values, split into three base-256 digits (signed bytes), or weights, split into two bytes. The
 * columns of the result are tokens (scores) or channels (values), so the result need not be transposed. Decode places all three
 * digits of four query rows in one matrix. Prefill uses one matrix per digit for 16 rows, and the digits of the next 16 rows are
 * computed while the matrix unit works.
 */
#ifndef FKV_SEALED_AMX_H
#define FKV_SEALED_AMX_H

#include "decode_rows_amx.h"
#include "turbo_vnni.h"

/* Prefetch schedule for decode: the number of shares (1 / FKV_FETCH_SHARES of the next tile) that each phase prefetches. Most
 * prefetches are issued while the values are multiplied, because this phase takes long and issues few other loads. */
enum {
    SEALED_FETCH_DIGITS = 8,
    SEALED_FETCH_SCORES = 40,
    SEALED_FETCH_SOFTMAX = 12, /* number of shares prefetched before softmax, and again after softmax */
    SEALED_FETCH_WEIGHTS = 12, /* number of shares prefetched before the weights are quantized, and again afterwards */
    SEALED_FETCH_VALUES = 32
};

/* ---- decode: scores ---- */

/* AMX tiles, configured by decode_tiles_open(): two accumulators, and the base-256 digits of the queries for even and odd chunks.
 * Keys use the tile CODES, and values use the tiles of decode_rows_amx.h. */
#define SEALED_EVEN 0
#define SEALED_ODD 1
#define SEALED_DIGITS 2
#define SEALED_MORE_DIGITS 3

/* Base-256 digits (signed bytes) of four query rows: row d * 4 + r of the matrix holds digit d of query row r. */
typedef struct decode_digits {
    alignas(64) int8_t at[MAX_CHUNKS][DIGITS * COLUMN_ROWS][CHUNK_NUMBERS];
} decode_digits;

typedef struct decode_sums {
    alignas(64) int32_t at[DIGITS * COLUMN_ROWS][16];
} decode_sums;

/* Loads the base-256 digits of the queries for two consecutive chunks (64 values each) into AMX tiles. */
FKV_INLINE void decode_hold(uint32_t chunk, uint32_t n_chunks, digit_rows digits) {
    _tile_loadd(SEALED_DIGITS, digits.at + chunk * digits.chunk, digits.row);
    if (chunk + 1 < n_chunks) _tile_loadd(SEALED_MORE_DIGITS, digits.at + (chunk + 1) * digits.chunk, digits.row);
}

/* Starts to multiply the queries by 16 keys. The codes of sealed keys are below 128, so a signed multiplication is correct. `odd`
 * (a compile-time constant) selects the accumulator tile. If there are at most two chunks, the query digits must already be in
 * tiles. */
FKV_INLINE void decode_start(bool odd, uint32_t n_chunks, digit_rows digits, const sealed_quads *keys) {
    if (odd)
        _tile_zero(SEALED_ODD);
    else
        _tile_zero(SEALED_EVEN);
    for (uint32_t chunk = 0; chunk < n_chunks; chunk += 2) {
        if (n_chunks > 2) decode_hold(chunk, n_chunks, digits);
        _tile_loadd(CODES, keys->at[chunk], 64);
        if (odd)
            _tile_dpbssd(SEALED_ODD, SEALED_DIGITS, CODES);
        else
            _tile_dpbssd(SEALED_EVEN, SEALED_DIGITS, CODES);
        if (chunk + 1 == n_chunks) return;
        _tile_loadd(CODES, keys->at[chunk + 1], 64);
        if (odd)
            _tile_dpbssd(SEALED_ODD, SEALED_MORE_DIGITS, CODES);
        else
            _tile_dpbssd(SEALED_EVEN, SEALED_MORE_DIGITS, CODES);
    }
}

/* Converts the dot products of n query rows with 16 tokens to scores. `norms` holds the norms of the tokens, or is NULL for
 * sealed keys, which have no norms. */
FKV_INLINE void decode_score_rows(const decode_sums *sums, const sealed_rows *rows, uint32_t row, uint32_t n, const float *norms,
                                  float *scores) {
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        if (r >= n) continue;
        vf score = sealed_score(_mm512_load_si512(sums->at[r]), _mm512_load_si512(sums->at[COLUMN_ROWS + r]),
                                _mm512_load_si512(sums->at[2 * COLUMN_ROWS + r]), rows->step[row + r], rows->bias[row + r]);
        vf_store(scores + r * FKV_TILE_TOKENS, norms != NULL ? vf_mul(score, vf_load(norms)) : score);
    }
}

/* Number of blocks of 16 tokens by which unpacking runs ahead of the matrix multiplications. If a tile were loaded immediately
 * after its bytes are stored, the load would wait for the stores. */
enum { AHEAD = 2 };

typedef struct decode_sealed_job {
    const fkv_codec *codec;
    const uint8_t *const *part;
    fkv_fetch *next;
    uint32_t n_blocks;
    uint32_t n_chunks;
    const float *norms; /* norms of the tokens; NULL for sealed keys, which have no norms */
    sealed_page page;   /* sealed keys only */
    sealed_rows rows;
    decode_digits digits; /* query digits for sealed keys; not used for TurboQuant keys, whose digits prepare() computes */
    alignas(64) uint8_t keys[TILE_BLOCKS * sizeof(sealed_quads)]; /* see decode_keys() */
    decode_sums sums[2];
} decode_sealed_job;

/* Returns the buffer for the unpacked keys of one block of 16 tokens. The buffers are packed densely, 1 KiB per 64 values of the
 * head dimension, so that the blocks of a tile do not compete for the same L1 sets. */
FKV_INLINE sealed_quads *decode_keys(decode_sealed_job *j, uint32_t block) {
    return (sealed_quads *)(void *)(j->keys + (size_t)block * j->n_chunks * sizeof(sealed_quads) / MAX_CHUNKS);
}

FKV_INLINE void decode_keys_open(decode_sealed_job *j, uint32_t block) {
    uint32_t token = block * FKV_SEALED_TOKENS;
    if (j->norms != NULL)
        turbo_keys_of(0, j->codec, j->part, token, decode_keys(j, block));
    else
        sealed_quads_of(j->codec, &j->page, sealed_block(j->codec, j->part, token), decode_keys(j, block));
}

static void decode_digits_open(decode_sealed_job *j, const float *q, uint32_t row, uint32_t n) {
    vf bias[COLUMN_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        bias[r] = vf_set(0.0f);
        if (r >= n) continue;
        if (row == 0) fkv_fetch_some(j->next, SEALED_FETCH_DIGITS / COLUMN_ROWS);
        bias[r] = sealed_digits(j->page.n_units, &j->page, q + (size_t)(row + r) * j->page.dim, j->rows.inverse[row + r],
                                j->digits.at[0][r], sizeof j->digits.at[0][0] * COLUMN_ROWS, sizeof j->digits.at[0]);
    }
    _mm_storeu_ps(j->rows.bias + row, _mm512_castps512_ps128(fold_rows(FOLD_SUM, COLUMN_ROWS, bias)));
}

/* A group of n query rows, starting at `row`, with their digits and scores. */
typedef struct decode_rows {
    uint32_t row;
    uint32_t n;
    digit_rows digits;
    float *scores;
} decode_rows;

FKV_INLINE void decode_sealed_step(bool odd, decode_sealed_job *j, uint32_t block, decode_rows at) {
    bool lay_out = at.row == 0;
    if (lay_out && block + AHEAD < j->n_blocks) decode_keys_open(j, block + AHEAD);
    if (block + 1 < j->n_blocks) {
        fkv_tiles_see_stores();
        decode_start(!odd, j->n_chunks, at.digits, decode_keys(j, block + 1));
    }
    if (odd)
        _tile_stored(SEALED_ODD, j->sums[1].at, 64);
    else
        _tile_stored(SEALED_EVEN, j->sums[0].at, 64);
    fkv_tiles_see_stores();
    if (lay_out) fkv_fetch_some(j->next, SEALED_FETCH_SCORES / j->n_blocks);
    uint32_t token = block * FKV_SEALED_TOKENS;
    decode_score_rows(&j->sums[odd], &j->rows, at.row, at.n, j->norms != NULL ? j->norms + token : NULL, at.scores + token);
}

static void decode_score_tile(decode_sealed_job *j, decode_rows at) {
    uint32_t n_first = at.row == 0 ? fkv_min_u32(AHEAD, j->n_blocks) : 0;
    for (uint32_t block = 0; block < n_first; block++) decode_keys_open(j, block);
    fkv_tiles_see_stores();
    decode_hold(0, j->n_chunks, at.digits);
    decode_start(false, j->n_chunks, at.digits, decode_keys(j, 0));
    for (uint32_t block = 0; block < j->n_blocks; block += 2) {
        decode_sealed_step(false, j, block, at);
        if (block + 1 < j->n_blocks) decode_sealed_step(true, j, block + 1, at);
    }
}

static void decode_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                                 uint32_t n_tokens, const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    decode_sealed_job j;
    j.codec = codec;
    j.part = part;
    j.next = next;
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.norms = NULL;
    sealed_page_open(codec, part, &j.page);
    j.n_chunks = j.page.n_chunks;
    sealed_rows_open(&j.page, prepared, n_rows, 0, &j.rows);
    const digit_rows digits = {j.digits.at[0][0], CHUNK_NUMBERS, COLUMN_ROWS * CHUNK_NUMBERS, sizeof j.digits.at[0]};
    for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
        uint32_t n = fkv_min_u32(COLUMN_ROWS, n_rows - row);
        decode_digits_open(&j, q, row, n);
        decode_score_tile(&j, (decode_rows){row, n, digits, scores + (size_t)row * FKV_TILE_TOKENS});
    }
    decode_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_SOFTMAX);
    if (j.rows.by_float != 0) sealed_by_float(codec, part, n_tokens, q, 0, j.rows.by_float, scores);
}

static void decode_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                                uint32_t n_tokens, const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    decode_sealed_job j;
    alignas(64) float norms[FKV_TILE_TOKENS];
    turbo_queries tq = turbo_queries_in(prepared, n_rows);
    size_t dim = codec->dim;
    j.codec = codec;
    j.part = part;
    j.next = next;
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    j.norms = norms;
    widen_halves(codec->type, part[FKV_PART_SCALES], j.n_blocks * FKV_SEALED_TOKENS, norms);
    for (uint32_t row = 0; row < n_rows; row++) {
        j.rows.step[row] = tq.step[row];
        j.rows.bias[row] = 0.0f;
    }
    for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
        const digit_rows digits = {tq.digits + row * DIGITS * dim, dim, COLUMN_ROWS * dim, CHUNK_NUMBERS};
        decode_score_tile(
            &j, (decode_rows){row, fkv_min_u32(COLUMN_ROWS, n_rows - row), digits, scores + (size_t)row * FKV_TILE_TOKENS});
    }
    decode_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_SOFTMAX);
    if (*tq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *tq.n_by_float, tq.by_float, scores);
}

/* ---- decode: values ---- */

typedef struct decode_sealed_values_job {
    alignas(64) float step[BLOCK_ROWS];
    alignas(64) uint8_t bytes[2 * COLUMN_ROWS][FKV_TILE_TOKENS]; /* high weight bytes of four rows, then their low weight bytes */
    alignas(64) int32_t sums[2][2 * COLUMN_ROWS][16];
} decode_sealed_values_job;

FKV_INLINE void sealed_start_values(bool odd, const sealed_levels_tile *levels, uint32_t unit) {
    _tile_loadd(CODES, levels->at[unit], 64);
    if (odd) {
        _tile_zero(VALUES_HIGH);
        _tile_dpbusd(VALUES_HIGH, WEIGHTS, CODES);
    } else {
        _tile_zero(VALUES_WHOLE);
        _tile_dpbusd(VALUES_WHOLE, WEIGHTS, CODES);
    }
}

FKV_INLINE void sealed_store_values(bool odd, decode_sealed_values_job *j) {
    if (odd)
        _tile_stored(VALUES_HIGH, j->sums[1], 64);
    else
        _tile_stored(VALUES_WHOLE, j->sums[0], 64);
    fkv_tiles_see_stores();
}

FKV_INLINE void sealed_add_values(bool odd, const decode_sealed_values_job *j, uint32_t unit, uint32_t n, size_t dim,
                                  float *out) {
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        if (r >= n) continue;
        __m512i sum =
            _mm512_add_epi32(times_256(_mm512_load_si512(j->sums[odd][r])), _mm512_load_si512(j->sums[odd][COLUMN_ROWS + r]));
        float *to = out + r * dim + unit * 16;
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(sum), vf_set(j->step[r]), vf_load(to)));
    }
}

FKV_INLINE void sealed_end_values(bool odd, decode_sealed_values_job *j, const sealed_levels_tile *levels, uint32_t unit,
                                  uint32_t n_units, uint32_t n, size_t dim, float *out) {
    if (unit + 1 < n_units) sealed_start_values(!odd, levels, unit + 1);
    sealed_store_values(odd, j);
    sealed_add_values(odd, j, unit, n, dim, out);
}

static void decode_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                               const float *p, uint32_t n_rows, float *out) {
    decode_sealed_values_job j;
    sealed_norms norms;
    sealed_levels_tile levels;
    uint32_t n_units = codec->dim / 16;
    decode_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_SOFTMAX);
    book_values_open(codec, part, n_tokens, &norms, &levels);
    decode_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_WEIGHTS);
    for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
        uint32_t n = fkv_min_u32(COLUMN_ROWS, n_rows - row);
        sealed_weigh(COLUMN_ROWS, &norms, p + (size_t)row * FKV_TILE_TOKENS, n_tokens, n, j.bytes[0], sizeof j.bytes / 2, j.step);
        fkv_tiles_see_stores();
        if (row == 0) fkv_fetch_some(next, SEALED_FETCH_WEIGHTS);
        _tile_loadd(WEIGHTS, j.bytes, 64);
        sealed_start_values(false, &levels, 0);
        float *to = out + (size_t)row * codec->dim;
        for (uint32_t unit = 0; unit < n_units; unit += 2) {
            if (row == 0) fkv_fetch_some(next, (SEALED_FETCH_VALUES * 2 + n_units - 1) / n_units);
            sealed_end_values(false, &j, &levels, unit, n_units, n, codec->dim, to);
            if (unit + 1 < n_units) sealed_end_values(true, &j, &levels, unit + 1, n_units, n, codec->dim, to);
        }
    }
    decode_stay_awake();
}

/* ---- prefill: scores ---- */

/* Base-256 digits of 16 query rows. */
typedef struct prefill_digits {
    alignas(64) int8_t at[MAX_CHUNKS][DIGITS][BLOCK_ROWS][CHUNK_NUMBERS];
} prefill_digits;

typedef struct prefill_sealed_job {
    sealed_page page;  /* sealed keys only */
    uint32_t n_blocks; /* number of blocks of 16 tokens */
    uint32_t n_chunks;
    const float *norms; /* norms of the tokens; NULL for sealed keys, which have no norms */
    sealed_quads keys[TILE_BLOCKS];
    sealed_rows rows[2]; /* quantization state of the current and of the next block of query rows */
    prefill_digits digits[2];
    alignas(64) int32_t sums[2][DIGITS][BLOCK_ROWS][16];
} prefill_sealed_job;

/* Splits the queries in rows [begin, end) of a block of query rows into base-256 digits (signed bytes). */
static void prefill_digits_open(const prefill_sealed_job *j, const float *q, uint32_t begin, uint32_t end,
                                const sealed_rows *rows, float *bias, prefill_digits *digits) {
    for (uint32_t r = begin; r < end; r++)
        bias[r] = vf_reduce_add(sealed_digits(j->page.n_units, &j->page, q + (size_t)r * j->page.dim, rows->inverse[r],
                                              digits->at[0][0][r], sizeof digits->at[0][0], sizeof digits->at[0]));
}

/* Starts to multiply the queries by 16 keys. Tiles 0-2 accumulate the products with the high, middle and low digits, and tiles
 * 3-5 are a second set of accumulators. Tile 6 holds query digits, and tile 7 holds keys. `set` (0 or 1, a compile-time constant)
 * selects the accumulators. */
FKV_INLINE void prefill_start(int set, uint32_t n_chunks, digit_rows digits, const sealed_quads *keys) {
    if (set == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
    } else {
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
    }
    for (uint32_t chunk = 0; chunk < n_chunks; chunk++, digits.at += digits.chunk) {
        _tile_loadd(7, keys->at[chunk], 64);
        _tile_loadd(6, digits.at, digits.row);
        if (set == 0)
            _tile_dpbssd(0, 6, 7);
        else
            _tile_dpbssd(3, 6, 7);
        _tile_loadd(6, digits.at + digits.digit, digits.row);
        if (set == 0)
            _tile_dpbssd(1, 6, 7);
        else
            _tile_dpbssd(4, 6, 7);
        _tile_loadd(6, digits.at + 2 * digits.digit, digits.row);
        if (set == 0)
            _tile_dpbssd(2, 6, 7);
        else
            _tile_dpbssd(5, 6, 7);
    }
}

FKV_INLINE void prefill_store(int set, prefill_sealed_job *j) {
    if (set == 0) {
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

/* Vector work that runs in parallel with the matrix multiplications of a block of query rows: converting dot products to scores,
 * and quantizing the queries of the next block. */
typedef struct prefill_rows {
    uint32_t n; /* number of rows in the current block */
    digit_rows digits;
    const float *step;
    const float *bias; /* NULL if the keys have no bias */
    float *scores;
    uint32_t n_next;           /* number of rows in the next block; 0 if there is no next block */
    const float *q;            /* queries of the next block */
    sealed_rows *next;         /* receives the quantization state of the next block of rows */
    prefill_digits *to_digits; /* receives the base-256 digits of the next block's queries */
} prefill_rows;

FKV_INLINE void prefill_score_rows(const prefill_sealed_job *j, int set, const prefill_rows *m, uint32_t token) {
    for (uint32_t r = 0; r < m->n; r++) {
        vf score = sealed_score(_mm512_load_si512(j->sums[set][0][r]), _mm512_load_si512(j->sums[set][1][r]),
                                _mm512_load_si512(j->sums[set][2][r]), m->step[r], m->bias != NULL ? m->bias[r] : 0.0f);
        if (j->norms != NULL) score = vf_mul(score, vf_load(j->norms + token));
        vf_store(m->scores + r * FKV_TILE_TOKENS + token, score);
    }
}

/* Converts the dot products of 16 tokens (in tile set `set`) to scores and quantizes some queries of the next block of rows,
 * while the matrix multiplications of the next 16 tokens run. */
FKV_INLINE void prefill_step(int set, prefill_sealed_job *j, const prefill_rows *m, uint32_t block) {
    if (block + 1 < j->n_blocks) prefill_start(1 - set, j->n_chunks, m->digits, &j->keys[block + 1]);
    uint32_t begin = fkv_min_u32(block * 16 / j->n_blocks, m->n_next);
    uint32_t end = fkv_min_u32((block + 1) * 16 / j->n_blocks, m->n_next);
    if (begin < end) prefill_digits_open(j, m->q, begin, end, m->next, m->next->bias, m->to_digits);
    prefill_store(set, j);
    prefill_score_rows(j, set, m, block * FKV_SEALED_TOKENS);
}

static void prefill_score_tile(prefill_sealed_job *j, const prefill_rows *m) {
    fkv_tiles_see_stores();
    prefill_start(0, j->n_chunks, m->digits, &j->keys[0]);
    for (uint32_t block = 0; block < j->n_blocks; block += 2) {
        prefill_step(0, j, m, block);
        if (block + 1 < j->n_blocks) prefill_step(1, j, m, block + 1);
    }
}

static void prefill_tiles_open(void) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 8; i++) fkv_tile_shape(&shapes, i, BLOCK_ROWS, 64);
    fkv_tiles_open(&shapes);
}

static void prefill_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                                  uint32_t n_tokens, const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    prefill_sealed_job j;
    size_t dim = codec->dim;
    uint32_t n_row_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS);
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.norms = NULL;
    sealed_page_open(codec, part, &j.page);
    j.n_chunks = j.page.n_chunks;
    for (uint32_t block = 0; block < j.n_blocks; block++)
        sealed_quads_of(codec, &j.page, sealed_block(codec, part, block * FKV_SEALED_TOKENS), &j.keys[block]);
    prefill_tiles_open();
    sealed_rows_open(&j.page, prepared, n_rows, 0, &j.rows[0]);
    prefill_digits_open(&j, q, 0, fkv_min_u32(BLOCK_ROWS, n_rows), &j.rows[0], j.rows[0].bias, &j.digits[0]);
    uint32_t by_float[FKV_MAX_TILE_ROWS / BLOCK_ROWS + 1];
    for (uint32_t i = 0; i < n_row_blocks; i++) {
        uint32_t row = i * BLOCK_ROWS;
        uint32_t after = row + BLOCK_ROWS;
        const prefill_digits *digits = &j.digits[i % 2];
        prefill_rows m = {.n = fkv_min_u32(BLOCK_ROWS, n_rows - row), .step = j.rows[i % 2].step, .bias = j.rows[i % 2].bias};
        m.digits = (digit_rows){digits->at[0][0][0], CHUNK_NUMBERS, sizeof digits->at[0][0], sizeof digits->at[0]};
        m.scores = scores + (size_t)row * FKV_TILE_TOKENS;
        m.n_next = after < n_rows ? fkv_min_u32(BLOCK_ROWS, n_rows - after) : 0;
        m.q = q + after * dim;
        m.next = &j.rows[1 - i % 2];
        m.to_digits = &j.digits[1 - i % 2];
        if (m.n_next != 0) sealed_rows_open(&j.page, prepared, n_rows, after, m.next);
        by_float[i] = j.rows[i % 2].by_float;
        fkv_fetch_some(next, FKV_FETCH_SHARES / 2 / n_row_blocks + 1);
        prefill_score_tile(&j, &m);
    }
    fkv_tiles_close();
    for (uint32_t i = 0; i < n_row_blocks; i++)
        if (by_float[i] != 0) sealed_by_float(codec, part, n_tokens, q, i * BLOCK_ROWS, by_float[i], scores);
}

static void prefill_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                                 uint32_t n_tokens, const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    prefill_sealed_job j;
    alignas(64) float norms[FKV_TILE_TOKENS];
    turbo_queries tq = turbo_queries_in(prepared, n_rows);
    size_t dim = codec->dim;
    const digit_rows digits = {tq.digits, dim, n_rows * dim, CHUNK_NUMBERS};
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    j.norms = norms;
    widen_halves(codec->type, part[FKV_PART_SCALES], j.n_blocks * FKV_SEALED_TOKENS, norms);
    for (uint32_t block = 0; block < j.n_blocks; block++)
        turbo_keys_of(0, codec, part, block * FKV_SEALED_TOKENS, &j.keys[block]);
    prefill_tiles_open();
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        prefill_rows m = {.n = fkv_min_u32(BLOCK_ROWS, n_rows - row), .digits = digits_from(digits, row), .step = tq.step + row};
        m.scores = scores + (size_t)row * FKV_TILE_TOKENS;
        fkv_fetch_some(next, FKV_FETCH_SHARES / 2 / fkv_ceil_div(n_rows, BLOCK_ROWS) + 1);
        prefill_score_tile(&j, &m);
    }
    fkv_tiles_close();
    if (*tq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *tq.n_by_float, tq.by_float, scores);
}

/* ---- prefill: values ---- */

typedef struct prefill_sealed_values_job {
    sealed_norms norms;
    alignas(64) float step[2][BLOCK_ROWS];
    alignas(64) uint8_t
        bytes[2][2][BLOCK_ROWS][FKV_TILE_TOKENS]; /* high and low weight bytes, for the current and the next block of rows */
    sealed_levels_tile levels;
    alignas(64) int32_t sums[2][2][BLOCK_ROWS][16];
} prefill_sealed_values_job;

/* Starts to multiply the weights by the values of one unit (16 channels). Tiles 0 and 1 accumulate the products with the high and
 * low weight bytes, and tiles 2 and 3 are a second set of accumulators. Tiles 4 and 5 hold the weight bytes, and tile 6 holds
 * codebook levels. */
FKV_INLINE void prefill_start_values(int set, const sealed_levels_tile *levels, uint32_t unit) {
    _tile_loadd(6, levels->at[unit], 64);
    if (set == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
    } else {
        _tile_zero(2);
        _tile_zero(3);
        _tile_dpbusd(2, 4, 6);
        _tile_dpbusd(3, 5, 6);
    }
}

/* Starts the matrix multiplications of the next unit, and adds the products of this unit to the outputs of n rows. sums: buffer
 * for the products with the high and low weight bytes. step: [n] quantization steps of the weights. */
FKV_INLINE void prefill_end_values(int set, const sealed_levels_tile *levels, int32_t (*sums)[BLOCK_ROWS][16], uint32_t unit,
                                   uint32_t n, const float *step, uint32_t dim, float *out) {
    if (unit + 1 < dim / 16) prefill_start_values(1 - set, levels, unit + 1);
    if (set == 0) {
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
    } else {
        _tile_stored(2, sums[0], 64);
        _tile_stored(3, sums[1], 64);
    }
    fkv_tiles_see_stores();
    for (uint32_t r = 0; r < n; r++) {
        __m512i sum = _mm512_add_epi32(times_256(_mm512_load_si512(sums[0][r])), _mm512_load_si512(sums[1][r]));
        float *to = out + (size_t)r * dim + unit * 16;
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(sum), vf_set(step[r]), vf_load(to)));
    }
}

static void prefill_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                                uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {
    prefill_sealed_values_job j;
    uint32_t n_units = codec->dim / 16;
    uint32_t n_row_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS);
    book_values_open(codec, part, n_tokens, &j.norms, &j.levels);
    prefill_tiles_open();
    for (uint32_t i = 0; i < n_row_blocks; i++) {
        uint32_t row = i * BLOCK_ROWS;
        uint32_t n = fkv_min_u32(BLOCK_ROWS, n_rows - row);
        uint8_t(*bytes)[BLOCK_ROWS][FKV_TILE_TOKENS] = j.bytes[i % 2];
        float *step = j.step[i % 2];
        fkv_fetch_some(next, FKV_FETCH_SHARES / 2 / n_row_blocks + 1);
        sealed_weigh(BLOCK_ROWS, &j.norms, p + (size_t)row * FKV_TILE_TOKENS, n_tokens, n, bytes[0][0], sizeof bytes[0], step);
        fkv_tiles_see_stores();
        _tile_loadd(4, bytes[0], 64);
        _tile_loadd(5, bytes[1], 64);
        prefill_start_values(0, &j.levels, 0);
        float *to = out + (size_t)row * codec->dim;
        for (uint32_t unit = 0; unit < n_units; unit += 2) {
            prefill_end_values(0, &j.levels, j.sums[0], unit, n, step, codec->dim, to);
            if (unit + 1 < n_units) prefill_end_values(1, &j.levels, j.sums[1], unit + 1, n, step, codec->dim, to);
        }
    }
    fkv_tiles_close();
}

/* ---- dispatch by number of rows ---- */

static void amx_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows <= DECODE_ROWS)
        decode_sealed_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
    else
        prefill_sealed_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
}

static void amx_turbo_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    turbo_prepare_blocks(codec, q, n_rows, n_rows <= DECODE_ROWS ? COLUMN_ROWS : n_rows, prepared);
}

static void amx_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                             const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows <= DECODE_ROWS)
        decode_turbo_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
    else
        prefill_turbo_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
}

static void amx_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                            const float *p, uint32_t n_rows, float *out) {
    if (n_rows <= DECODE_ROWS)
        decode_book_values(codec, part, next, n_tokens, p, n_rows, out);
    else
        prefill_book_values(codec, part, next, n_tokens, p, n_rows, out);
}

#endif
