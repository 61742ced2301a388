/* Support for sealed 4-bit pages in decode_sealed.h: loads a tile and converts its codes to matrix operands. narrow_page.h
 * implements the same interface for sealed pages with narrower codes, and codebook_page.h for rows of codebook codes.
 */
constexpr int SD_K_TERMS = 1; /* number of operand bytes whose sum is the value of a K code */
constexpr int SD_V_TERMS = 2;
constexpr bool SD_LESS_ONE = true;        /* true if the two operand bytes of a V code add up to level - 1 instead of level */
constexpr float SD_LEVEL = 1.0f / 128.0f; /* a V code with level n has the value n * SD_LEVEL * norm */

/* Constants that define which two lanes hold the weights of an operand column. */
constexpr fkv_u32 SD_WEIGHT_LANES = 8;
constexpr fkv_u32 SD_OTHER_LANE = 4;

/* sd_first_token() returns the first token of a tile that the thread handles, and sd_token() the distance from this token to the
 * i-th token. sd_first_channel() returns the first channel that the thread accumulates, and sd_unit_channel() the distance from
 * this channel to its first channel of unit u. */
FKV_FN fkv_u32 sd_first_token(fkv_u32 lane) { return sd_lane_run(lane); }
FKV_FN constexpr fkv_u32 sd_token(int i) { return 32 * (fkv_u32)(i / SD_GROUP) + (fkv_u32)(i % SD_GROUP); }
FKV_FN fkv_u32 sd_first_channel(fkv_u32 lane) { return sd_lane_run(lane); }
FKV_FN constexpr fkv_u32 sd_unit_channel(int u) { return 32 * (fkv_u32)u; }

constexpr fkv_u32 SD_BLOCK_BYTES = 8 * FKV_D; /* size of the codes of 16 tokens, in bytes */

/* Loads the codes that the thread handles from shared memory into registers, for 32 tokens (part p) and 32 channels (unit u). */
FKV_FN void sd_take(fkv_u32 (&to)[4], FKV_SHARED const fkv_u32 *codes, int p, int u) {
    fkv_words4 x = fkv_shared16(codes + 2 * p * SD_CODE_WORDS + u * 64);
    FKV_UNROLL
    for (int k = 0; k < 4; k++) to[k] = x.w[k];
}

#if !FKV_CALIBRATED /* narrow_page.h and calibrated_page.h implement the same interface for other keys */
struct sd_tile_keys {
    FKV_SHARED const fkv_u32 *at;         /* address of the thread's first key codes in the warp's buffer */
    fkv_u32 codes[SD_PARTS][SD_UNITS][4]; /* codes of 8 channels, for each token 4 * r + i */
};

FKV_FN void sd_open_keys(sd_tile_keys &keys, FKV_SHARED const fkv_u32 *buffer, fkv_u32 lane) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    keys.at = buffer + r / 4 * SD_CODE_WORDS + c * 16 + (r % 4 ^ c / 2 * 2) * 4;
}

/* Loads the keys of 32 tokens (part p) into registers. */
FKV_FN void sd_take_part(sd_tile_keys &keys, int p) {
    FKV_UNROLL
    for (int u = 0; u < SD_UNITS; u++) sd_take(keys.codes[p][u], keys.at, p, u);
}

/* Returns four codes of the thread's token k in part p as bytes: the lower four channels of the thread's line in unit u if `half`
 * is 0, and the upper four if it is 1. */
FKV_FN fkv_u32 sd_key_bytes(const sd_tile_keys &keys, int p, int u, int k, int half) {
    fkv_u32 x = keys.codes[p][u][k];
    return (half == 0 ? x : fkv_shifted_right<4>(x)) & 0x0f0f0f0fu;
}

/* Returns which of the 32 destinations of 16 bytes a lane writes when the warp copies 512 bytes of keys. Destinations are
 * swizzled to avoid bank conflicts. */
FKV_FN fkv_u32 sd_key_place(fkv_u32 lane) { return lane ^ lane / 8 % 2 * 2; }
#endif

/* Packed bytes of a tile. They are copied to shared memory with cp.async while the previous tile is computed. Direct loads into
 * registers would be slower. They would share one scoreboard, so the first use of any loaded value would wait for all loads. */
struct sd_tile {
    sd_tile_keys keys;
    FKV_SHARED const fkv_u32 *values;      /* address of the thread's first value codes */
    fkv_u32 v[SD_PARTS][SD_UNITS][4];      /* codes of 8 tokens, for each channel 4 * r + i */
    fkv_u32 norms[SD_PARTS][SD_GROUP / 2]; /* norms of the tokens that the thread handles */
    fkv_u32 page;                          /* number of the pool page that holds the next tile */
};

/* Returns the address of the norms of the stream's n-th tile. */
FKV_FN FKV_SHARED fkv_u32 *sd_norms_at(FKV_SHARED fkv_u32 *buffers, fkv_u32 n) {
    return buffers + n % 2 * SD_BUFFER_WORDS + SD_AT_NORMS;
}

/* Prepares the stream's n-th tile for use. The tile's keys and norms must already be in shared memory. */
FKV_FN void sd_open_tile(sd_tile &tile, fkv_u32 n, FKV_SHARED fkv_u32 *buffers, fkv_u32 lane) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    sd_open_keys(tile.keys, buffers, lane);
    tile.values = buffers + SD_BUFFER_WORDS + c / 2 * SD_CODE_WORDS + r / 4 * 32 + c % 2 * 16 + r % 4 * 4;
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS; p++) {
        FKV_SHARED const fkv_u32 *norms = sd_norms_at(buffers, n) + 16 * p + sd_lane_run(lane) / 2;
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

/* Loads the value codes of 32 channels (unit u) into registers. If the unit does not exist, nothing is loaded. */
FKV_FN void sd_take_values(sd_tile &tile, int u) {
    FKV_UNROLL
    for (int p = 0; p < SD_PARTS && u < SD_UNITS; p++) sd_take(tile.v[p][u], tile.values, p, u);
}

/* Starts copying the codes of a tile to shared memory. Each lane copies 16 bytes at a time, and consecutive lanes read
 * consecutive addresses. `place` is the index of the lane's destination among the 32 destinations of the warp. */
FKV_FN void sd_copy_codes(FKV_SHARED fkv_u32 *to, const fkv_u8 *codes, fkv_u32 slot, fkv_u32 place, dc_place at) {
    constexpr int n = DC_SLAB / 64; /* number of 512-byte copies per 16 tokens */
    codes += slot / 16 * SD_BLOCK_BYTES + at.slab * (DC_SLAB * 8) + at.lane * 16;
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_PARTS * n; i++)
        fkv_async_copy16(to + i / n * SD_CODE_WORDS + i % n * 128 + place * 4,
                         codes + (fkv_u32)(i / n) * SD_BLOCK_BYTES + i % n * 512);
}

/* Starts copying the keys and norms of the stream's n-th tile. */
FKV_FN void sd_load_keys(sd_tile &, const fkv_u8 *block, fkv_u32 slot, fkv_u32 n, FKV_SHARED fkv_u32 *buffers, dc_place at) {
    sd_copy_codes(buffers, block + FKV_K_CODES, slot, sd_key_place(at.lane), at);
    if (at.lane < SD_TILE / 8)
        fkv_async_copy16(sd_norms_at(buffers, n) + at.lane * 4, block + FKV_V_SCALES + slot * 2 + at.lane * 16);
}

FKV_FN void sd_load_values(sd_tile &, const fkv_u8 *block, fkv_u32 slot, FKV_SHARED fkv_u32 *buffers, dc_place at) {
    sd_copy_codes(buffers + SD_BUFFER_WORDS, block + FKV_V_CODES, slot, at.lane, at);
}

/* Returns the index at which channel d of a query row is stored in shared memory. */
FKV_FN fkv_u32 sd_query_place(fkv_u32 d) { return d; }

/* Returns the selectors for sd_look_up(), one nibble per code, for the 8 tokens of part p in channel k of unit u. They are the
 * codes (term 0), or the codes with inverted sign bits (term 1). */
FKV_FN fkv_u32 sd_selectors(const sd_tile &tile, int p, int u, int k, int term) {
    return term == 0 ? tile.v[p][u][k] : tile.v[p][u][k] ^ 0x88888888u;
}

/* Looks up the levels of the four lowest selectors in a word. Term 0 is the level of each code whose sign bit is clear, and 0 for
 * other codes. Term 1 is -level - 1 for each code whose sign bit is set, and -1 for other codes. */
FKV_FN fkv_u32 sd_look_up(fkv_u32 selectors, int term) {
    return term == 0 ? fkv_permute_or_sign(fkv_v_levels(0), fkv_v_levels(4), selectors)
                     : fkv_permute_or_sign(~fkv_v_levels(0), ~fkv_v_levels(4), selectors);
}
