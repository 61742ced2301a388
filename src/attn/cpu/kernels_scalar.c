/* Attention kernels in portable C. */
#include "../../base/simd/vec_scalar.h"

#include "kernels_body.h"

FLOAT_KERNELS(scalar);
