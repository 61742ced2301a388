/* Prefill in plain loops, for devices without the warpgroups of prefill_wgmma.h: same work, any codec, any head. Blocks are the
 * same: a tile of queries, a KV head, a slice of FKV_PREFILL_ROWS rows. Each warp takes FKV_WARP_ROWS rows at a time and walks
 * the keys for them alone, 32 at a time: each lane scores one key against every row; then each lane owns channels lane, lane +
 * 32, ... and adds the values up. Codes are unpacked in registers, one at a time, once for the rows of the warp.
 *
 * Same answer however it got there: tiles of keys begin at multiples of their length, and one that a row does not see adds
 * nothing.
 */
#define FKV_WARP_ROWS (FKV_D > 256 ? 2 : 4)
#define FKV_PREFILL_WARPS (FKV_PREFILL_THREADS / 32)
#define FKV_KEYS (FKV_PAGE_TOKENS < 32 ? FKV_PAGE_TOKENS : 32)
#define FKV_OWN_CHANNELS ((FKV_D + 31) / 32)
#define FKV_NO_SCORE fkv_float_of(0xff800000u)

/* shared memory of a warp, in words: rows [rows, D], weights [rows, 32] */
#define FKV_WARP_WORDS (FKV_WARP_ROWS * FKV_D + FKV_WARP_ROWS * 32)
#define FKV_PREFILL_SHARED (FKV_PREFILL_WARPS * FKV_WARP_WORDS)

/* The butterflies of a rotation, by one warp: see docs/page_format.md. */
FKV_FN void fkv_turn_row(fkv_u32 lane, FKV_SHARED float *row) {
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        for (fkv_u32 i = lane; i < FKV_D / 2; i += 32) {
            fkv_u32 d = i / h * 2 * h + i % h;
            float a = row[d];
            float b = row[d + h];
            row[d] = a + b;
            row[d + h] = a - b;
        }
        fkv_sync_warp();
    }
    for (fkv_u32 d = lane; d < FKV_D; d += 32) row[d] *= fkv_rotation_norm();
    fkv_sync_warp();
}

/* A row of queries, scaled for a softmax of powers of two and rotated as the keys are, by one warp. */
FKV_FN void fkv_take_query(fkv_u32 lane, FKV_DEVICE const void *q, fkv_u64 from, FKV_SHARED float *row) {
    const float cap = fkv_float_of(FKV_SOFTCAP_BITS);
    const float scale = fkv_float_of(FKV_SCALE_BITS) * (FKV_SOFTCAP_BITS != 0 ? 1.0f / cap : 1.44269504f);
    for (fkv_u32 d = lane; d < FKV_D; d += 32)
        row[d] = fkv_float_of(fkv_bits_of(fkv_row_number(q, from + d) * scale) ^ fkv_k_sign(d));
    fkv_sync_warp();
#if FKV_ROTATE_K
    fkv_turn_row(lane, row);
#endif
}

/* The rows [first, first + n) of a tile, n <= FKV_WARP_ROWS, by one warp. position: of the tile's first query. */
FKV_FN void fkv_prefill_rows(fkv_place place, FKV_SHARED float *queries, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                             FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const fkv_u32 *tile, fkv_u32 first, fkv_u32 n,
                             FKV_DEVICE void *out) {
    fkv_u32 lane = place.index % 32;
    FKV_SHARED float *weights = queries + FKV_WARP_ROWS * FKV_D;
    FKV_DEVICE const fkv_u32 *row_words = table + table[FKV_STEP_ROWS] + tile[FKV_TILE_ROW] * FKV_ROW_WORDS;
    FKV_DEVICE const fkv_u8 *blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    fkv_u64 at[FKV_WARP_ROWS];
    fkv_u32 position[FKV_WARP_ROWS];
    float max[FKV_WARP_ROWS];
    float total[FKV_WARP_ROWS];
    float sum[FKV_WARP_ROWS][FKV_OWN_CHANNELS];
    FKV_UNROLL
    for (int row = 0; row < FKV_WARP_ROWS; row++) { /* rows that are not there repeat the first */
        fkv_u32 r = first + ((fkv_u32)row < n ? (fkv_u32)row : 0);
        at[row] = ((fkv_u64)(tile[FKV_TILE_FIRST_TOKEN] + r / FKV_R) * FKV_H + place.y * FKV_R + r % FKV_R) * FKV_D;
        position[row] = tile[FKV_TILE_POSITION] + r / FKV_R;
        max[row] = FKV_NO_SCORE;
        total[row] = 0.0f;
        FKV_UNROLL
        for (int i = 0; i < FKV_OWN_CHANNELS; i++) sum[row][i] = 0.0f;
        fkv_take_query(lane, q, at[row], queries + (fkv_u32)row * FKV_D);
    }
    fkv_u32 low = tile[FKV_TILE_POSITION] + first / FKV_R;
    fkv_u32 last = tile[FKV_TILE_POSITION] + (first + n - 1) / FKV_R;
    for (fkv_u32 base = 0; base <= last; base += FKV_KEYS) {
        if (FKV_WINDOW != 0 && base + FKV_KEYS + FKV_WINDOW <= low + 1 && base + 1 >= FKV_SINKS + 1)
            continue; /* no row sees it */
        FKV_DEVICE const fkv_u8 *block =
            blocks + (fkv_u64)fkv_page_at(table, row_words, base / FKV_PAGE_TOKENS) * FKV_G * FKV_BLOCK_BYTES;
        fkv_u32 slot = base % FKV_PAGE_TOKENS;
        fkv_u32 n_keys = last - base + 1 < FKV_KEYS ? last - base + 1 : FKV_KEYS; /* behind them: whatever bytes are there */
        float score[FKV_WARP_ROWS];
        FKV_UNROLL
        for (int row = 0; row < FKV_WARP_ROWS; row++) score[row] = 0.0f;
        if (lane < n_keys) {
            fkv_u32 k_at = slot + lane;
            FKV_DEVICE const fkv_u8 *codes = block + FKV_K_CODES + k_at * (FKV_D * FKV_K_BITS / 8);
            FKV_DEVICE const fkv_u8 *scales = block + FKV_K_SCALES + k_at * (FKV_D / FKV_K_GROUP * 2);
            FKV_DEVICE const fkv_u8 *biases = block + FKV_K_BIASES + k_at * (FKV_D / FKV_K_GROUP * 2);
            for (fkv_u32 d = 0; d < FKV_D; d++) {
                float k = fkv_value_at(codes, scales, biases, d, FKV_K_BITS, FKV_K_GROUP);
                FKV_UNROLL
                for (int row = 0; row < FKV_WARP_ROWS; row++)
                    score[row] = fkv_fma(queries[(fkv_u32)row * FKV_D + d], k, score[row]);
            }
        }
        FKV_UNROLL
        for (int row = 0; row < FKV_WARP_ROWS; row++) {
            float x = score[row];
#if FKV_SOFTCAP_BITS != 0
            x = fkv_float_of(FKV_SOFTCAP_BITS) * 1.44269504f * (1.0f - 2.0f / (fkv_exp2(x * 2.88539008f) + 1.0f));
#endif
            x = lane < n_keys && fkv_sees(position[row], base + lane) ? x : FKV_NO_SCORE;
            float largest = fkv_max(max[row], x);
            FKV_UNROLL
            for (fkv_u32 h = 1; h < 32; h *= 2) largest = fkv_max(largest, fkv_shuffle_xor(largest, h));
            float shrink = max[row] == largest ? 1.0f : fkv_exp2(max[row] - largest);
            float mine = fkv_exp2(x - (largest == FKV_NO_SCORE ? 0.0f : largest));
            max[row] = largest;
            total[row] = fkv_fma(total[row], shrink, mine); /* of this lane's keys */
            weights[(fkv_u32)row * 32 + lane] = mine;
            FKV_UNROLL
            for (int i = 0; i < FKV_OWN_CHANNELS; i++) sum[row][i] *= shrink;
        }
        fkv_sync_warp();
        for (fkv_u32 t = 0; t < n_keys; t++) {
            fkv_u32 v_at = slot + t;
            FKV_DEVICE const fkv_u8 *codes = block + FKV_V_CODES + v_at * (FKV_D * FKV_V_BITS / 8);
            FKV_DEVICE const fkv_u8 *scales = block + FKV_V_SCALES + v_at * (FKV_D / FKV_V_GROUP * 2);
            FKV_DEVICE const fkv_u8 *biases = block + FKV_V_BIASES + v_at * (FKV_D / FKV_V_GROUP * 2);
            FKV_UNROLL
            for (int i = 0; i < FKV_OWN_CHANNELS; i++) {
                fkv_u32 d = lane + 32 * (fkv_u32)i;
                float v = d < FKV_D ? fkv_value_at(codes, scales, biases, d, FKV_V_BITS, FKV_V_GROUP) : 0.0f;
                FKV_UNROLL
                for (int row = 0; row < FKV_WARP_ROWS; row++)
                    sum[row][i] = fkv_fma(weights[(fkv_u32)row * 32 + t], v, sum[row][i]);
            }
        }
        fkv_sync_warp(); /* weights are written again */
    }
    FKV_UNROLL
    for (int row = 0; row < FKV_WARP_ROWS; row++) {
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) total[row] += fkv_shuffle_xor(total[row], h);
        float factor = 1.0f / total[row];
        FKV_SHARED float *to = queries + (fkv_u32)row * FKV_D;
        FKV_UNROLL
        for (int i = 0; i < FKV_OWN_CHANNELS; i++)
            if (lane + 32 * (fkv_u32)i < FKV_D) to[lane + 32 * (fkv_u32)i] = sum[row][i] * factor;
        fkv_sync_warp();
#if FKV_ROTATE_V
        fkv_turn_row(lane, to);
#endif
        if ((fkv_u32)row < n)
            for (fkv_u32 d = lane; d < FKV_D; d += 32)
                fkv_put_row_number(out, at[row] + d, fkv_float_of(fkv_bits_of(to[d]) ^ fkv_v_sign(d)));
    }
    fkv_sync_warp(); /* the next rows take the queries' place */
}

FKV_FN void fkv_attend_prefill(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                               FKV_DEVICE const fkv_u32 *table, FKV_DEVICE void *out) {
    fkv_u32 warp = place.index / 32;
    FKV_DEVICE const fkv_u32 *tile = table + table[FKV_STEP_TILES] + place.x * FKV_TILE_WORDS;
    fkv_u32 first = place.z * FKV_PREFILL_ROWS;
    fkv_u32 end = tile[FKV_TILE_N_QUERIES] * FKV_R;
    if (end > first + FKV_PREFILL_ROWS) end = first + FKV_PREFILL_ROWS;
    for (fkv_u32 row = first + warp * FKV_WARP_ROWS; row < end; row += FKV_PREFILL_WARPS * FKV_WARP_ROWS) {
        fkv_u32 n = end - row < FKV_WARP_ROWS ? end - row : FKV_WARP_ROWS;
        fkv_prefill_rows(place, (FKV_SHARED float *)shared + warp * FKV_WARP_WORDS, q, pool, table, tile, row, n, out);
    }
}
