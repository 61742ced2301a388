/* A row of a tensor, in the two forms that matrices are set from: integer codes with scales and biases, or floats.
 *
 * How exact: Q4_0, Q4_1, Q5_0 and Q8_0 are affine with f16 numbers already and are kept to the bit (up to scales of 500, which no
 * model has). Q4_K and Q6_K have scales that are products of f16 and 6 or 8 bits and lose what f16 rounds: scale and bias 2^-11
 * of themselves, which is less than 1/64 of the step between two codes (Q4_K: where zero lies in the range of the group, else the
 * bias is larger and so is its rounding), and at most 2^-25 each where they are denormal. Proven by test_tensor_rows.
 */
#ifndef FKV_TENSOR_ROWS_H
#define FKV_TENSOR_ROWS_H

#include "../../matrix/matrix.h"
#include "weights.h"

/* The kind and group a tensor is packed as: Q4_1, Q4_K -> AFFINE4; Q4_0, Q5_0, Q8_0 -> CENTERED4, 5, 8; Q6_K -> CENTERED6 with
 * groups of 16, all others of 32; floats as they are. */
fkv_matrix_kind fkv_tensor_matrix_kind(const fkv_tensor *tensor, uint32_t *group);

/* codes: [C], scales and biases: [C / group], for the affine kinds: scale * code + bias is the number once scale and bias are
 * rounded to f16. */
FKV_SEAM void fkv_tensor_row_codes(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* Any type to floats, exactly as the format's definition says: the truth, and for vectors (norms, biases). */
FKV_SEAM void fkv_tensor_row_floats(const fkv_tensor *tensor, uint32_t row, float *out);

/* The weights of a norm as a model of these hyperparameters uses them: the one row of the tensor, 1 + w where it is stored so.
 * out: [C] */
FKV_SEAM void fkv_tensor_norm_floats(const fkv_tensor *tensor, const fkv_hparams *hparams, float *out);

#endif
