/* See array_codes.h. */
#include "array_codes.h"

#include "../../base/float16.h"
#include "block_formats.h"

#include <math.h>

fkv_matrix_kind fkv_array_codes_kind(const fkv_tensor *tensor) {
    static const fkv_matrix_kind affine[] = {[2] = FKV_MATRIX_AFFINE2, [3] = FKV_MATRIX_AFFINE3, [4] = FKV_MATRIX_AFFINE4,
                                             [5] = FKV_MATRIX_AFFINE5, [6] = FKV_MATRIX_AFFINE6, [8] = FKV_MATRIX_AFFINE8};
    if (tensor->type == FKV_TENSOR_MLX_AFFINE) return affine[tensor->bits];
    return tensor->type == FKV_TENSOR_MLX_MXFP4 ? FKV_MATRIX_TABLE4 : FKV_MATRIX_TABLE4_16;
}

static uint32_t code_at(const uint8_t *bytes, uint32_t bits, uint32_t i) {
    const uint64_t at = (uint64_t)i * bits;
    uint32_t pair = bytes[at / 8];
    if (at % 8 + bits > 8) pair |= (uint32_t)bytes[at / 8 + 1] << 8;
    return pair >> at % 8 & ((1u << bits) - 1);
}

static float number_at(fkv_tensor_type type, const uint8_t *numbers, uint64_t i) {
    uint16_t half;
    float single;
    if (type == FKV_TENSOR_F32) {
        memcpy(&single, numbers + 4 * i, sizeof single);
        return single;
    }
    memcpy(&half, numbers + 2 * i, sizeof half);
    return type == FKV_TENSOR_F16 ? fkv_f16_to_f32(half) : fkv_bf16_to_f32(half);
}

static float scale_at(const fkv_tensor *tensor, uint64_t i) {
    switch (tensor->type) {
    case FKV_TENSOR_MLX_AFFINE: return number_at(tensor->scale_type, tensor->scales, i);
    case FKV_TENSOR_MLX_MXFP4: return ldexpf(1, tensor->scales[i] - 128);
    default: return 0.5f * fkv_e4m3_to_f32(tensor->scales[i]);
    }
}

void fkv_array_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases) {
    const uint8_t *bytes = tensor->data + row * tensor->row_bytes;
    const uint32_t group = fkv_panel_layout_of(fkv_array_codes_kind(tensor)).group;
    FKV_ASSERT(group != 0 && tensor->group != 0);
    const uint64_t first = (uint64_t)row * (tensor->n_cols / tensor->group);
    for (uint32_t i = 0; i < tensor->n_cols; i++) codes[i] = (uint8_t)code_at(bytes, tensor->bits, i);
    for (uint32_t g = 0; g < tensor->n_cols / group; g++) {
        const uint64_t at = first + g * group / tensor->group;
        scales[g] = scale_at(tensor, at);
        biases[g] = tensor->biases != NULL ? number_at(tensor->scale_type, tensor->biases, at) : 0;
    }
}

void fkv_array_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out) {
    const uint8_t *bytes = tensor->data + row * tensor->row_bytes;
    const uint64_t first = (uint64_t)row * (tensor->n_cols / tensor->group);
    for (uint32_t i = 0; i < tensor->n_cols; i++) {
        const uint64_t at = first + i / tensor->group;
        const uint32_t code = code_at(bytes, tensor->bits, i);
        const float scale = scale_at(tensor, at);
        out[i] = tensor->biases != NULL ? scale * (float)code + number_at(tensor->scale_type, tensor->biases, at)
                                        : scale * (float)FKV_TABLE_FP4[code];
    }
}
