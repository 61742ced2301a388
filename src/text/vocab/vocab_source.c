/* See vocab_source.h. */
#include "vocab_source.h"

fkv_vocab_source fkv_vocab_source_default(void) {
    return (fkv_vocab_source){.bos = FKV_NO_TOKEN,
                              .eos = FKV_NO_TOKEN,
                              .eot = FKV_NO_TOKEN,
                              .unk = FKV_NO_TOKEN,
                              .suffix = FKV_NO_TOKEN,
                              .add_space_prefix = true};
}

void fkv_vocab_add_end(fkv_vocab_source *vocab, uint32_t token) {
    for (uint32_t i = 0; i < vocab->n_ends; i++)
        if (vocab->ends[i] == token) return;
    if (vocab->n_ends < FKV_MAX_END_TOKENS) vocab->ends[vocab->n_ends++] = token;
}
