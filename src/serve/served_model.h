/* The models of a server. The field `model` of a request selects one of them. */
#ifndef FKV_SERVE_SERVED_MODEL_H
#define FKV_SERVE_SERVED_MODEL_H

#include "grammar.h"
#include "metrics.h"
#include "serve.h"

#include <jansson.h>
#include <pthread.h>

typedef struct served_model {
    const fkv_model *model;
    fkv_engine *engine;
    const char *name;
    uint32_t parallel;           /* number of sequences that are decoded concurrently */
    uint32_t max_request_tokens; /* maximum number of prompt tokens plus new tokens of one request */
    size_t max_prompt_bytes;     /* size, in bytes, above which a prompt always has more than max_request_tokens tokens */
    grammar_maker *grammars;
    metric_latencies latencies; /* used by the event-loop thread only */
    uint32_t embed_tokens;      /* maximum number of tokens in an embedded text */
    fkv_runner *embedder;       /* embedding runner, protected by embed_lock; NULL if the model does not compute embeddings */
    pthread_mutex_t embed_lock;
} served_model;

/* Initializes a model and its vocabulary index. Returns false if out of memory; served_model_close() may be called in both
 * cases. */
bool served_model_open(const serve_subject *subject, served_model *m);
void served_model_close(served_model *m);

/* Returns the model with this name, NAME.gguf or NAME:latest. Returns NULL if there is none. */
served_model *served_model_find(served_model *models, uint32_t n_models, const char *name);

/* Returns the model that a request selects with the JSON value `name`. A server with one model ignores the name, and a request
 * without a name selects the first model. If there is no such model, returns NULL and writes a message to error: [n_error]. */
served_model *served_model_choose(served_model *models, uint32_t n_models, const json_t *name, char *error, size_t n_error);

#endif
