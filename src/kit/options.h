/* Parses command-line options that a table describes. --help is printed from the same table.
 *
 * Accepts --name VALUE, --name=VALUE and -n VALUE; --help and -h print the help. With --json a program writes one JSON object to
 * standard output and sends human-readable text to standard error.
 */
#ifndef FKV_KIT_OPTIONS_H
#define FKV_KIT_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,       /* bool */
    OPTION_U32,        /* uint32_t from 0 to `max` */
    OPTION_COUNT,      /* uint32_t from 1 to `max` */
    OPTION_U64,        /* uint64_t from 0 to `max` */
    OPTION_SIZE,       /* uint64_t: size in bytes, from 0 to `max`; see kit_size() */
    OPTION_REAL,       /* double, not negative */
    OPTION_TEXT,       /* const char * */
    OPTION_OUTPUT,     /* const char *: path of an output file; rejected if the file cannot be written */
    OPTION_CHOICE,     /* int: index of the chosen word in the list `value` */
    OPTION_TEXTS,      /* kit_texts: repeatable option */
    OPTION_POSITIONAL, /* kit_texts: positional arguments; `name` appears only in --help */
    OPTION_HEADING,    /* not an option: --help prints `name` as a heading above the following options */
} option_kind;

enum { KIT_MAX_TEXTS = 1024 };

typedef struct kit_texts {
    const char *texts[KIT_MAX_TEXTS];
    uint32_t n;
} kit_texts;

typedef struct kit_option {
    const char *name; /* option name without dashes; NULL ends the table */
    char letter;      /* short option; 0 if there is none */
    option_kind kind;
    void *target;
    uint64_t max;
    const char *value; /* placeholder for the argument in --help, or the words to choose from, as in "none|k|v|kv" */
    const char *help;  /* help text, which may span several lines */
} kit_option;

/* Entry that starts a group of options in --help. */
#define KIT_HEADING(text) {text, 0, OPTION_HEADING, NULL, 0, NULL, NULL}

/* Stores each value of the command line in the target of its option. Returns true on success. Returns false and sets *code to
 * the exit code if --help was printed or if the command line is invalid. In the second case, an error has been printed. --help
 * prints `usage`, then the options in table order. */
bool kit_options_parse(const char *usage, const kit_option *const *tables, int argc, char **argv, int *code);

/* Sets the last line of every --help text. The string must remain valid while options are parsed. */
void kit_options_set_footer(const char *text);

/* Returns whether the file at `path` can be created or overwritten, and prints an error if not. A command calls this function
 * before a long computation, so that no result is lost because of an unwritable file. */
bool kit_can_write(const char *path);

#endif
