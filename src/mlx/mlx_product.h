/* Products of a few rows with a quantized matrix. On CUDA, up to FKV_AFFINE_PRODUCT_ROWS rows are multiplied by flatkv's own
 * kernel (src/attn/gpu/product_source.h), which reads weights several times faster than MLX's kernel. All other products use
 * MLX's quantized_matmul. The two differ only by rounding.
 */
#ifndef FKV_MLX_PRODUCT_H
#define FKV_MLX_PRODUCT_H

#include "../attn/gpu/product_source.h"
#include "mlx_kernel.h"

enum { FKV_MLX_PRODUCT_KERNELS = 32 };

/* Kernels of the matrix shapes in use. Initialize with zeros. */
typedef struct fkv_mlx_products {
    bool checked; /* on_cuda is valid */
    bool on_cuda;
    uint32_t n; /* number of kernels; further shapes replace the oldest kernel */
    uint32_t next;
    struct {
        fkv_affine_product product;
        uint32_t n_outputs;
        fkv_mlx_kernel kernel;
    } of[FKV_MLX_PRODUCT_KERNELS];
} fkv_mlx_products;

/* Returns x * w^T. x: [..., n_columns] with at most 4 dimensions. All graphs that are used with `products` have the same device.
 */
FKV_INTERNAL mlx_array fkv_mlx_product(fkv_mlx_products *products, fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w);
FKV_INTERNAL void fkv_mlx_products_close(fkv_mlx_products *products);

/* Converts a type of MLX. Returns false if it is not a type of rows. */
bool fkv_mlx_row_type(mlx_dtype type, fkv_type *out);

/* Creates the kernel for a matrix. */
fkv_status fkv_mlx_product_open(const fkv_affine_product *product, fkv_mlx_kernel *kernel);

#endif
