/* Shapes for which the kernel for recurrent layers is tested. make_kernel_sources writes the kernel source for each shape, and
 * parity_recurrent runs the kernel on the host. */
#ifndef RECURRENT_CASES_H
#define RECURRENT_CASES_H

#include "../src/model/mlx/recurrent_source.h"

typedef struct recurrent_case {
    fkv_recurrence_kind kind;
    fkv_recurrence shape;
} recurrent_case;

/* Head dimensions include values that are not multiples of 32. Some numbers of rows do not fill the last block. */
static const recurrent_case recurrent_cases[] = {
    {FKV_DELTA_NET, {.n_k_heads = 2, .n_v_heads = 6, .k_dim = 24, .v_dim = 5}},
    {FKV_DELTA_NET, {.n_k_heads = 3, .n_v_heads = 6, .k_dim = 40, .v_dim = 3, .tiled = true}},
    {FKV_DELTA_NET, {.n_k_heads = 1, .n_v_heads = 1, .k_dim = 256, .v_dim = 8}},
    {FKV_MAMBA2, {.n_k_heads = 1, .n_v_heads = 3, .k_dim = 16, .v_dim = 7}},
    {FKV_KDA, {.n_k_heads = 3, .n_v_heads = 3, .k_dim = 40, .v_dim = 40}},
};
enum { N_RECURRENT_CASES = sizeof recurrent_cases / sizeof recurrent_cases[0] };

#endif
