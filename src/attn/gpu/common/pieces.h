/* What one block of decode does: a piece of an item's history for up to ROWS of its rows. Stands once, before the texts that walk
 * it: a sealed layer has two of them, for its two pools.
 */
struct fkv_piece {
    FKV_DEVICE const fkv_u32 *words; /* of the step table */
    fkv_u32 number;                  /* of all pieces */
    fkv_u32 all_rows;                /* of an item, at most */
    fkv_u32 first_row;               /* of this block */
    fkv_u32 n_rows;                  /* of this block; 0: none */
};

template <int ROWS = FKV_ITEM_ROWS> FKV_FN fkv_piece fkv_piece_at(fkv_place place, FKV_DEVICE const fkv_u32 *table) {
    fkv_piece x;
    const fkv_u32 heads = FKV_H / FKV_G; /* of queries, for the one of K and V */
    x.all_rows = heads * table[FKV_STEP_ITEM_QUERIES];
    fkv_u32 n_chunks = (x.all_rows + ROWS - 1) / ROWS;
    x.number = place.x / n_chunks;
    x.first_row = place.x % n_chunks * ROWS;
    x.words = table + FKV_STEP_HEADER + x.number * FKV_PIECE_WORDS;
    fkv_u32 n_rows = heads * x.words[FKV_PIECE_N_QUERIES]; /* of the item */
    fkv_u32 left = x.first_row >= n_rows ? 0 : n_rows - x.first_row;
    x.n_rows = left < ROWS ? left : ROWS;
    return x;
}
