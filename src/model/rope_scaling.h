/* RoPE frequencies of a model. */
#ifndef FKV_ROPE_SCALING_H
#define FKV_ROPE_SCALING_H

#include "files/weights.h"

/* Computes the frequency (radians per position) of each of the dim / 2 pairs, and returns the factor by which cosines and sines
 * are multiplied. is_long: whether sequences may exceed the original context. If so, the long factors of longrope are used. */
double fkv_rope_frequencies(const fkv_rope *rope, const fkv_hparams *hparams, bool is_long, double *frequencies);

/* Returns whether sequences of up to max_tokens tokens need the long factors of longrope. */
bool fkv_rope_is_long(const fkv_hparams *hparams, uint32_t max_tokens);

#endif
