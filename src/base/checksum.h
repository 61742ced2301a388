/* Checksums of page files: CRC32C for pages (isa-l), SHA-256 for metadata (libcrypto). Neither authenticates a file: anyone who
 * can change a file can recompute both checksums, so readers also validate every field.
 */
#ifndef FKV_CHECKSUM_H
#define FKV_CHECKSUM_H

#include "base.h"

enum { FKV_SHA256_BYTES = 32, FKV_SHA256_STATE_BYTES = 112 };

/* Updates a CRC32C (Castagnoli) with n bytes, n < 2^31. The initial value of crc is 0. fkv_crc32c(0, "123456789", 9) =
 * 0xe3069283. */
uint32_t fkv_crc32c(uint32_t crc, const void *bytes, size_t n);

/* State of a SHA-256 computation, which needs no memory outside of this struct. Errors from libcrypto are reported only by
 * fkv_sha256_close(). */
typedef struct fkv_sha256 {
    alignas(8) uint8_t state[FKV_SHA256_STATE_BYTES]; /* contains libcrypto's SHA256_CTX */
    bool ok;
} fkv_sha256;

FKV_INTERNAL void fkv_sha256_open(fkv_sha256 *sha);
FKV_INTERNAL void fkv_sha256_add(fkv_sha256 *sha, const void *bytes, size_t n);

/* Finishes the digest. Returns FKV_UNSUPPORTED if libcrypto failed. */
FKV_INTERNAL fkv_status fkv_sha256_close(fkv_sha256 *sha, uint8_t digest[FKV_SHA256_BYTES]);

#endif
