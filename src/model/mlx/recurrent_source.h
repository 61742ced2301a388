/* Source code of the GPU kernel that runs the recurrence of delta nets, KDA and Mamba-2 over the tokens of one sequence, for CUDA
 * and Metal, and for its emulation on the host (src/attn/gpu/host), which tests use. This file depends neither on MLX nor on a
 * GPU.
 *
 * Inputs, all float32 except n_tokens, where n is the number of tokens:
 *   state [n_v_heads, v_dim, k_dim]; queries, keys [n, n_k_heads, k_dim]; values [n, n_v_heads, v_dim]
 *   decay, beta [n, n_v_heads]; in KDA, decay [n, n_v_heads, k_dim]; n_tokens: one 32-bit word with the value n
 * Output: out, [n, n_v_heads, v_dim] outputs followed by the new state [n_v_heads, v_dim, k_dim].
 *
 * Algorithm: a warp (simdgroup) of 32 lanes computes one row of the state, that is, one value channel of one head. Each lane
 * keeps every 32nd value of the row in registers for all tokens. Sums over the row are butterfly sums over the lanes, in an order
 * that does not depend on the number of tokens. The tokens are processed one after the other, so the latency of two butterfly
 * sums per token limits the speed of long prefills.
 */
#ifndef FKV_RECURRENT_SOURCE_H
#define FKV_RECURRENT_SOURCE_H

#include "../files/weights.h"

/* Number of state rows, and of threads, in a thread block. */
enum { FKV_RECURRENT_ROWS = 4, FKV_RECURRENT_THREADS = 32 * FKV_RECURRENT_ROWS };

typedef enum fkv_recurrent_device { FKV_RECURRENT_CUDA, FKV_RECURRENT_METAL, FKV_RECURRENT_HOST } fkv_recurrent_device;

/* Writes the part of the source that precedes the kernel. Like snprintf(), writes as much as fits and returns the full length. */
size_t fkv_recurrent_header(fkv_recurrent_device device, fkv_recurrence_kind kind, const fkv_recurrence *shape, char *text,
                            size_t size);

/* Returns the body of the kernel. */
const char *fkv_recurrent_body(fkv_recurrent_device device);

/* The names of the inputs and outputs, terminated by NULL. */
extern const char *const fkv_recurrent_inputs[];
extern const char *const fkv_recurrent_outputs[];

#endif
