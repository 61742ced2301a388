/* Support for groups of four query rows in decode_sealed.h. The rows of a group are the B operand of the matrix products. Column
 * 2 * c holds the high bytes of row c, and column 2 * c + 1 holds the low bytes, so that thread (r, c) obtains both dot products
 * of row c. The codes of 16 tokens (K) or 16 channels (V) are the A operand. For row c, the thread holds the scores of tokens 32
 * * p + 4 * r + i and the output sums of channels 32 * u + 4 * r + i. */
/* When operands are built, lanes with r = 2 * n need the high bytes of query row n, and lanes with r = 2 * n + 1 need the low
 * bytes. Each lane computes both bytes for half of the units (32 channels each), and the two lanes then exchange bytes. */
constexpr int SD_MADE_UNITS = SD_UNITS / 2;
FKV_FN fkv_u32 sd_made_row(fkv_u32 lane) { return lane / 8; }
FKV_FN fkv_u32 sd_made_line(fkv_u32 lane) { return 4 * (lane / 4 % 2 != 0 ? SD_MADE_UNITS : 0) + lane % 4; }

/* x is a value of the query row lane % 4. Returns the value of the row whose operand this lane builds. */
FKV_FN float sd_to_made(float x, fkv_u32 lane) { return fkv_shuffle(x, lane / 8); }

/* Stores the i-th word of computed bytes. The two lanes of a pair exchange words, so that one lane gets all high bytes and the
 * other lane all low bytes. */
FKV_FN void sd_put_bytes(sd_bytes bytes, int i, fkv_u32 lane, sd_operand (&to)[SD_UNITS]) {
    bool odd = lane / 4 % 2 != 0;
    fkv_u32 other = fkv_shuffle_xor_bits(odd ? bytes.high : bytes.low, 4);
    to[i / 2][i % 2] = odd ? other : bytes.high;
    to[SD_MADE_UNITS + i / 2][i % 2] = odd ? bytes.low : other;
}

/* Builds the query operands of a page. `step` is the distance, in words, between the queries of consecutive groups of rows. */
FKV_FN void sd_enter_groups(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *queries, int step, fkv_u32 lane,
                            sd_queries &to) {
    sd_scaled<SD_MADE_UNITS> scaled;
    sd_scale_queries(lines, queries + sd_made_row(lane) * SD_QUERY_WORDS, step, sd_made_line(lane), scaled);
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        sd_line line = sd_line_of<8>(scaled.largest[g], scaled.bias[g]);
        float inverse = sd_inverse(line.unit);
        FKV_UNROLL
        for (int i = 0; i < 2 * SD_MADE_UNITS; i++)
            sd_put_bytes(sd_bytes_of(scaled.x[g][i / 2] + i % 2 * 4, inverse), i, lane, to.operand[g]);
        fkv_u32 from = lane % 4 * 8; /* lanes with r = 2 * c hold row c */
        to.line[g] = {fkv_shuffle(line.unit, from), fkv_shuffle(line.bias, from)};
    }
}

FKV_FN void sd_score(sd_tile &tile, const sd_queries &queries, sd_scores &score) {
    const int none[4] = {};
    if (SD_K_AHEAD > 0) sd_take_keys(tile, 0);
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_PARTS; i++) { /* operand i covers 16 tokens; see sd_key_operand() */
        if (i % 2 == 0) sd_take_keys(tile, i / 2 + SD_K_AHEAD);
        int sums[SD_GROUPS][4];
        FKV_UNROLL
        for (int u = 0; u < SD_UNITS; u++) {
            FKV_UNROLL
            for (int t = 0; t < SD_K_TERMS; t++) {
                fkv_u32 a[4];
                sd_key_operand(tile, i, u, t, a);
                FKV_UNROLL
                for (int g = 0; g < SD_GROUPS; g++)
                    fkv_mma_signed(sums[g], a, queries.operand[g][u][0], queries.operand[g][u][1], u + t == 0 ? none : sums[g]);
            }
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            float both = sd_both(sums[g][k % 2 * 2], sums[g][k % 2 * 2 + 1]);
            score[g][i * 2 + k % 2] = sd_score_of(tile, i * 2 + k % 2, both, queries.line[g]);
        }
    }
}

/* Builds the B operand from 16-bit weights, for 8 tokens per column. The tokens are in the order of V's nibbles. Their weights
 * are held by two lanes that share a row and are SD_OTHER_LANE lanes apart. */
FKV_FN void sd_weight_operand(const fkv_u32 *bits, fkv_u32 lane, sd_operand &b) {
    fkv_u32 from = lane % 4 * SD_WEIGHT_LANES + lane / 8; /* row r / 2 */
    fkv_u32 pick = lane / 4 % 2 == 0 ? 0x7351u : 0x6240u;
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        fkv_u32 pair = fkv_permute(bits[2 * i], bits[2 * i + 1], 0x5410u);
        b[i] = fkv_permute(fkv_shuffle_bits(pair, from), fkv_shuffle_bits(pair, from + SD_OTHER_LANE), pick);
    }
}

FKV_FN void sd_add_values(sd_tile &tile, const sd_weights (&weights)[SD_GROUPS], sd_state &state) {
    const fkv_u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    sd_take_values(tile, 0);
    int start[SD_GROUPS][4] = {}; /* initial accumulators: the sums of the weights */
    FKV_UNROLL
    for (int k = 0; k < SD_GROUPS * SD_PARTS && SD_LESS_ONE; k++) {
        const sd_operand &b = weights[k / SD_PARTS].operand[k % SD_PARTS];
        fkv_mma_bytes(start[k / SD_PARTS], ones, b[0], b[1], start[k / SD_PARTS]);
    }
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_UNITS; i++) { /* operand i covers 16 channels, two per thread */
        if (i % 2 == 0) sd_take_values(tile, i / 2 + 1);
        int sums[SD_GROUPS][4];
        FKV_UNROLL
        for (int p = 0; p < SD_PARTS; p++) {
            FKV_UNROLL
            for (int t = 0; t < SD_V_TERMS; t++) {
                fkv_u32 a[4];
                sd_value_operand(tile, p, i, t, a);
                FKV_UNROLL
                for (int g = 0; g < SD_GROUPS; g++) {
                    const sd_operand &b = weights[g].operand[p];
                    fkv_mma_bytes(sums[g], a, b[0], b[1], p + t == 0 ? start[g] : sums[g]);
                }
            }
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            float both = sd_both(sums[g][k % 2 * 2], sums[g][k % 2 * 2 + 1]);
            int place = sd_sum_place(i, k % 2);
            float &sum = state.sums[g][place / SD_GROUP][place % SD_GROUP];
            sum = fkv_fma(both, weights[g].worth, sum);
        }
    }
}
