/* See mlx_kernel.h. */
#include "mlx_kernel.h"

static mlx_fast_cuda_kernel cuda_kernel(const fkv_mlx_kernel *k) { return (mlx_fast_cuda_kernel){k->kernel}; }
static mlx_fast_metal_kernel metal_kernel(const fkv_mlx_kernel *k) { return (mlx_fast_metal_kernel){k->kernel}; }
static mlx_fast_cuda_kernel_config cuda_config(const fkv_mlx_kernel *k) { return (mlx_fast_cuda_kernel_config){k->config}; }
static mlx_fast_metal_kernel_config metal_config(const fkv_mlx_kernel *k) { return (mlx_fast_metal_kernel_config){k->config}; }

static mlx_vector_string names_of(const char *const *names) {
    mlx_vector_string vector = mlx_vector_string_new();
    for (; *names != NULL; names++) (void)mlx_vector_string_append_value(vector, *names);
    return vector;
}

fkv_status fkv_mlx_kernel_open(fkv_mlx_kernel *kernel, bool is_metal, const fkv_mlx_kernel_source *text) {
    mlx_vector_string inputs = names_of(text->inputs);
    mlx_vector_string outputs = names_of(text->outputs);
    *kernel = (fkv_mlx_kernel){.is_metal = is_metal};
    while (text->inputs[kernel->n_inputs] != NULL) kernel->n_inputs++;
    FKV_ASSERT(kernel->n_inputs <= FKV_MLX_KERNEL_INPUTS);
    if (is_metal)
        kernel->kernel = mlx_fast_metal_kernel_new(text->name, inputs, outputs, text->source, text->header, true, false).ctx;
    else
        kernel->kernel =
            mlx_fast_cuda_kernel_new(text->name, inputs, outputs, text->source, text->header, true, text->shared_bytes).ctx;
    (void)mlx_vector_string_free(inputs);
    (void)mlx_vector_string_free(outputs);
    kernel->is_open = kernel->kernel != NULL;
    return kernel->is_open ? FKV_OK : fkv_mlx_failed(text->name);
}

void fkv_mlx_kernel_forget(fkv_mlx_kernel *k) {
    if (k->config == NULL) return;
    if (k->is_metal)
        mlx_fast_metal_kernel_config_free(metal_config(k));
    else
        mlx_fast_cuda_kernel_config_free(cuda_config(k));
    k->config = NULL;
}

void fkv_mlx_kernel_close(fkv_mlx_kernel *k) {
    if (!k->is_open) return;
    fkv_mlx_kernel_forget(k);
    if (k->is_metal)
        mlx_fast_metal_kernel_free(metal_kernel(k));
    else
        mlx_fast_cuda_kernel_free(cuda_kernel(k));
    *k = (fkv_mlx_kernel){0};
}

static bool same_output(const fkv_mlx_kernel *k, const fkv_mlx_launch *launch) {
    return k->config != NULL && k->threads == (int)launch->threads && k->out_type == launch->out_type &&
           k->second_words == launch->second_words && k->out_shape.n == launch->out_shape.n &&
           memcmp(k->out_shape.at, launch->out_shape.at, (size_t)k->out_shape.n * sizeof(int)) == 0;
}

static int new_config(fkv_mlx_kernel *k, const fkv_mlx_launch *launch) {
    const fkv_mlx_shape *shape = &launch->out_shape;
    fkv_mlx_kernel_forget(k);
    k->threads = (int)launch->threads;
    k->out_shape = *shape;
    k->out_type = launch->out_type;
    k->second_words = launch->second_words;
    k->grid[0] = 0; /* the grid size has not been set yet */
    int code = 0;
    if (k->is_metal) {
        k->config = mlx_fast_metal_kernel_config_new().ctx;
        code |= mlx_fast_metal_kernel_config_add_output_arg(metal_config(k), shape->at, (size_t)shape->n, launch->out_type);
        if (k->second_words > 0)
            code |= mlx_fast_metal_kernel_config_add_output_arg(metal_config(k), &k->second_words, 1, MLX_UINT32);
        code |= mlx_fast_metal_kernel_config_set_thread_group(metal_config(k), k->threads, 1, 1);
    } else {
        k->config = mlx_fast_cuda_kernel_config_new().ctx;
        code |= mlx_fast_cuda_kernel_config_add_output_arg(cuda_config(k), shape->at, (size_t)shape->n, launch->out_type);
        if (k->second_words > 0)
            code |= mlx_fast_cuda_kernel_config_add_output_arg(cuda_config(k), &k->second_words, 1, MLX_UINT32);
        code |= mlx_fast_cuda_kernel_config_set_thread_group(cuda_config(k), k->threads, 1, 1);
    }
    return code;
}

static int set_grid(fkv_mlx_kernel *k, const fkv_mlx_launch *launch) {
    const int grid[3] = {(int)(launch->blocks[0] * launch->threads), (int)launch->blocks[1], (int)launch->blocks[2]};
    if (memcmp(grid, k->grid, sizeof grid) == 0) return 0;
    memcpy(k->grid, grid, sizeof grid);
    if (k->is_metal) return mlx_fast_metal_kernel_config_set_grid(metal_config(k), grid[0], grid[1], grid[2]);
    return mlx_fast_cuda_kernel_config_set_grid(cuda_config(k), grid[0], grid[1], grid[2]);
}

mlx_array fkv_mlx_kernel_apply(fkv_mlx_graph *g, fkv_mlx_kernel *k, const fkv_mlx_launch *launch, const mlx_array *inputs,
                               mlx_array *second) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    int code = same_output(k, launch) ? 0 : new_config(k, launch);
    if (code == 0) code = set_grid(k, launch);
    mlx_vector_array given = mlx_vector_array_new_data(inputs, k->n_inputs);
    mlx_vector_array results = mlx_vector_array_new();
    if (code == 0)
        code = k->is_metal ? mlx_fast_metal_kernel_apply(&results, metal_kernel(k), given, metal_config(k), g->stream)
                           : mlx_fast_cuda_kernel_apply(&results, cuda_kernel(k), given, cuda_config(k), g->stream);
    if (code == 0) code = mlx_vector_array_get(&out, results, 0);
    if (code == 0 && launch->second_words > 0 && second != NULL) {
        mlx_array other = {NULL};
        code = mlx_vector_array_get(&other, results, 1);
        if (code == 0) *second = fkv_mlx_adopt(g, other);
    }
    (void)mlx_vector_array_free(given);
    (void)mlx_vector_array_free(results);
    if (code != 0) {
        g->failed = true;
        (void)mlx_array_free(out);
        return (mlx_array){NULL};
    }
    return fkv_mlx_adopt(g, out);
}
