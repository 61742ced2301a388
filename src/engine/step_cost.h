/* Online model of the step time.
 *
 *   seconds = c0 + c1 * decode rows + c2 * prefill tokens + c3 * attended tokens
 *
 * Decode rows are rounded up to a multiple of 4, because a matrix product with 3 rows takes as long as one with 4 rows. The
 * coefficients are fitted by recursive least squares with exponential forgetting. Negative coefficients are treated as zero, so
 * adding work never decreases a prediction. If a step took much longer than predicted, for example because the process was
 * stopped, its time is clamped before the model learns from it.
 */
#ifndef FKV_STEP_COST_H
#define FKV_STEP_COST_H

#include "../base/base.h"

enum { FKV_COST_TERMS = 4 };

typedef struct fkv_step_work {
    uint32_t n_rows;    /* number of decode rows, including draft tokens */
    uint32_t n_prefill; /* number of prefill tokens */
    double history;     /* number of attended tokens, summed over all tokens of the step */
} fkv_step_work;

typedef struct fkv_step_cost {
    double weights[FKV_COST_TERMS];
    double covariance[FKV_COST_TERMS][FKV_COST_TERMS];
    uint64_t n_steps; /* number of updates */
} fkv_step_cost;

fkv_step_cost fkv_step_cost_init(void);

/* Measured times of three kinds of steps, in seconds. */
typedef struct fkv_step_times {
    double one_row_s;  /* decode step with one row */
    double all_rows_s; /* decode step with n_rows rows */
    uint32_t n_rows;
    double prefill_s; /* prefill step with n_prefill tokens */
    uint32_t n_prefill;
} fkv_step_times;

/* Returns a model whose predictions match the measured times of the decode step with n_rows rows and of the prefill step. */
fkv_step_cost fkv_step_cost_measured(fkv_step_times times);

/* Returns the predicted time of a step, in seconds. */
double fkv_step_cost_predict(const fkv_step_cost *cost, fkv_step_work work);

/* Updates the coefficients with the time of a measured step. */
void fkv_step_cost_update(fkv_step_cost *cost, fkv_step_work work, double seconds);

/* Returns true if enough steps were measured to rely on predictions. */
bool fkv_step_cost_ready(const fkv_step_cost *cost);

/* Returns the measured time, limited to a multiple of the predicted time once the model is ready. */
double fkv_step_cost_clamp(const fkv_step_cost *cost, double predicted, double seconds);

/* Estimates the machine time, in seconds, of a request in a shared batch. The first `from` prompt tokens are already computed.
 * The request then needs prefill of n_prompt more tokens, followed by n_new decode steps. Each decode step has `batch` rows of
 * equal cost, one of which belongs to the request. */
double fkv_step_cost_request(const fkv_step_cost *cost, uint32_t from, uint32_t n_prompt, double n_new, uint32_t batch);

/* Returns the largest number of prefill tokens, up to max_tokens, for which a step that also contains `work` is predicted to take
 * at most `seconds` seconds. The first `from` tokens of the prompt are already computed. */
uint32_t fkv_step_cost_max_prefill(const fkv_step_cost *cost, fkv_step_work work, uint32_t from, uint32_t max_tokens,
                                   double seconds);

/* Returns the number of attended tokens, summed over the n query tokens at positions `from` to `from` + n - 1. */
double fkv_step_history(uint32_t from, uint32_t n);

#endif
