/* tokenizer.model of SentencePiece: a protobuf with pieces, their scores and types. Models of type BPE; unigram ones are refused.
 */
#ifndef FKV_SENTENCEPIECE_H
#define FKV_SENTENCEPIECE_H

#include "weights_state.h"

/* Fills weights->vocab as a GGUF file of the same model would. Tokens from n_vocab of the hyperparameters on are left out (0:
 * none). The bytes must stay as long as the weights. FKV_FILE_FORMAT or FKV_UNSUPPORTED, with the field, the reason and the path.
 */
fkv_status fkv_sentencepiece_read(fkv_weights *weights, const uint8_t *bytes, size_t size, const char *path);

#endif
