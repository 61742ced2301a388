/* What the parser of replies is made of. A reply is read byte by byte, so its events cannot depend on how it was cut into pieces.
 *
 * A state names the markers that it looks for and takes every byte that belongs to none. From the marker that opens a tool call
 * until the call's name is known its bytes are held: what turns out to be no call is given back as text.
 *
 *   n_raw <= REPLY_HELD, n_args <= REPLY_HELD, n_hold < REPLY_MARKER: all memory is taken by fkv_reply_start().
 */
#ifndef FKV_REPLY_PARTS_H
#define FKV_REPLY_PARTS_H

#include "../files/weights.h"

#include <flatkv/model.h>
#include <jansson.h>

enum {
    REPLY_HELD = 32768,
    REPLY_MARKER = 32,
    REPLY_NAME = 128,
    REPLY_SPACE = 64,
    REPLY_OUT = 512,
    REPLY_MARKERS = 6,
    REPLY_DEPTH = 64
};

typedef struct reply_marker {
    const char *text;
    void (*found)(fkv_reply *r);
    bool first_only; /* counts before any text */
} reply_marker;

typedef struct reply_state {
    void (*byte)(fkv_reply *r, char c);
    reply_marker markers[REPLY_MARKERS]; /* up to the first without text */
} reply_state;

/* A name or a key that is read. */
typedef struct reply_word {
    char bytes[REPLY_NAME];
    size_t n;
    bool too_long;
} reply_word;

/* The text of a JSON string, byte by byte. */
typedef struct reply_unescape {
    uint8_t n_hex; /* digits still to come */
    bool escape;
    uint32_t code;
    uint32_t high; /* the first half of a pair */
} reply_unescape;

/* Where a JSON value ends. Brackets and strings are counted, nothing else is checked. */
typedef struct reply_scan {
    uint32_t depth;
    bool started;
    bool in_string;
    bool escape;
    bool scalar;
} reply_scan;

typedef enum reply_call_phase { CALL_NONE, CALL_HELD, CALL_NAMED } reply_call_phase;

struct fkv_reply {
    const fkv_model *model; /* NULL: text is fed */
    fkv_reasoning_syntax reasoning;
    fkv_tool_syntax syntax;
    fkv_reply_fn on_event;
    void *user;
    json_t *tools; /* or NULL */

    const reply_state *state;
    reply_state text;  /* the state outside of everything, with the markers of this model */
    reply_state think; /* reasoning */
    char hold[REPLY_MARKER];
    size_t n_hold;
    bool began; /* there was text */
    bool ended;

    char stops[FKV_MAX_STOPS][FKV_MAX_STOP_BYTES + 1];
    uint32_t n_stops;
    char stop_hold[FKV_MAX_STOP_BYTES]; /* the beginning of one of them */
    size_t n_stop_hold;
    bool stopped;

    /* output: whole characters of one kind */
    fkv_reply_kind kind;
    char out[REPLY_OUT];
    size_t n_out;
    char character[4];
    uint8_t n_character;
    uint8_t needs; /* bytes of the character still to come */
    char space[REPLY_SPACE];
    size_t n_space;
    bool trim; /* space that comes now is dropped */

    /* the call that is read */
    reply_call_phase phase;
    uint32_t n_calls; /* named so far */
    reply_word name;
    reply_word key;
    reply_scan scan;
    reply_unescape unescape;
    int json_state;
    int json_role; /* what the value of the key is */
    bool bare;     /* not announced by a marker */
    bool has_args;
    bool one_value; /* the arguments are a value, held until it is known what */
    bool as_string;
    bool newline;
    bool in_key;
    bool has_item;    /* a value stands here */
    bool comma;       /* another item follows */
    char quote;       /* of a Python string */
    uint64_t objects; /* the brackets that are open, a bit each: 1 an object */
    uint32_t depth;
    char header[256]; /* of a harmony message */
    size_t n_header;
    size_t n_given; /* bytes of it that the prompt wrote */

    char *raw;
    size_t n_raw;
    char *args;
    size_t n_args;
};

/* The parser without a model. tools: an array of JSON or NULL, a reference is taken. */
typedef struct reply_setup {
    fkv_reasoning_syntax reasoning;
    fkv_tool_syntax syntax;
    json_t *tools;
    const char *prompt; /* its last bytes, with special tokens as text */
    size_t n_prompt;
    const char *const *stop;
    uint32_t n_stop;
    fkv_reply_fn on_event;
    void *user;
} reply_setup;

fkv_status fkv_reply_start(const reply_setup *setup, fkv_reply **reply);

/* What a model writes, from its template and its vocabulary. has_token(user, text): the text is one special token. */
fkv_reasoning_syntax fkv_reply_reasoning_of(fkv_bytes chat_template, bool (*has_token)(const void *user, const char *text),
                                            const void *user);
fkv_tool_syntax fkv_reply_tools_of(fkv_bytes chat_template, bool (*has_token)(const void *user, const char *text),
                                   const void *user);

/* ---- output (reply_out.c) */
void reply_put(fkv_reply *r, fkv_reply_kind kind, char c);
void reply_put_text(fkv_reply *r, fkv_reply_kind kind, const char *text);
void reply_put_spaced(fkv_reply *r, fkv_reply_kind kind, char c); /* space at the edges waits */
void reply_release_space(fkv_reply *r, fkv_reply_kind kind);
void reply_flush(fkv_reply *r);      /* whole characters */
void reply_put_end(fkv_reply *r);    /* and what is left of one */
void reply_part_ended(fkv_reply *r); /* space at its end is dropped, and at the beginning of the next */

/* ---- calls (reply_out.c) */
bool reply_is_space(char c);
const json_t *reply_tool(const fkv_reply *r); /* the one that the call names, or NULL */
void reply_word_add(reply_word *word, char c);
void reply_call_open(fkv_reply *r, const char *marker); /* from text: the marker is held */
void reply_raw_add(fkv_reply *r, const char *bytes, size_t n);
void reply_call_fail(fkv_reply *r);
void reply_call_named(fkv_reply *r);
void reply_call_end(fkv_reply *r, bool complete);
void reply_call_over(fkv_reply *r);    /* behind the closing tag */
void reply_args(fkv_reply *r, char c); /* waits for the name */
void reply_args_text(fkv_reply *r, const char *text);
void reply_args_quoted(fkv_reply *r, char c); /* inside a JSON string */
void reply_to_text(fkv_reply *r, char c);     /* the state outside, with this byte */

/* ---- JSON (reply_json.c) */
typedef enum reply_scan_answer {
    SCAN_MORE,
    SCAN_LAST,
    SCAN_BEFORE
} reply_scan_answer; /* the byte is the value's last, or behind it */
reply_scan_answer reply_scan_byte(reply_scan *scan, char c);
void reply_json_begin(fkv_reply *r); /* the state becomes: inside of a call's object */
void reply_unescape_byte(fkv_reply *r, char c, void (*sink)(fkv_reply *r, char c)); /* between the quotes of a string */
extern const reply_state REPLY_JSON_CALLS; /* objects one after another, or a list of them */
extern const reply_state REPLY_JSON_ARGS;  /* a value: the arguments of a call that has a name */

/* ---- arguments that are not JSON (reply_values.c) */
void reply_value_begin(fkv_reply *r); /* of the key */
void reply_value_byte(fkv_reply *r, char c);
void reply_value_end(fkv_reply *r);
void reply_values_end(fkv_reply *r);                        /* and of the call */
const char *reply_python_value(const char *text, size_t n); /* what JSON has for True, False and None; else NULL */

/* ---- calls by syntax (reply_calls.c) */
void reply_found_json_tag(fkv_reply *r);
void reply_found_function_tag(fkv_reply *r);
void reply_found_function(fkv_reply *r);
void reply_found_glm_tag(fkv_reply *r);
void reply_found_gemma_tag(fkv_reply *r);
void reply_found_mistral(fkv_reply *r);
void reply_found_python(fkv_reply *r);
bool reply_python_end(fkv_reply *r); /* true: code ended with the reply */

void reply_found_invoke_tag(fkv_reply *r);
void reply_found_kimi_section(fkv_reply *r);
void reply_found_kimi_call(fkv_reply *r);

/* ---- calls in Python's words (reply_pythonic.c) */
void reply_found_pythonic(fkv_reply *r);

/* ---- harmony (reply_harmony.c) */
extern const reply_state REPLY_HARMONY; /* the header of a message */
void reply_harmony_end(fkv_reply *r);

#endif
