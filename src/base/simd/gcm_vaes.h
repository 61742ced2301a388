/* AES-256-GCM decryption with the vector instructions VAES and VPCLMULQDQ (NIST SP 800-38D, nonces of 12 bytes).
 *
 * Used only with libcrypto 3.0, which does not use these instructions. Its decryption of a page takes longer than receiving the
 * page from a local Redis server. Neither branches nor addresses depend on secret data, and no memory is allocated.
 */
#ifndef FKV_GCM_VAES_H
#define FKV_GCM_VAES_H

#include "../base.h"

typedef struct fkv_gcm_vaes {
    uint8_t round_keys[15 * 16];
    uint8_t powers[16 * 16]; /* H^16, H^15, ..., H, where H is the hash key */
    uint8_t hash[16];        /* GHASH of all bytes processed so far */
    uint8_t counter[16];     /* next counter block */
    uint8_t tag_mask[16];    /* encrypted first counter block */
    uint64_t n_bound;
    uint64_t n_bytes;
} fkv_gcm_vaes;

typedef struct fkv_gcm_functions {
    void (*open)(fkv_gcm_vaes *g, const uint8_t key[32]);

    /* Begins a message. bound: [n_bound] additional authenticated data */
    void (*begin)(fkv_gcm_vaes *g, const uint8_t nonce[12], const uint8_t *bound, size_t n_bound);

    /* Decrypts the next n bytes. in and out may be equal. n must be a multiple of 16, except in the last call of a message. */
    void (*decrypt)(fkv_gcm_vaes *g, const uint8_t *in, uint8_t *out, size_t n);

    /* Ends a message. Writes the expected tag. */
    void (*end)(fkv_gcm_vaes *g, uint8_t tag[16]);
} fkv_gcm_functions;

/* Returns NULL if this machine does not have the instructions. */
#if FKV_ARCH_X86
const fkv_gcm_functions *fkv_gcm_vaes_functions(void);
#else
FKV_INLINE const fkv_gcm_functions *fkv_gcm_vaes_functions(void) { return NULL; }
#endif

#endif
