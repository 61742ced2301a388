/* Sealed blocks. When a page other than the first is full, the keys and values in its open blocks are encoded again, as sealed
 * blocks. This header declares the codecs for K and V, the code positions and the sealing function.
 *
 * K (FKV_CODEC_SEALED) has one scale and one bias per channel and page. Large key values occur in the same few channels for all
 * tokens. With one scale per channel, they do not reduce the precision of the other channels. The score of token t is (sum over
 * channels c of (q_c * scale_c) * code_tc) + (sum over c of q_c * bias_c), so the work per token is one dot product with its
 * codes. V (FKV_CODEC_SEALED_V) has one norm per row. Its codes refer to an integer codebook for Gaussian values, because the
 * values of rotated rows are nearly Gaussian.
 *
 * Codes are stored in the order that matrix instructions need: blocks of FKV_SEALED_TOKENS tokens, divided into lines of 16
 * dwords. A dword of K holds four channels of one token, and a dword of V holds four tokens of one channel. Such a group of four
 * codes is a quad. Codes are narrower than a byte, so each byte holds codes of several quads. docs/page_format.md is the
 * bit-exact specification.
 *
 * Calibrated keys (FKV_CODEC_CALIBRATED, channel_order.h) use 2, 4 or 6 bits per channel, and each head has its own codec. Their
 * scales, biases and codes are stored in the channel order of the head. In the rest of this header, "channel" then means a
 * position in that order.
 *
 * In a latent layer, the rows of a sealed block are encoded separately, with affine codes for the latent channels
 * (fkv_block_latent_codec()) and 16 bits for the RoPE channels.
 */
#ifndef FKV_SEALED_H
#define FKV_SEALED_H

#include "block.h"
#include "channel_order.h"

enum {
    FKV_SEALED_TOKENS = 16, /* number of tokens whose codes are stored together */
    FKV_SEALED_LINE = 64,   /* bytes per line: 16 dwords */
    FKV_SEALED_LEVELS = 8,  /* maximum number of magnitude levels in a codebook */
    FKV_SEALED_REFITS = 2,
    FKV_SEALED_MAX_PAGE = 256,         /* maximum tokens per page */
    FKV_SEALED_PLACES = FKV_MAX_DIGITS /* maximum number of bit fields that make up a code */
};

/* Scales and norms below this limit are stored as 0, so that the inverse of every other stored value is a finite float. */
static const float FKV_SEALED_SMALLEST = 0x1p-100f;

/* The size of a key row is its largest magnitude. A row is an outlier if its size exceeds FKV_SEALED_OUTLIER and is also more
 * than FKV_SEALED_OUTLIER_RATIO times the size of at least half of the rows in the page. Outliers are ignored when channel ranges
 * are computed, so that the other rows keep their resolution. The codes of an outlier saturate. */
static const float FKV_SEALED_OUTLIER = 1024.0f;
static const float FKV_SEALED_OUTLIER_RATIO = 64.0f;

/* Codebook of one bit width. code = magnitude | sign << (bits - 1) and value = norm * level[magnitude] / 128, negated if the sign
 * is set. The magnitude code of a value with absolute value m / 128 * norm is the number of thresholds below m. */
typedef struct fkv_sealed_book {
    uint8_t level[FKV_SEALED_LEVELS];
    uint8_t above[FKV_SEALED_LEVELS - 1]; /* thresholds; 255: unused */
    float start;                          /* initial norm of a row whose mean absolute value is 1 */
} fkv_sealed_book;

FKV_INTERNAL const fkv_sealed_book *fkv_sealed_book_of(uint32_t bits);

/* Location of one bit field of a code: bits [from, from + n) of the code are stored in byte `at`, starting at bit `shift`. Byte
 * offsets are relative to the codes of the token's block of 16 tokens. */
typedef struct fkv_sealed_place {
    uint32_t at;
    uint32_t shift;
    uint32_t from;
    uint32_t n;
} fkv_sealed_place;

/* Computes the locations of the bit fields that make up one code. t: index of the token within its block of 16 tokens; c:
 * channel. Returns the number of bit fields. */
int fkv_sealed_places(const fkv_codec *codec, uint32_t t, uint32_t c, fkv_sealed_place place[FKV_SEALED_PLACES]);

/* Returns whether fkv_seal_block() creates the blocks of this codec. Blocks of other codecs are written row by row. */
FKV_INLINE bool fkv_codec_is_sealed(const fkv_codec *codec) {
    return codec->kind == FKV_CODEC_SEALED || codec->kind == FKV_CODEC_SEALED_V || codec->kind == FKV_CODEC_CALIBRATED;
}

/* Returns the channel at position p of the channel order. */
FKV_INLINE uint32_t fkv_sealed_channel(const fkv_codec *codec, uint32_t p) {
    return codec->channels != NULL ? codec->channels->channel[p] : p;
}

/* Returns the largest code of the channel at position p of the channel order. */
FKV_INLINE float fkv_sealed_bins(const fkv_codec *codec, uint32_t p) {
    uint32_t bits = codec->channels != NULL ? 2 * fkv_channel_digits(codec->channels, p) : codec->bits;
    return (float)((1u << bits) - 1);
}

void fkv_sealed_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x);

/* Functions of seal.c that the vectorized sealing code also uses. */
uint16_t fkv_sealed_half(fkv_type type, float x);
float fkv_sealed_inverse(float norm);
float fkv_sealed_sum(const float lane[16]);
/* Computes the minimum lo[c] and maximum hi[c] of each channel c over the key rows of an open page, except outlier rows. */
void fkv_sealed_key_ranges(const fkv_block *open, const uint8_t *from, float *lo, float *hi);
/* Computes scales and biases from channel ranges. On entry, lo[c] and hi[c] are the minimum and maximum of channel c. On return,
 * they are the bias and the inverse scale. The outputs `scales` and `biases` are in channel order. */
void fkv_sealed_key_lines(const fkv_codec *codec, float *lo, float *hi, uint8_t *scales, uint8_t *biases);

/* Seals one KV head of one full page: computes the sealed block from the open block. `open` may use any row codec. The K codec of
 * `sealed` is FKV_CODEC_SEALED, FKV_CODEC_CALIBRATED (with a channel order) or, in a latent layer, a row codec. The V codec is
 * FKV_CODEC_SEALED_V or a row codec. Both blocks have the same page_tokens, dimensions and page type. Padding in the sealed block
 * is not written. Each device has a faster, bit-identical implementation. */
void fkv_seal_block(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to);

/* Seals one side of a block whose sealed codec is a row codec: decodes each open row and encodes it with `encode`, which is
 * fkv_codec_encode() or a bit-identical kernel. */
typedef void fkv_row_encoder(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);
void fkv_seal_rows(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to, fkv_side side,
                   fkv_row_encoder *encode);

#endif
