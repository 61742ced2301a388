/* See step_cost.h. */
#include "step_cost.h"

/* Forgetting factor: the weight of a step relative to the step after it. After 50 more steps, the weight of a step is about 1/e.
 */
static const double FORGETTING_FACTOR = 0.98;
/* Initial coefficients: 10 ms per step, 1 ms per decode row, 1 ms per prefill token. They are conservative, and measurements
 * quickly replace them. However, if all measured steps have the same number of rows, the cost per step cannot be distinguished
 * from the cost per row, and the initial ratio of these two coefficients remains. */
static const double INITIAL_SECONDS[FKV_COST_TERMS] = {0.010, 0.001, 0.001, 0.0};
/* Once MIN_STEPS steps have been measured, a measured time is limited to this multiple of the predicted time before it updates
 * the model. */
static const double MAX_OVERRUN = 4.0;
enum { MIN_STEPS = 16, ROW_GROUP = 4 };
/* Scale factors that give the terms of the model similar magnitudes. */
static const double SCALE[FKV_COST_TERMS] = {1.0, 1.0 / 8, 1.0 / 64, 1.0 / (64 * 1024)};

static void cost_terms(fkv_step_work work, double x[FKV_COST_TERMS]) {
    x[0] = SCALE[0];
    x[1] = SCALE[1] * (fkv_ceil_div(work.n_rows, ROW_GROUP) * ROW_GROUP);
    x[2] = SCALE[2] * work.n_prefill;
    x[3] = SCALE[3] * work.history;
}

double fkv_step_history(uint32_t from, uint32_t n) { return (double)n * ((double)from + ((double)n + 1.0) / 2.0); }

fkv_step_cost fkv_step_cost_init(void) {
    fkv_step_cost cost = {0};
    for (int i = 0; i < FKV_COST_TERMS; i++) {
        cost.weights[i] = INITIAL_SECONDS[i] / SCALE[i];
        cost.covariance[i][i] = 1.0;
    }
    return cost;
}

fkv_step_cost fkv_step_cost_measured(fkv_step_times t) {
    fkv_step_cost cost = fkv_step_cost_init();
    const double rows = fkv_ceil_div(t.n_rows, ROW_GROUP) * ROW_GROUP;
    double step_s =
        t.one_row_s / 2.0; /* default: half of the time of a one-row step is the cost per step, and half is the cost per row */
    if (rows > (double)ROW_GROUP)
        step_s = t.one_row_s - (t.all_rows_s - t.one_row_s) / (rows - (double)ROW_GROUP) * (double)ROW_GROUP;
    if (step_s < 0.0) step_s = 0.0;
    if (step_s > t.one_row_s) step_s = t.one_row_s;
    cost.weights[0] = step_s / SCALE[0];
    cost.weights[1] = (t.all_rows_s > step_s ? t.all_rows_s - step_s : 0.0) / rows / SCALE[1];
    cost.weights[2] = (t.prefill_s > step_s ? t.prefill_s - step_s : 0.0) / t.n_prefill / SCALE[2];
    return cost;
}

double fkv_step_cost_predict(const fkv_step_cost *cost, fkv_step_work work) {
    double x[FKV_COST_TERMS];
    double sum = 0.0;
    cost_terms(work, x);
    for (int i = 0; i < FKV_COST_TERMS; i++)
        if (cost->weights[i] > 0.0) sum += cost->weights[i] * x[i];
    return sum;
}

bool fkv_step_cost_ready(const fkv_step_cost *cost) { return cost->n_steps >= MIN_STEPS; }

double fkv_step_cost_clamp(const fkv_step_cost *cost, double predicted, double seconds) {
    const double max_tokens =
        MAX_OVERRUN *
        (predicted > 1e-4 ? predicted : 1e-4); /* the lower bound lets the model learn even if its prediction is near 0 */
    return fkv_step_cost_ready(cost) && seconds > max_tokens ? max_tokens : seconds;
}

double fkv_step_cost_request(const fkv_step_cost *cost, uint32_t from, uint32_t n_prompt, double n_new, uint32_t batch) {
    const fkv_step_work empty = {0};
    const fkv_step_work prompt = {.n_prefill = n_prompt, .history = fkv_step_history(from, n_prompt)};
    const fkv_step_work rows = {.n_rows = batch, .history = batch * (from + n_prompt + n_new / 2.0)};
    const double prefill = fkv_step_cost_predict(cost, prompt) - fkv_step_cost_predict(cost, empty);
    return prefill + n_new * fkv_step_cost_predict(cost, rows) / batch;
}

void fkv_step_cost_update(fkv_step_cost *cost, fkv_step_work work, double seconds) {
    double x[FKV_COST_TERMS];
    double gain[FKV_COST_TERMS] = {0};
    double norm = FORGETTING_FACTOR;
    double error = fkv_step_cost_clamp(cost, fkv_step_cost_predict(cost, work), seconds);
    cost_terms(work, x);
    for (int i = 0; i < FKV_COST_TERMS; i++) {
        for (int j = 0; j < FKV_COST_TERMS; j++) gain[i] += cost->covariance[i][j] * x[j];
        norm += x[i] * gain[i];
        error -= cost->weights[i] * x[i];
    }
    for (int i = 0; i < FKV_COST_TERMS; i++) {
        cost->weights[i] += gain[i] / norm * error;
        for (int j = 0; j < FKV_COST_TERMS; j++)
            cost->covariance[i][j] = (cost->covariance[i][j] - gain[i] * gain[j] / norm) / FORGETTING_FACTOR;
    }
    /* If the inputs do not vary, the forgetting factor would let the covariance grow without bound, so the covariance is reset to
     * its initial value.
     */
    for (int i = 0; i < FKV_COST_TERMS; i++)
        if (!(cost->covariance[i][i] < 1.0)) {
            for (int j = 0; j < FKV_COST_TERMS; j++) cost->covariance[i][j] = cost->covariance[j][i] = 0.0;
            cost->covariance[i][i] = 1.0;
        }
    cost->n_steps++;
}

uint32_t fkv_step_cost_max_prefill(const fkv_step_cost *cost, fkv_step_work work, uint32_t from, uint32_t max_tokens,
                                   double seconds) {
    uint32_t fitting = 0;
    for (uint32_t low = 1, high = max_tokens; low <= high;) {
        uint32_t middle = low + (high - low) / 2;
        fkv_step_work with = work;
        with.n_prefill += middle;
        with.history += fkv_step_history(from, middle);
        if (fkv_step_cost_predict(cost, with) <= seconds) {
            fitting = middle;
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    return fitting;
}
