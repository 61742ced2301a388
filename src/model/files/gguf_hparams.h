/* The hyperparameters of a GGUF file, from its key-value part. */
#ifndef FKV_GGUF_HPARAMS_H
#define FKV_GGUF_HPARAMS_H

#include "gguf_values.h"

/* Fills in architecture, name and hyperparameters. What would make the numbers of a model mean something else than this library
 * computes is FKV_UNSUPPORTED with its key. */
fkv_status fkv_gguf_read_hparams(const fkv_gguf_values *values, fkv_weights *weights);

#endif
