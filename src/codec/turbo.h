/* TurboQuant rows are rotated before encoding. Each row has one scale, and its codes refer to an integer codebook. The codebook
 * is optimized (Lloyd-Max) for Gaussian values, because the values of rotated rows are nearly Gaussian. A decoded value is the
 * product of the scale and a codebook value.
 *
 * 4-bit and 2-bit codes are packed LSB-first. 3-bit codes are stored in two planes: first the low two bits of all values as 2-bit
 * codes, then the high bits of all values, 8 per byte.
 */
#ifndef FKV_TURBO_H
#define FKV_TURBO_H

#include "codec.h"

/* Number of lanes in the sum of squares. Value j is added to lane j % 16. The lanes are then added in ascending order. */
enum { FKV_TURBO_LANES = 16 };

typedef struct fkv_turbo_book {
    float unit;       /* scale of a row whose mean square is 1 */
    int8_t value[16]; /* codebook values in ascending order, repeated to fill 16 entries */
} fkv_turbo_book;

/* Codebooks by bit width. The values are Lloyd-Max points rounded to integers, which increases the quantization error of Gaussian
 * data by less than 0.1 %. */
static const fkv_turbo_book fkv_turbo_books[] = {
    [2] = {0x1.c1eb58p-7f, {-110, -33, 33, 110, -110, -33, 33, 110, -110, -33, 33, 110, -110, -33, 33, 110}},
    [3] = {0x1.908664p-6f, {-88, -55, -31, -10, 10, 31, 55, 88, -88, -55, -31, -10, 10, 31, 55, 88}},
    [4] = {0x1.ad7b5ap-6f, {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104}},
};

/* Returns the byte offset, within a row, of the plane that holds the high bits of 3-bit codes. */
FKV_INLINE uint32_t fkv_turbo_plane(uint32_t dim) { return dim / 4; }

/* Returns the scale of a row before rounding. `largest` is max |x|, and `lanes` holds the partial sums of (x / largest)^2. */
float fkv_turbo_scale(const fkv_codec *codec, float largest, const float lanes[FKV_TURBO_LANES]);

/* Packs the codes of a row, code: [D], which are stored one per byte. */
void fkv_turbo_pack(const fkv_codec *codec, const uint8_t *code, uint8_t *bytes);

/* Returns the number by which values are divided before they are compared with the codebook: the scale, but at least 1e-30. */
FKV_INLINE float fkv_turbo_divisor(float scale) { return scale > 1e-30f ? scale : 1e-30f; }

#endif
