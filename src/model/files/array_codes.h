/* Rows of MLX's quantized arrays, whose codes, scales and biases lie apart. For tensor_rows.c.
 *
 *   MLX_AFFINE  2, 3, 4, 5, 6 or 8 bits, one after another from the lowest bit of a row on; scales and biases are floats, in
 *               groups of 32, 64 or 128.                           scale * code + bias
 *   MLX_MXFP4   4 bits, groups of 32, a byte e for a scale.        2 ^ (e - 128) * table[code]; gpt-oss in safetensors too
 *   MLX_NVFP4   4 bits, groups of 16, scales of 8 bits (E4M3).     scale / 2 * table[code]
 *   MLX_MXFP8   8 bits (E4M3), groups of 32, a byte e for a scale. 2 ^ (e - 127) * number; packed as 16-bit floats
 */
#ifndef FKV_ARRAY_CODES_H
#define FKV_ARRAY_CODES_H

#include "../../matrix/panels.h"
#include "weights.h"

fkv_matrix_kind fkv_array_codes_kind(const fkv_tensor *tensor);

/* codes: [C], scales and biases: [C / group of the kind]: groups of more than 32 are repeated. */
void fkv_array_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* [C] */
void fkv_array_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out);

#endif
