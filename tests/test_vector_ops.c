/* Vector operations between matrix products: close to double precision, and bit-identical on all supported instruction sets.
 */
#include "../src/base/cpu.h"
#include "../src/base/workers.h"
#include "../src/model/forward/vector_ops.h"
#include "relative_l2.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

enum { MAX_N = 700 };

static const fkv_isa ISAS[] = {FKV_ISA_SCALAR, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX, FKV_ISA_NEON};
static const uint32_t LENGTHS[] = {1, 2, 15, 16, 17, 31, 64, 172, 576, 693};

/* Fills an array with uniform random values in [-spread, spread]. */
static void fill(float *x, uint32_t n, uint32_t seed, float spread) {
    uint64_t state = seed;
    for (uint32_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = ((float)(state >> 40) * 0x1p-23f - 1.0f) * spread;
    }
}

typedef struct rows {
    float norm[MAX_N], sum[MAX_N], silu[MAX_N], gelu[MAX_N], plain_gelu[MAX_N], gated[MAX_N], halves[MAX_N], pairs[MAX_N];
} rows;

static void run_all(const fkv_vector_ops *ops, const float *x, const float *y, uint32_t n, rows *out) {
    float *const in_place[] = {out->sum, out->silu, out->gelu, out->plain_gelu, out->gated, out->halves, out->pairs};
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < sizeof in_place / sizeof in_place[0]; i++) memcpy(in_place[i], x, n * sizeof *x);
    ops->rms_norm(x, y, 1e-5f, n, out->norm);
    ops->add(out->sum, y, n);
    ops->silu_mul(out->silu, y, n);
    ops->gelu_mul(out->gelu, y, n);
    ops->gelu(out->plain_gelu, n);
    ops->sigmoid_mul(out->gated, y, n);
    ops->rope_halves(out->halves, y, y + n / 2, n / 2);
    ops->rope_pairs(out->pairs, y, y + n / 2, n / 2);
}

START_TEST(every_instruction_set_is_bit_identical) {
    float x[MAX_N];
    float y[MAX_N];
    static rows plain;
    static rows got;
    uint32_t n_sets = 0;
    for (size_t i = 0; i < sizeof ISAS / sizeof ISAS[0]; i++) {
        if (!fkv_cpu_runs(ISAS[i])) continue;
        n_sets++;
        for (size_t l = 0; l < sizeof LENGTHS / sizeof LENGTHS[0]; l++) {
            fill(x, LENGTHS[l], 1, 20.0f);
            fill(y, LENGTHS[l], 2, 2.0f);
            run_all(&fkv_vector_ops_plain, x, y, LENGTHS[l], &plain);
            run_all(fkv_vector_ops_for(ISAS[i]), x, y, LENGTHS[l], &got);
            ck_assert_msg(memcmp(&plain, &got, sizeof got) == 0, "%s differs for rows of %u", fkv_isa_name(ISAS[i]), LENGTHS[l]);
        }
    }
    printf("%u instruction sets\n", n_sets);
}
END_TEST

START_TEST(operations_are_accurate_against_double) {
    enum { N = 693 };
    const double tolerance = 3e-7; /* a few units in the last place of a float */
    float x[MAX_N];
    float y[MAX_N];
    float expected[MAX_N];
    static rows got;
    fill(x, N, 3, 30.0f);
    fill(y, N, 4, 2.0f);
    run_all(&fkv_vector_ops_plain, x, y, N, &got);
    double squares = 0.0;
    for (uint32_t i = 0; i < N; i++) squares += (double)x[i] * (double)x[i];
    for (uint32_t i = 0; i < N; i++) expected[i] = (float)((double)x[i] / sqrt(squares / (double)N + 1e-5) * (double)y[i]);
    ck_assert_double_le(relative_l2(got.norm, expected, N), tolerance);
    for (uint32_t i = 0; i < N; i++) expected[i] = (float)((double)x[i] / (1.0 + exp(-(double)x[i])) * (double)y[i]);
    ck_assert_double_le(relative_l2(got.silu, expected, N), tolerance);
    for (uint32_t i = 0; i < N; i++) {
        double v = (double)x[i];
        expected[i] = (float)(0.5 * v * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (v + 0.044715 * v * v * v))) * (double)y[i]);
    }
    ck_assert_double_le(relative_l2(got.gelu, expected, N), tolerance);
    for (uint32_t i = 0; i < N; i++) expected[i] /= y[i];
    ck_assert_double_le(relative_l2(got.plain_gelu, expected, N), tolerance);
    for (uint32_t i = 0; i < N; i++) expected[i] = (float)((double)x[i] / (1.0 + exp(-(double)y[i])));
    ck_assert_double_le(relative_l2(got.gated, expected, N), tolerance);
    for (uint32_t i = 0; i < N / 2; i++) {
        double a = (double)x[2 * i];
        double b = (double)x[2 * i + 1];
        expected[2 * i] = (float)(a * (double)y[i] - b * (double)y[N / 2 + i]);
        expected[2 * i + 1] = (float)(a * (double)y[N / 2 + i] + b * (double)y[i]);
    }
    ck_assert_double_le(relative_l2(got.pairs, expected, N / 2 * 2), tolerance);
}
END_TEST

/* Tests NaN, and inputs for which the exponential overflows. */
START_TEST(activations_reach_their_limits) {
    const float x[] = {-INFINITY, -1e30f, -100.0f, 0.0f, 100.0f, 1e30f, NAN};
    enum { N = sizeof x / sizeof x[0] };
    float ones[N];
    float silu[N];
    float gelu[N];
    for (uint32_t i = 0; i < N; i++) ones[i] = 1.0f;
    memcpy(silu, x, sizeof x);
    memcpy(gelu, x, sizeof x);
    fkv_vector_ops_plain.silu_mul(silu, ones, N);
    fkv_vector_ops_plain.gelu_mul(gelu, ones, N);
    ck_assert_double_le(fabs((double)silu[2]), 1e-30);
    ck_assert_double_le(fabs((double)gelu[2]), 1e-30);
    ck_assert(silu[3] == 0.0f && gelu[3] == 0.0f);
    ck_assert(silu[4] == 100.0f && gelu[4] == 100.0f);
    ck_assert(silu[5] == 1e30f && gelu[5] == 1e30f);
    ck_assert(isnan(silu[6]) && isnan(gelu[6]));
}
END_TEST

/* At position 131071, an angle computed in float is off by up to 1/128 radian. An angle computed in double is accurate to the
 * last bit of its float sine and cosine. */
START_TEST(angles_of_distant_positions_are_accurate) {
    const double frequencies[] = {1.0, 0.731, 1e-6};
    float cosines[3];
    float sines[3];
    fkv_rope_angles(131071.0, frequencies, 3, cosines, sines);
    for (int i = 0; i < 3; i++) {
        long double angle = 131071.0L * (long double)frequencies[i];
        ck_assert_double_le(fabs((double)(cosl(angle) - (long double)cosines[i])), 6e-8);
        ck_assert_double_le(fabs((double)(sinl(angle) - (long double)sines[i])), 6e-8);
    }
}
END_TEST

START_TEST(spread_and_gathered_heads_round_trip) {
    enum { HEADS = 3, DIM = 5, PADDED = 8 };
    float row[HEADS * PADDED];
    float back[HEADS * DIM];
    for (uint32_t i = 0; i < HEADS * PADDED; i++) row[i] = i < HEADS * DIM ? (float)i : -1.0f;
    fkv_heads_spread(row, HEADS, DIM, PADDED);
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t i = 0; i < PADDED; i++) ck_assert(row[h * PADDED + i] == (i < DIM ? (float)(h * DIM + i) : 0.0f));
    fkv_heads_gather(row, HEADS, DIM, PADDED, back);
    for (uint32_t i = 0; i < HEADS * DIM; i++) ck_assert(back[i] == (float)i);
}
END_TEST

TEST_MAIN("vector_ops", every_instruction_set_is_bit_identical, operations_are_accurate_against_double,
          activations_reach_their_limits, angles_of_distant_positions_are_accurate, spread_and_gathered_heads_round_trip)
