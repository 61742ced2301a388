/* The kernels over plain C. */
#include "vec_plain.h"

#include "kernels_body.h"

FKV_KERNELS(plain);
