/* The life of sealed pages in a cache: which page a query sees in which form, how far back one can truncate, what the plan
 * counts, what a file holds. That the bits do not depend on the way is test_same_answer's, that they mean attention
 * test_meaning's.
 */
#include "cache_world.h"
#include "channel_bits.h"
#include "page_file_world.h"
#include "test.h"

#include "../src/codec/block.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEALED_LAYER                                                                                                             \
    {                                                                                                                            \
        .n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {.bits = 4, .kind = FKV_CODEC_SEALED}, .v = {                      \
            .bits = 4,                                                                                                           \
            .kind = FKV_CODEC_SEALED_V                                                                                           \
        }                                                                                                                        \
    }

enum { PAGE = 16, SPAN = PAGE * FKV_OPEN_SPAN, N_TOKENS = 220 };

static fkv_config config_of(fkv_layer_config layer) {
    fkv_config config = fkv_config_default();
    config.n_layers = 2;
    config.layer = layer;
    config.rotate = FKV_ROTATE_V;
    config.page_tokens = PAGE;
    config.max_tokens = 480;
    config.max_seqs = 2;
    config.max_step_tokens = 40;
    config.n_threads = 1;
    return config;
}

static void open_sealed(cache_world *w, uint32_t tokens[N_TOKENS]) {
    fkv_config config = config_of((fkv_layer_config)SEALED_LAYER);
    ck_ok(cache_world_open(w, &config));
    cache_tokens(7, tokens, N_TOKENS);
}

/* ---- who sees what ---- */

/* All outputs of N_TOKENS tokens under the layer; the caller frees them. */
static uint8_t *outputs_under(fkv_layer_config layer, uint32_t chunk, size_t *token_bytes) {
    cache_world w;
    uint32_t tokens[N_TOKENS];
    fkv_config config = config_of(layer);
    ck_ok(cache_world_open(&w, &config));
    cache_tokens(7, tokens, N_TOKENS);
    uint8_t *outputs = malloc(N_TOKENS * w.output_bytes);
    ck_assert_ptr_nonnull(outputs);
    cache_world_run(&w, cache_world_seq(&w, N_TOKENS), tokens, 0, N_TOKENS, chunk, outputs);
    *token_bytes = w.output_bytes;
    cache_world_close(&w);
    return outputs;
}

/* Queries of the first span see nothing sealed: they have the bits of 8/8. All behind them see one sealed page at least. */
START_TEST(the_first_page_and_the_own_span_are_seen_in_8_bits) {
    fkv_layer_config eight = SEALED_LAYER;
    eight.k = eight.v = (fkv_codec_config){.bits = 8, .group = 64};
    size_t bytes = 0;
    uint8_t *open = outputs_under(eight, 1, &bytes);
    uint8_t *sealed = outputs_under((fkv_layer_config)SEALED_LAYER, 29, &bytes);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        bool same = memcmp(open + t * bytes, sealed + t * bytes, bytes) == 0;
        ck_assert_msg(same == (t < SPAN || t < 2 * PAGE), "token %u has %s bits of 8/8", t, same ? "the" : "other");
    }
    free(open);
    free(sealed);
}
END_TEST

/* ---- going back ---- */

static void check_says(const char *format, uint32_t n) {
    char text[64];
    (void)snprintf(text, sizeof text, format, n);
    ck_assert_msg(strstr(fkv_message(), text) != NULL, "\"%s\" does not say \"%s\"", fkv_message(), text);
}

START_TEST(truncating_is_exact_by_a_page_at_least_and_to_starts_of_spans_before_that) {
    cache_world w;
    uint32_t tokens[N_TOKENS];
    open_sealed(&w, tokens);
    fkv_seq seq = cache_world_seq(&w, N_TOKENS);
    const uint32_t length = 196;
    const uint32_t held = (length - PAGE) / SPAN * SPAN; /* from the span on that the token a page before is in */
    cache_world_run(&w, seq, tokens, 0, length, 40, NULL);
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE);
    check_says("truncate to %u,", held - SPAN);
    check_says("to %u or more", held);
    ck_assert_uint_eq(cache_world_length(&w, seq), length);
    ck_ok(fkv_seq_truncate(w.cache, seq, length - PAGE));
    ck_ok(fkv_seq_truncate(w.cache, seq, held + 1));
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE); /* the span before does not come back */
    ck_ok(fkv_seq_truncate(w.cache, seq, held - SPAN));
    ck_ok(fkv_seq_truncate(w.cache, seq, 7)); /* the first page is always open */
    cache_world_run(&w, seq, tokens, 7, SPAN + PAGE - 7, 11, NULL);
    ck_ok(fkv_seq_truncate(w.cache, seq, PAGE + 1)); /* so is the span before, at the start of one */
    cache_world_close(&w);
}
END_TEST

START_TEST(a_prefix_and_a_file_bring_the_first_page_and_those_of_the_last_span) {
    char path[512];
    (void)cache_path(path, "sealed.fkv");
    cache_world w;
    uint32_t tokens[N_TOKENS];
    open_sealed(&w, tokens);
    fkv_seq seq = cache_world_seq(&w, N_TOKENS);
    cache_world_run(&w, seq, tokens, 0, 100, 40, NULL);
    const uint32_t held = (100 - PAGE) / SPAN * SPAN;
    ck_ok(fkv_prefix_insert(w.cache, seq, tokens, 100));
    ck_status(fkv_seq_save(w.cache, seq, tokens, held - 1, path), FKV_GONE);
    ck_ok(fkv_seq_save(w.cache, seq, tokens, held + PAGE + 3, path));
    ck_ok(fkv_seq_close(w.cache, seq));

    uint32_t n_shared = 0;
    fkv_seq_config opened = {.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = N_TOKENS};
    ck_ok(fkv_seq_open(w.cache, &opened, &seq, &n_shared));
    ck_assert_uint_eq(n_shared, 100 / SPAN * SPAN);
    ck_status(fkv_seq_truncate(w.cache, seq, n_shared - 1), FKV_GONE);
    ck_ok(fkv_seq_truncate(w.cache, seq, n_shared - SPAN));
    ck_ok(fkv_seq_close(w.cache, seq));

    ck_ok(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    ck_ok(fkv_seq_truncate(w.cache, seq, held + 1));
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE);
    ck_ok(fkv_seq_truncate(w.cache, seq, held - SPAN));
    ck_assert(fkv_cache_consistent(w.cache));
    cache_world_close(&w);
}
END_TEST

/* The first page of a prefix stays open though another sequence has been promised all that one can have. */
START_TEST(a_prefix_can_be_shared_after_a_full_life_beside_it) {
    cache_world w;
    uint32_t tokens[N_TOKENS];
    uint32_t others[N_TOKENS];
    open_sealed(&w, tokens);
    cache_tokens(8, others, N_TOKENS);
    fkv_seq seq = cache_world_seq(&w, N_TOKENS);
    cache_world_run(&w, seq, tokens, 0, 64, 40, NULL);
    ck_ok(fkv_prefix_insert(w.cache, seq, tokens, 64));
    ck_ok(fkv_seq_close(w.cache, seq));
    fkv_seq two[2] = {cache_world_seq(&w, N_TOKENS), cache_world_seq(&w, N_TOKENS)};
    for (int i = 0; i < 2; i++) cache_world_run(&w, two[i], others, 0, 140, 40, NULL);
    uint32_t n_shared = 0;
    fkv_seq_config asked = {.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = N_TOKENS};
    ck_ok(fkv_prefix_match(w.cache, &asked, &n_shared));
    ck_assert_uint_eq(n_shared, 64);
    cache_world_close(&w);
}
END_TEST

/* ---- bytes ---- */

static uint64_t planned(fkv_codec_config k, fkv_codec_config v) {
    fkv_config config = fkv_config_default();
    config.n_layers = 32;
    config.layer = (fkv_layer_config){.n_q_heads = 32, .n_kv_heads = 8, .head_dim = 128, .k = k, .v = v};
    config.max_tokens = 131072;
    config.n_threads = 2;
    fkv_plan plan;
    ck_ok(fkv_plan_make(&config, &plan));
    return plan.total_bytes;
}

START_TEST(a_long_context_takes_at_most_71_percent_of_what_8_4_takes) {
    uint64_t eight = planned((fkv_codec_config){8, 64}, (fkv_codec_config){4, 64});
    uint64_t sealed = planned((fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED},
                              (fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED_V});
    printf("131072 tokens of 32 layers: sealed %.1f bytes a token, 8/4 %.1f, ratio %.4f\n", (double)sealed / 131072,
           (double)eight / 131072, (double)sealed / (double)eight);
    ck_assert_double_le((double)sealed, 0.71 * (double)eight);
}
END_TEST

/* ---- files ---- */

enum { FILE_BYTES = 1 << 20 };

/* One sealed layer, one that is not, a windowed one that is. */
static void open_golden(cache_world *w, uint32_t tokens[N_TOKENS]) {
    static const fkv_layer_config layers[] = {{2, 1, 32, 0, 0, 0, 0, {4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}},
                                              {2, 2, 32, 0, 0, 0, 0, {8, 32}, {4, 32}},
                                              {1, 1, 48, 20, 3, 0, 0, {3, 0, FKV_CODEC_SEALED}, {2, 0, FKV_CODEC_SEALED_V}}};
    fkv_config config = config_of(layers[0]);
    config.n_layers = N_OF(layers);
    config.layers = layers;
    config.rotation_seed = 7;
    (void)snprintf(config.rope_id, sizeof config.rope_id, "neox base=10000");
    ck_ok(cache_world_open(w, &config));
    cache_tokens(7, tokens, N_TOKENS);
}

/* What is loaded of `path` is saved to the same bytes. */
static void check_reload(cache_world *w, const uint32_t *tokens, const char *path) {
    static uint8_t golden[FILE_BYTES];
    static uint8_t now[FILE_BYTES];
    char saved[512];
    (void)cache_path(saved, "again.fkv");
    fkv_seq seq = 0;
    ck_ok(fkv_seq_load(w->cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    ck_ok(fkv_seq_save(w->cache, seq, tokens, 0, saved));
    size_t n = file_world_read_file(path, golden, FILE_BYTES);
    ck_assert_uint_eq(file_world_read_file(saved, now, FILE_BYTES), n);
    ck_assert_mem_eq(golden, now, n);
}

/* The golden file `path` is what is saved now, and what is loaded of it is saved to the same bytes. */
static void check_golden(const char *path, void (*open)(cache_world *w, uint32_t tokens[N_TOKENS])) {
    static uint8_t golden[FILE_BYTES];
    static uint8_t now[FILE_BYTES];
    char saved[512];
    (void)cache_path(saved, "now.fkv");
    cache_world w;
    uint32_t tokens[N_TOKENS];
    open(&w, tokens);
    fkv_seq seq = cache_world_seq(&w, N_TOKENS);
    cache_world_run(&w, seq, tokens, 0, 90, 40, NULL);
    ck_ok(fkv_seq_save(w.cache, seq, tokens, 0, saved));
    size_t n = file_world_read_file(saved, now, FILE_BYTES);
    const char *keep = getenv("FKV_TEST_KEEP_GOLDEN");
    if (keep != NULL) {
        char to[512];
        (void)snprintf(to, sizeof to, "%s%s", keep, strrchr(path, 0x2f));
        file_world_write_file(to, now, n);
    }
    ck_assert_uint_eq(file_world_read_file(path, golden, FILE_BYTES), n);
    ck_assert_mem_eq(golden, now, n);
    ck_ok(fkv_seq_close(w.cache, seq));
    check_reload(&w, tokens, path);
    cache_world_close(&w);
}

/* tests/golden/sealed.fkv is the file that this test saved when scales of keys got seven bits. */
START_TEST(the_golden_file_of_version_8_is_written_and_read_as_ever) {
    check_golden("tests/golden/sealed.fkv", open_golden);
    fkv_file_info info;
    ck_ok(fkv_file_inspect("tests/golden/sealed.fkv", true, &info));
    ck_assert_uint_eq(info.version, 8);
    ck_assert_int_eq(info.first_layer.k.kind, FKV_CODEC_SEALED);
    ck_assert_int_eq(info.first_layer.v.kind, FKV_CODEC_SEALED_V);
}
END_TEST

/* The file as it was saved before scales of keys had seven bits. */
START_TEST(a_file_with_scales_of_all_bits_is_read_as_it_is) {
    cache_world w;
    uint32_t tokens[N_TOKENS];
    open_golden(&w, tokens);
    check_reload(&w, tokens, "tests/golden/sealed_fine_scales.fkv");
    cache_world_close(&w);
}
END_TEST

/* ---- calibrated keys ---- */

/* Two heads that differ, and a windowed layer with 3 bits on average. `other`: the bits of two channels changed places. */
static fkv_status try_calibrated(cache_world *w, bool other) {
    uint8_t bits[2][2 * 64];
    uint64_t state = 21;
    channel_bits_random(&state, 32, 4, bits[0]);
    channel_bits_random(&state, 32, 4, bits[0] + 32);
    channel_bits_random(&state, 48, 3, bits[1]);
    uint32_t c = 1;
    while (bits[1][c] == bits[1][0]) c++;
    uint8_t first = bits[1][0];
    if (other) bits[1][0] = bits[1][c];
    if (other) bits[1][c] = first;
    fkv_layer_config layers[] = {{4, 2, 32, 0, 0, 0, 0, {4, 0, FKV_CODEC_CALIBRATED}, {4, 0, FKV_CODEC_SEALED_V}},
                                 {2, 1, 48, 20, 3, 0, 0, {3, 0, FKV_CODEC_CALIBRATED}, {3, 0, FKV_CODEC_SEALED_V}}};
    for (int i = 0; i < 2; i++) layers[i].channel_bits = bits[i];
    fkv_config config = config_of(layers[0]);
    config.layers = layers;
    config.rotation_seed = 7;
    fkv_status status = cache_world_open(w, &config); /* which copies the bits */
    for (int i = 0; i < 2; i++) w->layers[i].channel_bits = NULL;
    return status;
}

static void open_calibrated(cache_world *w, uint32_t tokens[N_TOKENS]) {
    ck_ok(try_calibrated(w, false));
    cache_tokens(7, tokens, N_TOKENS);
}

START_TEST(the_golden_file_of_calibrated_layers_is_of_version_8_and_foreign_to_other_bits) {
    static const char path[] = "tests/golden/calibrated.fkv";
    check_golden(path, open_calibrated);
    fkv_file_info info;
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert_uint_eq(info.version, 8);
    ck_assert_int_eq(info.first_layer.k.kind, FKV_CODEC_CALIBRATED);
    cache_world w;
    fkv_seq seq = 0;
    ck_ok(try_calibrated(&w, true));
    ck_status(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq), FKV_FILE_FOREIGN);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "calibration is "));
    cache_world_close(&w);
}
END_TEST

START_TEST(bits_of_channels_that_cannot_be_are_refused_with_their_numbers) {
    static const struct {
        uint8_t first[5];
        const char *says;
    } bad[] = {{{3, 4, 4, 4, 5}, "channel 0 has 3 bits"},
               {{0}, "channel 0 has 0 bits"},
               {{6, 4, 4, 4, 4}, "66 bits in all"},
               {{6, 2, 4, 4, 4}, "1 of 6: multiples of 4"}};
    for (size_t i = 0; i < N_OF(bad); i++) {
        uint8_t bits[16];
        memset(bits, 4, sizeof bits);
        memcpy(bits, bad[i].first, sizeof bad[i].first);
        fkv_config config = config_of((fkv_layer_config){
            1, 1, 16, 0, 0, 0, 0, {4, 0, FKV_CODEC_CALIBRATED}, {4, 0, FKV_CODEC_SEALED_V}, .channel_bits = bits});
        fkv_plan plan;
        ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
        ck_assert_msg(strstr(fkv_message(), bad[i].says) != NULL, "\"%s\" does not say \"%s\"", fkv_message(), bad[i].says);
    }
}
END_TEST

/* ---- files of before ---- */

/* What the tests above saved when a query saw its own page and the first one open. */
START_TEST(sealed_files_of_before_are_refused_and_say_what_to_do) {
    static const char *const paths[] = {"tests/golden/sealed_version_2.fkv", "tests/golden/calibrated_version_4.fkv"};
    for (size_t i = 0; i < N_OF(paths); i++) {
        fkv_file_info info;
        ck_status(fkv_file_inspect(paths[i], true, &info), FKV_FILE_VERSION);
        check_says("a page file of version %u with sealed layers", i == 0 ? 2 : 4);
        ck_assert_ptr_nonnull(strstr(fkv_message(), "compute its tokens again"));
        cache_world w;
        fkv_seq seq = 0;
        uint32_t tokens[N_TOKENS];
        (i == 0 ? open_golden : open_calibrated)(&w, tokens);
        ck_status(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, paths[i], &seq), FKV_FILE_VERSION);
        cache_world_close(&w);
    }
}
END_TEST

/* ---- damage ---- */

static void check_flipped_bits(const char *golden) {
    static uint8_t bytes[FILE_BYTES];
    char path[512];
    (void)cache_path(path, "flipped.fkv");
    size_t n = file_world_read_file(golden, bytes, FILE_BYTES);
    for (size_t at = 0; at < n; at += at < 512 ? 1 : 37) {
        uint8_t bit = (uint8_t)(1u << at % 8);
        bytes[at] ^= bit;
        file_world_write_file(path, bytes, n);
        bytes[at] ^= bit;
        fkv_file_info info;
        fkv_status expected = at < 8 ? FKV_FILE_FORMAT : at < 12 ? FKV_FILE_VERSION : FKV_FILE_DAMAGED;
        fkv_status got = fkv_file_inspect(path, true, &info);
        ck_assert_msg(got == expected, "byte %zu: %s", at, fkv_status_name(got));
    }
}

START_TEST(every_flipped_bit_of_a_file_of_version_8_is_found) {
    check_flipped_bits("tests/golden/sealed.fkv");
    check_flipped_bits("tests/golden/calibrated.fkv");
}
END_TEST

START_TEST(a_file_of_a_sealed_layer_is_foreign_to_one_that_is_not) {
    cache_world w;
    uint32_t tokens[N_TOKENS];
    open_golden(&w, tokens);
    fkv_layer_config layers[3];
    memcpy(layers, w.layers, sizeof layers);
    fkv_config config = w.config;
    cache_world_close(&w);
    layers[0].k = (fkv_codec_config){.bits = 4, .group = 32};
    layers[0].v = (fkv_codec_config){.bits = 4, .group = 32};
    config.layers = layers;
    ck_ok(cache_world_open(&w, &config));
    fkv_seq seq = 0;
    ck_status(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, "tests/golden/sealed.fkv", &seq),
              FKV_FILE_FOREIGN);
    cache_world_close(&w);
}
END_TEST

TEST_MAIN("sealed life", the_first_page_and_the_own_span_are_seen_in_8_bits,
          truncating_is_exact_by_a_page_at_least_and_to_starts_of_spans_before_that,
          a_prefix_and_a_file_bring_the_first_page_and_those_of_the_last_span, a_prefix_can_be_shared_after_a_full_life_beside_it,
          a_long_context_takes_at_most_71_percent_of_what_8_4_takes, the_golden_file_of_version_8_is_written_and_read_as_ever,
          a_file_with_scales_of_all_bits_is_read_as_it_is,
          the_golden_file_of_calibrated_layers_is_of_version_8_and_foreign_to_other_bits,
          bits_of_channels_that_cannot_be_are_refused_with_their_numbers, sealed_files_of_before_are_refused_and_say_what_to_do,
          every_flipped_bit_of_a_file_of_version_8_is_found, a_file_of_a_sealed_layer_is_foreign_to_one_that_is_not)
