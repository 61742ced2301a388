/* Decoding of AWQ, GPTQ and FP8 weights; see linear_codes.h. */
#include "linear_codes.h"

#include "../../base/float16.h"

enum { WORD_BITS = 32, AWQ_ROWS = 8 };

/* For each of 8 rows, the position of its code within a 32-bit AWQ word. */
static const uint8_t AWQ_POSITIONS[AWQ_ROWS] = {0, 4, 1, 5, 2, 6, 3, 7};

static uint32_t word_at(const uint8_t *words, uint64_t i) {
    uint32_t word;
    memcpy(&word, words + sizeof word * i, sizeof word);
    return word;
}

/* Returns code i of a bit stream whose 32-bit words are `step` words apart. */
static uint32_t stream_code_at(const uint8_t *words, uint64_t first, uint64_t step, uint32_t bits, uint64_t i) {
    FKV_ASSERT(bits >= 2 && bits <= 8);
    const uint64_t at = i * bits;
    const uint32_t shift = (uint32_t)(at % WORD_BITS);
    uint64_t wide = word_at(words, first + at / WORD_BITS * step);
    if (shift + bits > WORD_BITS) wide |= (uint64_t)word_at(words, first + (at / WORD_BITS + 1) * step) << WORD_BITS;
    return (uint32_t)(wide >> shift) & ((1u << bits) - 1);
}

static uint32_t awq_code_at(const fkv_tensor *tensor, const uint8_t *words, uint64_t line, uint64_t row) {
    const uint64_t n_words = tensor->linear->n_rows / AWQ_ROWS;
    return word_at(words, line * n_words + row / AWQ_ROWS) >> 4 * AWQ_POSITIONS[row % AWQ_ROWS] & 15;
}

static uint32_t linear_code_at(const fkv_tensor *tensor, uint64_t row, uint32_t col) {
    if (tensor->type == FKV_TENSOR_AWQ) return awq_code_at(tensor, tensor->data, col, row);
    return stream_code_at(tensor->data, row, tensor->linear->n_rows, tensor->linear->bits, col);
}

static uint32_t zero_point_at(const fkv_tensor *tensor, uint64_t row, uint32_t group) {
    const struct fkv_linear_codes *l = tensor->linear;
    if (tensor->type == FKV_TENSOR_AWQ) return awq_code_at(tensor, l->zeros, group, row);
    const uint64_t n_words = (uint64_t)l->n_rows * l->bits / WORD_BITS;
    return (stream_code_at(l->zeros, group * n_words, 1, l->bits, row) + l->zero_offset) & ((1u << l->bits) - 1);
}

static float linear_scale_at(const struct fkv_linear_codes *l, uint64_t i) {
    uint16_t half;
    float single;
    if (l->scale_type == FKV_TENSOR_F32) {
        memcpy(&single, l->scales + sizeof single * i, sizeof single);
        return single;
    }
    memcpy(&half, l->scales + sizeof half * i, sizeof half);
    return l->scale_type == FKV_TENSOR_F16 ? fkv_f16_to_f32(half) : fkv_bf16_to_f32(half);
}

fkv_matrix_kind fkv_linear_codes_kind(const fkv_tensor *tensor) {
    static const fkv_matrix_kind affine[] = {
        [2] = FKV_MATRIX_AFFINE2, [3] = FKV_MATRIX_AFFINE3, [4] = FKV_MATRIX_AFFINE4, [8] = FKV_MATRIX_AFFINE8};
    const struct fkv_linear_codes *l = tensor->linear;
    if (tensor->type == FKV_TENSOR_FP8) return FKV_MATRIX_F16;
    if (l->centered && l->bits == 4) return FKV_MATRIX_CENTERED4;
    return l->centered && l->bits == 8 ? FKV_MATRIX_CENTERED8 : affine[l->bits];
}

/* Extracts all codes of a row. */
static void extract_row_codes(const fkv_tensor *tensor, uint64_t row, uint8_t *codes) {
    const struct fkv_linear_codes *l = tensor->linear;
    const uint32_t per_word = WORD_BITS / l->bits;
    if (tensor->type == FKV_TENSOR_AWQ || l->bits == 3) {
        for (uint32_t i = 0; i < tensor->n_cols; i++) codes[i] = (uint8_t)linear_code_at(tensor, row, i);
        return;
    }
    for (uint32_t i = 0; i < tensor->n_cols; i += per_word) {
        uint32_t word = word_at(tensor->data, (uint64_t)(i / per_word) * l->n_rows + row);
        for (uint32_t k = 0; k < per_word; k++, word >>= l->bits) codes[i + k] = (uint8_t)(word & ((1u << l->bits) - 1));
    }
}

void fkv_linear_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases) {
    const struct fkv_linear_codes *l = tensor->linear;
    const uint64_t tensor_row = (uint64_t)tensor->first_row + row;
    const uint32_t group = fkv_panel_layout_of(fkv_linear_codes_kind(tensor)).group;
    FKV_ASSERT(group != 0 && tensor_row < l->n_rows);
    extract_row_codes(tensor, tensor_row, codes);
    for (uint32_t g = 0; g < tensor->n_cols / group; g++) {
        const uint32_t at = g * group / l->group;
        scales[g] = linear_scale_at(l, (uint64_t)at * l->n_rows + tensor_row);
        biases[g] = -scales[g] * (float)zero_point_at(tensor, tensor_row, at);
    }
}

static void fp8_floats(const fkv_tensor *tensor, uint64_t row, float *out) {
    const struct fkv_linear_codes *l = tensor->linear;
    const uint8_t *numbers = tensor->data + row * tensor->row_bytes;
    const uint64_t first = row / l->group_rows * fkv_ceil_div(tensor->n_cols, l->group);
    for (uint32_t i = 0; i < tensor->n_cols; i++) out[i] = fkv_e4m3_to_f32(numbers[i]) * linear_scale_at(l, first + i / l->group);
}

void fkv_linear_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out) {
    const struct fkv_linear_codes *l = tensor->linear;
    const uint64_t tensor_row = (uint64_t)tensor->first_row + row;
    if (tensor->type == FKV_TENSOR_FP8) {
        fp8_floats(tensor, tensor_row, out);
        return;
    }
    for (uint32_t i = 0; i < tensor->n_cols; i++) {
        const uint32_t g = i / l->group;
        const float distance = (float)linear_code_at(tensor, tensor_row, i) - (float)zero_point_at(tensor, tensor_row, g);
        out[i] = linear_scale_at(l, (uint64_t)g * l->n_rows + tensor_row) * distance;
    }
}

bool fkv_linear_codes_centered(const fkv_tensor *tensor) {
    const struct fkv_linear_codes *l = tensor->linear;
    for (uint32_t g = 0; g < tensor->n_cols / l->group; g++)
        for (uint64_t row = 0; row < l->n_rows; row++)
            if (zero_point_at(tensor, row, g) != 1u << (l->bits - 1)) return false;
    return true;
}
