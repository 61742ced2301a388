/* How long a step will take, learned from the steps that were.
 *
 * seconds = c0 + c1 * decode rows (in fours: products take as long for three as for four) + c2 * prefill tokens + c3 * tokens of
 * history that are read, found by recursive least squares that forgets old steps slowly. Coefficients below zero count as zero,
 * so more work is never predicted to take less time. What took much longer than predicted (the process was stopped, the machine
 * slept) is learned as a few times longer, no more.
 */
#ifndef FKV_STEP_COST_H
#define FKV_STEP_COST_H

#include "../base/base.h"

enum { FKV_COST_TERMS = 4 };

typedef struct fkv_step_work {
    uint32_t n_rows;    /* of decode */
    uint32_t n_prefill; /* tokens */
    double history;     /* sum over all tokens of the step of what each attends to */
} fkv_step_work;

typedef struct fkv_step_cost {
    double weights[FKV_COST_TERMS];
    double spread[FKV_COST_TERMS][FKV_COST_TERMS];
    uint64_t n_seen;
} fkv_step_cost;

fkv_step_cost fkv_step_cost_start(void);
double fkv_step_cost_predict(const fkv_step_cost *cost, fkv_step_work work); /* seconds */
void fkv_step_cost_learn(fkv_step_cost *cost, fkv_step_work work, double seconds);

bool fkv_step_cost_learned(const fkv_step_cost *cost); /* from more than a few steps */

/* What is believed of a step that was predicted and took so long. */
double fkv_step_cost_believed(const fkv_step_cost *cost, double predicted, double seconds);

/* Seconds of the machine that a request takes beside others: n_prompt tokens behind `from` others, then n_new rows of decode in
 * steps of `batch` rows like it. */
double fkv_step_cost_request(const fkv_step_cost *cost, uint32_t from, uint32_t n_prompt, double n_new, uint32_t batch);

/* The most tokens, up to `most`, of a prompt already computed to `from`, that may join `work` within `seconds`. */
uint32_t fkv_step_cost_chunk(const fkv_step_cost *cost, fkv_step_work work, uint32_t from, uint32_t most, double seconds);

/* What `n` tokens behind `from` others attend to. */
double fkv_step_history(uint32_t from, uint32_t n);

#endif
