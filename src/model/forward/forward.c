/* The forward pass on the CPU: one for every architecture; what differs is in the model's features and in what its layers have.
 *
 * A layer: norm, q k v, heads normalized and rotated, into pages, attention over pages, output projection, added; norm, gate and
 * up, activation, down projection (or experts: experts.c), added. In a parallel block the feed-forward reads what q k v read.
 * Products and attention run on the workers; what lies between them goes row by row, in blocks of rows on the workers where a
 * step has many, and everything that one row needs between two products in one go.
 *
 * Every row is computed from itself alone, so a token's logits do not depend on what else is in the step.
 *
 * In the last layer only the rows whose logits are asked for go on behind attention, and without any there is no attention
 * either: a prefill chunk needs the last layer for its keys and values only.
 */
#include "../../cache/cache_workers.h"
#include "experts.h"

#include <math.h>

enum { ROWS_PER_ITEM = 8 };

typedef struct pass {
    fkv_runner *r;
    const fkv_packed_layer *layer;
    const float *next_norm; /* of the layer that follows, or the final one */
    const float *next_norm_bias;
    uint32_t rope;         /* of the layer: FKV_ROPE_ */
    const float *k_center; /* of the layer, or NULL */
    uint32_t n_rows;       /* T; in the last layer, behind attention, those asked for */
} pass;

typedef void (*row_fn)(const pass *p, uint32_t row);

typedef struct row_job {
    const pass *p;
    row_fn run;
} row_job;

static void run_item(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const row_job *job = context;
    uint32_t end = fkv_min_u32((item + 1) * ROWS_PER_ITEM, job->p->n_rows);
    for (uint32_t row = item * ROWS_PER_ITEM; row < end; row++) job->run(job->p, row);
}

static void run_rows(const pass *p, row_fn run) {
    row_job job = {p, run};
    fkv_workers_run(p->r->cpu.workers, run_item, &job, fkv_ceil_div(p->n_rows, ROWS_PER_ITEM));
}

/* ---- between the products, one row each ---- */

static float *x_of(const pass *p, uint32_t row) { return p->r->cpu.x + (size_t)row * p->r->cpu.dim_pad; }
static float *h_of(const pass *p, uint32_t row) { return p->r->cpu.h + (size_t)row * p->r->cpu.dim_pad; }

/* out may be x; no weight: as it is. */
static void norm(const pass *p, const float *x, const float *weight, const float *bias, float *out) {
    const fkv_hparams *h = p->r->model->hparams;
    if (weight == NULL)
        memcpy(out, x, h->dim * sizeof *out);
    else if (h->features.norm == FKV_NORM_LAYER)
        p->r->ops->layer_norm(x, weight, bias, h->norm_eps, h->dim, out);
    else
        p->r->ops->rms_norm(x, weight, h->norm_eps, h->dim, out);
}

/* From tokens to what the first layer reads, and the angles of the row's position. */
static void begin_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    fkv_packed_embed(r->model, r->tokens[row], x_of(p, row));
    norm(p, x_of(p, row), p->next_norm, p->next_norm_bias, h_of(p, row));
    size_t at = (size_t)row * r->n_pairs;
    for (uint32_t i = 0; i < r->n_ropes; i++) {
        float *cosines = r->cpu.cosines[i] + at;
        float *sines = r->cpu.sines[i] + at;
        fkv_rope_angles(r->positions[row], r->frequencies[i], r->n_pairs, cosines, sines);
        for (uint32_t pair = 0; r->rope_sizes[i] != 1.0f && pair < r->n_pairs; pair++) {
            cosines[pair] *= r->rope_sizes[i];
            sines[pair] *= r->rope_sizes[i];
        }
    }
}

static void rotate_heads(const pass *p, uint32_t row, float *heads, uint32_t n_heads) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    if (p->rope == FKV_ROPE_NONE) return;
    const float *cosines = r->cpu.cosines[p->rope] + (size_t)row * r->n_pairs;
    const float *sines = r->cpu.sines[p->rope] + (size_t)row * r->n_pairs;
    for (uint32_t i = 0; i < n_heads; i++)
        (h->rope_interleaved ? r->ops->rope_pairs : r->ops->rope_halves)(heads + (size_t)i * h->head_dim, cosines, sines,
                                                                         r->n_pairs);
}

static void turn_heads(const pass *p, uint32_t row, float *heads, uint32_t n_heads, const float *weight, const float *center) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    bool by_row = h->features.qk_norm == FKV_QK_NORM_ROWS;
    uint32_t width = by_row ? n_heads * h->head_dim : h->head_dim;
    for (uint32_t at = 0; weight != NULL && at < n_heads * h->head_dim; at += width)
        r->ops->rms_norm(heads + at, weight, h->norm_eps, width, heads + at);
    rotate_heads(p, row, heads, n_heads);
    for (uint32_t i = 0; center != NULL && i < n_heads * h->head_dim; i++) heads[i] -= center[i];
    fkv_heads_spread(heads, n_heads, h->head_dim, r->head_pad);
}

static void warm_queries(const pass *p, uint32_t row, float *q) {
    const fkv_hparams *h = p->r->model->hparams;
    float factor = fkv_runner_temperature(p->r, p->r->positions[row]);
    for (uint32_t i = 0; i < h->n_q_heads * p->r->head_pad; i++) q[i] *= factor;
}

/* q, k and v as they go to the cache. */
static void heads_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    size_t kv = (size_t)row * h->n_kv_heads * r->head_pad;
    float *q = r->cpu.q + (size_t)row * h->n_q_heads * r->head_pad;
    turn_heads(p, row, q, h->n_q_heads, p->layer->q_norm, NULL);
    if (h->temperature != 0.0f) warm_queries(p, row, q);
    turn_heads(p, row, r->cpu.k + kv, h->n_kv_heads, p->layer->k_norm, p->k_center);
    fkv_heads_spread(r->cpu.v + kv, h->n_kv_heads, h->head_dim, r->head_pad);
}

static void gather_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    fkv_heads_gather(r->cpu.q + (size_t)row * h->n_q_heads * r->head_pad, h->n_q_heads, h->head_dim, r->head_pad,
                     r->cpu.gathered + (size_t)row * r->cpu.q_pad);
}

/* h, which a projection gave, is normalized where the model does that, scaled, and added to x. */
static void add_row(const pass *p, uint32_t row, const float *post_norm) {
    const fkv_model *m = p->r->model;
    float *given = h_of(p, row);
    if (post_norm != NULL) norm(p, given, post_norm, NULL, given);
    if (m->residual_scale != 1.0f)
        p->r->ops->add_scaled(x_of(p, row), given, m->residual_scale, m->hparams->dim);
    else
        p->r->ops->add(x_of(p, row), given, m->hparams->dim);
}

static void add_attention_row(const pass *p, uint32_t row) {
    add_row(p, row, p->layer->post_attn_norm);
    if (p->r->model->hparams->features.parallel) return; /* the feed-forward has read its rows */
    norm(p, x_of(p, row), p->layer->ffn_norm, p->layer->ffn_norm_bias, h_of(p, row));
}

static void add_ffn_row(const pass *p, uint32_t row) {
    add_row(p, row, p->layer->post_ffn_norm);
    norm(p, x_of(p, row), p->next_norm, p->next_norm_bias, h_of(p, row));
}

static void activate_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    fkv_activate(r, r->cpu.gate + (size_t)row * r->cpu.ffn_pad, r->cpu.up + (size_t)row * r->cpu.ffn_pad);
}

/* Logits as the model means them. */
static void finish_row(const pass *p, uint32_t row) {
    const fkv_hparams *h = p->r->model->hparams;
    float *logits = p->r->logits + (size_t)row * h->n_vocab;
    for (uint32_t i = 0; h->logit_scale != 0.0f && i < h->n_vocab; i++) logits[i] *= h->logit_scale;
    for (uint32_t i = 0; h->final_softcap != 0.0f && i < h->n_vocab; i++)
        logits[i] = h->final_softcap * tanhf(logits[i] / h->final_softcap);
}

/* ---- layers ---- */

static void multiply(const pass *p, const fkv_product *products, uint32_t n_products, const float *x, uint32_t x_stride) {
    fkv_product_run(p->r->cpu.workers, p->r->config.isa, products, n_products, x, p->n_rows, x_stride, p->r->cpu.input);
}

static void multiply_qkv(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const fkv_packed_layer *l = p->layer;
    uint32_t q_stride = h->n_q_heads * r->head_pad;
    uint32_t kv_stride = h->n_kv_heads * r->head_pad;
    const fkv_product products[] = {
        {&l->q, l->q_bias, r->cpu.q, q_stride}, {&l->k, l->k_bias, r->cpu.k, kv_stride}, {&l->v, l->v_bias, r->cpu.v, kv_stride}};
    multiply(p, products, 3, r->cpu.h, r->cpu.dim_pad);
}

static void move_row(float *rows, uint32_t stride, uint32_t to, uint32_t from) {
    memcpy(rows + (size_t)to * stride, rows + (size_t)from * stride, stride * sizeof *rows);
}

/* Moves the rows asked for to the front: a row never moves back, so none is overwritten before it has moved. */
static void keep_asked(pass *p) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    for (uint32_t i = 0; i < r->n_asked; i++) {
        uint32_t from = r->asked[i];
        if (from == i) continue;
        move_row(r->cpu.x, r->cpu.dim_pad, i, from);
        move_row(r->cpu.q, h->n_q_heads * r->head_pad, i, from);
        if (h->features.parallel) move_row(r->cpu.h, r->cpu.dim_pad, i, from);
    }
    p->n_rows = r->n_asked;
}

static void add_attention(const pass *p) {
    const fkv_runner *r = p->r;
    if (r->cpu.heads_lie_apart) run_rows(p, gather_row);
    const fkv_product out = {&p->layer->o, p->layer->o_bias, r->cpu.h, r->cpu.dim_pad};
    multiply(p, &out, 1, r->cpu.heads_lie_apart ? r->cpu.gathered : r->cpu.q, r->cpu.q_pad);
    run_rows(p, add_attention_row);
}

/* From h to the activated rows of gate. */
static void begin_ffn(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_packed_layer *l = p->layer;
    const fkv_product gate_up[] = {{&l->gate, l->gate_bias, r->cpu.gate, r->cpu.ffn_pad},
                                   {&l->up, l->up_bias, r->cpu.up, r->cpu.ffn_pad}};
    multiply(p, gate_up, 2, r->cpu.h, r->cpu.dim_pad);
    run_rows(p, activate_row);
}

static void end_ffn(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_product down = {&p->layer->down, p->layer->down_bias, r->cpu.h, r->cpu.dim_pad};
    multiply(p, &down, 1, r->cpu.gate, r->cpu.ffn_pad);
    run_rows(p, add_ffn_row);
}

/* Behind attention. */
static void finish_layer(const pass *p) {
    const fkv_hparams *h = p->r->model->hparams;
    if (h->features.parallel) begin_ffn(p);
    add_attention(p);
    if (h->n_experts != 0) {
        fkv_experts_run(p->r, p->layer, p->n_rows);
        run_rows(p, add_ffn_row);
        return;
    }
    if (!h->features.parallel) begin_ffn(p);
    end_ffn(p);
}

static void begin_layer(pass *p, uint32_t i) {
    const fkv_packed_weights *w = p->r->model->packed;
    bool last = i + 1 == p->r->model->hparams->n_layers;
    p->layer = &w->layers[i];
    p->next_norm = last ? w->final_norm : w->layers[i + 1].attn_norm;
    p->next_norm_bias = last ? w->final_norm_bias : w->layers[i + 1].attn_norm_bias;
    p->rope = fkv_runner_rope(p->r, i);
    p->k_center = fkv_runner_k_center(p->r, i);
}

static fkv_status run_layers(pass *p, fkv_step *step) {
    const fkv_model *m = p->r->model;
    const fkv_hparams *h = m->hparams;
    const fkv_packed_weights *w = m->packed;
    p->next_norm = w->layers[0].attn_norm;
    p->next_norm_bias = w->layers[0].attn_norm_bias;
    run_rows(p, begin_row);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        bool last = i + 1 == h->n_layers;
        begin_layer(p, i);
        multiply_qkv(p);
        run_rows(p, heads_row);
        FKV_TRY(fkv_write(step, i, p->r->cpu.k, p->r->cpu.v));
        if (last && p->r->n_asked == 0) return FKV_OK;
        FKV_TRY(fkv_attend(step, i, p->r->cpu.q, p->r->cpu.q));
        if (last) keep_asked(p);
        finish_layer(p);
    }
    const fkv_product out = {&w->output, NULL, p->r->logits, h->n_vocab};
    multiply(p, &out, 1, p->r->cpu.h, p->r->cpu.dim_pad);
    if (h->logit_scale != 0.0f || h->final_softcap != 0.0f) run_rows(p, finish_row);
    return FKV_OK;
}

/* ---- the backend ---- */

static fkv_status forward(fkv_runner *r, fkv_step *step) {
    pass p = {.r = r, .n_rows = r->n_tokens};
    return run_layers(&p, step);
}

static void layout(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    fkv_cpu_runner *c = &r->cpu;
    uint32_t t = r->config.max_step_tokens;
    c->dim_pad = fkv_packed_pad(h->dim);
    c->q_pad = fkv_packed_pad(h->n_q_heads * h->head_dim);
    c->ffn_pad = fkv_packed_pad(h->ffn_dim);
    c->heads_lie_apart = r->head_pad != h->head_dim || c->q_pad != h->n_q_heads * h->head_dim;
    for (uint32_t i = 0; i < r->n_ropes; i++) {
        c->cosines[i] = FKV_CARVE(carve, (uint64_t)t * r->n_pairs, float);
        c->sines[i] = FKV_CARVE(carve, (uint64_t)t * r->n_pairs, float);
    }
    c->x = FKV_CARVE(carve, (uint64_t)t * c->dim_pad, float);
    c->h = FKV_CARVE(carve, (uint64_t)t * c->dim_pad, float);
    c->q = FKV_CARVE(carve, (uint64_t)t * h->n_q_heads * r->head_pad, float);
    c->k = FKV_CARVE(carve, (uint64_t)t * h->n_kv_heads * r->head_pad, float);
    c->v = FKV_CARVE(carve, (uint64_t)t * h->n_kv_heads * r->head_pad, float);
    c->gate = FKV_CARVE(carve, (uint64_t)t * c->ffn_pad, float);
    c->up = FKV_CARVE(carve, (uint64_t)t * c->ffn_pad, float);
    if (c->heads_lie_apart) c->gathered = FKV_CARVE(carve, (uint64_t)t * c->q_pad, float);
    if (h->n_experts != 0) fkv_experts_layout(carve, r);
    uint32_t widest = fkv_max_u32(c->dim_pad, fkv_max_u32(c->q_pad, c->ffn_pad));
    c->input = fkv_carve_take(carve, 1, fkv_product_input_bytes(t, widest));
}

static uint64_t step_bytes(const fkv_runner *r, const fkv_config *cache) {
    (void)r;
    (void)cache;
    return 0; /* all of it is in the walk */
}

static fkv_status open_runner(fkv_runner *r, const fkv_config *cache) {
    FKV_TRY(fkv_cache_open(cache, &r->cache));
    r->cpu.workers = fkv_cache_workers(r->cache);
    return FKV_OK;
}

static void close_runner(fkv_runner *r) { fkv_cache_close(r->cache); }

static fkv_status memory(fkv_backend_memory *now) {
    (void)now;
    return fkv_fail(FKV_UNSUPPORTED, "the CPU has no counters of its own: what it holds is the memory of the process");
}

const fkv_model_backend fkv_cpu_model_backend = {.count_weights = fkv_packed_weights_count,
                                                 .load_weights = fkv_packed_weights_load,
                                                 .unload_weights = fkv_packed_weights_unload,
                                                 .available = fkv_memory_available,
                                                 .plan_cache = fkv_plan_make,
                                                 .layout = layout,
                                                 .step_bytes = step_bytes,
                                                 .open = open_runner,
                                                 .close = close_runner,
                                                 .forward = forward,
                                                 .memory = memory};
