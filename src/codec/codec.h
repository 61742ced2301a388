/* How a row of D numbers becomes bits and back: the truth of the format.
 *
 * A codec stores one row in up to three parts that live apart in a page: codes, scales, biases. An affine group stores
 * value = scale * code + bias, codes LSB-first in 32-bit words, exactly as mlx.core.quantize does for float16 (FKV_F16) or
 * bfloat16 (FKV_BF16) rows. 16 bits are the row itself in one part. A codec with other parts (a codebook with a norm, say) is
 * a new kind here and a new tile kernel in src/attn; pager, cache and models see only row_bytes.
 *
 * Rotated rows are nobody else's, so in 4 bits and fewer their line is fitted: it starts through the smallest and the largest
 * number and is moved FKV_REFITS times to the least squares line of its own codes. A reader sees no difference. The squared error
 * of Gaussian rows falls by 13 % (4 bits, groups of 64), 20 % (4 bits, groups of 32) and 44 % (2 bits, groups of 64).
 *
 * What is stored is always finite: NaN is stored as if it were 0, and values beyond +-fkv_codec_limit() as if they were the
 * limit (65504 for FKV_F16, 2^126 for FKV_BF16, so that the range of a group fits a float).
 */
#ifndef FKV_CODEC_H
#define FKV_CODEC_H

#include "../base/base.h"

typedef enum fkv_codec_kind { FKV_CODEC_HALF = 0, FKV_CODEC_AFFINE = 1 } fkv_codec_kind;

typedef enum fkv_part { FKV_PART_CODES = 0, FKV_PART_SCALES = 1, FKV_PART_BIASES = 2, FKV_N_PARTS = 3 } fkv_part;

typedef struct fkv_codec {
    fkv_codec_kind kind;
    fkv_type type;                   /* of scales and biases, or of the 16-bit row itself */
    uint32_t bits;                   /* 16, 8, 4, 2 */
    uint32_t group;                  /* dim for 16 bits */
    uint32_t dim;                    /* D */
    bool fitted;                     /* see above */
    uint32_t row_bytes[FKV_N_PARTS]; /* of one row in each part; 0 where the codec has no such part */
} fkv_codec;

/* FKV_BAD_CONFIG, with the numbers, for a width or group that does not exist or does not divide dim. */
fkv_status fkv_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, fkv_codec *codec);

/* Its rows come rotated: 4 bits and fewer are fitted from now on. */
void fkv_codec_rotated(fkv_codec *codec);

float fkv_codec_limit(fkv_type type);

/* The line of an affine group before it is rounded to the page type: value = scale * code + bias. */
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

/* x: [D], in place: the storable numbers. For a row that is rotated before it is encoded. */
void fkv_codec_clean(const fkv_codec *codec, float *x);

/* x: [D] -> part[p]: row_bytes[p] bytes each, any alignment. */
void fkv_codec_encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);

/* part[p] -> x: [D]. */
void fkv_codec_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x);

#endif
