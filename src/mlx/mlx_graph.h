/* Builds MLX graphs from C. An operation returns an array. Each graph has one failure flag, and all handles of a graph are
 * released together.
 *
 * A graph owns the handles of the arrays it created until fkv_mlx_graph_release(). After a failure, every operation does
 * nothing and returns an empty handle, so a caller checks for failure once, at the end. mlx_graph.c allocates no memory:
 * handles are stored in the graph, and the arrays belong to MLX.
 */
#ifndef FKV_MLX_GRAPH_H
#define FKV_MLX_GRAPH_H

#include "../base/base.h"

#include <mlx/c/mlx.h>

enum { FKV_MLX_GRAPH_ARRAYS = 320, FKV_MLX_MAX_DIMS = 4 };

typedef struct fkv_mlx_graph {
    mlx_stream stream; /* owned by the caller */
    bool failed;
    uint32_t n_made;
    mlx_array made[FKV_MLX_GRAPH_ARRAYS];
} fkv_mlx_graph;

typedef struct fkv_mlx_shape {
    int n;
    int at[FKV_MLX_MAX_DIMS];
} fkv_mlx_shape;

#define FKV_MLX_SHAPE(...)                                                                                                       \
    ((fkv_mlx_shape){(int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)), {__VA_ARGS__}}) /* a shape of one to four dimensions */

/* ---- errors ---- */

/* Installs the error handler that stores MLX messages. Later calls do nothing. */
FKV_INTERNAL void fkv_mlx_catch_errors(void);

/* Fails with FKV_DEVICE and this thread's last MLX error message. */
FKV_INTERNAL fkv_status fkv_mlx_failed(const char *call);

/* Converts an mlx-c return code to a status. */
FKV_INLINE fkv_status fkv_mlx_check(int code, const char *call) { return code == 0 ? FKV_OK : fkv_mlx_failed(call); }

/* ---- graphs ---- */

FKV_INLINE uint32_t fkv_mlx_graph_mark(const fkv_mlx_graph *g) { return g->n_made; }

/* Releases all handles created since fkv_mlx_graph_mark() returned `mark`. */
FKV_INTERNAL void fkv_mlx_graph_release(fkv_mlx_graph *g, uint32_t mark);

/* Returns FKV_OK, or FKV_DEVICE if an operation failed since the last call. Clears the failure flag. */
FKV_INTERNAL fkv_status fkv_mlx_graph_status(fkv_mlx_graph *g, const char *call);

/* Sets *kept to a second handle to the array, which stays valid after the graph releases its own handles. Does nothing after a
 * failure. */
FKV_INTERNAL void fkv_mlx_keep(fkv_mlx_graph *g, mlx_array *kept, mlx_array a);

/* Transfers ownership of a handle to the graph. Sets the failure flag if the handle is empty. */
FKV_INTERNAL mlx_array fkv_mlx_adopt(fkv_mlx_graph *g, mlx_array a);

/* Evaluates one array and waits for its result. */
void fkv_mlx_eval_one(fkv_mlx_graph *g, mlx_array a);

/* ---- operations of mlx.core ---- */

FKV_INTERNAL mlx_array fkv_mlx_add(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_subtract(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_multiply(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_divide(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_maximum(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_minimum(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_less(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_less_equal(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_logical_and(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_logical_or(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_matmul(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_exp(fkv_mlx_graph *g, mlx_array a);
FKV_INTERNAL mlx_array fkv_mlx_tanh(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_isnan(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_abs(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_sqrt(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_right_shift(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_bitwise_and(fkv_mlx_graph *g, mlx_array a, mlx_array b);
FKV_INTERNAL mlx_array fkv_mlx_where(fkv_mlx_graph *g, mlx_array condition, mlx_array x, mlx_array y);
FKV_INTERNAL mlx_array fkv_mlx_astype(fkv_mlx_graph *g, mlx_array a, mlx_dtype type);
FKV_INTERNAL mlx_array fkv_mlx_view(fkv_mlx_graph *g, mlx_array a, mlx_dtype type);
FKV_INTERNAL mlx_array fkv_mlx_reshape(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape shape);
FKV_INTERNAL mlx_array fkv_mlx_transpose(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape axes);
FKV_INTERNAL mlx_array fkv_mlx_sum_last(fkv_mlx_graph *g, mlx_array a); /* sums over the last axis, which then has size 1 */
FKV_INTERNAL mlx_array fkv_mlx_max_last(fkv_mlx_graph *g, mlx_array a);
FKV_INTERNAL mlx_array fkv_mlx_min_last(fkv_mlx_graph *g, mlx_array a);
mlx_array fkv_mlx_cumsum(fkv_mlx_graph *g, mlx_array a, int axis);
mlx_array fkv_mlx_round(fkv_mlx_graph *g, mlx_array a);                   /* rounds ties to even */
mlx_array fkv_mlx_arange(fkv_mlx_graph *g, uint32_t begin, uint32_t end); /* int32 array of the integers in [begin, end) */
FKV_INTERNAL mlx_array fkv_mlx_take_first(fkv_mlx_graph *g, mlx_array a,
                                          mlx_array indices); /* selects elements by index along the first axis */
mlx_array fkv_mlx_concatenate_first(fkv_mlx_graph *g, mlx_array a, mlx_array b);
mlx_array fkv_mlx_hadamard(fkv_mlx_graph *g, mlx_array a, float scale);
FKV_INTERNAL mlx_array fkv_mlx_slice(fkv_mlx_graph *g, mlx_array a, fkv_mlx_shape start, fkv_mlx_shape stop);
mlx_array fkv_mlx_slice_update(fkv_mlx_graph *g, mlx_array a, mlx_array update, fkv_mlx_shape start, fkv_mlx_shape stop);

mlx_array fkv_mlx_number(fkv_mlx_graph *g, float value);
mlx_array fkv_mlx_zeros(fkv_mlx_graph *g, fkv_mlx_shape shape, mlx_dtype type);

/* Sums each row in a fixed order: [rows, n] -> [rows, 1]. Element j is added to partial sum j % 16, in ascending order of j. The
 * 16 partial sums are then added from first to last. */
mlx_array fkv_mlx_sum_in_lanes(fkv_mlx_graph *g, mlx_array x, int rows, int n);

/* Returns an array equal to `a` that MLX evaluates only after `before`. */
mlx_array fkv_mlx_after(fkv_mlx_graph *g, mlx_array a, mlx_array before);

/* Returns a copy that does not share memory with `a`, unlike the result of MLX's copy operation. `zero` is 0 in the type of `a`.
 */
mlx_array fkv_mlx_fresh(fkv_mlx_graph *g, mlx_array a, mlx_array zero);

/* Quantized matrix: codes packed into uint32 words along the last axis, scales and biases. Modes other than affine have 8-bit
 * scales and no biases.
 */
typedef struct fkv_mlx_affine {
    mlx_array codes;
    mlx_array scales;
    mlx_array biases;
    int bits;
    int group;
    const char *mode; /* "mxfp4", "nvfp4" or "mxfp8"; NULL means affine */
} fkv_mlx_affine;
fkv_mlx_affine fkv_mlx_quantize(fkv_mlx_graph *g, mlx_array a, int bits, int group);

/* Computes the matrix product x * w, or x * w^T if `transpose` is true, over the last two axes. */
mlx_array fkv_mlx_quantized_matmul(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, bool transpose);

#endif
