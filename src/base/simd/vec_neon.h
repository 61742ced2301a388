/* Vector primitives for NEON (aarch64), with 4 floats per vector. kernels_body.h and vec_avx512.h document the functions. */
#ifndef FKV_VEC_NEON_H
#define FKV_VEC_NEON_H

#include "../base.h"

#include <arm_neon.h>

typedef float32x4_t vf;
enum { VL = 4, UNIT_VECS = 4, PREFILL_ROWS = 6, BLOCK_TOKENS = 4, CHUNK_UNITS = 1, PRODUCT_TOKENS = 2 };

FKV_INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
FKV_INLINE void vf_store(float *p, vf a) { vst1q_f32(p, a); }
FKV_INLINE vf vf_set(float x) { return vdupq_n_f32(x); }
FKV_INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
FKV_INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
FKV_INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
FKV_INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
FKV_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
FKV_INLINE vf vf_min(vf a, vf b) { return vminq_f32(a, b); }
FKV_INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
FKV_INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
FKV_INLINE vf vf_not_nan(vf a) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vceqq_f32(a, a))); }
FKV_INLINE vf vf_zero_below(vf x, vf limit, vf y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
}
FKV_INLINE vf vf_if_below(vf x, vf limit, vf y, vf z) { return vbslq_f32(vcltq_f32(x, limit), y, z); }
FKV_INLINE vf vf_times_pow2(vf a, vf n) {
    return vf_mul(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
FKV_INLINE float vf_reduce_add(vf a) { return vaddvq_f32(a); }
FKV_INLINE float vf_reduce_max(vf a) { return vmaxvq_f32(a); }
FKV_INLINE float vf_reduce_min(vf a) { return vminvq_f32(a); }

FKV_INLINE void vf_sums(const vf a[BLOCK_TOKENS], float *out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])));
}

FKV_INLINE void vf_load_f16(const uint8_t *p, vf out[UNIT_VECS]) {
    for (int i = 0; i < UNIT_VECS; i++) out[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
}
FKV_INLINE void vf_load_bf16(const uint8_t *p, vf out[UNIT_VECS]) {
    for (int i = 0; i < UNIT_VECS; i++) out[i] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16));
}

FKV_INLINE void vf_load_bits(const uint8_t *p, int shift, uint32_t mask, vf out[UNIT_VECS]) {
    for (int i = 0; i < UNIT_VECS; i++) {
        uint32x4_t dwords = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)), vdupq_n_s32(-shift));
        out[i] = vcvtq_f32_u32(vandq_u32(dwords, vdupq_n_u32(mask)));
    }
}

static const float VF_BYTE_UNIT = 0x1p-24f;
FKV_INLINE void vf_load_byte(const uint8_t *p, int byte, vf out[UNIT_VECS]) {
    /* index 0xff makes the look-up produce a zero byte */
    static const uint32_t lane[4] = {0x00ffffff, 0x04ffffff, 0x08ffffff, 0x0cffffff};
    uint8x16_t to_high = vreinterpretq_u8_u32(vaddq_u32(vld1q_u32(lane), vdupq_n_u32((uint32_t)byte << 24)));
    for (int i = 0; i < UNIT_VECS; i++) out[i] = vcvtq_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(p + 16 * i), to_high)));
}

/* Codebook of 16 bfloat16 values, stored as separate low and high bytes. */
typedef struct vf_book16 {
    uint8x16_t low;
    uint8x16_t high;
} vf_book16;

FKV_INLINE vf_book16 vf_book16_make(const float number[16]) {
    uint8x16x4_t bytes = vld4q_u8((const uint8_t *)number);
    return (vf_book16){bytes.val[2], bytes.val[3]};
}

FKV_INLINE void vf_look_up16(const vf_book16 *book, const uint8_t *p, vf out[4][UNIT_VECS]) {
    static const uint8_t pairs[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
    const uint32x4_t upper = vdupq_n_u32(0xffff0000);
    for (int i = 0; i < UNIT_VECS; i++) {
        uint8x16_t codes = vqtbl1q_u8(vld1q_u8(p + 16 * i), vld1q_u8(pairs));
        uint8x16x2_t halves = vzipq_u8(vqtbl1q_u8(book->low, codes), vqtbl1q_u8(book->high, codes));
        uint32x4_t first = vreinterpretq_u32_u8(halves.val[0]); /* codebook values for bytes 0 and 1 of each dword */
        uint32x4_t second = vreinterpretq_u32_u8(halves.val[1]);
        out[0][i] = vreinterpretq_f32_u32(vshlq_n_u32(first, 16));
        out[1][i] = vreinterpretq_f32_u32(vandq_u32(first, upper));
        out[2][i] = vreinterpretq_f32_u32(vshlq_n_u32(second, 16));
        out[3][i] = vreinterpretq_f32_u32(vandq_u32(second, upper));
    }
}

/* Replaces each of 64 bytes, all below 16, with table[byte]. */
FKV_INLINE void vb_look_up(const uint8_t table[16], uint8_t *bytes) {
    uint8x16_t all = vld1q_u8(table);
    for (int i = 0; i < 4; i++) vst1q_u8(bytes + 16 * i, vqtbl1q_u8(all, vld1q_u8(bytes + 16 * i)));
}

FKV_INLINE void vf_look_up(const uint8_t table[16], const uint8_t *p, int shift, uint8_t out[64]) {
    uint8x16_t bytes = vld1q_u8(table);
    for (int i = 0; i < 4; i++) {
        uint8x16_t codes = vandq_u8(vshlq_u8(vld1q_u8(p + 16 * i), vdupq_n_s8((int8_t)-shift)), vdupq_n_u8(15));
        vst1q_u8(out + 16 * i, vqtbl1q_u8(bytes, codes));
    }
}

typedef struct vf_affine {
    vf scale;
    vf bias;
} vf_affine;

FKV_INLINE vf_affine vf_affine_make(int bits, float scale, float bias) {
    (void)bits;
    return (vf_affine){vf_set(scale), vf_set(bias)};
}

/* Unpacks 16 codes of 4 or 2 bits to bytes. */
FKV_INLINE uint8x16_t neon_codes(int bits, const uint8_t *codes) {
    if (bits == 4) {
        uint8x8_t b = vld1_u8(codes);
        uint8x8x2_t z = vzip_u8(vand_u8(b, vdup_n_u8(15)), vshr_n_u8(b, 4));
        return vcombine_u8(z.val[0], z.val[1]);
    }
    static const uint8_t spread[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    static const int8_t shift[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
    uint32_t word;
    memcpy(&word, codes, sizeof word);
    uint8x16_t c = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(word)), vld1q_u8(spread));
    return vandq_u8(vshlq_u8(c, vld1q_s8(shift)), vdupq_n_u8(3));
}

FKV_INLINE void vf_decode(int bits, const uint8_t *codes, vf_affine a, vf out[UNIT_VECS]) {
    uint8x16_t c = bits == 8 ? vld1q_u8(codes) : neon_codes(bits, codes);
    uint16x8_t lo = vmovl_u8(vget_low_u8(c));
    uint16x8_t hi = vmovl_u8(vget_high_u8(c));
    out[0] = vf_fma(vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), a.scale, a.bias);
    out[1] = vf_fma(vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))), a.scale, a.bias);
    out[2] = vf_fma(vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), a.scale, a.bias);
    out[3] = vf_fma(vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi))), a.scale, a.bias);
}

FKV_INLINE vf_affine vf_book_make(int bits, const int8_t value[16], float scale) {
    (void)bits, (void)value;
    return (vf_affine){vf_set(scale), vf_set(0.0f)};
}

FKV_INLINE void vf_book(int bits, const int8_t value[16], const uint8_t *codes, const uint8_t *plane, vf_affine a,
                        vf out[UNIT_VECS]) {
    uint8x16_t c = neon_codes(bits, codes);
    if (bits == 3) {
        static const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        uint8x16_t high = vcombine_u8(vdup_n_u8(plane[0]), vdup_n_u8(plane[1]));
        c = vorrq_u8(c, vandq_u8(vtstq_u8(high, vld1q_u8(bit)), vdupq_n_u8(4)));
    }
    int8x16_t x = vqtbl1q_s8(vld1q_s8(value), c);
    int16x8_t lo = vmovl_s8(vget_low_s8(x));
    int16x8_t hi = vmovl_s8(vget_high_s8(x));
    out[0] = vf_mul(vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), a.scale);
    out[1] = vf_mul(vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))), a.scale);
    out[2] = vf_mul(vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), a.scale);
    out[3] = vf_mul(vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi))), a.scale);
}

FKV_INLINE void vf_store_u8(const vf a[UNIT_VECS], uint8_t *p) {
    uint16x8_t lo = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(a[0])), vmovn_u32(vcvtnq_u32_f32(a[1])));
    uint16x8_t hi = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(a[2])), vmovn_u32(vcvtnq_u32_f32(a[3])));
    vst1q_u8(p, vcombine_u8(vmovn_u16(lo), vmovn_u16(hi)));
}

#endif
