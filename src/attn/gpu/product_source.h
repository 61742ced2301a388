/* Source code of the CUDA kernel that multiplies a few rows by a quantized matrix (cuda/affine_product.h), and of its host
 * emulation for tests. This file depends neither on MLX nor on a GPU.
 *
 * Inputs: x [n_rows, n_columns]; codes [n_outputs, n_columns * bits / 32] 32-bit words; scales, biases [n_outputs, n_columns /
 * group]. Output: out [n_rows, n_outputs], in the type of x. On CUDA, x may have any number of dimensions. The kernel gets the
 * sizes from the shapes of x and codes, which MLX passes to it. The launch has fkv_affine_product_blocks() blocks of 32 * warps
 * threads.
 */
#ifndef FKV_PRODUCT_SOURCE_H
#define FKV_PRODUCT_SOURCE_H

#include "kernel_source.h"

enum { FKV_AFFINE_PRODUCT_ROWS = 8 }; /* maximum number of rows */

typedef struct fkv_affine_product {
    uint32_t bits;
    uint32_t group;
    fkv_type row_type;   /* type of x and out */
    fkv_type scale_type; /* type of scales and biases */
    uint32_t tiles;      /* a block computes 16 * tiles outputs */
    uint32_t warps;      /* warps per block */
    uint32_t stages;     /* number of chunks that a warp loads in advance */
    uint32_t blocks;     /* number of blocks that should be resident on a multiprocessor */
    uint32_t chunk;      /* number of columns per chunk; must divide n_columns */
} fkv_affine_product;

/* Chooses the kernel parameters for a matrix. Returns false if there is no kernel for the matrix. The number of columns must be a
 * multiple of 128. The parameters do not depend on the number of rows, so that a row has the same result in every batch. */
FKV_INTERNAL bool fkv_affine_product_describe(uint32_t bits, uint32_t group, fkv_type row_type, fkv_type scale_type,
                                              uint32_t n_columns, uint32_t n_outputs, fkv_affine_product *product);

FKV_INLINE uint32_t fkv_affine_product_blocks(const fkv_affine_product *product, uint32_t n_outputs) {
    return fkv_ceil_div(n_outputs, 16 * product->tiles);
}

/* Writes the part of the source that precedes the kernel. Like snprintf(), writes as much as fits and returns the full length. */
FKV_INTERNAL size_t fkv_affine_product_header(fkv_kernel_device device, const fkv_affine_product *product, char *text,
                                              size_t size);

/* Returns the body of the kernel. */
FKV_INTERNAL const char *fkv_affine_product_body(fkv_kernel_device device);

/* The next two functions return the names of the inputs and outputs, as an array terminated by NULL. */
FKV_INTERNAL const char *const *fkv_affine_product_inputs(void);
FKV_INTERNAL const char *const *fkv_affine_product_outputs(void);

#endif
