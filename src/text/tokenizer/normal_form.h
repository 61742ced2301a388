/* Unicode normalization with the tables of utf8proc, in O(n log n) time for any text. */
#ifndef FKV_NORMAL_FORM_H
#define FKV_NORMAL_FORM_H

#include "../vocab/text_steps.h"
#include "token_merge.h"

/* Normalizes valid UTF-8 (fkv_utf8_is_valid()); surrogates are kept. form: FKV_STEP_NFC to FKV_STEP_NFKD. *normal refers to the
 * text itself if the text is already normalized, otherwise to the contents of `out`. */
fkv_status fkv_normal_form(fkv_text_step_kind form, const char *text, size_t n_bytes, fkv_scratch *out, fkv_bytes *normal);

#endif
