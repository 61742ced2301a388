/* Chat format of a model: its parsed chat template and the special tokens that only the template may write. It is created when
 * the model is loaded and is read-only afterwards. */
#ifndef FKV_CHAT_H
#define FKV_CHAT_H

#include "../tokenizer/tokenizer.h"
#include "template.h"

typedef struct fkv_chat fkv_chat;

/* Parses the chat template of a vocabulary. If the vocabulary has no template but has the ChatML tokens, the ChatML template is
 * used. If neither is available or the template is not supported, rendering fails, and fkv_chat_refusal() returns the reason. */
fkv_status fkv_chat_open(const fkv_vocab_source *source, const fkv_tokenizer *tokenizer, fkv_chat **chat);
void fkv_chat_close(fkv_chat *chat); /* accepts NULL */

/* Returns the reason why conversations cannot be rendered, or "" if they can. */
const char *fkv_chat_refusal(const fkv_chat *chat);

/* Renders a conversation. Implements fkv_chat_render(), which is declared in flatkv/model.h. */
fkv_status fkv_chat_run(const fkv_chat *chat, const char *conversation, size_t n_bytes, const int64_t *now, fkv_rendered *out);

#endif
