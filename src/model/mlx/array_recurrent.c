/* Recurrent layers on MLX: gated short convolutions, gated delta nets, Kimi Delta Attention (KDA) and Mamba-2.
 * ../forward/recurrent.c states the equations and fkv_architecture_state_bytes() the layout of a state.
 *
 * Projections, gates and norms process all tokens of the step at once. The recurrence itself runs token by token, in one chain of
 * operations per sequence whose shapes do not depend on the number of tokens. Given the same inputs, a state is therefore
 * bit-identical for any chunking and any batch. The GPU kernel that runs the recurrence (recurrent_source.h) has the same
 * property. The convolution adds its taps in a fixed order, independently for each token.
 *
 * A state is viewed as [A, B, v_dim, k_dim], where A * B is the number of value heads. The key heads are the axis A, or the axis
 * B if the value heads are tiled, so that the keys broadcast over the value heads that share them.
 */
#include "array_pass.h"
#include "recurrent_source.h"

#include <math.h>
#include <stdio.h>

/* On the CPU backend, a step with more tokens than this is evaluated after each recurrent layer, which bounds the size of the
 * graph. */
enum { MAX_LAZY_TOKENS = 64 };

static const float L2_EPS = 1e-6f; /* epsilon added to the sum of squares; the same value as in transformers */

typedef struct mixer {
    const fkv_array_pass *p;
    fkv_mlx_graph *g;
    const fkv_hparams *h;
    const fkv_recurrence *s;
    int n_channels;        /* C: channels of the convolution */
    int n_matrix;          /* number of values in the matrices of a state; the convolution inputs follow them */
    int a, b;              /* A and B, the first two dimensions of a state; see the top of this file */
    mlx_array u;           /* [T, C] inputs of the convolution */
    mlx_array gate;        /* [T, n_v_heads * v_dim] gates of the output; in a short convolution, c: [T, dim] */
    mlx_array decay, beta; /* [T, n_v_heads]; in KDA, decay is [T, n_v_heads * k_dim]; in Mamba-2, beta is the step size */
} mixer;

static mlx_array silu(fkv_mlx_graph *g, mlx_array x) { return fkv_mlx_multiply(g, x, fkv_model_op_sigmoid(g, x)); }

static uint32_t n_values(const mixer *m) { return m->s->n_v_heads * m->s->v_dim; }

static uint32_t n_keys(const mixer *m) { return m->s->n_k_heads * m->s->k_dim; }

/* ---- projections ---- */

static mlx_array project(const mixer *m, fkv_array_rows in, const fkv_array_matrix *matrix) {
    return fkv_array_product_of_input(m->p, in, matrix);
}

static void project_short_conv(mixer *m, fkv_array_rows in) {
    const fkv_array_layer *l = m->p->layer;
    const uint32_t dim = m->h->dim;
    mlx_array all = fkv_array_plus(m->p, project(m, in, &l->mixer_in), l->mixer_in_bias);
    m->u = fkv_mlx_multiply(m->g, fkv_array_channels(m->p, all, 0, dim), fkv_array_channels(m->p, all, 2 * dim, 3 * dim));
    m->gate = fkv_array_channels(m->p, all, dim, 2 * dim);
}

/* Returns channels [from, to) of each key head, concatenated: [T, n]. grouped: a projection whose rows are grouped by key
 * head. */
static mlx_array of_key_heads(const mixer *m, mlx_array grouped, uint32_t from, uint32_t to) {
    mlx_array part = fkv_model_op_columns(m->g, grouped, (int)from, (int)to);
    return fkv_mlx_reshape(m->g, part, FKV_MLX_SHAPE(m->p->n_rows, (int)(m->s->n_k_heads * (to - from))));
}

static mlx_array by_key_head(const mixer *m, mlx_array rows, uint32_t width) {
    return fkv_mlx_reshape(m->g, rows, FKV_MLX_SHAPE(m->p->n_rows, (int)m->s->n_k_heads, (int)width));
}

static void project_delta_net(mixer *m, fkv_array_rows in) {
    const fkv_array_layer *l = m->p->layer;
    const uint32_t k = m->s->k_dim;
    const uint32_t n = m->s->n_v_heads / m->s->n_k_heads; /* value heads per key head */
    const uint32_t v = n * m->s->v_dim;
    if (fkv_array_has(&l->mixer_fused)) { /* for each key head, a row contains the query, the key, the values and the gates */
        mlx_array all = by_key_head(m, project(m, in, &l->mixer_fused), 2 * k + 2 * v);
        mlx_array keys = fkv_model_op_beside(m->g, of_key_heads(m, all, 0, k), of_key_heads(m, all, k, 2 * k));
        m->u = fkv_model_op_beside(m->g, keys, of_key_heads(m, all, 2 * k, 2 * k + v));
        m->gate = of_key_heads(m, all, 2 * k + v, 2 * k + 2 * v);
    } else {
        m->u = project(m, in, &l->mixer_in);
        m->gate = project(m, in, &l->mixer_gate);
    }
    if (fkv_array_has(&l->beta_alpha)) {
        mlx_array all = by_key_head(m, project(m, in, &l->beta_alpha), 2 * n);
        m->beta = of_key_heads(m, all, 0, n);
        m->decay = of_key_heads(m, all, n, 2 * n);
    } else {
        m->beta = project(m, in, &l->beta);
        m->decay = project(m, in, &l->alpha);
    }
    mlx_array step = fkv_model_op_softplus(m->g, fkv_mlx_add(m->g, m->decay, l->alpha_bias));
    m->decay = fkv_model_op_exp(m->g, fkv_mlx_multiply(m->g, step, l->decay));
    m->beta = fkv_model_op_sigmoid(m->g, m->beta);
}

static void project_kda(mixer *m, fkv_array_rows in) {
    const fkv_array_layer *l = m->p->layer;
    const int n_heads = (int)m->s->n_v_heads;
    const int k_dim = (int)m->s->k_dim;
    mlx_array keys = fkv_model_op_beside(m->g, project(m, in, &l->q), project(m, in, &l->k));
    m->u = fkv_model_op_beside(m->g, keys, project(m, in, &l->v));
    m->gate = fkv_array_product_of_large(m->p, project(m, in, &l->gate_low), &l->mixer_gate);
    m->beta = fkv_model_op_sigmoid(m->g, project(m, in, &l->beta));
    mlx_array alpha = fkv_array_product_of_large(m->p, project(m, in, &l->alpha_low), &l->alpha);
    mlx_array step = fkv_model_op_softplus(m->g, fkv_mlx_add(m->g, alpha, l->alpha_bias));
    step = fkv_mlx_reshape(m->g, step, FKV_MLX_SHAPE(m->p->n_rows, n_heads, k_dim));
    mlx_array rates = fkv_mlx_reshape(m->g, l->decay, FKV_MLX_SHAPE(n_heads, 1));
    m->decay = fkv_model_op_exp(m->g, fkv_mlx_multiply(m->g, step, rates));
    m->decay = fkv_mlx_reshape(m->g, m->decay, FKV_MLX_SHAPE(m->p->n_rows, n_heads * k_dim));
}

static void project_mamba2(mixer *m, fkv_array_rows in) {
    const fkv_array_layer *l = m->p->layer;
    const float *scales = m->s->in_scales;
    const uint32_t v = n_values(m);
    const uint32_t k = n_keys(m);
    m->u = project(m, in, &l->mixer_in);
    m->gate = project(m, in, &l->mixer_gate);
    mlx_array alpha = project(m, in, &l->alpha);
    if (scales[0] != 0.0f) {
        mlx_array values = fkv_model_op_scale(m->g, fkv_array_channels(m->p, m->u, 0, v), scales[1]);
        mlx_array keys = fkv_model_op_scale(m->g, fkv_array_channels(m->p, m->u, v, v + k), scales[2]);
        mlx_array queries = fkv_model_op_scale(m->g, fkv_array_channels(m->p, m->u, v + k, v + 2 * k), scales[3]);
        m->u = fkv_model_op_beside(m->g, fkv_model_op_beside(m->g, values, keys), queries);
        m->gate = fkv_model_op_scale(m->g, m->gate, scales[0]);
        alpha = fkv_model_op_scale(m->g, alpha, scales[4]);
    }
    mlx_array step = fkv_model_op_softplus(m->g, fkv_mlx_add(m->g, alpha, l->alpha_bias));
    step = fkv_mlx_maximum(m->g, step, fkv_array_number(m->p, m->s->min_step));
    if (m->s->max_step != 0.0f) step = fkv_mlx_minimum(m->g, step, fkv_array_number(m->p, m->s->max_step));
    m->beta = step;
    m->decay = fkv_model_op_exp(m->g, fkv_mlx_multiply(m->g, step, l->decay));
}

/* ---- one sequence ---- */

/* The tokens of one sequence: rows [first, first + n) of the step. */
typedef struct run {
    int first, n;
    mlx_array conv;   /* [n, C] output of the convolution */
    mlx_array window; /* [n_taps - 1, C] last inputs of the convolution, which are part of the new state */
} run;

static mlx_array rows_of(const mixer *m, const run *r, mlx_array all, int width) {
    return fkv_mlx_slice(m->g, all, FKV_MLX_SHAPE(r->first, 0), FKV_MLX_SHAPE(r->first + r->n, width));
}

/* Computes the convolution over the tokens of a sequence. state: the state before these tokens. */
static void run_conv(const mixer *m, run *r, mlx_array state) {
    const fkv_array_layer *l = m->p->layer;
    const int n_before = (int)m->s->n_taps - 1;
    mlx_array before =
        fkv_mlx_slice(m->g, state, FKV_MLX_SHAPE(m->n_matrix), FKV_MLX_SHAPE(m->n_matrix + n_before * m->n_channels));
    before = fkv_mlx_reshape(m->g, before, FKV_MLX_SHAPE(n_before, m->n_channels));
    mlx_array x = fkv_model_op_stack(m->g, before, rows_of(m, r, m->u, m->n_channels));
    mlx_array sum = l->conv_bias;
    for (int j = 0; j <= n_before; j++) {
        mlx_array tap = fkv_mlx_slice(m->g, l->conv, FKV_MLX_SHAPE(j, 0), FKV_MLX_SHAPE(j + 1, m->n_channels));
        mlx_array part = fkv_mlx_slice(m->g, x, FKV_MLX_SHAPE(j, 0), FKV_MLX_SHAPE(j + r->n, m->n_channels));
        part = fkv_mlx_multiply(m->g, part, tap);
        sum = sum.ctx == NULL ? part : fkv_mlx_add(m->g, sum, part);
    }
    r->conv = sum;
    r->window = fkv_mlx_slice(m->g, x, FKV_MLX_SHAPE(r->n, 0), FKV_MLX_SHAPE(r->n + n_before, m->n_channels));
}

/* Returns the part of an array that belongs to token t. The first dimension of `all` is n_tokens times the number of rows per
 * token. */
static mlx_array token_of(const mixer *m, mlx_array all, int t, int n_tokens) {
    if (m->g->failed) return all;
    const int *shape = mlx_array_shape(all);
    const int n = shape[0] / n_tokens;
    return fkv_mlx_slice(m->g, all, FKV_MLX_SHAPE(t * n, 0, 0, 0), FKV_MLX_SHAPE((t + 1) * n, shape[1], shape[2], shape[3]));
}

/* Inputs of the recurrence, with the tokens of a sequence along the first axis. */
typedef struct recurrence_rows {
    mlx_array keys, queries; /* [n * A, 1, 1, k_dim], or [n, B, 1, k_dim] if the value heads are tiled */
    mlx_array values;        /* [n * A, B, v_dim, 1] */
    mlx_array decay;         /* [n * A, B, 1, 1]; in KDA, which has a decay per key channel, [n * A, B, 1, k_dim] */
    mlx_array beta;          /* [n * A, B, 1, 1] */
} recurrence_rows;

static mlx_array keys_of(const mixer *m, const run *r, mlx_array rows) {
    const int dim = (int)m->s->k_dim;
    return fkv_mlx_reshape(m->g, rows, m->s->tiled ? FKV_MLX_SHAPE(r->n, m->b, 1, dim) : FKV_MLX_SHAPE(r->n * m->a, 1, 1, dim));
}

static mlx_array values_of(const mixer *m, const run *r, mlx_array rows, int dim) {
    return fkv_mlx_reshape(m->g, rows, FKV_MLX_SHAPE(r->n * m->a, m->b, dim, 1));
}

/* Normalizes keys or queries per key head and scales them. */
static mlx_array l2_norm(const mixer *m, const run *r, mlx_array rows, float scale) {
    mlx_array heads = keys_of(m, r, rows);
    mlx_array sum = fkv_mlx_sum_last(m->g, fkv_mlx_multiply(m->g, heads, heads));
    mlx_array size = fkv_model_op_rsqrt(m->g, fkv_mlx_add(m->g, sum, fkv_array_number(m->p, L2_EPS)));
    return fkv_mlx_multiply(m->g, heads, fkv_model_op_scale(m->g, size, scale));
}

static mlx_array conv_channels(const mixer *m, const run *r, mlx_array conv, uint32_t from, uint32_t to) {
    return fkv_mlx_slice(m->g, conv, FKV_MLX_SHAPE(0, (int)from), FKV_MLX_SHAPE(r->n, (int)to));
}

static recurrence_rows split_rows(const mixer *m, const run *r, mlx_array u) {
    const uint32_t v = n_values(m);
    const uint32_t k = n_keys(m);
    const int n_heads = (int)m->s->n_v_heads;
    const bool is_mamba = m->h->features.recurrence == FKV_MAMBA2;
    const int n_decays = m->h->features.recurrence == FKV_KDA ? (int)m->s->k_dim : 1; /* per value head */
    mlx_array decay = rows_of(m, r, m->decay, n_heads * n_decays);
    recurrence_rows x = {.decay = fkv_mlx_reshape(m->g, decay, FKV_MLX_SHAPE(r->n * m->a, m->b, 1, n_decays)),
                         .beta = values_of(m, r, rows_of(m, r, m->beta, n_heads), 1)};
    if (is_mamba) {
        x.values = values_of(m, r, conv_channels(m, r, u, 0, v), (int)m->s->v_dim);
        x.keys = keys_of(m, r, conv_channels(m, r, u, v, v + k));
        x.queries = keys_of(m, r, conv_channels(m, r, u, v + k, v + 2 * k));
    } else {
        x.queries = l2_norm(m, r, conv_channels(m, r, u, 0, k), 1.0f / sqrtf((float)m->s->k_dim));
        x.keys = l2_norm(m, r, conv_channels(m, r, u, k, 2 * k), 1.0f);
        x.values = values_of(m, r, conv_channels(m, r, u, 2 * k, 2 * k + v), (int)m->s->v_dim);
    }
    return x;
}

/* Updates the state for one token and returns the output of the token: [A, B, v_dim, 1]. */
static mlx_array step_state(const mixer *m, const recurrence_rows *x, int t, int n, mlx_array *state) {
    fkv_mlx_graph *g = m->g;
    const uint32_t mark = fkv_mlx_graph_mark(g);
    mlx_array kept = fkv_mlx_multiply(g, *state, token_of(m, x->decay, t, n));
    mlx_array k = token_of(m, x->keys, t, n);
    mlx_array d = token_of(m, x->values, t, n);
    if (m->h->features.recurrence != FKV_MAMBA2) {
        d = fkv_mlx_subtract(g, d, fkv_mlx_sum_last(g, fkv_mlx_multiply(g, kept, k)));
        d = fkv_mlx_multiply(g, d, token_of(m, x->beta, t, n));
    }
    mlx_array next = fkv_mlx_add(g, kept, fkv_mlx_multiply(g, d, k));
    mlx_array out = {NULL};
    fkv_mlx_keep(g, &out, fkv_mlx_sum_last(g, fkv_mlx_multiply(g, next, token_of(m, x->queries, t, n))));
    fkv_mlx_keep(g, state, next);
    fkv_mlx_graph_release(g, mark);
    return out;
}

/* Runs the recurrence over the tokens of a sequence, from the state *state, [A, B, v_dim, k_dim], which becomes the new state and
 * stays owned by the caller. Returns the outputs, [n * A, B, v_dim, 1]. */
static mlx_array run_recurrence_tokens(const mixer *m, const run *r, const recurrence_rows *rows, mlx_array *state) {
    fkv_mlx_graph *g = m->g;
    recurrence_rows x = *rows;
    if (m->h->features.recurrence == FKV_MAMBA2) x.values = fkv_mlx_multiply(g, x.values, x.beta);
    mlx_vector_array outputs = mlx_vector_array_new();
    for (int t = 0; t < r->n && !g->failed; t++) {
        mlx_array out = step_state(m, &x, t, r->n, state);
        if (!g->failed && mlx_vector_array_append_value(outputs, out) != 0) g->failed = true;
        (void)mlx_array_free(out);
    }
    mlx_array all = fkv_model_op_stack_all(g, outputs);
    (void)mlx_vector_array_free(outputs);
    return all;
}

/* ---- recurrence on a GPU ---- */

static fkv_status open_kernel(const mixer *m, fkv_mlx_kernel *kernel) {
    bool is_metal = false;
    char header[1024];
    char name[96];
    const fkv_recurrence *s = m->s;
    FKV_TRY(fkv_mlx_check(mlx_metal_is_available(&is_metal), "querying Metal"));
    const fkv_recurrent_device device = is_metal ? FKV_RECURRENT_METAL : FKV_RECURRENT_CUDA;
    const size_t length = fkv_recurrent_header(device, m->h->features.recurrence, s, header, sizeof header);
    FKV_ASSERT(length < sizeof header);
    (void)length;
    /* MLX looks up compiled kernels by name, so the name contains everything that the source depends on */
    (void)snprintf(name, sizeof name, "flatkv_recurrence_%d_%d_%u_%u_%u_%u", (int)m->h->features.recurrence, s->tiled,
                   s->n_k_heads, s->n_v_heads, s->k_dim, s->v_dim);
    const fkv_mlx_kernel_source text = {.name = name,
                                        .header = header,
                                        .source = fkv_recurrent_body(device),
                                        .inputs = fkv_recurrent_inputs,
                                        .outputs = fkv_recurrent_outputs};
    return fkv_mlx_kernel_open(kernel, is_metal, &text);
}

/* Computes the same result as run_recurrence_tokens(), with a single kernel (recurrent_source.h). */
static mlx_array run_recurrence_kernel(const mixer *m, const run *r, const recurrence_rows *x, mlx_array *state) {
    enum { MIN_WORDS = 8 }; /* MLX passes shorter inputs to Metal kernels as constants, so it would compile the kernel again */
    fkv_mlx_graph *g = m->g;
    fkv_mlx_kernel *kernel = &m->p->r->arrays->recurrence;
    const int n_out = r->n * (int)n_values(m);
    const uint32_t words[MIN_WORDS] = {(uint32_t)r->n};
    if (!g->failed && !kernel->is_open && open_kernel(m, kernel) != FKV_OK) g->failed = true;
    const mlx_array n_tokens = fkv_model_op_upload(g, words, FKV_MLX_SHAPE(MIN_WORDS), MLX_UINT32);
    const mlx_array inputs[] = {*state, x->queries, x->keys, x->values, x->decay, x->beta, n_tokens};
    const fkv_mlx_launch launch = {.blocks = {fkv_ceil_div(n_values(m), FKV_RECURRENT_ROWS), 1, 1},
                                   .threads = FKV_RECURRENT_THREADS,
                                   .out_shape = FKV_MLX_SHAPE(n_out + m->n_matrix),
                                   .out_type = MLX_FLOAT32};
    mlx_array all = fkv_mlx_kernel_apply(g, kernel, &launch, inputs, NULL);
    fkv_mlx_keep(g, state, fkv_mlx_slice(g, all, FKV_MLX_SHAPE(n_out), FKV_MLX_SHAPE(n_out + m->n_matrix)));
    return fkv_mlx_slice(g, all, FKV_MLX_SHAPE(0), FKV_MLX_SHAPE(n_out));
}

/* Runs the recurrence over the tokens of a sequence and adds the skip connections of Mamba-2. Returns the outputs, [n, n_v_heads
 * * v_dim]. */
static mlx_array run_recurrence(const mixer *m, const run *r, mlx_array *state) {
    fkv_mlx_graph *g = m->g;
    const recurrence_rows x = split_rows(m, r, silu(g, r->conv));
    mlx_array all =
        m->p->r->model->arrays->on_gpu ? run_recurrence_kernel(m, r, &x, state) : run_recurrence_tokens(m, r, &x, state);
    if (m->h->features.recurrence == FKV_MAMBA2) {
        mlx_array skip = fkv_mlx_reshape(g, m->p->layer->skip, FKV_MLX_SHAPE(1, m->a, m->b, 1));
        const fkv_mlx_shape by_head = FKV_MLX_SHAPE(r->n, m->a, m->b, (int)m->s->v_dim);
        all = fkv_mlx_add(g, fkv_mlx_reshape(g, all, by_head), fkv_mlx_multiply(g, fkv_mlx_reshape(g, x.values, by_head), skip));
    }
    return fkv_mlx_reshape(g, all, FKV_MLX_SHAPE(r->n, (int)n_values(m)));
}

/* Concatenates the parts of a state: float32 [state_bytes / 4]. */
static mlx_array join_state(const mixer *m, const run *r, mlx_array matrices) {
    const int n_window = ((int)m->s->n_taps - 1) * m->n_channels;
    const int n_padding = (int)(fkv_architecture_state_bytes(m->h) / sizeof(float)) - m->n_matrix - n_window;
    mlx_array state = fkv_mlx_reshape(m->g, r->window, FKV_MLX_SHAPE(n_window));
    if (matrices.ctx != NULL)
        state = fkv_model_op_stack(m->g, fkv_mlx_reshape(m->g, matrices, FKV_MLX_SHAPE(m->n_matrix)), state);
    return n_padding != 0 ? fkv_model_op_stack(m->g, state, fkv_model_op_zeros(m->g, n_padding)) : state;
}

/* Runs one sequence. *state, a handle owned by the caller, is the state before its tokens and becomes the state after them.
 * Returns the outputs of the recurrence or, in a short convolution, of the convolution. */
static mlx_array run_sequence(const mixer *m, run *r, mlx_array *state) {
    fkv_mlx_graph *g = m->g;
    run_conv(m, r, *state);
    if (m->n_matrix == 0) {
        fkv_mlx_keep(g, state, join_state(m, r, (mlx_array){NULL}));
        return r->conv;
    }
    mlx_array matrices = {NULL};
    mlx_array flat = fkv_mlx_slice(g, *state, FKV_MLX_SHAPE(0), FKV_MLX_SHAPE(m->n_matrix));
    fkv_mlx_keep(g, &matrices, fkv_mlx_reshape(g, flat, FKV_MLX_SHAPE(m->a, m->b, (int)m->s->v_dim, (int)m->s->k_dim)));
    mlx_array out = run_recurrence(m, r, &matrices);
    fkv_mlx_keep(g, state, g->failed ? flat : join_state(m, r, matrices));
    (void)mlx_array_free(matrices);
    return out;
}

/* ---- the layer ---- */

/* Computes rms_norm(x) in groups of channels, with one weight per channel: [T, n]. */
static mlx_array norm_groups(const mixer *m, mlx_array x) {
    const mlx_array weight = m->p->layer->mixer_norm;
    const int n_groups = (int)m->s->n_norm_groups;
    const int width = (int)n_values(m) / (n_groups != 0 ? n_groups : 1);
    if (weight.ctx == NULL) return x;
    mlx_array groups = fkv_mlx_reshape(m->g, x, FKV_MLX_SHAPE(m->p->n_rows, n_groups, width));
    groups = fkv_model_op_rms_norm(m->g, groups, (mlx_array){NULL}, m->h->norm_eps);
    return fkv_mlx_multiply(m->g, fkv_mlx_reshape(m->g, groups, FKV_MLX_SHAPE(m->p->n_rows, (int)n_values(m))), weight);
}

/* Gates and normalizes the outputs of all rows. */
static mlx_array gate_outputs(const mixer *m, mlx_array o) {
    fkv_mlx_graph *g = m->g;
    switch (m->h->features.recurrence) {
    case FKV_SHORT_CONV: return fkv_mlx_multiply(g, o, m->gate);
    case FKV_MAMBA2:
        if (m->s->norms_before_gate) o = norm_groups(m, o);
        o = fkv_mlx_multiply(g, silu(g, m->gate), o);
        if (!m->s->norms_before_gate) o = norm_groups(m, o);
        return m->s->out_scale != 0.0f ? fkv_model_op_scale(g, o, m->s->out_scale) : o;
    case FKV_DELTA_NET:
    case FKV_KDA:
    case FKV_RECURRENCE_NONE: break;
    }
    mlx_array gate = m->h->features.recurrence == FKV_KDA ? fkv_model_op_sigmoid(g, m->gate) : silu(g, m->gate);
    o = fkv_mlx_reshape(g, o, FKV_MLX_SHAPE(m->p->n_rows, (int)m->s->n_v_heads, (int)m->s->v_dim));
    o = fkv_array_rms_norm(m->p, o, m->p->layer->mixer_norm);
    return fkv_mlx_multiply(g, fkv_mlx_reshape(g, o, FKV_MLX_SHAPE(m->p->n_rows, (int)n_values(m))), gate);
}

/* Runs all sequences of the step. Returns their outputs, [T, n]. states: [n_rows] empty handles, which receive the new states */
static fkv_status run_sequences(const mixer *m, uint32_t layer, mlx_array *states, mlx_array *out) {
    const fkv_runner *r = m->p->r;
    fkv_mlx_graph *g = m->g;
    mlx_vector_array outputs = mlx_vector_array_new();
    fkv_status status = FKV_OK;
    run seq = {.first = 0};
    for (uint32_t i = 0; status == FKV_OK && !g->failed && i < r->n_rows; i++) {
        const uint32_t mark = fkv_mlx_graph_mark(g);
        seq.n = (int)r->rows[i].n_tokens;
        status = fkv_mlx_state_get(m->p->step, layer, i, &states[i]);
        if (status == FKV_OK) {
            mlx_array rows = run_sequence(m, &seq, &states[i]);
            if (!g->failed && mlx_vector_array_append_value(outputs, rows) != 0) g->failed = true;
        }
        fkv_mlx_graph_release(g, mark);
        seq.first += seq.n;
    }
    if (status == FKV_OK) *out = fkv_model_op_stack_all(g, outputs);
    (void)mlx_vector_array_free(outputs);
    return status == FKV_OK ? fkv_mlx_graph_status(g, "fkv_runner_forward") : status;
}

static fkv_status evaluate_states(const fkv_array_pass *p, const mlx_array *states, mlx_array out) {
    if (p->n_rows <= MAX_LAZY_TOKENS || p->r->model->arrays->on_gpu) return FKV_OK;
    mlx_vector_array wanted = mlx_vector_array_new_data(states, p->r->n_rows);
    int code = mlx_vector_array_append_value(wanted, out);
    if (code == 0) code = mlx_async_eval(wanted);
    (void)mlx_vector_array_free(wanted);
    return fkv_mlx_check(code, "fkv_runner_forward");
}

fkv_status fkv_array_recurrent(const fkv_array_pass *p, fkv_array_rows in, mlx_array *out) {
    const fkv_hparams *h = p->r->model->hparams;
    const fkv_recurrence *s = &h->recurrence;
    const bool is_short = h->features.recurrence == FKV_SHORT_CONV;
    const int n_shared = is_short ? 0 : (int)(s->n_v_heads / s->n_k_heads);
    mixer m = {.p = p,
               .g = p->g,
               .h = h,
               .s = s,
               .n_channels = (int)fkv_architecture_conv_channels(h),
               .n_matrix = is_short ? 0 : (int)(s->n_v_heads * s->v_dim * s->k_dim),
               .a = s->tiled ? n_shared : (int)s->n_k_heads,
               .b = s->tiled ? (int)s->n_k_heads : n_shared};
    mlx_array *states = p->r->arrays->states;
    mlx_array o = {NULL};
    switch (h->features.recurrence) {
    case FKV_SHORT_CONV: project_short_conv(&m, in); break;
    case FKV_MAMBA2: project_mamba2(&m, in); break;
    case FKV_KDA: project_kda(&m, in); break;
    default: project_delta_net(&m, in);
    }
    fkv_status status = run_sequences(&m, p->shape->state_layer, states, &o);
    if (status == FKV_OK) status = fkv_mlx_state_put(p->step, p->shape->state_layer, states);
    if (status == FKV_OK) status = evaluate_states(p, states, o);
    for (uint32_t i = 0; i < p->r->n_rows; i++) {
        (void)mlx_array_free(states[i]);
        states[i] = (mlx_array){NULL};
    }
    FKV_TRY(status);
    *out = gate_outputs(&m, o);
    return fkv_mlx_graph_status(p->g, "fkv_runner_forward");
}
