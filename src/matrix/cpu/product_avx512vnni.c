/* Matrix-product kernels for AVX-512 with VNNI. */
#include "product_vnni.h"

#include "fill_avx512.h"

const fkv_product_kernels fkv_product_avx512vnni = {0, int_prepare, int_product, fill_avx512_panel};
