/* Blocks of quantized numbers, the formats of ggml: what each type is packed as, and one block of it as codes.
 *
 *   kind AFFINE or CENTERED   value = scale * code + bias
 *   kind TABLE4               value = scale * table[code]; biases are 0
 *
 * In float every product here is exact and at most one addition rounds, so the value is what the format's definition gives.
 */
#ifndef FKV_BLOCK_FORMATS_H
#define FKV_BLOCK_FORMATS_H

#include "../../matrix/panels.h"
#include "weights.h"

enum { FKV_MAX_BLOCK_COLS = 256, FKV_MAX_BLOCK_GROUPS = 16 };

/* codes: [columns of a block], scales and biases: [its groups] */
typedef void (*fkv_unpack_fn)(const uint8_t *block, uint8_t *codes, float *scales, float *biases);

typedef struct fkv_block_format {
    fkv_unpack_fn unpack; /* NULL: floats */
    fkv_matrix_kind kind;
    const int8_t *table; /* [16] of TABLE4 */
} fkv_block_format;

/* Twice the numbers of E2M1, as MXFP4 and NVFP4 have them. */
extern const int8_t FKV_TABLE_FP4[16];

const fkv_block_format *fkv_block_format_of(fkv_tensor_type type);

#endif
