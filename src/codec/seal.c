/* Scalar reference for sealing. Every vector and GPU kernel must produce bit-identical blocks.
 *
 * This file defines the arithmetic; sealed.c defines where codes are stored. All arithmetic is in float, rounded after every
 * operation, in this order:
 *
 *   K: for each channel c, where x_t are the storable values of the open block and bins is the largest code of the channel:
 *     lo, hi = min(x_t), max(x_t) over all rows t except outliers (see FKV_SEALED_OUTLIER)
 *     scale = (hi - lo) / bins and bias = lo, rounded to the page type; a scale below FKV_SEALED_SMALLEST becomes 0
 *     scale is rounded again to 7 significant bits, ties away from 0
 *     code_t = clamp(rint((x_t - bias) * (1 / scale)), 0, bins); 0 if scale is 0
 *
 *   V: for each row, where y are its storable values:
 *     norm = (sum of |y|) / D * start; then repeat FKV_SEALED_REFITS times: norm = 128 * (sum of |y| * level) / (sum of level^2)
 *     norm is clamped to the limit and rounded to the page type; below FKV_SEALED_SMALLEST it becomes 0
 *     magnitude code = number of thresholds below rint(min(|y| * (128 / norm), 127)); sign bit = y < 0
 *
 * Sides with a row codec: each row of storable values is encoded separately.
 *
 * Sums use 16 lanes, with element j in lane j % 16. The lanes are added from first to last. Products and sums must not be
 * contracted to FMA.
 */
#include "sealed.h"

#include "../base/float16.h"

#include <math.h>

enum { LANES = 16 };

/* Stores a code in a block. The bits of the block that receive the code must be 0. */
static void put_sealed_code(const fkv_codec *codec, uint8_t *block, uint32_t t, uint32_t c, uint32_t code) {
    fkv_sealed_place place[FKV_SEALED_PLACES];
    int n = fkv_sealed_places(codec, t, c, place);
    for (int i = 0; i < n; i++)
        block[place[i].at] |= (uint8_t)((code >> place[i].from & ((1u << place[i].n) - 1u)) << place[i].shift);
}

/* Returns the integer from 0 to `most` that is nearest to x, rounded as in affine.c. Returns 0 if x is NaN, for example the
 * product of 0 and infinity. */
FKV_INLINE uint8_t nearest_up_to(float x, float most) {
    x = x > 0.0f ? x : 0.0f;
    x = x < most ? x : most;
    return (uint8_t)fkv_bits_of(x + 0x1p23f);
}

/* Decodes a row of the open block and clamps its values to the range that pages can store. */
static void decode_open_row(const fkv_block *open, const uint8_t *from, fkv_side side, uint32_t token, float *x) {
    fkv_block_decode(open, from, side, token, x);
    fkv_codec_clean(&open->codec[side], x);
}

uint16_t fkv_sealed_half(fkv_type type, float x) {
    uint16_t half = fkv_f32_to_half(type, x);
    return fabsf(fkv_half_to_f32(type, half)) < FKV_SEALED_SMALLEST ? 0 : half;
}

/* Returns a scale rounded to 7 significant bits. For 4-bit codes, scale * (code - 8) is then exact in float16, which is the
 * operand type of the GPU prefill kernels. Rounding cannot overflow, because the range of a channel is at most twice
 * fkv_codec_limit() and is divided by at least 3 bins. */
static uint16_t key_scale(fkv_type type, float x) {
    uint32_t half = fkv_sealed_half(type, x);
    return (uint16_t)(type == FKV_F16 ? (half + 8) & ~15u : (half + 1) & ~1u);
}

void fkv_sealed_key_lines(const fkv_codec *codec, float *lo, float *hi, uint8_t *scales, uint8_t *biases) {
    for (uint32_t p = 0; p < codec->dim; p++) {
        uint32_t c = fkv_sealed_channel(codec, p);
        uint16_t scale = key_scale(codec->type, (hi[c] - lo[c]) / fkv_sealed_bins(codec, p));
        /* adding 0 turns -0 into +0; otherwise, the sign of a zero minimum would depend on the order of comparisons */
        uint16_t bias = fkv_f32_to_half(codec->type, lo[c] + 0.0f);
        fkv_store_half(scales, p, scale);
        fkv_store_half(biases, p, bias);
        lo[c] = fkv_half_to_f32(codec->type, bias);
        hi[c] = scale == 0 ? 0.0f : 1.0f / fkv_half_to_f32(codec->type, scale);
    }
}

/* Returns the largest magnitude of a row. */
static float row_magnitude(const float *x, uint32_t dim) {
    float largest = 0.0f;
    for (uint32_t c = 0; c < dim; c++) largest = fabsf(x[c]) > largest ? fabsf(x[c]) : largest;
    return largest;
}

/* Sets outlier[t] for each outlier row. Returns false if there are none. */
static bool find_outlier_rows(const float *magnitude, uint32_t n_tokens, bool *outlier) {
    bool any = false;
    for (uint32_t t = 0; t < n_tokens; t++) {
        uint32_t n_smaller = 0;
        for (uint32_t s = 0; magnitude[t] > FKV_SEALED_OUTLIER && s < n_tokens; s++)
            n_smaller += magnitude[s] * FKV_SEALED_OUTLIER_RATIO < magnitude[t];
        outlier[t] = 2 * n_smaller >= n_tokens;
        any = any || outlier[t];
    }
    return any;
}

void fkv_sealed_key_ranges(const fkv_block *open, const uint8_t *from, float *lo, float *hi) {
    uint32_t dim = open->codec[FKV_SIDE_K].dim;
    float magnitude[FKV_SEALED_MAX_PAGE] = {0};
    bool outlier[FKV_SEALED_MAX_PAGE] = {false};
    float x[FKV_MAX_HEAD_DIM];
    bool again = true;
    FKV_ASSERT(open->page_tokens <= FKV_SEALED_MAX_PAGE);
    for (uint32_t pass = 0; again; pass++) {
        for (uint32_t c = 0; c < dim; c++) {
            lo[c] = INFINITY;
            hi[c] = -INFINITY;
        }
        for (uint32_t t = 0; t < open->page_tokens; t++) {
            if (outlier[t]) continue;
            decode_open_row(open, from, FKV_SIDE_K, t, x);
            magnitude[t] = row_magnitude(x, dim);
            for (uint32_t c = 0; c < dim; c++) {
                lo[c] = x[c] < lo[c] ? x[c] : lo[c];
                hi[c] = x[c] > hi[c] ? x[c] : hi[c];
            }
        }
        again = pass == 0 && find_outlier_rows(magnitude, open->page_tokens, outlier);
    }
}

static void seal_key_block(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    const fkv_codec *codec = &sealed->codec[FKV_SIDE_K];
    float lo[FKV_MAX_HEAD_DIM] = {0};
    float hi[FKV_MAX_HEAD_DIM] = {0};
    float x[FKV_MAX_HEAD_DIM];
    fkv_sealed_key_ranges(open, from, lo, hi);
    fkv_sealed_key_lines(
        codec, lo, hi, to + sealed->offset[FKV_SIDE_K][FKV_PART_SCALES],
        to + sealed->offset[FKV_SIDE_K][FKV_PART_BIASES]); /* from here on, lo holds the biases and hi the inverse scales */
    uint32_t row_bytes = codec->row_bytes[FKV_PART_CODES];
    uint8_t *codes = to + sealed->offset[FKV_SIDE_K][FKV_PART_CODES];
    memset(codes, 0, (size_t)open->page_tokens * row_bytes);
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        decode_open_row(open, from, FKV_SIDE_K, t, x);
        uint8_t *block = codes + (size_t)(t - t % FKV_SEALED_TOKENS) * row_bytes;
        for (uint32_t p = 0; p < codec->dim; p++) {
            uint32_t c = fkv_sealed_channel(codec, p);
            put_sealed_code(codec, block, t % FKV_SEALED_TOKENS, p,
                            nearest_up_to((x[c] - lo[c]) * hi[c], fkv_sealed_bins(codec, p)));
        }
    }
}

float fkv_sealed_sum(const float lane[16]) {
    float sum = lane[0];
    for (uint32_t i = 1; i < LANES; i++) sum += lane[i];
    return sum;
}

static uint32_t magnitude_code(const fkv_sealed_book *book, float y, float inverse) {
    uint8_t m = nearest_up_to(fabsf(y) * inverse, 127.0f);
    uint32_t size = 0;
    for (int i = 0; i < FKV_SEALED_LEVELS - 1; i++) size += m > book->above[i];
    return size;
}

float fkv_sealed_inverse(float norm) { return norm < FKV_SEALED_SMALLEST ? 0.0f : 128.0f / norm; }

static float fit_value_norm(const fkv_sealed_book *book, const float *y, uint32_t dim) {
    float lane[LANES] = {0};
    for (uint32_t d = 0; d < dim; d++) lane[d % LANES] += fabsf(y[d]);
    float norm = fkv_sealed_sum(lane) / (float)dim * book->start;
    for (int i = 0; i < FKV_SEALED_REFITS; i++) {
        float inverse = fkv_sealed_inverse(norm);
        float products[LANES] = {0};
        float squares[LANES] = {0}; /* every partial sum is an integer below 2^24, which float represents exactly */
        for (uint32_t d = 0; d < dim; d++) {
            float level = (float)book->level[magnitude_code(book, y[d], inverse)];
            products[d % LANES] += fabsf(y[d]) * level;
            squares[d % LANES] += level * level;
        }
        norm = 128.0f * fkv_sealed_sum(products) / fkv_sealed_sum(squares);
    }
    return norm;
}

static void seal_value_block(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    const fkv_codec *codec = &sealed->codec[FKV_SIDE_V];
    const fkv_sealed_book *book = fkv_sealed_book_of(codec->bits);
    uint8_t *norms = to + sealed->offset[FKV_SIDE_V][FKV_PART_SCALES];
    uint8_t *codes = to + sealed->offset[FKV_SIDE_V][FKV_PART_CODES];
    uint32_t row_bytes = codec->row_bytes[FKV_PART_CODES];
    memset(codes, 0, (size_t)open->page_tokens * row_bytes);
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        float y[FKV_MAX_HEAD_DIM];
        decode_open_row(open, from, FKV_SIDE_V, t, y);
        float norm = fit_value_norm(book, y, codec->dim);
        float limit = fkv_codec_limit(codec->type);
        uint16_t half = fkv_sealed_half(codec->type, norm < limit ? norm : limit);
        float inverse = fkv_sealed_inverse(fkv_half_to_f32(codec->type, half));
        fkv_store_half(norms, t, half);
        uint8_t *block = codes + (size_t)(t - t % FKV_SEALED_TOKENS) * row_bytes;
        for (uint32_t c = 0; c < codec->dim; c++) {
            uint32_t sign = y[c] < 0.0f ? 1u << (codec->bits - 1) : 0;
            put_sealed_code(codec, block, t % FKV_SEALED_TOKENS, c, magnitude_code(book, y[c], inverse) | sign);
        }
    }
}

void fkv_seal_rows(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to, fkv_side side,
                   fkv_row_encoder *encode) {
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        float x[FKV_MAX_HEAD_DIM];
        uint8_t *part[FKV_N_PARTS];
        decode_open_row(open, from, side, t, x);
        fkv_block_row(sealed, to, side, t, part);
        encode(&sealed->codec[side], x, part);
    }
}

void fkv_seal_block(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    FKV_ASSERT(open->page_tokens == sealed->page_tokens && open->page_tokens % FKV_SEALED_TOKENS == 0);
    FKV_ASSERT(sealed->codec[FKV_SIDE_K].kind != FKV_CODEC_CALIBRATED || sealed->codec[FKV_SIDE_K].channels != NULL);
    if (fkv_codec_is_sealed(&sealed->codec[FKV_SIDE_K]))
        seal_key_block(open, from, sealed, to);
    else
        fkv_seal_rows(open, from, sealed, to, FKV_SIDE_LATENT, fkv_codec_encode);
    if (fkv_codec_is_sealed(&sealed->codec[FKV_SIDE_V]))
        seal_value_block(open, from, sealed, to);
    else
        fkv_seal_rows(open, from, sealed, to, FKV_SIDE_V, fkv_codec_encode);
}
