/* The forward pass on MLX, for every architecture: the counterpart of the CPU's forward pass (../forward/forward.c). It builds
 * lazy operations, which are evaluated at the end of the step. (On the CPU, long steps of recurrent models are also evaluated
 * after each recurrent layer.) The host reads no results before the logits are complete.
 *
 * Recurrent layers (array_recurrent.c) and latent attention (array_latent.c) replace parts of a layer as on the CPU.
 *
 * RoPE angles are computed on the host in double, because MLX's own RoPE multiplies in f32, with an error of 0.01 radians at
 * position 131072. A channel pair is treated as a complex number, so its rotation is one complex multiplication.
 *
 * In the last layer, only rows whose logits are requested are processed after attention. If no logits are requested, the pass
 * ends after the last layer that stores keys or a state.
 */
#include "array_pass.h"

#include <math.h>

/* ---- heads ---- */

/* Applies the head norm and RoPE, if the model has them: [T, n_heads, D]. */
static mlx_array apply_rope_arrays(const fkv_array_pass *p, mlx_array x, int n_heads, mlx_array weight) {
    const fkv_hparams *h = p->r->model->hparams;
    if (h->features.qk_norm_after_rope) {
        mlx_array turned = fkv_mlx_reshape(p->g, x, FKV_MLX_SHAPE(p->n_rows, n_heads, (int)p->shape->head_dim));
        turned = fkv_array_rotate(p, turned, n_heads, p->shape->head_dim);
        const bool is_unweighted = h->features.qk_norm == FKV_QK_NORM_UNWEIGHTED && p->angles.ctx != NULL;
        return is_unweighted ? fkv_model_op_rms_norm(p->g, turned, (mlx_array){NULL}, h->norm_eps)
                             : fkv_array_rms_norm(p, turned, weight);
    }
    bool by_row = h->features.qk_norm == FKV_QK_NORM_ROWS;
    if (by_row) x = fkv_array_rms_norm(p, x, weight);
    mlx_array heads = fkv_mlx_reshape(p->g, x, FKV_MLX_SHAPE(p->n_rows, n_heads, (int)p->shape->head_dim));
    if (h->features.qk_norm == FKV_QK_NORM_OWN_HEADS) {
        const mlx_array none = {NULL};
        heads = fkv_model_op_layer_norm(p->g, heads, none, none, h->norm_eps);
        weight = fkv_mlx_reshape(p->g, weight, FKV_MLX_SHAPE(n_heads, (int)p->shape->head_dim));
        return fkv_array_rotate(p, fkv_mlx_multiply(p->g, heads, weight), n_heads, p->shape->head_dim);
    }
    return fkv_array_rotate(p, by_row ? heads : fkv_array_rms_norm(p, heads, weight), n_heads, p->shape->head_dim);
}

/* Pads heads to the width stored in pages. */
static mlx_array pad_heads(const fkv_array_pass *p, mlx_array heads, uint32_t dim) {
    const uint32_t padded = fkv_runner_head_pad(p->r, p->shape->head_dim);
    return padded == dim ? heads : fkv_model_op_widen(p->g, heads, (int)padded);
}

static mlx_array gather_heads(const fkv_array_pass *p, mlx_array heads) {
    const uint32_t d = fkv_architecture_v_dim(p->r->model->hparams, p->shape);
    if (fkv_runner_head_pad(p->r, p->shape->head_dim) != d) heads = fkv_model_op_columns(p->g, heads, 0, (int)d);
    return fkv_mlx_reshape(p->g, heads, FKV_MLX_SHAPE(p->n_rows, (int)(p->r->model->hparams->n_q_heads * d)));
}

/* ---- layers ---- */

/* Computes the keys and values of a layer and writes them to pages. */
static fkv_status write_kv(const fkv_array_pass *p, fkv_array_rows in) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int n_heads = (int)p->shape->n_kv_heads;
    mlx_array given = fkv_array_plus(p, fkv_array_product_of_input(p, in, &l->k), l->k_bias);
    mlx_array k = apply_rope_arrays(p, given, n_heads, l->k_norm);
    if (p->r->arrays->k_centers != NULL) k = fkv_mlx_subtract(p->g, k, p->r->arrays->k_centers[p->index]);
    bool k_is_v = p->r->model->tensors[p->index].v == NULL;
    mlx_array v = k_is_v ? given : fkv_array_plus(p, fkv_array_product_of_input(p, in, &l->v), l->v_bias);
    const uint32_t v_dim = fkv_architecture_v_dim(h, p->shape);
    v = fkv_mlx_reshape(p->g, v, FKV_MLX_SHAPE(p->n_rows, n_heads, (int)v_dim));
    if (h->value_scale != 0.0f) v = fkv_model_op_scale(p->g, v, h->value_scale);
    if (h->features.v_norm) v = fkv_model_op_rms_norm(p->g, v, (mlx_array){NULL}, h->norm_eps);
    k = pad_heads(p, k, p->shape->head_dim);
    v = pad_heads(p, v, v_dim);
    FKV_TRY(fkv_mlx_graph_status(p->g, "fkv_runner_forward"));
    return fkv_mlx_write(p->step, p->shape->page_layer, k, v);
}

static fkv_status write_latent(const fkv_array_pass *p, fkv_array_rows in) {
    mlx_array k = fkv_array_latent_keys(p, in);
    FKV_TRY(fkv_mlx_graph_status(p->g, "fkv_runner_forward"));
    return fkv_mlx_write(p->step, p->shape->page_layer, k, (mlx_array){NULL});
}

/* Returns the queries of a layer, padded as in pages: [T, H, head_pad]. *gate receives the gates of the attention output, [T, H *
 * D], if the query projection also computes them. */
static mlx_array queries(const fkv_array_pass *p, fkv_array_rows in, mlx_array *gate) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const int n_heads = (int)h->n_q_heads;
    const int d = (int)p->shape->head_dim;
    mlx_array q = fkv_array_plus(p, fkv_array_product_of_input(p, in, &l->q), l->q_bias);
    if (h->features.gate_in_q) { /* each head has a query, then a gate */
        mlx_array both = fkv_mlx_reshape(p->g, q, FKV_MLX_SHAPE(p->n_rows, n_heads, 2 * d));
        const fkv_mlx_shape flat = FKV_MLX_SHAPE(p->n_rows, n_heads * d);
        *gate = fkv_mlx_reshape(p->g, fkv_model_op_columns(p->g, both, d, 2 * d), flat);
        q = fkv_mlx_reshape(p->g, fkv_model_op_columns(p->g, both, 0, d), flat);
    }
    q = apply_rope_arrays(p, q, n_heads, l->q_norm);
    if (p->temperatures.ctx != NULL && fkv_runner_has_temperature(p->r, p->index)) q = fkv_mlx_multiply(p->g, q, p->temperatures);
    return pad_heads(p, q, p->shape->head_dim);
}

/* Writes the keys and values of a layer and, if `attends` is true, computes its attention. *out receives the input of the output
 * projection: [T, H * v_dim]. */
static fkv_status write_and_attend(const fkv_array_pass *p, fkv_array_rows in, bool attends, mlx_array *out) {
    const bool is_latent = fkv_architecture_is_latent(p->r->model->hparams);
    if (p->shape->kv_layer == p->index) FKV_TRY(is_latent ? write_latent(p, in) : write_kv(p, in));
    if (!attends) return FKV_OK;
    mlx_array gate = {NULL};
    mlx_array q = is_latent ? fkv_array_latent_queries(p, in) : queries(p, in, &gate);
    FKV_TRY(fkv_mlx_graph_status(p->g, "fkv_runner_forward"));
    mlx_array attended = mlx_array_new();
    FKV_TRY(fkv_mlx_attend(p->step, p->shape->page_layer, q, &attended));
    attended = fkv_mlx_adopt(p->g, attended);
    *out = is_latent ? fkv_array_latent_values(p, attended) : gather_heads(p, attended);
    if (gate.ctx != NULL) *out = fkv_mlx_multiply(p->g, *out, fkv_model_op_sigmoid(p->g, gate));
    return FKV_OK;
}

/* Applies the optional post-norm and residual scale to the projection output `given`, and adds the result to x. */
static mlx_array add_given(const fkv_array_pass *p, mlx_array x, mlx_array given, mlx_array post_norm) {
    mlx_array added = fkv_array_norm(p, given, post_norm, (mlx_array){NULL});
    return fkv_mlx_add(p->g, x, fkv_model_op_scale(p->g, added, p->r->model->residual_scale));
}

/* Adds the outputs of attention and of the recurrent layer to x. heads and mixed: inputs to their output projections, empty if
 * the layer has no attention or no recurrent state. */
static mlx_array add_mixers(const fkv_array_pass *p, mlx_array x, mlx_array heads, mlx_array mixed) {
    const fkv_array_layer *l = p->layer;
    if (heads.ctx != NULL) {
        if (fkv_array_has(&l->attn_gate)) {
            /* recomputes the attention input */
            fkv_array_rows in = fkv_array_row_slice(p, fkv_array_norm(p, x, l->attn_norm, l->attn_norm_bias));
            heads = fkv_mlx_multiply(p->g, heads, fkv_model_op_sigmoid(p->g, fkv_array_product_of_input(p, in, &l->attn_gate)));
        }
        const bool is_latent = fkv_architecture_is_latent(p->r->model->hparams);
        mlx_array given =
            is_latent ? fkv_array_product_of_large(p, heads, &l->o) : fkv_array_product(p, fkv_array_row_slice(p, heads), &l->o);
        x = add_given(p, x, fkv_array_plus(p, given, l->o_bias), mixed.ctx == NULL ? l->post_attn_norm : (mlx_array){NULL});
    }
    if (mixed.ctx == NULL) return x;
    mlx_array given = fkv_array_plus(p, fkv_array_product_of_large(p, mixed, &l->mixer_out), l->mixer_out_bias);
    return add_given(p, x, given, l->post_attn_norm);
}

/* Adds the output of the feed-forward block to x, the residual stream after attention. before: input of the layer, which the
 * feed-forward block reads if it is parallel to attention. */
static mlx_array add_ffn(const fkv_array_pass *p, mlx_array x, mlx_array before) {
    const fkv_array_layer *l = p->layer;
    if (l->router_scale.ctx != NULL) return add_given(p, x, fkv_array_parallel_experts(p, x), l->post_ffn_norm);
    const fkv_features *f = &p->r->model->hparams->features;
    mlx_array read = f->parallel || f->single_blocks ? fkv_array_norm(p, before, l->attn_norm, l->attn_norm_bias)
                                                     : fkv_array_norm(p, x, l->ffn_norm, l->ffn_norm_bias);
    mlx_array given = fkv_array_has(&l->router) ? fkv_array_mixture(p, read) : fkv_array_ffn(p, read);
    return add_given(p, x, given, l->post_ffn_norm);
}

/* Adds the per-layer input to x and applies the output scale of the layer. */
static mlx_array end_layer(const fkv_array_pass *p, mlx_array x) {
    const fkv_array_layer *l = p->layer;
    const int n = (int)p->r->model->hparams->input_dim;
    const int at = (int)p->index;
    if (p->inputs.ctx != NULL) {
        mlx_array input = fkv_mlx_slice(p->g, p->inputs, FKV_MLX_SHAPE(0, at, 0), FKV_MLX_SHAPE(p->n_rows, at + 1, n));
        mlx_array gate = fkv_array_activation(p, fkv_array_product_of_large(p, x, &l->input_gate));
        mlx_array both = fkv_mlx_multiply(p->g, gate, fkv_mlx_reshape(p->g, input, FKV_MLX_SHAPE(p->n_rows, n)));
        x = add_given(p, x, fkv_array_product_of_large(p, both, &l->input_proj), l->input_norm);
    }
    return l->out_scale.ctx == NULL ? x : fkv_mlx_multiply(p->g, x, l->out_scale);
}

/* ---- the step ---- */

static mlx_array upload_numbers(const fkv_array_pass *p, const uint32_t *numbers, uint32_t n) {
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
static mlx_array upload_angles(const fkv_array_pass *p, uint32_t rope) {
    enum { MAX_TURNS = 64 };
    const fkv_runner *r = p->r;
    const fkv_turn *one = r->arrays->one_turn[rope];
    fkv_turn turns[FKV_MAX_HEAD_DIM / 2] = {0};
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

static mlx_array upload_temperatures(const fkv_array_pass *p) {
    const fkv_runner *r = p->r;
    float *to = r->arrays->angles; /* the upload copies the data, so the buffer can be reused */
    if (r->model->hparams->temperature == 0.0f) return (mlx_array){NULL};
    for (uint32_t t = 0; t < r->n_tokens; t++) to[t] = fkv_runner_temperature(r, r->positions[t]);
    return fkv_model_op_upload(p->g, to, FKV_MLX_SHAPE(p->n_rows, 1, 1), MLX_FLOAT32);
}

/* Returns the logits, after the logit scale and soft cap of the model, or the normalized hidden states for embeddings. */
static mlx_array logits_of(const fkv_array_pass *p, mlx_array x) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_weights *w = p->r->model->arrays;
    mlx_array state = fkv_array_norm(p, x, w->final_norm, w->final_norm_bias);
    if (p->r->config.embeddings) return state;
    mlx_array logits = fkv_array_product(p, fkv_array_row_slice(p, state), &w->output);
    logits = fkv_array_plus(p, logits, w->output_bias);
    if (h->logit_scale != 0.0f) logits = fkv_model_op_scale(p->g, logits, h->logit_scale);
    if (h->final_softcap == 0.0f) return logits;
    mlx_array capped = fkv_mlx_tanh(p->g, fkv_model_op_scale(p->g, logits, 1.0f / h->final_softcap));
    return fkv_model_op_scale(p->g, capped, h->final_softcap);
}

/* Looks up each token's row in an embedding table. */
static mlx_array look_up_rows(const fkv_array_pass *p, const fkv_array_matrix *m) {
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

static mlx_array embed(const fkv_array_pass *p) {
    const fkv_model *model = p->r->model;
    mlx_array x = look_up_rows(p, model->embedding != model->output ? &model->arrays->own_embedding : &model->arrays->output);
    mlx_array scale = p->r->arrays->embedding_scale;
    return scale.ctx == NULL ? x : fkv_mlx_multiply(p->g, x, scale);
}

/* Computes the per-layer inputs: (per-layer token embedding + projected embedding) / sqrt(2). */
static mlx_array layer_inputs(const fkv_array_pass *p, mlx_array x) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_weights *w = p->r->model->arrays;
    const fkv_mlx_shape shape = FKV_MLX_SHAPE(p->n_rows, (int)h->n_layers, (int)h->input_dim);
    mlx_array projected =
        fkv_model_op_scale(p->g, fkv_array_product_of_large(p, x, &w->inputs_proj), 1.0f / sqrtf((float)h->dim));
    mlx_array normal = fkv_array_rms_norm(p, fkv_mlx_reshape(p->g, projected, shape), w->inputs_norm);
    mlx_array looked_up = fkv_model_op_scale(p->g, look_up_rows(p, &w->inputs), sqrtf((float)h->input_dim));
    mlx_array both = fkv_mlx_add(p->g, normal, fkv_mlx_reshape(p->g, looked_up, shape));
    return fkv_model_op_scale(p->g, both, sqrtf(0.5f));
}

/* Computes the mixers of a layer, attention and a recurrent layer, up to their output projections. Both read the same input. */
static fkv_status run_mixers(const fkv_array_pass *p, mlx_array x, bool goes_on, mlx_array *heads, mlx_array *mixed) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_array_layer *l = p->layer;
    const bool has_attention = fkv_architecture_has_attention(h, p->index);
    const bool is_recurrent = fkv_architecture_is_recurrent(h, p->index);
    if (!has_attention && !is_recurrent) return FKV_OK;
    fkv_array_rows in = fkv_array_row_slice(p, fkv_array_norm(p, x, l->attn_norm, l->attn_norm_bias));
    if (is_recurrent) FKV_TRY(fkv_array_recurrent(p, in, mixed));
    return has_attention ? write_and_attend(p, in, goes_on, heads) : FKV_OK;
}

static mlx_array take_rows(const fkv_array_pass *p, mlx_array rows, mlx_array indices) {
    return rows.ctx == NULL ? rows : fkv_mlx_take_first(p->g, rows, indices);
}

/* Computes one layer. *x, a handle owned by the caller, becomes the input of the next layer. If `goes_on` is false, returns after
 * the keys and values and the recurrent states have been written. */
static fkv_status run_layer(fkv_array_pass *p, bool goes_on, bool keeps_asked, mlx_array *x) {
    const fkv_runner *r = p->r;
    mlx_array in = *x;
    mlx_array heads = {NULL};
    mlx_array mixed = {NULL};
    FKV_TRY(run_mixers(p, in, goes_on, &heads, &mixed));
    if (!goes_on) return fkv_mlx_graph_status(p->g, "fkv_runner_forward");
    if (keeps_asked && r->n_logit_rows < r->n_tokens) {
        mlx_array asked = upload_numbers(p, r->logit_rows, r->n_logit_rows);
        in = take_rows(p, in, asked);
        heads = take_rows(p, heads, asked);
        mixed = take_rows(p, mixed, asked);
        if (p->inputs.ctx != NULL) fkv_mlx_keep(p->g, &p->inputs, fkv_mlx_take_first(p->g, p->inputs, asked));
        p->n_rows = (int)r->n_logit_rows;
    }
    mlx_array out = add_mixers(p, in, heads, mixed);
    if (fkv_architecture_has_ffn(r->model->hparams, p->index)) out = add_ffn(p, out, in);
    fkv_mlx_keep(p->g, x, end_layer(p, out));
    return fkv_mlx_graph_status(p->g, "fkv_runner_forward");
}

enum {
    SUBMIT_TOKENS = 8, /* on CUDA, steps of up to this number of tokens are submitted in parts */
    SUBMIT_LAYERS = 4  /* layers per part */
};

/* Returns true if the step is submitted in parts. This has been measured on CUDA only. */
static bool has_parts(const fkv_runner *r) {
    bool has_metal = false;
    return r->model->arrays->on_gpu && r->n_tokens <= SUBMIT_TOKENS && mlx_metal_is_available(&has_metal) == 0 && !has_metal;
}

/* Starts the evaluation of x. The GPU then computes while the host builds the rest of the graph. */
static void submit(const fkv_array_pass *p, mlx_array x) {
    mlx_vector_array wanted = mlx_vector_array_new_value(x);
    if (mlx_async_eval(wanted) != 0) p->g->failed = true;
    (void)mlx_vector_array_free(wanted);
}

/* Computes all layers. *x and *logits are owned by the caller; *logits stays empty if no logits are requested. */
static fkv_status build_layers(fkv_array_pass *p, mlx_array *x, mlx_array *logits) {
    const fkv_runner *r = p->r;
    const fkv_array_weights *w = r->model->arrays;
    const fkv_hparams *h = r->model->hparams;
    const uint32_t n_storing = fkv_architecture_n_storing_layers(h);
    const uint32_t n_run = r->n_logit_rows > 0 ? h->n_layers : n_storing; /* if no logits are requested, only layers that store
                                                                             keys or a state must run */
    const bool in_parts = has_parts(r);
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
        FKV_TRY(run_layer(p, i + 1 < n_storing || r->n_logit_rows > 0, i + 1 == h->n_layers, x));
        fkv_mlx_graph_release(p->g, mark);
        if (in_parts && i % SUBMIT_LAYERS == 0 && i + 1 < n_run) submit(p, *x);
    }
    if (r->n_logit_rows > 0) fkv_mlx_keep(p->g, logits, logits_of(p, *x));
    return fkv_mlx_graph_status(p->g, "fkv_runner_forward");
}

/* Evaluates the logits, and any cache writes that the logits do not depend on. */
static fkv_status evaluate(const fkv_array_pass *p, mlx_array logits) {
    mlx_vector_array wanted = mlx_vector_array_new();
    fkv_status status = fkv_mlx_step_pending(p->step, wanted);
    int code = 0;
    if (status == FKV_OK && logits.ctx != NULL) code = mlx_vector_array_append_value(wanted, logits);
    if (status == FKV_OK && code == 0) code = mlx_eval(wanted);
    (void)mlx_vector_array_free(wanted);
    return status != FKV_OK ? status : fkv_mlx_check(code, "fkv_runner_forward");
}

static fkv_status build_forward(fkv_array_pass *p, mlx_array *x, mlx_array *logits) {
    const fkv_runner *r = p->r;
    FKV_TRY(build_layers(p, x, logits));
    fkv_mlx_graph_release(p->g, 0);
    (void)mlx_array_free(*x); /* freed before the evaluation, so that MLX can release the array as early as possible */
    (void)mlx_array_free(p->inputs);
    *x = p->inputs = (mlx_array){NULL};
    FKV_TRY(evaluate(p, *logits));
    if (r->n_logit_rows == 0) return FKV_OK;
    const float *numbers = mlx_array_data_float32(*logits);
    if (numbers == NULL) return fkv_mlx_failed("fkv_runner_forward: cannot read the logits");
    memcpy(r->logits, numbers, (size_t)r->n_logit_rows * fkv_runner_row_values(r) * sizeof *numbers);
    return FKV_OK;
}

/* Runs a step. MLX schedules operations in advance until it reaches its memory limit. During the step, the limit is therefore set
 * to the memory in use plus the planned activations. */
fkv_status fkv_array_forward(fkv_runner *r, fkv_step *step) {
    fkv_array_pass p = {.r = r, .g = &r->arrays->graph, .step = step, .n_rows = (int)r->n_tokens};
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
