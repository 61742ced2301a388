/* Decode kernel that uses simdgroup matrices (simdgroup_walk.h). All simdgroups of a thread block together process one split of
 * the history of one KV head, for eight query rows. This kernel is used for layers with at least five query heads per KV head.
 * With fewer query heads, at least half of the eight rows of a matrix would be unused, so decode_plain.h is used instead.
 *
 * The choice of kernel depends only on the layer, and rows never exchange data. The result of a query is therefore bit-identical
 * whether it is computed alone, with other queries of its sequence, or in a batch.
 */
#define FKV_DECODE_SHARED SG_SHARED(FKV_ITEM_ROWS)

/* Body of the decode kernel. decode_mma.h describes its inputs and the format of its partial results. FORM is
 * sg_own_form or sg_open_form, depending on the pool that the split reads. */
template <class FORM>
FKV_FN void sg_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                      FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts FKV_ORDER) {
    fkv_split split = fkv_split_at<FKV_ITEM_ROWS>(place, table);
    if (split.n_rows == 0) return;
    FKV_DEVICE const fkv_u32 *words = split.words;
    sg_item item;
    item.first_row = split.first_row;
    item.n_rows = split.n_rows;
    item.first_token = words[FKV_SPLIT_FIRST_TOKEN];
    item.position = words[FKV_SPLIT_POSITION];

    sg_keys keys;
    keys.in.blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FORM::BLOCK_BYTES;
    keys.in.pages = table + words[FKV_SPLIT_PAGES];
    keys.in.n_fixed = words[FKV_SPLIT_N_FIXED];
    keys.in.n_ring = words[FKV_SPLIT_N_RING];
    keys.first = words[FKV_SPLIT_FIRST_VISIBLE] * FKV_PAGE_TOKENS;
    keys.end = keys.first + words[FKV_SPLIT_N_TOKENS];
    keys.gap_at = FKV_SINK_PAGES * FKV_PAGE_TOKENS;
    keys.gap = words[FKV_SPLIT_SKIPPED] * FKV_PAGE_TOKENS;
    keys.begin = 0; /* 0, because `gap` already skips the pages before the window */
#if FKV_CALIBRATED
    keys.order = order;
#endif

    FKV_SHARED float *sums = (FKV_SHARED float *)shared;
    sg_attend<FKV_ITEM_ROWS, FORM>(place, sums, item, keys, q);
    fkv_u64 first = ((fkv_u64)split.number * FKV_G + place.y) * split.all_rows + split.first_row;
    for (fkv_u32 i = place.index; i < item.n_rows * FKV_D; i += SG_THREADS)
        parts[first * FKV_D + i] = sums[i / FKV_D * SG_ROW + i % FKV_D];
    if (place.index < item.n_rows) {
        FKV_SHARED const float *stats = sums + SG_AT_FACTORS(FKV_ITEM_ROWS) + place.index * 8;
        FKV_DEVICE float *to = parts + fkv_stats_at(table, place.y * split.all_rows + item.first_row + place.index, split.number);
        to[0] = stats[0];
        to[1] = stats[1];
    }
}

FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts FKV_ORDER) {
    sg_decode<sg_own_form>(place, shared, q, pool, table, parts FKV_ORDER_GIVEN);
}

#if FKV_SEALED
namespace opened {
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts FKV_ORDER) {
    sg_decode<sg_open_form>(place, shared, q, pool, table, parts FKV_ORDER_GIVEN);
}
} // namespace opened
#endif
