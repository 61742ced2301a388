/* Several codecs on a command line: "16/16,8/4,4/4:kv,4/4g32" are names as fkv_codec_parse() reads them, an optional rotation
 * after a colon.
 */
#ifndef FKV_CLI_CODEC_LIST_H
#define FKV_CLI_CODEC_LIST_H

#include "model_options.h"

enum { MAX_CODECS = 32 };

typedef struct codec_choice {
    fkv_codec_config k;
    fkv_codec_config v;
    fkv_rotate rotate;
} codec_choice;

typedef struct codec_list {
    codec_choice codecs[MAX_CODECS];
    uint32_t n;
    bool many; /* a list was given: results are an array */
} codec_list;

/* The codec of the common options where `words` is NULL. Groups that are not named are those of the options. Returns an exit
 * code, with a message on failure. */
int codec_list_parse(const model_options *o, const char *words, codec_list *list);

void codec_apply(const codec_choice *codec, fkv_runner_config *config);

/* "K8/V4", "K4/V4 kv", "K4/V4 g32" */
const char *codec_text(const codec_choice *codec, char text[32]);

void codec_json(const codec_choice *codec, kit_json *json);

#endif
