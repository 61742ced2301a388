/* Reads normalizers and pre-tokenizers of tokenizer.json. See tokenizer_json.h. */
#include "tokenizer_json.h"

typedef struct steps_reader {
    fkv_vocab_target target;
    const char *path;
    const char *part; /* "normalizer" or "pre_tokenizer" */
    fkv_text_steps *steps;
    bool over_bytes;
} steps_reader;

fkv_status fkv_keep_bytes(fkv_vocab_target target, const char *data, size_t size, fkv_bytes *kept) {
    char *copy = fkv_file_arena_alloc(target.arena, size + 1);
    FKV_REQUIRE(copy != NULL, FKV_NO_MEMORY, "out of memory allocating %zu bytes for a tokenizer", size);
    if (size > 0) memcpy(copy, data, size);
    *kept = (fkv_bytes){copy, size};
    return FKV_OK;
}

static fkv_status add_step(steps_reader *r, fkv_text_step step) {
    FKV_REQUIRE(!r->over_bytes, FKV_UNSUPPORTED, "%s: %s: a step after ByteLevel is not supported", r->path, r->part);
    FKV_REQUIRE(r->steps->n_steps < FKV_MAX_TEXT_STEPS, FKV_UNSUPPORTED, "%s: %s: too many steps; at most %d are supported",
                r->path, r->part, FKV_MAX_TEXT_STEPS);
    r->steps->steps[r->steps->n_steps++] = step;
    return FKV_OK;
}

/* Copies a string field of a step. */
static fkv_status read_string_field(steps_reader *r, const json_t *object, const char *type, const char *field, bool may_be_empty,
                                    fkv_bytes *out) {
    const json_t *value = json_object_get(object, field);
    FKV_REQUIRE(json_is_string(value) && (may_be_empty || json_string_length(value) > 0), FKV_FILE_FORMAT,
                "%s: %s: field %s of step %s must be a%s string", r->path, r->part, field, type,
                may_be_empty ? "" : " non-empty");
    return fkv_keep_bytes(r->target, json_string_value(value), json_string_length(value), out);
}

static fkv_status read_flag_field(const steps_reader *r, const json_t *object, const char *type, const char *field, bool *out) {
    const json_t *value = json_object_get(object, field);
    if (value == NULL || json_is_null(value)) return FKV_OK;
    FKV_REQUIRE(json_is_boolean(value), FKV_FILE_FORMAT, "%s: %s: field %s of step %s must be true or false", r->path, r->part,
                field, type);
    *out = json_is_true(value);
    return FKV_OK;
}

static fkv_status read_pattern_field(steps_reader *r, const json_t *object, const char *type, fkv_text_step *step) {
    const json_t *pattern = json_object_get(object, "pattern");
    step->is_regex = json_object_get(pattern, "Regex") != NULL;
    return read_string_field(r, pattern, type, step->is_regex ? "Regex" : "String", false, &step->pattern);
}

static fkv_status read_behavior_field(const steps_reader *r, const json_t *object, const char *type,
                                      fkv_split_behavior *behavior) {
    static const char *const names[] = {[FKV_SPLIT_ISOLATED] = "Isolated",
                                        [FKV_SPLIT_REMOVED] = "Removed",
                                        [FKV_SPLIT_WITH_PREVIOUS] = "MergedWithPrevious",
                                        [FKV_SPLIT_WITH_NEXT] = "MergedWithNext",
                                        [FKV_SPLIT_CONTIGUOUS] = "Contiguous"};
    const char *name = json_string_value(json_object_get(object, "behavior"));
    for (size_t i = 0; i < sizeof names / sizeof names[0] && name != NULL; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *behavior = (fkv_split_behavior)i;
        return FKV_OK;
    }
    return fkv_fail(FKV_UNSUPPORTED, "%s: %s: unknown behavior '%s' of step %s", r->path, r->part,
                    fkv_show_text(name != NULL ? name : "").text, type);
}

static fkv_bytes literal_bytes(const char *text) { return (fkv_bytes){text, strlen(text)}; }

/* ---- normalizers --------------------------------------------------------------------------------------------- */

static fkv_status add_replace(steps_reader *r, const json_t *object) {
    fkv_text_step step = {.kind = FKV_STEP_REPLACE};
    FKV_TRY(read_pattern_field(r, object, "Replace", &step));
    FKV_TRY(read_string_field(r, object, "Replace", "content", true, &step.text));
    return add_step(r, step);
}

static fkv_status add_prepend(steps_reader *r, const json_t *object) {
    fkv_text_step step = {.kind = FKV_STEP_PREPEND};
    FKV_TRY(read_string_field(r, object, "Prepend", "prepend", false, &step.text));
    return add_step(r, step);
}

static fkv_status add_strip(steps_reader *r, const json_t *object) {
    bool left = true;
    bool right = true;
    FKV_TRY(read_flag_field(r, object, "Strip", "strip_left", &left));
    FKV_TRY(read_flag_field(r, object, "Strip", "strip_right", &right));
    if (left) FKV_TRY(add_step(r, (fkv_text_step){.kind = FKV_STEP_STRIP_LEFT}));
    return right ? add_step(r, (fkv_text_step){.kind = FKV_STEP_STRIP_RIGHT}) : FKV_OK;
}

static fkv_status add_normal_form(steps_reader *r, const json_t *object) {
    static const char *const names[] = {
        [FKV_STEP_NFC] = "NFC", [FKV_STEP_NFD] = "NFD", [FKV_STEP_NFKC] = "NFKC", [FKV_STEP_NFKD] = "NFKD"};
    const char *type = json_string_value(json_object_get(object, "type"));
    fkv_text_step_kind kind = FKV_STEP_NFC;
    while (strcmp(names[kind], type) != 0) kind++;
    return add_step(r, (fkv_text_step){.kind = kind});
}

/* ---- pre-tokenizers ------------------------------------------------------------------------------------------ */

static fkv_status add_split(steps_reader *r, const json_t *object) {
    fkv_text_step step = {.kind = FKV_STEP_SPLIT};
    FKV_TRY(read_pattern_field(r, object, "Split", &step));
    FKV_TRY(read_behavior_field(r, object, "Split", &step.behavior));
    FKV_TRY(read_flag_field(r, object, "Split", "invert", &step.invert));
    return add_step(r, step);
}

static fkv_status add_digits(steps_reader *r, const json_t *object) {
    bool individual = false;
    FKV_TRY(read_flag_field(r, object, "Digits", "individual_digits", &individual));
    return add_step(r, (fkv_text_step){.kind = FKV_STEP_SPLIT,
                                       .is_regex = true,
                                       .pattern = literal_bytes("\\p{N}"),
                                       .behavior = individual ? FKV_SPLIT_ISOLATED : FKV_SPLIT_CONTIGUOUS});
}

static fkv_status add_punctuation(steps_reader *r, const json_t *object) {
    fkv_text_step step = {.kind = FKV_STEP_SPLIT, .is_regex = true, .pattern = literal_bytes("[!-/:-@\\[-`{-~\\p{P}]")};
    if (json_object_get(object, "behavior") != NULL) FKV_TRY(read_behavior_field(r, object, "Punctuation", &step.behavior));
    return add_step(r, step);
}

static fkv_status add_byte_level(steps_reader *r, const json_t *object) {
    static const char words[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    bool space_before = true;
    bool use_regex = true;
    FKV_TRY(read_flag_field(r, object, "ByteLevel", "add_prefix_space", &space_before));
    FKV_TRY(read_flag_field(r, object, "ByteLevel", "use_regex", &use_regex));
    if (space_before) FKV_TRY(add_step(r, (fkv_text_step){.kind = FKV_STEP_PREPEND_UNLESS, .text = literal_bytes(" ")}));
    if (use_regex)
        FKV_TRY(add_step(r, (fkv_text_step){.kind = FKV_STEP_SPLIT, .is_regex = true, .pattern = literal_bytes(words)}));
    FKV_REQUIRE(!r->over_bytes, FKV_UNSUPPORTED, "%s: %s: only one ByteLevel step is supported", r->path, r->part);
    r->over_bytes = true;
    return FKV_OK;
}

/* Reads the field "prepend_scheme", or the field "add_prefix_space" in older files. */
static fkv_status read_prepend_scheme(const steps_reader *r, const json_t *object, bool *never, bool *only_first) {
    const json_t *scheme = json_object_get(object, "prepend_scheme");
    bool add_prefix_space = true;
    FKV_TRY(read_flag_field(r, object, "Metaspace", "add_prefix_space", &add_prefix_space));
    *never = !add_prefix_space;
    *only_first = false;
    if (scheme == NULL) return FKV_OK;
    const char *name = json_is_string(scheme) ? json_string_value(scheme) : "";
    *never = strcmp(name, "never") == 0;
    *only_first = strcmp(name, "first") == 0;
    FKV_REQUIRE(*never || *only_first || strcmp(name, "always") == 0, FKV_UNSUPPORTED,
                "%s: %s: unknown prepend_scheme '%s' of Metaspace", r->path, r->part, fkv_show_text(name).text);
    return FKV_OK;
}

static fkv_status add_metaspace(steps_reader *r, const json_t *object) {
    fkv_bytes space = {0};
    bool never = false;
    bool only_first = false;
    bool split = true;
    FKV_TRY(read_string_field(r, object, "Metaspace", "replacement", false, &space));
    FKV_TRY(read_prepend_scheme(r, object, &never, &only_first));
    FKV_TRY(read_flag_field(r, object, "Metaspace", "split", &split));
    FKV_TRY(add_step(r, (fkv_text_step){.kind = FKV_STEP_REPLACE, .pattern = literal_bytes(" "), .text = space}));
    if (!never) FKV_TRY(add_step(r, (fkv_text_step){.kind = FKV_STEP_PREPEND_UNLESS, .text = space, .only_first = only_first}));
    if (!split) return FKV_OK;
    return add_step(r, (fkv_text_step){.kind = FKV_STEP_SPLIT, .pattern = space, .behavior = FKV_SPLIT_WITH_NEXT});
}

/* ---- sequences ---------------------------------------------------------------------------------------------------- */

typedef struct step_reader {
    const char *type;
    fkv_status (*add)(steps_reader *r, const json_t *object);
} step_reader;

static const step_reader NORMALIZERS[] = {
    {"NFC", add_normal_form}, {"NFD", add_normal_form}, {"NFKC", add_normal_form}, {"NFKD", add_normal_form},
    {"Replace", add_replace}, {"Prepend", add_prepend}, {"Strip", add_strip},      {NULL, NULL}};
static const step_reader PRE_TOKENIZERS[] = {
    {"Split", add_split},          {"Digits", add_digits},       {"Punctuation", add_punctuation},
    {"ByteLevel", add_byte_level}, {"Metaspace", add_metaspace}, {NULL, NULL}};

static fkv_status add_entry(steps_reader *r, const step_reader *readers, const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    FKV_REQUIRE(type != NULL, FKV_FILE_FORMAT, "%s: %s: an entry has no type", r->path, r->part);
    for (const step_reader *reader = readers; reader->type != NULL; reader++)
        if (strcmp(reader->type, type) == 0) return reader->add(r, object);
    return fkv_fail(FKV_UNSUPPORTED, "%s: %s: type '%s' is not supported", r->path, r->part, fkv_show_text(type).text);
}

/* Adds a single step, or all steps of a Sequence. list: name of the array that contains the steps of a Sequence. */
static fkv_status add_entries(steps_reader *r, const step_reader *readers, const char *list, const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    if (object == NULL || json_is_null(object)) return FKV_OK;
    if (type == NULL || strcmp(type, "Sequence") != 0) return add_entry(r, readers, object);
    const json_t *array = json_object_get(object, list);
    FKV_REQUIRE(json_is_array(array), FKV_FILE_FORMAT, "%s: %s: a Sequence has no %s", r->path, r->part, list);
    for (size_t i = 0; i < json_array_size(array); i++) FKV_TRY(add_entry(r, readers, json_array_get(array, i)));
    return FKV_OK;
}

fkv_status fkv_text_steps_read(fkv_vocab_target target, const json_t *normalizer, const json_t *pre_tokenizer, const char *path,
                               fkv_text_steps *steps, bool *over_bytes) {
    steps_reader r = {.target = target, .path = path, .part = "normalizer", .steps = steps};
    *steps = (fkv_text_steps){0};
    FKV_TRY(add_entries(&r, NORMALIZERS, "normalizers", normalizer));
    steps->n_normalizers = steps->n_steps;
    r.part = "pre_tokenizer";
    FKV_TRY(add_entries(&r, PRE_TOKENIZERS, "pretokenizers", pre_tokenizer));
    *over_bytes = r.over_bytes;
    return FKV_OK;
}
