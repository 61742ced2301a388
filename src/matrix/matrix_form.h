/* The panel form behind each matrix kind: the two lists are the same, the one for models, the other for kernels. */
#ifndef FKV_MATRIX_FORM_H
#define FKV_MATRIX_FORM_H

#include "../attn/cpu/panels.h"
#include "matrix.h"

_Static_assert((int)FKV_PANEL_ROWS == (int)FKV_PANEL_LANES, "panels are as wide as the kernels read them");

FKV_INLINE fkv_panel_form fkv_matrix_form(fkv_matrix_kind kind) {
    static const fkv_panel_form form_of[] = {
        [FKV_MATRIX_AFFINE4] = FKV_PANEL_AFFINE4,     [FKV_MATRIX_CENTERED4] = FKV_PANEL_CENTERED4,
        [FKV_MATRIX_CENTERED5] = FKV_PANEL_CENTERED5, [FKV_MATRIX_CENTERED6] = FKV_PANEL_CENTERED6,
        [FKV_MATRIX_CENTERED8] = FKV_PANEL_CENTERED8, [FKV_MATRIX_F16] = FKV_PANEL_F16,
        [FKV_MATRIX_BF16] = FKV_PANEL_BF16,           [FKV_MATRIX_F32] = FKV_PANEL_F32,
    };
    return form_of[kind];
}

#endif
