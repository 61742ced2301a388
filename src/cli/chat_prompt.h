/* A conversation as tokens, by the model's own template. What people wrote never becomes a special token, so nobody can forge a
 * role.
 */
#ifndef FKV_CLI_CHAT_PROMPT_H
#define FKV_CLI_CHAT_PROMPT_H

#include "text.h"
#include "token_list.h"

/* Stands for a place in a message: chat_split() cuts the rendered conversation there. */
#define CHAT_CUT "\xee\x80\x80\xee\x80\x81\xee\x80\x80"

typedef enum chat_think { CHAT_THINK_UNSAID, CHAT_THINK_OFF, CHAT_THINK_ON } chat_think;

typedef struct chat {
    const fkv_model *model;
    void *messages;   /* a JSON array */
    chat_think think; /* what templates that ask are told */
    bool has_cut;     /* chat_add_document() was called */
    token_list base;  /* of a saved prefix: stands for all before the cut, where it is not empty */
} chat;

chat chat_open(const fkv_model *model, const char *system); /* NULL: the template's own, if it has one */
void chat_close(chat *c);
void chat_add(chat *c, const char *role, const char *bytes, size_t n);

void chat_pop(chat *c);                           /* the last message */
void chat_clear(chat *c);                         /* but for the system message */
void chat_set_system(chat *c, const char *text);  /* "": none */
void chat_replace(chat *c, const void *messages); /* a JSON array, copied */

/* A user's message: a document, and what is asked about it. The conversation up to the end of the document has the same tokens
 * whatever follows. An empty document stands for a saved one (base). */
void chat_add_document(chat *c, const char *document, size_t n_document, const char *question, size_t n_question);

/* Forgets the oldest message that is not the system's or the document, and the answer behind it. False: there is none. */
bool chat_drop_oldest(chat *c);

/* The whole conversation with the opening of an answer behind it; *n_prefix (may be NULL): those up to the end of the document.
 * Exit code, with a message on failure. */
int chat_tokens(const chat *c, token_list *list, size_t *n_prefix);

/* The same in n_cuts + 1 parts, cut at each CHAT_CUT of the messages. */
int chat_split(const chat *c, token_list *parts, size_t n_cuts);

#endif
