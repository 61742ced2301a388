/* See array_pass.h. */
#include "array_pass.h"

/* ---- products ---- */

fkv_array_rows fkv_array_row_slice(const fkv_array_pass *p, mlx_array x) {
    return (fkv_array_rows){x, fkv_mlx_astype(p->g, x, MLX_FLOAT16)};
}

mlx_array fkv_array_product(const fkv_array_pass *p, fkv_array_rows x, const fkv_array_matrix *m) {
    mlx_array in = m->rows == MLX_FLOAT16 ? x.half : x.full;
    mlx_array out =
        m->is_coded ? fkv_mlx_product(&p->r->arrays->products, p->g, in, &m->affine) : fkv_mlx_matmul(p->g, in, m->across);
    return m->rows == MLX_FLOAT16 ? fkv_mlx_astype(p->g, out, MLX_FLOAT32) : out;
}

mlx_array fkv_array_product_of_large(const fkv_array_pass *p, mlx_array x, const fkv_array_matrix *m) {
    if (m->rows != MLX_FLOAT16) return fkv_array_product(p, (fkv_array_rows){x, x}, m);
    mlx_array size = fkv_model_op_row_size(p->g, x);
    mlx_array unit = fkv_mlx_astype(p->g, fkv_mlx_divide(p->g, x, size), MLX_FLOAT16);
    return fkv_mlx_multiply(p->g, fkv_array_product(p, (fkv_array_rows){x, unit}, m), size);
}

mlx_array fkv_array_product_of_heads(const fkv_array_pass *p, mlx_array x, mlx_array matrices) {
    fkv_mlx_graph *g = p->g;
    const fkv_mlx_shape swapped = FKV_MLX_SHAPE(1, 0, 2);
    mlx_array by_head = fkv_mlx_transpose(g, x, swapped);
    if (g->failed) return by_head;
    const bool is_half = mlx_array_dtype(matrices) == MLX_FLOAT16;
    mlx_array size = is_half ? fkv_model_op_row_size(g, by_head) : (mlx_array){NULL};
    if (is_half) by_head = fkv_mlx_astype(g, fkv_mlx_divide(g, by_head, size), MLX_FLOAT16);
    mlx_array out = fkv_mlx_matmul(g, by_head, matrices);
    if (is_half) out = fkv_mlx_multiply(g, fkv_mlx_astype(g, out, MLX_FLOAT32), size);
    return fkv_mlx_transpose(g, out, swapped);
}

mlx_array fkv_array_channels(const fkv_array_pass *p, mlx_array rows, uint32_t from, uint32_t to) {
    return fkv_mlx_slice(p->g, rows, FKV_MLX_SHAPE(0, (int)from), FKV_MLX_SHAPE(p->n_rows, (int)to));
}

mlx_array fkv_array_plus(const fkv_array_pass *p, mlx_array x, mlx_array vector) {
    return vector.ctx == NULL ? x : fkv_mlx_add(p->g, x, vector);
}

mlx_array fkv_array_rms_norm(const fkv_array_pass *p, mlx_array x, mlx_array weight) {
    return weight.ctx == NULL ? x : fkv_model_op_rms_norm(p->g, x, weight, p->r->model->hparams->norm_eps);
}

mlx_array fkv_array_norm(const fkv_array_pass *p, mlx_array x, mlx_array weight, mlx_array bias) {
    const fkv_hparams *h = p->r->model->hparams;
    if (weight.ctx == NULL || h->features.norm == FKV_NORM_RMS) return fkv_array_rms_norm(p, x, weight);
    return fkv_model_op_layer_norm(p->g, x, weight, bias, h->norm_eps);
}

mlx_array fkv_array_product_of_input(const fkv_array_pass *p, fkv_array_rows x, const fkv_array_matrix *m) {
    return p->r->model->hparams->features.no_pre_norms ? fkv_array_product_of_large(p, x.full, m) : fkv_array_product(p, x, m);
}

mlx_array fkv_array_number(const fkv_array_pass *p, float value) { return fkv_mlx_adopt(p->g, mlx_array_new_float32(value)); }

/* ---- RoPE ---- */

static mlx_array swap_last(const fkv_array_pass *p, mlx_array x) { return fkv_mlx_transpose(p->g, x, FKV_MLX_SHAPE(0, 1, 3, 2)); }

/* Rotates the channel pairs of [T, n_heads, 2 * n_pairs]: (2 * i, 2 * i + 1) or (i, i + n_pairs). In the second case, the two
 * channels of a pair are made adjacent before the rotation. */
static mlx_array apply_rope(const fkv_array_pass *p, mlx_array x, int n_heads) {
    const int n = p->n_pairs;
    const bool side_by_side = p->r->model->hparams->rope_interleaved;
    const fkv_mlx_shape pairs = side_by_side ? FKV_MLX_SHAPE(p->n_rows, n_heads, n, 2) : FKV_MLX_SHAPE(p->n_rows, n_heads, 2, n);
    mlx_array y = fkv_mlx_reshape(p->g, x, pairs);
    if (!side_by_side) y = swap_last(p, y);
    y = fkv_mlx_view(p->g, fkv_mlx_multiply(p->g, fkv_mlx_view(p->g, y, MLX_COMPLEX64), p->angles), MLX_FLOAT32);
    if (!side_by_side) y = swap_last(p, y);
    return fkv_mlx_reshape(p->g, y, FKV_MLX_SHAPE(p->n_rows, n_heads, 2 * n));
}

mlx_array fkv_array_rotate(const fkv_array_pass *p, mlx_array heads, int n_heads, uint32_t dim) {
    const int turning = 2 * p->n_pairs;
    if (p->angles.ctx == NULL) return heads;
    if (turning == (int)dim) return apply_rope(p, heads, n_heads);
    mlx_array turned = apply_rope(p, fkv_model_op_columns(p->g, heads, 0, turning), n_heads);
    return fkv_model_op_beside(p->g, turned, fkv_model_op_columns(p->g, heads, turning, (int)dim));
}
