/* Validates the public configuration and computes the shape of the cache. See shape.h. These functions allocate no memory.
 */
#include "shape.h"
#include "../base/cpu.h"

#include <math.h>

/* In a cache with sealed layers, a prefix can be shared only if its first page is cached in open form. It can be shared beyond
 * the end of its last complete span only if the pages after that span are also cached in open form. The plan contains an open
 * first page for every PAGES_PER_PREFIX pages of capacity. */
enum { PAGES_PER_PREFIX = 256, STATE_ALIGN = 64, MAX_SNAPSHOTS = 1 << 20 };

static fkv_status check_codec_kinds(const fkv_layer_config *l, uint32_t layer) {
    FKV_REQUIRE(
        l->k.kind != FKV_CODEC_SEALED_V && l->v.kind != FKV_CODEC_SEALED && l->v.kind != FKV_CODEC_CALIBRATED &&
            (l->v.kind != FKV_CODEC_SEALED_V || fkv_shape_sealed(l)),
        FKV_BAD_CONFIG,
        "layer %u: invalid codec kinds (K %d, V %d): FKV_CODEC_SEALED (%d) and FKV_CODEC_CALIBRATED (%d) are valid only for K; "
        "FKV_CODEC_SEALED_V (%d) is valid only for V, and only if K has one of the other two kinds",
        layer, (int)l->k.kind, (int)l->v.kind, (int)FKV_CODEC_SEALED, (int)FKV_CODEC_CALIBRATED, (int)FKV_CODEC_SEALED_V);
    FKV_REQUIRE((l->channel_bits != NULL) == fkv_shape_calibrated(l), FKV_BAD_CONFIG,
                "layer %u: %s; set channel_bits if and only if K is FKV_CODEC_CALIBRATED (%d)", layer,
                l->channel_bits != NULL ? "channel_bits is set but K is not calibrated"
                                        : "K is calibrated but channel_bits is NULL",
                (int)FKV_CODEC_CALIBRATED);
    return FKV_OK;
}

/* Checks a state layer. All fields that describe keys and values must be 0, because a state layer stores neither. */
static fkv_status check_state_layer(const fkv_layer_config *l, uint32_t layer) {
    FKV_REQUIRE(l->state_bytes % STATE_ALIGN == 0 && l->state_bytes <= FKV_MAX_STATE_BYTES, FKV_BAD_CONFIG,
                "layer %u: state_bytes is %u (expected a multiple of %d, at most %d)", layer, l->state_bytes, STATE_ALIGN,
                FKV_MAX_STATE_BYTES);
    FKV_REQUIRE(l->n_q_heads == 0 && l->n_kv_heads == 0 && l->head_dim == 0 && l->rope_dim == 0 && l->window == 0 &&
                    l->n_sinks == 0 && l->sink_logits == NULL && l->channel_bits == NULL,
                FKV_BAD_CONFIG, "layer %u: a state layer (state_bytes %u) has no heads, window or sinks; set these fields to 0",
                layer, l->state_bytes);
    return FKV_OK;
}

/* Checks the fields that have stricter limits in latent layers than in other layers. */
static fkv_status check_latent_layer(const fkv_layer_config *l, uint32_t layer) {
    FKV_REQUIRE(l->rope_dim % 16 == 0 && l->rope_dim <= FKV_MAX_HEAD_DIM, FKV_BAD_CONFIG,
                "layer %u: rope_dim is %u (expected a multiple of 16, at most %d)", layer, l->rope_dim, FKV_MAX_HEAD_DIM);
    FKV_REQUIRE(l->n_kv_heads == 1, FKV_BAD_CONFIG,
                "layer %u: n_kv_heads is %u, but a latent layer (rope_dim %u) has one KV head", layer, l->n_kv_heads,
                l->rope_dim);
    FKV_REQUIRE(
        l->scale != 0.0f, FKV_BAD_CONFIG,
        "layer %u: scale is 0, but a latent layer (rope_dim %u) has no default scale; set it to 1/sqrt of the head dimension "
        "before absorption",
        layer, l->rope_dim);
    FKV_REQUIRE(
        !fkv_shape_calibrated(l) && (l->k.kind != FKV_CODEC_SEALED || l->k.bits != 3), FKV_UNSUPPORTED,
        "layer %u: calibrated codecs and sealed codecs of 3 bits are not supported for latent layers; use 16, 8, 4 or 2 bits, a "
        "sealed codec of 4 or 2 bits, or TurboQuant",
        layer);
    FKV_REQUIRE(!fkv_shape_sealed(l) || l->head_dim % 32 == 0, FKV_BAD_CONFIG,
                "layer %u: head_dim is %u, but sealed latent layers require a multiple of 32", layer, l->head_dim);
    return FKV_OK;
}

static fkv_status check_layer_config(const fkv_layer_config *l, uint32_t layer) {
    if (fkv_shape_is_state(l)) return check_state_layer(l, layer);
    if (fkv_shape_is_latent(l)) FKV_TRY(check_latent_layer(l, layer));
    FKV_REQUIRE(l->n_q_heads > 0 && l->n_kv_heads > 0 && l->n_q_heads % l->n_kv_heads == 0, FKV_BAD_CONFIG,
                "layer %u: n_q_heads is %u and n_kv_heads is %u; n_kv_heads must divide n_q_heads", layer, l->n_q_heads,
                l->n_kv_heads);
    FKV_REQUIRE(l->n_q_heads / l->n_kv_heads <= FKV_MAX_HEADS_PER_KV, FKV_BAD_CONFIG,
                "layer %u: %u query heads per KV head (maximum %d)", layer, l->n_q_heads / l->n_kv_heads, FKV_MAX_HEADS_PER_KV);
    FKV_REQUIRE(l->n_q_heads <= 65536, FKV_BAD_CONFIG, "layer %u: n_q_heads is %u (maximum 65536)", layer, l->n_q_heads);
    FKV_REQUIRE(l->window != 0 || l->n_sinks == 0, FKV_BAD_CONFIG,
                "layer %u: n_sinks is %u but window is 0; set n_sinks to 0, because full attention keeps every token", layer,
                l->n_sinks);
    FKV_REQUIRE(l->window <= INT32_MAX && l->n_sinks <= INT32_MAX, FKV_BAD_CONFIG,
                "layer %u: window is %u and n_sinks is %u (maximum %d each)", layer, l->window, l->n_sinks, INT32_MAX);
    FKV_REQUIRE(l->scale == 0.0f || (fabsf(l->scale) >= FKV_SMALLEST_SCALE && fabsf(l->scale) <= FKV_LARGEST_SCALE),
                FKV_BAD_CONFIG, "layer %u: scale is %g; use 0 for 1/sqrt(head_dim), or a magnitude from %g to %g", layer,
                (double)l->scale, (double)FKV_SMALLEST_SCALE, (double)FKV_LARGEST_SCALE);
    FKV_REQUIRE(isfinite(l->softcap) && l->softcap >= 0.0f, FKV_BAD_CONFIG,
                "layer %u: softcap is %g; use 0 for none, or a positive finite number", layer, (double)l->softcap);
    for (uint32_t h = 0; l->sink_logits != NULL && h < l->n_q_heads; h++)
        FKV_REQUIRE(isfinite(l->sink_logits[h]), FKV_BAD_CONFIG, "layer %u: sink_logits[%u] is %g; it must be finite", layer, h,
                    (double)l->sink_logits[h]);
    fkv_layer_config used = *l;
    used.v = fkv_shape_v_codec(l);
    return check_codec_kinds(&used, layer);
}

static fkv_status check_cache_config(const fkv_config *c) {
    FKV_REQUIRE(c->n_layers > 0 && c->n_layers <= FKV_MAX_LAYERS, FKV_BAD_CONFIG, "n_layers is %u (expected 1 to %d)",
                c->n_layers, FKV_MAX_LAYERS);
    FKV_REQUIRE((unsigned)c->row_type <= FKV_BF16, FKV_BAD_CONFIG, "row_type is %d (expected FKV_F32, FKV_F16 or FKV_BF16)",
                (int)c->row_type);
    FKV_REQUIRE(c->page_type == FKV_F16 || c->page_type == FKV_BF16, FKV_BAD_CONFIG,
                "page_type is %d (expected FKV_F16 or FKV_BF16)", (int)c->page_type);
    FKV_REQUIRE((unsigned)c->rotate <= FKV_ROTATE_KV, FKV_BAD_CONFIG, "rotate is %d (expected FKV_ROTATE_NONE, _K, _V or _KV)",
                (int)c->rotate);
    FKV_REQUIRE((unsigned)c->isa <= FKV_ISA_AMX, FKV_BAD_CONFIG, "isa is %d, which is not an fkv_isa value", (int)c->isa);
    FKV_REQUIRE(fkv_is_pow2(c->page_tokens) && c->page_tokens >= 16 && c->page_tokens <= 256, FKV_BAD_CONFIG,
                "page_tokens is %u (expected a power of two from 16 to 256; 64 is a good choice)", c->page_tokens);
    FKV_REQUIRE(c->max_tokens > 0 && c->max_tokens <= INT32_MAX, FKV_BAD_CONFIG, "max_tokens is %u (expected 1 to %d)",
                c->max_tokens, INT32_MAX);
    FKV_REQUIRE(c->max_seqs > 0 && c->max_seqs <= 65535, FKV_BAD_CONFIG, "max_seqs is %u (expected 1 to 65535)", c->max_seqs);
    FKV_REQUIRE(c->max_step_tokens > 0 && c->max_step_tokens <= 1u << 20, FKV_BAD_CONFIG,
                "max_step_tokens is %u (expected 1 to %u)", c->max_step_tokens, 1u << 20);
    FKV_REQUIRE(c->max_snapshots <= MAX_SNAPSHOTS, FKV_BAD_CONFIG, "max_snapshots is %u (maximum %d)", c->max_snapshots,
                MAX_SNAPSHOTS);
    FKV_REQUIRE(c->n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "n_threads is %u (maximum %d)", c->n_threads, FKV_MAX_THREADS);
    FKV_REQUIRE(memchr(c->rope_id, 0, sizeof c->rope_id) != NULL, FKV_BAD_CONFIG,
                "rope_id has no null terminator within %zu bytes", sizeof c->rope_id);
    FKV_REQUIRE(memchr(c->numerics, 0, sizeof c->numerics) != NULL, FKV_BAD_CONFIG,
                "numerics has no null terminator within %zu bytes", sizeof c->numerics);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        const fkv_layer_config *layer = fkv_shape_layer(c, l);
        FKV_TRY(check_layer_config(layer, l));
        FKV_REQUIRE((uint64_t)layer->n_kv_heads * c->max_step_tokens <= UINT32_MAX, FKV_BAD_CONFIG,
                    "layer %u: n_kv_heads %u times max_step_tokens %u overflows 32 bits; lower max_step_tokens", l,
                    layer->n_kv_heads, c->max_step_tokens);
    }
    return FKV_OK;
}

/* Returns the group of all state layers if the layer is a state layer, otherwise the group with the layer's (window, n_sinks)
 * pair. Returns n_groups if there is no such group. */
static uint32_t find_layer_group(const fkv_pager_spec *pager, const fkv_layer_config *l) {
    uint32_t g = 0;
    const bool is_state = fkv_shape_is_state(l);
    for (; g < pager->n_groups; g++) {
        const fkv_group_spec *spec = &pager->groups[g];
        if (is_state ? spec->is_state : !spec->is_state && spec->window == l->window && spec->n_sinks == l->n_sinks) break;
    }
    return g;
}

static bool any_sealed(const fkv_config *c) {
    bool any = false;
    for (uint32_t i = 0; i < c->n_layers; i++) any |= fkv_shape_sealed(fkv_shape_layer(c, i));
    return any;
}

/* Adds the group that holds the open pages of sealed layers: page 0, the pages of the span that contains the next token, and the
 * pages that would be needed after a truncation by one page. This group comes last. Layers are never assigned to it by their
 * (window, n_sinks) pair. */
static fkv_status add_open_pages_group(fkv_pager_spec *pager, uint32_t *group) {
    FKV_REQUIRE(pager->n_groups < FKV_MAX_GROUPS, FKV_BAD_CONFIG,
                "the layers have %u distinct (window, n_sinks) pairs; at most %d are supported if a layer is sealed",
                pager->n_groups, FKV_MAX_GROUPS - 1);
    *group = pager->n_groups++;
    pager->groups[*group] = (fkv_group_spec){.window = 1, .n_sinks = 1, .n_spare = 1, .span = FKV_OPEN_SPAN};
    return FKV_OK;
}

/* Returns the number of open pages planned for cached prefixes that no sequence uses: first pages, without which a prefix cannot
 * be shared, and pages for the positions where prompts diverge. The number of the latter is one per sequence, but at least the
 * size of a partial span. With state layers, pages for snapshots are added, up to one per span of the capacity, because a prefix
 * can be shared up to a snapshot only if the open pages of the snapshot's span are cached. */
static uint64_t open_cached_pages(const fkv_config *c, uint32_t most, bool has_states) {
    const uint32_t n_first = c->max_seqs + most / PAGES_PER_PREFIX;
    const uint64_t for_snapshots = has_states ? (uint64_t)c->max_snapshots * (FKV_OPEN_SPAN - 1) : 0;
    const uint64_t per_span = most / FKV_OPEN_SPAN;
    return (uint64_t)n_first + fkv_min_u32(fkv_max_u32(c->max_seqs, FKV_OPEN_SPAN - 1), most) +
           (for_snapshots < per_span ? for_snapshots : per_span);
}

/* Determines the groups and their page counts. Groups are numbered from 0 in the order of their first layers; the group of open
 * pages comes last. The page counts are large enough for any max_seqs sequences whose max_tokens add up to config.max_tokens,
 * even if the last page of every sequence is only partially filled. A window group needs at most the pages that max_seqs
 * sequences hold between steps, plus the pages that one step writes. The state group also has pages for snapshots. */
static fkv_status make_groups(const fkv_config *c, fkv_pager_spec *pager, uint32_t *open_group, uint32_t *state_group) {
    *state_group = FKV_MAX_GROUPS;
    *pager = (fkv_pager_spec){.page_tokens = c->page_tokens,
                              .max_seqs = c->max_seqs,
                              .max_seq_tokens = c->max_tokens,
                              .max_step_tokens = c->max_step_tokens};
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(c, i);
        uint32_t g = find_layer_group(pager, l);
        if (g < pager->n_groups) continue;
        FKV_REQUIRE(g < FKV_MAX_GROUPS, FKV_BAD_CONFIG,
                    "layer %u adds another (window, n_sinks) pair, but the layers may have at most %d distinct pairs; all "
                    "state layers together count as one pair",
                    i, FKV_MAX_GROUPS);
        pager->groups[g] = (fkv_group_spec){.window = l->window, .n_sinks = l->n_sinks};
        if (fkv_shape_is_state(l)) {
            pager->groups[g] = (fkv_group_spec){.window = FKV_STATE_WINDOW, .is_state = true};
            *state_group = g;
        }
        pager->n_groups++;
    }
    *open_group = FKV_MAX_GROUPS;
    if (any_sealed(c)) FKV_TRY(add_open_pages_group(pager, open_group));
    uint32_t most = fkv_ceil_div(c->max_tokens, c->page_tokens);
    for (uint32_t g = 0; g < pager->n_groups; g++) {
        uint64_t pages = (uint64_t)most + c->max_seqs - 1;
        if (pager->groups[g].window != 0) {
            fkv_window_pages one = fkv_pager_window_pages(pager, g);
            uint64_t in_steps = (uint64_t)c->max_seqs * (one.most - one.rest);
            uint64_t at_most = (uint64_t)c->max_seqs * one.rest + (in_steps < one.step ? in_steps : one.step);
            pages = at_most < pages || g == *state_group ? at_most : pages;
        }
        if (g == *state_group) pages += c->max_snapshots;
        if (g == *open_group) pages += open_cached_pages(c, most, *state_group < FKV_MAX_GROUPS);
        pager->groups[g].n_pages = (uint32_t)pages; /* `pages` is less than 2^28, because max_tokens and max_seqs are bounded */
    }
    return FKV_OK;
}

/* Checks that the configuration rotates K or V if its codec requires rotation. */
static fkv_status check_rotation(fkv_codec_config config, fkv_rotate rotate, fkv_rotate side, const char *name) {
    fkv_codec_info info;
    FKV_TRY(fkv_codec_about(config, &info));
    FKV_REQUIRE(!info.needs_rotation || ((unsigned)rotate & (unsigned)side) != 0, FKV_BAD_CONFIG,
                "%s codec %s requires rotation; set rotate to FKV_ROTATE_%s or FKV_ROTATE_KV", name, info.name, name);
    return FKV_OK;
}

/* Returns the flag of fkv_config.rotate that rotates the latent channels. In sealed layers, only values are rotated. */
static fkv_rotate latent_rotation(const fkv_layer_config *l) { return fkv_shape_sealed(l) ? FKV_ROTATE_V : FKV_ROTATE_K; }

fkv_status fkv_shape_attn(const fkv_config *c, const fkv_layer_config *l, fkv_attn_layer *out) {
    fkv_codec k;
    fkv_codec v;
    const bool is_latent = fkv_shape_is_latent(l);
    FKV_TRY(fkv_codec_make(is_latent ? fkv_block_latent_codec(l->k, l->head_dim) : l->k, l->head_dim, c->page_type, &k));
    FKV_TRY(fkv_codec_make(fkv_shape_v_codec(l), is_latent ? l->rope_dim : l->head_dim, c->page_type, &v));
    FKV_TRY(check_rotation(l->k, c->rotate, FKV_ROTATE_K, "K"));
    FKV_TRY(check_rotation(fkv_shape_v_codec(l), c->rotate, FKV_ROTATE_V, "V"));
    for (uint32_t h = 0; l->channel_bits != NULL && h < l->n_kv_heads; h++)
        FKV_TRY(fkv_channel_bits_check(l->channel_bits + (size_t)h * l->head_dim, l->head_dim, l->k.bits, h));
    if (c->rotate & (is_latent ? latent_rotation(l) : FKV_ROTATE_K)) fkv_codec_rotated(&k);
    if ((c->rotate & FKV_ROTATE_V) != 0 && !is_latent) fkv_codec_rotated(&v);
    *out = (fkv_attn_layer){.n_q_heads = l->n_q_heads,
                            .n_kv_heads = l->n_kv_heads,
                            .head_dim = l->head_dim,
                            .rope_dim = l->rope_dim,
                            .window = l->window,
                            .n_sinks = l->n_sinks,
                            .scale = l->scale != 0.0f ? l->scale : 1.0f / sqrtf((float)l->head_dim),
                            .softcap = l->softcap,
                            .row_type = c->row_type,
                            .calibrated = fkv_shape_calibrated(l),
                            .sealed = fkv_shape_sealed(l)};
    fkv_block_make(&k, &v, c->page_tokens, &out->block);
    if (out->sealed) fkv_block_make_open(l->head_dim, l->rope_dim, c->page_type, c->page_tokens, &out->open);
    return FKV_OK;
}

/* Returns the slab entry of a state layer. Each page of the layer is a single block without token rows. */
static fkv_slab_layer make_state_slab_layer(const fkv_layer_config *l, uint32_t group) {
    return (fkv_slab_layer){.group = group, .n_heads = 1, .block_bytes = l->state_bytes};
}

static fkv_slab_layer make_slab_layer(const fkv_attn_layer *l, const fkv_block *block, uint32_t group) {
    fkv_slab_layer out = {.group = group, .n_heads = l->n_kv_heads, .block_bytes = block->bytes};
    out.sealed = l->sealed && block == &l->block;
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int p = 0; p < FKV_N_PARTS; p++)
            out.parts[side * FKV_N_PARTS + p] =
                (fkv_slab_part){block->offset[side][p], block->codec[side].row_bytes[p], block->codec[side].page_bytes[p]};
    return out;
}

/* Sets the slab entry of the layer. If the layer is sealed, also sets the entry of its open blocks. The entries of open blocks
 * follow the entries of all layers. */
static void put_slab_layer(const fkv_shape *shape, const fkv_attn_layer *attn, uint32_t layer, fkv_slab_layer *layers) {
    const fkv_layer_config *l = fkv_shape_layer(&shape->config, layer);
    layers[layer] = make_slab_layer(attn, &attn->block, find_layer_group(&shape->pager, l));
    if (!attn->sealed) return;
    uint32_t n_before = 0;
    for (uint32_t i = 0; i < layer; i++) n_before += fkv_shape_sealed(fkv_shape_layer(&shape->config, i));
    layers[shape->n_layers + n_before] = make_slab_layer(attn, &attn->open, shape->open_group);
}

/* Computes a digest of the channel_bits arrays of all calibrated layers. */
static fkv_status hash_calibration(fkv_shape *shape) {
    fkv_sha256 sha;
    if (shape->n_channels == 0) return FKV_OK;
    fkv_sha256_open(&sha);
    for (uint32_t i = 0; i < shape->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(&shape->config, i);
        if (l->channel_bits != NULL) fkv_sha256_add(&sha, l->channel_bits, (size_t)l->n_kv_heads * l->head_dim);
    }
    return fkv_sha256_close(&sha, shape->calibration);
}

fkv_status fkv_shape_make(const fkv_config *config, fkv_shape *shape) {
    FKV_TRY(check_cache_config(config));
    *shape = (fkv_shape){.config = *config, .n_layers = config->n_layers};
    shape->n_threads = config->n_threads != 0 ? config->n_threads : fkv_cpu_count();
    FKV_TRY(make_groups(config, &shape->pager, &shape->open_group, &shape->state_group));
    fkv_slab *slab = &shape->slab;
    slab->page_tokens = config->page_tokens;
    slab->n_layers = config->n_layers + fkv_shape_n_sealed(shape);
    slab->n_groups = shape->pager.n_groups;
    for (uint32_t g = 0; g < slab->n_groups; g++) slab->group_pages[g] = shape->pager.groups[g].n_pages;

    fkv_slab_layer layers[2 * FKV_MAX_LAYERS];
    slab->layers = layers;
    for (uint32_t i = 0; i < config->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(config, i);
        fkv_attn_layer attn;
        if (fkv_shape_is_state(l)) {
            layers[i] = make_state_slab_layer(l, shape->state_group);
            continue;
        }
        FKV_TRY(fkv_shape_attn(config, l, &attn));
        put_slab_layer(shape, &attn, i, layers);
        if (l->sink_logits != NULL) shape->n_sink_logits += l->n_q_heads;
        if (attn.calibrated) shape->n_head_blocks += l->n_kv_heads;
        if (attn.calibrated) shape->n_channels += (uint64_t)l->n_kv_heads * l->head_dim;
        shape->token_bytes += (uint64_t)l->n_kv_heads * attn.block.token_bytes;
        uint64_t scratch = fkv_attn_scratch_bytes(&attn, config->max_seqs, shape->n_threads);
        if (scratch > shape->scratch_bytes) shape->scratch_bytes = scratch;
    }
    fkv_status status = fkv_slab_layout(slab);
    slab->layers = NULL;
    return status == FKV_OK ? hash_calibration(shape) : status;
}

void fkv_shape_carve_layers(fkv_carve *carve, const fkv_shape *shape, fkv_shape_layers *layers) {
    layers->slab = FKV_CARVE(carve, shape->slab.n_layers, fkv_slab_layer);
    layers->attn = FKV_CARVE(carve, shape->n_layers, fkv_attn_layer);
    layers->file = FKV_CARVE(carve, shape->n_layers, fkv_file_layer);
    layers->sink_logits = FKV_CARVE(carve, shape->n_sink_logits, float);
    layers->head_blocks = FKV_CARVE(carve, shape->n_head_blocks, fkv_block);
    layers->orders = FKV_CARVE(carve, shape->n_head_blocks, fkv_channel_order);
    layers->channels = FKV_CARVE(carve, shape->n_channels, uint16_t);
    layers->rotations = NULL;
    if (shape->config.rotate != FKV_ROTATE_NONE)
        layers->rotations = FKV_CARVE(carve, (uint64_t)shape->n_layers * FKV_N_SIDES, fkv_rotation);
}

/* Initializes the block layout of each KV head of a calibrated layer. *free: pointers to the unused elements of the carved
 * arrays; each pointer is advanced past the elements that this function uses. */
static void fill_heads(const fkv_layer_config *l, fkv_shape_layers *free, fkv_attn_layer *attn) {
    attn->head_blocks = free->head_blocks;
    for (uint32_t h = 0; h < l->n_kv_heads; h++) {
        fkv_channel_order_make(l->channel_bits + (size_t)h * l->head_dim, l->head_dim, free->channels, free->orders);
        *free->head_blocks = attn->block;
        free->head_blocks++->codec[FKV_SIDE_K].channels = free->orders++;
        free->channels += l->head_dim;
    }
}

void fkv_shape_fill_layers(fkv_shape *shape, const fkv_shape_layers *layers) {
    const fkv_config *c = &shape->config;
    fkv_shape_layers free = *layers;
    for (uint32_t i = 0; i < shape->n_layers; i++) {
        const fkv_layer_config *l = fkv_shape_layer(c, i);
        fkv_attn_layer *attn = &layers->attn[i];
        if (fkv_shape_is_state(l)) {
            *attn = (fkv_attn_layer){0};
            layers->file[i] = (fkv_file_layer){.state_bytes = l->state_bytes};
            layers->slab[i] = make_state_slab_layer(l, shape->state_group);
            continue;
        }
        fkv_status status = fkv_shape_attn(c, l, attn);
        FKV_ASSERT(status == FKV_OK); /* already checked by fkv_shape_make() */
        (void)status;
        put_slab_layer(shape, attn, i, layers->slab);
        layers->file[i] = (fkv_file_layer){.n_kv_heads = l->n_kv_heads,
                                           .head_dim = l->head_dim,
                                           .window = l->window,
                                           .n_sinks = l->n_sinks,
                                           .k = fkv_file_side_of(l->k),
                                           .v = fkv_file_side_of(fkv_shape_v_codec(l)),
                                           .rope_dim = l->rope_dim};
        if (l->sink_logits != NULL) {
            attn->sink_logits = memcpy(free.sink_logits, l->sink_logits, l->n_q_heads * sizeof *free.sink_logits);
            free.sink_logits += l->n_q_heads;
        }
        if (attn->calibrated) fill_heads(l, &free, attn);
        if (layers->rotations == NULL) continue;
        fkv_rotation *pair = &layers->rotations[(size_t)i * FKV_N_SIDES];
        for (uint32_t side = 0; side < FKV_N_SIDES; side++) fkv_rotation_make(c->rotation_seed, side, l->head_dim, &pair[side]);
        if ((c->rotate & FKV_ROTATE_K) != 0 && !attn->sealed) attn->rotate_k = &pair[FKV_SIDE_K];
        if ((c->rotate & FKV_ROTATE_V) != 0) attn->rotate_v = &pair[FKV_SIDE_V];
        if (!fkv_shape_is_latent(l)) continue;
        /* the latent channels serve as both keys and values; latent_rotation() selects their rotation */
        if (attn->sealed) attn->rotate_k = attn->rotate_v;
        attn->rotate_v = attn->rotate_k;
    }
    shape->slab.layers = layers->slab;
    (void)fkv_slab_layout(&shape->slab);
}
