/* Part of the decode kernel in decode_mma.h: loads the scales of a tile, and computes the softmax and the weights of the tile.
 *
 * Lane i converts the scales of token i to float and stores them in shared memory, from which all lanes of the warp read them.
 * With at most four query rows, each row is duplicated: columns r and r + 4 of the value product belong to the same row. The two
 * copies handle alternating groups of V scales, so that no column is idle: column r handles groups r / 4, r / 4 + 2, and so on.
 */
/* ---- scales ---- */

FKV_FN void dc_load_scales(dc_scales &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 token = slot + at.lane % DC_TILE;
    fkv_u32 row = token * DC_SLABS + at.slab;
    if constexpr (dc_k::is_book) {
        dc_stream(to.k[0], block + FKV_K_SCALES + token * 2, 2);
    } else if constexpr (dc_k::bits < 16) {
        dc_stream(to.k[0], block + FKV_K_SCALES + row * (dc_k::groups * 2), dc_k::groups * 2);
        dc_stream(to.k[1], block + FKV_K_BIASES + row * (dc_k::groups * 2), dc_k::groups * 2);
    }
    if constexpr (dc_v::is_book) {
        dc_stream(to.v[0], block + FKV_V_SCALES + token * 2, 2);
    } else if constexpr (dc_v::bits < 16) {
        dc_stream(to.v[0], block + FKV_V_SCALES + row * (dc_v::groups * 2), dc_v::groups * 2);
        dc_stream(to.v[1], block + FKV_V_BIASES + row * (dc_v::groups * 2), dc_v::groups * 2);
    }
}

FKV_FN float dc_scale_of(const fkv_u32 *words, int g) {
    return fkv_page_value(g % 2 == 0 ? words[g / 2] & 0xffffu : words[g / 2] >> 16);
}

/* Stores the scales of a tile in the warp's shared memory. For each scale group, `bits` receives the largest magnitude of a V
 * scale in the tile, as the bit pattern of a float. */
FKV_FN void dc_share_scales(const dc_scales &from, fkv_u32 lane, FKV_SHARED float *scales, fkv_u32 (&bits)[dc_v::groups]) {
    dc_owner owner = dc_owner_of(lane);
    fkv_sync_warp(); /* waits until all lanes have read the previous tile's scales */
    if constexpr (dc_k::bits < 16) {
        if (lane < DC_TILE) {
            FKV_SHARED float *k = scales + dc_scales_at(owner.c, owner.i, dc_k::scale_floats);
            FKV_UNROLL
            for (int g = 0; g < dc_k::groups; g++) {
                k[g] = dc_scale_of(from.k[0], g);
                if constexpr (!dc_k::is_book) k[dc_k::groups + g] = dc_scale_of(from.k[1], g);
            }
        }
    }
    if constexpr (dc_v::bits < 16) {
        FKV_SHARED float *v = scales + DC_AT_V_SCALES + dc_scales_at(owner.c, owner.i, dc_v::scale_floats);
        FKV_UNROLL
        for (int g = 0; g < dc_v::groups; g++) {
            float scale = dc_scale_of(from.v[0], g) * (float)dc_v::unit;
            float bias = dc_v::is_book ? 0.0f : dc_scale_of(from.v[1], g);
            if (lane < DC_TILE) {
                v[dc_v::line_floats * g] = scale;
                if constexpr (!dc_v::is_book) v[2 * g + 1] = fkv_fma(scale, dc_v::middle, bias);
            }
            bits[g] = fkv_warp_max_bits(fkv_bits_of(scale) & 0x7fffffffu);
        }
    }
    fkv_sync_warp();
}

/* Parameters of one token in one scale group of V: the scale, and the value of the middle code, which is bias + scale * middle
 * code. For codebook codes, both fields are the scale, and no bias is added. */
struct dc_line {
    float scale;
    float middle;
};

FKV_FN dc_line dc_value_line(FKV_SHARED const float *scales, fkv_u32 lane, int i, int o) {
    if constexpr (dc_v::bits == 16) {
        return {1.0f, 0.0f};
    } else {
        FKV_SHARED const float *of_token = scales + DC_AT_V_SCALES + dc_scales_at(lane % 4, (fkv_u32)i, dc_v::scale_floats);
        fkv_u32 group = DC_DUPLICATED && dc_v::groups > 1 ? 2 * (fkv_u32)o + lane / 16 : (fkv_u32)o;
        return {of_token[dc_v::line_floats * group], of_token[dc_v::line_floats * (group + 1) - 1]};
    }
}

/* ---- masks ----
 *
 * A masked token has p = 0 and must add nothing, regardless of its stored bytes. Because 0 times NaN is NaN, non-finite values in
 * a partly masked tile are replaced with 0 before the matrix product, and the results of rows to which these values are visible
 * are set to NaN separately. */

/* Replaces non-finite scales and biases of V with 0. The sum bias + scale * middle code is finite only if both the scale and the
 * bias are finite. */
FKV_FN void dc_clear_nonfinite_lines(FKV_SHARED float *scales, const dc_rows &rows, fkv_u32 token, fkv_u32 lane,
                                     dc_state &state) {
    bool any = false;
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_TOKENS * dc_v::own_groups; i++) {
        int o = i % dc_v::own_groups;
        bool finite = fkv_is_finite(dc_value_line(scales, lane, i / dc_v::own_groups, o).middle);
        any = any || !finite;
        FKV_UNROLL
        for (int n = 0; n < DC_OWN_ROWS; n++)
            if (!finite && fkv_is_visible(rows.position[n], token + dc_own_token(0, i / dc_v::own_groups)))
                state.bias[n][o] = fkv_float_of(DC_NAN);
    }
    if (!fkv_any(any)) return;
    fkv_sync_warp(); /* waits until all lanes have read the scales */
    dc_owner owner = dc_owner_of(lane);
    FKV_SHARED float *own = scales + DC_AT_V_SCALES + dc_scales_at(owner.c, owner.i, dc_v::scale_floats);
    FKV_UNROLL
    for (int g = 0; g < dc_v::groups; g++) {
        FKV_SHARED float *line = own + dc_v::line_floats * g;
        if (lane < DC_TILE && !fkv_is_finite(line[dc_v::line_floats - 1])) line[0] = line[dc_v::line_floats - 1] = 0.0f;
    }
    fkv_sync_warp();
}

/* Replaces non-finite 16-bit values of V with 0 and sets the scores of the affected tokens to NaN. For rows in which such a token
 * is masked, dc_mask() then overwrites these scores. */
FKV_FN void dc_clear_nonfinite_values(dc_values &v, dc_scores &score) {
    constexpr fkv_u32 exponent = FKV_PAGE_BF16 ? 0x7f80u : 0x7c00u;
    fkv_u32 odd = 0; /* bitmask of the thread's tokens with non-finite values */
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_TOKENS * dc_v::units * dc_v::words; i++) {
        int token = i / (dc_v::units * dc_v::words);
        fkv_u32 word = v.codes[token][i / dc_v::words % dc_v::units][i % dc_v::words];
        if ((word & exponent) == exponent || (word >> 16 & exponent) == exponent) odd |= 1u << token;
    }
    if (!fkv_any(odd != 0)) return;
    FKV_UNROLL
    for (fkv_u32 h = 4; h < 32; h *= 2) odd |= fkv_shuffle_xor_bits(odd, h);
    FKV_UNROLL
    for (int token = 0; token < DC_OWN_TOKENS; token++) {
        if ((odd >> token & 1) == 0) continue;
        FKV_UNROLL
        for (int n = 0; n < DC_OWN_ROWS; n++) score[n][token] = fkv_float_of(DC_NAN);
        FKV_UNROLL
        for (int w = 0; w < dc_v::units * dc_v::words; w++) v.codes[token][w / dc_v::words][w % dc_v::words] = 0;
    }
}

/* Applies the attention mask to the scores of a tile. `token` is the position of the thread's first token. */
FKV_FN void dc_mask(dc_values &v, FKV_SHARED float *scales, const dc_rows &rows, fkv_u32 token, fkv_u32 lane, dc_scores &score,
                    dc_state &state) {
    if constexpr (dc_v::bits == 16)
        dc_clear_nonfinite_values(v, score);
    else
        dc_clear_nonfinite_lines(scales, rows, token, lane, state);
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_ROWS * DC_OWN_TOKENS; i++)
        if (!fkv_is_visible(rows.position[i / DC_OWN_TOKENS], token + dc_own_token(0, i % DC_OWN_TOKENS)))
            score[i / DC_OWN_TOKENS][i % DC_OWN_TOKENS] = dc_minus_infinity();
}

/* ---- softmax ---- */

/* New maxima of the scores and scale exponents, including the current tile, for the rows that the thread handles. */
struct dc_growth {
    float largest[DC_OWN_ROWS];
    fkv_u32 exponent[DC_OWN_ROWS][dc_v::own_groups];
};

/* Returns the largest V scale among the tokens that are visible to row n, as the bit pattern of a float, for the o-th scale group
 * that the thread handles. `tile_bits` holds the maximum over all tokens of the tile. */
FKV_FN fkv_u32 dc_scale_bits(FKV_SHARED const float *scales, const fkv_u32 (&tile_bits)[dc_v::groups], const dc_rows &rows,
                             fkv_u32 token, bool whole, int n, int o, fkv_u32 lane) {
    if (whole) {
        if constexpr (DC_DUPLICATED && dc_v::groups > 1)
            return lane < 16 ? tile_bits[2 * o] : tile_bits[2 * o + 1];
        else
            return tile_bits[o];
    }
    fkv_u32 bits = 0;
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_TOKENS; i++) {
        float scale = dc_value_line(scales, lane, i, o).scale;
        bool counts = fkv_is_visible(rows.position[n], token + dc_own_token(0, i));
        bits = fkv_max_bits(bits, counts ? fkv_bits_of(scale) & 0x7fffffffu : 0u);
    }
    return bits;
}

/* Rescales the accumulators after the maximum of a row or the scale exponent of a group has increased. */
FKV_FN void dc_rescale(dc_state &state, const dc_growth &to, fkv_u32 lane) {
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        float shrink = state.max[n] == to.largest[n] ? 1.0f : fkv_exp2(state.max[n] - to.largest[n]);
        state.max[n] = to.largest[n];
        state.total[n] = fkv_mul(state.total[n], shrink);
        FKV_UNROLL
        for (int o = 0; o < dc_v::own_groups; o++) {
            fkv_u32 steps = to.exponent[n][o] - state.exponent[n][o];
            float factor = shrink * fkv_float_of((steps < 127 ? 127 - steps : 0) << 23);
            state.exponent[n][o] = to.exponent[n][o];
            state.bias[n][o] *= shrink;
            /* the factors of column r are in lane 4 * r, and this thread accumulates columns 2 * c and 2 * c + 1 */
            float even = fkv_shuffle(factor, lane % 4 * 8);
            float odd = fkv_shuffle(factor, lane % 4 * 8 + 4);
            FKV_UNROLL
            for (int t = 0; t < dc_v::tiles; t++) {
                if (o != dc_v::group_of_tile(t)) continue;
                state.sums[t][n][0] *= even;
                state.sums[t][n][1] *= odd;
                state.sums[t][n][2] *= even;
                state.sums[t][n][3] *= odd;
            }
        }
    }
}

/* Updates the maximum score of each row and the scale exponent of each group with the scores and scales of a tile. */
FKV_FN void dc_update_max(const dc_scores &score, FKV_SHARED const float *scales, const fkv_u32 (&tile_bits)[dc_v::groups],
                          const dc_rows &rows, fkv_u32 token, bool whole, fkv_u32 lane, dc_state &state) {
    dc_growth to;
    bool grows = false;
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        to.largest[n] = state.max[n];
        FKV_UNROLL
        for (int i = 0; i < DC_OWN_TOKENS; i++) to.largest[n] = fkv_max(to.largest[n], score[n][i]);
        grows = grows || to.largest[n] > state.max[n];
        FKV_UNROLL
        for (int o = 0; o < dc_v::own_groups; o++) {
            to.exponent[n][o] = state.exponent[n][o];
            if constexpr (dc_v::bits < 16) {
                fkv_u32 bits = dc_scale_bits(scales, tile_bits, rows, token, whole, n, o, lane);
                to.exponent[n][o] = fkv_max_bits(to.exponent[n][o], bits >> 23);
                grows = grows || to.exponent[n][o] > state.exponent[n][o];
            }
        }
    }
    if (!fkv_any(grows)) return;
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 4; h *= 2) {
            to.largest[n] = fkv_max(to.largest[n], fkv_shuffle_xor(to.largest[n], h));
            FKV_UNROLL
            for (int o = 0; o < dc_v::own_groups; o++)
                to.exponent[n][o] = fkv_max_bits(to.exponent[n][o], fkv_shuffle_xor_bits(to.exponent[n][o], h));
        }
    }
    dc_rescale(state, to, lane);
}

/* Converts the scores of a tile to weights (softmax weight times V scale). `rests` receives the rounding residue of bfloat16
 * weights. */
FKV_FN void dc_weigh(const dc_scores &score, FKV_SHARED const float *scales, fkv_u32 lane, dc_state &state, dc_weights &weights,
                     dc_weights &rests) {
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        float max = state.max[n] == dc_minus_infinity() ? 0.0f : state.max[n];
        FKV_UNROLL
        for (int b = 0; b < DC_RUN; b++) {
            float near = fkv_exp2(score[n][b] - max);
            float far = fkv_exp2(score[n][DC_RUN + b] - max);
            state.total[n] += near;
            state.total[n] += far;
            if constexpr (dc_v::is_bf16) {
                float near_bf16 = fkv_float_of(fkv_bf16_bits(near) << 16);
                float far_bf16 = fkv_float_of(fkv_bf16_bits(far) << 16);
                weights[n][0][b] = fkv_pack_bf16(near_bf16, far_bf16);
                rests[n][0][b] = fkv_pack_bf16(near - near_bf16, far - far_bf16);
                continue;
            }
            FKV_UNROLL
            for (int o = 0; o < dc_v::own_groups; o++) {
                float unit = fkv_float_of((268u - state.exponent[n][o]) << 23);
                dc_line near_line = dc_value_line(scales, lane, b, o);
                dc_line far_line = dc_value_line(scales, lane, DC_RUN + b, o);
                weights[n][o][b] = fkv_pack_f16(near * unit * near_line.scale, far * unit * far_line.scale);
                if constexpr (!dc_v::is_book) {
                    state.bias[n][o] = fkv_fma(near, near_line.middle, state.bias[n][o]);
                    state.bias[n][o] = fkv_fma(far, far_line.middle, state.bias[n][o]);
                }
            }
        }
    }
}

/* Computes the softmax weights p of a tile and accumulates p * v. `base` is the position of the tile's first token. */
FKV_FN void dc_fold_tile(dc_values &v, FKV_SHARED float *scales, const fkv_u32 (&tile_bits)[dc_v::groups], dc_scores &score,
                         const dc_rows &rows, fkv_u32 base, fkv_u32 lane, dc_state &state) {
    fkv_u32 token = base + dc_own_token(lane % 4, 0); /* position of the thread's first token */
    bool whole = dc_is_whole(rows.first, rows.last, base, DC_TILE);
    if (FKV_SOFTCAP_BITS != 0) {
        FKV_UNROLL
        for (int i = 0; i < DC_OWN_ROWS * DC_OWN_TOKENS; i++)
            score[i / DC_OWN_TOKENS][i % DC_OWN_TOKENS] = fkv_cap(score[i / DC_OWN_TOKENS][i % DC_OWN_TOKENS]);
    }
    if (!whole) dc_mask(v, scales, rows, token, lane, score, state);
    dc_update_max(score, scales, tile_bits, rows, token, whole, lane, state);
    dc_weights weights;
    dc_weights rests;
    dc_weigh(score, scales, lane, state, weights, rests);
    dc_add_values(v, lane, weights, state.sums);
    if (dc_v::is_bf16) dc_add_values(v, lane, rests, state.sums);
}
