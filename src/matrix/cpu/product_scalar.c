/* Matrix-product kernels in portable C. */
#include "../../base/simd/vec_scalar.h"

/* Disables unrolling: unrolled columns do not speed up portable code, and they take 40 s to compile. */
#undef FKV_UNROLL
#define FKV_UNROLL
#include "product_body.h"

const fkv_product_kernels fkv_product_scalar = {0, NULL, kernel_product, NULL};
