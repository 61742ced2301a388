/* Fuzzes tokenizers. The input is a vocabulary and a text (tests/tokenizer_model.c). Tokenizing must return tokens of the
 * vocabulary, and, for texts that the reference tokenizer supports, the same tokens as the reference. */
#include "../tests/tokenizer_model.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    tokenizer_fixture fixture;
    bool refused = false;
    tokenizer_fixture_read(&fixture, data, size);
    const char *fault = tokenizer_fixture_check(&fixture, &refused);
    if (fault == NULL) return 0;
    fprintf(stderr, "mismatch: %s\n", fault);
    abort();
}
