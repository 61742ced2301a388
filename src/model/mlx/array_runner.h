/* What a runner on MLX keeps beside what every runner has: a stream, constants, and the host's side of what is uploaded once for
 * a step. Everything else of a step is MLX's own, made and given back with the step.
 */
#ifndef FKV_ARRAY_RUNNER_H
#define FKV_ARRAY_RUNNER_H

#include "../forward/runner.h"
#include "array_weights.h"

typedef struct fkv_turn {
    double cosine;
    double sine;
} fkv_turn;

struct fkv_array_runner {
    fkv_mlx_graph graph;
    size_t step_bytes;         /* that a step may have in use beyond what is in use before it */
    size_t cache_limit_before; /* MLX's, put back at close */
    bool cache_limit_is_set;
    mlx_array embedding_scale;       /* empty where it is 1 */
    mlx_array *k_centers;            /* [n_layers] of [G, D], or NULL: see fkv_architecture_centers_keys() */
    fkv_turn *one_turn[FKV_N_ROPES]; /* [n_pairs] from one position to the next */
    float *angles;                   /* [T, n_pairs] cosine and sine side by side */
    int32_t *numbers;                /* [T] */
};

/* The angles of a position. turns: [n_pairs] */
void fkv_array_angles(const fkv_runner *runner, uint32_t rope, double position, fkv_turn *turns);

/* As fkv_model_backend has it. */
fkv_status fkv_array_forward(fkv_runner *runner, fkv_step *step);

#endif
