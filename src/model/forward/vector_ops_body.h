/* Implementation of vector_ops.h, included once per instruction set. VECTOR_OPS is the name of the resulting table. Sums use
 * LANES partial sums that are reduced in a fixed order, without FMA contraction, so results are bit-identical on all instruction
 * sets.
 */
#include "vector_ops.h"

#include <math.h>

enum { LANES = 16 };

static float sum_of_squares(const float *x, uint32_t n) {
    float lanes[LANES] = {0};
    uint32_t whole = n / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t l = 0; l < LANES; l++) lanes[l] += x[i + l] * x[i + l];
    for (uint32_t i = whole; i < n; i++) lanes[i - whole] += x[i] * x[i];
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

static void rms_norm(const float *x, const float *weight, float eps, uint32_t n, float *out) {
    float factor = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

static float sum_of(const float *x, uint32_t n) {
    float lanes[LANES] = {0};
    uint32_t whole = n / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t l = 0; l < LANES; l++) lanes[l] += x[i + l];
    for (uint32_t i = whole; i < n; i++) lanes[i - whole] += x[i];
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

static void layer_norm(const float *x, const float *weight, const float *bias, float eps, uint32_t n, float *out) {
    float mean = sum_of(x, n) / (float)n;
    for (uint32_t i = 0; i < n; i++) out[i] = x[i] - mean;
    float factor = 1.0f / sqrtf(sum_of_squares(out, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) out[i] = out[i] * factor * weight[i];
    for (uint32_t i = 0; bias != NULL && i < n; i++) out[i] += bias[i];
}

static void row_add_scaled(float *FKV_RESTRICT x, const float *FKV_RESTRICT y, float scale, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] += y[i] * scale;
}

static void row_add(float *FKV_RESTRICT x, const float *FKV_RESTRICT y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] += y[i];
}

/* Computes e^x as 2^k times a polynomial of the remainder, which vectorizes, unlike a call to expf(). x is clamped to the range
 * in which 2^k is finite and normal. */
FKV_INLINE float exponential(float x) {
    const float log2e = 0x1.715476p+0f;
    const float ln2_high = 0x1.62e4p-1f;
    const float ln2_low = 0x1.7f7d1cp-20f;
    const float round_to_integer = 0x1.8p23f;
    x = x < 88.0f ? x : 88.0f;
    x = x > -87.0f ? x : -87.0f;
    float shifted = x * log2e + round_to_integer;
    float k = shifted - round_to_integer;
    float r = x - k * ln2_high - k * ln2_low;
    float p = 1.0f +
              r * (1.0f + r * (0x1p-1f + r * (0x1.555556p-3f + r * (0x1.555556p-5f + r * (0x1.11112p-7f + r * 0x1.6c16cp-10f)))));
    union {
        float f;
        uint32_t u;
    } bits = {.f = shifted};
    bits.u = (bits.u + 127u) << 23; /* the low bits of `shifted` are the exponent k */
    return p * bits.f;
}

static void silu_mul(float *FKV_RESTRICT gate, const float *FKV_RESTRICT up, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

/* (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)) */
static void gelu_mul(float *FKV_RESTRICT gate, const float *FKV_RESTRICT up, uint32_t n) {
    const float twice_sqrt_2_over_pi = 0x1.988454p+0f;
    for (uint32_t i = 0; i < n; i++) {
        float x = gate[i];
        float u = twice_sqrt_2_over_pi * x * (1.0f + 0.044715f * x * x);
        gate[i] = x / (1.0f + exponential(-u)) * up[i];
    }
}

static void gelu(float *x, uint32_t n) {
    const float twice_sqrt_2_over_pi = 0x1.988454p+0f;
    for (uint32_t i = 0; i < n; i++) x[i] /= 1.0f + exponential(-twice_sqrt_2_over_pi * x[i] * (1.0f + 0.044715f * x[i] * x[i]));
}

static void sigmoid_mul(float *FKV_RESTRICT x, const float *FKV_RESTRICT gate, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] /= 1.0f + exponential(-gate[i]);
}

static void swiglu_mul(float *FKV_RESTRICT gate, const float *FKV_RESTRICT up, float alpha, float limit, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        float g = gate[i] < limit ? gate[i] : limit;
        float u = up[i] < limit ? up[i] : limit;
        u = u > -limit ? u : -limit;
        gate[i] = g / (1.0f + exponential(-alpha * g)) * (u + 1.0f);
    }
}

static void rope_halves(float *x, const float *FKV_RESTRICT cosines, const float *FKV_RESTRICT sines, uint32_t n_pairs) {
    float *FKV_RESTRICT low = x;
    float *FKV_RESTRICT high = x + n_pairs;
    for (uint32_t i = 0; i < n_pairs; i++) {
        float a = low[i];
        float b = high[i];
        low[i] = a * cosines[i] - b * sines[i];
        high[i] = a * sines[i] + b * cosines[i];
    }
}

static void rope_pairs(float *FKV_RESTRICT x, const float *FKV_RESTRICT cosines, const float *FKV_RESTRICT sines,
                       uint32_t n_pairs) {
    for (uint32_t i = 0; i < n_pairs; i++) {
        float a = x[2 * i];
        float b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
}

/* Maps a float to an integer with the same ordering; -0 maps to 0. */
FKV_INLINE int32_t ordered_bits(float x) {
    union {
        float f;
        int32_t i;
    } bits = {.f = x + 0.0f};
    return bits.i ^ (int32_t)((uint32_t)(bits.i >> 31) >> 1);
}

/* Finds the maximum block by block, so that only one block must be searched for its index. */
static uint32_t largest(const float *x, uint32_t n) {
    enum { BLOCK = 1024 };
    int32_t best = INT32_MIN;
    int32_t has_nan = 0;
    uint32_t block = 0;
    for (uint32_t from = 0; from < n; from += BLOCK) {
        const uint32_t end = fkv_min_u32(n, from + BLOCK);
        int32_t most = INT32_MIN;
        for (uint32_t i = from; i < end; i++) {
            int32_t key = ordered_bits(x[i]);
            most = key > most ? key : most;
            has_nan |= x[i] != x[i];
        }
        if (most > best) {
            best = most;
            block = from;
        }
    }
    if (has_nan != 0) return n;
    uint32_t at = block;
    while (ordered_bits(x[at]) != best) at++;
    return at;
}

const fkv_vector_ops VECTOR_OPS = {rms_norm, layer_norm,  row_add,    row_add_scaled, silu_mul,   gelu_mul,
                                   gelu,     sigmoid_mul, swiglu_mul, rope_halves,    rope_pairs, largest};
