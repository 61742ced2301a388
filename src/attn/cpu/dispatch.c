/* Selects the attention kernels of an instruction set. */
#include "../../base/cpu.h"
#include "../attn.h"
#include "kernels.h"
#include <kernel_isas.h>

const fkv_cpu_kernels *fkv_cpu_kernels_for(fkv_isa isa) {
    if (isa == FKV_ISA_AUTO) isa = fkv_cpu_best_isa();
    if (!fkv_cpu_runs(isa)) return NULL;
    switch (isa) {
    case FKV_ISA_SCALAR: return &fkv_kernels_scalar;
#define CASE(upper, lower)                                                                                                       \
    case FKV_ISA_##upper: return &fkv_kernels_##lower;
        FKV_KERNEL_ISAS(CASE)
    default: return NULL;
    }
}

const char *fkv_cpu_kernels_name(const fkv_cpu_kernels *kernels) { return kernels->name; }
