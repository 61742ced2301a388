/* Declares the subset of mlx-c that src/mlx calls, so that the Python package builds without mlx-c.
 *
 * python_mlx.c implements these functions over the mlx.core module of the Python process. Names, types and values are those of
 * mlx-c; python/tests/mlx_interface.c verifies this against the real headers if they are installed.
 */
#ifndef FKV_PYTHON_MLX_H
#define FKV_PYTHON_MLX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mlx_array_ {
    void *ctx;
} mlx_array;
typedef struct mlx_vector_array_ {
    void *ctx;
} mlx_vector_array;
typedef struct mlx_vector_string_ {
    void *ctx;
} mlx_vector_string;
typedef struct mlx_device_ {
    void *ctx;
} mlx_device;
typedef struct mlx_stream_ {
    void *ctx;
} mlx_stream;
typedef struct mlx_fast_cuda_kernel_ {
    void *ctx;
} mlx_fast_cuda_kernel;
typedef struct mlx_fast_cuda_kernel_config_ {
    void *ctx;
} mlx_fast_cuda_kernel_config;
typedef struct mlx_fast_metal_kernel_ {
    void *ctx;
} mlx_fast_metal_kernel;
typedef struct mlx_fast_metal_kernel_config_ {
    void *ctx;
} mlx_fast_metal_kernel_config;

typedef enum mlx_dtype_ {
    MLX_BOOL,
    MLX_UINT8,
    MLX_UINT16,
    MLX_UINT32,
    MLX_UINT64,
    MLX_INT8,
    MLX_INT16,
    MLX_INT32,
    MLX_INT64,
    MLX_FLOAT16,
    MLX_FLOAT32,
    MLX_FLOAT64,
    MLX_BFLOAT16,
    MLX_COMPLEX64,
} mlx_dtype;

typedef enum mlx_device_type_ { MLX_CPU, MLX_GPU } mlx_device_type;

typedef struct mlx_optional_int_ {
    int value;
    bool has_value;
} mlx_optional_int;
typedef struct mlx_optional_float_ {
    float value;
    bool has_value;
} mlx_optional_float;
typedef struct mlx_optional_dtype_ {
    mlx_dtype value;
    bool has_value;
} mlx_optional_dtype;

typedef void (*mlx_error_handler_func)(const char *msg, void *data);

#include "mlx_calls.h"

#endif
