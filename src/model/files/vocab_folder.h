/* The vocabulary of a folder: tokenizer.json, or tokenizer.model, or 256 bytes; and what stands beside it: which tokens begin and
 * end a text, and the chat template.
 */
#ifndef FKV_VOCAB_FOLDER_H
#define FKV_VOCAB_FOLDER_H

#include "weights_state.h"

/* Fills weights->vocab. Reads of the folder: tokenizer.json or else tokenizer.model, tokenizer_config.json, chat_template.jinja,
 * generation_config.json. FKV_UNSUPPORTED where there is neither and the model has more tokens than bytes. */
fkv_status fkv_vocab_folder_read(fkv_weights *weights, const char *folder);

#endif
