/* Tests the sampler: which tokens can be drawn, their probabilities, and reproducibility for a given seed. */
#include "test.h"

#include <flatkv/model.h>

#include <math.h>
#include <string.h>

enum { N = 8 };

static const uint32_t DRAWS = 40000;

/* Probabilities 0.4 0.25 0.15 0.1 0.05 0.03 0.015 0.005 in mixed order. */
static const float SHARES[N] = {0.05f, 0.4f, 0.015f, 0.25f, 0.1f, 0.005f, 0.15f, 0.03f};

static void make_logits(float logits[N]) {
    for (int i = 0; i < N; i++) logits[i] = logf(SHARES[i]) + 3.0f;
}

static fkv_sampler *open_sampler(fkv_sampler_config config, uint32_t n_vocab) {
    fkv_sampler *sampler = NULL;
    ck_ok(fkv_sampler_open(&config, n_vocab, &sampler));
    return sampler;
}

/* Counts how often each token is drawn. */
static void count_draws(fkv_sampler_config config, uint32_t counts[N]) {
    float logits[N];
    make_logits(logits);
    config.seed = 7;
    fkv_sampler *sampler = open_sampler(config, N);
    memset(counts, 0, N * sizeof *counts);
    for (uint32_t i = 0; i < DRAWS; i++) {
        uint32_t token = N;
        ck_ok(fkv_sample(sampler, logits, &token));
        ck_assert_uint_lt(token, N);
        counts[token]++;
    }
    fkv_sampler_close(sampler);
}

/* Checks that kept tokens are drawn in proportion to their probabilities, within four standard deviations, and that other tokens
 * are never drawn. */
static void check_shares(const uint32_t counts[N], const bool kept[N], double temperature) {
    double total = 0.0;
    for (int i = 0; i < N; i++) total += kept[i] ? pow((double)SHARES[i], 1.0 / temperature) : 0.0;
    for (int i = 0; i < N; i++) {
        double p = kept[i] ? pow((double)SHARES[i], 1.0 / temperature) / total : 0.0;
        double room = 4.0 * sqrt(DRAWS * p * (1.0 - p));
        ck_assert_msg(fabs(counts[i] - DRAWS * p) <= room, "token %d was drawn %u times, expected %.0f +- %.0f", i, counts[i],
                      DRAWS * p, room);
    }
}

START_TEST(greedy_takes_the_largest_logit_and_the_lowest_token_on_ties) {
    float logits[] = {-1.0f, 2.0f, -INFINITY, 2.0f, 1.5f};
    fkv_sampler *sampler = open_sampler(fkv_sampler_config_default(), 5);
    uint32_t token = 99;
    ck_ok(fkv_sample(sampler, logits, &token));
    ck_assert_uint_eq(token, 1);
    fkv_sampler_close(sampler);
}
END_TEST

START_TEST(without_filters_tokens_follow_their_probabilities) {
    uint32_t counts[N];
    const bool all[N] = {true, true, true, true, true, true, true, true};
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_p = 1.0f}, counts);
    check_shares(counts, all, 1.0);
    count_draws((fkv_sampler_config){.temperature = 0.5f, .top_p = 1.0f}, counts);
    check_shares(counts, all, 0.5);
}
END_TEST

START_TEST(top_k_keeps_the_best_tokens) {
    uint32_t counts[N];
    const bool best[N] = {[1] = true, [3] = true, [6] = true};
    count_draws((fkv_sampler_config){.temperature = 2.0f, .top_k = 3, .top_p = 1.0f}, counts);
    check_shares(counts, best, 2.0);
}
END_TEST

START_TEST(top_p_keeps_the_smallest_sufficient_set) {
    uint32_t counts[N];
    const bool best[N] = {[1] = true, [3] = true, [6] = true}; /* the best two tokens have a total probability of 0.65 and the
                                                                  best three 0.8, so top_p = 0.7 keeps three */
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_p = 0.7f}, counts);
    check_shares(counts, best, 1.0);
    const bool one[N] = {[1] = true};
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_p = 0.0f}, counts);
    check_shares(counts, one, 1.0);
}
END_TEST

/* After top-k has kept two tokens, their probabilities are renormalized. The first token then has probability 0.4 / 0.65, which
 * alone exceeds top_p = 0.6. */
START_TEST(top_p_applies_after_top_k) {
    uint32_t counts[N];
    const bool one[N] = {[1] = true};
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_k = 2, .top_p = 0.6f}, counts);
    check_shares(counts, one, 1.0);
}
END_TEST

/* The most likely tokens are adjacent in round 0, far apart in round 1, at the end of the vocabulary in round 2 and equally
 * likely in round 3. The size of the vocabulary is not a multiple of the block size. */
START_TEST(top_k_finds_the_best_tokens_of_a_large_vocabulary) {
    enum { VOCAB = 20011, K = 40, KEPT_DRAWS = 1000 };
    static float logits[VOCAB];
    for (uint32_t round = 0; round < 4; round++) {
        bool kept[VOCAB] = {false};
        bool seen[VOCAB] = {false};
        uint32_t n_seen = 0;
        for (uint32_t i = 0; i < VOCAB; i++) logits[i] = -5.0f + (float)(i * 2654435761u % 1000u) * 0.001f;
        for (uint32_t i = 0; i < K; i++) {
            uint32_t token = round == 0 ? 500 + i : round == 1 ? 499 * i : round == 2 ? VOCAB - K + i : 7 * i;
            logits[token] = 1.0f + (round == 3 ? 0.0f : 0.001f * (float)i);
            kept[token] = true;
        }
        logits[VOCAB - 1] = round == 3 ? 1.0f : logits[VOCAB - 1]; /* in the last round, this token is as likely as the kept
                                                                      tokens, but it is not kept, because its ID is higher */
        fkv_sampler *sampler =
            open_sampler((fkv_sampler_config){.temperature = 100.0f, .top_k = K, .top_p = 1.0f, .seed = 3}, VOCAB);
        for (int i = 0; i < KEPT_DRAWS; i++) {
            uint32_t token = VOCAB;
            ck_ok(fkv_sample(sampler, logits, &token));
            ck_assert_msg(token < VOCAB && kept[token], "round %u: token %u was drawn", round, token);
            n_seen += !seen[token];
            seen[token] = true;
        }
        ck_assert_uint_eq(n_seen, K);
        fkv_sampler_close(sampler);
    }
}
END_TEST

/* min_p = 0.2 applies to the probabilities before temperature scaling. The largest probability is 0.4, so 0.1 is above the limit
 * of 0.08, and 0.05 is below it. */
START_TEST(min_p_keeps_tokens_near_the_best) {
    uint32_t counts[N];
    const bool near[N] = {[1] = true, [3] = true, [6] = true, [4] = true};
    count_draws((fkv_sampler_config){.temperature = 3.0f, .top_p = 1.0f, .min_p = 0.2f}, counts);
    check_shares(counts, near, 3.0);
    count_draws((fkv_sampler_config){.temperature = 3.0f, .top_k = 7, .top_p = 0.99f, .min_p = 0.2f}, counts);
    check_shares(counts, near, 3.0);
}
END_TEST

START_TEST(same_seed_gives_the_same_tokens) {
    enum { VOCAB = 5000, TOKENS = 50 };
    static float logits[VOCAB];
    for (uint32_t i = 0; i < VOCAB; i++) logits[i] = (float)(i * 2654435761u % 1000u) * 0.01f;
    fkv_sampler_config config = {.temperature = 0.9f, .top_k = 400, .top_p = 0.9f, .min_p = 0.01f, .seed = 11};
    fkv_sampler *a = open_sampler(config, VOCAB);
    fkv_sampler *b = open_sampler(config, VOCAB);
    config.seed = 12;
    fkv_sampler *c = open_sampler(config, VOCAB);
    uint32_t n_other = 0;
    for (int i = 0; i < TOKENS; i++) {
        uint32_t of_a = 0;
        uint32_t of_b = 0;
        uint32_t of_c = 0;
        ck_ok(fkv_sample(a, logits, &of_a));
        ck_ok(fkv_sample(b, logits, &of_b));
        ck_ok(fkv_sample(c, logits, &of_c));
        ck_assert_uint_eq(of_a, of_b);
        n_other += of_a != of_c;
    }
    ck_assert_uint_gt(n_other, TOKENS / 2);
    fkv_sampler_close(a);
    fkv_sampler_close(b);
    fkv_sampler_close(c);
}
END_TEST

/* ---- comparison with a reference ---- */

enum { REF_VOCAB = 1000 };

typedef struct reference {
    double logit[REF_VOCAB];
    uint32_t order[REF_VOCAB]; /* tokens that can be drawn, most likely first */
    uint32_t n;
} reference;

static reference *sorted; /* input of the qsort() comparison function */

static int by_logit(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    if (sorted->logit[x] != sorted->logit[y]) return sorted->logit[x] > sorted->logit[y] ? -1 : 1;
    return x < y ? -1 : 1;
}

/* Determines which tokens can be drawn according to the definitions of the sampler settings. history[] contains all previous
 * tokens, oldest first. */
static void reference_keep(reference *r, const fkv_sampler_config *c, const float *logits, const uint32_t *history,
                           size_t n_history) {
    size_t first = c->penalty_tokens != 0 && n_history > c->penalty_tokens ? n_history - c->penalty_tokens : 0;
    for (uint32_t t = 0; t < REF_VOCAB; t++) {
        float x = logits[t];
        for (uint32_t i = 0; i < c->n_bias; i++)
            if (c->bias[i].token == t) x += c->bias[i].bias;
        uint32_t count = 0;
        for (size_t i = first; i < n_history; i++) count += history[i] == t;
        if (count > 0) {
            float p = c->repetition_penalty == 0.0f ? 1.0f : c->repetition_penalty;
            x = x > 0.0f ? x / p : x * p;
            x = x - c->presence_penalty - (float)count * c->frequency_penalty;
        }
        r->logit[t] = (double)x;
        r->order[t] = t;
    }
    sorted = r;
    qsort(r->order, REF_VOCAB, sizeof r->order[0], by_logit);
    r->n = c->top_k != 0 && c->top_k < REF_VOCAB ? c->top_k : REF_VOCAB;
    double best = r->logit[r->order[0]];
    double total = 0.0;
    for (uint32_t i = 0; i < r->n; i++) total += exp(r->logit[r->order[i]] - best);
    double sum = 0.0;
    for (uint32_t i = 0; i < r->n && c->top_p < 1.0f; i++) {
        sum += exp(r->logit[r->order[i]] - best);
        if (sum >= (double)c->top_p * total) r->n = i + 1;
    }
    while (c->min_p > 0.0f && r->n > 1 && exp(r->logit[r->order[r->n - 1]] - best) < (double)c->min_p * (1.0 - 1e-12)) r->n--;
}

static uint32_t random_below(uint32_t *state, uint32_t n) {
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 10) % n;
}

START_TEST(bias_penalties_and_filters_match_a_naive_reference) {
    enum { ROUNDS = 120, STEPS = 40 };
    uint32_t state = 5;
    for (int round = 0; round < ROUNDS; round++) {
        fkv_logit_bias bias[3];
        for (int i = 0; i < 3; i++)
            bias[i] = (fkv_logit_bias){random_below(&state, REF_VOCAB),
                                       i == 2 ? -INFINITY : (float)(random_below(&state, 80)) * 0.1f - 4.0f};
        fkv_sampler_config c = {.temperature = round % 3 == 0 ? 0.0f : 0.9f,
                                .top_k = round % 4 == 0 ? 0 : random_below(&state, 40),
                                .top_p = round % 5 == 0 ? 1.0f : 0.8f,
                                .min_p = round % 2 == 0 ? 0.0f : 0.02f,
                                .seed = (uint64_t)round,
                                .repetition_penalty = round % 7 == 0 ? 1.0f : 1.3f,
                                .presence_penalty = round % 6 == 0 ? 0.5f : 0.0f,
                                .frequency_penalty = round % 4 == 1 ? 0.25f : 0.0f,
                                .penalty_tokens = round % 8 == 0 ? 0 : 16,
                                .bias = bias,
                                .n_bias = random_below(&state, 4)};
        fkv_sampler *sampler = open_sampler(c, REF_VOCAB);
        uint32_t history[STEPS + 20];
        size_t n_history = 20;
        for (size_t i = 0; i < n_history; i++) history[i] = random_below(&state, REF_VOCAB);
        ck_ok(fkv_sampler_note(sampler, history, n_history));
        for (int step = 0; step < STEPS; step++) {
            float logits[REF_VOCAB];
            static reference r;
            for (int i = 0; i < REF_VOCAB; i++) logits[i] = (float)(random_below(&state, 4001)) * 0.002f - 3.0f;
            reference_keep(&r, &c, logits, history, n_history);
            uint32_t token = 0;
            ck_ok(fkv_sample(sampler, logits, &token));
            uint32_t place = 0;
            while (place < r.n && r.order[place] != token) place++;
            ck_assert_msg(place < r.n && (c.temperature > 0.0f || place == 0),
                          "round %d, step %d: token %u has index %u among the %u tokens that can be drawn", round, step, token,
                          place, r.n);
            history[n_history++] = token;
        }
        fkv_sampler_close(sampler);
    }
}
END_TEST

START_TEST(history_can_be_cleared_and_penalty_tokens_limits_it) {
    float logits[3] = {1.0f, 0.9f, 0.0f};
    uint32_t token = 9;
    fkv_sampler *sampler = open_sampler((fkv_sampler_config){.top_p = 1.0f, .presence_penalty = 0.5f, .penalty_tokens = 1}, 3);
    const uint32_t expected[] = {0, 1, 0, 1};
    for (int i = 0; i < 4; i++) {
        ck_ok(fkv_sample(sampler, logits, &token));
        ck_assert_uint_eq(token, expected[i]);
    }
    fkv_sampler_forget(sampler);
    ck_ok(fkv_sample(sampler, logits, &token));
    ck_assert_uint_eq(token, 0);
    fkv_sampler_forget(sampler);
    ck_ok(fkv_sample(sampler, logits, &token));
    ck_assert_uint_eq(token, 0);
    token = 3;
    ck_status(fkv_sampler_note(sampler, &token, 1), FKV_BAD_ARGUMENT);
    fkv_sampler_forget(NULL);
    fkv_sampler_close(sampler);
    const fkv_logit_bias never[] = {{0, -INFINITY}, {1, -INFINITY}, {2, -INFINITY}};
    sampler = open_sampler((fkv_sampler_config){.top_p = 1.0f, .bias = never, .n_bias = 3}, 3);
    ck_status(fkv_sample(sampler, logits, &token), FKV_BAD_ARGUMENT);
    fkv_sampler_close(sampler);
}
END_TEST

START_TEST(invalid_logits_are_rejected) {
    float logits[3] = {0.0f, NAN, 1.0f};
    uint32_t token = 99;
    fkv_sampler *sampler = open_sampler((fkv_sampler_config){.temperature = 1.0f, .top_p = 1.0f}, 3);
    ck_status(fkv_sample(sampler, logits, &token), FKV_BAD_ARGUMENT);
    for (int i = 0; i < 3; i++) logits[i] = -INFINITY;
    ck_status(fkv_sample(sampler, logits, &token), FKV_BAD_ARGUMENT);
    logits[0] = INFINITY;
    ck_status(fkv_sample(sampler, logits, &token), FKV_BAD_ARGUMENT);
    ck_status(fkv_sample(NULL, logits, &token), FKV_BAD_ARGUMENT);
    ck_assert_uint_eq(token, 99);
    logits[0] = -2.0f;
    ck_ok(fkv_sample(sampler, logits, &token));
    ck_assert_uint_eq(token, 0);
    fkv_sampler_close(sampler);
}
END_TEST

START_TEST(invalid_configurations_are_rejected) {
    const fkv_sampler_config bad[] = {
        {.temperature = -1.0f, .top_p = 1.0f},
        {.temperature = NAN, .top_p = 1.0f},
        {.top_p = 1.5f},
        {.top_p = -0.1f},
        {.top_p = NAN},
        {.top_p = 1.0f, .min_p = 2.0f},
        {.top_p = 1.0f, .min_p = NAN},
        {.top_p = 1.0f, .repetition_penalty = -1.0f},
        {.top_p = 1.0f, .presence_penalty = INFINITY},
        {.top_p = 1.0f, .frequency_penalty = NAN},
        {.top_p = 1.0f, .n_bias = 1},
        {.top_p = 1.0f, .n_bias = 1, .bias = (const fkv_logit_bias[]){{10, 0.0f}}},
        {.top_p = 1.0f, .n_bias = 1, .bias = (const fkv_logit_bias[]){{1, NAN}}},
    };
    fkv_sampler *sampler = NULL;
    fkv_sampler_config good = fkv_sampler_config_default();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) ck_status(fkv_sampler_open(&bad[i], 10, &sampler), FKV_BAD_ARGUMENT);
    ck_status(fkv_sampler_open(&good, 0, &sampler), FKV_BAD_ARGUMENT);
    ck_status(fkv_sampler_open(NULL, 10, &sampler), FKV_BAD_ARGUMENT);
    ck_assert_ptr_null(sampler);
    fkv_sampler_close(NULL);
}
END_TEST

TEST_MAIN("sampler", greedy_takes_the_largest_logit_and_the_lowest_token_on_ties,
          without_filters_tokens_follow_their_probabilities, top_k_keeps_the_best_tokens,
          top_k_finds_the_best_tokens_of_a_large_vocabulary, top_p_keeps_the_smallest_sufficient_set, top_p_applies_after_top_k,
          min_p_keeps_tokens_near_the_best, same_seed_gives_the_same_tokens, bias_penalties_and_filters_match_a_naive_reference,
          history_can_be_cleared_and_penalty_tokens_limits_it, invalid_logits_are_rejected, invalid_configurations_are_rejected)
