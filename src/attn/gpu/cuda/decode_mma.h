/* Tensor-core decode kernel for pages that store rows of codes. Runs on CUDA and is emulated on the host. One thread block
 * processes one split of the history of one KV head for up to DC_ROWS rows (queries x query heads). For each row, it stores {sum
 * of p * v, maximum score, sum of p} for the merge kernel, where p is a softmax weight and v a value.
 *
 * Packed bytes are loaded into registers and converted there to matrix operands. The next tile is loaded while the current
 * tile is computed. The parts of the kernel are in decode_split.h, decode_shape.h, decode_queries.h, decode_scores.h,
 * decode_values.h and decode_softmax.h.
 *
 * The result of a row does not depend on batching: rows never exchange data, and the operations on a row are the same for every
 * value of DC_ROWS. fkv_mul() and fkv_fma() fix the rounding of products and sums, because the compiler might otherwise fuse a
 * multiplication and an addition in one instantiation and not in another.
 *
 * For 128 channels with 8-bit keys and 4-bit values or wider codes, the kernel is limited by memory bandwidth. For narrower
 * codes, it is limited by the computation of softmax and scales. For 16 rows of 256 channels, it is limited by latency, because
 * the accumulators leave registers for only 8 warps per multiprocessor.
 */
/* ---- tiles of the split ---- */

FKV_FN fkv_u32 dc_tile_logical(const dc_split_pages &walk, fkv_u32 tile) {
    return dc_logical_page(walk, tile * DC_TILE / FKV_PAGE_TOKENS);
}

FKV_FN fkv_u32 dc_tile_page(const dc_split_pages &walk, fkv_u32 tile) {
    return dc_physical_page(walk, tile * DC_TILE / FKV_PAGE_TOKENS);
}

FKV_FN fkv_u32 dc_tile_slot(fkv_u32 tile) { return tile * DC_TILE % FKV_PAGE_TOKENS; }

/* ---- rows ---- */

/* Converts the query rows of the block to matrix operands in shared memory. Called by all warps. */
FKV_FN void dc_prepare_rows(const fkv_split &split, fkv_u32 head, const void *q, FKV_SHARED fkv_u32 *shared, fkv_u32 index) {
    for (fkv_u32 i = index; i < DC_QUERY_WORDS + DC_SUM_WORDS; i += DC_THREADS) shared[i] = 0;
    fkv_sync();
    for (fkv_u32 row = index / 32; row < split.n_rows; row += DC_THREADS / 32) {
        dc_prepare_row(q, dc_row_at(split, head, row), row, shared, index % 32);
    }
    fkv_sync();
}

/* Returns the per-row constants of the rows that this thread handles. Unused rows get the position of the first row. */
FKV_FN dc_rows dc_rows_of(const fkv_split &split, FKV_SHARED const fkv_u32 *shared, dc_place at) {
    FKV_SHARED const float *steps = (FKV_SHARED const float *)shared + DC_AT_STEPS;
    FKV_SHARED const float *sums = (FKV_SHARED const float *)shared + DC_AT_SUMS;
    dc_rows rows;
    rows.first = split.words[FKV_SPLIT_POSITION];
    rows.last = rows.first + split.words[FKV_SPLIT_N_QUERIES] - 1;
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        fkv_u32 row = DC_DUPLICATED ? at.lane / 4 % 4 : at.lane / 4 + 8 * (fkv_u32)n;
        /* lanes that hold the second copy of a row compute the dot products with the `rest` bytes of the queries and add no
         * bias */
        bool second = DC_DUPLICATED && at.lane >= 16;
        rows.step[n][1] = steps[row];
        if constexpr (dc_k::bits == 16)
            rows.step[n][0] = steps[row];
        else
            rows.step[n][0] = second ? steps[row] * (1.0f / 256.0f) : steps[row] * 256.0f;
        FKV_UNROLL
        for (int g = 0; g < dc_k::groups; g++)
            rows.query_sum[n][g] = second ? 0.0f : sums[(row * DC_SLABS + at.slab) * dc_k::groups + (fkv_u32)g];
        rows.position[n] = rows.first + (split.first_row + (row < split.n_rows ? row : 0)) / FKV_R;
    }
    return rows;
}

FKV_FN void dc_begin(dc_state &state) {
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        state.max[n] = dc_minus_infinity();
        state.total[n] = 0.0f;
        FKV_UNROLL
        for (int o = 0; o < dc_v::own_groups; o++) {
            state.exponent[n][o] = dc_v::bits == 16 ? 127 : 30;
            state.bias[n][o] = 0.0f;
        }
    }
    FKV_UNROLL
    for (int i = 0; i < dc_v::tiles * DC_OWN_ROWS * 4; i++) state.sums[i / (4 * DC_OWN_ROWS)][i / 4 % DC_OWN_ROWS][i % 4] = 0.0f;
}

/* ---- end of the split ---- */

/* Stores the maximum score and the total weight of each row, computed by this stream, in shared memory. */
FKV_FN void dc_share_stats(dc_state &state, dc_place at, FKV_SHARED float *stats) {
    fkv_u32 r = at.lane / 4;
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 4; h *= 2) {
            state.total[n] += fkv_shuffle_xor(state.total[n], h);
            FKV_UNROLL
            for (int o = 0; o < dc_v::own_groups; o++) state.bias[n][o] += fkv_shuffle_xor(state.bias[n][o], h);
        }
        if (at.slab == 0 && at.lane % 4 == 0 && r < DC_ROWS) {
            stats[(at.stream * DC_ROWS + r + 8 * (fkv_u32)n) * 2] = state.max[n];
            stats[(at.stream * DC_ROWS + r + 8 * (fkv_u32)n) * 2 + 1] = state.total[n];
        }
    }
    fkv_sync(); /* after this barrier, the buffer for exchanging scores may be reused */
}

/* Converts the thread's accumulators to output sums. First, the accumulators of a scale group are multiplied by 2^(exponent -
 * 14), or by 1 for bfloat16 values. Then the bias term is added, and the result is rescaled to the maximum score of the split. */
FKV_FN void dc_finish_sums(dc_state &state, dc_place at, FKV_SHARED const float *stats) {
    fkv_u32 r = at.lane / 4;
    fkv_u32 c = at.lane % 4;
    float factor[DC_OWN_ROWS];
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        float max = dc_split_max(stats, DC_DUPLICATED ? r % 4 : r + 8 * (fkv_u32)n);
        factor[n] = state.max[n] == dc_minus_infinity() ? 0.0f : fkv_exp2(state.max[n] - max);
    }
    FKV_UNROLL
    for (int t = 0; t < dc_v::tiles; t++) {
        /* the factors of column r are in lane 4 * r, and this thread accumulates columns 2 * c and 2 * c + 1 */
        int o = dc_v::group_of_tile(t);
        FKV_UNROLL
        for (int n = 0; n < DC_OWN_ROWS; n++) {
            float back = dc_v::is_bf16 ? 1.0f : fkv_float_of((state.exponent[n][o] - 14) << 23);
            FKV_UNROLL
            for (fkv_u32 i = 0; i < 2; i++) {
                float column_back = fkv_shuffle(back, c * 8 + 4 * i);
                float column_bias = fkv_shuffle(state.bias[n][o], c * 8 + 4 * i);
                float column_factor = fkv_shuffle(factor[n], c * 8 + 4 * i);
                float *sums = state.sums[t][n];
                sums[i] = fkv_mul(fkv_fma(sums[i], column_back, column_bias), column_factor);
                sums[2 + i] = fkv_mul(fkv_fma(sums[2 + i], column_back, column_bias), column_factor);
            }
        }
    }
}

/* Stores the thread's output sums in shared memory or, if `is_first` is false, adds them to the sums of the previous streams.
 * sums: [rows, DC_SUM_STRIDE] */
FKV_FN void dc_put_sums(const dc_state &state, dc_place at, bool is_first, FKV_SHARED float *sums) {
    fkv_u32 c = at.lane % 4;
    FKV_UNROLL
    for (int t = 0; t < dc_v::tiles; t++) {
        fkv_u32 unit = (fkv_u32)t / (2 * dc_v::quads);
        fkv_u32 channel = unit * dc_v::span + at.lane / 4 * (dc_v::span / 8) + (fkv_u32)t % (2 * dc_v::quads) * 2;
        if (DC_DUPLICATED) { /* skip the copy of the row that does not handle the scale group of this channel */
            fkv_u32 half = dc_v::bits == 16 || dc_v::groups == 1 ? 0 : channel / FKV_V_GROUP % 2;
            if (c / 2 != half) continue;
        }
        FKV_UNROLL
        for (int i = 0; i < DC_OWN_ROWS * 4; i++) {
            fkv_u32 row = 8 * ((fkv_u32)i / 4) + (DC_DUPLICATED ? c % 2 * 2 : c * 2) + (fkv_u32)i % 2;
            FKV_SHARED float &to = sums[row * DC_SUM_STRIDE + at.slab * DC_SLAB + channel + (fkv_u32)i / 2 % 2];
            to = is_first ? state.sums[t][i / 4][i % 4] : to + state.sums[t][i / 4][i % 4];
        }
    }
}

/* Adds the output sums of all streams in stream order. Writes the thread's part of the result to `output`. Called by all threads
 * of the block. */
FKV_FN void dc_fold_streams(dc_state &state, dc_place at, fkv_u32 index, FKV_SHARED float *stats, FKV_SHARED float *sums,
                            dc_output &output) {
    dc_share_stats(state, at, stats);
    dc_finish_sums(state, at, stats);
    FKV_NO_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s += DC_STREAMS_AT_ONCE) {
        if (s / DC_STREAMS_AT_ONCE == at.stream / DC_STREAMS_AT_ONCE)
            dc_put_sums(state, at, s == 0, sums + at.stream % DC_STREAMS_AT_ONCE * DC_STREAM_SUMS);
        fkv_sync();
    }
    dc_add_streams(sums, index, output);
}

/* ---- kernel ---- */

/* The tile that is being loaded while the previous tile is computed. */
struct dc_tile {
    dc_keys k;
    dc_values v;
    dc_scales scales;
    fkv_u32 page; /* number of the pool page that holds the next tile */
};

/* Starts loading the first tile of the stream. Called before the queries are prepared, to hide latency. */
FKV_FN void dc_load_first(dc_tile &tile, const fkv_split &split, const dc_split_pages &walk, fkv_u32 n_tiles, dc_place at) {
    fkv_u32 i = at.stream;
    fkv_u32 next = i + DC_STREAMS;
    tile.page = 0;
    if (i >= n_tiles) return;
    const fkv_u8 *block = dc_page_block(walk, dc_first_page(split, i * DC_TILE / FKV_PAGE_TOKENS));
    dc_load_keys(tile.k, block, dc_tile_slot(i), at);
    dc_load_scales(tile.scales, block, dc_tile_slot(i), at);
    dc_load_values(tile.v, block, dc_tile_slot(i), at);
    if (next < n_tiles) tile.page = dc_tile_page(walk, next);
}

/* Processes all tiles of the stream. The next tile's keys, values and scales are each loaded as soon as the registers for them
 * are free. Page numbers are loaded two tiles ahead. */
FKV_FN void dc_process_tiles(dc_tile &tile, const dc_split_pages &walk, fkv_u32 n_tiles, dc_rows &rows,
                             FKV_SHARED fkv_u32 *shared, dc_place at, dc_state &state) {
    dc_operands operands = dc_first_operands(shared, at);
    FKV_SHARED float *scales = (FKV_SHARED float *)shared + DC_AT_SCALES + at.warp * DC_SCALES_WORDS;
    FKV_SHARED float *exchange = (FKV_SHARED float *)shared + DC_AT_REST;
    fkv_u32 turn = 0;
    for (fkv_u32 i = at.stream; i < n_tiles; i += DC_STREAMS) {
        fkv_u32 next = i + DC_STREAMS;
        const fkv_u8 *block = dc_page_block(walk, tile.page);
        fkv_u32 base = dc_tile_logical(walk, i) * FKV_PAGE_TOKENS + dc_tile_slot(i);
        fkv_u32 bits[dc_v::groups];
        dc_share_scales(tile.scales, at.lane, scales, bits);
        if (next < n_tiles) dc_load_scales(tile.scales, block, dc_tile_slot(next), at);
        dc_scores score;
        dc_tile_scores(tile.k, operands, scales, rows, at.lane, score);
        if (next < n_tiles) {
            dc_load_keys(tile.k, block, dc_tile_slot(next), at);
            if (next + DC_STREAMS < n_tiles) tile.page = dc_tile_page(walk, next + DC_STREAMS);
        }
        if (DC_SLABS > 1) dc_add_slabs(exchange + turn % DC_EXCHANGES * DC_EXCHANGE_WORDS, DC_EXCHANGES == 1, at, score);
        dc_fold_tile(tile.v, scales, bits, score, rows, base, at.lane, state);
        if (next < n_tiles) dc_load_values(tile.v, block, dc_tile_slot(next), at);
        turn++;
    }
}

/* Body of the decode kernel. q: [T, H, D]. parts: output sums [splits, G, rows, D], then {max, total} [G, rows, splits, 2], where
 * rows = R * queries per item. max: the largest score, for a base-2 softmax. total: the sum of the softmax weights. Grid: (x, G),
 * where x enumerates the splits and, within a split, the chunks of rows. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                              float *parts FKV_ORDER) {
    dc_place at = dc_place_of(place);
    fkv_split split = fkv_split_at(place, table);
    if (split.n_rows == 0) return;
    fkv_u32 n_tiles = (split.words[FKV_SPLIT_N_TOKENS] + DC_TILE - 1) / DC_TILE;
    dc_split_pages walk = dc_split_pages_of(split, place.y, pool, table);
    dc_tile tile;
    dc_load_first(tile, split, walk, n_tiles, at);
    dc_prepare_rows(split, place.y, q, shared, place.index);

    dc_rows rows = dc_rows_of(split, shared, at);
    dc_state state;
    dc_begin(state);
    dc_process_tiles(tile, walk, n_tiles, rows, shared, at, state);
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_ROWS * dc_v::own_groups; i++) /* a non-finite scale makes the whole row NaN */
        if (state.exponent[i / dc_v::own_groups][i % dc_v::own_groups] >= 255)
            state.total[i / dc_v::own_groups] = fkv_float_of(DC_NAN);

    FKV_SHARED float *stats = (FKV_SHARED float *)shared + DC_AT_STATS;
    FKV_SHARED float *sums = (FKV_SHARED float *)shared + DC_AT_REST;
    dc_output output = {};
    dc_fold_streams(state, at, place.index, stats, sums, output);
    dc_store(split, place, stats, output, table, parts);
}
