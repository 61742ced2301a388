/* The kernels over plain C. */
#include "vec_scalar.h"

#include "kernels_body.h"
#include "product_body.h"

FKV_KERNELS(scalar, kernel_prepare, kernel_scores, kernel_values, NULL, kernel_product);
