/* From a tensor of a file to a matrix that products take: its rows repacked, or left where they are mapped. */
#ifndef FKV_TENSOR_MATRIX_H
#define FKV_TENSOR_MATRIX_H

#include "../files/tensor_rows.h"

enum { FKV_COLUMN_ALIGN = 32 };

FKV_INLINE uint32_t fkv_packed_pad(uint32_t n) { return (uint32_t)fkv_align_up(n, FKV_COLUMN_ALIGN); }

/* Kind, sizes and table of a tensor's matrix, without panels or rows. Columns are padded to a multiple of 32. */
fkv_status fkv_tensor_matrix_shape(const fkv_tensor *tensor, fkv_matrix *matrix);

/* What setting a row of that many columns takes. */
uint64_t fkv_tensor_scratch_bytes(uint32_t n_cols);

/* Rows [row, row + n_rows) of a tensor as rows `to` on of a matrix with panels; columns that pad it become zeros. False: a scale
 * or a number is not finite as f16. */
bool fkv_tensor_set_rows(const fkv_tensor *tensor, uint32_t row, uint32_t n_rows, fkv_matrix *matrix, uint32_t to, void *scratch);

/* The matrix of a tensor that stays mapped, and must stay where it is. */
fkv_status fkv_tensor_map_matrix(const fkv_tensor *tensor, fkv_matrix *matrix);

/* The floats of a row side by side, wherever they lie. */
FKV_SEAM void fkv_tensor_gather_row(const fkv_tensor *tensor, uint32_t row, uint8_t *out);

/* Of a tensor in its file. */
uint64_t fkv_tensor_stored_bytes(const fkv_tensor *tensor);

#endif
