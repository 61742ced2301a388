/* Decode of a sealed layer: each piece lies in one of its two pools, and is walked by the text for that; the one for open pages
 * is in the namespace `opened`.
 */
FKV_FN bool fkv_piece_is_open(fkv_place place, FKV_DEVICE const fkv_u32 *table) {
    fkv_u32 n_chunks = (FKV_R * table[FKV_STEP_ITEM_QUERIES] + FKV_ITEM_ROWS - 1) / FKV_ITEM_ROWS;
    return table[FKV_STEP_HEADER + place.x / n_chunks * FKV_PIECE_WORDS + FKV_PIECE_OPEN] != 0;
}
