/* Decode through matrix units, of sealed pages of 4 bits. decode_piece.h has the block; docs/page_format.md says where codes lie.
 *
 * All products are of bytes. Rows go in groups of four, and a group is the B operand: column 2 c is the high byte of row c's
 * numbers, column 2 c + 1 the low one, so that a thread (r, c) gets both sums of its own row side by side. Groups share what is
 * unpacked and nothing else: a row's bits do not depend on how many there are.
 *
 * K. score = sum over ch of (q scale) code, + sum over ch of q bias. When a stream comes to a page it makes the operands for it:
 * q scale as 16 bits, in units of the largest of the row and slab. A dword of the page is 8 channels of one token: the lower
 * nibbles are four bytes of an A operand, the upper ones four more.
 *
 * V. A dword is 8 tokens of one channel. A byte permute looks up the levels of four of them, and gives 0 for a code with a sign;
 * with the signs flipped it gives the others: two operands, whose sums are subtracted. The weight of a token is p norm, with p
 * relative to the tile's own max, as 16 bits in units of the tile's largest norm that the row sees.
 *
 * A thread has the scores of tokens 32 p + 4 r + i of its row, and the sums of channels 32 u + 4 r + i.
 *
 * Ladder: one query over 131072 tokens on an H200, us of a call chained through MLX; 8 KV heads of 128, 2 of 256, 1 of 512.
 *   128   256   512
 *    94   123   100  halves: q scale and the rest of it, levels with signs; 1636 instructions of a warp for a page
 *    73   118    91  bytes, as above: 958
 *    57    92    63  scales copied past the registers; MLX told the text by name and not in full
 *    57    87    61  blocks of 8 rows of 256 channels, of 4 of 512: more warps
 * Tiles of 32 tokens with 12, 16 and 20 warps on a multiprocessor: 62, 57, 61. Tiles of 64 with 16 spill: 119.
 */
constexpr int SD_GROUPS = DC_ROWS / 4;
constexpr int SD_UNITS = DC_SLAB / 32; /* of 32 channels: one product's depth for K, two row tiles for V */

/* Parts of 32 tokens of a tile. The layer decides, not DC_ROWS: which tokens are folded together is part of the answer's bits. */
constexpr int SD_PARTS = FKV_PAGE_TOKENS >= 64 && FKV_R <= 4 ? 2 : 1;
constexpr int SD_TILE = 32 * SD_PARTS;
constexpr int SD_OWN = 4 * SD_PARTS;                   /* tokens of a thread */
constexpr fkv_u32 SD_TURN = FKV_PAGE_TOKENS / SD_TILE; /* tiles of a page: a stream takes them all */

constexpr fkv_u32 SD_BLOCK_BYTES = 8 * FKV_D; /* of 16 tokens' codes */

/* ---- shared memory, in words ---- */

constexpr int SD_EXCHANGE_WORDS = DC_SLABS > 1 ? DC_STREAMS *DC_SLABS *SD_GROUPS *SD_OWN * 32 : 0;
constexpr int SD_EXCHANGES =
    SD_EXCHANGE_WORDS > 2048 ? 1 : 2;        /* rooms for the slabs' scores, in turn; one needs a barrier more */
constexpr int SD_AT_LINES = DC_ROWS * FKV_D; /* behind the queries: {scales, biases} of two pages, of each warp */
constexpr int SD_AT_STATS = SD_AT_LINES + 2 * DC_STREAMS * DC_SLABS * DC_SLAB; /* [streams, rows, {max, total}] */
constexpr int SD_AT_REST = SD_AT_STATS + 2 * DC_STREAMS * DC_ROWS;             /* exchanged scores, then sums [rows, D] */
constexpr int DC_SHARED_WORDS =
    SD_AT_REST + (SD_EXCHANGES * SD_EXCHANGE_WORDS > DC_ROWS * FKV_D ? SD_EXCHANGES * SD_EXCHANGE_WORDS : DC_ROWS * FKV_D);
#define FKV_DECODE_SHARED DC_SHARED_WORDS

/* ---- what a thread holds ---- */

/* Packed bytes of a tile, loaded while the tile before it is computed. */
struct sd_tile {
    fkv_u32 k[SD_PARTS][SD_UNITS][4]; /* tokens 4 r + i, 8 channels each */
    fkv_u32 v[SD_PARTS][SD_UNITS][4]; /* channels 4 r + i, 8 tokens each */
    fkv_u32 norms[SD_PARTS][2];       /* of its own tokens */
    fkv_u32 page;                     /* of the tile behind it */
};

/* Queries as a page's keys meet them. */
struct sd_queries {
    fkv_u32 b[SD_GROUPS][SD_UNITS][2];
    float unit[SD_GROUPS]; /* of the thread's own row */
    float bias[SD_GROUPS];
};

struct sd_state {
    float max[SD_GROUPS];
    float total[SD_GROUPS]; /* of the thread's own tokens */
    float sums[SD_GROUPS][SD_UNITS][4];
};

typedef float sd_scores[SD_GROUPS][SD_OWN];

/* Positions: of the item's first and last query, and of the thread's own rows. */
struct sd_rows {
    fkv_u32 first;
    fkv_u32 last;
    fkv_u32 own[SD_GROUPS];
};

/* ---- loads ---- */

/* A page's {scales, biases} of the slab into the warp's shared memory, in turns of two pages. */
FKV_FN void sd_copy_lines(FKV_SHARED fkv_u32 *lines, const fkv_u8 *block, dc_place at) {
    constexpr fkv_u32 lanes = DC_SLAB / 8;
    if (at.lane >= 2 * lanes) return;
    const fkv_u8 *part = block + (at.lane < lanes ? FKV_K_SCALES : FKV_K_BIASES);
    fkv_copy16(lines + at.lane * 4, part + at.slab * (DC_SLAB * 2) + at.lane % lanes * 16);
}

FKV_FN void sd_load_keys(sd_tile &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 r = at.lane / 4;
    const fkv_u8 *codes =
        block + FKV_K_CODES + (slot / 16 + r / 4) * SD_BLOCK_BYTES + at.slab * (DC_SLAB * 8) + at.lane % 4 * 64 + r % 4 * 16;
    FKV_UNROLL
    for (int i = 0; i < SD_PARTS * SD_UNITS; i++)
        dc_stream(to.k[i / SD_UNITS][i % SD_UNITS], codes + (fkv_u32)(i / SD_UNITS) * (2 * SD_BLOCK_BYTES) + i % SD_UNITS * 256,
                  16);
}

FKV_FN void sd_load_values(sd_tile &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 r = at.lane / 4;
    fkv_u32 c = at.lane % 4;
    const fkv_u8 *codes = block + FKV_V_CODES + (slot / 16 + c / 2) * SD_BLOCK_BYTES + at.slab * (DC_SLAB * 8) + r / 4 * 128 +
                          c % 2 * 64 + r % 4 * 16;
    FKV_UNROLL
    for (int i = 0; i < SD_PARTS * SD_UNITS; i++)
        dc_stream(to.v[i / SD_UNITS][i % SD_UNITS], codes + (fkv_u32)(i / SD_UNITS) * (2 * SD_BLOCK_BYTES) + i % SD_UNITS * 256,
                  16);
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS; p++) dc_stream(to.norms[p], block + FKV_V_SCALES + (slot + 32 * (fkv_u32)p + 4 * r) * 2, 8);
}

/* ---- a page's queries ---- */

FKV_FN float sd_line_number(const fkv_words4 &x, int i) {
    return fkv_page_number(i % 2 == 0 ? x.w[i / 2] & 0xffffu : x.w[i / 2] >> 16);
}

/* Four numbers of 16 bits: the bytes with sign that make them up, the high ones and the low ones. */
struct sd_bytes {
    fkv_u32 high;
    fkv_u32 low;
};

FKV_FN sd_bytes sd_bytes_of(const float *x, float inverse) {
    fkv_u32 bits[4];
    FKV_UNROLL
    for (int i = 0; i < 4; i++) bits[i] = fkv_bits_of(fkv_fma(x[i], inverse, 12583040.0f)); /* 1.5 * 2^23 + 128 */
    fkv_u32 front = fkv_permute(bits[0], bits[1], 0x5410u);
    fkv_u32 back = fkv_permute(bits[2], bits[3], 0x5410u);
    return {fkv_permute(front, back, 0x7531u), fkv_permute(front, back, 0x6420u) ^ 0x80808080u};
}

/* Operands of a group. Threads 2 c and 2 c + 1 have row c, one its high bytes and one its low ones: each makes both for half of
 * the units, and they exchange. */
FKV_FN void sd_enter_group(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *query, fkv_u32 lane, sd_queries &to,
                           int group) {
    constexpr int half = SD_UNITS / 2;
    bool odd = lane / 4 % 2 != 0;
    float x[half][8];
    fkv_u32 largest = 0; /* as bits, so that NaN is the largest */
    float sum = 0.0f;
    FKV_UNROLL
    for (int u = 0; u < half; u++) {
        fkv_u32 line = 4 * (fkv_u32)u + lane % 4 + (odd ? 4 * half : 0); /* of 8 channels */
        fkv_words4 scales = fkv_shared16(lines + line * 4);
        fkv_words4 biases = fkv_shared16(lines + DC_SLAB / 2 + line * 4);
        const fkv_words4 q[2] = {fkv_shared16(query + line * 8), fkv_shared16(query + line * 8 + 4)};
        FKV_UNROLL
        for (int i = 0; i < 8; i++) {
            float number = fkv_float_of(q[i / 4].w[i % 4]);
            x[u][i] = fkv_mul(number, sd_line_number(scales, i));
            largest = fkv_max_bits(largest, fkv_bits_of(fkv_abs(x[u][i])));
            sum = fkv_fma(number, sd_line_number(biases, i), sum);
        }
    }
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 8; h *= 2) {
        largest = fkv_max_bits(largest, fkv_shuffle_xor_bits(largest, h));
        sum += fkv_shuffle_xor(sum, h);
    }
    bool number = largest < 0x7f800000u;
    float unit = number ? fkv_mul(fkv_float_of(largest), 1.0f / 32512.0f) : fkv_float_of(DC_NAN);
    float inverse = unit > 1e-35f ? fkv_reciprocal(unit) : 0.0f;
    FKV_UNROLL
    for (int i = 0; i < 2 * half; i++) {
        sd_bytes bytes = sd_bytes_of(x[i / 2] + i % 2 * 4, inverse);
        fkv_u32 other = fkv_shuffle_xor_bits(odd ? bytes.high : bytes.low, 4);
        to.b[group][i / 2][i % 2] = odd ? other : bytes.high;
        to.b[group][half + i / 2][i % 2] = odd ? bytes.low : other;
    }
    to.unit[group] = fkv_shuffle(unit, lane % 4 * 8); /* row c is that of threads r = 2 c */
    to.bias[group] = fkv_shuffle(sum, lane % 4 * 8);
}

/* lines: copied, or on their way. */
FKV_FN void sd_enter_page(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *shared, dc_place at, sd_queries &to) {
    fkv_await_copies();
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++)
        sd_enter_group(lines, shared + (4 * (fkv_u32)g + at.lane / 8) * FKV_D + at.slab * DC_SLAB, at.lane, to, g);
}

/* ---- scores ---- */

FKV_FN void sd_score(const sd_tile &tile, const sd_queries &queries, sd_scores &score) {
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_PARTS; i++) { /* 16 tokens: 4 r and 4 r + 1 of a part, or the two behind them */
        int sums[SD_GROUPS][4] = {};
        FKV_UNROLL
        for (int u = 0; u < SD_UNITS; u++) {
            const fkv_u32 *x = tile.k[i / 2][u] + i % 2 * 2;
            const fkv_u32 a[4] = {x[0] & 0x0f0f0f0fu, x[1] & 0x0f0f0f0fu, x[0] >> 4 & 0x0f0f0f0fu, x[1] >> 4 & 0x0f0f0f0fu};
            FKV_UNROLL
            for (int g = 0; g < SD_GROUPS; g++) fkv_mma_signed(sums[g], a, queries.b[g][u][0], queries.b[g][u][1]);
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            int both = sums[g][k % 2 * 2] * 256 + sums[g][k % 2 * 2 + 1];
            score[g][i * 2 + k % 2] = fkv_fma((float)both, queries.unit[g], queries.bias[g]);
        }
    }
}

/* ---- softmax ---- */

/* The largest over the threads of a row. */
FKV_FN float sd_row_max(float x) {
    FKV_UNROLL
    for (fkv_u32 h = 4; h < 32; h *= 2) x = fkv_max(x, fkv_shuffle_xor(x, h));
    return x;
}

FKV_FN fkv_u32 sd_row_max_bits(fkv_u32 x) {
    FKV_UNROLL
    for (fkv_u32 h = 4; h < 32; h *= 2) x = fkv_max_bits(x, fkv_shuffle_xor_bits(x, h));
    return x;
}

/* Norms of the thread's tokens. One that the row does not see may be NaN, and is taken as 0. Returns the largest as bits. */
FKV_FN fkv_u32 sd_norms(const sd_tile &tile, const sd_rows &rows, fkv_u32 token, bool whole, int group, float (&norm)[SD_OWN]) {
    fkv_u32 largest = 0;
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        fkv_u32 pair = tile.norms[i / 4][i % 4 / 2];
        norm[i] = fkv_page_number((i % 2 == 0 ? pair : pair >> 16) & 0x7fffu);
        if (!whole && !fkv_sees(rows.own[group], token + 32 * (fkv_u32)(i / 4) + (fkv_u32)(i % 4))) norm[i] = 0.0f;
        largest = fkv_max_bits(largest, fkv_bits_of(norm[i]));
    }
    return whole ? fkv_warp_max_bits(largest) : sd_row_max_bits(largest);
}

/* What a group's tile adds up to: weights as B operands, and what a unit of their sums is worth. */
struct sd_weights {
    fkv_u32 b[SD_PARTS][2];
    float worth;
};

/* Weights of 16 bits, of 8 tokens of a column: those of thread (2 c, row) and then of thread (2 c + 1, row), in the order of the
 * nibbles of V. */
FKV_FN void sd_spread(const fkv_u32 *bits, fkv_u32 lane, fkv_u32 (&b)[2]) {
    fkv_u32 from = lane % 4 * 8 + lane / 8; /* thread (2 c, row r / 2) */
    fkv_u32 pick = lane / 4 % 2 == 0 ? 0x7351u : 0x6240u;
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        fkv_u32 pair = fkv_permute(bits[2 * i], bits[2 * i + 1], 0x5410u);
        b[i] = fkv_permute(fkv_shuffle_bits(pair, from), fkv_shuffle_bits(pair, from + 4), pick);
    }
}

/* Scores to weights, of one group; max, total and sums follow. token: the thread's first. */
FKV_FN void sd_weigh(const sd_tile &tile, const sd_rows &rows, fkv_u32 token, bool whole, fkv_u32 lane, int group,
                     float (&score)[SD_OWN], sd_state &state, sd_weights &to) {
    float norm[SD_OWN];
    fkv_u32 largest = sd_norms(tile, rows, token, whole, group, norm);
    float max = dc_minus_infinity();
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        if (FKV_SOFTCAP_BITS != 0) score[i] = fkv_cap(score[i]);
        if (!whole && !fkv_sees(rows.own[group], token + 32 * (fkv_u32)(i / 4) + (fkv_u32)(i % 4)))
            score[i] = dc_minus_infinity();
        max = fkv_max(max, score[i]);
    }
    max = sd_row_max(max);
    float from = max == dc_minus_infinity() ? 0.0f : max;
    float unit = fkv_mul(fkv_float_of(largest), 1.0f / 65528.0f);
    float inverse = unit > 1e-35f ? fkv_reciprocal(unit) : 0.0f;
    float total = 0.0f;
    fkv_u32 bits[SD_OWN];
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i++) {
        float p = fkv_exp2(score[i] - from);
        total += p;
        bits[i] = fkv_bits_of(fkv_fma(p, fkv_mul(norm[i], inverse), 8388608.0f)); /* 2^23: the rest is a whole number */
    }
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS; p++) sd_spread(bits + 4 * p, lane, to.b[p]);

    float grown = fkv_max(state.max[group], max);
    float shrink = state.max[group] == grown ? 1.0f : fkv_exp2(state.max[group] - grown);
    float share = max == grown ? 1.0f : fkv_exp2(max - grown);
    state.max[group] = grown;
    state.total[group] = fkv_fma(total, share, fkv_mul(state.total[group], shrink));
    if (largest >= 0x7f800000u) state.total[group] = fkv_float_of(DC_NAN);
    to.worth = fkv_mul(share, fkv_mul(unit, 1.0f / 128.0f)); /* levels are 128ths */
    if (!fkv_any(shrink != 1.0f)) return;
    FKV_UNROLL
    for (int i = 0; i < 4 * SD_UNITS; i++) state.sums[group][i / 4][i % 4] = fkv_mul(state.sums[group][i / 4][i % 4], shrink);
}

/* ---- values ---- */

/* Levels of four codes from the lowest nibble on: those without a sign, 0 for the others. */
FKV_FN fkv_u32 sd_levels(fkv_u32 codes) { return fkv_permute_or_zero(fkv_v_levels(0), fkv_v_levels(4), codes); }

FKV_FN void sd_add_values(const sd_tile &tile, const sd_weights (&weights)[SD_GROUPS], sd_state &state) {
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_UNITS; i++) { /* 16 channels: 4 r and 4 r + 1 of a unit, or the two behind them */
        int plus[SD_GROUPS][4] = {};
        int minus[SD_GROUPS][4] = {};
        FKV_UNROLL
        for (int p = 0; p < SD_PARTS; p++) {
            const fkv_u32 *x = tile.v[p][i / 2] + i % 2 * 2;
            const fkv_u32 y[2] = {x[0] ^ 0x88888888u, x[1] ^ 0x88888888u};
            const fkv_u32 a[4] = {sd_levels(x[0]), sd_levels(x[1]), sd_levels(x[0] >> 16), sd_levels(x[1] >> 16)};
            const fkv_u32 b[4] = {sd_levels(y[0]), sd_levels(y[1]), sd_levels(y[0] >> 16), sd_levels(y[1] >> 16)};
            FKV_UNROLL
            for (int g = 0; g < SD_GROUPS; g++) {
                fkv_mma_bytes(plus[g], a, weights[g].b[p][0], weights[g].b[p][1]);
                fkv_mma_bytes(minus[g], b, weights[g].b[p][0], weights[g].b[p][1]);
            }
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            int at = k % 2 * 2;
            int both = (plus[g][at] - minus[g][at]) * 256 + (plus[g][at + 1] - minus[g][at + 1]);
            float &sum = state.sums[g][i / 2][i % 2 * 2 + k % 2];
            sum = fkv_fma((float)both, weights[g].worth, sum);
        }
    }
}

/* ---- the piece ---- */

/* The block's queries into shared memory, as floats, by all warps; rows that are not there are 0. */
FKV_FN void sd_prepare_rows(const fkv_piece &piece, fkv_u32 head, const void *q, FKV_SHARED fkv_u32 *shared, fkv_u32 index) {
    for (fkv_u32 row = index / 32; row < DC_ROWS; row += DC_THREADS / 32) {
        float x[DC_LANE_CHANNELS] = {};
        if (row < piece.n_rows) dc_load_row(q, dc_row_at(piece, head, row), x, index % 32);
        FKV_UNROLL
        for (int i = 0; i < DC_LANE_CHANNELS; i++)
            ((FKV_SHARED float *)shared)[row * FKV_D + index % 32 + 32 * (fkv_u32)i] = x[i];
    }
    fkv_sync();
}

/* Rows that are not there repeat the first. */
FKV_FN sd_rows sd_rows_of(const fkv_piece &piece, fkv_u32 lane) {
    sd_rows rows;
    rows.first = piece.words[FKV_PIECE_POSITION];
    rows.last = rows.first + piece.words[FKV_PIECE_N_QUERIES] - 1;
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        fkv_u32 row = 4 * (fkv_u32)g + lane % 4;
        rows.own[g] = rows.first + (piece.first_row + (row < piece.n_rows ? row : 0)) / FKV_R;
    }
    return rows;
}

FKV_FN fkv_u32 sd_next(fkv_u32 i) { return (i + 1) % SD_TURN != 0 ? i + 1 : i + 1 + (DC_STREAMS - 1) * SD_TURN; }

FKV_FN fkv_u32 sd_slot(fkv_u32 i) { return i % SD_TURN * SD_TILE; }

/* The stream's first tile, on its way while the queries are prepared. */
FKV_FN void sd_load_first(sd_tile &tile, const dc_walk &walk, fkv_u32 n_tiles, FKV_SHARED fkv_u32 *lines, dc_place at) {
    fkv_u32 i = at.stream * SD_TURN;
    tile.page = 0;
    if (i >= n_tiles) return;
    const fkv_u8 *block = dc_page_block(walk, dc_physical_page(walk, i / SD_TURN));
    sd_copy_lines(lines, block, at);
    sd_load_keys(tile, block, 0, at);
    sd_load_values(tile, block, 0, at);
    if (sd_next(i) < n_tiles) tile.page = dc_physical_page(walk, sd_next(i) / SD_TURN);
}

/* The stream's tiles, one after the other. Each part of the next one is asked for when its registers are free, page numbers two
 * tiles ahead. */
FKV_FN void sd_walk(sd_tile &tile, const dc_walk &walk, fkv_u32 n_tiles, const sd_rows &rows, FKV_SHARED fkv_u32 *shared,
                    FKV_SHARED fkv_u32 *lines, dc_place at, sd_state &state) {
    FKV_SHARED float *exchange = (FKV_SHARED float *)shared + SD_AT_REST;
    sd_queries queries = {};
    fkv_u32 page = 0; /* of the stream's */
    fkv_u32 turn = 0;
    for (fkv_u32 i = at.stream * SD_TURN; i < n_tiles; i = sd_next(i)) {
        fkv_u32 next = sd_next(i);
        const fkv_u8 *block = dc_page_block(walk, tile.page);
        fkv_u32 base = dc_logical_page(walk, i / SD_TURN) * FKV_PAGE_TOKENS + sd_slot(i);
        if (i % SD_TURN == 0) sd_enter_page(lines + page++ % 2 * DC_SLAB, shared, at, queries);
        if (next < n_tiles && next % SD_TURN == 0) sd_copy_lines(lines + page % 2 * DC_SLAB, block, at);
        sd_scores score;
        sd_score(tile, queries, score);
        if (next < n_tiles) {
            sd_load_keys(tile, block, sd_slot(next), at);
            if (sd_next(next) < n_tiles) tile.page = dc_physical_page(walk, sd_next(next) / SD_TURN);
        }
        if (DC_SLABS > 1) dc_add_slabs(exchange + turn++ % SD_EXCHANGES * SD_EXCHANGE_WORDS, SD_EXCHANGES == 1, at, score);
        sd_weights weights[SD_GROUPS];
        bool whole = dc_is_whole(rows.first, rows.last, base, SD_TILE);
        FKV_UNROLL
        for (int g = 0; g < SD_GROUPS; g++)
            sd_weigh(tile, rows, base + at.lane / 4 * 4, whole, at.lane, g, score[g], state, weights[g]);
        sd_add_values(tile, weights, state);
        if (next < n_tiles) sd_load_values(tile, block, sd_slot(next), at);
    }
}

/* The streams' sums into one, from the first to the last: [rows, D]. */
FKV_FN void sd_fold_streams(sd_state &state, dc_place at, FKV_SHARED float *stats, FKV_SHARED float *sums) {
    fkv_u32 r = at.lane / 4;
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        FKV_UNROLL
        for (fkv_u32 h = 4; h < 32; h *= 2) state.total[g] += fkv_shuffle_xor(state.total[g], h);
        fkv_u32 row = 4 * (fkv_u32)g + at.lane % 4;
        if (at.slab == 0 && r == 0) {
            stats[(at.stream * DC_ROWS + row) * 2] = state.max[g];
            stats[(at.stream * DC_ROWS + row) * 2 + 1] = state.total[g];
        }
    }
    fkv_sync(); /* also: nobody exchanges scores any more */
    FKV_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) {
        FKV_UNROLL
        for (int i = 0; i < SD_GROUPS * SD_UNITS * 4 && s == at.stream; i++) {
            int g = i / (4 * SD_UNITS);
            fkv_u32 row = 4 * (fkv_u32)g + at.lane % 4;
            float factor = state.max[g] == dc_minus_infinity() ? 0.0f : fkv_exp2(state.max[g] - dc_piece_max(stats, row));
            FKV_SHARED float *to =
                sums + row * FKV_D + at.slab * DC_SLAB + 32 * (fkv_u32)(i / 4 % SD_UNITS) + 4 * r + (fkv_u32)i % 4;
            float x = fkv_mul(state.sums[g][i / 4 % SD_UNITS][i % 4], factor);
            *to = s == 0 ? x : *to + x;
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
    FKV_SHARED fkv_u32 *lines = shared + SD_AT_LINES + at.warp * (2 * DC_SLAB);
    sd_tile tile;
    sd_load_first(tile, walk, n_tiles, lines, at);
    sd_prepare_rows(piece, place.y, q, shared, place.index);

    sd_state state = {};
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) state.max[g] = dc_minus_infinity();
    sd_walk(tile, walk, n_tiles, sd_rows_of(piece, at.lane), shared, lines, at, state);

    FKV_SHARED float *stats = (FKV_SHARED float *)shared + SD_AT_STATS;
    FKV_SHARED float *sums = (FKV_SHARED float *)shared + SD_AT_REST;
    sd_fold_streams(state, at, stats, sums);
    dc_store(piece, place, stats, sums, table, parts);
}
