/* Matrix products of weight panels with activations, in float arithmetic. The code is shared by all instruction sets: it uses the
 * vector primitives of the vec_*.h header (src/base/simd) that is included before this file, and these additional primitives:
 *
 *   PRODUCT_TOKENS  number of tokens that use a weight while it is in a register; each has SUMS accumulators, which together fill
 *                   half of the registers
 *   vf_load_bits    converts one bit field of each of 16 dwords to a float
 *   vf_look_up      looks up one nibble of each of 64 bytes in a table of bytes
 *
 * The lanes are the 16 rows of a panel. Weights are converted to floats in registers, column by column, and used by
 * PRODUCT_TOKENS tokens. Even and odd columns have separate accumulators, which gives two dependency chains. Columns are added in
 * ascending order, whatever other tokens and panels are processed.
 */
#ifndef FKV_PRODUCT_BODY_H
#define FKV_PRODUCT_BODY_H

#include "product_kernels.h"

#include <math.h>

enum {
    SUMS = 2,
    PREFETCH_BYTES = 2048 /* prefetch distance for panels that are not in a CPU cache */
};

typedef struct product_sums {
    vf sum[SUMS][PRODUCT_TOKENS][UNIT_VECS];
} product_sums;

/* For one column, adds weight * activation to the accumulators of each token. */
FKV_INLINE void product_column(int n_tokens, const vf weight[UNIT_VECS], const float *x, size_t x_stride,
                               vf sum[PRODUCT_TOKENS][UNIT_VECS]) {
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        vf number = vf_set(x[(size_t)t * x_stride]);
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) sum[t][v] = vf_fma(weight[v], number, sum[t][v]);
    }
}

/* Converts the codes of column 4 * j + k of a unit to floats (see panels.h). */
FKV_INLINE void load_codes(int bits, const uint8_t *lines, int j, int k, vf code[UNIT_VECS]) {
    if (bits == 8) {
        vf_load_bits(lines + (size_t)j * FKV_LINE_BYTES, 8 * k, 255, code);
        return;
    }
    const int low = (int)fkv_panel_low_bits((uint32_t)bits);
    if (low == 4)
        vf_load_bits(lines + (size_t)(j % 4) * FKV_LINE_BYTES, 8 * k + j / 4 * 4, 15, code);
    else
        vf_load_bits(lines + (size_t)(j / 4) * FKV_LINE_BYTES, 8 * k + j % 4 * 2, 3, code);
    if (bits == low) return;
    vf upper[UNIT_VECS];
    if (bits - low == 1)
        vf_load_bits(lines + (size_t)low * FKV_LINE_BYTES, 8 * k + j, 1, upper);
    else
        vf_load_bits(lines + (size_t)(low + j / 4) * FKV_LINE_BYTES, 8 * k + j % 4 * 2, 3, upper);
    FKV_UNROLL
    for (int v = 0; v < UNIT_VECS; v++) code[v] = vf_fma(upper[v], vf_set((float)(1 << low)), code[v]);
}

FKV_INLINE void load_affine(fkv_panel_layout layout, const uint8_t *halves, vf scale[UNIT_VECS], vf bias[UNIT_VECS]) {
    vf_load_f16(halves, scale);
    if (layout.biased) {
        vf_load_f16(halves + FKV_HALVES_BYTES, bias);
    } else {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) bias[v] = vf_mul(scale[v], vf_set(-(float)fkv_panel_center(layout)));
    }
}

/* Adds 128 to each table entry to make it unsigned. fkv_panel_center() returns this offset, which is subtracted later. */
FKV_INLINE void unsigned_table(const int8_t *table, uint8_t out[16]) {
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)(table[i] + 128);
}

FKV_INLINE void product_coded(int n_tokens, fkv_panel_layout layout, const fkv_panels *p, const uint8_t *panel, const float *x,
                              size_t x_stride, product_sums *sums) {
    const int bits = (int)layout.bits;
    const int group_quads = (int)layout.group / 4;
    const uint8_t *halves = panel + fkv_panel_code_bytes(layout, p->n_cols);
    uint8_t table[16] = {0};
    if (layout.table) unsigned_table(p->table, table);
    for (uint32_t c = 0; c < p->n_cols; c += FKV_UNIT_COLS, panel += (size_t)bits * FKV_LINE_BYTES) {
        alignas(64) uint8_t looked_up[FKV_LINE_BYTES];
        for (int line = 0; line < bits; line++) FKV_PREFETCH(panel + (size_t)line * FKV_LINE_BYTES + PREFETCH_BYTES);
        FKV_UNROLL
        for (int g = 0; g < FKV_UNIT_QUADS; g += group_quads, halves += fkv_panel_group_bytes(layout)) {
            vf scale[UNIT_VECS];
            vf bias[UNIT_VECS];
            load_affine(layout, halves, scale, bias);
            FKV_UNROLL
            for (int j = g; j < g + group_quads; j++) {
                if (layout.table) vf_look_up(table, panel + (size_t)(j % 4) * FKV_LINE_BYTES, j / 4 * 4, looked_up);
                FKV_UNROLL
                for (int k = 0; k < 4; k++) {
                    vf weight[UNIT_VECS];
                    if (layout.table)
                        load_codes(8, looked_up, 0, k, weight);
                    else
                        load_codes(bits, panel, j, k, weight);
                    FKV_UNROLL
                    for (int v = 0; v < UNIT_VECS; v++) weight[v] = vf_fma(weight[v], scale[v], bias[v]);
                    product_column(n_tokens, weight, x + c + 4 * j + k, x_stride, sums->sum[k % SUMS]);
                }
            }
        }
    }
}

FKV_INLINE void product_floats(int n_tokens, fkv_matrix_kind kind, const fkv_panels *p, const uint8_t *panel, const float *x,
                               size_t x_stride, product_sums *sums) {
    size_t column_bytes = (kind == FKV_MATRIX_F32 ? sizeof(float) : sizeof(uint16_t)) * FKV_PANEL_ROWS;
    for (uint32_t c = 0; c < p->n_cols; c += 2) {
        FKV_PREFETCH(panel + PREFETCH_BYTES);
        FKV_UNROLL
        for (int j = 0; j < 2; j++, panel += column_bytes) {
            vf weight[UNIT_VECS];
            if (kind == FKV_MATRIX_F16) {
                vf_load_f16(panel, weight);
            } else if (kind == FKV_MATRIX_BF16) {
                vf_load_bf16(panel, weight);
            } else {
                FKV_UNROLL
                for (int v = 0; v < UNIT_VECS; v++) weight[v] = vf_load((const float *)(const void *)panel + v * VL);
            }
            product_column(n_tokens, weight, x + c + j, x_stride, sums->sum[j % SUMS]);
        }
    }
}

FKV_INLINE void product_tokens(int n_tokens, fkv_matrix_kind kind, const fkv_panels *p, const uint8_t *panel, const float *x,
                               size_t x_stride, float *out, size_t out_stride) {
    product_sums sums;
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) sums.sum[0][t][v] = sums.sum[1][t][v] = vf_set(0.0f);
    }
    fkv_panel_layout layout = fkv_panel_layout_of(kind);
    if (layout.group != 0)
        product_coded(n_tokens, layout, p, panel, x, x_stride, &sums);
    else
        product_floats(n_tokens, kind, p, panel, x, x_stride, &sums);
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++)
            vf_store(out + (size_t)t * out_stride + v * VL, vf_add(sums.sum[0][t][v], sums.sum[1][t][v]));
    }
}

/* Computes the matrix product for one matrix kind. Each panel is multiplied by all tokens before the next panel is read, so that
 * the panel stays in a nearby cache. */
FKV_INLINE void product_kind(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                             uint32_t n_tokens, float *out, size_t out_stride) {
    for (uint32_t i = 0; i < p->n_panels; i++) {
        const uint8_t *panel = p->first + i * p->panel_bytes;
        const float *x = in->x + token * in->x_stride;
        float *to = out + (size_t)i * FKV_PANEL_ROWS;
        uint32_t t = 0;
#define TAKE(n)                                                                                                                  \
    for (; t + (n) <= n_tokens; t += (n))                                                                                        \
    product_tokens(n, kind, p, panel, x + t * in->x_stride, in->x_stride, to + t * out_stride, out_stride)
        TAKE(PRODUCT_TOKENS);
        if (PRODUCT_TOKENS > 4) TAKE(4);
        if (PRODUCT_TOKENS > 2) TAKE(2);
        TAKE(1);
#undef TAKE
    }
}

static void float_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                          size_t out_stride) {
    if (panels->kind == FKV_MATRIX_F16)
        product_kind(FKV_MATRIX_F16, panels, in, token, n_tokens, out, out_stride);
    else if (panels->kind == FKV_MATRIX_BF16)
        product_kind(FKV_MATRIX_BF16, panels, in, token, n_tokens, out, out_stride);
    else
        product_kind(FKV_MATRIX_F32, panels, in, token, n_tokens, out, out_stride);
}

/* Applies the macro DO to each packed matrix kind. Each kind gets its own function, so that a call needs stack space for one kind
 * only. */
#define MATRIX_KINDS(DO, product)                                                                                                \
    DO(product, AFFINE2)                                                                                                         \
    DO(product, AFFINE2_16)                                                                                                      \
    DO(product, AFFINE3)                                                                                                         \
    DO(product, AFFINE4)                                                                                                         \
    DO(product, AFFINE5)                                                                                                         \
    DO(product, AFFINE6)                                                                                                         \
    DO(product, AFFINE8)                                                                                                         \
    DO(product, CENTERED3_16)                                                                                                    \
    DO(product, CENTERED4)                                                                                                       \
    DO(product, CENTERED5)                                                                                                       \
    DO(product, CENTERED6_16)                                                                                                    \
    DO(product, CENTERED8)                                                                                                       \
    DO(product, TABLE4)                                                                                                          \
    DO(product, TABLE4_16)

#define KIND_FUNCTION(product, name)                                                                                             \
    static __attribute__((noinline, unused)) void product##_##name(                                                              \
        const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out, size_t out_stride) { \
        product(FKV_MATRIX_##name, panels, in, token, n_tokens, out, out_stride);                                                \
    }
#define KIND_CASE(product, name)                                                                                                 \
    case FKV_MATRIX_##name: product##_##name(panels, in, token, n_tokens, out, out_stride); break;

#define EACH_MATRIX_KIND(product)                                                                                                \
    switch (panels->kind) {                                                                                                      \
        MATRIX_KINDS(KIND_CASE, product)                                                                                         \
    default: float_product(panels, in, token, n_tokens, out, out_stride); break;                                                 \
    }

MATRIX_KINDS(KIND_FUNCTION, product_kind)

/* Declared inline to avoid a warning about an unused function: files with integer product kernels do not call
 * it. */
static inline void kernel_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens,
                                  float *out, size_t out_stride) {
    EACH_MATRIX_KIND(product_kind)
}

#endif
