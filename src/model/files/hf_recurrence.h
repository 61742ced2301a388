/* Fields of recurrent layers in a Hugging Face config.json. */
#ifndef FKV_HF_RECURRENCE_H
#define FKV_HF_RECURRENCE_H

#include "weights.h"

#include <jansson.h>

/* Reads the shape of recurrent layers. If the config has no layer_types, also determines which layers are recurrent. Does nothing
 * if the architecture has no recurrence. model.c checks the values. */
fkv_status fkv_hf_read_recurrence(const json_t *root, const char *path, fkv_hparams *hparams);

/* Computes the feed-forward dimension of LFM2, which is derived from block_ff_dim or intermediate_size. Does nothing for other
 * architectures. */
fkv_status fkv_hf_read_lfm2_ffn(const json_t *root, const char *path, fkv_hparams *hparams);

/* For models in which a layer is either a mixer or a feed-forward block, reads the number of layers and checks their kinds.
 * Clears the expert counts if no layer has experts. Returns FKV_UNSUPPORTED if a layer has an unknown kind. */
fkv_status fkv_hf_read_blocks(const json_t *root, const char *path, fkv_hparams *hparams);

/* Reads the dimensions of Nemotron-H's shared expert and of the projections before and after its routed experts. */
fkv_status fkv_hf_read_nemotron_experts(const json_t *root, const char *path, fkv_hparams *hparams);

#endif
