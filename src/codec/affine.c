/* Affine groups in plain C: what every vector kernel must match bit for bit.
 *
 * Owns the arithmetic of a row; where its parts lie is block.c's, how they are multiplied is src/attn's. One group is fitted and
 * coded the way mlx.core.quantize does on its CPU, in float, in this order:
 *
 *     hi, lo = the largest and the smallest number;  low = |lo| > |hi|;  edge = low ? lo : hi
 *     scale = max((hi - lo) / bins, 1e-7), negated unless low;  q = rint(edge / scale)
 *     q != 0:  scale = edge / q, bias = edge;     q == 0:  bias = 0
 *     code = rint((x - bias) / scale), held within 0 .. bins;  scale and bias are then rounded to the 16-bit type
 *
 * Before scale and bias are rounded the edge is exact, 0 is a code wherever the group spans it, and the codes reach from the edge
 * to within one step of the other end: the far end can be off by a whole |scale|, everything else by half of it.
 *
 * Rows need not come from 16-bit numbers (rotated rows do not): the same arithmetic applies to any float.
 * There is no product followed by a sum that rounds twice, so contraction to FMA cannot change a bit: in decoding, scale (11
 * bits) times code (8 bits) is exact in float. Refits have such products and must not be contracted. The default rounding mode
 * (nearest, ties to even) is relied upon.
 */
#include "affine.h"

#include "../base/float16.h"

#include <math.h>

enum { MAX_AFFINE_GROUP = 128, LANES = FKV_CODEC_LANES };

static const fkv_codec_name names[] = {{"8", 8}, {"4", 4}, {"2", 2}, {NULL, 0}};

static fkv_status check(fkv_codec_config config) {
    FKV_REQUIRE(config.bits == 8 || config.bits == 4 || config.bits == 2, FKV_BAD_CONFIG,
                "a codec of %u bits: choose 16 (unquantized, FKV_CODEC_HALF), or 8, 4 or 2 (FKV_CODEC_AFFINE)", config.bits);
    FKV_REQUIRE(config.group == 32 || config.group == 64 || config.group == 128, FKV_BAD_CONFIG,
                "a group of %u for %u bits: choose 32, 64 or 128", config.group, config.bits);
    return FKV_OK;
}

static void lay_out(fkv_codec *codec) {
    codec->row_bytes[FKV_PART_CODES] = codec->dim * codec->bits / 8;
    codec->row_bytes[FKV_PART_SCALES] = codec->dim / codec->group * 2;
    codec->row_bytes[FKV_PART_BIASES] = codec->dim / codec->group * 2;
}

static void rotated(fkv_codec *codec) { codec->fitted = codec->bits <= 4; }

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

static float sum_of(const float lane[LANES]) {
    float sum = lane[0];
    for (uint32_t i = 1; i < LANES; i++) sum += lane[i];
    return sum;
}

/* p = slope * c + start in least squares. Sums of codes are whole numbers below 2^24 and exact, the determinant too. It is 0
 * where all codes are the same, and then there is nothing to fit. A line that cannot be stored is not taken. */
fkv_affine fkv_codec_refit(const fkv_codec *codec, fkv_affine line, const fkv_refit *sums) {
    float n = (float)codec->group;
    float c = sum_of(sums->c);
    float p = sum_of(sums->p);
    float determinant = n * sum_of(sums->cc) - c * c;
    float slope = (n * sum_of(sums->cp) - c * p) / determinant;
    float start = (p - slope * c) / n;
    fkv_affine fitted = {.scale = line.scale * slope, .bias = line.scale * start + line.bias};
    float limit = fkv_codec_limit(codec->type);
    bool good = determinant > 0.0f && fitted.scale > 0.0f && fitted.scale <= limit && fabsf(fitted.bias) <= limit;
    return good ? fitted : line;
}

/* x: [group] -> w: [group], the storable numbers, and the line through them. Largest and smallest are kept in lanes, which a
 * compiler turns into vector registers; the order of the comparisons can change only the sign of a zero, which nothing sees. */
static fkv_affine line_of(const fkv_codec *codec, const float *x, float limit, float bins, float *w) {
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

/* Clamping first is the same as rounding first, since the bounds are whole; adding 2^23 then rounds to the nearest whole number
 * (ties to even), which is the low bits of the sum. The first comparison makes the code of NaN 0. */
FKV_INLINE uint8_t nearest_code(float position, float bins) {
    position = position > 0.0f ? position : 0.0f;
    position = position < bins ? position : bins;
    return (uint8_t)fkv_bits_of(position + 0x1p23f);
}

static void code_of(const float *w, uint32_t group, fkv_affine line, float bins, uint8_t *code) {
    for (uint32_t j = 0; j < group; j++) {
        float position = (w[j] - line.bias) / line.scale;
        code[j] = nearest_code(position, bins);
    }
}

static fkv_affine refit(const fkv_codec *codec, const float *w, fkv_affine line, float bins) {
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

/* LSB-first in little-endian 32-bit words is LSB-first in bytes. */
static void pack(const uint8_t *code, uint32_t group, uint32_t bits, uint8_t *bytes) {
    if (bits == 8) {
        memcpy(bytes, code, group);
    } else if (bits == 4) {
        for (uint32_t i = 0; i < group / 2; i++) bytes[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
    } else {
        for (uint32_t i = 0; i < group / 4; i++)
            bytes[i] = (uint8_t)(code[4 * i] | code[4 * i + 1] << 2 | code[4 * i + 2] << 4 | code[4 * i + 3] << 6);
    }
}

static void unpack(const uint8_t *bytes, uint32_t group, uint32_t bits, uint8_t *code) {
    if (bits == 8) {
        memcpy(code, bytes, group);
    } else if (bits == 4) {
        for (uint32_t j = 0; j < group; j++) code[j] = bytes[j / 2] >> 4 * (j % 2) & 15;
    } else {
        for (uint32_t j = 0; j < group; j++) code[j] = bytes[j / 4] >> 2 * (j % 4) & 3;
    }
}

static void encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    float limit = fkv_codec_limit(codec->type);
    uint32_t group = codec->group;
    float bins = (float)((1u << codec->bits) - 1u);
    FKV_ASSERT(group <= MAX_AFFINE_GROUP && group % LANES == 0);
    for (uint32_t g = 0; g < codec->dim / group; g++) {
        float w[MAX_AFFINE_GROUP];
        uint8_t code[MAX_AFFINE_GROUP];
        fkv_affine line = line_of(codec, x + (size_t)g * group, limit, bins, w);
        for (int i = 0; codec->fitted && i < FKV_REFITS; i++) line = refit(codec, w, line, bins);
        code_of(w, group, line, bins, code);
        pack(code, group, codec->bits, part[FKV_PART_CODES] + (size_t)g * group * codec->bits / 8);
        fkv_store_half(part[FKV_PART_SCALES], g, fkv_f32_to_half(codec->type, line.scale));
        fkv_store_half(part[FKV_PART_BIASES], g, fkv_f32_to_half(codec->type, line.bias));
    }
}

static void decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x) {
    uint32_t group = codec->group;
    FKV_ASSERT(group <= MAX_AFFINE_GROUP);
    for (uint32_t g = 0; g < codec->dim / group; g++) {
        uint8_t code[MAX_AFFINE_GROUP];
        float *to = x + (size_t)g * group;
        float scale = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_SCALES], g));
        float bias = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_BIASES], g));
        unpack(part[FKV_PART_CODES] + (size_t)g * group * codec->bits / 8, group, codec->bits, code);
        for (uint32_t j = 0; j < group; j++) to[j] = scale * (float)code[j] + bias;
    }
}

const fkv_codec_functions fkv_codec_affine = {.names = names,
                                              .grouped = true,
                                              .rotates = true,
                                              .check = check,
                                              .lay_out = lay_out,
                                              .rotated = rotated,
                                              .encode = encode,
                                              .decode = decode};
