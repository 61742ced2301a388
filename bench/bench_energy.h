/* Energy counters of the processor packages and their memory, as Linux exports them under /sys/class/powercap (RAPL). Virtual
 * machines usually have none, and most systems allow only root to read them.
 */
#ifndef FKV_BENCH_ENERGY_H
#define FKV_BENCH_ENERGY_H

#include <stdbool.h>
#include <stdint.h>

#define BENCH_ENERGY_FOLDER "/sys/class/powercap"

enum { BENCH_ENERGY_COUNTERS = 16 };

typedef struct bench_energy_counter {
    char path[512];
    uint64_t range; /* the counter wraps to 0 after this value, in microjoules */
    uint64_t last;  /* value of the last read */
} bench_energy_counter;

typedef struct bench_energy {
    bench_energy_counter counters[BENCH_ENERGY_COUNTERS];
    uint32_t n;
    double joules; /* energy since bench_energy_open() */
} bench_energy;

/* Finds the counters in a folder. Returns false if there is no readable counter. */
bool bench_energy_open(bench_energy *energy, const char *folder);

/* Returns the energy in joules since bench_energy_open(), or NAN without counters. The counters wrap after minutes, so this
 * function must be called more often than that. */
double bench_energy_joules(bench_energy *energy);

#endif
