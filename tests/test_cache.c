/* Tests of the whole cache through the public header: memory use equals the plan, plans that do not fit are rejected with a
 * message that states their exact size, and fkv_cache_stats() returns exact numbers after each of a fixed series of calls. Other
 * programs test attention results (test_attn_fp64.c), rejected calls (test_bad_config.c and test_bad_calls.c) and bit-identical
 * outputs (test_bit_identical.c).
 *
 * Resident memory is checked only on Linux, which reports it, and without sanitizers, which allocate memory themselves.
 */
#include "../src/base/memory.h"
#include "../src/codec/block.h"
#include "cache_fixture.h"
#include "test.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

static fkv_config small_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = 2;
    config.layer = (fkv_layer_config){.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {8, 64}, .v = {4, 64}};
    config.page_tokens = 16;
    config.max_tokens = 256;
    config.max_seqs = 4;
    config.max_step_tokens = 64;
    config.n_threads = 1;
    return config;
}

/* Codecs with which the configs are tested: affine, sealed and TurboQuant. Each of them adds different parts to the plan. */
static const struct {
    fkv_codec_config k;
    fkv_codec_config v;
} KINDS[] = {{{8, 64}, {4, 64}},
             {{4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}},
             {{4, 0, FKV_CODEC_TURBO}, {4, 0, FKV_CODEC_TURBO}}};

static fkv_config config_of_kind(fkv_config config, size_t kind) {
    config.layer.k = KINDS[kind].k;
    config.layer.v = KINDS[kind].v;
    config.rotate = FKV_ROTATE_KV;
    return config;
}

/* Returns a config whose pages need about 110 MB. */
static fkv_config large_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = 8;
    config.layer = (fkv_layer_config){.n_q_heads = 32, .n_kv_heads = 8, .head_dim = 128, .k = {8, 64}, .v = {4, 64}};
    config.max_tokens = 8192;
    config.n_threads = 1;
    return config;
}

static fkv_plan plan_of(const fkv_config *config) {
    fkv_plan plan;
    ck_ok(fkv_plan_make(config, &plan));
    return plan;
}

/* Returns false and prints a note if resident memory cannot be measured. */
static bool can_measure_memory(void) {
    if (!TEST_SANITIZED && cache_anonymous_bytes() != 0) return true;
    printf("resident memory is not measured here\n");
    return false;
}

/* Returns the size of the address space of this process, or 0 if the system does not report it. Does not allocate. */
static uint64_t address_space_bytes(void) {
    char text[128];
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    (void)close(fd);
    text[n > 0 ? n : 0] = '\0';
    /* the first number in statm is the size of the address space in system pages */
    return strtoull(text, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- plan ---- */

START_TEST(plan_is_exactly_the_sum_of_its_parts) {
    fkv_config config = large_config();
    config.n_threads = 3;
    fkv_plan plan = plan_of(&config);
    ck_assert_uint_eq(plan.total_bytes, plan.slab_bytes + plan.tables_bytes + plan.scratch_bytes + plan.stacks_bytes);
    /* a row has 128 channels, with 128 code bytes for K, 64 code bytes for V, and 8 bytes for the scales and biases of 2 groups
     * in each of K and V; there are 8 heads and 8 layers */
    ck_assert_uint_eq(plan.token_bytes, (128 + 8 + 64 + 8) * 8 * 8);
    ck_assert_uint_eq(plan.n_groups, 1);
    ck_assert_uint_eq(plan.group_pages[0], 8192 / 64);
    ck_assert_uint_eq(plan.group_page_bytes[0], 64 * plan.token_bytes);
    ck_assert_uint_eq(plan.slab_bytes, 8192 * plan.token_bytes);
    ck_assert_uint_eq(plan.n_threads, 3);
    ck_assert_uint_gt(plan.stacks_bytes, 0);

    config.max_seqs = 5; /* the last page of each sequence may be partly empty */
    ck_assert_uint_eq(plan_of(&config).group_pages[0], 8192 / 64 + 4);
    config.layer.k = (fkv_codec_config){16, 0};
    config.layer.v = (fkv_codec_config){2, 32};
    ck_assert_uint_eq(plan_of(&config).token_bytes, (256 + 32 + 16) * 8 * 8);
}
END_TEST

START_TEST(scratch_does_not_depend_on_the_context_length) {
    static const uint32_t contexts[] = {64, 1000, 8192, 131072, 1 << 20, INT32_MAX};
    fkv_config config = large_config();
    config.n_threads = 4;
    config.max_step_tokens = 64;
    uint64_t scratch = plan_of(&config).scratch_bytes;
    uint64_t slab = 0;
    for (size_t i = 0; i < N_OF(contexts); i++) {
        config.max_tokens = contexts[i];
        fkv_plan plan = plan_of(&config);
        ck_assert_uint_eq(plan.scratch_bytes, scratch);
        ck_assert_uint_gt(plan.slab_bytes, slab);
        ck_assert_uint_ge(plan.slab_bytes, contexts[i] * plan.token_bytes);
        slab = plan.slab_bytes;
    }
    /* the size of scratch memory does not depend on max_step_tokens, because rows are processed in tiles */
    config.max_step_tokens = 4096;
    ck_assert_uint_eq(plan_of(&config).scratch_bytes, scratch);
    config.n_threads = 1;
    ck_assert_uint_lt(plan_of(&config).scratch_bytes, scratch);
    ck_assert_uint_eq(plan_of(&config).stacks_bytes, 0);
}
END_TEST

START_TEST(window_group_does_not_grow_with_the_context) {
    fkv_layer_config layers[2] = {large_config().layer, large_config().layer};
    layers[1].window = 1024;
    layers[1].n_sinks = 4;
    fkv_config config = large_config();
    config.n_layers = 2;
    config.layers = layers;
    fkv_plan at_16k = (config.max_tokens = 16384, plan_of(&config));
    fkv_plan at_1m = (config.max_tokens = 1 << 20, plan_of(&config));
    ck_assert_uint_eq(at_16k.n_groups, 2);
    ck_assert_uint_eq(at_1m.group_pages[0], 64 * at_16k.group_pages[0]);
    ck_assert_uint_eq(at_1m.group_pages[1], at_16k.group_pages[1]);
    /* a sequence holds at most the sink page and the pages that the window and a step of 512 tokens can touch */
    ck_assert_uint_eq(at_16k.group_pages[1], 1 + (1023 + 512 + 62) / 64 + 1);
}
END_TEST

static void check_taken(fkv_config config) {
    fkv_plan plan = plan_of(&config);
    ck_assert_uint_gt(plan.slab_bytes, 64 * MIB);
    fkv_cache *cache = NULL;
    bool measured = can_measure_memory();
    uint64_t mapped = fkv_map_live_bytes();
    uint64_t before = cache_anonymous_bytes();
    ck_ok(fkv_cache_open(&config, &cache));
    uint64_t taken = cache_anonymous_bytes() - before;
    ck_assert_uint_eq(fkv_map_live_bytes() - mapped, plan.total_bytes); /* mapped bytes, as counted by the library */
    fkv_stats stats;
    ck_ok(fkv_cache_stats(cache, &stats));
    ck_assert_uint_eq(stats.planned_bytes, plan.total_bytes);
    fkv_cache_close(cache);
    ck_assert_uint_eq(fkv_map_live_bytes(), mapped);
    uint64_t left = cache_anonymous_bytes() - before;
    if (!measured) return;
    printf("planned %" PRIu64 " bytes, resident %" PRIu64 "\n", plan.total_bytes, taken);
    ck_assert_uint_ge(taken, plan.total_bytes - plan.total_bytes / 100);
    ck_assert_uint_le(taken, plan.total_bytes + plan.total_bytes / 100);
    ck_assert_uint_le(left, MIB);
}

START_TEST(memory_use_equals_the_plan) {
    for (size_t i = 0; i < N_OF(KINDS); i++) check_taken(config_of_kind(large_config(), i));
}
END_TEST

START_TEST(lazy_cache_commits_pages_on_first_touch) {
    fkv_config config = large_config();
    config.lazy = true;
    fkv_plan plan = plan_of(&config);
    cache_fixture w;
    bool measured = can_measure_memory();
    uint64_t before = cache_anonymous_bytes();
    ck_ok(cache_fixture_open(&w, &config));
    uint64_t opened = cache_anonymous_bytes() - before;
    enum { N_TOKENS = TEST_SANITIZED ? 64 : 512 };
    uint32_t tokens[N_TOKENS];
    cache_tokens(1, tokens, N_TOKENS);
    cache_fixture_run(&w, cache_fixture_seq(&w, N_TOKENS), tokens, 0, N_TOKENS, N_TOKENS, NULL);
    uint64_t stepped = cache_anonymous_bytes() - before;
    ck_assert_uint_eq(cache_fixture_stats(&w).planned_bytes, plan.total_bytes);
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
    if (!measured) return;
    printf("lazy: %" PRIu64 " bytes resident at open, %" PRIu64 " after %d tokens\n", opened, stepped, N_TOKENS);
    ck_assert_uint_lt(opened, plan.slab_bytes / 8);
    ck_assert_uint_gt(stepped, opened + N_TOKENS * plan.token_bytes / 2);
    ck_assert_uint_lt(stepped, plan.total_bytes);
}
END_TEST

START_TEST(lazy_cache_does_not_populate_its_page_tables) {
    fkv_config config = small_config();
    config.lazy = true;
    config.n_layers = 1;
    config.layer = (fkv_layer_config){.n_q_heads = 1, .n_kv_heads = 1, .head_dim = 32, .k = {8, 32}, .v = {4, 32}};
    config.max_tokens = MIB;
    config.max_seqs = 1024; /* page tables: 1024 sequences * 65536 pages * 4 bytes = 256 MiB */
    fkv_plan plan = plan_of(&config);
    ck_assert_uint_ge(plan.tables_bytes, 256 * MIB);
    if (!can_measure_memory() || fkv_memory_available(NULL) < plan.total_bytes) return;
    fkv_cache *cache = NULL;
    fkv_seq seq = 0;
    uint64_t before = cache_anonymous_bytes();
    ck_ok(fkv_cache_open(&config, &cache));
    ck_ok(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = 64}, &seq, NULL));
    uint64_t opened = cache_anonymous_bytes() - before;
    printf("lazy: %" PRIu64 " of %" PRIu64 " table bytes resident after the first sequence\n", opened, plan.tables_bytes);
    ck_assert_uint_lt(opened, 48 * MIB); /* covers the pool and the tree for 65536 pages, and the page table of one sequence */
    ck_assert(fkv_cache_consistent(cache));
    fkv_cache_close(cache);
}
END_TEST

START_TEST(plan_above_the_limit_is_rejected_with_its_size) {
    fkv_config config = large_config();
    fkv_plan plan = plan_of(&config);
    fkv_cache *cache = NULL;
    char needed[32];
    char allowed[32];
    (void)snprintf(needed, sizeof needed, "%" PRIu64, plan.total_bytes);
    (void)snprintf(allowed, sizeof allowed, "%" PRIu64, plan.total_bytes - 1);
    uint64_t before = cache_anonymous_bytes();
    config.memory_limit = plan.total_bytes - 1;
    for (int i = 0; i < 100; i++) ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    ck_assert_ptr_null(cache);
    ck_assert_msg(strstr(fkv_message(), needed) != NULL && strstr(fkv_message(), allowed) != NULL, "%s", fkv_message());
    if (can_measure_memory()) ck_assert_uint_le(cache_anonymous_bytes() - before, MIB / 4);

    config.memory_limit = plan.total_bytes;
    ck_ok(fkv_cache_open(&config, &cache));
    fkv_cache_close(cache);
}
END_TEST

static fkv_plan least_plan(fkv_config config, bool one_of_each) {
    config.max_tokens = 1;
    if (one_of_each) config.n_threads = config.max_seqs = config.max_step_tokens = 1;
    return plan_of(&config);
}

/* Checks that the sizes suggested in the error message fit and are the largest that fit. */
START_TEST(rejected_plan_suggests_sizes_that_fit) {
    fkv_config config = large_config();
    config.n_threads = 4;
    config.max_seqs = 3;
    config.memory_limit = plan_of(&config).total_bytes / 2;
    fkv_cache *cache = NULL;
    char words[128];
    uint32_t from = 0;
    uint32_t to = 0;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    const char *advice = strstr(fkv_message(), "lower max_tokens from");
    ck_assert_msg(advice != NULL && sscanf(advice, "lower max_tokens from %u to %u", &from, &to) == 2, "%s", fkv_message());
    ck_assert_uint_eq(from, config.max_tokens);
    ck_assert_uint_gt(to, config.max_tokens / 3);
    config.max_tokens = to + 1;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    config.max_tokens = to;
    ck_ok(fkv_cache_open(&config, &cache));
    fkv_cache_close(cache);

    /* lowering max_tokens to 1 is not enough; other fields must be lowered too */
    config.memory_limit = least_plan(config, false).total_bytes - 1;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    (void)snprintf(words, sizeof words, "the plan then needs %" PRIu64 " bytes", least_plan(config, false).total_bytes);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "%s", fkv_message());
    (void)snprintf(words, sizeof words, "n_threads from 4, max_seqs from 3 or max_step_tokens from %u", config.max_step_tokens);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "%s", fkv_message());
    (void)snprintf(words, sizeof words, "with 1 for each of them, it needs %" PRIu64 " bytes)",
                   least_plan(config, true).total_bytes);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "%s", fkv_message());

    /* no plan fits, even if n_threads, max_seqs, max_step_tokens and max_tokens are 1 */
    config.memory_limit = least_plan(config, true).total_bytes - 1;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    (void)snprintf(words, sizeof words, "needs %" PRIu64 " bytes; raise", least_plan(config, true).total_bytes);
    ck_assert_msg(strstr(fkv_message(), "the smallest plan") != NULL && strstr(fkv_message(), words) != NULL, "%s",
                  fkv_message());
    config.max_seqs = 1; /* the message does not suggest lowering a field that is already 1 */
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    ck_assert_msg(strstr(fkv_message(), "the smallest plan") != NULL && strstr(fkv_message(), "max_seqs") == NULL, "%s",
                  fkv_message());
    config.memory_limit++;
    config.max_tokens = config.n_threads = config.max_seqs = config.max_step_tokens = 1;
    ck_ok(fkv_cache_open(&config, &cache));
    fkv_cache_close(cache);
}
END_TEST

/* Limits writable memory to `more` bytes above the current use. fkv_memory_available() ignores this limit, so it is a system call
 * that fails. Returns false if the system does not enforce the limit. */
static bool limit_data(uint64_t more, struct rlimit *before) {
    unsigned long long data_pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (statm == NULL) return false;
    bool known = fscanf(statm, "%*u %*u %*u %*u %*u %llu", &data_pages) == 1;
    (void)fclose(statm);
    if (!known || getrlimit(RLIMIT_DATA, before) != 0) return false;
    rlim_t limit = data_pages * (uint64_t)sysconf(_SC_PAGESIZE) + more;
    return setrlimit(RLIMIT_DATA, &(struct rlimit){.rlim_cur = limit, .rlim_max = before->rlim_max}) == 0;
}

/* Tests caches that pass the check of available memory, but for which a system call cannot allocate the slab, the tables or the
 * thread stacks. */
START_TEST(failed_system_allocation_is_an_error_and_leaks_nothing) {
    fkv_config slab = large_config();
    fkv_config tables = small_config();
    fkv_config stacks = small_config();
    tables.n_layers = 1;
    tables.layer.n_kv_heads = 1;
    tables.layer.k.bits = tables.layer.v.bits = 2;
    tables.max_tokens = 1 << 22;
    stacks.n_threads = 250;
    const fkv_config *wanted[] = {&slab, &tables, &stacks};
    const char *words[] = {"cannot map", "cannot map",
                           ""}; /* in the last case, either a thread or its stack cannot be created, so the message varies */
    if (!can_measure_memory()) return;
    for (size_t i = 0; i < N_OF(wanted); i++) {
        fkv_config config = *wanted[i];
        struct rlimit before;
        fkv_cache *cache = NULL;
        uint64_t resident = cache_anonymous_bytes();
        if (!limit_data(32 * MIB, &before)) return;
        fkv_status status = fkv_cache_open(&config, &cache);
        ck_assert_int_eq(setrlimit(RLIMIT_DATA, &before), 0);
        ck_assert_msg(status == FKV_NO_MEMORY && cache == NULL, "%zu: %s (%s)", i, fkv_status_name(status), fkv_message());
        ck_assert_msg(strstr(fkv_message(), words[i]) != NULL, "%s", fkv_message());
        ck_assert_uint_le(cache_anonymous_bytes(), resident + MIB);
    }
}
END_TEST

START_TEST(open_and_close_leak_nothing) {
    fkv_config config = small_config();
    config.n_threads = 2;
    enum { WARM_UP = 50, CYCLES = TEST_SANITIZED ? 150 : 1500, OPEN_AT_ONCE = 3 };
    uint64_t resident = 0;
    uint64_t space = 0;
    for (int i = 0; i < WARM_UP + CYCLES; i++) {
        fkv_cache *caches[OPEN_AT_ONCE] = {NULL};
        int n_open =
            i % 50 == 0 ? OPEN_AT_ONCE : 1; /* memory released by several caches must be reusable by one cache, and vice versa */
        for (int c = 0; c < n_open; c++) ck_ok(fkv_cache_open(&config, &caches[c]));
        for (int c = 0; c < n_open; c++) fkv_cache_close(caches[c]);
        if (i != WARM_UP - 1) continue;
        resident = cache_anonymous_bytes();
        space = address_space_bytes();
    }
    if (!can_measure_memory()) return;
    uint64_t resident_after = cache_anonymous_bytes();
    uint64_t space_after = address_space_bytes();
    printf("opened and closed %d times: resident %" PRIu64 " bytes before, %" PRIu64 " after; address space %" PRIu64
           " and %" PRIu64 "\n",
           CYCLES, resident, resident_after, space, space_after);
    ck_assert_uint_le(resident_after, resident + 64 * 1024);
    ck_assert_uint_le(space_after, space + 4 * MIB);
}
END_TEST

/* ---- statistics ---- */

static void check_group(const cache_fixture *w, const char *when, fkv_group_stats expected) {
    fkv_group_stats got = cache_fixture_stats(w).groups[0];
    ck_assert(fkv_cache_consistent(w->cache));
    ck_assert_msg(memcmp(&got, &expected, sizeof got) == 0,
                  "%s: free %u held %u shared %u cached %u pinned %u promised %u, expected %u %u %u %u %u %u", when, got.free,
                  got.held, got.shared, got.cached, got.pinned, got.promised, expected.free, expected.held, expected.shared,
                  expected.cached, expected.pinned, expected.promised);
    ck_assert_uint_eq(got.free + got.held + got.cached, got.pages);
    ck_assert_uint_le(got.promised, got.free + got.cached);
}

START_TEST(statistics_are_exact_over_a_scripted_run) {
    enum { PAGES = 19 }; /* 16 pages of 16 tokens, and 3 more because the last pages of 4 sequences may be partly empty */
    fkv_config config = small_config();
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[256];
    cache_tokens(1, tokens, 256);
    /* columns: pages, free, held, shared, cached, pinned, promised */
    check_group(&w, "opened", (fkv_group_stats){PAGES, 19, 0, 0, 0, 0, 0});

    fkv_seq a = cache_fixture_seq(&w, 64);
    check_group(&w, "a opened for 64 tokens", (fkv_group_stats){PAGES, 19, 0, 0, 0, 0, 4});
    cache_fixture_run(&w, a, tokens, 0, 40, 40, NULL);
    check_group(&w, "a has 40 tokens", (fkv_group_stats){PAGES, 16, 3, 0, 0, 0, 1});
    fkv_seq b = 0;
    ck_ok(fkv_seq_fork(w.cache, a, 64, &b));
    /* each of the two sequences needs one more page, and one of them also needs a copy of the shared last page */
    check_group(&w, "b forked from a", (fkv_group_stats){PAGES, 16, 3, 3, 0, 0, 3});
    cache_fixture_run(&w, b, tokens, 40, 41, 1, NULL);
    check_group(&w, "b wrote", (fkv_group_stats){PAGES, 15, 4, 2, 0, 0, 2});
    ck_assert_uint_eq(cache_fixture_stats(&w).page_copies, 1);
    cache_fixture_run(&w, a, tokens, 40, 41, 1, NULL);
    ck_assert_uint_eq(cache_fixture_stats(&w).page_copies,
                      1); /* sequence a is now the only holder of the page, so it writes in place without a copy */

    ck_ok(fkv_prefix_insert(w.cache, a, tokens, 40));
    check_group(&w, "two full pages in the tree", (fkv_group_stats){PAGES, 15, 4, 2, 0, 2, 2});
    ck_ok(fkv_seq_close(w.cache, a));
    check_group(&w, "a closed", (fkv_group_stats){PAGES, 16, 3, 2, 0, 2, 1});
    ck_ok(fkv_seq_close(w.cache, b));
    check_group(&w, "b closed", (fkv_group_stats){PAGES, 17, 0, 0, 2, 0, 0});

    fkv_seq c = 0;
    uint32_t n_shared = 0;
    ck_ok(fkv_seq_open(w.cache, &(fkv_seq_config){.max_tokens = 48, .prompt = tokens, .n_prompt = 40}, &c, &n_shared));
    ck_assert_uint_eq(n_shared, 32);
    check_group(&w, "c shares the prefix", (fkv_group_stats){PAGES, 17, 2, 2, 0, 2, 1});
    fkv_seq d = 0;
    ck_ok(
        fkv_seq_open(w.cache, &(fkv_seq_config){.max_tokens = 48, .tenant = 1, .prompt = tokens, .n_prompt = 40}, &d, &n_shared));
    ck_assert_uint_eq(n_shared, 0); /* sequences of different tenants share no pages */
    check_group(&w, "d of another tenant", (fkv_group_stats){PAGES, 17, 2, 2, 0, 2, 4});
    ck_ok(fkv_seq_close(w.cache, d));
    ck_ok(fkv_seq_close(w.cache, c));
    check_group(&w, "c and d closed", (fkv_group_stats){PAGES, 17, 0, 0, 2, 0, 0});

    fkv_seq e = cache_fixture_seq(&w, 256);
    cache_fixture_run(&w, e, tokens, 0, 256, 64, NULL);
    check_group(&w, "e has all 256 tokens", (fkv_group_stats){PAGES, 1, 16, 0, 2, 0, 0});
    ck_assert_uint_eq(cache_fixture_stats(&w).evictions, 0);
    fkv_seq f = cache_fixture_seq(&w, 32);
    check_group(&w, "f needs a cached page", (fkv_group_stats){PAGES, 2, 16, 0, 1, 0, 2});
    ck_assert_uint_eq(cache_fixture_stats(&w).evictions, 1);

    fkv_step *step = NULL;
    ck_ok(fkv_step_begin(w.cache, &(fkv_row){f, 20}, 1, &step));
    check_group(&w, "in a step", (fkv_group_stats){PAGES, 0, 18, 0, 1, 0, 0});
    ck_ok(fkv_step_abort(step));
    check_group(&w, "aborted", (fkv_group_stats){PAGES, 2, 16, 0, 1, 0, 2});
    ck_ok(fkv_seq_truncate(w.cache, e, 100));
    check_group(&w, "e truncated to 100", (fkv_group_stats){PAGES, 11, 7, 0, 1, 0, 11});
    ck_ok(fkv_prefix_clear(w.cache));
    check_group(&w, "cleared", (fkv_group_stats){PAGES, 12, 7, 0, 0, 0, 11});

    fkv_stats stats = cache_fixture_stats(&w);
    ck_assert_uint_eq(stats.n_groups, 1);
    ck_assert_uint_eq(stats.seqs, 2);
    ck_assert_uint_eq(stats.steps, 3 + 256 / 64);
    ck_assert_uint_eq(stats.aborts, 1);
    ck_assert_uint_eq(stats.tokens, 40 + 1 + 1 + 256);
    ck_assert_uint_eq(stats.page_copies, 1);
    ck_assert_uint_eq(stats.hits, 1);
    ck_assert_uint_eq(stats.hit_tokens, 32);
    ck_assert_uint_eq(stats.evictions, 2);
    ck_assert_ptr_nonnull(stats.isa);
    ck_ok(fkv_seq_close(w.cache, e));
    ck_ok(fkv_seq_close(w.cache, f));
    check_group(&w, "all closed", (fkv_group_stats){PAGES, 19, 0, 0, 0, 0, 0});
    cache_fixture_close(&w);
}
END_TEST

START_TEST(window_group_holds_a_bounded_number_of_pages) {
    /* a sequence holds at most the sink page and the pages that 47 tokens (the window and one step) can overlap */
    enum { CAP = 5, PAGES = 2 * CAP };
    fkv_config config = small_config();
    config.layer.window = 32;
    config.layer.n_sinks = 4;
    config.max_seqs = 2;
    config.max_step_tokens = 16;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[200];
    cache_tokens(1, tokens, 200);
    fkv_seq seq = cache_fixture_seq(&w, 200);
    check_group(&w, "opened", (fkv_group_stats){PAGES, PAGES, 0, 0, 0, 0, CAP});
    for (uint32_t n = 1; n <= 200; n++) {
        cache_fixture_run(&w, seq, tokens, n - 1, n, 1, NULL);
        uint32_t n_pages = (n + 15) / 16;
        uint32_t first = n >= 32 ? (n + 1 - 32) / 16 : 0; /* first page visible to the next query, not counting the sink page */
        uint32_t held = first <= 1 ? n_pages : 1 + n_pages - first;
        check_group(&w, "decoding", (fkv_group_stats){PAGES, PAGES - held, held, 0, 0, 0, CAP - held});
    }
    cache_fixture_close(&w);
}
END_TEST

/* Returns the number of packed bytes that one decode step at `position` reads. */
static uint64_t bytes_of_decode(const fkv_config *config, uint32_t position) {
    cache_fixture w;
    uint32_t tokens[256];
    cache_tokens(1, tokens, 256);
    ck_ok(cache_fixture_open(&w, config));
    fkv_seq seq = cache_fixture_seq(&w, 256);
    cache_fixture_run(&w, seq, tokens, 0, position, 64, NULL);
    uint64_t before = cache_fixture_stats(&w).packed_bytes_read;
    cache_fixture_run(&w, seq, tokens, position, position + 1, 1, NULL);
    uint64_t read = cache_fixture_stats(&w).packed_bytes_read - before;
    cache_fixture_close(&w);
    return read;
}

START_TEST(attention_reads_the_packed_bytes_of_visible_tokens_once) {
    static const uint32_t positions[] = {0, 15, 16, 100, 240};
    for (size_t i = 0; i < N_OF(positions); i++) {
        fkv_config config = small_config();
        fkv_plan plan = plan_of(&config);
        uint64_t n_visible = positions[i] + 1;
        ck_assert_uint_eq(bytes_of_decode(&config, positions[i]), n_visible * plan.token_bytes);
        config.n_threads = 3;
        ck_assert_uint_eq(bytes_of_decode(&config, positions[i]), n_visible * plan.token_bytes);
        config.layer.n_q_heads = 32; /* all query heads of a KV head share one read of the packed bytes */
        ck_assert_uint_eq(bytes_of_decode(&config, positions[i]), n_visible * plan.token_bytes);
    }
    fkv_config config = config_of_kind(small_config(), 1);
    uint64_t sealed = plan_of(&config).token_bytes;
    config.layer.k = config.layer.v = (fkv_codec_config){8, 64};
    uint64_t open = plan_of(&config).token_bytes;
    config = config_of_kind(config, 1);
    ck_assert_uint_eq(bytes_of_decode(&config, 31), 32 * open); /* the first page and the pages of the current span are open */
    const uint32_t span = 240 - 240 % (16 * FKV_OPEN_SPAN);
    ck_assert_uint_eq(bytes_of_decode(&config, 240), (16 + 241 - span) * open + (span - 16) * sealed);

    config = small_config();
    config.layer.window = 40;
    config.layer.n_sinks = 4;
    fkv_plan plan = plan_of(&config);
    uint64_t read = bytes_of_decode(&config, 240);
    ck_assert_uint_ge(read, 44 * plan.token_bytes);
    /* the first and the last visible page are read completely; pages without visible tokens are not read */
    ck_assert_uint_le(read, (44 + 2 * 16) * plan.token_bytes);
}
END_TEST

START_TEST(pages_are_packed_and_have_no_unpacked_copy) {
    fkv_config config = small_config();
    config.max_tokens = 4096;
    config.page_tokens = 64; /* rows are short, so smaller pages would need padding to a multiple of 64 bytes */
    fkv_plan plan = plan_of(&config);
    config.layer.k = config.layer.v = (fkv_codec_config){16, 0};
    fkv_plan unpacked = plan_of(&config);
    ck_assert_uint_eq(plan.group_page_bytes[0], 64 * plan.token_bytes);
    ck_assert_uint_eq(plan.group_pages[0], unpacked.group_pages[0]);
    ck_assert_uint_eq(plan.token_bytes, 2 * 2 * (64 + 4 + 32 + 4));
    ck_assert_uint_eq(unpacked.token_bytes, 2 * 2 * (128 + 128));
    /* apart from the slab, both plans have the same size, so neither has an unpacked copy of the pages */
    ck_assert_uint_eq(plan.total_bytes - plan.slab_bytes, unpacked.total_bytes - unpacked.slab_bytes);
}
END_TEST

/* ---- other API functions ---- */

typedef struct log_capture {
    int lines;
    char last[512];
} log_capture;

static void capture_line(void *user, const char *line) {
    log_capture *h = user;
    h->lines++;
    (void)snprintf(h->last, sizeof h->last, "%s", line);
}

START_TEST(log_reports_open_and_close) {
    log_capture h = {0};
    fkv_config config = small_config();
    config.log = capture_line;
    config.log_user = &h;
    fkv_plan plan = plan_of(&config);
    ck_assert_int_eq(h.lines, 0);
    char total[32];
    (void)snprintf(total, sizeof total, "%" PRIu64, plan.total_bytes);
    fkv_cache *cache = NULL;
    ck_ok(fkv_cache_open(&config, &cache));
    ck_assert_int_eq(h.lines, 1);
    ck_assert_msg(strstr(h.last, "opened") != NULL && strstr(h.last, total) != NULL, "%s", h.last);
    fkv_cache_close(cache);
    ck_assert_int_eq(h.lines, 2);
    ck_assert_msg(strstr(h.last, "closed") != NULL, "%s", h.last);
}
END_TEST

START_TEST(any_number_of_threads_gives_the_same_outputs) {
    uint32_t tokens[256];
    uint8_t *expected = NULL;
    cache_tokens(1, tokens, 256);
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) {
        fkv_config config = small_config();
        config.n_threads = n_threads;
        cache_fixture w;
        ck_ok(cache_fixture_open(&w, &config));
        uint8_t *got = malloc(256 * w.output_bytes);
        ck_assert_ptr_nonnull(got);
        cache_fixture_run(&w, cache_fixture_seq(&w, 256), tokens, 0, 256, 30, got);
        if (expected == NULL)
            expected = got;
        else
            ck_assert(memcmp(got, expected, 256 * w.output_bytes) == 0);
        if (got != expected) free(got);
        ck_assert_uint_eq(plan_of(&config).n_threads, n_threads);
        cache_fixture_close(&w);
    }
    free(expected);
    fkv_config config = small_config();
    config.n_threads = 0; /* 0 selects one thread per available core */
    ck_assert_uint_ge(plan_of(&config).n_threads, 1);
}
END_TEST

START_TEST(output_may_alias_queries_and_attend_may_be_repeated) {
    fkv_config config = small_config();
    config.n_threads = 2;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[64];
    cache_tokens(1, tokens, 64);
    cache_chunk chunk = {cache_fixture_seq(&w, 64), tokens, 0, 50, NULL};
    fkv_step *step = NULL;
    size_t bytes = 50 * 4 * 64 * sizeof(float);
    float *q = malloc(bytes);
    float *out = malloc(bytes);
    ck_assert(q != NULL && out != NULL);
    for (size_t i = 0; i < bytes / sizeof *q; i++) q[i] = (float)(i % 97) / 97.0f - 0.5f;
    ck_ok(fkv_step_begin(w.cache, &(fkv_row){chunk.seq, 50}, 1, &step));
    ck_ok(cache_fixture_write(&w, step, &chunk, 1, 0));
    ck_ok(fkv_attend(step, 0, q, out));
    ck_ok(fkv_attend(step, 0, q, q));
    ck_assert(memcmp(q, out, bytes) == 0);
    ck_ok(fkv_step_abort(step));
    free(q);
    free(out);
    cache_fixture_close(&w);
}
END_TEST

START_TEST(sequence_id_of_another_cache_is_rejected) {
    fkv_config config = small_config();
    fkv_cache *one = NULL;
    fkv_cache *other = NULL;
    fkv_seq seq = 0;
    fkv_seq same_slot = 0;
    uint32_t length = 0;
    ck_ok(fkv_cache_open(&config, &one));
    ck_ok(fkv_cache_open(&config, &other));
    ck_ok(fkv_seq_open(one, &(fkv_seq_config){.max_tokens = 16}, &seq, NULL));
    ck_ok(fkv_seq_open(other, &(fkv_seq_config){.max_tokens = 16}, &same_slot, NULL));
    ck_status(fkv_seq_length(other, seq, &length), FKV_BAD_SEQ);
    ck_status(fkv_seq_close(one, same_slot), FKV_BAD_SEQ);
    ck_ok(fkv_seq_close(one, seq));
    fkv_cache_close(one);
    fkv_cache_close(other);
}
END_TEST

START_TEST(default_configuration_matches_the_documentation) {
    fkv_config config = fkv_config_default();
    ck_assert(config.layer.k.bits == 4 && config.layer.k.group == 64 && config.layer.k.kind == FKV_CODEC_SEALED);
    ck_assert(config.layer.v.bits == 4 && config.layer.v.group == 64 && config.layer.v.kind == FKV_CODEC_SEALED_V);
    ck_assert(config.row_type == FKV_F32 && config.page_type == FKV_F16 && config.rotate == FKV_ROTATE_V);
    ck_assert(config.page_tokens == 64 && config.max_seqs == 1 && config.max_step_tokens == 512 && config.isa == FKV_ISA_AUTO);
    ck_assert(config.n_layers == 0 && config.max_tokens == 0 && config.layer.head_dim == 0 && !config.lazy && config.log == NULL);
    char version[32];
    (void)snprintf(version, sizeof version, "%d.%d.%d", FKV_VERSION_MAJOR, FKV_VERSION_MINOR, FKV_VERSION_PATCH);
    ck_assert_str_eq(fkv_version(), version);
}
END_TEST

TEST_MAIN("cache", plan_is_exactly_the_sum_of_its_parts, scratch_does_not_depend_on_the_context_length,
          window_group_does_not_grow_with_the_context, memory_use_equals_the_plan, lazy_cache_commits_pages_on_first_touch,
          lazy_cache_does_not_populate_its_page_tables, plan_above_the_limit_is_rejected_with_its_size,
          rejected_plan_suggests_sizes_that_fit, failed_system_allocation_is_an_error_and_leaks_nothing,
          open_and_close_leak_nothing, statistics_are_exact_over_a_scripted_run, window_group_holds_a_bounded_number_of_pages,
          attention_reads_the_packed_bytes_of_visible_tokens_once, pages_are_packed_and_have_no_unpacked_copy,
          log_reports_open_and_close, any_number_of_threads_gives_the_same_outputs,
          output_may_alias_queries_and_attend_may_be_repeated, sequence_id_of_another_cache_is_rejected,
          default_configuration_matches_the_documentation)
