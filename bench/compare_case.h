/* One case of bench_compare. flatkv, every peer and the exact reference generate the same values from the parameters of the case,
 * so the processes need not exchange values.
 */
#ifndef FKV_COMPARE_CASE_H
#define FKV_COMPARE_CASE_H

#include "../src/kit/numbers.h"

typedef struct compare_case {
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_cached;  /* number of cached tokens, including the new tokens */
    uint32_t n_queries; /* number of new tokens; 1 for decode */
    uint32_t n_seqs;    /* number of sequences in a step; all sequences have the same values but separate pages */
    uint32_t n_threads;
} compare_case;

typedef enum compare_side { COMPARE_K = 1, COMPARE_V, COMPARE_Q } compare_side;

/* Generates the row of one token: [G, D] for K or V, [H, D] for Q. */
static inline void compare_row(const compare_case *c, compare_side side, uint32_t token, float *row) {
    uint64_t state = (uint64_t)token << 8 | (uint64_t)side;
    state = kit_random(&state);
    kit_gaussian(&state, (size_t)(side == COMPARE_Q ? c->n_q_heads : c->n_kv_heads) * c->head_dim, row);
}

#endif
