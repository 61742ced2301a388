/* Host emulation of the warpgroup primitives. The host functions define the semantics of the functions in warpgroup_cuda.h. A
 * matrix product completes as soon as it is issued, which is one of the possible execution orders on the GPU. Waiting for an
 * mbarrier synchronizes the emulated threads, so ThreadSanitizer reports a data race if a wait is missing.
 */
struct fkv_shared {
    fkv_u8 *base; /* aligned to 1024 bytes */
    fkv_u32 unit; /* shared-memory address of base in units of 16 bytes; always 0 on the host */
    fkv_u32 index;
};

FKV_FN fkv_shared fkv_shared_make(void *dynamic, fkv_u32 index) {
    return {(fkv_u8 *)(((uintptr_t)dynamic + 1023) / 1024 * 1024), 0, index};
}

FKV_FN fkv_u32 fkv_zero(fkv_shared) { return 0; }
FKV_FN fkv_u32 fkv_uniform(fkv_u32 x) { return x; }

/* Returns the address of a byte in shared memory with the 128-byte swizzle, which permutes chunks of 16 bytes. */
FKV_FN const fkv_u8 *fkv_host_swizzled(fkv_shared s, fkv_u32 at) { return s.base + (at ^ (at / 128 % 8) * 16); }

/* The next three functions load operands of a row that starts at byte `at`: 16 values of type float16 or bfloat16, 16 float16
 * values that are 128 bytes apart, or 32 bytes. */
template <bool BF16> FKV_FN void fkv_host_load(fkv_shared s, fkv_u32 at, float *to) {
    for (fkv_u32 i = 0; i < 16; i += 8) {
        fkv_u16 bits[8];
        memcpy(bits, fkv_host_swizzled(s, at + 2 * i), sizeof bits);
        for (fkv_u32 k = 0; k < 8; k++) to[i + k] = BF16 ? fkv_float_of((fkv_u32)bits[k] << 16) : fkv_host_f16(bits[k]);
    }
}
FKV_FN void fkv_host_load_strided(fkv_shared s, fkv_u32 at, float *to) {
    for (fkv_u32 k = 0; k < 16; k++) {
        fkv_u16 bits;
        memcpy(&bits, fkv_host_swizzled(s, at + k * 128), sizeof bits);
        to[k] = fkv_host_f16(bits);
    }
}
template <bool SIGNED> FKV_FN void fkv_host_load_bytes(fkv_shared s, fkv_u32 at, int *to) {
    for (fkv_u32 i = 0; i < 32; i += 16) {
        const fkv_u8 *from = fkv_host_swizzled(s, at + i);
        for (fkv_u32 k = 0; k < 16; k++) to[i + k] = SIGNED ? (int8_t)from[k] : from[k];
    }
}

/* The next two functions return the row (within the warp's 16 rows) and the column of a thread's i-th accumulator. A thread has
 * accumulators in two rows. */
FKV_FN fkv_u32 fkv_host_row(fkv_u32 lane, int i) { return lane / 4 + (fkv_u32)i / 2 % 2 * 8; }
FKV_FN fkv_u32 fkv_host_column(fkv_u32 lane, int i) { return (fkv_u32)i / 4 * 8 + lane % 4 * 2 + (fkv_u32)i % 2; }

/* Computes the dot products over K channels for a thread's N accumulators d. Overwrites d, or adds to it if `add` is true. a:
 * operands of the thread's two rows. b: operands of its N / 2 columns, in the order of the accumulators. */
template <int N, int K, typename T> FKV_FN void fkv_host_dots(bool add, const T (*a)[K], const T (*b)[K], T *d) {
    for (int i = 0; i < N; i++) {
        const T *x = a[i / 2 % 2], *y = b[i / 4 * 2 + i % 2];
        T sum = add ? d[i] : 0;
        for (int k = 0; k < K; k++) sum += x[k] * y[k];
        d[i] = sum;
    }
}

/* Returns the byte offset of the r-th row (0 or 1) of a thread, or of its c-th column, in an operand with 128 bytes per row. */
FKV_FN fkv_u32 fkv_host_row_at(fkv_shared s, fkv_u32 q_at, int r) {
    return q_at * 16 + (s.index / 32 % 4 * 16 + fkv_host_row(s.index % 32, 2 * r)) * 128;
}
FKV_FN fkv_u32 fkv_host_column_at(fkv_shared s, fkv_u32 k_at, int c) {
    return k_at * 16 + fkv_host_column(s.index % 32, c / 2 * 4 + c % 2) * 128;
}

/* Computes d = q . k, or d += q . k if ADD is true, over 16 channels, for 64 rows of q and KEYS rows of k. d: the thread's KEYS /
 * 2 accumulators. */
template <int KEYS, bool ADD, bool BF16> FKV_FN void fkv_host_scores(fkv_shared s, float *d, fkv_u32 q_at, fkv_u32 k_at) {
    float a[2][16], b[KEYS / 4][16];
    for (int r = 0; r < 2; r++) fkv_host_load<BF16>(s, fkv_host_row_at(s, q_at, r), a[r]);
    for (int c = 0; c < KEYS / 4; c++) fkv_host_load<BF16>(s, fkv_host_column_at(s, k_at, c), b[c]);
    fkv_host_dots<KEYS / 2, 16>(ADD, a, b, d);
}
template <int KEYS, bool ADD> FKV_FN void fkv_wg_scores(fkv_shared s, float *d, fkv_u32 q_at, fkv_u32 k_at) {
    fkv_host_scores<KEYS, ADD, false>(s, d, q_at, k_at);
}
/* Computes the same products as fkv_wg_scores() for 64 keys, with operands of type bfloat16 if BF16 is true. */
template <bool BF16, bool ADD> FKV_FN void fkv_wg_scores_as(fkv_shared s, float *d, fkv_u32 q_at, fkv_u32 k_at) {
    fkv_host_scores<64, ADD, BF16>(s, d, q_at, k_at);
}

/* Unpacks a thread's two rows of a 16 x 16 operand tile in registers. `words` are the four words of the tile that the thread
 * holds. */
FKV_FN void fkv_host_held_rows(fkv_u32 lane, const fkv_u32 *words, float (*a)[16]) {
    const fkv_host_exchanged *all = fkv_host_exchange(words, 4);
    for (fkv_u32 r = 0; r < 2; r++)
        for (fkv_u32 k = 0; k < 16; k++) {
            fkv_u32 row = fkv_host_row(lane, (int)(2 * r));
            a[r][k] = fkv_host_f16(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2) & 0xffffu);
        }
}

/* Computes the same products as fkv_wg_scores(), with the operand q in registers. */
template <int KEYS, bool ADD> FKV_FN void fkv_wg_scores_held(fkv_shared s, float *d, const fkv_u32 *q, fkv_u32 k_at) {
    float a[2][16], b[KEYS / 4][16];
    fkv_host_held_rows(s.index % 32, q, a);
    for (int c = 0; c < KEYS / 4; c++) fkv_host_load<false>(s, fkv_host_column_at(s, k_at, c), b[c]);
    fkv_host_dots<KEYS / 2, 16>(ADD, a, b, d);
}

/* Computes d += p . v over 16 keys. p is in registers. v is stored in blocks of 64 channels with 16 rows each. d: the thread's
 * COLS / 2 accumulators. */
template <int KEYS, int COLS> FKV_FN void fkv_wg_values(fkv_shared s, float *d, const fkv_u32 *p, fkv_u32 v_at) {
    float a[2][16], b[COLS / 4][16];
    fkv_host_held_rows(s.index % 32, p, a);
    for (int c = 0; c < COLS / 4; c++) {
        fkv_u32 column = fkv_host_column(s.index % 32, c / 2 * 4 + c % 2);
        fkv_host_load_strided(s, v_at * 16 + column / 64 * (KEYS * 128) + column % 64 * 2, b[c]);
    }
    fkv_host_dots<COLS / 2, 16>(true, a, b, d);
}

/* Computes d = q . k, or d += q . k if ADD is true, over 32 channels, for 64 rows of q and 64 rows of k. q consists of signed
 * bytes if SIGNED is true and of unsigned bytes otherwise. k consists of unsigned bytes. */
template <bool SIGNED, bool ADD> FKV_FN void fkv_wg_bytes(fkv_shared s, int *d, fkv_u32 q_at, fkv_u32 k_at) {
    int a[2][32], b[16][32];
    for (int r = 0; r < 2; r++) fkv_host_load_bytes<SIGNED>(s, fkv_host_row_at(s, q_at, r), a[r]);
    for (int c = 0; c < 16; c++) fkv_host_load_bytes<false>(s, fkv_host_column_at(s, k_at, c), b[c]);
    fkv_host_dots<32, 32>(ADD, a, b, d);
}

/* fkv_wg_begin() makes earlier register writes visible to the products that follow, fkv_wg_commit() ends a group of products, and
 * fkv_wg_wait() waits until at most LEFT groups are pending. */
FKV_FN void fkv_wg_begin() {}
FKV_FN void fkv_wg_commit() {}
template <int LEFT> FKV_FN void fkv_wg_wait() {}
template <int N> FKV_FN void fkv_wg_settle(float *) {}
template <int N> FKV_FN void fkv_wg_settle_bits(fkv_u32 *) {}
template <int N> FKV_FN void fkv_wg_settle_ints(int *) {}
/* Multiplies accumulators by 256 between two products. */
template <int N> FKV_FN void fkv_wg_shift_byte(int *d) {
    for (int i = 0; i < N; i++) d[i] = (int)((fkv_u32)d[i] << 8);
}
template <int N> FKV_FN void fkv_more_registers() {}
template <int N> FKV_FN void fkv_fewer_registers() {}

FKV_FN void fkv_get16(fkv_shared s, fkv_u32 at, fkv_u32 *w) { memcpy(w, s.base + at, 16); }
FKV_FN void fkv_get8(fkv_shared s, fkv_u32 at, fkv_u32 *w) { memcpy(w, s.base + at, 8); }
FKV_FN fkv_u32 fkv_get4(fkv_shared s, fkv_u32 at) { return *(const fkv_u32 *)(s.base + at); }
FKV_FN fkv_u32 fkv_get2(fkv_shared s, fkv_u32 at) { return *(const fkv_u16 *)(s.base + at); }
/* Loads four transposed matrices of 8 x 8 16-bit values. `at` is the position of row lane % 8 of matrix lane / 8. w[j] receives
 * values lane / 4 of rows lane % 4 * 2 and lane % 4 * 2 + 1 of matrix j. */
FKV_FN void fkv_get_transposed(fkv_shared s, fkv_u32 at, fkv_u32 *w) {
    fkv_u32 lane = s.index % 32;
    for (fkv_u32 j = 0; j < 4; j++) {
        fkv_u16 x[2];
        for (fkv_u32 i = 0; i < 2; i++) {
            fkv_u32 from = fkv_shuffle_bits(at, j * 8 + lane % 4 * 2 + i) + lane / 4 * 2;
            memcpy(&x[i], s.base + from, sizeof x[i]);
        }
        w[j] = x[0] | (fkv_u32)x[1] << 16;
    }
}
FKV_FN void fkv_put16(fkv_shared s, fkv_u32 at, fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d) {
    fkv_u32 w[4] = {a, b, c, d};
    memcpy(s.base + at, w, 16);
}
FKV_FN void fkv_put4(fkv_shared s, fkv_u32 at, fkv_u32 x) { *(fkv_u32 *)(s.base + at) = x; }
FKV_FN void fkv_put2(fkv_shared s, fkv_u32 at, fkv_u32 x) { *(fkv_u16 *)(s.base + at) = (fkv_u16)x; }

FKV_FN fkv_host_mbarrier &fkv_host_mbarrier_at(fkv_u32 at) { return fkv_host_thread.block->mbarriers[at / 8 % 32]; }

FKV_FN void fkv_mbarrier_init(fkv_shared, fkv_u32 at, fkv_u32 n) {
    fkv_host_mbarrier &mbarrier = fkv_host_mbarrier_at(at);
    mbarrier.n = n;
    mbarrier.left = n;
    mbarrier.phase = 0;
}
FKV_FN void fkv_mbarriers_ready() {}
FKV_FN void fkv_host_arrive(fkv_host_mbarrier &mbarrier) {
    if (--mbarrier.left > 0) return;
    mbarrier.left = mbarrier.n;
    fkv_host_store_notify(mbarrier.phase, mbarrier.phase ^ 1);
}
FKV_FN void fkv_mbarrier_arrive(fkv_shared, fkv_u32 at) { fkv_host_arrive(fkv_host_mbarrier_at(at)); }
FKV_FN void fkv_mbarrier_arrive_n(fkv_shared s, fkv_u32 at, fkv_u32 n) {
    for (fkv_u32 i = 0; i < n; i++) fkv_mbarrier_arrive(s, at);
}
FKV_FN void fkv_mbarrier_wait(fkv_shared, fkv_u32 at, fkv_u32 phase) {
    fkv_host_wait_change(fkv_host_mbarrier_at(at).phase, phase);
}

/* Bulk copies. Without a sanitizer, they run as late as possible, when all lanes wait, so that a missing wait is noticed. On the
 * device, the mbarrier waits for as many bytes as fkv_bulk_copy_begin() announced, so the copies must have this size. */
static thread_local fkv_u32 fkv_host_announced; /* announced bytes that have not been copied yet */

FKV_FN void fkv_bulk_copy_begin(fkv_shared, fkv_u32, fkv_u32 bytes) { fkv_host_announced = bytes; }
FKV_FN void fkv_host_check_announced() {
    if (fkv_host_announced == 0) return;
    fprintf(stderr, "the size of the bulk copies differs from the announced size by %d bytes\n", (int)fkv_host_announced);
    abort();
}
#ifdef FKV_HOST_THREADS
FKV_FN void fkv_bulk_copy(fkv_shared s, fkv_u32, fkv_u32 at, const fkv_u8 *from, fkv_u32 bytes) {
    fkv_host_announced -= bytes;
    memcpy(s.base + at, from, bytes);
}
FKV_FN void fkv_bulk_copy_end(fkv_shared s, fkv_u32 mbarrier) {
    fkv_host_check_announced();
    fkv_mbarrier_arrive(s, mbarrier);
}
#else
/* A copy, or an arrival at an mbarrier of a block. */
struct fkv_host_late {
    fkv_host_block *block;
    fkv_u32 mbarrier;
    fkv_u8 *to;
    const fkv_u8 *from;
    fkv_u32 bytes;
};
static fkv_host_late fkv_host_copies[4096];
static fkv_u32 fkv_host_n_copies;

FKV_FN void fkv_host_run_copies() {
    for (fkv_u32 i = 0; i < fkv_host_n_copies; i++) {
        const fkv_host_late &late = fkv_host_copies[i];
        if (late.bytes > 0)
            memcpy(late.to, late.from, late.bytes);
        else
            fkv_host_arrive(late.block->mbarriers[late.mbarrier / 8 % 32]);
    }
    fkv_host_n_copies = 0;
}
FKV_FN void fkv_host_add_copy(const fkv_host_late &late) {
    fkv_host_when_idle = fkv_host_run_copies;
    if (fkv_host_n_copies == sizeof fkv_host_copies / sizeof fkv_host_copies[0]) abort();
    fkv_host_copies[fkv_host_n_copies++] = late;
}
FKV_FN void fkv_bulk_copy(fkv_shared s, fkv_u32, fkv_u32 at, const fkv_u8 *from, fkv_u32 bytes) {
    fkv_host_announced -= bytes;
    fkv_host_add_copy({nullptr, 0, s.base + at, from, bytes});
}
FKV_FN void fkv_bulk_copy_end(fkv_shared, fkv_u32 mbarrier) {
    fkv_host_check_announced();
    fkv_host_add_copy({fkv_host_thread.block, mbarrier, nullptr, nullptr, 0});
}
#endif
FKV_FN void fkv_publish() {}

#ifndef FKV_HOST_PROCESSORS
#define FKV_HOST_PROCESSORS 1
#endif
FKV_FN fkv_u32 fkv_processors() { return FKV_HOST_PROCESSORS; }
FKV_FN fkv_u32 fkv_load_acquire(fkv_u32 *word) { return fkv_host_atomic(word); }
FKV_FN fkv_u32 fkv_load_relaxed(fkv_u32 *word) { return fkv_host_atomic(word).load(std::memory_order_relaxed); }
FKV_FN fkv_u32 fkv_exchange_zero(fkv_u32 *word, fkv_u32 x) {
    fkv_u32 before = 0;
    fkv_host_atomic(word).compare_exchange_strong(before, x);
    return before;
}
FKV_FN void fkv_pause() { fkv_host_yield(); }
FKV_FN void fkv_store_release(fkv_u32 *word, fkv_u32 x) { fkv_host_store_notify(fkv_host_atomic(word), x); }
FKV_FN void fkv_wait_at_least(fkv_u32 *word, fkv_u32 least) {
    for (fkv_u32 x = fkv_host_atomic(word); x < least; x = fkv_host_atomic(word)) fkv_host_wait_change(fkv_host_atomic(word), x);
}

FKV_FN void fkv_wait_for_words(bool waits, fkv_u32 *word, fkv_u32 least) {
    if (waits) fkv_wait_at_least(word, least);
    fkv_sync_warp();
}

FKV_FN void fkv_store_release_shared(fkv_shared s, fkv_u32 at, fkv_u32 x) { fkv_store_release((fkv_u32 *)(s.base + at), x); }
template <int NS> FKV_FN void fkv_wait_at_least_shared(fkv_shared s, fkv_u32 at, fkv_u32 least) {
    fkv_wait_at_least((fkv_u32 *)(s.base + at), least);
}

struct fkv_image {
    fkv_u8 *base;
};
FKV_FN void fkv_put16(fkv_image to, fkv_u32 at, fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d) {
    fkv_put16(fkv_shared{to.base, 0, 0}, at, a, b, c, d);
}
FKV_FN void fkv_put4(fkv_image to, fkv_u32 at, fkv_u32 x) { fkv_put4(fkv_shared{to.base, 0, 0}, at, x); }
FKV_FN void fkv_put2(fkv_image to, fkv_u32 at, fkv_u32 x) { fkv_put2(fkv_shared{to.base, 0, 0}, at, x); }
FKV_FN void fkv_publish_image() {}
FKV_FN void fkv_acquire_image() {}
