/* Measures the read bandwidth of an MLX device. */
#include "bench_mlx_roof.h"
#include "bench_util.h"

#include <math.h>

/* Source of a kernel that reads the whole buffer, 16 bytes at a time, and writes one word. The result of the previous pass is an
 * additional input, so that two passes never overlap.
 */
static const char READ_SOURCE[] =
    "const uint4 *from = (const uint4 *)data;\n"
    "unsigned x = 0;\n"
    "for (long i = (long)blockIdx.x * 256 + threadIdx.x; i < (long)N; i += (long)BLOCKS * 256 * 8) {\n"
    "  uint4 w[8];\n"
    "#pragma unroll\n"
    "  for (int j = 0; j < 8; j++) {\n"
    "    long at = i + (long)j * BLOCKS * 256;\n"
    "    w[j] = at < (long)N ? from[at] : make_uint4(0, 0, 0, 0);\n"
    "  }\n"
    "#pragma unroll\n"
    "  for (int j = 0; j < 8; j++) x ^= w[j].x ^ w[j].y ^ w[j].z ^ w[j].w;\n"
    "}\n"
    "if (x == 0x9e3779b9u) out[0] = x;\n";

static mlx_array read_all(fkv_mlx_graph *g, mlx_array data, mlx_array before, mlx_fast_cuda_kernel kernel,
                          mlx_fast_cuda_kernel_config config) {
    if (kernel.ctx == NULL) { /* where the CUDA kernel is not available, an MLX maximum reads the buffer */
        mlx_array after = before.ctx != NULL ? fkv_mlx_after(g, data, before) : data;
        return fkv_mlx_max_last(g, fkv_mlx_reshape(g, fkv_mlx_max_last(g, after), FKV_MLX_SHAPE(-1)));
    }
    mlx_vector_array inputs = mlx_vector_array_new_data((mlx_array[]){data, before.ctx != NULL ? before : data}, 2);
    mlx_vector_array outputs = mlx_vector_array_new();
    mlx_array out = {NULL};
    int code = mlx_fast_cuda_kernel_apply(&outputs, kernel, inputs, config, g->stream);
    if (code == 0) code = mlx_vector_array_get(&out, outputs, 0);
    if (code != 0) g->failed = true;
    (void)mlx_vector_array_free(inputs);
    (void)mlx_vector_array_free(outputs);
    return fkv_mlx_adopt(g, out);
}

double bench_mlx_roof(fkv_mlx_graph *g, bool is_gpu, bool is_quick) {
    enum { BLOCKS = 132 * 16, READS = 10, ROUNDS = 5 };
    const size_t bytes = is_quick ? (size_t)64 << 20 : (size_t)2 << 30;
    const int shape[] = {1024, (int)(bytes / 4096)};
    mlx_array data = {NULL};
    mlx_array zeros = {NULL};
    if (mlx_zeros(&zeros, shape, 2, MLX_UINT32, g->stream) != 0) g->failed = true;
    zeros = fkv_mlx_adopt(g, zeros);
    fkv_mlx_eval_one(g, zeros);
    fkv_mlx_keep(g, &data, zeros);
    fkv_mlx_graph_release(g, 0);
    mlx_fast_cuda_kernel kernel = {NULL};
    mlx_fast_cuda_kernel_config config = {NULL};
    bool has_cuda = false;
    (void)mlx_cuda_is_available(&has_cuda);
    if (is_gpu && has_cuda) {
        mlx_vector_string inputs = mlx_vector_string_new_data((const char *[]){"data", "before"}, 2);
        mlx_vector_string outputs = mlx_vector_string_new_value("out");
        kernel = mlx_fast_cuda_kernel_new("flatkv_read_roof", inputs, outputs, READ_SOURCE, "", false, 0);
        config = mlx_fast_cuda_kernel_config_new();
        (void)mlx_fast_cuda_kernel_config_add_output_arg(config, (const int[]){8}, 1, MLX_UINT32);
        (void)mlx_fast_cuda_kernel_config_set_grid(config, BLOCKS * 256, 1, 1);
        (void)mlx_fast_cuda_kernel_config_set_thread_group(config, 256, 1, 1);
        (void)mlx_fast_cuda_kernel_config_add_template_arg_int(config, "N", (int)(bytes / 16));
        (void)mlx_fast_cuda_kernel_config_add_template_arg_int(config, "BLOCKS", BLOCKS);
        (void)mlx_vector_string_free(inputs);
        (void)mlx_vector_string_free(outputs);
    }
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        mlx_array last = {NULL};
        const double start = kit_seconds();
        for (int i = 0; i < READS; i++) last = read_all(g, data, last, kernel, config);
        fkv_mlx_eval_one(g, last);
        best = fmax(best, (double)(bytes * READS) / (kit_seconds() - start));
        fkv_mlx_graph_release(g, 0);
    }
    if (config.ctx != NULL) mlx_fast_cuda_kernel_config_free(config);
    if (kernel.ctx != NULL) mlx_fast_cuda_kernel_free(kernel);
    (void)mlx_array_free(data);
    (void)mlx_clear_cache();
    return best;
}
