/* Feed-forward blocks and experts on MLX, the counterpart of ../forward/experts.c; see array_pass.h. */
#include "array_pass.h"

#include <math.h>

/* ---- activations ---- */

static mlx_array xielu(const fkv_array_pass *p, mlx_array x) {
    const fkv_xielu *a = &p->r->model->xielu[p->index];
    mlx_array square = fkv_model_op_scale(p->g, fkv_mlx_multiply(p->g, x, x), a->alpha_p);
    mlx_array below = fkv_mlx_subtract(p->g, fkv_model_op_expm1(p->g, fkv_mlx_minimum(p->g, x, fkv_array_number(p, a->eps))), x);
    mlx_array is_positive = fkv_mlx_less(p->g, fkv_array_number(p, 0.0f), x);
    mlx_array curved = fkv_mlx_where(p->g, is_positive, square, fkv_model_op_scale(p->g, below, a->alpha_n));
    return fkv_mlx_add(p->g, curved, fkv_model_op_scale(p->g, x, a->beta));
}

/* Computes the tanh approximation of gelu as x * sigmoid(2 * u), where u = sqrt(2 / pi) * (x + 0.044715 * x^3). */
mlx_array fkv_array_activation(const fkv_array_pass *p, mlx_array x) {
    mlx_array inner = x;
    if (p->r->model->hparams->features.activation == FKV_XIELU) return xielu(p, x);
    if (p->r->model->hparams->features.activation == FKV_RELU2) {
        mlx_array positive = fkv_mlx_maximum(p->g, x, fkv_array_number(p, 0.0f));
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

/* Computes fkv_array_activation(gate) * up, like fkv_activate() on the CPU. */
static mlx_array activate(const fkv_array_pass *p, mlx_array gate, mlx_array up) {
    const fkv_hparams *h = p->r->model->hparams;
    if (h->features.activation != FKV_SWIGLU_CLAMPED) return fkv_mlx_multiply(p->g, fkv_array_activation(p, gate), up);
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
static mlx_array keep_expert_groups(const fkv_array_pass *p, mlx_array scores) {
    const fkv_hparams *h = p->r->model->hparams;
    const int n = p->n_rows;
    const int n_groups = (int)h->n_expert_groups;
    if (n_groups <= 1) return scores;
    const int size = (int)h->n_experts / n_groups;
    mlx_array by_group = fkv_mlx_reshape(p->g, scores, FKV_MLX_SHAPE(n * n_groups, size));
    const int n_best = h->features.groups_by_max ? 1 : 2; /* a group's score is the sum of its n_best largest expert scores */
    mlx_array best = fkv_model_op_take_along(p->g, by_group, fkv_model_op_largest(p->g, by_group, n * n_groups, n_best));
    mlx_array sums = fkv_mlx_reshape(p->g, fkv_mlx_sum_last(p->g, best), FKV_MLX_SHAPE(n, n_groups));
    mlx_array kept = fkv_model_op_largest(p->g, sums, n, (int)h->n_expert_groups_used);
    mlx_array least = fkv_mlx_min_last(p->g, fkv_model_op_take_along(p->g, sums, kept));
    mlx_array is_out = fkv_mlx_reshape(p->g, fkv_mlx_less(p->g, sums, least), FKV_MLX_SHAPE(n, n_groups, 1));
    mlx_array lowest = fkv_array_number(p, -INFINITY);
    mlx_array split = fkv_mlx_reshape(p->g, scores, FKV_MLX_SHAPE(n, n_groups, size));
    return fkv_mlx_reshape(p->g, fkv_mlx_where(p->g, is_out, lowest, split), FKV_MLX_SHAPE(n, (int)h->n_experts));
}

/* Computes a softmax over the scores whose logits are close to the largest score, and returns the probability of the largest
 * score: [T, 1]. scores: [T, E], where experts may be masked; logits: [T, E], without masking. */
static mlx_array similar_share(const fkv_array_pass *p, mlx_array scores, mlx_array logits) {
    mlx_array largest = fkv_mlx_max_last(p->g, scores);
    mlx_array scale = fkv_mlx_maximum(p->g, fkv_model_op_abs(p->g, logits), largest);
    mlx_array distance = fkv_mlx_divide(p->g, fkv_mlx_subtract(p->g, largest, logits), scale);
    mlx_array is_far = fkv_mlx_less(p->g, fkv_array_number(p, 2.0f * p->r->model->hparams->mixer_jitter), distance);
    return fkv_mlx_max_last(p->g,
                            fkv_model_op_softmax(p->g, fkv_mlx_where(p->g, is_far, fkv_array_number(p, -INFINITY), scores)));
}

/* Selects the same experts as route_sparse_mixer() of the CPU backend, with the same routing weights. */
static routed route_sparse_mixer(const fkv_array_pass *p, mlx_array logits) {
    mlx_array first = fkv_model_op_largest(p->g, logits, p->n_rows, 1);
    mlx_array others = fkv_model_op_exclude(p->g, logits, first);
    mlx_array second = fkv_model_op_largest(p->g, others, p->n_rows, 1);
    return (routed){fkv_model_op_beside(p->g, first, second),
                    fkv_model_op_beside(p->g, similar_share(p, logits, logits), similar_share(p, others, logits))};
}

static routed route(const fkv_array_pass *p, fkv_array_rows in) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int k = (int)h->n_experts_used;
    mlx_array logits = fkv_array_plus(p, fkv_array_product(p, in, &l->router), l->router_bias);
    if (h->features.sparse_mixer) return route_sparse_mixer(p, logits);
    const bool is_normed_late = h->features.norm_experts && !h->features.sigmoid_router && l->router_correction.ctx == NULL;
    mlx_array scores = h->features.sigmoid_router ? fkv_model_op_sigmoid(p->g, logits)
                       : is_normed_late           ? logits
                                                  : fkv_model_op_softmax(p->g, logits);
    /* like the CPU backend, selects expert groups by logits, unless scores are sigmoids or a correction is added */
    const bool by_logits = !h->features.sigmoid_router && l->router_correction.ctx == NULL && h->n_expert_groups > 1;
    mlx_array chosen_by = h->features.experts_scale_input
                              ? logits
                              : keep_expert_groups(p, by_logits ? logits : fkv_array_plus(p, scores, l->router_correction));
    mlx_array experts = fkv_model_op_largest(p->g, chosen_by, p->n_rows, k);
    mlx_array shares = fkv_model_op_take_along(p->g, scores, experts);
    if (h->features.norm_experts)
        shares =
            is_normed_late ? fkv_model_op_softmax(p->g, shares) : fkv_mlx_divide(p->g, shares, fkv_mlx_sum_last(p->g, shares));
    if (l->expert_scales.ctx != NULL)
        shares = fkv_mlx_multiply(p->g, shares, fkv_mlx_take_first(p->g, l->expert_scales, experts));
    return (routed){experts, fkv_model_op_scale(p->g, shares, h->experts_scale != 0.0f ? h->experts_scale : 1.0f)};
}

/* Multiplies rows by the matrices of their experts and adds biases: [T, 1 or k, 1, C] -> f32 [T, k, 1, R]. The values may exceed
 * the range of f16. */
static mlx_array expert_product(const fkv_array_pass *p, mlx_array x, const fkv_array_stack *m, mlx_array bias,
                                mlx_array experts) {
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
static mlx_array run_experts(const fkv_array_pass *p, mlx_array x, mlx_array read) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int k = (int)h->n_experts_used;
    routed to = route(p, fkv_array_row_slice(p, read));
    const int dim = (int)(h->latent_dim != 0 ? h->latent_dim : h->dim); /* dimension of the experts' inputs and outputs */
    if (h->latent_dim != 0) x = fkv_array_product(p, fkv_array_row_slice(p, x), &l->latent_down);
    mlx_array in = fkv_mlx_reshape(p->g, x, FKV_MLX_SHAPE(p->n_rows, 1, 1, dim));
    if (h->features.experts_scale_input)
        in = fkv_mlx_multiply(p->g, in, fkv_mlx_reshape(p->g, to.shares, FKV_MLX_SHAPE(p->n_rows, k, 1, 1)));
    mlx_array up = expert_product(p, in, &l->up_experts, l->up_experts_bias, to.experts);
    mlx_array active = h->features.plain_ffn
                           ? fkv_array_activation(p, up)
                           : activate(p, expert_product(p, in, &l->gate_experts, l->gate_experts_bias, to.experts), up);
    mlx_array given = expert_product(p, active, &l->down_experts, l->down_experts_bias, to.experts);
    given = fkv_mlx_reshape(p->g, given, FKV_MLX_SHAPE(p->n_rows, k, dim));
    if (!h->features.experts_scale_input)
        given = fkv_mlx_multiply(p->g, given, fkv_mlx_reshape(p->g, to.shares, FKV_MLX_SHAPE(p->n_rows, k, 1)));
    mlx_array sum = fkv_model_op_sum_second(p->g, given);
    return h->latent_dim != 0 ? fkv_array_product_of_large(p, sum, &l->latent_up) : sum;
}

/* Computes a dense feed-forward block. */
mlx_array fkv_array_ffn(const fkv_array_pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    const fkv_hparams *h = p->r->model->hparams;
    fkv_array_rows in = fkv_array_row_slice(p, x);
    if (h->features.plain_ffn) {
        mlx_array up = fkv_array_plus(p, fkv_array_product_of_input(p, in, &l->up), l->up_bias);
        return fkv_array_plus(p, fkv_array_product_of_large(p, fkv_array_activation(p, up), &l->down), l->down_bias);
    }
    mlx_array gate = fkv_array_plus(p, fkv_array_product_of_input(p, in, &l->gate), l->gate_bias);
    if (h->gate_scale != 0.0f) gate = fkv_model_op_scale(p->g, gate, h->gate_scale);
    mlx_array both = activate(p, gate, fkv_array_plus(p, fkv_array_product_of_input(p, in, &l->up), l->up_bias));
    if (h->down_scale != 0.0f) both = fkv_model_op_scale(p->g, both, h->down_scale);
    return fkv_array_plus(p, fkv_array_product_of_large(p, both, &l->down), l->down_bias);
}

/* Computes the sum of the outputs of a layer's routed experts and its shared expert. */
mlx_array fkv_array_mixture(const fkv_array_pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    mlx_array given = run_experts(p, x, x);
    if (!fkv_array_has(&l->up)) return given;
    mlx_array shared = fkv_array_ffn(p, x);
    if (fkv_array_has(&l->shared_gate)) {
        mlx_array share = fkv_model_op_sigmoid(p->g, fkv_array_product(p, fkv_array_row_slice(p, x), &l->shared_gate));
        shared = fkv_mlx_multiply(p->g, shared, share);
    }
    return fkv_mlx_add(p->g, given, shared);
}

/* Computes the experts and a dense feed-forward block in parallel. The router, and the inputs and outputs of both branches, have
 * separate norms. */
mlx_array fkv_array_parallel_experts(const fkv_array_pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    const float of_router = 1.0f / sqrtf((float)p->r->model->hparams->dim);
    mlx_array read = fkv_model_op_scale(p->g, fkv_array_rms_norm(p, x, l->router_scale), of_router);
    mlx_array dense = fkv_array_rms_norm(p, fkv_array_ffn(p, fkv_array_rms_norm(p, x, l->ffn_norm)), l->post_dense_norm);
    mlx_array given =
        fkv_array_rms_norm(p, run_experts(p, fkv_array_rms_norm(p, x, l->experts_norm), read), l->post_experts_norm);
    return fkv_mlx_add(p->g, dense, given);
}
