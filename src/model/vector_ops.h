/* The small things between products: norms, rotary positions, activations, sums. Each works on one row and is a function of that
 * row alone. Plain loops without branches in a fixed order of additions, for the compiler to vectorize.
 */
#ifndef FKV_VECTOR_OPS_H
#define FKV_VECTOR_OPS_H

#include "../base/base.h"

/* out = x / sqrt(mean(x^2) + eps) * weight; out may be x. */
void fkv_rms_norm(const float *x, const float *weight, float eps, uint32_t n, float *out);

void fkv_row_add(float *x, const float *y, uint32_t n);
void fkv_row_scale(float *x, float factor, uint32_t n);

/* gate = silu(gate) * up, gate = gelu_tanh(gate) * up. Within 4 units in the last place of the exponential. */
void fkv_silu_mul(float *gate, const float *up, uint32_t n);
void fkv_gelu_mul(float *gate, const float *up, uint32_t n);

/* cos and sin, [n_pairs] each, of position * frequency[i]: the angle in double, for positions of any size. */
void fkv_rope_angles(double position, const double *frequencies, uint32_t n_pairs, float *cosines, float *sines);

/* Rotates the pairs of one head: (i, i + n_pairs), or (2 i, 2 i + 1). */
void fkv_rope_halves(float *x, const float *cosines, const float *sines, uint32_t n_pairs);
void fkv_rope_pairs(float *x, const float *cosines, const float *sines, uint32_t n_pairs);

/* Heads of head_dim side by side become heads of `padded` with zeros behind, in place, and back. */
void fkv_heads_spread(float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded);
void fkv_heads_gather(const float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded, float *out);

#endif
