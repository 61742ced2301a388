/* Warpgroup primitives of sm_90a for prefill: asynchronous matrix products of 64 rows (wgmma), mbarriers, bulk copies (TMA) and
 * communication between blocks. warpgroup_host.h implements the same functions as plain loops, which define their semantics.
 *
 * Tiles in shared memory have rows of 128 bytes (64 fp16 values). The 16-byte units of a row are swizzled: unit u of row r is
 * stored at u ^ (r % 8). The base of shared memory is aligned to 1024 bytes, and tiles start at multiples of 1024 bytes.
 * mbarriers are identified by their byte offset from the base.
 */
/* wgmma operand descriptor for shared memory. The low word holds the address of the operand in units of 16 bytes and, for values,
 * the stride between blocks of 64 channels. The high word selects the 128-byte swizzle and a stride of 1024 bytes between groups
 * of 8 rows. */
#define FKV_WG_DESCRIPTOR(low) ((fkv_u64)(1u << 30 | 1024 / 16) << 32 | (low))

#define FKV_ACC8(how, d, i)                                                                                                      \
    how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define FKV_ACC16(how, d, i) FKV_ACC8(how, d, i), FKV_ACC8(how, d, i + 8)
#define FKV_ACC32(how, d, i) FKV_ACC16(how, d, i), FKV_ACC16(how, d, i + 16)
#define FKV_ACC64(how, d, i) FKV_ACC32(how, d, i), FKV_ACC32(how, d, i + 32)
#define FKV_REGS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FKV_REGS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FKV_REGS32 FKV_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FKV_REGS64                                                                                                               \
    FKV_REGS32                                                                                                                   \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"          \
    "%60,%61,%62,%63"

struct fkv_shared {
    fkv_u8 *base;    /* aligned to 1024 bytes */
    fkv_u32 address; /* shared-memory address of base */
    fkv_u32 unit;    /* shared-memory address of base in units of 16 bytes */
    fkv_u32 index;
};

FKV_FN fkv_shared fkv_shared_make(void *dynamic, fkv_u32 index) {
    fkv_u32 address = (fkv_u32)__cvta_generic_to_shared(dynamic);
    fkv_u32 skip = (1024 - address % 1024) % 1024;
    fkv_u32 aligned = address + skip;
    /* prevents the compiler from recomputing both values at each use */
    if (FKV_SEALED) asm volatile("" : "+r"(aligned), "+r"(index));
    return {(fkv_u8 *)dynamic + skip, aligned, aligned / 16, index};
}

/* Returns 0, but prevents the compiler from knowing this value. ORing a constant with this value forces the compiler to keep the
 * constant in a register. */
FKV_FN fkv_u32 fkv_zero(fkv_shared s) { return s.address % 16; }

/* Returns the value of x in the warp's first lane. */
FKV_FN fkv_u32 fkv_uniform(fkv_u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

template <int KEYS, bool ADD> FKV_FN void fkv_wg_scores(fkv_shared, float *d, fkv_u32 q_at, fkv_u32 k_at) {
    fkv_u64 a = FKV_WG_DESCRIPTOR(q_at);
    fkv_u64 b = FKV_WG_DESCRIPTOR(k_at);
    static_assert(KEYS == 8 || KEYS == 16 || KEYS == 32 || KEYS == 40 || KEYS == 64, "unsupported tile size");
    if constexpr (KEYS == 8) /* d must be initialized, because it is an input even if the product overwrites it */
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, %6, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "l"(a), "l"(b), "n"((int)ADD));
    else if constexpr (KEYS == 64 && ADD)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FKV_REGS32 "}, %32, %33, 1, 1, 1, 0, 0;"
                     : FKV_ACC32("+f", d, 0)
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 64)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FKV_REGS32 "}, %32, %33, 0, 1, 1, 0, 0;"
                     : FKV_ACC32("=f", d, 0)
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 40 && ADD)
        asm volatile("wgmma.mma_async.sync.aligned.m64n40k16.f32.f16.f16 {" FKV_REGS16
                     ",%16,%17,%18,%19}, %20, %21, 1, 1, 1, 0, 0;"
                     : FKV_ACC16("+f", d, 0), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 40)
        asm volatile("wgmma.mma_async.sync.aligned.m64n40k16.f32.f16.f16 {" FKV_REGS16
                     ",%16,%17,%18,%19}, %20, %21, 0, 1, 1, 0, 0;"
                     : FKV_ACC16("=f", d, 0), "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19])
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 32 && ADD)
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" FKV_REGS16 "}, %16, %17, 1, 1, 1, 0, 0;"
                     : FKV_ACC16("+f", d, 0)
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 32)
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" FKV_REGS16 "}, %16, %17, 0, 1, 1, 0, 0;"
                     : FKV_ACC16("=f", d, 0)
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 16 && ADD)
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" FKV_REGS8 "}, %8, %9, 1, 1, 1, 0, 0;"
                     : FKV_ACC8("+f", d, 0)
                     : "l"(a), "l"(b));
    else if constexpr (KEYS == 16)
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" FKV_REGS8 "}, %8, %9, 0, 1, 1, 0, 0;"
                     : FKV_ACC8("=f", d, 0)
                     : "l"(a), "l"(b));
}

template <int KEYS, bool ADD> FKV_FN void fkv_wg_scores_held(fkv_shared, float *d, const fkv_u32 *q, fkv_u32 k_at) {
    static_assert(KEYS == 8 || KEYS == 64 || (KEYS == 128 && ADD), "unsupported tile size for operands in registers");
    fkv_u64 b = FKV_WG_DESCRIPTOR(k_at);
    if constexpr (KEYS == 8)
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9, 1, 1, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(b), "n"((int)ADD));
    else if constexpr (KEYS == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" FKV_REGS64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
                     : FKV_ACC64("+f", d, 0)
                     : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(b));
    else if constexpr (KEYS == 64 && ADD)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FKV_REGS32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                     : FKV_ACC32("+f", d, 0)
                     : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(b));
    else if constexpr (KEYS == 64)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FKV_REGS32 "}, {%32,%33,%34,%35}, %36, 0, 1, 1, 0;"
                     : FKV_ACC32("=f", d, 0)
                     : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(b));
}

template <int KEYS, int COLS> FKV_FN void fkv_wg_values(fkv_shared, float *d, const fkv_u32 *p, fkv_u32 v_at) {
    constexpr fkv_u32 block = KEYS * 128 / 16;
    constexpr int width = COLS % 128 == 0 ? 128 : 64;
#pragma unroll
    for (int c = 0; c < COLS / width; c++) {
        float *o = d + c * width / 2;
        fkv_u64 b = FKV_WG_DESCRIPTOR(v_at + (fkv_u32)(c * (width / 64)) * block + (block << 16));
        if constexpr (width == 128)
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" FKV_REGS64
                         "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                         : FKV_ACC64("+f", o, 0)
                         : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
        else
            asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FKV_REGS32
                         "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                         : FKV_ACC32("+f", o, 0)
                         : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
    }
}

template <bool BF16, bool ADD> FKV_FN void fkv_wg_scores_as(fkv_shared s, float *d, fkv_u32 q_at, fkv_u32 k_at) {
    fkv_u64 a = FKV_WG_DESCRIPTOR(q_at);
    fkv_u64 b = FKV_WG_DESCRIPTOR(k_at);
    if constexpr (!BF16)
        fkv_wg_scores<64, ADD>(s, d, q_at, k_at);
    else if constexpr (ADD)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FKV_REGS32 "}, %32, %33, 1, 1, 1, 0, 0;"
                     : FKV_ACC32("+f", d, 0)
                     : "l"(a), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FKV_REGS32 "}, %32, %33, 0, 1, 1, 0, 0;"
                     : FKV_ACC32("=f", d, 0)
                     : "l"(a), "l"(b));
}

#define FKV_WG_BYTES(type, add, how)                                                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32." type ".u8 {" FKV_REGS32 "}, %32, %33, " add ";"                   \
                 : FKV_ACC32(how, d, 0)                                                                                          \
                 : "l"(a), "l"(b))
template <bool SIGNED, bool ADD> FKV_FN void fkv_wg_bytes(fkv_shared, int *d, fkv_u32 q_at, fkv_u32 k_at) {
    fkv_u64 a = FKV_WG_DESCRIPTOR(q_at);
    fkv_u64 b = FKV_WG_DESCRIPTOR(k_at);
    if constexpr (SIGNED && ADD)
        FKV_WG_BYTES("s8", "1", "+r");
    else if constexpr (SIGNED)
        FKV_WG_BYTES("s8", "0", "=r");
    else if constexpr (ADD)
        FKV_WG_BYTES("u8", "1", "+r");
    else
        FKV_WG_BYTES("u8", "0", "=r");
}

FKV_FN void fkv_wg_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FKV_FN void fkv_wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> FKV_FN void fkv_wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
/* Prevents the compiler from moving accesses to d[0] to d[N - 1] above this point. Emits no instruction. */
template <int N> FKV_FN void fkv_wg_settle(float *d) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> FKV_FN void fkv_wg_settle_ints(int *d) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}
template <int N> FKV_FN void fkv_wg_shift_byte(int *d) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("shl.b32 %0, %0, 8;" : "+r"(d[i])::"memory");
}
template <int N> FKV_FN void fkv_wg_settle_bits(fkv_u32 *d) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}
template <int N> FKV_FN void fkv_more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> FKV_FN void fkv_fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

/* These functions load from and store to shared memory, `at` bytes from the base. */
FKV_FN void fkv_get16(fkv_shared s, fkv_u32 at, fkv_u32 *w) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(s.address + at));
}
FKV_FN void fkv_get8(fkv_shared s, fkv_u32 at, fkv_u32 *w) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(s.address + at));
}
FKV_FN fkv_u32 fkv_get4(fkv_shared s, fkv_u32 at) {
    fkv_u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(s.address + at));
    return x;
}
FKV_FN fkv_u32 fkv_get2(fkv_shared s, fkv_u32 at) {
    fkv_u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(s.address + at));
    return x;
}
FKV_FN void fkv_get_transposed(fkv_shared s, fkv_u32 at, fkv_u32 *w) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(s.address + at));
}
FKV_FN void fkv_put16(fkv_shared s, fkv_u32 at, fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(s.address + at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
FKV_FN void fkv_put4(fkv_shared s, fkv_u32 at, fkv_u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(s.address + at), "r"(x) : "memory");
}
FKV_FN void fkv_put2(fkv_shared s, fkv_u32 at, fkv_u32 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(s.address + at), "h"((fkv_u16)x) : "memory");
}

/* mbarriers */
FKV_FN void fkv_mbarrier_init(fkv_shared s, fkv_u32 at, fkv_u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(s.address + at), "r"(n) : "memory");
}
FKV_FN void fkv_mbarrier_arrive(fkv_shared s, fkv_u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s.address + at) : "memory");
}
FKV_FN void fkv_mbarrier_arrive_n(fkv_shared s, fkv_u32 at, fkv_u32 n) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(s.address + at), "r"(n) : "memory");
}
FKV_FN void fkv_mbarrier_wait(fkv_shared s, fkv_u32 at, fkv_u32 phase) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::
            "r"(s.address + at),
        "r"(phase)
        : "memory");
}
/* Bulk copies (TMA) from device memory to shared memory. All copies between begin and end count as a single arrival at the
 * mbarrier. Sizes are multiples of 16 bytes. */
FKV_FN void fkv_bulk_copy_begin(fkv_shared s, fkv_u32 mbarrier, fkv_u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s.address + mbarrier), "r"(bytes) : "memory");
}
FKV_FN void fkv_bulk_copy(fkv_shared s, fkv_u32 mbarrier, fkv_u32 at, const fkv_u8 *from, fkv_u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(s.address + at),
                 "l"(from), "r"(bytes), "r"(s.address + mbarrier)
                 : "memory");
}
FKV_FN void fkv_bulk_copy_end(fkv_shared, fkv_u32) {}
/* Makes this thread's stores to shared memory visible to asynchronous matrix products that other threads issue after
 * waiting for the next mbarrier. */
FKV_FN void fkv_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FKV_FN void fkv_mbarriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* ---- communication between blocks ---- */

/* Returns the number of multiprocessors of the device, or the number available to this process if it may use only a part of the
 * device. */
FKV_FN fkv_u32 fkv_processors() {
    fkv_u32 n;
    asm("mov.u32 %0, %%nsmid;" : "=r"(n));
    return n;
}

/* Functions for counters in device memory, which only increase during a launch. prelude_cuda.h defines fkv_fetch_increment(). */
FKV_FN fkv_u32 fkv_load_acquire(fkv_u32 *word) {
    fkv_u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
/* Does not order other memory accesses. */
FKV_FN fkv_u32 fkv_load_relaxed(fkv_u32 *word) {
    fkv_u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word));
    return x;
}
/* Stores x if the word is 0. Returns the previous value of the word. */
FKV_FN fkv_u32 fkv_exchange_zero(fkv_u32 *word, fkv_u32 x) {
    fkv_u32 before;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], 0, %2;" : "=r"(before) : "l"(word), "r"(x) : "memory");
    return before;
}
FKV_FN void fkv_pause() { __nanosleep(400); }
FKV_FN void fkv_store_release(fkv_u32 *word, fkv_u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}
FKV_FN void fkv_wait_at_least(fkv_u32 *word, fkv_u32 least) {
    while (fkv_load_acquire(word) < least) fkv_pause();
}
/* Waits until each lane's word is at least `least`. The words of lanes whose `waits` is false are ignored. All lanes of a warp
 * poll together, because lanes that poll one by one would take issue slots from other warps. */
FKV_FN void fkv_wait_for_words(bool waits, fkv_u32 *word, fkv_u32 least) {
    while (fkv_any(waits && fkv_load_acquire(word) < least)) fkv_pause();
    fkv_sync_warp(); /* makes what each lane has acquired visible to the other lanes */
}
/* Functions for counters in shared memory, which are `at` bytes from the base. NS: time between polls, in nanoseconds. */
FKV_FN void fkv_store_release_shared(fkv_shared s, fkv_u32 at, fkv_u32 x) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(s.address + at), "r"(x) : "memory");
}
template <int NS> FKV_FN void fkv_wait_at_least_shared(fkv_shared s, fkv_u32 at, fkv_u32 least) {
    fkv_u32 x;
    for (;;) {
        asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(s.address + at) : "memory");
        if (x >= least) return;
        __nanosleep(NS);
    }
}

/* An unpacked page (page image) in device memory. Offsets are in bytes from the base of the image. A writer calls
 * fkv_publish_image() before it updates a counter. A reader waits for the counter and calls fkv_acquire_image() before its bulk
 * copies. */
struct fkv_image {
    fkv_u8 *base;
};
FKV_FN void fkv_put16(fkv_image to, fkv_u32 at, fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d) {
    *(uint4 *)(to.base + at) = make_uint4(a, b, c, d);
}
FKV_FN void fkv_put4(fkv_image to, fkv_u32 at, fkv_u32 x) { *(fkv_u32 *)(to.base + at) = x; }
FKV_FN void fkv_put2(fkv_image to, fkv_u32 at, fkv_u32 x) { *(fkv_u16 *)(to.base + at) = (fkv_u16)x; }
FKV_FN void fkv_publish_image() { asm volatile("fence.acq_rel.gpu;\nfence.proxy.async;" ::: "memory"); }
FKV_FN void fkv_acquire_image() { asm volatile("fence.proxy.async;" ::: "memory"); }
