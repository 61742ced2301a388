/* Quantization of a Hugging Face model, as stated in config.json: bits and group size for the whole model and for individual
 * modules. */
#ifndef FKV_QUANTIZATION_H
#define FKV_QUANTIZATION_H

#include "weights_state.h"

#include <jansson.h>

/* Quantization of a module. */
struct fkv_quantization {
    const char *module; /* module name, such as "model.layers.0.mlp.down_proj"; NULL in the default entry */
    fkv_tensor_type type;
    uint32_t bits;
    uint32_t group;       /* number of columns that share a scale; 0 means all columns of a row */
    uint32_t group_rows;  /* FP8: number of rows that share a scale; 0 means all rows */
    uint32_t zero_offset; /* GPTQ: offset added to stored zero points */
    bool is_hf;           /* true if the config has a quant_method (quantization_methods.c), false for MLX quantization */
};

/* Reads "quantization" or "quantization_config": MLX quantization, or a supported quant_method (mxfp4, fp8, awq, gptq). Returns
 * FKV_UNSUPPORTED for any other method; the message contains the name of the method. */
fkv_status fkv_quantization_read(fkv_weights *weights, const json_t *root, const char *path);

/* Sets the type and shape of a tensor that holds packed codes. Does nothing for other tensors. name: the tensor's name in the
 * file. */
fkv_status fkv_quantization_describe(const fkv_weights *weights, const char *name, const char *path, fkv_tensor *tensor);

/* Attaches scales, biases and zero points to their weights and removes them from the tensor table. Called after the last file. */
fkv_status fkv_quantization_join(fkv_weights *weights, const char *path);

/* ---- quantization methods ---- */

fkv_status fkv_quantization_method(const json_t *config, const char *method, const char *path, struct fkv_quantization *out);

/* Combines the parts of an AWQ, GPTQ or FP8 weight. find_part(weights, tensor, suffix) returns the part with that name suffix.
 * Sets the flag in taken: [n_tensors] of each tensor that has become a part of another tensor. */
typedef fkv_tensor *(*fkv_part_fn)(fkv_weights *weights, const fkv_tensor *tensor, const char *end);
fkv_status fkv_quantization_join_linear(fkv_weights *weights, fkv_tensor *tensor, fkv_part_fn find_part, bool *taken,
                                        const char *path);

#endif
