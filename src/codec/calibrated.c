/* Codec definition and channel order of calibrated keys. sealed.c defines where their codes are stored and what they mean.
 * Calibrated keys differ from sealed keys in two respects: the code width is chosen per channel, and a code is stored as one, two
 * or three digits of 2 bits. */
#include "sealed.h"

static const fkv_codec_name calibrated_names[] = {{"c4", 4}, {"c3", 3}, {NULL, 0}};

static fkv_status check_calibrated_config(fkv_codec_config config) {
    FKV_REQUIRE(config.bits == 4 || config.bits == 3, FKV_BAD_CONFIG,
                "unsupported average of %u bits per channel for calibrated keys: expected 4 or 3", config.bits);
    return FKV_OK;
}

/* Computes the size of a row. The 2-bit digits of codes are stored without gaps, so the size depends only on the average number
 * of bits per channel. */
static void lay_out_calibrated(fkv_codec *codec) {
    uint32_t bytes = FKV_SEALED_LINE / FKV_SEALED_TOKENS; /* a 64-byte line holds 4 bytes of each of 16 tokens */
    codec->row_bytes[FKV_PART_CODES] = fkv_ceil_div(codec->dim * codec->bits, 8 * bytes) * bytes;
    codec->page_bytes[FKV_PART_SCALES] = codec->page_bytes[FKV_PART_BIASES] = codec->dim * 2;
}

const fkv_codec_functions fkv_codec_calibrated = {.names = calibrated_names,
                                                  .sides = FKV_ON_K,
                                                  .check = check_calibrated_config,
                                                  .lay_out = lay_out_calibrated,
                                                  .decode_at = fkv_sealed_decode};

fkv_status fkv_channel_bits_check(const uint8_t *bits, uint32_t dim, uint32_t average, uint32_t head) {
    uint32_t sum = 0;
    uint32_t n[FKV_MAX_DIGITS + 1] = {0};
    for (uint32_t c = 0; c < dim; c++) {
        FKV_REQUIRE(bits[c] == 2 || bits[c] == 4 || bits[c] == 6, FKV_BAD_CONFIG,
                    "channel_bits of KV head %u: channel %u has %u bits; expected 2, 4 or 6", head, c, bits[c]);
        n[bits[c] / 2]++;
        sum += bits[c];
    }
    FKV_REQUIRE(sum == average * dim, FKV_BAD_CONFIG,
                "channel_bits of KV head %u: %u bits in total; expected %u channels x %u bits = %u", head, sum, dim, average,
                average * dim);
    FKV_REQUIRE(n[2] % FKV_CHANNEL_QUAD == 0 && n[3] % FKV_CHANNEL_QUAD == 0, FKV_BAD_CONFIG,
                "channel_bits of KV head %u: %u channels of 4 bits and %u of 6 bits; both numbers must be multiples of %d", head,
                n[2], n[3], FKV_CHANNEL_QUAD);
    return FKV_OK;
}

void fkv_channel_order_make(const uint8_t *bits, uint32_t dim, uint16_t *channel, fkv_channel_order *order) {
    uint32_t at = 0;
    *order = (fkv_channel_order){.channel = channel};
    for (uint32_t digits = FKV_MAX_DIGITS; digits > 0; digits--) {
        for (uint32_t c = 0; c < dim; c++)
            if (bits[c] == 2 * digits) channel[at++] = (uint16_t)c;
        order->n[digits - 1] = at;
    }
    FKV_ASSERT(at == dim);
}
