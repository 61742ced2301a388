/* Prefill on warpgroups, second part, of sealed pages of 4 bits: in place of prefill_unpack.h. A tile is a page.
 *
 * K. A dword is 8 channels of one token: one unit of eight halves. What goes there is scale . (code - 8), rounded once: the
 * offset of the channel is left out, so the rounding is 2^-13 of the channel's range. Where a few channels are 20 times larger,
 * as real keys' are, that would still be too much: so of each unit the channel with the largest scale is picked, and what its
 * halves leave is one product of 16 channels more, with those channels of q. The offsets, bias + 8 scale, are two more keys of
 * the tile: their score is what all scores of the page have in common. All is under a power of two for the page that keeps it in
 * the halves' range. So a sum needs no scaling: the power of two goes into the factor of the exponent, the offset into its
 * offset.
 *
 * V. A dword is 8 tokens of one channel: rows in shared memory are channels, and a product runs along them. Levels are looked up
 * by byte permutes, with their signs: as halves they are in units of 2^-24, which the norm, 2^15 times as large, makes up
 * for. What remains of it is PF_VALUE_UNIT. Norms from 2 on are under a power of two for the page, which the weights take over.
 *
 * Open pages, the first and those of the queries' span, are read number by number: K as two halves, in two products, V as one.
 */
constexpr fkv_u32 PF_UNITS = FKV_D / 8;
constexpr fkv_u32 PF_OCTETS = (PF_UNITS + 7) / 8;
constexpr fkv_u32 PF_LINES = (FKV_D / 16 + 3) / 4; /* of 16 channels, of a warp */

FKV_FN void pf_bring_tile(fkv_shared s, const pf_item &x, fkv_u32 key, fkv_u32 page, int stage) {
    fkv_u32 gate = pf_gate(PF_PACKED_FULL, stage);
    bool open = pf_is_open(x, key / FKV_PAGE_TOKENS);
    fkv_u32 bytes = open ? FKV_OPEN_BLOCK_BYTES : FKV_BLOCK_BYTES;
    fkv_bring_begin(s, gate, bytes);
    fkv_bring(s, gate, (fkv_u32)(PF_AT_PACKED + stage * PF_PACKED_BYTES),
              (open ? x.open : x.pool) + (fkv_u64)page * (FKV_G * (fkv_u64)bytes), bytes);
    fkv_bring_end(s, gate);
}

FKV_FN const fkv_u8 *pf_packed_page(fkv_shared s, int packed) { return s.base + PF_AT_PACKED + packed * PF_PACKED_BYTES; }

/* Where unit `unit` of a key lies in a tile of keys; and unit `eight` (of tokens) of a channel in one of values. */
FKV_FN pf_words4 *pf_key_at(fkv_shared s, fkv_u32 at, fkv_u32 key, fkv_u32 unit) {
    return (pf_words4 *)(s.base + at + unit / 8 * (PF_K_ROWS * 128) + key * 128 + ((unit % 8) ^ (key % 8)) * 16);
}
FKV_FN pf_words4 *pf_value_at(fkv_shared s, fkv_u32 at, fkv_u32 channel, fkv_u32 eight) {
    return (pf_words4 *)(s.base + at + channel * 128 + (eight ^ (channel % 8)) * 16);
}

/* What picked channels leave of a key, the slices of all stages side by side: 16 channels, one of each unit. */
FKV_FN fkv_u16 *pf_rest_at(fkv_shared s, int stage, fkv_u32 key, fkv_u32 unit) {
    fkv_u32 at = (fkv_u32)(2 * stage) + unit / 8;
    return (fkv_u16 *)(s.base + PF_AT_RESTS + key * 128 + (at ^ (key % 8)) * 16) + unit % 8;
}

/* The keys behind the tile's stay zeroes, but for those of the offsets. By all threads, before the first tile. */
FKV_FN void pf_clear_stages(fkv_shared s) {
    constexpr fkv_u32 of_tile = PF_MORE_KEYS * (PF_DP / 8);
    for (fkv_u32 i = s.index; i < (PF_STAGES + 1) * of_tile; i += PF_THREADS)
        *pf_key_at(s, PF_AT_K + i / of_tile * PF_K_BYTES, PF_KEYS + i % 8, i % of_tile / 8) = pf_words4{{0, 0, 0, 0}};
    if (s.index < 48) s.base[PF_AT_PICKS + s.index] = 0; /* of open pages, whose rests are zeroes */
    for (fkv_u32 i = s.index; i < PF_K_ROWS * 8; i += PF_THREADS)
        *(pf_words4 *)(s.base + PF_AT_RESTS + i * 16) = pf_words4{{0, 0, 0, 0}};
}

/* ---- keys ---- */

struct pf_taken_keys {
    fkv_u32 codes[PF_OCTETS][4]; /* of four tokens, of a unit of each octet */
    fkv_u32 scale, bias;         /* of the thread's own channel */
    fkv_u32 norm;                /* the largest of two tokens */
};

/* The lane's four tokens of 16, or channels. With its unit this way neither reads nor stores of eight lanes meet in a bank. */
FKV_FN fkv_u32 pf_quad(fkv_u32 lane) { return (lane / 8 + lane % 8 / 2) % 4; }

/* Two norms of the page as halves. */
FKV_FN fkv_u32 pf_norms_of(fkv_u32 two) {
    two &= 0x7fff7fffu;
    return FKV_PAGE_BF16 ? fkv_pack_f16(fkv_float_of(two << 16), fkv_float_of(two & 0xffff0000u)) : two;
}
FKV_FN fkv_u32 pf_larger_norm(fkv_u32 two) { /* one that is not finite is no measure for others */
    fkv_u32 low = two & 0xffffu, high = two >> 16;
    return fkv_max_bits(low < 0x7c00u ? low : 0u, high < 0x7c00u ? high : 0u);
}

/* Of the page's largest norm, a half's bits: the power of two that brings it below 2. */
FKV_FN fkv_u32 pf_norm_unit(fkv_u32 largest) {
    fkv_u32 exponent = largest >> 10;
    return exponent < 15 ? 0 : exponent > 30 ? 15 : exponent - 15;
}

FKV_FN void pf_take_keys(fkv_shared s, const pf_item &x, fkv_u32 tile, int packed, pf_taken_keys &k) {
    if (pf_is_open(x, pf_first_key(x, tile) / FKV_PAGE_TOKENS)) {
        k = pf_taken_keys{};
        return;
    }
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    const fkv_u8 *page = pf_packed_page(s, packed);
    const fkv_u8 *codes = page + FKV_K_CODES + warp * (16 * FKV_K_ROW_BYTES) + pf_quad(lane) * 16;
    FKV_UNROLL for (fkv_u32 o = 0; o < PF_OCTETS; o++) {
        fkv_u32 unit = 8 * o + lane % 8;
        pf_words4 four = *(const pf_words4 *)(codes + (unit < PF_UNITS ? unit : 0) * 64);
        FKV_UNROLL for (int n = 0; n < 4; n++) k.codes[o][n] = four.w[n];
    }
    fkv_u32 channel = s.index < FKV_D ? s.index : 0; /* threads without one repeat the first */
    k.scale = ((const fkv_u16 *)(page + FKV_K_SCALES))[channel];
    k.bias = ((const fkv_u16 *)(page + FKV_K_BIASES))[channel];
    k.norm = pf_larger_norm(pf_norms_of(((const fkv_u32 *)(page + FKV_V_SCALES))[lane]));
}

FKV_FN fkv_u32 pf_times(fkv_u32 x, fkv_u32 y) { return fkv_fma_f16x2(x, y, 0x80008000u); }

/* Nibbles that were masked out as code - 8: a code among the bits of 1024 is 1024 + code. */
FKV_FN fkv_u32 pf_centred(fkv_u32 codes) {
    return fkv_fma_f16x2(fkv_mask_or(codes, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe408e408u);
}

/* Four tokens of a unit, and of its picked channel what the halves leave. */
FKV_FN void pf_put_unit(fkv_shared s, int stage, fkv_u32 key, fkv_u32 unit, const fkv_u32 *codes, const fkv_u32 *scale,
                        fkv_u32 pick) {
    fkv_u32 at = (fkv_u32)(PF_AT_K + stage * PF_K_BYTES);
    FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) {
        fkv_u32 c = codes[n];
        *pf_key_at(s, at, key + n, unit) =
            pf_words4{{pf_times(pf_centred(c), scale[0]), pf_times(pf_centred(c >> 8), scale[1]),
                       pf_times(pf_centred(c >> 4), scale[2]), pf_times(pf_centred(c >> 12), scale[3])}};
    }
    fkv_u32 shift = pick % 4 * 8 + (pick >> 2 & 1) * 4, own = (pick >> 16) * 0x10001u;
    FKV_UNROLL for (fkv_u32 n = 0; n < 4; n += 2) {
        fkv_u32 two = pf_centred((codes[n] >> shift & 15u) | codes[n + 1] >> shift << 16);
        fkv_u32 rest = fkv_fma_f16x2(two, own, pf_times(two, own) ^ 0x80008000u);
        *pf_rest_at(s, stage, key + n, unit) = (fkv_u16)rest;
        *pf_rest_at(s, stage, key + n + 1, unit) = (fkv_u16)(rest >> 16);
    }
}

/* Of the thread's unit of eight channels, the one with the largest scale, of equals the first: its number, and the scale as a
 * half above. Scales have at most 11 bits, so the lowest four of a float are free. */
FKV_FN fkv_u32 pf_pick(float scale, fkv_u32 channel) {
    fkv_u32 best = (fkv_bits_of(fkv_abs(scale)) & ~15u) | (7 - channel % 8) << 1 | (scale < 0.0f);
    FKV_UNROLL for (fkv_u32 m = 1; m < 8; m *= 2) best = fkv_max_bits(best, fkv_shuffle_xor_bits(best, m));
    float own = fkv_float_of((best & ~15u) | best << 31);
    return (7 - (best >> 1 & 7u)) | fkv_f32_to_f16(own) << 16;
}

/* Scales of the page into the table, offsets into the tile, each thread its channel; then its own units are read from there. */
FKV_FN void pf_share_scales(fkv_shared s, int stage, const pf_taken_keys &k) {
    fkv_u32 warp = s.index / 32, channel = s.index;
    fkv_u32 *tops = (fkv_u32 *)(s.base + PF_AT_TOPS);
    float scale = fkv_page_number(k.scale), bias = fkv_page_number(k.bias);
    fkv_u32 largest = fkv_warp_max_bits(fkv_max_bits(fkv_bits_of(fkv_abs(scale) * 1024.0f), fkv_bits_of(fkv_abs(bias))));
    if (s.index % 32 == 0) tops[warp] = largest;
    fkv_sync_team(2, 128);
    fkv_u32 exponent = fkv_max_bits(fkv_max_bits(tops[0], tops[1]), fkv_max_bits(tops[2], tops[3])) >> 23;
    exponent = exponent < 20 ? 20 : exponent > 240 ? 240 : exponent;
    float up = fkv_float_of((268 - exponent) << 23); /* biases below 2^15, scales below 2^5 */
    scale *= up;
    bias = fkv_fma(bias, up, 8.0f * scale);
    fkv_u32 pick = pf_pick(scale, channel);
    if (channel < FKV_D) {
        fkv_u32 at = (fkv_u32)(PF_AT_K + stage * PF_K_BYTES), place = pf_k_channel(channel % 8);
        ((fkv_u16 *)(s.base + PF_AT_TABLE))[channel / 8 * 8 + place] = (fkv_u16)fkv_f32_to_f16(scale);
        fkv_u32 high = fkv_f32_to_f16(bias);
        ((fkv_u16 *)pf_key_at(s, at, PF_KEYS, channel / 8))[place] = (fkv_u16)high;
        ((fkv_u16 *)pf_key_at(s, at, PF_KEYS + 1, channel / 8))[place] = (fkv_u16)fkv_f32_to_f16(bias - fkv_f16_to_f32(high));
        if (channel % 8 == 0) {
            ((fkv_u32 *)(s.base + PF_AT_TABLE + FKV_D * 2))[channel / 8] = pick;
            s.base[PF_AT_PICKS + stage * 16 + channel / 8] = (fkv_u8)(2 * pf_k_channel(pick & 7u));
        }
    }
    if (warp == 3) {
        fkv_u32 norm = pf_norm_unit(fkv_warp_max_bits(k.norm));
        if (s.index == 96) ((pf_page_unit *)(s.base + PF_AT_UNITS))[stage] = {fkv_float_of((exponent - 14) << 23), norm};
    }
    fkv_sync_team(2, 128);
}

FKV_FN void pf_put_sealed_keys(fkv_shared s, int stage, const pf_taken_keys &k) {
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    pf_share_scales(s, stage, k);
    FKV_UNROLL for (fkv_u32 o = 0; o < PF_OCTETS; o++) {
        fkv_u32 unit = 8 * o + lane % 8;
        if (unit >= PF_UNITS) continue;
        pf_words4 scales = ((const pf_words4 *)(s.base + PF_AT_TABLE))[unit];
        fkv_u32 pick = ((const fkv_u32 *)(s.base + PF_AT_TABLE + FKV_D * 2))[unit];
        pf_put_unit(s, stage, warp * 16 + pf_quad(lane) * 4, unit, k.codes[o], scales.w, pick);
    }
}

FKV_FN void pf_put_open_keys(fkv_shared s, int stage, int packed) {
    const fkv_u8 *page = pf_packed_page(s, packed);
    fkv_u32 at = (fkv_u32)(PF_AT_K + stage * PF_K_BYTES);
    for (fkv_u32 i = s.index; i < PF_KEYS * PF_UNITS; i += 128) {
        fkv_u32 unit = i % PF_UNITS, key = i / PF_UNITS;
        pf_words4 high, low;
        FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) {
            float x = opened::fkv_k_at(page, key, unit * 8 + pf_k_channel(2 * n));
            float y = opened::fkv_k_at(page, key, unit * 8 + pf_k_channel(2 * n + 1));
            high.w[n] = fkv_pack_f16(x, y);
            low.w[n] = fkv_pack_f16(x - fkv_f16_to_f32(high.w[n] & 0xffffu), y - fkv_f16_to_f32(high.w[n] >> 16));
        }
        *pf_key_at(s, at, key, unit) = high;
        *pf_key_at(s, PF_AT_LOW, key, unit) = low;
    }
    if (s.index < 2 * PF_UNITS) *pf_key_at(s, at, PF_KEYS + s.index % 2, s.index / 2) = pf_words4{{0, 0, 0, 0}};
    *(pf_words4 *)pf_rest_at(s, stage, s.index / 2, s.index % 2 * 8) = pf_words4{{0, 0, 0, 0}};
    if (s.index == 0) ((pf_page_unit *)(s.base + PF_AT_UNITS))[stage] = {1.0f, 0};
}

FKV_FN void pf_put_keys(fkv_shared s, const pf_item &x, fkv_u32 tile, int stage, int packed, const pf_taken_keys &k) {
    if (!pf_is_open(x, pf_first_key(x, tile) / FKV_PAGE_TOKENS)) return pf_put_sealed_keys(s, stage, k);
    /* there is one room for what halves leave: the tile before may still be read from it */
    if (tile > 0) fkv_gate_wait(s, pf_gate(PF_K_EMPTY, (int)((tile - 1) % PF_STAGES)), (tile - 1) / PF_STAGES % 2);
    pf_put_open_keys(s, stage, packed);
}

/* ---- values ---- */

constexpr float PF_VALUE_UNIT = 4.0f;

struct pf_taken_values {
    fkv_u32 codes[PF_LINES][4]; /* of four channels of each line, eight tokens */
    fkv_u32 norms[4];           /* of the eight */
};

FKV_FN void pf_take_values(fkv_shared s, const pf_item &x, fkv_u32 tile, int packed, pf_taken_values &v) {
    if (pf_is_open(x, pf_first_key(x, tile) / FKV_PAGE_TOKENS)) {
        v = pf_taken_values{};
        return;
    }
    fkv_u32 warp = s.index % 128 / 32, lane = s.index % 32, eight = lane % 8;
    const fkv_u8 *page = pf_packed_page(s, packed);
    const fkv_u8 *codes = page + FKV_V_CODES + eight / 2 * (16 * FKV_V_ROW_BYTES) + eight % 2 * 64 + pf_quad(lane) * 16;
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_LINES; i++) {
        fkv_u32 line = warp + 4 * i;
        pf_words4 four = *(const pf_words4 *)(codes + (line < FKV_D / 16 ? line : 0) * 128);
        FKV_UNROLL for (int n = 0; n < 4; n++) v.codes[i][n] = four.w[n];
    }
    pf_words4 norms = *(const pf_words4 *)(page + FKV_V_SCALES + eight * 16);
    fkv_u32 largest = 0;
    FKV_UNROLL for (int i = 0; i < 4; i++) {
        v.norms[i] = pf_norms_of(norms.w[i]);
        largest = fkv_max_bits(largest, pf_larger_norm(v.norms[i]));
    }
    fkv_u32 up = ((30 - pf_norm_unit(fkv_warp_max_bits(largest))) << 10) * 0x10001u; /* 2^15 below the unit */
    FKV_UNROLL for (int i = 0; i < 4; i++) v.norms[i] = pf_times(v.norms[i], up);
}

/* A weight of 0 does not hide a norm that is not finite: it becomes 0, and the rows that do see its token are marked. */
FKV_FN void pf_hide_odd_norms(fkv_shared s, fkv_u32 first_key, fkv_u32 *norms) {
    fkv_u32 eight = s.index % 8;
    for (fkv_u32 i = 0; i < 8; i++) {
        fkv_u32 part = 0x7c00u << 16 * (i % 2);
        if ((norms[i / 2] & part) != part) continue;
        norms[i / 2] &= ~(0xffffu << 16 * (i % 2));
        pf_mark_rows(s, first_key + 8 * eight + i);
    }
}

/* Eight tokens of a channel: levels and signs are halves in units of 2^-24 as they are. */
FKV_FN pf_words4 pf_eight_values(fkv_u32 x, const fkv_u32 *norms) {
    pf_words4 to;
    fkv_u32 signs[2] = {x << 4 & 0x80808080u,
                        x & 0x80808080u};    /* bytes: of the low nibbles, tokens 0 to 3, and of the high ones */
    FKV_UNROLL for (int i = 0; i < 2; i++) { /* nibbles: tokens 2i, 4 + 2i, 2i + 1, 5 + 2i */
        fkv_u32 levels = fkv_permute(fkv_v_levels(0), fkv_v_levels(4), x >> 16 * i & 0x7777u);
        to.w[i] = fkv_permute(levels, signs[0], i == 0 ? 0x5240u : 0x7260u);
        to.w[2 + i] = fkv_permute(levels, signs[1], i == 0 ? 0x5341u : 0x7361u);
    }
    FKV_UNROLL for (int i = 0; i < 4; i++) to.w[i] = pf_times(to.w[i], norms[i]);
    return to;
}

FKV_FN void pf_put_open_values(fkv_shared s, fkv_u32 first_key, int stage, int packed) {
    const fkv_u8 *page = pf_packed_page(s, packed);
    for (fkv_u32 i = s.index % 128; i < FKV_D * (PF_KEYS / 8); i += 128) {
        fkv_u32 channel = i % FKV_D, eight = i / FKV_D;
        float y[8];
        FKV_UNROLL for (fkv_u32 n = 0; n < 8; n++) {
            y[n] = opened::fkv_v_at(page, eight * 8 + n, channel) * (1.0f / PF_VALUE_UNIT);
            if (!(fkv_abs(y[n]) < 65520.0f)) y[n] = 0.0f, pf_mark_rows(s, first_key + eight * 8 + n);
        }
        *pf_value_at(s, (fkv_u32)(PF_AT_V + stage * PF_TILE_BYTES), channel, eight) =
            pf_words4{{fkv_pack_f16(y[0], y[1]), fkv_pack_f16(y[2], y[3]), fkv_pack_f16(y[4], y[5]), fkv_pack_f16(y[6], y[7])}};
    }
}

FKV_FN void pf_put_values(fkv_shared s, const pf_item &x, fkv_u32 tile, int stage, int packed, pf_taken_values &v) {
    fkv_u32 key = pf_first_key(x, tile);
    if (pf_is_open(x, key / FKV_PAGE_TOKENS)) return pf_put_open_values(s, key, stage, packed);
    fkv_u32 warp = s.index % 128 / 32, lane = s.index % 32;
    bool odd = false;
    FKV_UNROLL for (int i = 0; i < 4; i++) odd =
        odd || (v.norms[i] & 0x7c00u) == 0x7c00u || (v.norms[i] & 0x7c000000u) == 0x7c000000u;
    if (odd) pf_hide_odd_norms(s, key, v.norms);
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_LINES; i++) {
        fkv_u32 line = warp + 4 * i;
        if (line >= FKV_D / 16) break;
        FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) *
            pf_value_at(s, (fkv_u32)(PF_AT_V + stage * PF_TILE_BYTES), line * 16 + pf_quad(lane) * 4 + n, lane % 8) =
            pf_eight_values(v.codes[i][n], v.norms);
    }
}
