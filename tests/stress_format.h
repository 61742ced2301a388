/* Independent implementation of docs/page_format.md: encodes and decodes rows. Shares no code with the library, so any difference
 * between the two shows a bug in one of them.
 */
#ifndef FKV_STRESS_FORMAT_H
#define FKV_STRESS_FORMAT_H

#include <flatkv/flatkv.h>

enum { STRESS_K = 0, STRESS_V = 1, STRESS_Q = 2, STRESS_N_SIDES = 2, STRESS_PARTS = 3, STRESS_SPAN = 4 };

/* Codec of the keys or values of one layer. */
typedef struct stress_codec {
    fkv_codec_kind kind; /* never FKV_CODEC_AUTO */
    uint32_t bits;
    uint32_t group; /* group size; D if the codec has no groups */
    uint32_t dim;   /* D */
    fkv_type type;  /* 16-bit type of values, scales and biases in pages */
    bool rotated;
    float sign[FKV_MAX_HEAD_DIM]; /* signs of the rotation: -1 for channels that the rotation negates, otherwise 1 */
    const uint8_t
        *channel_bits; /* bit widths, for calibrated keys only: [G, D] in the codec of a layer, [D] in the codec of one head */
} stress_codec;

stress_codec stress_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, bool rotated, uint64_t seed, uint32_t side);

/* Returns the number of bytes that one row has in part 0 (codes or 16-bit values), part 1 (scales) or part 2 (biases). */
uint32_t stress_part_bytes(const stress_codec *codec, uint32_t part);
uint32_t stress_row_bytes(const stress_codec *codec);

/* Encodes a row. If the codec requires a rotation, the row must already be rotated. x: [D] */
void stress_encode_rotated(const stress_codec *codec, const float *x, uint8_t *bytes);

/* Encodes a row into codes, scales and biases, in this order. x: [D], unrotated */
void stress_encode(const stress_codec *codec, const float *x, uint8_t *bytes);

/* Decodes a row without undoing the rotation. x: [D] */
void stress_decode(const stress_codec *codec, const uint8_t *bytes, float *x);

/* Returns true for the sealed kinds (sections 1.5 and 1.6), FKV_CODEC_SEALED, FKV_CODEC_SEALED_V and FKV_CODEC_CALIBRATED, which
 * do not encode single rows. */
bool stress_is_sealed(const stress_codec *codec);

/* Returns the unpadded size, in bytes, of the codes (part 0), scales (part 1) or biases (part 2) of a page of any kind. */
size_t stress_page_part_bytes(const stress_codec *codec, uint32_t part, uint32_t page_tokens);

/* Seals a page. x: [T, D], the decoded open rows; part: zeroed buffers for codes, scales and biases. */
void stress_seal(const stress_codec *codec, const float *x, uint32_t page_tokens, uint8_t *const part[STRESS_PARTS]);

/* Decodes row `token` of a page of any kind. */
void stress_decode_at(const stress_codec *codec, uint8_t *const part[STRESS_PARTS], uint32_t token, float *x);

/* Applies the rotation or its inverse in double precision. x: [D] */
void stress_rotate(const stress_codec *codec, double *x);
void stress_rotate_back(const stress_codec *codec, double *x);

/* Rounds to the nearest value of a 16-bit type, ties to even, overflowing to infinity. */
uint16_t stress_to_half(fkv_type type, float x);
float stress_from_half(fkv_type type, uint16_t half);

uint32_t stress_crc32c(const uint8_t *bytes, size_t n);

/* Hashes the concatenation of two byte ranges. */
void stress_sha256(const uint8_t *first, size_t n_first, const uint8_t *second, size_t n_second, uint8_t digest[32]);

#endif
