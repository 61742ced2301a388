/* Multi-head latent attention on MLX, with absorbed projections; ../forward/latent.h states the equations. As on the CPU, the
 * latent channels and the RoPE channels are zero-padded to the multiples that the codecs require.
 */
#include "array_pass.h"

static uint32_t latent_pad(const fkv_array_pass *p) { return fkv_runner_head_pad(p->r, p->r->model->hparams->latent.dim); }

static mlx_array latent_norm(const fkv_array_pass *p, mlx_array x, mlx_array weight) {
    const fkv_hparams *h = p->r->model->hparams;
    return fkv_model_op_rms_norm(p->g, x, weight, h->latent.norm_eps != 0.0f ? h->latent.norm_eps : h->norm_eps);
}

/* Pads both parts of keys or queries and concatenates them: [T, n, dim] and [T, n, rope_dim] -> [T, n, key_pad]. */
static mlx_array join_key(const fkv_array_pass *p, mlx_array latent, mlx_array rope, int n_heads) {
    const fkv_latent *l = &p->r->model->hparams->latent;
    const uint32_t rope_pad = fkv_runner_rope_pad(p->r->model->hparams);
    rope = fkv_array_rotate(p, rope, n_heads, l->rope_dim);
    if (latent_pad(p) != l->dim) latent = fkv_model_op_widen(p->g, latent, (int)latent_pad(p));
    if (rope_pad != l->rope_dim) rope = fkv_model_op_widen(p->g, rope, (int)rope_pad);
    return fkv_model_op_beside(p->g, latent, rope);
}

mlx_array fkv_array_latent_keys(const fkv_array_pass *p, fkv_array_rows in) {
    const fkv_latent *l = &p->r->model->hparams->latent;
    const fkv_array_layer *w = p->layer;
    mlx_array kv = fkv_array_plus(p, fkv_array_product_of_input(p, in, &w->kv_a), w->kv_a_bias);
    mlx_array latent = latent_norm(p, fkv_array_channels(p, kv, 0, l->dim), w->kv_a_norm);
    mlx_array rope = fkv_array_channels(p, kv, l->dim, l->dim + l->rope_dim);
    latent = fkv_mlx_reshape(p->g, latent, FKV_MLX_SHAPE(p->n_rows, 1, (int)l->dim));
    return join_key(p, latent, fkv_mlx_reshape(p->g, rope, FKV_MLX_SHAPE(p->n_rows, 1, (int)l->rope_dim)), 1);
}

mlx_array fkv_array_latent_queries(const fkv_array_pass *p, fkv_array_rows in) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_latent *l = &h->latent;
    const fkv_array_layer *w = p->layer;
    const int n_heads = (int)h->n_q_heads;
    const int nope = (int)l->nope_dim;
    const int dim = nope + (int)l->rope_dim;
    if (l->q_dim != 0) {
        mlx_array low = fkv_array_plus(p, fkv_array_product_of_input(p, in, &w->q_a), w->q_a_bias);
        in = fkv_array_row_slice(p, latent_norm(p, low, w->q_a_norm));
    }
    mlx_array q = l->q_dim != 0 ? fkv_array_product(p, in, &w->q) : fkv_array_product_of_input(p, in, &w->q);
    q = fkv_mlx_reshape(p->g, q, FKV_MLX_SHAPE(p->n_rows, n_heads, dim));
    if (p->temperatures.ctx != NULL && fkv_runner_has_temperature(p->r, p->index)) q = fkv_mlx_multiply(p->g, q, p->temperatures);
    mlx_array latent = fkv_array_product_of_heads(p, fkv_model_op_columns(p->g, q, 0, nope), w->k_up);
    return join_key(p, latent, fkv_model_op_columns(p->g, q, nope, dim), n_heads);
}

mlx_array fkv_array_latent_values(const fkv_array_pass *p, mlx_array attended) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_latent *l = &h->latent;
    if (latent_pad(p) != l->dim) attended = fkv_model_op_columns(p->g, attended, 0, (int)l->dim);
    mlx_array values = fkv_array_product_of_heads(p, attended, p->layer->v_up);
    return fkv_mlx_reshape(p->g, values, FKV_MLX_SHAPE(p->n_rows, (int)(h->n_q_heads * l->v_dim)));
}
