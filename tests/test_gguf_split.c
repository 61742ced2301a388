/* Tests models that are split into several GGUF files, GGUF files of version 2, and files that contain only a vocabulary. */
#include "gguf_maker.h"
#include "page_file_fixture.h"

#include <flatkv/model.h>

#include <stdio.h>
#include <unistd.h>

enum { N_PARTS = 3 };

static const char *part_path(uint32_t number) {
    char name[64];
    (void)snprintf(name, sizeof name, "m-%05u-of-%05u.gguf", number, (unsigned)N_PARTS);
    return file_fixture_path(name);
}

static void split_keys(maker *m, uint32_t number, uint32_t n_parts, uint32_t n_tensors) {
    key(m, "split.no", 2); /* split.no has type u16, as written by llama.cpp */
    put(m, &(uint16_t){(uint16_t)number}, 2);
    key(m, "split.count", 2);
    put(m, &(uint16_t){(uint16_t)n_parts}, 2);
    key(m, "split.tensors.count", I32);
    put_u32(m, n_tensors);
}

/* Part 1 has the keys and one tensor; the other parts have one tensor each. */
static void write_part(uint32_t number, uint32_t n_parts, uint32_t n_tensors, const char *path) {
    char name[32];
    if (number == 0)
        good_keys(&shared);
    else
        maker_open(&shared);
    split_keys(&shared, number, n_parts, n_tensors);
    (void)snprintf(name, sizeof name, "t.%u", number);
    tensor(&shared, name, GGML_F32, 8, 1 + number, 32 * (1 + number));
    const size_t n = made(&shared);
    file_fixture_write_file(path, shared.bytes, n);
}

static void write_parts(void) {
    for (uint32_t i = 0; i < N_PARTS; i++) write_part(i, N_PARTS, N_PARTS, part_path(i + 1));
}

static void ck_open_rejected(const char *path, fkv_status expected, const char *words, const char *file) {
    fkv_weights *weights = NULL;
    ck_status(fkv_weights_open(path, &weights), expected);
    ck_assert_ptr_null(weights);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not contain '%s'", fkv_message(), words);
    ck_assert_msg(strstr(fkv_message(), file) != NULL, "'%s' does not name '%s'", fkv_message(), file);
}

START_TEST(any_part_opens_the_whole_model) {
    uint8_t whole[32];
    uint8_t id[32];
    good_keys(&shared);
    for (uint32_t i = 0; i < N_PARTS; i++) {
        char name[32];
        (void)snprintf(name, sizeof name, "t.%u", i);
        tensor(&shared, name, GGML_F32, 8, 1 + i, 32 * (1 + i));
    }
    fkv_weights *weights = read_good(&shared);
    /* copies the data of the split files: in each part, byte b has the value b % 113 */
    for (uint32_t i = 0; i < N_PARTS; i++) {
        uint8_t *data = (uint8_t *)(uintptr_t)fkv_weights_tensor(weights, i)->data;
        for (uint32_t b = 0; b < 32 * (1 + i); b++) data[b] = (uint8_t)(b % 113);
    }
    ck_ok(fkv_weights_id(weights, whole));
    fkv_weights_close(weights);
    write_parts();
    for (uint32_t i = 1; i <= N_PARTS; i++) {
        ck_ok(fkv_weights_open(part_path(i), &weights));
        ck_assert_uint_eq(fkv_weights_n_tensors(weights), N_PARTS);
        ck_assert_uint_eq(fkv_weights_find(weights, "t.2")->n_rows, 3);
        ck_assert_uint_eq(fkv_weights_vocab(weights)->n_tokens, 5);
        ck_ok(fkv_weights_id(weights, id));
        ck_assert_mem_eq(id, whole, 32);
        fkv_weights_close(weights);
    }
}
END_TEST

START_TEST(missing_part_is_named) {
    for (uint32_t missing = 1; missing <= N_PARTS; missing++) {
        write_parts();
        char words[48];
        char name[32];
        ck_assert_int_eq(unlink(part_path(missing)), 0);
        (void)snprintf(words, sizeof words, missing == 1 ? "the first part" : "part %u of 3 is missing", missing);
        (void)snprintf(name, sizeof name, "m-%05u-of-00003.gguf", missing);
        ck_open_rejected(part_path(missing == 3 ? 1 : 3), FKV_IO, words, name);
    }
}
END_TEST

START_TEST(parts_that_do_not_belong_together_are_rejected) {
    write_parts();
    write_part(2, N_PARTS, N_PARTS, part_path(2));
    ck_open_rejected(part_path(1), FKV_FILE_FORMAT, "part 3 of 3 (split.no 2), but part 2 was expected", "m-00002-of-00003.gguf");
    write_part(1, N_PARTS + 1, N_PARTS, part_path(2));
    ck_open_rejected(part_path(1), FKV_FILE_DAMAGED, "split.count is 4, but the first part states 3", "m-00002-of-00003.gguf");
    write_parts();
    write_part(0, N_PARTS, N_PARTS + 1, part_path(1));
    ck_open_rejected(part_path(1), FKV_FILE_DAMAGED, "split.tensors.count is 4, but the 3 parts have 3", "m-00001-of-00003.gguf");
    write_part(0, N_PARTS, N_PARTS, file_fixture_path("renamed.gguf"));
    ck_open_rejected(file_fixture_path("renamed.gguf"), FKV_FILE_FORMAT, "split.count", "renamed.gguf");
    write_part(1, N_PARTS, N_PARTS, file_fixture_path("renamed.gguf"));
    ck_open_rejected(file_fixture_path("renamed.gguf"), FKV_FILE_FORMAT, "part 2 of 3", "renamed.gguf");
    write_part(3, N_PARTS, N_PARTS, file_fixture_path("renamed.gguf"));
    ck_open_rejected(file_fixture_path("renamed.gguf"), FKV_FILE_DAMAGED, "split.no is 3, but split.count is 3", "renamed.gguf");
    write_part(0, 60000, N_PARTS, file_fixture_path("renamed.gguf"));
    ck_open_rejected(file_fixture_path("renamed.gguf"), FKV_UNSUPPORTED, "split.count is 60000", "renamed.gguf");
    write_part(1, N_PARTS, N_PARTS, part_path(2));
    (void)unlink(part_path(3));
    write_part(0, N_PARTS, N_PARTS, part_path(3)); /* the last part is a copy of the first part */
    ck_open_rejected(part_path(1), FKV_FILE_FORMAT, "part 1 of 3", "m-00003-of-00003.gguf");
}
END_TEST

START_TEST(complete_file_may_be_named_like_a_part) {
    fkv_weights *weights = NULL;
    good_keys(&shared);
    good_tensors(&shared);
    const size_t n = made(&shared);
    file_fixture_write_file(file_fixture_path("m-00001-of-00001.gguf"), shared.bytes, n);
    ck_ok(fkv_weights_open(file_fixture_path("m-00001-of-00001.gguf"), &weights));
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 4);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(version_2_reads_like_version_3) {
    uint8_t ids[2][32];
    for (uint32_t i = 0; i < 2; i++) {
        good_keys(&shared);
        good_tensors(&shared);
        shared.version = 2 + i;
        fkv_weights *weights = read_good(&shared);
        ck_ok(fkv_weights_id(weights, ids[i]));
        ck_assert_uint_eq(fkv_weights_vocab(weights)->n_tokens, 5);
        fkv_weights_close(weights);
    }
    ck_assert_mem_eq(ids[0], ids[1], 32);
}
END_TEST

/* Starts a file with a vocabulary of four tokens. The caller may add more keys. */
static void vocab_keys(maker *m) {
    static const char *const tokens[] = {"a", "b", "ab", "<end>"};
    static const int32_t types[] = {1, 1, 1, 3};
    static const char *const merges[] = {"a b"};
    maker_open(m);
    key_text(m, "general.architecture", "gpt2");
    key_u32(m, "gpt2.block_count", 100000);
    key_text(m, "tokenizer.ggml.model", "gpt2");
    key_text(m, "tokenizer.ggml.pre", "gpt-2");
    key_texts(m, "tokenizer.ggml.tokens", tokens, 4);
    key_array(m, "tokenizer.ggml.token_type", I32, 4);
    put(m, types, sizeof types);
    key_texts(m, "tokenizer.ggml.merges", merges, 1);
    key_u32(m, "tokenizer.ggml.eos_token_id", 3);
}

static fkv_model *load_vocab(maker *m) {
    fkv_model *model = NULL;
    fkv_model_config config = fkv_model_config_default();
    const size_t n = made(m);
    file_fixture_write_file(file_fixture_path("vocab.gguf"), m->bytes, n);
    ck_ok(fkv_model_load(file_fixture_path("vocab.gguf"), &config, &model));
    return model;
}

/* Fields with missing or invalid values keep their defaults. */
START_TEST(file_can_set_sampling_parameters) {
    bool said = true;
    vocab_keys(&shared);
    fkv_model *model = load_vocab(&shared);
    fkv_sampler_config c = fkv_model_sampling(model, &said);
    ck_assert(!said && c.temperature == 0.7f && c.top_k == 40 && c.top_p == 0.95f && c.min_p == 0.05f);
    fkv_model_close(model);
    vocab_keys(&shared);
    key_f32(&shared, "general.sampling.temp", 0.6f);
    key_u32(&shared, "general.sampling.top_k", 20);
    key_f32(&shared, "general.sampling.top_p", 7);
    key_f32(&shared, "general.sampling.min_p", -1);
    key_f32(&shared, "general.sampling.penalty_repeat", 1.1f);
    model = load_vocab(&shared);
    c = fkv_model_sampling(model, &said);
    ck_assert(said && c.temperature == 0.6f && c.top_k == 20 && c.top_p == 0.95f && c.min_p == 0.05f);
    ck_assert_float_eq(c.repetition_penalty, 1.1f);
    fkv_model_close(model);
}
END_TEST

/* A vocabulary file may have arbitrary layer sizes and an unknown architecture. */
START_TEST(vocabulary_file_tokenizes_but_does_not_run) {
    vocab_keys(&shared);
    fkv_model *model = load_vocab(&shared);
    fkv_runner *runner = NULL;
    fkv_runner_plan plan;
    fkv_runner_config run = fkv_runner_config_default();
    uint32_t found[8];
    size_t n_found = 0;
    ck_ok(fkv_tokenize(model, "abba", 4, FKV_TOKENIZE_PLAIN, found, 8, &n_found));
    ck_assert(n_found == 3 && found[0] == 2 && found[1] == 1 && found[2] == 0);
    ck_assert_str_eq(fkv_model_about(model)->architecture, "gpt2");
    ck_assert_uint_eq(fkv_model_about(model)->n_vocab, 4);
    ck_assert_uint_eq(fkv_model_about(model)->n_parameters, 0);
    ck_status(fkv_runner_plan_make(model, &run, &plan), FKV_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), ".gguf contains a vocabulary but no weights"));
    ck_status(fkv_runner_open(model, &run, &runner), FKV_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "no weights"));
    fkv_model_close(model);
    file_fixture_remove_folder();
}
END_TEST

TEST_MAIN("gguf split", any_part_opens_the_whole_model, missing_part_is_named, parts_that_do_not_belong_together_are_rejected,
          complete_file_may_be_named_like_a_part, version_2_reads_like_version_3, file_can_set_sampling_parameters,
          vocabulary_file_tokenizes_but_does_not_run)
