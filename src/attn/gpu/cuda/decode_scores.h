/* Part of the decode kernel in decode_mma.h: computes the scores of a tile.
 *
 * The codes are the B operand of an integer matrix product, with one token in each of 8 columns. 8-bit codes are used as stored;
 * 4- and 2-bit codes are expanded to bytes with shifts and masks, and codebook codes with byte permutes (decode_codebook.h). A
 * thread loads the keys of the tokens that dc_key_token() assigns to it. It receives the scores of the tokens that dc_own_token()
 * assigns to it, for row r or for rows r and r + 8:
 *
 *   score = 256 * step * sum_g(scale * (256 * high + low)) + step * sum_g(scale * rest) + sum_g(bias * sum(q))
 *
 * In this formula, sum_g is the sum over scale groups, `step` is the quantization step of the query row, sum(q) is the sum of the
 * query values in a group, and high, low and rest are the dot products of the codes with the three bytes of the query values.
 * With at most four rows, each row is duplicated. Lanes with row index r hold the dot products with the high and low bytes, and
 * lanes with row index r + 4 hold the dot products with the `rest` bytes. A shuffle adds the two parts of the score.
 */
/* Query operands in shared memory, as an array of words. */
typedef FKV_SHARED const fkv_u32 *dc_operands;

FKV_FN fkv_words4 dc_operand(dc_operands operands, int tile, int step, fkv_u32 lane) {
    return fkv_shared16(operands + ((fkv_u32)(tile * dc_k::steps + step) * 32 + lane) * 4);
}

FKV_FN dc_operands dc_first_operands(FKV_SHARED const fkv_u32 *shared, dc_place at) {
    return shared + at.slab * DC_OPERAND_WORDS;
}

FKV_FN void dc_load_keys(dc_keys &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 token = slot + dc_key_token(at.lane / 4, 0);
    const fkv_u8 *codes =
        block + FKV_K_CODES + token * dc_k::row_bytes + at.slab * dc_k::slab_bytes + at.lane % 4 * dc_k::load_bytes;
    FKV_UNROLL
    for (int b = 0; b < DC_RUN; b++) {
        FKV_UNROLL
        for (int u = 0; u < dc_k::units; u++)
            dc_stream(to.codes[b][u], codes + dc_key_token(0, b) * dc_k::row_bytes + u * 4 * dc_k::load_bytes, dc_k::load_bytes);
    }
    if constexpr (dc_k::bits == 3) { /* with 3-bit codes, a thread loads all its channels as one unit */
        const fkv_u8 *high = block + FKV_K_CODES + token * dc_k::row_bytes + dc_k::high_plane +
                             (at.slab * dc_k::slab_bytes + at.lane % 4 * dc_k::load_bytes) / 2;
        FKV_UNROLL
        for (int b = 0; b < DC_RUN; b++)
            dc_stream(to.codes[b][0] + dc_k::high_word, high + dc_key_token(0, b) * dc_k::row_bytes, dc_k::load_bytes / 2);
    }
}

/* Expands packed key codes of one token to two B operand words for the matrix product with index `step`. `unit` points to the
 * codes that the thread loads at once. A 4-bit codebook code is the sum of two terms, and each term has its own two words. */
FKV_FN void dc_key_operand(const fkv_u32 *unit, int step, fkv_u32 (&to)[dc_k::terms][2]) {
    fkv_u32 &low = to[0][0];
    fkv_u32 &high = to[0][1];
    if constexpr (dc_k::is_book) {
        dc_book_operand(unit, step, to);
    } else if constexpr (dc_k::bits >= 8) {
        low = unit[2 * step];
        high = unit[2 * step + 1];
    } else if constexpr (dc_k::bits == 4) {
        low = unit[step] & 0x0f0f0f0fu;
        high = unit[step] >> 4 & 0x0f0f0f0fu;
    } else if constexpr (dc_k::load_bytes >= 4) {
        fkv_u32 x = unit[step / 2] >> 4 * (step % 2);
        low = x & 0x03030303u;
        high = x >> 2 & 0x03030303u;
    } else {
        fkv_u32 x = unit[0] | unit[0] << 14;
        low = x & 0x03030303u;
        high = x >> 4 & 0x03030303u;
    }
}

/* Accumulator type of the dot products of queries and keys: int for codes, float for 16-bit keys. */
template <int BITS> struct dc_product {
    typedef int type;
};
template <> struct dc_product<16> {
    typedef float type;
};
typedef dc_product<dc_k::bits>::type dc_products[DC_RUN][dc_k::row_tiles][4];

FKV_FN void dc_multiply(int *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    if (dc_k::is_book)
        fkv_mma_signed(c, a, b0, b1, c);
    else
        fkv_mma_bytes(c, a, b0, b1, c);
}
FKV_FN void dc_multiply(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    if (FKV_PAGE_BF16)
        fkv_mma_bf16(c, a, b0, b1);
    else
        fkv_mma_f16(c, a, b0, b1);
}

/* Computes the dot products of queries and codes over the channels of one scale group. */
FKV_FN void dc_multiply_group(const dc_keys &k, const dc_operands &operands, int group, fkv_u32 lane, dc_products &products) {
    FKV_UNROLL
    for (int i = 0; i < DC_RUN * dc_k::row_tiles * 4; i++)
        products[i / (4 * dc_k::row_tiles)][i / 4 % dc_k::row_tiles][i % 4] = 0;
    FKV_UNROLL
    for (int s = 0; s < dc_k::group_units * dc_k::unit_steps; s++) {
        int unit = group * dc_k::group_units + s / dc_k::unit_steps;
        int step_of_slab = group * (dc_k::steps / dc_k::groups) + s;
        FKV_UNROLL
        for (int n = 0; n < dc_k::row_tiles; n++) {
            fkv_words4 q = dc_operand(operands, n, step_of_slab, lane);
            FKV_UNROLL
            for (int b = 0; b < DC_RUN; b++) {
                fkv_u32 keys[dc_k::terms][2];
                dc_key_operand(k.codes[b][unit], s % dc_k::unit_steps, keys);
                FKV_UNROLL
                for (int t = 0; t < dc_k::terms; t++) dc_multiply(products[b][n], q.w, keys[t][0], keys[t][1]);
            }
        }
    }
}

/* Returns the offset, in floats, of the scales of the i-th token that thread c handles. `n` is the number of floats per token. */
FKV_FN fkv_u32 dc_scales_at(fkv_u32 c, fkv_u32 i, fkv_u32 n) { return c * (DC_OWN_TOKENS * n + 4) + i * n; }

/* The three terms of the scores of a tile, before they are scaled and added: dot products with the high and low query bytes, dot
 * products with the rest bytes, and bias terms. */
struct dc_score_parts {
    dc_scores scores; /* dot products with the high and low bytes, multiplied by K's scales */
    dc_scores rests;
    dc_scores biases;
};

FKV_FN void dc_fold_group(const dc_products &products, FKV_SHARED const float *scales, const dc_rows &rows, int group,
                          fkv_u32 lane, dc_score_parts &to) {
    constexpr int rest_tile = dc_k::row_tiles - 1;
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_TOKENS; i++) {
        int a = i / DC_RUN;
        int b = i % DC_RUN;
        FKV_SHARED const float *of_token = scales + dc_scales_at(lane % 4, (fkv_u32)i, dc_k::scale_floats);
        float scale = of_token[group];
        float bias = of_token[dc_k::scale_floats - dc_k::groups + group];
        FKV_UNROLL
        for (int n = 0; n < DC_OWN_ROWS; n++) {
            to.scores[n][i] = fkv_fma(scale, (float)(products[b][n][a] * 256 + products[b][n][2 + a]), to.scores[n][i]);
            if constexpr (!DC_DUPLICATED)
                to.rests[n][i] = fkv_fma(scale, (float)products[b][rest_tile][2 * n + a], to.rests[n][i]);
            if constexpr (!dc_k::is_book) to.biases[n][i] = fkv_fma(bias, rows.query_sum[n][group], to.biases[n][i]);
        }
    }
}

/* Computes the three score terms over the channels of one slab (the channels of this warp). score[n][i] belongs to the thread's
 * n-th row and i-th token. */
FKV_FN void dc_tile_scores(const dc_keys &k, const dc_operands &operands, FKV_SHARED const float *scales, const dc_rows &rows,
                           fkv_u32 lane, dc_scores &score) {
    dc_score_parts parts;
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_ROWS * DC_OWN_TOKENS; i++) {
        parts.scores[i / DC_OWN_TOKENS][i % DC_OWN_TOKENS] = 0.0f;
        parts.rests[i / DC_OWN_TOKENS][i % DC_OWN_TOKENS] = 0.0f;
        parts.biases[i / DC_OWN_TOKENS][i % DC_OWN_TOKENS] = 0.0f;
    }
    FKV_UNROLL
    for (int g = 0; g < dc_k::groups; g++) {
        dc_products products;
        dc_multiply_group(k, operands, g, lane, products);
        if constexpr (dc_k::bits < 16) {
            dc_fold_group(products, scales, rows, g, lane, parts);
        } else {
            FKV_UNROLL
            for (int i = 0; i < DC_OWN_ROWS * DC_OWN_TOKENS; i++) {
                int n = i / DC_OWN_TOKENS;
                int t = i % DC_OWN_TOKENS;
                parts.scores[n][t] = products[t % DC_RUN][n][t / DC_RUN];
                parts.rests[n][t] = products[t % DC_RUN][n][2 + t / DC_RUN];
            }
        }
    }
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_ROWS * DC_OWN_TOKENS; i++) {
        int n = i / DC_OWN_TOKENS;
        int t = i % DC_OWN_TOKENS;
        float x = fkv_fma(parts.scores[n][t], rows.step[n][0], parts.biases[n][t]);
        score[n][t] = DC_DUPLICATED ? x + fkv_shuffle_xor(x, 16) : x + fkv_mul(parts.rests[n][t], rows.step[n][1]);
    }
}
