/* See engine_fixture.h. */
#include "engine_fixture.h"

#include "model_fixture.h"
#include "test.h"

engine_fixture_options engine_fixture = {.n_prompt = ENGINE_PROMPT};

void engine_events_add(void *user, const fkv_event *e) {
    engine_events *h = user;
    (void)pthread_mutex_lock(&h->lock);
    if (e->kind == FKV_EVENT_TOKEN && h->n[e->answer] < ENGINE_MAX_NEW) {
        h->logprobs[e->answer][h->n[e->answer]] = e->logprob;
        h->tokens[e->answer][h->n[e->answer]++] = e->token;
    }
    if (e->kind == FKV_EVENT_STARTED) h->n_cached = e->n_cached;
    if (e->kind == FKV_EVENT_DONE) {
        h->reason = e->reason;
        h->done = true;
        (void)pthread_cond_signal(&h->changed);
    }
    (void)pthread_mutex_unlock(&h->lock);
}

void engine_events_init(engine_events *h) {
    memset(h, 0, sizeof *h);
    (void)pthread_mutex_init(&h->lock, NULL);
    (void)pthread_cond_init(&h->changed, NULL);
}

void engine_events_wait(engine_events *h) {
    (void)pthread_mutex_lock(&h->lock);
    while (!h->done) (void)pthread_cond_wait(&h->changed, &h->lock);
    (void)pthread_mutex_unlock(&h->lock);
    (void)pthread_cond_destroy(&h->changed);
    (void)pthread_mutex_destroy(&h->lock);
}

fkv_engine *engine_fixture_open(uint32_t max_seqs) {
    fkv_engine_config c = fkv_engine_config_default();
    fkv_engine *engine = NULL;
    if (engine_fixture.model == NULL) {
        fkv_model_config config = fkv_model_config_default();
        ck_ok(fkv_model_load("models/needle", &config, &engine_fixture.model));
    }
    c.runner.max_tokens = 8192;
    c.runner.max_seqs = max_seqs;
    c.draft_tokens = engine_fixture.n_drafts;
    c.runner.max_logit_rows = max_seqs * (1 + engine_fixture.n_drafts);
    c.runner.max_step_tokens = 128;
    c.runner.page_tokens = 16;
    c.runner.n_threads = 2;
    c.max_queue = 100;
    c.max_wait_s = 0.0; /* no limit on the wait, so that admission does not depend on the speed of the machine */
    c.step_ms = 20.0;
    c.runner.isa = engine_fixture.isa;
    if (engine_fixture.is_affine) ck_ok(fkv_codec_parse("8/4", &c.runner.k, &c.runner.v));
    c.store = engine_fixture.store;
    c.peer = engine_fixture.peer;
    ck_ok(fkv_engine_open(engine_fixture.model, &c, &engine));
    fkv_engine_stats stats;
    fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_gt(stats.max_request_tokens, 0); /* statistics are available as soon as the engine is open */
    return engine;
}

void engine_fixture_check_empty(fkv_engine *engine) {
    fkv_engine_stats stats;
    ck_assert(fkv_engine_drain(engine, 3600.0));
    fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_eq(stats.cache.seqs, 0);
    for (uint32_t g = 0; g < stats.cache.n_groups; g++) {
        ck_assert_uint_eq(stats.cache.groups[g].free + stats.cache.groups[g].cached, stats.cache.groups[g].pages);
        ck_assert_uint_eq(stats.cache.groups[g].promised, 0);
    }
    ck_assert_uint_eq(stats.finished[FKV_FINISH_FAILED], 0);
}

fkv_request engine_fixture_request(const uint32_t *prompt, engine_events *h) {
    return (fkv_request){.prompt = prompt,
                         .n_prompt = engine_fixture.n_prompt,
                         .max_new = ENGINE_MAX_NEW,
                         .sampler = fkv_sampler_config_default(),
                         .ignore_end = true,
                         .logprobs = true,
                         .event = engine_events_add,
                         .user = h};
}

void engine_fixture_check_same(const engine_events *a, const engine_events *b, uint32_t answer, const char *what) {
    ck_assert_uint_eq(b->n[answer], ENGINE_MAX_NEW);
    for (uint32_t i = 0; i < ENGINE_MAX_NEW; i++)
        ck_assert_msg(a->tokens[0][i] == b->tokens[answer][i] && a->logprobs[0][i] == b->logprobs[answer][i],
                      "%s: token %u is %u (%.9g), expected %u (%.9g)", what, i, b->tokens[answer][i],
                      (double)b->logprobs[answer][i], a->tokens[0][i], (double)a->logprobs[0][i]);
}
