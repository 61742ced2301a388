/* What a config.json says of quantized weights: how many bits and columns a scale has, for the model and for single modules. */
#ifndef FKV_QUANTIZATION_H
#define FKV_QUANTIZATION_H

#include "weights_state.h"

#include <jansson.h>

/* Codes of a module. */
struct fkv_quantization {
    const char *module; /* "model.layers.0.mlp.down_proj"; NULL: all that are not named */
    fkv_tensor_type type;
    uint32_t bits;
    uint32_t group;      /* 0: all columns share a scale */
    uint32_t group_rows; /* FP8: rows that do; 0: all */
    uint32_t zero_more;  /* GPTQ: what is added to a stored zero */
    bool is_hf;          /* a method of Hugging Face (quantization_methods.c), not MLX's own */
};

/* Reads "quantization", or "quantization_config": MLX's, or one of a quant_method that is known (mxfp4, fp8, awq, gptq). Other
 * methods are FKV_UNSUPPORTED, by name. */
fkv_status fkv_quantization_read(fkv_weights *weights, const json_t *root, const char *path);

/* Turns words or blocks of a module's weight into codes. name: as the file has it. Other tensors stay as they are. */
fkv_status fkv_quantization_describe(const fkv_weights *weights, const char *name, const char *path, fkv_tensor *tensor);

/* Joins codes with their scales, biases and zeros, which are no tensors of their own from then on. After the last file. */
fkv_status fkv_quantization_join(fkv_weights *weights, const char *path);

/* ---- of a quant_method (quantization_methods.c), for quantization.c ---- */

fkv_status fkv_quantization_method(const json_t *config, const char *method, const char *path, struct fkv_quantization *out);

/* Makes a tensor of AWQ, GPTQ or FP8 out of its parts. beside(weights, tensor, end): the part whose name ends so; taken:
 * [n_tensors], those that are now parts. */
typedef fkv_tensor *(*fkv_beside_fn)(fkv_weights *weights, const fkv_tensor *tensor, const char *end);
fkv_status fkv_quantization_join_linear(fkv_weights *weights, fkv_tensor *tensor, fkv_beside_fn beside, bool *taken,
                                        const char *path);

#endif
