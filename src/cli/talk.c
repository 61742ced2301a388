/* See talk.h. */
#include "talk.h"

#include "cli.h"
#include "line_input.h"

#include <stdlib.h>
#include <string.h>

typedef struct talk {
    conversation *c;
    talk_settings *settings;
    bool over;
} talk;

typedef struct talk_command {
    const char *name;
    const char *argument; /* NULL: none */
    const char *help;
    void (*run)(talk *t, const char *argument);
} talk_command;

/* ---- /set ---- */

typedef enum setting_kind { SET_REAL, SET_COUNT, SET_SEED } setting_kind;

typedef struct setting {
    const char *name;
    setting_kind kind;
    void *target;
    const char *help;
} setting;

enum { N_SETTINGS = 8 };

static void list_settings(talk *t, setting list[N_SETTINGS]) {
    fkv_sampler_config *s = &t->settings->sampling;
    const setting all[N_SETTINGS] = {{"temperature", SET_REAL, &s->temperature, "0 takes the most likely token"},
                                     {"top_k", SET_COUNT, &s->top_k, "0: all"},
                                     {"top_p", SET_REAL, &s->top_p, "1: all"},
                                     {"min_p", SET_REAL, &s->min_p, "0: all"},
                                     {"repeat_penalty", SET_REAL, &s->repetition_penalty, "1: off"},
                                     {"seed", SET_SEED, &s->seed, ""},
                                     {"new", SET_COUNT, &t->c->generation->max_new, "tokens of an answer at most"},
                                     {NULL, SET_COUNT, NULL, NULL}};
    memcpy(list, all, sizeof all);
}

static void show_setting(const setting *s) {
    if (s->kind == SET_REAL) (void)fprintf(stderr, "  %-15s %g", s->name, (double)*(const float *)s->target);
    if (s->kind == SET_COUNT) (void)fprintf(stderr, "  %-15s %u", s->name, *(const uint32_t *)s->target);
    if (s->kind == SET_SEED) (void)fprintf(stderr, "  %-15s %llu", s->name, (unsigned long long)*(const uint64_t *)s->target);
    (void)fprintf(stderr, "%s%s%s\n", s->help[0] != 0 ? "   (" : "", s->help, s->help[0] != 0 ? ")" : "");
}

static bool read_setting(const setting *s, const char *value) {
    char *end = NULL;
    double number = strtod(value, &end);
    if (end == value || *end != 0 || !(number >= 0) || number > 1e9) return false;
    if (s->kind == SET_REAL) *(float *)s->target = (float)number;
    if (s->kind == SET_COUNT) *(uint32_t *)s->target = (uint32_t)number;
    if (s->kind == SET_SEED) *(uint64_t *)s->target = strtoull(value, NULL, 10);
    return true;
}

/* A sampler with the settings as they are now. */
static bool new_sampler(talk *t) {
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

static void set_show_reasoning(talk *t, const char *value) {
    t->c->generation->hide_reasoning = strcmp(value, "hide") == 0;
    (void)fprintf(stderr, "  reasoning       %s   (show, hide)\n", t->c->generation->hide_reasoning ? "hide" : "show");
}

static void set_think(talk *t, const char *value) {
    if (t->c->chat == NULL) return;
    if (value[0] != 0) t->c->chat->think = strcmp(value, "off") == 0 ? CHAT_THINK_OFF : CHAT_THINK_ON;
    static const char *const names[] = {"as the template says", "off", "on"};
    (void)fprintf(stderr, "  think           %s   (on, off: for templates that ask)\n", names[t->c->chat->think]);
}

static void run_set(talk *t, const char *argument) {
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
        if (!read_setting(s, value))
            (void)kit_fail(0, "/set %s %s: a number, 0 or above", name, value);
        else if (!new_sampler(t))
            t->settings->sampling = before;
        else
            show_setting(s);
        return;
    }
    (void)kit_fail(0, "/set %s: no such setting; /set lists them", name);
}

/* ---- the other commands ---- */

static void run_clear(talk *t, const char *argument) {
    (void)argument;
    conversation_clear(t->c);
    (void)fprintf(stderr, "[a new conversation]\n");
}

static void run_save(talk *t, const char *argument) {
    if (argument[0] == 0)
        (void)kit_fail(0, "/save NAME: where to");
    else
        (void)conversation_save(t->c, argument);
}

static void run_load(talk *t, const char *argument) {
    if (argument[0] == 0)
        (void)kit_fail(0, "/load NAME: of what /save has saved");
    else
        (void)conversation_load(t->c, argument);
}

static void run_system(talk *t, const char *argument) {
    if (t->c->chat == NULL) {
        (void)kit_fail(0, "this model has no chat template: there is no system message");
        return;
    }
    chat_set_system(t->c->chat, argument);
    (void)fprintf(stderr, "[%s, from the next turn on]\n", argument[0] != 0 ? "the system message is set" : "no system message");
}

static void run_plan(talk *t, const char *argument) {
    const model_session *s = t->c->generation->session;
    const fkv_runner_plan *p = &s->plan;
    char pages[32];
    char rest[32];
    char weights[32];
    char token[32];
    (void)argument;
    (void)fprintf(
        stderr,
        "  %u of %u tokens used, %s for each\n  %s of pages and %s beside them are reserved, %s of weights: nothing grows\n",
        s->length, s->max_tokens, kit_bytes(p->cache.token_bytes, token), kit_bytes(p->cache.slab_bytes, pages),
        kit_bytes(p->total_bytes - p->cache.slab_bytes, rest), kit_bytes(p->packed_bytes + p->mapped_bytes, weights));
}

static void run_bye(talk *t, const char *argument) {
    (void)argument;
    t->over = true;
}

static void run_help(talk *t, const char *argument);

static const talk_command COMMANDS[] = {
    {"/?", NULL, "this list; /help does the same", run_help},
    {"/clear", NULL, "begin a new conversation", run_clear},
    {"/save", "NAME", "save it: NAME.fkv has the pages, NAME.json the words", run_save},
    {"/load", "NAME", "go on with a saved one, without computing it again", run_load},
    {"/system", "TEXT", "set the system message; without TEXT there is none", run_system},
    {"/set", "NAME VALUE", "temperature and the like; alone it lists them", run_set},
    {"/plan", NULL, "what is used and what is reserved", run_plan},
    {"/bye", NULL, "leave; Ctrl-D does the same", run_bye},
    {"/help", NULL, NULL, run_help},
    {"/exit", NULL, NULL, run_bye},
    {"/quit", NULL, NULL, run_bye},
};

static void run_help(talk *t, const char *argument) {
    (void)t;
    (void)argument;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof COMMANDS[0]; i++)
        if (COMMANDS[i].help != NULL)
            (void)fprintf(stderr, "  %-8s %-11s %s\n", COMMANDS[i].name, COMMANDS[i].argument != NULL ? COMMANDS[i].argument : "",
                          COMMANDS[i].help);
    (void)fprintf(stderr, "  %-20s %s\n  %-20s %s\n", "\"\"\"", "begins and ends a text of several lines", "Ctrl-C",
                  "stops an answer");
}

/* Whether the line was a command. What is none is text, but for a word with a slash that somebody typed. */
static bool run_command(talk *t, const char *line) {
    size_t n = strcspn(line, " \t\n");
    if (line[0] != '/') return false;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof COMMANDS[0]; i++) {
        if (strlen(COMMANDS[i].name) != n || memcmp(COMMANDS[i].name, line, n) != 0) continue;
        COMMANDS[i].run(t, line + n + strspn(line + n, " \t"));
        return true;
    }
    if (!t->c->terminal || memchr(line + 1, '/', n - 1) != NULL) return false;
    (void)kit_fail(0, "no command %.*s: /? lists them", (int)n, line);
    return true;
}

/* ---- the loop ---- */

static void print_banner(const talk *t) {
    const model_session *s = t->c->generation->session;
    const fkv_model_info *about = fkv_model_about(s->model);
    codec_choice codec = codec_of_runner(t->settings->runner);
    char name[CODEC_NAME];
    char bytes[32];
    (void)fprintf(stderr, "%s (%s, %.3g %s parameters): context of %u tokens, %s reserved for it as %s\n", t->c->model,
                  about->architecture, (double)about->n_parameters / (about->n_parameters < 1000000000 ? 1e6 : 1e9),
                  about->n_parameters < 1000000000 ? "million" : "billion", s->max_tokens,
                  kit_bytes(s->plan.cache.slab_bytes, bytes), codec_name(&codec, name));
    if (s->max_tokens < about->context)
        (void)fprintf(stderr, "the model was trained for %u tokens: -c %u reserves them\n", about->context, about->context);
    (void)fprintf(stderr, "/? lists the commands, Ctrl-C stops an answer, Ctrl-D leaves\n\n");
}

/* One turn; *code is what the program ends with where it does. True: go on. */
static bool take_turn(talk *t, const text_buffer *turn, int *code) {
    if (turn->n == 0 || run_command(t, turn->bytes)) return !t->over;
    *code = conversation_turn(t->c, turn->bytes, turn->n);
    if (!cli_interrupted() && t->c->generation->stopped != STOP_INTERRUPTED) {
        if (!t->c->terminal) return *code == EXIT_GOOD;
        *code = EXIT_GOOD; /* what went wrong was said */
        return true;
    }
    if (*code == EXIT_INTERRUPTED && t->c->terminal) (void)fprintf(stderr, "[stopped: this turn is forgotten]\n");
    cli_forget_interrupt();
    if (*code == EXIT_INTERRUPTED && !t->c->terminal) return false;
    *code = EXIT_GOOD;
    return true;
}

int talk_hold(conversation *c, talk_settings *settings) {
    talk t = {.c = c, .settings = settings};
    line_input *in = line_input_open();
    text_buffer turn = {0};
    int code = EXIT_GOOD;
    c->terminal = line_input_is_terminal(in);
    if (c->terminal) print_banner(&t);
    for (bool on = true; on;) {
        line_answer answer = line_input_read(in, &turn);
        if (answer == LINE_TURN) {
            on = take_turn(&t, &turn, &code);
        } else if (answer == LINE_INTERRUPTED && c->terminal) {
            (void)fprintf(stderr, "\n[Ctrl-D or /bye leaves]\n");
            cli_forget_interrupt();
        } else {
            if (answer == LINE_INTERRUPTED) code = EXIT_INTERRUPTED;
            if (c->terminal) (void)fputc('\n', stderr);
            on = false;
        }
    }
    text_free(&turn);
    line_input_close(in);
    return code;
}
