/* Tests models with recurrent layers: logits are bit-identical however tokens are chunked, batched and distributed over threads,
 * and after forks, failed steps, truncation to a snapshot and prefix sharing. parity_models compares the same models with
 * transformers. A trained model (models/hybrid) must give the same answer as in transformers. */
#include "golden_models.h"
#include "model_fixture.h"
#include "relative_l2.h"
#include "sanitized.h"
#include "test.h"

#include "../src/base/memory.h"

#include <stdio.h>
#include <string.h>

static const char *const NAMES[] = {"lfm2",       "lfm2_moe",       "qwen35",     "qwen35_odd",
                                    "qwen35_moe", "qwen3_next",     "granite4_h", "granite4_h_moe",
                                    "nemotron_h", "nemotron_h_moe", "falcon_h1",  "kimi_linear_odd"};
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0], N = 200, PAGE = 64, MAX_SEQS = 4 };

/* Returns true if test 0, 1 or 2 runs model i. Under sanitizers, each of these tests runs a third of the models, and together
 * they run all models. */
static bool test_runs_model(uint32_t test, uint32_t i) { return !TEST_SANITIZED || i % 3 == test; }

typedef float all_logits[N * GOLDEN_VOCAB];

static golden_model golden;
static all_logits expected;
static all_logits got;

static void close_golden(fkv_model *model) {
    fkv_model_close(model);
    golden_model_close(&golden);
}

static fkv_runner_config runner_config(uint32_t bits, uint32_t chunk, uint32_t n_threads) {
    fkv_runner_config config = model_runner_config(bits, MAX_SEQS * N, chunk);
    config.n_threads = n_threads;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = config.max_logit_rows = chunk > MAX_SEQS ? chunk : MAX_SEQS;
    config.page_tokens = PAGE;
    return config;
}

/* Computes the expected logits in one step, on one thread. */
static void compute_expected(const fkv_model *model, uint32_t bits) {
    fkv_runner *runner = model_runner(model, runner_config(bits, N, 1));
    model_run(runner, model_seq(runner, N), golden.tokens, N, N, GOLDEN_VOCAB, expected);
    fkv_runner_close(runner);
}

static void check_logits(const char *name, const char *what, uint32_t from, uint32_t to) {
    const size_t bytes = (size_t)(to - from) * GOLDEN_VOCAB * sizeof *got;
    const size_t at = (size_t)from * GOLDEN_VOCAB;
    ck_assert_msg(memcmp(got + at, expected + at, bytes) == 0, "%s: %s changes logits in [%u, %u)", name, what, from, to);
}

/* Appends tokens [from, to) of the golden model to the sequence. */
static void run_part(fkv_runner *runner, fkv_seq seq, uint32_t from, uint32_t to, uint32_t chunk) {
    model_run(runner, seq, golden.tokens + from, to - from, chunk, GOLDEN_VOCAB, got + (size_t)from * GOLDEN_VOCAB);
}

START_TEST(logits_do_not_depend_on_chunks_and_threads) {
    static const uint32_t chunks[] = {1, 3, 63, 64, 65, 128};
    uint32_t n_cases = 0;
    for (uint32_t i = 0; i < N_NAMES; i++) {
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        for (uint32_t bits = 4; bits <= 16; bits += 12) {
            bool has_expected = false;
            for (uint32_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
                if (!test_runs_case(n_cases++)) continue;
                if (!has_expected) compute_expected(model, bits);
                has_expected = true;
                fkv_runner *runner = model_runner(model, runner_config(bits, chunks[c], 1 + c % 3));
                run_part(runner, model_seq(runner, N), 0, N, chunks[c]);
                check_logits(NAMES[i], "chunking", 0, N);
                fkv_runner_close(runner);
            }
        }
        close_golden(model);
    }
}
END_TEST

START_TEST(logits_do_not_depend_on_the_batch) {
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(0, i)) continue;
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        compute_expected(model, 16);
        fkv_runner *runner = model_runner(model, runner_config(16, 64, 2));
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
                    (fkv_tokens){.seq = seqs[seq], .tokens = golden.tokens + done[seq], .n_tokens = n, .logits = FKV_LOGITS_ALL};
            }
            ck_ok(fkv_runner_forward(runner, rows, n_rows, &logits));
            for (uint32_t r = 0; r < n_rows; r++) {
                const uint32_t from = done[owners[r]];
                memcpy(got + (size_t)from * GOLDEN_VOCAB, logits, rows[r].n_tokens * GOLDEN_VOCAB * sizeof *got);
                logits += (size_t)rows[r].n_tokens * GOLDEN_VOCAB;
                done[owners[r]] += rows[r].n_tokens;
                check_logits(NAMES[i], "the batch", from, done[owners[r]]);
            }
        }
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(forks_and_failed_steps_leave_the_state_unchanged) {
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(1, i)) continue;
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        compute_expected(model, 16);
        fkv_runner *runner = model_runner(model, runner_config(16, 50, 2));
        fkv_seq seq = model_seq(runner, N);
        fkv_seq fork = 0;
        run_part(runner, seq, 0, 77, 50);
        ck_ok(fkv_seq_fork(fkv_runner_cache(runner), seq, N, &fork));
        /* a rejected step has no effect */
        const uint32_t bad = 1;
        fkv_tokens rows[] = {{.seq = seq, .tokens = &bad, .n_tokens = 1}, {.seq = seq, .tokens = &bad, .n_tokens = 1}};
        ck_status(fkv_runner_forward(runner, rows, 2, NULL), FKV_BAD_ARGUMENT);
        /* the fork continues with other tokens, without logits */
        const uint32_t others[] = {3, 1, 4, 1, 5};
        ck_ok(fkv_runner_forward(runner, &(fkv_tokens){.seq = fork, .tokens = others, .n_tokens = 5}, 1, NULL));
        run_part(runner, seq, 77, N, 33);
        check_logits(NAMES[i], "a fork", 0, N);
        ck_ok(fkv_seq_close(fkv_runner_cache(runner), fork));
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(snapshots_restore_the_state) {
    for (uint32_t i = 0; i < N_NAMES; i++) {
        if (!test_runs_model(2, i)) continue;
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        compute_expected(model, 16);
        fkv_runner *runner = model_runner(model, runner_config(16, 64, 2));
        fkv_cache *cache = fkv_runner_cache(runner);
        fkv_seq seq = model_seq(runner, N);
        uint32_t at = 0;
        uint32_t n_shared = 0;
        run_part(runner, seq, 0, 128, 64);
        ck_ok(fkv_prefix_insert(cache, seq, golden.tokens, 128));
        run_part(runner, seq, 128, 150, 11);
        ck_status(fkv_seq_truncate(cache, seq, 140), FKV_GONE);
        ck_ok(fkv_seq_reachable(cache, seq, 140, &at));
        ck_assert_uint_eq(at, 128);
        ck_ok(fkv_seq_truncate(cache, seq, at));
        run_part(runner, seq, 128, N, 29);
        check_logits(NAMES[i], "truncation", 0, N);
        ck_ok(fkv_seq_close(cache, seq));
        fkv_seq_config config = {.max_tokens = N, .prompt = golden.tokens, .n_prompt = N - 1};
        ck_ok(fkv_seq_open(cache, &config, &seq, &n_shared));
        ck_assert_uint_eq(n_shared, 128);
        memset(got, 0, sizeof got);
        run_part(runner, seq, 128, N, 64);
        check_logits(NAMES[i], "a shared prefix", 128, N);
        fkv_runner_close(runner);
        close_golden(model);
    }
}
END_TEST

START_TEST(plan_includes_states) {
    fkv_model *model = golden_model_load(&golden, "qwen35");
    fkv_runner_config config = runner_config(16, 32, 1);
    fkv_runner_plan plan;
    fkv_runner *runner = NULL;
    config.max_snapshots = 3;
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    /* each of the three delta nets stores 4 states of 32 x 32 values and 3 convolution inputs of 256 channels, in f32 */
    ck_assert_uint_eq(plan.cache.state_bytes, 3 * (4 * 32 * 32 + 3 * 256) * sizeof(float));
    ck_assert_uint_eq(plan.cache.state_slots, 2 * MAX_SEQS + 3);
    const uint64_t before = fkv_map_live_bytes();
    ck_ok(fkv_runner_open(model, &config, &runner));
    ck_assert_uint_eq(fkv_map_live_bytes() - before, plan.total_bytes);
    fkv_runner_close(runner);
    fkv_model_layer layer;
    ck_ok(fkv_model_layer_about(model, 0, &layer));
    ck_assert_uint_eq(layer.state_bytes, plan.cache.state_bytes / 3);
    ck_ok(fkv_model_layer_about(model, 3, &layer));
    ck_assert(layer.state_bytes == 0 && layer.n_kv_heads == 2);
    ck_ok(fkv_codec_parse("calibrated", &config.k, &config.v));
    ck_status(fkv_runner_plan_make(model, &config, &plan), FKV_UNSUPPORTED);
    close_golden(model);
}
END_TEST

enum { TRAINED_VOCAB = 264, TRAINED_TOKENS = 512, TRAINED_ROWS = 4 };

static uint32_t read_integers(const json_t *json, const char *key, uint32_t *out, uint32_t max) {
    const json_t *list = json_object_get(json, key);
    const uint32_t n = (uint32_t)json_array_size(list);
    ck_assert_msg(n > 0 && n <= max, "%s has %u values", key, n);
    for (uint32_t i = 0; i < n; i++) out[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return n;
}

static uint32_t most_likely(const float *logits) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < TRAINED_VOCAB; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* The trained model answers a question about a fact in its prompt (scripts/make-hybrid-golden). */
START_TEST(trained_model_gives_the_answer_of_transformers) {
    static uint32_t tokens[TRAINED_TOKENS];
    static uint32_t rows[TRAINED_ROWS];
    static float logits[TRAINED_TOKENS * TRAINED_VOCAB];
    static float wanted[TRAINED_VOCAB];
    json_t *json = json_load_file("tests/data/hybrid_golden.json", 0, NULL);
    ck_assert_ptr_nonnull(json);
    const uint32_t n_prompt = read_integers(json, "prompt", tokens, TRAINED_TOKENS * 3 / 4);
    const uint32_t n_answer = read_integers(json, "answer", tokens + n_prompt, TRAINED_TOKENS / 4);
    const uint32_t n_rows = read_integers(json, "rows", rows, TRAINED_ROWS);
    const json_t *values = json_object_get(json, "logits");
    ck_assert_uint_eq(json_array_size(values), (size_t)n_rows * TRAINED_VOCAB);
    const fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    ck_ok(fkv_model_load("models/hybrid", &config, &model));
    ck_assert_uint_eq(fkv_model_about(model)->n_vocab, TRAINED_VOCAB);
    fkv_runner *runner = model_runner(model, model_runner_config(16, TRAINED_TOKENS, 64));
    fkv_seq seq = model_seq(runner, TRAINED_TOKENS);
    model_run(runner, seq, tokens, n_prompt, 64, TRAINED_VOCAB, logits);
    for (uint32_t i = 0; i < n_answer; i++) {
        const uint32_t at = n_prompt + i;
        ck_assert_msg(most_likely(logits + (size_t)(at - 1) * TRAINED_VOCAB) == tokens[at], "token %u of the answer differs", i);
        if (i + 1 < n_answer) model_run(runner, seq, tokens + at, 1, 1, TRAINED_VOCAB, logits + (size_t)at * TRAINED_VOCAB);
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        for (uint32_t v = 0; v < TRAINED_VOCAB; v++)
            wanted[v] = (float)json_number_value(json_array_get(values, (size_t)i * TRAINED_VOCAB + v));
        const double error = relative_l2(logits + (size_t)(n_prompt - 1 + rows[i]) * TRAINED_VOCAB, wanted, TRAINED_VOCAB);
        ck_assert_msg(error <= 1e-3, "relative error %.1e of the logits of token %u of the answer", error, rows[i]);
    }
    fkv_runner_close(runner);
    fkv_model_close(model);
    json_decref(json);
}
END_TEST

TEST_MAIN("recurrent_models", logits_do_not_depend_on_chunks_and_threads, logits_do_not_depend_on_the_batch,
          forks_and_failed_steps_leave_the_state_unchanged, snapshots_restore_the_state, plan_includes_states,
          trained_model_gives_the_answer_of_transformers)
