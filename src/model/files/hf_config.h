/* config.json as Hugging Face writes it, and the names it gives to tensors. */
#ifndef FKV_HF_CONFIG_H
#define FKV_HF_CONFIG_H

#include "weights_state.h"

/* Fills in hyperparameters and special tokens from the bytes of a config.json, which are not needed afterwards. What is not JSON
 * of the right form is FKV_FILE_FORMAT; path: for messages. */
fkv_status fkv_hf_config_read(fkv_weights *weights, const char *json, size_t size, const char *path);

/* The name that GGUF gives to a tensor of Hugging Face's name; a name that is not known stays. False: a buffer that is no weight
 * (of old llama files) and is left out. */
bool fkv_hf_tensor_name(const char *architecture, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]);

#endif
