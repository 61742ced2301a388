/* Recurrent layers on the CPU; see recurrent.h.
 *
 * Gated short convolution (LFM2): b | c | x = in_proj(h); out = c * conv(b * x).
 *
 * Gated delta net (Qwen3-Next, Qwen3.5): u = silu(conv(in_proj(h))), u = queries | keys | values; queries and keys are
 * L2-normalized per head, and queries scaled by 1 / sqrt(k_dim). Each value head h has a state S [v_dim, k_dim] and reads the
 * query q and the key k of one key head (see fkv_recurrence). Per token, with decay = exp(-rate * softplus(alpha + bias)):
 *     S = decay * S;  d = sigmoid(beta) * (v - S k);  S = S + d k^T;  o = S q
 * The output is rms_norm(o) * silu(gate).
 *
 * Kimi Delta Attention (Kimi Linear) differs from a gated delta net as follows. Queries, keys and values have separate
 * projections. Every key channel has its own decay: exp(-rate * softplus(alpha + bias)), where alpha and the gate are low-rank
 * projections of h. The output is rms_norm(o) * sigmoid(gate).
 *
 * Mamba-2 (Granite 4, Nemotron-H, Falcon-H1): u = silu(conv(in_proj(h)) + bias), u = values | keys (B) | queries (C). Per token
 * and head, with step = softplus(alpha + bias) and decay = exp(-rate * step): S = decay * S + (step * v) B^T;  o = S C + skip * v
 * The output is rms_norm(o * silu(gate)), normalized in groups of channels. Falcon-H1 scales the projections and the output, and
 * may gate after the norm or not normalize at all.
 *
 * The rows of S (value channels) are independent of each other. A work item therefore computes a block of rows for one head of
 * one sequence, and these rows stay in the L1 cache for all tokens of the step.
 */
#include "recurrent.h"

#include <math.h>

enum { ROWS_PER_ITEM = 4, CHANNELS_PER_ITEM = 256, VALUES_PER_ITEM = 32 };

static const float L2_EPS = 1e-6f; /* epsilon of the L2 norm, added to the sum of squares; the same value as in transformers */

typedef struct mixer {
    fkv_runner *r;
    const fkv_packed_layer *layer;
    uint32_t index;       /* index of the layer in the model */
    uint32_t n_channels;  /* number of channels of the convolution */
    uint32_t in_width;    /* row width of the buffer mixer_in */
    uint32_t pad;         /* row width of the buffer `mixed` */
    uint32_t n_per_seq;   /* number of work items per sequence */
    uint64_t conv_offset; /* offset, in floats, of the convolution inputs in a state */
    size_t values_offset; /* index of the first value in a row of mixer_in */
    size_t keys_offset;   /* index of the first query (delta net) or first key (Mamba-2) in a row of mixer_in */
    void (*row)(const struct mixer *m, uint32_t row);
} mixer;

static uint32_t output_width(const fkv_hparams *h) {
    return h->features.recurrence == FKV_SHORT_CONV ? h->dim : h->recurrence.n_v_heads * h->recurrence.v_dim;
}

/* Returns the row width of mixer_in: the channels of the convolution, or b, c and x of a short convolution. */
static uint32_t input_width(const fkv_hparams *h) {
    const uint32_t n = fkv_architecture_conv_channels(h);
    return h->features.recurrence == FKV_SHORT_CONV ? 3 * n : n;
}

/* Returns the number of decay factors per token. */
static uint32_t n_decays(const fkv_hparams *h) {
    const fkv_recurrence *s = &h->recurrence;
    return h->features.recurrence == FKV_KDA ? s->n_v_heads * s->k_dim : s->n_v_heads;
}

uint32_t fkv_recurrent_pad(const fkv_hparams *h) {
    return fkv_architecture_has_recurrence(h) ? fkv_packed_pad(output_width(h)) : 0;
}

void fkv_recurrent_layout(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    fkv_cpu_runner *c = &r->cpu;
    const uint64_t t = r->config.max_step_tokens;
    c->states = FKV_CARVE(carve, r->config.max_seqs, fkv_state_row);
    c->mixer_in = FKV_CARVE(carve, t * input_width(h), float);
    c->mixed = FKV_CARVE(carve, t * fkv_recurrent_pad(h), float);
    if (h->features.recurrence == FKV_SHORT_CONV) return;
    c->decay = FKV_CARVE(carve, t * n_decays(h), float);
    c->beta = FKV_CARVE(carve, t * h->recurrence.n_v_heads, float);
    if (h->features.recurrence == FKV_KDA) {
        c->alpha_low = FKV_CARVE(carve, t * fkv_packed_pad(h->recurrence.k_dim), float);
        c->gate_low = FKV_CARVE(carve, t * fkv_packed_pad(h->recurrence.v_dim), float);
    }
    bool is_fused = false;
    for (uint32_t i = 0; i < h->n_layers; i++)
        is_fused = is_fused || r->model->tensors[i].mixer_fused != NULL || r->model->tensors[i].beta_alpha != NULL;
    if (is_fused) c->mixer_fused = FKV_CARVE(carve, t * (input_width(h) + output_width(h)), float);
}

/* Returns the number of values per token that replaying a layer needs: the input of the convolution, the decays and beta. */
static uint32_t saved_width(const fkv_hparams *h) {
    if (h->features.recurrence == FKV_SHORT_CONV) return input_width(h);
    return input_width(h) + n_decays(h) + h->recurrence.n_v_heads;
}

/* Returns the number of recurrent layers before layer `index`. */
static uint32_t n_recurrent_before(const fkv_hparams *h, uint32_t index) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < index; i++) n += fkv_architecture_is_recurrent(h, i);
    return n;
}

void fkv_recurrent_layout_saved(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    const uint64_t n_layers = n_recurrent_before(h, h->n_layers);
    r->cpu.saved_inputs = FKV_CARVE(carve, n_layers * r->config.max_logit_rows * saved_width(h), float);
}

/* ---- work items ---- */

static void run_row_item(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const mixer *m = context;
    const uint32_t end = fkv_min_u32((item + 1) * ROWS_PER_ITEM, m->r->n_tokens);
    for (uint32_t row = item * ROWS_PER_ITEM; row < end; row++) m->row(m, row);
}

/* Calls a function for every token of the step, on the worker threads. */
static void run_rows(mixer *m, void (*row)(const mixer *m, uint32_t row)) {
    m->row = row;
    fkv_workers_run(m->r->cpu.workers, run_row_item, m, fkv_ceil_div(m->r->n_tokens, ROWS_PER_ITEM));
}

/* Runs n_per_seq work items for each sequence of the step. */
static void run_sequences(mixer *m, fkv_work_fn work, uint32_t n_per_seq) {
    m->n_per_seq = n_per_seq;
    fkv_workers_run(m->r->cpu.workers, work, m, n_per_seq * m->r->n_rows);
}

/* A work item: part of the work for all tokens of one sequence. */
typedef struct seq_item {
    const fkv_state_row *state;
    uint32_t first, end; /* tokens of the sequence: rows [first, end) of the step */
    uint32_t part;       /* index of the work item among those of the sequence */
} seq_item;

static seq_item find_item(const mixer *m, uint32_t item) {
    const uint32_t seq = item / m->n_per_seq;
    uint32_t first = 0;
    for (uint32_t i = 0; i < seq; i++) first += m->r->rows[i].n_tokens;
    return (seq_item){
        .state = &m->r->cpu.states[seq], .first = first, .end = first + m->r->rows[seq].n_tokens, .part = item % m->n_per_seq};
}

static float *in_of(const mixer *m, uint32_t row) { return m->r->cpu.mixer_in + (size_t)row * m->in_width; }
static float *mixed_of(const mixer *m, uint32_t row) { return m->r->cpu.mixed + (size_t)row * m->pad; }

/* ---- convolution ---- */

/* Runs the convolution over all tokens of one sequence, for a block of channels. The output, after silu, replaces the input in
 * mixer_in. In a short convolution, the input is b * x, and the output, c * conv(b * x), is written to `mixed`. */
static void run_conv_item(void *context, uint32_t index, uint32_t thread) {
    (void)thread;
    const mixer *m = context;
    const fkv_vector_ops *ops = m->r->ops;
    const seq_item item = find_item(m, index);
    const uint32_t n_taps = m->r->model->hparams->recurrence.n_taps;
    const bool is_short = m->r->model->hparams->features.recurrence == FKV_SHORT_CONV;
    const uint32_t from = item.part * CHANNELS_PER_ITEM;
    const uint32_t n = fkv_min_u32(CHANNELS_PER_ITEM, m->n_channels - from);
    const float *before = item.state->in != NULL ? (const float *)item.state->in + m->conv_offset + from : NULL;
    float *after = (float *)item.state->out + m->conv_offset + from;
    float window[(FKV_MAX_TAPS - 1) * CHANNELS_PER_ITEM];
    for (uint32_t j = 0; j + 1 < n_taps; j++) {
        if (before != NULL)
            memcpy(window + (size_t)j * n, before + (size_t)j * m->n_channels, n * sizeof *window);
        else
            memset(window + (size_t)j * n, 0, n * sizeof *window);
    }
    const float *bias = m->layer->conv_bias != NULL ? m->layer->conv_bias + from : NULL;
    for (uint32_t row = item.first; row < item.end; row++) {
        float *x = in_of(m, row) + from;
        float *out = is_short ? mixed_of(m, row) + from : x;
        const float *c = x + m->n_channels;
        if (is_short) { /* a row consists of b, c and x; the product b * x replaces b */
            const float *gated = x + 2 * (size_t)m->n_channels;
            for (uint32_t i = 0; i < n; i++) x[i] *= gated[i];
        }
        ops->conv_step(window, x, m->layer->conv + from, m->n_channels, bias, n_taps, n, out);
        if (!is_short) ops->silu(out, n);
        for (uint32_t i = 0; is_short && i < n; i++) out[i] *= c[i];
    }
    for (uint32_t j = 0; j + 1 < n_taps; j++)
        memcpy(after + (size_t)j * m->n_channels, window + (size_t)j * n, n * sizeof *window);
}

static void run_conv(mixer *m) { run_sequences(m, run_conv_item, fkv_ceil_div(m->n_channels, CHANNELS_PER_ITEM)); }

/* Zeroes the padding of an output row. */
static void pad_row(const mixer *m, uint32_t row) {
    const uint32_t n = output_width(m->r->model->hparams);
    memset(mixed_of(m, row) + n, 0, (m->pad - n) * sizeof(float));
}

/* ---- delta net ---- */

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Splits an output row of the fused projection into queries, keys, values and gates. For each key head, the row contains these
 * four parts in this order. */
static void split_fused_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const uint32_t n_values = s->n_v_heads / s->n_k_heads * s->v_dim; /* per key head */
    const float *from = m->r->cpu.mixer_fused + (size_t)row * (m->in_width + s->n_v_heads * s->v_dim);
    float *in = in_of(m, row);
    for (uint32_t head = 0; head < s->n_k_heads; head++) {
        memcpy(in + (size_t)head * s->k_dim, from, s->k_dim * sizeof *in);
        memcpy(in + (size_t)(s->n_k_heads + head) * s->k_dim, from + s->k_dim, s->k_dim * sizeof *in);
        from += 2 * (size_t)s->k_dim;
        memcpy(in + 2 * (size_t)s->n_k_heads * s->k_dim + (size_t)head * n_values, from, n_values * sizeof *in);
        memcpy(mixed_of(m, row) + (size_t)head * n_values, from + n_values, n_values * sizeof *in);
        from += 2 * (size_t)n_values;
    }
}

static void split_beta_alpha_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const uint32_t n = s->n_v_heads / s->n_k_heads; /* value heads per key head */
    const float *from = m->r->cpu.mixer_fused + (size_t)row * 2 * s->n_v_heads;
    float *beta = m->r->cpu.beta + (size_t)row * s->n_v_heads;
    float *alpha = m->r->cpu.decay + (size_t)row * s->n_v_heads;
    for (uint32_t head = 0; head < s->n_v_heads; head++) {
        beta[head] = from[head / n * 2 * n + head % n];
        alpha[head] = from[head / n * 2 * n + n + head % n];
    }
}

/* Computes the step sizes and decays of Mamba-2 from alpha. Stores the step sizes in the buffer `beta`. */
static void gate_mamba_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    float *decay = m->r->cpu.decay + (size_t)row * s->n_v_heads;
    float *steps = m->r->cpu.beta + (size_t)row * s->n_v_heads;
    for (uint32_t head = 0; head < s->n_v_heads; head++) {
        float step = fmaxf(softplus(decay[head] + m->layer->alpha_bias[head]), s->min_step);
        if (s->max_step != 0.0f) step = fminf(step, s->max_step);
        steps[head] = step;
        decay[head] = expf(m->layer->decay[head] * step);
    }
}

/* Computes the decays of a delta net from alpha, and applies the sigmoid to beta. */
static void gate_state_row(const mixer *m, uint32_t row) {
    const uint32_t n = m->r->model->hparams->recurrence.n_v_heads;
    float *decay = m->r->cpu.decay + (size_t)row * n;
    float *beta = m->r->cpu.beta + (size_t)row * n;
    for (uint32_t head = 0; head < n; head++) {
        decay[head] = expf(m->layer->decay[head] * softplus(decay[head] + m->layer->alpha_bias[head]));
        beta[head] = 1.0f / (1.0f + expf(-beta[head]));
    }
}

/* Computes the decays of KDA (one per key channel) from alpha, and applies the sigmoid to beta. */
static void gate_kda_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const float *bias = m->layer->alpha_bias;
    float *decays = m->r->cpu.decay + (size_t)row * s->n_v_heads * s->k_dim;
    float *beta = m->r->cpu.beta + (size_t)row * s->n_v_heads;
    for (uint32_t head = 0; head < s->n_v_heads; head++, decays += s->k_dim, bias += s->k_dim) {
        for (uint32_t i = 0; i < s->k_dim; i++) decays[i] = expf(m->layer->decay[head] * softplus(decays[i] + bias[i]));
        beta[head] = 1.0f / (1.0f + expf(-beta[head]));
    }
}

static void norm_keys_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    float *q = in_of(m, row);
    float *k = q + (size_t)s->n_k_heads * s->k_dim;
    const float scale = 1.0f / sqrtf((float)s->k_dim);
    for (uint32_t head = 0; head < s->n_k_heads; head++) {
        m->r->ops->l2_norm(q + (size_t)head * s->k_dim, L2_EPS, scale, s->k_dim);
        m->r->ops->l2_norm(k + (size_t)head * s->k_dim, L2_EPS, 1.0f, s->k_dim);
    }
}

/* Runs the recurrence over all tokens of one sequence, for a block of value channels of one head. The outputs replace the
 * values. */
static void run_state_item(void *context, uint32_t index, uint32_t thread) {
    (void)thread;
    const mixer *m = context;
    const fkv_cpu_runner *c = &m->r->cpu;
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const seq_item item = find_item(m, index);
    const uint32_t n_blocks = fkv_ceil_div(s->v_dim, VALUES_PER_ITEM);
    const uint32_t head = item.part / n_blocks;
    const uint32_t from = item.part % n_blocks * VALUES_PER_ITEM;
    const uint32_t n = fkv_min_u32(VALUES_PER_ITEM, s->v_dim - from);
    const uint32_t k_head = s->tiled ? head % s->n_k_heads : head / (s->n_v_heads / s->n_k_heads);
    const size_t at = ((size_t)head * s->v_dim + from) * s->k_dim;
    float *after = (float *)item.state->out + at;
    const float *state = after;
    if (item.state->in != NULL)
        state = (const float *)item.state->in + at;
    else
        memset(after, 0, (size_t)n * s->k_dim * sizeof *after);
    const fkv_recurrence_kind kind = m->r->model->hparams->features.recurrence;
    for (uint32_t row = item.first; row < item.end; row++) {
        /* delta nets store queries before keys; Mamba-2 stores keys before queries */
        const float *first = in_of(m, row) + m->keys_offset + (size_t)k_head * s->k_dim;
        const float *second = first + (size_t)s->n_k_heads * s->k_dim;
        float *values = in_of(m, row) + m->values_offset + (size_t)head * s->v_dim + from;
        const size_t gate = (size_t)row * s->n_v_heads + head;
        if (kind == FKV_MAMBA2)
            m->r->ops->ssm_step(state, after, n, s->k_dim, first, second, values, c->decay[gate], c->beta[gate],
                                m->layer->skip[head], values);
        else if (kind == FKV_KDA)
            m->r->ops->kda_step(state, after, n, s->k_dim, second, first, values, c->decay + gate * s->k_dim, c->beta[gate],
                                values);
        else
            m->r->ops->delta_step(state, after, n, s->k_dim, second, first, values, c->decay[gate], c->beta[gate], values);
        state = after;
    }
}

/* Computes rms_norm(o) * silu(gate) for every head; in KDA, rms_norm(o) * sigmoid(gate). The gates are in `mixed`, and the
 * results replace them. */
static void gate_output_row(const mixer *m, uint32_t row) {
    const fkv_hparams *h = m->r->model->hparams;
    const fkv_recurrence *s = &h->recurrence;
    float *o = in_of(m, row) + m->values_offset;
    float *gate = mixed_of(m, row);
    for (uint32_t head = 0; head < s->n_v_heads; head++) {
        float *one = o + (size_t)head * s->v_dim;
        m->r->ops->rms_norm(one, m->layer->mixer_norm, h->norm_eps, s->v_dim, one);
    }
    const uint32_t n = s->n_v_heads * s->v_dim;
    if (h->features.recurrence == FKV_KDA) {
        m->r->ops->sigmoid_mul(o, gate, n);
        memcpy(gate, o, n * sizeof *gate);
    } else {
        m->r->ops->silu_mul(gate, o, n);
    }
    pad_row(m, row);
}

static void scale_values(float *x, uint32_t n, float scale) {
    for (uint32_t i = 0; i < n; i++) x[i] *= scale;
}

/* Scales the projections of Mamba-2 before the convolution. */
static void scale_mamba_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const uint32_t n_values = output_width(m->r->model->hparams);
    const uint32_t n_keys = s->n_k_heads * s->k_dim;
    float *in = in_of(m, row);
    scale_values(mixed_of(m, row), n_values, s->in_scales[0]);
    scale_values(in, n_values, s->in_scales[1]);
    scale_values(in + n_values, n_keys, s->in_scales[2]);
    scale_values(in + n_values + n_keys, n_keys, s->in_scales[3]);
    scale_values(m->r->cpu.decay + (size_t)row * s->n_v_heads, s->n_v_heads, s->in_scales[4]);
}

/* Normalizes each group of channels, if the layer has a norm. */
static void norm_groups(const mixer *m, float *x) {
    const fkv_hparams *h = m->r->model->hparams;
    if (m->layer->mixer_norm == NULL) return;
    const uint32_t width = output_width(h) / h->recurrence.n_norm_groups;
    for (uint32_t at = 0; at < output_width(h); at += width)
        m->r->ops->rms_norm(x + at, m->layer->mixer_norm + at, h->norm_eps, width, x + at);
}

/* Gates and normalizes the output of Mamba-2. The gates are in `mixed`, and the results replace them. */
static void gate_mamba_output_row(const mixer *m, uint32_t row) {
    const fkv_hparams *h = m->r->model->hparams;
    const uint32_t n = output_width(h);
    float *gate = mixed_of(m, row);
    float *o = in_of(m, row) + m->values_offset;
    if (h->recurrence.norms_before_gate) norm_groups(m, o);
    m->r->ops->silu_mul(gate, o, n);
    if (!h->recurrence.norms_before_gate) norm_groups(m, gate);
    if (h->recurrence.out_scale != 0.0f) scale_values(gate, n, h->recurrence.out_scale);
    pad_row(m, row);
}

/* ---- projections ---- */

static void multiply_h(const mixer *m, const fkv_product *products, uint32_t n) {
    const fkv_cpu_runner *c = &m->r->cpu;
    fkv_product_run(c->workers, m->r->config.isa, products, n, c->h, m->r->n_tokens, c->dim_pad, c->input);
}

static void project_short_conv(mixer *m) {
    const fkv_product in = {&m->layer->mixer_in, m->layer->mixer_in_bias, m->r->cpu.mixer_in, m->in_width, NULL};
    multiply_h(m, &in, 1);
}

static void project_delta_net(mixer *m) {
    const fkv_cpu_runner *c = &m->r->cpu;
    const fkv_packed_layer *l = m->layer;
    const uint32_t n_heads = m->r->model->hparams->recurrence.n_v_heads;
    const fkv_product apart[] = {{&l->mixer_in, NULL, c->mixer_in, m->in_width, NULL},
                                 {&l->mixer_gate, NULL, c->mixed, m->pad, NULL}};
    const fkv_product gates[] = {{&l->beta, NULL, c->beta, n_heads, NULL}, {&l->alpha, NULL, c->decay, n_heads, NULL}};
    const fkv_product fused = {&l->mixer_fused, NULL, c->mixer_fused, m->in_width + output_width(m->r->model->hparams), NULL};
    const fkv_product fused_gates = {&l->beta_alpha, NULL, c->mixer_fused, 2 * n_heads, NULL};
    if (l->mixer_fused.n_rows != 0) {
        multiply_h(m, &fused, 1);
        run_rows(m, split_fused_row);
    } else {
        multiply_h(m, apart, 2);
    }
    if (l->beta_alpha.n_rows != 0) {
        multiply_h(m, &fused_gates, 1);
        run_rows(m, split_beta_alpha_row);
    } else {
        multiply_h(m, gates, 2);
    }
    run_rows(m, gate_state_row);
}

static void run_states(mixer *m) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    run_sequences(m, run_state_item, s->n_v_heads * fkv_ceil_div(s->v_dim, VALUES_PER_ITEM));
}

/* Zeroes the padding of the inputs of the second low-rank projections. */
static void pad_low_row(const mixer *m, uint32_t row) {
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const uint32_t k_pad = fkv_packed_pad(s->k_dim);
    const uint32_t v_pad = fkv_packed_pad(s->v_dim);
    memset(m->r->cpu.alpha_low + (size_t)row * k_pad + s->k_dim, 0, (k_pad - s->k_dim) * sizeof(float));
    memset(m->r->cpu.gate_low + (size_t)row * v_pad + s->v_dim, 0, (v_pad - s->v_dim) * sizeof(float));
}

static void project_kda(mixer *m) {
    const fkv_cpu_runner *c = &m->r->cpu;
    const fkv_packed_layer *l = m->layer;
    const fkv_recurrence *s = &m->r->model->hparams->recurrence;
    const size_t n_keys = (size_t)s->n_v_heads * s->k_dim;
    const uint32_t k_pad = fkv_packed_pad(s->k_dim);
    const uint32_t v_pad = fkv_packed_pad(s->v_dim);
    const fkv_product inputs[] = {{&l->q, NULL, c->mixer_in, m->in_width, NULL},
                                  {&l->k, NULL, c->mixer_in + n_keys, m->in_width, NULL},
                                  {&l->v, NULL, c->mixer_in + 2 * n_keys, m->in_width, NULL},
                                  {&l->beta, NULL, c->beta, s->n_v_heads, NULL}};
    const fkv_product low[] = {{&l->alpha_low, NULL, c->alpha_low, k_pad, NULL}, {&l->gate_low, NULL, c->gate_low, v_pad, NULL}};
    const fkv_product alpha = {&l->alpha, NULL, c->decay, n_decays(m->r->model->hparams), NULL};
    const fkv_product gate = {&l->mixer_gate, NULL, c->mixed, m->pad, NULL};
    multiply_h(m, inputs, sizeof inputs / sizeof inputs[0]);
    multiply_h(m, low, 2);
    run_rows(m, pad_low_row);
    fkv_product_run(c->workers, m->r->config.isa, &alpha, 1, c->alpha_low, m->r->n_tokens, k_pad, c->input);
    fkv_product_run(c->workers, m->r->config.isa, &gate, 1, c->gate_low, m->r->n_tokens, v_pad, c->input);
    run_rows(m, gate_kda_row);
}

static void project_mamba2(mixer *m) {
    const fkv_cpu_runner *c = &m->r->cpu;
    const fkv_packed_layer *l = m->layer;
    const fkv_product products[] = {{&l->mixer_in, NULL, c->mixer_in, m->in_width, NULL},
                                    {&l->mixer_gate, NULL, c->mixed, m->pad, NULL},
                                    {&l->alpha, NULL, c->decay, m->r->model->hparams->recurrence.n_v_heads, NULL}};
    multiply_h(m, products, 3);
    if (m->r->model->hparams->recurrence.in_scales[0] != 0.0f) run_rows(m, scale_mamba_row);
    run_rows(m, gate_mamba_row);
}

/* Computes the inputs of the convolution and of the recurrence, and the gates of the output. */
static void project_inputs(mixer *m) {
    switch (m->r->model->hparams->features.recurrence) {
    case FKV_SHORT_CONV: project_short_conv(m); break;
    case FKV_MAMBA2: project_mamba2(m); break;
    case FKV_KDA: project_kda(m); break;
    default: project_delta_net(m);
    }
}

/* Runs the convolution and the recurrence: reads the old states, writes the new states, and computes the outputs. */
static void update_states(mixer *m) {
    const fkv_recurrence_kind kind = m->r->model->hparams->features.recurrence;
    run_conv(m);
    if (kind == FKV_SHORT_CONV) return;
    if (kind != FKV_MAMBA2) run_rows(m, norm_keys_row);
    run_states(m);
}

static void finish_outputs(mixer *m) {
    switch (m->r->model->hparams->features.recurrence) {
    case FKV_SHORT_CONV: run_rows(m, pad_row); break;
    case FKV_MAMBA2: run_rows(m, gate_mamba_output_row); break;
    default: run_rows(m, gate_output_row);
    }
}

/* ---- replay ---- */

/* Copies the inputs of one token from the step's buffers to the saved inputs, or back. saved: saved inputs of the token. row: row
 * of the step. */
static void copy_inputs(const mixer *m, float *saved, uint32_t row, bool restores) {
    const fkv_runner *r = m->r;
    const fkv_hparams *h = r->model->hparams;
    const uint32_t n_heads = h->recurrence.n_v_heads;
    const bool is_short = h->features.recurrence == FKV_SHORT_CONV;
    struct {
        float *values;
        uint32_t n;
    } const parts[] = {{in_of(m, row), m->in_width},
                       {is_short ? NULL : r->cpu.decay + (size_t)row * n_decays(h), is_short ? 0 : n_decays(h)},
                       {is_short ? NULL : r->cpu.beta + (size_t)row * n_heads, is_short ? 0 : n_heads}};
    for (uint32_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (parts[i].n == 0) continue;
        memcpy(restores ? parts[i].values : saved, restores ? saved : parts[i].values, parts[i].n * sizeof *saved);
        saved += parts[i].n;
    }
}

/* Copies the inputs of all rows of the step that have saved inputs. */
static void copy_all_inputs(const mixer *m, bool restores) {
    const fkv_runner *r = m->r;
    const fkv_hparams *h = r->model->hparams;
    if (r->cpu.saved_inputs == NULL) return;
    const size_t width = saved_width(h);
    float *saved = r->cpu.saved_inputs + (size_t)n_recurrent_before(h, m->index) * r->config.max_logit_rows * width;
    uint32_t first = 0;
    for (uint32_t i = 0; i < r->n_rows; first += r->rows[i++].n_tokens)
        for (uint32_t t = 0; r->saved_from[i] != FKV_NOT_SAVED && t < r->rows[i].n_tokens; t++)
            copy_inputs(m, saved + (r->saved_from[i] + t) * width, first + t, restores);
}

/* ---- layers ---- */

static mixer make_mixer(fkv_runner *r, uint32_t index) {
    const fkv_hparams *h = r->model->hparams;
    const fkv_recurrence *s = &h->recurrence;
    mixer m = {.r = r,
               .layer = &r->model->packed->layers[index],
               .index = index,
               .n_channels = fkv_architecture_conv_channels(h),
               .in_width = input_width(h),
               .pad = fkv_recurrent_pad(h)};
    if (h->features.recurrence == FKV_SHORT_CONV) return m;
    m.conv_offset = (uint64_t)s->n_v_heads * s->v_dim * s->k_dim;
    if (h->features.recurrence == FKV_MAMBA2)
        m.keys_offset = output_width(h);
    else
        m.values_offset = 2 * (size_t)s->n_k_heads * s->k_dim;
    return m;
}

fkv_status fkv_recurrent_run(fkv_runner *r, uint32_t index, fkv_step *step) {
    mixer m = make_mixer(r, index);
    FKV_TRY(fkv_state_rows(step, r->model->hparams->shapes[index].state_layer, r->cpu.states));
    project_inputs(&m);
    copy_all_inputs(&m, false);
    update_states(&m);
    finish_outputs(&m);
    return FKV_OK;
}

fkv_status fkv_recurrent_replay(fkv_runner *r, uint32_t index, fkv_step *step) {
    mixer m = make_mixer(r, index);
    FKV_TRY(fkv_state_rows(step, r->model->hparams->shapes[index].state_layer, r->cpu.states));
    for (uint32_t i = 0; i < r->n_rows; i++) r->cpu.states[i] = r->cpu.states[r->shortened[i]];
    copy_all_inputs(&m, true);
    update_states(&m);
    return FKV_OK;
}
