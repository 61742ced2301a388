/* A row of a tensor, in the two forms that matrices are set from: integer codes with scales and biases, or floats.
 *
 * How exact: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and TQ have f16 numbers already and are kept to the bit (up to scales of 500,
 * which no model has), as are MXFP4 and NVFP4 with scales of 2^-24 to 2^15. The K and IQ formats have scales that are products of
 * f16 and 3 to 8 bits and lose what f16 rounds: scale and bias 2^-11 of themselves, which for K formats is less than 1/64 (Q5_K:
 * 1/32) of the step between two codes (with a bias: where zero lies in the range of the group, else the bias is larger and so is
 * its rounding), and at most 2^-25 each where they are denormal. Proven by test_tensor_rows.
 */
#ifndef FKV_TENSOR_ROWS_H
#define FKV_TENSOR_ROWS_H

#include "../../matrix/matrix.h"
#include "weights.h"

/* The kind and group a tensor is packed as. */
FKV_SEAM fkv_matrix_kind fkv_tensor_matrix_kind(const fkv_tensor *tensor, uint32_t *group);

/* [16] numbers that codes stand for, of the kinds with a table; else NULL. */
FKV_SEAM const int8_t *fkv_tensor_table(const fkv_tensor *tensor);

/* codes: [C], scales and biases: [C / group]: scale * code + bias is the number once scale and bias are rounded to f16; with a
 * table, scale * table[code]. */
FKV_SEAM void fkv_tensor_row_codes(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* The types that are packed as 16-bit floats and are none in the file (FP8, MLX's mxfp8). room: [4 C] bytes, aligned for floats;
 * becomes C 16-bit floats and zeros. False: a number is not finite as such. */
bool fkv_tensor_row_halves(const fkv_tensor *tensor, uint32_t row, uint8_t *room);

/* Any type to floats, exactly as the format's definition says: the truth, and for vectors (norms, biases). */
FKV_SEAM void fkv_tensor_row_floats(const fkv_tensor *tensor, uint32_t row, float *out);

/* The weights of a norm as a model of these hyperparameters uses them: the one row of the tensor, 1 + w where it is stored so.
 * out: [C] */
FKV_SEAM void fkv_tensor_norm_floats(const fkv_tensor *tensor, const fkv_hparams *hparams, float *out);

#endif
