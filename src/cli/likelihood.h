/* Log-likelihood and Kullback-Leibler divergence from rows of logits.
 *
 * Exponentials are computed in float with a relative error below 2e-7, and sums of blocks are accumulated in double. A mean over
 * thousands of positions is therefore accurate to six digits.
 */
#ifndef FKV_CLI_LIKELIHOOD_H
#define FKV_CLI_LIKELIHOOD_H

#include <stdint.h>

typedef struct likelihood {
    double log_sum; /* log of the sum of exp(logit) */
    uint32_t top;   /* most likely token; among equally likely tokens, the one with the lowest ID */
} likelihood;

/* Computes the log-sum-exp of a row. exps: [n] receives exp(logit - largest logit) for likelihood_kl(); NULL if not needed. A NaN
 * among the logits makes log_sum NaN. */
likelihood likelihood_of(const float *logits, uint32_t n, float *exps);

/* Returns the negative log-likelihood of a token. */
double likelihood_nll(const likelihood *l, const float *logits, uint32_t token);

/* Returns the Kullback-Leibler divergence KL(p || q) in nats, where p is the reference distribution. p_exps: exponentials that
 * likelihood_of() wrote for p. */
double likelihood_kl(const likelihood *p, const float *p_logits, const float *p_exps, const likelihood *q, const float *q_logits,
                     uint32_t n);

#endif
