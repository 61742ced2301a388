/* Opens models for which only config.json is available, so that memory can be planned before a download. The tensors that the
 * hyperparameters require are declared with estimated types and without data.
 */
#ifndef FKV_CONFIG_TENSORS_H
#define FKV_CONFIG_TENSORS_H

#include "weights_state.h"

/* Reads a config.json with the same checks and defaults as for a model folder. The resulting weights have no tensors and no
 * vocabulary, and fkv_weights_is_config() returns true for them. */
fkv_status fkv_config_open(fkv_weights *weights, const char *path);

/* Returns whether an optional tensor is part of the model, according to config.json. name: GGUF name without "blk.N." */
bool fkv_config_has_tensor(const fkv_weights *weights, uint32_t layer, const char *name);

/* Declares a tensor of the given shape. Its type follows from the dtype and the quantization stated in config.json. The tensor
 * lives as long as the weights, and its data must not be read. */
fkv_status fkv_config_declare(fkv_weights *weights, const char *name, uint64_t n_rows, uint32_t n_cols,
                              const fkv_tensor **tensor);

#endif
