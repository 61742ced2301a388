/* The pieces of each query, folded: a fixed tree over the pieces, the rotation of V undone, rows of the row type. One block for
 * each (item, query head, query); the parts are decode's, see there.
 *
 * Each thread owns four channels of a stretch of the pieces (n_pieces / stretches of them, one after the other); the stretches
 * are added from first to last. How many pieces there are depends on the query's position, so its sums are always the same sums.
 */
#define FKV_MERGE_THREADS 256
#define FKV_MERGE_QUADS (FKV_D / 4)
#define FKV_MERGE_STRETCHES (FKV_MERGE_THREADS / FKV_MERGE_QUADS)
#define FKV_MERGE_PIECES 512 /* the most a table has of an item */
#define FKV_MERGE_SHARED (2 * FKV_MERGE_PIECES + FKV_MERGE_STRETCHES * FKV_D + FKV_MERGE_THREADS)

/* The sum, or the largest, of a number of each thread, by a tree. */
FKV_FN float fkv_merge_over_block(fkv_place place, FKV_SHARED float *numbers, float x, bool largest) {
    numbers[place.thread] = x;
    fkv_sync();
    for (fkv_u32 n = FKV_MERGE_THREADS / 2; n > 0; n /= 2) {
        if (place.thread < n) {
            float a = numbers[place.thread];
            float b = numbers[place.thread + n];
            numbers[place.thread] = largest ? fkv_max(a, b) : a + b;
        }
        fkv_sync();
    }
    float result = numbers[0];
    fkv_sync();
    return result;
}

FKV_FN void fkv_attend_merge(fkv_place place, FKV_SHARED float *shared, FKV_DEVICE const float *parts,
                             FKV_DEVICE const fkv_u32 *table, FKV_DEVICE void *out) {
    FKV_DEVICE const fkv_u32 *item = table + table[FKV_STEP_ITEMS] + place.x * FKV_ITEM_WORDS;
    if (place.z >= item[FKV_ITEM_N_QUERIES]) return;
    fkv_u32 all_rows = FKV_R * table[FKV_STEP_ITEM_QUERIES];
    fkv_u32 n_pieces = item[FKV_ITEM_N_PIECES];
    fkv_u64 stride = (fkv_u64)FKV_G * all_rows; /* rows of a piece */
    fkv_u64 first = (fkv_u64)item[FKV_ITEM_FIRST_PIECE] * stride + place.y / FKV_R * all_rows + place.z * FKV_R + place.y % FKV_R;
    FKV_DEVICE const float *stats = parts + (fkv_u64)table[FKV_STEP_N_PIECES] * stride * FKV_D;
    FKV_SHARED float *factors = shared;
    FKV_SHARED float *sums = factors + 2 * FKV_MERGE_PIECES; /* [stretches, D] */
    FKV_SHARED float *numbers = sums + FKV_MERGE_STRETCHES * FKV_D;

    float max = fkv_float_of(0xff800000u);
    for (fkv_u32 i = place.thread; i < n_pieces; i += FKV_MERGE_THREADS) {
        factors[i] = stats[(first + i * stride) * 2];
        factors[FKV_MERGE_PIECES + i] = stats[(first + i * stride) * 2 + 1];
        max = fkv_max(max, factors[i]);
    }
    max = fkv_merge_over_block(place, numbers, max, true);
    float total = 0.0f;
    for (fkv_u32 i = place.thread; i < n_pieces; i += FKV_MERGE_THREADS) {
        float factor = factors[i] == fkv_float_of(0xff800000u) ? 0.0f : fkv_exp2(factors[i] - max);
        total = fkv_fma(factor, factors[FKV_MERGE_PIECES + i], total);
        factors[i] = factor;
    }
    total = fkv_merge_over_block(place, numbers, total, false);

    fkv_u32 quad = place.thread % FKV_MERGE_QUADS;
    fkv_u32 stretch = place.thread / FKV_MERGE_QUADS;
    if (stretch < FKV_MERGE_STRETCHES) {
        fkv_u32 length = (n_pieces + FKV_MERGE_STRETCHES - 1) / FKV_MERGE_STRETCHES;
        fkv_u32 end = (stretch + 1) * length < n_pieces ? (stretch + 1) * length : n_pieces;
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        FKV_UNROLL_4
        for (fkv_u32 i = stretch * length; i < end; i++) {
            FKV_DEVICE const fkv_words4 *from = (FKV_DEVICE const fkv_words4 *)(parts + (first + i * stride) * FKV_D + 4 * quad);
            fkv_words4 four = *from;
            FKV_UNROLL
            for (int d = 0; d < 4; d++) x[d] = fkv_fma(factors[i], fkv_float_of(four.w[d]), x[d]);
        }
        FKV_UNROLL
        for (int d = 0; d < 4; d++) sums[stretch * FKV_D + 4 * quad + (fkv_u32)d] = x[d];
    }
    fkv_sync();
    for (fkv_u32 d = place.thread; d < FKV_D; d += FKV_MERGE_THREADS) {
        float x = sums[d];
        for (fkv_u32 s = 1; s < FKV_MERGE_STRETCHES; s++) x += sums[s * FKV_D + d];
        sums[d] = x / total;
    }
    fkv_sync();
#if FKV_ROTATE_V
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        for (fkv_u32 i = place.thread; i < FKV_D / 2; i += FKV_MERGE_THREADS) {
            fkv_u32 d = i / h * 2 * h + i % h;
            float a = sums[d];
            float b = sums[d + h];
            sums[d] = a + b;
            sums[d + h] = a - b;
        }
        fkv_sync();
    }
#endif
    fkv_u64 to = ((fkv_u64)(item[FKV_ITEM_FIRST_TOKEN] + place.z) * FKV_H + place.y) * FKV_D;
    for (fkv_u32 d = place.thread; d < FKV_D; d += FKV_MERGE_THREADS) {
#if FKV_ROTATE_V
        fkv_put_row_number(out, to + d, fkv_float_of(fkv_bits_of(sums[d] * fkv_rotation_norm()) ^ fkv_v_sign(d)));
#else
        fkv_put_row_number(out, to + d, sums[d]);
#endif
    }
}
