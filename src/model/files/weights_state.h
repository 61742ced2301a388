/* Internal state of fkv_weights, for the format readers (gguf.c, safetensors.c) and for tests that read from memory.
 *
 * A reader fills in tensors, hyperparameters and vocabulary from bytes that it does not own. fkv_weights_finish() then runs the
 * checks common to both formats. The memory allocated is at most a small multiple of the bytes read.
 */
#ifndef FKV_WEIGHTS_STATE_H
#define FKV_WEIGHTS_STATE_H

#include "../../text/vocab/vocab_target.h"
#include "weights.h"

enum { FKV_MAX_TENSORS = 1 << 16, FKV_MAX_SHARDS = 1024, FKV_MAX_DIMS = 8, FKV_MAX_ARCHITECTURE = 64, FKV_MAX_MODEL_NAME = 128 };

/* Tensor properties stated in config.json. They are used only if config.json is the only available file of the model. */
typedef struct fkv_declared {
    fkv_tensor_type float_type; /* type of tensors that are not quantized */
    bool is_tied;               /* the model has no lm_head */
    bool qkv_bias, o_bias, mlp_bias;
    bool k_is_v; /* full-attention layers have no V matrix */
} fkv_declared;

struct fkv_weights {
    fkv_file_arena arena; /* mapped files and fkv_weights_keep() blocks, released by fkv_weights_close() */
    uint32_t n_tensors;
    fkv_tensor *tensors; /* [n_tensors], in file order */
    uint32_t *by_name;   /* [n_tensors] indices sorted by name; names are unique */
    fkv_hparams hparams;
    fkv_vocab_source vocab;
    char architecture[FKV_MAX_ARCHITECTURE]; /* hparams.architecture */
    char name[FKV_MAX_MODEL_NAME];           /* hparams.name */
    fkv_bytes *tokens;                       /* vocab refers to this array and the next three arrays */
    fkv_bytes *merges;
    float *scores;
    int32_t *types;
    struct fkv_quantization *quantized; /* [n_quantized], see quantization.h; entry 0 is the default */
    uint32_t n_quantized;
    bool is_config; /* true if only a config.json was read; all tensors are then declared without data (config_tensors.h) */
    fkv_declared declared;
    bool is_tied;      /* config.json states that the embedding is also the output matrix, even if lm_head is stored */
    bool needs_output; /* config.json states that embedding and output matrix differ, so lm_head must be stored */
};

bool fkv_ends_with(const char *text, const char *end);

/* Allocates empty weights with default hyperparameters. Returns NULL if out of memory. */
fkv_weights *fkv_weights_new(void);

/* Returns the destination for a vocabulary reader. The hyperparameters must be set, because n_vocab limits the size of the
 * vocabulary. */
fkv_vocab_target fkv_weights_vocab_target(fkv_weights *weights);

/* Maps a regular file read-only; fkv_weights_close() unmaps it. */
fkv_status fkv_weights_map(fkv_weights *weights, const char *path, fkv_mapped *mapped);

/* Allocates zeroed memory that lives as long as the weights. Returns NULL if out of memory. */
void *fkv_weights_keep(fkv_weights *weights, size_t bytes);

/* Reserves space for n_more zeroed tensors and sets *first to the first of them. The caller increments n_tensors. */
fkv_status fkv_weights_reserve(fkv_weights *weights, uint64_t n_more, fkv_tensor **first);

/* Sets the name, type, shape and derived fields of a tensor. dims: [n_dims]. The last dimension, which is contiguous in memory,
 * is the number of columns; the product of the others is the number of rows. *bytes receives the size of the tensor. */
fkv_status fkv_tensor_describe(fkv_tensor *tensor, fkv_bytes name, fkv_tensor_type type, const uint64_t *dims, uint32_t n_dims,
                               const char *path, uint64_t *bytes);

/* Checks that names are unique and tensors do not overlap, and sorts the names. May be called again after tensors were removed.
 */
fkv_status fkv_weights_finish(fkv_weights *weights, const char *path);

#endif
