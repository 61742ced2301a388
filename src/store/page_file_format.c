/* Layout and identity of page files: validates header fields, computes offsets and page lists, and compares identities.
 *
 * Any value in a file may come from an attacker. Every product and sum that can overflow is checked, and every value is checked
 * against the limits of the library (shapes, codecs, groups) before it is used. This file performs no I/O.
 */
#include "page_file_format.h"

#include "../codec/block.h"

#include <errno.h>
#include <stdio.h>

fkv_status fkv_file_os_failed(const char *what, const char *path) {
    return fkv_fail(FKV_IO, "%.300s: %s: %s", path, what, strerror(errno));
}

/* ---- layers -------------------------------------------------------------------------------------------------- */

fkv_codec_config fkv_file_codec(fkv_file_side side) {
    return fkv_codec_canonical((fkv_codec_config){.bits = side.bits, .group = side.group, .kind = (fkv_codec_kind)side.kind});
}

fkv_file_side fkv_file_side_of(fkv_codec_config config) {
    config = fkv_codec_canonical(config);
    return (fkv_file_side){.bits = config.bits, .group = config.group, .kind = (uint32_t)config.kind};
}

static bool file_layer_is_sealed(const fkv_file_layer *layer) {
    return layer->k.kind == FKV_CODEC_SEALED || layer->k.kind == FKV_CODEC_CALIBRATED;
}

/* Returns whether the codec kinds in the record are valid for K and V. */
static bool kinds_are_valid(const fkv_file_layer *layer) {
    return layer->k.kind != FKV_CODEC_SEALED_V && layer->v.kind != FKV_CODEC_SEALED && layer->v.kind != FKV_CODEC_CALIBRATED &&
           (layer->v.kind != FKV_CODEC_SEALED_V || file_layer_is_sealed(layer)) &&
           (layer->rope_dim == 0 || (layer->v.kind == FKV_CODEC_HALF && layer->k.kind != FKV_CODEC_CALIBRATED));
}

/* Initializes the codec of K or V. Returns false if the codec does not exist or is not in canonical form. */
static bool side_codec(fkv_file_side side, uint32_t head_dim, fkv_type type, bool is_latent, fkv_codec *codec) {
    fkv_codec_config config = fkv_file_codec(side);
    fkv_codec_info info;
    if (config.group != side.group || fkv_codec_about(config, &info) != FKV_OK) return false;
    if (is_latent) config = fkv_block_latent_codec(config, head_dim);
    return fkv_codec_make(config, head_dim, type, codec) == FKV_OK;
}

/* Checks the record of a state layer: state_bytes must be valid, and all other fields must be 0. */
static fkv_status check_state_record(const fkv_file_layer *layer, uint32_t number, const char *path) {
    const fkv_file_layer expected = {.state_bytes = layer->state_bytes};
    FKV_REQUIRE(
        memcmp(layer, &expected, sizeof expected) == 0 && layer->state_bytes % 64 == 0 &&
            layer->state_bytes <= FKV_MAX_STATE_BYTES,
        FKV_FILE_DAMAGED,
        "%s: damaged page file: layer %u has a state of %u bytes (expected a multiple of 64, at most %d), or it has both keys and a state",
        path, number, layer->state_bytes, FKV_MAX_STATE_BYTES);
    return FKV_OK;
}

/* Computes the number of bytes that one layer occupies in a page, summed over all KV heads. *open_bytes receives the same number
 * for an open page, or 0 if the layer is not sealed. */
static fkv_status layer_run_bytes(const fkv_file_layer *layer, uint32_t number, const fkv_file_header *header, const char *path,
                                  uint64_t *bytes, uint64_t *open_bytes) {
    *bytes = layer->state_bytes;
    *open_bytes = 0;
    if (layer->state_bytes != 0) return check_state_record(layer, number, path);
    FKV_REQUIRE(layer->n_kv_heads > 0 && layer->head_dim >= 16 && layer->head_dim <= FKV_MAX_HEAD_DIM &&
                    layer->head_dim % 16 == 0,
                FKV_FILE_DAMAGED, "%s: damaged page file: layer %u has invalid dimensions (n_kv_heads %u, head_dim %u)", path,
                number, layer->n_kv_heads, layer->head_dim);
    FKV_REQUIRE(layer->rope_dim == 0 ||
                    (layer->n_kv_heads == 1 && layer->rope_dim % 16 == 0 && layer->rope_dim <= FKV_MAX_HEAD_DIM),
                FKV_FILE_DAMAGED,
                "%s: damaged page file: layer %u has invalid dimensions for a latent layer (n_kv_heads %u, rope_dim %u)", path,
                number, layer->n_kv_heads, layer->rope_dim);
    FKV_REQUIRE(layer->window > 0 || layer->n_sinks == 0, FKV_FILE_DAMAGED,
                "%s: damaged page file: layer %u has n_sinks %u but no window", path, number, layer->n_sinks);
    const fkv_type type = (fkv_type)header->page_type;
    const bool is_latent = layer->rope_dim != 0;
    fkv_codec k;
    fkv_codec v;
    FKV_REQUIRE(
        kinds_are_valid(layer) && side_codec(layer->k, layer->head_dim, type, is_latent, &k) &&
            side_codec(layer->v, is_latent ? layer->rope_dim : layer->head_dim, type, false, &v),
        FKV_FILE_DAMAGED,
        "%s: damaged page file: layer %u has an invalid codec (head_dim %u; K kind %u, bits %u, group %u; V kind %u, bits %u, group %u)",
        path, number, layer->head_dim, layer->k.kind, layer->k.bits, layer->k.group, layer->v.kind, layer->v.bits,
        layer->v.group);
    fkv_block block;
    fkv_block_make(&k, &v, header->page_tokens, &block);
    *bytes = (uint64_t)layer->n_kv_heads * block.bytes;
    if (!file_layer_is_sealed(layer)) return FKV_OK;
    fkv_block_make_open(layer->head_dim, layer->rope_dim, type, header->page_tokens, &block);
    *open_bytes = (uint64_t)layer->n_kv_heads * block.bytes;
    return FKV_OK;
}

/* ---- layout -------------------------------------------------------------------------------------------------- */

/* Returns the index of the group to which a layer belongs: the group with the same (window, n_sinks) pair or, for a state layer,
 * the group of all state layers. Adds the group if it does not exist. Returns FKV_MAX_GROUPS if the table is full. */
static uint32_t find_or_add_file_group(fkv_file_plan *plan, const fkv_file_layer *layer) {
    const fkv_file_group wanted = {.is_state = layer->state_bytes != 0,
                                   .window = layer->state_bytes != 0 ? FKV_STATE_WINDOW : layer->window,
                                   .n_sinks = layer->n_sinks,
                                   .span = 1};
    uint32_t g = 0;
    while (g < plan->n_groups && (plan->groups[g].is_state != wanted.is_state || plan->groups[g].window != wanted.window ||
                                  plan->groups[g].n_sinks != wanted.n_sinks))
        g++;
    if (g == plan->n_groups && g < FKV_MAX_GROUPS) plan->groups[plan->n_groups++] = wanted;
    return g;
}

/* Adds the group that holds the open pages of sealed layers: page 0 and the pages of the next token's span. */
static fkv_status add_open_file_group(fkv_file_plan *plan, uint64_t page_bytes, const char *path) {
    FKV_REQUIRE(plan->n_groups < FKV_MAX_GROUPS, FKV_FILE_DAMAGED,
                "%s: damaged page file: %u layer groups plus one group of open pages exceed the limit of %d groups", path,
                plan->n_groups, FKV_MAX_GROUPS);
    plan->groups[plan->n_groups++] = (fkv_file_group){.window = 1, .n_sinks = 1, .span = FKV_OPEN_SPAN, .page_bytes = page_bytes};
    return FKV_OK;
}

/* Sets the page ranges of a group so that they contain the pages that a query at position n_tokens attends to. */
static void plan_group_pages(fkv_file_group *group, uint32_t page_tokens, uint32_t n_tokens) {
    group->end = fkv_ceil_div(n_tokens, page_tokens);
    group->n_front = fkv_min_u32(fkv_ceil_div(group->n_sinks, page_tokens), group->end);
    const uint64_t window_end = (uint64_t)n_tokens + 1; /* the window is [window_end - window, window_end) */
    const uint32_t first =
        group->window == 0 || window_end <= group->window ? 0 : (uint32_t)((window_end - group->window) / page_tokens);
    group->first = fkv_max_u32(first - first % group->span, group->n_front);
}

bool fkv_file_plan_offsets(const fkv_file_header *header, uint64_t n_pages, fkv_file_plan *plan) {
    uint64_t end = 0;
    plan->n_pages = n_pages;
    plan->tokens_offset = sizeof(fkv_file_header) + (uint64_t)header->n_layers * sizeof(fkv_file_layer);
    plan->index_offset = fkv_align_up(plan->tokens_offset + (uint64_t)header->n_tokens * sizeof(uint32_t), FKV_FILE_INDEX_ALIGN);
    if (fkv_mul_overflows(n_pages, sizeof(fkv_file_entry), &end) || fkv_add_overflows(end, plan->index_offset, &end) ||
        end > INT64_MAX - FKV_FILE_DATA_ALIGN)
        return false;
    plan->data_offset = fkv_align_up(end, FKV_FILE_DATA_ALIGN);
    return true;
}

fkv_status fkv_file_plan_make(const fkv_file_header *header, const fkv_file_layer *layers, const char *path,
                              fkv_file_plan *plan) {
    FKV_ASSERT(header->n_layers <= FKV_MAX_LAYERS);
    *plan = (fkv_file_plan){0};
    FKV_REQUIRE(fkv_is_pow2(header->page_tokens) && header->page_tokens >= 16 && header->page_tokens <= 256, FKV_FILE_DAMAGED,
                "%s: damaged page file: page_tokens is %u (expected a power of two from 16 to 256)", path, header->page_tokens);
    FKV_REQUIRE(header->page_type == FKV_F16 || header->page_type == FKV_BF16, FKV_FILE_DAMAGED,
                "%s: damaged page file: page_type is %u (expected %d or %d)", path, header->page_type, FKV_F16, FKV_BF16);
    uint64_t all_open_bytes = 0;
    for (uint32_t l = 0; l < header->n_layers; l++) {
        uint64_t run_bytes = 0;
        uint64_t open_bytes = 0;
        FKV_TRY(layer_run_bytes(&layers[l], l, header, path, &run_bytes, &open_bytes));
        all_open_bytes += open_bytes;
        const uint32_t g = find_or_add_file_group(plan, &layers[l]);
        FKV_REQUIRE(g < FKV_MAX_GROUPS, FKV_FILE_DAMAGED, "%s: damaged page file: more than %d layer groups", path,
                    FKV_MAX_GROUPS);
        plan->layer_group[l] = (uint8_t)g;
        /* cannot overflow: at most 512 layers, fewer than 2^32 heads, at most 2^19 bytes per block and 2^30 bytes per state */
        plan->groups[g].page_bytes += run_bytes;
    }
    if (all_open_bytes > 0) FKV_TRY(add_open_file_group(plan, all_open_bytes, path));
    uint64_t n_pages = 0;
    uint64_t data_bytes = 0;
    bool fits = true;
    for (uint32_t g = 0; g < plan->n_groups; g++) {
        fkv_file_group *group = &plan->groups[g];
        uint64_t group_bytes = 0;
        plan_group_pages(group, header->page_tokens, header->n_tokens);
        const uint64_t n = (uint64_t)group->n_front + (group->end - group->first);
        n_pages += n;
        fits = fits && !fkv_mul_overflows(n, group->page_bytes, &group_bytes) &&
               !fkv_add_overflows(data_bytes, group_bytes, &data_bytes);
    }
    fits = fits && fkv_file_plan_offsets(header, n_pages, plan) &&
           !fkv_add_overflows(plan->data_offset, data_bytes, &plan->file_bytes);
    FKV_REQUIRE(fits && plan->file_bytes <= INT64_MAX, FKV_FILE_DAMAGED,
                "%s: damaged page file: %u tokens in %llu pages exceed the maximum file size", path, header->n_tokens,
                (unsigned long long)n_pages);
    return FKV_OK;
}

bool fkv_file_cursor_next(const fkv_file_plan *plan, fkv_file_cursor *cursor, fkv_file_entry *entry) {
    while (cursor->group < plan->n_groups) {
        const fkv_file_group *group = &plan->groups[cursor->group];
        if (cursor->logical == group->n_front) cursor->logical = group->first;
        if (cursor->logical < group->end) {
            *entry = (fkv_file_entry){.group = cursor->group, .logical = cursor->logical, .offset = cursor->offset};
            cursor->logical++;
            cursor->offset += group->page_bytes;
            return true;
        }
        cursor->group++;
        cursor->logical = 0;
    }
    return false;
}

/* ---- identity ------------------------------------------------------------------------------------------------ */

/* Converts the description of a K or V codec to canonical form. */
static fkv_file_side canonical_side(fkv_file_side side) { return fkv_file_side_of(fkv_file_codec(side)); }

void fkv_file_identity_write(const fkv_file_identity *identity, fkv_file_header *header, fkv_file_layer *layers) {
    *header = (fkv_file_header){
        .version = FKV_FILE_FORMAT_VERSION,
        .header_bytes = sizeof(fkv_file_header),
        .layer_bytes = sizeof(fkv_file_layer),
        .entry_bytes = sizeof(fkv_file_entry),
        .n_layers = identity->n_layers,
        .page_tokens = identity->page_tokens,
        .page_type = (uint32_t)identity->page_type,
        .rotate = (uint32_t)identity->rotate,
        .rotation_seed = identity->rotate == FKV_ROTATE_NONE ? 0 : identity->rotation_seed,
    };
    memcpy(header->magic, FKV_FILE_MAGIC, sizeof header->magic);
    memcpy(header->weights_id, identity->weights_id, sizeof header->weights_id);
    memcpy(header->calibration, identity->calibration, sizeof header->calibration);
    memcpy(header->rope_id, identity->rope_id, strnlen(identity->rope_id, sizeof header->rope_id - 1));
    memcpy(header->numerics, identity->numerics, strnlen(identity->numerics, sizeof header->numerics - 1));
    for (uint32_t l = 0; l < identity->n_layers; l++) {
        layers[l] = identity->layers[l];
        if (layers[l].state_bytes != 0) continue;
        layers[l].k = canonical_side(layers[l].k);
        layers[l].v = canonical_side(layers[l].v);
    }
}

static fkv_status compare_field(const char *field, uint64_t file, uint64_t ours, const char *path) {
    if (file == ours) return FKV_OK;
    return fkv_fail(FKV_FILE_FOREIGN, "%s: page file mismatch: %s is %llu in the file but %llu in this cache", path, field,
                    (unsigned long long)file, (unsigned long long)ours);
}

static fkv_status compare_layer_field(uint32_t layer, const char *field, uint32_t file, uint32_t ours, const char *path) {
    if (file == ours) return FKV_OK;
    return fkv_fail(FKV_FILE_FOREIGN, "%s: page file mismatch: %s of layer %u is %u in the file but %u in this cache", path,
                    field, layer, file, ours);
}

enum { ID_HEX_BYTES = 65 };

static void format_hex(const uint8_t id[32], char text[ID_HEX_BYTES]) {
    for (int i = 0; i < 32; i++) (void)snprintf(text + 2 * i, 3, "%02x", id[i]);
}

static fkv_status compare_id(const char *field, const uint8_t in_file[32], const uint8_t here[32], const char *path) {
    char file[ID_HEX_BYTES];
    char ours[ID_HEX_BYTES];
    if (memcmp(in_file, here, 32) == 0) return FKV_OK;
    format_hex(in_file, file);
    format_hex(here, ours);
    return fkv_fail(FKV_FILE_FOREIGN, "%s: page file mismatch: %s is %s in the file but %s in this cache", path, field, file,
                    ours);
}

static fkv_status compare_layer(uint32_t number, const fkv_file_layer *file, const fkv_file_layer *ours, const char *path) {
    FKV_TRY(compare_layer_field(number, "state_bytes", file->state_bytes, ours->state_bytes, path));
    if (ours->state_bytes != 0) return FKV_OK;
    const fkv_file_side k = canonical_side(ours->k);
    const fkv_file_side v = canonical_side(ours->v);
    FKV_TRY(compare_layer_field(number, "n_kv_heads", file->n_kv_heads, ours->n_kv_heads, path));
    FKV_TRY(compare_layer_field(number, "head_dim", file->head_dim, ours->head_dim, path));
    FKV_TRY(compare_layer_field(number, "rope_dim", file->rope_dim, ours->rope_dim, path));
    FKV_TRY(compare_layer_field(number, "window", file->window, ours->window, path));
    FKV_TRY(compare_layer_field(number, "n_sinks", file->n_sinks, ours->n_sinks, path));
    FKV_TRY(compare_layer_field(number, "k.bits", file->k.bits, k.bits, path));
    FKV_TRY(compare_layer_field(number, "k.group", file->k.group, k.group, path));
    FKV_TRY(compare_layer_field(number, "k.kind", file->k.kind, k.kind, path));
    FKV_TRY(compare_layer_field(number, "v.bits", file->v.bits, v.bits, path));
    FKV_TRY(compare_layer_field(number, "v.group", file->v.group, v.group, path));
    return compare_layer_field(number, "v.kind", file->v.kind, v.kind, path);
}

fkv_status fkv_file_identity_check(const fkv_file_identity *identity, const fkv_file_header *header, const fkv_file_layer *layers,
                                   const char *path) {
    FKV_TRY(compare_id("weights_id", header->weights_id, identity->weights_id, path));
    FKV_REQUIRE(strncmp(header->rope_id, identity->rope_id, sizeof header->rope_id) == 0, FKV_FILE_FOREIGN,
                "%s: page file mismatch: rope_id is \"%.63s\" in the file but \"%.63s\" in this cache", path, header->rope_id,
                identity->rope_id);
    FKV_TRY(compare_field("page_tokens", header->page_tokens, identity->page_tokens, path));
    FKV_TRY(compare_field("page_type", header->page_type, (uint64_t)identity->page_type, path));
    FKV_TRY(compare_field("rotate", header->rotate, (uint64_t)identity->rotate, path));
    if (identity->rotate != FKV_ROTATE_NONE)
        FKV_TRY(compare_field("rotation_seed", header->rotation_seed, identity->rotation_seed, path));
    FKV_TRY(compare_field("n_layers", header->n_layers, identity->n_layers, path));
    for (uint32_t l = 0; l < identity->n_layers; l++) FKV_TRY(compare_layer(l, &layers[l], &identity->layers[l], path));
    FKV_TRY(compare_id("calibration", header->calibration, identity->calibration, path));
    FKV_REQUIRE(
        strncmp(header->numerics, identity->numerics, sizeof header->numerics) == 0, FKV_FILE_FOREIGN,
        "%s: page file mismatch: numerics is \"%.31s\" in the file but \"%.31s\" in this cache; these kernels compute different "
        "bits, so save the file again on this machine",
        path, header->numerics, identity->numerics);
    return FKV_OK;
}
