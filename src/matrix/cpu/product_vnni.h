/* The product of packed panels with rows of activations in integers (vpdpbusd), the score side of attention with weights for
 * keys: the lanes are the 16 rows of a panel, and its dwords are quads already. Panels of floats take product_body.h.
 *
 * Activations are rounded to 16 bits in two bytes with a step from the largest of their 32 columns (a unit), because a few
 * channels of a model can be a thousand times the others. out += (dot * step) * scale + bias * sum(x), group by group, with the
 * sum of the rounded numbers: what the rounding leaves then meets a weight, not a code. Sums of code * x are exact, and for one
 * output the order of the groups is fixed, so neither tokens nor panels beside it can change a bit. Steps are powers of two:
 * dot * step is exact too, and product_amx_bf16.h may multiply by the step before it sums.
 *
 * Prepared: for each block of up to 16 tokens [units, tokens, 64]: 32 high bytes, 32 low ones; behind all blocks, as many
 * [units, tokens] of four floats.
 */
#ifndef FKV_PRODUCT_VNNI_H
#define FKV_PRODUCT_VNNI_H

#include "../../base/simd/quads_avx512.h"

#include "product_body.h"

_Static_assert((int)UNIT_NUMBERS == (int)FKV_UNIT_COLS, "units of panels are units of the dot products");

/* More than a unit's codes add up to: what is multiplied by dots is made smaller by it, and scales larger, and no sum of finite
 * numbers is infinite on the way. */
static const float CODES = 0x1p13f;

enum { MAX_TOKENS = 8 }; /* that meet a panel's codes while they are in registers */

typedef struct unit_facts {
    float step;   /* / CODES */
    float sum[2]; /* of the first 16 numbers and of the others, after rounding */
    float both;   /* sum[0] + sum[1] */
} unit_facts;

typedef struct unit_bytes {
    int8_t high[UNIT_NUMBERS];
    int8_t low[UNIT_NUMBERS];
} unit_bytes;

_Static_assert(sizeof(unit_bytes) + sizeof(unit_facts) <= FKV_PREPARED_BYTES, "as fkv_activation_bytes() counts");

/* One block of tokens: that of unit u and token t is [u * n_tokens + t]. */
typedef struct token_block {
    unit_bytes *bytes;
    unit_facts *facts;
    uint32_t n_tokens;
} token_block;

FKV_INLINE token_block block_at(const fkv_activations *in, uint32_t token) {
    size_t n_units = in->n_cols / UNIT_NUMBERS;
    unit_bytes *bytes = in->prepared;
    unit_facts *facts = (unit_facts *)(void *)(bytes + n_units * in->n_tokens);
    return (token_block){bytes + n_units * token, facts + n_units * token, fkv_min_u32(in->n_tokens - token, FKV_BLOCK_TOKENS)};
}

/* Of 16 numbers in each of four registers the largest size. */
FKV_INLINE __m128 largest_of(const vf a[4]) {
    vf ab = vf_max(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    vf cd = vf_max(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    vf all = vf_max(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

enum { PREPARED_UNITS = 4 }; /* side by side: four sums, or four maxima, cost little more than one */

/* Of some units of one token: what a whole number stands for, and its inverse. */
typedef struct unit_steps {
    float step[PREPARED_UNITS]; /* not a number where the unit has something that is none, or infinite */
    float inverse[PREPARED_UNITS];
} unit_steps;

/* The power of two that leaves the largest between LARGEST / 2 and LARGEST; 0 where all count as 0. */
FKV_INLINE unit_steps steps_of(const float *x, uint32_t n_units) {
    const __m128i step_of_one = _mm_set1_epi32(14 << 23); /* of an exponent: LARGEST is just below 2^15 */
    vf size[PREPARED_UNITS];
    unsigned not_finite = 0;
    for (uint32_t u = 0; u < PREPARED_UNITS; u++) {
        const float *unit = x + (size_t)fkv_min_u32(u, n_units - 1) * UNIT_NUMBERS;
        vf first = _mm512_abs_ps(vf_load(unit));
        vf second = _mm512_abs_ps(vf_load(unit + VL));
        size[u] = vf_max(first, second);
        unsigned off = _mm512_cmp_ps_mask(first, vf_set(INFINITY), _CMP_NLT_UQ) |
                       (unsigned)_mm512_cmp_ps_mask(second, vf_set(INFINITY), _CMP_NLT_UQ);
        not_finite |= (off != 0 ? 1u : 0u) << u;
    }
    __m128 largest = largest_of(size);
    __m128i exponent =
        _mm_and_si128(_mm_castps_si128(_mm_mul_ps(largest, _mm_set1_ps(0x1p15f / LARGEST))), _mm_set1_epi32(0x7f800000));
    __m128i step = _mm_sub_epi32(exponent, step_of_one);
    __mmask8 some = _mm_cmp_ps_mask(largest, _mm_set1_ps(SMALLEST), _CMP_GT_OQ) & (__mmask8)~not_finite;
    unit_steps steps;
    _mm_storeu_ps(steps.inverse, _mm_maskz_mov_ps(some, _mm_castsi128_ps(_mm_sub_epi32(_mm_set1_epi32(254 << 23), step))));
    _mm_storeu_ps(steps.step,
                  _mm_mask_mov_ps(_mm_maskz_mov_ps(some, _mm_castsi128_ps(step)), (__mmask8)not_finite, _mm_set1_ps(NAN)));
    return steps;
}

/* Half a unit's numbers in its steps, not yet rounded. */
FKV_INLINE vf in_steps(const float *x, const unit_steps *steps, uint32_t unit, uint32_t half) {
    return vf_mul(vf_load(x + (size_t)unit * UNIT_NUMBERS + half * VL), vf_set(steps->inverse[unit]));
}

/* Units [u, u + PREPARED_UNITS) of one token, of which the first n_units are there; stride: from a unit to the next. */
static void prepare_units(const float *x, uint32_t n_units, unit_bytes *bytes, unit_facts *facts, size_t stride) {
    const unit_steps steps = steps_of(x, n_units);
    for (uint32_t u = 0; u < n_units; u += 2) {
        vf whole[4];
        float sums[4];
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t unit = fkv_min_u32(u + i / 2, n_units - 1);
            __m512i number = _mm512_cvtps_epi32(in_steps(x, &steps, unit, i % 2));
            bytes2 both = split(number);
            _mm_storeu_si128((__m128i *)(bytes[unit * stride].high + i % 2 * 16), both.high);
            _mm_storeu_si128((__m128i *)(bytes[unit * stride].low + i % 2 * 16), both.low);
            whole[i] = _mm512_cvtepi32_ps(number);
        }
        vf_sums(whole, sums); /* exact: below 2^24 */
        for (uint32_t unit = u; unit < fkv_min_u32(u + 2, n_units); unit++) {
            unit_facts *to = &facts[unit * stride];
            to->step = steps.step[unit] / CODES;
            to->sum[0] = sums[(unit - u) * 2] * steps.step[unit];
            to->sum[1] = sums[(unit - u) * 2 + 1] * steps.step[unit];
            to->both = to->sum[0] + to->sum[1];
        }
    }
}

static void int_prepare_tokens(const fkv_activations *in, uint32_t token, uint32_t n_tokens) {
    uint32_t n_units = in->n_cols / UNIT_NUMBERS;
    for (uint32_t t = token; t < token + n_tokens; t++) {
        token_block block = block_at(in, t - t % FKV_BLOCK_TOKENS);
        const float *x = in->x + t * in->x_stride;
        for (uint32_t u = 0; u < n_units; u += PREPARED_UNITS) {
            size_t at = (size_t)u * block.n_tokens + t % FKV_BLOCK_TOKENS;
            prepare_units(x + (size_t)u * UNIT_NUMBERS, fkv_min_u32(n_units - u, PREPARED_UNITS), &block.bytes[at],
                          &block.facts[at], block.n_tokens);
        }
    }
}

/* The dots of n_tokens tokens; their bytes begin `first` quads into the unit. A dot product takes five cycles and two begin in
 * each: it takes eight chains. With eight tokens the high bytes' sums, shifted, are where the low bytes' begin, and save an
 * addition; fewer tokens take both at once. */
FKV_INLINE void dot_tokens(int n_tokens, int n_quads, int first, const __m512i *quads, const unit_bytes *bytes, vf *dots) {
    const int8_t *parts[2 * MAX_TOKENS]; /* high of every token, low of every token */
    __m512i sums[2 * MAX_TOKENS];
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        parts[t] = bytes[t].high + 4 * first;
        parts[n_tokens + t] = bytes[t].low + 4 * first;
        sums[t] = sums[n_tokens + t] = _mm512_setzero_si512();
    }
    if (n_tokens == MAX_TOKENS) {
        dot_quads(n_tokens, n_quads, quads, parts, sums, sums);
        FKV_UNROLL
        for (int t = 0; t < n_tokens; t++) sums[t] = _mm512_slli_epi32(sums[t], 8);
        dot_quads(n_tokens, n_quads, quads, parts + n_tokens, sums, sums);
        FKV_UNROLL
        for (int t = 0; t < n_tokens; t++) dots[t] = _mm512_cvtepi32_ps(sums[t]);
    } else {
        dot_quads(2 * n_tokens, n_quads, quads, parts, sums, sums);
        FKV_UNROLL
        for (int t = 0; t < n_tokens; t++) dots[t] = _mm512_cvtepi32_ps(join(sums[t], sums[n_tokens + t]));
    }
}

/* `width` bits (1 or 2) of quad j, as panels.h lays them out from `lines` on, moved to where they are bits `at` and above of
 * their bytes, with others around them. */
FKV_INLINE __m512i load_field(int width, int at, int j, const uint8_t *lines) {
    __m512i field = _mm512_loadu_si512(lines + (size_t)(width == 1 ? 0 : j / 4) * FKV_LINE_BYTES);
    int left = at - (width == 1 ? j : j % 4 * 2);
    return left >= 0 ? _mm512_slli_epi32(field, (unsigned)left) : _mm512_srli_epi32(field, (unsigned)-left);
}

/* The quads of a unit, as panels.h lays them out. table: of the kinds with one, 128 above what its bytes mean, in each 16. */
FKV_INLINE void load_quads(fkv_panel_layout layout, const uint8_t *lines, __m512i table, __m512i quads[UNIT_QUADS]) {
    const int bits = (int)layout.bits;
    const int low = (int)fkv_panel_low_bits(layout.bits);
    if (low == 2) {
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) quads[j] = _mm512_and_si512(load_field(2, 0, j, lines), _mm512_set1_epi8(3));
    } else {
        FKV_UNROLL
        for (int j = 0; j < low; j++) quads[j] = _mm512_loadu_si512(lines + (size_t)j * FKV_LINE_BYTES);
        if (low == 4) split_halves(4, quads);
    }
    if (bits > low) {
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) {
            __m512i mask = _mm512_set1_epi8((char)((bits - low == 1 ? 1 : 3) << low));
            __m512i upper = load_field(bits - low, low, j, lines + (size_t)low * FKV_LINE_BYTES);
            quads[j] = _mm512_ternarylogic_epi32(quads[j], upper, mask, 0xf8); /* quads | (upper & mask) */
        }
    }
    if (layout.table) {
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) quads[j] = _mm512_shuffle_epi8(table, quads[j]);
    }
}

/* Nothing for the kinds without a table. */
FKV_INLINE __m512i load_table(fkv_panel_layout layout, const int8_t *table) {
    if (!layout.table) return _mm512_setzero_si512();
    __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)0x80));
    return _mm512_broadcast_i32x4(bytes);
}

/* One group of n_quads quads, which begins `first` quads into its unit. */
FKV_INLINE void int_product_group(int n_tokens, int n_quads, int first, const __m512i *quads, vf scale, vf bias,
                                  const unit_bytes *bytes, const unit_facts *facts, vf *sum) {
    vf dots[MAX_TOKENS];
    dot_tokens(n_tokens, n_quads, first, quads, bytes, dots);
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        float x = n_quads == UNIT_QUADS ? facts[t].both : facts[t].sum[first / 4];
        sum[t] = vf_fma(bias, vf_set(x), sum[t]);
        sum[t] = vf_fma(vf_mul(dots[t], vf_set(facts[t].step)), vf_mul(scale, vf_set(CODES)), sum[t]);
    }
}

/* n_tokens tokens of a block from `t` on, one panel. The layout and n_tokens are constants. */
FKV_INLINE void int_product_tokens(int n_tokens, fkv_panel_layout layout, uint32_t n_units, const uint8_t *panel, __m512i table,
                                   const token_block *block, uint32_t t, float *out, size_t out_stride) {
    const int bits = (int)layout.bits;
    const int group_quads = (int)layout.group / 4;
    const uint8_t *halves = panel + fkv_panel_code_bytes(layout, n_units * UNIT_NUMBERS);
    const unit_bytes *bytes = block->bytes + t;
    const unit_facts *facts = block->facts + t;
    vf sum[MAX_TOKENS];
    FKV_UNROLL
    for (int i = 0; i < n_tokens; i++) sum[i] = vf_set(0.0f);
    for (uint32_t u = 0; u < n_units; u++, bytes += block->n_tokens, facts += block->n_tokens) {
        __m512i quads[UNIT_QUADS];
        FKV_UNROLL
        for (int line = 0; line < bits; line++) FKV_PREFETCH(panel + (size_t)line * FKV_LINE_BYTES + PREFETCH_BYTES);
        load_quads(layout, panel, table, quads);
        panel += (size_t)bits * FKV_LINE_BYTES;
        FKV_UNROLL
        for (int first = 0; first < UNIT_QUADS; first += group_quads) {
            vf scale;
            vf bias;
            load_affine(layout, halves, &scale, &bias);
            halves += fkv_panel_group_bytes(layout);
            int_product_group(n_tokens, group_quads, first, quads + first, scale, bias, bytes, facts, sum);
        }
    }
    FKV_UNROLL
    for (int i = 0; i < n_tokens; i++) vf_store(out + (size_t)i * out_stride, sum[i]);
}

FKV_INLINE void int_product_kind(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                 uint32_t n_tokens, float *out, size_t out_stride) {
    fkv_panel_layout layout = fkv_panel_layout_of(kind);
    uint32_t n_units = in->n_cols / UNIT_NUMBERS;
    __m512i table = load_table(layout, p->table);
    for (uint32_t first = 0; first < n_tokens; first += FKV_BLOCK_TOKENS) {
        token_block block = block_at(in, token + first);
        for (uint32_t i = 0; i < p->n_panels; i++) {
            const uint8_t *panel = p->first + i * p->panel_bytes;
            float *to = out + first * out_stride + (size_t)i * FKV_PANEL_ROWS;
            uint32_t t = 0;
#define TAKE(n)                                                                                                                  \
    for (; t + (n) <= block.n_tokens; t += (n))                                                                                  \
    int_product_tokens(n, layout, n_units, panel, table, &block, t, to + t * out_stride, out_stride)
            TAKE(8);
            TAKE(4);
            TAKE(2);
            TAKE(1);
#undef TAKE
        }
    }
}

MATRIX_KINDS(KIND_FUNCTION, int_product_kind)

static void int_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                        size_t out_stride) {
    EACH_MATRIX_KIND(int_product_kind)
}

#endif
