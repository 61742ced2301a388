/* Vector primitives in portable C, with 4 floats per vector, for machines without vector kernels. kernels_body.h and vec_avx512.h
 * document the functions. */
#ifndef FKV_VEC_SCALAR_H
#define FKV_VEC_SCALAR_H

#include "../float16.h"

#include <math.h>

typedef struct vf {
    float lane[4];
} vf;
enum { VL = 4, UNIT_VECS = 4, PREFILL_ROWS = 2, BLOCK_TOKENS = 1, CHUNK_UNITS = 1, PRODUCT_TOKENS = 1 };

#define EACH_LANE(expr)                                                                                                          \
    do {                                                                                                                         \
        vf r_;                                                                                                                   \
        for (int i = 0; i < VL; i++) r_.lane[i] = (expr);                                                                        \
        return r_;                                                                                                               \
    } while (0)

FKV_INLINE vf vf_load(const float *p) { EACH_LANE(p[i]); }
FKV_INLINE void vf_store(float *p, vf a) { memcpy(p, a.lane, sizeof a.lane); }
FKV_INLINE vf vf_set(float x) { EACH_LANE(x); }
FKV_INLINE vf vf_add(vf a, vf b) { EACH_LANE(a.lane[i] + b.lane[i]); }
FKV_INLINE vf vf_sub(vf a, vf b) { EACH_LANE(a.lane[i] - b.lane[i]); }
FKV_INLINE vf vf_mul(vf a, vf b) { EACH_LANE(a.lane[i] * b.lane[i]); }
FKV_INLINE vf vf_div(vf a, vf b) { EACH_LANE(a.lane[i] / b.lane[i]); }
FKV_INLINE vf vf_fma(vf a, vf b, vf c) { EACH_LANE(a.lane[i] * b.lane[i] + c.lane[i]); }
FKV_INLINE vf vf_min(vf a, vf b) { EACH_LANE(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
FKV_INLINE vf vf_max(vf a, vf b) { EACH_LANE(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
FKV_INLINE vf vf_round(vf a) { EACH_LANE(rintf(a.lane[i])); }
FKV_INLINE vf vf_not_nan(vf a) { EACH_LANE(a.lane[i] == a.lane[i] ? a.lane[i] : 0.0f); }
FKV_INLINE vf vf_zero_below(vf x, vf limit, vf y) { EACH_LANE(x.lane[i] < limit.lane[i] ? 0.0f : y.lane[i]); }
FKV_INLINE vf vf_if_below(vf x, vf limit, vf y, vf z) { EACH_LANE(x.lane[i] < limit.lane[i] ? y.lane[i] : z.lane[i]); }
/* callers ignore the result if the input is NaN */
FKV_INLINE int32_t clamp_exponent(float n) { return n >= -126.0f && n <= 127.0f ? (int32_t)n : 0; }
FKV_INLINE vf vf_times_pow2(vf a, vf n) {
    EACH_LANE(a.lane[i] * fkv_float_of((uint32_t)(clamp_exponent(n.lane[i]) + 127) << 23));
}
FKV_INLINE float vf_reduce_add(vf a) { return (a.lane[0] + a.lane[1]) + (a.lane[2] + a.lane[3]); }
FKV_INLINE float vf_reduce_max(vf a) { return fmaxf(fmaxf(a.lane[0], a.lane[1]), fmaxf(a.lane[2], a.lane[3])); }
FKV_INLINE float vf_reduce_min(vf a) { return fminf(fminf(a.lane[0], a.lane[1]), fminf(a.lane[2], a.lane[3])); }

FKV_INLINE void vf_sums(const vf a[BLOCK_TOKENS], float *out) { out[0] = vf_reduce_add(a[0]); }

FKV_INLINE uint16_t load_half_bits(const uint8_t *p, int i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, sizeof h);
    return h;
}
FKV_INLINE void vf_load_f16(const uint8_t *p, vf out[UNIT_VECS]) {
    for (int i = 0; i < 16; i++) out[i / VL].lane[i % VL] = fkv_f16_to_f32(load_half_bits(p, i));
}
FKV_INLINE void vf_load_bf16(const uint8_t *p, vf out[UNIT_VECS]) {
    for (int i = 0; i < 16; i++) out[i / VL].lane[i % VL] = fkv_bf16_to_f32(load_half_bits(p, i));
}

FKV_INLINE void vf_load_bits(const uint8_t *p, int shift, uint32_t mask, vf out[UNIT_VECS]) {
    for (int i = 0; i < 16; i++) {
        uint32_t dword;
        memcpy(&dword, p + 4 * i, sizeof dword);
        out[i / VL].lane[i % VL] = (float)(dword >> shift & mask);
    }
}

static const float VF_BYTE_UNIT = 1.0f;
FKV_INLINE void vf_load_byte(const uint8_t *p, int byte, vf out[UNIT_VECS]) {
    for (int i = 0; i < 16; i++) out[i / VL].lane[i % VL] = (float)(int8_t)p[4 * i + byte];
}

typedef struct vf_book16 {
    float number[16];
} vf_book16;

FKV_INLINE vf_book16 vf_book16_make(const float number[16]) {
    vf_book16 book;
    memcpy(book.number, number, sizeof book.number);
    return book;
}

FKV_INLINE void vf_look_up16(const vf_book16 *book, const uint8_t *p, vf out[4][UNIT_VECS]) {
    for (int i = 0; i < 64; i++) out[i % 4][i / 4 / VL].lane[i / 4 % VL] = book->number[p[i] & 15];
}

/* Replaces each of 64 bytes, all below 16, with table[byte]. */
FKV_INLINE void vb_look_up(const uint8_t table[16], uint8_t *bytes) {
    for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i] & 15];
}

FKV_INLINE void vf_look_up(const uint8_t table[16], const uint8_t *p, int shift, uint8_t out[64]) {
    for (int i = 0; i < 64; i++) out[i] = table[p[i] >> shift & 15];
}

typedef struct vf_affine {
    float scale;
    float bias;
} vf_affine;

FKV_INLINE vf_affine vf_affine_make(int bits, float scale, float bias) {
    (void)bits;
    return (vf_affine){scale, bias};
}

FKV_INLINE void vf_decode(int bits, const uint8_t *codes, vf_affine a, vf out[UNIT_VECS]) {
    for (int i = 0; i < 16; i++) {
        int code = codes[i * bits / 8] >> (i * bits % 8) & ((1 << bits) - 1);
        out[i / VL].lane[i % VL] = a.scale * (float)code + a.bias;
    }
}

FKV_INLINE vf_affine vf_book_make(int bits, const int8_t value[16], float scale) {
    (void)bits, (void)value;
    return (vf_affine){scale, 0.0f};
}

FKV_INLINE void vf_book(int bits, const int8_t value[16], const uint8_t *codes, const uint8_t *plane, vf_affine a,
                        vf out[UNIT_VECS]) {
    int low = bits == 3 ? 2 : bits;
    for (int i = 0; i < 16; i++) {
        int code = codes[i * low / 8] >> (i * low % 8) & ((1 << low) - 1);
        if (bits == 3) code |= (plane[i / 8] >> i % 8 & 1) << 2;
        out[i / VL].lane[i % VL] = a.scale * (float)value[code];
    }
}

FKV_INLINE void vf_store_u8(const vf a[UNIT_VECS], uint8_t *p) {
    for (int i = 0; i < 16; i++) p[i] = (uint8_t)a[i / VL].lane[i % VL];
}

#endif
