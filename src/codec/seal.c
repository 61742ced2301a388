/* Sealing a block in plain C: what every vector kernel must match bit for bit.
 *
 * Owns the arithmetic of sealing; where codes lie is in sealed.c. All in float, every operation rounded once, in this order:
 *
 *   K, for each channel c over the storable numbers x_t of the open block, with the bins of its bits:
 *     scale = (hi - lo) / bins, bias = lo, each rounded to the page type; a scale below FKV_SEALED_SMALLEST is 0; a scale is then
 *     rounded again, to the nearest of seven significant bits, the middle away from 0
 *     code_t = rint((x_t - bias) * (1 / scale)), held within 0 .. bins; 0 where scale is 0
 *
 *   V, for each row over its storable numbers y:
 *     norm = (sum of |y|) / D * start, then FKV_SEALED_REFITS times 128 * (sum of |y| * level) / (sum of level^2) of its own
 * codes norm is held within the limit and rounded to the page type; below FKV_SEALED_SMALLEST it is 0 size of a code: the
 * thresholds below rint(min(|y| * (128 / norm), 127)); sign of a code: y < 0
 *
 * Sums are in 16 lanes, number j in lane j % 16, the lanes then added from first to last. Products and their sums must not be
 * contracted to FMA.
 */
#include "sealed.h"

#include "../base/float16.h"

#include <math.h>

enum { LANES = 16 };

/* The block holds 0 where nothing was put. */
static void put_code(const fkv_codec *codec, uint8_t *block, uint32_t t, uint32_t c, uint32_t code) {
    fkv_sealed_place place[FKV_SEALED_PLACES];
    int n = fkv_sealed_places(codec, t, c, place);
    for (int i = 0; i < n; i++)
        block[place[i].at] |= (uint8_t)((code >> place[i].from & ((1u << place[i].n) - 1u)) << place[i].shift);
}

/* Whole numbers by adding 2^23, as in affine.c; 0 for NaN, which a product of 0 and infinity would be. */
FKV_INLINE uint8_t nearest(float x, float most) {
    x = x > 0.0f ? x : 0.0f;
    x = x < most ? x : most;
    return (uint8_t)fkv_bits_of(x + 0x1p23f);
}

/* A row of the open block, as numbers that can be stored. */
static void open_row(const fkv_block *open, const uint8_t *from, fkv_side side, uint32_t token, float *x) {
    fkv_block_decode(open, from, side, token, x);
    fkv_codec_clean(&open->codec[side], x);
}

uint16_t fkv_sealed_half(fkv_type type, float x) {
    uint16_t half = fkv_f32_to_half(type, x);
    return fabsf(fkv_half_to_f32(type, half)) < FKV_SEALED_SMALLEST ? 0 : half;
}

/* Seven significant bits: scale * (code - 8) of 4 bits is then exact as a float16, which is what prefill on a GPU multiplies. No
 * scale becomes infinite: ranges are at most twice the limit, and bins at least 3. */
static uint16_t key_scale(fkv_type type, float x) {
    uint32_t half = fkv_sealed_half(type, x);
    return (uint16_t)(type == FKV_F16 ? (half + 8) & ~15u : (half + 1) & ~1u);
}

void fkv_sealed_key_lines(const fkv_codec *codec, float *lo, float *hi, uint8_t *scales, uint8_t *biases) {
    for (uint32_t p = 0; p < codec->dim; p++) {
        uint32_t c = fkv_sealed_channel(codec, p);
        uint16_t scale = key_scale(codec->type, (hi[c] - lo[c]) / fkv_sealed_bins(codec, p));
        uint16_t bias = fkv_f32_to_half(codec->type, lo[c] + 0.0f); /* -0 would depend on the order */
        fkv_store_half(scales, p, scale);
        fkv_store_half(biases, p, bias);
        lo[c] = fkv_half_to_f32(codec->type, bias);
        hi[c] = scale == 0 ? 0.0f : 1.0f / fkv_half_to_f32(codec->type, scale);
    }
}

static void seal_keys(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    const fkv_codec *codec = &sealed->codec[FKV_SIDE_K];
    float lo[FKV_MAX_HEAD_DIM] = {0};
    float hi[FKV_MAX_HEAD_DIM] = {0};
    float x[FKV_MAX_HEAD_DIM];
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        open_row(open, from, FKV_SIDE_K, t, x);
        for (uint32_t c = 0; c < codec->dim; c++) {
            lo[c] = t == 0 || x[c] < lo[c] ? x[c] : lo[c];
            hi[c] = t == 0 || x[c] > hi[c] ? x[c] : hi[c];
        }
    }
    fkv_sealed_key_lines(codec, lo, hi, to + sealed->offset[FKV_SIDE_K][FKV_PART_SCALES],
                         to + sealed->offset[FKV_SIDE_K][FKV_PART_BIASES]); /* lo is now the bias, hi the inverse */
    uint32_t row_bytes = codec->row_bytes[FKV_PART_CODES];
    uint8_t *codes = to + sealed->offset[FKV_SIDE_K][FKV_PART_CODES];
    memset(codes, 0, (size_t)open->page_tokens * row_bytes);
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        open_row(open, from, FKV_SIDE_K, t, x);
        uint8_t *block = codes + (size_t)(t - t % FKV_SEALED_TOKENS) * row_bytes;
        for (uint32_t p = 0; p < codec->dim; p++) {
            uint32_t c = fkv_sealed_channel(codec, p);
            put_code(codec, block, t % FKV_SEALED_TOKENS, p, nearest((x[c] - lo[c]) * hi[c], fkv_sealed_bins(codec, p)));
        }
    }
}

float fkv_sealed_sum(const float lane[16]) {
    float sum = lane[0];
    for (uint32_t i = 1; i < LANES; i++) sum += lane[i];
    return sum;
}

static uint32_t size_of(const fkv_sealed_book *book, float y, float inverse) {
    uint8_t m = nearest(fabsf(y) * inverse, 127.0f);
    uint32_t size = 0;
    for (int i = 0; i < FKV_SEALED_LEVELS - 1; i++) size += m > book->above[i];
    return size;
}

float fkv_sealed_inverse(float norm) { return norm < FKV_SEALED_SMALLEST ? 0.0f : 128.0f / norm; }

static float norm_of(const fkv_sealed_book *book, const float *y, uint32_t dim) {
    float lane[LANES] = {0};
    for (uint32_t d = 0; d < dim; d++) lane[d % LANES] += fabsf(y[d]);
    float norm = fkv_sealed_sum(lane) / (float)dim * book->start;
    for (int i = 0; i < FKV_SEALED_REFITS; i++) {
        float inverse = fkv_sealed_inverse(norm);
        float products[LANES] = {0};
        float squares[LANES] = {0}; /* whole numbers below 2^24: exact */
        for (uint32_t d = 0; d < dim; d++) {
            float level = (float)book->level[size_of(book, y[d], inverse)];
            products[d % LANES] += fabsf(y[d]) * level;
            squares[d % LANES] += level * level;
        }
        norm = 128.0f * fkv_sealed_sum(products) / fkv_sealed_sum(squares);
    }
    return norm;
}

static void seal_values(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    const fkv_codec *codec = &sealed->codec[FKV_SIDE_V];
    const fkv_sealed_book *book = fkv_sealed_book_of(codec->bits);
    uint8_t *norms = to + sealed->offset[FKV_SIDE_V][FKV_PART_SCALES];
    uint8_t *codes = to + sealed->offset[FKV_SIDE_V][FKV_PART_CODES];
    uint32_t row_bytes = codec->row_bytes[FKV_PART_CODES];
    memset(codes, 0, (size_t)open->page_tokens * row_bytes);
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        float y[FKV_MAX_HEAD_DIM];
        open_row(open, from, FKV_SIDE_V, t, y);
        float norm = norm_of(book, y, codec->dim);
        float limit = fkv_codec_limit(codec->type);
        uint16_t half = fkv_sealed_half(codec->type, norm < limit ? norm : limit);
        float inverse = fkv_sealed_inverse(fkv_half_to_f32(codec->type, half));
        fkv_store_half(norms, t, half);
        uint8_t *block = codes + (size_t)(t - t % FKV_SEALED_TOKENS) * row_bytes;
        for (uint32_t c = 0; c < codec->dim; c++) {
            uint32_t sign = y[c] < 0.0f ? 1u << (codec->bits - 1) : 0;
            put_code(codec, block, t % FKV_SEALED_TOKENS, c, size_of(book, y[c], inverse) | sign);
        }
    }
}

/* A V that codes rows. */
static void seal_rows(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        float y[FKV_MAX_HEAD_DIM];
        uint8_t *part[FKV_N_PARTS];
        open_row(open, from, FKV_SIDE_V, t, y);
        fkv_block_row(sealed, to, FKV_SIDE_V, t, part);
        fkv_codec_encode(&sealed->codec[FKV_SIDE_V], y, part);
    }
}

void fkv_seal_block(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    FKV_ASSERT(open->page_tokens == sealed->page_tokens && open->page_tokens % FKV_SEALED_TOKENS == 0);
    FKV_ASSERT(sealed->codec[FKV_SIDE_K].kind == FKV_CODEC_SEALED || sealed->codec[FKV_SIDE_K].channels != NULL);
    seal_keys(open, from, sealed, to);
    if (sealed->codec[FKV_SIDE_V].kind == FKV_CODEC_SEALED_V)
        seal_values(open, from, sealed, to);
    else
        seal_rows(open, from, sealed, to);
}
