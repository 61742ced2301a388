/* What the MLX device keeps of one cache. Lies in the cache's tables; the arrays behind the handles are MLX's.
 *
 * A pool holds the bytes of its layer exactly as the host's slab does, in numbers of 16 bits: [P, G, block.bytes / 2]. `pool` is
 * always the newest version: a step's write replaces the handle, so that nobody but the graph holds the version before it and MLX
 * may write in place.
 */
#ifndef FKV_MLX_STATE_H
#define FKV_MLX_STATE_H

#include "mlx_graph.h"

#include "../../device.h"

#include <flatkv/mlx.h>

typedef struct fkv_mlx_layer {
    const fkv_attn_layer *attn;
    uint32_t group;
    mlx_array pool;
    mlx_array signs[FKV_N_SIDES]; /* float32 [D] of 1 and -1; empty where the side is not rotated */
} fkv_mlx_layer;

/* Numbers that operations take, made once: making an array costs more than using it. All but the last two are float32. */
typedef struct fkv_mlx_constants {
    mlx_array zero;
    mlx_array limit; /* what a page stores at most, and at least */
    mlx_array minus_limit;
    mlx_array minus_infinity;
    mlx_array lowest; /* -FLT_MAX: below every score that is one */
    mlx_array zero_u16;
} fkv_mlx_constants;

typedef struct fkv_mlx_state {
    mlx_stream stream;
    fkv_mlx_way way;
    const char *name;
    const fkv_slab *slab;
    uint32_t n_layers;
    uint32_t n_groups;
    uint32_t max_seqs;
    fkv_mlx_layer *layers; /* [n_layers] */
    mlx_array *tables;     /* [n_groups, max_seqs], plain way: the page table of each row of the step; empty between steps */
    fkv_mlx_constants constants;
    fkv_device_step step; /* n_rows is 0 between steps */
    fkv_mlx_graph graph;
} fkv_mlx_state;

extern const fkv_device fkv_device_mlx;

FKV_INLINE const fkv_attn_row *fkv_mlx_rows(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer) {
    return mlx->step.rows + (size_t)layer->group * mlx->step.stride;
}

FKV_INLINE mlx_dtype fkv_mlx_page_dtype(const fkv_attn_layer *layer) {
    return layer->block.codec[FKV_SIDE_K].type == FKV_BF16 ? MLX_BFLOAT16 : MLX_FLOAT16;
}

/* ---- the plain way (mlx_plain.c, mlx_plain_attend.c) ---- */

fkv_status fkv_mlx_plain_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v);
fkv_status fkv_mlx_plain_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out);

/* What MLX has in use at once for one layer's write and attend of up to n_tokens rows. */
uint64_t fkv_mlx_plain_bytes(const fkv_layer_config *layer, uint32_t n_tokens);

/* x: [.., D] of float32 -> the same, rotated or turned back as src/codec/rotation.h defines it, bit for bit on MLX's CPU. */
mlx_array fkv_mlx_rotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs);
mlx_array fkv_mlx_unrotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs);

#endif
