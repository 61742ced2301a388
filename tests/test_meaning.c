/* That the outputs mean attention: every layer, token by token, against softmax over the rows as they were before any codec saw
 * them, computed in double by code that shares nothing with the library (cache_world_truth).
 *
 * So this sees what no comparison among kernels can: a mask off by one, a scale left out, K taken for V, a rotation not undone, a
 * page of another sequence. Codecs are lossy, hence the tolerances; each has a name and a reason.
 */
#include "cache_world.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

/* Relative L2 over all tokens of a layer. */
#define HALF_F16 1e-3   /* 11 bits of every number: 2^-12 of its size on average, and sums are better */
#define HALF_BF16 5e-3  /* 8 bits */
#define AFFINE_8 2e-2   /* 256 steps over about 5 standard deviations of a group */
#define AFFINE_8_4 0.15 /* 16 steps for V: an error of a tenth of a standard deviation in each number */
#define AFFINE_4 0.2    /* and for K: the weights move too */
#define AFFINE_4_2 0.6  /* 4 steps for V: little more than a direction is left */
#define TOKEN_SLACK 4.0 /* one token alone may be off by this many times the tolerance */

enum { N_TOKENS = 150, STEP_TOKENS = 40 };

typedef struct meaning {
    const char *name;
    uint32_t n_layers;
    fkv_layer_config layers[3];
    fkv_type row_type;
    fkv_type page_type;
    fkv_rotate rotate;
    uint32_t page_tokens;
    float outliers;
    double tolerance[3];
} meaning;

static const float SINK_LOGITS[] = {0.7f, 3.0f, -1.0f, 5.0f};

/* Layers: H, G, D, window, sinks, scale, softcap, k, v, learned sinks. */
static const meaning MEANINGS[] = {
    {"f32 rows in f16 pages: grouped, single and many KV heads",
     3,
     {{4, 2, 64, 0, 0, 0, 0, {16, 0}, {16, 0}},
      {5, 1, 80, 0, 0, 0, 0, {16, 0}, {16, 0}},
      {3, 3, 16, 0, 0, 0, 0, {16, 0}, {16, 0}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_NONE,
     16,
     1.0f,
     {HALF_F16, HALF_F16, HALF_F16}},
    {"f16 rows in f16 pages: windows of one, of less than a page and of several, sinks in and over a page",
     3,
     {{2, 1, 64, 1, 0, 0, 0, {16, 0}, {16, 0}},
      {2, 1, 64, 7, 3, 0, 0, {16, 0}, {16, 0}},
      {2, 1, 64, 50, 21, 0, 0, {16, 0}, {16, 0}}},
     FKV_F16,
     FKV_F16,
     FKV_ROTATE_NONE,
     16,
     1.0f,
     {HALF_F16, HALF_F16, HALF_F16}},
    {"bf16 rows in bf16 pages: scale and soft-cap",
     3,
     {{4, 2, 32, 0, 0, 0.9f, 0, {16, 0}, {16, 0}},
      {4, 2, 32, 0, 0, 1.5f, 4.0f, {16, 0}, {16, 0}},
      {4, 2, 32, 20, 1, 0.01f, 0.5f, {16, 0}, {16, 0}}},
     FKV_BF16,
     FKV_BF16,
     FKV_ROTATE_NONE,
     32,
     1.0f,
     {HALF_BF16, HALF_BF16, HALF_BF16}},
    {"learned sinks: full, behind a window with kept tokens, above a soft cap",
     3,
     {{4, 2, 64, 0, 0, 0, 0, {16, 0}, {16, 0}, SINK_LOGITS},
      {4, 1, 64, 30, 4, 0.5f, 0, {16, 0}, {16, 0}, SINK_LOGITS},
      {2, 2, 32, 0, 0, 1.5f, 2.0f, {16, 0}, {16, 0}, SINK_LOGITS + 1}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     32,
     1.0f,
     {HALF_F16, HALF_F16, HALF_F16}},
    {"rotated 16 bits: the rotation cancels",
     2,
     {{4, 2, 96, 0, 0, 0, 0, {16, 0}, {16, 0}}, {2, 1, 112, 30, 4, 0, 0, {16, 0}, {16, 0}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     64,
     1.0f,
     {HALF_F16, HALF_F16}},
    {"8/8: full and window, dimensions of their own",
     3,
     {{4, 2, 64, 0, 0, 0, 0, {8, 64}, {8, 32}},
      {4, 1, 128, 33, 5, 0, 0, {8, 128}, {8, 64}},
      {8, 2, 32, 0, 0, 0, 30.0f, {8, 32}, {8, 32}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_NONE,
     16,
     1.0f,
     {AFFINE_8, AFFINE_8, AFFINE_8}},
    {"16-bit windows beside K8/V4 full layers, keys with a few large channels",
     3,
     {{4, 2, 128, 0, 0, 0.02f, 0, {8, 64}, {4, 64}},
      {4, 2, 64, 24, 0, 0.05f, 0, {16, 0}, {16, 0}},
      {4, 2, 128, 0, 0, 0.02f, 0, {8, 64}, {4, 64}}},
     FKV_F16,
     FKV_F16,
     FKV_ROTATE_NONE,
     64,
     20.0f,
     {AFFINE_8_4, 2 * HALF_F16, AFFINE_8_4}},
    {"8/8 with K rotated, bf16 scales",
     2,
     {{4, 2, 64, 0, 0, 0, 0, {8, 32}, {8, 32}}, {2, 2, 96, 40, 4, 0, 0, {8, 32}, {8, 32}}},
     FKV_F32,
     FKV_BF16,
     FKV_ROTATE_K,
     128,
     1.0f,
     {AFFINE_8, AFFINE_8}},
    {"8/8 with V rotated, bf16 scales",
     2,
     {{4, 2, 64, 0, 0, 0, 0, {8, 32}, {8, 32}}, {2, 2, 96, 40, 4, 0, 0, {8, 32}, {8, 32}}},
     FKV_F32,
     FKV_BF16,
     FKV_ROTATE_V,
     128,
     1.0f,
     {AFFINE_8, AFFINE_8}},
    {"K4/V4 and K4/V2, both sides rotated, large channels",
     2,
     {{4, 2, 64, 0, 0, 0.02f, 0, {4, 32}, {4, 64}}, {4, 2, 128, 0, 0, 0.02f, 0, {4, 64}, {2, 32}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     16,
     20.0f,
     {AFFINE_4, AFFINE_4_2}},
    {"sealed: full, behind a window, values in affine groups, large channels",
     3,
     {{4, 2, 64, 0, 0, 0.02f, 0, {4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}},
      {4, 1, 96, 50, 4, 0.02f, 0, {4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}},
      {2, 2, 128, 0, 0, 0.02f, 0, {4, 0, FKV_CODEC_SEALED}, {4, 64}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     16,
     20.0f,
     {AFFINE_8_4, AFFINE_8_4, AFFINE_8_4}},
    {"TurboQuant of 4 and 3 bits, and V of 4 beside K8, large channels",
     3,
     {{4, 2, 64, 0, 0, 0.02f, 0, {4, 0, FKV_CODEC_TURBO}, {4, 0, FKV_CODEC_TURBO}},
      {4, 2, 128, 50, 3, 0.02f, 0, {3, 0, FKV_CODEC_TURBO}, {3, 0, FKV_CODEC_TURBO}},
      {4, 2, 64, 0, 0, 0.02f, 0, {8, 64}, {4, 0, FKV_CODEC_TURBO}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     16,
     20.0f,
     {AFFINE_4, 2 * AFFINE_4, AFFINE_8_4}},
};

static fkv_config config_of(const meaning *m) {
    fkv_config config = fkv_config_default();
    config.n_layers = m->n_layers;
    config.layers = m->layers;
    config.row_type = m->row_type;
    config.page_type = m->page_type;
    config.rotate = m->rotate;
    config.rotation_seed = 17;
    config.page_tokens = m->page_tokens;
    config.max_tokens = 2 * N_TOKENS;
    config.max_seqs = 2;
    config.max_step_tokens = STEP_TOKENS;
    config.n_threads = 2;
    return config;
}

/* Outputs of tokens [from, to) of one layer against the truth: their relative L2 as a whole. */
static double error_of(const cache_world *w, const uint32_t *tokens, const uint8_t *outputs, uint32_t from, uint32_t to,
                       uint32_t layer, double tolerance, const char *name) {
    const fkv_layer_config *l = cache_world_layer(w, layer);
    size_t n = (size_t)l->n_q_heads * l->head_dim;
    float *got = malloc((to - from) * n * sizeof *got);
    float *truth = malloc((to - from) * n * sizeof *truth);
    ck_assert(got != NULL && truth != NULL);
    cache_world_truth(w, tokens, from, to, layer, truth);
    for (uint32_t t = from; t < to; t++) {
        float *one = got + (t - from) * n;
        cache_world_output(w, outputs, t, layer, one);
        double error = relative_l2(one, truth + (t - from) * n, n);
        ck_assert_msg(error <= TOKEN_SLACK * tolerance, "%s: layer %u token %u is off by %g", name, layer, t, error);
    }
    double error = relative_l2(got, truth, (to - from) * n);
    free(got);
    free(truth);
    return error;
}

/* In chunks and then one by one, beside a second sequence of other tokens. */
START_TEST(outputs_are_attention_over_the_rows_as_given) {
    for (size_t i = 0; i < N_OF(MEANINGS); i++) {
        const meaning *m = &MEANINGS[i];
        fkv_config config = config_of(m);
        cache_world w;
        ck_ok(cache_world_open(&w, &config));
        w.outliers = m->outliers;
        uint32_t tokens[2][N_TOKENS];
        uint8_t *outputs[2];
        fkv_seq seqs[2];
        for (uint32_t s = 0; s < 2; s++) {
            cache_tokens(10 * i + s, tokens[s], N_TOKENS);
            outputs[s] = malloc(N_TOKENS * w.output_bytes);
            ck_assert_ptr_nonnull(outputs[s]);
            seqs[s] = cache_world_seq(&w, N_TOKENS);
        }
        for (uint32_t t = 0; t < N_TOKENS;) {
            uint32_t n = t < 100 ? 20 : 1;
            cache_chunk chunks[] = {{seqs[0], tokens[0], t, n, outputs[0]}, {seqs[1], tokens[1], t, n, outputs[1]}};
            cache_world_step(&w, chunks, 2, CACHE_COMMIT);
            t += n;
        }
        printf("%s:", m->name);
        for (uint32_t layer = 0; layer < m->n_layers; layer++) {
            double error = error_of(&w, tokens[0], outputs[0], 0, N_TOKENS, layer, m->tolerance[layer], m->name);
            double other = error_of(&w, tokens[1], outputs[1], 0, N_TOKENS, layer, m->tolerance[layer], m->name);
            printf(" %.2g", error > other ? error : other);
            ck_assert_msg(error <= m->tolerance[layer] && other <= m->tolerance[layer], "%s: layer %u is off by %g and %g",
                          m->name, layer, error, other);
        }
        printf("\n");
        for (uint32_t s = 0; s < 2; s++) free(outputs[s]);
        cache_world_close(&w);
    }
}
END_TEST

/* ---- settings that must reach the pages ---- */

typedef struct setting {
    const char *name;
    fkv_rotate rotate;
    uint64_t seed;
    fkv_type page_type;
    fkv_codec_config k;
    fkv_codec_config v;
} setting;

enum { N_SETTING = 64 };

/* Outputs of N_SETTING tokens of one layer, keys with large channels; returns their error. */
static double outputs_under(const setting *set, float *outputs) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = (fkv_layer_config){2, 1, 64, 0, 0, 0.02f, 0, set->k, set->v};
    config.rotate = set->rotate;
    config.rotation_seed = set->seed;
    config.page_type = set->page_type;
    config.max_tokens = N_SETTING;
    config.n_threads = 1;
    cache_world w;
    ck_ok(cache_world_open(&w, &config));
    w.outliers = 20.0f;
    uint32_t tokens[N_SETTING];
    float truth[N_SETTING * 2 * 64];
    cache_tokens(4, tokens, N_SETTING);
    cache_world_run(&w, cache_world_seq(&w, N_SETTING), tokens, 0, N_SETTING, 8, (uint8_t *)outputs);
    cache_world_truth(&w, tokens, 0, N_SETTING, 0, truth);
    cache_world_close(&w);
    return relative_l2(outputs, truth, N_OF(truth));
}

START_TEST(every_setting_of_codec_and_rotation_reaches_the_pages) {
    static const setting settings[] = {
        {"4/4", FKV_ROTATE_NONE, 1, FKV_F16, {4, 64}, {4, 64}},
        {"K rotated", FKV_ROTATE_K, 1, FKV_F16, {4, 64}, {4, 64}},
        {"V rotated", FKV_ROTATE_V, 1, FKV_F16, {4, 64}, {4, 64}},
        {"both rotated", FKV_ROTATE_KV, 1, FKV_F16, {4, 64}, {4, 64}},
        {"another seed", FKV_ROTATE_KV, 2, FKV_F16, {4, 64}, {4, 64}},
        {"bf16 scales", FKV_ROTATE_NONE, 1, FKV_BF16, {4, 64}, {4, 64}},
        {"K in small groups", FKV_ROTATE_NONE, 1, FKV_F16, {4, 32}, {4, 64}},
        {"V in small groups", FKV_ROTATE_NONE, 1, FKV_F16, {4, 64}, {4, 32}},
        {"K of 8 bits", FKV_ROTATE_NONE, 1, FKV_F16, {8, 64}, {4, 64}},
        {"V of 8 bits", FKV_ROTATE_NONE, 1, FKV_F16, {4, 64}, {8, 64}},
    };
    static float outputs[N_OF(settings)][N_SETTING * 2 * 64];
    double errors[N_OF(settings)];
    for (size_t i = 0; i < N_OF(settings); i++) {
        errors[i] = outputs_under(&settings[i], outputs[i]);
        for (size_t k = 0; k < i; k++)
            ck_assert_msg(memcmp(outputs[i], outputs[k], sizeof outputs[i]) != 0, "%s gives what %s gives", settings[i].name,
                          settings[k].name);
    }
    /* what rotation and more bits are for, where a few channels of K are large */
    ck_assert_double_lt(errors[1], 0.9 * errors[0]);
    ck_assert_double_lt(errors[8], 0.9 * errors[0]);
    ck_assert_double_lt(errors[9], 0.9 * errors[0]);
}
END_TEST

/* ---- bounded context and few bits together ---- */

enum { WINDOW = 64, SINKS = 4, PAST_THE_BOUND = 180, BOUNDED = WINDOW + SINKS + PAST_THE_BOUND };

static fkv_config bounded_config(const fkv_layer_config *layer) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = *layer;
    config.page_tokens = 16;
    config.max_tokens = BOUNDED;
    config.max_step_tokens = 32;
    config.rotate = FKV_ROTATE_K;
    config.n_threads = 1;
    return config;
}

START_TEST(steps_past_a_bounded_context_see_the_kept_tokens_and_the_window) {
    static const struct {
        fkv_codec_config k;
        fkv_codec_config v;
        double tolerance;
    } ways[] = {{{16, 0}, {16, 0}, HALF_F16},
                {{8, 64}, {8, 64}, AFFINE_8},
                {{8, 64}, {4, 32}, AFFINE_8_4},
                {{4, 32}, {2, 32}, AFFINE_4_2}};
    for (size_t i = 0; i < N_OF(ways); i++) {
        fkv_layer_config layer = {4, 2, 64, WINDOW, SINKS, 0, 0, ways[i].k, ways[i].v};
        fkv_config config = bounded_config(&layer);
        cache_world w;
        ck_ok(cache_world_open(&w, &config));
        uint32_t tokens[BOUNDED];
        cache_tokens(77, tokens, BOUNDED);
        uint8_t *outputs = malloc(BOUNDED * w.output_bytes);
        ck_assert_ptr_nonnull(outputs);
        fkv_seq seq = cache_world_seq(&w, BOUNDED);
        cache_world_run(&w, seq, tokens, 0, WINDOW + SINKS, 32, outputs);
        uint32_t most = 0;
        for (uint32_t t = WINDOW + SINKS; t < BOUNDED; t++) {
            cache_world_run(&w, seq, tokens, t, t + 1, 1, outputs);
            uint32_t held = cache_world_stats(&w).groups[0].held;
            if (held > most) most = held;
        }
        ck_assert_uint_le(most, 1 + WINDOW / 16 + 1); /* memory is bounded too: sinks, and a window wherever it begins */
        double error = error_of(&w, tokens, outputs, WINDOW + SINKS, BOUNDED, 0, ways[i].tolerance, "bounded");
        ck_assert_msg(error <= ways[i].tolerance, "K%u/V%u is off by %g", ways[i].k.bits, ways[i].v.bits, error);
        free(outputs);
        cache_world_close(&w);
    }
}
END_TEST

/* The comparison above can tell: without the kept tokens, or with a window off by one, the truth is another. */
START_TEST(the_truth_can_tell_a_wrong_mask) {
    fkv_layer_config layer = {4, 2, 64, WINDOW, SINKS, 0, 0, {8, 64}, {8, 64}};
    fkv_config config = bounded_config(&layer);
    cache_world w;
    ck_ok(cache_world_open(&w, &config));
    uint32_t tokens[BOUNDED];
    cache_tokens(77, tokens, BOUNDED);
    float right[4 * 64];
    float wrong[4 * 64];
    cache_world_truth(&w, tokens, 200, 201, 0, right);
    cache_world other = w;
    other.config.layer.n_sinks = 0;
    cache_world_truth(&other, tokens, 200, 201, 0, wrong);
    ck_assert_double_gt(relative_l2(wrong, right, 4 * 64), 3 * AFFINE_8);
    other.config.layer.n_sinks = SINKS;
    other.config.layer.window = WINDOW - 1;
    cache_world_truth(&other, tokens, 200, 201, 0, wrong);
    ck_assert_double_gt(relative_l2(wrong, right, 4 * 64), 10 * HALF_F16);
    other.config.layer.window = WINDOW;
    other.config.layer.sink_logits = SINK_LOGITS;
    cache_world_truth(&other, tokens, 200, 201, 0, wrong);
    ck_assert_double_gt(relative_l2(wrong, right, 4 * 64), 10 * HALF_F16);
    cache_world_close(&w);
}
END_TEST

/* What the caller does with its array behind fkv_cache_open() does not matter. */
START_TEST(learned_sinks_are_copied_at_open) {
    float sink_logits[4];
    memcpy(sink_logits, SINK_LOGITS, sizeof sink_logits);
    fkv_layer_config layer = {4, 2, 64, 0, 0, 0, 0, {16, 0}, {16, 0}, sink_logits};
    fkv_config config = bounded_config(&layer);
    cache_world w;
    ck_ok(cache_world_open(&w, &config));
    for (size_t h = 0; h < N_OF(sink_logits); h++) sink_logits[h] = 50;
    uint32_t tokens[20];
    cache_tokens(3, tokens, N_OF(tokens));
    uint8_t *outputs = malloc(N_OF(tokens) * w.output_bytes);
    ck_assert_ptr_nonnull(outputs);
    cache_world_run(&w, cache_world_seq(&w, N_OF(tokens)), tokens, 0, N_OF(tokens), 7, outputs);
    w.config.layer.sink_logits = SINK_LOGITS;
    double error = error_of(&w, tokens, outputs, 0, N_OF(tokens), 0, HALF_F16, "copied");
    ck_assert_double_le(error, HALF_F16);
    free(outputs);
    cache_world_close(&w);
}
END_TEST

/* ---- rows that are not numbers ---- */

enum { N_ODD = 20 };

/* Decodes N_ODD tokens, with or without a neighbour whose rows are NaN and infinite. outputs: [N_ODD, H, D] of the good one. */
static void decode_beside(bool odd_neighbour, float *outputs) {
    fkv_layer_config layer = {2, 1, 64, 0, 0, 0, 0, {8, 64}, {4, 64}};
    fkv_config config = bounded_config(&layer);
    config.max_seqs = 2;
    config.max_tokens = 128;
    cache_world w;
    ck_ok(cache_world_open(&w, &config));
    uint32_t tokens[N_ODD];
    cache_tokens(5, tokens, N_ODD);
    fkv_row rows[2] = {{cache_world_seq(&w, N_ODD), 1}, {cache_world_seq(&w, N_ODD), 1}};
    static const uint32_t odd[] = {0x7fc00000, 0x7f800000, 0xff800000}; /* NaN, infinity, -infinity */
    for (uint32_t t = 0; t < N_ODD; t++) {
        float k[2 * 64];
        float q[2 * 2 * 64];
        float out[2 * 2 * 64];
        for (uint32_t d = 0; d < 64; d++) memcpy(&k[64 + d], &odd[(d + t) % 3], sizeof odd[0]);
        cache_world_row(&w, CACHE_K, tokens[t], t, 0, 0, k);
        for (uint32_t h = 0; h < 4; h++) cache_world_row(&w, CACHE_Q, tokens[t], t, 0, h % 2, q + (size_t)h * 64);
        fkv_step *step = NULL;
        ck_ok(fkv_step_begin(w.cache, rows, odd_neighbour ? 2 : 1, &step));
        ck_ok(fkv_write(step, 0, k, k));
        ck_ok(fkv_attend(step, 0, q, out));
        ck_ok(fkv_step_commit(step));
        memcpy(outputs + (size_t)t * 2 * 64, out, sizeof out / 2);
        for (uint32_t i = 0; i < (odd_neighbour ? 4u : 2u) * 64; i++)
            ck_assert_msg(out[i] - out[i] == 0.0f, "token %u: what is stored is always finite", t);
    }
    cache_world_close(&w);
}

START_TEST(rows_that_are_not_numbers_stay_with_their_sequence) {
    float alone[N_ODD * 2 * 64];
    float beside[N_ODD * 2 * 64];
    decode_beside(false, alone);
    decode_beside(true, beside);
    ck_assert(memcmp(alone, beside, sizeof alone) == 0);
}
END_TEST

TEST_MAIN("meaning", outputs_are_attention_over_the_rows_as_given, every_setting_of_codec_and_rotation_reaches_the_pages,
          steps_past_a_bounded_context_see_the_kept_tokens_and_the_window, the_truth_can_tell_a_wrong_mask,
          learned_sinks_are_copied_at_open, rows_that_are_not_numbers_stay_with_their_sequence)
