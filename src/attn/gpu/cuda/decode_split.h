/* Code shared by the tensor-core decode kernels decode_mma.h (rows of codes) and decode_sealed.h (sealed pages). It defines the
 * layout of blocks and warps, iterates over the pages of the split, loads queries, and stores partial results.
 *
 * The warps of a block form DC_STREAMS groups, called streams, which process the tiles of the split in round-robin order. Each
 * stream has its own softmax state. The states are combined in stream order at the end. The channels of a head are divided into
 * slabs of 128 or 64 channels, and a stream has one warp per slab. The warps of a stream add their scores through shared memory
 * in slab order.
 */
/* ---- block layout ---- */

constexpr int DC_ROWS = FKV_ITEM_ROWS;               /* number of rows (queries x query heads): 4, 8 or 16 */
constexpr int DC_SLAB = FKV_D % 128 == 0 ? 128 : 64; /* channels per warp */
constexpr int DC_SLABS = FKV_D / DC_SLAB;            /* warps per stream */
constexpr int DC_STREAMS = 4;
constexpr int DC_THREADS = 32 * DC_STREAMS * DC_SLABS; /* must equal decode_threads() in kernel_source.c */

/* Coordinates of a thread. Comments refer to lane l of a warp as thread (r, c), where r = l / 4 and c = l % 4. */
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

/* Loads n bytes of a page into registers; n is a compile-time constant. */
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

/* ---- pages of the split ---- */

/* Page table and range of pages that the block reads. */
struct dc_split_pages {
    const fkv_u8 *blocks; /* address of this KV head's block in page 0 */
    const fkv_u32 *pages; /* page table of the sequence */
    fkv_u32 n_fixed;
    fkv_u32 n_ring;
    fkv_u32 skipped;
    fkv_u32 first_visible;
};

FKV_FN dc_split_pages dc_split_pages_of(const fkv_split &split, fkv_u32 head, const void *pool, const fkv_u32 *table) {
    dc_split_pages walk;
    walk.blocks = (const fkv_u8 *)pool + (fkv_u64)head * FKV_BLOCK_BYTES;
    walk.pages = table + split.words[FKV_SPLIT_PAGES];
    walk.n_fixed = split.words[FKV_SPLIT_N_FIXED];
    walk.n_ring = split.words[FKV_SPLIT_N_RING];
    walk.skipped = split.words[FKV_SPLIT_SKIPPED];
    walk.first_visible = split.words[FKV_SPLIT_FIRST_VISIBLE];
    return walk;
}

/* Returns the logical page number of the split's i-th page. */
FKV_FN fkv_u32 dc_logical_page(const dc_split_pages &walk, fkv_u32 i) {
    fkv_u32 visible = walk.first_visible + i;
    return FKV_WINDOW == 0 || visible < FKV_SINK_PAGES ? visible : visible + walk.skipped;
}

/* Returns the pool page number of the split's i-th page. */
FKV_FN fkv_u32 dc_physical_page(const dc_split_pages &walk, fkv_u32 i) {
    fkv_u32 logical = dc_logical_page(walk, i);
    fkv_u32 ring = walk.n_fixed + (FKV_RING ? (logical - walk.n_fixed) % walk.n_ring : 0);
    return walk.pages[logical < walk.n_fixed ? logical : ring];
}

static_assert(DC_STREAMS <= FKV_N_FIRST_PAGES, "every stream takes its first page from the split's entry");

/* Returns the pool page number of the split's i-th page, i < FKV_N_FIRST_PAGES. Unlike dc_physical_page(), reads it from the
 * split's entry, so the first load does not wait for a page-table lookup. */
FKV_FN fkv_u32 dc_first_page(const fkv_split &split, fkv_u32 i) { return split.words[FKV_SPLIT_FIRST_PAGES + i]; }

FKV_FN const fkv_u8 *dc_page_block(const dc_split_pages &walk, fkv_u32 page) {
    return walk.blocks + page * ((fkv_u64)FKV_G * FKV_BLOCK_BYTES);
}

/* ---- query rows ---- */

constexpr int DC_LANE_CHANNELS = FKV_D / 32;

/* Rotates a query row like the keys. Channel d is element d / 32 of lane d % 32. */
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

/* Loads the query row at q[from] and scales it for a base-2 softmax. Returns the largest magnitude in the row as the bit pattern
 * of a float, so that NaN compares as the largest value. */
FKV_FN fkv_u32 dc_load_row(const void *q, fkv_u64 from, float (&x)[DC_LANE_CHANNELS], fkv_u32 lane) {
    const float scale = fkv_float_of(FKV_SCALE_BITS) * 1.44269504f;
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) x[i] = fkv_mul(fkv_row_value(q, from + lane + 32 * (fkv_u32)i), scale);
    if (FKV_ROTATE_K) dc_rotate_row(x, lane);
    fkv_u32 largest = 0;
    FKV_UNROLL
    for (int i = 0; i < DC_LANE_CHANNELS; i++) largest = fkv_max_bits(largest, fkv_bits_of(x[i]) & 0x7fffffffu);
    return fkv_warp_max_bits(largest);
}

/* Returns the index in q of the first value of the block's query row `row`. */
FKV_FN fkv_u64 dc_row_at(const fkv_split &split, fkv_u32 head, fkv_u32 row) {
    fkv_u32 query = (split.first_row + row) / FKV_R;
    fkv_u32 q_head = head * FKV_R + (split.first_row + row) % FKV_R;
    return ((fkv_u64)(split.words[FKV_SPLIT_FIRST_TOKEN] + query) * FKV_H + q_head) * FKV_D;
}

/* ---- tiles ---- */

/* Returns true if all tokens of a tile are visible to all queries of the work item. first, last: positions of the first and last
 * query. base: position of the tile's first token. n: number of tokens in the tile. */
FKV_FN bool dc_is_whole(fkv_u32 first, fkv_u32 last, fkv_u32 base, fkv_u32 n) {
    bool whole = base + n <= first + 1;
    if (FKV_WINDOW != 0) whole = whole && (base + n <= FKV_SINKS || last - base + 1 < FKV_WINDOW + 1);
    return whole;
}

/* Adds, in slab order, the scores that the warps of a stream computed over their slabs of channels. `once` is true if there is
 * only one exchange buffer, which requires a second barrier. */
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

/* ---- results of the split ---- */

/* Returns the maximum score of a row over all streams. stats: [streams, rows, {max, total}]. */
FKV_FN float dc_split_max(FKV_SHARED const float *stats, fkv_u32 row) {
    float max = dc_minus_infinity();
    FKV_UNROLL
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) max = fkv_max(max, stats[(s * DC_ROWS + row) * 2]);
    return max;
}

constexpr int DC_SUM_STRIDE = FKV_D + 1; /* distance between rows of output sums in floats; the padding avoids bank conflicts */
constexpr int DC_STREAM_SUMS = DC_ROWS * DC_SUM_STRIDE;
/* Number of streams whose output sums are in shared memory at the same time: all streams if their sums fit in 18 KB, otherwise
 * one. The limit keeps the static shared memory of a block below 48 KB. */
constexpr int DC_STREAMS_AT_ONCE = DC_STREAMS * DC_STREAM_SUMS <= 4608 ? DC_STREAMS : 1;
constexpr int DC_OUTPUT_WORDS = DC_STREAMS_AT_ONCE * DC_STREAM_SUMS;

/* A thread's part of the block's output sums [rows, D]: thread t holds elements t, t + DC_THREADS, and so on. */
constexpr fkv_u32 DC_OWN_SUMS = DC_ROWS * FKV_D / DC_THREADS;
static_assert(DC_ROWS * FKV_D % DC_THREADS == 0, "every thread holds the same number of output sums");
typedef float dc_output[DC_OWN_SUMS];

/* Loads the thread's output sums from shared memory and adds the sums of the streams in stream order. sums: [DC_STREAMS_AT_ONCE,
 * rows, DC_SUM_STRIDE]. If DC_STREAMS_AT_ONCE is 1, `sums` already contains the totals over all streams. */
FKV_FN void dc_add_streams(FKV_SHARED const float *sums, fkv_u32 index, dc_output &to) {
    FKV_UNROLL
    for (fkv_u32 i = 0; i < DC_OWN_SUMS; i++) {
        fkv_u32 element = index + i * DC_THREADS;
        FKV_SHARED const float *from = sums + element / FKV_D * DC_SUM_STRIDE + element % FKV_D;
        to[i] = from[0];
        FKV_UNROLL
        for (fkv_u32 s = 1; s < DC_STREAMS_AT_ONCE; s++) to[i] += from[s * DC_STREAM_SUMS];
    }
}

/* Stores the output sum, maximum score and total weight of each query row of the split, for the merge kernel. */
FKV_FN void dc_store(const fkv_split &split, fkv_place place, FKV_SHARED const float *stats, const dc_output &sums,
                     const fkv_u32 *table, float *parts) {
    fkv_u64 first = ((fkv_u64)split.number * FKV_G + place.y) * split.all_rows + split.first_row;
    FKV_UNROLL
    for (fkv_u32 i = 0; i < DC_OWN_SUMS; i++) {
        fkv_u32 element = place.index + i * DC_THREADS;
        if (element < split.n_rows * FKV_D) parts[first * FKV_D + element] = sums[i];
    }
    if (place.index >= split.n_rows) return;
    float max = dc_split_max(stats, place.index);
    float total = 0.0f;
    for (fkv_u32 s = 0; s < DC_STREAMS; s++) {
        float own = stats[(s * DC_ROWS + place.index) * 2];
        total =
            fkv_fma(own == dc_minus_infinity() ? 0.0f : fkv_exp2(own - max), stats[(s * DC_ROWS + place.index) * 2 + 1], total);
    }
    float *to = parts + fkv_stats_at(table, place.y * split.all_rows + split.first_row + place.index, split.number);
    to[0] = max;
    to[1] = total;
}
