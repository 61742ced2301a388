/* Prelude of the CUDA kernels (nvcc and NVRTC). It defines thread coordinates, memory spaces, arithmetic with defined rounding,
 * and warp operations. prelude_metal.h and prelude_host.h define the same names. This file does not include headers of the CUDA
 * toolkit.
 *
 * Arithmetic whose rounding is part of the page format uses fkv_add(), fkv_sub(), fkv_mul() and fkv_div(), which compilers never
 * contract to fused operations. Other arithmetic may be contracted.
 */
#define FKV_FN [[maybe_unused]] static __device__ __forceinline__
#define FKV_DEVICE
#define FKV_SHARED
#define FKV_LOCAL
#define FKV_SHARED_ARRAY(type, name, n) __shared__ __align__(16) type name[n]
#define FKV_UNROLL _Pragma("unroll")
#define FKV_UNROLL_8 _Pragma("unroll 8")
#define FKV_NO_UNROLL _Pragma("unroll 1")

typedef unsigned char fkv_u8;
typedef unsigned short fkv_u16;
typedef unsigned int fkv_u32;
typedef unsigned long long fkv_u64;

/* Index of a thread within its block, and index of the block within the grid. */
struct fkv_place {
    fkv_u32 index;
    fkv_u32 x;
    fkv_u32 y;
    fkv_u32 z;
};

struct __align__(8) fkv_words2 {
    fkv_u32 w[2];
};
struct __align__(16) fkv_words4 {
    fkv_u32 w[4];
};

/* The framework generates the kernel signature without launch bounds, so __global__ is redefined to add them. */
#ifdef FKV_LAUNCH_THREADS
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(FKV_LAUNCH_THREADS, FKV_LAUNCH_BLOCKS)
#endif

FKV_FN fkv_u32 fkv_bits_of(float x) { return __float_as_uint(x); }
FKV_FN float fkv_float_of(fkv_u32 u) { return __uint_as_float(u); }
FKV_FN float fkv_add(float a, float b) { return __fadd_rn(a, b); }
FKV_FN float fkv_sub(float a, float b) { return __fsub_rn(a, b); }
FKV_FN float fkv_mul(float a, float b) { return __fmul_rn(a, b); }
FKV_FN float fkv_div(float a, float b) { return __fdiv_rn(a, b); }
FKV_FN float fkv_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FKV_FN float fkv_sqrt(float x) { return __fsqrt_rn(x); }
FKV_FN float fkv_rint(float x) { return rintf(x); }
FKV_FN float fkv_abs(float x) { return fabsf(x); }
/* Returns an approximation of 1 / x; the last bit may be wrong. */
FKV_FN float fkv_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FKV_FN float fkv_max(float a, float b) { return fmaxf(a, b); } /* returns the other argument if one argument is NaN */
FKV_FN fkv_u32 fkv_max_bits(fkv_u32 a, fkv_u32 b) { return max(a, b); }

FKV_FN float fkv_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FKV_FN float fkv_f16_to_f32(fkv_u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((fkv_u16)bits));
    return x;
}

FKV_FN fkv_u32 fkv_f32_to_f16(float x) {
    fkv_u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

/* The next two functions convert two floats to 16-bit floats and pack them into a word, with `low` in the lower 16 bits. */
FKV_FN fkv_u32 fkv_pack_f16(float low, float high) {
    fkv_u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

FKV_FN fkv_u32 fkv_pack_bf16(float low, float high) {
    fkv_u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

FKV_FN float fkv_shuffle_xor(float x, fkv_u32 mask) { return __shfl_xor_sync(0xffffffffu, x, (int)mask); }
FKV_FN fkv_u32 fkv_shuffle_xor_bits(fkv_u32 x, fkv_u32 mask) { return __shfl_xor_sync(0xffffffffu, x, (int)mask); }
FKV_FN float fkv_shuffle(float x, fkv_u32 lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
FKV_FN fkv_u32 fkv_shuffle_bits(fkv_u32 x, fkv_u32 lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
FKV_FN fkv_u32 fkv_warp_max_bits(fkv_u32 x) { return __reduce_max_sync(0xffffffffu, x); }
FKV_FN bool fkv_any(bool x) { return __any_sync(0xffffffffu, x); }

/* Barriers: fkv_sync() for all threads of the block, fkv_sync_warp() for the warp, and fkv_sync_team() for n threads that pass
 * the same barrier number (1 or higher). */
FKV_FN void fkv_sync() { __syncthreads(); }
FKV_FN void fkv_sync_warp() { __syncwarp(); }
FKV_FN void fkv_sync_team(fkv_u32 team, fkv_u32 n) { asm volatile("bar.sync %0, %1;" ::"r"(team), "r"(n) : "memory"); }

/* The following functions load page bytes that are read only once. The loads bypass L1 and fetch full 128-byte lines into L2. */
FKV_FN fkv_words4 fkv_stream16(const fkv_u8 *at) {
    fkv_words4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(at));
    return x;
}
FKV_FN fkv_words2 fkv_stream8(const fkv_u8 *at) {
    fkv_words2 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(at));
    return x;
}
FKV_FN fkv_u32 fkv_stream4(const fkv_u8 *at) {
    fkv_u32 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}
FKV_FN fkv_u32 fkv_stream2(const fkv_u8 *at) {
    fkv_u16 x;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(x) : "l"(at));
    return x;
}
FKV_FN fkv_u32 fkv_stream1(const fkv_u8 *at) {
    fkv_u32 x;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}

/* Selects four of the eight bytes of a (bytes 0 to 3) and b (bytes 4 to 7). Each nibble of `order`, starting with the lowest, is
 * the number of a selected byte. */
FKV_FN fkv_u32 fkv_permute(fkv_u32 a, fkv_u32 b, fkv_u32 order) { return __byte_perm(a, b, order); }

/* Selects bytes in the same way as fkv_permute(). If the highest bit of a nibble is set, the sign bit of the selected byte is
 * replicated to all eight bits. */
FKV_FN fkv_u32 fkv_permute_or_sign(fkv_u32 a, fkv_u32 b, fkv_u32 order) {
    fkv_u32 x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(order));
    return x;
}

/* Computes x & mask | bits in one instruction. Without inline assembly, the compiler would emit two instructions if `mask` and
 * `bits` are constants. */
FKV_FN fkv_u32 fkv_mask_or(fkv_u32 x, fkv_u32 mask, fkv_u32 bits) {
    fkv_u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

/* fkv_upper_half() shifts x right by 16 bits, and fkv_shifted_right() by N bits. Both use the multiply pipe, because the integer
 * ALU pipe is the bottleneck of unpacking. */
FKV_FN fkv_u32 fkv_upper_half(fkv_u32 x) {
    fkv_u32 y;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x100u), "r"(0u));
    return y;
}
template <int N> FKV_FN fkv_u32 fkv_shifted_right(fkv_u32 x) {
    fkv_u32 y;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "n"(1u << (32 - N)));
    return y;
}

/* Computes a * b + c for the two fp16 values in each word. */
FKV_FN fkv_u32 fkv_fma_f16x2(fkv_u32 a, fkv_u32 b, fkv_u32 c) {
    fkv_u32 x;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}

/* Computes a * b + c for the two bfloat16 values in each word. */
FKV_FN fkv_u32 fkv_fma_bf16x2(fkv_u32 a, fkv_u32 b, fkv_u32 c) {
    fkv_u32 x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}

/* Loads 16 bytes from shared memory. The load is volatile, so that the compiler reloads the bytes at each use instead of keeping
 * them in registers. */
FKV_FN fkv_words4 fkv_shared16(const fkv_u32 *at) {
    fkv_words4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "r"((fkv_u32)__cvta_generic_to_shared(at)));
    return x;
}

/* Starts copying 16 bytes of a page to shared memory (cp.async). fkv_async_copy_commit() ends a group of copies.
 * fkv_async_copy_wait_but_last() waits for all of the thread's groups except the last one, and fkv_async_copy_wait() for all of
 * the thread's groups. */
FKV_FN void fkv_async_copy16(fkv_u32 *to, const fkv_u8 *at) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((fkv_u32)__cvta_generic_to_shared(to)), "l"(at)
                 : "memory");
}
FKV_FN void fkv_async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
FKV_FN void fkv_async_copy_wait_but_last() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
}
FKV_FN void fkv_async_copy_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

/* Adds 1 to a counter in device memory and returns its previous value. To exchange data through device memory, a block stores its
 * data, executes a barrier and increments the counter. A block that increments the counter later and then executes a barrier sees
 * these data. */
FKV_FN fkv_u32 fkv_fetch_increment(fkv_u32 *word) {
    fkv_u32 x;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(word) : "memory");
    return x;
}

/* Sets a byte to 1. Several threads may set the same byte at the same time. */
FKV_FN void fkv_mark(fkv_u8 *at) { *at = 1; }

/* These functions compute d = a * b + c, where a is a 16 x 32 tile and b a 32 x 8 tile of bytes, in the layout of mma.m16n8k32.
 * In fkv_mma_bytes(), a is signed and b is unsigned. In fkv_mma_weights(), a is unsigned and b is signed. In fkv_mma_signed(),
 * both are signed. d may alias c. */
FKV_FN void fkv_mma_bytes(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
FKV_FN void fkv_mma_weights(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
FKV_FN void fkv_mma_signed(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

/* These functions compute c += a * b, where a is a 16 x 16 tile and b a 16 x 8 tile of fp16 or bfloat16 values, in the layout of
 * mma.m16n8k16. */
FKV_FN void fkv_mma_f16(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FKV_FN void fkv_mma_bf16(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
