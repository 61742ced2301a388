/* Selects the attention kernels for x86_64. */
#include "../../base/cpu.h"
#include "../attn.h"
#include "kernels.h"

const fkv_cpu_kernels *fkv_cpu_kernels_for(fkv_isa isa) {
    if (isa == FKV_ISA_AUTO) isa = fkv_cpu_best_isa();
    if (!fkv_cpu_runs(isa)) return NULL;
    switch (isa) {
    case FKV_ISA_SCALAR: return &fkv_kernels_scalar;
    case FKV_ISA_AVX2: return &fkv_kernels_avx2;
    case FKV_ISA_AVX512: return &fkv_kernels_avx512;
    case FKV_ISA_AVX512VNNI: return &fkv_kernels_avx512vnni;
    case FKV_ISA_AMX: return &fkv_kernels_amx;
    default: return NULL;
    }
}

const char *fkv_cpu_kernels_name(const fkv_cpu_kernels *kernels) { return kernels->name; }
