/* One custom kernel of MLX, for Metal or CUDA: the text is handed over once, and what stays the same between calls is not made
 * anew. mlx-c has two families of the same functions; this is the only place that tells them apart.
 */
#ifndef FKV_MLX_KERNEL_H
#define FKV_MLX_KERNEL_H

#include "mlx_graph.h"

enum { FKV_MLX_KERNEL_INPUTS = 10 };

typedef struct fkv_mlx_kernel {
    bool is_metal;
    bool is_open;
    uint32_t n_inputs;
    void *kernel; /* the ctx of mlx-c's handle */
    void *config; /* of the last call; NULL until there was one */
    int grid[3];  /* of the config, in threads */
    int threads;
    fkv_mlx_shape out_shape;
    mlx_dtype out_type;
} fkv_mlx_kernel;

/* The text of a kernel; inputs and outputs are names, ended by NULL. There is one output. */
typedef struct fkv_mlx_kernel_text {
    const char *name;
    const char *header;
    const char *source;
    int shared_bytes; /* of shared memory that the launch asks for, beside what the text declares; CUDA only */
    const char *const *inputs;
    const char *const *outputs;
} fkv_mlx_kernel_text;

/* Nothing is compiled before the first evaluation. */
fkv_status fkv_mlx_kernel_open(fkv_mlx_kernel *kernel, bool is_metal, const fkv_mlx_kernel_text *text);
void fkv_mlx_kernel_close(fkv_mlx_kernel *kernel);

/* What one call makes, and with how many blocks of how many threads. */
typedef struct fkv_mlx_launch {
    uint32_t blocks[3];
    uint32_t threads;
    fkv_mlx_shape out_shape;
    mlx_dtype out_type;
} fkv_mlx_launch;

/* inputs: as many as the text names. Arrays that are not row contiguous are copied by MLX first. */
mlx_array fkv_mlx_kernel_apply(fkv_mlx_graph *g, fkv_mlx_kernel *kernel, const fkv_mlx_launch *launch, const mlx_array *inputs);

#endif
