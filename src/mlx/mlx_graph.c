/* See mlx_graph.h. Defines the process-wide error handler and stores the last error message of each thread. */
#include "mlx_graph.h"

#include <flatkv/mlx.h>

#include <stdatomic.h>
#include <stdio.h>

/* ---- errors ---- */

static _Thread_local char last_words[384];

static void remember(const char *words, void *data) {
    (void)data;
    (void)snprintf(last_words, sizeof last_words, "%s", words);
}

void fkv_mlx_catch_errors(void) {
    static atomic_flag installed = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&installed)) mlx_set_error_handler(remember, NULL, NULL);
}

const char *fkv_mlx_last_error(void) { return last_words; }

fkv_status fkv_mlx_failed(const char *call) { return fkv_fail(FKV_DEVICE, "%s: MLX error: %s", call, last_words); }

/* ---- graphs ---- */

void fkv_mlx_graph_release(fkv_mlx_graph *g, uint32_t mark) {
    while (g->n_made > mark) (void)mlx_array_free(g->made[--g->n_made]);
}

fkv_status fkv_mlx_graph_status(fkv_mlx_graph *g, const char *call) {
    if (!g->failed) return FKV_OK;
    g->failed = false;
    return fkv_mlx_failed(call);
}

void fkv_mlx_keep(fkv_mlx_graph *g, mlx_array *kept, mlx_array a) {
    if (!g->failed && mlx_array_set(kept, a) != 0) g->failed = true;
}

/* Adds the result of an operation to the graph, or sets the failure flag if `code` is not 0. */
static mlx_array graph_result(fkv_mlx_graph *g, int code, mlx_array a) {
    FKV_ASSERT(g->n_made < FKV_MLX_GRAPH_ARRAYS);
    if (code == 0 && a.ctx != NULL) {
        g->made[g->n_made++] = a;
        return a;
    }
    g->failed = true;
    (void)mlx_array_free(a);
    return (mlx_array){NULL};
}

mlx_array fkv_mlx_adopt(fkv_mlx_graph *g, mlx_array a) {
    if (g->failed) {
        (void)mlx_array_free(a);
        return (mlx_array){NULL};
    }
    return graph_result(g, 0, a);
}

void fkv_mlx_eval_one(fkv_mlx_graph *g, mlx_array a) {
    if (!g->failed && mlx_array_eval(a) != 0) g->failed = true;
}

/* ---- operations ---- */

#define BINARY(name)                                                                                                             \
    mlx_array fkv_mlx_##name(fkv_mlx_graph *g, mlx_array a, mlx_array b) {                                                       \
        mlx_array out = {NULL};                                                                                                  \
        if (g->failed) return out;                                                                                               \
        int code = mlx_##name(&out, a, b, g->stream);                                                                            \
        return graph_result(g, code, out);                                                                                       \
    }

#define UNARY(name)                                                                                                              \
    mlx_array fkv_mlx_##name(fkv_mlx_graph *g, mlx_array a) {                                                                    \
        mlx_array out = {NULL};                                                                                                  \
        if (g->failed) return out;                                                                                               \
        int code = mlx_##name(&out, a, g->stream);                                                                               \
        return graph_result(g, code, out);                                                                                       \
    }

BINARY(add)
BINARY(subtract)
BINARY(multiply)
BINARY(divide)
BINARY(maximum)
BINARY(minimum)
BINARY(less)
BINARY(right_shift)
BINARY(bitwise_and)
BINARY(less_equal)
BINARY(logical_and)
BINARY(logical_or)
BINARY(matmul)
UNARY(exp)
UNARY(tanh)
UNARY(isnan)
UNARY(abs)
UNARY(sqrt)

mlx_array fkv_mlx_where(fkv_mlx_graph *g, mlx_array condition, mlx_array x, mlx_array y) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_where(&out, condition, x, y, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_astype(fkv_mlx_graph *g, mlx_array a, mlx_dtype type) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_astype(&out, a, type, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_view(fkv_mlx_graph *g, mlx_array a, mlx_dtype type) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_view(&out, a, type, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_reshape(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape shape) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_reshape(&out, a, shape.at, (size_t)shape.n, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_transpose(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape axes) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_transpose_axes(&out, a, axes.at, (size_t)axes.n, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_sum_last(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_sum_axis(&out, a, -1, true, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_max_last(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_max_axis(&out, a, -1, true, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_min_last(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_min_axis(&out, a, -1, true, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_cumsum(fkv_mlx_graph *g, mlx_array a, int axis) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_cumsum_axis(&out, a, axis, false, true, (mlx_optional_dtype){.has_value = false}, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_round(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_round(&out, a, 0, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_arange(fkv_mlx_graph *g, uint32_t begin, uint32_t end) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_arange(&out, begin, end, 1, MLX_INT32, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_take_first(fkv_mlx_graph *g, mlx_array a, mlx_array indices) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_take_axis(&out, a, indices, 0, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_concatenate_first(fkv_mlx_graph *g, mlx_array a, mlx_array b) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    mlx_vector_array both = mlx_vector_array_new_data((mlx_array[]){a, b}, 2);
    int code = mlx_concatenate_axis(&out, both, 0, g->stream);
    (void)mlx_vector_array_free(both);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_hadamard(fkv_mlx_graph *g, mlx_array a, float scale) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_hadamard_transform(&out, a, (mlx_optional_float){scale, true}, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_number(fkv_mlx_graph *g, float value) { return fkv_mlx_adopt(g, mlx_array_new_float32(value)); }

mlx_array fkv_mlx_zeros(fkv_mlx_graph *g, fkv_mlx_shape shape, mlx_dtype type) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_zeros(&out, shape.at, (size_t)shape.n, type, g->stream);
    return graph_result(g, code, out);
}

static const int ONES[FKV_MLX_MAX_DIMS] = {1, 1, 1, 1};

mlx_array fkv_mlx_slice(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape start, fkv_mlx_shape stop) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    size_t n = (size_t)start.n;
    int code = mlx_slice(&out, a, start.at, n, stop.at, n, ONES, n, g->stream);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_slice_update(fkv_mlx_graph *g, mlx_array a, mlx_array update, fkv_mlx_shape start, fkv_mlx_shape stop) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    size_t n = (size_t)start.n;
    int code = mlx_slice_update(&out, a, update, start.at, n, stop.at, n, ONES, n, g->stream);
    return graph_result(g, code, out);
}

enum { LANES = 16 };

mlx_array fkv_mlx_sum_in_lanes(fkv_mlx_graph *g, mlx_array x, int rows, int n) {
    const int of_lane = n / LANES;
    mlx_array lanes = fkv_mlx_cumsum(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(rows, of_lane, LANES)), 1);
    lanes = fkv_mlx_slice(g, lanes, FKV_MLX_SHAPE(0, of_lane - 1, 0), FKV_MLX_SHAPE(rows, of_lane, LANES));
    mlx_array sums = fkv_mlx_cumsum(g, fkv_mlx_reshape(g, lanes, FKV_MLX_SHAPE(rows, LANES)), 1);
    return fkv_mlx_slice(g, sums, FKV_MLX_SHAPE(0, LANES - 1), FKV_MLX_SHAPE(rows, LANES));
}

mlx_array fkv_mlx_after(fkv_mlx_graph *g, mlx_array a, mlx_array before) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    mlx_vector_array inputs = mlx_vector_array_new_value(a);
    mlx_vector_array dependencies = mlx_vector_array_new_value(before);
    mlx_vector_array results = mlx_vector_array_new();
    int code = mlx_depends(&results, inputs, dependencies);
    if (code == 0) code = mlx_vector_array_get(&out, results, 0);
    (void)mlx_vector_array_free(inputs);
    (void)mlx_vector_array_free(dependencies);
    (void)mlx_vector_array_free(results);
    return graph_result(g, code, out);
}

mlx_array fkv_mlx_fresh(fkv_mlx_graph *g, mlx_array a, mlx_array zero) { return fkv_mlx_add(g, a, zero); }

static mlx_optional_int some(int value) { return (mlx_optional_int){value, true}; }

fkv_mlx_affine fkv_mlx_quantize(fkv_mlx_graph *g, mlx_array a, int bits, int group) {
    fkv_mlx_affine out = {.bits = bits, .group = group};
    if (g->failed) return out;
    mlx_array *const parts[] = {&out.codes, &out.scales, &out.biases};
    mlx_vector_array results = mlx_vector_array_new();
    int code = mlx_quantize(&results, a, some(group), some(bits), "affine", (mlx_array){NULL}, g->stream);
    for (size_t i = 0; i < 3; i++) {
        mlx_array part = {NULL};
        if (code == 0) code = mlx_vector_array_get(&part, results, i);
        *parts[i] = graph_result(g, code, part);
    }
    (void)mlx_vector_array_free(results);
    return out;
}

mlx_array fkv_mlx_quantized_matmul(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, bool transpose) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = mlx_quantized_matmul(&out, x, w->codes, w->scales, w->biases, transpose, some(w->group), some(w->bits),
                                    w->mode != NULL ? w->mode : "affine", g->stream);
    return graph_result(g, code, out);
}
