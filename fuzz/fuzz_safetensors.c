/* config.json and the safetensors reader against hostile bytes. The input: a byte of flags, the length of the config and that of
 * the file's header (16 bits each), the config, the rest of the file from its header on. Lengths are cut to what is there. With
 * OWN_LENGTH the header's length in the file is not made from the input's but read from the rest.
 */
#include "../src/model/files/hf_config.h"
#include "../src/model/files/quantization.h"
#include "../src/model/files/safetensors.h"
#include "weights_walk.h"

enum { OWN_LENGTH = 1, PREFIX_BYTES = 5, LENGTH_BYTES = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A block of exactly n bytes, for the sanitizer. */
static uint8_t *copy_of(const uint8_t *data, size_t n) {
    uint8_t *bytes = malloc(n == 0 ? 1 : n);
    must(bytes != NULL, "memory");
    if (n > 0) memcpy(bytes, data, n);
    return bytes;
}

static uint8_t *file_of(const uint8_t *rest, size_t n, uint64_t header_bytes, size_t *size) {
    *size = n + LENGTH_BYTES;
    uint8_t *bytes = malloc(*size);
    must(bytes != NULL, "memory");
    memcpy(bytes, &header_bytes, LENGTH_BYTES);
    if (n > 0) memcpy(bytes + LENGTH_BYTES, rest, n);
    return bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint16_t lengths[2];
    if (size < PREFIX_BYTES) return 0;
    memcpy(lengths, data + 1, sizeof lengths);
    const uint8_t *config = data + PREFIX_BYTES;
    const size_t config_bytes = fkv_min_u32(lengths[0], (uint32_t)(size - PREFIX_BYTES));
    const uint8_t *rest = config + config_bytes;
    const size_t rest_bytes = size - PREFIX_BYTES - config_bytes;
    size_t file_bytes = rest_bytes;
    uint8_t *json = copy_of(config, config_bytes);
    uint8_t *file = data[0] & OWN_LENGTH ? copy_of(rest, rest_bytes) : file_of(rest, rest_bytes, lengths[1], &file_bytes);
    fkv_weights *weights = fkv_weights_new();
    must(weights != NULL, "memory");

    fkv_status status = fkv_hf_config_read(weights, (const char *)json, config_bytes, "config.json");
    must(walk_listed(status), "an answer to the config that is not listed");
    free(json);
    status = fkv_safetensors_read(weights, file, file_bytes, "fuzzed.safetensors"); /* also after a config that was refused */
    if (status == FKV_OK) status = fkv_weights_finish(weights, "fuzzed.safetensors");
    if (status == FKV_OK) status = fkv_quantization_join(weights, "fuzzed.safetensors");
    must(walk_listed(status), "an answer that is not listed");
    if (status == FKV_OK) walk_weights(weights, file, file_bytes);
    fkv_weights_close(weights);
    free(file);
    return 0;
}
