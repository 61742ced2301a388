/* AMX value kernels for decode-sized tiles. Included by kernels_amx.c; the score kernels are in decode_scores_amx.h.
 *
 * Matrix A holds the two bytes of each weight, for four query rows and one scale group. Matrix B holds 16 code bytes of that
 * group for each of 64 tokens, as quads (dwords with one byte of each of four tokens). A strip (64 bytes of every value row) is
 * rearranged into quads once and is used by all query rows. The buffers for reused data are small, because the pages that stream
 * through L1 leave little room for them.
 */
#ifndef FKV_DECODE_VALUES_AMX_H
#define FKV_DECODE_VALUES_AMX_H

#include "decode_rows_amx.h"

/* ---- weights ---- */

enum { MAX_STRIP_GROUPS = 4 };

/* Quantized weights of up to four query rows, for the scale groups of a strip. weigh() defines the quantization, and
 * packed_words defines the order of tokens. */
typedef struct decode_weights {
    alignas(64) int8_t bytes[MAX_STRIP_GROUPS][COLUMN_ROWS][2][FKV_TILE_TOKENS]; /* high bytes of the weights, then low bytes */
    alignas(64) float step[MAX_STRIP_GROUPS][COLUMN_ROWS];
    alignas(64) float offset[MAX_STRIP_GROUPS][COLUMN_ROWS]; /* sum over tokens of softmax weight p * token_affine.offset */
    alignas(64) int32_t zero[MAX_STRIP_GROUPS][COLUMN_ROWS]; /* sum over tokens of weight * token_affine.zero */
} decode_weights;

/* Input of decode_weigh(). n_groups, n_vecs and n_rows are compile-time constants in all callers except decode_weigh_some(). */
typedef struct weigh_input {
    const token_affine *affine;
    const strip_place *place;
    const float *p; /* [rows, FKV_TILE_TOKENS] softmax weights */
    int n_groups;
    uint32_t n_vecs; /* number of vectors (16 tokens each) per row */
    uint32_t n_rows; /* rows past n_rows are not read, and their results are ignored */
} weigh_input;

FKV_INLINE uint32_t strip_group(const strip_place *place, int g) {
    return fkv_min_u32(place->group[0] + (uint32_t)g, place->group[3]);
}

/* Returns the zero code (the code whose value is nearest to 0) of each token, in the order of packed_words. */
FKV_INLINE __m512i packed_zeros(const token_affine *f, uint32_t group) {
    __m512i zeros[4];
    FKV_UNROLL
    for (uint32_t b = 0; b < 4; b++) zeros[b] = _mm512_cvtepu8_epi32(load16(f->zero[group] + b * 16));
    return low_bytes(pack_words(zeros));
}

/* Reduces each of n_groups * COLUMN_ROWS registers over its lanes, and returns one value per register. */
FKV_INLINE vf fold_groups(fold how, int n_groups, vf (*x)[COLUMN_ROWS]) {
    if (n_groups == 1) return fold_rows(how, COLUMN_ROWS, x[0]);
    if (n_groups == 2) return fold_rows(how, 2 * COLUMN_ROWS, x[0]);
    return fold_rows(how, 4 * COLUMN_ROWS, x[0]);
}

/* Computes the quantization step of each row and group, and decode_weights.offset. `inverse` receives the inverse steps. Weights
 * are multiplied by the inverse step before they are rounded to integers. */
FKV_INLINE void weigh_sizes(weigh_input in, decode_weights *w, float (*inverse)[COLUMN_ROWS]) {
    enum { LARGER_MAGNITUDE = 0x0b }; /* operand of _mm512_range_ps that selects the maximum of the absolute values */
    vf largest[MAX_STRIP_GROUPS][COLUMN_ROWS];
    vf offset[MAX_STRIP_GROUPS][COLUMN_ROWS];
    for (int g = 0; g < in.n_groups; g++) {
        uint32_t group = strip_group(in.place, g);
        FKV_UNROLL
        for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
            largest[g][r] = offset[g][r] = vf_set(0.0f);
            if (r >= in.n_rows) continue;
            for (uint32_t b = 0; b < in.n_vecs; b++) {
                vf probability = vf_load(in.p + r * FKV_TILE_TOKENS + b * 16);
                vf weight = vf_mul(probability, vf_load(in.affine->scale[group] + b * 16));
                largest[g][r] = _mm512_range_ps(largest[g][r], weight, LARGER_MAGNITUDE);
                offset[g][r] = vf_fma(probability, vf_load(in.affine->offset[group] + b * 16), offset[g][r]);
            }
        }
    }
    vf most = fold_groups(FOLD_MAX, in.n_groups, largest);
    vf_store(inverse[0], _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, vf_set(SMALLEST), _CMP_GT_OQ), vf_set(LARGEST), most));
    vf_store(w->step[0], vf_div(most, vf_set(LARGEST)));
    vf_store(w->offset[0], fold_groups(FOLD_SUM, in.n_groups, offset));
}

/* Quantizes the weights to bytes and computes the sums of weight * zero code. */
FKV_INLINE void weigh_bytes(weigh_input in, decode_weights *w, float (*inverse)[COLUMN_ROWS]) {
    vf taken[MAX_STRIP_GROUPS][COLUMN_ROWS]; /* sums over tokens of weight * zero code, as integers */
    for (int g = 0; g < in.n_groups; g++) {
        uint32_t group = strip_group(in.place, g);
        __m512i zero = packed_zeros(in.affine, group);
        FKV_UNROLL
        for (uint32_t r = 0; r < COLUMN_ROWS; r++) taken[g][r] = vf_set(0.0f);
        for (uint32_t r = 0; r < in.n_rows; r++) {
            __m512i whole[4];
            FKV_UNROLL
            for (uint32_t b = 0; b < 4; b++) {
                whole[b] = _mm512_setzero_si512();
                if (b >= in.n_vecs) continue;
                vf weight = vf_mul(vf_load(in.p + r * FKV_TILE_TOKENS + b * 16), vf_load(in.affine->scale[group] + b * 16));
                whole[b] = _mm512_cvtps_epi32(vf_mul(weight, vf_set(inverse[g][r])));
            }
            packed_words words = pack_words(whole);
            __m512i high = high_bytes(words);
            __m512i low = low_bytes(words);
            _mm512_store_si512(w->bytes[g][r][0], high);
            _mm512_store_si512(w->bytes[g][r][1], low);
            taken[g][r] = _mm512_castsi512_ps(join_bytes(_mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, high),
                                                         _mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, low)));
        }
    }
    _mm512_store_si512(w->zero, _mm512_castps_si512(fold_groups(FOLD_INT_SUM, in.n_groups, taken)));
}

FKV_INLINE void decode_weigh(weigh_input in, decode_weights *w) {
    alignas(64) float inverse[MAX_STRIP_GROUPS][COLUMN_ROWS];
    weigh_sizes(in, w, inverse);
    weigh_bytes(in, w, inverse);
}

/* Quantizes the weights of four rows in a full tile whose tokens are all visible to these rows. */
static void decode_weigh_all(int n_groups, decode_weights *w, const token_affine *affine, const strip_place *place,
                             const float *p) {
    decode_weigh((weigh_input){affine, place, p, n_groups, 4, COLUMN_ROWS}, w);
}

static void decode_weigh_some(uint32_t n_vecs, decode_weights *w, const token_affine *affine, const strip_place *place,
                              const float *p, uint32_t n_rows) {
    decode_weigh((weigh_input){affine, place, p, MAX_STRIP_GROUPS, n_vecs, n_rows}, w);
}

/* ---- codes ---- */

/* Dot products of one vector of codes with the high and low weight bytes, over the tokens of a tile. For 4-bit codes, whole code
 * bytes and high nibbles have separate dot products. */
typedef struct decode_value_sums {
    alignas(64) int32_t at[2][COLUMN_ROWS][2][16];
} decode_value_sums;

/* A tile of values and the query rows that attend to it, processed strip by strip. */
typedef struct decode_value_job {
    const tile *t;
    uint32_t n_tokens;
    strip_place place;
    token_affine affine;
    decode_weights weights;
    /* Value codes as quads: dwords with one byte of each of four tokens. A vector covers 16 consecutive bytes of each token's
     * row. Quad k is at index quad_place(k). 4-bit codes are not split into nibbles. Instead, vectors 0-3 hold whole bytes, and
     * vectors 4-7 hold the same bytes with the low nibble cleared. The dot product of the low nibbles is the difference of the
     * two dot products. */
    alignas(64) uint8_t codes[MAX_STRIP_VECS][TILE_QUADS][STRIP_BYTES];
    decode_value_sums sums[2]; /* dot products of the vector in progress and of the previous vector of codes */
} decode_value_job;

/* Rearranges a strip (64 bytes of every value row) into quads of tokens. Tokens beyond n_tokens have weight 0, so their slots may
 * contain arbitrary bytes. */
FKV_INLINE void decode_strip_open(int bits, decode_value_job *j, uint32_t at) {
    j->place = strip_at(bits, j->t, at);
    fkv_fetch *next = j->t->next;
    __m512i high_half = _mm512_set1_epi8((char)0xf0);
    /* with this permutation of the dwords, token_quads() returns 16 consecutive bytes in each v[i] */
    __m512i transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __mmask64 there = strip_mask(&j->place);
    const uint8_t *rows = j->t->codes + at;
    size_t stride = j->t->row_bytes;
    uint8_t(*to)[TILE_QUADS][STRIP_BYTES] = j->codes;
    uint32_t n_blocks = fkv_ceil_div(j->n_tokens, LANE_TOKENS);
    for (uint32_t block = 0; block < n_blocks; block++) {
        if (at == 0 && block % 2 == 1) fkv_fetch_some(next, FETCH_STRIP / 2);
        FKV_UNROLL
        for (uint32_t quad = 0; quad < 4; quad++, rows += 4 * stride) {
            __m512i a[4];
            __m512i v[4];
            FKV_UNROLL
            for (size_t i = 0; i < 4; i++)
                a[i] = _mm512_permutexvar_epi32(transposed, _mm512_maskz_loadu_epi8(there, rows + i * stride));
            token_quads(a, v);
            FKV_UNROLL
            for (int i = 0; i < 4; i++) {
                _mm512_store_si512(to[i][4 * quad + block], v[i]); /* the index is quad_place(4 * block + quad) */
                if (bits == 4) _mm512_store_si512(to[4 + i][4 * quad + block], _mm512_and_si512(v[i], high_half));
            }
        }
    }
    for (uint32_t quad = 4 * n_blocks; quad < TILE_QUADS; quad++)
        for (int i = 0; i < 32 / bits; i++) _mm512_store_si512(to[i][quad_place(quad)], _mm512_setzero_si512());
}

/* ---- products ---- */

FKV_INLINE void start_values(int bits, const decode_value_job *j, uint32_t vec) {
    _tile_loadd(WEIGHTS, j->weights.bytes[j->place.group[vec] - j->place.group[0]], 64);
    _tile_zero(VALUES_WHOLE);
    _tile_loadd(CODES, j->codes[vec], 64);
    _tile_dpbsud(VALUES_WHOLE, WEIGHTS, CODES);
    if (bits == 8) return;
    _tile_zero(VALUES_HIGH);
    _tile_loadd(CODES, j->codes[4 + vec], 64);
    _tile_dpbsud(VALUES_HIGH, WEIGHTS, CODES);
}

FKV_INLINE void store_values(int bits, decode_value_job *j, uint32_t vec) {
    _tile_stored(VALUES_WHOLE, j->sums[vec % 2].at[0], 64);
    if (bits == 4) _tile_stored(VALUES_HIGH, j->sums[vec % 2].at[1], 64);
}

FKV_INLINE __m512i whole_sums(const int32_t (*of_bytes)[16]) {
    return _mm512_add_epi32(times_256(_mm512_load_si512(of_bytes[0])), _mm512_load_si512(of_bytes[1]));
}

/* Adds the weighted values of one vector of codes to an output row, with the same float operations as int_values_row(). */
FKV_INLINE void add_vector(int bits, const decode_value_job *j, uint32_t vec, uint32_t row, float *out) {
    const decode_weights *w = &j->weights;
    uint32_t group = j->place.group[vec] - j->place.group[0];
    __m512i zero = _mm512_set1_epi32(w->zero[group][row]);
    vf step = vf_set(w->step[group][row]);
    vf offset = vf_set(w->offset[group][row]);
    const decode_value_sums *sums = &j->sums[vec % 2];
    __m512i whole = whole_sums(sums->at[0][row]);
    if (bits == 8) {
        vf x = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero)), step, offset);
        vf_store(out, vf_add(vf_load(out), x));
        return;
    }
    __m512i highs = whole_sums(sums->at[1][row]);
    __m512i lows = _mm512_sub_epi32(whole, highs);
    vf even = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(lows, zero)), step, offset);
    vf odd = vf_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srai_epi32(highs, 4), zero)), step, offset);
    __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    vf_store(out, vf_add(vf_load(out), _mm512_permutex2var_ps(even, first, odd)));
    vf_store(out + 16, vf_add(vf_load(out + 16), _mm512_permutex2var_ps(even, second, odd)));
}

/* Processes up to four query rows. The matrix multiplications of the next vector of codes start before the dot products of the
 * current vector are converted to float. */
FKV_INLINE void decode_values_block(int bits, decode_value_job *j, const float *p, uint32_t n_rows, float *out, bool fetches) {
    uint32_t n_groups = j->place.group[3] - j->place.group[0] + 1;
    uint32_t n_token_vecs = fkv_ceil_div(j->n_tokens, 16);
    if (fetches) fkv_fetch_some(j->t->next, FETCH_BEFORE_WEIGHTS);
    if (n_token_vecs == 4 && n_rows == COLUMN_ROWS && n_groups == 1)
        decode_weigh_all(1, &j->weights, &j->affine, &j->place, p);
    else if (n_token_vecs == 4 && n_rows == COLUMN_ROWS && n_groups == 2)
        decode_weigh_all(2, &j->weights, &j->affine, &j->place, p);
    else
        decode_weigh_some(n_token_vecs, &j->weights, &j->affine, &j->place, p, n_rows);
    fkv_tiles_see_stores();
    if (fetches) fkv_fetch_some(j->t->next, FETCH_AFTER_WEIGHTS);
    uint32_t n_vecs = j->place.n_lanes;
    size_t dim = (size_t)j->t->n_units * 16;
    out += j->place.first;
    start_values(bits, j, 0);
    for (uint32_t vec = 0; vec < n_vecs; vec++, out += 128 / bits) {
        store_values(bits, j, vec);
        if (vec + 1 < n_vecs) start_values(bits, j, vec + 1);
        if (fetches && vec % 2 == 1) fkv_fetch_some(j->t->next, FETCH_ROWS / 2);
        for (uint32_t r = 0; r < n_rows; r++) add_vector(bits, j, vec, r, out + r * dim);
    }
    decode_stay_awake();
}

FKV_INLINE void decode_values_bits(int bits, decode_value_job *j, const float *p, uint32_t n_rows, float *out) {
    decode_stay_awake();
    fkv_fetch_some(j->t->next, FETCH_AFTER_SOFTMAX);
    token_affine_open(&j->affine, j->t, (1u << bits) - 1, j->n_tokens);
    for (uint32_t at = 0; at < j->t->row_bytes; at += STRIP_BYTES) {
        decode_strip_open(bits, j, at);
        decode_stay_awake();
        for (uint32_t row = 0; row < n_rows; row += COLUMN_ROWS) {
            uint32_t n = fkv_min_u32(COLUMN_ROWS, n_rows - row);
            bool fetches = at == 0 && row == 0;
            const float *of_rows = p + (size_t)row * FKV_TILE_TOKENS;
            float *to = out + (size_t)row * j->t->n_units * 16;
            if (n == COLUMN_ROWS) /* compile-time constant */
                decode_values_block(bits, j, of_rows, COLUMN_ROWS, to, fetches);
            else
                decode_values_block(bits, j, of_rows, n, to, fetches);
        }
    }
}

static void decode_values(const fkv_codec *codec, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {
    decode_value_job j;
    j.t = t;
    j.n_tokens = n_tokens;
    if (codec->bits == 8)
        decode_values_bits(8, &j, p, n_rows, out);
    else
        decode_values_bits(4, &j, p, n_rows, out);
}

#endif
