/* Attention kernels for AVX-512 with VNNI: vpdpbusd multiplies unsigned codes by signed bytes. kernels_vnni.h describes the order
 * of codes in registers and the quantization of queries and weights. */
#include "turbo_vnni.h"

/* ---- scores ---- */

/* Adds dot products over n_units units (32 values each) to the scores of 16 tokens, starting at `token`, for every query row. */
FKV_INLINE void int_scores_chunk(int bits, int n_units, const tile *t, uint32_t token, uint32_t unit, const int_queries *iq,
                                 uint32_t n_rows, float *scores) {
    __m512i quads[2 * UNIT_QUADS];
    const uint8_t *codes = t->codes + (size_t)token * t->row_bytes + (size_t)unit * UNIT_NUMBERS * (size_t)bits / 8;
    FKV_UNROLL
    for (int u = 0; u < n_units; u++) unit_quads(bits, codes + u * UNIT_NUMBERS * bits / 8, t->row_bytes, &quads[u * UNIT_QUADS]);
    uint32_t group = unit * UNIT_NUMBERS >> t->group_shift;
    vf scale = token_lanes(t->scales, group, token);
    vf bias = token_lanes(t->biases, group, token);
    uint32_t row_units = t->n_units * 16 / UNIT_NUMBERS;
    for (uint32_t r = 0; r < n_rows; r++) {
        enum { QUERY_BYTES = 3 };
        size_t at = (size_t)(r * row_units + unit) * UNIT_NUMBERS;
        const int8_t *bytes[QUERY_BYTES] = {iq->high + at, iq->low + at, iq->remainder + at};
        __m512i even[QUERY_BYTES] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        __m512i odd[QUERY_BYTES] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        dot_quads(QUERY_BYTES, n_units * UNIT_QUADS, quads, bytes, even, odd);
        __m512i sum = join_bytes(_mm512_add_epi32(even[0], odd[0]), _mm512_add_epi32(even[1], odd[1]));
        sum = _mm512_add_epi32(sum, _mm512_srai_epi32(_mm512_add_epi32(even[2], odd[2]), 8));
        float *to = scores + (size_t)r * FKV_TILE_TOKENS + token;
        vf score = unit == 0 ? vf_set(0.0f) : vf_load(to);
        score = vf_fma(bias, vf_set(iq->sum[(r * row_units + unit) / (uint32_t)n_units]), score);
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(sum), vf_mul(scale, vf_set(iq->step[r])), score));
    }
}

FKV_INLINE void int_scores_bits(int bits, const tile *t, uint32_t n_tokens, const int_queries *iq, uint32_t n_rows,
                                float *scores) {
    uint32_t n_units = t->n_units * 16 / UNIT_NUMBERS;
    for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
        fkv_fetch_some(t->next, LANE_TOKENS);
        if (chunk_units(1u << t->group_shift) == 1)
            for (uint32_t unit = 0; unit < n_units; unit++) int_scores_chunk(bits, 1, t, token, unit, iq, n_rows, scores);
        else
            for (uint32_t unit = 0; unit < n_units; unit += 2) int_scores_chunk(bits, 2, t, token, unit, iq, n_rows, scores);
    }
}

static void int_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                       const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    tile t;
    int_queries iq = queries_in((void *)(uintptr_t)prepared, n_rows, codec->dim);
    int_tile_open(&t, codec, part, next, n_tokens);
    if (codec->bits == 8)
        int_scores_bits(8, &t, n_tokens, &iq, n_rows, scores);
    else
        int_scores_bits(4, &t, n_tokens, &iq, n_rows, scores);
    if (*iq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *iq.n_by_float, iq.by_float, scores);
}

/* ---- values ---- */

/* A strip (64 bytes of every value row), rearranged so that each dword holds one code of each of four tokens. Its layout is
 * [quads of tokens, vectors, 64]. In vector v, dword i of 128-bit lane L holds byte 16 * L + 4 * v + i of the four rows. For
 * 4-bit codes, vectors 0-3 hold the low nibbles and vectors 4-7 the high nibbles. */
typedef struct strip {
    strip_place place;
    uint8_t codes[FKV_TILE_TOKENS / 4][MAX_STRIP_VECS][STRIP_BYTES];
} strip;

/* Quantized weights (softmax weight times scale) of one query row for one strip. Each 128-bit lane of the strip has its own
 * weights, because lanes can belong to different scale groups. */
typedef struct weights {
    int8_t high[4][4][16]; /* [k % 4][k / 4]: high weight bytes of tokens 4 * k to 4 * k + 3, one dword per 128-bit lane */
    int8_t low[4][4][16];
    float step[4];   /* per lane */
    float offset[4]; /* for each lane, sum over tokens of softmax weight p * token_affine.offset */
    int32_t zero[4]; /* for each lane, sum over tokens of weight * token_affine.zero */
} weights;

FKV_INLINE void strip_open(int bits, strip *s, const tile *t, uint32_t n_tokens, uint32_t at) {
    s->place = strip_at(bits, t, at);
    __m512i half = _mm512_set1_epi8(15);
    __mmask64 there = strip_mask(&s->place);
    const uint8_t *rows = t->codes + at;
    size_t stride = t->row_bytes;
    for (uint32_t token = 0; token < n_tokens; token += 4, rows += 4 * stride) {
        if (at == 0) fkv_fetch_some(t->next, 4);
        __m512i a[4];
        __m512i v[4];
        FKV_UNROLL
        for (size_t i = 0; i < 4; i++) a[i] = _mm512_maskz_loadu_epi8(there, rows + i * stride);
        token_quads(a, v);
        uint8_t(*to)[STRIP_BYTES] = s->codes[token / 4];
        FKV_UNROLL
        for (int i = 0; i < 4; i++) {
            _mm512_storeu_si512(to[i], bits == 4 ? _mm512_and_si512(v[i], half) : v[i]);
            if (bits == 4) _mm512_storeu_si512(to[4 + i], _mm512_and_si512(_mm512_srli_epi16(v[i], 4), half));
        }
    }
}

/* Products p * scale (softmax weight times value scale) of one scale group for up to 64 tokens, quantized to integers. The
 * integers of tokens beyond n_tokens are 0, even if the slots of these tokens contain arbitrary bytes. */
typedef struct group_weights {
    __m512i high; /* high bytes of the integers; byte t belongs to token t */
    __m512i low;
    float step;
    float offset;
    int32_t zero;
} group_weights;

FKV_INLINE group_weights weigh(const token_affine *f, uint32_t group, const float *p, uint32_t n_tokens) {
    vf weight[4];
    vf max = vf_set(0.0f);
    vf offset = vf_set(0.0f);
    FKV_UNROLL
    for (uint32_t b = 0; b < 4; b++) {
        weight[b] = vf_set(0.0f);
        if (b * 16 >= n_tokens) continue;
        vf probability = vf_load(p + b * 16);
        weight[b] = vf_mul(probability, vf_load(f->scale[group] + b * 16));
        offset = vf_fma(probability, vf_load(f->offset[group] + b * 16), offset);
        max = vf_max(max, _mm512_abs_ps(weight[b]));
    }
    float largest = vf_reduce_max(max);
    vf inverse = vf_set(largest > SMALLEST ? LARGEST / largest : 0.0f);
    bytes2 bytes[4];
    FKV_UNROLL
    for (uint32_t b = 0; b < 4; b++) bytes[b] = split_bytes(_mm512_cvtps_epi32(vf_mul(weight[b], inverse)));
    group_weights g = {.step = largest / LARGEST, .offset = vf_reduce_add(offset)};
    g.high = _mm512_inserti32x4(_mm512_castsi128_si512(bytes[0].high), bytes[1].high, 1);
    g.high = _mm512_inserti32x4(_mm512_inserti32x4(g.high, bytes[2].high, 2), bytes[3].high, 3);
    g.low = _mm512_inserti32x4(_mm512_castsi128_si512(bytes[0].low), bytes[1].low, 1);
    g.low = _mm512_inserti32x4(_mm512_inserti32x4(g.low, bytes[2].low, 2), bytes[3].low, 3);
    __m512i zero = _mm512_loadu_si512(f->zero[group]);
    g.zero = _mm512_reduce_add_epi32(join_bytes(_mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, g.high),
                                                _mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, g.low)));
    return g;
}

/* Transposes dwords: dword k of lane[L] is stored in dword L of to[k % 4][k / 4]. */
FKV_INLINE void store_by_quad(const __m512i lane[4], int8_t (*to)[4][16]) {
    __m512i quad[4];
    transpose_dwords(lane, quad);
    FKV_UNROLL
    for (int k = 0; k < 4; k++) _mm512_storeu_si512(to[k], quad[k]);
}

static void weights_open(weights *w, const strip_place *s, const token_affine *f, const float *p, uint32_t n_tokens) {
    __m512i high[4];
    __m512i low[4];
    group_weights g = {.step = 0.0f};
    for (uint32_t lane = 0; lane < 4; lane++) {
        if (lane == 0 || s->group[lane] != s->group[lane - 1]) g = weigh(f, s->group[lane], p, n_tokens);
        high[lane] = g.high;
        low[lane] = g.low;
        w->step[lane] = g.step;
        w->offset[lane] = g.offset;
        w->zero[lane] = g.zero;
    }
    store_by_quad(high, w->high);
    store_by_quad(low, w->low);
}

/* Broadcasts dword L of x to all dwords of 128-bit lane L. */
FKV_INLINE __m512i spread(__m128i x) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_castsi128_si512(x));
}

FKV_INLINE void int_values_row(int bits, const strip *s, const weights *w, uint32_t n_tokens, float *out) {
    enum { MAX_VECS = MAX_STRIP_VECS };
    int n_vecs = bits == 4 ? 8 : 4;
    __m512i high[MAX_VECS];
    __m512i low[MAX_VECS];
    FKV_UNROLL
    for (int v = 0; v < n_vecs; v++) high[v] = low[v] = _mm512_setzero_si512();
    for (uint32_t k = 0; k * 4 < n_tokens; k++) {
        __m512i weight_high = spread(_mm_loadu_si128((const __m128i *)w->high[k % 4][k / 4]));
        __m512i weight_low = spread(_mm_loadu_si128((const __m128i *)w->low[k % 4][k / 4]));
        FKV_UNROLL
        for (int v = 0; v < n_vecs; v++) {
            __m512i codes = _mm512_loadu_si512(s->codes[k][v]);
            high[v] = dot_quad(high[v], codes, weight_high);
            low[v] = dot_quad(low[v], codes, weight_low);
        }
    }
    vf step = _mm512_castsi512_ps(spread(_mm_castps_si128(_mm_loadu_ps(w->step))));
    vf offset = _mm512_castsi512_ps(spread(_mm_castps_si128(_mm_loadu_ps(w->offset))));
    __m512i zero = spread(_mm_loadu_si128((const __m128i *)w->zero));
    vf x[MAX_VECS];
    FKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        x[v] = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(join_bytes(high[v], low[v]), zero)), step, offset);
    add_strip_values(bits, &s->place, x, out);
}

FKV_INLINE void int_values_bits(int bits, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {
    token_affine affine;
    strip s;
    weights w;
    token_affine_open(&affine, t, (1u << bits) - 1, n_tokens);
    for (uint32_t at = 0; at < t->row_bytes; at += STRIP_BYTES) {
        strip_open(bits, &s, t, n_tokens, at);
        for (uint32_t r = 0; r < n_rows; r++) {
            weights_open(&w, &s.place, &affine, p + (size_t)r * FKV_TILE_TOKENS, n_tokens);
            int_values_row(bits, &s, &w, n_tokens, out + (size_t)r * t->n_units * 16);
        }
    }
}

static void int_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                       const float *p, uint32_t n_rows, float *out) {
    tile t;
    int_tile_open(&t, codec, part, next, n_tokens);
    if (codec->bits == 8)
        int_values_bits(8, &t, n_tokens, p, n_rows, out);
    else
        int_values_bits(4, &t, n_tokens, p, n_rows, out);
}

/* ---- sealed blocks ---- */

enum {
    PAIR_TOKENS = 2 * LANE_TOKENS, /* tokens whose dot products are computed together, in two blocks */
    DOT_ROWS = 4                   /* maximum query rows whose dot products are computed together */
};

/* Dot products of query rows with the codes of two blocks of 16 tokens, one for each base-256 digit of the query values. With
 * four rows, 16 or 24 accumulators hide the latency of vpdpbusd. */
typedef struct digit_sums {
    __m512i at[2][DOT_ROWS][DIGITS]; /* [block of tokens, row, digit] */
} digit_sums;

/* Adds the dot products of n query rows with the codes of two blocks of tokens. Skips the digits before `digit`. n and `digit`
 * are compile-time constants. */
FKV_INLINE void dot_digits(int n, size_t digit, uint32_t n_chunks, const sealed_quads keys[2], digit_rows digits,
                           digit_sums *sums) {
    for (uint32_t chunk = 0; chunk < n_chunks; chunk++) {
        const int8_t *of_chunk = digits.at + chunk * digits.chunk;
        for (int quad = 0; quad < CHUNK_QUADS; quad++) {
            __m512i first = _mm512_load_si512(keys[0].at[chunk][quad]);
            __m512i second = _mm512_load_si512(keys[1].at[chunk][quad]);
            FKV_UNROLL
            for (size_t i = 0; i < (size_t)n; i++) {
                FKV_UNROLL
                for (size_t d = digit; d < DIGITS; d++) {
                    const int8_t *bytes = of_chunk + i * digits.row + d * digits.digit + 4 * quad;
                    sums->at[0][i][d] = dot_quad_with(sums->at[0][i][d], first, bytes);
                    sums->at[1][i][d] = dot_quad_with(sums->at[1][i][d], second, bytes);
                }
            }
        }
    }
}

/* Computes the scores of 32 tokens for n query rows, starting at row r. n and `narrow` are compile-time constants. */
FKV_INLINE void sealed_dot(int n, bool narrow, uint32_t n_chunks, const sealed_quads keys[2], digit_rows digits,
                           const sealed_rows *rows, uint32_t r, float *scores) {
    digit_sums sums;
    FKV_UNROLL
    for (int i = 0; i < 2 * n; i++) {
        FKV_UNROLL
        for (int d = 0; d < DIGITS; d++) sums.at[i / n][i % n][d] = _mm512_setzero_si512();
    }
    dot_digits(n, narrow ? 1 : 0, n_chunks, keys, digits_from(digits, r), &sums);
    FKV_UNROLL
    for (int i = 0; i < 2 * n; i++) {
        const __m512i *sum = sums.at[i / n][i % n];
        uint32_t row = r + (uint32_t)(i % n);
        vf_store(scores + (size_t)row * FKV_TILE_TOKENS + i / n * LANE_TOKENS,
                 sealed_score(sum[0], sum[1], sum[2], rows->step[row], rows->bias[row]));
    }
}

/* Computes the scores of 32 tokens for up to 16 query rows. `narrow` is a compile-time constant. */
FKV_INLINE void sealed_dot_rows(bool narrow, uint32_t n_chunks, const sealed_quads keys[2], digit_rows digits,
                                const sealed_rows *rows, uint32_t n_rows, float *scores) {
    uint32_t r = 0;
    for (; r + DOT_ROWS <= n_rows; r += DOT_ROWS) sealed_dot(DOT_ROWS, narrow, n_chunks, keys, digits, rows, r, scores);
    if (n_rows - r == 3) sealed_dot(3, narrow, n_chunks, keys, digits, rows, r, scores);
    if (n_rows - r == 2) sealed_dot(2, narrow, n_chunks, keys, digits, rows, r, scores);
    if (n_rows - r == 1) sealed_dot(1, narrow, n_chunks, keys, digits, rows, r, scores);
}

static void int_sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    sealed_page page;
    sealed_quads keys[FKV_TILE_TOKENS / FKV_SEALED_TOKENS];
    sealed_rows rows;
    alignas(64) int8_t digits[MAX_CHUNKS][BLOCK_ROWS][DIGITS][CHUNK_NUMBERS];
    const digit_rows as_rows = {digits[0][0][0], sizeof digits[0][0], CHUNK_NUMBERS, sizeof digits[0]};
    sealed_page_open(codec, part, &page);
    /* a sealed page has FKV_TILE_TOKENS tokens, so the second block of the last pair exists even if n_tokens ends before it */
    for (uint32_t token = 0; token < fkv_align_up(n_tokens, PAIR_TOKENS); token += FKV_SEALED_TOKENS) {
        fkv_fetch_some(next, FKV_SEALED_TOKENS / 2);
        sealed_quads_of(codec, &page, sealed_block(codec, part, token), &keys[token / FKV_SEALED_TOKENS]);
    }
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        uint32_t n = fkv_min_u32(BLOCK_ROWS, n_rows - row);
        sealed_rows_open(&page, prepared, n_rows, row, &rows);
        for (uint32_t r = 0; r < n; r++) {
            const float *from = q + (size_t)(row + r) * codec->dim;
            int8_t *to = digits[0][r][0];
            vf bias = rows.narrow
                          ? sealed_digits_of(true, page.n_units, &page, from, rows.inverse[r], to, CHUNK_NUMBERS, as_rows.chunk)
                          : sealed_digits(page.n_units, &page, from, rows.inverse[r], to, CHUNK_NUMBERS, as_rows.chunk);
            rows.bias[r] = vf_reduce_add(bias);
        }
        for (uint32_t token = 0; token < n_tokens; token += PAIR_TOKENS) {
            if (row == 0) fkv_fetch_some(next, PAIR_TOKENS / 2);
            const sealed_quads *pair = &keys[token / FKV_SEALED_TOKENS];
            float *to = scores + (size_t)row * FKV_TILE_TOKENS + token;
            if (rows.narrow)
                sealed_dot_rows(true, page.n_chunks, pair, as_rows, &rows, n, to);
            else
                sealed_dot_rows(false, page.n_chunks, pair, as_rows, &rows, n, to);
        }
        if (rows.by_float != 0) sealed_by_float(codec, part, n_tokens, q, row, rows.by_float, scores);
    }
}

enum { WEIGHED_ROWS = 4 }; /* query rows whose weights are quantized together */

/* Adds the weighted values of n units (16 values each) to one output row. n is a compile-time constant. */
FKV_INLINE void sealed_sum(int n, const sealed_levels_tile *levels, uint32_t unit, const uint8_t *of_tokens, float step,
                           float *out) {
    __m512i high[8];
    __m512i low[8];
    FKV_UNROLL
    for (int u = 0; u < n; u++) high[u] = low[u] = _mm512_setzero_si512();
    for (int quad = 0; quad < FKV_TILE_TOKENS / 4; quad++) {
        __m512i of_high = _mm512_set1_epi32(dword((const int8_t *)of_tokens + 4 * quad));
        __m512i of_low = _mm512_set1_epi32(dword((const int8_t *)of_tokens + WEIGHED_ROWS * FKV_TILE_TOKENS + 4 * quad));
        FKV_UNROLL
        for (int u = 0; u < n; u++) {
            __m512i codes = _mm512_load_si512(levels->at[unit + (uint32_t)u][quad]);
            high[u] = dot_quad(high[u], of_high, codes);
            low[u] = dot_quad(low[u], of_low, codes);
        }
    }
    FKV_UNROLL
    for (int u = 0; u < n; u++) {
        float *to = out + (unit + (uint32_t)u) * 16;
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(join_bytes(high[u], low[u])), vf_set(step), vf_load(to)));
    }
}

static void int_book_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                            const float *p, uint32_t n_rows, float *out) {
    sealed_levels_tile levels;
    sealed_norms norms;
    uint32_t n_units = codec->dim / 16;
    fkv_fetch_some(next, FKV_FETCH_SHARES / 8);
    book_values_open(codec, part, n_tokens, &norms, &levels);
    fkv_fetch_some(next, FKV_FETCH_SHARES / 8);
    for (uint32_t row = 0; row < n_rows; row += WEIGHED_ROWS) {
        uint8_t bytes[2][WEIGHED_ROWS][FKV_TILE_TOKENS]; /* high bytes of the weights, then low bytes */
        alignas(64) float step[BLOCK_ROWS];
        uint32_t n = fkv_min_u32(WEIGHED_ROWS, n_rows - row);
        sealed_weigh(WEIGHED_ROWS, &norms, p + (size_t)row * FKV_TILE_TOKENS, n_tokens, n, bytes[0][0], sizeof bytes[0], step);
        for (uint32_t r = 0; r < n; r++) {
            float *to = out + (size_t)(row + r) * codec->dim;
            uint32_t unit = 0;
            if (row == 0) fkv_fetch_some(next, FKV_FETCH_SHARES / 4 / n);
            for (; unit + 8 <= n_units; unit += 8) sealed_sum(8, &levels, unit, bytes[0][r], step[r], to);
            for (; unit + 4 <= n_units; unit += 4) sealed_sum(4, &levels, unit, bytes[0][r], step[r], to);
            for (; unit < n_units; unit++) sealed_sum(1, &levels, unit, bytes[0][r], step[r], to);
        }
    }
}

/* ---- TurboQuant rows ---- */

/* This offset is added to codebook levels to make them non-negative, as vpdpbusd requires. The initial values of the accumulators
 * cancel its contribution. */
enum { LEVEL_OFFSET = 128 };

/* Computes the initial accumulators of one query row, one for each base-256 digit (byte) of its values. */
static void turbo_initial_sums(digit_rows of, uint32_t dim, int32_t start[4]) {
    vf sums[4];
    for (size_t d = 0; d < 4; d++) {
        __m512i sum = _mm512_setzero_si512();
        for (uint32_t at = 0; d < DIGITS && at < dim; at += CHUNK_NUMBERS) {
            __mmask64 there = ~(__mmask64)0 >> (CHUNK_NUMBERS - fkv_min_u32(CHUNK_NUMBERS, dim - at));
            __m512i digits = _mm512_maskz_loadu_epi8(there, of.at + d * of.digit + at);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)LEVEL_OFFSET), digits);
        }
        sums[d] = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
    _mm_storeu_si128((__m128i *)start, _mm512_castsi512_si128(_mm512_castps_si512(fold_rows(FOLD_INT_SUM, 4, sums))));
}

/* Computes the scores of 32 tokens for n query rows. n is a compile-time constant. */
FKV_INLINE void turbo_dot(int n, uint32_t n_chunks, const sealed_quads keys[2], digit_rows digits, const int32_t (*start)[4],
                          const float *step, const float *norms, float *scores) {
    digit_sums sums;
    FKV_UNROLL
    for (int i = 0; i < 2 * n; i++) {
        FKV_UNROLL
        for (int d = 0; d < DIGITS; d++) sums.at[i / n][i % n][d] = _mm512_set1_epi32(start[i % n][d]);
    }
    dot_digits(n, 0, n_chunks, keys, digits, &sums);
    FKV_UNROLL
    for (int i = 0; i < 2 * n; i++) {
        const __m512i *sum = sums.at[i / n][i % n];
        vf score = vf_mul(sealed_score(sum[0], sum[1], sum[2], step[i % n], 0.0f), vf_load(norms + i / n * LANE_TOKENS));
        vf_store(scores + i % n * FKV_TILE_TOKENS + i / n * LANE_TOKENS, score);
    }
}

static void int_turbo_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    turbo_prepare_blocks(codec, q, n_rows, n_rows, prepared);
}

static void int_turbo_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                             const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    sealed_quads keys[2];
    alignas(64) float norms[FKV_TILE_TOKENS];
    int32_t start[FKV_MAX_TILE_ROWS][4];
    turbo_queries tq = turbo_queries_in(prepared, n_rows);
    const digit_rows digits = {tq.digits, codec->dim, (size_t)n_rows * codec->dim, CHUNK_NUMBERS};
    uint32_t n_chunks = fkv_ceil_div(codec->dim, CHUNK_NUMBERS);
    for (uint32_t r = 0; r < n_rows; r++) turbo_initial_sums(digits_from(digits, r), codec->dim, start[r]);
    widen_halves(codec->type, part[FKV_PART_SCALES], (uint32_t)fkv_align_up(n_tokens, PAIR_TOKENS), norms);
    for (uint32_t token = 0; token < n_tokens; token += PAIR_TOKENS) {
        fkv_fetch_some(next, PAIR_TOKENS);
        turbo_keys_of(LEVEL_OFFSET, codec, part, token, &keys[0]);
        turbo_keys_of(LEVEL_OFFSET, codec, part, token + LANE_TOKENS, &keys[1]);
        uint32_t r = 0;
        for (; r + 2 <= n_rows; r += 2)
            turbo_dot(2, n_chunks, keys, digits_from(digits, r), start + r, tq.step + r, norms + token,
                      scores + (size_t)r * FKV_TILE_TOKENS + token);
        if (r < n_rows)
            turbo_dot(1, n_chunks, keys, digits_from(digits, r), start + r, tq.step + r, norms + token,
                      scores + (size_t)r * FKV_TILE_TOKENS + token);
    }
    if (*tq.n_by_float != 0) scores_by_float(codec, part, n_tokens, q, *tq.n_by_float, tq.by_float, scores);
}

static const fkv_codec_kernels codecs[] = {{FKV_CODEC_AFFINE, 8, int_prepare, int_scores, int_values, affine_encode},
                                           {FKV_CODEC_AFFINE, 4, int_prepare, int_scores, int_values, affine_encode},
                                           AFFINE_CODEC(2),
                                           TURBO_INT_CODECS(int_turbo_prepare, int_turbo_scores, int_book_values),
                                           HALF_CODEC,
                                           SEALED_INT_CODECS(sealed_prepare, int_sealed_scores, int_book_values),
                                           {0}};

const struct fkv_cpu_kernels fkv_kernels_avx512vnni = {"avx512vnni",   codecs,         kernel_enter, kernel_leave,
                                                       rows16_softmax, kernel_largest, kernel_fold,  kernel_seal};
