/* Support for groups of eight query rows in decode_sealed.h. The rows of a group are the A operand of the matrix products.
 * Operand row r holds the high bytes of query row r, and operand row r + 8 holds the low bytes, so that thread (r, c) obtains
 * both dot products of row r. The codes of 8 tokens (K) or 8 channels (V) are the B operand. For row r, the thread holds the
 * scores of tokens 32 * p + 8 * c + i and the output sums of channels 32 * u + 8 * c + i. The thread's weights are already its
 * part of the A operand for V. */
/* The functions in this file have the same interface as the functions in sealed_rows4.h. Each thread computes its own part of the
 * operand, so no bytes are exchanged. */
constexpr int SD_MADE_UNITS = SD_UNITS;
FKV_FN fkv_u32 sd_made_row(fkv_u32 lane) { return lane / 4; }
FKV_FN fkv_u32 sd_made_line(fkv_u32 lane) { return lane % 4; }
FKV_FN float sd_to_made(float x, fkv_u32) { return x; }
FKV_FN void sd_put_bytes(sd_bytes bytes, int i, fkv_u32, sd_operand (&to)[SD_UNITS]) {
    to[i / 2][i % 2 * 2] = bytes.high;
    to[i / 2][i % 2 * 2 + 1] = bytes.low;
}

/* Builds the query operands of a page. `step` is the distance, in words, between the queries of consecutive groups of rows. */
FKV_FN void sd_enter_groups(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *queries, int step, fkv_u32 lane,
                            sd_queries &to) {
    sd_scaled<SD_MADE_UNITS> scaled;
    sd_scale_queries(lines, queries + sd_made_row(lane) * SD_QUERY_WORDS, step, sd_made_line(lane), scaled);
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        to.line[g] = sd_line_of<4>(scaled.largest[g], scaled.bias[g]);
        float inverse = sd_inverse(to.line[g].unit);
        FKV_UNROLL
        for (int i = 0; i < 2 * SD_MADE_UNITS; i++)
            sd_put_bytes(sd_bytes_of(scaled.x[g][i / 2] + i % 2 * 4, inverse), i, lane, to.operand[g]);
    }
}

FKV_FN void sd_score(sd_tile &tile, const sd_queries &queries, sd_scores &score) {
    const int none[4] = {};
    if (SD_K_AHEAD > 0) sd_take_keys(tile, 0);
    FKV_UNROLL
    for (int i = 0; i < 4 * SD_PARTS; i++) { /* the operand covers 8 tokens: tokens 4 * r + i of a part */
        if (i % 4 == 0) sd_take_keys(tile, i / 4 + SD_K_AHEAD);
        int sums[SD_GROUPS][4];
        FKV_UNROLL
        for (int u = 0; u < SD_UNITS; u++) {
            fkv_u32 lower = sd_key_bytes(tile.keys, i / 4, u, i % 4, 0);
            fkv_u32 upper = sd_key_bytes(tile.keys, i / 4, u, i % 4, 1);
            FKV_UNROLL
            for (int g = 0; g < SD_GROUPS; g++)
                fkv_mma_signed(sums[g], queries.operand[g][u], lower, upper, u == 0 ? none : sums[g]);
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            float both = sd_both(sums[g][k % 2], sums[g][k % 2 + 2]);
            score[g][i / 4 * 8 + k % 2 * 4 + i % 4] = fkv_fma(both, queries.line[g].unit, queries.line[g].bias);
        }
    }
}

/* Builds the A operand from the 16-bit weights of 8 tokens, split into high and low bytes. The tokens are in the order of V's
 * nibbles. */
FKV_FN void sd_weight_operand(const fkv_u32 *bits, fkv_u32, sd_operand &a) {
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        fkv_u32 front = fkv_permute(bits[2 * i], bits[2 * i + 4], 0x5410u);
        fkv_u32 back = fkv_permute(bits[2 * i + 1], bits[2 * i + 5], 0x5410u);
        a[2 * i] = fkv_permute(front, back, 0x7531u);
        a[2 * i + 1] = fkv_permute(front, back, 0x6420u);
    }
}

FKV_FN void sd_add_values(sd_tile &tile, const sd_weights (&weights)[SD_GROUPS], sd_state &state) {
    sd_take_values(tile, 0);
    int start[SD_GROUPS][4] = {}; /* initial accumulators: the sums of the weights */
    FKV_UNROLL
    for (int k = 0; k < SD_GROUPS * SD_PARTS && SD_LESS_ONE; k++)
        fkv_mma_weights(start[k / SD_PARTS], weights[k / SD_PARTS].operand[k % SD_PARTS], 0x01010101u, 0x01010101u,
                        start[k / SD_PARTS]);
    FKV_UNROLL
    for (int i = 0; i < 4 * SD_UNITS; i++) { /* the operand covers 8 channels: channels 4 * r + i of a unit */
        if (i % 4 == 0) sd_take_values(tile, i / 4 + 1);
        int sums[SD_GROUPS][4];
        FKV_UNROLL
        for (int p = 0; p < SD_PARTS; p++) {
            fkv_u32 b[SD_V_TERMS][2];
            FKV_UNROLL
            for (int t = 0; t < SD_V_TERMS; t++) {
                fkv_u32 x = sd_selectors(tile, p, i / 4, i % 4, t);
                b[t][0] = sd_look_up(x, t);
                b[t][1] = sd_look_up(x >> 16, t);
            }
            FKV_UNROLL
            for (int k = 0; k < SD_GROUPS * SD_V_TERMS; k++) {
                int g = k / SD_V_TERMS;
                int t = k % SD_V_TERMS;
                fkv_mma_weights(sums[g], weights[g].operand[p], b[t][0], b[t][1], p + t == 0 ? start[g] : sums[g]);
            }
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            float both = sd_both(sums[g][k % 2], sums[g][k % 2 + 2]);
            float &sum = state.sums[g][i / 4][k % 2 * 4 + i % 4];
            sum = fkv_fma(both, weights[g].worth, sum);
        }
    }
}
