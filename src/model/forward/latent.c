/* Latent attention on the CPU; see latent.h. The matrix product of a head reads contiguous rows, so the input rows of each head
 * are gathered first. Each row is computed independently of the other rows of the step. */
#include "latent.h"

enum { ROWS_PER_ITEM = 4 };

typedef struct latent_pass {
    const fkv_runner *r;
    const fkv_packed_layer *layer;
    const fkv_latent *shape;
    uint32_t n_rows;
    uint32_t latent_pad; /* number of latent channels, padded as in pages */
    uint32_t key_pad;    /* total number of channels of a row in pages, including RoPE channels and padding */
    uint32_t rope;       /* FKV_ROPE_* */
    bool scales_queries; /* queries are multiplied by fkv_runner_temperature() */
    void (*row)(const struct latent_pass *p, uint32_t row);
} latent_pass;

static uint32_t query_dim(const fkv_latent *l) { return l->nope_dim + l->rope_dim; }

/* Returns the larger of the numbers of columns, with padding, of the two per-head matrices. */
static uint32_t head_columns(const fkv_latent *l) { return fkv_packed_pad(fkv_max_u32(l->nope_dim, l->dim)); }

uint64_t fkv_latent_layout(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    const fkv_latent *l = &h->latent;
    const uint64_t t = r->config.max_step_tokens;
    fkv_cpu_runner *c = &r->cpu;
    c->latent_q = FKV_CARVE(carve, t * h->n_q_heads * query_dim(l), float);
    if (l->q_dim != 0) c->latent_low = FKV_CARVE(carve, t * fkv_packed_pad(l->q_dim), float);
    c->latent_kv = FKV_CARVE(carve, t * (l->dim + l->rope_dim), float);
    c->latent_heads = FKV_CARVE(carve, t * h->n_q_heads * head_columns(l), float);
    c->attended = FKV_CARVE(carve, t * h->n_q_heads * fkv_runner_head_pad(r, l->dim), float);
    c->latent_out = FKV_CARVE(carve, t * fkv_packed_pad(h->n_q_heads * l->v_dim), float);
    const uint64_t of_heads = h->n_q_heads * fkv_product_input_bytes((uint32_t)t, head_columns(l));
    const uint64_t of_queries = fkv_product_input_bytes((uint32_t)t, fkv_packed_pad(l->q_dim));
    return of_heads > of_queries ? of_heads : of_queries;
}

static latent_pass begin_pass(const fkv_runner *r, const fkv_packed_layer *layer, uint32_t n_rows) {
    const fkv_hparams *h = r->model->hparams;
    const uint32_t latent_pad = fkv_runner_head_pad(r, h->latent.dim);
    return (latent_pass){.r = r,
                         .layer = layer,
                         .shape = &h->latent,
                         .n_rows = n_rows,
                         .latent_pad = latent_pad,
                         .key_pad = latent_pad + fkv_runner_rope_pad(h)};
}

static void run_latent_rows(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const latent_pass *p = context;
    const uint32_t end = fkv_min_u32((item + 1) * ROWS_PER_ITEM, p->n_rows);
    for (uint32_t row = item * ROWS_PER_ITEM; row < end; row++) p->row(p, row);
}

static void run_rows(latent_pass *p, void (*row)(const latent_pass *p, uint32_t row)) {
    p->row = row;
    fkv_workers_run(p->r->cpu.workers, run_latent_rows, p, fkv_ceil_div(p->n_rows, ROWS_PER_ITEM));
}

/* Copies n values and pads them with zeros to `padded` values. */
static void copy_padded(const float *from, uint32_t n, uint32_t padded, float *to) {
    memcpy(to, from, n * sizeof *to);
    memset(to + n, 0, (padded - n) * sizeof *to);
}

static float norm_eps(const latent_pass *p) {
    return p->shape->norm_eps != 0.0f ? p->shape->norm_eps : p->r->model->hparams->norm_eps;
}

static void norm_low_row(const latent_pass *p, uint32_t row) {
    const uint32_t n = p->shape->q_dim;
    float *x = p->r->cpu.latent_low + (size_t)row * fkv_packed_pad(n);
    p->r->ops->rms_norm(x, p->layer->q_a_norm, norm_eps(p), n, x);
    memset(x + n, 0, (fkv_packed_pad(n) - n) * sizeof *x);
}

/* Copies the RoPE channels of a query or key to their position in a padded row, and applies RoPE to them. */
static void place_rope(const latent_pass *p, uint32_t row, const float *from, float *to) {
    const fkv_runner *r = p->r;
    copy_padded(from, p->shape->rope_dim, p->key_pad - p->latent_pad, to);
    if (p->rope == FKV_ROPE_NONE) return;
    const uint32_t n = r->n_pairs[p->rope];
    fkv_runner_rotate(r, to, r->cpu.cosines[p->rope] + (size_t)row * n, r->cpu.sines[p->rope] + (size_t)row * n, n);
}

/* Returns the input row for the product with a head's matrix, which has n_cols columns. */
static float *head_row(const latent_pass *p, uint32_t head, uint32_t row, uint32_t n_cols) {
    return p->r->cpu.latent_heads + ((size_t)head * p->n_rows + row) * n_cols;
}

static void prepare_row(const latent_pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_latent *l = p->shape;
    const uint32_t n_heads = r->model->hparams->n_q_heads;
    const uint32_t n_cols = fkv_packed_pad(l->nope_dim);
    const float *kv = r->cpu.latent_kv + (size_t)row * (l->dim + l->rope_dim);
    float *k = r->cpu.k + (size_t)row * p->key_pad;
    r->ops->rms_norm(kv, p->layer->kv_a_norm, norm_eps(p), l->dim, k);
    memset(k + l->dim, 0, (p->latent_pad - l->dim) * sizeof *k);
    place_rope(p, row, kv + l->dim, k + p->latent_pad);
    float *from = r->cpu.latent_q + (size_t)row * n_heads * query_dim(l);
    const float factor = p->scales_queries ? fkv_runner_temperature(r, r->positions[row]) : 1.0f;
    for (uint32_t i = 0; p->scales_queries && i < n_heads * query_dim(l); i++) from[i] *= factor;
    for (uint32_t head = 0; head < n_heads; head++, from += query_dim(l)) {
        float *q = r->cpu.q + ((size_t)row * n_heads + head) * p->key_pad;
        copy_padded(from, l->nope_dim, n_cols, head_row(p, head, row, n_cols));
        memset(q + l->dim, 0, (p->latent_pad - l->dim) * sizeof *q);
        place_rope(p, row, from + l->nope_dim, q + p->latent_pad);
    }
}

void fkv_latent_prepare(fkv_runner *r, const fkv_packed_layer *layer, uint32_t index) {
    const fkv_hparams *h = r->model->hparams;
    const fkv_latent *l = &h->latent;
    fkv_cpu_runner *c = &r->cpu;
    latent_pass p = begin_pass(r, layer, r->n_tokens);
    p.rope = fkv_runner_rope(r, index);
    p.scales_queries = fkv_runner_has_temperature(r, index);
    const uint32_t n_query = h->n_q_heads * query_dim(l);
    const bool is_low = l->q_dim != 0;
    const fkv_product q = {&layer->q, NULL, c->latent_q, n_query, NULL};
    const fkv_product low = {&layer->q_a, layer->q_a_bias, c->latent_low, fkv_packed_pad(l->q_dim), NULL};
    const fkv_product inputs[] = {is_low ? low : q, {&layer->kv_a, layer->kv_a_bias, c->latent_kv, l->dim + l->rope_dim, NULL}};
    fkv_product_run(c->workers, r->config.isa, inputs, 2, c->h, p.n_rows, c->dim_pad, c->input);
    if (is_low) {
        run_rows(&p, norm_low_row);
        fkv_product_run(c->workers, r->config.isa, &q, 1, c->latent_low, p.n_rows, fkv_packed_pad(l->q_dim), c->input);
    }
    run_rows(&p, prepare_row);
    const fkv_head_products absorb = {.matrices = layer->k_up,
                                      .n_heads = h->n_q_heads,
                                      .x = c->latent_heads,
                                      .out = c->q,
                                      .out_stride = h->n_q_heads * p.key_pad,
                                      .head_stride = p.key_pad};
    fkv_product_run_heads(c->workers, r->config.isa, &absorb, p.n_rows, c->input);
}

static void gather_row(const latent_pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_latent *l = p->shape;
    const uint32_t n_heads = r->model->hparams->n_q_heads;
    const uint32_t n_cols = fkv_packed_pad(l->dim);
    const uint32_t n_out = n_heads * l->v_dim;
    const float *from = r->cpu.attended + (size_t)row * n_heads * p->latent_pad;
    for (uint32_t head = 0; head < n_heads; head++, from += p->latent_pad)
        copy_padded(from, l->dim, n_cols, head_row(p, head, row, n_cols));
    float *out = r->cpu.latent_out + (size_t)row * fkv_packed_pad(n_out);
    memset(out + n_out, 0, (fkv_packed_pad(n_out) - n_out) * sizeof *out);
}

void fkv_latent_finish(fkv_runner *r, const fkv_packed_layer *layer, uint32_t n_rows) {
    const fkv_hparams *h = r->model->hparams;
    fkv_cpu_runner *c = &r->cpu;
    latent_pass p = begin_pass(r, layer, n_rows);
    run_rows(&p, gather_row);
    const fkv_head_products expand = {.matrices = layer->v_up,
                                      .n_heads = h->n_q_heads,
                                      .x = c->latent_heads,
                                      .out = c->latent_out,
                                      .out_stride = fkv_packed_pad(h->n_q_heads * h->latent.v_dim),
                                      .head_stride = h->latent.v_dim};
    fkv_product_run_heads(c->workers, r->config.isa, &expand, n_rows, c->input);
}
