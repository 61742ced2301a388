/* The forward pass on MLX, for every architecture: the counterpart of the CPU's forward pass (../forward/forward.c). It builds
 * lazy operations that are evaluated once, at the end of the step. The host reads no results before the logits are complete.
 *
 * The residual stream and all values between two matrix products are f32. Products with half-precision matrices, and on a GPU
 * also products with quantized matrices, take f16 rows, accumulate in f32 and return f16. Normalized rows fit the range of f16.
 * The input of the down projection may exceed that range. Each of its rows is therefore divided by the largest magnitude of the
 * row before the product.
 *
 * RoPE angles are computed on the host in double, because MLX's own RoPE multiplies in f32, with an error of 0.01 radians at
 * position 131072. A channel pair is treated as a complex number, so its rotation is one complex multiplication.
 *
 * In the last layer, only rows whose logits are requested continue after attention. If no logits are requested, attention is
 * skipped.
 */
#include "array_runner.h"
#include "model_ops.h"

#include <flatkv/mlx.h>
#include <math.h>

typedef struct pass {
    fkv_runner *r;
    fkv_mlx_graph *g;
    fkv_step *step;
    const fkv_array_layer *layer;
    const fkv_layer_shape *shape; /* shape of the current layer */
    uint32_t index;
    int n_pairs;
    mlx_array angles;       /* RoPE factors, complex [T, 1, n_pairs, 1]; empty if the layer has no RoPE */
    mlx_array inputs;       /* per-layer inputs [T, n_layers, input_dim]; empty if the model has none */
    mlx_array temperatures; /* query temperature [T, 1, 1]; empty means 1 */
    int n_rows; /* number of rows: T, or after the attention of the last layer, the number of rows with requested logits */
} pass;

/* The same activation rows in f32 and in f16, for matrix products of either type. An array that no product uses is never
 * evaluated. */
typedef struct rows {
    mlx_array full;
    mlx_array half;
} rows;

/* ---- products ---- */

static bool has_array(const fkv_array_matrix *m) { return m->halves.ctx != NULL || m->affine.codes.ctx != NULL; }

static rows row_slice(const pass *p, mlx_array x) { return (rows){x, fkv_mlx_astype(p->g, x, MLX_FLOAT16)}; }

/* Multiplies rows by a matrix: [T, C] -> [T, R], f32. */
static mlx_array product(const pass *p, rows x, const fkv_array_matrix *m) {
    mlx_array in = m->rows == MLX_FLOAT16 ? x.half : x.full;
    mlx_array out = m->is_coded ? fkv_mlx_quantized_matmul(p->g, in, &m->affine, true) : fkv_mlx_matmul(p->g, in, m->across);
    return m->rows == MLX_FLOAT16 ? fkv_mlx_astype(p->g, out, MLX_FLOAT32) : out;
}

/* Multiplies rows, whose values may exceed the range of f16, by a matrix: [T, C] -> [T, R], f32. */
static mlx_array product_of_large(const pass *p, mlx_array x, const fkv_array_matrix *m) {
    if (m->rows != MLX_FLOAT16) return product(p, (rows){x, x}, m);
    mlx_array size = fkv_model_op_row_size(p->g, x);
    mlx_array unit = fkv_mlx_astype(p->g, fkv_mlx_divide(p->g, x, size), MLX_FLOAT16);
    return fkv_mlx_multiply(p->g, product(p, (rows){x, unit}, m), size);
}

static mlx_array plus(const pass *p, mlx_array x, mlx_array vector) {
    return vector.ctx == NULL ? x : fkv_mlx_add(p->g, x, vector);
}

static mlx_array rms_norm_array(const pass *p, mlx_array x, mlx_array weight) {
    return weight.ctx == NULL ? x : fkv_model_op_rms_norm(p->g, x, weight, p->r->model->hparams->norm_eps);
}

static mlx_array norm_array(const pass *p, mlx_array x, mlx_array weight, mlx_array bias) {
    const fkv_hparams *h = p->r->model->hparams;
    if (weight.ctx == NULL || h->features.norm == FKV_NORM_RMS) return rms_norm_array(p, x, weight);
    return fkv_model_op_layer_norm(p->g, x, weight, bias, h->norm_eps);
}

/* Multiplies the input rows of a layer by a matrix. In models without input norms, the values of these rows may exceed the range
 * of f16. */
static mlx_array product_of_input(const pass *p, rows x, const fkv_array_matrix *m) {
    return p->r->model->hparams->features.no_pre_norms ? product_of_large(p, x.full, m) : product(p, x, m);
}

/* ---- heads ---- */

static mlx_array swap_last(const pass *p, mlx_array x) { return fkv_mlx_transpose(p->g, x, FKV_MLX_SHAPE(0, 1, 3, 2)); }

/* Rotates the channel pairs of [T, n_heads, 2 * n_pairs]: (2 * i, 2 * i + 1) or (i, i + n_pairs). In the second case, the two
 * channels of a pair are made adjacent before the rotation. */
static mlx_array apply_rope(const pass *p, mlx_array x, int n_heads) {
    const int n = p->n_pairs;
    const bool side_by_side = p->r->model->hparams->rope_interleaved;
    const fkv_mlx_shape pairs = side_by_side ? FKV_MLX_SHAPE(p->n_rows, n_heads, n, 2) : FKV_MLX_SHAPE(p->n_rows, n_heads, 2, n);
    mlx_array y = fkv_mlx_reshape(p->g, x, pairs);
    if (!side_by_side) y = swap_last(p, y);
    y = fkv_mlx_view(p->g, fkv_mlx_multiply(p->g, fkv_mlx_view(p->g, y, MLX_COMPLEX64), p->angles), MLX_FLOAT32);
    if (!side_by_side) y = swap_last(p, y);
    return fkv_mlx_reshape(p->g, y, FKV_MLX_SHAPE(p->n_rows, n_heads, 2 * n));
}

static mlx_array rotate_head_arrays(const pass *p, mlx_array heads, int n_heads) {
    int head_dim = (int)p->shape->head_dim;
    int turning = 2 * p->n_pairs;
    if (p->angles.ctx == NULL) return heads;
    if (turning == head_dim) return apply_rope(p, heads, n_heads);
    mlx_array turned = apply_rope(p, fkv_model_op_columns(p->g, heads, 0, turning), n_heads);
    return fkv_model_op_beside(p->g, turned, fkv_model_op_columns(p->g, heads, turning, head_dim));
}

/* Applies the head norm and RoPE, if the model has them: [T, n_heads, D]. */
static mlx_array apply_rope_arrays(const pass *p, mlx_array x, int n_heads, mlx_array weight) {
    const fkv_hparams *h = p->r->model->hparams;
    if (h->features.qk_norm_after_rope) {
        mlx_array turned = fkv_mlx_reshape(p->g, x, FKV_MLX_SHAPE(p->n_rows, n_heads, (int)p->shape->head_dim));
        turned = rotate_head_arrays(p, turned, n_heads);
        const bool is_unweighted = h->features.qk_norm == FKV_QK_NORM_UNWEIGHTED && p->angles.ctx != NULL;
        return is_unweighted ? fkv_model_op_rms_norm(p->g, turned, (mlx_array){NULL}, h->norm_eps)
                             : rms_norm_array(p, turned, weight);
    }
    bool by_row = h->features.qk_norm == FKV_QK_NORM_ROWS;
    if (by_row) x = rms_norm_array(p, x, weight);
    mlx_array heads = fkv_mlx_reshape(p->g, x, FKV_MLX_SHAPE(p->n_rows, n_heads, (int)p->shape->head_dim));
    if (h->features.qk_norm == FKV_QK_NORM_OWN_HEADS) {
        const mlx_array none = {NULL};
        heads = fkv_model_op_layer_norm(p->g, heads, none, none, h->norm_eps);
        weight = fkv_mlx_reshape(p->g, weight, FKV_MLX_SHAPE(n_heads, (int)p->shape->head_dim));
        return rotate_head_arrays(p, fkv_mlx_multiply(p->g, heads, weight), n_heads);
    }
    return rotate_head_arrays(p, by_row ? heads : rms_norm_array(p, heads, weight), n_heads);
}

/* Pads heads to the width stored in pages. */
static mlx_array pad_heads(const pass *p, mlx_array heads, uint32_t dim) {
    const uint32_t padded = fkv_runner_head_pad(p->r, p->shape->head_dim);
    return padded == dim ? heads : fkv_model_op_widen(p->g, heads, (int)padded);
}

static mlx_array gather_heads(const pass *p, mlx_array heads) {
    const uint32_t d = fkv_architecture_v_dim(p->r->model->hparams, p->shape);
    if (fkv_runner_head_pad(p->r, p->shape->head_dim) != d) heads = fkv_model_op_columns(p->g, heads, 0, (int)d);
    return fkv_mlx_reshape(p->g, heads, FKV_MLX_SHAPE(p->n_rows, (int)(p->r->model->hparams->n_q_heads * d)));
}

/* ---- layers ---- */

/* Computes the keys and values of a layer and writes them to pages. */
static fkv_status write_kv(const pass *p, rows in) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int n_heads = (int)p->shape->n_kv_heads;
    mlx_array given = plus(p, product_of_input(p, in, &l->k), l->k_bias);
    mlx_array k = apply_rope_arrays(p, given, n_heads, l->k_norm);
    if (p->r->arrays->k_centers != NULL) k = fkv_mlx_subtract(p->g, k, p->r->arrays->k_centers[p->index]);
    bool k_is_v = p->r->model->tensors[p->index].v == NULL;
    mlx_array v = k_is_v ? given : plus(p, product_of_input(p, in, &l->v), l->v_bias);
    const uint32_t v_dim = fkv_architecture_v_dim(h, p->shape);
    v = fkv_mlx_reshape(p->g, v, FKV_MLX_SHAPE(p->n_rows, n_heads, (int)v_dim));
    if (h->value_scale != 0.0f) v = fkv_model_op_scale(p->g, v, h->value_scale);
    if (h->features.v_norm) v = fkv_model_op_rms_norm(p->g, v, (mlx_array){NULL}, h->norm_eps);
    k = pad_heads(p, k, p->shape->head_dim);
    v = pad_heads(p, v, v_dim);
    FKV_TRY(fkv_mlx_graph_status(p->g, "fkv_runner_forward"));
    return fkv_mlx_write(p->step, p->index, k, v);
}

static fkv_status write_and_attend(const pass *p, mlx_array x, bool attends, mlx_array *out) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    rows in = row_slice(p, norm_array(p, x, l->attn_norm, l->attn_norm_bias));
    if (p->shape->kv_layer == p->index) FKV_TRY(write_kv(p, in));
    if (!attends) return FKV_OK;
    mlx_array q = apply_rope_arrays(p, plus(p, product_of_input(p, in, &l->q), l->q_bias), (int)h->n_q_heads, l->q_norm);
    if (p->temperatures.ctx != NULL && fkv_runner_has_temperature(p->r, p->index)) q = fkv_mlx_multiply(p->g, q, p->temperatures);
    q = pad_heads(p, q, p->shape->head_dim);
    FKV_TRY(fkv_mlx_graph_status(p->g, "fkv_runner_forward"));
    mlx_array attended = mlx_array_new();
    FKV_TRY(fkv_mlx_attend(p->step, p->shape->kv_layer, q, &attended));
    *out = fkv_mlx_adopt(p->g, attended);
    return FKV_OK;
}

/* Applies the optional post-norm and residual scale to the projection output `given`, and adds the result to x. */
static mlx_array add_given(const pass *p, mlx_array x, mlx_array given, mlx_array post_norm) {
    mlx_array added = norm_array(p, given, post_norm, (mlx_array){NULL});
    return fkv_mlx_add(p->g, x, fkv_model_op_scale(p->g, added, p->r->model->residual_scale));
}

static mlx_array add_attention_arrays(const pass *p, mlx_array x, mlx_array attended) {
    const fkv_array_layer *l = p->layer;
    mlx_array heads = gather_heads(p, attended);
    if (has_array(&l->attn_gate)) {
        rows in = row_slice(p, norm_array(p, x, l->attn_norm, l->attn_norm_bias)); /* recomputes the attention input */
        heads = fkv_mlx_multiply(p->g, heads, fkv_model_op_sigmoid(p->g, product_of_input(p, in, &l->attn_gate)));
    }
    mlx_array given = plus(p, product(p, row_slice(p, heads), &l->o), l->o_bias);
    return add_given(p, x, given, p->layer->post_attn_norm);
}

static mlx_array number(const pass *p, float value) { return fkv_mlx_adopt(p->g, mlx_array_new_float32(value)); }

static mlx_array xielu(const pass *p, mlx_array x) {
    const fkv_xielu *a = &p->r->model->xielu[p->index];
    mlx_array square = fkv_model_op_scale(p->g, fkv_mlx_multiply(p->g, x, x), a->alpha_p);
    mlx_array below = fkv_mlx_subtract(p->g, fkv_model_op_expm1(p->g, fkv_mlx_minimum(p->g, x, number(p, a->eps))), x);
    mlx_array is_positive = fkv_mlx_less(p->g, number(p, 0.0f), x);
    mlx_array curved = fkv_mlx_where(p->g, is_positive, square, fkv_model_op_scale(p->g, below, a->alpha_n));
    return fkv_mlx_add(p->g, curved, fkv_model_op_scale(p->g, x, a->beta));
}

/* Computes the tanh approximation of gelu as x * sigmoid(2 * u), where u = sqrt(2 / pi) * (x + 0.044715 * x^3). */
static mlx_array activation(const pass *p, mlx_array x) {
    mlx_array inner = x;
    if (p->r->model->hparams->features.activation == FKV_XIELU) return xielu(p, x);
    if (p->r->model->hparams->features.activation == FKV_RELU2) {
        mlx_array positive = fkv_mlx_maximum(p->g, x, number(p, 0.0f));
        return fkv_mlx_multiply(p->g, positive, positive);
    }
    if (p->r->model->hparams->features.activation == FKV_GELU_TANH) {
        mlx_array cubic = fkv_mlx_adopt(p->g, mlx_array_new_float32(0x1.988454p+0f * 0.044715f));
        mlx_array linear = fkv_mlx_adopt(p->g, mlx_array_new_float32(0x1.988454p+0f));
        mlx_array square = fkv_mlx_multiply(p->g, x, x);
        inner = fkv_mlx_multiply(p->g, x, fkv_mlx_add(p->g, fkv_mlx_multiply(p->g, square, cubic), linear));
    }
    return fkv_mlx_multiply(p->g, x, fkv_model_op_sigmoid(p->g, inner));
}

/* Computes activation(gate) * up, like fkv_activate() on the CPU. */
static mlx_array activate(const pass *p, mlx_array gate, mlx_array up) {
    const fkv_hparams *h = p->r->model->hparams;
    if (h->features.activation != FKV_SWIGLU_CLAMPED) return fkv_mlx_multiply(p->g, activation(p, gate), up);
    mlx_array limit = fkv_mlx_adopt(p->g, mlx_array_new_float32(h->swiglu_limit));
    mlx_array least = fkv_mlx_adopt(p->g, mlx_array_new_float32(-h->swiglu_limit));
    mlx_array one = fkv_mlx_adopt(p->g, mlx_array_new_float32(1.0f));
    mlx_array g = fkv_mlx_minimum(p->g, gate, limit);
    mlx_array u = fkv_mlx_maximum(p->g, fkv_mlx_minimum(p->g, up, limit), least);
    mlx_array sigmoid = fkv_model_op_sigmoid(p->g, fkv_model_op_scale(p->g, g, h->swiglu_alpha));
    return fkv_mlx_multiply(p->g, fkv_mlx_multiply(p->g, g, sigmoid), fkv_mlx_add(p->g, u, one));
}

/* ---- experts ---- */

/* Routing result of a step: experts [T, k] and their weights [T, k]. */
typedef struct routed {
    mlx_array experts;
    mlx_array shares;
} routed;

/* Sets the scores of experts outside the selected groups to minus infinity: [T, E]. */
static mlx_array keep_expert_groups(const pass *p, mlx_array scores) {
    const fkv_hparams *h = p->r->model->hparams;
    const int n = p->n_rows;
    const int n_groups = (int)h->n_expert_groups;
    if (n_groups <= 1) return scores;
    const int size = (int)h->n_experts / n_groups;
    mlx_array by_group = fkv_mlx_reshape(p->g, scores, FKV_MLX_SHAPE(n * n_groups, size));
    mlx_array best = fkv_model_op_take_along(p->g, by_group, fkv_model_op_largest(p->g, by_group, n * n_groups, 2));
    mlx_array sums = fkv_mlx_reshape(p->g, fkv_mlx_sum_last(p->g, best), FKV_MLX_SHAPE(n, n_groups));
    mlx_array kept = fkv_model_op_largest(p->g, sums, n, (int)h->n_expert_groups_used);
    mlx_array least = fkv_mlx_min_last(p->g, fkv_model_op_take_along(p->g, sums, kept));
    mlx_array is_out = fkv_mlx_reshape(p->g, fkv_mlx_less(p->g, sums, least), FKV_MLX_SHAPE(n, n_groups, 1));
    mlx_array lowest = number(p, -INFINITY);
    mlx_array split = fkv_mlx_reshape(p->g, scores, FKV_MLX_SHAPE(n, n_groups, size));
    return fkv_mlx_reshape(p->g, fkv_mlx_where(p->g, is_out, lowest, split), FKV_MLX_SHAPE(n, (int)h->n_experts));
}

/* Computes a softmax over the scores whose logits are close to the largest score, and returns the probability of that score.
 * logits: [T, E], not masked -> [T, 1]. */
static mlx_array similar_share(const pass *p, mlx_array scores, mlx_array logits) {
    mlx_array largest = fkv_mlx_max_last(p->g, scores);
    mlx_array scale = fkv_mlx_maximum(p->g, fkv_model_op_abs(p->g, logits), largest);
    mlx_array distance = fkv_mlx_divide(p->g, fkv_mlx_subtract(p->g, largest, logits), scale);
    mlx_array is_far = fkv_mlx_less(p->g, number(p, 2.0f * p->r->model->hparams->mixer_jitter), distance);
    return fkv_mlx_max_last(p->g, fkv_model_op_softmax(p->g, fkv_mlx_where(p->g, is_far, number(p, -INFINITY), scores)));
}

/* Selects the same experts as route_sparse_mixer() of the CPU backend, with the same routing weights. */
static routed route_sparse_mixer(const pass *p, mlx_array logits) {
    mlx_array first = fkv_model_op_largest(p->g, logits, p->n_rows, 1);
    mlx_array others = fkv_model_op_exclude(p->g, logits, first);
    mlx_array second = fkv_model_op_largest(p->g, others, p->n_rows, 1);
    return (routed){fkv_model_op_beside(p->g, first, second),
                    fkv_model_op_beside(p->g, similar_share(p, logits, logits), similar_share(p, others, logits))};
}

static routed route(const pass *p, rows in) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int k = (int)h->n_experts_used;
    mlx_array logits = plus(p, product(p, in, &l->router), l->router_bias);
    if (h->features.sparse_mixer) return route_sparse_mixer(p, logits);
    const bool is_normed_late = h->features.norm_experts && !h->features.sigmoid_router && l->router_correction.ctx == NULL;
    mlx_array scores = h->features.sigmoid_router ? fkv_model_op_sigmoid(p->g, logits)
                       : is_normed_late           ? logits
                                                  : fkv_model_op_softmax(p->g, logits);
    mlx_array chosen_by = h->features.experts_scale_input ? logits : keep_expert_groups(p, plus(p, scores, l->router_correction));
    mlx_array experts = fkv_model_op_largest(p->g, chosen_by, p->n_rows, k);
    mlx_array shares = fkv_model_op_take_along(p->g, scores, experts);
    if (h->features.norm_experts)
        shares =
            is_normed_late ? fkv_model_op_softmax(p->g, shares) : fkv_mlx_divide(p->g, shares, fkv_mlx_sum_last(p->g, shares));
    if (l->expert_scales.ctx != NULL)
        shares = fkv_mlx_multiply(p->g, shares, fkv_mlx_take_first(p->g, l->expert_scales, experts));
    return (routed){experts, fkv_model_op_scale(p->g, shares, h->experts_scale != 0.0f ? h->experts_scale : 1.0f)};
}

/* Multiplies rows, whose values may exceed the range of f16, by the matrices of their experts and adds biases: [T, 1 or k, 1, C]
 * -> f32 [T, k, 1, R]. */
static mlx_array expert_product(const pass *p, mlx_array x, const fkv_array_stack *m, mlx_array bias, mlx_array experts) {
    bool is_half = m->rows == MLX_FLOAT16;
    mlx_array size = is_half ? fkv_model_op_row_size(p->g, x) : (mlx_array){NULL};
    mlx_array in = is_half ? fkv_mlx_astype(p->g, fkv_mlx_divide(p->g, x, size), MLX_FLOAT16) : x;
    mlx_array out = m->is_coded ? fkv_model_op_gather_qmm(p->g, in, &m->affine, experts)
                                : fkv_model_op_gather_mm(p->g, in, m->across, experts);
    if (is_half) out = fkv_mlx_multiply(p->g, fkv_mlx_astype(p->g, out, MLX_FLOAT32), size);
    if (bias.ctx == NULL || p->g->failed) return out;
    const int k = (int)p->r->model->hparams->n_experts_used;
    mlx_array taken = fkv_mlx_take_first(p->g, bias, experts);
    return fkv_mlx_add(p->g, out, fkv_mlx_reshape(p->g, taken, FKV_MLX_SHAPE(p->n_rows, k, 1, mlx_array_shape(bias)[1])));
}

/* Computes the output of the routed experts: [T, dim] -> [T, dim]. read: input rows of the router. */
static mlx_array run_experts(const pass *p, mlx_array x, mlx_array read) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int k = (int)h->n_experts_used;
    routed to = route(p, row_slice(p, read));
    mlx_array in = fkv_mlx_reshape(p->g, x, FKV_MLX_SHAPE(p->n_rows, 1, 1, (int)h->dim));
    if (h->features.experts_scale_input)
        in = fkv_mlx_multiply(p->g, in, fkv_mlx_reshape(p->g, to.shares, FKV_MLX_SHAPE(p->n_rows, k, 1, 1)));
    mlx_array gate = expert_product(p, in, &l->gate_experts, l->gate_experts_bias, to.experts);
    mlx_array up = expert_product(p, in, &l->up_experts, l->up_experts_bias, to.experts);
    mlx_array given = expert_product(p, activate(p, gate, up), &l->down_experts, l->down_experts_bias, to.experts);
    given = fkv_mlx_reshape(p->g, given, FKV_MLX_SHAPE(p->n_rows, k, (int)h->dim));
    if (h->features.experts_scale_input) return fkv_model_op_sum_second(p->g, given);
    mlx_array shares = fkv_mlx_reshape(p->g, to.shares, FKV_MLX_SHAPE(p->n_rows, k, 1));
    return fkv_model_op_sum_second(p->g, fkv_mlx_multiply(p->g, given, shares));
}

/* Computes a dense feed-forward block. */
static mlx_array run_ffn(const pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    rows in = row_slice(p, x);
    if (p->r->model->hparams->features.plain_ffn) {
        mlx_array up = plus(p, product_of_input(p, in, &l->up), l->up_bias);
        return plus(p, product_of_large(p, activation(p, up), &l->down), l->down_bias);
    }
    mlx_array gate = plus(p, product_of_input(p, in, &l->gate), l->gate_bias);
    mlx_array both = activate(p, gate, plus(p, product_of_input(p, in, &l->up), l->up_bias));
    return plus(p, product_of_large(p, both, &l->down), l->down_bias);
}

/* Computes the sum of the outputs of a layer's routed experts and its shared expert. */
static mlx_array run_mixture(const pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    mlx_array given = run_experts(p, x, x);
    if (!has_array(&l->gate)) return given;
    mlx_array shared = run_ffn(p, x);
    if (has_array(&l->shared_gate)) {
        mlx_array share = fkv_model_op_sigmoid(p->g, product(p, row_slice(p, x), &l->shared_gate));
        shared = fkv_mlx_multiply(p->g, shared, share);
    }
    return fkv_mlx_add(p->g, given, shared);
}

/* Computes the experts and a dense feed-forward block in parallel. The router, and the inputs and outputs of both branches, have
 * separate norms. */
static mlx_array run_beside(const pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    const float of_router = 1.0f / sqrtf((float)p->r->model->hparams->dim);
    mlx_array read = fkv_model_op_scale(p->g, rms_norm_array(p, x, l->router_scale), of_router);
    mlx_array dense = rms_norm_array(p, run_ffn(p, rms_norm_array(p, x, l->ffn_norm)), l->post_dense_norm);
    mlx_array given = rms_norm_array(p, run_experts(p, rms_norm_array(p, x, l->experts_norm), read), l->post_experts_norm);
    return fkv_mlx_add(p->g, dense, given);
}

/* Adds the output of the feed-forward block to x, the residual stream after attention. before: input of the layer, which the
 * feed-forward block reads if it is parallel to attention. */
static mlx_array add_ffn(const pass *p, mlx_array x, mlx_array before) {
    const fkv_array_layer *l = p->layer;
    if (l->router_scale.ctx != NULL) return add_given(p, x, run_beside(p, x), l->post_ffn_norm);
    mlx_array read = p->r->model->hparams->features.parallel ? norm_array(p, before, l->attn_norm, l->attn_norm_bias)
                                                             : norm_array(p, x, l->ffn_norm, l->ffn_norm_bias);
    mlx_array given = has_array(&l->router) ? run_mixture(p, read) : run_ffn(p, read);
    return add_given(p, x, given, l->post_ffn_norm);
}

/* Adds the per-layer input to x and applies the output scale of the layer. */
static mlx_array end_layer(const pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    const int n = (int)p->r->model->hparams->input_dim;
    const int at = (int)p->index;
    if (p->inputs.ctx != NULL) {
        mlx_array input = fkv_mlx_slice(p->g, p->inputs, FKV_MLX_SHAPE(0, at, 0), FKV_MLX_SHAPE(p->n_rows, at + 1, n));
        mlx_array gate = activation(p, product_of_large(p, x, &l->input_gate));
        mlx_array both = fkv_mlx_multiply(p->g, gate, fkv_mlx_reshape(p->g, input, FKV_MLX_SHAPE(p->n_rows, n)));
        x = add_given(p, x, product_of_large(p, both, &l->input_proj), l->input_norm);
    }
    return l->out_scale.ctx == NULL ? x : fkv_mlx_multiply(p->g, x, l->out_scale);
}

/* ---- the step ---- */

static mlx_array upload_numbers(const pass *p, const uint32_t *numbers, uint32_t n) {
    int32_t *copy = p->r->arrays->numbers;
    for (uint32_t i = 0; i < n; i++) copy[i] = (int32_t)numbers[i];
    return fkv_model_op_upload(p->g, copy, FKV_MLX_SHAPE((int)n), MLX_INT32);
}

void fkv_array_angles(const fkv_runner *r, uint32_t rope, double position, fkv_turn *turns) {
    for (uint32_t i = 0; i < r->n_pairs[rope]; i++) {
        double angle = position * r->frequencies[rope][i];
        turns[i] = (fkv_turn){cos(angle), sin(angle)};
    }
}

/* Computes the RoPE angles of every token. At consecutive positions, each angle is derived from the previous one in double
 * precision. The angles are recomputed from the position at regular intervals, which keeps the error below 1e-14. */
static mlx_array upload_angles(const pass *p, uint32_t rope) {
    enum { MAX_TURNS = 64 };
    const fkv_runner *r = p->r;
    const fkv_turn *one = r->arrays->one_turn[rope];
    fkv_turn turns[FKV_MAX_HEAD_DIM / 2];
    float *to = r->arrays->angles;
    for (uint32_t t = 0; t < r->n_tokens; t++) {
        bool turns_on = t % MAX_TURNS != 0 && r->positions[t] == r->positions[t - 1] + 1;
        if (!turns_on) fkv_array_angles(r, rope, r->positions[t], turns);
        for (uint32_t i = 0; i < r->n_pairs[rope]; i++, to += 2) {
            fkv_turn z = turns[i];
            if (turns_on)
                z = (fkv_turn){z.cosine * one[i].cosine - z.sine * one[i].sine, z.cosine * one[i].sine + z.sine * one[i].cosine};
            turns[i] = z;
            to[0] = (float)z.cosine * r->rope_factors[rope];
            to[1] = (float)z.sine * r->rope_factors[rope];
        }
    }
    return fkv_model_op_upload(p->g, r->arrays->angles, FKV_MLX_SHAPE(p->n_rows, 1, (int)r->n_pairs[rope], 1), MLX_COMPLEX64);
}

static mlx_array upload_temperatures(const pass *p) {
    const fkv_runner *r = p->r;
    float *to = r->arrays->angles; /* uploading copies the data, so the buffer can be reused */
    if (r->model->hparams->temperature == 0.0f) return (mlx_array){NULL};
    for (uint32_t t = 0; t < r->n_tokens; t++) to[t] = fkv_runner_temperature(r, r->positions[t]);
    return fkv_model_op_upload(p->g, to, FKV_MLX_SHAPE(p->n_rows, 1, 1), MLX_FLOAT32);
}

/* Returns the logits, after the logit scale and soft cap of the model, or the normalized hidden states for embeddings. */
static mlx_array logits_of(const pass *p, mlx_array x) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_weights *w = p->r->model->arrays;
    mlx_array state = norm_array(p, x, w->final_norm, w->final_norm_bias);
    if (p->r->config.embeddings) return state;
    mlx_array logits = product(p, row_slice(p, state), &w->output);
    logits = plus(p, logits, w->output_bias);
    if (h->logit_scale != 0.0f) logits = fkv_model_op_scale(p->g, logits, h->logit_scale);
    if (h->final_softcap == 0.0f) return logits;
    mlx_array capped = fkv_mlx_tanh(p->g, fkv_model_op_scale(p->g, logits, 1.0f / h->final_softcap));
    return fkv_model_op_scale(p->g, capped, h->final_softcap);
}

/* Looks up each token's row in an embedding table. */
static mlx_array look_up_rows(const pass *p, const fkv_array_matrix *m) {
    mlx_array tokens = upload_numbers(p, p->r->tokens, p->r->n_tokens);
    if (!m->is_coded) return fkv_mlx_astype(p->g, fkv_mlx_take_first(p->g, m->halves, tokens), MLX_FLOAT32);
    fkv_mlx_affine taken = m->affine;
    taken.codes = fkv_mlx_take_first(p->g, taken.codes, tokens);
    taken.scales = fkv_mlx_take_first(p->g, taken.scales, tokens);
    if (taken.mode == NULL) {
        taken.scales = fkv_mlx_astype(p->g, taken.scales, MLX_FLOAT32);
        taken.biases = fkv_mlx_astype(p->g, fkv_mlx_take_first(p->g, taken.biases, tokens), MLX_FLOAT32);
    }
    return fkv_model_op_dequantize(p->g, &taken);
}

static mlx_array embed(const pass *p) {
    const fkv_model *model = p->r->model;
    mlx_array x = look_up_rows(p, model->embedding != model->output ? &model->arrays->own_embedding : &model->arrays->output);
    mlx_array scale = p->r->arrays->embedding_scale;
    return scale.ctx == NULL ? x : fkv_mlx_multiply(p->g, x, scale);
}

/* Computes the per-layer inputs: (per-layer token embedding + projected embedding) / sqrt(2). */
static mlx_array layer_inputs(const pass *p, mlx_array x) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_weights *w = p->r->model->arrays;
    const fkv_mlx_shape shape = FKV_MLX_SHAPE(p->n_rows, (int)h->n_layers, (int)h->input_dim);
    mlx_array projected = fkv_model_op_scale(p->g, product_of_large(p, x, &w->inputs_proj), 1.0f / sqrtf((float)h->dim));
    mlx_array normal = rms_norm_array(p, fkv_mlx_reshape(p->g, projected, shape), w->inputs_norm);
    mlx_array looked_up = fkv_model_op_scale(p->g, look_up_rows(p, &w->inputs), sqrtf((float)h->input_dim));
    mlx_array both = fkv_mlx_add(p->g, normal, fkv_mlx_reshape(p->g, looked_up, shape));
    return fkv_model_op_scale(p->g, both, sqrtf(0.5f));
}

/* Computes one layer. *x, a handle owned by the caller, becomes the input of the next layer. If `goes_on` is false, the layer
 * ends after writing its keys and values. */
static fkv_status run_layer(pass *p, bool goes_on, bool keeps_asked, mlx_array *x) {
    const fkv_runner *r = p->r;
    mlx_array in = *x;
    mlx_array attended = {NULL};
    FKV_TRY(write_and_attend(p, in, goes_on, &attended));
    if (!goes_on) return FKV_OK;
    if (keeps_asked && r->n_logit_rows < r->n_tokens) {
        mlx_array asked = upload_numbers(p, r->logit_rows, r->n_logit_rows);
        in = fkv_mlx_take_first(p->g, in, asked);
        attended = fkv_mlx_take_first(p->g, attended, asked);
        if (p->inputs.ctx != NULL) fkv_mlx_keep(p->g, &p->inputs, fkv_mlx_take_first(p->g, p->inputs, asked));
        p->n_rows = (int)r->n_logit_rows;
    }
    fkv_mlx_keep(p->g, x, end_layer(p, add_ffn(p, add_attention_arrays(p, in, attended), in)));
    return fkv_mlx_graph_status(p->g, "fkv_runner_forward");
}

/* Computes all layers. *x and *logits are owned by the caller; *logits stays empty if no logits are requested. */
static fkv_status build_layers(pass *p, mlx_array *x, mlx_array *logits) {
    const fkv_runner *r = p->r;
    const fkv_array_weights *w = r->model->arrays;
    const fkv_hparams *h = r->model->hparams;
    const uint32_t n_kv_layers = fkv_architecture_n_kv_layers(h);
    const uint32_t n_run =
        r->n_logit_rows > 0 ? h->n_layers : n_kv_layers; /* if no logits are requested, only layers that store keys must run */
    mlx_array angles[FKV_N_ROPES];
    for (uint32_t i = 0; i < r->n_ropes; i++) angles[i] = upload_angles(p, i);
    p->temperatures = upload_temperatures(p);
    uint32_t mark = fkv_mlx_graph_mark(p->g);
    fkv_mlx_keep(p->g, x, embed(p));
    if (h->input_dim != 0) fkv_mlx_keep(p->g, &p->inputs, layer_inputs(p, *x));
    fkv_mlx_graph_release(p->g, mark);
    for (uint32_t i = 0; i < n_run; i++) {
        uint32_t rope = fkv_runner_rope(r, i);
        p->index = i;
        p->layer = &w->layers[i];
        p->shape = &h->shapes[i];
        p->n_pairs = rope == FKV_ROPE_NONE ? 0 : (int)r->n_pairs[rope];
        p->angles = rope == FKV_ROPE_NONE ? (mlx_array){NULL} : angles[rope];
        FKV_TRY(run_layer(p, i + 1 < n_kv_layers || r->n_logit_rows > 0, i + 1 == h->n_layers, x));
        fkv_mlx_graph_release(p->g, mark);
    }
    if (r->n_logit_rows > 0) fkv_mlx_keep(p->g, logits, logits_of(p, *x));
    return fkv_mlx_graph_status(p->g, "fkv_runner_forward");
}

/* Evaluates the logits, and any cache writes that the logits do not depend on. */
static fkv_status evaluate(const pass *p, mlx_array logits) {
    mlx_vector_array wanted = mlx_vector_array_new();
    fkv_status status = fkv_mlx_step_pending(p->step, wanted);
    int code = 0;
    if (status == FKV_OK && logits.ctx != NULL) code = mlx_vector_array_append_value(wanted, logits);
    if (status == FKV_OK && code == 0) code = mlx_eval(wanted);
    (void)mlx_vector_array_free(wanted);
    return status != FKV_OK ? status : fkv_mlx_check(code, "fkv_runner_forward");
}

static fkv_status build_forward(pass *p, mlx_array *x, mlx_array *logits) {
    const fkv_runner *r = p->r;
    FKV_TRY(build_layers(p, x, logits));
    fkv_mlx_graph_release(p->g, 0);
    (void)mlx_array_free(*x); /* freed here so that MLX can release the array early */
    (void)mlx_array_free(p->inputs);
    *x = p->inputs = (mlx_array){NULL};
    FKV_TRY(evaluate(p, *logits));
    if (r->n_logit_rows == 0) return FKV_OK;
    const float *numbers = mlx_array_data_float32(*logits);
    if (numbers == NULL) return fkv_mlx_failed("fkv_runner_forward: cannot read the logits");
    memcpy(r->logits, numbers, (size_t)r->n_logit_rows * fkv_runner_row_values(r) * sizeof *numbers);
    return FKV_OK;
}

/* MLX schedules operations ahead until it reaches its memory limit. During a step, the limit is therefore set to the memory in
 * use plus the planned activations. */
fkv_status fkv_array_forward(fkv_runner *r, fkv_step *step) {
    pass p = {.r = r, .g = &r->arrays->graph, .step = step, .n_rows = (int)r->n_tokens};
    mlx_array x = {NULL};
    mlx_array logits = {NULL};
    size_t limit_before = 0;
    size_t active = 0;
    FKV_TRY(fkv_mlx_check(mlx_get_active_memory(&active), "fkv_runner_forward"));
    FKV_TRY(fkv_mlx_check(mlx_set_memory_limit(&limit_before, active + r->arrays->step_bytes), "fkv_runner_forward"));
    fkv_status status = build_forward(&p, &x, &logits);
    fkv_mlx_graph_release(p.g, 0);
    (void)mlx_array_free(x);
    (void)mlx_array_free(p.inputs);
    (void)mlx_array_free(logits);
    (void)mlx_set_memory_limit(&active, limit_before);
    return status;
}
