/* Builds GGUF files byte by byte, so that a test can corrupt one value at a time. Callers add keys first, then tensors. made()
 * writes the counts and the data and returns the file length.
 */
#ifndef FKV_GGUF_MAKER_H
#define FKV_GGUF_MAKER_H

#include "test.h"

#include "../src/model/files/gguf.h"
#include "../src/model/files/weights_state.h"

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
enum { GGML_F32 = 0, GGML_F16 = 1, GGML_Q8_0 = 8, GGML_Q4_K = 12, GGML_I8 = 24, GGML_BF16 = 30 };

typedef struct maker {
    alignas(64) uint8_t bytes[MAX_BYTES];
    size_t n;
    uint64_t n_keys, n_tensors;
    uint64_t data_bytes;
    uint32_t alignment;
    uint32_t version;
} maker;

static inline void put(maker *m, const void *bytes, size_t n) {
    ck_assert_uint_le(m->n + n, MAX_BYTES);
    memcpy(m->bytes + m->n, bytes, n);
    m->n += n;
}

static inline void put_u32(maker *m, uint32_t x) { put(m, &x, sizeof x); }
static inline void put_u64(maker *m, uint64_t x) { put(m, &x, sizeof x); }
static inline void put_text(maker *m, const char *text) {
    put_u64(m, strlen(text));
    put(m, text, strlen(text));
}

static inline void maker_open(maker *m) {
    memset(m, 0, sizeof *m);
    m->n = 24;
    m->alignment = 32;
    m->version = 3;
}

static inline void key(maker *m, const char *name, uint32_t type) {
    put_text(m, name);
    put_u32(m, type);
    m->n_keys++;
}

static inline void key_u32(maker *m, const char *name, uint32_t x) {
    key(m, name, U32);
    put_u32(m, x);
}

static inline void key_f32(maker *m, const char *name, float x) {
    key(m, name, F32);
    put(m, &x, sizeof x);
}

static inline void key_bool(maker *m, const char *name, uint8_t x) {
    key(m, name, BOOL);
    put(m, &x, 1);
}

static inline void key_text(maker *m, const char *name, const char *text) {
    key(m, name, STRING);
    put_text(m, text);
}

static inline void key_array(maker *m, const char *name, uint32_t item, uint64_t count) {
    key(m, name, ARRAY);
    put_u32(m, item);
    put_u64(m, count);
}

static inline void key_texts(maker *m, const char *name, const char *const *texts, uint32_t n) {
    key_array(m, name, STRING, n);
    for (uint32_t i = 0; i < n; i++) put_text(m, texts[i]);
}

static inline void tensor_at(maker *m, const char *name, uint32_t type, uint64_t n_cols, uint64_t n_rows, uint64_t offset) {
    put_text(m, name);
    put_u32(m, n_rows == 1 ? 1 : 2);
    put_u64(m, n_cols);
    if (n_rows != 1) put_u64(m, n_rows);
    put_u32(m, type);
    put_u64(m, offset);
    m->n_tensors++;
}

static inline void tensor(maker *m, const char *name, uint32_t type, uint64_t n_cols, uint64_t n_rows, uint64_t bytes) {
    tensor_at(m, name, type, n_cols, n_rows, m->data_bytes);
    m->data_bytes += (bytes + m->alignment - 1) / m->alignment * m->alignment;
}

/* Finishes the file; the bytes of the tensor data are 0, 1, 2, and so on. Returns the file length in bytes. */
static inline size_t made(maker *m) {
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

static maker shared; /* static because the struct is too large for the stack */

/* Adds all keys that a valid model needs. More keys may follow until the first tensor is added. */
static inline void good_keys(maker *m) {
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

static inline void good_tensors(maker *m) {
    tensor(m, "token_embd.weight", GGML_Q8_0, 64, 5, 5 * 2 * 34);
    tensor(m, "output_norm.weight", GGML_F32, 64, 1, 64 * 4);
    tensor(m, "blk.0.attn_q.weight", GGML_F16, 64, 64, 64 * 64 * 2);
    tensor(m, "blk.0.attn_k.weight", GGML_BF16, 64, 32, 64 * 32 * 2);
}

static inline fkv_status read_bytes(const uint8_t *bytes, size_t n, fkv_weights **weights) {
    *weights = fkv_weights_new();
    ck_assert_ptr_nonnull(*weights);
    fkv_gguf_part part;
    FKV_TRY(fkv_gguf_read_part(*weights, bytes, n, "made.gguf", 0, &part));
    return fkv_weights_finish(*weights, "made.gguf");
}

static inline fkv_weights *read_good(maker *m) {
    fkv_weights *weights = NULL;
    const size_t n = made(m);
    ck_ok(read_bytes(m->bytes, n, &weights));
    return weights;
}

#endif
