/* Sealed blocks (src/codec/sealed.h) as floats, over the vector primitives that kernels_body.h is written over; included by it.
 *
 * Keys: tokens are the lanes. 16 tokens are decoded once to floats in L1, a vector for each channel, and every row goes over them
 * with one number of the query at a time: no sum over lanes. Values: 16 tokens are decoded to a slice, which the loops of many
 * rows take. For each (row, token) the order of operations does not depend on the rows and tokens beside it.
 */
#ifndef FKV_SEALED_BODY_H
#define FKV_SEALED_BODY_H

#include "../../codec/sealed.h"

enum { MAX_SEALED_QUADS = FKV_MAX_HEAD_DIM / 4 };

/* ---- codes ---- */

FKV_INLINE uint64_t word_at(const uint8_t *line, int i) {
    uint64_t word;
    memcpy(&word, line + 8 * i, sizeof word);
    return word;
}

/* quads[q] = 64 codes of `n` bits, a byte each: bits [n * q + shift, ...) of each byte of the line. */
FKV_INLINE void spread_line(const uint8_t *line, int n_quads, int bits, int shift, uint8_t (*quads)[FKV_SEALED_LINE]) {
    uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    for (int q = 0; q < n_quads; q++) {
        for (int i = 0; i < 8; i++) {
            uint64_t codes = word_at(line, i) >> (q * bits + shift) & mask;
            memcpy(quads[q] + 8 * i, &codes, sizeof codes);
        }
    }
}

/* codes |= digits of one quad, at bit `to` of their bytes. quad: its number, see fkv_channel_quad(). */
FKV_INLINE void add_digits(const uint8_t *block, uint32_t quad, int to, uint8_t codes[FKV_SEALED_LINE]) {
    const uint8_t *line = block + (size_t)(quad / 4) * FKV_SEALED_LINE;
    for (int i = 0; i < 8; i++) {
        uint64_t digits = word_at(line, i) >> (quad % 4 * 2) & 0x0303030303030303u;
        uint64_t sum = word_at(codes, i) | digits << to;
        memcpy(codes + 8 * i, &sum, sizeof sum);
    }
}

/* Of calibrated keys: digits are joined, a code is a byte whatever its bits. */
FKV_INLINE void calibrated_unit(const fkv_channel_order *order, const uint8_t *block, uint32_t unit,
                                uint8_t (*quads)[FKV_SEALED_LINE]) {
    spread_line(block + (size_t)unit * FKV_SEALED_LINE, 4, 2, 0, quads);
    for (uint32_t d = 1; d < FKV_MAX_DIGITS; d++)
        for (uint32_t q = 0; q < 4 && unit * 16 + q * 4 < order->n[d]; q++)
            add_digits(block, fkv_channel_quad(order, unit * 16 + q * 4, d), (int)(2 * d), quads[q]);
}

/* The codes of 16 tokens and a unit of 16 channels as four quads. block: of the 16 tokens. */
FKV_INLINE void sealed_unit(const fkv_codec *codec, const uint8_t *block, uint32_t unit, uint8_t (*quads)[FKV_SEALED_LINE]) {
    if (codec->channels != NULL) {
        calibrated_unit(codec->channels, block, unit, quads);
        return;
    }
    if (codec->bits == 4) {
        spread_line(block + (size_t)unit * 2 * FKV_SEALED_LINE, 2, 4, 0, quads);
        spread_line(block + (size_t)unit * 2 * FKV_SEALED_LINE + FKV_SEALED_LINE, 2, 4, 0, quads + 2);
        return;
    }
    spread_line(block + (size_t)unit * FKV_SEALED_LINE, 4, 2, 0, quads);
    if (codec->bits == 2) return;
    uint8_t high[4][FKV_SEALED_LINE];
    spread_line(block + (size_t)(codec->dim / 16 + unit / 2) * FKV_SEALED_LINE, 4, 1, unit % 2 == 0 ? 0 : 4, high);
    for (int q = 0; q < 4; q++)
        for (int i = 0; i < FKV_SEALED_LINE; i++) quads[q][i] = (uint8_t)(quads[q][i] | high[q][i] << 2);
}

FKV_INLINE const uint8_t *sealed_block(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token) {
    return part[FKV_PART_CODES] + (size_t)token * codec->row_bytes[FKV_PART_CODES];
}

/* ---- scores ---- */

/* 16 tokens, a vector of them for each channel. */
typedef struct sealed_keys {
    alignas(64) float x[FKV_MAX_HEAD_DIM][FKV_SEALED_TOKENS];
} sealed_keys;

FKV_INLINE void sealed_keys_open(const fkv_codec *codec, const uint8_t *block, const float *scales, const float *biases,
                                 sealed_keys *keys) {
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++) {
        uint8_t quads[4][FKV_SEALED_LINE];
        sealed_unit(codec, block, unit, quads);
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t c = unit * 16 + i;
            vf code[UNIT_VECS];
            vf_load_bits(quads[i / 4], (int)(i % 4) * 8, 255, code);
            for (int v = 0; v < UNIT_VECS; v++)
                vf_store(keys->x[c] + v * VL, vf_fma(vf_set(scales[c]), code[v], vf_set(biases[c])));
        }
    }
}

/* n_rows: a constant. */
FKV_INLINE void sealed_keys_meet(int n_rows, const sealed_keys *keys, const float *q, uint32_t dim, float *scores) {
    enum { MOST_ROWS = 8 };
    vf sum[MOST_ROWS][UNIT_VECS];
    FKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) sum[r][v] = vf_set(0.0f);
    }
    for (uint32_t c = 0; c < dim; c++) {
        vf key[UNIT_VECS];
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) key[v] = vf_load(keys->x[c] + v * VL);
        FKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            vf x = vf_set(q[(size_t)r * dim + c]);
            FKV_UNROLL
            for (int v = 0; v < UNIT_VECS; v++) sum[r][v] = vf_fma(x, key[v], sum[r][v]);
        }
    }
    FKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (int v = 0; v < UNIT_VECS; v++) vf_store(scores + r * FKV_TILE_TOKENS + v * VL, sum[r][v]);
    }
}

static void sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                          const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    (void)prepared;
    enum { MANY = UNIT_VECS == 1 ? 8 : 4 };
    sealed_keys keys;
    alignas(64) float scales[FKV_MAX_HEAD_DIM];
    alignas(64) float biases[FKV_MAX_HEAD_DIM];
    size_t dim = codec->dim;
    widen(codec->type, part[FKV_PART_SCALES], codec->dim, scales);
    widen(codec->type, part[FKV_PART_BIASES], codec->dim, biases);
    for (uint32_t token = 0; token < n_tokens; token += FKV_SEALED_TOKENS) {
        fkv_fetch_some(next, FKV_SEALED_TOKENS);
        sealed_keys_open(codec, sealed_block(codec, part, token), scales, biases, &keys);
        float *to = scores + token;
        uint32_t r = 0;
        for (; r + MANY <= n_rows; r += MANY) sealed_keys_meet(MANY, &keys, q + r * dim, codec->dim, to + r * FKV_TILE_TOKENS);
        for (; r + 4 <= n_rows; r += 4) sealed_keys_meet(4, &keys, q + r * dim, codec->dim, to + r * FKV_TILE_TOKENS);
        for (; r < n_rows; r++) sealed_keys_meet(1, &keys, q + r * dim, codec->dim, to + r * FKV_TILE_TOKENS);
    }
}

/* ---- values ---- */

/* What each code stands for, in 128ths of the norm, and 128 more: a byte without a sign. */
FKV_INLINE void sealed_levels(uint32_t bits, uint8_t levels[16]) {
    const fkv_sealed_book *book = fkv_sealed_book_of(bits);
    uint32_t sign = 1u << (bits - 1);
    for (uint32_t code = 0; code < 16; code++) {
        uint32_t level = book->level[code & (sign - 1)];
        levels[code] = (uint8_t)((code & sign) != 0 ? 128 - level : 128 + level);
    }
}

/* 16 tokens, n of them with their norms. */
FKV_INLINE void sealed_slice(const fkv_codec *codec, const uint8_t *block, const uint8_t levels[16], const float *norms,
                             uint32_t n, slice *s) {
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++) {
        uint8_t quads[4][FKV_SEALED_LINE];
        sealed_unit(codec, block, unit, quads);
        for (int q = 0; q < 4; q++) vb_look_up(levels, quads[q]);
        for (uint32_t t = 0; t < n; t++) {
            vf level[UNIT_VECS];
            vf_load_bits(quads[t / 4], (int)(t % 4) * 8, 255, level);
            vf norm = vf_set(fabsf(norms[t]) * 0x1p-7f);
            for (int v = 0; v < UNIT_VECS; v++)
                vf_store(s->x[t] + unit * 16 + (uint32_t)(v * VL), vf_mul(vf_sub(level[v], vf_set(128.0f)), norm));
        }
    }
}

FKV_INLINE void sealed_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *p, uint32_t n_rows, float *out) {
    slice s;
    uint8_t levels[16];
    alignas(64) float norms[FKV_TILE_TOKENS];
    size_t dim = codec->dim;
    sealed_levels(codec->bits, levels);
    widen(codec->type, part[FKV_PART_SCALES], (uint32_t)fkv_align_up(n_tokens, 16), norms);
    for (uint32_t token = 0; token < n_tokens; token += FKV_SEALED_TOKENS) {
        uint32_t n = fkv_min_u32(FKV_SEALED_TOKENS, n_tokens - token);
        fkv_fetch_some(next, FKV_SEALED_TOKENS);
        sealed_slice(codec, sealed_block(codec, part, token), levels, norms + token, n, &s);
        uint32_t r = 0;
        for (; r + MANY_ROWS <= n_rows; r += MANY_ROWS)
            slice_values_rows(MANY_ROWS, &s, n, p + (size_t)r * FKV_TILE_TOKENS + token, out + r * dim, codec->dim);
        for (; r < n_rows; r++) slice_values_rows(1, &s, n, p + (size_t)r * FKV_TILE_TOKENS + token, out + r * dim, codec->dim);
    }
}

/* Sealed blocks are never written row by row: they have no encode(). */
#define SEALED_CODECS                                                                                                            \
    {FKV_CODEC_SEALED, 4, float_prepare, sealed_scores, NULL, NULL},                                                             \
        {FKV_CODEC_SEALED, 3, float_prepare, sealed_scores, NULL, NULL},                                                         \
        {FKV_CODEC_SEALED, 2, float_prepare, sealed_scores, NULL, NULL},                                                         \
        {FKV_CODEC_CALIBRATED, 4, float_prepare, sealed_scores, NULL, NULL},                                                     \
        {FKV_CODEC_CALIBRATED, 3, float_prepare, sealed_scores, NULL, NULL},                                                     \
        {FKV_CODEC_SEALED_V, 4, NULL, NULL, sealed_values, NULL}, {FKV_CODEC_SEALED_V, 3, NULL, NULL, sealed_values, NULL}, {    \
        FKV_CODEC_SEALED_V, 2, NULL, NULL, sealed_values, NULL                                                                   \
    }

#endif
