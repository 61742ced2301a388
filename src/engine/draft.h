/* Drafts by looking back: what followed the last tokens when they stood in the text before (prompt lookup). The model checks a
 * draft in one step; what it would have written itself stays, the rest is taken back. So drafts change the time, never the text.
 */
#ifndef FKV_DRAFT_H
#define FKV_DRAFT_H

#include "../base/base.h"

/* Writes up to `most` tokens that followed the last three (else two) tokens of the text where these stood last; returns how many.
 * tokens: [n_tokens]; draft: [most], not inside them. */
uint32_t fkv_draft_find(const uint32_t *tokens, uint32_t n_tokens, uint32_t most, uint32_t *draft);

/* How good the drafts of an answer are. */
typedef struct fkv_draft_record {
    double right; /* the chance that a drafted token is right, if those before it were; of late */
    bool guessed; /* there is a draft behind the text, tried or not */
} fkv_draft_record;

fkv_draft_record fkv_draft_record_start(void);

/* How many of n drafted tokens are worth trying, if each makes the step `extra` seconds longer, and a token takes token_s without
 * them. */
uint32_t fkv_draft_worth(const fkv_draft_record *record, uint32_t n, double extra, double token_s);

/* Also of a draft that was not tried: whether its first token was the one drawn shows for nothing. */
void fkv_draft_note(fkv_draft_record *record, uint32_t n_drafted, uint32_t n_right);

#endif
