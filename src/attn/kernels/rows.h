/* What the kernels share beside the prelude: rows of any type to and from floats, numbers of the page type, where the pages of a
 * sequence lie, the rotation's signs.
 */
#define FKV_R (FKV_H / FKV_G) /* query heads of one KV head */
#define FKV_ROW_BYTES (FKV_ROW_TYPE == 0 ? 4 : 2)

FKV_FN float fkv_row_number(FKV_DEVICE const void *rows, fkv_u64 i) {
#if FKV_ROW_TYPE == 0
    return ((FKV_DEVICE const float *)rows)[i];
#elif FKV_ROW_TYPE == 1
    return fkv_f16_to_f32(((FKV_DEVICE const fkv_u16 *)rows)[i]);
#else
    return fkv_float_of((fkv_u32)((FKV_DEVICE const fkv_u16 *)rows)[i] << 16);
#endif
}

/* Rounded to nearest, ties to even; what is not a number stays so. */
FKV_FN fkv_u32 fkv_bf16_bits(float x) {
    fkv_u32 u = fkv_bits_of(x);
    fkv_u32 rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : rounded;
}

FKV_FN void fkv_put_row_number(FKV_DEVICE void *rows, fkv_u64 i, float x) {
#if FKV_ROW_TYPE == 0
    ((FKV_DEVICE float *)rows)[i] = x;
#elif FKV_ROW_TYPE == 1
    ((FKV_DEVICE fkv_u16 *)rows)[i] = (fkv_u16)fkv_f32_to_f16(x);
#else
    ((FKV_DEVICE fkv_u16 *)rows)[i] = (fkv_u16)fkv_bf16_bits(x);
#endif
}

/* A number of the page type, from its bits. */
FKV_FN float fkv_page_number(fkv_u32 bits) {
#if FKV_PAGE_BF16
    return fkv_float_of(bits << 16);
#else
    return fkv_f16_to_f32(bits);
#endif
}

FKV_FN fkv_u32 fkv_page_bits(float x) {
#if FKV_PAGE_BF16
    return fkv_bf16_bits(x);
#else
    return fkv_f32_to_f16(x);
#endif
}

/* Whether channel d is negated by the rotation of a side. */
FKV_FN fkv_u32 fkv_k_sign(fkv_u32 d) {
    const fkv_u32 signs[] = {FKV_K_SIGNS};
    return FKV_ROTATE_K ? signs[FKV_ROTATE_K ? d / 32 : 0] >> d % 32 << 31 : 0;
}
FKV_FN fkv_u32 fkv_v_sign(fkv_u32 d) {
    const fkv_u32 signs[] = {FKV_V_SIGNS};
    return FKV_ROTATE_V ? signs[FKV_ROTATE_V ? d / 32 : 0] >> d % 32 << 31 : 0;
}

/* The largest power of two that divides D, and 1 / sqrt of it, as src/codec/rotation.c has them. */
#define FKV_ROTATION_BLOCK (FKV_D & (~FKV_D + 1))
FKV_FN float fkv_rotation_norm() {
    float norm = 1.0f;
    int block = FKV_ROTATION_BLOCK;
    for (; block >= 4; block /= 4) norm *= 0.5f;
    return block == 2 ? norm * fkv_float_of(0x3f3504f3u) : norm;
}

/* The pages of a row: logical page to page number. */
FKV_FN fkv_u32 fkv_page_at(FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const fkv_u32 *row, fkv_u32 logical) {
    fkv_u32 n_fixed = row[FKV_ROW_N_FIXED];
    fkv_u32 at = logical < n_fixed ? logical : n_fixed + (logical - n_fixed) % row[FKV_ROW_N_RING];
    return table[row[FKV_ROW_PAGES] + at];
}

/* Where {max, total} of a row of a piece lie in the parts: behind the sums of all pieces, those of a row side by side. row: of
 * all KV heads' rows of an item. */
FKV_FN fkv_u64 fkv_stats_at(FKV_DEVICE const fkv_u32 *table, fkv_u32 row, fkv_u32 piece) {
    fkv_u64 n_pieces = table[FKV_STEP_N_PIECES];
    fkv_u64 rows = (fkv_u64)FKV_H * table[FKV_STEP_ITEM_QUERIES];
    return n_pieces * rows * FKV_D + (row * n_pieces + piece) * 2;
}

/* Number d of a row of codes, as a float. */
FKV_FN float fkv_value_at(FKV_DEVICE const fkv_u8 *codes, FKV_DEVICE const fkv_u8 *scales, FKV_DEVICE const fkv_u8 *biases,
                          fkv_u32 d, fkv_u32 bits, fkv_u32 group) {
    if (bits == 16) return fkv_page_number(((FKV_DEVICE const fkv_u16 *)codes)[d]);
    fkv_u32 of_byte = 8 / bits;
    fkv_u32 code = (fkv_u32)codes[d / of_byte] >> (d % of_byte * bits) & ((1u << bits) - 1u);
    float scale = fkv_page_number(((FKV_DEVICE const fkv_u16 *)scales)[d / group]);
    return fkv_fma(scale, (float)code, fkv_page_number(((FKV_DEVICE const fkv_u16 *)biases)[d / group]));
}

/* Whether the query at a position sees a token. */
FKV_FN bool fkv_sees(fkv_u32 position, fkv_u32 token) {
#if FKV_WINDOW == 0
    return token <= position;
#else
    return token <= position && (token + 1 < FKV_SINKS + 1 || position - token < FKV_WINDOW);
#endif
}
