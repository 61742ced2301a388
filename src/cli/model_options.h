/* Options common to all commands that run a model. Loads the model and makes the runner configuration that these options specify.
 */
#ifndef FKV_CLI_MODEL_OPTIONS_H
#define FKV_CLI_MODEL_OPTIONS_H

#include "codec_list.h"

typedef struct model_options {
    const char *model;       /* value of -m; NULL if the command requires -m and it was not given */
    int device;              /* fkv_backend */
    uint32_t context;        /* 0: not given */
    const char *codec_names; /* value of --codecs */
    bool compares;           /* true if --codecs accepts a list */
    codec_list codecs;       /* parsed codecs; contains the default codec before parsing */
    char codecs_help[640];
    const char *calibration; /* value of --calibration; if NULL, the calibration file next to the model is used */
    uint32_t max_kv;
    uint32_t n_sinks;
    uint32_t snapshots;
    uint32_t chunk;
    uint32_t n_threads;
    uint64_t memory;
    uint64_t seed;
    bool lazy;
    bool json;
} model_options;

enum { N_MODEL_OPTIONS = 17 }; /* number of entries in the option table, including headings and the terminator */

model_options model_options_default(void);

/* Writes the option table. Before the call, the command sets `compares` and its default codec, and sets model to NULL if -m is
 * required. */
void model_options_list(model_options *o, kit_option list[N_MODEL_OPTIONS]);

/* Removes an option that has no effect in the calling command. */
void model_options_drop(kit_option list[N_MODEL_OPTIONS], const char *name);

/* Makes -m repeatable: its values are stored in `models` instead of model_options.model. */
void model_options_repeat(kit_option list[N_MODEL_OPTIONS], kit_texts *models);

/* Calls kit_options_parse(), then parses the value of --codecs and checks that the codec supports --calibration. */
bool model_options_parse(model_options *o, const char *usage, const kit_option *const *tables, int argc, char **argv, int *code);

/* Replaces the command's default codec with an 8-bit codec if the model has latent attention: fewer bits have not been tested
 * with a trained model of this kind. */
void model_options_adapt(model_options *o, const fkv_model *model);

/* Loads the model, without its weights if plan_only is set, and calls model_options_adapt(). Returns an exit code. */
int model_options_load(model_options *o, bool plan_only, fkv_model **model);

/* If the chat template is missing or unsupported, prints the reason to standard error, prefixed with `name` unless it is "". */
void model_report_chat(const char *name, const fkv_model *model);

/* Returns the configuration for one sequence of max_tokens tokens with the first codec. */
fkv_runner_config model_options_runner(const model_options *o, uint32_t max_tokens);

const char *model_device_name(const model_options *o);

/* Writes the JSON fields that describe a run: version, model, architecture, device and, unless codecs are compared, the codec. */
void model_options_json(const model_options *o, const fkv_model_info *about, kit_json *json);

#endif
