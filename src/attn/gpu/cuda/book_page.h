/* Decode of rows of a book (TurboQuant) by the walk of sealed pages: what a thread loads of a tile, and the operands that its
 * codes become. Rows are token by token, so of the values of four tokens each channel's nibbles are brought together first, and
 * then looked up four at a time. A row has one scale, and K's goes into the score.
 *
 * Ladder: one query over 131072 tokens on an H200, 8 KV heads of 128, us of calls chained through MLX, one run of each; in
 * brackets what 2/2 that is rotated took beside it, and instructions of a warp for 64 tokens of 4 bits.
 *    tq4   tq3   tq2
 *   63.4  64.8  55.1  as decode_book.h has it (55.6; 1718)
 *   63.1  63.0  54.2  products of bytes, tiles of 64 tokens (55.6; 1023): so it is not instructions that it waits for
 *   65.3  66.2     -  the same in tiles of 32 with 4 blocks on a multiprocessor
 *   60.9     -     -  as decode_book.h has it, the merge without divisions (51.7)
 *   59.8  56.2  48.7  that merge, products of bytes, a warp's loads are of rows side by side (51.7; 1035)
 *   57.0  56.5  48.0  the same on another day (50.1; 1029, of which 683, 709 and 529 are shifts, logic and permutes)
 *   55.5  52.3     -  halves of words by the multiply pipe (dp2a)
 *   54.6  51.0  43.3  all right shifts by it (1031; 539, 521 and 380)
 *   56.2  51.0     -  the same, codes by cp.async as sealed pages are; with 4 blocks on an SM 56.8, 53.2
 * The integer ALU pipe (shifts, logic, permutes) takes a warp in two cycles, and is what it waits for. On that day before the
 * last three: copies alone, without arithmetic, 50.9 at 4 bits; all pages from L2 58.0.
 */
constexpr int SD_K_TERMS = FKV_K_BITS == 4 ? 2 : 1; /* as sealed_page.h has them */
constexpr int SD_V_TERMS = FKV_V_BITS == 4 ? 2 : 1;
constexpr bool SD_LESS_ONE = false;
constexpr float SD_LEVEL = 1.0f;
constexpr fkv_u32 SD_RUN_STEP = 4;
constexpr fkv_u32 SD_UNIT_STEP = 4;

/* A warp's load is of rows side by side: a thread's tokens are r, r + 8, ... */
constexpr fkv_u32 SD_TOKEN_STEP = 8;
constexpr fkv_u32 SD_WEIGHT_LANES = 4;
constexpr fkv_u32 SD_OTHER_LANE = 16;
FKV_FN fkv_u32 sd_first_token(fkv_u32 lane) { return lane / 4; }

/* Words of 32 channels of K, and of 16 of V; of 3 bits the last has the high ones. */
constexpr int SD_K_WORDS = FKV_K_BITS == 4 ? 4 : FKV_K_BITS;
constexpr int SD_V_WORDS = FKV_V_BITS == 2 ? 1 : 2;

/* Packed bytes of a tile, loaded while the tile before it is computed. */
struct sd_tile {
    fkv_u32 k[SD_PARTS][4][SD_K_WORDS]; /* tokens 8 i + r, channels 32 c on */
    fkv_u32 v[SD_PARTS][8][SD_V_WORDS]; /* tokens 4 i + c, channels 16 r on */
    fkv_u32 loaded[2][2];               /* of K and of V: scales of two of the thread's tokens */
    fkv_u32 scales[SD_PARTS][2];        /* of K, of all of them */
    fkv_u32 norms[SD_PARTS][2];         /* of V */
    fkv_u32 page;                       /* of the tile behind it */
};

/* N channels from channel d on, of ROWS rows in each part, side by side in a warp. rows: the first. */
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

/* Threads of a row of an operand have two of its tokens' scales each. */
FKV_FN void sd_load_scales(fkv_u32 (&to)[2], const fkv_u8 *scales, fkv_u32 slot, fkv_u32 lane) {
    const fkv_u8 *from = scales + (slot + lane % (2 * SD_PARTS) * 16 + lane / 4) * 2;
    to[0] = fkv_stream2(from);
    to[1] = fkv_stream2(from + 16);
}

/* And get those of the others. */
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

/* Operands are made of line 4 u + c of 8 channels: those of a thread's word u of nibbles. */
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
    return fkv_mul(both, fkv_mul(line.unit, fkv_page_number(i % 2 == 0 ? pair & 0xffffu : pair >> 16)));
}

/* ---- values ---- */

/* Nibbles of four tokens, those of a channel side by side: of two channels in each of four words. */
FKV_FN fkv_u32 sd_turned(fkv_u32 a, fkv_u32 b, fkv_u32 c, fkv_u32 d, int k) {
    constexpr fkv_u32 low = 0x0f0f0f0fu;
    fkv_u32 front = k < 2 ? (a & low) | (b << 4 & ~low) : (fkv_shifted_right<4>(a) & low) | (b & ~low);
    fkv_u32 back = k < 2 ? (c & low) | (d << 4 & ~low) : (fkv_shifted_right<4>(c) & low) | (d & ~low);
    return fkv_permute(front, back, k % 2 == 0 ? 0x5140u : 0x7362u);
}

/* And which they are, first and second. */
FKV_FN constexpr int sd_turned_place(int k, int second) { return k / 2 + k % 2 * 4 + second * 2; }

/* High bits of four tokens, of which two lie in a word: nibbles of four channels, those of eight channels in each of two words.
 */
FKV_FN fkv_u32 sd_turned_high(fkv_u32 ac, fkv_u32 bd, int k) {
    constexpr fkv_u32 low = 0x0f0f0f0fu;
    fkv_u32 even = (ac & low) | (bd << 4 & ~low);
    fkv_u32 odd = (fkv_shifted_right<4>(ac) & low) | (bd & ~low);
    return fkv_permute(even, odd, k == 0 ? 0x6420u : 0x7531u);
}

/* Nibbles of the i-th two of a thread's channels, of four tokens from `first` on. */
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
