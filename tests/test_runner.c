/* Tests of running models: logits of every architecture match a reference pass, outputs are bit-identical however tokens are
 * batched, two real models generate the expected texts, memory use equals the plan, and failed steps have no side effects. */
#include "cache_fixture.h"
#include "golden_models.h"
#include "model_fixture.h"
#include "test.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Tolerance of logits with 16-bit pages. Keys and values are rounded to 11-bit significands; all other values are floats. A wrong
 * head, RoPE base, window or norm causes an error of more than 0.1. */
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
    for (uint32_t i = 0; i < n; i++) tokens[i] %= MODEL_FIXTURE_VOCAB;
}

/* ---- comparison with the reference pass ---- */

enum { PLAIN_TOKENS = 50 };

static void check_plain(const model_spec *spec, fkv_runner_config config) {
    static float expected[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    model_fixture w;
    uint32_t tokens[PLAIN_TOKENS];
    random_tokens(3, tokens, PLAIN_TOKENS);
    model_fixture_make(&w, spec, 5);
    model_fixture_reference(&w, tokens, PLAIN_TOKENS, expected);
    fkv_model *model = load(model_fixture_write(&w));
    fkv_runner *runner = model_runner(model, config);
    model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 13, MODEL_FIXTURE_VOCAB, got);
    double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_FIXTURE_VOCAB);
    printf("%s head %u, %u/%u bits: relative error %.2e\n", spec->type, spec->head_dim, config.k.bits, config.v.bits, apart);
    ck_assert_msg(apart <= PLAIN_TOLERANCE, "%s: logits have a relative error of %g", spec->type, apart);
    fkv_runner_close(runner);
    fkv_model_close(model);
    model_fixture_free(&w);
}

static const model_spec SPECS[] = {
    {"llama", 2, 64, 128, 4, 2, 16, .tied = true},
    {"llama", 2, 80, 172, 3, 1, 24, .tied = false}, /* no dimension is a multiple of 32 */
    {"qwen2", 3, 96, 160, 6, 2, 32, .tied = false},
    {"qwen3", 2, 64, 128, 4, 4, 64, .tied = true},
    {"gemma3_text", 5, 64, 96, 4, 1, 32, .window = 10, .pattern = 3, .tied = true},
};

START_TEST(logits_of_every_architecture_match_the_reference) {
    for (size_t i = 0; i < N_OF(SPECS); i++) check_plain(&SPECS[i], config_of_bits(16, PLAIN_TOKENS, 16));
}
END_TEST

START_TEST(bounded_context_attends_to_its_window_and_sinks) {
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

/* max_kv must not change the windows of Gemma's window layers, which are smaller than max_kv. Only full-attention layers get a
 * window of max_kv tokens and sinks. */
START_TEST(bound_does_not_widen_smaller_windows) {
    model_spec spec = SPECS[N_OF(SPECS) - 1];
    fkv_runner_config config = config_of_bits(16, PLAIN_TOKENS, 16);
    config.max_kv = 20;
    spec.bound = 20;
    check_plain(&spec, config);
}
END_TEST

START_TEST(heads_not_divisible_by_a_group_are_padded_in_pages) {
    model_spec spec = {"llama", 2, 80, 172, 6, 2, 24, .tied = true};
    model_fixture w;
    uint32_t tokens[PLAIN_TOKENS];
    static float expected[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    random_tokens(4, tokens, PLAIN_TOKENS);
    model_fixture_make(&w, &spec, 6);
    model_fixture_reference(&w, tokens, PLAIN_TOKENS, expected);
    fkv_model *model = load(model_fixture_write(&w));
    const fkv_rotate rotations[] = {FKV_ROTATE_NONE, FKV_ROTATE_KV};
    for (size_t i = 0; i < N_OF(rotations); i++) {
        fkv_runner_config config = config_of_bits(8, PLAIN_TOKENS, 16);
        config.v.group = 64;
        config.rotate = rotations[i];
        fkv_runner *runner = model_runner(model, config);
        model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 16, MODEL_FIXTURE_VOCAB, got);
        double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_FIXTURE_VOCAB);
        printf("8 bits, heads of 24 in groups of 32 and 64, rotation %d: relative error %.2e\n", (int)rotations[i], apart);
        /* tolerance for 8-bit codes with sharp attention; a misplaced head would cause an error of more than 0.5 */
        ck_assert_double_le(apart, 3e-2);
        fkv_runner_close(runner);
    }
    fkv_model_close(model);
    model_fixture_free(&w);
}
END_TEST

/* As in Qwen2, the keys of each head have a pair of slowly rotating channels whose bias is hundreds of times larger than that of
 * other channels. If the biases were part of the quantized keys, they would determine the scale of their group of 8-bit codes,
 * and only a few levels would remain for the other channels. */
START_TEST(large_key_biases_do_not_reduce_precision) {
    model_spec spec = {"qwen2", 3, 96, 160, 6, 2, 32, .tied = false};
    model_fixture w;
    uint32_t tokens[PLAIN_TOKENS];
    static float expected[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    static float got[PLAIN_TOKENS * MODEL_FIXTURE_VOCAB];
    random_tokens(7, tokens, PLAIN_TOKENS);
    model_fixture_make(&w, &spec, 8);
    for (uint32_t i = 0; i < spec.n_layers; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%u.self_attn.k_proj.bias", i);
        float *bias = model_fixture_tensor(&w, name)->numbers;
        for (uint32_t head = 0; head < spec.n_kv_heads; head++) bias[head * 32 + 15] = 300.0f;
    }
    model_fixture_reference(&w, tokens, PLAIN_TOKENS, expected);
    fkv_model *model = load(model_fixture_write(&w));
    fkv_runner *runner = model_runner(model, config_of_bits(8, PLAIN_TOKENS, 16));
    model_run(runner, model_seq(runner, PLAIN_TOKENS), tokens, PLAIN_TOKENS, 16, MODEL_FIXTURE_VOCAB, got);
    double apart = relative_l2(got, expected, PLAIN_TOKENS * MODEL_FIXTURE_VOCAB);
    printf("8 bits, K biases of 300: relative error %.2e\n", apart);
    ck_assert_double_le(apart, 3e-2); /* the tolerance is the same as without large key biases */
    fkv_runner_close(runner);
    fkv_model_close(model);
    model_fixture_free(&w);
}
END_TEST

/* Two of six layers attend to the pages of other layers. The plan has four layers, two with one head of 64 channels and two with
 * one head of 128 channels, at 16 bits per value. */
START_TEST(layers_that_share_pages_are_not_planned) {
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

/* llama4_scout attends within chunks of 256 tokens, although its context has 4096 tokens. */
START_TEST(chunked_attention_is_limited_to_one_chunk) {
    static golden_model golden;
    golden_model_open(&golden, "llama4_scout");
    fkv_model *model = load(golden.folder);
    fkv_runner *runner = NULL;
    fkv_runner_config config = model_runner_config(16, 257, 16);
    ck_assert_uint_eq(fkv_model_about(model)->context, 256);
    ck_status(fkv_runner_open(model, &config, &runner), FKV_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "chunks of 256 tokens"));
    config.max_tokens = 0; /* 0 selects the longest supported context */
    ck_ok(fkv_runner_open(model, &config, &runner));
    fkv_runner_close(runner);
    fkv_model_close(model);
    golden_model_close(&golden);
}
END_TEST

START_TEST(embeddings_require_their_runner) {
    fkv_model *model = load("models/needle");
    const uint32_t tokens[] = {97, 98, 99};
    const uint32_t dim = fkv_model_about(model)->dim;
    float *values = calloc(dim, sizeof *values);
    ck_assert_ptr_nonnull(values);
    fkv_runner_config config = model_runner_config(16, 16, 4);
    fkv_runner *runner = model_runner(model, config);
    ck_status(fkv_embed(runner, tokens, 3, dim, values), FKV_BAD_STATE);
    fkv_runner_close(runner);
    config.embeddings = true;
    runner = model_runner(model, config);
    ck_status(fkv_embed(runner, tokens, 0, dim, values), FKV_BAD_ARGUMENT);
    ck_status(fkv_embed(runner, tokens, 3, dim + 1, values), FKV_BAD_ARGUMENT);
    ck_status(fkv_embed(runner, tokens, 3, 0, values), FKV_BAD_ARGUMENT);
    ck_status(fkv_embed(runner, tokens, 17, dim, values), FKV_BAD_ARGUMENT);
    ck_status(fkv_embed(NULL, tokens, 3, dim, values), FKV_BAD_ARGUMENT);
    for (int i = 0; i < 3; i++) ck_ok(fkv_embed(runner, tokens, 3, dim, values)); /* every call frees its sequence */
    ck_assert(fkv_cache_consistent(fkv_runner_cache(runner)));
    fkv_runner_close(runner);
    free(values);
    fkv_model_close(model);
}
END_TEST

/* ---- bit-identical outputs ---- */

/* The models cover layers that share pages, per-layer inputs, experts in addition to a feed-forward block, gated attention, every
 * kind of routing and activation, value heads whose dimension differs from that of key heads, and layers whose rows have
 * different widths but share scratch memory. */
START_TEST(logits_of_all_features_are_bit_identical_in_chunks_and_single_tokens) {
    static const char *const names[] = {"gemma4_small", "gemma4_moe", "afmoe",       "llama4_scout",         "apertus",
                                        "starcoder2",   "phimoe",     "ernie45_moe", "hunyuan_dense_biases", "mimo_v2_flash"};
    enum { N_TOKENS = 50 };
    static float chunked[N_TOKENS * GOLDEN_VOCAB];
    static float single[N_TOKENS * GOLDEN_VOCAB];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
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

/* Runs the sequence in uneven chunks, together with two other sequences in the same steps. */
static void run_among_others(fkv_runner *runner, const uint32_t *tokens, float *logits) {
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    fkv_seq before = model_seq(runner, SAME_TOKENS);
    fkv_seq after = model_seq(runner, SAME_TOKENS);
    uint32_t at = 0;
    for (uint32_t round = 0; at < SAME_TOKENS; round++) {
        uint32_t n = 1 + round * 5 % 11;
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
        if (n_threads > 1 || !TEST_SANITIZED) {
            model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, 1, NEEDLE_VOCAB, other);
            check_same(other, whole, "one by one");
            model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, 17, NEEDLE_VOCAB, other);
            check_same(other, whole, "in chunks of 17");
            run_among_others(runner, tokens, other);
            check_same(other, whole, "in a batch");
        }
        fkv_runner_close(runner);
    }
}

START_TEST(logits_are_bit_identical_in_chunks_and_batches) {
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.page_tokens = 16; /* small pages, so that some are sealed */
    check_same_bits(model, config);
    config.k = (fkv_codec_config){8, 64, FKV_CODEC_AUTO};
    config.v = (fkv_codec_config){4, 64, FKV_CODEC_AUTO};
    check_same_bits(model, config);
    fkv_model_close(model);
}
END_TEST

START_TEST(saved_prompt_continues_bit_identically_in_the_same_model_only) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS];
    char path[512];
    (void)cache_path(path, "prompt.fkv");
    model_book_tokens(2000, tokens, SAME_TOKENS);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = 3 * SAME_TOKENS;
    config.page_tokens = 16; /* small pages, so that some are sealed */
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

    model_spec spec = {"qwen3", 4, 256, 640, 4, 2, 128, .tied = true}; /* another model with the same shape as the needle model */
    model_fixture w;
    model_fixture_make(&w, &spec, 1);
    fkv_model *stranger = load(model_fixture_write(&w));
    fkv_runner *strange = model_runner(stranger, config);
    ck_status(fkv_seq_load(fkv_runner_cache(strange), &opened, path, &reloaded), FKV_FILE_FOREIGN);
    fkv_runner_close(strange);
    fkv_model_close(stranger);
    model_fixture_free(&w);
}
END_TEST

/* A prompt continues after a prefix that ends inside a page. The first chunk after the prefix is shorter, so that all chunks
 * except the last end at page boundaries. */
START_TEST(chunks_after_an_unaligned_prefix_end_at_page_boundaries) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[SAME_TOKENS * NEEDLE_VOCAB];
    enum { STEP = 64, PREFIX = 21 };
    uint32_t tokens[SAME_TOKENS];
    model_book_tokens(3000, tokens, SAME_TOKENS);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = 4 * SAME_TOKENS;
    config.max_seqs = 2;
    config.page_tokens = 16;
    config.max_step_tokens = config.max_logit_rows = STEP;
    fkv_runner *runner = model_runner(model, config);
    model_run(runner, model_seq(runner, SAME_TOKENS), tokens, SAME_TOKENS, STEP, NEEDLE_VOCAB, expected);
    const fkv_seq seq = model_seq(runner, SAME_TOKENS);
    model_run(runner, seq, tokens, PREFIX, PREFIX, NEEDLE_VOCAB, got);
    static const uint32_t ends[] = {80, 144, SAME_TOKENS};
    uint32_t length = PREFIX;
    for (uint32_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const uint32_t n = fkv_runner_chunk(runner, length, SAME_TOKENS - length);
        ck_assert_uint_eq(length + n, ends[i]);
        model_run(runner, seq, tokens + length, n, n, NEEDLE_VOCAB, got + (size_t)length * NEEDLE_VOCAB);
        length += n;
    }
    check_same(got, expected, "after an unaligned prefix");
    ck_assert_uint_eq(fkv_runner_chunk(runner, length, 0), 0);
    ck_assert_uint_eq(fkv_runner_chunk(NULL, 0, 1), 0);
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

/* Truncates a sequence repeatedly, mostly by more than a page, and checks the logits of the next tokens. */
START_TEST(truncation_to_any_length_recomputes_what_is_sealed) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[2 * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS];
    model_book_tokens(2000, tokens, SAME_TOKENS);
    fkv_model *model = load("models/needle");
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = SAME_TOKENS;
    config.page_tokens = 16; /* small pages, so that some are sealed */
    config.max_step_tokens = 40;
    config.max_logit_rows = 40;
    fkv_runner *runner = model_runner(model, config);
    fkv_cache *cache = fkv_runner_cache(runner);
    fkv_seq seq = model_seq(runner, SAME_TOKENS);
    model_run(runner, seq, tokens, SAME_TOKENS, 40, NEEDLE_VOCAB, expected);
    uint32_t n_recomputed = 0;
    for (uint32_t length = SAME_TOKENS - 2; length > 100; length -= 23) {
        n_recomputed += fkv_seq_truncate(cache, seq, length) == FKV_GONE;
        ck_ok(fkv_runner_truncate(runner, seq, tokens, length));
        model_run(runner, seq, tokens + length, 2, 2, NEEDLE_VOCAB, got);
        ck_assert_mem_eq(got, expected + (size_t)length * NEEDLE_VOCAB, sizeof got);
    }
    ck_assert_uint_gt(n_recomputed, 0);
    ck_status(fkv_runner_truncate(runner, seq, tokens, SAME_TOKENS), FKV_BAD_ARGUMENT); /* longer than the sequence */
    ck_status(fkv_runner_truncate(runner, seq, NULL, 10), FKV_BAD_ARGUMENT);
    ck_status(fkv_runner_truncate(NULL, seq, tokens, 10), FKV_BAD_ARGUMENT);
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

/* ---- generated texts ---- */

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
    const char *story = got[0] == ' ' ? got + 1 : got; /* skips the space with which the first token begins */
    ck_assert_uint_ge(n_got, STEPS);                   /* most tokens have several letters */
    if (STEPS < ALL_STEPS) expected[strlen(story)] = 0;
    ck_assert_str_eq(story, expected);
    fkv_sampler_close(sampler);
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

START_TEST(planted_fact_is_found) {
    enum { TOKENS = TEST_SANITIZED ? 1024 : 4096, ANSWER = 7 };
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

START_TEST(runner_uses_exactly_the_planned_memory) {
    enum { TOKENS = TEST_SANITIZED ? 600 : 2000 };
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
    /* opens a first runner, so that one-time allocations of libraries are not measured */
    fkv_runner_close(model_runner(model, config));
    uint64_t before = cache_anonymous_bytes();
    fkv_runner *runner = model_runner(model, config);
    uint64_t opened = cache_anonymous_bytes();
    fkv_seq seq = model_seq(runner, TOKENS);
    model_run(runner, seq, tokens, TOKENS - 8, 256, NEEDLE_VOCAB, NULL);
    model_run(runner, seq, tokens + TOKENS - 8, 8, 1, NEEDLE_VOCAB, NULL);
    uint64_t after = cache_anonymous_bytes();
    printf("bytes planned %" PRIu64 ", resident after opening %" PRIu64 ", added by steps %" PRId64 "\n", plan.total_bytes,
           opened - before, (int64_t)(after - opened));
    if (!TEST_SANITIZED && before != 0) {
        const uint64_t slack = 64 * 1024; /* tolerance in bytes, because the C library may touch memory by itself */
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

/* ---- rejected steps ---- */

START_TEST(rejected_step_has_no_effect) {
    static float expected[SAME_TOKENS * NEEDLE_VOCAB];
    static float got[SAME_TOKENS * NEEDLE_VOCAB];
    uint32_t tokens[SAME_TOKENS + 1]; /* one extra token, for the last step with 11 tokens */
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
    check_same(got, expected, "between rejected steps");
    ck_assert(fkv_cache_consistent(fkv_runner_cache(runner)));
    fkv_runner_close(runner);
    fkv_model_close(model);
}
END_TEST

START_TEST(invalid_configurations_are_rejected) {
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

TEST_MAIN("runner", logits_of_every_architecture_match_the_reference, bounded_context_attends_to_its_window_and_sinks,
          bound_does_not_widen_smaller_windows, heads_not_divisible_by_a_group_are_padded_in_pages,
          large_key_biases_do_not_reduce_precision, layers_that_share_pages_are_not_planned,
          chunked_attention_is_limited_to_one_chunk, embeddings_require_their_runner,
          logits_of_all_features_are_bit_identical_in_chunks_and_single_tokens, logits_are_bit_identical_in_chunks_and_batches,
          saved_prompt_continues_bit_identically_in_the_same_model_only, chunks_after_an_unaligned_prefix_end_at_page_boundaries,
          truncation_to_any_length_recomputes_what_is_sealed, stories_match_the_output_of_llama2c, planted_fact_is_found,
          runner_uses_exactly_the_planned_memory, activations_do_not_grow_with_the_context, rejected_step_has_no_effect,
          invalid_configurations_are_rejected)
