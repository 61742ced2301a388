/* Reads the vocabulary of a model folder from tokenizer.json or tokenizer.model, and special tokens, sampling defaults and the
 * chat template from the accompanying files. A folder without these files may have a vocabulary with one token per byte value. */
#ifndef FKV_VOCAB_FOLDER_H
#define FKV_VOCAB_FOLDER_H

#include "vocab_target.h"

/* Fills in target.vocab from tokenizer.json or else tokenizer.model, then from tokenizer_config.json, generation_config.json,
 * chat_template.jinja and chat_template.json. Returns FKV_UNSUPPORTED if the folder has neither tokenizer file and the vocabulary
 * size is not 256. */
fkv_status fkv_vocab_folder_read(fkv_vocab_target target, const char *folder);

#endif
