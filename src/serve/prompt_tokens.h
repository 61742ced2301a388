/* The tokens of what a client sent: conversations by the model's template, texts as they are. */
#ifndef FKV_SERVE_PROMPT_TOKENS_H
#define FKV_SERVE_PROMPT_TOKENS_H

#include "api_request.h"

typedef struct prompt_tokens {
    uint32_t *tokens;
    size_t n;
} prompt_tokens;

/* fkv_message() says what was wrong. prompt_tokens_free() is right in both cases. */
fkv_status prompt_tokens_of(const fkv_model *model, const api_request *request, prompt_tokens *out);
fkv_status prompt_tokens_of_text(const fkv_model *model, const char *text, size_t n, unsigned flags, prompt_tokens *out);
void prompt_tokens_free(prompt_tokens *tokens);

/* The conversation as text, the caller's; NULL with fkv_message(). A model without a template gets the contents, one behind the
 * other, as paragraphs. */
char *prompt_text_of(const fkv_model *model, const json_t *conversation, size_t *n);

#endif
