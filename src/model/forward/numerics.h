/* Identity of the CPU backend's arithmetic, which is stored with pages (fkv_config.numerics).
 *
 * Instruction sets with the same identity compute bit-identical keys and values for the same tokens, for any number of threads
 * and any division into steps. AVX-512 VNNI and AMX form one class, because both compute the dot products of the same
 * integers exactly, round them to float once, and then perform identical float operations. All other instruction sets add floats
 * in a different order, so each of them is a separate class. test_numerics checks that all instruction sets of a class compute
 * identical pages, and compares the pages with stored digests.
 */
#ifndef FKV_NUMERICS_H
#define FKV_NUMERICS_H

#include "../../base/cpu.h"

enum {
    FKV_NUMERICS_BYTES = 32, /* size of fkv_config.numerics */

    /* Must be increased by every change to the forward pass or to a kernel that changes a bit of keys or values. Otherwise, pages
     * stored by earlier versions would be used together with pages of this version. */
    FKV_CPU_NUMERICS_VERSION = 3
};

/* Writes the identity, such as "cpu avx2 3". isa: not FKV_ISA_AUTO. */
void fkv_cpu_numerics(fkv_isa isa, char text[FKV_NUMERICS_BYTES]);

#endif
