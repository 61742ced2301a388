/* Code shared by the integer kernels for sealed blocks (AVX-512 VNNI and AMX). It converts queries, weights and codes to bytes.
 * The dot products are in kernels_avx512vnni.c and sealed_amx.h and are also used for TurboQuant rows (turbo_vnni.h).
 *
 * Scores: each query is multiplied once by the scales of a page: x_c = q_c * scale_c for channel c. x_c is rounded to 23 bits and
 * split into three base-256 digits, stored as signed bytes. The rounding step is derived from an upper bound on |x_c|, which is
 * the maximum of max |q| * max |scale| over all units of 16 channels. The score of token t is step * (sum of x_c * code_tc) +
 * (sum of q_c * bias_c), where x_c is the rounded integer and the first sum is exact. Codes are at most 15, so the error of a
 * score is about bound / 2^17. Rows whose bound exceeds MAX_BOUND, or is so small that the inverse of the step would overflow,
 * are processed by the float kernels. Calibrated keys have codes up to 63, so their limit is MAX_BOUND / 4. Rows whose bound is
 * at most 1/128 of the limit are rounded to 16 bits, so that their high digits are 0 and prefill can skip them. Their error does
 * not exceed the error of a row at the limit, because 16-bit steps are 128 times as large as 23-bit steps.
 *
 * Values: weights p * norm are non-negative. They are rounded to 16 bits and split into two unsigned bytes, which are multiplied
 * by the signed codebook levels. A row has one norm and no bias: out += step * (sum of weight * level).
 */
#ifndef FKV_SEALED_VNNI_H
#define FKV_SEALED_VNNI_H

#include "rows16_avx512.h"

enum {
    DIGITS = 3,         /* number of bytes (base-256 digits) per query value: high, middle and low */
    CHUNK_NUMBERS = 64, /* channels per chunk; the quads of a chunk fill the rows of one AMX tile */
    CHUNK_QUADS = CHUNK_NUMBERS / 4,
    MAX_CHUNKS = FKV_MAX_HEAD_DIM / CHUNK_NUMBERS
};

static const float MAX_BOUND = 32.0f;
static const float DIGIT_LIMIT = 4161000.0f; /* slightly below 2^22 - 0x8080, the limit of round_to_digits() */
static const float NARROW_LIMIT = 32630.0f;  /* slightly below 2^15 - 0x80; the high digits of smaller integers are 0 */
static const float WEIGHT_LIMIT = 65280.0f;
static const float SEALED_UNIT = 0x1p-7f; /* value = norm * level * SEALED_UNIT */

/* ---- key page ---- */

typedef struct sealed_page {
    alignas(64) float scales[FKV_MAX_HEAD_DIM];
    alignas(64) float biases[FKV_MAX_HEAD_DIM];
    uint32_t dim;
    uint32_t n_units;
    uint32_t n_chunks;
    float max_bound;
    float narrow_bound;                /* largest bound of a row whose queries are rounded to 16 bits */
    float most[FKV_MAX_HEAD_DIM / 16]; /* largest absolute scale of each unit (16 channels); NaN if a scale of the unit is NaN */
} sealed_page;

/* Returns the largest of 16 absolute values, given as bit patterns. NaN compares as the largest value. */
FKV_INLINE float largest_size(__m512i sizes) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)_mm512_reduce_max_epu32(sizes))));
}

FKV_INLINE __m512i abs_bits_of(vf x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

static void sealed_page_open(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], sealed_page *page) {
    page->dim = codec->dim;
    page->n_units = codec->dim / 16;
    page->max_bound = codec->channels != NULL ? MAX_BOUND / 4 : MAX_BOUND;
    page->narrow_bound = page->max_bound / 128.0f;
    page->n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    widen_halves(codec->type, part[FKV_PART_SCALES], codec->dim, page->scales);
    widen_halves(codec->type, part[FKV_PART_BIASES], codec->dim, page->biases);
    for (uint32_t first = 0; first < page->n_units; first += 8) {
        vf sizes[8];
        FKV_UNROLL
        for (uint32_t u = 0; u < 8; u++) /* may read past the last unit, into unused entries of `scales` */
            sizes[u] = _mm512_castsi512_ps(abs_bits_of(vf_load(page->scales + (first + u) * 16)));
        _mm256_storeu_ps(page->most + first, _mm512_castps512_ps256(fold_rows(FOLD_UINT_MAX, 8, sizes)));
    }
}

/* ---- queries ---- */

/* Stores the largest absolute value of each unit (16 channels) of each query row. prepared: [units, rows rounded up to 16]. */
static void sealed_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    float *most = prepared;
    uint32_t width = (uint32_t)fkv_align_up(n_rows, BLOCK_ROWS);
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++)
        for (uint32_t r = 0; r < width; r++)
            most[unit * width + r] =
                r < n_rows ? largest_size(abs_bits_of(vf_load(q + (size_t)r * codec->dim + unit * 16))) : 0.0f;
}

/* Quantization state of up to 16 query rows for one page. */
typedef struct sealed_rows {
    alignas(64) float step[BLOCK_ROWS];
    alignas(64) float inverse[BLOCK_ROWS];
    alignas(64) float bias[BLOCK_ROWS]; /* sum of q * bias over all channels of the page */
    uint32_t by_float;                  /* bit r is set if row r uses the float kernels */
    bool narrow;                        /* true if the high digits of all rows are 0 */
} sealed_rows;

/* Computes the quantization steps of query rows [row, row + 16) for one page. */
FKV_INLINE void sealed_rows_open(const sealed_page *page, const void *prepared, uint32_t n_rows, uint32_t row,
                                 sealed_rows *rows) {
    const float *most = (const float *)prepared + row;
    size_t width = fkv_align_up(n_rows, BLOCK_ROWS);
    vf bound = vf_set(0.0f);
    __mmask16 good = 0xffff;
    for (uint32_t unit = 0; unit < page->n_units; unit++) {
        vf product = vf_mul(vf_load(most + unit * width), vf_set(page->most[unit]));
        good &= _mm512_cmp_ps_mask(product, vf_set(page->max_bound), _CMP_LE_OQ);
        bound = vf_max(bound, product);
    }
    __mmask16 none = _mm512_cmp_ps_mask(bound, vf_set(0.0f), _CMP_EQ_OQ);
    good &= none | _mm512_cmp_ps_mask(bound, vf_set(SMALLEST), _CMP_GT_OQ);
    __mmask16 narrow = _mm512_cmp_ps_mask(bound, vf_set(page->narrow_bound), _CMP_LE_OQ);
    vf limit = _mm512_mask_mov_ps(vf_set(DIGIT_LIMIT), narrow, vf_set(NARROW_LIMIT));
    vf_store(rows->step, vf_div(bound, limit));
    vf_store(rows->inverse, _mm512_maskz_div_ps(good & ~none, limit, bound));
    rows->narrow = (good & ~narrow) == 0;
    uint32_t there = n_rows - row >= BLOCK_ROWS ? 0xffff : (1u << (n_rows - row)) - 1;
    rows->by_float = ~(uint32_t)good & there;
}

/* Layout of the base-256 digits of queries. `row`, `digit` and `chunk` are the distances, in bytes, between rows, between digits
 * (high, middle, low) and between chunks of 64 values. Bytes beyond the last value of a row may be arbitrary, because they are
 * multiplied by zero codes. */
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

/* The lowest and the second lowest bytes of 64 dwords. Dword 4 * L + k of a plane holds the bytes of dwords 4 * L to 4 * L + 3 of
 * register k, which is the order of packed_words. */
typedef struct byte_planes {
    __m512i lowest;
    __m512i second;
} byte_planes;

FKV_INLINE byte_planes low_byte_planes(const __m512i a[4]) {
    const __m512i pick = _mm512_set4_epi32(0x0d090501, 0x0d090501, 0x0c080400, 0x0c080400);
    const __mmask64 odd_dwords = 0xf0f0f0f0f0f0f0f0u;
    __m512i a01 = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a[0], pick), odd_dwords, a[1], pick);
    __m512i a23 = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a[2], pick), odd_dwords, a[3], pick);
    return (byte_planes){_mm512_unpacklo_epi64(a01, a23), _mm512_unpackhi_epi64(a01, a23)};
}

/* Rounds x * inverse to an integer and adds 2^23 + 2^22 + 0x8080 in the same FMA. The bytes of the resulting float contain the
 * base-256 digits of the integer, plus a constant. */
FKV_INLINE __m512i rounded_bits(vf x, vf inverse) { return _mm512_castps_si512(vf_fma(x, inverse, vf_set(12615808.0f))); }

/* Rounds x * inverse to an integer and returns its three base-256 digits, with the lowest digit in the lowest byte. */
FKV_INLINE __m512i round_to_digits(vf x, vf inverse) {
    return _mm512_sub_epi8(rounded_bits(x, inverse), _mm512_set1_epi32(0x00408080));
}

/* Multiplies one query row by the page's scales and quantizes it to base-256 digits. The digits of a value are `digit` bytes
 * apart, and chunks of 64 values are `chunk` bytes apart. In a chunk, quad q of unit u is stored at dword 4 * q + u, which is the
 * order that the transpose produces. If `narrow` (a compile-time constant) is true, the high digits are 0 and are not stored.
 * Returns the sum of q * bias as 16 partial sums, one per lane. */
FKV_INLINE vf sealed_digits_of(bool narrow, uint32_t n_units, const sealed_page *page, const float *q, float inverse, int8_t *to,
                               size_t digit, size_t chunk) {
    const vf scale = vf_set(inverse);
    const __m512i by_digit = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
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
            vf product = vf_mul(x, vf_load(page->scales + at));
            a[u] = narrow ? rounded_bits(product, scale) : _mm512_shuffle_epi8(round_to_digits(product, scale), by_digit);
        }
        if (narrow) {
            byte_planes planes = low_byte_planes(a);
            _mm512_storeu_si512(to + digit, _mm512_xor_si512(planes.second, sign));
            _mm512_storeu_si512(to + 2 * digit, _mm512_xor_si512(planes.lowest, sign));
            continue;
        }
        transpose_dwords(a, plane);
        FKV_UNROLL
        for (int d = 0; d < DIGITS; d++) _mm512_storeu_si512(to + (size_t)d * digit, plane[DIGITS - 1 - d]);
    }
    return bias;
}

FKV_INLINE vf sealed_digits(uint32_t n_units, const sealed_page *page, const float *q, float inverse, int8_t *to, size_t digit,
                            size_t chunk) {
    return sealed_digits_of(false, n_units, page, q, inverse, to, digit, chunk);
}

/* Computes 16 scores from dot products with the three base-256 digits of the query. */
FKV_INLINE vf sealed_score(__m512i high, __m512i middle, __m512i low, float step, float bias) {
    vf score = vf_fma(_mm512_cvtepi32_ps(low), vf_set(step), vf_set(bias));
    return vf_fma(_mm512_cvtepi32_ps(_mm512_add_epi32(times_256(high), middle)), vf_set(step * 256.0f), score);
}

/* Recomputes, with the float kernels, the scores of the rows in [row, row + 16) whose bits are set in `by_float`. */
static void sealed_by_float(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens, const float *q,
                            uint32_t row, uint32_t by_float, float *scores) {
    fkv_fetch nothing = {.n_ranges = 0};
    while (by_float != 0) {
        uint32_t first = (uint32_t)__builtin_ctz(by_float);
        /* adjacent rows are computed in one call, so that they share the decoded keys */
        uint32_t n = (uint32_t)__builtin_ctz(~(by_float >> first));
        uint32_t r = row + first;
        sealed_scores(codec, part, &nothing, n_tokens, q + (size_t)r * codec->dim, NULL, n, scores + (size_t)r * FKV_TILE_TOKENS);
        by_float &= ~(((1u << n) - 1) << first);
    }
}

/* ---- codes ---- */

/* Shifts 16-bit elements right by `by` bits. Does not use the intrinsic for immediate counts, because compilers disagree on the
 * signedness of its argument. */
FKV_INLINE __m512i shifted(__m512i x, int by) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(by)); }

/* Unpacks the codes of one unit (16 channels) and 16 tokens as four quads. */
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

/* Unpacks one unit (16 channels) of calibrated keys into registers, as four quads. */
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

/* Keys of 16 tokens, one byte per code, as quads of channels in the order of the query digits. */
typedef struct sealed_quads {
    alignas(64) uint8_t at[MAX_CHUNKS][CHUNK_QUADS][64];
} sealed_quads;

FKV_INLINE void sealed_quads_put(uint32_t unit, const __m512i quads[4], sealed_quads *keys) {
    FKV_UNROLL
    for (int q = 0; q < 4; q++) _mm512_store_si512(keys->at[unit / 4][4 * q + (int)(unit % 4)], quads[q]);
}

/* Unpacks the keys of 16 tokens. `bits` is 0 for calibrated keys, whose code widths are defined by `order`. */
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
    /* query bytes beyond the last value are arbitrary, so the corresponding key bytes must be 0 */
    for (uint32_t unit = n_units; unit % 4 != 0; unit++)
        for (int q = 0; q < 4; q++) _mm512_store_si512(keys->at[unit / 4][4 * q + (int)(unit % 4)], _mm512_setzero_si512());
}

/* Values of a tile as signed codebook levels. For each unit (16 channels), quad k of the tokens is at index quad_place(k). */
typedef struct sealed_levels_tile {
    alignas(64) int8_t at[FKV_MAX_HEAD_DIM / 16][FKV_TILE_TOKENS / 4][64];
} sealed_levels_tile;

/* Zeroes the levels of the blocks of 16 tokens that start at or after n_tokens. */
FKV_INLINE void clear_levels_beyond(uint32_t n_tokens, uint32_t n_units, sealed_levels_tile *levels) {
    for (uint32_t block = fkv_ceil_div(n_tokens, FKV_SEALED_TOKENS); block < FKV_TILE_TOKENS / FKV_SEALED_TOKENS; block++)
        for (uint32_t unit = 0; unit < n_units; unit++)
            for (uint32_t q = 0; q < 4; q++) _mm512_store_si512(levels->at[unit][4 * q + block], _mm512_setzero_si512());
}

/* Returns a table that maps codes to signed levels. The first half of the table is for codes whose sign bit is 0. */
FKV_INLINE __m128i level_book(int bits) {
    __m128i level = _mm_loadl_epi64((const __m128i *)fkv_sealed_book_of((uint32_t)bits)->level);
    __m128i negated = _mm_sub_epi8(_mm_setzero_si128(), level);
    if (bits == 4) return _mm_unpacklo_epi64(level, negated);
    return bits == 3 ? _mm_unpacklo_epi32(level, negated) : _mm_unpacklo_epi16(level, negated);
}

/* Stores the levels of one unit (16 channels) for 16 tokens. `at` is the index of this block of tokens in the tile. */
FKV_INLINE void sealed_levels_put(int bits, __m512i book, const uint8_t *block, uint32_t n_units, uint32_t unit, uint32_t at,
                                  sealed_levels_tile *levels) {
    __m512i quads[4];
    unit_codes(bits, block, n_units, unit, quads);
    FKV_UNROLL
    for (uint32_t q = 0; q < 4; q++) _mm512_store_si512(levels->at[unit][4 * q + at], _mm512_shuffle_epi8(book, quads[q]));
}

/* Converts the value codes of 16 tokens, starting at `token`, to codebook levels. */
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

/* Absolute norms of the tokens in a tile. They are 0 for tokens beyond n_tokens, even if their slots contain arbitrary bytes. */
typedef struct sealed_norms {
    alignas(64) float at[FKV_TILE_TOKENS];
    float unit; /* value of level 1 for norm 1: value = norm * unit * level */
} sealed_norms;

/* Loads the absolute norms and returns a bit mask of the tokens whose norms are negative. */
static uint64_t norms_open(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens, float unit,
                           sealed_norms *n) {
    uint64_t below = 0;
    n->unit = unit;
    widen_halves(codec->type, part[FKV_PART_SCALES], (uint32_t)fkv_align_up(n_tokens, 16), n->at);
    for (uint32_t t = n_tokens; t < FKV_TILE_TOKENS; t++) n->at[t] = 0.0f;
    for (uint32_t t = 0; t < n_tokens; t += VL) {
        vf norm = vf_load(n->at + t);
        below |= (uint64_t)_mm512_cmp_ps_mask(norm, vf_set(0.0f), _CMP_LT_OQ) << t;
        vf_store(n->at + t, _mm512_abs_ps(norm));
    }
    return below;
}

/* For each of n rows, computes the quantization step of the weights and its inverse. `largest` holds the per-lane maxima of each
 * row's weights and is overwritten. */
FKV_INLINE void sealed_steps(int n, float unit, vf *largest, float inverse[BLOCK_ROWS], float step[BLOCK_ROWS]) {
    vf most = fold_rows(FOLD_UINT_MAX, n, largest);
    vf_store(inverse, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, vf_set(SMALLEST), _CMP_GT_OQ), vf_set(WEIGHT_LIMIT), most));
    vf_store(step, vf_mul(vf_div(most, vf_set(WEIGHT_LIMIT)), vf_set(unit)));
}

/* Rounds weight * inverse to an integer of 16 bits. Adding 2^23 in an FMA leaves the integer in the two lowest bytes of the
 * float. For NaN, the bytes do not matter, because the step of the row is then also NaN. */
FKV_INLINE __m512i weight_bits(vf weight, vf inverse) { return _mm512_castps_si512(vf_fma(weight, inverse, vf_set(0x1p23f))); }

/* Stores 64 results of weight_bits() as high and low bytes, in the order of packed_words. The low bytes start `low` bytes after
 * the high bytes. */
FKV_INLINE void sealed_weight_bytes(const __m512i bits[4], uint8_t *to, size_t low) {
    byte_planes planes = low_byte_planes(bits);
    _mm512_storeu_si512(to, planes.second);
    _mm512_storeu_si512(to + low, planes.lowest);
}

/* Quantizes the weights p * norm of n_rows <= n query rows to 16 bits and stores them in the order of packed_words. The low bytes
 * start `low` bytes after the high bytes, and rows are 64 bytes apart. n is a compile-time constant, 4 or 16. Rows past n_rows
 * are not read. Outputs for tokens past n_tokens are undefined. */
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
            most = _mm512_max_epu32(most, abs_bits_of(weight)); /* NaN compares as the largest value */
        }
        largest[r] = _mm512_castsi512_ps(most);
    }
    alignas(64) float inverse[BLOCK_ROWS];
    sealed_steps(n, norms->unit, largest, inverse, step);
    for (uint32_t r = 0; r < n_rows; r++) {
        __m512i bits[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++) {
            bits[b] = _mm512_setzero_si512();
            if (b >= n_vecs) continue;
            vf weight = vf_mul(vf_load(p + r * FKV_TILE_TOKENS + b * VL), vf_load(norms->at + b * VL));
            bits[b] = weight_bits(weight, vf_set(inverse[r]));
        }
        sealed_weight_bytes(bits, to + r * FKV_TILE_TOKENS, low);
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
