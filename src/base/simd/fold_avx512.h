/* Horizontal reductions of several AVX-512 registers at once. */
#ifndef FKV_FOLD_AVX512_H
#define FKV_FOLD_AVX512_H

#include "vec_avx512.h"

/* Sum and maximum of floats, sum of 32-bit integers, and maximum of unsigned 32-bit integers. */
typedef enum fold { FOLD_SUM, FOLD_INT_SUM, FOLD_MAX, FOLD_UINT_MAX } fold;

FKV_INLINE vf fold_two(fold how, vf a, vf b) {
    if (how == FOLD_SUM) return vf_add(a, b);
    if (how == FOLD_MAX) return vf_max(a, b);
    if (how == FOLD_UINT_MAX) return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

FKV_INLINE vf fold_pairs(fold how, vf x, vf y) {
    __m512d a = _mm512_castps_pd(x);
    __m512d b = _mm512_castps_pd(y);
    return fold_two(how, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

/* Reduces each of the n registers x[r] over its lanes and returns the results in lanes 0 to n - 1. Lanes 8 apart are combined
 * first, then lanes 4, 2 and 1 apart, as in vf_reduce_add(). n is a compile-time constant: 4, 8 or 16. Overwrites x. */
FKV_INLINE vf fold_rows(fold how, int n, vf *x) {
    FKV_UNROLL
    for (int i = 0; i < n / 2; i++) {
        vf a = x[2 * i];
        vf b = x[2 * i + 1];
        x[i] = fold_two(how, _mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    FKV_UNROLL
    for (int i = 0; i < n / 4; i++) {
        vf a = x[2 * i];
        vf b = x[2 * i + 1];
        x[i] = fold_two(how, _mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    if (n == 4) x[1] = x[0];
    x[0] = fold_pairs(how, x[0], x[1]);
    if (n == 16) x[1] = fold_pairs(how, x[2], x[3]);
    vf last = n == 16 ? x[1] : x[0];
    vf all = fold_two(how, _mm512_shuffle_ps(x[0], last, 0x88), _mm512_shuffle_ps(x[0], last, 0xdd));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
}

#endif
