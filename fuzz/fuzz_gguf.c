/* Fuzzes the GGUF reader. The input is one file or two parts of a split model; the second part begins at the last "GGUF" whose
 * offset is a multiple of 8. The memory block is exactly as long as the input, so that the sanitizer detects reads past its end.
 * The reader must not crash, must return one of the listed statuses, and must accept only weights that can be read completely. */
#include "../src/model/files/gguf.h"
#include "weights_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Returns the offset of the second part, or `size` if there is no second part. */
static size_t second_at(const uint8_t *data, size_t size) {
    for (size_t at = size / 8 * 8; at >= 8; at -= 8)
        if (size - at >= 4 && memcmp(data + at, "GGUF", 4) == 0) return at;
    return size;
}

static fkv_status read_parts(fkv_weights *weights, const uint8_t *bytes, size_t size) {
    fkv_gguf_part part = {0};
    const size_t second = second_at(bytes, size);
    FKV_TRY(fkv_gguf_read_part(weights, bytes, second, "fuzzed-00001-of-00002.gguf", 0, &part));
    if (part.n_parts > 1 && second < size)
        FKV_TRY(fkv_gguf_read_part(weights, bytes + second, size - second, "fuzzed-00002-of-00002.gguf", 1, &part));
    return fkv_weights_finish(weights, "fuzzed.gguf");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *bytes = malloc(size == 0 ? 1 : size);
    fkv_weights *weights = fkv_weights_new();
    must(bytes != NULL && weights != NULL, "malloc");
    if (size > 0) memcpy(bytes, data, size);
    const fkv_status status = read_parts(weights, bytes, size);
    must(walk_listed(status), "unlisted status");
    if (status == FKV_OK) walk_weights(weights, bytes, size);
    fkv_weights_close(weights);
    free(bytes);
    return 0;
}
