/* docs/page_format.md by a second hand: what a row of numbers becomes, and what is read back. Shares no code with the library;
 * where the two disagree by one bit, one of them has a bug.
 */
#ifndef FKV_LIFE_FORMAT_H
#define FKV_LIFE_FORMAT_H

#include <flatkv/flatkv.h>

enum { LIFE_K = 0, LIFE_V = 1, LIFE_Q = 2, LIFE_N_SIDES = 2, LIFE_PARTS = 3, LIFE_SPAN = 4 };

/* One side of one layer. */
typedef struct life_codec {
    fkv_codec_kind kind; /* never FKV_CODEC_AUTO */
    uint32_t bits;
    uint32_t group; /* D where there are no groups */
    uint32_t dim;   /* D */
    fkv_type type;  /* of the pages */
    bool rotated;
    float sign[FKV_MAX_HEAD_DIM]; /* -1 where the rotation negates */
    const uint8_t *channel_bits;  /* of calibrated keys: [G, D] in a configuration, [D] of one head below */
} life_codec;

life_codec life_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, bool rotated, uint64_t seed, uint32_t side);

/* Bytes of one row in part 0 (codes or 16-bit numbers), 1 (scales), 2 (biases). */
uint32_t life_part_bytes(const life_codec *codec, uint32_t part);
uint32_t life_row_bytes(const life_codec *codec);

/* x: [D], rotated already where it is to be -> as life_encode(). */
void life_encode_rotated(const life_codec *codec, const float *x, uint8_t *bytes);

/* x: [D] as the model gave it -> codes, scales, biases, one after the other. */
void life_encode(const life_codec *codec, const float *x, uint8_t *bytes);

/* What a reader finds, still rotated. x: [D] */
void life_decode(const life_codec *codec, const uint8_t *bytes, float *x);

/* Sealed blocks (1.5, 1.6): kinds FKV_CODEC_SEALED, FKV_CODEC_SEALED_V and FKV_CODEC_CALIBRATED have no rows of their own. */
bool life_is_sealed(const life_codec *codec);

/* Bytes of a part of a page of any kind, before it is rounded up. */
size_t life_page_part_bytes(const life_codec *codec, uint32_t part, uint32_t page_tokens);

/* x: [T, D], what the open rows stand for -> the three parts of the page, which are 0 before. */
void life_seal(const life_codec *codec, const float *x, uint32_t page_tokens, uint8_t *const part[LIFE_PARTS]);

/* Row `token` of a page of any kind. */
void life_decode_at(const life_codec *codec, uint8_t *const part[LIFE_PARTS], uint32_t token, float *x);

/* The rotation and its inverse in double. x: [D] */
void life_rotate(const life_codec *codec, double *x);
void life_rotate_back(const life_codec *codec, double *x);

/* Nearest number of a 16-bit type, ties to even; too large is infinite. */
uint16_t life_to_half(fkv_type type, float x);
float life_from_half(fkv_type type, uint16_t half);

uint32_t life_crc32c(const uint8_t *bytes, size_t n);

/* Of two stretches of bytes, one after the other. */
void life_sha256(const uint8_t *first, size_t n_first, const uint8_t *second, size_t n_second, uint8_t digest[32]);

#endif
