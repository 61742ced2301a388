/* Rows that a warp keeps in registers. Lane l holds the channels 128 k + 4 l to 128 k + 4 l + 3 of a row.
 */
constexpr int FKV_LANE_QUADS = (FKV_D + 127) / 128;

typedef float fkv_lane_row[FKV_LANE_QUADS][4]; /* channels of a row that one lane holds */

/* Returns the word of FKV_V_SIGNS that contains the signs of the lane's channels 128 k + 4 lane to 128 k + 4 lane + 3. The word
 * is selected with masks, because an array with a variable index would be stored in local memory. */
FKV_FN fkv_u32 fkv_lane_signs(fkv_u32 k, fkv_u32 lane) {
    const fkv_u32 signs[] = {FKV_V_SIGNS};
    fkv_u32 word = 0;
    FKV_UNROLL
    for (fkv_u32 w = 4 * k; FKV_ROTATE_V && w < 4 * k + 4 && w < (FKV_D + 31) / 32; w++)
        word |= signs[FKV_ROTATE_V ? w : 0] & (0u - (fkv_u32)(4 * k + lane / 8 == w));
    return word;
}

/* The next two functions together undo the rotation of V. The first one multiplies by the Hadamard matrix. */
FKV_FN void fkv_lane_hadamard(fkv_u32 lane, fkv_lane_row &x) {
    FKV_UNROLL
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        if (h >= 4 && h < 128) { /* the other channel is in another lane */
            float sign = (4 * lane & h) == 0 ? 1.0f : -1.0f;
            FKV_UNROLL
            for (int i = 0; i < 4 * FKV_LANE_QUADS; i++)
                x[i / 4][i % 4] = fkv_fma(sign, x[i / 4][i % 4], fkv_shuffle_xor(x[i / 4][i % 4], h / 4));
        } else {
            int step = h < 4 ? (int)h : (int)h / 128 * 4;
            FKV_UNROLL
            for (int i = 0; i < 4 * FKV_LANE_QUADS; i++) {
                if ((i & step) != 0) continue;
                float &a = x[i / 4][i % 4], &b = x[(i + step) / 4 % FKV_LANE_QUADS][(i + step) % 4];
                float sum = a + b;
                b = a - b;
                a = sum;
            }
        }
    }
}
FKV_FN void fkv_lane_undo_signs(fkv_u32 lane, fkv_lane_row &x) {
    FKV_UNROLL
    for (fkv_u32 i = 0; i < 4 * FKV_LANE_QUADS; i++) {
        fkv_u32 sign = fkv_lane_signs(i / 4, lane) >> (4 * lane + i % 4) % 32 << 31;
        x[i / 4][i % 4] = fkv_float_of(fkv_bits_of(x[i / 4][i % 4] * fkv_rotation_norm()) ^ sign);
    }
}

/* Converts two values to the 16-bit type of rows. */
FKV_FN fkv_u32 fkv_row_pair(float a, float b) {
    return FKV_ROW_TYPE == 1 ? fkv_pack_f16(a, b) : fkv_bf16_bits(a) | fkv_bf16_bits(b) << 16;
}

/* Converts a row to the type of `rows` and stores it at rows[at]. */
FKV_FN void fkv_put_lane_row(void *rows, fkv_u64 at, fkv_u32 lane, const fkv_lane_row &x) {
    FKV_UNROLL
    for (fkv_u32 k = 0; k < FKV_LANE_QUADS; k++) {
        fkv_u32 d = k * 128 + 4 * lane;
        if (d >= FKV_D) continue;
        const float *four = x[k];
        fkv_words4 words = {{fkv_bits_of(four[0]), fkv_bits_of(four[1]), fkv_bits_of(four[2]), fkv_bits_of(four[3])}};
        fkv_words2 pairs = {{fkv_row_pair(four[0], four[1]), fkv_row_pair(four[2], four[3])}};
        if (FKV_ROW_TYPE == 0)
            *(fkv_words4 *)((float *)rows + at + d) = words;
        else
            *(fkv_words2 *)((fkv_u16 *)rows + at + d) = pairs;
    }
}
