/* See bench_energy.h. */
#include "bench_energy.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PACKAGES = 8, MAX_DOMAINS = 4 };

static bool read_number(const char *path, uint64_t *number) {
    FILE *file = fopen(path, "r");
    if (file == NULL) return false;
    bool good = fscanf(file, "%" SCNu64, number) == 1;
    (void)fclose(file);
    return good;
}

/* Returns true if the domain is the memory of a package. The other domains of a package are parts of the package's own counter.
 */
static bool is_memory(const char *domain) {
    char path[512];
    char name[16] = "";
    (void)snprintf(path, sizeof path, "%s/name", domain);
    FILE *file = fopen(path, "r");
    if (file == NULL) return false;
    bool found = fgets(name, sizeof name, file) != NULL && strncmp(name, "dram", 4) == 0;
    (void)fclose(file);
    return found;
}

static void add_counter(bench_energy *energy, const char *domain) {
    char path[512];
    bench_energy_counter c = {.range = 0};
    if (energy->n == BENCH_ENERGY_COUNTERS) return;
    (void)snprintf(c.path, sizeof c.path, "%s/energy_uj", domain);
    (void)snprintf(path, sizeof path, "%s/max_energy_range_uj", domain);
    if (read_number(c.path, &c.last) && read_number(path, &c.range)) energy->counters[energy->n++] = c;
}

bool bench_energy_open(bench_energy *energy, const char *folder) {
    char domain[400];
    *energy = (bench_energy){.n = 0};
    for (int package = 0; package < MAX_PACKAGES; package++) {
        (void)snprintf(domain, sizeof domain, "%s/intel-rapl:%d", folder, package);
        add_counter(energy, domain);
        for (int part = 0; part < MAX_DOMAINS; part++) {
            (void)snprintf(domain, sizeof domain, "%s/intel-rapl:%d:%d", folder, package, part);
            if (is_memory(domain)) add_counter(energy, domain);
        }
    }
    return energy->n > 0;
}

/* The functions of NVML return 0 on success. */
bool bench_energy_open_gpu(bench_energy *energy, const char *library) {
    *energy = (bench_energy){.n = 0};
    void *nvml = dlopen(library, RTLD_NOW);
    if (nvml == NULL) return false;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*count)(unsigned *) = (int (*)(unsigned *))dlsym(nvml, "nvmlDeviceGetCount_v2");
    int (*get)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*read_gpu)(void *, unsigned long long *) =
        (int (*)(void *, unsigned long long *))dlsym(nvml, "nvmlDeviceGetTotalEnergyConsumption");
    unsigned n = 0;
    if (init == NULL || count == NULL || get == NULL || read_gpu == NULL) return false;
    if (init() != 0 || count(&n) != 0 || n != 1 || get(0, &energy->gpu) != 0) return false;
    if (read_gpu(energy->gpu, &energy->last_gpu) != 0) return false;
    energy->read_gpu = read_gpu;
    return true;
}

static bool add_gpu(bench_energy *energy) {
    unsigned long long now;
    if (energy->read_gpu(energy->gpu, &now) != 0) return false;
    energy->joules += 1e-3 * (double)(now - energy->last_gpu);
    energy->last_gpu = now;
    return true;
}

double bench_energy_joules(bench_energy *energy) {
    for (uint32_t i = 0; i < energy->n; i++) {
        bench_energy_counter *c = &energy->counters[i];
        uint64_t now;
        if (!read_number(c->path, &now)) return NAN;
        energy->joules += 1e-6 * (double)(now >= c->last ? now - c->last : now + c->range - c->last);
        c->last = now;
    }
    if (energy->read_gpu != NULL && !add_gpu(energy)) return NAN;
    return energy->n > 0 || energy->read_gpu != NULL ? energy->joules : NAN;
}
