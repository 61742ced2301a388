/* See tokenizer_json.h.
 *
 * The vocabulary and the merges make up most of the file and are scanned in place (json_scan.h). The other parts are small and
 * are parsed with jansson. A vocabulary may have gaps; ids without a token become unused tokens.
 */
#include "tokenizer_json.h"

#include "json_scan.h"

enum { MAX_IDS = 1 << 21, MAX_PART_BYTES = 16 << 20, MAX_FILE_BYTES = 256 << 20 };

/* Token types, as in GGUF. */
enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

enum top_part { TOP_MODEL, TOP_ADDED, TOP_NORMALIZER, TOP_PRE, TOP_POST, TOP_DECODER, N_TOP };
enum model_part { TYPE, DROPOUT, UNK, PREFIX, SUFFIX, FUSE_UNK, BYTE_FALLBACK, IGNORE_MERGES, VOCAB, MERGES, N_MODEL };

static const char *const TOP_NAMES[N_TOP] = {"model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"};
static const char *const MODEL_NAMES[N_MODEL] = {
    "type",          "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges", "vocab",   "merges"};

typedef struct json_file {
    fkv_vocab_target target;
    const char *path;
    fkv_json_scan scan; /* scanner of the whole file; scan.n_copies is the number of bytes of unescaped strings so far */
    fkv_bytes top[N_TOP];
    fkv_bytes model[N_MODEL];
    json_t *parts[N_TOP]; /* parts of the file that jansson parses */
    uint64_t n_ids;       /* largest token id plus 1 */
    uint32_t n_tokens;    /* the smaller of n_ids and the vocabulary size of the model */
    fkv_bytes *tokens;    /* [n_tokens] */
    int32_t *types;
    uint8_t *flags;
} json_file;

static bool span_is(fkv_bytes span, const char *text) {
    return span.size == strlen(text) && memcmp(span.data, text, span.size) == 0;
}

static bool is_absent(fkv_bytes span) { return span.data == NULL || span_is(span, "null"); }

/* ---- small parts --------------------------------------------------------------------------------------------- */

static fkv_status load_part(json_file *file, enum top_part part) {
    fkv_bytes span = file->top[part];
    json_error_t error;
    if (is_absent(span)) return FKV_OK;
    FKV_REQUIRE(span.size <= MAX_PART_BYTES, FKV_UNSUPPORTED, "%s: %s is %zu bytes long; at most %d are supported", file->path,
                TOP_NAMES[part], span.size, MAX_PART_BYTES);
    file->parts[part] = json_loadb(span.data, span.size, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &error);
    FKV_REQUIRE(file->parts[part] != NULL, FKV_FILE_FORMAT, "%s: %s is not valid JSON: %s", file->path, TOP_NAMES[part],
                error.text);
    return FKV_OK;
}

static fkv_status model_flag(const json_file *file, enum model_part part, bool *out) {
    if (is_absent(file->model[part])) return FKV_OK;
    *out = span_is(file->model[part], "true");
    FKV_REQUIRE(*out || span_is(file->model[part], "false"), FKV_FILE_FORMAT, "%s: model.%s must be true or false", file->path,
                MODEL_NAMES[part]);
    return FKV_OK;
}

/* Reads the options of the model. Returns FKV_UNSUPPORTED if an option has an effect that is not supported. */
static fkv_status check_model_options(json_file *file) {
    fkv_bytes type = file->model[TYPE];
    FKV_REQUIRE(is_absent(type) ? !is_absent(file->model[MERGES]) : span_is(type, "\"BPE\""), FKV_UNSUPPORTED,
                "%s: model.type is %s; only BPE is supported", file->path, is_absent(type) ? "missing" : fkv_show(type).text);
    static const enum model_part none[] = {PREFIX, SUFFIX};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        FKV_REQUIRE(is_absent(file->model[none[i]]) || span_is(file->model[none[i]], "\"\""), FKV_UNSUPPORTED,
                    "%s: model.%s is %s, which is not supported", file->path, MODEL_NAMES[none[i]],
                    fkv_show(file->model[none[i]]).text);
    fkv_bytes dropout = file->model[DROPOUT];
    FKV_REQUIRE(is_absent(dropout) || span_is(dropout, "0") || span_is(dropout, "0.0"), FKV_UNSUPPORTED,
                "%s: model.dropout is %s, which is not supported", file->path, fkv_show(dropout).text);
    FKV_REQUIRE(!is_absent(file->model[VOCAB]) && !is_absent(file->model[MERGES]), FKV_FILE_FORMAT,
                "%s: model.vocab or model.merges is missing", file->path);
    fkv_vocab_source *vocab = file->target.vocab;
    FKV_TRY(model_flag(file, FUSE_UNK, &vocab->fuse_unk));
    FKV_TRY(model_flag(file, BYTE_FALLBACK, &vocab->byte_fallback));
    return model_flag(file, IGNORE_MERGES, &vocab->whole_words);
}

/* ---- tokens -------------------------------------------------------------------------------------------------- */

static fkv_status check_token_id(json_file *file, const char *part, uint64_t id) {
    FKV_REQUIRE(id < MAX_IDS, FKV_UNSUPPORTED, "%s: %s: token id %llu is not supported; ids must be below %d", file->path, part,
                (unsigned long long)id, MAX_IDS);
    if (id >= file->n_ids) file->n_ids = id + 1;
    return FKV_OK;
}

/* Reads model.vocab. Stores its tokens if `fill` is true; otherwise only finds the largest id. */
static fkv_status walk_vocab(json_file *file, bool fill) {
    fkv_json_scan scan = fkv_json_scan_within(&file->scan, file->model[VOCAB]);
    if (!fill) scan.copies = NULL;
    bool more = true;
    for (bool is_first = true;; is_first = false) {
        fkv_bytes token = {0};
        uint64_t id = 0;
        FKV_TRY(fkv_json_scan_next(&scan, '{', is_first, &more));
        if (!more) break;
        FKV_TRY(fkv_json_scan_key(&scan, &token));
        FKV_TRY(fkv_json_scan_number(&scan, &id));
        if (!fill) FKV_TRY(check_token_id(file, "model.vocab", id));
        if (!fill || id >= file->n_tokens) continue;
        FKV_REQUIRE(file->types[id] == UNUSED, FKV_FILE_DAMAGED, "%s: model.vocab: two tokens have id %llu", file->path,
                    (unsigned long long)id);
        file->tokens[id] = token;
        file->types[id] = NORMAL;
    }
    if (fill) file->scan.n_copies = scan.n_copies;
    return FKV_OK;
}

static fkv_status added_id(json_file *file, const json_t *added, uint64_t *id) {
    const json_t *number = json_object_get(added, "id");
    const json_t *content = json_object_get(added, "content");
    FKV_REQUIRE(json_is_integer(number) && json_integer_value(number) >= 0 && json_is_string(content), FKV_FILE_FORMAT,
                "%s: added_tokens: an entry needs a non-negative integer id and a string content", file->path);
    *id = (uint64_t)json_integer_value(number);
    return FKV_OK;
}

static fkv_status added_flags(const json_file *file, const json_t *added, bool *special, uint8_t *flags) {
    static const struct {
        const char *name;
        uint8_t flag;
    } known[] = {{"lstrip", FKV_TOKEN_LSTRIP},
                 {"rstrip", FKV_TOKEN_RSTRIP},
                 {"single_word", FKV_TOKEN_SINGLE_WORD},
                 {"normalized", FKV_TOKEN_NORMALIZED},
                 {"special", 0}};
    *special = false;
    *flags = 0;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const json_t *value = json_object_get(added, known[i].name);
        FKV_REQUIRE(value == NULL || json_is_boolean(value), FKV_FILE_FORMAT, "%s: added_tokens: %s must be true or false",
                    file->path, known[i].name);
        if (!json_is_true(value)) continue;
        *flags |= known[i].flag;
        *special = *special || known[i].flag == 0;
    }
    return FKV_OK;
}

/* Returns whether a token has the form of a control token. Some files do not mark their control tokens as special, but user text
 * must never become a control token. */
static bool looks_like_control(const char *text, size_t size) {
    static const char *const frames[][2] = {{"<|", "|>"}, {"<\xef\xbd\x9c", "\xef\xbd\x9c>"}};
    for (size_t i = 0; i < 2; i++) {
        const size_t n = strlen(frames[i][0]);
        if (size > 2 * n && memcmp(text, frames[i][0], n) == 0 && memcmp(text + size - n, frames[i][1], n) == 0) return true;
    }
    return false;
}

/* Stores an added token, which replaces the vocabulary entry with the same id. */
static fkv_status put_added(json_file *file, const json_t *added) {
    uint64_t id = 0;
    bool special = false;
    uint8_t flags = 0;
    FKV_TRY(added_id(file, added, &id));
    FKV_TRY(added_flags(file, added, &special, &flags));
    if (id >= file->n_tokens) return FKV_OK;
    const json_t *content = json_object_get(added, "content");
    file->tokens[id] = (fkv_bytes){json_string_value(content), json_string_length(content)};
    special = special || looks_like_control(json_string_value(content), json_string_length(content));
    file->types[id] = special ? CONTROL : USER_DEFINED;
    file->flags[id] = flags;
    return FKV_OK;
}

static fkv_status alloc_tokens(json_file *file) {
    const fkv_vocab_target target = file->target;
    uint64_t n = file->n_ids;
    if (target.n_vocab > 0 && n > target.n_vocab) n = target.n_vocab;
    FKV_REQUIRE(n > 0, FKV_FILE_FORMAT, "%s: model.vocab is empty", file->path);
    file->n_tokens = (uint32_t)n;
    file->tokens = fkv_file_arena_alloc(target.arena, n * sizeof *file->tokens);
    file->types = fkv_file_arena_alloc(target.arena, n * sizeof *file->types);
    file->flags = fkv_file_arena_alloc(target.arena, n);
    FKV_REQUIRE(file->tokens != NULL && file->types != NULL && file->flags != NULL, FKV_NO_MEMORY,
                "%s: out of memory allocating %llu tokens", file->path, (unsigned long long)n);
    for (uint64_t i = 0; i < n; i++) file->types[i] = UNUSED;
    return FKV_OK;
}

static bool is_upper_hex(char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'); }

/* Returns whether a token stands for a byte, as in "<0x41>". */
static bool is_byte_name(fkv_bytes token) {
    return token.size == 6 && memcmp(token.data, "<0x", 3) == 0 && is_upper_hex(token.data[3]) && is_upper_hex(token.data[4]) &&
           token.data[5] == '>';
}

static fkv_status read_json_tokens(json_file *file) {
    const json_t *added = file->parts[TOP_ADDED];
    FKV_REQUIRE(added == NULL || json_is_array(added), FKV_FILE_FORMAT, "%s: added_tokens must be an array", file->path);
    FKV_TRY(walk_vocab(file, false));
    for (size_t i = 0; i < json_array_size(added); i++) {
        uint64_t id = 0;
        FKV_TRY(added_id(file, json_array_get(added, i), &id));
        FKV_TRY(check_token_id(file, "added_tokens", id));
    }
    FKV_TRY(alloc_tokens(file));
    FKV_TRY(walk_vocab(file, true));
    for (uint32_t i = 0; i < file->n_tokens && file->target.vocab->byte_fallback; i++)
        if (file->types[i] == NORMAL && is_byte_name(file->tokens[i])) file->types[i] = BYTE;
    for (size_t i = 0; i < json_array_size(added); i++) FKV_TRY(put_added(file, json_array_get(added, i)));
    fkv_vocab_source *vocab = file->target.vocab;
    vocab->tokens = file->tokens;
    vocab->types = file->types;
    vocab->token_flags = file->flags;
    vocab->n_tokens = file->n_tokens;
    return FKV_OK;
}

/* ---- merges -------------------------------------------------------------------------------------------------- */

/* Reads a merge, which has the form "left right" or ["left", "right"]. */
static fkv_status read_merge(json_file *file, fkv_json_scan *scan, fkv_bytes *left, fkv_bytes *right) {
    bool more = true;
    if (fkv_json_scan_peek(scan) == '[') {
        FKV_TRY(fkv_json_scan_next(scan, '[', true, &more));
        if (more) FKV_TRY(fkv_json_scan_string(scan, left));
        if (more) FKV_TRY(fkv_json_scan_next(scan, '[', false, &more));
        if (more) FKV_TRY(fkv_json_scan_string(scan, right));
        if (more) FKV_TRY(fkv_json_scan_next(scan, '[', false, &more));
        FKV_REQUIRE(!more && left->size > 0 && right->size > 0, FKV_FILE_FORMAT,
                    "%s: model.merges: an entry must be a list of two strings", file->path);
        return FKV_OK;
    }
    fkv_bytes both = {0};
    FKV_TRY(fkv_json_scan_string(scan, &both));
    const char *space = both.size > 0 ? memchr(both.data, ' ', both.size) : NULL;
    FKV_REQUIRE(space != NULL && space > both.data && space + 1 < both.data + both.size, FKV_FILE_FORMAT,
                "%s: model.merges: '%s' must consist of two strings separated by a space", file->path, fkv_show(both).text);
    *left = (fkv_bytes){both.data, (size_t)(space - both.data)};
    *right = (fkv_bytes){space + 1, both.size - left->size - 1};
    return FKV_OK;
}

/* Counts the entries of model.merges. */
static fkv_status count_merges(json_file *file, uint64_t *n) {
    fkv_json_scan scan = fkv_json_scan_within(&file->scan, file->model[MERGES]);
    bool more = true;
    *n = 0;
    for (bool is_first = true;; is_first = false) {
        fkv_bytes span = {0};
        FKV_TRY(fkv_json_scan_next(&scan, '[', is_first, &more));
        if (!more) return FKV_OK;
        FKV_TRY(fkv_json_scan_skip(&scan, &span));
        ++*n;
    }
}

static fkv_status read_json_merges(json_file *file) {
    fkv_vocab_source *vocab = file->target.vocab;
    uint64_t n = 0;
    FKV_TRY(count_merges(file, &n));
    FKV_REQUIRE(n <= MAX_IDS, FKV_UNSUPPORTED, "%s: model.merges has %llu entries; at most %d are supported", file->path,
                (unsigned long long)n, MAX_IDS);
    fkv_bytes *lefts = fkv_file_arena_alloc(file->target.arena, n * sizeof *lefts);
    fkv_bytes *rights = fkv_file_arena_alloc(file->target.arena, n * sizeof *rights);
    FKV_REQUIRE(lefts != NULL && rights != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %llu merges", file->path,
                (unsigned long long)n);
    fkv_json_scan scan = fkv_json_scan_within(&file->scan, file->model[MERGES]);
    bool more = true;
    for (uint64_t i = 0;; i++) {
        FKV_TRY(fkv_json_scan_next(&scan, '[', i == 0, &more));
        if (!more) break;
        FKV_ASSERT(i < n);
        FKV_TRY(read_merge(file, &scan, &lefts[i], &rights[i]));
    }
    file->scan.n_copies = scan.n_copies;
    vocab->merges = lefts;
    vocab->merge_rights = rights;
    vocab->n_merges = (uint32_t)n;
    return FKV_OK;
}

/* ---- post-processor, decoder and unknown token ---------------------------------------------------------------------- */

static const json_t *special_at(const json_t *single, size_t i) {
    return json_object_get(json_array_get(single, i), "SpecialToken");
}

/* Reads the id of a special token in a TemplateProcessing template. Sets *token to FKV_NO_TOKEN if the id is not in the
 * vocabulary. */
static fkv_status read_template_token(const json_file *file, const json_t *processor, const json_t *special, uint32_t *token) {
    const json_t *ids = NULL;
    const char *name = json_string_value(json_object_get(special, "id"));
    if (name != NULL) ids = json_object_get(json_object_get(json_object_get(processor, "special_tokens"), name), "ids");
    const json_t *id = json_array_get(ids, 0);
    FKV_REQUIRE(json_array_size(ids) == 1 && json_is_integer(id) && json_integer_value(id) >= 0, FKV_UNSUPPORTED,
                "%s: post_processor: special_tokens entry '%s' must be a single token", file->path,
                fkv_show_text(name != NULL ? name : "").text);
    *token = (uint64_t)json_integer_value(id) < file->n_tokens ? (uint32_t)json_integer_value(id) : FKV_NO_TOKEN;
    return FKV_OK;
}

/* Reads the special tokens that TemplateProcessing puts before and after a text. A single token before the text becomes bos, and
 * a single token after the text becomes the suffix. If there are several tokens before or after the text, they are ignored,
 * because the chat template writes them. */
static fkv_status read_template_processing(json_file *file, const json_t *processor) {
    const json_t *single = json_object_get(processor, "single");
    const size_t n = json_array_size(single);
    fkv_vocab_source *vocab = file->target.vocab;
    size_t n_before = 0;
    size_t n_after = 0;
    while (n_before < n && special_at(single, n_before) != NULL) n_before++;
    if (n_before == n) return FKV_OK;
    while (special_at(single, n - 1 - n_after) != NULL) n_after++;
    if (n_after == 1) FKV_TRY(read_template_token(file, processor, special_at(single, n - 1), &vocab->suffix));
    if (n_before != 1) return FKV_OK;
    uint32_t bos = FKV_NO_TOKEN;
    FKV_TRY(read_template_token(file, processor, special_at(single, 0), &bos));
    if (bos == FKV_NO_TOKEN) return FKV_OK;
    vocab->bos = bos;
    vocab->add_bos = true;
    return FKV_OK;
}

static fkv_status read_processor(json_file *file, const json_t *processor) {
    const char *type = json_string_value(json_object_get(processor, "type"));
    if (processor == NULL || json_is_null(processor)) return FKV_OK;
    FKV_REQUIRE(type != NULL, FKV_FILE_FORMAT, "%s: post_processor: an entry has no type", file->path);
    if (strcmp(type, "ByteLevel") == 0) return FKV_OK; /* affects offsets only */
    if (strcmp(type, "TemplateProcessing") == 0) return read_template_processing(file, processor);
    return fkv_fail(FKV_UNSUPPORTED, "%s: post_processor: type '%s' is not supported", file->path, fkv_show_text(type).text);
}

static fkv_status read_processors(json_file *file) {
    const json_t *processor = file->parts[TOP_POST];
    const char *type = json_string_value(json_object_get(processor, "type"));
    if (type == NULL || strcmp(type, "Sequence") != 0) return read_processor(file, processor);
    const json_t *list = json_object_get(processor, "processors");
    for (size_t i = 0; i < json_array_size(list); i++) FKV_TRY(read_processor(file, json_array_get(list, i)));
    return FKV_OK;
}

/* Returns FKV_UNSUPPORTED if the decoder is not equivalent to the built-in decoding of tokens. */
static fkv_status check_decoder(const json_file *file, const json_t *decoder) {
    static const char *const known[] = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"};
    const char *type = json_string_value(json_object_get(decoder, "type"));
    if (decoder == NULL || json_is_null(decoder)) return FKV_OK;
    for (size_t i = 0; i < sizeof known / sizeof known[0] && type != NULL; i++)
        if (strcmp(known[i], type) == 0) return FKV_OK;
    return fkv_fail(FKV_UNSUPPORTED, "%s: decoder: type '%s' is not supported", file->path,
                    fkv_show_text(type != NULL ? type : "").text);
}

static fkv_status check_decoders(const json_file *file) {
    const json_t *decoder = file->parts[TOP_DECODER];
    const char *type = json_string_value(json_object_get(decoder, "type"));
    if (type == NULL || strcmp(type, "Sequence") != 0) return check_decoder(file, decoder);
    const json_t *list = json_object_get(decoder, "decoders");
    for (size_t i = 0; i < json_array_size(list); i++) FKV_TRY(check_decoder(file, json_array_get(list, i)));
    return FKV_OK;
}

static fkv_status read_unknown(json_file *file) {
    fkv_bytes name = {0};
    if (is_absent(file->model[UNK])) return FKV_OK;
    fkv_json_scan scan = fkv_json_scan_within(&file->scan, file->model[UNK]);
    FKV_TRY(fkv_json_scan_string(&scan, &name));
    file->scan.n_copies = scan.n_copies;
    for (uint32_t i = 0; i < file->n_tokens; i++)
        if (file->tokens[i].size == name.size && memcmp(file->tokens[i].data, name.data, name.size) == 0 && name.size > 0)
            file->target.vocab->unk = i;
    FKV_REQUIRE(file->target.vocab->unk != FKV_NO_TOKEN, FKV_FILE_DAMAGED, "%s: model.unk_token '%s' is not a token", file->path,
                fkv_show(name).text);
    return FKV_OK;
}

/* ---- file ------------------------------------------------------------------------------------------------ */

static fkv_status read_text_steps(json_file *file) {
    fkv_text_steps *steps = fkv_file_arena_alloc(file->target.arena, sizeof *steps);
    bool over_bytes = false;
    FKV_REQUIRE(steps != NULL, FKV_NO_MEMORY, "%s: out of memory allocating tokenizer steps", file->path);
    FKV_TRY(fkv_text_steps_read(file->target, file->parts[TOP_NORMALIZER], file->parts[TOP_PRE], file->path, steps, &over_bytes));
    fkv_vocab_source *vocab = file->target.vocab;
    vocab->steps = steps;
    vocab->leftmost = true;
    vocab->model = over_bytes ? (fkv_bytes){"gpt2", 4} : (fkv_bytes){"gemma4", 6};
    FKV_REQUIRE(!over_bytes || (!vocab->byte_fallback && is_absent(file->model[UNK])), FKV_UNSUPPORTED,
                "%s: model.%s with a ByteLevel pre_tokenizer is not supported", file->path,
                vocab->byte_fallback ? "byte_fallback" : "unk_token");
    return FKV_OK;
}

static fkv_status read_parts(json_file *file) {
    FKV_REQUIRE(!is_absent(file->top[TOP_MODEL]), FKV_FILE_FORMAT, "%s: the field \"model\" is missing", file->path);
    fkv_json_scan scan = fkv_json_scan_within(&file->scan, file->top[TOP_MODEL]);
    FKV_TRY(fkv_json_scan_members(&scan, MODEL_NAMES, N_MODEL, file->model));
    file->scan.n_copies = scan.n_copies;
    FKV_TRY(check_model_options(file));
    for (enum top_part part = TOP_ADDED; part < N_TOP; part++) FKV_TRY(load_part(file, part));
    FKV_TRY(read_json_tokens(file));
    FKV_TRY(read_json_merges(file));
    FKV_TRY(read_unknown(file));
    FKV_TRY(read_processors(file));
    FKV_TRY(check_decoders(file));
    return read_text_steps(file);
}

static bool is_added(const json_file *file, uint32_t token) {
    return file->types[token] == CONTROL || file->types[token] == USER_DEFINED;
}

/* Copies the texts of added tokens to the arena, because they point into jansson values, which are freed later. */
static fkv_status keep_added(json_file *file) {
    size_t n = 0;
    for (uint32_t i = 0; i < file->n_tokens; i++) n += is_added(file, i) ? file->tokens[i].size : 0;
    char *texts = fkv_file_arena_alloc(file->target.arena, n);
    FKV_REQUIRE(texts != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %zu bytes of added tokens", file->path, n);
    for (uint32_t i = 0; i < file->n_tokens; i++) {
        if (!is_added(file, i)) continue;
        if (file->tokens[i].size > 0) memcpy(texts, file->tokens[i].data, file->tokens[i].size);
        file->tokens[i].data = texts;
        texts += file->tokens[i].size;
    }
    return FKV_OK;
}

fkv_status fkv_tokenizer_json_read(fkv_vocab_target target, const char *text, size_t size, const char *path) {
    FKV_REQUIRE(size <= MAX_FILE_BYTES, FKV_UNSUPPORTED, "%s: the file is %zu bytes long; at most %d are supported", path, size,
                MAX_FILE_BYTES);
    json_file file = {.target = target, .path = path};
    file.scan = (fkv_json_scan){.at = text, .end = text + size, .start = text, .path = path};
    file.scan.copies = fkv_file_arena_alloc(target.arena, size);
    FKV_REQUIRE(file.scan.copies != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %zu bytes for a tokenizer", path, size);
    fkv_status status = fkv_json_scan_members(&file.scan, TOP_NAMES, N_TOP, file.top);
    if (status == FKV_OK) status = read_parts(&file);
    if (status == FKV_OK) status = keep_added(&file);
    for (int part = 0; part < N_TOP; part++) json_decref(file.parts[part]);
    return status;
}
