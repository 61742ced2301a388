/* Support for rows of codebook codes (TurboQuant) in decode_sealed.h: loads a tile and converts its codes to matrix operands.
 * Used for head dimension 128 with at most four query heads per KV head.
 *
 * Rows are stored token by token. For V, the nibbles of four tokens are first transposed, so that the four nibbles of one channel
 * are adjacent. The levels of these nibbles are then looked up four at a time. Each row has one scale. The score of a token is
 * multiplied by the scale of the token's K row.
 *
 * The kernel is limited by the integer ALU pipe (shifts, logic, permutes), which accepts one warp instruction every two cycles.
 * Right shifts are therefore executed on the multiply pipe (fkv_shifted_right(), fkv_upper_half()).
 */
constexpr int SD_K_TERMS = FKV_K_BITS == 4 ? 2 : 1; /* sealed_page.h explains these constants */
constexpr int SD_V_TERMS = FKV_V_BITS == 4 ? 2 : 1;
constexpr bool SD_LESS_ONE = false;
constexpr float SD_LEVEL = 1.0f;

/* Thread (r, c) handles tokens r, r + 8, ..., so that each load of a warp covers adjacent rows. */
constexpr fkv_u32 SD_WEIGHT_LANES = 4;
constexpr fkv_u32 SD_OTHER_LANE = 16;
FKV_FN fkv_u32 sd_first_token(fkv_u32 lane) { return lane / 4; }
FKV_FN constexpr fkv_u32 sd_token(int i) { return 8 * (fkv_u32)i; }
FKV_FN fkv_u32 sd_first_channel(fkv_u32 lane) { return 4 * sd_lane_run(lane); }
FKV_FN constexpr fkv_u32 sd_unit_channel(int u) { return 4 * (fkv_u32)u; }

/* Numbers of words that hold the codes of 32 channels in a K row and of 16 channels in a V row. For 3-bit codes, the last of
 * these words holds the high bits. */
constexpr int SD_K_WORDS = FKV_K_BITS == 4 ? 4 : FKV_K_BITS;
constexpr int SD_V_WORDS = FKV_V_BITS == 2 ? 1 : 2;

/* Packed codes of a tile, loaded while the previous tile is computed. */
struct sd_tile {
    fkv_u32 k[SD_PARTS][4][SD_K_WORDS]; /* key codes of tokens 8 * i + r, for 32 channels starting at channel 32 * c */
    fkv_u32 v[SD_PARTS][8][SD_V_WORDS]; /* value codes of tokens 4 * i + c, for 16 channels starting at channel 16 * r */
    fkv_u32 loaded[2][2];               /* two K scales and two V scales, loaded by this lane */
    fkv_u32 scales[SD_PARTS][2];        /* K scales of all tokens that this thread handles */
    fkv_u32 norms[SD_PARTS][2];         /* V scales of all tokens that this thread handles */
    fkv_u32 page;                       /* number of the pool page that holds the next tile */
};

/* Loads the codes of N channels, starting at channel d, for ROWS tokens in each part (32 tokens) of a tile. The lanes of a warp
 * load adjacent rows. `rows` is the address of the lane's first row. */
template <int BITS, int N, int ROWS, int WORDS>
FKV_FN void sd_load_codes(fkv_u32 (&to)[SD_PARTS][ROWS][WORDS], const fkv_u8 *rows, fkv_u32 d) {
    constexpr int plane_bits = BITS == 4 ? 4 : 2;
    const fkv_u8 *low = rows + d * plane_bits / 8;
    const fkv_u8 *high = rows + FKV_D / 4 + d / 8;
    FKV_UNROLL
    for (int i = 0; i < SD_PARTS * ROWS; i++) {
        int at = i * (32 / ROWS) * (FKV_D * BITS / 8);
        dc_stream(to[i / ROWS][i % ROWS], low + at, N * plane_bits / 8);
        if constexpr (BITS == 3) dc_stream(to[i / ROWS][i % ROWS] + N / 16, high + at, N / 8);
    }
}

/* Loads the scales of two tokens per lane. sd_open_tile() then exchanges scales between lanes. */
FKV_FN void sd_load_scales(fkv_u32 (&to)[2], const fkv_u8 *scales, fkv_u32 slot, fkv_u32 lane) {
    const fkv_u8 *from = scales + (slot + lane % (2 * SD_PARTS) * 16 + lane / 4) * 2;
    to[0] = fkv_stream2(from);
    to[1] = fkv_stream2(from + 16);
}

/* Exchanges scales between the lanes that share an operand row, so that each lane has the scales of all tokens that it
 * handles. */
FKV_FN void sd_open_tile(sd_tile &tile, fkv_u32, FKV_SHARED fkv_u32 *, fkv_u32 lane) {
    fkv_u32 own[2];
    FKV_UNROLL
    for (int s = 0; s < 2; s++) own[s] = fkv_permute(tile.loaded[s][0], tile.loaded[s][1], 0x5410u);
    FKV_UNROLL
    for (int i = 0; i < 2 * SD_PARTS; i++) {
        tile.scales[i / 2][i % 2] = fkv_shuffle_bits(own[0], lane / 4 * 4 + (fkv_u32)i);
        tile.norms[i / 2][i % 2] = fkv_shuffle_bits(own[1], lane / 4 * 4 + (fkv_u32)i);
    }
}

FKV_FN void sd_take_keys(sd_tile &, int) {}
FKV_FN void sd_take_values(sd_tile &, int) {}

FKV_FN void sd_load_keys(sd_tile &to, const fkv_u8 *block, fkv_u32 slot, fkv_u32, FKV_SHARED fkv_u32 *, dc_place at) {
    sd_load_codes<FKV_K_BITS, 32>(to.k, block + FKV_K_CODES + (slot + at.lane / 4) * FKV_K_ROW_BYTES,
                                  at.slab * DC_SLAB + at.lane % 4 * 32);
    sd_load_scales(to.loaded[0], block + FKV_K_SCALES, slot, at.lane);
}

FKV_FN void sd_load_values(sd_tile &to, const fkv_u8 *block, fkv_u32 slot, FKV_SHARED fkv_u32 *, dc_place at) {
    sd_load_codes<FKV_V_BITS, 16>(to.v, block + FKV_V_CODES + (slot + at.lane % 4) * FKV_V_ROW_BYTES,
                                  at.slab * DC_SLAB + at.lane / 4 * 16);
    sd_load_scales(to.loaded[1], block + FKV_V_SCALES, slot, at.lane);
}

/* ---- keys ---- */

/* Returns the index at which channel d of a query row is stored in shared memory. A row is stored in lines of 8 channels. Word u
 * of thread c holds the codes of line 4 * u + c. */
FKV_FN fkv_u32 sd_query_place(fkv_u32 d) {
    fkv_u32 line = d / DC_SLAB * DC_SLAB + d % DC_SLAB / 32 * 8;
    if (FKV_K_BITS == 4) return line + d % 32 / 8 * 32 + d % 8;
    return line + (d % 32 / 16 * 2 + d % 2) * 32 + d % 16 / 2;
}

FKV_FN void sd_key_operand(const sd_tile &tile, int i, int u, int term, fkv_u32 (&a)[4]) {
    FKV_UNROLL
    for (int k = 0; k < 4; k++) {
        const fkv_u32 *x = tile.k[i / 2][i % 2 * 2 + k % 2];
        fkv_u32 nibbles = 0;
        if constexpr (FKV_K_BITS == 4)
            nibbles = x[u];
        else
            nibbles = dc_book_nibbles(x[u / 2], dc_half(x[SD_K_WORDS - 1], u / 2), FKV_K_BITS, u % 2);
        a[k] = dc_levels<dc_k_book>(nibbles, k / 2, term);
    }
}

FKV_FN float sd_score_of(const sd_tile &tile, int i, float both, sd_line line) {
    fkv_u32 pair = tile.scales[i / 4][i % 4 / 2];
    return fkv_mul(both, fkv_mul(line.unit, fkv_page_value(i % 2 == 0 ? pair & 0xffffu : pair >> 16)));
}

/* ---- values ---- */

/* Transposes the nibbles of four tokens, given as one word of 8 channels per token. Returns word k of the result. In the result,
 * the four nibbles of a channel are adjacent, and each word holds two channels. */
FKV_FN fkv_u32 sd_turned(fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d, int k) {
    constexpr fkv_u32 low = 0x0f0f0f0fu;
    fkv_u32 front = k < 2 ? (a & low) | (b << 4 & ~low) : (fkv_shifted_right<4>(a) & low) | (b & ~low);
    fkv_u32 back = k < 2 ? (c & low) | (d << 4 & ~low) : (fkv_shifted_right<4>(c) & low) | (d & ~low);
    return fkv_permute(front, back, k % 2 == 0 ? 0x5140u : 0x7362u);
}

/* Returns the channel whose nibbles are in the lower half of word k of sd_turned(), or in the upper half if `second` is
 * nonzero. */
FKV_FN constexpr int sd_turned_place(int k, int second) { return k / 2 + k % 2 * 4 + second * 2; }

/* Transposes the high bits of four tokens, given as two words of two tokens each. Returns word k (0 or 1) of the result. Each
 * word of the result holds eight channels, with four bits per channel. */
FKV_FN fkv_u32 sd_turned_high(fkv_u32 ac, fkv_u32 bd, int k) {
    constexpr fkv_u32 low = 0x0f0f0f0fu;
    fkv_u32 even = (ac & low) | (bd << 4 & ~low);
    fkv_u32 odd = (fkv_shifted_right<4>(ac) & low) | (bd & ~low);
    return fkv_permute(even, odd, k == 0 ? 0x6420u : 0x7531u);
}

/* Returns the nibbles of two channels (the thread's i-th pair) for four tokens, starting at token `first`. */
FKV_FN fkv_u32 sd_value_nibbles(const fkv_u32 (&v)[8][SD_V_WORDS], int first, int i) {
    const fkv_u32 *x[4] = {v[first], v[first + 1], v[first + 2], v[first + 3]};
    if constexpr (FKV_V_BITS == 4) return sd_turned(x[0][i / 4], x[1][i / 4], x[2][i / 4], x[3][i / 4], i % 4);
    fkv_u32 low = sd_turned(x[0][0], x[1][0], x[2][0], x[3][0], i % 4);
    if (i >= 4) low = fkv_shifted_right<2>(low);
    if constexpr (FKV_V_BITS == 2) return low & 0x33333333u;
    constexpr int h = SD_V_WORDS - 1;
    fkv_u32 high = sd_turned_high(x[0][h] | x[2][h] << 16, x[1][h] | x[3][h] << 16, i % 2);
    if (i >= 4) high = fkv_shifted_right<1>(high);
    high &= 0x55555555u;
    return (low & 0x33333333u) | ((i % 4 < 2 ? high << 2 : high) & ~0x33333333u);
}

FKV_FN void sd_value_operand(const sd_tile &tile, int p, int i, int term, fkv_u32 (&a)[4]) {
    FKV_UNROLL
    for (int k = 0; k < 4; k++) a[k] = dc_levels<dc_v_book>(sd_value_nibbles(tile.v[p], k / 2 * 4, i), k % 2, term);
}

FKV_FN constexpr int sd_sum_place(int i, int k) {
    int place = sd_turned_place(i % 4, k);
    return FKV_V_BITS == 4 ? i / 4 * 8 + place : 2 * place + i / 4;
}
