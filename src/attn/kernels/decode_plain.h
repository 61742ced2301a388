/* Decode in plain loops, for devices without the matrix units of decode_mma.h and heads it does not have: same work, same parts,
 * any codec, any head. One block walks one piece of the history of one KV head for up to four rows; its four warps take the tiles
 * of the piece in turn. In a tile each lane scores one token against every row; then each lane owns channels lane, lane + 32, ...
 * and adds the values up. Codes are unpacked in registers, one at a time, once for the four rows.
 */
#define FKV_STREAMS 4
#define FKV_DECODE_THREADS 128
#define FKV_TILE (FKV_PAGE_TOKENS < 32 ? FKV_PAGE_TOKENS : 32)
#define FKV_LANE_CHANNELS ((FKV_D + 31) / 32)
#define FKV_SINK_PAGES ((FKV_SINKS + FKV_PAGE_TOKENS - 1) / FKV_PAGE_TOKENS)
#define FKV_MINUS_INFINITY fkv_float_of(0xff800000u)

/* shared memory, in words: queries [rows, D], p [streams, rows, 32], {max, total} [streams, rows, 2], sums [rows, D] */
#define FKV_SHARED_P (FKV_ITEM_ROWS * FKV_D)
#define FKV_SHARED_STATS (FKV_SHARED_P + FKV_STREAMS * FKV_ITEM_ROWS * 32)
#define FKV_SHARED_SUMS (FKV_SHARED_STATS + FKV_STREAMS * FKV_ITEM_ROWS * 2)
#define FKV_DECODE_SHARED (FKV_SHARED_SUMS + FKV_ITEM_ROWS * FKV_D)

/* One row of queries to shared memory, scaled for a softmax of powers of two and rotated as the keys are. The whole block. */
FKV_FN void fkv_prepare_row(fkv_place place, FKV_DEVICE const void *q, fkv_u64 from, FKV_SHARED float *row) {
    const float cap = fkv_float_of(FKV_SOFTCAP_BITS);
    const float scale = fkv_float_of(FKV_SCALE_BITS) * (FKV_SOFTCAP_BITS != 0 ? 1.0f / cap : 1.44269504f);
    for (fkv_u32 d = place.index; d < FKV_D; d += FKV_DECODE_THREADS) {
        float x = fkv_row_number(q, from + d) * scale;
        row[d] = fkv_float_of(fkv_bits_of(x) ^ fkv_k_sign(d));
    }
    fkv_sync();
#if FKV_ROTATE_K
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        for (fkv_u32 i = place.index; i < FKV_D / 2; i += FKV_DECODE_THREADS) {
            fkv_u32 d = i / h * 2 * h + i % h;
            float a = row[d];
            float b = row[d + h];
            row[d] = a + b;
            row[d + h] = a - b;
        }
        fkv_sync();
    }
    for (fkv_u32 d = place.index; d < FKV_D; d += FKV_DECODE_THREADS) row[d] *= fkv_rotation_norm();
    fkv_sync();
#endif
}

/* See decode_mma.h: the same inputs, the same parts. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    fkv_u32 lane = place.index % 32;
    fkv_u32 stream = place.index / 32;
    fkv_u32 all_rows = FKV_R * table[FKV_STEP_ITEM_QUERIES];
    fkv_u32 n_chunks = (all_rows + FKV_ITEM_ROWS - 1) / FKV_ITEM_ROWS;
    fkv_u32 number = place.x / n_chunks;
    fkv_u32 first_row = place.x % n_chunks * FKV_ITEM_ROWS;
    FKV_DEVICE const fkv_u32 *piece = table + FKV_STEP_HEADER + number * FKV_PIECE_WORDS;
    fkv_u32 n_rows = FKV_R * piece[FKV_PIECE_N_QUERIES];
    if (first_row >= n_rows) return;
    n_rows = n_rows - first_row < FKV_ITEM_ROWS ? n_rows - first_row : FKV_ITEM_ROWS;
    fkv_u32 n_tiles = (piece[FKV_PIECE_N_TOKENS] + FKV_TILE - 1) / FKV_TILE;
    fkv_u32 position = piece[FKV_PIECE_POSITION];
    fkv_u32 last = position + piece[FKV_PIECE_N_QUERIES] - 1;
    fkv_u32 n_fixed = piece[FKV_PIECE_N_FIXED];
    FKV_DEVICE const fkv_u32 *pages = table + piece[FKV_PIECE_PAGES];
    FKV_DEVICE const fkv_u8 *blocks = (FKV_DEVICE const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    FKV_SHARED float *queries = (FKV_SHARED float *)shared;
    FKV_SHARED float *p = queries + FKV_SHARED_P + stream * FKV_ITEM_ROWS * 32;
    FKV_SHARED float *stats = queries + FKV_SHARED_STATS;
    FKV_SHARED float *sums = queries + FKV_SHARED_SUMS;

    for (fkv_u32 row = 0; row < FKV_ITEM_ROWS; row++) { /* rows that are not there repeat the first */
        fkv_u32 of_item = first_row + (row < n_rows ? row : 0);
        fkv_u64 token = piece[FKV_PIECE_FIRST_TOKEN] + of_item / FKV_R;
        fkv_prepare_row(place, q, (token * FKV_H + place.y * FKV_R + of_item % FKV_R) * FKV_D, queries + row * FKV_D);
    }

    float max[FKV_ITEM_ROWS];
    float total[FKV_ITEM_ROWS];
    float sum[FKV_ITEM_ROWS][FKV_LANE_CHANNELS];
    FKV_UNROLL
    for (int row = 0; row < FKV_ITEM_ROWS; row++) {
        max[row] = FKV_MINUS_INFINITY;
        total[row] = 0.0f;
        FKV_UNROLL
        for (int i = 0; i < FKV_LANE_CHANNELS; i++) sum[row][i] = 0.0f;
    }
    for (fkv_u32 tile = stream; tile < n_tiles; tile += FKV_STREAMS) {
        fkv_u32 seen = piece[FKV_PIECE_FIRST_SEEN] + tile * FKV_TILE / FKV_PAGE_TOKENS;
        fkv_u32 logical = FKV_WINDOW == 0 || seen + 1 < FKV_SINK_PAGES + 1 ? seen : seen + piece[FKV_PIECE_SKIPPED];
        fkv_u32 entry = logical < n_fixed ? logical : n_fixed + (logical - n_fixed) % piece[FKV_PIECE_N_RING];
        FKV_DEVICE const fkv_u8 *block = blocks + (fkv_u64)pages[entry] * FKV_G * FKV_BLOCK_BYTES;
        fkv_u32 slot = tile * FKV_TILE % FKV_PAGE_TOKENS;
        fkv_u32 base = logical * FKV_PAGE_TOKENS + slot;
        fkv_u32 n_tokens = last - base + 1 < FKV_TILE ? last - base + 1 : FKV_TILE; /* behind them: whatever bytes are there */

        float score[FKV_ITEM_ROWS];
        FKV_UNROLL
        for (int row = 0; row < FKV_ITEM_ROWS; row++) score[row] = 0.0f;
        if (lane < n_tokens) {
            fkv_u32 at = slot + lane;
            FKV_DEVICE const fkv_u8 *codes = block + FKV_K_CODES + at * (FKV_D * FKV_K_BITS / 8);
            FKV_DEVICE const fkv_u8 *scales = block + FKV_K_SCALES + at * (FKV_D / FKV_K_GROUP * 2);
            FKV_DEVICE const fkv_u8 *biases = block + FKV_K_BIASES + at * (FKV_D / FKV_K_GROUP * 2);
            for (fkv_u32 d = 0; d < FKV_D; d++) {
                float k = fkv_value_at(codes, scales, biases, d, FKV_K_BITS, FKV_K_GROUP);
                FKV_UNROLL
                for (int row = 0; row < FKV_ITEM_ROWS; row++)
                    score[row] = fkv_fma(queries[(fkv_u32)row * FKV_D + d], k, score[row]);
            }
        }
        FKV_UNROLL
        for (int row = 0; row < FKV_ITEM_ROWS; row++) {
            float x = score[row];
#if FKV_SOFTCAP_BITS != 0
            x = fkv_float_of(FKV_SOFTCAP_BITS) * 1.44269504f * (1.0f - 2.0f / (fkv_exp2(x * 2.88539008f) + 1.0f));
#endif
            fkv_u32 query = (first_row + ((fkv_u32)row < n_rows ? (fkv_u32)row : 0)) / FKV_R;
            x = lane < n_tokens && fkv_sees(position + query, base + lane) ? x : FKV_MINUS_INFINITY;
            float largest = fkv_max(max[row], x);
            FKV_UNROLL
            for (fkv_u32 h = 1; h < 32; h *= 2) largest = fkv_max(largest, fkv_shuffle_xor(largest, h));
            float shrink = max[row] == largest ? 1.0f : fkv_exp2(max[row] - largest);
            float mine = fkv_exp2(x - (largest == FKV_MINUS_INFINITY ? 0.0f : largest));
            max[row] = largest;
            total[row] = fkv_fma(total[row], shrink, mine); /* of this lane's tokens */
            p[(fkv_u32)row * 32 + lane] = mine;
            FKV_UNROLL
            for (int i = 0; i < FKV_LANE_CHANNELS; i++) sum[row][i] *= shrink;
        }
        fkv_sync_warp();
        for (fkv_u32 t = 0; t < n_tokens; t++) {
            fkv_u32 at = slot + t;
            FKV_DEVICE const fkv_u8 *codes = block + FKV_V_CODES + at * (FKV_D * FKV_V_BITS / 8);
            FKV_DEVICE const fkv_u8 *scales = block + FKV_V_SCALES + at * (FKV_D / FKV_V_GROUP * 2);
            FKV_DEVICE const fkv_u8 *biases = block + FKV_V_BIASES + at * (FKV_D / FKV_V_GROUP * 2);
            FKV_UNROLL
            for (int i = 0; i < FKV_LANE_CHANNELS; i++) {
                fkv_u32 d = lane + 32 * (fkv_u32)i;
                float v = d < FKV_D ? fkv_value_at(codes, scales, biases, d, FKV_V_BITS, FKV_V_GROUP) : 0.0f;
                FKV_UNROLL
                for (int row = 0; row < FKV_ITEM_ROWS; row++) sum[row][i] = fkv_fma(p[(fkv_u32)row * 32 + t], v, sum[row][i]);
            }
        }
        fkv_sync_warp(); /* p is written again */
    }

    FKV_UNROLL
    for (int row = 0; row < FKV_ITEM_ROWS; row++) {
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) total[row] += fkv_shuffle_xor(total[row], h);
        if (lane == 0) {
            stats[(stream * FKV_ITEM_ROWS + (fkv_u32)row) * 2] = max[row];
            stats[(stream * FKV_ITEM_ROWS + (fkv_u32)row) * 2 + 1] = total[row];
        }
    }
    fkv_sync();
    for (fkv_u32 s = 0; s < FKV_STREAMS; s++) { /* from the first to the last */
        if (s == stream) {
            FKV_UNROLL
            for (int row = 0; row < FKV_ITEM_ROWS; row++) {
                float largest = FKV_MINUS_INFINITY;
                for (fkv_u32 o = 0; o < FKV_STREAMS; o++)
                    largest = fkv_max(largest, stats[(o * FKV_ITEM_ROWS + (fkv_u32)row) * 2]);
                float factor = max[row] == FKV_MINUS_INFINITY ? 0.0f : fkv_exp2(max[row] - largest);
                FKV_UNROLL
                for (int i = 0; i < FKV_LANE_CHANNELS; i++) {
                    fkv_u32 d = lane + 32 * (fkv_u32)i;
                    if (d >= FKV_D) continue;
                    float x = sum[row][i] * factor;
                    sums[(fkv_u32)row * FKV_D + d] = s == 0 ? x : sums[(fkv_u32)row * FKV_D + d] + x;
                }
            }
        }
        fkv_sync();
    }
    fkv_u64 first = ((fkv_u64)number * FKV_G + place.y) * all_rows + first_row;
    for (fkv_u32 i = place.index; i < n_rows * FKV_D; i += FKV_DECODE_THREADS) parts[first * FKV_D + i] = sums[i];
    if (place.index < n_rows) {
        float largest = FKV_MINUS_INFINITY;
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++) largest = fkv_max(largest, stats[(s * FKV_ITEM_ROWS + place.index) * 2]);
        float all = 0.0f;
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
            float own = stats[(s * FKV_ITEM_ROWS + place.index) * 2];
            all = fkv_fma(own == FKV_MINUS_INFINITY ? 0.0f : fkv_exp2(own - largest),
                          stats[(s * FKV_ITEM_ROWS + place.index) * 2 + 1], all);
        }
        FKV_DEVICE float *to = parts + fkv_stats_at(table, place.y * all_rows + first_row + place.index, number);
        to[0] = largest;
        to[1] = all;
    }
}
