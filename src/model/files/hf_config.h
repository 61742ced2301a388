/* Hugging Face config.json files and tensor names. */
#ifndef FKV_HF_CONFIG_H
#define FKV_HF_CONFIG_H

#include "weights_state.h"

/* Reads hyperparameters and special tokens from the contents of a config.json. The bytes are not needed afterwards; path is used
 * in messages only. Returns FKV_FILE_FORMAT for invalid JSON or values, and FKV_UNSUPPORTED for unsupported models. */
fkv_status fkv_hf_config_read(fkv_weights *weights, const char *json, size_t size, const char *path);

/* Translates a Hugging Face tensor name to its GGUF name; unknown names are copied unchanged. Returns false if the tensor is not
 * needed: vision and audio weights, and the inv_freq buffers of old Llama files. */
bool fkv_hf_tensor_name(const char *architecture, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]);

#endif
