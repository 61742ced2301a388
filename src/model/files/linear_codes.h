/* Rows of weights whose codes and scales lie apart and not by rows, as the tools of Hugging Face store a linear layer. For
 * tensor_rows.c; quantization_methods.c joins the parts.
 *
 *   GPTQ  2, 3, 4 or 8 bits. qweight [C * bits / 32, R]: a row's codes go down a column of words, the lowest bits first. qzeros
 *         [C / group, R * bits / 32], scales [C / group, R].                                       scale * (code - zero)
 *   AWQ   4 bits. qweight [C, R / 8]: a word has the codes of 8 rows, in the order 0 2 4 6 1 3 5 7. qzeros and scales as above.
 *   FP8   floats of 8 bits (E4M3) [R, C], a scale for each block of group_rows x group.             scale * number
 *
 * Codes are packed as codes. FP8 becomes 16-bit floats, which hold its numbers but not every product with a scale: off by 2^-12
 * of themselves, and by 2^-25 where they are denormal.
 */
#ifndef FKV_LINEAR_CODES_H
#define FKV_LINEAR_CODES_H

#include "../../matrix/panels.h"
#include "weights.h"

struct fkv_linear_codes {
    uint32_t bits;       /* of a code */
    uint32_t group;      /* columns that share a scale */
    uint32_t group_rows; /* rows that do; 1 but for FP8 */
    uint32_t n_rows;     /* R: views have fewer */
    uint32_t zero_more;  /* added to a stored zero: GPTQ's first version stores one less */
    bool centered;       /* every zero is half of the range: packed as it is, to the bit */
    fkv_tensor_type scale_type;
    const uint8_t *scales;
    uint64_t scale_bytes;
    const uint8_t *zeros; /* NULL: FP8 */
};

fkv_matrix_kind fkv_linear_codes_kind(const fkv_tensor *tensor);

/* AWQ and GPTQ. codes: [C], scales and biases: [C / 32]: groups of more than 32 are repeated. */
void fkv_linear_codes_row(const fkv_tensor *tensor, uint32_t row, uint8_t *codes, float *scales, float *biases);

/* [C] */
void fkv_linear_codes_floats(const fkv_tensor *tensor, uint32_t row, float *out);

/* Whether all zeros of the whole tensor are half of the range. */
bool fkv_linear_codes_centered(const fkv_tensor *tensor);

#endif
