/* Tests model folders quantized with Hugging Face tools: checks how their tensors are read and which folders are rejected.
 * Messages must name the file, the field and the reason. parity_models checks the values of quantized golden models; this program
 * tests the kinds of codes that no golden model contains. */
#include "page_file_fixture.h"
#include "test.h"

#include "../src/base/float16.h"
#include "../src/model/files/linear_codes.h"
#include "../src/model/files/safetensors.h"
#include "../src/model/files/tensor_rows.h"

#include <math.h>
#include <stdio.h>

#define MODULE "model.layers.0.mlp.up_proj"
#define SIZES                                                                                                                    \
    "\"vocab_size\": 256, \"num_hidden_layers\": 1, \"hidden_size\": 32, \"num_attention_heads\": 2, \"intermediate_size\": 32"

enum { MAX_PARTS = 4, MAX_DATA = 8192 };

typedef struct part {
    const char *end; /* suffix of the tensor's name */
    const char *dtype;
    uint32_t rows, cols; /* rows is 0 for a vector; both rows and cols are 0 for a scalar */
} part;

static uint8_t data[MAX_DATA]; /* concatenated data of all parts */

static size_t part_bytes(const part *p) {
    const size_t n = (size_t)(p->rows > 0 ? p->rows : 1) * (p->cols > 0 ? p->cols : 1);
    if (strcmp(p->dtype, "F16") == 0 || strcmp(p->dtype, "BF16") == 0) return 2 * n;
    return strcmp(p->dtype, "I32") == 0 || strcmp(p->dtype, "F32") == 0 ? 4 * n : n;
}

static void write_folder(const char *config, const part *parts) {
    static uint8_t file[MAX_DATA + 4096];
    char json[2048];
    char shape[32];
    size_t at = 0;
    int n = snprintf(json, sizeof json, "{\"model_type\": \"qwen3\", " SIZES ", \"quantization_config\": {%s}}", config);
    file_fixture_write_file(file_fixture_path("config.json"), (const uint8_t *)json, (size_t)n);
    n = 0;
    for (const part *p = parts; p->end != NULL; p++) {
        shape[0] = 0;
        if (p->rows > 0) (void)snprintf(shape, sizeof shape, "%u, %u", p->rows, p->cols);
        if (p->rows == 0 && p->cols > 0) (void)snprintf(shape, sizeof shape, "%u", p->cols);
        n += snprintf(json + n, sizeof json - (size_t)n,
                      "%c\"" MODULE "%s\": {\"dtype\": \"%s\", \"shape\": [%s], \"data_offsets\": [%zu, %zu]}",
                      p == parts ? '{' : ',', p->end, p->dtype, shape, at, at + part_bytes(p));
        at += part_bytes(p);
    }
    n += snprintf(json + n, sizeof json - (size_t)n, "}");
    const uint64_t n_header = (uint64_t)n;
    ck_assert_uint_le(at, MAX_DATA);
    memcpy(file, &n_header, 8);
    memcpy(file + 8, json, n_header);
    memcpy(file + 8 + n_header, data, at);
    file_fixture_write_file(file_fixture_path("model.safetensors"), file, 8 + n_header + at);
}

static void ck_rejected(const char *config, const part *parts, fkv_status expected, const char *words) {
    fkv_weights *weights = NULL;
    write_folder(config, parts);
    ck_status(fkv_weights_open(file_fixture_folder(), &weights), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not contain '%s'", fkv_message(), words);
    ck_assert_msg(strstr(fkv_message(), file_fixture_folder()) != NULL, "'%s' does not name the file", fkv_message());
}

static fkv_weights *opened(const char *config, const part *parts) {
    fkv_weights *weights = NULL;
    write_folder(config, parts);
    ck_ok(fkv_weights_open(file_fixture_folder(), &weights));
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 1);
    return weights;
}

#define GPTQ "\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 32"
#define AWQ "\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": 32"
#define FP8 "\"quant_method\": \"fp8\", \"weight_block_size\": [16, 16]"

/* Tensors that together represent a quantized weight with 64 columns and 16 rows. */
static const part GPTQ_PARTS[] = {{".qweight", "I32", 8, 16}, {".qzeros", "I32", 2, 2}, {".scales", "F16", 2, 16}, {0}};
static const part AWQ_PARTS[] = {{".qweight", "I32", 64, 2}, {".qzeros", "I32", 2, 2}, {".scales", "F16", 2, 16}, {0}};
static const part FP8_PARTS[] = {{".weight", "F8_E4M3", 16, 64}, {".weight_scale_inv", "F32", 1, 4}, {0}};

START_TEST(unsupported_configs_are_rejected_by_field) {
    static const struct {
        const char *config;
        fkv_status status;
        const char *words;
    } rows[] = {
        {"\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 128, \"desc_act\": true", FKV_UNSUPPORTED,
         "act-order (desc_act"},
        {"\"quant_method\": \"gptq\", \"bits\": 5, \"group_size\": 128", FKV_UNSUPPORTED, "gptq with 5 bits in groups of 128"},
        {"\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 48", FKV_UNSUPPORTED, "4 bits in groups of 48"},
        {"\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": -2", FKV_UNSUPPORTED, "4 bits in groups of -2"},
        {GPTQ ", \"checkpoint_format\": \"marlin\"", FKV_UNSUPPORTED, "checkpoint_format 'marlin'"},
        {"\"quant_method\": \"awq\", \"bits\": 8, \"group_size\": 128", FKV_UNSUPPORTED, "awq with 8 bits"},
        {AWQ ", \"version\": \"gemv\"", FKV_UNSUPPORTED, "awq version 'gemv'"},
        {AWQ ", \"zero_point\": false", FKV_UNSUPPORTED, "zero_point"},
        {"\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"", FKV_UNSUPPORTED, "fmt 'e5m2'"},
        {"\"quant_method\": \"fp8\", \"weight_block_size\": [0, 128]", FKV_FILE_FORMAT, "weight_block_size"},
        {"\"quant_method\": \"fp8\", \"weight_block_size\": 128", FKV_FILE_FORMAT, "weight_block_size"},
        {"\"quant_method\": \"compressed-tensors\"", FKV_UNSUPPORTED, "unsupported quant_method 'compressed-tensors'"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ck_rejected(rows[i].config, GPTQ_PARTS, rows[i].status, rows[i].words);
}
END_TEST

START_TEST(inconsistent_parts_are_rejected_by_name) {
    static const part no_zeros[] = {{".qweight", "I32", 8, 16}, {".scales", "F16", 2, 16}, {0}};
    static const part no_scales[] = {{".qweight", "I32", 8, 16}, {".qzeros", "I32", 2, 2}, {0}};
    static const part short_zeros[] = {{".qweight", "I32", 8, 16}, {".qzeros", "I32", 1, 2}, {".scales", "F16", 2, 16}, {0}};
    static const part odd_columns[] = {{".qweight", "I32", 5, 16}, {".qzeros", "I32", 2, 2}, {".scales", "F16", 2, 16}, {0}};
    static const part codes_of_scales[] = {{".qweight", "I32", 8, 16}, {".qzeros", "I32", 2, 2}, {".scales", "U8", 2, 16}, {0}};
    static const part alone[] = {{".qzeros", "I32", 2, 2}, {0}};
    static const part no_grid[] = {{".weight", "F8_E4M3", 16, 64}, {0}};
    static const part short_grid[] = {{".weight", "F8_E4M3", 16, 64}, {".weight_scale_inv", "F32", 1, 3}, {0}};
    static const part e5m2[] = {{".weight", "F8_E5M2", 16, 64}, {0}};
    ck_rejected(GPTQ, no_zeros, FKV_FILE_DAMAGED, "blk.0.ffn_up.qweight is quantized, but its qzeros (I32) are missing");
    ck_rejected(GPTQ, no_scales, FKV_FILE_DAMAGED, "blk.0.ffn_up.qweight is quantized, but its scales are missing");
    ck_rejected(GPTQ, short_zeros, FKV_FILE_DAMAGED,
                "blk.0.ffn_up.qzeros is 1 x 2, but tensor blk.0.ffn_up.qweight requires 2 x 2");
    ck_rejected(GPTQ, odd_columns, FKV_UNSUPPORTED, "contains 16 x 40 codes of 4 bits");
    ck_rejected(GPTQ, codes_of_scales, FKV_UNSUPPORTED, "blk.0.ffn_up.scales has type U8");
    ck_rejected(GPTQ, alone, FKV_UNSUPPORTED, "blk.0.ffn_up.qzeros has type I32 but does not belong to a quantized weight");
    ck_rejected(FP8, GPTQ_PARTS, FKV_UNSUPPORTED, "blk.0.ffn_up.qweight has type I32, but config.json has no");
    ck_rejected(GPTQ, FP8_PARTS, FKV_UNSUPPORTED, "blk.0.ffn_up.weight has type F8_E4M3, but config.json has no");
    ck_rejected(FP8, no_grid, FKV_FILE_DAMAGED, "blk.0.ffn_up.weight is quantized, but its scales are missing");
    ck_rejected(FP8, short_grid, FKV_FILE_DAMAGED, "blk.0.ffn_up.weight_scale_inv is 1 x 3");
    ck_rejected(FP8, e5m2, FKV_UNSUPPORTED, "has unsupported type F8_E5M2");
}
END_TEST

START_TEST(unordered_columns_are_rejected_as_act_order) {
    static const part parts[] = {
        {".g_idx", "I32", 0, 64}, {".qweight", "I32", 8, 16}, {".qzeros", "I32", 2, 2}, {".scales", "F16", 2, 16}, {0}};
    for (int32_t i = 0; i < 64; i++) memcpy(data + 4 * i, &(int32_t){i / 32}, 4);
    fkv_weights_close(opened(GPTQ, parts));
    for (int32_t i = 0; i < 64; i++) memcpy(data + 4 * i, &(int32_t){i % 2}, 4);
    ck_rejected(GPTQ, parts, FKV_UNSUPPORTED, "blk.0.ffn_up.g_idx assigns column 1 to group 1: act-order (desc_act)");
}
END_TEST

/* Returns one bit of a bit stream stored in words that are `step` words apart. */
static uint32_t bit_of(const uint8_t *words, size_t first, size_t step, size_t bit) {
    const uint8_t *word = words + 4 * (first + bit / 32 * step);
    return word[bit % 32 / 8] >> bit % 8 & 1u;
}

/* For every bit width, reads the codes of a whole tensor and of a view of some rows, and compares them with codes that the test
 * assembles bit by bit from the file. Packing the codes must preserve their values. */
START_TEST(gptq_codes_of_every_width_are_exact) {
    static const uint32_t widths[] = {2, 3, 4, 8};
    enum { ROWS = 32, COLS = 64 };
    for (size_t w = 0; w < 4; w++) {
        const uint32_t bits = widths[w];
        const part parts[] = {{".qweight", "I32", COLS * bits / 32, ROWS},
                              {".qzeros", "I32", 2, ROWS * bits / 32},
                              {".scales", "BF16", 2, ROWS},
                              {0}};
        char config[96];
        const size_t zeros_at = part_bytes(&parts[0]);
        const size_t scales_at = zeros_at + part_bytes(&parts[1]);
        (void)snprintf(config, sizeof config, "\"quant_method\": \"gptq\", \"bits\": %u, \"group_size\": 32", bits);
        for (size_t i = 0; i < scales_at; i++) data[i] = (uint8_t)(i * 167 + (i >> 3) * 29 + w);
        for (size_t i = 0; i < (size_t)2 * ROWS; i++) fkv_store_half(data + scales_at, (uint32_t)i, (uint16_t)(0x3c00 + 8 * i));
        fkv_weights *weights = opened(config, parts);
        const fkv_tensor *t = fkv_weights_find(weights, "blk.0.ffn_up.weight");
        ck_assert(t != NULL && t->type == FKV_TENSOR_GPTQ && t->n_rows == ROWS && t->n_cols == COLS);
        const fkv_tensor view = fkv_tensor_rows(t, 5, ROWS - 5);
        for (uint32_t row = 0; row < ROWS - 5; row++) {
            float floats[COLS];
            float scales[2];
            float biases[2];
            uint8_t codes[COLS];
            const uint32_t r = row + 5;
            fkv_tensor_row_floats(&view, row, floats);
            fkv_tensor_row_codes(&view, row, codes, scales, biases);
            for (uint32_t c = 0; c < COLS; c++) {
                uint32_t code = 0;
                uint32_t zero = 0;
                for (uint32_t b = 0; b < bits; b++) {
                    code |= bit_of(data, r, ROWS, (size_t)c * bits + b) << b;
                    zero |= bit_of(data + zeros_at, c / 32 * (ROWS * bits / 32), 1, (size_t)r * bits + b) << b;
                }
                zero = (zero + 1) & ((1u << bits) - 1);
                const float scale = fkv_bf16_to_f32(fkv_load_half(data + scales_at, c / 32 * ROWS + r));
                ck_assert_uint_eq(codes[c], code);
                ck_assert_float_eq(floats[c], scale * ((float)code - (float)zero));
                ck_assert_float_eq(scales[c / 32] * (float)codes[c] + biases[c / 32], floats[c]);
            }
        }
        fkv_weights_close(weights);
    }
}
END_TEST

START_TEST(centered_zero_points_are_exact) {
    uint32_t group = 0;
    memset(data, 0x77,
           sizeof data); /* version 1 of the format stores each zero point minus one, so the zero point 8 is stored as 7 */
    fkv_weights *weights = opened(GPTQ, GPTQ_PARTS);
    ck_assert_int_eq(fkv_tensor_matrix_kind(fkv_weights_tensor(weights, 0), &group), FKV_MATRIX_CENTERED4);
    fkv_weights_close(weights);
    weights = opened(GPTQ ", \"checkpoint_format\": \"gptq_v2\"", GPTQ_PARTS);
    ck_assert_int_eq(fkv_tensor_matrix_kind(fkv_weights_tensor(weights, 0), &group), FKV_MATRIX_AFFINE4);
    fkv_weights_close(weights);
    weights = opened(AWQ, AWQ_PARTS);
    ck_assert_int_eq(fkv_tensor_matrix_kind(fkv_weights_tensor(weights, 0), &group), FKV_MATRIX_AFFINE4);
    fkv_weights_close(weights);
    memset(data, 0x88, sizeof data);
    weights = opened(AWQ, AWQ_PARTS);
    ck_assert_int_eq(fkv_tensor_matrix_kind(fkv_weights_tensor(weights, 0), &group), FKV_MATRIX_CENTERED4);
    fkv_weights_close(weights);
}
END_TEST

/* Tests a matrix of 2 x 2 blocks, and values beyond the 16-bit range. */
START_TEST(fp8_has_a_scale_per_block) {
    static const part parts[] = {{".weight", "F8_E4M3", 20, 24}, {".weight_scale_inv", "F32", 2, 2}, {0}};
    const float scales[] = {0.5f, 2, 4, 1e4f};
    float floats[24];
    alignas(float) uint8_t room[24 * sizeof(float)];
    memset(data, 0x38, sizeof data); /* every weight has the value 1 */
    memcpy(data + part_bytes(&parts[0]), scales, sizeof scales);
    fkv_weights *weights = opened(FP8, parts);
    const fkv_tensor *t = fkv_weights_find(weights, "blk.0.ffn_up.weight");
    const fkv_tensor view = fkv_tensor_rows(t, 15, 2);
    for (uint32_t row = 0; row < 2; row++) {
        fkv_tensor_row_floats(&view, row, floats);
        for (uint32_t c = 0; c < 24; c++) ck_assert_float_eq(floats[c], scales[2 * row + c / 16]);
        ck_assert(fkv_tensor_row_halves(&view, row, room));
        ck_assert_float_eq(fkv_f16_to_f32(fkv_load_half(room, 23)), scales[2 * row + 1]);
    }
    fkv_weights_close(weights);
    memset(data, 0x7e, part_bytes(&parts[0])); /* every weight has the largest value, 448; with the scale 1e4 of the last block,
                                                  it exceeds the 16-bit range */
    weights = opened(FP8, parts);
    ck_assert(fkv_tensor_row_halves(fkv_weights_tensor(weights, 0), 0, room));
    ck_assert(!fkv_tensor_row_halves(fkv_weights_tensor(weights, 0), 19, room));
    fkv_weights_close(weights);
    file_fixture_remove_folder();
}
END_TEST

TEST_MAIN("quantized folder", unsupported_configs_are_rejected_by_field, inconsistent_parts_are_rejected_by_name,
          unordered_columns_are_rejected_as_act_order, gptq_codes_of_every_width_are_exact, centered_zero_points_are_exact,
          fp8_has_a_scale_per_block)
