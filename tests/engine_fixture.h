/* Runs requests on engines with the needle model and collects their events. Helpers abort the test on unexpected failures. */
#ifndef FKV_ENGINE_FIXTURE_H
#define FKV_ENGINE_FIXTURE_H

#include <flatkv/engine.h>

#include <pthread.h>

enum { ENGINE_MAX_NEW = 24, ENGINE_PROMPT = 200 };

/* Settings of all engines and requests that are created after a change. Initially, all fields except n_prompt are 0. */
typedef struct engine_fixture_options {
    fkv_model *model; /* loaded by engine_fixture_open() if it is NULL */
    const fkv_prefix_store *store;
    uint32_t n_prompt; /* number of prompt tokens of a request */
    uint32_t n_drafts;
    bool is_affine; /* true: codec 8/4; false: the default codec, which is sealed */
    fkv_isa isa;
    fkv_engine *peer; /* engine with which a new engine takes turns on the CPU cores; NULL if there is none */
} engine_fixture_options;

extern engine_fixture_options engine_fixture;

/* Events of one request. */
typedef struct engine_events {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
    uint32_t tokens[FKV_MAX_ANSWERS][ENGINE_MAX_NEW];
    float logprobs[FKV_MAX_ANSWERS][ENGINE_MAX_NEW];
    uint32_t n[FKV_MAX_ANSWERS];
    uint32_t n_cached;
    fkv_finish reason;
} engine_events;

void engine_events_init(engine_events *h);
void engine_events_add(void *user, const fkv_event *e); /* user: the engine_events of the request */
void engine_events_wait(engine_events *h);              /* waits for the end of the request */

fkv_engine *engine_fixture_open(uint32_t max_seqs);

/* Waits until all requests have ended, then checks that every page is free or cached and that no request has failed. */
void engine_fixture_check_empty(fkv_engine *engine);

/* Returns a request that generates ENGINE_MAX_NEW tokens and sends its events to h. prompt: [engine_fixture.n_prompt] */
fkv_request engine_fixture_request(const uint32_t *prompt, engine_events *h);

/* Checks that the tokens and log probabilities of an answer in b equal those of answer 0 in a. */
void engine_fixture_check_same(const engine_events *a, const engine_events *b, uint32_t answer, const char *what);

#endif
