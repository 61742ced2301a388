/* Part of the decode kernel in decode_mma.h: multiplies the values of a tile by their weights and accumulates the products.
 *
 * The matrix product is out^T = V^T P^T. Its rows are 16 channels, its inner dimension is 16 tokens, and its columns are the
 * query rows of the work item. Codes are converted exactly to fp16, relative to the middle code (code - 128, code - 8 or code -
 * 2). Codebook codes are converted to levels (decode_codebook.h). The product of the softmax weight p and the scale is rounded to
 * fp16 in units of 2^(e - 14), where 2^e is an upper bound on all scales of the group so far. With this unit, both float16 and
 * bfloat16 scales stay in the range of fp16. The bias is added in float. A thread loads the values of the tokens whose scores it
 * holds, so its weights are already its part of the B operand.
 */
FKV_FN void dc_load_values(dc_values &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 token = slot + dc_own_token(at.lane % 4, 0);
    const fkv_u8 *codes =
        block + FKV_V_CODES + token * dc_v::row_bytes + at.slab * dc_v::slab_bytes + at.lane / 4 * dc_v::load_bytes;
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_TOKENS; i++) {
        FKV_UNROLL
        for (int u = 0; u < dc_v::units; u++)
            dc_stream(to.codes[i][u], codes + dc_own_token(0, i) * dc_v::row_bytes + u * 8 * dc_v::load_bytes, dc_v::load_bytes);
    }
    if constexpr (dc_v::bits == 3) { /* with 3-bit codes, a thread loads all its channels as one unit */
        const fkv_u8 *high = block + FKV_V_CODES + token * dc_v::row_bytes + dc_v::high_plane +
                             (at.slab * dc_v::slab_bytes + at.lane / 4 * dc_v::load_bytes) / 2;
        FKV_UNROLL
        for (int i = 0; i < DC_OWN_TOKENS; i++)
            dc_stream(to.codes[i][0] + dc_v::high_word, high + dc_own_token(0, i) * dc_v::row_bytes, dc_v::load_bytes / 2);
    }
}

/* Converts four channels of tokens a and b to fp16. A code is inserted into the low bits of the fp16 value 1024.0. An FMA then
 * scales the result and subtracts a constant, which leaves the code minus the middle code. Token a is in the lower 16 bits of
 * each result word, and token b in the upper 16 bits. The four channels occupy 8, 4, 2 or 1 bytes of each token. */
FKV_FN void dc_value_quad(const fkv_u32 *a, const fkv_u32 *b, int quad, fkv_u32 *to) {
    if constexpr (dc_v::is_book) {
        dc_book_quad(a, b, quad, to);
    } else if constexpr (dc_v::bits == 16) {
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            to[2 * i] = fkv_permute(a[2 * quad + i], b[2 * quad + i], 0x5410u);
            to[2 * i + 1] = fkv_permute(a[2 * quad + i], b[2 * quad + i], 0x7632u);
        }
    } else if constexpr (dc_v::bits == 8) {
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            fkv_u32 x = fkv_permute(a[quad], b[quad], i == 0 ? 0x5140u : 0x7362u); /* one byte of each token: a, b, a, b */
            to[2 * i] = fkv_fma_f16x2(fkv_permute(x, 0x64646464u, 0x4140u), 0x3c003c00u, 0xe480e480u); /* = code - 128 */
            to[2 * i + 1] = fkv_fma_f16x2(fkv_permute(x, 0x64646464u, 0x4342u), 0x3c003c00u, 0xe480e480u);
        }
    } else if constexpr (dc_v::bits == 4) {
        fkv_u32 x = fkv_permute(a[quad / 2], b[quad / 2], quad % 2 == 0 ? 0x5410u : 0x7632u);
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            fkv_u32 y = x >> 8 * i;
            to[2 * i] = fkv_fma_f16x2(fkv_mask_or(y, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe408e408u);     /* = code - 8 */
            to[2 * i + 1] = fkv_fma_f16x2(fkv_mask_or(y, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u); /* = code - 8 */
        }
    } else {
        fkv_u32 x = fkv_permute(a[quad / 4], b[quad / 4], quad % 4 < 2 ? 0x5410u : 0x7632u) >> 8 * (quad % 2);
        to[0] = fkv_fma_f16x2(fkv_mask_or(x, 0x00030003u, 0x64006400u), 0x3c003c00u, 0xe402e402u); /* = code - 2 */
        to[1] = fkv_fma_f16x2(fkv_mask_or(x, 0x000c000cu, 0x64006400u), 0x34003400u, 0xdc08dc08u); /* = code - 2 */
        to[2] = fkv_fma_f16x2(fkv_mask_or(x, 0x00300030u, 0x64006400u), 0x2c002c00u, 0xd420d420u); /* = code - 2 */
        to[3] = fkv_fma_f16x2(fkv_mask_or(x, 0x00c000c0u, 0x64006400u), 0x24002400u, 0xcc80cc80u); /* = code - 2 */
    }
}

/* Weights of a tile, stored as B operands for each of the thread's rows and scale groups. Word b holds the weights of the
 * thread's tokens b (lower 16 bits) and DC_RUN + b (upper 16 bits). */
typedef fkv_u32 dc_weights[DC_OWN_ROWS][dc_v::own_groups][DC_RUN];

FKV_FN void dc_add_values(const dc_values &v, fkv_u32, const dc_weights &weights, float (&sums)[dc_v::tiles][DC_OWN_ROWS][4]) {
    FKV_UNROLL
    for (int depth = 0; depth < DC_RUN / 2; depth++) {
        FKV_UNROLL
        for (int u = 0; u < dc_v::units; u++) {
            int o = dc_v::group_of_unit(u);
            FKV_UNROLL
            for (int quad = 0; quad < dc_v::quads; quad++) {
                fkv_u32 near[4];
                fkv_u32 far[4];
                dc_value_quad(v.codes[2 * depth][u], v.codes[DC_RUN + 2 * depth][u], quad, near);
                dc_value_quad(v.codes[2 * depth + 1][u], v.codes[DC_RUN + 2 * depth + 1][u], quad, far);
                FKV_UNROLL
                for (int t = 0; t < 2; t++) {
                    const fkv_u32 a[4] = {near[2 * t], near[2 * t + 1], far[2 * t], far[2 * t + 1]};
                    int tile = (u * dc_v::quads + quad) * 2 + t;
                    FKV_UNROLL
                    for (int n = 0; n < DC_OWN_ROWS; n++) {
                        if (dc_v::is_bf16)
                            fkv_mma_bf16(sums[tile][n], a, weights[n][o][2 * depth], weights[n][o][2 * depth + 1]);
                        else
                            fkv_mma_f16(sums[tile][n], a, weights[n][o][2 * depth], weights[n][o][2 * depth + 1]);
                    }
                }
            }
        }
    }
}
