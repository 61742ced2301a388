/* The kernels over NEON. */
#include "vec_neon.h"

#include "kernels_body.h"
#include "product_body.h"

FKV_KERNELS(neon, kernel_prepare, kernel_scores, kernel_values, NULL, kernel_product);
