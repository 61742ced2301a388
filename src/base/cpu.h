/* What the processor can do, and how much of it the process may use. */
#ifndef FKV_CPU_H
#define FKV_CPU_H

#include "base.h"

enum { FKV_MAX_THREADS = 256 };

/* Cores the process may use: affinity and cgroup quota considered, at most FKV_MAX_THREADS. */
uint32_t fkv_cpu_count(void);

/* The best instruction set of this machine that flatkv has kernels for, and whether a given one can run here. */
fkv_isa fkv_cpu_best_isa(void);
bool fkv_cpu_runs(fkv_isa isa);
const char *fkv_isa_name(fkv_isa isa);

#endif
