/* Decode through matrix units: what both of its texts need, decode_mma.h for rows of codes and decode_sealed.h for sealed pages.
 * The block and its warps, the piece of history that it walks, the queries, and where its answer goes.
 *
 * DC_STREAMS warps take the tiles of the piece in turn, each with a softmax of its own, folded in order at the end. Heads larger
 * than a slab (128 or 64 channels) have that many warps for each stream, one for each slab; they add their scores up through
 * shared memory, slab by slab.
 */
/* ---- the block ---- */

constexpr int DC_ROWS = FKV_ITEM_ROWS;                 /* queries x query heads: 4, 8 or 16 */
constexpr int DC_SLAB = FKV_D % 128 == 0 ? 128 : 64;   /* channels of a warp */
constexpr int DC_SLABS = FKV_D / DC_SLAB;              /* warps of a stream */
constexpr int DC_STREAMS = 4;                          /* of tiles, each with a softmax of its own */
constexpr int DC_THREADS = 32 * DC_STREAMS * DC_SLABS; /* as kernel_text.c has it */

/* Which warp, which thread of it: thread l is r = l / 4, c = l % 4. */
struct dc_place {
    fkv_u32 lane;
    fkv_u32 warp;
    fkv_u32 slab;
    fkv_u32 stream;
};

FKV_FN dc_place dc_place_of(fkv_place place) {
    dc_place at;
    at.lane = place.index % 32;
    at.warp = place.index / 32;
    at.slab = at.warp % DC_SLABS;
    at.stream = at.warp / DC_SLABS;
    return at;
}

constexpr fkv_u32 DC_NAN = 0x7fc00000u;

FKV_FN float dc_minus_infinity() { return fkv_float_of(0xff800000u); }

/* ---- loads ---- */

/* n bytes of a page, known when compiled. */
FKV_FN void dc_stream(fkv_u32 *to, const fkv_u8 *at, int n) {
    if (n >= 16) {
        FKV_UNROLL
        for (int i = 0; i < n / 16; i++) {
            fkv_words4 x = fkv_stream16(at + 16 * i);
            FKV_UNROLL
            for (int k = 0; k < 4; k++) to[4 * i + k] = x.w[k];
        }
    } else if (n == 8) {
        fkv_words2 x = fkv_stream8(at);
        to[0] = x.w[0];
        to[1] = x.w[1];
    } else if (n == 4) {
        to[0] = fkv_stream4(at);
    } else if (n == 2) {
        to[0] = fkv_stream2(at);
    } else {
        to[0] = fkv_stream1(at);
    }
}

/* ---- the piece ---- */

/* Where the tiles of the piece lie. */
struct dc_walk {
    const fkv_u8 *blocks; /* of (page 0, this KV head) */
    const fkv_u32 *pages; /* the sequence's */
    fkv_u32 n_fixed;
    fkv_u32 n_ring;
    fkv_u32 skipped;
    fkv_u32 first_seen;
};

FKV_FN dc_walk dc_walk_of(const fkv_piece &piece, fkv_u32 head, const void *pool, const fkv_u32 *table) {
    dc_walk walk;
    walk.blocks = (const fkv_u8 *)pool + (fkv_u64)head * FKV_BLOCK_BYTES;
    walk.pages = table + piece.words[FKV_PIECE_PAGES];
    walk.n_fixed = piece.words[FKV_PIECE_N_FIXED];
    walk.n_ring = piece.words[FKV_PIECE_N_RING];
    walk.skipped = piece.words[FKV_PIECE_SKIPPED];
    walk.first_seen = piece.words[FKV_PIECE_FIRST_SEEN];
    return walk;
}

/* The i-th page of the piece: its number in the sequence. */
FKV_FN fkv_u32 dc_logical_page(const dc_walk &walk, fkv_u32 i) {
    fkv_u32 seen = walk.first_seen + i;
    return FKV_WINDOW == 0 || seen < FKV_SINK_PAGES ? seen : seen + walk.skipped;
}

/* And in the pool. */
FKV_FN fkv_u32 dc_physical_page(const dc_walk &walk, fkv_u32 i) {
    fkv_u32 logical = dc_logical_page(walk, i);
    fkv_u32 ring = walk.n_fixed + (FKV_RING ? (logical - walk.n_fixed) % walk.n_ring : 0);
    return walk.pages[logical < walk.n_fixed ? logical : ring];
}

FKV_FN const fkv_u8 *dc_page_block(const dc_walk &walk, fkv_u32 page) {
    return walk.blocks + page * ((fkv_u64)FKV_G * FKV_BLOCK_BYTES);
}

/* ---- one warp, one row: channel d is lane d % 32's number d / 32 ---- */

constexpr int DC_LANE_CHANNELS = FKV_D / 32;

/* Rotated as the keys are. */
FKV_FN void dc_rotate_row(float *x, fkv_u32 lane) {
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) x[i] = fkv_float_of(fkv_bits_of(x[i]) ^ fkv_k_sign(lane + 32 * (fkv_u32)i));
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) {
        FKV_UNROLL
        for (int i = 0; i < DC_LANE_CHANNELS; i++) {
            float other = fkv_shuffle_xor(x[i], h);
            x[i] = (lane & h) == 0 ? x[i] + other : other - x[i];
        }
    }
    FKV_UNROLL
    for (int h = 1; h < FKV_ROTATION_BLOCK / 32; h *= 2) {
        FKV_UNROLL
        for (int i = 0; i < DC_LANE_CHANNELS; i++) {
            if ((i & h) != 0) continue;
            float a = x[i];
            float b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) x[i] = fkv_mul(x[i], fkv_rotation_norm());
}

/* The row at q[from], scaled for a softmax of powers of two. Returns its largest number as bits, so that NaN is the largest. */
FKV_FN fkv_u32 dc_load_row(const void *q, fkv_u64 from, float (&x)[DC_LANE_CHANNELS], fkv_u32 lane) {
    const float scale = fkv_float_of(FKV_SCALE_BITS) * 1.44269504f;
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) x[i] = fkv_mul(fkv_row_number(q, from + lane + 32 * (fkv_u32)i), scale);
    if (FKV_ROTATE_K) dc_rotate_row(x, lane);
    fkv_u32 largest = 0;
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) largest = fkv_max_bits(largest, fkv_bits_of(x[i]) & 0x7fffffffu);
    return fkv_warp_max_bits(largest);
}

/* Where row `row` of the block lies among all queries. */
FKV_FN fkv_u64 dc_row_at(const fkv_piece &piece, fkv_u32 head, fkv_u32 row) {
    fkv_u32 query = (piece.first_row + row) / FKV_R;
    fkv_u32 q_head = head * FKV_R + (piece.first_row + row) % FKV_R;
    return ((fkv_u64)(piece.words[FKV_PIECE_FIRST_TOKEN] + query) * FKV_H + q_head) * FKV_D;
}

/* ---- a tile of a stream ---- */

/* Whether all queries of the item see all n tokens of a tile. first, last: their positions; base: that of its first token. */
FKV_FN bool dc_is_whole(fkv_u32 first, fkv_u32 last, fkv_u32 base, fkv_u32 n) {
    bool whole = base + n <= first + 1;
    if (FKV_WINDOW != 0) whole = whole && (base + n <= FKV_SINKS || last - base + 1 < FKV_WINDOW + 1);
    return whole;
}

/* Scores of all slabs added up, in the order of the slabs. once: the exchange is used again at once. */
template <int ROWS, int TOKENS>
FKV_FN void dc_add_slabs(FKV_SHARED float *exchange, bool once, dc_place at, float (&score)[ROWS][TOKENS]) {
    constexpr int n = ROWS * TOKENS;
    FKV_SHARED float *own = exchange + (at.stream * DC_SLABS + at.slab) * (n * 32) + at.lane;
    FKV_SHARED const float *all = exchange + at.stream * DC_SLABS * (n * 32) + at.lane;
    FKV_UNROLL
    for (int i = 0; i < n; i++) own[i * 32] = score[i / TOKENS][i % TOKENS];
    fkv_sync_team(1 + at.stream, 32 * DC_SLABS);
    FKV_UNROLL
    for (int i = 0; i < n; i++) {
        float sum = all[i * 32];
        FKV_UNROLL
        for (int s = 1; s < DC_SLABS; s++) sum += all[(s * n + i) * 32];
        score[i / TOKENS][i % TOKENS] = sum;
    }
    if (once) fkv_sync_team(1 + at.stream, 32 * DC_SLABS);
}

/* ---- the end ---- */

/* stats: [streams, rows, {max, total}]. The largest of a row's. */
FKV_FN float dc_piece_max(FKV_SHARED const float *stats, fkv_u32 row) {
    float max = dc_minus_infinity();
    FKV_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) max = fkv_max(max, stats[(s * DC_ROWS + row) * 2]);
    return max;
}

/* Sums, max and total of the piece's rows to where the merge finds them. */
FKV_FN void dc_store(const fkv_piece &piece, fkv_place place, FKV_SHARED const float *stats, FKV_SHARED const float *sums,
                     const fkv_u32 *table, float *parts) {
    fkv_u64 first = ((fkv_u64)piece.number * FKV_G + place.y) * piece.all_rows + piece.first_row;
    for (fkv_u32 i = place.index; i < piece.n_rows * FKV_D; i += DC_THREADS) parts[first * FKV_D + i] = sums[i];
    if (place.index >= piece.n_rows) return;
    float max = dc_piece_max(stats, place.index);
    float total = 0.0f;
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) {
        float own = stats[(s * DC_ROWS + place.index) * 2];
        total =
            fkv_fma(own == dc_minus_infinity() ? 0.0f : fkv_exp2(own - max), stats[(s * DC_ROWS + place.index) * 2 + 1], total);
    }
    float *to = parts + fkv_stats_at(table, place.y * piece.all_rows + piece.first_row + place.index, piece.number);
    to[0] = max;
    to[1] = total;
}
