/* One case of bench_compare: the same numbers for flatkv, for every peer and for the exact answer, made again wherever they are
 * needed, so that no process has to hand them to another.
 */
#ifndef FKV_COMPARE_CASE_H
#define FKV_COMPARE_CASE_H

#include "../src/kit/numbers.h"

typedef struct compare_case {
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_cached;  /* tokens, the new ones included */
    uint32_t n_queries; /* new tokens: 1 for decode */
    uint32_t n_seqs;    /* in one step, each with all of that; their numbers are the same, their pages are not */
    uint32_t n_threads;
} compare_case;

typedef enum compare_side { COMPARE_K = 1, COMPARE_V, COMPARE_Q } compare_side;

/* The row of one token: [G, D] of K or V, [H, D] of Q. */
static inline void compare_row(const compare_case *c, compare_side side, uint32_t token, float *row) {
    uint64_t state = (uint64_t)token << 8 | (uint64_t)side;
    state = kit_random(&state);
    kit_gaussian(&state, (size_t)(side == COMPARE_Q ? c->n_q_heads : c->n_kv_heads) * c->head_dim, row);
}

#endif
