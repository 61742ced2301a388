/* run -i: turns read from standard input, answered one after another. The pages of what a turn has in common with the one before
 * stay; a turn costs its own tokens.
 */
#ifndef FKV_CLI_CONVERSATION_H
#define FKV_CLI_CONVERSATION_H

#include "chat_prompt.h"
#include "generation.h"

/* The tokens that a session holds, as far as a conversation knows. */
typedef struct conversation {
    generation *generation;
    chat *chat;     /* NULL: turns are text, completed */
    token_list fed; /* by chats */
    token_list next;
} conversation;

/* After an answer: it becomes part of the conversation. */
void conversation_answered(conversation *c);

/* Ends at the end of the input, at Ctrl-C between answers, or when a turn does not fit the context. Exit code. */
int conversation_hold(conversation *c);
void conversation_free(conversation *c);

#endif
