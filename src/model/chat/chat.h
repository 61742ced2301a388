/* A model's own chat: its template with the words that only it may write. Made once at load, read-only from then on. */
#ifndef FKV_CHAT_H
#define FKV_CHAT_H

#include "../tokenizer/tokenizer.h"
#include "template.h"

typedef struct fkv_chat fkv_chat;

/* A vocabulary without a template that has the tokens of ChatML gets ChatML; one with neither, or with a template that is not
 * understood, gets a chat that refuses with the reason. */
fkv_status fkv_chat_open(const fkv_vocab_source *source, const fkv_tokenizer *tokenizer, fkv_chat **chat);
void fkv_chat_close(fkv_chat *chat); /* NULL is allowed */

/* "" where the chat works; else why not. */
const char *fkv_chat_refusal(const fkv_chat *chat);

/* As fkv_chat_render() of flatkv/model.h. */
fkv_status fkv_chat_run(const fkv_chat *chat, const char *conversation, size_t n_bytes, const int64_t *now, fkv_rendered *out);

#endif
