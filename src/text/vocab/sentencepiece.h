/* Reads tokenizer.model, a SentencePiece protobuf file that contains pieces with scores and types. Only models of type BPE are
 * supported. */
#ifndef FKV_SENTENCEPIECE_H
#define FKV_SENTENCEPIECE_H

#include "vocab_target.h"

/* Fills in target.vocab with the same content that the GGUF file of the model would contain. The bytes must outlive target.arena.
 * Returns FKV_FILE_FORMAT or FKV_UNSUPPORTED; the message contains the field, the reason and the path. */
fkv_status fkv_sentencepiece_read(fkv_vocab_target target, const uint8_t *bytes, size_t size, const char *path);

#endif
