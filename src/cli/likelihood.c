/* See likelihood.h. Inner loops update LANES independent accumulators, so that compilers can vectorize the loops. */
#include "likelihood.h"

#include <math.h>
#include <string.h>

enum { LANES = 16, BLOCK = 512 }; /* each block is summed in LANES float accumulators, and the block sums are added in double */

/* Computes exp(x) for x <= 0 as a power of two times a degree-6 polynomial on [-ln2/2, ln2/2]. NaN stays NaN. For inputs below
 * -87, the result is 1.6e-38, which is negligible in a sum whose largest term is 1. */
static float exp_negative(float x) {
    const float rounder =
        12582912.0f; /* 1.5 * 2^23: adding it rounds a float to an integer, which is then in the low mantissa bits */
    const uint32_t rounder_bits = 0x4b400000;
    float clipped = x < -87.0f ? -87.0f : x;
    float shifted = clipped * 1.44269504f + rounder;
    float n = shifted - rounder;
    float r = clipped - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - rounder_bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static double sum_lanes(const float lanes[LANES]) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += (double)lanes[i];
    return sum;
}

/* Returns the sum of exp(logits[i] - max) for n <= BLOCK logits. */
static double sum_block(const float *logits, uint32_t n, float max, float *exps) {
    float lanes[LANES] = {0};
    float values[BLOCK];
    for (uint32_t i = 0; i < n; i++) values[i] = exp_negative(logits[i] - max);
    uint32_t whole = n / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += values[i + (uint32_t)lane];
    double sum = sum_lanes(lanes);
    for (uint32_t i = whole; i < n; i++) sum += (double)values[i];
    if (exps != NULL) memcpy(exps, values, n * sizeof *exps);
    return sum;
}

static uint32_t argmax_logits(const float *logits, uint32_t n) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = -INFINITY;
    uint32_t whole = n / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t lane = 0; lane < LANES; lane++)
            lanes[lane] = lanes[lane] < logits[i + lane] ? logits[i + lane] : lanes[lane];
    float max = -INFINITY;
    for (int i = 0; i < LANES; i++) max = max < lanes[i] ? lanes[i] : max;
    for (uint32_t i = whole; i < n; i++) max = max < logits[i] ? logits[i] : max;
    for (uint32_t i = 0; i < n; i++)
        if (logits[i] == max) return i;
    return 0; /* reached only if all logits are NaN */
}

likelihood likelihood_of(const float *logits, uint32_t n, float *exps) {
    likelihood l = {.top = argmax_logits(logits, n)};
    float max = logits[l.top];
    double sum = 0;
    for (uint32_t i = 0; i < n; i += BLOCK) {
        uint32_t part = n - i < BLOCK ? n - i : BLOCK;
        sum += sum_block(logits + i, part, max, exps != NULL ? exps + i : NULL);
    }
    l.log_sum = (double)max + log(sum);
    return l;
}

double likelihood_nll(const likelihood *l, const float *logits, uint32_t token) { return l->log_sum - (double)logits[token]; }

/* For token probabilities p and q, KL = sum(p * (log p - log q)) = sum(p * (p_logit - q_logit)) - p.log_sum + q.log_sum. The
 * probabilities p are p_exps / exp(p.log_sum - max), where max is the largest logit of p. */
double likelihood_kl(const likelihood *p, const float *p_logits, const float *p_exps, const likelihood *q, const float *q_logits,
                     uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i += BLOCK) {
        uint32_t part = n - i < BLOCK ? n - i : BLOCK;
        float lanes[LANES] = {0};
        uint32_t whole = part / LANES * LANES;
        const float *a = p_logits + i;
        const float *b = q_logits + i;
        const float *e = p_exps + i;
        for (uint32_t j = 0; j < whole; j += LANES)
            for (uint32_t lane = j; lane < j + LANES; lane++) lanes[lane - j] += e[lane] * (a[lane] - b[lane]);
        sum += sum_lanes(lanes);
        for (uint32_t j = whole; j < part; j++) sum += (double)(e[j] * (a[j] - b[j]));
    }
    double total = exp(p->log_sum - (double)p_logits[p->top]);
    double kl = sum / total - p->log_sum + q->log_sum;
    return kl < 0 ? 0 : kl; /* rounding can make the result slightly negative; NaN is returned unchanged */
}
