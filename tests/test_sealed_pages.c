/* Tests of sealed pages in a cache: the form in which a query reads each page, how far a sequence can be truncated, plan sizes
 * and page files. test_bit_identical.c tests that outputs are bit-identical, and test_attn_fp64.c tests attention results.
 */
#include "cache_fixture.h"
#include "channel_bits.h"
#include "page_file_fixture.h"
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

static void open_sealed(cache_fixture *w, uint32_t tokens[N_TOKENS]) {
    fkv_config config = config_of((fkv_layer_config)SEALED_LAYER);
    ck_ok(cache_fixture_open(w, &config));
    cache_tokens(7, tokens, N_TOKENS);
}

/* ---- open and sealed pages ---- */

/* Returns all outputs of N_TOKENS tokens for a layer config. The caller frees them. */
static uint8_t *outputs_under(fkv_layer_config layer, uint32_t chunk, size_t *token_bytes) {
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    fkv_config config = config_of(layer);
    ck_ok(cache_fixture_open(&w, &config));
    cache_tokens(7, tokens, N_TOKENS);
    uint8_t *outputs = malloc(N_TOKENS * w.output_bytes);
    ck_assert_ptr_nonnull(outputs);
    cache_fixture_run(&w, cache_fixture_seq(&w, N_TOKENS), tokens, 0, N_TOKENS, chunk, outputs);
    *token_bytes = w.output_bytes;
    cache_fixture_close(&w);
    return outputs;
}

/* Queries in the first span read no sealed page, so their outputs are bit-identical to those of the 8/8 codecs. Each later query
 * reads at least one sealed page. */
START_TEST(first_page_and_current_span_are_read_in_8_bits) {
    fkv_layer_config eight = SEALED_LAYER;
    eight.k = eight.v = (fkv_codec_config){.bits = 8, .group = 64};
    size_t bytes = 0;
    uint8_t *open = outputs_under(eight, 1, &bytes);
    uint8_t *sealed = outputs_under((fkv_layer_config)SEALED_LAYER, 29, &bytes);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        bool same = memcmp(open + t * bytes, sealed + t * bytes, bytes) == 0;
        ck_assert_msg(same == (t < SPAN || t < 2 * PAGE), "token %u has %s outputs as 8/8", t, same ? "the same" : "other");
    }
    free(open);
    free(sealed);
}
END_TEST

/* ---- truncation ---- */

static void check_message(const char *format, uint32_t n) {
    char text[64];
    (void)snprintf(text, sizeof text, format, n);
    ck_assert_msg(strstr(fkv_message(), text) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(), text);
}

START_TEST(truncate_works_within_a_page_or_to_a_span_boundary) {
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    open_sealed(&w, tokens);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    const uint32_t length = 196;
    /* pages from token `held` on are open; this is the start of the span that contains the position one page before the end */
    const uint32_t held = (length - PAGE) / SPAN * SPAN;
    cache_fixture_run(&w, seq, tokens, 0, length, 40, NULL);
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE);
    check_message("truncate to %u tokens", held - SPAN);
    check_message("keep at least %u tokens", held);
    ck_assert_uint_eq(cache_fixture_length(&w, seq), length);
    ck_ok(fkv_seq_truncate(w.cache, seq, length - PAGE));
    ck_ok(fkv_seq_truncate(w.cache, seq, held + 1));
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE); /* the open form of the previous span is gone */
    ck_ok(fkv_seq_truncate(w.cache, seq, held - SPAN));
    ck_ok(fkv_seq_truncate(w.cache, seq, 7)); /* the first page is always open */
    cache_fixture_run(&w, seq, tokens, 7, SPAN + PAGE - 7, 11, NULL);
    ck_ok(fkv_seq_truncate(w.cache, seq, PAGE + 1)); /* at the start of a span, the pages of the previous span are still open */
    cache_fixture_close(&w);
}
END_TEST

START_TEST(prefix_and_file_restore_the_first_page_and_the_last_span) {
    char path[512];
    (void)cache_path(path, "sealed.fkv");
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    open_sealed(&w, tokens);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, seq, tokens, 0, 100, 40, NULL);
    const uint32_t held = (100 - PAGE) / SPAN * SPAN;
    ck_ok(fkv_prefix_insert(w.cache, seq, tokens, 100));
    ck_status(fkv_seq_save(w.cache, seq, tokens, held - 1, path), FKV_GONE);
    ck_ok(fkv_seq_save(w.cache, seq, tokens, held + PAGE + 3, path));
    ck_ok(fkv_seq_close(w.cache, seq));

    uint32_t n_shared = 0;
    fkv_seq_config opened = {.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = N_TOKENS};
    ck_ok(fkv_seq_open(w.cache, &opened, &seq, &n_shared));
    ck_assert_uint_eq(n_shared, 100 / PAGE * PAGE);
    ck_ok(fkv_seq_truncate(w.cache, seq, n_shared - 1));
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE);
    ck_ok(fkv_seq_truncate(w.cache, seq, held - SPAN));
    ck_ok(fkv_seq_close(w.cache, seq));

    ck_ok(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    ck_ok(fkv_seq_truncate(w.cache, seq, held + 1));
    ck_status(fkv_seq_truncate(w.cache, seq, held - 1), FKV_GONE);
    ck_ok(fkv_seq_truncate(w.cache, seq, held - SPAN));
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
}
END_TEST

/* The first page of a cached prefix must stay open even if other sequences need all other pages. */
START_TEST(prefix_can_be_shared_after_another_sequence_used_all_pages) {
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    uint32_t others[N_TOKENS];
    open_sealed(&w, tokens);
    cache_tokens(8, others, N_TOKENS);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, seq, tokens, 0, 64, 40, NULL);
    ck_ok(fkv_prefix_insert(w.cache, seq, tokens, 64));
    ck_ok(fkv_seq_close(w.cache, seq));
    fkv_seq two[2] = {cache_fixture_seq(&w, N_TOKENS), cache_fixture_seq(&w, N_TOKENS)};
    for (int i = 0; i < 2; i++) cache_fixture_run(&w, two[i], others, 0, 140, 40, NULL);
    uint32_t n_shared = 0;
    fkv_seq_config asked = {.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = N_TOKENS};
    ck_ok(fkv_prefix_match(w.cache, &asked, &n_shared));
    ck_assert_uint_eq(n_shared, 64);
    cache_fixture_close(&w);
}
END_TEST

/* Computes all tokens in steps of n_pages pages and inserts the prefix after every step, so that open pages enter the tree before
 * they are sealed. */
static void insert_while_open(cache_fixture *w, fkv_seq seq, const uint32_t *tokens, uint32_t n_pages) {
    for (uint32_t from = 0; from < N_TOKENS; from += n_pages * PAGE) {
        const uint32_t end = from + n_pages * PAGE < N_TOKENS ? from + n_pages * PAGE : N_TOKENS;
        cache_fixture_run(w, seq, tokens, from, end, 40, NULL);
        ck_ok(fkv_prefix_insert(w->cache, seq, tokens, end));
    }
}

/* A prompt that diverges from an earlier one after n pages shares these n pages, and its outputs are bit-identical to those of a
 * prompt that shares nothing. */
START_TEST(prefixes_are_shared_up_to_any_page) {
    size_t bytes = 0;
    uint8_t *expected = outputs_under((fkv_layer_config)SEALED_LAYER, 40, &bytes);
    uint8_t *got = malloc(N_TOKENS * bytes);
    ck_assert_ptr_nonnull(got);
    for (uint32_t n = 1; n <= N_TOKENS / PAGE; n++) {
        cache_fixture w;
        uint32_t tokens[N_TOKENS];
        open_sealed(&w, tokens);
        uint32_t others[N_TOKENS];
        memcpy(others, tokens, sizeof tokens);
        if (n * PAGE < N_TOKENS) others[n * PAGE] ^= 1; /* the first sequence diverges after n pages */
        fkv_seq first = cache_fixture_seq(&w, N_TOKENS);
        insert_while_open(&w, first, others, n);
        ck_ok(fkv_seq_close(w.cache, first));
        uint32_t n_shared = 0;
        fkv_seq seq = 0;
        fkv_seq_config opened = {.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = N_TOKENS};
        ck_ok(fkv_seq_open(w.cache, &opened, &seq, &n_shared));
        ck_assert_uint_eq(n_shared, n * PAGE);
        cache_fixture_run(&w, seq, tokens, n_shared, N_TOKENS, 7, got);
        ck_assert_mem_eq(got + n_shared * bytes, expected + n_shared * bytes, (N_TOKENS - n_shared) * bytes);
        ck_assert(fkv_cache_consistent(w.cache));
        cache_fixture_close(&w);
    }
    free(expected);
    free(got);
}
END_TEST

/* The open form of a prefix's first page must be evicted after all other cached open pages, because nothing can be shared without
 * it. */
START_TEST(open_pages_of_new_prefixes_do_not_evict_the_first_pages_of_older_ones) {
    enum { N_PREFIXES = 6 };
    cache_fixture w;
    uint32_t tokens[N_PREFIXES][N_TOKENS];
    open_sealed(&w, tokens[0]);
    for (uint32_t i = 0; i < N_PREFIXES; i++) {
        cache_tokens(100 + i, tokens[i], N_TOKENS);
        fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
        cache_fixture_run(&w, seq, tokens[i], 0, SPAN, 40, NULL);
        ck_ok(fkv_prefix_insert(w.cache, seq, tokens[i], SPAN));
        ck_ok(fkv_seq_close(w.cache, seq));
    }
    for (uint32_t i = 0; i < N_PREFIXES; i++) {
        uint32_t n_shared = 0;
        fkv_seq_config asked = {.max_tokens = N_TOKENS, .prompt = tokens[i], .n_prompt = N_TOKENS};
        ck_ok(fkv_prefix_match(w.cache, &asked, &n_shared));
        ck_assert_msg(n_shared == SPAN, "prefix %u: %u tokens can be shared", i, n_shared);
    }
    cache_fixture_close(&w);
}
END_TEST

/* Whatever the length of a sequence, a step with draft tokens can be truncated after any of its tokens. */
START_TEST(a_step_of_up_to_a_page_can_be_truncated_to_any_length) {
    size_t bytes = 0;
    uint8_t *expected = outputs_under((fkv_layer_config)SEALED_LAYER, 40, &bytes);
    uint8_t *got = malloc(N_TOKENS * bytes);
    ck_assert_ptr_nonnull(got);
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    open_sealed(&w, tokens);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    uint32_t length = 0;
    for (uint32_t turn = 0; length < N_TOKENS; turn++) {
        uint32_t drafts[N_TOKENS];
        const uint32_t end = length + PAGE + 1 < N_TOKENS ? length + PAGE + 1 : N_TOKENS;
        const uint32_t accepted = length + 1 + turn * 5 % (end - length);
        for (uint32_t i = 0; i < N_TOKENS; i++) drafts[i] = tokens[i] ^ (i < accepted ? 0 : 1);
        cache_fixture_run(&w, seq, drafts, length, end, PAGE + 1, got);
        ck_ok(fkv_prefix_insert(w.cache, seq, tokens, accepted));
        ck_ok(fkv_seq_truncate(w.cache, seq, accepted));
        length = accepted;
    }
    ck_assert_mem_eq(got, expected, N_TOKENS * bytes);
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
    free(expected);
    free(got);
}
END_TEST

/* ---- memory ---- */

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

START_TEST(long_context_needs_at_most_71_percent_of_8_4) {
    uint64_t eight = planned((fkv_codec_config){8, 64}, (fkv_codec_config){4, 64});
    uint64_t sealed = planned((fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED},
                              (fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED_V});
    printf("131072 tokens of 32 layers: sealed %.1f bytes per token, 8/4 %.1f, ratio %.4f\n", (double)sealed / 131072,
           (double)eight / 131072, (double)sealed / (double)eight);
    ck_assert_double_le((double)sealed, 0.71 * (double)eight);
}
END_TEST

/* ---- files ---- */

enum { FILE_BYTES = 1 << 20 };

/* Opens a cache with one sealed layer, one affine layer, and one sealed layer with a window. */
static void open_golden(cache_fixture *w, uint32_t tokens[N_TOKENS]) {
    static const fkv_layer_config layers[] = {{2, 1, 32, 0, 0, 0, 0, {4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}},
                                              {2, 2, 32, 0, 0, 0, 0, {8, 32}, {4, 32}},
                                              {1, 1, 48, 20, 3, 0, 0, {3, 0, FKV_CODEC_SEALED}, {2, 0, FKV_CODEC_SEALED_V}}};
    fkv_config config = config_of(layers[0]);
    config.n_layers = N_OF(layers);
    config.layers = layers;
    config.rotation_seed = 7;
    (void)snprintf(config.rope_id, sizeof config.rope_id, "neox base=10000");
    ck_ok(cache_fixture_open(w, &config));
    cache_tokens(7, tokens, N_TOKENS);
}

/* Checks that loading the file `path` and saving the sequence again gives identical bytes. */
static void check_reload(cache_fixture *w, const uint32_t *tokens, const char *path) {
    static uint8_t golden[FILE_BYTES];
    static uint8_t now[FILE_BYTES];
    char saved[512];
    (void)cache_path(saved, "again.fkv");
    fkv_seq seq = 0;
    ck_ok(fkv_seq_load(w->cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    ck_ok(fkv_seq_save(w->cache, seq, tokens, 0, saved));
    size_t n = file_fixture_read_file(path, golden, FILE_BYTES);
    ck_assert_uint_eq(file_fixture_read_file(saved, now, FILE_BYTES), n);
    ck_assert_mem_eq(golden, now, n);
}

/* Checks that saving the sequence now gives the bytes of the golden file `path`, and that loading the golden file and saving it
 * again gives the same bytes. */
static void check_golden(const char *path, void (*open)(cache_fixture *w, uint32_t tokens[N_TOKENS])) {
    static uint8_t golden[FILE_BYTES];
    static uint8_t now[FILE_BYTES];
    char saved[512];
    (void)cache_path(saved, "now.fkv");
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    open(&w, tokens);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, seq, tokens, 0, 90, 40, NULL);
    ck_ok(fkv_seq_save(w.cache, seq, tokens, 0, saved));
    size_t n = file_fixture_read_file(saved, now, FILE_BYTES);
    const char *keep = getenv("FKV_TEST_KEEP_GOLDEN");
    if (keep != NULL) {
        char to[512];
        (void)snprintf(to, sizeof to, "%s%s", keep, strrchr(path, 0x2f));
        file_fixture_write_file(to, now, n);
    }
    ck_assert_uint_eq(file_fixture_read_file(path, golden, FILE_BYTES), n);
    ck_assert_mem_eq(golden, now, n);
    ck_ok(fkv_seq_close(w.cache, seq));
    check_reload(&w, tokens, path);
    cache_fixture_close(&w);
}

/* tests/golden/sealed.fkv was saved by this test at the time when rounding of key scales to seven bits was introduced. */
START_TEST(the_golden_sealed_file_is_reproduced_and_loads) {
    check_golden("tests/golden/sealed.fkv", open_golden);
    fkv_file_info info;
    ck_ok(fkv_file_inspect("tests/golden/sealed.fkv", true, &info));
    ck_assert_uint_eq(info.version, 1);
    ck_assert_int_eq(info.first_layer.k.kind, FKV_CODEC_SEALED);
    ck_assert_int_eq(info.first_layer.v.kind, FKV_CODEC_SEALED_V);
}
END_TEST

/* tests/golden/sealed_fine_scales.fkv was saved before key scales were rounded to seven bits. */
START_TEST(sealed_file_with_full_precision_scales_is_preserved) {
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    open_golden(&w, tokens);
    check_reload(&w, tokens, "tests/golden/sealed_fine_scales.fkv");
    cache_fixture_close(&w);
}
END_TEST

/* ---- calibrated keys ---- */

/* Opens a cache with a layer whose two heads have different channel bits, and a window layer with an average of 3 bits per
 * channel. other: if true, the bits of two channels are swapped. */
static fkv_status try_calibrated(cache_fixture *w, bool other) {
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
    fkv_status status = cache_fixture_open(w, &config); /* the cache copies the channel bits */
    for (int i = 0; i < 2; i++) w->layers[i].channel_bits = NULL;
    return status;
}

static void open_calibrated(cache_fixture *w, uint32_t tokens[N_TOKENS]) {
    ck_ok(try_calibrated(w, false));
    cache_tokens(7, tokens, N_TOKENS);
}

START_TEST(the_golden_calibrated_file_is_reproduced_and_foreign_to_other_channel_bits) {
    static const char path[] = "tests/golden/calibrated.fkv";
    check_golden(path, open_calibrated);
    fkv_file_info info;
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert_uint_eq(info.version, 1);
    ck_assert_int_eq(info.first_layer.k.kind, FKV_CODEC_CALIBRATED);
    cache_fixture w;
    fkv_seq seq = 0;
    ck_ok(try_calibrated(&w, true));
    ck_status(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq), FKV_FILE_FOREIGN);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "calibration is "));
    cache_fixture_close(&w);
}
END_TEST

START_TEST(invalid_channel_bits_are_rejected_with_their_values) {
    static const struct {
        uint8_t first[5];
        const char *says;
    } bad[] = {{{3, 4, 4, 4, 5}, "channel 0 has 3 bits"},
               {{0}, "channel 0 has 0 bits"},
               {{6, 4, 4, 4, 4}, "66 bits in total"},
               {{6, 2, 4, 4, 4}, "1 of 6 bits; both numbers must be multiples of 4"}};
    for (size_t i = 0; i < N_OF(bad); i++) {
        uint8_t bits[16];
        memset(bits, 4, sizeof bits);
        memcpy(bits, bad[i].first, sizeof bad[i].first);
        fkv_config config = config_of((fkv_layer_config){
            1, 1, 16, 0, 0, 0, 0, {4, 0, FKV_CODEC_CALIBRATED}, {4, 0, FKV_CODEC_SEALED_V}, .channel_bits = bits});
        fkv_plan plan;
        ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
        ck_assert_msg(strstr(fkv_message(), bad[i].says) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(), bad[i].says);
    }
}
END_TEST

/* ---- damage ---- */

static void check_flipped_bits(const char *golden) {
    static uint8_t bytes[FILE_BYTES];
    char path[512];
    (void)cache_path(path, "flipped.fkv");
    size_t n = file_fixture_read_file(golden, bytes, FILE_BYTES);
    for (size_t at = 0; at < n; at += at < 512 ? 1 : 37) {
        uint8_t bit = (uint8_t)(1u << at % 8);
        bytes[at] ^= bit;
        file_fixture_write_file(path, bytes, n);
        bytes[at] ^= bit;
        fkv_file_info info;
        fkv_status expected = at < 8 ? FKV_FILE_FORMAT : at < 12 ? FKV_FILE_VERSION : FKV_FILE_DAMAGED;
        fkv_status got = fkv_file_inspect(path, true, &info);
        ck_assert_msg(got == expected, "byte %zu: %s", at, fkv_status_name(got));
    }
}

START_TEST(every_flipped_bit_of_a_sealed_file_is_detected) {
    check_flipped_bits("tests/golden/sealed.fkv");
    check_flipped_bits("tests/golden/calibrated.fkv");
}
END_TEST

START_TEST(sealed_file_is_foreign_to_an_unsealed_layer) {
    cache_fixture w;
    uint32_t tokens[N_TOKENS];
    open_golden(&w, tokens);
    fkv_layer_config layers[3];
    memcpy(layers, w.layers, sizeof layers);
    fkv_config config = w.config;
    cache_fixture_close(&w);
    layers[0].k = (fkv_codec_config){.bits = 4, .group = 32};
    layers[0].v = (fkv_codec_config){.bits = 4, .group = 32};
    config.layers = layers;
    ck_ok(cache_fixture_open(&w, &config));
    fkv_seq seq = 0;
    ck_status(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, "tests/golden/sealed.fkv", &seq),
              FKV_FILE_FOREIGN);
    cache_fixture_close(&w);
}
END_TEST

TEST_MAIN("sealed pages", first_page_and_current_span_are_read_in_8_bits, truncate_works_within_a_page_or_to_a_span_boundary,
          prefix_and_file_restore_the_first_page_and_the_last_span, prefix_can_be_shared_after_another_sequence_used_all_pages,
          prefixes_are_shared_up_to_any_page, open_pages_of_new_prefixes_do_not_evict_the_first_pages_of_older_ones,
          a_step_of_up_to_a_page_can_be_truncated_to_any_length, long_context_needs_at_most_71_percent_of_8_4,
          the_golden_sealed_file_is_reproduced_and_loads, sealed_file_with_full_precision_scales_is_preserved,
          the_golden_calibrated_file_is_reproduced_and_foreign_to_other_channel_bits,
          invalid_channel_bits_are_rejected_with_their_values, every_flipped_bit_of_a_sealed_file_is_detected,
          sealed_file_is_foreign_to_an_unsealed_layer)
