/* Compares matrix products, for every matrix kind and instruction set, with sums in double precision. Also checks that the
 * outputs of a token are bit-identical whether the token runs alone or in a batch, with any number of threads, and whether one
 * call computes one matrix product or several. Does not use the check library, because this program is also cross-compiled and
 * run under an emulator. An argument selects one instruction set. By default, all instruction sets that the machine supports are
 * tested.
 */
#include "attn_cases.h"
#include "sanitized.h"

#include "../src/base/cpu.h"
#include "../src/base/float16.h"
#include "../src/matrix/matrix.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Tolerance for rounding activations to 16 bits. In a group of 32 activations, the distance between adjacent rounded values is a
 * power of two and at most 6.2e-5 times the largest activation. The rounding error is at most half of this distance. The error of
 * float sums is much smaller. */
static const double PRODUCT_TOLERANCE = 2e-4;

static const float UNTOUCHED = 12345.0f; /* sentinel value, stored where no output may be written */
enum { MARGIN = 3 };                     /* number of unused floats after each row of outputs and activations */

static const fkv_isa isas[] = {FKV_ISA_SCALAR, FKV_ISA_NEON, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX};
enum { N_ISAS = sizeof isas / sizeof isas[0] };

typedef struct kind_case {
    const char *name;
    fkv_matrix_kind kind;
    uint32_t group;
} kind_case;

static const kind_case kinds[] = {{"affine4", FKV_MATRIX_AFFINE4, 32},
                                  {"centered4", FKV_MATRIX_CENTERED4, 32},
                                  {"centered5", FKV_MATRIX_CENTERED5, 32},
                                  {"centered6", FKV_MATRIX_CENTERED6_16, 16},
                                  {"centered8", FKV_MATRIX_CENTERED8, 32},
                                  {"f16", FKV_MATRIX_F16, 0},
                                  {"bf16", FKV_MATRIX_BF16, 0},
                                  {"f32", FKV_MATRIX_F32, 0},
                                  {"affine2", FKV_MATRIX_AFFINE2, 32},
                                  {"affine2_16", FKV_MATRIX_AFFINE2_16, 16},
                                  {"affine3", FKV_MATRIX_AFFINE3, 32},
                                  {"affine5", FKV_MATRIX_AFFINE5, 32},
                                  {"affine6", FKV_MATRIX_AFFINE6, 32},
                                  {"affine8", FKV_MATRIX_AFFINE8, 32},
                                  {"centered3", FKV_MATRIX_CENTERED3_16, 16},
                                  {"table4", FKV_MATRIX_TABLE4, 32},
                                  {"table4_16", FKV_MATRIX_TABLE4_16, 16}};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

static double worst_of[N_ISAS];
static int n_passed;
static int n_failed;
static fkv_isa only = FKV_ISA_AUTO;

static bool is_tested(size_t i) { return fkv_cpu_runs(isas[i]) && (only == FKV_ISA_AUTO || only == isas[i]); }

static void report(bool good, fkv_isa isa, const char *kind, const fkv_matrix *m, uint32_t n_tokens, const char *what,
                   double value) {
    if (good) {
        n_passed++;
        return;
    }
    n_failed++;
    printf("FAILED %s: %s [%u, %u], %u tokens: %s (%g)\n", fkv_isa_name(isa), kind, m->n_rows, m->n_cols, n_tokens, what, value);
}

static void *allocate(size_t bytes) {
    void *block = aligned_alloc(64, fkv_align_up(bytes + 1, 64));
    if (block == NULL) abort();
    memset(block, 0, fkv_align_up(bytes + 1, 64));
    return block;
}

/* Returns worker threads, which are opened once and kept until the program ends. */
static fkv_workers *workers_of(uint32_t n_threads) {
    static fkv_workers *opened[4];
    if (opened[n_threads] == NULL &&
        fkv_workers_open(allocate(fkv_workers_bytes(n_threads)), n_threads, &opened[n_threads]) != FKV_OK)
        abort();
    return opened[n_threads];
}

/* ---- matrices and activations ---- */

/* A codebook in arbitrary order. It contains both ends of the signed 8-bit range. */
static const int8_t TABLE[16] = {0, -128, 127, 1, -1, 25, -104, 13, -49, 89, 53, -10, -65, 7, 113, -35};

static uint32_t bits_of(fkv_matrix_kind kind) {
    switch (kind) {
    case FKV_MATRIX_AFFINE2:
    case FKV_MATRIX_AFFINE2_16: return 2;
    case FKV_MATRIX_AFFINE3:
    case FKV_MATRIX_CENTERED3_16: return 3;
    case FKV_MATRIX_AFFINE5:
    case FKV_MATRIX_CENTERED5: return 5;
    case FKV_MATRIX_AFFINE6:
    case FKV_MATRIX_CENTERED6_16: return 6;
    case FKV_MATRIX_AFFINE8:
    case FKV_MATRIX_CENTERED8: return 8;
    default: return 4;
    }
}

/* Sets a row of the matrix to random values and writes the expected decoded values. Scales and biases are exact in 16 bits.
 * expected: [n_cols] */
static void set_random_row(fkv_matrix *m, uint32_t row, uint64_t *state, float *expected) {
    uint8_t *codes = allocate(m->n_cols);
    float *scales = allocate(m->n_cols * sizeof *scales);
    float *biases = allocate(m->n_cols * sizeof *biases);
    uint32_t bits = bits_of(m->kind);
    uint32_t top = (1u << bits) - 1;
    for (uint32_t c = 0; c < m->n_cols; c++) {
        float x = 0.05f * attn_gaussian(state);
        codes[c] = (uint8_t)(attn_random(state) % (top + 1));
        if (m->kind == FKV_MATRIX_F32) {
            expected[c] = x;
            memcpy((float *)(void *)scales + c, &x, sizeof x);
        } else if (m->group == 0) {
            uint16_t h = m->kind == FKV_MATRIX_F16 ? fkv_f32_to_f16(x) : fkv_f32_to_bf16(x);
            expected[c] = m->kind == FKV_MATRIX_F16 ? fkv_f16_to_f32(h) : fkv_bf16_to_f32(h);
            memcpy((uint8_t *)scales + 2 * (size_t)c, &h, sizeof h);
        }
    }
    for (uint32_t g = 0; m->group != 0 && g < m->n_cols / m->group; g++) {
        /* the decoded values of a group are either centered around 0, as in real weights, or all on one side of 0, so that the
         * bias matters */
        scales[g] = fkv_f16_to_f32(fkv_f32_to_f16((0.02f + 0.01f * fabsf(attn_gaussian(state))) / (float)top));
        float bias = -scales[g] * (float)top * (g % 5 == 4 ? 1.0f : 0.5f);
        biases[g] = fkv_f16_to_f32(fkv_f32_to_f16(bias));
        if (m->kind > FKV_MATRIX_AFFINE8) biases[g] = -scales[g] * (float)(1u << (bits - 1));
        for (uint32_t c = g * m->group; c < (g + 1) * m->group; c++)
            expected[c] = m->table != NULL ? scales[g] * (float)m->table[codes[c]] : scales[g] * (float)codes[c] + biases[g];
    }
    if (m->group != 0)
        (void)fkv_matrix_set_codes(m, row, codes, scales, biases);
    else
        fkv_matrix_set_floats(m, row, scales);
    free(codes);
    free(scales);
    free(biases);
}

typedef struct product_fixture {
    fkv_matrix m;
    const char *kind;
    uint32_t n_tokens;
    uint32_t x_stride;
    uint32_t out_stride;
    float *weights;    /* [R, C] */
    float *x;          /* [T, x_stride] */
    float *bias;       /* [R] */
    double *reference; /* reference [T, R] */
    float *out;        /* [T, out_stride] */
    float *alone;      /* [T, out_stride] */
    void *input;
} product_fixture;

/* Computes the reference outputs from the weights, the activations and the bias. */
static void set_reference(product_fixture *w) {
    for (uint32_t t = 0; t < w->n_tokens; t++) {
        for (uint32_t r = 0; r < w->m.n_rows; r++) {
            double sum = w->bias[r];
            for (uint32_t c = 0; c < w->m.n_cols; c++)
                sum += (double)w->weights[(size_t)r * w->m.n_cols + c] * (double)w->x[(size_t)t * w->x_stride + c];
            w->reference[(size_t)t * w->m.n_rows + r] = sum;
        }
    }
}

static void product_fixture_open(product_fixture *w, const kind_case *kind, uint32_t n_rows, uint32_t n_cols, uint32_t n_tokens,
                                 bool outliers) {
    uint64_t state = 20261115 + n_rows + n_cols;
    *w = (product_fixture){.kind = kind->name, .n_tokens = n_tokens, .x_stride = n_cols + MARGIN, .out_stride = n_rows + MARGIN};
    if (fkv_matrix_make(kind->kind, kind->group, n_rows, n_cols, &w->m) != FKV_OK) abort();
    w->m.panels = allocate(fkv_matrix_bytes(&w->m));
    if (kind->kind == FKV_MATRIX_TABLE4 || kind->kind == FKV_MATRIX_TABLE4_16) w->m.table = TABLE;
    w->weights = allocate((size_t)n_rows * n_cols * sizeof(float));
    w->x = allocate((size_t)n_tokens * w->x_stride * sizeof(float));
    w->bias = allocate(n_rows * sizeof(float));
    w->reference = allocate((size_t)n_tokens * n_rows * sizeof(double));
    w->out = allocate((size_t)n_tokens * w->out_stride * sizeof(float));
    w->alone = allocate((size_t)n_tokens * w->out_stride * sizeof(float));
    w->input = allocate(fkv_product_input_bytes(n_tokens, n_cols));
    for (uint32_t r = 0; r < n_rows; r++) {
        set_random_row(&w->m, r, &state, w->weights + (size_t)r * n_cols);
        w->bias[r] = attn_gaussian(&state);
    }
    for (uint32_t t = 0; t < n_tokens; t++) {
        float *x = w->x + (size_t)t * w->x_stride;
        for (uint32_t c = 0; c < n_cols; c++) x[c] = attn_gaussian(&state) * (outliers && c % 97 == 5 ? 1000.0f : 1.0f);
        for (uint32_t i = 0; i < MARGIN; i++)
            x[n_cols + i] = NAN; /* the padding after each row of activations must not be read */
    }
    set_reference(w);
}

static void product_fixture_close(product_fixture *w) {
    free(w->m.panels);
    free(w->weights);
    free(w->x);
    free(w->bias);
    free(w->reference);
    free(w->out);
    free(w->alone);
    free(w->input);
}

static void clear(const product_fixture *w, float *out) {
    for (size_t i = 0; i < (size_t)w->n_tokens * w->out_stride; i++) out[i] = UNTOUCHED;
}

/* Multiplies the matrix by the activations of tokens [token, token + n_tokens) in one call. */
static void run(const product_fixture *w, fkv_isa isa, uint32_t n_threads, uint32_t token, uint32_t n_tokens, float *out) {
    fkv_product p = {&w->m, w->bias, out + (size_t)token * w->out_stride, w->out_stride};
    fkv_product_run(workers_of(n_threads), isa, &p, 1, w->x + (size_t)token * w->x_stride, n_tokens, w->x_stride, w->input);
}

static bool same(const product_fixture *w) {
    return memcmp(w->out, w->alone, (size_t)w->n_tokens * w->out_stride * sizeof(float)) == 0;
}

/* ---- checks ---- */

static void rows_round_trip(const product_fixture *w) {
    float *row = allocate(w->m.n_cols * sizeof *row);
    bool good = true;
    for (uint32_t r = 0; r < w->m.n_rows; r++) {
        fkv_matrix_get_row(&w->m, r, row);
        good = good && memcmp(row, w->weights + (size_t)r * w->m.n_cols, w->m.n_cols * sizeof *row) == 0;
    }
    report(good, FKV_ISA_SCALAR, w->kind, &w->m, 0, "a stored row differs from the original row", 0);
    free(row);
}

static void matches_the_reference(const product_fixture *w, size_t isa) {
    double error = 0;
    double size = 0;
    bool margin = true;
    for (uint32_t t = 0; t < w->n_tokens; t++) {
        const float *out = w->out + (size_t)t * w->out_stride;
        for (uint32_t r = 0; r < w->m.n_rows; r++) {
            double reference = w->reference[(size_t)t * w->m.n_rows + r];
            error += ((double)out[r] - reference) * ((double)out[r] - reference);
            size += reference * reference;
        }
        for (uint32_t i = 0; i < MARGIN; i++) margin = margin && out[w->m.n_rows + i] == UNTOUCHED;
    }
    double relative = sqrt(error / size);
    report(relative <= PRODUCT_TOLERANCE, isas[isa], w->kind, &w->m, w->n_tokens, "relative L2 error against the reference",
           relative);
    report(margin, isas[isa], w->kind, &w->m, w->n_tokens, "a value was written past the end of a row", 0);
    if (!(relative <= worst_of[isa])) worst_of[isa] = relative;
}

static void is_bit_identical_in_any_division(const product_fixture *w, fkv_isa isa) {
    for (uint32_t n_threads = 2; n_threads <= 3; n_threads++) {
        clear(w, w->alone);
        run(w, isa, n_threads, 0, w->n_tokens, w->alone);
        report(same(w), isa, w->kind, &w->m, w->n_tokens, "outputs are not bit-identical with other thread counts", n_threads);
    }
    clear(w, w->alone);
    for (uint32_t t = 0; t < w->n_tokens; t++) run(w, isa, 1 + t % 2, t, 1, w->alone);
    report(same(w), isa, w->kind, &w->m, w->n_tokens, "outputs are not bit-identical for single tokens", 0);
    clear(w, w->alone);
    for (uint32_t t = 0, n = 1; t < w->n_tokens; t += n, n = n % 23 + 1) {
        n = fkv_min_u32(n, w->n_tokens - t);
        run(w, isa, 2, t, n, w->alone);
    }
    report(same(w), isa, w->kind, &w->m, w->n_tokens, "outputs are not bit-identical in other batches", 0);
}

static void is_bit_identical_to_vnni(const product_fixture *w) {
    clear(w, w->alone);
    run(w, FKV_ISA_AVX512VNNI, 1, 0, w->n_tokens, w->alone);
    report(same(w), FKV_ISA_AMX, w->kind, &w->m, w->n_tokens, "not bit-identical to VNNI", 0);
}

static void every_kind_and_shape(void) {
    static const struct {
        uint32_t n_rows;
        uint32_t n_cols;
        uint32_t n_tokens;
    } shapes[] = {{16, 32, 1}, {5, 64, 3}, {33, 96, 7}, {80, 576, 40}, {200, 256, 18}, {48, 2048, 2}, {31, 320, 270}};
    for (size_t k = 0; k < N_KINDS; k++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            for (int outliers = 0; outliers < 2; outliers++) {
                if (TEST_EVERY > 1 && (k + s) % 2 != (size_t)outliers) continue;
                product_fixture w;
                product_fixture_open(&w, &kinds[k], shapes[s].n_rows, shapes[s].n_cols, shapes[s].n_tokens, outliers != 0);
                rows_round_trip(&w);
                for (size_t i = 0; i < N_ISAS; i++) {
                    if (!is_tested(i)) continue;
                    clear(&w, w.out);
                    run(&w, isas[i], 1, 0, w.n_tokens, w.out);
                    matches_the_reference(&w, i);
                    if (isas[i] == FKV_ISA_AMX) is_bit_identical_to_vnni(&w);
                    if (outliers == 0) is_bit_identical_in_any_division(&w, isas[i]);
                }
                product_fixture_close(&w);
            }
        }
    }
}

/* Multiplies one input by four matrices of different kinds and sizes in one call. Each product must be bit-identical to the
 * product computed alone. */
static void shares_an_input(void) {
    enum { COLS = 320, TOKENS = 21 };
    product_fixture w[FKV_MAX_PRODUCTS];
    for (uint32_t i = 0; i < FKV_MAX_PRODUCTS; i++) product_fixture_open(&w[i], &kinds[3 * i], 24 + 50 * i, COLS, TOKENS, true);
    for (size_t i = 0; i < N_ISAS; i++) {
        if (!is_tested(i)) continue;
        fkv_product products[FKV_MAX_PRODUCTS];
        for (uint32_t p = 0; p < FKV_MAX_PRODUCTS; p++) {
            clear(&w[p], w[p].out);
            clear(&w[p], w[p].alone);
            products[p] = (fkv_product){&w[p].m, p % 2 == 0 ? w[p].bias : NULL, w[p].alone, w[p].out_stride};
            fkv_product_run(workers_of(1), isas[i], &(fkv_product){&w[p].m, products[p].bias, w[p].out, w[p].out_stride}, 1,
                            w[0].x, TOKENS, w[0].x_stride, w[0].input);
        }
        fkv_product_run(workers_of(2), isas[i], products, FKV_MAX_PRODUCTS, w[0].x, TOKENS, w[0].x_stride, w[0].input);
        for (uint32_t p = 0; p < FKV_MAX_PRODUCTS; p++)
            report(same(&w[p]), isas[i], w[p].kind, &w[p].m, TOKENS,
                   "outputs are not bit-identical with other matrices in the call", p);
    }
    for (uint32_t i = 0; i < FKV_MAX_PRODUCTS; i++) product_fixture_close(&w[i]);
}

/* Tests that products of heads, each with its own matrix and activations, are bit-identical to separate products. */
static void products_of_heads(void) {
    enum { HEADS = 3, ROWS = 268, COLS = 64, MOST_TOKENS = 37, STRIDE = HEADS * (ROWS + 5) };
    static const uint32_t counts[] = {1, 3, 16, MOST_TOKENS};
    for (size_t k = 0; k < N_KINDS; k++) {
        product_fixture w[HEADS];
        fkv_matrix matrices[HEADS];
        for (uint32_t h = 0; h < HEADS; h++) {
            product_fixture_open(&w[h], &kinds[k], ROWS, COLS, MOST_TOKENS, false);
            uint64_t state = h; /* every head has different weights and activations */
            memset(w[h].m.panels, 0, fkv_matrix_bytes(&w[h].m));
            for (uint32_t r = 0; r < ROWS; r++) set_random_row(&w[h].m, r, &state, w[h].weights + (size_t)r * COLS);
            for (uint32_t t = 0; t < MOST_TOKENS; t++)
                for (uint32_t c = 0; c < COLS; c++) w[h].x[t * w[h].x_stride + c] = attn_gaussian(&state);
            matrices[h] = w[h].m;
        }
        for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
            float *x = allocate(HEADS * counts[n] * COLS * sizeof *x);
            float *out = allocate(counts[n] * STRIDE * sizeof *out);
            void *input = allocate(HEADS * fkv_product_input_bytes(counts[n], COLS));
            for (uint32_t h = 0; h < HEADS; h++)
                for (uint32_t t = 0; t < counts[n]; t++)
                    memcpy(x + ((size_t)h * counts[n] + t) * COLS, w[h].x + t * w[h].x_stride, COLS * sizeof *x);
            for (size_t i = 0; i < N_ISAS; i++) {
                if (!is_tested(i)) continue;
                for (size_t at = 0; at < (size_t)counts[n] * STRIDE; at++) out[at] = UNTOUCHED;
                const fkv_head_products heads = {matrices, HEADS, x, out, STRIDE, ROWS + 5};
                fkv_product_run_heads(workers_of(1 + (uint32_t)n % 3), isas[i], &heads, counts[n], input);
                bool good = true;
                for (uint32_t h = 0; h < HEADS; h++) {
                    const fkv_product one = {&w[h].m, NULL, w[h].out, w[h].out_stride, NULL};
                    fkv_product_run(workers_of(1), isas[i], &one, 1, w[h].x, counts[n], (uint32_t)w[h].x_stride, w[h].input);
                    for (uint32_t t = 0; t < counts[n]; t++) {
                        const float *row = out + (size_t)t * STRIDE + h * (ROWS + 5);
                        good = good && memcmp(row, w[h].out + t * w[h].out_stride, ROWS * sizeof *row) == 0;
                        for (uint32_t r = ROWS; r < ROWS + 5; r++) good = good && row[r] == UNTOUCHED;
                    }
                }
                report(good, isas[i], w[0].kind, &w[0].m, counts[n], "products of heads differ from separate products", HEADS);
            }
            free(x);
            free(out);
            free(input);
        }
        for (uint32_t h = 0; h < HEADS; h++) product_fixture_close(&w[h]);
    }
}

/* A NaN or infinity in a token's activations must affect every output of that token and no output of other tokens. A NaN in a row
 * of weights must affect the outputs of that row for all tokens and no other outputs. */
static void nan_and_infinity_propagate(void) {
    enum { ROWS = 40, COLS = 128, TOKENS = 19, BAD_TOKEN = 17, BAD_ROW = 21 };
    for (size_t k = 0; k < N_KINDS; k++) {
        for (uint32_t what = 0; what < 4; what++) {
            product_fixture w;
            product_fixture_open(&w, &kinds[k], ROWS, COLS, TOKENS, false);
            float bad = what == 0 ? NAN : what == 1 ? INFINITY : -INFINITY;
            if (what < 3) w.x[BAD_TOKEN * w.x_stride + 77] = bad;
            if (what == 3) {
                float numbers[COLS];
                uint8_t codes[COLS] = {0};
                memset(numbers, 0xff, sizeof numbers); /* all bits set: NaN in each of the three types */
                if (w.m.group != 0)
                    (void)fkv_matrix_set_codes(&w.m, BAD_ROW, codes, numbers, numbers);
                else
                    fkv_matrix_set_floats(&w.m, BAD_ROW, numbers);
            }
            for (size_t i = 0; i < N_ISAS; i++) {
                if (!is_tested(i)) continue;
                run(&w, isas[i], 1, 0, TOKENS, w.out);
                bool good = true;
                for (uint32_t t = 0; t < TOKENS; t++)
                    for (uint32_t r = 0; r < ROWS; r++)
                        good = good && isfinite(w.out[t * w.out_stride + r]) == (what < 3 ? t != BAD_TOKEN : r != BAD_ROW);
                report(good, isas[i], w.kind, &w.m, TOKENS, "a NaN was hidden or spread to other outputs", what);
            }
            product_fixture_close(&w);
        }
    }
}

/* Sets all codes of a row to the code whose value has the largest magnitude. In even rows, one code per group is set to the
 * opposite end of the range instead (in table kinds, to another code). Writes the decoded values to expected: [n_cols]. */
static void set_largest_row(fkv_matrix *m, uint32_t row, float *expected) {
    uint8_t codes[1024];
    float scales[1024];
    float biases[1024];
    const uint32_t bits = bits_of(m->kind);
    const bool is_affine = m->kind <= FKV_MATRIX_AFFINE8;
    const float center = is_affine ? 0.0f : (float)(1u << (bits - 1));
    const uint8_t top = (uint8_t)((1u << bits) - 1);
    const uint8_t largest = is_affine ? top : m->table != NULL ? 1 : 0; /* TABLE[1] is -128 */
    for (uint32_t c = 0; c < m->n_cols; c++) {
        codes[c] = row % 2 == 0 && c % m->group == row / 2 % m->group ? (uint8_t)(top - largest) : largest;
        expected[c] = m->table != NULL ? (float)m->table[codes[c]] : (float)codes[c] - center;
    }
    for (uint32_t g = 0; g < m->n_cols / m->group; g++) {
        scales[g] = 1.0f;
        biases[g] = -center;
    }
    (void)fkv_matrix_set_codes(m, row, codes, scales, biases);
}

/* Tests dot products near the bounds up to which the AMX kernels are exact: weights of the largest magnitude times activations of
 * the largest magnitude. TIE / 256 is halfway between two integers, where VNNI and AMX may choose different high bytes. The
 * matrix has more panels and units than the AMX kernels process together. */
static void largest_dot_products(void) {
    enum { ROWS = 17 * 16 + 3, COLS = 11 * 32, TOKENS = 19, LARGEST = 127 * 256, TIE = 126 * 256 + 128 };
    for (size_t k = 0; k < N_KINDS; k++) {
        product_fixture w;
        if (kinds[k].group == 0) continue;
        product_fixture_open(&w, &kinds[k], ROWS, COLS, TOKENS, false);
        memset(w.bias, 0, ROWS * sizeof *w.bias);
        memset(w.m.panels, 0, fkv_matrix_bytes(&w.m));
        for (uint32_t r = 0; r < ROWS; r++) set_largest_row(&w.m, r, w.weights + (size_t)r * COLS);
        for (uint32_t t = 0; t < TOKENS; t++) {
            const int sizes[] = {LARGEST, LARGEST - 1, TIE, -TIE, LARGEST - 128};
            for (uint32_t c = 0; c < COLS; c++)
                w.x[t * w.x_stride + c] = (float)sizes[t % 5] * (t < 10 || c % 16 != t ? 1.0f : -1.0f);
        }
        set_reference(&w);
        for (size_t i = 0; i < N_ISAS; i++) {
            if (!is_tested(i)) continue;
            clear(&w, w.out);
            run(&w, isas[i], 1, 0, TOKENS, w.out);
            matches_the_reference(&w, i);
            if (isas[i] == FKV_ISA_AMX) is_bit_identical_to_vnni(&w);
        }
        product_fixture_close(&w);
    }
}

/* Tests activations that are all zero, and activations of almost any float magnitude. */
static void ends_of_the_range(void) {
    enum { TOKENS = 19 };
    static const float sizes[] = {0.0f, 1e-38f, 1e-31f, 5e-31f, 2e-30f, 5e-29f, 2e-28f, 1e-26f, 1e-20f, 1e20f, 1e36f};
    for (size_t k = 0; k < N_KINDS; k++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            product_fixture w;
            product_fixture_open(&w, &kinds[k], 64, 64, TOKENS, false);
            memset(w.bias, 0, 64 * sizeof *w.bias);
            for (uint32_t t = 0; t < TOKENS; t++)
                for (uint32_t c = 0; c < 64; c++) w.x[t * w.x_stride + c] *= sizes[s];
            set_reference(&w);
            for (size_t i = 0; i < N_ISAS; i++) {
                if (!is_tested(i)) continue;
                clear(&w, w.out);
                run(&w, isas[i], 1, 0, TOKENS, w.out);
                if (isas[i] == FKV_ISA_AMX) is_bit_identical_to_vnni(&w);
                double error = 0;
                double size = 0;
                for (uint32_t t = 0; t < TOKENS; t++) {
                    for (uint32_t r = 0; r < 64; r++) {
                        double reference = w.reference[t * 64 + r];
                        double off = (double)w.out[t * w.out_stride + r] - reference;
                        error += off * off;
                        size += reference * reference;
                    }
                }
                /* kernels may treat a unit as 0 if all its activations are below 1e-28; 1e-26 leaves a margin for random values
                 */
                if (sizes[s] > 0.0f && sizes[s] < 1e-26f) continue;
                report(sqrt(error) <= PRODUCT_TOLERANCE * sqrt(size), isas[i], w.kind, &w.m, TOKENS,
                       "outputs are wrong for activations scaled by", (double)sizes[s]);
            }
            product_fixture_close(&w);
        }
    }
}

static void check_rejected(fkv_matrix_kind kind, uint32_t group, uint32_t n_rows, uint32_t n_cols) {
    fkv_matrix m = {.n_rows = n_rows, .n_cols = n_cols};
    fkv_matrix out;
    report(fkv_matrix_make(kind, group, n_rows, n_cols, &out) == FKV_UNSUPPORTED, FKV_ISA_SCALAR, "any", &m, 0,
           "an unsupported shape was accepted, group size", group);
}

static void shapes_without_a_layout_are_rejected(void) {
    check_rejected(FKV_MATRIX_AFFINE4, 32, 16, 48);
    check_rejected(FKV_MATRIX_AFFINE4, 16, 16, 64);
    check_rejected(FKV_MATRIX_CENTERED6_16, 32, 16, 64);
    check_rejected(FKV_MATRIX_TABLE4, 16, 16, 64);
    check_rejected(FKV_MATRIX_CENTERED8, 0, 16, 64);
    check_rejected(FKV_MATRIX_F16, 32, 16, 64);
    check_rejected(FKV_MATRIX_F32, 0, 0, 64);
    check_rejected(FKV_MATRIX_F32, 0, 16, 0);
    check_rejected((fkv_matrix_kind)(FKV_MATRIX_F32 + 1), 0, 16, 64);
}

int main(int argc, char **argv) {
    for (size_t i = 0; argc > 1 && i < N_ISAS; i++)
        if (strcmp(argv[1], fkv_isa_name(isas[i])) == 0) only = isas[i];
    if (argc > 1 && only == FKV_ISA_AUTO) {
        printf("unknown instruction set %s\n", argv[1]);
        return EXIT_FAILURE;
    }
    shapes_without_a_layout_are_rejected();
    every_kind_and_shape();
    shares_an_input();
    products_of_heads();
    nan_and_infinity_propagate();
    largest_dot_products();
    ends_of_the_range();
    for (size_t i = 0; i < N_ISAS; i++)
        if (worst_of[i] > 0) printf("%s: largest relative L2 error %.1e\n", fkv_isa_name(isas[i]), worst_of[i]);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
