/* Sealed blocks and TurboQuant rows over AMX. Included by kernels_amx.c. Bits are those of the kernels over VNNI: sums are exact,
 * and what is done to them is the same.
 *
 * Pages are laid out for it: the codes of a page are the right matrix as they lie, but for their width, and the digits of queries
 * and the bytes of weights are the left one. Sums come out with tokens, or numbers, as lanes: nothing is transposed. Few rows
 * (decode) have all their digits in one matrix, four rows at a time; many rows (prefill) have one for each digit of 16 rows, and
 * the digits of the next 16 are made while the matrix unit works on these.
 *
 * Ladder: 32 q / 8 kv / 128 on 16384 tokens, one thread, K8/V4's time to this, by turns, processor time on a busy machine.
 *
 *   step                                                             decode    prefill of 128
 *   these kernels (8832 bytes a page and head to 13312)               1.29x             1.24x
 *   the same over VNNI                                                1.28x
 *
 * The same, two threads, K8/V4's time to this, by turns, wall time on a quiet machine; runs differ, for memory is shared.
 *
 *   keys laid out two blocks ahead of their products                  1.07x, 1.08x
 *   prefetch with the values' products too, less of it at once        1.06x to 1.18x in six runs, 1.15x in the middle
 */
#ifndef FKV_SEALED_AMX_H
#define FKV_SEALED_AMX_H

#include "few_rows_amx.h"
#include "turbo_vnni.h"

/* When few rows prefetch the next page, as FETCH_SCORES and those beside it: here most with the values' products, which take long
 * and load little. */
enum {
    SEALED_FETCH_DIGITS = 8,
    SEALED_FETCH_SCORES = 40,
    SEALED_FETCH_SOFTMAX = 12, /* before it, and after */
    SEALED_FETCH_WEIGHTS = 12, /* before them, and after */
    SEALED_FETCH_VALUES = 32
};

/* ---- scores of few rows ---- */

/* Tile registers, shaped by few_tiles_open(): two sets of sums, digits of even and of odd chunks. Values have those of
 * few_rows_amx.h; keys are in CODES. */
#define SEALED_EVEN 0
#define SEALED_ODD 1
#define SEALED_DIGITS 2
#define SEALED_MORE_DIGITS 3

/* Digits of four rows: row d * 4 + r is digit d of row r. */
typedef struct few_digits {
    alignas(64) int8_t at[MAX_CHUNKS][DIGITS * COLUMN_ROWS][CHUNK_NUMBERS];
} few_digits;

typedef struct few_sums {
    alignas(64) int32_t at[DIGITS * COLUMN_ROWS][16];
} few_sums;

/* The digits of a pair of chunks. */
FKV_INLINE void few_hold(uint32_t chunk, uint32_t n_chunks, digit_rows digits) {
    _tile_loadd(SEALED_DIGITS, digits.at + chunk * digits.chunk, digits.row);
    if (chunk + 1 < n_chunks) _tile_loadd(SEALED_MORE_DIGITS, digits.at + (chunk + 1) * digits.chunk, digits.row);
}

/* Starts the products of 16 tokens; codes of sealed keys are below 128. odd: a constant. Up to two chunks of digits are held
 * already. */
FKV_INLINE void few_start(bool odd, uint32_t n_chunks, digit_rows digits, const sealed_quads *keys) {
    if (odd)
        _tile_zero(SEALED_ODD);
    else
        _tile_zero(SEALED_EVEN);
    for (uint32_t chunk = 0; chunk < n_chunks; chunk += 2) {
        if (n_chunks > 2) few_hold(chunk, n_chunks, digits);
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

/* norms: of the 16 tokens; NULL: they have none. */
FKV_INLINE void few_score_rows(const few_sums *sums, const sealed_rows *rows, uint32_t row, uint32_t n, const float *norms,
                               float *scores) {
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        if (r >= n) continue;
        vf score = sealed_score(_mm512_load_si512(sums->at[r]), _mm512_load_si512(sums->at[COLUMN_ROWS + r]),
                                _mm512_load_si512(sums->at[2 * COLUMN_ROWS + r]), rows->step[row + r], rows->bias[row + r]);
        vf_store(scores + r * FKV_TILE_TOKENS, norms != NULL ? vf_mul(score, vf_load(norms)) : score);
    }
}

/* Blocks of 16 tokens against up to four rows. Codes are laid out while the products run, AHEAD blocks before theirs: a tile that
 * is loaded right behind the stores of its bytes waits for them. */
enum { AHEAD = 2 };

typedef struct few_sealed_job {
    const fkv_codec *codec;
    const uint8_t *const *part;
    fkv_fetch *next;
    uint32_t n_blocks;
    uint32_t n_chunks;
    const float *norms; /* of the tokens; NULL: sealed keys have none */
    sealed_page page;   /* of sealed keys */
    sealed_rows rows;
    few_digits digits;                                            /* of sealed keys: TurboQuant's are prepared */
    alignas(64) uint8_t keys[TILE_BLOCKS * sizeof(sealed_quads)]; /* few_keys() */
    few_sums sums[2];
} few_sealed_job;

/* Those of a block lie close behind each other, whatever the head dimension: a kilobyte for each 64 numbers, so that a tile's do
 * not meet in the same lines of L1. */
FKV_INLINE sealed_quads *few_keys(few_sealed_job *j, uint32_t block) {
    return (sealed_quads *)(void *)(j->keys + (size_t)block * j->n_chunks * sizeof(sealed_quads) / MAX_CHUNKS);
}

FKV_INLINE void few_keys_open(few_sealed_job *j, uint32_t block) {
    uint32_t token = block * FKV_SEALED_TOKENS;
    if (j->norms != NULL)
        turbo_keys_of(0, j->codec, j->part, token, few_keys(j, block));
    else
        sealed_quads_of(j->codec, &j->page, sealed_block(j->codec, j->part, token), few_keys(j, block));
}

static void few_digits_open(few_sealed_job *j, const float *q, uint32_t row, uint32_t n) {
    vf bias[COLUMN_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        bias[r] = vf_set(0.0f);
        if (r >= n) continue;
        if (row == 0) fkv_fetch_some(j->next, SEALED_FETCH_DIGITS / COLUMN_ROWS);
        bias[r] = sealed_digits(j->page.n_units, &j->page, q + (size_t)(row + r) * j->page.dim, j->rows.inverse[row + r],
                                j->digits.at[0][r], sizeof j->digits.at[0][0] * COLUMN_ROWS, sizeof j->digits.at[0]);
    }
    _mm_storeu_ps(j->rows.bias + row, _mm512_castps512_ps128(fold_rows(SUM, COLUMN_ROWS, bias)));
}

/* Rows [row, row + n) of a block of rows. */
typedef struct few_rows {
    uint32_t row;
    uint32_t n;
    digit_rows digits;
    float *scores;
} few_rows;

FKV_INLINE void few_sealed_step(bool odd, few_sealed_job *j, uint32_t block, few_rows at) {
    bool lay_out = at.row == 0;
    if (lay_out && block + AHEAD < j->n_blocks) few_keys_open(j, block + AHEAD);
    if (block + 1 < j->n_blocks) {
        fkv_tiles_see_stores();
        few_start(!odd, j->n_chunks, at.digits, few_keys(j, block + 1));
    }
    if (odd)
        _tile_stored(SEALED_ODD, j->sums[1].at, 64);
    else
        _tile_stored(SEALED_EVEN, j->sums[0].at, 64);
    fkv_tiles_see_stores();
    if (lay_out) fkv_fetch_some(j->next, SEALED_FETCH_SCORES / j->n_blocks);
    uint32_t token = block * FKV_SEALED_TOKENS;
    few_score_rows(&j->sums[odd], &j->rows, at.row, at.n, j->norms != NULL ? j->norms + token : NULL, at.scores + token);
}

static void few_score_tile(few_sealed_job *j, few_rows at) {
    uint32_t n_first = at.row == 0 ? fkv_min_u32(AHEAD, j->n_blocks) : 0;
    for (uint32_t block = 0; block < n_first; block++) few_keys_open(j, block);
    fkv_tiles_see_stores();
    few_hold(0, j->n_chunks, at.digits);
    few_start(false, j->n_chunks, at.digits, few_keys(j, 0));
    for (uint32_t block = 0; block < j->n_blocks; block += 2) {
        few_sealed_step(false, j, block, at);
        if (block + 1 < j->n_blocks) few_sealed_step(true, j, block + 1, at);
    }
}

static void few_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    few_sealed_job j;
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
        few_digits_open(&j, q, row, n);
        few_score_tile(&j, (few_rows){row, n, digits, scores + (size_t)row * FKV_TILE_TOKENS});
    }
    few_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_SOFTMAX);
    if (j.rows.by_float != 0) sealed_by_float(codec, part, n_tokens, q, 0, j.rows.by_float, scores);
}

static void few_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                             const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    few_sealed_job j;
    alignas(64) float norms[FKV_TILE_TOKENS];
    turbo_queries tq = turbo_queries_in(prepared, n_rows);
    size_t dim = codec->dim;
    j.codec = codec;
    j.part = part;
    j.next = next;
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    j.norms = norms;
    widen(codec->type, part[FKV_PART_SCALES], j.n_blocks * FKV_SEALED_TOKENS, norms);
    for (uint32_t row = 0; row < n_rows; row++) {
        j.rows.step[row] = tq.step[row];
        j.rows.bias[row] = 0.0f;
    }
    for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
        const digit_rows digits = {tq.digits + row * DIGITS * dim, dim, COLUMN_ROWS * dim, CHUNK_NUMBERS};
        few_score_tile(&j,
                       (few_rows){row, fkv_min_u32(COLUMN_ROWS, n_rows - row), digits, scores + (size_t)row * FKV_TILE_TOKENS});
    }
    few_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_SOFTMAX);
    if (*tq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *tq.n_by_float, tq.by_float, scores);
}

/* ---- values of few rows ---- */

typedef struct few_sealed_values_job {
    alignas(64) float step[BLOCK_ROWS];
    alignas(64) uint8_t bytes[2 * COLUMN_ROWS][FKV_TILE_TOKENS]; /* high ones of four rows, then low ones */
    alignas(64) int32_t sums[2][2 * COLUMN_ROWS][16];
} few_sealed_values_job;

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

FKV_INLINE void sealed_store_values(bool odd, few_sealed_values_job *j) {
    if (odd)
        _tile_stored(VALUES_HIGH, j->sums[1], 64);
    else
        _tile_stored(VALUES_WHOLE, j->sums[0], 64);
    fkv_tiles_see_stores();
}

FKV_INLINE void sealed_add_values(bool odd, const few_sealed_values_job *j, uint32_t unit, uint32_t n, size_t dim, float *out) {
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        if (r >= n) continue;
        __m512i sum =
            _mm512_add_epi32(times_256(_mm512_load_si512(j->sums[odd][r])), _mm512_load_si512(j->sums[odd][COLUMN_ROWS + r]));
        float *to = out + r * dim + unit * 16;
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(sum), vf_set(j->step[r]), vf_load(to)));
    }
}

FKV_INLINE void sealed_end_values(bool odd, few_sealed_values_job *j, const sealed_levels_tile *levels, uint32_t unit,
                                  uint32_t n_units, uint32_t n, size_t dim, float *out) {
    if (unit + 1 < n_units) sealed_start_values(!odd, levels, unit + 1);
    sealed_store_values(odd, j);
    sealed_add_values(odd, j, unit, n, dim, out);
}

static void few_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                            const float *p, uint32_t n_rows, float *out) {
    few_sealed_values_job j;
    sealed_norms norms;
    sealed_levels_tile levels;
    uint32_t n_units = codec->dim / 16;
    few_stay_awake();
    fkv_fetch_some(next, SEALED_FETCH_SOFTMAX);
    book_values_open(codec, part, n_tokens, &norms, &levels);
    few_stay_awake();
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
    few_stay_awake();
}

/* ---- scores of many rows ---- */

/* Digits of 16 rows. */
typedef struct many_digits {
    alignas(64) int8_t at[MAX_CHUNKS][DIGITS][BLOCK_ROWS][CHUNK_NUMBERS];
} many_digits;

typedef struct many_sealed_job {
    sealed_page page;  /* of sealed keys */
    uint32_t n_blocks; /* of 16 tokens */
    uint32_t n_chunks;
    const float *norms; /* as in few_sealed_job */
    sealed_quads keys[TILE_BLOCKS];
    sealed_rows rows[2]; /* at hand, and the next */
    many_digits digits[2];
    alignas(64) int32_t sums[2][DIGITS][BLOCK_ROWS][16];
} many_sealed_job;

/* Digits of rows [begin, end) of a block of rows. */
static void many_digits_open(const many_sealed_job *j, const float *q, uint32_t begin, uint32_t end, const sealed_rows *rows,
                             float *bias, many_digits *digits) {
    for (uint32_t r = begin; r < end; r++)
        bias[r] = vf_reduce_add(sealed_digits(j->page.n_units, &j->page, q + (size_t)r * j->page.dim, rows->inverse[r],
                                              digits->at[0][0][r], sizeof digits->at[0][0], sizeof digits->at[0]));
}

/* Tiles 0-2: sums of the digits, 3-5: the other set; 6: digits; 7: keys. set: a constant. */
FKV_INLINE void many_start(int set, uint32_t n_chunks, digit_rows digits, const sealed_quads *keys) {
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

FKV_INLINE void many_store(int set, many_sealed_job *j) {
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

/* What is left to do for a block of rows while its products run. */
typedef struct many_rows {
    uint32_t n; /* rows at hand */
    digit_rows digits;
    const float *step;
    const float *bias; /* NULL: none */
    float *scores;
    uint32_t n_next;        /* rows of the next block of sealed keys; 0: none */
    const float *q;         /* of the next */
    sealed_rows *next;      /* biases of them are made */
    many_digits *to_digits; /* and their digits */
} many_rows;

FKV_INLINE void many_score_rows(const many_sealed_job *j, int set, const many_rows *m, uint32_t token) {
    for (uint32_t r = 0; r < m->n; r++) {
        vf score = sealed_score(_mm512_load_si512(j->sums[set][0][r]), _mm512_load_si512(j->sums[set][1][r]),
                                _mm512_load_si512(j->sums[set][2][r]), m->step[r], m->bias != NULL ? m->bias[r] : 0.0f);
        if (j->norms != NULL) score = vf_mul(score, vf_load(j->norms + token));
        vf_store(m->scores + r * FKV_TILE_TOKENS + token, score);
    }
}

/* One step: the products of 16 tokens are under way in `set`. */
FKV_INLINE void many_step(int set, many_sealed_job *j, const many_rows *m, uint32_t block) {
    if (block + 1 < j->n_blocks) many_start(1 - set, j->n_chunks, m->digits, &j->keys[block + 1]);
    uint32_t begin = fkv_min_u32(block * 16 / j->n_blocks, m->n_next);
    uint32_t end = fkv_min_u32((block + 1) * 16 / j->n_blocks, m->n_next);
    if (begin < end) many_digits_open(j, m->q, begin, end, m->next, m->next->bias, m->to_digits);
    many_store(set, j);
    many_score_rows(j, set, m, block * FKV_SEALED_TOKENS);
}

static void many_score_tile(many_sealed_job *j, const many_rows *m) {
    fkv_tiles_see_stores();
    many_start(0, j->n_chunks, m->digits, &j->keys[0]);
    for (uint32_t block = 0; block < j->n_blocks; block += 2) {
        many_step(0, j, m, block);
        if (block + 1 < j->n_blocks) many_step(1, j, m, block + 1);
    }
}

static void many_tiles_open(void) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 8; i++) fkv_tile_shape(&shapes, i, BLOCK_ROWS, 64);
    fkv_tiles_open(&shapes);
}

static void many_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                               const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    many_sealed_job j;
    size_t dim = codec->dim;
    uint32_t n_row_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS);
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.norms = NULL;
    sealed_page_open(codec, part, &j.page);
    j.n_chunks = j.page.n_chunks;
    for (uint32_t block = 0; block < j.n_blocks; block++)
        sealed_quads_of(codec, &j.page, sealed_block(codec, part, block * FKV_SEALED_TOKENS), &j.keys[block]);
    many_tiles_open();
    sealed_rows_open(&j.page, prepared, n_rows, 0, &j.rows[0]);
    many_digits_open(&j, q, 0, fkv_min_u32(BLOCK_ROWS, n_rows), &j.rows[0], j.rows[0].bias, &j.digits[0]);
    uint32_t by_float[FKV_MAX_TILE_ROWS / BLOCK_ROWS + 1];
    for (uint32_t i = 0; i < n_row_blocks; i++) {
        uint32_t row = i * BLOCK_ROWS;
        uint32_t after = row + BLOCK_ROWS;
        const many_digits *digits = &j.digits[i % 2];
        many_rows m = {.n = fkv_min_u32(BLOCK_ROWS, n_rows - row), .step = j.rows[i % 2].step, .bias = j.rows[i % 2].bias};
        m.digits = (digit_rows){digits->at[0][0][0], CHUNK_NUMBERS, sizeof digits->at[0][0], sizeof digits->at[0]};
        m.scores = scores + (size_t)row * FKV_TILE_TOKENS;
        m.n_next = after < n_rows ? fkv_min_u32(BLOCK_ROWS, n_rows - after) : 0;
        m.q = q + after * dim;
        m.next = &j.rows[1 - i % 2];
        m.to_digits = &j.digits[1 - i % 2];
        if (m.n_next != 0) sealed_rows_open(&j.page, prepared, n_rows, after, m.next);
        by_float[i] = j.rows[i % 2].by_float;
        fkv_fetch_some(next, FKV_FETCH_SHARES / 2 / n_row_blocks + 1);
        many_score_tile(&j, &m);
    }
    fkv_tiles_close();
    for (uint32_t i = 0; i < n_row_blocks; i++)
        if (by_float[i] != 0) sealed_by_float(codec, part, n_tokens, q, i * BLOCK_ROWS, by_float[i], scores);
}

static void many_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    many_sealed_job j;
    alignas(64) float norms[FKV_TILE_TOKENS];
    turbo_queries tq = turbo_queries_in(prepared, n_rows);
    size_t dim = codec->dim;
    const digit_rows digits = {tq.digits, dim, n_rows * dim, CHUNK_NUMBERS};
    j.n_blocks = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS);
    j.n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    j.norms = norms;
    widen(codec->type, part[FKV_PART_SCALES], j.n_blocks * FKV_SEALED_TOKENS, norms);
    for (uint32_t block = 0; block < j.n_blocks; block++)
        turbo_keys_of(0, codec, part, block * FKV_SEALED_TOKENS, &j.keys[block]);
    many_tiles_open();
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        many_rows m = {.n = fkv_min_u32(BLOCK_ROWS, n_rows - row), .digits = digits_from(digits, row), .step = tq.step + row};
        m.scores = scores + (size_t)row * FKV_TILE_TOKENS;
        fkv_fetch_some(next, FKV_FETCH_SHARES / 2 / fkv_ceil_div(n_rows, BLOCK_ROWS) + 1);
        many_score_tile(&j, &m);
    }
    fkv_tiles_close();
    if (*tq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *tq.n_by_float, tq.by_float, scores);
}

/* ---- values of many rows ---- */

typedef struct many_sealed_values_job {
    sealed_norms norms;
    alignas(64) float step[2][BLOCK_ROWS];
    alignas(64) uint8_t bytes[2][2][BLOCK_ROWS][FKV_TILE_TOKENS]; /* of rows at hand and of the next: high and low */
    sealed_levels_tile levels;
    alignas(64) int32_t sums[2][2][BLOCK_ROWS][16];
} many_sealed_values_job;

/* Tiles 0, 1: sums over high and low bytes, 2, 3: the other set; 4, 5: those bytes; 6: levels. */
FKV_INLINE void many_start_values(int set, const many_sealed_values_job *j, uint32_t unit) {
    _tile_loadd(6, j->levels.at[unit], 64);
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

FKV_INLINE void many_end_values(int set, many_sealed_values_job *j, uint32_t unit, uint32_t n_units, uint32_t n,
                                const float *step, size_t dim, float *out) {
    if (unit + 1 < n_units) many_start_values(1 - set, j, unit + 1);
    if (set == 0) {
        _tile_stored(0, j->sums[0][0], 64);
        _tile_stored(1, j->sums[0][1], 64);
    } else {
        _tile_stored(2, j->sums[1][0], 64);
        _tile_stored(3, j->sums[1][1], 64);
    }
    fkv_tiles_see_stores();
    for (uint32_t r = 0; r < n; r++) {
        __m512i sum = _mm512_add_epi32(times_256(_mm512_load_si512(j->sums[set][0][r])), _mm512_load_si512(j->sums[set][1][r]));
        float *to = out + r * dim + unit * 16;
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(sum), vf_set(step[r]), vf_load(to)));
    }
}

static void many_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                             const float *p, uint32_t n_rows, float *out) {
    many_sealed_values_job j;
    uint32_t n_units = codec->dim / 16;
    uint32_t n_row_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS);
    book_values_open(codec, part, n_tokens, &j.norms, &j.levels);
    many_tiles_open();
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
        many_start_values(0, &j, 0);
        float *to = out + (size_t)row * codec->dim;
        for (uint32_t unit = 0; unit < n_units; unit += 2) {
            many_end_values(0, &j, unit, n_units, n, step, codec->dim, to);
            if (unit + 1 < n_units) many_end_values(1, &j, unit + 1, n_units, n, step, codec->dim, to);
        }
    }
    fkv_tiles_close();
}

/* ---- either ---- */

static void amx_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows <= FEW_ROWS)
        few_sealed_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
    else
        many_sealed_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
}

static void amx_turbo_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    turbo_prepare_blocks(codec, q, n_rows, n_rows <= FEW_ROWS ? COLUMN_ROWS : n_rows, prepared);
}

static void amx_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                             const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows <= FEW_ROWS)
        few_turbo_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
    else
        many_turbo_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
}

static void amx_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                            const float *p, uint32_t n_rows, float *out) {
    if (n_rows <= FEW_ROWS)
        few_book_values(codec, part, next, n_tokens, p, n_rows, out);
    else
        many_book_values(codec, part, next, n_tokens, p, n_rows, out);
}

#endif
