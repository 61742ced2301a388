/* Checks that memory use is flat after fkv_cache_open(): thousands of calls of every kind, including page files and rejected
 * calls, must change neither the allocator's counters nor resident memory.
 *
 * The counters are jemalloc's, for the driving thread and for the whole process. Without jemalloc, only resident memory is
 * checked. With a sanitizer, neither the counters nor resident memory are checked. The output states what is checked. The test
 * itself must not allocate between two measurements, so it avoids output and the ck_ macros, which allocate.
 */
#include "cache_fixture.h"
#include "sanitized.h"
#include "test.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#ifdef FKV_HAVE_JEMALLOC
#include <jemalloc/jemalloc.h>
#endif

enum { PAGE = 16, MAX_TOKENS = 2048, MAX_SEQS = 6, STEP_TOKENS = 64, N_TOKENS = 400 };

/* Tolerance for changes in resident memory, in bytes, because the C library may allocate memory for itself. */
static const uint64_t SLACK_BYTES = 64 * 1024;

static const float SINK_LOGITS[] = {0.5f, 2.0f};

static const fkv_layer_config LAYERS[] = {
    {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {8, 64}, .v = {4, 64}},
    {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .window = 40, .n_sinks = 4, .k = {16, 0}, .v = {16, 0}},
    {.n_q_heads = 2, .n_kv_heads = 2, .head_dim = 128, .softcap = 20.0f, .k = {4, 32}, .v = {2, 64}, .sink_logits = SINK_LOGITS},
    {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {4, 0, FKV_CODEC_SEALED}, .v = {4, 0, FKV_CODEC_SEALED_V}},
    {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 32, .window = 40, .n_sinks = 4, .k = {3, 0, FKV_CODEC_SEALED}, .v = {8, 32}},
    {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 96, .k = {3, 0, FKV_CODEC_TURBO}, .v = {4, 0, FKV_CODEC_TURBO}},
};

static fkv_config small_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = N_OF(LAYERS);
    config.layers = LAYERS;
    config.rotate = FKV_ROTATE_KV;
    config.page_tokens = PAGE;
    config.max_tokens = MAX_TOKENS;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = STEP_TOKENS;
    config.n_threads = 3;
    return config;
}

/* ---- counters ---- */

typedef struct counters {
    uint64_t allocated;   /* total bytes allocated by this thread */
    uint64_t deallocated; /* total bytes deallocated by this thread */
    uint64_t live;        /* bytes currently allocated by all threads */
    uint64_t anonymous;   /* anonymous resident bytes of the process */
} counters;

#ifdef FKV_HAVE_JEMALLOC

static uint64_t control(const char *name) {
    uint64_t value = 0; /* every counter that is read here has 64 bits */
    size_t size = sizeof value;
    if (mallctl(name, &value, &size, NULL, 0) != 0 || size != sizeof value) abort();
    return value;
}

static counters count(void) {
    uint64_t epoch = 1; /* writing the epoch refreshes jemalloc's counters */
    if (mallctl("epoch", NULL, NULL, &epoch, sizeof epoch) != 0) abort();
    return (counters){control("thread.allocated"), control("thread.deallocated"), control("stats.allocated"),
                      cache_anonymous_bytes()};
}

static void print_what_is_counted(void) { printf("counted: every allocation, and resident memory\n"); }

#else

static counters count(void) { return (counters){.anonymous = cache_anonymous_bytes()}; }

static void print_what_is_counted(void) { printf("built without jemalloc: only resident memory is measured, not allocations\n"); }

#endif

static void check_flat(counters before, counters after, const char *what) {
    ck_assert_msg(after.allocated == before.allocated && after.deallocated == before.deallocated,
                  "%s: the driving thread allocated %" PRIu64 " bytes and freed %" PRIu64, what,
                  after.allocated - before.allocated, after.deallocated - before.deallocated);
    ck_assert_msg(after.live == before.live, "%s: %" PRIu64 " bytes allocated, expected %" PRIu64, what, after.live, before.live);
    if (TEST_SANITIZED || before.anonymous == 0) {
        printf("%s: resident memory is not measured here\n", what);
        return;
    }
    printf("%s: %" PRIu64 " bytes resident before, %" PRIu64 " after\n", what, before.anonymous, after.anonymous);
    ck_assert_uint_le(after.anonymous, before.anonymous + SLACK_BYTES);
    ck_assert_uint_ge(after.anonymous + SLACK_BYTES, before.anonymous);
}

/* ---- operations ---- */

/* Number of calls, and number of calls that returned an unexpected status. */
typedef struct tally {
    uint64_t n_calls;
    uint64_t n_wrong;
} tally;

static void expect(tally *t, fkv_status got, fkv_status expected) {
    t->n_calls++;
    t->n_wrong += got != expected;
}

typedef struct file_paths {
    char saved[512];
    char missing[512];
    char unfinished[512]; /* file name that fkv_seq_save() must reject */
} file_paths;

static void make_paths(file_paths *paths) {
    (void)cache_path(paths->saved, "saved.fkv");
    (void)cache_path(paths->missing, "missing.fkv");
    (void)cache_path(paths->unfinished, "saved.fkv.part");
}

/* Saves a sequence to a file and loads the file, then makes save and load calls that must be rejected. */
static void travel(cache_fixture *w, fkv_seq seq, const uint32_t *tokens, const uint32_t *strange, const file_paths *paths,
                   tally *t) {
    fkv_seq loaded = 0;
    fkv_file_info info;
    uint32_t n_tokens = 0;
    fkv_seq_config good = {.max_tokens = N_TOKENS};
    fkv_seq_config other = {.max_tokens = N_TOKENS, .prompt = strange, .n_prompt = N_TOKENS};
    expect(t, fkv_seq_save(w->cache, seq, tokens, 0, paths->saved), FKV_OK);
    expect(t, fkv_seq_load(w->cache, &good, paths->saved, &loaded), FKV_OK);
    expect(t, fkv_seq_save(w->cache, loaded, tokens, 0, paths->saved), FKV_OK);
    expect(t, fkv_seq_close(w->cache, loaded), FKV_OK);
    expect(t, fkv_file_inspect(paths->saved, true, &info), FKV_OK);
    expect(t, fkv_file_tokens(paths->saved, NULL, 0, &n_tokens), FKV_OK);
    expect(t, fkv_seq_save(w->cache, seq, tokens, 0, paths->unfinished), FKV_BAD_ARGUMENT);
    expect(t, fkv_seq_load(w->cache, &other, paths->saved, &loaded), FKV_BAD_ARGUMENT);
    expect(t, fkv_seq_load(w->cache, &good, paths->missing, &loaded), FKV_IO);
}

/* Forks a sequence and closes the fork during a step that has rows of the fork. Then commits or aborts the step. */
static void close_in_steps(cache_fixture *w, fkv_seq seq, const uint32_t *tokens, uint32_t at, tally *t) {
    for (int ending = 0; ending < 2; ending++) {
        fkv_seq child = 0;
        fkv_step *step = NULL;
        expect(t, fkv_seq_fork(w->cache, seq, N_TOKENS, &child), FKV_OK);
        const cache_chunk chunk = {child, tokens, at, 1, NULL};
        expect(t, fkv_step_begin(w->cache, &(fkv_row){child, 1}, 1, &step), FKV_OK);
        expect(t, fkv_seq_close(w->cache, child), FKV_OK);
        expect(t, fkv_seq_close(w->cache, child), FKV_BAD_SEQ);
        for (uint32_t l = 0; l < N_OF(LAYERS); l++) expect(t, cache_fixture_write(w, step, &chunk, 1, l), FKV_OK);
        expect(t, ending == 0 ? fkv_step_commit(step) : fkv_step_abort(step), FKV_OK);
    }
}

/* Runs one sequence from open to close, with forks, aborted steps and rejected calls in between. */
static void run_sequence(cache_fixture *w, const uint32_t *tokens, const uint32_t *strange, const file_paths *paths,
                         uint32_t chunk, tally *t) {
    fkv_seq seq = 0;
    uint32_t at = 0;
    fkv_seq_config opened = {.max_tokens = N_TOKENS, .tenant = 3, .prompt = tokens, .n_prompt = N_TOKENS - 100};
    expect(t, fkv_seq_open(w->cache, &opened, &seq, &at), FKV_OK);
    for (uint32_t round = 0; at < N_TOKENS; round++) {
        uint32_t n = chunk < N_TOKENS - at ? chunk : N_TOKENS - at;
        fkv_seq child = 0;
        fkv_stats stats;
        cache_fixture_step(w, &(cache_chunk){seq, strange, at, n, NULL}, 1, CACHE_ABORT);
        expect(t, fkv_seq_fork(w->cache, seq, N_TOKENS, &child), FKV_OK);
        cache_chunk both[] = {{child, strange, at, 1, NULL}, {seq, tokens, at, n, NULL}};
        cache_fixture_step(w, both, 2, CACHE_COMMIT);
        t->n_calls += 2;
        at += n;
        if (at < N_TOKENS) close_in_steps(w, seq, strange, at, t);
        uint32_t n_shared = 0;
        expect(t, fkv_prefix_match(w->cache, &opened, &n_shared), FKV_OK);
        expect(t, fkv_seq_reserve(w->cache, child, MAX_TOKENS + 1), FKV_POOL_FULL);
        expect(t, fkv_seq_reserve(w->cache, child, N_TOKENS + 1), FKV_OK);
        expect(t, fkv_seq_reserve(w->cache, child, N_TOKENS), FKV_OK);
        if (at % PAGE == 0) expect(t, fkv_prefix_insert(w->cache, seq, tokens, at), FKV_OK);
        fkv_status cut = fkv_seq_truncate(w->cache, child, at - n);
        expect(t, cut == FKV_GONE ? FKV_OK : cut,
               FKV_OK); /* truncation fails if a page, or its open form, has already been released */
        expect(t, fkv_cache_stats(w->cache, &stats), FKV_OK);
        expect(t, fkv_seq_close(w->cache, child), FKV_OK);
        expect(t, fkv_seq_close(w->cache, child), FKV_BAD_SEQ);
        expect(t, fkv_seq_fork(w->cache, seq, MAX_TOKENS + 1, &child), FKV_POOL_FULL);
        if (round % 16 == 15) expect(t, fkv_prefix_clear(w->cache), FKV_OK);
    }
    travel(w, seq, tokens, strange, paths, t);
    expect(t, fkv_seq_close(w->cache, seq), FKV_OK);
}

/* Must run before any other test saves or loads, so that allocations on first use are counted. */
START_TEST(first_save_and_load_allocate_nothing) {
    fkv_config config = small_config();
    cache_fixture w;
    file_paths paths;
    uint32_t tokens[N_TOKENS];
    ck_ok(cache_fixture_open(&w, &config));
    make_paths(&paths);
    cache_tokens(7, tokens, N_TOKENS);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    fkv_seq loaded = 0;
    fkv_seq_config opened = {.max_tokens = N_TOKENS};
    cache_fixture_run(&w, seq, tokens, 0, N_TOKENS, STEP_TOKENS, NULL);
    (void)count();

    counters before = count();
    fkv_status save = fkv_seq_save(w.cache, seq, tokens, 0, paths.saved);
    counters saved = count();
    fkv_status load = fkv_seq_load(w.cache, &opened, paths.saved, &loaded);
    counters after = count();

    ck_ok(save);
    ck_ok(load);
    check_flat(before, saved, "the first save");
    check_flat(saved, after, "the first load");
    cache_fixture_close(&w);
}
END_TEST

START_TEST(nothing_is_allocated_between_open_and_close) {
    enum { N_ROUNDS = TEST_SANITIZED ? 4 : 8 };
    static const uint32_t chunks[] = {
        1, 13, 32, 60}; /* shorter than max_step_tokens, so that a step also has space for one token of a fork */
    fkv_config config = small_config();
    cache_fixture w;
    uint32_t tokens[N_ROUNDS][N_TOKENS];
    uint32_t strange[N_TOKENS];
    file_paths paths;
    print_what_is_counted();
    make_paths(&paths);
    ck_ok(cache_fixture_open(&w, &config));
    for (int i = 0; i < 3; i++)
        memset(w.rows[i], 1,
               (size_t)STEP_TOKENS * 4 * 64 * sizeof(float)); /* makes the test's own memory resident before the measurement */
    memset(w.out, 1, (size_t)STEP_TOKENS * 4 * 64 * sizeof(float));
    for (uint64_t i = 0; i < N_ROUNDS; i++) cache_tokens(i, tokens[i], N_TOKENS);
    cache_tokens(99, strange, N_TOKENS);
    (void)count();

    counters before = count();
    tally t = {0};
    for (uint32_t i = 0; i < N_ROUNDS; i++) run_sequence(&w, tokens[i], strange, &paths, chunks[i % N_OF(chunks)], &t);
    counters after = count();

    printf("%" PRIu64 " calls\n", t.n_calls);
    ck_assert_uint_eq(t.n_wrong, 0);
    ck_assert_uint_gt(t.n_calls, 600 * N_ROUNDS);
    check_flat(before, after, "a busy cache");
    ck_assert_uint_gt(cache_fixture_stats(&w).page_copies, 0);
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
}
END_TEST

/* Fills a cache completely with one sequence, by prefill and decode. Memory use after the last token must equal memory use after
 * the first token. */
START_TEST(memory_is_flat_from_the_first_token_to_the_last) {
    enum { N_ALL = TEST_SANITIZED ? 640 : MAX_TOKENS, N_DECODED = TEST_SANITIZED ? 100 : 300 };
    fkv_config config = small_config();
    config.max_seqs = 1;
    config.max_tokens = N_ALL;
    cache_fixture w;
    uint32_t tokens[N_ALL];
    cache_tokens(5, tokens, N_ALL);
    ck_ok(cache_fixture_open(&w, &config));
    fkv_seq seq = cache_fixture_seq(&w, N_ALL);
    cache_fixture_run(&w, seq, tokens, 0, STEP_TOKENS + 1, STEP_TOKENS, NULL);
    (void)count();
    counters first = count();
    cache_fixture_run(&w, seq, tokens, STEP_TOKENS + 1, N_ALL - N_DECODED, STEP_TOKENS, NULL);
    cache_fixture_run(&w, seq, tokens, N_ALL - N_DECODED, N_ALL, 1, NULL);
    counters last = count();
    check_flat(first, last, "a full cache");
    cache_fixture_close(&w);
}
END_TEST

/* Checks that the counters would detect an allocation. */
START_TEST(an_allocation_would_be_detected) {
    enum { BYTES = 16 << 20 };
    (void)count();
    counters before = count();
    volatile uint8_t *block = malloc(BYTES); /* volatile, so that the compiler does not remove the writes */
    for (size_t i = 0; i < BYTES && block != NULL; i += 512) block[i] = 1;
    counters after = count();
    ck_assert(block != NULL);
    free((void *)block);
#ifdef FKV_HAVE_JEMALLOC
    ck_assert_uint_ge(after.allocated, before.allocated + BYTES);
    ck_assert_uint_ge(after.live, before.live + BYTES);
#endif
    if (!TEST_SANITIZED && before.anonymous != 0) ck_assert_uint_gt(after.anonymous, before.anonymous + SLACK_BYTES);
}
END_TEST

TEST_MAIN("no alloc", first_save_and_load_allocate_nothing, nothing_is_allocated_between_open_and_close,
          memory_is_flat_from_the_first_token_to_the_last, an_allocation_would_be_detected)
