/* Detects instruction sets and available cores. See cpu.h.
 *
 * Detection happens at run time and includes operating-system support (the compiler's builtin checks xgetbv). An instruction set
 * counts as available only if all extensions that its kernels are compiled with are available.
 */
#include "cpu.h"

#include "cgroup.h"
#include <kernel_isas.h>

#include <stdatomic.h>
#include <unistd.h>

#if !FKV_OS_APPLE
#include <sched.h>
#endif
#if FKV_OS_LINUX
#include <sys/syscall.h>
#endif

#if FKV_ARCH_X86

static bool runs_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static bool runs_avx512(void) {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static bool runs_avx512vnni(void) { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }

#if FKV_OS_LINUX

/* Requests permission to use the AMX tile registers. Linux grants the permission to the whole process. Without it, the first use
 * of a tile register causes a fault. Repeated requests have no effect, so concurrent callers need no lock. */
static bool request_amx_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

static bool request_amx_tiles(void) { return false; }

#endif

static bool runs_amx(void) {
    enum { UNKNOWN, NO, YES };
    static _Atomic int answer;
    if (answer == UNKNOWN) {
        bool there = runs_avx512vnni() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("amx-tile") &&
                     __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16");
        answer = there && request_amx_tiles() ? YES : NO;
    }
    return answer == YES;
}

fkv_cpu_maker fkv_cpu_vendor(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel")) return FKV_CPU_INTEL;
    return __builtin_cpu_is("amd") ? FKV_CPU_AMD : FKV_CPU_OTHER;
}

#else

fkv_cpu_maker fkv_cpu_vendor(void) { return FKV_CPU_OTHER; }
static bool runs_avx2(void) { return false; }
static bool runs_avx512(void) { return false; }
static bool runs_avx512vnni(void) { return false; }
static bool runs_amx(void) { return false; }

#endif

/* Returns true if this build has kernels for the instruction set. */
static bool has_kernels(fkv_isa isa) {
    switch (isa) {
#define CASE(upper, lower) case FKV_ISA_##upper:
        FKV_KERNEL_ISAS(CASE)
    case FKV_ISA_AUTO:
    case FKV_ISA_SCALAR: return true;
    default: return false;
    }
}

bool fkv_cpu_runs(fkv_isa isa) {
    if (!has_kernels(isa)) return false;
    switch (isa) {
    case FKV_ISA_AUTO:
    case FKV_ISA_SCALAR: return true;
    case FKV_ISA_NEON: return FKV_ARCH_ARM;
    case FKV_ISA_AVX2: return runs_avx2();
    case FKV_ISA_AVX512: return runs_avx512();
    case FKV_ISA_AVX512VNNI: return runs_avx512vnni();
    case FKV_ISA_AMX: return runs_amx();
    }
    return false;
}

fkv_isa fkv_cpu_best_isa(void) {
    static const fkv_isa best_first[] = {FKV_ISA_AMX, FKV_ISA_AVX512VNNI, FKV_ISA_AVX512, FKV_ISA_AVX2, FKV_ISA_NEON};
    for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++)
        if (fkv_cpu_runs(best_first[i])) return best_first[i];
    return FKV_ISA_SCALAR;
}

const char *fkv_isa_name(fkv_isa isa) {
    switch (isa) {
    case FKV_ISA_AUTO: return "auto";
    case FKV_ISA_SCALAR: return "scalar";
    case FKV_ISA_NEON: return "neon";
    case FKV_ISA_AVX2: return "avx2";
    case FKV_ISA_AVX512: return "avx512";
    case FKV_ISA_AVX512VNNI: return "avx512vnni";
    case FKV_ISA_AMX: return "amx";
    }
    return "unknown";
}

/* Returns the number of cores in the affinity mask of the process. */
static uint32_t affinity_cores(void) {
#if !FKV_OS_APPLE
    cpu_set_t set; /* sched_getaffinity() fails on machines with more than 1024 cores */
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return (uint32_t)CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (uint32_t)online : 1;
}

uint32_t fkv_cpu_count(void) {
    uint32_t cores = fkv_min_u32(affinity_cores(), fkv_cgroup_cpu_quota(""));
    return fkv_min_u32(cores, FKV_MAX_THREADS);
}
