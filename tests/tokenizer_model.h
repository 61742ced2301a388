/* Small vocabularies, from random choices or from a fuzzer's bytes, and the slowest tokenizer that is obviously right to compare
 * with: specials are cut out one after the other, and every merge looks at all pairs again.
 */
#ifndef FKV_TOKENIZER_MODEL_H
#define FKV_TOKENIZER_MODEL_H

#include "../src/model/tokenizer/tokenizer.h"

enum { MODEL_MAX_TOKENS = 96, MODEL_MAX_MERGES = 64, MODEL_MAX_TEXT = 1024 };

typedef struct tokenizer_world {
    fkv_vocab_source source;
    fkv_bytes tokens[MODEL_MAX_TOKENS];
    float scores[MODEL_MAX_TOKENS];
    int32_t types[MODEL_MAX_TOKENS];
    fkv_bytes merges[MODEL_MAX_MERGES];
    const char *text;
    size_t n_text;
} tokenizer_world;

/* Whatever the bytes say; strings point into them. */
void tokenizer_world_read(tokenizer_world *world, const uint8_t *data, size_t size);

/* Opens the vocabulary and tokenizes the text in every way there is. NULL: all is well, or the vocabulary was refused
 * (*refused); else what is wrong. */
const char *tokenizer_world_check(const tokenizer_world *world, bool *refused);

#endif
