/* A step of prefill tiles and decode items together makes one `out`: attend_merge made the items' rows, and the prefill kernel
 * takes them over. Its grid has one block more for each KV head, behind the tiles, that carries them.
 */
FKV_FN bool fkv_carries(fkv_place place, FKV_DEVICE const fkv_u32 *table) { return place.x >= table[FKV_STEP_N_TILES]; }

FKV_FN void fkv_carry_decoded(fkv_place place, FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const void *decoded,
                              FKV_DEVICE void *out) {
    if (place.z > 0) return;
    for (fkv_u32 i = 0; i < table[FKV_STEP_N_ITEMS]; i++) {
        FKV_DEVICE const fkv_u32 *item = table + table[FKV_STEP_ITEMS] + i * FKV_ITEM_WORDS;
        for (fkv_u32 query = 0; query < item[FKV_ITEM_N_QUERIES]; query++) {
            fkv_u64 first = ((fkv_u64)(item[FKV_ITEM_FIRST_TOKEN] + query) * FKV_G + place.y) * (FKV_R * FKV_D);
            for (fkv_u32 d = place.index; d < FKV_R * FKV_D; d += FKV_PREFILL_THREADS)
                fkv_put_row_number(out, first + d, fkv_row_number(decoded, first + d));
        }
    }
}
