/* Merges the partial results of all splits of a query: adds them in a fixed order, divides the sum by the total weight, undoes
 * the rotation of V and converts the result to the element type of `out`. There is one thread block per (work item, query head,
 * query).
 *
 * Each thread adds four channels over a contiguous range of splits. The sums of the ranges are then added in order. The number of
 * splits depends only on the query position, so a query's partial results are always added in the same order. Every warp computes
 * the query's maximum score and total weight independently, because this redundant work is cheaper than a barrier.
 *
 * Memory latency is the bottleneck. The kernel therefore uses many threads, each of which adds only a few splits, and loads the
 * partial results of the first splits before their weights are known.
 */
#if FKV_D < 128
#define FKV_MERGE_THREADS 256
#elif FKV_D < 256
#define FKV_MERGE_THREADS 512
#else
#define FKV_MERGE_THREADS 1024
#endif
#define FKV_MERGE_QUADS (FKV_D / 4)
#define FKV_MERGE_RANGES (FKV_MERGE_THREADS / FKV_MERGE_QUADS)
#define FKV_MERGE_EARLY 8 /* number of splits that each thread loads before their weights are known */
#define FKV_MERGE_SHARED (FKV_MERGE_RANGES * FKV_D)

/* Returns the factor by which the partial results of a split are multiplied. `max` is the largest score in the split, and
 * `largest` is the largest score in all splits. */
FKV_FN float fkv_split_weight(float max, float largest) {
    return max == fkv_float_of(0xff800000u) ? 0.0f : fkv_exp2(max - largest);
}

/* The splits of one query row, and the range [begin, end) of splits whose partial results this thread adds. */
struct fkv_merge_row {
    FKV_DEVICE const float *stats; /* {maximum score, total weight} of each split */
    FKV_DEVICE const float *own;   /* the thread's four channels in the partial results of the first split */
    fkv_u64 stride;                /* distance between the partial results of consecutive splits, in floats */
    fkv_u32 n_splits;
    fkv_u32 begin;
    fkv_u32 end;
};

/* Partial results of four channels for the first splits of a range, loaded before the weights of these splits are known. */
struct fkv_merge_early {
    float x[FKV_MERGE_EARLY][4];
    float max[FKV_MERGE_EARLY];
};

FKV_FN fkv_merge_early fkv_merge_prefetch(FKV_LOCAL const fkv_merge_row &row) {
    fkv_merge_early early;
    FKV_UNROLL
    for (fkv_u32 i = 0; i < FKV_MERGE_EARLY; i++) {
        bool there = row.begin + i < row.end;
        FKV_DEVICE const fkv_words4 *from = (FKV_DEVICE const fkv_words4 *)(row.own + (there ? row.begin + i : 0) * row.stride);
        FKV_UNROLL
        for (int d = 0; d < 4; d++) early.x[i][d] = fkv_float_of(from->w[d]);
        early.max[i] = there ? row.stats[(row.begin + i) * 2] : fkv_float_of(0xff800000u);
    }
    return early;
}

/* Maximum score over all splits, and total weight relative to that maximum. Every warp computes both values independently. */
struct fkv_merge_total {
    float largest;
    float total;
};

FKV_FN fkv_merge_total fkv_merge_stats(FKV_LOCAL const fkv_merge_row &row, fkv_u32 lane) {
    float largest = fkv_float_of(0xff800000u);
    float total = 0.0f;
    for (fkv_u32 i = lane; i < row.n_splits; i += 32) {
        FKV_DEVICE const float *split = row.stats + i * 2;
        float grown = fkv_max(largest, split[0]);
        total = fkv_fma(fkv_split_weight(largest, grown), total, fkv_split_weight(split[0], grown) * split[1]);
        largest = grown;
    }
    for (fkv_u32 h = 1; h < 32; h *= 2) {
        float other = fkv_shuffle_xor(largest, h);
        float grown = fkv_max(largest, other);
        total *= fkv_split_weight(largest, grown);
        total += fkv_shuffle_xor(total, h);
        largest = grown;
    }
    fkv_merge_total all;
    all.largest = largest;
    all.total = total;
    return all;
}

/* Adds the partial results of the thread's range of splits. `sums` receives one sum for each of the thread's four channels. */
FKV_FN void fkv_merge_range(FKV_LOCAL const fkv_merge_row &row, FKV_LOCAL const fkv_merge_early &early, float largest,
                            FKV_SHARED float *sums) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    FKV_UNROLL
    for (fkv_u32 i = 0; i < FKV_MERGE_EARLY; i++) {
        if (row.begin + i >= row.end) break;
        float weight = fkv_split_weight(early.max[i], largest);
        FKV_UNROLL
        for (int d = 0; d < 4; d++) x[d] = fkv_fma(weight, early.x[i][d], x[d]);
    }
    FKV_UNROLL_8
    for (fkv_u32 i = row.begin + FKV_MERGE_EARLY; i < row.end; i++) {
        FKV_DEVICE const fkv_words4 *from = (FKV_DEVICE const fkv_words4 *)(row.own + i * row.stride);
        float weight = fkv_split_weight(row.stats[i * 2], largest);
        FKV_UNROLL
        for (int d = 0; d < 4; d++) x[d] = fkv_fma(weight, fkv_float_of(from->w[d]), x[d]);
    }
    FKV_UNROLL
    for (int d = 0; d < 4; d++) sums[d] = x[d];
}

/* Adds the sums of all ranges of splits for channel d, divides by the total weight and undoes the rotation of V. All threads must
 * call this function, because threads with d >= D also take part in the shuffles and barriers. */
FKV_FN float fkv_merge_finish(fkv_u32 d, FKV_SHARED float *sums, float total) {
    float x = 0.0f;
    if (d < FKV_D) {
        x = sums[d];
        for (fkv_u32 s = 1; s < FKV_MERGE_RANGES; s++) x += sums[s * FKV_D + d];
        x = x / total;
    }
#if FKV_ROTATE_V
    /* channels less than 32 apart belong to threads of the same warp; values of other channels are exchanged through shared
     * memory */
    FKV_UNROLL
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        float other = h < 32 ? fkv_shuffle_xor(x, h) : 0.0f;
        if (h >= 32) {
            fkv_sync();
            if (d < FKV_D) sums[d] = x;
            fkv_sync();
            if (d < FKV_D) other = sums[d ^ h];
        }
        x = (d & h) == 0 ? x + other : other - x;
    }
    x *= fkv_rotation_norm();
#endif
    return x;
}

FKV_FN void fkv_attend_merge(fkv_place place, FKV_SHARED float *sums, FKV_DEVICE const float *parts,
                             FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const float *sink_logits, FKV_DEVICE void *out) {
    FKV_DEVICE const fkv_u32 *item = table + table[FKV_STEP_ITEMS] + place.x * FKV_ITEM_WORDS;
    if (place.z >= item[FKV_ITEM_N_QUERIES]) return;
    fkv_u32 all_rows = FKV_R * table[FKV_STEP_ITEM_QUERIES];
    fkv_u64 stride = (fkv_u64)FKV_G * all_rows; /* rows per split */
    fkv_u32 of_split = place.y / FKV_R * all_rows + place.z * FKV_R + place.y % FKV_R;
    fkv_u64 first = (fkv_u64)item[FKV_ITEM_FIRST_SPLIT] * stride + of_split;
    fkv_u32 quad = place.index % FKV_MERGE_QUADS;
    fkv_u32 range = place.index / FKV_MERGE_QUADS; /* threads past the last range of splits have no work */
    fkv_merge_row row;
    row.stats = parts + fkv_stats_at(table, of_split, item[FKV_ITEM_FIRST_SPLIT]);
    row.own = parts + first * FKV_D + 4 * quad;
    row.stride = stride * FKV_D;
    row.n_splits = item[FKV_ITEM_N_SPLITS];
    fkv_u32 length = (row.n_splits + FKV_MERGE_RANGES - 1) / FKV_MERGE_RANGES;
    row.begin = range * length;
    row.end = row.begin + length < row.n_splits ? row.begin + length : row.n_splits;
    if (range >= FKV_MERGE_RANGES) row.end = row.begin;

    fkv_merge_early early = fkv_merge_prefetch(row);
    fkv_merge_total all = fkv_merge_stats(row, place.index % 32);
    if (range < FKV_MERGE_RANGES) fkv_merge_range(row, early, all.largest, sums + range * FKV_D + 4 * quad);
    fkv_sync();
    fkv_u32 d = place.index;
    float x = fkv_merge_finish(d, sums, fkv_denominator(all.total, all.largest, sink_logits, place.y));
    fkv_u64 to = ((fkv_u64)(item[FKV_ITEM_FIRST_TOKEN] + place.z) * FKV_H + place.y) * FKV_D + d;
    if (d < FKV_D) fkv_put_row_value(out, to, fkv_float_of(fkv_bits_of(x) ^ fkv_v_sign(d)));
}
