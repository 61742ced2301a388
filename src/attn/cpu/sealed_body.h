/* Float kernels for sealed blocks (src/codec/sealed.h). They use the vector primitives of kernels_body.h, which includes this
 * file.
 *
 * Keys: each query is multiplied once by the scales of a page. Each lane accumulates the score of one token, so the lanes of an
 * accumulator need not be summed. Values: the weights are multiplied by the norms, and a table maps codes to levels. Decode
 * converts codes to floats in registers, and prefill converts them once and keeps the floats in L1. For each (row, token) pair,
 * the order of operations is the same in decode and prefill and does not depend on other rows and tokens.
 *
 * The midpoint of the code range is subtracted from every code. This keeps the dot products small, so that float rounding errors
 * stay small as well.
 */
#ifndef FKV_SEALED_BODY_H
#define FKV_SEALED_BODY_H

#include "../../codec/sealed.h"

enum { MAX_SEALED_QUADS = FKV_MAX_HEAD_DIM / 4 };

/* ---- codes ---- */

FKV_INLINE uint64_t line_word(const uint8_t *line, int i) {
    uint64_t word;
    memcpy(&word, line + 8 * i, sizeof word);
    return word;
}

/* Unpacks n_quads quads from a 64-byte line, to 64 bytes each, with one code per byte. Quad q occupies bits [bits * q + shift,
 * bits * (q + 1) + shift) of each byte of the line. */
FKV_INLINE void spread_line(const uint8_t *line, int n_quads, int bits, int shift, uint8_t (*quads)[FKV_SEALED_LINE]) {
    uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    for (int q = 0; q < n_quads; q++) {
        for (int i = 0; i < 8; i++) {
            uint64_t codes = line_word(line, i) >> (q * bits + shift) & mask;
            memcpy(quads[q] + 8 * i, &codes, sizeof codes);
        }
    }
}

/* ORs the 2-bit digits of one quad into codes, at bit `to` of each byte. `quad` is an index returned by fkv_channel_quad(). */
FKV_INLINE void or_code_digits(const uint8_t *block, uint32_t quad, int to, uint8_t codes[FKV_SEALED_LINE]) {
    const uint8_t *line = block + (size_t)(quad / 4) * FKV_SEALED_LINE;
    for (int i = 0; i < 8; i++) {
        uint64_t digits = line_word(line, i) >> (quad % 4 * 2) & 0x0303030303030303u;
        uint64_t sum = line_word(codes, i) | digits << to;
        memcpy(codes + 8 * i, &sum, sizeof sum);
    }
}

/* Unpacks 16 channels of calibrated keys. The 2-bit digits of a code are joined into one byte. */
FKV_INLINE void calibrated_unit(const fkv_channel_order *order, const uint8_t *block, uint32_t unit,
                                uint8_t (*quads)[FKV_SEALED_LINE]) {
    spread_line(block + (size_t)unit * FKV_SEALED_LINE, 4, 2, 0, quads);
    for (uint32_t d = 1; d < FKV_MAX_DIGITS; d++)
        for (uint32_t q = 0; q < 4 && unit * 16 + q * 4 < order->n[d]; q++)
            or_code_digits(block, fkv_channel_quad(order, unit * 16 + q * 4, d), (int)(2 * d), quads[q]);
}

/* Unpacks the codes of unit `unit` (16 channels) and 16 tokens as four quads. `block` points to the codes of these 16
 * tokens. */
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

enum {
    TILE_BLOCKS = FKV_TILE_TOKENS / FKV_SEALED_TOKENS,
    FOLD_ROWS = 48, /* maximum number of query rows that are multiplied by the scales of a page at a time */
    PREFILL_KEY_ROWS = UNIT_VECS == 1 ? 8 : 6, /* query rows per iteration, which covers PREFILL_KEY_BLOCKS blocks of 16 tokens */
    PREFILL_KEY_BLOCKS = UNIT_VECS == 1 ? 2 : 1,
    DECODE_KEY_ROWS = 4, /* query rows per iteration; DECODE_KEY_SUMS accumulator vectors hide the FMA latency */
    DECODE_KEY_SUMS = UNIT_VECS == 4 ? 16 : 8,
    MAX_KEY_SUMS = 16 /* maximum of (number of rows) * (number of blocks) per iteration */
};

/* Query rows multiplied by the scales of a page. The score of token t is bias plus the sum over channels c of x_c * code_tc. */
typedef struct sealed_queries {
    alignas(
        64) float x[FOLD_ROWS][FKV_MAX_HEAD_DIM + 16]; /* q_c * scale_c; padding places consecutive rows in different L1 sets */
    float bias[FOLD_ROWS];                             /* sum of q_c * bias_c over all channels c */
} sealed_queries;

FKV_INLINE void sealed_queries_open(const float *scales, const float *biases, const float *q, uint32_t n_rows, uint32_t dim,
                                    sealed_queries *queries) {
    for (uint32_t r = 0; r < n_rows; r++) {
        vf bias = vf_set(0.0f);
        for (uint32_t c = 0; c < dim; c += VL) {
            vf x = vf_load(q + (size_t)r * dim + c);
            vf_store(queries->x[r] + c, vf_mul(x, vf_load(scales + c)));
            bias = vf_fma(x, vf_load(biases + c), bias);
        }
        queries->bias[r] = vf_reduce_add(bias);
    }
}

/* Describes a range of channels with the same code width: its end (exclusive) and the midpoint of its codes. */
typedef struct sealed_span {
    uint32_t end;
    uint32_t middle;
} sealed_span;

FKV_INLINE sealed_span sealed_span_at(const fkv_codec *codec, uint32_t c) {
    if (codec->channels == NULL) return (sealed_span){codec->dim, 1u << (codec->bits - 1)};
    uint32_t digits = fkv_channel_digits(codec->channels, c);
    return (sealed_span){digits > 1 ? codec->channels->n[digits - 1] : codec->dim, 1u << (2 * digits - 1)};
}

/* Loads the scales and biases of a page, adjusted for kernels that subtract the midpoint from every code: the biases compensate
 * for the midpoint, and the scales include the factor VF_BYTE_UNIT that vf_load_byte() requires. */
FKV_INLINE void sealed_lines_open(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *restrict scales,
                                  float *restrict biases) {
    widen_halves(codec->type, part[FKV_PART_SCALES], codec->dim, scales);
    widen_halves(codec->type, part[FKV_PART_BIASES], codec->dim, biases);
    for (uint32_t c = 0; c < codec->dim;) {
        sealed_span span = sealed_span_at(codec, c);
        for (; c < span.end; c++) {
            biases[c] += scales[c] * (float)span.middle;
            scales[c] *= VF_BYTE_UNIT;
        }
    }
}

/* Codes of a block of 16 tokens as signed bytes, relative to the midpoint, in quads of channels. */
typedef uint8_t sealed_bytes[MAX_SEALED_QUADS][FKV_SEALED_LINE];

FKV_INLINE void sealed_bytes_open(const fkv_codec *codec, const uint8_t *block, sealed_bytes bytes) {
    FKV_ASSERT(codec->dim / 16 > 0);
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++) sealed_unit(codec, block, unit, bytes + 4 * unit);
    for (uint32_t c = 0; c < codec->dim;) {
        sealed_span span = sealed_span_at(codec, c);
        uint8_t *end = bytes[span.end / 4];
        for (uint8_t *at = bytes[c / 4]; at < end; at++) *at = (uint8_t)(*at - span.middle);
        c = span.end;
    }
}

/* Codes of PREFILL_KEY_BLOCKS blocks of 16 tokens, converted to float. */
typedef struct sealed_keys {
    alignas(64) float x[FKV_MAX_HEAD_DIM][PREFILL_KEY_BLOCKS][FKV_SEALED_TOKENS];
} sealed_keys;

FKV_INLINE void sealed_keys_open(const sealed_bytes *codes, uint32_t dim, sealed_keys *keys) {
    for (uint32_t c = 0; c < dim; c += 4) {
        FKV_UNROLL
        for (uint32_t i = 0; i < 4 * PREFILL_KEY_BLOCKS; i++) {
            vf code[UNIT_VECS];
            vf_load_byte(codes[i / 4][c / 4], (int)(i % 4), code);
            FKV_UNROLL
            for (int v = 0; v < UNIT_VECS; v++) vf_store(keys->x[c + i % 4][i / 4] + v * VL, code[v]);
        }
    }
}

/* Computes the scores of n_blocks blocks of 16 tokens for n_rows query rows, starting at row r. Both counts are compile-time
 * constants. Codes are read from `keys`, or from `codes` if keys is NULL. Prefetches are spread over the four quarters of the
 * head dimension, because too many prefetches at once would occupy all line fill buffers. */
FKV_INLINE void sealed_score_blocks(uint32_t n_rows, uint32_t n_blocks, const sealed_bytes *codes, const sealed_keys *keys,
                                    fkv_fetch *next, const sealed_queries *queries, uint32_t r, uint32_t dim, float *scores) {
    const uint32_t step = keys == NULL ? 4 : 1;
    vf sum[MAX_KEY_SUMS][UNIT_VECS];
    FKV_UNROLL
    for (uint32_t i = 0; i < n_rows * n_blocks * UNIT_VECS; i++) sum[i / UNIT_VECS][i % UNIT_VECS] = vf_set(0.0f);
    uint32_t c = 0;
    for (uint32_t end = dim / 4; end <= dim; end += dim / 4) {
        fkv_fetch_some(next, n_blocks * FKV_SEALED_TOKENS / 4);
        for (; c < end; c += step) {
            FKV_UNROLL
            for (uint32_t i = 0; i < step * n_blocks; i++) {
                uint32_t at = c + i / n_blocks;
                vf key[UNIT_VECS];
                if (keys == NULL) vf_load_byte(codes[i % n_blocks][c / 4], (int)(i / n_blocks), key);
                FKV_UNROLL
                for (int v = 0; keys != NULL && v < UNIT_VECS; v++) key[v] = vf_load(keys->x[at][i % n_blocks] + v * VL);
                FKV_UNROLL
                for (uint32_t row = 0; row < n_rows; row++) {
                    vf x = vf_set(queries->x[r + row][at]);
                    vf *to = sum[row * n_blocks + i % n_blocks];
                    FKV_UNROLL
                    for (int v = 0; v < UNIT_VECS; v++) to[v] = vf_fma(x, key[v], to[v]);
                }
            }
        }
    }
    FKV_UNROLL
    for (uint32_t row = 0; row < n_rows; row++) {
        FKV_UNROLL
        for (uint32_t i = 0; i < n_blocks * UNIT_VECS; i++)
            vf_store(scores + (r + row) * FKV_TILE_TOKENS + i * VL,
                     vf_add(sum[row * n_blocks + i / UNIT_VECS][i % UNIT_VECS], vf_set(queries->bias[r + row])));
    }
}

/* Computes the scores of n_rows query rows with the decode loop. n_rows is a compile-time constant. */
FKV_INLINE void sealed_decode(uint32_t n_rows, const sealed_bytes *codes, fkv_fetch *next, uint32_t n_tokens,
                              const sealed_queries *queries, uint32_t r, uint32_t dim, float *scores) {
    const uint32_t most = DECODE_KEY_SUMS / UNIT_VECS / n_rows;
    const uint32_t n_blocks = most >= 4 ? 4 : most >= 2 ? 2 : 1;
    for (uint32_t token = 0; token < n_tokens; token += n_blocks * FKV_SEALED_TOKENS, codes += n_blocks)
        sealed_score_blocks(n_rows, n_blocks, codes, NULL, next, queries, r, dim, scores + token);
}

/* Computes scores with the prefill loop, for complete groups of PREFILL_KEY_ROWS query rows. Returns the number of rows computed.
 */
FKV_INLINE uint32_t sealed_prefill(const sealed_bytes *codes, fkv_fetch *next, uint32_t n_tokens, const sealed_queries *queries,
                                   uint32_t n_rows, uint32_t dim, float *scores) {
    fkv_fetch nothing = {.n_ranges = 0};
    sealed_keys keys;
    uint32_t n = n_rows / PREFILL_KEY_ROWS * PREFILL_KEY_ROWS;
    for (uint32_t token = 0; token < n_tokens; token += PREFILL_KEY_BLOCKS * FKV_SEALED_TOKENS, codes += PREFILL_KEY_BLOCKS) {
        sealed_keys_open(codes, dim, &keys);
        for (uint32_t r = 0; r < n; r += PREFILL_KEY_ROWS)
            sealed_score_blocks(PREFILL_KEY_ROWS, PREFILL_KEY_BLOCKS, NULL, &keys, r == 0 ? next : &nothing, queries, r, dim,
                                scores + token);
    }
    return n;
}

static void sealed_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                          const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    (void)prepared;
    fkv_fetch nothing = {.n_ranges = 0};
    sealed_queries queries;
    alignas(64) sealed_bytes codes[TILE_BLOCKS];
    alignas(64) float scales[FKV_MAX_HEAD_DIM];
    alignas(64) float biases[FKV_MAX_HEAD_DIM];
    uint32_t dim = codec->dim;
    sealed_lines_open(codec, part, scales, biases);
    for (uint32_t block = 0; block < TILE_BLOCKS; block++) {
        if (block * FKV_SEALED_TOKENS < n_tokens)
            sealed_bytes_open(codec, sealed_block(codec, part, block * FKV_SEALED_TOKENS), codes[block]);
        else /* zeroed, because an iteration over several blocks may also read this block */
            memset(codes[block], 0, (size_t)dim / 4 * FKV_SEALED_LINE);
    }
    for (uint32_t row = 0; row < n_rows; row += FOLD_ROWS, scores += FOLD_ROWS * FKV_TILE_TOKENS, next = &nothing) {
        uint32_t n = fkv_min_u32(FOLD_ROWS, n_rows - row);
        uint32_t r = 0;
        sealed_queries_open(scales, biases, q + (size_t)row * dim, n, dim, &queries);
        if (n >= 2 * PREFILL_KEY_ROWS) {
            r = sealed_prefill(codes, next, n_tokens, &queries, n, dim, scores);
            next = &nothing;
        }
        for (; r + DECODE_KEY_ROWS <= n; r += DECODE_KEY_ROWS, next = &nothing)
            sealed_decode(DECODE_KEY_ROWS, codes, next, n_tokens, &queries, r, dim, scores);
        if (n - r == 3) sealed_decode(3, codes, next, n_tokens, &queries, r, dim, scores);
        if (n - r == 2) sealed_decode(2, codes, next, n_tokens, &queries, r, dim, scores);
        if (n - r == 1) sealed_decode(1, codes, next, n_tokens, &queries, r, dim, scores);
    }
}

/* ---- values ---- */

/* Number of units (16 values each) per iteration. For four tokens, the units fill half the registers. */
enum { DECODE_VALUE_UNITS = UNIT_VECS == 1 ? 4 : 1 };

/* Returns a table with the signed level of each code, as a multiple of norm / 128. */
FKV_INLINE vf_book16 sealed_levels(uint32_t bits) {
    const fkv_sealed_book *book = fkv_sealed_book_of(bits);
    uint32_t sign = 1u << (bits - 1);
    float levels[16];
    for (uint32_t code = 0; code < 16; code++) {
        float level = (float)book->level[code & (sign - 1)];
        levels[code] = (code & sign) != 0 ? -level : level;
    }
    return vf_book16_make(levels);
}

/* Loads the absolute norms of a tile, divided by 128. Norms of tokens beyond n_tokens are set to 0, even if their slots contain
 * arbitrary bytes. */
FKV_INLINE void sealed_norms_open(const fkv_codec *codec, const uint8_t *from, uint32_t n_tokens, float norms[FKV_TILE_TOKENS]) {
    uint32_t width = (uint32_t)fkv_align_up(n_tokens, FKV_SEALED_TOKENS);
    widen_halves(codec->type, from, width, norms);
    for (uint32_t t = 0; t < width; t++) norms[t] = t < n_tokens ? fabsf(norms[t]) * 0x1p-7f : 0.0f;
}

/* weights[r][t]: softmax weight p times norm, for the 16 tokens t of a block and each row r */
typedef float sealed_weights[FKV_SEALED_TOKENS];
FKV_INLINE void sealed_weigh_rows(const float *norms, const float *p, uint32_t n_rows, sealed_weights *weights) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t t = 0; t < FKV_SEALED_TOKENS; t += VL)
            vf_store(weights[r] + t, vf_mul(vf_load(p + r * FKV_TILE_TOKENS + t), vf_load(norms + t)));
}

/* Adds the weighted values of four tokens to every output row, for n_units units (16 values each). n_units is a compile-time
 * constant. `quads` points to the first unit; consecutive units are 4 quads apart. */
FKV_INLINE void sealed_quad_values(uint32_t n_units, const vf_book16 *levels, const uint8_t (*quads)[FKV_SEALED_LINE],
                                   const float *weights, uint32_t n_rows, float *out, uint32_t dim) {
    vf level[DECODE_VALUE_UNITS][4][UNIT_VECS];
    FKV_UNROLL
    for (uint32_t u = 0; u < n_units; u++) vf_look_up16(levels, quads[4 * u], level[u]);
    for (uint32_t r = 0; r < n_rows; r++, weights += FKV_SEALED_TOKENS, out += dim) {
        vf sum[DECODE_VALUE_UNITS * UNIT_VECS];
        FKV_UNROLL
        for (uint32_t v = 0; v < n_units * UNIT_VECS; v++) sum[v] = vf_load(out + v * VL);
        FKV_UNROLL
        for (int t = 0; t < 4; t++) {
            vf weight = vf_set(weights[t]);
            FKV_UNROLL
            for (uint32_t v = 0; v < n_units * UNIT_VECS; v++)
                sum[v] = vf_fma(weight, level[v / UNIT_VECS][t][v % UNIT_VECS], sum[v]);
        }
        FKV_UNROLL
        for (uint32_t v = 0; v < n_units * UNIT_VECS; v++) vf_store(out + v * VL, sum[v]);
    }
}

/* Adds the weighted values of a block of 16 tokens to every output row, for n_units units of 16 values (a compile-time constant),
 * starting at `unit`. */
FKV_INLINE void sealed_decode_values(uint32_t n_units, const fkv_codec *codec, const vf_book16 *levels, const uint8_t *block,
                                     fkv_fetch *next, uint32_t unit, const sealed_weights *weights, uint32_t n_rows, float *out) {
    uint8_t quads[4 * DECODE_VALUE_UNITS][FKV_SEALED_LINE];
    fkv_fetch_some(next, fkv_ceil_div(n_units * FKV_SEALED_TOKENS, codec->dim / 16));
    for (uint32_t u = 0; u < n_units; u++) sealed_unit(codec, block, unit + u, quads + 4 * u);
    for (uint32_t q = 0; q < 4; q++)
        sealed_quad_values(n_units, levels, (const uint8_t(*)[FKV_SEALED_LINE])quads + q, weights[0] + 4 * q, n_rows,
                           out + unit * 16, codec->dim);
}

FKV_INLINE void sealed_slice(const fkv_codec *codec, const vf_book16 *levels, const uint8_t *block, slice *s) {
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++) {
        uint8_t quads[4][FKV_SEALED_LINE];
        sealed_unit(codec, block, unit, quads);
        FKV_UNROLL
        for (uint32_t q = 0; q < 4; q++) {
            vf level[4][UNIT_VECS];
            vf_look_up16(levels, quads[q], level);
            FKV_UNROLL
            for (uint32_t i = 0; i < 4 * UNIT_VECS; i++)
                vf_store(s->x[4 * q + i / UNIT_VECS] + unit * 16 + i % UNIT_VECS * VL, level[i / UNIT_VECS][i % UNIT_VECS]);
        }
    }
}

FKV_INLINE void sealed_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                              const float *p, uint32_t n_rows, float *out) {
    slice s;
    vf_book16 levels = sealed_levels(codec->bits);
    alignas(64) float norms[FKV_TILE_TOKENS];
    alignas(64) sealed_weights weights[FKV_MAX_TILE_ROWS];
    uint32_t n_units = codec->dim / 16;
    sealed_norms_open(codec, part[FKV_PART_SCALES], n_tokens, norms);
    for (uint32_t token = 0; token < n_tokens; token += FKV_SEALED_TOKENS) {
        const uint8_t *block = sealed_block(codec, part, token);
        sealed_weigh_rows(norms + token, p + token, n_rows, weights);
        if (n_rows >= PREFILL_MIN_ROWS) {
            fkv_fetch_some(next, FKV_SEALED_TOKENS);
            sealed_slice(codec, &levels, block, &s);
            slice_values_all(&s, FKV_SEALED_TOKENS, weights[0], FKV_SEALED_TOKENS, n_rows, out, codec->dim);
            continue;
        }
        uint32_t unit = 0;
        for (; unit + DECODE_VALUE_UNITS <= n_units; unit += DECODE_VALUE_UNITS)
            sealed_decode_values(DECODE_VALUE_UNITS, codec, &levels, block, next, unit, weights, n_rows, out);
        for (; unit < n_units; unit++) sealed_decode_values(1, codec, &levels, block, next, unit, weights, n_rows, out);
    }
}

/* There is no encode(), because sealed blocks are not written row by row. */
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
