/* Fuzzes the config.json and safetensors readers. The input consists of a flag byte, two 16-bit lengths, the text of config.json,
 * and the safetensors file. The first length is that of config.json, limited to the available bytes. The second length is written
 * as the 8-byte header length at the start of the safetensors file. If the flag OWN_LENGTH is set, the second length is ignored,
 * and the file in the input contains its own header length.
 */
#include "../src/model/files/hf_config.h"
#include "../src/model/files/quantization.h"
#include "../src/model/files/safetensors.h"
#include "weights_walk.h"

enum { OWN_LENGTH = 1, PREFIX_BYTES = 5, LENGTH_BYTES = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Copies n bytes into a block of exactly n bytes, so that the sanitizer detects reads past the end of the block. */
static uint8_t *copy_of(const uint8_t *data, size_t n) {
    uint8_t *bytes = malloc(n == 0 ? 1 : n);
    must(bytes != NULL, "malloc");
    if (n > 0) memcpy(bytes, data, n);
    return bytes;
}

static uint8_t *file_of(const uint8_t *rest, size_t n, uint64_t header_bytes, size_t *size) {
    *size = n + LENGTH_BYTES;
    uint8_t *bytes = malloc(*size);
    must(bytes != NULL, "malloc");
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
    must(weights != NULL, "malloc");

    fkv_status status = fkv_hf_config_read(weights, (const char *)json, config_bytes, "config.json");
    must(walk_listed(status), "unlisted status for the config");
    free(json);
    /* the safetensors file is read even if config.json was rejected */
    status = fkv_safetensors_read(weights, file, file_bytes, "fuzzed.safetensors");
    if (status == FKV_OK) status = fkv_weights_finish(weights, "fuzzed.safetensors");
    if (status == FKV_OK) status = fkv_quantization_join(weights, "fuzzed.safetensors");
    must(walk_listed(status), "unlisted status");
    if (status == FKV_OK) walk_weights(weights, file, file_bytes);
    fkv_weights_close(weights);
    free(file);
    return 0;
}
