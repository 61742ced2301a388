/* The signs of a rotation and the two directions of it.
 *
 * Owns the generator of the signs and the order of the additions: both belong to the page format, since rotated rows are what
 * pages hold. The generator, with all arithmetic modulo 2^64:
 *
 *     state = seed xor (stream * 0xd1b54a32d192ed03)
 *     draw i = 0, 1, ...:  state += 0x9e3779b97f4a7c15
 *                          z = state
 *                          z = (z xor z >> 30) * 0xbf58476d1ce4e5b9
 *                          z = (z xor z >> 27) * 0x94d049bb133111eb
 *                          z = z xor z >> 31                           (splitmix64)
 *     signs[2 i] = low 32 bits of z, signs[2 i + 1] = high 32 bits; bits of channels beyond dim are 0
 *
 * One block, distance h = 1, 2, 4, ... < block: (x[j], x[j + h]) = (x[j] + x[j + h], x[j] - x[j + h]) for every j with bit h
 * clear; then every channel is multiplied by norm. All in float; no product is ever added, so contraction changes nothing.
 */
#include "rotation.h"

#include "../base/float16.h"

static uint64_t splitmix64(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 1 / sqrt(block), correctly rounded, without a library call: halves for each factor of 4, sqrt(1/2) for a last factor of 2. */
static float norm_of(uint32_t block) {
    float norm = 1.0f;
    for (; block >= 4; block /= 4) norm *= 0.5f;
    return block == 2 ? norm * 0x1.6a09e6p-1f : norm;
}

void fkv_rotation_make(uint64_t seed, uint32_t stream, uint32_t dim, fkv_rotation *rotation) {
    FKV_ASSERT(dim > 0 && dim <= FKV_MAX_HEAD_DIM);
    memset(rotation, 0, sizeof *rotation);
    rotation->dim = dim;
    rotation->block = dim & (~dim + 1u);
    rotation->norm = norm_of(rotation->block);

    uint64_t state = seed ^ stream * 0xd1b54a32d192ed03u;
    uint64_t draw = 0;
    uint32_t n_words = fkv_ceil_div(dim, 32);
    for (uint32_t i = 0; i < n_words; i++) {
        draw = i % 2 == 0 ? splitmix64(&state) : draw >> 32;
        rotation->signs[i] = (uint32_t)draw;
    }
    if (dim % 32 != 0) rotation->signs[n_words - 1] &= (1u << dim % 32) - 1u;
}

/* Four channels; any compiler of this tree makes the machine's vectors of them. */
typedef float four __attribute__((vector_size(16)));
typedef uint32_t four_bits __attribute__((vector_size(16)));

static four load_four(const float *x) {
    four v;
    memcpy(&v, x, sizeof v);
    return v;
}

static void store_four(float *x, four v) { memcpy(x, &v, sizeof v); }

static four negate(four v, four_bits which) { return (four)((four_bits)v ^ which); }

static void flip(const fkv_rotation *rotation, float *x) {
    const uint32_t whole = rotation->dim - rotation->dim % 4;
    const four_bits bit = {1, 2, 4, 8};
    for (uint32_t d = 0; d < whole; d += 4) {
        uint32_t signs = rotation->signs[d / 32] >> d % 32;
        four_bits set = (four_bits)(((four_bits){signs, signs, signs, signs} & bit) == bit);
        store_four(x + d, negate(load_four(x + d), set << 31));
    }
    for (uint32_t d = whole; d < rotation->dim; d++)
        x[d] = fkv_float_of(fkv_bits_of(x[d]) ^ (rotation->signs[d / 32] >> d % 32) << 31);
}

/* The stages of 1 and 2. */
static four hadamard_four(four v) {
    const four_bits odd = {0, 1u << 31, 0, 1u << 31};
    const four_bits upper = {0, 0, 1u << 31, 1u << 31};
    v = __builtin_shufflevector(v, v, 0, 0, 2, 2) + negate(__builtin_shufflevector(v, v, 1, 1, 3, 3), odd);
    return __builtin_shufflevector(v, v, 0, 1, 0, 1) + negate(__builtin_shufflevector(v, v, 2, 3, 2, 3), upper);
}

static void pairs(float *x, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d += 2) {
        float a = x[d];
        float b = x[d + 1];
        x[d] = a + b;
        x[d + 1] = a - b;
    }
}

/* Of 4 and above. */
static void stage(float *x, uint32_t dim, uint32_t h) {
    for (uint32_t start = 0; start < dim; start += 2 * h) {
        for (uint32_t j = start; j < start + h; j += 4) {
            four a = load_four(x + j);
            four b = load_four(x + j + h);
            store_four(x + j, a + b);
            store_four(x + j + h, a - b);
        }
    }
}

static void hadamard(const fkv_rotation *rotation, float *x) {
    const uint32_t dim = rotation->dim;
    if (rotation->block == 2) pairs(x, dim);
    if (rotation->block >= 4)
        for (uint32_t d = 0; d < dim; d += 4) store_four(x + d, hadamard_four(load_four(x + d)));
    for (uint32_t h = 4; h < rotation->block; h *= 2) stage(x, dim, h);
    for (uint32_t d = 0; d < dim; d++) x[d] *= rotation->norm;
}

void fkv_rotation_apply(const fkv_rotation *rotation, float *x) {
    flip(rotation, x);
    hadamard(rotation, x);
}

void fkv_rotation_undo(const fkv_rotation *rotation, float *x) {
    hadamard(rotation, x);
    flip(rotation, x);
}
