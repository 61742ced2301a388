/* Rows of tensors: the numbers of an independent implementation to the bit, and how much is lost where a row is packed as codes
 * with 16-bit scales and biases. Loops over numbers ask before they call check, whose macros take longer than the numbers.
 */
#include "test.h"

#include "../src/base/float16.h"
#include "../src/model/forward/tensor_matrix.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_COLS = 512, MAX_ROW_BYTES = 2048, N_ROUNDS = 400 };

/* Half of the distance of two 16-bit floats, relative to normal ones and absolute below them. */
static const double HALF_ROUNDING = 0x1p-11;
static const double HALF_FLOOR = 0x1p-25;
/* In steps of a code: what packing a K format may cost. Q6_K: 32 codes from zero, each off by the rounding of the scale. Q4_K: 15
 * codes by that of the scale and, where zero lies in the group's range, at most 15 by that of the bias; Q5_K: 31. */
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

/* What a code stands for. */
static float number_of(const fkv_tensor *tensor, uint8_t code) {
    const int8_t *table = fkv_tensor_table(tensor);
    return table != NULL ? (float)table[code] : (float)code;
}

/* ---- the truth ---- */

static const uint8_t *read_u32s(const uint8_t *at, uint32_t *numbers, size_t n) {
    memcpy(numbers, at, n * sizeof *numbers);
    return at + n * sizeof *numbers;
}

/* The committed vectors, or more of them that the environment names; see the scripts. To be given back with free(). */
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

START_TEST(floats_are_those_of_the_gguf_package_to_the_bit) {
    size_t size = 0;
    uint8_t *bytes = read_vectors("FKV_TENSOR_VECTORS", "tests/vectors/tensor_rows.bin", &size);
    uint64_t n_blocks = 0;
    ck_assert_mem_eq(bytes, "FKVROWS", 8);
    uint32_t n_cases = 0;
    const uint8_t *at = read_u32s(bytes + 8, &n_cases, 1);
    ck_assert_uint_eq(n_cases, FKV_N_BLOCK_TYPES - 1); /* all but F32 */
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
                if (floats[i] != expected[i])
                    ck_abort_msg("%s row %u: number %u is %.9g instead of %.9g", fkv_tensor_type_name(tensor.type), row, i,
                                 (double)floats[i], (double)expected[i]);
        }
        n_blocks += (uint64_t)tensor.n_rows * MAX_COLS / fkv_tensor_format_of(tensor.type)->block_cols;
    }
    ck_assert_uint_eq((size_t)(at - bytes), size);
    printf("%u types, %llu blocks\n", n_cases, (unsigned long long)n_blocks);
    free(bytes);
}
END_TEST

/* What is packed as 16-bit floats: those hold it as it is. */
static void ck_halves(const fkv_tensor *tensor, uint32_t row, const float *floats, const float *expected) {
    alignas(float) uint8_t room[MAX_COLS * sizeof(float)];
    memset(room, 1, sizeof room);
    ck_assert(fkv_tensor_row_halves(tensor, row, room));
    for (uint32_t i = 0; i < tensor->n_cols; i++) {
        const float half = fkv_f16_to_f32(fkv_load_half(room, i));
        if (floats[i] != expected[i] || half != expected[i])
            ck_abort_msg("row %u: number %u is %.9g, packed %.9g instead of %.9g", row, i, (double)floats[i], (double)half,
                         (double)expected[i]);
        ck_assert_uint_eq(fkv_load_half(room, tensor->n_cols + i), 0);
    }
}

START_TEST(floats_of_mlx_arrays_are_those_of_mlx_to_the_bit) {
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
        uint32_t head[6]; /* mode, bits, group, type of scales, rows, columns */
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
                    ck_abort_msg("case %u row %u: number %u is %.9g, packed %.9g instead of %.9g", c, row, i, (double)floats[i],
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
    uint8_t odd[13]; /* files of MLX put numbers at any address */
    memcpy(odd + 1, f16, sizeof f16);
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_F16, .n_rows = 1, .n_cols = 3, .data = odd + 1}, 0, out);
    ck_assert_mem_eq(out, f16_values, sizeof out);
    memcpy(odd + 1, f32, sizeof f32);
    fkv_tensor_row_floats(&(fkv_tensor){.type = FKV_TENSOR_F32, .n_rows = 1, .n_cols = 3, .data = odd + 1}, 0, out);
    ck_assert_mem_eq(out, f32, sizeof out);
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
            if (rounded(scales[g]) * number_of(&tensor, codes[i]) + rounded(biases[g]) != floats[i])
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
            const double number = (double)number_of(&tensor, codes[i]);
            const double packed = (double)rounded((float)scale) * number + (double)rounded((float)bias);
            const double error = fabs(packed - (double)floats[i]);
            const fkv_panel_layout layout = fkv_panel_layout_of(f->kind);
            const double center = layout.biased || layout.table ? 0 : fkv_panel_center(layout);
            const double from_zero = fabs(number - center);
            const double of_bias = layout.biased ? fmax(fabs(bias) * HALF_ROUNDING, HALF_FLOOR) : 0;
            /* Q4_K's definition itself ends in one rounding to float */
            const double bound = from_zero * fmax(fabs(scale) * (HALF_ROUNDING * (1 + HALF_ROUNDING)), HALF_FLOOR) + of_bias +
                                 fabs((double)floats[i]) * 0x1p-24;
            if (codes[i] > f->max_code) ck_abort_msg("%s: code %u", fkv_tensor_type_name(f->type), codes[i]);
            if (error > bound)
                ck_abort_msg("%s: number %u of round %u is off by %g, bound %g", fkv_tensor_type_name(f->type), i, round, error,
                             bound);
            if (bound > 0) worst.in_bound = fmax(worst.in_bound, error / bound);
            if (!layout.table && is_ordinary(scale, bias, f->max_code))
                worst.in_steps = fmax(worst.in_steps, error / fabs(scale));
        }
    }
    return worst;
}

START_TEST(k_formats_lose_less_than_a_64th_of_a_step) { /* Q5_K, of more codes: a 32nd */
    for (uint32_t k = FIRST_K; k < FIRST_TABLE; k++) {
        const loss worst = measure(&QUANTIZED[k], 4);
        printf("%s: at most 1/%.0f of a step, %.2f of the bound\n", fkv_tensor_type_name(QUANTIZED[k].type), 1 / worst.in_steps,
               worst.in_bound);
        ck_assert_double_le(worst.in_steps, QUANTIZED[k].type == FKV_TENSOR_Q5_K ? 2 * K_STEPS : K_STEPS);
        ck_assert_double_ge(worst.in_steps, K_STEPS / 64); /* the claim is about something */
        ck_assert_double_ge(worst.in_bound, 0.9);
    }
}
END_TEST

START_TEST(k_formats_hold_their_bound_where_scales_are_denormal) {
    for (uint32_t k = FIRST_K; k < N_QUANTIZED; k++) {
        const double in_bound = measure(&QUANTIZED[k], 0x1p-18f).in_bound;
        if (k < FIRST_K + 2) ck_assert_double_gt(in_bound, 0.5); /* scales of fewer bits are halves still */
    }
}
END_TEST

START_TEST(tables_lose_no_more_than_their_scale) {
    for (uint32_t k = FIRST_TABLE; k < N_QUANTIZED; k++) ck_assert_double_ge(measure(&QUANTIZED[k], 4).in_bound, 0.5);
}
END_TEST

/* Scales of 2^-128 to 2^127: those that a half has are kept, others are what is nearest to them or too large. */
START_TEST(powers_of_two_are_packed_without_any_loss) {
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

/* ---- matrices that stay mapped ---- */

enum { MAPPED_ROWS = 40, MAPPED_TOKENS = 19 }; /* two whole panels and a half; a block of tokens and three more */

static void *take(uint64_t bytes) {
    void *block = aligned_alloc(64, (size_t)fkv_align_up(bytes + 1, 64));
    ck_assert_ptr_nonnull(block);
    memset(block, 0, (size_t)fkv_align_up(bytes + 1, 64));
    return block;
}

typedef struct mapped_world {
    fkv_tensor tensor; /* [MAPPED_ROWS, n_cols] */
    fkv_matrix packed, mapped;
    fkv_panel_room room;
    float *x, *out, *expected; /* [MAPPED_TOKENS, n_cols], [MAPPED_TOKENS, MAPPED_ROWS] */
    void *scratch, *input;
} mapped_world;

static void mapped_world_open(mapped_world *w, const fkv_tensor *tensor, uint32_t n_threads) {
    *w = (mapped_world){.tensor = *tensor};
    ck_assert_int_eq(fkv_tensor_matrix_shape(&w->tensor, &w->packed), FKV_OK);
    ck_assert_int_eq(fkv_tensor_map_matrix(&w->tensor, &w->mapped), FKV_OK);
    uint32_t n_cols = w->packed.n_cols;
    w->packed.panels = take(fkv_matrix_bytes(&w->packed));
    w->scratch = take(fkv_tensor_scratch_bytes(n_cols));
    fkv_tensor_set_rows(&w->tensor, 0, MAPPED_ROWS, &w->packed, 0, w->scratch);
    fkv_panel_room_grow(&w->room, &w->mapped);
    w->room.bytes = take(n_threads * w->room.thread_bytes);
    memset(w->room.bytes, 0xee, (size_t)(n_threads * w->room.thread_bytes)); /* as other matrices leave it */
    w->x = take((uint64_t)MAPPED_TOKENS * n_cols * sizeof *w->x);
    w->out = take((uint64_t)MAPPED_TOKENS * MAPPED_ROWS * sizeof *w->out);
    w->expected = take((uint64_t)MAPPED_TOKENS * MAPPED_ROWS * sizeof *w->out);
    w->input = take(fkv_product_input_bytes(MAPPED_TOKENS, n_cols));
    for (uint32_t t = 0; t < MAPPED_TOKENS; t++)
        for (uint32_t c = 0; c < tensor->n_cols; c++) w->x[(size_t)t * n_cols + c] = (float)(int32_t)draw() * 0x1p-31f;
}

static void mapped_world_close(mapped_world *w) {
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
    void *place = take(fkv_workers_bytes(N_THREADS));
    ck_assert_int_eq(fkv_workers_open(place, N_THREADS, &workers), FKV_OK);
    mapped_world w;
    mapped_world_open(&w, tensor, N_THREADS);
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
    mapped_world_close(&w);
    fkv_workers_close(workers);
    free(place);
}

START_TEST(mapped_rows_give_the_bits_of_panels) {
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
        rows[17 * i] = (uint8_t)(100 + draw() % 40); /* some below what f16 has */
    }
    check_mapped(
        &(fkv_tensor){.type = FKV_TENSOR_MXFP4, .n_rows = MAPPED_ROWS, .n_cols = MAX_COLS, .data = rows, .row_bytes = 272});
    for (uint32_t i = 0; i < MAPPED_ROWS * 500; i++) { /* columns that are padded */
        float x = (float)(int32_t)draw() * 0x1p-31f;
        memcpy(rows + 4 * (size_t)i, &x, sizeof x);
    }
    check_mapped(&(fkv_tensor){.type = FKV_TENSOR_F32, .n_rows = MAPPED_ROWS, .n_cols = 500, .data = rows, .row_bytes = 2000});
}
END_TEST

START_TEST(a_mapped_scale_beyond_f16_is_told) {
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
        void *place = take(fkv_workers_bytes(1));
        ck_assert_int_eq(fkv_workers_open(place, 1, &workers), FKV_OK);
        mapped_world w;
        mapped_world_open(&w, &tensor, 1);
        const fkv_product mapped = {&w.mapped, NULL, w.out, MAPPED_ROWS, &w.room};
        fkv_product_run(workers, fkv_cpu_best_isa(), &mapped, 1, w.x, 1, w.packed.n_cols, w.input);
        ck_assert(w.room.lost);
        mapped_world_close(&w);
        fkv_workers_close(workers);
        free(place);
    }
}
END_TEST

TEST_MAIN("tensor_rows", floats_are_those_of_the_gguf_package_to_the_bit, floats_of_mlx_arrays_are_those_of_mlx_to_the_bit,
          floats_of_plain_types_are_the_stored_numbers, every_type_says_how_it_is_packed, old_formats_are_packed_without_any_loss,
          k_formats_lose_less_than_a_64th_of_a_step, k_formats_hold_their_bound_where_scales_are_denormal,
          tables_lose_no_more_than_their_scale, powers_of_two_are_packed_without_any_loss, mapped_rows_give_the_bits_of_panels,
          a_mapped_scale_beyond_f16_is_told)
