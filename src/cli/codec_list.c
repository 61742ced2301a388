/* See codec_list.h. */
#include "codec_list.h"

#include <string.h>

static const char *const ROTATE_NAMES[] = {"none", "k", "v", "kv"};

const char *codec_rotate_name(fkv_rotate rotate) { return ROTATE_NAMES[rotate & 3]; }

static fkv_codec_info about(fkv_codec_config config) {
    fkv_codec_info info = {.name = "?"};
    (void)fkv_codec_about(config, &info);
    return info;
}

/* The sides whose codecs gain by a rotation, and those that cannot do without. */
static unsigned rotated_sides(const codec_choice *c) {
    return (about(c->k).rotates ? FKV_ROTATE_K : 0u) | (about(c->v).rotates ? FKV_ROTATE_V : 0u);
}

static unsigned sides_in_need(const codec_choice *c) {
    return (about(c->k).needs_rotation ? FKV_ROTATE_K : 0u) | (about(c->v).needs_rotation ? FKV_ROTATE_V : 0u);
}

/* The word behind the colon. */
static int parse_rotation(const char *word, const char *rest, codec_choice *codec) {
    unsigned asked = 0;
    while (asked < 4 && strcmp(rest, ROTATE_NAMES[asked]) != 0) asked++;
    if (asked == 4)
        return kit_fail(EXIT_USAGE, "--codecs %s: behind the colon stand the sides to rotate: none, k, v or kv", word);
    if ((sides_in_need(codec) & ~asked) != 0)
        return kit_fail(EXIT_USAGE, "--codecs %s: %s is made for rotated rows: leave the colon out", word,
                        (sides_in_need(codec) & ~asked & FKV_ROTATE_K) != 0 ? about(codec->k).name : about(codec->v).name);
    codec->rotate = (fkv_rotate)(asked & rotated_sides(codec));
    return EXIT_GOOD;
}

static int parse_one(const char *word, codec_choice *codec) {
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
        if (list->n == most && most == 1) return kit_fail(EXIT_USAGE, "--codecs %s: one is enough here", names);
        if (list->n == most) return kit_fail(EXIT_USAGE, "--codecs %s: at most %u codecs", names, most);
        snprintf(word, sizeof word, "%.*s", length < sizeof word ? (int)length : (int)sizeof word, at);
        list->codecs[list->n] = usual; /* its groups, where none are named */
        int code = parse_one(word, &list->codecs[list->n++]);
        if (code != EXIT_GOOD) return code;
        at += length + (at[length] == ',');
    }
    return list->n > 0 ? EXIT_GOOD : kit_fail(EXIT_USAGE, "--codecs: a name is needed, as 8/4 or sealed");
}

void codec_apply(const codec_choice *codec, fkv_runner_config *config) {
    config->k = codec->k;
    config->v = codec->v;
    config->rotate = codec->rotate;
}

codec_choice codec_of_runner(const fkv_runner_config *config) {
    codec_choice codec = {.k = config->k, .v = config->v};
    codec.rotate = (fkv_rotate)(((unsigned)config->rotate & rotated_sides(&codec)) | sides_in_need(&codec));
    return codec;
}

const char *codec_name(const codec_choice *codec, char name[CODEC_NAME]) {
    fkv_codec_info k = about(codec->k);
    fkv_codec_info v = about(codec->v);
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
    kit_json_integer(json, "k_group", about(codec->k).group);
    kit_json_integer(json, "v_group", about(codec->v).group);
    kit_json_text(json, "rotate", codec_rotate_name(codec->rotate));
}
