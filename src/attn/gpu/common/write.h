/* Writes new K and V rows into their pages. One warp converts a row to float, rotates it and encodes it directly into its slot
 * (write_rows.h); no full-precision copy is stored. Grid: (T, G, 2), where z selects K or V; each block has 32 threads.
 *
 * A second kernel in this file copies pages for copy-on-write. It uses one block of 128 threads per (page to copy, KV head).
 */
/* Writes the rows k: [T, G, D] and v: [T, G, D]. In a latent layer, k is [T, D + R], and v is the same array: its RoPE channels
 * are stored as 16-bit values on the V side of the block. The kernel writes to the pool through a const pointer, because the
 * framework passes the pool as an input. The only purpose of the output `done` is to make the framework run later kernels after
 * this one. */
FKV_FN void fkv_write(fkv_place place, FKV_DEVICE const void *k, FKV_DEVICE const void *v, FKV_DEVICE const void *pool,
                      FKV_DEVICE const fkv_u32 *table, FKV_DEVICE fkv_u32 *done) {
    fkv_u32 lane = place.index;
    fkv_u32 place_of_token = table[table[FKV_STEP_SLOTS] + place.x];
    fkv_u32 slot = place_of_token % FKV_PAGE_TOKENS;
    FKV_DEVICE fkv_u8 *block =
        (FKV_DEVICE fkv_u8 *)pool + ((fkv_u64)(place_of_token / FKV_PAGE_TOKENS) * FKV_G + place.y) * FKV_BLOCK_BYTES;
    fkv_u64 from = ((fkv_u64)place.x * FKV_G + place.y) * (FKV_D + FKV_ROPE);
    if (FKV_ROPE != 0 && place.z == 1) {
        FKV_DEVICE fkv_u16 *to = (FKV_DEVICE fkv_u16 *)(block + FKV_V_CODES) + slot * FKV_ROPE;
        for (int d = (int)lane; d < FKV_ROPE; d += 32)
            to[d] = (fkv_u16)fkv_page_bits(fkv_storable(fkv_row_value(v, from + FKV_D + (fkv_u32)d)));
        return;
    }
    float x[FKV_WRITE_VALUES];
    fkv_u32 signs[FKV_WRITE_VALUES];
    FKV_UNROLL
    for (int i = 0; i < FKV_WRITE_VALUES; i++) {
        fkv_u32 d = lane + 32 * (fkv_u32)i;
        x[i] = d >= FKV_D ? 0.0f : place.z == 0 ? fkv_row_value(k, from + d) : fkv_row_value(v, from + d);
        signs[i] = d >= FKV_D ? 0u : place.z == 0 ? fkv_k_sign(d) : fkv_v_sign(d);
    }
    if (place.z == 0)
        fkv_write_row(x, signs, FKV_ROTATE_K != 0, FKV_ROTATE_K != 0, FKV_K_BOOK ? 1 : 0, FKV_K_BITS,
                      FKV_K_BOOK ? 32 : FKV_K_GROUP, block + FKV_K_CODES + slot * (FKV_D * FKV_K_BITS / 8),
                      block + FKV_K_SCALES + slot * (FKV_D / FKV_K_GROUP * 2),
                      block + FKV_K_BIASES + slot * (FKV_D / FKV_K_GROUP * 2), lane);
    else
        fkv_write_row(x, signs, FKV_ROTATE_V != 0, FKV_ROTATE_V != 0, FKV_V_BOOK ? 2 : 0, FKV_V_BITS,
                      FKV_V_BOOK ? 32 : FKV_V_GROUP, block + FKV_V_CODES + slot * (FKV_D * FKV_V_BITS / 8),
                      block + FKV_V_SCALES + slot * (FKV_D / FKV_V_GROUP * 2),
                      block + FKV_V_BIASES + slot * (FKV_D / FKV_V_GROUP * 2), lane);
    if (place.x == 0 && place.y == 0 && place.z == 0 && lane == 0) done[0] = 1;
}

/* Copies whole pages. pairs: [n, 2], where each pair is {source page, destination page}. */
FKV_FN void fkv_copy_pages(fkv_place place, FKV_DEVICE const fkv_u32 *pairs, FKV_DEVICE const void *pool,
                           FKV_DEVICE fkv_u32 *done) {
    FKV_DEVICE fkv_words4 *blocks = (FKV_DEVICE fkv_words4 *)pool;
    fkv_u64 from = ((fkv_u64)pairs[2 * place.x] * FKV_G + place.y) * (FKV_BLOCK_BYTES / 16);
    fkv_u64 to = ((fkv_u64)pairs[2 * place.x + 1] * FKV_G + place.y) * (FKV_BLOCK_BYTES / 16);
    for (fkv_u32 i = place.index; i < FKV_BLOCK_BYTES / 16; i += 128) {
        FKV_UNROLL
        for (int w = 0; w < 4; w++) blocks[to + i].w[w] = blocks[from + i].w[w];
    }
    if (place.x == 0 && place.y == 0 && place.index == 0) done[0] = 1;
}

/* Stores n 16-bit words in the pool. Used to load page files. where[0] and where[1] are the low and the high 32 bits of the index
 * of the first word in the pool, and where[2] is n. */
FKV_FN void fkv_put_numbers(fkv_place place, FKV_DEVICE const fkv_u16 *numbers, FKV_DEVICE const fkv_u32 *where,
                            FKV_DEVICE const void *pool, FKV_DEVICE fkv_u32 *done) {
    FKV_DEVICE fkv_u16 *to = (FKV_DEVICE fkv_u16 *)pool + ((fkv_u64)where[1] << 32 | where[0]);
    fkv_u32 i = place.x * 128 + place.index;
    if (i < where[2]) to[i] = numbers[i];
    if (i == 0) done[0] = 1;
}
