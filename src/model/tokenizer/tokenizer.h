/* Text to tokens and back: bytes, byte-level BPE (GPT-2, SmolLM, Qwen2 patterns), SentencePiece with byte fallback. Made from a
 * vocabulary that a stranger wrote: whatever it holds, tokenizing ends, stays inside its memory and takes time that grows no
 * faster than n log n.
 */
#ifndef FKV_TOKENIZER_H
#define FKV_TOKENIZER_H

#include "../files/weights.h"

typedef struct fkv_tokenizer fkv_tokenizer;

/* FKV_UNSUPPORTED for a tokenizer model or a pre-tokenizer that is not known, by name. The source must outlive it. */
fkv_status fkv_tokenizer_open(const fkv_vocab_source *source, fkv_tokenizer **tokenizer);
void fkv_tokenizer_close(fkv_tokenizer *tokenizer);

const char *fkv_tokenizer_name(const fkv_tokenizer *tokenizer); /* "byte", "bpe", "spm" */
bool fkv_tokenizer_has_chatml(const fkv_tokenizer *tokenizer);  /* <|im_start|> and <|im_end|> are tokens */
uint32_t fkv_tokenizer_ends(const fkv_tokenizer *tokenizer, uint32_t end[FKV_MAX_END_TOKENS]);

/* As fkv_tokenize() and fkv_token_text() of flatkv/model.h. given: [n_bytes] or NULL; control tokens are not found where a byte
 * is marked with 1. */
fkv_status fkv_tokenizer_encode(const fkv_tokenizer *tokenizer, const char *text, const uint8_t *given, size_t n_bytes,
                                unsigned flags, uint32_t *tokens, size_t capacity, size_t *n_tokens);
const char *fkv_tokenizer_text(const fkv_tokenizer *tokenizer, uint32_t token, bool special, size_t *n_bytes);

#endif
