/* Drafts by looking back: what followed the last tokens when they stood in the text before (prompt lookup). The model checks a
 * draft in one step; what it would have written itself stays, the rest is taken back. So drafts change the time, never the text.
 */
#ifndef FKV_DRAFT_H
#define FKV_DRAFT_H

#include "../base/base.h"

/* Writes up to `most` tokens that followed the last three (else two) tokens of the text where these stood last; returns how many.
 * tokens: [n_tokens]; draft: [most], not inside them. */
uint32_t fkv_draft_find(const uint32_t *tokens, uint32_t n_tokens, uint32_t most, uint32_t *draft);

/* The share of drafted tokens that were right, of late. */
typedef struct fkv_draft_record {
    double right;
} fkv_draft_record;

fkv_draft_record fkv_draft_record_start(void);

/* Whether n drafted tokens are worth `extra` seconds more in a step, if a token takes token_s without them. A record that says no
 * becomes a little better by it, so that it is tried again. */
bool fkv_draft_pays(fkv_draft_record *record, uint32_t n, double extra, double token_s);
void fkv_draft_note(fkv_draft_record *record, uint32_t n_drafted, uint32_t n_right);

#endif
