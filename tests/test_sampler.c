/* The sampler: which tokens can come, in what shares, and that the same seed gives the same tokens. */
#include "test.h"

#include <flatkv/model.h>

#include <math.h>
#include <string.h>

enum { N = 8 };

static const uint32_t DRAWS = 40000;

/* Shares 0.4 0.25 0.15 0.1 0.05 0.03 0.015 0.005 in a mixed order. */
static const float SHARES[N] = {0.05f, 0.4f, 0.015f, 0.25f, 0.1f, 0.005f, 0.15f, 0.03f};

static void make_logits(float logits[N]) {
    for (int i = 0; i < N; i++) logits[i] = logf(SHARES[i]) + 3.0f;
}

static fkv_sampler *open_sampler(fkv_sampler_config config, uint32_t n_vocab) {
    fkv_sampler *sampler = NULL;
    ck_ok(fkv_sampler_open(&config, n_vocab, &sampler));
    return sampler;
}

/* How often each token comes. */
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

/* Tokens that are kept come as often as their share among the kept; the others never. Four standard deviations of room. */
static void check_shares(const uint32_t counts[N], const bool kept[N], double temperature) {
    double total = 0.0;
    for (int i = 0; i < N; i++) total += kept[i] ? pow((double)SHARES[i], 1.0 / temperature) : 0.0;
    for (int i = 0; i < N; i++) {
        double p = kept[i] ? pow((double)SHARES[i], 1.0 / temperature) / total : 0.0;
        double room = 4.0 * sqrt(DRAWS * p * (1.0 - p));
        ck_assert_msg(fabs(counts[i] - DRAWS * p) <= room, "token %d came %u times instead of %.0f +- %.0f", i, counts[i],
                      DRAWS * p, room);
    }
}

START_TEST(greedy_takes_the_largest_and_of_equals_the_lowest) {
    float logits[] = {-1.0f, 2.0f, -INFINITY, 2.0f, 1.5f};
    fkv_sampler *sampler = open_sampler(fkv_sampler_config_default(), 5);
    uint32_t token = 99;
    ck_ok(fkv_sample(sampler, logits, &token));
    ck_assert_uint_eq(token, 1);
    fkv_sampler_close(sampler);
}
END_TEST

START_TEST(without_filters_tokens_come_by_their_shares) {
    uint32_t counts[N];
    const bool all[N] = {true, true, true, true, true, true, true, true};
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_p = 1.0f}, counts);
    check_shares(counts, all, 1.0);
    count_draws((fkv_sampler_config){.temperature = 0.5f, .top_p = 1.0f}, counts);
    check_shares(counts, all, 0.5);
}
END_TEST

START_TEST(top_k_keeps_the_best) {
    uint32_t counts[N];
    const bool best[N] = {[1] = true, [3] = true, [6] = true};
    count_draws((fkv_sampler_config){.temperature = 2.0f, .top_k = 3, .top_p = 1.0f}, counts);
    check_shares(counts, best, 2.0);
}
END_TEST

START_TEST(top_p_keeps_the_fewest_that_reach_it) {
    uint32_t counts[N];
    const bool best[N] = {[1] = true, [3] = true, [6] = true}; /* 0.4 + 0.25 < 0.7 <= 0.8 */
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_p = 0.7f}, counts);
    check_shares(counts, best, 1.0);
    const bool one[N] = {[1] = true};
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_p = 0.0f}, counts);
    check_shares(counts, one, 1.0);
}
END_TEST

/* After top-k, shares are those among the kept: 0.4 / 0.65 alone reach 0.6. */
START_TEST(top_p_follows_top_k) {
    uint32_t counts[N];
    const bool one[N] = {[1] = true};
    count_draws((fkv_sampler_config){.temperature = 1.0f, .top_k = 2, .top_p = 0.6f}, counts);
    check_shares(counts, one, 1.0);
}
END_TEST

/* min_p looks at shares before the temperature: 0.1 is a quarter of 0.4, 0.05 is not. */
START_TEST(min_p_keeps_what_is_near_the_best) {
    uint32_t counts[N];
    const bool near[N] = {[1] = true, [3] = true, [6] = true, [4] = true};
    count_draws((fkv_sampler_config){.temperature = 3.0f, .top_p = 1.0f, .min_p = 0.2f}, counts);
    check_shares(counts, near, 3.0);
    count_draws((fkv_sampler_config){.temperature = 3.0f, .top_k = 7, .top_p = 0.99f, .min_p = 0.2f}, counts);
    check_shares(counts, near, 3.0);
}
END_TEST

START_TEST(the_same_seed_gives_the_same_tokens) {
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

START_TEST(what_cannot_be_sampled_from_is_refused) {
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

START_TEST(configurations_that_cannot_be_are_refused) {
    const fkv_sampler_config bad[] = {
        {.temperature = -1.0f, .top_p = 1.0f},
        {.temperature = NAN, .top_p = 1.0f},
        {.top_p = 1.5f},
        {.top_p = -0.1f},
        {.top_p = NAN},
        {.top_p = 1.0f, .min_p = 2.0f},
        {.top_p = 1.0f, .min_p = NAN},
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

TEST_MAIN("sampler", greedy_takes_the_largest_and_of_equals_the_lowest, without_filters_tokens_come_by_their_shares,
          top_k_keeps_the_best, top_p_keeps_the_fewest_that_reach_it, top_p_follows_top_k, min_p_keeps_what_is_near_the_best,
          the_same_seed_gives_the_same_tokens, what_cannot_be_sampled_from_is_refused, configurations_that_cannot_be_are_refused)
