/* How keys and values are stored, as --codecs says it: "sealed", "8/4", "4/4g32:none" are names as fkv_codec_parse() reads them,
 * with the sides that are rotated behind a colon where they are not those that the codecs want. Commands that compare take a
 * list, "16/16,8/4,sealed"; the others one.
 */
#ifndef FKV_CLI_CODEC_LIST_H
#define FKV_CLI_CODEC_LIST_H

#include "cli.h"

#include <flatkv/model.h>

enum { MAX_CODECS = 32, CODEC_NAME = 40 };

typedef struct codec_choice {
    fkv_codec_config k;
    fkv_codec_config v;
    fkv_rotate rotate; /* what a runner makes of it: no side that its codec does not rotate */
} codec_choice;

typedef struct codec_list {
    codec_choice codecs[MAX_CODECS];
    uint32_t n;
    bool named; /* by the user; else it is the usual one */
} codec_list;

/* names: at most `most` of them, or NULL: *list stays. It has the command's usual codec. Returns an exit code, with a message on
 * failure. */
int codec_list_parse(const char *names, uint32_t most, codec_list *list);

void codec_apply(const codec_choice *codec, fkv_runner_config *config);
codec_choice codec_of_runner(const fkv_runner_config *config);

/* What --codecs would take: "8/4", "s4/s4", "4/4g32", "8/4:none". */
const char *codec_name(const codec_choice *codec, char name[CODEC_NAME]);

const char *codec_rotate_name(fkv_rotate rotate);

void codec_json(const codec_choice *codec, kit_json *json);

#endif
