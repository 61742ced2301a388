/* Parser for --codecs. A codec is a name for fkv_codec_parse(), such as "sealed" or "8/4". An optional suffix (":none", ":k",
 * ":v" or ":kv"), as in "4/4g32:none", selects whether keys (k) and values (v) are rotated. Commands that compare codecs accept a
 * list, such as "16/16,8/4,sealed"; all other commands accept one codec. */
#ifndef FKV_CLI_CODEC_LIST_H
#define FKV_CLI_CODEC_LIST_H

#include "cli.h"

#include <flatkv/model.h>

enum { MAX_CODECS = 32, CODEC_NAME = 40 };

typedef struct codec_choice {
    fkv_codec_config k;
    fkv_codec_config v;
    fkv_rotate rotate; /* effective rotation; excludes keys or values whose codec does not support rotation */
} codec_choice;

typedef struct codec_list {
    codec_choice codecs[MAX_CODECS];
    uint32_t n;
    bool named; /* true if the user chose the codec, false if it is the command's default */
} codec_list;

/* Parses a comma-separated list of up to `most` codecs. On entry, *list contains the command's default codec, which remains
 * unchanged if names is NULL. Returns an exit code. */
int codec_list_parse(const char *names, uint32_t most, codec_list *list);

void codec_apply(const codec_choice *codec, fkv_runner_config *config);
codec_choice codec_of_runner(const fkv_runner_config *config);

/* Returns the codec of a page file. A latent layer has no V codec, so the V codec that matches its K codec is returned. */
codec_choice codec_of_file(const fkv_file_info *info);

/* Writes the codec in the syntax of --codecs: "8/4", "s4/s4", "4/4g32", "8/4:none". Returns `name`. */
const char *codec_name(const codec_choice *codec, char name[CODEC_NAME]);

const char *codec_rotate_name(fkv_rotate rotate);

void codec_json(const codec_choice *codec, kit_json *json);

#endif
