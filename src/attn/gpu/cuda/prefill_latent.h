/* Warpgroup prefill kernel for latent pages with 8-bit codes. Runs on sm_90a and is emulated on the host. Grid: (tile of the step
 * table, 1, slice of LP_ROWS rows of queries x heads). The keys are processed in tiles of LP_KEYS tokens. Scores never leave the
 * thread block.
 *
 * Warpgroup 0 copies packed tiles to shared memory with cp.async. Warpgroup 1 computes scores and softmax weights. Warpgroups 2
 * and 3 decode the codes to fp16 values in registers and multiply them by the weights, each for half of the channels. While
 * warpgroups 2 and 3 multiply the weights of a tile, warpgroup 1 computes the scores of the next tile.
 *
 * Scores are computed from integer products. Each query value is rounded to an integer of LP_DIGITS bytes, and the codes of a
 * page are used as stored. A score is the sum over scale groups of s * (q . codes) + b * sum(q), where s and b are the scale and
 * bias of the group. Each RoPE channel of a query is split into two 16-bit floating-point values, and each sum into three.
 * Weights and values are rounded to fp16.
 *
 * The result of a row does not depend on batching: tiles start at multiples of LP_KEYS, masked tiles add only zeros, and a row's
 * sums are rescaled only when its own maximum grows. The bottleneck is the score computation in warpgroup 1.
 */
constexpr int LP_ROWS = FKV_PREFILL_ROWS;
constexpr int LP_THREADS = FKV_PREFILL_THREADS;
constexpr int LP_KEYS = 64;
constexpr int LP_GROUP = 64; /* channels per scale group */
constexpr int LP_GROUPS = FKV_D / LP_GROUP;
constexpr int LP_COLS = FKV_D / 2; /* channels per warpgroup (2 or 3) */
/* Number of bytes per query integer. Rotated queries have no channels that are much larger than the others, so 16 bits are
 * sufficient. */
constexpr int LP_DIGITS = FKV_ROTATE_K ? 2 : 3;
/* Largest query integer. A dot product of 64 such integers with 64 codes fits into 32 bits. */
constexpr float LP_LARGEST = LP_DIGITS == 2 ? 32767.0f : 131071.0f;
static_assert(LP_ROWS == 64 && LP_THREADS == 512 && FKV_G == 1, "rows and threads must match kernel_source.c");
static_assert(FKV_D == 512 && FKV_ROPE == 64 && FKV_K_BITS == 8 && FKV_K_GROUP == LP_GROUP && FKV_V_BITS == 16,
              "see fkv_prefill_has_warpgroups()");

/* Registers per thread for each type of warpgroup. Their sum over the four warpgroups equals the initial allocation of
 * 512. */
enum { LP_REGS_FEED = 24, LP_REGS_SCORE = 136, LP_REGS_MULTIPLY = 176 };

/* ---- shared memory layout, in bytes from the base ---- */

/* Tiles have rows of 128 bytes, whose 16-byte units are swizzled (see warpgroup_cuda.h). A matrix of bytes is divided into blocks
 * of 128 channels, and a matrix of 16-bit values into blocks of 64 channels. */
constexpr int LP_BLOCK_BYTES = 64 * 128; /* size of a block of 64 rows */
constexpr int LP_Q_BYTES = FKV_D / 128 * LP_BLOCK_BYTES;
constexpr int LP_CODES_BYTES = FKV_D / 128 * LP_BLOCK_BYTES;
constexpr int LP_SCALES_BYTES = LP_GROUPS * LP_KEYS * 4;
constexpr int LP_LINES_BYTES = LP_GROUPS * LP_KEYS * 4;
constexpr int LP_AT_Q = 0; /* [digits] bytes of the queries; the first matrix holds the highest bytes, which are signed */
constexpr int LP_AT_Q_ROPE = LP_AT_Q + LP_DIGITS * LP_Q_BYTES; /* RoPE channels of the queries, split into two terms */
constexpr int LP_AT_CODES = LP_AT_Q_ROPE + 2 * LP_BLOCK_BYTES; /* [2 stages] */
constexpr int LP_AT_ROPE = LP_AT_CODES + 2 * LP_CODES_BYTES;   /* [2 stages] RoPE channels of the keys */
constexpr int LP_AT_P = LP_AT_ROPE + 2 * LP_BLOCK_BYTES;       /* softmax weights: 64 rows of 64 fp16 values */
/* Biases and query sums. Row i of this block contains the biases of token i for two stages (32 bytes each, see lp_put_tile()) and
 * the sums of query row i.
 */
constexpr int LP_AT_BIASES = LP_AT_P + LP_BLOCK_BYTES;
constexpr int LP_AT_SCALES = LP_AT_BIASES + LP_BLOCK_BYTES;     /* [2 stages, groups, tokens] in float; see lp_scale_at() */
constexpr int LP_AT_LINES = LP_AT_SCALES + 2 * LP_SCALES_BYTES; /* [2 stages] scales and biases in 16 bits; see lp_line_at() */
constexpr int LP_AT_FACTORS = LP_AT_LINES + 2 * LP_LINES_BYTES; /* [rows] factors that convert scores to base-2 exponents */
constexpr int LP_AT_RATIOS = LP_AT_FACTORS + LP_ROWS * 4;       /* [rows] factors for the products of RoPE channels and of sums */
constexpr int LP_AT_SHRINKS = LP_AT_RATIOS + LP_ROWS * 4;       /* [rows] factors by which earlier output sums are rescaled */
constexpr int LP_AT_INVERSES = LP_AT_SHRINKS + LP_ROWS * 4;     /* [rows] factors by which outputs are multiplied */
constexpr int LP_AT_NONFINITE = LP_AT_INVERSES + LP_ROWS * 4; /* [rows] one byte: 1 if a non-finite value is visible to the row */
constexpr int LP_AT_MBARRIERS = LP_AT_NONFINITE + LP_ROWS;
constexpr int LP_SHARED_BYTES = LP_AT_MBARRIERS + 16 * 8;
constexpr int LP_OUT_STRIDE = FKV_D + 4; /* stride of the output rows, in floats; they overwrite the queries and the codes */
static_assert(1024 + LP_SHARED_BYTES <= 227 * 1024, "the block needs too much shared memory");
static_assert(LP_ROWS * LP_OUT_STRIDE * 4 <= LP_AT_FACTORS, "the output rows must not overwrite their factors");
static_assert(LP_THREADS / 32 * FKV_D * 4 <= 2 * LP_CODES_BYTES, "not enough space for the queries that are being converted");

/* Kinds of mbarriers. LP_FULL: a packed tile has arrived. LP_EMPTY: its buffer may be overwritten. The other two kinds have the
 * same meaning for softmax weights. */
enum { LP_FULL, LP_EMPTY, LP_P_FULL, LP_P_EMPTY };
FKV_FN fkv_u32 lp_mbarrier(int kind, fkv_u32 stage) { return (fkv_u32)LP_AT_MBARRIERS + ((fkv_u32)kind * 2 + stage) * 8; }

/* Arrives at an mbarrier once all lanes of the warp have reached this point. */
FKV_FN void lp_arrive(fkv_shared s, fkv_u32 mbarrier) {
    fkv_sync_warp();
    if (s.index % 32 == 0) fkv_mbarrier_arrive(s, mbarrier);
}

/* Makes the warp's stores visible to the matrix products of threads that wait for the mbarrier, and then arrives at the
 * mbarrier. */
FKV_FN void lp_publish(fkv_shared s, fkv_u32 mbarrier) {
    fkv_publish();
    lp_arrive(s, mbarrier);
}

/* Returns the position of byte `byte` of a row in a block. */
FKV_FN fkv_u32 lp_in_block(fkv_u32 row, fkv_u32 byte) { return row * 128 + (byte ^ row % 8 * 16); }

FKV_FN float *lp_floats(fkv_shared s, int at) { return (float *)(s.base + at); }

/* ---- work of a thread block ---- */

struct lp_item {
    const fkv_u8 *pool;
    const fkv_u32 *pages;
    fkv_u32 n_fixed, n_ring;
    fkv_u32 first_token; /* index of the query tile's first token among the step's tokens */
    fkv_u32 position;    /* position of the query tile's first query */
    fkv_u32 first_row;   /* index of the block's first row among the rows (queries x heads) of the query tile */
    fkv_u32 n_rows;      /* number of rows of this block */
    fkv_u32 last;        /* position of the last row */
    /* The block reads n_tiles tiles of keys: n_front tiles with sink tokens, then the tiles that start at first_back. */
    fkv_u32 n_front, first_back, n_tiles;
};

FKV_FN fkv_u32 lp_position(const lp_item &x, fkv_u32 row) {
    fkv_u32 r = row < x.n_rows ? row : x.n_rows - 1;
    return x.position + (x.first_row + r) / FKV_R;
}

FKV_FN lp_item lp_item_at(const void *pool, const fkv_u32 *table, fkv_u32 tile_number, fkv_u32 slice) {
    const fkv_u32 *tile = table + table[FKV_STEP_TILES] + tile_number * FKV_TILE_WORDS;
    const fkv_u32 *row = table + table[FKV_STEP_ROWS] + tile[FKV_TILE_ROW] * FKV_ROW_WORDS;
    lp_item x;
    x.pool = (const fkv_u8 *)pool;
    x.pages = table + row[FKV_ROW_PAGES];
    x.n_fixed = row[FKV_ROW_N_FIXED];
    x.n_ring = row[FKV_ROW_N_RING];
    x.first_token = tile[FKV_TILE_FIRST_TOKEN];
    x.position = tile[FKV_TILE_POSITION];
    x.first_row = slice * LP_ROWS;
    fkv_u32 all = tile[FKV_TILE_N_QUERIES] * FKV_R;
    x.n_rows = all <= x.first_row ? 0 : (all - x.first_row < LP_ROWS ? all - x.first_row : LP_ROWS);
    if (x.n_rows == 0) return x;
    fkv_u32 first = lp_position(x, 0);
    x.last = lp_position(x, LP_ROWS);
    fkv_u32 begin = FKV_WINDOW != 0 && first + 1 > FKV_WINDOW ? first + 1 - FKV_WINDOW : 0;
    x.first_back = begin / LP_KEYS;
    x.n_front = FKV_WINDOW == 0 ? 0 : (FKV_SINKS + LP_KEYS - 1) / LP_KEYS;
    if (x.n_front > x.first_back) x.n_front = x.first_back;
    x.n_tiles = x.n_front + x.last / LP_KEYS + 1 - x.first_back;
    return x;
}

FKV_FN fkv_u32 lp_first_key(const lp_item &x, fkv_u32 tile) {
    return (tile < x.n_front ? tile : tile - x.n_front + x.first_back) * LP_KEYS;
}

/* Returns the index of a row among the rows (tokens x heads) of the step. */
FKV_FN fkv_u64 lp_row_at(const lp_item &x, fkv_u32 row) {
    fkv_u32 r = x.first_row + row;
    return (fkv_u64)(x.first_token + r / FKV_R) * FKV_H + r % FKV_R;
}

/* Returns true if a token of the tile is masked for a row of the block. */
FKV_FN bool lp_is_masked(const lp_item &x, fkv_u32 key) {
    return key + LP_KEYS - 1 > x.position + x.first_row / FKV_R ||
           (FKV_WINDOW != 0 && x.last - key + 1 >= FKV_WINDOW + 1 && key + LP_KEYS > FKV_SINKS);
}

/* ---- queries ---- */

constexpr int LP_WARP_ROWS = LP_ROWS / (LP_THREADS / 32); /* number of rows that each warp converts */

/* Converts a query row in shared memory to integers and stores their bytes. sums[i] receives the sum of the integers in scale
 * group 2 * i + lane / 16. Returns the largest magnitude of these sums. Called by one warp. */
FKV_FN float lp_put_query(fkv_shared s, fkv_u32 r, const float *row, float inverse, float *sums) {
    fkv_u32 lane = s.index % 32, top = 0;
    FKV_UNROLL for (int i = 0; i < FKV_D / 128; i++) {
        fkv_u32 digits[LP_DIGITS] = {};
        float sum = 0;
        FKV_UNROLL for (int n = 0; n < 4; n++) {
            float y = fkv_rint(row[i * 128 + (int)lane * 4 + n] * inverse);
            /* clamping also replaces NaN, in which case the factor of the row is NaN */
            y = fkv_max(-LP_LARGEST, -fkv_max(-LP_LARGEST, -y));
            fkv_u32 bits = (fkv_u32)(int)y;
            FKV_UNROLL for (int k = 0; k < LP_DIGITS; k++) digits[k] |= (bits >> 8 * (LP_DIGITS - 1 - k) & 255u) << 8 * n;
            sum += y;
        }
        fkv_u32 at = (fkv_u32)(i * LP_BLOCK_BYTES) + lp_in_block(r, lane * 4);
        FKV_UNROLL for (int k = 0; k < LP_DIGITS; k++) fkv_put4(s, (fkv_u32)(LP_AT_Q + k * LP_Q_BYTES) + at, digits[k]);
        FKV_UNROLL for (fkv_u32 m = 1; m < 16; m *= 2) sum += fkv_shuffle_xor(sum, m);
        sums[i] = sum;
        top = fkv_max_bits(top, fkv_bits_of(sum) & 0x7fffffffu);
    }
    return fkv_float_of(fkv_warp_max_bits(top));
}

/* Splits x into three terms of the page's floating-point type. */
FKV_FN void lp_split(float x, fkv_u32 *terms) {
    FKV_UNROLL for (int k = 0; k < 3; k++) {
        terms[k] = (FKV_PAGE_BF16 ? fkv_pack_bf16(x, 0.0f) : fkv_pack_f16(x, 0.0f)) & 0xffffu;
        x -= FKV_PAGE_BF16 ? fkv_float_of(terms[k] << 16) : fkv_f16_to_f32(terms[k]);
    }
}

/* Stores the sums of a query. Each of the eight groups has three terms, followed by a zero. */
FKV_FN void lp_put_sums(fkv_shared s, fkv_u32 r, const float *sums, float inverse_ratio) {
    FKV_UNROLL for (fkv_u32 i = 0; i < FKV_D / 128; i++) {
        fkv_u32 terms[4] = {}, g = i * 2 + s.index % 32 / 16;
        lp_split(sums[i] * inverse_ratio, terms);
        if (s.index % 16 == 0)
            FKV_UNROLL for (fkv_u32 k = 0; k < 4; k++) fkv_put2(s, LP_AT_BIASES + lp_in_block(r, 64 + k * 16 + g * 2), terms[k]);
    }
}

/* Stores the RoPE channels of a query, each split into two terms of the page's floating-point type. a and b are the two channels
 * of this lane. */
FKV_FN void lp_put_rope(fkv_shared s, fkv_u32 r, float a, float b) {
    fkv_u32 high, rest;
    if (FKV_PAGE_BF16) {
        high = fkv_pack_bf16(a, b);
        rest = fkv_pack_bf16(a - fkv_float_of(high << 16), b - fkv_float_of(high & 0xffff0000u));
    } else {
        high = fkv_pack_f16(a, b);
        rest = fkv_pack_f16(a - fkv_f16_to_f32(high & 0xffffu), b - fkv_f16_to_f32(high >> 16));
    }
    fkv_u32 at = (fkv_u32)LP_AT_Q_ROPE + lp_in_block(r, s.index % 32 * 4);
    fkv_put4(s, at, high);
    fkv_put4(s, at + LP_BLOCK_BYTES, rest);
}

/* Stores the queries in shared memory. The latent channels of each row are divided by a unit, so that the largest value becomes
 * LP_LARGEST. The RoPE channels and the sums are divided by a power of two, so that the largest value is below 2. Unused rows are
 * 0. Called by all warps. */
FKV_FN void lp_load_queries(fkv_shared s, const lp_item &x, const void *q) {
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    float *row = lp_floats(s, LP_AT_CODES) + warp * FKV_D;
    const float scale = fkv_float_of(FKV_SCALE_BITS), sign = scale < 0 ? -1.0f : 1.0f;
    float y[LP_WARP_ROWS][FKV_D / 32], rope[LP_WARP_ROWS][2];
    FKV_UNROLL for (int n = 0; n < LP_WARP_ROWS; n++) { /* load all rows of the warp before the first one is converted */
        fkv_u32 r = warp + (fkv_u32)n * (LP_THREADS / 32);
        bool used = r < x.n_rows;
        fkv_u64 from = lp_row_at(x, used ? r : 0) * (FKV_D + FKV_ROPE);
        FKV_UNROLL for (fkv_u32 i = 0; i < FKV_D / 32; i++) y[n][i] = used ? sign * fkv_row_value(q, from + i * 32 + lane) : 0.0f;
        FKV_UNROLL for (fkv_u32 i = 0; i < 2; i++) rope[n][i] =
            used ? sign * fkv_row_value(q, from + FKV_D + lane * 2 + i) : 0.0f;
    }
    FKV_UNROLL for (int n = 0; n < LP_WARP_ROWS; n++) {
        fkv_u32 r = warp + (fkv_u32)n * (LP_THREADS / 32);
        FKV_UNROLL for (fkv_u32 i = 0; i < FKV_D / 32; i++) row[i * 32 + lane] =
            fkv_float_of(fkv_bits_of(y[n][i]) ^ fkv_k_sign(i * 32 + lane));
        fkv_sync_warp();
        if (FKV_ROTATE_K) fkv_butterfly_row(lane, row);
        fkv_u32 top = 0, rope_top = fkv_max_bits(fkv_bits_of(rope[n][0]) & 0x7fffffffu, fkv_bits_of(rope[n][1]) & 0x7fffffffu);
        FKV_UNROLL for (fkv_u32 i = 0; i < FKV_D / 32; i++) top =
            fkv_max_bits(top, fkv_bits_of(row[i * 32 + lane]) & 0x7fffffffu);
        top = fkv_warp_max_bits(top);
        rope_top = fkv_warp_max_bits(rope_top);
        bool finite = top < 0x7f800000u && rope_top < 0x7f800000u;
        /* the lower bounds keep all factors within the range of a float */
        float largest = finite ? fkv_max(fkv_max(fkv_float_of(top), fkv_float_of(rope_top) * (1.0f / 1048576.0f)), 1e-25f) : 1.0f;
        float inverse = LP_LARGEST / largest;
        float sums[FKV_D / 128], top_sum = lp_put_query(s, r, row, inverse, sums);
        fkv_u32 exponent = fkv_max_bits(rope_top, fkv_bits_of(top_sum * (largest * (1.0f / LP_LARGEST)))) >> 23;
        if (exponent == 0 || exponent > 253) exponent = 127;
        float rope_unit = fkv_float_of(exponent << 23), rope_inverse = fkv_float_of((254 - exponent) << 23);
        lp_put_sums(s, r, sums, 1.0f / (rope_unit * inverse));
        lp_put_rope(s, r, rope[n][0] * rope_inverse, rope[n][1] * rope_inverse);
        if (lane == 0) {
            float factor = scale * sign * 1.44269504f * (largest * (1.0f / LP_LARGEST));
            lp_floats(s, LP_AT_FACTORS)[r] = finite ? factor : fkv_float_of(0x7fc00000u);
            lp_floats(s, LP_AT_RATIOS)[r] = rope_unit * inverse;
            s.base[LP_AT_NONFINITE + r] = 0;
        }
        fkv_sync_warp();
    }
}

/* ---- warpgroup 0: packed tiles ---- */

constexpr int LP_PAGES = FKV_PAGE_TOKENS < LP_KEYS ? LP_KEYS / FKV_PAGE_TOKENS : 1; /* pages per tile */

/* Returns the pool page of one page of a tile; each lane handles a different page. Pages past the last query are replaced with
 * the last page, and tiles past the last tile with the last tile. */
FKV_FN fkv_u32 lp_page(fkv_shared s, const lp_item &x, fkv_u32 tile) {
    fkv_u32 logical = lp_first_key(x, tile < x.n_tiles ? tile : x.n_tiles - 1) / FKV_PAGE_TOKENS + s.index % LP_PAGES;
    fkv_u32 last = x.last / FKV_PAGE_TOKENS;
    logical = logical < last ? logical : last;
    return x.pages[logical < x.n_fixed ? logical : x.n_fixed + (logical - x.n_fixed) % x.n_ring];
}

/* Returns the block that contains token `token` of a tile. page: result of lp_page(). Called by all lanes of a warp. */
FKV_FN const fkv_u8 *lp_block(const lp_item &x, fkv_u32 page, fkv_u32 token) {
    return x.pool + (fkv_u64)(LP_PAGES == 1 ? page : fkv_shuffle_bits(page, token / FKV_PAGE_TOKENS)) * FKV_BLOCK_BYTES;
}

/* Scales (threads 0 to 63) or biases (threads 64 to 127) of one token. */
struct lp_line {
    fkv_words4 of_groups;
};

/* Starts copying a packed tile to shared memory and loads the thread's scales or biases. */
FKV_FN lp_line lp_copy(fkv_shared s, const lp_item &x, fkv_u32 tile, fkv_u32 page) {
    const fkv_u32 stage = tile % 2, slot = lp_first_key(x, tile) % FKV_PAGE_TOKENS, lane = s.index % 32;
    FKV_NO_UNROLL
    for (fkv_u32 first = s.index / 32; first < LP_KEYS; first += 16) { /* a warp copies the codes of one token at a time */
        FKV_UNROLL for (fkv_u32 i = 0; i < 4; i++) {
            fkv_u32 token = first + i * 4;
            const fkv_u8 *from =
                lp_block(x, page, token) + FKV_K_CODES + (slot + token) % FKV_PAGE_TOKENS * FKV_K_ROW_BYTES + lane * 16;
            fkv_u32 to =
                (fkv_u32)LP_AT_CODES + stage * LP_CODES_BYTES + lane / 8 * LP_BLOCK_BYTES + lp_in_block(token, lane % 8 * 16);
            fkv_async_copy16((fkv_u32 *)(s.base + to), from);
        }
    }
    FKV_NO_UNROLL
    for (fkv_u32 token = s.index / 8; token < LP_KEYS; token += 16) {
        const fkv_u8 *from =
            lp_block(x, page, token) + FKV_V_CODES + (slot + token) % FKV_PAGE_TOKENS * (FKV_ROPE * 2) + s.index % 8 * 16;
        fkv_u32 to = (fkv_u32)LP_AT_ROPE + stage * LP_BLOCK_BYTES + lp_in_block(token, s.index % 8 * 16);
        fkv_async_copy16((fkv_u32 *)(s.base + to), from);
    }
    fkv_u32 token = s.index % LP_KEYS;
    lp_line line;
    line.of_groups = fkv_stream16(lp_block(x, page, token) + (s.index < LP_KEYS ? FKV_K_SCALES : FKV_K_BIASES) +
                                  (slot + token) % FKV_PAGE_TOKENS * (LP_GROUPS * 2));
    fkv_async_copy_commit();
    return line;
}

/* Returns the index of a token's scale. The scales that a thread needs for 16 keys are adjacent. */
FKV_FN fkv_u32 lp_scale_at(fkv_u32 stage, fkv_u32 g, fkv_u32 key) {
    return (stage * LP_GROUPS + g) * LP_KEYS + key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
}

/* Returns the position of a token's 16-bit scale. The token's bias is stored 8 bytes later. Of every 16 keys, a thread loads the
 * scales and biases of four keys at once. */
FKV_FN fkv_u32 lp_line_at(fkv_u32 stage, fkv_u32 g, fkv_u32 key) {
    fkv_u32 unit = ((stage * LP_GROUPS + g) * (LP_KEYS / 16) + key / 16) * 4 + key % 8 / 2;
    return LP_AT_LINES + unit * 16 + key / 8 % 2 * 4 + key % 2 * 2;
}

/* Decodes the codes of one channel for two adjacent tokens to fp16 values. x holds 1024 + code for each token, in fp16. */
FKV_FN fkv_u32 lp_decode(fkv_u32 x, fkv_u32 scales, fkv_u32 biases) {
    fkv_u32 codes = fkv_fma_f16x2(x, 0x3c003c00u, 0xe400e400u);
    if (FKV_PAGE_BF16)
        return fkv_pack_f16(
            fkv_fma(fkv_f16_to_f32(codes & 0xffffu), fkv_float_of(scales << 16), fkv_float_of(biases << 16)),
            fkv_fma(fkv_f16_to_f32(codes >> 16), fkv_float_of(scales & 0xffff0000u), fkv_float_of(biases & 0xffff0000u)));
    return fkv_fma_f16x2(codes, scales, biases);
}

/* Marks the rows to which `token` is visible. Called if the token has a non-finite value. */
FKV_FN void lp_mark_rows(fkv_shared s, const lp_item &x, fkv_u32 token) {
    for (fkv_u32 row = 0; row < x.n_rows; row++)
        if (fkv_is_visible(lp_position(x, row), token)) fkv_mark(s.base + LP_AT_NONFINITE + row);
}

/* Returns true if any decoded value of a token in one scale group is not finite. line: scale and bias of the group. */
FKV_FN bool lp_has_nonfinite(fkv_shared s, fkv_u32 stage, fkv_u32 g, fkv_u32 key, const fkv_u32 *line) {
    float scale = fkv_page_value(line[0]), bias = fkv_page_value(line[1]);
    float bound = fkv_max(scale, -scale) * 255.0f + fkv_max(bias, -bias);
    if (scale == scale && bias == bias && bound < 65000.0f) return false;
    bool any = false;
    FKV_NO_UNROLL
    for (fkv_u32 i = 0; i < LP_GROUP / 4; i++) {
        fkv_u32 word =
            fkv_get4(s, LP_AT_CODES + stage * LP_CODES_BYTES + g / 2 * LP_BLOCK_BYTES + lp_in_block(key, g % 2 * 64 + i * 4));
        for (fkv_u32 k = 0; k < 2; k++) {
            fkv_u32 h =
                lp_decode(fkv_permute(word, 0x64646464u, k == 0 ? 0x5140u : 0x5342u), line[0] * 0x10001u, line[1] * 0x10001u);
            any = any || (h & 0x7c00u) == 0x7c00u || (h & 0x7c000000u) == 0x7c000000u;
        }
    }
    return any;
}

/* Replaces the non-finite values of a masked tile with 0 by setting the scale and bias of their group to 0. This is necessary
 * because a weight of 0 would not cancel a non-finite value. Marks the rows to which these values are visible. Each thread checks
 * one token and half of the groups. */
FKV_FN void lp_remove_nonfinite(fkv_shared s, const lp_item &x, fkv_u32 tile) {
    const fkv_u32 stage = tile % 2, key = s.index % LP_KEYS;
    fkv_sync_team(2, 128); /* wait until all threads have stored their parts of the tile */
    FKV_NO_UNROLL
    for (fkv_u32 i = 0; i < LP_GROUPS / 2; i++) {
        fkv_u32 g = s.index / LP_KEYS * (LP_GROUPS / 2) + i, at = lp_line_at(stage, g, key);
        fkv_u32 line[2] = {fkv_get2(s, at), fkv_get2(s, at + 8)};
        if (!lp_has_nonfinite(s, stage, g, key, line)) continue;
        fkv_put2(s, at, 0);
        fkv_put2(s, at + 8, 0);
        lp_mark_rows(s, x, lp_first_key(x, tile) + key);
    }
}

/* Waits for the thread's copies of a tile, stores the scales or biases, and publishes the tile. */
FKV_FN void lp_put_tile(fkv_shared s, const lp_item &x, fkv_u32 tile, const lp_line &line) {
    const fkv_u32 stage = tile % 2, key = s.index % LP_KEYS;
    fkv_async_copy_wait();
    FKV_UNROLL for (fkv_u32 g = 0; g < LP_GROUPS; g++) {
        fkv_u32 bits = line.of_groups.w[g / 2] >> 16 * (g % 2) & 0xffffu;
        fkv_put2(s, lp_line_at(stage, g, key) + (s.index < LP_KEYS ? 0 : 8), bits);
        if (s.index < LP_KEYS) fkv_put4(s, LP_AT_SCALES + lp_scale_at(stage, g, key) * 4, fkv_bits_of(fkv_page_value(bits)));
    }
    if (s.index >= LP_KEYS)
        FKV_UNROLL for (fkv_u32 i = 0; i < 2; i++) /* one copy for each matrix product in lp_issue_rest() */
            fkv_put16(s, LP_AT_BIASES + lp_in_block(key, stage * 32 + i * 16), line.of_groups.w[0], line.of_groups.w[1],
                      line.of_groups.w[2], line.of_groups.w[3]);
    if (lp_is_masked(x, lp_first_key(x, tile))) lp_remove_nonfinite(s, x, tile);
    lp_publish(s, lp_mbarrier(LP_FULL, stage));
}

/* Code of warpgroup 0. */
FKV_FN void lp_feed(fkv_shared s, const lp_item &x) {
    fkv_u32 page = lp_page(s, x, 0);
    FKV_NO_UNROLL
    for (fkv_u32 tile = 0; tile < x.n_tiles; tile++) {
        if (tile >= 2) fkv_mbarrier_wait(s, lp_mbarrier(LP_EMPTY, tile % 2), (tile / 2 + 1) % 2);
        lp_line line = lp_copy(s, x, tile, page);
        page = lp_page(s, x, tile + 1);
        lp_put_tile(s, x, tile, line);
    }
}

/* ---- warpgroup 1: scores and softmax weights ---- */

/* Returns the first of the two rows whose scores or sums this thread holds. The second row follows 8 rows later. */
FKV_FN fkv_u32 lp_first_row(fkv_shared s) { return s.index % 128 / 32 * 16 + s.index % 32 / 4; }

struct lp_row_state {
    float factor; /* factor that converts scores to base-2 exponents */
    float top;    /* largest score so far, not yet multiplied by `factor` */
    float total;  /* total weight of the keys whose scores this thread holds */
};

/* The next two functions return the scale group and the digit of a product. Products are numbered in the order in which they are
 * computed. Two groups are processed at a time: first the highest digit of the queries for both groups, then the next digit, and
 * so on. */
FKV_FN constexpr int lp_group(int number) { return number / (2 * LP_DIGITS) * 2 + number % 2; }
FKV_FN constexpr int lp_digit(int number) { return number % (2 * LP_DIGITS) / 2; }

/* Issues the products of the codes of a scale group and one digit of the queries. The products of the highest digit overwrite
 * acc, and those of the other digits are added to acc. */
FKV_FN void lp_issue_digit(fkv_shared s, int number, fkv_u32 stage, int *acc) {
    const int g = lp_group(number), digit = lp_digit(number);
    fkv_u32 at = (fkv_u32)(g / 2 * LP_BLOCK_BYTES + g % 2 * 64);
    fkv_u32 q = s.unit + ((fkv_u32)(LP_AT_Q + digit * LP_Q_BYTES) + at) / 16;
    fkv_u32 k = s.unit + ((fkv_u32)LP_AT_CODES + at) / 16 + stage * (LP_CODES_BYTES / 16);
    fkv_wg_begin();
    if (digit == 0) {
        fkv_wg_bytes<true, false>(s, acc, q, k);
        fkv_wg_bytes<true, true>(s, acc, q + 2, k + 2);
    } else {
        fkv_wg_bytes<false, true>(s, acc, q, k);
        fkv_wg_bytes<false, true>(s, acc, q + 2, k + 2);
    }
    fkv_wg_commit();
}

/* Issues the products over the RoPE channels, and the products of biases and query sums. */
FKV_FN void lp_issue_rest(fkv_shared s, fkv_u32 stage, float *x) {
    fkv_u32 q = s.unit + LP_AT_Q_ROPE / 16, k = s.unit + LP_AT_ROPE / 16 + stage * (LP_BLOCK_BYTES / 16);
    fkv_u32 biases = s.unit + LP_AT_BIASES / 16;
    fkv_wg_begin();
    FKV_UNROLL for (fkv_u32 term = 0; term < 2; term++) FKV_UNROLL for (fkv_u32 step = 0; step < FKV_ROPE / 16; step++) {
        if (term + step == 0)
            fkv_wg_scores_as<FKV_PAGE_BF16 != 0, false>(s, x, q, k);
        else
            fkv_wg_scores_as<FKV_PAGE_BF16 != 0, true>(s, x, q + term * (LP_BLOCK_BYTES / 16) + step * 2, k + step * 2);
    }
    fkv_wg_scores_as<FKV_PAGE_BF16 != 0, true>(s, x, biases + 4, biases + stage * 2);
    fkv_wg_scores_as<FKV_PAGE_BF16 != 0, true>(s, x, biases + 6, biases + stage * 2);
    fkv_wg_commit();
}

/* Computes x += scale * acc for the integer dot products of a scale group. */
FKV_FN void lp_add_group(fkv_shared s, int g, fkv_u32 stage, const int *acc, float *x) {
    fkv_u32 scales[LP_KEYS / 4]; /* of every 16 keys, the thread handles four */
    FKV_UNROLL for (fkv_u32 j = 0; j < LP_KEYS / 16; j++)
        fkv_get16(s, LP_AT_SCALES + lp_scale_at(stage, (fkv_u32)g, j * 16 + s.index % 4 * 2) * 4, scales + 4 * j);
    FKV_UNROLL for (int i = 0; i < LP_KEYS / 2; i++) x[i] =
        fkv_fma(fkv_float_of(scales[i / 8 * 4 + i / 4 % 2 * 2 + i % 2]), (float)acc[i], x[i]);
}

/* Computes the scores x of a tile. While the results of one product are processed, the next product is computed. */
FKV_FN void lp_score(fkv_shared s, fkv_u32 stage, float *x) {
    constexpr int n_products = LP_GROUPS * LP_DIGITS;
    int acc[2][LP_KEYS / 2];
    lp_issue_rest(s, stage, x);
    lp_issue_digit(s, 0, stage, acc[0]);
    lp_issue_digit(s, 1, stage, acc[1]);
    fkv_wg_wait<2>();
    fkv_wg_settle<LP_KEYS / 2>(x);
    const float *ratios = lp_floats(s, LP_AT_RATIOS) + lp_first_row(s);
    const float ratio[2] = {ratios[0], ratios[8]};
    FKV_UNROLL for (int i = 0; i < LP_KEYS / 2; i++) x[i] *= ratio[i / 2 % 2];
    FKV_UNROLL for (int i = 0; i < n_products; i++) {
        const bool last = lp_digit(i) + 1 == LP_DIGITS;
        if (i + 1 < n_products)
            fkv_wg_wait<1>();
        else
            fkv_wg_wait<0>();
        fkv_wg_settle_ints<LP_KEYS / 2>(acc[i % 2]);
        if (last) {
            lp_add_group(s, lp_group(i), stage, acc[i % 2], x);
            fkv_wg_settle<LP_KEYS / 2>(x);
        } else {
            fkv_wg_shift_byte<LP_KEYS / 2>(acc[i % 2]);
        }
        if (i + 2 < n_products) lp_issue_digit(s, i + 2, stage, acc[i % 2]);
    }
}

/* Updates the maximum score of each row. `shrink` receives the factors by which the earlier sums must be multiplied. */
FKV_FN void lp_update_max(fkv_shared s, const lp_item &item, float *x, fkv_u32 first_key, lp_row_state *row, float *shrink) {
    if (FKV_SOFTCAP_BITS != 0) FKV_UNROLL for (int i = 0; i < LP_KEYS / 2; i++) x[i] = fkv_cap(x[i] * row[i / 2 % 2].factor);
    if (lp_is_masked(item, first_key)) {
        fkv_u32 position[2] = {lp_position(item, lp_first_row(s)), lp_position(item, lp_first_row(s) + 8)};
        FKV_UNROLL for (int i = 0; i < LP_KEYS / 2; i++) {
            fkv_u32 token = first_key + (fkv_u32)(i / 4 * 8 + i % 2) + s.index % 4 * 2;
            if (!fkv_is_visible(position[i / 2 % 2], token)) x[i] = FKV_NO_SCORE;
        }
    }
    float top[2] = {row[0].top, row[1].top};
    FKV_UNROLL for (int i = 0; i < LP_KEYS / 2; i++) top[i / 2 % 2] = fkv_max(top[i / 2 % 2], x[i]);
    FKV_UNROLL for (fkv_u32 m = 1; m <= 2; m++) FKV_UNROLL for (int r = 0; r < 2; r++) top[r] =
        fkv_max(top[r], fkv_shuffle_xor(top[r], m));
    FKV_UNROLL for (int r = 0; r < 2; r++) {
        shrink[r] = fkv_exp2((row[r].top - top[r]) * (FKV_SOFTCAP_BITS != 0 ? 1.0f : row[r].factor));
        row[r].top = top[r];
    }
}

/* Converts the scores x of a tile to softmax weights. */
FKV_FN void lp_weigh(float *x, lp_row_state *row, const float *shrink) {
    FKV_UNROLL for (int r = 0; r < 2; r++) {
        float factor = FKV_SOFTCAP_BITS != 0 ? 1.0f : row[r].factor;
        float base = -row[r].top * factor;
        float total = 0;
        FKV_UNROLL for (int j = 0; j < LP_KEYS / 8; j++) FKV_UNROLL for (int i = 4 * j + 2 * r; i < 4 * j + 2 * r + 2; i++) {
            x[i] = fkv_exp2(fkv_fma(x[i], factor, base));
            total += x[i];
        }
        row[r].total = fkv_fma(row[r].total, shrink[r], total);
    }
}

/* Stores the weights of a tile, and the factors by which earlier sums are rescaled, for warpgroups 2 and 3. */
FKV_FN void lp_put_weights(fkv_shared s, const float *x, const float *shrink) {
    const fkv_u32 first = lp_first_row(s), c = s.index % 4;
    FKV_UNROLL for (int i = 0; i < LP_KEYS / 4; i++) {
        fkv_u32 row = first + (fkv_u32)(i % 2) * 8;
        fkv_put4(s, LP_AT_P + lp_in_block(row, (fkv_u32)(i / 2) * 16 + c * 4), fkv_pack_f16(x[2 * i], x[2 * i + 1]));
    }
    if (c < 2) lp_floats(s, LP_AT_SHRINKS)[first + c * 8] = c == 0 ? shrink[0] : shrink[1];
}

/* Code of warpgroup 1. */
FKV_FN void lp_compute_weights(fkv_shared s, const lp_item &item, const float *sink_logits) {
    const fkv_u32 row = lp_first_row(s), n_tiles = fkv_uniform(item.n_tiles);
    lp_row_state state[2];
    FKV_UNROLL for (fkv_u32 i = 0; i < 2; i++) state[i] = {lp_floats(s, LP_AT_FACTORS)[row + 8 * i], -1e30f, 0.0f};
    FKV_NO_UNROLL
    for (fkv_u32 tile = 0; tile < n_tiles; tile++) {
        float x[LP_KEYS / 2], shrink[2];
        fkv_mbarrier_wait(s, lp_mbarrier(LP_FULL, tile % 2), tile / 2 % 2);
        lp_score(s, tile % 2, x);
        lp_arrive(s, lp_mbarrier(LP_EMPTY, tile % 2));
        lp_update_max(s, item, x, lp_first_key(item, tile), state, shrink);
        lp_weigh(x, state, shrink);
        fkv_mbarrier_wait(s, lp_mbarrier(LP_P_EMPTY, 0), tile % 2 ^ 1);
        lp_put_weights(s, x, shrink);
        lp_publish(s, lp_mbarrier(LP_P_FULL, 0));
    }
    FKV_UNROLL for (fkv_u32 i = 0; i < 2; i++) {
        float total = state[i].total;
        total += fkv_shuffle_xor(total, 1);
        total += fkv_shuffle_xor(total, 2);
        float top = state[i].top * (FKV_SOFTCAP_BITS != 0 ? 1.0f : state[i].factor);
        float inverse = 1.0f / fkv_denominator(total, top, sink_logits, (item.first_row + row + 8 * i) % FKV_R);
        if (s.index % 4 == 0) lp_floats(s, LP_AT_INVERSES)[row + 8 * i] = inverse;
    }
}

/* ---- warpgroups 2 and 3: output sums ---- */

/* Decodes one scale group of 32 tokens of a tile. Each warp decodes 16 channels. `values` receives two operands of 16 tokens. Row
 * r (less than 8) of the warp's operand is channel 2 * r, and row 8 + r is channel 2 * r + 1. */
FKV_FN void lp_decode_values(fkv_shared s, fkv_u32 tile, fkv_u32 g, fkv_u32 first, fkv_u32 *values) {
    const fkv_u32 stage = tile % 2, lane = s.index % 32, warp = s.index / 32 % 4;
    fkv_u32 codes[4];
    fkv_get_transposed(
        s, LP_AT_CODES + stage * LP_CODES_BYTES + g / 2 * LP_BLOCK_BYTES + lp_in_block(first + lane, (g % 2 * 4 + warp) * 16),
        codes);
    FKV_UNROLL for (fkv_u32 step = 0; step < 2; step++) {
        fkv_u32 line[4], token = first + step * 16 + lane % 4 * 2;
        fkv_get16(s, lp_line_at(stage, g, token), line);
        FKV_UNROLL for (fkv_u32 i = 0; i < 4; i++) {
            fkv_u32 bytes = fkv_permute(codes[step * 2 + i / 2], 0x64646464u, i % 2 == 0 ? 0x4240u : 0x4341u);
            values[step * 4 + i] = lp_decode(bytes, line[i / 2], line[2 + i / 2]);
        }
    }
}

/* Rescales the output sums by the factors of a new tile. Column j of the accumulators belongs to row j of the block. */
FKV_FN void lp_shrink(fkv_shared s, float *o) {
    const fkv_u32 lane = s.index % 32;
    fkv_u32 own[2];
    fkv_get8(s, LP_AT_SHRINKS + lane * 8, own);
    if (!fkv_any(own[0] != 0x3f800000u || own[1] != 0x3f800000u)) return;
    FKV_UNROLL for (fkv_u32 j = 0; j < LP_ROWS / 8; j++) {
        fkv_u32 f[2];
        fkv_get8(s, LP_AT_SHRINKS + (j * 8 + lane % 4 * 2) * 4, f);
        FKV_UNROLL for (int g = 0; g < LP_GROUPS / 2; g++) FKV_UNROLL for (int i = 0; i < 4; i++) o[g * 32 + (int)j * 4 + i] *=
            fkv_float_of(f[i % 2]);
    }
}

/* Code of warpgroups 2 and 3. The accumulators contain the transposed sums: rows are channels, and columns are rows of the block.
 */
FKV_FN void lp_multiply(fkv_shared s, const lp_item &x) {
    const fkv_u32 half = fkv_uniform(s.index / 128) - 2, n_tiles = fkv_uniform(x.n_tiles);
    const fkv_u32 p_at = s.unit + LP_AT_P / 16;
    float o[LP_COLS / 2];
    FKV_UNROLL for (int i = 0; i < LP_COLS / 2; i++) o[i] = 0;
    FKV_NO_UNROLL
    for (fkv_u32 tile = 0; tile < n_tiles; tile++) {
        fkv_u32 values[2][8];
        fkv_mbarrier_wait(s, lp_mbarrier(LP_FULL, tile % 2), tile / 2 % 2);
        fkv_mbarrier_wait(s, lp_mbarrier(LP_P_FULL, 0), tile % 2);
        lp_shrink(s, o);
        fkv_wg_settle<LP_COLS / 2>(o);
        FKV_UNROLL for (fkv_u32 i = 0; i < LP_GROUPS; i++) { /* each iteration processes 32 tokens of a group */
            const fkv_u32 g = i / 2, first = i % 2 * 32;
            if (i >= 2) {
                fkv_wg_wait<1>();
                fkv_wg_settle_bits<8>(values[i % 2]);
            }
            lp_decode_values(s, tile, half * (LP_GROUPS / 2) + g, first, values[i % 2]);
            fkv_wg_settle_bits<8>(values[i % 2]);
            fkv_wg_begin();
            FKV_UNROLL for (fkv_u32 step = 0; step < 2; step++)
                fkv_wg_scores_held<LP_ROWS, true>(s, o + g * 32, values[i % 2] + step * 4, p_at + (first / 16 + step) * 2);
            fkv_wg_commit();
        }
        fkv_wg_wait<0>();
        fkv_wg_settle<LP_COLS / 2>(o);
        lp_arrive(s, lp_mbarrier(LP_EMPTY, tile % 2));
        lp_arrive(s, lp_mbarrier(LP_P_EMPTY, 0));
    }
    fkv_sync_team(1, LP_THREADS); /* wait for all warpgroups, because the sums overwrite the queries and all tiles */
    FKV_UNROLL for (int i = 0; i < LP_COLS / 2; i++) {
        fkv_u32 row = (fkv_u32)(i % 32 / 4 * 8 + i % 2) + s.index % 4 * 2;
        fkv_u32 channel = (half * (LP_GROUPS / 2) + (fkv_u32)(i / 32)) * LP_GROUP + s.index / 32 % 4 * 16 + s.index % 32 / 4 * 2 +
                          (fkv_u32)(i / 2 % 2);
        lp_floats(s, 0)[row * LP_OUT_STRIDE + channel] = o[i];
    }
}

FKV_FN void fkv_attend_prefill(fkv_place place, fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                               const float *sink_logits, void *out) {
    fkv_shared s = fkv_shared_make(shared, place.index);
    lp_item x = lp_item_at(pool, table, place.x, place.z);
    if (x.n_rows == 0) return;
    if (s.index == 0) {
        for (fkv_u32 stage = 0; stage < 2; stage++) {
            fkv_mbarrier_init(s, lp_mbarrier(LP_FULL, stage), 4);
            fkv_mbarrier_init(s, lp_mbarrier(LP_EMPTY, stage), 12);
        }
        fkv_mbarrier_init(s, lp_mbarrier(LP_P_FULL, 0), 4);
        fkv_mbarrier_init(s, lp_mbarrier(LP_P_EMPTY, 0), 8);
        fkv_mbarriers_ready();
    }
    fkv_sync_warp();
    lp_load_queries(s, x, q);
    fkv_publish();
    fkv_sync();
    if (s.index < 128) {
        fkv_fewer_registers<LP_REGS_FEED>();
        lp_feed(s, x);
        fkv_sync_team(1, LP_THREADS);
    } else if (s.index < 256) {
        fkv_more_registers<LP_REGS_SCORE>();
        lp_compute_weights(s, x, sink_logits);
        fkv_sync_team(1, LP_THREADS);
    } else {
        fkv_more_registers<LP_REGS_MULTIPLY>();
        lp_multiply(s, x);
    }
    fkv_sync();
    for (fkv_u32 r = s.index / 32; r < x.n_rows; r += LP_THREADS / 32) {
        float factor = s.base[LP_AT_NONFINITE + r] != 0 ? fkv_float_of(0x7fc00000u) : lp_floats(s, LP_AT_INVERSES)[r];
        fkv_store_row(s.index % 32, lp_floats(s, 0) + r * LP_OUT_STRIDE, factor, out, lp_row_at(x, r) * FKV_D);
    }
}
