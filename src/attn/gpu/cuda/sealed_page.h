/* Decode of sealed pages: what a thread loads of a tile, and the operands that its codes become. book_page.h has the same of rows
 * of a book.
 */
constexpr int SD_K_TERMS = 1; /* bytes that add up to what a code stands for */
constexpr int SD_V_TERMS = 2;
constexpr bool SD_LESS_ONE = true;        /* values come out less by one */
constexpr float SD_LEVEL = 1.0f / 128.0f; /* what one of a value is worth */
constexpr fkv_u32 SD_RUN_STEP = 1;        /* channels from one thread of a run to the next */
constexpr fkv_u32 SD_UNIT_STEP = 32;      /* and from one unit of a thread's sums to the next */

/* Tokens of a thread, and where those of an operand's column come from: two threads. */
constexpr fkv_u32 SD_TOKEN_STEP = 1;
constexpr fkv_u32 SD_WEIGHT_LANES = 8;
constexpr fkv_u32 SD_OTHER_LANE = 4;
FKV_FN fkv_u32 sd_first_token(fkv_u32 lane) { return sd_lane_run(lane); }

/* Packed bytes of a tile, loaded while the tile before it is computed. */
struct sd_tile {
    fkv_u32 k[SD_PARTS][SD_UNITS][4];      /* tokens 4 r + i, 8 channels each */
    fkv_u32 v[SD_PARTS][SD_UNITS][4];      /* channels 4 r + i, 8 tokens each */
    fkv_u32 norms[SD_PARTS][SD_GROUP / 2]; /* of its own tokens */
    fkv_u32 page;                          /* of the tile behind it */
};

FKV_FN void sd_open_tile(sd_tile &, fkv_u32) {}

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
    for (int p = 0; p < SD_PARTS; p++)
        dc_stream(to.norms[p], block + FKV_V_SCALES + (slot + 32 * (fkv_u32)p + sd_lane_run(at.lane)) * 2, 2 * SD_GROUP);
}

/* Where channel d of a slab lies among the queries in shared memory. */
FKV_FN fkv_u32 sd_query_place(fkv_u32 d) { return d; }

/* 16 tokens, 4 r and 4 r + 1 of a part or the two behind them; of unit u. */
FKV_FN void sd_key_operand(const sd_tile &tile, int i, int u, int, fkv_u32 (&a)[4]) {
    const fkv_u32 *x = tile.k[i / 2][u] + i % 2 * 2;
    FKV_UNROLL
    for (int k = 0; k < 4; k++) a[k] = x[k % 2] >> k / 2 * 4 & 0x0f0f0f0fu;
}

/* The score of a thread's i-th token. */
FKV_FN float sd_score_of(const sd_tile &, int, float both, sd_line line) { return fkv_fma(both, line.unit, line.bias); }

/* Levels of four codes from the lowest nibble on: those without a sign, 0 for the others. And with the signs flipped: -level - 1
 * of those with one, -1 for the others. */
FKV_FN fkv_u32 sd_levels(fkv_u32 codes) { return fkv_permute_or_sign(fkv_v_levels(0), fkv_v_levels(4), codes); }
FKV_FN fkv_u32 sd_minus(fkv_u32 flipped) { return fkv_permute_or_sign(~fkv_v_levels(0), ~fkv_v_levels(4), flipped); }

/* 16 channels, 4 r and 4 r + 1 of a unit or the two behind them; of part p. */
FKV_FN void sd_value_operand(const sd_tile &tile, int p, int i, int term, fkv_u32 (&a)[4]) {
    FKV_UNROLL
    for (int k = 0; k < 2; k++) {
        fkv_u32 x = tile.v[p][i / 2][i % 2 * 2 + k];
        fkv_u32 flipped = x ^ 0x88888888u;
        a[k] = term == 0 ? sd_levels(x) : sd_minus(flipped);
        a[2 + k] = term == 0 ? sd_levels(x >> 16) : sd_minus(flipped >> 16);
    }
}

/* Which of the thread's sums the k-th channel of the operand has. */
FKV_FN constexpr int sd_sum_place(int i, int k) { return 2 * i + k; }
