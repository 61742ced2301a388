/* Tokenizers: plain bytes, byte-level BPE, and SentencePiece with byte fallback. Vocabularies are untrusted. For any vocabulary,
 * encoding stays within its buffers and takes O(n log n) time. */
#ifndef FKV_TOKENIZER_H
#define FKV_TOKENIZER_H

#include "../vocab/vocab_source.h"

typedef struct fkv_tokenizer fkv_tokenizer;

/* Opens a tokenizer. Returns FKV_UNSUPPORTED if the tokenizer model or the pre-tokenizer is unknown; the error message contains
 * its name. The source must outlive the tokenizer. */
fkv_status fkv_tokenizer_open(const fkv_vocab_source *source, fkv_tokenizer **tokenizer);
void fkv_tokenizer_close(fkv_tokenizer *tokenizer);

const char *fkv_tokenizer_name(const fkv_tokenizer *tokenizer); /* "byte", "bpe", "spm" */
bool fkv_tokenizer_has_chatml(const fkv_tokenizer *tokenizer);  /* returns whether <|im_start|> and <|im_end|> are tokens */
uint32_t fkv_tokenizer_ends(const fkv_tokenizer *tokenizer, uint32_t end[FKV_MAX_END_TOKENS]);

/* Implement fkv_tokenize() and fkv_token_text() of flatkv/model.h. given: [n_bytes] marks, or NULL if all marks are 0. Text that
 * contains a byte with mark 1 never becomes a control token. */
fkv_status fkv_tokenizer_encode(const fkv_tokenizer *tokenizer, const char *text, const uint8_t *given, size_t n_bytes,
                                unsigned flags, uint32_t *tokens, size_t capacity, size_t *n_tokens);
const char *fkv_tokenizer_text(const fkv_tokenizer *tokenizer, uint32_t token, bool special, size_t *n_bytes);

#endif
