/* Pre-tokenizer steps of GGUF files, which store only a name (tokenizer.ggml.pre). */
#ifndef FKV_PRE_NAMES_H
#define FKV_PRE_NAMES_H

#include "../vocab/text_steps.h"

#include "../../base/base.h"

/* Returns the steps of a pre-tokenizer name, or FKV_UNSUPPORTED for an unknown name. An empty name means "default". */
fkv_status fkv_pre_steps(fkv_bytes name, fkv_text_steps *steps, bool *whole_words);

/* Returns whether this is the pattern of a known pre-tokenizer. Known patterns take linear time on any text. */
bool fkv_pre_pattern_is_known(fkv_bytes pattern);

/* Split pattern of GPT-2, which the ByteLevel pre-tokenizer of tokenizer.json also uses. */
extern const char FKV_GPT2_PATTERN[];

#endif
