/* Parses tool calls in JSON: one or more objects {"name": ..., "arguments": ...}, or a list of such objects. Arguments are
 * forwarded byte by byte. If the arguments are a string that contains JSON, its content is forwarded without quotes and escapes.
 * See reply_parts.h. */
#include "reply_parts.h"

#include <string.h>

/* ---- end of a value ---- */

static reply_scan_answer scan_string(reply_scan *scan, char c) {
    if (scan->escape)
        scan->escape = false;
    else if (c == '\\')
        scan->escape = true;
    else if (c == '"')
        scan->in_string = false;
    return !scan->in_string && scan->depth == 0 ? SCAN_LAST : SCAN_MORE;
}

reply_scan_answer reply_scan_byte(reply_scan *scan, char c) {
    if (scan->in_string) return scan_string(scan, c);
    bool closes = c == '}' || c == ']';
    if (scan->depth == 0 && scan->started && (closes || c == ',' || reply_is_space(c))) return SCAN_BEFORE;
    if (!scan->started) scan->scalar = c != '{' && c != '[' && c != '"';
    scan->started = true;
    if (c == '"') scan->in_string = true;
    if (c == '{' || c == '[') scan->depth++;
    if (closes && scan->depth > 0) scan->depth--;
    return closes && scan->depth == 0 ? SCAN_LAST : SCAN_MORE;
}

/* ---- string unescaping ---- */

typedef void (*byte_sink)(fkv_reply *r, char c);

static void put_code(fkv_reply *r, uint32_t code, byte_sink sink) {
    if (code < 0x80) {
        sink(r, (char)code);
        return;
    }
    if (code >= 0xd800 && code < 0xe000) code = 0xfffd;
    int n = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint8_t heads[] = {0, 0xc0, 0xe0, 0xf0};
    sink(r, (char)(heads[n] | code >> (6 * n)));
    while (n-- > 0) sink(r, (char)(0x80 | (code >> (6 * n) & 0x3f)));
}

static void put_unit(fkv_reply *r, uint32_t unit, byte_sink sink) {
    reply_unescape *u = &r->unescape;
    bool second = unit >= 0xdc00 && unit < 0xe000;
    if (u->high != 0) {
        uint32_t high = u->high;
        u->high = 0;
        if (second) {
            put_code(r, 0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00), sink);
            return;
        }
        put_code(r, high, sink);
    }
    if (unit >= 0xd800 && unit < 0xdc00)
        u->high = unit;
    else
        put_code(r, unit, sink);
}

static uint32_t hex_of(char c) {
    if (c >= '0' && c <= '9') return (uint32_t)(c - '0');
    if (c >= 'a' && c <= 'f') return (uint32_t)(c - 'a' + 10);
    return c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10) : 16;
}

void reply_unescape_byte(fkv_reply *r, char c, byte_sink sink) {
    reply_unescape *u = &r->unescape;
    static const char names[] = "ntrbf";
    static const char escaped[] = "\n\t\r\b\f";
    if (u->n_hex > 0) {
        u->code = u->code << 4 | (hex_of(c) & 15);
        if (--u->n_hex == 0) put_unit(r, u->code, sink);
        return;
    }
    if (!u->escape && c == '\\') {
        u->escape = true;
        return;
    }
    if (u->escape && c == 'u') {
        *u = (reply_unescape){.n_hex = 4, .high = u->high};
        return;
    }
    if (u->high != 0) put_unit(r, 0xfffd, sink);
    const char *name = u->escape ? strchr(names, c) : NULL;
    u->escape = false;
    sink(r, name != NULL && *name != 0 ? escaped[name - names] : c);
}

/* ---- call objects ---- */

enum { AT_KEY, IN_KEY, AT_COLON, AT_VALUE, IN_VALUE, AFTER_VALUE };
enum { ROLE_OTHER, ROLE_NAME, ROLE_ARGS, ROLE_ARGS_TEXT };

static void add_to_key(fkv_reply *r, char c) { reply_word_add(&r->key, c); }
static void add_to_name(fkv_reply *r, char c) { reply_word_add(&r->name, c); }

static int role_of(const fkv_reply *r) {
    const char *key = r->key.n > 0 ? r->key.bytes : "";
    if (strcmp(key, "name") == 0) return ROLE_NAME;
    bool arguments = strcmp(key, "arguments") == 0 || strcmp(key, "parameters") == 0;
    return arguments && !r->has_args ? ROLE_ARGS : ROLE_OTHER;
}

/* Processes the first byte of the value that belongs to a key. */
static void begin_json_value(fkv_reply *r, char c) {
    r->json_role = role_of(r);
    r->json_state = IN_VALUE;
    r->scan = (reply_scan){0};
    r->unescape = (reply_unescape){0};
    if (r->json_role == ROLE_NAME && (c != '"' || r->name.n > 0)) {
        reply_call_fail(r);
        return;
    }
    if (r->json_role == ROLE_ARGS && c == '"') {
        r->json_role = ROLE_ARGS_TEXT;
        r->has_args = true;
    }
    (void)reply_scan_byte(&r->scan, c);
    if (r->json_role == ROLE_ARGS) reply_args(r, c);
}

static void end_object(fkv_reply *r) {
    if (r->phase != CALL_NAMED) {
        reply_call_fail(r);
        return;
    }
    if (!r->has_args) reply_args_text(r, "{}");
    reply_call_end(r, true);
    r->state = &REPLY_JSON_CALLS;
}

static void after_value(fkv_reply *r, char c) {
    if (c == '}')
        end_object(r);
    else if (c == ',')
        r->json_state = AT_KEY;
    else if (!reply_is_space(c))
        reply_call_fail(r);
}

static void json_value_byte(fkv_reply *r, char c) {
    reply_scan_answer answer = reply_scan_byte(&r->scan, c);
    if (answer == SCAN_BEFORE) {
        r->json_state = AFTER_VALUE;
        after_value(r, c);
        return;
    }
    bool last = answer == SCAN_LAST;
    if (r->json_role == ROLE_ARGS) reply_args(r, c);
    if (r->json_role == ROLE_NAME && !last) reply_unescape_byte(r, c, add_to_name);
    if (r->json_role == ROLE_ARGS_TEXT && !last) reply_unescape_byte(r, c, reply_args);
    if (!last) return;
    r->json_state = AFTER_VALUE;
    if (r->json_role == ROLE_NAME) reply_call_named(r);
}

/* Processes a byte of an object key, which is a JSON string. */
static void json_key_byte(fkv_reply *r, char c) {
    if (reply_scan_byte(&r->scan, c) == SCAN_LAST)
        r->json_state = AT_COLON;
    else
        reply_unescape_byte(r, c, add_to_key);
}

static void begin_json_key(fkv_reply *r, char c) {
    r->key = (reply_word){0};
    r->unescape = (reply_unescape){0};
    r->scan = (reply_scan){0};
    (void)reply_scan_byte(&r->scan, c);
    r->json_state = IN_KEY;
}

static void json_object_byte(fkv_reply *r, char c) {
    bool space = reply_is_space(c);
    switch (r->json_state) {
    case AT_KEY:
        if (c == '"')
            begin_json_key(r, c);
        else if (c == '}')
            end_object(r);
        else if (!space)
            reply_call_fail(r);
        return;
    case IN_KEY: json_key_byte(r, c); return;
    case AT_COLON:
        if (c == ':')
            r->json_state = AT_VALUE;
        else if (!space)
            reply_call_fail(r);
        return;
    case AT_VALUE:
        if (!space) begin_json_value(r, c);
        return;
    case IN_VALUE: json_value_byte(r, c); return;
    default: after_value(r, c);
    }
}

static const reply_state IN_OBJECT = {.byte = json_object_byte};

void reply_json_begin(fkv_reply *r) {
    r->json_state = AT_KEY;
    r->state = &IN_OBJECT;
}

/* ---- sequences of calls ---- */

static void found_tool_call_end(fkv_reply *r) {
    if (r->phase != CALL_NONE) { /* an empty tag */
        reply_call_fail(r);
        return;
    }
    reply_call_over(r);
}

/* Processes a byte between two call objects. The objects may be in a list and may be separated by commas or semicolons. */
static void between_objects(fkv_reply *r, char c) {
    if (c == '{') {
        bool bare = r->bare;
        if (r->phase != CALL_HELD) reply_call_open(r, "{");
        r->bare = bare;
        reply_json_begin(r);
        return;
    }
    if (reply_is_space(c) || c == '[' || c == ']' || c == ',' || c == ';') return;
    if (r->phase == CALL_HELD)
        reply_call_fail(r);
    else
        reply_to_text(r, c);
}

const reply_state REPLY_JSON_CALLS = {.byte = between_objects,
                                      .markers = {{.text = "</tool_call>", .found = found_tool_call_end}}};

/* ---- arguments of a named call ---- */

static void json_args_byte(fkv_reply *r, char c) {
    if (!r->scan.started && reply_is_space(c)) return;
    reply_scan_answer answer = reply_scan_byte(&r->scan, c);
    if (answer != SCAN_BEFORE) reply_args(r, c);
    if (answer == SCAN_MORE) return;
    reply_call_end(r, true);
    if (answer == SCAN_BEFORE && !reply_is_space(c))
        reply_to_text(r, c);
    else
        r->state = &r->text;
}

const reply_state REPLY_JSON_ARGS = {.byte = json_args_byte};
