/* Decoding of MLX's quantized arrays; see array_codes.h. */
#include "array_codes.h"

#include "../../base/float16.h"
#include "block_formats.h"

#include <math.h>

fkv_matrix_kind fkv_array_codes_kind(const fkv_tensor *tensor) {
    static const fkv_matrix_kind affine[] = {[2] = FKV_MATRIX_AFFINE2, [3] = FKV_MATRIX_AFFINE3, [4] = FKV_MATRIX_AFFINE4,
                                             [5] = FKV_MATRIX_AFFINE5, [6] = FKV_MATRIX_AFFINE6, [8] = FKV_MATRIX_AFFINE8};
    if (tensor->type == FKV_TENSOR_MLX_AFFINE) return affine[tensor->bits];
    if (tensor->type == FKV_TENSOR_MLX_MXFP8)
        return FKV_MATRIX_F16; /* no matrix kind has E4M3 codes, so values are stored as f16, which represents them exactly */
    return tensor->type == FKV_TENSOR_MLX_MXFP4 ? FKV_MATRIX_TABLE4 : FKV_MATRIX_TABLE4_16;
}

static uint32_t mlx_code_at(const uint8_t *bytes, uint32_t bits, uint32_t i) {
    const uint64_t at = (uint64_t)i * bits;
    uint32_t pair = bytes[at / 8];
    if (at % 8 + bits > 8) pair |= (uint32_t)bytes[at / 8 + 1] << 8;
    return pair >> at % 8 & ((1u << bits) - 1);
}

static float float_at(fkv_tensor_type type, const uint8_t *numbers, uint64_t i) {
    uint16_t half;
    float single;
    if (type == FKV_TENSOR_F32) {
        memcpy(&single, numbers + 4 * i, sizeof single);
        return single;
    }
    memcpy(&half, numbers + 2 * i, sizeof half);
    return type == FKV_TENSOR_F16 ? fkv_f16_to_f32(half) : fkv_bf16_to_f32(half);
}

/* Returns the scale of group i of a row. */
static float mlx_scale_at(const fkv_tensor *tensor, uint32_t row, uint64_t i) {
    const uint8_t *scales = tensor->scales + row * tensor->scale_row_bytes;
    switch (tensor->type) {
    case FKV_TENSOR_MLX_AFFINE: return float_at(tensor->scale_type, scales, i);
    case FKV_TENSOR_MLX_MXFP4: return ldexpf(1, scales[i] - 128);
    case FKV_TENSOR_MLX_MXFP8: return ldexpf(1, scales[i] - 127);
    default: return 0.5f * fkv_e4m3_to_f32(scales[i]);
    }
}

static float mlx_bias_at(const fkv_tensor *tensor, uint32_t row, uint64_t i) {
    return tensor->biases != NULL ? float_at(tensor->scale_type, tensor->biases + row * tensor->scale_row_bytes, i) : 0;
}

void fkv_array_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases) {
    const uint8_t *bytes = tensor->data + row * tensor->row_bytes;
    const uint32_t group = fkv_panel_layout_of(fkv_array_codes_kind(tensor)).group;
    FKV_ASSERT(group != 0 && tensor->group != 0);
    for (uint32_t i = 0; i < tensor->n_cols; i++) codes[i] = (uint8_t)mlx_code_at(bytes, tensor->bits, i);
    for (uint32_t g = 0; g < tensor->n_cols / group; g++) {
        const uint64_t at = g * group / tensor->group;
        scales[g] = mlx_scale_at(tensor, row, at);
        biases[g] = mlx_bias_at(tensor, row, at);
    }
}

void fkv_array_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out) {
    const uint8_t *bytes = tensor->data + row * tensor->row_bytes;
    for (uint32_t i = 0; i < tensor->n_cols; i++) {
        const uint64_t at = i / tensor->group;
        const uint32_t code = mlx_code_at(bytes, tensor->bits, i);
        const float scale = mlx_scale_at(tensor, row, at);
        if (tensor->type == FKV_TENSOR_MLX_AFFINE)
            out[i] = scale * (float)code + mlx_bias_at(tensor, row, at);
        else if (tensor->type == FKV_TENSOR_MLX_MXFP8)
            out[i] = scale * fkv_e4m3_to_f32((uint8_t)code);
        else
            out[i] = scale * (float)FKV_TABLE_FP4[code];
    }
}
