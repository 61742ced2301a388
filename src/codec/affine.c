/* Scalar reference for affine rows. Every vector kernel must produce bit-identical codes, scales and biases.
 *
 * This file defines how a row is quantized; block.c defines where its codes, scales and biases are stored. Each group is
 * quantized like mlx.core.quantize on the CPU, in float, in this order:
 *
 *     hi, lo = max(x), min(x);  low = |lo| > |hi|;  edge = low ? lo : hi
 *     scale = max((hi - lo) / bins, 1e-7), negated unless low;  q = rint(edge / scale)
 *     q != 0:  scale = edge / q, bias = edge;     q == 0:  bias = 0
 *     code = clamp(rint((x - bias) / scale), 0, bins);  scale and bias are then rounded to the 16-bit type of the page
 *
 * Before scale and bias are rounded, the value `edge` is represented exactly. If lo <= 0 <= hi, 0 is also represented exactly.
 * The quantization error is at most |scale| at the opposite end of the range, and at most |scale| / 2 for every other value.
 *
 * The input may be any float, because rotated rows are not 16-bit values. When a row is decoded, the product of scale (11
 * significant bits) and code (8 bits) is exact in float, so FMA contraction cannot change the result. FMA contraction would
 * change the results of refits, so refits must be compiled without it. The rounding mode must be round to nearest, ties to even.
 */
#include "affine.h"

#include "../base/float16.h"

#include <math.h>

enum { MAX_AFFINE_GROUP = 128, LANES = FKV_CODEC_LANES };

static const fkv_codec_name affine_names[] = {{"8", 8}, {"4", 4}, {"2", 2}, {NULL, 0}};

static fkv_status check_affine_config(fkv_codec_config config) {
    FKV_REQUIRE(
        config.bits == 8 || config.bits == 4 || config.bits == 2, FKV_BAD_CONFIG,
        "unsupported codec width of %u bits: expected 16 (FKV_CODEC_HALF, unquantized) or one of 8, 4 and 2 (FKV_CODEC_AFFINE)",
        config.bits);
    FKV_REQUIRE(config.group == 32 || config.group == 64 || config.group == 128, FKV_BAD_CONFIG,
                "unsupported group size %u for %u bits: expected 32, 64 or 128", config.group, config.bits);
    return FKV_OK;
}

static void lay_out_affine(fkv_codec *codec) {
    codec->row_bytes[FKV_PART_CODES] = codec->dim * codec->bits / 8;
    codec->row_bytes[FKV_PART_SCALES] = codec->dim / codec->group * 2;
    codec->row_bytes[FKV_PART_BIASES] = codec->dim / codec->group * 2;
}

static void fit_rotated_rows(fkv_codec *codec) { codec->fitted = codec->bits <= 4; }

fkv_affine fkv_codec_line(const fkv_codec *codec, float lo, float hi, float bins) {
    float step = (hi - lo) / bins;
    step = step > 1e-7f ? step : 1e-7f;
    if (codec->fitted) return (fkv_affine){.scale = step, .bias = lo};
    bool low = fabsf(lo) > fabsf(hi);
    float edge = low ? lo : hi;
    fkv_affine line = {.scale = low ? step : -step, .bias = 0.0f};
    float q = rintf(edge / line.scale);
    if (q != 0.0f) {
        line.scale = edge / q;
        line.bias = edge;
    }
    return line;
}

static float sum_refit_lanes(const float lane[LANES]) {
    float sum = lane[0];
    for (uint32_t i = 1; i < LANES; i++) sum += lane[i];
    return sum;
}

/* Fits the line slope * code + start to the positions (value - bias) / scale by least squares, and returns the corresponding
 * scale and bias. The sums over codes and the determinant are exact, because they are integers below 2^24. Returns `line`
 * unchanged if all codes are equal (the determinant is 0) or the fitted line is out of range. */
fkv_affine fkv_codec_refit(const fkv_codec *codec, fkv_affine line, const fkv_refit *sums) {
    float n = (float)codec->group;
    float c = sum_refit_lanes(sums->c);
    float p = sum_refit_lanes(sums->p);
    float determinant = n * sum_refit_lanes(sums->cc) - c * c;
    float slope = (n * sum_refit_lanes(sums->cp) - c * p) / determinant;
    float start = (p - slope * c) / n;
    fkv_affine fitted = {.scale = line.scale * slope, .bias = line.scale * start + line.bias};
    float limit = fkv_codec_limit(codec->type);
    bool good = determinant > 0.0f && fitted.scale > 0.0f && fitted.scale <= limit && fabsf(fitted.bias) <= limit;
    return good ? fitted : line;
}

/* Clamps x: [group] to the range that pages can store, writes the result to w: [group], and returns the scale and bias derived
 * from the minimum and maximum of w. A separate minimum and maximum is kept for each of LANES lanes, so that the compiler can
 * vectorize the loop. The order of comparisons can change only the sign of a zero, which has no effect on codes. */
static fkv_affine group_line(const fkv_codec *codec, const float *x, float limit, float bins, float *w) {
    uint32_t group = codec->group;
    float hi_of[LANES];
    float lo_of[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        hi_of[lane] = -limit;
        lo_of[lane] = limit;
    }
    for (uint32_t start = 0; start < group; start += LANES) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            float value = fkv_codec_storable(x[start + lane], limit);
            w[start + lane] = value;
            hi_of[lane] = value > hi_of[lane] ? value : hi_of[lane];
            lo_of[lane] = value < lo_of[lane] ? value : lo_of[lane];
        }
    }
    float hi = hi_of[0];
    float lo = lo_of[0];
    for (uint32_t lane = 1; lane < LANES; lane++) {
        hi = hi_of[lane] > hi ? hi_of[lane] : hi;
        lo = lo_of[lane] < lo ? lo_of[lane] : lo;
    }

    return fkv_codec_line(codec, lo, hi, bins);
}

/* Rounds a position (value - bias) / scale to the nearest code. Clamping before rounding gives the same result as clamping after
 * rounding, because the bounds are integers. Adding 2^23 rounds to the nearest integer (ties to even) and leaves that integer in
 * the low bits of the sum. The first comparison maps NaN to 0. */
FKV_INLINE uint8_t nearest_code(float position, float bins) {
    position = position > 0.0f ? position : 0.0f;
    position = position < bins ? position : bins;
    return (uint8_t)fkv_bits_of(position + 0x1p23f);
}

static void quantize_group(const float *w, uint32_t group, fkv_affine line, float bins, uint8_t *code) {
    for (uint32_t j = 0; j < group; j++) {
        float position = (w[j] - line.bias) / line.scale;
        code[j] = nearest_code(position, bins);
    }
}

static fkv_affine refit_group(const fkv_codec *codec, const float *w, fkv_affine line, float bins) {
    fkv_refit sums = {0};
    for (uint32_t j = 0; j < codec->group; j++) {
        uint32_t lane = j % LANES;
        float position = (w[j] - line.bias) / line.scale;
        float code = (float)nearest_code(position, bins);
        sums.c[lane] += code;
        sums.cc[lane] += code * code;
        sums.p[lane] += position;
        sums.cp[lane] += code * position;
    }
    return fkv_codec_refit(codec, line, &sums);
}

/* Packs codes LSB-first within each byte, which is also LSB-first within little-endian 32-bit words. */
static void pack_group_codes(const uint8_t *code, uint32_t group, uint32_t bits, uint8_t *bytes) {
    if (bits == 8) {
        memcpy(bytes, code, group);
    } else if (bits == 4) {
        for (uint32_t i = 0; i < group / 2; i++) bytes[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
    } else {
        for (uint32_t i = 0; i < group / 4; i++)
            bytes[i] = (uint8_t)(code[4 * i] | code[4 * i + 1] << 2 | code[4 * i + 2] << 4 | code[4 * i + 3] << 6);
    }
}

static void unpack_group_codes(const uint8_t *bytes, uint32_t group, uint32_t bits, uint8_t *code) {
    if (bits == 8) {
        memcpy(code, bytes, group);
    } else if (bits == 4) {
        for (uint32_t j = 0; j < group; j++) code[j] = bytes[j / 2] >> 4 * (j % 2) & 15;
    } else {
        for (uint32_t j = 0; j < group; j++) code[j] = bytes[j / 4] >> 2 * (j % 4) & 3;
    }
}

static void encode_affine_row(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    float limit = fkv_codec_limit(codec->type);
    uint32_t group = codec->group;
    float bins = (float)((1u << codec->bits) - 1u);
    FKV_ASSERT(group <= MAX_AFFINE_GROUP && group % LANES == 0);
    for (uint32_t g = 0; g < codec->dim / group; g++) {
        float w[MAX_AFFINE_GROUP];
        uint8_t code[MAX_AFFINE_GROUP];
        fkv_affine line = group_line(codec, x + (size_t)g * group, limit, bins, w);
        for (int i = 0; codec->fitted && i < FKV_REFITS; i++) line = refit_group(codec, w, line, bins);
        quantize_group(w, group, line, bins, code);
        pack_group_codes(code, group, codec->bits, part[FKV_PART_CODES] + (size_t)g * group * codec->bits / 8);
        fkv_store_half(part[FKV_PART_SCALES], g, fkv_f32_to_half(codec->type, line.scale));
        fkv_store_half(part[FKV_PART_BIASES], g, fkv_f32_to_half(codec->type, line.bias));
    }
}

static void decode_affine_row(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x) {
    uint32_t group = codec->group;
    FKV_ASSERT(group <= MAX_AFFINE_GROUP);
    for (uint32_t g = 0; g < codec->dim / group; g++) {
        uint8_t code[MAX_AFFINE_GROUP];
        float *to = x + (size_t)g * group;
        float scale = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_SCALES], g));
        float bias = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_BIASES], g));
        unpack_group_codes(part[FKV_PART_CODES] + (size_t)g * group * codec->bits / 8, group, codec->bits, code);
        for (uint32_t j = 0; j < group; j++) to[j] = scale * (float)code[j] + bias;
    }
}

const fkv_codec_functions fkv_codec_affine = {.names = affine_names,
                                              .grouped = true,
                                              .rotates = true,
                                              .check = check_affine_config,
                                              .lay_out = lay_out_affine,
                                              .rotated = fit_rotated_rows,
                                              .encode = encode_affine_row,
                                              .decode = decode_affine_row};
