/* Opens a vocabulary and encodes text: special tokens are matched first, and the text between them is encoded by BPE,
 * SentencePiece or byte by byte. Also decodes tokens and determines the end-of-text tokens.
 *
 * Token kinds follow llama.cpp: they are derived from the token types of the file and from a list of names that are always
 * control tokens.
 */
#include "tokenizer_parts.h"

#include "pre_names.h"
#include "utf8_text.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    MAX_TOKENS = 1 << 21, /* maximum number of tokens, and of merges; eight times the size of the largest known vocabulary */
    MAX_TEXT_BYTES = 1 << 30,
};

/* Values of tokenizer.ggml.token_type. */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4, TYPE_BYTE = 6 };

/* Bits that describe a token, derived from its type. */
enum token_kind {
    KIND_NORMAL = 1,
    KIND_BYTE = 2,
    KIND_USER_DEFINED = 4, /* matched in every text, before the rest of the text is tokenized */
    KIND_HIDDEN = 8,       /* control and unknown tokens, which are matched and decoded only on request */
};

/* Names of control tokens, grouped by family. In the family ENDS, all names in the vocabulary are used. In any other family, only
 * the first name that the vocabulary contains is used. */
typedef enum name_family { ENDS, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, FIM_PAD, FIM_REPO, FIM_FILE, N_FAMILIES } name_family;

typedef struct control_name {
    const char *name;
    name_family family;
    bool ends_text;
} control_name;

static const control_name CONTROL_NAMES[] = {
    {"<|im_end|>", ENDS, true},
    {"<|endoftext|>", ENDS, true},
    {"<|eot_id|>", ENDS, true},
    {"<|eom_id|>", ENDS, true},
    {"<|end_of_text|>", ENDS, true},
    {"<|end|>", ENDS, true},
    {"<end_of_turn>", ENDS, true},
    {"<eos>", ENDS, true},
    {"</s>", ENDS, true},
    {"<EOT>", ENDS, true},
    {"_<EOT>", ENDS, true},
    {"<end_of_utterance>", ENDS, true},
    {"<\xef\xbd\x9c"
     "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     ENDS, true},
    {"<|fim_prefix|>", FIM_PREFIX, false},
    {"<fim-prefix>", FIM_PREFIX, false},
    {"<fim_prefix>", FIM_PREFIX, false},
    {"<PRE>", FIM_PREFIX, false},
    {"<|fim_suffix|>", FIM_SUFFIX, false},
    {"<fim-suffix>", FIM_SUFFIX, false},
    {"<fim_suffix>", FIM_SUFFIX, false},
    {"<SUF>", FIM_SUFFIX, false},
    {"<|fim_middle|>", FIM_MIDDLE, false},
    {"<fim-middle>", FIM_MIDDLE, false},
    {"<fim_middle>", FIM_MIDDLE, false},
    {"<MID>", FIM_MIDDLE, false},
    {"<|fim_pad|>", FIM_PAD, true},
    {"<fim-pad>", FIM_PAD, true},
    {"<fim_pad>", FIM_PAD, true},
    {"<PAD>", FIM_PAD, true},
    {"<|fim_repo|>", FIM_REPO, true},
    {"<|repo_name|>", FIM_REPO, true},
    {"<fim-repo>", FIM_REPO, true},
    {"<REPO>", FIM_REPO, true},
    {"<reponame>", FIM_REPO, true},
    {"<|file_sep|>", FIM_FILE, true},
};
enum { N_CONTROL_NAMES = sizeof CONTROL_NAMES / sizeof CONTROL_NAMES[0] };

static const char IM_START[] = "<|im_start|>";
static const char IM_END[] = "<|im_end|>";

/* ---- token kinds and end tokens ------------------------------------------------------------------------------------ */

static bool bytes_are(fkv_bytes bytes, const char *text) {
    return bytes.size == strlen(text) && memcmp(bytes.data, text, bytes.size) == 0;
}

static uint32_t find_token_named(const fkv_tokenizer *tokenizer, const char *name) {
    uint32_t token = fkv_vocab_map_find(&tokenizer->map, name, strlen(name));
    return token < tokenizer->n_tokens ? token : FKV_NO_TOKEN;
}

static void add_end(fkv_tokenizer *tokenizer, uint32_t token) {
    if (token >= tokenizer->n_tokens || tokenizer->n_end == FKV_MAX_END_TOKENS) return;
    for (uint32_t i = 0; i < tokenizer->n_end; i++) {
        if (tokenizer->end[i] == token) return;
    }
    tokenizer->end[tokenizer->n_end++] = token;
}

/* Adds the end tokens that the file declares. Tokens found by name are added after them. */
static void add_declared_ends(fkv_tokenizer *tokenizer) {
    const fkv_vocab_source *source = tokenizer->source;
    add_end(tokenizer, source->eos);
    add_end(tokenizer, source->eot);
    for (uint32_t i = 0; i < source->n_ends; i++) add_end(tokenizer, source->ends[i]);
}

static uint8_t kind_of_type(int32_t type) {
    switch (type) {
    case TYPE_NORMAL: return KIND_NORMAL;
    case TYPE_UNKNOWN:
    case TYPE_CONTROL: return KIND_HIDDEN;
    case TYPE_USER_DEFINED: return KIND_USER_DEFINED;
    case TYPE_BYTE: return KIND_BYTE;
    default: return 0; /* unused tokens have no text */
    }
}

/* Returns whether tokenizer.json declares the token as ordinary text. For example, "</s>" is an HTML tag in Gemma's vocabulary,
 * not an end token. */
static bool is_declared_text(const fkv_tokenizer *tokenizer, uint32_t token) {
    const fkv_vocab_source *source = tokenizer->source;
    return source->steps != NULL && source->types != NULL && source->types[token] == TYPE_USER_DEFINED && token != source->eos;
}

/* Sets the end tokens of gpt-oss, in which "<|end|>" ends only a message, while "<|return|>" and "<|call|>" end the reply. */
static void harmony_ends(fkv_tokenizer *tokenizer) {
    uint32_t end = find_token_named(tokenizer, "<|end|>");
    uint32_t back = find_token_named(tokenizer, "<|return|>");
    uint32_t call = find_token_named(tokenizer, "<|call|>");
    if (end == FKV_NO_TOKEN || back == FKV_NO_TOKEN || call == FKV_NO_TOKEN) return;
    uint32_t n = 0;
    for (uint32_t i = 0; i < tokenizer->n_end; i++)
        if (tokenizer->end[i] != end) tokenizer->end[n++] = tokenizer->end[i];
    tokenizer->n_end = n;
    tokenizer->kinds[back] |= KIND_HIDDEN;
    tokenizer->kinds[call] |= KIND_HIDDEN;
    add_end(tokenizer, back);
    add_end(tokenizer, call);
}

static fkv_status kinds_open(fkv_tokenizer *tokenizer) {
    const fkv_vocab_source *source = tokenizer->source;
    tokenizer->kinds = malloc(tokenizer->n_tokens);
    FKV_REQUIRE(tokenizer->kinds != NULL, FKV_NO_MEMORY, "out of memory allocating the kinds of %u tokens", tokenizer->n_tokens);
    for (uint32_t i = 0; i < tokenizer->n_tokens; i++) {
        tokenizer->kinds[i] = source->types != NULL ? kind_of_type(source->types[i]) : KIND_NORMAL;
    }
    bool seen[N_FAMILIES] = {false};
    add_declared_ends(tokenizer);
    for (int i = 0; i < N_CONTROL_NAMES; i++) {
        const control_name *control = &CONTROL_NAMES[i];
        uint32_t token = find_token_named(tokenizer, control->name);
        if (token == FKV_NO_TOKEN || (control->family != ENDS && seen[control->family])) continue;
        if (control->family == ENDS && is_declared_text(tokenizer, token)) continue;
        seen[control->family] = true;
        tokenizer->kinds[token] |= KIND_HIDDEN;
        if (control->ends_text) add_end(tokenizer, token);
    }
    harmony_ends(tokenizer);
    return FKV_OK;
}

/* ---- token texts --------------------------------------------------------------------------------------------- */

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decodes a byte token: "<0x41>" becomes "A". */
static bool parse_byte_token(fkv_bytes token, char *byte) {
    if (token.size != 6 || memcmp(token.data, "<0x", 3) != 0 || token.data[5] != '>') return false;
    int high = hex_digit(token.data[3]);
    int low = hex_digit(token.data[4]);
    *byte = (char)(high * 16 + low);
    return high >= 0 && low >= 0;
}

/* Writes the decoded text of a token. text: [token.size]. */
static size_t write_token_text(const fkv_tokenizer *tokenizer, uint32_t token, char *text) {
    fkv_bytes written = tokenizer->source->tokens[token];
    uint8_t kind = tokenizer->kinds[token];
    if (written.size == 0) return 0; /* unused id */
    if ((kind & (KIND_HIDDEN | KIND_USER_DEFINED)) != 0) {
        memcpy(text, written.data, written.size);
        return written.size;
    }
    if (kind == KIND_NORMAL) {
        return tokenizer->kind == FKV_TOKENIZER_BPE ? fkv_bpe_text(tokenizer, written, text) : fkv_spm_text(written, text);
    }
    return kind == KIND_BYTE && parse_byte_token(written, text) ? 1 : 0;
}

static fkv_status texts_open(fkv_tokenizer *tokenizer) {
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < tokenizer->n_tokens; i++) n_bytes += tokenizer->source->tokens[i].size + 1;
    FKV_ASSERT(n_bytes <= UINT32_MAX); /* always true, because the map limits the length of a token */
    tokenizer->texts = malloc((size_t)n_bytes + 1);
    tokenizer->text_at = malloc((tokenizer->n_tokens + (size_t)1) * sizeof *tokenizer->text_at);
    FKV_REQUIRE(tokenizer->texts != NULL && tokenizer->text_at != NULL, FKV_NO_MEMORY,
                "out of memory allocating the strings of %u tokens", tokenizer->n_tokens);
    uint32_t at = 0;
    for (uint32_t i = 0; i < tokenizer->n_tokens; i++) {
        tokenizer->text_at[i] = at;
        at += (uint32_t)write_token_text(tokenizer, i, tokenizer->texts + at);
        tokenizer->texts[at++] = 0;
    }
    tokenizer->text_at[tokenizer->n_tokens] = at;
    return FKV_OK;
}

/* Fills in the token texts of the byte tokenizer, which has one token for each of the 256 byte values. */
static fkv_status byte_texts_open(fkv_tokenizer *tokenizer) {
    tokenizer->texts = calloc(256, 2);
    tokenizer->text_at = malloc(257 * sizeof *tokenizer->text_at);
    tokenizer->kinds = calloc(256, 1);
    FKV_REQUIRE(tokenizer->texts != NULL && tokenizer->text_at != NULL && tokenizer->kinds != NULL, FKV_NO_MEMORY,
                "out of memory allocating a byte tokenizer");
    for (uint32_t i = 0; i <= 256; i++) tokenizer->text_at[i] = 2 * i;
    for (uint32_t i = 0; i < 256; i++) tokenizer->texts[2 * i] = (char)i;
    add_declared_ends(tokenizer);
    return FKV_OK;
}

/* ---- open ---------------------------------------------------------------------------------------------------- */

typedef struct special_list {
    fkv_special_token *tokens;
    uint32_t n;
} special_list;

static uint8_t token_flags_of(const fkv_tokenizer *tokenizer, uint32_t token) {
    return tokenizer->source->token_flags != NULL ? tokenizer->source->token_flags[token] : 0;
}

static void list_specials(const fkv_tokenizer *tokenizer, bool normalized, special_list *list) {
    list->n = 0;
    for (uint32_t i = 0; i < tokenizer->n_tokens; i++) {
        uint8_t kind = tokenizer->kinds[i];
        fkv_bytes text = tokenizer->source->tokens[i];
        bool is_normalized = (token_flags_of(tokenizer, i) & FKV_TOKEN_NORMALIZED) != 0;
        if ((kind & (KIND_HIDDEN | KIND_USER_DEFINED)) == 0 || text.size == 0 || is_normalized != normalized) continue;
        if (fkv_vocab_map_find(&tokenizer->map, text.data, text.size) != i) continue; /* another token has the same text */
        list->tokens[list->n++] = (fkv_special_token){.text = text, .token = i, .hidden = (kind & KIND_HIDDEN) != 0};
    }
}

typedef struct normalized_text {
    char bytes[FKV_MAX_TOKEN_BYTES];
    size_t n;
} normalized_text;

static fkv_status copy_normalized(void *context, const char *text, size_t n_bytes, bool is_first) {
    normalized_text *taken = context;
    (void)is_first;
    FKV_REQUIRE(n_bytes <= FKV_MAX_TOKEN_BYTES, FKV_UNSUPPORTED,
                "a special token is %zu bytes long after normalization; at most %d are supported", n_bytes, FKV_MAX_TOKEN_BYTES);
    memcpy(taken->bytes, text, n_bytes);
    taken->n = n_bytes;
    return FKV_OK;
}

/* Normalizes a special token: appends the result to `texts` and updates text->size. */
static fkv_status normalize_special(fkv_text_run *run, fkv_bytes *text, fkv_scratch *texts, size_t *n_texts) {
    normalized_text taken = {.n = 0};
    run->context = &taken;
    FKV_TRY(fkv_text_run_all(run, text->data, text->size, true));
    FKV_TRY(fkv_scratch_grow(texts, *n_texts, taken.n));
    if (taken.n > 0) memcpy((char *)texts->block + *n_texts, taken.bytes, taken.n);
    *n_texts += taken.n;
    text->size = taken.n;
    return FKV_OK;
}

static int compare_special_texts(const void *a, const void *b) {
    const fkv_special_token *x = a;
    const fkv_special_token *y = b;
    size_t n = x->text.size < y->text.size ? x->text.size : y->text.size;
    int order = n > 0 ? memcmp(x->text.data, y->text.data, n) : 0;
    if (order != 0) return order;
    if (x->text.size != y->text.size) return x->text.size < y->text.size ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

static void drop_repeats(special_list *list) {
    uint32_t n = 0;
    qsort(list->tokens, list->n, sizeof *list->tokens, compare_special_texts);
    for (uint32_t i = 0; i < list->n; i++) {
        fkv_bytes text = list->tokens[i].text;
        bool repeated = n > 0 && list->tokens[n - 1].text.size == text.size &&
                        memcmp(list->tokens[n - 1].text.data, text.data, text.size) == 0;
        if (text.size > 0 && !repeated) list->tokens[n++] = list->tokens[i];
    }
    list->n = n;
}

static fkv_status normalize_specials(const fkv_tokenizer *tokenizer, special_list *list, fkv_scratch *texts) {
    fkv_text_run run = {0};
    size_t n_texts = 0;
    fkv_status status = fkv_text_run_open(&run, tokenizer->plan);
    run.normalized = copy_normalized;
    for (uint32_t i = 0; i < list->n && status == FKV_OK; i++)
        status = normalize_special(&run, &list->tokens[i].text, texts, &n_texts);
    fkv_text_run_close(&run);
    n_texts = 0;
    for (uint32_t i = 0; i < list->n; i++) {
        list->tokens[i].text.data = (const char *)texts->block + n_texts;
        n_texts += list->tokens[i].text.size;
    }
    return status;
}

/* Normalizes the special tokens that are matched in normalized text. Drops tokens that become empty or equal to another token. */
static fkv_status normalized_specials_open(fkv_tokenizer *tokenizer, special_list *list) {
    fkv_scratch texts = {0};
    list_specials(tokenizer, true, list);
    if (list->n == 0) return FKV_OK;
    fkv_status status = fkv_scratch_need(&texts, 1);
    if (status == FKV_OK) status = normalize_specials(tokenizer, list, &texts);
    if (status == FKV_OK) {
        drop_repeats(list);
        status = fkv_special_tokens_open(&tokenizer->normalized_specials, list->tokens, list->n);
    }
    fkv_scratch_close(&texts);
    return status;
}

static fkv_status tokenizer_specials_open(fkv_tokenizer *tokenizer) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < tokenizer->n_tokens; i++) n += (tokenizer->kinds[i] & (KIND_HIDDEN | KIND_USER_DEFINED)) != 0;
    special_list list = {.tokens = malloc((n + (size_t)1) * sizeof *list.tokens)};
    FKV_REQUIRE(list.tokens != NULL, FKV_NO_MEMORY, "out of memory allocating %u special tokens", n);
    list_specials(tokenizer, false, &list);
    fkv_status status = fkv_special_tokens_open(&tokenizer->specials, list.tokens, list.n);
    if (status == FKV_OK) status = normalized_specials_open(tokenizer, &list);
    free(list.tokens);
    return status;
}

static fkv_status tokenizer_plan_open(fkv_tokenizer *tokenizer) {
    const fkv_vocab_source *source = tokenizer->source;
    fkv_text_steps steps = {0};
    tokenizer->whole_words = source->whole_words;
    if (source->steps != NULL) return fkv_text_plan_open(source->steps, &tokenizer->plan);
    if (tokenizer->kind == FKV_TOKENIZER_BPE) FKV_TRY(fkv_pre_steps(source->pre, &steps, &tokenizer->whole_words));
    if (tokenizer->kind == FKV_TOKENIZER_SPM) fkv_spm_steps(source->add_space_prefix && !tokenizer->by_merges, &steps);
    return fkv_text_plan_open(&steps, &tokenizer->plan);
}

static fkv_status vocabulary_open(fkv_tokenizer *tokenizer) {
    const fkv_vocab_source *source = tokenizer->source;
    FKV_REQUIRE(source->n_tokens > 0 && source->tokens != NULL, FKV_FILE_FORMAT,
                "the vocabulary has no tokens (tokenizer.ggml.tokens)");
    FKV_REQUIRE(source->n_tokens <= MAX_TOKENS && source->n_merges <= MAX_TOKENS, FKV_UNSUPPORTED,
                "the vocabulary has %u tokens and %u merges; at most %d of each are supported", source->n_tokens,
                source->n_merges, MAX_TOKENS);
    uint64_t n_strings = source->n_tokens;
    if (tokenizer->kind == FKV_TOKENIZER_BPE || tokenizer->by_merges) n_strings += fkv_bpe_n_strings(source);
    FKV_TRY(fkv_vocab_map_open(&tokenizer->map, (uint32_t)n_strings));
    for (uint32_t i = 0; i < source->n_tokens; i++) {
        uint32_t kept = 0;
        if (source->tokens[i].size > 0) FKV_TRY(fkv_vocab_map_add(&tokenizer->map, source->tokens[i], i, &kept));
    }
    FKV_TRY(kinds_open(tokenizer));
    FKV_TRY(tokenizer_plan_open(tokenizer));
    FKV_TRY(tokenizer->kind == FKV_TOKENIZER_BPE ? fkv_bpe_open(tokenizer) : fkv_spm_open(tokenizer));
    FKV_TRY(tokenizer_specials_open(tokenizer));
    FKV_TRY(texts_open(tokenizer));
    tokenizer->has_chatml =
        find_token_named(tokenizer, IM_START) != FKV_NO_TOKEN && find_token_named(tokenizer, IM_END) != FKV_NO_TOKEN;
    return FKV_OK;
}

static fkv_status tokenizer_init(fkv_tokenizer *tokenizer) {
    if (tokenizer->kind != FKV_TOKENIZER_BYTE) return vocabulary_open(tokenizer);
    tokenizer->n_tokens = 256;
    return byte_texts_open(tokenizer);
}

fkv_status fkv_tokenizer_open(const fkv_vocab_source *source, fkv_tokenizer **tokenizer) {
    static const struct {
        const char *model;
        fkv_tokenizer_kind kind;
        bool by_merges;
    } models[] = {{"byte", FKV_TOKENIZER_BYTE, false},
                  {"gpt2", FKV_TOKENIZER_BPE, false},
                  {"llama", FKV_TOKENIZER_SPM, false},
                  {"gemma4", FKV_TOKENIZER_SPM, true}};
    *tokenizer = NULL;
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        if (!bytes_are(source->model, models[i].model)) continue;
        fkv_tokenizer *opened = calloc(1, sizeof *opened);
        FKV_REQUIRE(opened != NULL, FKV_NO_MEMORY, "out of memory allocating a tokenizer (%zu bytes)", sizeof *opened);
        opened->kind = models[i].kind;
        opened->by_merges = models[i].by_merges;
        opened->source = source;
        opened->n_tokens = source->n_tokens;
        fkv_status status = tokenizer_init(opened);
        if (status == FKV_OK) *tokenizer = opened;
        if (status != FKV_OK) fkv_tokenizer_close(opened);
        return status;
    }
    FKV_REQUIRE(source->model.size > 0, FKV_UNSUPPORTED,
                "the model file contains no tokenizer: expected tokenizer.ggml.model and its vocabulary");
    return fkv_fail(FKV_UNSUPPORTED, "unknown tokenizer model \"%s\": expected gpt2 (BPE), llama (SentencePiece), gemma4 or byte",
                    fkv_show(source->model).text);
}

void fkv_tokenizer_close(fkv_tokenizer *tokenizer) {
    if (tokenizer == NULL) return;
    fkv_bpe_close(tokenizer);
    fkv_spm_close(tokenizer);
    fkv_special_tokens_close(&tokenizer->specials);
    fkv_special_tokens_close(&tokenizer->normalized_specials);
    fkv_pair_map_close(&tokenizer->merges);
    fkv_text_plan_close(tokenizer->plan);
    fkv_vocab_map_close(&tokenizer->map);
    free(tokenizer->kinds);
    free(tokenizer->texts);
    free(tokenizer->text_at);
    free(tokenizer);
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

/* State of one encode call. Text between special tokens is processed by the text plan, and the resulting pieces are encoded with
 * the vocabulary. */
typedef struct text_call {
    const fkv_tokenizer *tokenizer;
    fkv_encoding *encoding;
    fkv_text_run run;
    bool with_hidden; /* true if control tokens are matched in the current text */
} text_call;

static fkv_status encode_piece_of_plan(void *context, const char *text, size_t n_bytes, bool is_first) {
    text_call *call = context;
    (void)is_first;
    FKV_REQUIRE(n_bytes <= INT32_MAX, FKV_BAD_ARGUMENT, "a word is %zu bytes long; at most %d are supported", n_bytes, INT32_MAX);
    if (call->tokenizer->kind == FKV_TOKENIZER_BPE)
        return fkv_bpe_encode(call->tokenizer, text, (uint32_t)n_bytes, call->encoding);
    return fkv_spm_encode(call->tokenizer, text, (uint32_t)n_bytes, call->encoding);
}

static bool is_word_before(const char *text, size_t end) {
    uint32_t character = 0;
    size_t at = end > 0 ? fkv_character_before(text, end) : 0;
    return end > 0 && fkv_character_read(text + at, end - at, &character) > 0 && fkv_is_word_character(character);
}

static bool is_word_after(const char *text, size_t start, size_t n_bytes) {
    uint32_t character = 0;
    return start < n_bytes && fkv_character_read(text + start, n_bytes - start, &character) > 0 &&
           fkv_is_word_character(character);
}

/* Extends a match over adjacent white space if the token's flags require it. The match is not extended to bytes before `from`. */
static void extend_over_space(const char *text, size_t from, size_t n_bytes, uint8_t flags, fkv_special_hit *hit) {
    uint32_t character = 0;
    while ((flags & FKV_TOKEN_LSTRIP) != 0 && hit->start > from) {
        size_t at = fkv_character_before(text, hit->start);
        if (at < from || fkv_character_read(text + at, hit->start - at, &character) == 0 || !fkv_is_space_character(character))
            break;
        hit->start = at;
    }
    while ((flags & FKV_TOKEN_RSTRIP) != 0 && hit->end < n_bytes) {
        uint32_t n = fkv_character_read(text + hit->end, n_bytes - hit->end, &character);
        if (n == 0 || !fkv_is_space_character(character)) break;
        hit->end += n;
    }
}

/* Emits the special tokens in a text and passes the text between them to the function `between`. */
static fkv_status encode_specials(text_call *call, fkv_special_scan *scan, bool is_first,
                                  fkv_status (*between)(text_call *, const fkv_special_scan *, size_t, size_t, bool)) {
    size_t at = 0;
    fkv_special_hit hit = {0};
    while (at < scan->n_bytes) {
        FKV_TRY(fkv_special_scan_next(scan, &hit));
        uint8_t flags = hit.token != FKV_NO_TOKEN ? token_flags_of(call->tokenizer, hit.token) : 0;
        if ((flags & FKV_TOKEN_SINGLE_WORD) != 0 &&
            (is_word_before(scan->text, hit.start) || is_word_after(scan->text, hit.end, scan->n_bytes)))
            continue;
        if (hit.token != FKV_NO_TOKEN) extend_over_space(scan->text, at, scan->n_bytes, flags, &hit);
        if (hit.start > at) FKV_TRY(between(call, scan, at, hit.start, is_first && at == 0));
        if (hit.token != FKV_NO_TOKEN) fkv_encoding_put(call->encoding, hit.token);
        at = hit.end;
        if (scan->at < at) scan->at = at;
    }
    return FKV_OK;
}

static fkv_status between_normalized(text_call *call, const fkv_special_scan *scan, size_t start, size_t end, bool is_first) {
    return fkv_text_run_rest(&call->run, scan->text + start, end - start, is_first);
}

static fkv_special_scan scan_of(const text_call *call, const fkv_special_tokens *specials, const char *text, size_t n_bytes) {
    return (fkv_special_scan){.specials = specials,
                              .text = text,
                              .n_bytes = n_bytes,
                              .with_hidden = call->with_hidden,
                              .leftmost = call->tokenizer->source->leftmost};
}

static fkv_status encode_normalized(void *context, const char *text, size_t n_bytes, bool is_first) {
    text_call *call = context;
    fkv_special_scan scan = scan_of(call, &call->tokenizer->normalized_specials, text, n_bytes);
    fkv_status status = encode_specials(call, &scan, is_first, between_normalized);
    fkv_special_scan_close(&scan);
    return status;
}

/* Encodes the text between two special tokens. If any byte of this text is marked as provided by the caller, control tokens are
 * not matched in the normalized text. */
static fkv_status between_raw(text_call *call, const fkv_special_scan *scan, size_t start, size_t end, bool is_first) {
    call->with_hidden = scan->with_hidden && (scan->given == NULL || memchr(scan->given + start, 1, end - start) == NULL);
    return fkv_text_run_all(&call->run, scan->text + start, end - start, is_first);
}

static fkv_status encode_text(text_call *call, const char *text, const uint8_t *given, size_t n_bytes) {
    const fkv_tokenizer *tokenizer = call->tokenizer;
    fkv_encoding *encoding = call->encoding;
    fkv_special_scan scan = scan_of(call, &tokenizer->specials, text, n_bytes);
    scan.given = given;
    fkv_status status = fkv_text_run_open(&call->run, tokenizer->plan);
    call->run.context = call;
    call->run.put = encode_piece_of_plan;
    call->run.normalized = tokenizer->normalized_specials.n_tokens > 0 ? encode_normalized : NULL;
    if (status == FKV_OK) status = encode_specials(call, &scan, true, between_raw);
    fkv_text_run_close(&call->run);
    fkv_special_scan_close(&scan);
    fkv_scratch_close(&encoding->merge.scratch);
    fkv_scratch_close(&encoding->kept);
    return status;
}

fkv_status fkv_tokenizer_encode(const fkv_tokenizer *tokenizer, const char *text, const uint8_t *given, size_t n_bytes,
                                unsigned flags, uint32_t *tokens, size_t capacity, size_t *n_tokens) {
    *n_tokens = 0;
    FKV_REQUIRE(n_bytes <= MAX_TEXT_BYTES, FKV_BAD_ARGUMENT, "a text is %zu bytes long; at most %d can be tokenized in one call",
                n_bytes, MAX_TEXT_BYTES);
    fkv_encoding encoding = {.tokens = tokens, .capacity = capacity};
    const fkv_vocab_source *source = tokenizer->source;
    if ((flags & FKV_TOKENIZE_BOS) != 0 && source->add_bos && source->bos < tokenizer->n_tokens)
        fkv_encoding_put(&encoding, source->bos);
    if (tokenizer->kind == FKV_TOKENIZER_BYTE) {
        for (size_t i = 0; i < n_bytes; i++) fkv_encoding_put(&encoding, (uint8_t)text[i]);
    } else {
        text_call call = {.tokenizer = tokenizer, .encoding = &encoding, .with_hidden = (flags & FKV_TOKENIZE_SPECIAL) != 0};
        FKV_TRY(encode_text(&call, text, given, n_bytes));
    }
    if ((flags & FKV_TOKENIZE_EOS) != 0 && source->suffix < tokenizer->n_tokens) fkv_encoding_put(&encoding, source->suffix);
    *n_tokens = encoding.n_tokens;
    return FKV_OK;
}

/* ---- token properties ---------------------------------------------------------------------------------------- */

const char *fkv_tokenizer_name(const fkv_tokenizer *tokenizer) {
    static const char *const names[] = {[FKV_TOKENIZER_BYTE] = "byte", [FKV_TOKENIZER_BPE] = "bpe", [FKV_TOKENIZER_SPM] = "spm"};
    return names[tokenizer->kind];
}

bool fkv_tokenizer_has_chatml(const fkv_tokenizer *tokenizer) { return tokenizer->has_chatml; }

uint32_t fkv_tokenizer_ends(const fkv_tokenizer *tokenizer, uint32_t end[FKV_MAX_END_TOKENS]) {
    memcpy(end, tokenizer->end, sizeof tokenizer->end);
    return tokenizer->n_end;
}

const char *fkv_tokenizer_text(const fkv_tokenizer *tokenizer, uint32_t token, bool special, size_t *n_bytes) {
    *n_bytes = 0;
    if (token >= tokenizer->n_tokens) return "";
    if (!special && (tokenizer->kinds[token] & KIND_HIDDEN) != 0) return "";
    *n_bytes = tokenizer->text_at[token + 1] - tokenizer->text_at[token] - 1;
    return tokenizer->texts + tokenizer->text_at[token];
}
