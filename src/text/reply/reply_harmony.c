/* Parses the harmony format (gpt-oss). A reply is a sequence of messages of the form <|start|>ROLE to=RECIPIENT<|channel|>CHANNEL
 * <|constrain|>json<|message|>...<|end|>. A message with a recipient is a tool call. The channel of any other message determines
 * whether the message is reasoning or text. See reply_parts.h. */
#include "reply_parts.h"

#include <string.h>

enum { IS_CHANNEL = 1, IS_CONSTRAINT = 2 }; /* bytes that replace the markers <|channel|> and <|constrain|> in `header` */

static const reply_state BODY_TEXT;
static const reply_state BODY_REASONING;
static const reply_state BODY_CALL;

/* Emits the bytes of a header as text, because the reply is not in harmony format. */
static void header_is_text(fkv_reply *r) {
    bool marked = memchr(r->header, IS_CHANNEL, r->n_header) != NULL || memchr(r->header, IS_CONSTRAINT, r->n_header) != NULL;
    for (size_t i = r->n_given; i < r->n_header && !marked; i++) reply_put(r, FKV_REPLY_TEXT, r->header[i]);
    r->n_header = 0;
    r->n_given = 0;
}

static void header_byte(fkv_reply *r, char c) {
    if (r->n_header + 1 < sizeof r->header) {
        r->header[r->n_header++] = c;
        r->header[r->n_header] = 0;
        return;
    }
    header_is_text(r);
    r->state = &BODY_TEXT;
    reply_put(r, FKV_REPLY_TEXT, c);
}

static void found_start(fkv_reply *r) {
    if (r->phase == CALL_NAMED) reply_call_end(r, r->scan.started && r->scan.depth == 0 && !r->scan.in_string);
    reply_part_ended(r);
    r->n_header = 0;
    r->n_given = 0;
    r->header[0] = 0;
    r->state = &REPLY_HARMONY;
}

static void found_channel(fkv_reply *r) { header_byte(r, IS_CHANNEL); }
static void found_constraint(fkv_reply *r) { header_byte(r, IS_CONSTRAINT); }

static void found_channel_in_body(fkv_reply *r) {
    found_start(r);
    found_channel(r);
}

/* Returns the word that follows `before` in the header, with its length in *n, or NULL if there is no such word. */
static const char *header_word(const fkv_reply *r, const char *before, size_t *n) {
    const char *at = r->n_header > 0 ? strstr(r->header, before) : NULL;
    *n = 0;
    if (at == NULL) return NULL;
    at += strlen(before);
    while ((unsigned char)at[*n] > ' ') ++*n;
    return *n > 0 ? at : NULL;
}

static void begin_harmony_call(fkv_reply *r, const char *recipient, size_t n) {
    static const char functions[] = "functions.";
    size_t skip = strlen(functions);
    if (n > skip && memcmp(recipient, functions, skip) == 0) {
        recipient += skip;
        n -= skip;
    }
    r->n_raw = 0;
    reply_call_open(r, "");
    for (size_t i = 0; i < n; i++) reply_word_add(&r->name, recipient[i]);
    r->scan = (reply_scan){0};
    reply_call_named(r);
    r->state = r->phase == CALL_NAMED ? &BODY_CALL : &BODY_TEXT; /* a message with an invalid name is treated as text */
}

static void found_message(fkv_reply *r) {
    size_t n = 0;
    const char *recipient = header_word(r, "to=", &n);
    r->trim = true;
    r->state = &BODY_TEXT;
    if (recipient != NULL) {
        begin_harmony_call(r, recipient, n);
        return;
    }
    const char *channel = header_word(r, "\x01", &n);
    if (channel != NULL && n == strlen("analysis") && memcmp(channel, "analysis", n) == 0) r->state = &BODY_REASONING;
}

static void harmony_text_byte(fkv_reply *r, char c) { reply_put_spaced(r, FKV_REPLY_TEXT, c); }
static void harmony_reasoning_byte(fkv_reply *r, char c) { reply_put_spaced(r, FKV_REPLY_REASONING, c); }

static void harmony_call_byte(fkv_reply *r, char c) {
    if (!r->scan.started && reply_is_space(c)) return;
    (void)reply_scan_byte(&r->scan, c);
    reply_args(r, c);
}

#define BODY_MARKERS                                                                                                             \
    {                                                                                                                            \
        {.text = "<|end|>", .found = found_start},                                                                               \
        {.text = "<|call|>", .found = found_start},                                                                              \
        {.text = "<|return|>", .found = found_start},                                                                            \
        {.text = "<|start|>", .found = found_start},                                                                             \
        {.text = "<|channel|>", .found = found_channel_in_body},                                                                 \
    }

static const reply_state BODY_TEXT = {.byte = harmony_text_byte, .markers = BODY_MARKERS};
static const reply_state BODY_REASONING = {.byte = harmony_reasoning_byte, .markers = BODY_MARKERS};
static const reply_state BODY_CALL = {.byte = harmony_call_byte, .markers = BODY_MARKERS};

const reply_state REPLY_HARMONY = {.byte = header_byte,
                                   .markers = {{.text = "<|channel|>", .found = found_channel},
                                               {.text = "<|constrain|>", .found = found_constraint},
                                               {.text = "<|message|>", .found = found_message},
                                               {.text = "<|start|>", .found = found_start},
                                               {.text = "<|end|>", .found = found_start}}};

void reply_harmony_end(fkv_reply *r) {
    if (r->state == &REPLY_HARMONY) header_is_text(r);
    if (r->state == &BODY_CALL && r->phase == CALL_NAMED)
        reply_call_end(r, r->scan.started && r->scan.depth == 0 && !r->scan.in_string);
}
