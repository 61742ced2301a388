/* How weights lie in panels, for those who write them (src/matrix) and the kernels that read them. What a panel is for is said in
 * src/matrix/matrix.h.
 *
 * A line is 64 bytes: a dword for each of the 16 rows, side by side. Packed forms go by units of 32 columns, which are 8 quads of
 * four columns: byte k of a dword of quad j belongs to column 4 j + k.
 *
 *   8 bits      8 lines, one for each quad
 *   4 bits      4 lines: quad j in the low halves of line j, quad j + 4 in the high ones
 *   5 bits      those 4, and a line with the fifth bits: that of quad j is bit j of each byte
 *   6 bits      those 4, and two lines with the upper two bits: those of quad j are bits 2 (j % 4) on of line j / 4
 *   2 bits      two such lines alone
 *   3 bits      those two, and a line with the third bits, laid out as the fifth ones
 *
 * So a unit of b bits has b lines. A panel has the lines of all its units, then for each group 16 scales and, where the form has
 * them, 16 biases (f16). Forms without are centered: value = scale * (code - 2 ^ (bits - 1)). A code of a table form stands for
 * one of 16 signed bytes, which take the place of code - 2 ^ (bits - 1).
 *
 * Floats: for each column 16 numbers side by side.
 */
#ifndef FKV_PANELS_H
#define FKV_PANELS_H

#include "../base/base.h"

enum {
    FKV_PANEL_ROWS = 16,
    FKV_LINE_BYTES = 4 * FKV_PANEL_ROWS,
    FKV_HALVES_BYTES = 2 * FKV_PANEL_ROWS, /* a scale, or a bias, of every row */
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

/* Rows of blocks as weight files have them, for the forms that some kernels make panels of by themselves (product_kernels.h).
 * The blocks are ggml's: src/model/files/block_formats.c has them in full. */
typedef enum fkv_row_form {
    FKV_ROWS_OTHER, /* no kernel knows them */
    FKV_ROWS_Q4_0,
    FKV_ROWS_Q8_0,
    FKV_ROWS_Q4_K,
    FKV_ROWS_Q6_K,
    FKV_ROWS_MXFP4
} fkv_row_form;

typedef struct fkv_panel_layout {
    uint32_t bits;  /* of a code, or of a float */
    uint32_t group; /* columns that share a scale; 0: floats */
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

/* Bits of a code that are in the first lines of a unit; the others are in the lines behind. */
FKV_INLINE uint32_t fkv_panel_low_bits(uint32_t bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }

/* What a centered form subtracts from a code. The bytes of a table are kept unsigned, 128 above what they mean. */
FKV_INLINE int fkv_panel_center(fkv_panel_layout layout) { return layout.table ? 128 : 1 << (layout.bits - 1); }

/* Of the scales, and biases, of one group. */
FKV_INLINE size_t fkv_panel_group_bytes(fkv_panel_layout layout) {
    return layout.biased ? 2 * FKV_HALVES_BYTES : FKV_HALVES_BYTES;
}

/* Where the scales of a panel begin. */
FKV_INLINE size_t fkv_panel_code_bytes(fkv_panel_layout layout, uint32_t n_cols) {
    return (size_t)(n_cols / FKV_UNIT_COLS) * layout.bits * FKV_LINE_BYTES;
}

FKV_INLINE uint64_t fkv_panel_bytes(fkv_panel_layout layout, uint32_t n_cols) {
    if (layout.group == 0) return (uint64_t)n_cols * layout.bits / 8 * FKV_PANEL_ROWS;
    return fkv_align_up(fkv_panel_code_bytes(layout, n_cols) + n_cols / layout.group * fkv_panel_group_bytes(layout), 64);
}

#endif
