/* Panel layout of weights, shared by src/matrix, which writes panels, and the kernels that read them. src/matrix/matrix.h
 * explains why panels exist.
 *
 * A line has 64 bytes: one dword for each of the 16 rows. Packed kinds are divided into units of 32 columns, that is, 8 quads of
 * four columns. Byte k of a dword of quad j belongs to column 4 * j + k.
 *
 *   8 bits      8 lines, one per quad
 *   4 bits      4 lines: quad j in the low nibbles of line j, quad j + 4 in the high nibbles
 *   5 bits      the lines of 4 bits, and a line with the fifth bits: bit j of each byte belongs to quad j
 *   6 bits      the lines of 4 bits, and two lines with the upper two bits: quad j starts at bit 2 * (j % 4) of line j / 4
 *   2 bits      two lines in the layout of these upper two bits
 *   3 bits      the lines of 2 bits, and a line with the third bits in the layout of the fifth bits
 *
 * A unit of b bits therefore has b lines. A panel stores the lines of all units, then for each group 16 scales and, if the kind
 * has them, 16 biases (f16). Kinds without biases are centered: value = scale * (code - 2 ^ (bits - 1)). A code of a table kind
 * selects one of 16 signed bytes, which replaces code - 2 ^ (bits - 1). Float kinds store 16 values per column.
 */
#ifndef FKV_PANELS_H
#define FKV_PANELS_H

#include "../base/base.h"

enum {
    FKV_PANEL_ROWS = 16,
    FKV_LINE_BYTES = 4 * FKV_PANEL_ROWS,
    FKV_HALVES_BYTES = 2 * FKV_PANEL_ROWS, /* one 16-bit scale or bias for each row of a panel */
    FKV_UNIT_COLS = 32,
    FKV_UNIT_QUADS = FKV_UNIT_COLS / 4
};

typedef enum fkv_matrix_kind {
    FKV_MATRIX_AFFINE2,
    FKV_MATRIX_AFFINE2_16,
    FKV_MATRIX_AFFINE3,
    FKV_MATRIX_AFFINE4,
    FKV_MATRIX_AFFINE5,
    FKV_MATRIX_AFFINE6,
    FKV_MATRIX_AFFINE8,
    FKV_MATRIX_CENTERED3_16,
    FKV_MATRIX_CENTERED4,
    FKV_MATRIX_CENTERED5,
    FKV_MATRIX_CENTERED6_16,
    FKV_MATRIX_CENTERED8,
    FKV_MATRIX_TABLE4,
    FKV_MATRIX_TABLE4_16,
    FKV_MATRIX_F16,
    FKV_MATRIX_BF16,
    FKV_MATRIX_F32
} fkv_matrix_kind;

/* ggml block formats that some kernels convert to panels directly (fkv_product_kernels.fill). src/model/files/block_formats.c
 * describes the formats. */
typedef enum fkv_row_form {
    FKV_ROWS_OTHER, /* any other format; kernels do not convert it to panels */
    FKV_ROWS_Q4_0,
    FKV_ROWS_Q8_0,
    FKV_ROWS_Q4_K,
    FKV_ROWS_Q6_K,
    FKV_ROWS_MXFP4
} fkv_row_form;

typedef struct fkv_panel_layout {
    uint32_t bits;  /* number of bits per code, or per float in float kinds */
    uint32_t group; /* number of columns that share a scale; 0 for float kinds */
    bool biased;
    bool table;
} fkv_panel_layout;

FKV_INLINE fkv_panel_layout fkv_panel_layout_of(fkv_matrix_kind kind) {
    switch (kind) {
    case FKV_MATRIX_AFFINE2: return (fkv_panel_layout){2, 32, true, false};
    case FKV_MATRIX_AFFINE2_16: return (fkv_panel_layout){2, 16, true, false};
    case FKV_MATRIX_AFFINE3: return (fkv_panel_layout){3, 32, true, false};
    case FKV_MATRIX_AFFINE4: return (fkv_panel_layout){4, 32, true, false};
    case FKV_MATRIX_AFFINE5: return (fkv_panel_layout){5, 32, true, false};
    case FKV_MATRIX_AFFINE6: return (fkv_panel_layout){6, 32, true, false};
    case FKV_MATRIX_AFFINE8: return (fkv_panel_layout){8, 32, true, false};
    case FKV_MATRIX_CENTERED3_16: return (fkv_panel_layout){3, 16, false, false};
    case FKV_MATRIX_CENTERED4: return (fkv_panel_layout){4, 32, false, false};
    case FKV_MATRIX_CENTERED5: return (fkv_panel_layout){5, 32, false, false};
    case FKV_MATRIX_CENTERED6_16: return (fkv_panel_layout){6, 16, false, false};
    case FKV_MATRIX_CENTERED8: return (fkv_panel_layout){8, 32, false, false};
    case FKV_MATRIX_TABLE4: return (fkv_panel_layout){4, 32, false, true};
    case FKV_MATRIX_TABLE4_16: return (fkv_panel_layout){4, 16, false, true};
    case FKV_MATRIX_F32: return (fkv_panel_layout){32, 0, false, false};
    default: return (fkv_panel_layout){16, 0, false, false};
    }
}

/* Returns the number of low bits of a code that are stored in the first lines of a unit (32 columns). The remaining high bits are
 * stored in the following lines. */
FKV_INLINE uint32_t fkv_panel_low_bits(uint32_t bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }

/* Returns the value that a centered kind subtracts from a code. For table kinds, returns 128, because kernels add 128 to the
 * table entries to make them unsigned. */
FKV_INLINE int fkv_panel_center(fkv_panel_layout layout) { return layout.table ? 128 : 1 << (layout.bits - 1); }

/* Returns the size, in bytes, of the scales and biases of one group of columns for all rows of a panel. */
FKV_INLINE size_t fkv_panel_group_bytes(fkv_panel_layout layout) {
    return layout.biased ? 2 * FKV_HALVES_BYTES : FKV_HALVES_BYTES;
}

/* Returns the byte offset of the scales in a panel. */
FKV_INLINE size_t fkv_panel_code_bytes(fkv_panel_layout layout, uint32_t n_cols) {
    return (size_t)(n_cols / FKV_UNIT_COLS) * layout.bits * FKV_LINE_BYTES;
}

FKV_INLINE uint64_t fkv_panel_bytes(fkv_panel_layout layout, uint32_t n_cols) {
    if (layout.group == 0) return (uint64_t)n_cols * layout.bits / 8 * FKV_PANEL_ROWS;
    return fkv_align_up(fkv_panel_code_bytes(layout, n_cols) + n_cols / layout.group * fkv_panel_group_bytes(layout), 64);
}

#endif
