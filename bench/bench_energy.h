/* Energy counters of the processor packages and their memory, as Linux exports them under /sys/class/powercap (RAPL), or of an
 * NVIDIA GPU, which its management library (NVML) reads. Virtual machines usually have no counters of the processor, and most
 * systems allow only root to read them.
 */
#ifndef FKV_BENCH_ENERGY_H
#define FKV_BENCH_ENERGY_H

#include <stdbool.h>
#include <stdint.h>

#define BENCH_ENERGY_FOLDER "/sys/class/powercap"
#define BENCH_ENERGY_NVML "libnvidia-ml.so.1"

enum { BENCH_ENERGY_COUNTERS = 16 };

typedef struct bench_energy_counter {
    char path[512];
    uint64_t range; /* the counter wraps to 0 after this value, in microjoules */
    uint64_t last;  /* value of the last read */
} bench_energy_counter;

typedef struct bench_energy {
    bench_energy_counter counters[BENCH_ENERGY_COUNTERS];
    uint32_t n;
    int (*read_gpu)(void *gpu, unsigned long long *millijoules); /* NULL without a GPU counter */
    void *gpu;
    unsigned long long last_gpu; /* value of the last read, in millijoules */
    double joules;               /* energy since the counters were opened */
} bench_energy;

/* Finds the counters in a folder. Returns false if there is no readable counter. */
bool bench_energy_open(bench_energy *energy, const char *folder);

/* Opens the counter of the GPU. `library` is the file name of NVML. Returns false if the library or the counter is missing, or if
 * there are several GPUs, because NVML's order of GPUs can differ from CUDA's. The library stays loaded. */
bool bench_energy_open_gpu(bench_energy *energy, const char *library);

/* Returns the energy in joules since the counters were opened, or NAN without counters. The processor's counters wrap after
 * minutes, so this function must be called more often than that. */
double bench_energy_joules(bench_energy *energy);

#endif
