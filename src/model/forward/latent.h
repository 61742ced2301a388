/* Multi-head latent attention (MLA) on the CPU, with absorbed projections.
 *
 * All heads share one latent vector c of L values and one key part with RoPE, k_rope of R values. Head h has the key [K_h c |
 * k_rope] and the value V_h c. Instead of computing keys and values for all tokens, the runner multiplies the query by the
 * transposed K_h and the output of attention by V_h:
 *
 *     score = q_nope . (K_h c) + q_rope . k_rope = (K_h^T q_nope) . c + q_rope . k_rope
 *     output = V_h (sum of p * c)
 *
 * The cache stores [c | k_rope] (fkv_layer_config.rope_dim). In q, k and pages, c and k_rope are zero-padded to the multiples
 * that the codecs require.
 */
#ifndef FKV_LATENT_H
#define FKV_LATENT_H

#include "packed_weights.h"
#include "runner.h"

/* Reserves the buffers of latent attention (carve.h). Returns the number of bytes that the buffer `input` needs for the per-head
 * matrix products.
 */
uint64_t fkv_latent_layout(fkv_carve *carve, fkv_runner *runner);

/* Computes the queries and the rows to store in the cache from the normalized rows in `h`. Writes them to `q` and `k`. */
void fkv_latent_prepare(fkv_runner *runner, const fkv_packed_layer *layer, uint32_t index);

/* Computes the input of the output projection from the first n_rows rows of `attended`, and writes it to latent_out. */
void fkv_latent_finish(fkv_runner *runner, const fkv_packed_layer *layer, uint32_t n_rows);

#endif
