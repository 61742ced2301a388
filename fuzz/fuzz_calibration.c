/* Fuzzes the calibration reader. The input is read as a file, once unchanged and once with the length and the digest corrected,
 * so that the fuzzer reaches the values after these two fields. The reader must not crash, must return one of the listed
 * statuses, and must accept only channel bits that a cache accepts. */
#include "../src/base/checksum.h"
#include "../src/codec/channel_order.h"
#include "../src/model/calibration.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HEADER = 128, LENGTH_AT = 24, DIGEST_AT = 96 };

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "%s: %s\n", what, fkv_message());
    abort();
}

static uint8_t *copy_of(const uint8_t *data, size_t size) {
    uint8_t *bytes = malloc(size == 0 ? 1 : size);
    must(bytes != NULL, "malloc");
    if (size > 0) memcpy(bytes, data, size);
    return bytes;
}

static void check_bits(fkv_calibration *c, uint32_t average) {
    const uint8_t *bits = c->both;
    fkv_calibration_choose(c, average);
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (uint32_t h = 0; h < c->layers[l].n_kv_heads; h++, bits += c->layers[l].head_dim)
            must(fkv_channel_bits_check(bits, c->layers[l].head_dim, average, h) == FKV_OK,
                 "the reader accepted channel bits that no cache accepts");
    must(bits == c->file + c->n_bytes, "the channel bits do not end at the end of the file");
}

static void read_bytes(uint8_t *bytes, size_t size, uint32_t average) {
    fkv_calibration c = {0};
    fkv_status status = fkv_calibration_read(bytes, size, "fuzzed.fkc", &c);
    must(status == FKV_OK || status == FKV_FILE_FORMAT || status == FKV_FILE_VERSION || status == FKV_FILE_DAMAGED,
         "unlisted status");
    if (status == FKV_OK) check_bits(&c, average);
    fkv_calibration_close(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t length = size;
    fkv_sha256 sha;
    read_bytes(copy_of(data, size), size, 4);
    if (size < HEADER) return 0;
    uint8_t *mended = copy_of(data, size);
    memcpy(mended + LENGTH_AT, &length, sizeof length);
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, mended, DIGEST_AT);
    fkv_sha256_add(&sha, mended + HEADER, size - HEADER);
    must(fkv_sha256_close(&sha, mended + DIGEST_AT) == FKV_OK, "digest");
    read_bytes(mended, size, data[HEADER - 1] % 2 == 0 ? 4 : 3);
    return 0;
}
