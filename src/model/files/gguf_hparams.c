/* Reads GGUF hyperparameters; see gguf_hparams.h. Values in the file override the defaults of the architecture (architecture.h).
 */
#include "gguf_hparams.h"

#include "../architecture.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

/* A full metadata key: "<architecture>.<key>". */
typedef struct arch_key {
    char text[FKV_MAX_ARCHITECTURE + 64];
} arch_key;

static arch_key full_key(const fkv_weights *weights, const char *key) {
    arch_key full;
    const int n = snprintf(full.text, sizeof full.text, "%s.%s", weights->architecture, key);
    FKV_ASSERT(n > 0 && (size_t)n < sizeof full.text);
    (void)n;
    return full;
}

/* ---- getters ---- */

typedef struct float_key {
    const char *key;
    float *out;
} float_key;

/* Reads float values, which must not be negative. */
static fkv_status get_floats(const fkv_gguf_values *values, const fkv_weights *weights, const float_key *keys, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const arch_key key = full_key(weights, keys[i].key);
        FKV_TRY(fkv_gguf_get_f32(values, key.text, keys[i].out));
        FKV_REQUIRE(*keys[i].out >= 0, FKV_FILE_FORMAT, "%s: %s is negative", values->path, key.text);
    }
    return FKV_OK;
}

static fkv_status get_arch_u32(const fkv_gguf_values *values, const fkv_weights *weights, const char *key, uint32_t *out) {
    return fkv_gguf_get_u32(values, full_key(weights, key).text, out);
}

/* Reads a value that applies to all layers. Rejects arrays with one value per layer. */
static fkv_status get_uniform_u32(const fkv_gguf_values *values, const fkv_weights *weights, const char *name, uint32_t *out) {
    const arch_key key = full_key(weights, name);
    const fkv_gguf_value *value = fkv_gguf_find(values, key.text);
    FKV_REQUIRE(value == NULL || value->type != FKV_GGUF_ARRAY, FKV_UNSUPPORTED,
                "%s: %s has per-layer values, which is not supported", values->path, key.text);
    return fkv_gguf_get_u32(values, key.text, out);
}

/* Reads a single value, or an array with one value per layer. A single value is stored in *out. The elements of an array are
 * stored in the layer shapes, in the field at byte offset `part`, and *out receives the last element. */
static fkv_status get_per_layer_u32(const fkv_gguf_values *values, fkv_weights *weights, const char *name, size_t part,
                                    uint32_t *out) {
    fkv_hparams *h = &weights->hparams;
    const arch_key key = full_key(weights, name);
    const fkv_gguf_value *value = fkv_gguf_find(values, key.text);
    if (value == NULL || value->type != FKV_GGUF_ARRAY) return fkv_gguf_get_u32(values, key.text, out);
    bool good = (value->item == FKV_GGUF_I32 || value->item == FKV_GGUF_U32) && value->count == h->n_layers &&
                value->count <= FKV_MAX_LAYERS;
    for (uint32_t i = 0; good && i < h->n_layers; i++) {
        memcpy(out, value->data + i * sizeof *out, sizeof *out);
        memcpy((uint8_t *)&h->shapes[i] + part, out, sizeof *out);
        good = *out > 0 && *out <= INT32_MAX;
    }
    FKV_REQUIRE(good, FKV_FILE_FORMAT, "%s: %s must have one value above 0 for each of %u layers", values->path, key.text,
                h->n_layers);
    return FKV_OK;
}

/* Reads the number of KV heads, for models with recurrent layers. Layers with 0 KV heads are marked as recurrent; all other
 * layers must have the same number of KV heads. */
static fkv_status read_recurrent_heads(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    const arch_key key = full_key(weights, "attention.head_count_kv");
    const fkv_gguf_value *value = fkv_gguf_find(values, key.text);
    if (value == NULL || value->type != FKV_GGUF_ARRAY) return fkv_gguf_get_u32(values, key.text, &h->n_kv_heads);
    bool good = (value->item == FKV_GGUF_I32 || value->item == FKV_GGUF_U32) && value->count == h->n_layers &&
                value->count <= FKV_MAX_LAYERS;
    uint32_t n_heads = 0;
    for (uint32_t i = 0; good && i < h->n_layers; i++) {
        uint32_t n = 0;
        memcpy(&n, value->data + i * sizeof n, sizeof n);
        if (n == 0)
            h->layers[i] |= FKV_LAYER_RECURRENT;
        else
            good = n == (n_heads == 0 ? n : n_heads);
        if (n != 0) n_heads = n;
    }
    FKV_REQUIRE(good, FKV_UNSUPPORTED, "%s: %s must have one value for each of %u layers, and all nonzero values must be equal",
                values->path, key.text, h->n_layers);
    if (n_heads != 0) h->n_kv_heads = n_heads;
    return FKV_OK;
}

/* Reads the feed-forward dimension of each layer, for models in which a layer is either a mixer (attention or recurrence) or a
 * feed-forward block. For mixers, the file states a dimension of 0. */
static fkv_status read_single_blocks(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    const arch_key key = full_key(weights, "feed_forward_length");
    const fkv_gguf_value *value = fkv_gguf_find(values, key.text);
    const bool good = value != NULL && value->type == FKV_GGUF_ARRAY &&
                      (value->item == FKV_GGUF_I32 || value->item == FKV_GGUF_U32) && value->count == h->n_layers &&
                      value->count <= FKV_MAX_LAYERS;
    FKV_REQUIRE(good, FKV_FILE_FORMAT, "%s: %s must have one value for each of %u layers", values->path, key.text, h->n_layers);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        uint32_t n = 0;
        memcpy(&n, value->data + i * sizeof n, sizeof n);
        FKV_REQUIRE(n == 0 || (h->layers[i] & FKV_LAYER_RECURRENT) != 0, FKV_UNSUPPORTED,
                    "%s: layer %u has both attention and a feed-forward network, expected only one of them", values->path, i);
        if (n == 0) {
            h->layers[i] |= FKV_LAYER_NO_FFN;
            continue;
        }
        h->layers[i] = (uint8_t)((h->layers[i] & ~FKV_LAYER_RECURRENT) | FKV_LAYER_NO_MIXER);
        h->shapes[i].ffn_dim = n;
        h->ffn_dim = n;
    }
    return FKV_OK;
}

/* ---- sections ---- */

/* Returns whether the model has latent attention and its architecture supports latent attention in GGUF files. */
static bool is_latent_file(const fkv_gguf_values *values, const fkv_weights *weights) {
    const bool is_known = strcmp(weights->architecture, "deepseek2") == 0 || strcmp(weights->architecture, "kimi-linear") == 0;
    return is_known && fkv_gguf_find(values, full_key(weights, "attention.kv_lora_rank").text) != NULL;
}

/* Reads the shape and the scale of latent attention. In files without key_length_mla, key_length and value_length are the
 * dimensions of the expanded heads. */
static fkv_status read_gguf_latent(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    fkv_latent *l = &h->latent;
    uint32_t query_dim = 0;
    float log_multiplier = 0.0f;
    const float_key multiplier = {"rope.scaling.yarn_log_multiplier", &log_multiplier};
    if (!is_latent_file(values, weights)) return FKV_OK;
    FKV_TRY(get_arch_u32(values, weights, "attention.kv_lora_rank", &l->dim));
    FKV_TRY(get_arch_u32(values, weights, "attention.q_lora_rank", &l->q_dim));
    FKV_TRY(get_arch_u32(values, weights, "attention.key_length", &query_dim));
    FKV_TRY(get_arch_u32(values, weights, "attention.value_length", &l->v_dim));
    FKV_TRY(get_arch_u32(values, weights, "attention.key_length_mla", &query_dim));
    FKV_TRY(get_arch_u32(values, weights, "attention.value_length_mla", &l->v_dim));
    l->rope_dim = h->rope.dim;
    FKV_REQUIRE(
        l->dim > 0 && l->v_dim > 0 && query_dim > l->rope_dim, FKV_FILE_FORMAT,
        "%s: invalid dimensions of latent attention: attention.kv_lora_rank %u, query head dimension %u, value head dimension %u, rope.dimension_count %u",
        values->path, l->dim, query_dim, l->v_dim, l->rope_dim);
    l->nope_dim = query_dim - l->rope_dim;
    h->head_dim = query_dim;
    h->local_rope.dim = l->rope_dim;
    h->n_kv_heads = 1;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        h->shapes[i].n_kv_heads = 1;
        h->shapes[i].head_dim = l->dim;
    }
    FKV_TRY(get_floats(values, weights, &multiplier, 1));
    double factor = 1.0;
    if (h->rope.scaling == FKV_ROPE_YARN && log_multiplier > 0.0f) {
        /* the file contains 0.1 * mscale_all_dim; as in llama.cpp, mscale is set to the same value as mscale_all_dim */
        h->rope.mscale = h->rope.mscale_all = 10.0f * log_multiplier;
        factor = 1.0 + (double)log_multiplier * log(fmax((double)h->rope.factor, 1.0));
    }
    if (h->query_scale == 0.0f) h->query_scale = (float)(factor * factor / sqrt((double)query_dim));
    return FKV_OK;
}

static fkv_status read_heads(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    uint32_t key_length = 0;
    uint32_t value_length = 0;
    FKV_TRY(get_uniform_u32(values, weights, "attention.head_count", &h->n_q_heads));
    h->n_kv_heads = h->n_q_heads;
    if (h->features.recurrence != FKV_RECURRENCE_NONE)
        FKV_TRY(read_recurrent_heads(values, weights));
    else
        FKV_TRY(
            get_per_layer_u32(values, weights, "attention.head_count_kv", offsetof(fkv_layer_shape, n_kv_heads), &h->n_kv_heads));
    if (h->n_q_heads > 0 && h->dim % h->n_q_heads == 0) key_length = h->dim / h->n_q_heads;
    value_length = key_length;
    FKV_TRY(get_arch_u32(values, weights, "attention.key_length", &key_length));
    FKV_TRY(get_arch_u32(values, weights, "attention.value_length", &value_length));
    FKV_REQUIRE(key_length == value_length || is_latent_file(values, weights), FKV_UNSUPPORTED,
                "%s: key length %u and value length %u differ, which is not supported", values->path, key_length, value_length);
    h->head_dim = key_length;
    return FKV_OK;
}

static bool bytes_equal(fkv_bytes text, const char *word) {
    return text.size == strlen(word) && memcmp(text.data, word, text.size) == 0;
}

/* Sets the YaRN attention factor as in llama.cpp: mscale_all_dim is yarn_log_multiplier, mscale is 1, and the resulting factor is
 * multiplied by attn_factor. Architectures without mscale_all_dim ignore yarn_log_multiplier. */
static void set_yarn_attention(fkv_rope *rope, float log_multiplier, float attn_factor) {
    const float log_factor = logf(fmaxf(rope->factor, 1));
    if (log_multiplier > 0) {
        rope->mscale = 1;
        rope->mscale_all = log_multiplier;
    }
    if (attn_factor > 0 && attn_factor != 1)
        rope->attention_factor = attn_factor * (1 + 0.1f * log_factor) / (1 + 0.1f * log_multiplier * log_factor);
}

static fkv_status set_rope_scaling(const fkv_gguf_values *values, fkv_rope *rope, fkv_bytes type, float factor, float attn_factor,
                                   float log_multiplier) {
    const bool is_yarn = bytes_equal(type, "yarn");
    const bool is_long = bytes_equal(type, "longrope");
    FKV_REQUIRE(type.size == 0 || bytes_equal(type, "none") || bytes_equal(type, "linear") || is_yarn || is_long, FKV_UNSUPPORTED,
                "%s: unsupported RoPE scaling '%s': expected linear, yarn or longrope", values->path, fkv_show(type).text);
    if (bytes_equal(type, "none")) return FKV_OK;
    rope->scaling = is_yarn ? FKV_ROPE_YARN : is_long ? FKV_ROPE_LONG : FKV_ROPE_LINEAR;
    if (factor > 0) rope->factor = factor;
    if (is_yarn) set_yarn_attention(rope, log_multiplier, attn_factor);
    if (!is_yarn && attn_factor > 0) rope->attention_factor = attn_factor;
    return FKV_OK;
}

static fkv_status read_gguf_rope(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    fkv_rope *rope = &h->rope;
    fkv_bytes type = {0};
    float factor = 0;
    float attn_factor = 0;
    float log_multiplier = 0;
    const fkv_architecture *architecture = fkv_architecture_find(weights->architecture);
    const float_key keys[] = {{"rope.freq_base", &rope->base},
                              {"rope.freq_base_swa", &h->local_rope.base},
                              {"rope.scale_linear", &factor}, /* old files use this key instead of rope.scaling.factor */
                              {"rope.scaling.factor", &factor},
                              {"rope.scaling.attn_factor", &attn_factor},
                              {"rope.scaling.yarn_beta_fast", &rope->beta_fast},
                              {"rope.scaling.yarn_beta_slow", &rope->beta_slow},
                              {"rope.scaling.yarn_log_multiplier", &log_multiplier},
                              {"attention.temperature_scale", &h->temperature}};
    rope->dim = h->head_dim;
    FKV_TRY(get_arch_u32(values, weights, "rope.dimension_count", &rope->dim));
    FKV_TRY(get_arch_u32(values, weights, "rope.dimension_count_swa", &h->local_rope.dim));
    FKV_TRY(get_floats(values, weights, keys, sizeof keys / sizeof keys[0]));
    FKV_TRY(get_arch_u32(values, weights, "rope.scaling.original_context_length", &rope->original_context));
    FKV_TRY(fkv_gguf_get_string(values, full_key(weights, "rope.scaling.type").text, &type));
    if (architecture == NULL || !architecture->gguf_yarn_log_multiplier) log_multiplier = 0;
    FKV_TRY(set_rope_scaling(values, rope, type, factor, attn_factor, log_multiplier));
    h->temperature_context = rope->original_context != 0 ? rope->original_context : h->context;
    return FKV_OK;
}

/* Reads the sliding window. attention.sliding_window_pattern is either a number n (every n-th layer has full attention) or an
 * array with one bool per layer (true: windowed). */
static fkv_status read_gguf_window(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    const arch_key key = full_key(weights, "attention.sliding_window_pattern");
    const fkv_gguf_value *pattern = fkv_gguf_find(values, key.text);
    const bool is_list = pattern != NULL && pattern->type == FKV_GGUF_ARRAY;
    uint32_t window = 0;
    FKV_TRY(get_uniform_u32(values, weights, "attention.sliding_window", &window));
    if (h->features.window_period != 0) h->window = window;
    if (pattern != NULL && !is_list) FKV_TRY(fkv_gguf_get_u32(values, key.text, &h->features.window_period));
    if (h->features.recurrence == FKV_RECURRENCE_NONE) fkv_architecture_set_layers(h);
    if (!is_list || h->window == 0) return FKV_OK;
    FKV_REQUIRE(pattern->item == FKV_GGUF_BOOL && pattern->count == h->n_layers && h->n_layers <= FKV_MAX_LAYERS, FKV_FILE_FORMAT,
                "%s: %s must have one bool for each of %u layers", values->path, key.text, h->n_layers);
    for (uint32_t i = 0; i < h->n_layers; i++)
        h->layers[i] = (uint8_t)((h->layers[i] & ~FKV_LAYER_WINDOW) | (pattern->data[i] != 0 ? FKV_LAYER_WINDOW : 0));
    return FKV_OK;
}

/* Reads the head dimension of windowed layers, if it differs from that of the other layers. */
static fkv_status read_local_heads(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    uint32_t key_length = 0;
    FKV_TRY(get_arch_u32(values, weights, "attention.key_length_swa", &key_length));
    uint32_t value_length = key_length;
    FKV_TRY(get_arch_u32(values, weights, "attention.value_length_swa", &value_length));
    FKV_REQUIRE(key_length == value_length, FKV_UNSUPPORTED,
                "%s: key length %u and value length %u differ, which is not supported", values->path, key_length, value_length);
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        if (fkv_architecture_window(h, i) != 0) h->shapes[i].head_dim = key_length;
    return FKV_OK;
}

static fkv_status read_gguf_experts(const fkv_gguf_values *values, fkv_weights *weights) {
    enum { GATING_SIGMOID = 2 };
    const fkv_recurrence_kind kind = weights->hparams.features.recurrence;
    const struct {
        const char *key;
        bool is_known; /* true if the key is supported, because read_gguf_latent() or read_gguf_recurrence() reads it */
    } others[] = {{"attention.kv_lora_rank", is_latent_file(values, weights)},
                  {"ssm.state_size", kind == FKV_DELTA_NET || kind == FKV_MAMBA2}};
    fkv_hparams *h = &weights->hparams;
    uint32_t gating = 0;
    uint32_t n_shared = 0;
    const float_key scale = {"expert_weights_scale", &h->experts_scale};
    FKV_TRY(get_arch_u32(values, weights, "expert_count", &h->n_experts));
    FKV_TRY(get_arch_u32(values, weights, "expert_used_count", &h->n_experts_used));
    if (h->n_experts != 0) FKV_TRY(get_arch_u32(values, weights, "expert_feed_forward_length", &h->expert_dim));
    FKV_TRY(get_arch_u32(values, weights, "expert_shared_feed_forward_length", &h->shared_dim));
    FKV_TRY(get_arch_u32(values, weights, "expert_shared_count", &n_shared));
    FKV_TRY(get_arch_u32(values, weights, "leading_dense_block_count", &h->n_dense));
    FKV_TRY(get_arch_u32(values, weights, "expert_group_count", &h->n_expert_groups));
    FKV_TRY(get_arch_u32(values, weights, "expert_group_used_count", &h->n_expert_groups_used));
    FKV_TRY(get_arch_u32(values, weights, "nextn_predict_layers", &h->n_next));
    FKV_TRY(get_floats(values, weights, &scale, 1));
    FKV_REQUIRE(h->n_next == 0 || h->n_next < h->n_layers, FKV_FILE_FORMAT,
                "%s: %s is %u, but it must be less than the number of layers (%u)", values->path,
                full_key(weights, "nextn_predict_layers").text, h->n_next, h->n_layers);
    h->n_layers -= h->n_next;
    FKV_REQUIRE(n_shared == 0 || h->expert_dim <= UINT32_MAX / n_shared, FKV_FILE_FORMAT, "%s: %s is %u, which is too large",
                values->path, full_key(weights, "expert_shared_count").text, n_shared);
    if (n_shared != 0 && h->shared_dim == 0) h->shared_dim = n_shared * h->expert_dim;
    FKV_TRY(fkv_gguf_get_bool(values, full_key(weights, "expert_weights_norm").text, &h->features.norm_experts));
    FKV_TRY(get_arch_u32(values, weights, "expert_gating_func", &gating));
    if (gating == GATING_SIGMOID) h->features.sigmoid_router = true;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        uint32_t number = 0;
        if (others[i].is_known) continue;
        FKV_TRY(get_arch_u32(values, weights, others[i].key, &number));
        FKV_REQUIRE(number == 0, FKV_UNSUPPORTED, "%s: %s is %u, which is not supported (expected 0)", values->path,
                    full_key(weights, others[i].key).text, number);
    }
    if (!is_latent_file(values, weights)) return FKV_OK;
    /* old files of GLM-4.7-Flash do not have this key; as in llama.cpp, they are recognized by their layer count and vocabulary
     * size */
    enum { GLM_LAYERS = 47, GLM_VOCAB = 154880 };
    if (gating == 0 && h->n_layers == GLM_LAYERS && h->n_vocab == GLM_VOCAB) h->features.sigmoid_router = true;
    h->features.groups_by_max = !h->features.sigmoid_router;
    return FKV_OK;
}

/* In models that have experts in every n-th layer, marks the other layers as dense. */
static fkv_status read_expert_interval(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    uint32_t step = 1;
    FKV_TRY(get_arch_u32(values, weights, "interleave_moe_layer_step", &step));
    FKV_REQUIRE(step > 0, FKV_FILE_FORMAT, "%s: %s is 0, expected at least 1", values->path,
                full_key(weights, "interleave_moe_layer_step").text);
    for (uint32_t i = 0; h->n_experts != 0 && i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        if ((i + 1) % step != 0) h->layers[i] |= FKV_LAYER_DENSE;
    return FKV_OK;
}

/* Sets the attention parameters of Llama 4 that GGUF files do not store. As in llama.cpp, a window of 0 means full attention with
 * RoPE in all layers, and the model with 128 experts has no QK norms. */
static fkv_status set_llama4(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    enum { CHUNK = 8192, N_EXPERTS_WITHOUT_NORMS = 128 };
    uint32_t window = CHUNK;
    if (strcmp(weights->architecture, "llama4") != 0) return FKV_OK;
    FKV_TRY(get_uniform_u32(values, weights, "attention.sliding_window", &window));
    if (h->n_experts != N_EXPERTS_WITHOUT_NORMS) h->features.qk_norm = FKV_QK_NORM_UNWEIGHTED;
    h->shared_dim = h->expert_dim;
    for (uint32_t i = 0; window == 0 && i < h->n_layers && i < FKV_MAX_LAYERS; i++) h->layers[i] &= (uint8_t)~FKV_LAYER_NO_ROPE;
    if (window == 0) return FKV_OK;
    h->attention_chunk = h->temperature_context = CHUNK;
    h->temperature = 0.1f;
    h->temperature_of_no_rope = true;
    return FKV_OK;
}

/* Reads the parameters of the xIELU activation: one value per layer, or one value for all layers. */
static fkv_status read_xielu(const fkv_gguf_values *values, fkv_weights *weights) {
    static const char *const keys[] = {"xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"};
    fkv_hparams *h = &weights->hparams;
    if (h->features.activation != FKV_XIELU || h->n_layers > FKV_MAX_LAYERS) return FKV_OK;
    float *numbers = fkv_weights_keep(weights, (4 * (size_t)h->n_layers + 1) * sizeof *numbers);
    FKV_REQUIRE(numbers != NULL, FKV_NO_MEMORY, "out of memory reading %s", values->path);
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        /* the converter writes these keys without the name of the architecture */
        const arch_key own = full_key(weights, keys[k]);
        const char *key = fkv_gguf_find(values, own.text) != NULL ? own.text : keys[k];
        const fkv_gguf_value *value = fkv_gguf_find(values, key);
        const bool is_list = value != NULL && value->type == FKV_GGUF_ARRAY;
        FKV_REQUIRE(value != NULL && (!is_list || (value->item == FKV_GGUF_F32 && value->count == h->n_layers)), FKV_FILE_FORMAT,
                    "%s: %s must have one 32-bit float for each of %u layers", values->path, key, h->n_layers);
        for (uint32_t i = 0; i < h->n_layers; i++) {
            float *to = &numbers[k * h->n_layers + i];
            if (is_list)
                memcpy(to, value->data + i * sizeof *to, sizeof *to);
            else
                FKV_TRY(fkv_gguf_get_f32(values, key, to));
            FKV_REQUIRE(isfinite(*to), FKV_FILE_FORMAT, "%s: %s contains a value that is not finite", values->path, key);
        }
    }
    h->xielu = numbers;
    return FKV_OK;
}

/* Reads the fields of Mamba-2 layers. head_count_kv determines which layers are recurrent. */
static fkv_status read_gguf_mamba(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    fkv_recurrence *r = &h->recurrence;
    const bool is_granite = !h->features.single_blocks && !h->features.parallel_mixers;
    bool has_rope = h->features.parallel_mixers; /* Granite files have a key that states whether the model uses RoPE */
    if (is_granite) FKV_TRY(fkv_gguf_get_bool(values, full_key(weights, "rope.scaling.finetuned").text, &has_rope));
    FKV_REQUIRE(!is_granite || r->n_k_heads == 1, FKV_UNSUPPORTED,
                "%s: %s is %u: Mamba layers with several groups are not supported for granitehybrid", values->path,
                full_key(weights, "ssm.group_count").text, r->n_k_heads);
    r->n_norm_groups = r->n_k_heads;
    r->norm_may_miss = h->features.parallel_mixers;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        if (!has_rope) h->layers[i] |= FKV_LAYER_NO_ROPE;
        if (h->features.parallel_mixers) h->layers[i] |= FKV_LAYER_RECURRENT;
    }
    return get_arch_u32(values, weights, "moe_latent_size", &h->latent_dim);
}

/* Reads the shape of Kimi Delta Attention, which has the same number of heads as attention. head_count_kv determines which layers
 * are recurrent. No layer has RoPE. */
static fkv_status read_gguf_kda(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    fkv_recurrence *r = &h->recurrence;
    FKV_TRY(get_arch_u32(values, weights, "ssm.conv_kernel", &r->n_taps));
    FKV_TRY(get_arch_u32(values, weights, "kda.head_dim", &r->k_dim));
    r->v_dim = r->k_dim;
    r->n_k_heads = r->n_v_heads = h->n_q_heads;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) h->layers[i] |= FKV_LAYER_NO_ROPE;
    return FKV_OK;
}

/* Reads the shape of recurrent layers. Also determines which layers are recurrent, unless head_count_kv states this. model.c
 * checks the values. */
static fkv_status read_gguf_recurrence(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    fkv_recurrence *r = &h->recurrence;
    uint32_t inner = 0;
    uint32_t interval = 4;
    if (h->features.recurrence == FKV_SHORT_CONV) return get_arch_u32(values, weights, "shortconv.l_cache", &r->n_taps);
    if (h->features.recurrence == FKV_RECURRENCE_NONE) return FKV_OK;
    if (h->features.recurrence == FKV_KDA) return read_gguf_kda(values, weights);
    FKV_TRY(get_arch_u32(values, weights, "ssm.conv_kernel", &r->n_taps));
    FKV_TRY(get_arch_u32(values, weights, "ssm.state_size", &r->k_dim));
    FKV_TRY(get_arch_u32(values, weights, "ssm.group_count", &r->n_k_heads));
    FKV_TRY(get_arch_u32(values, weights, "ssm.time_step_rank", &r->n_v_heads));
    FKV_TRY(get_arch_u32(values, weights, "ssm.inner_size", &inner));
    FKV_TRY(get_arch_u32(values, weights, "full_attention_interval", &interval));
    FKV_REQUIRE(r->n_v_heads > 0 && inner % r->n_v_heads == 0 && interval > 0, FKV_FILE_FORMAT,
                "%s: %s is %u, which is not a multiple of the number of heads (%u), or full_attention_interval is 0",
                values->path, full_key(weights, "ssm.inner_size").text, inner, r->n_v_heads);
    r->v_dim = inner / r->n_v_heads;
    if (h->features.recurrence == FKV_MAMBA2) return read_gguf_mamba(values, weights);
    const fkv_gguf_value *list = fkv_gguf_find(values, full_key(weights, "attention.recurrent_layers").text);
    FKV_REQUIRE(list == NULL || (list->type == FKV_GGUF_ARRAY && list->item == FKV_GGUF_BOOL && list->count >= h->n_layers),
                FKV_FILE_FORMAT, "%s: %s must have one bool for each of %u layers", values->path,
                full_key(weights, "attention.recurrent_layers").text, h->n_layers);
    if (fkv_architecture_has_recurrence(h)) return FKV_OK; /* stated by head_count_kv */
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        if (list != NULL ? list->data[i] != 0 : (i + 1) % interval != 0) h->layers[i] |= FKV_LAYER_RECURRENT;
    return FKV_OK;
}

static fkv_status read_names(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_bytes text = {0};
    FKV_TRY(fkv_gguf_get_string(values, "general.architecture", &text));
    FKV_REQUIRE(text.size < FKV_MAX_ARCHITECTURE && fkv_is_plain(text), FKV_FILE_FORMAT,
                "%s: general.architecture is missing or invalid ('%s')", values->path, fkv_show(text).text);
    fkv_show_into(text, weights->architecture, sizeof weights->architecture);
    text = (fkv_bytes){0};
    FKV_TRY(fkv_gguf_get_string(values, "general.name", &text));
    fkv_show_into(text, weights->name, sizeof weights->name);
    return FKV_OK;
}

/* The largest Gemma models scale scores by 1 / sqrt(dim / n_q_heads), smaller ones by 1 / sqrt(head_dim). GGUF files do not
 * store which scale applies. */
static void set_large_gemma_scale(const fkv_architecture *architecture, fkv_hparams *h) {
    bool large = architecture->large_n_layers != 0 && h->n_layers == architecture->large_n_layers;
    if (large && h->query_scale == 0 && h->dim > 0) h->query_scale = sqrtf((float)h->n_q_heads / (float)h->dim);
}

fkv_status fkv_gguf_read_hparams(const fkv_gguf_values *values, fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    FKV_TRY(read_names(values, weights));
    const fkv_architecture *architecture =
        fkv_architecture_find(weights->architecture); /* NULL if the architecture is unknown; model.c then rejects the model */
    if (architecture != NULL) h->features = architecture->features;
    const float_key keys[] = {{"attention.layer_norm_rms_epsilon", &h->norm_eps},
                              {"attention.layer_norm_epsilon", &h->norm_eps},
                              {"attn_logit_softcapping", &h->softcap},
                              {"final_logit_softcapping", &h->final_softcap},
                              {"attention.scale", &h->query_scale},
                              {"embedding_scale", &h->embedding_scale},
                              {"residual_scale", &h->residual_scale},
                              {"logit_scale", &h->logit_scale}};
    FKV_TRY(get_arch_u32(values, weights, "block_count", &h->n_layers));
    FKV_TRY(get_arch_u32(values, weights, "embedding_length", &h->dim));
    if (!h->features.single_blocks)
        FKV_TRY(get_per_layer_u32(values, weights, "feed_forward_length", offsetof(fkv_layer_shape, ffn_dim), &h->ffn_dim));
    FKV_TRY(get_arch_u32(values, weights, "attention.shared_kv_layers", &h->n_shared_kv_layers));
    FKV_TRY(get_arch_u32(values, weights, "embedding_length_per_layer_input", &h->input_dim));
    FKV_TRY(get_arch_u32(values, weights, "context_length", &h->context));
    FKV_TRY(get_arch_u32(values, weights, "vocab_size", &h->n_vocab));
    FKV_TRY(get_floats(values, weights, keys, sizeof keys / sizeof keys[0]));
    FKV_TRY(read_heads(values, weights));
    if (h->features.single_blocks) FKV_TRY(read_single_blocks(values, weights));
    FKV_TRY(read_gguf_rope(values, weights));
    FKV_TRY(read_gguf_window(values, weights));
    FKV_TRY(read_local_heads(values, weights));
    FKV_TRY(read_gguf_experts(values, weights));
    FKV_TRY(read_expert_interval(values, weights));
    FKV_TRY(set_llama4(values, weights));
    FKV_TRY(read_xielu(values, weights));
    if (h->features.sparse_mixer) h->mixer_jitter = 0.01f; /* GGUF files do not store this value; 0.01 is the default */
    FKV_TRY(read_gguf_recurrence(values, weights));
    FKV_TRY(read_gguf_latent(values, weights));
    if (architecture != NULL) {
        h->recurrence.tiled = architecture->gguf_tiled_heads;
        set_large_gemma_scale(architecture, h);
        /* llama.cpp's RoPE with sections rotates the pairs (i, i + D/2), so the converter reorders the rows of GLM-4.1V for this
         * layout */
        const bool has_sections = fkv_gguf_find(values, full_key(weights, "rope.dimension_sections").text) != NULL;
        h->rope_interleaved = architecture->gguf_interleaved && !has_sections;
    }
    fkv_architecture_finish(architecture, h);
    return FKV_OK;
}
