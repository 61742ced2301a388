/* Tests the threading rules in flatkv.h: one thread at a time may operate a cache, any thread may read the statistics of the
 * cache at the same time, caches are independent, and messages are thread-local. Also runs under ThreadSanitizer.
 *
 * A failed check must not longjmp out of another thread. Other threads therefore store their results in structs, which the main
 * thread checks after joining the threads.
 */
#include "cache_fixture.h"
#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { PAGE = 16, MAX_TOKENS = 512, MAX_SEQS = 4, STEP_TOKENS = 32 };

static const fkv_layer_config LAYERS[] = {
    {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 32, .k = {8, 32}, .v = {4, 32}},
    {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 32, .window = 24, .n_sinks = 4, .k = {16, 0}, .v = {16, 0}},
};

static fkv_config small_config(uint32_t n_threads) {
    fkv_config config = fkv_config_default();
    config.n_layers = N_OF(LAYERS);
    config.layers = LAYERS;
    config.page_tokens = PAGE;
    config.max_tokens = MAX_TOKENS;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = STEP_TOKENS;
    config.n_threads = n_threads;
    return config;
}

static void start(pthread_t *thread, void *(*run)(void *), void *argument) {
    ck_assert_int_eq(pthread_create(thread, NULL, run, argument), 0);
}

static void join(pthread_t thread) { ck_assert_int_eq(pthread_join(thread, NULL), 0); }

/* Runs prefill, a fork, decode steps of both sequences, an aborted step, a truncation, a prefix insertion and a close. Then opens
 * a sequence that shares the inserted prefix. Stores the outputs of the last sequence. Returns false if a call returned an
 * unexpected status. */
enum { STRESS_TOKENS = 120, STRESS_SHARED = 80 };

static bool run_all_operations(cache_fixture *w, const uint32_t *tokens, const uint32_t *strange, uint8_t *outputs) {
    fkv_seq first = cache_fixture_seq(w, STRESS_TOKENS);
    fkv_seq fork = 0;
    fkv_seq last = 0;
    uint32_t n_shared = 0;
    cache_fixture_run(w, first, tokens, 0, STRESS_SHARED, STEP_TOKENS, NULL);
    bool good = fkv_prefix_insert(w->cache, first, tokens, STRESS_SHARED) == FKV_OK;
    good = fkv_seq_fork(w->cache, first, STRESS_TOKENS, &fork) == FKV_OK && good;
    if (!good) return false;
    for (uint32_t t = STRESS_SHARED; t < STRESS_SHARED + 10; t++) {
        cache_chunk chunks[] = {{first, tokens, t, 1, NULL}, {fork, strange, t, 1, NULL}};
        cache_fixture_step(w, chunks, 2, CACHE_COMMIT);
    }
    cache_fixture_step(w, &(cache_chunk){first, strange, STRESS_SHARED + 10, 20, NULL}, 1, CACHE_ABORT);
    good = fkv_seq_truncate(w->cache, fork, STRESS_SHARED + 8) == FKV_OK;
    good = fkv_seq_close(w->cache, fork) == FKV_OK && good;
    good = fkv_seq_close(w->cache, first) == FKV_OK && good;
    fkv_seq_config opened = {.max_tokens = STRESS_TOKENS, .prompt = tokens, .n_prompt = STRESS_TOKENS - 1};
    good = good && fkv_seq_open(w->cache, &opened, &last, &n_shared) == FKV_OK && n_shared == STRESS_SHARED;
    if (!good) return false;
    cache_fixture_run(w, last, tokens, n_shared, STRESS_TOKENS, 3, outputs);
    good = fkv_seq_close(w->cache, last) == FKV_OK;
    return good && fkv_cache_consistent(w->cache);
}

/* ---- concurrent statistics ---- */

typedef struct watcher {
    const fkv_cache *cache;
    _Atomic bool *stop;
    uint64_t n_reads;
    uint64_t n_wrong;
} watcher;

static bool plausible(const fkv_stats *s, const fkv_stats *before) {
    bool good = s->planned_bytes == before->planned_bytes && s->n_groups == 2 && s->seqs <= MAX_SEQS && s->isa == before->isa;
    for (uint32_t g = 0; g < s->n_groups; g++) {
        const fkv_group_stats *now = &s->groups[g];
        uint32_t pages = now->pages;
        good = good && pages == before->groups[g].pages && now->free <= pages && now->held <= pages && now->shared <= pages &&
               now->cached <= pages && now->pinned <= pages && now->promised <= pages;
    }
    /* these counters must never decrease */
    return good && s->steps >= before->steps && s->aborts >= before->aborts && s->tokens >= before->tokens &&
           s->page_copies >= before->page_copies && s->hits >= before->hits && s->hit_tokens >= before->hit_tokens &&
           s->evictions >= before->evictions && s->packed_bytes_read >= before->packed_bytes_read;
}

static void *watch(void *argument) {
    watcher *me = argument;
    fkv_stats before;
    me->n_wrong += fkv_cache_stats(me->cache, &before) != FKV_OK;
    while (!atomic_load_explicit(me->stop, memory_order_relaxed)) {
        fkv_stats now;
        me->n_wrong += fkv_cache_stats(me->cache, &now) != FKV_OK || !plausible(&now, &before);
        me->n_reads++;
        before = now;
    }
    return NULL;
}

START_TEST(any_thread_can_read_statistics_while_another_drives) {
    enum { N_WATCHERS = 2, N_ROUNDS = 12 };
    fkv_config config = small_config(2);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    _Atomic bool stop = false;
    pthread_t threads[N_WATCHERS];
    watcher watchers[N_WATCHERS];
    for (int i = 0; i < N_WATCHERS; i++) {
        watchers[i] = (watcher){.cache = w.cache, .stop = &stop};
        start(&threads[i], watch, &watchers[i]);
    }
    uint32_t tokens[STRESS_TOKENS];
    uint32_t strange[STRESS_TOKENS];
    bool good = true;
    for (uint64_t i = 0; i < N_ROUNDS; i++) {
        cache_tokens(i, tokens, STRESS_TOKENS);
        cache_tokens(100 + i, strange, STRESS_TOKENS);
        good = run_all_operations(&w, tokens, strange, NULL) && good;
    }
    atomic_store(&stop, true);
    for (int i = 0; i < N_WATCHERS; i++) join(threads[i]);
    ck_assert(good);
    for (int i = 0; i < N_WATCHERS; i++) {
        ck_assert_uint_eq(watchers[i].n_wrong, 0);
        ck_assert_uint_gt(watchers[i].n_reads, 0);
    }
    fkv_stats stats = cache_fixture_stats(&w);
    ck_assert_uint_eq(stats.aborts, N_ROUNDS);
    ck_assert_uint_eq(stats.hits, N_ROUNDS);
    ck_assert_uint_eq(stats.tokens, N_ROUNDS * (STRESS_SHARED + 2 * 10 + STRESS_TOKENS - STRESS_SHARED));
    ck_assert_uint_gt(stats.evictions, 0);
    cache_fixture_close(&w);
}
END_TEST

/* ---- independent caches ---- */

typedef struct driver {
    uint64_t seed;
    uint32_t n_threads;
    bool good;
    size_t bytes;
    uint8_t *outputs;
} driver;

/* Opens a cache, runs all operations three times and closes the cache. */
static void *drive(void *argument) {
    driver *me = argument;
    fkv_config config = small_config(me->n_threads);
    cache_fixture w;
    if (cache_fixture_open(&w, &config) != FKV_OK) return NULL;
    uint32_t tokens[STRESS_TOKENS];
    uint32_t strange[STRESS_TOKENS];
    me->bytes = STRESS_TOKENS * w.output_bytes;
    me->outputs = calloc(3, me->bytes);
    me->good = me->outputs != NULL;
    for (uint64_t i = 0; i < 3 && me->good; i++) {
        cache_tokens(me->seed + i, tokens, STRESS_TOKENS);
        cache_tokens(me->seed + 100 + i, strange, STRESS_TOKENS);
        me->good = run_all_operations(&w, tokens, strange, me->outputs + i * me->bytes);
    }
    cache_fixture_close(&w);
    return NULL;
}

START_TEST(concurrent_caches_give_the_same_outputs_as_separate_ones) {
    enum { N_DRIVERS = 5 };
    driver alone[N_DRIVERS];
    driver together[N_DRIVERS];
    pthread_t threads[N_DRIVERS];
    for (uint32_t i = 0; i < N_DRIVERS; i++) {
        alone[i] = (driver){.seed = 1000 * i, .n_threads = 1};
        together[i] = (driver){.seed = 1000 * i, .n_threads = 1 + i % 3};
        (void)drive(&alone[i]);
    }
    for (uint32_t i = 0; i < N_DRIVERS; i++) start(&threads[i], drive, &together[i]);
    for (uint32_t i = 0; i < N_DRIVERS; i++) join(threads[i]);
    for (uint32_t i = 0; i < N_DRIVERS; i++) {
        ck_assert(alone[i].good && together[i].good);
        ck_assert_msg(memcmp(alone[i].outputs, together[i].outputs, 3 * alone[i].bytes) == 0, "cache %u differs", i);
        free(alone[i].outputs);
        free(together[i].outputs);
    }
}
END_TEST

/* ---- alternating threads ---- */

typedef struct hand {
    cache_fixture *w;
    fkv_seq seq;
    const uint32_t *tokens;
    uint32_t from;
    uint32_t to;
    uint8_t *outputs;
} hand;

static void *carry_on(void *argument) {
    hand *h = argument;
    cache_fixture_run(h->w, h->seq, h->tokens, h->from, h->to, 4, h->outputs);
    return NULL;
}

START_TEST(threads_can_drive_one_cache_in_turn) {
    fkv_config config = small_config(2);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[STRESS_TOKENS];
    cache_tokens(7, tokens, STRESS_TOKENS);
    size_t bytes = STRESS_TOKENS * w.output_bytes;
    uint8_t *expected = malloc(bytes);
    uint8_t *got = malloc(bytes);
    ck_assert(expected != NULL && got != NULL);
    cache_fixture_run(&w, cache_fixture_seq(&w, STRESS_TOKENS), tokens, 0, STRESS_TOKENS, 4, expected);
    hand h = {.w = &w, .seq = cache_fixture_seq(&w, STRESS_TOKENS), .tokens = tokens, .outputs = got};
    for (h.from = 0; h.from < STRESS_TOKENS; h.from = h.to) {
        pthread_t thread;
        h.to = h.from + 20;
        start(&thread, carry_on, &h);
        join(thread);
    }
    ck_assert(memcmp(got, expected, bytes) == 0);
    free(expected);
    free(got);
    cache_fixture_close(&w);
}
END_TEST

/* ---- messages ---- */

typedef struct speaker {
    _Atomic uint32_t *n_to_come; /* number of threads that have not failed yet */
    uint32_t n_layers;           /* invalid number of layers, different for each thread */
    bool silent_at_first;
    bool own_words;
} speaker;

static void *speak(void *argument) {
    speaker *me = argument;
    char number[32];
    (void)snprintf(number, sizeof number, "n_layers is %u", me->n_layers);
    me->silent_at_first = fkv_message()[0] == 0;
    fkv_config config = small_config(1);
    fkv_plan plan;
    config.n_layers = me->n_layers;
    bool refused = fkv_plan_make(&config, &plan) == FKV_BAD_CONFIG;
    (void)atomic_fetch_sub(me->n_to_come, 1);
    while (atomic_load(me->n_to_come) > 0) (void)sched_yield();
    me->own_words = refused && strstr(fkv_message(), number) != NULL;
    config = small_config(1);
    me->own_words = me->own_words && fkv_plan_make(&config, &plan) == FKV_OK && strstr(fkv_message(), number) != NULL;
    return NULL;
}

START_TEST(messages_are_thread_local) {
    enum { N_SPEAKERS = 3 };
    _Atomic uint32_t n_to_come = N_SPEAKERS;
    pthread_t threads[N_SPEAKERS];
    speaker speakers[N_SPEAKERS];
    fkv_config config = small_config(1);
    fkv_plan plan;
    config.n_layers = 99999;
    ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
    for (uint32_t i = 0; i < N_SPEAKERS; i++) {
        speakers[i] = (speaker){.n_to_come = &n_to_come, .n_layers = 1000 + i};
        start(&threads[i], speak, &speakers[i]);
    }
    for (uint32_t i = 0; i < N_SPEAKERS; i++) join(threads[i]);
    for (uint32_t i = 0; i < N_SPEAKERS; i++) ck_assert(speakers[i].silent_at_first && speakers[i].own_words);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "99999"));
}
END_TEST

TEST_MAIN("threads", any_thread_can_read_statistics_while_another_drives,
          concurrent_caches_give_the_same_outputs_as_separate_ones, threads_can_drive_one_cache_in_turn,
          messages_are_thread_local)
