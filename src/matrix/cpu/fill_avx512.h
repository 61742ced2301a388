/* Converts rows of ggml blocks in mapped weight files to panels, just before the panels are used in a matrix product. The result
 * is byte-identical to that of fkv_matrix_set_codes() for the same rows.
 *
 * A line of a panel holds one dword of each of 16 rows, so 16 loads and a transpose produce 16 lines. Where the bit layouts of
 * blocks and panels differ, bits are rearranged in whole lines at a time. For Q4_K with 2048 columns, one thread converts 7.0 GB
 * of file data per second.
 */
#ifndef FKV_FILL_AVX512_H
#define FKV_FILL_AVX512_H

#include "../../base/simd/vec_avx512.h"
#include "product_kernels.h"

#include <immintrin.h>

/* Address of a byte in the first of 16 rows, and the stride between rows in bytes. */
typedef struct row_place {
    const uint8_t *at;
    uint64_t stride;
} row_place;

typedef struct panel_writer {
    uint8_t *lines;
    uint8_t *halves;
    __mmask16 not_finite;
} panel_writer;

FKV_INLINE __m128i load_16_bytes(row_place rows, int row) {
    return _mm_loadu_si128((const __m128i *)(rows.at + (uint64_t)row * rows.stride));
}

/* Loads 16 bytes (four dwords) of each of the 16 rows and transposes them: lines[i] receives dword i of every row. */
FKV_INLINE void transpose_16_bytes(row_place rows, __m512i lines[4]) {
    __m512i a[4]; /* the 128-bit lanes of a[i] hold rows i, 4 + i, 8 + i and 12 + i */
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_castsi128_si512(load_16_bytes(rows, i));
        a[i] = _mm512_inserti32x4(a[i], load_16_bytes(rows, 4 + i), 1);
        a[i] = _mm512_inserti32x4(a[i], load_16_bytes(rows, 8 + i), 2);
        a[i] = _mm512_inserti32x4(a[i], load_16_bytes(rows, 12 + i), 3);
    }
    transpose_dwords(a, lines);
}

/* Loads 64 bytes (16 dwords) of each of the 16 rows and transposes them: lines[i] receives dword i of every row. */
FKV_INLINE void transpose_64_bytes(row_place rows, __m512i lines[16]) {
    __m512i a[16];
    __m512i b[16];
    FKV_UNROLL
    for (int i = 0; i < 16; i += 2) {
        __m512i even = _mm512_loadu_si512(rows.at + (uint64_t)i * rows.stride);
        __m512i odd = _mm512_loadu_si512(rows.at + (uint64_t)(i + 1) * rows.stride);
        a[i] = _mm512_unpacklo_epi32(even, odd);
        a[i + 1] = _mm512_unpackhi_epi32(even, odd);
    }
    FKV_UNROLL
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 * q + c] holds rows 4 * q to 4 * q + 3; its 128-bit lanes hold columns c, 4 + c, 8 + c and 12 + c */
    FKV_UNROLL
    for (int c = 0; c < 4; c++) {
        __m512i even_0 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);
        __m512i odd_0 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
        __m512i even_8 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        __m512i odd_8 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        lines[c] = _mm512_shuffle_i32x4(even_0, even_8, 0x88);
        lines[4 + c] = _mm512_shuffle_i32x4(odd_0, odd_8, 0x88);
        lines[8 + c] = _mm512_shuffle_i32x4(even_0, even_8, 0xdd);
        lines[12 + c] = _mm512_shuffle_i32x4(odd_0, odd_8, 0xdd);
    }
}

/* Loads one 16-bit value from each of the 16 rows. */
FKV_INLINE __m256i load_halves(row_place rows) {
    alignas(32) uint16_t halves[FKV_PANEL_ROWS];
    for (int i = 0; i < FKV_PANEL_ROWS; i++) memcpy(&halves[i], rows.at + (uint64_t)i * rows.stride, sizeof *halves);
    return _mm256_load_si256((const __m256i *)halves);
}

FKV_INLINE void write_line(panel_writer *w, __m512i line) {
    _mm512_store_si512(w->lines, line);
    w->lines += FKV_LINE_BYTES;
}

FKV_INLINE void write_halves(panel_writer *w, __m512 numbers) {
    const __m256i infinity = _mm256_set1_epi16(0x7c00);
    __m256i halves = _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT);
    w->not_finite |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(halves, infinity), infinity);
    _mm256_store_si256((__m256i *)w->halves, halves);
    w->halves += FKV_HALVES_BYTES;
}

/* Packs the 4-bit codes of 32 columns into four lines. In each row, these codes are the low (or high) nibbles of 32 bytes. */
FKV_INLINE void write_nibbles(panel_writer *w, const __m512i bytes[8], bool high) {
    const __m512i low_halves = _mm512_set1_epi32(0x0f0f0f0f);
    FKV_UNROLL
    for (int j = 0; j < 4; j++) {
        __m512i first = high ? _mm512_srli_epi32(bytes[j], 4) : bytes[j];
        __m512i second = high ? bytes[j + 4] : _mm512_slli_epi32(bytes[j + 4], 4);
        write_line(w, _mm512_ternarylogic_epi32(low_halves, first, second, 0xca)); /* bitwise select: mask ? first : second */
    }
}

FKV_INLINE __m512 byte_floats(__m512i dwords, int byte, bool is_signed) {
    __m512i top = _mm512_slli_epi32(dwords, (unsigned)(24 - 8 * byte));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_srai_epi32(top, 24) : _mm512_srli_epi32(top, 24));
}

FKV_INLINE row_place row_place_at(row_place block, uint64_t offset) { return (row_place){block.at + offset, block.stride}; }

/* ---- block formats ---- */

FKV_INLINE void fill_q4_k(row_place block, panel_writer *w) {
    const __m512i six = _mm512_set1_epi32(0x3f3f3f3f);
    const __m512i four = _mm512_set1_epi32(0x0f0f0f0f);
    const __m512i upper = _mm512_set1_epi32(0x30303030);
    __m512i head[4]; /* dwords of a block header: d and dmin, scales, minima, and the remaining bits of scales and minima */
    transpose_16_bytes(block, head);
    __m512 d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(head[0]));
    __m512 d_min = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(head[0], 16)));
    __m512i later = _mm512_and_si512(head[3], four);
    __m512i later_min = _mm512_and_si512(_mm512_srli_epi32(head[3], 4), four);
    __m512i scales[2] = {_mm512_and_si512(head[1], six),
                         _mm512_or_si512(later, _mm512_and_si512(_mm512_srli_epi32(head[1], 2), upper))};
    __m512i minima[2] = {_mm512_and_si512(head[2], six),
                         _mm512_or_si512(later_min, _mm512_and_si512(_mm512_srli_epi32(head[2], 2), upper))};
    FKV_UNROLL
    for (int g = 0; g < 8; g++) {
        __m512 min = _mm512_mul_ps(d_min, byte_floats(minima[g / 4], g % 4, false));
        write_halves(w, _mm512_mul_ps(d, byte_floats(scales[g / 4], g % 4, false)));
        write_halves(w, _mm512_xor_ps(min, _mm512_set1_ps(-0.0f)));
    }
    for (int part = 0; part < 2; part++) {
        __m512i bytes[16];
        transpose_64_bytes(row_place_at(block, 16 + 64 * (uint64_t)part), bytes);
        FKV_UNROLL
        for (int i = 0; i < 4; i++) write_nibbles(w, bytes + i / 2 * 8, i % 2 != 0);
    }
}

/* Packs the upper two bits of the codes of 32 columns into two lines. In each row, these are bits 2 * quarter and 2 * quarter + 1
 * of 32 bytes. */
FKV_INLINE void write_pairs(panel_writer *w, const __m512i bytes[8], int quarter) {
    FKV_UNROLL
    for (int line = 0; line < 2; line++) {
        __m512i all = _mm512_setzero_si512();
        FKV_UNROLL
        for (int i = 0; i < 4; i++) {
            __m512i mask = _mm512_set1_epi32((int)(0x03030303u << 2 * i));
            __m512i dwords = bytes[line * 4 + i];
            __m512i pair = i < quarter ? _mm512_srli_epi32(dwords, (unsigned)(2 * (quarter - i)))
                                       : _mm512_slli_epi32(dwords, (unsigned)(2 * (i - quarter)));
            all = _mm512_ternarylogic_epi32(all, pair, mask, 0xf8); /* bitwise: all | (pair & mask) */
        }
        write_line(w, all);
    }
}

FKV_INLINE void fill_q6_k(row_place block, panel_writer *w) {
    __m512i scales[4];
    __m512i pairs[16];
    transpose_16_bytes(row_place_at(block, 192), scales);
    transpose_64_bytes(row_place_at(block, 128), pairs);
    __m512 d = _mm512_cvtph_ps(load_halves(row_place_at(block, 208)));
    FKV_UNROLL
    for (int g = 0; g < 16; g++) write_halves(w, _mm512_mul_ps(d, byte_floats(scales[g / 4], g % 4, true)));
    for (int half = 0; half < 2; half++) {
        __m512i low[16];
        transpose_64_bytes(row_place_at(block, 64 * (uint64_t)half), low);
        FKV_UNROLL
        for (int quarter = 0; quarter < 4; quarter++) {
            write_nibbles(w, low + quarter % 2 * 8, quarter >= 2);
            write_pairs(w, pairs + half * 8, quarter);
        }
    }
}

/* Transposes 4-bit codes that are already in panel order, and writes them to the panel. */
FKV_INLINE void fill_16_bytes(row_place bytes, panel_writer *w) {
    __m512i lines[4];
    transpose_16_bytes(bytes, lines);
    FKV_UNROLL
    for (int j = 0; j < 4; j++) write_line(w, lines[j]);
}

FKV_INLINE void fill_q4_0(row_place block, panel_writer *w) {
    write_halves(w, _mm512_cvtph_ps(load_halves(block)));
    fill_16_bytes(row_place_at(block, 2), w);
}

FKV_INLINE void fill_q8_0(row_place block, panel_writer *w) {
    write_halves(w, _mm512_cvtph_ps(load_halves(block)));
    FKV_UNROLL
    for (int part = 0; part < 2; part++) {
        __m512i lines[4];
        transpose_16_bytes(row_place_at(block, 2 + 16 * (uint64_t)part), lines);
        FKV_UNROLL
        for (int j = 0; j < 4; j++) write_line(w, _mm512_xor_si512(lines[j], _mm512_set1_epi32((int)0x80808080)));
    }
}

/* The scale 2 ^ (e - 128) is a float whose biased exponent is e - 1. The exponent is clamped to at least 0; smaller scales would
 * be 0 in f16 anyway. */
FKV_INLINE void fill_mxfp4(row_place block, panel_writer *w) {
    const __m512i one = _mm512_set1_epi32(1);
    __m512i e = _mm512_and_si512(_mm512_cvtepu16_epi32(load_halves(block)), _mm512_set1_epi32(255));
    e = _mm512_sub_epi32(_mm512_max_epi32(e, one), one);
    write_halves(w, _mm512_castsi512_ps(_mm512_slli_epi32(e, 23)));
    fill_16_bytes(row_place_at(block, 1), w);
}

/* ---- dispatch by format ---- */

/* Prefetches the block with the given index in each of the next 16 rows. */
FKV_INLINE void prefetch_rows(const uint8_t *rows, uint64_t row_bytes, uint32_t block, uint32_t block_bytes) {
    const uint8_t *next = rows + FKV_PANEL_ROWS * (row_bytes + (uint64_t)block * block_bytes);
    for (uint32_t i = 0; i < FKV_PANEL_ROWS * block_bytes; i += 64) FKV_PREFETCH_FAR(next + i);
}

FKV_INLINE fkv_filled fill_blocks(fkv_matrix_kind kind, uint32_t block_cols, uint32_t block_bytes,
                                  void (*fill)(row_place block, panel_writer *w), const uint8_t *rows, uint64_t row_bytes,
                                  uint32_t n_cols, uint8_t *panel) {
    panel_writer w = {.lines = panel, .halves = panel + fkv_panel_code_bytes(fkv_panel_layout_of(kind), n_cols)};
    for (uint32_t block = 0; block < n_cols / block_cols; block++) {
        prefetch_rows(rows, row_bytes, block, block_bytes);
        fill((row_place){rows + (uint64_t)block * block_bytes, row_bytes}, &w);
    }
    return w.not_finite != 0 ? FKV_FILLED_NOT_FINITE : FKV_FILLED;
}

static fkv_filled fill_avx512_panel(fkv_row_form form, const uint8_t *rows, uint64_t row_bytes, uint32_t n_cols, uint8_t *panel) {
    switch (form) {
    case FKV_ROWS_Q4_0: return fill_blocks(FKV_MATRIX_CENTERED4, 32, 18, fill_q4_0, rows, row_bytes, n_cols, panel);
    case FKV_ROWS_Q8_0: return fill_blocks(FKV_MATRIX_CENTERED8, 32, 34, fill_q8_0, rows, row_bytes, n_cols, panel);
    case FKV_ROWS_Q4_K: return fill_blocks(FKV_MATRIX_AFFINE4, 256, 144, fill_q4_k, rows, row_bytes, n_cols, panel);
    case FKV_ROWS_Q6_K: return fill_blocks(FKV_MATRIX_CENTERED6_16, 256, 210, fill_q6_k, rows, row_bytes, n_cols, panel);
    case FKV_ROWS_MXFP4: return fill_blocks(FKV_MATRIX_TABLE4, 32, 17, fill_mxfp4, rows, row_bytes, n_cols, panel);
    default: return FKV_FILL_UNKNOWN;
    }
}

#endif
