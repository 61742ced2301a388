/* Conventions shared by all programs: exit codes, error messages, numbers on the command line, and memory allocation.
 *
 * Results go to standard output, everything else to standard error. A helper that returns an exit code other than EXIT_GOOD has
 * already printed the error. kit_die() and the allocation functions exit the program on failure.
 */
#ifndef FKV_KIT_PROGRAM_H
#define FKV_KIT_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdnoreturn.h>

enum {
    EXIT_GOOD = 0,
    EXIT_FAILED = 1,       /* the operation failed */
    EXIT_USAGE = 2,        /* the command line is invalid */
    EXIT_NO_FIT = 3,       /* not enough memory on the machine or within a configured limit */
    EXIT_INTERRUPTED = 130 /* interrupted by Ctrl-C; partial results have been printed */
};

/* Sets the program name that precedes messages (default "flatkv"). The string must remain valid until the program exits. */
void kit_set_program(const char *name);

/* Prints "program: message" to standard error and returns `code`. Control characters in the message are escaped, so that words
 * from the command line or from files cannot send escape sequences to the terminal. */
int kit_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints "program: message" like kit_fail(), then exits the program with `code`. */
noreturn void kit_die(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Parses all of `text` as an integer of at most `max`. A suffix K, M or G multiplies by 1024, 1024^2 or 1024^3. Returns false
 * after printing an error that names `option`. */
bool kit_number(const char *option, const char *text, uint64_t max, uint64_t *out);

/* Parses all of `text` as a size of at most `max` bytes: 16G, 16GB, 16GiB and "16 GB" are all 16 * 1024^3; the units are K, M, G
 * and T. A number without a unit is in bytes; 1 to 1023 bytes are rejected, because a forgotten unit is more likely. Returns
 * false after printing an error that names `option`. */
bool kit_size(const char *option, const char *text, uint64_t max, uint64_t *out);

/* Copies the next word of a comma-separated list, truncated to KIT_WORD - 1 characters. Returns false at the end of the list. */
enum { KIT_WORD = 32 };
bool kit_next_word(const char **list, char word[KIT_WORD]);

/* Parses all of `text` as n integers with `separator` between them, as in 32/8/128. Integer i must be from 1 to max[i]. Returns
 * false without printing an error. */
bool kit_numbers(const char *text, char separator, const uint32_t *max, uint32_t *numbers, uint32_t n);

/* Formats a size in powers of 1000: 7.31 GB, 12.0 MB, 640 B. Returns `text`. */
const char *kit_bytes(uint64_t bytes, char text[32]);

/* Allocate memory, or exit the program if memory is exhausted. */
void *kit_alloc(size_t bytes);                /* zeroed */
void *kit_realloc(void *block, size_t bytes); /* like realloc() */

#endif
