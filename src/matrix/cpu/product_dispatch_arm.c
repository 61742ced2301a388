/* Selects the matrix-product kernels for aarch64. */
#include "../../base/cpu.h"
#include "../../base/workers.h"
#include "product_kernels.h"

const fkv_product_kernels *fkv_product_kernels_for(fkv_isa isa) {
    if (!fkv_cpu_runs(isa)) return NULL;
    switch (isa) {
    case FKV_ISA_SCALAR: return &fkv_product_scalar;
    case FKV_ISA_NEON: return &fkv_product_neon;
    default: return NULL;
    }
}
