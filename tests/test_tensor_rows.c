/* Rows of tensors: the numbers of an independent implementation to the bit, and how much is lost where a row is packed as codes
 * with 16-bit scales and biases. Loops over numbers ask before they call check, whose macros take longer than the numbers.
 */
#include "test.h"

#include "../src/base/float16.h"
#include "../src/model/files/tensor_rows.h"

#include <math.h>
#include <stdio.h>

enum { MAX_COLS = 512, MAX_ROW_BYTES = 2048, N_ROUNDS = 400, MAX_FILE_BYTES = 64 * 1024 };

/* Half of the distance of two 16-bit floats, relative to normal ones and absolute below them. */
static const double HALF_ROUNDING = 0x1p-11;
static const double HALF_FLOOR = 0x1p-25;
/* In steps of a code: what packing a K format may cost. Q6_K: 32 codes from zero, each off by the rounding of the scale. Q4_K: 15
 * codes by that of the scale and, where zero lies in the group's range, at most 15 by that of the bias. */
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
    int halves[2]; /* where they lie in a block; -1: there is none */
    fkv_matrix_kind kind;
    uint32_t group;
    uint8_t max_code;
} format;

static const format QUANTIZED[] = {
    {FKV_TENSOR_Q4_0, 32, 18, {0, -1}, FKV_MATRIX_CENTERED4, 32, 15},
    {FKV_TENSOR_Q4_1, 32, 20, {0, 2}, FKV_MATRIX_AFFINE4, 32, 15},
    {FKV_TENSOR_Q5_0, 32, 22, {0, -1}, FKV_MATRIX_CENTERED5, 32, 31},
    {FKV_TENSOR_Q8_0, 32, 34, {0, -1}, FKV_MATRIX_CENTERED8, 32, 255},
    {FKV_TENSOR_Q4_K, 256, 144, {0, 2}, FKV_MATRIX_AFFINE4, 32, 15},
    {FKV_TENSOR_Q6_K, 256, 210, {208, -1}, FKV_MATRIX_CENTERED6, 16, 63},
};
enum { N_EXACT = 4, Q4_K = 4, Q6_K = 5, N_QUANTIZED = 6 };

/* Random bits, with halves up to `largest` in size, of both signs. */
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

/* ---- the truth ---- */

static const uint8_t *read_u32s(const uint8_t *at, uint32_t *numbers, size_t n) {
    memcpy(numbers, at, n * sizeof *numbers);
    return at + n * sizeof *numbers;
}

START_TEST(floats_are_those_of_the_gguf_package_to_the_bit) {
    static uint8_t bytes[MAX_FILE_BYTES];
    FILE *file = fopen("tests/vectors/tensor_rows.bin", "rb");
    ck_assert_ptr_nonnull(file);
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    ck_assert_int_eq(fclose(file), 0);
    ck_assert_uint_lt(size, sizeof bytes);
    ck_assert_mem_eq(bytes, "FKVROWS", 8);
    uint32_t n_cases = 0;
    const uint8_t *at = read_u32s(bytes + 8, &n_cases, 1);
    ck_assert_uint_eq(n_cases, 8);
    for (uint32_t c = 0; c < n_cases; c++) {
        uint32_t head[4]; /* type, n_rows, n_cols, row_bytes */
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
            for (uint32_t i = 0; i < MAX_COLS; i++) /* by value: the package has zeros of the other sign */
                ck_assert_msg(floats[i] == expected[i], "%s row %u: number %u is %.9g instead of %.9g",
                              fkv_tensor_type_name(tensor.type), row, i, (double)floats[i], (double)expected[i]);
        }
    }
    ck_assert_uint_eq((size_t)(at - bytes), size);
}
END_TEST

START_TEST(floats_of_plain_types_are_the_stored_numbers) {
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
}
END_TEST

START_TEST(every_type_says_how_it_is_packed) {
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

START_TEST(old_formats_are_packed_without_any_loss) {
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const format *f = &QUANTIZED[round % N_EXACT];
        uint8_t row[MAX_ROW_BYTES];
        uint8_t codes[MAX_COLS];
        float scales[MAX_COLS / 16];
        float biases[MAX_COLS / 16];
        float floats[MAX_COLS];
        const fkv_tensor tensor = random_row(f, 500, row); /* 128 of them are a half still */
        fkv_tensor_row_floats(&tensor, 0, floats);
        fkv_tensor_row_codes(&tensor, 0, codes, scales, biases);
        for (uint32_t i = 0; i < MAX_COLS; i++) {
            const uint32_t g = i / f->group;
            if (codes[i] > f->max_code) ck_abort_msg("%s: code %u", fkv_tensor_type_name(f->type), codes[i]);
            if (rounded(scales[g]) * (float)codes[i] + rounded(biases[g]) != floats[i])
                ck_abort_msg("%s: number %u of round %u", fkv_tensor_type_name(f->type), i, round);
        }
    }
}
END_TEST

typedef struct loss {
    double in_bound; /* the largest part of the bound that any number used */
    double in_steps; /* the largest error in steps of a code, of groups that the claim in steps is about */
} loss;

/* Whether the claim in steps is about a group: scale and bias are no denormals, and zero lies in the range of its codes. */
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
            const double packed = (double)rounded((float)scale) * codes[i] + (double)rounded((float)bias);
            const double error = fabs(packed - (double)floats[i]);
            const double from_zero = f->type == FKV_TENSOR_Q6_K ? fabs(codes[i] - 32.0) : codes[i];
            const double of_bias = f->type == FKV_TENSOR_Q6_K ? 0 : fmax(fabs(bias) * HALF_ROUNDING, HALF_FLOOR);
            /* Q4_K's definition itself ends in one rounding to float */
            const double bound = from_zero * fmax(fabs(scale) * (HALF_ROUNDING * (1 + HALF_ROUNDING)), HALF_FLOOR) + of_bias +
                                 fabs((double)floats[i]) * 0x1p-24;
            if (codes[i] > f->max_code) ck_abort_msg("%s: code %u", fkv_tensor_type_name(f->type), codes[i]);
            if (error > bound)
                ck_abort_msg("%s: number %u of round %u is off by %g, bound %g", fkv_tensor_type_name(f->type), i, round, error,
                             bound);
            if (bound > 0) worst.in_bound = fmax(worst.in_bound, error / bound);
            if (is_ordinary(scale, bias, f->max_code)) worst.in_steps = fmax(worst.in_steps, error / fabs(scale));
        }
    }
    return worst;
}

START_TEST(k_formats_lose_less_than_a_64th_of_a_step) {
    for (uint32_t k = Q4_K; k <= Q6_K; k++) {
        const loss worst = measure(&QUANTIZED[k], 4);
        printf("%s: at most 1/%.0f of a step, %.2f of the bound\n", fkv_tensor_type_name(QUANTIZED[k].type), 1 / worst.in_steps,
               worst.in_bound);
        ck_assert_double_le(worst.in_steps, K_STEPS);
        ck_assert_double_ge(worst.in_steps, K_STEPS / 8); /* the claim is about something */
        ck_assert_double_ge(worst.in_bound, 0.9);
    }
}
END_TEST

START_TEST(k_formats_hold_their_bound_where_scales_are_denormal) {
    for (uint32_t k = Q4_K; k <= Q6_K; k++) ck_assert_double_gt(measure(&QUANTIZED[k], 0x1p-18f).in_bound, 0.5);
}
END_TEST

TEST_MAIN("tensor_rows", floats_are_those_of_the_gguf_package_to_the_bit, floats_of_plain_types_are_the_stored_numbers,
          every_type_says_how_it_is_packed, old_formats_are_packed_without_any_loss, k_formats_lose_less_than_a_64th_of_a_step,
          k_formats_hold_their_bound_where_scales_are_denormal)
