/* Part of the decode kernel in decode_mma.h: converts query rows to A operands in shared memory.
 *
 * K codes are integers, so queries are converted to integers as well. Each value is scaled relative to the largest magnitude of
 * its row and rounded to an integer that is split into three signed bytes: 65536 * high + 256 * low + rest. The high, low and
 * rest bytes of a row are stored in separate rows of A. For 16-bit keys, a query value is split into two 16-bit values instead. A
 * dot product does not depend on the order of the channels, so dc_channel_place() defines an order in which the loaded words of K
 * can be used as operands without rearrangement.
 */
/* Location of channel d of a slab (the channels of one warp) in the query operands: the matrix product (step), the thread within
 * the operand row, the word within the thread's pair of words, and the element within the word. The mapping matches
 * dc_load_keys() and dc_key_operand(). */
struct dc_channel {
    fkv_u32 step;
    fkv_u32 thread;
    fkv_u32 word;
    fkv_u32 number;
};

FKV_FN dc_channel dc_channel_place(fkv_u32 d) {
    fkv_u32 unit = d / dc_k::span;
    fkv_u32 x = d % (dc_k::span / 4);
    dc_channel at;
    at.thread = d % dc_k::span / (dc_k::span / 4);
    if constexpr (dc_k::bits == 16) {
        at.step = x / 4;
        at.word = x / 2 % 2;
        at.number = x % 2;
    } else if constexpr (dc_k::bits == 8) {
        at.step = x / 8;
        at.word = x / 4 % 2;
        at.number = x % 4;
    } else if constexpr (dc_k::is_book && dc_k::bits == 4) {
        at.step = x / 8;
        at.word = x / 4 % 2;
        at.number = x % 4;
    } else if constexpr (dc_k::is_book || dc_k::bits == 4) {
        at.step = x / 8;
        at.word = x % 2;
        at.number = x % 8 / 2;
    } else if constexpr (dc_k::load_bytes >= 4) {
        at.step = x / 16 * 2 + x % 4 / 2;
        at.word = x % 2;
        at.number = x % 16 / 4;
    } else {
        at.step = 0;
        at.word = x % 4 / 2;
        at.number = x / 4 + x % 2 * 2;
    }
    at.step += unit * dc_k::unit_steps;
    return at;
}

/* Returns the row of the A operand that holds the high (part 0), low (part 1) or rest (part 2) bytes of query row `row`. Rows are
 * numbered consecutively across all tiles of 16 rows. */
FKV_FN fkv_u32 dc_operand_row(fkv_u32 row, fkv_u32 part) {
    if constexpr (DC_DUPLICATED && dc_k::bits == 16)
        return row + 4 * part;
    else if constexpr (DC_DUPLICATED)
        return part == 0 ? row : part == 1 ? row + 8 : row + 4;
    else
        return part < 2 ? row / 8 * 16 + row % 8 + 8 * part : DC_OWN_ROWS * 16 + row;
}

FKV_FN fkv_u32 dc_operand_word(dc_channel at, fkv_u32 row, fkv_u32 part) {
    fkv_u32 place = dc_operand_row(row, part);
    return ((place / 16 * dc_k::steps + at.step) * 32 + place % 8 * 4 + at.thread) * 4 + place % 16 / 8 + 2 * at.word;
}

/* Stores one value of query row `row` in the operands. x is the value divided by the row's quantization step. */
FKV_FN void dc_put_query(FKV_SHARED fkv_u32 *queries, fkv_u32 row, fkv_u32 channel, float x) {
    dc_channel at = dc_channel_place(channel % DC_SLAB);
    FKV_SHARED fkv_u32 *operands = queries + channel / DC_SLAB * DC_OPERAND_WORDS;
    if constexpr (dc_k::bits == 16) {
        fkv_u32 bits = fkv_page_bits(x);
        const fkv_u32 parts[2] = {bits, fkv_page_bits(x - fkv_page_value(bits))};
        FKV_UNROLL
        for (fkv_u32 part = 0; part < 2; part++)
            ((FKV_SHARED fkv_u16 *)operands)[dc_operand_word(at, row, part) * 2 + at.number] = (fkv_u16)parts[part];
    } else {
        int v = (int)fkv_rint(x);
        int rest = ((v + 128) & 255) - 128;
        v = (v - rest) >> 8;
        int low = ((v + 128) & 255) - 128;
        const int parts[3] = {(v - low) >> 8, low, rest};
        FKV_UNROLL
        for (fkv_u32 part = 0; part < 3; part++)
            ((FKV_SHARED fkv_u8 *)operands)[dc_operand_word(at, row, part) * 4 + at.number] = (fkv_u8)parts[part];
    }
}

/* Returns the quantization step of a row. `largest` is the largest magnitude in the row, as the bit pattern of a float. For
 * 16-bit keys, the step is a power of two such that the largest value is less than 2^11 steps; otherwise, the largest value is
 * 126 * 65536 steps.
 */
FKV_FN float dc_step_of(fkv_u32 largest) {
    if constexpr (dc_k::bits == 16) {
        fkv_u32 exponent = largest >> 23 > 20 ? (largest >> 23 < 250 ? largest >> 23 : 250) : 20;
        return fkv_float_of((exponent - 10) << 23);
    }
    return fkv_float_of(largest) > 1e-30f ? fkv_float_of(largest) * (1.0f / 8257536.0f) : 0.0f;
}

/* Computes the sum of q over the channels of each scale group of K, for the bias terms of the scores. */
FKV_FN void dc_sum_row(const float *x, FKV_SHARED float *sums, fkv_u32 lane) {
    const int n = DC_LANE_CHANNELS / (DC_SLABS * dc_k::groups); /* number of values per lane in each scale group */
    FKV_UNROLL
    for (int g = 0; g < DC_SLABS * dc_k::groups; g++) {
        float sum = 0.0f;
        FKV_UNROLL
        for (int i = 0; i < n; i++) sum += x[g * n + i];
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) sum += fkv_shuffle_xor(sum, h);
        if (lane == 0) sums[g] = sum;
    }
}

/* Converts the query row at q[from] to operands. Stores the operands, the quantization step and the sum of q over each scale
 * group in shared memory. */
FKV_FN void dc_prepare_row(const void *q, fkv_u64 from, fkv_u32 row, FKV_SHARED fkv_u32 *shared, fkv_u32 lane) {
    float x[DC_LANE_CHANNELS];
    fkv_u32 largest = dc_load_row(q, from, x, lane);
    FKV_SHARED float *floats = (FKV_SHARED float *)shared;
    bool number = largest < 0x7f800000u;
    float step = dc_step_of(largest);
    float inverse = number && step > 0.0f ? 1.0f / step : 0.0f;
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) dc_put_query(shared, row, lane + 32 * (fkv_u32)i, number ? x[i] * inverse : 0.0f);
    if (lane == 0) floats[DC_AT_STEPS + row] = number ? step : fkv_float_of(0x7fc00000u);
    if (!dc_k::is_book) dc_sum_row(x, floats + DC_AT_SUMS + row * (DC_SLABS * dc_k::groups), lane);
}
