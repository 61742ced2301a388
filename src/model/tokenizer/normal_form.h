/* Unicode's normal forms of a text (utf8proc's tables). Time n log n, whatever the text.
 */
#ifndef FKV_NORMAL_FORM_H
#define FKV_NORMAL_FORM_H

#include "../files/text_steps.h"
#include "token_merge.h"

/* The text is whole (fkv_utf8_is_whole); surrogates stay as they are. out: where the result is put if it is another one; else
 * *normal is the text itself. form: FKV_STEP_NFC to FKV_STEP_NFKD. */
fkv_status fkv_normal_form(fkv_text_step_kind form, const char *text, size_t n_bytes, fkv_scratch *out, fkv_bytes *normal);

#endif
