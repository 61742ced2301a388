/* State of the MLX backend for one cache, stored in the tables of the cache. The arrays belong to MLX.
 *
 * Recurrent states have no pool: each slot of a state layer is a separate array (mlx_states.c).
 *
 * A pool contains the P pages of one layer as 16-bit words: [P, G, block.bytes / 2]. The bytes are the same as in the slab of a
 * host cache. In the plain method, a write replaces the handle `pool`, so that only the graph owns the previous array and MLX
 * can write in place. In the fused method, `pool` is the same array from open to close. Kernels are ordered by `dependency`, an
 * array that the latest kernel on the pool produced.
 */
#ifndef FKV_MLX_STATE_H
#define FKV_MLX_STATE_H

#include "mlx_kernel.h"

#include "../attn/gpu/kernel_source.h"
#include "../attn/gpu/step_table.h"
#include "../cache/device.h"
#include "../codec/channel_order.h"

#include <flatkv/mlx.h>

#include <pthread.h>

enum { FKV_MLX_ROW_TYPES = 3, FKV_MLX_DECODES = 3 };

/* Fused kernels of one layer shape, indexed by row type. Decode kernels are also indexed by their number of rows: 4, 8 or 16. */
typedef struct fkv_mlx_kernels {
    fkv_mlx_kernel of[FKV_MLX_ROW_TYPES][FKV_N_KERNELS];
    fkv_mlx_kernel decode[FKV_MLX_ROW_TYPES][FKV_MLX_DECODES];
    fkv_mlx_kernel decode_merge[FKV_MLX_ROW_TYPES][FKV_MLX_DECODES];
} fkv_mlx_kernels;

/* Channel tables of calibrated keys for all heads of a layer. A code consists of one to three digits of 2 bits. The rows of an
 * array [G * D, ..] are channels, or positions in the channel order of each head (channel_order.h). The rows of an array [G *
 * N, ..] are digits in packed order; N is the number of digits per head, including the padding of the last line. */
typedef struct fkv_mlx_channels {
    mlx_array bins;                   /* float32 [G, D, 1]: the largest code of each channel */
    mlx_array channel;                /* uint32 [G * D]: maps positions in the channel order to channels */
    mlx_array place;                  /* uint32 [G * D]: maps channels to positions in the channel order */
    mlx_array packed;                 /* uint32 [G * N]: maps packed digits to rows of an array [FKV_MAX_DIGITS * G * D, ..] */
    mlx_array there;                  /* uint32 [G * N, 1]: 0 for padding digits, otherwise 1 */
    mlx_array digit[FKV_MAX_DIGITS];  /* uint32 [G * D]: for digit d, maps channels to packed digits */
    mlx_array weight[FKV_MAX_DIGITS]; /* float32 [G * D, 1]: place value of digit d, 4^d; 0 if the channel has no digit d */
} fkv_mlx_channels;

/* Table of the previous step, from which the table of the current step may be computed (mlx_table.c). */
typedef struct fkv_mlx_last_table {
    mlx_array table;
    uint32_t *words;  /* host copy, allocated */
    uint32_t n_words; /* 0 if there is no table */
    pthread_t thread; /* the thread that created the table */
} fkv_mlx_last_table;

/* A pool of pages and the data that its kernels need. A sealed layer has two pools with the same `attn`, one for its sealed pages
 * and one for its open pages. The pools of open pages are stored after the pools of all layers. */
typedef struct fkv_mlx_layer fkv_mlx_layer;
struct fkv_mlx_layer {
    const fkv_attn_layer *attn;
    const fkv_block *block; /* layout of the pages in the pool */
    fkv_mlx_layer *open;    /* pool of the layer's open pages, to which new rows are written; NULL if the layer is not sealed */
    uint32_t group;
    mlx_array pool;
    mlx_array signs[FKV_N_SIDES]; /* float32 [D]: signs (1 or -1) of the rotations of K and V; empty if there is no rotation */
    mlx_array sink_logits;        /* float32 [max(H, 8)]; zeros if the layer has no sink logits */
    fkv_mlx_channels channels;    /* used only in the plain method, for sealed pages with calibrated keys */

    /* state layers (mlx_states.c), which have no pool */
    mlx_array *states; /* [n_states] slots, each float32 [n_state_values]; NULL if the layer stores keys and values */
    uint32_t n_states;
    uint32_t n_state_values;

    /* fused method */
    mlx_array pool_start; /* view of the first words of the pool; passed to the kernels instead of `pool` */
    mlx_array dependency; /* uint32 array; a kernel that takes it as input runs after all earlier accesses to the pool */
    mlx_array counters;   /* uint32 [FKV_MERGE_COUNTERS], used by FKV_KERNEL_DECODE_MERGE; empty in pools of open pages */
    mlx_array orders;     /* uint32 [G, fkv_kernel_order_words()]: channel orders of calibrated keys; empty for other keys and in
                             pools of open pages */
    uint32_t kind;        /* index of the first layer with the same kernels; that layer owns them */
    fkv_mlx_kernels kernels; /* empty if `kind` is the index of another layer */
    fkv_step_plan cut;
    uint32_t table_of; /* index of the first layer with the same group and `cut`; that layer owns the step table. In a state
                          layer, an invalid index */
    mlx_array table;   /* step table; empty between steps, and always empty if `table_of` is the index of another layer */
    uint32_t table_words;
    fkv_mlx_last_table last_table;
    uint32_t header[FKV_STEP_HEADER]; /* host copy of the step table's header */
};

/* Constant arrays, created once because creating an array is slow. All arrays are float32 except zero_u16 and zero_u32. */
typedef struct fkv_mlx_constants {
    mlx_array zero;
    mlx_array limit; /* largest magnitude that a page stores */
    mlx_array minus_limit;
    mlx_array minus_infinity;
    mlx_array lowest; /* -FLT_MAX, which is below every valid score */
    mlx_array zero_u16;
    mlx_array zero_u32;
} fkv_mlx_constants;

typedef struct fkv_mlx_state {
    mlx_stream stream;
    fkv_mlx_way way;
    fkv_kernel_device kernels_for; /* device that runs the fused kernels */
    const char *name;
    const fkv_slab *slab;
    uint32_t n_layers; /* number of layers of the model */
    uint32_t n_pools;  /* number of pools, including those of open pages; equals the number of slab layers */
    uint32_t n_groups;
    uint32_t max_seqs;
    fkv_mlx_layer *layers; /* [n_pools] */
    mlx_array *states;     /* slots of all state layers */
    mlx_array *tables;     /* [n_groups, max_seqs]: page tables of the step's rows in the plain method, otherwise empty */
    fkv_mlx_constants constants;
    mlx_array ring; /* ring buffer through which prefill thread blocks share unpacked pages; empty if no layer uses it */
    mlx_array ring_dependency; /* dependency array of the ring */
    fkv_mlx_kernel update_table;
    fkv_device_step step; /* the current step; n_rows is 0 between steps */
    fkv_mlx_graph graph;
} fkv_mlx_state;

extern const fkv_device fkv_device_mlx;

FKV_INLINE const fkv_attn_row *fkv_mlx_rows(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer) {
    return mlx->step.rows + (size_t)layer->group * mlx->step.stride;
}

FKV_INLINE bool fkv_mlx_is_latent(const fkv_mlx_layer *layer) { return layer->attn->rope_dim != 0; }

/* Returns the rotation of the rows that one side of a page stores, or NULL if they are not rotated. In a latent layer, the V side
 * stores the RoPE channels, which are never rotated; rotate_v applies to the output of attention. */
FKV_INLINE const fkv_rotation *fkv_mlx_stored_rotation(const fkv_mlx_layer *layer, fkv_side side) {
    if (side == FKV_SIDE_K) return layer->attn->rotate_k;
    return fkv_mlx_is_latent(layer) ? NULL : layer->attn->rotate_v;
}

/* Returns FKV_BAD_ARGUMENT if the layer has a recurrent state instead of pages. call: name of the public function */
fkv_status fkv_mlx_require_pages(const fkv_mlx_layer *layer, uint32_t index, const char *call);

/* ---- plain method (mlx_plain.c) ---- */

fkv_status fkv_mlx_plain_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v);
fkv_status fkv_mlx_plain_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out);

/* Returns an upper bound, in bytes, on the temporary MLX memory for writing and attending to n_tokens rows in one layer. */
uint64_t fkv_mlx_plain_bytes(const fkv_layer_config *layer, uint32_t n_tokens);

/* Rotate x, or undo the rotation. x: float32 [.., D]. On the MLX CPU backend, results are bit-identical to src/codec/rotation.h.
 */
mlx_array fkv_mlx_rotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs);
mlx_array fkv_mlx_unrotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs);

/* Creates the channel tables of a layer with calibrated keys (mlx_sealed.c). Failures are recorded in the graph. */
void fkv_mlx_channels_open(fkv_mlx_graph *g, const fkv_attn_layer *attn, fkv_mlx_channels *channels);

/* ---- recurrent states (mlx_states.c) ---- */

/* Fills all slots of a state layer with zeros. Failures are recorded in the graph. */
void fkv_mlx_states_open(fkv_mlx_graph *g, fkv_mlx_layer *layer);
void fkv_mlx_states_close(fkv_mlx_layer *layer);

/* Implement fkv_mlx_state_get() and fkv_mlx_state_put() for a state layer of the current step. */
fkv_status fkv_mlx_states_get(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t row, mlx_array *state);
fkv_status fkv_mlx_states_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, const mlx_array *states);

/* Read or write bytes [from, from + bytes) of a slot. Failures are recorded in the graph. */
void fkv_mlx_states_read(fkv_mlx_graph *g, const fkv_mlx_layer *layer, uint32_t slot, uint64_t from, uint64_t bytes,
                         uint8_t *out);
void fkv_mlx_states_write(fkv_mlx_graph *g, fkv_mlx_layer *layer, uint32_t slot, uint64_t from, uint64_t bytes,
                          const uint8_t *in);

/* ---- fused method (mlx_fused.c) ---- */

/* Opens layer l. All pools and all previous layers must already be open. Failures are recorded in the graph. */
void fkv_mlx_fused_open(fkv_mlx_state *mlx, uint32_t l);
void fkv_mlx_fused_close(fkv_mlx_layer *layer);
fkv_status fkv_mlx_fused_begin(fkv_mlx_state *mlx);
fkv_status fkv_mlx_fused_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v);
fkv_status fkv_mlx_fused_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out);

/* Sets the table of a step (mlx_table.c). words: [n], allocated with malloc(); the function takes ownership. n must be a
 * multiple of 256. */
fkv_status fkv_mlx_table_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t *words, uint32_t n);
void fkv_mlx_table_close(fkv_mlx_layer *layer);

/* Writes the step-table values that determine the grid sizes and array shapes of a step to form: [FKV_MLX_FORM_WORDS]. */
void fkv_mlx_fused_form(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t *form);

/* fkv_mlx_fused_copy() copies a page. fkv_mlx_fused_put() writes n 16-bit words to the pool, starting at word `at`, and waits
 * for the write. Failures are recorded in the graph. */
void fkv_mlx_fused_copy(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t from, uint32_t to);
void fkv_mlx_fused_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint64_t at, uint32_t n, mlx_array numbers);

#endif
