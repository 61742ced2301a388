/* The forward pass on the CPU: one for every architecture; what differs is in the model's line of the table and in what its
 * layers have.
 *
 * A layer: norm, q k v, heads normalized and rotated, into pages, attention over pages, output projection, added; norm, gate and
 * up, activation, down projection, added. Products and attention run on the workers; what lies between them goes row by row, in
 * blocks of rows on the workers where a step has many, and everything that one row needs between two products in one go.
 *
 * Every row is computed from itself alone, so a token's logits do not depend on what else is in the step.
 *
 * In the last layer only the rows whose logits are asked for go on behind attention, and without any there is no attention
 * either: a prefill chunk needs the last layer for its keys and values only.
 */
#include "../../cache/cache_workers.h"
#include "packed_weights.h"
#include "runner.h"

enum { ROWS_PER_ITEM = 8 };

typedef struct pass {
    fkv_runner *r;
    const fkv_packed_layer *layer;
    const float *next_norm; /* of the layer that follows, or the final one */
    uint32_t rope;          /* of the layer: FKV_ROPE_ */
    const float *k_center;  /* of the layer, or NULL */
    uint32_t n_rows;        /* T; in the last layer, behind attention, those asked for */
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

static void norm_x_to_h(const pass *p, uint32_t row, const float *weight) {
    const fkv_hparams *h = p->r->model->hparams;
    p->r->ops->rms_norm(x_of(p, row), weight, h->rms_eps, h->dim, h_of(p, row));
}

/* From tokens to what the first layer reads, and the angles of the row's position. */
static void begin_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    fkv_packed_embed(r->model, r->tokens[row], x_of(p, row));
    norm_x_to_h(p, row, p->next_norm);
    size_t at = (size_t)row * r->n_pairs;
    for (uint32_t i = 0; i < r->n_ropes; i++)
        fkv_rope_angles(r->positions[row], r->frequencies[i], r->n_pairs, r->cpu.cosines[i] + at, r->cpu.sines[i] + at);
}

static void turn_heads(const pass *p, uint32_t row, float *heads, uint32_t n_heads, const float *norm, const float *center) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const float *cosines = r->cpu.cosines[p->rope] + (size_t)row * r->n_pairs;
    const float *sines = r->cpu.sines[p->rope] + (size_t)row * r->n_pairs;
    for (uint32_t i = 0; i < n_heads; i++) {
        float *head = heads + (size_t)i * h->head_dim;
        if (norm != NULL) p->r->ops->rms_norm(head, norm, h->rms_eps, h->head_dim, head);
        if (h->rope_interleaved)
            p->r->ops->rope_pairs(head, cosines, sines, r->n_pairs);
        else
            p->r->ops->rope_halves(head, cosines, sines, r->n_pairs);
    }
    for (uint32_t i = 0; center != NULL && i < n_heads * h->head_dim; i++) heads[i] -= center[i];
    fkv_heads_spread(heads, n_heads, h->head_dim, r->head_pad);
}

/* q, k and v as they go to the cache. */
static void heads_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    size_t kv = (size_t)row * h->n_kv_heads * r->head_pad;
    turn_heads(p, row, r->cpu.q + (size_t)row * h->n_q_heads * r->head_pad, h->n_q_heads, p->layer->q_norm, NULL);
    turn_heads(p, row, r->cpu.k + kv, h->n_kv_heads, p->layer->k_norm, p->k_center);
    fkv_heads_spread(r->cpu.v + kv, h->n_kv_heads, h->head_dim, r->head_pad);
}

static void gather_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    fkv_heads_gather(r->cpu.q + (size_t)row * h->n_q_heads * r->head_pad, h->n_q_heads, h->head_dim, r->head_pad,
                     r->cpu.gathered + (size_t)row * r->cpu.q_pad);
}

/* h, which a projection gave, is normalized where the model does that, added to x, and x normalized to h again. */
static void add_row(const pass *p, uint32_t row, const float *post_norm, const float *norm) {
    const fkv_hparams *h = p->r->model->hparams;
    float *given = h_of(p, row);
    if (post_norm != NULL) p->r->ops->rms_norm(given, post_norm, h->rms_eps, h->dim, given);
    p->r->ops->add(x_of(p, row), given, h->dim);
    norm_x_to_h(p, row, norm);
}

static void add_attention_row(const pass *p, uint32_t row) { add_row(p, row, p->layer->post_attn_norm, p->layer->ffn_norm); }

static void add_ffn_row(const pass *p, uint32_t row) { add_row(p, row, p->layer->post_ffn_norm, p->next_norm); }

static void activate_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    float *gate = r->cpu.gate + (size_t)row * r->cpu.ffn_pad;
    const float *up = r->cpu.up + (size_t)row * r->cpu.ffn_pad;
    if (r->model->architecture->activation == FKV_GELU_TANH)
        p->r->ops->gelu_mul(gate, up, r->model->hparams->ffn_dim);
    else
        p->r->ops->silu_mul(gate, up, r->model->hparams->ffn_dim);
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

/* Moves the rows asked for to the front: a row never moves back, so none is overwritten before it has moved. */
static void keep_asked(pass *p) {
    const fkv_runner *r = p->r;
    uint32_t q_stride = r->model->hparams->n_q_heads * r->head_pad;
    for (uint32_t i = 0; i < p->r->n_asked; i++) {
        uint32_t from = r->asked[i];
        if (from == i) continue;
        memcpy(x_of(p, i), x_of(p, from), r->cpu.dim_pad * sizeof(float));
        memcpy(r->cpu.q + (size_t)i * q_stride, r->cpu.q + (size_t)from * q_stride, q_stride * sizeof(float));
    }
    p->n_rows = p->r->n_asked;
}

static void add_attention(const pass *p) {
    const fkv_runner *r = p->r;
    if (r->cpu.heads_lie_apart) run_rows(p, gather_row);
    const fkv_product out = {&p->layer->o, NULL, r->cpu.h, r->cpu.dim_pad};
    multiply(p, &out, 1, r->cpu.heads_lie_apart ? r->cpu.gathered : r->cpu.q, r->cpu.q_pad);
    run_rows(p, add_attention_row);
}

static void add_ffn(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_product gate_up[] = {{&p->layer->gate, NULL, r->cpu.gate, r->cpu.ffn_pad},
                                   {&p->layer->up, NULL, r->cpu.up, r->cpu.ffn_pad}};
    multiply(p, gate_up, 2, r->cpu.h, r->cpu.dim_pad);
    run_rows(p, activate_row);
    const fkv_product down = {&p->layer->down, NULL, r->cpu.h, r->cpu.dim_pad};
    multiply(p, &down, 1, r->cpu.gate, r->cpu.ffn_pad);
    run_rows(p, add_ffn_row);
}

static fkv_status run_layers(pass *p, fkv_step *step) {
    const fkv_model *m = p->r->model;
    const fkv_packed_weights *w = m->packed;
    uint32_t n_layers = m->hparams->n_layers;
    p->next_norm = w->layers[0].attn_norm;
    run_rows(p, begin_row);
    for (uint32_t i = 0; i < n_layers; i++) {
        bool last = i + 1 == n_layers;
        p->layer = &w->layers[i];
        p->next_norm = last ? w->final_norm : w->layers[i + 1].attn_norm;
        p->rope = fkv_runner_rope(p->r, i);
        p->k_center = fkv_runner_k_center(p->r, i);
        multiply_qkv(p);
        run_rows(p, heads_row);
        FKV_TRY(fkv_write(step, i, p->r->cpu.k, p->r->cpu.v));
        if (last && p->r->n_asked == 0) return FKV_OK;
        FKV_TRY(fkv_attend(step, i, p->r->cpu.q, p->r->cpu.q));
        if (last) keep_asked(p);
        add_attention(p);
        add_ffn(p);
    }
    const fkv_product out = {&w->output, NULL, p->r->logits, m->hparams->n_vocab};
    multiply(p, &out, 1, p->r->cpu.h, p->r->cpu.dim_pad);
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
