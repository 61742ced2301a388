/* The forward pass: one for every architecture; what differs is in the model's line of the table and in what its layers have.
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
#include "runner.h"
#include "vector_ops.h"

enum { ROWS_PER_ITEM = 8 };

typedef struct pass {
    fkv_runner *r;
    const fkv_model_layer *layer;
    const float *next_norm; /* of the layer that follows, or the final one */
    uint32_t rope;          /* of the layer: FKV_ROPE_ */
    const float *k_center;  /* of the layer, or NULL */
    uint32_t n_rows;        /* T; in the last layer, behind attention, those asked for */
    uint32_t n_asked;
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
    fkv_workers_run(p->r->workers, run_item, &job, fkv_ceil_div(p->n_rows, ROWS_PER_ITEM));
}

/* ---- between the products, one row each ---- */

static float *x_of(const pass *p, uint32_t row) { return p->r->x + (size_t)row * p->r->dim_pad; }
static float *h_of(const pass *p, uint32_t row) { return p->r->h + (size_t)row * p->r->dim_pad; }

static void norm_x_to_h(const pass *p, uint32_t row, const float *weight) {
    const fkv_hparams *h = p->r->model->hparams;
    p->r->ops->rms_norm(x_of(p, row), weight, h->rms_eps, h->dim, h_of(p, row));
}

/* From tokens to what the first layer reads, and the angles of the row's position. */
static void begin_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    fkv_model_embed(r->model, r->tokens[row], x_of(p, row));
    norm_x_to_h(p, row, p->next_norm);
    size_t at = (size_t)row * r->n_pairs;
    for (uint32_t i = 0; i < r->n_ropes; i++)
        fkv_rope_angles(r->positions[row], r->frequencies[i], r->n_pairs, r->cosines[i] + at, r->sines[i] + at);
}

static void turn_heads(const pass *p, uint32_t row, float *heads, uint32_t n_heads, const float *norm, const float *center) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const float *cosines = r->cosines[p->rope] + (size_t)row * r->n_pairs;
    const float *sines = r->sines[p->rope] + (size_t)row * r->n_pairs;
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
    turn_heads(p, row, r->q + (size_t)row * h->n_q_heads * r->head_pad, h->n_q_heads, p->layer->q_norm, NULL);
    turn_heads(p, row, r->k + kv, h->n_kv_heads, p->layer->k_norm, p->k_center);
    fkv_heads_spread(r->v + kv, h->n_kv_heads, h->head_dim, r->head_pad);
}

static void gather_row(const pass *p, uint32_t row) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    fkv_heads_gather(r->q + (size_t)row * h->n_q_heads * r->head_pad, h->n_q_heads, h->head_dim, r->head_pad,
                     r->gathered + (size_t)row * r->q_pad);
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
    float *gate = r->gate + (size_t)row * r->ffn_pad;
    const float *up = r->up + (size_t)row * r->ffn_pad;
    if (r->model->architecture->activation == FKV_GELU_TANH)
        p->r->ops->gelu_mul(gate, up, r->model->hparams->ffn_dim);
    else
        p->r->ops->silu_mul(gate, up, r->model->hparams->ffn_dim);
}

/* ---- layers ---- */

static void multiply(const pass *p, const fkv_product *products, uint32_t n_products, const float *x, uint32_t x_stride) {
    fkv_product_run(p->r->workers, p->r->config.isa, products, n_products, x, p->n_rows, x_stride, p->r->input);
}

static void multiply_qkv(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_hparams *h = r->model->hparams;
    const fkv_model_layer *l = p->layer;
    uint32_t q_stride = h->n_q_heads * r->head_pad;
    uint32_t kv_stride = h->n_kv_heads * r->head_pad;
    const fkv_product products[] = {
        {&l->q, l->q_bias, r->q, q_stride}, {&l->k, l->k_bias, r->k, kv_stride}, {&l->v, l->v_bias, r->v, kv_stride}};
    multiply(p, products, 3, r->h, r->dim_pad);
}

/* Moves the rows asked for to the front: a row never moves back, so none is overwritten before it has moved. */
static void keep_asked(pass *p) {
    const fkv_runner *r = p->r;
    uint32_t q_stride = r->model->hparams->n_q_heads * r->head_pad;
    for (uint32_t i = 0; i < p->n_asked; i++) {
        uint32_t from = r->asked[i];
        if (from == i) continue;
        memcpy(x_of(p, i), x_of(p, from), r->dim_pad * sizeof(float));
        memcpy(r->q + (size_t)i * q_stride, r->q + (size_t)from * q_stride, q_stride * sizeof(float));
    }
    p->n_rows = p->n_asked;
}

static void add_attention(const pass *p) {
    const fkv_runner *r = p->r;
    if (r->heads_lie_apart) run_rows(p, gather_row);
    const fkv_product out = {&p->layer->o, NULL, r->h, r->dim_pad};
    multiply(p, &out, 1, r->heads_lie_apart ? r->gathered : r->q, r->q_pad);
    run_rows(p, add_attention_row);
}

static void add_ffn(const pass *p) {
    const fkv_runner *r = p->r;
    const fkv_product gate_up[] = {{&p->layer->gate, NULL, r->gate, r->ffn_pad}, {&p->layer->up, NULL, r->up, r->ffn_pad}};
    multiply(p, gate_up, 2, r->h, r->dim_pad);
    run_rows(p, activate_row);
    const fkv_product down = {&p->layer->down, NULL, r->h, r->dim_pad};
    multiply(p, &down, 1, r->gate, r->ffn_pad);
    run_rows(p, add_ffn_row);
}

static fkv_status run_layers(pass *p, fkv_step *step) {
    const fkv_model *m = p->r->model;
    uint32_t n_layers = m->hparams->n_layers;
    uint32_t kv_dim = m->hparams->n_kv_heads * m->hparams->head_dim;
    p->next_norm = m->layers[0].attn_norm;
    run_rows(p, begin_row);
    for (uint32_t i = 0; i < n_layers; i++) {
        bool last = i + 1 == n_layers;
        p->layer = &m->layers[i];
        p->next_norm = last ? m->final_norm : m->layers[i + 1].attn_norm;
        p->rope = fkv_architecture_window(m->architecture, m->hparams, i) != 0 ? FKV_ROPE_LOCAL : FKV_ROPE_GLOBAL;
        p->k_center = p->r->k_centers != NULL ? p->r->k_centers + (size_t)i * kv_dim : NULL;
        multiply_qkv(p);
        run_rows(p, heads_row);
        FKV_TRY(fkv_write(step, i, p->r->k, p->r->v));
        if (last && p->n_asked == 0) return FKV_OK;
        FKV_TRY(fkv_attend(step, i, p->r->q, p->r->q));
        if (last) keep_asked(p);
        add_attention(p);
        add_ffn(p);
    }
    const fkv_product out = {&m->output, NULL, p->r->logits, m->hparams->n_vocab};
    multiply(p, &out, 1, p->r->h, p->r->dim_pad);
    return FKV_OK;
}

/* ---- the step ---- */

/* The rows of the step, side by side, into the runner's tables; nothing has begun yet. */
static fkv_status list_row(pass *p, const fkv_tokens *row) {
    fkv_runner *r = p->r;
    uint32_t position = 0;
    FKV_REQUIRE(row->tokens != NULL && row->n_tokens > 0, FKV_BAD_ARGUMENT, "a row of sequence %llu has no tokens: leave it out",
                (unsigned long long)row->seq);
    FKV_REQUIRE((unsigned)row->logits <= FKV_LOGITS_ALL, FKV_BAD_ARGUMENT, "logits %d: FKV_LOGITS_NONE, _LAST or _ALL",
                (int)row->logits);
    FKV_REQUIRE(row->n_tokens <= r->config.max_step_tokens - p->n_rows, FKV_STEP_FULL,
                "the rows have %llu tokens or more and a step takes %u: split them over several steps",
                (unsigned long long)p->n_rows + row->n_tokens, r->config.max_step_tokens);
    FKV_TRY(fkv_seq_length(r->cache, row->seq, &position));
    for (uint32_t i = 0; i < row->n_tokens; i++) {
        FKV_REQUIRE(row->tokens[i] < r->model->hparams->n_vocab, FKV_BAD_ARGUMENT,
                    "token %u of a row is %u and the vocabulary ends at %u", i, row->tokens[i], r->model->hparams->n_vocab);
        bool asked = row->logits == FKV_LOGITS_ALL || (row->logits == FKV_LOGITS_LAST && i + 1 == row->n_tokens);
        if (asked) r->asked[p->n_asked++] = p->n_rows;
        r->tokens[p->n_rows] = row->tokens[i];
        r->positions[p->n_rows] = position + i;
        p->n_rows++;
    }
    FKV_REQUIRE(p->n_asked <= r->config.max_logit_rows, FKV_STEP_FULL,
                "the logits of %u rows or more are asked for and the runner was opened for %u (max_logit_rows)", p->n_asked,
                r->config.max_logit_rows);
    return FKV_OK;
}

fkv_status fkv_runner_forward(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    FKV_REQUIRE(runner != NULL && rows != NULL && n_rows > 0, FKV_BAD_ARGUMENT,
                "fkv_runner_forward: runner or rows is NULL, or no rows");
    FKV_REQUIRE(n_rows <= runner->config.max_seqs, FKV_BAD_ARGUMENT,
                "%u rows and at most %u sequences (max_seqs): each sequence is in a step at most once", n_rows,
                runner->config.max_seqs);
    pass p = {.r = runner};
    for (uint32_t i = 0; i < n_rows; i++) {
        FKV_TRY(list_row(&p, &rows[i]));
        runner->rows[i] = (fkv_row){rows[i].seq, rows[i].n_tokens};
    }
    FKV_REQUIRE(logits != NULL || p.n_asked == 0, FKV_BAD_ARGUMENT, "logits are asked for and there is no place for them");
    fkv_step *step = NULL;
    FKV_TRY(fkv_step_begin(runner->cache, runner->rows, n_rows, &step));
    fkv_status status = run_layers(&p, step);
    if (status == FKV_OK) status = fkv_step_commit(step);
    if (status != FKV_OK) {
        (void)fkv_step_abort(step);
        return status;
    }
    if (logits != NULL) *logits = p.n_asked != 0 ? runner->logits : NULL;
    return FKV_OK;
}
