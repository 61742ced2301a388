/* Parser of streamed replies: separates text, reasoning and tool calls. This file contains the loop over bytes and markers, and
 * the tables of supported syntaxes. See reply_parts.h.
 */
#include "reply_parts.h"

#include <stdlib.h>
#include <string.h>

/* ---- syntax tables ---- */

typedef struct reasoning_row {
    fkv_reasoning_syntax syntax;
    const char *sign; /* the model uses this syntax if the chat template contains this text or the vocabulary has it as a token */
    const char *open;
    const char *close;
} reasoning_row;

static const reasoning_row REASONING[] = {
    {FKV_REASONING_HARMONY, "<|channel|>", NULL, NULL},
    {FKV_REASONING_CHANNEL, "<|channel>", "<|channel>thought", "<channel|>"},
    {FKV_REASONING_BRACKETS, "[THINK]", "[THINK]", "[/THINK]"},
    {FKV_REASONING_THINK, "<think>", "<think>", "</think>"},
    {FKV_REASONING_THINK, "</think>", "<think>", "</think>"},
};
enum { N_REASONING = sizeof REASONING / sizeof REASONING[0] };

typedef struct tool_row {
    fkv_tool_syntax syntax;
    const char *sign;
    reply_marker markers[3];
} tool_row;

static const tool_row TOOLS[] = {
    {FKV_TOOLS_HARMONY, "<|channel|>", {{0}}},
    {FKV_TOOLS_GEMMA, "<|tool_call>", {{.text = "<|tool_call>", .found = reply_found_gemma_tag}}},
    {FKV_TOOLS_KIMI,
     "<|tool_calls_section_begin|>",
     {{.text = "<|tool_calls_section_begin|>", .found = reply_found_kimi_section},
      {.text = "<|tool_call_begin|>", .found = reply_found_kimi_call}}},
    {FKV_TOOLS_PYTHONIC, "<|tool_call_start|>", {{.text = "<|tool_call_start|>", .found = reply_found_pythonic}}},
    {FKV_TOOLS_INVOKE, "<minimax:tool_call>", {{.text = "<minimax:tool_call>", .found = reply_found_invoke_tag}}},
    {FKV_TOOLS_PARAMETERS,
     "<parameter=",
     {{.text = "<tool_call>", .found = reply_found_function_tag}, {.text = "<function=", .found = reply_found_function}}},
    {FKV_TOOLS_ARG_KEYS, "<arg_key>", {{.text = "<tool_call>", .found = reply_found_glm_tag}}},
    {FKV_TOOLS_MISTRAL, "[TOOL_CALLS]", {{.text = "[TOOL_CALLS]", .found = reply_found_mistral}}},
    {FKV_TOOLS_JSON, "<tool_call>", {{.text = "<tool_call>", .found = reply_found_json_tag}}},
    {FKV_TOOLS_LLAMA, "<|python_tag|>", {{.text = "<|python_tag|>", .found = reply_found_python}}},
};
enum { N_TOOLS = sizeof TOOLS / sizeof TOOLS[0] };

static bool template_contains(fkv_bytes text, const char *sign) {
    return text.size > 0 && memmem(text.data, text.size, sign, strlen(sign)) != NULL;
}

fkv_reasoning_syntax fkv_reply_reasoning_of(fkv_bytes chat_template, bool (*has_token)(const void *user, const char *text),
                                            const void *user) {
    for (int i = 0; i < N_REASONING; i++)
        if (template_contains(chat_template, REASONING[i].sign)) return REASONING[i].syntax;
    for (int i = 0; i < N_REASONING; i++)
        if (has_token(user, REASONING[i].sign)) return REASONING[i].syntax;
    return FKV_REASONING_NONE;
}

fkv_tool_syntax fkv_reply_tools_of(fkv_bytes chat_template, bool (*has_token)(const void *user, const char *text),
                                   const void *user) {
    for (int i = 0; i < N_TOOLS; i++)
        if (template_contains(chat_template, TOOLS[i].sign)) return TOOLS[i].syntax;
    for (int i = 0; i < N_TOOLS; i++)
        if (has_token(user, TOOLS[i].sign)) return TOOLS[i].syntax;
    return FKV_TOOLS_NONE;
}

/* ---- text and reasoning ---- */

/* Returns whether a tool call may start without a tag. Small models sometimes omit the tag, and the Llama syntax has no tag. */
static bool may_be_bare(const fkv_reply *r) {
    return r->tools != NULL && (r->syntax == FKV_TOOLS_LLAMA || r->syntax == FKV_TOOLS_JSON);
}

static void outer_text_byte(fkv_reply *r, char c) {
    bool space = reply_is_space(c);
    if (!r->began && c == '{' && may_be_bare(r)) {
        reply_call_open(r, "{");
        r->bare = true;
        reply_json_begin(r);
        return;
    }
    if (!space) r->began = true;
    reply_put_spaced(r, FKV_REPLY_TEXT, c);
}

static void outer_think_byte(fkv_reply *r, char c) { reply_put_spaced(r, FKV_REPLY_REASONING, c); }

static void found_think(fkv_reply *r) {
    reply_part_ended(r);
    r->state = &r->think;
}

static void found_think_end(fkv_reply *r) {
    reply_part_ended(r);
    r->state = &r->text;
}

/* ---- byte loop ---- */

/* Returns the marker that is equal to the held bytes, or NULL if there is none. Sets *partial if the held bytes are a proper
 * prefix of a marker. */
static const reply_marker *match_marker(const fkv_reply *r, bool *partial) {
    *partial = false;
    for (int i = 0; i < REPLY_MARKERS && r->state->markers[i].text != NULL; i++) {
        const reply_marker *m = &r->state->markers[i];
        size_t n = strlen(m->text);
        if ((m->first_only && r->began) || n < r->n_hold || memcmp(m->text, r->hold, r->n_hold) != 0) continue;
        if (n == r->n_hold) return m;
        *partial = true;
    }
    return NULL;
}

/* Passes held bytes to the current state, except for a suffix that may still become a marker. At the end of the reply, passes all
 * held bytes. */
static void process_held(fkv_reply *r, bool at_end) {
    while (r->n_hold > 0) {
        bool partial = false;
        const reply_marker *m = match_marker(r, &partial);
        if (m != NULL) {
            const reply_state *before = r->state;
            reply_raw_add(r, r->hold, r->n_hold);
            r->n_hold = 0;
            if (r->state == before) m->found(r); /* otherwise the buffer was full, and the call became text */
            return;
        }
        if (partial && !at_end) return;
        char first = r->hold[0];
        memmove(r->hold, r->hold + 1, --r->n_hold);
        const reply_state *before = r->state;
        reply_raw_add(r, &first, 1);
        if (r->state == before) before->byte(r, first); /* otherwise the buffer was full, and the call became text */
    }
}

static void feed_bytes(fkv_reply *r, const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        r->hold[r->n_hold++] = bytes[i];
        process_held(r, false);
    }
}

static bool may_become_stop(const fkv_reply *r) {
    for (uint32_t i = 0; i < r->n_stops; i++)
        if (strncmp(r->stops[i], r->stop_hold, r->n_stop_hold) == 0) return true;
    return false;
}

/* If the bytes in stop_hold end with a stop string, sets `stopped` and returns the number of bytes before the stop string.
 * Otherwise returns 0 and leaves `stopped` unchanged. */
static size_t bytes_before_stop(fkv_reply *r) {
    for (uint32_t i = 0; i < r->n_stops && !r->stopped; i++) {
        size_t n = strlen(r->stops[i]);
        r->stopped = n <= r->n_stop_hold && memcmp(r->stops[i], r->stop_hold + r->n_stop_hold - n, n) == 0;
        if (r->stopped) return r->n_stop_hold - n;
    }
    return 0;
}

/* Parses the reply up to the first stop string. Holds back the longest suffix that may become a stop string. */
static void feed_until_stop(fkv_reply *r, const char *bytes, size_t n) {
    for (size_t i = 0; i < n && !r->stopped; i++) {
        r->stop_hold[r->n_stop_hold++] = bytes[i];
        size_t before = bytes_before_stop(r);
        if (r->stopped) feed_bytes(r, r->stop_hold, before);
        while (!r->stopped && !may_become_stop(r)) {
            feed_bytes(r, r->stop_hold, 1);
            memmove(r->stop_hold, r->stop_hold + 1, --r->n_stop_hold);
        }
    }
}

bool fkv_reply_stopped(const fkv_reply *reply) { return reply != NULL && reply->stopped; }

/* ---- construction ---- */

/* Sets the initial parser state. The state depends on the prompt, whose end may have opened a reasoning section or a harmony
 * message. */
static void resume_from_prompt(fkv_reply *r, const reply_setup *setup, const reasoning_row *row) {
    const char *open = r->state == &REPLY_HARMONY ? "<|start|>" : row != NULL ? row->open : NULL;
    const char *at = NULL;
    const char *end = setup->prompt != NULL ? setup->prompt + setup->n_prompt : NULL;
    if (open == NULL || end == NULL) return;
    for (const char *p = setup->prompt; (size_t)(end - p) >= strlen(open); p++)
        if (memcmp(p, open, strlen(open)) == 0) at = p + strlen(open);
    if (at == NULL) return;
    if (r->state == &REPLY_HARMONY) {
        const char *message = memmem(at, (size_t)(end - at), "<|message|>", strlen("<|message|>"));
        if (message != NULL && message + strlen("<|message|>") != end) return;
        if ((size_t)(end - at) >= sizeof r->header) return; /* too long for a header; the parser would emit it as reply text */
        feed_bytes(r, at, (size_t)(end - at));
        r->n_given = r->n_header;
        return;
    }
    while (at < end && reply_is_space(*at)) at++;
    if (at == end) found_think(r);
}

static const reasoning_row *make_states(fkv_reply *r) {
    const reasoning_row *row = NULL;
    int n = 0;
    for (int i = 0; i < N_REASONING && row == NULL; i++)
        if (REASONING[i].syntax == r->reasoning && REASONING[i].open != NULL) row = &REASONING[i];
    r->text.byte = outer_text_byte;
    r->think.byte = outer_think_byte;
    if (row != NULL) {
        bool channel = r->reasoning == FKV_REASONING_CHANNEL;
        r->text.markers[n++] = (reply_marker){.text = row->open, .found = found_think, .first_only = !channel};
        r->think.markers[0] = (reply_marker){.text = row->close, .found = found_think_end};
    }
    for (int i = 0; i < N_TOOLS; i++)
        for (int j = 0; TOOLS[i].syntax == r->syntax && TOOLS[i].markers[j].text != NULL; j++)
            r->text.markers[n++] = TOOLS[i].markers[j];
    bool harmony = r->reasoning == FKV_REASONING_HARMONY || r->syntax == FKV_TOOLS_HARMONY;
    r->state = harmony ? &REPLY_HARMONY : &r->text;
    return row;
}

fkv_status fkv_reply_start(const reply_setup *setup, fkv_reply **reply) {
    fkv_reply *r = calloc(1, sizeof *r);
    char *held = malloc(2 * (size_t)REPLY_HELD);
    if (r == NULL || held == NULL) {
        free(r);
        free(held);
        return fkv_fail(FKV_NO_MEMORY, "out of memory allocating a reply parser");
    }
    r->raw = held;
    r->args = held + REPLY_HELD;
    r->reasoning = setup->reasoning;
    r->syntax = setup->syntax;
    r->on_event = setup->on_event;
    r->user = setup->user;
    r->tools = json_is_array(setup->tools) && json_array_size(setup->tools) > 0 ? json_incref(setup->tools) : NULL;
    for (uint32_t i = 0; i < setup->n_stop; i++) memcpy(r->stops[r->n_stops++], setup->stop[i], strlen(setup->stop[i]) + 1);
    resume_from_prompt(r, setup, make_states(r));
    *reply = r;
    return FKV_OK;
}

void fkv_reply_close(fkv_reply *reply) {
    if (reply == NULL) return;
    json_decref(reply->tools);
    free(reply->raw);
    free(reply);
}

/* ---- public functions ---- */

fkv_reply_config fkv_reply_config_default(void) { return (fkv_reply_config){0}; }

static bool has_token(const void *user, const char *text) {
    uint32_t tokens[2];
    size_t n = 0;
    fkv_status status = fkv_tokenizer_encode(user, text, NULL, strlen(text), FKV_TOKENIZE_SPECIAL, tokens, 2, &n);
    size_t n_text = 0;
    if (status != FKV_OK || n != 1) return false;
    const char *is = fkv_tokenizer_text(user, tokens[0], true, &n_text);
    return n_text == strlen(text) && memcmp(is, text, n_text) == 0;
}

fkv_reply_syntax fkv_reply_detect_syntax(const fkv_tokenizer *tokenizer, fkv_bytes chat_template) {
    return (fkv_reply_syntax){.reasoning = fkv_reply_reasoning_of(chat_template, has_token, tokenizer),
                              .tools = fkv_reply_tools_of(chat_template, has_token, tokenizer)};
}

/* Number of bytes at the end of the prompt that fkv_reply_open() examines. */
enum { PROMPT_TAIL = 512 };

static size_t prompt_tail(const fkv_tokenizer *tokenizer, const uint32_t *tokens, size_t n_tokens, char *out) {
    size_t n = 0;
    while (n_tokens > 0) {
        size_t n_text = 0;
        const char *text = fkv_tokenizer_text(tokenizer, tokens[--n_tokens], true, &n_text);
        if (n + n_text > PROMPT_TAIL) break;
        n += n_text;
        memcpy(out + PROMPT_TAIL - n, text, n_text);
    }
    return n;
}

static fkv_status check_stops(const fkv_reply_config *config) {
    FKV_REQUIRE(config->n_stop <= FKV_MAX_STOPS && (config->stop != NULL || config->n_stop == 0), FKV_BAD_ARGUMENT,
                "n_stop must be at most %d, and stop must not be NULL if n_stop is not 0 (got n_stop %u)", FKV_MAX_STOPS,
                config->n_stop);
    for (uint32_t i = 0; i < config->n_stop; i++) {
        size_t n = config->stop[i] != NULL ? strlen(config->stop[i]) : 0;
        FKV_REQUIRE(n >= 1 && n <= FKV_MAX_STOP_BYTES, FKV_BAD_ARGUMENT, "a stop string must be 1 to %d bytes long (got %zu)",
                    FKV_MAX_STOP_BYTES, n);
    }
    return FKV_OK;
}

fkv_status fkv_reply_create(const fkv_tokenizer *tokenizer, fkv_bytes chat_template, const fkv_reply_config *config,
                            fkv_reply **reply) {
    FKV_REQUIRE(config->prompt != NULL || config->n_prompt == 0, FKV_BAD_ARGUMENT, "fkv_reply_open: prompt is NULL");
    bool known =
        (unsigned)config->syntax.reasoning <= FKV_REASONING_CHANNEL && (unsigned)config->syntax.tools <= FKV_TOOLS_INVOKE;
    FKV_REQUIRE(known, FKV_BAD_ARGUMENT, "fkv_reply_open: unknown syntax (reasoning %d, tools %d)", (int)config->syntax.reasoning,
                (int)config->syntax.tools);
    FKV_TRY(check_stops(config));
    json_error_t error;
    json_t *tools = NULL;
    if (config->tools != NULL) {
        tools = json_loadb(config->tools, config->n_tools, JSON_REJECT_DUPLICATES, &error);
        FKV_REQUIRE(tools != NULL, FKV_BAD_ARGUMENT, "the list of tools is not valid JSON: line %d: %s", error.line, error.text);
    }
    char tail[PROMPT_TAIL];
    size_t n_tail = prompt_tail(tokenizer, config->prompt, config->n_prompt, tail);
    fkv_reply_syntax own = fkv_reply_detect_syntax(tokenizer, chat_template);
    reply_setup setup = {.reasoning = config->syntax.reasoning != FKV_REASONING_AUTO ? config->syntax.reasoning : own.reasoning,
                         .syntax = config->syntax.tools != FKV_TOOLS_AUTO ? config->syntax.tools : own.tools,
                         .tools = tools,
                         .prompt = tail + PROMPT_TAIL - n_tail,
                         .n_prompt = n_tail,
                         .stop = config->stop,
                         .n_stop = config->n_stop,
                         .on_event = config->on_event,
                         .user = config->user};
    fkv_status status = fkv_reply_start(&setup, reply);
    json_decref(tools);
    if (status == FKV_OK) (*reply)->tokenizer = tokenizer;
    return status;
}

fkv_status fkv_reply_feed(fkv_reply *reply, const char *bytes, size_t n_bytes) {
    FKV_REQUIRE(reply != NULL && (bytes != NULL || n_bytes == 0), FKV_BAD_ARGUMENT, "fkv_reply_feed: reply or bytes is NULL");
    FKV_REQUIRE(!reply->ended, FKV_BAD_ARGUMENT, "fkv_reply_feed: called after fkv_reply_end()");
    if (reply->n_stops > 0)
        feed_until_stop(reply, bytes, n_bytes);
    else
        feed_bytes(reply, bytes, n_bytes);
    reply_flush(reply);
    return FKV_OK;
}

/* Special tokens that may occur after the opening marker of a syntax. */
typedef struct later_marker {
    fkv_tool_syntax syntax;
    const char *text;
} later_marker;

static const later_marker LATER[] = {
    {FKV_TOOLS_MISTRAL, "[ARGS]"},
    {FKV_TOOLS_MISTRAL, "[CALL_ID]"},
    {FKV_TOOLS_GEMMA, "<|\"|>"},
    {FKV_TOOLS_GEMMA, "<tool_call|>"},
    {FKV_TOOLS_GEMMA, "<|channel>"},
    {FKV_TOOLS_JSON, "</tool_call>"},
    {FKV_TOOLS_PARAMETERS, "</tool_call>"},
    {FKV_TOOLS_ARG_KEYS, "</tool_call>"},
    {FKV_TOOLS_ARG_KEYS, "<arg_key>"},
    {FKV_TOOLS_ARG_KEYS, "</arg_key>"},
    {FKV_TOOLS_ARG_KEYS, "<arg_value>"},
    {FKV_TOOLS_ARG_KEYS, "</arg_value>"},
    {FKV_TOOLS_HARMONY, "<|channel|>"},
    {FKV_TOOLS_HARMONY, "<|message|>"},
    {FKV_TOOLS_HARMONY, "<|start|>"},
    {FKV_TOOLS_HARMONY, "<|constrain|>"},
    {FKV_TOOLS_HARMONY, "<|end|>"},
    {FKV_TOOLS_HARMONY, "<|call|>"},
    {FKV_TOOLS_HARMONY, "<|return|>"},
    {FKV_TOOLS_KIMI, "<|tool_call_begin|>"},
    {FKV_TOOLS_KIMI, "<|tool_call_argument_begin|>"},
    {FKV_TOOLS_KIMI, "<|tool_call_end|>"},
    {FKV_TOOLS_KIMI, "<|tool_calls_section_end|>"},
    {FKV_TOOLS_PYTHONIC, "<|tool_call_end|>"},
    {FKV_TOOLS_INVOKE, "</minimax:tool_call>"},
};

static bool is_marker_text(const char *marker, const char *text, size_t n) {
    return marker != NULL && n == strlen(marker) && memcmp(text, marker, n) == 0;
}

/* Returns whether a special token is a marker. Special tokens that are not markers are dropped. */
static bool is_marker(const fkv_reply *r, const char *text, size_t n) {
    for (size_t i = 0; i < sizeof LATER / sizeof LATER[0]; i++)
        if (LATER[i].syntax == r->syntax && is_marker_text(LATER[i].text, text, n)) return true;
    for (int i = 0; i < REPLY_MARKERS; i++)
        if (is_marker_text(r->text.markers[i].text, text, n) || is_marker_text(r->think.markers[i].text, text, n)) return true;
    return r->reasoning == FKV_REASONING_CHANNEL && is_marker_text("<|channel>", text, n);
}

fkv_status fkv_reply_token(fkv_reply *reply, uint32_t token) {
    FKV_REQUIRE(reply != NULL && reply->tokenizer != NULL, FKV_BAD_ARGUMENT, "fkv_reply_token: reply is NULL");
    size_t n = 0;
    size_t n_shown = 0;
    const char *text = fkv_tokenizer_text(reply->tokenizer, token, true, &n);
    (void)fkv_tokenizer_text(reply->tokenizer, token, false, &n_shown);
    if (n_shown == 0 && n > 0 && !is_marker(reply, text, n)) return FKV_OK;
    return fkv_reply_feed(reply, text, n);
}

fkv_status fkv_reply_end(fkv_reply *reply) {
    FKV_REQUIRE(reply != NULL, FKV_BAD_ARGUMENT, "fkv_reply_end: reply is NULL");
    if (reply->ended) return FKV_OK;
    reply->ended = true;
    if (!reply->stopped) feed_bytes(reply, reply->stop_hold, reply->n_stop_hold);
    process_held(reply, true);
    reply_harmony_end(reply);
    if (!reply_python_end(reply) && reply->phase != CALL_NONE) reply_call_fail(reply);
    if (reply->state == &reply->text && !reply->trim) reply_release_space(reply, FKV_REPLY_TEXT);
    reply_put_end(reply);
    return FKV_OK;
}
