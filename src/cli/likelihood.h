/* What logits say about a token, and how far two rows of logits are apart.
 *
 * A row of a large vocabulary is passed over once with exp in float (relative error below 2e-7) and sums that are carried in
 * double, so a mean of thousands of positions keeps six digits.
 */
#ifndef FKV_CLI_LIKELIHOOD_H
#define FKV_CLI_LIKELIHOOD_H

#include <stdint.h>

typedef struct likelihood {
    double log_sum; /* log of the sum of exp(logit) */
    uint32_t top;   /* the likeliest token, of equals the lowest */
} likelihood;

/* exps: NULL, or [n]: exp(logit - largest logit), for likelihood_kl(). A NaN makes log_sum NaN. */
likelihood likelihood_of(const float *logits, uint32_t n, float *exps);

/* -log of the probability of a token. */
double likelihood_nll(const likelihood *l, const float *logits, uint32_t token);

/* Kullback-Leibler divergence from the reference p to q, in nats. p_exps as likelihood_of() left them. */
double likelihood_kl(const likelihood *p, const float *p_logits, const float *p_exps, const likelihood *q, const float *q_logits,
                     uint32_t n);

#endif
