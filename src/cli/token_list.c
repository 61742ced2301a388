/* See token_list.h. */
#include "token_list.h"

#include "cli.h"

#include <stdlib.h>
#include <string.h>

static void reserve(token_list *list, size_t n) {
    if (list->n + n <= list->room) return;
    list->room = 2 * (list->n + n);
    list->tokens = kit_take_more(list->tokens, list->room * sizeof *list->tokens);
}

void token_list_add(token_list *list, const uint32_t *tokens, size_t n) {
    if (n == 0) return;
    reserve(list, n);
    memcpy(list->tokens + list->n, tokens, n * sizeof *tokens);
    list->n += n;
}

/* given: NULL for fkv_tokenize() with these flags. */
static int add(token_list *list, const fkv_model *model, const char *bytes, const uint8_t *given, size_t n_bytes,
               unsigned flags) {
    size_t room = n_bytes + 8; /* a token is a byte or more; bos and a leading space beside them */
    for (;;) {
        size_t n = 0;
        reserve(list, room);
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
    return add(list, model, bytes, NULL, n_bytes, flags);
}

int token_list_add_given(token_list *list, const fkv_model *model, const char *bytes, const uint8_t *given, size_t n_bytes) {
    return add(list, model, bytes, given, n_bytes, 0);
}

void token_list_free(token_list *list) {
    free(list->tokens);
    *list = (token_list){0};
}
