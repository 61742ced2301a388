/* libFuzzer target: the bytes are a vocabulary and a text (tests/tokenizer_model.c). Whatever they are, tokenizing ends with
 * tokens of the vocabulary, and where the slow model applies, with the same ones.
 */
#include "../tests/tokenizer_model.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    tokenizer_world world;
    bool refused = false;
    tokenizer_world_read(&world, data, size);
    const char *fault = tokenizer_world_check(&world, &refused);
    if (fault == NULL) return 0;
    fprintf(stderr, "wrong: %s\n", fault);
    abort();
}
