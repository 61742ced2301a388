/* Integer dot products for the attention and matrix-product kernels. A float operand is rounded to an integer and split into two
 * signed bytes, which are multiplied by unsigned codes. Each of the 16 lanes processes one row of codes (a key or a weight
 * row), four codes at a time. These four codes fill a dword and are called a quad. Requires VNNI. */
#ifndef FKV_QUADS_AVX512_H
#define FKV_QUADS_AVX512_H

#include "vec_avx512.h"

enum { UNIT_NUMBERS = 32, UNIT_QUADS = UNIT_NUMBERS / 4 }; /* a unit consists of 32 consecutive values of a row */

/* Values x are divided by a quantization step and rounded. LARGEST is the largest magnitude of the result: 127 * 256. A row whose
 * magnitudes are all below SMALLEST is treated as 0, because the reciprocal of its step would overflow. */
static const float LARGEST = 32512.0f;
static const float SMALLEST = 1e-30f;

typedef struct bytes2 {
    __m128i high;
    __m128i low;
} bytes2;

/* Splits 16 integers of magnitude up to LARGEST into signed high and low bytes. */
FKV_INLINE bytes2 split_bytes(__m512i x) {
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
    return (bytes2){_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low)};
}

FKV_INLINE __m512i join_bytes(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

FKV_INLINE int32_t dword(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* dot_quad() adds, in each lane, the dot product of four unsigned codes with four signed bytes. dot_quad_with() reads the four
 * bytes from memory and uses them in all lanes. gcc 12 copies each accumulator of the intrinsic before and after the instruction
 * and does not use the broadcasting form, so it emits up to four instructions instead of one. With gcc, these functions therefore
 * use inline assembly. */
#ifdef __clang__
FKV_INLINE __m512i dot_quad(__m512i sum, __m512i codes, __m512i bytes) { return _mm512_dpbusd_epi32(sum, codes, bytes); }
FKV_INLINE __m512i dot_quad_with(__m512i sum, __m512i codes, const int8_t *bytes) {
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(dword(bytes)));
}
#else
FKV_INLINE __m512i dot_quad(__m512i sum, __m512i codes, __m512i bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "vm"(bytes));
    return sum;
}
FKV_INLINE __m512i dot_quad_with(__m512i sum, __m512i codes, const int8_t *bytes) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int8_t(*)[4])bytes));
    return sum;
}
#endif

/* Computes the dot products of 16 rows of codes with each of the vectors bytes[i], i < n_sums, over n_quads quads. Adds the
 * products of even quads to even[i] and of odd quads to odd[i], with row r in lane r. The counts are compile-time constants.
 * Additions to one register form a dependency chain. Callers with few accumulators therefore pass different arrays for even and
 * odd quads. All other callers pass the same array twice. The order of additions does not matter, because integer sums are exact.
 */
FKV_INLINE void dot_quads(int n_sums, int n_quads, const __m512i *quads, const int8_t *const *bytes, __m512i *even,
                          __m512i *odd) {
    FKV_UNROLL
    for (int j = 0; j < n_quads; j++) {
        __m512i *sums = j % 2 == 0 ? even : odd;
        FKV_UNROLL
        for (int i = 0; i < n_sums; i++) sums[i] = dot_quad_with(sums[i], quads[j], bytes[i] + 4 * j);
    }
}

/* Splits bytes that hold two 4-bit codes: the low nibbles go to quads[0..n) and the high nibbles to quads[n..2n). */
FKV_INLINE void split_halves(int n, __m512i *quads) {
    __m512i half = _mm512_set1_epi8(15);
    FKV_UNROLL
    for (int j = 0; j < n; j++) {
        quads[n + j] = _mm512_and_si512(_mm512_srli_epi16(quads[j], 4), half);
        quads[j] = _mm512_and_si512(quads[j], half);
    }
}

#endif
