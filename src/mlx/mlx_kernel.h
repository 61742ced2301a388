/* A custom MLX kernel for Metal or CUDA. The source is passed to MLX once, and a launch configuration is reused as long as the
 * output and the thread-group size stay the same. mlx-c has separate functions for Metal and CUDA; only mlx_kernel.c
 * distinguishes them.
 */
#ifndef FKV_MLX_KERNEL_H
#define FKV_MLX_KERNEL_H

#include "mlx_graph.h"

enum { FKV_MLX_KERNEL_INPUTS = 11 };

typedef struct fkv_mlx_kernel {
    bool is_metal;
    bool is_open;
    uint32_t n_inputs;
    void *kernel; /* `ctx` pointer of the mlx-c handle */
    void *config; /* launch configuration of the last call; NULL before the first call */
    int grid[3];  /* grid size of that configuration, in threads */
    int threads;
    fkv_mlx_shape out_shape;
    mlx_dtype out_type;
    int second_words;
} fkv_mlx_kernel;

/* Source of a kernel. inputs and outputs are NULL-terminated lists of names. A kernel has one output, optionally followed by a
 * second output of 32-bit words (fkv_mlx_launch.second_words). */
typedef struct fkv_mlx_kernel_source {
    const char *name;
    const char *header;
    const char *source;
    int shared_bytes; /* dynamic shared memory of a launch, in bytes; CUDA only */
    const char *const *inputs;
    const char *const *outputs;
} fkv_mlx_kernel_source;

/* Creates the kernel. MLX compiles it at the first evaluation. */
FKV_INTERNAL fkv_status fkv_mlx_kernel_open(fkv_mlx_kernel *kernel, bool is_metal, const fkv_mlx_kernel_source *text);
FKV_INTERNAL void fkv_mlx_kernel_close(fkv_mlx_kernel *kernel);

/* Frees the launch configuration. A copy of a kernel without launch configuration creates its own, which the caller frees with
 * this function. The caller does not close the copy. */
void fkv_mlx_kernel_forget(fkv_mlx_kernel *kernel);

/* Launch geometry and output of one call. */
typedef struct fkv_mlx_launch {
    uint32_t blocks[3];
    uint32_t threads;
    fkv_mlx_shape out_shape;
    mlx_dtype out_type;
    int second_words; /* size of the second output in 32-bit words; 0: the kernel has one output */
} fkv_mlx_launch;

/* Applies the kernel and returns its output. `inputs` has one array for each input name of the kernel source. MLX copies arrays
 * that are not row-contiguous. If the kernel has a second output, *second receives it, unless `second` is NULL. Otherwise,
 * `second` is not used. */
FKV_INTERNAL mlx_array fkv_mlx_kernel_apply(fkv_mlx_graph *g, fkv_mlx_kernel *kernel, const fkv_mlx_launch *launch,
                                            const mlx_array *inputs, mlx_array *second);

#endif
