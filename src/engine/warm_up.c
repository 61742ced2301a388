/* Measures the step time of the device before the first request. See fkv_scheduler_warm_up() in scheduler.h. */
#include "scheduler.h"

enum {
    WARM_UP_PREFILL = 64, /* number of prefill tokens */
    WARM_UP_ROWS = 16,    /* number of decode rows */
    WARM_UP_NEW = 4       /* maximum number of tokens that are decoded per sequence */
};

/* Runs a step of n_rows rows with n_tokens tokens each. *seconds receives the measured time. */
static bool run_warm_up_step(fkv_scheduler *s, const fkv_seq *seqs, uint32_t n_rows, uint32_t n_tokens, double *seconds) {
    static const uint32_t tokens[WARM_UP_PREFILL] = {0};
    const float *logits = NULL;
    for (uint32_t i = 0; i < n_rows; i++) s->rows[i] = (fkv_tokens){seqs[i], tokens, n_tokens, FKV_LOGITS_LAST};
    return fkv_scheduler_step(s, n_rows, &logits, seconds) == FKV_OK;
}

void fkv_scheduler_warm_up(fkv_scheduler *s) {
    fkv_seq seqs[WARM_UP_ROWS];
    uint32_t n = 0;
    fkv_step_times times = {
        .n_prefill = fkv_min_u32(WARM_UP_PREFILL, fkv_min_u32(s->device.max_step_tokens, s->stats.max_request_tokens / 2))};
    while (n < fkv_min_u32(WARM_UP_ROWS, s->device.max_seqs)) {
        const fkv_seq_config config = {.max_tokens = n == 0 ? times.n_prefill + WARM_UP_NEW : WARM_UP_NEW};
        if (fkv_seq_open(s->device.cache, &config, &seqs[n], NULL) != FKV_OK) break;
        n++;
    }
    times.n_rows = n;
    if (n > 0 && times.n_prefill > 1 && run_warm_up_step(s, seqs, 1, 1, &times.one_row_s) && /* loads the weights into memory */
        run_warm_up_step(s, seqs, 1, times.n_prefill, &times.prefill_s) && run_warm_up_step(s, seqs, n, 1, &times.all_rows_s) &&
        run_warm_up_step(s, seqs, 1, 1, &times.one_row_s))
        s->cost = fkv_step_cost_measured(times);
    for (uint32_t i = 0; i < n; i++) (void)fkv_seq_close(s->device.cache, seqs[i]);
}
