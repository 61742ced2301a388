/* Attention kernels for AVX-512. */
#include "../../base/simd/vec_avx512.h"

#include "kernels_body.h"

FLOAT_KERNELS(avx512);
