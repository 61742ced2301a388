/* Rows of numbers between their 16-bit or 32-bit type and float.
 *
 * Owns the loops; the conversion of one number is in float16.h. Nothing is clamped here: a float too large for the type becomes
 * an infinity, and a NaN stays one. What pages may hold is the business of codec.c.
 *
 * Input and output do not overlap. Rows are aligned as their type asks.
 */
#include "float16.h"

void fkv_rows_to_f32(fkv_type type, const void *rows, float *out, size_t n) {
    const uint16_t *half = (const uint16_t *)rows;
    switch (type) {
    case FKV_F32: memcpy(out, rows, n * sizeof *out); break;
    case FKV_F16:
        for (size_t i = 0; i < n; i++) out[i] = fkv_f16_to_f32(half[i]);
        break;
    case FKV_BF16:
        for (size_t i = 0; i < n; i++) out[i] = fkv_bf16_to_f32(half[i]);
        break;
    }
}

void fkv_rows_from_f32(fkv_type type, const float *in, void *rows, size_t n) {
    uint16_t *half = (uint16_t *)rows;
    switch (type) {
    case FKV_F32: memcpy(rows, in, n * sizeof *in); break;
    case FKV_F16:
        for (size_t i = 0; i < n; i++) half[i] = fkv_f32_to_f16(in[i]);
        break;
    case FKV_BF16:
        for (size_t i = 0; i < n; i++) half[i] = fkv_f32_to_bf16(in[i]);
        break;
    }
}
