/* Vector version of fkv_seal_block(). It uses the vector primitives of kernels_body.h, which includes this file. It performs the
 * arithmetic of src/codec/seal.c on 16 values at a time and produces bit-identical blocks. Open blocks that are not 8-bit affine
 * are sealed by the scalar reference. */
#ifndef FKV_SEAL_BODY_H
#define FKV_SEAL_BODY_H

#include "../../codec/sealed.h"

/* Packs the codes of 16 tokens and 16 channels, given as four quads. Inverse of sealed_unit(). */
FKV_INLINE void seal_unit(const fkv_codec *codec, uint8_t (*quads)[FKV_SEALED_LINE], uint32_t unit, uint8_t *block) {
    uint8_t *line = block + (size_t)unit * FKV_SEALED_LINE * (codec->bits == 4 ? 2 : 1);
    if (codec->bits == 4) {
        for (int i = 0; i < FKV_SEALED_LINE; i++) line[i] = (uint8_t)(quads[0][i] | quads[1][i] << 4);
        for (int i = 0; i < FKV_SEALED_LINE; i++) line[FKV_SEALED_LINE + i] = (uint8_t)(quads[2][i] | quads[3][i] << 4);
        return;
    }
    for (int i = 0; i < FKV_SEALED_LINE; i++)
        line[i] = (uint8_t)((quads[0][i] & 3) | (quads[1][i] & 3) << 2 | (quads[2][i] & 3) << 4 | (quads[3][i] & 3) << 6);
    if (codec->bits == 2) return;
    line = block + (size_t)(codec->dim / 16 + unit / 2) * FKV_SEALED_LINE;
    int shift = unit % 2 == 0 ? 0 : 4;
    for (int i = 0; i < FKV_SEALED_LINE; i++) {
        int high = quads[0][i] >> 2 | quads[1][i] >> 2 << 1 | quads[2][i] >> 2 << 2 | quads[3][i] >> 2 << 3;
        line[i] = (uint8_t)((shift == 0 ? 0 : line[i]) | high << shift);
    }
}

/* Loads 16 values of a row of the open block and clamps them to the range that pages can store. */
FKV_INLINE void seal_load(const tile *t, uint32_t token, uint32_t unit, vf limit, vf x[UNIT_VECS]) {
    vf value[BLOCK_TOKENS][CHUNK_VECS];
    vf minus_limit = vf_sub(vf_set(0.0f), limit);
    decode_block(FORM_8, 1, 1, 1, t, token, unit, value);
    for (int v = 0; v < UNIT_VECS; v++) x[v] = vf_min(vf_max(vf_not_nan(value[0][v]), minus_limit), limit);
}

/* The K or V rows of the open block, read FKV_TILE_TOKENS tokens at a time. */
typedef struct seal_source {
    const fkv_block *block;
    const uint8_t *bytes;
    fkv_side side;
    tile t;
} seal_source;

static void seal_source_at(seal_source *s, uint32_t token) {
    const uint8_t *part[FKV_N_PARTS];
    const fkv_codec *codec = &s->block->codec[s->side];
    for (int p = 0; p < FKV_N_PARTS; p++) part[p] = s->bytes + s->block->offset[s->side][p] + (size_t)token * codec->row_bytes[p];
    tile_open(&s->t, codec, part, NULL, fkv_min_u32(FKV_TILE_TOKENS, s->block->page_tokens - token));
}

/* ---- keys ---- */

enum { SEAL_ROW_BYTES = FKV_MAX_HEAD_DIM };

static void seal_ranges(seal_source *s, float *lo, float *hi) {
    vf limit = vf_set(fkv_codec_limit(s->block->codec[s->side].type));
    uint32_t dim = s->block->codec[s->side].dim;
    for (uint32_t c = 0; c < dim; c++) {
        lo[c] = INFINITY;
        hi[c] = -INFINITY;
    }
    for (uint32_t token = 0; token < s->block->page_tokens; token += FKV_TILE_TOKENS) {
        uint32_t n = fkv_min_u32(FKV_TILE_TOKENS, s->block->page_tokens - token);
        seal_source_at(s, token);
        for (uint32_t unit = 0; unit < dim / 16; unit++) {
            vf low[UNIT_VECS];
            vf high[UNIT_VECS];
            for (int v = 0; v < UNIT_VECS; v++) {
                low[v] = vf_load(lo + unit * 16 + (uint32_t)(v * VL));
                high[v] = vf_load(hi + unit * 16 + (uint32_t)(v * VL));
            }
            for (uint32_t t = 0; t < n; t++) {
                vf x[UNIT_VECS];
                seal_load(&s->t, t, unit, limit, x);
                for (int v = 0; v < UNIT_VECS; v++) {
                    low[v] = vf_min(x[v], low[v]);
                    high[v] = vf_max(x[v], high[v]);
                }
            }
            for (int v = 0; v < UNIT_VECS; v++) {
                vf_store(lo + unit * 16 + (uint32_t)(v * VL), low[v]);
                vf_store(hi + unit * 16 + (uint32_t)(v * VL), high[v]);
            }
        }
    }
}

/* Returns whether the magnitude of any value exceeds FKV_SEALED_OUTLIER, so that its row may be an outlier. */
static bool may_have_outliers(const float *lo, const float *hi, uint32_t dim) {
    bool any = false;
    for (uint32_t c = 0; c < dim; c++) any |= hi[c] > FKV_SEALED_OUTLIER || lo[c] < -FKV_SEALED_OUTLIER;
    return any;
}

/* Quantization parameters, indexed by channel. */
typedef struct seal_lines {
    alignas(64) float bias[FKV_MAX_HEAD_DIM]; /* channel minimum, which fkv_sealed_key_lines() replaces with the bias */
    alignas(64) float inverse[FKV_MAX_HEAD_DIM];
    alignas(64) float bins[FKV_MAX_HEAD_DIM];
} seal_lines;

/* Quantizes unit `unit` (16 channels) of 16 tokens, starting at `token` of the tile, to one byte per code. */
FKV_INLINE void seal_key_codes(const seal_source *s, uint32_t token, uint32_t unit, const seal_lines *lines, vf limit,
                               uint8_t (*codes)[SEAL_ROW_BYTES]) {
    for (uint32_t t = 0; t < FKV_SEALED_TOKENS; t++) {
        vf x[UNIT_VECS];
        seal_load(&s->t, token + t, unit, limit, x);
        for (int v = 0; v < UNIT_VECS; v++) {
            uint32_t at = unit * 16 + (uint32_t)(v * VL);
            vf place = vf_mul(vf_sub(x[v], vf_load(lines->bias + at)), vf_load(lines->inverse + at));
            x[v] = vf_round(vf_min(vf_max(place, vf_set(0.0f)), vf_load(lines->bins + at)));
        }
        vf_store_u8(x, codes[t] + unit * 16);
    }
}

/* Gathers the codes of 16 channels as four quads. The channels are at positions [16 * unit, 16 * unit + 16) of the channel
 * order. */
FKV_INLINE void seal_key_quads(const fkv_channel_order *order, uint8_t (*codes)[SEAL_ROW_BYTES], uint32_t unit,
                               uint8_t (*quads)[FKV_SEALED_LINE]) {
    for (uint32_t t = 0; t < FKV_SEALED_TOKENS; t++) {
        for (uint32_t q = 0; q < 4; q++) {
            const uint8_t *row = codes[t];
            if (order == NULL) {
                memcpy(quads[q] + 4 * t, row + unit * 16 + 4 * q, 4);
                continue;
            }
            const uint16_t *channel = order->channel + unit * 16 + 4 * q;
            for (int i = 0; i < 4; i++) quads[q][4 * t + (uint32_t)i] = row[channel[i]];
        }
    }
}

/* Packs calibrated codes as 2-bit digits. Inverse of calibrated_unit(). The caller zeroes the planes of digits 1 and 2. */
FKV_INLINE void seal_digits(const fkv_channel_order *order, uint8_t (*quads)[FKV_SEALED_LINE], uint32_t unit, uint8_t *block) {
    uint8_t *line = block + (size_t)unit * FKV_SEALED_LINE;
    for (int i = 0; i < FKV_SEALED_LINE; i++)
        line[i] = (uint8_t)((quads[0][i] & 3) | (quads[1][i] & 3) << 2 | (quads[2][i] & 3) << 4 | (quads[3][i] & 3) << 6);
    for (uint32_t d = 1; d < FKV_MAX_DIGITS; d++) {
        for (uint32_t q = 0; q < 4 && unit * 16 + q * 4 < order->n[d]; q++) {
            uint32_t quad = fkv_channel_quad(order, unit * 16 + q * 4, d);
            line = block + (size_t)(quad / 4) * FKV_SEALED_LINE;
            int shift = (int)(quad % 4 * 2);
            for (int i = 0; i < FKV_SEALED_LINE; i++) line[i] = (uint8_t)(line[i] | (quads[q][i] >> 2 * d & 3) << shift);
        }
    }
}

static void kernel_seal_keys(seal_source *s, const fkv_block *sealed, uint8_t *to) {
    const fkv_codec *codec = &sealed->codec[FKV_SIDE_K];
    uint8_t *codes = to + sealed->offset[FKV_SIDE_K][FKV_PART_CODES];
    vf limit = vf_set(fkv_codec_limit(codec->type));
    uint32_t row_bytes = codec->row_bytes[FKV_PART_CODES];
    seal_lines lines;
    for (uint32_t p = 0; p < codec->dim; p++) lines.bins[fkv_sealed_channel(codec, p)] = fkv_sealed_bins(codec, p);
    seal_ranges(s, lines.bias, lines.inverse);
    if (may_have_outliers(lines.bias, lines.inverse, codec->dim))
        fkv_sealed_key_ranges(s->block, s->bytes, lines.bias, lines.inverse);
    fkv_sealed_key_lines(codec, lines.bias, lines.inverse, to + sealed->offset[FKV_SIDE_K][FKV_PART_SCALES],
                         to + sealed->offset[FKV_SIDE_K][FKV_PART_BIASES]);
    for (uint32_t token = 0; token < s->block->page_tokens; token += FKV_SEALED_TOKENS) {
        if (token % FKV_TILE_TOKENS == 0) seal_source_at(s, token);
        uint8_t *block = codes + (size_t)token * row_bytes;
        uint8_t rows[FKV_SEALED_TOKENS][SEAL_ROW_BYTES];
        for (uint32_t unit = 0; unit < codec->dim / 16; unit++)
            seal_key_codes(s, token % FKV_TILE_TOKENS, unit, &lines, limit, rows);
        if (codec->channels != NULL) memset(block, 0, (size_t)FKV_SEALED_TOKENS * row_bytes);
        for (uint32_t unit = 0; unit < codec->dim / 16; unit++) {
            uint8_t quads[4][FKV_SEALED_LINE];
            seal_key_quads(codec->channels, rows, unit, quads);
            if (codec->channels != NULL)
                seal_digits(codec->channels, quads, unit, block);
            else
                seal_unit(codec, quads, unit, block);
        }
    }
}

/* ---- values ---- */

/* Computes the magnitude codes of a row, one byte each, from the absolute values y. */
FKV_INLINE void seal_sizes(const fkv_sealed_book *book, const float *y, uint32_t dim, float inverse, uint8_t *sizes) {
    uint8_t m[SEAL_ROW_BYTES];
    for (uint32_t d = 0; d < dim; d += 16) {
        vf x[UNIT_VECS];
        for (int v = 0; v < UNIT_VECS; v++)
            x[v] = vf_round(vf_min(vf_mul(vf_load(y + d + (uint32_t)(v * VL)), vf_set(inverse)), vf_set(127.0f)));
        vf_store_u8(x, m + d);
    }
    memset(sizes, 0, dim);
    for (int i = 0; i < FKV_SEALED_LEVELS - 1; i++) {
        uint8_t above = book->above[i];
        if (above == 255) break;
        for (uint32_t d = 0; d < dim; d++) sizes[d] = (uint8_t)(sizes[d] + (m[d] > above));
    }
}

FKV_INLINE float seal_norm(const fkv_sealed_book *book, const float *y, uint32_t dim) {
    alignas(64) float sum[3][16]; /* sums of |y|, |y| * level and level^2, each with 16 partial sums */
    uint8_t table[16] = {0};
    memcpy(table, book->level, sizeof book->level);
    vf lane[UNIT_VECS];
    for (int v = 0; v < UNIT_VECS; v++) lane[v] = vf_set(0.0f);
    for (uint32_t d = 0; d < dim; d += 16)
        for (int v = 0; v < UNIT_VECS; v++) lane[v] = vf_add(lane[v], vf_load(y + d + (uint32_t)(v * VL)));
    for (int v = 0; v < UNIT_VECS; v++) vf_store(sum[0] + v * VL, lane[v]);
    float norm = fkv_sealed_sum(sum[0]) / (float)dim * book->start;
    for (int i = 0; i < FKV_SEALED_REFITS; i++) {
        uint8_t levels[SEAL_ROW_BYTES + 64];
        vf squares[UNIT_VECS];
        seal_sizes(book, y, dim, fkv_sealed_inverse(norm), levels);
        memset(levels + dim, 0, 64);
        for (uint32_t d = 0; d < dim; d += 64) vb_look_up(table, levels + d);
        for (int v = 0; v < UNIT_VECS; v++) lane[v] = squares[v] = vf_set(0.0f);
        for (uint32_t d = 0; d < dim; d += 16) {
            vf level[UNIT_VECS];
            vf_decode(8, levels + d, vf_affine_make(8, 1.0f, 0.0f), level);
            for (int v = 0; v < UNIT_VECS; v++) {
                lane[v] = vf_add(lane[v], vf_mul(vf_load(y + d + (uint32_t)(v * VL)), level[v]));
                squares[v] = vf_add(squares[v], vf_mul(level[v], level[v]));
            }
        }
        for (int v = 0; v < UNIT_VECS; v++) {
            vf_store(sum[1] + v * VL, lane[v]);
            vf_store(sum[2] + v * VL, squares[v]);
        }
        norm = 128.0f * fkv_sealed_sum(sum[1]) / fkv_sealed_sum(sum[2]);
    }
    return norm;
}

/* Quantizes one value row to codes, one byte each, and returns the row's norm. */
static uint16_t seal_row(const fkv_codec *codec, const seal_source *s, uint32_t token, uint8_t *codes) {
    const fkv_sealed_book *book = fkv_sealed_book_of(codec->bits);
    float limit = fkv_codec_limit(codec->type);
    uint8_t sign = (uint8_t)(1u << (codec->bits - 1));
    alignas(64) float y[FKV_MAX_HEAD_DIM];
    uint8_t signs[SEAL_ROW_BYTES];
    for (uint32_t unit = 0; unit < codec->dim / 16; unit++) {
        vf x[UNIT_VECS];
        seal_load(&s->t, token, unit, vf_set(limit), x);
        for (int v = 0; v < UNIT_VECS; v++) vf_store(y + unit * 16 + (uint32_t)(v * VL), x[v]);
    }
    for (uint32_t d = 0; d < codec->dim; d++) signs[d] = y[d] < 0.0f ? sign : 0;
    for (uint32_t d = 0; d < codec->dim; d++) y[d] = fabsf(y[d]);
    float norm = seal_norm(book, y, codec->dim);
    uint16_t half = fkv_sealed_half(codec->type, norm < limit ? norm : limit);
    seal_sizes(book, y, codec->dim, fkv_sealed_inverse(fkv_half_to_f32(codec->type, half)), codes);
    for (uint32_t d = 0; d < codec->dim; d++) codes[d] |= signs[d];
    return half;
}

static void kernel_seal_values(seal_source *s, const fkv_block *sealed, uint8_t *to) {
    const fkv_codec *codec = &sealed->codec[FKV_SIDE_V];
    uint8_t *codes = to + sealed->offset[FKV_SIDE_V][FKV_PART_CODES];
    uint8_t *norms = to + sealed->offset[FKV_SIDE_V][FKV_PART_SCALES];
    for (uint32_t token = 0; token < s->block->page_tokens; token += FKV_SEALED_TOKENS) {
        uint8_t rows[FKV_SEALED_TOKENS][SEAL_ROW_BYTES];
        if (token % FKV_TILE_TOKENS == 0) seal_source_at(s, token);
        for (uint32_t t = 0; t < FKV_SEALED_TOKENS; t++)
            fkv_store_half(norms, token + t, seal_row(codec, s, token % FKV_TILE_TOKENS + t, rows[t]));
        uint8_t *block = codes + (size_t)token * codec->row_bytes[FKV_PART_CODES];
        for (uint32_t unit = 0; unit < codec->dim / 16; unit++) {
            uint8_t quads[4][FKV_SEALED_LINE];
            for (uint32_t q = 0; q < 4; q++) {
                for (uint32_t n = 0; n < 16; n++) {
                    uint32_t at = unit * 16 + n;
                    uint32_t dword = (uint32_t)rows[4 * q][at] | (uint32_t)rows[4 * q + 1][at] << 8 |
                                     (uint32_t)rows[4 * q + 2][at] << 16 | (uint32_t)rows[4 * q + 3][at] << 24;
                    memcpy(quads[q] + 4 * n, &dword, 4);
                }
            }
            seal_unit(codec, quads, unit, block);
        }
    }
}

static void kernel_seal(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to) {
    if (sealed->codec[FKV_SIDE_K].kind == FKV_CODEC_AFFINE) {
        fkv_seal_rows(open, from, sealed, to, FKV_SIDE_LATENT, affine_encode);
        fkv_seal_rows(open, from, sealed, to, FKV_SIDE_ROPE, fkv_codec_encode);
        return;
    }
    bool plain = sealed->codec[FKV_SIDE_V].kind != FKV_CODEC_SEALED_V;
    for (int side = 0; side < FKV_N_SIDES; side++)
        plain = plain || open->codec[side].kind != FKV_CODEC_AFFINE || open->codec[side].bits != 8;
    if (plain) {
        fkv_seal_block(open, from, sealed, to);
        return;
    }
    seal_source k = {.block = open, .bytes = from, .side = FKV_SIDE_K};
    seal_source v = {.block = open, .bytes = from, .side = FKV_SIDE_V};
    kernel_seal_keys(&k, sealed, to);
    kernel_seal_values(&v, sealed, to);
}

#endif
