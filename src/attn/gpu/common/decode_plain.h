/* Decode kernel without matrix instructions (plain_tile.h), for devices and head dimensions that decode_mma.h does not support.
 * The kernel has the same interface as the kernel in decode_mma.h and writes partial results in the same format, but it supports
 * every codec and head dimension. One block processes one split of the history of one KV head for up to four rows. Its four warps
 * process the tiles of the split in round-robin order.
 */
#define FKV_STREAMS 4
#define FKV_DECODE_THREADS 128

/* shared memory, in words: queries [rows, D], softmax weights [streams, rows, 32], {max, total} [streams, rows, 2], output sums
 * [rows, D] */
#define FKV_SHARED_WEIGHTS (FKV_ITEM_ROWS * FKV_D)
#define FKV_SHARED_STATS (FKV_SHARED_WEIGHTS + FKV_STREAMS * FKV_ITEM_ROWS * 32)
#define FKV_SHARED_SUMS (FKV_SHARED_STATS + FKV_STREAMS * FKV_ITEM_ROWS * 2)
#define FKV_DECODE_SHARED (FKV_SHARED_SUMS + FKV_ITEM_ROWS * FKV_D)

/* Processes the tiles assigned to one stream. In this kernel, a stream is one warp. */
FKV_FN void fkv_plain_process_stream(FKV_LOCAL const fkv_split &split, fkv_u32 stream, fkv_u32 lane,
                                     FKV_DEVICE const fkv_u8 *blocks, FKV_DEVICE const fkv_u32 *table, FKV_SHARED float *shared,
                                     FKV_LOCAL fkv_plain_rows<FKV_ITEM_ROWS> &rows FKV_ORDER) {
    FKV_DEVICE const fkv_u32 *words = split.words;
    FKV_DEVICE const fkv_u32 *pages = table + words[FKV_SPLIT_PAGES];
    FKV_SHARED float *weights = shared + FKV_SHARED_WEIGHTS + stream * FKV_ITEM_ROWS * 32;
    fkv_u32 n_tiles = (words[FKV_SPLIT_N_TOKENS] + FKV_PLAIN_KEYS - 1) / FKV_PLAIN_KEYS;
    fkv_u32 last = words[FKV_SPLIT_POSITION] + words[FKV_SPLIT_N_QUERIES] - 1;
    fkv_u32 n_fixed = words[FKV_SPLIT_N_FIXED];
    for (fkv_u32 tile = stream; tile < n_tiles; tile += FKV_STREAMS) {
        fkv_u32 visible = words[FKV_SPLIT_FIRST_VISIBLE] + tile * FKV_PLAIN_KEYS / FKV_PAGE_TOKENS;
        fkv_u32 logical = FKV_WINDOW == 0 || visible + 1 < FKV_SINK_PAGES + 1 ? visible : visible + words[FKV_SPLIT_SKIPPED];
        fkv_u32 entry = logical < n_fixed ? logical : n_fixed + (logical - n_fixed) % words[FKV_SPLIT_N_RING];
        FKV_DEVICE const fkv_u8 *block = blocks + (fkv_u64)pages[entry] * FKV_G * FKV_BLOCK_BYTES;
        fkv_u32 slot = tile * FKV_PLAIN_KEYS % FKV_PAGE_TOKENS;
        fkv_u32 base = logical * FKV_PAGE_TOKENS + slot;
        fkv_u32 n_keys = last - base + 1 < FKV_PLAIN_KEYS ? last - base + 1
                                                          : FKV_PLAIN_KEYS; /* slots past the last query contain stale data */
        fkv_plain_process_tile(lane, shared, weights, block, slot, base, n_keys, rows FKV_ORDER_GIVEN);
    }
}

/* Adds the output sums of all streams in stream order, and stores the maximum score and the total weight of each stream in shared
 * memory. */
FKV_FN void fkv_plain_fold(fkv_u32 stream, fkv_u32 lane, FKV_SHARED float *shared,
                           FKV_LOCAL fkv_plain_rows<FKV_ITEM_ROWS> &rows) {
    FKV_SHARED float *stats = shared + FKV_SHARED_STATS;
    FKV_SHARED float *sums = shared + FKV_SHARED_SUMS;
    FKV_UNROLL
    for (int row = 0; row < FKV_ITEM_ROWS; row++) {
        float total = fkv_plain_total(rows.total[row]);
        if (lane == 0) {
            stats[(stream * FKV_ITEM_ROWS + (fkv_u32)row) * 2] = rows.max[row];
            stats[(stream * FKV_ITEM_ROWS + (fkv_u32)row) * 2 + 1] = total;
        }
    }
    fkv_sync();
    for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
        if (s == stream) {
            FKV_UNROLL
            for (int row = 0; row < FKV_ITEM_ROWS; row++) {
                float largest = FKV_NO_SCORE;
                for (fkv_u32 o = 0; o < FKV_STREAMS; o++)
                    largest = fkv_max(largest, stats[(o * FKV_ITEM_ROWS + (fkv_u32)row) * 2]);
                float factor = rows.max[row] == FKV_NO_SCORE ? 0.0f : fkv_exp2(rows.max[row] - largest);
                FKV_UNROLL
                for (int i = 0; i < FKV_PLAIN_CHANNELS; i++) {
                    fkv_u32 d = lane + 32 * (fkv_u32)i;
                    if (d >= FKV_D) continue;
                    float x = rows.sum[row][i] * factor;
                    sums[(fkv_u32)row * FKV_D + d] = s == 0 ? x : sums[(fkv_u32)row * FKV_D + d] + x;
                }
            }
        }
        fkv_sync();
    }
}

/* Stores the output sum, maximum score and total weight of each row of the split for the merge kernel. */
FKV_FN void fkv_plain_store(FKV_LOCAL const fkv_split &split, fkv_place place, FKV_SHARED const float *shared,
                            FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    FKV_SHARED const float *stats = shared + FKV_SHARED_STATS;
    fkv_u64 first = ((fkv_u64)split.number * FKV_G + place.y) * split.all_rows + split.first_row;
    for (fkv_u32 i = place.index; i < split.n_rows * FKV_D; i += FKV_DECODE_THREADS)
        parts[first * FKV_D + i] = shared[FKV_SHARED_SUMS + i];
    if (place.index >= split.n_rows) return;
    float largest = FKV_NO_SCORE;
    for (fkv_u32 s = 0; s < FKV_STREAMS; s++) largest = fkv_max(largest, stats[(s * FKV_ITEM_ROWS + place.index) * 2]);
    float all = 0.0f;
    for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
        float own = stats[(s * FKV_ITEM_ROWS + place.index) * 2];
        all =
            fkv_fma(own == FKV_NO_SCORE ? 0.0f : fkv_exp2(own - largest), stats[(s * FKV_ITEM_ROWS + place.index) * 2 + 1], all);
    }
    FKV_DEVICE float *to = parts + fkv_stats_at(table, place.y * split.all_rows + split.first_row + place.index, split.number);
    to[0] = largest;
    to[1] = all;
}

/* Body of the decode kernel. decode_mma.h describes its inputs and the format of its partial results. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts FKV_ORDER) {
    fkv_u32 lane = place.index % 32;
    fkv_u32 stream = place.index / 32;
    fkv_split split = fkv_split_at(place, table);
    if (split.n_rows == 0) return;
    FKV_SHARED float *queries = (FKV_SHARED float *)shared;
    fkv_plain_rows<FKV_ITEM_ROWS> rows;
    fkv_plain_begin(rows);
    for (int row = 0; row < FKV_ITEM_ROWS; row++) { /* unused rows are copies of the first row */
        fkv_u32 of_item = split.first_row + ((fkv_u32)row < split.n_rows ? (fkv_u32)row : 0);
        fkv_u64 token = split.words[FKV_SPLIT_FIRST_TOKEN] + of_item / FKV_R;
        rows.position[row] = split.words[FKV_SPLIT_POSITION] + of_item / FKV_R;
        if ((fkv_u32)row % FKV_STREAMS == stream)
            fkv_load_query(lane, q, (token * FKV_H + place.y * FKV_R + of_item % FKV_R) * FKV_D,
                           queries + row * FKV_D FKV_ORDER_GIVEN);
    }
    fkv_sync();
    FKV_DEVICE const fkv_u8 *blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    fkv_plain_process_stream(split, stream, lane, blocks, table, queries, rows FKV_ORDER_GIVEN);
    fkv_plain_fold(stream, lane, queries, rows);
    fkv_plain_store(split, place, queries, table, parts);
}
