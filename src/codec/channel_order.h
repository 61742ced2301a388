/* Channel order of calibrated keys, which use 2, 4 or 6 bits per channel.
 *
 * Quantization errors matter more in some channels than in others, and the important channels are the same for all tokens. The
 * number of bits of each channel is therefore chosen once per model. A code consists of one, two or three digits of 2 bits.
 * Channels are sorted by descending number of digits and then by channel index. Plane d stores digit d of all channels whose
 * codes have this digit. Because of the sort order, planes have no gaps: plane 0 covers all channels, plane 1 the first n[1]
 * channels, and plane 2 the first n[2] channels. All heads of a layer have the same total number of digits, so their blocks have
 * equal size. docs/page_format.md specifies the bit positions.
 */
#ifndef FKV_CHANNEL_ORDER_H
#define FKV_CHANNEL_ORDER_H

#include "../base/base.h"

enum {
    FKV_MAX_DIGITS = 3,
    FKV_CHANNEL_QUAD = 4 /* number of channels in a quad; the digits of a quad are in the four bytes of a dword */
};

typedef struct fkv_channel_order {
    uint32_t n[FKV_MAX_DIGITS]; /* n[d]: number of channels whose codes have a digit d; n[0] = D */
    const uint16_t *channel;    /* [D] channel[p] is the index of the channel at position p in the channel order */
} fkv_channel_order;

FKV_INLINE uint32_t fkv_channel_digits(const fkv_channel_order *order, uint32_t place) {
    return 1u + (place < order->n[1]) + (place < order->n[2]);
}

/* Returns the index of the quad that holds digit d of the channel at position `place` of the channel order. Quads are numbered
 * consecutively over all planes. */
FKV_INLINE uint32_t fkv_channel_quad(const fkv_channel_order *order, uint32_t place, uint32_t d) {
    uint32_t before = d == 0 ? 0 : d == 1 ? order->n[0] : order->n[0] + order->n[1];
    return (before + place) / FKV_CHANNEL_QUAD;
}

/* Validates bits: [D]. Every entry must be 2, 4 or 6, and the average of all entries must equal `average`. The number of 4-bit
 * channels and the number of 6-bit channels must be multiples of FKV_CHANNEL_QUAD. Returns FKV_BAD_CONFIG if one of these
 * conditions is violated; the message names the head and the invalid values. */
fkv_status fkv_channel_bits_check(const uint8_t *bits, uint32_t dim, uint32_t average, uint32_t head);

/* Computes the channel order for `bits`: [D], which must have passed fkv_channel_bits_check(). Stores the order in `channel`:
 * [D], and keeps a pointer to this array in *order. */
void fkv_channel_order_make(const uint8_t *bits, uint32_t dim, uint16_t *channel, fkv_channel_order *order);

#endif
