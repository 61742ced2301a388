/* One forward pass on MLX: its state, and the operations that several kinds of layers use. All operations are lazy, and the graph
 * of the pass owns their results.
 *
 * The residual stream and all values between two matrix products are f32. Products with half-precision matrices, and on a GPU
 * also products with quantized matrices, take f16 rows, accumulate in f32 and return f16. Normalized rows fit the range of f16.
 * Other rows may exceed that range. Each of them is therefore divided by its largest magnitude before the product.
 */
#ifndef FKV_ARRAY_PASS_H
#define FKV_ARRAY_PASS_H

#include "array_runner.h"
#include "model_ops.h"

#include <flatkv/mlx.h>

typedef struct fkv_array_pass {
    fkv_runner *r;
    fkv_mlx_graph *g;
    fkv_step *step;
    const fkv_array_layer *layer;
    const fkv_layer_shape *shape; /* shape of the current layer */
    uint32_t index;
    int n_pairs;
    mlx_array angles;       /* RoPE factors, complex [T, 1, n_pairs, 1]; empty if the layer has no RoPE */
    mlx_array inputs;       /* per-layer inputs [T, n_layers, input_dim]; empty if the model has none */
    mlx_array temperatures; /* query temperature [T, 1, 1]; empty means 1 */
    int n_rows; /* number of rows: T; after the mixers of the last layer, the number of rows whose logits are requested */
} fkv_array_pass;

/* The same activation rows in f32 and in f16, for matrix products of both types. MLX does not evaluate an array that no product
 * uses. */
typedef struct fkv_array_rows {
    mlx_array full;
    mlx_array half;
} fkv_array_rows;

/* ---- products and norms (array_pass.c) ---- */

FKV_INLINE bool fkv_array_has(const fkv_array_matrix *m) { return m->halves.ctx != NULL || m->affine.codes.ctx != NULL; }

fkv_array_rows fkv_array_row_slice(const fkv_array_pass *p, mlx_array x);

/* Multiply rows by a matrix: [T, C] -> [T, R], f32. fkv_array_product_of_large() accepts rows whose values exceed the range of
 * f16. fkv_array_product_of_input() takes the input rows of a layer, which are normalized unless the model has no pre-norm. */
mlx_array fkv_array_product(const fkv_array_pass *p, fkv_array_rows x, const fkv_array_matrix *m);
mlx_array fkv_array_product_of_large(const fkv_array_pass *p, mlx_array x, const fkv_array_matrix *m);
mlx_array fkv_array_product_of_input(const fkv_array_pass *p, fkv_array_rows x, const fkv_array_matrix *m);

/* Multiplies the rows of each head by the head's matrix: [T, H, C] and [H, C, R] -> [T, H, R], f32. */
mlx_array fkv_array_product_of_heads(const fkv_array_pass *p, mlx_array x, mlx_array matrices);

/* Adds a vector to every row. Returns x if the vector is empty. */
mlx_array fkv_array_plus(const fkv_array_pass *p, mlx_array x, mlx_array vector);

/* Normalize the rows of x; fkv_array_norm() uses the norm of the model (RMS or layer norm). Both return x if the weight is
 * empty. */
mlx_array fkv_array_rms_norm(const fkv_array_pass *p, mlx_array x, mlx_array weight);
mlx_array fkv_array_norm(const fkv_array_pass *p, mlx_array x, mlx_array weight, mlx_array bias);
mlx_array fkv_array_number(const fkv_array_pass *p, float value);

/* Returns channels [from, to) of rows: [T, n] -> [T, to - from]. */
mlx_array fkv_array_channels(const fkv_array_pass *p, mlx_array rows, uint32_t from, uint32_t to);

/* Applies RoPE to heads: [T, n_heads, dim]. */
mlx_array fkv_array_rotate(const fkv_array_pass *p, mlx_array heads, int n_heads, uint32_t dim);

/* ---- feed-forward blocks (array_ffn.c) ---- */

mlx_array fkv_array_activation(const fkv_array_pass *p, mlx_array x);
mlx_array fkv_array_ffn(const fkv_array_pass *p, mlx_array x);     /* a dense feed-forward block */
mlx_array fkv_array_mixture(const fkv_array_pass *p, mlx_array x); /* the routed experts plus the shared expert */

/* Computes the experts and a dense feed-forward block in parallel. The router, and the inputs and outputs of both branches, have
 * separate norms. */
mlx_array fkv_array_parallel_experts(const fkv_array_pass *p, mlx_array x);

/* ---- recurrent layers (array_recurrent.c) ---- */

/* Runs a recurrent layer over all rows of the step and stores the new states. in: normalized input rows. *out receives the input
 * of the output projection, [T, n], owned by the graph. */
fkv_status fkv_array_recurrent(const fkv_array_pass *p, fkv_array_rows in, mlx_array *out);

/* ---- latent attention (array_latent.c) ---- */

/* Compute the rows that a latent layer stores, [T, 1, key_pad], and its queries, [T, H, key_pad]; see ../forward/latent.h. */
mlx_array fkv_array_latent_keys(const fkv_array_pass *p, fkv_array_rows in);
mlx_array fkv_array_latent_queries(const fkv_array_pass *p, fkv_array_rows in);

/* Computes the input of the output projection from the output of attention: [T, H, latent_pad] -> [T, H * v_dim]. */
mlx_array fkv_array_latent_values(const fkv_array_pass *p, mlx_array attended);

#endif
