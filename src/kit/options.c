/* See options.h. Built over getopt_long, whose tables are made from ours. */
#include "options.h"

#include "near_word.h"
#include "program.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_OPTIONS = 64, HELP_COLUMN = 28, FIRST_CODE = 256 };

/* All options of a command in one row, as getopt_long wants them. Codes are FIRST_CODE + place. */
typedef struct joined {
    const kit_option *options[MAX_OPTIONS];
    struct option longs[MAX_OPTIONS + 2];
    char letters[2 * MAX_OPTIONS + 4];
    int n;
    const kit_option *words; /* what takes the rest; NULL: nothing does */
} joined;

static void join(joined *j, const kit_option *const *tables) {
    char *letter = j->letters;
    *letter++ = ':'; /* a missing argument is told apart from an unknown option */
    *letter++ = 'h';
    for (; *tables != NULL; tables++) {
        for (const kit_option *o = *tables; o->name != NULL && j->n < MAX_OPTIONS; o++) {
            if (o->kind == OPTION_WORDS) {
                j->words = o;
                continue;
            }
            int argument = o->kind == OPTION_FLAG ? no_argument : required_argument;
            j->longs[j->n] = (struct option){o->name, argument, NULL, FIRST_CODE + j->n};
            if (o->letter != 0) {
                *letter++ = o->letter;
                if (argument == required_argument) *letter++ = ':';
            }
            j->options[j->n++] = o;
        }
    }
    j->longs[j->n] = (struct option){"help", no_argument, NULL, 'h'};
}

static void print_option(const kit_option *o) {
    char left[96];
    char letter[8] = "";
    bool has_value = o->kind != OPTION_FLAG;
    if (o->letter != 0) (void)snprintf(letter, sizeof letter, "-%c, ", o->letter);
    if (o->kind == OPTION_WORDS)
        (void)snprintf(left, sizeof left, "  %s", o->value);
    else
        (void)snprintf(left, sizeof left, "  %s--%s%s%s", letter, o->name, has_value ? " " : "", has_value ? o->value : "");
    printf("%-*s", HELP_COLUMN, left);
    if (strlen(left) >= HELP_COLUMN) printf("\n%*s", HELP_COLUMN, "");
    for (const char *p = o->help; *p != 0; p++) {
        putchar(*p);
        if (*p == '\n') printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static void print_help(const char *usage, const kit_option *const *tables) {
    fputs(usage, stdout);
    for (; *tables != NULL; tables++) {
        putchar('\n');
        for (const kit_option *o = *tables; o->name != NULL; o++) print_option(o);
    }
}

static bool take_choice(const kit_option *o, const char *text) {
    size_t length = strlen(text);
    const char *word = o->value;
    for (int i = 0; *word != 0; i++) {
        size_t n = strcspn(word, "|");
        if (n == length && memcmp(word, text, n) == 0) {
            *(int *)o->target = i;
            return true;
        }
        word += n + (word[n] == '|');
    }
    (void)kit_fail(0, "--%s %s: one of %s", o->name, text, o->value);
    return false;
}

static bool take_real(const kit_option *o, const char *text) {
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !isfinite(value) || value < 0) {
        (void)kit_fail(0, "--%s %s: a number that is not negative is needed", o->name, text);
        return false;
    }
    *(double *)o->target = value;
    return true;
}

static bool take_number(const kit_option *o, const char *text) {
    char name[64];
    uint64_t value = 0;
    (void)snprintf(name, sizeof name, "--%s", o->name);
    if (!kit_number(name, text, o->max, &value)) return false;
    if (value == 0 && o->kind == OPTION_COUNT) {
        (void)kit_fail(0, "%s 0: at least 1 is needed", name);
        return false;
    }
    if (o->kind != OPTION_U64)
        *(uint32_t *)o->target = (uint32_t)value;
    else
        *(uint64_t *)o->target = value;
    return true;
}

static bool take_text(const kit_option *o, const char *text) {
    kit_texts *list = o->target;
    if (list->n == KIT_MAX_TEXTS) {
        (void)kit_fail(0, "%s: at most %d of them", text, KIT_MAX_TEXTS);
        return false;
    }
    list->texts[list->n++] = text;
    return true;
}

bool kit_can_write(const char *path) {
    char folder[4096];
    struct stat about;
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode)) { /* devices and pipes are written where they lie */
        if (!S_ISDIR(about.st_mode) && access(path, W_OK) == 0) return true;
        if (S_ISDIR(about.st_mode)) errno = EISDIR;
        (void)kit_fail(0, "%s cannot be written: %s", path, strerror(errno));
        return false;
    }
    const char *slash = strrchr(path, '/');
    size_t n = slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
    if (n >= sizeof folder) return true; /* opening it will tell */
    memcpy(folder, path, n);
    folder[n] = 0;
    if (access(n > 0 ? folder : ".", W_OK | X_OK) == 0) return true;
    (void)kit_fail(0, "%s cannot be written: %s", path, strerror(errno));
    return false;
}

static bool take(const kit_option *o, const char *text) {
    switch (o->kind) {
    case OPTION_FLAG: *(bool *)o->target = true; return true;
    case OPTION_TEXT: *(const char **)o->target = text; return true;
    case OPTION_OUTPUT: *(const char **)o->target = text; return kit_can_write(text);
    case OPTION_REAL: return take_real(o, text);
    case OPTION_CHOICE: return take_choice(o, text);
    case OPTION_TEXTS:
    case OPTION_WORDS: return take_text(o, text);
    case OPTION_U32:
    case OPTION_COUNT:
    case OPTION_U64: return take_number(o, text);
    }
    return false;
}

static const kit_option *find(const joined *j, int code) {
    if (code >= FIRST_CODE) return j->options[code - FIRST_CODE];
    for (int i = 0; i < j->n; i++)
        if (j->options[i]->letter == code) return j->options[i];
    return NULL;
}

static void fail_option(const joined *j, const char *typed, bool no_value) {
    char name[64] = ""; /* without the value of --name=value */
    if (strncmp(typed, "--", 2) == 0) (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(typed + 2, "="), typed + 2);
    near_word near = {.typed = name};
    char hint[96];
    for (int i = 0; i < j->n; i++) near_word_offer(&near, j->options[i]->name);
    if (no_value)
        (void)kit_fail(0, "%s needs a value; --help lists the options", typed);
    else
        (void)kit_fail(0, "no option %s%s; --help lists them", typed, near_word_hint(&near, "--", hint));
}

bool kit_options_parse(const char *usage, const kit_option *const *tables, int argc, char **argv, int *code) {
    joined j = {0};
    join(&j, tables);
    *code = EXIT_USAGE;
    opterr = 0;
    optind = 1;
    int option;
    while ((option = getopt_long(argc, argv, j.letters, j.longs, NULL)) != -1) {
        if (option == 'h') {
            print_help(usage, tables);
            *code = EXIT_GOOD;
            return false;
        }
        if (option == ':' || option == '?') {
            fail_option(&j, argv[optind - 1], option == ':');
            return false;
        }
        const kit_option *o = find(&j, option);
        if (o == NULL || !take(o, optarg)) return false;
    }
    for (; optind < argc; optind++) {
        if (j.words == NULL) {
            (void)kit_fail(0, "%s: unexpected argument; every value stands behind its option, --help lists them", argv[optind]);
            return false;
        }
        if (!take(j.words, argv[optind])) return false;
    }
    *code = EXIT_GOOD;
    return true;
}
