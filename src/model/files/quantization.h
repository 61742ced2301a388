/* What a config.json says of quantized weights: how many bits and columns a scale has, for the model and for single modules. */
#ifndef FKV_QUANTIZATION_H
#define FKV_QUANTIZATION_H

#include "weights_state.h"

#include <jansson.h>

/* Codes of a module; type FKV_TENSOR_MLX_*. */
struct fkv_quantization {
    const char *module; /* "model.layers.0.mlp.down_proj"; NULL: all that are not named */
    fkv_tensor_type type;
    uint32_t bits;
    uint32_t group;
};

/* Reads "quantization", or "quantization_config" where that is MLX's too. Other methods are FKV_UNSUPPORTED, by name. */
fkv_status fkv_quantization_read(fkv_weights *weights, const json_t *root, const char *path);

/* Turns a tensor that was described as U32 [R, words] into codes of the module that `name` ("....weight") belongs to. */
fkv_status fkv_quantization_describe(const fkv_weights *weights, const char *name, const char *path, fkv_tensor *tensor);

/* Gives every tensor of codes its scales and biases, which are tensors of their own until then and none afterwards. */
fkv_status fkv_quantization_join(fkv_weights *weights, const char *path);

#endif
