/* The inside of fkv_weights, for the readers of the two formats (gguf.c, safetensors.c) and for tests that read from memory.
 *
 * A reader fills in tensors, hyperparameters and vocabulary from bytes that it does not own; fkv_weights_finish() then checks
 * what holds for both formats. Memory taken on the way is at most a small multiple of the bytes read.
 */
#ifndef FKV_WEIGHTS_STATE_H
#define FKV_WEIGHTS_STATE_H

#include "weights.h"

enum { FKV_MAX_TENSORS = 1 << 16, FKV_MAX_SHARDS = 1024, FKV_MAX_DIMS = 8, FKV_MAX_ARCHITECTURE = 64, FKV_MAX_MODEL_NAME = 128 };

typedef struct fkv_mapped {
    const uint8_t *bytes;
    uint64_t size;
} fkv_mapped;

struct fkv_weights {
    fkv_mapped *maps; /* [n_maps], unmapped by fkv_weights_close() */
    uint32_t n_maps;
    uint32_t n_tensors;
    fkv_tensor *tensors; /* [n_tensors], in the order of the files */
    uint32_t *by_name;   /* [n_tensors], sorted by name: no two are equal */
    fkv_hparams hparams;
    fkv_vocab_source vocab;
    char architecture[FKV_MAX_ARCHITECTURE]; /* hparams.architecture */
    char name[FKV_MAX_MODEL_NAME];           /* hparams.name */
    fkv_bytes *tokens;                       /* what vocab points to */
    fkv_bytes *merges;
    float *scores;
    int32_t *types;
    struct fkv_quantization *quantized; /* [n_quantized] of quantization.h, the first for all modules */
    uint32_t n_quantized;
    void **kept; /* [n_kept] what fkv_weights_keep() gave */
    uint32_t n_kept;
    bool is_tied;     /* config.json: the output is the embedding, whatever else is stored */
    bool says_untied; /* config.json: the output must be there */
};

bool fkv_ends_with(const char *text, const char *end);

/* Zeroed, with the defaults of a file that says nothing. NULL: no memory. */
fkv_weights *fkv_weights_new(void);

/* Maps a whole regular file read-only and remembers it. */
fkv_status fkv_weights_map(fkv_weights *weights, const char *path, fkv_mapped *mapped);

/* Zeroed memory that lives as long as the weights. NULL: none left. */
void *fkv_weights_keep(fkv_weights *weights, size_t bytes);

/* Room for n_more tensors, zeroed; *first is the first of them and n_tensors stays as it was: the reader counts them. */
fkv_status fkv_weights_reserve(fkv_weights *weights, uint64_t n_more, fkv_tensor **first);

/* Sets name, type and shape and all that follows from them. dims: the fastest last, [n_dims]; dims before the last are rows.
 * *bytes: of the whole tensor. */
fkv_status fkv_tensor_describe(fkv_tensor *tensor, fkv_bytes name, fkv_tensor_type type, const uint64_t *dims, uint32_t n_dims,
                               const char *path, uint64_t *bytes);

/* The checks of a whole: no name twice, no byte in two tensors. May be called again when tensors were left out. */
fkv_status fkv_weights_finish(fkv_weights *weights, const char *path);

#endif
