/* TurboQuant rows: rotated, one scale for all numbers of a row, and codes of a book of whole numbers that is the best for
 * Gaussian rows (Lloyd and Max), which rotated ones are nearly. value = scale * book value.
 *
 * Codes of 4 and 2 bits lie LSB-first in bytes. Codes of 3 bits lie in two planes: the low two bits of all numbers of the row as
 * codes of 2 bits, and behind them the high bits, 8 to a byte.
 */
#ifndef FKV_TURBO_H
#define FKV_TURBO_H

#include "codec.h"

enum { FKV_TURBO_LANES = 16 }; /* of the sum of squares: number j is added in lane j % 16, lanes from first to last */

typedef struct fkv_turbo_book {
    float unit;       /* scale of a row whose numbers have a mean square of 1 */
    int8_t value[16]; /* from smallest to largest; repeated where there are fewer */
} fkv_turbo_book;

/* By bits. Whole numbers near the points of Lloyd and Max: the squared error of a Gaussian grows by less than a thousandth. */
static const fkv_turbo_book fkv_turbo_books[] = {
    [2] = {0x1.c1eb58p-7f, {-110, -33, 33, 110, -110, -33, 33, 110, -110, -33, 33, 110, -110, -33, 33, 110}},
    [3] = {0x1.908664p-6f, {-88, -55, -31, -10, 10, 31, 55, 88, -88, -55, -31, -10, 10, 31, 55, 88}},
    [4] = {0x1.ad7b5ap-6f, {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104}},
};

/* Bytes of the row from which the high bits of 3-bit codes lie. */
FKV_INLINE uint32_t fkv_turbo_plane(uint32_t dim) { return dim / 4; }

/* The scale of a row before it is rounded. largest: of its numbers, without sign; lanes: sums of the squares of number / largest.
 */
float fkv_turbo_scale(const fkv_codec *codec, float largest, const float lanes[FKV_TURBO_LANES]);

/* code: [D], a byte each -> row_bytes of codes. */
void fkv_turbo_pack(const fkv_codec *codec, const uint8_t *code, uint8_t *bytes);

/* What numbers are divided by before their code is looked for: scale, but never 0. */
FKV_INLINE float fkv_turbo_divisor(float scale) { return scale > 1e-30f ? scale : 1e-30f; }

#endif
