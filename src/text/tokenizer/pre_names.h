/* Pre-tokenizer steps for GGUF files, which contain only the name of the pre-tokenizer (tokenizer.ggml.pre). */
#ifndef FKV_PRE_NAMES_H
#define FKV_PRE_NAMES_H

#include "../vocab/text_steps.h"

#include "../../base/base.h"

/* Writes the steps of the pre-tokenizer with this name. Returns FKV_UNSUPPORTED if the name is unknown. An empty name means
 * "default". */
fkv_status fkv_pre_steps(fkv_bytes name, fkv_text_steps *steps, bool *whole_words);

/* Returns whether the pattern belongs to a known pre-tokenizer. Matching a known pattern takes linear time on any text. */
bool fkv_pre_pattern_is_known(fkv_bytes pattern);

/* Split pattern of GPT-2, which the ByteLevel pre-tokenizer of tokenizer.json also uses. */
extern const char FKV_GPT2_PATTERN[];

#endif
