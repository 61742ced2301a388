/* The next token from logits: greedy, or drawn after top-k, top-p, min-p and temperature, in this order.
 *
 * Candidates are a heap by (logit, lower token first), built in one pass and popped only as far as the filters look: the popped
 * ones end up sorted behind the heap, largest last. Memory is taken at open; drawing takes none.
 */
#include "../../base/base.h"

#include <flatkv/model.h>

#include <math.h>
#include <stdlib.h>

typedef struct candidate {
    float logit;
    uint32_t token;
} candidate;

struct fkv_sampler {
    fkv_sampler_config config;
    uint64_t state;
    uint32_t n_vocab;
    candidate candidates[]; /* [n_vocab] */
};

fkv_sampler_config fkv_sampler_config_default(void) { return (fkv_sampler_config){.top_p = 1.0f}; }

fkv_status fkv_sampler_open(const fkv_sampler_config *config, uint32_t n_vocab, fkv_sampler **sampler) {
    FKV_REQUIRE(config != NULL && sampler != NULL, FKV_BAD_ARGUMENT, "fkv_sampler_open: config or sampler is NULL");
    FKV_REQUIRE(n_vocab > 0 && n_vocab <= INT32_MAX, FKV_BAD_ARGUMENT, "a vocabulary of %u tokens cannot be sampled from",
                n_vocab);
    FKV_REQUIRE(isfinite(config->temperature) && config->temperature >= 0.0f, FKV_BAD_ARGUMENT,
                "temperature %g: 0 (greedy) or above", (double)config->temperature);
    FKV_REQUIRE(config->top_p >= 0.0f && config->top_p <= 1.0f, FKV_BAD_ARGUMENT, "top_p %g: 0 to 1 (1: off)",
                (double)config->top_p);
    FKV_REQUIRE(config->min_p >= 0.0f && config->min_p <= 1.0f, FKV_BAD_ARGUMENT, "min_p %g: 0 (off) to 1",
                (double)config->min_p);
    fkv_sampler *made = malloc(sizeof *made + (size_t)n_vocab * sizeof *made->candidates);
    FKV_REQUIRE(made != NULL, FKV_NO_MEMORY, "no memory for a sampler over %u tokens", n_vocab);
    made->config = *config;
    made->state = config->seed;
    made->n_vocab = n_vocab;
    *sampler = made;
    return FKV_OK;
}

void fkv_sampler_close(fkv_sampler *sampler) { free(sampler); }

/* splitmix64, its upper 53 bits: [0, 1) */
static double draw(fkv_sampler *sampler) {
    uint64_t z = sampler->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

static fkv_status find_best(const float *logits, uint32_t n, uint32_t *best) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++) {
        FKV_REQUIRE(!isnan(logits[i]), FKV_BAD_ARGUMENT, "the logit of token %u is not a number", i);
        if (logits[i] > logits[found]) found = i;
    }
    FKV_REQUIRE(isfinite(logits[found]), FKV_BAD_ARGUMENT, "the largest logit, of token %u, is %g", found, (double)logits[found]);
    *best = found;
    return FKV_OK;
}

/* ---- the heap ---- */

static bool before(candidate a, candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

static void sift_down(candidate *heap, uint32_t n, uint32_t at) {
    candidate moving = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], moving)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

/* Moves the first of the n candidates behind the other n - 1 and returns it. */
static candidate pop(candidate *heap, uint32_t n) {
    candidate first = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = first;
    sift_down(heap, n - 1, 0);
    return first;
}

/* ---- filters: each keeps a front of the sorted candidates ---- */

/* The candidates that top-k leaves, behind the rest and sorted with the best last: *kept of them. */
static candidate *keep_top_k(fkv_sampler *s, uint32_t *kept) {
    uint32_t n = s->n_vocab;
    uint32_t k = s->config.top_k;
    for (uint32_t i = 0; i < k; i++) (void)pop(s->candidates, n - i);
    *kept = k;
    return s->candidates + (n - k);
}

/* How many of the best reach the share top_p of all `n` candidates, which sum to `total`. */
static uint32_t count_top_p(fkv_sampler *s, candidate *heap, uint32_t n, bool sorted, float largest) {
    double total = 0.0;
    for (uint32_t i = 0; i < n; i++) total += exp((double)heap[i].logit - (double)largest);
    double wanted = (double)s->config.top_p * total;
    double sum = 0.0;
    uint32_t count = 0;
    while (count < n) {
        candidate next = sorted ? heap[n - 1 - count] : pop(heap, n - count);
        sum += exp((double)next.logit - (double)largest);
        count++;
        if (sum >= wanted) break;
    }
    return count;
}

/* Draws among candidates by their share at the temperature. */
static uint32_t draw_among(fkv_sampler *s, const candidate *among, uint32_t n, float largest) {
    double temperature = (double)s->config.temperature;
    double total = 0.0;
    for (uint32_t i = 0; i < n; i++) total += exp(((double)among[i].logit - (double)largest) / temperature);
    double left = draw(s) * total;
    uint32_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        double share = exp(((double)among[i].logit - (double)largest) / temperature);
        if (share == 0.0) continue;
        last = i;
        left -= share;
        if (left < 0.0) break;
    }
    return among[last].token; /* rounding may leave a crumb of `left`: the last that can be drawn takes it */
}

fkv_status fkv_sample(fkv_sampler *sampler, const float *logits, uint32_t *token) {
    FKV_REQUIRE(sampler != NULL && logits != NULL && token != NULL, FKV_BAD_ARGUMENT,
                "fkv_sample: sampler, logits or token is NULL");
    fkv_sampler *s = sampler;
    uint32_t best = 0;
    FKV_TRY(find_best(logits, s->n_vocab, &best));
    *token = best;
    if (s->config.temperature == 0.0f) return FKV_OK;

    float largest = logits[best];
    candidate *among = s->candidates;
    uint32_t n = s->n_vocab;
    for (uint32_t i = 0; i < n; i++) among[i] = (candidate){logits[i], i};
    bool with_k = s->config.top_k != 0 && s->config.top_k < n;
    bool with_p = s->config.top_p < 1.0f;
    if (with_k || with_p)
        for (uint32_t i = n / 2; i-- > 0;) sift_down(among, n, i);
    if (with_k) among = keep_top_k(s, &n);
    if (with_p) {
        uint32_t kept = count_top_p(s, among, n, with_k, largest);
        among += n - kept;
        n = kept;
    }
    if (s->config.min_p > 0.0f) {
        double least = (double)largest + log((double)s->config.min_p);
        uint32_t kept = 0;
        for (uint32_t i = 0; i < n; i++)
            if ((double)among[i].logit >= least) among[kept++] = among[i];
        n = kept;
    }
    *token = draw_among(s, among, n, largest);
    return FKV_OK;
}
