/* The arithmetic of page files: what cannot be, where things lie, which pages are there, whose file it is.
 *
 * Works on numbers that an attacker may have chosen: every product and sum that can overflow is checked, and every number is held
 * against what the library itself can have (shapes, codecs, groups) before it is used. Reads and writes no file.
 */
#include "page_file_format.h"

#include "../codec/block.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

fkv_status fkv_file_os_failed(const char *what, const char *path) {
    return fkv_fail(FKV_IO, "%s: %s: %s", what, strerror(errno), path);
}

/* ---- the plan ------------------------------------------------------------------------------------------------ */

fkv_codec_config fkv_file_codec(fkv_file_side side) {
    return fkv_codec_canonical((fkv_codec_config){.bits = side.bits, .group = side.group, .kind = (fkv_codec_kind)side.kind});
}

fkv_file_side fkv_file_side_of(fkv_codec_config config) {
    config = fkv_codec_canonical(config);
    return (fkv_file_side){.bits = config.bits, .group = config.group, .kind = (uint32_t)config.kind};
}

/* ---- versions ------------------------------------------------------------------------------------------------ */

uint32_t fkv_file_layer_bytes(uint32_t version) {
    if (version == FKV_FILE_VERSION_1) return FKV_FILE_LAYER_BYTES_1;
    return version == FKV_FILE_VERSION_2 || version == FKV_FILE_VERSION_8 ? (uint32_t)sizeof(fkv_file_layer) : 0;
}

/* Whether the bits tell the kind, as version 1 needs it. */
static bool bits_tell(fkv_file_side side) {
    return fkv_file_codec(side).kind == fkv_codec_canonical((fkv_codec_config){.bits = side.bits}).kind;
}

static bool is_sealed(const fkv_file_layer *layer) {
    return layer->k.kind == FKV_CODEC_SEALED || layer->k.kind == FKV_CODEC_CALIBRATED;
}

uint32_t fkv_file_version_of(const fkv_file_layer *layers, uint32_t n_layers) {
    uint32_t version = FKV_FILE_VERSION_1;
    for (uint32_t l = 0; l < n_layers; l++) {
        if (is_sealed(&layers[l])) return FKV_FILE_VERSION_8;
        if (!bits_tell(layers[l].k) || !bits_tell(layers[l].v)) version = FKV_FILE_VERSION_2;
    }
    return version;
}

/* A record of version 1: four numbers, then bits and group of each side. */
enum { NUMBERS_1 = FKV_FILE_LAYER_BYTES_1 / (int)sizeof(uint32_t) };

void fkv_file_layers_pack(uint32_t version, fkv_file_layer *layers, uint32_t n_layers) {
    uint8_t *to = (uint8_t *)layers;
    for (uint32_t l = 0; version == FKV_FILE_VERSION_1 && l < n_layers; l++) {
        const fkv_file_layer *from = &layers[l];
        const uint32_t record[NUMBERS_1] = {from->n_kv_heads, from->head_dim, from->window, from->n_sinks,
                                            from->k.bits,     from->k.group,  from->v.bits, from->v.group};
        memcpy(to + (size_t)l * sizeof record, record, sizeof record);
    }
}

void fkv_file_layers_unpack(uint32_t version, fkv_file_layer *layers, uint32_t n_layers) {
    const uint8_t *from = (const uint8_t *)layers;
    for (uint32_t l = n_layers; version == FKV_FILE_VERSION_1 && l-- > 0;) {
        uint32_t record[NUMBERS_1];
        memcpy(record, from + (size_t)l * sizeof record, sizeof record);
        fkv_file_layer layer = {record[0], record[1], record[2], record[3], {record[4], record[5]}, {record[6], record[7]}, {0}};
        layer.k.kind = (uint32_t)fkv_file_codec(layer.k).kind;
        layer.v.kind = (uint32_t)fkv_file_codec(layer.v).kind;
        layers[l] = layer;
    }
}

/* Kinds that stand on the right side, and numbers that are 0. */
static bool kinds_can_be(const fkv_file_layer *layer) {
    return layer->k.kind != FKV_CODEC_SEALED_V && layer->v.kind != FKV_CODEC_SEALED && layer->v.kind != FKV_CODEC_CALIBRATED &&
           (layer->v.kind != FKV_CODEC_SEALED_V || is_sealed(layer)) && layer->zero[0] == 0 && layer->zero[1] == 0;
}

/* The codec of a side; false for one that does not exist or is not in the form that a file has. */
static bool side_codec(fkv_file_side side, uint32_t head_dim, fkv_type type, fkv_codec *codec) {
    return fkv_codec_make(fkv_file_codec(side), head_dim, type, codec) == FKV_OK && fkv_file_codec(side).group == side.group;
}

/* Bytes of all KV heads of one layer's page; *open_bytes: of an open page, 0 where the layer has none. */
static fkv_status layer_run_bytes(const fkv_file_layer *layer, uint32_t number, const fkv_file_header *header, const char *path,
                                  uint64_t *bytes, uint64_t *open_bytes) {
    FKV_REQUIRE(layer->n_kv_heads > 0 && layer->head_dim >= 16 && layer->head_dim <= FKV_MAX_HEAD_DIM &&
                    layer->head_dim % 16 == 0,
                FKV_FILE_DAMAGED, "damaged page file: layer %u has %u KV heads of dimension %u: %s", number, layer->n_kv_heads,
                layer->head_dim, path);
    FKV_REQUIRE(layer->window > 0 || layer->n_sinks == 0, FKV_FILE_DAMAGED,
                "damaged page file: layer %u has no window but %u sinks: %s", number, layer->n_sinks, path);
    fkv_codec k;
    fkv_codec v;
    FKV_REQUIRE(
        kinds_can_be(layer) && side_codec(layer->k, layer->head_dim, (fkv_type)header->page_type, &k) &&
            side_codec(layer->v, layer->head_dim, (fkv_type)header->page_type, &v),
        FKV_FILE_DAMAGED,
        "damaged page file: layer %u of dimension %u has K of %u bits in groups of %u, V of %u in %u, kinds %u and %u: %s",
        number, layer->head_dim, layer->k.bits, layer->k.group, layer->v.bits, layer->v.group, layer->k.kind, layer->v.kind,
        path);
    fkv_block block;
    fkv_block_make(&k, &v, header->page_tokens, &block);
    *bytes = (uint64_t)layer->n_kv_heads * block.bytes;
    *open_bytes = 0;
    if (!is_sealed(layer)) return FKV_OK;
    fkv_block_make_open(layer->head_dim, (fkv_type)header->page_type, header->page_tokens, &block);
    *open_bytes = (uint64_t)layer->n_kv_heads * block.bytes;
    return FKV_OK;
}

/* The number of the layer's group, a new one if no layer before had this window and these sinks; n_groups if there is no room. */
static uint32_t group_of(fkv_file_plan *plan, const fkv_file_layer *layer) {
    uint32_t g = 0;
    while (g < plan->n_groups && (plan->groups[g].window != layer->window || plan->groups[g].n_sinks != layer->n_sinks)) g++;
    if (g == plan->n_groups && g < FKV_MAX_GROUPS)
        plan->groups[plan->n_groups++] = (fkv_file_group){.window = layer->window, .n_sinks = layer->n_sinks, .span = 1};
    return g;
}

/* The open pages of sealed layers: the first one and those of the span of the next token. */
static fkv_status add_open_group(fkv_file_plan *plan, uint64_t page_bytes, const char *path) {
    FKV_REQUIRE(plan->n_groups < FKV_MAX_GROUPS, FKV_FILE_DAMAGED,
                "damaged page file: %u groups of layers and one of open pages, at most %d: %s", plan->n_groups, FKV_MAX_GROUPS,
                path);
    plan->groups[plan->n_groups++] = (fkv_file_group){.window = 1, .n_sinks = 1, .span = FKV_OPEN_SPAN, .page_bytes = page_bytes};
    return FKV_OK;
}

/* The pages that a query at position n_tokens sees. */
static void group_pages(fkv_file_group *group, uint32_t page_tokens, uint32_t n_tokens) {
    group->end = fkv_ceil_div(n_tokens, page_tokens);
    group->n_front = fkv_min_u32(fkv_ceil_div(group->n_sinks, page_tokens), group->end);
    const uint64_t first_unseen = (uint64_t)n_tokens + 1; /* tokens before it less the window are gone */
    const uint32_t first =
        group->window == 0 || first_unseen <= group->window ? 0 : (uint32_t)((first_unseen - group->window) / page_tokens);
    group->first = fkv_max_u32(first - first % group->span, group->n_front);
}

bool fkv_file_plan_offsets(const fkv_file_header *header, uint64_t n_pages, fkv_file_plan *plan) {
    uint64_t end = 0;
    plan->n_pages = n_pages;
    plan->tokens_offset = sizeof(fkv_file_header) + (uint64_t)header->n_layers * fkv_file_layer_bytes(header->version);
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
                "damaged page file: pages of %u tokens: %s", header->page_tokens, path);
    FKV_REQUIRE(header->page_type == FKV_F16 || header->page_type == FKV_BF16, FKV_FILE_DAMAGED,
                "damaged page file: page type %u: %s", header->page_type, path);
    uint64_t all_open_bytes = 0;
    for (uint32_t l = 0; l < header->n_layers; l++) {
        uint64_t run_bytes = 0;
        uint64_t open_bytes = 0;
        FKV_TRY(layer_run_bytes(&layers[l], l, header, path, &run_bytes, &open_bytes));
        all_open_bytes += open_bytes;
        const uint32_t g = group_of(plan, &layers[l]);
        FKV_REQUIRE(g < FKV_MAX_GROUPS, FKV_FILE_DAMAGED, "damaged page file: more than %d groups of layers: %s", FKV_MAX_GROUPS,
                    path);
        plan->layer_group[l] = (uint8_t)g;
        plan->groups[g].page_bytes += run_bytes; /* 512 layers of less than 2^32 heads of at most 2^19 bytes: fits */
    }
    if (all_open_bytes > 0) FKV_TRY(add_open_group(plan, all_open_bytes, path));
    uint64_t n_pages = 0;
    uint64_t data_bytes = 0;
    bool fits = true;
    for (uint32_t g = 0; g < plan->n_groups; g++) {
        fkv_file_group *group = &plan->groups[g];
        uint64_t group_bytes = 0;
        group_pages(group, header->page_tokens, header->n_tokens);
        const uint64_t n = (uint64_t)group->n_front + (group->end - group->first);
        n_pages += n;
        fits = fits && !fkv_mul_overflows(n, group->page_bytes, &group_bytes) &&
               !fkv_add_overflows(data_bytes, group_bytes, &data_bytes);
    }
    fits = fits && fkv_file_plan_offsets(header, n_pages, plan) &&
           !fkv_add_overflows(plan->data_offset, data_bytes, &plan->file_bytes);
    FKV_REQUIRE(fits && plan->file_bytes <= INT64_MAX, FKV_FILE_DAMAGED,
                "damaged page file: %u tokens in %" PRIu64 " pages are more than a file can hold: %s", header->n_tokens, n_pages,
                path);
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

/* The one form in which a side stands in a file. */
static fkv_file_side canonical(fkv_file_side side) { return fkv_file_side_of(fkv_file_codec(side)); }

void fkv_file_identity_write(const fkv_file_identity *identity, fkv_file_header *header, fkv_file_layer *layers) {
    *header = (fkv_file_header){
        .version = fkv_file_version_of(identity->layers, identity->n_layers),
        .header_bytes = sizeof(fkv_file_header),
        .entry_bytes = sizeof(fkv_file_entry),
        .n_layers = identity->n_layers,
        .page_tokens = identity->page_tokens,
        .page_type = (uint32_t)identity->page_type,
        .rotate = (uint32_t)identity->rotate,
        .rotation_seed = identity->rotate == FKV_ROTATE_NONE ? 0 : identity->rotation_seed,
    };
    header->layer_bytes = fkv_file_layer_bytes(header->version);
    memcpy(header->magic, FKV_FILE_MAGIC, sizeof header->magic);
    memcpy(header->weights_id, identity->weights_id, sizeof header->weights_id);
    memcpy(header->calibration, identity->calibration, sizeof header->calibration);
    memcpy(header->rope_id, identity->rope_id, strnlen(identity->rope_id, sizeof header->rope_id - 1));
    for (uint32_t l = 0; l < identity->n_layers; l++) {
        layers[l] = identity->layers[l];
        layers[l].k = canonical(layers[l].k);
        layers[l].v = canonical(layers[l].v);
    }
}

static fkv_status foreign_number(const char *field, uint64_t file, uint64_t ours, const char *path) {
    if (file == ours) return FKV_OK;
    return fkv_fail(FKV_FILE_FOREIGN, "foreign page file: %s is %" PRIu64 " in the file and %" PRIu64 " here: %s", field, file,
                    ours, path);
}

static fkv_status foreign_layer_number(uint32_t layer, const char *field, uint32_t file, uint32_t ours, const char *path) {
    if (file == ours) return FKV_OK;
    return fkv_fail(FKV_FILE_FOREIGN, "foreign page file: %s of layer %u is %u in the file and %u here: %s", field, layer, file,
                    ours, path);
}

enum { ID_TEXT_BYTES = 65 };

static void hex_text(const uint8_t id[32], char text[ID_TEXT_BYTES]) {
    for (int i = 0; i < 32; i++) (void)snprintf(text + 2 * i, 3, "%02x", id[i]);
}

static fkv_status foreign_id(const char *field, const uint8_t in_file[32], const uint8_t here[32], const char *path) {
    char file[ID_TEXT_BYTES];
    char ours[ID_TEXT_BYTES];
    if (memcmp(in_file, here, 32) == 0) return FKV_OK;
    hex_text(in_file, file);
    hex_text(here, ours);
    return fkv_fail(FKV_FILE_FOREIGN, "foreign page file: %s is %s in the file and %s here: %s", field, file, ours, path);
}

static fkv_status foreign_layer(uint32_t number, const fkv_file_layer *file, const fkv_file_layer *ours, const char *path) {
    const fkv_file_side k = canonical(ours->k);
    const fkv_file_side v = canonical(ours->v);
    FKV_TRY(foreign_layer_number(number, "n_kv_heads", file->n_kv_heads, ours->n_kv_heads, path));
    FKV_TRY(foreign_layer_number(number, "head_dim", file->head_dim, ours->head_dim, path));
    FKV_TRY(foreign_layer_number(number, "window", file->window, ours->window, path));
    FKV_TRY(foreign_layer_number(number, "n_sinks", file->n_sinks, ours->n_sinks, path));
    FKV_TRY(foreign_layer_number(number, "k.bits", file->k.bits, k.bits, path));
    FKV_TRY(foreign_layer_number(number, "k.group", file->k.group, k.group, path));
    FKV_TRY(foreign_layer_number(number, "k.kind", file->k.kind, k.kind, path));
    FKV_TRY(foreign_layer_number(number, "v.bits", file->v.bits, v.bits, path));
    FKV_TRY(foreign_layer_number(number, "v.group", file->v.group, v.group, path));
    return foreign_layer_number(number, "v.kind", file->v.kind, v.kind, path);
}

fkv_status fkv_file_identity_check(const fkv_file_identity *identity, const fkv_file_header *header, const fkv_file_layer *layers,
                                   const char *path) {
    FKV_TRY(foreign_id("weights_id", header->weights_id, identity->weights_id, path));
    FKV_REQUIRE(strncmp(header->rope_id, identity->rope_id, sizeof header->rope_id) == 0, FKV_FILE_FOREIGN,
                "foreign page file: rope_id is \"%.63s\" in the file and \"%.63s\" here: %s", header->rope_id, identity->rope_id,
                path);
    FKV_TRY(foreign_number("page_tokens", header->page_tokens, identity->page_tokens, path));
    FKV_TRY(foreign_number("page_type", header->page_type, (uint64_t)identity->page_type, path));
    FKV_TRY(foreign_number("rotate", header->rotate, (uint64_t)identity->rotate, path));
    if (identity->rotate != FKV_ROTATE_NONE)
        FKV_TRY(foreign_number("rotation_seed", header->rotation_seed, identity->rotation_seed, path));
    FKV_TRY(foreign_number("n_layers", header->n_layers, identity->n_layers, path));
    for (uint32_t l = 0; l < identity->n_layers; l++) FKV_TRY(foreign_layer(l, &layers[l], &identity->layers[l], path));
    return foreign_id("calibration", header->calibration, identity->calibration, path);
}
