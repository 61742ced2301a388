/* Affine groups: value = scale * code + bias, codes LSB-first in 32-bit words, exactly as mlx.core.quantize does for float16
 * (FKV_F16) or bfloat16 (FKV_BF16) rows. Here is what vector kernels need to make the same codes.
 *
 * Rotated rows have no counterpart in MLX, so in 4 bits and fewer their line is fitted: it starts through the smallest and the
 * largest number and is moved FKV_REFITS times to the least squares line of its own codes. A reader sees no difference. The
 * squared error of Gaussian rows falls by 13 % (4 bits, groups of 64), 20 % (4 bits, groups of 32) and 44 % (2 bits, groups of
 * 64).
 */
#ifndef FKV_AFFINE_H
#define FKV_AFFINE_H

#include "codec.h"

/* The line of an affine group before it is rounded to the page type. */
typedef struct fkv_affine {
    float scale;
    float bias;
} fkv_affine;

/* From the smallest and the largest number of the group; bins: the largest code. For a fitted codec only the start. */
fkv_affine fkv_codec_line(const fkv_codec *codec, float lo, float hi, float bins);

/* What a refit knows of the codes c and the places p = (x - bias) / scale of a group: sums in 16 lanes, number j in lane j % 16,
 * from first to last. */
enum { FKV_REFITS = 3, FKV_CODEC_LANES = 16 };
typedef struct fkv_refit {
    float c[FKV_CODEC_LANES];
    float cc[FKV_CODEC_LANES];
    float p[FKV_CODEC_LANES];
    float cp[FKV_CODEC_LANES];
} fkv_refit;

/* The least squares line of the codes that `line` gave. */
fkv_affine fkv_codec_refit(const fkv_codec *codec, fkv_affine line, const fkv_refit *sums);

#endif
