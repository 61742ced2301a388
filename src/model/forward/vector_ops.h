/* Row operations between matrix products: norms, RoPE, activations and sums. Each operation processes one row independently of
 * the other rows. The operations are branch-free loops with a fixed order of additions, vectorized by the compiler, so results
 * are bit-identical across instruction sets.
 */
#ifndef FKV_VECTOR_OPS_H
#define FKV_VECTOR_OPS_H

#include "../files/weights.h"

typedef struct fkv_vector_ops {
    /* out = x / sqrt(mean(x^2) + eps) * weight; out may be x. */
    void (*rms_norm)(const float *x, const float *weight, float eps, uint32_t n, float *out);

    /* out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; bias may be NULL, out may be x. */
    void (*layer_norm)(const float *x, const float *weight, const float *bias, float eps, uint32_t n, float *out);

    void (*add)(float *x, const float *y, uint32_t n);
    void (*add_scaled)(float *x, const float *y, float scale, uint32_t n);

    /* gate = silu(gate) * up and gate = gelu_tanh(gate) * up, with an exponential accurate to 2 ulp. */
    void (*silu_mul)(float *gate, const float *up, uint32_t n);
    void (*gelu_mul)(float *gate, const float *up, uint32_t n);

    /* x = gelu_tanh(x) and x = x * sigmoid(gate). */
    void (*gelu)(float *x, uint32_t n);
    void (*sigmoid_mul)(float *x, const float *gate, uint32_t n);

    /* gate = g * sigmoid(alpha * g) * (u + 1), with g = min(gate, limit) and u = clamp(up, -limit, limit). */
    void (*swiglu_mul)(float *gate, const float *up, float alpha, float limit, uint32_t n);

    /* x = silu(x) */
    void (*silu)(float *x, uint32_t n);

    /* x = x / sqrt(sum(x^2) + eps) * scale */
    void (*l2_norm)(float *x, float eps, float scale, uint32_t n);

    /* Computes one token of a depthwise causal convolution over n channels: out = bias + sum over j of taps[j] * input[j], where
     * the last input is x and the inputs before it are the rows of `window`. Then removes the first row of the window and appends
     * x. window: [n_taps - 1, n]; taps: [n_taps, stride]; bias: [n] or NULL; out may be x. */
    void (*conv_step)(float *window, const float *x, const float *taps, uint32_t stride, const float *bias, uint32_t n_taps,
                      uint32_t n, float *out);

    /* Computes one token of the gated delta rule for n_values rows s of a state: s = decay * s; d = beta * (value - s.k); s = s +
     * d * k; out = s.q. from, to: [n_values, k_dim]; k, q: [k_dim]; values, out: [n_values]. `to` may be `from`, and `out` may be
     * `values`. k_dim is at most FKV_MAX_STATE_DIM. */
    void (*delta_step)(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *k, const float *q,
                       const float *values, float decay, float beta, float *out);

    /* Same as delta_step, but with a separate decay for every channel of a state row. decays: [k_dim] */
    void (*kda_step)(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *k, const float *q,
                     const float *values, const float *decays, float beta, float *out);

    /* Computes one token of Mamba-2 for n_values rows s of a state: s = decay * s + (step * value) * b; out = s.c + skip * value.
     * The arrays have the same shapes as in delta_step. */
    void (*ssm_step)(const float *from, float *to, uint32_t n_values, uint32_t k_dim, const float *b, const float *c,
                     const float *values, float decay, float step, float skip, float *out);

    /* Rotate the pairs of one head: (i, i + n_pairs) in rope_halves, and (2 * i, 2 * i + 1) in rope_pairs. */
    void (*rope_halves)(float *x, const float *cosines, const float *sines, uint32_t n_pairs);
    void (*rope_pairs)(float *x, const float *cosines, const float *sines, uint32_t n_pairs);

    /* Returns the index of the first maximum of n > 0 values, or n if a value is NaN. */
    uint32_t (*largest)(const float *x, uint32_t n);
} fkv_vector_ops;

/* Returns the operations for an instruction set. This machine must support the instruction set; FKV_ISA_AUTO is not allowed. */
const fkv_vector_ops *fkv_vector_ops_for(fkv_isa isa);

/* Tables of operations, one for each instruction set that vector_ops_body.h is compiled for. */
extern const fkv_vector_ops fkv_vector_ops_plain;
extern const fkv_vector_ops fkv_vector_ops_avx2;
extern const fkv_vector_ops fkv_vector_ops_avx512;

/* Computes the cosine and sine of position * frequencies[i] for n_pairs pairs. Angles are computed in double precision, so that
 * they are accurate at large positions. */
void fkv_rope_angles(double position, const double *frequencies, uint32_t n_pairs, float *cosines, float *sines);

/* fkv_heads_spread() zero-pads contiguous heads from head_dim to `padded` values each, in place; fkv_heads_gather() removes the
 * padding. */
void fkv_heads_spread(float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded);
void fkv_heads_gather(const float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded, float *out);

#endif
