/* Matrix-product kernels for NEON. */
#include "../../base/simd/vec_neon.h"

#include "product_body.h"

const fkv_product_kernels fkv_product_neon = {0, NULL, kernel_product, NULL};
