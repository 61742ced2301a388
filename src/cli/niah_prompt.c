/* The tokens around a haystack: what it begins with and how a fact is asked for. See niah.h. */
#include "niah.h"
#include "prompt.h"

#include <string.h>

int niah_begin_tokens(const niah *n, token_list *list) {
    if (n->about->has_chat) return prompt_open_message(list, n->model, "user");
    if (n->about->add_bos) token_list_add(list, &n->about->bos, 1);
    return EXIT_GOOD;
}

int niah_add_question(const niah *n, const fact *f, token_list *list) {
    char question[FACT_TEXT];
    fact_question(f, n->about->has_chat, question);
    int code = token_list_add_text(list, n->model, question, strlen(question), FKV_TOKENIZE_PLAIN);
    if (code == EXIT_GOOD && n->about->has_chat) code = prompt_close_message(list, n->model, "user", true);
    return code;
}
