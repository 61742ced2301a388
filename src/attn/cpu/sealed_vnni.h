/* What the integer kernels of sealed blocks share, AVX-512 with VNNI and AMX: queries and weights as bytes, codes as bytes. The
 * products are in kernels_avx512vnni.c and sealed_amx.h, and serve TurboQuant rows too (turbo_vnni.h).
 *
 * Scores: the scales of a page go into each query, once: x_c = q_c * scale_c, rounded to 23 bits in three signed bytes of 8, 8
 * and 7, with a step from a bound of the largest: over units of 16 channels, the largest |q| times the largest scale. Then
 * score = step * (sum of x_c * code_tc) + (sum of q_c * bias_c), and the sum over codes is exact, in any order. An error of x
 * meets codes of at most 15, so that a score is off by about bound / 2^17: rows with a bound above MOST_BOUND are the float
 * kernel's, and so are those whose step would be no float. Calibrated keys have codes of at most 63: a quarter of that bound.
 *
 * Values: weights p * norm are never negative: 16 bits in two unsigned bytes, which meet the signed levels of the book. A row has
 * one norm and no bias: nothing is left to add. out += step * sum.
 */
#ifndef FKV_SEALED_VNNI_H
#define FKV_SEALED_VNNI_H

#include "rows16_avx512.h"

enum {
    DIGITS = 3,         /* bytes of a query: high, middle, low */
    CHUNK_NUMBERS = 64, /* of the head dimension: quads fill a register, and the rows of a matrix tile */
    CHUNK_QUADS = CHUNK_NUMBERS / 4,
    MAX_CHUNKS = FKV_MAX_HEAD_DIM / CHUNK_NUMBERS
};

static const float MOST_BOUND = 32.0f;
static const float MOST_STEPS = 4161000.0f; /* the three bytes reach a little further: 63.5 * 65536 */
static const float MOST_WEIGHT = 65280.0f;
static const float SEALED_UNIT = 0x1p-7f; /* a value is norm * level / 128 */

/* ---- a page of keys ---- */

typedef struct sealed_page {
    alignas(64) float scales[FKV_MAX_HEAD_DIM];
    alignas(64) float biases[FKV_MAX_HEAD_DIM];
    uint32_t dim;
    uint32_t n_units;
    uint32_t n_chunks;
    float most_bound;
    float most[FKV_MAX_HEAD_DIM / 16]; /* of each unit the largest scale, without signs; NaN where one is */
} sealed_page;

/* The largest size of 16 numbers. Bits of sizes are in order, NaN behind all. */
FKV_INLINE float largest_size(__m512i sizes) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)_mm512_reduce_max_epu32(sizes))));
}

FKV_INLINE __m512i sizes_of(vf x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

static void sealed_page_open(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], sealed_page *page) {
    page->dim = codec->dim;
    page->n_units = codec->dim / 16;
    page->most_bound = codec->channels != NULL ? MOST_BOUND / 4 : MOST_BOUND;
    page->n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    widen(codec->type, part[FKV_PART_SCALES], codec->dim, page->scales);
    widen(codec->type, part[FKV_PART_BIASES], codec->dim, page->biases);
    for (uint32_t first = 0; first < page->n_units; first += 8) {
        vf sizes[8];
        FKV_UNROLL
        for (uint32_t u = 0; u < 8; u++) /* behind the last unit: the room of scales, not read */
            sizes[u] = _mm512_castsi512_ps(sizes_of(vf_load(page->scales + (first + u) * 16)));
        _mm256_storeu_ps(page->most + first, _mm512_castps512_ps256(fold_rows(WHOLE_LARGER, 8, sizes)));
    }
}

/* ---- queries ---- */

/* prepared: [units, rows in blocks of 16], of each unit of a row the largest size. */
static void sealed_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    float *most = prepared;
    uint32_t width = (uint32_t)fkv_align_up(n_rows, BLOCK_ROWS);
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++)
        for (uint32_t r = 0; r < width; r++)
            most[unit * width + r] = r < n_rows ? largest_size(sizes_of(vf_load(q + (size_t)r * codec->dim + unit * 16))) : 0.0f;
}

/* Up to 16 rows of queries on a page. */
typedef struct sealed_rows {
    alignas(64) float step[BLOCK_ROWS];
    alignas(64) float inverse[BLOCK_ROWS];
    alignas(64) float bias[BLOCK_ROWS]; /* sum of q * bias */
    uint32_t by_float;                  /* bit r: floats serve row r */
} sealed_rows;

/* Steps of rows [row, row + 16). */
FKV_INLINE void sealed_rows_open(const sealed_page *page, const void *prepared, uint32_t n_rows, uint32_t row,
                                 sealed_rows *rows) {
    const float *most = (const float *)prepared + row;
    size_t width = fkv_align_up(n_rows, BLOCK_ROWS);
    vf bound = vf_set(0.0f);
    __mmask16 good = 0xffff;
    for (uint32_t unit = 0; unit < page->n_units; unit++) {
        vf product = vf_mul(vf_load(most + unit * width), vf_set(page->most[unit]));
        good &= _mm512_cmp_ps_mask(product, vf_set(page->most_bound), _CMP_LE_OQ);
        bound = vf_max(bound, product);
    }
    __mmask16 none = _mm512_cmp_ps_mask(bound, vf_set(0.0f), _CMP_EQ_OQ);
    good &= none | _mm512_cmp_ps_mask(bound, vf_set(SMALLEST), _CMP_GT_OQ);
    vf_store(rows->step, vf_div(bound, vf_set(MOST_STEPS)));
    vf_store(rows->inverse, _mm512_maskz_div_ps(good & ~none, vf_set(MOST_STEPS), bound));
    uint32_t there = n_rows - row >= BLOCK_ROWS ? 0xffff : (1u << (n_rows - row)) - 1;
    rows->by_float = ~(uint32_t)good & there;
}

/* Digits of rows as they lie: bytes from row to row, from digit to digit (high, middle, low) and from chunk to chunk, 64 of each.
 * Behind the last number of a row anything may lie: keys are 0 there. */
typedef struct digit_rows {
    const int8_t *at;
    size_t row;
    size_t digit;
    size_t chunk;
} digit_rows;

FKV_INLINE digit_rows digits_from(digit_rows digits, uint32_t row) {
    digits.at += row * digits.row;
    return digits;
}

/* x / step as digits, the lowest in the lowest byte. 2^23 + 2^22 + 0x8080 added to x in a fused product rounds it and leaves its
 * digits in the bytes of the float, but for what psubb takes away. */
FKV_INLINE __m512i digits_of(vf x, vf inverse) {
    return _mm512_sub_epi8(_mm512_castps_si512(vf_fma(x, inverse, vf_set(12615808.0f))), _mm512_set1_epi32(0x00408080));
}

/* One row as digits: `digit` bytes apart, and `chunk` bytes from chunk to chunk, 64 of each: quad q of unit u of a chunk at dword
 * 4 q + u, where transposing leaves it. Returns the lanes of the sum of q * bias. */
FKV_INLINE vf sealed_digits(uint32_t n_units, const sealed_page *page, const float *q, float inverse, int8_t *to, size_t digit,
                            size_t chunk) {
    const vf scale = vf_set(inverse);
    const __m512i planes = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    vf bias = vf_set(0.0f);
    for (uint32_t first = 0; first < n_units; first += 4, to += chunk) {
        __m512i a[4];
        __m512i plane[4];
        FKV_UNROLL
        for (uint32_t u = 0; u < 4; u++) {
            a[u] = _mm512_setzero_si512();
            if (first + u >= n_units) continue;
            uint32_t at = (first + u) * 16;
            vf x = vf_load(q + at);
            bias = vf_fma(x, vf_load(page->biases + at), bias);
            a[u] = _mm512_shuffle_epi8(digits_of(vf_mul(x, vf_load(page->scales + at)), scale), planes);
        }
        transpose_dwords(a, plane);
        FKV_UNROLL
        for (int d = 0; d < DIGITS; d++) _mm512_storeu_si512(to + (size_t)d * digit, plane[DIGITS - 1 - d]);
    }
    return bias;
}

/* A score from the sums of its digits. */
FKV_INLINE vf sealed_score(__m512i high, __m512i middle, __m512i low, float step, float bias) {
    vf score = vf_fma(_mm512_cvtepi32_ps(low), vf_set(step), vf_set(bias));
    return vf_fma(_mm512_cvtepi32_ps(_mm512_add_epi32(times_256(high), middle)), vf_set(step * 256.0f), score);
}

/* Rows [row, row + 16) that floats serve, after all have their scores. */
static void sealed_by_float(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens, const float *q,
                            uint32_t row, uint32_t by_float, float *scores) {
    fkv_fetch nothing = {.n_ranges = 0};
    while (by_float != 0) {
        uint32_t first = (uint32_t)__builtin_ctz(by_float);
        uint32_t n = (uint32_t)__builtin_ctz(~(by_float >> first)); /* neighbours share what is decoded */
        uint32_t r = row + first;
        sealed_scores(codec, part, &nothing, n_tokens, q + (size_t)r * codec->dim, NULL, n, scores + (size_t)r * FKV_TILE_TOKENS);
        by_float &= ~(((1u << n) - 1) << first);
    }
}

/* ---- codes ---- */

/* The intrinsic with a count that is a constant wants it signed or not, as the compiler is. */
FKV_INLINE __m512i shifted(__m512i x, int by) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(by)); }

/* The codes of one unit and 16 tokens as four quads. */
FKV_INLINE void unit_codes(int bits, const uint8_t *block, uint32_t n_units, uint32_t unit, __m512i quads[4]) {
    if (bits == 4) {
        const __m512i half = _mm512_set1_epi8(15);
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            __m512i line = _mm512_loadu_si512(block + (size_t)(2 * unit + (uint32_t)i) * FKV_SEALED_LINE);
            quads[2 * i] = _mm512_and_si512(line, half);
            quads[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), half);
        }
        return;
    }
    const __m512i low = _mm512_set1_epi8(3);
    const __m512i high = _mm512_set1_epi8(4);
    __m512i line = _mm512_loadu_si512(block + (size_t)unit * FKV_SEALED_LINE);
    FKV_UNROLL
    for (int q = 0; q < 4; q++) quads[q] = _mm512_and_si512(shifted(line, 2 * q), low);
    if (bits == 2) return;
    line = _mm512_loadu_si512(block + (size_t)(n_units + unit / 2) * FKV_SEALED_LINE);
    if (unit % 2 == 1) line = _mm512_srli_epi16(line, 4);
    line = _mm512_slli_epi16(line, 2);
    FKV_UNROLL
    for (int q = 0; q < 4; q++) quads[q] = _mm512_or_si512(quads[q], _mm512_and_si512(shifted(line, q), high));
}

/* calibrated_unit() in registers. */
FKV_INLINE void calibrated_codes(const fkv_channel_order *order, const uint8_t *block, uint32_t unit, __m512i quads[4]) {
    const __m512i digit = _mm512_set1_epi8(3);
    __m512i line = _mm512_loadu_si512(block + (size_t)unit * FKV_SEALED_LINE);
    FKV_UNROLL
    for (int q = 0; q < 4; q++) quads[q] = _mm512_and_si512(shifted(line, 2 * q), digit);
    FKV_UNROLL
    for (uint32_t d = 1; d < FKV_MAX_DIGITS; d++) {
        FKV_UNROLL
        for (uint32_t q = 0; q < 4; q++) {
            if (unit * 16 + q * 4 >= order->n[d]) break;
            uint32_t quad = fkv_channel_quad(order, unit * 16 + q * 4, d);
            line = _mm512_loadu_si512(block + (size_t)(quad / 4) * FKV_SEALED_LINE);
            __m512i digits = _mm512_and_si512(shifted(line, (int)(quad % 4 * 2)), digit);
            quads[q] = _mm512_or_si512(quads[q], _mm512_sll_epi16(digits, _mm_cvtsi32_si128((int)(2 * d))));
        }
    }
}

/* The keys of 16 tokens, quads where the digits of queries are. */
typedef struct sealed_quads {
    alignas(64) uint8_t at[MAX_CHUNKS][CHUNK_QUADS][64];
} sealed_quads;

FKV_INLINE void sealed_quads_put(uint32_t unit, const __m512i quads[4], sealed_quads *keys) {
    FKV_UNROLL
    for (int q = 0; q < 4; q++) _mm512_store_si512(keys->at[unit / 4][4 * q + (int)(unit % 4)], quads[q]);
}

/* bits 0: calibrated keys, of `order`. */
FKV_INLINE void sealed_quads_open(int bits, const fkv_channel_order *order, uint32_t n_units, const uint8_t *block,
                                  sealed_quads *keys) {
    for (uint32_t unit = 0; unit < n_units; unit++) {
        __m512i quads[4];
        if (bits == 0)
            calibrated_codes(order, block, unit, quads);
        else
            unit_codes(bits, block, n_units, unit, quads);
        sealed_quads_put(unit, quads, keys);
    }
    for (uint32_t unit = n_units; unit % 4 != 0; unit++) /* digits are 0 there */
        for (int q = 0; q < 4; q++) _mm512_store_si512(keys->at[unit / 4][4 * q + (int)(unit % 4)], _mm512_setzero_si512());
}

/* The values of a tile as levels of the book, signed: for each unit, quads of tokens at their quad_place(). */
typedef struct sealed_levels_tile {
    alignas(64) int8_t at[FKV_MAX_HEAD_DIM / 16][FKV_TILE_TOKENS / 4][64];
} sealed_levels_tile;

/* Blocks of 16 tokens that a tile does not have. */
FKV_INLINE void levels_behind(uint32_t n_tokens, uint32_t n_units, sealed_levels_tile *levels) {
    for (uint32_t block = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS); block < FKV_TILE_TOKENS / FKV_SEALED_TOKENS; block++)
        for (uint32_t unit = 0; unit < n_units; unit++)
            for (uint32_t q = 0; q < 4; q++) _mm512_store_si512(levels->at[unit][4 * q + block], _mm512_setzero_si512());
}

/* What each code of a width stands for; those without a sign come first. */
FKV_INLINE __m128i level_book(int bits) {
    __m128i level = _mm_loadl_epi64((const __m128i *)fkv_sealed_book_of((uint32_t)bits)->level);
    __m128i negated = _mm_sub_epi8(_mm_setzero_si128(), level);
    if (bits == 4) return _mm_unpacklo_epi64(level, negated);
    return bits == 3 ? _mm_unpacklo_epi32(level, negated) : _mm_unpacklo_epi16(level, negated);
}

/* One unit of a block of 16 tokens, the tile's `at`th. */
FKV_INLINE void sealed_levels_put(int bits, __m512i book, const uint8_t *block, uint32_t n_units, uint32_t unit, uint32_t at,
                                  sealed_levels_tile *levels) {
    __m512i quads[4];
    unit_codes(bits, block, n_units, unit, quads);
    FKV_UNROLL
    for (uint32_t q = 0; q < 4; q++) _mm512_store_si512(levels->at[unit][4 * q + at], _mm512_shuffle_epi8(book, quads[q]));
}

/* Of 16 tokens from `token` on. */
FKV_INLINE void sealed_levels_open(int bits, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token,
                                   sealed_levels_tile *levels) {
    __m512i book = _mm512_broadcast_i32x4(level_book(bits));
    uint32_t n_units = codec->dim / 16;
    const uint8_t *block = sealed_block(codec, part, token);
    for (uint32_t unit = 0; unit < n_units; unit++)
        sealed_levels_put(bits, book, block, n_units, unit, token / FKV_SEALED_TOKENS, levels);
}

static void sealed_levels_of(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token,
                             sealed_levels_tile *levels) {
    if (codec->bits == 4)
        sealed_levels_open(4, codec, part, token, levels);
    else if (codec->bits == 3)
        sealed_levels_open(3, codec, part, token, levels);
    else
        sealed_levels_open(2, codec, part, token, levels);
}

static void sealed_quads_of(const fkv_codec *codec, const sealed_page *page, const uint8_t *block, sealed_quads *keys) {
    if (codec->channels != NULL)
        sealed_quads_open(0, codec->channels, page->n_units, block, keys);
    else if (codec->bits == 4)
        sealed_quads_open(4, NULL, page->n_units, block, keys);
    else if (codec->bits == 3)
        sealed_quads_open(3, NULL, page->n_units, block, keys);
    else
        sealed_quads_open(2, NULL, page->n_units, block, keys);
}

/* ---- weights ---- */

/* The norms of a tile, without signs; 0 behind n_tokens, whatever the slots hold. */
typedef struct sealed_norms {
    alignas(64) float at[FKV_TILE_TOKENS];
    float unit; /* value = norm * unit * level */
} sealed_norms;

/* Returns which are below 0, a bit for each token. */
static uint64_t norms_open(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens, float unit,
                           sealed_norms *n) {
    uint64_t below = 0;
    n->unit = unit;
    widen(codec->type, part[FKV_PART_SCALES], (uint32_t)fkv_align_up(n_tokens, 16), n->at);
    for (uint32_t t = n_tokens; t < FKV_TILE_TOKENS; t++) n->at[t] = 0.0f;
    for (uint32_t t = 0; t < n_tokens; t += VL) {
        vf norm = vf_load(n->at + t);
        below |= (uint64_t)_mm512_cmp_ps_mask(norm, vf_set(0.0f), _CMP_LT_OQ) << t;
        vf_store(n->at + t, _mm512_abs_ps(norm));
    }
    return below;
}

/* What the weights of n rows are multiplied by to become whole numbers, and the step of these. largest: lanes of each row's
 * weights, used up. */
FKV_INLINE void sealed_steps(int n, float unit, vf *largest, float inverse[BLOCK_ROWS], float step[BLOCK_ROWS]) {
    vf most = fold_rows(WHOLE_LARGER, n, largest);
    vf_store(inverse, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, vf_set(SMALLEST), _CMP_GT_OQ), vf_set(MOST_WEIGHT), most));
    vf_store(step, vf_mul(vf_div(most, vf_set(MOST_WEIGHT)), vf_set(unit)));
}

/* 64 whole numbers as bytes in the order of packed_words, high and low ones `low` bytes apart. */
FKV_INLINE void sealed_weight_bytes(const __m512i whole[4], uint8_t *to, size_t low) {
    __m512i words01 = _mm512_packus_epi32(whole[0], whole[1]);
    __m512i words23 = _mm512_packus_epi32(whole[2], whole[3]);
    __m512i byte = _mm512_set1_epi16(255);
    _mm512_storeu_si512(to, _mm512_packus_epi16(_mm512_srli_epi16(words01, 8), _mm512_srli_epi16(words23, 8)));
    _mm512_storeu_si512(to + low, _mm512_packus_epi16(_mm512_and_si512(words01, byte), _mm512_and_si512(words23, byte)));
}

/* The weights of n <= 16 rows as bytes, tokens in the order of packed_words, high and low ones `low` bytes apart, rows 64. n: a
 * constant 4 or 16; rows behind n_rows are not looked at. Vectors of p behind n_tokens are not defined. */
FKV_INLINE void sealed_weigh(int n, const sealed_norms *norms, const float *p, uint32_t n_tokens, uint32_t n_rows, uint8_t *to,
                             size_t low, float step[BLOCK_ROWS]) {
    vf largest[BLOCK_ROWS];
    uint32_t n_vecs = fkv_ceil_div(n_tokens, VL);
    FKV_UNROLL
    for (int r = 0; r < n; r++) largest[r] = vf_set(0.0f);
    for (uint32_t r = 0; r < n_rows; r++) {
        __m512i most = _mm512_setzero_si512();
        for (uint32_t b = 0; b < n_vecs; b++) {
            vf weight = vf_mul(vf_load(p + r * FKV_TILE_TOKENS + b * VL), vf_load(norms->at + b * VL));
            most = _mm512_max_epu32(most, sizes_of(weight)); /* NaN behind all */
        }
        largest[r] = _mm512_castsi512_ps(most);
    }
    alignas(64) float inverse[BLOCK_ROWS];
    sealed_steps(n, norms->unit, largest, inverse, step);
    for (uint32_t r = 0; r < n_rows; r++) {
        __m512i whole[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++) {
            whole[b] = _mm512_setzero_si512();
            if (b >= n_vecs) continue;
            vf weight = vf_mul(vf_load(p + r * FKV_TILE_TOKENS + b * VL), vf_load(norms->at + b * VL));
            whole[b] = _mm512_cvtps_epi32(vf_mul(weight, vf_set(inverse[r])));
        }
        sealed_weight_bytes(whole, to + r * FKV_TILE_TOKENS, low);
    }
}

#define SEALED_INT_CODECS(prepare, scores, values)                                                                               \
    {FKV_CODEC_CALIBRATED, 4, prepare, scores, NULL, NULL}, {FKV_CODEC_CALIBRATED, 3, prepare, scores, NULL, NULL},              \
        {FKV_CODEC_SEALED, 4, prepare, scores, NULL, NULL}, {FKV_CODEC_SEALED, 3, prepare, scores, NULL, NULL},                  \
        {FKV_CODEC_SEALED, 2, prepare, scores, NULL, NULL}, {FKV_CODEC_SEALED_V, 4, NULL, NULL, values, NULL},                   \
        {FKV_CODEC_SEALED_V, 3, NULL, NULL, values, NULL}, {                                                                     \
        FKV_CODEC_SEALED_V, 2, NULL, NULL, values, NULL                                                                          \
    }

#endif
