/* Tests of models with latent attention: logits are bit-identical however tokens are chunked, batched and distributed over
 * threads, and after forks, truncation, prefix sharing and page files. parity_models compares the same models with transformers.
 */
#include "cache_fixture.h"
#include "golden_models.h"
#include "model_fixture.h"
#include "test.h"

#include "../src/base/memory.h"

#include <stdio.h>
#include <string.h>

static const char *const NAMES[] = {"deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "glm47_flash", "minicpm3", "mistral4"};
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0], N = 200, PAGE = 16, MAX_SEQS = 4 };

/* Returns true if test 0, 1 or 2 runs model i. Under sanitizers, each of these tests runs a third of the models, and together
 * they run all models. */
static bool test_runs_model(uint32_t test, uint32_t i) { return !TEST_SANITIZED || (i + i / 3) % 3 == test; }

static golden_model golden;
static float expected[N * GOLDEN_VOCAB];
static float got[N * GOLDEN_VOCAB];

static void close_golden(fkv_model *model) {
    fkv_model_close(model);
    golden_model_close(&golden);
}

static fkv_runner_config runner_config(const char *codec, uint32_t chunk, uint32_t n_threads) {
    fkv_runner_config config = model_runner_config(16, MAX_SEQS * N, chunk);
    ck_ok(fkv_codec_parse(codec, &config.k, &config.v));
    config.rotate = FKV_ROTATE_KV;
    config.n_threads = n_threads;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = config.max_logit_rows = chunk > MAX_SEQS ? chunk : MAX_SEQS;
    config.page_tokens = PAGE;
    return config;
}

/* Computes the expected logits in one step, on one thread. */
static void compute_expected(const fkv_model *model, const char *codec) {
    fkv_runner *runner = model_runner(model, runner_config(codec, N, 1));
    model_run(runner, model_seq(runner, N), golden.tokens, N, N, GOLDEN_VOCAB, expected);
    fkv_runner_close(runner);
}

static void check_logits(const char *name, const char *what, uint32_t from, uint32_t to) {
    const size_t at = (size_t)from * GOLDEN_VOCAB;
    ck_assert_msg(memcmp(got + at, expected + at, (size_t)(to - from) * GOLDEN_VOCAB * sizeof *got) == 0,
                  "%s: %s changes logits in [%u, %u)", name, what, from, to);
}

/* Appends tokens [from, to) of the golden model to the sequence. */
static void run_part(fkv_runner *runner, fkv_seq seq, uint32_t from, uint32_t to, uint32_t chunk) {
    model_run(runner, seq, golden.tokens + from, to - from, chunk, GOLDEN_VOCAB, got + (size_t)from * GOLDEN_VOCAB);
}

START_TEST(logits_do_not_depend_on_chunks_and_threads) {
    static const uint32_t chunks[] = {1, 17, 64, 128};
    static const char *const codecs[] = {"16", "8g32", "sealed", "4g32"};
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(0, i)) continue;
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        compute_expected(model, codecs[i % 4]);
        for (uint32_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
            fkv_runner *runner = model_runner(model, runner_config(codecs[i % 4], chunks[c], 1 + c % 3));
            run_part(runner, model_seq(runner, N), 0, N, chunks[c]);
            check_logits(NAMES[i], "chunking", 0, N);
            fkv_runner_close(runner);
        }
        close_golden(model);
    }
}
END_TEST

START_TEST(logits_do_not_depend_on_the_batch) {
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(1, i)) continue;
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        const char *codec = i % 2 == 0 ? "8g32" : "sealed";
        compute_expected(model, codec);
        fkv_runner *runner = model_runner(model, runner_config(codec, 64, 2));
        fkv_seq seqs[3];
        uint32_t done[3] = {0};
        for (uint32_t s = 0; s < 3; s++) seqs[s] = model_seq(runner, N);
        for (uint32_t turn = 0; done[0] < N || done[1] < N || done[2] < N; turn++) {
            fkv_tokens rows[3];
            uint32_t owners[3];
            uint32_t n_rows = 0;
            const float *logits = NULL;
            for (uint32_t s = 0; s < 3; s++) { /* chunk sizes and the order of sequences vary */
                const uint32_t seq = (s + turn) % 3;
                uint32_t n = seq == 0 ? 1 + turn % 5 : seq == 1 ? 17 : 40;
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
                check_logits(NAMES[i], "the batch", last, last + 1);
            }
        }
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(logits_survive_forks_truncation_sharing_and_files) {
    char path[512];
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(2, i)) continue;
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        const char *codec = i % 2 == 0 ? "8g32" : "sealed";
        compute_expected(model, codec);
        fkv_runner *runner = model_runner(model, runner_config(codec, 50, 2));
        fkv_cache *cache = fkv_runner_cache(runner);
        fkv_seq seq = model_seq(runner, N);
        fkv_seq fork = 0;
        fkv_seq loaded = 0;
        uint32_t n_shared = 0;
        run_part(runner, seq, 0, 130, 50);
        ck_ok(fkv_seq_fork(cache, seq, N, &fork));
        ck_ok(fkv_seq_truncate(cache, fork, 115)); /* sealed sequences can be truncated by up to one page */
        ck_ok(fkv_seq_save(cache, fork, golden.tokens, 0, cache_path(path, "latent_model.fkv")));
        ck_ok(fkv_prefix_insert(cache, seq, golden.tokens, 130));
        ck_ok(fkv_seq_close(cache, seq));
        run_part(runner, fork, 115, N, 33);
        check_logits(NAMES[i], "a truncated fork", 0, N);
        ck_ok(fkv_seq_load(cache, &(fkv_seq_config){.max_tokens = N}, path, &loaded));
        run_part(runner, loaded, 115, N, 50);
        check_logits(NAMES[i], "a page file", 115, N);
        ck_ok(
            fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = N, .prompt = golden.tokens, .n_prompt = N - 1}, &seq, &n_shared));
        ck_assert_uint_eq(n_shared, 128);
        run_part(runner, seq, n_shared, N, 50);
        check_logits(NAMES[i], "a shared prefix", n_shared, N);
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(plan_counts_one_row_per_token) {
    fkv_model *model = golden_model_load(&golden, "deepseek_v2_lite");
    fkv_runner_config config = runner_config("8g64", 32, 1);
    fkv_runner_plan plan;
    fkv_runner *runner = NULL;
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    ck_assert_uint_eq(plan.cache.token_bytes, 3 * (64 + 2 * 2 + 16 * 2)); /* 64 codes, a scale, a bias, and 16 RoPE channels */
    const uint64_t before = fkv_map_live_bytes();
    ck_ok(fkv_runner_open(model, &config, &runner));
    ck_assert_uint_eq(fkv_map_live_bytes() - before, plan.total_bytes);
    fkv_runner_close(runner);
    fkv_model_layer layer;
    ck_ok(fkv_model_layer_about(model, 1, &layer));
    ck_assert(layer.n_kv_heads == 1 && layer.head_dim == 64 && layer.rope_dim == 16);
    ck_assert_uint_eq(fkv_model_about(model)->latent_dim, 64);
    ck_ok(fkv_codec_parse("sealed", &config.k, &config.v));
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    ck_assert_uint_eq(plan.cache.token_bytes, 3 * (64 / 2 + 2 * 2 + 16 * 2));
    static const char *const unsupported[] = {"s3", "calibrated"};
    for (size_t i = 0; i < 2; i++) {
        ck_ok(fkv_codec_parse(unsupported[i], &config.k, &config.v));
        ck_status(fkv_runner_plan_make(model, &config, &plan), FKV_UNSUPPORTED);
        ck_assert(strstr(fkv_message(), "latent") != NULL);
    }
    close_golden(model);
}
END_TEST

TEST_MAIN("latent_models", logits_do_not_depend_on_chunks_and_threads, logits_do_not_depend_on_the_batch,
          logits_survive_forks_truncation_sharing_and_files, plan_counts_one_row_per_token)
