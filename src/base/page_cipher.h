/* Authenticated encryption of stored pages (AES-256-GCM) and keyed hashes (HMAC-SHA-256), implemented with libcrypto. */
#ifndef FKV_PAGE_CIPHER_H
#define FKV_PAGE_CIPHER_H

#include "base.h"
#include "simd/gcm_vaes.h"

enum { FKV_CIPHER_KEY_BYTES = 32, FKV_CIPHER_NONCE_BYTES = 12, FKV_CIPHER_TAG_BYTES = 16, FKV_CIPHER_BLOCK_BYTES = 16 };

/* Computes HMAC-SHA-256 of n bytes. Allocates no memory. Returns FKV_UNSUPPORTED if libcrypto failed. */
fkv_status fkv_keyed_hash(const uint8_t key[FKV_CIPHER_KEY_BYTES], const void *bytes, size_t n,
                          uint8_t hash[FKV_CIPHER_KEY_BYTES]);

/* Cipher context for either encryption or decryption. libcrypto allocates the context's memory at open and reuses it for all
 * messages. A context must be used by one thread at a time. */
typedef struct fkv_cipher {
    void *context;
    bool encrypts;
    const fkv_gcm_functions *kernel; /* decryption kernel; NULL to use libcrypto */
    fkv_gcm_vaes state;              /* of the kernel */
} fkv_cipher;

fkv_status fkv_cipher_open(fkv_cipher *cipher, const uint8_t key[FKV_CIPHER_KEY_BYTES], bool encrypts);
void fkv_cipher_close(fkv_cipher *cipher); /* accepts a zeroed struct */

/* Fills a nonce with random bytes. */
fkv_status fkv_cipher_nonce(uint8_t nonce[FKV_CIPHER_NONCE_BYTES]);

/* Begins a message. bound: [n_bound] additional bytes that are authenticated but not encrypted (AAD) */
fkv_status fkv_cipher_begin(fkv_cipher *cipher, const uint8_t nonce[FKV_CIPHER_NONCE_BYTES], const void *bound, size_t n_bound);

/* Encrypts or decrypts the next n bytes. in and out may be equal. n must be less than 2^31 and, except in the last call of a
 * message, a multiple of FKV_CIPHER_BLOCK_BYTES. */
fkv_status fkv_cipher_add(fkv_cipher *cipher, const uint8_t *in, uint8_t *out, size_t n);

/* Ends a message. Encryption writes the tag. Decryption returns FKV_FILE_DAMAGED if the tag does not match, and the decrypted
 * bytes must then be discarded. */
fkv_status fkv_cipher_end(fkv_cipher *cipher, uint8_t tag[FKV_CIPHER_TAG_BYTES]);

#endif
