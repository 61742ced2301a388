/* GGUF versions 2 and 3: a file in one piece of memory, and models of one file or of several parts.
 */
#ifndef FKV_GGUF_H
#define FKV_GGUF_H

#include "weights.h"

/* What a file says of the model that it is a part of; a file that is whole is part 0 of 1. */
typedef struct fkv_gguf_part {
    uint32_t number;        /* split.no: from 0 */
    uint32_t n_parts;       /* split.count */
    uint32_t n_all_tensors; /* split.tensors.count: of all parts; 0: not said */
} fkv_gguf_part;

/* Adds what a file has to weights: the tensors and, of part 0, all else. The bytes must stay as long as the weights and be
 * aligned to 8; parts come in order, `number` is the one that this file must be, and fkv_weights_finish() comes after the last.
 * path: for messages. FKV_FILE_FORMAT: not GGUF, another part, or a key with a value of the wrong type. FKV_FILE_DAMAGED: numbers
 * that contradict the file or each other. FKV_UNSUPPORTED: sound, but of a version, tensor type or kind of model that is not read
 * here. After a failure the weights can only be closed. */
fkv_status fkv_gguf_read_part(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path, uint32_t number,
                              fkv_gguf_part *part);

/* The model that lies at path: a file, or any part of several, which lie beside it as NAME-00001-of-00003.gguf (gguf_split.c).
 * FKV_IO, with its name, where a part is not there. */
fkv_status fkv_gguf_open(fkv_weights *weights, const char *path);

#endif
