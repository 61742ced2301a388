/* Compares the codec with MLX byte for byte: reads the vectors written by scripts/make-codec-vectors (its header describes the
 * file) and encodes all rows.
 *
 * Codes, scales and biases must be identical for each bit width, group size, 16-bit type and head dimension. Rows stored in 16
 * bits must round-trip unchanged. Decoding differs by design: MLX rounds both scale * code and the sum with the bias to the
 * 16-bit type, whereas this codec computes the result in float. Each of MLX's two roundings contributes at most half a 16-bit
 * ulp, so the results differ by at most one ulp of the largest value in the sum. Values for which MLX overflows to infinity stay
 * finite in this codec. Rotations must be bit-identical to those that the script computes.
 *
 * Does not use the check library, because this program is cross-compiled and run under an emulator.
 *
 * usage: parity_codec [vectors]
 */
#include "../src/base/float16.h"
#include "../src/codec/codec.h"
#include "../src/codec/rotation.h"
#include "vector_reader.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const float DECODE_ULPS = 1.0f;

static uint32_t n_passed;
static uint32_t n_failed;

static void count(bool good, const char *what, fkv_type type, uint32_t dim, uint32_t bits, uint32_t group) {
    if (good) {
        n_passed++;
        return;
    }
    n_failed++;
    const char *const type_name[] = {[FKV_F32] = "f32", [FKV_F16] = "f16", [FKV_BF16] = "bf16"};
    printf("FAIL %s: %s, D %u, %u bits, group %u\n", what, type_name[type], dim, bits, group);
}

static uint16_t half_at(const uint8_t *bytes, size_t i) {
    uint16_t half;
    memcpy(&half, bytes + 2 * i, sizeof half);
    return half;
}

static uint8_t *read_file(const char *path, size_t *n) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        printf("cannot read %s\n", path);
        exit(EXIT_FAILURE);
    }
    long size = ftell(file);
    rewind(file);
    uint8_t *bytes = size > 0 ? malloc((size_t)size) : NULL;
    if (bytes == NULL || fread(bytes, 1, (size_t)size, file) != (size_t)size) {
        printf("cannot read %s\n", path);
        exit(EXIT_FAILURE);
    }
    (void)fclose(file);
    *n = (size_t)size;
    return bytes;
}

/* ---- one case ---- */

/* Returns the distance between adjacent float16 values at the given magnitude: 2^(e - 10) for magnitudes from 2^e to 2^(e + 1),
 * or 2^-24 for denormals. */
static float ulp_f16(float magnitude) {
    int exponent;
    (void)frexpf(magnitude, &exponent);
    return ldexpf(1.0f, (exponent < -13 ? -13 : exponent) - 11);
}

static bool decodes_like_mlx(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], const float *ours,
                             const uint8_t *mlx) {
    for (uint32_t d = 0; d < codec->dim; d++) {
        float bias = fkv_f16_to_f32(half_at(part[FKV_PART_BIASES], d / codec->group));
        float theirs = fkv_f16_to_f32(half_at(mlx, d));
        float largest = fmaxf(fmaxf(fabsf(ours[d] - bias), fabsf(bias)), fabsf(ours[d]));
        bool good = isinf(theirs) ? largest >= 65504.0f : fabsf(ours[d] - theirs) <= DECODE_ULPS * ulp_f16(largest);
        if (!good) return false;
    }
    return true;
}

static void check_case(fkv_type type, uint32_t dim, uint32_t n_rows, const uint8_t *rows, reader *from) {
    uint32_t bits = take_u32(from);
    uint32_t group = take_u32(from);
    uint32_t has_decoded = take_u32(from);
    fkv_codec codec;
    if (fkv_codec_make((fkv_codec_config){.bits = bits, .group = group}, dim, type, &codec) != FKV_OK) {
        printf("the codec rejects a case of the vectors: %s\n", fkv_message());
        exit(EXIT_FAILURE);
    }
    const uint8_t *expected[FKV_N_PARTS];
    for (int p = 0; p < FKV_N_PARTS; p++) expected[p] = take(from, (size_t)n_rows * codec.row_bytes[p]);
    const uint8_t *decoded = has_decoded ? take(from, (size_t)n_rows * dim * 2) : NULL;

    bool same[FKV_N_PARTS] = {true, true, true};
    bool finite = true;
    bool decode_agrees = true;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint8_t bytes[FKV_N_PARTS][FKV_MAX_HEAD_DIM];
        uint8_t *const part[FKV_N_PARTS] = {bytes[0], bytes[1], bytes[2]};
        const uint8_t *const made[FKV_N_PARTS] = {bytes[0], bytes[1], bytes[2]};
        uint16_t row[FKV_MAX_HEAD_DIM];
        float x[FKV_MAX_HEAD_DIM];
        memcpy(row, rows + (size_t)r * dim * 2, (size_t)dim * 2);
        fkv_rows_to_f32(type, row, x, dim);
        fkv_codec_encode(&codec, x, part);
        for (int p = 0; p < FKV_N_PARTS; p++)
            same[p] &= memcmp(made[p], expected[p] + (size_t)r * codec.row_bytes[p], codec.row_bytes[p]) == 0;
        fkv_codec_decode(&codec, made, x);
        for (uint32_t d = 0; d < dim; d++) finite &= isfinite(x[d]) != 0;
        if (decoded != NULL) decode_agrees &= decodes_like_mlx(&codec, made, x, decoded + (size_t)r * dim * 2);
    }
    count(same[FKV_PART_CODES], "codes differ from MLX's", type, dim, bits, group);
    count(same[FKV_PART_SCALES], "scales differ from MLX's", type, dim, bits, group);
    count(same[FKV_PART_BIASES], "biases differ from MLX's", type, dim, bits, group);
    count(finite, "a decoded value is not finite", type, dim, bits, group);
    if (decoded != NULL) count(decode_agrees, "decoded values are too far from MLX's", type, dim, bits, group);
}

static void check_sixteen_bits(fkv_type type, uint32_t dim, uint32_t n_rows, const uint8_t *rows) {
    fkv_codec codec;
    bool made = fkv_codec_make((fkv_codec_config){.bits = 16}, dim, type, &codec) == FKV_OK;
    bool same = made;
    for (uint32_t r = 0; made && r < n_rows; r++) {
        uint8_t stored[FKV_MAX_HEAD_DIM * 2];
        uint8_t *const part[FKV_N_PARTS] = {stored, NULL, NULL};
        uint16_t row[FKV_MAX_HEAD_DIM];
        float x[FKV_MAX_HEAD_DIM];
        memcpy(row, rows + (size_t)r * dim * 2, (size_t)dim * 2);
        fkv_rows_to_f32(type, row, x, dim);
        fkv_codec_encode(&codec, x, part);
        same &= memcmp(stored, row, (size_t)dim * 2) == 0;
    }
    count(same, "16-bit rows do not round-trip", type, dim, 16, dim);
}

static void check_set(reader *from) {
    fkv_type type = (fkv_type)take_u32(from);
    uint32_t dim = take_u32(from);
    uint32_t n_rows = take_u32(from);
    uint32_t n_cases = take_u32(from);
    if ((type != FKV_F16 && type != FKV_BF16) || dim > FKV_MAX_HEAD_DIM) {
        printf("the vectors have rows of invalid length %u or type %d\n", dim, (int)type);
        exit(EXIT_FAILURE);
    }
    const uint8_t *rows = take(from, (size_t)n_rows * dim * 2);
    check_sixteen_bits(type, dim, n_rows, rows);
    for (uint32_t i = 0; i < n_cases; i++) check_case(type, dim, n_rows, rows, from);
}

static void check_rotation(reader *from) {
    uint64_t seed;
    memcpy(&seed, take(from, sizeof seed), sizeof seed);
    uint32_t stream = take_u32(from);
    uint32_t dim = take_u32(from);
    if (dim == 0 || dim > FKV_MAX_HEAD_DIM) {
        printf("the vectors have a rotation of invalid length %u\n", dim);
        exit(EXIT_FAILURE);
    }
    size_t n_words = fkv_ceil_div(dim, 32);
    const uint8_t *signs = take(from, n_words * 4);
    const uint8_t *before = take(from, (size_t)dim * 4);
    const uint8_t *after = take(from, (size_t)dim * 4);
    fkv_rotation rotation;
    float x[FKV_MAX_HEAD_DIM];
    fkv_rotation_make(seed, stream, dim, &rotation);
    memcpy(x, before, (size_t)dim * 4);
    fkv_rotation_apply(&rotation, x);
    count(memcmp(rotation.signs, signs, n_words * 4) == 0, "rotation signs differ", FKV_F32, dim, 32, rotation.block);
    count(memcmp(x, after, (size_t)dim * 4) == 0, "a rotated row differs", FKV_F32, dim, 32, rotation.block);
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "tests/vectors/codec_mlx.bin";
    size_t n;
    uint8_t *bytes = read_file(path, &n);
    reader from = {.bytes = bytes, .left = n};
    if (memcmp(take(&from, 8), "FKVCODEC", 8) != 0 || take_u32(&from) != 1) {
        printf("%s does not contain codec vectors of version 1\n", path);
        return EXIT_FAILURE;
    }
    uint32_t n_sets = take_u32(&from);
    uint32_t n_rotations = take_u32(&from);
    for (uint32_t i = 0; i < n_sets; i++) check_set(&from);
    for (uint32_t i = 0; i < n_rotations; i++) check_rotation(&from);
    if (from.left != 0) {
        printf("FAIL %zu bytes after the last vector\n", from.left);
        n_failed++;
    }
    free(bytes);
    printf("%u passed, %u failed\n", n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
