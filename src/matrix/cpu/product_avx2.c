/* Matrix-product kernels for AVX2. */
#include "../../base/simd/vec_avx2.h"

#include "product_body.h"

const fkv_product_kernels fkv_product_avx2 = {0, NULL, kernel_product, NULL};
