/* See conversation.h. */
#include "conversation.h"

#include "cli.h"
#include "prompt.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One line; false at the end of the input or at Ctrl-C. */
static bool read_turn(text_buffer *turn) {
    char *line = NULL;
    size_t room = 0;
    if (isatty(STDIN_FILENO) != 0) {
        (void)fputs("> ", stderr);
        (void)fflush(stderr);
    }
    ssize_t n = getline(&line, &room, stdin);
    turn->n = 0;
    if (n > 0) text_add(turn, line, (size_t)n - (line[n - 1] == '\n'));
    free(line);
    return n > 0 && !cli_interrupted();
}

/* What the session needs to hear before and with this turn. */
static int next_tokens(const generation *g, bool chat, const char *system, const text_buffer *turn, token_list *list) {
    const fkv_model *model = g->session->model;
    list->n = 0;
    if (!g->last_is_fed) token_list_add(list, g->tokens.tokens + g->tokens.n - 1, 1);
    bool first = g->session->length == 0 && list->n == 0;
    if (!chat) {
        text_buffer line = {0};
        text_add(&line, turn->bytes, turn->n);
        text_add(&line, "\n", 1);
        int code = first ? prompt_add_plain(list, model, &line)
                         : token_list_add_text(list, model, line.bytes, line.n, FKV_TOKENIZE_PLAIN);
        text_free(&line);
        return code;
    }
    int code = EXIT_GOOD;
    if (!first) code = prompt_close_answer(list, model);
    if (first && system != NULL) {
        text_buffer words = {.bytes = (char *)(uintptr_t)system, .n = strlen(system)};
        code = prompt_add_message(list, model, "system", &words, false);
    }
    return code == EXIT_GOOD ? prompt_add_message(list, model, "user", turn, true) : code;
}

static int answer(generation *g, const token_list *list) {
    const float *logits = NULL;
    progress_bar progress = progress_begin("reading", list->n);
    int code = session_feed(g->session, list->tokens, list->n, &logits, &progress);
    progress_end(&progress);
    if (code != EXIT_GOOD) return code;
    generation_clear(g);
    code = generation_run(g, logits);
    if (code == EXIT_GOOD) (void)putchar('\n');
    (void)fflush(stdout);
    return code;
}

int conversation_hold(generation *g, bool chat, const char *system) {
    text_buffer turn = {0};
    token_list list = {0};
    int code = EXIT_GOOD;
    while (code == EXIT_GOOD && read_turn(&turn)) {
        if (turn.n == 0) continue;
        code = next_tokens(g, chat, system, &turn, &list);
        if (code == EXIT_GOOD && list.n > g->session->max_tokens - g->session->length) {
            code = kit_fail(
                EXIT_FAILED,
                "the conversation has %u of %u tokens and this turn needs %zu: start again, reserve more with -c, or bound "
                "it with --max-kv",
                g->session->length, g->session->max_tokens, list.n);
            break;
        }
        if (code == EXIT_GOOD) code = answer(g, &list);
        if (code == EXIT_GOOD && g->stop == STOP_INTERRUPTED) cli_forget_interrupt();
    }
    text_free(&turn);
    token_list_free(&list);
    return code == EXIT_GOOD && cli_interrupted() ? EXIT_INTERRUPTED : code;
}
