/* flatkv/mlx.h: the cache on MLX arrays. Pages are in MLX memory and steps are lazy MLX operations.
 *
 * Ownership and threading
 *   A cache opened here supports all calls of flatkv.h: sequences, prefixes, steps, stats and page files. A page file can be
 *   loaded on a different device if fkv_config.numerics is the same on both. Only the two calls that take rows differ: use
 *   fkv_mlx_write() and fkv_mlx_attend() instead of fkv_write() and fkv_attend(), which return FKV_UNSUPPORTED on such a cache.
 *   MLX streams belong to threads, so a cache must be used by the thread that created its stream.
 *
 * Lazy evaluation
 *   Nothing is evaluated inside a step. fkv_mlx_write() and fkv_mlx_attend() only add operations to the graph. Evaluating the
 *   step's result runs these operations in order. fkv_step_commit() does not wait for an evaluation either. If an evaluation
 *   fails later, the step's tokens have not been written, and the caller must truncate or close the affected sequences. Steps
 *   must be evaluated in the order in which they were begun: each step before the next one begins, or several steps in one
 *   evaluation. Saving and loading page files evaluate all pending operations. One exception applies to FKV_MLX_PLAIN:
 *   fkv_step_begin() copies shared pages that will be written and waits for these copies.
 *
 * Memory
 *   The page pools, one array per layer, are allocated and committed at open. Their size is part of the plan. With
 *   FKV_MLX_FUSED, kernels write into the pool in place and return a dependency array that orders later reads after the write,
 *   so no step copies a pool. With FKV_MLX_PLAIN, MLX writes in place only if it holds the only reference to the pool. On its
 *   CPU stream, this condition is met if every step is evaluated before the next one begins. Otherwise MLX copies the whole
 *   pool: the result is correct, but peak memory exceeds the plan. For latent layers with FKV_MLX_PLAIN on a GPU, the plan
 *   includes this copy.
 *
 * Errors
 *   mlx-c has one process-wide error handler, and the default handler exits the process. The first call to a function of this
 *   header installs a handler that records the error text, so that every mlx-c call returns its error code. A failure inside
 *   MLX is reported as FKV_DEVICE, with MLX's text in fkv_message(). If an mlx-c call of the program itself fails,
 *   fkv_mlx_last_error() returns the error text. A program that needs its own handler must install it after its first call to a
 *   function of this header. Status codes remain correct, but fkv_message() then contains no text from MLX.
 */
#ifndef FLATKV_MLX_H
#define FLATKV_MLX_H

#include "flatkv.h"

#include <mlx/c/mlx.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fkv_mlx_way {
    FKV_MLX_AUTO = 0, /* selects FKV_MLX_FUSED if it supports the stream and all layers, otherwise FKV_MLX_PLAIN */
    FKV_MLX_PLAIN,    /* MLX's built-in operations; works on any stream */
    FKV_MLX_FUSED     /* flatkv's own kernels; for Metal and CUDA streams only. Latent layers are supported only on CUDA */
} fkv_mlx_way;

typedef struct fkv_mlx_config {
    mlx_stream stream; /* stream on which all operations run, retained by the cache; an empty handle (ctx NULL) selects the
                          default stream */
    fkv_mlx_way way;
} fkv_mlx_config;

/* Returns the default configuration: the default stream and FKV_MLX_AUTO. */
FKV_API fkv_mlx_config fkv_mlx_config_default(void);

/* Computes the plan of a configuration, like fkv_plan_make(). slab_bytes is allocated by MLX and counts towards MLX's active
 * memory between open and close. It includes the pages and, on a GPU, the padding of their arrays and, with FKV_MLX_PLAIN, a
 * copy of the largest latent pool. On CUDA with sealed layers, it also includes a ring buffer of unpacked pages for prefill. It
 * excludes MLX's intermediate results, whose size does not depend on the context length; see fkv_mlx_step_bytes(). If mlx_config
 * is NULL, the default is used. */
FKV_API fkv_status fkv_mlx_plan_make(const fkv_config *config, const fkv_mlx_config *mlx_config, fkv_plan *plan);

/* Computes an upper bound on the memory that MLX needs for the intermediate results of fkv_mlx_write() and fkv_mlx_attend() on
 * one layer, excluding q, k, v and the result. The bound does not depend on max_tokens. */
FKV_API fkv_status fkv_mlx_step_bytes(const fkv_config *config, const fkv_mlx_config *mlx_config, uint64_t *bytes);

/* Opens a cache, like fkv_cache_open(). n_threads, isa and lazy are ignored, and the row type is taken from each array. Returns
 * FKV_UNSUPPORTED if the stream does not support the requested fkv_mlx_way. Close the cache with fkv_cache_close(). */
FKV_API fkv_status fkv_mlx_cache_open(const fkv_config *config, const fkv_mlx_config *mlx_config, fkv_cache **cache);

/* Quantizes the K and V rows of one layer into their pages. k, v: [T, G, D] of float16, bfloat16 or float32. FKV_MLX_FUSED also
 * accepts [T, G, 1, D], the shape that models use for decode; fkv_mlx_attend() then also accepts a q of shape [T, H, 1, D]. In a
 * latent layer, k is [T, 1, D + rope_dim] and v is an empty handle. */
FKV_API fkv_status fkv_mlx_write(fkv_step *step, uint32_t layer, mlx_array k, mlx_array v);

/* Computes attention, like fkv_attend(). q: [T, H, D] of float16, bfloat16 or float32. *out receives an array of the same shape
 * and type; in a latent layer, q is [T, H, D + rope_dim] and *out is [T, H, D]. As in all mlx-c calls, *out must be a valid
 * handle, for example from mlx_array_new(), and its previous array is released. *out may be q. */
FKV_API fkv_status fkv_mlx_attend(fkv_step *step, uint32_t layer, mlx_array q, mlx_array *out);

/* Sets *state to the recurrent state that a row of the step starts from: float32 [state_bytes / 4]. The state is all zeros if
 * the sequence is empty. Like *out of fkv_mlx_attend(), *state must be a valid handle. */
FKV_API fkv_status fkv_mlx_state_get(fkv_step *step, uint32_t layer, uint32_t row, mlx_array *state);

/* Stores, for each row of the step, the recurrent state after the row's tokens. states: one array for each row, float32
 * [state_bytes / 4]. Must be called exactly once per step for each state layer. The arrays may be lazy; nothing is copied. On
 * an MLX cache, fkv_mlx_state_get() and fkv_mlx_state_put() replace fkv_state_rows(), which returns FKV_UNSUPPORTED. */
FKV_API fkv_status fkv_mlx_state_put(fkv_step *step, uint32_t layer, const mlx_array *states);

/* Returns all rows of one sequence, decoded, for models that compute attention themselves. row: index of the sequence in the
 * step. *k and *v receive float32 arrays [G, S, D], where S is the length of the sequence including the tokens of the step. In a
 * latent layer, *k receives the latent channels, [1, S, D], and *v the RoPE channels, [1, S, rope_dim]. *k and *v must be valid
 * handles, like *out of fkv_mlx_attend(). The layer must have been written. Returns FKV_UNSUPPORTED for sealed layers and for
 * layers with a window. The arrays grow with the sequence and are not part of the plan. */
FKV_API fkv_status fkv_mlx_fetch(fkv_step *step, uint32_t layer, uint32_t row, mlx_array *k, mlx_array *v);

/* Appends to `arrays` the arrays whose evaluation completes all writes of this step. Every layer must have been written. Needed
 * if no attention call depends on the last write, for example in a prefill chunk without logits. */
FKV_API fkv_status fkv_mlx_step_pending(fkv_step *step, mlx_vector_array arrays);

/* ---- compiled steps (FKV_MLX_FUSED only; otherwise FKV_UNSUPPORTED) ----
 *
 * mlx_compile traces a graph once and replays it with different inputs. The inputs of a step's graph are its rows and two kinds
 * of state arrays: the tables, which map the step's tokens to pages, and the dependency arrays, which order the step's kernels
 * after all earlier accesses to the pools. Steps of the same form (see fkv_mlx_step_state()) have the same graph. To trace a
 * graph, substitute placeholders for the state arrays and return the new dependency arrays as outputs. Steps that prefill
 * sealed layers cannot be compiled (FKV_UNSUPPORTED). */

enum { FKV_MLX_FORM_WORDS = 7 }; /* number of 32-bit words that describe the form of one table */

/* Appends the tables, then the dependency arrays, to `arrays`. form: [*n_tables, FKV_MLX_FORM_WORDS]. On entry, *n_tables is
 * the number of tables that fit in form. On return, it is the number of tables of the step, which is at most the number of
 * layers. */
FKV_API fkv_status fkv_mlx_step_state(fkv_step *step, mlx_vector_array arrays, uint32_t *form, uint32_t *n_tables);

/* Replaces the state arrays with `arrays`, in the same order. The new tables are used until the step ends; the new dependency
 * arrays remain in use after the step. If replayed is true, the arrays are the outputs of a compiled graph, and every layer
 * counts as written and attended. */
FKV_API fkv_status fkv_mlx_step_put_state(fkv_step *step, mlx_vector_array arrays, bool replayed);

/* Returns the method that the cache uses (FKV_MLX_PLAIN or FKV_MLX_FUSED), or FKV_MLX_AUTO if the cache is not an MLX cache. */
FKV_API fkv_mlx_way fkv_mlx_cache_way(const fkv_cache *cache);

/* Computes x * w^T for a matrix w in MLX's affine quantization, with a kernel that reads the weights faster than MLX's
 * quantized_matmul. codes, scales, biases: results of mlx_quantize() with this group size and number of bits. x: [..., C] of
 * float16, bfloat16 or float32, where C is a multiple of 128. *out receives an array [..., R] of the type of x; *out must be a
 * valid handle, as in fkv_mlx_attend(). The result of a row does not depend on the other rows. Returns FKV_UNSUPPORTED, and
 * leaves *out unchanged, if the stream is not a CUDA stream, x has more than 8 rows or more than 4 dimensions, the matrix does
 * not have 4 or 8 bits in groups of 32, 64 or 128, or the type of the scales differs from that of x (a float32 x accepts any
 * type). The caller should then use quantized_matmul. codes and scales must start at a multiple of 16 bytes. An empty stream
 * handle selects the default stream. May be called from any thread. */
FKV_API fkv_status fkv_mlx_quantized_product(mlx_array x, mlx_array codes, mlx_array scales, mlx_array biases, uint32_t group,
                                             uint32_t bits, mlx_stream stream, mlx_array *out);

/* Returns the text of this thread's most recent MLX error, or "" if none occurred. */
FKV_API const char *fkv_mlx_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
