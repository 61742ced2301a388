/* Destination of a vocabulary reader: the vocabulary to fill in, and the owner of its memory. */
#ifndef FKV_VOCAB_TARGET_H
#define FKV_VOCAB_TARGET_H

#include "file_arena.h"
#include "vocab_source.h"

typedef struct fkv_vocab_target {
    fkv_vocab_source *vocab;
    fkv_file_arena *arena; /* owns the strings and tables of the vocabulary, and must outlive it */
    uint32_t n_vocab;      /* vocabulary size of the model, or 0 for no limit; tokens with this id or a higher id are dropped */
} fkv_vocab_target;

#endif
