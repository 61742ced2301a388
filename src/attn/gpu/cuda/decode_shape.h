/* Tile sizes, shared-memory layout and per-thread state of the kernel in decode_mma.h.
 */
/* ---- tile sizes ---- */

constexpr bool DC_DUPLICATED = DC_ROWS == 4;        /* each query row has two copies, as operand rows r and r + 4 */
constexpr int DC_OWN_ROWS = DC_ROWS == 16 ? 2 : 1;  /* number of query rows that a thread handles: row r, or rows r and r + 8 */
constexpr int DC_EXCHANGES = DC_ROWS == 16 ? 1 : 2; /* number of score exchange buffers; a single buffer needs an extra barrier */

/* Number of tokens per tile whose keys one thread loads, limited by the available registers. It affects how results are rounded,
 * so it must depend only on the layer and not on DC_ROWS. */
constexpr int DC_RUN = FKV_PAGE_TOKENS >= 32 && FKV_K_BITS + FKV_V_BITS <= 12 && FKV_R <= 4 && FKV_D <= 256 ? 4 : 2;
constexpr int DC_TILE = 8 * DC_RUN;
constexpr int DC_OWN_TOKENS = 2 * DC_RUN; /* number of tokens per tile whose scores and values a thread handles */

/* dc_own_token() returns the i-th token whose scores thread c handles, and dc_key_token() the b-th token whose keys thread r
 * loads. With this assignment, each load of a warp covers adjacent rows, and covers complete memory lines if rows are short. */
FKV_FN constexpr fkv_u32 dc_own_token(fkv_u32 c, int i) { return (fkv_u32)(i % DC_RUN * 8 + i / DC_RUN * 4) + c; }
FKV_FN constexpr fkv_u32 dc_key_token(fkv_u32 r, int b) { return (fkv_u32)(8 * b) + r % 2 * 4 + r / 2; }

/* Inverse of dc_own_token() for token lane % DC_TILE of the tile: the thread c that handles the token, and the index i of the
 * token in that thread. */
struct dc_owner {
    fkv_u32 c;
    fkv_u32 i;
};
FKV_FN dc_owner dc_owner_of(fkv_u32 lane) { return {lane % 4, lane / 4 % 2 * DC_RUN + lane % DC_TILE / 8}; }

/* ---- K and V layouts ---- */

/* Layout constants shared by K and V, for one slab (the channels of one warp). BOOK: true for codebook codes, whose rows have one
 * scale and no bias. The high bits of 3-bit codes are stored in a separate plane. */
template <int BITS, int GROUP, bool BOOK> struct dc_side {
    static constexpr int bits = BITS;
    static constexpr bool is_book = BOOK;
    static constexpr int group = BOOK ? DC_SLAB : GROUP;
    static constexpr int row_bytes = FKV_D * BITS / 8;
    static constexpr int plane_bits = BITS == 3 ? 2 : BITS; /* number of bits per code in the first plane */
    static constexpr int slab_bytes = DC_SLAB * plane_bits / 8;
    static constexpr int groups = BITS == 16 ? 1 : DC_SLAB / group; /* number of scale groups per slab */
    static constexpr int scale_words = (groups + 1) / 2;            /* number of words that a token's scales occupy in the page */
    static constexpr int line_floats = BOOK ? 1 : 2; /* number of floats per scale group: scale and bias, or only a scale */
    static constexpr int scale_floats =
        BITS == 16 ? 0 : line_floats * groups;                   /* number of floats per token and slab, in shared memory */
    static constexpr int high_plane = BITS == 3 ? FKV_D / 4 : 0; /* byte offset of the high-bit plane within a row */
};

/* K layout. The channels of a slab are divided into units of `span` channels, and a thread loads load_bytes bytes of each
 * unit. */
struct dc_k : dc_side<FKV_K_BITS, FKV_K_GROUP, FKV_K_BOOK> {
    static constexpr int load_bytes = group * plane_bits / 32 > 16 ? 16 : group *plane_bits / 32;
    static constexpr int high_word =
        bits == 3 ? (load_bytes + 3) / 4 : 0; /* index of the word that holds the high bits of 3-bit codes */
    static constexpr int words = (load_bytes + 3) / 4 + (bits == 3);
    static constexpr int span = load_bytes * 32 / plane_bits;
    static constexpr int terms = is_book && bits == 4 ? 2 : 1; /* number of operand bytes whose sum is the value of a code */
    static constexpr int units = DC_SLAB / span;
    static constexpr int group_units = units / groups;
    static constexpr int step_channels = bits == 16 ? 16 : 32; /* number of channels per matrix product */
    static constexpr int steps = DC_SLAB / step_channels;
    static constexpr int unit_steps = span / step_channels;
    /* Each query value is split into two 16-bit values or three bytes, each of which is in a separate row of the A operand. A row
     * tile has 16 operand rows. */
    static constexpr int parts = bits == 16 ? 2 : 3;
    static constexpr int row_tiles = bits == 16 ? DC_OWN_ROWS : DC_ROWS == 4 ? 1 : DC_ROWS == 8 ? 2 : 3;
};

/* V layout. The channels of a slab are divided into units of `span` channels, and a thread loads load_bytes bytes of each unit. A
 * unit is one scale group. However, if rows are duplicated and the slab has two scale groups, a unit is the whole slab, and each
 * copy of a row handles one of the groups. */
struct dc_v : dc_side<FKV_V_BITS, FKV_V_GROUP, FKV_V_BOOK> {
    static constexpr int span = bits == 16 ? 64 : DC_DUPLICATED && groups == 2 ? DC_SLAB : group;
    static constexpr int load_bytes = span * plane_bits / 64;
    static constexpr int high_word = bits == 3 ? (load_bytes + 3) / 4 : 0;
    static constexpr int words = (load_bytes + 3) / 4 + (bits == 3);
    static constexpr int unit = is_book && bits == 2 ? 11 : 1; /* an operand is a level divided by this number */
    static constexpr int units = DC_SLAB / span;
    static constexpr int quads = span / 32; /* number of groups of four channels that a thread holds in each unit */
    static constexpr int tiles = DC_SLAB / 16;
    static constexpr int own_groups = DC_DUPLICATED ? (groups + 1) / 2 : groups; /* number of V scale groups per operand column */
    static constexpr bool is_bf16 = bits == 16 && FKV_PAGE_BF16;                 /* if true, p is split into two bfloat16 terms */
    static constexpr float middle = bits == 8 ? 128.0f : bits == 4 ? 8.0f : 2.0f;

    /* group_of_unit() returns the scale group of unit u, and group_of_tile() returns the scale group of tile t (16 channels).
     * Both return an index among the scale groups that the thread handles. */
    FKV_FN constexpr int group_of_unit(int u) { return bits == 16 || span == DC_SLAB ? 0 : DC_DUPLICATED ? u / 2 : u; }
    FKV_FN constexpr int group_of_tile(int t) { return group_of_unit(t / (2 * quads)); }
};

/* ---- shared memory layout, in words ---- */

/* Shared memory for the scales and biases of one warp's tile, as floats. For each token, K stores all scales and then all biases.
 * For each group, V stores {scale, bias + scale * middle code}. Codebook codes have only scales. After every DC_OWN_TOKENS tokens
 * (the tokens of one thread), 16 bytes of padding avoid bank conflicts. */
constexpr int DC_AT_V_SCALES = DC_TILE * dc_k::scale_floats + 16;
constexpr int DC_SCALES_WORDS = DC_TILE * (dc_k::scale_floats + dc_v::scale_floats) + 32;

constexpr int DC_OPERAND_WORDS = dc_k::row_tiles * dc_k::steps * 128; /* size of the query operands for one slab */
constexpr int DC_QUERY_WORDS = DC_SLABS * DC_OPERAND_WORDS;
constexpr int DC_SUM_WORDS =
    DC_ROWS * (1 + DC_SLABS * dc_k::groups);                /* quantization steps [rows], then sums of q [rows, scale groups] */
constexpr int DC_SLAB_SCORES = DC_OWN_ROWS * DC_OWN_TOKENS; /* number of scores per thread */
constexpr int DC_EXCHANGE_WORDS = DC_SLABS > 1 ? DC_STREAMS *DC_SLABS *DC_SLAB_SCORES * 32 : 0;

constexpr int DC_AT_STEPS = DC_QUERY_WORDS;
constexpr int DC_AT_SUMS = DC_AT_STEPS + DC_ROWS;
constexpr int DC_AT_SCALES = DC_QUERY_WORDS + DC_SUM_WORDS;
constexpr int DC_AT_STATS = DC_AT_SCALES + DC_STREAMS * DC_SLABS * DC_SCALES_WORDS; /* [streams, rows, {max, total}] */
constexpr int DC_AT_REST = DC_AT_STATS + 2 * DC_STREAMS * DC_ROWS; /* buffer for exchanging scores, later for output sums */
constexpr int DC_SHARED_WORDS =
    DC_AT_REST + (DC_EXCHANGES * DC_EXCHANGE_WORDS > DC_OUTPUT_WORDS ? DC_EXCHANGES * DC_EXCHANGE_WORDS : DC_OUTPUT_WORDS);
#ifndef FKV_SHARED_BYTES /* sealed layers use dynamic shared memory */
static_assert(DC_SHARED_WORDS * 4 <= 48 * 1024, "the static shared memory of a block is limited to 48 KB");
#endif
#define FKV_DECODE_SHARED DC_SHARED_WORDS

/* ---- per-thread state ---- */

struct dc_keys {
    fkv_u32 codes[DC_RUN][dc_k::units][dc_k::words];
};
struct dc_values {
    fkv_u32 codes[DC_OWN_TOKENS][dc_v::units][dc_v::words];
};
/* Scales and biases of token lane % DC_TILE, as stored in the page. */
struct dc_scales {
    fkv_u32 k[2][dc_k::scale_words];
    fkv_u32 v[2][dc_v::scale_words];
};

/* Constants of the query rows that the thread handles, which are the same for all tiles. */
struct dc_rows {
    float step[DC_OWN_ROWS][2]; /* factors by which dc_score_parts.scores (index 0) and .rests (index 1) are multiplied */
    float query_sum[DC_OWN_ROWS][dc_k::groups]; /* sum of q over each scale group, to be multiplied by the biases of K */
    fkv_u32 position[DC_OWN_ROWS];              /* position of the row's query */
    fkv_u32 first;                              /* first, last: positions of the first and the last query of the work item */
    fkv_u32 last;
};

/* Softmax state of a thread, for the query rows that it handles. */
struct dc_state {
    float max[DC_OWN_ROWS];
    float total[DC_OWN_ROWS];                        /* sum of the softmax weights of the tokens that this thread handles */
    fkv_u32 exponent[DC_OWN_ROWS][dc_v::own_groups]; /* biased float exponent of the largest V scale so far, per scale group */
    float bias[DC_OWN_ROWS][dc_v::own_groups];       /* sum of p * bias over the tokens that this thread handles */
    float sums[dc_v::tiles][DC_OWN_ROWS][4];
};

typedef float dc_scores[DC_OWN_ROWS][DC_OWN_TOKENS];
