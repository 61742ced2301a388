/* The forward pass of the CPU backend, shared by all architectures. Architectures differ only in the features of the model and in
 * the tensors of its layers.
 *
 * A layer first computes the attention block: norm, Q/K/V, QK norms, RoPE, write to pages, attention, output projection, residual
 * addition. The feed-forward block follows: norm, gate and up projections, activation, down projection (or experts, see
 * experts.c), residual addition. In parallel blocks, the feed-forward block and Q/K/V read the same input. Layers that attend to
 * the pages of another layer have no K and V. Layers with per-layer inputs have a third residual addition after the feed-forward
 * block.
 *
 * Latent attention (latent.c) replaces Q/K/V, QK norms and RoPE, and adds a projection between attention and the output
 * projection.
 *
 * Recurrent layers (recurrent.c) replace everything from Q/K/V to attention, or run in parallel with it. In some models, a layer
 * may have no feed-forward block or consist of only a feed-forward block.
 *
 * Worker threads run matrix products, attention, and the row operations between products, in blocks of rows. Each row is computed
 * independently, so a token's logits do not depend on the other rows of the step.
 *
 * In the last layer, only rows whose logits are requested are processed after attention. If no logits are requested, the pass
 * ends after the last layer that stores keys or a state has written them.
 */
#include "../../cache/cache_workers.h"
#include "experts.h"
#include "latent.h"
#include "numerics.h"
#include "recurrent.h"

#include <math.h>

enum { ROWS_PER_ITEM = 4 };

typedef struct pass {
    fkv_runner *r;
    const fkv_packed_layer *layer;
    const float *next_norm; /* input norm of the next layer; in the last layer, the final norm */
    const float *next_norm_bias;

    /* Current layer. */
    const fkv_layer_shape *shape;
    uint32_t index;
    uint32_t head_pad;     /* head dimension, padded as in pages */
    uint32_t q_pad;        /* padded H * D, the number of columns of the output projection */
    uint32_t ffn_pad;      /* padded ffn_dim, the number of columns of the down projection */
    bool needs_gather;     /* true if head padding must be removed before the output projection */
    bool k_is_v;           /* true if V is a copy of K, taken before norm and RoPE */
    uint32_t rope;         /* FKV_ROPE_* */
    const float *k_center; /* or NULL */
    uint32_t
        n_rows; /* number of rows in the step; after the attention of the last layer, number of rows whose logits are requested */
} pass;

typedef void (*row_fn)(const pass *p, uint32_t row);

typedef struct row_job {
    const pass *p;
    row_fn run;
} row_job;

static void run_pass_rows(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const row_job *job = context;
    uint32_t end = fkv_min_u32((item + 1) * ROWS_PER_ITEM, job->p->n_rows);
    for (uint32_t row = item * ROWS_PER_ITEM; row < end; row++) job->run(job->p, row);
}

static void run_rows(const pass *p, row_fn run) {
    row_job job = {p, run};
    fkv_workers_run(p->r->cpu.workers, run_pass_rows, &job, fkv_ceil_div(p->n_rows, ROWS_PER_ITEM));
}

/* ---- row operations between products ---- */

static float *x_of(const pass *p, uint32_t row) { return p->r->cpu.x + (size_t)row * p->r->cpu.dim_pad; }
static float *h_of(const pass *p, uint32_t row) { return p->r->cpu.h + (size_t)row * p->r->cpu.dim_pad; }

/* Normalizes a row; out may be x. Copies the row if weight is NULL. */
static void norm_row(const pass *p, const float *x, const float *weight, const float *bias, float *out) {
    const fkv_hparams *h = p->r->model->hparams;
    if (weight == NULL)
        memcpy(out, x, h->dim * sizeof *out);
    else if (h->features.norm == FKV_NORM_LAYER)
        p->r->ops->layer_norm(x, weight, bias, h->norm_eps, h->dim, out);
    else
        p->r->ops->rms_norm(x, weight, h->norm_eps, h->dim, out);
}

/* Looks up the token's embedding, applies the first norm, and computes the RoPE angles of the row's position. */
static void embed_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    fkv_packed_embed(r->model, r->tokens[row], x_of(p, row));
    norm_row(p, x_of(p, row), p->next_norm, p->next_norm_bias, h_of(p, row));
    for (uint32_t i = 0; i < r->n_ropes; i++) {
        const uint32_t n = r->n_pairs[i];
        float *cosines = r->cpu.cosines[i] + (size_t)row * n;
        float *sines = r->cpu.sines[i] + (size_t)row * n;
        fkv_rope_angles(r->positions[row], r->frequencies[i], n, cosines, sines);
        for (uint32_t pair = 0; r->rope_factors[i] != 1.0f && pair < n; pair++) {
            cosines[pair] *= r->rope_factors[i];
            sines[pair] *= r->rope_factors[i];
        }
    }
}

static void rotate_heads(const pass *p, uint32_t row, float *heads, uint32_t n_heads) {
    const fkv_runner *r = p->r;
    if (p->rope == FKV_ROPE_NONE) return;
    const uint32_t n = r->n_pairs[p->rope];
    const float *cosines = r->cpu.cosines[p->rope] + (size_t)row * n;
    const float *sines = r->cpu.sines[p->rope] + (size_t)row * n;
    for (uint32_t i = 0; i < n_heads; i++) fkv_runner_rotate(r, heads + (size_t)i * p->shape->head_dim, cosines, sines, n);
}

/* Normalizes q or k in place, in parts of `width` values: each head separately, or the whole row at once. */
static void norm_heads(const pass *p, float *heads, uint32_t n_heads, uint32_t width, const float *weight) {
    for (uint32_t at = 0; at < n_heads * p->shape->head_dim; at += width)
        p->r->ops->rms_norm(heads + at, weight, p->r->model->hparams->norm_eps, width, heads + at);
}

static void layer_norm_heads(const pass *p, float *heads, uint32_t n_heads, const float *weight) {
    const uint32_t d = p->shape->head_dim;
    for (uint32_t at = 0; at < n_heads * d; at += d)
        p->r->ops->layer_norm(heads + at, weight + at, NULL, p->r->model->hparams->norm_eps, d, heads + at);
}

static void prepare_heads(const pass *p, uint32_t row, float *heads, uint32_t n_heads, const float *weight, const float *center) {
    const fkv_hparams *h = p->r->model->hparams;
    bool by_row = h->features.qk_norm == FKV_QK_NORM_ROWS;
    uint32_t n = n_heads * p->shape->head_dim;
    const bool rotates_first = h->features.qk_norm_after_rope;
    if (rotates_first) rotate_heads(p, row, heads, n_heads);
    if (h->features.qk_norm == FKV_QK_NORM_UNWEIGHTED && p->rope != FKV_ROPE_NONE) weight = p->r->model->packed->ones;
    if (weight != NULL && h->features.qk_norm == FKV_QK_NORM_OWN_HEADS)
        layer_norm_heads(p, heads, n_heads, weight);
    else if (weight != NULL)
        norm_heads(p, heads, n_heads, by_row ? n : p->shape->head_dim, weight);
    if (!rotates_first) rotate_heads(p, row, heads, n_heads);
    for (uint32_t i = 0; center != NULL && i < n; i++) heads[i] -= center[i];
    fkv_heads_spread(heads, n_heads, p->shape->head_dim, p->head_pad);
}

static void scale_queries(const pass *p, uint32_t row, float *q) {
    const fkv_hparams *h = p->r->model->hparams;
    float factor = fkv_runner_temperature(p->r, p->r->positions[row]);
    for (uint32_t i = 0; i < h->n_q_heads * p->head_pad; i++) q[i] *= factor;
}

static bool is_recurrent(const pass *p) { return fkv_architecture_is_recurrent(p->r->model->hparams, p->index); }
static bool has_attention(const pass *p) { return fkv_architecture_has_attention(p->r->model->hparams, p->index); }

static bool is_latent(const pass *p) { return fkv_architecture_is_latent(p->r->model->hparams); }

static bool has_gate(const pass *p) {
    return p->r->model->hparams->features.attn_gate || p->r->model->hparams->features.gate_in_q;
}

/* Separates the queries and gates of a row in which the query of each head is followed by the gate of the head. */
static void split_q_gate_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const uint32_t d = p->shape->head_dim;
    const uint32_t n_heads = r->model->hparams->n_q_heads;
    const float *from = r->cpu.q_gate + (size_t)row * n_heads * 2 * d;
    float *q = r->cpu.q + (size_t)row * n_heads * p->head_pad;
    float *gate = r->cpu.attn_gate + (size_t)row * n_heads * d;
    for (uint32_t head = 0; head < n_heads; head++, from += 2 * (size_t)d) {
        memcpy(q + (size_t)head * d, from, d * sizeof *q);
        memcpy(gate + (size_t)head * d, from + d, d * sizeof *gate);
    }
}

static bool has_pages(const pass *p) { return p->shape->kv_layer == p->index && has_attention(p); }

/* Applies norms, RoPE, temperature and padding to q, k and v, and centers k, before they are written to the cache. */
static void heads_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const uint32_t n_kv = p->shape->n_kv_heads;
    const uint32_t d = p->shape->head_dim;
    float *q = r->cpu.q + (size_t)row * h->n_q_heads * p->head_pad;
    float *k = r->cpu.k + (size_t)row * n_kv * p->head_pad;
    float *v = r->cpu.v + (size_t)row * n_kv * p->head_pad;
    prepare_heads(p, row, q, h->n_q_heads, p->layer->q_norm, NULL);
    if (fkv_runner_has_temperature(r, p->index)) scale_queries(p, row, q);
    if (!has_pages(p)) return;
    if (p->k_is_v) memcpy(v, k, (size_t)n_kv * d * sizeof *v);
    if (h->features.v_norm) norm_heads(p, v, n_kv, d, r->model->packed->ones);
    prepare_heads(p, row, k, n_kv, p->layer->k_norm, p->k_center);
    const uint32_t v_dim = fkv_architecture_v_dim(h, p->shape);
    for (uint32_t i = 0; h->value_scale != 0.0f && i < n_kv * v_dim; i++) v[i] *= h->value_scale;
    fkv_heads_spread(v, n_kv, v_dim, p->head_pad);
}

/* Zeroes the padding of a row, which may still hold values from a wider layer. */
static void zero_padding(float *row, uint32_t n, uint32_t padded) { memset(row + n, 0, (padded - n) * sizeof *row); }

/* Returns the number of values in a row of the attention output, without head padding. */
static uint32_t q_dim(const pass *p) {
    const fkv_hparams *h = p->r->model->hparams;
    return h->n_q_heads * fkv_architecture_v_dim(h, p->shape);
}

/* Multiplies the attention output, without head padding, by the sigmoid of its gate. */
static void gate_heads_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    float *heads = (p->needs_gather ? r->cpu.gathered : r->cpu.q) + (size_t)row * p->q_pad;
    r->ops->sigmoid_mul(heads, r->cpu.attn_gate + (size_t)row * q_dim(p), q_dim(p));
}

static void gather_heads_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    float *out = r->cpu.gathered + (size_t)row * p->q_pad;
    fkv_heads_gather(r->cpu.q + (size_t)row * h->n_q_heads * p->head_pad, h->n_q_heads, fkv_architecture_v_dim(h, p->shape),
                     p->head_pad, out);
    zero_padding(out, q_dim(p), p->q_pad);
}

/* Applies the optional post-norm and residual scale to the projection output in h, and adds the result to the residual stream
 * x. */
static void add_residual_row(const pass *p, uint32_t row, const float *post_norm) {
    const fkv_model *m = p->r->model;
    float *output = h_of(p, row);
    if (post_norm != NULL) norm_row(p, output, post_norm, NULL, output);
    if (m->residual_scale != 1.0f)
        p->r->ops->add_scaled(x_of(p, row), output, m->residual_scale, m->hparams->dim);
    else
        p->r->ops->add(x_of(p, row), output, m->hparams->dim);
}

/* Ends a layer: scales x by the layer's output scale and applies the next layer's norm. */
static void end_row(const pass *p, uint32_t row) {
    float *x = x_of(p, row);
    for (uint32_t i = 0; p->layer->out_scale != NULL && i < p->r->model->hparams->dim; i++) x[i] *= p->layer->out_scale[0];
    norm_row(p, x, p->next_norm, p->next_norm_bias, h_of(p, row));
}

/* Adds the attention output to the residual stream without a post-norm. Used if a recurrent layer runs in parallel with
 * attention. */
static void add_first_mixer_row(const pass *p, uint32_t row) { add_residual_row(p, row, NULL); }

static void add_mixer_row(const pass *p, uint32_t row) {
    add_residual_row(p, row, p->layer->post_attn_norm);
    /* in parallel blocks, the feed-forward block uses the input of attention, so no norm is applied here */
    if (p->r->model->hparams->features.parallel) return;
    if (!fkv_architecture_has_ffn(p->r->model->hparams, p->index))
        end_row(p, row);
    else
        norm_row(p, x_of(p, row), p->layer->ffn_norm, p->layer->ffn_norm_bias, h_of(p, row));
}

static void add_ffn_row(const pass *p, uint32_t row) {
    add_residual_row(p, row, p->layer->post_ffn_norm);
    if (p->layer->input_norm == NULL) end_row(p, row);
}

static float *dense_of(const pass *p, uint32_t row) { return p->r->cpu.dense + (size_t)row * p->r->cpu.dim_pad; }

static void begin_router_row(const pass *p, uint32_t row) {
    norm_row(p, h_of(p, row), p->layer->post_dense_norm, NULL, dense_of(p, row));
    norm_row(p, x_of(p, row), p->layer->router_norm, NULL, h_of(p, row));
}

static void begin_experts_row(const pass *p, uint32_t row) {
    norm_row(p, x_of(p, row), p->layer->experts_norm, NULL, h_of(p, row));
}

static void join_experts_row(const pass *p, uint32_t row) {
    norm_row(p, h_of(p, row), p->layer->post_experts_norm, NULL, h_of(p, row));
    p->r->ops->add(h_of(p, row), dense_of(p, row), p->r->model->hparams->dim);
}

static void add_input_row(const pass *p, uint32_t row) {
    add_residual_row(p, row, p->layer->input_norm);
    end_row(p, row);
}

static void activate_ffn_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    float *gate = r->cpu.gate + (size_t)row * p->ffn_pad;
    const fkv_hparams *h = r->model->hparams;
    for (uint32_t i = 0; h->gate_scale != 0.0f && i < p->shape->ffn_dim; i++) gate[i] *= h->gate_scale;
    if (h->features.plain_ffn)
        fkv_activate_plain(r, p->index, gate, p->shape->ffn_dim);
    else
        fkv_activate(r, gate, r->cpu.up + (size_t)row * p->ffn_pad, p->shape->ffn_dim);
    for (uint32_t i = 0; h->down_scale != 0.0f && i < p->shape->ffn_dim; i++) gate[i] *= h->down_scale;
    zero_padding(gate, p->shape->ffn_dim, p->ffn_pad);
}

static float *inputs_of(const pass *p, uint32_t row) {
    const fkv_hparams *h = p->r->model->hparams;
    return p->r->cpu.inputs + (size_t)row * h->n_layers * h->input_dim;
}

static void activate_input_row(const pass *p, uint32_t row) {
    const uint32_t n = p->r->model->hparams->input_dim;
    float *gate = p->r->cpu.gate + (size_t)row * fkv_packed_pad(n);
    fkv_activate(p->r, gate, inputs_of(p, row) + (size_t)p->index * n, n);
    zero_padding(gate, n, fkv_packed_pad(n));
}

/* Computes the per-layer inputs: (normalized projection of the embedding + per-layer token embedding) / sqrt(2). */
static void begin_inputs_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_model *m = r->model;
    const fkv_hparams *h = m->hparams;
    const uint32_t n = h->input_dim;
    const float of_projection = 1.0f / sqrtf((float)h->dim);
    float *inputs = inputs_of(p, row);
    float *looked_up = r->cpu.looked_up + (size_t)row * h->n_layers * n;
    fkv_tensor_row_floats(m->inputs, r->tokens[row], looked_up);
    for (uint32_t i = 0; i < h->n_layers * n; i++) inputs[i] *= of_projection;
    for (uint32_t at = 0; at < h->n_layers * n; at += n)
        r->ops->rms_norm(inputs + at, m->packed->inputs_norm, h->norm_eps, n, inputs + at);
    for (uint32_t i = 0; i < h->n_layers * n; i++) inputs[i] = (inputs[i] + looked_up[i] * sqrtf((float)n)) * sqrtf(0.5f);
}

/* Applies the logit scale and the final soft cap. */
static void finish_logits_row(const pass *p, uint32_t row) {
    const fkv_hparams *h = p->r->model->hparams;
    float *logits = p->r->logits + (size_t)row * h->n_vocab;
    for (uint32_t i = 0; h->logit_scale != 0.0f && i < h->n_vocab; i++) logits[i] *= h->logit_scale;
    for (uint32_t i = 0; h->final_softcap != 0.0f && i < h->n_vocab; i++)
        logits[i] = h->final_softcap * tanhf(logits[i] / h->final_softcap);
}

/* ---- layers ---- */

static void multiply_rows(const pass *p, const fkv_product *products, uint32_t n_products, const float *x, uint32_t x_stride) {
    fkv_product_run(p->r->cpu.workers, p->r->config.isa, products, n_products, x, p->n_rows, x_stride, p->r->cpu.input);
}

static void multiply_qkv(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const fkv_packed_layer *l = p->layer;
    uint32_t q_stride = h->n_q_heads * p->head_pad;
    uint32_t kv_stride = p->shape->n_kv_heads * p->head_pad;
    const bool is_split = h->features.gate_in_q;
    if (is_split) q_stride = 2 * q_dim(p);
    const fkv_product products[] = {{&l->q, l->q_bias, is_split ? r->cpu.q_gate : r->cpu.q, q_stride},
                                    {&l->k, l->k_bias, r->cpu.k, kv_stride},
                                    {&l->v, l->v_bias, r->cpu.v, kv_stride}};
    const fkv_product gate = {&l->attn_gate, NULL, r->cpu.attn_gate, q_dim(p)};
    multiply_rows(p, products, !has_pages(p) ? 1 : p->k_is_v ? 2 : 3, r->cpu.h, r->cpu.dim_pad);
    if (h->features.attn_gate) multiply_rows(p, &gate, 1, r->cpu.h, r->cpu.dim_pad);
    if (is_split) run_rows(p, split_q_gate_row);
}

static void move_row(float *rows, uint32_t stride, uint32_t to, uint32_t from) {
    memcpy(rows + (size_t)to * stride, rows + (size_t)from * stride, stride * sizeof *rows);
}

/* Moves the rows whose logits are requested to the front. Rows move to lower indices and are processed in ascending order, so no
 * row is overwritten before it has been moved. */
static void keep_logit_rows(pass *p) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    for (uint32_t i = 0; i < r->n_logit_rows; i++) {
        uint32_t from = r->logit_rows[i];
        if (from == i) continue;
        move_row(r->cpu.x, r->cpu.dim_pad, i, from);
        if (is_recurrent(p)) move_row(r->cpu.mixed, fkv_recurrent_pad(h), i, from);
        if (has_attention(p)) move_row(is_latent(p) ? r->cpu.attended : r->cpu.q, h->n_q_heads * p->head_pad, i, from);
        if (h->input_dim != 0) move_row(r->cpu.inputs, h->n_layers * h->input_dim, i, from);
        const bool is_ffn = !is_recurrent(p) && !has_attention(p);
        if (h->features.parallel || is_ffn) move_row(r->cpu.h, r->cpu.dim_pad, i, from);
        if (has_gate(p) && has_attention(p)) move_row(r->cpu.attn_gate, q_dim(p), i, from);
    }
    p->n_rows = r->n_logit_rows;
}

/* Adds the outputs of attention and of the recurrent layer to x. */
static void add_mixers(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_product attended = {&p->layer->o, p->layer->o_bias, r->cpu.h, r->cpu.dim_pad};
    const fkv_product mixed = {&p->layer->mixer_out, p->layer->mixer_out_bias, r->cpu.h, r->cpu.dim_pad};
    if (is_latent(p) && has_attention(p)) {
        fkv_latent_finish(p->r, p->layer, p->n_rows);
        multiply_rows(p, &attended, 1, r->cpu.latent_out, p->q_pad);
    } else if (has_attention(p)) {
        if (p->needs_gather) run_rows(p, gather_heads_row);
        if (has_gate(p)) run_rows(p, gate_heads_row);
        multiply_rows(p, &attended, 1, p->needs_gather ? r->cpu.gathered : r->cpu.q, p->q_pad);
    }
    if (has_attention(p) && is_recurrent(p)) run_rows(p, add_first_mixer_row);
    if (is_recurrent(p)) multiply_rows(p, &mixed, 1, r->cpu.mixed, fkv_recurrent_pad(r->model->hparams));
    run_rows(p, add_mixer_row);
}

/* Computes activation(gate) * up (without a gate: activation(up)) from the rows of h, and stores the result in the buffer
 * `gate`. */
static void begin_ffn(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_packed_layer *l = p->layer;
    const fkv_product gate_up[] = {{&l->gate, l->gate_bias, r->cpu.gate, p->ffn_pad},
                                   {&l->up, l->up_bias, r->cpu.up, p->ffn_pad}};
    const fkv_product up = {&l->up, l->up_bias, r->cpu.gate, p->ffn_pad};
    if (r->model->hparams->features.plain_ffn)
        multiply_rows(p, &up, 1, r->cpu.h, r->cpu.dim_pad);
    else
        multiply_rows(p, gate_up, 2, r->cpu.h, r->cpu.dim_pad);
    run_rows(p, activate_ffn_row);
}

static void multiply_down(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_product down = {&p->layer->down, p->layer->down_bias, r->cpu.h, r->cpu.dim_pad};
    multiply_rows(p, &down, 1, r->cpu.gate, p->ffn_pad);
}

static void end_ffn(const pass *p) {
    multiply_down(p);
    run_rows(p, add_ffn_row);
}

/* Gates the layer's per-layer input with a projection of x, and adds the projected result to x. */
static void add_input(const pass *p) {
    const fkv_runner *r = p->r;
    const uint32_t padded = fkv_packed_pad(r->model->hparams->input_dim);
    const fkv_product gate = {&p->layer->input_gate, NULL, r->cpu.gate, padded};
    const fkv_product out = {&p->layer->input_proj, NULL, r->cpu.h, r->cpu.dim_pad};
    multiply_rows(p, &gate, 1, r->cpu.x, r->cpu.dim_pad);
    run_rows(p, activate_input_row);
    multiply_rows(p, &out, 1, r->cpu.gate, padded);
    run_rows(p, add_input_row);
}

/* Runs the experts of a layer and adds their output to x. If a dense feed-forward block runs in parallel, the router, the experts
 * and the dense block apply separate norms to x, and both outputs are added. */
static void add_experts(const pass *p) {
    const fkv_runner *r = p->r;
    const bool has_parallel_experts = r->model->hparams->features.parallel_experts;
    if (has_parallel_experts) {
        begin_ffn(p);
        multiply_down(p);
        run_rows(p, begin_router_row);
    }
    fkv_experts_route(p->r, p->layer, p->n_rows);
    if (has_parallel_experts) run_rows(p, begin_experts_row);
    fkv_experts_run(p->r, p->layer, p->shape, p->n_rows);
    if (has_parallel_experts) run_rows(p, join_experts_row);
    run_rows(p, add_ffn_row);
}

/* Computes the part of a layer that follows attention. */
static void finish_layer(const pass *p) {
    const fkv_hparams *h = p->r->model->hparams;
    if (h->features.parallel) begin_ffn(p);
    if (has_attention(p) || is_recurrent(p)) add_mixers(p);
    if (!fkv_architecture_has_ffn(h, p->index)) return;
    if (fkv_architecture_has_experts(h, p->index)) {
        add_experts(p);
    } else {
        if (!h->features.parallel) begin_ffn(p);
        end_ffn(p);
    }
    if (h->input_dim != 0) add_input(p);
}

static bool heads_need_gather(const fkv_runner *r, const fkv_layer_shape *s) {
    const uint32_t v_dim = fkv_architecture_v_dim(r->model->hparams, s);
    const uint32_t n = r->model->hparams->n_q_heads * v_dim;
    if (fkv_architecture_is_latent(r->model->hparams)) return false;
    return fkv_runner_head_pad(r, s->head_dim) != v_dim || fkv_packed_pad(n) != n;
}

static void begin_layer(pass *p, uint32_t i) {
    const fkv_packed_weights *w = p->r->model->packed;
    const fkv_hparams *h = p->r->model->hparams;
    bool last = i + 1 == h->n_layers;
    p->index = i;
    p->layer = &w->layers[i];
    p->shape = &h->shapes[i];
    p->head_pad = fkv_runner_head_pad(p->r, p->shape->head_dim);
    p->q_pad = fkv_packed_pad(q_dim(p));
    p->ffn_pad = fkv_packed_pad(p->shape->ffn_dim);
    p->needs_gather = heads_need_gather(p->r, p->shape);
    p->k_is_v = p->r->model->tensors[i].v == NULL;
    p->next_norm = last ? w->final_norm : w->layers[i + 1].attn_norm;
    p->next_norm_bias = last ? w->final_norm_bias : w->layers[i + 1].attn_norm_bias;
    p->rope = fkv_runner_rope(p->r, i);
    p->k_center = fkv_runner_k_center(p->r, i);
}

static void begin_inputs(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const fkv_product inputs = {&r->model->packed->inputs_proj, NULL, r->cpu.inputs, h->n_layers * h->input_dim};
    multiply_rows(p, &inputs, 1, r->cpu.x, r->cpu.dim_pad);
    run_rows(p, begin_inputs_row);
}

/* Computes the queries, keys and values of an attention layer. */
static void prepare_attention(const pass *p) {
    const fkv_runner *r = p->r;
    if (is_latent(p)) {
        fkv_latent_prepare(p->r, p->layer, p->index);
        return;
    }
    multiply_qkv(p);
    run_rows(p, heads_row);
    if (r->observe != NULL && has_pages(p)) r->observe(r->observer, p->index, r->cpu.q, r->cpu.k, p->n_rows, r->positions[0]);
}

static fkv_status run_layers(pass *p, fkv_step *step) {
    const fkv_model *m = p->r->model;
    const fkv_hparams *h = m->hparams;
    const fkv_packed_weights *w = m->packed;
    p->next_norm = w->layers[0].attn_norm;
    p->next_norm_bias = w->layers[0].attn_norm_bias;
    run_rows(p, embed_row);
    if (h->input_dim != 0) begin_inputs(p);
    const uint32_t n_storing = fkv_architecture_n_storing_layers(h);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        bool last = i + 1 == h->n_layers;
        begin_layer(p, i);
        if (is_recurrent(p)) FKV_TRY(fkv_recurrent_run(p->r, i, step));
        if (has_attention(p)) prepare_attention(p);
        if (has_pages(p)) FKV_TRY(fkv_write(step, p->shape->page_layer, p->r->cpu.k, is_latent(p) ? NULL : p->r->cpu.v));
        if (i + 1 >= n_storing && p->r->n_logit_rows == 0) return FKV_OK;
        float *out = is_latent(p) ? p->r->cpu.attended : p->r->cpu.q;
        if (has_attention(p)) FKV_TRY(fkv_attend(step, p->shape->page_layer, p->r->cpu.q, out));
        if (last) keep_logit_rows(p);
        finish_layer(p);
    }
    if (p->r->config.embeddings) {
        for (uint32_t i = 0; i < p->n_rows; i++)
            memcpy(p->r->logits + (size_t)i * h->dim, h_of(p, i), h->dim * sizeof *p->r->logits);
        return FKV_OK;
    }
    const fkv_product out = {&w->output, w->output_bias, p->r->logits, h->n_vocab};
    multiply_rows(p, &out, 1, p->r->cpu.h, p->r->cpu.dim_pad);
    if (h->logit_scale != 0.0f || h->final_softcap != 0.0f) run_rows(p, finish_logits_row);
    return FKV_OK;
}

/* ---- backend interface ---- */

static fkv_status forward_cpu(fkv_runner *r, fkv_step *step) {
    pass p = {.r = r, .n_rows = r->n_tokens};
    FKV_TRY(run_layers(&p, step));
    return fkv_experts_status(r);
}

static fkv_status replay_cpu(fkv_runner *r, fkv_step *step) {
    const fkv_hparams *h = r->model->hparams;
    for (uint32_t i = 0; i < h->n_layers; i++)
        if (fkv_architecture_is_recurrent(h, i)) FKV_TRY(fkv_recurrent_replay(r, i, step));
    return FKV_OK;
}

/* Largest row widths over all layers. */
typedef struct widths {
    uint32_t q, kv;     /* row widths including head padding */
    uint32_t gathered;  /* width of attention output rows without head padding; 0 if no layer has head padding to remove */
    uint32_t attention; /* input width of the output projection */
    uint32_t ffn;
} widths;

static widths widths_of(const fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    widths w = {0};
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const fkv_layer_shape *s = &h->shapes[i];
        const uint32_t key_pad = fkv_runner_head_pad(r, s->head_dim) + fkv_runner_rope_pad(h);
        const uint32_t q_pad = fkv_packed_pad(h->n_q_heads * fkv_architecture_v_dim(h, s));
        w.q = fkv_max_u32(w.q, h->n_q_heads * key_pad);
        w.kv = fkv_max_u32(w.kv, s->n_kv_heads * key_pad);
        w.attention = fkv_max_u32(w.attention, q_pad);
        if (heads_need_gather(r, s)) w.gathered = fkv_max_u32(w.gathered, q_pad);
        w.ffn = fkv_max_u32(w.ffn, fkv_packed_pad(s->ffn_dim));
    }
    w.ffn = fkv_max_u32(w.ffn, fkv_packed_pad(h->input_dim));
    if (h->n_experts != 0) w.ffn = fkv_max_u32(w.ffn, fkv_packed_pad(h->expert_dim));
    return w;
}

static void layout_activations(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    const widths w = widths_of(r);
    fkv_cpu_runner *c = &r->cpu;
    uint64_t t = r->config.max_step_tokens;
    c->dim_pad = fkv_packed_pad(h->dim);
    c->ffn_pad = w.ffn;
    for (uint32_t i = 0; i < r->n_ropes; i++) {
        c->cosines[i] = FKV_CARVE(carve, t * r->n_pairs[i], float);
        c->sines[i] = FKV_CARVE(carve, t * r->n_pairs[i], float);
    }
    c->x = FKV_CARVE(carve, t * c->dim_pad, float);
    c->h = FKV_CARVE(carve, t * c->dim_pad, float);
    c->q = FKV_CARVE(carve, t * w.q, float);
    c->k = FKV_CARVE(carve, t * w.kv, float);
    c->v = FKV_CARVE(carve, t * w.kv, float);
    c->gate = FKV_CARVE(carve, t * c->ffn_pad, float);
    c->up = FKV_CARVE(carve, t * c->ffn_pad, float);
    if (h->features.attn_gate || h->features.gate_in_q) c->attn_gate = FKV_CARVE(carve, t * w.attention, float);
    if (h->features.gate_in_q) c->q_gate = FKV_CARVE(carve, t * h->n_q_heads * 2 * h->head_dim, float);
    if (w.gathered != 0) c->gathered = FKV_CARVE(carve, t * w.gathered, float);
    if (h->input_dim != 0) {
        c->inputs = FKV_CARVE(carve, t * h->n_layers * h->input_dim, float);
        c->looked_up = FKV_CARVE(carve, t * h->n_layers * h->input_dim, float);
    }
    if (h->n_experts != 0) fkv_experts_layout(carve, r);
    if (h->n_experts != 0 && h->features.parallel_experts) c->dense = FKV_CARVE(carve, t * c->dim_pad, float);
    if (fkv_architecture_has_recurrence(h)) fkv_recurrent_layout(carve, r);
    if (fkv_architecture_has_recurrence(h) && r->config.drafts) fkv_recurrent_layout_saved(carve, r);
    uint32_t widest = fkv_max_u32(c->dim_pad, fkv_max_u32(w.attention, c->ffn_pad));
    widest = fkv_max_u32(widest, fkv_recurrent_pad(h));
    uint64_t input_bytes = fkv_product_input_bytes((uint32_t)t, widest);
    if (fkv_architecture_is_latent(h)) {
        const uint64_t of_heads = fkv_latent_layout(carve, r);
        input_bytes = of_heads > input_bytes ? of_heads : input_bytes;
    }
    c->input = fkv_carve_take(carve, 1, input_bytes);
}

static uint64_t step_bytes(const fkv_runner *r, const fkv_config *cache) {
    (void)r;
    (void)cache;
    return 0; /* 0, because layout_activations() reserves all activations in host memory */
}

static fkv_status open_cpu_runner(fkv_runner *r, const fkv_config *cache) {
    FKV_TRY(fkv_cache_open(cache, &r->cache));
    r->cpu.workers = fkv_cache_workers(r->cache);
    return FKV_OK;
}

static void close_cpu_runner(fkv_runner *r) { fkv_cache_close(r->cache); }

static fkv_status cpu_memory(fkv_backend_memory *now) {
    (void)now;
    return fkv_fail(FKV_UNSUPPORTED, "the CPU backend has no allocator statistics: it uses ordinary process memory");
}

static fkv_status cpu_numerics(fkv_isa isa, char text[FKV_NUMERICS_BYTES]) {
    fkv_cpu_numerics(isa, text);
    return FKV_OK;
}

const fkv_model_backend fkv_cpu_model_backend = {.count_weights = fkv_packed_weights_count,
                                                 .load_weights = fkv_packed_weights_load,
                                                 .unload_weights = fkv_packed_weights_unload,
                                                 .available = fkv_memory_available,
                                                 .numerics = cpu_numerics,
                                                 .plan_cache = fkv_plan_make,
                                                 .layout = layout_activations,
                                                 .step_bytes = step_bytes,
                                                 .open = open_cpu_runner,
                                                 .close = close_cpu_runner,
                                                 .forward = forward_cpu,
                                                 .replay = replay_cpu,
                                                 .memory = cpu_memory};
