/* Internal representation of a request: one memory block that holds the copied request and all per-answer state. The submitting
 * thread allocates it, and the engine thread frees it after the last event.
 *
 * answers[i].tokens holds the prompt followed by answer i, because both are inserted into the prefix tree. Each answer has an
 * open sequence from admission to its end. During prefill, only the sequence of answer 0 contains the prompt. The sequences of
 * the other answers are empty and only reserve pages. After prefill, forks of answer 0 replace them.
 */
#ifndef FKV_ENGINE_REQUEST_H
#define FKV_ENGINE_REQUEST_H

#include "answer_text.h"
#include "draft.h"

#include <flatkv/engine.h>

#include <stdatomic.h>

enum { FKV_MAX_ENDS_SENT = 16 };

typedef struct fkv_answer {
    fkv_seq seq; /* handle of the answer's sequence; 0 if no sequence is open */
    fkv_sampler *sampler;
    uint32_t *tokens;    /* [n_prompt + max_new] prompt tokens, then generated tokens */
    uint32_t n_new;      /* number of generated tokens */
    uint32_t n_fed;      /* number of tokens in the cache */
    uint32_t n_inserted; /* number of leading tokens passed to the last fkv_prefix_insert() call */
    uint32_t rolling;    /* sequence length at which the answer's rolling snapshot was taken; 0 if there is none */
    bool finished;
    fkv_finish reason;
    fkv_answer_text text;
    fkv_draft_record drafts;
} fkv_answer;

typedef struct fkv_job {
    fkv_request r; /* deep copy of the request: its arrays are in the same allocation as this struct; defaults have replaced n and
                      max_new of 0 */
    struct fkv_job *next;      /* next job in the queue */
    struct fkv_job *next_live; /* next job in the list of all jobs, protected by the engine's lock */
    uint64_t id;
    _Atomic bool cancelled;
    uint64_t cancelled_at_step; /* number of steps completed before the job was cancelled */
    fkv_phase phase;
    double work_s;           /* machine time, in seconds, estimated at submission */
    bool started;            /* true once the published statistics count the job as running; protected by the engine's lock */
    double first_attempt_at; /* time of the first attempt to submit the request; earlier than arrived_at if that attempt was
                                rejected */
    double arrived_at;
    double admitted_at;
    double deadline_at;   /* time of the deadline; INFINITY if there is no deadline */
    uint32_t tenant_slot; /* slot of the tenant in fkv_fair_share */
    uint32_t n_cached;    /* number of prompt tokens reused from the prefix tree at admission */
    uint32_t junction;    /* position at which this prompt diverges from others: the number of prompt tokens in the prefix tree at
                             admission, shareable or not, or the number of tokens in common with a job that waits for this job */
    uint32_t n_matched;   /* number of prompt tokens found in the prefix tree at the last lookup */
    uint32_t n_expected;  /* number of prompt tokens expected to be in the prefix tree at admission; used only for predictions */
    bool waits_for_page;  /* true if the job has waited at least once for a page that another job was computing */
    uint64_t skipped_turn; /* number of the last scheduler turn in which the job was considered but not admitted */
    fkv_stop_list stops;
    uint32_t n_unfinished; /* number of answers that are not finished */
    fkv_page_key root;     /* root key of this tenant, from which all page keys are derived; used only with a prefix store */
    fkv_page_key *keys; /* [max_keys] store keys of the pages of prompt and answer 0; only the first n_keys have been computed */
    uint32_t n_keys;
    uint32_t ends[FKV_MAX_ENDS_SENT]; /* [n_ends] lengths, in pages, of prefixes that later prompts are likely to share. Their
                                         snapshots and open pages must still be written to the store */
    uint32_t n_ends;
    uint32_t n_parts_sent;   /* number of parts of the prefix ends[0] that have been sent */
    uint32_t n_sent;         /* pages [0, n_sent) are in the store or have been sent to it */
    double store_wait_since; /* time when the job began to wait for its restore; 0 if it has not waited */
    double store_asked_at;   /* time at which the job started to wait for the page lookup in the store; 0 if it has not waited */
    bool restore_done;       /* true if the restore is finished or was skipped */
    bool store_checked;      /* true if the store was queried; if so, the store holds the pages [store_first, store_end) */
    uint32_t store_first;
    uint32_t store_end;
    uint32_t store_known; /* number of leading prompt pages in memory or in the store, including pages that cannot be restored
                             because a snapshot or open pages are missing */
    char message[512];    /* error message if the job failed */
    fkv_answer answers[]; /* [r.n] */
} fkv_job;

/* Allocates a job and copies the request into it, except for tenant_name. Returns NULL if out of memory. max_token_bytes: size of
 * the longest token text, in bytes. max_keys: number of page keys to allocate. */
fkv_job *fkv_job_make(const fkv_request *request, uint32_t max_new, size_t max_token_bytes, uint32_t max_keys);
void fkv_job_free(fkv_job *job); /* job may be NULL */

/* Marks a job as cancelled. The job ends after the current step. May be called from any thread, but calls must be serialized.
 * n_steps: number of steps completed so far. */
void fkv_job_cancel(fkv_job *job, uint64_t n_steps);

/* Returns a hash of prompt, n and max_new, which identifies a retried request. */
uint64_t fkv_job_hash(const fkv_job *job);

/* Validates the caller's arguments. Returns FKV_BAD_ARGUMENT if one is invalid. */
fkv_status fkv_request_check(const fkv_request *request, uint32_t n_vocab);

#endif
