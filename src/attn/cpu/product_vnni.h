/* The product of affine panels with rows of activations in integers (vpdpbusd), the score side of attention with weights for
 * keys: the lanes are the 16 rows of a panel, and its dwords are quads already. Panels of floats take product_body.h.
 *
 * Activations are rounded to 16 bits in two bytes with a step from the largest of their 32 columns (a unit), because a few
 * channels of a model can be a thousand times the others. out += dot * (scale * step) + bias * sum(x), group by group, with the
 * sum of the rounded numbers: what the rounding leaves then meets a weight, not a code. Sums of code * x are exact, and for one
 * output the order of the groups is fixed, so neither tokens nor panels beside it can change a bit.
 *
 * Prepared: for each block of up to 16 tokens [units, tokens, 64]: 32 high bytes, 32 low ones; behind all blocks, as many
 * [units, tokens] of four floats.
 */
#include "quads_avx512.h"

enum { MAX_TOKENS = 8 }; /* that meet a panel's codes while they are in registers */

typedef struct unit_facts {
    float step;
    float sum[2]; /* of the first 16 numbers and of the others, after rounding */
    float both;   /* sum[0] + sum[1] */
} unit_facts;

typedef struct unit_bytes {
    int8_t high[UNIT_NUMBERS];
    int8_t low[UNIT_NUMBERS];
} unit_bytes;

_Static_assert(sizeof(unit_bytes) + sizeof(unit_facts) == 80, "as fkv_activation_bytes() counts");

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

static void prepare_unit(const float *x, unit_bytes *bytes, unit_facts *facts) {
    vf number[2] = {vf_load(x), vf_load(x + VL)};
    vf size[2] = {_mm512_abs_ps(number[0]), _mm512_abs_ps(number[1])};
    __mmask16 not_finite =
        _mm512_cmp_ps_mask(size[0], vf_set(INFINITY), _CMP_NLT_UQ) | _mm512_cmp_ps_mask(size[1], vf_set(INFINITY), _CMP_NLT_UQ);
    float largest = vf_reduce_max(vf_max(size[0], size[1]));
    vf inverse = vf_set(largest > SMALLEST ? LARGEST / largest : 0.0f);
    facts->step = not_finite != 0 ? NAN : largest / LARGEST; /* such a token has no answer, and must not seem to have one */
    for (int h = 0; h < 2; h++) {
        __m512i whole = _mm512_cvtps_epi32(vf_mul(number[h], inverse));
        bytes2 both = split(whole);
        _mm_storeu_si128((__m128i *)(bytes->high + h * 16), both.high);
        _mm_storeu_si128((__m128i *)(bytes->low + h * 16), both.low);
        facts->sum[h] = (float)_mm512_reduce_add_epi32(whole) * facts->step;
    }
    facts->both = facts->sum[0] + facts->sum[1];
}

static void int_prepare_tokens(const fkv_activations *in, uint32_t token, uint32_t n_tokens) {
    uint32_t n_units = in->n_cols / UNIT_NUMBERS;
    for (uint32_t t = token; t < token + n_tokens; t++) {
        token_block block = block_at(in, t - t % FKV_BLOCK_TOKENS);
        const float *x = in->x + t * in->x_stride;
        for (uint32_t u = 0; u < n_units; u++) {
            size_t at = (size_t)u * block.n_tokens + t % FKV_BLOCK_TOKENS;
            prepare_unit(x + (size_t)u * UNIT_NUMBERS, &block.bytes[at], &block.facts[at]);
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

/* One group of 4 or 8 quads, which begins `first` quads into its unit. */
FKV_INLINE void int_product_group(int n_tokens, int n_quads, int first, const __m512i *quads, const uint8_t *halves,
                                  const unit_bytes *bytes, const unit_facts *facts, vf *sum) {
    vf scale;
    vf bias;
    vf dots[MAX_TOKENS];
    vf_load_f16(halves, &scale);
    vf_load_f16(halves + HALVES_BYTES, &bias);
    dot_tokens(n_tokens, n_quads, first, quads, bytes, dots);
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        float x = n_quads == UNIT_QUADS ? facts[t].both : facts[t].sum[first / 4];
        sum[t] = vf_fma(bias, vf_set(x), sum[t]);
        sum[t] = vf_fma(dots[t], vf_mul(scale, vf_set(facts[t].step)), sum[t]);
    }
}

/* n_tokens tokens of a block from `t` on, one panel. bits, group and n_tokens are constants. */
FKV_INLINE void int_product_tokens(int n_tokens, int bits, int group, uint32_t n_units, const uint8_t *panel,
                                   const token_block *block, uint32_t t, float *out, size_t out_stride) {
    vf sum[MAX_TOKENS];
    const unit_bytes *bytes = block->bytes + t;
    const unit_facts *facts = block->facts + t;
    int n_lines = group * bits / 32;
    FKV_UNROLL
    for (int i = 0; i < n_tokens; i++) sum[i] = vf_set(0.0f);
    for (uint32_t u = 0; u < n_units; u++, bytes += block->n_tokens, facts += block->n_tokens) {
        FKV_UNROLL
        for (int first = 0; first < UNIT_QUADS; first += group / 4) {
            __m512i quads[UNIT_QUADS];
            FKV_UNROLL
            for (int j = 0; j < n_lines; j++, panel += QUAD_BYTES) {
                FKV_PREFETCH(panel + PREFETCH_BYTES);
                quads[j] = _mm512_loadu_si512(panel);
            }
            if (bits == 4) split_halves(n_lines, quads);
            int_product_group(n_tokens, group / 4, first, quads, panel, bytes, facts, sum);
            FKV_PREFETCH(panel + PREFETCH_BYTES);
            panel += 2 * (size_t)HALVES_BYTES;
        }
    }
    FKV_UNROLL
    for (int i = 0; i < n_tokens; i++) vf_store(out + (size_t)i * out_stride, sum[i]);
}

FKV_INLINE void int_product_form(int bits, int group, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                 uint32_t n_tokens, float *out, size_t out_stride) {
    uint32_t n_units = in->n_cols / UNIT_NUMBERS;
    for (uint32_t first = 0; first < n_tokens; first += FKV_BLOCK_TOKENS) {
        token_block block = block_at(in, token + first);
        for (uint32_t i = 0; i < p->n_panels; i++) {
            const uint8_t *panel = p->first + i * p->panel_bytes;
            float *to = out + first * out_stride + (size_t)i * FKV_PANEL_LANES;
            uint32_t t = 0;
#define TAKE(n)                                                                                                                  \
    for (; t + (n) <= block.n_tokens; t += (n))                                                                                  \
    int_product_tokens(n, bits, group, n_units, panel, &block, t, to + t * out_stride, out_stride)
            TAKE(8);
            TAKE(4);
            TAKE(2);
            TAKE(1);
#undef TAKE
        }
    }
}

static void int_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                        size_t out_stride) {
    if (panels->form == FKV_PANEL_AFFINE4)
        int_product_form(4, 32, panels, in, token, n_tokens, out, out_stride);
    else if (panels->form == FKV_PANEL_AFFINE8 && panels->group == 32)
        int_product_form(8, 32, panels, in, token, n_tokens, out, out_stride);
    else if (panels->form == FKV_PANEL_AFFINE8)
        int_product_form(8, 16, panels, in, token, n_tokens, out, out_stride);
    else
        kernel_product(panels, in, token, n_tokens, out, out_stride);
}
