/* Decodes rows of MLX's quantized arrays, whose codes, scales and biases are stored separately. Used by tensor_rows.c.
 *
 *   MLX_AFFINE  2, 3, 4, 5, 6 or 8-bit codes, packed from the lowest bit; float scales and biases, groups of 32, 64 or 128
 *               value = scale * code + bias
 *   MLX_MXFP4   4-bit codes, groups of 32, 8-bit exponent e (also gpt-oss in safetensors)
 *               value = 2 ^ (e - 128) * table[code]
 *   MLX_NVFP4   4-bit codes, groups of 16, E4M3 scales
 *               value = scale / 2 * table[code]
 *   MLX_MXFP8   E4M3 values, groups of 32, 8-bit exponent e; packed as 16-bit floats
 *               value = 2 ^ (e - 127) * e4m3
 */
#ifndef FKV_ARRAY_CODES_H
#define FKV_ARRAY_CODES_H

#include "../../matrix/panels.h"
#include "weights.h"

fkv_matrix_kind fkv_array_codes_kind(const fkv_tensor *tensor);

/* Decodes a row to codes: [C], scales: [C / group] and biases: [C / group], where group is the group size of the matrix kind. If
 * the groups in the file are larger than that, their scales and biases are repeated. */
void fkv_array_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* Decodes a row to floats. out: [C] */
void fkv_array_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out);

#endif
