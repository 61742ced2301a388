/* Converts rows of 16-bit or 32-bit values to float and back.
 *
 * This file contains the loops over rows; float16.h converts single values. Nothing is clamped: a float that is too large becomes
 * an infinity and NaN stays NaN. codec.c clamps values before they are stored in pages.
 *
 * Input and output must not overlap and must be aligned to their element type.
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
