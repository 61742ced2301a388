/* The models and engines of flatkv serve, which share one memory plan.
 *
 * All models are loaded first. Then the memory of all engines is planned together. Finally, the memory is reserved. The engines
 * take turns (fkv_engine_config.peer), so their worker threads do not compete for cores.
 */
#ifndef FKV_CLI_SERVE_MODELS_H
#define FKV_CLI_SERVE_MODELS_H

#include "../serve/serve.h"
#include "model_options.h"

/* Options that apply to all engines. */
typedef struct engine_options {
    uint32_t parallel;
    uint32_t queue;
    uint32_t default_new;
    double step_ms;
    double max_wait;
    uint32_t drafts;
    bool embeddings;
    uint32_t embed_tokens; /* 0: not given */
    const char *prefix_dir;
    uint64_t prefix_disk;
    const char *prefix_redis; /* URL, or NULL */
    const char *prefix_password_file;
    const char *prefix_secret_file;
    const char *prefix_ca_file;
    double prefix_timeout_ms;
} engine_options;

/* One model. */
typedef struct model_slot {
    const char *word;      /* value of -m */
    model_options options; /* options given on the command line, adapted to this model */
    const char *name;      /* model name in requests and responses */
    fkv_model *model;
    fkv_engine *engine;
    fkv_runner *embedder;
    fkv_engine_config config;
    fkv_runner_config embed_config;
    uint64_t planned_bytes; /* memory of the engine and of the runner for embeddings, without the weights */
} model_slot;

typedef struct serve_models {
    model_options options; /* options given on the command line, before they are adapted to a model; `model` is ignored */
    engine_options engine;
    model_slot slots[SERVE_MAX_MODELS];
    uint32_t n;
    fkv_prefix_store store;
    fkv_tls_client tls;   /* zeroed unless the store uses TLS */
    uint64_t store_bytes; /* planned memory of the prefix store and of the I/O buffers that the engines use with it */
    uint64_t base_bytes;  /* anonymous process memory before the engines were opened */
} serve_models;

/* Sets the models and their names. words: values of -m; aliases: values of --alias, in the order of the models. Returns an exit
 * code. */
int serve_models_name(serve_models *s, const kit_texts *words, const kit_texts *aliases);

/* Loads the models, plans their memory and opens their engines. Returns an exit code; serve_models_close() must be called in any
 * case. */
int serve_models_open(serve_models *s);

/* Fills in the descriptions of the models that the server needs. subjects: [SERVE_MAX_MODELS] */
void serve_models_subjects(const serve_models *s, serve_subject *subjects);

void serve_models_close(serve_models *s);

#endif
