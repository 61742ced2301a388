/* Prefill kernel that uses simdgroup matrices (simdgroup_walk.h). Grid: (tile of the step table, KV head, slice of
 * FKV_PREFILL_ROWS rows of queries x heads). Scores never leave the block.
 *
 * The result of a row does not depend on batching: tiles of keys start at multiples of 32 tokens, and masked keys add only zeros.
 * Tiles are skipped if they start after the position of the last row, or if they are between the sinks and the window of the
 * first row.
 */
#define FKV_PREFILL_SHARED SG_SHARED(FKV_PREFILL_ROWS)

FKV_FN void fkv_attend_prefill(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q,
                               FKV_DEVICE const void *pool FKV_OPEN_POOL, FKV_DEVICE const fkv_u32 *table,
                               FKV_DEVICE const float *sink_logits, FKV_DEVICE void *out) {
    FKV_DEVICE const fkv_u32 *tile = table + table[FKV_STEP_TILES] + place.x * FKV_TILE_WORDS;
    FKV_DEVICE const fkv_u32 *of_row = table + table[FKV_STEP_ROWS] + tile[FKV_TILE_ROW] * FKV_ROW_WORDS;
    sg_item item;
    item.first_row = place.z * FKV_PREFILL_ROWS;
    item.n_rows = tile[FKV_TILE_N_QUERIES] * FKV_R;
    if (item.first_row >= item.n_rows) return;
    item.n_rows = item.n_rows - item.first_row < FKV_PREFILL_ROWS ? item.n_rows - item.first_row : FKV_PREFILL_ROWS;
    item.first_token = tile[FKV_TILE_FIRST_TOKEN];
    item.position = tile[FKV_TILE_POSITION];

    sg_keys keys;
    keys.in.blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    keys.in.pages = table + of_row[FKV_ROW_PAGES];
    keys.in.n_fixed = of_row[FKV_ROW_N_FIXED];
    keys.in.n_ring = of_row[FKV_ROW_N_RING];
#if FKV_SEALED
    keys.open.blocks = (FKV_DEVICE const fkv_u8 *)open + (fkv_u64)place.y * FKV_OPEN_BLOCK_BYTES;
    keys.open.pages = table + of_row[FKV_ROW_OPEN_PAGES];
    keys.open.n_fixed = of_row[FKV_ROW_OPEN_FIXED];
    keys.open.n_ring = of_row[FKV_ROW_OPEN_RING];
    keys.own = item.position / FKV_PAGE_TOKENS;
#endif
#if FKV_CALIBRATED
    keys.order = order;
#endif
    fkv_u32 low = sg_position(item, 0);
    keys.begin = FKV_WINDOW != 0 && low + 1 > FKV_WINDOW ? low + 1 - FKV_WINDOW : 0;
    keys.gap_at = (FKV_SINKS + SG_KEYS - 1) / SG_KEYS * SG_KEYS;
    fkv_u32 back = keys.begin / SG_KEYS * SG_KEYS;
    keys.gap = back > keys.gap_at ? back - keys.gap_at : 0;
    keys.first = 0;
    keys.end = sg_position(item, item.n_rows - 1) + 1 - keys.gap;

    FKV_SHARED float *sums = (FKV_SHARED float *)shared;
    sg_attend<FKV_PREFILL_ROWS, sg_all_forms>(place, sums, item, keys, q);
    FKV_SHARED const float *stats = sums + SG_AT_FACTORS(FKV_PREFILL_ROWS);
    for (fkv_u32 row = place.index / 32; row < item.n_rows; row += SG_WARPS) {
        fkv_u32 head = place.y * FKV_R + (item.first_row + row) % FKV_R;
        float total = fkv_denominator(stats[row * 8 + 1], stats[row * 8], sink_logits, head);
        fkv_store_row(place.index % 32, sums + row * SG_ROW, 1.0f / total, out, sg_row_at(item, place.y, row));
    }
}
