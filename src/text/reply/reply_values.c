/* Converts tool-call arguments from pairs of a key and a plain-text value to one JSON object.
 *
 * If the tool schema declares a parameter as a string, its value is forwarded as it arrives. Any other value is held back until
 * it is complete. If it is valid JSON, it is forwarded unchanged. If it is not valid JSON or exceeds the buffer, it becomes a
 * string. See reply_parts.h.
 */
#include "reply_parts.h"

#include <string.h>

/* Returns the type that the schema declares for the current key, such as "string", or "" if there is none. */
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

static void hold_value_byte(fkv_reply *r, char c) {
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

/* Drops the newline after the opening tag and the newline before the closing tag. These newlines belong to the tags. */
void reply_value_byte(fkv_reply *r, char c) {
    if (!r->one_value && c == '\n') {
        r->one_value = true;
        return;
    }
    r->one_value = true;
    if (r->newline) hold_value_byte(r, '\n');
    r->newline = c == '\n';
    if (!r->newline) hold_value_byte(r, c);
}

static bool is_json_value(const char *text, size_t n) {
    json_t *value = json_loadb(text, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    json_decref(value);
    return value != NULL;
}

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
        } else if (is_json_value(r->args, n)) {
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
