/* The kernels over AVX2. */
#include "vec_avx2.h"

#include "kernels_body.h"
#include "product_body.h"

FKV_KERNELS(avx2, kernel_prepare, kernel_scores, kernel_values, NULL, kernel_product);
