/* See hub_digest.h. */
#include "hub_digest.h"

#include "../kit/program.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

struct hub_digest {
    EVP_MD_CTX *context;
};

static void require(bool good) {
    if (!good)
        kit_die(EXIT_FAILED, "libcrypto cannot compute SHA-256 and SHA-1; install a libcrypto that provides these digests");
}

hub_digest *hub_digest_open(const hub_file *file) {
    hub_digest *digest = kit_alloc(sizeof *digest);
    digest->context = EVP_MD_CTX_new();
    require(digest->context != NULL);
    require(EVP_DigestInit_ex(digest->context, file->is_large ? EVP_sha256() : EVP_sha1(), NULL) == 1);
    char head[32];
    int n = snprintf(head, sizeof head, "blob %" PRIu64, file->bytes);
    if (!file->is_large) hub_digest_add(digest, head, (size_t)n + 1); /* including the 0 */
    return digest;
}

void hub_digest_add(hub_digest *digest, const void *bytes, size_t n) {
    require(EVP_DigestUpdate(digest->context, bytes, n) == 1);
}

void hub_digest_close(hub_digest *digest, char text[HUB_DIGEST]) {
    unsigned char bytes[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    require(EVP_DigestFinal_ex(digest->context, bytes, &n) == 1 && 2 * n < HUB_DIGEST);
    for (unsigned i = 0; i < n; i++) (void)snprintf(text + (size_t)2 * i, 3, "%02x", bytes[i]);
    EVP_MD_CTX_free(digest->context);
    free(digest);
}
