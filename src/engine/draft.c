/* See draft.h. */
#include "draft.h"

enum { LONGEST = 3, SHORTEST = 2, LOOK_BACK = 8192 };

static const double START = 0.5;
static const double STEP = 0.1;   /* of a record towards what was seen */
static const double MARGIN = 1.1; /* what is tried should be worth more than it is thought to take */

uint32_t fkv_draft_find(const uint32_t *tokens, uint32_t n_tokens, uint32_t most, uint32_t *draft) {
    for (uint32_t n = LONGEST; n >= SHORTEST; n--) {
        if (n_tokens <= n) continue;
        const uint32_t *last = tokens + n_tokens - n;
        uint32_t first = n_tokens > LOOK_BACK ? n_tokens - LOOK_BACK : 0;
        for (uint32_t at = n_tokens - n; at-- > first;) {
            if (memcmp(tokens + at, last, n * sizeof *tokens) != 0) continue;
            uint32_t found = fkv_min_u32(most, n_tokens - at - n);
            memcpy(draft, tokens + at + n, found * sizeof *draft);
            return found;
        }
    }
    return 0;
}

fkv_draft_record fkv_draft_record_start(void) { return (fkv_draft_record){.right = START}; }

uint32_t fkv_draft_choose(fkv_draft_offer *offers, uint32_t n_offers, const double *extra, uint32_t most, double token_s) {
    uint32_t order[FKV_MAX_DRAFTED];
    uint32_t n = 0;
    uint32_t n_best = 0;
    double gain = 0.0;
    double best = 0.0;
    FKV_ASSERT(most <= FKV_MAX_DRAFTED);
    for (uint32_t i = 0; i < n_offers; i++) {
        offers[i].n_tried = 0;
        offers[i].next = offers[i].n_found > 0 ? offers[i].right : 0.0;
    }
    while (n < most) {
        uint32_t at = 0;
        for (uint32_t i = 1; i < n_offers; i++)
            if (offers[i].next > offers[at].next) at = i;
        fkv_draft_offer *o = &offers[at];
        if (n_offers == 0 || o->next <= 0.0) break;
        gain += o->next * token_s;
        o->n_tried++;
        o->next = o->n_tried < o->n_found ? o->next * o->right : 0.0;
        order[n++] = at;
        if (gain - MARGIN * extra[n] <= best) continue;
        best = gain - MARGIN * extra[n];
        n_best = n;
    }
    while (n > n_best) offers[order[--n]].n_tried--;
    return n_best;
}

void fkv_draft_note(fkv_draft_record *r, uint32_t n_drafted, uint32_t n_right) {
    for (uint32_t i = 0; i < n_right; i++) r->right += STEP * (1.0 - r->right);
    if (n_right < n_drafted) r->right -= STEP * r->right;
}
