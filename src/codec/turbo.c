/* Scalar reference for TurboQuant rows. Every vector kernel must produce bit-identical rows. All arithmetic is in float, in this
 * order:
 *
 *     largest = max |x|;  s = sum of (x / largest)^2, summed in 16 lanes and then across the lanes
 *     scale = largest * sqrt(s / D) * unit, or 0 if largest is 0;  p = x / max(scale, 1e-30)
 *     code = number of midpoints below p, where midpoints are halfway between neighbouring codebook values
 *     scale is then rounded to the 16-bit type
 *
 * The squares are the only products that are added, and these additions must not be contracted to FMA. When a row is decoded, the
 * product of the scale (11 bits) and a codebook value (7 bits) is exact. Square root and division must round to nearest.
 */
#include "turbo.h"

#include "../base/float16.h"

#include <math.h>

enum { DIM_MULTIPLE = 32 };

static const fkv_codec_name turbo_names[] = {{"tq4", 4}, {"tq3", 3}, {"tq2", 2}, {NULL, 0}};

static fkv_status check_turbo_config(fkv_codec_config config) {
    FKV_REQUIRE(config.bits >= 2 && config.bits <= 4, FKV_BAD_CONFIG,
                "unsupported width of %u bits for FKV_CODEC_TURBO: expected 4, 3 or 2 bits", config.bits);
    return FKV_OK;
}

static void lay_out_turbo(fkv_codec *codec) {
    codec->row_bytes[FKV_PART_CODES] = codec->dim * codec->bits / 8;
    codec->row_bytes[FKV_PART_SCALES] = 2;
}

float fkv_turbo_scale(const fkv_codec *codec, float largest, const float lanes[FKV_TURBO_LANES]) {
    float sum = lanes[0];
    for (uint32_t i = 1; i < FKV_TURBO_LANES; i++) sum += lanes[i];
    float root = sqrtf(sum / (float)codec->dim);
    return largest > 0.0f ? largest * root * fkv_turbo_books[codec->bits].unit : 0.0f;
}

/* Clamps x: [D] to the range that pages can store, writes the result to w: [D], and returns the scale of w. */
static float turbo_row_scale(const fkv_codec *codec, const float *x, float *w) {
    float limit = fkv_codec_limit(codec->type);
    float largest = 0.0f;
    float lanes[FKV_TURBO_LANES] = {0};
    for (uint32_t d = 0; d < codec->dim; d++) {
        w[d] = fkv_codec_storable(x[d], limit);
        largest = fabsf(w[d]) > largest ? fabsf(w[d]) : largest;
    }
    if (!(largest > 0.0f)) return 0.0f;
    for (uint32_t d = 0; d < codec->dim; d++) {
        float part = w[d] / largest;
        lanes[d % FKV_TURBO_LANES] += part * part;
    }
    return fkv_turbo_scale(codec, largest, lanes);
}

static uint8_t nearest_turbo_code(const int8_t *value, uint32_t n, float p) {
    uint32_t code = 0;
    for (uint32_t i = 0; i + 1 < n; i++) code += p > 0.5f * (float)(value[i] + value[i + 1]);
    return (uint8_t)code;
}

/* Extracts `bits` bits of each code, starting at bit `shift`, and packs them LSB-first. */
static void pack_turbo_bits(const uint8_t *code, uint32_t n, uint32_t bits, uint32_t shift, uint8_t *bytes) {
    memset(bytes, 0, n * bits / 8);
    for (uint32_t d = 0; d < n; d++) bytes[d * bits / 8] |= (uint8_t)((code[d] >> shift & ((1u << bits) - 1u)) << d * bits % 8);
}

void fkv_turbo_pack(const fkv_codec *codec, const uint8_t *code, uint8_t *bytes) {
    if (codec->bits != 3) {
        pack_turbo_bits(code, codec->dim, codec->bits, 0, bytes);
        return;
    }
    pack_turbo_bits(code, codec->dim, 2, 0, bytes);
    pack_turbo_bits(code, codec->dim, 1, 2, bytes + fkv_turbo_plane(codec->dim));
}

static void encode_turbo_row(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    float w[FKV_MAX_HEAD_DIM];
    uint8_t code[FKV_MAX_HEAD_DIM] = {0};
    float scale = turbo_row_scale(codec, x, w);
    float divisor = fkv_turbo_divisor(scale);
    for (uint32_t d = 0; d < codec->dim; d++)
        code[d] = nearest_turbo_code(fkv_turbo_books[codec->bits].value, 1u << codec->bits, w[d] / divisor);
    fkv_turbo_pack(codec, code, part[FKV_PART_CODES]);
    fkv_store_half(part[FKV_PART_SCALES], 0, fkv_f32_to_half(codec->type, scale));
}

static uint32_t turbo_code_at(const uint8_t *bytes, uint32_t d, uint32_t bits) {
    return (uint32_t)bytes[d * bits / 8] >> d * bits % 8 & ((1u << bits) - 1u);
}

static void decode_turbo_row(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x) {
    const uint8_t *codes = part[FKV_PART_CODES];
    const int8_t *value = fkv_turbo_books[codec->bits].value;
    float scale = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_SCALES], 0));
    for (uint32_t d = 0; d < codec->dim; d++) {
        uint32_t code = codec->bits != 3
                            ? turbo_code_at(codes, d, codec->bits)
                            : turbo_code_at(codes, d, 2) | turbo_code_at(codes + fkv_turbo_plane(codec->dim), d, 1) << 2;
        x[d] = scale * (float)value[code];
    }
}

const fkv_codec_functions fkv_codec_turbo = {.names = turbo_names,
                                             .dim_multiple = DIM_MULTIPLE,
                                             .rotates = true,
                                             .needs_rotation = true,
                                             .check = check_turbo_config,
                                             .lay_out = lay_out_turbo,
                                             .encode = encode_turbo_row,
                                             .decode = decode_turbo_row};
