/* Part of the prefill kernel in prefill_wgmma.h: unpacks pages that are not sealed and stores their keys and values as fp16 in
 * shared memory. One warpgroup unpacks the pages for all query rows of the block. Packed tiles are loaded with bulk copies,
 * PF_PACKED tiles ahead. A thread reads all its chunks of 16 packed bytes before it stores the first fp16 value, because a read
 * after a store would wait for that store. Codes are converted two at a time: inserting a code into the low bits of the fp16
 * value 1024.0 gives 1024 + code.
 *
 * Keys are stored in shared memory as codes, which are exact in fp16. Their scales are converted to float, and their biases are
 * converted to float or stored as extra channels. V is decoded and rounded to fp16. One fence per tile makes the keys of this
 * tile and the values of the previous tile visible to the matrix products.
 */
/* Layout of a packed tile in shared memory. If a page has at most PF_KEYS tokens, the tile consists of whole page blocks.
 * Otherwise, it consists of PF_KEYS rows of each of the six arrays of a block (codes, scales and biases of K and V). */
constexpr bool PF_WHOLE = FKV_PAGE_TOKENS <= PF_KEYS;
constexpr int PF_SUB_TOKENS = PF_WHOLE ? FKV_PAGE_TOKENS : PF_KEYS;
constexpr int PF_SUB_BYTES = PF_WHOLE ? FKV_BLOCK_BYTES : PF_PACKED_BYTES;
constexpr int PF_K_SCALE_BYTES = FKV_K_BITS == 16 ? 0 : 2 * FKV_D / FKV_K_GROUP; /* bytes of scales per K row */
constexpr int PF_V_SCALE_BYTES = FKV_V_BITS == 16 ? 0 : 2 * FKV_D / FKV_V_GROUP;
constexpr int PF_SUB_K_CODES = PF_WHOLE ? FKV_K_CODES : 0;
constexpr int PF_SUB_K_SCALES = PF_WHOLE ? FKV_K_SCALES : PF_KEYS * pf_k::row_bytes;
constexpr int PF_SUB_K_BIASES = PF_WHOLE ? FKV_K_BIASES : PF_SUB_K_SCALES + PF_KEYS * PF_K_SCALE_BYTES;
constexpr int PF_SUB_V_CODES = PF_WHOLE ? FKV_V_CODES : PF_SUB_K_BIASES + PF_KEYS * PF_K_SCALE_BYTES;
constexpr int PF_SUB_V_SCALES = PF_WHOLE ? FKV_V_SCALES : PF_SUB_V_CODES + PF_KEYS * pf_v::row_bytes;
constexpr int PF_SUB_V_BIASES = PF_WHOLE ? FKV_V_BIASES : PF_SUB_V_SCALES + PF_KEYS * PF_V_SCALE_BYTES;

FKV_FN void pf_load_packed_part(fkv_shared s, fkv_u32 mbarrier, fkv_u32 at, const fkv_u8 *part, fkv_u32 slot, int row_bytes) {
    if (row_bytes > 0) fkv_bulk_copy(s, mbarrier, at, part + slot * (fkv_u32)row_bytes, (fkv_u32)(PF_KEYS * row_bytes));
}

/* Starts the bulk copy of a packed tile. `key` is the position of the tile's first key, and `page` is the pool page that contains
 * this key. Called by one thread. */
FKV_FN void pf_load_packed_tile(fkv_shared s, const pf_item &x, fkv_u32 key, fkv_u32 page, int stage) {
    fkv_u32 mbarrier = pf_mbarrier(PF_PACKED_FULL, stage);
    fkv_u32 at = (fkv_u32)(PF_AT_PACKED + stage * PF_PACKED_BYTES);
    if (!PF_WHOLE) {
        const fkv_u8 *block = x.pool + (fkv_u64)page * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES);
        fkv_u32 slot = key % FKV_PAGE_TOKENS;
        fkv_bulk_copy_begin(s, mbarrier, PF_PACKED_BYTES);
        pf_load_packed_part(s, mbarrier, at + PF_SUB_K_CODES, block + FKV_K_CODES, slot, pf_k::row_bytes);
        pf_load_packed_part(s, mbarrier, at + PF_SUB_K_SCALES, block + FKV_K_SCALES, slot, PF_K_SCALE_BYTES);
        pf_load_packed_part(s, mbarrier, at + PF_SUB_K_BIASES, block + FKV_K_BIASES, slot, PF_K_SCALE_BYTES);
        pf_load_packed_part(s, mbarrier, at + PF_SUB_V_CODES, block + FKV_V_CODES, slot, pf_v::row_bytes);
        pf_load_packed_part(s, mbarrier, at + PF_SUB_V_SCALES, block + FKV_V_SCALES, slot, PF_V_SCALE_BYTES);
        pf_load_packed_part(s, mbarrier, at + PF_SUB_V_BIASES, block + FKV_V_BIASES, slot, PF_V_SCALE_BYTES);
    } else { /* copy only the pages that are visible to at least one row */
        fkv_u32 visible = 0, n_visible = 0;
        for (fkv_u32 i = 0; i < PF_KEYS / PF_SUB_TOKENS; i++) {
            fkv_u32 first = key + i * PF_SUB_TOKENS;
            bool any = first <= x.last && (FKV_WINDOW == 0 || first + PF_SUB_TOKENS > x.begin || pf_is_sink(first));
            visible |= (fkv_u32)any << i;
            n_visible += any;
        }
        fkv_bulk_copy_begin(s, mbarrier, n_visible * FKV_BLOCK_BYTES);
        for (fkv_u32 i = 0; i < PF_KEYS / PF_SUB_TOKENS; i++) {
            if ((visible >> i & 1) == 0) continue;
            if (i > 0) page = pf_page_at(x, key / FKV_PAGE_TOKENS + i);
            fkv_bulk_copy(s, mbarrier, at + i * FKV_BLOCK_BYTES, x.pool + (fkv_u64)page * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES),
                          FKV_BLOCK_BYTES);
        }
    }
    fkv_bulk_copy_end(s, mbarrier);
}

FKV_FN const fkv_u8 *pf_packed_row(fkv_shared s, int stage, fkv_u32 key, int part, int row_bytes) {
    return s.base + PF_AT_PACKED + (fkv_u32)stage * PF_PACKED_BYTES + key / PF_SUB_TOKENS * PF_SUB_BYTES + part +
           key % PF_SUB_TOKENS * row_bytes;
}

/* Converts unit u of a chunk (eight values) to four pairs of fp16 values. The result holds codes, or decoded values if
 * the page stores 16-bit values. */
template <int BITS> FKV_FN void pf_unit_codes(const fkv_u32 *w, int u, fkv_u32 *h) {
    if (BITS == 16) {
        FKV_UNROLL for (int i = 0; i < 4; i++) h[i] =
            FKV_PAGE_BF16 ? fkv_pack_f16(fkv_float_of(w[i] << 16), fkv_float_of(w[i] & 0xffff0000u)) : w[i];
    } else if (BITS == 8) { /* 0x6400 is 1024.0 in fp16, where the lowest fraction bit has the value 1 */
        FKV_UNROLL for (int i = 0; i < 2; i++) {
            h[2 * i] = fkv_fma_f16x2(fkv_permute(w[2 * u + i], 0x64646464u, 0x5140), 0x3c003c00u, 0xe400e400u);
            h[2 * i + 1] = fkv_fma_f16x2(fkv_permute(w[2 * u + i], 0x64646464u, 0x5342), 0x3c003c00u, 0xe400e400u);
        }
    } else if (BITS == 4) {
        fkv_u32 x = w[u], y = w[u] >> 8;
        h[0] = fkv_fma_f16x2(fkv_mask_or(x, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe400e400u);
        h[1] = fkv_fma_f16x2(fkv_mask_or(x, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd400d400u); /* (64 + code) - 64 = code */
        h[2] = fkv_fma_f16x2(fkv_mask_or(y, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe400e400u);
        h[3] = fkv_fma_f16x2(fkv_mask_or(y, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd400d400u);
    } else {
        fkv_u32 x = w[u / 2] >> (u % 2 * 8);
        h[0] = fkv_fma_f16x2(fkv_mask_or(x, 0x00030003u, 0x64006400u), 0x3c003c00u, 0xe400e400u);
        h[1] = fkv_fma_f16x2(fkv_mask_or(x, 0x000c000cu, 0x64006400u), 0x34003400u, 0xdc00dc00u); /* (256 + code) - 256 = code */
        h[2] = fkv_fma_f16x2(fkv_mask_or(x, 0x00300030u, 0x64006400u), 0x2c002c00u, 0xd400d400u);
        h[3] = fkv_fma_f16x2(fkv_mask_or(x, 0x00c000c0u, 0x64006400u), 0x24002400u, 0xcc00cc00u); /* (16 + code) - 16 = code */
    }
}

FKV_FN fkv_u32 pf_affine(fkv_u32 codes, fkv_u32 scale, fkv_u32 bias) {
    if (FKV_PAGE_BF16) {
        float s = fkv_page_value(scale), b = fkv_page_value(bias);
        return fkv_pack_f16(fkv_fma(fkv_f16_to_f32(codes & 0xffffu), s, b), fkv_fma(fkv_f16_to_f32(codes >> 16), s, b));
    }
    return fkv_fma_f16x2(codes, scale * 0x10001u, bias * 0x10001u);
}

/* Packed chunks of K or V that a thread holds in registers, with their scales and biases. */
template <class SIDE> struct pf_chunks {
    fkv_u32 w[SIDE::batch][SIDE::words];
    fkv_u32 scale[SIDE::batch], bias[SIDE::batch];
};

template <class SIDE> struct pf_chunk_position {          /* position, within the tile, of a chunk that a thread unpacks */
    static constexpr bool even = 128 % SIDE::chunks == 0; /* true if all chunks of a thread cover the same channels */
    static constexpr fkv_u32 key_step = even ? 128 / SIDE::chunks : 0;
    fkv_u32 chunk, key, turn;
    bool any;
    FKV_FN pf_chunk_position at(fkv_u32 thread, fkv_u32 i) {
        fkv_u32 number = thread + 128 * i;
        pf_chunk_position x;
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
        pf_chunk_position<SIDE> spot = pf_chunk_position<SIDE>::at(s.index % 128, batch * SIDE::batch + i);
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

/* Replaces non-finite fp16 values with 0 and returns true if there were any. Used in partly masked tiles, because a weight of 0
 * would not cancel non-finite values. The caller marks the rows to which the affected token is visible, and the outputs of these
 * rows are set to NaN at the end. */
FKV_FN bool pf_clear_nonfinite(fkv_u32 *h) {
    bool nonfinite = false;
    FKV_UNROLL for (int k = 0; k < 4; k++) {
        bool finite = (h[k] & 0x7c00u) != 0x7c00u && (h[k] & 0x7c000000u) != 0x7c000000u;
        nonfinite = nonfinite || !finite;
        h[k] = finite ? h[k] : 0;
    }
    return nonfinite;
}

/* Stores a batch of chunks as fp16 values. EDGE is true for the values of a tile in which at least one token is masked for at
 * least one row. */
template <class SIDE, int BITS, bool VALUES, bool SPREAD, bool EDGE>
FKV_FN void pf_put(fkv_shared s, const pf_item &x, fkv_u32 first_key, fkv_u32 at, fkv_u32 batch, const pf_chunks<SIDE> &c) {
    FKV_UNROLL for (fkv_u32 i = 0; i < SIDE::batch; i++) {
        pf_chunk_position<SIDE> spot = pf_chunk_position<SIDE>::at(s.index % 128, batch * SIDE::batch + i);
        if (!spot.any) break;
        bool nonfinite = false;
        FKV_UNROLL for (int u = 0; u < SIDE::units; u++) {
            fkv_u32 h[4];
            pf_unit_codes<BITS>(c.w[i], u, h);
            if (VALUES && BITS != 16) FKV_UNROLL for (int k = 0; k < 4; k++) h[k] = pf_affine(h[k], c.scale[i], c.bias[i]);
            if (EDGE) nonfinite = pf_clear_nonfinite(h) || nonfinite;
            fkv_u32 unit = SIDE::unit_at(spot.chunk, (fkv_u32)u, SPREAD);
            pf_words4 *to =
                (pf_words4 *)(s.base + at + unit / 8 * (PF_KEYS * 128) + spot.key * 128 + ((unit % 8) ^ spot.turn) * 16);
            *to = pf_words4{{h[0], h[1], h[2], h[3]}};
        }
        if (EDGE && nonfinite) pf_mark_rows(s, first_key + spot.key);
    }
}

constexpr fkv_u32 PF_SCALES_EACH = (PF_GROUPS * PF_KEYS + 127) / 128; /* number of scales that each thread converts */

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
        *to = pf_floats2{fkv_page_value(scale[i]), fkv_page_value(bias[i])};
    }
}

/* If PF_BIASED is true, the biases of K are stored as extra channels of the keys. For group g of a key, let s[g] be the scale,
 * b[g] the bias, dot[g] the dot product of the query and the codes, and sum[g] the sum of the query values. The score of the key
 * is
 *
 *   s[0] * (dot[0] + sum over all g of (b[g] / s[0] * sum[g])) + sum over g > 0 of (s[g] * dot[g])
 *
 * Each ratio b[g] / s[0] and each sum[g] is split into two fp16 values, which together have 22 significant bits. The product of
 * two split factors has four terms, so each group needs four extra channels. sum[g] is multiplied by PF_SUM_UNIT and the ratios
 * are divided by PF_SUM_UNIT, so that both stay in the range of fp16. All values of a query row are below 2. s[0] is raised to at
 * least 2^-23 of the largest bias (for groups of 64), which changes a key by at most 2^-15 of that bias. */
/* Returns the index of a key's scale in shared memory. The scales that a thread needs for its scores of 16 keys are four adjacent
 * entries. */
FKV_FN fkv_u32 pf_scale_place(fkv_u32 key) { return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2; }

/* Scales and biases of one key in all scale groups, held by a thread. The thread stores the scale and bias of group `group`. */
struct pf_key_scales {
    fkv_u32 key, group;
    fkv_u32 scale[PF_GROUPS], bias[PF_GROUPS];
};

FKV_FN pf_key_scales pf_take_biases(fkv_shared s, int packed) {
    pf_key_scales x;
    fkv_u32 number = s.index % (PF_GROUPS * PF_KEYS < 128 ? PF_GROUPS * PF_KEYS : 128); /* some scales are read by two threads */
    x.key = number / PF_GROUPS, x.group = number % PF_GROUPS;
    const fkv_u16 *scales = (const fkv_u16 *)pf_packed_row(s, packed, x.key, PF_SUB_K_SCALES, PF_K_SCALE_BYTES);
    const fkv_u16 *biases = (const fkv_u16 *)pf_packed_row(s, packed, x.key, PF_SUB_K_BIASES, PF_K_SCALE_BYTES);
    FKV_UNROLL for (int g = 0; g < PF_GROUPS; g++) x.scale[g] = scales[g], x.bias[g] = biases[g];
    return x;
}

FKV_FN void pf_put_biases(fkv_shared s, int stage, const pf_key_scales &x) {
    if (PF_GROUPS * PF_KEYS < 128 && s.index % 128 >= PF_GROUPS * PF_KEYS) return;
    float unit = fkv_page_value(x.scale[0]), scale = unit, bias = fkv_page_value(x.bias[0]);
    float largest = fkv_abs(bias);
    FKV_UNROLL for (int g = 1; g < PF_GROUPS; g++) {
        float other_scale = fkv_page_value(x.scale[g]), other = fkv_page_value(x.bias[g]);
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

/* Zeroes the unused channels that follow the biases, before the first tile. Called by all threads. */
FKV_FN void pf_clear_stages(fkv_shared s) {
    for (fkv_u32 at = s.index * 16; PF_BIASED && at < PF_STAGES * PF_BIASES_BYTES; at += PF_THREADS * 16)
        *(pf_words4 *)(s.base + PF_AT_BIASES + at) = pf_words4{{0, 0, 0, 0}};
}

constexpr fkv_u32 PF_WEIGHT_EXPONENT = 0; /* softmax weights are multiplied by 2^PF_WEIGHT_EXPONENT */
constexpr float PF_VALUE_UNIT = 1.0f;     /* output sums are multiplied by this factor */

/* Interface to prefill_feed.h. The pf_take functions read the packed keys or values of a tile into registers, and the pf_put
 * functions store these keys or values in a stage, as fp16. */
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
