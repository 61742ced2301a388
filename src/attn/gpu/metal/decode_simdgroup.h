/* Decode on the matrices of a simdgroup: see simdgroup_walk.h. One block walks one piece of the history of one KV head for eight
 * rows, all of its simdgroups together. For layers whose KV heads have five query heads or more: with fewer, a matrix of eight
 * rows is half empty, and decode_plain.h is used.
 *
 * Which of the two depends on the layer, never on the step, and rows of a block never meet: so one query, eight of a sequence, or
 * a batch give the same bits.
 */
#define FKV_DECODE_SHARED SG_SHARED(FKV_ITEM_ROWS)

/* See decode_mma.h: the same inputs, the same parts. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    fkv_u32 all_rows = FKV_R * table[FKV_STEP_ITEM_QUERIES];
    fkv_u32 n_chunks = (all_rows + FKV_ITEM_ROWS - 1) / FKV_ITEM_ROWS;
    fkv_u32 number = place.x / n_chunks;
    FKV_DEVICE const fkv_u32 *piece = table + FKV_STEP_HEADER + number * FKV_PIECE_WORDS;
    sg_item item;
    item.first_row = place.x % n_chunks * FKV_ITEM_ROWS;
    item.n_rows = FKV_R * piece[FKV_PIECE_N_QUERIES];
    if (item.first_row >= item.n_rows) return;
    item.n_rows = item.n_rows - item.first_row < FKV_ITEM_ROWS ? item.n_rows - item.first_row : FKV_ITEM_ROWS;
    item.first_token = piece[FKV_PIECE_FIRST_TOKEN];
    item.position = piece[FKV_PIECE_POSITION];

    sg_keys keys;
    keys.blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    keys.pages = table + piece[FKV_PIECE_PAGES];
    keys.n_fixed = piece[FKV_PIECE_N_FIXED];
    keys.n_ring = piece[FKV_PIECE_N_RING];
    keys.first = piece[FKV_PIECE_FIRST_SEEN] * FKV_PAGE_TOKENS;
    keys.end = keys.first + piece[FKV_PIECE_N_TOKENS];
    keys.gap_at = FKV_SINK_PAGES * FKV_PAGE_TOKENS;
    keys.gap = piece[FKV_PIECE_SKIPPED] * FKV_PAGE_TOKENS;
    keys.begin = 0; /* pages that no row sees are in the gap */

    FKV_SHARED float *sums = (FKV_SHARED float *)shared;
    sg_attend<FKV_ITEM_ROWS>(place, sums, item, keys, q);
    fkv_u64 first = ((fkv_u64)number * FKV_G + place.y) * all_rows + item.first_row;
    for (fkv_u32 i = place.index; i < item.n_rows * FKV_D; i += SG_THREADS)
        parts[first * FKV_D + i] = sums[i / FKV_D * SG_ROW + i % FKV_D];
    if (place.index < item.n_rows) {
        FKV_SHARED const float *stats = sums + SG_AT_FACTORS(FKV_ITEM_ROWS) + place.index * 8;
        FKV_DEVICE float *to = parts + fkv_stats_at(table, place.y * all_rows + item.first_row + place.index, number);
        to[0] = stats[0];
        to[1] = stats[1];
    }
}
