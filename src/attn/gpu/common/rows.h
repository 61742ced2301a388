/* Functions shared by all kernels: conversions between float and the types of rows and pages, page-table lookup, rotations,
 * masks, and functions with which a warp loads a query row or stores an output row.
 */
#define FKV_R (FKV_H / FKV_G) /* query heads per KV head */
#define FKV_ROW_BYTES (FKV_ROW_TYPE == 0 ? 4 : 2)
#define FKV_SINK_PAGES ((FKV_SINKS + FKV_PAGE_TOKENS - 1) / FKV_PAGE_TOKENS)

/* Returns the channel at position p of the channel order of a KV head. Only sealed pages with calibrated keys have such an order
 * (the parameter `order`, see fkv_kernel_orders()); in all other pages, positions and channels are the same. */
#undef FKV_CHANNEL_AT
#if FKV_CALIBRATED && FKV_K_SEALED
#define FKV_CHANNEL_AT(p) order[2 + (p)]
#else
#define FKV_CHANNEL_AT(p) (p)
#endif

FKV_FN float fkv_row_value(FKV_DEVICE const void *rows, fkv_u64 i) {
#if FKV_ROW_TYPE == 0
    return ((FKV_DEVICE const float *)rows)[i];
#elif FKV_ROW_TYPE == 1
    return fkv_f16_to_f32(((FKV_DEVICE const fkv_u16 *)rows)[i]);
#else
    return fkv_float_of((fkv_u32)((FKV_DEVICE const fkv_u16 *)rows)[i] << 16);
#endif
}

/* Converts x to bfloat16, rounding to nearest, ties to even. NaN stays NaN. */
FKV_FN fkv_u32 fkv_bf16_bits(float x) {
    fkv_u32 u = fkv_bits_of(x);
    fkv_u32 rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : rounded;
}

FKV_FN void fkv_put_row_value(FKV_DEVICE void *rows, fkv_u64 i, float x) {
#if FKV_ROW_TYPE == 0
    ((FKV_DEVICE float *)rows)[i] = x;
#elif FKV_ROW_TYPE == 1
    ((FKV_DEVICE fkv_u16 *)rows)[i] = (fkv_u16)fkv_f32_to_f16(x);
#else
    ((FKV_DEVICE fkv_u16 *)rows)[i] = (fkv_u16)fkv_bf16_bits(x);
#endif
}

/* Converts the bits of a page value (float16 or bfloat16) to float. */
FKV_FN float fkv_page_value(fkv_u32 bits) {
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

/* The next two functions return 0x80000000 if the rotation of K or V, respectively, negates channel d, and 0 otherwise. */
FKV_FN fkv_u32 fkv_k_sign(fkv_u32 d) {
    const fkv_u32 signs[] = {FKV_K_SIGNS};
    return FKV_ROTATE_K ? signs[FKV_ROTATE_K ? d / 32 : 0] >> d % 32 << 31 : 0;
}
FKV_FN fkv_u32 fkv_v_sign(fkv_u32 d) {
    const fkv_u32 signs[] = {FKV_V_SIGNS};
    return FKV_ROTATE_V ? signs[FKV_ROTATE_V ? d / 32 : 0] >> d % 32 << 31 : 0;
}

/* Number of channels in a rotation block: the largest power of two that divides D. The rotation is scaled by 1 / sqrt(channels
 * per block), as in src/codec/rotation.c. */
#define FKV_ROTATION_BLOCK (FKV_D & (~FKV_D + 1))
FKV_FN float fkv_rotation_norm() {
    float norm = 1.0f;
    int block = FKV_ROTATION_BLOCK;
    for (; block >= 4; block /= 4) norm *= 0.5f;
    return block == 2 ? norm * fkv_float_of(0x3f3504f3u) : norm;
}

/* The next two functions return the number of the pool page that stores logical page `logical` of a sequence. fkv_page_at()
 * refers to the layer's own pool, and fkv_open_page_at() to the open pool. */
FKV_FN fkv_u32 fkv_page_at(FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const fkv_u32 *row, fkv_u32 logical) {
    fkv_u32 n_fixed = row[FKV_ROW_N_FIXED];
    fkv_u32 at = logical < n_fixed ? logical : n_fixed + (logical - n_fixed) % row[FKV_ROW_N_RING];
    return table[row[FKV_ROW_PAGES] + at];
}
FKV_FN fkv_u32 fkv_open_page_at(FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const fkv_u32 *row, fkv_u32 logical) {
    fkv_u32 n_fixed = row[FKV_ROW_OPEN_FIXED];
    fkv_u32 at = logical < n_fixed ? logical : n_fixed + (logical - n_fixed) % row[FKV_ROW_OPEN_RING];
    return table[row[FKV_ROW_OPEN_PAGES] + at];
}

/* Returns true if a query in logical page `own` of a sealed layer reads page `logical` from the open pool. The rule must be the
 * same as in src/attn/attn.h. */
FKV_FN bool fkv_reads_open(fkv_u32 own, fkv_u32 logical) { return logical == 0 || logical >= own - own % FKV_OPEN_SPAN; }

/* Returns the index, in the array of partial results, of the {max, total} entry of one query row and one split. The entries
 * follow the output sums of all splits, and the entries of one row are adjacent. `row` is the index of the row within its work
 * item, counted over all KV heads. */
FKV_FN fkv_u64 fkv_stats_at(FKV_DEVICE const fkv_u32 *table, fkv_u32 row, fkv_u32 split) {
    fkv_u64 n_splits = table[FKV_STEP_N_SPLITS];
    fkv_u64 rows = (fkv_u64)FKV_H * table[FKV_STEP_ITEM_QUERIES];
    return n_splits * rows * FKV_D + (row * n_splits + split) * 2;
}

/* The next two functions return the codebook value of a K or V code, before multiplication by the row's scale. */
FKV_FN float fkv_k_book(fkv_u32 code) {
    const int values[] = {FKV_K_BOOK_VALUES};
    return (float)values[code];
}
FKV_FN float fkv_v_book(fkv_u32 code) {
    const int values[] = {FKV_V_BOOK_VALUES};
    return (float)values[code];
}

/* Returns the code of channel d in a row. 3-bit codes are stored in two planes: one with the low two bits and one with the high
 * bit of each code (see src/codec/turbo.h). */
FKV_FN fkv_u32 fkv_book_code(FKV_DEVICE const fkv_u8 *codes, fkv_u32 d, fkv_u32 bits) {
    fkv_u32 low = bits == 4 ? 4 : 2;
    fkv_u32 code = (fkv_u32)codes[d * low / 8] >> (d * low % 8) & ((1u << low) - 1u);
    return bits == 3 ? code | ((fkv_u32)codes[FKV_D / 4 + d / 8] >> d % 8 & 1u) << 2 : code;
}

/* Decodes channel d of a row of affine codes to float. */
FKV_FN float fkv_value_at(FKV_DEVICE const fkv_u8 *codes, FKV_DEVICE const fkv_u8 *scales, FKV_DEVICE const fkv_u8 *biases,
                          fkv_u32 d, fkv_u32 bits, fkv_u32 group) {
    if (bits == 16) return fkv_page_value(((FKV_DEVICE const fkv_u16 *)codes)[d]);
    fkv_u32 of_byte = 8 / bits;
    fkv_u32 code = (fkv_u32)codes[d / of_byte] >> (d % of_byte * bits) & ((1u << bits) - 1u);
    float scale = fkv_page_value(((FKV_DEVICE const fkv_u16 *)scales)[d / group]);
    return fkv_fma(scale, (float)code, fkv_page_value(((FKV_DEVICE const fkv_u16 *)biases)[d / group]));
}

/* Returns the level of a sealed V code without its sign bit, as a multiple of norm / 128. */
FKV_FN float fkv_v_level(fkv_u32 size) {
    const int levels[] = {FKV_V_LEVELS};
    return (float)levels[size];
}

/* Returns the levels of the four V codes (without sign bits) that start at code `first`, as the four bytes of a word. */
FKV_FN fkv_u32 fkv_v_levels(int first) {
    const fkv_u32 levels[] = {FKV_V_LEVELS};
    return levels[first] | levels[first + 1] << 8 | levels[first + 2] << 16 | levels[first + 3] << 24;
}

/* The next two functions decode channel d of K or V from one slot of a block that stores rows. */
#if !FKV_K_SEALED
FKV_FN float fkv_k_at(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
    FKV_DEVICE const fkv_u8 *codes = block + FKV_K_CODES + slot * FKV_K_ROW_BYTES;
    FKV_DEVICE const fkv_u8 *scales = block + FKV_K_SCALES + slot * (FKV_D / FKV_K_GROUP * 2);
    FKV_DEVICE const fkv_u8 *biases = block + FKV_K_BIASES + slot * (FKV_D / FKV_K_GROUP * 2);
    if (FKV_K_BOOK)
        return fkv_page_value(((FKV_DEVICE const fkv_u16 *)scales)[0]) * fkv_k_book(fkv_book_code(codes, d, FKV_K_BITS));
    return fkv_value_at(codes, scales, biases, d, FKV_K_BITS, FKV_K_GROUP);
}
#endif

#if !FKV_V_SEALED
FKV_FN float fkv_v_at(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
    FKV_DEVICE const fkv_u8 *codes = block + FKV_V_CODES + slot * FKV_V_ROW_BYTES;
    FKV_DEVICE const fkv_u8 *scales = block + FKV_V_SCALES + slot * (FKV_D / FKV_V_GROUP * 2);
    FKV_DEVICE const fkv_u8 *biases = block + FKV_V_BIASES + slot * (FKV_D / FKV_V_GROUP * 2);
    if (FKV_V_BOOK)
        return fkv_page_value(((FKV_DEVICE const fkv_u16 *)scales)[0]) * fkv_v_book(fkv_book_code(codes, d, FKV_V_BITS));
    return fkv_value_at(codes, scales, biases, d, FKV_V_BITS, FKV_V_GROUP);
}
#endif

/* Returns true if `token` is visible to the query at `position`. */
FKV_FN bool fkv_is_visible(fkv_u32 position, fkv_u32 token) {
#if FKV_WINDOW == 0
    return token <= position;
#else
    return token <= position && (token + 1 < FKV_SINKS + 1 || position - token < FKV_WINDOW);
#endif
}

#define FKV_NO_SCORE fkv_float_of(0xff800000u) /* minus infinity, the score of a masked key */

FKV_FN bool fkv_is_finite(float x) { return (fkv_bits_of(x) & 0x7f800000u) != 0x7f800000u; }

/* If the layer has a soft cap, returns cap * tanh(x / cap); otherwise returns x. Both x and the result are scores for a base-2
 * softmax, which computes weights as 2^score.
 *
 * Scores that are small compared with the cap use a polynomial (tanhf from Cephes), because the exponential form loses precision
 * by cancellation when the cap is large. Caps below 1e-30 are treated as 1e-30 (all weights are then exactly 1) and caps above
 * 1e38 as 1e38, so that both cap and 1 / cap stay within the range of a float. NaN stays NaN. */
FKV_FN float fkv_cap(float x) {
    if (FKV_SOFTCAP_BITS == 0) return x;
    const float given = fkv_float_of(FKV_SOFTCAP_BITS);
    const float cap = (given < 1e-30f ? 1e-30f : given > 1e38f ? 1e38f : given) * 1.44269504f;
    float y = fkv_mul(x, 1.0f / cap);
    float z = fkv_mul(y, y);
    float p = fkv_fma(z, -5.70498872745e-3f, 2.06390887954e-2f);
    p = fkv_fma(z, p, -5.37397155531e-2f);
    p = fkv_fma(z, p, 1.33314422036e-1f);
    p = fkv_fma(z, p, -3.33332819422e-1f);
    float small = fkv_fma(fkv_mul(x, z), p, x);
    float large = fkv_fma(-2.0f, fkv_reciprocal(fkv_exp2(fkv_mul(y, 2.88539008f)) + 1.0f), 1.0f);
    return fkv_abs(y) < 0.625f ? small : fkv_mul(large, cap);
}

/* Returns the softmax denominator of a row: the total weight plus the weight of the head's learned sink. max: the
 * row's largest score, for a base-2 softmax. */
FKV_FN float fkv_denominator(float total, float max, FKV_DEVICE const float *sink_logits, fkv_u32 q_head) {
    return FKV_SINK_LOGITS ? total + fkv_exp2(fkv_fma(sink_logits[q_head], 1.44269504f, -max)) : total;
}

/* Applies the butterfly stages of the Hadamard transform to a row (see docs/page_format.md). Called by one warp. */
FKV_FN void fkv_butterfly_row(fkv_u32 lane, FKV_SHARED float *row) {
    /* the loop is unrolled, so that every division by h has a constant divisor */
    FKV_UNROLL
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        for (fkv_u32 i = lane; i < FKV_D / 2; i += 32) {
            fkv_u32 d = i / h * 2 * h + i % h;
            float a = row[d];
            float b = row[d + h];
            row[d] = a + b;
            row[d + h] = a - b;
        }
        fkv_sync_warp();
    }
    for (fkv_u32 d = lane; d < FKV_D; d += 32) row[d] *= fkv_rotation_norm();
    fkv_sync_warp();
}

/* Loads one query row, scales it for a base-2 softmax and rotates it like the keys. For sealed pages with calibrated keys, which
 * are never rotated, stores the row in channel order. Called by one warp. */
FKV_FN void fkv_load_query(fkv_u32 lane, FKV_DEVICE const void *q, fkv_u64 from, FKV_SHARED float *row FKV_ORDER) {
    const float scale = fkv_float_of(FKV_SCALE_BITS) * 1.44269504f;
    for (fkv_u32 d = lane; d < FKV_D; d += 32)
        row[d] = fkv_float_of(fkv_bits_of(fkv_row_value(q, from + FKV_CHANNEL_AT(d)) * scale) ^ fkv_k_sign(d));
    fkv_sync_warp();
#if FKV_ROTATE_K
    fkv_butterfly_row(lane, row);
#endif
}

/* Multiplies an output row by a factor, undoes the rotation of V and stores the row in `out`. Called by one warp. */
FKV_FN void fkv_store_row(fkv_u32 lane, FKV_SHARED float *row, float factor, FKV_DEVICE void *out, fkv_u64 to) {
    for (fkv_u32 d = lane; d < FKV_D; d += 32) row[d] *= factor;
    fkv_sync_warp();
#if FKV_ROTATE_V
    fkv_butterfly_row(lane, row);
#endif
    for (fkv_u32 d = lane; d < FKV_D; d += 32) fkv_put_row_value(out, to + d, fkv_float_of(fkv_bits_of(row[d]) ^ fkv_v_sign(d)));
}
