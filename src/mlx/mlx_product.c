/* See mlx_product.h. */
#include "mlx_product.h"

#include "mlx_include.h"

#include <flatkv/mlx.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

bool fkv_mlx_row_type(mlx_dtype type, fkv_type *out) {
    *out = type == MLX_FLOAT32 ? FKV_F32 : type == MLX_FLOAT16 ? FKV_F16 : FKV_BF16;
    return type == MLX_FLOAT32 || type == MLX_FLOAT16 || type == MLX_BFLOAT16;
}

fkv_status fkv_mlx_product_open(const fkv_affine_product *p, fkv_mlx_kernel *kernel) {
    const size_t length = fkv_affine_product_header(FKV_KERNEL_CUDA, p, NULL, 0);
    char *header = malloc(length + 1);
    FKV_REQUIRE(header != NULL, FKV_NO_MEMORY, "out of memory allocating %zu bytes of kernel source", length + 1);
    (void)fkv_affine_product_header(FKV_KERNEL_CUDA, p, header, length + 1);
    const uint64_t hash = fkv_mlx_source_hash(header);
    char name[48]; /* MLX looks up compiled kernels by name */
    (void)snprintf(name, sizeof name, "flatkv_product_%016llx", (unsigned long long)hash);
    char line[FKV_MLX_INCLUDE_CHARS];
    const bool as_file = fkv_mlx_include(header, hash, line);
    const fkv_mlx_kernel_source text = {.name = name,
                                        .header = as_file ? line : header,
                                        .source = fkv_affine_product_body(FKV_KERNEL_CUDA),
                                        .inputs = fkv_affine_product_inputs(),
                                        .outputs = fkv_affine_product_outputs()};
    const fkv_status status = fkv_mlx_kernel_open(kernel, false, &text);
    free(header);
    return status;
}

/* Returns true if the graph's stream is a CUDA stream. */
static bool is_cuda(const fkv_mlx_graph *g) {
    bool has_metal = false;
    mlx_device_type type = MLX_CPU;
    mlx_device device = mlx_device_new();
    const bool known = mlx_stream_get_device(&device, g->stream) == 0 && mlx_device_get_type(&type, device) == 0 &&
                       mlx_metal_is_available(&has_metal) == 0;
    (void)mlx_device_free(device);
    return known && type == MLX_GPU && !has_metal;
}

static bool has_shape(mlx_array a, uint32_t n_rows, uint64_t n_columns) {
    const int *shape = mlx_array_shape(a);
    return mlx_array_ndim(a) == 2 && (uint32_t)shape[0] == n_rows && (uint64_t)shape[1] == n_columns;
}

/* Returns true if the arrays of a matrix have the shapes and types that its size requires. */
static bool is_consistent(const fkv_mlx_affine *w, uint32_t n_outputs, uint32_t n_columns) {
    const uint64_t n_groups = n_columns / (uint32_t)w->group;
    return mlx_array_dtype(w->codes) == MLX_UINT32 && mlx_array_dtype(w->biases) == mlx_array_dtype(w->scales) &&
           has_shape(w->codes, n_outputs, (uint64_t)n_columns * (uint32_t)w->bits / 32) &&
           has_shape(w->scales, n_outputs, n_groups) && has_shape(w->biases, n_outputs, n_groups);
}

/* Describes the kernel and its launch for this product. Returns false if MLX computes it. */
static bool describe(bool on_cuda, mlx_array x, const fkv_mlx_affine *w, fkv_affine_product *product, fkv_mlx_launch *launch) {
    fkv_type row_type;
    fkv_type scale_type;
    const size_t n_dims = mlx_array_ndim(x);
    if (!on_cuda || w->mode != NULL || n_dims == 0 || n_dims > FKV_MLX_MAX_DIMS || mlx_array_ndim(w->codes) != 2) return false;
    if (!fkv_mlx_row_type(mlx_array_dtype(x), &row_type) || !fkv_mlx_row_type(mlx_array_dtype(w->scales), &scale_type))
        return false;
    if (row_type != scale_type && row_type != FKV_F32) return false; /* the type of the result would differ from that of x */
    const int *shape = mlx_array_shape(x);
    const uint32_t n_columns = (uint32_t)shape[n_dims - 1];
    const uint32_t n_outputs = (uint32_t)mlx_array_shape(w->codes)[0];
    if (n_columns == 0 || mlx_array_size(x) == 0 || mlx_array_size(x) / n_columns > FKV_AFFINE_PRODUCT_ROWS) return false;
    if (!fkv_affine_product_describe((uint32_t)w->bits, (uint32_t)w->group, row_type, scale_type, n_columns, n_outputs,
                                     product) ||
        !is_consistent(w, n_outputs, n_columns))
        return false;
    *launch = (fkv_mlx_launch){.blocks = {fkv_affine_product_blocks(product, n_outputs), 1, 1},
                               .threads = 32 * product->warps,
                               .out_shape.n = (int)n_dims,
                               .out_type = mlx_array_dtype(x)};
    memcpy(launch->out_shape.at, shape, n_dims * sizeof *shape);
    launch->out_shape.at[n_dims - 1] = (int)n_outputs;
    return true;
}

/* Returns the kernel for products with this number of outputs, or NULL if it cannot be created. A kernel keeps the launch
 * configuration of its last call, so each number of outputs has its own kernel, although the source may be the same. */
static fkv_mlx_kernel *kernel_for(fkv_mlx_products *own, const fkv_affine_product *product, uint32_t n_outputs) {
    uint32_t i = 0;
    while (i < own->n && (own->of[i].n_outputs != n_outputs || memcmp(&own->of[i].product, product, sizeof *product) != 0)) i++;
    if (i < own->n) return &own->of[i].kernel;
    fkv_mlx_kernel kernel;
    if (fkv_mlx_product_open(product, &kernel) != FKV_OK) return NULL;
    if (i == FKV_MLX_PRODUCT_KERNELS) {
        i = own->next++ % FKV_MLX_PRODUCT_KERNELS;
        fkv_mlx_kernel_close(&own->of[i].kernel);
    } else {
        own->n++;
    }
    own->of[i].product = *product;
    own->of[i].n_outputs = n_outputs;
    own->of[i].kernel = kernel;
    return &own->of[i].kernel;
}

mlx_array fkv_mlx_product(fkv_mlx_products *own, fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w) {
    fkv_affine_product product;
    fkv_mlx_launch launch;
    if (g->failed) return (mlx_array){NULL};
    if (!own->checked) own->on_cuda = is_cuda(g);
    own->checked = true;
    if (!describe(own->on_cuda, x, w, &product, &launch)) return fkv_mlx_quantized_matmul(g, x, w, true);
    fkv_mlx_kernel *kernel = kernel_for(own, &product, (uint32_t)mlx_array_shape(w->codes)[0]);
    if (kernel == NULL) {
        g->failed = true;
        return (mlx_array){NULL};
    }
    const mlx_array inputs[] = {x, w->codes, w->scales, w->biases};
    return fkv_mlx_kernel_apply(g, kernel, &launch, inputs, NULL);
}

void fkv_mlx_products_close(fkv_mlx_products *own) {
    for (uint32_t i = 0; i < own->n; i++) fkv_mlx_kernel_close(&own->of[i].kernel);
    *own = (fkv_mlx_products){0};
}

/* ---- products of the public header ---- */

enum { MAX_SHARED = 64 };

/* Kernels of all threads, which are never closed. */
static struct {
    fkv_affine_product product;
    fkv_mlx_kernel kernel;
} shared[MAX_SHARED];
static uint32_t n_shared;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Copies the kernel for a product to *kernel. Returns false if there is none. The caller holds the lock. */
static bool copy_shared(const fkv_affine_product *product, fkv_mlx_kernel *kernel) {
    uint32_t i = 0;
    while (i < n_shared && memcmp(&shared[i].product, product, sizeof *product) != 0) i++;
    if (i < n_shared) *kernel = shared[i].kernel;
    return i < n_shared;
}

static bool find_shared(const fkv_affine_product *product, fkv_mlx_kernel *kernel) {
    (void)pthread_mutex_lock(&lock);
    const bool found = copy_shared(product, kernel);
    (void)pthread_mutex_unlock(&lock);
    return found;
}

/* Creates the kernel for a product and copies it to *kernel. The lock is not held while MLX creates the kernel, because MLX may
 * wait for other threads there. If another thread has created the same kernel in the meantime, that kernel is used. */
static fkv_status open_shared(const fkv_affine_product *product, fkv_mlx_kernel *kernel) {
    fkv_mlx_kernel own;
    FKV_TRY(fkv_mlx_product_open(product, &own));
    (void)pthread_mutex_lock(&lock);
    const bool exists = copy_shared(product, kernel);
    const bool fits = exists || n_shared < MAX_SHARED;
    if (!exists && fits) {
        shared[n_shared].product = *product;
        shared[n_shared++].kernel = *kernel = own;
    }
    (void)pthread_mutex_unlock(&lock);
    if (exists || !fits) fkv_mlx_kernel_close(&own);
    if (fits) return FKV_OK;
    return fkv_fail(FKV_UNSUPPORTED,
                    "fkv_mlx_quantized_product: the limit of %d kernel variants is reached; use quantized_matmul",
                    (int)MAX_SHARED);
}

static fkv_status compute_product(mlx_array x, const fkv_mlx_affine *w, mlx_stream stream, mlx_array *out) {
    fkv_mlx_graph g = {.stream = stream};
    fkv_affine_product product;
    fkv_mlx_launch launch;
    fkv_mlx_kernel kernel;
    FKV_REQUIRE(describe(is_cuda(&g), x, w, &product, &launch), FKV_UNSUPPORTED,
                "fkv_mlx_quantized_product: there is no kernel for this product; use quantized_matmul");
    if (!find_shared(&product, &kernel)) FKV_TRY(open_shared(&product, &kernel));
    const mlx_array inputs[] = {x, w->codes, w->scales, w->biases};
    fkv_mlx_keep(&g, out, fkv_mlx_kernel_apply(&g, &kernel, &launch, inputs, NULL)); /* `kernel` has its own configuration */
    fkv_mlx_kernel_forget(&kernel);
    fkv_mlx_graph_release(&g, 0);
    return fkv_mlx_graph_status(&g, "fkv_mlx_quantized_product");
}

fkv_status fkv_mlx_quantized_product(mlx_array x, mlx_array codes, mlx_array scales, mlx_array biases, uint32_t group,
                                     uint32_t bits, mlx_stream stream, mlx_array *out) {
    const fkv_mlx_affine w = {.codes = codes, .scales = scales, .biases = biases, .bits = (int)bits, .group = (int)group};
    fkv_mlx_catch_errors();
    if (stream.ctx != NULL) return compute_product(x, &w, stream, out);
    mlx_stream used = mlx_stream_new();
    mlx_device device = mlx_device_new();
    int code = mlx_get_default_device(&device);
    if (code == 0) code = mlx_get_default_stream(&used, device);
    (void)mlx_device_free(device);
    fkv_status status = fkv_mlx_check(code, "opening the default stream");
    if (status == FKV_OK) status = compute_product(x, &w, used, out);
    (void)mlx_stream_free(used);
    return status;
}
