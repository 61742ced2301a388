/* GGUF files: what sound ones say, and that no other gets through. Files are made here byte by byte, so that one number at a time
 * can be wrong; most are read from memory, a few through the file system.
 */
#include "page_file_world.h"
#include "test.h"

#include "../src/model/gguf.h"
#include "../src/model/tensor_rows.h"
#include "../src/model/weights_state.h"

#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- making files ---- */

enum {
    MAX_BYTES = 64 * 1024,
    MAX_MADE_TENSORS = 512,
    U8 = 0,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    BOOL = 7,
    STRING = 8,
    ARRAY = 9,
    U64 = 10,
    F64 = 12
};
enum { GGML_F32 = 0, GGML_F16 = 1, GGML_Q8_0 = 8, GGML_Q2_K = 10, GGML_Q4_K = 12, GGML_BF16 = 30 };

/* Keys first, then tensors, then made_file(): counts are written last. */
typedef struct maker {
    alignas(64) uint8_t bytes[MAX_BYTES];
    size_t n;
    uint64_t n_keys, n_tensors;
    uint64_t data_bytes;
    uint32_t alignment;
    uint32_t version;
} maker;

static void put(maker *m, const void *bytes, size_t n) {
    ck_assert_uint_le(m->n + n, MAX_BYTES);
    memcpy(m->bytes + m->n, bytes, n);
    m->n += n;
}

static void put_u32(maker *m, uint32_t x) { put(m, &x, sizeof x); }
static void put_u64(maker *m, uint64_t x) { put(m, &x, sizeof x); }
static void put_text(maker *m, const char *text) {
    put_u64(m, strlen(text));
    put(m, text, strlen(text));
}

static void maker_open(maker *m) {
    memset(m, 0, sizeof *m);
    m->n = 24;
    m->alignment = 32;
    m->version = 3;
}

static void key(maker *m, const char *name, uint32_t type) {
    put_text(m, name);
    put_u32(m, type);
    m->n_keys++;
}

static void key_u32(maker *m, const char *name, uint32_t x) {
    key(m, name, U32);
    put_u32(m, x);
}

static void key_f32(maker *m, const char *name, float x) {
    key(m, name, F32);
    put(m, &x, sizeof x);
}

static void key_bool(maker *m, const char *name, uint8_t x) {
    key(m, name, BOOL);
    put(m, &x, 1);
}

static void key_text(maker *m, const char *name, const char *text) {
    key(m, name, STRING);
    put_text(m, text);
}

static void key_array(maker *m, const char *name, uint32_t item, uint64_t count) {
    key(m, name, ARRAY);
    put_u32(m, item);
    put_u64(m, count);
}

static void key_texts(maker *m, const char *name, const char *const *texts, uint32_t n) {
    key_array(m, name, STRING, n);
    for (uint32_t i = 0; i < n; i++) put_text(m, texts[i]);
}

static void tensor_at(maker *m, const char *name, uint32_t type, uint64_t n_cols, uint64_t n_rows, uint64_t offset) {
    put_text(m, name);
    put_u32(m, n_rows == 1 ? 1 : 2);
    put_u64(m, n_cols);
    if (n_rows != 1) put_u64(m, n_rows);
    put_u32(m, type);
    put_u64(m, offset);
    m->n_tensors++;
}

static void tensor(maker *m, const char *name, uint32_t type, uint64_t n_cols, uint64_t n_rows, uint64_t bytes) {
    tensor_at(m, name, type, n_cols, n_rows, m->data_bytes);
    m->data_bytes += (bytes + m->alignment - 1) / m->alignment * m->alignment;
}

/* The data of the tensors is 0, 1, 2, ... Gives the bytes of the file. */
static size_t made(maker *m) {
    memcpy(m->bytes, "GGUF", 4);
    memcpy(m->bytes + 4, &m->version, 4);
    memcpy(m->bytes + 8, &m->n_tensors, 8);
    memcpy(m->bytes + 16, &m->n_keys, 8);
    if (m->data_bytes == 0) return m->n;
    m->n = (m->n + m->alignment - 1) / m->alignment * m->alignment;
    for (uint64_t i = 0; i < m->data_bytes; i++) {
        const uint8_t byte = (uint8_t)(i % 113);
        put(m, &byte, 1);
    }
    return m->n;
}

static maker shared; /* too large for a stack */

/* A file that says everything; the maker is still open for more keys, not for more after tensors. */
static void good_keys(maker *m) {
    static const char *const tokens[] = {"<unk>", "<s>", "a", "b", "ab"};
    static const char *const merges[] = {"a b"};
    static const float scores[] = {0, 0, -1, -2, -3};
    static const int32_t types[] = {2, 3, 1, 1, 1};
    maker_open(m);
    key_text(m, "general.architecture", "llama");
    key_text(m, "general.name", "A small\x1b[31m model");
    key_u32(m, "llama.block_count", 3);
    key_u32(m, "llama.embedding_length", 64);
    key_u32(m, "llama.feed_forward_length", 96);
    key_u32(m, "llama.attention.head_count", 4);
    key_u32(m, "llama.attention.head_count_kv", 2);
    key_u32(m, "llama.context_length", 128);
    key_f32(m, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    key_f32(m, "llama.rope.freq_base", 1e4f);
    key_text(m, "tokenizer.ggml.model", "llama");
    key_text(m, "tokenizer.ggml.pre", "default");
    key_texts(m, "tokenizer.ggml.tokens", tokens, 5);
    key_array(m, "tokenizer.ggml.scores", F32, 5);
    put(m, scores, sizeof scores);
    key_array(m, "tokenizer.ggml.token_type", I32, 5);
    put(m, types, sizeof types);
    key_texts(m, "tokenizer.ggml.merges", merges, 1);
    key_u32(m, "tokenizer.ggml.bos_token_id", 1);
    key_u32(m, "tokenizer.ggml.eos_token_id", 1);
    key_u32(m, "tokenizer.ggml.eot_token_id", 4);
    key_u32(m, "tokenizer.ggml.unknown_token_id", 0);
    key_text(m, "tokenizer.chat_template", "{{ x }}");
}

static void good_tensors(maker *m) {
    tensor(m, "token_embd.weight", GGML_Q8_0, 64, 5, 5 * 2 * 34);
    tensor(m, "output_norm.weight", GGML_F32, 64, 1, 64 * 4);
    tensor(m, "blk.0.attn_q.weight", GGML_F16, 64, 64, 64 * 64 * 2);
    tensor(m, "blk.0.attn_k.weight", GGML_BF16, 64, 32, 64 * 32 * 2);
}

static fkv_status read_bytes(const uint8_t *bytes, size_t n, fkv_weights **weights) {
    *weights = fkv_weights_new();
    ck_assert_ptr_nonnull(*weights);
    return fkv_gguf_read(*weights, bytes, n, "made.gguf");
}

static fkv_weights *read_good(maker *m) {
    fkv_weights *weights = NULL;
    const size_t n = made(m);
    ck_ok(read_bytes(m->bytes, n, &weights));
    return weights;
}

/* The whole file is refused, with a message that has `words`. */
static void ck_refused(maker *m, fkv_status expected, const char *words) {
    fkv_weights *weights = NULL;
    const size_t n = made(m);
    ck_status(read_bytes(m->bytes, n, &weights), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not say '%s'", fkv_message(), words);
    ck_assert_msg(strstr(fkv_message(), "made.gguf") != NULL, "'%s' does not name the file", fkv_message());
    fkv_weights_close(weights);
}

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
    ck_assert_str_eq(h->name, "A small?[31m model"); /* safe to print */
    ck_assert_uint_eq(h->n_layers, 3);
    ck_assert_uint_eq(h->dim, 64);
    ck_assert_uint_eq(h->ffn_dim, 96);
    ck_assert_uint_eq(h->n_q_heads, 4);
    ck_assert_uint_eq(h->n_kv_heads, 2);
    ck_assert_uint_eq(h->head_dim, 16);
    ck_assert_uint_eq(h->rope_dim, 16);
    ck_assert_uint_eq(h->n_vocab, 5);
    ck_assert_uint_eq(h->context, 128);
    ck_assert_float_eq(h->rms_eps, 1e-5f);
    ck_assert_float_eq(h->rope_base, 1e4f);
    ck_assert_float_eq(h->rope_base_local, 0);
    ck_assert_float_eq(h->rope_scale, 1);
    ck_assert(h->rope_interleaved && !h->norm_plus_one);
    ck_assert(h->window == 0 && h->window_pattern == 0 && h->softcap == 0 && h->query_scale == 0);
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
    ck_assert(h->rms_eps == 0 && h->rope_base == 0 && h->rope_scale == 1 && !h->rope_interleaved);
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
    ck_assert(h->head_dim == 256 && h->n_kv_heads == 4 && h->window == 512 && h->window_pattern == 3);
    ck_assert(h->rope_base_local == 1e4f && h->rope_scale == 8 && h->query_scale == 0.0625f && h->softcap == 50);
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
    ck_assert(h->n_layers == 9 && h->context == 77 && h->rope_base == 5e5f);
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

/* ---- the head ---- */

START_TEST(other_files_and_versions_are_told_apart) {
    fkv_weights *weights = NULL;
    ck_status(read_bytes((const uint8_t *)"PK\3\4 a zip file, not weights", 24, &weights), FKV_FILE_FORMAT);
    fkv_weights_close(weights);
    ck_status(read_bytes((const uint8_t *)"GG", 2, &weights), FKV_FILE_FORMAT);
    fkv_weights_close(weights);
    for (uint32_t version = 0; version < 6; version++) {
        char words[32];
        if (version == 3) continue;
        good_keys(&shared);
        shared.version = version;
        (void)snprintf(words, sizeof words, "GGUF version %u", version);
        ck_refused(&shared, FKV_UNSUPPORTED, words);
    }
    good_keys(&shared);
    shared.version = 0x03000000;
    ck_refused(&shared, FKV_UNSUPPORTED, "big-endian");
}
END_TEST

START_TEST(counts_beyond_the_file_take_no_memory) {
    static const uint64_t counts[] = {6, 1000, 1 << 20, 1ull << 32, 1ull << 60, UINT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        shared.n_keys = counts[i];
        ck_refused(&shared, FKV_FILE_DAMAGED, i == 0 ? "" : "keys where");
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        shared.n_tensors = counts[i];
        ck_refused(&shared, FKV_FILE_DAMAGED, "tensors where");
    }
}
END_TEST

START_TEST(strings_and_arrays_stay_inside_the_file) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "x", STRING);
    put_u64(&shared, UINT64_MAX - 3);
    ck_refused(&shared, FKV_FILE_DAMAGED, "a string of 18446744073709551612 bytes");
    maker_open(&shared);
    key_array(&shared, "x", U64, 1ull << 61); /* times 8 is 0 in 64 bits */
    ck_refused(&shared, FKV_FILE_DAMAGED, "2305843009213693952 values under x");
    maker_open(&shared);
    key_array(&shared, "x", STRING, 1ull << 61);
    ck_refused(&shared, FKV_FILE_DAMAGED, "ends inside its header");
    maker_open(&shared);
    key_array(&shared, "x", ARRAY, 1);
    ck_refused(&shared, FKV_UNSUPPORTED, "x is an array of arrays");
    maker_open(&shared);
    key_array(&shared, "x", 13, 1);
    ck_refused(&shared, FKV_FILE_DAMAGED, "array of type 13");
    maker_open(&shared);
    key(&shared, "x\x1b[2J", 4000000000u);
    ck_refused(&shared, FKV_FILE_DAMAGED, "x?[2J is of type 4000000000");
    maker_open(&shared);
    key_u32(&shared, "", 1);
    ck_refused(&shared, FKV_FILE_DAMAGED, "a key of 0 bytes");
}
END_TEST

START_TEST(every_cut_of_a_file_is_noticed) {
    good_keys(&shared);
    good_tensors(&shared);
    const size_t n = made(&shared);
    for (size_t cut = 0; cut < n; cut += cut < n - shared.data_bytes + 64 ? 1 : 97) {
        uint8_t *bytes = malloc(cut + 1);
        ck_assert_ptr_nonnull(bytes);
        memcpy(bytes, shared.bytes, cut);
        uint8_t *exact = realloc(bytes, cut == 0 ? 1 : cut); /* so that a sanitizer sees a byte too many */
        fkv_weights *weights = NULL;
        const fkv_status status = read_bytes(exact, cut, &weights);
        ck_assert_msg(status == FKV_FILE_DAMAGED || status == FKV_FILE_FORMAT, "%s when cut to %zu", fkv_status_name(status),
                      cut);
        fkv_weights_close(weights);
        free(exact);
    }
}
END_TEST

START_TEST(every_changed_byte_is_survived) {
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
                    ck_abort_msg("tensor %u is outside with byte %zu changed", t, at);
            }
            fkv_weights_close(weights);
            shared.bytes[at] ^= changes[c];
        }
    }
    ck_assert_uint_gt(n_refused, 500);
}
END_TEST

/* ---- keys ---- */

START_TEST(a_key_of_the_wrong_type_is_named) {
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
        ck_refused(&shared, FKV_FILE_FORMAT, numbers[i]);
    }
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_u32(&shared, floats[i], 3);
        ck_refused(&shared, FKV_FILE_FORMAT, floats[i]);
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_u32(&shared, texts[i], 3);
        ck_refused(&shared, FKV_FILE_FORMAT, texts[i]);
    }
    maker_open(&shared);
    key_u32(&shared, "general.architecture", 3);
    ck_refused(&shared, FKV_FILE_FORMAT, "general.architecture");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key_u32(&shared, "tokenizer.ggml.add_bos_token", 1);
    ck_refused(&shared, FKV_FILE_FORMAT, "add_bos_token is of type u32 where a bool is needed");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key_array(&shared, "tokenizer.ggml.tokens", U8, 1);
    put(&shared, "a", 1);
    ck_refused(&shared, FKV_FILE_FORMAT, "tokenizer.ggml.tokens is an array of 1 u8");
}
END_TEST

START_TEST(numbers_out_of_range_are_named) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "llama.block_count", I32);
    put_u32(&shared, (uint32_t)-5);
    ck_refused(&shared, FKV_FILE_FORMAT, "llama.block_count is negative");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key(&shared, "llama.block_count", U64);
    put_u64(&shared, 1ull << 32);
    ck_refused(&shared, FKV_FILE_FORMAT, "llama.block_count");
    static const float wrong[] = {NAN, INFINITY, -INFINITY, -1};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        key_f32(&shared, "llama.rope.freq_base", wrong[i]);
        ck_refused(&shared, FKV_FILE_FORMAT, wrong[i] == -1 ? "negative" : "llama.rope.freq_base");
    }
}
END_TEST

START_TEST(a_file_without_an_architecture_is_refused) {
    maker_open(&shared);
    ck_refused(&shared, FKV_FILE_FORMAT, "general.architecture");
    maker_open(&shared);
    key(&shared, "general.architecture", STRING);
    put_u64(&shared, 5);
    put(&shared, "ll\0ma", 5);
    ck_refused(&shared, FKV_FILE_FORMAT, "general.architecture");
    char name[128];
    memset(name, 'a', sizeof name);
    name[127] = 0;
    maker_open(&shared);
    key_text(&shared, "general.architecture", name);
    ck_refused(&shared, FKV_FILE_FORMAT, "general.architecture");
}
END_TEST

START_TEST(a_key_or_tensor_that_is_there_twice_is_refused) {
    good_keys(&shared);
    key_u32(&shared, "llama.block_count", 3);
    ck_refused(&shared, FKV_FILE_DAMAGED, "llama.block_count is there twice");
    good_keys(&shared);
    good_tensors(&shared);
    tensor(&shared, "output_norm.weight", GGML_F32, 64, 1, 256);
    ck_refused(&shared, FKV_FILE_DAMAGED, "output_norm.weight is there twice");
}
END_TEST

START_TEST(models_that_would_run_wrong_are_refused) {
    good_keys(&shared);
    key_text(&shared, "llama.rope.scaling.type", "yarn");
    ck_refused(&shared, FKV_UNSUPPORTED, "RoPE scaling 'yarn'");
    good_keys(&shared);
    key_u32(&shared, "llama.attention.key_length", 16);
    key_u32(&shared, "llama.attention.value_length", 32);
    ck_refused(&shared, FKV_UNSUPPORTED, "keys of 16 and values of 32");
    good_keys(&shared);
    key_u32(&shared, "llama.expert_count", 8);
    ck_refused(&shared, FKV_UNSUPPORTED, "8 experts");
    good_keys(&shared);
    key_f32(&shared, "llama.final_logit_softcapping", 30);
    ck_refused(&shared, FKV_UNSUPPORTED, "capped at 30");
    good_keys(&shared);
    tensor(&shared, "rope_freqs.weight", GGML_F32, 32, 1, 128);
    ck_refused(&shared, FKV_UNSUPPORTED, "rope_freqs.weight");
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    key_array(&shared, "llama.attention.head_count_kv", U32, 2);
    put_u64(&shared, 0x400000004);
    ck_refused(&shared, FKV_UNSUPPORTED, "head_count_kv differs by layer");
    const uint8_t irregular[] = {1, 0, 0};
    good_keys(&shared);
    key_array(&shared, "llama.attention.sliding_window_pattern", BOOL, 3);
    put(&shared, irregular, 3);
    ck_refused(&shared, FKV_UNSUPPORTED, "no regular order");
}
END_TEST

START_TEST(a_vocabulary_must_agree_with_itself) {
    good_keys(&shared);
    key_u32(&shared, "tokenizer.ggml.seperator_token_id", 99); /* not one that is used */
    fkv_weights_close(read_good(&shared));
    maker_open(&shared);
    static const char *const tokens[] = {"a", "b"};
    key_text(&shared, "general.architecture", "llama");
    key_texts(&shared, "tokenizer.ggml.tokens", tokens, 2);
    const maker two = shared;
    key_u32(&shared, "tokenizer.ggml.bos_token_id", 2);
    ck_refused(&shared, FKV_FILE_DAMAGED, "bos_token_id is 2, there are 2 tokens");
    shared = two;
    key_array(&shared, "tokenizer.ggml.scores", F32, 1);
    put_u32(&shared, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "2 tokens, but 1 scores and 0 types");
    shared = two;
    key_array(&shared, "tokenizer.ggml.scores", F32, 2);
    put_u64(&shared, 0x7fc00000);
    ck_refused(&shared, FKV_FILE_DAMAGED, "the score of token 0");
    shared = two;
    key_array(&shared, "tokenizer.ggml.token_type", I32, 2);
    put_u64(&shared, 7ull << 32);
    ck_refused(&shared, FKV_FILE_DAMAGED, "token 1 is of type 7");
}
END_TEST

/* ---- tensors ---- */

static void one_tensor(const char *name, uint32_t type, uint64_t n_cols, uint64_t n_rows, uint64_t offset) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    tensor_at(&shared, name, type, n_cols, n_rows, offset);
    shared.data_bytes = 1024;
}

START_TEST(a_tensor_of_another_type_is_named) {
    one_tensor("blk.0.ffn_up.weight", GGML_Q2_K, 256, 1, 0);
    ck_refused(&shared, FKV_UNSUPPORTED, "blk.0.ffn_up.weight is of type Q2_K (10)");
    one_tensor("x", 4711, 256, 1, 0);
    ck_refused(&shared, FKV_UNSUPPORTED, "unknown (4711)");
}
END_TEST

START_TEST(a_tensor_stays_inside_the_file) {
    one_tensor("x", GGML_F32, 256, 1, 0);
    fkv_weights_close(read_good(&shared)); /* just fits */
    one_tensor("x", GGML_F32, 257, 1, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "x needs 1028 bytes at 0, the file has 1024");
    one_tensor("x", GGML_F32, 256, 1, 32);
    ck_refused(&shared, FKV_FILE_DAMAGED, "x needs 1024 bytes at 32");
    one_tensor("x", GGML_F32, 8, 1, UINT64_MAX - 31);
    ck_refused(&shared, FKV_FILE_DAMAGED, "x needs 32 bytes");
    one_tensor("x", GGML_F32, 8, 1, 36);
    ck_refused(&shared, FKV_FILE_DAMAGED, "not a multiple of 32");
    one_tensor("x", GGML_F32, UINT32_MAX, UINT32_MAX, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "larger than any file");
    one_tensor("x", GGML_F32, 1ull << 32, 1, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "a dimension of 4294967296");
    one_tensor("x", GGML_F32, 0, 1, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "a dimension of 0");
    one_tensor("x", GGML_Q4_K, 288, 1, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "rows of 288, Q4_K has blocks of 256");
    one_tensor("", GGML_F32, 1, 1, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "name of 0 bytes");
}
END_TEST

START_TEST(dimensions_and_names_have_limits) {
    static const uint32_t n_dims[] = {0, 5, UINT32_MAX};
    for (size_t i = 0; i < sizeof n_dims / sizeof n_dims[0]; i++) {
        maker_open(&shared);
        key_text(&shared, "general.architecture", "llama");
        put_text(&shared, "x");
        put_u32(&shared, n_dims[i]);
        for (unsigned d = 0; d < 6; d++) put_u64(&shared, 1);
        shared.n_tensors = 1;
        ck_refused(&shared, FKV_FILE_DAMAGED, "dimensions");
    }
    char name[FKV_MAX_TENSOR_NAME + 1];
    memset(name, 'n', sizeof name);
    name[FKV_MAX_TENSOR_NAME - 1] = 0;
    one_tensor(name, GGML_F32, 1, 1, 0);
    fkv_weights_close(read_good(&shared));
    name[FKV_MAX_TENSOR_NAME - 1] = 'n';
    name[FKV_MAX_TENSOR_NAME] = 0;
    one_tensor(name, GGML_F32, 1, 1, 0);
    ck_refused(&shared, FKV_FILE_DAMAGED, "name of 128 bytes");
}
END_TEST

START_TEST(tensors_must_not_overlap) {
    maker_open(&shared);
    key_text(&shared, "general.architecture", "llama");
    tensor_at(&shared, "a", GGML_F32, 9, 1, 64); /* 36 bytes */
    tensor_at(&shared, "b", GGML_F32, 16, 1, 0); /* just before it */
    const maker two = shared;
    shared.data_bytes = 1024;
    fkv_weights_close(read_good(&shared));
    shared = two;
    tensor_at(&shared, "c", GGML_F32, 1, 1, 96);
    shared.data_bytes = 1024;
    ck_refused(&shared, FKV_FILE_DAMAGED, "tensors a and c overlap");
    shared = two;
    tensor_at(&shared, "c", GGML_F32, 1, 1, 0);
    shared.data_bytes = 1024;
    ck_refused(&shared, FKV_FILE_DAMAGED, "overlap");
}
END_TEST

START_TEST(alignment_is_a_power_of_two) {
    static const uint32_t wrong[] = {0, 1, 4, 24, 33, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        good_keys(&shared);
        key_u32(&shared, "general.alignment", wrong[i]);
        ck_refused(&shared, FKV_FILE_DAMAGED, "general.alignment is");
    }
    good_keys(&shared);
    key_u32(&shared, "general.alignment", 1u << 31);
    tensor(&shared, "x", GGML_F32, 1, 1, 4);
    ck_refused(&shared, FKV_FILE_DAMAGED, "ends before the data");
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
    world_write_file(world_path("good.gguf"), shared.bytes, n);
    ck_ok(fkv_weights_open(world_path("good.gguf"), &weights));
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
    ck_status(fkv_weights_open(world_path("absent.gguf"), &weights), FKV_IO);
    ck_assert_ptr_null(weights);
    world_write_file(world_path("empty.gguf"), (const uint8_t *)"", 0);
    ck_status(fkv_weights_open(world_path("empty.gguf"), &weights), FKV_FILE_FORMAT);
    ck_assert_int_eq(mkfifo(world_path("pipe.gguf"), 0600), 0);
    ck_status(fkv_weights_open(world_path("pipe.gguf"), &weights), FKV_FILE_FORMAT); /* and does not wait for a writer */
    world_remove_folder();
}
END_TEST

TEST_MAIN("gguf", a_sound_file_says_its_hyperparameters, a_sound_file_says_its_vocabulary, tensors_lie_where_the_file_has_them,
          every_one_of_many_tensors_is_found, what_a_file_does_not_say_is_zero, gemma_says_windows_and_two_ropes,
          numbers_may_be_wider_than_they_need, another_alignment_is_kept, other_files_and_versions_are_told_apart,
          counts_beyond_the_file_take_no_memory, strings_and_arrays_stay_inside_the_file, every_cut_of_a_file_is_noticed,
          every_changed_byte_is_survived, a_key_of_the_wrong_type_is_named, numbers_out_of_range_are_named,
          a_file_without_an_architecture_is_refused, a_key_or_tensor_that_is_there_twice_is_refused,
          models_that_would_run_wrong_are_refused, a_vocabulary_must_agree_with_itself, a_tensor_of_another_type_is_named,
          a_tensor_stays_inside_the_file, dimensions_and_names_have_limits, tensors_must_not_overlap, alignment_is_a_power_of_two,
          the_id_knows_weights_apart, a_file_is_mapped_and_given_back, what_is_no_weight_file_is_said)
