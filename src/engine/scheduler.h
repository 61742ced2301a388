/* The scheduler implements the engine without its thread. The caller adds requests and calls fkv_scheduler_turn() in a loop; each
 * call is one turn. The scheduler reports events through callbacks.
 *
 * A turn admits the queued requests that fit, builds a step, runs it, and samples the next tokens. The step consists of one
 * decode row per running answer and of as much prefill as fits into the target step time. The only memory allocated during a turn
 * is for the samplers of newly admitted requests. The model and the clock are accessed through fkv_engine_device, so tests can
 * use a mock model and a simulated clock.
 *
 * Invariants: every running job has an open sequence for each unfinished answer, with all its pages reserved. Running jobs are in
 * admission order. A job is queued, running or done.
 */
#ifndef FKV_ENGINE_SCHEDULER_H
#define FKV_ENGINE_SCHEDULER_H

#include "fair_share.h"
#include "prefix_tier.h"
#include "request.h"
#include "request_queue.h"
#include "step_cost.h"
#include "step_turns.h"

typedef struct fkv_engine_device {
    void *user;
    fkv_status (*forward)(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits);
    /* `verify` runs a step with drafts and leaves it open; `accept` ends this step. See fkv_runner_verify(). */
    fkv_status (*verify)(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits);
    fkv_status (*accept)(void *user, const uint32_t *n_kept);
    fkv_step_turns *turns; /* serializes the steps of engines that share CPU cores; NULL if there is only one engine */
    double (*seconds)(void *user);
    const char *(*token_text)(void *user, uint32_t token, size_t *n_bytes);
    fkv_cache *cache;
    uint32_t n_vocab;
    uint32_t max_tokens; /* capacity of the cache, in tokens */
    uint32_t context;    /* maximum length of one sequence, in tokens */
    uint32_t max_seqs;
    uint32_t max_step_tokens; /* must exceed max_seqs */
    uint32_t page_tokens;
    bool has_states; /* true if the cache has state layers; prefixes are then shared only up to snapshots */
    bool has_sealed; /* true if the cache has sealed layers; a shared prefix can then end inside a span only if the pages of this
                        span are still open */
    bool windowed;   /* true if the cache has sliding-window layers or states, whose pages a fork cannot share */
    uint32_t draft_tokens; /* maximum number of draft tokens per answer */
    uint32_t draft_rows;   /* maximum total number of draft tokens in a step */
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
    fkv_request_queue queue;
    fkv_job **running; /* [max_seqs] */
    uint32_t n_running;
    uint32_t n_seqs;       /* number of open sequences */
    uint64_t turn;         /* number of turns run so far */
    bool pages_limited;    /* true if the last turn left a job queued because pages or sequences were used up */
    fkv_tokens *rows;      /* [max_seqs] rows of the current step */
    fkv_row_owner *owners; /* [max_seqs] job and answer of each row */
    uint32_t n_rows;
    fkv_draft_candidate *candidates;          /* [max_seqs] */
    uint32_t n_drafted;                       /* number of draft tokens in the current step */
    uint32_t *n_kept;                         /* [max_seqs] number of tokens that each row of a step with drafts keeps */
    bool is_verifying;                        /* true while a step with drafts is open */
    float *masked;                            /* [n_vocab] logits after masking */
    uint32_t *mask_bits;                      /* [ceil(n_vocab / 32)] */
    size_t max_token_bytes;                   /* size of the longest token text, in bytes */
    double predicted_s;                       /* exponentially decaying sum of predicted step times, in seconds */
    double taken_s;                           /* exponentially decaying sum of measured turn times, in seconds */
    double used_fraction;                     /* moving average of (generated tokens / max_new) over finished answers */
    double n_used_samples;                    /* number of samples in used_fraction, including its initial value */
    fkv_prefix_tier tier;                     /* tier.traffic is NULL if there is no prefix store */
    void (*retire)(void *user, fkv_job *job); /* takes ownership of a job after its last event */
    void *retire_user;
    fkv_engine_stats stats; /* statistics; the scheduler maintains all fields except `cache` and `plan` */
} fkv_scheduler;

fkv_status fkv_scheduler_open(fkv_scheduler *s, const fkv_engine_config *config, const fkv_engine_device *device);
void fkv_scheduler_close(fkv_scheduler *s); /* must not be called while a job is queued or running */

/* Runs and measures a few steps before the first request, so that the first predictions are based on the speed of this machine. A
 * failed step is ignored, because the first request then reports the error. Must be called before the first request. */
void fkv_scheduler_warm_up(fkv_scheduler *s);

/* Validates a request and returns its effective max_new. Returns FKV_BAD_ARGUMENT if an argument is invalid, or FKV_POOL_FULL if
 * the request can never fit. May be called from any thread, because it reads only constants. */
fkv_status fkv_scheduler_check(const fkv_scheduler *s, const fkv_request *request, uint32_t *max_new);

/* Waits for the engine's turn and runs the step described by s->rows. *seconds receives the time of the step, excluding the
 * wait. A step with drafts (s->n_drafted > 0) is left open. */
fkv_status fkv_scheduler_step(fkv_scheduler *s, uint32_t n_rows, const float **logits, double *seconds);

/* Adds a job to the queue. */
void fkv_scheduler_accept(fkv_scheduler *s, fkv_job *job);

/* Runs one turn. Returns false if there was nothing to compute. */
bool fkv_scheduler_turn(fkv_scheduler *s);

/* Inputs for predicting the machine time of a request. Any thread may use a copy of this struct. */
typedef struct fkv_forecast {
    fkv_step_cost cost;
    double slowdown;      /* ratio of measured turn time to predicted step time */
    double used_fraction; /* expected ratio of generated tokens to max_new */
    uint32_t batch;       /* number of answers decoded in one step */
} fkv_forecast;

fkv_forecast fkv_scheduler_forecast(const fkv_scheduler *s);

/* Predicts the remaining machine time of a job, in seconds. */
double fkv_forecast_job_seconds(const fkv_forecast *f, const fkv_job *job);

/* Predicts the machine time, in seconds, of a typical request. This time is the unit of fkv_reservation.work. */
double fkv_forecast_unit_seconds(const fkv_forecast *f);

/* Predicts the queue time, in seconds, of a request submitted now. */
double fkv_scheduler_wait(const fkv_scheduler *s);

/* Predicts the time, in seconds, until the next queued request starts. */
double fkv_scheduler_next_start(const fkv_scheduler *s);

/* Lists up to `capacity` jobs, with running jobs first. Returns the number of entries written. */
uint32_t fkv_scheduler_list(const fkv_scheduler *s, fkv_request_info *list, uint32_t capacity);

#endif
