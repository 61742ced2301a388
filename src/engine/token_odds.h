/* Log probabilities of tokens. */
#ifndef FKV_TOKEN_ODDS_H
#define FKV_TOKEN_ODDS_H

#include "../base/base.h"

#include <flatkv/engine.h>

/* The log probability of `token`, and the n_top most likely tokens, best first; of equal ones the lower token. */
float fkv_token_odds(const float *logits, uint32_t n_vocab, uint32_t token, fkv_logprob *top, uint32_t n_top);

#endif
