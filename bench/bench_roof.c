/* See bench_roof.h. */
#include "bench_roof.h"

#include "bench_util.h"

#include "../src/base/memory.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

enum { CHUNK_BYTES = 1 << 20 }; /* number of bytes that a work item reads */

/* Returns the size of the streamed buffer: 8 MiB if `quick`, otherwise four times the size of the last-level cache (512 MiB if
 * the system does not report it), but at least 256 MiB and at most 1 GiB. */
static uint64_t stream_size(bool quick) {
    uint64_t bytes = UINT64_C(512) << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (cache > 0) bytes = 4 * (uint64_t)cache;
#endif
    if (bytes < UINT64_C(256) << 20) bytes = UINT64_C(256) << 20;
    if (bytes > UINT64_C(1) << 30) bytes = UINT64_C(1) << 30;
    if (quick) bytes = UINT64_C(8) << 20;
    return fkv_align_up(bytes, CHUNK_BYTES);
}

void bench_roof_open(bench_roof *roof, bool quick) {
    void *map = NULL;
    *roof = (bench_roof){.bytes = stream_size(quick)};
    if (fkv_map_open(roof->bytes, true, &map) != FKV_OK) kit_die(EXIT_NO_FIT, "%s", fkv_message());
    roof->buffer = map;
}

static _Atomic uint64_t sink;

/* Reads the bytes as 64-bit words and adds them up, eight words per iteration. */
void bench_read(const void *bytes, size_t n) {
    const uint64_t *words = bytes;
    uint64_t sums[8] = {0};
    for (size_t i = 0; i + 8 <= n / sizeof *words; i += 8)
        for (size_t j = 0; j < 8; j++) sums[j] += words[i + j];
    uint64_t sum = 0;
    for (size_t j = 0; j < 8; j++) sum += sums[j];
    sink = sum;
}

static void stream_chunk(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const bench_roof *roof = context;
    bench_read(roof->buffer + (size_t)item * CHUNK_BYTES, CHUNK_BYTES);
}

double bench_roof_stream(bench_roof *roof, fkv_workers *workers, uint32_t t) {
    double start = kit_seconds();
    fkv_workers_run(workers, stream_chunk, roof, (uint32_t)(roof->bytes / CHUNK_BYTES));
    double rate = (double)roof->bytes / (kit_seconds() - start);
    if (roof->n_samples[t] == roof->room[t]) {
        roof->room[t] = roof->room[t] * 2 + 256;
        roof->samples[t] = kit_realloc(roof->samples[t], roof->room[t] * sizeof *roof->samples[t]);
    }
    return roof->samples[t][roof->n_samples[t]++] = rate;
}

double bench_roof_median(bench_roof *roof, uint32_t t, size_t first) {
    if (roof->n_samples[t] <= first) return NAN;
    return kit_spread_of(roof->samples[t] + first, roof->n_samples[t] - first).p50;
}

static void nothing(void *context, uint32_t item, uint32_t thread) { (void)context, (void)item, (void)thread; }

void bench_wake(fkv_workers *workers) { fkv_workers_run(workers, nothing, NULL, fkv_workers_count(workers)); }

fkv_workers *bench_workers_open(uint32_t n_threads) {
    fkv_workers *workers = NULL;
    if (fkv_workers_open(bench_take(fkv_workers_bytes(n_threads)), n_threads, &workers) != FKV_OK)
        kit_die(EXIT_NO_FIT, "%s", fkv_message());
    return workers;
}

fkv_isa bench_isa(const char *name) {
    if (name == NULL) name = getenv("FKV_ISA");
    if (name == NULL) return FKV_ISA_AUTO;
    for (fkv_isa isa = FKV_ISA_AUTO; isa <= FKV_ISA_AMX; isa++)
        if (strcmp(name, fkv_isa_name(isa)) == 0) return isa;
    kit_die(EXIT_USAGE, "unknown instruction set %s: expected auto, scalar, neon, avx2, avx512, avx512vnni or amx", name);
}
