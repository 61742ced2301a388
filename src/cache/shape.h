/* What follows from a configuration: groups, page counts, block layouts, bytes. Made once by fkv_shape_make(), the same for the
 * plan and the open, so that they cannot differ. Private to shape.c and cache.c.
 */
#ifndef FKV_SHAPE_H
#define FKV_SHAPE_H

#include "../attn/attn.h"
#include "../base/carve.h"
#include "../base/checksum.h"
#include "../codec/channel_order.h"
#include "../pager/pager.h"
#include "../store/page_file.h"
#include "../store/slab.h"

typedef struct fkv_shape {
    fkv_config config; /* its `layers` pointer is the caller's and must not be kept */
    uint32_t n_threads;
    fkv_pager_spec pager;
    uint32_t open_group; /* of the open pages of sealed layers, the last; FKV_MAX_GROUPS: none is sealed */
    uint32_t n_layers;
    uint64_t token_bytes;
    uint32_t n_sink_logits;                /* of all layers */
    uint32_t n_head_blocks;                /* KV heads of all calibrated layers */
    uint64_t n_channels;                   /* of these heads */
    uint8_t calibration[FKV_SHA256_BYTES]; /* of their bits; 0 where no layer is calibrated */
    uint64_t scratch_bytes;                /* of attention, the largest over the layers */
    fkv_slab slab; /* n_layers: sealed ones count twice; `layers` is set only by fkv_shape_fill_layers() */
} fkv_shape;

/* The arrays of one element a layer that a cache keeps, carved with the rest of its tables. */
typedef struct fkv_shape_layers {
    fkv_slab_layer *slab;    /* [slab.n_layers] */
    fkv_attn_layer *attn;    /* [n_layers]; pages and rotations are set at open */
    fkv_file_layer *file;    /* [n_layers] */
    fkv_rotation *rotations; /* [n_layers, 2] where rotated, else NULL */
    float *sink_logits;      /* [n_sink_logits]: those of the layers that have any, one after the other */
    fkv_block *head_blocks;  /* [n_head_blocks]; so are the next two: those of calibrated layers, one after the other */
    fkv_channel_order *orders;
    uint16_t *channels; /* [n_channels] */
} fkv_shape_layers;

/* Checks every field of the configuration: FKV_BAD_CONFIG, with the value and what would be right. Takes nothing. */
fkv_status fkv_shape_make(const fkv_config *config, fkv_shape *shape);

/* A layer as attention has it, without pages, rotations and sinks' logits. */
FKV_SEAM fkv_status fkv_shape_attn(const fkv_config *config, const fkv_layer_config *layer, fkv_attn_layer *attn);

void fkv_shape_carve_layers(fkv_carve *carve, const fkv_shape *shape, fkv_shape_layers *layers);

/* Fills the carved arrays and the slab's offsets. config->layers is read here for the last time. */
void fkv_shape_fill_layers(fkv_shape *shape, const fkv_shape_layers *layers);

FKV_INLINE const fkv_layer_config *fkv_shape_layer(const fkv_config *config, uint32_t layer) {
    return config->layers != NULL ? &config->layers[layer] : &config->layer;
}

FKV_INLINE bool fkv_shape_calibrated(const fkv_layer_config *layer) { return layer->k.kind == FKV_CODEC_CALIBRATED; }

FKV_INLINE bool fkv_shape_sealed(const fkv_layer_config *layer) {
    return layer->k.kind == FKV_CODEC_SEALED || fkv_shape_calibrated(layer);
}

FKV_INLINE uint32_t fkv_shape_n_sealed(const fkv_shape *shape) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < shape->n_layers; i++) n += fkv_shape_sealed(fkv_shape_layer(&shape->config, i));
    return n;
}

#endif
