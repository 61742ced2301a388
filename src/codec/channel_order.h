/* Keys with 2, 4 or 6 bits for each channel of a head: which channels, in which order.
 *
 * Channels differ in what an error of them costs a score, and the same ones matter for all tokens; so bits are shared out once
 * for a model. A code is one, two or three digits of 2 bits. Channels in the falling order of their digits, those with as many in
 * the order of their numbers, make planes without gaps: digit 0 of all of them, digit 1 of the first n[1], digit 2 of the first
 * n[2]. All heads of a layer have as many digits in all, so their blocks have the same bytes. docs/page_format.md has the places.
 */
#ifndef FKV_CHANNEL_ORDER_H
#define FKV_CHANNEL_ORDER_H

#include "../base/base.h"

enum { FKV_MAX_DIGITS = 3, FKV_CHANNEL_QUAD = 4 /* channels that share a dword: planes are multiples of it */ };

typedef struct fkv_channel_order {
    uint32_t n[FKV_MAX_DIGITS]; /* channels with more than d digits; n[0] = D */
    const uint16_t *channel;    /* [D]: by place */
} fkv_channel_order;

FKV_INLINE uint32_t fkv_channel_digits(const fkv_channel_order *order, uint32_t place) {
    return 1u + (place < order->n[1]) + (place < order->n[2]);
}

/* The number of the quad of digits that place `place` has its digit d in, counted through all planes. */
FKV_INLINE uint32_t fkv_channel_quad(const fkv_channel_order *order, uint32_t place, uint32_t d) {
    uint32_t before = d == 0 ? 0 : d == 1 ? order->n[0] : order->n[0] + order->n[1];
    return (before + place) / FKV_CHANNEL_QUAD;
}

/* bits: [D]. FKV_BAD_CONFIG, with the head and the numbers, unless each is 2, 4 or 6, they are `average` on average, and as many
 * channels have 4, and 6, as make whole quads. */
fkv_status fkv_channel_bits_check(const uint8_t *bits, uint32_t dim, uint32_t average, uint32_t head);

/* bits: [D], checked -> channel: [D], which *order keeps. */
void fkv_channel_order_make(const uint8_t *bits, uint32_t dim, uint16_t *channel, fkv_channel_order *order);

#endif
