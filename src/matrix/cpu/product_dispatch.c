/* Selects the matrix-product kernels of an instruction set. */
#include "../../base/cpu.h"
#include "../../base/workers.h"
#include "product_kernels.h"
#include <kernel_isas.h>

const fkv_product_kernels *fkv_product_kernels_for(fkv_isa isa) {
    if (!fkv_cpu_runs(isa)) return NULL;
    switch (isa) {
    case FKV_ISA_SCALAR: return &fkv_product_scalar;
#define CASE(upper, lower)                                                                                                       \
    case FKV_ISA_##upper: return &fkv_product_##lower;
        FKV_KERNEL_ISAS(CASE)
    default: return NULL;
    }
}
