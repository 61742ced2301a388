/* Host prelude for tests. Defines the same names as prelude_cuda.h and emulates warps with lanes_host.h. The emulation is slow,
 * because the lanes of a warp exchange data through memory in all warp operations, including matrix products. The generated
 * source includes src/base/float16.h first. */
#include <cstring>

#define FKV_DEVICE
#define FKV_SHARED
#define FKV_LOCAL
#define FKV_SHARED_ARRAY(type, name, n) type *name = (type *)fkv_host_thread.block->shared
#undef FKV_UNROLL
#define FKV_UNROLL
#define FKV_UNROLL_8
#define FKV_NO_UNROLL

struct alignas(8) fkv_words2 {
    fkv_u32 w[2];
};
struct alignas(16) fkv_words4 {
    fkv_u32 w[4];
};

/* As on CUDA, arithmetic other than fkv_add(), fkv_sub(), fkv_mul() and fkv_div() may be contracted to fused operations if the
 * compiler options allow it. */
#ifdef __clang__
#define FKV_HOST_EXACT _Pragma("clang fp contract(off)")
#else
#define FKV_HOST_EXACT
#endif
FKV_FN float fkv_add(float a, float b) {
    FKV_HOST_EXACT
    return a + b;
}
FKV_FN float fkv_sub(float a, float b) {
    FKV_HOST_EXACT
    return a - b;
}
FKV_FN float fkv_mul(float a, float b) {
    FKV_HOST_EXACT
    return a * b;
}
FKV_FN float fkv_div(float a, float b) {
    FKV_HOST_EXACT
    return a / b;
}
FKV_FN float fkv_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FKV_FN float fkv_sqrt(float x) { return __builtin_sqrtf(x); }
FKV_FN float fkv_rint(float x) { return __builtin_rintf(x); }
FKV_FN float fkv_abs(float x) { return __builtin_fabsf(x); }
FKV_FN float fkv_reciprocal(float x) { return 1.0f / x; }
FKV_FN float fkv_max(float a, float b) { return __builtin_fmaxf(a, b); }
FKV_FN fkv_u32 fkv_max_bits(fkv_u32 a, fkv_u32 b) { return a > b ? a : b; }
FKV_FN float fkv_exp2(float x) { return __builtin_exp2f(x); }

/* Equal to fkv_f16_to_f32(), which would take a third of the emulation's time. */
FKV_FN float fkv_host_f16(fkv_u32 bits) {
#ifdef __F16C__
    fkv_u16 half = (fkv_u16)bits;
    _Float16 x;
    memcpy(&x, &half, sizeof x);
    return (float)x;
#else
    return fkv_f16_to_f32((fkv_u16)bits);
#endif
}

FKV_FN fkv_u32 fkv_pack_f16(float low, float high) { return fkv_f32_to_f16(low) | (fkv_u32)fkv_f32_to_f16(high) << 16; }
FKV_FN fkv_u32 fkv_pack_bf16(float low, float high) { return fkv_f32_to_bf16(low) | (fkv_u32)fkv_f32_to_bf16(high) << 16; }

/* ---- warp operations ---- */

/* Exchanges n words between all lanes of the warp: passes the words of this lane and returns the words of all lanes. */
typedef fkv_u32 fkv_host_exchanged[8];
FKV_FN const fkv_host_exchanged *fkv_host_exchange(const fkv_u32 *words, int n) {
    fkv_host_lane *at = &fkv_host_thread;
    fkv_u32 turn = at->turn++ % 2;
    memcpy(at->warp->given[turn][at->lane], words, (size_t)n * sizeof *words);
    fkv_host_barrier_wait(at->warp->barrier, 32);
    return at->warp->given[turn];
}

FKV_FN fkv_u32 fkv_shuffle_xor_bits(fkv_u32 x, fkv_u32 mask) { return fkv_host_exchange(&x, 1)[fkv_host_thread.lane ^ mask][0]; }
FKV_FN float fkv_shuffle_xor(float x, fkv_u32 mask) { return fkv_float_of(fkv_shuffle_xor_bits(fkv_bits_of(x), mask)); }
FKV_FN fkv_u32 fkv_shuffle_bits(fkv_u32 x, fkv_u32 lane) { return fkv_host_exchange(&x, 1)[lane][0]; }
FKV_FN float fkv_shuffle(float x, fkv_u32 lane) { return fkv_float_of(fkv_shuffle_bits(fkv_bits_of(x), lane)); }
FKV_FN fkv_u32 fkv_warp_max_bits(fkv_u32 x) {
    const fkv_host_exchanged *all = fkv_host_exchange(&x, 1);
    for (int i = 0; i < 32; i++) x = all[i][0] > x ? all[i][0] : x;
    return x;
}
FKV_FN bool fkv_any(bool x) {
    fkv_u32 bits = x;
    const fkv_host_exchanged *all = fkv_host_exchange(&bits, 1);
    bool any = false;
    for (int i = 0; i < 32; i++) any = any || all[i][0] != 0;
    return any;
}

FKV_FN void fkv_sync() { fkv_host_barrier_wait(fkv_host_thread.block->barrier, fkv_host_thread.block->n_threads); }
FKV_FN void fkv_sync_warp() { fkv_host_barrier_wait(fkv_host_thread.warp->barrier, 32); }
FKV_FN void fkv_sync_team(fkv_u32 team, fkv_u32 n) { fkv_host_barrier_wait(fkv_host_thread.block->teams[team], n); }

template <typename T> static T fkv_host_load(const fkv_u8 *at) {
    T x;
    memcpy(&x, __builtin_assume_aligned(at, alignof(T)), sizeof x);
    return x;
}
FKV_FN fkv_words4 fkv_stream16(const fkv_u8 *at) { return fkv_host_load<fkv_words4>(at); }
FKV_FN fkv_words2 fkv_stream8(const fkv_u8 *at) { return fkv_host_load<fkv_words2>(at); }
FKV_FN fkv_u32 fkv_stream4(const fkv_u8 *at) { return fkv_host_load<fkv_u32>(at); }
FKV_FN fkv_u32 fkv_stream2(const fkv_u8 *at) { return fkv_host_load<fkv_u16>(at); }
FKV_FN fkv_u32 fkv_stream1(const fkv_u8 *at) { return *at; }

FKV_FN fkv_words4 fkv_shared16(const fkv_u32 *at) { return fkv_host_load<fkv_words4>((const fkv_u8 *)at); }

FKV_FN fkv_host_lane_copies &fkv_host_own_copies() { return fkv_host_thread.warp->copies[fkv_host_thread.lane]; }
FKV_FN void fkv_async_copy16(fkv_u32 *to, const fkv_u8 *at) {
    fkv_host_lane_copies &own = fkv_host_own_copies();
    /* The Thue-Morse sequence is not periodic. If a kernel starts different kinds of groups in a fixed cycle, each kind is
     * sometimes late. */
    bool late = __builtin_parity(own.n_groups) != 0;
    if (!late) {
        memcpy(to, __builtin_assume_aligned(at, 16), 16);
        return;
    }
    if (own.n_late == FKV_HOST_LATE_COPIES) abort();
    own.late[own.n_late++] = {to, at, own.n_groups};
}
FKV_FN void fkv_async_copy_commit() { fkv_host_own_copies().n_groups++; }
/* Executes the lane's late copies, except those of its last n groups. */
FKV_FN void fkv_host_finish_copies(fkv_u32 n) {
    fkv_host_lane_copies &own = fkv_host_own_copies();
    fkv_u32 n_left = 0;
    for (fkv_u32 i = 0; i < own.n_late; i++) {
        if (own.late[i].group + n < own.n_groups)
            memcpy(own.late[i].to, __builtin_assume_aligned(own.late[i].from, 16), 16);
        else
            own.late[n_left++] = own.late[i];
    }
    own.n_late = n_left;
}
FKV_FN void fkv_async_copy_wait_but_last() {
    fkv_host_finish_copies(1);
    fkv_sync_warp();
}
FKV_FN void fkv_async_copy_wait() { fkv_host_finish_copies(0); }

FKV_FN fkv_host_word &fkv_host_atomic(fkv_u32 *word) { return *reinterpret_cast<fkv_host_word *>(word); }
FKV_FN fkv_u32 fkv_fetch_increment(fkv_u32 *word) { return fkv_host_atomic(word).fetch_add(1); }

FKV_FN void fkv_mark(fkv_u8 *at) { __atomic_store_n(at, 1, __ATOMIC_RELAXED); }

FKV_FN fkv_u32 fkv_upper_half(fkv_u32 x) { return x >> 16; }
template <int N> FKV_FN fkv_u32 fkv_shifted_right(fkv_u32 x) { return x >> N; }

FKV_FN fkv_u32 fkv_permute(fkv_u32 a, fkv_u32 b, fkv_u32 order) {
    fkv_u64 both = (fkv_u64)b << 32 | a;
    fkv_u32 x = 0;
    for (int i = 0; i < 4; i++) x |= (fkv_u32)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
    return x;
}

FKV_FN fkv_u32 fkv_permute_or_sign(fkv_u32 a, fkv_u32 b, fkv_u32 order) {
    fkv_u32 x = fkv_permute(a, b, order & 0x7777u);
    for (int i = 0; i < 4; i++) {
        if ((order >> (4 * i + 3) & 1u) == 0) continue;
        fkv_u32 all = 0xffu << 8 * i;
        x = (x >> (8 * i + 7) & 1u) != 0 ? x | all : x & ~all;
    }
    return x;
}

FKV_FN fkv_u32 fkv_mask_or(fkv_u32 x, fkv_u32 mask, fkv_u32 bits) { return (x & mask) | bits; }

/* As on the GPU, the result is rounded only once. The product of two fp16 values is exact in a float, and the sum of this product
 * and a third fp16 value is exact in a double. */
FKV_FN fkv_u32 fkv_fma_f16x2(fkv_u32 a, fkv_u32 b, fkv_u32 c) {
    fkv_u32 x = 0;
    for (int i = 0; i < 32; i += 16) {
        double sum = (double)fkv_f16_to_f32(a >> i & 0xffffu) * (double)fkv_f16_to_f32(b >> i & 0xffffu) +
                     (double)fkv_f16_to_f32(c >> i & 0xffffu);
        x |= fkv_f32_to_f16((float)sum) << i;
    }
    return x;
}

/* The product of two bfloat16 values is exact in a float. The sum is rounded to float first, which is exact for the integers of
 * up to 16 bits that the kernels convert. */
FKV_FN fkv_u32 fkv_fma_bf16x2(fkv_u32 a, fkv_u32 b, fkv_u32 c) {
    float low = fkv_fma(fkv_float_of(a << 16), fkv_float_of(b << 16), fkv_float_of(c << 16));
    float high = fkv_fma(fkv_float_of(a & 0xffff0000u), fkv_float_of(b & 0xffff0000u), fkv_float_of(c & 0xffff0000u));
    return fkv_pack_bf16(low, high);
}

/* Computes d = a * b + c for matrices of bytes. A and B are the byte types (signed or unsigned) of a and b. */
template <typename A, typename B> static void fkv_host_mma_bytes(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    const fkv_u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const fkv_host_exchanged *all = fkv_host_exchange(words, 6);
    fkv_u32 lane = fkv_host_thread.lane;
    for (fkv_u32 i = 0; i < 4; i++) {
        fkv_u32 row = lane / 4;
        fkv_u32 column = lane % 4 * 2 + i % 2;
        int sum = c[i];
        for (fkv_u32 k = 0; k < 32; k++) {
            fkv_u32 from = k % 16 / 4;
            int x = (A)(all[row * 4 + from][i / 2 + k / 16 * 2] >> 8 * (k % 4) & 255);
            int y = (B)(all[column * 4 + from][4 + k / 16] >> 8 * (k % 4) & 255);
            sum += x * y;
        }
        d[i] = sum;
    }
}

FKV_FN void fkv_mma_bytes(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    fkv_host_mma_bytes<int8_t, fkv_u8>(d, a, b0, b1, c);
}
FKV_FN void fkv_mma_signed(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    fkv_host_mma_bytes<int8_t, int8_t>(d, a, b0, b1, c);
}
FKV_FN void fkv_mma_weights(int *d, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, const int *c) {
    fkv_host_mma_bytes<fkv_u8, int8_t>(d, a, b0, b1, c);
}

template <typename Number> static void fkv_host_mma_halves(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1, Number number) {
    const fkv_u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const fkv_host_exchanged *all = fkv_host_exchange(words, 6);
    fkv_u32 lane = fkv_host_thread.lane;
    for (fkv_u32 i = 0; i < 4; i++) {
        fkv_u32 row = lane / 4;
        fkv_u32 column = lane % 4 * 2 + i % 2;
        float sum = c[i];
        for (fkv_u32 k = 0; k < 16; k++) {
            fkv_u32 from = k % 8 / 2;
            float x = number(all[row * 4 + from][i / 2 + k / 8 * 2] >> 16 * (k % 2) & 0xffffu);
            float y = number(all[column * 4 + from][4 + k / 8] >> 16 * (k % 2) & 0xffffu);
            sum += x * y;
        }
        c[i] = sum;
    }
}
FKV_FN void fkv_mma_f16(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    fkv_host_mma_halves(c, a, b0, b1, [](fkv_u32 bits) { return fkv_host_f16(bits); });
}
FKV_FN void fkv_mma_bf16(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    fkv_host_mma_halves(c, a, b0, b1, [](fkv_u32 bits) { return fkv_float_of(bits << 16); });
}
