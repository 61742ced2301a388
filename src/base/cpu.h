/* Instruction sets of the CPU and the number of cores available to the process. */
#ifndef FKV_CPU_H
#define FKV_CPU_H

#include "base.h"

enum { FKV_MAX_THREADS = 256 };

/* Returns the number of cores the process may use, limited by affinity, cgroup quota and FKV_MAX_THREADS. */
FKV_INTERNAL uint32_t fkv_cpu_count(void);

/* Returns the best instruction set that this machine supports and for which this build has kernels. */
FKV_INTERNAL fkv_isa fkv_cpu_best_isa(void);

/* Returns whether this build has kernels for the instruction set and this machine supports it. */
FKV_INTERNAL bool fkv_cpu_runs(fkv_isa isa);
FKV_INTERNAL const char *fkv_isa_name(fkv_isa isa);

typedef enum fkv_cpu_maker { FKV_CPU_OTHER = 0, FKV_CPU_INTEL, FKV_CPU_AMD } fkv_cpu_maker;

/* Returns the vendor of an x86 processor. Always FKV_CPU_OTHER on other architectures. */
FKV_INTERNAL fkv_cpu_maker fkv_cpu_vendor(void);

#endif
