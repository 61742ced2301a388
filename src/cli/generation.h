/* Generation loop: samples the tokens of an answer one by one, separates text, reasoning and tool calls, and streams the text. */
#ifndef FKV_CLI_GENERATION_H
#define FKV_CLI_GENERATION_H

#include "session.h"
#include "text.h"
#include "token_list.h"

typedef enum stop_reason {
    STOP_END,         /* the model generated an end token */
    STOP_LENGTH,      /* max_new tokens were generated */
    STOP_CONTEXT,     /* the context is full */
    STOP_INTERRUPTED, /* Ctrl-C */
    STOP_TEXT,        /* the text of a --stop option was generated */
} stop_reason;

const char *stop_reason_name(stop_reason reason);

typedef struct generation {
    model_session *session;
    fkv_sampler *sampler;
    uint32_t max_new;
    bool ignore_end;     /* true to continue generating after end tokens */
    bool plain;          /* true to treat the answer as plain text, without parsing reasoning and tool calls */
    bool hide_reasoning; /* true to print neither reasoning nor tool calls */
    const char *const *stop;
    uint32_t n_stop;
    text_stream out;

    token_list tokens; /* generated tokens, excluding the end token */
    text_buffer text;
    text_buffer reasoning;
    text_buffer calls; /* tool calls, one per line: the tool's name, followed by the arguments */
    stop_reason stopped;
    bool last_is_fed; /* true if the last generated token is in the session's cache */
    double seconds;   /* total time of the decode steps, in seconds */
    uint32_t n_steps;
    int shown; /* fkv_reply_kind of the text that was printed last */
} generation;

/* Generates an answer. prompt: [n_prompt] tokens in the session's cache; logits: logits of the last prompt token. Returns an exit
 * code, which is EXIT_GOOD even after Ctrl-C (see `stopped`). */
int generation_run(generation *g, const uint32_t *prompt, size_t n_prompt, const float *logits);

/* Clears the results of the last answer, before the next answer is generated. */
void generation_clear(generation *g);
void generation_free(generation *g);

/* Returns whether the token is an end token of the model. */
bool generation_is_end(const fkv_model_info *about, uint32_t token);

#endif
