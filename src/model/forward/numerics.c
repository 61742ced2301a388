/* Identity of the CPU backend's arithmetic. See numerics.h. */
#include "numerics.h"

#include <stdio.h>

/* Returns the name of the class to which `isa` belongs. All instruction sets of a class compute bit-identical results. */
static const char *class_name(fkv_isa isa) {
    return isa == FKV_ISA_AVX512VNNI || isa == FKV_ISA_AMX ? "int8dot" : fkv_isa_name(isa);
}

/* Returns the part of the identity that depends on the machine instead of the instruction set. The int8dot kernels use VRCP14PS,
 * an approximate reciprocal whose result may differ between processor vendors. The forward pass calls functions of the C library
 * (cos(), sin(), expf()), and Apple's C library rounds some results differently. */
static const char *platform_suffix(fkv_isa isa) {
    if (FKV_OS_APPLE) return " apple";
    if (isa != FKV_ISA_AVX512VNNI && isa != FKV_ISA_AMX) return "";
    switch (fkv_cpu_vendor()) {
    case FKV_CPU_INTEL: return " intel";
    case FKV_CPU_AMD: return " amd";
    default: return " other";
    }
}

void fkv_cpu_numerics(fkv_isa isa, char text[FKV_NUMERICS_BYTES]) {
    (void)snprintf(text, FKV_NUMERICS_BYTES, "cpu %s %d%s", class_name(isa), FKV_CPU_NUMERICS_VERSION, platform_suffix(isa));
}
