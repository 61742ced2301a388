/* The small things between products: norms, rotary positions, activations, sums. Each works on one row and is a function of that
 * row alone. Plain loops without branches and with a fixed order of additions, for the compiler to vectorize: every instruction
 * set gives the same bits.
 */
#ifndef FKV_VECTOR_OPS_H
#define FKV_VECTOR_OPS_H

#include "../../base/base.h"

typedef struct fkv_vector_ops {
    /* out = x / sqrt(mean(x^2) + eps) * weight; out may be x. */
    void (*rms_norm)(const float *x, const float *weight, float eps, uint32_t n, float *out);

    /* out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; bias may be NULL, out may be x. */
    void (*layer_norm)(const float *x, const float *weight, const float *bias, float eps, uint32_t n, float *out);

    void (*add)(float *x, const float *y, uint32_t n);
    void (*add_scaled)(float *x, const float *y, float scale, uint32_t n);

    /* gate = silu(gate) * up, gate = gelu_tanh(gate) * up, with an exponential that is right to 2 units in the last place. */
    void (*silu_mul)(float *gate, const float *up, uint32_t n);
    void (*gelu_mul)(float *gate, const float *up, uint32_t n);

    /* gate = g sigmoid(alpha g) (u + 1), with g at most limit and u between -limit and limit. */
    void (*swiglu_mul)(float *gate, const float *up, float alpha, float limit, uint32_t n);

    /* Rotates the pairs of one head: (i, i + n_pairs), or (2 i, 2 i + 1). */
    void (*rope_halves)(float *x, const float *cosines, const float *sines, uint32_t n_pairs);
    void (*rope_pairs)(float *x, const float *cosines, const float *sines, uint32_t n_pairs);

    /* Of n > 0 numbers the first that is the largest; n: one of them is not a number. */
    uint32_t (*largest)(const float *x, uint32_t n);
} fkv_vector_ops;

/* isa must run on this machine; FKV_ISA_AUTO is not taken. */
const fkv_vector_ops *fkv_vector_ops_for(fkv_isa isa);

/* The tables, by the flags they were compiled with. */
extern const fkv_vector_ops fkv_vector_ops_plain;
extern const fkv_vector_ops fkv_vector_ops_avx2;
extern const fkv_vector_ops fkv_vector_ops_avx512;

/* cos and sin, [n_pairs] each, of position * frequency[i]: the angle in double, for positions of any size. */
void fkv_rope_angles(double position, const double *frequencies, uint32_t n_pairs, float *cosines, float *sines);

/* Heads of head_dim side by side become heads of `padded` with zeros behind, in place, and back. */
void fkv_heads_spread(float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded);
void fkv_heads_gather(const float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded, float *out);

#endif
