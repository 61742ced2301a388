/* Tests of the numerics identity: instruction sets with the same identity compute bit-identical pages, the pages of each class of
 * instruction sets equal stored digests, and instruction sets with different identities share neither packed pages nor page
 * files.
 */
#include "../src/base/checksum.h"
#include "../src/model/forward/numerics.h"
#include "cache_fixture.h"
#include "golden_models.h"
#include "model_fixture.h"
#include "test.h"

#include <flatkv/prefix_store.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 16, SPAN = 4, N_PAGES = 2 * SPAN, N_TOKENS = N_PAGES * PAGE, HEADER_BYTES = 160, TENANT = 1 };

static const fkv_isa ISAS[] = {FKV_ISA_SCALAR, FKV_ISA_NEON, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX};

/* Models with float weights, with 4-bit weights, and with experts, sinks and windows. */
static const char *const MODELS[] = {"llama2", "llama_gptq", "gpt_oss_mxfp4"};
static const char *const CODECS[] = {"16/16", "8/4", "tq4/tq4", "sealed"};

/* The first 16 hexadecimal digits of the SHA-256 of all keys and values. If a change to a kernel or to the forward pass changes
 * these bits, increase FKV_CPU_NUMERICS_VERSION, so that stored pages of earlier versions are not mixed with pages of this
 * version, and update the table. */
static const struct {
    const char *numerics;
    const char *model;
    const char *codec;
    const char *digest;
} PINNED[] = {
    /* clang-format off */
    {"cpu avx2 3", "llama2", "16/16", "1bda70d6f8078845"},
    {"cpu avx2 3", "llama2", "8/4", "35f3545fb5991588"},
    {"cpu avx2 3", "llama2", "tq4/tq4", "24d2c55e76de064f"},
    {"cpu avx2 3", "llama2", "sealed", "e112bc86127aa976"},
    {"cpu avx2 3", "llama_gptq", "16/16", "a587b41c1f5e0d25"},
    {"cpu avx2 3", "llama_gptq", "8/4", "05c577846c7d008e"},
    {"cpu avx2 3", "llama_gptq", "tq4/tq4", "f2ec304d18383f8a"},
    {"cpu avx2 3", "llama_gptq", "sealed", "d9b5ba8c9a9418c3"},
    {"cpu avx2 3", "gpt_oss_mxfp4", "16/16", "e2890bea76f424ab"},
    {"cpu avx2 3", "gpt_oss_mxfp4", "8/4", "054cff84110aa268"},
    {"cpu avx2 3", "gpt_oss_mxfp4", "tq4/tq4", "d75f59b648661391"},
    {"cpu avx2 3", "gpt_oss_mxfp4", "sealed", "2e51fd94abacce97"},
    {"cpu avx512 3", "llama2", "16/16", "4fa7244a392cdb37"},
    {"cpu avx512 3", "llama2", "8/4", "1cbb83b6bfe2c020"},
    {"cpu avx512 3", "llama2", "tq4/tq4", "2792d73bcd2c6164"},
    {"cpu avx512 3", "llama2", "sealed", "5279be137a70d02f"},
    {"cpu avx512 3", "llama_gptq", "16/16", "45091c036c5087fe"},
    {"cpu avx512 3", "llama_gptq", "8/4", "339c0b61feecd696"},
    {"cpu avx512 3", "llama_gptq", "tq4/tq4", "f2ec304d18383f8a"},
    {"cpu avx512 3", "llama_gptq", "sealed", "51dcc5accbfc2a47"},
    {"cpu avx512 3", "gpt_oss_mxfp4", "16/16", "99c77f5fb09ad957"},
    {"cpu avx512 3", "gpt_oss_mxfp4", "8/4", "ac33ce67b2b8e488"},
    {"cpu avx512 3", "gpt_oss_mxfp4", "tq4/tq4", "d75f59b648661391"},
    {"cpu avx512 3", "gpt_oss_mxfp4", "sealed", "593b0d51269dbaaf"},
    {"cpu int8dot 3 intel", "llama2", "16/16", "4fa7244a392cdb37"},
    {"cpu int8dot 3 intel", "llama2", "8/4", "039c10430a5cd9f7"},
    {"cpu int8dot 3 intel", "llama2", "tq4/tq4", "d37db4081a09b1cf"},
    {"cpu int8dot 3 intel", "llama2", "sealed", "8d834705e2857ca3"},
    {"cpu int8dot 3 intel", "llama_gptq", "16/16", "11e359c78932c7c6"},
    {"cpu int8dot 3 intel", "llama_gptq", "8/4", "e496319a7e3cf34a"},
    {"cpu int8dot 3 intel", "llama_gptq", "tq4/tq4", "96f042041f8cd3cb"},
    {"cpu int8dot 3 intel", "llama_gptq", "sealed", "287aa7f928d61014"},
    {"cpu int8dot 3 intel", "gpt_oss_mxfp4", "16/16", "1bf79b6723d7727b"},
    {"cpu int8dot 3 intel", "gpt_oss_mxfp4", "8/4", "6a3c91e6a60e4617"},
    {"cpu int8dot 3 intel", "gpt_oss_mxfp4", "tq4/tq4", "261c6676c5052da0"},
    {"cpu int8dot 3 intel", "gpt_oss_mxfp4", "sealed", "3d473eef2345ea02"},
    {"cpu scalar 3", "llama2", "16/16", "a0ab371fd19ef0da"},
    {"cpu scalar 3", "llama2", "8/4", "e87330e6d15c60c4"},
    {"cpu scalar 3", "llama2", "tq4/tq4", "2792d73bcd2c6164"},
    {"cpu scalar 3", "llama2", "sealed", "2f548ad8cbc0db5c"},
    {"cpu scalar 3", "llama_gptq", "16/16", "f9af872f11b61840"},
    {"cpu scalar 3", "llama_gptq", "8/4", "a48d964004f29038"},
    {"cpu scalar 3", "llama_gptq", "tq4/tq4", "f2ec304d18383f8a"},
    {"cpu scalar 3", "llama_gptq", "sealed", "68be100a56e58788"},
    {"cpu scalar 3", "gpt_oss_mxfp4", "16/16", "c9e42baa342f96c9"},
    {"cpu scalar 3", "gpt_oss_mxfp4", "8/4", "b3a9bbe577b1c29b"},
    {"cpu scalar 3", "gpt_oss_mxfp4", "tq4/tq4", "d75f59b648661391"},
    {"cpu scalar 3", "gpt_oss_mxfp4", "sealed", "593b0d51269dbaaf"},
    /* clang-format on */
};

typedef struct prompt_pages {
    fkv_page_key keys[N_PAGES];
    uint8_t *packed[N_PAGES];
    uint64_t n_bytes[N_PAGES];
} prompt_pages;

typedef struct test_model {
    golden_model golden;
    fkv_model *model;
} test_model;

static void open_model(test_model *m, const char *name) {
    fkv_model_config config = fkv_model_config_default();
    golden_model_open(&m->golden, name);
    ck_assert_uint_ge(m->golden.n_tokens, N_TOKENS);
    ck_ok(fkv_model_load(m->golden.folder, &config, &m->model));
}

static void close_model(test_model *m) {
    fkv_model_close(m->model);
    golden_model_close(&m->golden);
}

static fkv_runner *open_runner(const test_model *m, fkv_isa isa, const char *codec) {
    fkv_runner_config config = fkv_runner_config_default();
    ck_ok(fkv_codec_parse(codec, &config.k, &config.v));
    config.max_tokens = 4 * N_TOKENS;
    config.max_seqs = 2;
    config.max_step_tokens = 64;
    config.page_tokens = PAGE;
    config.n_threads = 1;
    config.isa = isa;
    return model_runner(m->model, config);
}

static const char *numerics_of(fkv_runner *runner) {
    fkv_stats stats;
    ck_ok(fkv_cache_stats(fkv_runner_cache(runner), &stats));
    return stats.numerics;
}

/* Runs the prompt in steps of `chunk` tokens and packs all of its pages. The caller frees the pages. */
static void compute_pages(fkv_runner *runner, const uint32_t *tokens, uint32_t chunk, prompt_pages *p) {
    fkv_cache *cache = fkv_runner_cache(runner);
    const fkv_seq_config config = {.max_tokens = N_TOKENS, .tenant = TENANT};
    fkv_page_key above;
    fkv_seq seq = 0;
    ck_ok(fkv_seq_open(cache, &config, &seq, NULL));
    for (uint32_t from = 0; from < N_TOKENS; from += chunk) {
        const uint32_t n = N_TOKENS - from < chunk ? N_TOKENS - from : chunk;
        ck_ok(fkv_runner_forward(runner, &(fkv_tokens){.seq = seq, .tokens = tokens + from, .n_tokens = n}, 1, NULL));
        ck_ok(fkv_prefix_insert(cache, seq, tokens, from + n));
    }
    ck_ok(fkv_seq_close(cache, seq));
    ck_ok(fkv_prefix_root(cache, "tenant", 6, &above));
    for (uint32_t i = 0; i < N_PAGES; i++) {
        p->packed[i] = malloc(fkv_prefix_packed_bytes(cache));
        ck_assert_ptr_nonnull(p->packed[i]);
        ck_ok(fkv_prefix_key(&above, tokens + (size_t)i * PAGE, PAGE, &p->keys[i]));
        ck_ok(fkv_prefix_pack(cache, TENANT, tokens, i + 1, &p->keys[i], p->packed[i], &p->n_bytes[i]));
        above = p->keys[i];
    }
}

static void free_pages(prompt_pages *p) {
    for (uint32_t i = 0; i < N_PAGES; i++) free(p->packed[i]);
}

static bool same_pages(const prompt_pages *a, const prompt_pages *b) {
    for (uint32_t i = 0; i < N_PAGES; i++)
        if (a->n_bytes[i] != b->n_bytes[i] || memcmp(a->packed[i], b->packed[i], a->n_bytes[i]) != 0) return false;
    return true;
}

/* Writes the first 16 hexadecimal digits of the SHA-256 of all keys and values. */
static void digest_of(const prompt_pages *p, char text[17]) {
    uint8_t digest[FKV_SHA256_BYTES];
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        const size_t skipped = HEADER_BYTES + PAGE * sizeof(uint32_t);
        fkv_sha256_add(&sha, p->packed[i] + skipped, p->n_bytes[i] - skipped);
    }
    ck_ok(fkv_sha256_close(&sha, digest));
    for (size_t i = 0; i < 8; i++) (void)snprintf(text + 2 * i, 3, "%02x", digest[i]);
}

static void check_pinned(const char *numerics, const char *model, const char *codec, const prompt_pages *pages) {
    char digest[17];
    digest_of(pages, digest);
    for (size_t i = 0; i < N_OF(PINNED); i++) {
        if (strcmp(PINNED[i].numerics, numerics) != 0 || strcmp(PINNED[i].model, model) != 0 ||
            strcmp(PINNED[i].codec, codec) != 0)
            continue;
        ck_assert_msg(strcmp(PINNED[i].digest, digest) == 0,
                      "%s: the %s pages of \"%s\" have the digest %s (expected %s): increase FKV_CPU_NUMERICS_VERSION and update "
                      "the digests in this test",
                      model, codec, numerics, digest, PINNED[i].digest);
    }
}

/* The instruction sets of a class compute the prompt in steps of different lengths. No step is longer than a page, because longer
 * steps of a layer with a sliding window drop pages before they enter the prefix tree, and packed pages then contain fewer
 * groups. */
static void check_classes(const test_model *m, const char *codec) {
    prompt_pages pages[N_OF(ISAS)] = {0};
    char numerics[N_OF(ISAS)][FKV_NUMERICS_BYTES] = {0};
    for (size_t a = 0; a < N_OF(ISAS); a++) {
        if (!fkv_cpu_runs(ISAS[a])) continue;
        fkv_runner *runner = open_runner(m, ISAS[a], codec);
        (void)snprintf(numerics[a], sizeof numerics[a], "%s", numerics_of(runner));
        compute_pages(runner, m->golden.tokens, a % 2 == 0 ? PAGE : PAGE / 2, &pages[a]);
        fkv_runner_close(runner);
        check_pinned(numerics[a], m->golden.name, codec, &pages[a]);
        for (size_t b = 0; b < a; b++)
            ck_assert_msg(strcmp(numerics[a], numerics[b]) != 0 || same_pages(&pages[a], &pages[b]),
                          "%s: %s pages of %s and %s differ, but both are \"%s\"", m->golden.name, codec, fkv_isa_name(ISAS[a]),
                          fkv_isa_name(ISAS[b]), numerics[a]);
    }
    for (size_t a = 0; a < N_OF(ISAS); a++) free_pages(&pages[a]);
}

START_TEST(members_of_a_class_compute_identical_and_pinned_pages) {
    for (size_t i = 0; i < N_OF(MODELS); i++) {
        test_model m;
        open_model(&m, MODELS[i]);
        for (size_t c = 0; c < N_OF(CODECS); c++)
            if (!TEST_SANITIZED || (c + i) % 2 == 0) check_classes(&m, CODECS[c]);
        close_model(&m);
    }
}
END_TEST

START_TEST(unlike_classes_share_no_pages_and_no_page_files) {
    char path[512];
    test_model m;
    open_model(&m, "llama2");
    const uint32_t *tokens = m.golden.tokens;
    (void)cache_path(path, "scalar.fkv");
    fkv_runner *scalar = open_runner(&m, FKV_ISA_SCALAR, "8/4");
    prompt_pages pages;
    compute_pages(scalar, tokens, 64, &pages);
    const fkv_seq seq = model_seq(scalar, N_TOKENS);
    model_run(scalar, seq, tokens, N_TOKENS, 64, 0, NULL);
    ck_ok(fkv_seq_save(fkv_runner_cache(scalar), seq, tokens, 0, path));
    uint32_t n_unlike = 0;
    for (size_t i = 0; i < N_OF(ISAS); i++) {
        if (!fkv_cpu_runs(ISAS[i])) continue;
        fkv_runner *runner = open_runner(&m, ISAS[i], "8/4");
        fkv_cache *cache = fkv_runner_cache(runner);
        const bool alike = strcmp(numerics_of(runner), numerics_of(scalar)) == 0;
        ck_assert_int_eq(alike, ISAS[i] == FKV_ISA_SCALAR);
        fkv_page_key key;
        ck_ok(fkv_prefix_root(cache, "tenant", 6, &key));
        ck_ok(fkv_prefix_key(&key, tokens, PAGE, &key));
        ck_assert_int_eq(memcmp(key.bytes, pages.keys[0].bytes, sizeof key.bytes) == 0, alike);
        const fkv_status unpacked = fkv_prefix_unpack(cache, TENANT, tokens, 1, &key, pages.packed[0], pages.n_bytes[0]);
        ck_assert_int_eq(unpacked, alike ? FKV_OK : FKV_FILE_FOREIGN);
        const fkv_seq_config config = {.max_tokens = N_TOKENS};
        fkv_seq loaded = 0;
        ck_assert_int_eq(fkv_seq_load(cache, &config, path, &loaded), alike ? FKV_OK : FKV_FILE_FOREIGN);
        if (!alike) {
            ck_assert_ptr_nonnull(strstr(fkv_message(), "numerics is \"cpu scalar 3"));
            ck_assert_ptr_nonnull(strstr(fkv_message(), "save the file again on this machine"));
        }
        n_unlike += !alike;
        fkv_runner_close(runner);
    }
    printf("%u instruction sets differ from scalar\n", n_unlike);
    free_pages(&pages);
    fkv_runner_close(scalar);
    close_model(&m);
    ck_assert_int_eq(remove(path), 0);
}
END_TEST

START_TEST(identities_name_the_class_and_its_version) {
    char text[FKV_NUMERICS_BYTES];
    char other[FKV_NUMERICS_BYTES];
    fkv_cpu_numerics(FKV_ISA_AVX2, text);
    ck_assert_int_eq(strncmp(text, "cpu avx2 3", 10), 0);
    fkv_cpu_numerics(FKV_ISA_AVX512VNNI, text);
    fkv_cpu_numerics(FKV_ISA_AMX, other);
    ck_assert_str_eq(text, other);
    ck_assert_int_eq(strncmp(text, "cpu int8dot 3 ", 14), 0);
    for (size_t a = 0; a < N_OF(ISAS); a++) {
        for (size_t b = 0; b < a; b++) {
            fkv_cpu_numerics(ISAS[a], text);
            fkv_cpu_numerics(ISAS[b], other);
            ck_assert_int_eq(strcmp(text, other) == 0, ISAS[a] == FKV_ISA_AMX && ISAS[b] == FKV_ISA_AVX512VNNI);
        }
    }
}
END_TEST

TEST_MAIN("numerics", members_of_a_class_compute_identical_and_pinned_pages, unlike_classes_share_no_pages_and_no_page_files,
          identities_name_the_class_and_its_version)
