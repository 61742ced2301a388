/* Rows of quantized tensors as codes, scales and biases, or as floats. The block formats are those of ggml:
 *
 *   Q4_0  32 numbers: f16 d, 16 bytes; byte i has number i low and number i + 16 high.    d * (q - 8)
 *   Q4_1  the same behind f16 d, f16 m.                                                   d * q + m
 *   Q5_0  f16 d, 32 fifth bits, then as Q4_0.                                             d * (q - 16)
 *   Q8_0  f16 d, 32 signed bytes.                                                         d * q
 *   Q4_K  256 numbers in 8 groups: f16 d, f16 dmin, 8 scales and 8 minima of 6 bits packed into 12 bytes, 128 bytes of nibbles;
 *         32 bytes have one group low and the next one high.                              d * scale * q - dmin * min
 *   Q6_K  256 numbers in 16 groups: 128 bytes of low nibbles, 64 bytes of high pairs, 16 signed scales, f16 d.
 *                                                                                         d * scale * (q - 32)
 *
 * All become value = scale * code + bias. In float every product here is exact and at most one addition rounds, so the sum is
 * what the definition gives. Codes are what is stored, Q8_0's shifted by 128 to be unsigned.
 */
#include "tensor_rows.h"

#include "../../base/float16.h"

enum {
    MAX_BLOCK_COLS = 256,
    MAX_BLOCK_GROUPS = 16,
    Q4_0_BYTES = 18,
    Q4_1_BYTES = 20,
    Q5_0_BYTES = 22,
    Q8_0_BYTES = 34,
    Q4_K_BYTES = 144,
    Q6_K_BYTES = 210
};

static float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return fkv_f16_to_f32(half);
}

/* ---- one block ----------------------------------------------------------------------------------------------- */

static void nibbles(const uint8_t *bytes, uint32_t n, uint8_t *low, uint8_t *high) {
    for (uint32_t i = 0; i < n; i++) {
        low[i] = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
}

static void unpack_q4_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = -8 * scales[0];
    nibbles(block + 2, 16, codes, codes + 16);
}

static void unpack_q4_1(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = half_at(block + 2);
    nibbles(block + 4, 16, codes, codes + 16);
}

static void unpack_q5_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    uint32_t fifth;
    memcpy(&fifth, block + 2, sizeof fifth);
    scales[0] = half_at(block);
    biases[0] = -16 * scales[0];
    nibbles(block + 6, 16, codes, codes + 16);
    for (uint32_t i = 0; i < 32; i++) codes[i] = (uint8_t)(codes[i] | (fifth >> i & 1) << 4);
}

static void unpack_q8_0(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    scales[0] = half_at(block);
    biases[0] = -128 * scales[0];
    for (uint32_t i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;
}

/* Scales and minima: the first four of each have 6 bits in a byte of their own; the others have 4 bits in the last four bytes and
 * their upper two on top of the first eight. */
static void unpack_q4_k(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = half_at(block);
    const float d_min = half_at(block + 2);
    const uint8_t *packed = block + 4;
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t scale = g < 4 ? packed[g] & 63u : (packed[g + 4] & 15u) | (uint32_t)(packed[g - 4] >> 6) << 4;
        const uint32_t min = g < 4 ? packed[g + 4] & 63u : (uint32_t)(packed[g + 4] >> 4) | (uint32_t)(packed[g] >> 6) << 4;
        scales[g] = d * (float)scale;
        biases[g] = -(d_min * (float)min);
    }
    for (uint32_t pair = 0; pair < 4; pair++)
        nibbles(block + 16 + (size_t)32 * pair, 32, codes + (size_t)64 * pair, codes + (size_t)64 * pair + 32);
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
        nibbles(low, 64, out, out + 64);
        for (uint32_t quarter = 0; quarter < 4; quarter++)
            for (uint32_t i = 0; i < 32; i++)
                out[32 * quarter + i] = (uint8_t)(out[32 * quarter + i] | (pairs[i] >> (2 * quarter) & 3) << 4);
    }
}

typedef void (*unpack_fn)(const uint8_t *block, uint8_t *codes, float *scales, float *biases);

typedef struct block_format {
    unpack_fn unpack; /* NULL: floats */
    fkv_matrix_kind kind;
    uint32_t bytes;
    uint32_t cols;
    uint32_t group;
} block_format;

static const block_format FORMATS[] = {
    [FKV_TENSOR_F32] = {NULL, FKV_MATRIX_F32, 4, 1, 0},
    [FKV_TENSOR_F16] = {NULL, FKV_MATRIX_F16, 2, 1, 0},
    [FKV_TENSOR_BF16] = {NULL, FKV_MATRIX_BF16, 2, 1, 0},
    [FKV_TENSOR_Q4_0] = {unpack_q4_0, FKV_MATRIX_CENTERED4, Q4_0_BYTES, 32, 32},
    [FKV_TENSOR_Q4_1] = {unpack_q4_1, FKV_MATRIX_AFFINE4, Q4_1_BYTES, 32, 32},
    [FKV_TENSOR_Q5_0] = {unpack_q5_0, FKV_MATRIX_CENTERED5, Q5_0_BYTES, 32, 32},
    [FKV_TENSOR_Q8_0] = {unpack_q8_0, FKV_MATRIX_CENTERED8, Q8_0_BYTES, 32, 32},
    [FKV_TENSOR_Q4_K] = {unpack_q4_k, FKV_MATRIX_AFFINE4, Q4_K_BYTES, 256, 32},
    [FKV_TENSOR_Q6_K] = {unpack_q6_k, FKV_MATRIX_CENTERED6, Q6_K_BYTES, 256, 16},
};

/* ---- rows ---------------------------------------------------------------------------------------------------- */

static const uint8_t *row_at(const fkv_tensor *tensor, uint32_t row) {
    FKV_ASSERT(row < tensor->n_rows);
    return tensor->data + row * tensor->row_bytes;
}

fkv_matrix_kind fkv_tensor_matrix_kind(const fkv_tensor *tensor, uint32_t *group) {
    *group = FORMATS[tensor->type].group;
    return FORMATS[tensor->type].kind;
}

/* Q6_K's scale is rounded before its bias is made of it: 32 times a half is a half, so the zero stays where it was and the error
 * is that of the scale alone, at most 32 times. */
static void round_q6_k(float *scales, float *biases, uint32_t n) {
    for (uint32_t g = 0; g < n; g++) {
        scales[g] = fkv_f16_to_f32(fkv_f32_to_f16(scales[g]));
        biases[g] = -32 * scales[g];
    }
}

void fkv_tensor_row_codes(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases) {
    const block_format *format = &FORMATS[tensor->type];
    const uint8_t *block = row_at(tensor, row);
    FKV_ASSERT(format->unpack != NULL);
    const uint32_t block_groups = format->cols / format->group;
    for (uint32_t col = 0, g = 0; col < tensor->n_cols; col += format->cols, g += block_groups, block += format->bytes)
        format->unpack(block, codes + col, scales + g, biases + g);
    if (tensor->type == FKV_TENSOR_Q6_K) round_q6_k(scales, biases, tensor->n_cols / format->group);
}

static void block_floats(const block_format *format, const uint8_t *block, float *out) {
    uint8_t codes[MAX_BLOCK_COLS];
    float scales[MAX_BLOCK_GROUPS];
    float biases[MAX_BLOCK_GROUPS];
    format->unpack(block, codes, scales, biases);
    for (uint32_t g = 0; g < format->cols / format->group; g++)
        for (uint32_t i = g * format->group; i < (g + 1) * format->group; i++) out[i] = scales[g] * (float)codes[i] + biases[g];
}

void fkv_tensor_row_floats(const fkv_tensor *tensor, uint32_t row, float *out) {
    const block_format *format = &FORMATS[tensor->type];
    const uint8_t *block = row_at(tensor, row);
    switch (tensor->type) {
    case FKV_TENSOR_F32: fkv_rows_to_f32(FKV_F32, block, out, tensor->n_cols); break;
    case FKV_TENSOR_F16: fkv_rows_to_f32(FKV_F16, block, out, tensor->n_cols); break;
    case FKV_TENSOR_BF16: fkv_rows_to_f32(FKV_BF16, block, out, tensor->n_cols); break;
    default:
        for (uint32_t col = 0; col < tensor->n_cols; col += format->cols, block += format->bytes)
            block_floats(format, block, out + col);
    }
}

void fkv_tensor_norm_floats(const fkv_tensor *tensor, const fkv_hparams *hparams, float *out) {
    fkv_tensor_row_floats(tensor, 0, out);
    for (uint32_t i = 0; hparams->norm_plus_one && i < tensor->n_cols; i++) out[i] += 1.0f;
}
