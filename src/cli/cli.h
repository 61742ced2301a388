/* What the commands of the flatkv program share: exit codes, messages, numbers read from options. Public headers only.
 *
 * Every command is int command(int argc, char **argv), argv[0] being its name; it prints results on standard output, everything
 * else on standard error, and returns one of the exit codes below.
 */
#ifndef FKV_CLI_H
#define FKV_CLI_H

#include <flatkv/flatkv.h>

#include <stdio.h>

enum {
    EXIT_GOOD = 0,
    EXIT_FAILED = 1, /* it was tried and did not work; the message says why */
    EXIT_USAGE = 2,  /* the command line is wrong */
    EXIT_NO_FIT = 3  /* the machine cannot give what was asked for */
};

/* "flatkv: ..." on standard error; returns `code`. */
int cli_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A whole number, all of `text`, at most `max`; `option` is named in the message. False: the message was printed. K, M and G
 * behind the digits multiply by 1024. */
bool cli_number(const char *option, const char *text, uint64_t max, uint64_t *out);

/* 7.31 GB, 12.0 MB, 640 B: powers of 1000, as memory is usually quoted. */
const char *cli_bytes(uint64_t bytes, char text[32]);

/* A string with JSON's escapes, quotes included. */
void cli_json_string(FILE *out, const char *text);

int cli_plan(int argc, char **argv);
int cli_pages(int argc, char **argv);

#endif
