/* run -i: a conversation and the pages that hold it. The pages of what a turn has in common with the one before stay; a turn
 * costs its own tokens. A conversation that fills its context goes on: the oldest turns are forgotten. Nothing here ends the
 * program.
 */
#ifndef FKV_CLI_CONVERSATION_H
#define FKV_CLI_CONVERSATION_H

#include "chat_prompt.h"
#include "generation.h"

typedef struct conversation {
    generation *generation;
    chat *chat;        /* NULL: turns are text, completed */
    const char *model; /* as -m names it */
    bool terminal;     /* somebody is reading along */
    bool warned;       /* that the context is nearly full */
    token_list fed;    /* what the session holds */
    token_list next;
} conversation;

/* After an answer: it becomes part of the conversation. */
void conversation_answered(conversation *c);

/* One turn and its answer. Exit code; where it is not EXIT_GOOD the turn is not part of the conversation. */
int conversation_turn(conversation *c, const char *bytes, size_t n);

void conversation_clear(conversation *c); /* but for the system message */

/* NAME.fkv: the pages, and NAME.json: the messages. Loaded, nothing is computed again. Exit code, with a message on failure; a
 * conversation that could not be loaded leaves the one that there is. */
int conversation_save(const conversation *c, const char *name);
int conversation_load(conversation *c, const char *name);

void conversation_free(conversation *c);

#endif
