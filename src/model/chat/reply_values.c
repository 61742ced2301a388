/* Arguments of tool calls that are not written as JSON: each key with its value as text. They are given on as one JSON object.
 *
 * A value is a string where the tool's schema says so, and goes on as it comes. Every other value is held until its end: it is
 * what JSON makes of it, and a string where that is nothing, or where it grows longer than what is held. See reply_parts.h.
 */
#include "reply_parts.h"

#include <string.h>

/* "string", "integer", ...; "" where the schema does not say. */
static const char *type_of_key(const fkv_reply *r) {
    const json_t *parameters = json_object_get(reply_tool(r), "parameters");
    const json_t *schema = json_object_get(json_object_get(parameters, "properties"), r->key.bytes);
    const char *type = json_string_value(json_object_get(schema, "type"));
    return type != NULL ? type : "";
}

static void begin_string(fkv_reply *r) {
    size_t n = r->n_args;
    r->as_string = true;
    r->n_args = 0;
    reply_args(r, '"');
    for (size_t i = 0; i < n; i++) reply_args_quoted(r, r->args[i]);
}

void reply_value_begin(fkv_reply *r) {
    reply_args_text(r, r->has_args ? ", \"" : "{\"");
    for (size_t i = 0; i < r->key.n; i++) reply_args_quoted(r, r->key.bytes[i]);
    reply_args_text(r, "\": ");
    r->n_args = 0;
    r->as_string = false;
    r->newline = false;
    r->one_value = false;
    if (strcmp(type_of_key(r), "string") == 0) begin_string(r);
}

static void value_put(fkv_reply *r, char c) {
    if (r->as_string) {
        reply_args_quoted(r, c);
        return;
    }
    if (r->n_args == REPLY_HELD) {
        begin_string(r);
        reply_args_quoted(r, c);
        return;
    }
    r->args[r->n_args++] = c;
}

/* The line end behind the opening tag and the one before the closing tag belong to the tags. */
void reply_value_byte(fkv_reply *r, char c) {
    if (!r->one_value && c == '\n') {
        r->one_value = true;
        return;
    }
    r->one_value = true;
    if (r->newline) value_put(r, '\n');
    r->newline = c == '\n';
    if (!r->newline) value_put(r, c);
}

static bool is_json(const char *text, size_t n) {
    json_t *value = json_loadb(text, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    json_decref(value);
    return value != NULL;
}

/* What Python calls them. */
const char *reply_python_value(const char *text, size_t n) {
    static const char *const values[][2] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        if (n == strlen(values[i][0]) && memcmp(text, values[i][0], n) == 0) return values[i][1];
    return NULL;
}

void reply_value_end(fkv_reply *r) {
    if (!r->as_string) {
        const char *known = type_of_key(r)[0] != 0 ? reply_python_value(r->args, r->n_args) : NULL;
        size_t n = r->n_args;
        if (known != NULL) {
            reply_args_text(r, known);
        } else if (is_json(r->args, n)) {
            for (size_t i = 0; i < n; i++) reply_args(r, r->args[i]);
        } else {
            begin_string(r);
        }
        r->n_args = 0;
    }
    if (r->as_string) reply_args(r, '"');
}

void reply_values_end(fkv_reply *r) {
    reply_args_text(r, r->has_args ? "}" : "{}");
    reply_call_end(r, true);
}
