/* Tests the vector operations that models perform between matrix products. Results must be close to double precision, and
 * bit-identical on all instruction sets that the machine supports. */
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
    float plain_silu[MAX_N], unit[MAX_N], conv[MAX_N], window[2 * MAX_N];
} rows;

static void run_all(const fkv_vector_ops *ops, const float *x, const float *y, uint32_t n, rows *out) {
    float *const in_place[] = {out->sum,    out->silu,  out->gelu,       out->plain_gelu, out->gated,
                               out->halves, out->pairs, out->plain_silu, out->unit};
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
    ops->silu(out->plain_silu, n);
    ops->l2_norm(out->unit, 1e-6f, 0.5f, n);
    static float taps[3 * MAX_N];
    fill(taps, 3 * n, 9, 1.0f);
    fill(out->window, 2 * n, 10, 3.0f);
    ops->conv_step(out->window, x, taps, n, y, 3, n, out->conv);
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

/* ---- recurrences ---- */

enum { N_VALUES = 5, N_TOKENS = 40, MAX_K = 256 };

/* Returns the decay of a key channel. Without separate decays, all channels have the decay of channel 0. */
static float decay_of(uint32_t channel, bool by_channel) { return by_channel ? 1.0f - 0.1f * (float)(channel % 7 + 1) : 0.9f; }

/* Runs the delta rule over N_TOKENS tokens, with one decay or with one decay per key channel. state: [N_VALUES, k_dim], initially
 * zero; outputs: [N_TOKENS, N_VALUES] */
static void run_delta(const fkv_vector_ops *ops, uint32_t k_dim, bool by_channel, bool in_place, float *state, float *outputs) {
    static float other[N_VALUES * MAX_K];
    float k[MAX_K];
    float q[MAX_K];
    memset(state, 0, N_VALUES * k_dim * sizeof *state);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        float *out = outputs + (size_t)t * N_VALUES;
        fill(k, k_dim, 3 * t, 1.0f);
        fill(q, k_dim, 3 * t + 1, 1.0f);
        fill(out, N_VALUES, 3 * t + 2, 2.0f);
        ops->l2_norm(k, 1e-6f, 1.0f, k_dim);
        if (!in_place) memcpy(other, state, N_VALUES * k_dim * sizeof *state);
        const float *from = in_place ? state : other;
        const float beta = 0.1f + (float)(t % 8) * 0.1f;
        float decays[MAX_K];
        for (uint32_t i = 0; i < k_dim; i++) decays[i] = decay_of(i, by_channel);
        if (by_channel)
            ops->kda_step(from, state, N_VALUES, k_dim, k, q, out, decays, beta, out);
        else
            ops->delta_step(from, state, N_VALUES, k_dim, k, q, out, decays[0], beta, out);
    }
}

/* Computes the outputs of run_delta() in double precision, directly from the equations that define the delta rule. */
static void reference_delta(uint32_t k_dim, bool by_channel, float *outputs) {
    static double state[N_VALUES][MAX_K];
    float k[MAX_K];
    float q[MAX_K];
    float values[N_VALUES];
    memset(state, 0, sizeof state);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        fill(k, k_dim, 3 * t, 1.0f);
        fill(q, k_dim, 3 * t + 1, 1.0f);
        fill(values, N_VALUES, 3 * t + 2, 2.0f);
        fkv_vector_ops_plain.l2_norm(k, 1e-6f, 1.0f, k_dim);
        const double beta = (double)(0.1f + (float)(t % 8) * 0.1f);
        for (uint32_t v = 0; v < N_VALUES; v++) {
            double memory = 0.0;
            double out = 0.0;
            for (uint32_t i = 0; i < k_dim; i++) memory += (state[v][i] *= (double)decay_of(i, by_channel)) * (double)k[i];
            for (uint32_t i = 0; i < k_dim; i++) state[v][i] += beta * ((double)values[v] - memory) * (double)k[i];
            for (uint32_t i = 0; i < k_dim; i++) out += state[v][i] * (double)q[i];
            outputs[(size_t)t * N_VALUES + v] = (float)out;
        }
    }
}

START_TEST(delta_rule_is_bit_identical_and_accurate) {
    static const uint32_t dims[] = {1, 7, 16, 24, 40, 64, 128, 256};
    enum { N_DIMS = sizeof dims / sizeof dims[0] };
    static float states[2][N_VALUES * MAX_K];
    static float outputs[2][N_TOKENS * N_VALUES];
    for (size_t c = 0; c < 2 * (size_t)N_DIMS; c++) {
        const bool by_channel = c >= N_DIMS;
        const uint32_t k_dim = dims[c % N_DIMS];
        const size_t state_bytes = N_VALUES * k_dim * sizeof(float);
        run_delta(&fkv_vector_ops_plain, k_dim, by_channel, true, states[0], outputs[0]);
        for (size_t i = 0; i < sizeof ISAS / sizeof ISAS[0]; i++) {
            if (!fkv_cpu_runs(ISAS[i])) continue;
            for (int in_place = 0; in_place < 2; in_place++) {
                run_delta(fkv_vector_ops_for(ISAS[i]), k_dim, by_channel, in_place, states[1], outputs[1]);
                ck_assert_msg(memcmp(states[0], states[1], state_bytes) == 0 &&
                                  memcmp(outputs[0], outputs[1], sizeof outputs[0]) == 0,
                              "%s differs for keys of %u", fkv_isa_name(ISAS[i]), k_dim);
            }
        }
        reference_delta(k_dim, by_channel, outputs[1]);
        ck_assert_double_le(relative_l2(outputs[0], outputs[1], N_TOKENS * N_VALUES), 2e-6);
    }
}
END_TEST

/* Runs Mamba-2 over N_TOKENS tokens. state: [N_VALUES, k_dim], initially zero; outputs: [N_TOKENS, N_VALUES] */
static void run_ssm(const fkv_vector_ops *ops, uint32_t k_dim, float *state, float *outputs) {
    float b[MAX_K];
    float c[MAX_K];
    memset(state, 0, N_VALUES * k_dim * sizeof *state);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        float *out = outputs + (size_t)t * N_VALUES;
        fill(b, k_dim, 3 * t, 1.0f);
        fill(c, k_dim, 3 * t + 1, 1.0f);
        fill(out, N_VALUES, 3 * t + 2, 2.0f);
        ops->ssm_step(state, state, N_VALUES, k_dim, b, c, out, 0.9f, 0.1f + (float)(t % 8) * 0.1f, 0.7f, out);
    }
}

static void reference_ssm(uint32_t k_dim, float *outputs) {
    static double state[N_VALUES][MAX_K];
    float b[MAX_K];
    float c[MAX_K];
    float values[N_VALUES];
    memset(state, 0, sizeof state);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        fill(b, k_dim, 3 * t, 1.0f);
        fill(c, k_dim, 3 * t + 1, 1.0f);
        fill(values, N_VALUES, 3 * t + 2, 2.0f);
        const double step = (double)(0.1f + (float)(t % 8) * 0.1f);
        for (uint32_t v = 0; v < N_VALUES; v++) {
            double out = (double)0.7f * (double)values[v];
            for (uint32_t i = 0; i < k_dim; i++) {
                state[v][i] = (double)0.9f * state[v][i] + step * (double)values[v] * (double)b[i];
                out += state[v][i] * (double)c[i];
            }
            outputs[(size_t)t * N_VALUES + v] = (float)out;
        }
    }
}

START_TEST(mamba_is_bit_identical_and_accurate) {
    static const uint32_t dims[] = {1, 16, 24, 128, 250};
    static float states[2][N_VALUES * MAX_K];
    static float outputs[2][N_TOKENS * N_VALUES];
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
        run_ssm(&fkv_vector_ops_plain, dims[d], states[0], outputs[0]);
        for (size_t i = 0; i < sizeof ISAS / sizeof ISAS[0]; i++) {
            if (!fkv_cpu_runs(ISAS[i])) continue;
            run_ssm(fkv_vector_ops_for(ISAS[i]), dims[d], states[1], outputs[1]);
            ck_assert_msg(memcmp(states[0], states[1], N_VALUES * dims[d] * sizeof(float)) == 0 &&
                              memcmp(outputs[0], outputs[1], sizeof outputs[0]) == 0,
                          "%s differs for states of %u", fkv_isa_name(ISAS[i]), dims[d]);
        }
        reference_ssm(dims[d], outputs[1]);
        ck_assert_double_le(relative_l2(outputs[0], outputs[1], N_TOKENS * N_VALUES), 2e-6);
    }
}
END_TEST

START_TEST(convolution_reads_and_shifts_its_window) {
    enum { N = 37, TAPS = 4 };
    float window[(TAPS - 1) * N];
    float taps[TAPS * N];
    float inputs[9][N];
    float out[N];
    memset(window, 0, sizeof window);
    fill(taps, TAPS * N, 1, 1.0f);
    for (uint32_t t = 0; t < 9; t++) {
        fill(inputs[t], N, 20 + t, 1.0f);
        fkv_vector_ops_plain.conv_step(window, inputs[t], taps, N, NULL, TAPS, N, out);
        for (uint32_t i = 0; i < N; i++) {
            double sum = 0.0;
            for (uint32_t j = 0; j < TAPS; j++)
                if (t + j + 1 >= TAPS) sum += (double)taps[j * N + i] * (double)inputs[t + j + 1 - TAPS][i];
            ck_assert_double_eq_tol((double)out[i], sum, 1e-6);
        }
    }
    ck_assert(memcmp(window, inputs[6], sizeof window) == 0); /* after 9 tokens, the window holds the last TAPS - 1 inputs */
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
    for (uint32_t i = 0; i < N; i++) expected[i] = (float)((double)x[i] / (1.0 + exp(-(double)x[i])));
    ck_assert_double_le(relative_l2(got.plain_silu, expected, N), tolerance);
    for (uint32_t i = 0; i < N; i++) expected[i] = (float)((double)x[i] / (1.0 + exp(-(double)y[i])));
    ck_assert_double_le(relative_l2(got.gated, expected, N), tolerance);
    for (uint32_t i = 0; i < N; i++) expected[i] = (float)((double)x[i] / sqrt(squares + 1e-6) * 0.5);
    ck_assert_double_le(relative_l2(got.unit, expected, N), tolerance);
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

TEST_MAIN("vector_ops", every_instruction_set_is_bit_identical, delta_rule_is_bit_identical_and_accurate,
          mamba_is_bit_identical_and_accurate, convolution_reads_and_shifts_its_window, operations_are_accurate_against_double,
          activations_reach_their_limits, angles_of_distant_positions_are_accurate, spread_and_gathered_heads_round_trip)
