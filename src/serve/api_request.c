/* See api_request.h. */
#include "api_request.h"

#include "join_texts.h"
#include "ollama_request.h"
#include "responses_request.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool invalid(api_request *r, const char *param, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool invalid(api_request *r, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(r->error, sizeof r->error, format, args);
    va_end(args);
    (void)snprintf(r->param, sizeof r->param, "%s", param);
    return false;
}

/* ---- JSON ---- */

/* Returns true if brackets outside of strings are nested deeper than API_MAX_DEPTH. */
static bool too_deep(const char *body, size_t n) {
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0; i < n; i++) {
        if (quoted && body[i] == '\\')
            i++;
        else if (body[i] == '"')
            quoted = !quoted;
        else if (!quoted && (body[i] == '{' || body[i] == '['))
            depth++;
        else if (!quoted && (body[i] == '}' || body[i] == ']'))
            depth--;
        if (depth > API_MAX_DEPTH) return true;
    }
    return false;
}

/* Parses four hexadecimal digits as a UTF-16 code unit. Returns -1 if a digit is invalid. */
static int hex_code_unit(const char *digits) {
    int unit = 0;
    for (int i = 0; i < 4; i++) {
        if (!isxdigit((unsigned char)digits[i])) return -1;
        unit = 16 * unit + (isdigit((unsigned char)digits[i]) ? digits[i] - '0' : (digits[i] | 32) - 'a' + 10);
    }
    return unit;
}

/* Returns a copy of the body in which escaped NULs and unpaired surrogates are replaced with U+FFFD. Returns NULL if there is
 * nothing to replace. JSON allows both escapes, but a null-terminated UTF-8 string cannot represent them. Coding agents send
 * these escapes after reading binary files. */
static char *replace_bad_escapes(const char *body, size_t n) {
    static const char replacement[4] = {'f', 'f', 'f', 'd'};
    char *copy = NULL;
    for (size_t i = 0; i + 6 <= n; i++) {
        if (body[i] != '\\') continue;
        int unit = body[i + 1] == 'u' ? hex_code_unit(body + i + 2) : -1;
        int next = i + 12 <= n && body[i + 6] == '\\' && body[i + 7] == 'u' ? hex_code_unit(body + i + 8) : -1;
        bool pair = unit >= 0xd800 && unit < 0xdc00 && next >= 0xdc00 && next < 0xe000;
        bool half = unit == 0 || (unit >= 0xd800 && unit < 0xe000 && !pair);
        if (half && copy == NULL) {
            copy = malloc(n);
            if (copy == NULL) return NULL;
            memcpy(copy, body, n);
        }
        if (half) memcpy(copy + i + 2, replacement, sizeof replacement);
        i += pair ? 11 : unit >= 0 ? 5 : 1;
    }
    return copy;
}

json_t *api_json(const char *body, size_t n, char *error, size_t n_error) {
    json_error_t why;
    if (n == 0) return (void)snprintf(error, n_error, "the body is empty: expected a JSON object"), NULL;
    if (too_deep(body, n)) return (void)snprintf(error, n_error, "the body is nested deeper than %d levels", API_MAX_DEPTH), NULL;
    char *copy = replace_bad_escapes(body, n);
    json_t *root = json_loadb(copy != NULL ? copy : body, n, JSON_REJECT_DUPLICATES, &why);
    free(copy);
    if (root == NULL) return (void)snprintf(error, n_error, "the body is not valid JSON (line %d): %s", why.line, why.text), NULL;
    if (json_is_object(root)) return root;
    json_decref(root);
    return (void)snprintf(error, n_error, "the body must be a JSON object"), NULL;
}

/* Returns the field, or a NULL pointer if the field is missing or has the JSON value null. */
static json_t *field(const json_t *object, const char *name) {
    json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

static bool read_number(api_request *r, const char *name, double min, double max, double *out) {
    const json_t *value = field(r->root, name);
    if (value == NULL) return true;
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= min && number <= max))
        return invalid(r, name, "%s: expected a number from %g to %g", name, min, max);
    *out = number;
    return true;
}

static bool read_integer(api_request *r, const char *name, json_int_t min, json_int_t max, json_int_t *out) {
    const json_t *value = field(r->root, name);
    if (value == NULL) return true;
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < min || number > max)
        return invalid(r, name, "%s: expected an integer from %lld to %lld", name, (long long)min, (long long)max);
    *out = number;
    return true;
}

static bool read_bool(api_request *r, const char *name, bool *out) {
    const json_t *value = field(r->root, name);
    if (value == NULL) return true;
    if (!json_is_boolean(value)) return invalid(r, name, "%s: expected true or false", name);
    *out = json_is_true(value);
    return true;
}

/* ---- messages ---- */

/* Removes the billing line that Claude Code adds to its system prompt. The line changes with every request and would defeat the
 * prefix cache. */
static json_t *without_billing(const char *text) {
    static const char mark[] = "x-anthropic-billing-header";
    char *out = malloc(strlen(text) + 1);
    if (out == NULL) return NULL;
    char *end = out;
    while (*text != 0) {
        const char *newline = strchr(text, '\n');
        size_t n = newline != NULL ? (size_t)(newline - text) + 1 : strlen(text);
        if (strncmp(text, mark, sizeof mark - 1) != 0) {
            memcpy(end, text, n);
            end += n;
        }
        text += n;
    }
    json_t *kept = json_stringn(out, (size_t)(end - out));
    free(out);
    return kept;
}

/* Returns the text of a message. The content of the message is a string or an array of text parts. */
static json_t *content_text(api_request *r, const json_t *content, const char *where) {
    if (content == NULL || json_is_null(content)) return json_string("");
    if (json_is_string(content)) return json_string(json_string_value(content));
    if (!json_is_array(content)) return (void)invalid(r, "messages", "%s: expected a string or an array of parts", where), NULL;
    if (json_array_size(content) > API_MAX_PARTS)
        return (void)invalid(r, "messages", "%s: at most %d parts are allowed", where, API_MAX_PARTS), NULL;
    size_t i;
    const json_t *part;
    json_t *texts = json_array();
    json_array_foreach(content, i, part) {
        const char *kind = json_string_value(json_object_get(part, "type"));
        json_t *text = json_object_get(part, "text");
        if (kind == NULL || !json_is_string(text) || strstr(kind, "text") == NULL) {
            json_decref(texts);
            return (void)invalid(r, "messages", "%s: the part at index %zu is not text; only text is supported", where, i), NULL;
        }
        (void)json_array_append(texts, text);
    }
    json_t *whole = join_texts(texts, "");
    json_decref(texts);
    return whole;
}

/* Parses tool-call arguments, which clients send as JSON text in a string, into the objects that chat templates expect. */
static void parse_call_arguments(json_t *calls) {
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) {
        json_t *function = json_object_get(call, "function");
        const char *text = json_string_value(json_object_get(function, "arguments"));
        json_t *object = text != NULL ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
        if (json_is_object(object))
            (void)json_object_set_new(function, "arguments", object);
        else
            json_decref(object);
    }
}

static bool is_chat_role(const char *role) {
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        if (strcmp(role, roles[i]) == 0) return true;
    return false;
}

static bool read_chat_messages(api_request *r, json_t *out) {
    const json_t *messages = field(r->root, "messages");
    size_t i;
    const json_t *message;
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return invalid(r, "messages", "messages: expected an array with at least one message");
    json_array_foreach(messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        if (role == NULL) return invalid(r, "messages", "messages[%zu]: role is missing", i);
        if (!is_chat_role(role))
            return invalid(r, "messages",
                           "messages[%zu]: unknown role \"%.40s\": expected system, developer, user, assistant or tool", i, role);
        json_t *content = content_text(r, json_object_get(message, "content"), "content");
        if (content == NULL) return false;
        json_t *copy = json_deep_copy(message);
        if (strcmp(role, "developer") == 0) (void)json_object_set_new(copy, "role", json_string("system"));
        (void)json_object_set_new(copy, "content", content);
        parse_call_arguments(json_object_get(copy, "tool_calls"));
        (void)json_array_append_new(out, copy);
    }
    return true;
}

/* Returns the system prompt of an Anthropic request without billing lines. The request contains the system prompt as a string or
 * as an array of text blocks.
 */
static json_t *system_text(api_request *r, json_t *system) {
    if (json_is_string(system)) return without_billing(json_string_value(system));
    size_t i;
    json_t *block;
    json_array_foreach(system, i, block) {
        const char *text = json_string_value(json_object_get(block, "text"));
        if (text != NULL) (void)json_object_set_new(block, "text", without_billing(text));
    }
    return content_text(r, system, "system");
}

/* Appends a message and takes ownership of it. Consecutive user messages are merged, because many templates require alternating
 * roles. The content of a merged message is an array of texts, which join_merged_turns() later concatenates. */
static bool add_turn(json_t *out, json_t *message) {
    json_t *last = json_array_get(out, json_array_size(out) - 1);
    const char *role = json_string_value(json_object_get(message, "role"));
    const char *before = json_string_value(json_object_get(last, "role"));
    if (message == NULL || before == NULL || strcmp(role, "user") != 0 || strcmp(before, "user") != 0)
        return json_array_append_new(out, message) == 0;
    json_t *content = json_object_get(last, "content");
    bool good = true;
    if (!json_is_array(content)) good = json_object_set_new(last, "content", json_pack("[O]", content)) == 0;
    good = good && json_array_append(json_object_get(last, "content"), json_object_get(message, "content")) == 0;
    json_decref(message);
    return good;
}

static bool join_merged_turns(json_t *messages) {
    size_t i;
    json_t *message;
    bool good = true;
    json_array_foreach(messages, i, message) {
        const json_t *content = json_object_get(message, "content");
        if (json_is_array(content)) good = good && json_object_set_new(message, "content", join_texts(content, "\n\n")) == 0;
    }
    return good;
}

/* Reads one content block of an Anthropic message. Text, reasoning and tool calls are added to `message`, whose content is an
 * array of texts; tool results become separate messages in `out`. */
static bool read_block(api_request *r, const json_t *block, json_t *message, json_t *out) {
    const char *type = json_string_value(json_object_get(block, "type"));
    if (type == NULL) return invalid(r, "messages", "messages: a content block has no type");
    if (strcmp(type, "text") == 0) {
        json_t *text = json_object_get(block, "text");
        if (!json_is_string(text)) return invalid(r, "messages", "messages: a text block has no text");
        return json_array_append(json_object_get(message, "content"), text) == 0;
    }
    if (strcmp(type, "thinking") == 0 || strcmp(type, "redacted_thinking") == 0) {
        json_t *text = json_object_get(block, "thinking");
        if (json_is_string(text)) (void)json_object_set(message, "reasoning_content", text);
        return true;
    }
    if (strcmp(type, "tool_use") == 0) {
        json_t *calls = json_object_get(message, "tool_calls");
        json_t *call =
            json_pack("{s:O?, s:s, s:{s:O?, s:O?}}", "id", json_object_get(block, "id"), "type", "function", "function", "name",
                      json_object_get(block, "name"), "arguments", json_object_get(block, "input"));
        if (calls == NULL) (void)json_object_set_new(message, "tool_calls", calls = json_array());
        return json_array_append_new(calls, call) == 0;
    }
    if (strcmp(type, "tool_result") == 0) {
        json_t *content = content_text(r, json_object_get(block, "content"), "tool_result");
        if (content == NULL) return false;
        return json_array_append_new(out, json_pack("{s:s, s:O?, s:o}", "role", "tool", "tool_call_id",
                                                    json_object_get(block, "tool_use_id"), "content", content)) == 0;
    }
    return invalid(r, "messages", "messages: content blocks of type %.40s are not supported", type);
}

static bool read_anthropic_message(api_request *r, const json_t *message, json_t *out) {
    const char *role = json_string_value(json_object_get(message, "role"));
    const json_t *content = json_object_get(message, "content");
    if (role != NULL && strcmp(role, "system") == 0) role = "user"; /* most templates allow system messages only at the start */
    if (role == NULL || (strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0))
        return invalid(r, "messages", "messages: unknown role \"%.40s\": expected user, assistant or system",
                       role != NULL ? role : "");
    if (!json_is_array(content)) {
        json_t *text = content_text(r, content, "content");
        return text != NULL && add_turn(out, json_pack("{s:s, s:o}", "role", role, "content", text));
    }
    if (json_array_size(content) > API_MAX_PARTS)
        return invalid(r, "messages", "messages: at most %d content blocks are allowed", API_MAX_PARTS);
    json_t *whole = json_pack("{s:s, s:[]}", "role", role, "content");
    size_t i;
    const json_t *block;
    bool good = true;
    json_array_foreach(content, i, block) good = good && read_block(r, block, whole, out);
    (void)json_object_set_new(whole, "content", join_texts(json_object_get(whole, "content"), ""));
    bool empty = json_string_length(json_object_get(whole, "content")) == 0 && json_object_get(whole, "tool_calls") == NULL;
    if (good && !empty) return add_turn(out, whole); /* read_block() has already appended the tool results to `out` */
    json_decref(whole);
    return good;
}

static bool read_anthropic_messages(api_request *r, json_t *out) {
    const json_t *messages = field(r->root, "messages");
    json_t *system = field(r->root, "system");
    size_t i;
    const json_t *message;
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return invalid(r, "messages", "messages: expected an array with at least one message");
    if (system != NULL) {
        json_t *text = system_text(r, system);
        if (text == NULL) return false;
        if (json_string_length(text) > 0)
            (void)json_array_append_new(out, json_pack("{s:s, s:O}", "role", "system", "content", text));
        json_decref(text);
    }
    json_array_foreach(messages, i, message) if (!read_anthropic_message(r, message, out)) return false;
    return join_merged_turns(out);
}

/* ---- tools ---- */

static json_t *anthropic_tools(const json_t *tools) {
    json_t *out = json_array();
    size_t i;
    const json_t *tool;
    json_array_foreach(tools, i, tool) {
        json_t *schema = json_object_get(tool, "input_schema");
        if (schema == NULL) continue; /* skips server-side tools, which this server does not support */
        (void)json_array_append_new(out, json_pack("{s:s, s:{s:O?, s:O*, s:O}}", "type", "function", "function", "name",
                                                   json_object_get(tool, "name"), "description",
                                                   json_object_get(tool, "description"), "parameters", schema));
    }
    return out;
}

static bool one_of(const char *word, const char *a, const char *b) { return strcmp(word, a) == 0 || strcmp(word, b) == 0; }

/* Reads tool_choice in OpenAI or Anthropic syntax. Sets *hide_tools to true if the tools must not appear in the prompt. */
static bool read_tool_choice(api_request *r, bool *hide_tools) {
    const json_t *choice = field(r->root, "tool_choice");
    const char *word = json_is_object(choice) ? json_string_value(json_object_get(choice, "type")) : json_string_value(choice);
    bool parallel = true;
    if (r->kind != API_MESSAGES && !read_bool(r, "parallel_tool_calls", &parallel)) return false;
    r->one_call = !parallel || json_is_true(json_object_get(choice, "disable_parallel_tool_use"));
    if (choice == NULL) return true;
    if (word == NULL) return invalid(r, "tool_choice", "tool_choice: expected a string or an object with a type");
    *hide_tools = strcmp(word, "none") == 0;
    if (*hide_tools || strcmp(word, "auto") == 0) return true;
    r->forced_call = true;
    if (one_of(word, "required", "any")) return true;
    const json_t *function = json_object_get(choice, "function");
    r->forced_name = json_string_value(json_object_get(function != NULL ? function : choice, "name"));
    if (!one_of(word, "function", "tool") || r->forced_name == NULL)
        return invalid(r, "tool_choice", "tool_choice: expected auto, none, required (any), or a function name");
    return true;
}

/* Checks that every tool is a function with a name, because templates cannot render any other tool correctly. */
static bool check_tools(api_request *r, const json_t *tools) {
    size_t i;
    const json_t *tool;
    json_array_foreach(tools, i, tool) {
        if (json_string_length(json_object_get(json_object_get(tool, "function"), "name")) > 0) continue;
        return invalid(r, "tools", "tools: every tool must be a function with a name");
    }
    return true;
}

static bool read_tools(api_request *r) {
    json_t *tools = field(r->root, "tools");
    bool hide_tools = false;
    if (!read_tool_choice(r, &hide_tools)) return false;
    if (tools == NULL && r->forced_call)
        return invalid(r, "tool_choice", "tool_choice: a tool call is required, but the request contains no tools");
    if (tools == NULL) return true;
    if (!json_is_array(tools)) return invalid(r, "tools", "tools: expected an array");
    if (hide_tools) return true;
    tools = r->kind == API_MESSAGES ? anthropic_tools(tools) : json_incref(tools);
    bool good = check_tools(r, tools);
    if (good && json_array_size(tools) > 0) return json_object_set_new(r->conversation, "tools", tools) == 0;
    json_decref(tools);
    return good;
}

/* Decides whether the answer continues the last message, which must then be an assistant message. If so, moves the text of this
 * message from the conversation to r->final_text. The template then renders the start of a new answer, to which the text is
 * appended. */
static bool read_continuation(api_request *r, json_t *messages) {
    const size_t n = json_array_size(messages);
    const json_t *last = json_array_get(messages, n - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    const bool possible =
        role != NULL && strcmp(role, "assistant") == 0 && json_array_size(json_object_get(last, "tool_calls")) == 0;
    const bool new_answer = json_is_true(field(r->root, "add_generation_prompt"));
    bool wanted = possible && !new_answer && r->kind != API_RESPONSES;
    if (!read_bool(r, "continue_final_message", &wanted)) return false;
    if (!wanted) return true;
    if (!possible)
        return invalid(r, "continue_final_message", "continue_final_message: the last message must be a text from the assistant");
    if (new_answer)
        return invalid(r, "continue_final_message",
                       "continue_final_message: cannot be combined with add_generation_prompt, which starts a new answer");
    r->final_text = json_incref(json_object_get(last, "content"));
    (void)json_array_remove(messages, n - 1);
    return json_object_set_new(r->conversation, "add_generation_prompt", json_true()) == 0;
}

static bool read_conversation(api_request *r) {
    bool answers = true;
    if (!read_bool(r, "add_generation_prompt", &answers)) return false;
    json_t *messages = json_array();
    r->conversation = json_pack("{s:o, s:b}", "messages", messages, "add_generation_prompt", answers);
    if (r->conversation == NULL) return invalid(r, "messages", "out of memory reading the conversation");
    bool good = r->kind == API_MESSAGES ? read_anthropic_messages(r, messages) : read_chat_messages(r, messages);
    if (!good || !read_continuation(r, messages) || !read_tools(r)) return false;
    json_t *more = field(r->root, "chat_template_kwargs");
    if (more != NULL && !json_is_object(more))
        return invalid(r, "chat_template_kwargs", "chat_template_kwargs: expected an object");
    if (more != NULL) (void)json_object_update_missing(r->conversation, more);
    json_t *effort = field(r->root, "reasoning_effort");
    if (effort == NULL) effort = field(field(r->root, "output_config"), "effort"); /* Anthropic API */
    if (json_is_string(effort)) (void)json_object_set(r->conversation, "reasoning_effort", effort);
    const char *thinking = json_string_value(json_object_get(field(r->root, "thinking"), "type"));
    if (thinking != NULL && json_object_get(r->conversation, "enable_thinking") == NULL)
        (void)json_object_set_new(r->conversation, "enable_thinking", json_boolean(strcmp(thinking, "disabled") != 0));
    return true;
}

/* ---- options ---- */

static bool read_stops(api_request *r) {
    const char *name = r->kind == API_MESSAGES ? "stop_sequences" : "stop";
    const json_t *stop = field(r->root, name);
    if (stop == NULL) return true;
    size_t n = json_is_array(stop) ? json_array_size(stop) : 1;
    if (n > FKV_MAX_STOPS) return invalid(r, name, "%s: at most %d strings are allowed", name, FKV_MAX_STOPS);
    for (size_t i = 0; i < n; i++) {
        const json_t *one = json_is_array(stop) ? json_array_get(stop, i) : stop;
        size_t length = json_string_length(one);
        if (!json_is_string(one) || length == 0 || length > FKV_MAX_STOP_BYTES)
            return invalid(r, name, "%s: expected strings of 1 to %d bytes", name, FKV_MAX_STOP_BYTES);
        r->stops[r->n_stops++] = json_string_value(one);
    }
    return true;
}

static bool read_logprobs(api_request *r) {
    json_int_t n_top = 0;
    if (r->kind == API_CHAT) {
        if (!read_bool(r, "logprobs", &r->logprobs)) return false;
        if (!read_integer(r, "top_logprobs", 0, FKV_MAX_LOGPROBS, &n_top)) return false;
    } else if (r->kind == API_COMPLETIONS) {
        n_top = -1;
        if (!read_integer(r, "logprobs", 0, FKV_MAX_LOGPROBS, &n_top)) return false;
        r->logprobs = n_top >= 0;
        if (n_top < 0) n_top = 0;
    }
    r->n_top = (uint32_t)n_top;
    return true;
}

/* Reads the requested output format. The schema is in {"type": "json_schema", "json_schema": {"schema": ...}} or directly in the
 * field `schema` of the format. */
static bool read_format(api_request *r) {
    bool messages = r->kind == API_MESSAGES;
    const char *name = messages ? "output_config" : "response_format";
    const json_t *format = messages ? json_object_get(field(r->root, name), "format") : field(r->root, name);
    if (messages && format == NULL) format = field(r->root, name = "output_format");
    const char *type = json_string_value(json_object_get(format, "type"));
    if (format == NULL || json_is_null(format)) return true;
    if (type == NULL || (strcmp(type, "text") != 0 && !one_of(type, "json_schema", "json_object")))
        return invalid(r, name, "%s: expected an object with type text, json_object or json_schema", name);
    if (strcmp(type, "text") == 0) return true;
    const json_t *inside = json_object_get(format, "json_schema");
    json_t *schema = json_object_get(inside != NULL ? inside : format, "schema");
    bool any = strcmp(type, "json_object") == 0 && schema == NULL;
    if (!any && !json_is_object(schema)) return invalid(r, name, "%s: json_schema requires a schema object", name);
    r->any_object = any;
    r->schema = any ? json_pack("{s:s}", "type", "object") : json_incref(schema);
    return r->schema != NULL || invalid(r, name, "out of memory reading the schema");
}

/* Rejects unsupported options if ignoring them would change the answer. */
static bool reject_unsupported(api_request *r) {
    if (r->echo && r->logprobs) return invalid(r, "echo", "echo: log probabilities of prompts are not supported");
    if (json_integer_value(field(r->root, "best_of")) > 1) return invalid(r, "best_of", "best_of: not supported; use n");
    return true;
}

/* Reads logit_bias: {"token": bias}. A bias of -100 or less forbids the token. */
static bool read_logit_bias(api_request *r) {
    const json_t *bias = field(r->root, "logit_bias");
    const char *key;
    const json_t *value;
    r->sampler.bias = r->bias;
    r->sampler.n_bias = 0;
    if (bias != NULL && (!json_is_object(bias) || json_object_size(bias) > API_MAX_BIASES))
        return invalid(r, "logit_bias", "logit_bias: expected an object with at most %d tokens", API_MAX_BIASES);
    json_object_foreach((json_t *)bias, key, value) {
        char *end = NULL;
        unsigned long token = strtoul(key, &end, 10);
        double number = json_number_value(value);
        if (key[0] < '0' || key[0] > '9' || *end != 0 || token > INT32_MAX || !json_is_number(value) ||
            !(number <= (double)API_MAX_BIAS_VALUE))
            return invalid(r, "logit_bias", "logit_bias: expected token numbers with biases up to %d", API_MAX_BIAS_VALUE);
        r->bias[r->sampler.n_bias++] = (fkv_logit_bias){(uint32_t)token, number <= -100.0 ? -INFINITY : (float)number};
    }
    return true;
}

static bool read_sampler(api_request *r, const fkv_sampler_config *defaults) {
    struct {
        const char *name;
        double min;
        double max;
        float *target;
    } reals[] = {{"temperature", 0.0, 100.0, &r->sampler.temperature},
                 {"top_p", 0.0, 1.0, &r->sampler.top_p},
                 {"min_p", 0.0, 1.0, &r->sampler.min_p},
                 {"repetition_penalty", 0.0, 10.0, &r->sampler.repetition_penalty},
                 {"presence_penalty", -2.0, 2.0, &r->sampler.presence_penalty},
                 {"frequency_penalty", -2.0, 2.0, &r->sampler.frequency_penalty}};
    json_int_t top_k = defaults->top_k;
    json_int_t seed = 0;
    r->sampler = *defaults;
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        double number = (double)*reals[i].target;
        if (!read_number(r, reals[i].name, reals[i].min, reals[i].max, &number)) return false;
        *reals[i].target = (float)number;
    }
    if (!read_integer(r, "top_k", -1, INT32_MAX, &top_k) || !read_integer(r, "seed", INT64_MIN, INT64_MAX, &seed)) return false;
    r->sampler.top_k = top_k > 0 ? (uint32_t)top_k : 0;
    if (field(r->root, "seed") != NULL) r->sampler.seed = (uint64_t)seed;
    return read_logit_bias(r);
}

static bool read_lengths(api_request *r) {
    json_int_t max_new = 0;
    json_int_t n = 1;
    json_int_t priority = 0;
    if (!read_integer(r, "max_tokens", 1, INT32_MAX, &max_new)) return false;
    if (r->kind == API_INFILL && !read_integer(r, "n_predict", -1, INT32_MAX, &max_new)) return false;
    if (max_new < 0) max_new = 0; /* in llama.cpp, -1 means no limit */
    if (r->kind == API_CHAT && !read_integer(r, "max_completion_tokens", 1, INT32_MAX, &max_new)) return false;
    if (r->kind != API_MESSAGES && r->kind != API_INFILL && !read_integer(r, "n", 1, FKV_MAX_ANSWERS, &n)) return false;
    if (!read_integer(r, "priority", -1000, 1000, &priority) || !read_number(r, "timeout", 0.0, 86400.0, &r->deadline_s))
        return false;
    if (r->kind == API_COMPLETIONS && max_new == 0) max_new = 16; /* default of OpenAI's completions API */
    r->max_new = (uint32_t)max_new;
    r->n = (uint32_t)n;
    r->priority = (int32_t)priority;
    return true;
}

/* Adds a prompt, which must be a string or an array of tokens. */
static bool add_prompt(api_request *r, const json_t *prompt) {
    size_t i;
    const json_t *token;
    if (!json_is_string(prompt) && json_array_size(prompt) == 0)
        return invalid(r, "prompt", "prompt: expected a string, an array of tokens, or an array of prompts");
    json_array_foreach(prompt, i, token) {
        if (!json_is_integer(token) || json_integer_value(token) < 0 || json_integer_value(token) > INT32_MAX)
            return invalid(r, "prompt", "prompt: the element at index %zu is not a token number", i);
    }
    r->prompts[r->n_prompts++] = prompt;
    return true;
}

static bool read_completion_prompt(api_request *r) {
    const json_t *prompt = field(r->root, "prompt");
    const json_t *first = json_array_get(prompt, 0);
    size_t i;
    const json_t *one;
    r->suffix = field(r->root, "suffix");
    if (r->suffix != NULL && !json_is_string(r->suffix)) return invalid(r, "suffix", "suffix: expected a string");
    if (json_string_length(r->suffix) == 0) r->suffix = NULL;
    r->parse_special = true; /* special tokens in prompts are recognized by default, as in llama.cpp and vLLM */
    r->n_prompts = 0;
    if (!read_bool(r, "parse_special", &r->parse_special)) return false;
    if (!json_is_string(first) && !json_is_array(first)) return add_prompt(r, prompt);
    if (json_array_size(prompt) * r->n > API_MAX_CHOICES)
        return invalid(r, "prompt", "prompt: %zu prompts with n = %u: at most %d answers are allowed", json_array_size(prompt),
                       r->n, API_MAX_CHOICES);
    json_array_foreach(prompt, i, one) if (!add_prompt(r, one)) return false;
    return true;
}

/* Reads the fields of llama.cpp's /infill API: input_prefix, input_suffix, input_extra and prompt. The field `prompt` is the
 * start of the answer. */
static bool read_infill(api_request *r) {
    static const char *const names[] = {"input_prefix", "input_suffix", "prompt"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *text = field(r->root, names[i]);
        if (i < 2 ? !json_is_string(text) : text != NULL && !json_is_string(text))
            return invalid(r, names[i], "%s: expected a string", names[i]);
    }
    size_t i;
    const json_t *file;
    r->prompts[0] = field(r->root, names[0]);
    r->suffix = field(r->root, names[1]);
    r->middle = field(r->root, names[2]);
    r->extra = field(r->root, "input_extra");
    if (r->extra != NULL && (!json_is_array(r->extra) || json_array_size(r->extra) > API_MAX_FILES))
        return invalid(r, "input_extra", "input_extra: expected an array of at most %d files", API_MAX_FILES);
    json_array_foreach(r->extra, i, file) {
        const json_t *name = field(file, "filename");
        if (!json_is_string(field(file, "text")) || (name != NULL && !json_is_string(name)))
            return invalid(r, "input_extra", "input_extra[%zu]: expected an object with the strings text and filename", i);
    }
    return true;
}

/* Returns true if the prompt consists of text or tokens instead of a conversation. */
static bool is_completion(const api_request *r) {
    return r->kind == API_COMPLETIONS || (r->kind == API_OLLAMA_GENERATE && field(r->root, "prompt") != NULL);
}

bool api_request_parse(api_kind kind, const char *body, size_t n_bytes, const fkv_sampler_config *defaults, api_request *r) {
    char error[sizeof r->error];
    json_t *root = api_json(body, n_bytes, error, sizeof error);
    if (root != NULL) return api_request_read(kind, root, defaults, r);
    *r = (api_request){.kind = kind};
    return invalid(r, "", "%s", error);
}

bool api_request_read(api_kind kind, json_t *root, const fkv_sampler_config *defaults, api_request *r) {
    *r = (api_request){.kind = kind, .root = root, .n_prompts = 1};
    const bool ollama = kind == API_OLLAMA_CHAT || kind == API_OLLAMA_GENERATE;
    if ((kind == API_RESPONSES && !responses_as_chat(r)) || (ollama && !ollama_as_openai(r))) return false;
    const json_t *options = field(r->root, "stream_options");
    r->include_usage = json_is_true(json_object_get(options, "include_usage"));
    return read_bool(r, "stream", &r->stream) && read_bool(r, "ignore_eos", &r->ignore_end) &&
           (kind != API_COMPLETIONS || read_bool(r, "echo", &r->echo)) && read_lengths(r) && read_sampler(r, defaults) &&
           read_stops(r) && read_logprobs(r) && reject_unsupported(r) && read_format(r) &&
           (r->only_loads || (kind == API_INFILL ? read_infill(r)
                              : is_completion(r) ? read_completion_prompt(r)
                                                 : read_conversation(r)));
}

/* Returns an object with the request fields that a response of the Responses API repeats. Instructions, tools and the text format
 * are left out if they are large, because the event loop serializes them several times. */
static json_t *echoed_fields(const api_request *r) {
    static const char *const names[] = {"text", "instructions", "max_output_tokens", "given_tools", "tool_choice", "metadata"};
    json_t *out = json_object();
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        json_t *value = json_object_get(r->root, names[i]);
        if (value != NULL) (void)json_object_set(out, names[i], value);
    }
    const size_t n_bytes = json_dumpb(out, NULL, 0, JSON_COMPACT);
    for (size_t i = 0; n_bytes > API_MAX_ECHO && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(names[i], "metadata") != 0 && strcmp(names[i], "max_output_tokens") != 0) (void)json_object_del(out, names[i]);
    return out;
}

bool api_request_detach(api_request *r) {
    size_t n = 1;
    for (uint32_t i = 0; i < r->n_stops; i++) n += strlen(r->stops[i]) + 1;
    r->stop_text = malloc(n);
    char *end = r->stop_text;
    if (end == NULL) r->n_stops = 0;
    for (uint32_t i = 0; i < r->n_stops; i++) {
        size_t length = strlen(r->stops[i]) + 1;
        r->stops[i] = memcpy(end, r->stops[i], length);
        end += length;
    }
    json_t *kept = r->kind == API_RESPONSES && r->root != NULL ? echoed_fields(r) : NULL;
    json_decref(r->schema);
    json_decref(r->conversation);
    json_decref(r->root);
    json_decref(r->final_text);
    r->schema = r->conversation = r->final_text = NULL;
    r->suffix = r->middle = r->extra = NULL;
    r->n_prompts = 0;
    r->root = kept;
    r->forced_name = NULL;
    return r->stop_text != NULL;
}

void api_request_free(api_request *r) {
    free(r->stop_text);
    json_decref(r->final_text);
    json_decref(r->schema);
    json_decref(r->conversation);
    json_decref(r->root);
    *r = (api_request){0};
}
