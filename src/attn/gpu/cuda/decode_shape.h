/* Decode through matrix units, first part: shapes. How much of a tile a thread holds, what lies where in shared memory, and what
 * a warp keeps from tile to tile. See decode_mma.h for the whole.
 */
/* ---- rows and tokens of a tile ---- */

constexpr bool DC_TWICE = DC_ROWS == 4;             /* threads r and r + 4 both have row r % 4 */
constexpr int DC_OWN_ROWS = DC_ROWS == 16 ? 2 : 1;  /* of a thread: r, or r and r + 8 */
constexpr int DC_EXCHANGES = DC_ROWS == 16 ? 1 : 2; /* rooms for the slabs' scores, in turn; one needs a barrier more */

/* Tokens whose keys a thread loads. What it holds of a tile are registers. The layer decides, not DC_ROWS: which tokens are
 * folded together is part of the answer's bits. */
constexpr int DC_RUN = FKV_PAGE_TOKENS >= 32 && FKV_K_BITS + FKV_V_BITS <= 12 && FKV_R <= 4 && FKV_D <= 256 ? 4 : 2;
constexpr int DC_TILE = 8 * DC_RUN;
constexpr int DC_OWN_TOKENS = 2 * DC_RUN; /* whose scores and values a thread has */

/* Which they are: dealt out so that a load of a warp is of rows side by side, whole lines of memory where rows are short. Token
 * of the tile that is thread c's i-th; and that whose keys thread r loads b-th. */
FKV_FN constexpr fkv_u32 dc_own_token(fkv_u32 c, int i) { return (fkv_u32)(i % DC_RUN * 8 + i / DC_RUN * 4) + c; }
FKV_FN constexpr fkv_u32 dc_key_token(fkv_u32 r, int b) { return (fkv_u32)(8 * b) + r % 2 * 4 + r / 2; }

/* Whose the token of thread `lane` is, lane % DC_TILE: dc_own_token(c, i) is it. */
struct dc_owner {
    fkv_u32 c;
    fkv_u32 i;
};
FKV_FN dc_owner dc_owner_of(fkv_u32 lane) { return {lane % 4, lane / 4 % 2 * DC_RUN + lane % DC_TILE / 8}; }

/* ---- the sides of a page ---- */

/* BOOK: codes of a book, whose rows have one scale and no bias. Of 3 bits the high ones lie in a plane of their own. */
template <int BITS, int GROUP, bool BOOK> struct dc_side {
    static constexpr int bits = BITS;
    static constexpr bool is_book = BOOK;
    static constexpr int group = BOOK ? DC_SLAB : GROUP;
    static constexpr int row_bytes = FKV_D * BITS / 8;
    static constexpr int plane_bits = BITS == 3 ? 2 : BITS; /* of the codes' first plane */
    static constexpr int slab_bytes = DC_SLAB * plane_bits / 8;
    static constexpr int groups = BITS == 16 ? 1 : DC_SLAB / group;            /* of a slab */
    static constexpr int scale_words = (groups + 1) / 2;                       /* of a token's slab, in the page */
    static constexpr int line_floats = BOOK ? 1 : 2;                           /* of a group: a scale and a bias */
    static constexpr int scale_floats = BITS == 16 ? 0 : line_floats * groups; /* of a token's slab, in shared memory */
    static constexpr int high_plane = BITS == 3 ? FKV_D / 4 : 0;               /* where that of the high bits begins */
};

/* K: a thread loads load_bytes of each unit of `span` channels of a token's slab. */
struct dc_k : dc_side<FKV_K_BITS, FKV_K_GROUP, FKV_K_BOOK> {
    static constexpr int load_bytes = group * plane_bits / 32 > 16 ? 16 : group *plane_bits / 32;
    static constexpr int high_word = bits == 3 ? (load_bytes + 3) / 4 : 0; /* behind them: of the high bits */
    static constexpr int words = (load_bytes + 3) / 4 + (bits == 3);
    static constexpr int span = load_bytes * 32 / plane_bits;
    static constexpr int terms = is_book && bits == 4 ? 2 : 1; /* bytes that add up to what a code stands for */
    static constexpr int units = DC_SLAB / span;
    static constexpr int group_units = units / groups;
    static constexpr int step_channels = bits == 16 ? 16 : 32; /* of one product */
    static constexpr int steps = DC_SLAB / step_channels;
    static constexpr int unit_steps = span / step_channels;
    /* a query's number is two halves or three bytes, each with a row of the A operand: row tiles of 16 */
    static constexpr int parts = bits == 16 ? 2 : 3;
    static constexpr int row_tiles = bits == 16 ? DC_OWN_ROWS : DC_ROWS == 4 ? 1 : DC_ROWS == 8 ? 2 : 3;
};

/* V: load_bytes of each unit of `span` channels: those of one group, or all where each column has scales of its own. */
struct dc_v : dc_side<FKV_V_BITS, FKV_V_GROUP, FKV_V_BOOK> {
    static constexpr int span = bits == 16 ? 64 : DC_TWICE && groups == 2 ? DC_SLAB : group;
    static constexpr int load_bytes = span * plane_bits / 64;
    static constexpr int high_word = bits == 3 ? (load_bytes + 3) / 4 : 0;
    static constexpr int words = (load_bytes + 3) / 4 + (bits == 3);
    static constexpr int unit = is_book && bits == 2 ? 11 : 1; /* what the products' values are multiples of */
    static constexpr int units = DC_SLAB / span;
    static constexpr int quads = span / 32; /* of a thread's channels of a unit */
    static constexpr int tiles = DC_SLAB / 16;
    static constexpr int own_groups = DC_TWICE ? (groups + 1) / 2 : groups; /* of scales, of a thread's weights */
    static constexpr bool is_bf16 = bits == 16 && FKV_PAGE_BF16;            /* 16-bit values meet p as two bfloat16 numbers */
    static constexpr float middle = bits == 8 ? 128.0f : bits == 4 ? 8.0f : 2.0f;

    /* Which of a thread's groups the channels of a unit, or of a row tile, have. */
    FKV_FN constexpr int group_of_unit(int u) { return bits == 16 || span == DC_SLAB ? 0 : DC_TWICE ? u / 2 : u; }
    FKV_FN constexpr int group_of_tile(int t) { return group_of_unit(t / (2 * quads)); }
};

/* ---- shared memory, in words ---- */

/* Scales of a warp's tile, as floats: of each token {scale, ...} {bias, ...} of K, {scale, bias of the middle} of V, of a book
 * the scale alone; every DC_OWN_TOKENS tokens, what one thread reads, are shifted by 16 bytes against the next. */
constexpr int DC_AT_V_SCALES = DC_TILE * dc_k::scale_floats + 16;
constexpr int DC_SCALES_WORDS = DC_TILE * (dc_k::scale_floats + dc_v::scale_floats) + 32;

constexpr int DC_OPERAND_WORDS = dc_k::row_tiles * dc_k::steps * 128; /* queries of a slab */
constexpr int DC_QUERY_WORDS = DC_SLABS * DC_OPERAND_WORDS;
constexpr int DC_SUM_WORDS = DC_ROWS * (1 + DC_SLABS * dc_k::groups); /* {step}, {sum of q of each group} */
constexpr int DC_SLAB_SCORES = DC_OWN_ROWS * DC_OWN_TOKENS;           /* of a thread */
constexpr int DC_EXCHANGE_WORDS = DC_SLABS > 1 ? DC_STREAMS *DC_SLABS *DC_SLAB_SCORES * 32 : 0;

constexpr int DC_AT_STEPS = DC_QUERY_WORDS;
constexpr int DC_AT_SUMS = DC_AT_STEPS + DC_ROWS;
constexpr int DC_AT_SCALES = DC_QUERY_WORDS + DC_SUM_WORDS;
constexpr int DC_AT_STATS = DC_AT_SCALES + DC_STREAMS * DC_SLABS * DC_SCALES_WORDS; /* [streams, rows, {max, total}] */
constexpr int DC_AT_REST = DC_AT_STATS + 2 * DC_STREAMS * DC_ROWS;                  /* exchanged scores, then sums [rows, D] */
constexpr int DC_SHARED_WORDS =
    DC_AT_REST + (DC_EXCHANGES * DC_EXCHANGE_WORDS > DC_ROWS * FKV_D ? DC_EXCHANGES * DC_EXCHANGE_WORDS : DC_ROWS * FKV_D);
#define FKV_DECODE_SHARED DC_SHARED_WORDS

/* ---- what a thread holds ---- */

/* Packed bytes of a tile. */
struct dc_keys {
    fkv_u32 codes[DC_RUN][dc_k::units][dc_k::words];
};
struct dc_values {
    fkv_u32 codes[DC_OWN_TOKENS][dc_v::units][dc_v::words];
};
/* Of token lane % DC_TILE: scales, then biases, as they lie in the page. */
struct dc_scales {
    fkv_u32 k[2][dc_k::scale_words];
    fkv_u32 v[2][dc_v::scale_words];
};

/* A row, as all tiles meet it. */
struct dc_rows {
    float step[DC_OWN_ROWS][2];                 /* what a unit of the first and of the second sum is worth */
    float query_sum[DC_OWN_ROWS][dc_k::groups]; /* of q, for K's biases */
    fkv_u32 position[DC_OWN_ROWS];              /* of the row's query */
    fkv_u32 first;                              /* positions of the item's queries */
    fkv_u32 last;
};

/* A warp's share of the piece. */
struct dc_state {
    float max[DC_OWN_ROWS];
    float total[DC_OWN_ROWS];                        /* of the thread's own tokens */
    fkv_u32 exponent[DC_OWN_ROWS][dc_v::own_groups]; /* of the largest scale seen, as a float has it */
    float bias[DC_OWN_ROWS][dc_v::own_groups];       /* of the thread's own tokens */
    float sums[dc_v::tiles][DC_OWN_ROWS][4];
};

typedef float dc_scores[DC_OWN_ROWS][DC_OWN_TOKENS];
