/* What sound GGUF files say, through memory and through the file system, and what tells weights apart. */
#include "gguf_maker.h"
#include "page_file_world.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static bool same(fkv_bytes bytes, const char *text) {
    return bytes.size == strlen(text) && memcmp(bytes.data, text, bytes.size) == 0;
}

/* ---- sound files ---- */

START_TEST(a_sound_file_says_its_hyperparameters) {
    good_keys(&shared);
    good_tensors(&shared);
    fkv_weights *weights = read_good(&shared);
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert_str_eq(h->architecture, "llama");
    ck_assert_str_eq(h->name, "A small\\x1b[31m model"); /* safe to print */
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

START_TEST(a_sound_file_says_its_vocabulary) {
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
    ck_assert(v->add_bos && v->add_space_prefix); /* the defaults of SentencePiece */
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 0);
    fkv_weights_close(weights);

    good_keys(&shared);
    key_bool(&shared, "tokenizer.ggml.add_bos_token", 0);
    key_bool(&shared, "tokenizer.ggml.add_space_prefix", 0);
    weights = read_good(&shared);
    ck_assert(!fkv_weights_vocab(weights)->add_bos && !fkv_weights_vocab(weights)->add_space_prefix);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(tensors_lie_where_the_file_has_them) {
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
    ck_assert_ptr_eq(norm->data, embd->data + 352); /* 340 bytes, up to the alignment of 32 */
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

START_TEST(what_a_file_does_not_say_is_zero) {
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

START_TEST(gemma_says_windows_and_two_ropes) {
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

START_TEST(numbers_may_be_wider_than_they_need) {
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

START_TEST(another_alignment_is_kept) {
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

START_TEST(the_id_knows_weights_apart) {
    uint8_t first[32];
    uint8_t other[32];
    good_keys(&shared);
    good_tensors(&shared);
    id_of(&shared, first);
    fkv_weights *weights = NULL;
    ck_ok(read_bytes(shared.bytes, shared.n, &weights));
    ck_ok(fkv_weights_id(weights, other));
    ck_assert_mem_eq(first, other, 32);
    shared.bytes[shared.n - 1] ^= 1; /* of the last tensor */
    ck_ok(fkv_weights_id(weights, other));
    ck_assert_mem_ne(first, other, 32);
    fkv_weights_close(weights);

    maker_open(&shared); /* the same numbers for another name */
    key_text(&shared, "general.architecture", "llama");
    tensor(&shared, "a", GGML_F32, 8, 1, 32);
    id_of(&shared, first);
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    tensor(&shared, "b", GGML_F32, 8, 1, 32);
    id_of(&shared, other);
    ck_assert_mem_ne(first, other, 32);
    maker_open(&shared); /* and for another epsilon */
    key_text(&shared, "general.architecture", "llama");
    key_f32(&shared, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    tensor(&shared, "a", GGML_F32, 8, 1, 32);
    id_of(&shared, other);
    ck_assert_mem_ne(first, other, 32);
}
END_TEST

/* ---- the file system ---- */

START_TEST(a_file_is_mapped_and_given_back) {
    fkv_weights *weights = NULL;
    good_keys(&shared);
    good_tensors(&shared);
    const size_t n = made(&shared);
    file_world_write_file(file_world_path("good.gguf"), shared.bytes, n);
    ck_ok(fkv_weights_open(file_world_path("good.gguf"), &weights));
    ck_assert_uint_eq(fkv_weights_file_bytes(weights), n);
    for (uint32_t t = 0; t < fkv_weights_n_tensors(weights); t++) {
        const fkv_tensor *x = fkv_weights_tensor(weights, t);
        const uint8_t first = x->data[0];
        fkv_weights_release(weights, x);
        ck_assert_uint_eq(x->data[0], first); /* still there, read again */
    }
    fkv_weights_close(weights);
    fkv_weights_close(NULL);
}
END_TEST

START_TEST(what_is_no_weight_file_is_said) {
    fkv_weights *weights = NULL;
    ck_status(fkv_weights_open(file_world_path("absent.gguf"), &weights), FKV_IO);
    ck_assert_ptr_null(weights);
    file_world_write_file(file_world_path("empty.gguf"), (const uint8_t *)"", 0);
    ck_status(fkv_weights_open(file_world_path("empty.gguf"), &weights), FKV_FILE_FORMAT);
    ck_assert_int_eq(mkfifo(file_world_path("pipe.gguf"), 0600), 0);
    ck_status(fkv_weights_open(file_world_path("pipe.gguf"), &weights), FKV_FILE_FORMAT); /* and does not wait for a writer */
    file_world_remove_folder();
}
END_TEST

TEST_MAIN("gguf", a_sound_file_says_its_hyperparameters, a_sound_file_says_its_vocabulary, tensors_lie_where_the_file_has_them,
          every_one_of_many_tensors_is_found, what_a_file_does_not_say_is_zero, gemma_says_windows_and_two_ropes,
          numbers_may_be_wider_than_they_need, another_alignment_is_kept, the_id_knows_weights_apart,
          a_file_is_mapped_and_given_back, what_is_no_weight_file_is_said)
