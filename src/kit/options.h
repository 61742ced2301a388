/* Options of a program or command as a table: what is parsed and what --help prints come from the same lines.
 *
 * --name VALUE, --name=VALUE and -n VALUE; --help and -h print the help. What a program writes for other programs is asked for by
 * --json: one object on standard output, and what people read goes to standard error or nowhere.
 */
#ifndef FKV_KIT_OPTIONS_H
#define FKV_KIT_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,   /* bool */
    OPTION_U32,    /* uint32_t, at most max */
    OPTION_COUNT,  /* uint32_t, 1 to max */
    OPTION_U64,    /* uint64_t, at most max */
    OPTION_REAL,   /* double, not negative */
    OPTION_TEXT,   /* const char * */
    OPTION_OUTPUT, /* const char *: a file to write, in a folder that can be written to */
    OPTION_CHOICE, /* int: the place of the word in `value` */
    OPTION_TEXTS,  /* kit_texts: may be given several times */
    OPTION_WORDS,  /* kit_texts: what stands there without an option; the name is not written */
} option_kind;

enum { KIT_MAX_TEXTS = 1024 };

typedef struct kit_texts {
    const char *texts[KIT_MAX_TEXTS];
    uint32_t n;
} kit_texts;

typedef struct kit_option {
    const char *name; /* without dashes; NULL: the end of the table */
    char letter;      /* 0: none */
    option_kind kind;
    void *target;
    uint64_t max;
    const char *value; /* what --help calls the argument; for a choice its words: "none|k|v|kv" */
    const char *help;  /* further lines follow a newline */
} kit_option;

/* Fills the targets from the command line. True: go on. False: *code is how the program ends; --help was printed, or what was
 * wrong. `usage` opens the help, the tables follow in their order. */
bool kit_options_parse(const char *usage, const kit_option *const *tables, int argc, char **argv, int *code);

/* Whether a file could be made there, with a message where not: told before a long computation, not behind it. */
bool kit_can_write(const char *path);

#endif
