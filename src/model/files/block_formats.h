/* The quantized block formats of ggml: the matrix kind of each type, and functions that unpack one block to codes.
 *
 *   kind AFFINE or CENTERED   value = scale * code + bias
 *   kind TABLE4               value = scale * table[code]; biases are 0
 *
 * The product of scale and code is exact in float. Only the addition of the bias may round, so values match the definition of the
 * format.
 */
#ifndef FKV_BLOCK_FORMATS_H
#define FKV_BLOCK_FORMATS_H

#include "../../matrix/panels.h"
#include "weights.h"

enum { FKV_MAX_BLOCK_COLS = 256, FKV_MAX_BLOCK_GROUPS = 16 };

/* Unpacks one block. codes: [columns of the block]; scales and biases: [groups of the block] */
typedef void (*fkv_unpack_fn)(const uint8_t *block, uint8_t *codes, float *scales, float *biases);

typedef struct fkv_block_format {
    fkv_unpack_fn unpack; /* NULL for float types */
    fkv_matrix_kind kind;
    const int8_t *table; /* [16] code table of TABLE4 kinds, otherwise NULL */
} fkv_block_format;

/* Table of all E2M1 values multiplied by 2, for MXFP4 and NVFP4. */
extern const int8_t FKV_TABLE_FP4[16];

const fkv_block_format *fkv_block_format_of(fkv_tensor_type type);

#endif
