/* See vocab_folder.h.
 *
 * Only the required fields of JSON files are parsed, because tokenizer_config.json may contain integers with 31 digits, which
 * jansson rejects.
 *
 * tokenizer_config.json overrides the bos token of tokenizer.json. chat_template.jinja, found in newer folders, overrides the
 * template in tokenizer_config.json. chat_template.json, found with multimodal models, is the fallback.
 */
#include "vocab_folder.h"

#include "json_scan.h"
#include "sentencepiece.h"
#include "tokenizer_json.h"

#include <stdio.h>
#include <unistd.h>

enum { MAX_PATH = 4096, BYTE_VOCAB = 256, MAX_FIELDS = 8, MAX_JSON_BYTES = 16 << 20 };

/* Memory-maps a file in the folder. Sets *there to false if the file does not exist. */
static fkv_status map_if_there(fkv_vocab_target target, const char *folder, const char *name, char path[MAX_PATH],
                               fkv_mapped *mapped, bool *there) {
    const int n = snprintf(path, MAX_PATH, "%s/%s", folder, name);
    FKV_REQUIRE(n > 0 && n < MAX_PATH, FKV_BAD_ARGUMENT, "the path is longer than %d bytes: %s", MAX_PATH, folder);
    *there = access(path, F_OK) == 0;
    return *there ? fkv_file_arena_map(target.arena, path, mapped) : FKV_OK;
}

/* Adds the listed fields of a JSON object to `into`. */
static fkv_status read_json_fields(const char *text, size_t size, const char *path, const char *const *fields, size_t n_fields,
                                   json_t *into) {
    fkv_json_scan scan = {.at = text, .end = text + size, .start = text, .path = path};
    fkv_bytes spans[MAX_FIELDS];
    FKV_ASSERT(n_fields <= MAX_FIELDS);
    FKV_REQUIRE(size <= MAX_JSON_BYTES, FKV_UNSUPPORTED, "%s: the JSON text is %zu bytes long; at most %d are supported", path,
                size, MAX_JSON_BYTES);
    FKV_TRY(fkv_json_scan_members(&scan, fields, n_fields, spans));
    for (size_t i = 0; i < n_fields; i++) {
        json_error_t error;
        if (spans[i].data == NULL) continue;
        json_t *value = json_loadb(spans[i].data, spans[i].size, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &error);
        FKV_REQUIRE(value != NULL, FKV_FILE_FORMAT, "%s: %s is not valid JSON: %s", path, fields[i], error.text);
        FKV_REQUIRE(json_object_set_new(into, fields[i], value) == 0, FKV_NO_MEMORY, "%s: out of memory reading %s", path,
                    fields[i]);
    }
    return FKV_OK;
}

/* Reads the listed fields of a JSON file in the folder. Sets *root to NULL if the file does not exist. */
static fkv_status read_json_if_there(fkv_vocab_target target, const char *folder, const char *name, const char *const *fields,
                                     size_t n_fields, char path[MAX_PATH], json_t **root) {
    fkv_mapped mapped = {0};
    bool there = false;
    *root = NULL;
    FKV_TRY(map_if_there(target, folder, name, path, &mapped, &there));
    if (!there) return FKV_OK;
    *root = json_object();
    FKV_REQUIRE(*root != NULL, FKV_NO_MEMORY, "out of memory reading %s", path);
    const fkv_status status = read_json_fields((const char *)mapped.bytes, (size_t)mapped.size, path, fields, n_fields, *root);
    if (status == FKV_OK) return FKV_OK;
    json_decref(*root);
    *root = NULL;
    return status;
}

/* ---- tokenizer_config.json ----------------------------------------------------------------------------------- */

/* Finds the token whose text is the value of a field: a string, or an object with the string "content". Leaves *token unchanged
 * if the vocabulary has no such token. */
static fkv_status find_named_token(const fkv_vocab_source *vocab, const json_t *config, const char *field, const char *path,
                                   uint32_t *token) {
    const json_t *value = json_object_get(config, field);
    if (value == NULL || json_is_null(value)) return FKV_OK;
    if (json_is_object(value)) value = json_object_get(value, "content");
    FKV_REQUIRE(json_is_string(value), FKV_FILE_FORMAT, "%s: %s must be a string or an object with a string \"content\"", path,
                field);
    const size_t size = json_string_length(value);
    for (uint32_t i = 0; i < vocab->n_tokens && size > 0; i++) {
        if (vocab->tokens[i].size != size || memcmp(vocab->tokens[i].data, json_string_value(value), size) != 0) continue;
        *token = i;
        return FKV_OK;
    }
    return FKV_OK;
}

/* Reads the chat template: a string, or a list of named templates. In a list, "default" is used if present, otherwise the first
 * template. */
static fkv_status read_chat_template(fkv_vocab_target target, const json_t *config, const char *path) {
    const json_t *template = json_object_get(config, "chat_template");
    if (template == NULL || json_is_null(template)) return FKV_OK;
    const json_t *chosen = json_is_array(template) ? json_object_get(json_array_get(template, 0), "template") : template;
    for (size_t i = 0; i < json_array_size(template); i++) {
        const char *name = json_string_value(json_object_get(json_array_get(template, i), "name"));
        if (name != NULL && strcmp(name, "default") == 0) chosen = json_object_get(json_array_get(template, i), "template");
    }
    FKV_REQUIRE(json_is_string(chosen), FKV_FILE_FORMAT, "%s: chat_template must be a string or a list of templates", path);
    return fkv_keep_bytes(target, json_string_value(chosen), json_string_length(chosen), &target.vocab->chat_template);
}

static fkv_status apply_tokenizer_config(fkv_vocab_target target, const json_t *config, const char *path) {
    fkv_vocab_source *vocab = target.vocab;
    const json_t *add_bos = json_object_get(config, "add_bos_token");
    FKV_TRY(find_named_token(vocab, config, "bos_token", path, &vocab->bos));
    FKV_TRY(find_named_token(vocab, config, "eos_token", path, &vocab->eos));
    if (vocab->unk == FKV_NO_TOKEN) FKV_TRY(find_named_token(vocab, config, "unk_token", path, &vocab->unk));
    FKV_REQUIRE(add_bos == NULL || json_is_null(add_bos) || json_is_boolean(add_bos), FKV_FILE_FORMAT,
                "%s: add_bos_token must be true or false", path);
    if (json_is_boolean(add_bos)) vocab->add_bos = json_is_true(add_bos) && vocab->bos != FKV_NO_TOKEN;
    return read_chat_template(target, config, path);
}

/* ---- generation_config.json ---------------------------------------------------------------------------------- */

/* Adds eos_token_id, an integer or a list of integers, to the end tokens. */
static void apply_end_tokens(fkv_vocab_source *vocab, const json_t *config) {
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
    } reals[] = {{"temperature", FKV_SAMPLING_TEMPERATURE, &s->temperature},
                 {"top_p", FKV_SAMPLING_TOP_P, &s->top_p},
                 {"min_p", FKV_SAMPLING_MIN_P, &s->min_p},
                 {"repetition_penalty", FKV_SAMPLING_REPETITION, &s->repetition}};
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        const json_t *value = json_object_get(config, reals[i].field);
        if (!json_is_number(value)) continue;
        *reals[i].target = (float)json_number_value(value);
        s->fields |= reals[i].bit;
    }
    if (json_is_false(json_object_get(config, "do_sample"))) { /* selects greedy sampling and overrides the temperature */
        s->temperature = 0.0f;
        s->fields |= FKV_SAMPLING_TEMPERATURE;
    }
    const json_t *top_k = json_object_get(config, "top_k");
    if (!json_is_integer(top_k) || json_integer_value(top_k) < 0 || json_integer_value(top_k) > INT32_MAX) return;
    s->top_k = (uint32_t)json_integer_value(top_k);
    s->fields |= FKV_SAMPLING_TOP_K;
}

/* ---- folder ---------------------------------------------------------------------------------------------- */

static fkv_status read_vocab_file(fkv_vocab_target target, const char *folder) {
    char path[MAX_PATH];
    fkv_mapped mapped = {0};
    bool there = false;
    FKV_TRY(map_if_there(target, folder, "tokenizer.json", path, &mapped, &there));
    if (there) return fkv_tokenizer_json_read(target, (const char *)mapped.bytes, (size_t)mapped.size, path);
    FKV_TRY(map_if_there(target, folder, "tokenizer.model", path, &mapped, &there));
    if (there) return fkv_sentencepiece_read(target, mapped.bytes, (size_t)mapped.size, path);
    FKV_REQUIRE(
        target.n_vocab == BYTE_VOCAB, FKV_UNSUPPORTED,
        "%s: the folder has neither tokenizer.json nor tokenizer.model, so the vocabulary must have %d tokens, one per byte value "
        "(this model has %u)",
        folder, BYTE_VOCAB, target.n_vocab);
    target.vocab->model = (fkv_bytes){.data = "byte", .size = 4};
    target.vocab->n_tokens = BYTE_VOCAB;
    return FKV_OK;
}

static fkv_status read_accompanying_files(fkv_vocab_target target, const char *folder) {
    static const char *const config_fields[] = {"bos_token", "eos_token", "unk_token", "add_bos_token", "chat_template"};
    static const char *const generation_fields[] = {"eos_token_id", "do_sample", "temperature",       "top_k",
                                                    "top_p",        "min_p",     "repetition_penalty"};
    char path[MAX_PATH];
    json_t *config = NULL;
    fkv_mapped template = {0};
    bool there = false;
    FKV_TRY(read_json_if_there(target, folder, "tokenizer_config.json", config_fields, 5, path, &config));
    fkv_status status = config != NULL ? apply_tokenizer_config(target, config, path) : FKV_OK;
    json_decref(config);
    FKV_TRY(status);
    FKV_TRY(read_json_if_there(target, folder, "generation_config.json", generation_fields, 7, path, &config));
    if (config != NULL) {
        apply_end_tokens(target.vocab, config);
        apply_sampling(&target.vocab->sampling, config);
    }
    json_decref(config);
    FKV_TRY(map_if_there(target, folder, "chat_template.jinja", path, &template, &there));
    if (!there && target.vocab->chat_template.size == 0) {
        FKV_TRY(read_json_if_there(target, folder, "chat_template.json", config_fields + 4, 1, path, &config));
        status = config != NULL ? read_chat_template(target, config, path) : FKV_OK;
        json_decref(config);
        return status;
    }
    if (there) target.vocab->chat_template = (fkv_bytes){(const char *)template.bytes, (size_t)template.size};
    return FKV_OK;
}

fkv_status fkv_vocab_folder_read(fkv_vocab_target target, const char *folder) {
    FKV_TRY(read_vocab_file(target, folder));
    return target.vocab->tokens != NULL ? read_accompanying_files(target, folder) : FKV_OK;
}
