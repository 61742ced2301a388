/* flatkv on mlx arrays: the same cache, with its pages in MLX's memory and its steps as lazy MLX operations.
 *
 * A cache opened here is a cache like any other: sequences, prefixes, steps, stats and page files are flatkv.h's calls, and a
 * page file saved on one device loads on the other. Only the two calls that take rows differ: fkv_mlx_write() and
 * fkv_mlx_attend() in place of fkv_write() and fkv_attend(), which answer FKV_UNSUPPORTED on such a cache.
 *
 * Lazy
 *   Nothing is evaluated and nothing waits inside a step: write and attend add to the graph, and one evaluation of the step's
 *   result runs them, in order. (With plain operations a shared page about to be written is copied by fkv_step_begin(), which
 *   waits for it.) Commit does not wait either; an evaluation that fails afterwards has left the step's tokens unwritten, and the
 *   caller truncates the sequences or closes them. Steps are evaluated in the order they were begun: by evaluating a result of
 *   each step before the next begins, or all of them together. Saving and loading evaluate what is pending.
 *
 * In place
 *   The pools, one array for each layer, are taken and committed at open; their bytes are in the plan, and no step copies them.
 *   On a GPU (FKV_MLX_FUSED) kernels write into the pool they were given and hand on a ticket that orders the reads after them.
 *   With plain operations MLX itself writes in place where nothing else holds the pool, which is so on its CPU stream when every
 *   step is evaluated before the next one begins; otherwise it copies the pool for that step: right, but not flat.
 *
 * Errors
 *   mlx-c has one error handler for the whole process, and its own one exits. The first call here installs one that keeps the
 *   text instead, so that every mlx-c call returns its code: what fails inside MLX is FKV_DEVICE with MLX's text in
 *   fkv_message(), and a program's own failing mlx-c calls can find theirs in fkv_mlx_last_error(). A program with a handler of
 *   its own sets it after its first call here; statuses stay right, but fkv_message() then has no text from MLX.
 *
 * MLX's streams belong to threads: a cache is driven by the thread that made its stream.
 */
#ifndef FLATKV_MLX_H
#define FLATKV_MLX_H

#include "flatkv.h"

#include <mlx/c/mlx.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fkv_mlx_way {
    FKV_MLX_AUTO = 0, /* fused where the stream is a GPU's */
    FKV_MLX_PLAIN,    /* MLX's own operations, on any stream */
    FKV_MLX_FUSED     /* flatkv's kernels: Metal and CUDA streams only */
} fkv_mlx_way;

typedef struct fkv_mlx_config {
    mlx_stream stream; /* where everything runs, kept by reference count; empty (ctx NULL): the default stream */
    fkv_mlx_way way;
} fkv_mlx_config;

FKV_API fkv_mlx_config fkv_mlx_config_default(void);

/* Makes FKV_BACKEND_MLX of flatkv/model.h known to the library: called once, before a model is loaded for it. Caches need no such
 * call. FKV_UNSUPPORTED where libflatkv is of another version than this library. */
FKV_API fkv_status fkv_mlx_register(void);

/* As fkv_plan_make(). total_bytes is what flatkv takes, of which slab_bytes are MLX's (they show in its active memory from open
 * to close): the pages, and on a GPU what their arrays are rounded up to and, on CUDA with sealed layers, a ring of unpacked
 * pages that prefill has. What MLX takes for the intermediate results of a step is not in it: it does not depend on the context
 * length. mlx_config may be NULL: the default. */
FKV_API fkv_status fkv_mlx_plan_make(const fkv_config *config, const fkv_mlx_config *mlx_config, fkv_plan *plan);

/* The most that MLX has in use at once for the intermediate results of one layer's write and attend, beside the rows and the
 * result themselves. Does not depend on max_tokens. */
FKV_API fkv_status fkv_mlx_step_bytes(const fkv_config *config, const fkv_mlx_config *mlx_config, uint64_t *bytes);

/* As fkv_cache_open(); n_threads, isa and lazy are not looked at, and row_type is that of each array. FKV_UNSUPPORTED for a way
 * that the stream does not have. Close with fkv_cache_close(). */
FKV_API fkv_status fkv_mlx_cache_open(const fkv_config *config, const fkv_mlx_config *mlx_config, fkv_cache **cache);

/* Quantizes the K and V rows of one layer into their pages. k, v: [T, G, D], float16, bfloat16 or float32;
 * on the fused way [T, G, 1, D] too, as models have them in decode, and q and the answer of attend alike. */
FKV_API fkv_status fkv_mlx_write(fkv_step *step, uint32_t layer, mlx_array k, mlx_array v);

/* As fkv_attend(). q: [T, H, D], float16, bfloat16 or float32; *out becomes an array of the same shape and type. *out is a valid
 * handle (mlx_array_new() will do) whose old array is released, as for every mlx-c call; q itself is allowed. */
FKV_API fkv_status fkv_mlx_attend(fkv_step *step, uint32_t layer, mlx_array q, mlx_array *out);

/* Appends to `arrays` what must be evaluated for all writes of this step, which has written every layer, to have happened: for a
 * step that ends with a write that no attention reads, as a prefill chunk without logits does. */
FKV_API fkv_status fkv_mlx_step_pending(fkv_step *step, mlx_vector_array arrays);

/* ---- steps whose graph is kept (FKV_MLX_FUSED; else FKV_UNSUPPORTED) ----
 *
 * MLX's compile builds a graph once and replays it with other arrays. Steps of equal form make the same graph out of their rows
 * and these arrays: the tables, which say where the step's tokens are, and the tickets, which order its kernels after all that
 * touched the pools before. A graph is traced by putting placeholders in their place, and its tickets are results of it. Steps
 * that prefill sealed layers are not kept: FKV_UNSUPPORTED. */

enum { FKV_MLX_FORM_WORDS = 7 }; /* of one table */

/* Appends the tables, then the tickets, to `arrays`. form: FKV_MLX_FORM_WORDS words for each table; *n_tables comes in as the
 * tables that there is room for, and goes out as those of the step (never more than layers). */
FKV_API fkv_status fkv_mlx_step_state(fkv_step *step, mlx_vector_array arrays, uint32_t *form, uint32_t *n_tables);

/* Puts these in their place, in the same order, up to the end of the step; the tickets stay. replayed: a kept graph made them,
 * and every layer counts as written and attended. */
FKV_API fkv_status fkv_mlx_step_put_state(fkv_step *step, mlx_vector_array arrays, bool replayed);

/* The way in use: FKV_MLX_PLAIN or FKV_MLX_FUSED; FKV_MLX_AUTO where the cache is not on MLX. */
FKV_API fkv_mlx_way fkv_mlx_cache_way(const fkv_cache *cache);

/* What MLX said last, on this thread. "" if nothing failed yet. */
FKV_API const char *fkv_mlx_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
