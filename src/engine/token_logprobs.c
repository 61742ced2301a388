/* See token_logprobs.h. */
#include "token_logprobs.h"

#include <math.h>

/* Inserts a token into the list of the n_top tokens with the largest logits, sorted by logit. Returns the new length of the list.
 */
static uint32_t insert_top_token(fkv_logprob *top, uint32_t n, uint32_t n_top, uint32_t token, float logit) {
    uint32_t at = n;
    while (at > 0 && logit > top[at - 1].logprob) at--;
    if (at == n_top) return n;
    if (n < n_top) n++;
    for (uint32_t i = n - 1; i > at; i--) top[i] = top[i - 1];
    top[at] = (fkv_logprob){token, logit};
    return n;
}

float fkv_token_logprobs(const float *logits, uint32_t n_vocab, uint32_t token, fkv_logprob *top, uint32_t n_top) {
    float largest = logits[0];
    double sum = 0.0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_vocab; i++) {
        if (logits[i] > largest) largest = logits[i];
        if (n_top > 0 && (n < n_top || logits[i] > top[n - 1].logprob)) n = insert_top_token(top, n, n_top, i, logits[i]);
    }
    for (uint32_t i = 0; i < n_vocab; i++) sum += exp((double)logits[i] - (double)largest);
    double total = (double)largest + log(sum);
    for (uint32_t i = 0; i < n; i++) top[i].logprob = (float)((double)top[i].logprob - total);
    return (float)((double)logits[token] - total);
}
