/* See prompt_tokens.h. */
#include "prompt_tokens.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Returns the Unix time that, if printed as UTC, shows the local date and time, because templates print the local date. */
static int64_t local_clock(void) {
    time_t now = time(NULL);
    struct tm local;
    return localtime_r(&now, &local) != NULL ? (int64_t)timegm(&local) : (int64_t)now;
}

/* Tokenizes text. If given is not NULL, it marks the bytes that come from the client (see fkv_chat_render()). */
static fkv_status tokenize_marked(const fkv_model *model, const char *text, const uint8_t *given, size_t n, unsigned flags,
                                  prompt_tokens *out) {
    size_t capacity = n / 2 + 64; /* enough tokens for most texts, so that most texts are tokenized only once */
    fkv_status status = FKV_OK;
    for (int attempt = 0; attempt < 2; attempt++) {
        free(out->tokens);
        out->tokens = malloc((capacity + 1) * sizeof *out->tokens);
        if (out->tokens == NULL) return FKV_NO_MEMORY;
        status = given != NULL ? fkv_tokenize_given(model, text, given, n, out->tokens, capacity, &out->n)
                               : fkv_tokenize(model, text, n, flags, out->tokens, capacity, &out->n);
        if (status != FKV_OK || out->n <= capacity) break;
        capacity = out->n;
    }
    if (status != FKV_OK) out->n = 0;
    return status;
}

fkv_status prompt_tokens_of_text(const fkv_model *model, const char *text, size_t n, unsigned flags, prompt_tokens *out) {
    return tokenize_marked(model, text, NULL, n, flags, out);
}

static char *plain_text(const json_t *conversation, size_t *n) {
    size_t i;
    const json_t *message;
    const json_t *messages = json_object_get(conversation, "messages");
    *n = 0;
    json_array_foreach(messages, i, message) *n += json_string_length(json_object_get(message, "content")) + 2;
    char *text = malloc(*n + 1);
    if (text == NULL) return NULL;
    char *end = text;
    json_array_foreach(messages, i, message) {
        const json_t *content = json_object_get(message, "content");
        if (i > 0) *end++ = '\n';
        if (json_string_length(content) > 0) memcpy(end, json_string_value(content), json_string_length(content));
        end += json_string_length(content);
    }
    *n = (size_t)(end - text);
    return text;
}

/* Renders a conversation with the model's chat template. given: receives the marks of the bytes that come from the client; may be
 * NULL. The caller frees *text and *given, even after a failure. */
static fkv_status render_conversation(const fkv_model *model, const json_t *conversation, char **text, uint8_t **given,
                                      size_t *n) {
    char *json = json_dumps(conversation, JSON_COMPACT);
    if (json == NULL) return FKV_NO_MEMORY;
    const int64_t now = local_clock();
    const size_t n_json = strlen(json);
    size_t capacity = n_json + 1024; /* enough bytes for most conversations, so that most conversations are rendered only once */
    fkv_status status = FKV_OK;
    for (int attempt = 0; attempt < 2; attempt++) {
        free(*text);
        *text = malloc(capacity + 1);
        if (given != NULL) {
            free(*given);
            *given = malloc(capacity + 1);
        }
        status = *text != NULL && (given == NULL || *given != NULL)
                     ? fkv_chat_render(model, json, n_json, &now, *text, given != NULL ? *given : NULL, capacity, n)
                     : FKV_NO_MEMORY;
        if (status != FKV_OK || *n <= capacity) break;
        capacity = *n;
    }
    free(json);
    return status;
}

char *prompt_text_of(const fkv_model *model, const json_t *conversation, size_t *n) {
    if (!fkv_model_about(model)->has_chat) return plain_text(conversation, n);
    char *text = NULL;
    if (render_conversation(model, conversation, &text, NULL, n) == FKV_OK) return text;
    free(text);
    return NULL;
}

static fkv_status conversation_tokens(const fkv_model *model, const json_t *conversation, size_t max_bytes, prompt_tokens *out) {
    size_t n = 0;
    char *text = NULL;
    uint8_t *given = NULL;
    fkv_status status = FKV_OK;
    if (fkv_model_about(model)->has_chat)
        status = render_conversation(model, conversation, &text, &given, &n);
    else
        text = plain_text(conversation, &n);
    if (text == NULL) status = FKV_NO_MEMORY;
    out->n_bytes = n;
    if (status == FKV_OK && n > max_bytes) status = FKV_POOL_FULL;
    if (status == FKV_OK) status = tokenize_marked(model, text, given, n, FKV_TOKENIZE_BOS, out);
    free(text);
    free(given);
    return status;
}

fkv_status prompt_tokens_of(const fkv_model *model, const api_request *r, size_t max_bytes, prompt_tokens *out) {
    *out = (prompt_tokens){0};
    if (r->conversation != NULL) return conversation_tokens(model, r->conversation, max_bytes, out);
    const unsigned flags = FKV_TOKENIZE_BOS | (r->parse_special ? FKV_TOKENIZE_SPECIAL : 0);
    if (json_is_string(r->prompt)) {
        out->n_bytes = json_string_length(r->prompt);
        if (out->n_bytes > max_bytes) return FKV_POOL_FULL;
        return prompt_tokens_of_text(model, json_string_value(r->prompt), json_string_length(r->prompt), flags, out);
    }
    out->tokens = malloc((json_array_size(r->prompt) + 1) * sizeof *out->tokens);
    if (out->tokens == NULL) return FKV_NO_MEMORY;
    for (; out->n < json_array_size(r->prompt); out->n++)
        out->tokens[out->n] = (uint32_t)json_integer_value(json_array_get(r->prompt, out->n));
    return FKV_OK;
}

void prompt_tokens_free(prompt_tokens *t) {
    free(t->tokens);
    *t = (prompt_tokens){0};
}
