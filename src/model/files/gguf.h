/* GGUF version 3, the whole file in one piece of memory.
 */
#ifndef FKV_GGUF_H
#define FKV_GGUF_H

#include "weights.h"

/* Fills fresh weights from the bytes of a file, which must stay as long as the weights and be aligned to 8. path: for messages.
 * FKV_FILE_FORMAT: not GGUF, or a key with a value of the wrong type. FKV_FILE_DAMAGED: numbers that contradict the file or each
 * other. FKV_UNSUPPORTED: sound, but of a version, tensor type or kind of model that is not read here. After a failure the
 * weights can only be closed. */
fkv_status fkv_gguf_read(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path);

#endif
