/* See stress_format.h. Section numbers refer to docs/page_format.md. */
#include "stress_format.h"

#include <math.h>
#include <string.h>

enum { FIT_LANES = 16, FITS = 3, MAX_GROUP = 128 };

/* ---- 16-bit floats (1.2) ---- */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Every binary16 value with exponent e >= -14 is an integer multiple of 2^(e - 10). */
static uint16_t to_f16(float x) {
    uint32_t sign = bits_of(x) >> 31 << 15;
    double size = fabs((double)x);
    if (isnan(x)) return 0x7e00;
    if (size >= 65520) return (uint16_t)(sign | 0x7c00);
    int exponent = size > 0 ? ilogb(size) : -14;
    if (exponent < -14) exponent = -14;
    uint32_t steps = (uint32_t)rint(ldexp(size, 10 - exponent)); /* 0 .. 2048 */
    return (uint16_t)(sign | (steps + ((uint32_t)(exponent + 14) << 10)));
}

static float from_f16(uint16_t half) {
    int exponent = half >> 10 & 31;
    double fraction = half & 1023;
    double size = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) size = fraction == 0 ? (double)INFINITY : (double)NAN;
    return (float)((half & 0x8000) != 0 ? -size : size);
}

uint16_t stress_to_half(fkv_type type, float x) {
    if (type == FKV_F16) return to_f16(x);
    uint32_t bits = bits_of(x);
    if (isnan(x)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float stress_from_half(fkv_type type, uint16_t half) { return type == FKV_F16 ? from_f16(half) : float_of((uint32_t)half << 16); }

static void put_half(uint8_t *bytes, uint32_t i, uint16_t half) {
    bytes[2 * i] = (uint8_t)half;
    bytes[2 * i + 1] = (uint8_t)(half >> 8);
}

static uint16_t get_half(const uint8_t *bytes, uint32_t i) { return (uint16_t)(bytes[2 * i] | bytes[2 * i + 1] << 8); }

/* ---- rotation (3) ---- */

static void make_signs(stress_codec *c, uint64_t seed, uint32_t side) {
    uint64_t state = seed ^ side * 0xd1b54a32d192ed03u;
    uint64_t z = 0;
    for (uint32_t d = 0; d < FKV_MAX_HEAD_DIM; d++) {
        if (d % 64 == 0) {
            state += 0x9e3779b97f4a7c15u;
            z = state;
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
            z = (z ^ z >> 27) * 0x94d049bb133111ebu;
            z = z ^ z >> 31;
        }
        c->sign[d] = (z >> d % 64 & 1) != 0 ? -1.0f : 1.0f;
    }
}

static uint32_t hadamard_block(uint32_t dim) {
    uint32_t block = 1;
    while (dim % (2 * block) == 0) block *= 2;
    return block;
}

/* Rotates a row in binary32, in the order of operations that the format specifies. */
static void rotate_stored(const stress_codec *c, float *x) {
    uint32_t block = hadamard_block(c->dim);
    for (uint32_t d = 0; d < c->dim; d++) x[d] *= c->sign[d];
    for (uint32_t h = 1; h < block; h *= 2) {
        for (uint32_t d = 0; d < c->dim; d++) {
            if ((d & h) != 0) continue;
            float sum = x[d] + x[d + h];
            x[d + h] = x[d] - x[d + h];
            x[d] = sum;
        }
    }
    float norm = (float)(1.0 / sqrt((double)block));
    for (uint32_t d = 0; d < c->dim; d++) x[d] *= norm;
}

static void hadamard(uint32_t dim, double *x) {
    uint32_t block = hadamard_block(dim);
    for (uint32_t h = 1; h < block; h *= 2) {
        for (uint32_t d = 0; d < dim; d++) {
            if ((d & h) != 0) continue;
            double sum = x[d] + x[d + h];
            x[d + h] = x[d] - x[d + h];
            x[d] = sum;
        }
    }
    for (uint32_t d = 0; d < dim; d++) x[d] /= sqrt((double)block);
}

void stress_rotate(const stress_codec *c, double *x) {
    for (uint32_t d = 0; d < c->dim; d++) x[d] *= (double)c->sign[d];
    hadamard(c->dim, x);
}

void stress_rotate_back(const stress_codec *c, double *x) {
    hadamard(c->dim, x);
    for (uint32_t d = 0; d < c->dim; d++) x[d] *= (double)c->sign[d];
}

/* ---- rows (1.1, 1.3) ---- */

stress_codec stress_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, bool rotated, uint64_t seed, uint32_t side) {
    stress_codec c = {
        .kind = config.kind, .bits = config.bits, .group = config.group, .dim = dim, .type = type, .rotated = rotated};
    if (c.kind == FKV_CODEC_AUTO) c.kind = c.bits == 16 ? FKV_CODEC_HALF : FKV_CODEC_AFFINE;
    if (c.kind != FKV_CODEC_AFFINE) c.group = dim;
    make_signs(&c, seed, side);
    return c;
}

uint32_t stress_part_bytes(const stress_codec *c, uint32_t part) {
    if (part == 0) return c->dim * c->bits / 8;
    if (c->kind == FKV_CODEC_TURBO) return part == 1 ? 2 : 0;
    return c->bits == 16 ? 0 : 2 * (c->dim / c->group);
}

uint32_t stress_row_bytes(const stress_codec *c) {
    return stress_part_bytes(c, 0) + stress_part_bytes(c, 1) + stress_part_bytes(c, 2);
}

static void make_finite(const stress_codec *c, float *x) {
    float limit = c->type == FKV_F16 ? 65504.0f : 0x1p96f;
    for (uint32_t d = 0; d < c->dim; d++) {
        if (isnan(x[d])) x[d] = 0;
        if (x[d] > limit) x[d] = limit;
        if (x[d] < -limit) x[d] = -limit;
    }
}

typedef struct line {
    float scale;
    float bias;
} line;

static line line_of_mlx(float hi, float lo, float bins) {
    bool low = fabsf(lo) > fabsf(hi);
    float edge = low ? lo : hi;
    float scale = (hi - lo) / bins;
    if (!(scale > 1e-7f)) scale = 1e-7f;
    if (!low) scale = -scale;
    float q = rintf(edge / scale);
    return q != 0 ? (line){edge / q, edge} : (line){scale, 0};
}

static float code_of(float x, line l, float bins) {
    float code = rintf((x - l.bias) / l.scale);
    if (!(code > 0)) return 0;
    return code < bins ? code : bins;
}

static float sum_of(const float *lane) {
    float sum = lane[0];
    for (int i = 1; i < FIT_LANES; i++) sum += lane[i];
    return sum;
}

/* Fits the least-squares line that maps the codes to the values. Sums are accumulated in 16 partial sums (lanes), which are then
 * added in lane order. */
static line fitted_line(const stress_codec *c, const float *x, line l, float bins) {
    float s_c[FIT_LANES] = {0};
    float s_cc[FIT_LANES] = {0};
    float s_p[FIT_LANES] = {0};
    float s_cp[FIT_LANES] = {0};
    for (uint32_t j = 0; j < c->group; j++) {
        float place = (x[j] - l.bias) / l.scale;
        float code = code_of(x[j], l, bins);
        s_c[j % FIT_LANES] += code;
        s_cc[j % FIT_LANES] += code * code;
        s_p[j % FIT_LANES] += place;
        s_cp[j % FIT_LANES] += code * place;
    }
    float n = (float)c->group;
    float codes = sum_of(s_c);
    float places = sum_of(s_p);
    float determinant = n * sum_of(s_cc) - codes * codes;
    float slope = (n * sum_of(s_cp) - codes * places) / determinant;
    float start = (places - slope * codes) / n;
    line fit = {l.scale * slope, l.scale * start + l.bias};
    float limit = c->type == FKV_F16 ? 65504.0f : 0x1p96f;
    bool storable = determinant > 0 && fit.scale > 0 && fit.scale <= limit && fabsf(fit.bias) <= limit;
    return storable ? fit : l;
}

/* Encodes group g. The codes must be zeroed beforehand. */
static void encode_group(const stress_codec *c, const float *x, uint32_t g, uint8_t *bytes) {
    float bins = (float)((1u << c->bits) - 1);
    float hi = x[0];
    float lo = x[0];
    for (uint32_t j = 1; j < c->group; j++) {
        hi = fmaxf(hi, x[j]);
        lo = fminf(lo, x[j]);
    }
    line l = line_of_mlx(hi, lo, bins);
    if (c->rotated && c->bits <= 4) {
        l = (line){fmaxf((hi - lo) / bins, 1e-7f), lo + 0.0f}; /* adding 0 turns -0 into +0 */
        for (int i = 0; i < FITS; i++) l = fitted_line(c, x, l, bins);
    }
    for (uint32_t j = 0; j < c->group; j++) {
        uint32_t bit = (g * c->group + j) * c->bits;
        bytes[bit / 8] |= (uint8_t)((uint32_t)code_of(x[j], l, bins) << bit % 8);
    }
    put_half(bytes + stress_part_bytes(c, 0), g, stress_to_half(c->type, l.scale));
    put_half(bytes + stress_part_bytes(c, 0) + stress_part_bytes(c, 1), g, stress_to_half(c->type, l.bias));
}

/* ---- TurboQuant (1.7) ---- */

static const float TURBO_UNIT[] = {0, 0, 0x1.c1eb58p-7f, 0x1.908664p-6f, 0x1.ad7b5ap-6f};
static const int TURBO_UPPER[][8] = {{0}, {0}, {33, 110}, {10, 31, 55, 88}, {5, 15, 25, 36, 48, 62, 79, 104}};

static float turbo_level(uint32_t bits, uint32_t code) {
    uint32_t half = 1u << (bits - 1);
    return code >= half ? (float)TURBO_UPPER[bits][code - half] : -(float)TURBO_UPPER[bits][half - 1 - code];
}

static void encode_turbo(const stress_codec *c, const float *x, uint8_t *bytes) {
    float lane[FIT_LANES] = {0};
    float largest = 0;
    for (uint32_t d = 0; d < c->dim; d++) largest = fmaxf(largest, fabsf(x[d]));
    for (uint32_t d = 0; d < c->dim && largest > 0; d++) {
        float part = x[d] / largest;
        lane[d % FIT_LANES] += part * part;
    }
    float scale = largest > 0 ? largest * sqrtf(sum_of(lane) / (float)c->dim) * TURBO_UNIT[c->bits] : 0;
    for (uint32_t d = 0; d < c->dim; d++) {
        float place = x[d] / fmaxf(scale, 1e-30f);
        uint32_t code = 0;
        for (uint32_t i = 0; i + 1 < 1u << c->bits; i++)
            code += (turbo_level(c->bits, i) + turbo_level(c->bits, i + 1)) / 2 < place;
        if (c->bits == 3) {
            bytes[d / 4] |= (uint8_t)((code & 3) << d % 4 * 2);
            bytes[c->dim / 4 + d / 8] |= (uint8_t)(code >> 2 << d % 8);
        } else {
            bytes[d * c->bits / 8] |= (uint8_t)(code << d * c->bits % 8);
        }
    }
    put_half(bytes + stress_part_bytes(c, 0), 0, stress_to_half(c->type, scale));
}

static void decode_turbo(const stress_codec *c, const uint8_t *codes, const uint8_t *scales, float *x) {
    float scale = stress_from_half(c->type, get_half(scales, 0));
    for (uint32_t d = 0; d < c->dim; d++) {
        uint32_t code = codes[d * c->bits / 8] >> d * c->bits % 8 & ((1u << c->bits) - 1);
        if (c->bits == 3) code = (codes[d / 4] >> d % 4 * 2 & 3u) | (codes[c->dim / 4 + d / 8] >> d % 8 & 1u) << 2;
        x[d] = scale * turbo_level(c->bits, code);
    }
}

/* ---- rows of any kind ---- */

void stress_encode_rotated(const stress_codec *c, const float *given, uint8_t *bytes) {
    float x[FKV_MAX_HEAD_DIM];
    memcpy(x, given, c->dim * sizeof *x);
    make_finite(c, x);
    memset(bytes, 0, stress_row_bytes(c));
    if (c->kind == FKV_CODEC_TURBO) {
        encode_turbo(c, x, bytes);
        return;
    }
    if (c->bits == 16) {
        for (uint32_t d = 0; d < c->dim; d++) put_half(bytes, d, stress_to_half(c->type, x[d]));
        return;
    }
    for (uint32_t g = 0; g < c->dim / c->group; g++) encode_group(c, x + (size_t)g * c->group, g, bytes);
}

void stress_encode(const stress_codec *c, const float *given, uint8_t *bytes) {
    float x[FKV_MAX_HEAD_DIM];
    memcpy(x, given, c->dim * sizeof *x);
    make_finite(c, x);
    if (c->rotated) rotate_stored(c, x);
    stress_encode_rotated(c, x, bytes);
}

static void decode_parts(const stress_codec *c, const uint8_t *bytes, const uint8_t *scales, const uint8_t *biases, float *x) {
    if (c->kind == FKV_CODEC_TURBO) {
        decode_turbo(c, bytes, scales, x);
        return;
    }
    for (uint32_t d = 0; d < c->dim; d++) {
        if (c->bits == 16) {
            x[d] = stress_from_half(c->type, get_half(bytes, d));
            continue;
        }
        uint32_t code = bytes[d * c->bits / 8] >> d * c->bits % 8 & ((1u << c->bits) - 1);
        float scale = stress_from_half(c->type, get_half(scales, d / c->group));
        float bias = stress_from_half(c->type, get_half(biases, d / c->group));
        x[d] = scale * (float)code + bias;
    }
}

void stress_decode(const stress_codec *c, const uint8_t *bytes, float *x) {
    const uint8_t *scales = bytes + stress_part_bytes(c, 0);
    decode_parts(c, bytes, scales, scales + stress_part_bytes(c, 1), x);
}

/* ---- checksums (4.1, 4.3) ---- */

uint32_t stress_crc32c(const uint8_t *bytes, size_t n) {
    static uint32_t table[256];
    for (uint32_t i = 0; i < 256 && table[255] == 0; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ ((value & 1) != 0 ? 0x82f63b78u : 0);
        table[i] = value;
    }
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) crc = crc >> 8 ^ table[(crc ^ bytes[i]) & 255];
    return ~crc;
}

static uint32_t rotated_right(uint32_t x, int n) { return x >> n | x << (32 - n); }

/* SHA-256 constants (FIPS 180-4): the first fractional bits of the square and cube roots of primes. */
static uint32_t root_bits(uint32_t prime, bool cube) {
    double root = cube ? cbrt((double)prime) : sqrt((double)prime);
    return (uint32_t)((root - floor(root)) * 0x1p32);
}

static void make_constants(uint32_t k[64], uint32_t h[8]) {
    uint32_t n = 0;
    for (uint32_t candidate = 2; n < 64; candidate++) {
        bool prime = true;
        for (uint32_t divisor = 2; divisor * divisor <= candidate; divisor++) prime = prime && candidate % divisor != 0;
        if (!prime) continue;
        if (n < 8) h[n] = root_bits(candidate, false);
        k[n++] = root_bits(candidate, true);
    }
}

static void sha256_block(const uint32_t k[64], uint32_t state[8], const uint8_t *block) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] =
            (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotated_right(w[i - 15], 7) ^ rotated_right(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotated_right(w[i - 2], 17) ^ rotated_right(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotated_right(v[4], 6) ^ rotated_right(v[4], 11) ^ rotated_right(v[4], 25);
        uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
        uint32_t s0 = rotated_right(v[0], 2) ^ rotated_right(v[0], 13) ^ rotated_right(v[0], 22);
        uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

void stress_sha256(const uint8_t *first, size_t n_first, const uint8_t *second, size_t n_second, uint8_t digest[32]) {
    static uint32_t k[64];
    static uint32_t start[8];
    if (k[0] == 0) make_constants(k, start);
    uint32_t state[8];
    memcpy(state, start, sizeof state);
    uint64_t n = (uint64_t)n_first + n_second;
    uint64_t n_blocks = (n + 9 + 63) / 64;
    for (uint64_t b = 0; b < n_blocks; b++) {
        uint8_t block[64] = {0};
        for (uint64_t i = 0; i < 64; i++) {
            uint64_t at = 64 * b + i;
            if (at < n_first)
                block[i] = first[at];
            else if (at < n)
                block[i] = second[at - n_first];
            else if (at == n)
                block[i] = 0x80;
            else if (b == n_blocks - 1 && i >= 56)
                block[i] = (uint8_t)(8 * n >> 8 * (63 - i));
        }
        sha256_block(k, state, block);
    }
    for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}
