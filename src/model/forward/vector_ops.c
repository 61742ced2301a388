/* Compiles vector_ops_body.h for the baseline instruction set, selects the table of an instruction set, and defines the functions
 * that have only one version. See vector_ops.h.
 */
#define VECTOR_OPS fkv_vector_ops_plain
#include "vector_ops_body.h"

#if FKV_ARCH_X86

const fkv_vector_ops *fkv_vector_ops_for(fkv_isa isa) {
    switch (isa) {
    case FKV_ISA_AVX2: return &fkv_vector_ops_avx2;
    case FKV_ISA_AVX512:
    case FKV_ISA_AVX512VNNI:
    case FKV_ISA_AMX: return &fkv_vector_ops_avx512;
    default: return &fkv_vector_ops_plain;
    }
}

#else

const fkv_vector_ops *fkv_vector_ops_for(fkv_isa isa) {
    (void)isa;
    return &fkv_vector_ops_plain;
}

#endif

void fkv_rope_angles(double position, const double *frequencies, uint32_t n_pairs, float *cosines, float *sines) {
    for (uint32_t i = 0; i < n_pairs; i++) {
        double angle = position * frequencies[i];
        cosines[i] = (float)cos(angle);
        sines[i] = (float)sin(angle);
    }
}

void fkv_heads_spread(float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded) {
    if (padded == head_dim) return;
    for (uint32_t h = n_heads; h-- > 0;) {
        float *to = row + (size_t)h * padded;
        memmove(to, row + (size_t)h * head_dim, head_dim * sizeof *row);
        memset(to + head_dim, 0, (padded - head_dim) * sizeof *row);
    }
}

void fkv_heads_gather(const float *row, uint32_t n_heads, uint32_t head_dim, uint32_t padded, float *out) {
    for (uint32_t h = 0; h < n_heads; h++) memcpy(out + (size_t)h * head_dim, row + (size_t)h * padded, head_dim * sizeof *out);
}
