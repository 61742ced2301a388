/* Decodes a row of a tensor to integer codes with scales and biases, or to floats.
 *
 * Precision: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and TQ have f16 scales and are decoded exactly if scales do not exceed 500.
 * MXFP4 and NVFP4 are decoded exactly if scales are between 2^-24 and 2^15. Scales of the K and IQ formats are products of an
 * f16 value and an integer of 3 to 8 bits; they are rounded to f16, with a relative error of at most 2^-11, or an absolute
 * error of at most 2^-25 if subnormal. For K formats, the resulting error of a value is less than 1/64 of the step between
 * codes (1/32 for Q5_K), provided that zero is within the range of the group. test_tensor_rows checks these bounds.
 */
#ifndef FKV_TENSOR_ROWS_H
#define FKV_TENSOR_ROWS_H

#include "../../matrix/matrix.h"
#include "weights.h"

/* Returns the matrix kind to which a tensor is packed. *group receives the group size of that kind. */
FKV_INTERNAL fkv_matrix_kind fkv_tensor_matrix_kind(const fkv_tensor *tensor, uint32_t *group);

/* Returns the code table [16] if the tensor has a table kind, otherwise NULL. */
FKV_INTERNAL const int8_t *fkv_tensor_table(const fkv_tensor *tensor);

/* Decodes a row to codes [C], scales [C / group] and biases [C / group]. A value is scale * code + bias, with scale and bias
 * rounded to f16, or scale * table[code] for table kinds. */
FKV_INTERNAL void fkv_tensor_row_codes(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* Decodes a row to 16-bit floats, for types without an integer matrix kind (FP8 and MLX mxfp8). buffer: [4 * C] bytes, aligned
 * for floats; receives C 16-bit floats followed by zeros. Returns false if a value overflows. */
bool fkv_tensor_row_halves(const fkv_tensor *tensor, uint32_t row, uint8_t *buffer);

/* Decodes a row of any type to floats, exactly as the format defines it. Used for vectors and as the reference in tests. */
FKV_INTERNAL void fkv_tensor_row_floats(const fkv_tensor *tensor, uint32_t row, float *out);

/* Decodes norm weights, adding 1 if the file stores each weight minus 1. out: [C] */
FKV_INTERNAL void fkv_tensor_norm_floats(const fkv_tensor *tensor, const fkv_hparams *hparams, float *out);

#endif
