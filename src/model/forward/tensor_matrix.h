/* Converts tensors of a file to matrices for the kernels, either repacked or read from the mapped file. */
#ifndef FKV_TENSOR_MATRIX_H
#define FKV_TENSOR_MATRIX_H

#include "../files/tensor_rows.h"

enum { FKV_COLUMN_ALIGN = 32 };

FKV_INLINE uint32_t fkv_packed_pad(uint32_t n) { return (uint32_t)fkv_align_up(n, FKV_COLUMN_ALIGN); }

/* Sets the kind, sizes and code table of the matrix for a tensor, but not its panels or rows. Columns are padded to a multiple of
 * 32. */
fkv_status fkv_tensor_matrix_shape(const fkv_tensor *tensor, fkv_matrix *matrix);

/* Returns the scratch bytes needed to convert a row of n_cols columns. */
uint64_t fkv_tensor_scratch_bytes(uint32_t n_cols);

/* Copies rows [row, row + n_rows) of a tensor to rows [to, to + n_rows) of a matrix with panels, zero-padding the columns.
 * Returns false if a value or scale overflows f16. */
bool fkv_tensor_set_rows(const fkv_tensor *tensor, uint32_t row, uint32_t n_rows, fkv_matrix *matrix, uint32_t to, void *scratch);

/* Makes a matrix that reads its rows from the mapped tensor. The matrix keeps a pointer to the tensor struct, which must stay
 * valid while the matrix is in use. */
fkv_status fkv_tensor_map_matrix(const fkv_tensor *tensor, fkv_matrix *matrix);

/* Copies a row of a float tensor to contiguous memory. The columns of the row may be strided (col_step). */
FKV_INTERNAL void fkv_tensor_gather_row(const fkv_tensor *tensor, uint32_t row, uint8_t *out);

/* Returns the size of a tensor in its file, in bytes. */
uint64_t fkv_tensor_stored_bytes(const fkv_tensor *tensor);

#endif
