/* Rows of queries over packed pages on matrices of 8 x 8 floats: what prefill_simdgroup.h and decode_simdgroup.h share. A block
 * is four simdgroups and 8, 16 or 32 rows (queries x heads of a KV head); all of them meet the same tiles of 32 keys, one after
 * the other:
 *
 *   keys     a slab of 64 channels at a time is unpacked into threadgroup memory, 16 channels of one key by each thread; each
 *            simdgroup multiplies 8 of the keys with all rows
 *   softmax  scores go through threadgroup memory, since no lane knows which of them it holds; 4, 8 or 16 lanes weigh the keys of
 *            a row
 *   values   unpacked the same way; each simdgroup sums 16 channels of each slab, for all rows
 *
 * Packed bytes are read once for all rows, and are on their way while the slab before is multiplied. Keys and values become
 * floats: rounded to halves a few large channels (real keys have them) would cost 2e-2, and codes as exact halves would need
 * their sums scaled for each group, which is more work than halves would save here: half the bytes of one of two operands.
 *
 * Sums stay with the simdgroups. After each softmax they are multiplied, number by number, with a matrix whose rows are the rows'
 * factors: 1 where the largest score did not grow.
 *
 * Threadgroup memory is what bounds the rows: 32 of heads up to 128 channels, 16 up to 256, 8 up to 512, in 32 KB.
 */
#define SG_THREADS 128
#define SG_WARPS 4
#define SG_KEYS 32 /* of a tile: 8 for each simdgroup */
#define SG_SLAB 64 /* channels: 16 for each simdgroup */
#define SG_SLABS ((FKV_D + SG_SLAB - 1) / SG_SLAB)

/* Rows in shared memory are four floats longer than what they hold, so that neighbours do not lie in the same banks. */
#define SG_ROW (FKV_D + 4)
#define SG_SLAB_ROW (SG_SLAB + 4)
#define SG_SCORES_ROW (SG_KEYS + 4)

/* shared memory, in floats: queries [rows, D] and in the end their sums; a slab [32, 64]; scores, then weights [rows, 32];
 * factors [rows, 8], eight times the same */
#define SG_AT_SLAB(rows) ((rows) * SG_ROW)
#define SG_AT_SCORES(rows) (SG_AT_SLAB(rows) + SG_KEYS * SG_SLAB_ROW)
#define SG_AT_FACTORS(rows) (SG_AT_SCORES(rows) + (rows) * SG_SCORES_ROW)
#define SG_SHARED(rows) (SG_AT_FACTORS(rows) + (rows) * 8)

/* ---- which rows, which keys ---- */

/* The rows of a block: some of the queries x heads of consecutive tokens, for one KV head. */
struct sg_item {
    fkv_u32 first_token; /* of the step: row 0's */
    fkv_u32 position;    /* of that token */
    fkv_u32 first_row;   /* of this block */
    fkv_u32 n_rows;      /* of this block; those that are not there repeat the first */
};

FKV_FN fkv_u32 sg_position(FKV_LOCAL const sg_item &item, fkv_u32 row) {
    return item.position + (item.first_row + (row < item.n_rows ? row : 0)) / FKV_R;
}

/* Where a row lies in q and out. */
FKV_FN fkv_u64 sg_row_at(FKV_LOCAL const sg_item &item, fkv_u32 kv_head, fkv_u32 row) {
    fkv_u32 r = item.first_row + (row < item.n_rows ? row : 0);
    return ((fkv_u64)(item.first_token + r / FKV_R) * FKV_H + kv_head * FKV_R + r % FKV_R) * FKV_D;
}

/* The keys that a block meets, numbered as they are met: those from gap_at on are `gap` tokens further than their number. */
struct sg_keys {
    FKV_DEVICE const fkv_u8 *blocks; /* of (page 0, this KV head) */
    FKV_DEVICE const fkv_u32 *pages;
    fkv_u32 n_fixed;
    fkv_u32 n_ring;
    fkv_u32 first;
    fkv_u32 end;
    fkv_u32 gap_at;
    fkv_u32 gap;
    fkv_u32 begin; /* the first token that the window of the first row shows */
#if FKV_SEALED
    FKV_DEVICE const fkv_u8 *open_blocks;
    FKV_DEVICE const fkv_u32 *open_pages;
    fkv_u32 n_open_fixed;
    fkv_u32 n_open_ring;
    fkv_u32 own; /* the page that all rows are in */
#endif
};

FKV_FN fkv_u32 sg_token(FKV_LOCAL const sg_keys &keys, fkv_u32 number) {
    return number < keys.gap_at ? number : number + keys.gap;
}

/* Where a key lies. One that no row sees has no weight, but its page may be anybody's by now: the last one takes its place. */
struct sg_key {
    FKV_DEVICE const fkv_u8 *block;
    fkv_u32 slot;
    bool open; /* of a sealed layer: the block is one of its open pool */
};

FKV_FN sg_key sg_key_at(FKV_LOCAL const sg_keys &keys, fkv_u32 number) {
    fkv_u32 token = sg_token(keys, number);
    if (number >= keys.end || (FKV_WINDOW != 0 && token < keys.begin && token + 1 >= FKV_SINKS + 1))
        token = sg_token(keys, keys.end - 1);
    fkv_u32 logical = token / FKV_PAGE_TOKENS;
    sg_key key;
    key.slot = token % FKV_PAGE_TOKENS;
    key.open = false;
#if FKV_SEALED
    if (fkv_sees_open(keys.own, logical)) {
        fkv_u32 of_open =
            logical < keys.n_open_fixed ? logical : keys.n_open_fixed + (logical - keys.n_open_fixed) % keys.n_open_ring;
        key.open = true;
        key.block = keys.open_blocks + (fkv_u64)keys.open_pages[of_open] * (FKV_G * (fkv_u64)FKV_OPEN_BLOCK_BYTES);
        return key;
    }
#endif
    fkv_u32 at = logical < keys.n_fixed ? logical : keys.n_fixed + (logical - keys.n_fixed) % keys.n_ring;
    key.block = keys.blocks + (fkv_u64)keys.pages[at] * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES);
    return key;
}

/* ---- from packed pages to floats in shared memory ---- */

#if FKV_SEALED
/* 16 channels of a key, of a page of either form. */
struct sg_numbers {
    float x[16];
};
typedef sg_numbers sg_k_chunk;
typedef sg_numbers sg_v_chunk;
FKV_FN sg_k_chunk sg_take_k(sg_key key, fkv_u32 d) {
    sg_k_chunk chunk = {};
    FKV_UNROLL
    for (fkv_u32 i = 0; i < 16; i++)
        if (d + i < FKV_D)
            chunk.x[i] = key.open ? opened::fkv_k_at(key.block, key.slot, d + i) : fkv_k_at(key.block, key.slot, d + i);
    return chunk;
}
FKV_FN sg_v_chunk sg_take_v(sg_key key, fkv_u32 d) {
    sg_v_chunk chunk = {};
    FKV_UNROLL
    for (fkv_u32 i = 0; i < 16; i++)
        if (d + i < FKV_D)
            chunk.x[i] = key.open ? opened::fkv_v_at(key.block, key.slot, d + i) : fkv_v_at(key.block, key.slot, d + i);
    return chunk;
}
FKV_FN float sg_k_number(FKV_LOCAL const sg_k_chunk &chunk, int i) { return chunk.x[i]; }
FKV_FN float sg_v_number(FKV_LOCAL const sg_v_chunk &chunk, int i) { return chunk.x[i]; }
#else
/* 16 channels of a key on their way: all of one group. */
template <int BITS> struct sg_chunk {
    fkv_u32 w[BITS == 3 ? 2 : BITS / 2]; /* of 3 bits: a word of the low plane, 16 bits of the high one */
    fkv_u32 scale;
    fkv_u32 bias;
};

/* The same of a book's codes. */
template <int BITS> FKV_FN sg_chunk<BITS> sg_take_book(sg_key key, fkv_u32 codes, fkv_u32 scales, fkv_u32 d) {
    sg_chunk<BITS> chunk = {};
    if (d >= FKV_D) return chunk;
    FKV_DEVICE const fkv_u8 *row = key.block + codes + key.slot * (FKV_D * BITS / 8);
    FKV_DEVICE const fkv_u32 *from = (FKV_DEVICE const fkv_u32 *)(row + d * (BITS == 4 ? 4 : 2) / 8);
    chunk.w[0] = from[0];
    if (BITS == 4) chunk.w[BITS / 4] = from[1];
    if (BITS == 3) chunk.w[BITS / 3] = *(FKV_DEVICE const fkv_u16 *)(row + FKV_D / 4 + d / 8);
    chunk.scale = ((FKV_DEVICE const fkv_u16 *)(key.block + scales))[key.slot];
    return chunk;
}

template <int BITS> FKV_FN fkv_u32 sg_book_code(FKV_LOCAL const sg_chunk<BITS> &chunk, int i) {
    if (BITS == 4) return chunk.w[i / 8] >> (i * 4 % 32) & 15u;
    fkv_u32 code = chunk.w[0] >> (2 * i) & 3u;
    return BITS == 3 ? code | (chunk.w[BITS / 3] >> i & 1u) << 2 : code;
}

/* codes, scales, biases: offsets in a block. Behind the head's channels there is nothing to take, and nothing is put. */
template <int BITS, int GROUP>
FKV_FN sg_chunk<BITS> sg_take(sg_key key, fkv_u32 codes, fkv_u32 scales, fkv_u32 biases, fkv_u32 d) {
    sg_chunk<BITS> chunk = {};
    if (d >= FKV_D) return chunk;
    FKV_DEVICE const fkv_u32 *from =
        (FKV_DEVICE const fkv_u32 *)(key.block + codes + key.slot * (FKV_D * BITS / 8) + d * BITS / 8);
    FKV_UNROLL
    for (int i = 0; i < BITS / 2; i++) chunk.w[i] = from[i];
    if (BITS != 16) {
        fkv_u32 group = key.slot * (FKV_D / GROUP) + d / GROUP;
        chunk.scale = ((FKV_DEVICE const fkv_u16 *)(key.block + scales))[group];
        chunk.bias = ((FKV_DEVICE const fkv_u16 *)(key.block + biases))[group];
    }
    return chunk;
}

typedef sg_chunk<FKV_K_BITS> sg_k_chunk;
typedef sg_chunk<FKV_V_BITS> sg_v_chunk;
FKV_FN sg_k_chunk sg_take_k(sg_key key, fkv_u32 d) {
#if FKV_K_BOOK
    return sg_take_book<FKV_K_BITS>(key, FKV_K_CODES, FKV_K_SCALES, d);
#else
    return sg_take<FKV_K_BITS, FKV_K_GROUP>(key, FKV_K_CODES, FKV_K_SCALES, FKV_K_BIASES, d);
#endif
}
FKV_FN sg_v_chunk sg_take_v(sg_key key, fkv_u32 d) {
#if FKV_V_BOOK
    return sg_take_book<FKV_V_BITS>(key, FKV_V_CODES, FKV_V_SCALES, d);
#else
    return sg_take<FKV_V_BITS, FKV_V_GROUP>(key, FKV_V_CODES, FKV_V_SCALES, FKV_V_BIASES, d);
#endif
}

template <int BITS> FKV_FN float sg_number(FKV_LOCAL const sg_chunk<BITS> &chunk, int i) {
    fkv_u32 code = chunk.w[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1u);
    if (BITS == 16) return fkv_page_number(code);
    return fkv_fma(fkv_page_number(chunk.scale), (float)code, fkv_page_number(chunk.bias));
}

FKV_FN float sg_k_number(FKV_LOCAL const sg_k_chunk &chunk, int i) {
#if FKV_K_BOOK
    return fkv_page_number(chunk.scale) * fkv_k_book(sg_book_code(chunk, i));
#else
    return sg_number(chunk, i);
#endif
}

FKV_FN float sg_v_number(FKV_LOCAL const sg_v_chunk &chunk, int i) {
#if FKV_V_BOOK
    return fkv_page_number(chunk.scale) * fkv_v_book(sg_book_code(chunk, i));
#else
    return sg_number(chunk, i);
#endif
}

#endif

FKV_FN void sg_put_k(FKV_LOCAL const sg_k_chunk &chunk, FKV_SHARED float *to, fkv_u32 d) {
    if (d >= FKV_D) return;
    FKV_UNROLL
    for (int i = 0; i < 16; i++) to[i] = sg_k_number(chunk, i);
}

/* FINITE: what is not becomes 0. */
template <bool FINITE> FKV_FN void sg_put_v(FKV_LOCAL const sg_v_chunk &chunk, FKV_SHARED float *to, fkv_u32 d) {
    if (d >= FKV_D) return;
    FKV_UNROLL
    for (int i = 0; i < 16; i++) {
        float x = sg_v_number(chunk, i);
        to[i] = FINITE && !fkv_is_finite(x) ? 0.0f : x;
    }
}

/* ---- rows ---- */

/* What a thread keeps: the softmax of one row, which it shares with its neighbours, and its simdgroup's sums. */
template <int ROWS> struct sg_rows {
    fkv_u32 position; /* of the row */
    float max;
    float total; /* of this lane's keys */
    fkv_sums of[SG_SLABS][ROWS / 8][2];
};

#define SG_LANES(rows) (SG_THREADS / (rows)) /* of a row */

/* Adds a slab of keys up: this simdgroup's 8, all rows. */
template <int ROWS>
FKV_FN void sg_add_scores(FKV_SHARED const float *queries, FKV_SHARED const float *keys, int channels,
                          FKV_LOCAL fkv_sums (&scores)[ROWS / 8]) {
    for (int d = 0; d < channels; d += 8) {
        fkv_right right = fkv_right_load(keys + d, SG_SLAB_ROW, true);
        FKV_UNROLL
        for (int r = 0; r < ROWS / 8; r++) fkv_sums_add(scores[r], fkv_left_load(queries + r * 8 * SG_ROW + d, SG_ROW), right);
    }
}

/* Adds a slab of values up: this simdgroup's 16 channels, all rows. channels: from them on, of the head. */
template <int ROWS>
FKV_FN void sg_add_values(FKV_SHARED const float *weights, FKV_SHARED const float *values, int channels,
                          FKV_LOCAL fkv_sums (&sums)[ROWS / 8][2]) {
    if (channels <= 0) return;
    for (int key = 0; key < SG_KEYS; key += 8) {
        fkv_right right[2];
        right[0] = fkv_right_load(values + key * SG_SLAB_ROW, SG_SLAB_ROW, false);
        right[1] = fkv_right_load(values + key * SG_SLAB_ROW + 8, SG_SLAB_ROW, false);
        FKV_UNROLL
        for (int r = 0; r < ROWS / 8; r++) {
            fkv_left left = fkv_left_load(weights + r * 8 * SG_SCORES_ROW + key, SG_SCORES_ROW);
            fkv_sums_add(sums[r][0], left, right[0]);
            fkv_sums_add(sums[r][1], left, right[1]);
        }
    }
}

/* The scores of a tile become weights, and the factors say by how much earlier sums shrink. tile: number of its first key;
 * masked: some row does not see some key of it. */
template <int ROWS>
FKV_FN void sg_weigh(fkv_u32 index, FKV_SHARED float *scores, FKV_SHARED float *factors, FKV_LOCAL const sg_keys &keys,
                     fkv_u32 tile, bool masked, FKV_LOCAL sg_rows<ROWS> &rows) {
    const fkv_u32 lanes = SG_LANES(ROWS);
    fkv_u32 lane = index % lanes;
    FKV_SHARED float *own = scores + index / lanes * SG_SCORES_ROW + lane;
    float x[SG_KEYS / SG_LANES(ROWS)];
    float largest = rows.max;
    FKV_UNROLL
    for (int i = 0; i < SG_KEYS / SG_LANES(ROWS); i++) {
        x[i] = fkv_cap(own[(fkv_u32)i * lanes]);
        if (masked) {
            fkv_u32 number = tile + (fkv_u32)i * lanes + lane;
            if (number >= keys.end || !fkv_sees(rows.position, sg_token(keys, number))) x[i] = FKV_NO_SCORE;
        }
        largest = fkv_max(largest, x[i]);
    }
    FKV_UNROLL
    for (fkv_u32 h = 1; h < lanes; h *= 2) largest = fkv_max(largest, fkv_shuffle_xor(largest, h));
    float shrink = rows.max == largest ? 1.0f : fkv_exp2(rows.max - largest);
    float base = largest == FKV_NO_SCORE ? 0.0f : largest;
    float total = 0.0f;
    FKV_UNROLL
    for (int i = 0; i < SG_KEYS / SG_LANES(ROWS); i++) {
        float weight = fkv_exp2(x[i] - base);
        own[(fkv_u32)i * lanes] = weight;
        total += weight;
    }
    rows.max = largest;
    rows.total = fkv_fma(rows.total, shrink, total);
    for (fkv_u32 i = lane; i < 8; i += lanes) factors[index / lanes * 8 + i] = shrink;
}

/* A thread's share of the tiles: the key that it unpacks, and where. */
struct sg_share {
    fkv_u32 of_tile;      /* the key */
    fkv_u32 channel;      /* its first of each slab */
    FKV_SHARED float *to; /* in the slab */
    sg_key key;
};

/* A tile that some row does not see in full: a weight of 0 would not hide values that are not finite. They become 0 (sg_put_v),
 * and here the key's scores become NaN; sg_weigh() then masks the rows that do not see it. By the four threads of the key. */
template <int ROWS> FKV_FN void sg_show_odd(FKV_LOCAL const sg_share &own, FKV_SHARED float *scores) {
    fkv_u32 odd = 0;
    for (fkv_u32 d = own.channel; d < FKV_D; d += SG_SLAB) {
        sg_v_chunk v = sg_take_v(own.key, d);
        FKV_UNROLL
        for (int i = 0; i < 16; i++) odd |= fkv_is_finite(sg_v_number(v, i)) ? 0u : 1u;
    }
    odd |= fkv_shuffle_xor_bits(odd, 1);
    odd |= fkv_shuffle_xor_bits(odd, 2);
    for (fkv_u32 row = own.channel / 16; odd != 0 && row < ROWS; row += 4)
        scores[row * SG_SCORES_ROW + own.of_tile] = fkv_float_of(0x7fc00000u);
    fkv_sync();
}

/* The scores of a tile into shared memory. k: the first slab's, on its way. */
template <int ROWS> FKV_FN void sg_score(fkv_u32 warp, FKV_SHARED float *shared, FKV_LOCAL const sg_share &own, sg_k_chunk k) {
    FKV_SHARED float *scores_at = shared + SG_AT_SCORES(ROWS);
    fkv_sums scores[ROWS / 8];
    FKV_UNROLL
    for (int r = 0; r < ROWS / 8; r++) scores[r] = fkv_sums_zero();
    for (fkv_u32 d = 0; d < FKV_D; d += SG_SLAB) {
        sg_put_k(k, own.to, d + own.channel);
        fkv_sync();
        k = sg_take_k(own.key, d + SG_SLAB + own.channel);
        sg_add_scores<ROWS>(shared + d, shared + SG_AT_SLAB(ROWS) + warp * 8 * SG_SLAB_ROW,
                            FKV_D - d < SG_SLAB ? FKV_D - d : SG_SLAB, scores);
        if (d + SG_SLAB >= FKV_D) {
            FKV_UNROLL
            for (int r = 0; r < ROWS / 8; r++)
                fkv_sums_store(scores[r], scores_at + r * 8 * SG_SCORES_ROW + warp * 8, SG_SCORES_ROW);
        }
        fkv_sync();
    }
}

/* Earlier sums by the rows' factors. */
template <int ROWS> FKV_FN void sg_shrink(FKV_SHARED const float *factors_at, FKV_LOCAL sg_rows<ROWS> &rows) {
    FKV_UNROLL
    for (int r = 0; r < ROWS / 8; r++) {
        fkv_sums factors = fkv_sums_load(factors_at + r * 64, 8);
        FKV_UNROLL
        for (int s = 0; s < SG_SLABS; s++) {
            fkv_sums_scale(rows.of[s][r][0], factors);
            fkv_sums_scale(rows.of[s][r][1], factors);
        }
    }
}

/* All keys, for queries that lie in shared memory. */
template <int ROWS>
FKV_FN void sg_walk(fkv_u32 index, FKV_SHARED float *shared, FKV_LOCAL const sg_item &item, FKV_LOCAL const sg_keys &keys,
                    FKV_LOCAL sg_rows<ROWS> &rows) {
    fkv_u32 low = sg_position(item, 0);
    fkv_u32 high = sg_position(item, item.n_rows - 1);
    fkv_u32 warp = index / 32;
    FKV_SHARED float *slab_at = shared + SG_AT_SLAB(ROWS);
    FKV_SHARED float *scores_at = shared + SG_AT_SCORES(ROWS);
    FKV_SHARED float *factors_at = shared + SG_AT_FACTORS(ROWS);
    sg_share own;
    own.of_tile = index / 4;
    own.channel = index % 4 * 16;
    own.to = slab_at + own.of_tile * SG_SLAB_ROW + own.channel;
    own.key = sg_key_at(keys, keys.first + own.of_tile);
    sg_k_chunk k = sg_take_k(own.key, own.channel);
    for (fkv_u32 tile = keys.first; tile < keys.end; tile += SG_KEYS) {
        sg_v_chunk v = sg_take_v(own.key, own.channel);
        sg_score<ROWS>(warp, shared, own, k);
        fkv_u32 first = sg_token(keys, tile);
        fkv_u32 last = sg_token(keys, tile + SG_KEYS - 1);
        bool masked =
            tile + SG_KEYS > keys.end || last > low || (FKV_WINDOW != 0 && high - first + 1 > FKV_WINDOW && last + 1 > FKV_SINKS);
        if (masked) sg_show_odd<ROWS>(own, scores_at);
        sg_weigh<ROWS>(index, scores_at, factors_at, keys, tile, masked, rows);
        FKV_UNROLL
        for (int slab = 0; slab < SG_SLABS; slab++) {
            const fkv_u32 d = (fkv_u32)slab * SG_SLAB;
            if (masked)
                sg_put_v<true>(v, own.to, d + own.channel);
            else
                sg_put_v<false>(v, own.to, d + own.channel);
            fkv_sync();
            if (slab == 0) sg_shrink<ROWS>(factors_at, rows);
            if (slab + 1 < SG_SLABS) {
                v = sg_take_v(own.key, d + SG_SLAB + own.channel);
            } else {
                own.key = sg_key_at(keys, tile + SG_KEYS + own.of_tile);
                k = sg_take_k(own.key, own.channel);
            }
            sg_add_values<ROWS>(scores_at, slab_at + warp * 16, FKV_D - (int)(d + warp * 16), rows.of[slab]);
            fkv_sync();
        }
    }
}

/* The rows of a block over its keys. Leaves sums in the place of queries, and {max, total} of each row in the first two of its
 * factors. */
template <int ROWS>
FKV_FN void sg_attend(fkv_place place, FKV_SHARED float *shared, FKV_LOCAL const sg_item &item, FKV_LOCAL const sg_keys &keys,
                      FKV_DEVICE const void *q) {
    static_assert(SG_SHARED(ROWS) * 4 <= 32768, "threadgroup memory");
    fkv_u32 warp = place.index / 32;
    for (fkv_u32 row = warp; row < ROWS; row += SG_WARPS)
        fkv_take_query(place.index % 32, q, sg_row_at(item, place.y, row), shared + row * SG_ROW);
    sg_rows<ROWS> rows;
    rows.position = sg_position(item, place.index / SG_LANES(ROWS));
    rows.max = FKV_NO_SCORE;
    rows.total = 0.0f;
    FKV_UNROLL
    for (int slab = 0; slab < SG_SLABS; slab++) {
        FKV_UNROLL
        for (int r = 0; r < ROWS / 8; r++) {
            rows.of[slab][r][0] = fkv_sums_zero();
            rows.of[slab][r][1] = fkv_sums_zero();
        }
    }
    sg_walk<ROWS>(place.index, shared, item, keys, rows);
    FKV_UNROLL
    for (int slab = 0; slab < SG_SLABS; slab++) {
        fkv_u32 d = (fkv_u32)slab * SG_SLAB + warp * 16;
        if (d >= FKV_D) continue;
        FKV_UNROLL
        for (int r = 0; r < ROWS / 8; r++) {
            fkv_sums_store(rows.of[slab][r][0], shared + r * 8 * SG_ROW + d, SG_ROW);
            fkv_sums_store(rows.of[slab][r][1], shared + r * 8 * SG_ROW + d + 8, SG_ROW);
        }
    }
    float total = rows.total;
    FKV_UNROLL
    for (fkv_u32 h = 1; h < SG_LANES(ROWS); h *= 2) total += fkv_shuffle_xor(total, h);
    if (place.index % SG_LANES(ROWS) == 0) {
        FKV_SHARED float *to = shared + SG_AT_FACTORS(ROWS) + place.index / SG_LANES(ROWS) * 8;
        to[0] = rows.max;
        to[1] = total;
    }
    fkv_sync();
}
