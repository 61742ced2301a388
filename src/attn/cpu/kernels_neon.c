/* The kernels over NEON. */
#include "../../base/simd/vec_neon.h"

#include "kernels_body.h"

FKV_KERNELS(neon, kernel_prepare, kernel_scores, kernel_values);
