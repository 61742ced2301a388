/* Converts client input to tokens. Conversations are rendered with the chat template; plain text is tokenized unchanged. */
#ifndef FKV_SERVE_PROMPT_TOKENS_H
#define FKV_SERVE_PROMPT_TOKENS_H

#include "api_request.h"

typedef struct prompt_tokens {
    uint32_t *tokens;
    size_t n;
    size_t n_bytes; /* length of the prompt text in bytes; set by prompt_tokens_of() */
    uint32_t
        marks[FKV_MAX_MARKS]; /* [n_marks] lengths of prefixes that later prompts are likely to repeat (fkv_request.snapshots) */
    uint32_t n_marks;
} prompt_tokens;

/* Tokenizes one prompt of a request, or plain text. prompt_tokens_free() must be called even after a failure. index: index of the
 * prompt in the request. max_bytes: maximum size of the prompt text. If the text is longer, returns FKV_POOL_FULL without
 * tokenizing it. Returns FKV_UNSUPPORTED if the request has a suffix but the model has no fill-in-the-middle tokens.
 * fkv_message() describes every other failure except FKV_NO_MEMORY. */
fkv_status prompt_tokens_of(const fkv_model *model, const api_request *request, uint32_t index, size_t max_bytes,
                            prompt_tokens *out);
fkv_status prompt_tokens_of_text(const fkv_model *model, const char *text, size_t n, unsigned flags, prompt_tokens *out);
void prompt_tokens_free(prompt_tokens *tokens);

/* Renders the conversation of a request as text, which the caller frees. Returns NULL and sets fkv_message() on failure. For a
 * model without a chat template the message contents are joined with newlines. */
char *prompt_text_of(const fkv_model *model, const api_request *request, size_t *n);

#endif
