/* Reader of a Hugging Face config.json. hf_config.c shares the state of the reader with the files that parse groups of fields.
 * Internal to src/model/files. */
#ifndef FKV_HF_READER_H
#define FKV_HF_READER_H

#include "../architecture.h"
#include "hf_fields.h"
#include "weights_state.h"

typedef struct fkv_hf_model_type {
    const char *type;
    const char *architecture;
    uint32_t window_period; /* replaces window_period of the architecture; 0 means no replacement */
    const char *defaults;   /* JSON object with default values for omitted fields, or NULL */
} fkv_hf_model_type;

typedef struct fkv_hf_reader {
    json_t *root; /* config of the text model */
    const char *path;
    const fkv_hf_model_type *model;
    const fkv_architecture *architecture;
    fkv_hparams *h;
    fkv_layer_shape local; /* head shape of windowed layers; a field of 0 means the same value as in the other layers */
} fkv_hf_reader;

/* Reads the RoPE parameters (hf_rope.c). Must be called after the sizes have been read. RoPE factors are allocated in weights. */
fkv_status fkv_hf_read_rope(const fkv_hf_reader *reader, fkv_weights *weights);

/* Reads the kind and the shape of each layer: windows, layers without RoPE, recurrent layers and layers without experts
 * (hf_layers.c). Must be called after the sizes, experts and RoPE parameters have been read. */
fkv_status fkv_hf_read_layers(const fkv_hf_reader *reader);

#endif
