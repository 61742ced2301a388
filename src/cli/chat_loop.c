/* See chat_loop.h. */
#include "chat_loop.h"

#include "cli.h"
#include "line_input.h"

#include <stdlib.h>
#include <string.h>

typedef struct chat_loop {
    conversation *c;
    chat_settings *settings;
    line_input *in;
    text_buffer again; /* message that a slash command submits in place of the user; empty if there is none */
    bool over;         /* /bye was typed */
} chat_loop;

typedef struct chat_command {
    const char *name;
    const char *argument; /* placeholder for the argument in /help; NULL if the command takes no argument */
    const char *help;     /* description; NULL if the command is an alias that /help does not list */
    void (*run)(chat_loop *t, const char *argument);
} chat_command;

/* ---- /set ---- */

typedef enum setting_kind { SET_REAL, SET_COUNT, SET_SEED } setting_kind;

typedef struct setting {
    const char *name;
    setting_kind kind;
    void *target;
    const char *help;
} setting;

enum { N_SETTINGS = 8 };

static void list_settings(chat_loop *t, setting list[N_SETTINGS]) {
    fkv_sampler_config *s = &t->settings->sampling;
    const setting all[N_SETTINGS] = {{"temperature", SET_REAL, &s->temperature, "0: greedy"},
                                     {"top_k", SET_COUNT, &s->top_k, "0: all"},
                                     {"top_p", SET_REAL, &s->top_p, "1: all"},
                                     {"min_p", SET_REAL, &s->min_p, "0: all"},
                                     {"repeat_penalty", SET_REAL, &s->repetition_penalty, "1: off"},
                                     {"seed", SET_SEED, &s->seed, ""},
                                     {"new", SET_COUNT, &t->c->generation->max_new, "maximum tokens per answer"},
                                     {NULL, SET_COUNT, NULL, NULL}};
    memcpy(list, all, sizeof all);
}

static void show_setting(const setting *s) {
    if (s->kind == SET_REAL) (void)fprintf(stderr, "  %-15s %g", s->name, (double)*(const float *)s->target);
    if (s->kind == SET_COUNT) (void)fprintf(stderr, "  %-15s %u", s->name, *(const uint32_t *)s->target);
    if (s->kind == SET_SEED) (void)fprintf(stderr, "  %-15s %llu", s->name, (unsigned long long)*(const uint64_t *)s->target);
    (void)fprintf(stderr, "%s%s%s\n", s->help[0] != 0 ? "   (" : "", s->help, s->help[0] != 0 ? ")" : "");
}

static bool parse_setting(const setting *s, const char *value) {
    char *end = NULL;
    double number = strtod(value, &end);
    if (end == value || *end != 0 || !(number >= 0) || number > 1e9) return false;
    if (s->kind == SET_REAL) *(float *)s->target = (float)number;
    if (s->kind == SET_COUNT) *(uint32_t *)s->target = (uint32_t)number;
    if (s->kind == SET_SEED) *(uint64_t *)s->target = strtoull(value, NULL, 10);
    return true;
}

/* Replaces the sampler with one that uses the current settings. Returns false after printing an error. */
static bool replace_sampler(chat_loop *t) {
    generation *g = t->c->generation;
    fkv_sampler *made = NULL;
    fkv_status status = fkv_sampler_open(&t->settings->sampling, fkv_model_about(g->session->model)->n_vocab, &made);
    if (status != FKV_OK) {
        (void)cli_fail_status(status);
        return false;
    }
    fkv_sampler_close(g->sampler);
    g->sampler = made;
    return true;
}

static void set_show_reasoning(chat_loop *t, const char *value) {
    t->c->generation->hide_reasoning = strcmp(value, "hide") == 0;
    (void)fprintf(stderr, "  reasoning       %s   (show, hide)\n", t->c->generation->hide_reasoning ? "hide" : "show");
}

static void set_think(chat_loop *t, const char *value) {
    if (t->c->chat == NULL) return;
    if (value[0] != 0) t->c->chat->think = strcmp(value, "off") == 0 ? CHAT_THINK_OFF : CHAT_THINK_ON;
    static const char *const names[] = {"template default", "off", "on"};
    (void)fprintf(stderr, "  think           %s   (on, off; for chat templates that support it)\n", names[t->c->chat->think]);
}

static void run_set(chat_loop *t, const char *argument) {
    setting list[N_SETTINGS];
    char name[32] = "";
    int at = 0;
    list_settings(t, list);
    (void)sscanf(argument, "%31s %n", name, &at);
    const char *value = argument + (at > 0 ? (size_t)at : strlen(argument));
    if (name[0] == 0 || value[0] == 0) {
        for (const setting *s = list; s->name != NULL; s++) show_setting(s);
        set_show_reasoning(t, t->c->generation->hide_reasoning ? "hide" : "show");
        set_think(t, "");
        return;
    }
    if (strcmp(name, "reasoning") == 0) {
        set_show_reasoning(t, value);
        return;
    }
    if (strcmp(name, "think") == 0) {
        set_think(t, value);
        return;
    }
    for (const setting *s = list; s->name != NULL; s++) {
        if (strcmp(s->name, name) != 0) continue;
        fkv_sampler_config before = t->settings->sampling;
        if (!parse_setting(s, value))
            (void)kit_fail(0, "/set %s %s: expected a non-negative number", name, value);
        else if (!replace_sampler(t))
            t->settings->sampling = before;
        else
            show_setting(s);
        return;
    }
    (void)kit_fail(0, "/set %s: unknown setting; /set lists the settings", name);
}

/* ---- other commands ---- */

static void run_clear(chat_loop *t, const char *argument) {
    (void)argument;
    conversation_clear(t->c);
    (void)fprintf(stderr, "[new conversation]\n");
}

static void run_save(chat_loop *t, const char *argument) {
    if (argument[0] == 0)
        (void)kit_fail(0, "/save needs a name: /save NAME writes NAME.fkv and NAME.json");
    else
        (void)conversation_save(t->c, argument);
}

static void run_load(chat_loop *t, const char *argument) {
    if (argument[0] == 0)
        (void)kit_fail(0, "/load needs the name of a conversation saved with /save: /load NAME");
    else
        (void)conversation_load(t->c, argument);
}

static void run_system(chat_loop *t, const char *argument) {
    if (t->c->chat == NULL) {
        (void)kit_fail(0, "/system is not available: this model has no chat template");
        return;
    }
    chat_set_system(t->c->chat, argument);
    (void)fprintf(stderr, "[system message %s; takes effect in the next turn]\n", argument[0] != 0 ? "set" : "removed");
}

/* ---- turns ---- */

static void report_no_turn(void) {
    (void)kit_fail(0, "there is no turn to undo or change; the document given with -f is always kept");
}

static void run_undo(chat_loop *t, const char *argument) {
    (void)argument;
    if (conversation_undo(t->c, NULL))
        (void)fprintf(stderr, "[the last turn was removed]\n");
    else
        report_no_turn();
}

static void run_history(chat_loop *t, const char *argument) {
    (void)argument;
    conversation_show(t->c);
}

static void run_regenerate(chat_loop *t, const char *argument) {
    (void)argument;
    t->again.n = 0;
    if (!conversation_undo(t->c, &t->again)) report_no_turn();
}

/* Replaces the last message with the argument. Without an argument, the user edits the message on a terminal. */
static void run_edit(chat_loop *t, const char *argument) {
    text_buffer before = {0};
    t->again.n = 0;
    if (argument[0] == 0 && !line_input_can_edit(t->in))
        (void)kit_fail(0, "/edit needs the new message: /edit TEXT");
    else if (!conversation_undo(t->c, &before))
        report_no_turn();
    else if (argument[0] != 0)
        text_add(&t->again, argument, strlen(argument));
    else
        line_input_prefill(t->in, before.bytes, before.n);
    text_free(&before);
}

/* ---- /plan, /bye and /help ---- */

static void run_plan(chat_loop *t, const char *argument) {
    const model_session *s = t->c->generation->session;
    const fkv_runner_plan *p = &s->plan;
    char pages[32];
    char rest[32];
    char weights[32];
    char token[32];
    (void)argument;
    (void)fprintf(
        stderr,
        "  %u of %u tokens used, %s per token\n  reserved: %s for pages, %s for other buffers; weights: %s. Memory use is constant.\n",
        s->length, s->max_tokens, kit_bytes(p->cache.token_bytes, token), kit_bytes(p->cache.slab_bytes, pages),
        kit_bytes(p->total_bytes - p->cache.slab_bytes, rest), kit_bytes(p->packed_bytes + p->mapped_bytes, weights));
}

static void run_bye(chat_loop *t, const char *argument) {
    (void)argument;
    t->over = true;
}

static void run_help(chat_loop *t, const char *argument);

static const chat_command COMMANDS[] = {
    {"/?", NULL, "list the commands (also /help)", run_help},
    {"/clear", NULL, "start a new conversation", run_clear},
    {"/save", "NAME", "save the conversation: pages in NAME.fkv, messages in NAME.json", run_save},
    {"/load", "NAME", "continue a saved conversation without recomputing it", run_load},
    {"/history", NULL, "print the conversation", run_history},
    {"/undo", NULL, "remove the last message and its answer", run_undo},
    {"/regenerate", NULL, "answer the last message again", run_regenerate},
    {"/edit", "TEXT", "replace the last message; without TEXT, edit it", run_edit},
    {"/system", "TEXT", "set the system message; without TEXT, remove it", run_system},
    {"/set", "NAME VALUE", "change a sampling setting; without arguments, list the settings", run_set},
    {"/plan", NULL, "show used and reserved memory", run_plan},
    {"/bye", NULL, "quit (also /exit, /quit, Ctrl-D)", run_bye},
    {"/help", NULL, NULL, run_help},
    {"/exit", NULL, NULL, run_bye},
    {"/quit", NULL, NULL, run_bye},
};

static void run_help(chat_loop *t, const char *argument) {
    (void)t;
    (void)argument;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof COMMANDS[0]; i++)
        if (COMMANDS[i].help != NULL)
            (void)fprintf(stderr, "  %-11s %-11s %s\n", COMMANDS[i].name,
                          COMMANDS[i].argument != NULL ? COMMANDS[i].argument : "", COMMANDS[i].help);
    (void)fprintf(stderr, "  %-23s %s\n  %-23s %s\n", "\"\"\"", "start and end of a multi-line message", "Ctrl-C",
                  "stop the answer");
}

/* If the line is a slash command, runs it and returns true. On a terminal, an unknown command is reported as an error, unless its
 * name contains a second slash, as in a path. */
static bool run_slash_command(chat_loop *t, const char *line) {
    size_t n = strcspn(line, " \t\n");
    if (line[0] != '/') return false;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof COMMANDS[0]; i++) {
        if (strlen(COMMANDS[i].name) != n || memcmp(COMMANDS[i].name, line, n) != 0) continue;
        COMMANDS[i].run(t, line + n + strspn(line + n, " \t"));
        return true;
    }
    if (!t->c->terminal || memchr(line + 1, '/', n - 1) != NULL) return false;
    (void)kit_fail(0, "unknown command %.*s; /? lists the commands", (int)n, line);
    return true;
}

/* ---- loop ---- */

static void print_banner(const chat_loop *t) {
    const model_session *s = t->c->generation->session;
    const fkv_model_info *about = fkv_model_about(s->model);
    codec_choice codec = codec_of_runner(t->settings->runner);
    char name[CODEC_NAME];
    char bytes[32];
    (void)fprintf(stderr, "%s (%s, %.3g %s parameters): context of %u tokens, %s reserved (codec %s)\n", t->c->model,
                  about->architecture, (double)about->n_parameters / (about->n_parameters < 1000000000 ? 1e6 : 1e9),
                  about->n_parameters < 1000000000 ? "million" : "billion", s->max_tokens,
                  kit_bytes(s->plan.cache.slab_bytes, bytes), codec_name(&codec, name));
    if (s->max_tokens < about->context)
        (void)fprintf(stderr, "the model supports %u tokens; use -c %u to reserve memory for all of them\n", about->context,
                      about->context);
    (void)fprintf(stderr, "/? lists the commands, Ctrl-C stops an answer, Ctrl-D quits\n\n");
}

/* Handles one input: a command or a message. Returns false and sets *code to the exit code if the loop must end. */
static bool handle_input(chat_loop *t, const text_buffer *turn, int *code) {
    if (turn->n == 0) return true;
    t->again.n = 0;
    const bool is_command = run_slash_command(t, turn->bytes);
    if (is_command && t->again.n == 0) return !t->over;
    const text_buffer *message = is_command ? &t->again : turn;
    *code = conversation_turn(t->c, message->bytes, message->n);
    if (!cli_interrupted() && t->c->generation->stopped != STOP_INTERRUPTED) {
        if (!t->c->terminal) return *code == EXIT_GOOD;
        *code = EXIT_GOOD; /* the error has already been printed, and the user may try again */
        return true;
    }
    if (*code == EXIT_INTERRUPTED && t->c->terminal) (void)fprintf(stderr, "[stopped; this turn was discarded]\n");
    cli_clear_interrupt();
    if (*code == EXIT_INTERRUPTED && !t->c->terminal) return false;
    *code = EXIT_GOOD;
    return true;
}

int chat_loop_run(conversation *c, chat_settings *settings) {
    chat_loop t = {.c = c, .settings = settings};
    line_input *in = t.in = line_input_open();
    text_buffer turn = {0};
    int code = EXIT_GOOD;
    c->terminal = line_input_is_terminal(in);
    if (c->terminal) print_banner(&t);
    for (bool on = true; on;) {
        line_answer answer = line_input_read(in, &turn);
        if (answer == LINE_TURN) {
            on = handle_input(&t, &turn, &code);
        } else if (answer == LINE_INTERRUPTED && c->terminal) {
            (void)fprintf(stderr, "\n[press Ctrl-D or type /bye to quit]\n");
            cli_clear_interrupt();
        } else {
            if (answer == LINE_INTERRUPTED) code = EXIT_INTERRUPTED;
            if (c->terminal) (void)fputc('\n', stderr);
            on = false;
        }
    }
    text_free(&turn);
    text_free(&t.again);
    line_input_close(in);
    return code;
}
