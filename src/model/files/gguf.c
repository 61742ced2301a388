/* Reads the header, the vocabulary and the tensors of GGUF files. Versions 2 and 3, which have the same layout, are supported;
 * big-endian files are rejected. gguf_hparams.c reads hyperparameters, gguf_split.c handles split models. Hyperparameters that
 * the file does not contain remain 0.
 */
#include "gguf.h"

#include "gguf_hparams.h"
#include "tensor_rows.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    OLDEST_VERSION = 2,
    NEWEST_VERSION = 3,
    GGUF_MAX_DIMS = 4,
    DEFAULT_ALIGNMENT = 32,
    MIN_ALIGNMENT = 8,
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8 /* size of the smallest tensor description: a one-character name and one dimension */
};

static const uint8_t MAGIC[4] = {'G', 'G', 'U', 'F'};

/* ---- vocabulary ---- */

static fkv_status get_special_token(const fkv_gguf_values *values, const char *key, uint32_t n_tokens, uint32_t *token) {
    uint32_t id = FKV_NO_TOKEN;
    FKV_TRY(fkv_gguf_get_u32(values, key, &id));
    if (n_tokens == 0) id = FKV_NO_TOKEN;
    FKV_REQUIRE(id == FKV_NO_TOKEN || id < n_tokens, FKV_FILE_DAMAGED, "%s: %s is %u, but the vocabulary has %u tokens",
                values->path, key, id, n_tokens);
    *token = id;
    return FKV_OK;
}

static fkv_status check_tokens(const fkv_weights *weights, uint32_t n_scores, uint32_t n_types, const char *path) {
    const uint32_t n_tokens = weights->vocab.n_tokens;
    FKV_REQUIRE((n_scores == 0 || n_scores == n_tokens) && (n_types == 0 || n_types == n_tokens), FKV_FILE_DAMAGED,
                "%s: the vocabulary has %u tokens, but %u scores and %u types", path, n_tokens, n_scores, n_types);
    for (uint32_t i = 0; i < n_scores; i++)
        FKV_REQUIRE(weights->scores[i] == weights->scores[i], FKV_FILE_DAMAGED, "%s: the score of token %u is NaN", path, i);
    for (uint32_t i = 0; i < n_types; i++)
        FKV_REQUIRE(weights->types[i] >= 0 && weights->types[i] <= 6, FKV_FILE_DAMAGED,
                    "%s: token %u has invalid type %d (expected 0 to 6)", path, i, (int)weights->types[i]);
    return FKV_OK;
}

static fkv_status read_sampling(const fkv_gguf_values *values, fkv_sampling_source *s) {
    const struct {
        const char *key;
        unsigned bit;
        float *target;
    } reals[] = {{"general.sampling.temp", FKV_SAMPLING_TEMPERATURE, &s->temperature},
                 {"general.sampling.top_p", FKV_SAMPLING_TOP_P, &s->top_p},
                 {"general.sampling.min_p", FKV_SAMPLING_MIN_P, &s->min_p},
                 {"general.sampling.penalty_repeat", FKV_SAMPLING_REPETITION, &s->repetition}};
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        FKV_TRY(fkv_gguf_get_f32(values, reals[i].key, reals[i].target));
        if (fkv_gguf_find(values, reals[i].key) != NULL) s->fields |= reals[i].bit;
    }
    FKV_TRY(fkv_gguf_get_u32(values, "general.sampling.top_k", &s->top_k));
    if (fkv_gguf_find(values, "general.sampling.top_k") != NULL) s->fields |= FKV_SAMPLING_TOP_K;
    return FKV_OK;
}

static fkv_status read_vocab(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_vocab_source *vocab = &weights->vocab;
    FKV_TRY(read_sampling(values, &vocab->sampling));
    uint32_t n_scores = 0;
    uint32_t n_types = 0;
    FKV_TRY(fkv_gguf_get_string(values, "tokenizer.ggml.model", &vocab->model));
    FKV_TRY(fkv_gguf_get_string(values, "tokenizer.ggml.pre", &vocab->pre));
    FKV_TRY(fkv_gguf_get_string(values, "tokenizer.chat_template", &vocab->chat_template));
    FKV_TRY(fkv_gguf_get_strings(values, "tokenizer.ggml.tokens", &weights->tokens, &vocab->n_tokens));
    FKV_TRY(fkv_gguf_get_strings(values, "tokenizer.ggml.merges", &weights->merges, &vocab->n_merges));
    FKV_TRY(fkv_gguf_get_f32s(values, "tokenizer.ggml.scores", &weights->scores, &n_scores));
    FKV_TRY(fkv_gguf_get_i32s(values, "tokenizer.ggml.token_type", &weights->types, &n_types));
    FKV_TRY(check_tokens(weights, n_scores, n_types, values->path));
    vocab->tokens = weights->tokens;
    vocab->merges = weights->merges;
    vocab->scores = weights->scores;
    vocab->types = weights->types;
    FKV_TRY(get_special_token(values, "tokenizer.ggml.bos_token_id", vocab->n_tokens, &vocab->bos));
    FKV_TRY(get_special_token(values, "tokenizer.ggml.eos_token_id", vocab->n_tokens, &vocab->eos));
    FKV_TRY(get_special_token(values, "tokenizer.ggml.eot_token_id", vocab->n_tokens, &vocab->eot));
    FKV_TRY(get_special_token(values, "tokenizer.ggml.unknown_token_id", vocab->n_tokens, &vocab->unk));
    /* if the file has no add_bos_token, it defaults to true for SentencePiece models and to false for all others */
    vocab->add_bos = vocab->model.size == 5 && memcmp(vocab->model.data, "llama", 5) == 0;
    FKV_TRY(fkv_gguf_get_bool(values, "tokenizer.ggml.add_bos_token", &vocab->add_bos));
    bool add_eos = false;
    FKV_TRY(fkv_gguf_get_bool(values, "tokenizer.ggml.add_eos_token", &add_eos));
    if (add_eos) vocab->suffix = vocab->eos;
    FKV_TRY(fkv_gguf_get_bool(values, "tokenizer.ggml.add_space_prefix", &vocab->add_space_prefix));
    if (vocab->n_tokens > 0) weights->hparams.n_vocab = vocab->n_tokens;
    return FKV_OK;
}

/* ---- tensors ---- */

/* Names of all ggml types, including unsupported ones, for error messages. */
static const char *const GGML_TYPES[] = {
    "F32",      "F16",    "Q4_0",  "Q4_1",       "Q4_2",       "Q4_3",       "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",     "Q2_K",
    "Q3_K",     "Q4_K",   "Q5_K",  "Q6_K",       "Q8_K",       "IQ2_XXS",    "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",   "IQ3_S",
    "IQ2_S",    "IQ4_XS", "I8",    "I16",        "I32",        "I64",        "F64",    "IQ1_M",   "BF16",  "Q4_0_4_4", "Q4_0_4_8",
    "Q4_0_8_8", "TQ1_0",  "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",  "NVFP4",   "Q1_0"};

static fkv_status ggml_tensor_type(uint32_t number, fkv_bytes name, const char *path, fkv_tensor_type *type) {
    const uint32_t n_types = sizeof GGML_TYPES / sizeof GGML_TYPES[0];
    const char *wanted = number < n_types ? GGML_TYPES[number] : "unknown";
    for (fkv_tensor_type t = FKV_TENSOR_F32; t < FKV_N_BLOCK_TYPES; t++) {
        if (strcmp(fkv_tensor_type_name(t), wanted) != 0) continue;
        *type = t;
        return FKV_OK;
    }
    return fkv_fail(
        FKV_UNSUPPORTED,
        "%s: tensor %s has unsupported type %s (%u); supported types are F32, F16, BF16, Q2_K to Q8_0, IQ1 to IQ4, TQ, MXFP4 and NVFP4",
        path, fkv_show(name).text, wanted, number);
}

/* Reads one tensor description. *offset is relative to the data section; *bytes is the size of the tensor. */
static fkv_status read_tensor_info(fkv_gguf_reader *reader, fkv_tensor *tensor, uint64_t *offset, uint64_t *bytes) {
    fkv_bytes name = {0};
    uint32_t n_dims = 0;
    uint32_t number = 0;
    uint64_t dims[GGUF_MAX_DIMS];
    fkv_tensor_type type = FKV_TENSOR_F32;
    FKV_TRY(fkv_gguf_take_string(reader, &name));
    FKV_TRY(fkv_gguf_take_u32(reader, &n_dims));
    FKV_REQUIRE(n_dims >= 1 && n_dims <= GGUF_MAX_DIMS, FKV_FILE_DAMAGED, "%s: tensor %s has %u dimensions, expected 1 to 4",
                reader->path, fkv_show(name).text, n_dims);
    for (uint32_t d = n_dims; d-- > 0;)
        FKV_TRY(fkv_gguf_take_u64(reader, &dims[d])); /* GGUF stores the fastest-varying dimension first */
    FKV_TRY(fkv_gguf_take_u32(reader, &number));
    FKV_TRY(fkv_gguf_take_u64(reader, offset));
    FKV_TRY(ggml_tensor_type(number, name, reader->path, &type));
    return fkv_tensor_describe(tensor, name, type, dims, n_dims, reader->path, bytes);
}

/* Copies RoPE frequency divisors, which GGUF stores as tensors, to the hyperparameters. */
static fkv_status copy_rope_factors(fkv_weights *weights, const fkv_tensor *tensor, const char *path) {
    fkv_rope *rope = &weights->hparams.rope;
    bool is_long = strcmp(tensor->name, "rope_factors_long.weight") == 0;
    bool is_short = strcmp(tensor->name, "rope_factors_short.weight") == 0;
    if (!is_long && !is_short && strcmp(tensor->name, "rope_freqs.weight") != 0) return FKV_OK;
    FKV_REQUIRE(tensor->type == FKV_TENSOR_F32 && tensor->n_rows == 1 && tensor->n_cols == weights->hparams.rope.dim / 2,
                FKV_FILE_DAMAGED, "%s: tensor %s must have one F32 value for each of %u channel pairs", path, tensor->name,
                weights->hparams.rope.dim / 2);
    float *factors = fkv_weights_keep(weights, tensor->n_cols * sizeof *factors);
    FKV_REQUIRE(factors != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %u RoPE factors", path, tensor->n_cols);
    fkv_tensor_row_floats(tensor, 0, factors);
    rope->n_factors = tensor->n_cols;
    if (!is_short) rope->long_factors = factors;
    if (!is_long) rope->short_factors = factors;
    return FKV_OK;
}

static fkv_status locate_tensors(fkv_weights *weights, uint64_t n, const uint64_t *spans, const uint8_t *data,
                                 uint64_t data_bytes, uint32_t alignment, const char *path) {
    fkv_tensor *tensors = weights->tensors + weights->n_tensors - n; /* first tensor of this part of the split model */
    for (uint64_t i = 0; i < n; i++) {
        fkv_tensor *tensor = &tensors[i];
        const uint64_t offset = spans[2 * i];
        const uint64_t bytes = spans[2 * i + 1];
        FKV_REQUIRE(offset % alignment == 0, FKV_FILE_DAMAGED,
                    "%s: tensor %s starts at offset %llu, which is not a multiple of the alignment %u", path, tensor->name,
                    (unsigned long long)offset, alignment);
        FKV_REQUIRE(offset <= data_bytes && bytes <= data_bytes - offset, FKV_FILE_DAMAGED,
                    "%s: tensor %s needs %llu bytes at offset %llu, but the data section has only %llu (incomplete download?)",
                    path, tensor->name, (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)data_bytes);
        tensor->data = data + offset;
        FKV_TRY(copy_rope_factors(weights, tensor, path));
    }
    return FKV_OK;
}

static fkv_status read_tensor_infos(fkv_gguf_reader *reader, fkv_weights *weights, uint64_t n, uint64_t *spans) {
    fkv_tensor *tensors = NULL;
    FKV_TRY(fkv_weights_reserve(weights, n, &tensors));
    for (uint64_t i = 0; i < n; i++) {
        FKV_TRY(read_tensor_info(reader, &tensors[i], &spans[2 * i], &spans[2 * i + 1]));
    }
    weights->n_tensors += (uint32_t)n;
    return FKV_OK;
}

static fkv_status read_tensors(fkv_gguf_reader *reader, fkv_weights *weights, uint64_t n, const uint8_t *file,
                               uint32_t alignment) {
    const uint64_t left = (uint64_t)(reader->end - reader->at);
    FKV_REQUIRE(n <= left / MIN_TENSOR_BYTES, FKV_FILE_DAMAGED,
                "%s: the header declares %llu tensors, but only %llu bytes follow", reader->path, (unsigned long long)n,
                (unsigned long long)left);
    FKV_REQUIRE(n <= FKV_MAX_TENSORS, FKV_UNSUPPORTED, "%s: the file has %llu tensors, more than the limit of %d", reader->path,
                (unsigned long long)n, FKV_MAX_TENSORS);
    if (n == 0) return FKV_OK;
    uint64_t *spans = calloc((size_t)n, 2 * sizeof *spans); /* offset and size of each tensor */
    FKV_REQUIRE(spans != NULL, FKV_NO_MEMORY, "%s: out of memory reading %llu tensors", reader->path, (unsigned long long)n);
    fkv_status status = read_tensor_infos(reader, weights, n, spans);
    const uint64_t size = (uint64_t)(reader->end - file);
    const uint64_t first = fkv_align_up((uint64_t)(reader->at - file), alignment);
    if (status == FKV_OK && first > size)
        status = fkv_fail(FKV_FILE_DAMAGED, "%s: the file ends before its tensor data", reader->path);
    if (status == FKV_OK) status = locate_tensors(weights, n, spans, file + first, size - first, alignment, reader->path);
    free(spans);
    return status;
}

/* ---- file ---- */

static fkv_status read_gguf_header(fkv_gguf_reader *reader, uint64_t *n_tensors, uint64_t *n_values) {
    uint32_t version = 0;
    FKV_REQUIRE(reader->end - reader->at >= 4 && memcmp(reader->at, MAGIC, sizeof MAGIC) == 0, FKV_FILE_FORMAT,
                "%s: not a model: expected a GGUF file or a folder with safetensors", reader->path);
    reader->at += sizeof MAGIC;
    FKV_TRY(fkv_gguf_take_u32(reader, &version));
    FKV_REQUIRE(version != 0x02000000 && version != 0x03000000, FKV_UNSUPPORTED, "%s: big-endian GGUF files are not supported",
                reader->path);
    FKV_REQUIRE(version >= OLDEST_VERSION && version <= NEWEST_VERSION, FKV_UNSUPPORTED,
                "%s: unsupported GGUF version %u: versions %d and %d can be read; convert the model again", reader->path, version,
                OLDEST_VERSION, NEWEST_VERSION);
    FKV_TRY(fkv_gguf_take_u64(reader, n_tensors));
    return fkv_gguf_take_u64(reader, n_values);
}

/* Reads the position of a file within a split model. Parts are numbered from 0 in the metadata (split.no), but from 1 in file
 * names and messages. */
static fkv_status read_part_numbers(const fkv_gguf_values *values, uint32_t expected, fkv_gguf_part *part) {
    *part = (fkv_gguf_part){.n_parts = 1};
    FKV_TRY(fkv_gguf_get_u32(values, "split.no", &part->number));
    FKV_TRY(fkv_gguf_get_u32(values, "split.count", &part->n_parts));
    FKV_TRY(fkv_gguf_get_u32(values, "split.tensors.count", &part->n_all_tensors));
    if (part->n_parts == 0) part->n_parts = 1; /* llama.cpp writes 0 for single-file models */
    FKV_REQUIRE(part->number < part->n_parts, FKV_FILE_DAMAGED, "%s: split.no is %u, but split.count is %u", values->path,
                part->number, part->n_parts);
    FKV_REQUIRE(part->n_parts <= FKV_MAX_SHARDS, FKV_UNSUPPORTED, "%s: split.count is %u, which exceeds the limit of %d parts",
                values->path, part->n_parts, FKV_MAX_SHARDS);
    FKV_REQUIRE(part->number == expected, FKV_FILE_FORMAT,
                "%s: the file is part %u of %u (split.no %u), but part %u was expected", values->path, part->number + 1,
                part->n_parts, part->number, expected + 1);
    return FKV_OK;
}

static fkv_status read_contents(fkv_gguf_reader *reader, const fkv_gguf_values *values, uint64_t n_tensors, const uint8_t *file,
                                uint32_t number, fkv_weights *weights) {
    uint32_t alignment = DEFAULT_ALIGNMENT;
    FKV_TRY(fkv_gguf_get_u32(values, "general.alignment", &alignment));
    FKV_REQUIRE(fkv_is_pow2(alignment) && alignment >= MIN_ALIGNMENT, FKV_FILE_DAMAGED,
                "%s: general.alignment is %u, expected a power of two of at least %d", reader->path, alignment, MIN_ALIGNMENT);
    if (number == 0) { /* only the first part has hyperparameters and vocabulary */
        FKV_TRY(fkv_gguf_read_hparams(values, weights));
        FKV_TRY(read_vocab(values, weights));
    }
    return read_tensors(reader, weights, n_tensors, file, alignment);
}

fkv_status fkv_gguf_read_part(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path, uint32_t number,
                              fkv_gguf_part *part) {
    FKV_ASSERT((uintptr_t)bytes % MIN_ALIGNMENT == 0);
    fkv_gguf_reader reader = {.at = bytes, .end = bytes + size, .path = path};
    fkv_gguf_values values;
    uint64_t n_tensors = 0;
    uint64_t n_values = 0;
    FKV_TRY(read_gguf_header(&reader, &n_tensors, &n_values));
    FKV_TRY(fkv_gguf_values_read(&reader, n_values, &values));
    fkv_status status = read_part_numbers(&values, number, part);
    if (status == FKV_OK) status = read_contents(&reader, &values, n_tensors, bytes, number, weights);
    fkv_gguf_values_close(&values);
    return status;
}
