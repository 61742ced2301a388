/* The two checksums of page files: CRC32C over pages (isa-l), SHA-256 over what describes them (libcrypto). Neither is a proof of
 * who wrote a file: whoever can change it can recompute both, so readers check every number besides.
 */
#ifndef FKV_CHECKSUM_H
#define FKV_CHECKSUM_H

#include "base.h"

enum { FKV_SHA256_BYTES = 32, FKV_SHA256_STATE_BYTES = 112 };

/* CRC32C (Castagnoli) of the bytes so far and n more; 0 before the first. fkv_crc32c(0, "123456789", 9) = 0xe3069283.
 * n < 2^31. */
uint32_t fkv_crc32c(uint32_t crc, const void *bytes, size_t n);

/* A digest under way, all of it in here: no memory is taken. What libcrypto refuses shows in fkv_sha256_close() alone. */
typedef struct fkv_sha256 {
    alignas(8) uint8_t state[FKV_SHA256_STATE_BYTES]; /* libcrypto's */
    bool sound;
} fkv_sha256;

void fkv_sha256_open(fkv_sha256 *sha);
void fkv_sha256_add(fkv_sha256 *sha, const void *bytes, size_t n);

/* Ends the digest. FKV_UNSUPPORTED if libcrypto refused on the way. */
fkv_status fkv_sha256_close(fkv_sha256 *sha, uint8_t digest[FKV_SHA256_BYTES]);

#endif
