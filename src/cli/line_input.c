/* See line_input.h. Line editing and history are libedit's; history lives as long as the program. */
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
typedef struct editline EditLine; /* never made */
typedef struct history History;
#endif

static const char QUOTES[] = "\"\"\"";

struct line_input {
    bool terminal;
    bool interrupted;
    const char *prompt;
    EditLine *editor; /* NULL: without */
    History *history;
    char *line; /* of getline() */
    size_t room;
};

#ifdef FLATKV_LIBEDIT

static char *say_prompt(EditLine *editor) {
    void *user = NULL;
    (void)el_get(editor, EL_CLIENTDATA, &user);
    const line_input *in = user;
    static char text[8];
    (void)snprintf(text, sizeof text, "%s", in != NULL ? in->prompt : "");
    return text;
}

enum { CTRL_C = 'C' - '@', CTRL_Z = 'Z' - '@' };

/* As the shell's job, with the terminal as it was found. */
static void stop_until_continued(EditLine *editor) {
    (void)el_set(editor, EL_PREP_TERM, 0);
    (void)raise(SIGTSTP);
    (void)el_set(editor, EL_PREP_TERM, 1);
    (void)el_set(editor, EL_REFRESH);
}

/* Ctrl-C is a key while a line is edited: a signal could come just before the read and would not be seen. */
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
            stop_until_continued(editor);
            continue;
        }
        size_t n = mbrtowc(key, &byte, 1, &state);
        if (n <= 1) return 1;
        if (n == (size_t)-1) state = (mbstate_t){0}; /* no UTF-8: left out */
    }
}

static void open_editor(line_input *in) {
    HistEvent event;
    (void)setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) (void)setlocale(LC_CTYPE, "C.UTF-8"); /* prompts are UTF-8 wherever the locale says nothing */
    in->editor = el_init("flatkv", stdin, stderr, stderr);
    if (in->editor == NULL) return;
    in->history = history_init();
    (void)el_set(in->editor, EL_CLIENTDATA, in);
    (void)el_set(in->editor, EL_PROMPT, say_prompt);
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
    (void)el_set(in->editor, EL_PREP_TERM, 1); /* else the prompt is shown first, and a key at once is the terminal's */
    const char *line = el_gets(in->editor, &length);
    if (line == NULL || length <= 0) {
        el_reset(in->editor);
        return NULL;
    }
    *n = (size_t)length;
    if (in->history != NULL && length > 1) (void)history(in->history, &event, H_ENTER, line);
    return line;
}

#else

static void open_editor(line_input *in) { (void)in; }
static void close_editor(line_input *in) { (void)in; }

static const char *edit_line(line_input *in, size_t *n) {
    (void)in;
    *n = 0;
    return NULL;
}

#endif

line_input *line_input_open(void) {
    line_input *in = kit_take(sizeof *in);
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

static const char *plain_line(line_input *in, size_t *n) {
    if (in->terminal) {
        (void)fputs(in->prompt, stderr);
        (void)fflush(stderr);
        struct pollfd keys = {.fd = STDIN_FILENO, .events = POLLIN};
        if (poll(&keys, 1, -1) < 0) return NULL; /* a signal ends this and no read */
    }
    ssize_t got = getline(&in->line, &in->room, stdin);
    *n = got > 0 ? (size_t)got : 0;
    return got > 0 ? in->line : NULL;
}

/* One line without its end; NULL: the input ended, or was interrupted. */
static const char *next_line(line_input *in, size_t *n) {
    const char *line = in->editor != NULL ? edit_line(in, n) : plain_line(in, n);
    if (line != NULL && *n > 0 && line[*n - 1] == '\n') --*n;
    return line;
}

static line_answer over(line_input *in) {
    bool interrupted = in->interrupted || cli_interrupted();
    in->prompt = ">>> ";
    in->interrupted = false;
    if (!interrupted) return LINE_END;
    clearerr(stdin);
    return LINE_INTERRUPTED;
}

/* From the opening """ on, up to the closing one. */
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
        if (line == NULL) return over(in);
    }
    in->prompt = ">>> ";
    return LINE_TURN;
}

line_answer line_input_read(line_input *in, text_buffer *turn) {
    size_t n = 0;
    turn->n = 0;
    const char *line = next_line(in, &n);
    if (line == NULL || cli_interrupted()) return over(in);
    if (n >= strlen(QUOTES) && memcmp(line, QUOTES, strlen(QUOTES)) == 0) return read_quoted(in, line, n, turn);
    text_add(turn, line, n);
    return LINE_TURN;
}
