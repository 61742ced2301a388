/* SentencePiece as in llama.cpp: adjacent characters are merged into the token with the highest score; among equal scores, the
 * leftmost pair is merged first. Characters that are not tokens become byte tokens. Spaces are represented by U+2581.
 * tokenizer.json describes the same vocabularies as BPE over characters. The only difference is the order of merges, which
 * follows the merge list instead of the scores.
 *
 * The text is split at every pair of characters that are not adjacent in any token. No merge can cross such a boundary, so
 * tokenizing the parts gives the same result as tokenizing the whole text, with less memory. A bit set, similar to a Bloom
 * filter, contains the pairs of characters that are adjacent in some token. A false positive in this set only prevents a possible
 * split.
 */
#include "tokenizer_parts.h"

#include <inttypes.h>
#include <stdlib.h>

enum { MIN_NEIGHBOUR_BITS = 1 << 12, MAX_NEIGHBOUR_BITS = 1 << 22 };

struct fkv_spm {
    uint32_t byte_token[256];  /* token of each byte; FKV_NO_TOKEN if there is none */
    uint64_t *neighbours;      /* [n_neighbour_bits / 64] */
    uint32_t n_neighbour_bits; /* number of bits in `neighbours`, a power of two */
};

static const char SPACE[] = "\xe2\x96\x81";
enum { SPACE_BYTES = sizeof SPACE - 1 };

/* ---- adjacent characters ---------------------------------------------------------------------------------------------- */

static uint32_t character_key(const char *text, uint32_t n_bytes) {
    uint32_t character = 0;
    memcpy(&character, text, n_bytes);
    return character;
}

static uint32_t neighbour_bit(const fkv_spm *spm, uint32_t left, uint32_t right) {
    return (uint32_t)(fkv_mix_u64((uint64_t)left << 32 | right) >> 8) & (spm->n_neighbour_bits - 1);
}

static void neighbours_add(fkv_spm *spm, fkv_bytes token) {
    uint32_t left = 0;
    for (size_t at = 0; at < token.size;) {
        uint32_t step = fkv_utf8_step(token.data + at, token.size - at);
        uint32_t right = character_key(token.data + at, step);
        uint32_t bit = neighbour_bit(spm, left, right);
        if (at > 0) spm->neighbours[bit / 64] |= UINT64_C(1) << bit % 64;
        left = right;
        at += step;
    }
}

static fkv_status neighbours_open(fkv_tokenizer *tokenizer) {
    const fkv_vocab_source *source = tokenizer->source;
    fkv_spm *spm = tokenizer->spm;
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < source->n_tokens; i++) n_bytes += source->tokens[i].size;
    spm->n_neighbour_bits = MIN_NEIGHBOUR_BITS;
    while (spm->n_neighbour_bits < 16 * n_bytes && spm->n_neighbour_bits < MAX_NEIGHBOUR_BITS) spm->n_neighbour_bits *= 2;
    spm->neighbours = calloc(1, spm->n_neighbour_bits / 8);
    FKV_REQUIRE(spm->neighbours != NULL, FKV_NO_MEMORY, "out of memory allocating a tokenizer (%u bytes)",
                spm->n_neighbour_bits / 8);
    for (uint32_t i = 0; i < source->n_tokens; i++) neighbours_add(spm, source->tokens[i]);
    return FKV_OK;
}

static bool neighbours_have(const fkv_spm *spm, uint32_t left, uint32_t right) {
    uint32_t bit = neighbour_bit(spm, left, right);
    return (spm->neighbours[bit / 64] >> bit % 64 & 1) != 0;
}

/* ---- vocabulary ---------------------------------------------------------------------------------------------- */

static uint32_t byte_token_of(const fkv_tokenizer *tokenizer, int byte) {
    static const char hex[] = "0123456789ABCDEF";
    const fkv_vocab_source *source = tokenizer->source;
    const char name[] = {'<', '0', 'x', hex[byte >> 4], hex[byte & 15], '>'};
    const char self = (char)byte;
    uint32_t token = fkv_vocab_map_find(&tokenizer->map, name, sizeof name);
    if (source->steps != NULL) return source->byte_fallback && token < tokenizer->n_tokens ? token : FKV_NO_TOKEN;
    if (token == FKV_NO_TOKEN) token = fkv_vocab_map_find(&tokenizer->map, &self, 1);
    if (token == FKV_NO_TOKEN && source->unk < source->n_tokens) token = source->unk;
    return token < tokenizer->n_tokens ? token : FKV_NO_TOKEN;
}

fkv_status fkv_spm_open(fkv_tokenizer *tokenizer) {
    fkv_spm *spm = calloc(1, sizeof *spm);
    FKV_REQUIRE(spm != NULL, FKV_NO_MEMORY, "out of memory allocating a tokenizer (%zu bytes)", sizeof *spm);
    tokenizer->spm = spm;
    FKV_TRY(neighbours_open(tokenizer));
    uint32_t n_symbols = tokenizer->n_tokens;
    if (tokenizer->by_merges) FKV_TRY(fkv_merges_open(tokenizer, &n_symbols));
    for (int byte = 0; byte < 256; byte++) spm->byte_token[byte] = byte_token_of(tokenizer, byte);
    return FKV_OK;
}

void fkv_spm_close(fkv_tokenizer *tokenizer) {
    fkv_spm *spm = tokenizer->spm;
    if (spm == NULL) return;
    free(spm->neighbours);
    free(spm);
    tokenizer->spm = NULL;
}

size_t fkv_spm_text(fkv_bytes token, char *text) {
    size_t n = 0;
    for (size_t i = 0; i < token.size;) {
        bool space = token.size - i >= SPACE_BYTES && memcmp(token.data + i, SPACE, SPACE_BYTES) == 0;
        text[n++] = space ? ' ' : token.data[i];
        i += space ? SPACE_BYTES : 1;
    }
    return n;
}

/* ---- encoding ---------------------------------------------------------------------------------------------------- */

typedef struct piece_view {
    const fkv_tokenizer *tokenizer;
    const char *text;
} piece_view;

/* Maps a score to a rank: the higher the score, the lower the rank. NaN is mapped to the highest rank. */
static uint32_t rank_of_score(float score) {
    uint32_t bits = 0;
    if (score != score) return FKV_NO_MERGE - 1;
    score += 0.0f; /* turns -0 into +0, so that both have equal ranks */
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 != 0 ? bits : ~(bits | UINT32_C(1) << 31);
}

static void score_rank(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end) {
    const piece_view *piece = context;
    const fkv_vocab_source *source = piece->tokenizer->source;
    uint32_t token = fkv_vocab_map_find(&piece->tokenizer->map, piece->text + left, end - left);
    if (token == FKV_NO_TOKEN) return;
    symbols[left].rank = rank_of_score(source->scores != NULL ? source->scores[token] : 0);
    symbols[left].merged_id = token;
}

/* Emits tokens for unknown text, as tokenizer.json specifies: byte tokens if the vocabulary has a byte token for every byte of
 * the text, otherwise an unk token. With fuse_unk, consecutive unknown characters share one unk token. */
static void put_unknown(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, fkv_encoding *encoding) {
    const fkv_vocab_source *source = tokenizer->source;
    bool has_all = source->byte_fallback;
    for (uint32_t i = 0; i < n_bytes; i++) has_all = has_all && tokenizer->spm->byte_token[(uint8_t)text[i]] != FKV_NO_TOKEN;
    for (uint32_t i = 0; i < n_bytes && has_all; i++) fkv_encoding_put(encoding, tokenizer->spm->byte_token[(uint8_t)text[i]]);
    bool is_unknown = !has_all && source->unk < source->n_tokens;
    if (is_unknown && !(encoding->in_unknown && source->fuse_unk)) fkv_encoding_put(encoding, source->unk);
    encoding->in_unknown = is_unknown;
}

static void put_spm_symbol(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, uint32_t token,
                           fkv_encoding *encoding) {
    if (token < tokenizer->n_tokens) {
        fkv_encoding_put(encoding, token);
        encoding->in_unknown = false;
        return;
    }
    if (tokenizer->source->steps != NULL) {
        put_unknown(tokenizer, text, n_bytes, encoding);
        return;
    }
    for (uint32_t i = 0; i < n_bytes; i++) {
        uint32_t byte_token = tokenizer->spm->byte_token[(uint8_t)text[i]];
        if (byte_token != FKV_NO_TOKEN) fkv_encoding_put(encoding, byte_token);
    }
}

static fkv_status encode_spm_piece(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, fkv_encoding *encoding) {
    fkv_token_merge *merge = &encoding->merge;
    FKV_TRY(fkv_token_merge_prepare(merge, n_bytes));
    uint32_t prev = FKV_NO_SYMBOL;
    for (uint32_t at = 0; at < n_bytes;) {
        uint32_t next = at + fkv_utf8_step(text + at, n_bytes - at);
        uint32_t token = fkv_vocab_map_find(&tokenizer->map, text + at, next - at);
        merge->symbols[at] = (fkv_symbol){.prev = prev, .next = next, .id = token};
        prev = at;
        at = next;
    }
    piece_view piece = {.tokenizer = tokenizer, .text = text};
    if (tokenizer->by_merges)
        fkv_token_merge_run(merge, fkv_merge_rank, &tokenizer->merges);
    else
        fkv_token_merge_run(merge, score_rank, &piece);
    for (uint32_t at = 0; at < n_bytes; at = merge->symbols[at].next) {
        put_spm_symbol(tokenizer, text + at, merge->symbols[at].next - at, merge->symbols[at].id, encoding);
    }
    return FKV_OK;
}

void fkv_spm_steps(bool space_before, fkv_text_steps *steps) {
    static const fkv_bytes space = {SPACE, SPACE_BYTES};
    static const fkv_bytes blank = {" ", 1};
    *steps = (fkv_text_steps){0};
    steps->steps[steps->n_steps++] = (fkv_text_step){.kind = FKV_STEP_REPLACE, .pattern = blank, .text = space};
    if (space_before) steps->steps[steps->n_steps++] = (fkv_text_step){.kind = FKV_STEP_PREPEND, .text = space};
    steps->n_normalizers = steps->n_steps;
}

/* Removes unknown characters before merging, as tokenizer.json specifies for vocabularies without an unk token. */
static fkv_status drop_unknown_characters(const fkv_tokenizer *tokenizer, const char **text, uint32_t *n_bytes,
                                          fkv_encoding *encoding) {
    const fkv_vocab_source *source = tokenizer->source;
    if (source->steps == NULL || source->byte_fallback || source->unk != FKV_NO_TOKEN) return FKV_OK;
    FKV_TRY(fkv_scratch_need(&encoding->kept, *n_bytes));
    char *kept = encoding->kept.block;
    uint32_t n = 0;
    for (uint32_t at = 0; at < *n_bytes;) {
        uint32_t step = fkv_utf8_step(*text + at, *n_bytes - at);
        bool known = fkv_vocab_map_find(&tokenizer->map, *text + at, step) < tokenizer->n_tokens;
        if (known) memcpy(kept + n, *text + at, step);
        n += known ? step : 0;
        at += step;
    }
    *text = kept;
    *n_bytes = n;
    return FKV_OK;
}

fkv_status fkv_spm_encode(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, fkv_encoding *encoding) {
    uint32_t left = 0;
    uint32_t start = 0;
    encoding->in_unknown = false;
    if (tokenizer->whole_words) {
        uint32_t token = fkv_vocab_map_find(&tokenizer->map, text, n_bytes);
        if (token < tokenizer->n_tokens) {
            fkv_encoding_put(encoding, token);
            return FKV_OK;
        }
    }
    FKV_TRY(drop_unknown_characters(tokenizer, &text, &n_bytes, encoding));
    for (uint32_t at = 0; at < n_bytes;) {
        uint32_t step = fkv_utf8_step(text + at, n_bytes - at);
        uint32_t right = character_key(text + at, step);
        if (at > start && !neighbours_have(tokenizer->spm, left, right)) {
            FKV_TRY(encode_spm_piece(tokenizer, text + start, at - start, encoding));
            start = at;
        }
        left = right;
        at += step;
    }
    return start < n_bytes ? encode_spm_piece(tokenizer, text + start, n_bytes - start, encoding) : FKV_OK;
}
