/* Tests of latent layers through the public header: outputs agree with attention over the unquantized rows, and are bit-identical
 * for any chunking, batch, thread count, fork, truncation and page file.
 */
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/prefix_store.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_LAYERS = 3, PAGE = 16, N_TOKENS = 200 };

static fkv_layer_config layers[N_LAYERS];

/* Layers 0 and 2 are latent, with different shapes and codecs; layer 1 stores keys and values. */
static fkv_config latent_config(fkv_codec_config codec, uint32_t n_threads) {
    fkv_config config = fkv_config_default();
    layers[0] = (fkv_layer_config){.n_q_heads = 5, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 16, .scale = 0.15f, .k = codec};
    layers[1] = (fkv_layer_config){.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 32, .k = {16, 0}, .v = {16, 0}};
    layers[2] = (fkv_layer_config){.n_q_heads = 12, .n_kv_heads = 1, .head_dim = 128, .rope_dim = 48, .scale = 0.1f, .k = codec};
    config.n_layers = N_LAYERS;
    config.layers = layers;
    config.page_tokens = PAGE;
    config.max_tokens = 2048;
    config.max_seqs = 6;
    config.max_step_tokens = N_TOKENS;
    config.n_threads = n_threads;
    return config;
}

static void open_fixture(cache_fixture *w, fkv_codec_config codec, uint32_t n_threads, fkv_rotate rotate) {
    fkv_config config = latent_config(codec, n_threads);
    config.rotate = rotate;
    ck_ok(cache_fixture_open(w, &config));
}

static uint8_t *allocate_outputs(const cache_fixture *w) {
    uint8_t *outputs = calloc(N_TOKENS, w->output_bytes);
    ck_assert(outputs != NULL);
    return outputs;
}

/* Returns the outputs of one sequence, computed in steps of `chunk` tokens in a new cache. */
static uint8_t *outputs_of(fkv_codec_config codec, uint32_t n_threads, fkv_rotate rotate, uint32_t chunk,
                           const uint32_t *tokens) {
    cache_fixture w;
    open_fixture(&w, codec, n_threads, rotate);
    uint8_t *outputs = allocate_outputs(&w);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, seq, tokens, 0, N_TOKENS, chunk, outputs);
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
    return outputs;
}

/* Codecs, each with a bound on the relative L2 error that its quantization causes in outputs for random inputs. */
static const struct {
    fkv_codec_config codec;
    fkv_rotate rotate;
    double tolerance;
} CODECS[] = {{{16, 0}, FKV_ROTATE_NONE, 1e-3},
              {{8, 64}, FKV_ROTATE_NONE, 2e-2},
              {{8, 32}, FKV_ROTATE_KV, 2e-2},
              {{4, 32}, FKV_ROTATE_K, 0.25},
              {{4, 0, FKV_CODEC_TURBO}, FKV_ROTATE_K, 0.25},
              {{4, 0, FKV_CODEC_SEALED}, FKV_ROTATE_V, 0.25},
              {{4, 0, FKV_CODEC_SEALED}, FKV_ROTATE_NONE, 0.25}};

START_TEST(outputs_agree_with_attention_over_the_unquantized_rows) {
    uint32_t tokens[N_TOKENS];
    cache_tokens(3, tokens, N_TOKENS);
    for (size_t c = 0; c < N_OF(CODECS); c++) {
        cache_fixture w;
        open_fixture(&w, CODECS[c].codec, 1, CODECS[c].rotate);
        uint8_t *outputs = allocate_outputs(&w);
        cache_fixture_run(&w, cache_fixture_seq(&w, N_TOKENS), tokens, 0, N_TOKENS, 33, outputs);
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            const size_t n = (size_t)layers[layer].n_q_heads * layers[layer].head_dim;
            float *expected = malloc(N_TOKENS * n * sizeof *expected);
            float *got = malloc(n * sizeof *got);
            ck_assert(expected != NULL && got != NULL);
            cache_fixture_reference(&w, tokens, 0, N_TOKENS, layer, expected);
            for (uint32_t position = 0; position < N_TOKENS; position++) {
                cache_fixture_output(&w, outputs, position, layer, got);
                ck_assert_double_le(relative_l2(got, expected + position * n, n), CODECS[c].tolerance);
            }
            free(expected);
            free(got);
        }
        free(outputs);
        cache_fixture_close(&w);
    }
}
END_TEST

START_TEST(outputs_are_bit_identical_for_any_chunking_and_thread_count) {
    uint32_t tokens[N_TOKENS];
    cache_tokens(5, tokens, N_TOKENS);
    for (size_t c = 0; c < N_OF(CODECS); c++) {
        static const uint32_t chunks[] = {1, 7, 64, N_TOKENS};
        uint8_t *expected = outputs_of(CODECS[c].codec, 1, CODECS[c].rotate, 31, tokens);
        for (uint32_t i = 0; i < N_OF(chunks); i++) {
            cache_fixture shape;
            open_fixture(&shape, CODECS[c].codec, 1, CODECS[c].rotate);
            uint8_t *got = outputs_of(CODECS[c].codec, 1 + i % 3, CODECS[c].rotate, chunks[i], tokens);
            ck_assert(memcmp(got, expected, N_TOKENS * shape.output_bytes) == 0);
            free(got);
            cache_fixture_close(&shape);
        }
        free(expected);
    }
}
END_TEST

/* Forks, truncates, aborts and batches sequences, reloads one sequence from a page file, and compares every output. */
static void check_forks_and_files(fkv_codec_config codec, fkv_rotate rotate) {
    uint32_t tokens[N_TOKENS];
    char path[512];
    cache_tokens(7, tokens, N_TOKENS);
    uint8_t *expected = outputs_of(codec, 1, rotate, 50, tokens);
    cache_fixture w;
    open_fixture(&w, codec, 2, rotate);
    uint8_t *got[4];
    for (int i = 0; i < 4; i++) got[i] = allocate_outputs(&w);
    fkv_seq seqs[4];
    seqs[0] = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, seqs[0], tokens, 0, 90, 40, got[0]);
    ck_ok(fkv_seq_fork(w.cache, seqs[0], N_TOKENS, &seqs[1]));
    ck_ok(fkv_prefix_insert(w.cache, seqs[0], tokens, 90));
    uint32_t n_shared = 0;
    const fkv_seq_config shared = {.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = 90};
    ck_ok(fkv_seq_open(w.cache, &shared, &seqs[2], &n_shared));
    ck_assert_uint_eq(n_shared, 80);
    cache_fixture_run(&w, seqs[2], tokens, 80, 98, 9, got[2]); /* sealed sequences can be truncated by up to one page */
    ck_ok(fkv_seq_truncate(w.cache, seqs[2], 85));
    ck_ok(fkv_seq_save(w.cache, seqs[2], tokens, 0, cache_path(path, "latent.fkv")));
    ck_ok(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seqs[3]));
    fkv_file_info info;
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert_uint_eq(info.first_layer.rope_dim, 16);
    const uint32_t lengths[] = {90, 90, 85, 85};
    cache_chunk chunks[4];
    for (uint32_t i = 0; i < 4; i++) chunks[i] = (cache_chunk){seqs[i], tokens, lengths[i], 17 + i, got[i]};
    cache_fixture_step(&w, chunks, 4, CACHE_ABORT);
    cache_fixture_step(&w, chunks, 4, CACHE_COMMIT);
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t first = lengths[i] + 17 + i;
        cache_fixture_run(&w, seqs[i], tokens, first, N_TOKENS, 30, got[i]);
        ck_assert(memcmp(got[i] + lengths[i] * w.output_bytes, expected + lengths[i] * w.output_bytes,
                         (N_TOKENS - lengths[i]) * w.output_bytes) == 0);
        free(got[i]);
    }
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
    free(expected);
}

START_TEST(outputs_are_bit_identical_after_fork_truncation_and_reload) {
    check_forks_and_files((fkv_codec_config){8, 64}, FKV_ROTATE_K);
    check_forks_and_files((fkv_codec_config){4, 0, FKV_CODEC_SEALED}, FKV_ROTATE_V);
}
END_TEST

static void check_packed_pages(fkv_codec_config codec, fkv_rotate rotate) {
    uint32_t tokens[N_TOKENS];
    cache_tokens(9, tokens, N_TOKENS);
    cache_fixture a;
    cache_fixture b;
    open_fixture(&a, codec, 1, rotate);
    open_fixture(&b, codec, 1, rotate);
    uint8_t *expected = allocate_outputs(&a);
    uint8_t *got = allocate_outputs(&a);
    fkv_seq seq = cache_fixture_seq(&a, N_TOKENS);
    cache_fixture_run(&a, seq, tokens, 0, N_TOKENS, N_TOKENS, expected);
    ck_ok(fkv_prefix_insert(a.cache, seq, tokens, N_TOKENS));
    uint8_t *packed = malloc(fkv_prefix_packed_bytes(a.cache));
    ck_assert(packed != NULL);
    fkv_page_key key;
    ck_ok(fkv_prefix_root(a.cache, "t", 1, &key));
    for (uint32_t page = 1; page <= 4; page++) {
        uint64_t n_bytes = 0;
        ck_ok(fkv_prefix_pack(a.cache, 0, tokens, page, &key, packed, &n_bytes));
        ck_ok(fkv_prefix_unpack(b.cache, 0, tokens, page, &key, packed, n_bytes));
    }
    uint32_t n_shared = 0;
    ck_ok(fkv_seq_open(b.cache, &(fkv_seq_config){.max_tokens = N_TOKENS, .prompt = tokens, .n_prompt = N_TOKENS}, &seq,
                       &n_shared));
    ck_assert_uint_eq(n_shared, 4 * PAGE);
    cache_fixture_run(&b, seq, tokens, n_shared, N_TOKENS, 20, got);
    ck_assert(memcmp(got + n_shared * a.output_bytes, expected + n_shared * a.output_bytes,
                     (N_TOKENS - n_shared) * a.output_bytes) == 0);
    free(packed);
    free(expected);
    free(got);
    cache_fixture_close(&a);
    cache_fixture_close(&b);
}

START_TEST(packed_prefix_pages_keep_latent_rows) {
    check_packed_pages((fkv_codec_config){8, 64}, FKV_ROTATE_NONE);
    check_packed_pages((fkv_codec_config){4, 0, FKV_CODEC_SEALED}, FKV_ROTATE_V); /* four pages are a span */
}
END_TEST

/* The plan of a sealed layer counts the sealed pages and, separately, the open pages. */
START_TEST(sealed_rows_have_four_bits) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer.n_q_heads = 128;
    config.layer.n_kv_heads = 1;
    config.layer.head_dim = 512;
    config.layer.rope_dim = 64;
    config.layer.scale = 0.1f;
    config.max_tokens = 65536;
    config.n_threads = 1;
    fkv_plan plan;
    ck_ok(fkv_plan_make(&config, &plan));
    const uint64_t sealed_bytes = 512 / 2 + 2 * 8 * 2 + 64 * 2;
    const uint64_t open_bytes = 512 + 2 * 8 * 2 + 64 * 2;
    ck_assert_uint_eq(plan.n_groups, 2);
    ck_assert_uint_eq(plan.token_bytes, sealed_bytes);
    ck_assert_uint_eq(plan.group_page_bytes[0], 64 * sealed_bytes);
    ck_assert_uint_eq(plan.group_page_bytes[1], 64 * open_bytes);
    ck_assert_uint_eq(plan.slab_bytes, 65536 * sealed_bytes + plan.group_pages[1] * 64 * open_bytes);
}
END_TEST

START_TEST(rows_are_stored_once) {
    static const struct {
        fkv_codec_config codec;
        uint64_t token_bytes;
    } expected[] = {{{16, 0}, 1152}, {{8, 64}, 672}, {{4, 64}, 416}, {{4, 32}, 448}};
    for (size_t i = 0; i < N_OF(expected); i++) {
        fkv_config config = fkv_config_default();
        config.n_layers = 1;
        config.layer = (fkv_layer_config){.n_q_heads = 128, .n_kv_heads = 1, .head_dim = 512, .rope_dim = 64, .scale = 0.1f};
        config.layer.k = expected[i].codec;
        config.max_tokens = 4096;
        config.n_threads = 1;
        fkv_plan plan;
        ck_ok(fkv_plan_make(&config, &plan));
        ck_assert_uint_eq(plan.token_bytes, expected[i].token_bytes);
        ck_assert_uint_eq(plan.slab_bytes, 4096 * expected[i].token_bytes);
    }
}
END_TEST

START_TEST(files_of_another_shape_are_foreign) {
    uint32_t tokens[N_TOKENS];
    char path[512];
    cache_tokens(11, tokens, N_TOKENS);
    cache_fixture w;
    fkv_config config = latent_config((fkv_codec_config){8, 64}, 1);
    ck_ok(cache_fixture_open(&w, &config));
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, seq, tokens, 0, 40, 40, NULL);
    ck_ok(fkv_seq_save(w.cache, seq, tokens, 0, cache_path(path, "shape.fkv")));
    cache_fixture_close(&w);
    layers[0].rope_dim = 32;
    fkv_cache *cache = NULL;
    ck_ok(fkv_cache_open(&config, &cache));
    ck_assert_int_eq(fkv_seq_load(cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq), FKV_FILE_FOREIGN);
    ck_assert(strstr(fkv_message(), "rope_dim") != NULL);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(invalid_latent_layers_are_rejected) {
    const fkv_layer_config good = {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 16, .scale = 0.1f, .k = {8, 64}};
    const struct {
        const char *name;
        fkv_layer_config layer;
        fkv_status status;
    } cases[] = {
        {"n_kv_heads",
         {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .rope_dim = 16, .scale = 0.1f, .k = {8, 64}},
         FKV_BAD_CONFIG},
        {"rope_dim",
         {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 24, .scale = 0.1f, .k = {8, 64}},
         FKV_BAD_CONFIG},
        {"rope_dim",
         {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 528, .scale = 0.1f, .k = {8, 64}},
         FKV_BAD_CONFIG},
        {"scale", {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 16, .k = {8, 64}}, FKV_BAD_CONFIG},
        {"group size",
         {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 48, .rope_dim = 16, .scale = 0.1f, .k = {8, 64}},
         FKV_BAD_CONFIG},
        {"sealed codecs of 3 bits",
         {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 16, .scale = 0.1f, .k = {3, 0, FKV_CODEC_SEALED}},
         FKV_UNSUPPORTED},
        {"calibrated",
         {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 16, .scale = 0.1f, .k = {4, 0, FKV_CODEC_CALIBRATED}},
         FKV_UNSUPPORTED},
        {"multiple of 32",
         {.n_q_heads = 4, .n_kv_heads = 1, .head_dim = 48, .rope_dim = 16, .scale = 0.1f, .k = {4, 0, FKV_CODEC_SEALED}},
         FKV_BAD_CONFIG},
        {"state", {.rope_dim = 16, .state_bytes = 64}, FKV_BAD_CONFIG},
    };
    fkv_config config = fkv_config_default();
    fkv_plan plan;
    config.n_layers = 1;
    config.max_tokens = 1024;
    config.layer = good;
    ck_ok(fkv_plan_make(&config, &plan));
    for (size_t i = 0; i < N_OF(cases); i++) {
        config.layer = cases[i].layer;
        ck_assert_int_eq(fkv_plan_make(&config, &plan), cases[i].status);
        ck_assert_msg(strstr(fkv_message(), cases[i].name) != NULL, "%s: %s", cases[i].name, fkv_message());
    }
}
END_TEST

START_TEST(invalid_calls_are_rejected) {
    static float rows[4096];
    fkv_config config = latent_config((fkv_codec_config){8, 64}, 1);
    fkv_cache *cache = NULL;
    fkv_seq seq = 0;
    fkv_step *step = NULL;
    ck_ok(fkv_cache_open(&config, &cache));
    ck_ok(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = 64}, &seq, NULL));
    ck_ok(fkv_step_begin(cache, &(fkv_row){seq, 2}, 1, &step));
    ck_assert_int_eq(fkv_write(step, 0, rows, rows), FKV_BAD_ARGUMENT);
    ck_assert_int_eq(fkv_write(step, 1, rows, NULL), FKV_BAD_ARGUMENT);
    ck_ok(fkv_write(step, 0, rows, NULL));
    ck_assert_int_eq(fkv_attend(step, 0, rows, rows), FKV_BAD_ARGUMENT);
    ck_assert_int_eq(fkv_attend(step, 0, rows, rows + 2 * 5 * 80 - 1), FKV_BAD_ARGUMENT);
    ck_assert_int_eq(fkv_attend(step, 0, rows + 2 * 5 * 64 - 1, rows), FKV_BAD_ARGUMENT);
    ck_ok(fkv_attend(step, 0, rows, rows + 2 * 5 * 80));
    ck_ok(fkv_step_abort(step));
    fkv_cache_close(cache);
}
END_TEST

TEST_MAIN("latent_layers", outputs_agree_with_attention_over_the_unquantized_rows,
          outputs_are_bit_identical_for_any_chunking_and_thread_count, outputs_are_bit_identical_after_fork_truncation_and_reload,
          packed_prefix_pages_keep_latent_rows, rows_are_stored_once, sealed_rows_have_four_bits,
          files_of_another_shape_are_foreign, invalid_latent_layers_are_rejected, invalid_calls_are_rejected)
