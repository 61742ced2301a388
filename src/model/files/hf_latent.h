/* Fields of multi-head latent attention (MLA) in a Hugging Face config.json. */
#ifndef FKV_HF_LATENT_H
#define FKV_HF_LATENT_H

#include "weights.h"

#include <jansson.h>

/* Returns whether models of this model_type have latent attention. */
bool fkv_hf_is_latent(const char *type);

/* For model types with latent attention, reads its shape and scale, the expert routing, and the scale factors of the model type.
 * Does nothing for other model types. Must be called after RoPE and experts have been read. hparams_check.c checks the values. */
fkv_status fkv_hf_read_latent(const json_t *root, const char *type, const char *path, fkv_hparams *hparams);

#endif
