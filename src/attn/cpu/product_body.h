/* The product of panels of weights with rows of activations in floats, written once over the vector primitives of a vec_*.h (see
 * kernels_body.h, which is included before this file) and
 *
 *   PRODUCT_TOKENS     tokens that meet a weight while it is in a register: with SUMS they fill half the registers
 *   vf_load_bits       the same few bits of 16 dwords to floats
 *
 * The lanes are the 16 rows of a panel. Weights become floats in registers, column by column, and are used by PRODUCT_TOKENS
 * tokens. Even and odd columns have sums of their own, for two chains of additions; the order is that of the columns, whatever
 * tokens or panels are beside.
 */
enum {
    SUMS = 2,
    QUAD_BYTES = 4 * FKV_PANEL_LANES, /* four columns of a panel, 8 bits each */
    HALVES_BYTES = 2 * FKV_PANEL_LANES,
    PREFETCH_BYTES = 2048 /* ahead of what is read, for a panel that comes from memory */
};

typedef struct product_sums {
    vf sum[SUMS][PRODUCT_TOKENS][UNIT_VECS];
} product_sums;

/* One column: its weights, and from x on a number of every token. */
FKV_INLINE void product_column(int n_tokens, const vf weight[UNIT_VECS], const float *x, size_t x_stride,
                               vf sum[PRODUCT_TOKENS][UNIT_VECS]) {
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        vf number = vf_set(x[(size_t)t * x_stride]);
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) sum[t][v] = vf_fma(weight[v], number, sum[t][v]);
    }
}

/* n_quads quads of codes of `bits` bits that begin `shift` bits into their bytes. */
FKV_INLINE void product_codes(int n_tokens, int bits, int shift, uint32_t n_quads, const uint8_t *codes,
                              const vf scale[UNIT_VECS], const vf bias[UNIT_VECS], const float *x, size_t x_stride,
                              product_sums *sums) {
    for (uint32_t q = 0; q < n_quads; q++) {
        FKV_PREFETCH(codes + (size_t)q * QUAD_BYTES + PREFETCH_BYTES);
        FKV_UNROLL
        for (int j = 0; j < 4; j++) {
            vf weight[UNIT_VECS];
            vf_load_bits(codes + (size_t)q * QUAD_BYTES, shift + 8 * j, (1u << bits) - 1, weight);
            FKV_UNROLL
            for (int v = 0; v < UNIT_VECS; v++) weight[v] = vf_fma(weight[v], scale[v], bias[v]);
            product_column(n_tokens, weight, x + 4 * (size_t)q + j, x_stride, sums->sum[j % SUMS]);
        }
    }
}

FKV_INLINE void product_affine(int n_tokens, int bits, const fkv_panels *p, const uint8_t *panel, const float *x, size_t x_stride,
                               product_sums *sums) {
    uint32_t n_quads = p->group * (uint32_t)bits / 32; /* lines of codes */
    for (uint32_t c = 0; c < p->n_cols; c += p->group) {
        const uint8_t *halves = panel + (size_t)n_quads * QUAD_BYTES;
        vf scale[UNIT_VECS];
        vf bias[UNIT_VECS];
        vf_load_f16(halves, scale);
        vf_load_f16(halves + HALVES_BYTES, bias);
        product_codes(n_tokens, bits, 0, n_quads, panel, scale, bias, x + c, x_stride, sums);
        if (bits == 4) product_codes(n_tokens, bits, 4, n_quads, panel, scale, bias, x + c + p->group / 2, x_stride, sums);
        panel = halves + 2 * (size_t)HALVES_BYTES;
    }
}

FKV_INLINE void product_floats(int n_tokens, fkv_panel_form form, const fkv_panels *p, const uint8_t *panel, const float *x,
                               size_t x_stride, product_sums *sums) {
    size_t column_bytes = (form == FKV_PANEL_F32 ? sizeof(float) : sizeof(uint16_t)) * FKV_PANEL_LANES;
    for (uint32_t c = 0; c < p->n_cols; c += 2) {
        FKV_PREFETCH(panel + PREFETCH_BYTES);
        FKV_UNROLL
        for (int j = 0; j < 2; j++, panel += column_bytes) {
            vf weight[UNIT_VECS];
            if (form == FKV_PANEL_F16) {
                vf_load_f16(panel, weight);
            } else if (form == FKV_PANEL_BF16) {
                vf_load_bf16(panel, weight);
            } else {
                FKV_UNROLL
                for (int v = 0; v < UNIT_VECS; v++) weight[v] = vf_load((const float *)(const void *)panel + v * VL);
            }
            product_column(n_tokens, weight, x + c + j, x_stride, sums->sum[j % SUMS]);
        }
    }
}

FKV_INLINE void product_tokens(int n_tokens, fkv_panel_form form, const fkv_panels *p, const uint8_t *panel, const float *x,
                               size_t x_stride, float *out, size_t out_stride) {
    product_sums sums;
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) sums.sum[0][t][v] = sums.sum[1][t][v] = vf_set(0.0f);
    }
    if (form == FKV_PANEL_AFFINE4)
        product_affine(n_tokens, 4, p, panel, x, x_stride, &sums);
    else if (form == FKV_PANEL_AFFINE8)
        product_affine(n_tokens, 8, p, panel, x, x_stride, &sums);
    else
        product_floats(n_tokens, form, p, panel, x, x_stride, &sums);
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++)
            vf_store(out + (size_t)t * out_stride + v * VL, vf_add(sums.sum[0][t][v], sums.sum[1][t][v]));
    }
}

/* All tokens pass over a panel before the next one is touched; the panel then stays in a near cache. */
FKV_INLINE void product_form(fkv_panel_form form, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                             uint32_t n_tokens, float *out, size_t out_stride) {
    for (uint32_t i = 0; i < p->n_panels; i++) {
        const uint8_t *panel = p->first + i * p->panel_bytes;
        const float *x = in->x + token * in->x_stride;
        float *to = out + (size_t)i * FKV_PANEL_LANES;
        uint32_t t = 0;
        for (; t + PRODUCT_TOKENS <= n_tokens; t += PRODUCT_TOKENS)
            product_tokens(PRODUCT_TOKENS, form, p, panel, x + t * in->x_stride, in->x_stride, to + t * out_stride, out_stride);
        for (; t < n_tokens; t++)
            product_tokens(1, form, p, panel, x + t * in->x_stride, in->x_stride, to + t * out_stride, out_stride);
    }
}

static void kernel_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                           size_t out_stride) {
    switch (panels->form) {
    case FKV_PANEL_AFFINE4: product_form(FKV_PANEL_AFFINE4, panels, in, token, n_tokens, out, out_stride); break;
    case FKV_PANEL_AFFINE8: product_form(FKV_PANEL_AFFINE8, panels, in, token, n_tokens, out, out_stride); break;
    case FKV_PANEL_F16: product_form(FKV_PANEL_F16, panels, in, token, n_tokens, out, out_stride); break;
    case FKV_PANEL_BF16: product_form(FKV_PANEL_BF16, panels, in, token, n_tokens, out, out_stride); break;
    case FKV_PANEL_F32: product_form(FKV_PANEL_F32, panels, in, token, n_tokens, out, out_stride); break;
    }
}
