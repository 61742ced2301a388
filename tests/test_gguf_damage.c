/* Tests GGUF files with one wrong value, truncated files, and models that would run incorrectly. Each must be rejected with a
 * message that names the error and its location. The allocated memory must stay in proportion to the file size. */
#include "gguf_maker.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#ifdef FKV_HAVE_JEMALLOC
#include <jemalloc/jemalloc.h>
#endif

/* Checks that the file is rejected with a message that contains `words`. */
static void ck_rejected(maker *m, fkv_status expected, const char *words) {
    fkv_weights *weights = NULL;
    const size_t n = made(m);
    ck_status(read_bytes(m->bytes, n, &weights), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not contain '%s'", fkv_message(), words);
    ck_assert_msg(strstr(fkv_message(), "made.gguf") != NULL, "'%s' does not name the file", fkv_message());
    fkv_weights_close(weights);
}

/* ---- file header ---- */

START_TEST(other_files_and_versions_are_rejected) {
    static const char *const others[] = {"PK\3\4 a zip file, not weights", "GG", "GGML and some more", "gguf in small letters"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        fkv_weights *weights = NULL;
        memcpy(shared.bytes, others[i], strlen(others[i])); /* shared.bytes is aligned like a memory mapping */
        ck_status(read_bytes(shared.bytes, strlen(others[i]), &weights), FKV_FILE_FORMAT);
        fkv_weights_close(weights);
    }
    for (uint32_t version = 0; version < 6; version++) {
        char words[32];
        if (version == 2 || version == 3) continue;
        good_keys(&shared);
        shared.version = version;
        (void)snprintf(words, sizeof words, "GGUF version %u", version);
        ck_rejected(&shared, FKV_UNSUPPORTED, words);
    }
    good_keys(&shared);
    shared.version = 0x03000000;
    ck_rejected(&shared, FKV_UNSUPPORTED, "big-endian");
}
END_TEST

/* Returns the total number of bytes that this thread has allocated so far, or 0 if the program was built without jemalloc. */
static uint64_t allocated_bytes(void) {
    uint64_t bytes = 0;
#ifdef FKV_HAVE_JEMALLOC
    size_t size = sizeof bytes;
    if (mallctl("thread.allocated", &bytes, &size, NULL, 0) != 0) abort();
#endif
    return bytes;
}

static void ck_modest(maker *m) {
    const size_t n = made(m);
    fkv_weights *weights = fkv_weights_new();
    ck_assert_ptr_nonnull(weights);
    const uint64_t before = allocated_bytes();
    fkv_gguf_part part;
    (void)fkv_gguf_read_part(weights, m->bytes, n, "made.gguf", 0, &part);
    const uint64_t after = allocated_bytes();
    ck_assert_msg(after - before <= 8 * n + 4096, "%" PRIu64 " bytes allocated for a file of %zu", after - before, n);
    fkv_weights_close(weights);
}

START_TEST(memory_is_bounded_by_the_file_size) {
    static const uint64_t counts[] = {6, 1000, 1 << 20, 1ull << 32, 1ull << 60, UINT64_MAX};
    good_keys(&shared);
    good_tensors(&shared);
    ck_modest(&shared);
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    for (unsigned i = 0; i < MAX_MADE_TENSORS; i++) { /* each tensor takes 33 bytes of the file, the minimum */
        const char name[2] = {(char)('!' + i % 90), 0};
        tensor_at(&shared, name, GGML_F32, 1, 1, 0);
    }
    ck_modest(&shared);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_array(&shared, "tokenizer.ggml.tokens", STRING, counts[i]);
        for (unsigned t = 0; t < 5; t++) put_text(&shared, "");
        ck_modest(&shared);
        maker_open(&shared);
        shared.n_keys = counts[i];
        ck_modest(&shared);
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        shared.n_tensors = counts[i];
        ck_modest(&shared);
    }
}
END_TEST

START_TEST(counts_beyond_the_file_are_rejected) {
    static const uint64_t counts[] = {6, 1000, 1 << 20, 1ull << 32, 1ull << 60, UINT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        shared.n_keys = counts[i];
        ck_rejected(&shared, FKV_FILE_DAMAGED, i == 0 ? "" : " keys, but only");
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        shared.n_tensors = counts[i];
        ck_rejected(&shared, FKV_FILE_DAMAGED, " tensors, but only");
    }
}
END_TEST

START_TEST(strings_and_arrays_beyond_the_file_are_rejected) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "x", STRING);
    put_u64(&shared, UINT64_MAX - 3);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "declared length of 18446744073709551612 bytes");
    maker_open(&shared);
    key_array(&shared, "x", U64, 1ull << 61); /* the size in bytes, 8 times the count, overflows 64 bits and becomes 0 */
    ck_rejected(&shared, FKV_FILE_DAMAGED, "2305843009213693952 values for key x");
    maker_open(&shared);
    key_array(&shared, "x", STRING, 1ull << 61);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "ends inside its header");
    maker_open(&shared);
    key_array(&shared, "x", ARRAY, 1);
    ck_rejected(&shared, FKV_UNSUPPORTED, "x is an array of arrays");
    maker_open(&shared);
    key_array(&shared, "x", 13, 1);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "array of the invalid GGUF type 13");
    maker_open(&shared);
    key(&shared, "x\x1b[2J", 4000000000u);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "x\\x1b[2J has the invalid GGUF type 4000000000");
    maker_open(&shared);
    key_u32(&shared, "", 1);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "key length of 0 bytes");
}
END_TEST

START_TEST(every_truncation_is_detected) {
    good_keys(&shared);
    good_tensors(&shared);
    const size_t n = made(&shared);
    for (size_t cut = 0; cut < n; cut += cut < n - shared.data_bytes + 64 ? 1 : 97) {
        uint8_t *bytes = malloc(cut + 1);
        ck_assert_ptr_nonnull(bytes);
        memcpy(bytes, shared.bytes, cut);
        uint8_t *exact = realloc(
            bytes,
            cut == 0 ? 1 : cut); /* the copy has exactly the truncated size, so that a sanitizer detects reads past its end */
        fkv_weights *weights = NULL;
        const fkv_status status = read_bytes(exact, cut, &weights);
        ck_assert_msg(status == FKV_FILE_DAMAGED || status == FKV_FILE_FORMAT, "%s when truncated to %zu",
                      fkv_status_name(status), cut);
        fkv_weights_close(weights);
        free(exact);
    }
}
END_TEST

START_TEST(any_changed_byte_is_handled) {
    static const uint8_t changes[] = {0x01, 0x80, 0xff};
    good_keys(&shared);
    good_tensors(&shared);
    const size_t n = made(&shared);
    unsigned n_refused = 0;
    for (size_t at = 0; at < n - shared.data_bytes; at++) {
        for (size_t c = 0; c < sizeof changes; c++) {
            fkv_weights *weights = NULL;
            shared.bytes[at] ^= changes[c];
            const fkv_status status = read_bytes(shared.bytes, n, &weights);
            ck_assert_msg(status == FKV_OK || status == FKV_FILE_DAMAGED || status == FKV_FILE_FORMAT ||
                              status == FKV_UNSUPPORTED,
                          "%s with byte %zu changed", fkv_status_name(status), at);
            n_refused += status != FKV_OK;
            for (uint32_t t = 0; status == FKV_OK && t < fkv_weights_n_tensors(weights); t++) {
                const fkv_tensor *x = fkv_weights_tensor(weights, t);
                if (x->data < shared.bytes || x->data + x->n_rows * x->row_bytes > shared.bytes + n)
                    ck_abort_msg("tensor %u is outside of the file with byte %zu changed", t, at);
            }
            fkv_weights_close(weights);
            shared.bytes[at] ^= changes[c];
        }
    }
    ck_assert_uint_gt(n_refused, 500);
}
END_TEST

/* ---- keys ---- */

START_TEST(key_of_the_wrong_type_is_named) {
    static const char *const numbers[] = {
        "llama.block_count",  "llama.embedding_length", "llama.attention.key_length",  "llama.rope.dimension_count",
        "llama.expert_count", "general.alignment",      "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id"};
    static const char *const floats[] = {"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base",
                                         "llama.rope.scaling.factor", "llama.attn_logit_softcapping"};
    static const char *const texts[] = {"general.name", "tokenizer.ggml.model", "tokenizer.chat_template",
                                        "llama.rope.scaling.type"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_f32(&shared, numbers[i], 3);
        ck_rejected(&shared, FKV_FILE_FORMAT, numbers[i]);
    }
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_u32(&shared, floats[i], 3);
        ck_rejected(&shared, FKV_FILE_FORMAT, floats[i]);
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_u32(&shared, texts[i], 3);
        ck_rejected(&shared, FKV_FILE_FORMAT, texts[i]);
    }
    maker_open(&shared);
    key_u32(&shared, "general.architecture", 3);
    ck_rejected(&shared, FKV_FILE_FORMAT, "general.architecture");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key_u32(&shared, "tokenizer.ggml.add_bos_token", 1);
    ck_rejected(&shared, FKV_FILE_FORMAT, "add_bos_token has type u32, expected a bool");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key_array(&shared, "tokenizer.ggml.tokens", U8, 1);
    put(&shared, "a", 1);
    ck_rejected(&shared, FKV_FILE_FORMAT, "tokenizer.ggml.tokens is an array of 1 u8");
}
END_TEST

START_TEST(numbers_out_of_range_are_named) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "llama.block_count", I32);
    put_u32(&shared, (uint32_t)-5);
    ck_rejected(&shared, FKV_FILE_FORMAT, "llama.block_count is negative");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "llama.block_count", U64);
    put_u64(&shared, 1ull << 32);
    ck_rejected(&shared, FKV_FILE_FORMAT, "llama.block_count");
    static const float wrong[] = {NAN, INFINITY, -INFINITY, -1};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_f32(&shared, "llama.rope.freq_base", wrong[i]);
        ck_rejected(&shared, FKV_FILE_FORMAT, wrong[i] == -1 ? "negative" : "llama.rope.freq_base");
    }
}
END_TEST

START_TEST(file_without_an_architecture_is_rejected) {
    maker_open(&shared);
    ck_rejected(&shared, FKV_FILE_FORMAT, "general.architecture");
    maker_open(&shared);
    key(&shared, "general.architecture", STRING);
    put_u64(&shared, 5);
    put(&shared, "ll\0ma", 5);
    ck_rejected(&shared, FKV_FILE_FORMAT, "general.architecture");
    char name[128];
    memset(name, 'a', sizeof name);
    name[127] = 0;
    maker_open(&shared);
    key_text(&shared, "general.architecture", name);
    ck_rejected(&shared, FKV_FILE_FORMAT, "general.architecture");
}
END_TEST

START_TEST(duplicate_keys_and_tensors_are_rejected) {
    good_keys(&shared);
    key_u32(&shared, "llama.block_count", 3);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "duplicate key llama.block_count");
    good_keys(&shared);
    good_tensors(&shared);
    tensor(&shared, "output_norm.weight", GGML_F32, 64, 1, 256);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "duplicate tensor output_norm.weight");
}
END_TEST

START_TEST(models_that_would_run_incorrectly_are_rejected) {
    good_keys(&shared);
    key_text(&shared, "llama.rope.scaling.type", "dynamic");
    ck_rejected(&shared, FKV_UNSUPPORTED, "RoPE scaling 'dynamic'");
    good_keys(&shared);
    key_u32(&shared, "llama.attention.key_length", 16);
    key_u32(&shared, "llama.attention.value_length", 32);
    ck_rejected(&shared, FKV_UNSUPPORTED, "key length 16 and value length 32 differ");
    good_keys(&shared);
    key_u32(&shared, "llama.ssm.state_size", 1);
    ck_rejected(&shared, FKV_UNSUPPORTED, "llama.ssm.state_size is 1");
    good_keys(&shared);
    key_f32(&shared, "llama.final_logit_softcapping", -30);
    ck_rejected(&shared, FKV_FILE_FORMAT, "llama.final_logit_softcapping is negative");
    good_keys(&shared);
    tensor(&shared, "rope_freqs.weight", GGML_F32, 32, 1, 128);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "rope_freqs.weight must have one F32 value for each of 8 channel pairs");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key_array(&shared, "llama.attention.head_count_kv", U32, 2);
    put_u64(&shared, 0x400000004);
    ck_rejected(&shared, FKV_FILE_FORMAT, "head_count_kv must have one value above 0 for each of 0 layers");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "gemma3");
    key_u32(&shared, "gemma3.block_count", 4);
    key_u32(&shared, "gemma3.attention.sliding_window", 512);
    key_array(&shared, "gemma3.attention.sliding_window_pattern", BOOL, 3);
    put(&shared, "\1\0\0", 3);
    ck_rejected(&shared, FKV_FILE_FORMAT, "one bool for each of 4 layers");
}
END_TEST

START_TEST(inconsistent_vocabularies_are_rejected) {
    good_keys(&shared);
    key_u32(&shared, "tokenizer.ggml.seperator_token_id", 99); /* an unused key may have any value */
    fkv_weights_close(read_good(&shared));
    maker_open(&shared);
    static const char *const tokens[] = {"a", "b"};
    key_text(&shared, "general.architecture", "llama");
    key_texts(&shared, "tokenizer.ggml.tokens", tokens, 2);
    const maker two = shared;
    key_u32(&shared, "tokenizer.ggml.bos_token_id", 2);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "bos_token_id is 2, but the vocabulary has 2 tokens");
    shared = two;
    key_array(&shared, "tokenizer.ggml.scores", F32, 1);
    put_u32(&shared, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "2 tokens, but 1 scores and 0 types");
    shared = two;
    key_array(&shared, "tokenizer.ggml.scores", F32, 2);
    put_u64(&shared, 0x7fc00000);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "the score of token 0");
    shared = two;
    key_array(&shared, "tokenizer.ggml.token_type", I32, 2);
    put_u64(&shared, 7ull << 32);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "token 1 has invalid type 7");
}
END_TEST

/* ---- tensors ---- */

static void one_tensor(const char *name, uint32_t type, uint64_t n_cols, uint64_t n_rows, uint64_t offset) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    tensor_at(&shared, name, type, n_cols, n_rows, offset);
    shared.data_bytes = 1024;
}

START_TEST(tensor_of_an_unsupported_type_is_named) {
    one_tensor("blk.0.ffn_up.weight", GGML_I8, 256, 1, 0);
    ck_rejected(&shared, FKV_UNSUPPORTED, "blk.0.ffn_up.weight has unsupported type I8 (24)");
    one_tensor("x", 4711, 256, 1, 0);
    ck_rejected(&shared, FKV_UNSUPPORTED, "unknown (4711)");
}
END_TEST

START_TEST(tensor_beyond_the_file_is_rejected) {
    one_tensor("x", GGML_F32, 256, 1, 0);
    fkv_weights_close(read_good(&shared)); /* a tensor that ends exactly at the end of the file is accepted */
    one_tensor("x", GGML_F32, 257, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "x needs 1028 bytes at offset 0, but the data section has only 1024");
    one_tensor("x", GGML_F32, 256, 1, 32);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "x needs 1024 bytes at offset 32");
    one_tensor("x", GGML_F32, 8, 1, UINT64_MAX - 31);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "x needs 32 bytes");
    one_tensor("x", GGML_F32, 8, 1, 36);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "not a multiple of the alignment 32");
    one_tensor("x", GGML_F32, UINT32_MAX, UINT32_MAX, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "overflows 64 bits");
    one_tensor("x", GGML_F32, 1ull << 32, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "dimension of 4294967296");
    one_tensor("x", GGML_F32, 0, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "dimension of 0");
    one_tensor("x", GGML_Q4_K, 288, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "288 columns, which is not a multiple of the Q4_K block size 256");
    one_tensor("", GGML_F32, 1, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "name of 0 bytes");
}
END_TEST

START_TEST(invalid_dimensions_and_names_are_rejected) {
    static const uint32_t n_dims[] = {0, 5, UINT32_MAX};
    for (size_t i = 0; i < sizeof n_dims / sizeof n_dims[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        put_text(&shared, "x");
        put_u32(&shared, n_dims[i]);
        for (unsigned d = 0; d < 6; d++) put_u64(&shared, 1);
        shared.n_tensors = 1;
        ck_rejected(&shared, FKV_FILE_DAMAGED, "dimensions");
    }
    char name[FKV_MAX_TENSOR_NAME + 1];
    memset(name, 'n', sizeof name);
    name[FKV_MAX_TENSOR_NAME - 1] = 0;
    one_tensor(name, GGML_F32, 1, 1, 0);
    fkv_weights_close(read_good(&shared));
    one_tensor("a\x1b[2Jb", GGML_F32, 1, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "'a\\x1b[2Jb'");
    name[FKV_MAX_TENSOR_NAME - 1] = 'n';
    name[FKV_MAX_TENSOR_NAME] = 0;
    one_tensor(name, GGML_F32, 1, 1, 0);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "name of 128 bytes");
}
END_TEST

START_TEST(overlapping_tensors_are_rejected) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    tensor_at(&shared, "a", GGML_F32, 9, 1, 64); /* tensor a has 36 bytes */
    tensor_at(&shared, "b", GGML_F32, 16, 1, 0); /* tensor b ends where tensor a begins */
    const maker two = shared;
    shared.data_bytes = 1024;
    fkv_weights_close(read_good(&shared));
    shared = two;
    tensor_at(&shared, "c", GGML_F32, 1, 1, 96);
    shared.data_bytes = 1024;
    ck_rejected(&shared, FKV_FILE_DAMAGED, "tensors a and c overlap");
    shared = two;
    tensor_at(&shared, "c", GGML_F32, 1, 1, 0);
    shared.data_bytes = 1024;
    ck_rejected(&shared, FKV_FILE_DAMAGED, "overlap");
}
END_TEST

START_TEST(alignment_must_be_a_power_of_two) {
    static const uint32_t wrong[] = {0, 1, 4, 24, 33, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        good_keys(&shared);
        key_u32(&shared, "general.alignment", wrong[i]);
        ck_rejected(&shared, FKV_FILE_DAMAGED, "general.alignment is");
    }
    good_keys(&shared);
    key_u32(&shared, "general.alignment", 1u << 31);
    tensor(&shared, "x", GGML_F32, 1, 1, 4);
    ck_rejected(&shared, FKV_FILE_DAMAGED, "ends before its tensor data");
}
END_TEST

TEST_MAIN("gguf damage", other_files_and_versions_are_rejected, memory_is_bounded_by_the_file_size,
          counts_beyond_the_file_are_rejected, strings_and_arrays_beyond_the_file_are_rejected, every_truncation_is_detected,
          any_changed_byte_is_handled, key_of_the_wrong_type_is_named, numbers_out_of_range_are_named,
          file_without_an_architecture_is_rejected, duplicate_keys_and_tensors_are_rejected,
          models_that_would_run_incorrectly_are_rejected, inconsistent_vocabularies_are_rejected,
          tensor_of_an_unsupported_type_is_named, tensor_beyond_the_file_is_rejected, invalid_dimensions_and_names_are_rejected,
          overlapping_tensors_are_rejected, alignment_must_be_a_power_of_two)
