/* See served_model.h. */
#include "served_model.h"

#include <stdio.h>
#include <string.h>

enum { NORMALIZED_RATIO = 4 }; /* assumed upper bound on the ratio of text length to normalized text length */

/* Returns an upper bound on the size, in bytes, of a prompt that fits into the context. The bound assumes that every token is the
 * longest token of the vocabulary. NORMALIZED_RATIO accounts for tokenizers whose normalization shortens the text. */
static size_t prompt_byte_limit(const fkv_model *model, uint32_t max_request_tokens) {
    size_t longest = 1;
    for (uint32_t i = 0; i < fkv_model_about(model)->n_vocab; i++) {
        size_t n = 0;
        (void)fkv_token_text(model, i, true, &n);
        if (n > longest) longest = n;
    }
    return NORMALIZED_RATIO * longest * max_request_tokens;
}

bool served_model_open(const serve_subject *subject, served_model *m) {
    fkv_engine_stats stats;
    fkv_engine_stats_now(subject->engine, &stats);
    *m = (served_model){.model = subject->model,
                        .engine = subject->engine,
                        .name = subject->model_name,
                        .parallel = subject->parallel,
                        .max_request_tokens = stats.max_request_tokens,
                        .max_prompt_bytes = prompt_byte_limit(subject->model, stats.max_request_tokens),
                        .grammars = grammar_maker_open(subject->model),
                        .embed_tokens = subject->embed_tokens,
                        .embedder = subject->embedder};
    (void)pthread_mutex_init(&m->embed_lock, NULL);
    return m->grammars != NULL;
}

void served_model_close(served_model *m) {
    grammar_maker_close(m->grammars);
    (void)pthread_mutex_destroy(&m->embed_lock);
}

/* Returns whether a request means the model `name`. The suffix .gguf of a file name may be omitted, and Ollama's clients append
 * ":latest". */
static bool means_model(const char *word, const char *name) {
    static const char suffix[] = ".gguf";
    size_t n = strlen(name);
    if (strncmp(word, name, n) != 0) {
        if (n <= strlen(suffix) || strcmp(name + n - strlen(suffix), suffix) != 0) return false;
        n -= strlen(suffix);
        if (strncmp(word, name, n) != 0) return false;
    }
    return word[n] == 0 || strcmp(word + n, ":latest") == 0;
}

served_model *served_model_find(served_model *models, uint32_t n_models, const char *name) {
    for (uint32_t i = 0; i < n_models; i++)
        if (means_model(name, models[i].name)) return &models[i];
    return NULL;
}

served_model *served_model_choose(served_model *models, uint32_t n_models, const json_t *name, char *error, size_t n_error) {
    if (n_models == 1 || name == NULL || json_is_null(name)) return &models[0];
    if (!json_is_string(name)) return (void)snprintf(error, n_error, "model: expected a string"), NULL;
    served_model *found = served_model_find(models, n_models, json_string_value(name));
    if (found != NULL) return found;
    size_t used = (size_t)snprintf(error, n_error, "model \"%.80s\" not found: this server has", json_string_value(name));
    for (uint32_t i = 0; i < n_models && used < n_error; i++)
        used += (size_t)snprintf(error + used, n_error - used, "%s %s", i == 0 ? "" : ",", models[i].name);
    return NULL;
}
