/* What the files of the tokenizer share: the tokenizer itself, one call of it, and the two kinds of vocabulary behind it.
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
    fkv_vocab_map map; /* taken at open with everything below, not changed until close. Token texts as the file writes them; bpe
                          adds the halves of merges, numbered from n_tokens on */
    fkv_special_tokens specials;
    fkv_special_tokens normalized_specials; /* found in normalized text; most vocabularies have none */
    fkv_text_plan *plan;
    fkv_pair_map merges; /* bpe: left << 32 | right to rank << 32 | result */
    bool by_merges;      /* spm: the order of merging is that of the merges, not that of the scores */
    bool whole_words;    /* a word that is a token is taken as it is, without merges */
    uint8_t *kinds;      /* [n_tokens] of token_kind, tokenizer.c */
    uint32_t *text_at;   /* [n_tokens + 1] where a token's text starts in texts; a 0 ends each */
    char *texts;
    uint32_t n_end;
    uint32_t end[FKV_MAX_END_TOKENS];
    bool has_chatml;
    fkv_bpe *bpe;
    fkv_spm *spm;
};

/* One fkv_tokenizer_encode() under way: where tokens go, and memory that ends with it. */
typedef struct fkv_encoding {
    uint32_t *tokens;
    size_t capacity;
    size_t n_tokens;
    fkv_token_merge merge;
    fkv_scratch kept; /* a word without what the vocabulary does not know */
    bool in_unknown;  /* the last token stands for unknown text, and what follows may be part of it */
} fkv_encoding;

FKV_INLINE void fkv_encoding_put(fkv_encoding *encoding, uint32_t token) {
    if (encoding->n_tokens < encoding->capacity) encoding->tokens[encoding->n_tokens] = token;
    encoding->n_tokens++;
}

/* How long the first character is, told by its first byte alone and never past the end. n_bytes > 0. */
FKV_INLINE uint32_t fkv_utf8_step(const char *text, size_t n_bytes) {
    static const uint8_t steps[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
    uint32_t step = steps[(uint8_t)text[0] >> 4];
    return step <= n_bytes ? step : (uint32_t)n_bytes;
}

/* Opened after the map of the tokenizer holds its tokens. Texts of encode: a piece that the text plan left, below 2^31 bytes.
 * close takes NULL. */
fkv_status fkv_bpe_open(fkv_tokenizer *tokenizer);
void fkv_bpe_close(fkv_tokenizer *tokenizer);
fkv_status fkv_bpe_encode(const fkv_tokenizer *tokenizer, const char *word, uint32_t n_bytes, fkv_encoding *encoding);
size_t fkv_bpe_text(const fkv_tokenizer *tokenizer, fkv_bytes token, char *text); /* what it stands for; text: [token.size] */
uint64_t fkv_bpe_n_strings(const fkv_vocab_source *source);                       /* that bpe adds to the map at most */

/* Numbers the halves of merges from *n_symbols on and fills tokenizer->merges, which fkv_merge_rank() looks into. */
fkv_status fkv_merges_open(fkv_tokenizer *tokenizer, uint32_t *n_symbols);
void fkv_merge_rank(const void *context, fkv_symbol *symbols, uint32_t left, uint32_t end);

fkv_status fkv_spm_open(fkv_tokenizer *tokenizer);
void fkv_spm_close(fkv_tokenizer *tokenizer);
void fkv_spm_steps(bool space_before, fkv_text_steps *steps); /* of GGUF: spaces are written U+2581 */
fkv_status fkv_spm_encode(const fkv_tokenizer *tokenizer, const char *text, uint32_t n_bytes, fkv_encoding *encoding);
size_t fkv_spm_text(fkv_bytes token, char *text);

#endif
