/* Decode through matrix units, of sealed pages of 4 bits, first part: shapes. See decode_sealed.h for the whole.
 */
/* Rows go in groups, of four or of eight: sealed_rows4.h and sealed_rows8.h. The layer decides. A thread has as many tokens of
 * 32, and as many channels of 32, in a run. */
constexpr int SD_GROUP = FKV_R <= 4 ? 4 : 8;
constexpr int SD_GROUPS = DC_ROWS / SD_GROUP;
constexpr int SD_UNITS = DC_SLAB / 32; /* of 32 channels */

/* Threads l of a row: those of the same l % 4 in groups of four, of the same l / 4 in groups of eight. */
constexpr fkv_u32 SD_ROW_FIRST = SD_GROUP == 4 ? 4 : 1; /* they differ by this and its doubles below the end */
constexpr fkv_u32 SD_ROW_END = SD_GROUP == 4 ? 32 : 4;
FKV_FN fkv_u32 sd_lane_row(fkv_u32 lane) { return SD_GROUP == 4 ? lane % 4 : lane / 4; }
FKV_FN fkv_u32 sd_lane_run(fkv_u32 lane) { return SD_GROUP == 4 ? lane / 4 * 4 : lane % 4 * 8; }

/* Warps of two slabs share the softmax of two groups: each weighs one of them for both, and takes it as its first. */
constexpr bool SD_SHARES = DC_SLABS == 2 && SD_GROUPS == 2;
constexpr int SD_WEIGHED = SD_SHARES ? 1 : SD_GROUPS; /* groups that a warp weighs */
FKV_FN fkv_u32 sd_first_row(int group, dc_place at) { return SD_GROUP * (SD_SHARES ? (fkv_u32)group ^ at.slab : (fkv_u32)group); }

/* Parts of 32 tokens of a tile. The layer decides, not DC_ROWS: which tokens are folded together is part of the answer's bits. */
constexpr int SD_PARTS = FKV_PAGE_TOKENS >= 64 && FKV_R <= 4 ? 2 : 1;
constexpr int SD_TILE = 32 * SD_PARTS;
constexpr int SD_OWN = SD_GROUP * SD_PARTS;            /* tokens of a thread */
constexpr fkv_u32 SD_TURN = FKV_PAGE_TOKENS / SD_TILE; /* tiles of a page: a stream takes them all */

constexpr fkv_u32 SD_BLOCK_BYTES = 8 * FKV_D; /* of 16 tokens' codes */

/* ---- shared memory, in words ---- */

/* Of a thread: scores for all slabs; or those of the group that the other warp weighs, and the weights of its own. */
constexpr int SD_GIVEN_WORDS = SD_SHARES ? SD_OWN + SD_PARTS * (SD_GROUP / 2) + 2 : SD_GROUPS * SD_OWN;
constexpr int SD_EXCHANGE_WORDS = DC_SLABS > 1 ? DC_STREAMS *DC_SLABS *SD_GIVEN_WORDS * 32 : 0;
constexpr int SD_EXCHANGES =
    SD_SHARES || SD_EXCHANGE_WORDS > 2048 ? 1 : 2;    /* rooms for the slabs' scores, in turn; one needs a barrier more */
constexpr int SD_QUERY_WORDS = FKV_D + 4;             /* of a row; its neighbour lies in other banks */
constexpr int SD_AT_LINES = DC_ROWS * SD_QUERY_WORDS; /* behind the queries: {scales, biases} of a page, of each warp */
constexpr int SD_AT_STATS = SD_AT_LINES + DC_STREAMS * DC_SLABS * DC_SLAB; /* [streams, rows, {max, total}] */

/* Of sealed pages each warp has two rooms: codes of a tile's keys and of its values; behind either, norms of every other tile. */
constexpr int SD_CODE_WORDS = DC_SLAB * 2 + 8; /* of 16 tokens; the next ones lie in other banks */
constexpr int SD_AT_NORMS = 2 * SD_PARTS * SD_CODE_WORDS;
constexpr int SD_ROOM_WORDS = FKV_K_BOOK ? 0 : SD_AT_NORMS + SD_TILE / 2;
constexpr int SD_AT_ROOMS = SD_AT_STATS + 2 * DC_STREAMS * DC_ROWS;
constexpr int SD_AT_REST = SD_AT_ROOMS + 2 * DC_STREAMS * DC_SLABS * SD_ROOM_WORDS; /* exchanged scores, then sums [rows, D] */
constexpr int DC_SHARED_WORDS =
    SD_AT_REST + (SD_EXCHANGES * SD_EXCHANGE_WORDS > DC_ROWS * FKV_D ? SD_EXCHANGES * SD_EXCHANGE_WORDS : DC_ROWS * FKV_D);
#define FKV_DECODE_SHARED DC_SHARED_WORDS

/* ---- what a thread holds ---- */

/* High and low bytes of a group's numbers, of 32 channels or 32 tokens: a thread's part of an operand. */
typedef fkv_u32 sd_operand[SD_GROUP / 2];

/* What a unit of a row's sums is worth, and what all its scores of a page have. */
struct sd_line {
    float unit;
    float bias;
};

/* Queries as a page's keys meet them. */
struct sd_queries {
    sd_operand operand[SD_GROUPS][SD_UNITS];
    sd_line line[SD_GROUPS]; /* of the thread's own row */
    bool coarse;             /* a row of the warp has more than SD_MOST_UNIT */
};

/* What a group's tile adds up to: weights, what a unit of their sums is worth, and what was added up so far. */
struct sd_weights {
    sd_operand operand[SD_PARTS];
    float worth;
    float shrink;
};

struct sd_state {
    float max[SD_WEIGHED];
    float total[SD_WEIGHED]; /* of the thread's own tokens */
    float sums[SD_GROUPS][SD_UNITS][SD_GROUP];
};

typedef float sd_scores[SD_GROUPS][SD_OWN];

/* Positions: of the item's first and last query, and of the thread's own rows. */
struct sd_rows {
    fkv_u32 first;
    fkv_u32 last;
    fkv_u32 own[SD_WEIGHED];
};

/* ---- loads ---- */

/* A page's {scales, biases} of the slab into the warp's shared memory. */
FKV_FN void sd_copy_lines(FKV_SHARED fkv_u32 *lines, const fkv_u8 *block, dc_place at) {
    constexpr fkv_u32 lanes = DC_SLAB / 8;
    if (at.lane >= 2 * lanes) return;
    const fkv_u8 *part = block + (at.lane < lanes ? FKV_K_SCALES : FKV_K_BIASES);
    fkv_copy16(lines + at.lane * 4, part + at.slab * (DC_SLAB * 2) + at.lane % lanes * 16);
}

/* ---- what both layouts of rows need ---- */

FKV_FN float sd_line_number(const fkv_words4 &x, int i) {
    return fkv_page_number(i % 2 == 0 ? x.w[i / 2] & 0xffffu : x.w[i / 2] >> 16);
}

/* Four numbers of 16 bits: the bytes with sign that make them up, the high ones and the low ones. */
struct sd_bytes {
    fkv_u32 high;
    fkv_u32 low;
};

constexpr float SD_WHOLE = 12583040.0f; /* 1.5 * 2^23 + 128: a number of units that is added to it is rounded */

FKV_FN sd_bytes sd_bytes_of(const float *x, float inverse) {
    fkv_u32 bits[4];
    FKV_UNROLL
    for (int i = 0; i < 4; i++) bits[i] = fkv_bits_of(fkv_fma(x[i], inverse, SD_WHOLE));
    fkv_u32 front = fkv_permute(bits[0], bits[1], 0x5410u);
    fkv_u32 back = fkv_permute(bits[2], bits[3], 0x5410u);
    return {fkv_permute(front, back, 0x7531u), fkv_permute(front, back, 0x6420u) ^ 0x80808080u};
}

/* Above it what 16 bits leave of q scale counts: a row's largest channel moves scores by more than 15, in powers of two, within
 * the page, and what is rounded off in all channels moves them by about 1e-3. */
constexpr float SD_MOST_UNIT = 1.0f / 32512.0f;

/* A thread's share of a page's queries: q scale of N units of each group's row. */
template <int N> struct sd_scaled {
    float x[SD_GROUPS][N][8];
    fkv_u32 largest[SD_GROUPS]; /* as bits, so that NaN is the largest */
    float bias[SD_GROUPS];      /* sum of q bias */
};

/* From `line` on, lines of 8 channels. query: the thread's row of the first group; the next one's is `step` words behind it. */
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
                to.x[g][u][i] = FKV_K_BOOK ? number : fkv_mul(number, sd_line_number(scales, i));
                to.largest[g] = fkv_max_bits(to.largest[g], fkv_bits_of(fkv_abs(to.x[g][u][i])));
                to.bias[g] = fkv_fma(number, sd_line_number(biases, i), to.bias[g]);
            }
        }
    }
}

/* Of a row whose channels THREADS neighbours have. */
template <fkv_u32 THREADS> FKV_FN sd_line sd_line_of(fkv_u32 largest, float bias) {
    FKV_UNROLL
    for (fkv_u32 h = 1; h < THREADS; h *= 2) {
        largest = fkv_max_bits(largest, fkv_shuffle_xor_bits(largest, h));
        bias += fkv_shuffle_xor(bias, h);
    }
    return {largest < 0x7f800000u ? fkv_mul(fkv_float_of(largest), 1.0f / 32512.0f) : fkv_float_of(DC_NAN), bias};
}

FKV_FN float sd_inverse(float unit) { return unit > 1e-35f ? fkv_reciprocal(unit) : 0.0f; }

/* The high and the low sum of a number. */
FKV_FN float sd_both(int high, int low) { return (float)(high * 256 + low); }
