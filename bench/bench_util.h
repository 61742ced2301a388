/* What the benches share beside src/kit: buffers that never grow, and lists of numbers. Knows nothing of flatkv.
 *
 * Benches are programs: a helper that cannot go on says why and ends the process with an exit code of kit/program.h.
 */
#ifndef FKV_BENCH_UTIL_H
#define FKV_BENCH_UTIL_H

#include "../src/kit/json.h"
#include "../src/kit/numbers.h"
#include "../src/kit/options.h"
#include "../src/kit/process.h"
#include "../src/kit/program.h"

#include <stdio.h>

/* What every bench says of --json. */
#define BENCH_JSON_HELP "one JSON object on standard output, and the tables on standard error"

/* Aligned to 64 bytes, every page of it written: what is taken here never grows later. Ends the program if there is none. */
void *bench_take(size_t bytes);

/* Ends the program where the system does not say. */
process_memory bench_memory_now(void);

/* "6.52 GiB" into text, which is returned. */
enum { BENCH_TEXT = 32 };
const char *bench_bytes(double bytes, char text[BENCH_TEXT]);

/* "1,4,512": numbers from 1 to max; returns how many. Ends the program where one is wrong or there are more than `room`. */
uint32_t bench_numbers(const char *option, const char *list, uint32_t max, uint32_t *numbers, uint32_t room);

/* Says now, and not after minutes of work, that a file cannot be written. */
void bench_writable(const char *path);

#endif
