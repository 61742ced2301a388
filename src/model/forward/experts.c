/* Expert routing and execution on the CPU; see experts.h. */
#include "experts.h"

#include "../../base/cpu.h"

#include <math.h>

enum { ROWS_PER_ITEM = 8 };

typedef struct mixture {
    fkv_runner *r;
    const fkv_packed_layer *layer;
    uint32_t n_rows;
    uint32_t expert; /* index of the current expert */
    uint32_t width;  /* feed-forward dimension of the current expert */
    const float *in; /* [n_rows, stride] inputs of the experts */
    uint32_t dim;    /* dimension of the experts' inputs and outputs */
    uint32_t stride; /* row stride of `in`, expert_in and expert_sum */
    void (*run)(const struct mixture *m, uint32_t row);
} mixture;

void fkv_experts_layout(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    fkv_cpu_runner *c = &r->cpu;
    uint64_t t = r->config.max_step_tokens;
    c->router = FKV_CARVE(carve, t * h->n_experts, float);
    c->routing_weights = FKV_CARVE(carve, t * h->n_experts_used, float);
    c->selected_experts = FKV_CARVE(carve, t * h->n_experts_used, uint32_t);
    c->expert_rows = FKV_CARVE(carve, t * h->n_experts_used, uint32_t);
    c->expert_from = FKV_CARVE(carve, (uint64_t)h->n_experts + 1, uint32_t);
    c->expert_pad = fkv_max_u32(c->dim_pad, fkv_packed_pad(h->latent_dim));
    c->expert_in = FKV_CARVE(carve, t * c->expert_pad, float);
    c->expert_sum = FKV_CARVE(carve, t * c->expert_pad, float);
    if (h->latent_dim != 0) c->latent = FKV_CARVE(carve, t * c->expert_pad, float);
    c->shared_gate_logits = FKV_CARVE(carve, t, float);
    uint32_t n_threads = r->config.n_threads != 0 ? r->config.n_threads : fkv_cpu_count();
    c->room = (fkv_panel_room){.thread_bytes = r->model->panel_bytes, .scratch_bytes = r->model->panel_scratch_bytes};
    c->room.bytes = fkv_carve_take(carve, n_threads, c->room.thread_bytes);
}

fkv_status fkv_experts_status(fkv_runner *r) {
    bool lost = atomic_exchange_explicit(&r->cpu.room.lost, false, memory_order_relaxed);
    FKV_REQUIRE(!lost, FKV_UNSUPPORTED, "an expert has scales that overflow 16-bit floats");
    return FKV_OK;
}

static void run_expert_rows(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const mixture *m = context;
    uint32_t end = fkv_min_u32((item + 1) * ROWS_PER_ITEM, m->n_rows);
    for (uint32_t row = item * ROWS_PER_ITEM; row < end; row++) m->run(m, row);
}

static void run_rows(mixture *m, uint32_t n_rows, void (*run)(const mixture *m, uint32_t row)) {
    m->n_rows = n_rows;
    m->run = run;
    fkv_workers_run(m->r->cpu.workers, run_expert_rows, m, fkv_ceil_div(n_rows, ROWS_PER_ITEM));
}

/* ---- activations without a gate ---- */

void fkv_activate_plain(const fkv_runner *r, uint32_t layer, float *x, uint32_t n) {
    const fkv_xielu *a = &r->model->xielu[layer];
    switch (r->model->hparams->features.activation) {
    case FKV_RELU2:
        for (uint32_t i = 0; i < n; i++) x[i] = x[i] > 0.0f ? x[i] * x[i] : 0.0f;
        break;
    case FKV_XIELU:
        for (uint32_t i = 0; i < n; i++) {
            const float negative = (expm1f(fminf(x[i], a->eps)) - x[i]) * a->alpha_n;
            x[i] = (x[i] > 0.0f ? a->alpha_p * x[i] * x[i] : negative) + a->beta * x[i];
        }
        break;
    case FKV_GELU_TANH: r->ops->gelu(x, n); break;
    case FKV_SILU:
    case FKV_SWIGLU_CLAMPED: FKV_ASSERT(false); break; /* no model uses these activations without a gate */
    }
}

/* ---- routing ---- */

/* Writes the indices of the n_used experts with the largest scores, in ascending index order. Among experts with equal scores,
 * those with lower indices are selected. If a score is NaN, the selection is arbitrary but valid, and the row's output is NaN. */
static void select_top_experts(const float *scores, uint32_t n_experts, uint32_t n_used, uint32_t *selected_experts) {
    FKV_ASSERT(n_used > 0);
    uint32_t n = 0;
    for (uint32_t e = 0; e < n_experts; e++) {
        uint32_t worst = 0;
        for (uint32_t i = 1; i < n; i++) /* finds the expert with the smallest score; among equal scores, the last expert */
            if (!(scores[selected_experts[i]] > scores[selected_experts[worst]])) worst = i;
        if (n == n_used && !(scores[e] > scores[selected_experts[worst]])) continue;
        if (n == n_used) {
            memmove(selected_experts + worst, selected_experts + worst + 1, (n - 1 - worst) * sizeof *selected_experts);
            n--;
        }
        selected_experts[n++] = e;
    }
}

/* Computes softmax routing weights. The softmax is over the selected experts if norm_experts is set, otherwise over all
 * experts. */
static void softmax_weights(const fkv_hparams *h, const float *logits, const uint32_t *selected_experts, float *routing_weights) {
    float largest = logits[selected_experts[0]];
    for (uint32_t i = 1; i < h->n_experts_used; i++) largest = fmaxf(largest, logits[selected_experts[i]]);
    float total = 0.0f;
    for (uint32_t i = 0; i < h->n_experts_used; i++) {
        routing_weights[i] = expf(logits[selected_experts[i]] - largest);
        total += routing_weights[i];
    }
    if (!h->features.norm_experts) {
        total = 0.0f;
        for (uint32_t e = 0; e < h->n_experts; e++) total += expf(logits[e] - largest);
    }
    for (uint32_t i = 0; i < h->n_experts_used; i++) routing_weights[i] /= total;
}

/* Sets the scores of experts outside the best groups to minus infinity. A group's score is the sum of its two largest expert
 * scores, or its largest score. */
static void mask_groups(const fkv_hparams *h, float *scores) {
    const uint32_t n_groups = h->n_expert_groups;
    const uint32_t size = h->n_experts / n_groups;
    float sums[FKV_MAX_EXPERT_GROUPS] = {0};
    uint32_t kept[FKV_MAX_EXPERT_GROUPS];
    for (uint32_t g = 0; g < n_groups; g++) {
        uint32_t best[2] = {0, 1};
        select_top_experts(scores + (size_t)g * size, size, 2, best);
        const float first = scores[(size_t)g * size + best[0]];
        const float second = scores[(size_t)g * size + best[1]];
        sums[g] = h->features.groups_by_max ? fmaxf(first, second) : first + second;
    }
    select_top_experts(sums, n_groups, h->n_expert_groups_used, kept);
    for (uint32_t g = 0, i = 0; g < n_groups; g++) {
        bool is_kept = i < h->n_expert_groups_used && kept[i] == g;
        if (is_kept) i++;
        for (uint32_t e = g * size; !is_kept && e < (g + 1) * size; e++) scores[e] = -INFINITY;
    }
}

/* Selects experts by sigmoid score plus correction. The routing weights are the sigmoid scores without the correction.
 * Overwrites the logits. */
static void route_sigmoid(const mixture *m, float *logits, uint32_t *selected_experts, float *routing_weights) {
    const fkv_hparams *h = m->r->model->hparams;
    const float *correction = m->layer->router_correction;
    float scores[FKV_MAX_EXPERTS] = {0};
    memcpy(scores, logits, h->n_experts * sizeof *scores);
    for (uint32_t e = 0; e < h->n_experts; e++) {
        logits[e] = 1.0f / (1.0f + expf(-logits[e]));
        if (correction != NULL) logits[e] += correction[e];
    }
    /* Llama 4 selects experts by logit instead of sigmoid; the selection differs if the sigmoids of large logits round to 1 */
    if (!h->features.experts_scale_input) memcpy(scores, logits, h->n_experts * sizeof *scores);
    if (h->n_expert_groups > 1) mask_groups(h, scores);
    select_top_experts(scores, h->n_experts, h->n_experts_used, selected_experts);
    float total = 0.0f;
    for (uint32_t i = 0; i < h->n_experts_used; i++) {
        routing_weights[i] = logits[selected_experts[i]] - (correction != NULL ? correction[selected_experts[i]] : 0.0f);
        total += routing_weights[i];
    }
    for (uint32_t i = 0; h->features.norm_experts && i < h->n_experts_used; i++) routing_weights[i] /= total + 1e-20f;
}

/* Selects the best expert groups, then the experts with the largest softmax scores in these groups. */
static void route_grouped_softmax(const fkv_hparams *h, const float *logits, uint32_t *selected_experts, float *routing_weights) {
    float scores[FKV_MAX_EXPERTS] = {0};
    memcpy(scores, logits, h->n_experts * sizeof *scores); /* logits can serve as scores, because softmax preserves their order */
    mask_groups(h, scores);
    select_top_experts(scores, h->n_experts, h->n_experts_used, selected_experts);
    softmax_weights(h, logits, selected_experts, routing_weights);
}

/* Selects experts by softmax score plus correction. The routing weights are the softmax scores without the correction. */
static void route_corrected_softmax(const mixture *m, const float *logits, uint32_t *selected_experts, float *routing_weights) {
    const fkv_hparams *h = m->r->model->hparams;
    float scores[FKV_MAX_EXPERTS] = {0};
    float largest = logits[0];
    float total = 0.0f;
    for (uint32_t e = 1; e < h->n_experts; e++) largest = fmaxf(largest, logits[e]);
    for (uint32_t e = 0; e < h->n_experts; e++) total += scores[e] = expf(logits[e] - largest);
    for (uint32_t e = 0; e < h->n_experts; e++) scores[e] = scores[e] / total + m->layer->router_correction[e];
    select_top_experts(scores, h->n_experts, h->n_experts_used, selected_experts);
    softmax_weights(h, logits, selected_experts, routing_weights);
}

/* Selects the two experts with the largest logits, one after the other. The routing weight of an expert is its softmax
 * probability among the experts that have not been selected before it and whose logits are close to its own. */
static void route_sparse_mixer(const mixture *m, const float *logits, uint32_t *selected_experts, float *routing_weights) {
    const fkv_hparams *h = m->r->model->hparams;
    uint32_t chosen[2] = {UINT32_MAX, UINT32_MAX};
    float weights[2] = {0};
    for (uint32_t k = 0; k < 2; k++) {
        uint32_t best = k == 1 && chosen[0] == 0 ? 1 : 0;
        for (uint32_t e = best + 1; e < h->n_experts; e++)
            if (e != chosen[0] && logits[e] > logits[best]) best = e;
        float total = 0.0f;
        for (uint32_t e = 0; e < h->n_experts; e++) {
            const float scale = fmaxf(fabsf(logits[e]), logits[best]);
            const bool is_similar = !((logits[best] - logits[e]) / scale > 2.0f * h->mixer_jitter);
            if (e != chosen[0] && is_similar) total += expf(logits[e] - logits[best]);
        }
        chosen[k] = best;
        weights[k] = 1.0f / total;
    }
    const uint32_t first = chosen[0] < chosen[1] ? 0 : 1; /* the two experts are stored in ascending index order */
    for (uint32_t k = 0; k < 2; k++) {
        selected_experts[k] = chosen[k ^ first];
        routing_weights[k] = weights[k ^ first];
    }
}

static void route_row(const mixture *m, uint32_t row) {
    const fkv_hparams *h = m->r->model->hparams;
    float *logits = m->r->cpu.router + (size_t)row * h->n_experts;
    uint32_t *selected_experts = m->r->cpu.selected_experts + (size_t)row * h->n_experts_used;
    float *routing_weights = m->r->cpu.routing_weights + (size_t)row * h->n_experts_used;
    if (h->features.sigmoid_router) {
        route_sigmoid(m, logits, selected_experts, routing_weights);
    } else if (h->features.sparse_mixer) {
        route_sparse_mixer(m, logits, selected_experts, routing_weights);
    } else if (m->layer->router_correction != NULL) {
        route_corrected_softmax(m, logits, selected_experts, routing_weights);
    } else if (h->n_expert_groups > 1) {
        route_grouped_softmax(h, logits, selected_experts, routing_weights);
    } else {
        select_top_experts(logits, h->n_experts, h->n_experts_used, selected_experts);
        softmax_weights(h, logits, selected_experts, routing_weights);
    }
    for (uint32_t i = 0; h->experts_scale != 0.0f && i < h->n_experts_used; i++) routing_weights[i] *= h->experts_scale;
    const float *scales = m->layer->expert_scales;
    for (uint32_t i = 0; scales != NULL && i < h->n_experts_used; i++) routing_weights[i] *= scales[selected_experts[i]];
}

/* Fills expert_rows with the indices of all entries of selected_experts, sorted by expert (counting sort). The rows of each
 * expert are in ascending order. */
static void sort_by_expert(const fkv_runner *r, uint32_t n_rows) {
    const fkv_hparams *h = r->model->hparams;
    uint32_t n = n_rows * h->n_experts_used;
    uint32_t *from = r->cpu.expert_from;
    memset(from, 0, ((size_t)h->n_experts + 1) * sizeof *from);
    for (uint32_t i = 0; i < n; i++) from[r->cpu.selected_experts[i] + 1]++;
    for (uint32_t e = 0; e < h->n_experts; e++) from[e + 1] += from[e];
    for (uint32_t i = 0; i < n; i++) r->cpu.expert_rows[from[r->cpu.selected_experts[i]]++] = i;
    for (uint32_t e = h->n_experts; e > 0; e--) from[e] = from[e - 1];
    from[0] = 0;
}

/* ---- routed experts ---- */

static uint32_t assignment_of(const mixture *m, uint32_t row) {
    return m->r->cpu.expert_rows[m->r->cpu.expert_from[m->expert] + row];
}

static void gather_expert_row(const mixture *m, uint32_t row) {
    const fkv_runner *r = m->r;
    uint32_t from = assignment_of(m, row) / r->model->hparams->n_experts_used;
    float *in = r->cpu.expert_in + (size_t)row * m->stride;
    memcpy(in, m->in + (size_t)from * m->stride, m->stride * sizeof(float));
    const float weight = r->cpu.routing_weights[assignment_of(m, row)];
    for (uint32_t i = 0; r->model->hparams->features.experts_scale_input && i < m->dim; i++) in[i] *= weight;
}

static void activate_expert_row(const mixture *m, uint32_t row) {
    const fkv_runner *r = m->r;
    float *gate = r->cpu.gate + (size_t)row * r->cpu.ffn_pad;
    if (r->model->hparams->features.plain_ffn)
        fkv_activate_plain(r, 0, gate, m->width);
    else
        fkv_activate(r, gate, r->cpu.up + (size_t)row * r->cpu.ffn_pad, m->width);
    memset(gate + m->width, 0, (fkv_packed_pad(m->width) - m->width) * sizeof *gate);
}

static void add_expert_row(const mixture *m, uint32_t row) {
    const fkv_runner *r = m->r;
    uint32_t assignment = assignment_of(m, row);
    uint32_t to = assignment / r->model->hparams->n_experts_used;
    const float weight = r->model->hparams->features.experts_scale_input ? 1.0f : r->cpu.routing_weights[assignment];
    r->ops->add_scaled(r->cpu.expert_sum + (size_t)to * m->stride, r->cpu.expert_in + (size_t)row * m->stride, weight, m->dim);
}

static void multiply_experts(const mixture *m, const fkv_product *products, uint32_t n_products, const float *x, uint32_t n_rows,
                             uint32_t stride) {
    fkv_product_run(m->r->cpu.workers, m->r->config.isa, products, n_products, x, n_rows, stride, m->r->cpu.input);
}

static const float *expert_bias(const float *biases, uint32_t expert, uint32_t n) {
    return biases != NULL ? biases + (size_t)expert * n : NULL;
}

static void run_expert(mixture *m, uint32_t n_rows) {
    fkv_cpu_runner *c = &m->r->cpu;
    fkv_panel_room *room = &c->room;
    const fkv_packed_layer *l = m->layer;
    uint32_t e = m->expert;
    const fkv_product gate_up[] = {
        {&l->gate_experts[e], expert_bias(l->gate_experts_bias, e, m->width), c->gate, c->ffn_pad, room},
        {&l->up_experts[e], expert_bias(l->up_experts_bias, e, m->width), c->up, c->ffn_pad, room}};
    const fkv_product up = {&l->up_experts[e], expert_bias(l->up_experts_bias, e, m->width), c->gate, c->ffn_pad, room};
    const fkv_product down = {&l->down_experts[e], expert_bias(l->down_experts_bias, e, m->dim), c->expert_in, m->stride, room};
    const bool is_plain = m->r->model->hparams->features.plain_ffn;
    run_rows(m, n_rows, gather_expert_row);
    multiply_experts(m, is_plain ? &up : gate_up, is_plain ? 1 : 2, c->expert_in, n_rows, m->stride);
    run_rows(m, n_rows, activate_expert_row);
    multiply_experts(m, &down, 1, c->gate, n_rows, c->ffn_pad);
    run_rows(m, n_rows, add_expert_row);
}

/* ---- projections around the experts ---- */

/* Projects the rows of h to the inputs of the experts. The padding of the projected rows stays zero. */
static void begin_latent(mixture *m, uint32_t n_rows) {
    fkv_cpu_runner *c = &m->r->cpu;
    const fkv_hparams *h = m->r->model->hparams;
    const fkv_product down = {&m->layer->latent_down, NULL, c->latent, c->expert_pad, NULL};
    multiply_experts(m, &down, 1, c->h, n_rows, c->dim_pad);
    m->in = c->latent;
    m->dim = h->latent_dim;
    m->stride = c->expert_pad;
}

/* Projects the sums of expert outputs back to the dimension of h. */
static void end_latent(const mixture *m, uint32_t n_rows) {
    const fkv_cpu_runner *c = &m->r->cpu;
    const fkv_product up = {&m->layer->latent_up, NULL, c->expert_in, c->dim_pad, NULL};
    multiply_experts(m, &up, 1, c->expert_sum, n_rows, c->expert_pad);
    const uint32_t dim = m->r->model->hparams->dim;
    memset(c->expert_sum, 0, (size_t)n_rows * c->dim_pad * sizeof(float));
    for (uint32_t row = 0; row < n_rows; row++)
        memcpy(c->expert_sum + (size_t)row * c->dim_pad, c->expert_in + (size_t)row * c->dim_pad, dim * sizeof(float));
}

/* ---- shared expert ---- */

static void add_shared_row(const mixture *m, uint32_t row) {
    const fkv_runner *r = m->r;
    const fkv_cpu_runner *c = &r->cpu;
    float weight = m->layer->shared_gate.n_rows != 0 ? 1.0f / (1.0f + expf(-c->shared_gate_logits[row])) : 1.0f;
    r->ops->add_scaled(c->expert_sum + (size_t)row * c->dim_pad, c->expert_in + (size_t)row * c->dim_pad, weight,
                       r->model->hparams->dim);
}

static void run_shared(mixture *m, uint32_t n_rows) {
    const fkv_cpu_runner *c = &m->r->cpu;
    const fkv_packed_layer *l = m->layer;
    const fkv_product gate_up[] = {{&l->gate, NULL, c->gate, c->ffn_pad, NULL}, {&l->up, NULL, c->up, c->ffn_pad, NULL}};
    const fkv_product up = {&l->up, NULL, c->gate, c->ffn_pad, NULL};
    const fkv_product down = {&l->down, NULL, c->expert_in, c->dim_pad, NULL};
    const bool is_plain = m->r->model->hparams->features.plain_ffn;
    const fkv_product gate = {&l->shared_gate, NULL, c->shared_gate_logits, 1, NULL};
    multiply_experts(m, is_plain ? &up : gate_up, is_plain ? 1 : 2, c->h, n_rows, c->dim_pad);
    if (l->shared_gate.n_rows != 0) multiply_experts(m, &gate, 1, c->h, n_rows, c->dim_pad);
    run_rows(m, n_rows, activate_expert_row);
    multiply_experts(m, &down, 1, c->gate, n_rows, c->ffn_pad);
    run_rows(m, n_rows, add_shared_row);
}

/* ---- entry points ---- */

void fkv_experts_route(fkv_runner *r, const fkv_packed_layer *layer, uint32_t n_rows) {
    mixture m = {.r = r, .layer = layer};
    const fkv_product route = {&layer->router, layer->router_bias, r->cpu.router, r->model->hparams->n_experts, NULL};
    multiply_experts(&m, &route, 1, r->cpu.h, n_rows, r->cpu.dim_pad);
    run_rows(&m, n_rows, route_row);
    sort_by_expert(r, n_rows);
}

void fkv_experts_run(fkv_runner *r, const fkv_packed_layer *layer, const fkv_layer_shape *shape, uint32_t n_rows) {
    const fkv_hparams *h = r->model->hparams;
    mixture m = {.r = r, .layer = layer, .width = h->expert_dim, .in = r->cpu.h, .dim = h->dim, .stride = r->cpu.dim_pad};
    if (h->latent_dim != 0) begin_latent(&m, n_rows);
    memset(r->cpu.expert_sum, 0, (size_t)n_rows * m.stride * sizeof(float));
    for (m.expert = 0; m.expert < h->n_experts; m.expert++) {
        uint32_t n = r->cpu.expert_from[m.expert + 1] - r->cpu.expert_from[m.expert];
        if (n > 0) run_expert(&m, n);
    }
    if (h->latent_dim != 0) end_latent(&m, n_rows);
    m.width = shape->ffn_dim;
    if (h->shared_dim != 0) run_shared(&m, n_rows);
    memcpy(r->cpu.h, r->cpu.expert_sum, (size_t)n_rows * r->cpu.dim_pad * sizeof(float));
}
