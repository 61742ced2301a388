/* Reader of Hugging Face model folders: config.json and one or more .safetensors files. */
#ifndef FKV_SAFETENSORS_H
#define FKV_SAFETENSORS_H

#include "weights.h"

/* Reads config.json, then the weight files: those listed in model.safetensors.index.json, otherwise model.safetensors, otherwise
 * every .safetensors file in the folder. Returns the same statuses as fkv_gguf_open(). */
fkv_status fkv_safetensors_open(fkv_weights *weights, const char *folder);

/* Reads one safetensors file from memory. The bytes must outlive the weights. Returns FKV_FILE_FORMAT if the header is not valid
 * JSON of the expected form. */
fkv_status fkv_safetensors_read(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path);

#endif
