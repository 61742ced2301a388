/* The options that every command with a model takes, and what they make: a model, the configuration of its runners.
 */
#ifndef FKV_CLI_MODEL_OPTIONS_H
#define FKV_CLI_MODEL_OPTIONS_H

#include "cli.h"

#include <flatkv/model.h>

typedef struct model_options {
    const char *model; /* as -m names it */
    int device;        /* a fkv_backend */
    uint32_t context;  /* 0: not said */
    uint32_t k_bits;
    uint32_t v_bits;
    uint32_t k_group;
    uint32_t v_group;
    int rotate; /* a fkv_rotate */
    uint32_t max_kv;
    uint32_t n_sinks;
    uint32_t chunk;
    uint32_t n_threads;
    uint64_t memory;
    uint64_t seed;
    bool lazy;
    bool json;
} model_options;

enum { N_MODEL_OPTIONS = 17 };

model_options model_options_default(void);

/* Their table, for kit_options_parse(). */
void model_options_list(model_options *o, kit_option list[N_MODEL_OPTIONS]);

/* Returns an exit code, with a message on failure. */
int model_options_load(const model_options *o, bool plan_only, fkv_model **model);

/* For one sequence of max_tokens tokens. */
fkv_runner_config model_options_runner(const model_options *o, uint32_t max_tokens);

const char *model_device_name(const model_options *o);
const char *model_rotate_name(fkv_rotate rotate);

/* What a result belongs to: version, model, architecture, device, codec. */
void model_options_json(const model_options *o, const fkv_model_info *about, kit_json *json);

#endif
