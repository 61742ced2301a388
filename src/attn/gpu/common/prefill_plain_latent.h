/* Prefill kernel for latent pages without matrix instructions, for CUDA devices other than Hopper. Grid: (tile of queries, 1,
 * slice of FKV_PREFILL_ROWS rows). Each warp processes one row at a time: a lane first computes the score of one key and then
 * accumulates the values of channels lane, lane + 32, ...
 *
 * The result of a row does not depend on batching: tiles of keys start at multiples of FKV_PLAIN_KEYS, and a fully masked tile
 * adds nothing.
 */
#define FKV_LATENT_WARPS (FKV_PREFILL_THREADS / 32)
#define FKV_LATENT_WORDS (FKV_D + FKV_ROPE) /* shared memory per warp */
#define FKV_PREFILL_SHARED (FKV_LATENT_WARPS * FKV_LATENT_WORDS)

FKV_FN float fkv_latent_score(FKV_SHARED const float *query, FKV_DEVICE const fkv_u8 *block, fkv_u32 slot) {
    FKV_DEVICE const fkv_u16 *rope = (FKV_DEVICE const fkv_u16 *)(block + FKV_V_CODES + slot * (FKV_ROPE * 2));
    float score = 0.0f;
    for (fkv_u32 d = 0; d < FKV_D; d++) score = fkv_fma(query[d], fkv_k_at(block, slot, d), score);
    for (fkv_u32 d = 0; d < FKV_ROPE; d++) score = fkv_fma(query[FKV_D + d], fkv_page_value(rope[d]), score);
    return score;
}

/* Computes the attention of one row. token: index of the query among the step's tokens. */
FKV_FN void fkv_latent_row(fkv_u32 lane, FKV_SHARED float *query, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                           FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const fkv_u32 *row, FKV_DEVICE const float *sink_logits,
                           fkv_u32 token, fkv_u32 head, fkv_u32 position, FKV_DEVICE void *out) {
    const float scale = fkv_float_of(FKV_SCALE_BITS) * 1.44269504f;
    const fkv_u64 at = (fkv_u64)token * FKV_H + head;
    const fkv_u64 from = at * (FKV_D + FKV_ROPE);
    fkv_load_query(lane, q, from, query);
    for (fkv_u32 d = lane; d < FKV_ROPE; d += 32) query[FKV_D + d] = fkv_row_value(q, from + FKV_D + d) * scale;
    fkv_sync_warp();
    fkv_plain_rows<1> state;
    fkv_plain_begin(state);
    for (fkv_u32 base = 0; base <= position; base += FKV_PLAIN_KEYS) {
        if (FKV_WINDOW != 0 && base + FKV_PLAIN_KEYS + FKV_WINDOW <= position + 1 && base + 1 >= FKV_SINKS + 1)
            continue; /* the whole tile is masked */
        FKV_DEVICE const fkv_u8 *block =
            (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)fkv_page_at(table, row, base / FKV_PAGE_TOKENS) * FKV_BLOCK_BYTES;
        fkv_u32 slot = base % FKV_PAGE_TOKENS;
        bool visible = lane < FKV_PLAIN_KEYS && fkv_is_visible(position, base + lane);
        float x = visible ? fkv_cap(fkv_latent_score(query, block, slot + lane)) : FKV_NO_SCORE;
        float largest = fkv_max(state.max[0], x);
        for (fkv_u32 h = 1; h < 32; h *= 2) largest = fkv_max(largest, fkv_shuffle_xor(largest, h));
        float shrink = state.max[0] == largest ? 1.0f : fkv_exp2(state.max[0] - largest);
        float mine = fkv_exp2(x - (largest == FKV_NO_SCORE ? 0.0f : largest));
        state.max[0] = largest;
        state.total[0] = fkv_fma(state.total[0], shrink, mine);
        for (int i = 0; i < FKV_PLAIN_CHANNELS; i++) state.sum[0][i] *= shrink;
        for (fkv_u32 t = 0; t < FKV_PLAIN_KEYS; t++) {
            float weight = fkv_shuffle(mine, t);
            if (!fkv_is_visible(position, base + t)) continue; /* masked keys are skipped explicitly, because 0 * NaN is NaN */
            for (int i = 0; i < FKV_PLAIN_CHANNELS; i++)
                state.sum[0][i] = fkv_fma(weight, fkv_k_at(block, slot + t, lane + 32 * (fkv_u32)i), state.sum[0][i]);
        }
    }
    float factor = 1.0f / fkv_denominator(fkv_plain_total(state.total[0]), state.max[0], sink_logits, head);
    for (int i = 0; i < FKV_PLAIN_CHANNELS; i++) query[lane + 32 * (fkv_u32)i] = state.sum[0][i];
    fkv_sync_warp();
    fkv_store_row(lane, query, factor, out, at * FKV_D);
    fkv_sync_warp(); /* all lanes must finish this row before the next row's query overwrites the shared memory */
}

FKV_FN void fkv_attend_prefill(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                               FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const float *sink_logits, FKV_DEVICE void *out) {
    fkv_u32 warp = place.index / 32;
    FKV_DEVICE const fkv_u32 *tile = table + table[FKV_STEP_TILES] + place.x * FKV_TILE_WORDS;
    FKV_DEVICE const fkv_u32 *row = table + table[FKV_STEP_ROWS] + tile[FKV_TILE_ROW] * FKV_ROW_WORDS;
    fkv_u32 first = place.z * FKV_PREFILL_ROWS;
    fkv_u32 end = tile[FKV_TILE_N_QUERIES] * FKV_R;
    if (end > first + FKV_PREFILL_ROWS) end = first + FKV_PREFILL_ROWS;
    for (fkv_u32 r = first + warp; r < end; r += FKV_LATENT_WARPS)
        fkv_latent_row(place.index % 32, (FKV_SHARED float *)shared + warp * FKV_LATENT_WORDS, q, pool, table, row, sink_logits,
                       tile[FKV_TILE_FIRST_TOKEN] + r / FKV_R, r % FKV_R, tile[FKV_TILE_POSITION] + r / FKV_R, out);
}
