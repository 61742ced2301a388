/* Tokens drawn one after another from a session, streamed as text.
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
} stop_reason;

const char *stop_reason_name(stop_reason reason);

typedef struct generation {
    model_session *session;
    fkv_sampler *sampler;
    uint32_t max_new;
    bool ignore_end; /* go on where the model would end */
    text_stream out;

    token_list tokens; /* drawn, the end token not among them */
    text_buffer text;
    stop_reason stop;
    bool last_is_fed; /* whether the session has the last of the tokens */
    double seconds;   /* of the steps */
    uint32_t n_steps;
} generation;

/* Begins with the logits of the last token fed. Returns an exit code, with a message on failure; EXIT_GOOD also where it was
 * interrupted (see stop). */
int generation_run(generation *g, const float *logits);

/* Forgets what was drawn: for the next answer. */
void generation_clear(generation *g);
void generation_free(generation *g);

/* Whether a token ends a text of this model. */
bool generation_is_end(const fkv_model_info *about, uint32_t token);

#endif
