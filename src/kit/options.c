/* See options.h. Builds the tables for getopt_long from the option tables. */
#include "options.h"

#include "program.h"
#include "suggestion.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_OPTIONS = 64, HELP_COLUMN = 28, FIRST_CODE = 256 };

/* All options of a command in the form that getopt_long expects. For long option i, getopt_long returns FIRST_CODE + i. */
typedef struct getopt_tables {
    const kit_option *options[MAX_OPTIONS];
    struct option longs[MAX_OPTIONS + 2];
    char letters[2 * MAX_OPTIONS + 4];
    int n;
    const kit_option *positional; /* entry of the positional arguments; NULL if the command takes none */
} getopt_tables;

static void make_getopt_tables(getopt_tables *j, const kit_option *const *tables) {
    char *letter = j->letters;
    *letter++ = ':'; /* makes getopt_long return ':' instead of '?' for a missing argument */
    *letter++ = 'h';
    for (; *tables != NULL; tables++) {
        for (const kit_option *o = *tables; o->name != NULL && j->n < MAX_OPTIONS; o++) {
            if (o->kind == OPTION_HEADING) continue;
            if (o->kind == OPTION_POSITIONAL) {
                j->positional = o;
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

static const char *footer = "";

void kit_options_set_footer(const char *text) { footer = text; }

static void print_option(const kit_option *o) {
    char left[96];
    if (o->kind == OPTION_HEADING) {
        printf("\n%s:\n", o->name);
        return;
    }
    char letter[8] = "";
    bool has_value = o->kind != OPTION_FLAG;
    if (o->letter != 0) (void)snprintf(letter, sizeof letter, "-%c, ", o->letter);
    if (o->kind == OPTION_POSITIONAL)
        (void)snprintf(left, sizeof left, "  %s", o->value);
    else
        (void)snprintf(left, sizeof left, "  %s--%s%s%s", letter, o->name, has_value ? " " : "", has_value ? o->value : "");
    if (strlen(left) <= HELP_COLUMN - 2)
        printf("%-*s", HELP_COLUMN, left);
    else
        printf("%s\n%*s", left, HELP_COLUMN, "");
    for (const char *p = o->help; *p != 0; p++) {
        putchar(*p);
        if (*p == '\n') printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static void print_help(const char *usage, const kit_option *const *tables) {
    fputs(usage, stdout);
    for (; *tables != NULL; tables++) {
        if ((*tables)->kind != OPTION_HEADING) putchar('\n');
        for (const kit_option *o = *tables; o->name != NULL; o++) print_option(o);
    }
    if (footer[0] != 0) printf("\n%s\n", footer);
}

static bool store_choice(const kit_option *o, const char *text) {
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
    (void)kit_fail(0, "--%s %s: expected one of %s", o->name, text, o->value);
    return false;
}

static bool store_real(const kit_option *o, const char *text) {
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !isfinite(value) || value < 0) {
        (void)kit_fail(0, "--%s %s: expected a non-negative number, such as 0.5", o->name, text);
        return false;
    }
    *(double *)o->target = value;
    return true;
}

static bool store_integer(const kit_option *o, const char *text) {
    char name[64];
    uint64_t value = 0;
    (void)snprintf(name, sizeof name, "--%s", o->name);
    if (!kit_number(name, text, o->max, &value)) return false;
    if (value == 0 && o->kind == OPTION_COUNT) {
        (void)kit_fail(0, "%s 0: expected an integer from 1 to %llu", name, (unsigned long long)o->max);
        return false;
    }
    if (o->kind != OPTION_U64)
        *(uint32_t *)o->target = (uint32_t)value;
    else
        *(uint64_t *)o->target = value;
    return true;
}

static bool store_size(const kit_option *o, const char *text) {
    char name[64];
    (void)snprintf(name, sizeof name, "--%s", o->name);
    return kit_size(name, text, o->max, o->target);
}

static bool append_text(const kit_option *o, const char *text) {
    kit_texts *list = o->target;
    if (list->n == KIT_MAX_TEXTS) {
        (void)kit_fail(0, "%s: too many values; at most %d are supported", text, KIT_MAX_TEXTS);
        return false;
    }
    list->texts[list->n++] = text;
    return true;
}

bool kit_can_write(const char *path) {
    char folder[4096];
    struct stat about;
    if (stat(path, &about) == 0 &&
        !S_ISREG(about.st_mode)) { /* devices and pipes are written in place, so their folder need not be writable */
        if (!S_ISDIR(about.st_mode) && access(path, W_OK) == 0) return true;
        if (S_ISDIR(about.st_mode)) errno = EISDIR;
        (void)kit_fail(0, "cannot write %s: %s", path, strerror(errno));
        return false;
    }
    const char *slash = strrchr(path, '/');
    size_t n = slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
    if (n >= sizeof folder) return true; /* the path is too long to check here; opening the file later reports the error */
    memcpy(folder, path, n);
    folder[n] = 0;
    if (access(n > 0 ? folder : ".", W_OK | X_OK) == 0) return true;
    (void)kit_fail(0, "cannot write %s: %s", path, strerror(errno));
    return false;
}

static bool store_value(const kit_option *o, const char *text) {
    switch (o->kind) {
    case OPTION_FLAG: *(bool *)o->target = true; return true;
    case OPTION_TEXT: *(const char **)o->target = text; return true;
    case OPTION_OUTPUT: *(const char **)o->target = text; return kit_can_write(text);
    case OPTION_REAL: return store_real(o, text);
    case OPTION_CHOICE: return store_choice(o, text);
    case OPTION_TEXTS:
    case OPTION_POSITIONAL: return append_text(o, text);
    case OPTION_U32:
    case OPTION_COUNT:
    case OPTION_U64: return store_integer(o, text);
    case OPTION_SIZE: return store_size(o, text);
    case OPTION_HEADING: break;
    }
    return false;
}

static const kit_option *find_option(const getopt_tables *j, int code) {
    if (code >= FIRST_CODE) return j->options[code - FIRST_CODE];
    for (int i = 0; i < j->n; i++)
        if (j->options[i]->letter == code) return j->options[i];
    return NULL;
}

static void report_bad_option(const getopt_tables *j, const char *typed, bool no_value) {
    char name[64] = ""; /* the option name in an argument of the form --name=value */
    if (strncmp(typed, "--", 2) == 0) (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(typed + 2, "="), typed + 2);
    suggestion near = {.typed = name};
    char hint[96];
    for (int i = 0; i < j->n; i++) suggestion_offer(&near, j->options[i]->name);
    if (no_value)
        (void)kit_fail(0, "%s needs a value; --help lists the options", typed);
    else
        (void)kit_fail(0, "unknown option %s%s; --help lists the options", typed, suggestion_hint(&near, "--", hint));
}

bool kit_options_parse(const char *usage, const kit_option *const *tables, int argc, char **argv, int *code) {
    getopt_tables j = {0};
    make_getopt_tables(&j, tables);
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
            report_bad_option(&j, argv[optind - 1], option == ':');
            return false;
        }
        const kit_option *o = find_option(&j, option);
        if (o == NULL || !store_value(o, optarg)) return false;
    }
    for (; optind < argc; optind++) {
        if (j.positional == NULL) {
            (void)kit_fail(0, "unexpected argument %s: this command takes only options; --help lists the options", argv[optind]);
            return false;
        }
        if (!store_value(j.positional, argv[optind])) return false;
    }
    *code = EXIT_GOOD;
    return true;
}
