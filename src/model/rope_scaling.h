/* From what a file says of RoPE to frequencies. */
#ifndef FKV_ROPE_SCALING_H
#define FKV_ROPE_SCALING_H

#include "files/weights.h"

/* Radians a position for each of the dim / 2 pairs; gives what cosines and sines are multiplied by. is_long: sequences may
 * grow beyond the original context (longrope has other factors then). */
double fkv_rope_frequencies(const fkv_rope *rope, const fkv_hparams *hparams, bool is_long, double *frequencies);

/* Whether is_long makes a difference, and sequences of so many tokens are long. */
bool fkv_rope_is_long(const fkv_hparams *hparams, uint32_t max_tokens);

#endif
