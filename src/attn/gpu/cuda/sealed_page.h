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

/* Packed bytes of a tile. They come by cp.async, while the tile before it is computed: loads into registers share one scoreboard
 * in the compiled text, and what is needed first would wait for what was asked for last. */
struct sd_tile {
    FKV_SHARED const fkv_u32 *keys;        /* the thread's first, in the warp's rooms */
    FKV_SHARED const fkv_u32 *values;      /* and of these */
    fkv_u32 k[SD_PARTS][SD_UNITS][4];      /* tokens 4 r + i, 8 channels each */
    fkv_u32 v[SD_PARTS][SD_UNITS][4];      /* channels 4 r + i, 8 tokens each */
    fkv_u32 norms[SD_PARTS][SD_GROUP / 2]; /* of its own tokens */
    fkv_u32 page;                          /* of the tile behind it */
};

/* Norms of the stream's n-th tile. */
FKV_FN FKV_SHARED fkv_u32 *sd_norms_at(FKV_SHARED fkv_u32 *rooms, fkv_u32 n) {
    return rooms + n % 2 * SD_ROOM_WORDS + SD_AT_NORMS;
}

/* The stream's n-th tile, whose keys and norms are there. */
FKV_FN void sd_open_tile(sd_tile &tile, fkv_u32 n, FKV_SHARED fkv_u32 *rooms, fkv_u32 lane) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    tile.keys = rooms + r / 4 * SD_CODE_WORDS + c * 16 + (r % 4 ^ c / 2 * 2) * 4;
    tile.values = rooms + SD_ROOM_WORDS + c / 2 * SD_CODE_WORDS + r / 4 * 32 + c % 2 * 16 + r % 4 * 4;
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS; p++) {
        FKV_SHARED const fkv_u32 *norms = sd_norms_at(rooms, n) + 16 * p + sd_lane_run(lane) / 2;
        if constexpr (SD_GROUP == 4) {
            fkv_words2 x = *(FKV_SHARED const fkv_words2 *)norms;
            FKV_UNROLL
            for (int k = 0; k < 2; k++) tile.norms[p][k] = x.w[k];
        } else {
            fkv_words4 x = fkv_shared16(norms);
            FKV_UNROLL
            for (int k = 0; k < 4; k++) tile.norms[p][k] = x.w[k];
        }
    }
}

/* Codes of a unit, into registers. */
FKV_FN void sd_take(fkv_u32 (&to)[4], FKV_SHARED const fkv_u32 *codes, int p, int u) {
    fkv_words4 x = fkv_shared16(codes + 2 * p * SD_CODE_WORDS + u * 64);
    FKV_UNROLL
    for (int k = 0; k < 4; k++) to[k] = x.w[k];
}

/* Keys of a part, and values of a unit, where there is one. */
FKV_FN void sd_take_keys(sd_tile &tile, int p) {
    FKV_UNROLL
    for (int u = 0; u < SD_UNITS && p < SD_PARTS; u++) sd_take(tile.k[p][u], tile.keys, p, u);
}

FKV_FN void sd_take_values(sd_tile &tile, int u) {
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS && u < SD_UNITS; p++) sd_take(tile.v[p][u], tile.values, p, u);
}

/* A warp copies what lies side by side to what lies side by side. place: of the thread's 16 bytes among 32. */
FKV_FN void sd_copy_codes(FKV_SHARED fkv_u32 *to, const fkv_u8 *codes, fkv_u32 slot, fkv_u32 place, dc_place at) {
    constexpr int n = DC_SLAB / 64; /* of 512 bytes */
    codes += slot / 16 * SD_BLOCK_BYTES + at.slab * (DC_SLAB * 8) + at.lane * 16;
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_PARTS * n; i++)
        fkv_copy16(to + i / n * SD_CODE_WORDS + i % n * 128 + place * 4, codes + (fkv_u32)(i / n) * SD_BLOCK_BYTES + i % n * 512);
}

/* Of the stream's n-th tile, with its norms. Lines 2 and 3 of four lie in other banks than 0 and 1. */
FKV_FN void sd_load_keys(sd_tile &, const fkv_u8 *block, fkv_u32 slot, fkv_u32 n, FKV_SHARED fkv_u32 *rooms, dc_place at) {
    sd_copy_codes(rooms, block + FKV_K_CODES, slot, at.lane ^ at.lane / 8 % 2 * 2, at);
    if (at.lane < SD_TILE / 8) fkv_copy16(sd_norms_at(rooms, n) + at.lane * 4, block + FKV_V_SCALES + slot * 2 + at.lane * 16);
}

FKV_FN void sd_load_values(sd_tile &, const fkv_u8 *block, fkv_u32 slot, FKV_SHARED fkv_u32 *rooms, dc_place at) {
    sd_copy_codes(rooms + SD_ROOM_WORDS, block + FKV_V_CODES, slot, at.lane, at);
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
