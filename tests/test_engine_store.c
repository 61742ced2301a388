/* Tests of the engine with a prefix store: prefixes from the store do not change the answer, damaged pages are recomputed, and a
 * slow store is not used.
 */
#include "../src/base/cpu.h"
#include "../src/codec/block.h"
#include "../src/engine/prefix_parts.h"
#include "engine_fixture.h"
#include "model_fixture.h"
#include "sanitized.h"
#include "test.h"

#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The engine includes only public headers, so it defines the size of a span itself. */
_Static_assert((int)FKV_SPAN_PAGES == (int)FKV_OPEN_SPAN, "the engine and the codec use different spans");

static const char *store_path(void) {
    static char path[200];
    const char *root = getenv("TMPDIR");
    (void)snprintf(path, sizeof path, "%s/flatkv_engine_test_%d", root != NULL ? root : "/tmp", (int)getpid());
    return path;
}

/* Changes one byte of page n in the folder, if this page exists. If n is UINT32_MAX, deletes all pages and the folder instead.
 * Returns the number of pages. */
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
static fkv_engine_stats ask_once(const fkv_prefix_store *store, const uint32_t *prompt, const char *tenant_name,
                                 engine_events *h) {
    fkv_engine_stats stats;
    uint64_t id = 0;
    engine_fixture.store = store;
    fkv_engine *engine = engine_fixture_open(2);
    engine_fixture.store = NULL;
    fkv_request r = engine_fixture_request(prompt, h);
    r.tenant_name = tenant_name;
    engine_events_init(h);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    engine_events_wait(h);
    engine_fixture_check_empty(engine);
    fkv_engine_stats_now(engine, &stats);
    fkv_engine_close(engine);
    return stats;
}

static fkv_engine_stats ask_folder(const uint32_t *prompt, const char *tenant_name, engine_events *h) {
    fkv_prefix_store store;
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &store));
    fkv_engine_stats stats = ask_once(&store, prompt, tenant_name, h);
    store.close(store.self);
    return stats;
}

/* Runs the same request without a store, with an empty folder, with a filled folder and with damaged pages. n_open: number of
 * open pages that the folder has for the prompt, in addition to its other pages. */
static void check_prefix_on_disk(uint32_t n_open) {
    enum { N_PROMPT = ENGINE_PROMPT - 16, CACHED = (N_PROMPT - 1) / 16 * 16, ALL = (N_PROMPT + ENGINE_MAX_NEW - 1) / 16 };
    static engine_events cold;
    static engine_events warm;
    uint32_t prompt[N_PROMPT];
    engine_fixture.n_prompt = N_PROMPT;
    model_book_tokens(77, prompt, N_PROMPT);
    (void)ask_once(NULL, prompt, NULL, &cold);
    (void)ask_folder(prompt, "a", &warm);
    ck_assert_uint_eq(warm.n_cached, 0);
    engine_fixture_check_same(&cold, &warm, 0, "with a store that is empty");
    ck_assert_uint_eq(each_page(UINT32_MAX - 1), ALL + n_open); /* the store also contains pages of the answer */

    fkv_engine_stats stats = ask_folder(prompt, "a", &warm);
    engine_fixture_check_same(&cold, &warm, 0, "from disk");
    ck_assert_uint_eq(warm.n_cached, CACHED);
    ck_assert_uint_eq(stats.store.read_pages, CACHED / 16 + n_open);
    ck_assert_uint_eq(stats.computed_tokens, N_PROMPT - CACHED);

    stats = ask_folder(prompt, "b", &warm); /* another tenant finds no stored pages */
    engine_fixture_check_same(&cold, &warm, 0, "of another tenant");
    ck_assert_uint_eq(warm.n_cached, 0);
    ck_assert_uint_eq(stats.store.read_pages, 0);
    uint64_t n_damaged = 0;
    for (uint32_t n = 0; n < each_page(UINT32_MAX - 1); n += TEST_SANITIZED ? 7 : 3) {
        (void)each_page(n);
        stats = ask_folder(prompt, n % 2 == 0 ? "a" : "b", &warm);
        engine_fixture_check_same(&cold, &warm, 0, "with a damaged page");
        n_damaged += stats.store.damaged_pages;
    }
    ck_assert_uint_gt(n_damaged, TEST_SANITIZED ? 0 : 2);
    (void)each_page(UINT32_MAX);
    engine_fixture.n_prompt = ENGINE_PROMPT;
}

START_TEST(prefix_on_disk_gives_the_same_text_and_damaged_pages_are_recomputed) {
    check_prefix_on_disk(3);
    if (TEST_SANITIZED) return;
    engine_fixture.is_affine = true;
    check_prefix_on_disk(0);
    engine_fixture.is_affine = false;
}
END_TEST

/* Sealed layers need the open form of the pages in the last span of a prefix. Therefore, a prompt is repeated with 0, 1, 2 and 3
 * full pages after its last complete span. Then three prompts with a common prefix that ends within a span are run. */
START_TEST(sealed_prefix_on_disk_is_shared_up_to_every_page) {
    enum { COMMON = ENGINE_PROMPT / 64 * 64 - 16 - 5 };
    static engine_events cold;
    static engine_events warm;
    uint32_t prompt[ENGINE_PROMPT];
    model_book_tokens(83, prompt, ENGINE_PROMPT);
    for (uint32_t n = 1; n <= (TEST_SANITIZED ? 2 : 4); n++) {
        engine_fixture.n_prompt = ENGINE_PROMPT - 16 * n;
        (void)ask_once(NULL, prompt, NULL, &cold);
        (void)ask_folder(prompt, n % 2 == 0 ? "a" : "b", &warm);
        engine_fixture_check_same(&cold, &warm, 0, "with a store that has a longer prefix");
        fkv_engine_stats stats = ask_folder(prompt, n % 2 == 0 ? "a" : "b", &warm);
        engine_fixture_check_same(&cold, &warm, 0, "from disk");
        ck_assert_uint_eq(warm.n_cached, (engine_fixture.n_prompt - 1) / 16 * 16);
        ck_assert_uint_eq(stats.store.damaged_pages, 0);
    }
    engine_fixture.n_prompt = ENGINE_PROMPT;
    for (uint32_t i = 0; i < 3; i++) { /* the first prompt to diverge computes the open pages, and later prompts restore them */
        model_book_tokens(90 + i, prompt + COMMON, ENGINE_PROMPT - COMMON);
        (void)ask_once(NULL, prompt, NULL, &cold);
        (void)ask_folder(prompt, "c", &warm);
        engine_fixture_check_same(&cold, &warm, 0, "with a common prefix on disk");
        const uint32_t span = COMMON / 64 * 64;
        ck_assert_uint_eq(warm.n_cached, i == 0 ? 0 : i == 1 ? span : COMMON / 16 * 16);
        ck_assert_uint_gt(COMMON / 16 * 16, span);
    }
    (void)each_page(UINT32_MAX);
}
END_TEST

/* Returns an instruction set that is not the fastest one: if possible AVX2, because scalar kernels are slow. */
static fkv_isa other_isa(void) {
    const bool has_another = fkv_cpu_runs(FKV_ISA_AVX2) && fkv_cpu_best_isa() != FKV_ISA_AVX2;
    return has_another ? FKV_ISA_AVX2 : FKV_ISA_SCALAR;
}

START_TEST(folder_is_not_shared_between_kernels_that_compute_different_bits) {
    enum { CACHED = (ENGINE_PROMPT - 1) / 16 * 16 };
    static engine_events alone;
    static engine_events shared;
    uint32_t prompt[ENGINE_PROMPT];
    model_book_tokens(81, prompt, ENGINE_PROMPT);
    (void)ask_folder(prompt, "a", &alone); /* fills the folder with pages that the fastest kernels computed */
    engine_fixture.isa = other_isa();
    (void)ask_once(NULL, prompt, "a", &alone);
    fkv_engine_stats stats = ask_folder(prompt, "a", &shared);
    engine_fixture_check_same(&alone, &shared, 0, "with a folder of other kernels");
    ck_assert_uint_eq(shared.n_cached, 0);
    ck_assert_uint_eq(stats.store.read_pages, 0);
    ck_assert_uint_eq(stats.store.damaged_pages, 0);
    (void)ask_folder(prompt, "a", &shared);
    engine_fixture_check_same(&alone, &shared, 0, "with a folder of the same kernels");
    ck_assert_uint_eq(shared.n_cached, CACHED);
    engine_fixture.isa = FKV_ISA_AUTO;
    (void)each_page(UINT32_MAX);
}
END_TEST

START_TEST(one_request_repairs_all_damaged_pages_of_its_prompt) {
    enum { CACHED = (ENGINE_PROMPT - 1) / 16 * 16 };
    static engine_events cold;
    static engine_events warm;
    uint32_t prompt[ENGINE_PROMPT];
    model_book_tokens(79, prompt, ENGINE_PROMPT);
    (void)ask_folder(prompt, "a", &cold);
    const uint32_t n_pages = each_page(UINT32_MAX - 1);
    for (uint32_t n = 0; n < n_pages; n++) (void)each_page(n);
    fkv_engine_stats stats = ask_folder(prompt, "a", &warm);
    engine_fixture_check_same(&cold, &warm, 0, "with a folder of damaged pages");
    ck_assert_uint_eq(warm.n_cached, 0);
    ck_assert_uint_eq(stats.store.damaged_pages, 1);
    stats = ask_folder(prompt, "a", &warm); /* the first request has rewritten every page of the prompt */
    engine_fixture_check_same(&cold, &warm, 0, "from a repaired folder");
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

static fkv_status inner_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    const fkv_prefix_store *inner = self;
    return inner->read(inner->self, key, packed, capacity, n_bytes);
}

/* Returns a store whose functions call those of `inner`. Tests replace some of them. */
static fkv_prefix_store wrapper_of(fkv_prefix_store *inner) {
    return (fkv_prefix_store){.self = inner,
                              .contains = inner_look,
                              .read = inner_read,
                              .write = inner_write,
                              .touch = inner_used,
                              .stats = inner_figures};
}

/* After a slow read, the engine knows that computing the pages is faster than reading them. On a busy machine, the predicted time
 * of computing can rise between two requests, so that the engine tries the store again. The test therefore sends several
 * requests. */
START_TEST(store_slower_than_computing_is_not_used) {
    enum { N_REQUESTS = 6 };
    static engine_events cold;
    static engine_events warm;
    uint32_t prompt[ENGINE_PROMPT];
    static fkv_prefix_store inner;
    uint64_t id = 0;
    fkv_engine_stats stats;
    model_book_tokens(78, prompt, ENGINE_PROMPT);
    (void)ask_folder(prompt, "a", &cold);
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &inner));
    fkv_prefix_store slow = wrapper_of(&inner);
    slow.read = slow_read;
    engine_fixture.store = &slow;
    fkv_engine *engine = engine_fixture_open(2);
    engine_fixture.store = NULL;
    for (uint32_t i = 0; i <= N_REQUESTS; i++) {
        uint32_t other[ENGINE_PROMPT];
        memcpy(other, prompt, sizeof other);
        /* the engine learns the cost of computing tokens from the first request */
        if (i == 0) model_book_tokens(500, other, ENGINE_PROMPT);
        fkv_request r = engine_fixture_request(other, &warm);
        r.tenant_name = "a";
        r.tenant = i; /* requests with different tenant numbers share no prefix in memory, but all of them share the store,
                         because their tenant names are equal */
        engine_events_init(&warm);
        ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
        engine_events_wait(&warm);
        if (i > 0) engine_fixture_check_same(&cold, &warm, 0, "with a slow store");
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

START_TEST(store_is_not_queried_in_every_step_for_a_waiting_request) {
    enum { STEPS = 100 };
    static engine_events long_one;
    static engine_events waits;
    uint32_t prompt[ENGINE_PROMPT];
    static fkv_prefix_store inner;
    uint64_t id = 0;
    uint64_t other = 0;
    fkv_engine_stats stats = {.steps = 0};
    model_book_tokens(79, prompt, ENGINE_PROMPT);
    (void)ask_folder(prompt, "a", &waits);
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &inner));
    fkv_prefix_store counted = wrapper_of(&inner);
    counted.contains = counted_look;
    engine_fixture.store = &counted;
    fkv_engine *engine = engine_fixture_open(2);
    engine_fixture.store = NULL;
    fkv_engine_stats_now(engine, &stats);
    fkv_request r = engine_fixture_request(prompt, &long_one);
    r.prompt = (uint32_t[ENGINE_PROMPT]){1, 2, 3};
    r.max_new = stats.max_request_tokens - ENGINE_PROMPT; /* the long request leaves no pages for other requests */
    engine_events_init(&long_one);
    ck_ok(fkv_engine_submit(engine, &r, &id, NULL));
    r = engine_fixture_request(prompt, &waits);
    r.tenant_name = "a";
    engine_events_init(&waits);
    ck_ok(fkv_engine_submit(engine, &r, &other, NULL));
    while (stats.steps < STEPS) fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_eq(stats.waiting, 1);
    ck_assert_uint_le(
        n_looks, 3 * (ENGINE_PROMPT + 2 * STEPS) /
                     16); /* a waiting request queries the store once, and once more for each page that the other request wrote */
    fkv_engine_cancel(engine, id);
    engine_events_wait(&long_one);
    engine_events_wait(&waits);
    ck_assert_uint_eq(waits.n_cached, (ENGINE_PROMPT - 1) / 16 * 16); /* the prefix is still loaded from the store */
    fkv_engine_close(engine);
    inner.close(inner.self);
    (void)each_page(UINT32_MAX);
}
END_TEST

/* A store that needs one step to look up a page: the first call of contains() for a key returns false, and the lookup is pending.
 * The very first lookup is never pending, so that the request starts to compute its pages. */
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
    static engine_events cold;
    static engine_events warm;
    uint32_t prompt[ENGINE_PROMPT];
    static fkv_prefix_store inner;
    model_book_tokens(82, prompt, ENGINE_PROMPT);
    /* the length is chosen such that the answer ends with a complete span, because open pages at the end of an answer are written
     * without waiting for lookups */
    engine_fixture.n_prompt = ENGINE_PROMPT - 16;
    (void)ask_folder(prompt, "a", &cold);
    ck_ok(fkv_prefix_folder_open(store_path(), 16 << 20, &inner));
    fkv_prefix_store store = wrapper_of(&inner);
    store.contains = late_look;
    store.pending = late_pending;
    store.write = counted_write;
    (void)ask_once(&store, prompt, "a", &warm);
    engine_fixture_check_same(&cold, &warm, 0, "with a store that answers late");
    ck_assert_uint_eq(warm.n_cached, 0);
    ck_assert_uint_eq(late.n_writes, 0);
    late.n_looks = 0;
    (void)ask_once(&store, prompt, "b", &warm); /* tenant b has no pages in the store, so its pages are written */
    ck_assert_uint_gt(late.n_writes, 0);
    inner.close(inner.self);
    (void)each_page(UINT32_MAX);
    engine_fixture.n_prompt = ENGINE_PROMPT;
}
END_TEST

TEST_MAIN("engine_store", prefix_on_disk_gives_the_same_text_and_damaged_pages_are_recomputed,
          sealed_prefix_on_disk_is_shared_up_to_every_page, folder_is_not_shared_between_kernels_that_compute_different_bits,
          one_request_repairs_all_damaged_pages_of_its_prompt, store_slower_than_computing_is_not_used,
          store_is_not_queried_in_every_step_for_a_waiting_request, pages_are_not_written_while_the_store_looks_them_up)
