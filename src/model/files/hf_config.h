/* What config.json says, beside the hyperparameters: things that only reading the tensors needs. And JSON from strangers. */
#ifndef FKV_HF_CONFIG_H
#define FKV_HF_CONFIG_H

#include "weights_state.h"

#include <jansson.h>

/* Objects only, no key twice, at most 16 MiB: parsed JSON takes many times its text. The caller gives it back with json_decref().
 */
fkv_status fkv_json_read(const char *text, size_t size, const char *path, json_t **root);

/* The name that GGUF gives to a tensor of Hugging Face's name; a name that is not known stays. False: a buffer that is no weight
 * (of old llama files) and is left out. */
bool fkv_hf_tensor_name(const char *architecture, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]);

#endif
