/* Tests the cipher of stored pages with published vectors, and by decrypting messages that libcrypto has encrypted. Each
 * decryption test runs with libcrypto and, if there is one for this machine, with flatkv's own kernel.
 */
#include "../src/base/page_cipher.h"
#include "test.h"

#include <string.h>

enum { MAX_BYTES = 3000, MAX_BOUND = 80 };

/* A message that libcrypto has encrypted. */
typedef struct message {
    uint8_t key[FKV_CIPHER_KEY_BYTES];
    uint8_t nonce[FKV_CIPHER_NONCE_BYTES];
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    uint8_t bound[MAX_BOUND];
    uint8_t text[MAX_BYTES];
    uint8_t encrypted[MAX_BYTES];
    size_t n_bound;
    size_t n;
} message;

static uint32_t next_random(uint32_t *state) { return *state = *state * 1664525 + 1013904223; }

static void fill(uint8_t *bytes, size_t n, uint32_t *state) {
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)(next_random(state) >> 24);
}

static void make_message(message *m, size_t n, size_t n_bound, uint32_t seed) {
    fkv_cipher cipher;
    fill(m->key, sizeof m->key, &seed);
    fill(m->nonce, sizeof m->nonce, &seed);
    fill(m->bound, sizeof m->bound, &seed);
    fill(m->text, sizeof m->text, &seed);
    m->n = n;
    m->n_bound = n_bound;
    ck_ok(fkv_cipher_open(&cipher, m->key, true));
    ck_ok(fkv_cipher_begin(&cipher, m->nonce, m->bound, n_bound));
    if (n > 0) ck_ok(fkv_cipher_add(&cipher, m->text, m->encrypted, n));
    ck_ok(fkv_cipher_end(&cipher, m->tag));
    fkv_cipher_close(&cipher);
}

/* Decrypts a message in place, in parts of up to part_bytes bytes. */
static fkv_status decrypt(const message *m, bool uses_kernel, size_t part_bytes, uint8_t *out) {
    fkv_cipher cipher;
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    memcpy(tag, m->tag, sizeof tag);
    memcpy(out, m->encrypted, m->n);
    ck_ok(fkv_cipher_open(&cipher, m->key, false));
    if (!uses_kernel) cipher.kernel = NULL;
    ck_ok(fkv_cipher_begin(&cipher, m->nonce, m->bound, m->n_bound));
    for (size_t at = 0; at < m->n; at += part_bytes)
        ck_ok(fkv_cipher_add(&cipher, out + at, out + at, m->n - at < part_bytes ? m->n - at : part_bytes));
    const fkv_status status = fkv_cipher_end(&cipher, tag);
    fkv_cipher_close(&cipher);
    return status;
}

/* Test case 2 of RFC 4231, with its key padded to 32 bytes, and test case 14 of the AES-GCM specification. */
START_TEST(cipher_matches_published_vectors) {
    static const uint8_t jefe[FKV_CIPHER_KEY_BYTES] = "Jefe";
    static const uint8_t hmac[FKV_CIPHER_KEY_BYTES] = {0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24,
                                                       0x26, 0x08, 0x95, 0x75, 0xc7, 0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27,
                                                       0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43};
    static const uint8_t expected[16] = {0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e,
                                         0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18};
    static const uint8_t expected_tag[16] = {0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0,
                                             0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
    uint8_t hash[FKV_CIPHER_KEY_BYTES];
    uint8_t zero[FKV_CIPHER_KEY_BYTES] = {0};
    uint8_t text[16] = {0};
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    fkv_cipher cipher;
    ck_ok(fkv_keyed_hash(jefe, "what do ya want for nothing?", 28, hash));
    ck_assert_mem_eq(hash, hmac, sizeof hash);
    ck_ok(fkv_cipher_open(&cipher, zero, true));
    ck_ok(fkv_cipher_begin(&cipher, zero, zero, 0));
    ck_ok(fkv_cipher_add(&cipher, text, text, 16));
    ck_ok(fkv_cipher_end(&cipher, tag));
    ck_assert_mem_eq(text, expected, sizeof text);
    ck_assert_mem_eq(tag, expected_tag, sizeof tag);
    fkv_cipher_close(&cipher);
    ck_ok(fkv_cipher_open(&cipher, zero, false));
    for (int flip = 0; flip < 2; flip++) {
        tag[3] ^= (uint8_t)flip;
        memcpy(text, expected, sizeof text);
        ck_ok(fkv_cipher_begin(&cipher, zero, zero, 0));
        ck_ok(fkv_cipher_add(&cipher, text, text, 16));
        ck_status(fkv_cipher_end(&cipher, tag), flip ? FKV_FILE_DAMAGED : FKV_OK);
    }
    fkv_cipher_close(&cipher);
}
END_TEST

START_TEST(messages_of_all_lengths_are_decrypted_in_any_parts) {
    static const size_t parts[] = {16, 48, 256, 272, 1040, MAX_BYTES};
    static message m;
    static uint8_t out[MAX_BYTES];
    for (size_t n = 0; n <= MAX_BYTES; n += n < 600 ? 1 : 97) {
        make_message(&m, n, n % (MAX_BOUND + 1), (uint32_t)n + 1);
        for (size_t i = 0; i < 2 * sizeof parts / sizeof parts[0]; i++) {
            memset(out, 0, sizeof out);
            ck_ok(decrypt(&m, i % 2 == 0, parts[i / 2], out));
            ck_assert_msg(memcmp(out, m.text, n) == 0, "%zu bytes in parts of %zu bytes", n, parts[i / 2]);
        }
    }
}
END_TEST

static void check_refused(const message *m, size_t bit, const char *where) {
    static uint8_t out[MAX_BYTES];
    for (int uses_kernel = 0; uses_kernel < 2; uses_kernel++)
        ck_assert_msg(decrypt(m, uses_kernel == 1, 256, out) == FKV_FILE_DAMAGED, "bit %zu of the %s is not authenticated", bit,
                      where);
}

START_TEST(every_changed_bit_is_detected) {
    static message m;
    make_message(&m, 600, 78, 7);
    const struct {
        uint8_t *bytes;
        size_t n;
        const char *name;
    } fields[] = {{m.encrypted, m.n, "message"},
                  {m.bound, m.n_bound, "additional data"},
                  {m.nonce, sizeof m.nonce, "nonce"},
                  {m.tag, sizeof m.tag, "tag"},
                  {m.key, sizeof m.key, "key"}};
    for (size_t f = 0; f < sizeof fields / sizeof fields[0]; f++)
        for (size_t bit = 0; bit < 8 * fields[f].n; bit++) {
            fields[f].bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
            check_refused(&m, bit, fields[f].name);
            fields[f].bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
        }
}
END_TEST

START_TEST(a_message_of_another_length_is_detected) {
    static message m;
    make_message(&m, 600, 78, 8);
    for (m.n = 0; m.n < 600; m.n++) check_refused(&m, 8 * m.n, "message after its end");
    for (m.n_bound = 0; m.n_bound < 78; m.n_bound++) check_refused(&m, 8 * m.n_bound, "additional data after its end");
}
END_TEST

TEST_MAIN("page_cipher", cipher_matches_published_vectors, messages_of_all_lengths_are_decrypted_in_any_parts,
          every_changed_bit_is_detected, a_message_of_another_length_is_detected)
