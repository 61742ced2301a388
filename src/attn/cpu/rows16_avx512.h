/* Softmax and weight quantization for up to 16 query rows at once, used by the AMX kernels. A single reduction handles all rows.
 * Results are bit-identical to those of kernel_softmax() and weigh(), because the lanes of each row are reduced in the same tree
 * order. */
#ifndef FKV_ROWS16_AVX512_H
#define FKV_ROWS16_AVX512_H

#include "../../base/simd/fold_avx512.h"

#include "kernels_vnni.h"

enum { BLOCK_ROWS = 16 };

/* Computes x * 256 with a byte shuffle, because shifts would compete with float operations for an execution port. */
FKV_INLINE __m512i times_256(__m512i x) {
    return _mm512_shuffle_epi8(x, _mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080));
}

/* ---- softmax ---- */

/* Computes exp(x), bit-identical to vf_exp(). x is not clamped, because lanes with x < -87 are set to 0 at the end. */
FKV_INLINE vf exp_weight(vf x) {
    vf n;
    vf y = exp_factor(x, &n);
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vf_set(-87.0f), _CMP_NLT_UQ), y, n);
}

/* First step of kernel_softmax() for a tile whose tokens are all visible to n_rows <= n query rows. Updates state.max and
 * rescales the sum of each row. Returns a bit mask of the rows whose state.max increased. `factor` receives the factors by which
 * softmax_rescale() must multiply the outputs of these rows. n is a compile-time constant. */
FKV_INLINE uint32_t softmax_largest(int n, const float *scores, uint32_t n_rows, fkv_softmax state, float factor[BLOCK_ROWS]) {
    __mmask16 there = (__mmask16)((1u << n_rows) - 1);
    vf lanes[BLOCK_ROWS];
    FKV_UNROLL
    for (int r = 0; r < n; r++) lanes[r] = vf_set(-INFINITY);
    for (uint32_t r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) lanes[r] = vf_max(vf_load(scores + r * FKV_TILE_TOKENS + t), lanes[r]);
    }
    vf before = _mm512_maskz_loadu_ps(there, state.max);
    vf now = fold_rows(FOLD_MAX, n, lanes);
    __mmask16 grown = _mm512_mask_cmp_ps_mask(there, now, vf_add(before, vf_set(MAX_SLACK)), _CMP_GT_OQ);
    if (grown == 0) return 0;
    now = _mm512_mask_mov_ps(before, grown, now);
    vf_store(factor, vf_exp(vf_sub(before, now)));
    vf sum = _mm512_maskz_loadu_ps(there, state.sum);
    _mm512_mask_storeu_ps(state.max, there, now);
    _mm512_mask_storeu_ps(state.sum, there, _mm512_mask_mul_ps(sum, grown, sum, vf_load(factor)));
    return grown;
}

FKV_INLINE void softmax_rescale(uint32_t grown, const float *factor, uint32_t dim, float *out) {
    for (; grown != 0; grown &= grown - 1) {
        uint32_t r = (uint32_t)__builtin_ctz(grown);
        scale_row(out + (size_t)r * dim, dim, factor[r]);
    }
}

/* For each query row, sums the lanes of its register, which hold partial sums of softmax weights, and adds the result to
 * state.sum. Overwrites `lanes`. */
FKV_INLINE void softmax_add(int n, uint32_t n_rows, vf *lanes, fkv_softmax state) {
    __mmask16 there = (__mmask16)((1u << n_rows) - 1);
    vf sum = vf_add(_mm512_maskz_loadu_ps(there, state.sum), fold_rows(FOLD_SUM, n, lanes));
    _mm512_mask_storeu_ps(state.sum, there, sum);
}

/* Replaces scores with softmax weights and adds the weights to state.sum. */
FKV_INLINE void softmax_weigh(int n, float *scores, uint32_t n_rows, fkv_softmax state) {
    vf lanes[BLOCK_ROWS];
    FKV_UNROLL
    for (int r = 0; r < n; r++) lanes[r] = vf_set(0.0f);
    for (uint32_t r = 0; r < n_rows; r++) {
        vf base = vf_set(state.max[r]);
        FKV_UNROLL
        for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) {
            vf p = exp_weight(vf_sub(vf_load(scores + r * FKV_TILE_TOKENS + t), base));
            vf_store(scores + r * FKV_TILE_TOKENS + t, p);
            lanes[r] = vf_add(lanes[r], p);
        }
    }
    softmax_add(n, n_rows, lanes, state);
}

FKV_INLINE void softmax_block(int n, float *scores, uint32_t n_rows, uint32_t dim, fkv_softmax state) {
    float factor[BLOCK_ROWS];
    uint32_t grown = softmax_largest(n, scores, n_rows, state, factor);
    softmax_rescale(grown, factor, dim, state.out);
    softmax_weigh(n, scores, n_rows, state);
}

static bool all_visible(const fkv_row_mask *masks, uint32_t n_rows) {
    bool all = true;
    for (uint32_t r = 0; r < n_rows; r++) all &= masks[r].end == FKV_TILE_TOKENS && masks[r].begin <= masks[r].sinks;
    return all;
}

static void rows16_softmax(float *scores, uint32_t width, const fkv_row_mask *masks, uint32_t n_rows, uint32_t dim, float softcap,
                           fkv_softmax state) {
    for (uint32_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        uint32_t block_rows = fkv_min_u32(BLOCK_ROWS, n_rows - row);
        float *block = scores + (size_t)row * FKV_TILE_TOKENS;
        fkv_softmax rows = {state.max + row, state.sum + row, state.out + (size_t)row * dim};
        if (softcap > 0.0f || !all_visible(masks + row, block_rows))
            kernel_softmax(block, width, masks + row, block_rows, dim, softcap, rows);
        else if (block_rows == BLOCK_ROWS)
            softmax_block(16, block, BLOCK_ROWS, dim, rows);
        else if (block_rows == 4)
            softmax_block(4, block, 4, dim, rows);
        else if (block_rows < 4)
            softmax_block(4, block, block_rows, dim, rows);
        else
            softmax_block(16, block, block_rows, dim, rows);
    }
}

/* ---- weights ---- */

/* Quantized weights of up to 16 query rows for one scale group. */
typedef struct row_weights {
    alignas(64) int8_t high[BLOCK_ROWS][FKV_TILE_TOKENS];
    alignas(64) int8_t low[BLOCK_ROWS][FKV_TILE_TOKENS];
    alignas(64) float step[BLOCK_ROWS];
    alignas(64) float offset[BLOCK_ROWS]; /* sum over tokens of softmax weight p * token_affine.offset */
    alignas(64) int32_t zero[BLOCK_ROWS]; /* sum over tokens of weight * token_affine.zero */
} row_weights;

/* 64 integers of up to 16 bits each, to be split into low and high bytes. When they are packed to bytes, dword 4 * L + k holds
 * integers 16 * k + 4 * L to 16 * k + 4 * L + 3. The pack instructions produce this order. */
typedef struct packed_words {
    __m512i words01;
    __m512i words23;
} packed_words;

FKV_INLINE packed_words pack_words(const __m512i whole[4]) {
    return (packed_words){_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3])};
}
FKV_INLINE __m512i low_bytes(packed_words x) {
    __m512i byte = _mm512_set1_epi16(255);
    return _mm512_packus_epi16(_mm512_and_si512(x.words01, byte), _mm512_and_si512(x.words23, byte));
}
/* Returns the high byte of each integer, such that the integer equals 256 * high + low, where low is a signed byte. */
FKV_INLINE __m512i high_bytes(packed_words x) {
    __m512i half = _mm512_set1_epi16(128);
    return _mm512_packus_epi16(_mm512_srli_epi16(_mm512_add_epi16(x.words01, half), 8),
                               _mm512_srli_epi16(_mm512_add_epi16(x.words23, half), 8));
}

/* Returns the index of the dword in which packed_words stores quad `quad` (four consecutive tokens). */
FKV_INLINE uint32_t quad_place(uint32_t quad) { return quad % 4 * 4 + quad / 4; }

/* Quantizes weights like weigh(), for up to 16 rows. n_vecs is the number of vectors of 16 tokens per row. */
FKV_INLINE void rows16_weigh(uint32_t n_vecs, row_weights *w, const token_affine *f, uint32_t group, const float *p,
                             uint32_t n_rows) {
    __m512i zeros[4];
    FKV_UNROLL
    for (uint32_t b = 0; b < 4; b++) zeros[b] = _mm512_cvtepu8_epi32(load16(f->zero[group] + b * 16));
    __m512i zero = low_bytes(pack_words(zeros));
    vf largest[BLOCK_ROWS];
    vf offset[BLOCK_ROWS];
    vf taken[BLOCK_ROWS]; /* sums over tokens of weight * zero code, as integers */
    alignas(64) float weight[BLOCK_ROWS][FKV_TILE_TOKENS];
    enum { LARGER_MAGNITUDE = 0x0b }; /* operand of _mm512_range_ps that selects the maximum of the absolute values */
    FKV_UNROLL
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) largest[r] = offset[r] = taken[r] = vf_set(0.0f);
    for (uint32_t r = 0; r < n_rows; r++) {
        const float *row = p + (size_t)r * FKV_TILE_TOKENS;
        vf most = vf_set(0.0f);
        vf sum = vf_set(0.0f);
        FKV_UNROLL
        for (uint32_t b = 0; b < n_vecs; b++) {
            vf probability = vf_load(row + b * 16);
            vf product = vf_mul(probability, vf_load(f->scale[group] + b * 16));
            vf_store(weight[r] + b * 16, product);
            most = _mm512_range_ps(most, product, LARGER_MAGNITUDE);
            sum = vf_fma(probability, vf_load(f->offset[group] + b * 16), sum);
        }
        largest[r] = most;
        offset[r] = sum;
    }
    alignas(64) float inverse[BLOCK_ROWS];
    vf most = fold_rows(FOLD_MAX, BLOCK_ROWS, largest);
    vf_store(inverse, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, vf_set(SMALLEST), _CMP_GT_OQ), vf_set(LARGEST), most));
    vf_store(w->step, vf_div(most, vf_set(LARGEST)));
    vf_store(w->offset, fold_rows(FOLD_SUM, BLOCK_ROWS, offset));
    for (uint32_t r = 0; r < n_rows; r++) {
        __m512i whole[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++) {
            whole[b] = _mm512_setzero_si512();
            if (b >= n_vecs) continue;
            whole[b] = _mm512_cvtps_epi32(vf_mul(vf_load(weight[r] + b * 16), vf_set(inverse[r])));
        }
        packed_words words = pack_words(whole);
        __m512i high = high_bytes(words);
        __m512i low = low_bytes(words);
        _mm512_store_si512(w->high[r], high);
        _mm512_store_si512(w->low[r], low);
        taken[r] = _mm512_castsi512_ps(join_bytes(_mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, high),
                                                  _mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, low)));
    }
    _mm512_store_si512(w->zero, _mm512_castps_si512(fold_rows(FOLD_INT_SUM, BLOCK_ROWS, taken)));
}

#endif
