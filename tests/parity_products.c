/* Runs the GPU kernel for products with quantized weights on the host and compares its results with sums in double precision. The
 * result of a row must be bit-identical for every number of rows and for rows that are not aligned to 16 bytes. */
#include "attn_cases.h"
#include "product_cases.h"
#include "relative_l2.h"

#include "../src/base/float16.h"

#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void product_function(uint32_t n_blocks, uint32_t n_threads, const void *const *in, const uint32_t *sizes, void *out);
product_function product_case_0, product_case_1, product_case_2, product_case_3, product_case_4, product_case_5, product_case_6,
    product_case_7, product_case_8, product_case_9, product_case_10, product_case_11;
static product_function *const functions[N_PRODUCT_CASES] = {product_case_0, product_case_1, product_case_2,  product_case_3,
                                                             product_case_4, product_case_5, product_case_6,  product_case_7,
                                                             product_case_8, product_case_9, product_case_10, product_case_11};

enum { MAX_COLUMNS = 4864, MAX_OUTPUTS = 40, MAX_GROUPS = MAX_COLUMNS / 32, GUARD = 0x5a };

/* Bounds on the relative L2 error: rounding of the results to the type of the rows, and of float32 sums. */
static const double tolerances[] = {[FKV_F32] = 2e-6, [FKV_F16] = 5e-4, [FKV_BF16] = 4e-3};

typedef struct inputs {
    alignas(16) uint8_t x[8 * MAX_COLUMNS * sizeof(float) + 16]; /* has space for an offset of one value */
    alignas(16) uint32_t codes[MAX_OUTPUTS * MAX_COLUMNS / 4];
    alignas(16) uint8_t scales[MAX_OUTPUTS * MAX_GROUPS * sizeof(float)];
    alignas(16) uint8_t biases[MAX_OUTPUTS * MAX_GROUPS * sizeof(float)];
} inputs;

static size_t bytes_of(fkv_type type) { return type == FKV_F32 ? 4 : 2; }

static void put(fkv_type type, void *at, size_t i, float value) {
    if (type == FKV_F32)
        ((float *)at)[i] = value;
    else
        ((uint16_t *)at)[i] = fkv_f32_to_half(type, value);
}

static float get(fkv_type type, const void *at, size_t i) {
    return type == FKV_F32 ? ((const float *)at)[i] : fkv_half_to_f32(type, ((const uint16_t *)at)[i]);
}

static void fill(const product_case *c, inputs *in) {
    uint64_t random = 7u * c->n_columns + c->bits;
    const uint32_t n_words = c->n_outputs * c->n_columns * c->bits / 32;
    const uint32_t n_scales = c->n_outputs * c->n_columns / c->group;
    for (uint32_t i = 0; i < FKV_AFFINE_PRODUCT_ROWS * c->n_columns; i++) put(c->rows, in->x, i, attn_gaussian(&random));
    for (uint32_t i = 0; i < n_words; i++) {
        in->codes[i] = 0;
        for (uint32_t b = 0; b < 32; b += 8) in->codes[i] |= (uint32_t)(int)(128 + 40 * attn_gaussian(&random)) % 256 << b;
    }
    const float step = c->bits == 4 ? 0.01f : 0.001f;
    for (uint32_t i = 0; i < n_scales; i++) {
        put(c->scales, in->scales, i, step * (1.5f + 0.2f * attn_gaussian(&random)));
        put(c->scales, in->biases, i, -8 * step * (1.5f + attn_gaussian(&random)));
    }
}

static float reference(const product_case *c, const inputs *in, uint32_t row, uint32_t output) {
    double sum = 0;
    for (uint32_t k = 0; k < c->n_columns; k++) {
        const size_t at = (size_t)output * c->n_columns + k;
        const uint32_t code = in->codes[at * c->bits / 32] >> at * c->bits % 32 & ((1u << c->bits) - 1);
        const double scale = get(c->scales, in->scales, at / c->group);
        const double bias = get(c->scales, in->biases, at / c->group);
        sum += (scale * code + bias) * (double)get(c->rows, in->x, (size_t)row * c->n_columns + k);
    }
    return (float)sum;
}

/* Multiplies n_rows rows from `x` and writes the results to `out`. Returns false if the kernel writes outside its output. */
static bool run_kernel(uint32_t i, const inputs *in, const void *x, uint32_t n_rows, uint8_t *out) {
    const product_case *c = &product_cases[i];
    const uint32_t sizes[] = {n_rows, c->n_columns, c->n_outputs};
    const void *const given[] = {x, in->codes, in->scales, in->biases};
    const size_t n_bytes = (size_t)n_rows * c->n_outputs * bytes_of(c->rows);
    fkv_affine_product p;
    if (!fkv_affine_product_describe(c->bits, c->group, c->rows, c->scales, c->n_columns, c->n_outputs, &p)) return false;
    memset(out, GUARD, n_bytes + 64);
    functions[i](fkv_affine_product_blocks(&p, c->n_outputs), 32 * p.warps, given, sizes, out);
    for (size_t k = n_bytes; k < n_bytes + 64; k++)
        if (out[k] != GUARD) return false;
    return true;
}

static bool check(uint32_t i) {
    static inputs in;
    alignas(16) static uint8_t all[FKV_AFFINE_PRODUCT_ROWS * MAX_OUTPUTS * sizeof(float) + 64];
    alignas(16) static uint8_t some[sizeof all];
    static float expected[FKV_AFFINE_PRODUCT_ROWS * MAX_OUTPUTS];
    static float found[FKV_AFFINE_PRODUCT_ROWS * MAX_OUTPUTS];
    const product_case *c = &product_cases[i];
    const size_t row_bytes = (size_t)c->n_columns * bytes_of(c->rows);
    const size_t out_bytes = (size_t)c->n_outputs * bytes_of(c->rows);
    const size_t n = (size_t)FKV_AFFINE_PRODUCT_ROWS * c->n_outputs;
    fill(c, &in);
    for (size_t k = 0; k < n; k++) expected[k] = reference(c, &in, (uint32_t)(k / c->n_outputs), (uint32_t)(k % c->n_outputs));
    bool within = run_kernel(i, &in, in.x, FKV_AFFINE_PRODUCT_ROWS, all);
    for (size_t k = 0; k < n; k++) found[k] = get(c->rows, all, k);
    const double error = relative_l2(found, expected, n);
    bool same = true;
    for (uint32_t rows = 1; rows < FKV_AFFINE_PRODUCT_ROWS; rows++) { /* the last rows, so that each row has other neighbours */
        const uint32_t first = FKV_AFFINE_PRODUCT_ROWS - rows;
        within = run_kernel(i, &in, in.x + first * row_bytes, rows, some) && within;
        same = same && memcmp(some, all + first * out_bytes, rows * out_bytes) == 0;
    }
    memmove(in.x + bytes_of(c->rows), in.x, FKV_AFFINE_PRODUCT_ROWS * row_bytes);
    within = run_kernel(i, &in, in.x + bytes_of(c->rows), FKV_AFFINE_PRODUCT_ROWS, some) && within;
    same = same && memcmp(some, all, n * bytes_of(c->rows)) == 0;
    printf("case %u: relative L2 error %.1e%s%s\n", i, error, same ? "" : "; other rows or the alignment change bits",
           within ? "" : "; no kernel, or it writes outside its output");
    return same && within && error <= tolerances[c->rows];
}

/* Checks that matrices without a kernel are rejected. */
static bool rejects(void) {
    static const product_case others[] = {{3, 64, FKV_F16, FKV_F16, 256, 16},
                                          {4, 16, FKV_F16, FKV_F16, 256, 16},
                                          {4, 64, FKV_F16, FKV_F16, 192, 16},
                                          {4, 64, FKV_F16, FKV_F16, 0, 16},
                                          {4, 64, FKV_F16, FKV_F16, 256, 0}};
    fkv_affine_product p;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        const product_case *c = &others[i];
        if (fkv_affine_product_describe(c->bits, c->group, c->rows, c->scales, c->n_columns, c->n_outputs, &p)) return false;
    }
    return true;
}

int main(void) {
    uint32_t n_failed = 0;
    if (!rejects()) n_failed += (uint32_t)(printf("a matrix that has no kernel is accepted\n") > 0);
    for (uint32_t i = 0; i < N_PRODUCT_CASES; i++) n_failed += !check(i);
    printf("%d cases, %u failed\n", (int)N_PRODUCT_CASES, n_failed);
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
