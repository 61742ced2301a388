/* See token_list.h. */
#include "token_list.h"

#include "cli.h"

#include <stdlib.h>
#include <string.h>

static void reserve_tokens(token_list *list, size_t n) {
    if (list->n + n <= list->capacity) return;
    list->capacity = 2 * (list->n + n);
    list->tokens = kit_realloc(list->tokens, list->capacity * sizeof *list->tokens);
}

void token_list_add(token_list *list, const uint32_t *tokens, size_t n) {
    if (n == 0) return;
    reserve_tokens(list, n);
    memcpy(list->tokens + list->n, tokens, n * sizeof *tokens);
    list->n += n;
}

/* Appends the tokens of a text. Calls fkv_tokenize() with `flags` if `given` is NULL, otherwise fkv_tokenize_given(). */
static int add_tokens_of(token_list *list, const fkv_model *model, const char *bytes, const uint8_t *given, size_t n_bytes,
                         unsigned flags) {
    size_t room = n_bytes + 8; /* usually sufficient: at most one token per byte, plus bos and a leading space */
    for (;;) {
        size_t n = 0;
        reserve_tokens(list, room);
        uint32_t *to = list->tokens + list->n;
        fkv_status status = given != NULL ? fkv_tokenize_given(model, bytes, given, n_bytes, to, room, &n)
                                          : fkv_tokenize(model, n_bytes > 0 ? bytes : "", n_bytes, flags, to, room, &n);
        if (status != FKV_OK) return cli_fail_status(status);
        if (n <= room) {
            list->n += n;
            return EXIT_GOOD;
        }
        room = n;
    }
}

int token_list_add_text(token_list *list, const fkv_model *model, const char *bytes, size_t n_bytes, unsigned flags) {
    return add_tokens_of(list, model, bytes, NULL, n_bytes, flags);
}

int token_list_add_given(token_list *list, const fkv_model *model, const char *bytes, const uint8_t *given, size_t n_bytes) {
    return add_tokens_of(list, model, bytes, given, n_bytes, 0);
}

void token_list_free(token_list *list) {
    free(list->tokens);
    *list = (token_list){0};
}
