/* What the benches share beside src/kit: buffers, options and JSON. Knows nothing of flatkv.
 *
 * Benches are programs: a helper that cannot go on says why on stderr and ends the process with one of the exit codes below.
 */
#ifndef FKV_BENCH_UTIL_H
#define FKV_BENCH_UTIL_H

#include "../src/kit/numbers.h"
#include "../src/kit/process.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdnoreturn.h>

enum bench_exit { BENCH_GOOD = 0, BENCH_FAILED = 1, BENCH_USAGE = 2, BENCH_NO_MEMORY = 3 };

/* ---- memory ---- */

/* Aligned to 64 bytes, every page of it written: what is taken here never grows later. Ends the program if there is none. */
void *bench_take(size_t bytes);

/* Ends the program where the system does not say. */
process_memory bench_memory_now(void);

/* "6.52 GiB" into text, which is returned. */
enum { BENCH_TEXT = 32 };
const char *bench_bytes(double bytes, char text[BENCH_TEXT]);

/* ---- options: --name, --name VALUE or --name=VALUE ---- */

typedef struct bench_args {
    const char *program;
    int argc;
    char **argv;
    int at;
} bench_args;

bool bench_args_next(bench_args *args); /* false after the last */
bool bench_args_is(const bench_args *args, const char *name);
const char *bench_args_value(bench_args *args);    /* must be there */
const char *bench_args_optional(bench_args *args); /* NULL: none */
uint32_t bench_args_number(bench_args *args, uint32_t min, uint32_t max);
noreturn void bench_args_unknown(const bench_args *args);

/* The number that text begins with, or BENCH_USAGE with what was wrong with `what`; *end is what follows it. */
uint32_t bench_number(const char *program, const char *what, const char *text, uint32_t min, uint32_t max, const char **end);

noreturn void bench_die(const char *program, enum bench_exit code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Says now, and not after minutes of work, that a file cannot be written. NULL: stdout, which can. */
void bench_writable(const char *program, const char *path);

/* ---- JSON ---- */

enum { BENCH_JSON_DEPTH = 8 };

/* Where --json goes: wanted without a path means stdout, and what people read then goes to stderr. */
typedef struct bench_json {
    bool wanted;
    const char *path;
    FILE *file;
    int depth;
    bool first[BENCH_JSON_DEPTH]; /* nothing was written at this depth yet */
    char closer[BENCH_JSON_DEPTH];
} bench_json;

/* key is NULL inside arrays. The first call opens the top object and has no key. */
void bench_json_begin(bench_json *json, const char *program);
void bench_json_end(bench_json *json, const char *program); /* closes everything; BENCH_FAILED if the disk was full */
void bench_json_object(bench_json *json, const char *key);
void bench_json_array(bench_json *json, const char *key);
void bench_json_close(bench_json *json);
void bench_json_string(bench_json *json, const char *key, const char *value);
void bench_json_number(bench_json *json, const char *key, double value); /* null where it is not a finite number */
void bench_json_integer(bench_json *json, const char *key, uint64_t value);
void bench_json_bool(bench_json *json, const char *key, bool value);

#endif
