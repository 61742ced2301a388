/* See draft.h. */
#include "draft.h"

enum { MAX_NGRAM = 3, MIN_NGRAM = 2, SEARCH_WINDOW = 8192 };

static const double INITIAL_ACCEPTANCE = 0.5;
static const double ACCEPTANCE_STEP = 0.1; /* weight of the newest observation in the moving average of the acceptance rate */
static const double COST_MARGIN = 1.1;     /* minimum ratio of expected time saved to extra step time */

uint32_t fkv_draft_find(const uint32_t *tokens, uint32_t n_tokens, uint32_t max_tokens, uint32_t *draft) {
    for (uint32_t n = MAX_NGRAM; n >= MIN_NGRAM; n--) {
        if (n_tokens <= n) continue;
        const uint32_t *last = tokens + n_tokens - n;
        uint32_t first = n_tokens > SEARCH_WINDOW ? n_tokens - SEARCH_WINDOW : 0;
        for (uint32_t at = n_tokens - n; at-- > first;) {
            if (memcmp(tokens + at, last, n * sizeof *tokens) != 0) continue;
            uint32_t found = fkv_min_u32(max_tokens, n_tokens - at - n);
            memcpy(draft, tokens + at + n, found * sizeof *draft);
            return found;
        }
    }
    return 0;
}

fkv_draft_record fkv_draft_record_init(void) { return (fkv_draft_record){.acceptance = INITIAL_ACCEPTANCE}; }

uint32_t fkv_draft_choose(fkv_draft_candidate *candidates, uint32_t n_candidates, const double *extra_s, uint32_t max_tokens,
                          double token_s) {
    uint32_t order[FKV_MAX_STEP_DRAFTS];
    uint32_t n = 0;
    uint32_t n_best = 0;
    double gain = 0.0;
    double best = 0.0;
    FKV_ASSERT(max_tokens <= FKV_MAX_STEP_DRAFTS);
    for (uint32_t i = 0; i < n_candidates; i++) {
        candidates[i].n_chosen = 0;
        candidates[i].next_probability = candidates[i].n_proposed > 0 ? candidates[i].acceptance : 0.0;
    }
    while (n < max_tokens) {
        uint32_t at = 0;
        for (uint32_t i = 1; i < n_candidates; i++)
            if (candidates[i].next_probability > candidates[at].next_probability) at = i;
        fkv_draft_candidate *best_next = &candidates[at];
        if (n_candidates == 0 || best_next->next_probability <= 0.0) break;
        gain += best_next->next_probability * token_s;
        best_next->n_chosen++;
        best_next->next_probability =
            best_next->n_chosen < best_next->n_proposed ? best_next->next_probability * best_next->acceptance : 0.0;
        order[n++] = at;
        if (gain - COST_MARGIN * extra_s[n] <= best) continue;
        best = gain - COST_MARGIN * extra_s[n];
        n_best = n;
    }
    while (n > n_best) candidates[order[--n]].n_chosen--;
    return n_best;
}

void fkv_draft_update(fkv_draft_record *r, uint32_t n_drafted, uint32_t n_accepted) {
    for (uint32_t i = 0; i < n_accepted; i++) r->acceptance += ACCEPTANCE_STEP * (1.0 - r->acceptance);
    if (n_accepted < n_drafted) r->acceptance -= ACCEPTANCE_STEP * r->acceptance;
}
