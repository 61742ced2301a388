/* Selects the matrix-product kernels for x86_64. */
#include "../../base/cpu.h"
#include "../../base/workers.h"
#include "product_kernels.h"

const fkv_product_kernels *fkv_product_kernels_for(fkv_isa isa) {
    if (!fkv_cpu_runs(isa)) return NULL;
    switch (isa) {
    case FKV_ISA_SCALAR: return &fkv_product_scalar;
    case FKV_ISA_AVX2: return &fkv_product_avx2;
    case FKV_ISA_AVX512: return &fkv_product_avx512;
    case FKV_ISA_AVX512VNNI: return &fkv_product_avx512vnni;
    case FKV_ISA_AMX: return &fkv_product_amx;
    default: return NULL;
    }
}
