/* A model in motion: logits against a plain pass for every architecture, the same bits however a token got there, the texts that
 * two real models must give, memory that is as planned and stays so, and steps that fail without a trace.
 */
#include "cache_world.h"
#include "golden_models.h"
#include "model_world.h"
#include "test.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Of logits over 16-bit pages: keys and values are rounded to 11 bits, everything else is float. A wrong head, base, window or
 * norm is off by more than a tenth. */
static const double PLAIN_TOLERANCE = 2e-3;

static fkv_model *load(const char *path) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    ck_ok(fkv_model_load(path, &config, &model));
    return model;
}

static fkv_runner_config config_of_bits(uint32_t bits, uint32_t max_tokens, uint32_t step_tokens) {
    fkv_runner_config config = model_runner_config(bits, max_tokens, step_tokens);
    config.n_threads = 2;
    return config;
}

static void random_tokens(uint32_t seed, uint32_t *tokens, uint32_t n) {
    cache_tokens(seed, tokens, n);
    for (uint32_t i = 0; i < n; i++) tokens[i] %= MODEL_WORLD_VOCAB;
}

/* ---- against the plain pass ---- */

enum { PLAIN_TOKENS = 50 };

static void check_plain(const model_spec *spec, fkv_runner_config config) {
    static float expected[PLAIN_TOKENS * MODEL_WORLD_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_WORLD_VOCAB];
    model_world w;
    uint32_t tokens[PLAIN_TOKENS];
    random_tokens(3, tokens, PLAIN_TOKENS);
    model_world_make(&w, spec, 5);
    model_world_truth(&w, tokens, PLAIN_TOKENS, expected);
    fkv_model *model = load(model_world_write(&w));
    fkv_runner *runner = model_runner(model, config);
    model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 13, MODEL_WORLD_VOCAB, got);
    double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_WORLD_VOCAB);
    printf("%s head %u, %u/%u bits: %.2e apart\n", spec->type, spec->head_dim, config.k.bits, config.v.bits, apart);
    ck_assert_msg(apart <= PLAIN_TOLERANCE, "%s: logits are %g apart", spec->type, apart);
    fkv_runner_close(runner);
    fkv_model_close(model);
    model_world_free(&w);
}

static const model_spec SPECS[] = {
    {"llama", 2, 64, 128, 4, 2, 16, .tied = true},
    {"llama", 2, 80, 172, 3, 1, 24, .tied = false}, /* nothing is a multiple of 32 */
    {"qwen2", 3, 96, 160, 6, 2, 32, .tied = false},
    {"qwen3", 2, 64, 128, 4, 4, 64, .tied = true},
    {"gemma3_text", 5, 64, 96, 4, 1, 32, .window = 10, .pattern = 3, .tied = true},
};

START_TEST(logits_agree_with_a_plain_pass_of_every_architecture) {
    for (size_t i = 0; i < N_OF(SPECS); i++) check_plain(&SPECS[i], config_of_bits(16, PLAIN_TOKENS, 16));
}
END_TEST

START_TEST(a_bounded_context_sees_its_window_and_the_sinks) {
    fkv_runner_config config = config_of_bits(16, PLAIN_TOKENS, 16);
    config.max_kv = 12;
    config.n_sinks = 2;
    for (size_t i = 0; i < N_OF(SPECS); i++) {
        model_spec spec = SPECS[i];
        if (spec.window != 0) continue;
        spec.bound = config.max_kv;
        spec.n_sinks = config.n_sinks;
        check_plain(&spec, config);
    }
}
END_TEST

/* gemma's own windows are smaller than the bound and stay as they are: full layers alone get the bound and the sinks. */
START_TEST(a_bound_leaves_smaller_windows_alone) {
    model_spec spec = SPECS[N_OF(SPECS) - 1];
    fkv_runner_config config = config_of_bits(16, PLAIN_TOKENS, 16);
    config.max_kv = 20;
    spec.bound = 20;
    check_plain(&spec, config);
}
END_TEST

START_TEST(heads_that_no_group_divides_are_padded_inside_pages) {
    model_spec spec = {"llama", 2, 80, 172, 6, 2, 24, .tied = true};
    model_world w;
    uint32_t tokens[PLAIN_TOKENS];
    static float expected[PLAIN_TOKENS * MODEL_WORLD_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_WORLD_VOCAB];
    random_tokens(4, tokens, PLAIN_TOKENS);
    model_world_make(&w, &spec, 6);
    model_world_truth(&w, tokens, PLAIN_TOKENS, expected);
    fkv_model *model = load(model_world_write(&w));
    const fkv_rotate rotations[] = {FKV_ROTATE_NONE, FKV_ROTATE_KV};
    for (size_t i = 0; i < N_OF(rotations); i++) {
        fkv_runner_config config = config_of_bits(8, PLAIN_TOKENS, 16);
        config.v.group = 64;
        config.rotate = rotations[i];
        fkv_runner *runner = model_runner(model, config);
        model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 16, MODEL_WORLD_VOCAB, got);
        double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_WORLD_VOCAB);
        printf("8 bits, heads of 24 in groups of 32 and 64, rotation %d: %.2e apart\n", (int)rotations[i], apart);
        ck_assert_double_le(apart, 3e-2); /* 8-bit codes of sharp attention; a head out of place is off by more than a half */
        fkv_runner_close(runner);
    }
    fkv_model_close(model);
    model_world_free(&w);
}
END_TEST

/* As in Qwen2: one pair of each head that hardly turns has a bias hundreds of times the rest. In a group of 8-bit codes it would
 * leave the others a few steps. */
START_TEST(large_biases_of_keys_cost_the_other_numbers_nothing) {
    model_spec spec = {"qwen2", 3, 96, 160, 6, 2, 32, .tied = false};
    model_world w;
    uint32_t tokens[PLAIN_TOKENS];
    static float expected[PLAIN_TOKENS * MODEL_WORLD_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_WORLD_VOCAB];
    random_tokens(7, tokens, PLAIN_TOKENS);
    model_world_make(&w, &spec, 8);
    for (uint32_t i = 0; i < spec.n_layers; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%u.self_attn.k_proj.bias", i);
        float *bias = model_world_tensor(&w, name)->numbers;
        for (uint32_t head = 0; head < spec.n_kv_heads; head++) bias[head * 32 + 15] = 300.0f;
    }
    model_world_truth(&w, tokens, PLAIN_TOKENS, expected);
    fkv_model *model = load(model_world_write(&w));
    fkv_runner *runner = model_runner(model, config_of_bits(8, PLAIN_TOKENS, 16));
    model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 16, MODEL_WORLD_VOCAB, got);
    double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_WORLD_VOCAB);
    printf("8 bits, K biases of 300: %.2e apart\n", apart);
    ck_assert_double_le(apart, 3e-2); /* as without such biases */
    fkv_runner_close(runner);
    fkv_model_close(model);
    model_world_free(&w);
}
END_TEST

/* Two of six layers attend over the pages of others: four are planned for, two of one head of 64 and two of one of 128, with 16
 * bits a number. */
START_TEST(layers_that_share_pages_are_not_planned_for) {
    static golden_model golden;
    golden_model_open(&golden, "gemma4_small");
    fkv_model *model = load(golden.folder);
    fkv_runner_config config = model_runner_config(16, 200, 16);
    fkv_runner_plan plan;
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    ck_assert_uint_eq(fkv_model_about(model)->n_layers, 6);
    ck_assert_uint_eq(plan.cache.token_bytes, 2 * 2 * (64 + 64 + 128 + 128));
    fkv_model_close(model);
    golden_model_close(&golden);
}
END_TEST

/* ---- the same bits ---- */

/* Shared pages, inputs of layers, experts beside a feed-forward: rows of widths that differ by layer lie in the same memory. */
START_TEST(logits_of_gemma_4_are_the_same_bits_in_chunks_and_token_by_token) {
    static const char *const names[] = {"gemma4_small", "gemma4_moe"};
    enum { N_TOKENS = 50 };
    static float chunked[N_TOKENS * GOLDEN_VOCAB];
    static float single[N_TOKENS * GOLDEN_VOCAB];
    for (size_t i = 0; i < 2; i++) {
        static golden_model golden;
        golden_model_open(&golden, names[i]);
        fkv_model *model = load(golden.folder);
        fkv_runner *runner = model_runner(model, model_runner_config(16, 200, 24));
        model_run(runner, model_seq(runner, N_TOKENS), golden.tokens, N_TOKENS, 24, GOLDEN_VOCAB, chunked);
        fkv_runner_close(runner);
        runner = model_runner(model, model_runner_config(16, 200, 24));
        model_run(runner, model_seq(runner, N_TOKENS), golden.tokens, N_TOKENS, 1, GOLDEN_VOCAB, single);
        ck_assert_mem_eq(chunked, single, sizeof chunked);
        fkv_runner_close(runner);
        fkv_model_close(model);
        golden_model_close(&golden);
    }
}
END_TEST

enum { SAME_TOKENS = 150, NEEDLE_VOCAB = 256 };

static void check_same(const float *a, const float *b, const char *what) {
    for (uint32_t t = 0; t < SAME_TOKENS; t++)
        ck_assert_msg(memcmp(a + (size_t)t * NEEDLE_VOCAB, b + (size_t)t * NEEDLE_VOCAB, NEEDLE_VOCAB * sizeof *a) == 0,
                      "%s: the logits of token %u differ", what, t);
}

/* The sequence in uneven pieces while two others run beside it in the same steps. */
static void run_among_others(fkv_runner *runner, const uint32_t *tokens, float *logits) {
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    fkv_seq before = model_seq(runner, SAME_TOKENS);
    fkv_seq behind = model_seq(runner, SAME_TOKENS);
    uint32_t at = 0;
    for (uint32_t round = 0; at < SAME_TOKENS; round++) {
        uint32_t n = 1 + round * 5 % 11;
        if (n > SAME_TOKENS - at) n = SAME_TOKENS - at;
        const float *given = NULL;
        fkv_tokens rows[] = {{before, tokens + round, 3, FKV_LOGITS_LAST},
                             {seq, tokens + at, n, FKV_LOGITS_ALL},
                             {behind, tokens + 2 * round, 2, FKV_LOGITS_NONE}};
        ck_ok(fkv_runner_forward(runner, rows, 3, &given));
        memcpy(logits + (size_t)at * NEEDLE_VOCAB, given + NEEDLE_VOCAB, (size_t)n * NEEDLE_VOCAB * sizeof *logits);
        at += n;
    }
}

static void check_same_bits(const fkv_model *model, fkv_runner_config config) {
    static float whole[SAME_TOKENS * NEEDLE_VOCAB];
    static float other[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS];
    model_book_tokens(1000, tokens, SAME_TOKENS);
    config.max_tokens = 6 * SAME_TOKENS;
    config.max_seqs = 6;
    config.max_step_tokens = SAME_TOKENS;
    config.max_logit_rows = SAME_TOKENS;
    for (uint32_t n_threads = 1; n_threads <= 2; n_threads++) {
        config.n_threads = n_threads;
        fkv_runner *runner = model_runner(model, config);
        if (n_threads == 1)
            model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, SAME_TOKENS, NEEDLE_VOCAB, whole);
        model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, 1, NEEDLE_VOCAB, other);
        check_same(other, whole, "one by one");
        model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, 17, NEEDLE_VOCAB, other);
        check_same(other, whole, "in chunks of 17");
        run_among_others(runner, tokens, other);
        check_same(other, whole, "in a batch");
        fkv_runner_close(runner);
    }
}

START_TEST(logits_are_the_same_bits_however_a_token_got_there) {
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.page_tokens = 16; /* so that some are sealed */
    check_same_bits(model, config);
    config.k = (fkv_codec_config){8, 64, FKV_CODEC_AUTO};
    config.v = (fkv_codec_config){4, 64, FKV_CODEC_AUTO};
    check_same_bits(model, config);
    fkv_model_close(model);
}
END_TEST

START_TEST(a_saved_prompt_goes_on_with_the_same_bits_and_in_no_other_model) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS];
    char path[512];
    (void)cache_path(path, "prompt.fkv");
    model_book_tokens(2000, tokens, SAME_TOKENS);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = 3 * SAME_TOKENS;
    config.page_tokens = 16; /* so that some are sealed */
    config.max_seqs = 2;
    config.max_logit_rows = SAME_TOKENS;
    fkv_runner *runner = model_runner(model, config);
    uint32_t saved = SAME_TOKENS - 20;
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    model_run(runner, seq, tokens, SAME_TOKENS, 64, NEEDLE_VOCAB, expected);
    ck_ok(fkv_seq_save(fkv_runner_cache(runner), seq, tokens, saved, path));
    fkv_seq_config opened = {.max_tokens = SAME_TOKENS};
    fkv_seq reloaded = 0;
    ck_ok(fkv_seq_load(fkv_runner_cache(runner), &opened, path, &reloaded));
    memcpy(got, expected, (size_t)saved * NEEDLE_VOCAB * sizeof *got);
    model_run(runner, reloaded, tokens + saved, SAME_TOKENS - saved, 64, NEEDLE_VOCAB, got + (size_t)saved * NEEDLE_VOCAB);
    check_same(got, expected, "reloaded");
    fkv_runner_close(runner);
    fkv_model_close(model);

    model_spec spec = {"qwen3", 4, 256, 640, 4, 2, 128, .tied = true}; /* the needle's shape, other weights */
    model_world w;
    model_world_make(&w, &spec, 1);
    fkv_model *stranger = load(model_world_write(&w));
    fkv_runner *strange = model_runner(stranger, config);
    ck_status(fkv_seq_load(fkv_runner_cache(strange), &opened, path, &reloaded), FKV_FILE_FOREIGN);
    fkv_runner_close(strange);
    fkv_model_close(stranger);
    model_world_free(&w);
}
END_TEST

/* ---- texts ---- */

/* What llama2.c itself printed for the same weights: from the beginning token, 256 steps, greedy. */
START_TEST(stories_are_told_as_llama2c_tells_them) {
    enum { STEPS = 256 };
    char expected[2048] = "";
    char got[2048] = "";
    size_t n_got = 0;
    FILE *file = fopen("tests/data/stories_golden.txt", "rb");
    ck_assert_ptr_nonnull(file);
    size_t n_expected = fread(expected, 1, sizeof expected - 1, file);
    (void)fclose(file);
    while (n_expected > 0 && expected[n_expected - 1] == '\n') expected[--n_expected] = 0;

    fkv_model *model = load("tests/data/stories260K.gguf");
    uint32_t n_vocab = fkv_model_about(model)->n_vocab;
    fkv_runner_config config = config_of_bits(16, STEPS, 8);
    fkv_runner *runner = model_runner(model, config);
    fkv_seq seq = model_seq(runner, STEPS);
    fkv_sampler_config greedy = fkv_sampler_config_default();
    fkv_sampler *sampler = NULL;
    ck_ok(fkv_sampler_open(&greedy, n_vocab, &sampler));
    uint32_t token = fkv_model_about(model)->bos;
    for (uint32_t step = 0; step < STEPS; step++) {
        const float *logits = NULL;
        fkv_tokens row = {seq, &token, 1, FKV_LOGITS_LAST};
        ck_ok(fkv_runner_forward(runner, &row, 1, &logits));
        ck_ok(fkv_sample(sampler, logits, &token));
        if (token == fkv_model_about(model)->bos) break;
        size_t n = 0;
        const char *text = fkv_token_text(model, token, false, &n);
        ck_assert_uint_lt(n_got + n, sizeof got);
        memcpy(got + n_got, text, n);
        n_got += n;
    }
    const char *story = got[0] == ' ' ? got + 1 : got; /* the piece that begins a text brings a space */
    ck_assert_str_eq(story, expected);
    fkv_sampler_close(sampler);
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

START_TEST(a_planted_fact_is_found_again) {
    enum { TOKENS = 4096, ANSWER = 7 };
    static uint8_t text[1 << 16];
    static uint32_t tokens[TOKENS];
    const char fact[] = " The secret code of Tavorin is 4081936. ";
    const char ask[] = "\nQuestion: What is the secret code of Tavorin?\nAnswer: The secret code of Tavorin is ";
    uint32_t n_book = TOKENS - (uint32_t)strlen(fact) - (uint32_t)strlen(ask) - ANSWER;
    ck_assert_uint_gt(model_book(text, sizeof text), n_book);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = TOKENS;
    config.max_step_tokens = 512;
    fkv_runner *runner = model_runner(model, config);
    fkv_seq seq = model_seq(runner, TOKENS);
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_book; i++) {
        for (size_t j = 0; i == n_book / 3 && j < strlen(fact); j++) tokens[n++] = (uint8_t)fact[j];
        tokens[n++] = text[i];
    }
    for (size_t j = 0; j < strlen(ask); j++) tokens[n++] = (uint8_t)ask[j];
    model_run(runner, seq, tokens, n - 1, 512, NEEDLE_VOCAB, NULL);
    char answer[ANSWER + 1] = "";
    uint32_t token = tokens[n - 1];
    for (uint32_t i = 0; i < ANSWER; i++) {
        const float *logits = NULL;
        fkv_tokens row = {seq, &token, 1, FKV_LOGITS_LAST};
        ck_ok(fkv_runner_forward(runner, &row, 1, &logits));
        token = 0;
        for (uint32_t t = 1; t < NEEDLE_VOCAB; t++)
            if (logits[t] > logits[token]) token = t;
        answer[i] = (char)token;
    }
    ck_assert_str_eq(answer, "4081936");
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

/* ---- memory ---- */

START_TEST(a_runner_takes_what_it_planned_and_no_more) {
    enum { TOKENS = 2000 };
    static uint32_t tokens[TOKENS];
    model_book_tokens(0, tokens, TOKENS);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = 4096;
    config.max_step_tokens = 256;
    config.n_threads = 2;
    fkv_runner_plan plan;
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    ck_assert_uint_eq(plan.total_bytes, plan.cache.total_bytes + plan.activations_bytes);
    fkv_runner_close(model_runner(model, config)); /* what libraries set up at their first use */
    uint64_t before = cache_anonymous_bytes();
    fkv_runner *runner = model_runner(model, config);
    uint64_t opened = cache_anonymous_bytes();
    fkv_seq seq = model_seq(runner, TOKENS);
    model_run(runner, seq, tokens, TOKENS - 8, 256, NEEDLE_VOCAB, NULL);
    model_run(runner, seq, tokens + TOKENS - 8, 8, 1, NEEDLE_VOCAB, NULL);
    uint64_t after = cache_anonymous_bytes();
    printf("planned %" PRIu64 ", open took %" PRIu64 ", steps %" PRId64 "\n", plan.total_bytes, opened - before,
           (int64_t)(after - opened));
    if (!CACHE_WORLD_SANITIZED && before != 0) {
        const uint64_t slack = 64 * 1024; /* what the C library of a process may touch of its own */
        ck_assert_uint_le(opened - before, plan.total_bytes + slack);
        ck_assert_uint_ge(opened - before + slack, plan.total_bytes);
        ck_assert_uint_le(after, opened + slack);
    }
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

START_TEST(activations_do_not_grow_with_the_context) {
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    fkv_runner_plan small;
    fkv_runner_plan large;
    config.max_tokens = 1024;
    ck_ok(fkv_runner_plan_make(model, &config, &small));
    config.max_tokens = 131072;
    ck_ok(fkv_runner_plan_make(model, &config, &large));
    ck_assert_uint_eq(small.activations_bytes, large.activations_bytes);
    ck_assert_uint_gt(large.cache.slab_bytes, 40 * small.cache.slab_bytes);
    config.max_kv = 512;
    config.n_sinks = 4;
    ck_ok(fkv_runner_plan_make(model, &config, &large));
    ck_assert_uint_lt(large.cache.slab_bytes, 2 * small.cache.slab_bytes);
    fkv_model_close(model);
}
END_TEST

/* ---- refusals ---- */

START_TEST(a_refused_step_leaves_no_trace) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS + 1]; /* one row below is one too long */
    const uint32_t foreign[] = {5, NEEDLE_VOCAB};
    model_book_tokens(3000, tokens, SAME_TOKENS + 1);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = 4 * SAME_TOKENS;
    config.max_seqs = 3;
    config.max_step_tokens = 64;
    config.max_logit_rows = 10;
    fkv_runner *runner = model_runner(model, config);
    model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, 10, NEEDLE_VOCAB, expected);
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    fkv_seq other = model_seq(runner, 4);
    const float *logits = NULL;
    for (uint32_t at = 0; at < SAME_TOKENS; at += 10) {
        const fkv_tokens ask_too_much = {seq, tokens + at, 11, FKV_LOGITS_ALL};
        const fkv_tokens too_long = {seq, tokens, 65, FKV_LOGITS_NONE};
        const fkv_tokens unknown[] = {{seq, tokens + at, 3, FKV_LOGITS_LAST}, {other, foreign, 2, FKV_LOGITS_NONE}};
        const fkv_tokens twice[] = {{seq, tokens + at, 3, FKV_LOGITS_LAST}, {seq, tokens, 3, FKV_LOGITS_NONE}};
        const fkv_tokens full[] = {{seq, tokens + at, 3, FKV_LOGITS_LAST}, {other, tokens, 5, FKV_LOGITS_NONE}};
        const fkv_tokens none = {seq, tokens, 0, FKV_LOGITS_NONE};
        const fkv_tokens closed = {seq + 999, tokens, 1, FKV_LOGITS_NONE};
        ck_status(fkv_runner_forward(runner, &ask_too_much, 1, &logits), FKV_STEP_FULL);
        ck_status(fkv_runner_forward(runner, &too_long, 1, &logits), FKV_STEP_FULL);
        ck_status(fkv_runner_forward(runner, unknown, 2, &logits), FKV_BAD_ARGUMENT);
        ck_status(fkv_runner_forward(runner, twice, 2, &logits), FKV_BAD_ARGUMENT);
        ck_status(fkv_runner_forward(runner, full, 2, &logits), FKV_SEQ_FULL);
        ck_status(fkv_runner_forward(runner, unknown, 4, &logits), FKV_BAD_ARGUMENT);
        ck_status(fkv_runner_forward(runner, &none, 1, &logits), FKV_BAD_ARGUMENT);
        ck_status(fkv_runner_forward(runner, &closed, 1, &logits), FKV_BAD_SEQ);
        ck_status(fkv_runner_forward(runner, unknown, 1, NULL), FKV_BAD_ARGUMENT);
        model_run(runner, seq, tokens + at, 10, 10, NEEDLE_VOCAB, got + (size_t)at * NEEDLE_VOCAB);
    }
    check_same(got, expected, "between refusals");
    ck_assert(fkv_cache_consistent(fkv_runner_cache(runner)));
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

START_TEST(configurations_that_cannot_be_are_refused) {
    fkv_model *model = load("models/needle");
    fkv_runner *runner = NULL;
    fkv_runner_plan plan;
    fkv_runner_config good = fkv_runner_config_default();
    good.max_tokens = 1024;
    fkv_runner_config bad = good;
    bad.max_logit_rows = 0;
    ck_status(fkv_runner_open(model, &bad, &runner), FKV_BAD_CONFIG);
    bad.max_logit_rows = bad.max_step_tokens + 1;
    ck_status(fkv_runner_open(model, &bad, &runner), FKV_BAD_CONFIG);
    bad = good;
    bad.n_sinks = 4;
    ck_status(fkv_runner_open(model, &bad, &runner), FKV_BAD_CONFIG);
    bad = good;
    bad.k = (fkv_codec_config){8, 48, FKV_CODEC_AUTO};
    ck_status(fkv_runner_open(model, &bad, &runner), FKV_BAD_CONFIG);
    bad = good;
    ck_ok(fkv_runner_plan_make(model, &good, &plan));
    bad.memory_limit = plan.total_bytes - 1;
    ck_status(fkv_runner_open(model, &bad, &runner), FKV_NO_MEMORY);
    bad.memory_limit = plan.total_bytes;
    ck_ok(fkv_runner_open(model, &bad, &runner));
    fkv_runner_close(runner);
    runner = NULL;
    ck_status(fkv_runner_open(NULL, &good, &runner), FKV_BAD_ARGUMENT);
    ck_status(fkv_runner_plan_make(model, NULL, &plan), FKV_BAD_ARGUMENT);
    ck_assert_ptr_null(runner);
    fkv_runner_close(NULL);
    fkv_model_close(model);
}
END_TEST

TEST_MAIN("runner", logits_agree_with_a_plain_pass_of_every_architecture, a_bounded_context_sees_its_window_and_the_sinks,
          a_bound_leaves_smaller_windows_alone, heads_that_no_group_divides_are_padded_inside_pages,
          large_biases_of_keys_cost_the_other_numbers_nothing, layers_that_share_pages_are_not_planned_for,
          logits_of_gemma_4_are_the_same_bits_in_chunks_and_token_by_token, logits_are_the_same_bits_however_a_token_got_there,
          a_saved_prompt_goes_on_with_the_same_bits_and_in_no_other_model, stories_are_told_as_llama2c_tells_them,
          a_planted_fact_is_found_again, a_runner_takes_what_it_planned_and_no_more, activations_do_not_grow_with_the_context,
          a_refused_step_leaves_no_trace, configurations_that_cannot_be_are_refused)
