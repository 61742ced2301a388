/* Builds small vocabularies from random choices or from a fuzzer's bytes, and compares the tokenizer with a naive reference
 * tokenizer, which splits the text at one special token at a time and rescans all pairs for every merge. */
#ifndef FKV_TOKENIZER_MODEL_H
#define FKV_TOKENIZER_MODEL_H

#include "../src/text/tokenizer/tokenizer.h"

enum { MODEL_MAX_TOKENS = 96, MODEL_MAX_MERGES = 64, MODEL_MAX_TEXT = 1024 };

typedef struct tokenizer_fixture {
    fkv_vocab_source source;
    fkv_bytes tokens[MODEL_MAX_TOKENS];
    float scores[MODEL_MAX_TOKENS];
    int32_t types[MODEL_MAX_TOKENS];
    fkv_bytes merges[MODEL_MAX_MERGES];
    const char *text;
    size_t n_text;
} tokenizer_fixture;

/* Builds the vocabulary and the text from arbitrary bytes. Strings point into the bytes. */
void tokenizer_fixture_read(tokenizer_fixture *fixture, const uint8_t *data, size_t size);

/* Opens the vocabulary and tokenizes the text in every supported way. Returns NULL if all results agree or if the vocabulary was
 * rejected, in which case *refused is true. Otherwise returns a description of the difference. */
const char *tokenizer_fixture_check(const tokenizer_fixture *fixture, bool *refused);

#endif
