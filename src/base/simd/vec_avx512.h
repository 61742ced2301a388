/* Vector primitives for AVX-512 (F, BW, VL, DQ), with 16 floats per vector. The comments in this file also apply to the
 * primitives of the same name for the other instruction sets; see also kernels_body.h. */
#ifndef FKV_VEC_AVX512_H
#define FKV_VEC_AVX512_H

#include "../base.h"

#include <immintrin.h>

typedef __m512 vf;
enum { VL = 16, UNIT_VECS = 1, PREFILL_ROWS = 6, BLOCK_TOKENS = 4, CHUNK_UNITS = 4, PRODUCT_TOKENS = 8 };

FKV_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
FKV_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
FKV_INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
FKV_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
FKV_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
FKV_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
FKV_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
FKV_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
FKV_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
FKV_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
FKV_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FKV_INLINE vf vf_not_nan(vf a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a); }
FKV_INLINE vf vf_zero_below(vf x, vf limit, vf y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y); }
FKV_INLINE vf vf_if_below(vf x, vf limit, vf y, vf z) {
    return _mm512_mask_mov_ps(z, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), y);
}
FKV_INLINE vf vf_times_pow2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
FKV_INLINE float vf_reduce_add(vf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
FKV_INLINE float vf_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
FKV_INLINE float vf_reduce_min(vf a) { return _mm512_reduce_min_ps(a); }

/* Stores the sum of the lanes of a[i] to out[i], i < BLOCK_TOKENS. Transposes and adds the four vectors together, instead of
 * reducing each vector separately. */
FKV_INLINE void vf_sums(const vf a[BLOCK_TOKENS], float *out) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

/* Loads 16 half-precision values. */
FKV_INLINE void vf_load_f16(const uint8_t *p, vf out[UNIT_VECS]) {
    out[0] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
FKV_INLINE void vf_load_bf16(const uint8_t *p, vf out[UNIT_VECS]) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* Loads 16 dwords, shifts them right by `shift`, ANDs them with `mask`, and converts the results to floats. */
FKV_INLINE void vf_load_bits(const uint8_t *p, int shift, uint32_t mask, vf out[UNIT_VECS]) {
    __m512i dwords = _mm512_srli_epi32(_mm512_loadu_si512(p), (unsigned)shift);
    out[0] = _mm512_cvtepi32_ps(_mm512_and_si512(dwords, _mm512_set1_epi32((int)mask)));
}

/* Extracts byte `byte` (0 is the lowest) of each of 16 dwords as a signed integer and converts it to a float that is 2^24 times
 * too large. The caller multiplies the result by VF_BYTE_UNIT. */
static const float VF_BYTE_UNIT = 0x1p-24f;
FKV_INLINE void vf_load_byte(const uint8_t *p, int byte, vf out[UNIT_VECS]) {
    __m512i to_high =
        _mm512_set4_epi32(0x0c808080, 0x08808080, 0x04808080, 0x00808080); /* index 0x80 makes the shuffle produce a zero byte */
    to_high = _mm512_add_epi32(to_high, _mm512_set1_epi32(byte << 24));
    out[0] = _mm512_cvtepi32_ps(_mm512_shuffle_epi8(_mm512_loadu_si512(p), to_high));
}

/* Codebook of 16 values, which must be representable as bfloat16, because other instruction sets store the codebook in bfloat16.
 */
typedef vf vf_book16;
FKV_INLINE vf_book16 vf_book16_make(const float number[16]) { return vf_load(number); }

/* Looks up each byte of 16 dwords in the codebook. All bytes must be below 16. out[i] receives the codebook values for byte i of
 * each dword. */
FKV_INLINE void vf_look_up16(const vf_book16 *book, const uint8_t *p, vf out[4][UNIT_VECS]) {
    __m512i codes = _mm512_loadu_si512(p); /* vpermps uses the low 4 bits of each lane */
    FKV_UNROLL
    for (unsigned i = 0; i < 4; i++) out[i][0] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8 * i), *book);
}

/* Replaces each of 64 bytes, all below 16, with table[byte]. */
FKV_INLINE void vb_look_up(const uint8_t table[16], uint8_t *bytes) {
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    _mm512_storeu_si512(bytes, _mm512_shuffle_epi8(all, _mm512_loadu_si512(bytes)));
}

/* Extracts the four bits at `shift` (0 or 4) of each of 64 bytes and writes the table entries with these indices to out, which is
 * 64-byte aligned. */
FKV_INLINE void vf_look_up(const uint8_t table[16], const uint8_t *p, int shift, uint8_t out[64]) {
    __m512i codes = _mm512_and_si512(_mm512_srli_epi32(_mm512_loadu_si512(p), (unsigned)shift), _mm512_set1_epi8(15));
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    _mm512_store_si512(out, _mm512_shuffle_epi8(bytes, codes));
}

/* Parameters for decoding affine codes: value = scale * code + bias. For 4 and 2 bits, one register holds the decoded values of
 * all codes, so decoding is a table look-up. vpermps uses the low 4 bits of each lane and needs no mask; the 2-bit table repeats
 * every 4 entries. */
typedef struct vf_affine {
    vf scale; /* scale for 8 bits; look-up table for 4 and 2 bits */
    vf bias;
} vf_affine;

FKV_INLINE vf_affine vf_affine_make(int bits, float scale, float bias) {
    vf_affine a;
    a.scale = vf_set(scale);
    a.bias = vf_set(bias);
    if (bits == 4) a.scale = vf_fma(a.scale, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), a.bias);
    if (bits == 2) a.scale = vf_fma(a.scale, _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3), a.bias);
    return a;
}

/* Decodes 16 values from 2 * bits bytes of codes. */
FKV_INLINE void vf_decode(int bits, const uint8_t *codes, vf_affine a, vf out[UNIT_VECS]) {
    if (bits == 8) {
        __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
        out[0] = vf_fma(_mm512_cvtepi32_ps(c), a.scale, a.bias);
    } else if (bits == 4) {
        __m512i words = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)codes));
        words = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), words);
        words = _mm512_srlv_epi32(words, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
        out[0] = _mm512_permutexvar_ps(words, a.scale);
    } else {
        int32_t word;
        memcpy(&word, codes, sizeof word);
        __m512i words = _mm512_srlv_epi32(_mm512_set1_epi32(word),
                                          _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
        out[0] = _mm512_permutexvar_ps(words, a.scale);
    }
}

/* Multiplies 16 codebook values by a scale. A 4-bit codebook fills all 16 entries. A 2-bit codebook has 4 values, which are
 * stored four times. A 3-bit codebook is split into its lower and upper four values; each half is stored four times in its own
 * table.
 */
FKV_INLINE vf vf_book_values(__m128i bytes, float scale) {
    return vf_mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), vf_set(scale));
}

FKV_INLINE vf_affine vf_book_make(int bits, const int8_t value[16], float scale) {
    __m128i book = _mm_loadu_si128((const __m128i *)value);
    vf_affine a;
    if (bits == 3) {
        a.scale = vf_book_values(_mm_shuffle_epi32(book, 0), scale);
        a.bias = vf_book_values(_mm_shuffle_epi32(book, 0x55), scale);
    } else {
        a.scale = a.bias = vf_book_values(book, scale);
    }
    return a;
}

/* Decodes 16 codes with a codebook. `plane` points to the highest bits of 3-bit codes, which are stored separately. */
FKV_INLINE void vf_book(int bits, const int8_t value[16], const uint8_t *codes, const uint8_t *plane, vf_affine a,
                        vf out[UNIT_VECS]) {
    (void)value;
    vf_decode(bits == 3 ? 2 : bits, codes, a, out);
    if (bits != 3) return;
    uint16_t high;
    int32_t word;
    memcpy(&high, plane, sizeof high);
    memcpy(&word, codes, sizeof word);
    __m512i words =
        _mm512_srlv_epi32(_mm512_set1_epi32(word), _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
    out[0] = _mm512_mask_permutexvar_ps(out[0], high, words, a.bias);
}

/* Stores 16 integers in 0..255 as bytes. */
FKV_INLINE void vf_store_u8(const vf a[UNIT_VECS], uint8_t *p) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a[0])));
}

/* Transposes 4x4 dwords within each 128-bit lane: dword k of to[i] is dword i of from[k]. */
FKV_INLINE void transpose_dwords(const __m512i from[4], __m512i to[4]) {
    __m512i low01 = _mm512_unpacklo_epi32(from[0], from[1]);
    __m512i high01 = _mm512_unpackhi_epi32(from[0], from[1]);
    __m512i low23 = _mm512_unpacklo_epi32(from[2], from[3]);
    __m512i high23 = _mm512_unpackhi_epi32(from[2], from[3]);
    to[0] = _mm512_unpacklo_epi64(low01, low23);
    to[1] = _mm512_unpackhi_epi64(low01, low23);
    to[2] = _mm512_unpacklo_epi64(high01, high23);
    to[3] = _mm512_unpackhi_epi64(high01, high23);
}

#endif
