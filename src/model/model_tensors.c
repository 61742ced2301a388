/* Finds every tensor that the architecture needs. See model.h.
 *
 * Models with missing tensors or tensors of the wrong shape are rejected. Models with unknown tensors are rejected as well,
 * because a model computed without one of its tensors would give wrong results.
 */
#include "model.h"

#include "files/config_tensors.h"
#include "files/tensor_rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_EXPERT_PARTS = 3, LAYER_VIEWS = 16 };

typedef struct tensor_search {
    fkv_model *model;
    bool *used; /* [n_tensors] true for each tensor in the file that has been looked up; the others are unknown tensors */
    fkv_tensor *next_view;
    const fkv_tensor **next_expert;
    uint32_t layer;
    const fkv_layer_shape *shape; /* shape of the current layer */
} tensor_search;

/* Declares a tensor without data, for a model whose only file is config.json. Does nothing if config.json states that the model
 * does not have this tensor.
 */
static fkv_status declare_tensor(const tensor_search *s, const char *name, uint64_t n_rows, uint32_t n_cols, bool needed,
                                 const fkv_tensor **tensor) {
    fkv_model *m = s->model;
    char prefix[32];
    const int n = snprintf(prefix, sizeof prefix, "blk.%u.", s->layer);
    const char *suffix = strncmp(name, prefix, (size_t)n) == 0 ? name + n : name;
    *tensor = NULL;
    if (!needed && !fkv_config_has_tensor(m->weights, s->layer, suffix)) return FKV_OK;
    m->info.n_parameters += n_rows * n_cols;
    return fkv_config_declare(m->weights, name, n_rows, n_cols, tensor);
}

/* Finds a tensor by name and checks its shape. If a required tensor is missing, returns FKV_FILE_DAMAGED. If an optional tensor
 * is missing, sets *tensor to NULL. */
static fkv_status find_tensor(tensor_search *s, const char *name, uint64_t n_rows, uint32_t n_cols, bool needed,
                              const fkv_tensor **tensor) {
    const fkv_weights *weights = s->model->weights;
    if (fkv_weights_is_config(weights)) return declare_tensor(s, name, n_rows, n_cols, needed, tensor);
    const fkv_tensor *found = fkv_weights_find(weights, name);
    *tensor = found;
    if (found == NULL) {
        FKV_REQUIRE(!needed, FKV_FILE_DAMAGED, "tensor %s is missing; %s models require it", name, s->model->architecture->name);
        return FKV_OK;
    }
    s->used[found - fkv_weights_tensor(weights, 0)] = true;
    FKV_REQUIRE(found->n_rows == n_rows && found->n_cols == n_cols, FKV_FILE_DAMAGED,
                "tensor %s is %u x %u, but the model's hyperparameters require %llu x %u", name, found->n_rows, found->n_cols,
                (unsigned long long)n_rows, n_cols);
    return FKV_OK;
}

static const char *layer_name(char text[FKV_MAX_TENSOR_NAME], uint32_t layer, const char *name) {
    (void)snprintf(text, FKV_MAX_TENSOR_NAME, "blk.%u.%s", layer, name);
    return text;
}

static fkv_status find_layer_tensor(tensor_search *s, const char *name, uint64_t n_rows, uint32_t n_cols, bool needed,
                                    const fkv_tensor **tensor) {
    char text[FKV_MAX_TENSOR_NAME];
    return find_tensor(s, layer_name(text, s->layer, name), n_rows, n_cols, needed, tensor);
}

static bool has_layer_tensor(const tensor_search *s, const char *name) {
    char text[FKV_MAX_TENSOR_NAME];
    if (fkv_weights_is_config(s->model->weights)) return fkv_config_has_tensor(s->model->weights, s->layer, name);
    return fkv_weights_find(s->model->weights, layer_name(text, s->layer, name)) != NULL;
}

/* Returns a view of n rows of a tensor, starting at row `first`. */
static const fkv_tensor *view_rows(tensor_search *s, const fkv_tensor *whole, uint32_t first, uint32_t n) {
    fkv_tensor *view = s->next_view++;
    *view = fkv_tensor_rows(whole, first, n);
    return view;
}

static fkv_status require_float_tensor(const fkv_tensor *tensor, const char *kind) {
    FKV_REQUIRE(tensor->type <= FKV_TENSOR_BF16, FKV_UNSUPPORTED, "tensor %s has type %s: %s must be F32, F16 or BF16",
                tensor->name, fkv_tensor_type_name(tensor->type), kind);
    return FKV_OK;
}

/* Makes a view of n elements of a float vector, starting at element `first`. *out is set to NULL if the vector is NULL. */
static fkv_status view_vector(tensor_search *s, const fkv_tensor *whole, uint32_t first, uint32_t n, const fkv_tensor **out) {
    *out = NULL;
    if (whole == NULL) return FKV_OK;
    FKV_TRY(require_float_tensor(whole, "biases"));
    uint64_t bytes = whole->row_bytes / whole->n_cols;
    fkv_tensor *view = s->next_view++;
    *view = *whole;
    view->data += first * bytes;
    view->n_cols = n;
    view->row_bytes = n * bytes;
    *out = view;
    return FKV_OK;
}

/* A matrix of a layer, stored as a separate tensor or as rows of a fused tensor. */
typedef struct fused_part {
    const char *name;
    uint32_t n_rows;
    bool needed;
    const fkv_tensor **weight, **bias;
} fused_part;

/* Finds n matrices and their biases: as consecutive row ranges of the tensor `fused`, or as separate tensors if fused is
 * NULL. */
static fkv_status find_fused_parts(tensor_search *s, const char *fused, bool needs_bias, const fused_part *parts, uint32_t n) {
    const uint32_t dim = s->model->hparams->dim;
    char name[64];
    uint32_t n_rows = 0;
    const fkv_tensor *whole = NULL;
    const fkv_tensor *bias = NULL;
    for (uint32_t i = 0; i < n; i++) {
        n_rows += parts[i].n_rows;
        if (fused != NULL) continue;
        (void)snprintf(name, sizeof name, "%s.weight", parts[i].name);
        FKV_TRY(find_layer_tensor(s, name, parts[i].n_rows, dim, parts[i].needed, parts[i].weight));
        (void)snprintf(name, sizeof name, "%s.bias", parts[i].name);
        FKV_TRY(find_layer_tensor(s, name, 1, parts[i].n_rows, needs_bias, parts[i].bias));
    }
    if (fused == NULL) return FKV_OK;
    (void)snprintf(name, sizeof name, "%s.weight", fused);
    FKV_TRY(find_layer_tensor(s, name, n_rows, dim, true, &whole));
    (void)snprintf(name, sizeof name, "%s.bias", fused);
    FKV_TRY(find_layer_tensor(s, name, 1, n_rows, needs_bias, &bias));
    for (uint32_t i = 0, first = 0; i < n; first += parts[i].n_rows, i++) {
        *parts[i].weight = view_rows(s, whole, first, parts[i].n_rows);
        FKV_TRY(view_vector(s, bias, first, parts[i].n_rows, parts[i].bias));
    }
    return FKV_OK;
}

/* Some files contain K and V tensors for layers that read the keys and values of another layer. These tensors are not used, so
 * this function only marks them as known. */
static fkv_status find_unused_kv(tensor_search *s, uint32_t kv_dim) {
    const fkv_tensor *unread = NULL;
    FKV_TRY(find_layer_tensor(s, "attn_k.weight", kv_dim, s->model->hparams->dim, false, &unread));
    FKV_TRY(find_layer_tensor(s, "attn_v.weight", kv_dim, s->model->hparams->dim, false, &unread));
    return find_layer_tensor(s, "attn_k_norm.weight", 1, s->shape->head_dim, false, &unread);
}

static fkv_status find_qkv(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t q_dim = h->n_q_heads * s->shape->head_dim * (h->features.gate_in_q ? 2 : 1);
    const uint32_t kv_dim = s->shape->n_kv_heads * s->shape->head_dim;
    const uint32_t v_dim = s->shape->n_kv_heads * fkv_architecture_v_dim(h, s->shape);
    const bool is_fused = has_layer_tensor(s, "attn_qkv.weight");
    const fused_part parts[] = {{"attn_q", q_dim, true, &t->q, &t->q_bias},
                                {"attn_k", kv_dim, true, &t->k, &t->k_bias},
                                {"attn_v", v_dim, !h->features.k_may_be_v, &t->v, &t->v_bias}};
    if (!is_fused && s->shape->kv_layer != s->layer) {
        FKV_TRY(find_layer_tensor(s, "attn_q.weight", q_dim, h->dim, true, &t->q));
        return find_unused_kv(s, kv_dim);
    }
    return find_fused_parts(s, is_fused ? "attn_qkv" : NULL, h->features.qkv_bias, parts, 3);
}

/* Finds the weights of a convolution: [n_channels, n_taps]. MLX stores them as [n_channels, n_taps, 1]. */
static fkv_status find_channels_conv(tensor_search *s, const char *name, uint32_t n_channels, const fkv_tensor **out) {
    const uint32_t n_taps = s->model->hparams->recurrence.n_taps;
    char text[FKV_MAX_TENSOR_NAME];
    const fkv_tensor *found = fkv_weights_find(s->model->weights, layer_name(text, s->layer, name));
    if (found == NULL || found->n_cols != 1) {
        FKV_TRY(find_layer_tensor(s, name, n_channels, n_taps, true, out));
        return require_float_tensor(*out, "convolutions");
    }
    FKV_TRY(find_layer_tensor(s, name, (uint64_t)n_channels * n_taps, 1, true, &found));
    FKV_TRY(require_float_tensor(found, "convolutions"));
    fkv_tensor *view = s->next_view++;
    *view = *found;
    view->n_rows = n_channels;
    view->n_cols = n_taps;
    view->row_bytes = n_taps * found->row_bytes;
    *out = view;
    return FKV_OK;
}

/* Finds the weights of the convolution over all channels. */
static fkv_status find_conv(tensor_search *s, const char *name, const fkv_tensor **out) {
    return find_channels_conv(s, name, fkv_architecture_conv_channels(s->model->hparams), out);
}

static fkv_status find_short_conv(tensor_search *s, fkv_layer_tensors *t) {
    const uint32_t dim = s->model->hparams->dim;
    FKV_TRY(find_layer_tensor(s, "shortconv.in_proj.weight", 3 * (uint64_t)dim, dim, true, &t->mixer_in));
    FKV_TRY(find_layer_tensor(s, "shortconv.in_proj.bias", 1, 3 * dim, false, &t->mixer_in_bias));
    FKV_TRY(find_conv(s, "shortconv.conv.weight", &t->conv));
    FKV_TRY(find_layer_tensor(s, "shortconv.conv.bias", 1, dim, false, &t->conv_bias));
    FKV_TRY(find_layer_tensor(s, "shortconv.out_proj.weight", dim, dim, true, &t->mixer_out));
    return find_layer_tensor(s, "shortconv.out_proj.bias", 1, dim, false, &t->mixer_out_bias);
}

static fkv_status find_delta_net(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_recurrence *r = &h->recurrence;
    const uint32_t n_channels = fkv_architecture_conv_channels(h);
    const uint32_t n_values = r->n_v_heads * r->v_dim;
    if (has_layer_tensor(s, "ssm_in.weight")) {
        FKV_TRY(find_layer_tensor(s, "ssm_in.weight", n_channels + n_values, h->dim, true, &t->mixer_fused));
    } else {
        FKV_TRY(find_layer_tensor(s, "attn_qkv.weight", n_channels, h->dim, true, &t->mixer_in));
        FKV_TRY(find_layer_tensor(s, "attn_gate.weight", n_values, h->dim, true, &t->mixer_gate));
    }
    if (has_layer_tensor(s, "ssm_ba.weight")) {
        FKV_TRY(find_layer_tensor(s, "ssm_ba.weight", 2 * r->n_v_heads, h->dim, true, &t->beta_alpha));
    } else {
        FKV_TRY(find_layer_tensor(s, "ssm_beta.weight", r->n_v_heads, h->dim, true, &t->beta));
        FKV_TRY(find_layer_tensor(s, "ssm_alpha.weight", r->n_v_heads, h->dim, true, &t->alpha));
    }
    FKV_TRY(find_conv(s, "ssm_conv1d.weight", &t->conv));
    FKV_TRY(find_layer_tensor(s, "ssm_a", 1, r->n_v_heads, false, &t->decay));
    FKV_TRY(find_layer_tensor(s, "ssm_a_log.weight", 1, r->n_v_heads, t->decay == NULL, &t->decay_log));
    FKV_TRY(find_layer_tensor(s, "ssm_dt.bias", 1, r->n_v_heads, true, &t->alpha_bias));
    FKV_TRY(find_layer_tensor(s, "ssm_norm.weight", 1, r->v_dim, true, &t->mixer_norm));
    return find_layer_tensor(s, "ssm_out.weight", h->dim, n_values, true, &t->mixer_out);
}

/* Finds a vector of n values. GGUF files store it as n rows of one value, or as one row per group. `name` is the name in GGUF
 * files, and `hf_name` the translated name in safetensors files. */
static fkv_status find_mamba_vector(tensor_search *s, const char *name, const char *hf_name, uint32_t n, const fkv_tensor **out) {
    char text[FKV_MAX_TENSOR_NAME];
    const fkv_tensor *found = fkv_weights_find(s->model->weights, layer_name(text, s->layer, name));
    if (found == NULL || found->n_rows == 1) return find_layer_tensor(s, found != NULL ? name : hf_name, 1, n, true, out);
    const uint32_t n_rows = found->n_rows;
    FKV_TRY(find_layer_tensor(s, name, n_rows, n / n_rows, true, &found));
    FKV_TRY(require_float_tensor(found, "vectors of recurrent layers"));
    FKV_REQUIRE(n % n_rows == 0, FKV_FILE_DAMAGED,
                "tensor %s has %u rows, but the number of rows must divide %u, the expected number of values", found->name,
                n_rows, n);
    fkv_tensor *view = s->next_view++;
    *view = *found;
    view->n_rows = 1;
    view->n_cols = n;
    view->row_bytes = n_rows * found->row_bytes;
    *out = view;
    return FKV_OK;
}

static fkv_status find_mamba2(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_recurrence *r = &h->recurrence;
    const uint32_t n_channels = fkv_architecture_conv_channels(h);
    const uint32_t n_values = r->n_v_heads * r->v_dim;
    const fkv_tensor *in = NULL;
    FKV_TRY(find_layer_tensor(s, "ssm_in.weight", (uint64_t)n_values + n_channels + r->n_v_heads, h->dim, true, &in));
    t->mixer_gate = view_rows(s, in, 0, n_values);
    t->mixer_in = view_rows(s, in, n_values, n_channels);
    t->alpha = view_rows(s, in, n_values + n_channels, r->n_v_heads);
    FKV_TRY(find_conv(s, "ssm_conv1d.weight", &t->conv));
    FKV_TRY(find_layer_tensor(s, "ssm_conv1d.bias", 1, n_channels, false, &t->conv_bias));
    const bool has_rates = has_layer_tensor(s, "ssm_a"); /* GGUF stores the decay rates, safetensors their logarithms */
    FKV_TRY(find_mamba_vector(s, "ssm_a", "ssm_a_log.weight", r->n_v_heads, has_rates ? &t->decay : &t->decay_log));
    FKV_TRY(find_mamba_vector(s, "ssm_d", "ssm_d.weight", r->n_v_heads, &t->skip));
    FKV_TRY(find_layer_tensor(s, "ssm_dt.bias", 1, r->n_v_heads, true, &t->alpha_bias));
    if (r->n_norm_groups != 0 && (!r->norm_may_miss || has_layer_tensor(s, "ssm_norm.weight")))
        FKV_TRY(find_mamba_vector(s, "ssm_norm.weight", "ssm_norm.weight", n_values, &t->mixer_norm));
    return find_layer_tensor(s, "ssm_out.weight", h->dim, n_values, true, &t->mixer_out);
}

/* Finds the tensors of Kimi Delta Attention. All heads have a query, a key and a value of the same dimension. */
static fkv_status find_kda(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_recurrence *r = &h->recurrence;
    const uint32_t n_keys = r->n_v_heads * r->k_dim;
    const uint32_t n_values = r->n_v_heads * r->v_dim;
    const struct {
        const char *name;
        uint32_t n_rows, n_cols;
        const fkv_tensor **out;
    } matrices[] = {{"attn_q.weight", n_keys, h->dim, &t->q},
                    {"attn_k.weight", n_keys, h->dim, &t->k},
                    {"attn_v.weight", n_values, h->dim, &t->v},
                    {"ssm_f_a.weight", r->k_dim, h->dim, &t->alpha_low},
                    {"ssm_f_b.weight", n_keys, r->k_dim, &t->alpha},
                    {"ssm_g_a.weight", r->v_dim, h->dim, &t->gate_low},
                    {"ssm_g_b.weight", n_values, r->v_dim, &t->mixer_gate},
                    {"ssm_beta.weight", r->n_v_heads, h->dim, &t->beta},
                    {"ssm_dt.bias", 1, n_keys, &t->alpha_bias},
                    {"ssm_norm.weight", 1, r->v_dim, &t->mixer_norm},
                    {"attn_output.weight", h->dim, n_values, &t->mixer_out}};
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++)
        FKV_TRY(find_layer_tensor(s, matrices[i].name, matrices[i].n_rows, matrices[i].n_cols, true, matrices[i].out));
    FKV_TRY(find_channels_conv(s, "ssm_conv1d_q.weight", n_keys, &t->conv));
    FKV_TRY(find_channels_conv(s, "ssm_conv1d_k.weight", n_keys, &t->conv_k));
    FKV_TRY(find_channels_conv(s, "ssm_conv1d_v.weight", n_values, &t->conv_v));
    const bool has_rates = has_layer_tensor(s, "ssm_a"); /* GGUF stores the decay rates, safetensors their logarithms */
    const char *name = has_rates ? "ssm_a" : "ssm_a_log.weight";
    return find_mamba_vector(s, name, name, r->n_v_heads, has_rates ? &t->decay : &t->decay_log);
}

static fkv_status find_recurrent(tensor_search *s, fkv_layer_tensors *t) {
    switch (s->model->hparams->features.recurrence) {
    case FKV_SHORT_CONV: return find_short_conv(s, t);
    case FKV_DELTA_NET: return find_delta_net(s, t);
    case FKV_MAMBA2: return find_mamba2(s, t);
    case FKV_KDA: return find_kda(s, t);
    case FKV_RECURRENCE_NONE: break;
    }
    return fkv_fail(FKV_UNSUPPORTED, "layer %u is recurrent, but the architecture has no recurrence", s->layer);
}

/* Finds the projections of latent attention. */
static fkv_status find_latent(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_latent *l = &h->latent;
    const uint64_t n_query = (uint64_t)h->n_q_heads * (l->nope_dim + l->rope_dim);
    const uint64_t n_heads = h->n_q_heads;
    if (l->q_dim != 0) {
        FKV_TRY(find_layer_tensor(s, "attn_q_a.weight", l->q_dim, h->dim, true, &t->q_a));
        FKV_TRY(find_layer_tensor(s, "attn_q_a.bias", 1, l->q_dim, false, &t->q_a_bias));
        FKV_TRY(find_layer_tensor(s, "attn_q_a_norm.weight", 1, l->q_dim, true, &t->q_a_norm));
        FKV_TRY(find_layer_tensor(s, "attn_q_b.weight", n_query, l->q_dim, true, &t->q));
    } else {
        FKV_TRY(find_layer_tensor(s, "attn_q.weight", n_query, h->dim, true, &t->q));
    }
    FKV_TRY(find_layer_tensor(s, "attn_kv_a_mqa.weight", l->dim + l->rope_dim, h->dim, true, &t->kv_a));
    FKV_TRY(find_layer_tensor(s, "attn_kv_a_mqa.bias", 1, l->dim + l->rope_dim, false, &t->kv_a_bias));
    FKV_TRY(find_layer_tensor(s, "attn_kv_a_norm.weight", 1, l->dim, true, &t->kv_a_norm));
    const bool is_split = has_layer_tensor(s, "attn_k_b.weight");
    if (is_split) {
        FKV_TRY(find_layer_tensor(s, "attn_k_b.weight", n_heads * l->dim, l->nope_dim, true, &t->k_b));
        FKV_TRY(find_layer_tensor(s, "attn_v_b.weight", n_heads * l->v_dim, l->dim, true, &t->v_b));
    }
    const fkv_tensor *kv_b = NULL; /* some GGUF files contain kv_b in addition to k_b and v_b */
    FKV_TRY(find_layer_tensor(s, "attn_kv_b.weight", n_heads * (l->nope_dim + l->v_dim), l->dim, !is_split, &kv_b));
    if (!is_split) t->kv_b = kv_b;
    return FKV_OK;
}

/* Finds the attention matrices. */
static fkv_status find_attention(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t attended = h->n_q_heads * fkv_architecture_v_dim(h, s->shape);
    FKV_TRY(fkv_architecture_is_latent(h) ? find_latent(s, t) : find_qkv(s, t));
    FKV_TRY(find_layer_tensor(s, "attn_output.weight", h->dim, attended, true, &t->o));
    if (h->features.attn_gate)
        FKV_TRY(find_layer_tensor(s, "attn_gate.weight", h->n_q_heads * s->shape->head_dim, h->dim, true, &t->attn_gate));
    return find_layer_tensor(s, "attn_output.bias", 1, h->dim, false, &t->o_bias);
}

/* Finds the matrices of a feed-forward block without a gate. */
static fkv_status find_plain_ffn(tensor_search *s, fkv_layer_tensors *t) {
    const uint32_t dim = s->model->hparams->dim;
    const uint32_t f = s->shape->ffn_dim;
    FKV_TRY(find_layer_tensor(s, "ffn_up.weight", f, dim, true, &t->up));
    FKV_TRY(find_layer_tensor(s, "ffn_up.bias", 1, f, false, &t->up_bias));
    FKV_TRY(find_layer_tensor(s, "ffn_down.weight", dim, f, true, &t->down));
    return find_layer_tensor(s, "ffn_down.bias", 1, dim, false, &t->down_bias);
}

/* Finds the feed-forward matrices. If the tensor ffn_up has twice the usual number of rows, it holds both gate and up. */
static fkv_status find_ffn(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = s->shape->ffn_dim;
    const fused_part parts[] = {{"ffn_gate", f, true, &t->gate, &t->gate_bias}, {"ffn_up", f, true, &t->up, &t->up_bias}};
    char text[FKV_MAX_TENSOR_NAME];
    if (h->features.plain_ffn) return find_plain_ffn(s, t);
    FKV_TRY(find_layer_tensor(s, "ffn_down.weight", h->dim, f, true, &t->down));
    FKV_TRY(find_layer_tensor(s, "ffn_down.bias", 1, h->dim, false, &t->down_bias));
    const fkv_tensor *up = fkv_weights_find(s->model->weights, layer_name(text, s->layer, "ffn_up.weight"));
    const bool is_fused = !has_layer_tensor(s, "ffn_gate.weight") && up != NULL && up->n_rows == 2 * f;
    return find_fused_parts(s, is_fused ? "ffn_up" : NULL, false, parts, 2);
}

/* Finds the shared expert. */
static fkv_status find_shared(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = s->shape->ffn_dim;
    if (has_layer_tensor(s, "ffn_up.weight") && !has_layer_tensor(s, "ffn_up_shexp.weight")) return find_ffn(s, t); /* Granite */
    if (!h->features.plain_ffn) FKV_TRY(find_layer_tensor(s, "ffn_gate_shexp.weight", f, h->dim, true, &t->gate));
    FKV_TRY(find_layer_tensor(s, "ffn_up_shexp.weight", f, h->dim, true, &t->up));
    FKV_TRY(find_layer_tensor(s, "ffn_down_shexp.weight", h->dim, f, true, &t->down));
    return find_layer_tensor(s, "ffn_gate_inp_shexp.weight", 1, h->dim, false, &t->shared_gate);
}

/* Finds one matrix (gate, up or down) of every expert: [n_rows, n_cols]. The experts are stored as separate tensors, or as row
 * ranges of a stacked tensor with `stride` rows per expert. */
static fkv_status find_expert_matrices(tensor_search *s, const char *part, const char *stacked, uint32_t n_rows, uint32_t n_cols,
                                       uint32_t from, uint32_t stride, const fkv_tensor ***out) {
    const uint32_t n_experts = s->model->hparams->n_experts;
    const fkv_tensor **experts = s->next_expert;
    const fkv_tensor *whole = NULL;
    char text[64];
    s->next_expert += n_experts;
    *out = experts;
    (void)snprintf(text, sizeof text, "%s_exps.weight", stacked);
    if (has_layer_tensor(s, text)) {
        FKV_TRY(find_layer_tensor(s, text, (uint64_t)n_experts * stride, n_cols, true, &whole));
        for (uint32_t e = 0; e < n_experts; e++) experts[e] = view_rows(s, whole, e * stride + from, n_rows);
        return FKV_OK;
    }
    for (uint32_t e = 0; e < n_experts; e++) {
        (void)snprintf(text, sizeof text, "%s.%u.weight", part, e);
        FKV_TRY(find_layer_tensor(s, text, n_rows, n_cols, true, &experts[e]));
    }
    return FKV_OK;
}

/* Returns a view of columns first, first + 2, ... of a float tensor: [n_rows, n] */
static const fkv_tensor *view_every_second_column(tensor_search *s, const fkv_tensor *whole, uint32_t first, uint32_t n) {
    if (whole == NULL) return NULL;
    fkv_tensor *view = s->next_view++;
    uint64_t bytes = whole->row_bytes / whole->n_cols;
    *view = *whole;
    view->data += first * bytes;
    view->n_cols = n;
    view->col_step = 2 * bytes;
    return view;
}

/* Finds the expert biases of gpt-oss in safetensors files, which interleave gate and up values. */
static fkv_status find_interleaved_biases(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_tensor *bias = NULL;
    FKV_TRY(find_layer_tensor(s, "ffn_up_exps.bias", h->n_experts, 2 * h->expert_dim, true, &bias));
    FKV_TRY(require_float_tensor(bias, "biases"));
    t->gate_experts_bias = view_every_second_column(s, bias, 0, h->expert_dim);
    t->up_experts_bias = view_every_second_column(s, bias, 1, h->expert_dim);
    return FKV_OK;
}

/* Finds the MXFP4 experts of gpt-oss in safetensors files: codes [E, rows, columns], with gate and up rows interleaved. */
static fkv_status find_mxfp4_experts(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = h->expert_dim;
    const fkv_tensor *up = NULL;
    FKV_TRY(find_layer_tensor(s, "ffn_up_exps.weight", (uint64_t)h->n_experts * 2 * f, h->dim, true, &up));
    FKV_TRY(find_interleaved_biases(s, t));
    const fkv_tensor ***lists[] = {&t->gate_experts, &t->up_experts};
    for (uint32_t part = 0; part < 2; part++) {
        *lists[part] = s->next_expert;
        for (uint32_t e = 0; e < h->n_experts; e++) {
            fkv_tensor *view = s->next_view++;
            *view = fkv_tensor_every_second_row(up, e * 2 * f + part, f);
            *s->next_expert++ = view;
        }
    }
    return find_expert_matrices(s, "ffn_down", "ffn_down", h->dim, f, 0, h->dim, &t->down_experts);
}

static bool is_quantized(const tensor_search *s, const char *name) {
    char text[FKV_MAX_TENSOR_NAME];
    const fkv_tensor *tensor = fkv_weights_find(s->model->weights, layer_name(text, s->layer, name));
    return tensor != NULL && tensor->bits != 0;
}

/* Returns whether the stacked experts of a layer are transposed float matrices [E, columns, rows], as in the published files of
 * Llama 4 and Qwen3-VL-MoE. */
static bool has_transposed_experts(const tensor_search *s) {
    const fkv_hparams *h = s->model->hparams;
    char text[FKV_MAX_TENSOR_NAME];
    const fkv_tensor *up = fkv_weights_find(s->model->weights, layer_name(text, s->layer, "ffn_up_exps.weight"));
    const fkv_tensor *down = fkv_weights_find(s->model->weights, layer_name(text, s->layer, "ffn_down_exps.weight"));
    if (up == NULL || down == NULL || up->type > FKV_TENSOR_BF16 || down->type > FKV_TENSOR_BF16) return false;
    const bool is_usual = up->n_cols == h->dim && down->n_cols == h->expert_dim;
    return !is_usual && up->n_cols == 2 * h->expert_dim && down->n_cols == h->dim;
}

/* Finds the float experts of gpt-oss, Llama 4 and Qwen3-VL-MoE in safetensors files: transposed matrices [E, columns, rows]. The
 * gate and up columns are interleaved, or all gate columns precede the up columns. */
static fkv_status find_transposed_experts(tensor_search *s, bool is_interleaved, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = h->expert_dim;
    const fkv_tensor *up = NULL;
    const fkv_tensor *down = NULL;
    FKV_TRY(find_layer_tensor(s, "ffn_up_exps.weight", (uint64_t)h->n_experts * h->dim, 2 * f, true, &up));
    FKV_TRY(find_layer_tensor(s, "ffn_down_exps.weight", (uint64_t)h->n_experts * f, h->dim, true, &down));
    FKV_TRY(require_float_tensor(up, "transposed experts"));
    FKV_TRY(require_float_tensor(down, "transposed experts"));
    if (is_interleaved) FKV_TRY(find_interleaved_biases(s, t));
    const uint32_t step = is_interleaved ? 2 : 1;
    const struct {
        const fkv_tensor *whole;
        uint32_t n_rows, first, step; /* row i of an expert is column first + i * step of the tensor */
        const fkv_tensor ***list;
    } parts[N_EXPERT_PARTS] = {{up, f, 0, step, &t->gate_experts},
                               {up, f, is_interleaved ? 1 : f, step, &t->up_experts},
                               {down, h->dim, 0, 1, &t->down_experts}};
    for (uint32_t part = 0; part < N_EXPERT_PARTS; part++) {
        const fkv_tensor *whole = parts[part].whole;
        const uint64_t bytes = whole->row_bytes / whole->n_cols;
        *parts[part].list = s->next_expert;
        for (uint32_t e = 0; e < h->n_experts; e++) {
            fkv_tensor *view = s->next_view++;
            *view = *whole;
            view->n_cols = whole->n_rows / h->n_experts;
            view->n_rows = parts[part].n_rows;
            view->data += (uint64_t)e * view->n_cols * whole->row_bytes + parts[part].first * bytes;
            view->col_step = whole->row_bytes;
            view->row_bytes = parts[part].step * bytes;
            *s->next_expert++ = view;
        }
    }
    return FKV_OK;
}

static fkv_status find_experts(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = h->expert_dim;
    const char *up = has_layer_tensor(s, "ffn_gate_up_exps.weight") ? "ffn_gate_up" : "ffn_up"; /* fused gate and up */
    const bool is_plain = h->features.plain_ffn;
    const bool fused = !is_plain && !has_layer_tensor(s, "ffn_gate_exps.weight") &&
                       (has_layer_tensor(s, "ffn_up_exps.weight") || strcmp(up, "ffn_up") != 0);
    const uint32_t dim = h->latent_dim != 0 ? h->latent_dim : h->dim; /* dimension of the experts' inputs and outputs */
    FKV_TRY(find_layer_tensor(s, "ffn_gate_inp.weight", h->n_experts, h->dim, true, &t->router));
    FKV_TRY(find_layer_tensor(s, "ffn_gate_inp.bias", 1, h->n_experts, false, &t->router_bias));
    FKV_TRY(find_layer_tensor(s, "exp_probs_b.bias", 1, h->n_experts, false, &t->router_correction));
    FKV_REQUIRE(t->router_correction == NULL || !h->features.sparse_mixer, FKV_UNSUPPORTED,
                "tensor %s is not supported for models with sparse mixer routing", t->router_correction->name);
    if (h->shared_dim != 0) FKV_TRY(find_shared(s, t));
    if (h->latent_dim != 0) {
        FKV_TRY(find_layer_tensor(s, "ffn_latent_down.weight", dim, h->dim, true, &t->latent_down));
        FKV_TRY(find_layer_tensor(s, "ffn_latent_up.weight", h->dim, dim, true, &t->latent_up));
    }
    if (is_plain) {
        FKV_TRY(find_expert_matrices(s, "ffn_up", "ffn_up", f, dim, 0, f, &t->up_experts));
        return find_expert_matrices(s, "ffn_down", "ffn_down", dim, f, 0, dim, &t->down_experts);
    }
    FKV_TRY(find_layer_tensor(s, "ffn_down_exps.bias", h->n_experts, h->dim, false, &t->down_experts_bias));
    if (fused && h->features.activation == FKV_SWIGLU_CLAMPED)
        return is_quantized(s, "ffn_up_exps.weight") ? find_mxfp4_experts(s, t) : find_transposed_experts(s, true, t);
    if (fused && has_transposed_experts(s)) return find_transposed_experts(s, false, t);
    FKV_TRY(find_expert_matrices(s, "ffn_gate", fused ? up : "ffn_gate", f, h->dim, 0, fused ? 2 * f : f, &t->gate_experts));
    FKV_TRY(find_expert_matrices(s, "ffn_up", up, f, h->dim, fused ? f : 0, fused ? 2 * f : f, &t->up_experts));
    FKV_TRY(find_expert_matrices(s, "ffn_down", "ffn_down", h->dim, f, 0, h->dim, &t->down_experts));
    FKV_TRY(find_layer_tensor(s, "ffn_gate_exps.bias", h->n_experts, f, false, &t->gate_experts_bias));
    return find_layer_tensor(s, "ffn_up_exps.bias", h->n_experts, f, false, &t->up_experts_bias);
}

/* Finds per-head norm weights and returns a view of them as a single row: [1, n_heads * D] */
static fkv_status find_head_norms(tensor_search *s, const char *name, uint32_t n_heads, const fkv_tensor **out) {
    const fkv_tensor *whole = NULL;
    FKV_TRY(find_layer_tensor(s, name, n_heads, s->shape->head_dim, true, &whole));
    FKV_TRY(require_float_tensor(whole, "norms"));
    fkv_tensor *view = s->next_view++;
    *view = *whole;
    view->n_rows = 1;
    view->n_cols = n_heads * s->shape->head_dim;
    view->row_bytes = whole->n_rows * whole->row_bytes;
    *out = view;
    return FKV_OK;
}

static fkv_status find_norms(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_features *f = &h->features;
    const bool by_row = f->qk_norm == FKV_QK_NORM_ROWS;
    const bool has_parallel_experts = f->parallel_experts && h->n_experts != 0;
    const bool has_kv = s->shape->kv_layer == s->layer;
    const bool own_heads = f->qk_norm == FKV_QK_NORM_OWN_HEADS;
    const bool has_norms = f->qk_norm != FKV_QK_PLAIN && f->qk_norm != FKV_QK_NORM_UNWEIGHTED && !own_heads &&
                           fkv_architecture_has_attention(h, s->layer);
    const uint32_t d = s->shape->head_dim;
    const bool has_bias = f->norm == FKV_NORM_LAYER;
    const bool uses_post_attn_name =
        s->model->architecture->gguf_post_attn_is_ffn_norm && !has_layer_tensor(s, "ffn_norm.weight");
    const bool has_ffn_norm = !f->no_pre_norms && !f->parallel && !f->single_blocks;
    /* GGUF files of Falcon-H1 store this norm under a name without the suffix ".weight" */
    const bool has_bare_name = f->parallel_mixers && has_layer_tensor(s, "ffn_norm");
    const struct {
        const char *name;
        uint32_t n_cols;
        bool known; /* true if models of this architecture can have this tensor */
        bool needed;
        const fkv_tensor **out;
    } parts[] = {
        {"attn_norm.weight", h->dim, !f->no_pre_norms, true, &t->attn_norm},
        {"attn_norm.bias", h->dim, has_bias, false, &t->attn_norm_bias},
        {uses_post_attn_name ? "post_attention_norm.weight"
         : has_bare_name     ? "ffn_norm"
                             : "ffn_norm.weight",
         h->dim, has_ffn_norm, true, &t->ffn_norm},
        {"ffn_norm.bias", h->dim, has_bias && !f->parallel, false, &t->ffn_norm_bias},
        {"attn_q_norm.weight", by_row ? h->n_q_heads * d : d, has_norms, true, &t->q_norm},
        {"attn_k_norm.weight", by_row ? s->shape->n_kv_heads * d : d, has_norms && has_kv, true, &t->k_norm},
        {"post_attention_norm.weight", h->dim, f->post_norms, true, &t->post_attn_norm},
        {"post_ffw_norm.weight", h->dim, f->post_norms, true, &t->post_ffn_norm},
        {"layer_output_scale.weight", 1, f->layer_scales, false, &t->out_scale},
        {"post_norm.weight", h->dim, h->input_dim != 0, true, &t->input_norm},
        {"post_ffw_norm_1.weight", h->dim, has_parallel_experts, true, &t->post_dense_norm},
        {"post_ffw_norm_2.weight", h->dim, has_parallel_experts, true, &t->post_experts_norm},
        {"pre_ffw_norm_2.weight", h->dim, has_parallel_experts, true, &t->experts_norm},
        {"ffn_gate_inp.scale", h->dim, has_parallel_experts, true, &t->router_scale},
        {"ffn_down_exps.scale", h->n_experts, has_parallel_experts, false, &t->expert_scales},
        {"attn_sinks.weight", h->n_q_heads, f->sinks && (!f->window_sinks || fkv_architecture_window(h, s->layer) != 0), true,
         &t->sinks},
    };
    for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++)
        if (parts[p].known) FKV_TRY(find_layer_tensor(s, parts[p].name, 1, parts[p].n_cols, parts[p].needed, parts[p].out));
    if (!own_heads) return FKV_OK;
    FKV_TRY(find_head_norms(s, "attn_q_norm.weight", h->n_q_heads, &t->q_norm));
    return find_head_norms(s, "attn_k_norm.weight", s->shape->n_kv_heads, &t->k_norm);
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Reads the xIELU parameters of a layer, which safetensors files store as tensors and GGUF files as metadata. softplus is applied
 * to the stored alpha_p and alpha_n. */
static fkv_status find_xielu(tensor_search *s) {
    static const char *const names[] = {"xielu_alpha_p.weight", "xielu_alpha_n.weight", "xielu_beta.weight", "xielu_eps.weight"};
    const fkv_hparams *h = s->model->hparams;
    float values[] = {0, 0, 0.5f, -1e-6f};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const fkv_tensor *tensor = NULL;
        if (h->xielu != NULL)
            values[i] = h->xielu[i * h->n_layers + s->layer];
        else
            FKV_TRY(find_layer_tensor(s, names[i], 1, 1, i < 2, &tensor));
        if (tensor == NULL || fkv_weights_is_config(s->model->weights)) continue;
        FKV_TRY(require_float_tensor(tensor, "parameters of activations"));
        fkv_tensor_row_floats(tensor, 0, &values[i]);
    }
    s->model->xielu[s->layer] = (fkv_xielu){softplus(values[0]), values[2] + softplus(values[1]), values[2], values[3]};
    return FKV_OK;
}

static fkv_status find_layer(tensor_search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    FKV_TRY(find_norms(s, t));
    if (fkv_architecture_is_recurrent(h, s->layer)) FKV_TRY(find_recurrent(s, t));
    if (fkv_architecture_has_attention(h, s->layer)) FKV_TRY(find_attention(s, t));
    if (h->features.activation == FKV_XIELU) FKV_TRY(find_xielu(s));
    if (h->input_dim != 0) {
        FKV_TRY(find_layer_tensor(s, "inp_gate.weight", h->input_dim, h->dim, true, &t->input_gate));
        FKV_TRY(find_layer_tensor(s, "proj.weight", h->dim, h->input_dim, true, &t->input_proj));
    }
    if (!fkv_architecture_has_ffn(h, s->layer)) return FKV_OK;
    const bool is_mixed = fkv_architecture_has_experts(h, s->layer);
    if (is_mixed) FKV_TRY(find_experts(s, t));
    return !is_mixed || h->features.parallel_experts ? find_ffn(s, t) : FKV_OK;
}

/* Finds the tensors that compute the per-layer inputs. */
static fkv_status find_inputs(tensor_search *s) {
    fkv_model *m = s->model;
    const uint32_t n = m->hparams->n_layers * m->hparams->input_dim;
    if (n == 0) return FKV_OK;
    FKV_TRY(find_tensor(s, "per_layer_token_embd.weight", m->hparams->n_vocab, n, true, &m->inputs));
    FKV_TRY(find_tensor(s, "per_layer_model_proj.weight", n, m->hparams->dim, true, &m->inputs_proj));
    return find_tensor(s, "per_layer_proj_norm.weight", 1, m->hparams->input_dim, true, &m->inputs_norm);
}

static fkv_status find_model_tensors(tensor_search *s) {
    static const char *const factors[] = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"};
    fkv_model *m = s->model;
    const fkv_hparams *h = m->hparams;
    const fkv_tensor *unread = NULL;
    FKV_TRY(find_tensor(s, "token_embd.weight", h->n_vocab, h->dim, true, &m->embedding));
    FKV_TRY(find_tensor(s, "output.weight", h->n_vocab, h->dim, false, &m->output));
    if (m->output == NULL) m->output = m->embedding;
    FKV_TRY(find_tensor(s, "output.bias", 1, h->n_vocab, false, &m->output_bias));
    /* GGUF files of LFM2 store the final norm under this name */
    const bool is_lfm2 =
        h->features.recurrence == FKV_SHORT_CONV && fkv_weights_find(m->weights, "token_embd_norm.weight") != NULL;
    FKV_TRY(find_tensor(s, is_lfm2 ? "token_embd_norm.weight" : "output_norm.weight", 1, h->dim, true, &m->final_norm));
    if (h->features.norm == FKV_NORM_LAYER) FKV_TRY(find_tensor(s, "output_norm.bias", 1, h->dim, false, &m->final_norm_bias));
    /* marks these tensors as known; their values are already in the hyperparameters */
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++)
        FKV_TRY(find_tensor(s, factors[i], 1, h->rope.dim / 2, false, &unread));
    FKV_TRY(find_inputs(s));
    for (s->layer = 0; s->layer < h->n_layers; s->layer++) {
        s->shape = &h->shapes[s->layer];
        FKV_TRY(find_layer(s, &m->tensors[s->layer]));
    }
    return FKV_OK;
}

/* Returns whether a tensor belongs to a multi-token prediction layer, which is not used. */
static bool is_prediction_tensor(const fkv_model *m, const char *name) {
    unsigned layer = 0;
    if (sscanf(name, "blk.%4u.", &layer) != 1 && sscanf(name, "model.layers.%4u.", &layer) != 1) return false;
    return layer >= m->hparams->n_layers && layer - m->hparams->n_layers < m->hparams->n_next;
}

/* Rejects the model if its files contain a tensor that the architecture does not define. */
static fkv_status check_unknown_tensors(const tensor_search *s) {
    const fkv_model *m = s->model;
    for (uint32_t i = 0; i < fkv_weights_n_tensors(m->weights); i++)
        FKV_REQUIRE(
            s->used[i] || is_prediction_tensor(m, fkv_weights_tensor(m->weights, i)->name), FKV_UNSUPPORTED,
            "unknown tensor %s: flatkv's %s implementation does not use it, so results would differ from the trained model",
            fkv_weights_tensor(m->weights, i)->name, m->architecture->name);
    return FKV_OK;
}

fkv_status fkv_model_find_tensors(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    const size_t n_experts = (size_t)h->n_layers * N_EXPERT_PARTS * h->n_experts;
    m->tensors = calloc(h->n_layers, sizeof *m->tensors);
    m->views = calloc((size_t)h->n_layers * LAYER_VIEWS + n_experts, sizeof *m->views);
    m->experts = calloc(n_experts + 1, sizeof *m->experts);
    m->xielu = calloc(h->n_layers, sizeof *m->xielu);
    bool *used = calloc((size_t)fkv_weights_n_tensors(m->weights) + 1, sizeof *used);
    tensor_search s = {.model = m, .used = used, .next_view = m->views, .next_expert = m->experts};
    fkv_status status = m->tensors != NULL && m->views != NULL && m->experts != NULL && m->xielu != NULL && used != NULL
                            ? find_model_tensors(&s)
                            : fkv_fail(FKV_NO_MEMORY, "out of memory allocating the tables of %u layers", h->n_layers);
    if (status == FKV_OK && used != NULL) status = check_unknown_tensors(&s);
    free(used);
    return status;
}
