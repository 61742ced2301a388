/* CRC32C (implemented by isa-l) and SHA-256 (implemented by libcrypto). Both libraries use the CPU's CRC and SHA instructions. No
 * other file includes the headers of these libraries.
 *
 * This file uses libcrypto's low-level SHA-256 functions, whose state is in memory provided by the caller. OpenSSL 3.0 and later
 * recommend the EVP interface instead, which allocates about 200 KiB at first use and a context for each digest. The memory plan
 * does not include such allocations.
 */
#include "checksum.h"

#define OPENSSL_API_COMPAT 10101 /* selects the API of OpenSSL 1.1.1, so that functions deprecated later cause no warnings */

#include <isa-l/crc.h>
#include <limits.h>
#include <openssl/sha.h>

_Static_assert(sizeof(SHA256_CTX) <= sizeof((fkv_sha256 *)0)->state && alignof(SHA256_CTX) <= alignof(fkv_sha256),
               "fkv_sha256.state holds a SHA256_CTX");

static SHA256_CTX *sha_context(fkv_sha256 *sha) { return (SHA256_CTX *)(void *)sha->state; }

uint32_t fkv_crc32c(uint32_t crc, const void *bytes, size_t n) {
    FKV_ASSERT(n <= INT_MAX);
    /* crc32_iscsi() expects its caller to invert the CRC before and after the call. It does not modify the bytes, although its
     * pointer parameter is not const. */
    return ~crc32_iscsi((unsigned char *)(uintptr_t)bytes, (int)n, ~crc);
}

void fkv_sha256_open(fkv_sha256 *sha) { sha->ok = SHA256_Init(sha_context(sha)) == 1; }

void fkv_sha256_add(fkv_sha256 *sha, const void *bytes, size_t n) {
    sha->ok = sha->ok && SHA256_Update(sha_context(sha), bytes, n) == 1;
}

fkv_status fkv_sha256_close(fkv_sha256 *sha, uint8_t digest[FKV_SHA256_BYTES]) {
    const bool ok = sha->ok && SHA256_Final(digest, sha_context(sha)) == 1;
    *sha = (fkv_sha256){0};
    FKV_REQUIRE(ok, FKV_UNSUPPORTED, "libcrypto cannot compute SHA-256; install a libcrypto that provides this digest");
    return FKV_OK;
}
