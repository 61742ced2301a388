/* The kernels over AVX-512. */
#include "vec_avx512.h"

#include "kernels_body.h"
#include "product_body.h"

FKV_KERNELS(avx512, kernel_prepare, kernel_scores, kernel_values, NULL, kernel_product);
