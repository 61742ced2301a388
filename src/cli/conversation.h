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
    chat *chat;        /* the messages; NULL if the model has no chat template and continues plain text */
    const char *model; /* value of -m */
    bool terminal;     /* true to print notices for an interactive user */
    bool warned;       /* true after the user was warned that the context is nearly full */
    token_list fed;    /* tokens of the conversation; the first session->length tokens are in the session's cache */
    token_list next;   /* tokens of the current turn that are not in the cache yet */
    token_list marks;  /* plain text: for each turn that can be undone, its start position in tokens and its offset in `lines` */
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

/* Save and load a conversation: its pages in NAME.fkv and its messages in NAME.json. Only the owner can read these files. A
 * suffix .fkv or .json of `name` is ignored. Loading does not recompute any tokens. Both return an exit code; a failed load
 * leaves the current messages unchanged. */
int conversation_save(conversation *c, const char *name);
int conversation_load(conversation *c, const char *name);

void conversation_free(conversation *c);

#endif
