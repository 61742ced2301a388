/* Part of the prefill kernel in prefill_wgmma.h: unpacks sealed pages to fp16. Sealed layers use this file instead of
 * prefill_unpack.h. Each tile is one page, or half of a page if the head dimension exceeds 128 (PF_WIDE).
 *
 * K: a dword of 4-bit codes holds 8 channels of one token. It is unpacked to eight values scale * (code - 8), which are exact in
 * fp16 because scales have seven significant bits. (In older page files, scales may have more bits. Values are then rounded to
 * 2^-13 of the channel's range.) The channel offsets, bias + 8 * scale, are stored as two extra keys (high-order and low-order
 * parts), whose scores are added to the score of every key of the page. All keys of a page are divided by a power of two, the
 * unit of the page, to stay in the range of fp16.
 *
 * V: a dword of 4-bit codes holds 8 tokens of one channel, so rows in shared memory are channels (see PF_V_FOLDS). Byte permutes
 * look up signed levels, which are stored as fp16 subnormals level * 2^-24. The softmax weights, instead of the values, are
 * multiplied by the norms of the tokens. The stored values therefore have only seven significant bits, which saves power.
 *
 * Codes of 2 and 3 bits are expanded to nibbles when they are loaded into registers. For K, the number that is subtracted from
 * codes is 2 or 4 instead of 8 (pf_middle_code()).
 *
 * Calibrated keys: the channels of queries and keys in shared memory are in the channel order of the KV head, in which codes are
 * packed. A code consists of one to three digits of 2 bits. The values of 6-bit channels are not exact in fp16. Therefore, the
 * tile of keys holds only the contribution of the first two digits, scale * (code % 16 - 8), or scale * (code - 2) if the channel
 * has only 2 bits. The contribution of the third digit, 16 * scale * (digit - 2), is stored in the buffer for low-order parts of
 * open keys, and is used in a second matrix product. At most half of the channels have a third digit, and these channels come
 * first in the channel order, so this product covers only the first half of the channels.
 *
 * Open pages (the first page and the pages of the queries' own span) have rows of 8-bit codes. Each K value is split into two
 * fp16 values, which are used in two matrix products. Each V value is rounded to one fp16 value.
 */
constexpr fkv_u32 PF_UNITS = FKV_D / 8;
/* Number of V lines (16 channels each) that the warpgroup unpacks at a time, and number of V lines per thread. */
constexpr fkv_u32 PF_STEP_LINES = 256 / PF_KEYS;
constexpr fkv_u32 PF_LINES = (FKV_D / 16 + PF_STEP_LINES - 1) / PF_STEP_LINES;
constexpr fkv_u32 PF_V_LINE_BYTES = FKV_V_BITS == 4 ? 128 : 64; /* bytes of a line in the plane of low code bits, for 16 tokens */

/* Layout of the rows of an open page in a packed tile. SIDE: pf_open_k_shape or opened::fkv_v_shape. If a tile is half of a
 * page, it contains half of each array, at half of the array's offset in the page. */
template <class SIDE> struct pf_open_tile {
    enum { CODE_BITS = SIDE::CODE_BITS, GROUP_CHANNELS = SIDE::GROUP_CHANNELS };
    enum {
        CODES_AT = SIDE::CODES_AT * PF_KEYS / FKV_PAGE_TOKENS,
        SCALES_AT = SIDE::SCALES_AT * PF_KEYS / FKV_PAGE_TOKENS,
        BIASES_AT = SIDE::BIASES_AT * PF_KEYS / FKV_PAGE_TOKENS
    };
    enum { CODE_BYTES = FKV_D * CODE_BITS / 8, FACTOR_BYTES = CODE_BITS == 16 ? 0 : 2 * FKV_D / GROUP_CHANNELS }; /* per token */
    static_assert(CODES_AT % 16 == 0 && SCALES_AT % 16 == 0 && BIASES_AT % 16 == 0 && PF_KEYS * FACTOR_BYTES % 16 == 0,
                  "bulk copies require a multiple of 16 bytes");
};
#if FKV_CALIBRATED
typedef opened::fkv_open_k_shape pf_open_k_shape;
#else
typedef opened::fkv_k_shape pf_open_k_shape;
#endif
typedef pf_open_tile<pf_open_k_shape> pf_open_k;
typedef pf_open_tile<opened::fkv_v_shape> pf_open_v;

/* Starts the bulk copies of the codes, scales and biases of PF_KEYS tokens of an open page. `first` is the slot of the first of
 * these tokens. */
template <class SIDE>
FKV_FN void pf_load_open_rows(fkv_shared s, fkv_u32 mbarrier, fkv_u32 at, const fkv_u8 *block, fkv_u32 first) {
    typedef pf_open_tile<SIDE> tile;
    fkv_bulk_copy(s, mbarrier, at + tile::CODES_AT, block + SIDE::CODES_AT + first * tile::CODE_BYTES,
                  PF_KEYS * tile::CODE_BYTES);
    if (tile::FACTOR_BYTES == 0) return;
    fkv_bulk_copy(s, mbarrier, at + tile::SCALES_AT, block + SIDE::SCALES_AT + first * tile::FACTOR_BYTES,
                  PF_KEYS * tile::FACTOR_BYTES);
    fkv_bulk_copy(s, mbarrier, at + tile::BIASES_AT, block + SIDE::BIASES_AT + first * tile::FACTOR_BYTES,
                  PF_KEYS * tile::FACTOR_BYTES);
}

/* Starts the bulk copies of the PF_KEYS tokens of a page that start at slot `first`. The parts of a sealed page are stored at
 * their offsets in the page. */
FKV_FN void pf_load_part(fkv_shared s, const pf_item &x, bool open, fkv_u32 page, fkv_u32 first, int stage) {
    fkv_u32 mbarrier = pf_mbarrier(PF_PACKED_FULL, stage), at = (fkv_u32)(PF_AT_PACKED + stage * PF_PACKED_BYTES);
    const fkv_u8 *block = open ? x.open + (fkv_u64)page * (FKV_G * (fkv_u64)FKV_OPEN_BLOCK_BYTES)
                               : x.pool + (fkv_u64)page * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES);
    constexpr fkv_u32 open_bytes =
        PF_KEYS * (pf_open_k::CODE_BYTES + 2 * pf_open_k::FACTOR_BYTES + pf_open_v::CODE_BYTES + 2 * pf_open_v::FACTOR_BYTES);
    constexpr fkv_u32 k_bytes = PF_KEYS * FKV_K_ROW_BYTES, v_bytes = PF_KEYS * FKV_V_ROW_BYTES, norm_bytes = PF_KEYS * 2;
    fkv_bulk_copy_begin(s, mbarrier, open ? open_bytes : k_bytes + 2 * (2 * FKV_D) + v_bytes + norm_bytes);
    if (open) {
        pf_load_open_rows<pf_open_k_shape>(s, mbarrier, at, block, first);
        pf_load_open_rows<opened::fkv_v_shape>(s, mbarrier, at, block, first);
    } else {
        fkv_bulk_copy(s, mbarrier, at + FKV_K_CODES, block + FKV_K_CODES + first * FKV_K_ROW_BYTES, k_bytes);
        fkv_bulk_copy(s, mbarrier, at + FKV_K_SCALES, block + FKV_K_SCALES, 2 * FKV_D);
        fkv_bulk_copy(s, mbarrier, at + FKV_K_BIASES, block + FKV_K_BIASES, 2 * FKV_D);
        fkv_bulk_copy(s, mbarrier, at + FKV_V_CODES, block + FKV_V_CODES + first * FKV_V_ROW_BYTES, v_bytes);
        fkv_bulk_copy(s, mbarrier, at + FKV_V_SCALES, block + FKV_V_SCALES + first * 2, norm_bytes);
    }
    fkv_bulk_copy_end(s, mbarrier);
}

FKV_FN void pf_load_packed_tile(fkv_shared s, const pf_item &x, fkv_u32 key, fkv_u32 page, int stage) {
    fkv_u32 mbarrier = pf_mbarrier(PF_PACKED_FULL, stage);
    bool open = pf_is_open(x, key / FKV_PAGE_TOKENS);
    fkv_u32 bytes = open ? FKV_OPEN_BLOCK_BYTES : FKV_BLOCK_BYTES;
    if (PF_WIDE) return pf_load_part(s, x, open, page, key % FKV_PAGE_TOKENS, stage);
    fkv_bulk_copy_begin(s, mbarrier, bytes);
    fkv_bulk_copy(s, mbarrier, (fkv_u32)(PF_AT_PACKED + stage * PF_PACKED_BYTES),
                  (open ? x.open : x.pool) + (fkv_u64)page * (FKV_G * (fkv_u64)bytes), bytes);
    fkv_bulk_copy_end(s, mbarrier);
}

/* pf_key_offset() returns the byte offset in a tile of unit `unit` (eight channels) of a key. pf_value_offset() returns that of
 * group `eight` (eight tokens) of a V channel. The group is stored in row pf_value_row(), unit pf_value_unit(). */
template <int ROWS> FKV_FN fkv_u32 pf_key_offset(fkv_u32 key, fkv_u32 unit) {
    return unit / 8 * (ROWS * 128) + key * 128 + ((unit % 8) ^ (key % 8)) * 16;
}
FKV_FN fkv_u32 pf_value_row(fkv_u32 channel) {
    return PF_WIDE ? channel / (PF_V_FOLDS * PF_V_WIDTH) * PF_V_WIDTH + channel % PF_V_WIDTH : channel;
}
FKV_FN fkv_u32 pf_value_unit(fkv_u32 channel, fkv_u32 eight) {
    if (PF_WIDE) eight += channel / PF_V_WIDTH % PF_V_FOLDS * (PF_KEYS / 8);
    return eight ^ (channel % 8);
}
FKV_FN fkv_u32 pf_value_offset(fkv_u32 channel, fkv_u32 eight) {
    return pf_value_row(channel) * 128 + pf_value_unit(channel, eight) * 16;
}

/* Softmax weights are multiplied by 2^PF_WEIGHT_EXPONENT. A sealed value is norm * level * 2^-7. The weight includes the norm,
 * and a level is stored as the fp16 value level * 2^-24. The output sums are therefore multiplied by PF_VALUE_UNIT, which is
 * 2^(24 - 13 - 7). Values of open pages are divided by 4, and their tokens have the norm PF_OPEN_NORMS, so that PF_VALUE_UNIT is
 * also correct for open pages. */
constexpr fkv_u32 PF_WEIGHT_EXPONENT = 13;
constexpr float PF_VALUE_UNIT = 16.0f;
constexpr fkv_u32 PF_OPEN_NORMS = 0x02000200u; /* 2^-15 */

/* ---- codes ---- */

/* Expands eight codes of BITS bits to nibbles, in the order of 4-bit codes. `low` holds two codes in the low four bits of each
 * byte (for 3-bit codes, without their high bits). `high` holds the high bits of 3-bit codes in the low two bits of each byte.
 * All other bits are ignored. The products do not overflow into other bytes. */
template <int BITS> FKV_FN fkv_u32 pf_nibbles(fkv_u32 low, fkv_u32 high) {
    if (BITS == 4) return low;
    fkv_u32 nibbles = (low & 0x0f0f0f0fu) + 3u * (low & 0x0c0c0c0cu); /* moves bits 2 and 3 of each byte to bits 4 and 5 */
    if (BITS == 2) return nibbles;
    return nibbles | (36u * (high & 0x03030303u) & 0x44444444u); /* moves bits 0 and 1 of each byte to bits 2 and 6 */
}

/* Loads 32 codes from shared memory and expands them to nibbles. The codes are stored at `at`, after `shift` bits of each byte.
 * The high bits of 3-bit codes are stored at high_at, after high_shift bits of each byte. */
template <int BITS>
FKV_FN void pf_get_codes(fkv_shared s, fkv_u32 at, fkv_u32 shift, fkv_u32 high_at, fkv_u32 high_shift, fkv_u32 *codes) {
    fkv_u32 high[4] = {};
    fkv_get16(s, at, codes);
    if (BITS == 4) return;
    if (BITS == 3) fkv_get16(s, high_at, high);
    FKV_UNROLL for (int n = 0; n < 4; n++) codes[n] = pf_nibbles<BITS>(codes[n] >> shift, high[n] >> high_shift);
}

/* ---- keys ---- */

constexpr fkv_u32 PF_SPLIT = PF_UNITS <= 8 ? 2 : 1;    /* number of warps that share the tokens of a unit (8 channels) */
constexpr fkv_u32 PF_QUADS = PF_KEYS / 32 / PF_SPLIT;  /* number of groups of four tokens per thread */
constexpr fkv_u32 PF_KEY_TURNS = (PF_UNITS + 15) / 16; /* number of units per thread; the warpgroup unpacks 16 units at a time */
constexpr fkv_u32 PF_FOURS = (FKV_D + 127) / 128;      /* number of groups of four channels per lane, for pf_page_exponent() */
constexpr fkv_u32 PF_CODE_WORDS = FKV_CALIBRATED ? 8 : 4; /* number of words that hold the codes of one unit for four tokens */
constexpr fkv_u32 PF_THIRD_UNITS = PF_THIRD_STEPS * 2;    /* number of units in the product with the third digits */

/* Keys that a thread unpacks: one unit (8 channels) of each key in one or two groups of four tokens. Two groups are 32 tokens
 * apart. The assignment of units to threads avoids bank conflicts in the loads and stores of eight lanes. Offsets are in bytes,
 * relative to the page or the tile. Because of the swizzle, the n-th key after the first key of a group has the offset (first XOR
 * 16 * n) + 128 * n. */
struct pf_key_share {
    fkv_u32 number;    /* index, in the unit, of the channel whose offset this thread computes */
    fkv_u32 codes_at;  /* byte offset, in the page, of the codes of the thread's first token */
    fkv_u32 high_at;   /* the same for the high bits of 3-bit codes */
    fkv_u32 unit_at;   /* byte offset of the unit in the scales (and in the biases) of the page */
    fkv_u32 tile_at;   /* byte offset, in the tile, of the first token's unit */
    fkv_u32 offset_at; /* byte offset, in the tile, of the thread's channel in the first extra key */
    bool any, first;   /* any: whether the thread unpacks a unit; first: whether it also stores the offset of its channel */
};
FKV_FN pf_key_share pf_keys_of(fkv_shared s) {
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    fkv_u32 quad = (lane >> 2 & 1u) | ((lane >> 3 ^ lane >> 1) & 1u) << 1;
    fkv_u32 of = warp / PF_SPLIT * 4 + lane % 4, unit = of < PF_UNITS ? of : 0;
    fkv_u32 key = (warp % PF_SPLIT * 2 + lane / 16) * 16 + quad * 4, number = lane / 4;
    fkv_u32 half = unit / 8 * (PF_K_ROWS * 128);
    return {number,
            FKV_K_CODES + key / 16 * (16 * FKV_K_ROW_BYTES) + unit / (FKV_K_BITS == 4 && !FKV_CALIBRATED ? 1 : 2) * 64 +
                key % 16 * 4,
            FKV_K_CODES + key / 16 * (16 * FKV_K_ROW_BYTES) + (FKV_D / 16 + unit / 4) * 64 + key % 16 * 4,
            unit * 16,
            half + key * 128 + ((unit % 8) ^ (key % 8)) * 16,
            half + PF_KEYS * 128 + unit % 8 * 16 + pf_k_channel(number) * 2,
            of < PF_UNITS,
            of < PF_UNITS && warp % PF_SPLIT == 0};
}

/* Returns the keys that a thread unpacks in turn `turn`. `own` are the keys of turn 0. */
FKV_FN pf_key_share pf_next_keys(const pf_key_share &own, fkv_u32 turn) {
    pf_key_share next = own;
    next.any = next.first = own.unit_at / 16 + turn * 16 < PF_UNITS;
    if (!next.any) return next;
    next.codes_at += turn * ((FKV_CALIBRATED ? 8 : 16) * 64);
    next.unit_at += turn * (16 * 16);
    next.tile_at += turn * (2 * PF_K_ROWS * 128);
    next.offset_at += turn * (2 * PF_K_ROWS * 128);
    return next;
}

struct pf_taken_keys {
    fkv_u32 codes[PF_QUADS][PF_CODE_WORDS];
    fkv_u32 scales[4], four_scales[2 * PF_FOURS],
        four_biases[2 * PF_FOURS]; /* scales of the unit; scales and biases for pf_page_exponent() */
    fkv_u32 scale, bias;           /* scale and bias of the thread's channel */
    fkv_u32 norms;                 /* norms of two tokens */
};

/* Returns the index (0 to 3) of the group of four V channels that the lane handles, among 16 channels. The assignment avoids bank
 * conflicts in the loads and stores of eight lanes. */
FKV_FN fkv_u32 pf_quad(fkv_u32 lane) {
    if (PF_WIDE) return lane / 4 % 2 + (lane / 8 + lane / 2) % 2 * 2;
    return (lane / 8 + lane % 8 / 2) % 4;
}

/* Converts two norms from the page format to fp16. */
FKV_FN fkv_u32 pf_norms_of(fkv_u32 two) {
    two &= 0x7fff7fffu;
    return FKV_PAGE_BF16 ? fkv_pack_f16(fkv_float_of(two << 16), fkv_float_of(two & 0xffff0000u)) : two;
}
FKV_FN fkv_u32 pf_larger_norm(fkv_u32 two) { /* ignores non-finite norms */
    fkv_u32 low = two & 0xffffu, high = two >> 16;
    return fkv_max_bits(low < 0x7c00u ? low : 0u, high < 0x7c00u ? high : 0u);
}

/* Returns a word in which the 16 bits of each non-finite norm are set. */
FKV_FN fkv_u32 pf_nonfinite_norms(fkv_u32 two) {
    return ((two & 0xffffu) >= 0x7c00u ? 0xffffu : 0u) | (two >= 0x7c000000u ? 0xffff0000u : 0u);
}

/* Returns an n such that the largest norm of the page is less than 4 * 2^n. Called by a warp; each lane passes two norms. */
FKV_FN fkv_u32 pf_norm_unit(fkv_u32 norms) {
    fkv_u32 exponent = fkv_warp_max_bits(pf_larger_norm(norms)) >> 10;
    return exponent < 15 ? 0 : exponent > 29 ? 14 : exponent - 15;
}

/* Returns two norms of a page in the page format, or 0 if there are no norms for the lane. */
FKV_FN fkv_u32 pf_take_norms(fkv_shared s, fkv_u32 page) {
    fkv_u32 lane = s.index % 32;
    return lane < PF_KEYS / 2 ? fkv_get4(s, page + FKV_V_SCALES + lane * 4) : 0;
}

#if FKV_CALIBRATED
/* Loads the codes of four tokens in one unit, and joins their digits. codes[2 * n + q] holds the codes of token n in four
 * channels, one per byte. at: offset of the packed page plus the byte offset of the four tokens. */
FKV_FN void pf_get_key_codes(fkv_shared s, const pf_key_share &own, fkv_u32 at, fkv_u32 *codes) {
    fkv_u32 unit = own.unit_at / 16, n4 = pf_channels_with(s, 4), n6 = pf_channels_with(s, 6), w[4];
    fkv_get16(s, at + own.codes_at, w);
    FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) FKV_UNROLL for (fkv_u32 q = 0; q < 2; q++) codes[2 * n + q] =
        w[n] >> (unit % 2 * 4 + 2 * q) & 0x03030303u;
    if (unit * 8 >= n4) return;
    fkv_get16(s, at + own.codes_at + FKV_D / 16 * 64, w);
    FKV_UNROLL for (fkv_u32 q = 0; q < 2; q++) if (unit * 8 + 4 * q < n4) FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++)
        codes[2 * n + q] |= (w[n] >> (unit % 2 * 4 + 2 * q) & 0x03030303u) << 2;
    FKV_UNROLL for (fkv_u32 q = 0; q < 2; q++) if (unit * 8 + 4 * q < n6) {
        fkv_u32 quad = (FKV_D + n4) / 4 + unit * 2 + q; /* index among the quads of a token in all planes */
        fkv_get16(s, at + own.codes_at - unit / 2 * 64 + quad / 4 * 64, w);
        FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) codes[2 * n + q] |= (w[n] >> quad % 4 * 2 & 0x03030303u) << 4;
    }
}

/* Returns the number that is subtracted from the first two digits of a channel's codes, given its position in the channel order.
 */
FKV_FN fkv_u32 pf_middle_code(fkv_shared s, fkv_u32 position) { return position < pf_channels_with(s, 4) ? 8 : 2; }

FKV_FN bool pf_has_third_digit(fkv_shared s, fkv_u32 position) { return position < pf_channels_with(s, 6); }
#else
FKV_FN void pf_get_key_codes(fkv_shared s, const pf_key_share &own, fkv_u32 at, fkv_u32 *codes) {
    fkv_u32 lane = s.index % 32; /* unit % 4 is lane % 4 */
    pf_get_codes<FKV_K_BITS>(s, at + own.codes_at, lane % 2 * 4, at + own.high_at, lane % 4 * 2, codes);
}
FKV_FN fkv_u32 pf_middle_code(fkv_shared, fkv_u32) { return 1u << (FKV_K_BITS - 1); }
FKV_FN bool pf_has_third_digit(fkv_shared, fkv_u32) { return false; }
#endif

/* Loads into registers the codes, scales and norms that this thread unpacks. If the page is open, the loaded bytes are not
 * used. */
FKV_FN void pf_take_keys(fkv_shared s, const pf_key_share &own, int packed, pf_taken_keys &k) {
    fkv_u32 lane = s.index % 32, page = (fkv_u32)(PF_AT_PACKED + packed * PF_PACKED_BYTES);
    fkv_u32 four = page + (lane * 4 < FKV_D ? lane * 8 : 0), channel = page + own.unit_at + own.number * 2;
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_QUADS; i++) pf_get_key_codes(s, own, page + i * (32 * FKV_K_ROW_BYTES), k.codes[i]);
    fkv_get16(s, page + FKV_K_SCALES + own.unit_at, k.scales);
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_FOURS; i++) {
        if (i > 0) four = page + (i * 128 + lane * 4 < FKV_D ? i * 256 + lane * 8 : 0);
        fkv_get8(s, four + FKV_K_SCALES, k.four_scales + 2 * i);
        fkv_get8(s, four + FKV_K_BIASES, k.four_biases + 2 * i);
    }
    k.scale = fkv_get2(s, channel + FKV_K_SCALES);
    k.bias = fkv_get2(s, channel + FKV_K_BIASES);
    k.norms = pf_take_norms(s, page);
}

FKV_FN fkv_u32 pf_times(fkv_u32 x, fkv_u32 y) { return fkv_fma_f16x2(x, y, 0x80008000u); }

/* Returns the biased float exponent of the larger of max |bias| and 1024 * max |scale|, over all channels of the page. */
FKV_FN fkv_u32 pf_page_exponent(const pf_taken_keys &k) {
    float scale = 0, bias = 0;
    FKV_UNROLL for (fkv_u32 n = 0; n < 4 * PF_FOURS; n++) {
        scale = fkv_max(scale, fkv_abs(fkv_page_value(k.four_scales[n / 2] >> 16 * (n % 2) & 0xffffu)));
        bias = fkv_max(bias, fkv_abs(fkv_page_value(k.four_biases[n / 2] >> 16 * (n % 2) & 0xffffu)));
    }
    fkv_u32 exponent = fkv_warp_max_bits(fkv_bits_of(fkv_max(scale * 1024.0f, bias))) >> 23;
    return exponent < 20 ? 20 : exponent > 240 ? 240 : exponent;
}

/* Codes are inserted into the low bits of the fp16 value 1024.0, which gives 1024 + code for channels 0 to 3, and 1024 + 16 *
 * code for channels 4 to 7. The result is multiplied by the scale or, for channels 4 to 7, by 1/16 of the scale. To obtain scale
 * * (code - 8) for 4-bit codes, 1032 * scale or 72 * scale must be subtracted. fp16 cannot represent these products exactly, so
 * the nearest fp16 value is subtracted, and the channel offsets correct the difference. The codes of calibrated keys are in
 * separate bytes, which gives 1024 + code for all channels. */
FKV_FN bool pf_is_upper_nibble(fkv_u32 channel) { return !FKV_CALIBRATED && channel % 8 >= 4; }

/* pf_is_shared_image<TO>::value is true if the destination TO is a page image in device memory, which other thread blocks read,
 * and false if it is shared memory. */
template <class TO> struct pf_is_shared_image {
    static constexpr bool value = true;
};
template <> struct pf_is_shared_image<fkv_shared> {
    static constexpr bool value = false;
};

/* Returns the rounding error that all fp16 keys of a channel have in common. It is a multiple of the scale's last bit, and its
 * magnitude does not exceed the scale. */
FKV_FN float pf_channel_error(float scale, fkv_u32 channel, fkv_u32 middle) {
    float off = (float)((pf_is_upper_nibble(channel) ? 64 : 1024) + middle);
    return fkv_fma(off, scale, fkv_f16_to_f32(fkv_f32_to_f16(-off * scale)));
}

/* Returns two of the four codes in the bytes of a word, as the fp16 values 1024 + code: the first two or, if `half` is 1, the
 * last two. */
FKV_FN fkv_u32 pf_two_codes(fkv_u32 codes, fkv_u32 half) {
    return fkv_permute(codes, 0x64646464u, half == 0 ? 0x4140u : 0x4342u);
}

/* Stores the contribution of the third digits of calibrated keys. scale: scales of the unit's channels, two per word */
template <class TO>
FKV_FN void pf_put_third_digits(fkv_shared s, TO to, fkv_u32 at, const pf_key_share &own, const pf_taken_keys &k,
                                const fkv_u32 *scale) {
    const fkv_u32 unit = own.unit_at / 16;
    if (unit >= PF_THIRD_UNITS) return;
    at += own.tile_at - unit / 8 * (PF_MORE_KEYS * 128); /* in contrast to the tile of keys, there are no extra keys */
    fkv_u32 factor[4];
    FKV_UNROLL for (fkv_u32 i = 0; i < 4; i++) factor[i] =
        pf_has_third_digit(s, unit * 8 + 4 * (i / 2)) ? pf_times(scale[i], 0x4c004c00u) : 0; /* 16 * scale */
    FKV_UNROLL for (fkv_u32 n = 0; n < 4 * PF_QUADS; n++) {
        fkv_u32 x[4];
        FKV_UNROLL for (fkv_u32 i = 0; i < 4; i++) {
            fkv_u32 digits = k.codes[n / 4][2 * (n % 4) + i / 2] >> 4 & 0x03030303u;
            x[i] = pf_times(fkv_fma_f16x2(pf_two_codes(digits, i % 2), 0x3c003c00u, 0xe402e402u), factor[i]); /* 1, -1026 */
        }
        fkv_put16(to, ((at + n / 4 * (32 * 128)) ^ n % 4 * 16) + n % 4 * 128, x[0], x[1], x[2], x[3]);
    }
}

/* Unpacks and stores eight channels (a unit) of four tokens. TO is the type of the destination: shared memory, or a page image in
 * device memory (prefill_share.h). */
template <class TO> FKV_FN void pf_put_unit(TO to, fkv_u32 at, const fkv_u32 *codes, const fkv_u32 *scale, const fkv_u32 *off) {
    FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) {
        if (FKV_CALIBRATED) {
            fkv_u32 x[4];
            FKV_UNROLL for (fkv_u32 i = 0; i < 4; i++) x[i] =
                fkv_fma_f16x2(pf_two_codes(codes[2 * n + i / 2] & 0x0f0f0f0fu, i % 2), scale[i], off[i]);
            fkv_put16(to, (at ^ n * 16) + n * 128, x[0], x[1], x[2], x[3]);
            continue;
        }
        fkv_u32 c = codes[n], d = c >> 8;
        fkv_put16(to, (at ^ n * 16) + n * 128, fkv_fma_f16x2(fkv_mask_or(c, 0x000f000fu, 0x64006400u), scale[0], off[0]),
                  fkv_fma_f16x2(fkv_mask_or(d, 0x000f000fu, 0x64006400u), scale[1], off[1]),
                  fkv_fma_f16x2(fkv_mask_or(c, 0x00f000f0u, 0x64006400u), scale[2], off[2]),
                  fkv_fma_f16x2(fkv_mask_or(d, 0x00f000f0u, 0x64006400u), scale[3], off[3]));
    }
}

/* Destination of the channel offsets of a page. The keys at `at` are followed by space for the offsets of four pages, and
 * `number` (0 to 3) selects the space of this page. */
template <class TO> struct pf_offsets_at {
    TO to;
    fkv_u32 at, number;
};

/* Stores the offset of this thread's channel as two extra keys: the high-order part and the low-order part. The offset includes a
 * correction for the rounding error of the channel's keys. */
template <class TO>
FKV_FN void pf_put_offset(fkv_shared s, const pf_offsets_at<TO> &offsets, const pf_key_share &own, float scale, float bias) {
    fkv_u32 position = own.unit_at / 2 + own.number, middle = pf_middle_code(s, position);
    bias = fkv_fma((float)(pf_has_third_digit(s, position) ? middle + 32 : middle), scale, bias) -
           pf_channel_error(scale, own.number, middle);
    fkv_u32 high = fkv_f32_to_f16(bias), key = 2 * offsets.number, at = offsets.at + own.offset_at;
    fkv_put2(offsets.to, (at ^ key * 16) + key * 128, high);
    fkv_put2(offsets.to, (at ^ (key + 1) * 16) + (key + 1) * 128, fkv_f32_to_f16(bias - fkv_f16_to_f32(high)));
}

/* Stores the score factor and the norms of a page (pf_page_unit). Called by a warp. Non-finite norms are replaced with 0, because
 * 0 * NaN is NaN even for masked tokens, and the rows that see the affected tokens are marked. All rows see the tokens of a
 * sealed page that is shared, so in this case pf_page_unit.sum is set to NaN instead. */
template <class TO> FKV_FN void pf_put_page_unit(fkv_shared s, TO to, fkv_u32 at, fkv_u32 first_key, fkv_u32 sum, fkv_u32 norms) {
    fkv_u32 lane = s.index % 32, nonfinite = pf_nonfinite_norms(norms), unit = pf_norm_unit(norms);
    if (pf_is_shared_image<TO>::value && fkv_any(nonfinite != 0)) sum = 0x7fc00000u;
    for (fkv_u32 i = 0; i < 2 && !pf_is_shared_image<TO>::value; i++)
        if ((nonfinite >> 16 * i & 1u) != 0) pf_mark_rows(s, first_key + 2 * lane + i);
    fkv_put4(to, at + pf_norms_at(lane), pf_times(norms & ~nonfinite, ((15 - unit) << 10) * 0x10001u));
    if (lane == 0) fkv_put4(to, at, sum);
}

/* Stores the unpacked keys of a page at `at`, the contribution of the third digits of calibrated keys at third_at, and the score
 * factor and norms of the page (pf_page_unit) at unit_at. */
template <class TO>
FKV_FN void pf_put_sealed_keys(fkv_shared s, TO to, fkv_u32 at, fkv_u32 third_at, fkv_u32 unit_at,
                               const pf_offsets_at<TO> &offsets, fkv_u32 first_key, const pf_key_share &own,
                               const pf_taken_keys &k) {
    fkv_u32 exponent = pf_page_exponent(k);
    float up = fkv_float_of((268 - exponent) << 23); /* with this factor, biases are below 2^15 and scales below 2^5 */
    if (s.index / 32 == 3) pf_put_page_unit(s, to, unit_at, first_key, (exponent - 14) << 23, pf_norms_of(k.norms));
    if (!own.any) return;
    const fkv_u32 channel = own.unit_at / 2; /* first channel of the unit, or its position in the channel order */
    if (own.first) pf_put_offset(s, offsets, own, fkv_page_value(k.scale) * up, fkv_page_value(k.bias) * up);
    fkv_u32 scales[4], off[4];
    /* each iteration handles two channels: pf_k_channel(2 * n) and pf_k_channel(2 * n + 1) */
    FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) {
        fkv_u32 pair[2], factor = pf_is_upper_nibble(4 * (n / 2)) ? 16 : 1;
        FKV_UNROLL for (fkv_u32 i = 0; i < 2; i++) {
            fkv_u32 c = pf_k_channel(2 * n + i);
            pair[i] = k.scales[c / 2] >> 16 * (c % 2) & 0xffffu;
        }
        float times = up / (float)factor;
        scales[n] = fkv_pack_f16(fkv_page_value(pair[0]) * times, fkv_page_value(pair[1]) * times);
        off[n] = pf_times(scales[n], /* -1032, -1152 (4 bits) */
                          0xe400e400u + factor * pf_middle_code(s, channel + 4 * (n / 2)) * 0x10001u);
    }
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_QUADS; i++) pf_put_unit(to, at + own.tile_at + i * (32 * 128), k.codes[i], scales, off);
    if constexpr (FKV_CALIBRATED != 0) pf_put_third_digits(s, to, third_at, own, k, scales);
}

/* ---- open pages ---- */

/* Converts byte i of a word to float. The byte is inserted into the low bits of the float 2^23, which is then subtracted. */
FKV_FN float pf_byte(fkv_u32 word, fkv_u32 i) {
    return fkv_sub(fkv_float_of(fkv_permute(word, 0x4b000000u, 0x7440u + i)), 8388608.0f);
}

FKV_FN float pf_open_factor(fkv_shared s, fkv_u32 factors_at, fkv_u32 number) {
    return fkv_page_value(fkv_get2(s, factors_at + number * 2));
}

/* Reads N (4 or 8) adjacent channels of a token in the packed tile at `page`, starting at channel d. All channels must be in one
 * group. SIDE: pf_open_k or pf_open_v, whose codes have 8 or 16 bits. */
template <class SIDE, fkv_u32 N> FKV_FN void pf_take_open(fkv_shared s, fkv_u32 page, fkv_u32 token, fkv_u32 d, float *x) {
    constexpr fkv_u32 bits = SIDE::CODE_BITS, words = N * bits / 32;
    fkv_u32 w[words], at = page + SIDE::CODES_AT + (token * FKV_D + d) * (bits / 8);
    if constexpr (words == 1) w[0] = fkv_get4(s, at);
    if constexpr (words == 2) fkv_get8(s, at, w);
    if constexpr (words == 4) fkv_get16(s, at, w);
    if constexpr (bits == 16) {
        FKV_UNROLL for (fkv_u32 n = 0; n < N; n++) x[n] = fkv_page_value(w[n / 2] >> 16 * (n % 2) & 0xffffu);
    } else {
        fkv_u32 group = token * (FKV_D / SIDE::GROUP_CHANNELS) + d / SIDE::GROUP_CHANNELS;
        float scale = pf_open_factor(s, page + SIDE::SCALES_AT, group), bias = pf_open_factor(s, page + SIDE::BIASES_AT, group);
        FKV_UNROLL for (fkv_u32 n = 0; n < N; n++) x[n] = fkv_fma(scale, pf_byte(w[n / 4], n % 4), bias);
    }
}

/* Reads eight channels (a unit) of a key in the packed tile at `page`. x[n]: value of the channel at place n of the unit. */
FKV_FN void pf_take_open_key(fkv_shared s, fkv_u32 page, fkv_u32 key, fkv_u32 unit, float *x) {
#if FKV_CALIBRATED
    FKV_UNROLL for (fkv_u32 n = 0; n < 8; n++) {
        fkv_u32 d = pf_key_channel(s, unit * 8 + n),
                at = page + pf_open_k::CODES_AT + (key * FKV_D + d) * (pf_open_k::CODE_BITS / 8);
        fkv_u32 word = fkv_get4(s, at / 4 * 4);
        if (pf_open_k::CODE_BITS == 16) {
            x[n] = fkv_page_value(word >> at % 4 * 8 & 0xffffu);
        } else {
            fkv_u32 group = key * (FKV_D / pf_open_k::GROUP_CHANNELS) + d / pf_open_k::GROUP_CHANNELS;
            x[n] = fkv_fma(pf_open_factor(s, page + pf_open_k::SCALES_AT, group), pf_byte(word, at % 4),
                           pf_open_factor(s, page + pf_open_k::BIASES_AT, group));
        }
    }
#else
    float y[8];
    pf_take_open<pf_open_k, 8>(s, page, key, unit * 8, y);
    FKV_UNROLL for (fkv_u32 n = 0; n < 8; n++) x[n] = y[pf_k_channel(n)];
#endif
}

/* Stores the keys of an open page: high-order parts at `at`, in a tile of ROWS rows, and low-order parts at low_at. A thread
 * converts eight channels of a key at a time. */
template <int ROWS, class TO> FKV_FN void pf_put_open_keys(fkv_shared s, TO to, fkv_u32 at, fkv_u32 low_at, int packed) {
    fkv_u32 page = (fkv_u32)(PF_AT_PACKED + packed * PF_PACKED_BYTES);
    for (fkv_u32 i = s.index; i < PF_KEYS * PF_UNITS; i += 128) {
        fkv_u32 unit = i % PF_UNITS, key = i / PF_UNITS, high[4], low[4];
        float x[8];
        pf_take_open_key(s, page, key, unit, x);
        FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) {
            float a = x[2 * n], b = x[2 * n + 1];
            high[n] = fkv_pack_f16(a, b);
            low[n] = fkv_pack_f16(a - fkv_f16_to_f32(high[n] & 0xffffu), b - fkv_f16_to_f32(high[n] >> 16));
        }
        fkv_put16(to, at + pf_key_offset<ROWS>(key, unit), high[0], high[1], high[2], high[3]);
        fkv_put16(to, low_at + pf_key_offset<PF_KEYS>(key, unit), low[0], low[1], low[2], low[3]);
    }
}

/* Stores the score factor and the norms of an open page (pf_page_unit). Called by a warpgroup. */
template <class TO> FKV_FN void pf_put_open_unit(fkv_shared s, TO to, fkv_u32 at) {
    fkv_u32 thread = s.index % 128;
    if (thread == 0) fkv_put4(to, at, 0x3f800000u);
    if (thread < 32) fkv_put4(to, at + pf_norms_at(thread), PF_OPEN_NORMS);
}

/* Waits until the matrix products have finished reading the low-order parts (or third digits) that those of this tile will
 * overwrite.
 */
FKV_FN void pf_wait_for_low_parts(fkv_shared s, fkv_u32 tile) {
    fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, (int)((tile - PF_LOWS) % PF_STAGES)), (tile - PF_LOWS) / PF_STAGES % 2);
}

FKV_FN void pf_put_keys(fkv_shared s, const pf_item &x, fkv_u32 tile, int stage, int packed, const pf_key_share &own,
                        const pf_taken_keys &k) {
    fkv_u32 key = pf_first_key(x, tile), at = (fkv_u32)(PF_AT_K + stage * PF_K_BYTES);
    if (!pf_is_open(x, key / FKV_PAGE_TOKENS)) {
        if (FKV_CALIBRATED && tile >= PF_LOWS) pf_wait_for_low_parts(s, tile);
        pf_put_sealed_keys(s, s, at, pf_low_at(tile), pf_unit_at(tile), pf_offsets_at<fkv_shared>{s, at, 0}, key, own, k);
        FKV_UNROLL for (fkv_u32 turn = 1; turn < PF_KEY_TURNS; turn++) {
            pf_key_share next = pf_next_keys(own, turn);
            pf_taken_keys more;
            pf_take_keys(s, next, packed, more);
            pf_put_sealed_keys(s, s, at, pf_low_at(tile), pf_unit_at(tile), pf_offsets_at<fkv_shared>{s, at, 0}, key, next, more);
        }
        return;
    }
    if (tile >= PF_LOWS) pf_wait_for_low_parts(s, tile);
    pf_put_open_keys<PF_K_ROWS>(s, s, at, pf_low_at(tile), packed);
    pf_put_open_unit(s, s, pf_unit_at(tile));
}

/* ---- values ---- */

struct pf_taken_values {
    fkv_u32 codes[PF_LINES][4]; /* codes of eight tokens in four channels, for each line (16 channels) */
    fkv_u32 norms;              /* norms of two tokens */
};

/* Position, in the page and in the tile, of the first line (16 channels) that a thread unpacks. Consecutive lines of a thread are
 * PF_STEP_LINES apart. */
struct pf_value_share {
    fkv_u32 line;
    fkv_u32 codes_at, high_at, tile_at; /* high_at: position of the high bits of 3-bit codes */
    fkv_u32 levels[2]; /* the level table is kept in registers, because a constant table would be reloaded for each code */
};
FKV_FN pf_value_share pf_values_of(fkv_shared s) {
    fkv_u32 lane = s.index % 32, line = PF_WIDE ? s.index % 128 / 16 : s.index % 128 / 32, eight = lane % (PF_KEYS / 8);
    fkv_u32 channel = line * 16 + pf_quad(lane) * 4;
    fkv_u32 at = FKV_V_CODES + eight / 2 * (16 * FKV_V_ROW_BYTES) + (FKV_V_BITS == 4 ? eight % 2 * 64 : 0) + pf_quad(lane) * 16;
    pf_value_share own = {line,
                          at + line * PF_V_LINE_BYTES,
                          at + (FKV_D / 16 + line / 2) * 64,
                          pf_value_row(channel) * 128 + pf_value_unit(channel, eight) * 16,
                          {fkv_v_levels(0), fkv_v_levels(4)}};
    own.levels[0] |= fkv_zero(s), own.levels[1] |= fkv_zero(s);
    return own;
}
/* Returns the position in the tile of a thread's i-th line, given the position of its first line. */
FKV_FN fkv_u32 pf_later_line(fkv_u32 tile_at, fkv_u32 i) {
    if (!PF_WIDE) return tile_at + i * (4 * 16 * 128);
    fkv_u32 column = i * (PF_STEP_LINES * 16 / PF_V_WIDTH);
    return (tile_at ^ column % PF_V_FOLDS * (PF_KEYS * 2)) + column / PF_V_FOLDS * (PF_V_WIDTH * 128);
}

/* Loads into registers the codes and norms that this thread unpacks. If the page is open, the loaded bytes are not used. */
FKV_FN void pf_take_values(fkv_shared s, const pf_value_share &own, int packed, pf_taken_values &v) {
    fkv_u32 page = (fkv_u32)(PF_AT_PACKED + packed * PF_PACKED_BYTES);
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_LINES; i++) if (own.line + PF_STEP_LINES * i < FKV_D / 16)
        pf_get_codes<FKV_V_BITS>(s, page + own.codes_at + i * (PF_STEP_LINES * PF_V_LINE_BYTES), s.index % 2 * 4,
                                 page + own.high_at + i * (PF_STEP_LINES * 32), own.line % 2 * 4 + s.index % 2 * 2, v.codes[i]);
    v.norms = pf_take_norms(s, page);
}

/* Stores the values of eight tokens in one channel. The low byte of a stored fp16 value is a level, and the high byte contains
 * only the sign, so the value is an fp16 subnormal equal to level * 2^-24. */
template <class TO> FKV_FN void pf_put_eight(TO out, fkv_u32 at, fkv_u32 x, const fkv_u32 *levels_of, fkv_u32 up) {
    fkv_u32 to[4];
    fkv_u32 signs[2] = {x << (8 - FKV_V_BITS) & 0x80808080u,
                        x << (4 - FKV_V_BITS) &
                            0x80808080u}; /* signs of the low nibbles (tokens 0 to 3) and of the high nibbles (tokens 4 to 7) */
    x &= 0x11111111u * ((1u << (FKV_V_BITS - 1)) - 1u);
    fkv_wg_settle_bits<1>(&x);               /* prevents the compiler from masking x twice */
    FKV_UNROLL for (int i = 0; i < 2; i++) { /* nibbles of tokens 2 * i, 2 * i + 4, 2 * i + 1 and 2 * i + 5 */
        fkv_u32 levels = fkv_permute_or_sign(levels_of[0], levels_of[1], x >> 16 * i);
        to[i] = fkv_permute(levels, signs[0], i == 0 ? 0x5240u : 0x7260u);
        to[2 + i] = fkv_permute(levels, signs[1], i == 0 ? 0x5341u : 0x7361u);
    }
    FKV_UNROLL for (int i = 0; i < 4; i++) to[i] = pf_times(to[i], up);
    fkv_put16(out, at, to[0], to[1], to[2], to[3]);
}

/* Stores the values of an open page. A thread converts and transposes eight tokens of four channels at a time. The assignment of
 * tokens to threads avoids bank conflicts in the loads of a warp and in the stores of eight lanes. Values beyond the range of
 * fp16 are replaced with 0, and mark(token) is called for their tokens, which are numbered from 0 in each page. */
template <class TO, class MARK> FKV_FN void pf_put_open_values(fkv_shared s, TO out, fkv_u32 at, int packed, MARK mark) {
    fkv_u32 page = (fkv_u32)(PF_AT_PACKED + packed * PF_PACKED_BYTES);
    FKV_NO_UNROLL for (fkv_u32 i = s.index % 128; i < FKV_D / 4 * (PF_KEYS / 8); i += 128) {
        fkv_u32 quad = i % (FKV_D / 4), eight = (i / (FKV_D / 4)) ^ (quad / 2 % 4);
        fkv_u32 to[4][4];
        fkv_u32 bad = 0; /* bit n is set if a value of the n-th token is out of range */
        FKV_UNROLL for (fkv_u32 pair = 0; pair < 4; pair++) {
            float y[2][4];
            FKV_UNROLL for (fkv_u32 n = 0; n < 2; n++) {
                pf_take_open<pf_open_v, 4>(s, page, eight * 8 + pair * 2 + n, quad * 4, y[n]);
                FKV_UNROLL for (fkv_u32 c = 0; c < 4; c++) {
                    y[n][c] *= 0.25f;
                    if (!(fkv_abs(y[n][c]) < 65520.0f)) y[n][c] = 0.0f, bad |= 1u << (pair * 2 + n);
                }
            }
            FKV_UNROLL for (fkv_u32 c = 0; c < 4; c++) to[c][pair] = fkv_pack_f16(y[0][c], y[1][c]);
        }
        FKV_UNROLL for (fkv_u32 c = 0; c < 4; c++)
            fkv_put16(out, at + pf_value_offset(quad * 4 + c, eight), to[c][0], to[c][1], to[c][2], to[c][3]);
        for (fkv_u32 n = 0; bad >> n != 0; n++)
            if ((bad >> n & 1u) != 0) mark(eight * 8 + n);
    }
}

/* Stores the levels of a page's values at `at`. The norms are stored separately, with the keys. */
template <class TO> FKV_FN void pf_put_sealed_values(TO to, fkv_u32 at, const pf_value_share &own, const pf_taken_values &v) {
    fkv_u32 up = ((15 + pf_norm_unit(pf_norms_of(v.norms))) << 10) * 0x10001u;
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_LINES; i++) {
        if (own.line + PF_STEP_LINES * i >= FKV_D / 16) break;
        FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++)
            pf_put_eight(to, pf_later_line((at + own.tile_at) ^ n * 16, i) + n * 128, v.codes[i][n], own.levels, up);
    }
}

FKV_FN void pf_put_values(fkv_shared s, const pf_item &x, fkv_u32 tile, int stage, int packed, const pf_value_share &own,
                          const pf_taken_values &v) {
    fkv_u32 key = pf_first_key(x, tile), at = (fkv_u32)(PF_AT_V + stage * PF_TILE_BYTES);
    if (pf_is_open(x, key / FKV_PAGE_TOKENS))
        return pf_put_open_values(s, s, at, packed, [=](fkv_u32 token) { pf_mark_rows(s, key + token); });
    pf_put_sealed_values(s, at, own, v);
}
