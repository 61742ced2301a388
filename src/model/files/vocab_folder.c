/* See vocab_folder.h.
 *
 * Of JSON files only the fields that are used are parsed: tokenizer_config.json is known for integers of 31 digits.
 *
 * tokenizer_config.json has the last word on what begins a text. Its chat template gives way to chat_template.jinja, which newer
 * folders have instead; where there is neither, folders of models that also see have a chat_template.json.
 */
#include "vocab_folder.h"

#include "json_scan.h"
#include "sentencepiece.h"
#include "tokenizer_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

enum { MAX_PATH = 4096, BYTE_VOCAB = 256, MAX_FIELDS = 8, MAX_JSON_BYTES = 16 << 20 };

/* *there is false and nothing is mapped where the folder has no such file. */
static fkv_status map_if_there(fkv_weights *weights, const char *folder, const char *name, char path[MAX_PATH],
                               fkv_mapped *mapped, bool *there) {
    const int n = snprintf(path, MAX_PATH, "%s/%s", folder, name);
    FKV_REQUIRE(n > 0 && n < MAX_PATH, FKV_BAD_ARGUMENT, "a path of more than %d bytes: %s", MAX_PATH, folder);
    *there = access(path, F_OK) == 0;
    return *there ? fkv_weights_map(weights, path, mapped) : FKV_OK;
}

/* An object of those of the fields that the file has. */
static fkv_status read_fields(const char *text, size_t size, const char *path, const char *const *fields, size_t n_fields,
                              json_t *into) {
    fkv_json_scan scan = {.at = text, .end = text + size, .start = text, .path = path};
    fkv_bytes spans[MAX_FIELDS];
    FKV_ASSERT(n_fields <= MAX_FIELDS);
    FKV_REQUIRE(size <= MAX_JSON_BYTES, FKV_UNSUPPORTED, "JSON of %zu bytes, at most %d are read: %s", size, MAX_JSON_BYTES,
                path);
    FKV_TRY(fkv_json_scan_members(&scan, fields, n_fields, spans));
    for (size_t i = 0; i < n_fields; i++) {
        json_error_t error;
        if (spans[i].data == NULL) continue;
        json_t *value = json_loadb(spans[i].data, spans[i].size, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &error);
        FKV_REQUIRE(value != NULL, FKV_FILE_FORMAT, "%s is not JSON: %s: %s", fields[i], error.text, path);
        FKV_REQUIRE(json_object_set_new(into, fields[i], value) == 0, FKV_NO_MEMORY, "no memory for %s: %s", fields[i], path);
    }
    return FKV_OK;
}

/* *root is NULL where the folder has no such file. */
static fkv_status read_json_if_there(fkv_weights *weights, const char *folder, const char *name, const char *const *fields,
                                     size_t n_fields, char path[MAX_PATH], json_t **root) {
    fkv_mapped mapped = {0};
    bool there = false;
    *root = NULL;
    FKV_TRY(map_if_there(weights, folder, name, path, &mapped, &there));
    if (!there) return FKV_OK;
    *root = json_object();
    FKV_REQUIRE(*root != NULL, FKV_NO_MEMORY, "no memory to read %s", path);
    const fkv_status status = read_fields((const char *)mapped.bytes, (size_t)mapped.size, path, fields, n_fields, *root);
    if (status == FKV_OK) return FKV_OK;
    json_decref(*root);
    *root = NULL;
    return status;
}

/* ---- tokenizer_config.json ----------------------------------------------------------------------------------- */

/* A token by its text, which is a string or in the "content" of an object. Unknown ones stay as they were. */
static fkv_status find_token(const fkv_vocab_source *vocab, const json_t *config, const char *field, const char *path,
                             uint32_t *token) {
    const json_t *value = json_object_get(config, field);
    if (value == NULL || json_is_null(value)) return FKV_OK;
    if (json_is_object(value)) value = json_object_get(value, "content");
    FKV_REQUIRE(json_is_string(value), FKV_FILE_FORMAT, "%s is neither a string nor an object with a content: %s", field, path);
    const size_t size = json_string_length(value);
    for (uint32_t i = 0; i < vocab->n_tokens && size > 0; i++) {
        if (vocab->tokens[i].size != size || memcmp(vocab->tokens[i].data, json_string_value(value), size) != 0) continue;
        *token = i;
        return FKV_OK;
    }
    return FKV_OK;
}

/* A string, or several with names: the one called "default", or else the first. */
static fkv_status read_template(fkv_weights *weights, const json_t *config, const char *path) {
    const json_t *template = json_object_get(config, "chat_template");
    if (template == NULL || json_is_null(template)) return FKV_OK;
    const json_t *chosen = json_is_array(template) ? json_object_get(json_array_get(template, 0), "template") : template;
    for (size_t i = 0; i < json_array_size(template); i++) {
        const char *name = json_string_value(json_object_get(json_array_get(template, i), "name"));
        if (name != NULL && strcmp(name, "default") == 0) chosen = json_object_get(json_array_get(template, i), "template");
    }
    FKV_REQUIRE(json_is_string(chosen), FKV_FILE_FORMAT, "chat_template is neither a string nor a list with templates: %s", path);
    return fkv_keep_bytes(weights, json_string_value(chosen), json_string_length(chosen), &weights->vocab.chat_template);
}

static fkv_status apply_config(fkv_weights *weights, const json_t *config, const char *path) {
    fkv_vocab_source *vocab = &weights->vocab;
    const json_t *add_bos = json_object_get(config, "add_bos_token");
    FKV_TRY(find_token(vocab, config, "bos_token", path, &vocab->bos));
    FKV_TRY(find_token(vocab, config, "eos_token", path, &vocab->eos));
    if (vocab->unk == FKV_NO_TOKEN) FKV_TRY(find_token(vocab, config, "unk_token", path, &vocab->unk));
    FKV_REQUIRE(add_bos == NULL || json_is_null(add_bos) || json_is_boolean(add_bos), FKV_FILE_FORMAT,
                "add_bos_token is neither true nor false: %s", path);
    if (json_is_boolean(add_bos)) vocab->add_bos = json_is_true(add_bos) && vocab->bos != FKV_NO_TOKEN;
    return read_template(weights, config, path);
}

/* ---- generation_config.json ---------------------------------------------------------------------------------- */

/* eos_token_id is a number or several: all of them end a text. */
static void apply_generation(fkv_vocab_source *vocab, const json_t *config) {
    const json_t *ends = json_object_get(config, "eos_token_id");
    const size_t n = json_is_array(ends) ? json_array_size(ends) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *end = json_is_array(ends) ? json_array_get(ends, i) : ends;
        const json_int_t id = json_integer_value(end);
        if (!json_is_integer(end) || id < 0 || id >= vocab->n_tokens) continue;
        if (vocab->eos == FKV_NO_TOKEN) vocab->eos = (uint32_t)id;
        fkv_vocab_add_end(vocab, (uint32_t)id);
    }
}

static void apply_sampling(fkv_sampling_source *s, const json_t *config) {
    const struct {
        const char *field;
        unsigned bit;
        float *target;
    } reals[] = {{"temperature", FKV_SAID_TEMPERATURE, &s->temperature},
                 {"top_p", FKV_SAID_TOP_P, &s->top_p},
                 {"min_p", FKV_SAID_MIN_P, &s->min_p},
                 {"repetition_penalty", FKV_SAID_REPETITION, &s->repetition}};
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        const json_t *value = json_object_get(config, reals[i].field);
        if (!json_is_number(value)) continue;
        *reals[i].target = (float)json_number_value(value);
        s->said |= reals[i].bit;
    }
    if (json_is_false(json_object_get(config, "do_sample"))) { /* the likeliest token, whatever else is said */
        s->temperature = 0.0f;
        s->said |= FKV_SAID_TEMPERATURE;
    }
    const json_t *top_k = json_object_get(config, "top_k");
    if (!json_is_integer(top_k) || json_integer_value(top_k) < 0 || json_integer_value(top_k) > INT32_MAX) return;
    s->top_k = (uint32_t)json_integer_value(top_k);
    s->said |= FKV_SAID_TOP_K;
}

/* ---- the folder ---------------------------------------------------------------------------------------------- */

static fkv_status read_vocab(fkv_weights *weights, const char *folder) {
    char path[MAX_PATH];
    fkv_mapped mapped = {0};
    bool there = false;
    FKV_TRY(map_if_there(weights, folder, "tokenizer.json", path, &mapped, &there));
    if (there) return fkv_tokenizer_json_read(weights, (const char *)mapped.bytes, (size_t)mapped.size, path);
    FKV_TRY(map_if_there(weights, folder, "tokenizer.model", path, &mapped, &there));
    if (there) return fkv_sentencepiece_read(weights, mapped.bytes, (size_t)mapped.size, path);
    FKV_REQUIRE(weights->hparams.n_vocab == BYTE_VOCAB, FKV_UNSUPPORTED,
                "neither tokenizer.json nor tokenizer.model; only models of %d bytes go without, this one has %" PRIu32
                " tokens: %s",
                BYTE_VOCAB, weights->hparams.n_vocab, folder);
    weights->vocab.model = (fkv_bytes){.data = "byte", .size = 4};
    weights->vocab.n_tokens = BYTE_VOCAB;
    return FKV_OK;
}

static fkv_status read_beside(fkv_weights *weights, const char *folder) {
    static const char *const config_fields[] = {"bos_token", "eos_token", "unk_token", "add_bos_token", "chat_template"};
    static const char *const generation_fields[] = {"eos_token_id", "do_sample", "temperature",       "top_k",
                                                    "top_p",        "min_p",     "repetition_penalty"};
    char path[MAX_PATH];
    json_t *config = NULL;
    fkv_mapped template = {0};
    bool there = false;
    FKV_TRY(read_json_if_there(weights, folder, "tokenizer_config.json", config_fields, 5, path, &config));
    fkv_status status = config != NULL ? apply_config(weights, config, path) : FKV_OK;
    json_decref(config);
    FKV_TRY(status);
    FKV_TRY(read_json_if_there(weights, folder, "generation_config.json", generation_fields, 7, path, &config));
    if (config != NULL) {
        apply_generation(&weights->vocab, config);
        apply_sampling(&weights->vocab.sampling, config);
    }
    json_decref(config);
    FKV_TRY(map_if_there(weights, folder, "chat_template.jinja", path, &template, &there));
    if (!there && weights->vocab.chat_template.size == 0) {
        FKV_TRY(read_json_if_there(weights, folder, "chat_template.json", config_fields + 4, 1, path, &config));
        status = config != NULL ? read_template(weights, config, path) : FKV_OK;
        json_decref(config);
        return status;
    }
    if (there) weights->vocab.chat_template = (fkv_bytes){(const char *)template.bytes, (size_t)template.size};
    return FKV_OK;
}

fkv_status fkv_vocab_folder_read(fkv_weights *weights, const char *folder) {
    FKV_TRY(read_vocab(weights, folder));
    return weights->vocab.tokens != NULL ? read_beside(weights, folder) : FKV_OK;
}
