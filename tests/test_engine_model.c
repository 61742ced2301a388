/* Tests of the engine with its thread and the needle model: outputs are bit-identical regardless of concurrent requests, requests
 * and cancellations may come from many threads, and all memory is released.
 */
#include "../src/engine/step_turns.h"
#include "model_fixture.h"
#include "sanitized.h"
#include "test.h"

#include <flatkv/engine.h>

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NEW = 24, PROMPT = TEST_SANITIZED ? 100 : 200, N_BATCH = TEST_SANITIZED ? 6 : 16 };

typedef struct events {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
    uint32_t tokens[FKV_MAX_ANSWERS][MAX_NEW];
    float logprobs[FKV_MAX_ANSWERS][MAX_NEW];
    uint32_t n[FKV_MAX_ANSWERS];
    uint32_t n_cached;
    fkv_finish reason;
} events;

static fkv_model *model;
static const fkv_prefix_store *the_store; /* prefix store of all engines that are opened from now on */
static uint32_t n_drafts;
static fkv_isa the_isa;      /* instruction set of all engines that are opened from now on */
static fkv_engine *the_peer; /* engine with which all engines opened from now on take turns */

static void on_event(void *user, const fkv_event *e) {
    events *h = user;
    (void)pthread_mutex_lock(&h->lock);
    if (e->kind == FKV_EVENT_TOKEN && h->n[e->answer] < MAX_NEW) {
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

static void events_init(events *h) {
    memset(h, 0, sizeof *h);
    (void)pthread_mutex_init(&h->lock, NULL);
    (void)pthread_cond_init(&h->changed, NULL);
}

static void events_wait(events *h) {
    (void)pthread_mutex_lock(&h->lock);
    while (!h->done) (void)pthread_cond_wait(&h->changed, &h->lock);
    (void)pthread_mutex_unlock(&h->lock);
    (void)pthread_cond_destroy(&h->changed);
    (void)pthread_mutex_destroy(&h->lock);
}

static fkv_engine *open_engine(uint32_t max_seqs) {
    fkv_engine_config c = fkv_engine_config_default();
    fkv_engine *engine = NULL;
    if (model == NULL) {
        fkv_model_config config = fkv_model_config_default();
        ck_ok(fkv_model_load("models/needle", &config, &model));
    }
    c.runner.max_tokens = 8192;
    c.runner.max_seqs = max_seqs;
    c.draft_tokens = n_drafts;
    c.runner.max_logit_rows = max_seqs * (1 + n_drafts);
    c.runner.max_step_tokens = 128;
    c.runner.page_tokens = 16;
    c.runner.n_threads = 2;
    c.max_queue = 100;
    c.max_wait_s = 0.0; /* admission must not depend on the speed of the machine */
    c.step_ms = 20.0;
    c.runner.isa = the_isa;
    c.store = the_store;
    c.peer = the_peer;
    ck_ok(fkv_engine_open(model, &c, &engine));
    fkv_engine_stats stats;
    fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_gt(stats.max_request_tokens, 0); /* statistics are available as soon as the engine is open */
    return engine;
}

static void check_empty(fkv_engine *engine) {
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

static fkv_request request_of(const uint32_t *prompt, events *h) {
    return (fkv_request){.prompt = prompt,
                         .n_prompt = PROMPT,
                         .max_new = MAX_NEW,
                         .sampler = fkv_sampler_config_default(),
                         .ignore_end = true,
                         .logprobs = true,
                         .event = on_event,
                         .user = h};
}

static void check_same(const events *a, const events *b, uint32_t answer, const char *what) {
    ck_assert_uint_eq(b->n[answer], MAX_NEW);
    for (uint32_t i = 0; i < MAX_NEW; i++)
        ck_assert_msg(a->tokens[0][i] == b->tokens[answer][i] && a->logprobs[0][i] == b->logprobs[answer][i],
                      "%s: token %u is %u (%.9g), expected %u (%.9g)", what, i, b->tokens[answer][i],
                      (double)b->logprobs[answer][i], a->tokens[0][i], (double)a->logprobs[0][i]);
}

START_TEST(batched_shared_and_forked_texts_are_bit_identical) {
    static events alone[N_BATCH];
    static events batch[N_BATCH];
    static events again;
    static events forks;
    uint32_t prompts[N_BATCH][PROMPT];
    uint64_t id = 0;
    for (uint32_t i = 0; i < N_BATCH; i++) model_book_tokens(300 * i, prompts[i], PROMPT);
    fkv_engine *engine = open_engine(N_BATCH);
    for (uint32_t i = 0; i < N_BATCH; i++) {
        fkv_request r = request_of(prompts[i], &alone[i]);
        events_init(&alone[i]);
        ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
        events_wait(&alone[i]);
        ck_assert_uint_eq(alone[i].n_cached, 0);
    }
    events_init(&again);
    fkv_request r = request_of(prompts[0], &again);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    events_wait(&again);
    ck_assert_uint_eq(again.n_cached, (PROMPT - 1) / 16 * 16);
    check_same(&alone[0], &again, 0, "from a shared prefix");
    events_init(&forks);
    r = request_of(prompts[1], &forks);
    r.n = 4;
    r.tenant = 7; /* no prefix is cached for this tenant */
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    events_wait(&forks);
    for (uint32_t i = 0; i < 4; i++) check_same(&alone[1], &forks, i, "forked");
    check_empty(engine);
    fkv_engine_close(engine);

    engine = open_engine(N_BATCH);
    for (uint32_t i = 0; i < N_BATCH; i++) {
        r = request_of(prompts[i], &batch[i]);
        events_init(&batch[i]);
        ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    }
    for (uint32_t i = 0; i < N_BATCH; i++) events_wait(&batch[i]);
    for (uint32_t i = 0; i < N_BATCH; i++) check_same(&alone[i], &batch[i], 0, "in a batch");
    check_empty(engine);
    fkv_engine_close(engine);
}
END_TEST

/* ---- engines that share cores ---- */

START_TEST(engines_that_share_cores_give_the_same_texts_and_close_in_any_order) {
    static events alone[2];
    static events together[2][4];
    uint32_t prompts[2][PROMPT];
    uint64_t id = 0;
    fkv_engine *engines[2];
    engines[0] = open_engine(4);
    the_peer = engines[0];
    engines[1] = open_engine(4);
    the_peer = NULL;
    for (uint32_t i = 0; i < 2; i++) {
        model_book_tokens(300 * i, prompts[i], PROMPT);
        fkv_request r = request_of(prompts[i], &alone[i]);
        events_init(&alone[i]);
        ck_ok(fkv_engine_submit(engines[i], &r, &id, NULL));
        events_wait(&alone[i]);
    }
    for (uint32_t k = 0; k < 8; k++) {
        fkv_request r = request_of(prompts[k % 2], &together[k % 2][k / 2]);
        r.tenant = k; /* no shared prefixes */
        events_init(&together[k % 2][k / 2]);
        ck_ok(fkv_engine_submit(engines[k % 2], &r, &id, NULL));
    }
    for (uint32_t k = 0; k < 8; k++) {
        events_wait(&together[k % 2][k / 2]);
        check_same(&alone[k % 2], &together[k % 2][k / 2], 0, "next to a busy engine");
    }
    check_empty(engines[0]);
    fkv_engine_close(engines[0]); /* engines[1] takes turns with this engine and must continue without it */
    events_init(&together[1][0]);
    fkv_request r = request_of(prompts[1], &together[1][0]);
    ck_ok(fkv_engine_submit(engines[1], &r, &id, NULL));
    events_wait(&together[1][0]);
    check_same(&alone[1], &together[1][0], 0, "after its peer was closed");
    check_empty(engines[1]);
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

/* ---- prefixes on disk ---- */

static const char *store_path(void) {
    static char path[200];
    const char *root = getenv("TMPDIR");
    (void)snprintf(path, sizeof path, "%s/flatkv_engine_test_%d", root != NULL ? root : "/tmp", (int)getpid());
    return path;
}

/* Flips one byte of the n-th page in the folder. If n is beyond the last page, removes all pages and the folder. Returns the
 * number of pages. */
static uint32_t each_page(uint32_t n) {
    char name[600];
    uint32_t i = 0;
    DIR *dir = opendir(store_path());
    ck_assert_ptr_nonnull(dir);
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        (void)snprintf(name, sizeof name, "%s/%s", store_path(), d->d_name);
        if (n == UINT32_MAX) (void)unlink(name);
        if (strstr(d->d_name, ".page") == NULL || i++ != n) continue;
        FILE *file = fopen(name, "r+b");
        ck_assert(file != NULL && fseek(file, 0, SEEK_END) == 0);
        const long at = ftell(file) * (long)(n % 5) / 5;
        ck_assert_int_eq(fseek(file, at, SEEK_SET), 0);
        const int byte = fgetc(file);
        ck_assert(byte != EOF && fseek(file, at, SEEK_SET) == 0 && fputc(byte ^ 0x10, file) != EOF);
        ck_assert_int_eq(fclose(file), 0);
    }
    (void)closedir(dir);
    if (n == UINT32_MAX) (void)rmdir(store_path());
    return i;
}

/* Opens an engine with the store, runs one request and closes the engine. */
static fkv_engine_stats ask_once(const fkv_prefix_store *store, const uint32_t *prompt, const char *tenant_name, events *h) {
    fkv_engine_stats stats;
    uint64_t id = 0;
    the_store = store;
    fkv_engine *engine = open_engine(2);
    the_store = NULL;
    fkv_request r = request_of(prompt, h);
    r.tenant_name = tenant_name;
    events_init(h);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    events_wait(h);
    check_empty(engine);
    fkv_engine_stats_now(engine, &stats);
    fkv_engine_close(engine);
    return stats;
}

static fkv_engine_stats ask_folder(const uint32_t *prompt, const char *tenant_name, events *h) {
    fkv_prefix_store store;
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &store));
    fkv_engine_stats stats = ask_once(&store, prompt, tenant_name, h);
    store.close(store.self);
    return stats;
}

START_TEST(prefix_on_disk_gives_the_same_text_and_damaged_pages_are_recomputed) {
    enum { CACHED = (PROMPT - 1) / 16 * 16, ALL = (PROMPT + MAX_NEW - 1) / 16 };
    static events cold;
    static events warm;
    uint32_t prompt[PROMPT];
    model_book_tokens(77, prompt, PROMPT);
    (void)ask_once(NULL, prompt, NULL, &cold);
    (void)ask_folder(prompt, "a", &warm);
    ck_assert_uint_eq(warm.n_cached, 0);
    check_same(&cold, &warm, 0, "with a store that is empty");
    ck_assert_uint_eq(each_page(UINT32_MAX - 1), ALL); /* the store also contains pages of the answer */

    fkv_engine_stats stats = ask_folder(prompt, "a", &warm);
    check_same(&cold, &warm, 0, "from disk");
    ck_assert_uint_eq(warm.n_cached, CACHED);
    ck_assert_uint_eq(stats.store.read_pages, CACHED / 16);
    ck_assert_uint_eq(stats.computed_tokens, PROMPT - CACHED);

    stats = ask_folder(prompt, "b", &warm); /* another tenant finds no stored pages */
    check_same(&cold, &warm, 0, "of another tenant");
    ck_assert_uint_eq(warm.n_cached, 0);
    ck_assert_uint_eq(stats.store.read_pages, 0);
    uint64_t n_damaged = 0;
    for (uint32_t n = 0; n < each_page(UINT32_MAX - 1); n += 3) {
        (void)each_page(n);
        stats = ask_folder(prompt, n % 2 == 0 ? "a" : "b", &warm);
        check_same(&cold, &warm, 0, "with a damaged page");
        n_damaged += stats.store.damaged_pages;
    }
    ck_assert_uint_gt(n_damaged, 1);
    (void)each_page(UINT32_MAX);
}
END_TEST

START_TEST(folder_is_not_shared_between_kernels_that_compute_different_bits) {
    enum { CACHED = (PROMPT - 1) / 16 * 16 };
    static events alone;
    static events shared;
    uint32_t prompt[PROMPT];
    model_book_tokens(81, prompt, PROMPT);
    (void)ask_folder(prompt, "a", &alone); /* fills the folder with pages of the fastest kernels */
    the_isa = FKV_ISA_SCALAR;
    (void)ask_once(NULL, prompt, "a", &alone);
    fkv_engine_stats stats = ask_folder(prompt, "a", &shared);
    check_same(&alone, &shared, 0, "with a folder of other kernels");
    ck_assert_uint_eq(shared.n_cached, 0);
    ck_assert_uint_eq(stats.store.read_pages, 0);
    ck_assert_uint_eq(stats.store.damaged_pages, 0);
    (void)ask_folder(prompt, "a", &shared);
    check_same(&alone, &shared, 0, "with a folder of the same kernels");
    ck_assert_uint_eq(shared.n_cached, CACHED);
    the_isa = FKV_ISA_AUTO;
    (void)each_page(UINT32_MAX);
}
END_TEST

START_TEST(one_request_repairs_all_damaged_pages_of_its_prompt) {
    enum { CACHED = (PROMPT - 1) / 16 * 16 };
    static events cold;
    static events warm;
    uint32_t prompt[PROMPT];
    model_book_tokens(79, prompt, PROMPT);
    (void)ask_folder(prompt, "a", &cold);
    const uint32_t n_pages = each_page(UINT32_MAX - 1);
    for (uint32_t n = 0; n < n_pages; n++) (void)each_page(n);
    fkv_engine_stats stats = ask_folder(prompt, "a", &warm);
    check_same(&cold, &warm, 0, "with a folder of damaged pages");
    ck_assert_uint_eq(warm.n_cached, 0);
    ck_assert_uint_eq(stats.store.damaged_pages, 1);
    stats = ask_folder(prompt, "a", &warm); /* the first request has rewritten every page of the prompt */
    check_same(&cold, &warm, 0, "from a repaired folder");
    ck_assert_uint_eq(stats.store.damaged_pages, 0);
    ck_assert_uint_eq(stats.store.read_pages, CACHED / 16);
    (void)each_page(UINT32_MAX);
}
END_TEST

static fkv_status slow_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    const struct timespec time = {.tv_sec = TEST_SANITIZED ? 8 : 1}; /* computing a page takes much less time */
    const fkv_prefix_store *inner = self;
    (void)nanosleep(&time, NULL);
    return inner->read(inner->self, key, packed, capacity, n_bytes);
}

static bool inner_look(void *self, const fkv_page_key *key) {
    const fkv_prefix_store *inner = self;
    return inner->contains(inner->self, key);
}

static fkv_status inner_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    const fkv_prefix_store *inner = self;
    return inner->write(inner->self, key, packed, n_bytes);
}

static void inner_used(void *self, const fkv_page_key *keys, uint32_t n) {
    const fkv_prefix_store *inner = self;
    inner->touch(inner->self, keys, n);
}

static void inner_figures(void *self, fkv_prefix_store_stats *figures) {
    const fkv_prefix_store *inner = self;
    inner->stats(inner->self, figures);
}

/* A late read teaches the engine that the store is slower than the predicted time of computing. On a busy machine, this
 * prediction can rise between two requests and the store is then tried again, so several requests are sent. */
START_TEST(store_slower_than_computing_is_not_used) {
    enum { N_REQUESTS = 6 };
    static events cold;
    static events warm;
    uint32_t prompt[PROMPT];
    static fkv_prefix_store inner;
    uint64_t id = 0;
    fkv_engine_stats stats;
    model_book_tokens(78, prompt, PROMPT);
    (void)ask_folder(prompt, "a", &cold);
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &inner));
    const fkv_prefix_store slow = {.self = &inner,
                                   .contains = inner_look,
                                   .read = slow_read,
                                   .write = inner_write,
                                   .touch = inner_used,
                                   .stats = inner_figures};
    the_store = &slow;
    fkv_engine *engine = open_engine(2);
    the_store = NULL;
    for (uint32_t i = 0; i <= N_REQUESTS; i++) {
        uint32_t other[PROMPT];
        memcpy(other, prompt, sizeof other);
        /* the engine learns the cost of computing tokens from the first request */
        if (i == 0) model_book_tokens(500, other, PROMPT);
        fkv_request r = request_of(other, &warm);
        r.tenant_name = "a";
        r.tenant = i; /* each tenant number has its own prefix tree, but all tenants have the same name */
        events_init(&warm);
        ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
        events_wait(&warm);
        if (i > 0) check_same(&cold, &warm, 0, "with a slow store");
    }
    ck_assert(fkv_engine_drain(engine, 3600.0));
    fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_le(stats.store.read_pages, 1);
    ck_assert_uint_eq(stats.store.late + stats.store.declined, N_REQUESTS);
    ck_assert_uint_ge(stats.store.declined, 1);
    fkv_engine_close(engine);
    inner.close(inner.self);
    (void)each_page(UINT32_MAX);
}
END_TEST

static _Atomic uint32_t n_looks;

static bool counted_look(void *self, const fkv_page_key *key) {
    n_looks++;
    return inner_look(self, key);
}

static fkv_status inner_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    const fkv_prefix_store *inner = self;
    return inner->read(inner->self, key, packed, capacity, n_bytes);
}

START_TEST(store_is_not_queried_in_every_step_for_a_waiting_request) {
    enum { STEPS = 100 };
    static events long_one;
    static events waits;
    uint32_t prompt[PROMPT];
    static fkv_prefix_store inner;
    uint64_t id = 0;
    uint64_t other = 0;
    fkv_engine_stats stats = {.steps = 0};
    model_book_tokens(79, prompt, PROMPT);
    (void)ask_folder(prompt, "a", &waits);
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &inner));
    const fkv_prefix_store counted = {.self = &inner,
                                      .contains = counted_look,
                                      .read = inner_read,
                                      .write = inner_write,
                                      .touch = inner_used,
                                      .stats = inner_figures};
    the_store = &counted;
    fkv_engine *engine = open_engine(2);
    the_store = NULL;
    fkv_engine_stats_now(engine, &stats);
    fkv_request r = request_of(prompt, &long_one);
    r.prompt = (uint32_t[PROMPT]){1, 2, 3};
    r.max_new = stats.max_request_tokens - PROMPT; /* the long request leaves no pages for other requests */
    events_init(&long_one);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    r = request_of(prompt, &waits);
    r.tenant_name = "a";
    events_init(&waits);
    ck_ok(fkv_engine_submit(engine, &r, &other, NULL));
    while (stats.steps < STEPS) fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_eq(stats.waiting, 1);
    ck_assert_uint_le(n_looks, 3 * (PROMPT + 2 * STEPS) /
                                   16); /* the store is queried once, and once more for each page that the other request wrote */
    fkv_engine_cancel(engine, id);
    events_wait(&long_one);
    events_wait(&waits);
    ck_assert_uint_eq(waits.n_cached, (PROMPT - 1) / 16 * 16); /* the prefix can still be loaded from the store */
    fkv_engine_close(engine);
    inner.close(inner.self);
    (void)each_page(UINT32_MAX);
}
END_TEST

/* A store that needs one step to look up a page: the first contains() for a key returns false, and the answer is pending. The
 * very first lookup is not pending, so that the request computes its pages. */
static struct {
    fkv_page_key asked;
    uint32_t n_looks;
    bool pending;
    _Atomic uint32_t n_writes;
} late;

static bool late_look(void *self, const fkv_page_key *key) {
    const bool is_known = memcmp(&late.asked, key, sizeof *key) == 0;
    late.asked = *key;
    late.pending = late.n_looks > 0 && !is_known;
    return late.n_looks++ > 0 && is_known && inner_look(self, key);
}

static bool late_pending(void *self, const fkv_page_key *key) {
    (void)self;
    return late.pending && memcmp(&late.asked, key, sizeof *key) == 0;
}

static fkv_status counted_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    late.n_writes++;
    return inner_write(self, key, packed, n_bytes);
}

START_TEST(pages_are_not_written_while_the_store_looks_them_up) {
    static events cold;
    static events warm;
    uint32_t prompt[PROMPT];
    static fkv_prefix_store inner;
    model_book_tokens(82, prompt, PROMPT);
    (void)ask_folder(prompt, "a", &cold);
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &inner));
    const fkv_prefix_store store = {.self = &inner,
                                    .contains = late_look,
                                    .pending = late_pending,
                                    .read = inner_read,
                                    .write = counted_write,
                                    .touch = inner_used,
                                    .stats = inner_figures};
    (void)ask_once(&store, prompt, "a", &warm);
    check_same(&cold, &warm, 0, "with a store that answers late");
    ck_assert_uint_eq(warm.n_cached, 0);
    ck_assert_uint_eq(late.n_writes, 0);
    late.n_looks = 0;
    (void)ask_once(&store, prompt, "b", &warm); /* pages that the store does not have are written */
    ck_assert_uint_gt(late.n_writes, 0);
    inner.close(inner.self);
    (void)each_page(UINT32_MAX);
}
END_TEST

/* ---- drafts ---- */

START_TEST(drafts_do_not_change_the_text) {
    enum { N = 6, DRAFT = 4 };
    static events plain[N];
    static events drafted[N];
    uint32_t prompts[N][PROMPT];
    uint64_t id = 0;
    fkv_engine_stats stats;
    for (uint32_t i = 0; i < N; i++) {
        model_book_tokens(150 * i, prompts[i], PROMPT / 2);
        memcpy(prompts[i] + PROMPT / 2, prompts[i],
               PROMPT / 2 * sizeof(uint32_t)); /* the prompt ends with repeated text, which drafts can predict */
    }
    for (n_drafts = 0; n_drafts <= DRAFT; n_drafts += DRAFT) {
        events *all = n_drafts > 0 ? drafted : plain;
        fkv_engine *engine = open_engine(3);
        for (uint32_t i = 0; i < N; i++) {
            fkv_request r = request_of(prompts[i], &all[i]);
            if (i % 3 == 2) r.sampler.temperature = 0.8f; /* every third request samples, with the same seed in both runs */
            r.n = i == 1 ? 2 : 1;
            events_init(&all[i]);
            ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
        }
        for (uint32_t i = 0; i < N; i++) events_wait(&all[i]);
        check_empty(engine);
        fkv_engine_stats_now(engine, &stats);
        fkv_engine_close(engine);
    }
    n_drafts = 0;
    for (uint32_t i = 0; i < N; i++) check_same(&plain[i], &drafted[i], 0, "with drafts");
    check_same(&plain[1], &drafted[1], 1, "a fork with drafts");
    printf("%u of %u drafted tokens were accepted\n", (unsigned)stats.accepted_tokens, (unsigned)stats.drafted_tokens);
    ck_assert_uint_le(stats.accepted_tokens, stats.drafted_tokens); /* the number of tried drafts depends on measured times;
                                                                       test_engine checks it with a simulated clock */
}
END_TEST

/* ---- many threads ---- */

enum { N_THREADS = 4, N_EACH = 12 };

static fkv_engine *shared;
static _Atomic uint32_t n_cancelled;
static uint32_t shared_prompts[3][PROMPT];

static void *client(void *user) {
    uint32_t number = *(const uint32_t *)user;
    for (uint32_t i = 0; i < N_EACH; i++) {
        events h;
        uint64_t id = 0;
        fkv_engine_stats stats;
        fkv_request_info list[8];
        events_init(&h);
        fkv_request r = request_of(shared_prompts[i % 3], &h);
        r.tenant = number % 2;
        if (fkv_engine_submit(shared, &r, &id, NULL) != FKV_OK) abort();
        if (i % 4 == 1) fkv_engine_cancel(shared, id);
        fkv_engine_stats_now(shared, &stats);
        (void)fkv_engine_requests(shared, list, 8);
        events_wait(&h);
        if (h.reason == FKV_FINISH_CANCELLED) n_cancelled++;
        if (h.reason != FKV_FINISH_CANCELLED && h.n[0] != MAX_NEW) abort();
    }
    return NULL;
}

START_TEST(requests_and_cancels_from_many_threads_are_served) {
    pthread_t threads[N_THREADS];
    uint32_t numbers[N_THREADS];
    for (uint32_t i = 0; i < 3; i++) model_book_tokens(100 * i, shared_prompts[i], PROMPT);
    shared = open_engine(4);
    for (uint32_t i = 0; i < N_THREADS; i++) {
        numbers[i] = i;
        ck_assert_int_eq(pthread_create(&threads[i], NULL, client, &numbers[i]), 0);
    }
    for (uint32_t i = 0; i < N_THREADS; i++) (void)pthread_join(threads[i], NULL);
    printf("%u of %u requests were cancelled before they finished\n", n_cancelled, N_THREADS * N_EACH / 4);
    check_empty(shared);
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
    static events h;
    uint32_t prompt[PROMPT];
    uint32_t only = 'x';
    uint64_t id = 0;
    model_book_tokens(0, prompt, PROMPT);
    fkv_engine *engine = open_engine(2);
    fkv_request r = request_of(prompt, &h);
    r.mask = only_one;
    r.mask_user = &only;
    events_init(&h);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    events_wait(&h);
    for (uint32_t i = 0; i < MAX_NEW; i++) ck_assert_uint_eq(h.tokens[0][i], only);
    fkv_engine_close(engine);
}
END_TEST

START_TEST(full_queue_reports_when_to_retry) {
    static events h[8];
    uint32_t prompt[PROMPT];
    uint64_t id = 0;
    double retry = 0.0;
    uint32_t n = 0;
    model_book_tokens(0, prompt, PROMPT);
    fkv_engine_config c = fkv_engine_config_default();
    fkv_engine *engine = open_engine(1);
    fkv_engine_close(engine); /* opened only to load the model */
    c.runner.max_tokens = 1024;
    c.runner.max_seqs = c.runner.max_logit_rows = 1;
    c.max_queue = 2;
    ck_ok(fkv_engine_open(model, &c, &engine));
    fkv_status status = FKV_OK;
    while (n < 8 && status == FKV_OK) {
        fkv_request r = request_of(prompt, &h[n]);
        r.max_new = 700;
        events_init(&h[n]);
        status = fkv_engine_submit(engine, &r, &id, &retry);
        if (status == FKV_OK) n++;
    }
    ck_assert_int_eq(status, FKV_BUSY);
    ck_assert(n >= 2 && n <= 3);
    ck_assert_double_ge(retry, 1.0);
    (void)fkv_engine_drain(engine, 0.0);  /* the drained engine rejects every request */
    for (uint32_t i = 0; i < 2000; i++) { /* retry times increase with every rejected request, up to a bound */
        fkv_request r = request_of(prompt, &h[n]);
        r.max_new = 700;
        ck_assert_int_eq(fkv_engine_submit(engine, &r, &id, &retry), FKV_BUSY);
        ck_assert(retry >= 1.0 && retry <= 600.0);
    }
    fkv_engine_close(engine); /* cancels the remaining requests */
    for (uint32_t i = 0; i < n; i++) {
        events_wait(&h[i]);
        ck_assert_int_eq(h[i].reason, FKV_FINISH_CANCELLED);
    }
    fkv_model_close(model);
    model = NULL;
}
END_TEST

/* ---- tenants ---- */

enum { QUEUE = 100 };

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* while the test holds it, the first request does not finish */
static _Atomic uint32_t n_starts;

/* Request of one tenant; `position` is the number of requests that started before it. */
typedef struct turn {
    uint32_t position;
    bool waits; /* wait for the gate after the first token */
    events events;
} turn;

static void on_turn(void *user, const fkv_event *e) {
    turn *t = user;
    if (e->kind == FKV_EVENT_STARTED) t->position = n_starts++;
    if (e->kind == FKV_EVENT_TOKEN && t->waits) {
        (void)pthread_mutex_lock(&gate);
        (void)pthread_mutex_unlock(&gate);
        t->waits = false;
    }
    on_event(&t->events, e);
}

static fkv_status submit_turn(fkv_engine *engine, turn *t, uint64_t tenant) {
    static uint32_t prompt[PROMPT];
    uint64_t id = 0;
    model_book_tokens(0, prompt, PROMPT);
    fkv_request r = request_of(prompt, &t->events);
    r.tenant = tenant;
    r.event = on_turn;
    r.user = t;
    events_init(&t->events);
    return fkv_engine_submit(engine, &r, &id, NULL);
}

START_TEST(request_of_a_second_tenant_overtakes_a_full_queue) {
    static turn crowd[2 * QUEUE];
    static turn guest;
    uint32_t n = 0;
    model = NULL;
    (void)pthread_mutex_lock(&gate);
    crowd[0].waits = true;
    fkv_engine *engine = open_engine(1);
    while (n < 2 * QUEUE && submit_turn(engine, &crowd[n], 1) == FKV_OK) n++;
    ck_assert(n >= QUEUE && n <= QUEUE + 1); /* the first request may already have left the queue */
    ck_ok(submit_turn(engine, &guest, 2));
    (void)pthread_mutex_unlock(&gate);
    events_wait(&guest.events);
    printf("%u of %u requests of the first tenant started before the request of the second tenant\n", guest.position, n);
    ck_assert_uint_le(guest.position, 2);
    fkv_engine_close(engine); /* cancels the remaining requests */
    for (uint32_t i = 0; i < n; i++) events_wait(&crowd[i].events);
    fkv_model_close(model);
    model = NULL;
}
END_TEST

TEST_MAIN("engine_model", batched_shared_and_forked_texts_are_bit_identical,
          folder_is_not_shared_between_kernels_that_compute_different_bits,
          engines_that_share_cores_give_the_same_texts_and_close_in_any_order, turns_of_engines_never_overlap,
          one_request_repairs_all_damaged_pages_of_its_prompt,
          prefix_on_disk_gives_the_same_text_and_damaged_pages_are_recomputed, store_slower_than_computing_is_not_used,
          store_is_not_queried_in_every_step_for_a_waiting_request, pages_are_not_written_while_the_store_looks_them_up,
          drafts_do_not_change_the_text, requests_and_cancels_from_many_threads_are_served, mask_limits_the_tokens_of_an_answer,
          full_queue_reports_when_to_retry, request_of_a_second_tenant_overtakes_a_full_queue)
