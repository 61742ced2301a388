/* Building MLX graphs from C: operations that return arrays, one failure flag for a whole build, and all handles let go together.
 *
 * A graph owns the handles of the arrays it made until fkv_mlx_graph_release(). After a failure every operation does nothing and
 * returns an empty handle, so a build is written straight down and asked once, at the end, whether it failed. No memory is taken
 * here: the handles lie in the graph; the arrays are MLX's.
 */
#ifndef FKV_MLX_GRAPH_H
#define FKV_MLX_GRAPH_H

#include "../base/base.h"

#include <mlx/c/mlx.h>

enum { FKV_MLX_GRAPH_ARRAYS = 320, FKV_MLX_MAX_DIMS = 4 };

typedef struct fkv_mlx_graph {
    mlx_stream stream; /* the caller's */
    bool failed;
    uint32_t n_made;
    mlx_array made[FKV_MLX_GRAPH_ARRAYS];
} fkv_mlx_graph;

typedef struct fkv_mlx_shape {
    int n;
    int at[FKV_MLX_MAX_DIMS];
} fkv_mlx_shape;

#define FKV_MLX_SHAPE(...)                                                                                                       \
    ((fkv_mlx_shape){(int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)), {__VA_ARGS__}}) /* one to four dimensions */

/* ---- errors ---- */

/* Installs the handler that remembers MLX's words; the first call does it, later ones nothing. */
void fkv_mlx_catch_errors(void);

/* FKV_DEVICE, with what MLX said last on this thread. */
fkv_status fkv_mlx_failed(const char *call);

/* The status of an mlx-c return code. */
FKV_INLINE fkv_status fkv_mlx_check(int code, const char *call) { return code == 0 ? FKV_OK : fkv_mlx_failed(call); }

/* ---- a build ---- */

FKV_INLINE uint32_t fkv_mlx_graph_mark(const fkv_mlx_graph *g) { return g->n_made; }

/* Lets go of the handles made since the mark. */
void fkv_mlx_graph_release(fkv_mlx_graph *g, uint32_t mark);

/* FKV_OK, or FKV_DEVICE if any operation since the last call failed; the flag is cleared. */
fkv_status fkv_mlx_graph_status(fkv_mlx_graph *g, const char *call);

/* *kept becomes a second handle of the array, which outlives the release. Nothing happens after a failure. */
void fkv_mlx_keep(fkv_mlx_graph *g, mlx_array *kept, mlx_array a);

/* Takes a handle that the caller made into the graph's care, and fails if it is empty. */
mlx_array fkv_mlx_adopt(fkv_mlx_graph *g, mlx_array a);

/* Evaluates one array and waits for it. */
void fkv_mlx_eval_one(fkv_mlx_graph *g, mlx_array a);

/* ---- operations: as mlx.core's of the same name ---- */

mlx_array fkv_mlx_add(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_subtract(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_multiply(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_divide(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_maximum(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_minimum(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_less(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_less_equal(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_logical_and(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_logical_or(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_matmul(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_exp(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_tanh(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_isnan(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_abs(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_sqrt(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_right_shift(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_bitwise_and(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_where(fkv_mlx_graph *g, mlx_array condition, mlx_array x, mlx_array y);
mlx_array fkv_mlx_astype(fkv_mlx_graph *g, mlx_array a, mlx_dtype type);
mlx_array fkv_mlx_view(fkv_mlx_graph *g, mlx_array a, mlx_dtype type);
mlx_array fkv_mlx_reshape(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape shape);
mlx_array fkv_mlx_transpose(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape axes);
mlx_array fkv_mlx_sum_last(fkv_mlx_graph *g, mlx_array a); /* over the last axis, which stays as 1 */
mlx_array fkv_mlx_max_last(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_min_last(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_cumsum(fkv_mlx_graph *g, mlx_array a, int axis);
mlx_array fkv_mlx_round(fkv_mlx_graph *g, mlx_array a);                         /* ties to even */
mlx_array fkv_mlx_arange(fkv_mlx_graph *g, uint32_t begin, uint32_t end);       /* int32 [begin, end) */
mlx_array fkv_mlx_take_first(fkv_mlx_graph *g, mlx_array a, mlx_array indices); /* along the first axis */
mlx_array fkv_mlx_concatenate_first(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_hadamard(fkv_mlx_graph *g, mlx_array a, float scale);
mlx_array fkv_mlx_slice(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape start, fkv_mlx_shape stop);
mlx_array fkv_mlx_slice_update(fkv_mlx_graph *g, mlx_array a, mlx_array update, fkv_mlx_shape start, fkv_mlx_shape stop);

mlx_array fkv_mlx_number(fkv_mlx_graph *g, float value);
mlx_array fkv_mlx_zeros(fkv_mlx_graph *g, fkv_mlx_shape shape, mlx_dtype type);

/* x: [rows, n] -> [rows, 1]: sums in 16 lanes, number j in lane j % 16, from first to last; then from lane to lane. */
mlx_array fkv_mlx_sum_in_lanes(fkv_mlx_graph *g, mlx_array x, int rows, int n);

/* The same array, computed only after `before` was. */
mlx_array fkv_mlx_after(fkv_mlx_graph *g, mlx_array a, mlx_array before);

/* A copy that shares no memory with a: MLX's own copy does. zero: 0 of a's type. */
mlx_array fkv_mlx_fresh(fkv_mlx_graph *g, mlx_array a, mlx_array zero);

/* Codes of the last axis: uint32 codes, scales, biases of a's type. Another mode than affine has bytes for scales and no biases.
 */
typedef struct fkv_mlx_affine {
    mlx_array codes;
    mlx_array scales;
    mlx_array biases;
    int bits;
    int group;
    const char *mode; /* "mxfp4", "nvfp4"; NULL: affine */
} fkv_mlx_affine;
fkv_mlx_affine fkv_mlx_quantize(fkv_mlx_graph *g, mlx_array a, int bits, int group);

/* x . w, or x . w transposed, over the last two axes. */
mlx_array fkv_mlx_quantized_matmul(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, bool transpose);

#endif
