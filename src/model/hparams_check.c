/* Validates hyperparameters: rejects sizes, expert counts, RoPE settings and scalars that no supported model can have. See
 * model.h. */
#include "model.h"

#include <math.h>

enum { MAX_DIM = 1 << 20, MAX_VOCAB = 1 << 24 };

static fkv_status check_layer_shape(const fkv_hparams *h, uint32_t layer) {
    const fkv_layer_shape *s = &h->shapes[layer];
    const fkv_layer_shape *kv = &h->shapes[s->kv_layer];
    FKV_REQUIRE(h->n_q_heads > 0 && s->n_kv_heads > 0 && h->n_q_heads % s->n_kv_heads == 0, FKV_UNSUPPORTED,
                "the number of query heads (%u) is not a multiple of the number of KV heads (%u)", h->n_q_heads, s->n_kv_heads);
    FKV_REQUIRE(
        s->head_dim > 0 && s->head_dim <= FKV_MAX_HEAD_DIM && h->n_q_heads <= MAX_DIM / s->head_dim, FKV_UNSUPPORTED,
        "unsupported attention shape: %u heads of dimension %u (the dimension must be 1 to %d, and heads times dimension at most %d)",
        h->n_q_heads, s->head_dim, FKV_MAX_HEAD_DIM, MAX_DIM);
    FKV_REQUIRE(h->v_dim <= s->head_dim, FKV_UNSUPPORTED, "the value dimension %u exceeds the head dimension %u", h->v_dim,
                s->head_dim);
    FKV_REQUIRE(s->ffn_dim > 0 && s->ffn_dim <= MAX_DIM, FKV_UNSUPPORTED,
                "layer %u has a feed-forward dimension of %u, expected 1 to %d", layer, s->ffn_dim, MAX_DIM);
    FKV_REQUIRE(
        layer < fkv_architecture_n_kv_layers(h) || s->kv_layer != layer, FKV_UNSUPPORTED,
        "layer %u stores no keys and values, and there is no earlier layer of the same kind whose keys and values it can use",
        layer);
    FKV_REQUIRE(kv->n_kv_heads == s->n_kv_heads && kv->head_dim == s->head_dim, FKV_UNSUPPORTED,
                "layer %u (%u KV heads of dimension %u) cannot share the pages of layer %u (%u KV heads of dimension %u)", layer,
                s->n_kv_heads, s->head_dim, s->kv_layer, kv->n_kv_heads, kv->head_dim);
    return FKV_OK;
}

static fkv_status check_latent(const fkv_hparams *h) {
    const fkv_latent *l = &h->latent;
    if (!fkv_architecture_is_latent(h)) return FKV_OK;
    FKV_REQUIRE(l->dim <= FKV_MAX_HEAD_DIM && l->rope_dim > 0 && l->rope_dim <= FKV_MAX_HEAD_DIM, FKV_UNSUPPORTED,
                "latent attention has %u latent channels and %u RoPE channels, expected 1 to %d of each", l->dim, l->rope_dim,
                FKV_MAX_HEAD_DIM);
    FKV_REQUIRE(
        l->nope_dim > 0 && l->v_dim > 0 && l->nope_dim <= MAX_DIM && l->v_dim <= MAX_DIM && l->q_dim <= MAX_DIM &&
            h->n_q_heads <= MAX_DIM / (l->nope_dim + l->rope_dim) && h->n_q_heads <= MAX_DIM / l->v_dim,
        FKV_UNSUPPORTED,
        "unsupported latent attention: %u heads with %u + %u query channels and %u value channels each, and a query rank of %u "
        "(the limit for the rank and for each total is %d)",
        h->n_q_heads, l->nope_dim, l->rope_dim, l->v_dim, l->q_dim, MAX_DIM);
    FKV_REQUIRE(h->n_q_heads <= FKV_MAX_HEADS_PER_KV, FKV_UNSUPPORTED, "latent attention has %u heads; at most %d are supported",
                h->n_q_heads, FKV_MAX_HEADS_PER_KV);
    FKV_REQUIRE(isfinite(l->norm_eps) && l->norm_eps >= 0.0f, FKV_UNSUPPORTED,
                "invalid epsilon %g of the latent norms: expected a finite value of at least 0", (double)l->norm_eps);
    FKV_REQUIRE(
        h->features.qk_norm == FKV_QK_PLAIN && !h->features.attn_gate && !h->features.gate_in_q && !h->features.sinks &&
            h->n_shared_kv_layers == 0 && !h->features.parallel_mixers,
        FKV_UNSUPPORTED,
        "latent attention is not supported together with QK norms, gates, sinks, shared pages or parallel recurrent layers");
    return FKV_OK;
}

static fkv_status check_recurrence(const fkv_hparams *h) {
    const fkv_recurrence *r = &h->recurrence;
    if (!fkv_architecture_has_recurrence(h)) return FKV_OK;
    FKV_REQUIRE(h->n_shared_kv_layers == 0 && !h->features.parallel, FKV_UNSUPPORTED,
                "recurrent layers are not supported in models that share pages between layers or have parallel blocks");
    FKV_REQUIRE(r->n_taps >= 2 && r->n_taps <= FKV_MAX_TAPS, FKV_UNSUPPORTED,
                "the convolution of the recurrent layers has %u taps, expected 2 to %d", r->n_taps, FKV_MAX_TAPS);
    if (h->features.recurrence != FKV_SHORT_CONV) {
        FKV_REQUIRE(r->k_dim > 0 && r->k_dim <= FKV_MAX_STATE_DIM && r->v_dim > 0 && r->v_dim <= FKV_MAX_STATE_DIM,
                    FKV_UNSUPPORTED,
                    "the heads of the recurrent layers have a key dimension of %u and a value dimension of %u, expected 1 to %d",
                    r->k_dim, r->v_dim, FKV_MAX_STATE_DIM);
        FKV_REQUIRE(
            r->n_k_heads > 0 && r->n_v_heads > 0 && r->n_v_heads % r->n_k_heads == 0 &&
                r->n_v_heads <= MAX_DIM / FKV_MAX_STATE_DIM,
            FKV_UNSUPPORTED,
            "the recurrent layers have %u key heads and %u value heads; the number of value heads must be a multiple of the number of key heads and at most %d",
            r->n_k_heads, r->n_v_heads, MAX_DIM / FKV_MAX_STATE_DIM);
    }
    FKV_REQUIRE(h->features.recurrence != FKV_KDA || (r->n_k_heads == r->n_v_heads && r->k_dim == r->v_dim), FKV_UNSUPPORTED,
                "Kimi Delta Attention with %u key heads of dimension %u and %u value heads of dimension %u is not supported; "
                "key and value heads must have the same number and dimension",
                r->n_k_heads, r->k_dim, r->n_v_heads, r->v_dim);
    FKV_REQUIRE(r->n_norm_groups == 0 || (r->n_v_heads * r->v_dim) % r->n_norm_groups == 0, FKV_UNSUPPORTED,
                "the outputs of the recurrent layers have %u channels, which cannot be divided into %u groups of equal size",
                r->n_v_heads * r->v_dim, r->n_norm_groups);
    FKV_REQUIRE(fkv_architecture_n_cache_layers(h) <= FKV_MAX_LAYERS, FKV_UNSUPPORTED,
                "the %u layers of the model need %u cache layers for keys, values and recurrent states; at most %d are supported",
                h->n_layers, fkv_architecture_n_cache_layers(h), FKV_MAX_LAYERS);
    FKV_REQUIRE(fkv_architecture_state_bytes(h) <= FKV_MAX_STATE_BYTES, FKV_UNSUPPORTED,
                "the state of a recurrent layer takes %llu bytes; at most %d are supported",
                (unsigned long long)fkv_architecture_state_bytes(h), FKV_MAX_STATE_BYTES);
    return FKV_OK;
}

static fkv_status check_shape(const fkv_hparams *h) {
    FKV_REQUIRE(h->n_layers > 0 && h->n_layers <= FKV_MAX_LAYERS, FKV_UNSUPPORTED, "the model has %u layers, expected 1 to %d",
                h->n_layers, FKV_MAX_LAYERS);
    FKV_REQUIRE(h->dim > 0 && h->dim <= MAX_DIM && h->ffn_dim > 0 && h->ffn_dim <= MAX_DIM, FKV_UNSUPPORTED,
                "the model has a hidden dimension of %u and a feed-forward dimension of %u, expected 1 to %d", h->dim, h->ffn_dim,
                MAX_DIM);
    FKV_REQUIRE(h->n_vocab > 0 && h->n_vocab <= MAX_VOCAB, FKV_UNSUPPORTED,
                "the model has a vocabulary of %u tokens, expected 1 to %d", h->n_vocab, MAX_VOCAB);
    FKV_REQUIRE(h->context > 0 && h->context <= INT32_MAX, FKV_UNSUPPORTED,
                "the model has a context of %u tokens, expected 1 to 2^31 - 1", h->context);
    FKV_REQUIRE(h->n_shared_kv_layers < h->n_layers, FKV_UNSUPPORTED,
                "%u of %u layers share pages, but at least one layer must store keys and values", h->n_shared_kv_layers,
                h->n_layers);
    FKV_REQUIRE(h->input_dim <= MAX_DIM / h->n_layers, FKV_UNSUPPORTED,
                "the per-layer inputs have %u values for each of %u layers; at most %d in total are supported", h->input_dim,
                h->n_layers, MAX_DIM);
    FKV_TRY(check_latent(h));
    for (uint32_t i = 0; i < h->n_layers; i++) FKV_TRY(check_layer_shape(h, i));
    return check_recurrence(h);
}

static fkv_status check_expert_groups(const fkv_hparams *h) {
    uint32_t n = h->n_expert_groups > 1 ? h->n_expert_groups : 1;
    uint32_t used = n > 1 ? h->n_expert_groups_used : 1;
    FKV_REQUIRE(n <= FKV_MAX_EXPERT_GROUPS && h->n_experts % n == 0 && used > 0 && used <= n &&
                    h->n_experts / n >= (n > 1 ? 2 : 1) && h->n_experts_used <= h->n_experts / n * used,
                FKV_UNSUPPORTED, "unsupported expert routing: %u of %u experts, selected from %u of %u groups", h->n_experts_used,
                h->n_experts, used, n);
    FKV_REQUIRE(n == 1 || h->features.sigmoid_router || h->features.groups_by_max, FKV_UNSUPPORTED,
                "expert groups with softmax scores are supported only if a group's score is the largest score of its experts");
    FKV_REQUIRE(!h->features.sparse_mixer || h->n_experts_used == 2, FKV_UNSUPPORTED,
                "each token uses %u experts; sparse mixer routing requires 2", h->n_experts_used);
    bool has_experts = false;
    for (uint32_t i = 0; i < h->n_layers; i++) has_experts = has_experts || fkv_architecture_has_experts(h, i);
    FKV_REQUIRE(has_experts, FKV_UNSUPPORTED, "all %u layers are dense, but at least one layer must have experts", h->n_layers);
    return FKV_OK;
}

static fkv_status check_experts(const fkv_hparams *h) {
    FKV_REQUIRE(h->n_experts <= FKV_MAX_EXPERTS, FKV_UNSUPPORTED, "the model has %u experts; at most %d are supported",
                h->n_experts, FKV_MAX_EXPERTS);
    FKV_REQUIRE(
        h->expert_dim > 0 && h->expert_dim <= MAX_DIM && h->shared_dim <= MAX_DIM, FKV_UNSUPPORTED,
        "unsupported expert dimension %u or shared expert dimension %u: both must be at most %d, and the first must not be 0",
        h->expert_dim, h->shared_dim, MAX_DIM);
    FKV_REQUIRE(h->n_experts == 0 ||
                    (h->n_experts_used > 0 && h->n_experts_used <= h->n_experts && h->n_experts_used <= FKV_MAX_EXPERTS_USED),
                FKV_UNSUPPORTED, "each token uses %u of %u experts, expected at least 1 and at most %d", h->n_experts_used,
                h->n_experts, FKV_MAX_EXPERTS_USED);
    FKV_REQUIRE(h->latent_dim <= MAX_DIM, FKV_UNSUPPORTED, "the experts' inputs have a dimension of %u, expected at most %d",
                h->latent_dim, MAX_DIM);
    FKV_REQUIRE(h->n_experts == 0 || !h->features.parallel, FKV_UNSUPPORTED,
                "experts in parallel blocks (attention and feed-forward with the same input) are not supported");
    FKV_REQUIRE(h->shared_dim == 0 || !h->features.parallel_experts, FKV_UNSUPPORTED,
                "a shared expert in layers with a parallel dense feed-forward is not supported");
    return h->n_experts != 0 ? check_expert_groups(h) : FKV_OK;
}

/* Checks that RoPE does not rotate more dimensions than the heads of each layer have. Also limits the size of the frequency
 * tables, even if no layer uses RoPE. */
static fkv_status check_rope_dims(const fkv_hparams *h) {
    FKV_REQUIRE(h->rope.dim <= FKV_MAX_HEAD_DIM && h->local_rope.dim <= FKV_MAX_HEAD_DIM, FKV_UNSUPPORTED,
                "RoPE rotates %u dimensions of a head (%u in windowed layers); at most %d are supported", h->rope.dim,
                h->local_rope.dim, FKV_MAX_HEAD_DIM);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        uint32_t dim = h->local_rope.base != 0.0f && fkv_architecture_window(h, i) != 0 ? h->local_rope.dim : h->rope.dim;
        uint32_t most = fkv_architecture_is_latent(h) ? h->latent.rope_dim : h->shapes[i].head_dim;
        FKV_REQUIRE(dim % 2 == 0 && dim > 0 && dim <= most, FKV_UNSUPPORTED,
                    "RoPE rotates %u of %u head dimensions; the number must be positive, even and at most the head dimension",
                    dim, most);
    }
    return FKV_OK;
}

static fkv_status check_rope(const fkv_hparams *h) {
    const fkv_rope *r = &h->rope;
    FKV_TRY(check_rope_dims(h));
    FKV_REQUIRE(isfinite(r->base) && r->base > 1.0f && isfinite(h->local_rope.base) &&
                    (h->local_rope.base == 0.0f || h->local_rope.base > 1.0f) && isfinite(r->factor) && r->factor > 0.0f,
                FKV_UNSUPPORTED,
                "invalid RoPE bases %g and %g or scale %g: bases must be greater than 1 and the scale must be positive",
                (double)r->base, (double)h->local_rope.base, (double)r->factor);
    FKV_REQUIRE(isfinite(r->attention_factor) && r->low_freq > 0.0f && r->high_freq > r->low_freq && isfinite(r->high_freq),
                FKV_UNSUPPORTED, "invalid RoPE attention factor %g, low_freq_factor %g or high_freq_factor %g",
                (double)r->attention_factor, (double)r->low_freq, (double)r->high_freq);
    FKV_REQUIRE(r->beta_slow > 0.0f && r->beta_fast > r->beta_slow && isfinite(r->beta_fast) && isfinite(r->mscale) &&
                    isfinite(r->mscale_all),
                FKV_UNSUPPORTED, "invalid YaRN parameters: beta_fast %g, beta_slow %g, mscale %g, mscale_all_dim %g",
                (double)r->beta_fast, (double)r->beta_slow, (double)r->mscale, (double)r->mscale_all);
    FKV_REQUIRE(r->original_context != 1, FKV_UNSUPPORTED,
                "invalid RoPE scaling: the original context is 1 token, expected at least 2");
    bool has_both = (r->short_factors == NULL) == (r->long_factors == NULL);
    FKV_REQUIRE(has_both && (r->scaling != FKV_ROPE_LONG || r->long_factors != NULL), FKV_FILE_DAMAGED,
                "the short or the long RoPE factors are missing");
    for (uint32_t i = 0; i < r->n_factors; i++)
        FKV_REQUIRE(isfinite(r->short_factors[i]) && isfinite(r->long_factors[i]) && r->short_factors[i] > 0.0f &&
                        r->long_factors[i] > 0.0f,
                    FKV_FILE_DAMAGED, "RoPE factor at index %u must be positive and finite", i);
    return FKV_OK;
}

static fkv_status check_scalars(const fkv_hparams *h) {
    const struct {
        const char *name;
        float number;
    } numbers[] = {
        {"attention soft cap", h->softcap},        {"final soft cap", h->final_softcap},  {"attention scale", h->query_scale},
        {"embedding scale", h->embedding_scale},   {"residual scale", h->residual_scale}, {"logit scale", h->logit_scale},
        {"attention temperature", h->temperature}, {"value scale", h->value_scale},       {"SwiGLU limit", h->swiglu_limit},
        {"expert scale", h->experts_scale},        {"gate scale", h->gate_scale},         {"output scale", h->down_scale},
        {"mixer scale", h->recurrence.out_scale}};
    FKV_REQUIRE(isfinite(h->norm_eps) && h->norm_eps > 0.0f, FKV_FILE_FORMAT,
                "the norm epsilon is missing or not above 0: expected %s.attention.layer_norm_rms_epsilon in a GGUF file, or "
                "rms_norm_eps in config.json",
                h->architecture);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        FKV_REQUIRE(isfinite(numbers[i].number) && numbers[i].number >= 0.0f, FKV_UNSUPPORTED,
                    "invalid %s %g: expected a finite value of at least 0", numbers[i].name, (double)numbers[i].number);
    FKV_REQUIRE(h->window <= INT32_MAX, FKV_UNSUPPORTED, "the sliding window has %u tokens; at most 2^31 - 1 are supported",
                h->window);
    FKV_REQUIRE(h->temperature == 0.0f || h->temperature_context > 0, FKV_UNSUPPORTED,
                "the attention temperature requires the original context length, which is missing");
    FKV_TRY(check_experts(h));
    return check_rope(h);
}

fkv_status fkv_hparams_check(const fkv_hparams *h) {
    FKV_TRY(check_shape(h));
    return check_scalars(h);
}
