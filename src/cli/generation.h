/* Tokens drawn one after another from a session, told apart into text and reasoning, and streamed.
 */
#ifndef FKV_CLI_GENERATION_H
#define FKV_CLI_GENERATION_H

#include "session.h"
#include "text.h"
#include "token_list.h"

typedef enum stop_reason {
    STOP_END,         /* the model ended its text */
    STOP_LENGTH,      /* as many tokens as were asked for */
    STOP_CONTEXT,     /* no room for another one */
    STOP_INTERRUPTED, /* Ctrl-C */
    STOP_TEXT,        /* a text of --stop */
} stop_reason;

const char *stop_reason_name(stop_reason reason);

typedef struct generation {
    model_session *session;
    fkv_sampler *sampler;
    uint32_t max_new;
    bool ignore_end;     /* go on where the model would end */
    bool plain;          /* all of it is text */
    bool hide_reasoning; /* it is not shown */
    const char *const *stop;
    uint32_t n_stop;
    text_stream out;

    token_list tokens; /* drawn, the end token not among them */
    text_buffer text;
    text_buffer reasoning;
    text_buffer calls; /* of tools: a line for each, its name and its arguments */
    stop_reason stopped;
    bool last_is_fed; /* whether the session has the last of the tokens */
    double seconds;   /* of the steps */
    uint32_t n_steps;
    int shown; /* the kind that was printed last */
} generation;

/* Begins with the logits of the last of the n_prompt tokens, which are what the session heard. Returns an exit code, with a
 * message on failure; EXIT_GOOD also where it was interrupted (see stopped). */
int generation_run(generation *g, const uint32_t *prompt, size_t n_prompt, const float *logits);

/* Forgets what was drawn: for the next answer. */
void generation_clear(generation *g);
void generation_free(generation *g);

/* Whether a token ends a text of this model. */
bool generation_is_end(const fkv_model_info *about, uint32_t token);

#endif
