/* Selects the attention kernels for aarch64. */
#include "../../base/cpu.h"
#include "../attn.h"
#include "kernels.h"

const fkv_cpu_kernels *fkv_cpu_kernels_for(fkv_isa isa) {
    if (isa == FKV_ISA_AUTO) isa = fkv_cpu_best_isa();
    if (!fkv_cpu_runs(isa)) return NULL;
    switch (isa) {
    case FKV_ISA_SCALAR: return &fkv_kernels_scalar;
    case FKV_ISA_NEON: return &fkv_kernels_neon;
    default: return NULL;
    }
}

const char *fkv_cpu_kernels_name(const fkv_cpu_kernels *kernels) { return kernels->name; }
