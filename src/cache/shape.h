/* Shape of a cache: the groups, page counts, block layouts and sizes that follow from its configuration. fkv_shape_make()
 * computes the shape for both fkv_plan_make() and fkv_cache_open(), so the plan and the cache cannot differ. Private to src/cache
 * and the devices.
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
    fkv_config config; /* config.layers points to an array of the caller, which may be freed after the cache is opened */
    uint32_t n_threads;
    fkv_pager_spec pager;
    uint32_t open_group;  /* the last group, which holds open pages of sealed layers; FKV_MAX_GROUPS if no layer is sealed */
    uint32_t state_group; /* the group of all state layers; FKV_MAX_GROUPS if there are no state layers */
    uint32_t n_layers;
    uint64_t token_bytes;
    uint32_t n_sink_logits;                /* total number of sink logits in all layers */
    uint32_t n_head_blocks;                /* number of KV heads, summed over all calibrated layers */
    uint64_t n_channels;                   /* total number of channels in all KV heads of calibrated layers */
    uint8_t calibration[FKV_SHA256_BYTES]; /* SHA-256 of channel_bits of all calibrated layers; 0 if no layer is calibrated */
    uint64_t scratch_bytes;                /* scratch memory that attention needs: the maximum over all layers */
    fkv_slab slab; /* slab.n_layers counts each sealed layer twice, for its sealed and its open blocks; fkv_shape_fill_layers()
                      sets slab.layers */
} fkv_shape;

/* Per-layer arrays of a cache, carved from its tables. */
typedef struct fkv_shape_layers {
    fkv_slab_layer *slab;      /* [slab.n_layers] */
    fkv_attn_layer *attn;      /* [n_layers]; the device sets the page addresses at open */
    fkv_file_layer *file;      /* [n_layers] */
    fkv_rotation *rotations;   /* [n_layers, 2], or NULL if nothing is rotated */
    float *sink_logits;        /* [n_sink_logits] sink logits of all layers that have them, concatenated */
    fkv_block *head_blocks;    /* [n_head_blocks] block layouts of the KV heads of all calibrated layers, concatenated */
    fkv_channel_order *orders; /* [n_head_blocks] */
    uint16_t *channels;        /* [n_channels] */
} fkv_shape_layers;

/* Validates a configuration and computes its shape. Returns FKV_BAD_CONFIG for an invalid field. Allocates nothing. */
fkv_status fkv_shape_make(const fkv_config *config, fkv_shape *shape);

/* Computes a layer's attention parameters except page addresses, rotations and sink logits. */
FKV_INTERNAL fkv_status fkv_shape_attn(const fkv_config *config, const fkv_layer_config *layer, fkv_attn_layer *attn);

/* Reserves memory for the per-layer arrays (carve.h). */
void fkv_shape_carve_layers(fkv_carve *carve, const fkv_shape *shape, fkv_shape_layers *layers);

/* Initializes the carved arrays and the slab offsets. This is the last access to config.layers. */
void fkv_shape_fill_layers(fkv_shape *shape, const fkv_shape_layers *layers);

FKV_INLINE const fkv_layer_config *fkv_shape_layer(const fkv_config *config, uint32_t layer) {
    return config->layers != NULL ? &config->layers[layer] : &config->layer;
}

FKV_INLINE bool fkv_shape_is_latent(const fkv_layer_config *layer) { return layer->rope_dim != 0; }

/* Returns the codec of the V side of a block. The V side holds values or, in a latent layer, the RoPE channels. */
FKV_INLINE fkv_codec_config fkv_shape_v_codec(const fkv_layer_config *layer) {
    return fkv_shape_is_latent(layer) ? (fkv_codec_config){.bits = 16, .kind = FKV_CODEC_HALF} : layer->v;
}

FKV_INLINE bool fkv_shape_is_state(const fkv_layer_config *layer) { return layer->state_bytes != 0; }

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
