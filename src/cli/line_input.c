/* See line_input.h. Uses libedit for editing and history; the history is not saved between runs. */
#include "line_input.h"

#include "../kit/program.h"
#include "cli.h"

#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#ifdef FLATKV_LIBEDIT
#include <histedit.h>
#else
typedef struct editline EditLine; /* placeholder type for builds without libedit */
typedef struct history History;
#endif

static const char QUOTES[] = "\"\"\"";

struct line_input {
    bool terminal;
    bool interrupted;
    const char *prompt;
    EditLine *editor; /* NULL: no line editing */
    History *history;
    char *line; /* buffer of getline() */
    size_t capacity;
};

#ifdef FLATKV_LIBEDIT

static char *prompt_callback(EditLine *editor) {
    void *user = NULL;
    (void)el_get(editor, EL_CLIENTDATA, &user);
    const line_input *in = user;
    static char text[8];
    (void)snprintf(text, sizeof text, "%s", in != NULL ? in->prompt : "");
    return text;
}

enum { CTRL_C = 'C' - '@', CTRL_Z = 'Z' - '@' };

/* Restores the original terminal mode and suspends the process (Ctrl-Z). */
static void suspend_until_continued(EditLine *editor) {
    (void)el_set(editor, EL_PREP_TERM, 0);
    (void)raise(SIGTSTP);
    (void)el_set(editor, EL_PREP_TERM, 1);
    (void)el_set(editor, EL_REFRESH);
}

/* Reads one key. Ctrl-C is read as a key, because a signal that arrives just before read() would not interrupt it. */
static int read_key(EditLine *editor, wchar_t *key) {
    void *user = NULL;
    mbstate_t state = {0};
    (void)el_get(editor, EL_CLIENTDATA, &user);
    line_input *in = user;
    for (;;) {
        char byte = 0;
        ssize_t got = read(STDIN_FILENO, &byte, 1);
        if (got <= 0) return (int)got;
        if (byte == CTRL_C) {
            in->interrupted = true;
            return 0;
        }
        if (byte == CTRL_Z) {
            suspend_until_continued(editor);
            continue;
        }
        size_t n = mbrtowc(key, &byte, 1, &state);
        if (n <= 1) return 1;
        if (n == (size_t)-1) state = (mbstate_t){0}; /* invalid UTF-8 is skipped */
    }
}

static void open_editor(line_input *in) {
    HistEvent event;
    (void)setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) (void)setlocale(LC_CTYPE, "C.UTF-8"); /* input is UTF-8 even if no locale is set */
    in->editor = el_init("flatkv", stdin, stderr, stderr);
    if (in->editor == NULL) return;
    in->history = history_init();
    (void)el_set(in->editor, EL_CLIENTDATA, in);
    (void)el_set(in->editor, EL_PROMPT, prompt_callback);
    (void)el_set(in->editor, EL_EDITOR, "emacs");
    (void)el_set(in->editor, EL_GETCFN, read_key);
    (void)el_set(in->editor, EL_SETTY, "-d", "-isig", NULL);
    if (in->history == NULL) return;
    (void)history(in->history, &event, H_SETSIZE, 1000);
    (void)history(in->history, &event, H_SETUNIQUE, 1);
    (void)el_set(in->editor, EL_HIST, history, in->history);
}

static void close_editor(line_input *in) {
    if (in->history != NULL) history_end(in->history);
    if (in->editor != NULL) el_end(in->editor);
}

static const char *edit_line(line_input *in, size_t *n) {
    HistEvent event;
    int length = 0;
    (void)el_set(in->editor, EL_PREP_TERM,
                 1); /* called before the prompt is printed, so that the terminal does not echo early key presses */
    const char *line = el_gets(in->editor, &length);
    if (line == NULL || length <= 0) {
        el_reset(in->editor);
        return NULL;
    }
    *n = (size_t)length;
    if (in->history != NULL && length > 1) (void)history(in->history, &event, H_ENTER, line);
    return line;
}

static void push_text(line_input *in, const char *line) {
    if (in->editor != NULL) el_push(in->editor, line);
}

#else

static void open_editor(line_input *in) { (void)in; }
static void push_text(line_input *in, const char *line) { (void)in, (void)line; }
static void close_editor(line_input *in) { (void)in; }

static const char *edit_line(line_input *in, size_t *n) {
    (void)in;
    *n = 0;
    return NULL;
}

#endif

line_input *line_input_open(void) {
    line_input *in = kit_alloc(sizeof *in);
    *in = (line_input){.terminal = isatty(STDIN_FILENO) != 0 && isatty(STDERR_FILENO) != 0, .prompt = ">>> "};
    if (in->terminal) open_editor(in);
    return in;
}

void line_input_close(line_input *in) {
    if (in == NULL) return;
    close_editor(in);
    free(in->line);
    free(in);
}

bool line_input_is_terminal(const line_input *in) { return in->terminal; }

bool line_input_can_edit(const line_input *in) { return in->editor != NULL; }

void line_input_prefill(line_input *in, const char *text, size_t n) {
    char *line = kit_alloc(n + 1);
    for (size_t i = 0; i < n; i++) /* replaces control characters, which libedit would interpret as key bindings */
        line[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? ' ' : text[i];
    line[n] = 0;
    push_text(in, line);
    free(line);
}

static const char *read_plain_line(line_input *in, size_t *n) {
    if (in->terminal) {
        (void)fputs(in->prompt, stderr);
        (void)fflush(stderr);
        struct pollfd keys = {.fd = STDIN_FILENO, .events = POLLIN};
        if (poll(&keys, 1, -1) < 0) return NULL; /* Ctrl-C interrupts poll(), but getline() would resume reading */
    }
    ssize_t got = getline(&in->line, &in->capacity, stdin);
    *n = got > 0 ? (size_t)got : 0;
    return got > 0 ? in->line : NULL;
}

/* Returns the next line without its newline, or NULL at the end of input or after an interrupt. */
static const char *next_line(line_input *in, size_t *n) {
    const char *line = in->editor != NULL ? edit_line(in, n) : read_plain_line(in, n);
    if (line != NULL && *n > 0 && line[*n - 1] == '\n') --*n;
    return line;
}

/* Resets the prompt and returns the reason why next_line() returned NULL. */
static line_answer end_of_lines(line_input *in) {
    bool interrupted = in->interrupted || cli_interrupted();
    in->prompt = ">>> ";
    in->interrupted = false;
    if (!interrupted) return LINE_END;
    clearerr(stdin);
    return LINE_INTERRUPTED;
}

/* Concatenates the lines between the opening """ and the closing """. */
static line_answer read_quoted(line_input *in, const char *line, size_t n, text_buffer *turn) {
    size_t quotes = strlen(QUOTES);
    line += quotes;
    n -= quotes;
    in->prompt = "... ";
    for (;;) {
        bool last = n >= quotes && memcmp(line + n - quotes, QUOTES, quotes) == 0;
        text_add(turn, line, last ? n - quotes : n);
        if (last) break;
        text_add(turn, "\n", 1);
        line = next_line(in, &n);
        if (line == NULL) return end_of_lines(in);
    }
    in->prompt = ">>> ";
    return LINE_TURN;
}

line_answer line_input_read(line_input *in, text_buffer *turn) {
    size_t n = 0;
    turn->n = 0;
    const char *line = next_line(in, &n);
    if (line == NULL || cli_interrupted()) return end_of_lines(in);
    if (n >= strlen(QUOTES) && memcmp(line, QUOTES, strlen(QUOTES)) == 0) return read_quoted(in, line, n, turn);
    text_add(turn, line, n);
    return LINE_TURN;
}
