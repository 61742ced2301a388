/* Fields of multi-head latent attention (MLA) in a Hugging Face config.json. */
#ifndef FKV_HF_LATENT_H
#define FKV_HF_LATENT_H

#include "weights.h"

#include <jansson.h>

/* Returns whether models of this model_type have latent attention. */
bool fkv_hf_is_latent(const char *type);

/* Reads the shape of latent attention, the attention scale, and the expert routing and the scalars of these model types. Must be
 * called after RoPE and experts have been read. Does nothing for other model types. hparams_check.c checks the values. */
fkv_status fkv_hf_read_latent(const json_t *root, const char *type, const char *path, fkv_hparams *hparams);

#endif
