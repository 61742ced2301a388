/* What the benches of kernels share: the instruction set, worker threads, and the read roof.
 *
 * The read roof is the machine's read bandwidth, measured where it is needed: before every timed call a buffer several times the
 * last cache is streamed by the same threads. That is a sample of the roof, and it leaves what the call will read in memory, not
 * in a cache.
 *
 * Knows src/base of the library, nothing else of it.
 */
#ifndef FKV_BENCH_ROOF_H
#define FKV_BENCH_ROOF_H

#include "../src/base/cpu.h"
#include "../src/base/workers.h"

#include <stdatomic.h>

enum { BENCH_MAX_ROOFS = 8 };

typedef struct bench_roof {
    uint8_t *buffer;
    uint64_t bytes;
    double *samples[BENCH_MAX_ROOFS]; /* bytes a second of every pass; by number of threads, as the caller counts them */
    size_t n_samples[BENCH_MAX_ROOFS];
    size_t room[BENCH_MAX_ROOFS];
} bench_roof;

/* quick: a small buffer, to see that it runs. Ends the program if there is no memory. */
void bench_roof_open(bench_roof *roof, bool quick);

/* One pass over the buffer, counted with thread count number t. Returns bytes a second. */
double bench_roof_stream(bench_roof *roof, fkv_workers *workers, uint32_t t);

/* The median of the samples of t from number `first` on; NAN where there is none. */
double bench_roof_median(bench_roof *roof, uint32_t t, size_t first);

/* Reads n bytes, so that they are in a cache; the sum goes where no compiler can leave the reading out. */
void bench_read(const void *bytes, size_t n);

/* Wakes the threads. */
void bench_wake(fkv_workers *workers);

fkv_workers *bench_workers_open(uint32_t n_threads);

/* By its name, NULL: that in the environment's FKV_ISA, or the best there is. Ends the program where there is none. */
fkv_isa bench_isa(const char *name);

#endif
