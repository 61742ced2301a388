/* Operations of a forward pass that a cache has no use for, over the graph of src/mlx/mlx_graph.h: lazy, a failure makes the
 * graph failed, the graph keeps the handles.
 */
#ifndef FKV_MODEL_OPS_H
#define FKV_MODEL_OPS_H

#include "../../mlx/mlx_graph.h"

/* Numbers copied from host memory. */
mlx_array fkv_model_op_upload(fkv_mlx_graph *g, const void *data, fkv_mlx_shape shape, mlx_dtype type);

mlx_array fkv_model_op_sigmoid(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_model_op_rms_norm(fkv_mlx_graph *g, mlx_array x, mlx_array weight, float eps);
mlx_array fkv_model_op_layer_norm(fkv_mlx_graph *g, mlx_array x, mlx_array weight, mlx_array bias,
                                  float eps); /* no bias: empty */

/* a times a number; a itself where that is 1. */
mlx_array fkv_model_op_scale(fkv_mlx_graph *g, mlx_array a, float factor);

/* The largest size of a number in each row, at least the smallest normal float. [.., n] -> [.., 1] */
mlx_array fkv_model_op_row_size(fkv_mlx_graph *g, mlx_array a);

/* a: [d0, d1, n]. Columns [from, to); the same with zeros behind, to a width of n; joined along the last axis. */
mlx_array fkv_model_op_columns(fkv_mlx_graph *g, mlx_array a, int from, int to);
mlx_array fkv_model_op_widen(fkv_mlx_graph *g, mlx_array a, int n);
mlx_array fkv_model_op_beside(fkv_mlx_graph *g, mlx_array a, mlx_array b);

/* Rows of codes as float32. w: [R, words], scales and biases: float32 [R, C / group], or bytes of a mode that has such scales */
mlx_array fkv_model_op_dequantize(fkv_mlx_graph *g, const fkv_mlx_affine *w);

/* ---- experts; T rows, k experts of each, E in all ---- */

/* The experts of the k largest numbers of each row, in no order. [T, E] -> uint32 [T, k] */
mlx_array fkv_model_op_largest(fkv_mlx_graph *g, mlx_array a, int n_rows, int k);

mlx_array fkv_model_op_take_along(fkv_mlx_graph *g, mlx_array a, mlx_array indices); /* the last axis */
mlx_array fkv_model_op_softmax(fkv_mlx_graph *g, mlx_array a);                       /* over the last axis */
mlx_array fkv_model_op_sum_second(fkv_mlx_graph *g, mlx_array a);                    /* [T, k, n] -> [T, n] */

/* Each row with the matrices of its experts. x: [T, 1 or k, 1, C]; across: [E, C, R]; w: [E, R, ..]; experts: [T, k].
 * -> [T, k, 1, R] */
mlx_array fkv_model_op_gather_mm(fkv_mlx_graph *g, mlx_array x, mlx_array across, mlx_array experts);
mlx_array fkv_model_op_gather_qmm(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, mlx_array experts);

#endif
