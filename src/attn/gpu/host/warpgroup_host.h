/* Warpgroups played on the host, in plain loops: what warpgroup_cuda.h's functions mean. A product is done when it is issued,
 * which is one of the orders the device may choose; gates are real, so that a missing one is a race that ThreadSanitizer names.
 */
struct fkv_shared {
    fkv_u8 *base; /* aligned to 1024 bytes */
    fkv_u32 unit; /* places count from it, in units of 16 bytes */
    fkv_u32 index;
};

FKV_FN fkv_shared fkv_shared_make(void *dynamic, fkv_u32 index) {
    return {(fkv_u8 *)(((uintptr_t)dynamic + 1023) / 1024 * 1024), 0, index};
}

FKV_FN fkv_u32 fkv_zero(fkv_shared) { return 0; }
FKV_FN fkv_u32 fkv_uniform(fkv_u32 x) { return x; }

FKV_FN float fkv_host_half(fkv_shared s, fkv_u32 at) {
    at ^= (at / 128 % 8) * 16;
    fkv_u16 bits;
    memcpy(&bits, s.base + at, sizeof bits);
    return fkv_f16_to_f32(bits);
}

/* A thread's sums of a tile of 64 rows: where they lie in the rows of its warp and in the columns. */
FKV_FN fkv_u32 fkv_host_row(fkv_u32 lane, int i) { return lane / 4 + (fkv_u32)i / 2 % 2 * 8; }
FKV_FN fkv_u32 fkv_host_column(fkv_u32 lane, int i) { return (fkv_u32)i / 4 * 8 + lane % 4 * 2 + (fkv_u32)i % 2; }

/* d (+)= q . k over 16 channels: 64 rows of q, KEYS rows of k. d: [KEYS / 2] of the thread's. */
template <int KEYS, bool ADD> FKV_FN void fkv_wg_scores(fkv_shared s, float *d, fkv_u32 q_at, fkv_u32 k_at) {
    fkv_u32 lane = s.index % 32;
    for (int i = 0; i < KEYS / 2; i++) {
        fkv_u32 row = s.index / 32 % 4 * 16 + fkv_host_row(lane, i);
        float sum = ADD ? d[i] : 0.0f;
        for (fkv_u32 k = 0; k < 16; k++)
            sum += fkv_host_half(s, q_at * 16 + row * 128 + k * 2) *
                   fkv_host_half(s, k_at * 16 + fkv_host_column(lane, i) * 128 + k * 2);
        d[i] = sum;
    }
}

/* Element (row of the warp, k) of a 16 x 16 tile that the lanes of a warp hold in four words each. */
FKV_FN float fkv_host_held(const fkv_host_given *all, fkv_u32 row, fkv_u32 k) {
    return fkv_f16_to_f32(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2) & 0xffffu);
}

/* The same with q in registers. */
template <int KEYS, bool ADD> FKV_FN void fkv_wg_scores_held(fkv_shared s, float *d, const fkv_u32 *q, fkv_u32 k_at) {
    const fkv_host_given *all = fkv_host_exchange(q, 4);
    fkv_u32 lane = s.index % 32;
    for (int i = 0; i < KEYS / 2; i++) {
        float sum = ADD ? d[i] : 0.0f;
        for (fkv_u32 k = 0; k < 16; k++)
            sum += fkv_host_held(all, fkv_host_row(lane, i), k) *
                   fkv_host_half(s, k_at * 16 + fkv_host_column(lane, i) * 128 + k * 2);
        d[i] = sum;
    }
}

/* d += p . v over 16 keys: p in registers, v: 16 rows of each block of 64 channels. d: [COLS / 2]. */
template <int KEYS, int COLS> FKV_FN void fkv_wg_values(fkv_shared s, float *d, const fkv_u32 *p, fkv_u32 v_at) {
    const fkv_host_given *all = fkv_host_exchange(p, 4);
    fkv_u32 lane = s.index % 32;
    for (int i = 0; i < COLS / 2; i++) {
        fkv_u32 column = fkv_host_column(lane, i);
        for (fkv_u32 k = 0; k < 16; k++)
            d[i] += fkv_host_held(all, fkv_host_row(lane, i), k) *
                    fkv_host_half(s, v_at * 16 + column / 64 * (KEYS * 128) + k * 128 + column % 64 * 2);
    }
}

/* Before products whose registers were written; behind those that are waited for together; until so many such groups are left. */
FKV_FN void fkv_wg_begin() {}
FKV_FN void fkv_wg_commit() {}
template <int LEFT> FKV_FN void fkv_wg_wait() {}
template <int N> FKV_FN void fkv_wg_settle(float *) {}
template <int N> FKV_FN void fkv_wg_settle_bits(fkv_u32 *) {}
template <int N> FKV_FN void fkv_more_registers() {}
template <int N> FKV_FN void fkv_fewer_registers() {}

FKV_FN void fkv_get16(fkv_shared s, fkv_u32 at, fkv_u32 *w) { memcpy(w, s.base + at, 16); }
FKV_FN void fkv_get8(fkv_shared s, fkv_u32 at, fkv_u32 *w) { memcpy(w, s.base + at, 8); }
FKV_FN fkv_u32 fkv_get4(fkv_shared s, fkv_u32 at) { return *(const fkv_u32 *)(s.base + at); }
FKV_FN fkv_u32 fkv_get2(fkv_shared s, fkv_u32 at) { return *(const fkv_u16 *)(s.base + at); }
FKV_FN void fkv_put16(fkv_shared s, fkv_u32 at, fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d) {
    fkv_u32 w[4] = {a, b, c, d};
    memcpy(s.base + at, w, 16);
}
FKV_FN void fkv_put4(fkv_shared s, fkv_u32 at, fkv_u32 x) { *(fkv_u32 *)(s.base + at) = x; }
FKV_FN void fkv_put2(fkv_shared s, fkv_u32 at, fkv_u32 x) { *(fkv_u16 *)(s.base + at) = (fkv_u16)x; }

/* A gate opens each time that n have arrived, and its phase turns from 0 to 1 and back. Waiting for a phase is waiting for its
 * end; the phase before the first counts as ended. */
struct fkv_host_gate {
    fkv_u32 n = 0;
    fkv_host_word left{0};
    fkv_host_word phase{0};
};
static fkv_host_gate fkv_host_gates[32]; /* blocks are run one after the other */
FKV_FN fkv_host_gate &fkv_host_gate_at(fkv_u32 at) { return fkv_host_gates[at / 8 % 32]; }

FKV_FN void fkv_gate_make(fkv_shared, fkv_u32 at, fkv_u32 n) {
    fkv_host_gate &gate = fkv_host_gate_at(at);
    gate.n = n;
    gate.left = n;
    gate.phase = 0;
}
FKV_FN void fkv_gates_made() {}
FKV_FN void fkv_gate_arrive(fkv_shared, fkv_u32 at) {
    fkv_host_gate &gate = fkv_host_gate_at(at);
    if (--gate.left > 0) return;
    gate.left = gate.n;
    fkv_host_turn(gate.phase, gate.phase ^ 1);
}
FKV_FN void fkv_gate_arrive_often(fkv_shared s, fkv_u32 at, fkv_u32 n) {
    for (fkv_u32 i = 0; i < n; i++) fkv_gate_arrive(s, at);
}
FKV_FN void fkv_gate_wait(fkv_shared, fkv_u32 at, fkv_u32 phase) { fkv_host_await(fkv_host_gate_at(at).phase, phase); }

FKV_FN void fkv_bring_begin(fkv_shared, fkv_u32, fkv_u32) {}
FKV_FN void fkv_bring(fkv_shared s, fkv_u32, fkv_u32 at, const fkv_u8 *from, fkv_u32 bytes) { memcpy(s.base + at, from, bytes); }
FKV_FN void fkv_bring_end(fkv_shared s, fkv_u32 gate) { fkv_gate_arrive(s, gate); }
FKV_FN void fkv_publish() {}

FKV_FN fkv_u32 fkv_processors() { return 1; }
FKV_FN fkv_host_word &fkv_host_number(fkv_u32 *word) { return *reinterpret_cast<fkv_host_word *>(word); }
FKV_FN fkv_u32 fkv_take_number(fkv_u32 *word) { return fkv_host_number(word).fetch_add(1); }
FKV_FN void fkv_tell_number(fkv_u32 *word, fkv_u32 x) { fkv_host_turn(fkv_host_number(word), x); }
FKV_FN void fkv_await_number(fkv_u32 *word, fkv_u32 least) {
    for (fkv_u32 x = fkv_host_number(word); x < least; x = fkv_host_number(word)) fkv_host_await(fkv_host_number(word), x);
}

FKV_FN void fkv_tell_near(fkv_shared s, fkv_u32 at, fkv_u32 x) { fkv_tell_number((fkv_u32 *)(s.base + at), x); }
FKV_FN void fkv_await_near(fkv_shared s, fkv_u32 at, fkv_u32 least) { fkv_await_number((fkv_u32 *)(s.base + at), least); }

struct fkv_image {
    fkv_u8 *base;
};
FKV_FN void fkv_put16(fkv_image to, fkv_u32 at, fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d) {
    fkv_put16(fkv_shared{to.base, 0, 0}, at, a, b, c, d);
}
FKV_FN void fkv_put4(fkv_image to, fkv_u32 at, fkv_u32 x) { fkv_put4(fkv_shared{to.base, 0, 0}, at, x); }
FKV_FN void fkv_put2(fkv_image to, fkv_u32 at, fkv_u32 x) { fkv_put2(fkv_shared{to.base, 0, 0}, at, x); }
FKV_FN void fkv_publish_image() {}
FKV_FN void fkv_see_image() {}
