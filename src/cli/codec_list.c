/* See codec_list.h. */
#include "codec_list.h"

#include <string.h>

static const char *const ROTATE_NAMES[] = {"none", "k", "v", "kv"};

const char *codec_rotate_name(fkv_rotate rotate) { return ROTATE_NAMES[rotate & 3]; }

static fkv_codec_info info_of_codec(fkv_codec_config config) {
    fkv_codec_info info = {.name = "?"};
    (void)fkv_codec_about(config, &info);
    return info;
}

/* Returns an fkv_rotate mask of the sides (keys, values) that are rotated by default. */
static unsigned rotated_sides(const codec_choice *c) {
    return (info_of_codec(c->k).rotates ? FKV_ROTATE_K : 0u) | (info_of_codec(c->v).rotates ? FKV_ROTATE_V : 0u);
}

/* Returns an fkv_rotate mask of the sides (keys, values) whose codec requires rotation. */
static unsigned required_rotation(const codec_choice *c) {
    return (info_of_codec(c->k).needs_rotation ? FKV_ROTATE_K : 0u) | (info_of_codec(c->v).needs_rotation ? FKV_ROTATE_V : 0u);
}

/* Parses the rotation suffix of a codec. `rest` is the text after the colon and must be none, k, v or kv. */
static int parse_rotation(const char *word, const char *rest, codec_choice *codec) {
    unsigned requested = 0;
    while (requested < 4 && strcmp(rest, ROTATE_NAMES[requested]) != 0) requested++;
    if (requested == 4)
        return kit_fail(EXIT_USAGE,
                        "--codecs %s: expected k, v, kv or none after the colon, to rotate keys, values, both or neither", word);
    unsigned missing = required_rotation(codec) & ~requested;
    if (missing != 0)
        return kit_fail(EXIT_USAGE, "--codecs %s: codec %s requires rotation; remove :%s", word,
                        (missing & FKV_ROTATE_K) != 0 ? info_of_codec(codec->k).name : info_of_codec(codec->v).name, rest);
    codec->rotate = (fkv_rotate)(requested & rotated_sides(codec));
    return EXIT_GOOD;
}

static int parse_codec(const char *word, codec_choice *codec) {
    char sides[CODEC_NAME];
    size_t length = strcspn(word, ":");
    snprintf(sides, sizeof sides, "%.*s", (int)length, word);
    if (fkv_codec_parse(sides, &codec->k, &codec->v) != FKV_OK) return kit_fail(EXIT_USAGE, "--codecs: %s", fkv_message());
    codec->rotate = (fkv_rotate)rotated_sides(codec);
    return word[length] == ':' ? parse_rotation(word, word + length + 1, codec) : EXIT_GOOD;
}

int codec_list_parse(const char *names, uint32_t most, codec_list *list) {
    const codec_choice usual = list->codecs[0];
    if (names == NULL) return EXIT_GOOD;
    *list = (codec_list){.named = true};
    for (const char *at = names; *at != 0;) {
        char word[CODEC_NAME];
        size_t length = strcspn(at, ",");
        if (list->n == most && most == 1)
            return kit_fail(EXIT_USAGE, "--codecs %s: this command accepts a single codec, not a list", names);
        if (list->n == most) return kit_fail(EXIT_USAGE, "--codecs: too many codecs; at most %u are supported", most);
        snprintf(word, sizeof word, "%.*s", length < sizeof word ? (int)length : (int)sizeof word, at);
        list->codecs[list->n] = usual; /* keeps the default group size unless the codec has a suffix such as g32 */
        int code = parse_codec(word, &list->codecs[list->n++]);
        if (code != EXIT_GOOD) return code;
        at += length + (at[length] == ',');
    }
    return list->n > 0 ? EXIT_GOOD : kit_fail(EXIT_USAGE, "--codecs needs a codec, such as 8/4 or sealed");
}

void codec_apply(const codec_choice *codec, fkv_runner_config *config) {
    config->k = codec->k;
    config->v = codec->v;
    config->rotate = codec->rotate;
}

codec_choice codec_of_runner(const fkv_runner_config *config) {
    codec_choice codec = {.k = config->k, .v = config->v};
    codec.rotate = (fkv_rotate)(((unsigned)config->rotate & rotated_sides(&codec)) | required_rotation(&codec));
    return codec;
}

codec_choice codec_of_file(const fkv_file_info *info) {
    const fkv_layer_config *l = &info->first_layer;
    codec_choice codec = {l->k, l->v, info->rotate};
    if (l->rope_dim != 0) codec.v = l->k;
    if (l->rope_dim != 0 && l->k.kind == FKV_CODEC_SEALED) codec.v.kind = FKV_CODEC_SEALED_V;
    return codec;
}

const char *codec_name(const codec_choice *codec, char name[CODEC_NAME]) {
    fkv_codec_info k = info_of_codec(codec->k);
    fkv_codec_info v = info_of_codec(codec->v);
    uint32_t group = k.group != 0 ? k.group : v.group;
    int n = snprintf(name, CODEC_NAME, "%s/%s", k.name, v.name);
    if (group != 0 && group != 64) n += snprintf(name + n, CODEC_NAME - (size_t)n, "g%u", group);
    if (codec->rotate != (fkv_rotate)rotated_sides(codec))
        snprintf(name + n, CODEC_NAME - (size_t)n, ":%s", codec_rotate_name(codec->rotate));
    return name;
}

void codec_json(const codec_choice *codec, kit_json *json) {
    char name[CODEC_NAME];
    kit_json_text(json, "codec", codec_name(codec, name));
    kit_json_integer(json, "k_bits", codec->k.bits);
    kit_json_integer(json, "v_bits", codec->v.bits);
    kit_json_integer(json, "k_group", info_of_codec(codec->k).group);
    kit_json_integer(json, "v_group", info_of_codec(codec->v).group);
    kit_json_text(json, "rotate", codec_rotate_name(codec->rotate));
}
