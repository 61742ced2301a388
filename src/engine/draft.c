/* See draft.h. */
#include "draft.h"

enum { LONGEST = 3, SHORTEST = 2, LOOK_BACK = 8192 };

static const double START = 0.5;
static const double STEP = 0.1;   /* of a record towards what was seen */
static const double MARGIN = 1.1; /* a row more may take longer than rows do on average */

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

uint32_t fkv_draft_worth(const fkv_draft_record *r, uint32_t n, double extra, double token_s) {
    uint32_t worth = 0;
    for (double all_right = r->right; worth < n && all_right * token_s > MARGIN * extra; all_right *= r->right) worth++;
    return worth;
}

void fkv_draft_note(fkv_draft_record *r, uint32_t n_drafted, uint32_t n_right) {
    for (uint32_t i = 0; i < n_right; i++) r->right += STEP * (1.0 - r->right);
    if (n_right < n_drafted) r->right -= STEP * r->right;
}
