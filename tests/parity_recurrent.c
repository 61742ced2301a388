/* Runs the GPU kernel for recurrent layers on the host and compares its outputs and states with those of the CPU backend. Results
 * must be bit-identical whether the tokens run in one call or in two. */
#include "attn_cases.h"
#include "recurrent_cases.h"
#include "relative_l2.h"

#include "../src/model/forward/vector_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void recurrent_function(uint32_t n_blocks, uint32_t n_threads, const void *const *in, float *out);
recurrent_function recurrent_case_0, recurrent_case_1, recurrent_case_2, recurrent_case_3, recurrent_case_4;
static recurrent_function *const functions[N_RECURRENT_CASES] = {recurrent_case_0, recurrent_case_1, recurrent_case_2,
                                                                 recurrent_case_3, recurrent_case_4};

static const double TOLERANCE = 1e-6; /* the kernel may add floats in a different order */
enum { N_TOKENS = 9, FIRST_TOKENS = 4, MAX_VALUES = 8192 };

/* Inputs of one case. */
typedef struct inputs {
    float state[MAX_VALUES], queries[MAX_VALUES], keys[MAX_VALUES], values[MAX_VALUES], decay[MAX_VALUES], beta[MAX_VALUES];
} inputs;

static void fill(uint64_t *random, float scale, float offset, float *out) {
    for (int i = 0; i < MAX_VALUES; i++) out[i] = offset + scale * attn_gaussian(random);
}

/* Runs all tokens with the operations of the CPU backend. state: [n_v_heads, v_dim, k_dim], updated in place */
static void run_reference(const recurrent_case *c, const inputs *x, float *state, float *out) {
    const fkv_recurrence *s = &c->shape;
    const fkv_vector_ops *ops = &fkv_vector_ops_plain;
    for (uint32_t i = 0; i < N_TOKENS * s->n_v_heads; i++) { /* i: token * n_v_heads + value head */
        const uint32_t head = i % s->n_v_heads;
        const uint32_t k_head = s->tiled ? head % s->n_k_heads : head / (s->n_v_heads / s->n_k_heads);
        const size_t key = ((size_t)(i / s->n_v_heads) * s->n_k_heads + k_head) * s->k_dim;
        const size_t value = (size_t)i * s->v_dim;
        float *at = state + (size_t)head * s->v_dim * s->k_dim;
        if (c->kind == FKV_DELTA_NET)
            ops->delta_step(at, at, s->v_dim, s->k_dim, x->keys + key, x->queries + key, x->values + value, x->decay[i],
                            x->beta[i], out + value);
        else if (c->kind == FKV_KDA)
            ops->kda_step(at, at, s->v_dim, s->k_dim, x->keys + key, x->queries + key, x->values + value,
                          x->decay + (size_t)i * s->k_dim, x->beta[i], out + value);
        else
            ops->ssm_step(at, at, s->v_dim, s->k_dim, x->keys + key, x->queries + key, x->values + value, x->decay[i], x->beta[i],
                          0.0f, out + value);
    }
}

/* Runs tokens [from, from + n) from the given state. Writes the outputs, followed by the new state, to `out`. Returns a pointer
 * to the new state. */
static const float *run_kernel(uint32_t i, const inputs *x, const float *state, uint32_t from, uint32_t n, float *out) {
    const fkv_recurrence *s = &recurrent_cases[i].shape;
    const uint32_t n_rows = s->n_v_heads * s->v_dim;
    const size_t key = (size_t)from * s->n_k_heads * s->k_dim;
    const size_t gate = (size_t)from * s->n_v_heads;
    const size_t decay = recurrent_cases[i].kind == FKV_KDA ? gate * s->k_dim : gate;
    const void *in[] = {
        state, x->queries + key, x->keys + key, x->values + (size_t)from * n_rows, x->decay + decay, x->beta + gate, &n};
    functions[i](fkv_ceil_div(n_rows, FKV_RECURRENT_ROWS), FKV_RECURRENT_THREADS, in, out);
    return out + (size_t)n * n_rows;
}

static bool check(uint32_t i) {
    static inputs x;
    static float expected[MAX_VALUES];
    static float expected_state[MAX_VALUES];
    static float whole[2 * MAX_VALUES];
    static float first[2 * MAX_VALUES];
    static float last[2 * MAX_VALUES];
    const fkv_recurrence *s = &recurrent_cases[i].shape;
    const size_t n_state = (size_t)s->n_v_heads * s->v_dim * s->k_dim;
    const size_t n_row = (size_t)s->n_v_heads * s->v_dim;
    uint64_t random = 40 + i;
    fill(&random, 1.0f, 0.0f, x.state);
    fill(&random, 0.3f, 0.0f, x.queries);
    fill(&random, 0.3f, 0.0f, x.keys);
    fill(&random, 1.0f, 0.0f, x.values);
    fill(&random, 0.05f, 0.9f, x.decay);
    fill(&random, 0.1f, 0.5f, x.beta);
    memcpy(expected_state, x.state, sizeof expected_state);
    run_reference(&recurrent_cases[i], &x, expected_state, expected);
    const float *state = run_kernel(i, &x, x.state, 0, N_TOKENS, whole);
    const double of_outputs = relative_l2(whole, expected, N_TOKENS * n_row);
    const double of_state = relative_l2(state, expected_state, n_state);
    const float *middle = run_kernel(i, &x, x.state, 0, FIRST_TOKENS, first);
    const float *end = run_kernel(i, &x, middle, FIRST_TOKENS, N_TOKENS - FIRST_TOKENS, last);
    const bool same = memcmp(first, whole, FIRST_TOKENS * n_row * sizeof *whole) == 0 &&
                      memcmp(last, whole + FIRST_TOKENS * n_row, (N_TOKENS - FIRST_TOKENS) * n_row * sizeof *whole) == 0 &&
                      memcmp(end, state, n_state * sizeof *whole) == 0;
    printf("case %u: relative L2 error of outputs %.1e, of the state %.1e%s\n", i, of_outputs, of_state,
           same ? "" : "; running the tokens in two parts changes bits");
    return same && of_outputs <= TOLERANCE && of_state <= TOLERANCE;
}

int main(void) {
    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < N_RECURRENT_CASES; i++) n_failed += !check(i);
    printf("%d cases, %u failed\n", (int)N_RECURRENT_CASES, n_failed);
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
