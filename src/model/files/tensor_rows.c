/* Decodes tensor rows to codes, scales and biases, or to floats; see tensor_rows.h. block_formats.c defines the block formats. */
#include "tensor_rows.h"

#include "../../base/float16.h"
#include "array_codes.h"
#include "block_formats.h"
#include "linear_codes.h"

static const uint8_t *row_at(const fkv_tensor *tensor, uint32_t row) {
    FKV_ASSERT(row < tensor->n_rows);
    return tensor->data + row * tensor->row_bytes;
}

fkv_matrix_kind fkv_tensor_matrix_kind(const fkv_tensor *tensor, uint32_t *group) {
    const fkv_matrix_kind kind = tensor->linear != NULL ? fkv_linear_codes_kind(tensor)
                                 : tensor->bits != 0    ? fkv_array_codes_kind(tensor)
                                                        : fkv_block_format_of(tensor->type)->kind;
    *group = fkv_panel_layout_of(kind).group;
    return kind;
}

const int8_t *fkv_tensor_table(const fkv_tensor *tensor) {
    if (tensor->linear != NULL) return NULL;
    if (tensor->bits == 4 && tensor->type != FKV_TENSOR_MLX_AFFINE) return FKV_TABLE_FP4;
    if (tensor->bits != 0) return NULL;
    return fkv_block_format_of(tensor->type)->table;
}

/* Rounds scales to f16, then computes biases as -center * scale, where `center` is the code that represents 0. The center is a
 * power of two, so the biases are exact in f16, and the code `center` still decodes to exactly 0. */
static void round_centered(fkv_panel_layout layout, float *scales, float *biases, uint32_t n) {
    for (uint32_t g = 0; g < n; g++) {
        scales[g] = fkv_f16_to_f32(fkv_f32_to_f16(scales[g]));
        biases[g] = -(float)fkv_panel_center(layout) * scales[g];
    }
}

void fkv_tensor_row_codes(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases) {
    if (tensor->linear != NULL) {
        fkv_linear_codes_row(tensor, row, codes, scales, biases);
        return;
    }
    if (tensor->bits != 0) {
        fkv_array_codes_row(tensor, row, codes, scales, biases);
        return;
    }
    const fkv_block_format *format = fkv_block_format_of(tensor->type);
    const fkv_tensor_format *size = fkv_tensor_format_of(tensor->type);
    const fkv_panel_layout layout = fkv_panel_layout_of(format->kind);
    const uint8_t *block = row_at(tensor, row);
    FKV_ASSERT(format->unpack != NULL && layout.group != 0);
    const uint32_t block_groups = size->block_cols / layout.group;
    for (uint32_t col = 0, g = 0; col < tensor->n_cols; col += size->block_cols, g += block_groups, block += size->block_bytes)
        format->unpack(block, codes + col, scales + g, biases + g);
    if (!layout.biased && !layout.table) round_centered(layout, scales, biases, tensor->n_cols / layout.group);
}

static void block_floats(const fkv_block_format *format, uint32_t n_cols, const uint8_t *block, float *out) {
    uint8_t codes[FKV_MAX_BLOCK_COLS];
    float scales[FKV_MAX_BLOCK_GROUPS];
    float biases[FKV_MAX_BLOCK_GROUPS];
    const uint32_t group = fkv_panel_layout_of(format->kind).group;
    FKV_ASSERT(group != 0);
    format->unpack(block, codes, scales, biases);
    for (uint32_t i = 0; i < n_cols; i++) {
        const uint32_t g = i / group;
        out[i] = format->table != NULL ? scales[g] * (float)format->table[codes[i]] : scales[g] * (float)codes[i] + biases[g];
    }
}

/* Converts n values of a float type, which may be unaligned, to floats. */
static void plain_floats(fkv_type type, const uint8_t *numbers, float *out, uint32_t n) {
    const size_t bytes = fkv_type_bytes(type);
    if ((uintptr_t)numbers % bytes == 0)
        fkv_rows_to_f32(type, numbers, out, n);
    else if (type == FKV_F32)
        memcpy(out, numbers, n * bytes);
    else
        for (uint32_t i = 0; i < n; i++) out[i] = fkv_half_to_f32(type, fkv_load_half(numbers, i));
}

bool fkv_tensor_row_halves(const fkv_tensor *tensor, uint32_t row, uint8_t *buffer) {
    const uint32_t n = tensor->n_cols;
    bool finite = true;
    fkv_tensor_row_floats(tensor, row, (float *)(void *)buffer);
    /* converts in place: writing element i at byte 2 * i does not overwrite any float that has yet to be read */
    for (uint32_t i = 0; i < n; i++) {
        float number;
        memcpy(&number, buffer + sizeof number * i, sizeof number);
        const uint16_t half = fkv_f32_to_f16(number);
        fkv_store_half(buffer, i, half);
        finite = finite && (half & 0x7c00) != 0x7c00;
    }
    memset(buffer + (size_t)n * sizeof(uint16_t), 0, (size_t)n * sizeof(uint16_t));
    return finite;
}

void fkv_tensor_row_floats(const fkv_tensor *tensor, uint32_t row, float *out) {
    if (tensor->linear != NULL) {
        fkv_linear_codes_floats(tensor, row, out);
        return;
    }
    if (tensor->bits != 0) {
        fkv_array_codes_floats(tensor, row, out);
        return;
    }
    const fkv_block_format *format = fkv_block_format_of(tensor->type);
    const fkv_tensor_format *size = fkv_tensor_format_of(tensor->type);
    const uint8_t *block = row_at(tensor, row);
    switch (tensor->type) {
    case FKV_TENSOR_F32: plain_floats(FKV_F32, block, out, tensor->n_cols); break;
    case FKV_TENSOR_F16: plain_floats(FKV_F16, block, out, tensor->n_cols); break;
    case FKV_TENSOR_BF16: plain_floats(FKV_BF16, block, out, tensor->n_cols); break;
    default:
        for (uint32_t col = 0; col < tensor->n_cols; col += size->block_cols, block += size->block_bytes)
            block_floats(format, size->block_cols, block, out + col);
    }
}

void fkv_tensor_norm_floats(const fkv_tensor *tensor, const fkv_hparams *hparams, float *out) {
    fkv_tensor_row_floats(tensor, 0, out);
    for (uint32_t i = 0; hparams->norm_plus_one && i < tensor->n_cols; i++) out[i] += 1.0f;
}
