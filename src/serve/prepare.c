/* See prepare.h. */
#include "prepare.h"

#include "answer_rules.h"
#include "ollama_info.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(exchange *x, int status, const char *param, const char *format, ...) __attribute__((format(printf, 4, 5)));

static void fail(exchange *x, int status, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    x->error.status = status;
    (void)snprintf(x->error.param, sizeof x->error.param, "%s", param != NULL ? param : "");
    (void)vsnprintf(x->error.message, sizeof x->error.message, format, args);
    va_end(args);
}

/* Serializes the response and releases the reference to it. */
static void succeed(exchange *x, json_t *reply) {
    x->text = reply != NULL ? json_dumps(reply, JSON_COMPACT) : NULL;
    json_decref(reply);
    if (x->text == NULL) fail(x, 503, NULL, "out of memory");
}

static const char *body_bytes(exchange *x, size_t *n) {
    *n = evbuffer_get_length(x->body);
    const char *bytes = *n > 0 ? (const char *)evbuffer_pullup(x->body, -1) : "";
    if (bytes == NULL) *n = 0;
    return bytes != NULL ? bytes : "";
}

static bool was_abandoned(exchange *x) { return atomic_load_explicit(&x->abandoned, memory_order_relaxed); }

json_t *prepare_json(exchange *x) {
    char error[sizeof x->error.message];
    size_t n = 0;
    const char *bytes = body_bytes(x, &n);
    json_t *root = api_json(bytes, n, error, sizeof error);
    if (root == NULL) return fail(x, 400, NULL, "%s", error), NULL;
    const json_t *name = json_object_get(root, "model");
    served_model *m = served_model_choose(x->s->models, x->s->n_models, name, error, sizeof error);
    if (m == NULL) {
        fail(x, name != NULL && !json_is_string(name) ? 400 : 404, "model", "%s", error);
        json_decref(root);
        return NULL;
    }
    x->m = m;
    return root;
}

/* ---- generation ---- */

/* Limits max_tokens to the remaining context. The Messages API requires max_tokens, and clients often send a value intended for
 * models with a larger context. Ollama also ends an answer when the context is full. */
static void fit_answer(exchange *x) {
    const uint32_t most = x->m->max_request_tokens;
    const size_t n_prompt = x->jobs[0].prompt.n;
    if (n_prompt < most && x->api.max_new > most - n_prompt) x->api.max_new = (uint32_t)(most - n_prompt);
}

/* Compiles the grammar of a constrained request. */
static bool make_rules(exchange *x) {
    const char *param = NULL;
    char why[GRAMMAR_ERROR_BYTES] = "";
    if (!answer_rules_wanted(&x->api, &param)) return true;
    x->rules = answer_rules_open(x->m->grammars, x->m->model, &x->api, x->jobs[0].prompt.tokens, x->jobs[0].prompt.n, why);
    if (x->rules == NULL) fail(x, 400, param, "%s: %s", param, why);
    return x->rules != NULL;
}

/* Returns a copy of the prompt text, which precedes each answer if the client requested `echo`. */
static struct evbuffer *prompt_echo(const exchange *x, uint32_t index) {
    struct evbuffer *text = evbuffer_new();
    const json_t *prompt = x->api.prompts[index];
    const prompt_tokens *tokens = &x->jobs[index].prompt;
    if (text != NULL && json_is_string(prompt)) (void)evbuffer_add(text, json_string_value(prompt), json_string_length(prompt));
    for (size_t i = 0; text != NULL && !json_is_string(prompt) && i < tokens->n; i++) {
        size_t n = 0;
        const char *bytes = fkv_token_text(x->m->model, tokens->tokens[i], true, &n);
        (void)evbuffer_add(text, bytes, n);
    }
    return text;
}

static bool tokenize_prompt(exchange *x, uint32_t index) {
    const char *param = x->api.conversation == NULL ? "prompt" : "messages";
    prompt_tokens *prompt = &x->jobs[index].prompt;
    fkv_status status = prompt_tokens_of(x->m->model, &x->api, index, x->m->max_prompt_bytes, prompt);
    if (status == FKV_POOL_FULL)
        fail(x, 400, param, "the prompt is %zu bytes long, but a request is limited to %u tokens, which have at most %zu bytes",
             prompt->n_bytes, x->m->max_request_tokens, x->m->max_prompt_bytes);
    else if (status == FKV_UNSUPPORTED && x->api.suffix != NULL)
        fail(x, 400, "suffix", "suffix: the model has no fill-in-the-middle tokens, or the prompt is not a string");
    else if (status != FKV_OK)
        fail(x, status == FKV_NO_MEMORY ? 503 : 400, param, "%s", status == FKV_NO_MEMORY ? "out of memory" : fkv_message());
    else if (prompt->n == 0)
        fail(x, 400, "prompt", "the prompt is empty");
    else if (prompt->n > UINT32_MAX)
        fail(x, 400, param, "the prompt has %zu tokens; at most 2^32 - 1 are supported", prompt->n);
    else if (x->api.echo && prompt->n <= x->m->max_request_tokens) /* the engine rejects longer prompts */
        x->jobs[index].echo = prompt_echo(x, index);
    return x->error.status == 0;
}

/* Tokenizes all prompts and creates their jobs. */
static bool tokenize_prompts(exchange *x) {
    x->jobs = calloc(x->api.n_prompts, sizeof x->jobs[0]);
    if (x->jobs == NULL) {
        fail(x, 503, NULL, "out of memory");
        return false;
    }
    x->n_jobs = x->api.n_prompts;
    for (uint32_t i = 0; i < x->n_jobs; i++) {
        x->jobs[i].x = x;
        if (was_abandoned(x) || !tokenize_prompt(x, i)) return false;
    }
    return true;
}

static void prepare_generation(exchange *x, api_kind kind) {
    json_t *root = prepare_json(x);
    (void)evbuffer_drain(x->body, evbuffer_get_length(x->body));
    if (root == NULL) return;
    fkv_sampler_config defaults = fkv_model_sampling(x->m->model, NULL);
    defaults.seed = x->seed;
    if (!api_request_read(kind, root, &defaults, &x->api)) {
        fail(x, 400, x->api.param, "%s", x->api.error);
    } else if (x->api.only_loads) {
        succeed(x, ollama_loaded(x));
    } else if (!was_abandoned(x) && tokenize_prompts(x) && !was_abandoned(x) && make_rules(x)) {
        if (kind == API_MESSAGES || kind == API_OLLAMA_CHAT || kind == API_OLLAMA_GENERATE) fit_answer(x);
        if (!exchange_open_parsers(x)) fail(x, 503, NULL, "out of memory");
    }
    if (!api_request_detach(&x->api) && x->error.status == 0) fail(x, 503, NULL, "out of memory");
}

void prepare_chat(exchange *x) { prepare_generation(x, API_CHAT); }
void prepare_completions(exchange *x) { prepare_generation(x, API_COMPLETIONS); }
void prepare_messages(exchange *x) { prepare_generation(x, API_MESSAGES); }
void prepare_responses(exchange *x) { prepare_generation(x, API_RESPONSES); }

void prepare_ollama_chat(exchange *x) { prepare_generation(x, API_OLLAMA_CHAT); }
void prepare_ollama_generate(exchange *x) { prepare_generation(x, API_OLLAMA_GENERATE); }
void prepare_infill(exchange *x) { prepare_generation(x, API_INFILL); }

/* ---- other endpoints ---- */

/* Unlike other endpoints, /api/show checks the name even if the server has only one model, because clients use it to find out
 * whether a model exists. */
void prepare_ollama_show(exchange *x) {
    char error[240];
    size_t n = 0;
    const char *bytes = body_bytes(x, &n);
    json_t *root = api_json(bytes, n, error, sizeof error);
    const json_t *name = json_object_get(root, "model") != NULL ? json_object_get(root, "model") : json_object_get(root, "name");
    const char *text = json_string_value(name);
    const served_model *m = text != NULL ? served_model_find(x->s->models, x->s->n_models, text) : NULL;
    if (m != NULL)
        succeed(x, ollama_show(x->s, m));
    else if (text != NULL)
        fail(x, 404, "model", "model \"%.80s\" not found: /api/tags lists the models of this server", text);
    else
        fail(x, 400, "model", "%s", root == NULL ? error : "model: expected a string");
    json_decref(root);
}

void prepare_token_count(exchange *x) {
    api_request api;
    fkv_sampler_config any = fkv_sampler_config_default();
    prompt_tokens prompt = {0};
    json_t *root = prepare_json(x);
    if (root == NULL) return;
    bool good = api_request_read(API_MESSAGES, root, &any, &api);
    if (good && prompt_tokens_of(x->m->model, &api, 0, SIZE_MAX, &prompt) == FKV_OK)
        succeed(x, json_pack("{s:I}", "input_tokens", (json_int_t)prompt.n));
    else
        fail(x, 400, NULL, "%s", good ? fkv_message() : api.error);
    prompt_tokens_free(&prompt);
    api_request_free(&api);
}

void prepare_template_text(exchange *x) {
    api_request api;
    fkv_sampler_config any = fkv_sampler_config_default();
    size_t n = 0;
    json_t *root = prepare_json(x);
    if (root == NULL) return;
    bool good = api_request_read(API_CHAT, root, &any, &api);
    char *text = good ? prompt_text_of(x->m->model, &api, &n) : NULL;
    if (text != NULL)
        succeed(x, json_pack("{s:o}", "prompt", reply_utf8_text(text, n)));
    else
        fail(x, 400, NULL, "%s", good ? fkv_message() : api.error);
    free(text);
    api_request_free(&api);
}

static json_t *token_piece_json(const fkv_model *model, uint32_t token, bool with_text) {
    size_t n = 0;
    if (!with_text) return json_integer(token);
    const char *text = fkv_token_text(model, token, true, &n);
    return json_pack("{s:I, s:o}", "id", (json_int_t)token, "piece", reply_utf8_text(text, n));
}

void prepare_tokens(exchange *x) {
    json_t *root = prepare_json(x);
    json_t *text = json_object_get(root, "content") != NULL ? json_object_get(root, "content") : json_object_get(root, "prompt");
    prompt_tokens t = {0};
    unsigned flags = json_is_true(json_object_get(root, "add_special")) ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN;
    if (!json_is_false(json_object_get(root, "parse_special"))) flags |= FKV_TOKENIZE_SPECIAL;
    if (root == NULL) return;
    if (!json_is_string(text)) {
        fail(x, 400, "content", "content: expected a string");
    } else if (prompt_tokens_of_text(x->m->model, json_string_value(text), json_string_length(text), flags, &t) != FKV_OK) {
        fail(x, 400, "content", "%s", fkv_message());
    } else {
        json_t *list = json_array();
        bool pieces = json_is_true(json_object_get(root, "with_pieces"));
        for (size_t i = 0; i < t.n; i++) (void)json_array_append_new(list, token_piece_json(x->m->model, t.tokens[i], pieces));
        succeed(x, json_pack("{s:o, s:I}", "tokens", list, "count", (json_int_t)t.n));
    }
    prompt_tokens_free(&t);
    json_decref(root);
}

void prepare_token_text(exchange *x) {
    json_t *root = prepare_json(x);
    if (root == NULL) return;
    size_t n = 0;
    const json_t *tokens = json_object_get(root, "tokens");
    struct evbuffer *text = evbuffer_new();
    size_t i;
    const json_t *token;
    bool good = json_is_array(tokens);
    json_array_foreach(tokens, i, token) {
        json_int_t number = json_integer_value(token);
        good = good && json_is_integer(token) && number >= 0 && number < (json_int_t)fkv_model_about(x->m->model)->n_vocab;
        if (!good) break;
        const char *bytes = fkv_token_text(x->m->model, (uint32_t)number, true, &n);
        (void)evbuffer_add(text, bytes, n);
    }
    n = evbuffer_get_length(text);
    if (good)
        succeed(x, json_pack("{s:o}", "content", reply_utf8_text(n > 0 ? (const char *)evbuffer_pullup(text, -1) : "", n)));
    else
        fail(x, 400, "tokens", "tokens: expected an array of token numbers from the vocabulary of this model");
    evbuffer_free(text);
    json_decref(root);
}
