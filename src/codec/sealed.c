/* Sealed blocks: the codec definitions for K and V, and the positions of codes in a block. seal.c creates the blocks. */
#include "sealed.h"

#include "../base/float16.h"

#include <math.h>

/* Lloyd-Max levels of a Gaussian, scaled so that the largest level is 127. Thresholds are the midpoints between adjacent levels.
 */
static const fkv_sealed_book books[] = {
    [2] = {{38, 127}, {82, 255, 255, 255, 255, 255, 255}, 1.9079f},
    [3] = {{14, 45, 79, 127}, {29, 62, 103, 255, 255, 255, 255}, 2.7184f},
    [4] = {{6, 18, 31, 44, 58, 75, 96, 127}, {12, 24, 37, 51, 66, 85, 111}, 3.4518f},
};

const fkv_sealed_book *fkv_sealed_book_of(uint32_t bits) {
    FKV_ASSERT(bits >= 2 && bits <= 4);
    return &books[bits];
}

/* ---- codecs ---- */

static const fkv_codec_name sealed_names[] = {{"s4", 4}, {"s3", 3}, {"s2", 2}, {NULL, 0}};

static fkv_status check_sealed_config(fkv_codec_config config) {
    FKV_REQUIRE(config.bits >= 2 && config.bits <= 4, FKV_BAD_CONFIG,
                "unsupported width of %u bits for sealed codecs: expected 4, 3 or 2", config.bits);
    return FKV_OK;
}

/* Returns the number of code bytes per token. The high bits of 3-bit codes are stored in a separate plane of 64-byte lines. A
 * line of this plane covers 32 channels, so half of the last line is unused if D is an odd multiple of 16. */
static uint32_t sealed_code_bytes(const fkv_codec *codec) {
    uint32_t units = codec->dim / 16;
    uint32_t lines = codec->bits == 4 ? 2 * units : codec->bits == 2 ? units : units + fkv_ceil_div(units, 2);
    return lines * FKV_SEALED_LINE / FKV_SEALED_TOKENS;
}

static void lay_out_sealed_keys(fkv_codec *codec) {
    codec->row_bytes[FKV_PART_CODES] = sealed_code_bytes(codec);
    codec->page_bytes[FKV_PART_SCALES] = codec->page_bytes[FKV_PART_BIASES] = codec->dim * 2;
}

static void lay_out_sealed_values(fkv_codec *codec) {
    codec->row_bytes[FKV_PART_CODES] = sealed_code_bytes(codec);
    codec->row_bytes[FKV_PART_SCALES] = 2;
}

const fkv_codec_functions fkv_codec_sealed = {.names = sealed_names,
                                              .sides = FKV_ON_K,
                                              .check = check_sealed_config,
                                              .lay_out = lay_out_sealed_keys,
                                              .decode_at = fkv_sealed_decode};
const fkv_codec_functions fkv_codec_sealed_v = {.names = sealed_names,
                                                .sides = FKV_ON_V,
                                                .rotates = true,
                                                .check = check_sealed_config,
                                                .lay_out = lay_out_sealed_values,
                                                .decode_at = fkv_sealed_decode};

/* ---- code positions ---- */

/* Returns the offset, in bytes, of byte i of dword `lane` in the given line (64 bytes). */
static uint32_t line_byte_offset(uint32_t line, uint32_t lane, uint32_t i) { return line * FKV_SEALED_LINE + lane * 4 + i; }

static int digit_places(const fkv_channel_order *order, uint32_t t, uint32_t p, fkv_sealed_place place[FKV_SEALED_PLACES]) {
    uint32_t n = fkv_channel_digits(order, p);
    for (uint32_t d = 0; d < n; d++) {
        uint32_t quad = fkv_channel_quad(order, p, d);
        place[d] = (fkv_sealed_place){line_byte_offset(quad / 4, t, p % 4), quad % 4 * 2, 2 * d, 2};
    }
    return (int)n;
}

int fkv_sealed_places(const fkv_codec *codec, uint32_t t, uint32_t c, fkv_sealed_place place[FKV_SEALED_PLACES]) {
    if (codec->channels != NULL) return digit_places(codec->channels, t, c, place);
    bool keys = codec->kind == FKV_CODEC_SEALED;
    uint32_t lane = keys ? t : c % 16;
    uint32_t i = keys ? c % 4 : t % 4;
    uint32_t unit = c / 16;
    uint32_t quad = keys ? c % 16 / 4 : t / 4; /* quad index within a group of 16 channels (K) or 16 tokens (V) */
    if (codec->bits == 4) {
        place[0] = (fkv_sealed_place){line_byte_offset(2 * unit + quad / 2, lane, i), quad % 2 * 4, 0, 4};
        return 1;
    }
    place[0] = (fkv_sealed_place){line_byte_offset(unit, lane, i), quad * 2, 0, 2};
    if (codec->bits == 2) return 1;
    place[1] = (fkv_sealed_place){line_byte_offset(codec->dim / 16 + unit / 2, lane, i), unit % 2 * 4 + quad, 2, 1};
    return 2;
}

static const uint8_t *sealed_token_block(const fkv_codec *codec, const uint8_t *codes, uint32_t token) {
    return codes + (size_t)(token - token % FKV_SEALED_TOKENS) * codec->row_bytes[FKV_PART_CODES];
}

static uint32_t sealed_code_at(const fkv_codec *codec, const uint8_t *block, uint32_t t, uint32_t c) {
    fkv_sealed_place place[FKV_SEALED_PLACES];
    uint32_t code = 0;
    int n = fkv_sealed_places(codec, t, c, place);
    for (int i = 0; i < n; i++)
        code |= ((uint32_t)block[place[i].at] >> place[i].shift & ((1u << place[i].n) - 1u)) << place[i].from;
    return code;
}

static void decode_sealed_key_row(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x) {
    const uint8_t *block = sealed_token_block(codec, part[FKV_PART_CODES], token);
    FKV_ASSERT(codec->kind == FKV_CODEC_SEALED || codec->channels != NULL);
    for (uint32_t p = 0; p < codec->dim; p++) {
        uint32_t code = sealed_code_at(codec, block, token % FKV_SEALED_TOKENS, p);
        float scale = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_SCALES], p));
        float bias = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_BIASES], p));
        x[fkv_sealed_channel(codec, p)] = scale * (float)code + bias;
    }
}

static void decode_sealed_value_row(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x) {
    const uint8_t *block = sealed_token_block(codec, part[FKV_PART_CODES], token);
    uint32_t sign = 1u << (codec->bits - 1);
    float scale = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_SCALES], token));
    for (uint32_t c = 0; c < codec->dim; c++) {
        uint32_t code = sealed_code_at(codec, block, token % FKV_SEALED_TOKENS, c);
        float size = fabsf(scale) * 0x1p-7f * (float)fkv_sealed_book_of(codec->bits)->level[code & (sign - 1)];
        x[c] = (code & sign) != 0 ? -size : size;
    }
}

void fkv_sealed_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x) {
    (codec->kind == FKV_CODEC_SEALED_V ? decode_sealed_value_row : decode_sealed_key_row)(codec, part, token, x);
}
