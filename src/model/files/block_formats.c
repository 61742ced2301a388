/* Unpacking of ggml's block formats, except for those in grid_blocks.c; see block_formats.h.
 *
 *   Q4_0   32 values: f16 d, 16 bytes; byte i holds value i (low nibble) and value i + 16 (high nibble).   d * (q - 8)
 *   Q4_1   32 values: f16 d, f16 m, nibbles as in Q4_0.                                                    d * q + m
 *   Q5_0   32 values: f16 d, 32 fifth bits, nibbles as in Q4_0.                                            d * (q - 16)
 *   Q5_1   32 values: f16 d, f16 m, 32 fifth bits, nibbles as in Q4_0.                                     d * q + m
 *   Q8_0   32 values: f16 d, 32 signed bytes.                                                              d * q
 *   Q4_K   256 values in 8 groups: f16 d, f16 dmin, 6-bit scales and minima in 12 bytes, 128 bytes of nibbles; each 32 bytes hold
 *          one group in the low nibbles and the next in the high nibbles.                     d * scale * q - dmin * min
 *   Q5_K   Q4_K with 32 bytes of fifth bits before the nibbles; bit g of byte i belongs to value i of group g.
 *   Q2_K   256 values in 16 groups: 16 bytes (scale low, minimum high), 64 bytes of 2-bit codes, f16 d, f16 dmin. A byte holds
 *          four values that are 32 apart.                                                     d * scale * q - dmin * min
 *   Q3_K   32 bytes of third bits (as in Q5_K), 2-bit codes as in Q2_K, 16 6-bit scales in 12 bytes, f16 d.
 *                                                                                             d * (scale - 32) * (q - 4)
 *   Q6_K   256 values in 16 groups: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, f16 d.
 *                                                                                             d * scale * (q - 32)
 *   TQ2_0  256 values: 2-bit codes as in Q2_K, f16 d.                                         d * (q - 1)
 *   TQ1_0  48 bytes of five base-3 digits each, 4 bytes of four digits, f16 d.                d * (q - 1)
 *
 * Table formats, with nibbles as in Q4_0:
 *
 *   IQ4_NL  32 values: f16 d, nibbles.                                                        d * table[q]
 *   IQ4_XS  256 values in 8 groups: f16 d, 8 high bit pairs and 8 low nibbles of scales, nibbles.
 *                                                                                             d * (scale - 32) * table[q]
 *   MXFP4   32 values: exponent e, nibbles.                                                   2 ^ (e - 128) * table[q]
 *   NVFP4   64 values in 4 groups: 4 unsigned E4M3 scales, nibbles.                           scale / 2 * table[q]
 *
 * The unpacked codes are the stored integers q. The signed integers of Q8_0 are increased by 128, so that codes are unsigned.
 */
#include "block_formats.h"

#include "../../base/float16.h"
#include "grid_blocks.h"

#include <math.h>

static float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return fkv_f16_to_f32(half);
}

/* ---- affine ---- */

static void unpack_nibbles(const uint8_t *bytes, uint32_t n, uint8_t *low, uint8_t *high) {
    for (uint32_t i = 0; i < n; i++) {
        low[i] = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
}

static void unpack_q4_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = -8 * scales[0];
    unpack_nibbles(block + 2, 16, codes, codes + 16);
}

static void unpack_q4_1(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = half_at(block + 2);
    unpack_nibbles(block + 4, 16, codes, codes + 16);
}

/* Unpacks 32 5-bit codes, which are stored as 32 high bits followed by 32 nibbles. */
static void unpack_fives(const uint8_t *bytes, uint8_t *codes) {
    uint32_t fifth;
    memcpy(&fifth, bytes, sizeof fifth);
    unpack_nibbles(bytes + 4, 16, codes, codes + 16);
    for (uint32_t i = 0; i < 32; i++) codes[i] = (uint8_t)(codes[i] | (fifth >> i & 1) << 4);
}

static void unpack_q5_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = -16 * scales[0];
    unpack_fives(block + 2, codes);
}

static void unpack_q5_1(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = half_at(block + 2);
    unpack_fives(block + 4, codes);
}

static void unpack_q8_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = -128 * scales[0];
    for (uint32_t i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;
}

/* Unpacks the 6-bit scales and minima of Q4_K and Q5_K, which are packed into 12 bytes. The first four scales are the low 6 bits
 * of bytes 0 to 3, and the first four minima are the low 6 bits of bytes 4 to 7. The last four scales and minima have their low 4
 * bits in bytes 8 to 11, and their high 2 bits in the top 2 bits of bytes 0 to 7. */
static void unpack_k_scales(const uint8_t *block, float *scales, float *biases) {
    const float d = half_at(block);
    const float d_min = half_at(block + 2);
    const uint8_t *packed = block + 4;
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t scale = g < 4 ? packed[g] & 63u : (packed[g + 4] & 15u) | (uint32_t)(packed[g - 4] >> 6) << 4;
        const uint32_t min = g < 4 ? packed[g + 4] & 63u : (uint32_t)(packed[g + 4] >> 4) | (uint32_t)(packed[g] >> 6) << 4;
        scales[g] = d * (float)scale;
        biases[g] = -(d_min * (float)min);
    }
}

static void unpack_q4_k(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    unpack_k_scales(block, scales, biases);
    for (uint32_t pair = 0; pair < 4; pair++)
        unpack_nibbles(block + 16 + (size_t)32 * pair, 32, codes + (size_t)64 * pair, codes + (size_t)64 * pair + 32);
}

static void unpack_q5_k(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    unpack_k_scales(block, scales, biases);
    for (uint32_t pair = 0; pair < 4; pair++)
        unpack_nibbles(block + 48 + (size_t)32 * pair, 32, codes + (size_t)64 * pair, codes + (size_t)64 * pair + 32);
    for (uint32_t i = 0; i < 256; i++) codes[i] = (uint8_t)(codes[i] | (block[16 + i % 32] >> i / 32 & 1) << 4);
}

/* Unpacks 64 bytes of four 2-bit codes each. The four codes of a byte belong to values whose indices are 32 apart. */
static void unpack_pairs(const uint8_t *bytes, uint8_t *codes) {
    for (uint32_t i = 0; i < 256; i++) codes[i] = bytes[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
}

static void unpack_q2_k(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = half_at(block + 80);
    const float d_min = half_at(block + 82);
    for (uint32_t g = 0; g < 16; g++) {
        scales[g] = d * (float)(block[g] & 15);
        biases[g] = -(d_min * (float)(block[g] >> 4));
    }
    unpack_pairs(block + 16, codes);
}

static void unpack_q3_k(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = half_at(block + 108);
    const uint8_t *packed = block + 96; /* scales: 8 bytes, each with the low nibbles of scales g and g + 8, then 4 bytes, each
                                           with the high bit pairs of four scales */
    for (uint32_t g = 0; g < 16; g++) {
        const uint32_t scale = ((uint32_t)packed[g % 8] >> g / 8 * 4 & 15) | ((uint32_t)packed[8 + g % 4] >> g / 4 * 2 & 3) << 4;
        scales[g] = d * ((float)scale - 32);
        biases[g] = -4 * scales[g];
    }
    unpack_pairs(block + 32, codes);
    for (uint32_t i = 0; i < 256; i++) codes[i] = (uint8_t)(codes[i] | (block[i % 32] >> i / 32 & 1) << 2);
}

static void unpack_q6_k(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = half_at(block + 208);
    for (uint32_t g = 0; g < 16; g++) {
        scales[g] = d * (float)(int8_t)block[192 + g];
        biases[g] = -32 * scales[g];
    }
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *low = block + (size_t)64 * half;
        const uint8_t *pairs = block + 128 + (size_t)32 * half;
        uint8_t *out = codes + (size_t)128 * half;
        unpack_nibbles(low, 64, out, out + 64);
        for (uint32_t quarter = 0; quarter < 4; quarter++)
            for (uint32_t i = 0; i < 32; i++)
                out[32 * quarter + i] = (uint8_t)(out[32 * quarter + i] | (pairs[i] >> (2 * quarter) & 3) << 4);
    }
}

static void ternary_scales(const uint8_t *half, float *scales, float *biases) {
    for (uint32_t g = 0; g < 8; g++) {
        scales[g] = half_at(half);
        biases[g] = -scales[g];
    }
}

static void unpack_tq2_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    ternary_scales(block + 64, scales, biases);
    unpack_pairs(block, codes);
}

/* Unpacks n bytes, each of which encodes n_digits base-3 digits: the leading base-3 digits of the fraction b / 256, where b is
 * the byte. Writes the first digits of all bytes, then the second digits, and so on. */
static uint8_t *unpack_ternary_digits(const uint8_t *bytes, uint32_t n, uint32_t n_digits, uint8_t *codes) {
    for (uint32_t digit = 0, power = 1; digit < n_digits; digit++, power *= 3)
        for (uint32_t i = 0; i < n; i++) *codes++ = (uint8_t)((bytes[i] * power & 255) * 3 >> 8);
    return codes;
}

static void unpack_tq1_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    ternary_scales(block + 52, scales, biases);
    codes = unpack_ternary_digits(block, 32, 5, codes);
    codes = unpack_ternary_digits(block + 32, 16, 5, codes);
    (void)unpack_ternary_digits(block + 48, 4, 4, codes);
}

/* ---- table formats ---- */

static const int8_t TABLE_IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t FKV_TABLE_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void unpack_iq4_nl(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = 0;
    unpack_nibbles(block + 2, 16, codes, codes + 16);
}

static void unpack_iq4_xs(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = half_at(block);
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t upper = (uint32_t)block[2 + g / 4] >> g % 4 * 2 & 3;
        const uint32_t scale = ((uint32_t)block[4 + g / 2] >> g % 2 * 4 & 15) | upper << 4;
        scales[g] = d * ((float)scale - 32);
        biases[g] = 0;
        unpack_nibbles(block + 8 + (size_t)16 * g, 16, codes + (size_t)32 * g, codes + (size_t)32 * g + 16);
    }
}

static void unpack_mxfp4(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = ldexpf(1, block[0] - 128);
    biases[0] = 0;
    unpack_nibbles(block + 1, 16, codes, codes + 16);
}

static void unpack_nvfp4(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    for (uint32_t g = 0; g < 4; g++) {
        /* the multiplication by 2^120 corrects the exponent bias; 0x7f is NaN in E4M3, but ggml treats it as 0 */
        const float scale = fkv_float_of((block[g] & 0x7fu) << 20) * 0x1p120f;
        scales[g] = block[g] == 0x7f ? 0 : 0.5f * scale;
        biases[g] = 0;
        unpack_nibbles(block + 4 + (size_t)8 * g, 8, codes + (size_t)16 * g, codes + (size_t)16 * g + 8);
    }
}

/* ---- format table ---- */

static const fkv_block_format FORMATS[] = {
    [FKV_TENSOR_F32] = {NULL, FKV_MATRIX_F32, NULL},
    [FKV_TENSOR_F16] = {NULL, FKV_MATRIX_F16, NULL},
    [FKV_TENSOR_BF16] = {NULL, FKV_MATRIX_BF16, NULL},
    [FKV_TENSOR_Q4_0] = {unpack_q4_0, FKV_MATRIX_CENTERED4, NULL},
    [FKV_TENSOR_Q4_1] = {unpack_q4_1, FKV_MATRIX_AFFINE4, NULL},
    [FKV_TENSOR_Q5_0] = {unpack_q5_0, FKV_MATRIX_CENTERED5, NULL},
    [FKV_TENSOR_Q8_0] = {unpack_q8_0, FKV_MATRIX_CENTERED8, NULL},
    [FKV_TENSOR_Q4_K] = {unpack_q4_k, FKV_MATRIX_AFFINE4, NULL},
    [FKV_TENSOR_Q6_K] = {unpack_q6_k, FKV_MATRIX_CENTERED6_16, NULL},
    [FKV_TENSOR_Q5_1] = {unpack_q5_1, FKV_MATRIX_AFFINE5, NULL},
    [FKV_TENSOR_Q2_K] = {unpack_q2_k, FKV_MATRIX_AFFINE2_16, NULL},
    [FKV_TENSOR_Q3_K] = {unpack_q3_k, FKV_MATRIX_CENTERED3_16, NULL},
    [FKV_TENSOR_Q5_K] = {unpack_q5_k, FKV_MATRIX_AFFINE5, NULL},
    [FKV_TENSOR_TQ1_0] = {unpack_tq1_0, FKV_MATRIX_AFFINE2, NULL},
    [FKV_TENSOR_TQ2_0] = {unpack_tq2_0, FKV_MATRIX_AFFINE2, NULL},
    [FKV_TENSOR_IQ4_NL] = {unpack_iq4_nl, FKV_MATRIX_TABLE4, TABLE_IQ4},
    [FKV_TENSOR_IQ4_XS] = {unpack_iq4_xs, FKV_MATRIX_TABLE4, TABLE_IQ4},
    [FKV_TENSOR_MXFP4] = {unpack_mxfp4, FKV_MATRIX_TABLE4, FKV_TABLE_FP4},
    [FKV_TENSOR_NVFP4] = {unpack_nvfp4, FKV_MATRIX_TABLE4_16, FKV_TABLE_FP4},
    [FKV_TENSOR_IQ1_S] = {fkv_unpack_iq1_s, FKV_MATRIX_TABLE4, FKV_TABLE_IQ1},
    [FKV_TENSOR_IQ1_M] = {fkv_unpack_iq1_m, FKV_MATRIX_TABLE4_16, FKV_TABLE_IQ1},
    [FKV_TENSOR_IQ2_XXS] = {fkv_unpack_iq2_xxs, FKV_MATRIX_TABLE4, FKV_TABLE_IQ2},
    [FKV_TENSOR_IQ2_XS] = {fkv_unpack_iq2_xs, FKV_MATRIX_TABLE4_16, FKV_TABLE_IQ2},
    [FKV_TENSOR_IQ2_S] = {fkv_unpack_iq2_s, FKV_MATRIX_TABLE4_16, FKV_TABLE_IQ2},
    [FKV_TENSOR_IQ3_XXS] = {fkv_unpack_iq3_xxs, FKV_MATRIX_TABLE4, FKV_TABLE_IQ3_XXS},
    [FKV_TENSOR_IQ3_S] = {fkv_unpack_iq3_s, FKV_MATRIX_TABLE4, FKV_TABLE_IQ3_S},
};

const fkv_block_format *fkv_block_format_of(fkv_tensor_type type) {
    FKV_ASSERT((size_t)type < sizeof FORMATS / sizeof FORMATS[0]);
    return &FORMATS[type];
}
