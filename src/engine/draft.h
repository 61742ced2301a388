/* N-gram speculative decoding (prompt lookup): drafts the tokens that followed the previous occurrence of the last n-gram.
 *
 * The model verifies a draft in one step. A draft token is accepted if the model samples the same token; rejected tokens are
 * removed from the cache. Drafts therefore affect only the speed, never the output.
 */
#ifndef FKV_DRAFT_H
#define FKV_DRAFT_H

#include "../base/base.h"

/* Searches backward for an earlier occurrence of the last three tokens, or else of the last two, and copies up to max_tokens
 * tokens that followed it. Returns the number of tokens copied. tokens: [n_tokens]; draft: [max_tokens], must not overlap tokens.
 */
uint32_t fkv_draft_find(const uint32_t *tokens, uint32_t n_tokens, uint32_t max_tokens, uint32_t *draft);

/* Draft acceptance statistics of one answer. */
typedef struct fkv_draft_record {
    double acceptance; /* estimated probability that a draft token is accepted if all draft tokens before it were accepted */
    bool has_draft;    /* true if a draft is stored after the tokens of the answer, whether or not the current step verifies it */
} fkv_draft_record;

fkv_draft_record fkv_draft_record_init(void);

enum { FKV_MAX_STEP_DRAFTS = 16 }; /* maximum number of draft tokens in one step, summed over all requests */

/* Input and output of fkv_draft_choose() for the draft of one answer. */
typedef struct fkv_draft_candidate {
    double acceptance;       /* fkv_draft_record.acceptance of the answer */
    uint32_t n_proposed;     /* number of tokens in the draft */
    uint32_t n_chosen;       /* number of leading draft tokens to verify in this step */
    double next_probability; /* acceptance probability of the first draft token that has not been chosen yet */
} fkv_draft_candidate;

/* Chooses the draft tokens to verify in a step, starting with the most likely ones. Maximizes the expected time saved minus the
 * extra step time. extra_s: [max_tokens + 1], extra_s[n] is the extra step time for n draft rows, in seconds. token_s: time per
 * token without drafts, in seconds. max_tokens is at most FKV_MAX_STEP_DRAFTS. Returns the number of tokens chosen. */
uint32_t fkv_draft_choose(fkv_draft_candidate *candidates, uint32_t n_candidates, const double *extra_s, uint32_t max_tokens,
                          double token_s);

/* Updates the estimated acceptance rate. Also called for a draft that was not verified, because its first token can be compared
 * with the sampled token at no cost. */
void fkv_draft_update(fkv_draft_record *record, uint32_t n_drafted, uint32_t n_accepted);

#endif
