/* Internals of the reply parser. A reply is parsed byte by byte, so the events do not depend on how the caller divides the reply
 * between fkv_reply_feed() calls.
 *
 * Each parser state has a list of markers that it recognizes, and a function that processes every byte that is not part of a
 * marker. The bytes from the opening marker of a tool call up to the name of the call are held back. If no valid call follows,
 * these bytes are emitted as text.
 *
 *   All memory is allocated by fkv_reply_start(). Invariants: n_raw <= REPLY_HELD, n_args <= REPLY_HELD and n_hold <
 * REPLY_MARKER.
 */
#ifndef FKV_REPLY_PARTS_H
#define FKV_REPLY_PARTS_H

#include "../tokenizer/tokenizer.h"

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
    bool first_only; /* true if the marker is recognized only before any reply text */
} reply_marker;

typedef struct reply_state {
    void (*byte)(fkv_reply *r, char c);
    reply_marker markers[REPLY_MARKERS]; /* markers that the state recognizes; ends with an entry whose text is NULL */
} reply_state;

/* A name or key that is being parsed. */
typedef struct reply_word {
    char bytes[REPLY_NAME];
    size_t n;
    bool too_long;
} reply_word;

/* State of a JSON string that is unescaped byte by byte. */
typedef struct reply_unescape {
    uint8_t n_hex; /* number of hexadecimal digits still missing */
    bool escape;
    uint32_t code;
    uint32_t high; /* high surrogate whose low surrogate has not arrived yet; 0 if there is none */
} reply_unescape;

/* State of the search for the end of a JSON value. Only brackets and strings are tracked; the syntax is not validated. */
typedef struct reply_scan {
    uint32_t depth;
    bool started;
    bool in_string;
    bool escape;
    bool scalar;
} reply_scan;

typedef enum reply_call_phase { CALL_NONE, CALL_HELD, CALL_NAMED } reply_call_phase;

struct fkv_reply {
    const fkv_tokenizer *tokenizer; /* used by fkv_reply_token(); NULL if the caller feeds only text */
    fkv_reasoning_syntax reasoning;
    fkv_tool_syntax syntax;
    fkv_reply_fn on_event;
    void *user;
    json_t *tools; /* or NULL */

    const reply_state *state;
    reply_state text;  /* parser state outside of reasoning and tool calls; recognizes the markers of this model */
    reply_state think; /* reasoning */
    char hold[REPLY_MARKER];
    size_t n_hold;
    bool began; /* true after reply text or a tool call has been emitted */
    bool ended;

    char stops[FKV_MAX_STOPS][FKV_MAX_STOP_BYTES + 1];
    uint32_t n_stops;
    char stop_hold[FKV_MAX_STOP_BYTES]; /* bytes held back because they are a prefix of a stop string */
    size_t n_stop_hold;
    bool stopped;

    /* pending output, which consists of complete UTF-8 characters of one event kind */
    fkv_reply_kind kind;
    char out[REPLY_OUT];
    size_t n_out;
    char character[4];
    uint8_t n_character;
    uint8_t needs; /* number of bytes still missing from `character` */
    char space[REPLY_SPACE];
    size_t n_space;
    bool trim; /* true if white space is dropped until the next other character arrives */

    /* current tool call */
    reply_call_phase phase;
    uint32_t n_calls; /* number of calls whose name has been emitted */
    reply_word name;
    reply_word key;
    reply_scan scan;
    reply_unescape unescape;
    int json_state;
    int json_role; /* role of the current JSON value, such as name or arguments */
    bool bare;     /* true if the call started without a marker */
    bool has_args;
    bool one_value; /* true after an argument value has started; details depend on the syntax */
    bool as_string;
    bool newline;
    bool in_key;
    bool has_item;    /* true if the current list item or dict entry already has a value */
    bool comma;       /* true if a comma must be written before the next item */
    char quote;       /* delimiter of the current Python string */
    uint64_t objects; /* one bit per open bracket: 1 for an object bracket, 0 for a list bracket */
    uint32_t depth;
    char header[256]; /* header of a harmony message */
    size_t n_header;
    size_t n_given; /* number of bytes at the start of the header that the prompt already contains */

    char *raw;
    size_t n_raw;
    char *args;
    size_t n_args;
};

/* Parameters of a parser without a tokenizer. tools: JSON array of tools, or NULL if there are none. The parser increments the
 * reference count of the array. */
typedef struct reply_setup {
    fkv_reasoning_syntax reasoning;
    fkv_tool_syntax syntax;
    json_t *tools;
    const char *prompt; /* last bytes of the prompt, in which special tokens are written as text */
    size_t n_prompt;
    const char *const *stop;
    uint32_t n_stop;
    fkv_reply_fn on_event;
    void *user;
} reply_setup;

fkv_status fkv_reply_start(const reply_setup *setup, fkv_reply **reply);

/* Determine the syntax from the chat template or, if the template does not determine it, from the vocabulary. has_token(user,
 * text) returns whether the text is a single special token. */
fkv_reasoning_syntax fkv_reply_reasoning_of(fkv_bytes chat_template, bool (*has_token)(const void *user, const char *text),
                                            const void *user);
fkv_tool_syntax fkv_reply_tools_of(fkv_bytes chat_template, bool (*has_token)(const void *user, const char *text),
                                   const void *user);

/* Returns the reasoning and tool call syntaxes that the chat template or the vocabulary implies. */
fkv_reply_syntax fkv_reply_detect_syntax(const fkv_tokenizer *tokenizer, fkv_bytes chat_template);

/* Implements fkv_reply_open() of flatkv/model.h for a tokenizer and a chat template instead of a model. No argument may be NULL.
 * The tokenizer must outlive the parser. */
fkv_status fkv_reply_create(const fkv_tokenizer *tokenizer, fkv_bytes chat_template, const fkv_reply_config *config,
                            fkv_reply **reply);

/* ---- output (reply_out.c) */
void reply_put(fkv_reply *r, fkv_reply_kind kind, char c);
void reply_put_text(fkv_reply *r, fkv_reply_kind kind, const char *text);
/* Adds c. White space is held back: it is added when more text of this kind follows, and dropped if none does. */
void reply_put_spaced(fkv_reply *r, fkv_reply_kind kind, char c);
void reply_release_space(fkv_reply *r, fkv_reply_kind kind);
void reply_flush(fkv_reply *r);      /* emits complete characters */
void reply_put_end(fkv_reply *r);    /* emits all pending output, with U+FFFD for an incomplete character */
void reply_part_ended(fkv_reply *r); /* drops the white space between text, reasoning and tool calls */

/* ---- calls (reply_out.c) */
bool reply_is_space(char c);
const json_t *reply_tool(const fkv_reply *r); /* returns the schema of the called function; NULL if the function is unknown */
void reply_word_add(reply_word *word, char c);
void reply_call_open(fkv_reply *r, const char *marker); /* starts a call and holds back its marker */
void reply_raw_add(fkv_reply *r, const char *bytes, size_t n);
void reply_call_fail(fkv_reply *r);
void reply_call_named(fkv_reply *r);
void reply_call_end(fkv_reply *r, bool complete);
void reply_call_over(fkv_reply *r);    /* must be called after the closing tag of a call */
void reply_args(fkv_reply *r, char c); /* adds a byte to the arguments, which are held back until the name is known */
void reply_args_text(fkv_reply *r, const char *text);
void reply_args_quoted(fkv_reply *r, char c); /* adds a byte to the arguments, escaped for a JSON string */
void reply_to_text(fkv_reply *r, char c);     /* switches to the text state and processes c */

/* ---- JSON (reply_json.c) */
typedef enum reply_scan_answer {
    SCAN_MORE,
    SCAN_LAST,
    SCAN_BEFORE
} reply_scan_answer; /* SCAN_LAST: the byte is the last byte of the value; SCAN_BEFORE: the value ended before the byte */
reply_scan_answer reply_scan_byte(reply_scan *scan, char c);
void reply_json_begin(fkv_reply *r);                                                /* starts parsing the JSON object of a call */
void reply_unescape_byte(fkv_reply *r, char c, void (*sink)(fkv_reply *r, char c)); /* unescapes byte c of a JSON string */
extern const reply_state REPLY_JSON_CALLS; /* parses a sequence or list of call objects */
extern const reply_state REPLY_JSON_ARGS;  /* parses the arguments of a named call */

/* ---- arguments that are not JSON (reply_values.c) */
void reply_value_begin(fkv_reply *r); /* writes the key and starts its value */
void reply_value_byte(fkv_reply *r, char c);
void reply_value_end(fkv_reply *r);
void reply_values_end(fkv_reply *r); /* ends the arguments and the call */
const char *reply_python_value(const char *text,
                               size_t n); /* returns the JSON literal for True, False or None, or NULL for any other text */

/* ---- calls by syntax (reply_calls.c) */
void reply_found_json_tag(fkv_reply *r);
void reply_found_function_tag(fkv_reply *r);
void reply_found_function(fkv_reply *r);
void reply_found_glm_tag(fkv_reply *r);
void reply_found_gemma_tag(fkv_reply *r);
void reply_found_mistral(fkv_reply *r);
void reply_found_python(fkv_reply *r);
bool reply_python_end(fkv_reply *r); /* called at the end of the reply; returns true if the reply ended inside Python code */

void reply_found_invoke_tag(fkv_reply *r);
void reply_found_kimi_section(fkv_reply *r);
void reply_found_kimi_call(fkv_reply *r);

/* ---- calls in Python syntax (reply_pythonic.c) */
void reply_found_pythonic(fkv_reply *r);

/* ---- harmony (reply_harmony.c) */
extern const reply_state REPLY_HARMONY; /* message header */
void reply_harmony_end(fkv_reply *r);

#endif
