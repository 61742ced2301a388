/* Serves POST /v1/embeddings and Ollama's /api/embed and /api/embeddings. Worker threads compute the embeddings, one text at a
 * time.
 *
 * A request has at most MAX_INPUTS texts. All requests share the embedding runner of the model, which a mutex protects. Requests
 * are submitted to the worker pool as large jobs, so they never occupy all worker threads. If the client disconnects, the
 * remaining texts are skipped.
 */
#include "prepare.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_INPUTS = 2048 };

typedef struct embedding_job {
    exchange *x;
    json_t *root;
    uint32_t n_dims;
    bool as_base64;
    bool truncates; /* true to truncate a text that is too long instead of rejecting it (Ollama) */
    float *values;  /* [n_dims] */
    json_t *data;   /* list of finished embeddings */
    size_t n_tokens;
} embedding_job;

static bool fail(exchange *x, int status, const char *param, const char *format, ...) __attribute__((format(printf, 4, 5)));

static bool fail(exchange *x, int status, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    x->error.status = status;
    (void)snprintf(x->error.param, sizeof x->error.param, "%s", param != NULL ? param : "");
    (void)vsnprintf(x->error.message, sizeof x->error.message, format, args);
    va_end(args);
    return false;
}

/* ---- request ---- */

static bool read_options(embedding_job *job) {
    const uint32_t dim = fkv_model_about(job->x->m->model)->dim;
    const json_t *dimensions = json_object_get(job->root, "dimensions");
    const json_t *format = json_object_get(job->root, "encoding_format");
    job->n_dims = dim;
    if (dimensions != NULL && !json_is_null(dimensions)) {
        const json_int_t n = json_integer_value(dimensions);
        if (!json_is_integer(dimensions) || n < 1 || n > (json_int_t)dim)
            return fail(job->x, 400, "dimensions", "dimensions: expected an integer from 1 to %u", dim);
        job->n_dims = (uint32_t)n;
    }
    if (format != NULL && !json_is_null(format)) {
        const char *name = json_string_value(format);
        job->as_base64 = name != NULL && strcmp(name, "base64") == 0;
        if (!job->as_base64 && (name == NULL || strcmp(name, "float") != 0))
            return fail(job->x, 400, "encoding_format", "encoding_format: expected \"float\" or \"base64\"");
    }
    return true;
}

/* Copies a list of token numbers. */
static bool read_token_numbers(embedding_job *job, const json_t *list, prompt_tokens *tokens) {
    const size_t n = json_array_size(list);
    const json_int_t n_vocab = (json_int_t)fkv_model_about(job->x->m->model)->n_vocab;
    tokens->tokens = malloc((n + 1) * sizeof *tokens->tokens);
    if (tokens->tokens == NULL) return fail(job->x, 503, NULL, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *number = json_array_get(list, i);
        if (!json_is_integer(number) || json_integer_value(number) < 0 || json_integer_value(number) >= n_vocab)
            return fail(job->x, 400, "input", "input: expected token numbers from the vocabulary of this model");
        tokens->tokens[i] = (uint32_t)json_integer_value(number);
    }
    tokens->n = n;
    return true;
}

static bool read_input(embedding_job *job, const json_t *input, prompt_tokens *tokens) {
    exchange *x = job->x;
    const unsigned flags = FKV_TOKENIZE_BOS | FKV_TOKENIZE_EOS;
    if (json_is_array(input)) {
        if (!read_token_numbers(job, input, tokens)) return false;
    } else if (!json_is_string(input)) {
        return fail(x, 400, "input", "input: expected a string, a list of strings, or lists of token numbers");
    } else if (json_string_length(input) == 0) {
        return fail(x, 400, "input", "input: a text is empty");
    } else if (prompt_tokens_of_text(x->m->model, json_string_value(input), json_string_length(input), flags, tokens) != FKV_OK) {
        return fail(x, 400, "input", "%s", fkv_message());
    }
    const uint32_t most = x->m->embed_tokens;
    if (job->truncates && tokens->n > most) {
        tokens->tokens[most - 1] = tokens->tokens[tokens->n - 1]; /* the embedding is the hidden state of the last token */
        tokens->n = most;
    }
    if (tokens->n == 0 || tokens->n > x->m->embed_tokens)
        return fail(x, 400, "input", "input: a text has %zu tokens; expected 1 to %u tokens", tokens->n, x->m->embed_tokens);
    return true;
}

/* ---- response ---- */

/* Encodes the values as little-endian 32-bit floats in base64. */
static json_t *base64_text(const float *values, uint32_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t n_bytes = (size_t)n * 4;
    char *text = malloc((n_bytes + 2) / 3 * 4 + 1);
    if (text == NULL) return NULL;
    size_t out = 0;
    for (size_t at = 0; at < n_bytes; at += 3) {
        uint32_t group = 0;
        for (size_t i = at; i < at + 3; i++) {
            uint32_t bits = 0;
            if (i < n_bytes) memcpy(&bits, &values[i / 4], sizeof bits);
            group = group << 8 | (i < n_bytes ? bits >> i % 4 * 8 & 255 : 0);
        }
        for (size_t i = 0; i < 4; i++) text[out++] = at + i > n_bytes ? '=' : digits[group >> (18 - 6 * i) & 63];
    }
    text[out] = 0;
    json_t *string = json_stringn(text, out);
    free(text);
    return string;
}

static json_t *embedding_json(const embedding_job *job) {
    if (job->as_base64) return base64_text(job->values, job->n_dims);
    json_t *list = json_array();
    for (uint32_t i = 0; i < job->n_dims; i++) (void)json_array_append_new(list, json_real((double)job->values[i]));
    return list;
}

static bool embed_input(embedding_job *job, const json_t *input, size_t index) {
    served_model *m = job->x->m;
    prompt_tokens tokens = {0};
    bool good = read_input(job, input, &tokens);
    if (good) {
        (void)pthread_mutex_lock(&m->embed_lock);
        const fkv_status status = fkv_embed(m->embedder, tokens.tokens, (uint32_t)tokens.n, job->n_dims, job->values);
        if (status != FKV_OK) good = fail(job->x, 500, NULL, "%s", fkv_message());
        (void)pthread_mutex_unlock(&m->embed_lock);
    }
    job->n_tokens += tokens.n;
    prompt_tokens_free(&tokens);
    if (!good) return false;
    json_t *entry =
        json_pack("{s:s, s:I, s:o}", "object", "embedding", "index", (json_int_t)index, "embedding", embedding_json(job));
    return json_array_append_new(job->data, entry) == 0 || fail(job->x, 503, NULL, "out of memory");
}

/* Embeds all inputs: one text, one list of token numbers, or a list of either. */
static bool embed_inputs(embedding_job *job) {
    const json_t *input = json_object_get(job->root, "input");
    const json_t *first = json_array_get(input, 0);
    if (!json_is_array(input) || json_is_integer(first)) return embed_input(job, input, 0);
    const size_t n = json_array_size(input);
    if (n == 0 || n > MAX_INPUTS) return fail(job->x, 400, "input", "input: expected 1 to %d texts", MAX_INPUTS);
    for (size_t i = 0; i < n; i++) {
        if (atomic_load_explicit(&job->x->abandoned, memory_order_relaxed)) return false;
        if (!embed_input(job, json_array_get(input, i), i)) return false;
    }
    return true;
}

static void finish_reply(const embedding_job *job) {
    exchange *x = job->x;
    const json_int_t n = (json_int_t)job->n_tokens;
    json_t *reply = json_pack("{s:s, s:O, s:s, s:{s:I, s:I}}", "object", "list", "data", job->data, "model", x->m->name, "usage",
                              "prompt_tokens", n, "total_tokens", n);
    x->text = reply != NULL ? json_dumps(reply, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(reply);
    if (x->text == NULL) (void)fail(x, 503, NULL, "out of memory");
}

/* Allocates the buffers and embeds all inputs of a request whose options were already validated. */
static bool run_job(embedding_job *job) {
    job->values = malloc(job->n_dims * sizeof *job->values);
    job->data = json_array();
    if (job->values == NULL || job->data == NULL) return fail(job->x, 503, NULL, "out of memory");
    return embed_inputs(job);
}

static void free_job(embedding_job *job) {
    free(job->values);
    json_decref(job->data);
    json_decref(job->root);
}

/* Parses the body. Returns false and sets x->error if the body is invalid or the model does not compute embeddings. */
static bool open_job(embedding_job *job) {
    job->root = prepare_json(job->x);
    if (job->root == NULL) return false;
    if (job->x->m->embedder != NULL) return true;
    return fail(job->x, 501, NULL, "this server does not compute embeddings: start it with --embeddings");
}

void prepare_embeddings(exchange *x) {
    embedding_job job = {.x = x};
    if (open_job(&job) && read_options(&job) && run_job(&job)) finish_reply(&job);
    free_job(&job);
}

/* ---- Ollama ---- */

static void finish_ollama_reply(const embedding_job *job, bool single) {
    exchange *x = job->x;
    size_t i;
    const json_t *entry;
    json_t *list = json_array();
    json_array_foreach(job->data, i, entry)(void) json_array_append(list, json_object_get(entry, "embedding"));
    const json_int_t nanoseconds = (json_int_t)((exchange_now() - x->arrived_at) * 1e9);
    json_t *reply = single
                        ? json_pack("{s:O?}", "embedding", json_array_get(list, 0))
                        : json_pack("{s:s, s:O, s:I, s:I, s:I}", "model", x->m->name, "embeddings", list, "total_duration",
                                    nanoseconds, "load_duration", (json_int_t)0, "prompt_eval_count", (json_int_t)job->n_tokens);
    json_decref(list);
    x->text = reply != NULL ? json_dumps(reply, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(reply);
    if (x->text == NULL) (void)fail(x, 503, NULL, "out of memory");
}

/* single: true for the older endpoint /api/embeddings, which takes one text in the field `prompt`. */
static void prepare_ollama(exchange *x, bool single) {
    embedding_job job = {.x = x};
    bool good = open_job(&job);
    if (good && single) good = json_object_set(job.root, "input", json_object_get(job.root, "prompt")) == 0;
    if (!good && x->error.status == 0) (void)fail(x, 400, "prompt", "prompt: expected a string");
    const json_t *truncate = json_object_get(job.root, "truncate");
    if (good && truncate != NULL && !json_is_boolean(truncate))
        good = fail(x, 400, "truncate", "truncate: expected true or false");
    job.truncates = truncate == NULL || json_is_true(truncate);
    (void)json_object_del(job.root, "encoding_format"); /* encoding_format is not part of Ollama's API */
    if (good && read_options(&job) && run_job(&job)) finish_ollama_reply(&job, single);
    free_job(&job);
}

void prepare_ollama_embed(exchange *x) { prepare_ollama(x, false); }
void prepare_ollama_embeddings(exchange *x) { prepare_ollama(x, true); }
