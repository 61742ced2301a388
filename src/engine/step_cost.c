/* See step_cost.h. */
#include "step_cost.h"

/* A step of 1/FORGET steps ago counts a third. */
static const double FORGET = 0.98;
/* Before anything was seen: 10 ms a step, 1 ms a row, 1 ms a token. Slow enough for any machine, and forgotten at once; only how
 * much of a step is its rows' is believed until steps of other numbers of rows were seen. */
static const double START[FKV_COST_TERMS] = {0.010, 0.001, 0.001, 0.0};
/* Of the prediction that a step is believed to have taken, once LEARNED steps were seen. */
static const double MOST_BELIEVED = 4.0;
enum { LEARNED = 16, ROWS_TOGETHER = 4 };
/* Units that bring the terms to the same size. */
static const double UNIT[FKV_COST_TERMS] = {1.0, 1.0 / 8, 1.0 / 64, 1.0 / (64 * 1024)};

static void terms_of(fkv_step_work work, double x[FKV_COST_TERMS]) {
    x[0] = UNIT[0];
    x[1] = UNIT[1] * (fkv_ceil_div(work.n_rows, ROWS_TOGETHER) * ROWS_TOGETHER);
    x[2] = UNIT[2] * work.n_prefill;
    x[3] = UNIT[3] * work.history;
}

double fkv_step_history(uint32_t from, uint32_t n) { return (double)n * ((double)from + ((double)n + 1.0) / 2.0); }

fkv_step_cost fkv_step_cost_start(void) {
    fkv_step_cost cost = {0};
    for (int i = 0; i < FKV_COST_TERMS; i++) {
        cost.weights[i] = START[i] / UNIT[i];
        cost.spread[i][i] = 1.0;
    }
    return cost;
}

double fkv_step_cost_predict(const fkv_step_cost *cost, fkv_step_work work) {
    double x[FKV_COST_TERMS];
    double sum = 0.0;
    terms_of(work, x);
    for (int i = 0; i < FKV_COST_TERMS; i++)
        if (cost->weights[i] > 0.0) sum += cost->weights[i] * x[i];
    return sum;
}

bool fkv_step_cost_learned(const fkv_step_cost *cost) { return cost->n_seen >= LEARNED; }

double fkv_step_cost_believed(const fkv_step_cost *cost, double predicted, double seconds) {
    const double most = MOST_BELIEVED * (predicted > 1e-4 ? predicted : 1e-4); /* whatever is predicted, something is learned */
    return fkv_step_cost_learned(cost) && seconds > most ? most : seconds;
}

double fkv_step_cost_request(const fkv_step_cost *cost, uint32_t from, uint32_t n_prompt, double n_new, uint32_t batch) {
    const fkv_step_work empty = {0};
    const fkv_step_work prompt = {.n_prefill = n_prompt, .history = fkv_step_history(from, n_prompt)};
    const fkv_step_work rows = {.n_rows = batch, .history = batch * (from + n_prompt + n_new / 2.0)};
    const double prefill = fkv_step_cost_predict(cost, prompt) - fkv_step_cost_predict(cost, empty);
    return prefill + n_new * fkv_step_cost_predict(cost, rows) / batch;
}

void fkv_step_cost_learn(fkv_step_cost *cost, fkv_step_work work, double seconds) {
    double x[FKV_COST_TERMS];
    double px[FKV_COST_TERMS] = {0};
    double norm = FORGET;
    double error = fkv_step_cost_believed(cost, fkv_step_cost_predict(cost, work), seconds);
    terms_of(work, x);
    for (int i = 0; i < FKV_COST_TERMS; i++) {
        for (int j = 0; j < FKV_COST_TERMS; j++) px[i] += cost->spread[i][j] * x[j];
        norm += x[i] * px[i];
        error -= cost->weights[i] * x[i];
    }
    for (int i = 0; i < FKV_COST_TERMS; i++) {
        cost->weights[i] += px[i] / norm * error;
        for (int j = 0; j < FKV_COST_TERMS; j++) cost->spread[i][j] = (cost->spread[i][j] - px[i] * px[j] / norm) / FORGET;
    }
    /* What no step varies would grow without end: a spread is never wider than at the start. */
    for (int i = 0; i < FKV_COST_TERMS; i++)
        if (!(cost->spread[i][i] < 1.0)) {
            for (int j = 0; j < FKV_COST_TERMS; j++) cost->spread[i][j] = cost->spread[j][i] = 0.0;
            cost->spread[i][i] = 1.0;
        }
    cost->n_seen++;
}

uint32_t fkv_step_cost_chunk(const fkv_step_cost *cost, fkv_step_work work, uint32_t from, uint32_t most, double seconds) {
    uint32_t good = 0;
    for (uint32_t low = 1, high = most; low <= high;) {
        uint32_t middle = low + (high - low) / 2;
        fkv_step_work with = work;
        with.n_prefill += middle;
        with.history += fkv_step_history(from, middle);
        if (fkv_step_cost_predict(cost, with) <= seconds) {
            good = middle;
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    return good;
}
