/* What the commands of the flatkv program share: exit codes, messages, numbers, JSON. Public headers only.
 *
 * Every command is int command(int argc, char **argv), argv[0] being its name; it prints results on standard output, everything
 * else on standard error, and returns one of the exit codes below. Helpers that can fail do the same: they return an exit code,
 * and where it is not EXIT_GOOD they have already said why.
 */
#ifndef FKV_CLI_H
#define FKV_CLI_H

#include <flatkv/flatkv.h>

#include <jansson.h>
#include <stdio.h>

enum {
    EXIT_GOOD = 0,
    EXIT_FAILED = 1,       /* it was tried and did not work; the message says why */
    EXIT_USAGE = 2,        /* the command line is wrong */
    EXIT_NO_FIT = 3,       /* the machine, or the limit that was set, cannot give what was asked for */
    EXIT_INTERRUPTED = 130 /* Ctrl-C; what there was until then has been printed */
};

/* "flatkv: ..." on standard error; returns `code`. */
int cli_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The library's words about the call that just returned `status`, which is not FKV_OK; returns the exit code that fits. */
int cli_fail_status(fkv_status status);

/* A whole number, all of `text`, at most `max`; `option` is named in the message. False: the message was printed. K, M and G
 * behind the digits multiply by 1024. */
bool cli_number(const char *option, const char *text, uint64_t max, uint64_t *out);

/* 7.31 GB, 12.0 MB, 640 B: powers of 1000, as memory is usually quoted. */
const char *cli_bytes(uint64_t bytes, char text[32]);

/* Never NULL: the program ends where a few kilobytes cannot be had. */
void *cli_take(size_t bytes);                   /* zeroed */
void *cli_take_more(void *block, size_t bytes); /* as realloc */

/* Prints one object on standard output, alone, and gives it back. EXIT_FAILED where it could not be written. */
int cli_print_json(json_t *object);

/* Sets a member; the reference to value is taken over. */
void cli_json_set(json_t *object, const char *key, json_t *value);
void cli_json_integer(json_t *object, const char *key, uint64_t value);
void cli_json_real(json_t *object, const char *key, double value); /* null where it is not finite */
void cli_json_bool(json_t *object, const char *key, bool value);
void cli_json_text(json_t *object, const char *key, const char *text); /* what is not UTF-8 becomes U+FFFD */

/* Ctrl-C. From the first call on an interrupt sets a flag instead of ending the program; a second one ends it. */
void cli_catch_interrupts(void);
bool cli_interrupted(void);
void cli_forget_interrupt(void); /* and catch the next one */

int cli_bench(int argc, char **argv);
int cli_models(int argc, char **argv);
int cli_niah(int argc, char **argv);
int cli_pages(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_ppl(int argc, char **argv);
int cli_run(int argc, char **argv);
int cli_tokenize(int argc, char **argv);

#endif
