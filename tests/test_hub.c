/* Tests the names, listings and file selection of src/hub. hub_test.py tests downloads. */
#include "../src/hub/gguf_header.h"
#include "../src/hub/hub_cache.h"
#include "../src/hub/hub_place.h"
#include "../src/hub/hub_variants.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

START_TEST(names_follow_the_rules_of_the_hub) {
    static const char *const bad[] = {"",         "a",    "/b",     "a/",     "a/b/c",   "../b",  "a/..",  ".a/b",
                                      "a./b",     "a/-b", "a/b-",   "a/b--c", "a/b..c",  "a/b c", "a/b:",  "a/b:c/d",
                                      "a/b:..\n", "ä/b",  "a/b%2e", "a\\b/c", "a/b:c d", "~/b",   "a/b?c", "a/b#c"};
    hub_name name;
    ck_assert(hub_name_parse("Org-1/My.Model_2", &name));
    ck_assert_str_eq(name.repo, "Org-1/My.Model_2");
    ck_assert_str_eq(name.quant, "");
    ck_assert(hub_name_parse("org/name:UD-Q4_K_XL", &name));
    ck_assert_str_eq(name.repo, "org/name");
    ck_assert_str_eq(name.quant, "UD-Q4_K_XL");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(!hub_name_parse(bad[i], &name), "\"%s\" is accepted", bad[i]);
    char longest[2 * HUB_WORD + 2];
    memset(longest, 'a', sizeof longest);
    longest[HUB_WORD - 1] = '/';
    longest[2 * HUB_WORD - 1] = 0;
    ck_assert(hub_name_parse(longest, &name));
    ck_assert_str_eq(name.repo, longest);
    longest[2 * HUB_WORD - 1] = 'a';
    longest[2 * HUB_WORD] = 0;
    ck_assert(!hub_name_parse(longest, &name));
}
END_TEST

START_TEST(file_names_cannot_leave_their_folder) {
    static const char *const good[] = {"a", "a.b", "a/b", "..a", "a..", ".gitattributes", "a b/ü.txt", "..."};
    static const char *const bad[] = {"",     ".",      "..",    "/a",   "a/",   "a//b", "../a",
                                      "a/..", "a/../b", "a/./b", "a\\b", "a\nb", "\x7f", "a\x1b"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) ck_assert_msg(hub_file_name_is_safe(good[i]), "%s", good[i]);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) ck_assert_msg(!hub_file_name_is_safe(bad[i]), "%s", bad[i]);
}
END_TEST

START_TEST(quantizations_are_found_in_file_names) {
    static const char *const cases[][2] = {
        {"model-Q4_K_M.gguf", "Q4_K_M"},
        {"SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"},
        {"qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"},
        {"Llama-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"},
        {"Q8_0/big-model-Q8_0-00001-of-00003.gguf", "Q8_0"},
        {"BF16/model-00001-of-00002.gguf", "BF16"},
        {"gpt-oss-20b-MXFP4.gguf", "MXFP4"},
        {"m.i1-IQ2_XXS.gguf", "IQ2_XXS"},
        {"m-f16.gguf", "F16"},
        {"m-TQ1_0.gguf", "TQ1_0"},
        {"ggml-model-Q4_0_4_8.gguf", "Q4_0_4_8"},
        {"qwen-model.gguf", NULL},
        {"F160-model.gguf", NULL},
        {"Q9_0.gguf", NULL},
        {"Q4_0.bin", NULL},
        {".gguf", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char label[HUB_QUANT] = "";
        bool found = hub_quant_of(cases[i][0], label);
        ck_assert_msg(found == (cases[i][1] != NULL), "%s: %s", cases[i][0], label);
        if (found) ck_assert_str_eq(label, cases[i][1]);
    }
    ck_assert(hub_is_gguf_model("a/b-Q4_0.gguf"));
    ck_assert(!hub_is_gguf_model("a/mmproj-F16.gguf"));
    ck_assert(!hub_is_gguf_model("model-mmproj-F16.gguf"));
    ck_assert(!hub_is_gguf_model("model.imatrix.gguf"));
    ck_assert(!hub_is_gguf_model("model.bin"));
}
END_TEST

/* Parses a listing of files with the given names. The file at index i has a size of 10 * (i + 1) bytes. */
static void list_files(hub_listing *listing, const char *const *names, size_t n) {
    char text[8192];
    char error[HUB_ERROR] = "";
    int at = snprintf(text, sizeof text, "{\"id\": \"a/b\", \"sha\": \"%040d\", \"siblings\": [", 1);
    for (size_t i = 0; i < n; i++)
        at += snprintf(text + at, sizeof text - (size_t)at,
                       "%s{\"rfilename\": \"%s\", \"lfs\": {\"sha256\": \"%064zu\", \"size\": %zu}}", i > 0 ? "," : "", names[i],
                       i, 10 * (i + 1));
    at += snprintf(text + at, sizeof text - (size_t)at, "]}");
    ck_assert_msg(hub_listing_parse(text, (size_t)at, listing, error), "%s", error);
}

START_TEST(a_folder_has_weights_configuration_and_vocabulary) {
    static const char *const names[] = {"model-00002-of-00002.safetensors",
                                        "model-00001-of-00002.safetensors",
                                        "config.json",
                                        "consolidated.safetensors",
                                        "model.safetensors.index.json",
                                        "pytorch_model.bin",
                                        "tokenizer.json",
                                        "tokenizer.model",
                                        "chat_template.jinja",
                                        "onnx/config.json",
                                        "vae/model.safetensors",
                                        "LICENSE",
                                        "README.md",
                                        "merges.txt",
                                        "train.py"};
    static const char *const wanted[] = {"config.json",
                                         "LICENSE",
                                         "chat_template.jinja",
                                         "merges.txt",
                                         "model-00001-of-00002.safetensors",
                                         "model-00002-of-00002.safetensors",
                                         "model.safetensors.index.json",
                                         "tokenizer.json",
                                         "tokenizer.model"};
    hub_listing listing;
    hub_variants found;
    list_files(&listing, names, sizeof names / sizeof names[0]);
    hub_variants_find(&listing, &found);
    ck_assert_uint_eq(found.n, 1);
    const hub_variant *v = &found.variants[0];
    ck_assert(v->is_folder && v->is_complete);
    ck_assert_uint_eq(v->weight_bytes, 10 + 20);
    ck_assert_uint_eq(v->n_files, sizeof wanted / sizeof wanted[0]);
    for (uint32_t i = 0; i < v->n_files; i++) ck_assert_str_eq(listing.files[v->files[i]].path, wanted[i]);
    hub_variants_free(&found);
    hub_listing_free(&listing);
}
END_TEST

START_TEST(gguf_variants_are_ordered_by_size) {
    static const char *const names[] = {
        "m-Q2_K.gguf",    "m-Q4_0.gguf", "x/m-Q8_0-00001-of-00002.gguf", "x/m-Q8_0-00002-of-00002.gguf",
        "m-F16.gguf",     "n.gguf",      "p-Q5_0-00001-of-00002.gguf",   "small-Q6_K.gguf",
        "large-Q6_K.gguf"};
    static const char *const labels[] = {"large-Q6_K", "small-Q6_K", "Q5_0", "Q8_0", "n", "F16", "Q4_0", "Q2_K"};
    hub_listing listing;
    hub_variants found;
    list_files(&listing, names, sizeof names / sizeof names[0]);
    hub_variants_find(&listing, &found);
    ck_assert_uint_eq(found.n, sizeof labels / sizeof labels[0]);
    for (uint32_t i = 0; i < found.n; i++) ck_assert_str_eq(found.variants[i].label, labels[i]);
    ck_assert_uint_eq(hub_variants_named(&found, "q8_0")->weight_bytes, 30 + 40);
    ck_assert(hub_variants_named(&found, "q8_0")->is_complete);
    ck_assert(!hub_variants_named(&found, "Q5_0")->is_complete);
    ck_assert(hub_variants_named(&found, "F16")->is_wide && !hub_variants_named(&found, "Q4_0")->is_wide);
    ck_assert_ptr_null(hub_variants_named(&found, "Q6_K")); /* two models */
    ck_assert_ptr_nonnull(hub_variants_named(&found, "LARGE-q6_k"));
    hub_variants_free(&found);
    hub_listing_free(&listing);
}
END_TEST

START_TEST(every_prefix_of_a_gguf_header_needs_more_bytes) {
    FILE *file = fopen("tests/data/stories260K.gguf", "rb");
    static uint8_t bytes[64 << 10];
    size_t end = 0;
    size_t unused = 0;
    ck_assert_ptr_nonnull(file);
    size_t n = fread(bytes, 1, sizeof bytes, file);
    (void)fclose(file);
    ck_assert_int_eq(gguf_header_end(bytes, n, &end), GGUF_HEADER_COMPLETE);
    ck_assert(end > 1000 && end < n);
    for (size_t i = 0; i < end; i++) ck_assert_int_eq(gguf_header_end(bytes, i, &unused), GGUF_HEADER_TRUNCATED);
    ck_assert_int_eq(gguf_header_end(bytes, end, &unused), GGUF_HEADER_COMPLETE);
    ck_assert_uint_eq(unused, end);
    bytes[4] = 9;
    ck_assert_int_eq(gguf_header_end(bytes, n, &end), GGUF_HEADER_INVALID);
    bytes[0] = 'X';
    ck_assert_int_eq(gguf_header_end(bytes, n, &end), GGUF_HEADER_INVALID);
}
END_TEST

START_TEST(folders_follow_the_environment) {
    char path[HUB_PATH];
    char token[HUB_TOKEN];
    ck_assert_int_eq(unsetenv("HF_HUB_CACHE"), 0);
    ck_assert_int_eq(unsetenv("HUGGINGFACE_HUB_CACHE"), 0);
    ck_assert_int_eq(unsetenv("HF_HOME"), 0);
    ck_assert_int_eq(unsetenv("XDG_CACHE_HOME"), 0);
    ck_assert_int_eq(setenv("HOME", "/users/a", 1), 0);
    ck_assert(hub_cache_folder(path));
    ck_assert_str_eq(path, "/users/a/.cache/huggingface/hub");
    ck_assert_int_eq(setenv("XDG_CACHE_HOME", "/x", 1), 0);
    ck_assert(hub_cache_folder(path));
    ck_assert_str_eq(path, "/x/huggingface/hub");
    ck_assert_int_eq(setenv("HF_HOME", "~/hf", 1), 0);
    ck_assert(hub_cache_folder(path));
    ck_assert_str_eq(path, "/users/a/hf/hub");
    ck_assert_int_eq(setenv("HF_HUB_CACHE", "/hub", 1), 0);
    ck_assert(hub_cache_folder(path));
    ck_assert_str_eq(path, "/hub");
    ck_assert_int_eq(setenv("HF_TOKEN", " hf_x\n", 1), 0);
    ck_assert_int_eq(hub_token(token, path), 0);
    ck_assert_str_eq(token, "hf_x");
}
END_TEST

TEST_MAIN("hub", names_follow_the_rules_of_the_hub, file_names_cannot_leave_their_folder, quantizations_are_found_in_file_names,
          a_folder_has_weights_configuration_and_vocabulary, gguf_variants_are_ordered_by_size,
          every_prefix_of_a_gguf_header_needs_more_bytes, folders_follow_the_environment)
