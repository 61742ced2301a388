/* Product kernels in portable C. */
#include "../../base/simd/vec_scalar.h"

#include "product_body.h"

const fkv_product_kernels fkv_product_scalar = {NULL, NULL, kernel_product, NULL};
