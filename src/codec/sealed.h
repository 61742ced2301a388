/* Sealed blocks: a full page packed again, once, from the codes of its open block. Here are the codecs of both sides, the places
 * of their codes, and the function that seals.
 *
 * K (FKV_CODEC_SEALED): a scale and a bias for each channel of the page. The large values of keys stand in the same few channels
 * for all tokens, so they share no scale with small ones. score = sum over c of (q_c * scale_c) * code_tc, + sum over c of
 * q_c * bias_c: what is left to do for each token is a product of codes.
 * V (FKV_CODEC_SEALED_V): a norm for each row, and codes of a book of whole numbers for Gaussian rows, which rotated ones are.
 *
 * Codes lie as the products of matrix units want them: in blocks of FKV_SEALED_TOKENS tokens, and in a block in lines of 16
 * dwords. A dword of K holds four channels of one token, a dword of V four tokens of one channel; codes of fewer bits than a byte
 * share it with the quads behind. docs/page_format.md is the bit-exact truth of it.
 *
 * Calibrated keys (FKV_CODEC_CALIBRATED, channel_order.h) have 2, 4 or 6 bits for each channel, and heads that differ: each has a
 * codec of its own. What is said here of channels is then said of places in the head's order: scales, biases and codes lie in it.
 */
#ifndef FKV_SEALED_H
#define FKV_SEALED_H

#include "block.h"
#include "channel_order.h"

enum {
    FKV_SEALED_TOKENS = 16, /* of a block of codes */
    FKV_SEALED_LINE = 64,   /* bytes: 16 dwords */
    FKV_SEALED_LEVELS = 8,  /* of a book, at most: sizes without signs */
    FKV_SEALED_REFITS = 2,
    FKV_SEALED_PLACES = FKV_MAX_DIGITS /* of a code, at most */
};

/* Scales and norms below this are stored as 0: the inverse of all others is a float. */
static const float FKV_SEALED_SMALLEST = 0x1p-100f;

/* The book of a width: code = size | sign << (bits - 1); value = norm * level / 128, negated where the sign is set. A number of m
 * 128ths of the norm has the size of how many thresholds it is above. */
typedef struct fkv_sealed_book {
    uint8_t level[FKV_SEALED_LEVELS];
    uint8_t above[FKV_SEALED_LEVELS - 1]; /* 255: none */
    float start;                          /* norm of a row whose numbers are 1 on average, without signs */
} fkv_sealed_book;

FKV_SEAM const fkv_sealed_book *fkv_sealed_book_of(uint32_t bits);

/* Where bits of a code lie: bits [from, from + n) of it, at `shift` of byte `at` from the start of its block of tokens. */
typedef struct fkv_sealed_place {
    uint32_t at;
    uint32_t shift;
    uint32_t from;
    uint32_t n;
} fkv_sealed_place;

/* Fills the places of a code of token t (within its block) and channel c, of calibrated keys the channel that is c-th in their
 * order; returns how many there are. */
int fkv_sealed_places(const fkv_codec *codec, uint32_t t, uint32_t c, fkv_sealed_place place[FKV_SEALED_PLACES]);

/* Whether a block of this codec is made by fkv_seal_block() and not row by row. */
FKV_INLINE bool fkv_codec_is_sealed(const fkv_codec *codec) {
    return codec->kind == FKV_CODEC_SEALED || codec->kind == FKV_CODEC_SEALED_V || codec->kind == FKV_CODEC_CALIBRATED;
}

/* The channel of place p. */
FKV_INLINE uint32_t fkv_sealed_channel(const fkv_codec *codec, uint32_t p) {
    return codec->channels != NULL ? codec->channels->channel[p] : p;
}

/* The largest code at place p. */
FKV_INLINE float fkv_sealed_bins(const fkv_codec *codec, uint32_t p) {
    uint32_t bits = codec->channels != NULL ? 2 * fkv_channel_digits(codec->channels, p) : codec->bits;
    return (float)((1u << bits) - 1);
}

/* Row `token` of a page. part: the parts of the whole page. */
void fkv_sealed_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x);

/* Parts of the arithmetic that vector kernels share; seal.c says what they are for. lo and hi become bias and 1 / scale. */
uint16_t fkv_sealed_half(fkv_type type, float x);
float fkv_sealed_inverse(float norm);
float fkv_sealed_sum(const float lane[16]);
/* lo and hi: by channel, where scales and biases are by place. */
void fkv_sealed_key_lines(const fkv_codec *codec, float *lo, float *hi, uint8_t *scales, uint8_t *biases);

/* One KV head of one full page: the sealed block from the open one, and from nothing else. `open` may be of any codecs that code
 * rows, the V of `sealed` as well; its K is FKV_CODEC_SEALED, or FKV_CODEC_CALIBRATED with
 * its channels. Both have the same page_tokens, head dimension and page type. The
 * bytes between the parts stay as they are. Devices have faster ones, to the same bits. */
void fkv_seal_block(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to);

#endif
