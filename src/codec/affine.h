/* Affine groups: value = scale * code + bias. Codes are packed LSB-first in 32-bit words, exactly as mlx.core.quantize packs the
 * codes of float16 (FKV_F16) or bfloat16 (FKV_BF16) rows. This header declares the arithmetic that vector kernels share with
 * affine.c.
 *
 * MLX does not rotate rows, so the codes of rotated rows need not match those of MLX. For rotated rows with 4 bits or fewer,
 * flatkv chooses a scale and bias (a line) that reduce the error. The initial line passes through the minimum and the maximum of
 * the group. It is then refitted FKV_REFITS times: the values are quantized with the current line, and a new line is fitted to
 * the codes and values by least squares. Decoding is unchanged. For Gaussian rows, refitting reduces the squared error by 13 % (4
 * bits, groups of 64), 20 % (4 bits, groups of 32) and 44 % (2 bits, groups of 64).
 */
#ifndef FKV_AFFINE_H
#define FKV_AFFINE_H

#include "codec.h"

/* Scale and bias of an affine group, before they are rounded to the 16-bit type of the page. */
typedef struct fkv_affine {
    float scale;
    float bias;
} fkv_affine;

/* Computes the scale and bias of a group from its minimum `lo` and maximum `hi`, as specified in affine.c. `bins` is the largest
 * code. Least-squares refits start from this result. */
fkv_affine fkv_codec_line(const fkv_codec *codec, float lo, float hi, float bins);

/* Sums over the values of a group, for a least-squares refit. For a value x with code c, let p = (x - bias) / scale. The arrays
 * hold the sums of c, c * c, p and c * p. Value j is added to lane j % 16, in ascending order of j. */
enum { FKV_REFITS = 3, FKV_CODEC_LANES = 16 };
typedef struct fkv_refit {
    float c[FKV_CODEC_LANES];
    float cc[FKV_CODEC_LANES];
    float p[FKV_CODEC_LANES];
    float cp[FKV_CODEC_LANES];
} fkv_refit;

/* Returns the scale and bias that best fit a group's values (least squares), given the codes that `line` assigns to the values.
 * `sums` holds the sums over these codes and values. */
fkv_affine fkv_codec_refit(const fkv_codec *codec, fkv_affine line, const fkv_refit *sums);

#endif
