/* See kernel_check.h. The check runs one prefill step and then single-token decode steps. The rows are pseudo-random values with
 * a standard deviation near 1. */
#include "kernel_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 200, PREFILL = 190, H = 8, G = 2, D = 64 };

typedef struct check_rows {
    float q[TOKENS][H][D];
    float k[TOKENS][G][D];
    float v[TOKENS][G][D];
    float out[TOKENS][H][D];
} check_rows;

/* Fills an array with n approximately normal values, each the scaled sum of four uniform random values. */
static void fill_random(float *values, size_t n, uint64_t *state) {
    for (size_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (int k = 0; k < 4; k++) {
            *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            sum += (double)(*state >> 40) / (double)(1 << 24) - 0.5;
        }
        values[i] = (float)(sum * sqrt(3.0));
    }
}

/* Computes causal attention of one query in double precision. out: [D] */
static void reference_attention(const check_rows *r, int token, int head, double *out) {
    double weights[TOKENS];
    double most = -INFINITY;
    double sum = 0.0;
    const int g = head / (H / G);
    for (int s = 0; s <= token; s++) {
        double score = 0.0;
        for (int d = 0; d < D; d++) score += (double)r->q[token][head][d] * (double)r->k[s][g][d];
        weights[s] = score / sqrt(D);
        if (weights[s] > most) most = weights[s];
    }
    for (int s = 0; s <= token; s++) sum += weights[s] = exp(weights[s] - most);
    for (int d = 0; d < D; d++) {
        out[d] = 0.0;
        for (int s = 0; s <= token; s++) out[d] += weights[s] / sum * (double)r->v[s][g][d];
    }
}

static double relative_error(const check_rows *r) {
    double difference = 0.0;
    double size = 0.0;
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < H; h++) {
            double exact[D];
            reference_attention(r, t, h, exact);
            for (int d = 0; d < D; d++) {
                difference += ((double)r->out[t][h][d] - exact[d]) * ((double)r->out[t][h][d] - exact[d]);
                size += exact[d] * exact[d];
            }
        }
    }
    return sqrt(difference / size);
}

/* Runs one step of n tokens, starting at token `first`. */
static fkv_status run_step(fkv_cache *cache, fkv_seq seq, check_rows *r, uint32_t first, uint32_t n) {
    fkv_step *step = NULL;
    fkv_status status = fkv_step_begin(cache, &(fkv_row){seq, n}, 1, &step);
    if (status != FKV_OK) return status;
    status = fkv_write(step, 0, r->k[first], r->v[first]);
    if (status == FKV_OK) status = fkv_attend(step, 0, r->q[first], r->out[first]);
    if (status == FKV_OK) return fkv_step_commit(step);
    fkv_step_abort(step);
    return status;
}

static fkv_status run_steps(fkv_cache *cache, check_rows *r) {
    fkv_seq seq;
    fkv_status status = fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = TOKENS}, &seq, NULL);
    if (status == FKV_OK) status = run_step(cache, seq, r, 0, PREFILL);
    for (uint32_t t = PREFILL; t < TOKENS && status == FKV_OK; t++) status = run_step(cache, seq, r, t, 1);
    return status;
}

kernel_result kernel_check(const char *codec, double limit) {
    kernel_result result = {.limit = limit};
    fkv_cache *cache = NULL;
    fkv_stats stats;
    uint64_t state = 1;
    check_rows *r = calloc(1, sizeof *r);
    if (r == NULL) {
        result.status = FKV_NO_MEMORY;
        return result;
    }
    fill_random(&r->q[0][0][0], (size_t)TOKENS * H * D, &state);
    fill_random(&r->k[0][0][0], (size_t)TOKENS * G * D, &state);
    fill_random(&r->v[0][0][0], (size_t)TOKENS * G * D, &state);
    fkv_config c = fkv_config_default();
    c.n_layers = 1;
    c.max_tokens = TOKENS;
    c.page_tokens = 16; /* small pages, so that most pages are full and become sealed */
    c.rotate = FKV_ROTATE_KV;
    c.layer.n_q_heads = H;
    c.layer.n_kv_heads = G;
    c.layer.head_dim = D;
    result.status = fkv_codec_parse(codec, &c.layer.k, &c.layer.v);
    if (result.status == FKV_OK) result.status = fkv_cache_open(&c, &cache);
    if (result.status == FKV_OK) result.status = run_steps(cache, r);
    if (result.status == FKV_OK) result.status = fkv_cache_stats(cache, &stats);
    if (result.status == FKV_OK) {
        result.error = relative_error(r);
        (void)snprintf(result.isa, sizeof result.isa, "%s", stats.isa != NULL ? stats.isa : "unknown");
    }
    fkv_cache_close(cache);
    free(r);
    return result;
}
