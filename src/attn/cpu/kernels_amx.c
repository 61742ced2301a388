/* Attention kernels for AMX. One instruction multiplies 16 rows of 64 bytes by 16 columns of 64 bytes. This file contains the
 * prefill kernels; decode is in decode_scores_amx.h and decode_values_amx.h. For codecs without integer kernels, the float
 * kernels of kernels_body.h are used.
 *
 * Results are bit-identical to those of kernels_vnni.h: integer sums are exact in any order, and the float operations that follow
 * are performed in the same order. Softmax and weights are in rows16_avx512.h.
 *
 * For scores, matrix A holds one byte of each query value, for 16 rows and one chunk of the head dimension. Matrix B holds the
 * codes of that chunk as quads, for 16 tokens. For values, matrix A holds one byte of each weight, for 16 rows and 64 tokens.
 * Matrix B holds the codes of these tokens as quads, for 16 values. The codes of a tile are rearranged once for all rows.
 *
 * Accumulators alternate between two sets of tile registers. The matrix multiplications of one set start before the accumulators
 * of the other set are stored and converted, so that the matrix unit and the vector units work in parallel. These kernels are
 * compute-bound.
 */
#include "decode_scores_amx.h"
#include "decode_values_amx.h"
#include "prefill_tile_amx.h"
#include "sealed_run_amx.h"

_Static_assert((int)BLOCK_ROWS == (int)FKV_TILE_HEIGHT, "a block of rows must fill a tile");

enum {
    MAX_UNITS = FKV_MAX_HEAD_DIM / UNIT_NUMBERS,
    MAX_KEY_UNITS = FKV_TILE_TOKENS / LANE_TOKENS * MAX_UNITS,
    MAX_STEPS = FKV_MAX_HEAD_DIM / 16, /* maximum number of groups of 16 values along the head dimension */
    MAX_WEIGHTS = 16 /* maximum number of row_weights in a value_job; each belongs to one scale group and one block of rows */
};

/* Integer dot products of 16 rows with 16 columns. */
typedef struct block_sums {
    alignas(64) int32_t at[BLOCK_ROWS][16];
} block_sums;

FKV_INLINE __m512i sums_of(const block_sums *sums, uint32_t row) { return _mm512_load_si512(sums->at[row]); }

/* ---- scores ---- */

/* One loop iteration (turn) of the score kernel processes one chunk of the head dimension for 16 tokens. A chunk is 32 values if
 * scale groups have 32 values, otherwise 64. All chunks of 16 tokens are processed before the next 16 tokens. */
typedef struct key_turn {
    uint32_t token;
    uint32_t chunk;
    uint32_t at;                /* index of the chunk's first value along the head dimension */
    const uint8_t (*codes)[64]; /* codes of the chunk as quads (four values per dword); see unit_quads() */
    alignas(64) float scale[LANE_TOKENS];
    alignas(64) float bias[LANE_TOKENS];
} key_turn;

/* A tile of keys and the query rows that attend to it. */
typedef struct score_job {
    int_queries queries;
    uint32_t dim;
    uint32_t n_rows;
    uint32_t n_turns;
    uint32_t n_chunks;
    float *scores;
    key_turn turns[MAX_KEY_UNITS];
    alignas(64) uint8_t codes[MAX_KEY_UNITS][UNIT_QUADS][64];
    block_sums sums[2][N_BYTES]; /* dot products of this iteration and of the previous one, for each query byte */
} score_job;

FKV_INLINE void keys_open(int bits, score_job *j, const tile *t, uint32_t n_tokens) {
    uint32_t n_units = t->n_units * 16 / UNIT_NUMBERS;
    uint32_t units = chunk_units(1u << t->group_shift);
    uint32_t n = 0; /* index of the unit (32 values of 16 tokens) in j->codes */
    j->n_turns = 0;
    j->n_chunks = n_units / units;
    for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
        for (uint32_t unit = 0; unit < n_units; unit++, n++) {
            __m512i quads[UNIT_QUADS];
            const uint8_t *codes = t->codes + (size_t)token * t->row_bytes + (size_t)unit * UNIT_NUMBERS * (size_t)bits / 8;
            unit_quads(bits, codes, t->row_bytes, quads);
            FKV_UNROLL
            for (int i = 0; i < UNIT_QUADS; i++) _mm512_store_si512(j->codes[n][i], quads[i]);
            if (unit % units != 0) continue;
            key_turn *turn = &j->turns[j->n_turns++];
            uint32_t group = unit * UNIT_NUMBERS >> t->group_shift;
            turn->token = token;
            turn->chunk = unit / units;
            turn->at = unit * UNIT_NUMBERS;
            turn->codes = j->codes[n];
            vf_store(turn->scale, token_lanes(t->scales, group, token));
            vf_store(turn->bias, token_lanes(t->biases, group, token));
        }
    }
}

/* Configures the AMX tiles. Tiles 0-2 accumulate the products with the high, low and remainder bytes of the queries, and tiles
 * 3-5 are a second set of accumulators. Tile 6 holds one byte of each query value, and tile 7 holds codes. */
static void score_tiles_open(uint32_t units) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, BLOCK_ROWS, 64);
    fkv_tile_shape(&shapes, 6, BLOCK_ROWS, units * UNIT_NUMBERS);
    fkv_tile_shape(&shapes, 7, units * UNIT_QUADS, 64);
    fkv_tiles_open(&shapes);
}

/* Converts the dot products of rows [begin, end) to scores, with the same float operations as int_scores_chunk(). Row numbers are
 * relative to `row`. */
FKV_INLINE void scores_from(const score_job *j, const key_turn *turn, const block_sums sums[N_BYTES], uint32_t row,
                            uint32_t begin, uint32_t end) {
    const float *step = j->queries.step + row;
    const float *q_sum = j->queries.sum + (size_t)row * j->n_chunks + turn->chunk;
    size_t n_chunks = j->n_chunks;
    vf scale = vf_load(turn->scale);
    vf bias = vf_load(turn->bias);
    __mmask16 later = turn->chunk == 0 ? 0 : 0xffff;
    float *to = j->scores + (size_t)row * FKV_TILE_TOKENS + turn->token;
    for (uint32_t r = begin; r < end; r++) {
        __m512i sum = _mm512_add_epi32(times_256(sums_of(&sums[0], r)), sums_of(&sums[1], r));
        sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums_of(&sums[2], r), 8));
        vf score = vf_fma(bias, vf_set(q_sum[r * n_chunks]), _mm512_maskz_loadu_ps(later, to + r * FKV_TILE_TOKENS));
        vf_store(to + r * FKV_TILE_TOKENS, vf_fma(_mm512_cvtepi32_ps(sum), vf_mul(scale, vf_set(step[r])), score));
    }
}

/* Zeroes an accumulator tile. Each tile number (a compile-time constant) needs its own case, because the instructions take
 * literal tile numbers. */
FKV_INLINE void zero_block_sums(uint32_t sums) {
    switch (sums) {
    case 0: _tile_zero(0); break;
    case 1: _tile_zero(1); break;
    case 2: _tile_zero(2); break;
    case 3: _tile_zero(3); break;
    case 4: _tile_zero(4); break;
    default: _tile_zero(5); break;
    }
}

FKV_INLINE void store_block_sums(uint32_t sums, block_sums *to) {
    switch (sums) {
    case 0: _tile_stored(0, to->at, 64); break;
    case 1: _tile_stored(1, to->at, 64); break;
    case 2: _tile_stored(2, to->at, 64); break;
    case 3: _tile_stored(3, to->at, 64); break;
    case 4: _tile_stored(4, to->at, 64); break;
    default: _tile_stored(5, to->at, 64); break;
    }
}

/* Multiplies one byte of each value of 16 queries (tile 6) by the codes of one chunk for 16 tokens (tile 7). */
FKV_INLINE void multiply_queries(uint32_t sums) {
    switch (sums) {
    case 0: _tile_dpbsud(0, 6, 7); break;
    case 1: _tile_dpbsud(1, 6, 7); break;
    case 2: _tile_dpbsud(2, 6, 7); break;
    case 3: _tile_dpbsud(3, 6, 7); break;
    case 4: _tile_dpbsud(4, 6, 7); break;
    default: _tile_dpbsud(5, 6, 7); break;
    }
}

/* Dot products of the previous iteration, which are converted to scores while the matrix unit works on the next iteration. They
 * belong to n_rows query rows, starting at `row`. */
typedef struct scores_before {
    const key_turn *turn;
    const block_sums *sums;
    uint32_t row;
    uint32_t n_rows;
} scores_before;

/* For one byte of the query values, starts the dot products of the next iteration, stores the dot products of this iteration, and
 * converts a third of the previous iteration's rows to scores. This keeps the matrix unit and the vector units busy at the same
 * time. `bytes` are the query bytes of the next iteration. `set` and `byte` are compile-time constants. */
FKV_INLINE void score_byte(score_job *j, uint32_t set, uint32_t byte, const int8_t *bytes, scores_before before) {
    _tile_loadd(6, bytes, j->dim);
    zero_block_sums((1 - set) * N_BYTES + byte);
    multiply_queries((1 - set) * N_BYTES + byte);
    store_block_sums(set * N_BYTES + byte, &j->sums[set][byte]);
    scores_from(j, before.turn, before.sums, before.row, fkv_min_u32(before.n_rows, 5 * byte),
                fkv_min_u32(before.n_rows, byte == 2 ? 16 : 5 * byte + 5));
}

FKV_INLINE void score_set(score_job *j, uint32_t set, const key_turn *next, size_t at, scores_before before) {
    _tile_loadd(7, next->codes, 64);
    score_byte(j, set, 0, j->queries.high + at, before);
    score_byte(j, set, 1, j->queries.low + at, before);
    score_byte(j, set, 2, j->queries.remainder + at, before);
}

/* Processes one loop iteration. `before`, `row` and `n_rows` describe the previous iteration. `next` and `at`, an offset in the
 * query bytes, describe the next iteration. */
FKV_INLINE void score_turn(score_job *j, uint32_t set, const key_turn *before, uint32_t row, uint32_t n_rows,
                           const key_turn *next, size_t at) {
    if (set == 0)
        score_set(j, 0, next, at, (scores_before){before, j->sums[1], row, n_rows});
    else
        score_set(j, 1, next, at, (scores_before){before, j->sums[0], row, n_rows});
}

static void score_turns(score_job *j, const tile *t) {
    uint32_t n_blocks = fkv_ceil_div(j->n_rows, BLOCK_ROWS);
    const key_turn *before = j->turns;
    const key_turn *end = j->turns + j->n_turns;
    uint32_t row = 0; /* first query row of the previous iteration */
    uint32_t n_rows = 0;
    uint32_t set = 0;
    score_turn(j, 1, before, 0, 0, j->turns, 0); /* before the first iteration, the stored dot products are not used */
    for (uint32_t block = 0; block < n_blocks; block++) {
        size_t first = (size_t)block * BLOCK_ROWS * j->dim;
        fkv_fetch_some(t->next, FKV_FETCH_SHARES / 2 / n_blocks + 1);
        for (const key_turn *turn = j->turns; turn < end; turn++) {
            const key_turn *next = turn + 1 < end ? turn + 1 : j->turns;
            size_t at = first + next->at;
            if (turn + 1 == end && block + 1 < n_blocks) at += (size_t)BLOCK_ROWS * j->dim;
            if (n_rows == BLOCK_ROWS) /* compile-time constant */
                score_turn(j, set, before, row, BLOCK_ROWS, next, at);
            else
                score_turn(j, set, before, row, n_rows, next, at);
            set = 1 - set;
            before = turn;
            row = block * BLOCK_ROWS;
            n_rows = fkv_min_u32(BLOCK_ROWS, j->n_rows - row);
        }
    }
    scores_from(j, before, j->sums[1 - set], row, 0, n_rows);
}

static void prefill_scores(const fkv_codec *codec, const tile *t, uint32_t n_tokens, const void *prepared, uint32_t n_rows,
                           float *scores) {
    score_job j;
    j.dim = codec->dim;
    j.n_rows = n_rows;
    j.scores = scores;
    j.queries = queries_in((void *)(uintptr_t)prepared, n_rows, j.dim);
    if (codec->bits == 8)
        keys_open(8, &j, t, n_tokens);
    else
        keys_open(4, &j, t, n_tokens);
    score_tiles_open(chunk_units(codec->group));
    score_turns(&j, t);
    fkv_tiles_close();
}

static void amx_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    if (n_rows <= DECODE_ROWS)
        decode_prepare(codec, q, n_rows, prepared);
    else
        int_prepare(codec, q, n_rows, prepared);
}

static void amx_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                       const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows <= DECODE_ROWS) {
        decode_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
        return;
    }
    tile t;
    int_tile_open(&t, codec, part, next, n_tokens);
    prefill_scores(codec, &t, n_tokens, prepared, n_rows, scores);
    int_queries iq = queries_in((void *)(uintptr_t)prepared, n_rows, codec->dim);
    if (*iq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *iq.n_by_float, iq.by_float, scores);
}

/* ---- values ---- */

/* Value codes of a tile as quads: a dword holds the codes of four tokens for one channel, and a vector covers 16 channels. Quad k
 * of the tokens is at index quad_place(k), in the order of the packed weights. */
typedef struct value_blocks {
    alignas(64) uint8_t codes[MAX_STEPS][TILE_QUADS][64];
} value_blocks;

/* Loads 64 codes of a row, starting at code `first`, as one byte each, and transposes the 16 dwords as a 4x4 matrix. Codes beyond
 * the end of the row are 0. */
FKV_INLINE __m512i value_code_bytes(int bits, const uint8_t *row, uint32_t first, uint32_t dim) {
    uint32_t n = fkv_min_u32(64, dim - first);
    __m512i codes;
    if (bits == 8) {
        codes = _mm512_maskz_loadu_epi8(~(__mmask64)0 >> (64 - n), row + first);
    } else {
        __m256i packed = _mm256_maskz_loadu_epi8((__mmask32)(0xffffffffu >> (32 - n / 2)), row + first / 2);
        codes = _mm512_cvtepu8_epi16(packed);
        codes = _mm512_and_si512(_mm512_or_si512(codes, _mm512_slli_epi16(codes, 4)), _mm512_set1_epi8(15));
    }
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
}

FKV_INLINE void values_open(int bits, value_blocks *values, const tile *t, uint32_t n_tokens) {
    uint32_t dim = t->n_units * 16;
    for (uint32_t token = 0; token < n_tokens; token += 4) {
        const uint8_t *row = t->codes + (size_t)token * t->row_bytes;
        for (uint32_t first = 0; first < dim; first += 64) {
            __m512i a[4];
            FKV_UNROLL
            for (int i = 0; i < 4; i++) a[i] = value_code_bytes(bits, row + (size_t)i * t->row_bytes, first, dim);
            __m512i v[4];
            token_quads(a, v);
            FKV_UNROLL
            for (uint32_t i = 0; i < 4; i++)
                if (first + 16 * i < dim) _mm512_store_si512(values->codes[first / 16 + i][quad_place(token / 4)], v[i]);
        }
    }
    for (uint32_t quad = fkv_ceil_div(n_tokens, 4); quad < TILE_QUADS; quad++)
        for (uint32_t i = 0; i < t->n_units; i++) _mm512_store_si512(values->codes[i][quad_place(quad)], _mm512_setzero_si512());
}

/* A tile of values and the query rows that attend to it. The weights of as many scale groups as fit in `weights` are computed
 * before the matrix multiplications of these groups start, because the matrix unit powers down if too much time passes between
 * multiplications. */
typedef struct value_job {
    token_affine affine;
    value_blocks values;
    row_weights weights[MAX_WEIGHTS]; /* [scale groups, blocks of rows] quantized weights */
    uint32_t dim;
    uint32_t group_steps; /* number of loop iterations per scale group; each covers 16 values */
    uint32_t n_tokens;
    uint32_t n_rows;
    uint32_t n_blocks; /* blocks of rows */
    const float *p;
    float *out;
    block_sums sums[2][2]; /* dot products of this iteration and of the previous one, for each weight byte */
} value_job;

FKV_INLINE uint32_t block_rows(uint32_t n_rows, uint32_t block) { return fkv_min_u32(BLOCK_ROWS, n_rows - block * BLOCK_ROWS); }

/* Quantizes the weights of one block of rows for n scale groups, starting at `group`. */
static void weigh_rows(value_job *j, uint32_t block, uint32_t group, uint32_t n) {
    const float *p = j->p + (size_t)block * BLOCK_ROWS * FKV_TILE_TOKENS;
    uint32_t n_vecs = fkv_ceil_div(j->n_tokens, 16);
    uint32_t n_rows = block_rows(j->n_rows, block);
    for (uint32_t g = 0; g < n; g++) {
        row_weights *w = &j->weights[g * j->n_blocks + block];
        if (n_vecs == 4)
            rows16_weigh(4, w, &j->affine, group + g, p, n_rows);
        else
            rows16_weigh(n_vecs, w, &j->affine, group + g, p, n_rows);
    }
}

/* Configures the AMX tiles. Tiles 0 and 1 accumulate the products with the high and low bytes of the weights, and tiles 2 and 3
 * are a second set of accumulators. Tiles 4 and 5 hold the weight bytes, and tile 6 holds codes. */
static void value_tiles_open(void) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, BLOCK_ROWS, 64);
    fkv_tile_shape(&shapes, 6, TILE_QUADS, 64);
    fkv_tiles_open(&shapes);
}

/* One loop iteration (turn) of the value kernel covers 16 values of one scale group, for one block of rows. */
typedef struct value_turn {
    const row_weights *weights;
    const uint8_t (*codes)[64];
    float *out; /* output of the first row in the block */
    uint32_t n_rows;
} value_turn;

FKV_INLINE value_turn turn_at(const value_job *j, const row_weights *of_blocks, uint32_t first, uint32_t block, uint32_t step) {
    return (value_turn){&of_blocks[block], j->values.codes[first + step],
                        j->out + (size_t)block * BLOCK_ROWS * j->dim + (size_t)(first + step) * 16, block_rows(j->n_rows, block)};
}

/* Adds the weighted values of rows [begin, end) of an iteration to the output, with the same float operations as
 * int_values_row(). */
FKV_INLINE void add_values(const value_turn *turn, const block_sums sums[2], uint32_t dim, uint32_t begin, uint32_t end) {
    const row_weights *w = turn->weights;
    for (uint32_t r = begin; r < end; r++) {
        __m512i sum = _mm512_add_epi32(times_256(sums_of(&sums[0], r)), sums_of(&sums[1], r));
        sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(w->zero[r]));
        vf x = vf_fma(_mm512_cvtepi32_ps(sum), vf_set(w->step[r]), vf_set(w->offset[r]));
        float *to = turn->out + (size_t)r * dim;
        vf_store(to, vf_add(vf_load(to), x));
    }
}

/* Multiplies the high bytes (tile 4) or low bytes (tile 5) of the weights by the codes (tile 6). */
FKV_INLINE void multiply_weights(uint32_t sums) {
    switch (sums) {
    case 0: _tile_dpbsud(0, 4, 6); break;
    case 1: _tile_dpbsud(1, 5, 6); break;
    case 2: _tile_dpbsud(2, 4, 6); break;
    default: _tile_dpbsud(3, 5, 6); break;
    }
}

/* For one byte of the weights, starts the dot products of the next iteration, stores the dot products of this iteration, and adds
 * half of the previous iteration's rows to the output. */
FKV_INLINE void start_value_byte(value_job *j, uint32_t set, uint32_t byte, const value_turn *before, uint32_t n_rows) {
    zero_block_sums((1 - set) * 2 + byte);
    multiply_weights((1 - set) * 2 + byte);
    store_block_sums(set * 2 + byte, &j->sums[set][byte]);
    add_values(before, j->sums[1 - set], j->dim, fkv_min_u32(n_rows, 8 * byte), fkv_min_u32(n_rows, 8 * byte + 8));
}

static void value_step(value_job *j, uint32_t set, const value_turn *before, uint32_t n_rows, const value_turn *next,
                       bool other) {
    if (other) {
        _tile_loadd(4, next->weights->high, 64);
        _tile_loadd(5, next->weights->low, 64);
    }
    _tile_loadd(6, next->codes, 64);
    if (set == 0) {
        start_value_byte(j, 0, 0, before, n_rows);
        start_value_byte(j, 0, 1, before, n_rows);
    } else {
        start_value_byte(j, 1, 0, before, n_rows);
        start_value_byte(j, 1, 1, before, n_rows);
    }
}

static void values_group(value_job *j, uint32_t group, const row_weights *of_blocks) {
    uint32_t first = group * j->group_steps;
    value_turn before = turn_at(j, of_blocks, first, 0, 0);
    value_turn now = before;
    uint32_t n_rows = 0; /* number of rows in the previous iteration */
    uint32_t set = 0;
    fkv_tiles_see_stores();
    value_step(j, 1, &before, 0, &now, true); /* before the first iteration, the stored dot products are not used */
    for (uint32_t block = 0; block < j->n_blocks; block++) {
        for (uint32_t step = 0; step < j->group_steps; step++) {
            /* after the last iteration of the scale group, continue with the next block of rows; after the last block, the same
             * multiplication is started again, and its result is not used */
            bool other = step + 1 == j->group_steps;
            value_turn next = !other                    ? turn_at(j, of_blocks, first, block, step + 1)
                              : block + 1 < j->n_blocks ? turn_at(j, of_blocks, first, block + 1, 0)
                                                        : now;
            value_step(j, set, &before, n_rows, &next, other);
            set = 1 - set;
            before = now;
            now = next;
            n_rows = before.n_rows;
        }
    }
    add_values(&before, j->sums[1 - set], j->dim, 0, n_rows);
}

static void prefill_values(const fkv_codec *codec, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows,
                           float *out) {
    value_job j;
    token_affine_open(&j.affine, t, (1u << codec->bits) - 1, n_tokens);
    if (codec->bits == 8)
        values_open(8, &j.values, t, n_tokens);
    else
        values_open(4, &j.values, t, n_tokens);
    j.dim = codec->dim;
    j.group_steps = codec->group / 16;
    j.n_tokens = n_tokens;
    j.n_rows = n_rows;
    j.n_blocks = fkv_ceil_div(n_rows, BLOCK_ROWS);
    j.p = p;
    j.out = out;
    value_tiles_open();
    uint32_t at_once = fkv_max_u32(1, MAX_WEIGHTS / j.n_blocks);
    for (uint32_t group = 0; group < t->n_groups; group += at_once) {
        uint32_t n = fkv_min_u32(at_once, t->n_groups - group);
        for (uint32_t block = 0; block < j.n_blocks; block++) {
            if (group == 0) fkv_fetch_some(t->next, FKV_FETCH_SHARES / 2 / j.n_blocks + 1);
            weigh_rows(&j, block, group, n);
        }
        for (uint32_t g = 0; g < n; g++) values_group(&j, group + g, &j.weights[g * j.n_blocks]);
    }
    fkv_tiles_close();
}

static void amx_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                       const float *p, uint32_t n_rows, float *out) {
    tile t;
    int_tile_open(&t, codec, part, next, n_tokens);
    if (n_rows <= DECODE_ROWS)
        decode_values(codec, &t, n_tokens, p, n_rows, out);
    else
        prefill_values(codec, &t, n_tokens, p, n_rows, out);
}

static void amx_enter(const fkv_codec *k_codec, uint32_t n_rows) {
    if (n_rows <= DECODE_ROWS) decode_tiles_open(k_codec);
}

static void amx_leave(void) { fkv_tiles_close(); }

static const fkv_codec_kernels codecs[] = {{FKV_CODEC_AFFINE, 8, amx_prepare, amx_scores, amx_values, affine_encode},
                                           {FKV_CODEC_AFFINE, 4, amx_prepare, amx_scores, amx_values, affine_encode},
                                           AFFINE_CODEC(2),
                                           TURBO_INT_CODECS(amx_turbo_prepare, amx_turbo_scores, amx_book_values),
                                           HALF_CODEC,
                                           SEALED_INT_CODECS(sealed_prepare, amx_sealed_scores, amx_book_values),
                                           {0}};

const struct fkv_cpu_kernels fkv_kernels_amx = {"amx",       codecs,      amx_enter, amx_leave, rows16_softmax, kernel_largest,
                                                kernel_fold, kernel_seal, amx_runs,  amx_run,   amx_fuses,      amx_tile};
