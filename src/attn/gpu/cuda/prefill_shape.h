/* Part of the prefill kernel in prefill_wgmma.h: tile sizes, shared-memory layout, channel order, and the range of keys that a
 * thread block processes.
 *
 * Shared memory holds the queries with their factors and sums, the mbarriers, stages of unpacked keys and values, and stages of
 * packed tiles. A stage is a buffer for one tile. The number of stages is the largest that fits, because it determines how far
 * unpacking can run ahead of the matrix products.
 */
constexpr int PF_DP = FKV_D > 256 ? (FKV_D + 127) / 128 * 128 : (FKV_D + 63) / 64 * 64;
constexpr bool PF_HALVES = PF_DP > 256; /* true if both MMA warpgroups process the same rows, each for half of V's channels */
constexpr int PF_ROWS = FKV_PREFILL_ROWS;
constexpr int PF_COLS = PF_HALVES ? PF_DP / 2 : PF_DP;
constexpr int PF_PARTS = FKV_ROW_TYPE == 0 || FKV_ROTATE_K ? 2 : 1;
constexpr int PF_THREADS = FKV_PREFILL_THREADS;
constexpr int PF_FEEDERS =
    FKV_SEALED ? 2 : 1; /* number of warpgroups that unpack pages; for sealed pages, one unpacks keys and one values */
static_assert(PF_ROWS == (PF_HALVES ? 64 : 128) && PF_THREADS == (PF_FEEDERS + 2) * 128,
              "rows and threads must match kernel_source.c");
constexpr int PF_SHARED_LIMIT = 227 * 1024;
constexpr bool PF_WIDE = FKV_SEALED && FKV_D > 128; /* true if a tile is half of a sealed page, which saves shared memory */
constexpr bool PF_SCALED =
    FKV_K_BITS != 16 &&
    !FKV_K_SEALED; /* true if dot products must be multiplied by K's scales; sealed keys already include their scales */
constexpr int PF_GROUPS = PF_SCALED ? FKV_D / FKV_K_GROUP : 1;
constexpr bool PF_Q_HELD = PF_DP <= 128 && PF_PARTS == 1 && PF_GROUPS <= 2; /* true if queries are kept in registers */
constexpr bool PF_BIASED = PF_Q_HELD && PF_SCALED;                          /* true if K's biases are stored as extra channels */

constexpr float PF_SUM_UNIT = 16384.0f / FKV_K_GROUP; /* if PF_BIASED is true, query sums are multiplied by this factor */

constexpr int PF_Q_BYTES = PF_ROWS * PF_DP * 2;
constexpr int PF_TO_SHARE_BYTES =
    FKV_SEALED && !PF_WIDE ? FKV_BLOCK_BYTES : 0; /* packed page that this block unpacks for other blocks */
constexpr int PF_ORDER_BYTES = FKV_CALIBRATED ? (2 * FKV_D + 8 + 15) / 16 * 16 : 0; /* see pf_put_order() */
constexpr int PF_FIXED_BYTES = 1024 + PF_PARTS * PF_Q_BYTES + PF_ROWS * 4 + PF_GROUPS * PF_ROWS * 4 + 192 + PF_ROWS +
                               (FKV_SEALED ? 32 + 4 * 144 : 0) + PF_TO_SHARE_BYTES + PF_ORDER_BYTES;
constexpr int PF_MORE_KEYS =
    FKV_K_SEALED ? 8 : 0; /* number of extra keys that hold the channel offsets of four sealed pages, two keys per page */
constexpr int pf_tile_bytes(int keys) { return keys * PF_DP * 2; }
/* Layout of a tile of values in a sealed layer: a row of 128 bytes holds the values of one channel for 64 tokens or, if a tile
 * has only 32 tokens, of channel c and of channel c + PF_V_WIDTH. One matrix product covers PF_V_WIDTH adjacent channels. */
constexpr int PF_V_FOLDS = PF_WIDE ? 2 : 1; /* number of channels per row */
constexpr int PF_V_WIDTH = !PF_WIDE ? PF_COLS : PF_COLS % 256 == 0 ? 128 : 64;
constexpr int pf_value_bytes(int keys) {
    constexpr int channels = PF_V_FOLDS * PF_V_WIDTH;
    return PF_WIDE ? (PF_DP + channels - 1) / channels * PF_V_WIDTH * 128 : pf_tile_bytes(keys);
}
/* low-order parts of open keys, or third digits of calibrated keys; score products of wide heads also read the 8 rows that follow
 */
constexpr int pf_low_bytes(int keys) { return FKV_K_SEALED ? pf_tile_bytes(keys) + (PF_WIDE ? PF_MORE_KEYS * 128 : 0) : 0; }
constexpr int pf_scales_bytes(int keys) { return PF_SCALED ? PF_GROUPS * keys * (PF_BIASED ? 4 : 8) : 0; }
constexpr int pf_biases_bytes(int keys) { return PF_BIASED ? keys * 128 : 0; }
constexpr int pf_packed_bytes(int keys) {
    if (FKV_SEALED) { /* part of an open page, or a sealed page of which only a part is copied */
        int open = FKV_OPEN_BLOCK_BYTES / FKV_PAGE_TOKENS * keys;
        return open > FKV_BLOCK_BYTES ? open : FKV_BLOCK_BYTES;
    }
    return FKV_PAGE_TOKENS <= keys
               ? keys / FKV_PAGE_TOKENS * FKV_BLOCK_BYTES
               : keys * (FKV_D * FKV_K_BITS / 8 + FKV_D * FKV_V_BITS / 8 + (FKV_K_BITS == 16 ? 0 : 4 * FKV_D / FKV_K_GROUP) +
                         (FKV_V_BITS == 16 ? 0 : 4 * FKV_D / FKV_V_GROUP));
}
constexpr bool pf_fits(int keys, int stages, int packed, int lows = 1) {
    int stage = pf_tile_bytes(keys + PF_MORE_KEYS) + pf_value_bytes(keys) + pf_scales_bytes(keys) + pf_biases_bytes(keys);
    return PF_FIXED_BYTES + lows * pf_low_bytes(keys) + stages * stage + packed * pf_packed_bytes(keys) <= PF_SHARED_LIMIT;
}
constexpr int PF_KEYS = PF_DP > 128 ? (pf_fits(32, 1, 1) ? 32 : 16) : 64;
constexpr int PF_STAGES = pf_fits(PF_KEYS, 3, 2) ? 3 : pf_fits(PF_KEYS, 2, 1) ? 2 : 1;
/* Number of buffers for low-order parts of keys. With two buffers, an open page can be unpacked while the matrix products still
 * read the previous page. */
constexpr int PF_LOWS = FKV_K_SEALED && pf_fits(PF_KEYS, PF_STAGES, 2, 2) ? 2 : 1;
constexpr int PF_PACKED = pf_fits(PF_KEYS, PF_STAGES, 3, PF_LOWS) ? 3 : pf_fits(PF_KEYS, PF_STAGES, 2, PF_LOWS) ? 2 : 1;
constexpr int PF_K_ROWS = PF_KEYS + PF_MORE_KEYS;
static_assert(PF_LOWS <= PF_STAGES,
              "a buffer of low-order parts must be reused no later than the stage whose mbarrier protects it");
static_assert(!PF_WIDE || (FKV_K_BITS == 4 && FKV_V_BITS == 4), "wide heads support only 4-bit codes");
static_assert(!FKV_SEALED || (FKV_PAGE_TOKENS == 64 && PF_KEYS == (PF_WIDE ? 32 : 64)),
              "a sealed page must be one tile, or two tiles for wide heads; see fkv_prefill_has_warpgroups()");

template <int BITS, int GROUP> struct pf_side {
    static constexpr int row_bytes = FKV_D * BITS / 8;
    static constexpr int chunk_bytes =
        BITS == 2 && (GROUP == 32 || row_bytes % 16 != 0) ? 8 : 16; /* packed bytes per chunk (codes of one scale group) */
    static constexpr int words = chunk_bytes / 4;
    static constexpr int channels = chunk_bytes * 8 / BITS;
    static constexpr int units = channels / 8; /* number of units (eight fp16 values each) per chunk */
    static constexpr int chunks = FKV_D / channels;
    static constexpr int groups = BITS == 16 ? 1 : FKV_D / GROUP;
    static constexpr int per_group = chunks / groups;
    static constexpr bool spread =
        BITS == 16 ||
        per_group % 2 == 0; /* true if the units of a chunk are stored at a stride of `chunks` units, to avoid bank conflicts */
    static constexpr int per_thread = (chunks * PF_KEYS + 127) / 128;
    static constexpr int batch =
        per_thread < 4 ? per_thread : 4; /* number of chunks that a thread holds in registers at a time */
    static constexpr int batches = (per_thread + batch - 1) / batch;

    /* Returns the index of unit u (eight values) of a chunk within a row of shared memory. */
    FKV_FN fkv_u32 unit_at(fkv_u32 chunk, fkv_u32 u, bool spread_out) {
        return spread_out ? u * chunks + chunk : chunk * units + u;
    }
    /* Returns the channel of the value at index `place` of a row in shared memory. */
    FKV_FN fkv_u32 channel(fkv_u32 place, bool spread_out) {
        fkv_u32 p = place / 8, e = place % 8;
        fkv_u32 chunk = spread_out ? p % chunks : p / units;
        fkv_u32 u = spread_out ? p / chunks : p % units;
        fkv_u32 within = u * 8 + e;
        if (BITS == 4) within = u * 8 + e / 2 + 4 * (e % 2);
        if (BITS == 2) within = u / 2 * 16 + u % 2 * 4 + e / 2 + 8 * (e % 2);
        return chunk * channels + within;
    }
    /* Returns the key that chunk c belongs to. The chunks are ordered such that eight neighbouring threads store to eight
     * different units. */
    FKV_FN fkv_u32 key_of(fkv_u32 c) {
        if (chunks < 8 && 8 % chunks == 0) return c / 8 % chunks + c % 8 / chunks * chunks + c / (8 * chunks) * 8;
        return c / chunks;
    }
};
#if FKV_SEALED
/* Returns the channel at index `place` of a row. Channels are in the order in which pf_put_unit() extracts codes. With calibrated
 * keys, returns a position in the channel order of the KV head (see pf_key_channel()). */
FKV_FN fkv_u32 pf_k_channel(fkv_u32 place) { return FKV_CALIBRATED ? place : place / 4 * 4 + place % 2 * 2 + place / 2 % 2; }
FKV_FN fkv_u32 pf_v_channel(fkv_u32 place) { return place; }
#else
typedef pf_side<FKV_K_BITS, FKV_K_GROUP> pf_k;
typedef pf_side<FKV_V_BITS, FKV_V_GROUP> pf_v;
FKV_FN fkv_u32 pf_k_channel(fkv_u32 place) { return pf_k::channel(place, pf_k::spread); }
FKV_FN fkv_u32 pf_v_channel(fkv_u32 place) { return pf_v::channel(place, true); }
#endif
constexpr int PF_GROUP_STEPS = FKV_D / PF_GROUPS / 16; /* number of matrix products (16 channels each) per scale group */

/* Number of matrix products (16 channels each) with the third digits of calibrated keys (prefill_sealed.h), and the size of the
 * third digits of a shared page, in bytes. */
constexpr int PF_THIRD_STEPS = FKV_CALIBRATED ? (FKV_D / 2 + 15) / 16 : 0;
constexpr int PF_THIRD_BYTES = FKV_CALIBRATED ? PF_KEYS * 128 : 0;
static_assert(PF_WIDE || PF_THIRD_STEPS <= 4, "the third digits of a shared page must be in its first 64 channels");

/* shared memory layout, in bytes from the base */
constexpr int PF_TILE_BYTES = pf_value_bytes(PF_KEYS); /* size of a tile of values */
constexpr int PF_K_BYTES = pf_tile_bytes(PF_K_ROWS);
constexpr int PF_SCALES_BYTES = pf_scales_bytes(PF_KEYS);
constexpr int PF_BIASES_BYTES = pf_biases_bytes(PF_KEYS);
constexpr int PF_PACKED_BYTES = pf_packed_bytes(PF_KEYS);
constexpr int PF_AT_Q = 0;
constexpr int PF_AT_K = PF_PARTS * PF_Q_BYTES;
constexpr int PF_AT_LOW = PF_AT_K + PF_STAGES * PF_K_BYTES; /* PF_LOWS buffers; see pf_low_bytes() */
constexpr int PF_LOW_BYTES = pf_low_bytes(PF_KEYS);
constexpr int PF_AT_V = PF_AT_LOW + PF_LOWS * PF_LOW_BYTES;
constexpr int PF_AT_BIASES = PF_AT_V + PF_STAGES * PF_TILE_BYTES;
constexpr int PF_AT_SCALES = PF_AT_BIASES + PF_STAGES * PF_BIASES_BYTES;
constexpr int PF_AT_PACKED = PF_AT_SCALES + PF_STAGES * PF_SCALES_BYTES;
constexpr int PF_AT_FACTORS = /* [rows] score factors, stored after the packed page that is unpacked for other blocks */
    PF_AT_PACKED + PF_PACKED * PF_PACKED_BYTES + PF_TO_SHARE_BYTES;
constexpr int PF_AT_SUMS = PF_AT_FACTORS + PF_ROWS * 4; /* [scale groups, rows] sums of the query values */
constexpr int PF_AT_MBARRIERS = PF_AT_SUMS + PF_GROUPS * PF_ROWS * 4;
constexpr int PF_AT_NONFINITE = PF_AT_MBARRIERS + 176; /* one byte per row: 1 if a non-finite value is visible to the row */
constexpr int PF_AT_WHERE = PF_AT_NONFINITE + PF_ROWS; /* {position, first_row, n_rows} of the block, for pf_mark_rows() */
constexpr int PF_AT_UNITS = PF_AT_WHERE + 16;          /* array of PF_STAGES + 1 pf_page_unit, for sealed pages */
/* number of blocks that started before this block; after the block has released the ring, 1 if it is the last block of the launch
 * to do so, 0 otherwise (prefill_share.h) */
constexpr int PF_AT_NUMBER = PF_AT_UNITS + 4 * 144;
constexpr int PF_AT_READY = PF_AT_NUMBER + 4; /* number of tiles known to be in the ring or in an open image (prefill_share.h) */
constexpr int PF_AT_SHARED_PAGES = PF_AT_NUMBER + 12; /* the shared pages, decided by one thread; see pf_take_shared_pages() */
constexpr int PF_AT_THROUGH = PF_AT_NUMBER + 8;       /* number of tiles after the first that are finished (prefill_share.h) */
constexpr int PF_AT_ORDER = PF_AT_NUMBER + 16;        /* channel order of the KV head; see pf_put_order() */
constexpr int PF_AT_END = FKV_SEALED ? PF_AT_ORDER + PF_ORDER_BYTES : PF_AT_UNITS;
constexpr int PF_OUT_STRIDE = FKV_D + 4; /* stride of the output rows, in floats; output rows may overwrite everything before
                                            PF_AT_NONFINITE or, if pages are shared, before PF_AT_PACKED */
constexpr int PF_OUT_BYTES = PF_ROWS * PF_OUT_STRIDE * 4;
constexpr int PF_USED_BYTES = PF_AT_END;
constexpr int PF_SHARED_BYTES = 1024 + (PF_USED_BYTES > PF_OUT_BYTES ? PF_USED_BYTES : PF_OUT_BYTES);
static_assert(PF_SHARED_BYTES <= PF_SHARED_LIMIT, "the block needs more than PF_SHARED_LIMIT bytes of shared memory");
static_assert(PF_OUT_BYTES <= PF_AT_NONFINITE, "the output rows must not overwrite the marks of rows that see non-finite values");
static_assert(PF_THREADS / 32 * FKV_D * 4 <= PF_AT_FACTORS - PF_AT_K,
              "not enough space for the query rows that are being converted");

/* Kinds of mbarriers. PF_FULL: the keys of a tile and the values of the previous tile have been unpacked. PF_PACKED_FULL: a
 * packed tile has arrived. PF_K_EMPTY, PF_V_EMPTY, PF_PACKED_EMPTY: the buffer for keys, values or a packed tile may be
 * overwritten. PF_TURN: it is the warpgroup's turn to compute scores. PF_TO_SHARE_FULL: the packed page that this block unpacks
 * for other blocks has arrived. */
enum { PF_FULL, PF_K_EMPTY, PF_V_EMPTY, PF_PACKED_FULL, PF_PACKED_EMPTY, PF_TURN, PF_TO_SHARE_FULL };
FKV_FN fkv_u32 pf_mbarrier(int kind, int stage) { return (fkv_u32)(PF_AT_MBARRIERS + (kind * 3 + stage) * 8); }

/* Work of one thread block: its query rows and the tiles of keys that they attend to. */
struct pf_item {
    const fkv_u8 *pool; /* address of this KV head's block in page 0 */
    const fkv_u32 *pages;
    fkv_u32 n_fixed, n_ring;
#if FKV_SEALED
    const fkv_u8 *open;
    const fkv_u32 *open_pages;
    fkv_u32 n_open_fixed, n_open_ring;
    fkv_u8 *ring; /* device memory shared between blocks; see prefill_share.h */
    const fkv_u32 *table;
    fkv_u32 number;     /* index of the query tile in the step table */
    fkv_u32 shared_end; /* the block reads tiles [1, shared_end) from the ring; 1 means none */
    fkv_u32 group_end;  /* the group unpacks sealed pages [1, group_end) into the ring; some members need only the first of these
                           pages */
    fkv_u32 open_begin, open_end; /* the group unpacks open pages [open_begin, open_end) into its open images */
#endif
    fkv_u32 first_token; /* index of the query tile's first token among the step's tokens */
    fkv_u32 head;
    fkv_u32 position;    /* position of the query tile's first query */
    fkv_u32 first_row;   /* index of the block's first row among the rows (queries x heads) of the query tile */
    fkv_u32 n_rows;      /* number of rows of this block */
    fkv_u32 begin, last; /* begin: first token in the window of the first row; last: position of the last row */
    /* The block reads n_tiles tiles of keys: n_front tiles with sink tokens, then the tiles that start at first_back. */
    fkv_u32 n_front, first_back, n_tiles;
};

FKV_FN bool pf_is_sink(fkv_u32 token) { return token + 1 < FKV_SINKS + 1; }

FKV_FN fkv_u32 pf_position(const pf_item &x, fkv_u32 row) {
    fkv_u32 r = row < x.n_rows ? row : x.n_rows - 1;
    return x.position + (x.first_row + r) / FKV_R;
}

FKV_FN pf_item pf_item_at(const fkv_u8 *pool FKV_OPEN_POOL, const fkv_u32 *table, fkv_u32 tile_number, fkv_u32 head,
                          fkv_u32 slice) {
    const fkv_u32 *tile = table + table[FKV_STEP_TILES] + tile_number * FKV_TILE_WORDS;
    pf_item x;
    x.pool = pool + (fkv_u64)head * FKV_BLOCK_BYTES;
    x.pages = table + tile[FKV_TILE_PAGES];
    x.n_fixed = tile[FKV_TILE_N_FIXED];
    x.n_ring = tile[FKV_TILE_N_RING];
#if FKV_SEALED
    x.open = (const fkv_u8 *)open + (fkv_u64)head * FKV_OPEN_BLOCK_BYTES;
    x.open_pages = table + tile[FKV_TILE_OPEN_PAGES];
    x.n_open_fixed = tile[FKV_TILE_OPEN_FIXED];
    x.n_open_ring = tile[FKV_TILE_OPEN_RING];
    x.ring = (fkv_u8 *)ring;
    x.table = table;
    x.number = tile_number;
    x.shared_end = x.group_end = 1;
#endif
    x.first_token = tile[FKV_TILE_FIRST_TOKEN];
    x.head = head;
    x.position = tile[FKV_TILE_POSITION];
    x.first_row = slice * PF_ROWS;
    fkv_u32 all = tile[FKV_TILE_N_QUERIES] * FKV_R;
    x.n_rows = all <= x.first_row ? 0 : (all - x.first_row < PF_ROWS ? all - x.first_row : PF_ROWS);
    if (x.n_rows == 0) return x;
    fkv_u32 first = pf_position(x, 0);
    x.last = pf_position(x, PF_ROWS);
    x.begin = FKV_WINDOW != 0 && first + 1 > FKV_WINDOW ? first + 1 - FKV_WINDOW : 0;
    x.first_back = x.begin / PF_KEYS;
    x.n_front = (FKV_SINKS + PF_KEYS - 1) / PF_KEYS;
    if (FKV_WINDOW == 0) x.n_front = 0;
    if (x.n_front > x.first_back) x.n_front = x.first_back;
    x.n_tiles = x.n_front + x.last / PF_KEYS + 1 - x.first_back;
    return x;
}

#if FKV_CALIBRATED
/* Stores the channel order of the KV head (see fkv_kernel_orders()) in shared memory, as an array of 16-bit channel numbers,
 * followed by two 32-bit words: the number of channels with at least 4 bits and the number of channels with 6 bits. Called by all
 * threads. */
FKV_FN void pf_put_order(fkv_shared s, const fkv_u32 *order) {
    if (s.index < FKV_D) *(fkv_u16 *)(s.base + PF_AT_ORDER + 2 * s.index) = (fkv_u16)order[2 + s.index];
    if (s.index < 2) *(fkv_u32 *)(s.base + PF_AT_ORDER + 2 * FKV_D + 4 * s.index) = order[s.index];
    fkv_sync();
}
/* Returns the number of channels with at least `bits` bits (4 or 6). */
FKV_FN fkv_u32 pf_channels_with(fkv_shared s, fkv_u32 bits) { return fkv_get4(s, PF_AT_ORDER + 2 * FKV_D + (bits == 4 ? 0 : 4)); }
#endif

/* Returns the channel of the value at index `place` of a query row or of a key in shared memory. */
FKV_FN fkv_u32 pf_key_channel(fkv_shared s, fkv_u32 place) {
#if FKV_CALIBRATED
    return fkv_get2(s, PF_AT_ORDER + 2 * pf_k_channel(place));
#else
    return pf_k_channel(place);
#endif
}

FKV_FN fkv_u32 pf_first_key(const pf_item &x, fkv_u32 tile) {
    return (tile < x.n_front ? tile : tile - x.n_front + x.first_back) * PF_KEYS;
}

#if FKV_SEALED
/* Returns true if the block reads a page from the open pool. All queries of a block are in one page, so the answer is the same
 * for all of them. */
FKV_FN bool pf_is_open(const pf_item &x, fkv_u32 logical) { return fkv_reads_open(x.position / FKV_PAGE_TOKENS, logical); }
#endif

/* Number of shared pages whose channel offsets are stored together, after the keys of the first of these pages. A page that is
 * not shared is followed by its own offsets. */
constexpr fkv_u32 PF_FOUR = 4;
static_assert(!FKV_SEALED || PF_MORE_KEYS == 2 * PF_FOUR, "there must be two offset keys per page");

#if FKV_SEALED
FKV_FN fkv_u32 pf_open_page_at(const pf_item &x, fkv_u32 logical) {
    return x.open_pages[logical < x.n_open_fixed ? logical : x.n_open_fixed + (logical - x.n_open_fixed) % x.n_open_ring];
}
#endif
FKV_FN fkv_u32 pf_sealed_page_at(const pf_item &x, fkv_u32 logical) {
    return x.pages[logical < x.n_fixed ? logical : x.n_fixed + (logical - x.n_fixed) % x.n_ring];
}

FKV_FN fkv_u32 pf_page_at(const pf_item &x, fkv_u32 logical) {
#if FKV_SEALED
    if (pf_is_open(x, logical)) return pf_open_page_at(x, logical);
#endif
    return pf_sealed_page_at(x, logical);
}

/* ---- non-finite values ---- */

/* Marks the rows to which `token` is visible. Called if the token has a non-finite value. The row range is read from shared
 * memory, because this case is rare and the unpacking code has no registers to spare. */
FKV_FN void pf_mark_rows(fkv_shared s, fkv_u32 token) {
    const fkv_u32 *where = (const fkv_u32 *)(s.base + PF_AT_WHERE);
    for (fkv_u32 row = 0; row < where[2]; row++)
        if (fkv_is_visible(where[0] + (where[1] + row) / FKV_R, token)) fkv_mark(s.base + PF_AT_NONFINITE + row);
}

/* Clears the marks of all rows (PF_AT_NONFINITE) before the first tile. Called by all threads. */
FKV_FN void pf_clear_marks(fkv_shared s, const pf_item &x) {
    if (s.index < PF_ROWS) s.base[PF_AT_NONFINITE + s.index] = 0;
    fkv_u32 *where = (fkv_u32 *)(s.base + PF_AT_WHERE);
    if (s.index == 0) where[0] = x.position, where[1] = x.first_row, where[2] = x.n_rows;
}

/* Factors of one page. `sum` is the factor for the dot products of the page's keys with the queries. `norms` holds the norms of
 * the page's tokens, by which softmax weights are multiplied. Each word holds two norms in fp16, and the norms for the keys of
 * one thread are adjacent. The norms of a page are stored together with its keys. They may still be in use when the keys of a
 * later page are stored in the same stage, so there are PF_STAGES + 1 slots for norms. */
struct alignas(16) pf_page_unit {
    float sum;
    alignas(16) fkv_u32 norms[32];
};
static_assert(sizeof(pf_page_unit) == 144 && PF_STAGES <= 3,
              "PF_AT_UNITS reserves 144 bytes per page unit, and PF_AT_MBARRIERS reserves space for at most 3 stages");
FKV_FN fkv_u32 pf_unit_at(fkv_u32 tile) { return (fkv_u32)PF_AT_UNITS + tile % (PF_STAGES + 1) * (fkv_u32)sizeof(pf_page_unit); }
/* Returns the offset of the low-order parts of an open tile's keys, or of the third digits of a sealed tile's keys. */
FKV_FN fkv_u32 pf_low_at(fkv_u32 tile) { return (fkv_u32)PF_AT_LOW + tile % PF_LOWS * (fkv_u32)PF_LOW_BYTES; }
/* Returns the byte offset of the norms of tokens 2 * pair and 2 * pair + 1 in pf_page_unit. */
FKV_FN fkv_u32 pf_norms_at(fkv_u32 pair) { return 16 + pair % 4 * 32 + pair / 4 * 4; }

struct alignas(16) pf_floats4 {
    float x, y, z, w;
};
struct alignas(8) pf_floats2 {
    float x, y;
};
struct alignas(16) pf_words4 {
    fkv_u32 w[4];
};
struct alignas(8) pf_words2 {
    fkv_u32 w[2];
};
