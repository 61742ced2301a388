/* What the MLX device keeps of one cache. Lies in the cache's tables; the arrays behind the handles are MLX's.
 *
 * A pool holds the bytes of its layer exactly as the host's slab does, in numbers of 16 bits: [P, G, block.bytes / 2]. In the
 * plain way `pool` is always the newest version: a write replaces the handle, so that nobody but the graph holds the version
 * before it and MLX may write in place. In the fused way it is the same array from open to close, and `ticket` stands for its
 * newest state.
 */
#ifndef FKV_MLX_STATE_H
#define FKV_MLX_STATE_H

#include "mlx_kernel.h"

#include "../attn/gpu/kernel_text.h"
#include "../attn/gpu/step_table.h"
#include "../cache/device.h"
#include "../codec/channel_order.h"

#include <flatkv/mlx.h>

enum { FKV_MLX_ROW_TYPES = 3, FKV_MLX_DECODES = 3 };

/* The fused kernels of one shape of layer, by the type of the rows; those for decoding also by their rows: 4, 8, 16. */
typedef struct fkv_mlx_kernels {
    fkv_mlx_kernel of[FKV_MLX_ROW_TYPES][FKV_N_KERNELS];
    fkv_mlx_kernel decode[FKV_MLX_ROW_TYPES][FKV_MLX_DECODES];
} fkv_mlx_kernels;

/* The channels of calibrated keys, of all heads of a layer. Rows of arrays [G * D, ..] are channels, or places in the order of
 * each head (channel_order.h); rows of [G * N, ..] are digits as they are packed, N of them for a head, those that fill the last
 * line with it. */
typedef struct fkv_mlx_channels {
    mlx_array bins;                   /* float32 [G, D, 1]: the largest code of each channel */
    mlx_array channel;                /* uint32 [G * D]: the row of each place's channel */
    mlx_array place;                  /* uint32 [G * D]: the row of each channel's place */
    mlx_array packed;                 /* uint32 [G * N]: of each digit, its row in [digits, G * D, ..] of channels */
    mlx_array there;                  /* uint32 [G * N, 1]: 0 for digits that fill a line, else 1 */
    mlx_array digit[FKV_MAX_DIGITS];  /* uint32 [G * D]: the row of each channel's digit d */
    mlx_array weight[FKV_MAX_DIGITS]; /* float32 [G * D, 1]: what it counts; 0 where the channel has none */
} fkv_mlx_channels;

/* A pool and what belongs to it. A sealed layer has two: its own, and behind all layers one for its open pages, which shares
 * attn. */
typedef struct fkv_mlx_layer fkv_mlx_layer;
struct fkv_mlx_layer {
    const fkv_attn_layer *attn;
    const fkv_block *block; /* of the pool's pages */
    fkv_mlx_layer *open;    /* where rows are written, if the layer is sealed; else NULL */
    uint32_t group;
    mlx_array pool;
    mlx_array signs[FKV_N_SIDES]; /* float32 [D] of 1 and -1; empty where the side is not rotated */
    mlx_array sink_logits;        /* float32 [H], 8 at least; zeroes where the layer has none */
    fkv_mlx_channels channels;    /* empty but for sealed pages with calibrated keys */

    /* the fused way */
    mlx_array ticket;        /* uint32; whoever takes it as an input runs after all that touched the pool */
    uint32_t kind;           /* the first layer of the same shape, whose kernels serve this one */
    fkv_mlx_kernels kernels; /* empty where kind is another layer */
    fkv_step_cut cut;
    uint32_t table_of; /* the first layer that cuts alike, whose table serves this one */
    mlx_array table;   /* of the step; empty between steps, and where table_of is another layer */
    uint32_t table_words;
    uint32_t header[FKV_STEP_HEADER]; /* the first words of the table */
};

/* Numbers that operations take, made once: making an array costs more than using it. All but the last two are float32. */
typedef struct fkv_mlx_constants {
    mlx_array zero;
    mlx_array limit; /* what a page stores at most, and at least */
    mlx_array minus_limit;
    mlx_array minus_infinity;
    mlx_array lowest; /* -FLT_MAX: below every score that is one */
    mlx_array zero_u16;
    mlx_array zero_u32;
} fkv_mlx_constants;

typedef struct fkv_mlx_state {
    mlx_stream stream;
    fkv_mlx_way way;
    fkv_kernel_device kernels_for; /* the fused way's */
    const char *name;
    const fkv_slab *slab;
    uint32_t n_layers; /* of the model */
    uint32_t n_pools;  /* those of open pages with it; the slab's layers */
    uint32_t n_groups;
    uint32_t max_seqs;
    fkv_mlx_layer *layers; /* [n_pools] */
    mlx_array *tables;     /* [n_groups, max_seqs]: plain way: the page tables of the step's rows; else empty */
    fkv_mlx_constants constants;
    mlx_array ring;        /* the fused way: of pages that blocks of prefill unpack for each other; empty where no layer has it */
    mlx_array ring_ticket; /* whoever takes it runs after all that touched the ring */
    fkv_device_step step;  /* n_rows is 0 between steps */
    fkv_mlx_graph graph;
} fkv_mlx_state;

extern const fkv_device fkv_device_mlx;

FKV_INLINE const fkv_attn_row *fkv_mlx_rows(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer) {
    return mlx->step.rows + (size_t)layer->group * mlx->step.stride;
}

/* ---- the plain way (mlx_plain.c) ---- */

fkv_status fkv_mlx_plain_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v);
fkv_status fkv_mlx_plain_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out);

/* What MLX has in use at once for one layer's write and attend of up to n_tokens rows. */
uint64_t fkv_mlx_plain_bytes(const fkv_layer_config *layer, uint32_t n_tokens);

/* x: [.., D] of float32 -> the same, rotated or turned back as src/codec/rotation.h defines it, bit for bit on MLX's CPU. */
mlx_array fkv_mlx_rotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs);
mlx_array fkv_mlx_unrotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs);

/* Of a layer whose keys are calibrated (mlx_sealed.c). A failure is the graph's. */
void fkv_mlx_channels_open(fkv_mlx_graph *g, const fkv_attn_layer *attn, fkv_mlx_channels *channels);

/* ---- the fused way (mlx_fused.c) ---- */

/* Layer l of a cache whose pools are open, the layers before it too. A failure is the graph's. */
void fkv_mlx_fused_open(fkv_mlx_state *mlx, uint32_t l);
void fkv_mlx_fused_close(fkv_mlx_layer *layer);
fkv_status fkv_mlx_fused_begin(fkv_mlx_state *mlx);
fkv_status fkv_mlx_fused_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v);
fkv_status fkv_mlx_fused_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out);

/* What the graph of a step depends on beside its arrays, of one table. form: [FKV_MLX_FORM_WORDS] */
void fkv_mlx_fused_form(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t *form);

/* Pages for the store; a failure is the graph's. put: n 16-bit numbers into the pool from number `at` on, evaluated. */
void fkv_mlx_fused_copy(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t from, uint32_t to);
void fkv_mlx_fused_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint64_t at, uint32_t n, mlx_array numbers);

#endif
