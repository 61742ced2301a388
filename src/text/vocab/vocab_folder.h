/* Vocabulary of a model folder: tokenizer.json, tokenizer.model or one token per byte value, and the accompanying files with
 * special tokens, sampling defaults and the chat template.
 */
#ifndef FKV_VOCAB_FOLDER_H
#define FKV_VOCAB_FOLDER_H

#include "vocab_target.h"

/* Fills in target.vocab from tokenizer.json or else tokenizer.model, then from tokenizer_config.json, generation_config.json,
 * chat_template.jinja and chat_template.json. Returns FKV_UNSUPPORTED if the folder has neither tokenizer file and the vocabulary
 * size is not 256. */
fkv_status fkv_vocab_folder_read(fkv_vocab_target target, const char *folder);

#endif
