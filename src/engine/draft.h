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

enum { FKV_MAX_DRAFTED = 16 }; /* tokens, of a step */

/* What one answer could try. */
typedef struct fkv_draft_offer {
    double right; /* of its record */
    uint32_t n_found;
    uint32_t n_tried; /* what is chosen of them */
    double next;      /* the chance of the one that would be tried next */
} fkv_draft_offer;

/* Chooses what all answers of a step try together, the likeliest tokens first: as many as bring most beyond the time they take.
 * extra: [most + 1], seconds that so many rows more make the step longer; token_s: what a token takes without drafts. Returns how
 * many were chosen. most: FKV_MAX_DRAFTED at most. */
uint32_t fkv_draft_choose(fkv_draft_offer *offers, uint32_t n_offers, const double *extra, uint32_t most, double token_s);

/* Also of a draft that was not tried: whether its first token was the one drawn shows for nothing. */
void fkv_draft_note(fkv_draft_record *record, uint32_t n_drafted, uint32_t n_right);

#endif
