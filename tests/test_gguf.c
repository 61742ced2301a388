/* Tests of valid GGUF files, read from memory and from the file system, and of the weights ID. */
#include "gguf_maker.h"
#include "page_file_fixture.h"

#include "../src/model/rope_scaling.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static bool same(fkv_bytes bytes, const char *text) {
    return bytes.size == strlen(text) && memcmp(bytes.data, text, bytes.size) == 0;
}

/* ---- valid files ---- */

START_TEST(valid_file_gives_its_hyperparameters) {
    good_keys(&shared);
    good_tensors(&shared);
    fkv_weights *weights = read_good(&shared);
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert_str_eq(h->architecture, "llama");
    ck_assert_str_eq(h->name, "A small\\x1b[31m model"); /* control characters are escaped for printing */
    ck_assert_uint_eq(h->n_layers, 3);
    ck_assert_uint_eq(h->dim, 64);
    ck_assert_uint_eq(h->ffn_dim, 96);
    ck_assert_uint_eq(h->n_q_heads, 4);
    ck_assert_uint_eq(h->n_kv_heads, 2);
    ck_assert_uint_eq(h->head_dim, 16);
    ck_assert_uint_eq(h->rope.dim, 16);
    ck_assert_uint_eq(h->n_vocab, 5);
    ck_assert_uint_eq(h->context, 128);
    ck_assert_float_eq(h->norm_eps, 1e-5f);
    ck_assert_float_eq(h->rope.base, 1e4f);
    ck_assert_float_eq(h->local_rope.base, 0);
    ck_assert_float_eq(h->rope.factor, 1);
    ck_assert(h->rope_interleaved && !h->norm_plus_one);
    ck_assert(h->window == 0 && h->layers[0] == 0 && h->softcap == 0 && h->query_scale == 0);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(valid_file_gives_its_vocabulary) {
    good_keys(&shared);
    fkv_weights *weights = read_good(&shared);
    const fkv_vocab_source *v = fkv_weights_vocab(weights);
    ck_assert(same(v->model, "llama") && same(v->pre, "default") && same(v->chat_template, "{{ x }}"));
    ck_assert_uint_eq(v->n_tokens, 5);
    ck_assert(same(v->tokens[0], "<unk>") && same(v->tokens[4], "ab"));
    ck_assert_float_eq(v->scores[4], -3);
    ck_assert_int_eq(v->types[1], 3);
    ck_assert_uint_eq(v->n_merges, 1);
    ck_assert(same(v->merges[0], "a b"));
    ck_assert(v->bos == 1 && v->eos == 1 && v->eot == 4 && v->unk == 0);
    ck_assert_uint_eq(v->suffix, FKV_NO_TOKEN);
    ck_assert(v->add_bos && v->add_space_prefix); /* defaults for SentencePiece vocabularies */
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 0);
    fkv_weights_close(weights);

    good_keys(&shared);
    key_bool(&shared, "tokenizer.ggml.add_bos_token", 0);
    key_bool(&shared, "tokenizer.ggml.add_space_prefix", 0);
    key_bool(&shared, "tokenizer.ggml.add_eos_token", 1);
    weights = read_good(&shared);
    ck_assert_uint_eq(fkv_weights_vocab(weights)->suffix, 1);
    ck_assert(!fkv_weights_vocab(weights)->add_bos && !fkv_weights_vocab(weights)->add_space_prefix);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(tensors_point_to_their_data_in_the_file) {
    good_keys(&shared);
    good_tensors(&shared);
    fkv_weights *weights = read_good(&shared);
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 4);
    const fkv_tensor *embd = fkv_weights_find(weights, "token_embd.weight");
    const fkv_tensor *norm = fkv_weights_find(weights, "output_norm.weight");
    ck_assert_ptr_eq(embd, fkv_weights_tensor(weights, 0));
    ck_assert_ptr_eq(norm, fkv_weights_tensor(weights, 1));
    ck_assert(embd->type == FKV_TENSOR_Q8_0 && embd->n_rows == 5 && embd->n_cols == 64 && embd->row_bytes == 68);
    ck_assert(norm->type == FKV_TENSOR_F32 && norm->n_rows == 1 && norm->n_cols == 64 && norm->row_bytes == 256);
    ck_assert_ptr_eq(embd->data, shared.bytes + shared.n - shared.data_bytes);
    ck_assert_ptr_eq(norm->data, embd->data + 352); /* the data has 340 bytes, rounded up to the alignment of 32 */
    ck_assert_int_eq(fkv_weights_find(weights, "blk.0.attn_k.weight")->type, FKV_TENSOR_BF16);
    ck_assert_ptr_null(fkv_weights_find(weights, "output.weight"));
    ck_assert_ptr_null(fkv_weights_find(weights, ""));
    ck_assert_ptr_null(fkv_weights_find(weights, "zzz"));
    fkv_weights_close(weights);
}
END_TEST

START_TEST(every_one_of_many_tensors_is_found) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    char name[32];
    for (unsigned i = 0; i < MAX_MADE_TENSORS; i++) {
        (void)snprintf(name, sizeof name, "t.%u", i * 167u % 9973u);
        tensor(&shared, name, GGML_F32, 1, 1, 4);
    }
    fkv_weights *weights = read_good(&shared);
    for (unsigned i = 0; i < MAX_MADE_TENSORS; i++) {
        (void)snprintf(name, sizeof name, "t.%u", i * 167u % 9973u);
        ck_assert_ptr_eq(fkv_weights_find(weights, name), fkv_weights_tensor(weights, i));
        (void)snprintf(name, sizeof name, "t.%u", i * 167u % 9973u + 10000u);
        ck_assert_ptr_null(fkv_weights_find(weights, name));
    }
    fkv_weights_close(weights);
}
END_TEST

START_TEST(missing_keys_read_as_zero) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "qwen3");
    fkv_weights *weights = read_good(&shared);
    const fkv_hparams *h = fkv_weights_hparams(weights);
    const fkv_vocab_source *v = fkv_weights_vocab(weights);
    ck_assert_str_eq(h->name, "");
    ck_assert(h->n_layers == 0 && h->dim == 0 && h->n_q_heads == 0 && h->n_kv_heads == 0 && h->head_dim == 0 && h->n_vocab == 0);
    ck_assert(h->norm_eps == 0 && h->rope.base == 1e4f && h->rope.factor == 1 && !h->rope_interleaved);
    ck_assert(v->n_tokens == 0 && v->tokens == NULL && v->scores == NULL && v->types == NULL && v->merges == NULL);
    ck_assert(v->model.size == 0 && v->bos == FKV_NO_TOKEN && v->eos == FKV_NO_TOKEN && v->unk == FKV_NO_TOKEN);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(gemma_has_windows_and_two_ropes) {
    const uint8_t pattern[] = {1, 1, 0, 1, 1, 0};
    maker_open(&shared);
    key_text(&shared, "general.architecture", "gemma3");
    key_u32(&shared, "gemma3.block_count", 6);
    key_u32(&shared, "gemma3.embedding_length", 640);
    key_u32(&shared, "gemma3.attention.head_count", 4);
    key_u32(&shared, "gemma3.attention.key_length", 256);
    key_u32(&shared, "gemma3.attention.value_length", 256);
    key_u32(&shared, "gemma3.attention.sliding_window", 512);
    key_array(&shared, "gemma3.attention.sliding_window_pattern", BOOL, 6);
    put(&shared, pattern, sizeof pattern);
    key_f32(&shared, "gemma3.rope.freq_base_swa", 1e4f);
    key_text(&shared, "gemma3.rope.scaling.type", "linear");
    key_f32(&shared, "gemma3.rope.scaling.factor", 8);
    key_f32(&shared, "gemma3.attention.scale", 0.0625f);
    key_f32(&shared, "gemma3.attn_logit_softcapping", 50);
    fkv_weights *weights = read_good(&shared);
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert(h->head_dim == 256 && h->n_kv_heads == 4 && h->window == 512);
    for (uint32_t i = 0; i < 6; i++) ck_assert_uint_eq(h->layers[i], i % 3 == 2 ? 0 : FKV_LAYER_WINDOW);
    ck_assert(h->local_rope.base == 1e4f && h->rope.factor == 8 && h->query_scale == 0.0625f && h->softcap == 50);
    ck_assert(!h->rope_interleaved && !h->norm_plus_one);
    fkv_weights_close(weights);
}
END_TEST

/* The expected attention factor of YaRN is the one that llama.cpp computes (llama-context.cpp). With x = 0.1 * ln(factor), it is
 * (x + 1) / (multiplier * x + 1). Only mistral3 uses the multiplier. */
START_TEST(yarn_log_multiplier_is_mscale_all_dim) {
    static const struct {
        const char *architecture;
        float multiplier, attn_factor;
        double expected;
    } rows[] = {{"mistral3", 1, 0, 1},
                {"mistral3", 0.5f, 0, (1 + 0.1 * 2.772588722239781) / (1 + 0.05 * 2.772588722239781)},
                {"mistral3", 0.5f, 2, 2 * (1 + 0.1 * 2.772588722239781) / (1 + 0.05 * 2.772588722239781)},
                {"mistral3", 0, 0, 1 + 0.1 * 2.772588722239781},
                {"qwen2", 0.5f, 0, 1 + 0.1 * 2.772588722239781}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const struct {
            const char *key;
            float number;
        } floats[] = {{"rope.scaling.factor", 16},
                      {"rope.scaling.yarn_log_multiplier", rows[i].multiplier},
                      {"rope.scaling.attn_factor", rows[i].attn_factor}};
        char key[96];
        double frequencies[32];
        maker_open(&shared);
        key_text(&shared, "general.architecture", rows[i].architecture);
        (void)snprintf(key, sizeof key, "%s.rope.dimension_count", rows[i].architecture);
        key_u32(&shared, key, 64);
        (void)snprintf(key, sizeof key, "%s.rope.scaling.type", rows[i].architecture);
        key_text(&shared, key, "yarn");
        (void)snprintf(key, sizeof key, "%s.rope.scaling.original_context_length", rows[i].architecture);
        key_u32(&shared, key, 4096);
        for (size_t k = 0; k < sizeof floats / sizeof floats[0]; k++) {
            (void)snprintf(key, sizeof key, "%s.%s", rows[i].architecture, floats[k].key);
            key_f32(&shared, key, floats[k].number);
        }
        fkv_weights *weights = read_good(&shared);
        const fkv_hparams *h = fkv_weights_hparams(weights);
        ck_assert_double_eq_tol(fkv_rope_frequencies(&h->rope, h, false, frequencies), rows[i].expected, 1e-6);
        fkv_weights_close(weights);
    }
}
END_TEST

/* GLM-4.5 and GLM-4.6 differ in QK norms and biases, which can be detected only from the tensors. */
START_TEST(glm_norms_and_biases_follow_the_tensors) {
    for (unsigned i = 0; i < 4; i++) {
        fkv_weights *weights = NULL;
        maker_open(&shared);
        key_text(&shared, "general.architecture", "glm4moe");
        tensor(&shared, "token_embd.weight", GGML_F32, 8, 1, 32);
        if ((i & 1) != 0) tensor(&shared, "blk.0.attn_q_norm.weight", GGML_F32, 8, 1, 32);
        if ((i & 2) != 0) tensor(&shared, "blk.0.attn_q.bias", GGML_F32, 8, 1, 32);
        const size_t n = made(&shared);
        file_fixture_write_file(file_fixture_path("glm.gguf"), shared.bytes, n);
        ck_ok(fkv_weights_open(file_fixture_path("glm.gguf"), &weights));
        const fkv_features *f = &fkv_weights_hparams(weights)->features;
        ck_assert_int_eq(f->qk_norm, (i & 1) != 0 ? FKV_QK_NORM_HEADS : FKV_QK_PLAIN);
        ck_assert_int_eq(f->qkv_bias, (i & 2) != 0);
        fkv_weights_close(weights);
    }
}
END_TEST

static void llama4_keys(uint32_t n_experts) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama4");
    key_u32(&shared, "llama4.block_count", 4);
    key_u32(&shared, "llama4.expert_count", n_experts);
    key_u32(&shared, "llama4.expert_feed_forward_length", 24);
    key_u32(&shared, "llama4.interleave_moe_layer_step", 2);
}

/* GGUF files of Llama 4 do not store the attention chunk size, the use of QK norms, the RoPE pattern or the attention
 * temperature.
 */
START_TEST(attention_of_llama4_follows_the_number_of_experts_and_the_window) {
    for (unsigned i = 0; i < 3; i++) {
        llama4_keys(i == 1 ? 128 : 16);
        if (i == 2) key_u32(&shared, "llama4.attention.sliding_window", 0);
        fkv_weights *weights = read_good(&shared);
        const fkv_hparams *h = fkv_weights_hparams(weights);
        ck_assert_int_eq(h->features.qk_norm, i == 1 ? FKV_QK_PLAIN : FKV_QK_NORM_UNWEIGHTED);
        ck_assert(h->attention_chunk == (i == 2 ? 0 : 8192) && h->temperature_of_no_rope == (i != 2) && h->shared_dim == 24);
        ck_assert_uint_eq(h->layers[2], FKV_LAYER_DENSE);
        ck_assert_uint_eq(h->layers[3], i == 2 ? 0 : FKV_LAYER_NO_ROPE);
        fkv_weights_close(weights);
    }
    fkv_weights *bad = NULL;
    llama4_keys(16);
    shared.bytes[shared.n - 4] = 0; /* sets interleave_moe_layer_step to 0 */
    const size_t n = made(&shared);
    ck_status(read_bytes(shared.bytes, n, &bad), FKV_FILE_FORMAT);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "interleave_moe_layer_step is 0"));
    fkv_weights_close(bad);
}
END_TEST

static void xielu_keys(uint64_t n_alphas, float alpha) {
    static const char *const keys[] = {"xielu.alpha_p", "xielu.alpha_n", "xielu.beta"};
    maker_open(&shared);
    key_text(&shared, "general.architecture", "apertus");
    key_u32(&shared, "apertus.block_count", 2);
    for (size_t k = 0; k < 3; k++) {
        key_array(&shared, keys[k], F32, k == 0 ? n_alphas : 2);
        for (uint64_t i = 0; i < (k == 0 ? n_alphas : 2); i++) {
            const float value = (float)k + alpha * (float)i;
            put(&shared, &value, sizeof value);
        }
    }
    key_f32(&shared, "xielu.eps", -1e-6f);
}

START_TEST(xielu_parameters_are_read_per_layer) {
    xielu_keys(2, 0.25f);
    fkv_weights *weights = read_good(&shared);
    const float *x = fkv_weights_hparams(weights)->xielu;
    ck_assert(x != NULL && x[0] == 0 && x[1] == 0.25f && x[2] == 1 && x[3] == 1.25f && x[5] == 2.25f && x[7] == -1e-6f);
    fkv_weights_close(weights);
    for (unsigned i = 0; i < 2; i++) {
        fkv_weights *bad = NULL;
        xielu_keys(i == 0 ? 3 : 2, i == 0 ? 0.25f : INFINITY);
        const size_t n = made(&shared);
        ck_status(read_bytes(shared.bytes, n, &bad), FKV_FILE_FORMAT);
        ck_assert_ptr_nonnull(strstr(fkv_message(), "xielu.alpha_p"));
        fkv_weights_close(bad);
    }
}
END_TEST

START_TEST(integers_may_be_wider_than_needed) {
    const double base = 5e5;
    const int16_t context = 77;
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "llama.block_count", U64);
    put_u64(&shared, 9);
    key(&shared, "llama.context_length", I16);
    put(&shared, &context, sizeof context);
    key(&shared, "llama.rope.freq_base", F64);
    put(&shared, &base, sizeof base);
    fkv_weights *weights = read_good(&shared);
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert(h->n_layers == 9 && h->context == 77 && h->rope.base == 5e5f);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(other_alignments_are_supported) {
    maker_open(&shared);
    shared.alignment = 128;
    key_text(&shared, "general.architecture", "llama");
    key_u32(&shared, "general.alignment", 128);
    tensor(&shared, "a", GGML_F32, 2, 1, 8);
    tensor(&shared, "b", GGML_F32, 2, 1, 8);
    fkv_weights *weights = read_good(&shared);
    ck_assert_ptr_eq(fkv_weights_find(weights, "b")->data, fkv_weights_find(weights, "a")->data + 128);
    ck_assert_uint_eq((uintptr_t)(fkv_weights_find(weights, "a")->data - shared.bytes) % 128, 0);
    fkv_weights_close(weights);
}
END_TEST

/* ---- identity ---- */

static void id_of(maker *m, uint8_t id[32]) {
    fkv_weights *weights = read_good(m);
    ck_ok(fkv_weights_id(weights, id));
    fkv_weights_close(weights);
}

START_TEST(id_distinguishes_weights) {
    uint8_t first[32];
    uint8_t other[32];
    good_keys(&shared);
    good_tensors(&shared);
    id_of(&shared, first);
    fkv_weights *weights = NULL;
    ck_ok(read_bytes(shared.bytes, shared.n, &weights));
    ck_ok(fkv_weights_id(weights, other));
    ck_assert_mem_eq(first, other, 32);
    shared.bytes[shared.n - 1] ^= 1; /* flips a bit in the last tensor */
    ck_ok(fkv_weights_id(weights, other));
    ck_assert_mem_ne(first, other, 32);
    fkv_weights_close(weights);

    maker_open(&shared); /* files with the same values but a different tensor name have different IDs */
    key_text(&shared, "general.architecture", "llama");
    tensor(&shared, "a", GGML_F32, 8, 1, 32);
    id_of(&shared, first);
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    tensor(&shared, "b", GGML_F32, 8, 1, 32);
    id_of(&shared, other);
    ck_assert_mem_ne(first, other, 32);
    maker_open(&shared); /* files with the same values but a different epsilon have different IDs */
    key_text(&shared, "general.architecture", "llama");
    key_f32(&shared, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    tensor(&shared, "a", GGML_F32, 8, 1, 32);
    id_of(&shared, other);
    ck_assert_mem_ne(first, other, 32);
}
END_TEST

/* ---- file system ---- */

START_TEST(file_is_mapped_and_can_be_released) {
    fkv_weights *weights = NULL;
    good_keys(&shared);
    good_tensors(&shared);
    const size_t n = made(&shared);
    file_fixture_write_file(file_fixture_path("good.gguf"), shared.bytes, n);
    ck_ok(fkv_weights_open(file_fixture_path("good.gguf"), &weights));
    ck_assert_uint_eq(fkv_weights_file_bytes(weights), n);
    for (uint32_t t = 0; t < fkv_weights_n_tensors(weights); t++) {
        const fkv_tensor *x = fkv_weights_tensor(weights, t);
        const uint8_t first = x->data[0];
        fkv_weights_release(weights, x);
        ck_assert_uint_eq(x->data[0], first); /* the data is still readable after fkv_weights_release() */
    }
    fkv_weights_close(weights);
    fkv_weights_close(NULL);
}
END_TEST

START_TEST(files_without_weights_are_rejected) {
    fkv_weights *weights = NULL;
    ck_status(fkv_weights_open(file_fixture_path("absent.gguf"), &weights), FKV_IO);
    ck_assert_ptr_null(weights);
    file_fixture_write_file(file_fixture_path("empty.gguf"), (const uint8_t *)"", 0);
    ck_status(fkv_weights_open(file_fixture_path("empty.gguf"), &weights), FKV_FILE_FORMAT);
    ck_assert_int_eq(mkfifo(file_fixture_path("pipe.gguf"), 0600), 0);
    /* opening a pipe must fail without blocking */
    ck_status(fkv_weights_open(file_fixture_path("pipe.gguf"), &weights), FKV_FILE_FORMAT);
    file_fixture_remove_folder();
}
END_TEST

TEST_MAIN("gguf", valid_file_gives_its_hyperparameters, valid_file_gives_its_vocabulary, tensors_point_to_their_data_in_the_file,
          every_one_of_many_tensors_is_found, missing_keys_read_as_zero, gemma_has_windows_and_two_ropes,
          yarn_log_multiplier_is_mscale_all_dim, glm_norms_and_biases_follow_the_tensors,
          attention_of_llama4_follows_the_number_of_experts_and_the_window, xielu_parameters_are_read_per_layer,
          integers_may_be_wider_than_needed, other_alignments_are_supported, id_distinguishes_weights,
          file_is_mapped_and_can_be_released, files_without_weights_are_rejected)
