/* Log probabilities of tokens. */
#ifndef FKV_TOKEN_LOGPROBS_H
#define FKV_TOKEN_LOGPROBS_H

#include "../base/base.h"

#include <flatkv/engine.h>

/* Returns the log probability of `token` and writes the n_top most likely tokens to `top`, most likely first. Equally likely
 * tokens are ordered by token number. logits: [n_vocab]; top: [n_top]. */
float fkv_token_logprobs(const float *logits, uint32_t n_vocab, uint32_t token, fkv_logprob *top, uint32_t n_top);

#endif
