/* See chat_prompt.h. */
#include "chat_prompt.h"

#include "cli.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

chat chat_open(const fkv_model *model, const char *system) {
    chat c = {.model = model, .messages = json_array()};
    if (system != NULL) chat_add(&c, "system", system, strlen(system));
    return c;
}

void chat_close(chat *c) {
    json_decref(c->messages);
    token_list_free(&c->base);
    c->messages = NULL;
}

void chat_add(chat *c, const char *role, const char *bytes, size_t n) {
    char *valid = text_to_utf8(bytes, n);
    json_t *message = json_pack("{s:s, s:s}", "role", role, "content", valid);
    if (message == NULL || json_array_append_new(c->messages, message) != 0)
        kit_die(EXIT_NO_FIT, "out of memory allocating a chat message");
    free(valid);
}

void chat_add_document(chat *c, const char *document, size_t n_document, const char *question, size_t n_question) {
    text_buffer content = {0};
    text_add(&content, document, n_document);
    text_add(&content, CHAT_CUT, strlen(CHAT_CUT));
    if (n_question > 0) text_add(&content, "\n\n", 2);
    text_add(&content, question, n_question);
    chat_add(c, "user", content.bytes, content.n);
    text_free(&content);
    c->has_cut = true;
}

void chat_pop(chat *c) {
    size_t n = json_array_size(c->messages);
    if (n > 0) json_array_remove(c->messages, n - 1);
}

static bool has_role(const json_t *messages, size_t at, const char *role) {
    const char *found = json_string_value(json_object_get(json_array_get(messages, at), "role"));
    return found != NULL && strcmp(found, role) == 0;
}

bool chat_undo(chat *c, text_buffer *text) {
    size_t at = json_array_size(c->messages);
    do
        if (at-- == 0) return false;
    while (!has_role(c->messages, at, "user"));
    const char *content = json_string_value(json_object_get(json_array_get(c->messages, at), "content"));
    if (content == NULL || strstr(content, CHAT_CUT) != NULL) return false;
    if (text != NULL) text_add(text, content, strlen(content));
    while (json_array_size(c->messages) > at) json_array_remove(c->messages, at);
    return true;
}

void chat_each(const chat *c, void (*show)(void *user, const char *role, const char *content), void *user) {
    size_t i;
    const json_t *message;
    json_array_foreach((const json_t *)c->messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        const char *content = json_string_value(json_object_get(message, "content"));
        if (role != NULL && content != NULL && strcmp(role, "system") != 0) show(user, role, content);
    }
}

void chat_clear(chat *c) {
    size_t at = has_role(c->messages, 0, "system") ? 1 : 0;
    while (json_array_size(c->messages) > at) json_array_remove(c->messages, at);
    c->has_cut = false;
    c->base.n = 0;
}

void chat_set_system(chat *c, const char *text) {
    if (has_role(c->messages, 0, "system")) json_array_remove(c->messages, 0);
    if (text[0] == 0) return;
    json_t *message = json_pack("{s:s, s:s}", "role", "system", "content", text);
    if (message == NULL || json_array_insert_new(c->messages, 0, message) != 0)
        kit_die(EXIT_NO_FIT, "out of memory allocating a chat message");
}

void chat_replace(chat *c, const void *messages) {
    json_t *copy = json_deep_copy(messages);
    if (copy == NULL) kit_die(EXIT_NO_FIT, "out of memory copying the conversation");
    json_decref(c->messages);
    c->messages = copy;
    c->has_cut = false;
    c->base.n = 0;
}

bool chat_drop_oldest(chat *c) {
    size_t at = has_role(c->messages, 0, "system") ? 1 : 0;
    if (c->has_cut) at++; /* the document */
    if (c->has_cut && has_role(c->messages, at, "assistant")) at++;
    if (json_array_size(c->messages) < at + 2) return false;
    do json_array_remove(c->messages, at);
    while (has_role(c->messages, at, "assistant"));
    return true;
}

/* Returns the local wall-clock time as if it were UTC, so that templates print the user's local date. */
static int64_t local_time_as_utc(void) {
    time_t now = time(NULL);
    struct tm local;
    return localtime_r(&now, &local) != NULL ? (int64_t)timegm(&local) : (int64_t)now;
}

typedef struct rendered_chat {
    char *text;
    uint8_t *given; /* [n] nonzero for each byte of message content, which never becomes part of a special token */
    size_t n;
} rendered_chat;

static int render_chat(const chat *c, rendered_chat *out) {
    json_t *conversation = json_pack("{s:O, s:b}", "messages", (json_t *)c->messages, "add_generation_prompt", 1);
    if (conversation != NULL && c->think != CHAT_THINK_DEFAULT)
        (void)json_object_set_new(conversation, "enable_thinking", json_boolean(c->think == CHAT_THINK_ON));
    char *json = conversation != NULL ? json_dumps(conversation, JSON_COMPACT) : NULL;
    json_decref(conversation);
    if (json == NULL) kit_die(EXIT_NO_FIT, "out of memory serializing the conversation");
    int64_t now = local_time_as_utc();
    size_t n_json = strlen(json);
    fkv_status status = fkv_chat_render(c->model, json, n_json, &now, NULL, NULL, 0, &out->n);
    if (status == FKV_OK) {
        out->text = kit_alloc(out->n + 1);
        out->given = kit_alloc(out->n + 1);
        status = fkv_chat_render(c->model, json, n_json, &now, out->text, out->given, out->n, &out->n);
    }
    free(json);
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

int chat_split(const chat *c, token_list *parts, size_t n_cuts) {
    rendered_chat r = {0};
    size_t at = 0;
    int code = render_chat(c, &r);
    for (size_t i = 0; i <= n_cuts && code == EXIT_GOOD; i++) {
        size_t end = r.n;
        if (i < n_cuts) {
            const char *cut = memmem(r.text + at, r.n - at, CHAT_CUT, strlen(CHAT_CUT));
            if (cut == NULL) {
                code =
                    kit_fail(EXIT_FAILED, "the chat template of this model alters the text of messages, so a document cannot be "
                                          "cached separately; use --raw to bypass the template");
                break;
            }
            end = (size_t)(cut - r.text);
        }
        code = token_list_add_given(&parts[i], c->model, r.text + at, r.given + at, end - at);
        at = end + strlen(CHAT_CUT);
    }
    free(r.text);
    free(r.given);
    return code;
}

int chat_tokens(const chat *c, token_list *list, size_t *n_prefix) {
    token_list parts[2] = {{0}};
    int code = chat_split(c, parts, c->has_cut ? 1 : 0);
    const token_list *first = c->base.n > 0 ? &c->base : &parts[0];
    list->n = 0;
    token_list_add(list, first->tokens, first->n);
    if (n_prefix != NULL) *n_prefix = list->n;
    token_list_add(list, parts[1].tokens, parts[1].n);
    token_list_free(&parts[0]);
    token_list_free(&parts[1]);
    return code;
}
