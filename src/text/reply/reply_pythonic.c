/* Parses tool calls in Python syntax: [NAME(key="text", other=[1, {'a': None}]), NAME()]. The arguments are forwarded byte by
 * byte as one JSON object. Strings get JSON quotes; True, False and None become JSON literals; tuples become lists. A call with a
 * positional argument is reported as incomplete, because positional arguments are not supported. See reply_parts.h. */
#include "reply_parts.h"

#include <string.h>

static const reply_state PY_CALLS;
static const reply_state PY_KEY;
static const reply_state PY_VALUE;
static const reply_state PY_STRING;

static bool is_name_byte(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-' ||
           (uint8_t)c >= 0x80;
}

/* ---- values ---- */

static bool in_py_dict(const fkv_reply *r) { return r->depth > 0 && (r->objects >> (r->depth - 1) & 1) != 0; }

/* Starts a value and writes a comma before it if necessary. If the current item already has a value, calls reply_call_fail() and
 * returns false. */
static bool begin_item(fkv_reply *r) {
    if (r->has_item) {
        reply_call_fail(r);
        return false;
    }
    if (r->comma) reply_args_text(r, ", ");
    r->comma = false;
    r->has_item = true;
    return true;
}

/* Ends an unquoted word: JSON and Python literals are written as JSON literals, other words as strings. */
static void end_py_word(fkv_reply *r) {
    reply_word word = r->key;
    r->key = (reply_word){0};
    if (word.n == 0 || !begin_item(r)) return;
    const char *known = reply_python_value(word.bytes, word.n);
    json_t *value = known == NULL ? json_loadb(word.bytes, word.n, JSON_DECODE_ANY, NULL) : NULL;
    const bool quoted = known == NULL && value == NULL;
    json_decref(value);
    if (quoted) reply_args(r, '"');
    if (known != NULL) reply_args_text(r, known);
    for (size_t i = 0; known == NULL && i < word.n; i++)
        if (quoted)
            reply_args_quoted(r, word.bytes[i]);
        else
            reply_args(r, word.bytes[i]);
    if (quoted) reply_args(r, '"');
}

static void open_bracket(fkv_reply *r, char c) {
    if (r->depth == REPLY_DEPTH) {
        reply_call_fail(r);
        return;
    }
    if (!begin_item(r)) return;
    const uint64_t bit = (uint64_t)1 << r->depth++;
    r->objects = c == '{' ? r->objects | bit : r->objects & ~bit;
    r->has_item = false;
    reply_args(r, c == '{' ? '{' : '[');
}

static void end_py_call(fkv_reply *r) {
    reply_args(r, '}');
    reply_call_end(r, true);
    r->state = &PY_CALLS;
}

/* Ends the value of a key. A missing value ("key=") becomes null. */
static void end_py_value(fkv_reply *r) {
    if (!r->has_item) reply_args_text(r, "null");
    r->has_item = false;
    r->one_value = true; /* the next key must be preceded by a comma */
}

static void close_bracket(fkv_reply *r, char c) {
    if (r->depth == 0) {
        if (c != ')') {
            reply_call_fail(r);
            return;
        }
        end_py_value(r);
        end_py_call(r);
        return;
    }
    reply_args(r, in_py_dict(r) ? '}' : ']');
    r->depth--;
    r->comma = false;
    r->has_item = true;
}

static void next_item(fkv_reply *r, char c) {
    if (r->depth == 0) {
        if (c == ',') end_py_value(r);
        r->key = (reply_word){0};
        if (c == ',')
            r->state = &PY_KEY;
        else
            reply_call_fail(r);
        return;
    }
    r->comma = c == ',' && r->has_item;
    if (c == ':') reply_args_text(r, ": ");
    r->has_item = false;
}

static void py_value_byte(fkv_reply *r, char c) {
    const bool structure = c != 0 && strchr("[](){},:", c) != NULL;
    if (!structure && c != '"' && c != '\'') {
        if (!reply_is_space(c)) reply_word_add(&r->key, c);
        if (r->key.too_long) reply_call_fail(r);
        return;
    }
    end_py_word(r);
    if (r->phase != CALL_NAMED) return;
    if (!structure) {
        if (!begin_item(r)) return;
        r->quote = c;
        r->unescape = (reply_unescape){0};
        r->state = &PY_STRING;
        reply_args(r, '"');
    } else if (c == '[' || c == '(' || c == '{') {
        open_bracket(r, c);
    } else if (c == ']' || c == ')' || c == '}') {
        close_bracket(r, c);
    } else {
        next_item(r, c);
    }
}

static void py_string_byte(fkv_reply *r, char c) {
    if (c != r->quote || r->unescape.escape || r->unescape.n_hex > 0) {
        reply_unescape_byte(r, c, reply_args_quoted);
        return;
    }
    reply_args(r, '"');
    r->state = &PY_VALUE;
}

/* ---- keys and names ---- */

static void begin_py_value(fkv_reply *r) {
    if (r->key.n == 0 || r->key.too_long) {
        reply_call_fail(r);
        return;
    }
    reply_args_text(r, r->one_value ? ", \"" : "\"");
    for (size_t i = 0; i < r->key.n; i++) reply_args_quoted(r, r->key.bytes[i]);
    reply_args_text(r, "\": ");
    r->key = (reply_word){0};
    r->depth = 0;
    r->has_item = false;
    r->comma = false;
    r->state = &PY_VALUE;
}

static void py_key_byte(fkv_reply *r, char c) {
    if (reply_is_space(c)) return;
    if (c == '=')
        begin_py_value(r);
    else if (c == ')' && r->key.n == 0)
        end_py_call(r);
    else if (is_name_byte(c))
        reply_word_add(&r->key, c);
    else
        reply_call_fail(r);
}

static void py_name_byte(fkv_reply *r, char c) {
    if (is_name_byte(c)) {
        reply_word_add(&r->name, c);
        return;
    }
    if (c != '(') {
        reply_call_fail(r);
        return;
    }
    r->key = (reply_word){0};
    r->one_value = false;
    r->state = &PY_KEY;
    reply_call_named(r);
    if (r->phase == CALL_NAMED) reply_args(r, '{');
}

static void found_early_end(fkv_reply *r) {
    const bool named = r->phase == CALL_NAMED;
    reply_call_fail(r);
    if (named) reply_call_over(r);
}

static const reply_state PY_NAME = {.byte = py_name_byte, .markers = {{.text = "<|tool_call_end|>", .found = found_early_end}}};

static void py_calls_byte(fkv_reply *r, char c) {
    const char one[] = {c, 0};
    if (reply_is_space(c) || c == '[' || c == ']' || c == ',') return;
    if (!is_name_byte(c)) {
        if (r->phase == CALL_HELD)
            reply_call_fail(r);
        else
            reply_to_text(r, c);
        return;
    }
    if (r->phase != CALL_HELD) reply_call_open(r, one);
    reply_word_add(&r->name, c);
    r->state = &PY_NAME;
}

static void found_calls_end(fkv_reply *r) {
    if (r->phase == CALL_HELD)
        reply_call_fail(r);
    else
        reply_call_over(r);
}

static const reply_state PY_CALLS = {.byte = py_calls_byte, .markers = {{.text = "<|tool_call_end|>", .found = found_calls_end}}};
static const reply_state PY_KEY = {.byte = py_key_byte, .markers = {{.text = "<|tool_call_end|>", .found = found_early_end}}};
static const reply_state PY_VALUE = {.byte = py_value_byte, .markers = {{.text = "<|tool_call_end|>", .found = found_early_end}}};
static const reply_state PY_STRING = {.byte = py_string_byte};

void reply_found_pythonic(fkv_reply *r) {
    reply_call_open(r, "<|tool_call_start|>");
    r->state = &PY_CALLS;
}
