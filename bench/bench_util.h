/* Helpers for the benchmarks that src/kit does not provide: resident buffers and number lists. Independent of flatkv.
 *
 * On failure, a helper prints the reason and exits with an exit code from kit/program.h.
 */
#ifndef FKV_BENCH_UTIL_H
#define FKV_BENCH_UTIL_H

#include "../src/kit/json.h"
#include "../src/kit/numbers.h"
#include "../src/kit/options.h"
#include "../src/kit/process.h"
#include "../src/kit/program.h"

#include <stdio.h>

/* Help text of --json, common to all benchmarks. */
#define BENCH_JSON_HELP "one JSON object on standard output, and the tables on standard error"

/* Allocates memory aligned to 64 bytes and writes every page, so that resident memory does not grow later. Exits on failure. */
void *bench_take(size_t bytes);

/* Writes a size such as "6.52 GiB" to `text` and returns `text`. */
enum { BENCH_TEXT = 32 };
const char *bench_bytes(double bytes, char text[BENCH_TEXT]);

/* Parses a list of integers from 1 to max, such as "1,4,512", and returns their count. Exits if the list is invalid or has more
 * than `room` entries. */
uint32_t bench_numbers(const char *option, const char *list, uint32_t max, uint32_t *numbers, uint32_t room);

#endif
