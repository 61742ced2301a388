/* The kernels of kernels.h over AVX-512 with VNNI. */
#include "kernels_vnni.h"

FKV_KERNELS(avx512vnni, int_prepare, int_scores, int_values, int_prepare_tokens, int_product);
