/* Emits the events of the reply parser. Each event contains complete UTF-8 characters of one kind: text, reasoning or arguments.
 * The bytes of a tool call are held back until the name of the call is known. See reply_parts.h. */
#include "reply_parts.h"

#include <string.h>

/* ---- events ---- */

static void send_event(fkv_reply *r, const fkv_reply_event *event) { r->on_event(r->user, event); }

static uint32_t call_number(const fkv_reply *r) { return r->n_calls == 0 ? 0 : r->n_calls - 1; }

void reply_flush(fkv_reply *r) {
    if (r->n_out == 0) return;
    fkv_reply_event event = {.kind = r->kind, .call = call_number(r), .bytes = r->out, .n_bytes = r->n_out};
    if (r->kind != FKV_REPLY_ARGUMENTS) event.call = 0;
    r->n_out = 0;
    send_event(r, &event);
}

static void append_output(fkv_reply *r, const char *bytes, size_t n) {
    if (r->n_out + n > REPLY_OUT) reply_flush(r);
    memcpy(r->out + r->n_out, bytes, n);
    r->n_out += n;
}

static void drop_character(fkv_reply *r) {
    if (r->n_character > 0) append_output(r, "\xef\xbf\xbd", 3);
    r->n_character = 0;
    r->needs = 0;
}

void reply_put_end(fkv_reply *r) {
    drop_character(r);
    reply_flush(r);
}

/* Returns the number of continuation bytes that must follow the lead byte c, or -1 if c is not a lead byte. */
static int continuation_bytes(uint8_t c) {
    if (c < 0x80) return 0;
    if (c >= 0xc2 && c <= 0xdf) return 1;
    if (c >= 0xe0 && c <= 0xef) return 2;
    return c >= 0xf0 && c <= 0xf4 ? 3 : -1;
}

/* Returns whether the byte c may continue the current UTF-8 character. Overlong forms, surrogates and code points above U+10FFFF
 * are detected at the second byte. */
static bool may_follow(const fkv_reply *r, uint8_t c) {
    uint8_t first = (uint8_t)r->character[0];
    uint8_t least = 0x80;
    uint8_t most = 0xbf;
    if (r->n_character == 1 && first == 0xe0) least = 0xa0;
    if (r->n_character == 1 && first == 0xed) most = 0x9f;
    if (r->n_character == 1 && first == 0xf0) least = 0x90;
    if (r->n_character == 1 && first == 0xf4) most = 0x8f;
    return c >= least && c <= most;
}

void reply_put(fkv_reply *r, fkv_reply_kind kind, char c) {
    if (kind != r->kind) {
        reply_put_end(r);
        r->kind = kind;
    }
    if (r->needs > 0 && !may_follow(r, (uint8_t)c)) drop_character(r);
    if (r->needs == 0) {
        int n = continuation_bytes((uint8_t)c);
        r->character[0] = c;
        r->n_character = 1;
        if (n < 0) {
            drop_character(r);
            return;
        }
        r->needs = (uint8_t)n;
    } else {
        r->character[r->n_character++] = c;
        r->needs--;
    }
    if (r->needs > 0) return;
    append_output(r, r->character, r->n_character);
    r->n_character = 0;
}

void reply_put_text(fkv_reply *r, fkv_reply_kind kind, const char *text) {
    for (; *text != 0; text++) reply_put(r, kind, *text);
}

/* ---- white space around text, reasoning and tool calls ---- */

bool reply_is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

void reply_release_space(fkv_reply *r, fkv_reply_kind kind) {
    for (size_t i = 0; i < r->n_space; i++) reply_put(r, kind, r->space[i]);
    r->n_space = 0;
}

void reply_put_spaced(fkv_reply *r, fkv_reply_kind kind, char c) {
    if (reply_is_space(c)) {
        if (r->trim) return;
        if (r->n_space == REPLY_SPACE) reply_release_space(r, kind);
        r->space[r->n_space++] = c;
        return;
    }
    r->trim = false;
    reply_release_space(r, kind);
    reply_put(r, kind, c);
}

void reply_part_ended(fkv_reply *r) {
    r->n_space = 0;
    r->trim = true;
}

/* ---- calls ---- */

static const json_t *tool_function(const json_t *tool) {
    const json_t *function = json_object_get(tool, "function");
    return function != NULL ? function : tool;
}

const json_t *reply_tool(const fkv_reply *r) {
    for (size_t i = 0; i < json_array_size(r->tools); i++) {
        const json_t *function = tool_function(json_array_get(r->tools, i));
        const char *name = json_string_value(json_object_get(function, "name"));
        if (name != NULL && strcmp(name, r->name.n > 0 ? r->name.bytes : "") == 0) return function;
    }
    return NULL;
}

void reply_word_add(reply_word *word, char c) {
    word->too_long = word->too_long || word->n + 1 >= REPLY_NAME;
    if (word->too_long) return;
    word->bytes[word->n++] = c;
    word->bytes[word->n] = 0;
}

void reply_raw_add(fkv_reply *r, const char *bytes, size_t n) {
    if (r->phase != CALL_HELD) return;
    if (r->n_raw + n > REPLY_HELD) {
        reply_call_fail(r);
        for (size_t i = 0; i < n; i++) reply_put(r, FKV_REPLY_TEXT, bytes[i]);
        return;
    }
    memcpy(r->raw + r->n_raw, bytes, n);
    r->n_raw += n;
}

void reply_call_open(fkv_reply *r, const char *marker) {
    r->phase = CALL_HELD;
    r->n_raw = 0;
    r->n_args = 0;
    r->name = (reply_word){0};
    r->key = (reply_word){0};
    r->bare = false;
    r->has_args = false;
    reply_raw_add(r, r->space, r->n_space);
    r->n_space = 0;
    reply_raw_add(r, marker, strlen(marker));
}

void reply_call_fail(fkv_reply *r) {
    if (r->phase == CALL_NAMED) {
        reply_call_end(r, false);
    } else if (r->phase == CALL_HELD) {
        for (size_t i = 0; i < r->n_raw; i++) reply_put(r, FKV_REPLY_TEXT, r->raw[i]);
        r->trim = false;
        r->began = true;
    }
    r->phase = CALL_NONE;
    r->n_raw = 0;
    r->state = &r->text;
}

void reply_call_named(fkv_reply *r) {
    while (r->name.n > 0 && reply_is_space(r->name.bytes[r->name.n - 1])) r->name.bytes[--r->name.n] = 0;
    if (r->name.n == 0 || r->name.too_long || (r->bare && reply_tool(r) == NULL)) {
        reply_call_fail(r);
        return;
    }
    reply_put_end(r);
    r->phase = CALL_NAMED;
    r->began = true;
    r->n_calls++;
    fkv_reply_event event = {.kind = FKV_REPLY_CALL, .call = call_number(r), .bytes = r->name.bytes, .n_bytes = r->name.n};
    send_event(r, &event);
    for (size_t i = 0; i < r->n_args; i++) reply_put(r, FKV_REPLY_ARGUMENTS, r->args[i]);
    r->n_args = 0;
}

void reply_call_end(fkv_reply *r, bool complete) {
    reply_put_end(r);
    fkv_reply_event event = {.kind = FKV_REPLY_CALL_END, .call = call_number(r), .complete = complete};
    send_event(r, &event);
    r->phase = CALL_NONE;
    r->n_args = 0;
    reply_part_ended(r);
}

void reply_call_over(fkv_reply *r) {
    reply_part_ended(r);
    r->state = &r->text;
}

void reply_args(fkv_reply *r, char c) {
    r->has_args = true;
    if (r->phase == CALL_NAMED)
        reply_put(r, FKV_REPLY_ARGUMENTS, c);
    else if (r->n_args < REPLY_HELD) /* always true, because `raw` has the same capacity and overflows first */
        r->args[r->n_args++] = c;
}

void reply_args_text(fkv_reply *r, const char *text) {
    for (; *text != 0; text++) reply_args(r, *text);
}

void reply_args_quoted(fkv_reply *r, char c) {
    static const char digits[] = "0123456789abcdef";
    uint8_t byte = (uint8_t)c;
    if (c == '"' || c == '\\') {
        reply_args(r, '\\');
        reply_args(r, c);
    } else if (c == '\n') {
        reply_args_text(r, "\\n");
    } else if (c == '\t') {
        reply_args_text(r, "\\t");
    } else if (byte < 0x20) {
        reply_args_text(r, "\\u00");
        reply_args(r, digits[byte >> 4]);
        reply_args(r, digits[byte & 15]);
    } else {
        reply_args(r, c);
    }
}

void reply_to_text(fkv_reply *r, char c) {
    r->state = &r->text;
    r->text.byte(r, c);
}
