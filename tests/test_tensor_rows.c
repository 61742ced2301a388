/* Tests of tensor rows: decoded values are bit-identical to the values of an independent implementation, and the error of packing
 * a row into codes with 16-bit scales and biases is bounded. The assertion macros are slow, so inner loops call them only for
 * values that have already failed a comparison. */
#include "test.h"

#include "../src/base/float16.h"
#include "../src/model/forward/tensor_matrix.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_COLS = 512, MAX_ROW_BYTES = 2048, N_ROUNDS = 400 };

/* Largest rounding errors of float16: relative for normal values, absolute for denormals. */
static const double HALF_ROUNDING = 0x1p-11;
static const double HALF_FLOOR = 0x1p-25;
/* Bound on the packing error of the K formats (Q2_K to Q6_K), in units of the distance between adjacent codes (steps). In Q6_K,
 * codes are at most 32 steps from zero, so rounding the scale causes an error of at most 32 * 2^-11. In Q4_K, rounding the scale
 * and rounding the bias cause at most 15 * 2^-11 each if zero is within the group's range. In Q5_K, the largest code is 31
 * instead of 15, so the bound is twice as large. */
static const double K_STEPS = 1.0 / 64;

static uint64_t state = 20250311;

static uint32_t draw(void) { /* splitmix64 */
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

typedef struct format {
    fkv_tensor_type type;
    uint32_t block_cols, block_bytes;
    int halves[2]; /* byte offsets of up to two 16-bit floats in a block; -1 for none */
    fkv_matrix_kind kind;
    uint32_t group;
    uint8_t max_code;
} format;

static const format QUANTIZED[] = {
    {FKV_TENSOR_Q4_0, 32, 18, {0, -1}, FKV_MATRIX_CENTERED4, 32, 15},
    {FKV_TENSOR_Q4_1, 32, 20, {0, 2}, FKV_MATRIX_AFFINE4, 32, 15},
    {FKV_TENSOR_Q5_0, 32, 22, {0, -1}, FKV_MATRIX_CENTERED5, 32, 31},
    {FKV_TENSOR_Q8_0, 32, 34, {0, -1}, FKV_MATRIX_CENTERED8, 32, 255},
    {FKV_TENSOR_Q5_1, 32, 24, {0, 2}, FKV_MATRIX_AFFINE5, 32, 31},
    {FKV_TENSOR_IQ4_NL, 32, 18, {0, -1}, FKV_MATRIX_TABLE4, 32, 15},
    {FKV_TENSOR_TQ2_0, 256, 66, {64, -1}, FKV_MATRIX_AFFINE2, 32, 3},
    {FKV_TENSOR_NVFP4, 64, 36, {-1, -1}, FKV_MATRIX_TABLE4_16, 16, 15},
    {FKV_TENSOR_Q4_K, 256, 144, {0, 2}, FKV_MATRIX_AFFINE4, 32, 15},
    {FKV_TENSOR_Q6_K, 256, 210, {208, -1}, FKV_MATRIX_CENTERED6_16, 16, 63},
    {FKV_TENSOR_Q5_K, 256, 176, {0, 2}, FKV_MATRIX_AFFINE5, 32, 31},
    {FKV_TENSOR_Q2_K, 256, 84, {80, 82}, FKV_MATRIX_AFFINE2_16, 16, 3},
    {FKV_TENSOR_Q3_K, 256, 110, {108, -1}, FKV_MATRIX_CENTERED3_16, 16, 7},
    {FKV_TENSOR_IQ4_XS, 256, 136, {0, -1}, FKV_MATRIX_TABLE4, 32, 15},
    {FKV_TENSOR_IQ1_S, 256, 50, {0, -1}, FKV_MATRIX_TABLE4, 32, 15},
    {FKV_TENSOR_IQ2_XXS, 256, 66, {0, -1}, FKV_MATRIX_TABLE4, 32, 15},
    {FKV_TENSOR_IQ2_XS, 256, 74, {0, -1}, FKV_MATRIX_TABLE4_16, 16, 15},
    {FKV_TENSOR_IQ2_S, 256, 82, {0, -1}, FKV_MATRIX_TABLE4_16, 16, 15},
    {FKV_TENSOR_IQ3_XXS, 256, 98, {0, -1}, FKV_MATRIX_TABLE4, 32, 15},
    {FKV_TENSOR_IQ3_S, 256, 110, {0, -1}, FKV_MATRIX_TABLE4, 32, 15},
};
enum { N_EXACT = 8, FIRST_K = 8, FIRST_TABLE = 13, N_QUANTIZED = 20 };

/* Generates random bits; the 16-bit floats among them have both signs and magnitudes up to `largest`. */
static fkv_tensor random_row(const format *f, float largest, uint8_t *row) {
    const uint32_t n_blocks = MAX_COLS / f->block_cols;
    for (uint32_t i = 0; i < n_blocks * f->block_bytes; i++) row[i] = (uint8_t)draw();
    for (uint32_t b = 0; b < n_blocks; b++)
        for (uint32_t h = 0; h < 2; h++) {
            const uint16_t half = (uint16_t)(draw() % (fkv_f32_to_f16(largest) + 1u) | (draw() & 1u) << 15);
            if (f->halves[h] >= 0) memcpy(row + b * f->block_bytes + (size_t)f->halves[h], &half, sizeof half);
        }
    return (fkv_tensor){
        .type = f->type, .n_rows = 1, .n_cols = MAX_COLS, .data = row, .row_bytes = (uint64_t)n_blocks * f->block_bytes};
}

static float rounded(float x) { return fkv_f16_to_f32(fkv_f32_to_f16(x)); }

/* Returns the value that a code represents before scaling. */
static float number_of(const fkv_tensor *tensor, uint8_t code) {
    const int8_t *table = fkv_tensor_table(tensor);
    return table != NULL ? (float)table[code] : (float)code;
}

/* ---- reference values ---- */

static const uint8_t *read_u32s(const uint8_t *at, uint32_t *numbers, size_t n) {
    memcpy(numbers, at, n * sizeof *numbers);
    return at + n * sizeof *numbers;
}

/* Reads test vectors from the file whose path is in an environment variable or, if the variable is not set, from the committed
 * file. The caller frees the result. */
static uint8_t *read_vectors(const char *variable, const char *committed, size_t *size) {
    const char *path = getenv(variable);
    FILE *file = fopen(path != NULL ? path : committed, "rb");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    uint8_t *bytes = malloc(*size);
    ck_assert_ptr_nonnull(bytes);
    rewind(file);
    ck_assert_uint_eq(fread(bytes, 1, *size, file), *size);
    ck_assert_int_eq(fclose(file), 0);
    return bytes;
}

START_TEST(gguf_rows_are_bit_identical_to_the_gguf_package) {
    size_t size = 0;
    uint8_t *bytes = read_vectors("FKV_TENSOR_VECTORS", "tests/vectors/tensor_rows.bin", &size);
    uint64_t n_blocks = 0;
    ck_assert_mem_eq(bytes, "FKVROWS", 8);
    uint32_t n_cases = 0;
    const uint8_t *at = read_u32s(bytes + 8, &n_cases, 1);
    ck_assert_uint_eq(n_cases, FKV_N_BLOCK_TYPES - 1); /* all block types except F32 are tested */
    for (uint32_t c = 0; c < n_cases; c++) {
        uint32_t head[4]; /* header of a case: type, n_rows, n_cols, row_bytes */
        at = read_u32s(at, head, 4);
        const fkv_tensor tensor = {
            .type = (fkv_tensor_type)head[0], .n_rows = head[1], .n_cols = head[2], .data = at, .row_bytes = head[3]};
        ck_assert_uint_eq(tensor.n_cols, MAX_COLS);
        at += (size_t)head[1] * head[3];
        for (uint32_t row = 0; row < tensor.n_rows; row++, at += MAX_COLS * sizeof(float)) {
            float floats[MAX_COLS];
            float expected[MAX_COLS];
            memcpy(expected, at, sizeof expected);
            fkv_tensor_row_floats(&tensor, row, floats);
            for (uint32_t i = 0; i < MAX_COLS; i++) /* compares values instead of bits, because zeros may differ in sign */
                if (floats[i] != expected[i])
                    ck_abort_msg("%s row %u: value %u is %.9g, expected %.9g", fkv_tensor_type_name(tensor.type), row, i,
                                 (double)floats[i], (double)expected[i]);
        }
        n_blocks += (uint64_t)tensor.n_rows * MAX_COLS / fkv_tensor_format_of(tensor.type)->block_cols;
    }
    ck_assert_uint_eq((size_t)(at - bytes), size);
    printf("%u types, %llu blocks\n", n_cases, (unsigned long long)n_blocks);
    free(bytes);
}
END_TEST

/* Checks the 16-bit form of a row whose values are exact in 16 bits. */
static void ck_halves(const fkv_tensor *tensor, uint32_t row, const float *floats, const float *expected) {
    alignas(float) uint8_t room[MAX_COLS * sizeof(float)];
    memset(room, 1, sizeof room);
    ck_assert(fkv_tensor_row_halves(tensor, row, room));
    for (uint32_t i = 0; i < tensor->n_cols; i++) {
        const float half = fkv_f16_to_f32(fkv_load_half(room, i));
        if (floats[i] != expected[i] || half != expected[i])
            ck_abort_msg("row %u: value %u is %.9g, packed %.9g, expected %.9g", row, i, (double)floats[i], (double)half,
                         (double)expected[i]);
        ck_assert_uint_eq(fkv_load_half(room, tensor->n_cols + i), 0);
    }
}

START_TEST(mlx_arrays_are_bit_identical_to_mlx) {
    static const fkv_tensor_type modes[] = {FKV_TENSOR_MLX_AFFINE, FKV_TENSOR_MLX_MXFP4, FKV_TENSOR_MLX_NVFP4,
                                            FKV_TENSOR_MLX_MXFP8};
    static const fkv_tensor_type kinds[] = {FKV_TENSOR_F32, FKV_TENSOR_F16, FKV_TENSOR_BF16, FKV_TENSOR_U8};
    size_t size = 0;
    uint8_t *bytes = read_vectors("FKV_ARRAY_VECTORS", "tests/vectors/array_codes.bin", &size);
    ck_assert_mem_eq(bytes, "FKVARRS", 8);
    uint32_t n_cases = 0;
    uint64_t n_groups = 0;
    const uint8_t *at = read_u32s(bytes + 8, &n_cases, 1);
    for (uint32_t c = 0; c < n_cases; c++) {
        uint32_t head[6]; /* header of a case: mode, bits, group size, scale type, rows, columns */
        at = read_u32s(at, head, 6);
        fkv_tensor tensor = {.type = modes[head[0]], .bits = head[1], .group = head[2], .scale_type = kinds[head[3]]};
        tensor.n_rows = head[4];
        tensor.n_cols = head[5];
        tensor.row_bytes = (uint64_t)tensor.n_cols * tensor.bits / 8;
        const size_t n_scales = (size_t)tensor.n_rows * (tensor.n_cols / tensor.group);
        const size_t part = n_scales * fkv_tensor_format_of(tensor.scale_type)->block_bytes;
        tensor.data = at;
        tensor.scale_row_bytes = part / tensor.n_rows;
        tensor.scales = at += tensor.n_rows * tensor.row_bytes;
        at += part;
        if (head[0] == 0) {
            tensor.biases = at;
            at += part;
        }
        for (uint32_t row = 0; row < tensor.n_rows; row++, at += tensor.n_cols * sizeof(float)) {
            float floats[MAX_COLS];
            float expected[MAX_COLS];
            uint8_t codes[MAX_COLS];
            float scales[MAX_COLS / 16];
            float biases[MAX_COLS / 16];
            uint32_t group = 0;
            fkv_panel_layout layout = fkv_panel_layout_of(fkv_tensor_matrix_kind(&tensor, &group));
            memcpy(expected, at, tensor.n_cols * sizeof(float));
            fkv_tensor_row_floats(&tensor, row, floats);
            if (group == 0) {
                ck_halves(&tensor, row, floats, expected);
                continue;
            }
            fkv_tensor_row_codes(&tensor, row, codes, scales, biases);
            for (uint32_t i = 0; i < tensor.n_cols; i++) {
                const float packed = scales[i / group] * number_of(&tensor, codes[i]) + biases[i / group];
                if (floats[i] != expected[i] || packed != expected[i] || codes[i] >> layout.bits != 0)
                    ck_abort_msg("case %u row %u: value %u is %.9g, packed %.9g, expected %.9g", c, row, i, (double)floats[i],
                                 (double)packed, (double)expected[i]);
            }
        }
        n_groups += n_scales;
    }
    ck_assert_uint_eq((size_t)(at - bytes), size);
    printf("%u kinds of arrays, %llu groups\n", n_cases, (unsigned long long)n_groups);
    free(bytes);
}
END_TEST

START_TEST(plain_types_give_the_stored_values) {
    const float f32[3] = {1.5f, -0.0f, 3e38f};
    const uint16_t bf16[3] = {0x3fc0, 0x8000, 0x7f7f};
    const uint16_t f16[3] = {0x3e00, 0x0001, 0xfbff};
    const float bf16_values[3] = {1.5f, -0.0f, 0x1.fep127f};
    const float f16_values[3] = {1.5f, 0x1p-24f, -65504.0f};
    float out[3];
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_F32, .n_rows = 1, .n_cols = 3, .data = (const uint8_t *)f32}, 0, out);
    ck_assert_mem_eq(out, f32, sizeof out);
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_BF16, .n_rows = 1, .n_cols = 3, .data = (const uint8_t *)bf16}, 0,
                          out);
    ck_assert_mem_eq(out, bf16_values, sizeof out);
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_F16, .n_rows = 1, .n_cols = 3, .data = (const uint8_t *)f16}, 0, out);
    ck_assert_mem_eq(out, f16_values, sizeof out);
    uint8_t odd[13]; /* MLX does not align tensors in the files that it writes */
    memcpy(odd + 1, f16, sizeof f16);
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_F16, .n_rows = 1, .n_cols = 3, .data = odd + 1}, 0, out);
    ck_assert_mem_eq(out, f16_values, sizeof out);
    memcpy(odd + 1, f32, sizeof f32);
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_F32, .n_rows = 1, .n_cols = 3, .data = odd + 1}, 0, out);
    ck_assert_mem_eq(out, f32, sizeof out);
}
END_TEST

START_TEST(every_type_has_its_matrix_kind) {
    uint32_t group = 7;
    for (uint32_t i = 0; i < N_QUANTIZED; i++) {
        ck_assert_int_eq(fkv_tensor_matrix_kind(&(fkv_tensor){.type = QUANTIZED[i].type}, &group), QUANTIZED[i].kind);
        ck_assert_uint_eq(group, QUANTIZED[i].group);
    }
    ck_assert_int_eq(fkv_tensor_matrix_kind(&(fkv_tensor){.type = FKV_TENSOR_F32}, &group), FKV_MATRIX_F32);
    ck_assert_int_eq(fkv_tensor_matrix_kind(&(fkv_tensor){.type = FKV_TENSOR_F16}, &group), FKV_MATRIX_F16);
    ck_assert_int_eq(fkv_tensor_matrix_kind(&(fkv_tensor){.type = FKV_TENSOR_BF16}, &group), FKV_MATRIX_BF16);
    ck_assert_uint_eq(group, 0);
}
END_TEST

/* ---- packing ---- */

START_TEST(legacy_formats_are_packed_without_loss) {
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const format *f = &QUANTIZED[round % N_EXACT];
        uint8_t row[MAX_ROW_BYTES];
        uint8_t codes[MAX_COLS];
        float scales[MAX_COLS / 16];
        float biases[MAX_COLS / 16];
        float floats[MAX_COLS];
        const fkv_tensor tensor = random_row(f, 500, row); /* 128 times the largest scale is still within the 16-bit range */
        fkv_tensor_row_floats(&tensor, 0, floats);
        fkv_tensor_row_codes(&tensor, 0, codes, scales, biases);
        for (uint32_t i = 0; i < MAX_COLS; i++) {
            const uint32_t g = i / f->group;
            if (codes[i] > f->max_code) ck_abort_msg("%s: code %u", fkv_tensor_type_name(f->type), codes[i]);
            if (rounded(scales[g]) * number_of(&tensor, codes[i]) + rounded(biases[g]) != floats[i])
                ck_abort_msg("%s: wrong value %u in round %u", fkv_tensor_type_name(f->type), i, round);
        }
    }
}
END_TEST

typedef struct loss {
    double in_bound; /* largest ratio of an error to its bound, over all values */
    double in_steps; /* largest error in quantization steps, over all groups for which is_ordinary() is true */
} loss;

/* Returns true if the error bound that is stated in quantization steps applies to a group: its scale and bias are not denormal,
 * and zero is within the range of its values. */
static bool is_ordinary(double scale, double bias, double max_code) {
    const double far_end = scale * max_code + bias;
    return fabs(scale) >= 0x1p-14 && (bias == 0 || fabs(bias) >= 0x1p-14) && bias * far_end <= 0;
}

static loss measure(const format *f, float largest) {
    loss worst = {0};
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        uint8_t row[MAX_ROW_BYTES];
        uint8_t codes[MAX_COLS];
        float scales[MAX_COLS / 16];
        float biases[MAX_COLS / 16];
        float floats[MAX_COLS];
        const fkv_tensor tensor = random_row(f, largest, row);
        fkv_tensor_row_floats(&tensor, 0, floats);
        fkv_tensor_row_codes(&tensor, 0, codes, scales, biases);
        for (uint32_t i = 0; i < MAX_COLS; i++) {
            const double scale = (double)scales[i / f->group];
            const double bias = (double)biases[i / f->group];
            const double number = (double)number_of(&tensor, codes[i]);
            const double packed = (double)rounded((float)scale) * number + (double)rounded((float)bias);
            const double error = fabs(packed - (double)floats[i]);
            const fkv_panel_layout layout = fkv_panel_layout_of(f->kind);
            const double center = layout.biased || layout.table ? 0 : fkv_panel_center(layout);
            const double from_zero = fabs(number - center);
            const double of_bias = layout.biased ? fmax(fabs(bias) * HALF_ROUNDING, HALF_FLOOR) : 0;
            /* the last term of the bound allows for the rounding of unpacked Q4_K values to float */
            const double bound = from_zero * fmax(fabs(scale) * (HALF_ROUNDING * (1 + HALF_ROUNDING)), HALF_FLOOR) + of_bias +
                                 fabs((double)floats[i]) * 0x1p-24;
            if (codes[i] > f->max_code) ck_abort_msg("%s: code %u", fkv_tensor_type_name(f->type), codes[i]);
            if (error > bound)
                ck_abort_msg("%s: value %u of round %u has an error of %g, bound %g", fkv_tensor_type_name(f->type), i, round,
                             error, bound);
            if (bound > 0) worst.in_bound = fmax(worst.in_bound, error / bound);
            if (!layout.table && is_ordinary(scale, bias, f->max_code))
                worst.in_steps = fmax(worst.in_steps, error / fabs(scale));
        }
    }
    return worst;
}

START_TEST(k_formats_lose_less_than_a_64th_of_a_step) { /* for Q5_K, which has more codes: less than a 32nd */
    for (uint32_t k = FIRST_K; k < FIRST_TABLE; k++) {
        const loss worst = measure(&QUANTIZED[k], 4);
        printf("%s: the largest error is 1/%.0f of a step and %.2f of its bound\n", fkv_tensor_type_name(QUANTIZED[k].type),
               1 / worst.in_steps, worst.in_bound);
        ck_assert_double_le(worst.in_steps, QUANTIZED[k].type == FKV_TENSOR_Q5_K ? 2 * K_STEPS : K_STEPS);
        ck_assert_double_ge(worst.in_steps,
                            K_STEPS / 64); /* the largest error is not negligible, so the test of the bound is meaningful */
        ck_assert_double_ge(worst.in_bound, 0.9);
    }
}
END_TEST

START_TEST(k_formats_stay_within_their_bound_with_denormal_scales) {
    for (uint32_t k = FIRST_K; k < N_QUANTIZED; k++) {
        const double in_bound = measure(&QUANTIZED[k], 0x1p-18f).in_bound;
        if (k < FIRST_K + 2)
            ck_assert_double_gt(
                in_bound,
                0.5); /* checked only for the first two K formats, because scales with fewer bits are exact in 16 bits */
    }
}
END_TEST

START_TEST(table_formats_lose_no_more_than_their_scale) {
    for (uint32_t k = FIRST_TABLE; k < N_QUANTIZED; k++) ck_assert_double_ge(measure(&QUANTIZED[k], 4).in_bound, 0.5);
}
END_TEST

/* Tests scales from 2^-128 to 2^127, which are exact in float. Only scales from 2^-24 to 2^15 are exact in f16. */
START_TEST(power_of_two_scales_are_packed_without_loss) {
    for (uint32_t e = 0; e < 256; e++) {
        uint8_t row[17] = {(uint8_t)e, 0xf7};
        uint8_t codes[32];
        float scale = 0;
        float bias = 1;
        float floats[32];
        const fkv_tensor tensor = {.type = FKV_TENSOR_MXFP4, .n_rows = 1, .n_cols = 32, .data = row, .row_bytes = sizeof row};
        fkv_tensor_row_floats(&tensor, 0, floats);
        fkv_tensor_row_codes(&tensor, 0, codes, &scale, &bias);
        ck_assert(scale == ldexpf(1, (int)e - 128) && bias == 0 && codes[0] == 7 && codes[16] == 15);
        ck_assert(floats[0] == scale * 12 && floats[16] == scale * -12);
        ck_assert((rounded(scale) == scale) == (e >= 104 && e < 144));
    }
}
END_TEST

/* ---- mapped matrices ---- */

enum {
    MAPPED_ROWS = 40,
    MAPPED_TOKENS = 19
}; /* 40 rows fill two and a half panels of 16 rows; 19 tokens fill one block of 16 tokens and part of a second block */

static void *allocate(uint64_t bytes) {
    void *block = aligned_alloc(64, (size_t)fkv_align_up(bytes + 1, 64));
    ck_assert_ptr_nonnull(block);
    memset(block, 0, (size_t)fkv_align_up(bytes + 1, 64));
    return block;
}

typedef struct mapped_fixture {
    fkv_tensor tensor; /* [MAPPED_ROWS, n_cols] */
    fkv_matrix packed, mapped;
    fkv_panel_room room;
    float *x, *out, *expected; /* [MAPPED_TOKENS, n_cols], [MAPPED_TOKENS, MAPPED_ROWS] */
    void *scratch, *input;
} mapped_fixture;

static void mapped_fixture_open(mapped_fixture *w, const fkv_tensor *tensor, uint32_t n_threads) {
    *w = (mapped_fixture){.tensor = *tensor};
    ck_assert_int_eq(fkv_tensor_matrix_shape(&w->tensor, &w->packed), FKV_OK);
    ck_assert_int_eq(fkv_tensor_map_matrix(&w->tensor, &w->mapped), FKV_OK);
    uint32_t n_cols = w->packed.n_cols;
    w->packed.panels = allocate(fkv_matrix_bytes(&w->packed));
    w->scratch = allocate(fkv_tensor_scratch_bytes(n_cols));
    fkv_tensor_set_rows(&w->tensor, 0, MAPPED_ROWS, &w->packed, 0, w->scratch);
    fkv_panel_room_grow(&w->room, &w->mapped);
    w->room.bytes = allocate(n_threads * w->room.thread_bytes);
    /* fills the scratch memory with arbitrary bytes, as if other matrices had used it */
    memset(w->room.bytes, 0xee, (size_t)(n_threads * w->room.thread_bytes));
    w->x = allocate((uint64_t)MAPPED_TOKENS * n_cols * sizeof *w->x);
    w->out = allocate((uint64_t)MAPPED_TOKENS * MAPPED_ROWS * sizeof *w->out);
    w->expected = allocate((uint64_t)MAPPED_TOKENS * MAPPED_ROWS * sizeof *w->out);
    w->input = allocate(fkv_product_input_bytes(MAPPED_TOKENS, n_cols));
    for (uint32_t t = 0; t < MAPPED_TOKENS; t++)
        for (uint32_t c = 0; c < tensor->n_cols; c++) w->x[(size_t)t * n_cols + c] = (float)(int32_t)draw() * 0x1p-31f;
}

static void mapped_fixture_close(mapped_fixture *w) {
    free(w->packed.panels);
    free(w->scratch);
    free(w->room.bytes);
    free(w->x);
    free(w->out);
    free(w->expected);
    free(w->input);
}

static void check_mapped(const fkv_tensor *tensor) {
    static const fkv_isa isas[] = {FKV_ISA_SCALAR, FKV_ISA_NEON, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX};
    enum { N_THREADS = 2 };
    fkv_workers *workers = NULL;
    void *place = allocate(fkv_workers_bytes(N_THREADS));
    ck_assert_int_eq(fkv_workers_open(place, N_THREADS, &workers), FKV_OK);
    mapped_fixture w;
    mapped_fixture_open(&w, tensor, N_THREADS);
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        if (!fkv_cpu_runs(isas[i])) continue;
        const fkv_product packed = {&w.packed, NULL, w.expected, MAPPED_ROWS, NULL};
        const fkv_product mapped = {&w.mapped, NULL, w.out, MAPPED_ROWS, &w.room};
        fkv_product_run(workers, isas[i], &packed, 1, w.x, MAPPED_TOKENS, w.packed.n_cols, w.input);
        fkv_product_run(workers, isas[i], &mapped, 1, w.x, MAPPED_TOKENS, w.packed.n_cols, w.input);
        ck_assert_msg(memcmp(w.out, w.expected, MAPPED_TOKENS * MAPPED_ROWS * sizeof *w.out) == 0, "%s on %s",
                      fkv_tensor_type_name(tensor->type), fkv_isa_name(isas[i]));
        ck_assert(!w.room.lost);
    }
    mapped_fixture_close(&w);
    fkv_workers_close(workers);
    free(place);
}

START_TEST(mapped_rows_are_bit_identical_to_panels) {
    static uint8_t rows[MAPPED_ROWS * MAX_ROW_BYTES];
    for (uint32_t i = 0; i < N_QUANTIZED; i++) {
        fkv_tensor tensor = random_row(&QUANTIZED[i], 0.25f, rows);
        for (uint32_t r = 1; r < MAPPED_ROWS; r++) tensor = random_row(&QUANTIZED[i], 0.25f, rows + r * tensor.row_bytes);
        tensor.data = rows;
        tensor.n_rows = MAPPED_ROWS;
        check_mapped(&tensor);
    }
    for (uint32_t i = 0; i < MAPPED_ROWS * MAX_COLS / 32; i++) {
        for (uint32_t b = 1; b < 17; b++) rows[17 * i + b] = (uint8_t)draw();
        rows[17 * i] = (uint8_t)(100 + draw() % 40); /* some scales are below the f16 range */
    }
    check_mapped(
        &(fkv_tensor){.type = FKV_TENSOR_MXFP4, .n_rows = MAPPED_ROWS, .n_cols = MAX_COLS, .data = rows, .row_bytes = 272});
    for (uint32_t i = 0; i < MAPPED_ROWS * 500; i++) { /* padded columns */
        float x = (float)(int32_t)draw() * 0x1p-31f;
        memcpy(rows + 4 * (size_t)i, &x, sizeof x);
    }
    check_mapped(&(fkv_tensor){.type = FKV_TENSOR_F32, .n_rows = MAPPED_ROWS, .n_cols = 500, .data = rows, .row_bytes = 2000});
}
END_TEST

START_TEST(mapped_scale_beyond_f16_is_reported) {
    static const struct {
        fkv_tensor_type type;
        uint32_t block_bytes, at;
        uint8_t value;
    } cases[] = {{FKV_TENSOR_MXFP4, 17, 0, 200}, {FKV_TENSOR_Q8_0, 34, 1, 0x7c}, {FKV_TENSOR_Q4_1, 20, 3, 0x7c}};
    static uint8_t rows[MAPPED_ROWS * 34];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memset(rows, 0, sizeof rows);
        rows[17 * cases[i].block_bytes + cases[i].at] = cases[i].value;
        const fkv_tensor tensor = {
            .type = cases[i].type, .n_rows = MAPPED_ROWS, .n_cols = 32, .data = rows, .row_bytes = cases[i].block_bytes};
        fkv_workers *workers = NULL;
        void *place = allocate(fkv_workers_bytes(1));
        ck_assert_int_eq(fkv_workers_open(place, 1, &workers), FKV_OK);
        mapped_fixture w;
        mapped_fixture_open(&w, &tensor, 1);
        const fkv_product mapped = {&w.mapped, NULL, w.out, MAPPED_ROWS, &w.room};
        fkv_product_run(workers, fkv_cpu_best_isa(), &mapped, 1, w.x, 1, w.packed.n_cols, w.input);
        ck_assert(w.room.lost);
        mapped_fixture_close(&w);
        fkv_workers_close(workers);
        free(place);
    }
}
END_TEST

TEST_MAIN("tensor_rows", gguf_rows_are_bit_identical_to_the_gguf_package, mlx_arrays_are_bit_identical_to_mlx,
          plain_types_give_the_stored_values, every_type_has_its_matrix_kind, legacy_formats_are_packed_without_loss,
          k_formats_lose_less_than_a_64th_of_a_step, k_formats_stay_within_their_bound_with_denormal_scales,
          table_formats_lose_no_more_than_their_scale, power_of_two_scales_are_packed_without_loss,
          mapped_rows_are_bit_identical_to_panels, mapped_scale_beyond_f16_is_reported)
