/* Codecs define how a row of D values is quantized and dequantized. This code is the reference definition of the format.
 *
 * A codec stores a row in up to three parts, which are separate arrays in a page: codes, scales and biases. Each kind has its own
 * file (half.c, affine.c, sealed.c, turbo.c, calibrated.c) with one fkv_codec_functions. Only codec.c maps a kind to its
 * functions. Each device has a table of kernels for every codec. The pager, store, cache and models treat pages as opaque bytes.
 * docs/architecture.md explains how to add a kind.
 *
 * Stored values are always finite. NaN is stored as 0, and values beyond +-fkv_codec_limit() are clamped. The limit is 65504 for
 * FKV_F16. For FKV_BF16 it is 2^96, so that the range of a group, the values of a rotated row and the sum of 2^31 rows do not
 * overflow a float.
 */
#ifndef FKV_CODEC_H
#define FKV_CODEC_H

#include "../base/base.h"

typedef enum fkv_part { FKV_PART_CODES = 0, FKV_PART_SCALES = 1, FKV_PART_BIASES = 2, FKV_N_PARTS = 3 } fkv_part;

typedef struct fkv_codec {
    fkv_codec_kind kind;                      /* never FKV_CODEC_AUTO */
    fkv_type type;                            /* type of scales and biases, or of the row itself for 16-bit codecs */
    uint32_t bits;                            /* bits per value */
    uint32_t group;                           /* number of values that share a scale; equals `dim` if the codec has no groups */
    uint32_t dim;                             /* D */
    bool fitted;                              /* whether scale and bias are fitted by least squares; see affine.h */
    const struct fkv_channel_order *channels; /* channel order of calibrated keys (channel_order.h); NULL for other codecs and in
                                                 layouts that all heads share */
    uint32_t row_bytes[FKV_N_PARTS];          /* bytes per token in each part; 0 if the codec does not use the part */
    uint32_t page_bytes[FKV_N_PARTS];         /* bytes per page in each part, in addition to row_bytes per token */
} fkv_codec;

/* Name of a codec kind with a given bit width, such as "s4". */
typedef struct fkv_codec_name {
    const char *name;
    uint32_t bits;
} fkv_codec_name;

/* Flags for fkv_codec_functions.sides: the codec kind supports K, V or both. */
enum { FKV_ON_K = 1, FKV_ON_V = 2 };

/* Functions of a codec kind. Most kinds encode one row at a time. Kinds that encode a whole page at once (sealed.h) implement
 * decode_at() instead of encode() and decode(). They may store a part once per page instead of once per row (page_bytes). */
typedef struct fkv_codec_functions {
    const fkv_codec_name *names; /* terminated by an entry whose name is NULL */
    unsigned sides;              /* bit mask of FKV_ON_K and FKV_ON_V; 0 means both K and V */
    bool grouped;                /* true if groups of values share a scale, so that fkv_codec_config.group is used */
    uint32_t dim_multiple;       /* required divisor of the head dimension if the kind has no groups; 0 means ROW_MULTIPLE */
    bool rotates;                /* see fkv_codec_info */
    bool needs_rotation;         /* see fkv_codec_info */

    /* Returns FKV_BAD_CONFIG, with the bit width and group size in the message, if the codec kind does not support them. */
    fkv_status (*check)(fkv_codec_config config);

    /* Computes row_bytes and page_bytes. All other fields are already set. */
    void (*lay_out)(fkv_codec *codec);

    /* Adjusts the codec for rotated rows. NULL if rotated rows need no adjustment. */
    void (*rotated)(fkv_codec *codec);

    /* Implementations of fkv_codec_encode() and fkv_codec_decode() for this codec kind. */
    void (*encode)(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);
    void (*decode)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x);

    /* Decodes row `token` of a page. `part` holds the addresses of the page's codes, scales and biases. */
    void (*decode_at)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x);
} fkv_codec_functions;

extern const fkv_codec_functions fkv_codec_half;
extern const fkv_codec_functions fkv_codec_affine;
extern const fkv_codec_functions fkv_codec_sealed;
extern const fkv_codec_functions fkv_codec_sealed_v;
extern const fkv_codec_functions fkv_codec_turbo;
extern const fkv_codec_functions fkv_codec_calibrated;

/* Creates a codec. Returns FKV_BAD_CONFIG, with the rejected values in the message, in two cases: the kind, bit width or group
 * size is not supported, or the group size does not divide dim. */
fkv_status fkv_codec_make(fkv_codec_config config, uint32_t dim, fkv_type type, fkv_codec *codec);

/* Returns the canonical form of a configuration: an explicit kind, and group 0 if the kind has no groups. Unknown kinds are
 * returned unchanged. */
fkv_codec_config fkv_codec_canonical(fkv_codec_config config);

/* Adjusts a codec for rows that are rotated before they are encoded. */
void fkv_codec_rotated(fkv_codec *codec);

/* Returns whether both codecs use the same byte format. */
FKV_INTERNAL bool fkv_codec_same(const fkv_codec *a, const fkv_codec *b);

/* Returns the size, in bytes, of one part (codes, scales or biases) in a page. */
FKV_INLINE uint64_t fkv_codec_part_bytes(const fkv_codec *codec, fkv_part part, uint32_t page_tokens) {
    return (uint64_t)page_tokens * codec->row_bytes[part] + codec->page_bytes[part];
}

FKV_INLINE float fkv_codec_limit(fkv_type type) { return type == FKV_BF16 ? 0x1p96f : 65504.0f; }

/* Converts x to a value that pages can store: NaN becomes 0, and the magnitude is clamped to `limit`. The sign of -0 is kept. */
FKV_INLINE float fkv_codec_storable(float x, float limit) {
    float number = x == x ? x : 0.0f;
    float below = number > limit ? limit : number;
    return below < -limit ? -limit : below;
}

/* Applies fkv_codec_storable() to all values of x: [D]. Used for rows that are rotated before they are encoded. */
void fkv_codec_clean(const fkv_codec *codec, float *x);

/* Encodes the row x: [D]. For each part p, writes row_bytes[p] bytes to part[p], which may have any alignment. */
void fkv_codec_encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);

/* Decodes a row to x: [D]. part[p] points to the row's bytes in part p. */
void fkv_codec_decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x);

/* Decodes row `token` of a page; works for every codec kind. `part` holds the addresses of the page's codes, scales and biases.
 */
void fkv_codec_decode_at(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], uint32_t token, float *x);

#endif
