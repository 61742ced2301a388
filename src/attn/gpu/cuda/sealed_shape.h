/* Tile sizes, shared-memory layout and per-thread state of the kernel in decode_sealed.h.
 */
/* Query rows are processed in groups of four or eight (sealed_rows4.h, sealed_rows8.h), depending on the layer. Of every 32
 * tokens, a thread holds the scores of SD_GROUP consecutive tokens. Of every 32 channels, it holds the output sums of SD_GROUP
 * consecutive channels. */
constexpr int SD_GROUP = FKV_R <= 4 ? 4 : 8;
constexpr int SD_GROUPS = DC_ROWS / SD_GROUP;
constexpr int SD_UNITS = DC_SLAB / 32; /* number of units (32 channels each) per slab (the channels of one warp) */

/* With groups of four rows, lanes with the same value of lane % 4 share a row. With groups of eight rows, lanes with the same
 * value of lane / 4 share a row. */
constexpr fkv_u32 SD_ROW_FIRST =
    SD_GROUP == 4 ? 4 : 1; /* the indices of lanes that share a row differ only in the bits from SD_ROW_FIRST to SD_ROW_END / 2 */
constexpr fkv_u32 SD_ROW_END = SD_GROUP == 4 ? 32 : 4;
FKV_FN fkv_u32 sd_lane_row(fkv_u32 lane) { return SD_GROUP == 4 ? lane % 4 : lane / 4; }
FKV_FN fkv_u32 sd_lane_run(fkv_u32 lane) { return SD_GROUP == 4 ? lane / 4 * 4 : lane % 4 * 8; }

/* If there are two slabs of channels and two groups of rows, the two warps of a stream share the softmax: each warp computes the
 * weights of one group for both warps. In the arrays of a warp, this group has the index 0. */
constexpr bool SD_SHARES = DC_SLABS == 2 && SD_GROUPS == 2;
constexpr int SD_WEIGHED = SD_SHARES ? 1 : SD_GROUPS; /* number of groups of rows whose weights a warp computes */
FKV_FN fkv_u32 sd_first_row(int group, dc_place at) { return SD_GROUP * (SD_SHARES ? (fkv_u32)group ^ at.slab : (fkv_u32)group); }

/* Number of parts (32 tokens each) per tile. It affects how results are rounded, so it must depend only on the layer and not on
 * DC_ROWS. */
constexpr int SD_PARTS = FKV_PAGE_TOKENS >= 64 && FKV_R <= 4 ? 2 : 1;
constexpr int SD_TILE = 32 * SD_PARTS;
constexpr int SD_OWN = SD_GROUP * SD_PARTS;            /* tokens per thread */
constexpr fkv_u32 SD_TURN = FKV_PAGE_TOKENS / SD_TILE; /* tiles per page; one stream processes all tiles of a page */

/* Number of parts by which keys are loaded into registers ahead of their use. */
constexpr int SD_K_AHEAD = FKV_CALIBRATED ? 0 : 1;

/* Number of dwords of key codes that a thread loads per token. A dword holds eight 4-bit codes or 16 narrower codes (without
 * the high bits of 3-bit codes). */
constexpr int SD_K_LINES = FKV_K_BITS == 4 ? SD_UNITS : SD_UNITS / 2;

/* ---- shared memory layout, in words ---- */

/* Number of words that a thread passes to other warps. If the softmax is not shared, these are the scores of all groups of rows.
 * If the softmax is shared, they are the scores of the other warp's group and the weights of this warp's group. */
constexpr int SD_GIVEN_WORDS = SD_SHARES ? SD_OWN + SD_PARTS * (SD_GROUP / 2) + 2 : SD_GROUPS * SD_OWN;
constexpr int SD_EXCHANGE_WORDS = DC_SLABS > 1 ? DC_STREAMS *DC_SLABS *SD_GIVEN_WORDS * 32 : 0;
constexpr int SD_EXCHANGES =
    SD_SHARES || SD_EXCHANGE_WORDS > 2048 ? 1 : 2; /* number of score exchange buffers; a single buffer needs an extra barrier */
constexpr int SD_QUERY_WORDS = FKV_D + 4;          /* words per query row, including padding against bank conflicts */
constexpr int SD_AT_LINES = DC_ROWS * SD_QUERY_WORDS;                      /* {scales, biases} of a page, one copy per warp */
constexpr int SD_AT_STATS = SD_AT_LINES + DC_STREAMS * DC_SLABS * DC_SLAB; /* [streams, rows, {max, total}] */

/* For sealed pages, each warp has two buffers: one for the codes of a tile's keys, and one for the codes of its values. In each
 * buffer, the codes are followed by space for norms. Consecutive tiles store their norms alternately in the two buffers. */
constexpr bool SD_NARROW = FKV_V_BITS < 4; /* true for layers that use narrow_page.h */
/* Buffer sizes in narrow_page.h, in words, for 16 tokens, including padding: one line of key codes for each of the four values of
 * lane % 4, and the high bits of 3-bit key codes. */
constexpr int SD_K_LINE_WORDS = 80;
constexpr int SD_K_HIGH_WORDS = FKV_K_BITS == 3 ? (SD_K_LINES == 2 ? 80 : 32) : 0;
/* Numbers of words for the codes of 16 tokens, including padding against bank conflicts. */
constexpr int SD_K_CODE_WORDS = FKV_CALIBRATED ? FKV_K_ROW_BYTES * 4 + 8
                                : SD_NARROW    ? SD_K_LINES * SD_K_LINE_WORDS + SD_K_HIGH_WORDS
                                               : DC_SLAB * 2 + 8;
constexpr int SD_V_CODE_WORDS = DC_SLAB * FKV_V_BITS / 2 + 8;
constexpr int SD_CODE_WORDS = SD_K_CODE_WORDS > SD_V_CODE_WORDS ? SD_K_CODE_WORDS : SD_V_CODE_WORDS;
constexpr int SD_AT_NORMS = 2 * SD_PARTS * SD_CODE_WORDS;
constexpr int SD_BUFFER_WORDS = FKV_K_BOOK ? 0 : SD_AT_NORMS + SD_TILE / 2;
constexpr int SD_AT_BUFFERS = SD_AT_STATS + 2 * DC_STREAMS * DC_ROWS;
constexpr int SD_AT_REST =
    SD_AT_BUFFERS + 2 * DC_STREAMS * DC_SLABS * SD_BUFFER_WORDS; /* exchange buffer for scores, later output sums */
constexpr int DC_SHARED_WORDS =
    SD_AT_REST + (SD_EXCHANGES * SD_EXCHANGE_WORDS > DC_OUTPUT_WORDS ? SD_EXCHANGES * SD_EXCHANGE_WORDS : DC_OUTPUT_WORDS);
#define FKV_DECODE_SHARED DC_SHARED_WORDS

/* ---- per-thread state ---- */

/* A thread's part of a matrix operand: high and low bytes of query values (for 32 channels) or of weights (for 32 tokens), for
 * one group of rows. */
typedef fkv_u32 sd_operand[SD_GROUP / 2];

/* Parameters that convert an integer dot product to a score: score = unit * dot product + bias. They are the same for all tokens
 * of a page. */
struct sd_line {
    float unit;
    float bias;
};

/* Query operands for one page. */
struct sd_queries {
    sd_operand operand[SD_GROUPS][SD_UNITS];
    sd_line line[SD_GROUPS]; /* score parameters of the rows that the thread handles */
    bool coarse;             /* true if the unit of any row of the warp exceeds SD_LARGEST_UNIT */
};

/* Integer weights of a group of query rows for one tile. `worth` is the factor that converts the integer output sums to floats,
 * and `shrink` is the factor by which the previous output sums must be multiplied. */
struct sd_weights {
    sd_operand operand[SD_PARTS];
    float worth;
    float shrink;
};

struct sd_state {
    float max[SD_WEIGHED];
    float total[SD_WEIGHED]; /* sum of the softmax weights of the tokens that this thread handles */
    float sums[SD_GROUPS][SD_UNITS][SD_GROUP];
};

typedef float sd_scores[SD_GROUPS][SD_OWN];

/* Positions of the first and the last query of the work item, and of the rows that the thread handles. */
struct sd_rows {
    fkv_u32 first;
    fkv_u32 last;
    fkv_u32 own[SD_WEIGHED];
};

/* ---- loads ---- */

/* Dwords with 2-bit codes hold two lines (8 channels each), so thread c handles adjacent lines. Calibrated keys are an exception:
 * each thread handles one line per unit, as with 4-bit codes. */
constexpr bool SD_LINES_MOVED = FKV_K_BITS < 4 && !FKV_CALIBRATED;

/* Returns the position at which a line of queries or scales is stored within its slab. Thread c uses the lines at the positions
 * 4 * u + c. */
FKV_FN fkv_u32 sd_line_place(fkv_u32 line) { return SD_LINES_MOVED ? line % SD_UNITS * 4 + line / SD_UNITS : line; }

/* Starts copying a page's {scales, biases} for the channels of this warp to the warp's shared memory. */
FKV_FN void sd_copy_lines(FKV_SHARED fkv_u32 *lines, const fkv_u8 *block, dc_place at) {
    constexpr fkv_u32 lanes = DC_SLAB / 8;
    if (at.lane >= 2 * lanes) return;
    const fkv_u8 *part = block + (at.lane < lanes ? FKV_K_SCALES : FKV_K_BIASES);
    fkv_u32 place = SD_LINES_MOVED ? at.lane / lanes * lanes + sd_line_place(at.lane % lanes) : at.lane;
    fkv_async_copy16(lines + place * 4, part + at.slab * (DC_SLAB * 2) + at.lane % lanes * 16);
}

/* ---- query scaling ---- */

FKV_FN float sd_line_value(const fkv_words4 &x, int i) {
    return fkv_page_value(i % 2 == 0 ? x.w[i / 2] & 0xffffu : x.w[i / 2] >> 16);
}

/* Four 16-bit integers, split into signed high bytes and signed low bytes. */
struct sd_bytes {
    fkv_u32 high;
    fkv_u32 low;
};

constexpr float SD_ROUND = 12583040.0f; /* 1.5 * 2^23 + 128; adding this constant rounds a float to an integer */

FKV_FN sd_bytes sd_bytes_of(const float *x, float inverse) {
    fkv_u32 bits[4];
    FKV_UNROLL
    for (int i = 0; i < 4; i++) bits[i] = fkv_bits_of(fkv_fma(x[i], inverse, SD_ROUND));
    fkv_u32 front = fkv_permute(bits[0], bits[1], 0x5410u);
    fkv_u32 back = fkv_permute(bits[2], bits[3], 0x5410u);
    return {fkv_permute(front, back, 0x7531u), fkv_permute(front, back, 0x6420u) ^ 0x80808080u};
}

/* For rows whose unit (the value of 1 in the integer operand) exceeds this limit, the rounding residue of q * scale is used as
 * well. Above the limit, the largest channel can change the softmax weights of a page by a factor of more than 2^15, and the
 * rounding of all channels together changes scores by about 1e-3. For calibrated keys, whose codes are up to four times as large,
 * the limit is a quarter of this. */
constexpr float SD_LARGEST_UNIT = (FKV_CALIBRATED ? 0.25f : 1.0f) / 32512.0f;

/* Products q * scale that one thread holds: 8 channels in each of N units (32 channels each), for one row of each group. */
template <int N> struct sd_scaled {
    float x[SD_GROUPS][N][8];
    fkv_u32 largest[SD_GROUPS]; /* largest magnitude as a bit pattern, so that NaN compares as the largest value */
    float bias[SD_GROUPS];      /* sum of q * bias over these channels */
};

/* Multiplies queries by the page's scales, in lines of 8 channels, starting at line `line`. `query` points to the thread's row in
 * the first group, and `step` is the distance, in words, to its row in the next group. */
template <int N>
FKV_FN void sd_scale_queries(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *query, int step, fkv_u32 line,
                             sd_scaled<N> &to) {
    FKV_UNROLL
    for (int g = 0; g < SD_GROUPS; g++) {
        to.largest[g] = 0;
        to.bias[g] = 0.0f;
    }
    FKV_UNROLL
    for (int u = 0; u < N; u++, line += 4) {
        fkv_words4 scales = {};
        fkv_words4 biases = {};
        if (!FKV_K_BOOK) {
            scales = fkv_shared16(lines + line * 4);
            biases = fkv_shared16(lines + DC_SLAB / 2 + line * 4);
        }
        FKV_UNROLL
        for (int k = 0; k < 2 * SD_GROUPS; k++) {
            int g = k / 2;
            fkv_words4 q = fkv_shared16(query + g * step + line * 8 + k % 2 * 4);
            FKV_UNROLL
            for (int i = k % 2 * 4; i < k % 2 * 4 + 4; i++) {
                float number = fkv_float_of(q.w[i % 4]);
                to.x[g][u][i] = FKV_K_BOOK ? number : fkv_mul(number, sd_line_value(scales, i));
                to.largest[g] = fkv_max_bits(to.largest[g], fkv_bits_of(fkv_abs(to.x[g][u][i])));
                to.bias[g] = fkv_fma(number, sd_line_value(biases, i), to.bias[g]);
            }
        }
    }
}

/* Reduces `largest` and `bias` over the THREADS neighbouring lanes that hold a row's channels. */
template <fkv_u32 THREADS> FKV_FN sd_line sd_line_of(fkv_u32 largest, float bias) {
    FKV_UNROLL
    for (fkv_u32 h = 1; h < THREADS; h *= 2) {
        largest = fkv_max_bits(largest, fkv_shuffle_xor_bits(largest, h));
        bias += fkv_shuffle_xor(bias, h);
    }
    return {largest < 0x7f800000u ? fkv_mul(fkv_float_of(largest), 1.0f / 32512.0f) : fkv_float_of(DC_NAN), bias};
}

FKV_FN float sd_inverse(float unit) { return unit > 1e-35f ? fkv_reciprocal(unit) : 0.0f; }

/* Combines the dot products with the high and the low bytes. */
FKV_FN float sd_both(int high, int low) { return (float)(high * 256 + low); }
