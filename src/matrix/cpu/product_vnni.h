/* Integer matrix products (vpdpbusd) of packed panels with activations. The lanes are the 16 rows of a panel, and a dword holds
 * four columns of a row (a quad). Float panels use product_body.h.
 *
 * Activations are rounded to 16 bits and split into two bytes. Each unit of 32 columns has its own quantization step, derived
 * from its largest value, because some channels of a model can be a thousand times larger than others. The contribution of a
 * scale group to the output is (dot * step) * scale + bias * sum(x), where dot is the dot product of the codes with the rounded
 * activations, and sum(x) is the sum of the rounded activations. Because both terms use rounded activations, a rounding error is
 * multiplied by the weight, scale * code + bias, and not by scale * code alone. Kinds without biases have no second term: for
 * them, dot is the integer dot product of code - center with the rounded activations. Dot products are exact integers and are
 * rounded to float once. Groups are always added in the same order. The result for a token therefore does not depend on other
 * tokens or panels. Because steps are powers of two, dot * step is exact, and product_amx.c may apply the step before summing.
 *
 * Prepared activations consist of two arrays. The first has [units, tokens, 64] bytes for each block of up to 16 tokens, with 32
 * high and 32 low bytes per unit and token. The second has a unit_scaling for each unit and token, in the same order.
 */
#ifndef FKV_PRODUCT_VNNI_H
#define FKV_PRODUCT_VNNI_H

#include "../../base/simd/fold_avx512.h"
#include "../../base/simd/quads_avx512.h"

#include "product_body.h"

_Static_assert((int)UNIT_NUMBERS == (int)FKV_UNIT_COLS, "panels and dot products must use the same unit size");

/* Upper bound on the sum of the codes in one unit (32 columns) of a row. Steps are divided by this bound, and scales are
 * multiplied by it, so that intermediate results do not overflow if all inputs are finite. */
static const float CODE_SUM_BOUND = 0x1p13f;

/* A unit whose magnitudes are all below this bound is treated as 0. For smaller units, an activation byte times step /
 * CODE_SUM_BOUND might be denormal. AMX flushes denormals to 0, so its results would differ. */
static const float MIN_UNIT_MAGNITUDE = 1e-28f;

enum { MAX_REGISTER_TOKENS = 8 }; /* maximum number of tokens that use the codes of a panel while the codes are in registers */

typedef struct unit_scaling {
    float step;               /* quantization step, divided by CODE_SUM_BOUND */
    float sum[2];             /* sums of the first and of the last 16 rounded values */
    float unit_sum;           /* sum[0] + sum[1] */
    int32_t negated_sum[2];   /* -sum[i] in quantization steps */
    int32_t negated_unit_sum; /* negated_sum[0] + negated_sum[1] */
} unit_scaling;

typedef struct unit_bytes {
    int8_t high[UNIT_NUMBERS];
    int8_t low[UNIT_NUMBERS];
} unit_bytes;

_Static_assert(sizeof(unit_bytes) + sizeof(unit_scaling) <= FKV_PREPARED_BYTES,
               "must match the size that fkv_activation_bytes() assumes");

/* Prepared activations of one block of tokens. The entries of unit u and token t are at index u * n_tokens + t. */
typedef struct token_block {
    unit_bytes *bytes;
    unit_scaling *scaling;
    uint32_t n_tokens;
} token_block;

FKV_INLINE token_block token_block_at(const fkv_activations *in, uint32_t token) {
    size_t n_units = in->n_cols / UNIT_NUMBERS;
    unit_bytes *bytes = in->prepared;
    unit_scaling *scaling = (unit_scaling *)(void *)(bytes + n_units * in->n_tokens);
    return (token_block){bytes + n_units * token, scaling + n_units * token, fkv_min_u32(in->n_tokens - token, FKV_BLOCK_TOKENS)};
}

enum {
    PREPARED_UNITS = 4
}; /* number of units whose activations are prepared together: reducing four vectors costs little more than reducing one */

/* Quantization steps of up to PREPARED_UNITS units of one token, and the inverses of the steps. */
typedef struct unit_steps {
    float step[PREPARED_UNITS]; /* quantization step; NaN if a value of the unit is not finite */
    float inverse[PREPARED_UNITS];
} unit_steps;

/* Computes a power-of-two quantization step and its inverse in each lane. largest: the largest magnitude of the lane's unit,
 * which is between LARGEST / 2 and LARGEST steps. If it is infinity or NaN, the step is NaN. If it is below MIN_UNIT_MAGNITUDE,
 * the step and its inverse are 0. */
FKV_INLINE void steps_of_largest(vf largest, vf *step, vf *inverse) {
    const __m512i infinity = _mm512_set1_epi32(0x7f800000);
    const __mmask16 not_finite = _mm512_cmp_epu32_mask(_mm512_castps_si512(largest), infinity, _MM_CMPINT_NLT);
    const __mmask16 some = _mm512_cmp_ps_mask(largest, vf_set(MIN_UNIT_MAGNITUDE), _CMP_GT_OQ) & (__mmask16)~not_finite;
    __m512i exponent = _mm512_and_si512(_mm512_castps_si512(vf_mul(largest, vf_set(0x1p15f / LARGEST))), infinity);
    /* the step is 2^-14 times the largest power of two that does not exceed largest * 2^15 / LARGEST */
    __m512i bits = _mm512_sub_epi32(exponent, _mm512_set1_epi32(14 << 23));
    *inverse = _mm512_castsi512_ps(_mm512_maskz_sub_epi32(some, _mm512_set1_epi32(254 << 23), bits));
    *step = _mm512_mask_mov_ps(_mm512_castsi512_ps(_mm512_maskz_mov_epi32(some, bits)), not_finite, vf_set(NAN));
}

/* Returns the larger magnitude in each lane. A NaN compares as larger than infinity. */
FKV_INLINE vf larger_magnitude(vf a, vf b) { return fold_two(FOLD_UINT_MAX, _mm512_abs_ps(a), _mm512_abs_ps(b)); }

/* Computes the quantization steps of up to PREPARED_UNITS units of one token. */
FKV_INLINE unit_steps steps_of(const float *x, uint32_t n_units) {
    vf largest[PREPARED_UNITS];
    vf step;
    vf inverse;
    for (uint32_t u = 0; u < PREPARED_UNITS; u++) {
        const float *unit = x + (size_t)fkv_min_u32(u, n_units - 1) * UNIT_NUMBERS;
        largest[u] = larger_magnitude(vf_load(unit), vf_load(unit + VL));
    }
    steps_of_largest(fold_rows(FOLD_UINT_MAX, PREPARED_UNITS, largest), &step, &inverse);
    unit_steps steps;
    _mm_storeu_ps(steps.step, _mm512_castps512_ps128(step));
    _mm_storeu_ps(steps.inverse, _mm512_castps512_ps128(inverse));
    return steps;
}

/* Activations of two units (32 columns each) of a token, as integer multiples of the units' quantization steps. Element 2 * unit
 * + half holds 16 columns. */
typedef struct unit_pair {
    vf value[4];
    float sum[4]; /* sum of each element, exact because it is below 2^24 */
} unit_pair;

/* Rounds the activations of units u and u + 1 of a token. If unit u + 1 does not exist, the last unit is used twice. */
FKV_INLINE unit_pair round_unit_pair(const float *x, const unit_steps *steps, uint32_t u, uint32_t n_units) {
    unit_pair pair;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t unit = fkv_min_u32(u + i / 2, n_units - 1);
        vf half = vf_load(x + (size_t)unit * UNIT_NUMBERS + i % 2 * VL);
        pair.value[i] = vf_round(vf_mul(half, vf_set(steps->inverse[unit])));
    }
    vf_sums(pair.value, pair.sum);
    return pair;
}

/* Adds the scaled dot product and, if the kind has biases, the bias term of one group of columns to `sum`. The order of the two
 * additions affects the result and must not change. */
FKV_INLINE vf add_group(fkv_panel_layout layout, vf dot, vf scale, vf bias, float x_sum, vf sum) {
    if (layout.biased) sum = vf_fma(bias, vf_set(x_sum), sum);
    return vf_fma(dot, scale, sum);
}

FKV_INLINE void int_prepare_units(const fkv_activations *in, uint32_t token, uint32_t first, const float *x, uint32_t n_units) {
    const token_block block = token_block_at(in, token - token % FKV_BLOCK_TOKENS);
    const size_t stride = block.n_tokens; /* distance, in array entries, between consecutive units of a token */
    const size_t at = first * stride + token % FKV_BLOCK_TOKENS;
    unit_bytes *bytes = &block.bytes[at];
    unit_scaling *scaling = &block.scaling[at];
    const unit_steps steps = steps_of(x, n_units);
    for (uint32_t u = 0; u < n_units; u += 2) {
        const unit_pair pair = round_unit_pair(x, &steps, u, n_units);
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t unit = fkv_min_u32(u + i / 2, n_units - 1);
            bytes2 both = split_bytes(_mm512_cvtps_epi32(pair.value[i]));
            _mm_storeu_si128((__m128i *)(bytes[unit * stride].high + i % 2 * 16), both.high);
            _mm_storeu_si128((__m128i *)(bytes[unit * stride].low + i % 2 * 16), both.low);
        }
        int32_t negated[4]; /* in C, converting NaN to an integer is undefined, so intrinsics are used */
        _mm_storeu_si128((__m128i *)negated, _mm_sub_epi32(_mm_setzero_si128(), _mm_cvtps_epi32(_mm_loadu_ps(pair.sum))));
        for (uint32_t unit = u; unit < fkv_min_u32(u + 2, n_units); unit++) {
            const uint32_t half = (unit - u) * 2; /* index in `pair` of the first half (16 values) of the unit */
            unit_scaling *to = &scaling[unit * stride];
            to->step = steps.step[unit] / CODE_SUM_BOUND;
            to->sum[0] = pair.sum[half] * steps.step[unit];
            to->sum[1] = pair.sum[half + 1] * steps.step[unit];
            to->unit_sum = to->sum[0] + to->sum[1];
            to->negated_sum[0] = negated[half];
            to->negated_sum[1] = negated[half + 1];
            /* unsigned, because both sums are INT32_MIN if a value is NaN */
            to->negated_unit_sum = (int32_t)((uint32_t)negated[half] + (uint32_t)negated[half + 1]);
        }
    }
}

static void int_prepare(const fkv_activations *in, uint32_t token, uint32_t n_tokens, uint32_t column, uint32_t n_columns) {
    const uint32_t end = (column + n_columns) / UNIT_NUMBERS;
    for (uint32_t t = token; t < token + n_tokens; t++)
        for (uint32_t u = column / UNIT_NUMBERS; u < end; u += PREPARED_UNITS)
            int_prepare_units(in, t, u, in->x + t * in->x_stride + (size_t)u * UNIT_NUMBERS,
                              fkv_min_u32(end - u, PREPARED_UNITS));
}

/* Returns the term that replaces code with code - center in a dot product: -center times the sum of the activations, in all
 * lanes. Returns 0 for kinds with biases. negated_sum: -(sum of the group's activations), in quantization steps. */
FKV_INLINE __m512i center_term(fkv_panel_layout layout, int32_t negated_sum) {
    if (layout.biased) return _mm512_setzero_si512();
    return _mm512_set1_epi32((int32_t)((uint32_t)negated_sum * (uint32_t)fkv_panel_center(layout)));
}

/* Computes the dot products of n_quads quads of codes with the activations of n_tokens tokens, and adds
 * center_terms[t]. The activation bytes start at quad `first` of the unit. vpdpbusd has a latency of five cycles and a throughput
 * of two per cycle, so ten or more independent accumulators keep it busy. With eight tokens, the low-byte accumulators start with
 * 256 times the high-byte results plus center_terms[t]. With fewer tokens, both bytes are accumulated in parallel. */
FKV_INLINE void dot_tokens(int n_tokens, int n_quads, int first, const __m512i *quads, const unit_bytes *bytes,
                           const __m512i *center_terms, vf *dots) {
    const int8_t
        *parts[2 * MAX_REGISTER_TOKENS]; /* addresses of the high activation bytes of each token, then of the low bytes */
    __m512i sums[2 * MAX_REGISTER_TOKENS];
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        parts[t] = bytes[t].high + 4 * first;
        parts[n_tokens + t] = bytes[t].low + 4 * first;
        sums[t] = _mm512_setzero_si512();
        sums[n_tokens + t] = center_terms[t];
    }
    if (n_tokens == MAX_REGISTER_TOKENS) {
        dot_quads(n_tokens, n_quads, quads, parts, sums, sums);
        FKV_UNROLL
        for (int t = 0; t < n_tokens; t++) sums[t] = join_bytes(sums[t], center_terms[t]);
        dot_quads(n_tokens, n_quads, quads, parts + n_tokens, sums, sums);
        FKV_UNROLL
        for (int t = 0; t < n_tokens; t++) dots[t] = _mm512_cvtepi32_ps(sums[t]);
    } else {
        dot_quads(2 * n_tokens, n_quads, quads, parts, sums, sums);
        FKV_UNROLL
        for (int t = 0; t < n_tokens; t++) dots[t] = _mm512_cvtepi32_ps(join_bytes(sums[t], sums[n_tokens + t]));
    }
}

/* Extracts a field of `width` bits (1 or 2) from each of the four codes of quad j, in the layout of panels.h. In each byte of the
 * result, the field starts at bit `at`; the other bits are undefined. */
FKV_INLINE __m512i load_field(int width, int at, int j, const uint8_t *lines) {
    __m512i field = _mm512_loadu_si512(lines + (size_t)(width == 1 ? 0 : j / 4) * FKV_LINE_BYTES);
    int left = at - (width == 1 ? j : j % 4 * 2);
    return left >= 0 ? _mm512_slli_epi32(field, (unsigned)left) : _mm512_srli_epi32(field, (unsigned)-left);
}

/* Unpacks the codes of a unit to one byte each, as 8 quads (see panels.h). `table` is the result of load_table(). */
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
            quads[j] = _mm512_ternarylogic_epi32(quads[j], upper, mask, 0xf8); /* bitwise: quads | (upper & mask) */
        }
    }
    if (layout.table) {
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) quads[j] = _mm512_shuffle_epi8(table, quads[j]);
    }
}

/* Returns the table bytes plus 128, repeated in each 128-bit lane, or zeros for kinds without a table. */
FKV_INLINE __m512i load_table(fkv_panel_layout layout, const int8_t *table) {
    if (!layout.table) return _mm512_setzero_si512();
    __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)0x80));
    return _mm512_broadcast_i32x4(bytes);
}

/* Scales the dot products over one scale group and adds them to the accumulators. The group starts at quad `first` of its unit.
 */
FKV_INLINE void int_product_group(fkv_panel_layout layout, int n_tokens, int first, const __m512i *quads, const uint8_t *halves,
                                  const unit_bytes *bytes, const unit_scaling *scaling, vf *sum) {
    const bool group_is_unit = layout.group == UNIT_NUMBERS;
    vf scale;
    vf bias;
    vf dots[MAX_REGISTER_TOKENS];
    __m512i center_terms[MAX_REGISTER_TOKENS];
    load_affine(layout, halves, &scale, &bias);
    const vf larger = vf_mul(scale, vf_set(CODE_SUM_BOUND));
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++)
        center_terms[t] = center_term(layout, group_is_unit ? scaling[t].negated_unit_sum : scaling[t].negated_sum[first / 4]);
    dot_tokens(n_tokens, (int)layout.group / 4, first, quads, bytes, center_terms, dots);
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        float x_sum = group_is_unit ? scaling[t].unit_sum : scaling[t].sum[first / 4];
        sum[t] = add_group(layout, vf_mul(dots[t], vf_set(scaling[t].step)), larger, bias, x_sum, sum[t]);
    }
}

/* Multiplies one panel by n_tokens tokens of a block, starting at token `t` of the block. The layout and n_tokens are
 * compile-time constants. */
FKV_INLINE void int_product_tokens(int n_tokens, fkv_panel_layout layout, uint32_t n_units, const uint8_t *panel, __m512i table,
                                   const token_block *block, uint32_t t, float *out, size_t out_stride) {
    const int bits = (int)layout.bits;
    const int group_quads = (int)layout.group / 4;
    const uint8_t *halves = panel + fkv_panel_code_bytes(layout, n_units * UNIT_NUMBERS);
    const unit_bytes *bytes = block->bytes + t;
    const unit_scaling *scaling = block->scaling + t;
    vf sum[MAX_REGISTER_TOKENS];
    FKV_UNROLL
    for (int i = 0; i < n_tokens; i++) sum[i] = vf_set(0.0f);
    for (uint32_t u = 0; u < n_units; u++, bytes += block->n_tokens, scaling += block->n_tokens) {
        __m512i quads[UNIT_QUADS];
        FKV_UNROLL
        for (int line = 0; line < bits; line++) FKV_PREFETCH(panel + (size_t)line * FKV_LINE_BYTES + PREFETCH_BYTES);
        load_quads(layout, panel, table, quads);
        panel += (size_t)bits * FKV_LINE_BYTES;
        FKV_UNROLL
        for (int first = 0; first < UNIT_QUADS; first += group_quads) {
            int_product_group(layout, n_tokens, first, quads + first, halves, bytes, scaling, sum);
            halves += fkv_panel_group_bytes(layout);
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
        token_block block = token_block_at(in, token + first);
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
