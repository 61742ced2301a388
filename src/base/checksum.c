/* CRC32C and SHA-256 by the libraries that have the instructions for them. The only file that sees their headers.
 *
 * SHA-256 is libcrypto's low-level one, whose state is the caller's and which takes no memory. EVP, recommended in its place
 * since OpenSSL 3.0, allocates: some 200 KiB at its first use and a context at each, after the plan has been taken.
 */
#include "checksum.h"

#define OPENSSL_API_COMPAT 10101 /* the interface of 1.1.1: no warnings about functions deprecated since */

#include <isa-l/crc.h>
#include <limits.h>
#include <openssl/sha.h>

_Static_assert(sizeof(SHA256_CTX) <= sizeof((fkv_sha256 *)0)->state && alignof(SHA256_CTX) <= alignof(fkv_sha256),
               "the state of a digest fits its place");

static SHA256_CTX *context_of(fkv_sha256 *sha) { return (SHA256_CTX *)(void *)sha->state; }

uint32_t fkv_crc32c(uint32_t crc, const void *bytes, size_t n) {
    FKV_ASSERT(n <= INT_MAX);
    /* crc32_iscsi leaves both inversions of the standard to its caller, and takes a pointer it does not write through */
    return ~crc32_iscsi((unsigned char *)(uintptr_t)bytes, (int)n, ~crc);
}

void fkv_sha256_open(fkv_sha256 *sha) { sha->sound = SHA256_Init(context_of(sha)) == 1; }

void fkv_sha256_add(fkv_sha256 *sha, const void *bytes, size_t n) {
    sha->sound = sha->sound && SHA256_Update(context_of(sha), bytes, n) == 1;
}

fkv_status fkv_sha256_close(fkv_sha256 *sha, uint8_t digest[FKV_SHA256_BYTES]) {
    const bool sound = sha->sound && SHA256_Final(digest, context_of(sha)) == 1;
    *sha = (fkv_sha256){0};
    FKV_REQUIRE(sound, FKV_UNSUPPORTED, "libcrypto refused to compute a SHA-256; use a libcrypto that has this digest");
    return FKV_OK;
}
