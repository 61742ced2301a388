/* Hadamard rotation: generates the signs and computes the forward and inverse transforms.
 *
 * The sign generator and the order of additions are part of the page format, because pages hold rotated rows. The generator is
 * splitmix64, with all arithmetic modulo 2^64:
 *
 *     state = seed xor (stream * 0xd1b54a32d192ed03)
 *     draw i = 0, 1, ...:  state += 0x9e3779b97f4a7c15
 *                          z = state
 *                          z = (z xor z >> 30) * 0xbf58476d1ce4e5b9
 *                          z = (z xor z >> 27) * 0x94d049bb133111eb
 *                          z = z xor z >> 31
 *     signs[2 * i] = low 32 bits of z, signs[2 * i + 1] = high 32 bits of z; bits beyond channel dim - 1 are 0
 *
 * Each block goes through the stages h = 1, 2, 4, ... < block: (x[j], x[j + h]) = (x[j] + x[j + h], x[j] - x[j + h]) for every j
 * with bit h clear. Then every channel is multiplied by norm. All arithmetic is in float. No product is added to another value,
 * so FMA contraction cannot change the result.
 */
#include "rotation.h"

#include "../base/float16.h"

static uint64_t splitmix64(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Returns 1 / sqrt(block), correctly rounded, without a library call. Starts with 1, multiplies by 1/2 for each factor of 4 in
 * `block`, and by sqrt(1/2) if a factor of 2 remains. */
static float block_norm(uint32_t block) {
    float norm = 1.0f;
    for (; block >= 4; block /= 4) norm *= 0.5f;
    return block == 2 ? norm * 0x1.6a09e6p-1f : norm;
}

void fkv_rotation_make(uint64_t seed, uint32_t stream, uint32_t dim, fkv_rotation *rotation) {
    FKV_ASSERT(dim > 0 && dim <= FKV_MAX_HEAD_DIM);
    memset(rotation, 0, sizeof *rotation);
    rotation->dim = dim;
    rotation->block = dim & (~dim + 1u);
    rotation->norm = block_norm(rotation->block);

    uint64_t state = seed ^ stream * 0xd1b54a32d192ed03u;
    uint64_t draw = 0;
    uint32_t n_words = fkv_ceil_div(dim, 32);
    for (uint32_t i = 0; i < n_words; i++) {
        draw = i % 2 == 0 ? splitmix64(&state) : draw >> 32;
        rotation->signs[i] = (uint32_t)draw;
    }
    if (dim % 32 != 0) rotation->signs[n_words - 1] &= (1u << dim % 32) - 1u;
}

/* Vector of four channels. All supported compilers translate operations on this type to vector instructions. */
typedef float float4 __attribute__((vector_size(16)));
typedef uint32_t uint4 __attribute__((vector_size(16)));

static float4 load_float4(const float *x) {
    float4 v;
    memcpy(&v, x, sizeof v);
    return v;
}

static void store_float4(float *x, float4 v) { memcpy(x, &v, sizeof v); }

static float4 negate(float4 v, uint4 which) { return (float4)((uint4)v ^ which); }

static void flip_signs(const fkv_rotation *rotation, float *x) {
    const uint32_t whole = rotation->dim - rotation->dim % 4;
    const uint4 bit = {1, 2, 4, 8};
    for (uint32_t d = 0; d < whole; d += 4) {
        uint32_t signs = rotation->signs[d / 32] >> d % 32;
        uint4 set = (uint4)(((uint4){signs, signs, signs, signs} & bit) == bit);
        store_float4(x + d, negate(load_float4(x + d), set << 31));
    }
    for (uint32_t d = whole; d < rotation->dim; d++)
        x[d] = fkv_float_of(fkv_bits_of(x[d]) ^ (rotation->signs[d / 32] >> d % 32) << 31);
}

/* Applies the stages h = 1 and h = 2 of the Hadamard transform. */
static float4 hadamard_float4(float4 v) {
    const uint4 odd = {0, 1u << 31, 0, 1u << 31};
    const uint4 upper = {0, 0, 1u << 31, 1u << 31};
    v = __builtin_shufflevector(v, v, 0, 0, 2, 2) + negate(__builtin_shufflevector(v, v, 1, 1, 3, 3), odd);
    return __builtin_shufflevector(v, v, 0, 1, 0, 1) + negate(__builtin_shufflevector(v, v, 2, 3, 2, 3), upper);
}

static void hadamard_pairs(float *x, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d += 2) {
        float a = x[d];
        float b = x[d + 1];
        x[d] = a + b;
        x[d + 1] = a - b;
    }
}

/* Applies one stage of the Hadamard transform, with h >= 4. */
static void hadamard_stage(float *x, uint32_t dim, uint32_t h) {
    for (uint32_t start = 0; start < dim; start += 2 * h) {
        for (uint32_t j = start; j < start + h; j += 4) {
            float4 a = load_float4(x + j);
            float4 b = load_float4(x + j + h);
            store_float4(x + j, a + b);
            store_float4(x + j + h, a - b);
        }
    }
}

static void hadamard_blocks(const fkv_rotation *rotation, float *x) {
    const uint32_t dim = rotation->dim;
    if (rotation->block == 2) hadamard_pairs(x, dim);
    if (rotation->block >= 4)
        for (uint32_t d = 0; d < dim; d += 4) store_float4(x + d, hadamard_float4(load_float4(x + d)));
    for (uint32_t h = 4; h < rotation->block; h *= 2) hadamard_stage(x, dim, h);
    for (uint32_t d = 0; d < dim; d++) x[d] *= rotation->norm;
}

void fkv_rotation_apply(const fkv_rotation *rotation, float *x) {
    flip_signs(rotation, x);
    hadamard_blocks(rotation, x);
}

void fkv_rotation_undo(const fkv_rotation *rotation, float *x) {
    hadamard_blocks(rotation, x);
    flip_signs(rotation, x);
}
