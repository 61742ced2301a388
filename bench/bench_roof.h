/* Functions that the kernel benchmarks share: selection of the instruction set, worker threads, and measurement of the read
 * bandwidth.
 *
 * The read bandwidth ("roof") is measured before every timed call. For this, the threads that run the call stream a buffer
 * several times larger than the last-level cache. This also evicts the data that the call will read.
 *
 * Depends on src/base only.
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
    double *samples[BENCH_MAX_ROOFS]; /* measured read bandwidths, in bytes per second, for each thread count; one sample per pass
                                         over the buffer */
    size_t n_samples[BENCH_MAX_ROOFS];
    size_t room[BENCH_MAX_ROOFS];
} bench_roof;

/* Allocates the buffer and starts the threads. If quick is true, the buffer is small. Exits if memory is exhausted. */
void bench_roof_open(bench_roof *roof, bool quick);

/* Streams the buffer once with the thread count at index t. Records and returns the read bandwidth in bytes per second.
 */
double bench_roof_stream(bench_roof *roof, fkv_workers *workers, uint32_t t);

/* Returns the median bandwidth with the thread count at index t, over all samples from index `first` on. Returns NAN if there are
 * none. */
double bench_roof_median(bench_roof *roof, uint32_t t, size_t first);

/* Reads n bytes to load them into the CPU caches. Stores the sum of the bytes, so that the compiler cannot remove the reads. */
void bench_read(const void *bytes, size_t n);

/* Wakes the worker threads. */
void bench_wake(fkv_workers *workers);

fkv_workers *bench_workers_open(uint32_t n_threads);

/* Selects an instruction set by name. NULL selects the value of the environment variable FKV_ISA, or the best instruction set
 * available. Exits if the instruction set is not supported. */
fkv_isa bench_isa(const char *name);

#endif
