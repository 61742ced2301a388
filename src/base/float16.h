/* Conversions between 16-bit floats and float. They round to nearest even and give identical results on all platforms. They work
 * on bit patterns, because gcc 12 cannot vectorize _Float16 on aarch64.
 */
#ifndef FKV_FLOAT16_H
#define FKV_FLOAT16_H

#include "base.h"

FKV_INLINE uint32_t fkv_bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

FKV_INLINE float fkv_float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

FKV_INLINE float fkv_bf16_to_f32(uint16_t h) { return fkv_float_of((uint32_t)h << 16); }

FKV_INLINE uint16_t fkv_f32_to_bf16(float x) {
    uint32_t u = fkv_bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x0040u); /* keep NaN quiet */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

FKV_INLINE float fkv_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return fkv_float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    /* one exact multiplication corrects the exponent bias and normalizes denormals */
    float magnitude = fkv_float_of(rest << 13) * 0x1p112f;
    return fkv_float_of(sign | fkv_bits_of(magnitude));
}

FKV_INLINE uint16_t fkv_f32_to_f16(float x) {
    uint32_t u = fkv_bits_of(x);
    uint32_t sign = u >> 16 & 0x8000u;
    uint32_t rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);  /* NaN */
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* overflows to infinity */
    if (rest < 0x38800000u)                                     /* denormal: the addition rounds to a multiple of 2^-24 */
        return (uint16_t)(sign | (fkv_bits_of(fkv_float_of(rest) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13));
}

/* Converts an 8-bit E4M3 float: 1 sign bit, 4 exponent bits, 3 mantissa bits, no infinities. */
FKV_INLINE float fkv_e4m3_to_f32(uint8_t byte) {
    if ((byte & 0x7fu) == 0x7fu) return fkv_float_of(0x7fc00000u);
    float magnitude = fkv_float_of((byte & 0x7fu) << 20) * 0x1p120f;
    return (byte & 0x80u) != 0 ? -magnitude : magnitude;
}

FKV_INLINE float fkv_half_to_f32(fkv_type type, uint16_t h) { return type == FKV_BF16 ? fkv_bf16_to_f32(h) : fkv_f16_to_f32(h); }
FKV_INLINE uint16_t fkv_f32_to_half(fkv_type type, float x) { return type == FKV_BF16 ? fkv_f32_to_bf16(x) : fkv_f32_to_f16(x); }

FKV_INLINE size_t fkv_type_bytes(fkv_type type) { return type == FKV_F32 ? 4 : 2; }

/* Store and load element i of an unaligned array of 16-bit floats. */
FKV_INLINE void fkv_store_half(uint8_t *bytes, uint32_t i, uint16_t half) { memcpy(bytes + 2 * (size_t)i, &half, sizeof half); }

FKV_INLINE uint16_t fkv_load_half(const uint8_t *bytes, uint32_t i) {
    uint16_t half;
    memcpy(&half, bytes + 2 * (size_t)i, sizeof half);
    return half;
}

/* Convert n values between a row type and float. */
FKV_INTERNAL void fkv_rows_to_f32(fkv_type type, const void *rows, float *out, size_t n);
FKV_INTERNAL void fkv_rows_from_f32(fkv_type type, const float *in, void *rows, size_t n);

#endif
