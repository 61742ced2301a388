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

#endif
