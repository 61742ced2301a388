/* Byte-level BPE: repeatedly merges the adjacent pair of symbols with the lowest merge rank within a word.
 *
 * Vocabularies of this kind represent each byte as a printable character (GPT-2's byte-to-unicode table). Only vocabulary strings
 * use the table; words remain plain bytes, with one initial symbol per byte. A merge concatenates a left and a right string. The
 * id of a symbol is its token id. Left and right strings that are not tokens have ids of n_tokens or more. The result of a merge
 * has the id DEAD if it is neither a token nor the left or right string of any merge.
 */
#include "tokenizer_parts.h"

#include <stdlib.h>

static const uint32_t DEAD = UINT32_MAX - 1;

/* GPT-2's byte-to-unicode table: the printable character of each byte, in 1 or 2 bytes of UTF-8. */
typedef struct byte_table {
    char text[256][2];
    uint8_t size[256];
    int16_t byte_of[0x180]; /* byte that each character represents; -1 if the character is not in the table */
} byte_table;

struct fkv_bpe {
    byte_table table;
    bool drops_bytes;             /* true if bytes without a token are removed before merging, as tokenizer.json requires */
    uint32_t byte_symbol[256];    /* initial symbol of each byte */
    uint32_t byte_tokens[256][2]; /* tokens of the UTF-8 bytes of each byte's printable character, for bytes without a token;
                                     unused entries are FKV_NO_TOKEN */
};

/* ---- byte-to-unicode table ------------------------------------------------------------------------------------- */

/* Returns whether the byte is a printable Latin-1 character, which represents itself. The other bytes are represented by the
 * characters from U+0100. */
static bool is_own_character(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

static void byte_table_init(byte_table *table) {
    uint32_t n_moved = 0;
    for (int i = 0; i < 0x180; i++) table->byte_of[i] = -1;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t character = is_own_character(byte) ? byte : 0x100 + n_moved++;
        table->size[byte] = character < 0x80 ? 1 : 2;
        table->text[byte][0] = (char)(character < 0x80 ? character : 0xc0 | character >> 6);
        table->text[byte][1] = (char)(character < 0x80 ? 0 : 0x80 | (character & 0x3f));
        table->byte_of[character] = (int16_t)byte;
    }
}

size_t fkv_bpe_text(const fkv_tokenizer *tokenizer, fkv_bytes token, char *text) {
    const byte_table *table = &tokenizer->bpe->table;
    size_t n = 0;
    for (size_t i = 0; i < token.size;) {
        uint8_t lead = (uint8_t)token.data[i];
        uint32_t step = fkv_utf8_step(token.data + i, token.size - i);
        uint32_t character = step == 1 ? lead : UINT32_MAX;
        if (step == 2) character = (lead & 0x1fu) << 6 | ((uint8_t)token.data[i + 1] & 0x3fu);
        if (character < 0x180 && table->byte_of[character] >= 0) {
            text[n++] = (char)table->byte_of[character];
        } else { /* characters that are not in the table are copied unchanged */
            memcpy(text + n, token.data + i, step);
            n += step;
        }
        i += step;
    }
    return n;
}

/* ---- vocabulary ---------------------------------------------------------------------------------------------- */

uint64_t fkv_bpe_n_strings(const fkv_vocab_source *source) { return 256 + 2 * (uint64_t)source->n_merges; }

/* Sets *symbol to the id of a vocabulary string. A string that has no id yet gets the next free id. */
static fkv_status symbol_id(fkv_tokenizer *tokenizer, fkv_bytes string, uint32_t *n_symbols, uint32_t *symbol) {
    FKV_TRY(fkv_vocab_map_add(&tokenizer->map, string, *n_symbols, symbol));
    *n_symbols += *symbol == *n_symbols;
    return FKV_OK;
}

/* Sets the initial symbols of all bytes. As in llama.cpp, a byte without a token is encoded as the UTF-8 bytes of its printable
 * character, with one token for each of these bytes. */
static fkv_status byte_symbols_open(fkv_tokenizer *tokenizer, uint32_t *n_symbols) {
    fkv_bpe *bpe = tokenizer->bpe;
    for (int byte = 0; byte < 256; byte++) {
        fkv_bytes written = {bpe->table.text[byte], bpe->table.size[byte]};
        FKV_TRY(symbol_id(tokenizer, written, n_symbols, &bpe->byte_symbol[byte]));
        if (tokenizer->source->steps != NULL && bpe->byte_symbol[byte] >= tokenizer->n_tokens) bpe->drops_bytes = true;
        for (int i = 0; i < 2; i++) {
            uint32_t token = i < bpe->table.size[byte] ? fkv_vocab_map_find(&tokenizer->map, &written.data[i], 1) : FKV_NO_TOKEN;
            bpe->byte_tokens[byte][i] = token < tokenizer->n_tokens ? token : FKV_NO_TOKEN;
        }
    }
    return FKV_OK;
}

static fkv_status merge_halves(const fkv_vocab_source *source, uint32_t index, fkv_bytes *left, fkv_bytes *right) {
    fkv_bytes merge = source->merges[index];
    if (source->merge_rights != NULL) {
        *left = merge;
        *right = source->merge_rights[index];
        FKV_REQUIRE(left->size > 0 && right->size > 0, FKV_FILE_FORMAT,
                    "merge %u of the vocabulary has an empty left or right string", index);
        return FKV_OK;
    }
    const char *space = merge.size > 1 ? memchr(merge.data + 1, ' ', merge.size - 1) : NULL;
    FKV_REQUIRE(space != NULL && space + 1 < merge.data + merge.size, FKV_FILE_FORMAT,
                "merge %u of the vocabulary must consist of two strings separated by a space", index);
    *left = (fkv_bytes){merge.data, (size_t)(space - merge.data)};
    *right = (fkv_bytes){space + 1, merge.size - left->size - 1};
    return FKV_OK;
}

/* Assigns ids to the left and right strings of all merges, then looks up the ids of the merged strings. A merged string without
 * an id is neither a token nor the left or right string of another merge. */
fkv_status fkv_merges_open(fkv_tokenizer *tokenizer, uint32_t *n_symbols) {
    const fkv_vocab_source *source = tokenizer->source;
    fkv_bytes left = {0};
    fkv_bytes right = {0};
    uint32_t left_id = 0;
    uint32_t right_id = 0;
    FKV_REQUIRE(source->n_merges > 0 && source->merges != NULL, FKV_FILE_FORMAT,
                "the BPE vocabulary has no merges (tokenizer.ggml.merges)");
    for (uint32_t i = 0; i < source->n_merges; i++) {
        FKV_TRY(merge_halves(source, i, &left, &right));
        FKV_TRY(symbol_id(tokenizer, left, n_symbols, &left_id));
        FKV_TRY(symbol_id(tokenizer, right, n_symbols, &right_id));
    }
    FKV_TRY(fkv_pair_map_open(&tokenizer->merges, source->n_merges));
    for (uint32_t i = 0; i < source->n_merges; i++) {
        FKV_TRY(merge_halves(source, i, &left, &right));
        left_id = fkv_vocab_map_find(&tokenizer->map, left.data, left.size);
        right_id = fkv_vocab_map_find(&tokenizer->map, right.data, right.size);
        uint32_t result = fkv_vocab_map_find_joined(&tokenizer->map, left, right);
        if (result == FKV_NO_TOKEN) result = DEAD;
        FKV_TRY(fkv_pair_map_add(&tokenizer->merges, (uint64_t)left_id << 32 | right_id, (uint64_t)i << 32 | result));
    }
    return FKV_OK;
}

fkv_status fkv_bpe_open(fkv_tokenizer *tokenizer) {
    fkv_bpe *bpe = calloc(1, sizeof *bpe);
    FKV_REQUIRE(bpe != NULL, FKV_NO_MEMORY, "out of memory allocating a tokenizer (%zu bytes)", sizeof *bpe);
    tokenizer->bpe = bpe;
    uint32_t n_symbols = tokenizer->n_tokens;
    byte_table_init(&bpe->table);
    FKV_TRY(byte_symbols_open(tokenizer, &n_symbols));
    return fkv_merges_open(tokenizer, &n_symbols);
}

void fkv_bpe_close(fkv_tokenizer *tokenizer) {
    fkv_bpe *bpe = tokenizer->bpe;
    if (bpe == NULL) return;
    free(bpe);
    tokenizer->bpe = NULL;
}

/* ---- words --------------------------------------------------------------------------------------------------- */

void fkv_merge_rank(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end) {
    const fkv_pair_map *merges = context;
    (void)end;
    uint64_t found = fkv_pair_map_find(merges, (uint64_t)symbols[left].id << 32 | symbols[symbols[left].next].id);
    if (found == FKV_NO_PAIR) return;
    symbols[left].rank = (uint32_t)(found >> 32);
    symbols[left].merged_id = (uint32_t)found;
}

static void put_bpe_symbol(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, uint32_t symbol,
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

static uint32_t find_whole_word(const fkv_tokenizer *tokenizer, const char *word, size_t n_bytes) {
    const byte_table *table = &tokenizer->bpe->table;
    char written[2 * FKV_MAX_TOKEN_BYTES];
    size_t n = 0;
    if (n_bytes > FKV_MAX_TOKEN_BYTES) return FKV_NO_TOKEN;
    for (size_t i = 0; i < n_bytes; i++) {
        uint8_t byte = (uint8_t)word[i];
        memcpy(written + n, table->text[byte], 2);
        n += table->size[byte];
    }
    return fkv_vocab_map_find(&tokenizer->map, written, n);
}

static fkv_status drop_unknown_bytes(const fkv_tokenizer *tokenizer, const char **word, uint32_t *n_bytes,
                                     fkv_encoding *encoding) {
    if (!tokenizer->bpe->drops_bytes) return FKV_OK;
    FKV_TRY(fkv_scratch_need(&encoding->kept, *n_bytes));
    char *kept = encoding->kept.block;
    uint32_t n = 0;
    for (uint32_t i = 0; i < *n_bytes; i++)
        if (tokenizer->bpe->byte_symbol[(uint8_t)(*word)[i]] < tokenizer->n_tokens) kept[n++] = (*word)[i];
    *word = kept;
    *n_bytes = n;
    return FKV_OK;
}

fkv_status fkv_bpe_encode(const fkv_tokenizer *tokenizer, const char *word, uint32_t n_bytes, fkv_encoding *encoding) {
    const fkv_bpe *bpe = tokenizer->bpe;
    if (tokenizer->whole_words) {
        uint32_t token = find_whole_word(tokenizer, word, n_bytes);
        if (token < tokenizer->n_tokens) {
            fkv_encoding_put(encoding, token);
            return FKV_OK;
        }
    }
    FKV_TRY(drop_unknown_bytes(tokenizer, &word, &n_bytes, encoding));
    if (n_bytes == 0) return FKV_OK;
    fkv_token_merge *merge = &encoding->merge;
    FKV_TRY(fkv_token_merge_prepare(merge, n_bytes));
    for (uint32_t i = 0; i < n_bytes; i++) {
        merge->symbols[i] =
            (fkv_symbol){.prev = i > 0 ? i - 1 : FKV_NO_SYMBOL, .next = i + 1, .id = bpe->byte_symbol[(uint8_t)word[i]]};
    }
    fkv_token_merge_run(merge, fkv_merge_rank, &tokenizer->merges);
    for (uint32_t i = 0; i < n_bytes; i = merge->symbols[i].next) {
        put_bpe_symbol(tokenizer, word + i, merge->symbols[i].next - i, merge->symbols[i].id, encoding);
    }
    return FKV_OK;
}
