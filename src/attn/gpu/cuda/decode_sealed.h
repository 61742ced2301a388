/* Decode through matrix units, of sealed pages of 4 bits, and of rows of a book by book_page.h. decode_piece.h has the block;
 * docs/page_format.md says where codes lie.
 *
 * All products are of bytes, and a group of rows is one of their operands, high and low bytes apart. Groups share what is
 * unpacked and nothing else: a row's bits do not depend on how many there are.
 *
 * K. score = sum over ch of (q scale) code, + sum over ch of q bias. When a stream comes to a page it makes the operands for it:
 * q scale as 16 bits, in units of the largest of the row and slab; where that is large, what they leave is 16 more. A dword of
 * the page is 8 channels of one token: the lower nibbles are four bytes of an operand, the upper ones four more.
 *
 * V. A dword is 8 tokens of one channel. A byte permute looks up the levels of four of them, and gives 0 for a code with a sign;
 * with the signs flipped, one of -level - 1 gives -1 for a code without. Both together are level - 1, so the sum of the weights
 * is where a sum begins. The weight of a token is p norm, with p relative to the tile's own max, as 16 bits in units of the
 * tile's largest norm that the row sees.
 *
 * Ladder: one query over 131072 tokens on an H200, us of a call chained through MLX; 8 KV heads of 128, 2 of 256, 1 of 512.
 *   128   256   512
 *    94   123   100  halves: q scale and the rest of it, levels with signs; 1636 instructions of a warp for a page
 *    73   118    91  bytes, as above: 958
 *    57    92    63  scales by cp.async; MLX told the text by name and not in full
 *    57    87    61  blocks of 8 rows of 256 channels, of 4 of 512: more warps
 *    55    76    60  one sum for levels of both signs; eight rows as the A operand; streams folded by code that is there once
 *    52    70    64  two slabs share a softmax; scales of a page read once for all groups (the last column is noise: no change)
 *    58    72    61  what 16 bits leave of large channels: where the rare path loads, every tile waits for the next one's keys
 *    53    65    54  pages by cp.async: nothing waits for what was asked for later
 * Tiles of 32 tokens with 12, 16 and 20 warps on an SM: 62, 57, 61. Tiles of 64 with 16 spill: 119. Tiles of 64 by cp.async with
 * 16 and 20 warps: 55, 61. Values by cp.async and keys in registers: 55, 62, 64. 85, 71, 70 with four changes together: each
 * thread copies the 16 bytes that it takes itself, page numbers come 32 at a time, streams are folded at once, and slabs of 512
 * have a barrier less.
 */
/* ---- a page's queries ---- */

/* lines: {scales, biases}, which are there. */
FKV_FN void sd_enter_page(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at, sd_queries &to) {
    int first = (int)sd_first_row(0, at);
    int step = ((int)sd_first_row(1, at) - first) * SD_QUERY_WORDS;
    sd_enter_groups(lines, shared + first * SD_QUERY_WORDS + at.slab * DC_SLAB, step, at.lane, to);
    fkv_sync_warp(); /* the lines of the next page may come */
    bool coarse = false;
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) coarse = coarse || to.line[g].unit > SD_MOST_UNIT;
    to.coarse = !FKV_K_BOOK && fkv_any(coarse);
}

/* What the operands of a page leave of q scale: half a unit at most, in units of its own. 0 for rows whose unit is small: their
 * bits do not depend on the other rows. */
FKV_FN void sd_enter_rest(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at, const sd_queries &page,
                          sd_queries &to) {
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        FKV_SHARED const fkv_u32 *query =
            shared + (sd_first_row(g, at) + sd_made_row(at.lane)) * SD_QUERY_WORDS + at.slab * DC_SLAB;
        float unit = sd_to_made(page.line[g].unit, at.lane);
        float inverse = sd_inverse(unit);
        float finer = unit > SD_MOST_UNIT ? fkv_mul(inverse, 65024.0f) : 0.0f;
        FKV_UNROLL
        for (int i = 0; i < 2 * SD_MADE_UNITS; i++) {
            fkv_u32 line = sd_made_line(at.lane) + 4 * (fkv_u32)(i / 2);
            fkv_words4 scales = fkv_shared16(lines + line * 4);
            fkv_words4 q = fkv_shared16(query + line * 8 + i % 2 * 4);
            float x[4];
            FKV_UNROLL
            for (int k = 0; k < 4; k++) {
                x[k] = fkv_mul(fkv_float_of(q.w[k]), sd_line_number(scales, i % 2 * 4 + k));
                x[k] = fkv_fma(fkv_fma(x[k], inverse, SD_WHOLE) - SD_WHOLE, -unit, x[k]);
            }
            sd_put_bytes(sd_bytes_of(x, finer), i, at.lane, to.operand[g]);
        }
        to.line[g] = {page.line[g].unit > SD_MOST_UNIT ? fkv_mul(page.line[g].unit, 1.0f / 65024.0f) : 0.0f, 0.0f};
    }
    fkv_sync_warp(); /* as in sd_enter_page() */
}

/* And scores of that, added. */
FKV_FN void sd_add_rest(sd_tile &tile, FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at,
                        const sd_queries &page, sd_scores &score) {
    sd_queries rest;
    sd_scores more;
    sd_enter_rest(lines, shared, at, page, rest);
    sd_score(tile, rest, more);
    FKV_UNROLL
    for (int i = 0; i < SD_GROUPS * SD_OWN; i++) score[i / SD_OWN][i % SD_OWN] += more[i / SD_OWN][i % SD_OWN];
}

/* ---- softmax ---- */

/* The largest over the threads of a row. */
FKV_FN float sd_row_max(float x) {
    FKV_UNROLL
    for (fkv_u32 h = SD_ROW_FIRST; h < SD_ROW_END; h *= 2) x = fkv_max(x, fkv_shuffle_xor(x, h));
    return x;
}

FKV_FN fkv_u32 sd_row_max_bits(fkv_u32 x) {
    FKV_UNROLL
    for (fkv_u32 h = SD_ROW_FIRST; h < SD_ROW_END; h *= 2) x = fkv_max_bits(x, fkv_shuffle_xor_bits(x, h));
    return x;
}

/* Behind the thread's first token. */
FKV_FN constexpr fkv_u32 sd_token(int i) { return 32 * (fkv_u32)(i / SD_GROUP) + SD_TOKEN_STEP * (fkv_u32)(i % SD_GROUP); }

/* Norms of the thread's tokens. One that the row does not see may be NaN, and is taken as 0. Returns the largest as bits. */
FKV_FN fkv_u32 sd_norms(const sd_tile &tile, const sd_rows &rows, fkv_u32 token, bool whole, int group, float (&norm)[SD_OWN]) {
    fkv_u32 largest = 0;
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        fkv_u32 pair = tile.norms[i / SD_GROUP][i % SD_GROUP / 2];
        norm[i] = fkv_page_number((i % 2 == 0 ? pair : pair >> 16) & 0x7fffu);
        if (!whole && !fkv_sees(rows.own[group], token + sd_token(i))) norm[i] = 0.0f;
        largest = fkv_max_bits(largest, fkv_bits_of(norm[i]));
    }
    return whole ? fkv_warp_max_bits(largest) : sd_row_max_bits(largest); /* of all rows: the same tokens */
}

/* Scores to weights, of one group; max and total follow. token: the thread's first. */
FKV_FN void sd_weigh(const sd_tile &tile, const sd_rows &rows, fkv_u32 token, bool whole, fkv_u32 lane, int group,
                     float (&score)[SD_OWN], sd_state &state, sd_weights &to) {
    float norm[SD_OWN];
    fkv_u32 largest = sd_norms(tile, rows, token, whole, group, norm);
    float max = dc_minus_infinity();
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        if (FKV_SOFTCAP_BITS != 0) score[i] = fkv_cap(score[i]);
        if (!whole && !fkv_sees(rows.own[group], token + sd_token(i))) score[i] = dc_minus_infinity();
        max = fkv_max(max, score[i]);
    }
    max = sd_row_max(max);
    float from = max == dc_minus_infinity() ? 0.0f : max;
    float unit = fkv_mul(fkv_float_of(largest), 1.0f / 65528.0f);
    float inverse = sd_inverse(unit);
    float total = 0.0f;
    fkv_u32 bits[SD_OWN];
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        float p = fkv_exp2(score[i] - from);
        total += p;
        bits[i] = fkv_bits_of(fkv_fma(p, fkv_mul(norm[i], inverse), 8388608.0f)); /* 2^23: the rest is a whole number */
    }
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS; p++) sd_weight_operand(bits + SD_GROUP * p, lane, to.operand[p]);

    float grown = fkv_max(state.max[group], max);
    to.shrink = state.max[group] == grown ? 1.0f : fkv_exp2(state.max[group] - grown);
    float share = max == grown ? 1.0f : fkv_exp2(max - grown);
    state.max[group] = grown;
    state.total[group] = fkv_fma(total, share, fkv_mul(state.total[group], to.shrink));
    if (largest >= 0x7f800000u) state.total[group] = fkv_float_of(DC_NAN);
    to.worth = fkv_mul(share, fkv_mul(unit, SD_LEVEL));
}

FKV_FN void sd_scale_sums(sd_state &state, int group, float factor) {
    FKV_UNROLL
    for (int i = 0; i < SD_GROUP * SD_UNITS; i++) {
        float &sum = state.sums[group][i / SD_GROUP][i % SD_GROUP];
        sum = fkv_mul(sum, factor);
    }
}

/* ---- what two slabs share ---- */

/* The other warp gets the scores of its group, and gives those of this one's. */
FKV_FN void sd_trade_scores(FKV_SHARED float *given, FKV_SHARED const float *taken, dc_place at, sd_scores &score) {
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) given[i * 32] = score[SD_GROUPS - 1][i];
    fkv_sync_team(1 + at.stream, 32 * DC_SLABS);
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) score[0][i] += taken[i * 32];
}

FKV_FN void sd_trade_weights(FKV_SHARED float *given, FKV_SHARED const float *taken, dc_place at,
                             sd_weights (&weights)[SD_GROUPS]) {
    constexpr int words = SD_GROUP / 2;
    sd_weights &other = weights[SD_GROUPS - 1];
    FKV_UNROLL
    for (int i = 0; i < SD_PARTS * words; i++) ((FKV_SHARED fkv_u32 *)given)[i * 32] = weights[0].operand[i / words][i % words];
    given[SD_PARTS * words * 32] = weights[0].worth;
    given[(SD_PARTS * words + 1) * 32] = weights[0].shrink;
    fkv_sync_team(1 + at.stream, 32 * DC_SLABS);
    FKV_UNROLL
    for (int i = 0; i < SD_PARTS * words; i++) other.operand[i / words][i % words] = ((FKV_SHARED const fkv_u32 *)taken)[i * 32];
    other.worth = taken[SD_PARTS * words * 32];
    other.shrink = taken[(SD_PARTS * words + 1) * 32];
}

/* ---- the piece ---- */

/* The block's queries into shared memory, as floats, by all warps; rows that are not there are 0. */
FKV_FN void sd_prepare_rows(const fkv_piece &piece, fkv_u32 head, const void *q, FKV_SHARED fkv_u32 *shared, fkv_u32 index) {
    for (fkv_u32 row = index / 32; row < DC_ROWS; row += DC_THREADS / 32) {
        float x[DC_LANE_CHANNELS] = {};
        if (row < piece.n_rows) dc_load_row(q, dc_row_at(piece, head, row), x, index % 32);
        FKV_UNROLL
        for (int i = 0; i < DC_LANE_CHANNELS; i++)
            ((FKV_SHARED float *)shared)[row * SD_QUERY_WORDS + sd_query_place(index % 32 + 32 * (fkv_u32)i)] = x[i];
    }
    fkv_sync();
}

/* Rows that are not there repeat the first. */
FKV_FN sd_rows sd_rows_of(const fkv_piece &piece, dc_place at) {
    sd_rows rows;
    rows.first = piece.words[FKV_PIECE_POSITION];
    rows.last = rows.first + piece.words[FKV_PIECE_N_QUERIES] - 1;
    FKV_UNROLL
    for (int g = 0; g < SD_WEIGHED; g++) {
        fkv_u32 row = sd_first_row(g, at) + sd_lane_row(at.lane);
        rows.own[g] = rows.first + (piece.first_row + (row < piece.n_rows ? row : 0)) / FKV_R;
    }
    return rows;
}

FKV_FN fkv_u32 sd_next(fkv_u32 i) { return (i + 1) % SD_TURN != 0 ? i + 1 : i + 1 + (DC_STREAMS - 1) * SD_TURN; }

FKV_FN fkv_u32 sd_slot(fkv_u32 i) { return i % SD_TURN * SD_TILE; }

/* The page number of tile i. */
FKV_FN void sd_load_page(sd_tile &tile, const dc_walk &walk, fkv_u32 i, fkv_u32 n_tiles) {
    if (i < n_tiles) tile.page = dc_physical_page(walk, i / SD_TURN);
}

/* The stream's first tile, on its way while the queries are prepared. */
FKV_FN void sd_load_first(sd_tile &tile, const dc_walk &walk, fkv_u32 n_tiles, FKV_SHARED fkv_u32 *lines,
                          FKV_SHARED fkv_u32 *rooms, dc_place at) {
    fkv_u32 i = at.stream * SD_TURN;
    tile.page = 0;
    if (i >= n_tiles) return;
    const fkv_u8 *block = dc_page_block(walk, dc_physical_page(walk, i / SD_TURN));
    if (!FKV_K_BOOK) sd_copy_lines(lines, block, at);
    sd_load_keys(tile, block, 0, 0, rooms, at);
    if (!FKV_K_BOOK) fkv_end_copies();
    sd_load_values(tile, block, 0, rooms, at);
    if (!FKV_K_BOOK) fkv_end_copies();
    sd_load_page(tile, walk, sd_next(i), n_tiles);
}

/* The stream's tiles, one after the other. Keys of the next one are asked for when this one's are scored, values when they are
 * added up: each wait leaves the younger ones on their way. Page numbers are asked for two tiles ahead. */
FKV_FN void sd_walk(sd_tile &tile, const dc_walk &walk, fkv_u32 n_tiles, const sd_rows &rows, FKV_SHARED fkv_u32 *shared,
                    FKV_SHARED fkv_u32 *lines, FKV_SHARED fkv_u32 *rooms, dc_place at, sd_state &state) {
    FKV_SHARED float *exchange = (FKV_SHARED float *)shared + SD_AT_REST;
    FKV_SHARED float *given = exchange + at.warp * (SD_GIVEN_WORDS * 32) + at.lane;
    FKV_SHARED const float *taken = exchange + (at.warp ^ 1) * (SD_GIVEN_WORDS * 32) + at.lane; /* of two slabs */
    sd_queries queries = {};
    if (FKV_K_BOOK) sd_enter_page(lines, shared, at, queries); /* once for all of them */
    fkv_u32 n = 0;
    for (fkv_u32 i = at.stream * SD_TURN; i < n_tiles; i = sd_next(i), n++) {
        fkv_u32 next = sd_next(i);
        const fkv_u8 *block = dc_page_block(walk, tile.page);
        fkv_u32 base = dc_logical_page(walk, i / SD_TURN) * FKV_PAGE_TOKENS + sd_slot(i);
        if (!FKV_K_BOOK) fkv_await_copies_but_last();
        if (!FKV_K_BOOK && i % SD_TURN == 0) sd_enter_page(lines, shared, at, queries);
        sd_open_tile(tile, n, rooms, at.lane);
        sd_scores score;
        sd_score(tile, queries, score);
        if (queries.coarse) sd_add_rest(tile, lines, shared, at, queries, score);
        if (next < n_tiles) {
            if (!FKV_K_BOOK && next % SD_TURN == 0) sd_copy_lines(lines, block, at);
            if (!FKV_K_BOOK) fkv_sync_warp(); /* all have taken the keys */
            sd_load_keys(tile, block, sd_slot(next), n + 1, rooms, at);
        }
        if (!FKV_K_BOOK) fkv_end_copies();
        if (FKV_K_BOOK) sd_load_page(tile, walk, sd_next(next), n_tiles);
        if (SD_SHARES)
            sd_trade_scores(given, taken, at, score);
        else if (DC_SLABS > 1)
            dc_add_slabs(exchange + n % SD_EXCHANGES * SD_EXCHANGE_WORDS, SD_EXCHANGES == 1, at, score);
        sd_weights weights[SD_GROUPS];
        bool whole = dc_is_whole(rows.first, rows.last, base, SD_TILE);
        FKV_UNROLL
        for (int g = 0; g < SD_WEIGHED; g++)
            sd_weigh(tile, rows, base + sd_first_token(at.lane), whole, at.lane, g, score[g], state, weights[g]);
        if (SD_SHARES) sd_trade_weights(given + SD_OWN * 32, taken + SD_OWN * 32, at, weights);
        FKV_UNROLL
        for (int g = 0; g < SD_GROUPS; g++)
            if (fkv_any(weights[g].shrink != 1.0f)) sd_scale_sums(state, g, weights[g].shrink);
        if (!FKV_K_BOOK) fkv_await_copies_but_last();
        sd_add_values(tile, weights, state);
        if (!FKV_K_BOOK) fkv_sync_warp(); /* all have taken the values */
        if (next < n_tiles) sd_load_values(tile, block, sd_slot(next), rooms, at);
        if (!FKV_K_BOOK) fkv_end_copies();
        if (!FKV_K_BOOK) sd_load_page(tile, walk, sd_next(next), n_tiles);
    }
}

/* Max and total of the stream's rows to where the others find them, and its sums in the piece's units. */
FKV_FN void sd_finish_sums(sd_state &state, dc_place at, FKV_SHARED float *stats) {
    FKV_UNROLL
    for (int g = 0; g < SD_WEIGHED; g++) {
        FKV_UNROLL
        for (fkv_u32 h = SD_ROW_FIRST; h < SD_ROW_END; h *= 2) state.total[g] += fkv_shuffle_xor(state.total[g], h);
        fkv_u32 row = sd_first_row(g, at) + sd_lane_row(at.lane);
        if ((at.slab != 0 && !SD_SHARES) || sd_lane_run(at.lane) != 0) continue;
        stats[(at.stream * DC_ROWS + row) * 2] = state.max[g];
        stats[(at.stream * DC_ROWS + row) * 2 + 1] = state.total[g];
    }
    fkv_sync(); /* also: nobody exchanges scores any more */
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        fkv_u32 row = sd_first_row(g, at) + sd_lane_row(at.lane);
        float own = stats[(at.stream * DC_ROWS + row) * 2];
        float factor = own == dc_minus_infinity() ? 0.0f : fkv_exp2(own - dc_piece_max(stats, row));
        sd_scale_sums(state, g, factor);
    }
}

/* The streams' sums into one, from the first to the last: [rows, D]. Not unrolled over streams: the code of one is enough to
 * fetch. */
FKV_FN void sd_fold_streams(const sd_state &state, dc_place at, FKV_SHARED float *sums) {
    FKV_SHARED float *own = sums + sd_lane_row(at.lane) * FKV_D + at.slab * DC_SLAB + sd_lane_run(at.lane) * SD_RUN_STEP;
    FKV_NO_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) {
        FKV_UNROLL
        for (int i = 0; i < SD_GROUPS * SD_UNITS * SD_GROUP / 4 && s == at.stream; i++) {
            int g = i * 4 / (SD_GROUP * SD_UNITS);
            int u = i * 4 / SD_GROUP % SD_UNITS;
            const float *x = state.sums[g][u] + i * 4 % SD_GROUP;
            FKV_SHARED float *to = own + sd_first_row(g, at) * FKV_D + SD_UNIT_STEP * (fkv_u32)u + i * 4 % SD_GROUP;
            FKV_UNROLL
            for (int k = 0; k < 4; k++) to[k] = s == 0 ? x[k] : to[k] + x[k];
        }
        fkv_sync();
    }
}

/* As decode_mma.h has it. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                              float *parts) {
    dc_place at = dc_place_of(place);
    fkv_piece piece = fkv_piece_at(place, table);
    if (piece.n_rows == 0) return;
    fkv_u32 n_tiles = (piece.words[FKV_PIECE_N_TOKENS] + SD_TILE - 1) / SD_TILE;
    dc_walk walk = dc_walk_of(piece, place.y, pool, table);
    FKV_SHARED fkv_u32 *lines = shared + SD_AT_LINES + at.warp * DC_SLAB;
    FKV_SHARED fkv_u32 *rooms = shared + SD_AT_ROOMS + at.warp * (2 * SD_ROOM_WORDS);
    sd_tile tile;
    sd_load_first(tile, walk, n_tiles, lines, rooms, at);
    sd_prepare_rows(piece, place.y, q, shared, place.index);

    sd_state state = {};
    FKV_UNROLL
    for (int g = 0; g < SD_WEIGHED; g++) state.max[g] = dc_minus_infinity();
    sd_walk(tile, walk, n_tiles, sd_rows_of(piece, at), shared, lines, rooms, at, state);

    FKV_SHARED float *stats = (FKV_SHARED float *)shared + SD_AT_STATS;
    FKV_SHARED float *sums = (FKV_SHARED float *)shared + SD_AT_REST;
    sd_finish_sums(state, at, stats);
    sd_fold_streams(state, at, sums);
    dc_store(piece, place, stats, sums, table, parts);
}
