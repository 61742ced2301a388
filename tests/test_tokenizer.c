/* Compares tokenizers with stored results of llama.cpp and Hugging Face, for each pre-tokenizer and for SentencePiece. Compares
 * tokens of small random vocabularies with those of a naive tokenizer. Also tests detokenization, rejected vocabularies and
 * worst-case texts.
 */
#include "../src/model/files/weights_state.h"
#include "../src/text/chat/chat.h"
#include "sanitized.h"
#include "test.h"
#include "tokenizer_model.h"

#include "../src/text/tokenizer/token_merge.h"
#include "../src/text/tokenizer/vocab_map.h"

#include <stdio.h>

static const char SEPARATOR[] = "\n__ggml_vocab_test__\n";

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    ck_assert_msg(file != NULL, "cannot open %s", path);
    ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(*size + 1);
    ck_assert_ptr_nonnull(text);
    ck_assert_uint_eq(fread(text, 1, *size, file), *size);
    (void)fclose(file);
    text[*size] = 0;
    return text;
}

/* A vocabulary from a file, optionally with another pre-tokenizer. */
typedef struct opened {
    fkv_weights *weights;
    fkv_vocab_source source;
    fkv_tokenizer *tokenizer;
} opened;

static void open_file(opened *one, const char *path, const char *pre) {
    ck_ok(fkv_weights_open(path, &one->weights));
    one->source = *fkv_weights_vocab(one->weights);
    if (pre != NULL) one->source.pre = (fkv_bytes){pre, strlen(pre)};
    ck_ok(fkv_tokenizer_open(&one->source, &one->tokenizer));
}

static void close_file(opened *one) {
    fkv_tokenizer_close(one->tokenizer);
    fkv_weights_close(one->weights);
}

static const char GPT2[] = "tests/data/vocab/gpt-2.gguf";
static const char STORIES[] = "tests/data/stories260K.gguf";

static uint32_t *encode(const fkv_tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags, size_t *n_tokens) {
    ck_ok(fkv_tokenizer_encode(tokenizer, text, NULL, n_bytes, flags, NULL, 0, n_tokens));
    uint32_t *tokens = malloc((*n_tokens + 1) * sizeof *tokens);
    ck_assert_ptr_nonnull(tokens);
    ck_ok(fkv_tokenizer_encode(tokenizer, text, NULL, n_bytes, flags, tokens, *n_tokens, n_tokens));
    return tokens;
}

/* ---- stored results ---- */

/* Tokenizes `text`, reads the expected tokens from `line` up to ';' or the end of the line, and compares them. */
static const char *compare_line(const char *line, const fkv_tokenizer *tokenizer, const char *text, size_t n_bytes,
                                unsigned flags, const char *name, int index) {
    size_t n_tokens = 0;
    size_t n_expected = 0;
    uint32_t *tokens = encode(tokenizer, text, n_bytes, flags, &n_tokens);
    while (*line != ';' && *line != '\n') {
        char *end = NULL;
        unsigned long expected = strtoul(line, &end, 10);
        if (end == line) {
            line++;
            continue;
        }
        ck_assert_msg(n_expected < n_tokens && tokens[n_expected] == expected, "%s, case %d, flags %u: token %zu is not %lu",
                      name, index, flags, n_expected, expected);
        n_expected++;
        line = end;
    }
    ck_assert_msg(n_expected == n_tokens, "%s, case %d, flags %u: %zu tokens, expected %zu", name, index, flags, n_tokens,
                  n_expected);
    free(tokens);
    return line;
}

static int check_vectors(const fkv_tokenizer *tokenizer, const char *cases, const char *name) {
    char path[128];
    size_t n_inputs = 0;
    size_t n_outputs = 0;
    (void)snprintf(path, sizeof path, "tests/data/vocab/%s.inp", cases);
    char *inputs = read_file(path, &n_inputs);
    (void)snprintf(path, sizeof path, "tests/data/vocab/%s.%s.out", cases, name);
    char *outputs = read_file(path, &n_outputs);
    const char *line = outputs;
    const char *text = inputs;
    int index = 0;
    for (bool more = true; more; index++) {
        size_t left = n_inputs - (size_t)(text - inputs);
        const char *end = memmem(text, left, SEPARATOR, strlen(SEPARATOR));
        more = end != NULL;
        size_t n_bytes = more ? (size_t)(end - text) : left;
        ck_assert_msg(line < outputs + n_outputs, "%s ends before its cases", path);
        if (*line == '-') /* a case with surrogates, which has no result because Hugging Face rejects it */
            line++;
        else
            line = compare_line(line, tokenizer, text, n_bytes, FKV_TOKENIZE_PLAIN, path, index);
        if (*line == ';') line = compare_line(line + 1, tokenizer, text, n_bytes, FKV_TOKENIZE_SPECIAL, path, index);
        line++;
        text += n_bytes + strlen(SEPARATOR);
        more = more && text < inputs + n_inputs; /* a separator at the end of the file does not begin another case */
    }
    ck_assert_ptr_eq(line, outputs + n_outputs);
    free(inputs);
    free(outputs);
    return index;
}

/* The expected tokens come from llama.cpp for gpt-2, smollm and llama-bpe, and from Hugging Face for all others
 * (scripts/make-tokenizer-vectors). */
START_TEST(every_pre_tokenizer_matches_its_reference) {
    static const char *const names[] = {"gpt-2",  "smollm",  "llama-bpe", "qwen2",          "qwen35",      "command-r", "tekken",
                                        "gpt-4o", "kimi-k2", "dbrx",      "deepseek-coder", "deepseek-v3", "default"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        opened one;
        open_file(&one, GPT2, names[i]);
        ck_assert_int_eq(check_vectors(one.tokenizer, "cases", names[i]), 46);
        ck_assert_int_eq(check_vectors(one.tokenizer, "edges", names[i]), 250);
        close_file(&one);
    }
}
END_TEST

START_TEST(sentencepiece_matches_llama_cpp) {
    opened one;
    open_file(&one, STORIES, NULL);
    ck_assert_str_eq(fkv_tokenizer_name(one.tokenizer), "spm");
    ck_assert_int_eq(check_vectors(one.tokenizer, "cases", "stories"), 46);
    ck_assert_int_eq(check_vectors(one.tokenizer, "edges", "stories"), 250);
    close_file(&one);
}
END_TEST

/* ---- detokenization ---- */

/* Joins the texts of the tokens and compares them with the original text. */
static void check_back(const fkv_tokenizer *tokenizer, const char *text, size_t n_bytes, size_t n_before) {
    size_t n_tokens = 0;
    uint32_t *tokens = encode(tokenizer, text, n_bytes, FKV_TOKENIZE_PLAIN, &n_tokens);
    size_t at = 0;
    for (size_t i = 0; i < n_tokens; i++) {
        size_t n = 0;
        const char *piece = fkv_tokenizer_text(tokenizer, tokens[i], false, &n);
        size_t skip = i == 0 ? n_before : 0; /* skips the leading space that SentencePiece adds */
        ck_assert_uint_ge(n, skip);
        ck_assert_msg(at + n - skip <= n_bytes && memcmp(piece + skip, text + at, n - skip) == 0,
                      "token %zu is not the text at %zu", i, at);
        at += n - skip;
    }
    ck_assert_uint_eq(at, n_bytes);
    free(tokens);
}

START_TEST(tokens_give_the_original_text) {
    size_t n_bytes = 0;
    char *book = read_file("models/needle/book.txt", &n_bytes);
    const size_t max_bytes = TEST_SANITIZED ? 30000 : 300000;
    if (n_bytes > max_bytes) n_bytes = max_bytes;
    static const char *const names[] = {"gpt-2", "smollm", "qwen2", "llama-bpe"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        opened one;
        open_file(&one, GPT2, names[i]);
        check_back(one.tokenizer, book, n_bytes, 0);
        close_file(&one);
    }
    opened stories;
    open_file(&stories, STORIES, NULL);
    check_back(stories.tokenizer, book, n_bytes, 1);
    close_file(&stories);
    free(book);
}
END_TEST

START_TEST(bytes_are_their_own_tokens) {
    fkv_vocab_source source = {.model = {"byte", 4}, .bos = FKV_NO_TOKEN, .eos = FKV_NO_TOKEN, .eot = FKV_NO_TOKEN};
    fkv_tokenizer *tokenizer = NULL;
    ck_ok(fkv_tokenizer_open(&source, &tokenizer));
    ck_assert_str_eq(fkv_tokenizer_name(tokenizer), "byte");
    char all[256];
    uint32_t tokens[256];
    size_t n = 0;
    for (int i = 0; i < 256; i++) all[i] = (char)i;
    ck_ok(fkv_tokenizer_encode(tokenizer, all, NULL, sizeof all, FKV_TOKENIZE_BOS | FKV_TOKENIZE_SPECIAL, tokens, 256, &n));
    ck_assert_uint_eq(n, 256);
    for (uint32_t i = 0; i < 256; i++) {
        const char *text = fkv_tokenizer_text(tokenizer, i, false, &n);
        ck_assert_uint_eq(tokens[i], i);
        ck_assert_uint_eq(n, 1);
        ck_assert_int_eq(text[0], all[i]);
    }
    (void)fkv_tokenizer_text(tokenizer, 256, true, &n);
    ck_assert_uint_eq(n, 0);
    uint32_t end[FKV_MAX_END_TOKENS];
    ck_assert_uint_eq(fkv_tokenizer_ends(tokenizer, end), 0);
    fkv_tokenizer_close(tokenizer);
}
END_TEST

START_TEST(tokens_beyond_the_capacity_are_counted_but_not_written) {
    opened one;
    open_file(&one, GPT2, NULL);
    uint32_t tokens[3] = {7, 7, 7};
    size_t n = 0;
    ck_ok(fkv_tokenizer_encode(one.tokenizer, "one two three four", NULL, 18, FKV_TOKENIZE_PLAIN, tokens, 2, &n));
    ck_assert_uint_eq(n, 4);
    ck_assert_uint_eq(tokens[2], 7);
    ck_ok(fkv_tokenizer_encode(one.tokenizer, "", NULL, 0, FKV_TOKENIZE_PLAIN, NULL, 0, &n));
    ck_assert_uint_eq(n, 0);
    close_file(&one);
}
END_TEST

START_TEST(bos_is_added_if_the_model_requires_it) {
    opened stories;
    open_file(&stories, STORIES, NULL);
    opened gpt2;
    open_file(&gpt2, GPT2, NULL);
    uint32_t tokens[8];
    size_t n = 0;
    ck_assert(stories.source.add_bos && !gpt2.source.add_bos);
    ck_ok(fkv_tokenizer_encode(stories.tokenizer, "", NULL, 0, FKV_TOKENIZE_BOS, tokens, 8, &n));
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(tokens[0], stories.source.bos);
    ck_ok(fkv_tokenizer_encode(stories.tokenizer, "", NULL, 0, FKV_TOKENIZE_PLAIN, tokens, 8, &n));
    ck_assert_uint_eq(n, 0);
    ck_ok(fkv_tokenizer_encode(gpt2.tokenizer, "", NULL, 0, FKV_TOKENIZE_BOS, tokens, 8, &n));
    ck_assert_uint_eq(n, 0);
    close_file(&stories);
    close_file(&gpt2);
}
END_TEST

/* ---- special tokens and chats ---- */

#define BYTES(text) {text, sizeof(text) - 1}

/* A vocabulary of letters and a few other tokens. The merges are used only for BPE. */
static const fkv_bytes CHAT_TOKENS[] = {BYTES("a"),          BYTES("b"),      BYTES("<|im_start|>"),
                                        BYTES("<|im_end|>"), BYTES("<tool>"), BYTES("<|endoftext|>"),
                                        BYTES("ab"),         BYTES("<"),      BYTES("<|fim_pad|>")};
static const int32_t CHAT_TYPES[] = {1, 1, 3, 3, 4, 1, 1, 1, 4};
static const fkv_bytes CHAT_MERGES[] = {BYTES("a b")};
enum { N_CHAT_TOKENS = sizeof CHAT_TOKENS / sizeof CHAT_TOKENS[0] };

static fkv_vocab_source chat_source(void) {
    return (fkv_vocab_source){.model = BYTES("gpt2"),
                              .pre = BYTES("qwen2"),
                              .n_tokens = N_CHAT_TOKENS,
                              .tokens = CHAT_TOKENS,
                              .types = CHAT_TYPES,
                              .n_merges = 1,
                              .merges = CHAT_MERGES,
                              .bos = FKV_NO_TOKEN,
                              .eos = 3,
                              .eot = FKV_NO_TOKEN,
                              .unk = FKV_NO_TOKEN};
}

static void check_tokens(const fkv_tokenizer *tokenizer, const char *text, unsigned flags, const uint32_t *expected,
                         size_t n_expected) {
    size_t n = 0;
    uint32_t *tokens = encode(tokenizer, text, strlen(text), flags, &n);
    ck_assert_msg(n == n_expected && memcmp(tokens, expected, n * sizeof *tokens) == 0, "\"%s\" with flags %u", text, flags);
    free(tokens);
}

START_TEST(control_tokens_are_plain_text_unless_requested) {
    fkv_vocab_source source = chat_source();
    fkv_tokenizer *tokenizer = NULL;
    ck_ok(fkv_tokenizer_open(&source, &tokenizer));
    const char *text = "ab<|im_end|><tool>ab";
    check_tokens(tokenizer, text, FKV_TOKENIZE_SPECIAL, (const uint32_t[]){6, 3, 4, 6}, 4);
    check_tokens(tokenizer, text, FKV_TOKENIZE_PLAIN, (const uint32_t[]){6, 7, 4, 6},
                 4); /* "<" is the only substring of "<|im_end|>" that has a token */
    size_t n = 0;
    (void)fkv_tokenizer_text(tokenizer, 3, false, &n);
    ck_assert_uint_eq(n, 0);
    ck_assert_str_eq(fkv_tokenizer_text(tokenizer, 3, true, &n), "<|im_end|>");
    ck_assert_str_eq(fkv_tokenizer_text(tokenizer, 4, false, &n), "<tool>");
    fkv_tokenizer_close(tokenizer);
}
END_TEST

START_TEST(end_tokens_are_recognized_by_id_and_name) {
    fkv_vocab_source source = chat_source();
    fkv_tokenizer *tokenizer = NULL;
    uint32_t end[FKV_MAX_END_TOKENS];
    ck_ok(fkv_tokenizer_open(&source, &tokenizer));
    ck_assert_uint_eq(fkv_tokenizer_ends(tokenizer, end), 3);
    ck_assert_uint_eq(end[0], 3);
    ck_assert_uint_eq(end[1], 5);
    ck_assert_uint_eq(end[2], 8);
    /* a token with the name of a control token is a control token regardless of its type, so users cannot write it */
    check_tokens(tokenizer, "<|endoftext|>", FKV_TOKENIZE_PLAIN, (const uint32_t[]){7}, 1);
    check_tokens(tokenizer, "<|fim_pad|>", FKV_TOKENIZE_PLAIN, (const uint32_t[]){7, 0}, 2);
    check_tokens(tokenizer, "<|endoftext|>", FKV_TOKENIZE_SPECIAL, (const uint32_t[]){5}, 1);
    fkv_tokenizer_close(tokenizer);
}
END_TEST

/* Tokenizes a text and checks the tokens. marks: one digit per byte of the text; 1 if the byte comes from the user. */
static void check_marked(const fkv_tokenizer *tokenizer, const char *text, const char *marks, const uint32_t *expected,
                         size_t n_expected) {
    uint32_t tokens[64];
    uint8_t given[256];
    size_t n = 0;
    ck_assert_uint_eq(strlen(text), strlen(marks));
    for (size_t i = 0; marks[i] != 0; i++) given[i] = (uint8_t)(marks[i] - '0');
    ck_ok(fkv_tokenizer_encode(tokenizer, text, given, strlen(text), FKV_TOKENIZE_SPECIAL, tokens, 64, &n));
    ck_assert_msg(n == n_expected && memcmp(tokens, expected, n * sizeof *tokens) == 0, "\"%s\" marked %s", text, marks);
}

START_TEST(control_token_is_matched_only_if_no_byte_is_marked) {
    fkv_vocab_source source = chat_source();
    fkv_tokenizer *tokenizer = NULL;
    ck_ok(fkv_tokenizer_open(&source, &tokenizer));
    check_marked(tokenizer, "a<|im_end|>b", "000000000000", (const uint32_t[]){0, 3, 1}, 3);
    check_marked(tokenizer, "a<|im_end|>b", "100000000001", (const uint32_t[]){0, 3, 1}, 3);
    check_marked(tokenizer, "a<|im_end|>b", "111111111111", (const uint32_t[]){0, 7, 1}, 3);
    for (size_t i = 1; i <= 10; i++) { /* a single byte from the user prevents the match of the control token */
        char marks[] = "000000000000";
        marks[i] = '1';
        check_marked(tokenizer, "a<|im_end|>b", marks, (const uint32_t[]){0, 7, 1}, 3);
    }
    check_marked(tokenizer, "a<tool>b", "11111111", (const uint32_t[]){0, 4, 1},
                 3); /* special tokens that users may write are still matched */
    check_marked(tokenizer, "<|im_end|><|im_end|>", "11111111110000000000", (const uint32_t[]){7, 3}, 2);
    fkv_tokenizer_close(tokenizer);
}
END_TEST

static char *rendered(const fkv_vocab_source *source, const char *conversation) {
    fkv_tokenizer *tokenizer = NULL;
    fkv_chat *chat = NULL;
    fkv_rendered out = {0};
    ck_ok(fkv_tokenizer_open(source, &tokenizer));
    ck_ok(fkv_chat_open(source, tokenizer, &chat));
    char *text = NULL;
    if (fkv_chat_run(chat, conversation, strlen(conversation), NULL, &out) == FKV_OK) text = strdup(out.text);
    fkv_rendered_close(&out);
    fkv_chat_close(chat);
    fkv_tokenizer_close(tokenizer);
    return text;
}

START_TEST(chat_uses_the_models_template_or_chatml) {
    static const char hi[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"add_generation_prompt\": true}";
    fkv_vocab_source source = chat_source();
    char *text = rendered(&source, hi);
    ck_assert_str_eq(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    free(text);
    source.chat_template = (fkv_bytes)BYTES("[INST] {{ messages[0].content }} [/INST]{{ eos_token }}");
    text = rendered(&source, hi);
    ck_assert_str_eq(text, "[INST] hi [/INST]<|im_end|>");
    free(text);
    ck_assert_ptr_null(rendered(&source, "[]"));
    ck_assert_ptr_null(rendered(&source, "{\"messages\": 1}"));
    ck_assert_ptr_null(rendered(&source, "{"));
    source.chat_template = (fkv_bytes)BYTES("{% include 'x' %}");
    ck_assert_ptr_null(rendered(&source, hi));
    ck_assert_ptr_nonnull(strstr(fkv_message(), "line 1"));
}
END_TEST

/* ---- random vocabularies ---- */

static uint64_t random_state;

static uint32_t random_below(uint32_t n) {
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

/* Generates strings from only a few letters, so that the strings overlap and merge. */
static fkv_bytes random_string(char *room, uint32_t n_letters, uint32_t max_letters, bool wide) {
    static const char *const wide_letters[] = {"\xe2\x96\x81", " ", "\xc3\xa9", "\xc3", "\xf0\x9f"};
    size_t n = 0;
    for (uint32_t i = 1 + random_below(max_letters); i > 0; i--) {
        if (wide && random_below(6) == 0) {
            const char *letter = wide_letters[random_below(5)];
            memcpy(room + n, letter, strlen(letter));
            n += strlen(letter);
        } else {
            room[n++] = (char)('a' + random_below(n_letters));
        }
    }
    return (fkv_bytes){room, n};
}

START_TEST(random_vocabularies_tokenize_as_the_naive_model) {
    static const char *const pres[] = {"gpt-2", "smollm", "qwen2", "llama-bpe"};
    static char room[MODEL_MAX_TOKENS + MODEL_MAX_MERGES][32];
    static char text[MODEL_MAX_TEXT];
    int n_refused = 0;
    for (uint64_t seed = 1; seed <= (TEST_SANITIZED ? 200 : 2000); seed++) {
        tokenizer_fixture fixture = {0};
        fkv_vocab_source *source = &fixture.source;
        random_state = seed;
        bool spm = random_below(2) == 0;
        uint32_t n_letters = 1 + random_below(3);
        uint32_t longest = 2 + random_below(6);
        *source = (fkv_vocab_source){.model = spm ? (fkv_bytes)BYTES("llama") : (fkv_bytes)BYTES("gpt2"),
                                     .tokens = fixture.tokens,
                                     .scores = fixture.scores,
                                     .types = fixture.types,
                                     .merges = fixture.merges,
                                     .unk = 0,
                                     .add_bos = random_below(2) == 0,
                                     .add_space_prefix = random_below(2) == 0};
        const char *pre = pres[random_below(4)];
        source->pre = (fkv_bytes){pre, strlen(pre)};
        source->n_tokens = 4 + random_below(60);
        uint32_t n_special = random_below(3);
        for (uint32_t i = 0; i < source->n_tokens; i++) {
            fixture.tokens[i] = random_string(room[i], n_letters, longest, spm);
            fixture.scores[i] = -(float)random_below(8);
            fixture.types[i] = random_below(8) < n_special ? 3 + (int32_t)random_below(2) : 1;
        }
        source->n_merges = 1 + random_below(40);
        for (uint32_t i = 0; i < source->n_merges; i++) {
            char *merge = room[MODEL_MAX_TOKENS + i];
            size_t n_left = random_string(merge, n_letters, 3, false).size;
            merge[n_left] = ' ';
            fixture.merges[i] = (fkv_bytes){merge, n_left + 1 + random_string(merge + n_left + 1, n_letters, 3, false).size};
        }
        fkv_bytes long_text = random_string(text, n_letters, 80, spm);
        fixture.text = long_text.data;
        fixture.n_text = long_text.size;
        bool refused = false;
        const char *fault = tokenizer_fixture_check(&fixture, &refused);
        ck_assert_msg(fault == NULL, "seed %llu: %s", (unsigned long long)seed, fault);
        n_refused += refused;
    }
    ck_assert_int_eq(n_refused, 0);
}
END_TEST

/* ---- rejected vocabularies ---- */

static void check_rejected(const fkv_vocab_source *source, fkv_status status, const char *says) {
    fkv_tokenizer *tokenizer = NULL;
    ck_status(fkv_tokenizer_open(source, &tokenizer), status);
    ck_assert_ptr_null(tokenizer);
    ck_assert_msg(strstr(fkv_message(), says) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(), says);
}

START_TEST(unsupported_vocabularies_are_rejected_by_name) {
    fkv_vocab_source source = chat_source();
    source.model = (fkv_bytes)BYTES("bert");
    check_rejected(&source, FKV_UNSUPPORTED, "\"bert\"");
    source.model = (fkv_bytes)BYTES("\x1b]0;bert\a");
    check_rejected(&source, FKV_UNSUPPORTED, "\"\\x1b]0;bert\\x07\"");
    source = chat_source();
    source.pre = (fkv_bytes)BYTES("bloom");
    check_rejected(&source, FKV_UNSUPPORTED, "\"bloom\"");
    source.pre = (fkv_bytes){"te\x1b[2Jk\0en", 10};
    check_rejected(&source, FKV_UNSUPPORTED, "\"te\\x1b[2Jk\\x00en\"");
    source = chat_source();
    source.n_merges = 0;
    check_rejected(&source, FKV_FILE_FORMAT, "no merges");
    source = chat_source();
    source.n_tokens = 0;
    check_rejected(&source, FKV_FILE_FORMAT, "no tokens");
    source = chat_source();
    const fkv_bytes bad_merges[] = {BYTES("ab"), BYTES("a "), BYTES(" b"), BYTES("")};
    for (size_t i = 0; i < sizeof bad_merges / sizeof bad_merges[0]; i++) {
        source.merges = &bad_merges[i];
        check_rejected(&source, FKV_FILE_FORMAT, "merge 0");
    }
    static char much[FKV_MAX_TOKEN_BYTES + 1];
    memset(much, 'a', sizeof much);
    const fkv_bytes long_token = {much, sizeof much};
    source = chat_source();
    source.n_tokens = 1;
    source.tokens = &long_token;
    check_rejected(&source, FKV_UNSUPPORTED, "1025 bytes");
    source = chat_source();
    source.n_tokens = UINT32_MAX; /* the number of tokens alone causes the rejection, so the tokens are not read */
    check_rejected(&source, FKV_UNSUPPORTED, "4294967295");
}
END_TEST

START_TEST(colliding_keys_are_rejected) {
    fkv_pair_map map;
    ck_ok(fkv_pair_map_open(&map, 1000));
    fkv_status status = FKV_OK;
    uint32_t n_added = 0;
    for (uint64_t key = 0; status == FKV_OK; key++) {
        if ((fkv_mix_u64(key) & map.mask) != 5) continue;
        status = fkv_pair_map_add(&map, key, key);
        n_added += status == FKV_OK;
    }
    ck_assert_int_eq(status, FKV_FILE_DAMAGED);
    ck_assert_uint_eq(n_added, FKV_MAP_MAX_PROBES);
    fkv_pair_map_close(&map);
}
END_TEST

/* ---- normalization ---- */

static bool same_tokens(const fkv_tokenizer *tokenizer, const char *one, const char *other) {
    size_t n_one = 0;
    size_t n_other = 0;
    uint32_t *a = encode(tokenizer, one, strlen(one), FKV_TOKENIZE_PLAIN, &n_one);
    uint32_t *b = encode(tokenizer, other, strlen(other), FKV_TOKENIZE_PLAIN, &n_other);
    bool same = n_one == n_other && memcmp(a, b, n_one * sizeof *a) == 0;
    free(a);
    free(b);
    return same;
}

/* For Qwen and Command-R, decomposed text (such as file names from macOS) gives the same tokens as composed text. For GPT-2, it
 * does not. */
START_TEST(qwen_and_command_r_normalize_to_nfc) {
    static const char *const pairs[][2] = {
        {"Citta\u0300 e\u0300 gia\u0300", "Citt\u00e0 \u00e8 gi\u00e0"},
        {"\u1112\u1161\u11ab", "\ud55c"},  /* decomposed Hangul */
        {"a\u0301\u0323", "\u1ea1\u0301"}, /* combining marks in non-canonical order */
        {"\u212b", "\u00c5"},              /* singleton decomposition */
        {"\u304b\u3099x", "\u304cx"},      /* kana */
        {"\xff"
         "A\u030a",
         "\xef\xbf\xbd\u00c5"}, /* normalization also works after an invalid byte */
    };
    static const char *const names[] = {"qwen2", "deepseek-r1-qwen", "qwen35", "command-r", "gpt-2"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        opened one;
        open_file(&one, GPT2, names[i]);
        for (size_t j = 0; j < sizeof pairs / sizeof pairs[0]; j++)
            ck_assert_msg(same_tokens(one.tokenizer, pairs[j][0], pairs[j][1]) == (i < 4), "%s, pair %zu", names[i], j);
        close_file(&one);
    }
}
END_TEST

/* ---- merge loop ---- */

/* Derives the rank and the merged ID of a pair from the IDs of its symbols. If there are few ranks, many pairs have equal ranks.
 * Some pairs cannot be merged. */
static void rank_by_hash(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end) {
    const uint32_t n_ranks = *(const uint32_t *)context;
    const uint64_t hash = fkv_mix_u64((uint64_t)symbols[left].id << 32 | symbols[symbols[left].next].id);
    (void)end;
    if (hash % 5 == 0) return;
    symbols[left].rank = (uint32_t)(hash >> 8) % n_ranks;
    symbols[left].merged_id = (uint32_t)(hash >> 40) % 64;
}

/* Merges the leftmost pair with the lowest rank until no pair can be merged. Searches all pairs for each merge. */
static void merge_naively(fkv_symbol *symbols, uint32_t n_bytes, const uint32_t *n_ranks) {
    for (;;) {
        uint32_t best = n_bytes;
        for (uint32_t left = 0; symbols[left].next < n_bytes; left = symbols[left].next) {
            symbols[left].rank = FKV_NO_MERGE;
            rank_by_hash(n_ranks, symbols, left, 0);
            if (symbols[left].rank == FKV_NO_MERGE) continue;
            if (best == n_bytes || symbols[left].rank < symbols[best].rank) best = left;
        }
        if (best == n_bytes) return;
        symbols[best].id = symbols[best].merged_id;
        symbols[best].next = symbols[symbols[best].next].next;
    }
}

START_TEST(short_and_long_texts_merge_the_lowest_rank_first) {
    enum { N_MAX = 4200 };
    static fkv_symbol naive[N_MAX];
    fkv_token_merge merge = {0};
    uint64_t random = 1;
    for (uint32_t round = 0; round < 12; round++) {
        const uint32_t n = round % 3 == 0 ? 200 : N_MAX - round;
        const uint32_t n_ranks = round % 4 == 0 ? 1 : round % 4 == 1 ? 3 : round % 4 == 2 ? 50 : 100000;
        const uint32_t n_letters = 1 + round % 5;
        ck_ok(fkv_token_merge_prepare(&merge, n));
        for (uint32_t i = 0; i < n; i++) {
            random = random * UINT64_C(6364136223846793005) + 1;
            merge.symbols[i] =
                (fkv_symbol){.prev = i > 0 ? i - 1 : FKV_NO_SYMBOL, .next = i + 1, .id = (uint32_t)(random >> 40) % n_letters};
            naive[i] = merge.symbols[i];
        }
        fkv_token_merge_run(&merge, rank_by_hash, &n_ranks);
        merge_naively(naive, n, &n_ranks);
        for (uint32_t at = 0; at < n; at = naive[at].next)
            ck_assert_msg(merge.symbols[at].id == naive[at].id && merge.symbols[at].next == naive[at].next,
                          "round %u: the symbol at byte %u differs", round, at);
    }
    fkv_scratch_close(&merge.scratch);
}
END_TEST

/* ---- worst-case texts ---- */

/* A tokenizer with quadratic run time would need days for the following texts. */
START_TEST(long_runs_are_tokenized_in_linear_time) {
    enum { N = TEST_SANITIZED ? 10000 : 100000 };
    static const char *const runs[] = {"a",
                                       " ",
                                       "\n",
                                       "1",
                                       "!",
                                       " a",
                                       "\xe4\xb8\xad",
                                       "\xff",
                                       "' '",
                                       "ab\r",
                                       "\xcc\x81\xcc\xb4",
                                       "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8",
                                       "\xcc\x81",
                                       "A",
                                       " \r"};
    static const char *const pre_names[] = {"qwen2", "gpt-4o", "deepseek-llm", "deepseek-v3", "kimi-k2", "default"};
    char *text = malloc(N);
    ck_assert_ptr_nonnull(text);
    const size_t n_names = sizeof pre_names / sizeof pre_names[0];
    for (size_t p = 0; p <= n_names; p++) {
        opened o;
        open_file(&o, p < n_names ? GPT2 : STORIES, p < n_names ? pre_names[p] : NULL);
        for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
            const size_t size = strlen(runs[i]);
            size_t n_tokens = 0;
            for (size_t at = 0; at < N; at++) text[at] = runs[i][at % size];
            ck_ok(fkv_tokenizer_encode(o.tokenizer, text, NULL, N, p < n_names ? FKV_TOKENIZE_PLAIN : FKV_TOKENIZE_SPECIAL, NULL,
                                       0, &n_tokens));
            ck_assert_uint_gt(n_tokens, 0);
        }
        close_file(&o);
    }
    free(text);
}
END_TEST

/* The special tokens are runs of the same letter, one token for each length from 1 to 512, so up to 512 of them match at each
 * position of the text. */
START_TEST(overlapping_special_tokens_are_matched_in_one_pass) {
    enum { N_SPECIAL = 512, N = TEST_SANITIZED ? 10000 : 400000 };
    static char letters[N_SPECIAL];
    static fkv_bytes tokens[N_SPECIAL];
    static int32_t types[N_SPECIAL];
    char *text = malloc(N);
    ck_assert_ptr_nonnull(text);
    memset(letters, 'a', sizeof letters);
    memset(text, 'a', N);
    for (uint32_t i = 0; i < N_SPECIAL; i++) {
        tokens[i] = (fkv_bytes){letters, i + 1};
        types[i] = 4;
    }
    fkv_vocab_source source = {.model = BYTES("llama"),
                               .n_tokens = N_SPECIAL,
                               .tokens = tokens,
                               .types = types,
                               .bos = FKV_NO_TOKEN,
                               .eos = FKV_NO_TOKEN,
                               .eot = FKV_NO_TOKEN,
                               .unk = FKV_NO_TOKEN};
    fkv_tokenizer *tokenizer = NULL;
    ck_ok(fkv_tokenizer_open(&source, &tokenizer));
    size_t n_tokens = 0;
    uint32_t *found = encode(tokenizer, text, N, FKV_TOKENIZE_PLAIN, &n_tokens);
    ck_assert_uint_eq(n_tokens, N / N_SPECIAL + 1);
    ck_assert_uint_eq(found[0], N_SPECIAL - 1);
    ck_assert_uint_eq(found[n_tokens - 1], N % N_SPECIAL - 1);
    free(found);
    fkv_tokenizer_close(tokenizer);
    free(text);
}
END_TEST

TEST_MAIN("tokenizer", every_pre_tokenizer_matches_its_reference, sentencepiece_matches_llama_cpp, tokens_give_the_original_text,
          bytes_are_their_own_tokens, tokens_beyond_the_capacity_are_counted_but_not_written,
          bos_is_added_if_the_model_requires_it, control_tokens_are_plain_text_unless_requested,
          end_tokens_are_recognized_by_id_and_name, control_token_is_matched_only_if_no_byte_is_marked,
          chat_uses_the_models_template_or_chatml, random_vocabularies_tokenize_as_the_naive_model,
          short_and_long_texts_merge_the_lowest_rank_first, unsupported_vocabularies_are_rejected_by_name,
          colliding_keys_are_rejected, qwen_and_command_r_normalize_to_nfc, long_runs_are_tokenized_in_linear_time,
          overlapping_special_tokens_are_matched_in_one_pass)
