/* Decode on the matrices of a simdgroup: see simdgroup_walk.h. One block walks one piece of the history of one KV head for eight
 * rows, all of its simdgroups together. For layers whose KV heads have five query heads or more: with fewer, a matrix of eight
 * rows is half empty, and decode_plain.h is used.
 *
 * Which of the two depends on the layer, never on the step, and rows of a block never meet: so one query, eight of a sequence, or
 * a batch give the same bits.
 */
#define FKV_DECODE_SHARED SG_SHARED(FKV_ITEM_ROWS)

/* See decode_mma.h: the same inputs, the same parts. FORM: of the piece's pages. */
template <class FORM>
FKV_FN void sg_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                      FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    fkv_piece piece = fkv_piece_at<FKV_ITEM_ROWS>(place, table);
    if (piece.n_rows == 0) return;
    FKV_DEVICE const fkv_u32 *words = piece.words;
    sg_item item;
    item.first_row = piece.first_row;
    item.n_rows = piece.n_rows;
    item.first_token = words[FKV_PIECE_FIRST_TOKEN];
    item.position = words[FKV_PIECE_POSITION];

    sg_keys keys;
    keys.in.blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FORM::BLOCK_BYTES;
    keys.in.pages = table + words[FKV_PIECE_PAGES];
    keys.in.n_fixed = words[FKV_PIECE_N_FIXED];
    keys.in.n_ring = words[FKV_PIECE_N_RING];
    keys.first = words[FKV_PIECE_FIRST_SEEN] * FKV_PAGE_TOKENS;
    keys.end = keys.first + words[FKV_PIECE_N_TOKENS];
    keys.gap_at = FKV_SINK_PAGES * FKV_PAGE_TOKENS;
    keys.gap = words[FKV_PIECE_SKIPPED] * FKV_PAGE_TOKENS;
    keys.begin = 0; /* pages that no row sees are in the gap */

    FKV_SHARED float *sums = (FKV_SHARED float *)shared;
    sg_attend<FKV_ITEM_ROWS, FORM>(place, sums, item, keys, q);
    fkv_u64 first = ((fkv_u64)piece.number * FKV_G + place.y) * piece.all_rows + piece.first_row;
    for (fkv_u32 i = place.index; i < item.n_rows * FKV_D; i += SG_THREADS)
        parts[first * FKV_D + i] = sums[i / FKV_D * SG_ROW + i % FKV_D];
    if (place.index < item.n_rows) {
        FKV_SHARED const float *stats = sums + SG_AT_FACTORS(FKV_ITEM_ROWS) + place.index * 8;
        FKV_DEVICE float *to = parts + fkv_stats_at(table, place.y * piece.all_rows + item.first_row + place.index, piece.number);
        to[0] = stats[0];
        to[1] = stats[1];
    }
}

FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    sg_decode<sg_own_form>(place, shared, q, pool, table, parts);
}

#if FKV_SEALED
namespace opened {
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    sg_decode<sg_open_form>(place, shared, q, pool, table, parts);
}
} // namespace opened
#endif
