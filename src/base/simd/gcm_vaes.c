/* See gcm_vaes.h.
 *
 * Blocks are byte-reversed after loading, so that a 128-bit lane holds the bit-reflected polynomial of GHASH. Powers of the hash
 * key are stored multiplied by x, because the product of two reflected polynomials is shifted by one bit. Four carry-less
 * multiplications compute a product in three parts: low, middle and high. reduce() then reduces the product modulo x^128 + x^7 +
 * x^2 + x + 1.
 *
 * The main loop decrypts 16 blocks in four registers. It multiplies each block by a different power of the hash key and reduces
 * only the sum of the 16 products. The AES rounds limit the speed. They take 56 instructions for 256 bytes.
 */
#include "gcm_vaes.h"

#include <immintrin.h>

enum { ROUNDS = 14, BLOCK = 16, WIDE_BLOCKS = 16, WIDE_BYTES = WIDE_BLOCKS * BLOCK };

static __m128i load(const uint8_t *bytes) { return _mm_loadu_si128((const __m128i *)(const void *)bytes); }
static void store(uint8_t *bytes, __m128i x) { _mm_storeu_si128((__m128i *)(void *)bytes, x); }

static __m128i reversed(__m128i x) { return _mm_shuffle_epi8(x, _mm_set_epi64x(0x0001020304050607, 0x08090a0b0c0d0e0f)); }

/* ---- AES ---- */

/* Derives a round key. key: the round key before the previous one. word: transformed last word of the previous round key, in all
 * lanes. */
static __m128i next_round_key(__m128i key, __m128i word) {
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, word);
}

static void expand_key(const uint8_t key[32], uint8_t round_keys[15 * 16]) {
    __m128i k[15];
    k[0] = load(key);
    k[1] = load(key + 16);
    for (int i = 2; i < 15; i++) { /* of the last word, dword 3 of `rotated` is RotWord(SubWord()) and dword 2 is SubWord() */
        const __m128i rotated = _mm_aeskeygenassist_si128(k[i - 1], 0);
        const __m128i word = i % 2 == 0 ? _mm_xor_si128(_mm_shuffle_epi32(rotated, 0xff), _mm_set1_epi32(1 << (i / 2 - 1)))
                                        : _mm_shuffle_epi32(rotated, 0xaa);
        k[i] = next_round_key(k[i - 2], word);
    }
    for (size_t i = 0; i < 15; i++) store(round_keys + i * BLOCK, k[i]);
}

static __m128i encrypt(const fkv_gcm_vaes *g, __m128i block) {
    block = _mm_xor_si128(block, load(g->round_keys));
    for (size_t i = 1; i < ROUNDS; i++) block = _mm_aesenc_si128(block, load(g->round_keys + i * BLOCK));
    return _mm_aesenclast_si128(block, load(g->round_keys + (size_t)ROUNDS * BLOCK));
}

/* ---- GHASH ---- */

static __m128i polynomial(void) { return _mm_set_epi64x((long long)0xc200000000000000U, 1); }

/* Reduces the product low * x^-128 + middle * x^-64 + high, whose parts have 128 bits each. */
static __m128i reduce(__m128i low, __m128i middle, __m128i high) {
    middle = _mm_xor_si128(middle, _mm_xor_si128(_mm_clmulepi64_si128(polynomial(), low, 0x01), _mm_shuffle_epi32(low, 0x4e)));
    return _mm_xor_si128(high, _mm_xor_si128(_mm_clmulepi64_si128(polynomial(), middle, 0x01), _mm_shuffle_epi32(middle, 0x4e)));
}

static __m128i multiply(__m128i a, __m128i b) {
    const __m128i low = _mm_clmulepi64_si128(a, b, 0x00);
    const __m128i middle = _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10));
    return reduce(low, middle, _mm_clmulepi64_si128(a, b, 0x11));
}

/* Multiplies a reflected polynomial by x: shifts it left by one bit and reduces the bit that was shifted out. */
static __m128i times_x(__m128i a) {
    const __m128i carries = _mm_srli_epi64(a, 63);
    const __m128i out = _mm_shuffle_epi32(_mm_sub_epi32(_mm_setzero_si128(), carries), 0xaa); /* all ones if the top bit is set */
    a = _mm_or_si128(_mm_slli_epi64(a, 1), _mm_slli_si128(carries, 8));
    return _mm_xor_si128(a, _mm_and_si128(out, polynomial()));
}

static __m128i hash_key(const fkv_gcm_vaes *g) { return load(g->powers + (size_t)(WIDE_BLOCKS - 1) * BLOCK); }

/* Adds a block, in memory byte order, to the hash. */
static __m128i add_block(const fkv_gcm_vaes *g, __m128i hash, __m128i block) {
    return multiply(_mm_xor_si128(hash, reversed(block)), hash_key(g));
}

/* ---- messages ---- */

static void gcm_open(fkv_gcm_vaes *g, const uint8_t key[32]) {
    *g = (fkv_gcm_vaes){.n_bytes = 0};
    expand_key(key, g->round_keys);
    const __m128i h = times_x(reversed(encrypt(g, _mm_setzero_si128())));
    __m128i power = h;
    for (size_t i = WIDE_BLOCKS; i-- > 0; power = multiply(power, h)) store(g->powers + i * BLOCK, power);
}

static void gcm_begin(fkv_gcm_vaes *g, const uint8_t nonce[12], const uint8_t *bound, size_t n_bound) {
    uint8_t block[BLOCK] = {0};
    __m128i hash = _mm_setzero_si128();
    memcpy(block, nonce, 12);
    block[15] = 1;
    store(g->tag_mask, encrypt(g, load(block)));
    block[15] = 2;
    memcpy(g->counter, block, BLOCK);
    for (size_t at = 0; at < n_bound; at += BLOCK) {
        const size_t n = n_bound - at < BLOCK ? n_bound - at : BLOCK;
        memset(block, 0, BLOCK);
        memcpy(block, bound + at, n);
        hash = add_block(g, hash, load(block));
    }
    store(g->hash, hash);
    g->n_bound = n_bound;
    g->n_bytes = 0;
}

/* Decrypts as many groups of 16 blocks as possible. Returns the number of bytes decrypted. */
static size_t decrypt_wide(fkv_gcm_vaes *g, const uint8_t *in, uint8_t *out, size_t n) {
    const __m512i swap = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0001020304050607, 0x08090a0b0c0d0e0f));
    const __m512i four = _mm512_broadcast_i32x4(_mm_set_epi32(0, 0, 0, 4));
    __m512i keys[ROUNDS + 1];
    __m512i powers[4];
    for (size_t i = 0; i <= ROUNDS; i++) keys[i] = _mm512_broadcast_i32x4(load(g->round_keys + i * BLOCK));
    for (size_t i = 0; i < 4; i++) powers[i] = _mm512_loadu_si512(g->powers + i * 64);
    __m128i hash = load(g->hash);
    __m512i counter = _mm512_add_epi32(_mm512_broadcast_i32x4(reversed(load(g->counter))),
                                       _mm512_set_epi32(0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0));
    size_t at = 0;
    for (; n - at >= WIDE_BYTES; at += WIDE_BYTES) {
        __m512i data[4];
        __m512i stream[4];
        __m512i low = _mm512_setzero_si512();
        __m512i middle = low;
        __m512i high = low;
        for (size_t i = 0; i < 4; i++) {
            data[i] = _mm512_loadu_si512(in + at + i * 64);
            stream[i] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, swap), keys[0]);
            counter = _mm512_add_epi32(counter, four);
        }
        for (size_t r = 1; r < ROUNDS; r++)
            for (size_t i = 0; i < 4; i++) stream[i] = _mm512_aesenc_epi128(stream[i], keys[r]);
        for (size_t i = 0; i < 4; i++) {
            __m512i x = _mm512_shuffle_epi8(data[i], swap);
            if (i == 0) x = _mm512_xor_si512(x, _mm512_zextsi128_si512(hash));
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128(x, powers[i], 0x00));
            middle = _mm512_ternarylogic_epi64(middle, _mm512_clmulepi64_epi128(x, powers[i], 0x01),
                                               _mm512_clmulepi64_epi128(x, powers[i], 0x10), 0x96);
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128(x, powers[i], 0x11));
            stream[i] = _mm512_aesenclast_epi128(stream[i], keys[ROUNDS]);
            _mm512_storeu_si512(out + at + i * 64, _mm512_xor_si512(stream[i], data[i]));
        }
        __m128i sums[3];
        const __m512i parts[3] = {low, middle, high};
        for (size_t i = 0; i < 3; i++) {
            const __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(parts[i]), _mm512_extracti64x4_epi64(parts[i], 1));
            sums[i] = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        }
        hash = reduce(sums[0], sums[1], sums[2]);
    }
    store(g->hash, hash);
    store(g->counter, reversed(_mm512_castsi512_si128(counter)));
    return at;
}

static void gcm_decrypt(fkv_gcm_vaes *g, const uint8_t *in, uint8_t *out, size_t n) {
    size_t at = decrypt_wide(g, in, out, n);
    __m128i counter = reversed(load(g->counter));
    __m128i hash = load(g->hash);
    for (; at < n; at += BLOCK) {
        uint8_t block[BLOCK] = {0};
        const size_t size = n - at < BLOCK ? n - at : BLOCK;
        memcpy(block, in + at, size);
        const __m128i data = load(block);
        hash = add_block(g, hash, data);
        store(block, _mm_xor_si128(data, encrypt(g, reversed(counter))));
        memcpy(out + at, block, size);
        counter = _mm_add_epi32(counter, _mm_set_epi32(0, 0, 0, 1));
    }
    store(g->counter, reversed(counter));
    store(g->hash, hash);
    g->n_bytes += n;
}

static void gcm_end(fkv_gcm_vaes *g, uint8_t tag[16]) {
    const uint64_t bound_bits = g->n_bound * 8;
    const uint64_t text_bits = g->n_bytes * 8;
    const __m128i lengths = reversed(_mm_set_epi64x((long long)bound_bits, (long long)text_bits));
    store(tag, _mm_xor_si128(reversed(add_block(g, load(g->hash), lengths)), load(g->tag_mask)));
}

const fkv_gcm_functions *fkv_gcm_vaes_functions(void) {
    static const fkv_gcm_functions functions = {.open = gcm_open, .begin = gcm_begin, .decrypt = gcm_decrypt, .end = gcm_end};
    __builtin_cpu_init();
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("aes") &&
                      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("vaes") && __builtin_cpu_supports("vpclmulqdq");
    return runs ? &functions : NULL;
}
