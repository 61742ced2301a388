/* A request inside the engine: one block of memory with everything that it says and will need, taken by the thread that hands it
 * in and given back by the engine's thread after its last event.
 *
 * prompt and answer i lie behind each other in answers[i].tokens, because the prefix tree is offered both. A sequence of an
 * answer is open from admission to the end of the answer: that of answer 0 on the prompt, the others as a promise of the pages
 * that their fork will take, until the prompt is computed.
 */
#ifndef FKV_ENGINE_REQUEST_H
#define FKV_ENGINE_REQUEST_H

#include "answer_text.h"
#include "draft.h"

#include <flatkv/engine.h>

#include <stdatomic.h>

typedef struct fkv_answer {
    fkv_seq seq; /* 0: not open */
    fkv_sampler *sampler;
    uint32_t *tokens;   /* [n_prompt + max_new] */
    uint32_t n_new;     /* written */
    uint32_t n_fed;     /* in the cache */
    uint32_t n_offered; /* of those, offered to the prefix tree */
    bool finished;
    fkv_finish reason;
    fkv_answer_text text;
    fkv_draft_record drafts;
} fkv_answer;

typedef struct fkv_job {
    fkv_request r;             /* prompt, stops and bias point into this block; n, max_new and weight are never 0 */
    struct fkv_job *next;      /* in the line of those who wait */
    struct fkv_job *next_live; /* of all jobs, under the engine's lock */
    uint64_t id;
    _Atomic bool cancelled;
    uint64_t cancelled_in; /* steps that had ended then */
    fkv_phase phase;
    double asked_at; /* first; before arrived_at, where it was refused then */
    double arrived_at;
    double admitted_at;
    double deadline_at; /* INFINITY: none */
    uint32_t place;     /* of the tenant, in the fair share */
    uint32_t n_cached;
    uint32_t n_known; /* cached tokens when it was last looked at */
    bool waits_for_page;
    uint64_t passed_over; /* the turn in which it was looked at and could not go */
    fkv_stop_list stops;
    uint32_t n_unfinished;
    fkv_page_key root;  /* of its tenant, where there is a store of prefixes */
    fkv_page_key *keys; /* [n_keys] of the pages of answer 0, prompt included; room for all it may have */
    uint32_t n_keys;
    uint32_t n_sent; /* pages that were sent to the store, or that it has */
    double held_at;  /* when it began to wait for the store, 0: it did not */
    bool restored;   /* what the store has of the prompt is in memory, or is not worth it */
    bool looked;     /* the store was asked for the pages behind page looked_first: it has those up to looked_until */
    uint32_t looked_first;
    uint32_t looked_until;
    char message[512];    /* why it failed */
    fkv_answer answers[]; /* [r.n] */
} fkv_job;

/* A copy of the request, without the tenant's name. NULL: no memory. max_token_bytes: of any token's text; max_keys: of pages. */
fkv_job *fkv_job_make(const fkv_request *request, uint32_t max_new, size_t max_token_bytes, uint32_t max_keys);
void fkv_job_free(fkv_job *job); /* NULL is allowed */

/* Any thread, one at a time: it ends at the end of the step that runs. */
void fkv_job_cancel(fkv_job *job, uint64_t n_steps);

/* The same for requests that ask for the same: what somebody who comes back is known by. */
uint64_t fkv_job_hash(const fkv_job *job);

/* Checks what a caller may get wrong: FKV_BAD_ARGUMENT. */
fkv_status fkv_request_check(const fkv_request *request, uint32_t n_vocab);

#endif
