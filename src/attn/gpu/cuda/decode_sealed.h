/* Tensor-core decode kernel for sealed pages and, together with codebook_page.h, for codebook rows. This description assumes
 * 4-bit codes. narrow_page.h describes the differences for narrower codes. decode_split.h defines the block layout, and
 * docs/page_format.md the page layout. All matrix products multiply bytes and accumulate integers. Query rows are processed
 * in groups, which share only the unpacked codes, so the result of a row does not depend on other rows.
 *
 * K: score = sum of q * scale * code + sum of q * bias, over channels. When the kernel enters a page, it rounds q * scale to
 * 16-bit integers, whose unit depends on the row's largest value. If the unit is large, the rounding residue is used as well, for
 * another 16 bits. A dword holds 8 channels of one token; its low and its high nibbles are unpacked to four operand bytes each.
 *
 * V: a dword holds 8 tokens of one channel. Byte permutes look up four levels at a time, once for codes with a clear sign bit and
 * once for codes with a set sign bit. The two lookups add up to level - 1, so accumulators start at the sum of the weights. A
 * weight is p * norm (softmax weight times token norm), rounded to a 16-bit integer.
 *
 * The kernel is limited by latency: with 12 to 16 warps per multiprocessor, instructions are issued in only about half of the
 * cycles. The warps stall when they enter a page, in the softmax, and at the end of a split.
 */
/* ---- query operands ---- */

/* Builds the query operands of a page. lines: the page's {scales, biases} in shared memory; their asynchronous copy must be
 * complete. */
FKV_FN void sd_enter_page(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at, sd_queries &to) {
    int first = (int)sd_first_row(0, at);
    int step = ((int)sd_first_row(1, at) - first) * SD_QUERY_WORDS;
    sd_enter_groups(lines, shared + first * SD_QUERY_WORDS + at.slab * DC_SLAB, step, at.lane, to);
    fkv_sync_warp(); /* after this barrier, the next page's scales and biases may overwrite those of this page */
    bool coarse = false;
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) coarse = coarse || to.line[g].unit > SD_LARGEST_UNIT;
    to.coarse = !FKV_K_BOOK && fkv_any(coarse);
}

/* Builds the operands for the rounding residue of q * scale. The residue is at most half of the row's unit and is expressed in a
 * finer unit. For rows with a small unit, the residue is set to 0, so that the results of these rows do not depend on the other
 * rows. */
FKV_FN void sd_enter_residue(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at,
                             const sd_queries &page, sd_queries &to) {
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        FKV_SHARED const fkv_u32 *query =
            shared + (sd_first_row(g, at) + sd_made_row(at.lane)) * SD_QUERY_WORDS + at.slab * DC_SLAB;
        float unit = sd_to_made(page.line[g].unit, at.lane);
        float inverse = sd_inverse(unit);
        float finer = unit > SD_LARGEST_UNIT ? fkv_mul(inverse, 65024.0f) : 0.0f;
        FKV_UNROLL
        for (int i = 0; i < 2 * SD_MADE_UNITS; i++) {
            fkv_u32 line = sd_made_line(at.lane) + 4 * (fkv_u32)(i / 2);
            fkv_words4 scales = fkv_shared16(lines + line * 4);
            fkv_words4 q = fkv_shared16(query + line * 8 + i % 2 * 4);
            float x[4];
            FKV_UNROLL
            for (int k = 0; k < 4; k++) {
                x[k] = fkv_mul(fkv_float_of(q.w[k]), sd_line_value(scales, i % 2 * 4 + k));
                x[k] = fkv_fma(fkv_fma(x[k], inverse, SD_ROUND) - SD_ROUND, -unit, x[k]);
            }
            sd_put_bytes(sd_bytes_of(x, finer), i, at.lane, to.operand[g]);
        }
        to.line[g] = {page.line[g].unit > SD_LARGEST_UNIT ? fkv_mul(page.line[g].unit, 1.0f / 65024.0f) : 0.0f, 0.0f};
    }
    fkv_sync_warp(); /* after this barrier, the next page's scales and biases may overwrite those of this page */
}

/* Adds the dot products of the rounding residue with the keys to the scores. */
FKV_FN void sd_add_residue(sd_tile &tile, FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at,
                           const sd_queries &page, sd_scores &score) {
    sd_queries rest;
    sd_scores more;
    sd_enter_residue(lines, shared, at, page, rest);
    sd_score(tile, rest, more);
    FKV_UNROLL
    for (int i = 0; i < SD_GROUPS * SD_OWN; i++) score[i / SD_OWN][i % SD_OWN] += more[i / SD_OWN][i % SD_OWN];
}

/* ---- softmax ---- */

/* Returns the maximum of x over all lanes that share a query row. */
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

/* Reads the norms of the tokens that the thread handles. The norm of a masked token may be NaN, so it is replaced with 0. Returns
 * the largest norm as the bit pattern of a float. */
FKV_FN fkv_u32 sd_norms(const sd_tile &tile, const sd_rows &rows, fkv_u32 token, bool whole, int group, float (&norm)[SD_OWN]) {
    fkv_u32 largest = 0;
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        fkv_u32 pair = tile.norms[i / SD_GROUP][i % SD_GROUP / 2];
        norm[i] = fkv_page_value((i % 2 == 0 ? pair : pair >> 16) & 0x7fffu);
        if (!whole && !fkv_is_visible(rows.own[group], token + sd_token(i))) norm[i] = 0.0f;
        largest = fkv_max_bits(largest, fkv_bits_of(norm[i]));
    }
    return whole ? fkv_warp_max_bits(largest) : sd_row_max_bits(largest); /* in a whole tile, no token is masked */
}

/* Converts the scores of one group of query rows to weights, and updates the maximum score and the total weight of each row.
 * `token` is the position of the thread's first token. */
FKV_FN void sd_weigh(const sd_tile &tile, const sd_rows &rows, fkv_u32 token, bool whole, fkv_u32 lane, int group,
                     float (&score)[SD_OWN], sd_state &state, sd_weights &to) {
    float norm[SD_OWN];
    fkv_u32 largest = sd_norms(tile, rows, token, whole, group, norm);
    float max = dc_minus_infinity();
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        if (FKV_SOFTCAP_BITS != 0) score[i] = fkv_cap(score[i]);
        if (!whole && !fkv_is_visible(rows.own[group], token + sd_token(i))) score[i] = dc_minus_infinity();
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
        bits[i] = fkv_bits_of(fkv_fma(p, fkv_mul(norm[i], inverse),
                                      8388608.0f)); /* adding 2^23 leaves the rounded integer in the low bits of the sum */
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

/* ---- shared softmax ---- */

/* Exchanges scores between the two warps of a stream, each of which handles one group of query rows. Each warp sends its
 * partial scores for the other warp's rows, and adds the partial scores that it receives to its own. */
FKV_FN void sd_exchange_scores(FKV_SHARED float *given, FKV_SHARED const float *taken, dc_place at, sd_scores &score) {
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) given[i * 32] = score[SD_GROUPS - 1][i];
    fkv_sync_team(1 + at.stream, 32 * DC_SLABS);
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) score[0][i] += taken[i * 32];
}

FKV_FN void sd_exchange_weights(FKV_SHARED float *given, FKV_SHARED const float *taken, dc_place at,
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

/* ---- tiles of the split ---- */

/* Stores the query rows of the block in shared memory as floats. Unused rows are set to 0. The channels of calibrated keys and of
 * their queries are in the channel order of the KV head. Called by all warps. */
FKV_FN void sd_prepare_rows(const fkv_split &split, fkv_u32 head, const void *q, FKV_SHARED fkv_u32 *shared,
                            fkv_u32 index FKV_ORDER) {
    FKV_SHARED fkv_u32 *position = shared + SD_AT_REST; /* [D] position of each channel in the order of calibrated keys */
#if FKV_CALIBRATED
    for (fkv_u32 p = index; p < FKV_D; p += DC_THREADS) position[order[2 + p]] = p;
    fkv_sync();
#endif
    for (fkv_u32 row = index / 32; row < DC_ROWS; row += DC_THREADS / 32) {
        float x[DC_LANE_CHANNELS] = {};
        if (row < split.n_rows) dc_load_row(q, dc_row_at(split, head, row), x, index % 32);
        FKV_UNROLL
        for (int i = 0; i < DC_LANE_CHANNELS; i++) {
            fkv_u32 d = index % 32 + 32 * (fkv_u32)i;
            fkv_u32 place = FKV_CALIBRATED ? position[d] : sd_query_place(d);
            ((FKV_SHARED float *)shared)[row * SD_QUERY_WORDS + place] = x[i];
        }
    }
    fkv_sync();
}

/* Returns the positions of the rows that the thread handles. Unused rows have the position of the first row. */
FKV_FN sd_rows sd_rows_of(const fkv_split &split, dc_place at) {
    sd_rows rows;
    rows.first = split.words[FKV_SPLIT_POSITION];
    rows.last = rows.first + split.words[FKV_SPLIT_N_QUERIES] - 1;
    FKV_UNROLL
    for (int g = 0; g < SD_WEIGHED; g++) {
        fkv_u32 row = sd_first_row(g, at) + sd_lane_row(at.lane);
        rows.own[g] = rows.first + (split.first_row + (row < split.n_rows ? row : 0)) / FKV_R;
    }
    return rows;
}

FKV_FN fkv_u32 sd_next(fkv_u32 i) { return (i + 1) % SD_TURN != 0 ? i + 1 : i + 1 + (DC_STREAMS - 1) * SD_TURN; }

FKV_FN fkv_u32 sd_slot(fkv_u32 i) { return i % SD_TURN * SD_TILE; }

/* Loads the pool page number of tile i into tile.page. */
FKV_FN void sd_load_page(sd_tile &tile, const dc_split_pages &walk, fkv_u32 i, fkv_u32 n_tiles) {
    if (i < n_tiles) tile.page = dc_physical_page(walk, i / SD_TURN);
}

/* Starts loading the first tile of the stream. Called before the queries are prepared, to hide latency. */
FKV_FN void sd_load_first(sd_tile &tile, const fkv_split &split, const dc_split_pages &walk, fkv_u32 n_tiles,
                          FKV_SHARED fkv_u32 *lines, FKV_SHARED fkv_u32 *buffers, dc_place at) {
    fkv_u32 i = at.stream * SD_TURN;
    tile.page = 0;
    if (i >= n_tiles) return;
    const fkv_u8 *block = dc_page_block(walk, dc_first_page(split, at.stream));
    if (!FKV_K_BOOK) sd_copy_lines(lines, block, at);
    sd_load_keys(tile, block, 0, 0, buffers, at);
    if (!FKV_K_BOOK) fkv_async_copy_commit();
    sd_load_values(tile, block, 0, buffers, at);
    if (!FKV_K_BOOK) fkv_async_copy_commit();
    sd_load_page(tile, walk, sd_next(i), n_tiles);
}

/* Processes all tiles of the stream. The copy of the next tile's keys starts after the scores of this tile are computed. The copy
 * of the next tile's values starts after the values of this tile are accumulated. Each wait applies only to older copies, so
 * newer copies stay in flight. Page numbers are loaded two tiles ahead. */
FKV_FN void sd_process_tiles(sd_tile &tile, const dc_split_pages &walk, fkv_u32 n_tiles, const sd_rows &rows,
                             FKV_SHARED fkv_u32 *shared, FKV_SHARED fkv_u32 *lines, FKV_SHARED fkv_u32 *buffers, dc_place at,
                             sd_state &state) {
    FKV_SHARED float *exchange = (FKV_SHARED float *)shared + SD_AT_REST;
    FKV_SHARED float *given = exchange + at.warp * (SD_GIVEN_WORDS * 32) + at.lane;
    /* exchange buffer of the stream's other warp */
    FKV_SHARED const float *taken = exchange + (at.warp ^ 1) * (SD_GIVEN_WORDS * 32) + at.lane;
    sd_queries queries = {};
    if (FKV_K_BOOK)
        sd_enter_page(lines, shared, at,
                      queries); /* codebook query operands are built only once, because they do not depend on the page */
    fkv_u32 n = 0;
    for (fkv_u32 i = at.stream * SD_TURN; i < n_tiles; i = sd_next(i), n++) {
        fkv_u32 next = sd_next(i);
        const fkv_u8 *block = dc_page_block(walk, tile.page);
        fkv_u32 base = dc_logical_page(walk, i / SD_TURN) * FKV_PAGE_TOKENS + sd_slot(i);
        if (!FKV_K_BOOK) fkv_async_copy_wait_but_last();
        if (!FKV_K_BOOK && i % SD_TURN == 0) sd_enter_page(lines, shared, at, queries);
        sd_open_tile(tile, n, buffers, at.lane);
        sd_scores score;
        sd_score(tile, queries, score);
        if (queries.coarse) sd_add_residue(tile, lines, shared, at, queries, score);
        if (next < n_tiles) {
            if (!FKV_K_BOOK && next % SD_TURN == 0) sd_copy_lines(lines, block, at);
            if (!FKV_K_BOOK) fkv_sync_warp(); /* waits until all lanes have read the keys */
            sd_load_keys(tile, block, sd_slot(next), n + 1, buffers, at);
        }
        if (!FKV_K_BOOK) fkv_async_copy_commit();
        if (FKV_K_BOOK) sd_load_page(tile, walk, sd_next(next), n_tiles);
        if (SD_SHARES)
            sd_exchange_scores(given, taken, at, score);
        else if (DC_SLABS > 1)
            dc_add_slabs(exchange + n % SD_EXCHANGES * SD_EXCHANGE_WORDS, SD_EXCHANGES == 1, at, score);
        sd_weights weights[SD_GROUPS];
        bool whole = dc_is_whole(rows.first, rows.last, base, SD_TILE);
        FKV_UNROLL
        for (int g = 0; g < SD_WEIGHED; g++)
            sd_weigh(tile, rows, base + sd_first_token(at.lane), whole, at.lane, g, score[g], state, weights[g]);
        if (SD_SHARES) sd_exchange_weights(given + SD_OWN * 32, taken + SD_OWN * 32, at, weights);
        FKV_UNROLL
        for (int g = 0; g < SD_GROUPS; g++)
            if (fkv_any(weights[g].shrink != 1.0f)) sd_scale_sums(state, g, weights[g].shrink);
        if (!FKV_K_BOOK) fkv_async_copy_wait_but_last();
        sd_add_values(tile, weights, state);
        if (!FKV_K_BOOK) fkv_sync_warp(); /* waits until all lanes have read the values */
        if (next < n_tiles) sd_load_values(tile, block, sd_slot(next), buffers, at);
        if (!FKV_K_BOOK) fkv_async_copy_commit();
        if (!FKV_K_BOOK) sd_load_page(tile, walk, sd_next(next), n_tiles);
    }
}

/* Stores the maximum score and the total weight of each row, computed by this stream, in shared memory. Then rescales the
 * stream's output sums to the maximum scores of the split. */
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
    fkv_sync(); /* after this barrier, the buffer for exchanging scores may be reused */
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        fkv_u32 row = sd_first_row(g, at) + sd_lane_row(at.lane);
        float own = stats[(at.stream * DC_ROWS + row) * 2];
        float factor = own == dc_minus_infinity() ? 0.0f : fkv_exp2(own - dc_split_max(stats, row));
        sd_scale_sums(state, g, factor);
    }
}

/* Adds the output sums of all streams in stream order. Writes the thread's part of the result to `output`. Called by all threads
 * of the block. The loop over streams is not unrolled, to keep the code small. */
FKV_FN void sd_fold_streams(const sd_state &state, dc_place at, fkv_u32 index, FKV_SHARED float *sums, dc_output &output) {
    FKV_SHARED float *own = sums + at.stream % DC_STREAMS_AT_ONCE * DC_STREAM_SUMS + sd_lane_row(at.lane) * DC_SUM_STRIDE +
                            at.slab * DC_SLAB + sd_first_channel(at.lane);
    FKV_NO_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s += DC_STREAMS_AT_ONCE) {
        if (s / DC_STREAMS_AT_ONCE == at.stream / DC_STREAMS_AT_ONCE) {
            FKV_UNROLL
            for (int i = 0; i < SD_GROUPS * SD_UNITS * SD_GROUP; i++) {
                int g = i / (SD_GROUP * SD_UNITS);
                int u = i / SD_GROUP % SD_UNITS;
                float x = state.sums[g][u][i % SD_GROUP];
                FKV_SHARED float &to = own[sd_first_row(g, at) * DC_SUM_STRIDE + sd_unit_channel(u) + i % SD_GROUP];
                to = s == 0 ? x : to + x;
            }
        }
        fkv_sync();
    }
    dc_add_streams(sums, index, output);
}

/* Body of the decode kernel. decode_mma.h describes its inputs and the format of its partial results. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                              float *parts FKV_ORDER) {
    dc_place at = dc_place_of(place);
    fkv_split split = fkv_split_at(place, table);
    if (split.n_rows == 0) return;
    fkv_u32 n_tiles = (split.words[FKV_SPLIT_N_TOKENS] + SD_TILE - 1) / SD_TILE;
    dc_split_pages walk = dc_split_pages_of(split, place.y, pool, table);
    FKV_SHARED fkv_u32 *lines = shared + SD_AT_LINES + at.warp * DC_SLAB;
    FKV_SHARED fkv_u32 *buffers = shared + SD_AT_BUFFERS + at.warp * (2 * SD_BUFFER_WORDS);
    sd_tile tile;
    sd_load_first(tile, split, walk, n_tiles, lines, buffers, at);
    sd_prepare_rows(split, place.y, q, shared, place.index FKV_ORDER_GIVEN);
#if FKV_CALIBRATED
    tile.keys.n4 = order[0], tile.keys.n6 = order[1];
#endif

    sd_state state = {};
    FKV_UNROLL
    for (int g = 0; g < SD_WEIGHED; g++) state.max[g] = dc_minus_infinity();
    sd_process_tiles(tile, walk, n_tiles, sd_rows_of(split, at), shared, lines, buffers, at, state);

    FKV_SHARED float *stats = (FKV_SHARED float *)shared + SD_AT_STATS;
    FKV_SHARED float *sums = (FKV_SHARED float *)shared + SD_AT_REST;
    dc_output output = {};
    sd_finish_sums(state, at, stats);
    sd_fold_streams(state, at, place.index, sums, output);
    dc_store(split, place, stats, output, table, parts);
}
