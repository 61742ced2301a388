/* The kernels over plain C. */
#include "../../base/simd/vec_scalar.h"

#include "kernels_body.h"

FKV_KERNELS(scalar, kernel_prepare, kernel_scores, kernel_values);
