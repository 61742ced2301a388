/* Support for sealed pages with 2-bit or 3-bit V codes in decode_sealed.h. K codes have 2, 3 or 4 bits; calibrated_page.h reads
 * the codes of calibrated keys. This file implements the
 * same interface as sealed_page.h. In the following, r is lane / 4, and c is lane % 4.
 *
 * A dword of 2-bit codes holds 16 channels of one token (K) or 16 tokens of one channel (V). Codes of 3 bits consist of a plane
 * of 2-bit codes and a plane of high bits, in which a line covers 32 channels. The order in which threads handle channels and
 * tokens is chosen such that shifts are constants and no two threads load the same dword. There are two exceptions, in which two
 * threads load the same dwords and the shift depends on the thread: V if a tile has 32 tokens, and the high bits of K if a slab
 * has 64 channels.
 *
 * K: thread c handles SD_K_LINES adjacent lines of 16 channels. Queries and scales are stored in the same order
 * (sd_line_place()).
 *
 * V: all levels and their negatives fit into one lookup table of eight bytes, so one byte permute looks up four codes. A mask
 * turns a dword into permute selectors for the quads (groups of four tokens) 0 and 2, or 1 and 3 after a shift. The operand of
 * part p therefore covers the quads p and p + 2 of 16 tokens, and K uses the same order of tokens.
 */
constexpr int SD_K_TERMS = 1; /* sealed_page.h explains these constants */
constexpr int SD_V_TERMS = 1;
constexpr bool SD_LESS_ONE = false;
constexpr float SD_LEVEL = 1.0f / 128.0f;
constexpr fkv_u32 SD_WEIGHT_LANES = 8;
constexpr fkv_u32 SD_OTHER_LANE = 4;

/* A row r of the K operand is a quad of tokens. In a tile with two parts, it is quad r % 2 * 2 + p of block r / 2, where a block
 * is a group of 16 tokens. In a tile with one part, it is quad r % 2 * 2 + r / 2 % 2 of block r / 4. */
FKV_FN fkv_u32 sd_key_block(fkv_u32 r) { return SD_PARTS == 1 ? r / 4 : r / 2; }
FKV_FN constexpr fkv_u32 sd_token(int i) { return SD_GROUP == 4 ? (fkv_u32)i : (fkv_u32)(i / 4 * 8 + i % 4); }
FKV_FN fkv_u32 sd_first_token(fkv_u32 lane) {
    fkv_u32 r = SD_GROUP == 4 ? lane / 4 : lane % 4 * 2; /* row of the K operand whose scores the thread holds */
    return sd_key_block(r) * 16 + r % 2 * 8 + (SD_PARTS == 1 ? r / 2 % 2 * 4 : 0);
}

/* For V, unit u of thread r is in line 4 * (u / 2) + 2 * (r / 4) + u % 2 (16 channels each), because the high bits of two
 * adjacent lines are in the same dword. */
FKV_FN fkv_u32 sd_first_channel(fkv_u32 lane) { return sd_lane_run(lane) / 16 * 32 + sd_lane_run(lane) % 16; }
FKV_FN constexpr fkv_u32 sd_unit_channel(int u) { return (fkv_u32)(u / 2 * 64 + u % 2 * 16); }

FKV_FN FKV_SHARED fkv_u32 *sd_norms_at(FKV_SHARED fkv_u32 *buffers, fkv_u32 n) {
    return buffers + n % 2 * SD_BUFFER_WORDS + SD_AT_NORMS;
}

/* ---- shared memory layout of the codes of 16 tokens ---- */

/* A load instruction accesses shared memory for eight lanes at a time. For K, these lanes load the quads 0 and 2 (or 1 and 3) for
 * all four values of c. These codes are stored in 128 adjacent bytes, so the loads have no bank conflicts. Padding between such
 * groups of 128 bytes avoids bank conflicts when eight lanes copy 128 adjacent bytes of the page. */
constexpr fkv_u32 SD_K_STEP = FKV_K_BITS < 4 && SD_K_LINES == 2 ? 40 : 48; /* words from quads 0 and 2 to quads 1 and 3 */
constexpr fkv_u32 SD_K_HIGH_STEP = SD_K_LINES == 2 ? 48 : 16;              /* the same for high bits */
constexpr fkv_u32 SD_K_HIGH_SHARERS = SD_K_LINES == 2 ? 1 : 2;             /* number of threads c that use the same high bits */
static_assert((int)SD_K_STEP + 32 <= SD_K_LINE_WORDS &&
                  (FKV_K_BITS != 3 || (int)(SD_K_HIGH_STEP + 32 / SD_K_HIGH_SHARERS) <= SD_K_HIGH_WORDS),
              "the padding must fit into the buffer");

/* Planes of codes. CHUNKS is the number of 16-byte chunks per 16 tokens, and place() returns the word at which a chunk is stored.
 * A chunk of K holds a quad of one line. */
struct sd_key_plane {
    static constexpr fkv_u32 CHUNKS = DC_SLAB / (FKV_K_BITS == 4 ? 2 : 4);
    FKV_FN fkv_u32 place(fkv_u32 chunk) {
        fkv_u32 line = chunk / 4;
        fkv_u32 c = FKV_K_BITS == 4 ? line % 4 : line / SD_K_LINES;
        fkv_u32 number = FKV_K_BITS == 4 ? line / 4 : line % SD_K_LINES;
        return number * SD_K_LINE_WORDS + chunk % 2 * SD_K_STEP + c * 8 + chunk % 4 / 2 * 4;
    }
};
struct sd_high_key_plane {
    static constexpr fkv_u32 CHUNKS = DC_SLAB / 8;
    FKV_FN fkv_u32 place(fkv_u32 chunk) {
        return SD_K_LINES * SD_K_LINE_WORDS + chunk % 2 * SD_K_HIGH_STEP + chunk / 4 * 8 + chunk % 4 / 2 * 4;
    }
};
struct sd_calibrated_plane { /* all digits of calibrated keys */
    static constexpr fkv_u32 CHUNKS = FKV_K_ROW_BYTES;
    FKV_FN fkv_u32 place(fkv_u32 chunk) { return chunk * 4; }
};
struct sd_value_plane {
    static constexpr fkv_u32 CHUNKS = DC_SLAB / 4;
    FKV_FN fkv_u32 place(fkv_u32 chunk) { return chunk * 4; }
};
struct sd_high_value_plane {
    static constexpr fkv_u32 CHUNKS = DC_SLAB / 8;
    FKV_FN fkv_u32 place(fkv_u32 chunk) { return DC_SLAB + chunk * 4; }
};

/* Starts copying a plane of a tile's codes to shared memory. WORDS is the number of words that the codes of 16 tokens occupy
 * there, and ROW_BYTES is the number of bytes per token in the page. */
template <class PLANE, fkv_u32 WORDS, fkv_u32 ROW_BYTES>
FKV_FN void sd_copy_plane(FKV_SHARED fkv_u32 *to, const fkv_u8 *codes, fkv_u32 lane) {
    constexpr fkv_u32 n = 2 * SD_PARTS * PLANE::CHUNKS;
    FKV_UNROLL
    for (fkv_u32 i = 0; i < n; i += 32) {
        fkv_u32 block = (i + lane) / PLANE::CHUNKS;
        fkv_u32 chunk = (i + lane) % PLANE::CHUNKS;
        if (n % 32 != 0 && i + lane >= n) continue;
        fkv_async_copy16(to + block * WORDS + PLANE::place(chunk), codes + block * (16 * ROW_BYTES) + chunk * 16);
    }
}

/* ---- keys ---- */

FKV_FN void sd_take(fkv_u32 (&to)[4], FKV_SHARED const fkv_u32 *codes, fkv_u32 shift) {
    fkv_words4 x = fkv_shared16(codes);
    FKV_UNROLL
    for (int k = 0; k < 4; k++) to[k] = x.w[k] >> shift;
}

FKV_FN fkv_u32 sd_query_place(fkv_u32 d) { return d / DC_SLAB * DC_SLAB + sd_line_place(d % DC_SLAB / 8) * 8 + d % 8; }

#if !FKV_CALIBRATED
struct sd_tile_keys {
    FKV_SHARED const fkv_u32 *at;           /* address of the thread's first key codes in the warp's buffer */
    FKV_SHARED const fkv_u32 *high_at;      /* address of the high bits of these codes, if they have 3 bits */
    fkv_u32 codes[SD_PARTS][SD_K_LINES][4]; /* codes of 8 or 16 channels, for four tokens */
    fkv_u32 high[SD_PARTS][4];              /* high bits of 32 channels */
    fkv_u32 odd;                            /* c % 2 */
};

FKV_FN void sd_open_keys(sd_tile_keys &keys, FKV_SHARED const fkv_u32 *buffer, fkv_u32 lane) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    fkv_u32 step = SD_PARTS == 1 ? r / 2 % 2 : 0;
    FKV_SHARED const fkv_u32 *block = buffer + sd_key_block(r) * SD_K_CODE_WORDS + r % 2 * 4;
    keys.at = block + step * SD_K_STEP + c * 8;
    keys.high_at = block + SD_K_LINES * SD_K_LINE_WORDS + step * SD_K_HIGH_STEP + c / SD_K_HIGH_SHARERS * 8;
    keys.odd = c % 2;
}

FKV_FN void sd_take_part(sd_tile_keys &keys, int p) {
    FKV_UNROLL
    for (int n = 0; n < SD_K_LINES; n++) sd_take(keys.codes[p][n], keys.at + n * SD_K_LINE_WORDS + p * (int)SD_K_STEP, 0);
    if constexpr (FKV_K_BITS == 3)
        sd_take(keys.high[p], keys.high_at + p * (int)SD_K_HIGH_STEP, SD_K_HIGH_SHARERS == 2 ? keys.odd * 4 : 0);
}

FKV_FN fkv_u32 sd_key_bytes(const sd_tile_keys &keys, int p, int u, int k, int half) {
    if constexpr (FKV_K_BITS == 4) return keys.codes[p][u][k] >> half * 4 & 0x0f0f0f0fu;
    fkv_u32 low = keys.codes[p][u / 2 % SD_K_LINES][k] >> (u % 2 * 4 + half * 2);
    if constexpr (FKV_K_BITS == 2) return low & 0x03030303u;
    int bit = u * 2 + half;
    fkv_u32 high = bit < 2 ? keys.high[p][k] << (2 - bit) : keys.high[p][k] >> (bit - 2);
    return fkv_mask_or(low, 0x03030303u, high & 0x04040404u);
}
#endif

/* ---- tiles ---- */

/* Packed bytes of a tile. They are copied to shared memory with cp.async while the previous tile is computed. */
struct sd_tile {
    sd_tile_keys keys;
    FKV_SHARED const fkv_u32 *values;      /* address of the thread's first value codes */
    FKV_SHARED const fkv_u32 *high_values; /* address of the high bits of these codes, if they have 3 bits */
    fkv_u32 v[SD_UNITS][4];                /* codes of 16 tokens, for each channel 4 * r + i */
    fkv_u32 high_v[SD_UNITS / 2][4];       /* high bits of two units */
    fkv_u32 norms[SD_PARTS][SD_GROUP / 2]; /* norms of the tokens that the thread handles */
    fkv_u32 odd;                           /* c % 2 */
    fkv_u32 page;                          /* number of the pool page that holds the next tile */
};

FKV_FN void sd_load_keys(sd_tile &, const fkv_u8 *block, fkv_u32 slot, fkv_u32 n, FKV_SHARED fkv_u32 *buffers, dc_place at) {
    const fkv_u8 *codes = block + FKV_K_CODES + slot * FKV_K_ROW_BYTES;
    if constexpr (FKV_CALIBRATED != 0)
        sd_copy_plane<sd_calibrated_plane, SD_K_CODE_WORDS, FKV_K_ROW_BYTES>(buffers, codes, at.lane);
    else
        sd_copy_plane<sd_key_plane, SD_K_CODE_WORDS, FKV_K_ROW_BYTES>(buffers, codes + at.slab * (sd_key_plane::CHUNKS * 16),
                                                                      at.lane);
    if constexpr (FKV_K_BITS == 3 && !FKV_CALIBRATED)
        sd_copy_plane<sd_high_key_plane, SD_K_CODE_WORDS, FKV_K_ROW_BYTES>(buffers, codes + FKV_D * 4 + at.slab * (DC_SLAB * 2),
                                                                           at.lane);
    if (at.lane < SD_TILE / 8)
        fkv_async_copy16(sd_norms_at(buffers, n) + at.lane * 4, block + FKV_V_SCALES + slot * 2 + at.lane * 16);
}

FKV_FN void sd_load_values(sd_tile &, const fkv_u8 *block, fkv_u32 slot, FKV_SHARED fkv_u32 *buffers, dc_place at) {
    const fkv_u8 *codes = block + FKV_V_CODES + slot * FKV_V_ROW_BYTES;
    buffers += SD_BUFFER_WORDS;
    sd_copy_plane<sd_value_plane, SD_V_CODE_WORDS, FKV_V_ROW_BYTES>(buffers, codes + at.slab * (DC_SLAB * 4), at.lane);
    if constexpr (FKV_V_BITS == 3)
        sd_copy_plane<sd_high_value_plane, SD_V_CODE_WORDS, FKV_V_ROW_BYTES>(buffers, codes + FKV_D * 4 + at.slab * (DC_SLAB * 2),
                                                                             at.lane);
}

FKV_FN void sd_open_tile(sd_tile &tile, fkv_u32 n, FKV_SHARED fkv_u32 *buffers, fkv_u32 lane) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    sd_open_keys(tile.keys, buffers, lane);
    FKV_SHARED const fkv_u32 *block = buffers + SD_BUFFER_WORDS + (SD_PARTS == 1 ? c / 2 : c) * SD_V_CODE_WORDS + r % 4 * 4;
    tile.values = block + r / 4 * 32;
    tile.high_values = block + DC_SLAB + r / 4 * 16;
    tile.odd = c % 2;
    FKV_SHARED const fkv_u32 *norms = sd_norms_at(buffers, n) + sd_first_token(lane) / 2;
    FKV_UNROLL
    for (int i = 0; i < SD_OWN; i += 4) {
        fkv_words2 x = *(FKV_SHARED const fkv_words2 *)(norms + sd_token(i) / 2);
        FKV_UNROLL
        for (int k = 0; k < 2; k++) tile.norms[i / SD_GROUP][i % SD_GROUP / 2 + k] = x.w[k];
    }
}

FKV_FN void sd_take_values(sd_tile &tile, int u) {
    if (u >= SD_UNITS) return;
    sd_take(tile.v[u], tile.values + u / 2 * 64 + u % 2 * 16, SD_PARTS == 1 ? tile.odd * 2 : 0);
    if constexpr (FKV_V_BITS == 3)
        if (u % 2 == 0) sd_take(tile.high_v[u / 2], tile.high_values + u / 2 * 32, SD_PARTS == 1 ? tile.odd : 0);
}

/* ---- values ---- */

/* Returns selectors for sd_look_up(): one nibble per code, for eight tokens of part p in channel k of unit u. Each nibble holds a
 * 3-bit code, or a 2-bit code and an arbitrary bit. */
FKV_FN fkv_u32 sd_selectors(const sd_tile &tile, int p, int u, int k, int) {
    fkv_u32 low = tile.v[u][k] >> 2 * p;
    if constexpr (FKV_V_BITS == 2) return low & 0x77777777u;
    fkv_u32 high = tile.high_v[u / 2][k] >> (u % 2 * 4 + p) & 0x05050505u;
    /* the product moves bits 0 and 2 of each byte to bits 2 and 6 */
    return fkv_mask_or(low, 0x33333333u, high * 20u & 0x44444444u);
}

/* Returns four bytes of the lookup table, which contains the signed levels of the codes. For 2-bit codes, the table contains the
 * levels twice. */
FKV_FN fkv_u32 sd_signed_levels(int first) {
    constexpr int n = 1 << (FKV_V_BITS - 1);
    const fkv_u32 levels[] = {FKV_V_LEVELS};
    fkv_u32 word = 0;
    FKV_UNROLL
    for (int k = 0; k < 4; k++) {
        int code = first + k;
        word |= (code / n % 2 == 0 ? levels[code % n] : 256u - levels[code % n]) << 8 * k;
    }
    return word;
}

/* Looks up the levels of the four lowest selectors in a word. */
FKV_FN fkv_u32 sd_look_up(fkv_u32 selectors, int) {
    return fkv_permute_or_sign(sd_signed_levels(0), sd_signed_levels(4), selectors);
}
