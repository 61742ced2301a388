/* Fields of recurrent layers in a Hugging Face config.json. */
#ifndef FKV_HF_RECURRENCE_H
#define FKV_HF_RECURRENCE_H

#include "weights.h"

#include <jansson.h>

/* Reads the shape of recurrent layers and, if the config has no layer_types, the layers that are recurrent. Does nothing if the
 * architecture has no recurrence. model.c checks the values. */
fkv_status fkv_hf_read_recurrence(const json_t *root, const char *path, fkv_hparams *hparams);

/* Computes the feed-forward dimension of LFM2, which is derived from block_ff_dim or intermediate_size. Does nothing for other
 * architectures. */
fkv_status fkv_hf_read_lfm2_ffn(const json_t *root, const char *path, fkv_hparams *hparams);

/* Reads the number of layers of models whose layers are either mixers or feed-forwards, and drops the experts if no layer has
 * them. Returns FKV_UNSUPPORTED if a layer has an unknown kind. */
fkv_status fkv_hf_read_blocks(const json_t *root, const char *path, fkv_hparams *hparams);

/* Reads the shared expert and the projections around the experts of Nemotron-H. */
fkv_status fkv_hf_read_nemotron_experts(const json_t *root, const char *path, fkv_hparams *hparams);

#endif
