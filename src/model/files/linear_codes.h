/* Decodes rows of AWQ, GPTQ and FP8 weights, which Hugging Face tools store as separate, column-oriented parts. Used by
 * tensor_rows.c; quantization_methods.c combines the parts.
 *
 *   GPTQ  2, 3, 4 or 8-bit codes. qweight [C * bits / 32, R]: a row's codes fill a column of words, lowest bits first. qzeros
 *         [C / group, R * bits / 32], scales [C / group, R].   value = scale * (code - zero)
 *   AWQ   4-bit codes. qweight [C, R / 8]: a word holds the codes of 8 rows, in the order 0 2 4 6 1 3 5 7. qzeros [C / group,
 *         R / 8], scales [C / group, R].                       value = scale * (code - zero)
 *   FP8   E4M3 values [R, C], one scale per block of group_rows x group.   value = scale * e4m3
 *
 * AWQ and GPTQ codes are repacked without loss. FP8 values are packed as 16-bit floats: the product of value and scale is
 * rounded, with a relative error of at most 2^-12, or an absolute error of at most 2^-25 if the result is subnormal.
 */
#ifndef FKV_LINEAR_CODES_H
#define FKV_LINEAR_CODES_H

#include "../../matrix/panels.h"
#include "weights.h"

struct fkv_linear_codes {
    uint32_t bits;        /* bits per code */
    uint32_t group;       /* number of columns that share a scale */
    uint32_t group_rows;  /* number of rows that share a scale; 1 except for FP8 */
    uint32_t n_rows;      /* number of rows of the whole tensor; a view may have fewer rows */
    uint32_t zero_offset; /* added to stored zero points: 1 for GPTQ version 1, which stores zero points minus 1; otherwise 0 */
    bool centered;        /* true if every zero point is half of the code range; 4-bit and 8-bit matrices then need no biases */
    fkv_tensor_type scale_type;
    const uint8_t *scales;
    uint64_t scale_bytes;
    const uint8_t *zeros; /* NULL for FP8 */
};

fkv_matrix_kind fkv_linear_codes_kind(const fkv_tensor *tensor);

/* Decodes an AWQ or GPTQ row to codes: [C], scales: [C / 32] and biases: [C / 32]. If the groups in the file are larger than 32,
 * their scales and biases are repeated. */
void fkv_linear_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* Decodes a row to floats. out: [C] */
void fkv_linear_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out);

/* Returns whether every zero point of the tensor is half of the code range. */
bool fkv_linear_codes_centered(const fkv_tensor *tensor);

#endif
