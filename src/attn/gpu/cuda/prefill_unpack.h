/* Prefill on warpgroups, second part: from packed pages to halves in shared memory. One warpgroup does this for all rows of the
 * block, each page once. Whole blocks come by the copy engine, PF_PACKED tiles ahead. A thread holds chunks of 16 packed bytes:
 * all are read before the first half is stored, since a read behind a store waits for it. Codes become halves by arithmetic on
 * two at a time: a code among the bits of 1024.0 is 1024 + code.
 *
 * K stays codes, which are exact; scales beside it become floats, and biases floats or channels of their own. V becomes values,
 * rounded to halves. One fence for each tile shows the keys of this tile and the values of the tile before to the products.
 */
/* Packed keys and values of a tile in shared memory: whole blocks where a page is no longer than a tile, else the tile's rows of
 * the six parts. */
constexpr bool PF_WHOLE = FKV_PAGE_TOKENS <= PF_KEYS;
constexpr int PF_SUB_TOKENS = PF_WHOLE ? FKV_PAGE_TOKENS : PF_KEYS;
constexpr int PF_SUB_BYTES = PF_WHOLE ? FKV_BLOCK_BYTES : PF_PACKED_BYTES;
constexpr int PF_K_SCALE_BYTES = FKV_K_BITS == 16 ? 0 : 2 * FKV_D / FKV_K_GROUP; /* of a row */
constexpr int PF_V_SCALE_BYTES = FKV_V_BITS == 16 ? 0 : 2 * FKV_D / FKV_V_GROUP;
constexpr int PF_SUB_K_CODES = PF_WHOLE ? FKV_K_CODES : 0;
constexpr int PF_SUB_K_SCALES = PF_WHOLE ? FKV_K_SCALES : PF_KEYS * pf_k::row_bytes;
constexpr int PF_SUB_K_BIASES = PF_WHOLE ? FKV_K_BIASES : PF_SUB_K_SCALES + PF_KEYS * PF_K_SCALE_BYTES;
constexpr int PF_SUB_V_CODES = PF_WHOLE ? FKV_V_CODES : PF_SUB_K_BIASES + PF_KEYS * PF_K_SCALE_BYTES;
constexpr int PF_SUB_V_SCALES = PF_WHOLE ? FKV_V_SCALES : PF_SUB_V_CODES + PF_KEYS * pf_v::row_bytes;
constexpr int PF_SUB_V_BIASES = PF_WHOLE ? FKV_V_BIASES : PF_SUB_V_SCALES + PF_KEYS * PF_V_SCALE_BYTES;

FKV_FN void pf_bring_part(fkv_shared s, fkv_u32 gate, fkv_u32 at, const fkv_u8 *part, fkv_u32 slot, int row_bytes) {
    if (row_bytes > 0) fkv_bring(s, gate, at, part + slot * (fkv_u32)row_bytes, (fkv_u32)(PF_KEYS * row_bytes));
}

/* By one thread: the packed bytes of a tile on their way. page: of its first key. */
FKV_FN void pf_bring_tile(fkv_shared s, const pf_item &x, fkv_u32 key, fkv_u32 page, int stage) {
    fkv_u32 gate = pf_gate(PF_PACKED_FULL, stage);
    fkv_u32 at = (fkv_u32)(PF_AT_PACKED + stage * PF_PACKED_BYTES);
    if (!PF_WHOLE) {
        const fkv_u8 *block = x.pool + (fkv_u64)page * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES);
        fkv_u32 slot = key % FKV_PAGE_TOKENS;
        fkv_bring_begin(s, gate, PF_PACKED_BYTES);
        pf_bring_part(s, gate, at + PF_SUB_K_CODES, block + FKV_K_CODES, slot, pf_k::row_bytes);
        pf_bring_part(s, gate, at + PF_SUB_K_SCALES, block + FKV_K_SCALES, slot, PF_K_SCALE_BYTES);
        pf_bring_part(s, gate, at + PF_SUB_K_BIASES, block + FKV_K_BIASES, slot, PF_K_SCALE_BYTES);
        pf_bring_part(s, gate, at + PF_SUB_V_CODES, block + FKV_V_CODES, slot, pf_v::row_bytes);
        pf_bring_part(s, gate, at + PF_SUB_V_SCALES, block + FKV_V_SCALES, slot, PF_V_SCALE_BYTES);
        pf_bring_part(s, gate, at + PF_SUB_V_BIASES, block + FKV_V_BIASES, slot, PF_V_SCALE_BYTES);
    } else { /* pages that no row sees stay away */
        fkv_u32 seen = 0, n_seen = 0;
        for (fkv_u32 i = 0; i < PF_KEYS / PF_SUB_TOKENS; i++) {
            fkv_u32 first = key + i * PF_SUB_TOKENS;
            bool any = first <= x.last && (FKV_WINDOW == 0 || first + PF_SUB_TOKENS > x.begin || pf_is_sink(first));
            seen |= (fkv_u32)any << i;
            n_seen += any;
        }
        fkv_bring_begin(s, gate, n_seen * FKV_BLOCK_BYTES);
        for (fkv_u32 i = 0; i < PF_KEYS / PF_SUB_TOKENS; i++) {
            if ((seen >> i & 1) == 0) continue;
            if (i > 0) page = pf_page_at(x, key / FKV_PAGE_TOKENS + i);
            fkv_bring(s, gate, at + i * FKV_BLOCK_BYTES, x.pool + (fkv_u64)page * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES),
                      FKV_BLOCK_BYTES);
        }
    }
    fkv_bring_end(s, gate);
}

FKV_FN const fkv_u8 *pf_packed_row(fkv_shared s, int stage, fkv_u32 key, int part, int row_bytes) {
    return s.base + PF_AT_PACKED + (fkv_u32)stage * PF_PACKED_BYTES + key / PF_SUB_TOKENS * PF_SUB_BYTES + part +
           key % PF_SUB_TOKENS * row_bytes;
}

/* Unit `u` of a chunk as codes in four pairs of halves; 16 bits: as values. */
template <int BITS> FKV_FN void pf_unit_codes(const fkv_u32 *w, int u, fkv_u32 *h) {
    if (BITS == 16) {
        FKV_UNROLL for (int i = 0; i < 4; i++) h[i] =
            FKV_PAGE_BF16 ? fkv_pack_f16(fkv_float_of(w[i] << 16), fkv_float_of(w[i] & 0xffff0000u)) : w[i];
    } else if (BITS == 8) { /* 0x6400 is 1024 and its last bit 1 */
        FKV_UNROLL for (int i = 0; i < 2; i++) {
            h[2 * i] = fkv_fma_f16x2(fkv_permute(w[2 * u + i], 0x64646464u, 0x5140), 0x3c003c00u, 0xe400e400u);
            h[2 * i + 1] = fkv_fma_f16x2(fkv_permute(w[2 * u + i], 0x64646464u, 0x5342), 0x3c003c00u, 0xe400e400u);
        }
    } else if (BITS == 4) {
        fkv_u32 x = w[u], y = w[u] >> 8;
        h[0] = fkv_fma_f16x2(fkv_mask_or(x, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe400e400u);
        h[1] = fkv_fma_f16x2(fkv_mask_or(x, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd400d400u); /* / 16 - 64 */
        h[2] = fkv_fma_f16x2(fkv_mask_or(y, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe400e400u);
        h[3] = fkv_fma_f16x2(fkv_mask_or(y, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd400d400u);
    } else {
        fkv_u32 x = w[u / 2] >> (u % 2 * 8);
        h[0] = fkv_fma_f16x2(fkv_mask_or(x, 0x00030003u, 0x64006400u), 0x3c003c00u, 0xe400e400u);
        h[1] = fkv_fma_f16x2(fkv_mask_or(x, 0x000c000cu, 0x64006400u), 0x34003400u, 0xdc00dc00u); /* / 4 - 256 */
        h[2] = fkv_fma_f16x2(fkv_mask_or(x, 0x00300030u, 0x64006400u), 0x2c002c00u, 0xd400d400u);
        h[3] = fkv_fma_f16x2(fkv_mask_or(x, 0x00c000c0u, 0x64006400u), 0x24002400u, 0xcc00cc00u); /* / 64 - 16 */
    }
}

FKV_FN fkv_u32 pf_affine(fkv_u32 codes, fkv_u32 scale, fkv_u32 bias) {
    if (FKV_PAGE_BF16) {
        float s = fkv_page_number(scale), b = fkv_page_number(bias);
        return fkv_pack_f16(fkv_fma(fkv_f16_to_f32(codes & 0xffffu), s, b), fkv_fma(fkv_f16_to_f32(codes >> 16), s, b));
    }
    return fkv_fma_f16x2(codes, scale * 0x10001u, bias * 0x10001u);
}

/* What a thread unpacks of one side of a tile: chunks of packed rows, and their scales and biases. */
template <class SIDE> struct pf_chunks {
    fkv_u32 w[SIDE::batch][SIDE::words];
    fkv_u32 scale[SIDE::batch], bias[SIDE::batch];
};

template <class SIDE> struct pf_spot {                    /* of a thread's i-th chunk */
    static constexpr bool even = 128 % SIDE::chunks == 0; /* a thread's chunks lie in one column */
    static constexpr fkv_u32 key_step = even ? 128 / SIDE::chunks : 0;
    fkv_u32 chunk, key, turn;
    bool any;
    FKV_FN pf_spot at(fkv_u32 thread, fkv_u32 i) {
        fkv_u32 number = thread + 128 * i;
        pf_spot x;
        x.any = SIDE::chunks * PF_KEYS % (128 * SIDE::batch) == 0 || number < SIDE::chunks * PF_KEYS;
        x.chunk = even ? thread % SIDE::chunks : number % SIDE::chunks;
        x.key = even ? SIDE::key_of(thread) + i * key_step : SIDE::key_of(number);
        x.turn = even && key_step % 8 == 0 ? SIDE::key_of(thread) % 8 : x.key % 8;
        return x;
    }
};

template <class SIDE, int BITS, int GROUP, bool VALUES>
FKV_FN void pf_take(fkv_shared s, int packed, fkv_u32 batch, pf_chunks<SIDE> &c) {
    FKV_UNROLL for (fkv_u32 i = 0; i < SIDE::batch; i++) {
        pf_spot<SIDE> spot = pf_spot<SIDE>::at(s.index % 128, batch * SIDE::batch + i);
        if (!spot.any) break;
        const fkv_u8 *codes = pf_packed_row(s, packed, spot.key, VALUES ? PF_SUB_V_CODES : PF_SUB_K_CODES, SIDE::row_bytes) +
                              spot.chunk * SIDE::chunk_bytes;
        if (SIDE::words == 4) {
            pf_words4 x4 = *(const pf_words4 *)codes;
            FKV_UNROLL for (int k = 0; k < SIDE::words; k++) c.w[i][k] = x4.w[k];
        } else {
            pf_words2 x2 = *(const pf_words2 *)codes;
            FKV_UNROLL for (int k = 0; k < 2; k++) c.w[i][k] = x2.w[k];
        }
        if (VALUES && BITS != 16) {
            fkv_u32 group = spot.chunk * SIDE::channels / GROUP * 2;
            c.scale[i] = *(const fkv_u16 *)(pf_packed_row(s, packed, spot.key, PF_SUB_V_SCALES, PF_V_SCALE_BYTES) + group);
            c.bias[i] = *(const fkv_u16 *)(pf_packed_row(s, packed, spot.key, PF_SUB_V_BIASES, PF_V_SCALE_BYTES) + group);
        }
    }
}

/* In a tile that some row does not see in full, a weight of 0 would not hide values that are not finite: they become 0, and the
 * rows that do see them are marked, to become NaN in the end. */
FKV_FN bool pf_hide_odd(fkv_u32 *h) {
    bool odd = false;
    FKV_UNROLL for (int k = 0; k < 4; k++) {
        bool finite = (h[k] & 0x7c00u) != 0x7c00u && (h[k] & 0x7c000000u) != 0x7c000000u;
        odd = odd || !finite;
        h[k] = finite ? h[k] : 0;
    }
    return odd;
}

/* EDGE: of V alone, in a tile that some row does not see in full. */
template <class SIDE, int BITS, bool VALUES, bool SPREAD, bool EDGE>
FKV_FN void pf_put(fkv_shared s, const pf_item &x, fkv_u32 first_key, fkv_u32 at, fkv_u32 batch, const pf_chunks<SIDE> &c) {
    FKV_UNROLL for (fkv_u32 i = 0; i < SIDE::batch; i++) {
        pf_spot<SIDE> spot = pf_spot<SIDE>::at(s.index % 128, batch * SIDE::batch + i);
        if (!spot.any) break;
        bool odd = false;
        FKV_UNROLL for (int u = 0; u < SIDE::units; u++) {
            fkv_u32 h[4];
            pf_unit_codes<BITS>(c.w[i], u, h);
            if (VALUES && BITS != 16) FKV_UNROLL for (int k = 0; k < 4; k++) h[k] = pf_affine(h[k], c.scale[i], c.bias[i]);
            if (EDGE) odd = pf_hide_odd(h) || odd;
            fkv_u32 unit = SIDE::unit_at(spot.chunk, (fkv_u32)u, SPREAD);
            pf_words4 *to =
                (pf_words4 *)(s.base + at + unit / 8 * (PF_KEYS * 128) + spot.key * 128 + ((unit % 8) ^ spot.turn) * 16);
            *to = pf_words4{{h[0], h[1], h[2], h[3]}};
        }
        if (EDGE && odd) pf_mark_rows(s, first_key + spot.key);
    }
}

constexpr fkv_u32 PF_SCALES_EACH = (PF_GROUPS * PF_KEYS + 127) / 128; /* of a thread */

FKV_FN void pf_take_scales(fkv_shared s, int packed, fkv_u32 *scale, fkv_u32 *bias) {
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_SCALES_EACH; i++) {
        fkv_u32 number = s.index % 128 + 128 * i;
        if (PF_GROUPS * PF_KEYS % 128 != 0 && number >= PF_GROUPS * PF_KEYS) break;
        scale[i] = ((const fkv_u16 *)pf_packed_row(s, packed, number / PF_GROUPS, PF_SUB_K_SCALES,
                                                   PF_K_SCALE_BYTES))[number % PF_GROUPS];
        bias[i] = ((const fkv_u16 *)pf_packed_row(s, packed, number / PF_GROUPS, PF_SUB_K_BIASES,
                                                  PF_K_SCALE_BYTES))[number % PF_GROUPS];
    }
}

FKV_FN void pf_put_scales(fkv_shared s, int stage, const fkv_u32 *scale, const fkv_u32 *bias) {
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_SCALES_EACH; i++) {
        fkv_u32 number = s.index % 128 + 128 * i;
        if (PF_GROUPS * PF_KEYS % 128 != 0 && number >= PF_GROUPS * PF_KEYS) break;
        pf_floats2 *to =
            (pf_floats2 *)(s.base + PF_AT_SCALES + stage * PF_SCALES_BYTES) + number % PF_GROUPS * PF_KEYS + number / PF_GROUPS;
        *to = pf_floats2{fkv_page_number(scale[i]), fkv_page_number(bias[i])};
    }
}

/* The same where biases are channels (PF_BIASED): x = s0 . (q . codes of group 0 + sum over groups of (b / s0) . sum(q)) + s1 .
 * ... A ratio b / s0 is two halves, and so is a sum of q: four channels of each group, 22 bits of both. The sums come in units of
 * 1 / PF_SUM_UNIT and the ratios in PF_SUM_UNIT, so that neither leaves the halves' range: a row of q is below 2 everywhere, and
 * s0 is taken as at least 2^-23 (groups of 64) of the largest bias, which changes that key by 2^-15 of it at most.
 */
/* Where a key's scale lies: the four of a thread's sums of 16 keys side by side. */
FKV_FN fkv_u32 pf_scale_place(fkv_u32 key) { return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2; }

/* Scales and biases of a key, and which group of them is this thread's. */
struct pf_key_scales {
    fkv_u32 key, group;
    fkv_u32 scale[PF_GROUPS], bias[PF_GROUPS];
};

FKV_FN pf_key_scales pf_take_biases(fkv_shared s, int packed) {
    pf_key_scales x;
    fkv_u32 number = s.index % (PF_GROUPS * PF_KEYS < 128 ? PF_GROUPS * PF_KEYS : 128); /* some are read twice */
    x.key = number / PF_GROUPS, x.group = number % PF_GROUPS;
    const fkv_u16 *scales = (const fkv_u16 *)pf_packed_row(s, packed, x.key, PF_SUB_K_SCALES, PF_K_SCALE_BYTES);
    const fkv_u16 *biases = (const fkv_u16 *)pf_packed_row(s, packed, x.key, PF_SUB_K_BIASES, PF_K_SCALE_BYTES);
    FKV_UNROLL for (int g = 0; g < PF_GROUPS; g++) x.scale[g] = scales[g], x.bias[g] = biases[g];
    return x;
}

FKV_FN void pf_put_biases(fkv_shared s, int stage, const pf_key_scales &x) {
    if (PF_GROUPS * PF_KEYS < 128 && s.index % 128 >= PF_GROUPS * PF_KEYS) return;
    float unit = fkv_page_number(x.scale[0]), scale = unit, bias = fkv_page_number(x.bias[0]);
    float largest = fkv_abs(bias);
    FKV_UNROLL for (int g = 1; g < PF_GROUPS; g++) {
        float other_scale = fkv_page_number(x.scale[g]), other = fkv_page_number(x.bias[g]);
        largest = fkv_max(largest, fkv_abs(other));
        scale = x.group == (fkv_u32)g ? other_scale : scale;
        bias = x.group == (fkv_u32)g ? other : bias;
    }
    float least = largest * (1.0f / (32768.0f * PF_SUM_UNIT));
    unit = fkv_abs(unit) < least ? least : unit;
    float ratio = bias * (fkv_reciprocal(unit) * (1.0f / PF_SUM_UNIT));
    ratio = largest > 0.0f ? ratio : 0.0f;
    fkv_u32 high = fkv_f32_to_f16(ratio);
    fkv_u32 low = fkv_f32_to_f16(ratio - fkv_f16_to_f32(high));
    pf_words2 *to = (pf_words2 *)(s.base + PF_AT_BIASES + stage * PF_BIASES_BYTES + x.key * 128 + x.key % 8 * 16) + x.group;
    *to = pf_words2{{high * 0x10001u, low * 0x10001u}};
    ((float *)(s.base + PF_AT_SCALES + stage * PF_SCALES_BYTES))[x.group * PF_KEYS + pf_scale_place(x.key)] =
        x.group == 0 ? unit : scale;
}

/* The channels behind the biases stay zeroes. By all threads, before the first tile. */
FKV_FN void pf_clear_stages(fkv_shared s) {
    for (fkv_u32 at = s.index * 16; PF_BIASED && at < PF_STAGES * PF_BIASES_BYTES; at += PF_THREADS * 16)
        *(pf_words4 *)(s.base + PF_AT_BIASES + at) = pf_words4{{0, 0, 0, 0}};
}

constexpr fkv_u32 PF_WEIGHT_EXPONENT = 0; /* weights are in units of 2^-that */
constexpr float PF_VALUE_UNIT = 1.0f;     /* what halves of values are in units of */

/* What prefill_feed.h asks for: the packed keys of a tile in registers, then as halves in a stage; and the values. */
struct pf_taken_keys {
    pf_chunks<pf_k> codes;
    fkv_u32 scale[PF_SCALES_EACH], bias[PF_SCALES_EACH];
    pf_key_scales biases;
};
typedef pf_chunks<pf_v> pf_taken_values;

FKV_FN void pf_take_keys(fkv_shared s, const pf_item &, fkv_u32, int packed, pf_taken_keys &k) {
    pf_take<pf_k, FKV_K_BITS, FKV_K_GROUP, false>(s, packed, 0, k.codes);
    if (PF_BIASED)
        k.biases = pf_take_biases(s, packed);
    else if (PF_SCALED)
        pf_take_scales(s, packed, k.scale, k.bias);
}

FKV_FN void pf_put_keys(fkv_shared s, const pf_item &x, fkv_u32, int stage, int packed, pf_taken_keys &k) {
    fkv_u32 at = (fkv_u32)(PF_AT_K + stage * PF_K_BYTES);
    pf_put<pf_k, FKV_K_BITS, false, pf_k::spread, false>(s, x, 0, at, 0, k.codes);
    for (fkv_u32 b = 1; b < pf_k::batches; b++) {
        pf_take<pf_k, FKV_K_BITS, FKV_K_GROUP, false>(s, packed, b, k.codes);
        pf_put<pf_k, FKV_K_BITS, false, pf_k::spread, false>(s, x, 0, at, b, k.codes);
    }
    if (PF_BIASED)
        pf_put_biases(s, stage, k.biases);
    else if (PF_SCALED)
        pf_put_scales(s, stage, k.scale, k.bias);
}

FKV_FN void pf_take_values(fkv_shared s, const pf_item &, fkv_u32, int packed, pf_taken_values &v) {
    pf_take<pf_v, FKV_V_BITS, FKV_V_GROUP, true>(s, packed, 0, v);
}

template <bool EDGE>
FKV_FN void pf_put_tile_values(fkv_shared s, const pf_item &x, fkv_u32 first_key, int stage, int packed, pf_taken_values &v) {
    fkv_u32 at = (fkv_u32)(PF_AT_V + stage * PF_TILE_BYTES);
    pf_put<pf_v, FKV_V_BITS, true, true, EDGE>(s, x, first_key, at, 0, v);
    for (fkv_u32 b = 1; b < pf_v::batches; b++) {
        pf_take<pf_v, FKV_V_BITS, FKV_V_GROUP, true>(s, packed, b, v);
        pf_put<pf_v, FKV_V_BITS, true, true, EDGE>(s, x, first_key, at, b, v);
    }
}

FKV_FN void pf_put_values(fkv_shared s, const pf_item &x, fkv_u32 tile, int stage, int packed, pf_taken_values &v) {
    fkv_u32 key = pf_first_key(x, tile);
    bool edge = key + PF_KEYS - 1 > pf_position(x, 0) ||
                (FKV_WINDOW != 0 && x.last - key + 1 >= FKV_WINDOW + 1 && key + PF_KEYS > FKV_SINKS);
    if (edge)
        pf_put_tile_values<true>(s, x, key, stage, packed, v);
    else
        pf_put_tile_values<false>(s, x, key, stage, packed, v);
}
