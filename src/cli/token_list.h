/* Growable list of tokens.
 */
#ifndef FKV_CLI_TOKEN_LIST_H
#define FKV_CLI_TOKEN_LIST_H

#include <flatkv/model.h>

typedef struct token_list {
    uint32_t *tokens;
    size_t n;
    size_t capacity;
} token_list;

/* Appends the tokens of a text, with the flags of fkv_tokenize(). Returns an exit code. */
int token_list_add_text(token_list *list, const fkv_model *model, const char *bytes, size_t n_bytes, unsigned flags);

/* Appends the tokens of a rendered chat; see fkv_tokenize_given(). Returns an exit code. */
int token_list_add_given(token_list *list, const fkv_model *model, const char *bytes, const uint8_t *given, size_t n_bytes);

void token_list_add(token_list *list, const uint32_t *tokens, size_t n);
void token_list_free(token_list *list);

#endif
