/* Computes the sizes of weight panels, writes rows to panels and reads them back. panels.h specifies the layout.
 *
 * Unlike product.c, which runs in every step, this code is portable C that runs only at load time or for single rows.
 */
#include "matrix.h"

#include "../base/float16.h"

enum { QUAD = 4 };

static fkv_panel_layout layout_of(const fkv_matrix *m) { return fkv_panel_layout_of(m->kind); }

fkv_status fkv_matrix_make(fkv_matrix_kind kind, uint32_t group, uint32_t n_rows, uint32_t n_cols, fkv_matrix *matrix) {
    FKV_REQUIRE(kind >= FKV_MATRIX_AFFINE2 && kind <= FKV_MATRIX_F32, FKV_UNSUPPORTED, "unknown matrix kind %d", (int)kind);
    FKV_REQUIRE(n_rows > 0 && n_cols > 0 && n_cols % FKV_UNIT_COLS == 0, FKV_UNSUPPORTED,
                "unsupported matrix with %u rows and %u columns: there must be at least one row, "
                "and the number of columns must be a multiple of %d",
                n_rows, n_cols, FKV_UNIT_COLS);
    fkv_panel_layout layout = fkv_panel_layout_of(kind);
    FKV_REQUIRE(group == layout.group, FKV_UNSUPPORTED, "unsupported group size %u for matrix kind %d: expected %u", group,
                (int)kind, layout.group);
    *matrix = (fkv_matrix){.kind = kind, .group = group, .n_rows = n_rows, .n_cols = n_cols};
    matrix->panel_bytes = fkv_panel_bytes(layout, n_cols);
    return FKV_OK;
}

uint64_t fkv_matrix_bytes(const fkv_matrix *matrix) {
    /* cannot overflow: hparams_check.c limits the matrices of a model to 2^24 rows and 2^20 columns */
    return fkv_ceil_div(matrix->n_rows, FKV_PANEL_ROWS) * matrix->panel_bytes;
}

static uint8_t *panel_of(const fkv_matrix *m, uint32_t row) {
    FKV_ASSERT(row < m->n_rows && m->panels != NULL);
    return m->panels + row / FKV_PANEL_ROWS * m->panel_bytes;
}

/* ---- codes ---- */

static uint32_t quad_at(const uint8_t *codes, uint32_t j) {
    uint32_t quad;
    memcpy(&quad, codes + (size_t)j * QUAD, sizeof quad);
    return quad;
}

static void put_quad(uint8_t *line, uint32_t quad) { memcpy(line, &quad, sizeof quad); }

static uint32_t in_every_byte(uint32_t bits) { return bits * 0x01010101u; }

/* Extracts a field of `width` bits (1 or 2), starting at bit `shift`, from each of 32 codes (8 quads) of a row. Packs the fields
 * of 8 / width quads into one dword and writes this dword to a line. */
static void put_field(const uint8_t *codes, uint32_t shift, uint32_t width, uint8_t *line) {
    FKV_ASSERT(width == 1 || width == 2);
    uint32_t per_byte = 8 / width;
    uint32_t mask = in_every_byte((1u << width) - 1);
    for (uint32_t first = 0; first < FKV_UNIT_QUADS; first += per_byte, line += FKV_LINE_BYTES) {
        uint32_t packed = 0;
        for (uint32_t i = 0; i < per_byte; i++) packed |= (quad_at(codes, first + i) >> shift & mask) << i * width;
        put_quad(line, packed);
    }
}

/* Packs 32 codes of one row. `line` points to the row's dword in the first line of the unit (32 columns). */
static void put_unit_codes(uint32_t bits, const uint8_t *codes, uint8_t *line) {
    if (bits == 8) {
        for (uint32_t j = 0; j < FKV_UNIT_QUADS; j++) put_quad(line + (size_t)j * FKV_LINE_BYTES, quad_at(codes, j));
        return;
    }
    uint32_t low = fkv_panel_low_bits(bits);
    uint32_t mask = in_every_byte(15);
    if (low == 4)
        for (uint32_t j = 0; j < 4; j++)
            put_quad(line + (size_t)j * FKV_LINE_BYTES, (quad_at(codes, j) & mask) | (quad_at(codes, j + 4) & mask) << 4);
    else
        put_field(codes, 0, 2, line);
    if (bits > low) put_field(codes, low, bits - low, line + (size_t)low * FKV_LINE_BYTES);
}

/* Returns the bit field that put_field() stored for one code of quad j. `line` points to the code's byte in the first line. */
static uint32_t field_at(uint32_t width, uint32_t j, const uint8_t *line) {
    uint32_t per_byte = 8 / width;
    return (uint32_t)line[j / per_byte * FKV_LINE_BYTES] >> j % per_byte * width & ((1u << width) - 1);
}

/* Returns one code of quad j. `line` points to the code's byte in the first line of the unit (32 columns). */
static uint32_t panel_code_at(uint32_t bits, uint32_t j, const uint8_t *line) {
    if (bits == 8) return line[j * FKV_LINE_BYTES];
    uint32_t low = fkv_panel_low_bits(bits);
    uint32_t code = low == 4 ? (uint32_t)line[j % 4 * FKV_LINE_BYTES] >> j / 4 * 4 & 15 : field_at(2, j, line);
    return bits == low ? code : code | field_at(bits - low, j, line + (size_t)low * FKV_LINE_BYTES) << low;
}

/* Stores x as f16. Returns whether the stored value is finite. */
static bool put_half(uint8_t *halves, uint32_t lane, float x) {
    uint16_t h = fkv_f32_to_f16(x);
    memcpy(halves + 2 * (size_t)lane, &h, sizeof h);
    return (h & 0x7c00) != 0x7c00;
}

static float panel_half_at(const uint8_t *halves, uint32_t lane) {
    uint16_t h;
    memcpy(&h, halves + 2 * (size_t)lane, sizeof h);
    return fkv_f16_to_f32(h);
}

bool fkv_matrix_set_codes(fkv_matrix *matrix, uint32_t row, const uint8_t *codes, const float *scales, const float *biases) {
    fkv_panel_layout layout = layout_of(matrix);
    FKV_ASSERT(layout.group != 0);
    uint32_t lane = row % FKV_PANEL_ROWS;
    uint8_t *line = panel_of(matrix, row) + (size_t)lane * QUAD;
    uint8_t *halves = panel_of(matrix, row) + fkv_panel_code_bytes(layout, matrix->n_cols);
    bool finite = true;
    for (uint32_t c = 0; c < matrix->n_cols; c += FKV_UNIT_COLS, line += (size_t)layout.bits * FKV_LINE_BYTES)
        put_unit_codes(layout.bits, codes + c, line);
    for (uint32_t g = 0; g < matrix->n_cols / layout.group; g++, halves += fkv_panel_group_bytes(layout)) {
        finite = put_half(halves, lane, scales[g]) && finite;
        if (layout.biased) finite = put_half(halves + FKV_HALVES_BYTES, lane, biases[g]) && finite;
    }
    return finite;
}

static void get_coded_row(const fkv_matrix *m, uint32_t row, float *out) {
    fkv_panel_layout layout = layout_of(m);
    FKV_ASSERT(layout.group != 0 && (m->table != NULL) == layout.table);
    uint32_t lane = row % FKV_PANEL_ROWS;
    const uint8_t *panel = panel_of(m, row);
    const uint8_t *halves = panel + fkv_panel_code_bytes(layout, m->n_cols);
    for (uint32_t c = 0; c < m->n_cols; c++) {
        const uint8_t *line = panel + (size_t)(c / FKV_UNIT_COLS) * layout.bits * FKV_LINE_BYTES + (size_t)lane * QUAD;
        const uint8_t *group = halves + c / layout.group * fkv_panel_group_bytes(layout);
        float scale = panel_half_at(group, lane);
        float bias = layout.biased ? panel_half_at(group + FKV_HALVES_BYTES, lane) : -(float)fkv_panel_center(layout) * scale;
        uint32_t code = panel_code_at(layout.bits, c % FKV_UNIT_COLS / QUAD, line + c % QUAD);
        if (layout.table) code = (uint32_t)(m->table[code] + 128);
        out[c] = scale * (float)code + bias;
    }
}

/* ---- floats ---- */

void fkv_matrix_set_floats(fkv_matrix *matrix, uint32_t row, const void *numbers) {
    FKV_ASSERT(matrix->group == 0);
    size_t size = layout_of(matrix).bits / 8;
    uint8_t *to = panel_of(matrix, row) + row % FKV_PANEL_ROWS * size;
    const uint8_t *from = numbers;
    if (size == 2)
        for (uint32_t c = 0; c < matrix->n_cols; c++) memcpy(to + (size_t)c * 2 * FKV_PANEL_ROWS, from + 2 * (size_t)c, 2);
    else
        for (uint32_t c = 0; c < matrix->n_cols; c++) memcpy(to + (size_t)c * 4 * FKV_PANEL_ROWS, from + 4 * (size_t)c, 4);
}

void fkv_matrix_get_row(const fkv_matrix *matrix, uint32_t row, float *out) {
    if (matrix->group != 0) {
        get_coded_row(matrix, row, out);
        return;
    }
    size_t size = layout_of(matrix).bits / 8;
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
