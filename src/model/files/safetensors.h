/* A folder with config.json and one or several .safetensors files, as Hugging Face lays them out.
 */
#ifndef FKV_SAFETENSORS_H
#define FKV_SAFETENSORS_H

#include "weights.h"

/* Reads config.json, then the shards: those that model.safetensors.index.json names, model.safetensors, or all *.safetensors of
 * the folder. Statuses as fkv_gguf_open(). */
fkv_status fkv_safetensors_open(fkv_weights *weights, const char *folder);

/* One shard, from memory; what is not JSON of the right form is FKV_FILE_FORMAT. The bytes must stay as long as the weights. */
fkv_status fkv_safetensors_read(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path);

#endif
