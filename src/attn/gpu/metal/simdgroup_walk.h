/* Rows of queries over packed pages on matrices of 8 x 8 floats: what prefill_simdgroup.h and decode_simdgroup.h share. A block
 * is four simdgroups and 8, 16 or 32 rows (queries x heads of a KV head); all of them meet the same tiles of 32 keys, one after
 * the other:
 *
 *   keys     a slab of 64 channels at a time is unpacked into threadgroup memory, 16 numbers by each thread; each simdgroup
 *            unpacks and multiplies 8 of the keys, with all rows
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

/* A pool's pages of a sequence, for one KV head. */
struct sg_pages {
    FKV_DEVICE const fkv_u8 *blocks; /* of (page 0, this KV head) */
    FKV_DEVICE const fkv_u32 *pages;
    fkv_u32 n_fixed;
    fkv_u32 n_ring;
};

FKV_FN FKV_DEVICE const fkv_u8 *sg_block_at(FKV_LOCAL const sg_pages &pages, fkv_u32 logical, fkv_u32 block_bytes) {
    fkv_u32 at = logical < pages.n_fixed ? logical : pages.n_fixed + (logical - pages.n_fixed) % pages.n_ring;
    return pages.blocks + (fkv_u64)pages.pages[at] * (FKV_G * (fkv_u64)block_bytes);
}

/* The keys that a block meets, numbered as they are met: those from gap_at on are `gap` tokens further than their number. */
struct sg_keys {
    sg_pages in;
    fkv_u32 first;
    fkv_u32 end;
    fkv_u32 gap_at;
    fkv_u32 gap;
    fkv_u32 begin; /* the first token that the window of the first row shows */
#if FKV_SEALED
    sg_pages open; /* where a walk meets both forms */
    fkv_u32 own;   /* the page that all rows are in */
#endif
};

FKV_FN fkv_u32 sg_token(FKV_LOCAL const sg_keys &keys, fkv_u32 number) {
    return number < keys.gap_at ? number : number + keys.gap;
}

/* Where the eight keys of a simdgroup lie: side by side in one page. */
struct sg_eight {
    FKV_DEVICE const fkv_u8 *block;
    fkv_u32 slot; /* of the first */
    bool open;    /* where a walk meets both forms */
};

/* Eight that no row sees have no weight, but their page may be anybody's by now: the last ones take their place. */
template <class FORM> FKV_FN sg_eight sg_eight_at(FKV_LOCAL const sg_keys &keys, fkv_u32 number) {
    fkv_u32 token = sg_token(keys, number);
    if (number >= keys.end || (FKV_WINDOW != 0 && token + 8 <= keys.begin && token + 1 >= FKV_SINKS + 1))
        token = sg_token(keys, keys.end - 1) / 8 * 8;
    fkv_u32 logical = token / FKV_PAGE_TOKENS;
    sg_eight eight;
    eight.slot = token % FKV_PAGE_TOKENS;
    eight.open = false;
#if FKV_SEALED
    if (FORM::IS_BOTH && fkv_sees_open(keys.own, logical)) {
        eight.open = true;
        eight.block = sg_block_at(keys.open, logical, FKV_OPEN_BLOCK_BYTES);
        return eight;
    }
#endif
    eight.block = sg_block_at(keys.in, logical, FORM::BLOCK_BYTES);
    return eight;
}

/* ---- from packed pages to floats in shared memory ---- */

/* What a lane takes of a slab of its simdgroup's eight keys, of K or V: 16 numbers of the shape that the side has (chunks.h). */
template <class SHAPE> struct sg_side {
    typedef typename SHAPE::chunk chunk;
    enum { LANES = SG_SLAB / SHAPE::CHANNELS }; /* of a token */
    FKV_FN fkv_u32 token(fkv_u32 lane) { return lane / LANES * SHAPE::TOKENS; }
    FKV_FN fkv_u32 channel(fkv_u32 lane) { return lane % LANES * SHAPE::CHANNELS; }
    /* Behind the head's channels there is nothing to take, and nothing is put. */
    FKV_FN chunk take(sg_eight eight, fkv_u32 lane, fkv_u32 slab) {
        fkv_u32 d = slab + channel(lane);
        chunk x = {};
        if (d < FKV_D) x = SHAPE::take(eight.block, eight.slot + token(lane), d);
        return x;
    }
    /* to: the eight's rows of the slab. finite: what is not becomes 0. */
    FKV_FN void put(FKV_LOCAL const chunk &x, sg_eight, fkv_u32 lane, fkv_u32 slab, bool finite, FKV_SHARED float *to) {
        if (slab + channel(lane) >= FKV_D) return;
        to += token(lane) * SG_SLAB_ROW + channel(lane);
        FKV_UNROLL
        for (int i = 0; i < 16; i++) {
            float number = SHAPE::number(x, i);
            to[i / SHAPE::CHANNELS * SG_SLAB_ROW + i % SHAPE::CHANNELS] = finite && !fkv_is_finite(number) ? 0.0f : number;
        }
    }
    /* A bit for each of the eight of which this lane has a number that is not finite. */
    FKV_FN fkv_u32 odd(FKV_LOCAL const chunk &x, sg_eight, fkv_u32 lane) {
        fkv_u32 bits = 0;
        FKV_UNROLL
        for (int i = 0; i < 16; i++) bits |= (fkv_is_finite(SHAPE::number(x, i)) ? 0u : 1u) << i / SHAPE::CHANNELS;
        return bits << token(lane);
    }
};

/* The form of a walk's pages. */
struct sg_own_form {
    enum { BLOCK_BYTES = FKV_BLOCK_BYTES, IS_BOTH = 0 };
    typedef sg_side<fkv_k_shape> k;
    typedef sg_side<fkv_v_shape> v;
};

#if FKV_SEALED
struct sg_open_form {
    enum { BLOCK_BYTES = FKV_OPEN_BLOCK_BYTES, IS_BOTH = 0 };
    typedef sg_side<opened::fkv_k_shape> k;
    typedef sg_side<opened::fkv_v_shape> v;
};

/* A side of pages of either form: the eight say which. */
template <class OPEN, class OWN> struct sg_either {
    union chunk {
        typename OPEN::chunk open;
        typename OWN::chunk own;
    };
    FKV_FN chunk take(sg_eight eight, fkv_u32 lane, fkv_u32 slab) {
        chunk x;
        if (eight.open)
            x.open = OPEN::take(eight, lane, slab);
        else
            x.own = OWN::take(eight, lane, slab);
        return x;
    }
    FKV_FN void put(FKV_LOCAL const chunk &x, sg_eight eight, fkv_u32 lane, fkv_u32 slab, bool finite, FKV_SHARED float *to) {
        if (eight.open)
            OPEN::put(x.open, eight, lane, slab, finite, to);
        else
            OWN::put(x.own, eight, lane, slab, finite, to);
    }
    FKV_FN fkv_u32 odd(FKV_LOCAL const chunk &x, sg_eight eight, fkv_u32 lane) {
        return eight.open ? OPEN::odd(x.open, eight, lane) : OWN::odd(x.own, eight, lane);
    }
};

struct sg_all_forms {
    enum { BLOCK_BYTES = FKV_BLOCK_BYTES, IS_BOTH = 1 };
    typedef sg_either<sg_open_form::k, sg_own_form::k> k;
    typedef sg_either<sg_open_form::v, sg_own_form::v> v;
};
#else
typedef sg_own_form sg_all_forms;
#endif

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

/* A tile that some row does not see in full: a weight of 0 would not hide values that are not finite. They become 0 (put), and
 * here the keys' scores become NaN; sg_weigh() then masks the rows that do not see them. scores: of the simdgroup's eight. */
template <int ROWS, class FORM> FKV_FN void sg_show_odd(fkv_u32 lane, sg_eight eight, FKV_SHARED float *scores) {
    fkv_u32 odd = 0;
    for (fkv_u32 d = 0; d < FKV_D; d += SG_SLAB) odd |= FORM::v::odd(FORM::v::take(eight, lane, d), eight, lane);
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) odd |= fkv_shuffle_xor_bits(odd, h);
    for (fkv_u32 i = lane; odd != 0 && i < ROWS * 8; i += 32)
        if ((odd >> i % 8 & 1u) != 0) scores[i / 8 * SG_SCORES_ROW + i % 8] = fkv_float_of(0x7fc00000u);
    fkv_sync();
}

/* The scores of a simdgroup's eight keys into shared memory. k: the first slab's, on its way; slab: the eight's rows of it. */
template <int ROWS, class FORM>
FKV_FN void sg_score(fkv_u32 lane, FKV_SHARED const float *queries, sg_eight eight, typename FORM::k::chunk k,
                     FKV_SHARED float *slab, FKV_SHARED float *scores_at) {
    fkv_sums scores[ROWS / 8];
    FKV_UNROLL
    for (int r = 0; r < ROWS / 8; r++) scores[r] = fkv_sums_zero();
    for (fkv_u32 d = 0; d < FKV_D; d += SG_SLAB) {
        FORM::k::put(k, eight, lane, d, false, slab);
        fkv_sync_warp();
        k = FORM::k::take(eight, lane, d + SG_SLAB);
        sg_add_scores<ROWS>(queries + d, slab, FKV_D - d < SG_SLAB ? FKV_D - d : SG_SLAB, scores);
        fkv_sync_warp();
    }
    FKV_UNROLL
    for (int r = 0; r < ROWS / 8; r++) fkv_sums_store(scores[r], scores_at + r * 8 * SG_SCORES_ROW, SG_SCORES_ROW);
    fkv_sync();
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
template <int ROWS, class FORM>
FKV_FN void sg_walk(fkv_u32 index, FKV_SHARED float *shared, FKV_LOCAL const sg_item &item, FKV_LOCAL const sg_keys &keys,
                    FKV_LOCAL sg_rows<ROWS> &rows) {
    fkv_u32 low = sg_position(item, 0);
    fkv_u32 high = sg_position(item, item.n_rows - 1);
    fkv_u32 warp = index / 32;
    fkv_u32 lane = index % 32;
    FKV_SHARED float *slab_at = shared + SG_AT_SLAB(ROWS);
    FKV_SHARED float *scores_at = shared + SG_AT_SCORES(ROWS);
    FKV_SHARED float *factors_at = shared + SG_AT_FACTORS(ROWS);
    FKV_SHARED float *own_at = slab_at + warp * 8 * SG_SLAB_ROW;
    sg_eight eight = sg_eight_at<FORM>(keys, keys.first + warp * 8);
    typename FORM::k::chunk k = FORM::k::take(eight, lane, 0);
    for (fkv_u32 tile = keys.first; tile < keys.end; tile += SG_KEYS) {
        typename FORM::v::chunk v = FORM::v::take(eight, lane, 0);
        sg_score<ROWS, FORM>(lane, shared, eight, k, own_at, scores_at + warp * 8);
        fkv_u32 first = sg_token(keys, tile);
        fkv_u32 last = sg_token(keys, tile + SG_KEYS - 1);
        bool masked =
            tile + SG_KEYS > keys.end || last > low || (FKV_WINDOW != 0 && high - first + 1 > FKV_WINDOW && last + 1 > FKV_SINKS);
        if (masked) sg_show_odd<ROWS, FORM>(lane, eight, scores_at + warp * 8);
        sg_weigh<ROWS>(index, scores_at, factors_at, keys, tile, masked, rows);
        FKV_UNROLL
        for (int slab = 0; slab < SG_SLABS; slab++) {
            const fkv_u32 d = (fkv_u32)slab * SG_SLAB;
            if (masked)
                FORM::v::put(v, eight, lane, d, true, own_at);
            else
                FORM::v::put(v, eight, lane, d, false, own_at);
            fkv_sync();
            if (slab == 0) sg_shrink<ROWS>(factors_at, rows);
            if (slab + 1 < SG_SLABS) {
                v = FORM::v::take(eight, lane, d + SG_SLAB);
            } else {
                eight = sg_eight_at<FORM>(keys, tile + SG_KEYS + warp * 8);
                k = FORM::k::take(eight, lane, 0);
            }
            sg_add_values<ROWS>(scores_at, slab_at + warp * 16, FKV_D - (int)(d + warp * 16), rows.of[slab]);
            fkv_sync();
        }
    }
}

/* The rows of a block over its keys. Leaves sums in the place of queries, and {max, total} of each row in the first two of its
 * factors. */
template <int ROWS, class FORM>
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
    fkv_sync();
    sg_walk<ROWS, FORM>(place.index, shared, item, keys, rows);
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
