/* Tests tokenizer.json, tokenizer.model and accompanying files. Every construct must give the same tokens as Hugging Face
 * tokenizers (scripts/make-tokenizer-vectors). Messages must name unsupported constructs, and the settings in a model folder must
 * take effect.
 */
#include "../src/model/files/weights_state.h"
#include "../src/text/tokenizer/tokenizer.h"
#include "../src/text/vocab/sentencepiece.h"
#include "../src/text/vocab/tokenizer_json.h"
#include "../src/text/vocab/vocab_folder.h"
#include "test.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- vectors ---- */

static json_t *vectors_load(void) {
    json_error_t error;
    json_t *vectors = json_load_file("tests/vectors/tokenizers.json", JSON_ALLOW_NUL, &error);
    ck_assert_msg(vectors != NULL, "%s", error.text);
    return vectors;
}

/* Rewrites merges "left right" as ["left", "right"]. */
static void merges_as_pairs(json_t *model) {
    json_t *pairs = json_array();
    const json_t *merges = json_object_get(model, "merges");
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const char *both = json_string_value(json_array_get(merges, i));
        const char *space = strchr(both, ' ');
        ck_assert_int_eq(json_array_append_new(pairs, json_pack("[s%s]", both, (int)(space - both), space + 1)), 0);
    }
    ck_assert_int_eq(json_object_set_new(model, "merges", pairs), 0);
}

/* Returns the tokenizer.json of one test tokenizer, which is a trained base model with the changes listed for this tokenizer. */
static char *json_text(const json_t *vectors, const json_t *one, size_t flags) {
    json_t *whole = json_deep_copy(json_object_get(one, "rest"));
    json_t *model =
        json_deep_copy(json_object_get(json_object_get(vectors, "models"), json_string_value(json_object_get(one, "base"))));
    ck_assert_int_eq(json_object_update(model, json_object_get(one, "model")), 0);
    if (json_is_true(json_object_get(one, "pairs"))) merges_as_pairs(model);
    ck_assert_int_eq(json_object_set_new(whole, "model", model), 0);
    char *text = json_dumps(whole, flags);
    ck_assert_ptr_nonnull(text);
    json_decref(whole);
    return text;
}

typedef struct opened {
    fkv_weights *weights;
    fkv_tokenizer *tokenizer;
} opened;

static void open_text(opened *it, const char *text) {
    it->weights = fkv_weights_new();
    ck_assert_ptr_nonnull(it->weights);
    ck_ok(fkv_tokenizer_json_read(fkv_weights_vocab_target(it->weights), text, strlen(text), "tokenizer.json"));
    ck_ok(fkv_tokenizer_open(fkv_weights_vocab(it->weights), &it->tokenizer));
}

static void close_text(opened *it) {
    fkv_tokenizer_close(it->tokenizer);
    fkv_weights_close(it->weights);
}

static void compare(const fkv_tokenizer *tokenizer, const json_t *text, const json_t *expected, unsigned flags,
                    const char *name) {
    size_t n_tokens = 0;
    uint32_t tokens[512];
    const char *bytes = json_string_value(text);
    const size_t n_bytes = json_string_length(text);
    ck_ok(fkv_tokenizer_encode(tokenizer, bytes, NULL, n_bytes, flags, tokens, 512, &n_tokens));
    for (size_t i = 0; i < n_tokens && i < json_array_size(expected); i++)
        ck_assert_msg(tokens[i] == json_integer_value(json_array_get(expected, i)),
                      "%s, flags %u, \"%s\": token %zu is %u, not %d", name, flags, bytes, i, tokens[i],
                      (int)json_integer_value(json_array_get(expected, i)));
    ck_assert_msg(n_tokens == json_array_size(expected), "%s, flags %u, \"%s\": %zu tokens, expected %zu", name, flags, bytes,
                  n_tokens, json_array_size(expected));
}

START_TEST(every_construct_tokenizes_as_in_hugging_face) {
    json_t *vectors = vectors_load();
    const json_t *texts = json_object_get(vectors, "texts");
    const json_t *tokenizers = json_object_get(vectors, "tokenizers");
    ck_assert_uint_ge(json_array_size(tokenizers), 35);
    for (size_t i = 0; i < 2 * json_array_size(tokenizers); i++) {
        const json_t *one = json_array_get(tokenizers, i / 2);
        const char *name = json_string_value(json_object_get(one, "name"));
        /* each tokenizer is read twice; the second JSON text escapes all characters that are not ASCII */
        char *text = json_text(vectors, one, i % 2 == 0 ? JSON_COMPACT : JSON_ENSURE_ASCII | JSON_INDENT(2));
        opened it;
        open_text(&it, text);
        for (size_t t = 0; t < json_array_size(texts); t++) {
            compare(it.tokenizer, json_array_get(texts, t), json_array_get(json_object_get(one, "special"), t),
                    FKV_TOKENIZE_BOS | FKV_TOKENIZE_SPECIAL, name);
            compare(it.tokenizer, json_array_get(texts, t), json_array_get(json_object_get(one, "plain"), t), FKV_TOKENIZE_PLAIN,
                    name);
        }
        close_text(&it);
        free(text);
    }
    json_decref(vectors);
}
END_TEST

static const json_t *find_named(const json_t *vectors, const char *name) {
    const json_t *tokenizers = json_object_get(vectors, "tokenizers");
    for (size_t i = 0; i < json_array_size(tokenizers); i++) {
        const json_t *one = json_array_get(tokenizers, i);
        if (strcmp(json_string_value(json_object_get(one, "name")), name) == 0) return one;
    }
    ck_abort_msg("no tokenizer %s", name);
    return NULL;
}

START_TEST(tokens_of_either_kind_give_the_original_text) {
    static const char text[] = "Alice, il caff\u00e8 \u4e16\u754c 12";
    static const struct {
        const char *name;
        size_t n_before;
    } kinds[] = {{"gpt2", 0}, {"gemma", 0}, {"llama2", 1}};
    json_t *vectors = vectors_load();
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        char *json = json_text(vectors, find_named(vectors, kinds[i].name), 0);
        opened it;
        uint32_t tokens[128];
        size_t n_tokens = 0;
        char back[512];
        size_t n = 0;
        open_text(&it, json);
        ck_ok(fkv_tokenizer_encode(it.tokenizer, text, NULL, sizeof text - 1, FKV_TOKENIZE_PLAIN, tokens, 128, &n_tokens));
        for (size_t t = 0; t < n_tokens; t++) {
            size_t size = 0;
            const char *piece = fkv_tokenizer_text(it.tokenizer, tokens[t], false, &size);
            memcpy(back + n, piece, size);
            n += size;
        }
        ck_assert_uint_eq(n, kinds[i].n_before + sizeof text - 1);
        ck_assert_mem_eq(back + kinds[i].n_before, text, sizeof text - 1);
        close_text(&it);
        free(json);
    }
    json_decref(vectors);
}
END_TEST

/* User text must not become a control token, not even one that is matched after normalization. */
START_TEST(marked_text_gives_no_control_token) {
    json_t *vectors = vectors_load();
    json_t *one = json_deep_copy(find_named(vectors, "flags"));
    json_t *added = json_object_get(json_object_get(one, "rest"), "added_tokens");
    for (size_t i = 0; i < json_array_size(added); i++)
        (void)json_object_set_new(json_array_get(added, i), "special", json_true());
    char *json = json_text(vectors, one, 0);
    opened it;
    open_text(&it, json);
    static const char text[] = "<Nor\u0301m>Norm<s>";
    uint8_t given[sizeof text] = {0};
    uint32_t tokens[64];
    size_t n_tokens = 0;
    ck_ok(fkv_tokenizer_encode(it.tokenizer, text, given, sizeof text - 1, FKV_TOKENIZE_SPECIAL, tokens, 64, &n_tokens));
    ck_assert_uint_eq(n_tokens, 3);
    memset(given, 1, sizeof given);
    ck_ok(fkv_tokenizer_encode(it.tokenizer, text, given, sizeof text - 1, FKV_TOKENIZE_SPECIAL, tokens, 64, &n_tokens));
    ck_assert_uint_gt(n_tokens, 3);
    for (size_t i = 0; i < n_tokens; i++) ck_assert_uint_lt(tokens[i], 400);
    close_text(&it);
    free(json);
    json_decref(one);
    json_decref(vectors);
}
END_TEST

static void open_with_added(opened *it, const json_t *vectors, const char *added) {
    json_error_t error;
    json_t *one = json_deep_copy(find_named(vectors, "gpt2"));
    json_t *tokens = json_loads(added, 0, &error);
    ck_assert_msg(tokens != NULL, "%s", error.text);
    ck_assert_int_eq(json_object_set_new(json_object_get(one, "rest"), "added_tokens", tokens), 0);
    char *json = json_text(vectors, one, 0);
    open_text(it, json);
    free(json);
    json_decref(one);
}

static size_t count_tokens(const opened *it, const char *text, unsigned flags) {
    size_t n = 0;
    ck_ok(fkv_tokenizer_encode(it->tokenizer, text, NULL, strlen(text), flags, NULL, 0, &n));
    return n;
}

START_TEST(control_tokens_are_distinguished_from_tags) {
    json_t *vectors = vectors_load();
    uint32_t end[FKV_MAX_END_TOKENS];
    opened it;
    open_with_added(
        &it, vectors,
        "[{\"id\":400,\"content\":\"</s>\",\"special\":false},{\"id\":401,\"content\":\"<|user|>\",\"special\":false}]");
    ck_assert_uint_eq(fkv_tokenizer_ends(it.tokenizer, end), 0);
    ck_assert_uint_eq(count_tokens(&it, "</s>", FKV_TOKENIZE_PLAIN), 1); /* users may write the HTML tag </s> */
    ck_assert_uint_eq(count_tokens(&it, "<|user|>", FKV_TOKENIZE_SPECIAL), 1);
    ck_assert_uint_gt(count_tokens(&it, "<|user|>", FKV_TOKENIZE_PLAIN), 1); /* users cannot write role tokens */
    close_text(&it);
    open_with_added(
        &it, vectors,
        "[{\"id\":400,\"content\":\"<|end|>\",\"special\":true},{\"id\":401,\"content\":\"<|return|>\",\"special\":true},"
        "{\"id\":402,\"content\":\"<|call|>\",\"special\":true}]");
    ck_assert_uint_eq(fkv_tokenizer_ends(it.tokenizer, end), 2);
    ck_assert_uint_eq(end[0], 401);
    ck_assert_uint_eq(end[1], 402);
    close_text(&it);
    json_decref(vectors);
}
END_TEST

START_TEST(tokens_beyond_the_embedding_rows_are_ignored) {
    json_t *vectors = vectors_load();
    char *json = json_text(vectors, find_named(vectors, "gaps"), 0);
    fkv_weights *weights = fkv_weights_new();
    weights->hparams.n_vocab = 401;
    ck_ok(fkv_tokenizer_json_read(fkv_weights_vocab_target(weights), json, strlen(json), "tokenizer.json"));
    ck_assert_uint_eq(weights->vocab.n_tokens, 401);
    fkv_weights_close(weights);
    free(json);
    json_decref(vectors);
}
END_TEST

/* Writes a tokenizer.json whose normalizer or pre_tokenizer is a sequence of n copies of `part`, and checks that tokenizing "a b
 * c a" fails. */
static void check_growth(const char *field, const char *list, const char *part, int n) {
    enum { PART_BYTES = 1 << 18 };
    char *steps = malloc((size_t)n * PART_BYTES);
    ck_assert_ptr_nonnull(steps);
    size_t used = 0;
    for (int i = 0; i < n; i++)
        used += (size_t)snprintf(steps + used, (size_t)n * PART_BYTES - used, "%s%s", i > 0 ? "," : "", part);
    char *json = malloc(used + 4096);
    ck_assert_ptr_nonnull(json);
    (void)snprintf(json, used + 4096,
                   "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]},\"added_tokens\":[],"
                   "\"%s\":{\"type\":\"Sequence\",\"%s\":[%s]}}",
                   field, list, steps);
    opened it;
    open_text(&it, json);
    size_t n_tokens = 0;
    ck_status(fkv_tokenizer_encode(it.tokenizer, "a b c a", NULL, 7, FKV_TOKENIZE_PLAIN, NULL, 0, &n_tokens), FKV_UNSUPPORTED);
    ck_assert_msg(strstr(fkv_message(), "at most 64 bytes per byte") != NULL, "%s", fkv_message());
    close_text(&it);
    free(json);
    free(steps);
}

/* Five normalizers, each of which replaces one character with 1,000 characters, would turn one byte into 10^15 bytes. */
START_TEST(normalizers_that_grow_without_bound_are_rejected) {
    enum { N_LONG = 100000 };
    char *part = malloc(N_LONG + 256);
    char *text = malloc(N_LONG + 1);
    ck_assert(part != NULL && text != NULL);
    memset(text, 'a', N_LONG);
    text[N_LONG] = 0;
    (void)snprintf(part, N_LONG + 256, "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"%.1000s\"}", text);
    check_growth("normalizer", "normalizers", part, 5);
    (void)snprintf(part, N_LONG + 256, "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\"%.1000s\"}", text);
    check_growth("normalizer", "normalizers", part, 5);
    (void)snprintf(part, N_LONG + 256, "{\"type\":\"Prepend\",\"prepend\":\"%s\"}", text);
    check_growth("normalizer", "normalizers", part, 15);
    (void)snprintf(part, N_LONG + 256, "{\"type\":\"Metaspace\",\"replacement\":\"%s\",\"prepend_scheme\":\"always\"}", text);
    check_growth("pre_tokenizer", "pretokenizers", part, 3);
    free(part);
    free(text);
}
END_TEST

/* ---- rejected files ---- */

typedef struct rejected_change {
    const char *in;  /* text to replace in the gpt2 tokenizer file */
    const char *out; /* replacement */
    const char *says;
} rejected_change;

static const rejected_change REJECTED_CHANGES[] = {
    {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model.type is \"Unigram\""},
    {"\"type\":\"BPE\"", "\"type\":\"WordPiece\"", "model.type is \"WordPiece\""},
    {"\"dropout\":null", "\"dropout\":0.1", "model.dropout is 0.1"},
    {"\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "model.continuing_subword_prefix"},
    {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "model.end_of_word_suffix"},
    {"\"fuse_unk\":false", "\"fuse_unk\":1", "model.fuse_unk"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}", "normalizer: type 'Lowercase'"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\"}", "normalizer: a Sequence has no normalizers"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"x\"}",
     "field String of step Replace"},
    {"\"normalizer\":null", "\"normalizer\":[]", "an entry has no type"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"BertNormalizer\"}", "BertNormalizer"},
    {"\"type\":\"ByteLevel\"", "\"type\":\"UnicodeScripts\"", "pre_tokenizer: type 'UnicodeScripts'"},
    {"\"pre_tokenizer\":{",
     "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"Digits\"}]},\"x\":{",
     "a step after ByteLevel"},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"BertProcessing\"}", "post_processor: type 'BertProcessing'"},
    {"\"decoder\":null", "\"decoder\":{\"type\":\"CTC\"}", "decoder: type 'CTC'"},
    {"\"unk_token\":null", "\"unk_token\":\"<none>\"", "model.unk_token '<none>' is not a token"},
    {"\"byte_fallback\":false", "\"byte_fallback\":true", "byte_fallback with a ByteLevel pre_tokenizer"},
    {"\"id\":400", "\"id\":-1", "added_tokens: an entry needs a non-negative integer id"},
    {"\"id\":400", "\"id\":2097152", "added_tokens: token id 2097152"},
    {"\"special\":true", "\"special\":1", "added_tokens: special"},
    {"\"vocab\":{", "\"vocab\":{\"zz\":1.5,", "integer"},
    {"\"vocab\":{", "\"vocab\":{\"zz\":-5,", "integer"},
    {"\"vocab\":{", "\"vocab\":{\"zz\":0,", "two tokens have id 0"},
    {"\"vocab\":{", "\"vocab\":{\"zz\":99999999999999999999,", "too large"},
    {"\"vocab\":{", "\"vocab\":{\"\\ud800\":5000,", "surrogate"},
    {"\"vocab\":{", "\"vocab\":{\"\\q\":5000,", "unknown escape"},
    {"\"vocab\":{", "\"vocab\":[],\"x\":{", "expected an object"},
    {"\"merges\":[", "\"merges\":[\"ab\",", "model.merges: 'ab'"},
    {"\"merges\":[", "\"merges\":[[\"a\"],", "model.merges: an entry must be a list of two strings"},
    {"\"merges\":[", "\"merges\":[[\"a\",\"b\",\"c\"],", "model.merges: an entry must be a list of two strings"},
    {"\"merges\":[", "\"merges\":[7,", "expected a string"},
    {"\"merges\":[", "\"merges\":{},\"x\":[", "expected an array"},
    {"\"model\":{", "\"model\":null,\"y\":{", "\"model\" is missing"},
    {"\"model\":{", "\"model\":{\"vocab\":{},", "duplicate member vocab"},
};

/* Returns a copy of the tokenizer file with the text change->in replaced. */
static char *changed(const char *text, const rejected_change *change) {
    const char *at = strstr(text, change->in);
    ck_assert_msg(at != NULL, "the text has no %s", change->in);
    const size_t before = (size_t)(at - text);
    const size_t size = strlen(text) + strlen(change->out) + 1;
    char *copy = malloc(size);
    ck_assert_ptr_nonnull(copy);
    (void)snprintf(copy, size, "%.*s%s%s", (int)before, text, change->out, at + strlen(change->in));
    return copy;
}

static void check_rejected(const char *text, size_t size, const char *says) {
    fkv_weights *weights = fkv_weights_new();
    const fkv_status status = fkv_tokenizer_json_read(fkv_weights_vocab_target(weights), text, size, "some/tokenizer.json");
    ck_assert_msg(status == FKV_UNSUPPORTED || status == FKV_FILE_FORMAT || status == FKV_FILE_DAMAGED,
                  "%s returned instead of an error with %s", fkv_status_name(status), says);
    ck_assert_msg(strstr(fkv_message(), says) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(), says);
    ck_assert_msg(strstr(fkv_message(), "some/tokenizer.json") != NULL, "\"%s\" does not name the file", fkv_message());
    fkv_weights_close(weights);
}

START_TEST(unsupported_constructs_are_rejected_by_name) {
    json_t *vectors = vectors_load();
    char *text = json_text(vectors, find_named(vectors, "gpt2"), JSON_COMPACT);
    for (size_t i = 0; i < sizeof REJECTED_CHANGES / sizeof REJECTED_CHANGES[0]; i++) {
        char *bad = changed(text, &REJECTED_CHANGES[i]);
        check_rejected(bad, strlen(bad), REJECTED_CHANGES[i].says);
        free(bad);
    }
    free(text);
    json_decref(vectors);
}
END_TEST

START_TEST(truncated_file_is_rejected) {
    json_t *vectors = vectors_load();
    char *text = json_text(vectors, find_named(vectors, "llama2"), JSON_COMPACT);
    for (size_t size = 0; size + 1 < strlen(text); size += 7) check_rejected(text, size, "");
    free(text);
    json_decref(vectors);
}
END_TEST

/* Patterns that must be rejected, because PCRE2 and Oniguruma interpret them differently or because matching takes too long. */
START_TEST(unsupported_patterns_are_rejected) {
    static const rejected_change patterns[] = {
        {NULL, "[\\\\p{L}&&[a-z]]+", "intersection of character classes"},
        {NULL, "[a[b]]", "character class inside"},
        {NULL, "\\\\p{N}{1,3}+", "possessive quantifier"},
        {NULL, "\\\\X", "escape sequence"},
        {NULL, "(?<n>a)\\\\k<n>", "unsupported kind of group"},
        {NULL, "(a", "PCRE2 rejects"},
        {NULL, "(*UCP)a", "PCRE2 verb"},
        {NULL, "\\\\p{Nonsense}", "PCRE2 rejects"},
    };
    json_t *vectors = vectors_load();
    char *text = json_text(vectors, find_named(vectors, "split_Isolated"), JSON_COMPACT);
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        fkv_tokenizer *tokenizer = NULL;
        const rejected_change change = {"[\\\\s!]", patterns[i].out, patterns[i].says};
        char *bad = changed(text, &change);
        fkv_weights *weights = fkv_weights_new();
        ck_ok(fkv_tokenizer_json_read(fkv_weights_vocab_target(weights), bad, strlen(bad), "tokenizer.json"));
        ck_status(fkv_tokenizer_open(fkv_weights_vocab(weights), &tokenizer), FKV_UNSUPPORTED);
        ck_assert_msg(strstr(fkv_message(), patterns[i].says) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(),
                      patterns[i].says);
        fkv_weights_close(weights);
        free(bad);
    }
    const rejected_change endless = {"[\\\\s!]", "(?:a|aa)+\\\\d", ""};
    char *bad = changed(text, &endless);
    char many[64];
    size_t n_tokens = 0;
    opened it;
    open_text(&it, bad);
    memset(many, 'a', sizeof many);
    many[sizeof many - 1] = 'b';
    ck_status(fkv_tokenizer_encode(it.tokenizer, many, NULL, sizeof many, FKV_TOKENIZE_PLAIN, NULL, 0, &n_tokens),
              FKV_UNSUPPORTED);
    ck_assert_msg(strstr(fkv_message(), "takes too long") != NULL, "%s", fkv_message());
    close_text(&it);
    free(bad);
    free(text);
    json_decref(vectors);
}
END_TEST

/* ---- folders ---- */

static char folder[64];

static void write_file(const char *name, const char *bytes, size_t size) {
    char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, size, file), size);
    ck_assert_int_eq(fclose(file), 0);
}

static void write_text(const char *name, const char *text) { write_file(name, text, strlen(text)); }

static void folder_open(void) {
    (void)snprintf(folder, sizeof folder, "/tmp/flatkv-vocab-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void folder_remove(void) {
    static const char *const names[] = {"tokenizer.json",         "tokenizer.model",     "tokenizer_config.json",
                                        "generation_config.json", "chat_template.jinja", "chat_template.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[128];
        (void)snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        (void)unlink(path);
    }
    ck_assert_int_eq(rmdir(folder), 0);
}

static fkv_weights *folder_read(fkv_status expected) {
    fkv_weights *weights = fkv_weights_new();
    ck_assert_ptr_nonnull(weights);
    ck_status(fkv_vocab_folder_read(fkv_weights_vocab_target(weights), folder), expected);
    return weights;
}

static void ck_bytes(fkv_bytes bytes, const char *text) {
    ck_assert_uint_eq(bytes.size, strlen(text));
    ck_assert_mem_eq(bytes.data, text, bytes.size);
}

static void check_ends(const fkv_weights *weights, const uint32_t *expected, uint32_t n) {
    uint32_t end[FKV_MAX_END_TOKENS];
    fkv_tokenizer *tokenizer = NULL;
    ck_ok(fkv_tokenizer_open(&weights->vocab, &tokenizer));
    ck_assert_uint_eq(fkv_tokenizer_ends(tokenizer, end), n);
    ck_assert_mem_eq(end, expected, n * sizeof *end);
    fkv_tokenizer_close(tokenizer);
}

START_TEST(accompanying_files_set_bos_eos_and_the_template) {
    json_t *vectors = vectors_load();
    char *text = json_text(vectors, find_named(vectors, "llama3"), JSON_COMPACT);
    folder_open();
    write_text("tokenizer.json", text);
    fkv_weights *weights = folder_read(FKV_OK);
    ck_assert_uint_eq(weights->vocab.bos, 400); /* the BOS token comes from the post-processor */
    ck_assert(weights->vocab.add_bos);
    ck_assert_uint_eq(weights->vocab.eos, FKV_NO_TOKEN);
    fkv_weights_close(weights);

    write_text("chat_template.json",
               "{\"chat_template\": \"of a model that sees\"}"); /* chat_template.json has the lowest precedence of all files with
                                                                    a template */
    weights = folder_read(FKV_OK);
    ck_bytes(weights->vocab.chat_template, "of a model that sees");
    fkv_weights_close(weights);

    write_text("tokenizer_config.json",
               "{\"model_max_length\": 1000000000000000019884624838656, \"add_bos_token\": false, "
               "\"bos_token\": {\"content\": \"<s>\"}, \"eos_token\": \"</s>\", \"chat_template\": "
               "[{\"name\": \"tool_use\", \"template\": \"t\"}, {\"name\": \"default\", \"template\": \"d\"}]}");
    write_text("generation_config.json", "{\"eos_token_id\": [401, 7, 9]}");
    weights = folder_read(FKV_OK);
    ck_assert(!weights->vocab.add_bos);
    ck_assert_uint_eq(weights->vocab.eos, 401);
    ck_assert_uint_eq(weights->vocab.n_ends, 3);
    ck_assert(weights->vocab.ends[0] == 401 && weights->vocab.ends[1] == 7 && weights->vocab.ends[2] == 9);
    check_ends(weights, (const uint32_t[]){401, 7, 9}, 3);
    ck_bytes(weights->vocab.chat_template, "d");
    fkv_weights_close(weights);

    write_text("tokenizer_config.json", "{\"chat_template\": \"one\"}");
    weights = folder_read(FKV_OK);
    ck_bytes(weights->vocab.chat_template, "one");
    ck_assert_uint_eq(weights->vocab.eos, 401); /* the EOS token comes from the generation config */
    fkv_weights_close(weights);
    write_text("generation_config.json",
               "{\"eos_token_id\": [401, 1, 2, 2, 3, 4, 5, 6, 7, 8, -1, 9, 10, 11, 12, 13, 14, 15, 16]}");
    weights = folder_read(FKV_OK);
    check_ends(weights, (const uint32_t[]){401, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, FKV_MAX_END_TOKENS);
    fkv_weights_close(weights);
    write_text("chat_template.jinja", "two\n");
    weights = folder_read(FKV_OK);
    ck_bytes(weights->vocab.chat_template, "two\n");
    fkv_weights_close(weights);

    write_text("tokenizer_config.json", "{\"eos_token\": 5}");
    fkv_weights_close(folder_read(FKV_FILE_FORMAT));
    ck_assert_msg(strstr(fkv_message(), "eos_token must be") != NULL && strstr(fkv_message(), "tokenizer_config.json") != NULL,
                  "%s", fkv_message());
    folder_remove();
    free(text);
    json_decref(vectors);
}
END_TEST

/* Embedding models append a token, which the TemplateProcessing entry of tokenizer.json defines. */
START_TEST(token_after_a_text_is_appended_on_request) {
    static const char PROCESSOR[] =
        "{\"type\": \"TemplateProcessing\", \"single\": [{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}, {\"SpecialToken\": {\"id\": "
        "\"</s>\", \"type_id\": 0}}], \"pair\": [], \"special_tokens\": {\"</s>\": {\"id\": \"</s>\", \"ids\": [401], \"tokens\": [\"</s>\"]}}}";
    json_t *vectors = vectors_load();
    char *text = json_text(vectors, find_named(vectors, "llama3"), JSON_COMPACT);
    json_t *file = json_loads(text, 0, NULL);
    free(text);
    ck_assert_int_eq(json_object_set_new(file, "post_processor", json_loads(PROCESSOR, 0, NULL)), 0);
    text = json_dumps(file, JSON_COMPACT);
    folder_open();
    write_text("tokenizer.json", text);
    fkv_weights *weights = folder_read(FKV_OK);
    ck_assert(weights->vocab.suffix == 401 && !weights->vocab.add_bos);
    fkv_tokenizer *tokenizer = NULL;
    uint32_t tokens[8];
    size_t n = 0;
    size_t n_plain = 0;
    ck_ok(fkv_tokenizer_open(&weights->vocab, &tokenizer));
    ck_ok(fkv_tokenizer_encode(tokenizer, "ab", NULL, 2, FKV_TOKENIZE_BOS, tokens, 8, &n_plain));
    ck_ok(fkv_tokenizer_encode(tokenizer, "ab", NULL, 2, FKV_TOKENIZE_BOS | FKV_TOKENIZE_EOS, tokens, 8, &n));
    ck_assert(n == n_plain + 1 && tokens[n - 1] == 401);
    fkv_tokenizer_close(tokenizer);
    fkv_weights_close(weights);
    folder_remove();
    free(text);
    json_decref(file);
    json_decref(vectors);
}
END_TEST

START_TEST(generation_config_sets_sampling_parameters) {
    json_t *vectors = vectors_load();
    char *text = json_text(vectors, find_named(vectors, "llama3"), JSON_COMPACT);
    folder_open();
    write_text("tokenizer.json", text);
    fkv_weights *weights = folder_read(FKV_OK);
    ck_assert_uint_eq(weights->vocab.sampling.fields, 0);
    fkv_weights_close(weights);
    write_text("generation_config.json",
               "{\"do_sample\": true, \"temperature\": 0.6, \"top_k\": 20, \"top_p\": 0.95, \"min_p\": 0, "
               "\"repetition_penalty\": 1.1, \"eos_token_id\": 401}");
    weights = folder_read(FKV_OK);
    const fkv_sampling_source *s = &weights->vocab.sampling;
    ck_assert_uint_eq(s->fields, FKV_SAMPLING_TEMPERATURE | FKV_SAMPLING_TOP_K | FKV_SAMPLING_TOP_P | FKV_SAMPLING_MIN_P |
                                     FKV_SAMPLING_REPETITION);
    ck_assert(s->temperature == 0.6f && s->top_k == 20 && s->top_p == 0.95f && s->min_p == 0 && s->repetition == 1.1f);
    fkv_weights_close(weights);
    write_text("generation_config.json", "{\"do_sample\": false, \"temperature\": 0.6}");
    weights = folder_read(FKV_OK);
    ck_assert(weights->vocab.sampling.fields == FKV_SAMPLING_TEMPERATURE && weights->vocab.sampling.temperature == 0.0f);
    fkv_weights_close(weights);
    write_text("generation_config.json", "{\"temperature\": null, \"top_k\": -1, \"top_p\": \"0.9\", \"min_p\": 0.1}");
    weights = folder_read(FKV_OK); /* fields whose values are not valid numbers are ignored */
    ck_assert_uint_eq(weights->vocab.sampling.fields, FKV_SAMPLING_MIN_P);
    ck_assert_float_eq(weights->vocab.sampling.min_p, 0.1f);
    fkv_weights_close(weights);
    folder_remove();
    free(text);
    json_decref(vectors);
}
END_TEST

/* ---- SentencePiece ---- */

typedef struct proto_writer {
    uint8_t bytes[4096];
    size_t n;
} proto_writer;

static void put_varint(proto_writer *w, uint64_t value) {
    for (; value >= 0x80; value >>= 7) w->bytes[w->n++] = (uint8_t)(value | 0x80);
    w->bytes[w->n++] = (uint8_t)value;
}

static void put_number(proto_writer *w, uint32_t field, uint64_t value) {
    put_varint(w, (uint64_t)field << 3);
    put_varint(w, value);
}

static void put_bytes(proto_writer *w, uint32_t field, const void *data, size_t size) {
    put_varint(w, (uint64_t)field << 3 | 2);
    put_varint(w, size);
    memcpy(w->bytes + w->n, data, size);
    w->n += size;
}

static void put_model_piece(proto_writer *w, const char *text, float score, uint32_t type) {
    proto_writer piece = {.n = 0};
    put_bytes(&piece, 1, text, strlen(text));
    put_varint(&piece, 2 << 3 | 5);
    memcpy(piece.bytes + piece.n, &score, 4);
    piece.n += 4;
    if (type != 1) put_number(&piece, 3, type);
    put_bytes(w, 1, piece.bytes, piece.n);
}

/* Writes a model with the tokens <unk> <s> </s> <0x..> ▁ a b ab ▁ab. type: 1 for unigram, 2 for BPE. */
static void put_model(proto_writer *w, uint64_t type, bool drops_spaces, size_t n_map) {
    static const char *const normal[] = {"\u2581", "a", "b", "ab", "\u2581ab"};
    put_model_piece(w, "<unk>", 0, 2);
    put_model_piece(w, "<s>", 0, 3);
    put_model_piece(w, "</s>", 0, 3);
    put_model_piece(w, "<0xC3>", 0, 6);
    put_model_piece(w, "<0xA8>", 0, 6);
    for (size_t i = 0; i < 5; i++) put_model_piece(w, normal[i], -(float)i, 1);
    proto_writer trainer = {.n = 0};
    put_number(&trainer, 3, type);
    put_number(&trainer, 41, 1);
    put_bytes(w, 2, trainer.bytes, trainer.n);
    proto_writer normalizer = {.n = 0};
    put_bytes(&normalizer, 1, "identity", 8);
    put_bytes(&normalizer, 2, "charsmap", n_map);
    put_number(&normalizer, 3, 1);
    put_number(&normalizer, 4, drops_spaces);
    put_bytes(w, 3, normalizer.bytes, normalizer.n);
}

START_TEST(folder_with_only_tokenizer_model_is_sentencepiece) {
    proto_writer w = {.n = 0};
    put_model(&w, 2, false, 0);
    folder_open();
    write_file("tokenizer.model", (const char *)w.bytes, w.n);
    fkv_weights *weights = folder_read(FKV_OK);
    fkv_tokenizer *tokenizer = NULL;
    uint32_t tokens[16];
    size_t n_tokens = 0;
    ck_ok(fkv_tokenizer_open(fkv_weights_vocab(weights), &tokenizer));
    ck_ok(fkv_tokenizer_encode(tokenizer, "ab a\u00e8", NULL, 6, FKV_TOKENIZE_BOS, tokens, 16, &n_tokens));
    static const uint32_t expected[] = {1, 9, 5, 6, 3, 4}; /* tokens: <s> ▁ab ▁ a <0xC3> <0xA8> */
    ck_assert_uint_eq(n_tokens, 6);
    ck_assert_mem_eq(tokens, expected, sizeof expected);
    fkv_tokenizer_close(tokenizer);
    fkv_weights_close(weights);
    folder_remove();
}
END_TEST

static void check_model_rejected(const proto_writer *w, size_t size, const char *says) {
    fkv_weights *weights = fkv_weights_new();
    const fkv_status status = fkv_sentencepiece_read(fkv_weights_vocab_target(weights), w->bytes, size, "some/tokenizer.model");
    ck_assert(status == FKV_UNSUPPORTED || status == FKV_FILE_FORMAT);
    ck_assert_msg(strstr(fkv_message(), says) != NULL && strstr(fkv_message(), "some/tokenizer.model") != NULL,
                  "\"%s\" does not contain \"%s\"", fkv_message(), says);
    fkv_weights_close(weights);
}

START_TEST(other_sentencepiece_models_are_rejected_by_name) {
    proto_writer unigram = {.n = 0};
    put_model(&unigram, 1, false, 0);
    check_model_rejected(&unigram, unigram.n, "model_type is unigram");
    proto_writer spaces = {.n = 0};
    put_model(&spaces, 2, true, 0);
    check_model_rejected(&spaces, spaces.n, "remove_extra_whitespaces");
    proto_writer mapped = {.n = 0};
    put_model(&mapped, 2, false, 8);
    check_model_rejected(&mapped, mapped.n, "precompiled_charsmap");
    for (size_t size = 0; size < unigram.n; size++) check_model_rejected(&unigram, size, "");
    static const char tiktoken[] = "IQ== 0\nIg== 1\n";
    proto_writer text = {.n = sizeof tiktoken - 1};
    memcpy(text.bytes, tiktoken, sizeof tiktoken);
    check_model_rejected(&text, text.n, "not a SentencePiece model");
}
END_TEST

TEST_MAIN("tokenizer_json", every_construct_tokenizes_as_in_hugging_face, tokens_of_either_kind_give_the_original_text,
          marked_text_gives_no_control_token, control_tokens_are_distinguished_from_tags,
          tokens_beyond_the_embedding_rows_are_ignored, normalizers_that_grow_without_bound_are_rejected,
          unsupported_constructs_are_rejected_by_name, truncated_file_is_rejected, unsupported_patterns_are_rejected,
          accompanying_files_set_bos_eos_and_the_template, token_after_a_text_is_appended_on_request,
          generation_config_sets_sampling_parameters, folder_with_only_tokenizer_model_is_sentencepiece,
          other_sentencepiece_models_are_rejected_by_name)
