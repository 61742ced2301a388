/* Renders a conversation with the model's chat template and tokenizes it. Message content never becomes a special token, so a
 * message cannot imitate another role. */
#ifndef FKV_CLI_CHAT_PROMPT_H
#define FKV_CLI_CHAT_PROMPT_H

#include "text.h"
#include "token_list.h"

/* Marker in a message at which chat_split() splits the rendered conversation. */
#define CHAT_CUT "\xee\x80\x80\xee\x80\x81\xee\x80\x80"

typedef enum chat_think { CHAT_THINK_DEFAULT, CHAT_THINK_OFF, CHAT_THINK_ON } chat_think;

typedef struct chat {
    const fkv_model *model;
    void *messages;   /* JSON array */
    chat_think think; /* value of the template variable enable_thinking */
    bool has_cut;     /* chat_add_document() was called */
    token_list base;  /* tokens of a saved prefix; unless empty, they replace all tokens up to the end of the document */
} chat;

chat chat_open(const fkv_model *model,
               const char *system); /* if `system` is NULL, the template's default system message is used, if there is one */
void chat_close(chat *c);
void chat_add(chat *c, const char *role, const char *bytes, size_t n);

void chat_pop(chat *c); /* removes the last message */

/* Removes the last user message and the answers that follow it. Appends the text of the user message to `text`, which may be
 * NULL. Returns false if there is no user message, or if the last user message contains the document. */
bool chat_undo(chat *c, text_buffer *text);

/* Calls show() for every message except the system message. */
void chat_each(const chat *c, void (*show)(void *user, const char *role, const char *content), void *user);

void chat_clear(chat *c);                         /* removes all messages but keeps the system message */
void chat_set_system(chat *c, const char *text);  /* sets the system message; "" removes it */
void chat_replace(chat *c, const void *messages); /* replaces all messages with a copy of a JSON array */

/* Adds a user message that contains a document and a question about it. The tokens up to the end of the document do not depend on
 * the question. If the document is empty, the saved prefix in `base` replaces it. */
void chat_add_document(chat *c, const char *document, size_t n_document, const char *question, size_t n_question);

/* Removes the oldest turn (a user message and its answers). Never removes the system message or the document. Returns false if no
 * turn is left. */
bool chat_drop_oldest(chat *c);

/* Tokenizes the conversation, including the generation prompt. *n_prefix (may be NULL) receives the number of tokens up to the
 * end of the document. Returns an exit code. */
int chat_tokens(const chat *c, token_list *list, size_t *n_prefix);

/* Tokenizes the conversation in n_cuts + 1 parts, split at each CHAT_CUT in the messages. Returns an exit code. */
int chat_split(const chat *c, token_list *parts, size_t n_cuts);

#endif
