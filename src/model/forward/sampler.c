/* Samples a token from logits: applies biases and penalties, then selects greedily or draws after top-k, top-p, min-p and
 * temperature, in this order.
 *
 * Candidates form a heap ordered by logit; among equal logits, the lower token comes first. The heap is built in one pass, and
 * candidates are popped only as far as the filters require. Popped candidates are stored after the heap, sorted with the best one
 * last. With top-k, a lower bound on the k-th largest logit reduces the candidates to a few dozen. All memory is allocated at
 * open.
 */
#include "../../base/cpu.h"
#include "../model.h"
#include "vector_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    float logit;
    uint32_t token;
} candidate;

struct fkv_sampler {
    fkv_sampler_config config;
    const fkv_vector_ops *ops;
    uint64_t state;
    uint32_t n_vocab;
    fkv_logit_bias *bias; /* [config.n_bias] */
    uint32_t *counts;     /* [n_vocab] number of occurrences of each token in the history; NULL if penalties are disabled */
    uint32_t *recent;     /* [config.penalty_tokens] ring buffer of the history, or NULL if unlimited */
    uint32_t n_recent;
    uint32_t next_recent;
    float *adjusted;        /* [n_vocab] logits after biases and penalties; NULL if neither is configured */
    candidate candidates[]; /* [n_vocab] */
};

fkv_sampler_config fkv_sampler_config_default(void) { return (fkv_sampler_config){.top_p = 1.0f}; }

static bool has_penalties(const fkv_sampler_config *c) {
    bool repetition = c->repetition_penalty != 0.0f && c->repetition_penalty != 1.0f;
    return repetition || c->presence_penalty != 0.0f || c->frequency_penalty != 0.0f;
}

static fkv_status check_sampler_config(const fkv_sampler_config *c, uint32_t n_vocab) {
    FKV_REQUIRE(n_vocab > 0 && n_vocab <= INT32_MAX, FKV_BAD_ARGUMENT,
                "invalid vocabulary size %u: expected 1 to 2^31 - 1 tokens", n_vocab);
    FKV_REQUIRE(isfinite(c->temperature) && c->temperature >= 0.0f, FKV_BAD_ARGUMENT,
                "invalid temperature %g: expected 0 (greedy) or above", (double)c->temperature);
    FKV_REQUIRE(c->top_p >= 0.0f && c->top_p <= 1.0f, FKV_BAD_ARGUMENT, "invalid top_p %g: expected 0 to 1 (1 disables it)",
                (double)c->top_p);
    FKV_REQUIRE(c->min_p >= 0.0f && c->min_p <= 1.0f, FKV_BAD_ARGUMENT, "invalid min_p %g: expected 0 to 1 (0 disables it)",
                (double)c->min_p);
    FKV_REQUIRE(isfinite(c->repetition_penalty) && c->repetition_penalty >= 0.0f, FKV_BAD_ARGUMENT,
                "invalid repetition penalty %g: expected a finite value above 0 (1 disables it)", (double)c->repetition_penalty);
    FKV_REQUIRE(isfinite(c->presence_penalty) && isfinite(c->frequency_penalty), FKV_BAD_ARGUMENT,
                "invalid presence penalty %g or frequency penalty %g: expected finite values (0 disables a penalty)",
                (double)c->presence_penalty, (double)c->frequency_penalty);
    FKV_REQUIRE(c->bias != NULL || c->n_bias == 0, FKV_BAD_ARGUMENT, "fkv_sampler_open: bias is NULL");
    for (uint32_t i = 0; i < c->n_bias; i++)
        FKV_REQUIRE(c->bias[i].token < n_vocab && c->bias[i].bias < INFINITY, FKV_BAD_ARGUMENT,
                    "invalid bias %g for token %u: expected a finite value or -infinity, and a token below %u",
                    (double)c->bias[i].bias, c->bias[i].token, n_vocab);
    return FKV_OK;
}

static fkv_sampler *allocate_sampler(const fkv_sampler_config *config, uint32_t n_vocab) {
    fkv_sampler *s = calloc(1, sizeof *s + (size_t)n_vocab * sizeof *s->candidates);
    if (s == NULL) return NULL;
    bool good = true;
    if (config->n_bias > 0) {
        s->bias = malloc((size_t)config->n_bias * sizeof *s->bias);
        good = s->bias != NULL;
        if (good) memcpy(s->bias, config->bias, (size_t)config->n_bias * sizeof *s->bias);
    }
    if (good && has_penalties(config)) {
        s->counts = calloc(n_vocab, sizeof *s->counts);
        if (config->penalty_tokens > 0) s->recent = malloc((size_t)config->penalty_tokens * sizeof *s->recent);
        good = s->counts != NULL && (s->recent != NULL || config->penalty_tokens == 0);
    }
    if (good && (config->n_bias > 0 || s->counts != NULL)) {
        s->adjusted = malloc((size_t)n_vocab * sizeof *s->adjusted);
        good = s->adjusted != NULL;
    }
    if (good) return s;
    fkv_sampler_close(s);
    return NULL;
}

fkv_status fkv_sampler_open(const fkv_sampler_config *config, uint32_t n_vocab, fkv_sampler **sampler) {
    FKV_REQUIRE(config != NULL && sampler != NULL, FKV_BAD_ARGUMENT, "fkv_sampler_open: config or sampler is NULL");
    FKV_TRY(check_sampler_config(config, n_vocab));
    fkv_sampler *made = allocate_sampler(config, n_vocab);
    FKV_REQUIRE(made != NULL, FKV_NO_MEMORY, "out of memory allocating a sampler for %u tokens", n_vocab);
    made->ops = fkv_vector_ops_for(fkv_cpu_best_isa());
    made->config = *config;
    made->config.bias = made->bias;
    made->state = config->seed;
    made->n_vocab = n_vocab;
    *sampler = made;
    return FKV_OK;
}

void fkv_sampler_close(fkv_sampler *sampler) {
    if (sampler == NULL) return;
    free(sampler->bias);
    free(sampler->counts);
    free(sampler->recent);
    free(sampler->adjusted);
    free(sampler);
}

fkv_sampler_config fkv_model_sampling(const fkv_model *model, bool *said) {
    fkv_sampler_config c = {.temperature = 0.7f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repetition_penalty = 1.0f};
    const fkv_sampling_source none = {0};
    const fkv_sampling_source *s = model != NULL ? &fkv_weights_vocab(model->weights)->sampling : &none;
    if (said != NULL) *said = s->fields != 0;
    bool good_p = s->top_p > 0.0f && s->top_p <= 1.0f; /* invalid values in the file are ignored */
    if ((s->fields & FKV_SAMPLING_TEMPERATURE) != 0 && s->temperature >= 0.0f && s->temperature <= 10.0f)
        c.temperature = s->temperature;
    if ((s->fields & FKV_SAMPLING_TOP_K) != 0) c.top_k = s->top_k;
    if ((s->fields & FKV_SAMPLING_TOP_P) != 0 && good_p) c.top_p = s->top_p;
    if ((s->fields & FKV_SAMPLING_MIN_P) != 0 && s->min_p >= 0.0f && s->min_p < 1.0f) c.min_p = s->min_p;
    if ((s->fields & FKV_SAMPLING_REPETITION) != 0 && s->repetition > 0.0f && s->repetition <= 10.0f)
        c.repetition_penalty = s->repetition;
    return c;
}

/* ---- history and penalties ---- */

static void note_token(fkv_sampler *s, uint32_t token) {
    if (s->counts == NULL) return;
    if (s->recent != NULL) {
        if (s->n_recent == s->config.penalty_tokens)
            s->counts[s->recent[s->next_recent]]--;
        else
            s->n_recent++;
        s->recent[s->next_recent] = token;
        s->next_recent = (s->next_recent + 1) % s->config.penalty_tokens;
    }
    if (s->counts[token] < UINT32_MAX) s->counts[token]++;
}

fkv_status fkv_sampler_note(fkv_sampler *sampler, const uint32_t *tokens, size_t n_tokens) {
    FKV_REQUIRE(sampler != NULL && (tokens != NULL || n_tokens == 0), FKV_BAD_ARGUMENT,
                "fkv_sampler_note: sampler or tokens is NULL");
    for (size_t i = 0; i < n_tokens; i++)
        FKV_REQUIRE(tokens[i] < sampler->n_vocab, FKV_BAD_ARGUMENT, "invalid token %u: the vocabulary has %u tokens", tokens[i],
                    sampler->n_vocab);
    for (size_t i = 0; i < n_tokens; i++) note_token(sampler, tokens[i]);
    return FKV_OK;
}

void fkv_sampler_forget(fkv_sampler *sampler) {
    if (sampler == NULL || sampler->counts == NULL) return;
    memset(sampler->counts, 0, (size_t)sampler->n_vocab * sizeof *sampler->counts);
    sampler->n_recent = 0;
    sampler->next_recent = 0;
}

/* Applies biases and penalties to the logits and writes the results to s->adjusted. */
static void adjust_logits(fkv_sampler *s, const float *logits) {
    const fkv_sampler_config *c = &s->config;
    float repetition = c->repetition_penalty != 0.0f ? c->repetition_penalty : 1.0f;
    memcpy(s->adjusted, logits, s->n_vocab * sizeof *logits);
    for (uint32_t i = 0; i < c->n_bias; i++) s->adjusted[s->bias[i].token] += s->bias[i].bias;
    for (uint32_t i = 0; i < s->n_vocab && s->counts != NULL; i++) {
        if (s->counts[i] == 0) continue;
        float logit = s->adjusted[i];
        logit = logit > 0.0f ? logit / repetition : logit * repetition;
        s->adjusted[i] = logit - c->presence_penalty - (float)s->counts[i] * c->frequency_penalty;
    }
}

/* Returns a uniform random number in [0, 1) with 53 bits (splitmix64). */
static double draw_uniform(fkv_sampler *sampler) {
    uint64_t z = sampler->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

static fkv_status find_best(const fkv_sampler *s, const float *logits, uint32_t *best) {
    uint32_t found = s->ops->largest(logits, s->n_vocab);
    for (uint32_t i = 0; found == s->n_vocab && i < s->n_vocab; i++)
        FKV_REQUIRE(!isnan(logits[i]), FKV_BAD_ARGUMENT, "the logit of token %u is NaN", i);
    FKV_REQUIRE(isfinite(logits[found]), FKV_BAD_ARGUMENT, "the largest logit (token %u) is %g, expected a finite value", found,
                (double)logits[found]);
    *best = found;
    return FKV_OK;
}

/* Finds the token with the largest logit after biases and penalties. */
static fkv_status find_best_adjusted(const fkv_sampler *s, uint32_t *best) {
    uint32_t found = s->ops->largest(s->adjusted, s->n_vocab);
    FKV_REQUIRE(found < s->n_vocab && isfinite(s->adjusted[found]), FKV_BAD_ARGUMENT, "biases and penalties exclude every token");
    *best = found;
    return FKV_OK;
}

/* ---- candidate heap ---- */

static bool is_better(candidate a, candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

static void sift_down(candidate *heap, uint32_t n, uint32_t at) {
    candidate moving = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && is_better(heap[child + 1], heap[child])) child++;
        if (!is_better(heap[child], moving)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

/* Removes the best of n candidates, stores it at index n - 1 and returns it. */
static candidate pop_best(candidate *heap, uint32_t n) {
    candidate first = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = first;
    sift_down(heap, n - 1, 0);
    return first;
}

static void make_heap(candidate *heap, uint32_t n) {
    for (uint32_t i = n / 2; i-- > 0;) sift_down(heap, n, i);
}

/* ---- preselection for top-k ---- */

enum { BLOCK = 64, LANES = 16 };

/* Returns the largest of n logits. Compilers translate the loop to vector max instructions. */
static float largest_of_block(const float *logits, uint32_t n) {
    float lanes[LANES];
    for (uint32_t l = 0; l < LANES; l++) lanes[l] = -INFINITY;
    uint32_t whole = n / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t l = 0; l < LANES; l++) lanes[l] = logits[i + l] > lanes[l] ? logits[i + l] : lanes[l];
    for (uint32_t i = whole; i < n; i++) lanes[i - whole] = logits[i] > lanes[i - whole] ? logits[i] : lanes[i - whole];
    for (uint32_t l = 1; l < LANES; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

/* Collects a superset of the top k candidates and returns their number. Logits are divided into blocks, and the k-th largest of
 * the block maxima is a lower bound on the k-th largest logit. All tokens whose logits reach this bound are candidates. If there
 * are k or fewer blocks, all tokens are candidates. */
static uint32_t gather_candidates(fkv_sampler *s, const float *logits, uint32_t k) {
    const uint32_t n_blocks = s->n_vocab / BLOCK;
    float least = -INFINITY;
    uint32_t n = 0;
    if (k < n_blocks) {
        for (uint32_t b = 0; b < n_blocks; b++)
            s->candidates[b] = (candidate){largest_of_block(logits + (size_t)b * BLOCK, BLOCK), b};
        make_heap(s->candidates, n_blocks);
        for (uint32_t i = 0; i < k; i++) least = pop_best(s->candidates, n_blocks - i).logit;
    }
    for (uint32_t from = 0; from < s->n_vocab; from += BLOCK) {
        const uint32_t end = fkv_min_u32(from + BLOCK, s->n_vocab);
        if (k < n_blocks && !(largest_of_block(logits + from, end - from) >= least)) continue;
        for (uint32_t i = from; i < end; i++)
            if (logits[i] >= least) s->candidates[n++] = (candidate){logits[i], i};
    }
    return n;
}

/* ---- filters ---- */

/* Returns the top_k best of n candidates, sorted with the best one last. */
static candidate *keep_top_k(fkv_sampler *s, uint32_t n) {
    for (uint32_t i = 0; i < s->config.top_k; i++) (void)pop_best(s->candidates, n - i);
    return s->candidates + (n - s->config.top_k);
}

/* Returns how many of the most likely candidates top-p keeps: the smallest number whose total probability is at least top_p
 * times the total probability of all n candidates. */
static uint32_t count_top_p(fkv_sampler *s, candidate *heap, uint32_t n, bool sorted, float largest) {
    double total = 0.0;
    for (uint32_t i = 0; i < n; i++) total += exp((double)heap[i].logit - (double)largest);
    double wanted = (double)s->config.top_p * total;
    double sum = 0.0;
    uint32_t count = 0;
    while (count < n) {
        candidate next = sorted ? heap[n - 1 - count] : pop_best(heap, n - count);
        sum += exp((double)next.logit - (double)largest);
        count++;
        if (sum >= wanted) break;
    }
    return count;
}

/* Draws a candidate at random, with probabilities scaled by the configured temperature. */
static uint32_t draw_among(fkv_sampler *s, const candidate *among, uint32_t n, float largest) {
    double temperature = (double)s->config.temperature;
    double total = 0.0;
    for (uint32_t i = 0; i < n; i++) total += exp(((double)among[i].logit - (double)largest) / temperature);
    double left = draw_uniform(s) * total;
    uint32_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        double share = exp(((double)among[i].logit - (double)largest) / temperature);
        if (share == 0.0) continue;
        last = i;
        left -= share;
        if (left < 0.0) break;
    }
    return among[last].token; /* rounding can keep `left` from becoming negative; in that case, this is the last candidate with a
                                 probability above 0 */
}

/* Applies the filters and draws a token. `largest` is the largest logit. */
static uint32_t draw_token(fkv_sampler *s, const float *logits, float largest) {
    candidate *among = s->candidates;
    bool with_k = s->config.top_k != 0 && s->config.top_k < s->n_vocab;
    bool with_p = s->config.top_p < 1.0f;
    uint32_t n = gather_candidates(s, logits, with_k ? s->config.top_k : s->n_vocab);
    if (with_k || with_p) make_heap(among, n);
    if (with_k) {
        among = keep_top_k(s, n);
        n = s->config.top_k;
    }
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
    return draw_among(s, among, n, largest);
}

fkv_status fkv_sample(fkv_sampler *sampler, const float *logits, uint32_t *token) {
    FKV_REQUIRE(sampler != NULL && logits != NULL && token != NULL, FKV_BAD_ARGUMENT,
                "fkv_sample: sampler, logits or token is NULL");
    fkv_sampler *s = sampler;
    bool greedy = s->config.temperature == 0.0f;
    uint32_t best = 0;
    FKV_TRY(find_best(s, logits, &best));
    if (s->adjusted != NULL) {
        adjust_logits(s, logits);
        FKV_TRY(find_best_adjusted(s, &best));
        logits = s->adjusted;
    }
    *token = greedy ? best : draw_token(s, logits, logits[best]);
    note_token(s, *token);
    return FKV_OK;
}
