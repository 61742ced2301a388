/* See responses_request.h. */
#include "responses_request.h"
#include "join_texts.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool invalid_field(api_request *r, const char *param, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool invalid_field(api_request *r, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = snprintf(r->error, sizeof r->error, "%s: ", param);
    (void)vsnprintf(r->error + n, sizeof r->error - (size_t)n, format, args);
    va_end(args);
    (void)snprintf(r->param, sizeof r->param, "%s", param);
    return false;
}

static bool has_value(const api_request *r, const char *name) {
    const json_t *value = json_object_get(r->root, name);
    return value != NULL && !json_is_null(value) && !json_is_false(value);
}

/* ---- conversation ---- */

/* Appends the texts of a reasoning item to the array *reasoning. This array is later attached to the next assistant message. */
static void keep_reasoning(const json_t *item, json_t **reasoning) {
    size_t i;
    const json_t *part;
    json_array_foreach(json_object_get(item, "content"), i, part) {
        json_t *text = json_object_get(part, "text");
        if (!json_is_string(text)) continue;
        if (*reasoning == NULL) *reasoning = json_array();
        (void)json_array_append(*reasoning, text);
    }
}

static void attach_reasoning(json_t *message, const json_t *reasoning) {
    if (reasoning != NULL) (void)json_object_set_new(message, "reasoning_content", join_texts(reasoning, ""));
}

/* Returns the last message if it is from the assistant. Otherwise appends a new assistant message and returns it. */
static json_t *assistant_message(json_t *messages, json_t **reasoning) {
    json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (role != NULL && strcmp(role, "assistant") == 0) return last;
    json_t *made = json_pack("{s:s, s:s}", "role", "assistant", "content", "");
    attach_reasoning(made, *reasoning);
    (void)json_array_append_new(messages, made);
    return made;
}

static bool add_call(api_request *r, const json_t *item, json_t *messages, json_t **reasoning) {
    json_t *name = json_object_get(item, "name");
    json_t *arguments = json_object_get(item, "arguments");
    if (!json_is_string(name) || !json_is_string(arguments))
        return invalid_field(r, "input", "a function_call requires the strings name and arguments");
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
        return invalid_field(
            r, "input", "item references are not supported, because the server stores no responses; send the items themselves");
    if (strcmp(type, "message") != 0 || !json_is_string(role))
        return invalid_field(r, "input", "items of type %.40s are not supported", type[0] != 0 ? type : "(none)");
    json_t *message = json_pack("{s:O, s:O?}", "role", role, "content", json_object_get(item, "content"));
    if (strcmp(json_string_value(role), "assistant") == 0) attach_reasoning(message, *reasoning);
    return json_array_append_new(messages, message) == 0;
}

static bool read_input(api_request *r, json_t *messages) {
    json_t *input = json_object_get(r->root, "input");
    json_t *instructions = json_object_get(r->root, "instructions");
    if (json_is_string(instructions))
        (void)json_array_append_new(messages, json_pack("{s:s, s:O}", "role", "system", "content", instructions));
    else if (has_value(r, "instructions"))
        return invalid_field(r, "instructions", "expected a string");
    if (json_is_string(input))
        return json_array_append_new(messages, json_pack("{s:s, s:O}", "role", "user", "content", input)) == 0;
    if (!json_is_array(input) || json_array_size(input) == 0)
        return invalid_field(r, "input", "expected a string or an array of items");
    size_t i;
    json_t *item;
    json_t *reasoning = NULL;
    bool good = true;
    json_array_foreach(input, i, item) {
        size_t before = json_array_size(messages);
        good = good && add_item(r, item, messages, &reasoning);
        if (json_array_size(messages) == before) continue;
        json_decref(reasoning); /* reasoning before a message of another role is dropped */
        reasoning = NULL;
    }
    json_decref(reasoning);
    return good;
}

/* ---- other fields ---- */

/* Converts the function tools and drops server-side tools. */
static bool read_given_tools(api_request *r) {
    json_t *given = json_object_get(r->root, "tools");
    json_t *tools = json_array();
    size_t i;
    const json_t *tool;
    if (!has_value(r, "tools")) return json_decref(tools), true;
    if (!json_is_array(given)) return json_decref(tools), invalid_field(r, "tools", "expected an array");
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

static bool reject_stored_state(api_request *r) {
    static const struct {
        const char *name;
        const char *why;
    } missing[] = {{"previous_response_id", "the server stores no responses; send the whole conversation as input"},
                   {"conversation", "the server stores no conversations; send the whole conversation as input"},
                   {"background", "background responses are not supported, because the server stores no responses"},
                   {"prompt", "stored prompts are not supported; send instructions and input"}};
    for (size_t i = 0; i < sizeof missing / sizeof missing[0]; i++)
        if (has_value(r, missing[i].name)) return invalid_field(r, missing[i].name, "%s", missing[i].why);
    size_t k;
    const json_t *included;
    json_array_foreach(json_object_get(r->root, "include"), k, included) {
        const char *name = json_string_value(included);
        if (name != NULL && strstr(name, "logprobs") != NULL)
            return invalid_field(r, "include", "log probabilities are available from /v1/chat/completions only");
    }
    return true;
}

static void move_field(json_t *root, const char *to, json_t *value) {
    if (value != NULL && !json_is_null(value))
        (void)json_object_set(root, to, value);
    else
        (void)json_object_del(root, to);
}

/* Checks the metadata, which the response repeats. The limits are the same as in OpenAI's API. */
static bool check_metadata(api_request *r) {
    const json_t *metadata = json_object_get(r->root, "metadata");
    const char *name;
    json_t *value;
    if (!has_value(r, "metadata")) return true;
    if (!json_is_object(metadata) || json_object_size(metadata) > API_MAX_METADATA)
        return invalid_field(r, "metadata", "expected an object with at most %d members", API_MAX_METADATA);
    json_object_foreach((json_t *)metadata, name, value) {
        if (!json_is_string(value) || strlen(name) > API_MAX_METADATA_NAME || json_string_length(value) > API_MAX_METADATA_VALUE)
            return invalid_field(r, "metadata", "expected strings of at most %d bytes with names of at most %d bytes",
                                 API_MAX_METADATA_VALUE, API_MAX_METADATA_NAME);
    }
    return true;
}

bool responses_as_chat(api_request *r) {
    json_t *messages = json_array();
    if (!reject_stored_state(r) || !check_metadata(r) || !read_input(r, messages)) {
        json_decref(messages);
        return false;
    }
    (void)json_object_set_new(r->root, "messages", messages);
    (void)json_object_del(r->root, "n");
    (void)json_object_del(r->root, "stop"); /* `n` and `stop` are not part of the Responses API */
    move_field(r->root, "max_tokens", json_object_get(r->root, "max_output_tokens"));
    move_field(r->root, "response_format", json_object_get(json_object_get(r->root, "text"), "format"));
    move_field(r->root, "reasoning_effort", json_object_get(json_object_get(r->root, "reasoning"), "effort"));
    return read_given_tools(r);
}
