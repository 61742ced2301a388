/* Options of a command as a table: what is parsed and what --help prints come from the same lines.
 */
#ifndef FKV_CLI_OPTIONS_H
#define FKV_CLI_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,   /* bool */
    OPTION_U32,    /* uint32_t, at most max */
    OPTION_U64,    /* uint64_t, at most max */
    OPTION_REAL,   /* double, not negative */
    OPTION_TEXT,   /* const char * */
    OPTION_CHOICE, /* int: the place of the word in `value` */
} option_kind;

typedef struct cli_option {
    const char *name; /* without dashes; NULL: the end of the table */
    char letter;      /* 0: none */
    option_kind kind;
    void *target;
    uint64_t max;
    const char *value; /* what --help calls the argument; for a choice its words: "none|k|v|kv" */
    const char *help;  /* further lines follow a newline */
} cli_option;

/* Fills the targets from the command line. True: go on. False: *code is how the program ends; --help was printed, or what was
 * wrong. `usage` opens the help, the tables follow in their order. */
bool cli_options_parse(const char *usage, const cli_option *const *tables, int argc, char **argv, int *code);

#endif
