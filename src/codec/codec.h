/* How a row of D numbers becomes bits and back: the truth of the format.
 *
 * A codec stores one row in up to three parts that live apart in a page: codes, scales, biases. Each kind has a file of its own
 * (half.c, affine.c, sealed.c, turbo.c, calibrated.c) with one fkv_codec_functions; codec.c lists them and is the only place that
 * looks one up. Devices have a table of kernels each, by codec; pager, store, cache and models see bytes only.
 * docs/architecture.md says what a new kind touches.
 *
 * What is stored is always finite: NaN is stored as if it were 0, and values beyond +-fkv_codec_limit() as if they were the
 * limit: 65504 for FKV_F16, 2^96 for FKV_BF16, so that the range of a group, a rotation either way and the sum of 2^31 rows fit a
 * float.
 */
#ifndef FKV_CODEC_H
#define FKV_CODEC_H

#include "../base/base.h"

typedef enum fkv_part { FKV_PART_CODES = 0, FKV_PART_SCALES = 1, FKV_PART_BIASES = 2, FKV_N_PARTS = 3 } fkv_part;

typedef struct fkv_codec {
    fkv_codec_kind kind;                      /* never FKV_CODEC_AUTO */
    fkv_type type;                            /* of scales and biases, or of the 16-bit row itself */
    uint32_t bits;                            /* of a number */
    uint32_t group;                           /* numbers that share a scale; dim where there are no groups */
    uint32_t dim;                             /* D */
    bool fitted;                              /* affine.h */
    const struct fkv_channel_order *channels; /* channel_order.h: of FKV_CODEC_CALIBRATED in the block of one head; else NULL */
    uint32_t row_bytes[FKV_N_PARTS];          /* of one row in each part; 0 where the codec has no such part */
    uint32_t page_bytes[FKV_N_PARTS];         /* of what a part has once for a page, whatever its rows */
} fkv_codec;

/* The name of one width. */
typedef struct fkv_codec_name {
    const char *name;
    uint32_t bits;
} fkv_codec_name;

/* Sides that a kind is for. */
enum { FKV_ON_K = 1, FKV_ON_V = 2 };

/* What a kind brings. Rows are packed one at a time, but for kinds whose page is sealed as a whole (sealed.h): they have
 * decode_at() in place of encode() and decode(), and parts that a page has once (page_bytes), which every slot finds at the same
 * place. */
typedef struct fkv_codec_functions {
    const fkv_codec_name *names; /* ended by NULL */
    unsigned sides;              /* 0: both */
    bool grouped;                /* fkv_codec_config.group counts */
    uint32_t dim_multiple;       /* of the head dimension, where there are no groups; 0: what every head has */
    bool rotates;                /* fkv_codec_info */
    bool needs_rotation;         /* fkv_codec_info */

    /* Whether bits and group exist. FKV_BAD_CONFIG, with the numbers. */
    fkv_status (*check)(fkv_codec_config config);

    /* Fills row_bytes; the rest is set. */
    void (*lay_out)(fkv_codec *codec);

    /* NULL: rotated rows are like others. */
    void (*rotated)(fkv_codec *codec);

    /* As fkv_codec_encode() and fkv_codec_decode(). */
    void (*encode)(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);
    void (*decode)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x);

    /* Row `token` of a page; part: of the page's first row. */
    void (*decode_at)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x);
} fkv_codec_functions;

extern const fkv_codec_functions fkv_codec_half;
extern const fkv_codec_functions fkv_codec_affine;
extern const fkv_codec_functions fkv_codec_sealed;
extern const fkv_codec_functions fkv_codec_sealed_v;
extern const fkv_codec_functions fkv_codec_turbo;
extern const fkv_codec_functions fkv_codec_calibrated;

/* FKV_BAD_CONFIG, with the numbers, for a kind, width or group that does not exist or does not divide dim. */
fkv_status fkv_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, fkv_codec *codec);

/* The one way to write a codec: its kind named, group 0 where it has no groups. What does not exist is left as it is. */
fkv_codec_config fkv_codec_canonical(fkv_codec_config config);

/* Its rows come rotated from now on. */
void fkv_codec_rotated(fkv_codec *codec);

/* Whether both write and read the same bytes. */
FKV_SEAM bool fkv_codec_same(const fkv_codec *a, const fkv_codec *b);

/* Bytes of a part in a page. */
FKV_INLINE uint64_t fkv_codec_part_bytes(const fkv_codec *codec, fkv_part part, uint32_t page_tokens) {
    return (uint64_t)page_tokens * codec->row_bytes[part] + codec->page_bytes[part];
}

FKV_INLINE float fkv_codec_limit(fkv_type type) { return type == FKV_BF16 ? 0x1p96f : 65504.0f; }

/* What is stored in place of x. -0 stays -0. */
FKV_INLINE float fkv_codec_storable(float x, float limit) {
    float number = x == x ? x : 0.0f;
    float below = number > limit ? limit : number;
    return below < -limit ? -limit : below;
}

/* x: [D], in place: the storable numbers. For a row that is rotated before it is encoded. */
void fkv_codec_clean(const fkv_codec *codec, float *x);

/* x: [D] -> part[p]: row_bytes[p] bytes each, any alignment. */
void fkv_codec_encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);

/* part[p] -> x: [D]. */
void fkv_codec_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x);

/* Row `token` of a page of any kind. part: of the page's first row. */
void fkv_codec_decode_at(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x);

#endif
