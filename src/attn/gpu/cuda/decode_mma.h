/* Decode through matrix units: one block walks one piece of the history of one KV head, for up to DC_ROWS rows (queries times
 * query heads), and leaves {sum of p v, max, sum of p} for the merge. For CUDA, and for the
 * host, whose matrix units are plain loops. Its parts: decode_piece.h, decode_shape.h, decode_queries.h, decode_scores.h,
 * decode_values.h, decode_softmax.h; here is the walk.
 *
 * Packed bytes go from memory into registers and from there into the products, and the bytes of the next tile are on their way
 * while this one is computed.
 *
 * Same answer however it got there: a row's numbers never meet another row's, and DC_ROWS changes no operation on them. Where a
 * product is added to something, fkv_mul or fkv_fma say whether it is rounded in between: left to the compiler, it would be in
 * one text and not in the other.
 *
 * Ladder: one query over 131072 tokens on an H200, us of decode and merge; 8 KV heads of 128 with K8/V4 and 4/4, the first as a
 * batch of 8 with 32768 tokens each, 2 KV heads of 256, 1 of 512. Measured before the text was cut into these files.
 *   K8/V4   4/4  batch   256   512
 *    92.3  55.4    165     -  77.6  K as A operand, tiles of 32 tokens, 4 blocks on a multiprocessor: spills 220 bytes
 *    63.8     -    119  71.7  60.7  tiles of 16 tokens: nothing spilled
 *    64.8     -      -  67.9     -  tiles of 32 tokens, 3 blocks: nothing spilled
 *    65.0  51.9    120  64.3  54.5  K as B operand: loaded words are operands as they are; scales converted once
 *    62.8  50.4    124  64.3  54.4  lines of 128 bytes asked for instead of 256
 *    62.7  50.2    128  63.1  53.8  statistics of a row side by side for the merge
 * Since then, calls chained through MLX, one run of each:
 *    72.6     -                     as above
 *    68.9  57.7                     a warp's loads are of rows side by side; 70.5 and 57.8 in another run
 */
/* ---- tiles of the piece ---- */

FKV_FN fkv_u32 dc_tile_logical(const dc_walk &walk, fkv_u32 tile) {
    return dc_logical_page(walk, tile * DC_TILE / FKV_PAGE_TOKENS);
}

FKV_FN fkv_u32 dc_tile_page(const dc_walk &walk, fkv_u32 tile) {
    return dc_physical_page(walk, tile * DC_TILE / FKV_PAGE_TOKENS);
}

FKV_FN fkv_u32 dc_tile_slot(fkv_u32 tile) { return tile * DC_TILE % FKV_PAGE_TOKENS; }

/* ---- rows ---- */

/* The block's queries into shared memory, by all warps. */
FKV_FN void dc_prepare_rows(const fkv_piece &piece, fkv_u32 head, const void *q, FKV_SHARED fkv_u32 *shared, fkv_u32 index) {
    for (fkv_u32 i = index; i < DC_QUERY_WORDS + DC_SUM_WORDS; i += DC_THREADS) shared[i] = 0;
    fkv_sync();
    for (fkv_u32 row = index / 32; row < piece.n_rows; row += DC_THREADS / 32) {
        dc_prepare_row(q, dc_row_at(piece, head, row), row, shared, index % 32);
    }
    fkv_sync();
}

/* What a thread needs of its rows; those that are not there repeat the first. */
FKV_FN dc_rows dc_rows_of(const fkv_piece &piece, FKV_SHARED const fkv_u32 *shared, dc_place at) {
    FKV_SHARED const float *steps = (FKV_SHARED const float *)shared + DC_AT_STEPS;
    FKV_SHARED const float *sums = (FKV_SHARED const float *)shared + DC_AT_SUMS;
    dc_rows rows;
    rows.first = piece.words[FKV_PIECE_POSITION];
    rows.last = rows.first + piece.words[FKV_PIECE_N_QUERIES] - 1;
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        fkv_u32 row = DC_TWICE ? at.lane / 4 % 4 : at.lane / 4 + 8 * (fkv_u32)n;
        bool second = DC_TWICE && at.lane >= 16; /* has the sum of rests, times 256, and no bias */
        rows.step[n][1] = steps[row];
        if constexpr (dc_k::bits == 16)
            rows.step[n][0] = steps[row];
        else
            rows.step[n][0] = second ? steps[row] * (1.0f / 256.0f) : steps[row] * 256.0f;
        FKV_UNROLL
        for (int g = 0; g < dc_k::groups; g++)
            rows.query_sum[n][g] = second ? 0.0f : sums[(row * DC_SLABS + at.slab) * dc_k::groups + (fkv_u32)g];
        rows.position[n] = rows.first + (piece.first_row + (row < piece.n_rows ? row : 0)) / FKV_R;
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

/* ---- the end of a piece: the streams' sums into one, from the first to the last ---- */

/* Max and total of each stream to shared memory. */
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
    fkv_sync(); /* also: nobody exchanges scores any more */
}

/* The thread's sums as they are worth beside the other streams': in float, with the biases, over the piece's max. */
FKV_FN void dc_finish_sums(dc_state &state, dc_place at, FKV_SHARED const float *stats) {
    fkv_u32 r = at.lane / 4;
    fkv_u32 c = at.lane % 4;
    float factor[DC_OWN_ROWS];
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        float max = dc_piece_max(stats, DC_TWICE ? r % 4 : r + 8 * (fkv_u32)n);
        factor[n] = state.max[n] == dc_minus_infinity() ? 0.0f : fkv_exp2(state.max[n] - max);
    }
    FKV_UNROLL
    for (int t = 0; t < dc_v::tiles; t++) { /* what the columns mean is known to threads r = 2 c and 2 c + 1 */
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

/* A stream's sums into those of all: [rows, D]. */
FKV_FN void dc_put_sums(const dc_state &state, dc_place at, bool is_first, FKV_SHARED float *sums) {
    fkv_u32 c = at.lane % 4;
    FKV_UNROLL
    for (int t = 0; t < dc_v::tiles; t++) {
        fkv_u32 unit = (fkv_u32)t / (2 * dc_v::quads);
        fkv_u32 channel = unit * dc_v::span + at.lane / 4 * (dc_v::span / 8) + (fkv_u32)t % (2 * dc_v::quads) * 2;
        if (DC_TWICE) { /* the columns of the group that this channel has */
            fkv_u32 half = dc_v::bits == 16 || dc_v::groups == 1 ? 0 : channel / FKV_V_GROUP % 2;
            if (c / 2 != half) continue;
        }
        FKV_UNROLL
        for (int i = 0; i < DC_OWN_ROWS * 4; i++) {
            fkv_u32 row = 8 * ((fkv_u32)i / 4) + (DC_TWICE ? c % 2 * 2 : c * 2) + (fkv_u32)i % 2;
            FKV_SHARED float *to = sums + row * FKV_D + at.slab * DC_SLAB + channel + (fkv_u32)i / 2 % 2;
            float x = state.sums[t][i / 4][i % 4];
            *to = is_first ? x : *to + x;
        }
    }
}

FKV_FN void dc_fold_streams(dc_state &state, dc_place at, FKV_SHARED float *stats, FKV_SHARED float *sums) {
    dc_share_stats(state, at, stats);
    dc_finish_sums(state, at, stats);
    FKV_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) {
        if (s == at.stream) dc_put_sums(state, at, s == 0, sums);
        fkv_sync();
    }
}

/* ---- the kernel ---- */

/* A tile on its way: loaded while the tile before it is computed. */
struct dc_tile {
    dc_keys k;
    dc_values v;
    dc_scales scales;
    fkv_u32 page; /* of the tile behind it */
};

/* The stream's first tile, on its way while the queries are prepared. */
FKV_FN void dc_load_first(dc_tile &tile, const dc_walk &walk, fkv_u32 n_tiles, dc_place at) {
    fkv_u32 i = at.stream;
    fkv_u32 next = i + DC_STREAMS;
    tile.page = 0;
    if (i >= n_tiles) return;
    const fkv_u8 *block = dc_page_block(walk, dc_tile_page(walk, i));
    dc_load_keys(tile.k, block, dc_tile_slot(i), at);
    dc_load_scales(tile.scales, block, dc_tile_slot(i), at);
    dc_load_values(tile.v, block, dc_tile_slot(i), at);
    if (next < n_tiles) tile.page = dc_tile_page(walk, next);
}

/* The stream's tiles, one after the other. Each part of the next one is asked for when its registers are free, page numbers two
 * tiles ahead. */
FKV_FN void dc_walk_tiles(dc_tile &tile, const dc_walk &walk, fkv_u32 n_tiles, dc_rows &rows, FKV_SHARED fkv_u32 *shared,
                          dc_place at, dc_state &state) {
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

/* q: [T, H, D]; parts: out [pieces, G, rows, D], then {max, total} [G, rows, pieces, 2], where rows = R * queries of an item. The
 * max is of scores in powers of two. Blocks: pieces * chunks of rows, G. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                              float *parts) {
    dc_place at = dc_place_of(place);
    fkv_piece piece = fkv_piece_at(place, table);
    if (piece.n_rows == 0) return;
    fkv_u32 n_tiles = (piece.words[FKV_PIECE_N_TOKENS] + DC_TILE - 1) / DC_TILE;
    dc_walk walk = dc_walk_of(piece, place.y, pool, table);
    dc_tile tile;
    dc_load_first(tile, walk, n_tiles, at);
    dc_prepare_rows(piece, place.y, q, shared, place.index);

    dc_rows rows = dc_rows_of(piece, shared, at);
    dc_state state;
    dc_begin(state);
    dc_walk_tiles(tile, walk, n_tiles, rows, shared, at, state);
    FKV_UNROLL
    for (int i = 0; i < DC_OWN_ROWS * dc_v::own_groups; i++) /* a scale that is not finite: no answer of the row is a number */
        if (state.exponent[i / dc_v::own_groups][i % dc_v::own_groups] >= 255)
            state.total[i / dc_v::own_groups] = fkv_float_of(DC_NAN);

    FKV_SHARED float *stats = (FKV_SHARED float *)shared + DC_AT_STATS;
    FKV_SHARED float *sums = (FKV_SHARED float *)shared + DC_AT_REST;
    dc_fold_streams(state, at, stats, sums);
    dc_store(piece, place, stats, sums, table, parts);
}
