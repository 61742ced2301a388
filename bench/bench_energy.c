/* See bench_energy.h. */
#include "bench_energy.h"

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

double bench_energy_joules(bench_energy *energy) {
    for (uint32_t i = 0; i < energy->n; i++) {
        bench_energy_counter *c = &energy->counters[i];
        uint64_t now;
        if (!read_number(c->path, &now)) return NAN;
        energy->joules += 1e-6 * (double)(now >= c->last ? now - c->last : now + c->range - c->last);
        c->last = now;
    }
    return energy->n > 0 ? energy->joules : NAN;
}
