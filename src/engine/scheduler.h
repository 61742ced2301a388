/* The engine without its thread: requests go in, turns are taken, events come out.
 *
 * A turn admits who fits, fills one step with a decode row of every running answer and with prefill up to the predicted step
 * time, runs it, and draws the next tokens. It takes no memory but for the samplers of those it admits. The model and the clock
 * are behind fkv_engine_device, so that tests take turns with a model of their own and a clock that only steps move.
 *
 * Invariants: every running job has an open sequence for each unfinished answer, promised for its whole life; running jobs lie in
 * the order of their admission; a job is in the line or running or done.
 */
#ifndef FKV_ENGINE_SCHEDULER_H
#define FKV_ENGINE_SCHEDULER_H

#include "fair_share.h"
#include "prefix_tier.h"
#include "request.h"
#include "step_cost.h"
#include "waiting_line.h"

typedef struct fkv_engine_device {
    void *user;
    fkv_status (*forward)(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits);
    double (*seconds)(void *user);
    const char *(*token_text)(void *user, uint32_t token, size_t *n_bytes);
    fkv_cache *cache;
    uint32_t n_vocab;
    uint32_t max_tokens; /* of the cache */
    uint32_t context;    /* of one sequence */
    uint32_t max_seqs;
    uint32_t max_step_tokens; /* more than max_seqs */
    uint32_t page_tokens;
    bool windowed;         /* it has window groups, whose pages a fork needs whatever it shares */
    uint32_t draft_tokens; /* most tokens drafted for an answer */
    uint32_t draft_rows;   /* of logits, for all drafts of a step */
    uint32_t n_end;
    uint32_t end[FKV_MAX_END_TOKENS];
} fkv_engine_device;

typedef struct fkv_row_owner {
    fkv_job *job;
    uint32_t answer;
} fkv_row_owner;

typedef struct fkv_scheduler {
    fkv_engine_config config;
    fkv_engine_device device;
    fkv_fair_share share;
    fkv_step_cost cost;
    fkv_waiting_line line;
    fkv_job **running; /* [max_seqs] */
    uint32_t n_running;
    uint32_t n_seqs; /* open */
    uint64_t turn;
    fkv_tokens *rows;      /* [max_seqs] of the step */
    fkv_row_owner *owners; /* [max_seqs] */
    uint32_t n_rows;
    fkv_draft_offer *offers; /* [max_seqs] */
    uint32_t n_drafted;      /* tokens of the step */
    float *masked;           /* [n_vocab] logits of the tokens that a mask allows, and its bits */
    uint32_t *mask_bits;
    size_t max_token_bytes;
    double predicted_s; /* of the steps of the last half minute or so, and what their turns took */
    double taken_s;
    double used_share;                        /* of max_new, that answers turn out to write */
    double n_shares;                          /* answers that it comes from */
    fkv_prefix_tier tier;                     /* without traffic where there is no store */
    void (*retire)(void *user, fkv_job *job); /* after its last event: takes the job over */
    void *retire_user;
    fkv_engine_stats stats; /* without those of the cache */
} fkv_scheduler;

fkv_status fkv_scheduler_open(fkv_scheduler *s, const fkv_engine_config *config, const fkv_engine_device *device);
void fkv_scheduler_close(fkv_scheduler *s); /* no job may be left */

/* What a request may be, or why not: FKV_BAD_ARGUMENT, or FKV_POOL_FULL with the numbers. Any thread: reads constants only. */
fkv_status fkv_scheduler_check(const fkv_scheduler *s, const fkv_request *request, uint32_t *max_new);

void fkv_scheduler_accept(fkv_scheduler *s, fkv_job *job); /* into the line */
bool fkv_scheduler_turn(fkv_scheduler *s);                 /* false: there was nothing to do */

/* What is needed to foresee what a request takes; a copy may be asked by any thread. */
typedef struct fkv_forecast {
    fkv_step_cost cost;
    double slowness;   /* seconds of a turn for each predicted second of its step */
    double used_share; /* of max_new */
    uint32_t batch;    /* answers at once */
} fkv_forecast;

fkv_forecast fkv_scheduler_forecast(const fkv_scheduler *s);
double fkv_forecast_seconds(const fkv_forecast *f, const fkv_job *job); /* of the machine, that a job still takes */
double fkv_scheduler_wait(const fkv_scheduler *s);                      /* seconds of a request that would come now */
uint32_t fkv_scheduler_list(const fkv_scheduler *s, fkv_request_info *list, uint32_t capacity);

#endif
