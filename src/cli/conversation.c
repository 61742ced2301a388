/* See conversation.h. */
#include "conversation.h"

#include "cli.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* The room that an answer gets at least. */
static uint32_t least_answer(const conversation *c) {
    uint32_t eighth = c->generation->session->max_tokens / 8;
    return eighth < 64 ? eighth : 64;
}

/* ---- a turn as tokens ---- */

/* A line of text behind what there is. */
static int plain_next_tokens(conversation *c, const char *bytes, size_t n) {
    const generation *g = c->generation;
    model_session *s = g->session;
    c->next.n = 0;
    if (!g->last_is_fed && g->tokens.n > 0) token_list_add(&c->next, g->tokens.tokens + g->tokens.n - 1, 1);
    bool first = s->length == 0 && c->next.n == 0;
    text_buffer line = {0};
    text_add(&line, bytes, n);
    text_add(&line, "\n", 1);
    int code = token_list_add_text(&c->next, s->model, line.bytes, line.n, first ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN);
    text_free(&line);
    if (code != EXIT_GOOD || c->next.n + s->length <= s->max_tokens || s->length == 0 || c->next.n > s->max_tokens / 2)
        return code;
    (void)fprintf(stderr, "[the context of %u tokens is full: its first half is forgotten; -c reserves more]\n", s->max_tokens);
    token_list kept = {0};
    size_t keep = s->max_tokens / 2 - c->next.n;
    keep = keep < c->fed.n ? keep : c->fed.n;
    token_list_add(&kept, c->fed.tokens + c->fed.n - keep, keep);
    token_list_add(&kept, c->next.tokens, c->next.n);
    c->next.n = 0;
    c->fed.n = 0;
    token_list_add(&c->next, kept.tokens, kept.n);
    token_list_free(&kept);
    return session_truncate(s, 0);
}

/* The session keeps what the conversation has in common with what it heard. The next tokens are those behind it, one at least. */
static int keep_common(conversation *c, const token_list *all) {
    model_session *s = c->generation->session;
    size_t n = 0;
    while (n + 1 < all->n && n < c->fed.n && n < s->length && all->tokens[n] == c->fed.tokens[n]) n++;
    int code = n < s->length ? session_truncate(s, (uint32_t)n) : EXIT_GOOD;
    c->next.n = 0;
    c->fed.n = s->length < c->fed.n ? s->length : c->fed.n;
    token_list_add(&c->next, all->tokens + s->length, all->n - s->length);
    return code;
}

/* The conversation with this turn. The oldest turns are forgotten where it does not fit with an answer of some length. */
static int chat_next_tokens(conversation *c, const char *bytes, size_t n) {
    uint32_t most = c->generation->session->max_tokens;
    token_list all = {0};
    uint32_t n_dropped = 0;
    chat_add(c->chat, "user", bytes, n);
    int code = chat_tokens(c->chat, &all, NULL);
    bool full = all.n + least_answer(c) > most; /* then down to half: what is left is read again, and not at every turn */
    while (code == EXIT_GOOD && full && all.n > most / 2 && chat_drop_oldest(c->chat)) {
        n_dropped++;
        code = chat_tokens(c->chat, &all, NULL);
    }
    if (n_dropped > 0)
        (void)fprintf(stderr, "[the context of %u tokens is full: the oldest %u turn%s forgotten; -c reserves more]\n", most,
                      n_dropped, n_dropped == 1 ? " is" : "s are");
    if (code == EXIT_GOOD) code = keep_common(c, &all);
    token_list_free(&all);
    return code;
}

/* ---- a turn ---- */

void conversation_answered(conversation *c) {
    const generation *g = c->generation;
    size_t n_fed = g->session->length > c->fed.n ? g->session->length - c->fed.n : 0;
    token_list_add(&c->fed, g->tokens.tokens, n_fed < g->tokens.n ? n_fed : g->tokens.n);
    if (c->chat != NULL) chat_add(c->chat, "assistant", g->text.n > 0 ? g->text.bytes : "", g->text.n);
}

static void report(conversation *c) {
    const generation *g = c->generation;
    const model_session *s = g->session;
    if (!c->terminal) return;
    if (g->stopped == STOP_LENGTH)
        (void)fprintf(stderr, "[stopped after %u tokens: -n N or /set new N allows more]\n", g->max_new);
    if (g->stopped == STOP_CONTEXT)
        (void)fprintf(stderr, "[the context is full: the answer ends here. Go on, the oldest turns make room]\n");
    if (g->n_steps > 0 && g->seconds > 0)
        (void)fprintf(stderr, "[%.1f tokens/s, %u of %u tokens used]\n", g->n_steps / g->seconds, s->length, s->max_tokens);
    if (c->warned || s->max_tokens - s->length > s->max_tokens / 5 + least_answer(c)) return;
    c->warned = true;
    (void)fprintf(stderr,
                  "[the context is %u %% full. When it is full the oldest turns are forgotten and the conversation goes on; -c "
                  "reserves more, /save keeps what there is]\n",
                  (unsigned)(100 * (uint64_t)s->length / s->max_tokens));
}

static int answer(conversation *c) {
    generation *g = c->generation;
    model_session *s = g->session;
    const float *logits = NULL;
    uint32_t before = s->length;
    progress_bar progress = progress_begin("reading", c->next.n);
    int code = session_feed(s, c->next.tokens, c->next.n, &logits, &progress);
    progress_end(&progress);
    token_list_add(&c->fed, c->next.tokens, s->length - before);
    if (code != EXIT_GOOD) return code;
    generation_clear(g);
    code = generation_run(g, c->fed.tokens, c->fed.n, logits);
    if (code != EXIT_GOOD) return code;
    (void)putchar('\n');
    (void)fflush(stdout);
    conversation_answered(c);
    report(c);
    return EXIT_GOOD;
}

int conversation_turn(conversation *c, const char *bytes, size_t n) {
    const model_session *s = c->generation->session;
    int code = (c->chat != NULL ? chat_next_tokens : plain_next_tokens)(c, bytes, n);
    if (code == EXIT_GOOD && c->next.n > s->max_tokens - s->length)
        code =
            kit_fail(EXIT_FAILED,
                     "the conversation has %u of %u tokens and this turn needs %zu: shorten it, reserve more with -c, or limit "
                     "the context with --max-kv",
                     s->length, s->max_tokens, c->next.n);
    else if (code == EXIT_GOOD)
        code = answer(c);
    if (code != EXIT_GOOD && c->chat != NULL) chat_pop(c->chat);
    return code;
}

/* ---- forgetting, saving, loading ---- */

void conversation_clear(conversation *c) {
    if (c->chat != NULL) chat_clear(c->chat);
    (void)session_truncate(c->generation->session, 0);
    generation_clear(c->generation);
    c->generation->last_is_fed = true;
    c->fed.n = 0;
    c->warned = false;
}

static char *file_name(const char *name, const char *end) {
    size_t n = strlen(name) + strlen(end) + 1;
    char *path = kit_take(n);
    (void)snprintf(path, n, "%s%s", name, end);
    return path;
}

int conversation_save(const conversation *c, const char *name) {
    const model_session *s = c->generation->session;
    if (s->length == 0) return kit_fail(EXIT_FAILED, "there is nothing to save yet");
    char *pages = file_name(name, ".fkv");
    char *words = file_name(name, ".json");
    fkv_status status = fkv_seq_save(s->cache, s->seq, c->fed.tokens, s->length, pages);
    int code = status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
    if (code == EXIT_GOOD && c->chat != NULL) {
        json_t *saved = json_pack("{s:s, s:O}", "model", c->model, "messages", (json_t *)c->chat->messages);
        if (saved == NULL || json_dump_file(saved, words, JSON_INDENT(1)) != 0)
            code = kit_fail(EXIT_FAILED, "%s cannot be written", words);
        json_decref(saved);
    }
    if (code == EXIT_GOOD)
        (void)fprintf(stderr, "[saved %u tokens: %s%s%s]\n", s->length, pages, c->chat != NULL ? " and " : "",
                      c->chat != NULL ? words : "");
    free(pages);
    free(words);
    return code;
}

/* The messages of a saved conversation; NULL, with a message, where there are none. */
static json_t *read_messages(const char *path) {
    json_error_t error;
    json_t *saved = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    json_t *messages = json_incref(json_object_get(saved, "messages"));
    bool good = json_is_array(messages);
    for (size_t i = 0; i < json_array_size(messages); i++)
        good = good && json_is_string(json_object_get(json_array_get(messages, i), "role"));
    if (!good) {
        (void)kit_fail(EXIT_FAILED, "%s is no saved conversation%s%s", path, saved == NULL ? ": " : "",
                       saved == NULL ? error.text : "");
        json_decref(messages);
        messages = NULL;
    }
    json_decref(saved);
    return messages;
}

static int read_tokens(const char *path, uint32_t most, token_list *tokens) {
    uint32_t n = 0;
    fkv_status status = fkv_file_tokens(path, NULL, 0, &n);
    if (status == FKV_OK && n > most)
        return kit_fail(EXIT_FAILED, "%s has %u tokens, this conversation has room for %u: begin with -c %u or more", path, n,
                        most, n);
    if (status == FKV_OK && n > 0) {
        uint32_t room = n;
        uint32_t *list = kit_take((size_t)room * sizeof *list);
        status = fkv_file_tokens(path, list, room, &n);
        token_list_add(tokens, list, n < room ? n : room);
        free(list);
    }
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

/* The session with these pages. Where they are not right it begins anew, and the next turn computes what there was. */
static int load_pages(conversation *c, const char *path, const token_list *tokens) {
    model_session *s = c->generation->session;
    fkv_seq_config config = {.max_tokens = s->max_tokens, .prompt = tokens->tokens, .n_prompt = (uint32_t)tokens->n};
    fkv_status status = fkv_seq_close(s->cache, s->seq);
    if (status == FKV_OK) status = fkv_seq_load(s->cache, &config, path, &s->seq);
    s->length = 0;
    c->fed.n = 0;
    if (status == FKV_OK) status = fkv_seq_length(s->cache, s->seq, &s->length);
    if (status == FKV_OK) {
        token_list_add(&c->fed, tokens->tokens, s->length);
        return EXIT_GOOD;
    }
    int code = cli_fail_status(status);
    int begun = session_begin(s);
    return begun != EXIT_GOOD ? begun : code;
}

int conversation_load(conversation *c, const char *name) {
    char *pages = file_name(name, ".fkv");
    char *words = file_name(name, ".json");
    token_list tokens = {0};
    json_t *messages = c->chat != NULL ? read_messages(words) : NULL;
    int code =
        c->chat != NULL && messages == NULL ? EXIT_FAILED : read_tokens(pages, c->generation->session->max_tokens, &tokens);
    if (code == EXIT_GOOD) code = load_pages(c, pages, &tokens);
    if (code == EXIT_GOOD) {
        if (c->chat != NULL) chat_replace(c->chat, messages);
        generation_clear(c->generation);
        c->generation->last_is_fed = true;
        c->warned = false;
        (void)fprintf(stderr, "[loaded %u tokens, none of them computed]\n", c->generation->session->length);
    }
    json_decref(messages);
    token_list_free(&tokens);
    free(pages);
    free(words);
    return code;
}

void conversation_free(conversation *c) {
    token_list_free(&c->fed);
    token_list_free(&c->next);
}
