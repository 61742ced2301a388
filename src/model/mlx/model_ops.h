/* Operations used by the forward pass only, in addition to those in src/mlx/mlx_graph.h. They are lazy, the graph owns the
 * results, and failures are recorded in the graph.
 */
#ifndef FKV_MODEL_OPS_H
#define FKV_MODEL_OPS_H

#include "../../mlx/mlx_graph.h"

/* Creates an array with a copy of values in host memory. */
mlx_array fkv_model_op_upload(fkv_mlx_graph *g, const void *data, fkv_mlx_shape shape, mlx_dtype type);

mlx_array fkv_model_op_sigmoid(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_model_op_rms_norm(fkv_mlx_graph *g, mlx_array x, mlx_array weight, float eps);
mlx_array fkv_model_op_layer_norm(fkv_mlx_graph *g, mlx_array x, mlx_array weight, mlx_array bias,
                                  float eps); /* bias: an empty handle if the norm has no bias */

mlx_array fkv_model_op_abs(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_model_op_expm1(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_model_op_exp(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_model_op_rsqrt(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_model_op_softplus(fkv_mlx_graph *g, mlx_array a); /* log(1 + exp(a)) */

/* Returns n zeros of type float32. */
mlx_array fkv_model_op_zeros(fkv_mlx_graph *g, int n);

/* Multiplies `a` by `factor`. Returns `a` itself if the factor is 1. */
mlx_array fkv_model_op_scale(fkv_mlx_graph *g, mlx_array a, float factor);

/* Returns the largest magnitude of each row, but at least the smallest normal float: [.., n] -> [.., 1]. */
mlx_array fkv_model_op_row_size(fkv_mlx_graph *g, mlx_array a);

/* The next three operations apply to the last axis of `a`: slice columns [from, to), pad with zeros to n columns, and
 * concatenate with b. */
mlx_array fkv_model_op_columns(fkv_mlx_graph *g, mlx_array a, int from, int to);
mlx_array fkv_model_op_widen(fkv_mlx_graph *g, mlx_array a, int n);
mlx_array fkv_model_op_beside(fkv_mlx_graph *g, mlx_array a, mlx_array b);

/* Concatenate two arrays, or all arrays of a list, along the first axis. */
mlx_array fkv_model_op_stack(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_model_op_stack_all(fkv_mlx_graph *g, mlx_vector_array list);

/* Dequantizes rows to float32. w: [R, words]; scales and biases: float32 [R, C / group], or byte scales in other modes. */
mlx_array fkv_model_op_dequantize(fkv_mlx_graph *g, const fkv_mlx_affine *w);

/* ---- experts ---- */

/* Returns the indices of the k largest values of each row, in any order: [T, E] -> uint32 [T, k], where T is the number of rows
 * and E the number of experts. */
mlx_array fkv_model_op_largest(fkv_mlx_graph *g, mlx_array a, int n_rows, int k);

mlx_array fkv_model_op_take_along(fkv_mlx_graph *g, mlx_array a, mlx_array indices); /* gathers along the last axis */
mlx_array fkv_model_op_exclude(fkv_mlx_graph *g, mlx_array a, mlx_array indices);    /* sets values at `indices` to -infinity */
mlx_array fkv_model_op_softmax(fkv_mlx_graph *g, mlx_array a);                       /* softmax over the last axis */
mlx_array fkv_model_op_sum_second(fkv_mlx_graph *g, mlx_array a); /* sums over the second axis: [T, k, n] -> [T, n] */

/* Multiply each row by the matrices of its experts and return [T, k, 1, R]. x: [T, 1 or k, 1, C]; across: [E, C, R]; w: [E, R,
 * ..]; experts: [T, k]. */
mlx_array fkv_model_op_gather_mm(fkv_mlx_graph *g, mlx_array x, mlx_array across, mlx_array experts);
mlx_array fkv_model_op_gather_qmm(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, mlx_array experts);

#endif
