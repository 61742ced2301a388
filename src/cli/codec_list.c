/* See codec_list.h. */
#include "codec_list.h"

#include <string.h>

static bool parse_one(const char *word, codec_choice *codec) {
    char sides[32];
    size_t length = strcspn(word, ":");
    snprintf(sides, sizeof sides, "%.*s", (int)length, word);
    if (fkv_codec_parse(sides, &codec->k, &codec->v) != FKV_OK) return false;
    const char *rest = word + length;
    if (*rest == 0) return true;
    static const char *const names[] = {":none", ":k", ":v", ":kv"};
    for (unsigned i = 0; i < 4; i++) {
        if (strcmp(rest, names[i]) != 0) continue;
        codec->rotate = (fkv_rotate)i;
        return true;
    }
    return false;
}

int codec_list_parse(const model_options *o, const char *words, codec_list *list) {
    codec_choice own = {{o->k_bits, o->k_group}, {o->v_bits, o->v_group}, (fkv_rotate)o->rotate};
    *list = (codec_list){.many = words != NULL};
    if (words == NULL) {
        list->codecs[list->n++] = own;
        return EXIT_GOOD;
    }
    own.rotate = FKV_ROTATE_NONE;
    for (const char *at = words; *at != 0;) {
        char word[32];
        size_t length = strcspn(at, ",");
        if (list->n == MAX_CODECS) return kit_fail(EXIT_USAGE, "--codecs %s: at most %d codecs", words, MAX_CODECS);
        list->codecs[list->n] = own;
        snprintf(word, sizeof word, "%.*s", length < sizeof word ? (int)length : (int)sizeof word, at);
        if (!parse_one(word, &list->codecs[list->n++]))
            return kit_fail(EXIT_USAGE, "--codecs: \"%s\" is not a codec; examples: 8/4, 4/4:kv, 4/4g32:kv", word);
        at += length + (at[length] == ',');
    }
    return list->n > 0 ? EXIT_GOOD : kit_fail(EXIT_USAGE, "--codecs: at least one is needed");
}

void codec_apply(const codec_choice *codec, fkv_runner_config *config) {
    config->k = codec->k;
    config->v = codec->v;
    config->rotate = codec->rotate;
}

const char *codec_text(const codec_choice *codec, char text[32]) {
    fkv_codec_info k = {.name = "?"};
    fkv_codec_info v = {.name = "?"};
    (void)fkv_codec_about(codec->k, &k);
    (void)fkv_codec_about(codec->v, &v);
    int n = snprintf(text, 32, "K%s/V%s", k.name, v.name);
    if ((k.group != 0 && k.group != 64) || (v.group != 0 && v.group != 64))
        n += snprintf(text + n, 32 - (size_t)n, " g%u", k.group != 0 ? k.group : v.group);
    if (codec->rotate != FKV_ROTATE_NONE) snprintf(text + n, 32 - (size_t)n, " %s", model_rotate_name(codec->rotate));
    return text;
}

void codec_json(const codec_choice *codec, kit_json *json) {
    kit_json_integer(json, "k_bits", codec->k.bits);
    kit_json_integer(json, "v_bits", codec->v.bits);
    kit_json_integer(json, "k_group", codec->k.group);
    kit_json_integer(json, "v_group", codec->v.group);
    kit_json_text(json, "rotate", model_rotate_name(codec->rotate));
}
