/* Checks outputs against softmax attention in double precision, computed over the unquantized rows by code that is independent of
 * the library (cache_fixture_reference).
 *
 * This finds errors that a comparison of kernels with each other cannot find: a mask that is off by one, a missing scale, swapped
 * K and V, a rotation that is not undone, or a page of another sequence. Codecs are lossy, so each kind of codec has its own
 * tolerance. The comment next to a tolerance explains its value.
 */
#include "cache_fixture.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

/* Tolerances of the relative L2 error over all tokens of a layer. */
#define HALF_F16 1e-3   /* 11-bit significand: the average relative error is 2^-12 for a value and smaller for a sum \ */
#define HALF_BF16 5e-3  /* 8-bit significand */
#define AFFINE_8 2e-2   /* 256 levels for a range of about 5 standard deviations per group */
#define AFFINE_8_4 0.15 /* 16 levels for V: the error per value is about a tenth of a standard deviation */
#define AFFINE_4 0.2    /* 16 levels for both K and V; the errors of K change the softmax weights */
#define AFFINE_4_2 0.6  /* 4 levels for V: the error per value is about half a standard deviation */
#define TOKEN_SLACK 4.0 /* factor by which the tolerance for a single token is larger */

enum { N_TOKENS = 150, STEP_TOKENS = 40 };

typedef struct attention_case {
    const char *name;
    uint32_t n_layers;
    fkv_layer_config layers[3];
    fkv_type row_type;
    fkv_type page_type;
    fkv_rotate rotate;
    uint32_t page_tokens;
    float outliers;
    double tolerance[3];
} attention_case;

static const float SINK_LOGITS[] = {0.7f, 3.0f, -1.0f, 5.0f};

/* Fields of a layer, in order: H, G, D, window, sinks, scale, softcap, k, v, learned sinks. */
static const attention_case ATTENTION_CASES[] = {
    {"f32 rows in f16 pages: grouped-query, multi-query and multi-head attention",
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
    {"f16 rows in f16 pages: windows of one token, less than a page and several pages; sinks within and beyond a page",
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
    {"learned sinks: full attention, a window with sinks, a soft cap",
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
    {"rotated 16-bit rows: the rotation cancels",
     2,
     {{4, 2, 96, 0, 0, 0, 0, {16, 0}, {16, 0}}, {2, 1, 112, 30, 4, 0, 0, {16, 0}, {16, 0}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     64,
     1.0f,
     {HALF_F16, HALF_F16}},
    {"8/8: full and window layers of different dimensions",
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
    {"16-bit window layers with K8/V4 full layers, outlier channels in keys",
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
    {"K4/V4 and K4/V2, both sides rotated, outlier channels",
     2,
     {{4, 2, 64, 0, 0, 0.02f, 0, {4, 32}, {4, 64}}, {4, 2, 128, 0, 0, 0.02f, 0, {4, 64}, {2, 32}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     16,
     20.0f,
     {AFFINE_4, AFFINE_4_2}},
    {"sealed: full, with a window, with affine values, outlier channels",
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
    {"TurboQuant of 4 and 3 bits, and 4-bit V with K8, outlier channels",
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

static fkv_config config_of(const attention_case *m) {
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

/* Returns the relative L2 error of one layer's outputs for tokens [from, to) against the reference. */
static double error_of(const cache_fixture *w, const uint32_t *tokens, const uint8_t *outputs, uint32_t from, uint32_t to,
                       uint32_t layer, double tolerance, const char *name) {
    const fkv_layer_config *l = cache_fixture_layer(w, layer);
    size_t n = (size_t)l->n_q_heads * l->head_dim;
    float *got = malloc((to - from) * n * sizeof *got);
    float *reference = malloc((to - from) * n * sizeof *reference);
    ck_assert(got != NULL && reference != NULL);
    cache_fixture_reference(w, tokens, from, to, layer, reference);
    for (uint32_t t = from; t < to; t++) {
        float *one = got + (t - from) * n;
        cache_fixture_output(w, outputs, t, layer, one);
        double error = relative_l2(one, reference + (t - from) * n, n);
        ck_assert_msg(error <= TOKEN_SLACK * tolerance, "%s: layer %u token %u has a relative error of %g", name, layer, t,
                      error);
    }
    double error = relative_l2(got, reference, (to - from) * n);
    free(got);
    free(reference);
    return error;
}

/* Runs two sequences with different tokens in one batch, first in chunks and then one token at a time. */
START_TEST(outputs_match_attention_over_the_unquantized_rows) {
    for (size_t i = 0; i < N_OF(ATTENTION_CASES); i++) {
        const attention_case *m = &ATTENTION_CASES[i];
        fkv_config config = config_of(m);
        cache_fixture w;
        ck_ok(cache_fixture_open(&w, &config));
        w.outliers = m->outliers;
        uint32_t tokens[2][N_TOKENS];
        uint8_t *outputs[2];
        fkv_seq seqs[2];
        for (uint32_t s = 0; s < 2; s++) {
            cache_tokens(10 * i + s, tokens[s], N_TOKENS);
            outputs[s] = malloc(N_TOKENS * w.output_bytes);
            ck_assert_ptr_nonnull(outputs[s]);
            seqs[s] = cache_fixture_seq(&w, N_TOKENS);
        }
        for (uint32_t t = 0; t < N_TOKENS;) {
            uint32_t n = t < 100 ? 20 : 1;
            cache_chunk chunks[] = {{seqs[0], tokens[0], t, n, outputs[0]}, {seqs[1], tokens[1], t, n, outputs[1]}};
            cache_fixture_step(&w, chunks, 2, CACHE_COMMIT);
            t += n;
        }
        printf("%s:", m->name);
        for (uint32_t layer = 0; layer < m->n_layers; layer++) {
            double error = error_of(&w, tokens[0], outputs[0], 0, N_TOKENS, layer, m->tolerance[layer], m->name);
            double other = error_of(&w, tokens[1], outputs[1], 0, N_TOKENS, layer, m->tolerance[layer], m->name);
            printf(" %.2g", error > other ? error : other);
            ck_assert_msg(error <= m->tolerance[layer] && other <= m->tolerance[layer],
                          "%s: layer %u has relative errors of %g and %g", m->name, layer, error, other);
        }
        printf("\n");
        for (uint32_t s = 0; s < 2; s++) free(outputs[s]);
        cache_fixture_close(&w);
    }
}
END_TEST

/* ---- codec settings ---- */

typedef struct setting {
    const char *name;
    fkv_rotate rotate;
    uint64_t seed;
    fkv_type page_type;
    fkv_codec_config k;
    fkv_codec_config v;
} setting;

enum { N_SETTING = 64 };

/* Computes the outputs of N_SETTING tokens in one layer whose keys have outlier channels. Returns the relative error of the
 * outputs. */
static double outputs_under(const setting *set, float *outputs) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = (fkv_layer_config){2, 1, 64, 0, 0, 0.02f, 0, set->k, set->v};
    config.rotate = set->rotate;
    config.rotation_seed = set->seed;
    config.page_type = set->page_type;
    config.max_tokens = N_SETTING;
    config.n_threads = 1;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    w.outliers = 20.0f;
    uint32_t tokens[N_SETTING];
    float reference[N_SETTING * 2 * 64];
    cache_tokens(4, tokens, N_SETTING);
    cache_fixture_run(&w, cache_fixture_seq(&w, N_SETTING), tokens, 0, N_SETTING, 8, (uint8_t *)outputs);
    cache_fixture_reference(&w, tokens, 0, N_SETTING, 0, reference);
    cache_fixture_close(&w);
    return relative_l2(outputs, reference, N_OF(reference));
}

START_TEST(every_codec_and_rotation_setting_affects_the_outputs) {
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
            ck_assert_msg(memcmp(outputs[i], outputs[k], sizeof outputs[i]) != 0, "%s and %s give the same outputs",
                          settings[i].name, settings[k].name);
    }
    /* rotation and more bits reduce the error of keys with outlier channels */
    ck_assert_double_lt(errors[1], 0.9 * errors[0]);
    ck_assert_double_lt(errors[8], 0.9 * errors[0]);
    ck_assert_double_lt(errors[9], 0.9 * errors[0]);
}
END_TEST

/* ---- bounded context ---- */

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

START_TEST(bounded_context_attends_to_sinks_and_the_window) {
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
        cache_fixture w;
        ck_ok(cache_fixture_open(&w, &config));
        uint32_t tokens[BOUNDED];
        cache_tokens(77, tokens, BOUNDED);
        uint8_t *outputs = malloc(BOUNDED * w.output_bytes);
        ck_assert_ptr_nonnull(outputs);
        fkv_seq seq = cache_fixture_seq(&w, BOUNDED);
        cache_fixture_run(&w, seq, tokens, 0, WINDOW + SINKS, 32, outputs);
        uint32_t most = 0;
        for (uint32_t t = WINDOW + SINKS; t < BOUNDED; t++) {
            cache_fixture_run(&w, seq, tokens, t, t + 1, 1, outputs);
            uint32_t held = cache_fixture_stats(&w).groups[0].held;
            if (held > most) most = held;
        }
        /* the sequence holds at most the sink page and the pages that a window of this size can overlap */
        ck_assert_uint_le(most, 1 + WINDOW / 16 + 1);
        double error = error_of(&w, tokens, outputs, WINDOW + SINKS, BOUNDED, 0, ways[i].tolerance, "bounded");
        ck_assert_msg(error <= ways[i].tolerance, "K%u/V%u has a relative error of %g", ways[i].k.bits, ways[i].v.bits, error);
        free(outputs);
        cache_fixture_close(&w);
    }
}
END_TEST

/* Checks that the reference outputs change if the sinks are missing or the window is off by one. */
START_TEST(reference_detects_a_wrong_mask) {
    fkv_layer_config layer = {4, 2, 64, WINDOW, SINKS, 0, 0, {8, 64}, {8, 64}};
    fkv_config config = bounded_config(&layer);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[BOUNDED];
    cache_tokens(77, tokens, BOUNDED);
    float right[4 * 64];
    float wrong[4 * 64];
    cache_fixture_reference(&w, tokens, 200, 201, 0, right);
    cache_fixture other = w;
    other.config.layer.n_sinks = 0;
    cache_fixture_reference(&other, tokens, 200, 201, 0, wrong);
    ck_assert_double_gt(relative_l2(wrong, right, 4 * 64), 3 * AFFINE_8);
    other.config.layer.n_sinks = SINKS;
    other.config.layer.window = WINDOW - 1;
    cache_fixture_reference(&other, tokens, 200, 201, 0, wrong);
    ck_assert_double_gt(relative_l2(wrong, right, 4 * 64), 10 * HALF_F16);
    other.config.layer.window = WINDOW;
    other.config.layer.sink_logits = SINK_LOGITS;
    cache_fixture_reference(&other, tokens, 200, 201, 0, wrong);
    ck_assert_double_gt(relative_l2(wrong, right, 4 * 64), 10 * HALF_F16);
    cache_fixture_close(&w);
}
END_TEST

/* If the caller changes its array of sink logits after fkv_cache_open(), outputs must not change. */
START_TEST(learned_sinks_are_copied_at_open) {
    float sink_logits[4];
    memcpy(sink_logits, SINK_LOGITS, sizeof sink_logits);
    fkv_layer_config layer = {4, 2, 64, 0, 0, 0, 0, {16, 0}, {16, 0}, sink_logits};
    fkv_config config = bounded_config(&layer);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    for (size_t h = 0; h < N_OF(sink_logits); h++) sink_logits[h] = 50;
    uint32_t tokens[20];
    cache_tokens(3, tokens, N_OF(tokens));
    uint8_t *outputs = malloc(N_OF(tokens) * w.output_bytes);
    ck_assert_ptr_nonnull(outputs);
    cache_fixture_run(&w, cache_fixture_seq(&w, N_OF(tokens)), tokens, 0, N_OF(tokens), 7, outputs);
    w.config.layer.sink_logits = SINK_LOGITS;
    double error = error_of(&w, tokens, outputs, 0, N_OF(tokens), 0, HALF_F16, "copied");
    ck_assert_double_le(error, HALF_F16);
    free(outputs);
    cache_fixture_close(&w);
}
END_TEST

/* ---- NaN and infinity ---- */

enum { N_ODD = 20 };

/* Decodes N_ODD tokens, optionally in a batch with a sequence whose rows contain NaN and infinity. outputs: [N_ODD, H, D] of the
 * normal sequence. */
static void decode_with_neighbour(bool odd_neighbour, float *outputs) {
    fkv_layer_config layer = {2, 1, 64, 0, 0, 0, 0, {8, 64}, {4, 64}};
    fkv_config config = bounded_config(&layer);
    config.max_seqs = 2;
    config.max_tokens = 128;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t tokens[N_ODD];
    cache_tokens(5, tokens, N_ODD);
    fkv_row rows[2] = {{cache_fixture_seq(&w, N_ODD), 1}, {cache_fixture_seq(&w, N_ODD), 1}};
    static const uint32_t odd[] = {0x7fc00000, 0x7f800000, 0xff800000}; /* NaN, infinity, -infinity */
    for (uint32_t t = 0; t < N_ODD; t++) {
        float k[2 * 64];
        float q[2 * 2 * 64];
        float out[2 * 2 * 64];
        for (uint32_t d = 0; d < 64; d++) memcpy(&k[64 + d], &odd[(d + t) % 3], sizeof odd[0]);
        cache_fixture_row(&w, CACHE_K, tokens[t], t, 0, 0, k);
        for (uint32_t h = 0; h < 4; h++) cache_fixture_row(&w, CACHE_Q, tokens[t], t, 0, h % 2, q + (size_t)h * 64);
        fkv_step *step = NULL;
        ck_ok(fkv_step_begin(w.cache, rows, odd_neighbour ? 2 : 1, &step));
        ck_ok(fkv_write(step, 0, k, k));
        ck_ok(fkv_attend(step, 0, q, out));
        ck_ok(fkv_step_commit(step));
        memcpy(outputs + (size_t)t * 2 * 64, out, sizeof out / 2);
        for (uint32_t i = 0; i < (odd_neighbour ? 4u : 2u) * 64; i++)
            ck_assert_msg(out[i] - out[i] == 0.0f, "token %u: the output of a non-finite row is not finite", t);
    }
    cache_fixture_close(&w);
}

START_TEST(non_finite_rows_do_not_affect_other_sequences) {
    float alone[N_ODD * 2 * 64];
    float batched[N_ODD * 2 * 64];
    decode_with_neighbour(false, alone);
    decode_with_neighbour(true, batched);
    ck_assert(memcmp(alone, batched, sizeof alone) == 0);
}
END_TEST

/* ---- huge keys ---- */

enum { HUGE_D = 64, HUGE_PAGE = 16, N_HUGE = 12 * HUGE_PAGE, HUGE_AT = 2 * HUGE_PAGE + 5 }; /* the huge key is in a sealed page */

/* Tolerance for 4-bit keys and values. The comparison ignores the softmax weight of the huge key itself (see huge_error). */
#define HUGE_KEY_SEALED 0.15

typedef struct huge_case {
    const char *name;
    fkv_codec_config k;
    fkv_codec_config v;
    double tolerance;
} huge_case;

static void fill_normal(uint64_t *state, float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        float sum = -2.0f;
        for (int j = 0; j < 4; j++) {
            *state = *state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(*state >> 40) * 0x1p-24f;
        }
        x[i] = sum * 1.7320508f;
    }
}

/* Makes a key huge in one channel or in all channels. Makes q orthogonal to the key or, if `opposed` is true, opposite to the
 * key. */
static void make_huge(float huge, bool all_channels, bool opposed, float *k, float *q) {
    for (uint32_t d = 0; d < HUGE_D; d += 2) {
        if (!all_channels && d != 10) continue;
        k[d] = huge;
        if (all_channels) k[d + 1] = -huge;
        q[d] = opposed ? copysignf(q[d], -huge) : all_channels ? q[d + 1] : 0;
        if (opposed && all_channels) q[d + 1] = copysignf(q[d + 1], huge);
    }
}

/* Returns the relative error of the last token's output. The value row of token HUGE_AT is 0, so the token's softmax weight
 * changes only the length of the output vector. Only the direction of the output is compared, with a reference that omits this
 * token. k, v: [N_HUGE, D] */
static double huge_error(const huge_case *c, fkv_type page_type, const float *k, const float *v, const float *q) {
    uint8_t channel_bits[HUGE_D];
    memset(channel_bits, 4, sizeof channel_bits);
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = (fkv_layer_config){1, 1, HUGE_D, 0, 0, 0, 0, c->k, c->v};
    if (c->k.kind == FKV_CODEC_CALIBRATED) config.layer.channel_bits = channel_bits;
    config.page_type = page_type;
    config.rotate = FKV_ROTATE_NONE;
    config.page_tokens = HUGE_PAGE;
    config.max_tokens = N_HUGE;
    config.max_step_tokens = N_HUGE;
    config.n_threads = 1;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    static float queries[N_HUGE * HUGE_D];
    static float outputs[N_HUGE * HUGE_D];
    for (uint32_t t = 0; t < N_HUGE; t++) memcpy(queries + (size_t)t * HUGE_D, q, HUGE_D * sizeof *q);
    fkv_row row = {cache_fixture_seq(&w, N_HUGE), N_HUGE};
    fkv_step *step = NULL;
    ck_ok(fkv_step_begin(w.cache, &row, 1, &step));
    ck_ok(fkv_write(step, 0, k, v));
    ck_ok(fkv_attend(step, 0, queries, outputs));
    ck_ok(fkv_step_commit(step));
    cache_fixture_close(&w);
    const float *got = outputs + (size_t)(N_HUGE - 1) * HUGE_D;
    double sum[HUGE_D] = {0};
    for (uint32_t t = 0; t < N_HUGE; t++) {
        double score = 0;
        if (t == HUGE_AT) continue;
        for (uint32_t d = 0; d < HUGE_D; d++) score += (double)q[d] * (double)k[(size_t)t * HUGE_D + d];
        for (uint32_t d = 0; d < HUGE_D; d++) sum[d] += exp(score / 8) * (double)v[(size_t)t * HUGE_D + d];
    }
    double got_size = 0;
    double size = 0;
    float a[HUGE_D];
    float b[HUGE_D];
    for (uint32_t d = 0; d < HUGE_D; d++) {
        got_size += (double)got[d] * (double)got[d];
        size += sum[d] * sum[d];
    }
    for (uint32_t d = 0; d < HUGE_D; d++) {
        a[d] = (float)((double)got[d] / sqrt(got_size));
        b[d] = (float)(sum[d] / sqrt(size));
    }
    return relative_l2(a, b, HUGE_D);
}

START_TEST(a_huge_key_does_not_change_the_weights_of_other_tokens) {
    static const huge_case cases[] = {{"16/16", {16, 0}, {16, 0}, HALF_BF16},
                                      {"sealed", {4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}, HUGE_KEY_SEALED},
                                      {"calibrated", {4, 0, FKV_CODEC_CALIBRATED}, {4, 0, FKV_CODEC_SEALED_V}, HUGE_KEY_SEALED}};
    static const float sizes[] = {1, 3e4f, -6e4f, 1e6f, -1e6f, 1e7f, -1e8f, 1e30f, INFINITY, -INFINITY};
    static float k[N_HUGE * HUGE_D];
    static float v[N_HUGE * HUGE_D];
    for (size_t i = 0; i < N_OF(cases); i++) {
        double worst = 0;
        for (uint32_t how = 0; how < 8; how++) {
            fkv_type type = how % 2 == 0 ? FKV_BF16 : FKV_F16;
            for (size_t s = 0; s < N_OF(sizes); s++) {
                float q[HUGE_D];
                uint64_t state = 7;
                fill_normal(&state, k, N_OF(k));
                fill_normal(&state, v, N_OF(v));
                fill_normal(&state, q, HUGE_D);
                memset(v + (size_t)HUGE_AT * HUGE_D, 0, HUGE_D * sizeof *v);
                make_huge(sizes[s], how / 2 % 2 == 1, how / 4 == 1, k + (size_t)HUGE_AT * HUGE_D, q);
                double error = huge_error(&cases[i], type, k, v, q);
                worst = error > worst ? error : worst;
                ck_assert_msg(error <= cases[i].tolerance, "%s, page type %d, way %u, size %g: a relative error of %g",
                              cases[i].name, (int)type, how, (double)sizes[s], error);
            }
        }
        printf("%s: %.2g\n", cases[i].name, worst);
    }
}
END_TEST

TEST_MAIN("attention_case", outputs_match_attention_over_the_unquantized_rows,
          every_codec_and_rotation_setting_affects_the_outputs, bounded_context_attends_to_sinks_and_the_window,
          reference_detects_a_wrong_mask, learned_sinks_are_copied_at_open, non_finite_rows_do_not_affect_other_sequences,
          a_huge_key_does_not_change_the_weights_of_other_tokens)
