/* Vector primitives for AVX2 with FMA and F16C, with 8 floats per vector. kernels_body.h and vec_avx512.h document the functions.
 */
#ifndef FKV_VEC_AVX2_H
#define FKV_VEC_AVX2_H

#include "../base.h"

#include <immintrin.h>

typedef __m256 vf;
enum { VL = 8, UNIT_VECS = 2, PREFILL_ROWS = 2, BLOCK_TOKENS = 2, CHUNK_UNITS = 2, PRODUCT_TOKENS = 2 };

FKV_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
FKV_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
FKV_INLINE vf vf_set(float x) { return _mm256_set1_ps(x); }
FKV_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
FKV_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
FKV_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
FKV_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
FKV_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
FKV_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
FKV_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
FKV_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FKV_INLINE vf vf_not_nan(vf a) { return _mm256_and_ps(a, _mm256_cmp_ps(a, a, _CMP_ORD_Q)); }
FKV_INLINE vf vf_zero_below(vf x, vf limit, vf y) { return _mm256_and_ps(y, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ)); }
FKV_INLINE vf vf_if_below(vf x, vf limit, vf y, vf z) { return _mm256_blendv_ps(z, y, _mm256_cmp_ps(x, limit, _CMP_LT_OQ)); }
FKV_INLINE vf vf_times_pow2(vf a, vf n) {
    return vf_mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
FKV_INLINE float vf_reduce_add(vf a) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
FKV_INLINE float vf_reduce_max(vf a) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
FKV_INLINE float vf_reduce_min(vf a) {
    __m128 q = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_min_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_min_ss(q, _mm_movehdup_ps(q)));
}

FKV_INLINE void vf_sums(const vf a[BLOCK_TOKENS], float *out) {
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(ab), _mm256_extractf128_ps(ab, 1));
    _mm_storel_pi((__m64 *)(void *)out, _mm_add_ps(half, _mm_movehl_ps(half, half)));
}

FKV_INLINE void vf_load_f16(const uint8_t *p, vf out[UNIT_VECS]) {
    out[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    out[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)));
}
FKV_INLINE vf bf16_widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
FKV_INLINE void vf_load_bf16(const uint8_t *p, vf out[UNIT_VECS]) {
    out[0] = bf16_widen(_mm_loadu_si128((const __m128i *)p));
    out[1] = bf16_widen(_mm_loadu_si128((const __m128i *)(p + 16)));
}

FKV_INLINE void vf_load_bits(const uint8_t *p, int shift, uint32_t mask, vf out[UNIT_VECS]) {
    for (int i = 0; i < UNIT_VECS; i++) {
        __m256i dwords = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(p + 32 * i)), shift);
        out[i] = _mm256_cvtepi32_ps(_mm256_and_si256(dwords, _mm256_set1_epi32((int)mask)));
    }
}

static const float VF_BYTE_UNIT = 0x1p-24f;
FKV_INLINE void vf_load_byte(const uint8_t *p, int byte, vf out[UNIT_VECS]) {
    __m128i lane =
        _mm_setr_epi32(0x00808080, 0x04808080, 0x08808080, 0x0c808080); /* index 0x80 makes the shuffle produce a zero byte */
    __m256i to_high = _mm256_broadcastsi128_si256(_mm_add_epi32(lane, _mm_set1_epi32(byte << 24)));
    for (int i = 0; i < UNIT_VECS; i++)
        out[i] = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)(p + 32 * i)), to_high));
}

/* Codebook of 16 bfloat16 values, stored as separate low and high bytes. */
typedef struct vf_book16 {
    __m256i low;
    __m256i high;
} vf_book16;

FKV_INLINE vf_book16 vf_book16_make(const float number[16]) {
    __m256i first = _mm256_srli_epi32(_mm256_castps_si256(vf_load(number)), 16);
    __m256i second = _mm256_srli_epi32(_mm256_castps_si256(vf_load(number + 8)), 16);
    __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(halves, _mm256_set1_epi16(255)), _mm256_srli_epi16(halves, 8));
    return (vf_book16){_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xdd)};
}

FKV_INLINE void vf_look_up16(const vf_book16 *book, const uint8_t *p, vf out[4][UNIT_VECS]) {
    const __m256i pairs = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    for (int i = 0; i < UNIT_VECS; i++) {
        __m256i codes = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)(p + 32 * i)), pairs);
        __m256i low = _mm256_shuffle_epi8(book->low, codes);
        __m256i high = _mm256_shuffle_epi8(book->high, codes);
        __m256i first = _mm256_unpacklo_epi8(low, high); /* codebook values for bytes 0 and 1 of each dword */
        __m256i second = _mm256_unpackhi_epi8(low, high);
        out[0][i] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
        out[1][i] = _mm256_castsi256_ps(_mm256_and_si256(first, upper));
        out[2][i] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
        out[3][i] = _mm256_castsi256_ps(_mm256_and_si256(second, upper));
    }
}

/* Replaces each of 64 bytes, all below 16, with table[byte]. */
FKV_INLINE void vb_look_up(const uint8_t table[16], uint8_t *bytes) {
    __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    for (int i = 0; i < 2; i++) {
        __m256i *at = (__m256i *)(bytes + 32 * i);
        _mm256_storeu_si256(at, _mm256_shuffle_epi8(all, _mm256_loadu_si256(at)));
    }
}

FKV_INLINE void vf_look_up(const uint8_t table[16], const uint8_t *p, int shift, uint8_t out[64]) {
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    for (int i = 0; i < 2; i++) {
        __m256i codes = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(p + 32 * i)), shift);
        codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        _mm256_store_si256((__m256i *)(out + 32 * i), _mm256_shuffle_epi8(bytes, codes));
    }
}

typedef struct vf_affine {
    vf scale;
    vf bias;
} vf_affine;

FKV_INLINE vf_affine vf_affine_make(int bits, float scale, float bias) {
    (void)bits;
    return (vf_affine){vf_set(scale), vf_set(bias)};
}

FKV_INLINE void vf_decode(int bits, const uint8_t *codes, vf_affine a, vf out[UNIT_VECS]) {
    for (int i = 0; i < UNIT_VECS; i++) {
        __m256i c;
        if (bits == 8) {
            c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * i)));
        } else if (bits == 4) {
            int32_t word;
            memcpy(&word, codes + 4 * i, sizeof word);
            c = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            c = _mm256_and_si256(c, _mm256_set1_epi32(15));
        } else {
            int32_t word;
            memcpy(&word, codes, sizeof word);
            int s = 16 * i;
            c = _mm256_srlv_epi32(_mm256_set1_epi32(word),
                                  _mm256_setr_epi32(s, s + 2, s + 4, s + 6, s + 8, s + 10, s + 12, s + 14));
            c = _mm256_and_si256(c, _mm256_set1_epi32(3));
        }
        out[i] = vf_fma(_mm256_cvtepi32_ps(c), a.scale, a.bias);
    }
}

/* Multiplies eight codebook values by a scale. vpermps uses the low three bits of each lane as the index; the four values of a
 * 2-bit codebook are therefore stored twice. */
FKV_INLINE vf vf_book_half(const int8_t *value, float scale) {
    return vf_mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)value))), vf_set(scale));
}

FKV_INLINE vf_affine vf_book_make(int bits, const int8_t value[16], float scale) {
    vf_affine a;
    a.scale = vf_book_half(value, scale);
    a.bias = bits == 4 ? vf_book_half(value + 8, scale) : a.scale; /* upper half */
    return a;
}

FKV_INLINE void vf_book(int bits, const int8_t value[16], const uint8_t *codes, const uint8_t *plane, vf_affine a,
                        vf out[UNIT_VECS]) {
    (void)value;
    int32_t word = 0;
    uint16_t high = 0;
    if (bits != 4) memcpy(&word, codes, sizeof word);
    if (bits == 3) memcpy(&high, plane, sizeof high);
    for (int i = 0; i < UNIT_VECS; i++) {
        if (bits == 4) {
            memcpy(&word, codes + 4 * i, sizeof word);
            __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(c, 28));
            out[i] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(a.scale, c), _mm256_permutevar8x32_ps(a.bias, c), upper);
            continue;
        }
        int s = 16 * i;
        __m256i c =
            _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(s, s + 2, s + 4, s + 6, s + 8, s + 10, s + 12, s + 14));
        if (bits == 3) {
            __m256i bit = _mm256_sllv_epi32(_mm256_set1_epi32(high >> 8 * i), _mm256_setr_epi32(2, 1, 0, 0, 0, 0, 0, 0));
            bit = _mm256_srlv_epi32(bit, _mm256_setr_epi32(0, 0, 0, 1, 2, 3, 4, 5));
            c = _mm256_or_si256(_mm256_and_si256(c, _mm256_set1_epi32(3)), _mm256_and_si256(bit, _mm256_set1_epi32(4)));
        }
        out[i] = _mm256_permutevar8x32_ps(a.scale, c);
    }
}

FKV_INLINE void vf_store_u8(const vf a[UNIT_VECS], uint8_t *p) {
    /* vpackssdw works within 128-bit lanes, which leaves the elements in the order 0-3, 8-11, 4-7, 12-15 */
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1]));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#endif
