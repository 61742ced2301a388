/* See page_cipher.h. */
#include "page_cipher.h"

#include "checksum.h"

#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

enum { HMAC_BLOCK = 64 };

fkv_status fkv_keyed_hash(const uint8_t key[FKV_CIPHER_KEY_BYTES], const void *bytes, size_t n,
                          uint8_t hash[FKV_CIPHER_KEY_BYTES]) {
    uint8_t pad[HMAC_BLOCK];
    fkv_sha256 sha;
    for (int i = 0; i < HMAC_BLOCK; i++) pad[i] = (uint8_t)((i < FKV_CIPHER_KEY_BYTES ? key[i] : 0) ^ 0x36);
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, pad, sizeof pad);
    fkv_sha256_add(&sha, bytes, n);
    FKV_TRY(fkv_sha256_close(&sha, hash));
    for (int i = 0; i < HMAC_BLOCK; i++) pad[i] ^= 0x36 ^ 0x5c;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, pad, sizeof pad);
    fkv_sha256_add(&sha, hash, FKV_CIPHER_KEY_BYTES);
    return fkv_sha256_close(&sha, hash);
}

static fkv_status cipher_failed(void) { return fkv_fail(FKV_UNSUPPORTED, "libcrypto cannot compute AES-256-GCM"); }

/* Returns the decryption kernel to use instead of libcrypto, or NULL. libcrypto 3.1 and later use VAES themselves, so the kernel
 * is used only with version 3.0. */
static const fkv_gcm_functions *decryption_kernel(void) {
    return OPENSSL_version_major() == 3 && OPENSSL_version_minor() == 0 ? fkv_gcm_vaes_functions() : NULL;
}

fkv_status fkv_cipher_open(fkv_cipher *cipher, const uint8_t key[FKV_CIPHER_KEY_BYTES], bool encrypts) {
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    *cipher = (fkv_cipher){.context = context, .encrypts = encrypts, .kernel = encrypts ? NULL : decryption_kernel()};
    FKV_REQUIRE(context != NULL, FKV_NO_MEMORY, "out of memory allocating a cipher state");
    if (cipher->kernel != NULL) cipher->kernel->open(&cipher->state, key);
    if (EVP_CipherInit_ex(context, EVP_aes_256_gcm(), NULL, key, NULL, encrypts) == 1) return FKV_OK;
    fkv_cipher_close(cipher);
    return cipher_failed();
}

void fkv_cipher_close(fkv_cipher *cipher) {
    EVP_CIPHER_CTX_free(cipher->context);
    cipher->context = NULL;
    OPENSSL_cleanse(&cipher->state, sizeof cipher->state);
}

fkv_status fkv_cipher_nonce(uint8_t nonce[FKV_CIPHER_NONCE_BYTES]) {
    return RAND_bytes(nonce, FKV_CIPHER_NONCE_BYTES) == 1 ? FKV_OK
                                                          : fkv_fail(FKV_UNSUPPORTED, "libcrypto cannot generate random bytes");
}

fkv_status fkv_cipher_begin(fkv_cipher *cipher, const uint8_t nonce[FKV_CIPHER_NONCE_BYTES], const void *bound, size_t n_bound) {
    int n = 0;
    if (cipher->kernel != NULL) {
        cipher->kernel->begin(&cipher->state, nonce, bound, n_bound);
        return FKV_OK;
    }
    const bool good = EVP_CipherInit_ex(cipher->context, NULL, NULL, NULL, nonce, -1) == 1 &&
                      EVP_CipherUpdate(cipher->context, NULL, &n, bound, (int)n_bound) == 1;
    return good ? FKV_OK : cipher_failed();
}

fkv_status fkv_cipher_add(fkv_cipher *cipher, const uint8_t *in, uint8_t *out, size_t n) {
    int n_out = 0;
    FKV_ASSERT(n <= INT_MAX);
    if (cipher->kernel != NULL) {
        cipher->kernel->decrypt(&cipher->state, in, out, n);
        return FKV_OK;
    }
    return EVP_CipherUpdate(cipher->context, out, &n_out, in, (int)n) == 1 && n_out == (int)n ? FKV_OK : cipher_failed();
}

fkv_status fkv_cipher_end(fkv_cipher *cipher, uint8_t tag[FKV_CIPHER_TAG_BYTES]) {
    uint8_t none[FKV_CIPHER_TAG_BYTES];
    int n = 0;
    bool good = false;
    if (cipher->kernel != NULL) {
        cipher->kernel->end(&cipher->state, none);
        good = CRYPTO_memcmp(none, tag, FKV_CIPHER_TAG_BYTES) == 0;
    } else {
        if (!cipher->encrypts && EVP_CIPHER_CTX_ctrl(cipher->context, EVP_CTRL_GCM_SET_TAG, FKV_CIPHER_TAG_BYTES, tag) != 1)
            return cipher_failed();
        good = EVP_CipherFinal_ex(cipher->context, none, &n) == 1;
    }
    if (!cipher->encrypts)
        return good ? FKV_OK : fkv_fail(FKV_FILE_DAMAGED, "an encrypted page has an invalid authentication tag");
    return good && EVP_CIPHER_CTX_ctrl(cipher->context, EVP_CTRL_GCM_GET_TAG, FKV_CIPHER_TAG_BYTES, tag) == 1 ? FKV_OK
                                                                                                              : cipher_failed();
}
