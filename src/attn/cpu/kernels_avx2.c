/* The kernels over AVX2. */
#include "../../base/simd/vec_avx2.h"

#include "kernels_body.h"

FKV_KERNELS(avx2, kernel_prepare, kernel_scores, kernel_values);
