/* A list of tokens that grows as texts are added to it.
 */
#ifndef FKV_CLI_TOKEN_LIST_H
#define FKV_CLI_TOKEN_LIST_H

#include <flatkv/model.h>

typedef struct token_list {
    uint32_t *tokens;
    size_t n;
    size_t room;
} token_list;

/* The tokens of a text, as fkv_tokenize() with these flags. Returns an exit code, with a message on failure. */
int token_list_add_text(token_list *list, const fkv_model *model, const char *bytes, size_t n_bytes, unsigned flags);

/* As fkv_tokenize_given(). */
int token_list_add_given(token_list *list, const fkv_model *model, const char *bytes, const uint8_t *given, size_t n_bytes);

void token_list_add(token_list *list, const uint32_t *tokens, size_t n);
void token_list_free(token_list *list);

#endif
