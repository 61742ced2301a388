/* From a configuration to everything that follows from it. See shape.h. Owns the checks of the public configuration; no memory.
 */
#include "shape.h"
#include "../base/cpu.h"

#include <math.h>

static fkv_status check_layer(const fkv_layer_config *l, uint32_t layer) {
    FKV_REQUIRE(l->n_q_heads > 0 && l->n_kv_heads > 0 && l->n_q_heads % l->n_kv_heads == 0, FKV_BAD_CONFIG,
                "layer %u: %u query heads cannot share %u KV heads: the second must divide the first", layer, l->n_q_heads,
                l->n_kv_heads);
    FKV_REQUIRE(l->n_q_heads / l->n_kv_heads <= FKV_MAX_HEADS_PER_KV, FKV_BAD_CONFIG,
                "layer %u: %u query heads for each KV head, at most %d are served", layer, l->n_q_heads / l->n_kv_heads,
                FKV_MAX_HEADS_PER_KV);
    FKV_REQUIRE(l->n_q_heads <= 65536, FKV_BAD_CONFIG, "layer %u: %u query heads, at most 65536", layer, l->n_q_heads);
    FKV_REQUIRE(l->window != 0 || l->n_sinks == 0, FKV_BAD_CONFIG,
                "layer %u: %u sink tokens without a window: a full layer keeps every token, set n_sinks to 0", layer, l->n_sinks);
    FKV_REQUIRE(l->window <= INT32_MAX && l->n_sinks <= INT32_MAX, FKV_BAD_CONFIG, "layer %u: window %u or sinks %u above %d",
                layer, l->window, l->n_sinks, INT32_MAX);
    FKV_REQUIRE(l->scale == 0.0f || (fabsf(l->scale) >= FKV_SMALLEST_SCALE && fabsf(l->scale) <= FKV_LARGEST_SCALE),
                FKV_BAD_CONFIG, "layer %u: scale %g: 0 for 1/sqrt(head_dim), or a size from %g to %g", layer, (double)l->scale,
                (double)FKV_SMALLEST_SCALE, (double)FKV_LARGEST_SCALE);
    FKV_REQUIRE(isfinite(l->softcap) && l->softcap >= 0.0f, FKV_BAD_CONFIG,
                "layer %u: softcap %g: 0 for none, or a finite number above it", layer, (double)l->softcap);
    return FKV_OK;
}

static fkv_status check_config(const fkv_config *c) {
    FKV_REQUIRE(c->n_layers > 0 && c->n_layers <= FKV_MAX_LAYERS, FKV_BAD_CONFIG, "%u layers: 1 to %d", c->n_layers,
                FKV_MAX_LAYERS);
    FKV_REQUIRE((unsigned)c->row_type <= FKV_BF16, FKV_BAD_CONFIG, "row_type %d: FKV_F32, FKV_F16 or FKV_BF16", (int)c->row_type);
    FKV_REQUIRE(c->page_type == FKV_F16 || c->page_type == FKV_BF16, FKV_BAD_CONFIG, "page_type %d: FKV_F16 or FKV_BF16",
                (int)c->page_type);
    FKV_REQUIRE((unsigned)c->rotate <= FKV_ROTATE_KV, FKV_BAD_CONFIG, "rotate %d: FKV_ROTATE_NONE, _K, _V or _KV",
                (int)c->rotate);
    FKV_REQUIRE((unsigned)c->isa <= FKV_ISA_AMX, FKV_BAD_CONFIG, "isa %d is none that flatkv knows", (int)c->isa);
    FKV_REQUIRE(fkv_is_pow2(c->page_tokens) && c->page_tokens >= 16 && c->page_tokens <= 256, FKV_BAD_CONFIG,
                "pages of %u tokens: a power of two from 16 to 256 (64 is a good choice)", c->page_tokens);
    FKV_REQUIRE(c->max_tokens > 0 && c->max_tokens <= INT32_MAX, FKV_BAD_CONFIG, "max_tokens %u: 1 to %d", c->max_tokens,
                INT32_MAX);
    FKV_REQUIRE(c->max_seqs > 0 && c->max_seqs <= 65535, FKV_BAD_CONFIG, "max_seqs %u: 1 to 65535", c->max_seqs);
    FKV_REQUIRE(c->max_step_tokens > 0 && c->max_step_tokens <= 1u << 20, FKV_BAD_CONFIG, "max_step_tokens %u: 1 to %u",
                c->max_step_tokens, 1u << 20);
    FKV_REQUIRE(c->n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "%u threads: at most %d", c->n_threads, FKV_MAX_THREADS);
    FKV_REQUIRE(memchr(c->rope_id, 0, sizeof c->rope_id) != NULL, FKV_BAD_CONFIG, "rope_id has no terminating 0 within %zu bytes",
                sizeof c->rope_id);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        const fkv_layer_config *layer = fkv_shape_layer(c, l);
        FKV_TRY(check_layer(layer, l));
        FKV_REQUIRE((uint64_t)layer->n_kv_heads * c->max_step_tokens <= UINT32_MAX, FKV_BAD_CONFIG,
                    "layer %u: %u KV heads in steps of %u tokens are more rows than have numbers: lower max_step_tokens", l,
                    layer->n_kv_heads, c->max_step_tokens);
    }
    return FKV_OK;
}

static uint32_t group_of(const fkv_pager_spec *pager, const fkv_layer_config *l) {
    uint32_t g = 0;
    while (g < pager->n_groups && (pager->groups[g].window != l->window || pager->groups[g].n_sinks != l->n_sinks)) g++;
    return g;
}

/* Groups by first appearance, then their pages. Any max_seqs sequences whose max_tokens add up to config.max_tokens fit: each may
 * leave one page partly empty. A window group needs no more
 * than max_seqs sequences hold at their most. */
static fkv_status make_groups(const fkv_config *c, fkv_pager_spec *pager) {
    *pager = (fkv_pager_spec){.page_tokens = c->page_tokens,
                              .max_seqs = c->max_seqs,
                              .max_seq_tokens = c->max_tokens,
                              .max_step_tokens = c->max_step_tokens};
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(c, i);
        uint32_t g = group_of(pager, l);
        if (g < pager->n_groups) continue;
        FKV_REQUIRE(g < FKV_MAX_GROUPS, FKV_BAD_CONFIG, "layer %u is of a %dth kind of window: at most %d kinds", i,
                    FKV_MAX_GROUPS + 1, FKV_MAX_GROUPS);
        pager->groups[g] = (fkv_group_spec){.window = l->window, .n_sinks = l->n_sinks};
        pager->n_groups++;
    }
    uint32_t most = fkv_ceil_div(c->max_tokens, c->page_tokens);
    for (uint32_t g = 0; g < pager->n_groups; g++) {
        uint64_t pages = (uint64_t)most + c->max_seqs - 1;
        if (pager->groups[g].window != 0) {
            uint64_t at_most = (uint64_t)c->max_seqs * fkv_min_u32(most, fkv_pager_window_cap(pager, g));
            pages = at_most < pages ? at_most : pages;
        }
        pager->groups[g].n_pages = (uint32_t)pages; /* below 2^28: max_tokens and max_seqs are bounded */
    }
    return FKV_OK;
}

static fkv_status make_layer(const fkv_config *c, const fkv_layer_config *l, fkv_attn_layer *out) {
    fkv_codec k;
    fkv_codec v;
    FKV_TRY(fkv_codec_make(l->k, l->head_dim, c->page_type, &k));
    FKV_TRY(fkv_codec_make(l->v, l->head_dim, c->page_type, &v));
    if (c->rotate & FKV_ROTATE_K) fkv_codec_rotated(&k);
    if (c->rotate & FKV_ROTATE_V) fkv_codec_rotated(&v);
    *out = (fkv_attn_layer){.n_q_heads = l->n_q_heads,
                            .n_kv_heads = l->n_kv_heads,
                            .head_dim = l->head_dim,
                            .window = l->window,
                            .n_sinks = l->n_sinks,
                            .scale = l->scale != 0.0f ? l->scale : 1.0f / sqrtf((float)l->head_dim),
                            .softcap = l->softcap,
                            .row_type = c->row_type};
    fkv_block_make(&k, &v, c->page_tokens, &out->block);
    return FKV_OK;
}

static fkv_slab_layer make_slab_layer(const fkv_attn_layer *l, uint32_t group) {
    fkv_slab_layer out = {.group = group, .n_heads = l->n_kv_heads, .block_bytes = l->block.bytes};
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int p = 0; p < FKV_N_PARTS; p++)
            out.parts[side * FKV_N_PARTS + p] = (fkv_slab_part){l->block.offset[side][p], l->block.codec[side].row_bytes[p]};
    return out;
}

fkv_status fkv_shape_make(const fkv_config *config, fkv_shape *shape) {
    FKV_TRY(check_config(config));
    *shape = (fkv_shape){.config = *config, .n_layers = config->n_layers};
    shape->n_threads = config->n_threads != 0 ? config->n_threads : fkv_cpu_count();
    FKV_TRY(make_groups(config, &shape->pager));
    fkv_slab *slab = &shape->slab;
    slab->page_tokens = config->page_tokens;
    slab->n_layers = config->n_layers;
    slab->n_groups = shape->pager.n_groups;
    for (uint32_t g = 0; g < slab->n_groups; g++) slab->group_pages[g] = shape->pager.groups[g].n_pages;

    fkv_slab_layer layers[FKV_MAX_LAYERS];
    slab->layers = layers;
    for (uint32_t i = 0; i < config->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(config, i);
        fkv_attn_layer attn;
        FKV_TRY(make_layer(config, l, &attn));
        layers[i] = make_slab_layer(&attn, group_of(&shape->pager, l));
        shape->token_bytes += (uint64_t)l->n_kv_heads * attn.block.token_bytes;
        uint64_t scratch = fkv_attn_scratch_bytes(&attn, config->max_seqs, shape->n_threads);
        if (scratch > shape->scratch_bytes) shape->scratch_bytes = scratch;
    }
    fkv_status status = fkv_slab_layout(slab);
    slab->layers = NULL;
    return status;
}

void fkv_shape_carve_layers(fkv_carve *carve, const fkv_shape *shape, fkv_shape_layers *layers) {
    layers->slab = FKV_CARVE(carve, shape->n_layers, fkv_slab_layer);
    layers->attn = FKV_CARVE(carve, shape->n_layers, fkv_attn_layer);
    layers->file = FKV_CARVE(carve, shape->n_layers, fkv_file_layer);
    layers->rotations = NULL;
    if (shape->config.rotate != FKV_ROTATE_NONE)
        layers->rotations = FKV_CARVE(carve, (uint64_t)shape->n_layers * FKV_N_SIDES, fkv_rotation);
}

void fkv_shape_fill_layers(fkv_shape *shape, const fkv_shape_layers *layers) {
    const fkv_config *c = &shape->config;
    for (uint32_t i = 0; i < shape->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(c, i);
        fkv_attn_layer *attn = &layers->attn[i];
        fkv_status status = make_layer(c, l, attn);
        FKV_ASSERT(status == FKV_OK); /* it was when the shape was made */
        (void)status;
        layers->slab[i] = make_slab_layer(attn, group_of(&shape->pager, l));
        layers->file[i] =
            (fkv_file_layer){l->n_kv_heads, l->head_dim, l->window, l->n_sinks, fkv_file_side_of(l->k), fkv_file_side_of(l->v)};
        if (layers->rotations == NULL) continue;
        fkv_rotation *pair = &layers->rotations[(size_t)i * FKV_N_SIDES];
        for (uint32_t side = 0; side < FKV_N_SIDES; side++) fkv_rotation_make(c->rotation_seed, side, l->head_dim, &pair[side]);
        if ((c->rotate & FKV_ROTATE_K) != 0) attn->rotate_k = &pair[FKV_SIDE_K];
        if ((c->rotate & FKV_ROTATE_V) != 0) attn->rotate_v = &pair[FKV_SIDE_V];
    }
    shape->slab.layers = layers->slab;
    (void)fkv_slab_layout(&shape->slab);
}
