/* Describes the work of one thread block in decode: one split of a work item's history, for up to ROWS query rows of the item. A
 * kernel source includes this file once, before the attention functions. The source of a sealed layer contains two versions of
 * the attention functions, one for each pool (open and sealed). */
struct fkv_split {
    FKV_DEVICE const fkv_u32 *words; /* entry of the split in the step table */
    fkv_u32 number;                  /* index of this split among all splits of the step */
    fkv_u32 all_rows;                /* maximum number of query rows per work item, over all items of this step */
    fkv_u32 first_row;               /* index of this block's first query row among the rows of the item */
    fkv_u32 n_rows;                  /* number of query rows of this block; 0 if the block has no work */
};

template <int ROWS = FKV_ITEM_ROWS> FKV_FN fkv_split fkv_split_at(fkv_place place, FKV_DEVICE const fkv_u32 *table) {
    fkv_split x;
    const fkv_u32 heads = FKV_H / FKV_G; /* query heads per KV head */
    x.all_rows = heads * table[FKV_STEP_ITEM_QUERIES];
    /* if this kernel processes only items that fit in one block, the address of the split's entry can be computed without loading
     * a word of the table */
    const bool one = FKV_ONE_CHUNK && ROWS >= FKV_ITEM_ROWS;
    fkv_u32 n_chunks = one ? 1 : (x.all_rows + ROWS - 1) / ROWS;
    x.number = place.x / n_chunks;
    x.first_row = place.x % n_chunks * ROWS;
    x.words = table + FKV_STEP_HEADER + x.number * FKV_SPLIT_WORDS;
    fkv_u32 n_rows = heads * x.words[FKV_SPLIT_N_QUERIES]; /* number of query rows of the item */
    fkv_u32 left = x.first_row >= n_rows ? 0 : n_rows - x.first_row;
    x.n_rows = left < ROWS ? left : ROWS;
    return x;
}
