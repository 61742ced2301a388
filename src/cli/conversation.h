/* Conversation state of flatkv run -i. Each turn reuses the pages of the longest prefix that it shares with the previous turn, so
 * only the new tokens are computed. If the context is full, the oldest turns are dropped and the conversation continues. No
 * function here exits the program.
 */
#ifndef FKV_CLI_CONVERSATION_H
#define FKV_CLI_CONVERSATION_H

#include "chat_prompt.h"
#include "generation.h"

typedef struct conversation {
    generation *generation;
    chat *chat;        /* the messages; NULL if the model has no chat template, so that it continues plain text */
    const char *model; /* value of -m */
    bool terminal;     /* true if notices for an interactive user are printed */
    bool warned;       /* true after the user was warned that the context is nearly full */
    token_list fed;    /* tokens of the conversation; the session's cache has the first session->length of them */
    token_list next;   /* tokens of the current turn that are not in the cache yet */
    token_list marks;  /* plain text: for each turn that can be undone, the number of tokens before it and its start in `lines` */
    text_buffer lines; /* plain text: the user's messages in the turns that can be undone */
} conversation;

/* Appends the generated answer to the conversation. */
void conversation_add_answer(conversation *c);

/* Runs one turn and streams its answer. Returns an exit code; if it is not EXIT_GOOD, the turn was discarded. */
int conversation_turn(conversation *c, const char *bytes, size_t n);

/* Removes the last turn: the user's message and its answer. Appends the message to `text`, which may be NULL. Returns false if
 * there is no turn that can be removed. */
bool conversation_undo(conversation *c, text_buffer *text);

void conversation_show(const conversation *c); /* prints all turns */
void conversation_clear(conversation *c);      /* removes all messages except the system message */

/* Save and load the pages in NAME.fkv and the messages in NAME.json, readable by the owner only. A suffix .fkv or .json of `name`
 * is ignored. Loading recomputes nothing. Both return an exit code; a failed load leaves the messages of the current conversation
 * unchanged. */
int conversation_save(conversation *c, const char *name);
int conversation_load(conversation *c, const char *name);

void conversation_free(conversation *c);

#endif
