/* Tests sequences that are closed during a step, with the public API and with K, V and Q rows. The outputs of the other sequences
 * must stay bit-identical, pages must not be released before the device has finished, and it must be possible to close a cache
 * while such a step is open. */
#include "cache_fixture.h"
#include "test.h"

#include "../src/cache/device.h"

#include <string.h>

enum { PAGE = 16, STEP_TOKENS = 32, MAX_SEQS = 3, N_TOKENS = 50, MOST = 80, N_NEW = 5, N_LAYERS = 2 };

static const fkv_layer_config LAYERS[N_LAYERS] = {
    {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {8, 64}, .v = {4, 64}},
    {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 32, .window = 16, .n_sinks = 4, .k = {16, 0}, .v = {16, 0}},
};

static fkv_config small_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = N_LAYERS;
    config.layers = LAYERS;
    config.page_tokens = PAGE;
    config.max_tokens = MAX_SEQS * MOST;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = STEP_TOKENS;
    config.n_threads = 2;
    return config;
}

/* ---- bit-identical outputs ---- */

typedef enum when { NEVER, BEFORE_WRITE, BETWEEN_LAYERS, BEFORE_END, N_WHENS } when;

/* Runs a sequence that stays open, and closes two other sequences during a step: one with rows in the step and one without. The
 * first sequence then continues. Stores the outputs of the first sequence in `outputs`. The outputs of the step with the closed
 * sequences are stored at the start, where they overwrite earlier outputs. */
static void run_with_neighbours(when closed, bool commit, uint8_t *outputs) {
    fkv_config config = small_config();
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[MOST];
    uint32_t other[MOST];
    cache_tokens(1, tokens, MOST);
    cache_tokens(2, other, MOST);
    fkv_seq kept = cache_fixture_seq(&w, MOST);
    fkv_seq in_step = cache_fixture_seq(&w, MOST);
    cache_fixture_run(&w, kept, tokens, 0, N_TOKENS, STEP_TOKENS, outputs);
    cache_fixture_run(&w, in_step, other, 0, N_TOKENS, STEP_TOKENS, NULL);
    fkv_seq outside = 0;
    ck_ok(fkv_seq_fork(w.cache, kept, MOST,
                       &outside)); /* the fork shares its last page with `kept`, to which the step appends tokens */
    ck_ok(fkv_prefix_insert(w.cache, in_step, other, 2 * PAGE));

    const cache_chunk chunks[] = {{in_step, other, N_TOKENS, N_NEW, NULL}, {kept, tokens, N_TOKENS, N_NEW, NULL}};
    const size_t row_bytes[N_LAYERS] = {4 * 64 * sizeof(float), 2 * 32 * sizeof(float)};
    fkv_step *step = NULL;
    ck_ok(fkv_step_begin(w.cache, (const fkv_row[]){{in_step, N_NEW}, {kept, N_NEW}}, 2, &step));
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        if (closed == (l == 0 ? BEFORE_WRITE : BETWEEN_LAYERS)) {
            ck_ok(fkv_seq_close(w.cache, in_step));
            ck_ok(fkv_seq_close(w.cache, outside));
        }
        ck_ok(cache_fixture_write(&w, step, chunks, 2, l));
        /* the values of the queries do not matter, so the queries of the previous step are reused */
        ck_ok(fkv_attend(step, l, w.rows[CACHE_Q], w.out));
        memcpy(outputs + l * row_bytes[0] * N_NEW, w.out + N_NEW * row_bytes[l], N_NEW * row_bytes[l]);
    }
    if (closed == BEFORE_END) {
        ck_ok(fkv_seq_close(w.cache, outside));
        ck_ok(fkv_seq_close(w.cache, in_step));
    }
    ck_ok(commit ? fkv_step_commit(step) : fkv_step_abort(step));
    ck_assert(fkv_cache_consistent(w.cache));
    ck_assert_uint_eq(cache_fixture_stats(&w).seqs, closed == NEVER ? 3 : 1);
    uint32_t at = N_TOKENS + (commit ? N_NEW : 0);
    ck_assert_uint_eq(cache_fixture_length(&w, kept), at);
    if (closed != NEVER) { /* the pages are now available to other sequences */
        fkv_seq third = cache_fixture_seq(&w, MOST);
        cache_fixture_run(&w, third, other, 0, MOST, STEP_TOKENS, NULL);
    }
    cache_fixture_run(&w, kept, tokens, at, MOST, 7, outputs);
    cache_fixture_close(&w);
}

START_TEST(closing_neighbours_in_a_step_does_not_change_other_outputs) {
    enum { BYTES = MOST * (4 * 64 + 2 * 32) * (int)sizeof(float) };
    uint8_t *calm = calloc(1, BYTES);
    uint8_t *disturbed = calloc(1, BYTES);
    ck_assert(calm != NULL && disturbed != NULL);
    for (int commit = 0; commit < 2; commit++) {
        memset(calm, 0, BYTES);
        run_with_neighbours(NEVER, commit != 0, calm);
        for (when closed = BEFORE_WRITE; closed < N_WHENS; closed++) {
            memset(disturbed, 0, BYTES);
            run_with_neighbours(closed, commit != 0, disturbed);
            ck_assert_msg(memcmp(calm, disturbed, BYTES) == 0, "closed at %d, commit %d", (int)closed, commit);
        }
    }
    free(calm);
    free(disturbed);
}
END_TEST

/* ---- device ---- */

/* Device that wraps the host device and checks that the page tables of a step's rows are the same at the beginning and at the end
 * of the step. */
static struct {
    fkv_device device;
    fkv_device_step step;
    uint32_t pages[N_LAYERS][MAX_SEQS][MOST / PAGE];
    uint32_t n_steps;
    bool same;
} watcher;

static bool tables_are(bool copy) {
    bool same = true;
    for (uint32_t g = 0; g < N_LAYERS; g++)
        for (uint32_t r = 0; r < watcher.step.n_rows; r++) {
            const fkv_page_view view = watcher.step.rows[g * watcher.step.stride + r].view;
            for (uint32_t i = 0; i < MOST / PAGE && i < view.n_fixed + view.n_ring; i++) {
                if (copy) watcher.pages[g][r][i] = view.pages[i];
                same &= watcher.pages[g][r][i] == view.pages[i];
            }
        }
    return same;
}

static fkv_status watch_begin(void *state, const fkv_device_step *step) {
    (void)state;
    watcher.step = *step;
    (void)tables_are(true);
    return FKV_OK;
}

static void watch_end(void *state) {
    (void)state;
    watcher.n_steps++;
    watcher.same &= tables_are(false);
}

static fkv_cache *watched_cache(void) {
    fkv_config config = small_config();
    fkv_cache *cache = NULL;
    watcher.device = fkv_device_host;
    watcher.device.step_begin = watch_begin;
    watcher.device.step_end = watch_end;
    watcher.n_steps = 0;
    watcher.same = true;
    ck_ok(fkv_cache_open_on(&watcher.device, NULL, &config, &cache));
    return cache;
}

START_TEST(device_finishes_before_pages_are_released) {
    fkv_cache *cache = watched_cache();
    for (uint32_t round = 0; round < 12; round++) {
        fkv_seq seqs[2];
        fkv_step *step = NULL;
        for (int i = 0; i < 2; i++) ck_ok(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = MOST}, &seqs[i], NULL));
        for (int part = 0; part < 3; part++) {
            ck_ok(fkv_step_begin(cache, (const fkv_row[]){{seqs[0], 15}, {seqs[1], 17}}, 2, &step));
            if (part == 2) ck_ok(fkv_seq_close(cache, seqs[round % 2]));
            if (part == 2 && round % 3 == 0) ck_ok(fkv_seq_close(cache, seqs[1 - round % 2]));
            for (uint32_t l = 0; l < N_LAYERS; l++) fkv_step_wrote(step, l);
            ck_ok(round % 4 < 2 ? fkv_step_commit(step) : fkv_step_abort(step));
            ck_assert(fkv_cache_consistent(cache));
        }
        if (round % 3 != 0) ck_ok(fkv_seq_close(cache, seqs[1 - round % 2]));
    }
    ck_assert_uint_eq(watcher.n_steps, 36);
    ck_assert(watcher.same);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(cache_closes_with_pending_closes_in_a_step) {
    fkv_cache *cache = watched_cache();
    fkv_seq seqs[2];
    fkv_step *step = NULL;
    for (int i = 0; i < 2; i++) ck_ok(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = MOST}, &seqs[i], NULL));
    ck_ok(fkv_step_begin(cache, (const fkv_row[]){{seqs[0], 15}}, 1, &step));
    for (int i = 0; i < 2; i++) ck_ok(fkv_seq_close(cache, seqs[i]));
    fkv_cache_close(cache);
    ck_assert_uint_eq(watcher.n_steps, 1);
    ck_assert(watcher.same);
}
END_TEST

TEST_MAIN("step close", closing_neighbours_in_a_step_does_not_change_other_outputs, device_finishes_before_pages_are_released,
          cache_closes_with_pending_closes_in_a_step)
