/* flatkv/engine.h: an inference engine that runs many requests on one model. It provides continuous batching, admission control,
 * prefix caching and fair scheduling between tenants.
 *
 * Ownership and threads
 *   An engine owns a runner and the single thread that drives it. Requests may be submitted from any thread;
 *   fkv_engine_submit() copies them. The engine reports progress through the request's callback, which runs on the engine
 *   thread. A callback should return quickly, must not take a lock that is held across a call into the engine, and may call no
 *   engine function except fkv_engine_cancel(). The last event of a request is FKV_EVENT_DONE. The engine does not use the
 *   request's `user` pointer after that event.
 *
 * Guarantees
 *   Admission reserves cache pages for the prompt and for all max_new tokens of every answer. A request waits in the queue
 *   until enough pages are free. A request that needs more pages than the cache has is rejected. An admitted request never runs
 *   out of cache memory and is never preempted. Prompt tokens found in the prefix tree are not recomputed. If another request
 *   is already computing the next page of the same prompt, the new request waits for that page instead of computing it again.
 *   On the CPU, the output of a request does not depend on the other requests in the batch.
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
    fkv_runner_config runner; /* runner.max_seqs is the maximum number of answers generated at the same time. runner.max_tokens
                                 is the token capacity shared by all requests and cached prefixes */
    double step_ms; /* target step time in ms; prefill tokens are added to a step until its predicted time reaches this target */
    uint32_t max_queue;   /* maximum number of queued requests. Even if the queue is full, a tenant may submit requests until it
                             has max_queue / N queued requests, where N is the number of tenants with queued requests */
    double max_wait_s;    /* maximum predicted queue time in seconds (0: unlimited). A request with a longer predicted queue time
                             is rejected with FKV_BUSY */
    uint32_t max_tenants; /* maximum number of tenants that the fair scheduler tracks separately */
    uint32_t default_new; /* default value of max_new, used for requests whose max_new is 0 */
    double ageing_s;      /* the priority of a queued request rises by 1 every ageing_s seconds; 0: no ageing */
    double output_weight; /* cost of a generated token in fair-share accounting; a computed prompt token costs 1 */

    /* Maximum number of draft tokens per answer in one step (n-gram speculative decoding, also known as prompt lookup); 0: off.
     * Requires runner.max_logit_rows >= runner.max_seqs + draft_tokens, because all drafts of a step share the logit rows beyond
     * max_seqs. Drafts do not change the output. If a draft is rejected in a model with recurrent layers, the CPU backend
     * recomputes only the recurrent state, but MLX computes the whole step again. The engine sets runner.drafts. */
    uint32_t draft_tokens;

    /* Prefix store used as the second tier of the prefix cache; NULL: no second tier. Pages are restored from the store before
     * a request is admitted. The fkv_prefix_store struct is copied. The caller closes the store after closing the engine. The
     * engine's I/O buffers (fkv_engine_buffer_bytes()) count towards runner.memory_limit, but the memory of the store does
     * not. */
    const fkv_prefix_store *store;

    /* Another open engine that uses the same CPU cores, or NULL. Engines that are linked through this field take turns: their
     * steps never overlap, so their worker threads do not compete for cores. Predicted waiting times include the time spent
     * waiting for a turn. The other engine may be closed first. */
    fkv_engine *peer;
} fkv_engine_config;

/* Returns the default configuration: 8 concurrent answers, 100 ms steps, a queue of 256 requests with at most 120 s of predicted
 * wait, 64 tenants, 1024 new tokens per answer, and the codec of fkv_runner_config_default(). */
FKV_API fkv_engine_config fkv_engine_config_default(void);

/* Returns the size of the I/O buffers that an engine with a prefix store allocates in addition to plan->total_bytes. */
FKV_API uint64_t fkv_engine_buffer_bytes(const fkv_runner_plan *plan, uint32_t page_tokens);

/* Opens a runner, starts the engine thread, and times a few steps to initialize the step-time predictor. The caller keeps
 * ownership of the model and closes it after closing the engine. */
FKV_API fkv_status fkv_engine_open(const fkv_model *model, const fkv_engine_config *config, fkv_engine **engine);

/* Stops accepting requests (fkv_engine_submit() then returns FKV_BUSY) and waits up to `seconds` for the existing requests to
 * finish. Returns true if all requests have finished. */
FKV_API bool fkv_engine_drain(fkv_engine *engine, double seconds);

/* Cancels all remaining requests, joins the engine thread and releases all memory. `engine` may be NULL. */
FKV_API void fkv_engine_close(fkv_engine *engine);

/* ---- requests ------------------------------------------------------------------------------------------------ */

typedef enum fkv_event_kind {
    FKV_EVENT_STARTED = 0,  /* the request was admitted; n_cached prompt tokens come from the prefix cache */
    FKV_EVENT_TOKEN = 1,    /* a token was generated for an answer */
    FKV_EVENT_ANSWERED = 2, /* an answer is complete; the event contains the finish reason and the remaining text of the answer */
    FKV_EVENT_DONE = 3      /* all answers are complete; this is the last event of the request */
} fkv_event_kind;

typedef enum fkv_finish {
    FKV_FINISH_END = 0,    /* the model generated an end-of-text token */
    FKV_FINISH_STOP = 1,   /* a stop string was found; the text ends before the stop string */
    FKV_FINISH_LENGTH = 2, /* max_new tokens were generated */
    FKV_FINISH_CANCELLED = 3,
    FKV_FINISH_DEADLINE = 4, /* deadline_s passed */
    FKV_FINISH_FAILED = 5    /* a device error, mask error or allocation error; see fkv_event.message */
} fkv_finish;

typedef struct fkv_logprob {
    uint32_t token;
    float logprob; /* natural logarithm of the token's probability before sampling options and masks are applied */
} fkv_logprob;

/* An event and everything it points to are valid only during the callback. */
typedef struct fkv_event {
    fkv_event_kind kind;
    uint64_t request;
    uint32_t answer;
    uint32_t token;   /* in a TOKEN event: the sampled token */
    const char *text; /* [n_text] new text, in complete UTF-8 characters; may be empty. Text that may be the start of a stop
                         string is held back */
    size_t n_text;
    fkv_finish reason;   /* ANSWERED, DONE */
    const char *stop;    /* in an ANSWERED event: the stop string that was found, or NULL */
    const char *message; /* error message if the finish reason is FKV_FINISH_FAILED, otherwise NULL */
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_new;         /* number of tokens generated so far for this answer; in a DONE event, the sum over all answers */
    float logprob;          /* in a TOKEN event: log probability of the token; valid only if logprobs were requested */
    const fkv_logprob *top; /* [n_top] most likely tokens, by decreasing probability */
    uint32_t n_top;
    double waited_s; /* time that the request spent in the queue, in seconds */
} fkv_event;

typedef void (*fkv_event_fn)(void *user, const fkv_event *event);

/* Selects the tokens that are allowed next. Runs on the engine thread. The callback sets bit token % 32 of bits[token / 32] for
 * each allowed token; all bits are 0 on entry. tokens: [n_tokens] tokens generated so far, without the end-of-text token; each
 * call for an answer passes one token more than the previous call. If the callback sets no bit, the answer ends. The callback
 * returns NULL on success. If it returns an error message, the answer fails with that message. Draft tokens are checked against
 * the mask as well. */
typedef const char *(*fkv_mask_fn)(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                                   uint32_t n_vocab);

enum { FKV_MAX_MARKS = 4 };

typedef struct fkv_request {
    const uint32_t *prompt; /* [n_prompt] */
    uint32_t n_prompt;      /* at least 1 */
    uint32_t max_new; /* maximum number of new tokens per answer; 0: config.default_new, reduced if necessary so that prompt and
                         answer fit in the context */
    uint32_t n; /* number of answers (0 means 1); the answers share the prompt pages and use the seeds seed, seed + 1, ... */
    fkv_sampler_config sampler;
    uint32_t snapshots[FKV_MAX_MARKS]; /* [n_snapshots] lengths of prompt prefixes that later prompts are likely to repeat, such
                                          as the start of the last message. In models with recurrent layers, the engine keeps a
                                          snapshot of the state at the end of each of these prefixes */
    uint32_t n_snapshots;
    const char *const *stops; /* [n_stops] stop strings */
    uint32_t n_stops;
    bool ignore_end; /* keep generating after an end-of-text token */
    bool logprobs;   /* report log probabilities */
    uint32_t n_top;  /* number of most likely tokens to report with each generated token; used only if logprobs is true */
    uint64_t tenant;
    const char *tenant_name; /* name that identifies the tenant in the prefix store, even after a restart. The store contains
                                only a hash of the name. NULL: the tenant number is used instead */
    double weight;           /* fair-share weight of the tenant; 0 means 1 */
    int32_t priority;        /* among the requests of a tenant, those with higher priority run first */
    double deadline_s;       /* deadline, in seconds after submission; 0: no deadline */
    fkv_mask_fn mask;        /* or NULL */
    void *mask_user;
    fkv_event_fn event;
    void *user;
} fkv_request;

/* Submits a request. A rejected request produces no events.
 *
 * Returns FKV_BUSY if the queue is full for this tenant or if the predicted wait exceeds max_wait_s. *retry_s (if not NULL) then
 * receives the number of seconds to wait before retrying. A client that retries after this time keeps the queue position of its
 * first attempt. Returns FKV_POOL_FULL if the request can never fit in the cache; fkv_message() contains the sizes. */
FKV_API fkv_status fkv_engine_submit(fkv_engine *engine, const fkv_request *request, uint64_t *id, double *retry_s);

/* Cancels a request. Its pages are released at the end of the current step, and its DONE event is still delivered. The id of a
 * finished request is ignored. */
FKV_API void fkv_engine_cancel(fkv_engine *engine, uint64_t id);

/* ---- statistics ---------------------------------------------------------------------------------------------- */

/* Statistics of the prefix store (the second tier of the prefix cache). */
typedef struct fkv_store_stats {
    fkv_prefix_store_stats usage;
    uint64_t read_pages; /* pages verified and restored into memory */
    uint64_t read_bytes;
    double read_seconds; /* total time that requests spent waiting for pages to be restored */
    uint64_t written_pages;
    double write_seconds;
    uint64_t failed_writes;
    uint64_t unsent_pages;  /* pages not written because no buffer became free before the request ended */
    uint64_t damaged_pages; /* pages that failed verification and were removed */
    uint64_t declined;      /* requests whose pages were not restored because recomputing them was predicted to be faster */
    uint64_t late;          /* requests that stopped waiting for stored pages, because recomputing was predicted to be faster */
    uint64_t buffer_bytes;  /* size of the I/O buffers, which are allocated at open and are not part of the plan */
} fkv_store_stats;

typedef struct fkv_engine_stats {
    fkv_stats cache;
    fkv_runner_plan plan;
    uint32_t running; /* admitted requests */
    uint32_t waiting; /* queued requests */
    uint64_t submitted;
    uint64_t refused_busy;    /* requests rejected with FKV_BUSY */
    uint64_t refused_size;    /* requests rejected with FKV_POOL_FULL */
    uint64_t finished[6];     /* number of finished answers, indexed by fkv_finish */
    uint64_t prompt_tokens;   /* prompt tokens of admitted requests, both cached and computed */
    uint64_t cached_tokens;   /* prompt tokens found in the prefix tree */
    uint64_t computed_tokens; /* prompt tokens computed so far */
    uint64_t new_tokens;      /* generated tokens */
    uint64_t drafted_tokens;  /* draft tokens that the model has checked, whether accepted or rejected */
    uint64_t accepted_tokens; /* draft tokens accepted */
    uint64_t page_waits;      /* requests that waited for a page that another request was computing */
    uint64_t steps;
    uint64_t max_cancel_steps;   /* largest number of steps completed between the cancellation of a request and the release of its
                                    pages */
    double step_seconds;         /* total time of all steps */
    double predicted_seconds;    /* total predicted time of all steps */
    double predicted_wait_s;     /* predicted queue time of a request submitted now */
    uint32_t max_request_tokens; /* maximum number of tokens per request, including the prompt */
    uint32_t default_new;        /* fkv_engine_config.default_new, or the maximum length of an answer if that is smaller */
    uint32_t max_tokens;         /* cache capacity */
    uint32_t page_tokens;
    uint32_t page_group; /* first layer group whose pages hold keys and values; group 0 may hold recurrent states instead */
    bool consistent; /* result of the last fkv_cache_consistent() call; the engine calls this function whenever it becomes idle */
    fkv_store_stats store;
} fkv_engine_stats;

/* Copies the current statistics. May be called from any thread. */
FKV_API void fkv_engine_stats_now(fkv_engine *engine, fkv_engine_stats *stats);

typedef enum fkv_phase { FKV_PHASE_WAITING = 0, FKV_PHASE_PREFILL = 1, FKV_PHASE_DECODE = 2 } fkv_phase;

typedef struct fkv_request_info {
    uint64_t id;
    uint64_t tenant;
    fkv_phase phase;
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_computed; /* number of prompt tokens in the cache so far, both reused and computed */
    uint32_t n_new;      /* number of tokens generated so far, summed over all answers */
    uint32_t max_new;    /* maximum number of new tokens, summed over all answers */
    double age_s;        /* seconds since submission */
} fkv_request_info;

/* Lists up to `capacity` requests, with running requests before queued ones. Returns the number of entries written. */
FKV_API uint32_t fkv_engine_requests(fkv_engine *engine, fkv_request_info *list, uint32_t capacity);

/* Lists the pages of layer group fkv_engine_stats.page_group with their state after a recent step (see fkv_cache_pages()). If
 * the group has more than FKV_MAX_LISTED_PAGES pages, evenly spaced pages are listed. Returns the number of entries written.
 * Each call causes the engine to refresh the list after its next step. */
enum { FKV_MAX_LISTED_PAGES = 2048 };
FKV_API uint32_t fkv_engine_pages(fkv_engine *engine, fkv_page_info *list, uint32_t capacity);

#ifdef __cplusplus
}
#endif

#endif
