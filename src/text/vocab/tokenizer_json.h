/* Reads tokenizer.json, the file format of Hugging Face's `tokenizers` library, which contains the vocabulary, merges, added
 * tokens, normalizer, pre-tokenizer and post-processor. Only models of type BPE are supported; error messages name the
 * unsupported part. */
#ifndef FKV_TOKENIZER_JSON_H
#define FKV_TOKENIZER_JSON_H

#include "vocab_target.h"

#include <jansson.h>

/* Fills in target.vocab. The text must outlive target.arena. Returns FKV_FILE_FORMAT, FKV_FILE_DAMAGED or FKV_UNSUPPORTED; the
 * message contains the field, the reason and the path. */
fkv_status fkv_tokenizer_json_read(fkv_vocab_target target, const char *text, size_t size, const char *path);

/* Reads the steps of normalizer and pre_tokenizer, either of which may be NULL. Sets *over_bytes if the vocabulary is byte-level.
 * Strings are copied to target.arena. */
fkv_status fkv_text_steps_read(fkv_vocab_target target, const json_t *normalizer, const json_t *pre_tokenizer, const char *path,
                               fkv_text_steps *steps, bool *over_bytes);

/* Copies bytes to target.arena. */
fkv_status fkv_keep_bytes(fkv_vocab_target target, const char *data, size_t size, fkv_bytes *kept);

#endif
