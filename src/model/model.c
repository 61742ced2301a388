/* From a weight file to a model in memory: finds every tensor that an architecture needs; the backend then takes them. See
 * model.h.
 *
 * Owns the checks of a model against itself: sizes that cannot be, tensors that are missing, misshapen, or not known. A tensor
 * that nobody asked for would mean a model that is not computed as it was trained, so it is refused.
 */
#include "model.h"

#include "../base/workers.h"
#include "files/tensor_rows.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_DIM = 1 << 20, MAX_VOCAB = 1 << 24, N_EXPERT_PARTS = 3, LAYER_VIEWS = 16 };

/* ---- sizes that can be ---- */

static fkv_status check_layer_shape(const fkv_hparams *h, uint32_t layer) {
    const fkv_layer_shape *s = &h->shapes[layer];
    const fkv_layer_shape *kv = &h->shapes[s->kv_layer];
    FKV_REQUIRE(h->n_q_heads > 0 && s->n_kv_heads > 0 && h->n_q_heads % s->n_kv_heads == 0, FKV_UNSUPPORTED,
                "%u query heads cannot share %u KV heads", h->n_q_heads, s->n_kv_heads);
    FKV_REQUIRE(s->head_dim > 0 && s->head_dim <= FKV_MAX_HEAD_DIM && h->n_q_heads <= MAX_DIM / s->head_dim, FKV_UNSUPPORTED,
                "%u heads of dimension %u: the dimension is 1 to %d, all heads together %d", h->n_q_heads, s->head_dim,
                FKV_MAX_HEAD_DIM, MAX_DIM);
    FKV_REQUIRE(s->ffn_dim > 0 && s->ffn_dim <= MAX_DIM, FKV_UNSUPPORTED, "layer %u has a feed-forward of %u: 1 to %d", layer,
                s->ffn_dim, MAX_DIM);
    FKV_REQUIRE(layer < fkv_architecture_n_kv_layers(h) || s->kv_layer != layer, FKV_UNSUPPORTED,
                "layer %u has no keys and values, and none before it of its kind has", layer);
    FKV_REQUIRE(kv->n_kv_heads == s->n_kv_heads && kv->head_dim == s->head_dim, FKV_UNSUPPORTED,
                "layer %u of %u/%u heads cannot attend over the pages of layer %u of %u/%u", layer, s->n_kv_heads, s->head_dim,
                s->kv_layer, kv->n_kv_heads, kv->head_dim);
    return FKV_OK;
}

static fkv_status check_shape(const fkv_hparams *h) {
    FKV_REQUIRE(h->n_layers > 0 && h->n_layers <= FKV_MAX_LAYERS, FKV_UNSUPPORTED, "the model has %u layers: 1 to %d",
                h->n_layers, FKV_MAX_LAYERS);
    FKV_REQUIRE(h->dim > 0 && h->dim <= MAX_DIM && h->ffn_dim > 0 && h->ffn_dim <= MAX_DIM, FKV_UNSUPPORTED,
                "the model has a dimension of %u and a feed-forward of %u: 1 to %d", h->dim, h->ffn_dim, MAX_DIM);
    FKV_REQUIRE(h->n_vocab > 0 && h->n_vocab <= MAX_VOCAB, FKV_UNSUPPORTED, "the model has %u tokens: 1 to %d", h->n_vocab,
                MAX_VOCAB);
    FKV_REQUIRE(h->context > 0 && h->context <= INT32_MAX, FKV_UNSUPPORTED, "a context of %u tokens", h->context);
    FKV_REQUIRE(h->n_sharing < h->n_layers, FKV_UNSUPPORTED, "%u of %u layers attend over the pages of others", h->n_sharing,
                h->n_layers);
    FKV_REQUIRE(h->input_dim <= MAX_DIM / h->n_layers, FKV_UNSUPPORTED, "inputs of %u numbers for each of %u layers: %d together",
                h->input_dim, h->n_layers, MAX_DIM);
    for (uint32_t i = 0; i < h->n_layers; i++) FKV_TRY(check_layer_shape(h, i));
    return FKV_OK;
}

static fkv_status check_expert_groups(const fkv_hparams *h) {
    uint32_t n = h->n_expert_groups > 1 ? h->n_expert_groups : 1;
    uint32_t used = n > 1 ? h->n_expert_groups_used : 1;
    FKV_REQUIRE(n <= FKV_MAX_EXPERT_GROUPS && h->n_experts % n == 0 && used > 0 && used <= n &&
                    h->n_experts / n >= (n > 1 ? 2 : 1) && h->n_experts_used <= h->n_experts / n * used,
                FKV_UNSUPPORTED, "%u of %u experts out of %u of %u groups", h->n_experts_used, h->n_experts, used, n);
    FKV_REQUIRE(n == 1 || h->features.sigmoid_router, FKV_UNSUPPORTED,
                "groups of experts whose scores are a softmax are not supported");
    FKV_REQUIRE(h->n_dense < h->n_layers, FKV_UNSUPPORTED, "%u of %u layers without experts", h->n_dense, h->n_layers);
    FKV_REQUIRE(h->expert_dim > 0 && h->expert_dim <= MAX_DIM && h->shared_dim <= MAX_DIM, FKV_UNSUPPORTED,
                "experts of %u beside one of %u: 1 to %d", h->expert_dim, h->shared_dim, MAX_DIM);
    return FKV_OK;
}

static fkv_status check_experts(const fkv_hparams *h) {
    FKV_REQUIRE(h->n_experts <= FKV_MAX_EXPERTS, FKV_UNSUPPORTED, "a mixture of %u experts: at most %d", h->n_experts,
                FKV_MAX_EXPERTS);
    FKV_REQUIRE(h->expert_dim > 0 && h->expert_dim <= MAX_DIM, FKV_UNSUPPORTED, "experts of a dimension of %u: 1 to %d",
                h->expert_dim, MAX_DIM);
    FKV_REQUIRE(h->n_experts == 0 ||
                    (h->n_experts_used > 0 && h->n_experts_used <= h->n_experts && h->n_experts_used <= FKV_MAX_EXPERTS_USED),
                FKV_UNSUPPORTED, "%u of %u experts for each token: 1 to %d", h->n_experts_used, h->n_experts,
                FKV_MAX_EXPERTS_USED);
    FKV_REQUIRE(h->n_experts == 0 || !h->features.parallel, FKV_UNSUPPORTED,
                "experts in layers whose feed-forward reads what attention reads are not supported");
    FKV_REQUIRE(h->shared_dim == 0 || !h->features.experts_beside, FKV_UNSUPPORTED,
                "a shared expert in layers whose experts stand beside a feed-forward is not supported");
    return h->n_experts != 0 ? check_expert_groups(h) : FKV_OK;
}

/* Every layer that rotates has numbers enough; and tables of frequencies, which no layer may use, have an end. */
static fkv_status check_rope_dims(const fkv_hparams *h) {
    FKV_REQUIRE(h->rope.dim <= FKV_MAX_HEAD_DIM && h->local_rope.dim <= FKV_MAX_HEAD_DIM, FKV_UNSUPPORTED,
                "RoPE over %u or %u numbers of a head: at most %d", h->rope.dim, h->local_rope.dim, FKV_MAX_HEAD_DIM);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        uint32_t dim = h->local_rope.base != 0.0f && fkv_architecture_window(h, i) != 0 ? h->local_rope.dim : h->rope.dim;
        FKV_REQUIRE(dim % 2 == 0 && dim > 0 && dim <= h->shapes[i].head_dim, FKV_UNSUPPORTED,
                    "RoPE over %u numbers of heads of %u: an even number of them", dim, h->shapes[i].head_dim);
    }
    return FKV_OK;
}

static fkv_status check_rope(const fkv_hparams *h) {
    const fkv_rope *r = &h->rope;
    FKV_TRY(check_rope_dims(h));
    FKV_REQUIRE(isfinite(r->base) && r->base > 1.0f && isfinite(h->local_rope.base) &&
                    (h->local_rope.base == 0.0f || h->local_rope.base > 1.0f) && isfinite(r->factor) && r->factor > 0.0f,
                FKV_UNSUPPORTED, "RoPE with bases %g and %g and scale %g: bases above 1, a scale above 0", (double)r->base,
                (double)h->local_rope.base, (double)r->factor);
    FKV_REQUIRE(isfinite(r->attention_factor) && r->low_freq > 0.0f && r->high_freq > r->low_freq && isfinite(r->high_freq),
                FKV_UNSUPPORTED, "RoPE with attention factor %g, low and high frequencies %g and %g", (double)r->attention_factor,
                (double)r->low_freq, (double)r->high_freq);
    FKV_REQUIRE(r->beta_slow > 0.0f && r->beta_fast > r->beta_slow && isfinite(r->beta_fast) && isfinite(r->mscale) &&
                    isfinite(r->mscale_all),
                FKV_UNSUPPORTED, "RoPE with betas %g and %g, mscale %g and %g", (double)r->beta_fast, (double)r->beta_slow,
                (double)r->mscale, (double)r->mscale_all);
    FKV_REQUIRE(r->original_context != 1, FKV_UNSUPPORTED, "RoPE stretched from a context of 1 token");
    bool has_both = (r->short_factors == NULL) == (r->long_factors == NULL);
    FKV_REQUIRE(has_both && (r->scaling != FKV_ROPE_LONG || r->long_factors != NULL), FKV_FILE_DAMAGED,
                "the short or the long factors of RoPE are missing");
    for (uint32_t i = 0; i < r->n_factors; i++)
        FKV_REQUIRE(isfinite(r->short_factors[i]) && isfinite(r->long_factors[i]) && r->short_factors[i] > 0.0f &&
                        r->long_factors[i] > 0.0f,
                    FKV_FILE_DAMAGED, "factor %u of RoPE is not above 0", i);
    return FKV_OK;
}

static fkv_status check_numbers(const fkv_hparams *h) {
    const struct {
        const char *name;
        float number;
    } numbers[] = {{"softcap of scores", h->softcap},          {"softcap of logits", h->final_softcap},
                   {"scale of scores", h->query_scale},        {"scale of embeddings", h->embedding_scale},
                   {"scale of residuals", h->residual_scale},  {"scale of logits", h->logit_scale},
                   {"temperature of queries", h->temperature}, {"limit of the activation", h->swiglu_limit},
                   {"scale of experts", h->experts_scale}};
    FKV_REQUIRE(isfinite(h->norm_eps) && h->norm_eps > 0.0f, FKV_FILE_FORMAT,
                "the file has no epsilon of its norms above 0: %s.attention.layer_norm_rms_epsilon of a GGUF file, rms_norm_eps "
                "of a config.json",
                h->architecture);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        FKV_REQUIRE(isfinite(numbers[i].number) && numbers[i].number >= 0.0f, FKV_UNSUPPORTED, "a %s of %g", numbers[i].name,
                    (double)numbers[i].number);
    FKV_REQUIRE(h->window <= INT32_MAX, FKV_UNSUPPORTED, "a window of %u tokens", h->window);
    FKV_REQUIRE(h->temperature == 0.0f || h->temperature_context > 0, FKV_UNSUPPORTED, "a temperature by 0 tokens");
    FKV_TRY(check_experts(h));
    return check_rope(h);
}

/* ---- what a model is made of ---- */

typedef struct search {
    fkv_model *model;
    bool *used; /* [n_tensors] of the file */
    fkv_tensor *next_view;
    const fkv_tensor **next_expert;
    uint32_t layer;
    const fkv_layer_shape *shape; /* of the layer */
} search;

/* The tensor of a name, of exactly that shape; *tensor is NULL where it is not there and need not be. */
static fkv_status find(search *s, const char *name, uint64_t n_rows, uint32_t n_cols, bool needed, const fkv_tensor **tensor) {
    const fkv_weights *weights = s->model->weights;
    const fkv_tensor *found = fkv_weights_find(weights, name);
    *tensor = found;
    if (found == NULL) {
        FKV_REQUIRE(!needed, FKV_FILE_DAMAGED, "the file has no tensor %s, which a %s model needs", name,
                    s->model->architecture->name);
        return FKV_OK;
    }
    s->used[found - fkv_weights_tensor(weights, 0)] = true;
    FKV_REQUIRE(found->n_rows == n_rows && found->n_cols == n_cols, FKV_FILE_DAMAGED,
                "tensor %s is %u x %u and the sizes the file states make it %" PRIu64 " x %u", name, found->n_rows, found->n_cols,
                n_rows, n_cols);
    return FKV_OK;
}

static const char *layer_name(char text[FKV_MAX_TENSOR_NAME], uint32_t layer, const char *name) {
    (void)snprintf(text, FKV_MAX_TENSOR_NAME, "blk.%" PRIu32 ".%s", layer, name);
    return text;
}

static fkv_status find_part(search *s, const char *name, uint64_t n_rows, uint32_t n_cols, bool needed,
                            const fkv_tensor **tensor) {
    char text[FKV_MAX_TENSOR_NAME];
    return find(s, layer_name(text, s->layer, name), n_rows, n_cols, needed, tensor);
}

static bool has_part(const search *s, const char *name) {
    char text[FKV_MAX_TENSOR_NAME];
    return fkv_weights_find(s->model->weights, layer_name(text, s->layer, name)) != NULL;
}

/* Some rows of a tensor. */
static const fkv_tensor *rows_of(search *s, const fkv_tensor *whole, uint32_t first, uint32_t n) {
    fkv_tensor *view = s->next_view++;
    *view = fkv_tensor_rows(whole, first, n);
    return view;
}

/* Some numbers of a vector; NULL of none. Vectors are floats. */
static fkv_status numbers_of(search *s, const fkv_tensor *whole, uint32_t first, uint32_t n, const fkv_tensor **out) {
    *out = NULL;
    if (whole == NULL) return FKV_OK;
    FKV_REQUIRE(whole->type <= FKV_TENSOR_BF16, FKV_UNSUPPORTED, "tensor %s is of type %s; biases are F32, F16 or BF16",
                whole->name, fkv_tensor_type_name(whole->type));
    uint64_t bytes = whole->row_bytes / whole->n_cols;
    fkv_tensor *view = s->next_view++;
    *view = *whole;
    view->data += first * bytes;
    view->n_cols = n;
    view->row_bytes = n * bytes;
    *out = view;
    return FKV_OK;
}

/* Some files have keys and values of layers that do not use them; they are not read. */
static fkv_status find_unused_kv(search *s, uint32_t kv_dim) {
    const fkv_tensor *unread = NULL;
    FKV_TRY(find_part(s, "attn_k.weight", kv_dim, s->model->hparams->dim, false, &unread));
    FKV_TRY(find_part(s, "attn_v.weight", kv_dim, s->model->hparams->dim, false, &unread));
    return find_part(s, "attn_k_norm.weight", 1, s->shape->head_dim, false, &unread);
}

/* q, k and v: three tensors, or rows of one. */
static fkv_status find_qkv(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t q_dim = h->n_q_heads * s->shape->head_dim;
    const uint32_t kv_dim = s->shape->n_kv_heads * s->shape->head_dim;
    const bool needs_bias = h->features.qkv_bias;
    const fkv_tensor *whole = NULL;
    const fkv_tensor *bias = NULL;
    if (!has_part(s, "attn_qkv.weight")) {
        FKV_TRY(find_part(s, "attn_q.weight", q_dim, h->dim, true, &t->q));
        if (s->shape->kv_layer != s->layer) return find_unused_kv(s, kv_dim);
        FKV_TRY(find_part(s, "attn_k.weight", kv_dim, h->dim, true, &t->k));
        FKV_TRY(find_part(s, "attn_v.weight", kv_dim, h->dim, !h->features.k_may_be_v, &t->v));
        FKV_TRY(find_part(s, "attn_q.bias", 1, q_dim, needs_bias, &t->q_bias));
        FKV_TRY(find_part(s, "attn_k.bias", 1, kv_dim, needs_bias, &t->k_bias));
        return find_part(s, "attn_v.bias", 1, kv_dim, needs_bias, &t->v_bias);
    }
    FKV_TRY(find_part(s, "attn_qkv.weight", q_dim + 2 * kv_dim, h->dim, true, &whole));
    FKV_TRY(find_part(s, "attn_qkv.bias", 1, q_dim + 2 * kv_dim, needs_bias, &bias));
    t->q = rows_of(s, whole, 0, q_dim);
    t->k = rows_of(s, whole, q_dim, kv_dim);
    t->v = rows_of(s, whole, q_dim + kv_dim, kv_dim);
    FKV_TRY(numbers_of(s, bias, 0, q_dim, &t->q_bias));
    FKV_TRY(numbers_of(s, bias, q_dim, kv_dim, &t->k_bias));
    return numbers_of(s, bias, q_dim + kv_dim, kv_dim, &t->v_bias);
}

/* The feed-forward beside experts. */
static fkv_status find_shared(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = s->shape->ffn_dim;
    FKV_TRY(find_part(s, "ffn_gate_shexp.weight", f, h->dim, true, &t->gate));
    FKV_TRY(find_part(s, "ffn_up_shexp.weight", f, h->dim, true, &t->up));
    FKV_TRY(find_part(s, "ffn_down_shexp.weight", h->dim, f, true, &t->down));
    return find_part(s, "ffn_gate_inp_shexp.weight", 1, h->dim, false, &t->shared_gate);
}

/* gate and up: two tensors, or rows of one. */
static fkv_status find_ffn(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = s->shape->ffn_dim;
    const fkv_tensor *whole = NULL;
    const fkv_tensor *bias = NULL;
    FKV_TRY(find_part(s, "ffn_down.weight", h->dim, f, true, &t->down));
    FKV_TRY(find_part(s, "ffn_down.bias", 1, h->dim, false, &t->down_bias));
    char text[FKV_MAX_TENSOR_NAME];
    const fkv_tensor *up = fkv_weights_find(s->model->weights, layer_name(text, s->layer, "ffn_up.weight"));
    if (has_part(s, "ffn_gate.weight") || up == NULL || up->n_rows != 2 * f) {
        FKV_TRY(find_part(s, "ffn_gate.weight", f, h->dim, true, &t->gate));
        FKV_TRY(find_part(s, "ffn_up.weight", f, h->dim, true, &t->up));
        FKV_TRY(find_part(s, "ffn_gate.bias", 1, f, false, &t->gate_bias));
        return find_part(s, "ffn_up.bias", 1, f, false, &t->up_bias);
    }
    FKV_TRY(find_part(s, "ffn_up.weight", 2 * f, h->dim, true, &whole));
    FKV_TRY(find_part(s, "ffn_up.bias", 1, 2 * f, false, &bias));
    t->gate = rows_of(s, whole, 0, f);
    t->up = rows_of(s, whole, f, f);
    FKV_TRY(numbers_of(s, bias, 0, f, &t->gate_bias));
    return numbers_of(s, bias, f, f, &t->up_bias);
}

/* One part of all experts, [n_rows, n_cols] each: tensors of their own, or every `stride` rows of one that has them all. */
static fkv_status find_expert_part(search *s, const char *part, const char *stacked, uint32_t n_rows, uint32_t n_cols,
                                   uint32_t from, uint32_t stride, const fkv_tensor ***out) {
    const uint32_t n_experts = s->model->hparams->n_experts;
    const fkv_tensor **experts = s->next_expert;
    const fkv_tensor *whole = NULL;
    char text[64];
    s->next_expert += n_experts;
    *out = experts;
    (void)snprintf(text, sizeof text, "%s_exps.weight", stacked);
    if (has_part(s, text)) {
        FKV_TRY(find_part(s, text, (uint64_t)n_experts * stride, n_cols, true, &whole));
        for (uint32_t e = 0; e < n_experts; e++) experts[e] = rows_of(s, whole, e * stride + from, n_rows);
        return FKV_OK;
    }
    for (uint32_t e = 0; e < n_experts; e++) {
        (void)snprintf(text, sizeof text, "%s.%u.weight", part, e);
        FKV_TRY(find_part(s, text, n_rows, n_cols, true, &experts[e]));
    }
    return FKV_OK;
}

/* Every second number of the rows of a table of floats, as a view: [n_rows, n] */
static const fkv_tensor *every_second(search *s, const fkv_tensor *whole, uint32_t first, uint32_t n) {
    if (whole == NULL) return NULL;
    fkv_tensor *view = s->next_view++;
    uint64_t bytes = whole->row_bytes / whole->n_cols;
    *view = *whole;
    view->data += first * bytes;
    view->n_cols = n;
    view->col_step = 2 * bytes;
    return view;
}

/* gpt-oss in safetensors as it is published: codes [E, rows, columns], and gate and up take turns in the rows. */
static fkv_status find_coded_experts(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = h->expert_dim;
    const fkv_tensor *up = NULL;
    const fkv_tensor *bias = NULL;
    FKV_TRY(find_part(s, "ffn_up_exps.weight", (uint64_t)h->n_experts * 2 * f, h->dim, true, &up));
    FKV_TRY(find_part(s, "ffn_up_exps.bias", h->n_experts, 2 * f, true, &bias));
    FKV_REQUIRE(bias->type <= FKV_TENSOR_BF16, FKV_UNSUPPORTED, "tensor %s is of type %s; biases are F32, F16 or BF16",
                bias->name, fkv_tensor_type_name(bias->type));
    t->gate_experts_bias = every_second(s, bias, 0, f);
    t->up_experts_bias = every_second(s, bias, 1, f);
    const fkv_tensor ***lists[] = {&t->gate_experts, &t->up_experts};
    for (uint32_t part = 0; part < 2; part++) {
        *lists[part] = s->next_expert;
        for (uint32_t e = 0; e < h->n_experts; e++) {
            fkv_tensor *view = s->next_view++;
            *view = fkv_tensor_every_second_row(up, e * 2 * f + part, f);
            *s->next_expert++ = view;
        }
    }
    return find_expert_part(s, "ffn_down", "ffn_down", h->dim, f, 0, h->dim, &t->down_experts);
}

static bool is_coded(const search *s, const char *name) {
    char text[FKV_MAX_TENSOR_NAME];
    const fkv_tensor *tensor = fkv_weights_find(s->model->weights, layer_name(text, s->layer, name));
    return tensor != NULL && tensor->bits != 0;
}

/* The same as floats: [E, columns, rows]. */
static fkv_status find_turned_experts(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = h->expert_dim;
    const fkv_tensor *up = NULL;
    const fkv_tensor *down = NULL;
    const fkv_tensor *bias = NULL;
    FKV_TRY(find_part(s, "ffn_up_exps.weight", (uint64_t)h->n_experts * h->dim, 2 * f, true, &up));
    FKV_TRY(find_part(s, "ffn_down_exps.weight", (uint64_t)h->n_experts * f, h->dim, true, &down));
    FKV_TRY(find_part(s, "ffn_up_exps.bias", h->n_experts, 2 * f, true, &bias));
    FKV_REQUIRE(up->type <= FKV_TENSOR_BF16 && down->type <= FKV_TENSOR_BF16 && bias->type <= FKV_TENSOR_BF16, FKV_UNSUPPORTED,
                "tensor %s is of type %s; turned experts are F32, F16 or BF16", up->name, fkv_tensor_type_name(up->type));
    t->gate_experts_bias = every_second(s, bias, 0, f);
    t->up_experts_bias = every_second(s, bias, 1, f);
    const fkv_tensor ***lists[] = {&t->gate_experts, &t->up_experts, &t->down_experts};
    for (uint32_t part = 0; part < N_EXPERT_PARTS; part++) {
        const fkv_tensor *whole = part < 2 ? up : down;
        uint64_t bytes = whole->row_bytes / whole->n_cols;
        *lists[part] = s->next_expert;
        for (uint32_t e = 0; e < h->n_experts; e++) {
            fkv_tensor *view = s->next_view++;
            *view = *whole;
            view->n_cols = whole->n_rows / h->n_experts;
            view->n_rows = part < 2 ? f : h->dim;
            view->data += (uint64_t)e * view->n_cols * whole->row_bytes + (part == 1 ? bytes : 0);
            view->col_step = whole->row_bytes;
            view->row_bytes = part < 2 ? 2 * bytes : bytes;
            *s->next_expert++ = view;
        }
    }
    return FKV_OK;
}

static fkv_status find_experts(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const uint32_t f = h->expert_dim;
    const char *up = has_part(s, "ffn_gate_up_exps.weight") ? "ffn_gate_up" : "ffn_up"; /* both in one */
    const bool fused = !has_part(s, "ffn_gate_exps.weight") && (has_part(s, "ffn_up_exps.weight") || strcmp(up, "ffn_up") != 0);
    FKV_TRY(find_part(s, "ffn_gate_inp.weight", h->n_experts, h->dim, true, &t->router));
    FKV_TRY(find_part(s, "ffn_gate_inp.bias", 1, h->n_experts, false, &t->router_bias));
    FKV_TRY(find_part(s, "exp_probs_b.bias", 1, h->n_experts, false, &t->router_correction));
    FKV_REQUIRE(t->router_correction == NULL || h->features.sigmoid_router, FKV_UNSUPPORTED,
                "tensor %s with scores that are a softmax is not supported", t->router_correction->name);
    if (h->shared_dim != 0) FKV_TRY(find_shared(s, t));
    FKV_TRY(find_part(s, "ffn_down_exps.bias", h->n_experts, h->dim, false, &t->down_experts_bias));
    if (fused && h->features.activation == FKV_SWIGLU_CLAMPED)
        return is_coded(s, "ffn_up_exps.weight") ? find_coded_experts(s, t) : find_turned_experts(s, t);
    FKV_TRY(find_expert_part(s, "ffn_gate", fused ? up : "ffn_gate", f, h->dim, 0, fused ? 2 * f : f, &t->gate_experts));
    FKV_TRY(find_expert_part(s, "ffn_up", up, f, h->dim, fused ? f : 0, fused ? 2 * f : f, &t->up_experts));
    FKV_TRY(find_expert_part(s, "ffn_down", "ffn_down", h->dim, f, 0, h->dim, &t->down_experts));
    FKV_TRY(find_part(s, "ffn_gate_exps.bias", h->n_experts, f, false, &t->gate_experts_bias));
    return find_part(s, "ffn_up_exps.bias", h->n_experts, f, false, &t->up_experts_bias);
}

/* Weights for each head as one row: [1, n_heads D] */
static fkv_status find_head_norms(search *s, const char *name, uint32_t n_heads, const fkv_tensor **out) {
    const fkv_tensor *whole = NULL;
    FKV_TRY(find_part(s, name, n_heads, s->shape->head_dim, true, &whole));
    FKV_REQUIRE(whole->type <= FKV_TENSOR_BF16, FKV_UNSUPPORTED, "tensor %s is of type %s; norms are F32, F16 or BF16",
                whole->name, fkv_tensor_type_name(whole->type));
    fkv_tensor *view = s->next_view++;
    *view = *whole;
    view->n_rows = 1;
    view->n_cols = n_heads * s->shape->head_dim;
    view->row_bytes = whole->n_rows * whole->row_bytes;
    *out = view;
    return FKV_OK;
}

static fkv_status find_norms(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_features *f = &h->features;
    const bool by_row = f->qk_norm == FKV_QK_NORM_ROWS;
    const bool beside = f->experts_beside && h->n_experts != 0;
    const bool has_kv = s->shape->kv_layer == s->layer;
    const bool own_heads = f->qk_norm == FKV_QK_NORM_OWN_HEADS;
    const bool has_norms = f->qk_norm != FKV_QK_PLAIN && !own_heads;
    const uint32_t d = s->shape->head_dim;
    const bool has_bias = f->norm == FKV_NORM_LAYER;
    const bool renamed = s->model->architecture->gguf_post_attn_is_ffn_norm && !has_part(s, "ffn_norm.weight");
    const struct {
        const char *name;
        uint32_t n_cols;
        bool known; /* to the model */
        bool needed;
        const fkv_tensor **out;
    } parts[] = {
        {"attn_norm.weight", h->dim, !f->no_pre_norms, true, &t->attn_norm},
        {"attn_norm.bias", h->dim, has_bias, false, &t->attn_norm_bias},
        {renamed ? "post_attention_norm.weight" : "ffn_norm.weight", h->dim, !f->no_pre_norms && !f->parallel, true,
         &t->ffn_norm},
        {"ffn_norm.bias", h->dim, has_bias && !f->parallel, false, &t->ffn_norm_bias},
        {"attn_q_norm.weight", by_row ? h->n_q_heads * d : d, has_norms, true, &t->q_norm},
        {"attn_k_norm.weight", by_row ? s->shape->n_kv_heads * d : d, has_norms && has_kv, true, &t->k_norm},
        {"post_attention_norm.weight", h->dim, f->post_norms, true, &t->post_attn_norm},
        {"post_ffw_norm.weight", h->dim, f->post_norms, true, &t->post_ffn_norm},
        {"layer_output_scale.weight", 1, f->layer_scales, false, &t->out_scale},
        {"post_norm.weight", h->dim, h->input_dim != 0, true, &t->input_norm},
        {"post_ffw_norm_1.weight", h->dim, beside, true, &t->post_dense_norm},
        {"post_ffw_norm_2.weight", h->dim, beside, true, &t->post_experts_norm},
        {"pre_ffw_norm_2.weight", h->dim, beside, true, &t->experts_norm},
        {"ffn_gate_inp.scale", h->dim, beside, true, &t->router_scale},
        {"ffn_down_exps.scale", h->n_experts, beside, false, &t->expert_scales},
        {"attn_sinks.weight", h->n_q_heads, f->sinks, true, &t->sinks},
    };
    for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++)
        if (parts[p].known) FKV_TRY(find_part(s, parts[p].name, 1, parts[p].n_cols, parts[p].needed, parts[p].out));
    if (!own_heads) return FKV_OK;
    FKV_TRY(find_head_norms(s, "attn_q_norm.weight", h->n_q_heads, &t->q_norm));
    return find_head_norms(s, "attn_k_norm.weight", s->shape->n_kv_heads, &t->k_norm);
}

static fkv_status find_layer(search *s, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    FKV_TRY(find_norms(s, t));
    FKV_TRY(find_qkv(s, t));
    FKV_TRY(find_part(s, "attn_output.weight", h->dim, h->n_q_heads * s->shape->head_dim, true, &t->o));
    FKV_TRY(find_part(s, "attn_output.bias", 1, h->dim, false, &t->o_bias));
    if (h->input_dim != 0) {
        FKV_TRY(find_part(s, "inp_gate.weight", h->input_dim, h->dim, true, &t->input_gate));
        FKV_TRY(find_part(s, "proj.weight", h->dim, h->input_dim, true, &t->input_proj));
    }
    const bool is_mixed = h->n_experts != 0 && s->layer >= h->n_dense;
    if (is_mixed) FKV_TRY(find_experts(s, t));
    return !is_mixed || h->features.experts_beside ? find_ffn(s, t) : FKV_OK;
}

/* What layers read of tokens. */
static fkv_status find_inputs(search *s) {
    fkv_model *m = s->model;
    const uint32_t n = m->hparams->n_layers * m->hparams->input_dim;
    if (n == 0) return FKV_OK;
    FKV_TRY(find(s, "per_layer_token_embd.weight", m->hparams->n_vocab, n, true, &m->inputs));
    FKV_TRY(find(s, "per_layer_model_proj.weight", n, m->hparams->dim, true, &m->inputs_proj));
    return find(s, "per_layer_proj_norm.weight", 1, m->hparams->input_dim, true, &m->inputs_norm);
}

static fkv_status find_all(search *s) {
    static const char *const factors[] = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"};
    fkv_model *m = s->model;
    const fkv_hparams *h = m->hparams;
    const fkv_tensor *unread = NULL;
    FKV_TRY(find(s, "token_embd.weight", h->n_vocab, h->dim, true, &m->embedding));
    FKV_TRY(find(s, "output.weight", h->n_vocab, h->dim, false, &m->output));
    if (m->output == NULL) m->output = m->embedding;
    FKV_TRY(find(s, "output_norm.weight", 1, h->dim, true, &m->final_norm));
    if (h->features.norm == FKV_NORM_LAYER) FKV_TRY(find(s, "output_norm.bias", 1, h->dim, false, &m->final_norm_bias));
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) /* their numbers are in hparams */
        FKV_TRY(find(s, factors[i], 1, h->rope.dim / 2, false, &unread));
    FKV_TRY(find_inputs(s));
    for (s->layer = 0; s->layer < h->n_layers; s->layer++) {
        s->shape = &h->shapes[s->layer];
        FKV_TRY(find_layer(s, &m->tensors[s->layer]));
    }
    return FKV_OK;
}

/* ---- load ---- */

/* A layer that guesses further tokens, which this one's do not depend on. */
static bool is_of_next_layers(const fkv_model *m, const char *name) {
    unsigned layer = 0;
    if (sscanf(name, "blk.%4u.", &layer) != 1 && sscanf(name, "model.layers.%4u.", &layer) != 1) return false;
    return layer >= m->hparams->n_layers && layer - m->hparams->n_layers < m->hparams->n_next;
}

/* Every tensor of the file was asked for: else a message with the first that was not. */
static fkv_status check_all_known(const search *s) {
    const fkv_model *m = s->model;
    for (uint32_t i = 0; i < fkv_weights_n_tensors(m->weights); i++)
        FKV_REQUIRE(s->used[i] || is_of_next_layers(m, fkv_weights_tensor(m->weights, i)->name), FKV_UNSUPPORTED,
                    "the file has a tensor %s, which a %s model as it is known here does not use: it would not run as trained",
                    fkv_weights_tensor(m->weights, i)->name, m->architecture->name);
    return FKV_OK;
}

static fkv_status find_tensors(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    const size_t n_experts = (size_t)h->n_layers * N_EXPERT_PARTS * h->n_experts;
    m->tensors = calloc(h->n_layers, sizeof *m->tensors);
    m->views = calloc((size_t)h->n_layers * LAYER_VIEWS + n_experts, sizeof *m->views);
    m->experts = calloc(n_experts + 1, sizeof *m->experts);
    bool *used = calloc((size_t)fkv_weights_n_tensors(m->weights) + 1, sizeof *used);
    search s = {.model = m, .used = used, .next_view = m->views, .next_expert = m->experts};
    fkv_status status = m->tensors != NULL && m->views != NULL && m->experts != NULL && used != NULL
                            ? find_all(&s)
                            : fkv_fail(FKV_NO_MEMORY, "no memory for the tables of %u layers", h->n_layers);
    if (status == FKV_OK && used != NULL) status = check_all_known(&s);
    free(used);
    return status;
}

/* The learned logits of every layer, which the cache is opened with. */
static fkv_status read_sinks(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    if (!h->features.sinks) return FKV_OK;
    m->sinks = calloc((size_t)h->n_layers * h->n_q_heads, sizeof *m->sinks);
    FKV_REQUIRE(m->sinks != NULL, FKV_NO_MEMORY, "no memory for the sinks of %u layers", h->n_layers);
    for (uint32_t i = 0; i < h->n_layers; i++) fkv_tensor_row_floats(m->tensors[i].sinks, 0, m->sinks + (size_t)i * h->n_q_heads);
    return FKV_OK;
}

/* The vocabulary, and all of info that it is enough for. */
static fkv_status open_vocabulary(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    const fkv_vocab_source *vocab = fkv_weights_vocab(m->weights);
    fkv_model_info *info = &m->info;
    FKV_TRY(fkv_tokenizer_open(vocab, &m->tokenizer));
    FKV_TRY(fkv_chat_open(vocab, m->tokenizer, &m->chat));
    info->architecture = h->architecture;
    info->name = h->name != NULL ? h->name : "";
    info->tokenizer = fkv_tokenizer_name(m->tokenizer);
    info->context = h->context;
    info->n_vocab = h->n_vocab;
    info->bos = vocab->bos;
    info->add_bos = vocab->add_bos && vocab->bos != FKV_NO_TOKEN;
    info->has_chat = fkv_chat_refusal(m->chat)[0] == 0;
    info->n_end = fkv_tokenizer_ends(m->tokenizer, info->end);
    info->file_bytes = fkv_weights_file_bytes(m->weights);
    return fkv_weights_id(m->weights, info->weights_id);
}

static fkv_status fill_info(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    fkv_model_info *info = &m->info;
    info->n_layers = h->n_layers;
    info->dim = h->dim;
    info->ffn_dim = h->ffn_dim;
    info->n_q_heads = h->n_q_heads;
    info->n_kv_heads = h->n_kv_heads;
    info->head_dim = h->head_dim;
    for (uint32_t i = 0; i < h->n_layers; i++) info->window = fkv_max_u32(info->window, fkv_architecture_window(h, i));
    for (uint32_t i = 0; i < fkv_weights_n_tensors(m->weights); i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(m->weights, i);
        info->n_parameters += (uint64_t)tensor->n_rows * tensor->n_cols;
    }
    return fkv_architecture_rope_id(h, false, info->rope_id);
}

static fkv_status open_model(const char *path, fkv_model *m) {
    FKV_TRY(fkv_weights_open(path, &m->weights));
    const fkv_hparams *h = fkv_weights_hparams(m->weights);
    m->hparams = h;
    if (fkv_weights_n_tensors(m->weights) == 0) return open_vocabulary(m); /* its sizes are not looked at: no runner opens */
    m->architecture = fkv_architecture_find(h->architecture);
    const char *why = fkv_architecture_refusal(h->architecture);
    FKV_REQUIRE(m->architecture != NULL || why == NULL, FKV_UNSUPPORTED, "%s is of architecture %s: %s", path, h->architecture,
                why);
    FKV_REQUIRE(m->architecture != NULL, FKV_UNSUPPORTED, "%s is of architecture %s; known are %s", path, h->architecture,
                fkv_architecture_names());
    FKV_TRY(check_shape(h));
    FKV_TRY(check_numbers(h));
    m->embedding_scale = h->features.embedding_sqrt_dim ? sqrtf((float)h->dim) : 1.0f;
    if (h->embedding_scale != 0.0f) m->embedding_scale = h->embedding_scale;
    m->residual_scale = h->residual_scale != 0.0f ? h->residual_scale : 1.0f;
    m->query_scale = h->query_scale != 0.0f ? h->query_scale : 1.0f / sqrtf((float)h->head_dim);
    FKV_TRY(open_vocabulary(m));
    FKV_TRY(fill_info(m));
    FKV_TRY(find_tensors(m));
    FKV_TRY(read_sinks(m));
    FKV_TRY(m->backend->count_weights(m));
    return m->config.plan_only ? FKV_OK : m->backend->load_weights(m);
}

fkv_model_config fkv_model_config_default(void) { return (fkv_model_config){0}; }

fkv_status fkv_model_load(const char *path, const fkv_model_config *config, fkv_model **model) {
    FKV_REQUIRE(path != NULL && config != NULL && model != NULL, FKV_BAD_ARGUMENT,
                "fkv_model_load: path, config or model is NULL");
    FKV_REQUIRE(config->n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "%u threads: at most %d", config->n_threads,
                FKV_MAX_THREADS);
    const fkv_model_backend *backend = NULL;
    FKV_TRY(fkv_model_backend_find(config->backend, &backend));
    fkv_model *m = calloc(1, sizeof *m);
    FKV_REQUIRE(m != NULL, FKV_NO_MEMORY, "no memory for a model");
    m->config = *config;
    m->backend = backend;
    m->path = strdup(path);
    fkv_status status = m->path != NULL ? open_model(path, m) : fkv_fail(FKV_NO_MEMORY, "no memory for a model");
    if (status != FKV_OK) {
        fkv_model_close(m);
        return status;
    }
    if (config->log != NULL) {
        char line[256];
        (void)snprintf(
            line, sizeof line, "flatkv %s: %s of %u layers, %" PRIu64 " parameters: %" PRIu64 " bytes packed, %" PRIu64 " mapped",
            fkv_version(), m->info.architecture, m->info.n_layers, m->info.n_parameters, m->info.packed_bytes, m->mapped_bytes);
        config->log(config->log_user, line);
    }
    *model = m;
    return FKV_OK;
}

void fkv_model_close(fkv_model *model) {
    if (model == NULL) return;
    model->backend->unload_weights(model);
    fkv_chat_close(model->chat);
    fkv_tokenizer_close(model->tokenizer);
    fkv_weights_close(model->weights);
    free(model->tensors);
    free(model->sinks);
    free(model->views);
    free(model->experts);
    free(model->path);
    free(model);
}

const fkv_model_info *fkv_model_about(const fkv_model *model) { return model != NULL ? &model->info : NULL; }

/* ---- tokens: the tokenizer's answers, behind a check for NULL ---- */

fkv_status fkv_tokenize(const fkv_model *model, const char *text, size_t n_bytes, unsigned flags, uint32_t *tokens,
                        size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && (text != NULL || n_bytes == 0) && (tokens != NULL || capacity == 0) && n_tokens != NULL,
                FKV_BAD_ARGUMENT, "fkv_tokenize: model, text, tokens or n_tokens is NULL");
    return fkv_tokenizer_encode(model->tokenizer, text != NULL ? text : "", NULL, n_bytes, flags, tokens, capacity, n_tokens);
}

const char *fkv_token_text(const fkv_model *model, uint32_t token, bool special, size_t *n_bytes) {
    size_t unasked = 0;
    size_t *n = n_bytes != NULL ? n_bytes : &unasked;
    *n = 0;
    return model != NULL ? fkv_tokenizer_text(model->tokenizer, token, special, n) : "";
}

/* ---- chat ---- */

fkv_status fkv_chat_tokenize(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                             uint32_t *tokens, size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && conversation != NULL && (tokens != NULL || capacity == 0) && n_tokens != NULL, FKV_BAD_ARGUMENT,
                "fkv_chat_tokenize: model, conversation, tokens or n_tokens is NULL");
    fkv_rendered text = {0};
    FKV_TRY(fkv_chat_run(model->chat, conversation, n_bytes, now, &text));
    fkv_status status = fkv_tokenizer_encode(model->tokenizer, text.text, text.given, text.n_bytes, FKV_TOKENIZE_SPECIAL, tokens,
                                             capacity, n_tokens);
    fkv_rendered_close(&text);
    return status;
}

fkv_status fkv_chat_render(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now, char *text,
                           uint8_t *given, size_t capacity, size_t *n_text) {
    FKV_REQUIRE(model != NULL && conversation != NULL && (text != NULL || capacity == 0) && n_text != NULL, FKV_BAD_ARGUMENT,
                "fkv_chat_render: model, conversation, text or n_text is NULL");
    fkv_rendered rendered = {0};
    FKV_TRY(fkv_chat_run(model->chat, conversation, n_bytes, now, &rendered));
    size_t n = rendered.n_bytes < capacity ? rendered.n_bytes : capacity;
    *n_text = rendered.n_bytes;
    if (n > 0) memcpy(text, rendered.text, n);
    if (n > 0 && given != NULL) memcpy(given, rendered.given, n);
    fkv_rendered_close(&rendered);
    return FKV_OK;
}

fkv_status fkv_tokenize_given(const fkv_model *model, const char *text, const uint8_t *given, size_t n_bytes, uint32_t *tokens,
                              size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && text != NULL && given != NULL && (tokens != NULL || capacity == 0) && n_tokens != NULL,
                FKV_BAD_ARGUMENT, "fkv_tokenize_given: model, text, given, tokens or n_tokens is NULL");
    return fkv_tokenizer_encode(model->tokenizer, text, given, n_bytes, FKV_TOKENIZE_SPECIAL, tokens, capacity, n_tokens);
}
