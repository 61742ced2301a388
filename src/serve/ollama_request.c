/* See ollama_request.h. Ignored fields, such as keep_alive and options.num_ctx, must still have the correct type. */
#include "ollama_request.h"

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

/* Returns the field, or NULL if it is missing or null. */
static json_t *field_of(const json_t *object, const char *name) {
    json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

static bool is_empty(const json_t *value) {
    return value == NULL || json_is_false(value) || (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

/* ---- options ---- */

/* Copies the sampling options. api_request_parse() checks their ranges. */
static bool read_options(api_request *r, json_t *out) {
    static const struct {
        const char *ollama;
        const char *openai;
    } names[] = {{"temperature", "temperature"},
                 {"top_k", "top_k"},
                 {"top_p", "top_p"},
                 {"min_p", "min_p"},
                 {"seed", "seed"},
                 {"stop", "stop"},
                 {"repeat_penalty", "repetition_penalty"},
                 {"presence_penalty", "presence_penalty"},
                 {"frequency_penalty", "frequency_penalty"}};
    const json_t *options = field_of(r->root, "options");
    if (options == NULL) return true;
    if (!json_is_object(options)) return invalid_field(r, "options", "expected an object");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        json_t *value = field_of(options, names[i].ollama);
        if (value != NULL && !(json_is_array(value) && json_array_size(value) == 0))
            (void)json_object_set(out, names[i].openai, value);
    }
    json_t *n_new = field_of(options, "num_predict");
    const json_t *n_context = field_of(options, "num_ctx");
    if (n_new != NULL && !json_is_integer(n_new)) return invalid_field(r, "num_predict", "expected an integer");
    if (n_context != NULL && !json_is_integer(n_context)) return invalid_field(r, "num_ctx", "expected an integer");
    if (json_integer_value(n_new) > 0)
        (void)json_object_set(out, "max_tokens", n_new); /* num_predict values of -1 and -2 mean that there is no limit */
    return true;
}

/* Reads `format`, which is "json" or a JSON schema. */
static bool read_ollama_format(api_request *r, json_t *out) {
    json_t *format = field_of(r->root, "format");
    const char *word = json_string_value(format);
    if (format == NULL || (word != NULL && word[0] == 0)) return true;
    json_t *wanted = NULL;
    if (json_is_object(format))
        wanted = json_pack("{s:s, s:{s:O}}", "type", "json_schema", "json_schema", "schema", format);
    else if (word != NULL && strcmp(word, "json") == 0)
        wanted = json_pack("{s:s}", "type", "json_object");
    else
        return invalid_field(r, "format", "expected \"json\" or a JSON schema");
    return json_object_set_new(out, "response_format", wanted) == 0 || invalid_field(r, "format", "out of memory");
}

/* Reads `think`, which is true, false or an effort such as "high". */
static bool read_think(api_request *r, json_t *out) {
    json_t *think = field_of(r->root, "think");
    if (think == NULL) return true;
    if (json_is_boolean(think))
        return json_object_set_new(out, "chat_template_kwargs", json_pack("{s:O}", "enable_thinking", think)) == 0;
    if (json_is_string(think)) return json_object_set(out, "reasoning_effort", think) == 0;
    return invalid_field(r, "think", "expected true, false or a string");
}

static bool read_common(api_request *r, json_t *out) {
    json_t *stream = field_of(r->root, "stream");
    const json_t *keep_alive = field_of(r->root, "keep_alive");
    if (stream != NULL && !json_is_boolean(stream)) return invalid_field(r, "stream", "expected true or false");
    if (keep_alive != NULL && !json_is_number(keep_alive) && !json_is_string(keep_alive))
        return invalid_field(r, "keep_alive", "expected a number of seconds or a duration such as \"5m\"");
    r->unloads = json_is_number(keep_alive) && json_number_value(keep_alive) == 0.0;
    (void)json_object_set_new(out, "stream", json_boolean(!json_is_false(stream))); /* Ollama streams by default */
    return read_options(r, out) && read_ollama_format(r, out) && read_think(r, out);
}

/* ---- conversation ---- */

/* Converts a message: `thinking` becomes reasoning_content, and tool_name becomes name. */
static bool read_ollama_message(api_request *r, const json_t *message, size_t index, json_t *out) {
    if (!json_is_object(message)) return invalid_field(r, "messages", "the element at index %zu is not an object", index);
    if (!is_empty(json_object_get(message, "images")))
        return invalid_field(r, "messages", "the message at index %zu has images; only text is supported", index);
    json_t *copy =
        json_copy((json_t *)message); /* a shallow copy: the values are shared with the original message and not changed */
    json_t *thinking = json_object_get(message, "thinking");
    json_t *tool_name = json_object_get(message, "tool_name");
    if (copy == NULL) return invalid_field(r, "messages", "out of memory");
    (void)json_object_del(copy, "images");
    (void)json_object_del(copy, "thinking");
    (void)json_object_del(copy, "tool_name");
    if (json_is_string(thinking) && !is_empty(thinking)) (void)json_object_set(copy, "reasoning_content", thinking);
    if (json_is_string(tool_name)) (void)json_object_set(copy, "name", tool_name);
    if (is_empty(json_object_get(copy, "tool_calls"))) (void)json_object_del(copy, "tool_calls");
    return json_array_append_new(out, copy) == 0;
}

static bool read_ollama_chat(api_request *r, json_t *out) {
    const json_t *messages = field_of(r->root, "messages");
    json_t *tools = field_of(r->root, "tools");
    size_t i;
    const json_t *message;
    if (messages != NULL && !json_is_array(messages)) return invalid_field(r, "messages", "expected an array");
    r->only_loads = json_array_size(messages) == 0;
    json_t *list = json_array();
    (void)json_object_set_new(out, "messages", list);
    json_array_foreach(messages, i, message) if (!read_ollama_message(r, message, i, list)) return false;
    if (tools != NULL) (void)json_object_set(out, "tools", tools);
    return true;
}

static bool read_ollama_generate(api_request *r, json_t *out) {
    static const char *const unsupported[] = {"images", "template", "context"};
    json_t *prompt = field_of(r->root, "prompt");
    json_t *system = field_of(r->root, "system");
    const json_t *raw = field_of(r->root, "raw");
    for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++)
        if (!is_empty(field_of(r->root, unsupported[i]))) return invalid_field(r, unsupported[i], "not supported");
    if (prompt != NULL && !json_is_string(prompt)) return invalid_field(r, "prompt", "expected a string");
    if (system != NULL && !json_is_string(system)) return invalid_field(r, "system", "expected a string");
    if (raw != NULL && !json_is_boolean(raw)) return invalid_field(r, "raw", "expected true or false");
    r->only_loads = is_empty(prompt);
    if (r->only_loads) return true;
    json_t *suffix = field_of(r->root, "suffix");
    if (suffix != NULL && !json_is_string(suffix)) return invalid_field(r, "suffix", "expected a string");
    if (!is_empty(suffix)) (void)json_object_set(out, "suffix", suffix);
    if (json_is_true(raw) || !is_empty(suffix)) return json_object_set(out, "prompt", prompt) == 0;
    json_t *list = json_array();
    if (!is_empty(system)) (void)json_array_append_new(list, json_pack("{s:s, s:O}", "role", "system", "content", system));
    (void)json_array_append_new(list, json_pack("{s:s, s:O}", "role", "user", "content", prompt));
    return json_object_set_new(out, "messages", list) == 0;
}

bool ollama_as_openai(api_request *r) {
    json_t *out = json_object();
    bool good = out != NULL && read_common(r, out) &&
                (r->kind == API_OLLAMA_CHAT ? read_ollama_chat(r, out) : read_ollama_generate(r, out));
    if (!good && r->error[0] == 0) (void)invalid_field(r, "body", "out of memory");
    if (good) {
        json_decref(r->root);
        r->root = out;
    } else {
        json_decref(out);
    }
    return good;
}
