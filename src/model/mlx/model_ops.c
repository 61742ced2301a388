/* See model_ops.h. */
#include "model_ops.h"

#include <float.h>
#include <math.h>

/* Adds the result of an operation to the graph, or sets the failure flag if `code` is not 0. */
static mlx_array op_result(fkv_mlx_graph *g, int code, mlx_array a) {
    if (code != 0) g->failed = true;
    return fkv_mlx_adopt(g, a);
}

mlx_array fkv_model_op_upload(fkv_mlx_graph *g, const void *data, fkv_mlx_shape shape, mlx_dtype type) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    return fkv_mlx_adopt(g, mlx_array_new_data(data, shape.at, shape.n, type));
}

mlx_array fkv_model_op_sigmoid(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_sigmoid(&out, a, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_abs(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_abs(&out, a, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_expm1(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_expm1(&out, a, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_exp(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_exp(&out, a, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_rsqrt(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_rsqrt(&out, a, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_softplus(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    mlx_array zero = fkv_mlx_adopt(g, mlx_array_new_float32(0.0f));
    if (g->failed) return out;
    int code = mlx_logaddexp(&out, a, zero, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_zeros(fkv_mlx_graph *g, int n) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_zeros(&out, &n, 1, MLX_FLOAT32, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_rms_norm(fkv_mlx_graph *g, mlx_array x, mlx_array weight, float eps) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_fast_rms_norm(&out, x, weight, eps, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_layer_norm(fkv_mlx_graph *g, mlx_array x, mlx_array weight, mlx_array bias, float eps) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_fast_layer_norm(&out, x, weight, bias, eps, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_scale(fkv_mlx_graph *g, mlx_array a, float factor) {
    return factor == 1.0f ? a : fkv_mlx_multiply(g, a, fkv_mlx_adopt(g, mlx_array_new_float32(factor)));
}

mlx_array fkv_model_op_row_size(fkv_mlx_graph *g, mlx_array a) {
    mlx_array largest = fkv_mlx_max_last(g, fkv_model_op_abs(g, a));
    return fkv_mlx_maximum(g, largest, fkv_mlx_adopt(g, mlx_array_new_float32(FLT_MIN)));
}

mlx_array fkv_model_op_columns(fkv_mlx_graph *g, mlx_array a, int from, int to) {
    if (g->failed) return (mlx_array){NULL};
    const int *shape = mlx_array_shape(a);
    return fkv_mlx_slice(g, a, FKV_MLX_SHAPE(0, 0, from), FKV_MLX_SHAPE(shape[0], shape[1], to));
}

mlx_array fkv_model_op_widen(fkv_mlx_graph *g, mlx_array a, int n) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    const int axis[] = {2};
    const int before[] = {0};
    const int behind[] = {n - mlx_array_shape(a)[2]};
    mlx_array zero = fkv_mlx_adopt(g, mlx_array_new_float32(0.0f));
    if (g->failed) return out;
    int code = mlx_pad(&out, a, axis, 1, before, 1, behind, 1, zero, "constant", g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_beside(fkv_mlx_graph *g, mlx_array a, mlx_array b) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    const mlx_array both[] = {a, b};
    mlx_vector_array list = mlx_vector_array_new_data(both, 2);
    int code = mlx_concatenate_axis(&out, list, -1, g->stream);
    (void)mlx_vector_array_free(list);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_stack_all(fkv_mlx_graph *g, mlx_vector_array list) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_concatenate_axis(&out, list, 0, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_stack(fkv_mlx_graph *g, mlx_array a, mlx_array b) {
    if (g->failed) return a;
    const mlx_array both[] = {a, b};
    mlx_vector_array list = mlx_vector_array_new_data(both, 2);
    mlx_array out = fkv_model_op_stack_all(g, list);
    (void)mlx_vector_array_free(list);
    return out;
}

mlx_array fkv_model_op_dequantize(fkv_mlx_graph *g, const fkv_mlx_affine *w) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    const mlx_optional_int group = {w->group, true};
    const mlx_optional_int bits = {w->bits, true};
    const mlx_optional_dtype type = {MLX_FLOAT32, true};
    int code = mlx_dequantize(&out, w->codes, w->scales, w->biases, group, bits, w->mode != NULL ? w->mode : "affine",
                              (mlx_array){NULL}, type, g->stream);
    return op_result(g, code, out);
}

/* ---- experts ---- */

mlx_array fkv_model_op_largest(fkv_mlx_graph *g, mlx_array a, int n_rows, int k) {
    mlx_array negative = {NULL};
    mlx_array order = {NULL};
    if (g->failed) return order;
    int code = mlx_negative(&negative, a, g->stream);
    negative = op_result(g, code, negative);
    if (g->failed) return order;
    code = mlx_argpartition_axis(&order, negative, k - 1, -1, g->stream);
    return fkv_mlx_slice(g, op_result(g, code, order), FKV_MLX_SHAPE(0, 0), FKV_MLX_SHAPE(n_rows, k));
}

mlx_array fkv_model_op_take_along(fkv_mlx_graph *g, mlx_array a, mlx_array indices) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_take_along_axis(&out, a, indices, -1, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_exclude(fkv_mlx_graph *g, mlx_array a, mlx_array indices) {
    mlx_array out = {NULL};
    mlx_array least = fkv_mlx_adopt(g, mlx_array_new_float32(-INFINITY));
    if (g->failed) return out;
    int code = mlx_put_along_axis(&out, a, indices, least, -1, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_softmax(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_softmax_axis(&out, a, -1, true, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_sum_second(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_sum_axis(&out, a, 1, false, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_gather_mm(fkv_mlx_graph *g, mlx_array x, mlx_array across, mlx_array experts) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_gather_mm(&out, x, across, (mlx_array){NULL}, experts, false, g->stream);
    return op_result(g, code, out);
}

mlx_array fkv_model_op_gather_qmm(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, mlx_array experts) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    const mlx_optional_int group = {w->group, true};
    const mlx_optional_int bits = {w->bits, true};
    int code = mlx_gather_qmm(&out, x, w->codes, w->scales, w->biases, (mlx_array){NULL}, experts, true, group, bits,
                              w->mode != NULL ? w->mode : "affine", false, g->stream);
    return op_result(g, code, out);
}
