/* Prefill kernel without matrix instructions (plain_tile.h), for devices and layers that neither prefill_wgmma.h nor
 * prefill_simdgroup.h supports. Grid: (tile of queries, KV head, slice of FKV_PREFILL_ROWS rows). Each warp processes
 * FKV_WARP_ROWS rows at a time and iterates over all keys of these rows.
 *
 * The result of a row does not depend on batching: tiles of keys start at multiples of their length, and a fully masked tile adds
 * nothing.
 */
#define FKV_WARP_ROWS (FKV_D > 256 ? 2 : 4)
#define FKV_PREFILL_WARPS (FKV_PREFILL_THREADS / 32)

/* shared memory per warp, in words: queries [rows, D], softmax weights [rows, 32]. Layers with calibrated keys have two copies of
 * the queries: one in the channel order of the sealed pages, and one for open pages, in which the channels are not reordered. */
#define FKV_OPEN_QUERIES (FKV_CALIBRATED * FKV_WARP_ROWS * FKV_D) /* offset of the queries for open pages */
#define FKV_WARP_WORDS (FKV_OPEN_QUERIES + FKV_WARP_ROWS * FKV_D + FKV_WARP_ROWS * 32)
#define FKV_PREFILL_SHARED (FKV_PREFILL_WARPS * FKV_WARP_WORDS)

/* Computes the attention of query rows [first, first + n) of a tile, where n <= FKV_WARP_ROWS. Called by one warp. */
FKV_FN void fkv_prefill_rows(fkv_place place, FKV_SHARED float *queries, FKV_DEVICE const void *q,
                             FKV_DEVICE const void *pool FKV_OPEN_POOL, FKV_DEVICE const fkv_u32 *table,
                             FKV_DEVICE const float *sink_logits, FKV_DEVICE const fkv_u32 *tile, fkv_u32 first, fkv_u32 n,
                             FKV_DEVICE void *out) {
    fkv_u32 lane = place.index % 32;
    FKV_SHARED float *weights = queries + FKV_OPEN_QUERIES + FKV_WARP_ROWS * FKV_D;
    FKV_DEVICE const fkv_u32 *row_words = table + table[FKV_STEP_ROWS] + tile[FKV_TILE_ROW] * FKV_ROW_WORDS;
    FKV_DEVICE const fkv_u8 *blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    fkv_u64 at[FKV_WARP_ROWS];
    fkv_plain_rows<FKV_WARP_ROWS> rows;
    fkv_plain_begin(rows);
    FKV_UNROLL
    for (int row = 0; row < FKV_WARP_ROWS; row++) { /* unused rows are copies of the first row */
        fkv_u32 r = first + ((fkv_u32)row < n ? (fkv_u32)row : 0);
        at[row] = ((fkv_u64)(tile[FKV_TILE_FIRST_TOKEN] + r / FKV_R) * FKV_H + place.y * FKV_R + r % FKV_R) * FKV_D;
        rows.position[row] = tile[FKV_TILE_POSITION] + r / FKV_R;
        fkv_load_query(lane, q, at[row], queries + (fkv_u32)row * FKV_D FKV_ORDER_GIVEN);
#if FKV_CALIBRATED
        opened::fkv_load_query(lane, q, at[row], queries + FKV_OPEN_QUERIES + (fkv_u32)row * FKV_D, order);
#endif
    }
    fkv_u32 low = tile[FKV_TILE_POSITION] + first / FKV_R;
    fkv_u32 last = tile[FKV_TILE_POSITION] + (first + n - 1) / FKV_R;
    for (fkv_u32 base = 0; base <= last; base += FKV_PLAIN_KEYS) {
        if (FKV_WINDOW != 0 && base + FKV_PLAIN_KEYS + FKV_WINDOW <= low + 1 && base + 1 >= FKV_SINKS + 1)
            continue; /* the whole tile is masked for every row */
        fkv_u32 n_keys = last - base + 1 < FKV_PLAIN_KEYS ? last - base + 1
                                                          : FKV_PLAIN_KEYS; /* slots past the last query contain stale data */
#if FKV_SEALED
        fkv_u32 logical = base / FKV_PAGE_TOKENS;
        if (fkv_reads_open(low / FKV_PAGE_TOKENS, logical)) { /* all queries of a tile are in one page */
            FKV_DEVICE const fkv_u8 *opened_block =
                (FKV_DEVICE const fkv_u8 *)open +
                ((fkv_u64)fkv_open_page_at(table, row_words, logical) * FKV_G + place.y) * FKV_OPEN_BLOCK_BYTES;
            opened::fkv_plain_process_tile(lane, queries + FKV_OPEN_QUERIES, weights, opened_block, base % FKV_PAGE_TOKENS, base,
                                           n_keys, rows FKV_ORDER_GIVEN);
            continue;
        }
#endif
        FKV_DEVICE const fkv_u8 *block =
            blocks + (fkv_u64)fkv_page_at(table, row_words, base / FKV_PAGE_TOKENS) * FKV_G * FKV_BLOCK_BYTES;
        fkv_plain_process_tile(lane, queries, weights, block, base % FKV_PAGE_TOKENS, base, n_keys, rows FKV_ORDER_GIVEN);
    }
    FKV_UNROLL
    for (int row = 0; row < FKV_WARP_ROWS; row++) {
        fkv_u32 head = place.y * FKV_R + (first + (fkv_u32)row) % FKV_R;
        float factor = 1.0f / fkv_denominator(fkv_plain_total(rows.total[row]), rows.max[row], sink_logits, head);
        FKV_SHARED float *to = queries + (fkv_u32)row * FKV_D;
        FKV_UNROLL
        for (int i = 0; i < FKV_PLAIN_CHANNELS; i++)
            if (lane + 32 * (fkv_u32)i < FKV_D) to[lane + 32 * (fkv_u32)i] = rows.sum[row][i];
        fkv_sync_warp();
        if ((fkv_u32)row < n) fkv_store_row(lane, to, factor, out, at[row]);
    }
    fkv_sync_warp(); /* all lanes must finish these rows before the next rows' queries overwrite the shared memory */
}

FKV_FN void fkv_attend_prefill(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q,
                               FKV_DEVICE const void *pool FKV_OPEN_POOL, FKV_DEVICE const fkv_u32 *table,
                               FKV_DEVICE const float *sink_logits, FKV_DEVICE void *out) {
    fkv_u32 warp = place.index / 32;
    FKV_DEVICE const fkv_u32 *tile = table + table[FKV_STEP_TILES] + place.x * FKV_TILE_WORDS;
    fkv_u32 first = place.z * FKV_PREFILL_ROWS;
    fkv_u32 end = tile[FKV_TILE_N_QUERIES] * FKV_R;
    if (end > first + FKV_PREFILL_ROWS) end = first + FKV_PREFILL_ROWS;
    for (fkv_u32 row = first + warp * FKV_WARP_ROWS; row < end; row += FKV_PREFILL_WARPS * FKV_WARP_ROWS) {
        fkv_u32 n = end - row < FKV_WARP_ROWS ? end - row : FKV_WARP_ROWS;
        fkv_prefill_rows(place, (FKV_SHARED float *)shared + warp * FKV_WARP_WORDS, q, pool FKV_OPEN_GIVEN, table, sink_logits,
                         tile, row, n, out);
    }
}
