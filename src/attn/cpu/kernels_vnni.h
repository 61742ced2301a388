/* Code shared by the integer kernels (AVX-512 VNNI and AMX), which multiply 8-bit and 4-bit codes by signed bytes without
 * converting the codes to float.
 *
 * Queries and weights are rounded to integer multiples of a step, which is derived from the largest value of the row. Products of
 * softmax weights and scales use 16 bits: x = step * (256 * high + low). Queries use a third byte, because large key values
 * amplify the rounding errors of queries. Queries with many values below 1/1024 of the largest value use the float kernels.
 * Integer sums are exact, so they do not depend on the order of additions. Two measures keep rounding errors from being
 * multiplied by large biases: query values are summed after rounding, and weights are multiplied by code - zero, where zero is
 * the zero code (the code whose value is nearest to 0).
 *
 * Scores: each of the 16 lanes belongs to one token and holds four of its values (a quad). A score is the sum over all scale
 * groups of (scale * step * dot + bias * sum(q)), where dot is the integer dot product of codes and query, and sum(q) the sum of
 * the query values in the group. Values: each of the 16 lanes belongs to one channel and holds the codes of four tokens. out +=
 * step * (dot - sum(x * zero)) + sum(p * (scale * zero + bias)), summed over tokens, where p is the softmax weight and x the
 * rounded p * scale. */
#ifndef FKV_KERNELS_VNNI_H
#define FKV_KERNELS_VNNI_H

#include "../../base/simd/vec_avx512.h"

#include "../../base/simd/quads_avx512.h"
#include "kernels_body.h"

enum {
    LANE_TOKENS = 16,
    STRIP_BYTES = 64, /* number of bytes of a value row that fill one register */
    MAX_STRIP_VECS = 8
};

/* Converts the scales (or biases) of n_slots tokens, a multiple of 16, to floats in the layout [groups, FKV_TILE_TOKENS]. */
FKV_INLINE void lay_groups(fkv_type type, const uint8_t *from, uint32_t n_groups, uint32_t n_slots, float *to) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (n_groups == 1) {
        widen_halves_of(type, from, n_slots, to);
    } else if (n_groups == 2) {
        __m512i even = _mm512_slli_epi32(lane, 1);
        __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (const float *end = to + n_slots; to < end; to += LANE_TOKENS, from += 4 * LANE_TOKENS) {
            vf pairs[2];
            FKV_UNROLL
            for (int i = 0; i < 2; i++) {
                if (type == FKV_BF16)
                    vf_load_bf16(from + 32 * i, &pairs[i]);
                else
                    vf_load_f16(from + 32 * i, &pairs[i]);
            }
            vf_store(to, _mm512_permutex2var_ps(pairs[0], even, pairs[1]));
            vf_store(to + FKV_TILE_TOKENS, _mm512_permutex2var_ps(pairs[0], odd, pairs[1]));
        }
    } else {
        alignas(64) float by_token[FKV_TILE_TOKENS * MAX_GROUPS_PER_ROW];
        widen_halves_of(type, from, n_slots * n_groups, by_token);
        __m512i index = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)n_groups));
        for (uint32_t g = 0; g < n_groups; g++)
            for (uint32_t token = 0; token < n_slots; token += LANE_TOKENS)
                vf_store(to + g * FKV_TILE_TOKENS + token, _mm512_i32gather_ps(index, by_token + token * n_groups + g, 4));
    }
}

static void tile_lanes(tile *t, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens) {
    uint32_t n_slots = (uint32_t)fkv_align_up(n_tokens, LANE_TOKENS);
    if (codec->type == FKV_BF16) {
        lay_groups(FKV_BF16, part[FKV_PART_SCALES], t->n_groups, n_slots, t->scales);
        lay_groups(FKV_BF16, part[FKV_PART_BIASES], t->n_groups, n_slots, t->biases);
    } else {
        lay_groups(FKV_F16, part[FKV_PART_SCALES], t->n_groups, n_slots, t->scales);
        lay_groups(FKV_F16, part[FKV_PART_BIASES], t->n_groups, n_slots, t->biases);
    }
}

/* Initializes a tile like tile_open(), but stores scales and biases in the layout [groups, FKV_TILE_TOKENS]. */
static void int_tile_open(tile *t, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                          uint32_t n_tokens) {
    tile_begin(t, codec, part, next);
    tile_lanes(t, codec, part, n_tokens);
}

/* Loads the scales (or biases) of one group for 16 tokens, starting at `token`. all: [groups, FKV_TILE_TOKENS]. */
FKV_INLINE vf token_lanes(const float *all, uint32_t group, uint32_t token) {
    return vf_load(all + group * FKV_TILE_TOKENS + token);
}

/* ---- scores ---- */

/* Query rows as bytes. Within every 32 values, the query values have the same order as the key codes. For 8-bit codes, this is
 * the channel order. For 4-bit codes, the 16 even values (low nibbles) precede the 16 odd values. */
typedef struct int_queries {
    uint32_t *n_by_float; /* number of rows that use the float kernels */
    uint32_t *by_float;   /* [rows] indices of the rows that use the float kernels */
    float *step;          /* [rows] */
    float *sum;           /* [rows, chunks] sums of the rounded query values, which are multiplied by the biases of K; sums of the
                             exact values would increase the error of the scores if biases are large */
    int8_t *high;         /* [rows, D] */
    int8_t *low;          /* [rows, D] */
    int8_t *remainder;    /* [rows, D] third byte of each value: the rounding residue, in units of step / 256 */
} int_queries;

static int_queries queries_in(void *prepared, uint32_t n_rows, uint32_t dim) {
    uint8_t *at = prepared;
    int_queries iq;
    iq.n_by_float = (uint32_t *)(void *)at;
    iq.by_float = iq.n_by_float + 1;
    at += fkv_align_up((n_rows + 1) * sizeof(uint32_t), 64);
    iq.step = (float *)(void *)at;
    at += fkv_align_up(n_rows * sizeof(float), 64);
    iq.sum = (float *)(void *)at;
    at += fkv_align_up((size_t)n_rows * (dim / UNIT_NUMBERS) * sizeof(float), 64);
    iq.high = (int8_t *)at;
    at += fkv_align_up((size_t)n_rows * dim, 64);
    iq.low = (int8_t *)at;
    at += fkv_align_up((size_t)n_rows * dim, 64);
    iq.remainder = (int8_t *)at;
    return iq;
}

/* Stores 16 query values, given as multiples of the quantization step, as three bytes each. Returns the sum of the rounded
 * values. */
FKV_INLINE float store_query(const int_queries *iq, size_t at, vf x) {
    __m512i whole = _mm512_cvtps_epi32(x);
    bytes2 bytes = split_bytes(whole);
    __m512i remainder = _mm512_cvtps_epi32(vf_mul(vf_sub(x, _mm512_cvtepi32_ps(whole)), vf_set(256.0f)));
    remainder = _mm512_min_epi32(remainder, _mm512_set1_epi32(127));
    _mm_storeu_si128((__m128i *)(iq->high + at), bytes.high);
    _mm_storeu_si128((__m128i *)(iq->low + at), bytes.low);
    _mm_storeu_si128((__m128i *)(iq->remainder + at), _mm512_cvtepi32_epi8(remainder));
    return (float)_mm512_reduce_add_epi32(whole) + (float)_mm512_reduce_add_epi32(remainder) / 256.0f;
}

/* Returns the number of units (32 values each) per chunk. The dot product over a chunk is computed in integers and then
 * multiplied by a scale, so a chunk never crosses the boundary of a scale group. */
FKV_INLINE uint32_t chunk_units(uint32_t group) { return group == 32 ? 1 : 2; }
FKV_INLINE uint32_t chunk_numbers(const fkv_codec *codec) { return chunk_units(codec->group) * UNIT_NUMBERS; }

/* Increments the counter n in each lane whose value is nonzero but below 1/1024 of the largest value. Such values keep few
 * significant bits when they are rounded. Absolute float values can be compared as integers. Subtracting 1 excludes zeros,
 * because 0 - 1 wraps around to the largest integer. */
FKV_INLINE __m512i count_small(__m512i n, vf x) {
    __m512i one = _mm512_set1_epi32(1);
    __m512i limit = _mm512_castps_si512(vf_set(LARGEST / 1024.0f));
    __m512i size = _mm512_sub_epi32(_mm512_castps_si512(_mm512_abs_ps(x)), one);
    return _mm512_mask_add_epi32(n, _mm512_cmplt_epu32_mask(size, limit), n, one);
}

/* Quantizes one query row to bytes. Returns whether the float kernels should process the row. This is the case if at least an
 * eighth of its values are small (nonzero, but below 1/1024 of the largest value), or if all values are so small that the inverse
 * of the step would overflow. */
static bool prepare_row(const fkv_codec *codec, const float *row, const int_queries *iq, uint32_t r) {
    uint32_t dim = codec->dim;
    uint32_t chunk = chunk_numbers(codec);
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    vf max = vf_set(0.0f);
    __mmask16 not_finite = 0;
    for (uint32_t d = 0; d < dim; d += VL) {
        vf size = _mm512_abs_ps(vf_load(row + d));
        max = vf_max(max, size);
        not_finite |= _mm512_cmp_ps_mask(size, vf_set(INFINITY), _CMP_NLT_UQ);
    }
    float largest = vf_reduce_max(max);
    vf inverse = vf_set(largest > SMALLEST ? LARGEST / largest : 0.0f);
    float step =
        not_finite != 0 ? NAN : largest / LARGEST; /* a non-finite query must produce NaN instead of a plausible result */
    __m512i n_small = _mm512_setzero_si512();
    for (uint32_t d = 0; d < dim; d += UNIT_NUMBERS) {
        vf x = vf_mul(vf_load(row + d), inverse);
        vf y = vf_mul(vf_load(row + d + VL), inverse);
        n_small = count_small(count_small(n_small, x), y);
        if (codec->bits == 4) {
            vf evens = _mm512_permutex2var_ps(x, even, y);
            y = _mm512_permutex2var_ps(x, odd, y);
            x = evens;
        }
        size_t at = (size_t)r * dim + d;
        float sum = store_query(iq, at, x) + store_query(iq, at + VL, y);
        float *to = &iq->sum[(r * dim + d) / chunk];
        *to = sum * step + (d % chunk == 0 ? 0.0f : *to);
    }
    iq->step[r] = step;
    bool has_peak = (uint32_t)_mm512_reduce_add_epi32(n_small) > dim / 8;
    return not_finite == 0 && (has_peak || (largest > 0.0f && largest <= SMALLEST));
}

static void int_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared) {
    int_queries iq = queries_in(prepared, n_rows, codec->dim);
    *iq.n_by_float = 0;
    for (uint32_t r = 0; r < n_rows; r++)
        if (prepare_row(codec, q + (size_t)r * codec->dim, &iq, r)) iq.by_float[(*iq.n_by_float)++] = r;
}

/* Recomputes, with the float kernels, the scores of the query rows listed in `by_float`. */
static void scores_by_float(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t n_tokens, const float *q,
                            uint32_t n_by_float, const uint32_t *by_float, float *scores) {
    fkv_fetch nothing = {.n_ranges = 0};
    for (uint32_t i = 0; i < n_by_float; i++) {
        const float *row = q + (size_t)by_float[i] * codec->dim;
        float *to = scores + (size_t)by_float[i] * FKV_TILE_TOKENS;
        switch (codec->kind == FKV_CODEC_TURBO ? FORM_BOOK + codec->bits : codec->bits) {
        case FORM_8: affine_scores(FORM_8, codec, part, &nothing, n_tokens, row, 1, to); break;
        case FORM_4: affine_scores(FORM_4, codec, part, &nothing, n_tokens, row, 1, to); break;
        case FORM_BOOK + 4: affine_scores(FORM_BOOK + 4, codec, part, &nothing, n_tokens, row, 1, to); break;
        case FORM_BOOK + 3: affine_scores(FORM_BOOK + 3, codec, part, &nothing, n_tokens, row, 1, to); break;
        default: affine_scores(FORM_BOOK + 2, codec, part, &nothing, n_tokens, row, 1, to); break;
        }
    }
}

FKV_INLINE __m128i load16(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

/* Loads 16 bytes of rows 0, 4, 8 and 12, where rows are `stride` bytes apart: 128-bit lane L receives row 4 * L. */
FKV_INLINE __m512i load_lanes(const uint8_t *rows, size_t stride) {
    __m512i x = _mm512_castsi128_si512(load16(rows));
    x = _mm512_inserti32x4(x, load16(rows + 4 * stride), 1);
    x = _mm512_inserti32x4(x, load16(rows + 8 * stride), 2);
    return _mm512_inserti32x4(x, load16(rows + 12 * stride), 3);
}

/* Loads 16 bytes of each of 16 rows that are `stride` bytes apart, transposed: lane t of to[i] receives dword i of row t. */
FKV_INLINE void load_columns(const uint8_t *rows, size_t stride, __m512i to[4]) {
    __m512i a[4];
    FKV_UNROLL
    for (size_t i = 0; i < 4; i++) a[i] = load_lanes(rows + i * stride, stride);
    transpose_dwords(a, to);
}

/* Loads the codes of one unit (32 values) for 16 tokens: lane t of quads[j] receives quad j of token t. In the quads of 4-bit
 * codes, even values precede odd values. */
FKV_INLINE void unit_quads(int bits, const uint8_t *codes, size_t stride, __m512i quads[UNIT_QUADS]) {
    FKV_UNROLL
    for (int quarter = 0; quarter < bits / 4; quarter++) load_columns(codes + 16 * quarter, stride, &quads[4 * quarter]);
    if (bits == 4) split_halves(4, quads);
}

/* ---- values ---- */

/* Position of a strip, which is a range of up to 64 bytes of every value row. */
typedef struct strip_place {
    uint32_t at;       /* byte offset of the strip in a row */
    uint32_t bytes;    /* number of bytes in the strip, at most 64; lanes past the end of the row are unused */
    uint32_t first;    /* channel index of the first code in the strip */
    uint32_t n_lanes;  /* number of 128-bit lanes that contain bytes of the row */
    uint32_t group[4]; /* scale group of each 128-bit lane; lanes beyond the end of the row repeat the last group */
} strip_place;

/* Affine parameters per group and token: the scale, the zero code (the code whose value is nearest to 0), and `offset`, the value
 * of the zero code. In the last vector, all parameters of tokens beyond n_tokens are 0, even if their slots contain arbitrary
 * bytes. */
typedef struct token_affine {
    alignas(64) float scale[MAX_GROUPS_PER_ROW][FKV_TILE_TOKENS];
    alignas(64) float offset[MAX_GROUPS_PER_ROW][FKV_TILE_TOKENS];
    alignas(64) uint8_t zero[MAX_GROUPS_PER_ROW][FKV_TILE_TOKENS];
} token_affine;

static void token_affine_open(token_affine *f, const tile *t, uint32_t bins, uint32_t n_tokens) {
    for (uint32_t g = 0; g < t->n_groups; g++) {
        for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
            uint32_t left = n_tokens - token;
            __mmask16 there = left >= LANE_TOKENS ? 0xffff : (__mmask16)((1u << left) - 1);
            vf scale = _mm512_maskz_mov_ps(there, token_lanes(t->scales, g, token));
            vf bias = _mm512_maskz_mov_ps(there, token_lanes(t->biases, g, token));
            /* an approximate quotient suffices: the result is correct for any choice of zero code */
            vf zero = vf_mul(vf_sub(vf_set(0.0f), bias), _mm512_rcp14_ps(scale));
            zero = vf_round(vf_min(vf_max(zero, vf_set(0.0f)), vf_set((float)bins)));
            vf_store(f->scale[g] + token, scale);
            vf_store(f->offset[g] + token, vf_fma(scale, zero, bias));
            _mm_storeu_si128((__m128i *)(f->zero[g] + token), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(zero)));
        }
    }
}

FKV_INLINE strip_place strip_at(int bits, const tile *t, uint32_t at) {
    strip_place s = {.at = at, .bytes = fkv_min_u32(STRIP_BYTES, t->row_bytes - at), .first = at * 8 / (uint32_t)bits};
    s.n_lanes = s.bytes / 16;
    for (uint32_t lane = 0; lane < 4; lane++)
        s.group[lane] = (s.first + fkv_min_u32(lane, s.n_lanes - 1) * 128 / (uint32_t)bits) >> t->group_shift;
    return s;
}

FKV_INLINE __mmask64 strip_mask(const strip_place *s) {
    return s->bytes == STRIP_BYTES ? ~(__mmask64)0 : ((__mmask64)1 << s->bytes) - 1;
}

/* Interleaves the bytes of four tokens: dword i of 128-bit lane L of v[j] holds byte 16 * L + 4 * j + i of each token. */
FKV_INLINE void token_quads(const __m512i a[4], __m512i v[4]) {
    __m512i low01 = _mm512_unpacklo_epi8(a[0], a[1]);
    __m512i high01 = _mm512_unpackhi_epi8(a[0], a[1]);
    __m512i low23 = _mm512_unpacklo_epi8(a[2], a[3]);
    __m512i high23 = _mm512_unpackhi_epi8(a[2], a[3]);
    v[0] = _mm512_unpacklo_epi16(low01, low23);
    v[1] = _mm512_unpackhi_epi16(low01, low23);
    v[2] = _mm512_unpacklo_epi16(high01, high23);
    v[3] = _mm512_unpackhi_epi16(high01, high23);
}

/* Transposes the registers a to d as a 4x4 matrix of 128-bit lanes, which gives four rows of 16 floats. Adds row i to the floats
 * at to + i * apart, for i < n_lanes. */
FKV_INLINE void add_lanes(vf a, vf b, vf c, vf d, float *to, uint32_t apart, uint32_t n_lanes) {
    vf ab02 = _mm512_shuffle_f32x4(a, b, 0x88);
    vf ab13 = _mm512_shuffle_f32x4(a, b, 0xdd);
    vf cd02 = _mm512_shuffle_f32x4(c, d, 0x88);
    vf cd13 = _mm512_shuffle_f32x4(c, d, 0xdd);
    vf lane[4] = {_mm512_shuffle_f32x4(ab02, cd02, 0x88), _mm512_shuffle_f32x4(ab13, cd13, 0x88),
                  _mm512_shuffle_f32x4(ab02, cd02, 0xdd), _mm512_shuffle_f32x4(ab13, cd13, 0xdd)};
    FKV_UNROLL
    for (uint32_t i = 0; i < 4; i++)
        if (i < n_lanes) vf_store(to + i * apart, vf_add(vf_load(to + i * apart), lane[i]));
}

/* Adds the weighted values of a strip to an output row. x[v] holds the results for vector v of the strip. For 4-bit codes,
 * vectors 0-3 are low nibbles and vectors 4-7 are high nibbles. */
FKV_INLINE void add_strip_values(int bits, const strip_place *s, const vf *x, float *out) {
    out += s->first;
    if (bits == 8) {
        add_lanes(x[0], x[1], x[2], x[3], out, 16, s->n_lanes);
    } else {
        add_lanes(_mm512_unpacklo_ps(x[0], x[4]), _mm512_unpackhi_ps(x[0], x[4]), _mm512_unpacklo_ps(x[1], x[5]),
                  _mm512_unpackhi_ps(x[1], x[5]), out, 32, s->n_lanes);
        add_lanes(_mm512_unpacklo_ps(x[2], x[6]), _mm512_unpackhi_ps(x[2], x[6]), _mm512_unpacklo_ps(x[3], x[7]),
                  _mm512_unpackhi_ps(x[3], x[7]), out + 16, 32, s->n_lanes);
    }
}

#endif
