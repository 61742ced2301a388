/* Tests models with recurrent layers and with latent attention on MLX. Logits must not depend on how tokens are chunked and
 * batched, and must be unchanged after forks, failed steps, rejected drafts, truncation to a snapshot, prefix sharing and reloads
 * from page files.
 * parity_mlx_models compares the same models with transformers.
 *
 * On MLX's CPU backend, logits must be bit-identical. A GPU selects matrix kernels by the number of rows, so there logits may
 * differ slightly between chunk sizes.
 */
#include "../src/model/mlx/array_weights.h"
#include "cache_fixture.h"
#include "golden_models.h"
#include "model_fixture.h"
#include "relative_l2.h"
#include "sanitized.h"
#include "test.h"

#include <flatkv/mlx.h>

#include <stdio.h>
#include <string.h>

static const double GPU_TOLERANCE = 5e-3;  /* on a GPU, matrix products round to f16 */
static const char *const GPU_CODEC = "16"; /* lower bit widths would amplify the rounding differences */

/* One model of each kind: short convolution, delta net with uneven heads, Mamba-2 with experts, Mamba-2 in parallel with
 * attention, latent attention, and Kimi Delta Attention with latent attention. */
static const char *const NAMES[] = {"lfm2_moe", "qwen35_odd", "nemotron_h_moe", "falcon_h1", "deepseek_v3", "kimi_linear_odd"};
static const char *const CODECS[] = {"16", "8g32", "16", "4g32", "sealed", "8g32"}; /* codec of each model */
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0], N = 140, PAGE = 32, MAX_SEQS = 4, SNAPSHOT = 64 };

/* Returns true if a test runs model i. test: the number of the test, from 0. Under sanitizers, each test runs two of the models,
 * and three tests in a row run all of them. */
static bool test_runs_model(uint32_t test, uint32_t i) { return !TEST_SANITIZED || (i + test) % 3 == 0; }

static golden_model golden;
static float expected[N * GOLDEN_VOCAB];
static float got[N * GOLDEN_VOCAB];
static bool on_gpu;

static fkv_runner_config runner_config(uint32_t model, uint32_t chunk) {
    fkv_runner_config config = model_runner_config(16, MAX_SEQS * N, chunk);
    ck_ok(fkv_codec_parse(on_gpu ? GPU_CODEC : CODECS[model], &config.k, &config.v));
    config.rotate = FKV_ROTATE_KV;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = config.max_logit_rows = chunk;
    config.page_tokens = PAGE;
    return config;
}

/* Appends tokens [from, to) of the golden model to the sequence. */
static void run_part(fkv_runner *runner, fkv_seq seq, uint32_t from, uint32_t to, uint32_t chunk) {
    model_run(runner, seq, golden.tokens + from, to - from, chunk, GOLDEN_VOCAB, got + (size_t)from * GOLDEN_VOCAB);
}

/* Loads a model and computes the expected logits in one step. */
static fkv_model *open_golden(uint32_t i) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    mlx_device device;
    config.backend = FKV_BACKEND_MLX;
    ck_ok(fkv_mlx_register());
    ck_ok(fkv_array_device(&device, &on_gpu));
    (void)mlx_device_free(device);
    golden_model_open(&golden, NAMES[i]);
    ck_ok(fkv_model_load(golden.folder, &config, &model));
    fkv_runner *runner = model_runner(model, runner_config(i, N));
    run_part(runner, model_seq(runner, N), 0, N, N);
    fkv_runner_close(runner);
    memcpy(expected, got, sizeof got);
    memset(got, 0, sizeof got);
    return model;
}

static void close_golden(fkv_model *model) {
    fkv_model_close(model);
    golden_model_close(&golden);
}

static void check_logits(const char *name, const char *what, uint32_t from, uint32_t to) {
    const size_t at = (size_t)from * GOLDEN_VOCAB;
    const size_t n = (size_t)(to - from) * GOLDEN_VOCAB;
    const double apart = relative_l2(got + at, expected + at, n);
    const bool good = on_gpu ? apart <= GPU_TOLERANCE : memcmp(got + at, expected + at, n * sizeof *got) == 0;
    ck_assert_msg(good, "%s: %s changes logits in [%u, %u) by %g", name, what, from, to, apart);
}

START_TEST(logits_do_not_depend_on_chunks) {
    static const uint32_t chunks[] = {7, 65};
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(0, i)) continue;
        fkv_model *model = open_golden(i);
        for (uint32_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
            fkv_runner *runner = model_runner(model, runner_config(i, chunks[c]));
            run_part(runner, model_seq(runner, N), 0, N, chunks[c]);
            check_logits(NAMES[i], "chunking", 0, N);
            fkv_runner_close(runner);
        }
        close_golden(model);
    }
}
END_TEST

/* Checks the selected rows on a GPU. With rounded products, a token's router may select other experts, which changes a row by
 * several percent, so one row in ten may differ by more than the tolerance. */
static void check_most_rows(const char *name, const bool *is_selected) {
    uint32_t n_rows = 0;
    uint32_t n_different = 0;
    for (uint32_t row = 0; row < N; row++) {
        const size_t at = (size_t)row * GOLDEN_VOCAB;
        n_rows += is_selected[row];
        n_different += is_selected[row] && relative_l2(got + at, expected + at, GOLDEN_VOCAB) > GPU_TOLERANCE;
    }
    ck_assert_msg(n_different <= n_rows / 10, "%s: the batch changes %u of %u rows", name, n_different, n_rows);
}

START_TEST(logits_do_not_depend_on_the_batch) {
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(1, i)) continue;
        fkv_model *model = open_golden(i);
        fkv_runner *runner = model_runner(model, runner_config(i, 64));
        fkv_seq seqs[2];
        uint32_t done[2] = {0};
        bool is_done[N] = {false};
        for (uint32_t s = 0; s < 2; s++) seqs[s] = model_seq(runner, N);
        for (uint32_t turn = 0; done[0] < N || done[1] < N; turn++) {
            fkv_tokens rows[2];
            uint32_t owners[2];
            uint32_t n_rows = 0;
            const float *logits = NULL;
            for (uint32_t s = 0; s < 2; s++) { /* chunk sizes and the order of sequences vary */
                const uint32_t seq = (s + turn) % 2;
                uint32_t n = seq == 0 ? 1 + turn % 25 : 33;
                if (n > N - done[seq]) n = N - done[seq];
                if (n == 0) continue;
                owners[n_rows] = seq;
                rows[n_rows++] =
                    (fkv_tokens){.seq = seqs[seq], .tokens = golden.tokens + done[seq], .n_tokens = n, .logits = FKV_LOGITS_LAST};
            }
            ck_ok(fkv_runner_forward(runner, rows, n_rows, &logits));
            for (uint32_t r = 0; r < n_rows; r++, logits += GOLDEN_VOCAB) {
                done[owners[r]] += rows[r].n_tokens;
                const uint32_t last = done[owners[r]] - 1;
                memcpy(got + (size_t)last * GOLDEN_VOCAB, logits, GOLDEN_VOCAB * sizeof *got);
                is_done[last] = true;
                if (!on_gpu) check_logits(NAMES[i], "the batch", last, last + 1);
            }
        }
        if (on_gpu) check_most_rows(NAMES[i], is_done);
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(logits_survive_forks_truncation_sharing_and_files) {
    char path[512];
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(2, i)) continue;
        fkv_model *model = open_golden(i);
        fkv_runner *runner = model_runner(model, runner_config(i, 64));
        fkv_cache *cache = fkv_runner_cache(runner);
        fkv_seq seq = model_seq(runner, N);
        fkv_seq fork = 0;
        fkv_seq loaded = 0;
        uint32_t at = 0;
        uint32_t n_shared = 0;
        run_part(runner, seq, 0, SNAPSHOT, 64);
        ck_ok(fkv_prefix_insert(cache, seq, golden.tokens, SNAPSHOT));
        ck_ok(fkv_seq_fork(cache, seq, N, &fork));
        ck_ok(fkv_seq_save(cache, seq, golden.tokens, 0, cache_path(path, "mlx_hybrid.fkv")));
        /* a rejected step has no effect, and the fork continues with other tokens, without logits */
        const uint32_t others[] = {3, 1, 4, 1, 5};
        const fkv_tokens twice[] = {{.seq = seq, .tokens = others, .n_tokens = 1}, {.seq = seq, .tokens = others, .n_tokens = 1}};
        ck_status(fkv_runner_forward(runner, twice, 2, NULL), FKV_BAD_ARGUMENT);
        ck_ok(fkv_runner_forward(runner, &(fkv_tokens){.seq = fork, .tokens = others, .n_tokens = 5}, 1, NULL));
        run_part(runner, seq, SNAPSHOT, 100, 29);
        ck_ok(fkv_seq_reachable(cache, seq, SNAPSHOT, &at));
        ck_assert_uint_eq(at, SNAPSHOT);
        ck_ok(fkv_seq_truncate(cache, seq, SNAPSHOT));
        run_part(runner, seq, SNAPSHOT, N, 31);
        check_logits(NAMES[i], "a fork or truncation", 0, N);
        ck_ok(fkv_seq_close(cache, seq));
        ck_ok(fkv_seq_close(cache, fork));
        const fkv_seq_config config = {.max_tokens = N, .prompt = golden.tokens, .n_prompt = N - 1};
        ck_ok(fkv_seq_open(cache, &config, &seq, &n_shared));
        ck_assert_uint_eq(n_shared, SNAPSHOT);
        run_part(runner, seq, SNAPSHOT, N, 64);
        check_logits(NAMES[i], "a shared prefix", SNAPSHOT, N);
        ck_ok(fkv_seq_load(cache, &(fkv_seq_config){.max_tokens = N}, path, &loaded));
        run_part(runner, loaded, SNAPSHOT, N, 50);
        check_logits(NAMES[i], "a page file", SNAPSHOT, N);
        ck_assert(fkv_cache_consistent(cache));
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(rejected_drafts_do_not_change_logits) {
    enum { FROM = 30, TO = 62, MAX_DRAFT = 4 }; /* the second page begins after the first two tokens */
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(3, i)) continue;
        fkv_model *model = open_golden(i);
        fkv_runner *runner = model_runner(model, runner_config(i, 64));
        const fkv_seq seq = model_seq(runner, N);
        run_part(runner, seq, 0, FROM, 64);
        uint32_t n_rejected = 0;
        for (uint32_t at = FROM, turn = 0; at < TO; turn++) {
            uint32_t tokens[1 + MAX_DRAFT];
            const uint32_t n_kept =
                1 + turn % (1 + MAX_DRAFT); /* one token and its accepted drafts; the other drafts are wrong */
            const float *logits = NULL;
            for (uint32_t t = 0; t < 1 + MAX_DRAFT; t++) tokens[t] = golden.tokens[at + t] ^ (t < n_kept ? 0 : 1);
            const fkv_tokens row = {.seq = seq, .tokens = tokens, .n_tokens = 1 + MAX_DRAFT, .logits = FKV_LOGITS_ALL};
            ck_ok(fkv_runner_verify(runner, &row, 1, &logits));
            memcpy(got + (size_t)at * GOLDEN_VOCAB, logits, (size_t)n_kept * GOLDEN_VOCAB * sizeof *got);
            check_logits(NAMES[i], "a draft", at, at + n_kept);
            ck_ok(fkv_runner_accept(runner, &n_kept));
            n_rejected += 1 + MAX_DRAFT - n_kept;
            at += n_kept;
        }
        ck_assert_uint_gt(n_rejected, MAX_DRAFT);
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

static fkv_backend_memory memory_now(void) {
    fkv_backend_memory now;
    ck_ok(fkv_backend_memory_now(FKV_BACKEND_MLX, &now));
    return now;
}

START_TEST(memory_counters_stay_within_the_plan) {
    const uint64_t slack = 512 * 1024; /* allows for array sizes that the backend rounds up */
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(4, i)) continue;
        fkv_model *model = open_golden(i);
        fkv_runner_config config = runner_config(i, 64);
        fkv_runner_plan plan;
        const uint64_t weights = memory_now().active_bytes;
        config.max_snapshots = 3;
        ck_ok(fkv_runner_plan_make(model, &config, &plan));
        fkv_runner *runner = model_runner(model, config);
        const uint64_t opened = memory_now().active_bytes;
        ck_assert_uint_le(opened - weights, plan.cache.slab_bytes + slack);
        fkv_seq seq = model_seq(runner, N);
        for (uint32_t at = 0; at < N;) {
            uint32_t n = at < 64 ? 64 : 1 + at % 7;
            if (n > N - at) n = N - at;
            model_run(runner, seq, golden.tokens + at, n, n, GOLDEN_VOCAB, NULL);
            at += n;
            const fkv_backend_memory now = memory_now();
            ck_assert_uint_le(now.active_bytes, opened + slack);
            ck_assert_uint_le(now.peak_bytes - weights, plan.total_bytes);
        }
        printf("%s: %llu bytes planned, %llu in use, peak %llu\n", NAMES[i], (unsigned long long)plan.total_bytes,
               (unsigned long long)(opened - weights), (unsigned long long)(memory_now().peak_bytes - weights));
        fkv_runner_close(runner);
        ck_assert_uint_eq(memory_now().active_bytes, weights);
        close_golden(model);
    }
}
END_TEST

TEST_MAIN("mlx_hybrids", logits_do_not_depend_on_chunks, logits_do_not_depend_on_the_batch,
          logits_survive_forks_truncation_sharing_and_files, rejected_drafts_do_not_change_logits,
          memory_counters_stay_within_the_plan)
