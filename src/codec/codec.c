/* The table of codecs. This file looks up codecs by kind, parses and prints their names, and contains the checks that all codecs
 * share.
 *
 * The arithmetic of each codec kind is in its own file (half.c, affine.c, turbo.c, sealed.c). block.c defines where the parts of
 * a row are stored.
 */
#include "codec.h"

#include <stdio.h>
#include <stdlib.h>

enum { ROW_MULTIPLE = 16 }; /* every head dimension must be a multiple of this number */

static const fkv_codec_functions *const kinds[] = {
    [FKV_CODEC_HALF] = &fkv_codec_half,     [FKV_CODEC_AFFINE] = &fkv_codec_affine,
    [FKV_CODEC_SEALED] = &fkv_codec_sealed, [FKV_CODEC_SEALED_V] = &fkv_codec_sealed_v,
    [FKV_CODEC_TURBO] = &fkv_codec_turbo,   [FKV_CODEC_CALIBRATED] = &fkv_codec_calibrated,
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

static fkv_codec_kind codec_kind_of(fkv_codec_config config) {
    if (config.kind != FKV_CODEC_AUTO) return config.kind;
    return config.bits == 16 ? FKV_CODEC_HALF : FKV_CODEC_AFFINE;
}

static bool codec_kind_exists(fkv_codec_kind kind) { return (unsigned)kind < N_KINDS && kinds[kind] != NULL; }

/* Validates the parts of a configuration that do not depend on the head dimension. */
static fkv_status check_codec_config(fkv_codec_config config) {
    fkv_codec_kind kind = codec_kind_of(config);
    FKV_REQUIRE(
        codec_kind_exists(kind), FKV_BAD_CONFIG,
        "unknown codec kind %d: expected FKV_CODEC_AUTO (0), FKV_CODEC_HALF (%d), FKV_CODEC_AFFINE (%d), FKV_CODEC_SEALED (%d, K only), "
        "FKV_CODEC_SEALED_V (%d, V only), FKV_CODEC_TURBO (%d) or FKV_CODEC_CALIBRATED (%d, K only)",
        (int)kind, (int)FKV_CODEC_HALF, (int)FKV_CODEC_AFFINE, (int)FKV_CODEC_SEALED, (int)FKV_CODEC_SEALED_V,
        (int)FKV_CODEC_TURBO, (int)FKV_CODEC_CALIBRATED);
    return kinds[kind]->check(config);
}

fkv_codec_config fkv_codec_canonical(fkv_codec_config config) {
    config.kind = codec_kind_of(config);
    if (codec_kind_exists(config.kind) && !kinds[config.kind]->grouped) config.group = 0;
    return config;
}

/* Returns the name of a configuration that has passed check_codec_config(). */
static const fkv_codec_name *codec_name_of(fkv_codec_config canonical) {
    const fkv_codec_name *name = kinds[canonical.kind]->names;
    while (name->bits != canonical.bits) name++;
    return name;
}

static uint32_t codec_dim_multiple(fkv_codec_config canonical) {
    uint32_t multiple = kinds[canonical.kind]->dim_multiple;
    return canonical.group != 0 ? canonical.group : multiple != 0 ? multiple : ROW_MULTIPLE;
}

fkv_status fkv_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, fkv_codec *codec) {
    FKV_REQUIRE(type == FKV_F16 || type == FKV_BF16, FKV_BAD_CONFIG,
                "unsupported page type %d: expected FKV_F16 (%d) or FKV_BF16 (%d)", (int)type, (int)FKV_F16, (int)FKV_BF16);
    FKV_REQUIRE(dim >= ROW_MULTIPLE && dim <= FKV_MAX_HEAD_DIM && dim % ROW_MULTIPLE == 0, FKV_BAD_CONFIG,
                "unsupported head dimension %u: expected a multiple of %d between %d and %d", dim, ROW_MULTIPLE, ROW_MULTIPLE,
                FKV_MAX_HEAD_DIM);
    FKV_TRY(check_codec_config(config));
    config = fkv_codec_canonical(config);
    FKV_REQUIRE(config.group == 0 || dim % config.group == 0, FKV_BAD_CONFIG,
                "group size %u does not divide head dimension %u: use a smaller group or 16 bits", config.group, dim);
    uint32_t multiple = codec_dim_multiple(config);
    FKV_REQUIRE(dim % multiple == 0, FKV_BAD_CONFIG, "unsupported head dimension %u for codec %s: expected a multiple of %u", dim,
                codec_name_of(config)->name, multiple);
    fkv_codec made = {
        .kind = config.kind, .type = type, .bits = config.bits, .group = config.group != 0 ? config.group : dim, .dim = dim};
    kinds[made.kind]->lay_out(&made);
    *codec = made;
    return FKV_OK;
}

void fkv_codec_rotated(fkv_codec *codec) {
    if (kinds[codec->kind]->rotated != NULL) kinds[codec->kind]->rotated(codec);
}

bool fkv_codec_same(const fkv_codec *a, const fkv_codec *b) {
    return a->kind == b->kind && a->type == b->type && a->bits == b->bits && a->group == b->group && a->dim == b->dim &&
           a->fitted == b->fitted && a->channels == b->channels;
}

void fkv_codec_clean(const fkv_codec *codec, float *x) {
    float limit = fkv_codec_limit(codec->type);
    for (uint32_t d = 0; d < codec->dim; d++) x[d] = fkv_codec_storable(x[d], limit);
}

void fkv_codec_encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    kinds[codec->kind]->encode(codec, x, part);
}

void fkv_codec_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x) {
    kinds[codec->kind]->decode(codec, part, x);
}

void fkv_codec_decode_at(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x) {
    if (kinds[codec->kind]->decode_at != NULL) {
        kinds[codec->kind]->decode_at(codec, part, token, x);
        return;
    }
    const uint8_t *row[FKV_N_PARTS];
    for (int p = 0; p < FKV_N_PARTS; p++) row[p] = part[p] + (size_t)token * codec->row_bytes[p];
    kinds[codec->kind]->decode(codec, row, x);
}

/* ---- names ---- */

fkv_status fkv_codec_about(fkv_codec_config config, fkv_codec_info *info) {
    FKV_REQUIRE(info != NULL, FKV_BAD_ARGUMENT, "fkv_codec_about: info is NULL");
    FKV_TRY(check_codec_config(config));
    config = fkv_codec_canonical(config);
    const fkv_codec_functions *of = kinds[config.kind];
    *info = (fkv_codec_info){.name = codec_name_of(config)->name,
                             .group = config.group,
                             .dim_multiple = codec_dim_multiple(config),
                             .rotates = of->rotates,
                             .needs_rotation = of->needs_rotation};
    return FKV_OK;
}

/* Looks up the codec name that starts at `text` and ends before the character `end` or at the end of the string. Only codecs for
 * the given side (K or V) are considered. Returns NULL if no name matches. *after is set to the first character after the
 * name. */
static const fkv_codec_name *codec_name_at(const char *text, unsigned side, char end, fkv_codec_kind *kind, const char **after) {
    for (int k = 0; k < N_KINDS; k++) {
        if (kinds[k] == NULL || (kinds[k]->sides != 0 && (kinds[k]->sides & side) == 0)) continue;
        for (const fkv_codec_name *n = kinds[k]->names; n->name != NULL; n++) {
            size_t length = strlen(n->name);
            if (strncmp(text, n->name, length) != 0 || (text[length] != end && text[length] != 0)) continue;
            *kind = (fkv_codec_kind)k;
            *after = text + length;
            return n;
        }
    }
    return NULL;
}

static void list_codec_names(char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int k = 0; k < N_KINDS; k++) {
        if (kinds[k] == NULL || kinds[k]->sides == FKV_ON_V) continue; /* V-only kinds have the same names as K-only kinds */
        for (const fkv_codec_name *n = kinds[k]->names; n->name != NULL && used < size; n++)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used == 0 ? "" : ", ", n->name);
    }
}

/* Parses an optional group suffix such as "g32". *group is unchanged if there is no suffix. */
static bool parse_group_suffix(const char *text, uint32_t *group) {
    if (*text == 0) return true;
    char *end = NULL;
    if (text[0] != 'g' || text[1] < '0' || text[1] > '9') return false;
    unsigned long number = strtoul(text + 1, &end, 10);
    if (*end != 0 || number > UINT32_MAX) return false;
    *group = (uint32_t)number;
    return true;
}

fkv_status fkv_codec_parse(const char *text, fkv_codec_config *k, fkv_codec_config *v) {
    FKV_REQUIRE(text != NULL && k != NULL && v != NULL, FKV_BAD_ARGUMENT, "fkv_codec_parse: text, k or v is NULL");
    fkv_codec_config sides[2] = {*k, *v};
    const char *names_both = strcmp(text, "sealed") == 0 ? "s4" : strcmp(text, "calibrated") == 0 ? "c4/s4" : text;
    const char *slash = strchr(names_both, '/');
    const char *from[2] = {names_both, slash != NULL ? slash + 1 : names_both};
    const char *after = names_both;
    bool good = true;
    for (int i = 0; good && i < 2; i++) {
        char end = i == 0 && slash != NULL ? '/' : 'g';
        const fkv_codec_name *name = codec_name_at(from[i], i == 0 ? FKV_ON_K : FKV_ON_V, end, &sides[i].kind, &after);
        good = name != NULL;
        if (good) sides[i].bits = name->bits;
    }
    uint32_t group = 0;
    good = good && parse_group_suffix(after, &group);
    char names[128];
    list_codec_names(names, sizeof names);
    FKV_REQUIRE(good, FKV_BAD_CONFIG,
                "unknown codec \"%.40s\": expected one name for both K and V, or two names K/V. Names: %s. "
                "An optional suffix g32, g64 or g128 sets the group size "
                "(examples: 8/4, 4/4g32, tq4). \"sealed\" means s4/s4, and \"calibrated\" means c4/s4",
                text, names);
    if (group != 0) sides[0].group = sides[1].group = group;
    *k = sides[0];
    *v = sides[1];
    return FKV_OK;
}
