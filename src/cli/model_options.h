/* The options that every command with a model takes, and what they make: a model, the configuration of its runners.
 */
#ifndef FKV_CLI_MODEL_OPTIONS_H
#define FKV_CLI_MODEL_OPTIONS_H

#include "codec_list.h"

typedef struct model_options {
    const char *model;       /* as -m names it; NULL: it does not, and it must */
    int device;              /* a fkv_backend */
    uint32_t context;        /* 0: not said */
    const char *codec_names; /* as --codecs lists them */
    bool compares;           /* --codecs may name several */
    codec_list codecs;       /* them; where the command does not compare, one. Before they are parsed the usual one */
    char codecs_help[640];
    const char *calibration; /* NULL: the one beside the model */
    uint32_t max_kv;
    uint32_t n_sinks;
    uint32_t chunk;
    uint32_t n_threads;
    uint64_t memory;
    uint64_t seed;
    bool lazy;
    bool json;
} model_options;

enum { N_MODEL_OPTIONS = 14 };

model_options model_options_default(void);

/* Their table, for model_options_parse(). `compares`, another usual codec, and a model of NULL where one must
 * be named, are set before. */
void model_options_list(model_options *o, kit_option list[N_MODEL_OPTIONS]);

/* Takes one out of it that a command has no use for: --help does not list what does nothing. */
void model_options_drop(kit_option list[N_MODEL_OPTIONS], const char *name);

/* kit_options_parse() for tables with these options in them, and what their values say. */
bool model_options_parse(model_options *o, const char *usage, const kit_option *const *tables, int argc, char **argv, int *code);

/* Returns an exit code, with a message on failure. */
int model_options_load(const model_options *o, bool plan_only, fkv_model **model);

/* Says in a line of standard error where a model cannot chat, and why: no template, or one that is not understood. */
void model_say_chat(const fkv_model *model);

/* For one sequence of max_tokens tokens, with the first codec. */
fkv_runner_config model_options_runner(const model_options *o, uint32_t max_tokens);

const char *model_device_name(const model_options *o);

/* What a result belongs to: version, model, architecture, device; the codec, unless named ones are compared. */
void model_options_json(const model_options *o, const fkv_model_info *about, kit_json *json);

#endif
