/* Draws random per-channel bit widths for calibrated keys. All valid combinations can occur. */
#ifndef FKV_TEST_CHANNEL_BITS_H
#define FKV_TEST_CHANNEL_BITS_H

#include <stdint.h>

static inline uint64_t channel_bits_draw(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Draws the bit width of every channel of a head, with 6 bits for n6 channels. A code has one
 * to three digits of 2 bits. more: number of digits beyond the first, summed over all channels */
static inline void channel_bits_with(uint64_t *state, uint32_t dim, uint32_t more, uint32_t n6, uint8_t *bits) {
    for (uint32_t c = 0; c < dim; c++) bits[c] = c < n6 ? 6 : c < more - n6 ? 4 : 2;
    for (uint32_t c = dim; c > 1; c--) {
        uint32_t other = (uint32_t)(channel_bits_draw(state) % c);
        uint8_t kept = bits[c - 1];
        bits[c - 1] = bits[other];
        bits[other] = kept;
    }
}

/* Draws the bit width of every channel of a head. bits: [dim] bit widths; average: their mean, 3 or 4 */
static inline void channel_bits_random(uint64_t *state, uint32_t dim, uint32_t average, uint8_t *bits) {
    const uint32_t more = dim * (average - 2) / 2;
    channel_bits_with(state, dim, more, (uint32_t)(channel_bits_draw(state) % (more / 2 / 4 + 1)) * 4, bits);
}

/* Draws the bit width of every channel of a head, with as many 6-bit channels as possible. */
static inline void channel_bits_extreme(uint64_t *state, uint32_t dim, uint32_t average, uint8_t *bits) {
    const uint32_t more = dim * (average - 2) / 2;
    channel_bits_with(state, dim, more, more / 2 / 4 * 4, bits);
}

#endif
