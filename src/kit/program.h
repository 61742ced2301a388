/* What every program does the same way: exit codes, messages, numbers from the command line, memory of its own.
 *
 * Results go to standard output, everything else to standard error. Helpers that can fail return an exit code and have then said
 * why; kit_die() and the takers end the program.
 */
#ifndef FKV_KIT_PROGRAM_H
#define FKV_KIT_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdnoreturn.h>

enum {
    EXIT_GOOD = 0,
    EXIT_FAILED = 1,       /* it was tried and did not work; the message says why */
    EXIT_USAGE = 2,        /* the command line is wrong */
    EXIT_NO_FIT = 3,       /* the machine, or the limit that was set, cannot give what was asked for */
    EXIT_INTERRUPTED = 130 /* Ctrl-C; what there was until then has been printed */
};

/* The name in front of messages, "flatkv" until it is set. Lives as long as the program. */
void kit_set_program(const char *name);

/* "program: ..." on standard error; returns `code`. */
int kit_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, and ends the program with it. */
noreturn void kit_die(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A whole number, all of `text`, at most `max`; `option` is named in the message. False: the message was printed. K, M and G
 * behind the digits multiply by 1024. */
bool kit_number(const char *option, const char *text, uint64_t max, uint64_t *out);

/* Cuts the next word off a list with commas; false at its end. What is longer than a word has room for is cut. */
enum { KIT_WORD = 32 };
bool kit_next_word(const char **list, char word[KIT_WORD]);

/* `n` numbers from 1 to max[i] with `separator` between them, all of `text`, as 32/8/128. False: the message was not printed. */
bool kit_numbers(const char *text, char separator, const uint32_t *max, uint32_t *numbers, uint32_t n);

/* 7.31 GB, 12.0 MB, 640 B: powers of 1000, as memory is usually quoted. */
const char *kit_bytes(uint64_t bytes, char text[32]);

/* Never NULL: the program ends where a few kilobytes cannot be had. */
void *kit_take(size_t bytes);                   /* zeroed */
void *kit_take_more(void *block, size_t bytes); /* as realloc */

#endif
