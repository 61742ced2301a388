/* Panels of weights: sizes, filling a row in, reading one back. See matrix.h.
 *
 * A row of a panel is scattered: quad q of a group lies at q * 64 + 4 * lane, its scale and bias in two runs of halves behind the
 * codes. Everything here is plain C and runs at load or for one row; product.c is what runs at every step.
 */
#include "matrix.h"

#include "../codec/half.h"

enum {
    QUAD = 4,                         /* columns in a dword */
    LINE_BYTES = 4 * FKV_PANEL_ROWS,  /* one dword of every row */
    HALVES_BYTES = 2 * FKV_PANEL_ROWS /* one half of every row */
};

static bool is_affine(fkv_matrix_kind kind) { return kind == FKV_MATRIX_AFFINE4 || kind == FKV_MATRIX_AFFINE8; }

static uint32_t bits_of(fkv_matrix_kind kind) { return kind == FKV_MATRIX_AFFINE4 ? 4 : 8; }

static uint32_t float_bytes(fkv_matrix_kind kind) { return kind == FKV_MATRIX_F32 ? 4 : 2; }

static uint32_t code_bytes(const fkv_matrix *m) { return m->group * bits_of(m->kind) / 8 * FKV_PANEL_ROWS; }

static uint32_t group_bytes(const fkv_matrix *m) { return code_bytes(m) + 2 * HALVES_BYTES; }

fkv_status fkv_matrix_make(fkv_matrix_kind kind, uint32_t group, uint32_t n_rows, uint32_t n_cols, fkv_matrix *matrix) {
    FKV_REQUIRE(n_rows > 0 && n_cols > 0 && n_cols % 32 == 0, FKV_UNSUPPORTED,
                "a matrix of %u rows and %u columns; it needs at least one row, and columns that are a multiple of 32", n_rows,
                n_cols);
    FKV_REQUIRE(kind >= FKV_MATRIX_AFFINE4 && kind <= FKV_MATRIX_F32, FKV_UNSUPPORTED, "there is no matrix of kind %d",
                (int)kind);
    bool group_fits = is_affine(kind) ? group == 32 || (group == 16 && kind == FKV_MATRIX_AFFINE8) : group == 0;
    FKV_REQUIRE(group_fits, FKV_UNSUPPORTED,
                "a group of %u columns for a matrix of kind %d; 4-bit codes have 32, 8-bit ones 16 or 32, floats 0", group,
                (int)kind);
    *matrix = (fkv_matrix){.kind = kind, .group = group, .n_rows = n_rows, .n_cols = n_cols};
    if (is_affine(kind))
        matrix->panel_bytes = (uint64_t)(n_cols / group) * group_bytes(matrix);
    else
        matrix->panel_bytes = (uint64_t)n_cols * float_bytes(kind) * FKV_PANEL_ROWS;
    return FKV_OK;
}

uint64_t fkv_matrix_bytes(const fkv_matrix *matrix) {
    return fkv_ceil_div(matrix->n_rows, FKV_PANEL_ROWS) * matrix->panel_bytes; /* below 2^28 * 2^38 */
}

static uint8_t *panel_of(const fkv_matrix *m, uint32_t row) {
    FKV_ASSERT(row < m->n_rows && m->panels != NULL);
    return m->panels + row / FKV_PANEL_ROWS * m->panel_bytes;
}

/* Where column c of a group has its byte; 4-bit codes of the second half share the bytes of the first. */
static size_t byte_of(uint32_t lane, uint32_t column) { return (size_t)column / QUAD * LINE_BYTES + lane * QUAD + column % QUAD; }

static void put_half(uint8_t *halves, uint32_t lane, float x) {
    uint16_t h = fkv_f32_to_f16(x);
    memcpy(halves + 2 * (size_t)lane, &h, sizeof h);
}

static float half_at(const uint8_t *halves, uint32_t lane) {
    uint16_t h;
    memcpy(&h, halves + 2 * (size_t)lane, sizeof h);
    return fkv_f16_to_f32(h);
}

void fkv_matrix_set_codes(fkv_matrix *matrix, uint32_t row, const uint8_t *codes, const float *scales, const float *biases) {
    FKV_ASSERT(is_affine(matrix->kind));
    uint32_t lane = row % FKV_PANEL_ROWS;
    uint32_t half = matrix->group / 2;
    uint8_t *at = panel_of(matrix, row);
    for (uint32_t g = 0; g < matrix->n_cols / matrix->group; g++, at += group_bytes(matrix), codes += matrix->group) {
        if (matrix->kind == FKV_MATRIX_AFFINE8)
            for (uint32_t c = 0; c < matrix->group; c++) at[byte_of(lane, c)] = codes[c];
        else
            for (uint32_t c = 0; c < half; c++) at[byte_of(lane, c)] = (uint8_t)((codes[c] & 15) | codes[c + half] << 4);
        put_half(at + code_bytes(matrix), lane, scales[g]);
        put_half(at + code_bytes(matrix) + HALVES_BYTES, lane, biases[g]);
    }
}

void fkv_matrix_set_floats(fkv_matrix *matrix, uint32_t row, const void *numbers) {
    FKV_ASSERT(!is_affine(matrix->kind));
    size_t size = float_bytes(matrix->kind);
    uint8_t *to = panel_of(matrix, row) + row % FKV_PANEL_ROWS * size;
    const uint8_t *from = numbers;
    if (size == 2)
        for (uint32_t c = 0; c < matrix->n_cols; c++) memcpy(to + (size_t)c * 2 * FKV_PANEL_ROWS, from + 2 * (size_t)c, 2);
    else
        for (uint32_t c = 0; c < matrix->n_cols; c++) memcpy(to + (size_t)c * 4 * FKV_PANEL_ROWS, from + 4 * (size_t)c, 4);
}

static void get_affine_row(const fkv_matrix *m, uint32_t row, float *out) {
    uint32_t lane = row % FKV_PANEL_ROWS;
    uint32_t half = m->group / 2;
    const uint8_t *at = panel_of(m, row);
    for (uint32_t g = 0; g < m->n_cols / m->group; g++, at += group_bytes(m), out += m->group) {
        float scale = half_at(at + code_bytes(m), lane);
        float bias = half_at(at + code_bytes(m) + HALVES_BYTES, lane);
        for (uint32_t c = 0; c < m->group; c++) {
            uint32_t code;
            if (m->kind == FKV_MATRIX_AFFINE8)
                code = at[byte_of(lane, c)];
            else
                code = c < half ? at[byte_of(lane, c)] & 15u : (uint32_t)at[byte_of(lane, c - half)] >> 4;
            out[c] = scale * (float)code + bias;
        }
    }
}

void fkv_matrix_get_row(const fkv_matrix *matrix, uint32_t row, float *out) {
    if (is_affine(matrix->kind)) {
        get_affine_row(matrix, row, out);
        return;
    }
    size_t size = float_bytes(matrix->kind);
    const uint8_t *from = panel_of(matrix, row) + row % FKV_PANEL_ROWS * size;
    for (uint32_t c = 0; c < matrix->n_cols; c++, from += size * FKV_PANEL_ROWS) {
        uint16_t h;
        if (matrix->kind == FKV_MATRIX_F32) {
            memcpy(&out[c], from, sizeof out[c]);
        } else {
            memcpy(&h, from, sizeof h);
            out[c] = matrix->kind == FKV_MATRIX_F16 ? fkv_f16_to_f32(h) : fkv_bf16_to_f32(h);
        }
    }
}
