/* flatkv/engine.h: many requests over one runner. Continuous batching, admission for a whole life, shared prefixes, fair tenants.
 *
 * Who owns what
 *   An engine owns a runner and the one thread that drives it. Requests come from any thread and are copied. What happens to a
 *   request is told by its callback, on the engine's thread: do little there (append to a buffer, wake a loop), take no lock that
 *   is held over a call into the engine, and call nothing of the engine but fkv_engine_cancel(). The last event of a request has
 *   kind FKV_EVENT_DONE; nothing refers to `user` after it.
 *
 * Promises
 *   A request is admitted for its prompt and every token that it may still write, or it waits, or it is refused with the numbers.
 *   What was admitted is never stopped for want of memory and never computed a second time. Tokens of a prompt that the prefix
 *   tree holds are not computed, and a request whose next page another one is computing waits for that page.
 *   On the CPU the text of a request does not depend on what runs beside it, to the last bit.
 */
#ifndef FLATKV_ENGINE_H
#define FLATKV_ENGINE_H

#include "model.h"
#include "prefix_store.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fkv_engine fkv_engine;

enum { FKV_MAX_ANSWERS = 16, FKV_MAX_LOGPROBS = 20, FKV_MAX_DRAFT = 16 };

typedef struct fkv_engine_config {
    fkv_runner_config runner; /* max_seqs answers at once; max_tokens of all requests and cached prefixes together */
    double step_ms;           /* a step is filled with prefill up to this predicted time */
    uint32_t max_queue;       /* requests that wait */
    double max_wait_s;        /* a request whose predicted wait is longer is refused; 0: no bound */
    uint32_t max_tenants;     /* with live requests at once */
    uint32_t default_new;     /* tokens of a request that does not say how many it wants */
    double ageing_s;          /* a request that waited this long counts as one priority higher */
    double output_weight;     /* what a written token counts for a tenant; a computed prompt token counts 1 */
    uint32_t draft_tokens; /* an answer may try this many tokens beyond the next one, found by looking back in its text; 0: none.
                              max_logit_rows holds max_seqs and this: what it has beyond max_seqs is for the drafts of a
                              step. Never changes a text; not done where it does not pay, nor with windowed or sealed layers */

    const fkv_prefix_store *store; /* or NULL: where pages of prefixes go beyond memory, and come back from before a request is
                                      admitted. Copied; closed by its owner after the engine */
} fkv_engine_config;

/* 8 answers at once, steps of 100 ms, 256 waiting for at most 120 s, 64 tenants, 1024 new tokens. K8/V4, whose prefixes are
 * shared by the page. */
FKV_API fkv_engine_config fkv_engine_config_default(void);

/* Opens the runner on a thread of its own. The model stays the caller's and is closed after the engine. */
FKV_API fkv_status fkv_engine_open(const fkv_model *model, const fkv_engine_config *config, fkv_engine **engine);

/* Takes no more requests (FKV_BUSY) and waits until those it has are done, at most `seconds`; true: all are done. */
FKV_API bool fkv_engine_drain(fkv_engine *engine, double seconds);

/* Cancels what is left, waits for the thread and gives everything back. NULL is allowed. */
FKV_API void fkv_engine_close(fkv_engine *engine);

/* ---- requests ------------------------------------------------------------------------------------------------ */

typedef enum fkv_event_kind {
    FKV_EVENT_STARTED = 0,  /* admitted: n_cached tokens of the prompt need no compute */
    FKV_EVENT_TOKEN = 1,    /* an answer has one more token */
    FKV_EVENT_ANSWERED = 2, /* an answer is complete: reason, and the text that was held back */
    FKV_EVENT_DONE = 3      /* all answers are; the last event */
} fkv_event_kind;

typedef enum fkv_finish {
    FKV_FINISH_END = 0,  /* the model ended its text */
    FKV_FINISH_STOP = 1, /* a stop string, which is not part of the text */
    FKV_FINISH_LENGTH = 2,
    FKV_FINISH_CANCELLED = 3,
    FKV_FINISH_DEADLINE = 4,
    FKV_FINISH_FAILED = 5 /* the device or the mask failed, or there was no memory for a sampler; message says why */
} fkv_finish;

typedef struct fkv_logprob {
    uint32_t token;
    float logprob; /* natural, of the model's own distribution */
} fkv_logprob;

/* Good during the callback only. */
typedef struct fkv_event {
    fkv_event_kind kind;
    uint64_t request;
    uint32_t answer;
    uint32_t token;   /* of a TOKEN event */
    const char *text; /* [n_text] what may be shown now: whole characters that cannot become a stop string; may be empty */
    size_t n_text;
    fkv_finish reason; /* of ANSWERED and DONE */
    const char *stop;  /* the stop string that was found, or NULL */
    const char *message;
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_new; /* of this answer; of all answers in DONE */
    float logprob;  /* of the token, where logprobs were asked for */
    const fkv_logprob *top;
    uint32_t n_top;
    double waited_s; /* in the queue */
} fkv_event;

typedef void (*fkv_event_fn)(void *user, const fkv_event *event);

/* Which tokens may come next, on the engine's thread: sets bit token % 32 of bits[token / 32] for each; all are 0 before. tokens:
 * [n_tokens] written so far, in every call those of the call before and one more; a token that ends the text is not among them.
 * No bit at all ends the answer. Returns NULL, or why the answer cannot go on: it fails with these words. Drafts never get past
 * it. */
typedef const char *(*fkv_mask_fn)(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                                   uint32_t n_vocab);

typedef struct fkv_request {
    const uint32_t *prompt; /* [n_prompt], at least one */
    uint32_t n_prompt;
    uint32_t max_new; /* 0: fkv_engine_config.default_new, or what the context leaves */
    uint32_t n;       /* answers; 0 counts as 1. They share every page of the prompt, and have the seeds seed, seed + 1, ... */
    fkv_sampler_config sampler;
    const char *const *stops; /* [n_stops] */
    uint32_t n_stops;
    bool ignore_end;
    bool logprobs;
    uint32_t n_top; /* most likely tokens told beside the one drawn, with logprobs */
    uint64_t tenant;
    const char *tenant_name; /* what a store of prefixes knows the tenant by, over restarts; hashed. NULL: its number */
    double weight;           /* of the tenant's share; 0 counts as 1 */
    int32_t priority;        /* higher goes first, within the tenant */
    double deadline_s;       /* from now; 0: none */
    fkv_mask_fn mask;        /* or NULL */
    void *mask_user;
    fkv_event_fn event;
    void *user;
} fkv_request;

/* Hands a request in. FKV_BUSY: the queue is full or the predicted wait too long, *retry_s (may be NULL) says when to come back:
 * who asks for the same again then counts as waiting since its first call.
 * FKV_POOL_FULL: it can never fit, with the numbers. A request that was refused has no events. */
FKV_API fkv_status fkv_engine_submit(fkv_engine *engine, const fkv_request *request, uint64_t *id, double *retry_s);

/* Its pages are back at the end of the step that is running now. The DONE event still comes. An id that is done is ignored. */
FKV_API void fkv_engine_cancel(fkv_engine *engine, uint64_t id);

/* ---- what it does -------------------------------------------------------------------------------------------- */

/* Pages of prefixes beyond memory. */
typedef struct fkv_store_stats {
    fkv_prefix_store_figures figures;
    uint64_t read_pages; /* that came back, verified */
    uint64_t read_bytes;
    double read_seconds; /* that requests waited for them, one request at a time */
    uint64_t written_pages;
    double write_seconds;
    uint64_t failed_writes;
    uint64_t unsent_pages;  /* the request ended before a buffer was free */
    uint64_t damaged_pages; /* were not what they should be, and were removed */
    uint64_t declined;      /* requests for which computing was predicted to be faster */
    uint64_t late;          /* requests that went on because it had become so */
    uint64_t buffer_bytes;  /* taken at open beside the plan */
} fkv_store_stats;

typedef struct fkv_engine_stats {
    fkv_stats cache;
    fkv_runner_plan plan;
    uint32_t running; /* requests */
    uint32_t waiting;
    uint64_t submitted;
    uint64_t refused_busy;
    uint64_t refused_size;
    uint64_t finished[6];     /* answers by fkv_finish */
    uint64_t prompt_tokens;   /* of admitted requests */
    uint64_t cached_tokens;   /* of them, found in the prefix tree */
    uint64_t computed_tokens; /* of them, computed */
    uint64_t new_tokens;      /* written */
    uint64_t drafted_tokens;  /* tried */
    uint64_t accepted_tokens; /* of them, right */
    uint64_t page_waits;      /* requests that waited for a page another one was computing */
    uint64_t steps;
    uint64_t cancel_steps_most;  /* that ended from the notice of a cancel to the return of its pages */
    double step_seconds;         /* in all */
    double predicted_seconds;    /* what was predicted for them */
    double predicted_wait_s;     /* of a request that would come now */
    uint32_t max_request_tokens; /* prompt and answer of one request */
    uint32_t default_new;
    uint32_t max_tokens; /* of the cache */
    bool consistent;     /* fkv_cache_consistent(), whenever there was nothing to do */
    fkv_store_stats store;
} fkv_engine_stats;

FKV_API void fkv_engine_stats_now(fkv_engine *engine, fkv_engine_stats *stats);

typedef enum fkv_phase { FKV_PHASE_WAITING = 0, FKV_PHASE_PREFILL = 1, FKV_PHASE_DECODE = 2 } fkv_phase;

typedef struct fkv_request_info {
    uint64_t id;
    uint64_t tenant;
    fkv_phase phase;
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_computed; /* of the prompt, the cached part included */
    uint32_t n_new;
    uint32_t max_new;
    double age_s;
} fkv_request_info;

/* The requests it has, running ones first: at most `capacity`. Returns how many were written. */
FKV_API uint32_t fkv_engine_requests(fkv_engine *engine, fkv_request_info *list, uint32_t capacity);

/* The pages of the first group of layers as they were after a step, not before the last call: see fkv_cache_pages(). At most
 * FKV_MAX_PAGES_SHOWN, at even distances where there are more. Returns how many were written. */
enum { FKV_MAX_PAGES_SHOWN = 2048 };
FKV_API uint32_t fkv_engine_pages(fkv_engine *engine, fkv_page_info *list, uint32_t capacity);

#ifdef __cplusplus
}
#endif

#endif
