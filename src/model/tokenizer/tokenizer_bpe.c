/* Byte-level BPE: a pattern cuts the text into words (PCRE2), and inside a word the neighbours with the earliest merge become
 * one.
 *
 * A vocabulary of this kind writes each byte as one printable character (GPT-2's table). Words are kept as plain bytes here, one
 * symbol for each; only the strings of the vocabulary are in that writing. A symbol's number is its token, or beyond the tokens
 * for a half of a merge that is no token, or DEAD for the result of a merge that nothing else speaks of.
 *
 * Text that is not UTF-8 is made so first, as llama.cpp does: what it reads as a character is written in its shortest form, and a
 * byte that begins none becomes U+FFFD.
 */
#include "tokenizer_parts.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <inttypes.h>
#include <pcre2.h>
#include <stdlib.h>

static const uint32_t DEAD = UINT32_MAX - 1;

/* How bytes are written: 1 or 2 bytes of UTF-8 each. */
typedef struct byte_writing {
    char text[256][2];
    uint8_t size[256];
    int16_t byte_of[0x180]; /* by character; -1: none */
} byte_writing;

struct fkv_bpe {
    pcre2_code *pattern;
    pcre2_match_context *limits;
    bool whole_words; /* a word that is a token is taken as it is, without merges */
    byte_writing writing;
    fkv_pair_map merges;          /* left << 32 | right to rank << 32 | result */
    uint32_t byte_symbol[256];    /* the symbol of each byte */
    uint32_t byte_tokens[256][2]; /* what a byte of a symbol that is no token becomes; FKV_NO_TOKEN: nothing */
};

/* ---- patterns ------------------------------------------------------------------------------------------------ */

/* Those of llama.cpp, which are those the models were trained with. White space is spelled out: \s of PCRE2 has U+180E in it, the
 * tokenizers' does not. SmolLM's two patterns, one digit at a time and then GPT-2's for what lies between, are one here: a digit
 * ends a text for what stands before it. */
#define SPACE "\\t-\\r\\x{85}\\p{Z}"
#define ENDINGS "'s|'t|'re|'ve|'m|'ll|'d"
#define ANY_CASE_ENDINGS "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
#define SPACES_UP_TO(word) "[" SPACE "]+(?![^" SPACE word "])|[" SPACE "]+"
#define MODERN(digits)                                                                                                           \
    ANY_CASE_ENDINGS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?[^" SPACE "\\p{L}\\p{N}]+[\\r\\n]*|[" SPACE                    \
                     "]*[\\r\\n]+|" SPACES_UP_TO("")

typedef struct pre_tokenizer {
    const char *name;
    const char *pattern;
    bool whole_words;
} pre_tokenizer;

static const pre_tokenizer PRE_TOKENIZERS[] = {
    {"gpt-2", ENDINGS "| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE "\\p{L}\\p{N}]+|" SPACES_UP_TO(""), false},
    {"smollm", "\\p{N}|" ENDINGS "| ?\\p{L}+| ?[^" SPACE "\\p{L}\\p{N}]+|" SPACES_UP_TO("\\p{N}"), false},
    {"qwen2", MODERN("\\p{N}"), false},
    {"deepseek-r1-qwen", MODERN("\\p{N}"), false},
    {"llama-bpe", MODERN("\\p{N}{1,3}"), true},
    {"llama3", MODERN("\\p{N}{1,3}"), true},
    {"llama-v3", MODERN("\\p{N}{1,3}"), true},
};
enum { N_PRE_TOKENIZERS = sizeof PRE_TOKENIZERS / sizeof PRE_TOKENIZERS[0] };

static fkv_status pattern_open(fkv_bpe *bpe, fkv_bytes name) {
    const pre_tokenizer *found = NULL;
    for (int i = 0; i < N_PRE_TOKENIZERS; i++) {
        const pre_tokenizer *one = &PRE_TOKENIZERS[i];
        if (strlen(one->name) == name.size && memcmp(one->name, name.data, name.size) == 0) found = one;
    }
    FKV_REQUIRE(name.size > 0, FKV_UNSUPPORTED,
                "the file does not name its pre-tokenizer (tokenizer.ggml.pre): convert the model again with a newer converter");
    FKV_REQUIRE(found != NULL, FKV_UNSUPPORTED, "the pre-tokenizer \"%s\" is not known; gpt-2, smollm, qwen2 and llama-bpe are",
                fkv_show(name).text);
    int error = 0;
    PCRE2_SIZE where = 0;
    bpe->whole_words = found->whole_words;
    bpe->pattern = pcre2_compile((PCRE2_SPTR)found->pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED,
                                 &error, &where, NULL);
    FKV_REQUIRE(bpe->pattern != NULL, FKV_UNSUPPORTED, "PCRE2 refuses the pattern of %s at %zu (error %d)", found->name, where,
                error);
    (void)pcre2_jit_compile(bpe->pattern, PCRE2_JIT_COMPLETE); /* where there is none, matching is slower */
    bpe->limits = pcre2_match_context_create(NULL);
    FKV_REQUIRE(bpe->limits != NULL, FKV_NO_MEMORY, "no memory for a PCRE2 match context");
    /* The patterns take linear time on any text; a run of a million spaces must not look like a bad pattern. */
    (void)pcre2_set_match_limit(bpe->limits, UINT32_MAX);
    return FKV_OK;
}

/* ---- bytes as characters ------------------------------------------------------------------------------------- */

/* Printable characters of Latin-1 stand for their byte, the others for U+0100 and on. */
static bool stands_for_itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

static void writing_make(byte_writing *writing) {
    uint32_t n_moved = 0;
    for (int i = 0; i < 0x180; i++) writing->byte_of[i] = -1;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t character = stands_for_itself(byte) ? byte : 0x100 + n_moved++;
        writing->size[byte] = character < 0x80 ? 1 : 2;
        writing->text[byte][0] = (char)(character < 0x80 ? character : 0xc0 | character >> 6);
        writing->text[byte][1] = (char)(character < 0x80 ? 0 : 0x80 | (character & 0x3f));
        writing->byte_of[character] = (int16_t)byte;
    }
}

size_t fkv_bpe_text(const fkv_tokenizer *tokenizer, fkv_bytes token, char *text) {
    const byte_writing *writing = &tokenizer->bpe->writing;
    size_t n = 0;
    for (size_t i = 0; i < token.size;) {
        uint8_t lead = (uint8_t)token.data[i];
        uint32_t step = fkv_utf8_step(token.data + i, token.size - i);
        uint32_t character = step == 1 ? lead : UINT32_MAX;
        if (step == 2) character = (lead & 0x1fu) << 6 | ((uint8_t)token.data[i + 1] & 0x3fu);
        if (character < 0x180 && writing->byte_of[character] >= 0) {
            text[n++] = (char)writing->byte_of[character];
        } else { /* not in this writing: as it is */
            memcpy(text + n, token.data + i, step);
            n += step;
        }
        i += step;
    }
    return n;
}

/* ---- vocabulary ---------------------------------------------------------------------------------------------- */

uint64_t fkv_bpe_n_strings(const fkv_vocab_source *source) { return 256 + 2 * (uint64_t)source->n_merges; }

/* The number of a string of the vocabulary; one that is no token gets the next free number. */
static fkv_status symbol_of(fkv_tokenizer *tokenizer, fkv_bytes string, uint32_t *n_symbols, uint32_t *symbol) {
    FKV_TRY(fkv_vocab_map_add(&tokenizer->map, string, *n_symbols, symbol));
    *n_symbols += *symbol == *n_symbols;
    return FKV_OK;
}

static fkv_status bytes_open(fkv_tokenizer *tokenizer, uint32_t *n_symbols) {
    fkv_bpe *bpe = tokenizer->bpe;
    for (int byte = 0; byte < 256; byte++) {
        fkv_bytes written = {bpe->writing.text[byte], bpe->writing.size[byte]};
        FKV_TRY(symbol_of(tokenizer, written, n_symbols, &bpe->byte_symbol[byte]));
        for (int i = 0; i < 2; i++) {
            uint32_t token =
                i < bpe->writing.size[byte] ? fkv_vocab_map_find(&tokenizer->map, &written.data[i], 1) : FKV_NO_TOKEN;
            bpe->byte_tokens[byte][i] = token < tokenizer->n_tokens ? token : FKV_NO_TOKEN;
        }
    }
    return FKV_OK;
}

static fkv_status merge_halves(fkv_bytes merge, uint32_t index, fkv_bytes *left, fkv_bytes *right) {
    const char *space = merge.size > 1 ? memchr(merge.data + 1, ' ', merge.size - 1) : NULL;
    FKV_REQUIRE(space != NULL && space + 1 < merge.data + merge.size, FKV_FILE_FORMAT,
                "merge %" PRIu32 " of the vocabulary is not two strings with a space between them", index);
    *left = (fkv_bytes){merge.data, (size_t)(space - merge.data)};
    *right = (fkv_bytes){space + 1, merge.size - left->size - 1};
    return FKV_OK;
}

/* First every half gets its number, then every result: a result without one is no token and no half of any merge. */
static fkv_status merges_open(fkv_tokenizer *tokenizer, uint32_t *n_symbols) {
    const fkv_vocab_source *source = tokenizer->source;
    fkv_bytes left = {0};
    fkv_bytes right = {0};
    uint32_t left_id = 0;
    uint32_t right_id = 0;
    for (uint32_t i = 0; i < source->n_merges; i++) {
        FKV_TRY(merge_halves(source->merges[i], i, &left, &right));
        FKV_TRY(symbol_of(tokenizer, left, n_symbols, &left_id));
        FKV_TRY(symbol_of(tokenizer, right, n_symbols, &right_id));
    }
    FKV_TRY(fkv_pair_map_open(&tokenizer->bpe->merges, source->n_merges));
    for (uint32_t i = 0; i < source->n_merges; i++) {
        FKV_TRY(merge_halves(source->merges[i], i, &left, &right));
        left_id = fkv_vocab_map_find(&tokenizer->map, left.data, left.size);
        right_id = fkv_vocab_map_find(&tokenizer->map, right.data, right.size);
        uint32_t result = fkv_vocab_map_find_joined(&tokenizer->map, left, right);
        if (result == FKV_NO_TOKEN) result = DEAD;
        FKV_TRY(fkv_pair_map_add(&tokenizer->bpe->merges, (uint64_t)left_id << 32 | right_id, (uint64_t)i << 32 | result));
    }
    return FKV_OK;
}

fkv_status fkv_bpe_open(fkv_tokenizer *tokenizer) {
    FKV_REQUIRE(tokenizer->source->n_merges > 0 && tokenizer->source->merges != NULL, FKV_FILE_FORMAT,
                "a BPE vocabulary without merges (tokenizer.ggml.merges)");
    fkv_bpe *bpe = calloc(1, sizeof *bpe);
    FKV_REQUIRE(bpe != NULL, FKV_NO_MEMORY, "no memory for %zu bytes of tokenizer", sizeof *bpe);
    tokenizer->bpe = bpe;
    uint32_t n_symbols = tokenizer->n_tokens;
    writing_make(&bpe->writing);
    FKV_TRY(pattern_open(bpe, tokenizer->source->pre));
    FKV_TRY(bytes_open(tokenizer, &n_symbols));
    return merges_open(tokenizer, &n_symbols);
}

void fkv_bpe_close(fkv_tokenizer *tokenizer) {
    fkv_bpe *bpe = tokenizer->bpe;
    if (bpe == NULL) return;
    pcre2_match_context_free(bpe->limits);
    pcre2_code_free(bpe->pattern);
    fkv_pair_map_close(&bpe->merges);
    free(bpe);
    tokenizer->bpe = NULL;
}

/* ---- words --------------------------------------------------------------------------------------------------- */

static void pair_rank(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end) {
    const fkv_bpe *bpe = context;
    (void)end;
    uint64_t found = fkv_pair_map_find(&bpe->merges, (uint64_t)symbols[left].id << 32 | symbols[symbols[left].next].id);
    if (found == FKV_NO_PAIR) return;
    symbols[left].rank = (uint32_t)(found >> 32);
    symbols[left].merged_id = (uint32_t)found;
}

static void put_symbol(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, uint32_t symbol,
                       fkv_encoding *encoding) {
    if (symbol < tokenizer->n_tokens) {
        fkv_encoding_put(encoding, symbol);
        return;
    }
    for (uint32_t i = 0; i < n_bytes; i++) {
        for (int j = 0; j < 2; j++) {
            uint32_t token = tokenizer->bpe->byte_tokens[(uint8_t)text[i]][j];
            if (token != FKV_NO_TOKEN) fkv_encoding_put(encoding, token);
        }
    }
}

static uint32_t whole_word(const fkv_tokenizer *tokenizer, const char *word, size_t n_bytes) {
    const byte_writing *writing = &tokenizer->bpe->writing;
    char written[2 * FKV_MAX_TOKEN_BYTES];
    size_t n = 0;
    if (n_bytes > FKV_MAX_TOKEN_BYTES) return FKV_NO_TOKEN;
    for (size_t i = 0; i < n_bytes; i++) {
        uint8_t byte = (uint8_t)word[i];
        memcpy(written + n, writing->text[byte], 2);
        n += writing->size[byte];
    }
    return fkv_vocab_map_find(&tokenizer->map, written, n);
}

static fkv_status encode_word(const fkv_tokenizer *tokenizer, const char *word, uint32_t n_bytes, fkv_encoding *encoding) {
    const fkv_bpe *bpe = tokenizer->bpe;
    if (bpe->whole_words) {
        uint32_t token = whole_word(tokenizer, word, n_bytes);
        if (token < tokenizer->n_tokens) {
            fkv_encoding_put(encoding, token);
            return FKV_OK;
        }
    }
    fkv_token_merge *merge = &encoding->merge;
    FKV_TRY(fkv_token_merge_prepare(merge, n_bytes));
    for (uint32_t i = 0; i < n_bytes; i++) {
        merge->symbols[i] =
            (fkv_symbol){.prev = i > 0 ? i - 1 : FKV_NO_SYMBOL, .next = i + 1, .id = bpe->byte_symbol[(uint8_t)word[i]]};
    }
    fkv_token_merge_run(merge, pair_rank, bpe);
    for (uint32_t i = 0; i < n_bytes; i = merge->symbols[i].next) {
        put_symbol(tokenizer, word + i, merge->symbols[i].next - i, merge->symbols[i].id, encoding);
    }
    return FKV_OK;
}

/* subject: the text as PCRE2 may see it, as long as the text and cut at the same places. */
static fkv_status encode_words(const fkv_tokenizer *tokenizer, const char *text, const char *subject, size_t n_bytes,
                               pcre2_match_data *match, fkv_encoding *encoding) {
    for (size_t at = 0; at < n_bytes;) {
        int n_found = pcre2_match(tokenizer->bpe->pattern, (PCRE2_SPTR)subject, n_bytes, at, PCRE2_NO_UTF_CHECK, match,
                                  tokenizer->bpe->limits);
        FKV_REQUIRE(n_found > 0, FKV_NO_MEMORY, "PCRE2 could not find the next word of the text at byte %zu (error %d)", at,
                    n_found);
        size_t end = pcre2_get_ovector_pointer(match)[1];
        FKV_ASSERT(end > at && end <= n_bytes);
        FKV_TRY(encode_word(tokenizer, text + at, (uint32_t)(end - at), encoding));
        at = end;
    }
    return FKV_OK;
}

/* ---- text as PCRE2 takes it -------------------------------------------------------------------------------- */

/* Reads one character of any form of UTF-8 that has one; 0 bytes: none begins here. Long forms and surrogates are read. */
static uint32_t character_read(const uint8_t *text, size_t n_bytes, uint32_t *character) {
    uint32_t n = text[0] < 0x80 ? 1 : text[0] < 0xc0 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : text[0] < 0xf8 ? 4 : 0;
    if (n == 0 || n > n_bytes) return 0;
    *character = n == 1 ? text[0] : text[0] & (0x7fu >> n);
    for (uint32_t i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80) return 0;
        *character = *character << 6 | (text[i] & 0x3fu);
    }
    return *character <= 0x10ffff ? n : 0;
}

static uint32_t character_size(uint32_t character) {
    return character < 0x80 ? 1 : character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
}

/* Letters and numbers of Unicode 15.1 that PCRE2's tables may be too old for, and surrogates, which it takes for no text. */
typedef struct stand_in_range {
    uint32_t first, last;
    uint32_t character; /* of the same length, a letter, number or neither as they are */
} stand_in_range;

enum { SOME_LETTER = 0x20000, SOME_NUMBER = 0x1d7ce, NEITHER = 0xe000 };

static const stand_in_range STAND_INS[] = {
    {0xd800, 0xdfff, NEITHER},       {0x1123f, 0x11240, SOME_LETTER}, {0x11f02, 0x11f02, SOME_LETTER},
    {0x11f04, 0x11f10, SOME_LETTER}, {0x11f12, 0x11f33, SOME_LETTER}, {0x11f50, 0x11f59, SOME_NUMBER},
    {0x1342f, 0x1342f, SOME_LETTER}, {0x13441, 0x13446, SOME_LETTER}, {0x1b132, 0x1b132, SOME_LETTER},
    {0x1b155, 0x1b155, SOME_LETTER}, {0x1d2c0, 0x1d2d3, SOME_NUMBER}, {0x1df25, 0x1df2a, SOME_LETTER},
    {0x1e030, 0x1e06d, SOME_LETTER}, {0x1e4d0, 0x1e4eb, SOME_LETTER}, {0x1e4f0, 0x1e4f9, SOME_NUMBER},
    {0x2b739, 0x2b739, SOME_LETTER}, {0x2ebf0, 0x2ee5d, SOME_LETTER}, {0x31350, 0x323af, SOME_LETTER},
};

/* The character that PCRE2 sees. */
static uint32_t seen_as(uint32_t character) {
    for (size_t i = 0; i < sizeof STAND_INS / sizeof STAND_INS[0] && character >= STAND_INS[i].first; i++) {
        if (character <= STAND_INS[i].last) return STAND_INS[i].character;
    }
    return character;
}

/* UTF-8 that PCRE2 sees as llama.cpp does. */
static bool is_plain(const char *text, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes;) {
        uint64_t eight = 0;
        if (n_bytes - at >= 8) memcpy(&eight, text + at, 8);
        if (n_bytes - at >= 8 && (eight & UINT64_C(0x8080808080808080)) == 0) {
            at += 8;
            continue;
        }
        uint32_t character = 0;
        uint32_t n = character_read((const uint8_t *)text + at, n_bytes - at, &character);
        if (n == 0 || n != character_size(character) || seen_as(character) != character) return false;
        at += n;
    }
    return true;
}

static uint32_t character_write(uint32_t character, char *out) {
    static const uint8_t lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    uint32_t n = character_size(character);
    for (uint32_t i = n; i-- > 1; character >>= 6) out[i] = (char)(0x80 | (character & 0x3f));
    out[0] = (char)(lead[n] | character);
    return n;
}

/* text: what the words are made of, subject: what PCRE2 sees; [3 n_bytes] each. Returns how long both are. */
static size_t mend(const char *from, size_t n_bytes, char *text, char *subject) {
    size_t n = 0;
    for (size_t at = 0; at < n_bytes;) {
        uint32_t character = 0;
        uint32_t step = character_read((const uint8_t *)from + at, n_bytes - at, &character);
        if (step == 0) {
            character = 0xfffd;
            step = 1;
        }
        (void)character_write(seen_as(character), subject + n);
        n += character_write(character, text + n);
        at += step;
    }
    return n;
}

fkv_status fkv_bpe_encode(const fkv_tokenizer *tokenizer, const char *text, size_t n_bytes, fkv_encoding *encoding) {
    const char *subject = text;
    if (!is_plain(text, n_bytes)) {
        FKV_TRY(fkv_scratch_need(&encoding->text, 6 * (uint64_t)n_bytes));
        char *mended = encoding->text.block;
        char *seen = mended + 3 * n_bytes;
        n_bytes = mend(text, n_bytes, mended, seen);
        subject = seen;
        text = mended;
    }
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    FKV_REQUIRE(match != NULL, FKV_NO_MEMORY, "no memory for a PCRE2 match");
    fkv_status status = encode_words(tokenizer, text, subject, n_bytes, match, encoding);
    pcre2_match_data_free(match);
    return status;
}
