/* Support for TurboQuant rows in the integer kernels (AVX-512 VNNI and AMX): splits queries into base-256 digits (signed bytes)
 * and converts codes to codebook levels. The dot-product kernels are shared with sealed blocks (sealed_vnni.h, sealed_amx.h,
 * kernels_avx512vnni.c).
 *
 * Scores: a query is rounded to 23 bits once for all tiles and split into three digits, like the queries for sealed keys. The
 * rounding step is derived from the query's largest value. Levels are integers. The score is (row scale) * step * (sum of x *
 * level), where x are the rounded integers of the query. The sum is exact. The rounding error does not exceed that of the float
 * kernels, because a query has a single step and a row has a single scale. The float kernels process only those queries whose
 * values are so small that the inverse of the step would overflow.
 *
 * Values: weights p * scale are split into two unsigned bytes and multiplied by signed levels, as in sealed blocks.
 *
 * Rows are stored token by token, so their codes are transposed once per tile. Sealed blocks need no transpose.
 */
#ifndef FKV_TURBO_VNNI_H
#define FKV_TURBO_VNNI_H

#include "sealed_vnni.h"

/* ---- queries ---- */

/* Query rows as base-256 digits (signed bytes), with values in the order of the key quads (turbo_channel()). Rows are grouped in
 * blocks. In decode, a block has as many rows as fit in one matrix; otherwise, one block has all rows. */
typedef struct turbo_queries {
    uint32_t *n_by_float; /* see int_queries */
    uint32_t *by_float;
    float *step;    /* [rows] */
    int8_t *digits; /* [blocks of rows, base-256 digits, rows of a block, D] signed bytes */
} turbo_queries;

static turbo_queries turbo_queries_in(const void *prepared, uint32_t n_rows) {
    uint8_t *at = (uint8_t *)(uintptr_t)prepared;
    turbo_queries tq;
    tq.n_by_float = (uint32_t *)(void *)at;
    tq.by_float = tq.n_by_float + 1;
    at += fkv_align_up((n_rows + 1) * sizeof(uint32_t), 64);
    tq.step = (float *)(void *)at;
    tq.digits = (int8_t *)at + fkv_align_up(n_rows * sizeof(float), 64);
    return tq;
}

/* Returns the channel whose code turbo_quads() stores at index `place`. */
FKV_INLINE uint32_t turbo_channel(uint32_t bits, uint32_t place) {
    uint32_t quad = place / 4;
    uint32_t byte = place % 4;
    if (bits == 4) return place / 32 * 32 + quad % 4 * 8 + byte * 2 + quad % 8 / 4;
    return place / 16 * 16 + byte * 4 + quad % 4;
}

/* Quantizes one query row to base-256 digits (signed bytes). Digit i of a value is stored i * digit bytes after digit 0. Returns
 * true if the float kernels should process the row, because its values are nonzero but so small that the inverse of the step
 * would overflow. */
static bool turbo_prepare_row(const fkv_codec *codec, const float *row, float *step, int8_t *to, size_t digit) {
    alignas(64) float x[FKV_MAX_HEAD_DIM];
    vf max = vf_set(0.0f);
    __mmask16 not_finite = 0;
    for (uint32_t d = 0; d < codec->dim; d++) x[d] = row[turbo_channel(codec->bits, d)];
    for (uint32_t d = 0; d < codec->dim; d += VL) {
        vf size = _mm512_abs_ps(vf_load(x + d));
        max = vf_max(max, size);
        not_finite |= _mm512_cmp_ps_mask(size, vf_set(INFINITY), _CMP_NLT_UQ);
    }
    float largest = vf_reduce_max(max);
    float inverse = not_finite == 0 && largest > SMALLEST ? DIGIT_LIMIT / largest : 0.0f;
    *step = not_finite != 0 ? NAN : largest / DIGIT_LIMIT; /* a non-finite query must produce NaN instead of a plausible result */
    for (uint32_t d = 0; d < codec->dim; d += VL) {
        vf number = not_finite != 0 ? vf_set(0.0f) : vf_load(x + d);
        __m512i digits = round_to_digits(number, vf_set(inverse));
        FKV_UNROLL
        for (uint32_t i = 0; i < DIGITS; i++)
            _mm_storeu_si128((__m128i *)(to + i * digit + d),
                             _mm512_cvtepi32_epi8(_mm512_srli_epi32(digits, 8 * (DIGITS - 1 - i))));
    }
    return not_finite == 0 && largest > 0.0f && largest <= SMALLEST;
}

/* Quantizes all query rows in blocks of `width` rows. */
static void turbo_prepare_blocks(const fkv_codec *codec, const float *q, uint32_t n_rows, uint32_t width, void *prepared) {
    turbo_queries tq = turbo_queries_in(prepared, n_rows);
    size_t digit = (size_t)width * codec->dim;
    *tq.n_by_float = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        int8_t *to = tq.digits + r / width * DIGITS * digit + (size_t)(r % width) * codec->dim;
        if (turbo_prepare_row(codec, q + (size_t)r * codec->dim, &tq.step[r], to, digit)) tq.by_float[(*tq.n_by_float)++] = r;
    }
}

/* ---- keys ---- */

/* ORs the high bits of 64 three-bit codes into the quads, for each of 16 tokens. `plane` points to the high bits of the first
 * token. */
FKV_INLINE void turbo_high_bits(const uint8_t *plane, size_t stride, __m512i quads[CHUNK_QUADS]) {
    const __m512i high = _mm512_set1_epi8(4);
    const __m512i bytes[2] = {_mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000),
                              _mm512_set4_epi32(0x0f0f0e0e, 0x0b0b0a0a, 0x07070606, 0x03030202)};
    __m512i of_tokens[4]; /* 64 high bits take 8 bytes per row, so only the first two registers are used */
    load_columns(plane, stride, of_tokens);
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        __m512i line = _mm512_shuffle_epi8(of_tokens[i / 2], bytes[i % 2]);
        line = _mm512_mask_mov_epi8(line, 0xaaaaaaaaaaaaaaaau, _mm512_srli_epi16(line, 4));
        line = _mm512_slli_epi16(line, 2);
        FKV_UNROLL
        for (int j = 0; j < 4; j++)
            quads[4 * i + j] = _mm512_or_si512(quads[4 * i + j], _mm512_and_si512(shifted(line, j), high));
    }
}

/* Unpacks the codes of 64 values into quads, for 16 tokens. For 4-bit codes, every 32 values become four quads of even values,
 * followed by four quads of odd values. For narrower codes, quad k of every 16 values holds values k, k + 4, k + 8 and k + 12.
 * `rows` points to the first token. Loads may extend past a row into other rows or scales; the extra bytes are ignored. */
FKV_INLINE void turbo_quads(int bits, const fkv_codec *codec, const uint8_t *rows, uint32_t chunk, __m512i quads[CHUNK_QUADS]) {
    size_t stride = codec->row_bytes[FKV_PART_CODES];
    if (bits == 4) {
        unit_quads(4, rows + (size_t)chunk * 32, stride, quads);
        unit_quads(4, rows + (size_t)chunk * 32 + 16, stride, quads + UNIT_QUADS);
        return;
    }
    const __m512i low = _mm512_set1_epi8(3);
    __m512i packed[4];
    load_columns(rows + (size_t)chunk * 16, stride, packed);
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        FKV_UNROLL
        for (int j = 0; j < 4; j++) quads[4 * i + j] = _mm512_and_si512(shifted(packed[i], 2 * j), low);
    }
    if (bits == 3) turbo_high_bits(rows + fkv_turbo_plane(codec->dim) + (size_t)chunk * 8, stride, quads);
}

/* Converts the key codes of 16 tokens to codebook levels and adds `more` to each level. `more` is 0 for signed multiplication
 * (AMX) and 128 for unsigned multiplication (VNNI). */
FKV_INLINE void turbo_keys_open(int bits, int more, const fkv_codec *codec, const uint8_t *rows, sealed_quads *keys) {
    __m512i book = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fkv_turbo_books[bits].value));
    book = _mm512_xor_si512(book, _mm512_set1_epi8((char)more));
    for (uint32_t chunk = 0; chunk * CHUNK_NUMBERS < codec->dim; chunk++) {
        __m512i quads[CHUNK_QUADS];
        bool whole = codec->dim - chunk * CHUNK_NUMBERS >= CHUNK_NUMBERS;
        turbo_quads(bits, codec, rows, chunk, quads);
        FKV_UNROLL
        for (int q = 0; q < CHUNK_QUADS; q++)
            _mm512_store_si512(keys->at[chunk][q],
                               whole || q < CHUNK_QUADS / 2 ? _mm512_shuffle_epi8(book, quads[q]) : _mm512_setzero_si512());
    }
}

FKV_INLINE void turbo_keys_of(int more, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token,
                              sealed_quads *keys) {
    const uint8_t *rows = part[FKV_PART_CODES] + (size_t)token * codec->row_bytes[FKV_PART_CODES];
    if (codec->bits == 4)
        turbo_keys_open(4, more, codec, rows, keys);
    else if (codec->bits == 3)
        turbo_keys_open(3, more, codec, rows, keys);
    else
        turbo_keys_open(2, more, codec, rows, keys);
}

/* ---- values ---- */

enum { STRIP_NUMBERS = 128, STRIP_UNITS = STRIP_NUMBERS / 16 };

/* Permutes each 16-byte lane of four rows by `order`, and interleaves the bytes of the rows like token_quads(). Each output
 * vector covers 16 bytes of the rows. */
FKV_INLINE void turbo_token_quads(const uint8_t *rows, size_t stride, uint32_t n_bytes, __m512i order, __m512i v[4]) {
    __m512i transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __mmask64 there = ~(__mmask64)0 >> (64 - n_bytes);
    __m512i a[4];
    FKV_UNROLL
    for (size_t i = 0; i < 4; i++) {
        __m512i row = _mm512_shuffle_epi8(_mm512_maskz_loadu_epi8(there, rows + i * stride), order);
        a[i] = _mm512_permutexvar_epi32(transposed, row);
    }
    token_quads(a, v);
}

/* Unpacks the 4-bit codes of four tokens. A dword of units[u] holds the codes of one channel for the four tokens. 16 bytes of
 * each row form two units of 16 channels. */
FKV_INLINE void turbo_strip_4(const uint8_t *rows, size_t stride, uint32_t n_numbers, __m512i units[STRIP_UNITS]) {
    const __m512i order = _mm512_set4_epi32(0x0f0e0706, 0x0d0c0504, 0x0b0a0302, 0x09080100);
    const __m512i half = _mm512_set1_epi8(15);
    __m512i v[4];
    turbo_token_quads(rows, stride, n_numbers / 2, order, v);
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_and_si512(v[i], half);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), half);
        units[2 * i] = _mm512_unpacklo_epi32(even, odd);
        units[2 * i + 1] = _mm512_unpackhi_epi32(even, odd);
    }
}

/* Unpacks the 2-bit codes of four tokens like turbo_strip_4(). 16 bytes of each row form four units of 16 channels. */
FKV_INLINE void turbo_strip_2(const uint8_t *rows, size_t stride, uint32_t n_numbers, __m512i units[STRIP_UNITS]) {
    const __m512i order = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    const __m512i low = _mm512_set1_epi8(3);
    __m512i v[4];
    turbo_token_quads(rows, stride, n_numbers / 4, order, v);
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        __m512i quarters[4];
        FKV_UNROLL
        for (int j = 0; j < 4; j++) quarters[j] = _mm512_and_si512(shifted(v[i], 2 * j), low);
        transpose_dwords(quarters, units + 4 * i);
    }
}

/* ORs the high bits of 3-bit codes into the unpacked low bits. In each row, the high bits of a unit (16 channels) occupy two
 * bytes, in channel order. */
FKV_INLINE void turbo_strip_high(const uint8_t *plane, size_t stride, uint32_t n_numbers, __m512i units[STRIP_UNITS]) {
    const __m512i order = _mm512_set4_epi32(0x0f0e0d0c, 0x0b0a0908, 0x07060504, 0x03020100);
    const __m512i high = _mm512_set1_epi8(4);
    const __m512i to_bit_2 = _mm512_setr_epi32(30, 31, 0, 1, 2, 3, 4, 5, 30, 31, 0, 1, 2, 3, 4, 5);
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i v[4];
    turbo_token_quads(plane, stride, n_numbers / 8, order, v);
    FKV_UNROLL
    for (int u = 0; u < STRIP_UNITS; u++) {
        __m512i bits = _mm512_permutexvar_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(2 * u)), v[0]);
        bits = _mm512_rorv_epi32(bits, to_bit_2);
        units[u] = _mm512_or_si512(units[u], _mm512_and_si512(bits, high));
    }
}

FKV_INLINE void turbo_levels_open(int bits, const fkv_codec *codec, const uint8_t *codes, uint32_t n_tokens,
                                  sealed_levels_tile *levels) {
    __m512i book = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fkv_turbo_books[bits].value));
    size_t stride = codec->row_bytes[FKV_PART_CODES];
    for (uint32_t quad = 0; quad < fkv_align_up(n_tokens, FKV_SEALED_TOKENS) / 4; quad++) {
        const uint8_t *rows = codes + (size_t)quad * 4 * stride;
        for (uint32_t first = 0; first < codec->dim; first += STRIP_NUMBERS) {
            uint32_t n = fkv_min_u32(STRIP_NUMBERS, codec->dim - first);
            __m512i units[STRIP_UNITS];
            if (bits == 4)
                turbo_strip_4(rows + first / 2, stride, n, units);
            else
                turbo_strip_2(rows + first / 4, stride, n, units);
            if (bits == 3) turbo_strip_high(rows + fkv_turbo_plane(codec->dim) + first / 8, stride, n, units);
            int8_t(*to)[FKV_TILE_TOKENS / 4][64] = &levels->at[first / 16];
            FKV_UNROLL
            for (uint32_t u = 0; u < STRIP_UNITS; u++)
                if (u < n / 16) _mm512_store_si512(to[u][quad_place(quad)], _mm512_shuffle_epi8(book, units[u]));
        }
    }
}

/* Negates the levels of tokens with negative scales, so that weights stay non-negative. flatkv never writes negative scales, but
 * a page file may contain them. */
static void turbo_negate(uint64_t below, uint32_t n_units, sealed_levels_tile *levels) {
    for (; below != 0; below &= below - 1) {
        uint32_t token = (uint32_t)__builtin_ctzll(below);
        __mmask64 bytes = (__mmask64)0x1111111111111111u << token % 4;
        for (uint32_t unit = 0; unit < n_units; unit++) {
            int8_t *at = levels->at[unit][quad_place(token / 4)];
            __m512i x = _mm512_load_si512(at);
            _mm512_store_si512(at, _mm512_mask_sub_epi8(x, bytes, _mm512_setzero_si512(), x));
        }
    }
}

/* Loads the levels and norms of a sealed or TurboQuant tile. */
static void book_values_open(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens,
                             sealed_norms *norms, sealed_levels_tile *levels) {
    uint32_t n_units = codec->dim / 16;
    if (codec->kind != FKV_CODEC_TURBO) {
        (void)norms_open(codec, part, n_tokens, SEALED_UNIT, norms); /* the signs of sealed norms are ignored */
        for (uint32_t token = 0; token < n_tokens; token += FKV_SEALED_TOKENS) sealed_levels_of(codec, part, token, levels);
        clear_levels_beyond(n_tokens, n_units, levels);
        return;
    }
    uint64_t below = norms_open(codec, part, n_tokens, 1.0f, norms);
    if (codec->bits == 4)
        turbo_levels_open(4, codec, part[FKV_PART_CODES], n_tokens, levels);
    else if (codec->bits == 3)
        turbo_levels_open(3, codec, part[FKV_PART_CODES], n_tokens, levels);
    else
        turbo_levels_open(2, codec, part[FKV_PART_CODES], n_tokens, levels);
    clear_levels_beyond(n_tokens, n_units, levels);
    turbo_negate(below, n_units, levels);
}

/* Codec table entries for all TurboQuant bit widths. */
#define TURBO_INT_CODECS(prepare, scores, values)                                                                                \
    {FKV_CODEC_TURBO, 4, prepare, scores, values, turbo_encode}, {FKV_CODEC_TURBO, 3, prepare, scores, values, turbo_encode}, {  \
        FKV_CODEC_TURBO, 2, prepare, scores, values, turbo_encode                                                                \
    }

#endif
