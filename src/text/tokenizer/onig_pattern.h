/* Translates regular expressions in tokenizer.json (Oniguruma syntax) to PCRE2 syntax. */
#ifndef FKV_ONIG_PATTERN_H
#define FKV_ONIG_PATTERN_H

#include "../../base/base.h"
#include "../vocab/text_steps.h"

enum { FKV_MAX_PATTERN_BYTES = 1 << 14 };

/* Translates a pattern. The result must be compiled with PCRE2_UTF, PCRE2_UCP and PCRE2_MULTILINE and then matches the same
 * strings as the original pattern in Oniguruma. out: [capacity], 0-terminated. Returns FKV_UNSUPPORTED if PCRE2 would interpret
 * the syntax differently or if the pattern is too long; the message states the reason. */
fkv_status fkv_onig_pattern(fkv_bytes pattern, char *out, size_t capacity);

#endif
