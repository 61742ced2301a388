/* Attention kernels for AVX2. */
#include "../../base/simd/vec_avx2.h"

#include "kernels_body.h"

FLOAT_KERNELS(avx2);
