/* The MLX-specific part of a runner: a stream, constants, and host buffers for the values that are uploaded in each step. MLX
 * allocates and releases everything else.
 */
#ifndef FKV_ARRAY_RUNNER_H
#define FKV_ARRAY_RUNNER_H

#include "../../mlx/mlx_product.h"
#include "../forward/runner.h"
#include "array_weights.h"

typedef struct fkv_turn {
    double cosine;
    double sine;
} fkv_turn;

struct fkv_array_runner {
    fkv_mlx_graph graph;
    size_t step_bytes; /* number of bytes that a step may allocate, in addition to the memory that is in use before the step */
    size_t cache_limit_before; /* limit of MLX's buffer cache before the runner was opened; restored when it is closed */
    bool cache_limit_is_set;
    mlx_array embedding_scale;       /* scale of the embeddings; empty if the scale is 1 */
    mlx_array *k_centers;            /* [n_layers] key centers, each [G, D], or NULL; see fkv_architecture_centers_keys() */
    fkv_turn *one_turn[FKV_N_ROPES]; /* [n_pairs] rotation of each pair from one position to the next */
    mlx_array *states;               /* [max_seqs] states of the current recurrent layer; empty between layers */
    fkv_mlx_kernel recurrence;       /* kernel of the recurrence on a GPU; opened on first use */
    fkv_mlx_products products;       /* kernels of products with quantized matrices on CUDA */
    float *angles;                   /* [T, n_pairs] pairs of cosine and sine */
    int32_t *numbers;                /* [T] */
};

/* Computes the rotation (cosine and sine) of each pair at a position. turns: [n_pairs] */
void fkv_array_angles(const fkv_runner *runner, uint32_t rope, double position, fkv_turn *turns);

/* Implements fkv_model_backend.forward. */
fkv_status fkv_array_forward(fkv_runner *runner, fkv_step *step);

#endif
