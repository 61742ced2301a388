/* Tests of the engine with its own thread and the needle model: outputs are bit-identical regardless of concurrent requests, many
 * threads may submit and cancel requests, and all memory is released.
 */
#include "../src/engine/step_turns.h"
#include "engine_fixture.h"
#include "model_fixture.h"
#include "sanitized.h"
#include "test.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { N_BATCH = TEST_SANITIZED ? 4 : 16 };

START_TEST(batched_shared_and_forked_texts_are_bit_identical) {
    static engine_events alone[N_BATCH];
    static engine_events batch[N_BATCH];
    static engine_events again;
    static engine_events forks;
    uint32_t prompts[N_BATCH][ENGINE_PROMPT];
    uint64_t id = 0;
    for (uint32_t i = 0; i < N_BATCH; i++) model_book_tokens(300 * i, prompts[i], ENGINE_PROMPT);
    fkv_engine *engine = engine_fixture_open(N_BATCH);
    for (uint32_t i = 0; i < N_BATCH; i++) {
        fkv_request r = engine_fixture_request(prompts[i], &alone[i]);
        engine_events_init(&alone[i]);
        ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
        engine_events_wait(&alone[i]);
        ck_assert_uint_eq(alone[i].n_cached, 0);
    }
    engine_events_init(&again);
    fkv_request r = engine_fixture_request(prompts[0], &again);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    engine_events_wait(&again);
    ck_assert_uint_eq(again.n_cached, (ENGINE_PROMPT - 1) / 16 * 16);
    engine_fixture_check_same(&alone[0], &again, 0, "from a shared prefix");
    engine_events_init(&forks);
    r = engine_fixture_request(prompts[1], &forks);
    r.n = 4;
    r.tenant = 7; /* no prefix is cached for this tenant */
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    engine_events_wait(&forks);
    for (uint32_t i = 0; i < 4; i++) engine_fixture_check_same(&alone[1], &forks, i, "forked");
    engine_fixture_check_empty(engine);
    fkv_engine_close(engine);

    engine = engine_fixture_open(N_BATCH);
    for (uint32_t i = 0; i < N_BATCH; i++) {
        r = engine_fixture_request(prompts[i], &batch[i]);
        engine_events_init(&batch[i]);
        ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    }
    for (uint32_t i = 0; i < N_BATCH; i++) engine_events_wait(&batch[i]);
    for (uint32_t i = 0; i < N_BATCH; i++) engine_fixture_check_same(&alone[i], &batch[i], 0, "in a batch");
    engine_fixture_check_empty(engine);
    fkv_engine_close(engine);
}
END_TEST

/* ---- engines that share cores ---- */

START_TEST(engines_that_share_cores_give_the_same_texts_and_close_in_any_order) {
    static engine_events alone[2];
    static engine_events together[2][4];
    uint32_t prompts[2][ENGINE_PROMPT];
    uint64_t id = 0;
    fkv_engine *engines[2];
    engines[0] = engine_fixture_open(4);
    engine_fixture.peer = engines[0];
    engines[1] = engine_fixture_open(4);
    engine_fixture.peer = NULL;
    for (uint32_t i = 0; i < 2; i++) {
        model_book_tokens(300 * i, prompts[i], ENGINE_PROMPT);
        fkv_request r = engine_fixture_request(prompts[i], &alone[i]);
        engine_events_init(&alone[i]);
        ck_ok(fkv_engine_submit(engines[i], &r, &id, NULL));
        engine_events_wait(&alone[i]);
    }
    for (uint32_t k = 0; k < 8; k++) {
        fkv_request r = engine_fixture_request(prompts[k % 2], &together[k % 2][k / 2]);
        r.tenant = k; /* no shared prefixes */
        engine_events_init(&together[k % 2][k / 2]);
        ck_ok(fkv_engine_submit(engines[k % 2], &r, &id, NULL));
    }
    for (uint32_t k = 0; k < 8; k++) {
        engine_events_wait(&together[k % 2][k / 2]);
        engine_fixture_check_same(&alone[k % 2], &together[k % 2][k / 2], 0, "next to a busy engine");
    }
    engine_fixture_check_empty(engines[0]);
    fkv_engine_close(engines[0]); /* engines[1] takes turns with this engine and must continue without it */
    engine_events_init(&together[1][0]);
    fkv_request r = engine_fixture_request(prompts[1], &together[1][0]);
    ck_ok(fkv_engine_submit(engines[1], &r, &id, NULL));
    engine_events_wait(&together[1][0]);
    engine_fixture_check_same(&alone[1], &together[1][0], 0, "after its peer was closed");
    engine_fixture_check_empty(engines[1]);
    fkv_engine_close(engines[1]);
}
END_TEST

typedef struct turn_taker {
    fkv_step_turns *turns;
    _Atomic uint32_t *n_inside;
    uint32_t *n_turns; /* needs no lock, because only the thread whose turn it is uses this counter */
    bool overlapped;
} turn_taker;

static void *take_turns(void *user) {
    turn_taker *t = user;
    for (uint32_t i = 0; i < 2000; i++) {
        fkv_step_turns_begin(t->turns);
        if (atomic_fetch_add(t->n_inside, 1) != 0) t->overlapped = true;
        ++*t->n_turns;
        (void)atomic_fetch_sub(t->n_inside, 1);
        fkv_step_turns_end(t->turns);
    }
    fkv_step_turns_leave(t->turns);
    return NULL;
}

START_TEST(turns_of_engines_never_overlap) {
    enum { N = 4 };
    pthread_t threads[N];
    turn_taker takers[N];
    _Atomic uint32_t n_inside = 0;
    uint32_t n_turns = 0;
    fkv_step_turns *turns = fkv_step_turns_open();
    ck_assert_ptr_nonnull(turns);
    for (uint32_t i = 0; i < N; i++) {
        takers[i] = (turn_taker){.turns = turns, .n_inside = &n_inside, .n_turns = &n_turns};
        fkv_step_turns_join(turns);
        ck_assert_int_eq(pthread_create(&threads[i], NULL, take_turns, &takers[i]), 0);
    }
    fkv_step_turns_leave(turns); /* only the four threads take turns from now on */
    for (uint32_t i = 0; i < N; i++) {
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
        ck_assert(!takers[i].overlapped);
    }
    ck_assert_uint_eq(n_turns, N * 2000);
}
END_TEST

/* ---- drafts ---- */

START_TEST(drafts_do_not_change_the_text) {
    enum { N = TEST_SANITIZED ? 3 : 6, DRAFT = 4 };
    static engine_events plain[N];
    static engine_events drafted[N];
    uint32_t prompts[N][ENGINE_PROMPT];
    uint64_t id = 0;
    fkv_engine_stats stats;
    for (uint32_t i = 0; i < N; i++) {
        model_book_tokens(150 * i, prompts[i], ENGINE_PROMPT / 2);
        memcpy(prompts[i] + ENGINE_PROMPT / 2, prompts[i],
               ENGINE_PROMPT / 2 * sizeof(uint32_t)); /* the prompt ends with repeated text, which drafts can predict */
    }
    for (engine_fixture.n_drafts = 0; engine_fixture.n_drafts <= DRAFT; engine_fixture.n_drafts += DRAFT) {
        engine_events *all = engine_fixture.n_drafts > 0 ? drafted : plain;
        fkv_engine *engine = engine_fixture_open(3);
        for (uint32_t i = 0; i < N; i++) {
            fkv_request r = engine_fixture_request(prompts[i], &all[i]);
            if (i % 3 == 2)
                r.sampler.temperature = 0.8f; /* every third request uses random sampling, with the same seed in both runs */
            r.n = i == 1 ? 2 : 1;
            engine_events_init(&all[i]);
            ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
        }
        for (uint32_t i = 0; i < N; i++) engine_events_wait(&all[i]);
        engine_fixture_check_empty(engine);
        fkv_engine_stats_now(engine, &stats);
        fkv_engine_close(engine);
    }
    engine_fixture.n_drafts = 0;
    for (uint32_t i = 0; i < N; i++) engine_fixture_check_same(&plain[i], &drafted[i], 0, "with drafts");
    engine_fixture_check_same(&plain[1], &drafted[1], 1, "a fork with drafts");
    printf("%u of %u drafted tokens were accepted\n", (unsigned)stats.accepted_tokens, (unsigned)stats.drafted_tokens);
    ck_assert_uint_le(stats.accepted_tokens,
                      stats.drafted_tokens); /* the numbers depend on measured times; test_engine.c checks them exactly */
}
END_TEST

/* ---- many threads ---- */

enum { N_THREADS = 4, N_EACH = TEST_SANITIZED ? 4 : 12 };

static fkv_engine *shared;
static _Atomic uint32_t n_cancelled;
static uint32_t shared_prompts[3][ENGINE_PROMPT];

static void *client(void *user) {
    uint32_t number = *(const uint32_t *)user;
    for (uint32_t i = 0; i < N_EACH; i++) {
        engine_events h;
        uint64_t id = 0;
        fkv_engine_stats stats;
        fkv_request_info list[8];
        engine_events_init(&h);
        fkv_request r = engine_fixture_request(shared_prompts[i % 3], &h);
        r.tenant = number % 2;
        if (fkv_engine_submit(shared, &r, &id, NULL) != FKV_OK) abort();
        if (i % 4 == 1) fkv_engine_cancel(shared, id);
        fkv_engine_stats_now(shared, &stats);
        (void)fkv_engine_requests(shared, list, 8);
        engine_events_wait(&h);
        if (h.reason == FKV_FINISH_CANCELLED) n_cancelled++;
        if (h.reason != FKV_FINISH_CANCELLED && h.n[0] != ENGINE_MAX_NEW) abort();
    }
    return NULL;
}

START_TEST(requests_and_cancels_from_many_threads_are_served) {
    pthread_t threads[N_THREADS];
    uint32_t numbers[N_THREADS];
    for (uint32_t i = 0; i < 3; i++) model_book_tokens(100 * i, shared_prompts[i], ENGINE_PROMPT);
    shared = engine_fixture_open(4);
    for (uint32_t i = 0; i < N_THREADS; i++) {
        numbers[i] = i;
        ck_assert_int_eq(pthread_create(&threads[i], NULL, client, &numbers[i]), 0);
    }
    for (uint32_t i = 0; i < N_THREADS; i++) (void)pthread_join(threads[i], NULL);
    printf("%u of %u requests were cancelled before they finished\n", n_cancelled, N_THREADS * N_EACH / 4);
    engine_fixture_check_empty(shared);
    fkv_engine_close(shared);
}
END_TEST

static const char *only_one(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                            uint32_t n_vocab) {
    (void)answer, (void)tokens, (void)n_tokens, (void)n_vocab;
    uint32_t token = *(const uint32_t *)user;
    bits[token / 32] |= 1u << token % 32;
    return NULL;
}

START_TEST(mask_limits_the_tokens_of_an_answer) {
    static engine_events h;
    uint32_t prompt[ENGINE_PROMPT];
    uint32_t only = 'x';
    uint64_t id = 0;
    model_book_tokens(0, prompt, ENGINE_PROMPT);
    fkv_engine *engine = engine_fixture_open(2);
    fkv_request r = engine_fixture_request(prompt, &h);
    r.mask = only_one;
    r.mask_user = &only;
    engine_events_init(&h);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    engine_events_wait(&h);
    for (uint32_t i = 0; i < ENGINE_MAX_NEW; i++) ck_assert_uint_eq(h.tokens[0][i], only);
    fkv_engine_close(engine);
}
END_TEST

START_TEST(full_queue_reports_when_to_retry) {
    static engine_events h[8];
    uint32_t prompt[ENGINE_PROMPT];
    uint64_t id = 0;
    double retry = 0.0;
    uint32_t n = 0;
    model_book_tokens(0, prompt, ENGINE_PROMPT);
    fkv_engine_config c = fkv_engine_config_default();
    fkv_engine *engine = engine_fixture_open(1);
    fkv_engine_close(engine); /* opened only to load the model */
    c.runner.max_tokens = 1024;
    c.runner.max_seqs = c.runner.max_logit_rows = 1;
    c.max_queue = 2;
    ck_ok(fkv_engine_open(engine_fixture.model, &c, &engine));
    fkv_status status = FKV_OK;
    while (n < 8 && status == FKV_OK) {
        fkv_request r = engine_fixture_request(prompt, &h[n]);
        r.max_new = 700;
        engine_events_init(&h[n]);
        status = fkv_engine_submit(engine, &r, &id, &retry);
        if (status == FKV_OK) n++;
    }
    ck_assert_int_eq(status, FKV_BUSY);
    ck_assert(n >= 2 && n <= 3);
    ck_assert_double_ge(retry, 1.0);
    (void)fkv_engine_drain(engine, 0.0);  /* the drained engine rejects every request */
    for (uint32_t i = 0; i < 2000; i++) { /* retry times increase with every rejected request, up to a bound */
        fkv_request r = engine_fixture_request(prompt, &h[n]);
        r.max_new = 700;
        ck_assert_int_eq(fkv_engine_submit(engine, &r, &id, &retry), FKV_BUSY);
        ck_assert(retry >= 1.0 && retry <= 600.0);
    }
    fkv_engine_close(engine); /* cancels the remaining requests */
    for (uint32_t i = 0; i < n; i++) {
        engine_events_wait(&h[i]);
        ck_assert_int_eq(h[i].reason, FKV_FINISH_CANCELLED);
    }
    fkv_model_close(engine_fixture.model);
    engine_fixture.model = NULL;
}
END_TEST

/* ---- tenants ---- */

enum { QUEUE = 100 };

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* while the test holds this mutex, the first request cannot finish */
static _Atomic uint32_t n_starts;

/* A request and the number of requests that started before it (`position`). */
typedef struct turn {
    uint32_t position;
    bool waits; /* if true, the callback waits for the gate at the first token */
    engine_events events;
} turn;

static void on_turn(void *user, const fkv_event *e) {
    turn *t = user;
    if (e->kind == FKV_EVENT_STARTED) t->position = n_starts++;
    if (e->kind == FKV_EVENT_TOKEN && t->waits) {
        (void)pthread_mutex_lock(&gate);
        (void)pthread_mutex_unlock(&gate);
        t->waits = false;
    }
    engine_events_add(&t->events, e);
}

static fkv_status submit_turn(fkv_engine *engine, turn *t, uint64_t tenant) {
    static uint32_t prompt[ENGINE_PROMPT];
    uint64_t id = 0;
    model_book_tokens(0, prompt, ENGINE_PROMPT);
    fkv_request r = engine_fixture_request(prompt, &t->events);
    r.tenant = tenant;
    r.event = on_turn;
    r.user = t;
    engine_events_init(&t->events);
    return fkv_engine_submit(engine, &r, &id, NULL);
}

START_TEST(request_of_a_second_tenant_overtakes_a_full_queue) {
    static turn crowd[2 * QUEUE];
    static turn guest;
    uint32_t n = 0;
    engine_fixture.model = NULL;
    (void)pthread_mutex_lock(&gate);
    crowd[0].waits = true;
    fkv_engine *engine = engine_fixture_open(1);
    while (n < 2 * QUEUE && submit_turn(engine, &crowd[n], 1) == FKV_OK) n++;
    ck_assert(n >= QUEUE && n <= QUEUE + 1); /* one more request fits if the first one has already left the queue */
    ck_ok(submit_turn(engine, &guest, 2));
    (void)pthread_mutex_unlock(&gate);
    engine_events_wait(&guest.events);
    printf("%u of %u requests of the first tenant started before the request of the second tenant\n", guest.position, n);
    ck_assert_uint_le(guest.position, 2);
    fkv_engine_close(engine); /* cancels the remaining requests */
    for (uint32_t i = 0; i < n; i++) engine_events_wait(&crowd[i].events);
    fkv_model_close(engine_fixture.model);
    engine_fixture.model = NULL;
}
END_TEST

TEST_MAIN("engine_model", batched_shared_and_forked_texts_are_bit_identical,
          engines_that_share_cores_give_the_same_texts_and_close_in_any_order, turns_of_engines_never_overlap,
          drafts_do_not_change_the_text, requests_and_cancels_from_many_threads_are_served, mask_limits_the_tokens_of_an_answer,
          full_queue_reports_when_to_retry, request_of_a_second_tenant_overtakes_a_full_queue)
