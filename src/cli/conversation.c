/* See conversation.h. */
#include "conversation.h"

#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns the number of tokens that must stay free for an answer. */
static uint32_t min_answer_tokens(const conversation *c) {
    uint32_t eighth = c->generation->session->max_tokens / 8;
    return eighth < 64 ? eighth : 64;
}

/* ---- start positions of turns in plain text ---- */

static void forget_marks(conversation *c) {
    c->marks.n = 0;
    c->lines.n = 0;
}

/* Records the start position and the user's message of a turn, so that the turn can be undone. */
static void add_mark(conversation *c, const char *bytes, size_t n) {
    const uint32_t mark[2] = {(uint32_t)c->fed.n, (uint32_t)c->lines.n};
    token_list_add(&c->marks, mark, 2);
    text_add(&c->lines, bytes, n);
}

/* Removes the tokens of the last turn from the conversation. Appends the user's message to `text`, which may be NULL. Returns
 * false and changes nothing if the start of the turn was not recorded or if the session cannot be truncated. */
static bool remove_last_turn(conversation *c, text_buffer *text) {
    generation *g = c->generation;
    if (c->marks.n < 2) return false;
    const uint32_t mark = c->marks.tokens[c->marks.n - 2];
    const size_t start = c->marks.tokens[c->marks.n - 1];
    /* The session may already be shorter than `mark`, because sealed pages can be truncated only at certain boundaries. */
    if (mark < g->session->length && session_truncate(g->session, mark) != EXIT_GOOD) return false;
    if (text != NULL) text_add(text, c->lines.bytes + start, c->lines.n - start);
    c->lines.n = start;
    c->marks.n -= 2;
    c->fed.n = mark; /* if the session is shorter, plain_next_tokens() feeds the missing tokens again */
    generation_clear(g);
    g->last_is_fed = true;
    return true;
}

/* ---- turn tokens ---- */

/* Appends the last token of the last answer to `fed` if this token was not fed to the session. */
static void add_last_token(conversation *c) {
    generation *g = c->generation;
    if (!g->last_is_fed && g->tokens.n > 0) token_list_add(&c->fed, g->tokens.tokens + g->tokens.n - 1, 1);
    g->last_is_fed = true;
}

/* Removes all tokens except the last `keep` from the conversation and empties the session. */
static int drop_first_tokens(conversation *c, size_t keep) {
    keep = keep < c->fed.n ? keep : c->fed.n;
    memmove(c->fed.tokens, c->fed.tokens + c->fed.n - keep, keep * sizeof *c->fed.tokens);
    c->fed.n = keep;
    forget_marks(c); /* turns whose tokens were dropped can no longer be undone */
    return session_truncate(c->generation->session, 0);
}

/* Tokenizes a line of plain text for a model without a chat template. If the context is full, drops its first half. Sets `next`
 * to the tokens of the conversation that are missing from the session, followed by the tokens of the line. */
static int plain_next_tokens(conversation *c, const char *bytes, size_t n) {
    model_session *s = c->generation->session;
    token_list added = {0};
    text_buffer line = {0};
    add_last_token(c);
    add_mark(c, bytes, n);
    text_add(&line, bytes, n);
    text_add(&line, "\n", 1);
    int code = token_list_add_text(&added, s->model, line.bytes, line.n, c->fed.n == 0 ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN);
    text_free(&line);
    if (code == EXIT_GOOD && c->fed.n > 0 && c->fed.n + added.n > s->max_tokens && added.n <= s->max_tokens / 2) {
        (void)fprintf(stderr, "[the context of %u tokens is full: its first half was dropped; use -c to reserve more]\n",
                      s->max_tokens);
        code = drop_first_tokens(c, s->max_tokens / 2 - added.n);
        add_mark(c, bytes, n);
    }
    c->next.n = 0;
    if (c->fed.n > s->length) token_list_add(&c->next, c->fed.tokens + s->length, c->fed.n - s->length);
    token_list_add(&c->next, added.tokens, added.n);
    token_list_free(&added);
    return code;
}

/* Truncates the session to the longest common prefix of its cached tokens and `all`. Sets `next` to the remaining tokens of
 * `all`. At least one token always remains. */
static int keep_common_prefix(conversation *c, const token_list *all) {
    model_session *s = c->generation->session;
    size_t n = 0;
    while (n + 1 < all->n && n < c->fed.n && n < s->length && all->tokens[n] == c->fed.tokens[n]) n++;
    int code = n < s->length ? session_truncate(s, (uint32_t)n) : EXIT_GOOD;
    c->next.n = 0;
    c->fed.n = s->length < c->fed.n ? s->length : c->fed.n;
    if (all->n > s->length) token_list_add(&c->next, all->tokens + s->length, all->n - s->length);
    return code;
}

/* Adds a user message to the chat and tokenizes the chat. Drops the oldest turns if the chat and a short answer would not fit in
 * the context. */
static int chat_next_tokens(conversation *c, const char *bytes, size_t n) {
    uint32_t most = c->generation->session->max_tokens;
    token_list all = {0};
    uint32_t n_dropped = 0;
    chat_add(c->chat, "user", bytes, n);
    int code = chat_tokens(c->chat, &all, NULL);
    /* Turns are dropped until half of the context is free. The remaining turns must then be prefilled again, so dropping only one
     * turn at a time would be slow. */
    bool full = all.n + min_answer_tokens(c) > most;
    while (code == EXIT_GOOD && full && all.n > most / 2 && chat_drop_oldest(c->chat)) {
        n_dropped++;
        code = chat_tokens(c->chat, &all, NULL);
    }
    if (n_dropped > 0)
        (void)fprintf(stderr, "[the context of %u tokens is full: the oldest %u turn%s dropped; -c reserves more]\n", most,
                      n_dropped, n_dropped == 1 ? " was" : "s were");
    if (code == EXIT_GOOD) code = keep_common_prefix(c, &all);
    token_list_free(&all);
    return code;
}

/* ---- turns ---- */

void conversation_add_answer(conversation *c) {
    const generation *g = c->generation;
    size_t n_fed = g->session->length > c->fed.n ? g->session->length - c->fed.n : 0;
    token_list_add(&c->fed, g->tokens.tokens, n_fed < g->tokens.n ? n_fed : g->tokens.n);
    if (c->chat != NULL) chat_add(c->chat, "assistant", g->text.n > 0 ? g->text.bytes : "", g->text.n);
}

static void report_turn(conversation *c) {
    const generation *g = c->generation;
    const model_session *s = g->session;
    if (!c->terminal) return;
    if (g->stopped == STOP_LENGTH)
        (void)fprintf(stderr, "[stopped after %u tokens; -n N or /set new N raises the limit]\n", g->max_new);
    if (g->stopped == STOP_CONTEXT)
        (void)fprintf(stderr, "[the context is full, so the answer ends here; the next message drops the oldest turns]\n");
    if (g->n_steps > 0 && g->seconds > 0)
        (void)fprintf(stderr, "[%.1f tokens/s, %u of %u tokens used]\n", g->n_steps / g->seconds, s->length, s->max_tokens);
    if (c->warned || s->max_tokens - s->length > s->max_tokens / 5 + min_answer_tokens(c)) return;
    c->warned = true;
    (void)fprintf(stderr,
                  "[the context is %u %% full; once it is full, the oldest turns are dropped. -c reserves more, /save saves the "
                  "conversation]\n",
                  (unsigned)(100 * (uint64_t)s->length / s->max_tokens));
}

/* Feeds n tokens of `next`, starting at index `from`, and appends to `fed` the tokens that are not in it yet. */
static int feed_tokens(conversation *c, size_t from, size_t n, const float **logits, progress_bar *progress) {
    model_session *s = c->generation->session;
    const uint32_t before = s->length;
    const int code = session_feed(s, c->next.tokens + from, n, logits, progress);
    const size_t n_listed = c->fed.n > before ? c->fed.n - before : 0; /* number of these tokens that were already in `fed` */
    const size_t n_fed = s->length - before;
    if (n_fed > n_listed) token_list_add(&c->fed, c->next.tokens + from + n_listed, n_fed - n_listed);
    return code;
}

/* Feeds the tokens of the turn. For models with recurrent layers, a snapshot is kept at the last page boundary before the
 * tokens that introduce the answer, because the next turn often repeats the conversation up to these tokens. A failure to store
 * the snapshot is ignored, because it only makes the next turn slower. */
static int feed_turn(conversation *c, const float **logits, progress_bar *progress) {
    enum { ANSWER_PREFIX = 16 };
    model_session *s = c->generation->session;
    const uint32_t end = s->length + (uint32_t)c->next.n;
    const uint32_t boundary = end > ANSWER_PREFIX ? (end - ANSWER_PREFIX) / s->page_tokens * s->page_tokens : 0;
    size_t n_first = 0;
    if (s->plan.cache.state_bytes != 0 && boundary > s->length) {
        n_first = boundary - s->length;
        const int code = feed_tokens(c, 0, n_first, NULL, progress);
        if (code != EXIT_GOOD) return code;
        (void)fkv_prefix_insert(s->cache, s->seq, c->fed.tokens, boundary);
    }
    return feed_tokens(c, n_first, c->next.n - n_first, logits, progress);
}

static int generate_answer(conversation *c) {
    generation *g = c->generation;
    const float *logits = NULL;
    progress_bar progress = progress_begin("prefill", 0, c->next.n);
    int code = feed_turn(c, &logits, &progress);
    progress_end(&progress);
    if (code != EXIT_GOOD) return code;
    generation_clear(g);
    code = generation_run(g, c->fed.tokens, c->fed.n, logits);
    if (code != EXIT_GOOD) return code;
    (void)putchar('\n');
    (void)fflush(stdout);
    conversation_add_answer(c);
    report_turn(c);
    return EXIT_GOOD;
}

int conversation_turn(conversation *c, const char *bytes, size_t n) {
    const model_session *s = c->generation->session;
    int code = (c->chat != NULL ? chat_next_tokens : plain_next_tokens)(c, bytes, n);
    if (code == EXIT_GOOD && c->next.n == 0)
        code = kit_fail(EXIT_FAILED, "the prompt is empty: the chat template produced no text for this message");
    else if (code == EXIT_GOOD && c->next.n > s->max_tokens - s->length)
        code =
            kit_fail(EXIT_FAILED,
                     "this turn needs %zu tokens, but the conversation already uses %u of %u: shorten the message, raise -c, or "
                     "use a sliding window (--max-kv)",
                     c->next.n, s->length, s->max_tokens);
    else if (code == EXIT_GOOD)
        code = generate_answer(c);
    if (code != EXIT_GOOD && c->chat != NULL) chat_pop(c->chat);
    if (code != EXIT_GOOD && c->chat == NULL) (void)remove_last_turn(c, NULL);
    return code;
}

/* ---- undo and history ---- */

bool conversation_undo(conversation *c, text_buffer *text) {
    return c->chat != NULL ? chat_undo(c->chat, text) : remove_last_turn(c, text);
}

static void show_message(void *user, const char *role, const char *content) {
    static const size_t mark = sizeof CHAT_CUT - 1;
    text_stream out = text_stream_open(stderr);
    const char *cut = strstr(content, CHAT_CUT);
    (void)user;
    (void)fputs(strcmp(role, "user") == 0 ? ">>> " : "", stderr);
    if (cut != NULL) (void)fprintf(stderr, "[document of %zu bytes]", (size_t)(cut - content));
    content = cut != NULL ? cut + mark : content;
    text_stream_put(&out, content, strlen(content));
    text_stream_end(&out);
    (void)fputc('\n', stderr);
}

void conversation_show(const conversation *c) {
    if (c->chat != NULL) {
        chat_each(c->chat, show_message, NULL);
        return;
    }
    const generation *g = c->generation;
    text_stream out = text_stream_open(stderr);
    const size_t n_unfed = !g->last_is_fed && g->tokens.n > 0 ? 1 : 0; /* 1 if the last answer token is not in `fed` */
    for (size_t i = 0; i < c->fed.n + n_unfed; i++) {
        size_t n = 0;
        const uint32_t token = i < c->fed.n ? c->fed.tokens[i] : g->tokens.tokens[g->tokens.n - 1];
        const char *text = fkv_token_text(g->session->model, token, false, &n);
        text_stream_put(&out, text, n);
    }
    text_stream_end(&out);
    (void)fputc('\n', stderr);
}

/* ---- clearing, saving, loading ---- */

void conversation_clear(conversation *c) {
    if (c->chat != NULL) chat_clear(c->chat);
    (void)session_truncate(c->generation->session, 0);
    generation_clear(c->generation);
    c->generation->last_is_fed = true;
    c->fed.n = 0;
    forget_marks(c);
    c->warned = false;
}

/* Returns the length of a name without its suffix .fkv or .json. */
static size_t stem_length(const char *name) {
    static const char *const suffixes[] = {".fkv", ".json"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        size_t n_suffix = strlen(suffixes[i]);
        if (n > n_suffix && name[n - n_suffix - 1] != '/' && strcmp(name + n - n_suffix, suffixes[i]) == 0) return n - n_suffix;
    }
    return n;
}

static char *file_name(const char *name, const char *suffix) {
    size_t n = stem_length(name) + strlen(suffix) + 1;
    char *path = kit_alloc(n);
    (void)snprintf(path, n, "%.*s%s", (int)stem_length(name), name, suffix);
    return path;
}

/* Writes JSON atomically to a file that only its owner can read: writes path.part, then renames it. Returns false and sets errno
 * on failure. */
static bool write_private_json(const json_t *value, const char *path) {
    size_t n = strlen(path) + sizeof ".part";
    char *part = kit_alloc(n);
    (void)snprintf(part, n, "%s.part", path);
    (void)unlink(part);
    int fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
    bool good = fd >= 0 && json_dumpfd(value, fd, JSON_INDENT(1)) == 0;
    if (fd >= 0) good = close(fd) == 0 && good;
    good = good && rename(part, path) == 0;
    int reason = errno;
    if (!good) (void)unlink(part);
    free(part);
    errno = reason;
    return good;
}

/* Feeds the tokens of a plain-text conversation that are missing from the session. These are the last token of the last answer,
 * and tokens that were truncated when a turn was undone. */
static int feed_missing_tokens(conversation *c) {
    model_session *s = c->generation->session;
    if (c->chat != NULL) return EXIT_GOOD;
    if (c->fed.n < s->max_tokens) add_last_token(c);
    if (c->fed.n <= s->length) return EXIT_GOOD;
    progress_bar progress = progress_begin("prefill", s->length, c->fed.n);
    const int code = session_feed(s, c->fed.tokens + s->length, c->fed.n - s->length, NULL, &progress);
    progress_end(&progress);
    if (code != EXIT_INTERRUPTED) return code;
    if (c->terminal) cli_clear_interrupt();
    return kit_fail(code, "interrupted: the conversation was not saved");
}

int conversation_save(conversation *c, const char *name) {
    const model_session *s = c->generation->session;
    const int fed = feed_missing_tokens(c);
    if (fed != EXIT_GOOD) return fed;
    if (s->length == 0) return kit_fail(EXIT_FAILED, "nothing to save: the conversation is empty");
    char *pages = file_name(name, ".fkv");
    char *words = file_name(name, ".json");
    fkv_status status = fkv_seq_save(s->cache, s->seq, c->fed.tokens, s->length, pages);
    int code = status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
    if (code == EXIT_GOOD && c->chat != NULL) {
        json_t *saved = json_pack("{s:s, s:O}", "model", c->model, "messages", (json_t *)c->chat->messages);
        if (saved == NULL || !write_private_json(saved, words))
            code = kit_fail(EXIT_FAILED, "cannot write %s: %s", words, strerror(errno));
        json_decref(saved);
    }
    if (code == EXIT_GOOD)
        (void)fprintf(stderr, "[saved %u tokens: %s%s%s]\n", s->length, pages, c->chat != NULL ? " and " : "",
                      c->chat != NULL ? words : "");
    free(pages);
    free(words);
    return code;
}

/* Reads the messages of a saved conversation. Returns NULL after printing an error. */
static json_t *read_saved_messages(const char *path) {
    json_error_t error;
    json_t *saved = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    json_t *messages = json_incref(json_object_get(saved, "messages"));
    bool good = json_is_array(messages);
    for (size_t i = 0; i < json_array_size(messages); i++)
        good = good && json_is_string(json_object_get(json_array_get(messages, i), "role"));
    if (!good) {
        (void)kit_fail(EXIT_FAILED, "%s is not a saved conversation%s%s", path, saved == NULL ? ": " : "",
                       saved == NULL ? error.text : "");
        json_decref(messages);
        messages = NULL;
    }
    json_decref(saved);
    return messages;
}

static int read_saved_tokens(const char *path, uint32_t most, token_list *tokens) {
    uint32_t n = 0;
    fkv_status status = fkv_file_tokens(path, NULL, 0, &n);
    if (status == FKV_OK && n > most)
        return kit_fail(EXIT_FAILED, "%s has %u tokens, but the context has room for only %u: restart with -c %u or more", path,
                        n, most, n);
    if (status == FKV_OK && n > 0) {
        uint32_t room = n;
        uint32_t *list = kit_alloc((size_t)room * sizeof *list);
        status = fkv_file_tokens(path, list, room, &n);
        token_list_add(tokens, list, n < room ? n : room);
        free(list);
    }
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

/* Replaces the session's sequence with saved pages. If they cannot be loaded, the sequence starts empty and the next turn
 * recomputes the conversation. */
static int load_saved_pages(conversation *c, const char *path, const token_list *tokens) {
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
    json_t *messages = c->chat != NULL ? read_saved_messages(words) : NULL;
    int code =
        c->chat != NULL && messages == NULL ? EXIT_FAILED : read_saved_tokens(pages, c->generation->session->max_tokens, &tokens);
    if (code == EXIT_GOOD) code = load_saved_pages(c, pages, &tokens);
    if (code == EXIT_GOOD) {
        if (c->chat != NULL) chat_replace(c->chat, messages);
        forget_marks(c);
        generation_clear(c->generation);
        c->generation->last_is_fed = true;
        c->warned = false;
        (void)fprintf(stderr, "[loaded %u tokens without recomputing them]\n", c->generation->session->length);
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
    token_list_free(&c->marks);
    text_free(&c->lines);
}
