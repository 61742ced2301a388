/* Merges the splits of a decode item inside the decode kernel, so that the kernel attend_merge need not be launched. Several
 * blocks process the same rows of an item, and the last of these blocks to finish merges their partial results. Each such group
 * of blocks has a counter, which is 0 between launches. The last block resets the counter.
 *
 * A warp merges one row, which it keeps in registers (lane_rows.h). The partial results are added in the same order and with the
 * same rounding as in attend_merge.h, so the results are bit-identical.
 *
 * The merge is limited by latency. Therefore, a warp loads many splits at once, and loads the first ones together with the
 * statistics of all splits.
 */
constexpr fkv_u32 FKV_MERGE_BATCH = 16 / FKV_LANE_QUADS; /* number of splits that a warp loads at once */
static_assert(FKV_MERGE_BATCH <= 32, "each lane loads the maximum score of one split");

/* Partial results of consecutive splits. */
struct fkv_merge_batch {
    fkv_lane_row x[FKV_MERGE_BATCH];
    float max; /* lane i holds the maximum score of the batch's i-th split */
};

/* Loads the lane's channels and the maximum scores of up to FKV_MERGE_BATCH splits, starting at split `first`. row.own points to
 * channel 0 of the row. */
FKV_FN fkv_merge_batch fkv_merge_load(const fkv_merge_row &row, fkv_u32 first, fkv_u32 lane) {
    fkv_merge_batch batch = {};
    FKV_UNROLL
    for (fkv_u32 i = 0; i < FKV_MERGE_BATCH; i++) {
        if (first + i >= row.n_splits) break;
        FKV_UNROLL
        for (int k = 0; k < FKV_LANE_QUADS; k++) {
            fkv_u32 quad = lane + 32 * (fkv_u32)k;
            if (quad >= FKV_MERGE_QUADS) continue;
            const fkv_words4 x = *(const fkv_words4 *)(row.own + (first + i) * row.stride + 4 * quad);
            FKV_UNROLL
            for (int d = 0; d < 4; d++) batch.x[i][k][d] = fkv_float_of(x.w[d]);
        }
    }
    if (lane < FKV_MERGE_BATCH && first + lane < row.n_splits) batch.max = row.stats[(first + lane) * 2];
    return batch;
}

/* Sums of a row over its splits. attend_merge.h divides the splits into FKV_MERGE_RANGES ranges, adds each range, and then adds
 * the sums of the ranges. */
struct fkv_merge_sums {
    fkv_lane_row x;     /* sum of the ranges that have ended */
    fkv_lane_row range; /* sum of the current range */
    fkv_u32 n_ranges;   /* number of ranges that have begun */
    fkv_u32 left;       /* number of splits of the current range that have not been added yet */
};

/* Adds the sum of the current range to the sum of the previous ranges, or copies it if there is no previous range. */
FKV_FN void fkv_merge_end_range(fkv_merge_sums &sums) {
    FKV_UNROLL
    for (int i = 0; i < 4 * FKV_LANE_QUADS; i++) {
        float &x = sums.x[i / 4][i % 4];
        x = sums.n_ranges <= 1 ? sums.range[i / 4][i % 4] : fkv_add(x, sums.range[i / 4][i % 4]);
    }
}

/* Adds the splits in `batch`: the next min(n, FKV_MERGE_BATCH) splits of the row, where n is the number of splits that have not
 * been added yet. length: number of splits per range. */
FKV_FN void fkv_merge_add(const fkv_merge_batch &batch, fkv_u32 n, fkv_u32 length, float largest, fkv_merge_sums &sums) {
    float weights = fkv_split_weight(batch.max, largest); /* lane i holds the weight of the batch's i-th split */
    FKV_UNROLL
    for (fkv_u32 i = 0; i < FKV_MERGE_BATCH; i++) {
        if (i >= n) break;
        float weight = fkv_shuffle(weights, i);
        if (sums.left == 0) {
            fkv_merge_end_range(sums);
            FKV_UNROLL
            for (int k = 0; k < 4 * FKV_LANE_QUADS; k++) sums.range[k / 4][k % 4] = 0.0f;
            sums.n_ranges++;
            sums.left = length;
        }
        sums.left--;
        FKV_UNROLL
        for (int k = 0; k < 4 * FKV_LANE_QUADS; k++)
            sums.range[k / 4][k % 4] = fkv_fma(weight, batch.x[i][k / 4][k % 4], sums.range[k / 4][k % 4]);
    }
}

/* Computes the weighted sum of the partial results of all splits. `batch` contains the first splits. largest: maximum score of
 * the row. */
FKV_FN void fkv_merge_splits(const fkv_merge_row &row, fkv_merge_batch batch, float largest, fkv_u32 lane, fkv_lane_row &x) {
    fkv_u32 length = (row.n_splits + FKV_MERGE_RANGES - 1) / FKV_MERGE_RANGES;
    fkv_merge_sums sums = {};
    for (fkv_u32 first = 0; first < row.n_splits; first += FKV_MERGE_BATCH) {
        if (first > 0) batch = fkv_merge_load(row, first, lane);
        fkv_merge_add(batch, row.n_splits - first, length, largest, sums);
    }
    fkv_merge_end_range(sums);
    FKV_UNROLL
    for (int i = 0; i < 4 * FKV_LANE_QUADS; i++) {
        x[i / 4][i % 4] = sums.x[i / 4][i % 4];
        if (sums.n_ranges < FKV_MERGE_RANGES)
            x[i / 4][i % 4] = fkv_add(x[i / 4][i % 4], 0.0f); /* -0 becomes +0: the sums of empty ranges are +0 */
    }
}

/* Merges row `row` of the item, counted within one KV head. Called by one warp. */
FKV_FN void fkv_merge_one_row(const fkv_split &split, fkv_u32 head, fkv_u32 row, fkv_u32 lane, const float *parts,
                              const fkv_u32 *table, const float *sink_logits, void *out) {
    fkv_u32 q_head = head * FKV_R + row % FKV_R;
    fkv_u32 of_split = head * split.all_rows + row;
    fkv_u32 first = split.words[FKV_SPLIT_FIRST_SPLIT];
    fkv_merge_row splits;
    splits.stride = (fkv_u64)FKV_G * split.all_rows * FKV_D;
    splits.stats = parts + fkv_stats_at(table, of_split, first);
    splits.own = parts + first * splits.stride + (fkv_u64)of_split * FKV_D;
    splits.n_splits = split.words[FKV_SPLIT_N_SPLITS];
    splits.begin = 0;
    splits.end = splits.n_splits;
    fkv_merge_batch batch = fkv_merge_load(splits, 0, lane);
    fkv_merge_total all = fkv_merge_stats(splits, lane);
    fkv_lane_row x = {};
    fkv_merge_splits(splits, batch, all.largest, lane, x);
    float total = fkv_denominator(all.total, all.largest, sink_logits, q_head);
    FKV_UNROLL
    for (int i = 0; i < 4 * FKV_LANE_QUADS; i++) x[i / 4][i % 4] = x[i / 4][i % 4] / total;
    if (FKV_ROTATE_V) {
        fkv_lane_hadamard(lane, x);
        fkv_lane_undo_signs(lane, x);
    }
    fkv_put_lane_row(out, ((fkv_u64)(split.words[FKV_SPLIT_FIRST_TOKEN] + row / FKV_R) * FKV_H + q_head) * FKV_D, lane, x);
}

/* Called by all threads of a block after the block has stored its partial results. counters: one word for each block of the
 * grid. */
FKV_FN void fkv_merge_last(fkv_place place, FKV_SHARED fkv_u32 *shared, const float *parts, const fkv_u32 *table,
                           const float *sink_logits, const void *counters, void *out) {
    fkv_split split = fkv_split_at(place, table);
    if (split.n_rows == 0) return;
    fkv_u32 n_chunks = FKV_ONE_CHUNK ? 1 : (split.all_rows + FKV_ITEM_ROWS - 1) / FKV_ITEM_ROWS;
    fkv_u32 group = (split.words[FKV_SPLIT_FIRST_SPLIT] * n_chunks + place.x % n_chunks) * FKV_G + place.y;
    fkv_sync(); /* all partial results of the block are stored, and the block no longer uses its shared memory */
    if (place.index == 0) {
        fkv_u32 *counter = (fkv_u32 *)counters + group;
        shared[0] = fkv_fetch_increment(counter) + 1 == split.words[FKV_SPLIT_N_SPLITS];
        if (shared[0] != 0) *counter = 0;
    }
    fkv_sync();
    if (shared[0] == 0) return;
    for (fkv_u32 row = place.index / 32; row < split.n_rows; row += FKV_LAUNCH_THREADS / 32)
        fkv_merge_one_row(split, place.y, split.first_row + row, place.index % 32, parts, table, sink_logits, out);
}
