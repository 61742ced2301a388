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

/* Computes e^x as 2^k times a polynomial in the remainder. Unlike a call to expf(), this code vectorizes. x is clamped to the
 * range in which 2^k is finite and normal. */
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

/* Uses the identity (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)). */
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

static void row_silu(float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] / (1.0f + exponential(-x[i]));
}

static void l2_norm(float *x, float eps, float scale, uint32_t n) {
    float factor = 1.0f / sqrtf(sum_of_squares(x, n) + eps) * scale;
    for (uint32_t i = 0; i < n; i++) x[i] *= factor;
}

/* Processes channels in blocks whose accumulators stay in registers. */
static void conv_step(float *window, const float *x, const float *taps, uint32_t stride, const float *bias, uint32_t n_taps,
                      uint32_t n, float *out) {
    for (uint32_t from = 0; from < n; from += LANES) {
        const uint32_t m = fkv_min_u32(LANES, n - from);
        float sums[LANES] = {0};
        float last[LANES] = {0};
        memcpy(last, x + from, m * sizeof *last);
        for (uint32_t i = 0; bias != NULL && i < m; i++) sums[i] = bias[from + i];
        for (uint32_t j = 0; j + 1 < n_taps; j++) {
            float *row = window + (size_t)j * n + from;
            for (uint32_t i = 0; i < m; i++) sums[i] += taps[(size_t)j * stride + from + i] * row[i];
            memcpy(row, j + 2 < n_taps ? row + n : last, m * sizeof *row);
        }
        for (uint32_t i = 0; i < m; i++) sums[i] += taps[(size_t)(n_taps - 1) * stride + from + i] * last[i];
        memcpy(out + from, sums, m * sizeof *sums);
    }
}

static float sum_lanes(float *lanes) {
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

typedef float vec16 __attribute__((vector_size(16 * sizeof(float))));
typedef float vec8 __attribute__((vector_size(8 * sizeof(float))));
typedef float vec4 __attribute__((vector_size(4 * sizeof(float))));

FKV_INLINE void load16(vec16 *v, const float *x) { memcpy(v, x, sizeof *v); }

/* Adds the lanes in the order of sum_lanes(). */
FKV_INLINE float sum16(const vec16 *x) {
    const vec8 a =
        __builtin_shufflevector(*x, *x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(*x, *x, 8, 9, 10, 11, 12, 13, 14, 15);
    const vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

enum { DELTA_ROWS = 2, DELTA_VECTORS = 8, DELTA_DIM = LANES * DELTA_VECTORS };

/* Computes one token of the delta rule for DELTA_ROWS rows of DELTA_DIM channels. The rows stay in registers between the two
 * passes, and their sums are independent, so the latency of one row's sum is hidden by the other row. Performs the same
 * operations as delta_rule(). */
FKV_INLINE void delta_rows(const float *from, float *to, const float *k, const float *q, const float *values, const float *decays,
                           float decay, float beta, float *out) {
    vec16 s[DELTA_ROWS][DELTA_VECTORS];
    vec16 sums[DELTA_ROWS] = {{0}};
    vec16 x;
    vec16 factor = (vec16){0} + decay;
    for (uint32_t i = 0; i < DELTA_VECTORS; i++) {
        load16(&x, k + i * LANES);
        if (decays != NULL) load16(&factor, decays + i * LANES);
        for (uint32_t r = 0; r < DELTA_ROWS; r++) {
            load16(&s[r][i], from + r * DELTA_DIM + i * LANES);
            s[r][i] *= factor;
            sums[r] += s[r][i] * x;
        }
    }
    float d[DELTA_ROWS];
    for (uint32_t r = 0; r < DELTA_ROWS; r++) {
        d[r] = beta * (values[r] - sum16(&sums[r]));
        sums[r] = (vec16){0};
    }
    for (uint32_t i = 0; i < DELTA_VECTORS; i++) {
        load16(&x, k + i * LANES);
        vec16 y;
        load16(&y, q + i * LANES);
        for (uint32_t r = 0; r < DELTA_ROWS; r++) {
            s[r][i] += d[r] * x;
            sums[r] += s[r][i] * y;
            memcpy(to + r * DELTA_DIM + i * LANES, &s[r][i], sizeof s[r][i]);
        }
    }
    for (uint32_t r = 0; r < DELTA_ROWS; r++) out[r] = sum16(&sums[r]);
}

/* Computes one token of the delta rule, with one decay for all channels, or with one decay per channel if `decays` is not NULL.
 * The function is inlined, so that the compiler can move this check out of the loops. */
FKV_INLINE void delta_rule(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *FKV_RESTRICT k,
                           const float *FKV_RESTRICT q, const float *values, const float *FKV_RESTRICT decays, float decay,
                           float beta, float *out) {
    const uint32_t whole = k_dim / LANES * LANES;
    uint32_t v = 0;
    for (; k_dim == DELTA_DIM && v + DELTA_ROWS <= n_values; v += DELTA_ROWS) {
        delta_rows(from, to, k, q, values + v, decays, decay, beta, out + v);
        from += DELTA_ROWS * DELTA_DIM;
        to += DELTA_ROWS * DELTA_DIM;
    }
    for (; v < n_values; v++, from += k_dim, to += k_dim) {
        float s[FKV_MAX_STATE_DIM];
        float lanes[LANES] = {0};
        for (uint32_t i = 0; i < whole; i += LANES)
            for (uint32_t l = 0; l < LANES; l++) {
                s[i + l] = (decays != NULL ? decays[i + l] : decay) * from[i + l];
                lanes[l] += s[i + l] * k[i + l];
            }
        for (uint32_t i = whole; i < k_dim; i++) {
            s[i] = (decays != NULL ? decays[i] : decay) * from[i];
            lanes[i - whole] += s[i] * k[i];
        }
        const float d = beta * (values[v] - sum_lanes(lanes));
        memset(lanes, 0, sizeof lanes);
        for (uint32_t i = 0; i < whole; i += LANES)
            for (uint32_t l = 0; l < LANES; l++) {
                s[i + l] += d * k[i + l];
                lanes[l] += s[i + l] * q[i + l];
            }
        for (uint32_t i = whole; i < k_dim; i++) {
            s[i] += d * k[i];
            lanes[i - whole] += s[i] * q[i];
        }
        memcpy(to, s, k_dim * sizeof *s);
        out[v] = sum_lanes(lanes);
    }
}

static void delta_step(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *k, const float *q,
                       const float *values, float decay, float beta, float *out) {
    delta_rule(from, to, n_values, k_dim, k, q, values, NULL, decay, beta, out);
}

static void kda_step(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *k, const float *q,
                     const float *values, const float *decays, float beta, float *out) {
    delta_rule(from, to, n_values, k_dim, k, q, values, decays, 0.0f, beta, out);
}

static void ssm_step(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *FKV_RESTRICT b,
                     const float *FKV_RESTRICT c, const float *values, float decay, float step, float skip, float *out) {
    const uint32_t whole = k_dim / LANES * LANES;
    for (uint32_t v = 0; v < n_values; v++, from += k_dim, to += k_dim) {
        float s[FKV_MAX_STATE_DIM];
        float lanes[LANES] = {0};
        const float x = step * values[v];
        for (uint32_t i = 0; i < whole; i += LANES)
            for (uint32_t l = 0; l < LANES; l++) {
                s[i + l] = decay * from[i + l] + x * b[i + l];
                lanes[l] += s[i + l] * c[i + l];
            }
        for (uint32_t i = whole; i < k_dim; i++) {
            s[i] = decay * from[i] + x * b[i];
            lanes[i - whole] += s[i] * c[i];
        }
        memcpy(to, s, k_dim * sizeof *s);
        out[v] = sum_lanes(lanes) + skip * values[v];
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

/* Maps floats to integers that compare in the same order; -0 maps to 0. */
FKV_INLINE int32_t ordered_bits(float x) {
    union {
        float f;
        int32_t i;
    } bits = {.f = x + 0.0f};
    return bits.i ^ (int32_t)((uint32_t)(bits.i >> 31) >> 1);
}

/* First finds the maximum of each block, so that only one block must be searched for the index of the overall maximum. */
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

const fkv_vector_ops VECTOR_OPS = {.rms_norm = rms_norm,
                                   .layer_norm = layer_norm,
                                   .add = row_add,
                                   .add_scaled = row_add_scaled,
                                   .silu_mul = silu_mul,
                                   .gelu_mul = gelu_mul,
                                   .gelu = gelu,
                                   .swiglu_mul = swiglu_mul,
                                   .silu = row_silu,
                                   .sigmoid_mul = sigmoid_mul,
                                   .l2_norm = l2_norm,
                                   .conv_step = conv_step,
                                   .delta_step = delta_step,
                                   .kda_step = kda_step,
                                   .ssm_step = ssm_step,
                                   .rope_halves = rope_halves,
                                   .rope_pairs = rope_pairs,
                                   .largest = largest};
