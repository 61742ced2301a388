/* Internals of the tokenizer: its state, the state of one encode call, and the functions of BPE and SentencePiece vocabularies.
 */
#ifndef FKV_TOKENIZER_PARTS_H
#define FKV_TOKENIZER_PARTS_H

#include "special_tokens.h"
#include "text_plan.h"
#include "token_merge.h"
#include "tokenizer.h"
#include "vocab_map.h"

typedef struct fkv_bpe fkv_bpe;
typedef struct fkv_spm fkv_spm;

typedef enum fkv_tokenizer_kind { FKV_TOKENIZER_BYTE, FKV_TOKENIZER_BPE, FKV_TOKENIZER_SPM } fkv_tokenizer_kind;

struct fkv_tokenizer {
    fkv_tokenizer_kind kind;
    const fkv_vocab_source *source;
    uint32_t n_tokens;
    fkv_vocab_map map; /* token strings as stored in the file; BPE adds the left and right strings of merges, with ids of n_tokens
                          or more. This field and all following fields are read-only after the tokenizer is opened */
    fkv_special_tokens specials;
    fkv_special_tokens normalized_specials; /* special tokens that are matched in normalized text; most vocabularies have none */
    fkv_text_plan *plan;
    fkv_pair_map merges; /* BPE: maps (left << 32 | right) to (rank << 32 | result) */
    bool by_merges;      /* true for a SentencePiece vocabulary in which merges are ordered by merge rank instead of score */
    bool whole_words;    /* true if a word that is a token is emitted without applying merges */
    uint8_t *kinds;      /* [n_tokens] combinations of the token_kind bits that tokenizer.c defines */
    uint32_t *text_at;   /* [n_tokens + 1] offset of each token's 0-terminated text in texts */
    char *texts;
    uint32_t n_end;
    uint32_t end[FKV_MAX_END_TOKENS];
    bool has_chatml;
    fkv_bpe *bpe;
    fkv_spm *spm;
};

/* State of one fkv_tokenizer_encode() call: output tokens and scratch memory. */
typedef struct fkv_encoding {
    uint32_t *tokens;
    size_t capacity;
    size_t n_tokens;
    fkv_token_merge merge;
    fkv_scratch kept; /* copy of a word, without its unknown characters */
    bool in_unknown;  /* true if the last token is unk; unknown text that follows may be merged into it */
} fkv_encoding;

FKV_INLINE void fkv_encoding_put(fkv_encoding *encoding, uint32_t token) {
    if (encoding->n_tokens < encoding->capacity) encoding->tokens[encoding->n_tokens] = token;
    encoding->n_tokens++;
}

/* Returns the length of the first character according to its lead byte, but at most n_bytes. n_bytes must be positive. */
FKV_INLINE uint32_t fkv_utf8_step(const char *text, size_t n_bytes) {
    static const uint8_t steps[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
    uint32_t step = steps[(uint8_t)text[0] >> 4];
    return step <= n_bytes ? step : (uint32_t)n_bytes;
}

/* Byte-level BPE. Must be opened after tokenizer->map contains all tokens. fkv_bpe_encode() encodes one of the
 * pieces into which a text plan splits a text. A piece must be shorter than 2^31 bytes. */
fkv_status fkv_bpe_open(fkv_tokenizer *tokenizer);
void fkv_bpe_close(fkv_tokenizer *tokenizer);
fkv_status fkv_bpe_encode(const fkv_tokenizer *tokenizer, const char *word, uint32_t n_bytes, fkv_encoding *encoding);
size_t fkv_bpe_text(const fkv_tokenizer *tokenizer, fkv_bytes token, char *text); /* decodes a token string; text: [token.size] */
uint64_t
fkv_bpe_n_strings(const fkv_vocab_source *source); /* returns an upper bound on the number of strings that BPE adds to the map */

/* Assigns ids, starting with *n_symbols, to the left and right strings of merges, and fills tokenizer->merges, which
 * fkv_merge_rank() uses. */
fkv_status fkv_merges_open(fkv_tokenizer *tokenizer, uint32_t *n_symbols);
void fkv_merge_rank(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end);

fkv_status fkv_spm_open(fkv_tokenizer *tokenizer);
void fkv_spm_close(fkv_tokenizer *tokenizer);
void fkv_spm_steps(bool space_before,
                   fkv_text_steps *steps); /* writes the steps of a GGUF vocabulary, which replace spaces with U+2581 */
fkv_status fkv_spm_encode(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, fkv_encoding *encoding);
size_t fkv_spm_text(fkv_bytes token, char *text);

#endif
