/* What the integer kernels of attention and of the model's products share: floats as whole numbers in two signed bytes, and the
 * dot product of codes with them. The lanes are 16 rows of codes (keys, or rows of weights); four codes of a row (a quad) are one
 * dword of its lane. In files compiled with VNNI.
 */
#ifndef FKV_QUADS_AVX512_H
#define FKV_QUADS_AVX512_H

#include "vec_avx512.h"

enum { UNIT_NUMBERS = 32, UNIT_QUADS = UNIT_NUMBERS / 4 }; /* along a row */

/* The largest |x| / step: 127 * 256. Numbers all below SMALLEST count as 0: their step would be no float's inverse. */
static const float LARGEST = 32512.0f;
static const float SMALLEST = 1e-30f;

typedef struct bytes2 {
    __m128i high;
    __m128i low;
} bytes2;

/* 16 whole numbers of at most LARGEST to high and low bytes, both signed. */
FKV_INLINE bytes2 split(__m512i x) {
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
    return (bytes2){_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low)};
}

FKV_INLINE __m512i join(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

FKV_INLINE int32_t dword(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* even[i] + odd[i] += in lane r the codes of row r times bytes[i], over n_quads quads. Counts are constants. Sums are exact, so
 * in any order; each is a chain of its own, and a caller with few of them gives odd quads their own, too (odd may be even). */
FKV_INLINE void dot_quads(int n_sums, int n_quads, const __m512i *quads, const int8_t *const *bytes, __m512i *even,
                          __m512i *odd) {
    FKV_UNROLL
    for (int j = 0; j < n_quads; j++) {
        __m512i *sums = j % 2 == 0 ? even : odd;
        FKV_UNROLL
        for (int i = 0; i < n_sums; i++)
            sums[i] = _mm512_dpbusd_epi32(sums[i], quads[j], _mm512_set1_epi32(dword(bytes[i] + 4 * j)));
    }
}

/* Bytes of two codes of 4 bits: the low halves to quads[0..n), the high ones to quads[n..2n). */
FKV_INLINE void split_halves(int n, __m512i *quads) {
    __m512i half = _mm512_set1_epi8(15);
    FKV_UNROLL
    for (int j = 0; j < n; j++) {
        quads[n + j] = _mm512_and_si512(_mm512_srli_epi16(quads[j], 4), half);
        quads[j] = _mm512_and_si512(quads[j], half);
    }
}

#endif
