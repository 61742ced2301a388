/* The GGUF reader against hostile bytes: the input is the file. It lies in a block exactly as long as it is, so that the
 * sanitizer sees every byte read beyond it. Whatever the bytes are: no crash, no answer but those listed, and what is let through
 * can be read to the last number.
 */
#include "../src/model/files/gguf.h"
#include "weights_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *bytes = malloc(size == 0 ? 1 : size);
    fkv_weights *weights = fkv_weights_new();
    must(bytes != NULL && weights != NULL, "memory");
    if (size > 0) memcpy(bytes, data, size);
    const fkv_status status = fkv_gguf_read(weights, bytes, size, "fuzzed.gguf");
    must(walk_listed(status), "an answer that is not listed");
    if (status == FKV_OK) walk_weights(weights, bytes, size);
    fkv_weights_close(weights);
    free(bytes);
    return 0;
}
