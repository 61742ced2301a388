/* Reads the hyperparameters of a GGUF file from its metadata. */
#ifndef FKV_GGUF_HPARAMS_H
#define FKV_GGUF_HPARAMS_H

#include "gguf_values.h"

/* Fills in architecture, name and hyperparameters. Returns FKV_UNSUPPORTED, naming the key, if a value requires a feature that
 * this library does not implement. */
fkv_status fkv_gguf_read_hparams(const fkv_gguf_values *values, fkv_weights *weights);

#endif
