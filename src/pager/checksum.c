/* CRC32C and SHA-256 by the libraries that have the instructions for them. The only file that sees their headers. */
#include "checksum.h"

#include <isa-l/crc.h>
#include <limits.h>
#include <openssl/evp.h>

uint32_t fkv_crc32c(uint32_t crc, const void *bytes, size_t n) {
    FKV_ASSERT(n <= INT_MAX);
    /* crc32_iscsi leaves both inversions of the standard to its caller, and takes a pointer it does not write through */
    return ~crc32_iscsi((unsigned char *)(uintptr_t)bytes, (int)n, ~crc);
}

void fkv_sha256_open(fkv_sha256 *sha) {
    sha->context = EVP_MD_CTX_new();
    sha->sound = sha->context != NULL && EVP_DigestInit_ex(sha->context, EVP_sha256(), NULL) == 1;
}

void fkv_sha256_add(fkv_sha256 *sha, const void *bytes, size_t n) {
    sha->sound = sha->sound && EVP_DigestUpdate(sha->context, bytes, n) == 1;
}

fkv_status fkv_sha256_close(fkv_sha256 *sha, uint8_t digest[FKV_SHA256_BYTES]) {
    unsigned int n = 0;
    const bool sound = sha->sound && EVP_DigestFinal_ex(sha->context, digest, &n) == 1 && n == FKV_SHA256_BYTES;
    EVP_MD_CTX_free(sha->context);
    *sha = (fkv_sha256){0};
    FKV_REQUIRE(sound, FKV_NO_MEMORY, "libcrypto could not compute a SHA-256: it is out of memory or has no such digest");
    return FKV_OK;
}
