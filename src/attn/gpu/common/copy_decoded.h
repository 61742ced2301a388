/* Completes `out` in steps that contain both prefill tiles and decode items. The decode kernels have already computed the output
 * rows of the decode items. One additional thread block per KV head copies these rows into the output of prefill. In the grid,
 * these blocks follow the blocks of the prefill tiles.
 */
FKV_FN bool fkv_copies_decoded(fkv_place place, FKV_DEVICE const fkv_u32 *table) { return place.x >= table[FKV_STEP_N_TILES]; }

FKV_FN void fkv_copy_decoded_rows(fkv_place place, FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const void *decoded,
                                  FKV_DEVICE void *out) {
    if (place.z > 0) return;
    for (fkv_u32 i = 0; i < table[FKV_STEP_N_ITEMS]; i++) {
        FKV_DEVICE const fkv_u32 *item = table + table[FKV_STEP_ITEMS] + i * FKV_ITEM_WORDS;
        for (fkv_u32 query = 0; query < item[FKV_ITEM_N_QUERIES]; query++) {
            fkv_u64 first = ((fkv_u64)(item[FKV_ITEM_FIRST_TOKEN] + query) * FKV_G + place.y) * (FKV_R * FKV_D);
            for (fkv_u32 d = place.index; d < FKV_R * FKV_D; d += FKV_PREFILL_THREADS)
                fkv_put_row_value(out, first + d, fkv_row_value(decoded, first + d));
        }
    }
}
