/* See prompt_tokens.h. */
#include "prompt_tokens.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The clock on the wall, as if it were UTC: templates write the date that people see. */
static int64_t local_now(void) {
    time_t now = time(NULL);
    struct tm local;
    return localtime_r(&now, &local) != NULL ? (int64_t)timegm(&local) : (int64_t)now;
}

fkv_status prompt_tokens_of_text(const fkv_model *model, const char *text, size_t n, unsigned flags, prompt_tokens *out) {
    size_t capacity = 0;
    fkv_status status = fkv_tokenize(model, text, n, flags, NULL, 0, &capacity);
    if (status != FKV_OK) return status;
    out->tokens = malloc((capacity + 1) * sizeof *out->tokens);
    if (out->tokens == NULL) return FKV_NO_MEMORY;
    return fkv_tokenize(model, text, n, flags, out->tokens, capacity, &out->n);
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

char *prompt_text_of(const fkv_model *model, const json_t *conversation, size_t *n) {
    if (!fkv_model_about(model)->has_chat) return plain_text(conversation, n);
    char *json = json_dumps(conversation, JSON_COMPACT);
    if (json == NULL) return NULL;
    int64_t now = local_now();
    char *text = NULL;
    fkv_status status = fkv_chat_render(model, json, strlen(json), &now, NULL, NULL, 0, n);
    if (status == FKV_OK) text = malloc(*n + 1);
    if (text != NULL && fkv_chat_render(model, json, strlen(json), &now, text, NULL, *n, n) != FKV_OK) {
        free(text);
        text = NULL;
    }
    free(json);
    return text;
}

static fkv_status of_conversation(const fkv_model *model, const json_t *conversation, prompt_tokens *out) {
    if (!fkv_model_about(model)->has_chat) {
        size_t n = 0;
        char *text = plain_text(conversation, &n);
        fkv_status status = text != NULL ? prompt_tokens_of_text(model, text, n, FKV_TOKENIZE_BOS, out) : FKV_NO_MEMORY;
        free(text);
        return status;
    }
    char *json = json_dumps(conversation, JSON_COMPACT);
    if (json == NULL) return FKV_NO_MEMORY;
    int64_t now = local_now();
    size_t capacity = 0;
    fkv_status status = fkv_chat_tokenize(model, json, strlen(json), &now, NULL, 0, &capacity);
    if (status == FKV_OK) {
        out->tokens = malloc((capacity + 1) * sizeof *out->tokens);
        status = out->tokens != NULL ? fkv_chat_tokenize(model, json, strlen(json), &now, out->tokens, capacity, &out->n)
                                     : FKV_NO_MEMORY;
    }
    free(json);
    return status;
}

fkv_status prompt_tokens_of(const fkv_model *model, const api_request *r, prompt_tokens *out) {
    *out = (prompt_tokens){0};
    if (r->kind != API_COMPLETIONS) return of_conversation(model, r->conversation, out);
    if (json_is_string(r->prompt))
        return prompt_tokens_of_text(model, json_string_value(r->prompt), json_string_length(r->prompt), FKV_TOKENIZE_BOS, out);
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
