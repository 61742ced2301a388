/* The kernels over AVX-512. */
#include "../../base/simd/vec_avx512.h"

#include "kernels_body.h"

FKV_KERNELS(avx512, kernel_prepare, kernel_scores, kernel_values);
