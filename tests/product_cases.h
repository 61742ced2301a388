/* Matrices for which the kernel for products with quantized weights is tested. make_kernel_sources writes the kernel source for
 * each matrix, and parity_products runs the kernel on the host. */
#ifndef PRODUCT_CASES_H
#define PRODUCT_CASES_H

#include "../src/attn/gpu/product_source.h"

typedef struct product_case {
    uint32_t bits;
    uint32_t group;
    fkv_type rows;
    fkv_type scales;
    uint32_t n_columns;
    uint32_t n_outputs;
} product_case;

/* All widths, groups and types. Most numbers of outputs do not fill the last block. The longest rows exceed the chunks that the
 * warps of a block load in advance; the others give some warps no chunk. */
static const product_case product_cases[] = {
    {4, 32, FKV_F16, FKV_F16, 768, 37},    {4, 64, FKV_BF16, FKV_BF16, 4864, 20}, {4, 128, FKV_BF16, FKV_BF16, 1024, 16},
    {8, 32, FKV_BF16, FKV_BF16, 2560, 20}, {8, 64, FKV_F16, FKV_F16, 256, 33},    {8, 128, FKV_F16, FKV_F16, 384, 8},
    {4, 64, FKV_F16, FKV_F16, 128, 16},    {4, 128, FKV_F16, FKV_F16, 640, 40},   {4, 32, FKV_F32, FKV_F16, 512, 20},
    {4, 64, FKV_F32, FKV_BF16, 2432, 17},  {8, 32, FKV_F32, FKV_F32, 512, 20},    {8, 64, FKV_F32, FKV_F16, 640, 9},
};
enum { N_PRODUCT_CASES = sizeof product_cases / sizeof product_cases[0] };

#endif
