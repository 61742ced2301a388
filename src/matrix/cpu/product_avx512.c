/* Matrix-product kernels for AVX-512. */
#include "../../base/simd/vec_avx512.h"

#include "fill_avx512.h"
#include "product_body.h"

const fkv_product_kernels fkv_product_avx512 = {0, NULL, kernel_product, fill_avx512_panel};
