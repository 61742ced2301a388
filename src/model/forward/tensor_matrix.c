/* Converts tensors of weight files to matrices for the kernels; see tensor_matrix.h. */
#include "tensor_matrix.h"

fkv_status fkv_tensor_matrix_shape(const fkv_tensor *tensor, fkv_matrix *matrix) {
    uint32_t group = 0;
    fkv_matrix_kind kind = fkv_tensor_matrix_kind(tensor, &group);
    FKV_TRY(fkv_matrix_make(kind, group, tensor->n_rows, fkv_packed_pad(tensor->n_cols), matrix));
    matrix->table = fkv_tensor_table(tensor);
    return FKV_OK;
}

uint64_t fkv_tensor_scratch_bytes(uint32_t n_cols) { return fkv_align_up((uint64_t)n_cols * (sizeof(float) + 1), 64); }

void fkv_tensor_gather_row(const fkv_tensor *tensor, uint32_t row, uint8_t *out) {
    const uint8_t *from = tensor->data + row * tensor->row_bytes;
    size_t bytes = tensor->type == FKV_TENSOR_F32 ? sizeof(float) : sizeof(uint16_t);
    if (tensor->col_step == 0) {
        memcpy(out, from, tensor->row_bytes);
        return;
    }
    for (uint32_t i = 0; i < tensor->n_cols; i++) memcpy(out + i * bytes, from + i * tensor->col_step, bytes);
}

static bool set_codes(const fkv_tensor *tensor, uint32_t row, fkv_matrix *matrix, uint32_t to, float *scratch) {
    uint32_t n_groups = matrix->n_cols / matrix->group;
    float *biases = scratch + n_groups;
    uint8_t *codes = (uint8_t *)(biases + n_groups);
    fkv_tensor_row_codes(tensor, row, codes, scratch, biases);
    return fkv_matrix_set_codes(matrix, to, codes, scratch, biases);
}

bool fkv_tensor_set_rows(const fkv_tensor *tensor, uint32_t row, uint32_t n_rows, fkv_matrix *matrix, uint32_t to,
                         void *scratch) {
    bool finite = true;
    if (matrix->n_cols != tensor->n_cols) memset(scratch, 0, (size_t)fkv_tensor_scratch_bytes(matrix->n_cols));
    for (uint32_t i = 0; i < n_rows; i++) {
        if (matrix->group != 0) {
            finite = set_codes(tensor, row + i, matrix, to + i, scratch) && finite;
        } else {
            if (tensor->type <= FKV_TENSOR_BF16)
                fkv_tensor_gather_row(tensor, row + i, scratch);
            else
                finite = fkv_tensor_row_halves(tensor, row + i, scratch) && finite;
            fkv_matrix_set_floats(matrix, to + i, scratch);
        }
    }
    return finite;
}

/* ---- mapped matrices ---- */

static bool set_panel(const void *source, uint32_t row, uint32_t n_rows, fkv_matrix *panel, void *scratch) {
    return fkv_tensor_set_rows(source, row, n_rows, panel, 0, scratch);
}

static fkv_row_form mapped_row_form(const fkv_tensor *tensor) {
    switch (tensor->type) {
    case FKV_TENSOR_Q4_0: return FKV_ROWS_Q4_0;
    case FKV_TENSOR_Q8_0: return FKV_ROWS_Q8_0;
    case FKV_TENSOR_Q4_K: return FKV_ROWS_Q4_K;
    case FKV_TENSOR_Q6_K: return FKV_ROWS_Q6_K;
    case FKV_TENSOR_MXFP4: return FKV_ROWS_MXFP4;
    default: return FKV_ROWS_OTHER;
    }
}

fkv_status fkv_tensor_map_matrix(const fkv_tensor *tensor, fkv_matrix *matrix) {
    FKV_TRY(fkv_tensor_matrix_shape(tensor, matrix));
    matrix->rows = (fkv_matrix_rows){.set = set_panel,
                                     .source = tensor,
                                     .scratch_bytes = fkv_tensor_scratch_bytes(matrix->n_cols),
                                     .form = mapped_row_form(tensor),
                                     .data = tensor->data,
                                     .row_bytes = tensor->row_bytes};
    return FKV_OK;
}

uint64_t fkv_tensor_stored_bytes(const fkv_tensor *tensor) {
    uint64_t row = fkv_tensor_row_size(tensor);
    if (tensor->col_step != 0) row = (uint64_t)tensor->n_cols * fkv_tensor_format_of(tensor->type)->block_bytes;
    if (tensor->bits != 0) {
        uint64_t scale = fkv_tensor_format_of(tensor->scale_type)->block_bytes;
        row += tensor->n_cols / tensor->group * (tensor->biases != NULL ? 2 * scale : scale);
    }
    return tensor->n_rows * row;
}
