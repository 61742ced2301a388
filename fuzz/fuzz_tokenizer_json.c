/* Fuzzes tokenizer files. The input is a tokenizer.json or, if the first byte is 1, a tokenizer.model. Reading must return a
 * listed status, and an accepted tokenizer must tokenize a fixed text with many kinds of characters into tokens of its
 * vocabulary.
 */
#include "../src/model/files/weights_state.h"
#include "../src/text/tokenizer/tokenizer.h"
#include "../src/text/vocab/sentencepiece.h"
#include "../src/text/vocab/tokenizer_json.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "%s: %s\n", what, fkv_message());
    abort();
}

static bool is_rejection(fkv_status status) {
    return status == FKV_FILE_FORMAT || status == FKV_FILE_DAMAGED || status == FKV_UNSUPPORTED || status == FKV_NO_MEMORY;
}

static void tokenize(const fkv_tokenizer *tokenizer, uint32_t n_tokens) {
    static const char text[] =
        "Alice don't  12345 caf\u00e9 cafe\u0301 \u4e16\u754c\n\n <s>a</s>\xff\xed\xa0\x80 ab abab word\t\u2581x ";
    static const unsigned flags[] = {FKV_TOKENIZE_PLAIN, FKV_TOKENIZE_BOS | FKV_TOKENIZE_SPECIAL};
    uint32_t tokens[2048];
    for (size_t i = 0; i < 2; i++) {
        size_t n = 0;
        const fkv_status status = fkv_tokenizer_encode(tokenizer, text, NULL, sizeof text - 1, flags[i], tokens, 2048, &n);
        must(status == FKV_OK || is_rejection(status), "unlisted status");
        for (size_t t = 0; t < n && t < 2048 && status == FKV_OK; t++) {
            size_t n_bytes = 0;
            must(tokens[t] < n_tokens, "token outside the vocabulary");
            (void)fkv_tokenizer_text(tokenizer, tokens[t], true, &n_bytes);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fkv_weights *weights = fkv_weights_new();
    if (weights == NULL) return 0;
    const bool is_model = size > 0 && data[0] == 1;
    fkv_tokenizer *tokenizer = NULL;
    fkv_status status =
        is_model ? fkv_sentencepiece_read(fkv_weights_vocab_target(weights), data + 1, size - 1, "fuzz/tokenizer.model")
                 : fkv_tokenizer_json_read(fkv_weights_vocab_target(weights), (const char *)data, size, "fuzz/tokenizer.json");
    must(status == FKV_OK || is_rejection(status), "unlisted status");
    must(status == FKV_OK || status == FKV_NO_MEMORY || strstr(fkv_message(), "fuzz/tokenizer.") != NULL,
         "error message without the file name");
    if (status == FKV_OK) {
        status = fkv_tokenizer_open(fkv_weights_vocab(weights), &tokenizer);
        must(status == FKV_OK || is_rejection(status), "unlisted status");
    }
    if (status == FKV_OK) tokenize(tokenizer, fkv_weights_vocab(weights)->n_tokens);
    fkv_tokenizer_close(tokenizer);
    fkv_weights_close(weights);
    return 0;
}
