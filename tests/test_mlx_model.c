/* Tests of models on MLX: weights match the file, logits of every architecture match a reference pass and the CPU, two real
 * models generate the expected texts, memory use according to MLX's counters is constant and within the plan, page files of
 * another backend are rejected, and failed steps have no side effects. Runs on any MLX device. */
#include "../src/base/float16.h"
#include "../src/model/files/tensor_rows.h"
#include "../src/model/mlx/array_weights.h"
#include "../src/model/mlx/model_ops.h"
#include "cache_fixture.h"
#include "model_fixture.h"
#include "sanitized.h"
#include "test.h"

#include <flatkv/mlx.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Tolerance of logits against a double-precision reference. MLX rounds the inputs and outputs of matrix products, and keys and
 * values, to 11-bit significands. A wrong head, RoPE base, window or norm causes an error of more than 0.1. */
static const double PLAIN_TOLERANCE = 5e-3;

/* Tolerances of the needle model's logits, with 16-bit pages and with quantized pages. Logits are compared with those of the CPU
 * and with those of MLX for other chunks and batches, for which MLX's matrix products may round differently. In a quantized page,
 * a small difference may round a value to the next code, which changes the value by a full quantization step. */
static const double HALVES_TOLERANCE = 5e-3;
static const double CODES_TOLERANCE = 2e-2;

enum { NEEDLE_VOCAB = 256 };

static fkv_model *load_on(fkv_backend backend, const char *path) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    config.backend = backend;
    if (backend == FKV_BACKEND_MLX) ck_ok(fkv_mlx_register());
    ck_ok(fkv_model_load(path, &config, &model));
    return model;
}

/* ---- weights ---- */

enum { ROWS = 3, COLS = 512 };

/* A tensor type. It is tested with blocks of random bits, except that the 16-bit floats at the given offsets have realistic
 * magnitudes. */
typedef struct tensor_case {
    fkv_tensor_type type;
    uint32_t block_cols;
    uint32_t block_bytes;
    int halves[2]; /* byte offsets of up to two 16-bit floats in a block; -1 for none */
    double bound;  /* bound on the relative L2 error, caused by storing scales as f16 or values as 16-bit floats */
} tensor_case;

static const tensor_case TENSORS[] = {
    {FKV_TENSOR_Q4_0, 32, 18, {0, -1}, 0},        {FKV_TENSOR_Q4_1, 32, 20, {0, 2}, 0},
    {FKV_TENSOR_Q5_0, 32, 22, {0, -1}, 0},        {FKV_TENSOR_Q8_0, 32, 34, {0, -1}, 0},
    {FKV_TENSOR_Q4_K, 256, 144, {0, 2}, 1e-3},    {FKV_TENSOR_Q6_K, 256, 210, {208, -1}, 5e-4},
    {FKV_TENSOR_F16, 1, 2, {0, -1}, 0},           {FKV_TENSOR_BF16, 1, 2, {-1, -1}, 0},
    {FKV_TENSOR_F32, 1, 4, {-1, -1}, 5e-4},       {FKV_TENSOR_Q5_1, 32, 24, {0, 2}, 0},
    {FKV_TENSOR_Q5_K, 256, 176, {0, 2}, 1e-3},    {FKV_TENSOR_Q2_K, 256, 84, {80, 82}, 5e-4},
    {FKV_TENSOR_Q3_K, 256, 110, {108, -1}, 5e-4}, {FKV_TENSOR_IQ4_NL, 32, 18, {0, -1}, 0},
    {FKV_TENSOR_IQ4_XS, 256, 136, {0, -1}, 5e-4}, {FKV_TENSOR_NVFP4, 64, 36, {-1, -1}, 0},
    {FKV_TENSOR_IQ2_XXS, 256, 66, {0, -1}, 5e-4}, {FKV_TENSOR_IQ2_S, 256, 82, {0, -1}, 5e-4},
    {FKV_TENSOR_IQ3_S, 256, 110, {0, -1}, 5e-4},  {FKV_TENSOR_TQ2_0, 256, 66, {64, -1}, 0},
};

static void random_tensor(const tensor_case *c, uint8_t *bytes, fkv_tensor *tensor) {
    uint32_t row_bytes = COLS / c->block_cols * c->block_bytes;
    uint32_t random[ROWS * COLS];
    *tensor =
        (fkv_tensor){.name = "random", .type = c->type, .n_rows = ROWS, .n_cols = COLS, .data = bytes, .row_bytes = row_bytes};
    cache_tokens((uint32_t)c->type + 1, random, ROWS * COLS);
    for (uint32_t i = 0; i < ROWS * row_bytes; i++) bytes[i] = (uint8_t)(random[i % (ROWS * COLS)] >> i / (ROWS * COLS) * 8);
    for (uint32_t i = 0; i < ROWS * COLS; i++) {
        float number = ((float)(random[i] % 20001) - 10000) / 10000;
        if (c->type == FKV_TENSOR_F32) memcpy(bytes + 4 * (size_t)i, &number, sizeof number);
        uint16_t half = c->type == FKV_TENSOR_BF16 ? fkv_f32_to_bf16(number) : fkv_f32_to_f16(number);
        if (c->type == FKV_TENSOR_BF16 || c->type == FKV_TENSOR_F16) memcpy(bytes + 2 * (size_t)i, &half, sizeof half);
    }
    for (uint32_t block = 0; c->block_cols > 1 && block < ROWS * COLS / c->block_cols; block++) {
        for (int h = 0; h < 2; h++) {
            uint16_t half = fkv_f32_to_f16((float)(random[block] % 1000 + 1) / 4096);
            if (c->halves[h] >= 0) memcpy(bytes + (size_t)block * c->block_bytes + c->halves[h], &half, sizeof half);
        }
    }
}

static void matrix_floats(fkv_mlx_graph *g, const fkv_array_matrix *m, float *out) {
    mlx_array numbers = {NULL};
    if (m->is_coded) {
        fkv_mlx_affine rows = m->affine;
        rows.scales = fkv_mlx_astype(g, rows.scales, MLX_FLOAT32);
        rows.biases = fkv_mlx_astype(g, rows.biases, MLX_FLOAT32);
        numbers = fkv_model_op_dequantize(g, &rows);
    } else {
        numbers = fkv_mlx_astype(g, m->halves, MLX_FLOAT32);
    }
    fkv_mlx_eval_one(g, numbers);
    ck_ok(fkv_mlx_graph_status(g, "matrix_floats"));
    memcpy(out, mlx_array_data_float32(numbers), (size_t)ROWS * COLS * sizeof *out);
    fkv_mlx_graph_release(g, 0);
}

static void check_tensor(fkv_mlx_graph *g, const tensor_case *c, bool on_gpu) {
    static uint8_t bytes[ROWS * COLS * 4];
    static float expected[ROWS * COLS];
    static float got[ROWS * COLS];
    fkv_tensor tensor;
    fkv_array_matrix matrix;
    random_tensor(c, bytes, &tensor);
    for (uint32_t r = 0; r < ROWS; r++) fkv_tensor_row_floats(&tensor, r, expected + (size_t)r * COLS);
    ck_ok(fkv_array_matrix_load(&tensor, on_gpu, g->stream, &matrix));
    matrix_floats(g, &matrix, got);
    double apart = relative_l2(got, expected, ROWS * COLS);
    bool exact = c->bound == 0 || (matrix.is_coded && !on_gpu); /* on the CPU, the scales of quantized matrices are f32 */
    printf("%s, %s: relative error %.2e\n", fkv_tensor_type_name(c->type), matrix.is_coded ? "codes" : "16-bit floats", apart);
    ck_assert_msg(exact ? apart == 0 : apart <= c->bound, "%s has a relative error of %g", fkv_tensor_type_name(c->type), apart);
    fkv_array_matrix_free(&matrix);
}

START_TEST(weights_match_the_file) {
    static fkv_mlx_graph g;
    mlx_device device;
    bool on_gpu = false;
    ck_ok(fkv_array_device(&device, &on_gpu));
    g.stream = mlx_stream_new();
    ck_assert_int_eq(mlx_get_default_stream(&g.stream, device), 0);
    for (size_t i = 0; i < N_OF(TENSORS); i++) {
        check_tensor(&g, &TENSORS[i], false);
        check_tensor(&g, &TENSORS[i], true);
    }
    (void)mlx_stream_free(g.stream);
    (void)mlx_device_free(device);
}
END_TEST

START_TEST(errors_inside_mlx_return_a_status) {
    static fkv_mlx_graph g;
    mlx_device device;
    bool on_gpu = false;
    const float numbers[6] = {0};
    ck_ok(fkv_array_device(&device, &on_gpu));
    g.stream = mlx_stream_new();
    ck_assert_int_eq(mlx_get_default_stream(&g.stream, device), 0);
    mlx_array wide = fkv_model_op_upload(&g, numbers, FKV_MLX_SHAPE(1, 2, 3), MLX_FLOAT32);
    mlx_array tall = fkv_model_op_upload(&g, numbers, FKV_MLX_SHAPE(1, 3, 2), MLX_FLOAT32);
    ck_ok(fkv_mlx_graph_status(&g, "uploads"));
    mlx_array joined = fkv_model_op_beside(
        &g, wide, tall); /* concatenates the columns of two arrays with different numbers of rows, which MLX rejects */
    ck_assert_ptr_null(joined.ctx);
    ck_assert_ptr_null(fkv_model_op_sigmoid(&g, joined).ctx);
    ck_status(fkv_mlx_graph_status(&g, "a step"), FKV_DEVICE);
    ck_assert_msg(strstr(fkv_message(), "concatenate") != NULL, "\"%s\" does not contain MLX's message", fkv_message());
    ck_assert_ptr_nonnull(fkv_model_op_sigmoid(&g, wide).ctx); /* the graph is still usable after the failure */
    fkv_mlx_graph_release(&g, 0);
    (void)mlx_stream_free(g.stream);
    (void)mlx_device_free(device);
}
END_TEST

/* ---- all architectures ---- */

enum { PLAIN_TOKENS = 50 };

static const model_spec SPECS[] = {
    {"llama", 2, 64, 128, 4, 2, 16, .tied = true},
    {"llama", 2, 80, 172, 3, 1, 24, .tied = false}, /* the head dimension 24 is padded in pages */
    {"qwen2", 3, 96, 160, 6, 2, 32, .tied = false},
    {"qwen3", 2, 64, 128, 4, 4, 64, .tied = true},
    {"gemma3_text", 5, 64, 96, 4, 1, 32, .window = 10, .pattern = 3, .tied = true},
};

START_TEST(logits_of_every_architecture_match_the_reference) {
    static float expected[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    uint32_t tokens[PLAIN_TOKENS];
    cache_tokens(3, tokens, PLAIN_TOKENS);
    for (uint32_t i = 0; i < PLAIN_TOKENS; i++) tokens[i] %= MODEL_FIXTURE_VOCAB;
    for (size_t i = 0; i < N_OF(SPECS); i++) {
        model_fixture w;
        model_fixture_make(&w, &SPECS[i], 5);
        model_fixture_reference(&w, tokens, PLAIN_TOKENS, expected);
        fkv_model *model = load_on(FKV_BACKEND_MLX, model_fixture_write(&w));
        fkv_runner *runner = model_runner(model, model_runner_config(16, PLAIN_TOKENS, 16));
        model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 13, MODEL_FIXTURE_VOCAB, got);
        double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_FIXTURE_VOCAB);
        printf("%s head %u: relative error %.2e\n", SPECS[i].type, SPECS[i].head_dim, apart);
        ck_assert_msg(apart <= PLAIN_TOLERANCE, "%s: logits have a relative error of %g", SPECS[i].type, apart);
        fkv_runner_close(runner);
        fkv_model_close(model);
        model_fixture_free(&w);
    }
}
END_TEST

/* ---- comparison with the CPU ---- */

enum { SAME_TOKENS = TEST_SANITIZED ? 100 : 150 };

static fkv_runner_config needle_config(void) {
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = 6 * SAME_TOKENS;
    config.page_tokens = 16; /* pages are small, so that some of them are sealed */
    config.max_seqs = 4;
    config.max_step_tokens = SAME_TOKENS;
    config.max_logit_rows = SAME_TOKENS;
    return config;
}

static void check_apart(const float *a, const float *b, double bound, const char *what) {
    double apart = relative_l2(a, b, SAME_TOKENS * NEEDLE_VOCAB);
    printf("needle, %s: relative error %.2e\n", what, apart);
    ck_assert_msg(apart <= bound, "%s: logits have a relative error of %g", what, apart);
}

/* Runs the sequence in uneven chunks, together with two other sequences in the same steps. */
static void run_among_others(fkv_runner *runner, const uint32_t *tokens, float *logits) {
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    fkv_seq before = model_seq(runner, SAME_TOKENS);
    fkv_seq after = model_seq(runner, SAME_TOKENS);
    uint32_t at = 0;
    for (uint32_t round = 0; at < SAME_TOKENS; round++) {
        uint32_t n = 1 + round * 5 % 31;
        if (n > SAME_TOKENS - at) n = SAME_TOKENS - at;
        const float *given = NULL;
        fkv_tokens rows[] = {{before, tokens + round, 3, FKV_LOGITS_LAST},
                             {seq, tokens + at, n, FKV_LOGITS_ALL},
                             {after, tokens + 2 * round, 2, FKV_LOGITS_NONE}};
        ck_ok(fkv_runner_forward(runner, rows, 3, &given));
        memcpy(logits + (size_t)at * NEEDLE_VOCAB, given + NEEDLE_VOCAB, (size_t)n * NEEDLE_VOCAB * sizeof *logits);
        at += n;
    }
}

/* Runs the tokens on the CPU, then on MLX, both in one step and in a batch. */
static void check_backends(fkv_runner_config config, const char *name, double bound) {
    static float cpu[SAME_TOKENS * NEEDLE_VOCAB];
    static float whole[SAME_TOKENS * NEEDLE_VOCAB];
    static float other[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS];
    char what[64];
    model_book_tokens(1000, tokens, SAME_TOKENS);
    fkv_model *on_cpu = load_on(FKV_BACKEND_CPU, "models/needle");
    fkv_runner *runner = model_runner(on_cpu, config);
    model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, SAME_TOKENS, NEEDLE_VOCAB, cpu);
    fkv_runner_close(runner);
    fkv_model_close(on_cpu);

    fkv_model *on_mlx = load_on(FKV_BACKEND_MLX, "models/needle");
    runner = model_runner(on_mlx, config);
    model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, SAME_TOKENS, NEEDLE_VOCAB, whole);
    (void)snprintf(what, sizeof what, "%s, MLX and the CPU", name);
    check_apart(whole, cpu, bound, what);
    run_among_others(runner, tokens, other);
    (void)snprintf(what, sizeof what, "%s, in a batch", name);
    check_apart(other, whole, bound, what);
    fkv_runner_close(runner);
    fkv_model_close(on_mlx);
}

START_TEST(logits_match_the_cpu_alone_and_in_a_batch) {
    fkv_runner_config config = needle_config();
    check_backends(config, "sealed 4/4", CODES_TOLERANCE);
    config.k = (fkv_codec_config){8, 64, FKV_CODEC_AUTO};
    config.v = (fkv_codec_config){4, 64, FKV_CODEC_AUTO};
    check_backends(config, "K8/V4", CODES_TOLERANCE);
    config.k = config.v = (fkv_codec_config){.bits = 16};
    check_backends(config, "K16/V16", HALVES_TOLERANCE);
}
END_TEST

/* Models compute slightly different rows on different backends, so a sequence saved on one backend is rejected by the other. */
START_TEST(page_file_of_another_backend_is_rejected) {
    uint32_t tokens[SAME_TOKENS];
    char path[512];
    fkv_seq seq = 0;
    model_book_tokens(2000, tokens, SAME_TOKENS);
    for (int to = FKV_BACKEND_CPU; to <= FKV_BACKEND_MLX; to++) {
        fkv_model *source = load_on(to == FKV_BACKEND_CPU ? FKV_BACKEND_MLX : FKV_BACKEND_CPU, "models/needle");
        fkv_model *target = load_on((fkv_backend)to, "models/needle");
        fkv_runner *from = model_runner(source, needle_config());
        fkv_runner *into = model_runner(target, needle_config());
        const fkv_seq saved = model_seq(from, SAME_TOKENS);
        const fkv_seq_config config = {.max_tokens = SAME_TOKENS};
        model_run(from, saved, tokens, SAME_TOKENS, 50, NEEDLE_VOCAB, NULL);
        ck_ok(fkv_seq_save(fkv_runner_cache(from), saved, tokens, 0, cache_path(path, "crossing.fkv")));
        ck_ok(fkv_seq_close(fkv_runner_cache(from), saved));
        ck_ok(fkv_seq_load(fkv_runner_cache(from), &config, path, &seq));
        ck_status(fkv_seq_load(fkv_runner_cache(into), &config, path, &seq), FKV_FILE_FOREIGN);
        ck_assert_ptr_nonnull(strstr(fkv_message(), to == FKV_BACKEND_CPU ? "numerics is \"mlx " : "numerics is \"cpu "));
        fkv_runner_close(from);
        fkv_runner_close(into);
        fkv_model_close(source);
        fkv_model_close(target);
    }
}
END_TEST

/* ---- generated texts ---- */

static uint32_t best(const float *logits, uint32_t n) {
    uint32_t at = 0;
    for (uint32_t t = 1; t < n; t++)
        if (logits[t] > logits[at]) at = t;
    return at;
}

/* The expected text is the greedy output of llama2.c with the weights of this model, for 256 steps from the BOS token. Under
 * sanitizers, only its beginning is generated. */
START_TEST(stories_match_the_output_of_llama2c) {
    enum { ALL_STEPS = 256, STEPS = TEST_SANITIZED ? 64 : ALL_STEPS };
    char expected[2048] = "";
    char got[2048] = "";
    size_t n_got = 0;
    FILE *file = fopen("tests/data/stories_golden.txt", "rb");
    ck_assert_ptr_nonnull(file);
    size_t n_expected = fread(expected, 1, sizeof expected - 1, file);
    (void)fclose(file);
    while (n_expected > 0 && expected[n_expected - 1] == '\n') expected[--n_expected] = 0;
    fkv_model *model = load_on(FKV_BACKEND_MLX, "tests/data/stories260K.gguf");
    const fkv_model_info *about = fkv_model_about(model);
    fkv_runner *runner = model_runner(model, model_runner_config(16, STEPS, 8));
    fkv_seq seq = model_seq(runner, STEPS);
    uint32_t token = about->bos;
    for (uint32_t step = 0; step < STEPS; step++) {
        const float *logits = NULL;
        fkv_tokens row = {seq, &token, 1, FKV_LOGITS_LAST};
        ck_ok(fkv_runner_forward(runner, &row, 1, &logits));
        token = best(logits, about->n_vocab);
        if (token == about->bos) break;
        size_t n = 0;
        const char *text = fkv_token_text(model, token, false, &n);
        ck_assert_uint_lt(n_got + n, sizeof got);
        memcpy(got + n_got, text, n);
        n_got += n;
    }
    const char *text = got[0] == ' ' ? got + 1 : got; /* skips the leading space of the first token */
    ck_assert_uint_ge(n_got, STEPS);                  /* most tokens have several letters */
    if (STEPS < ALL_STEPS) expected[strlen(text)] = 0;
    ck_assert_str_eq(text, expected);
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

START_TEST(planted_fact_is_found) {
    enum { TOKENS = 600, ANSWER = 7 };
    static uint32_t tokens[TOKENS];
    const char fact[] = " The secret code of Tavorin is 4081936. ";
    const char ask[] = "\nQuestion: What is the secret code of Tavorin?\nAnswer: The secret code of Tavorin is ";
    const uint32_t n_fact = sizeof fact - 1;
    const uint32_t n_ask = sizeof ask - 1;
    uint32_t n = TOKENS - ANSWER;
    model_book_tokens(0, tokens, n);
    for (uint32_t i = 0; i < n_fact; i++) tokens[n / 3 + i] = (uint8_t)fact[i];
    for (uint32_t i = 0; i < n_ask; i++) tokens[n - n_ask + i] = (uint8_t)ask[i];
    fkv_model *model = load_on(FKV_BACKEND_MLX, "models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = TOKENS;
    config.max_step_tokens = 256;
    fkv_runner *runner = model_runner(model, config);
    fkv_seq seq = model_seq(runner, TOKENS);
    model_run(runner, seq, tokens, n - 1, 256, NEEDLE_VOCAB, NULL);
    char answer[ANSWER + 1] = "";
    uint32_t token = tokens[n - 1];
    for (uint32_t i = 0; i < ANSWER; i++) {
        const float *logits = NULL;
        fkv_tokens row = {seq, &token, 1, FKV_LOGITS_LAST};
        ck_ok(fkv_runner_forward(runner, &row, 1, &logits));
        token = best(logits, NEEDLE_VOCAB);
        answer[i] = (char)token;
    }
    ck_assert_str_eq(answer, "4081936");
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

/* ---- memory ---- */

static fkv_backend_memory memory_now(void) {
    fkv_backend_memory now;
    ck_ok(fkv_backend_memory_now(FKV_BACKEND_MLX, &now));
    return now;
}

START_TEST(memory_counters_stay_within_the_plan) {
    enum { TOKENS = TEST_SANITIZED ? 200 : 400, CHUNK = 64 };
    const uint64_t slack =
        512 * 1024; /* allows for array sizes that the backend rounds up, and for at most 64 KiB of kernel counters per layer */
    static uint32_t tokens[TOKENS];
    model_book_tokens(0, tokens, TOKENS);
    uint64_t none = memory_now().active_bytes;
    fkv_model *model = load_on(FKV_BACKEND_MLX, "models/needle");
    uint64_t weights = memory_now().active_bytes;
    ck_assert_uint_ge(weights - none, fkv_model_about(model)->packed_bytes);
    ck_assert_uint_le(weights - none, fkv_model_about(model)->packed_bytes + slack);
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = TOKENS;
    config.max_step_tokens = CHUNK;
    fkv_runner_plan plan;
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    ck_assert_uint_eq(plan.total_bytes, plan.cache.total_bytes + plan.activations_bytes);
    fkv_runner *runner = model_runner(model, config);
    uint64_t opened = memory_now().active_bytes;
    uint64_t pages = 0;
    for (uint32_t g = 0; g < plan.cache.n_groups; g++) pages += plan.cache.group_pages[g] * plan.cache.group_page_bytes[g];
    ck_assert_uint_ge(opened - weights, pages);
    ck_assert_uint_le(opened - weights, plan.cache.slab_bytes + slack);
    fkv_seq seq = model_seq(runner, TOKENS);
    for (uint32_t at = 0; at < TOKENS;) {
        uint32_t n = at < TOKENS / 2 ? CHUNK : 1;
        if (n > TOKENS - at) n = TOKENS - at;
        model_run(runner, seq, tokens + at, n, n, NEEDLE_VOCAB, NULL);
        at += n;
        fkv_backend_memory now = memory_now();
        ck_assert_uint_ge(now.active_bytes, opened);
        ck_assert_uint_le(now.active_bytes, opened + slack);
        ck_assert_uint_le(now.peak_bytes - weights, plan.total_bytes);
        ck_assert_uint_le(now.active_bytes + now.cached_bytes - weights, plan.total_bytes);
    }
    printf("bytes planned %" PRIu64 ", in use %" PRIu64 ", peak %" PRIu64 "\n", plan.total_bytes, opened - weights,
           memory_now().peak_bytes - weights);
    fkv_runner_close(runner);
    ck_assert_uint_eq(memory_now().active_bytes, weights);
    fkv_model_close(model);
    ck_assert_uint_eq(memory_now().active_bytes, none);
}
END_TEST

START_TEST(activations_do_not_grow_with_the_context) {
    fkv_model_config planning = fkv_model_config_default();
    fkv_model *model = NULL;
    planning.backend = FKV_BACKEND_MLX;
    planning.plan_only = true;
    ck_ok(fkv_mlx_register());
    ck_ok(fkv_model_load("models/needle", &planning, &model));
    fkv_runner_config config = fkv_runner_config_default();
    fkv_runner_plan small;
    fkv_runner_plan large;
    config.max_tokens = 1024;
    ck_ok(fkv_runner_plan_make(model, &config, &small));
    config.max_tokens = 131072;
    ck_ok(fkv_runner_plan_make(model, &config, &large));
    ck_assert_uint_eq(small.activations_bytes, large.activations_bytes);
    ck_assert_uint_gt(large.cache.slab_bytes, 40 * small.cache.slab_bytes);
    fkv_runner *runner = NULL;
    ck_status(fkv_runner_open(model, &config, &runner), FKV_BAD_STATE);
    fkv_model_close(model);
}
END_TEST

/* ---- rejected steps ---- */

START_TEST(rejected_step_has_no_effect) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS];
    const uint32_t foreign[] = {5, NEEDLE_VOCAB};
    model_book_tokens(3000, tokens, SAME_TOKENS);
    fkv_model *model = load_on(FKV_BACKEND_MLX, "models/needle");
    fkv_runner_config config = needle_config();
    config.max_step_tokens = 50;
    config.max_logit_rows = 50;
    fkv_runner *runner = model_runner(model, config);
    model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, 50, NEEDLE_VOCAB, expected);
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    fkv_seq other = model_seq(runner, 4);
    const float *logits = NULL;
    for (uint32_t at = 0; at < SAME_TOKENS; at += 50) {
        const fkv_tokens too_long = {seq, tokens, 51, FKV_LOGITS_NONE};
        const fkv_tokens unknown[] = {{seq, tokens + at, 3, FKV_LOGITS_LAST}, {other, foreign, 2, FKV_LOGITS_NONE}};
        const fkv_tokens full[] = {{seq, tokens + at, 3, FKV_LOGITS_LAST}, {other, tokens, 5, FKV_LOGITS_NONE}};
        ck_status(fkv_runner_forward(runner, &too_long, 1, &logits), FKV_STEP_FULL);
        ck_status(fkv_runner_forward(runner, unknown, 2, &logits), FKV_BAD_ARGUMENT);
        ck_status(fkv_runner_forward(runner, full, 2, &logits), FKV_SEQ_FULL);
        model_run(runner, seq, tokens + at, 50, 50, NEEDLE_VOCAB, got + (size_t)at * NEEDLE_VOCAB);
    }
    ck_assert_mem_eq(got, expected, sizeof got);
    ck_assert(fkv_cache_consistent(fkv_runner_cache(runner)));
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

TEST_MAIN("mlx_model", weights_match_the_file, errors_inside_mlx_return_a_status,
          logits_of_every_architecture_match_the_reference, logits_match_the_cpu_alone_and_in_a_batch,
          page_file_of_another_backend_is_rejected, stories_match_the_output_of_llama2c, planted_fact_is_found,
          memory_counters_stay_within_the_plan, activations_do_not_grow_with_the_context, rejected_step_has_no_effect)
