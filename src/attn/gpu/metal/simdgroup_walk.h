/* Computes attention over packed pages with 8 x 8 float matrices. Shared by prefill_simdgroup.h and decode_simdgroup.h. A block
 * has four simdgroups and 8, 16 or 32 rows (queries x query heads), and processes tiles of 32 keys in order:
 *
 *   keys     are unpacked to threadgroup memory in slabs of 64 channels, 16 values per thread; each simdgroup unpacks 8 keys
 *            and multiplies them by all rows
 *   softmax  scores are exchanged through threadgroup memory; 4, 8 or 16 lanes compute the weights of a row
 *   values   are unpacked in the same way; each simdgroup sums 16 channels of each slab for all rows
 *
 * Packed bytes are read once for all rows. They are loaded while the previous slab is multiplied. Keys and values are converted
 * to float. With fp16, keys with a few large channels would cause errors of 2e-2. After the softmax of each tile, the output sums
 * are multiplied by a factor per row.
 *
 * The kernels are limited by the size of threadgroup memory (32 KB), which determines the number of rows per block: 32 rows for
 * heads of up to 128 channels, 16 rows for up to 256 channels, and 8 rows for up to 512 channels.
 */
#define SG_THREADS 128
#define SG_WARPS 4
#define SG_KEYS 32 /* number of keys per tile; each simdgroup handles 8 of them */
#define SG_SLAB 64 /* number of channels per slab; each simdgroup handles 16 of them */
#define SG_SLABS ((FKV_D + SG_SLAB - 1) / SG_SLAB)

/* Rows in shared memory are padded by four floats to avoid bank conflicts. */
#define SG_ROW (FKV_D + 4)
#define SG_SLAB_ROW (SG_SLAB + 4)
#define SG_SCORES_ROW (SG_KEYS + 4)

/* shared memory, in floats: queries [rows, D], later replaced by the output sums; a slab [32, 64]; scores [rows, 32], later
 * replaced by the weights; factors [rows, 8], where the factor of a row is repeated eight times */
#define SG_AT_SLAB(rows) ((rows) * SG_ROW)
#define SG_AT_SCORES(rows) (SG_AT_SLAB(rows) + SG_KEYS * SG_SLAB_ROW)
#define SG_AT_FACTORS(rows) (SG_AT_SCORES(rows) + (rows) * SG_SCORES_ROW)
#define SG_SHARED(rows) (SG_AT_FACTORS(rows) + (rows) * 8)

/* ---- rows and keys ---- */

/* The rows of a thread block: consecutive (query, query head) pairs of one KV head. */
struct sg_item {
    fkv_u32 first_token; /* index, among the step's tokens, of the first token of the tile or item */
    fkv_u32 position;    /* position of this token in its sequence */
    fkv_u32 first_row;   /* index of the block's first row among the rows of the tile or item */
    fkv_u32 n_rows;      /* number of rows of this block; unused rows are copies of the first row */
};

FKV_FN fkv_u32 sg_position(FKV_LOCAL const sg_item &item, fkv_u32 row) {
    return item.position + (item.first_row + (row < item.n_rows ? row : 0)) / FKV_R;
}

/* Returns the index in q and out of the first value of a row. */
FKV_FN fkv_u64 sg_row_at(FKV_LOCAL const sg_item &item, fkv_u32 kv_head, fkv_u32 row) {
    fkv_u32 r = item.first_row + (row < item.n_rows ? row : 0);
    return ((fkv_u64)(item.first_token + r / FKV_R) * FKV_H + kv_head * FKV_R + r % FKV_R) * FKV_D;
}

/* The pages of one sequence in one pool, for one KV head. */
struct sg_pages {
    FKV_DEVICE const fkv_u8 *blocks; /* address of this KV head's block in page 0 */
    FKV_DEVICE const fkv_u32 *pages;
    fkv_u32 n_fixed;
    fkv_u32 n_ring;
};

FKV_FN FKV_DEVICE const fkv_u8 *sg_block_at(FKV_LOCAL const sg_pages &pages, fkv_u32 logical, fkv_u32 block_bytes) {
    fkv_u32 at = logical < pages.n_fixed ? logical : pages.n_fixed + (logical - pages.n_fixed) % pages.n_ring;
    return pages.blocks + (fkv_u64)pages.pages[at] * (FKV_G * (fkv_u64)block_bytes);
}

/* The keys that a thread block processes. They have consecutive numbers in [first, end). The position of a key is its number,
 * plus `gap` if the number is at least gap_at. */
struct sg_keys {
    sg_pages in;
    fkv_u32 first;
    fkv_u32 end;
    fkv_u32 gap_at;
    fkv_u32 gap;
    fkv_u32 begin; /* first token in the window of the first row */
#if FKV_SEALED
    sg_pages open; /* pages in the open pool, for kernels that read both pools */
    fkv_u32 own;   /* logical page that contains the tokens of all queries of the block */
#endif
#if FKV_CALIBRATED
    FKV_DEVICE const fkv_u32 *order; /* channel order of the KV head */
#endif
};

FKV_FN fkv_u32 sg_token(FKV_LOCAL const sg_keys &keys, fkv_u32 number) {
    return number < keys.gap_at ? number : number + keys.gap;
}

/* Location of the eight keys that a simdgroup handles; they are adjacent in one page. */
struct sg_eight {
    FKV_DEVICE const fkv_u8 *block;
    fkv_u32 slot; /* page slot of the first key */
    bool open;    /* true if the page is open; only set in kernels that read both pools */
#if FKV_CALIBRATED
    FKV_DEVICE const fkv_u32 *order;
#endif
};

/* Returns the location of eight keys. If the keys are masked for all rows, their page may already belong to another sequence, so
 * the location of the last visible keys is returned instead. */
template <class FORM> FKV_FN sg_eight sg_eight_at(FKV_LOCAL const sg_keys &keys, fkv_u32 number) {
    fkv_u32 token = sg_token(keys, number);
    if (number >= keys.end || (FKV_WINDOW != 0 && token + 8 <= keys.begin && token + 1 >= FKV_SINKS + 1))
        token = sg_token(keys, keys.end - 1) / 8 * 8;
    fkv_u32 logical = token / FKV_PAGE_TOKENS;
    sg_eight eight;
    eight.slot = token % FKV_PAGE_TOKENS;
    eight.open = false;
#if FKV_CALIBRATED
    eight.order = keys.order;
#endif
#if FKV_SEALED
    if (FORM::IS_BOTH && fkv_reads_open(keys.own, logical)) {
        eight.open = true;
        eight.block = sg_block_at(keys.open, logical, FKV_OPEN_BLOCK_BYTES);
        return eight;
    }
#endif
    eight.block = sg_block_at(keys.in, logical, FORM::BLOCK_BYTES);
    return eight;
}

/* ---- unpacking ---- */

/* Reads and stores the values of a slab (64 channels) that one lane handles, for the eight tokens of its simdgroup. Each lane
 * handles 16 values of K or V, in a chunk of shape SHAPE (chunks.h). */
template <class SHAPE> struct sg_side {
    typedef typename SHAPE::chunk chunk;
    enum { LANES = SG_SLAB / SHAPE::CHANNELS }; /* number of lanes that handle the same token */
    FKV_FN fkv_u32 token(fkv_u32 lane) { return lane / LANES * SHAPE::TOKENS; }
    FKV_FN fkv_u32 channel(fkv_u32 lane) { return lane % LANES * SHAPE::CHANNELS; }
    /* Loads a chunk. Channels beyond the head dimension are not read. */
    FKV_FN chunk take(sg_eight eight, fkv_u32 lane, fkv_u32 slab) {
        fkv_u32 d = slab + channel(lane);
        chunk x = {};
        if (d < FKV_D) x = SHAPE::take(eight.block, eight.slot + token(lane), d);
        return x;
    }
    /* Stores the values of a chunk as floats. `to` points to the slab rows of the eight keys. If `finite` is true, non-finite
     * values are replaced with 0. Channels beyond the head dimension are not stored. */
    FKV_FN void put(FKV_LOCAL const chunk &x, sg_eight, fkv_u32 lane, fkv_u32 slab, bool finite, FKV_SHARED float *to) {
        if (slab + channel(lane) >= FKV_D) return;
        to += token(lane) * SG_SLAB_ROW + channel(lane);
        FKV_UNROLL
        for (int i = 0; i < 16; i++) {
            float number = SHAPE::number(x, i);
            to[i / SHAPE::CHANNELS * SG_SLAB_ROW + i % SHAPE::CHANNELS] = finite && !fkv_is_finite(number) ? 0.0f : number;
        }
    }
    /* Returns a bitmask of the eight keys for which this lane holds a non-finite value. */
    FKV_FN fkv_u32 nonfinite(FKV_LOCAL const chunk &x, sg_eight, fkv_u32 lane) {
        fkv_u32 bits = 0;
        FKV_UNROLL
        for (int i = 0; i < 16; i++) bits |= (fkv_is_finite(SHAPE::number(x, i)) ? 0u : 1u) << i / SHAPE::CHANNELS;
        return bits << token(lane);
    }
};

#if FKV_CALIBRATED
/* Reads K in the channel order of the KV head. */
template <class SHAPE> struct sg_key_side {
    typedef sg_side<SHAPE> side;
    typedef typename SHAPE::chunk chunk;
    FKV_FN chunk take(sg_eight eight, fkv_u32 lane, fkv_u32 slab) {
        fkv_u32 d = slab + side::channel(lane);
        chunk x = {};
        if (d < FKV_D) x = SHAPE::take(eight.block, eight.slot + side::token(lane), d, eight.order);
        return x;
    }
    FKV_FN void put(FKV_LOCAL const chunk &x, sg_eight eight, fkv_u32 lane, fkv_u32 slab, bool finite, FKV_SHARED float *to) {
        side::put(x, eight, lane, slab, finite, to);
    }
    FKV_FN fkv_u32 nonfinite(FKV_LOCAL const chunk &x, sg_eight eight, fkv_u32 lane) { return side::nonfinite(x, eight, lane); }
};
#else
template <class SHAPE> using sg_key_side = sg_side<SHAPE>;
#endif

/* The storage form of the pages that a kernel reads: the layer's own form (sealed in sealed layers), the open form, or both. */
struct sg_own_form {
    enum { BLOCK_BYTES = FKV_BLOCK_BYTES, IS_BOTH = 0 };
    typedef sg_key_side<fkv_k_shape> k;
    typedef sg_side<fkv_v_shape> v;
};

#if FKV_SEALED
struct sg_open_form {
    enum { BLOCK_BYTES = FKV_OPEN_BLOCK_BYTES, IS_BOTH = 0 };
    typedef sg_key_side<opened::fkv_k_shape> k;
    typedef sg_side<opened::fkv_v_shape> v;
};

/* Reads K or V of an open or a sealed page, depending on sg_eight.open. */
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
    FKV_FN fkv_u32 nonfinite(FKV_LOCAL const chunk &x, sg_eight eight, fkv_u32 lane) {
        return eight.open ? OPEN::nonfinite(x.open, eight, lane) : OWN::nonfinite(x.own, eight, lane);
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

/* State of a thread. It consists of the softmax state of one row, which several neighbouring lanes share, and the thread's
 * elements of its simdgroup's output sums. */
template <int ROWS> struct sg_rows {
    fkv_u32 position; /* position of the row's query */
    float max;
    float total; /* total weight of the keys whose weights this lane computes */
    fkv_sums of[SG_SLABS][ROWS / 8][2];
};

#define SG_LANES(rows) (SG_THREADS / (rows)) /* number of lanes that share a row */

/* Accumulates the scores of the simdgroup's 8 keys for all rows, over the channels of one slab. */
template <int ROWS>
FKV_FN void sg_add_scores(FKV_SHARED const float *queries, FKV_SHARED const float *keys, int channels,
                          FKV_LOCAL fkv_sums (&scores)[ROWS / 8]) {
    for (int d = 0; d < channels; d += 8) {
        fkv_right right = fkv_right_load(keys + d, SG_SLAB_ROW, true);
        FKV_UNROLL
        for (int r = 0; r < ROWS / 8; r++) fkv_sums_add(scores[r], fkv_left_load(queries + r * 8 * SG_ROW + d, SG_ROW), right);
    }
}

/* Accumulates the weighted values of 16 channels of a slab, which this simdgroup handles, for all rows. `channels` is the number
 * of channels from the first of these 16 channels to the end of the row. */
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

/* Converts the scores of a tile to softmax weights, and stores the factors by which earlier output sums must be multiplied.
 * `tile` is the number of the tile's first key, and `masked` is true if at least one key is masked for at least one row. */
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
            if (number >= keys.end || !fkv_is_visible(rows.position, sg_token(keys, number))) x[i] = FKV_NO_SCORE;
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

/* In partly masked tiles, sets the scores of keys whose V contains non-finite values to NaN. A weight of 0 would not cancel a
 * non-finite V value, so put() replaces the value with 0. sg_weigh() then overwrites the NaN scores in rows for which the key is
 * masked. `scores` points to the scores of the simdgroup's eight keys. */
template <int ROWS, class FORM> FKV_FN void sg_flag_nonfinite(fkv_u32 lane, sg_eight eight, FKV_SHARED float *scores) {
    fkv_u32 nonfinite = 0;
    for (fkv_u32 d = 0; d < FKV_D; d += SG_SLAB) nonfinite |= FORM::v::nonfinite(FORM::v::take(eight, lane, d), eight, lane);
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) nonfinite |= fkv_shuffle_xor_bits(nonfinite, h);
    for (fkv_u32 i = lane; nonfinite != 0 && i < ROWS * 8; i += 32)
        if ((nonfinite >> i % 8 & 1u) != 0) scores[i / 8 * SG_SCORES_ROW + i % 8] = fkv_float_of(0x7fc00000u);
    fkv_sync();
}

/* Computes the scores of the simdgroup's eight keys and stores them in shared memory. `k` is the chunk that is being loaded for
 * the first slab, and `slab` points to the slab rows of the eight keys. */
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

/* Multiplies the output sums of earlier tiles by the factors of their rows. */
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

/* Processes all keys for the queries in shared memory. */
template <int ROWS, class FORM>
FKV_FN void sg_process_keys(fkv_u32 index, FKV_SHARED float *shared, FKV_LOCAL const sg_item &item, FKV_LOCAL const sg_keys &keys,
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
        if (masked) sg_flag_nonfinite<ROWS, FORM>(lane, eight, scores_at + warp * 8);
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

/* Computes the attention of a block's rows over its keys. On return, shared memory holds the output sums in place of the queries,
 * and {max, total} of each row in place of the row's first two factors. */
template <int ROWS, class FORM>
FKV_FN void sg_attend(fkv_place place, FKV_SHARED float *shared, FKV_LOCAL const sg_item &item, FKV_LOCAL const sg_keys &keys,
                      FKV_DEVICE const void *q) {
    static_assert(SG_SHARED(ROWS) * 4 <= 32768, "threadgroup memory exceeded");
    fkv_u32 warp = place.index / 32;
#if FKV_CALIBRATED
    FKV_DEVICE const fkv_u32 *order = keys.order;
#endif
    for (fkv_u32 row = warp; row < ROWS; row += SG_WARPS)
        fkv_load_query(place.index % 32, q, sg_row_at(item, place.y, row), shared + row * SG_ROW FKV_ORDER_GIVEN);
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
    sg_process_keys<ROWS, FORM>(place.index, shared, item, keys, rows);
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
