/* What the processor can run and how many cores the process may use. See cpu.h.
 *
 * Instruction sets are asked for at run time, operating system support included (the compiler's builtin checks xgetbv). A set
 * counts only when everything its kernels are compiled with is there.
 */
#include "cpu.h"

#include "cgroup.h"

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

/* The kernel gives a process the registers of tiles on request, once for all its threads; without it their first use is a fault.
 * Asking again changes nothing, so that threads which ask at once need no lock. */
static bool may_use_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM and the feature, of the kernel's x86 interface */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

static bool may_use_tiles(void) { return false; }

#endif

static bool runs_amx(void) {
    enum { UNKNOWN, NO, YES };
    static _Atomic int answer;
    if (answer == UNKNOWN) {
        bool there = runs_avx512vnni() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                     __builtin_cpu_supports("amx-bf16");
        answer = there && may_use_tiles() ? YES : NO;
    }
    return answer == YES;
}

#else

static bool runs_avx2(void) { return false; }
static bool runs_avx512(void) { return false; }
static bool runs_avx512vnni(void) { return false; }
static bool runs_amx(void) { return false; }

#endif

bool fkv_cpu_runs(fkv_isa isa) {
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

/* Cores the scheduler lets this process run on. */
static uint32_t cores_allowed(void) {
#if !FKV_OS_APPLE
    cpu_set_t set; /* too small above 1024 cores; the call then says so */
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return (uint32_t)CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (uint32_t)online : 1;
}

uint32_t fkv_cpu_count(void) {
    uint32_t cores = fkv_min_u32(cores_allowed(), fkv_cgroup_cpu_quota(""));
    return fkv_min_u32(cores, FKV_MAX_THREADS);
}
