/* What the kernels with integer products share, AVX-512 with VNNI and AMX: 8- and 4-bit codes meet signed bytes without ever
 * becoming floats. 16- and 2-bit sides take the float kernels of kernels_body.h. The products themselves are in
 * kernels_avx512vnni.c, kernels_amx.c (many rows) and few_rows_amx.h.
 *
 * The float side of a product is rounded to integers, with a step from the largest number of the row: softmax weights times
 * scales to 16 bits in two signed bytes, x = step * (256 * high + low); queries to 24, with what is left in a third byte, because
 * an error of a query is multiplied by keys whose large channels can be 20 times the others. A query whose largest channel is
 * hundreds of times the others would lose them all the same: its scores are the float kernel's. Sums of code * x are exact, so
 * neither their order nor the rows and tokens beside them can change a bit. What the rounding leaves is kept away from the bias,
 * which can be far larger than the numbers it serves: queries are summed after rounding, and weights meet codes less the code
 * that stands for 0.
 *
 * Scores: 16 tokens are the lanes; four numbers of each token (a quad) are one dword, so a 4x4 transpose of dwords feeds the dot
 * product and no sum over lanes is needed. score = sum over groups of scale * step * dot + bias * sum(q).
 *
 * Values: 16 numbers of the head dimension are the lanes; the codes of four tokens are one dword.
 * out += step * (dot - sum(x * zero)) + sum(p * (scale * zero + bias)), zero being that code.
 *
 * Ladder: decode of 16384 tokens, 32 q / 8 kv / 128, K8/V4, one and two threads, pages in memory.
 *
 *   codes to f32 in registers (kernels_body.h)                                                          7.66 ms   4.73 ms
 *   integer dot products, queries and weights rounded once for each query tile                          6.93 ms   3.70 ms
 *   the next tile prefetched; scales and zero codes transposed once for all rows; third byte of queries 4.92 ms   3.43 ms
 */
#ifndef FKV_KERNELS_VNNI_H
#define FKV_KERNELS_VNNI_H

#include "../../base/simd/vec_avx512.h"

#include "../../base/simd/quads_avx512.h"
#include "kernels_body.h"

enum {
    LANE_TOKENS = 16,
    STRIP_BYTES = 64, /* of a value row: one register */
    MAX_STRIP_VECS = 8
};

/* Scales (or biases) of n_slots tokens, a multiple of 16, to floats, those of a group side by side: [groups, FKV_TILE_TOKENS]. */
FKV_INLINE void lay_groups(fkv_type type, const uint8_t *from, uint32_t n_groups, uint32_t n_slots, float *to) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (n_groups == 1) {
        widen_type(type, from, n_slots, to);
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
        widen_type(type, from, n_slots * n_groups, by_token);
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

/* As tile_open(), with the scales of a group side by side, and so its biases. */
static void int_tile_open(tile *t, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                          uint32_t n_tokens) {
    tile_begin(t, codec, part, next);
    tile_lanes(t, codec, part, n_tokens);
}

/* The scales (or biases) of one group for 16 tokens from `token` on, a lane each. all: [groups, FKV_TILE_TOKENS]. */
FKV_INLINE vf token_lanes(const float *all, uint32_t group, uint32_t token) {
    return vf_load(all + group * FKV_TILE_TOKENS + token);
}

/* ---- scores ---- */

/* Rows of queries as bytes. The order of the numbers in a unit is that of the codes' quads: natural for 8 bits; for 4 bits first
 * the 16 even ones (low halves of the bytes), then the 16 odd ones. */
typedef struct int_queries {
    uint32_t *n_by_float; /* rows whose scores are the float kernel's, */
    uint32_t *by_float;   /* [rows]: and which they are */
    float *step;          /* [rows] */
    float *sum;           /* [rows, chunks], of the rounded numbers: an error of q then meets k, not k - bias */
    int8_t *high;         /* [rows, D] */
    int8_t *low;          /* [rows, D] */
    int8_t *rest;         /* [rows, D]: of a step's 256th */
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
    iq.rest = (int8_t *)at;
    return iq;
}

/* 16 numbers in steps to three bytes each; returns the sum of what was stored. */
FKV_INLINE float store_query(const int_queries *iq, size_t at, vf x) {
    __m512i whole = _mm512_cvtps_epi32(x);
    bytes2 bytes = split(whole);
    __m512i rest = _mm512_cvtps_epi32(vf_mul(vf_sub(x, _mm512_cvtepi32_ps(whole)), vf_set(256.0f)));
    rest = _mm512_min_epi32(rest, _mm512_set1_epi32(127));
    _mm_storeu_si128((__m128i *)(iq->high + at), bytes.high);
    _mm_storeu_si128((__m128i *)(iq->low + at), bytes.low);
    _mm_storeu_si128((__m128i *)(iq->rest + at), _mm512_cvtepi32_epi8(rest));
    return (float)_mm512_reduce_add_epi32(whole) + (float)_mm512_reduce_add_epi32(rest) / 256.0f;
}

/* Units that are summed in integers before a scale is applied: those of a group, but no more than two. */
FKV_INLINE uint32_t chunk_units(uint32_t group) { return group == 32 ? 1 : 2; }
FKV_INLINE uint32_t chunk_numbers(const fkv_codec *codec) { return chunk_units(codec->group) * UNIT_NUMBERS; }

/* Adds 1 to the lanes of numbers that a step leaves few bits of: below 1/1024 of the largest, but not 0. As whole numbers the
 * bits of sizes are in order, and 0 less 1 is the largest of them. */
FKV_INLINE __m512i count_small(__m512i n, vf x) {
    __m512i one = _mm512_set1_epi32(1);
    __m512i limit = _mm512_castps_si512(vf_set(LARGEST / 1024.0f));
    __m512i size = _mm512_sub_epi32(_mm512_castps_si512(_mm512_abs_ps(x)), one);
    return _mm512_mask_add_epi32(n, _mm512_cmplt_epu32_mask(size, limit), n, one);
}

/* One row of queries to bytes. Returns whether floats serve it better: an eighth of its numbers are small, or all too small for a
 * step. */
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
    float step = not_finite != 0 ? NAN : largest / LARGEST; /* such a query has no answer, and must not seem to have one */
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

/* Of rows that floats serve better, after all rows have got their scores. */
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

/* 16 bytes of every fourth of 16 rows, stride apart: 128-bit lane L is row 4 L. */
FKV_INLINE __m512i load_lanes(const uint8_t *rows, size_t stride) {
    __m512i x = _mm512_castsi128_si512(load16(rows));
    x = _mm512_inserti32x4(x, load16(rows + 4 * stride), 1);
    x = _mm512_inserti32x4(x, load16(rows + 8 * stride), 2);
    return _mm512_inserti32x4(x, load16(rows + 12 * stride), 3);
}

/* 16 bytes of 16 rows, stride apart: lane t of to[i] is dword i of row t. */
FKV_INLINE void load_columns(const uint8_t *rows, size_t stride, __m512i to[4]) {
    __m512i a[4];
    FKV_UNROLL
    for (size_t i = 0; i < 4; i++) a[i] = load_lanes(rows + i * stride, stride);
    transpose_dwords(a, to);
}

/* One unit of 16 tokens: quads[j] has, in lane t, the four codes of quad j of token t. */
FKV_INLINE void unit_quads(int bits, const uint8_t *codes, size_t stride, __m512i quads[UNIT_QUADS]) {
    FKV_UNROLL
    for (int quarter = 0; quarter < bits / 4; quarter++) load_columns(codes + 16 * quarter, stride, &quads[4 * quarter]);
    if (bits == 4) split_halves(4, quads);
}

/* ---- values ---- */

/* Where a strip of 64 bytes lies in every value row. */
typedef struct strip_place {
    uint32_t at;       /* byte of a row */
    uint32_t bytes;    /* of a row, at most 64; the lanes behind are not used */
    uint32_t first;    /* number along the head dimension of its first code */
    uint32_t n_lanes;  /* of 128 bits, used */
    uint32_t group[4]; /* of each lane; a lane behind the row repeats the last */
} strip_place;

/* Of every group, a lane for each token: the scale, the code that stands for 0, as near as the group has it, and what it does
 * stand for. Tokens of the last vector that are behind n_tokens have 0, whatever their slots hold. */
typedef struct token_facts {
    alignas(64) float scale[MAX_GROUPS_PER_ROW][FKV_TILE_TOKENS];
    alignas(64) float offset[MAX_GROUPS_PER_ROW][FKV_TILE_TOKENS];
    alignas(64) uint8_t zero[MAX_GROUPS_PER_ROW][FKV_TILE_TOKENS];
} token_facts;

static void facts_open(token_facts *f, const tile *t, uint32_t bins, uint32_t n_tokens) {
    for (uint32_t g = 0; g < t->n_groups; g++) {
        for (uint32_t token = 0; token < n_tokens; token += LANE_TOKENS) {
            uint32_t left = n_tokens - token;
            __mmask16 there = left >= LANE_TOKENS ? 0xffff : (__mmask16)((1u << left) - 1);
            vf scale = _mm512_maskz_mov_ps(there, token_lanes(t->scales, g, token));
            vf bias = _mm512_maskz_mov_ps(there, token_lanes(t->biases, g, token));
            vf zero = vf_mul(vf_sub(vf_set(0.0f), bias), _mm512_rcp14_ps(scale)); /* any code will do, so near is enough */
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

/* The bytes of four tokens, side by side: dword i of 128-bit lane L of v[j] is byte 16 L + 4 j + i of each. */
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

/* out[16 L .. 16 L + 15] of a 4x4 transpose of 128-bit lanes is added at to + L * apart, for L < n_lanes. */
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

/* The numbers of a strip are added to a row of the output. x: a vector for each of strip_quads(); for 4 bits first those of the
 * low halves, then those of the high ones. */
FKV_INLINE void add_strip(int bits, const strip_place *s, const vf *x, float *out) {
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
