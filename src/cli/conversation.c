/* See conversation.h. */
#include "conversation.h"

#include "cli.h"

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

/* A line of text behind what there is. */
static int plain_tokens(conversation *c, const text_buffer *turn) {
    const generation *g = c->generation;
    const fkv_model *model = g->session->model;
    c->next.n = 0;
    if (!g->last_is_fed) token_list_add(&c->next, g->tokens.tokens + g->tokens.n - 1, 1);
    bool first = g->session->length == 0 && c->next.n == 0;
    text_buffer line = {0};
    text_add(&line, turn->bytes, turn->n);
    text_add(&line, "\n", 1);
    int code = token_list_add_text(&c->next, model, line.bytes, line.n, first ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN);
    text_free(&line);
    return code;
}

/* The session keeps what the conversation has in common with what it heard. The next tokens are those behind it, one at least. */
static int keep_common(conversation *c, token_list *all) {
    model_session *s = c->generation->session;
    size_t n = 0;
    while (n + 1 < all->n && n < c->fed.n && n < s->length && all->tokens[n] == c->fed.tokens[n]) n++;
    int code = n < s->length ? session_truncate(s, (uint32_t)n) : EXIT_GOOD;
    c->next.n = 0;
    token_list_add(&c->next, all->tokens + s->length, all->n - s->length);
    c->fed.n = 0;
    token_list_add(&c->fed, all->tokens, all->n);
    return code;
}

/* The conversation with this turn. The oldest turns are forgotten where it does not fit with an answer of some length. */
static int chat_next_tokens(conversation *c, const text_buffer *turn) {
    enum { LEAST_ANSWER = 64 };
    uint32_t most = c->generation->session->max_tokens;
    token_list all = {0};
    uint32_t n_dropped = 0;
    chat_add(c->chat, "user", turn->bytes, turn->n);
    int code = chat_tokens(c->chat, &all, NULL);
    while (code == EXIT_GOOD && all.n + LEAST_ANSWER > most && chat_drop_oldest(c->chat)) {
        n_dropped++;
        code = chat_tokens(c->chat, &all, NULL);
    }
    if (n_dropped > 0)
        (void)fprintf(stderr, "[the context of %u tokens is full, turns forgotten: %u; -c reserves more]\n", most, n_dropped);
    if (code == EXIT_GOOD) code = keep_common(c, &all);
    token_list_free(&all);
    return code;
}

void conversation_answered(conversation *c) {
    const generation *g = c->generation;
    if (c->chat == NULL) return;
    size_t n_fed = g->session->length > c->fed.n ? g->session->length - c->fed.n : 0;
    token_list_add(&c->fed, g->tokens.tokens, n_fed < g->tokens.n ? n_fed : g->tokens.n);
    chat_add(c->chat, "assistant", g->text.bytes, g->text.n);
}

static int answer(conversation *c) {
    generation *g = c->generation;
    const float *logits = NULL;
    progress_bar progress = progress_begin("reading", c->next.n);
    int code = session_feed(g->session, c->next.tokens, c->next.n, &logits, &progress);
    progress_end(&progress);
    if (code != EXIT_GOOD) return code;
    generation_clear(g);
    code = generation_run(g, logits);
    if (code != EXIT_GOOD) return code;
    (void)putchar('\n');
    (void)fflush(stdout);
    if (isatty(STDERR_FILENO) != 0 && g->n_steps > 0 && g->seconds > 0)
        (void)fprintf(stderr, "[%.1f tokens a second, %u of %u tokens used]\n", g->n_steps / g->seconds, g->session->length,
                      g->session->max_tokens);
    conversation_answered(c);
    return EXIT_GOOD;
}

int conversation_hold(conversation *c) {
    const model_session *s = c->generation->session;
    text_buffer turn = {0};
    int code = EXIT_GOOD;
    while (code == EXIT_GOOD && read_turn(&turn)) {
        if (turn.n == 0) continue;
        code = c->chat != NULL ? chat_next_tokens(c, &turn) : plain_tokens(c, &turn);
        if (code == EXIT_GOOD && c->next.n > s->max_tokens - s->length) {
            code = kit_fail(
                EXIT_FAILED,
                "the conversation has %u of %u tokens and this turn needs %zu: start again, reserve more with -c, or limit "
                "it with --max-kv",
                s->length, s->max_tokens, c->next.n);
            break;
        }
        if (code == EXIT_GOOD) code = answer(c);
        if (code == EXIT_GOOD && c->generation->stop == STOP_INTERRUPTED) cli_forget_interrupt();
    }
    text_free(&turn);
    return code == EXIT_GOOD && cli_interrupted() ? EXIT_INTERRUPTED : code;
}

void conversation_free(conversation *c) {
    token_list_free(&c->fed);
    token_list_free(&c->next);
}
