/* tokenizer.json of Hugging Face's `tokenizers`: the vocabulary, merges, added tokens, normalizer, pre-tokenizer and what begins
 * a text. Models of type BPE; every part that is not understood is refused by name.
 */
#ifndef FKV_TOKENIZER_JSON_H
#define FKV_TOKENIZER_JSON_H

#include "weights_state.h"

#include <jansson.h>

/* Fills weights->vocab. Tokens from n_vocab of the hyperparameters on are left out (0: none). The bytes must stay as long as the
 * weights. FKV_FILE_FORMAT, FKV_FILE_DAMAGED or FKV_UNSUPPORTED, with the field, the reason and the path. */
fkv_status fkv_tokenizer_json_read(fkv_weights *weights, const char *text, size_t size, const char *path);

/* The steps of normalizer and pre_tokenizer (NULL: none), for tokenizer_json.c. *over_bytes: the vocabulary is one of bytes.
 * Strings are copied and live as long as the weights. */
fkv_status fkv_text_steps_read(fkv_weights *weights, const json_t *normalizer, const json_t *pre_tokenizer, const char *path,
                               fkv_text_steps *steps, bool *over_bytes);

/* A copy that lives as long as the weights. */
fkv_status fkv_keep_bytes(fkv_weights *weights, const char *data, size_t size, fkv_bytes *kept);

#endif
