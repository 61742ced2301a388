/* The steps that the name of a GGUF pre-tokenizer (tokenizer.ggml.pre) stands for.
 */
#ifndef FKV_PRE_NAMES_H
#define FKV_PRE_NAMES_H

#include "../files/text_steps.h"

#include "../../base/base.h"

/* FKV_UNSUPPORTED for a name that is not known. An empty one is "default". */
fkv_status fkv_pre_steps(fkv_bytes name, fkv_text_steps *steps, bool *whole_words);

/* A pattern that takes linear time on any text: it is one of those behind the names. */
bool fkv_pre_pattern_is_known(fkv_bytes pattern);

/* What ByteLevel of tokenizer.json cuts with. */
extern const char FKV_GPT2_PATTERN[];

#endif
