/* The kernels over AMX: tiles of many rows (prefill) multiply bytes by the matrix, 16 rows x 16 columns x 64 products at a time.
 * Few rows (decode), and sides without an integer kernel, take the kernels of kernels_vnni.h.
 *
 * Bits are those of kernels_vnni.h: sums of integers are exact in any order, and what happens to a sum afterwards is the same
 * float operations in the same order. Only where the sums come from differs.
 *
 * Scores: A = one byte of 16 queries x a chunk of the head dimension, as prepared; B = quads of codes x 16 tokens. Values: A =
 * one byte of the weights of 16 rows x 64 tokens; B = quads of tokens x 16 numbers. Codes of a tile are laid out once for all
 * rows.
 *
 * The products of one block are started before the sums of the one before it are read, so that the matrix unit works while the
 * vector unit turns sums into floats.
 */
#include "amx_tiles.h"
#include "kernels_vnni.h"

#include "product_amx.h"

enum {
    BLOCK_ROWS = FKV_TILE_HEIGHT,
    LEAST_ROWS = 8, /* below, rows on vectors are as quick */
    MAX_UNITS = FKV_MAX_HEAD_DIM / UNIT_NUMBERS,
    MAX_STEPS = FKV_MAX_HEAD_DIM / LANE_TOKENS, /* of 16 numbers along the head dimension */
    N_BYTES = 3                                 /* of a query */
};

/* Sums of 16 rows x 16 columns. */
typedef struct block_sums {
    alignas(64) int32_t at[BLOCK_ROWS][16];
} block_sums;

FKV_INLINE __m512i sums_of(const block_sums *sums, uint32_t row) { return _mm512_load_si512(sums->at[row]); }

/* ---- scores ---- */

/* The keys of a tile: for each 16 tokens and each chunk of the head dimension (one unit, or two where groups are larger), quads
 * of codes as unit_quads() makes them; and for each chunk, scales and biases, a lane for each token. */
typedef struct key_blocks {
    uint32_t n_chunks;
    uint32_t chunk_units;
    alignas(64) uint8_t codes[FKV_TILE_TOKENS / LANE_TOKENS][MAX_UNITS][UNIT_QUADS][64]; /* unit by unit */
    alignas(64) float scale[MAX_UNITS][FKV_TILE_TOKENS];                                 /* [chunk] */
    alignas(64) float bias[MAX_UNITS][FKV_TILE_TOKENS];
} key_blocks;

FKV_INLINE void keys_open(int bits, key_blocks *keys, const tile *t, uint32_t n_tokens) {
    uint32_t n_units = t->n_units * 16 / UNIT_NUMBERS;
    keys->chunk_units = t->group_shift == 5 ? 1 : 2;
    keys->n_chunks = n_units / keys->chunk_units;
    for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
        fetch_next(t, token, LANE_TOKENS);
        for (uint32_t unit = 0; unit < n_units; unit++) {
            __m512i quads[UNIT_QUADS];
            const uint8_t *codes = t->codes + (size_t)token * t->row_bytes + (size_t)unit * UNIT_NUMBERS * (size_t)bits / 8;
            unit_quads(bits, codes, t->row_bytes, quads);
            FKV_UNROLL
            for (int j = 0; j < UNIT_QUADS; j++) _mm512_store_si512(keys->codes[token / LANE_TOKENS][unit][j], quads[j]);
        }
        for (uint32_t c = 0; c < keys->n_chunks; c++) {
            uint32_t group = c * keys->chunk_units * UNIT_NUMBERS >> t->group_shift;
            vf_store(keys->scale[c] + token, token_lanes(t->scales, t->n_groups, group, token));
            vf_store(keys->bias[c] + token, token_lanes(t->biases, t->n_groups, group, token));
        }
    }
}

/* Tiles 0-2: sums of the high, low and rest bytes; 3-5: those bytes of the queries; 6: codes. */
static void score_tiles_open(uint32_t n_rows, uint32_t chunk_units) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < N_BYTES; i++) {
        fkv_tile_shape(&shapes, i, n_rows, 64);
        fkv_tile_shape(&shapes, 3 + i, n_rows, chunk_units * UNIT_NUMBERS);
    }
    fkv_tile_shape(&shapes, 6, chunk_units * UNIT_QUADS, 64);
    fkv_tiles_open(&shapes);
}

/* Sums of rows [row, ..) with 16 tokens, for each chunk and byte. */
FKV_INLINE void score_products(const key_blocks *keys, const int_queries *iq, uint32_t dim, uint32_t row, uint32_t token,
                               block_sums (*sums)[N_BYTES]) {
    for (uint32_t c = 0; c < keys->n_chunks; c++) {
        size_t at = (size_t)row * dim + (size_t)c * keys->chunk_units * UNIT_NUMBERS;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_loadd(6, keys->codes[token / LANE_TOKENS][c * keys->chunk_units], 64);
        _tile_loadd(3, iq->high + at, dim);
        _tile_dpbsud(0, 3, 6);
        _tile_loadd(4, iq->low + at, dim);
        _tile_dpbsud(1, 4, 6);
        _tile_loadd(5, iq->rest + at, dim);
        _tile_dpbsud(2, 5, 6);
        _tile_stored(0, sums[c][0].at, 64);
        _tile_stored(1, sums[c][1].at, 64);
        _tile_stored(2, sums[c][2].at, 64);
    }
}

/* As int_scores_chunk() ends. */
FKV_INLINE void scores_of(const key_blocks *keys, const int_queries *iq, uint32_t dim, uint32_t row, uint32_t n_rows,
                          uint32_t token, const block_sums (*sums)[N_BYTES], float *scores) {
    uint32_t row_units = dim / UNIT_NUMBERS;
    for (uint32_t r = 0; r < n_rows; r++) {
        vf score = vf_set(0.0f);
        vf step = vf_set(iq->step[row + r]);
        const float *sum_at = iq->sum + (size_t)(row + r) * row_units;
        for (uint32_t c = 0; c < keys->n_chunks; c++) {
            vf dot = join(sums_of(&sums[c][0], r), sums_of(&sums[c][1], r));
            dot = vf_fma(_mm512_cvtepi32_ps(sums_of(&sums[c][2], r)), vf_set(1.0f / REST_STEPS), dot);
            float sum = sum_at[c * keys->chunk_units];
            if (keys->chunk_units == 2) sum += sum_at[2 * c + 1];
            score = vf_fma(vf_load(keys->bias[c] + token), vf_set(sum), score);
            score = vf_fma(dot, vf_mul(vf_load(keys->scale[c] + token), step), score);
        }
        vf_store(scores + (size_t)(row + r) * FKV_TILE_TOKENS + token, score);
    }
}

static void amx_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], const uint8_t *next, uint32_t n_tokens,
                       const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    if (n_rows < LEAST_ROWS || !has_integer_kernel(codec)) {
        int_scores(codec, part, next, n_tokens, q, prepared, n_rows, scores);
        return;
    }
    tile t;
    key_blocks keys;
    block_sums sums[2][MAX_UNITS][N_BYTES];
    uint32_t dim = codec->dim;
    int_queries iq = queries_in((void *)(uintptr_t)prepared, n_rows, dim);
    tile_open(&t, codec, part, next, (uint32_t)fkv_align_up(n_tokens, LANE_TOKENS));
    if (codec->bits == 8)
        keys_open(8, &keys, &t, n_tokens);
    else
        keys_open(4, &keys, &t, n_tokens);
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        uint32_t block_rows = fkv_min_u32(BLOCK_ROWS, n_rows - row);
        if (row == 0 || block_rows < BLOCK_ROWS) score_tiles_open(block_rows, keys.chunk_units);
        score_products(&keys, &iq, dim, row, 0, sums[0]);
        for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
            uint32_t turn = token / LANE_TOKENS % 2;
            if (token + LANE_TOKENS < n_tokens) score_products(&keys, &iq, dim, row, token + LANE_TOKENS, sums[1 - turn]);
            scores_of(&keys, &iq, dim, row, block_rows, token, sums[turn], scores);
        }
    }
    fkv_tiles_close();
}

/* ---- values ---- */

/* The values of a tile: for each 16 numbers of the head dimension, quads of tokens, 16 numbers each. */
typedef struct value_blocks {
    alignas(64) uint8_t codes[MAX_STEPS][FKV_TILE_TOKENS / 4][64];
} value_blocks;

/* 64 codes of a row from number `first` on, a byte each, dwords transposed 4x4; what is behind the row is 0. */
FKV_INLINE __m512i code_bytes(int bits, const uint8_t *row, uint32_t first, uint32_t dim) {
    uint32_t n = fkv_min_u32(64, dim - first);
    __m512i codes;
    if (bits == 8) {
        codes = _mm512_maskz_loadu_epi8(~(__mmask64)0 >> (64 - n), row + first);
    } else {
        __m256i packed = _mm256_maskz_loadu_epi8((__mmask32)((__mmask64)0xffffffff >> (32 - n / 2)), row + first / 2);
        codes = _mm512_cvtepu8_epi16(packed);
        codes = _mm512_and_si512(_mm512_or_si512(codes, _mm512_slli_epi16(codes, 4)), _mm512_set1_epi8(15));
    }
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
}

FKV_INLINE void values_open(int bits, value_blocks *values, const tile *t, uint32_t n_tokens) {
    uint32_t dim = t->n_units * 16;
    for (uint32_t token = 0; token < n_tokens; token += 4) {
        fetch_next(t, token, 4);
        const uint8_t *row = t->codes + (size_t)token * t->row_bytes;
        for (uint32_t first = 0; first < dim; first += 64) {
            __m512i a[4];
            FKV_UNROLL
            for (int i = 0; i < 4; i++) a[i] = code_bytes(bits, row + (size_t)i * t->row_bytes, first, dim);
            __m512i low01 = _mm512_unpacklo_epi8(a[0], a[1]);
            __m512i high01 = _mm512_unpackhi_epi8(a[0], a[1]);
            __m512i low23 = _mm512_unpacklo_epi8(a[2], a[3]);
            __m512i high23 = _mm512_unpackhi_epi8(a[2], a[3]);
            __m512i v[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23),
                            _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
            FKV_UNROLL
            for (uint32_t i = 0; i < 4; i++)
                if (first + 16 * i < dim) _mm512_store_si512(values->codes[first / 16 + i][token / 4], v[i]);
        }
    }
    for (uint32_t quad = fkv_ceil_div(n_tokens, 4); quad < FKV_TILE_TOKENS / 4; quad++)
        for (uint32_t i = 0; i < t->n_units; i++) _mm512_store_si512(values->codes[i][quad], _mm512_setzero_si512());
}

/* The weights of 16 rows for one group. */
typedef struct row_weights {
    alignas(64) int8_t high[BLOCK_ROWS][FKV_TILE_TOKENS];
    alignas(64) int8_t low[BLOCK_ROWS][FKV_TILE_TOKENS];
    float step[BLOCK_ROWS];
    float bias[BLOCK_ROWS];
} row_weights;

static void row_weights_open(row_weights *w, const token_facts *f, uint32_t group, const float *p, uint32_t n_rows,
                             uint32_t n_tokens) {
    for (uint32_t r = 0; r < n_rows; r++) {
        group_weights g = weigh(f, group, p + (size_t)r * FKV_TILE_TOKENS, n_tokens);
        _mm512_store_si512(w->high[r], g.high);
        _mm512_store_si512(w->low[r], g.low);
        w->step[r] = g.step;
        w->bias[r] = g.bias;
    }
}

/* Tiles 0, 1: sums of the high and low bytes; 2, 3: those bytes of the weights; 4: codes. */
static void value_tiles_open(uint32_t n_rows) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 4; i++) fkv_tile_shape(&shapes, i, n_rows, 64);
    fkv_tile_shape(&shapes, 4, FKV_TILE_TOKENS / 4, 64);
    fkv_tiles_open(&shapes);
}

FKV_INLINE void value_products(const value_blocks *values, uint32_t step, block_sums sums[2]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, values->codes[step], 64);
    _tile_dpbsud(0, 2, 4);
    _tile_dpbsud(1, 3, 4);
    _tile_stored(0, sums[0].at, 64);
    _tile_stored(1, sums[1].at, 64);
}

/* As int_values_row() ends. out: of the first row, at the numbers that the sums are of. */
FKV_INLINE void add_values(const row_weights *w, const block_sums sums[2], uint32_t n_rows, uint32_t dim, float *out) {
    for (uint32_t r = 0; r < n_rows; r++) {
        vf x = vf_fma(join(sums_of(&sums[0], r), sums_of(&sums[1], r)), vf_set(w->step[r]), vf_set(w->bias[r]));
        float *to = out + (size_t)r * dim;
        vf_store(to, vf_add(vf_load(to), x));
    }
}

/* One group for up to 16 rows. */
static void values_of(const value_blocks *values, const row_weights *w, uint32_t first, uint32_t end, uint32_t n_rows,
                      uint32_t dim, float *out) {
    block_sums sums[2][2];
    fkv_tiles_see_stores();
    _tile_loadd(2, w->high, 64);
    _tile_loadd(3, w->low, 64);
    value_products(values, first, sums[first % 2]);
    for (uint32_t step = first; step < end; step++) {
        if (step + 1 < end) value_products(values, step + 1, sums[(step + 1) % 2]);
        add_values(w, sums[step % 2], n_rows, dim, out + (size_t)step * 16);
    }
}

static void amx_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], const uint8_t *next, uint32_t n_tokens,
                       const float *p, uint32_t n_rows, float *out) {
    if (n_rows < LEAST_ROWS || !has_integer_kernel(codec)) {
        int_values(codec, part, next, n_tokens, p, n_rows, out);
        return;
    }
    tile t;
    token_facts facts;
    value_blocks values;
    row_weights w;
    tile_open(&t, codec, part, next, (uint32_t)fkv_align_up(n_tokens, LANE_TOKENS));
    facts_open(&facts, &t, (1u << codec->bits) - 1, n_tokens);
    if (codec->bits == 8)
        values_open(8, &values, &t, n_tokens);
    else
        values_open(4, &values, &t, n_tokens);
    uint32_t dim = codec->dim;
    uint32_t group_steps = codec->group / 16;
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        uint32_t block_rows = fkv_min_u32(BLOCK_ROWS, n_rows - row);
        if (row == 0 || block_rows < BLOCK_ROWS) value_tiles_open(block_rows);
        for (uint32_t group = 0; group < t.n_groups; group++) {
            row_weights_open(&w, &facts, group, p + (size_t)row * FKV_TILE_TOKENS, block_rows, n_tokens);
            values_of(&values, &w, group * group_steps, (group + 1) * group_steps, block_rows, dim, out + (size_t)row * dim);
        }
    }
    fkv_tiles_close();
}

FKV_KERNELS(amx, int_prepare, amx_scores, amx_values, int_prepare_tokens, amx_product);
