/* See responses_request.h. */
#include "responses_request.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool refuse(api_request *r, const char *param, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool refuse(api_request *r, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = snprintf(r->error, sizeof r->error, "%s: ", param);
    (void)vsnprintf(r->error + n, sizeof r->error - (size_t)n, format, args);
    va_end(args);
    (void)snprintf(r->param, sizeof r->param, "%s", param);
    return false;
}

static bool is_said(const api_request *r, const char *name) {
    const json_t *value = json_object_get(r->root, name);
    return value != NULL && !json_is_null(value) && !json_is_false(value);
}

/* ---- the conversation ---- */

/* What the model thought before the next thing that it said. */
static void keep_reasoning(const json_t *item, json_t **reasoning) {
    size_t i;
    const json_t *part;
    json_array_foreach(json_object_get(item, "content"), i, part) {
        const char *more = json_string_value(json_object_get(part, "text"));
        const char *before = json_string_value(*reasoning);
        json_t *both = more != NULL ? json_sprintf("%s%s", before != NULL ? before : "", more) : NULL;
        if (both == NULL) continue;
        json_decref(*reasoning);
        *reasoning = both;
    }
}

/* The assistant's message at the end of the conversation, a new one where somebody else spoke last. */
static json_t *assistant_message(json_t *messages, json_t **reasoning) {
    json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (role != NULL && strcmp(role, "assistant") == 0) return last;
    json_t *made = json_pack("{s:s, s:s}", "role", "assistant", "content", "");
    if (*reasoning != NULL) (void)json_object_set(made, "reasoning_content", *reasoning);
    (void)json_array_append_new(messages, made);
    return made;
}

static bool add_call(api_request *r, const json_t *item, json_t *messages, json_t **reasoning) {
    json_t *name = json_object_get(item, "name");
    json_t *arguments = json_object_get(item, "arguments");
    if (!json_is_string(name) || !json_is_string(arguments))
        return refuse(r, "input", "a function_call has a name and arguments, both texts");
    json_t *message = assistant_message(messages, reasoning);
    json_t *calls = json_object_get(message, "tool_calls");
    if (calls == NULL) (void)json_object_set_new(message, "tool_calls", calls = json_array());
    return json_array_append_new(calls, json_pack("{s:O?, s:s, s:{s:O, s:O}}", "id", json_object_get(item, "call_id"), "type",
                                                  "function", "function", "name", name, "arguments", arguments)) == 0;
}

static bool add_item(api_request *r, json_t *item, json_t *messages, json_t **reasoning) {
    const char *type = json_string_value(json_object_get(item, "type"));
    json_t *role = json_object_get(item, "role");
    if (type == NULL) type = json_is_string(role) ? "message" : "";
    if (strcmp(type, "reasoning") == 0) {
        keep_reasoning(item, reasoning);
        return true;
    }
    if (strcmp(type, "function_call") == 0) return add_call(r, item, messages, reasoning);
    if (strcmp(type, "function_call_output") == 0)
        return json_array_append_new(messages, json_pack("{s:s, s:O?, s:O?}", "role", "tool", "tool_call_id",
                                                         json_object_get(item, "call_id"), "content",
                                                         json_object_get(item, "output"))) == 0;
    if (strcmp(type, "item_reference") == 0)
        return refuse(r, "input", "nothing is kept here that an item could refer to; send the items themselves");
    if (strcmp(type, "message") != 0 || !json_is_string(role))
        return refuse(r, "input", "items of the type %.40s are not read by this server", type[0] != 0 ? type : "(none)");
    json_t *message = json_pack("{s:O, s:O?}", "role", role, "content", json_object_get(item, "content"));
    if (*reasoning != NULL && strcmp(json_string_value(role), "assistant") == 0)
        (void)json_object_set(message, "reasoning_content", *reasoning);
    return json_array_append_new(messages, message) == 0;
}

static bool read_input(api_request *r, json_t *messages) {
    json_t *input = json_object_get(r->root, "input");
    json_t *instructions = json_object_get(r->root, "instructions");
    if (json_is_string(instructions))
        (void)json_array_append_new(messages, json_pack("{s:s, s:O}", "role", "system", "content", instructions));
    else if (is_said(r, "instructions"))
        return refuse(r, "instructions", "a text is expected");
    if (json_is_string(input))
        return json_array_append_new(messages, json_pack("{s:s, s:O}", "role", "user", "content", input)) == 0;
    if (!json_is_array(input) || json_array_size(input) == 0)
        return refuse(r, "input", "a text or an array of items is expected");
    size_t i;
    json_t *item;
    json_t *reasoning = NULL;
    bool good = true;
    json_array_foreach(input, i, item) {
        size_t before = json_array_size(messages);
        good = good && add_item(r, item, messages, &reasoning);
        if (json_array_size(messages) == before) continue;
        json_decref(reasoning); /* it stands with the message now, or nobody spoke of it */
        reasoning = NULL;
    }
    json_decref(reasoning);
    return good;
}

/* ---- the rest ---- */

/* Tools that the service itself would run are left out. */
static bool read_given_tools(api_request *r) {
    json_t *given = json_object_get(r->root, "tools");
    json_t *tools = json_array();
    size_t i;
    const json_t *tool;
    if (!is_said(r, "tools")) return json_decref(tools), true;
    if (!json_is_array(given)) return json_decref(tools), refuse(r, "tools", "an array is expected");
    json_array_foreach(given, i, tool) {
        const char *type = json_string_value(json_object_get(tool, "type"));
        if (type == NULL || strcmp(type, "function") != 0) continue;
        (void)json_array_append_new(tools,
                                    json_pack("{s:s, s:{s:O?, s:O*, s:O*}}", "type", "function", "function", "name",
                                              json_object_get(tool, "name"), "description", json_object_get(tool, "description"),
                                              "parameters", json_object_get(tool, "parameters")));
    }
    (void)json_object_set(r->root, "given_tools", given);
    return json_object_set_new(r->root, "tools", tools) == 0;
}

static bool refuse_what_is_kept(api_request *r) {
    static const struct {
        const char *name;
        const char *why;
    } missing[] = {{"previous_response_id", "this server keeps no responses; send the whole conversation as input"},
                   {"conversation", "this server keeps no conversations; send the whole of it as input"},
                   {"background", "this server keeps no responses to come back for"},
                   {"prompt", "this server has no stored prompts; send instructions and input"}};
    for (size_t i = 0; i < sizeof missing / sizeof missing[0]; i++)
        if (is_said(r, missing[i].name)) return refuse(r, missing[i].name, "%s", missing[i].why);
    size_t k;
    const json_t *wish;
    json_array_foreach(json_object_get(r->root, "include"), k, wish) {
        const char *name = json_string_value(wish);
        if (name != NULL && strstr(name, "logprobs") != NULL)
            return refuse(r, "include", "log probabilities are told by /v1/chat/completions");
    }
    return true;
}

static void move_field(json_t *root, const char *to, json_t *value) {
    if (value != NULL && !json_is_null(value))
        (void)json_object_set(root, to, value);
    else
        (void)json_object_del(root, to);
}

bool responses_as_chat(api_request *r) {
    json_t *messages = json_array();
    if (!refuse_what_is_kept(r) || !read_input(r, messages)) {
        json_decref(messages);
        return false;
    }
    (void)json_object_set_new(r->root, "messages", messages);
    (void)json_object_del(r->root, "n");
    (void)json_object_del(r->root, "stop"); /* it has none */
    move_field(r->root, "max_tokens", json_object_get(r->root, "max_output_tokens"));
    move_field(r->root, "response_format", json_object_get(json_object_get(r->root, "text"), "format"));
    move_field(r->root, "reasoning_effort", json_object_get(json_object_get(r->root, "reasoning"), "effort"));
    return read_given_tools(r);
}
