/* Regular expressions as tokenizer.json has them (Oniguruma, Unicode) rewritten for PCRE2, so that both match the same.
 */
#ifndef FKV_ONIG_PATTERN_H
#define FKV_ONIG_PATTERN_H

#include "../../base/base.h"
#include "../files/text_steps.h"

enum { FKV_MAX_PATTERN_BYTES = 1 << 14 };

/* The options to compile the result with, beside its own: \s, ^ and $ mean what they do there. out: [capacity], 0-terminated.
 * FKV_UNSUPPORTED with the reason for what the two read differently and is not rewritten, and for what is too long. */
fkv_status fkv_onig_pattern(fkv_bytes pattern, char *out, size_t capacity);

#endif
