/* Attention kernels for NEON. */
#include "../../base/simd/vec_neon.h"

#include "kernels_body.h"

FLOAT_KERNELS(neon);
