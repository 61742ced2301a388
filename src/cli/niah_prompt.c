/* See niah.h. Creates the tokens around a haystack: the chat markup and the questions. */
#include "chat_prompt.h"
#include "niah.h"

#include <string.h>

enum { OPENS, ANSWERS, NEXT, N_FRAMES };

int niah_frames_open(niah *n) {
    static const char *const roles[] = {"user", "assistant", "user"};
    token_list parts[N_FRAMES + 1] = {{0}};
    if (!n->about->has_chat) return EXIT_GOOD;
    chat c = chat_open(n->model, NULL);
    for (int i = 0; i < N_FRAMES; i++) chat_add(&c, roles[i], CHAT_CUT, strlen(CHAT_CUT));
    int code = chat_split(&c, parts, N_FRAMES);
    memcpy(n->frames, parts, sizeof n->frames);
    token_list_free(&parts[N_FRAMES]); /* the last part, the tokens before an answer, is already in `frames` */
    chat_close(&c);
    return code;
}

void niah_frames_close(niah *n) {
    for (int i = 0; i < N_FRAMES; i++) token_list_free(&n->frames[i]);
}

void niah_begin_tokens(const niah *n, token_list *list) {
    if (n->about->has_chat)
        token_list_add(list, n->frames[OPENS].tokens, n->frames[OPENS].n);
    else if (n->about->add_bos)
        token_list_add(list, &n->about->bos, 1);
}

int niah_next_tokens(const niah *n, token_list *list) {
    if (!n->about->has_chat) return token_list_add_text(list, n->model, ".\n", 2, FKV_TOKENIZE_PLAIN);
    token_list_add(list, n->frames[NEXT].tokens, n->frames[NEXT].n);
    return EXIT_GOOD;
}

int niah_add_question(const niah *n, const fact *f, token_list *list) {
    char question[FACT_TEXT];
    fact_question(f, n->about->has_chat, question);
    int code = token_list_add_text(list, n->model, question, strlen(question), FKV_TOKENIZE_PLAIN);
    if (code == EXIT_GOOD && n->about->has_chat) token_list_add(list, n->frames[ANSWERS].tokens, n->frames[ANSWERS].n);
    return code;
}
