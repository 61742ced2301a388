/* config.json as Hugging Face writes it, turned into hyperparameters, and its tensor names into GGUF's.
 *
 * Only models whose every number is understood are let through: a config that asks for another activation, another RoPE scaling
 * or quantized weights is refused by name, since running it anyway would give plausible nonsense.
 */
#include "hf_config.h"

#include "json_read.h"
#include "layer_pattern.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* ---- values --------------------------------------------------------------------------------------------------- */

/* The getters leave *out as it was where the key is missing or null. */

static const json_t *get(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static fkv_status get_u32(const json_t *object, const char *key, const char *path, uint32_t *out) {
    const json_t *value = get(object, key);
    if (value == NULL) return FKV_OK;
    const json_int_t number = json_integer_value(value);
    FKV_REQUIRE(json_is_integer(value) && number >= 0 && number <= UINT32_MAX, FKV_FILE_FORMAT,
                "%s is not a whole number below 2^32: %s", key, path);
    *out = (uint32_t)number;
    return FKV_OK;
}

static fkv_status get_f32(const json_t *object, const char *key, const char *path, float *out) {
    const json_t *value = get(object, key);
    if (value == NULL) return FKV_OK;
    const float number = (float)json_number_value(value);
    FKV_REQUIRE(json_is_number(value) && isfinite(number) && number >= 0, FKV_FILE_FORMAT, "%s is not a number from 0 on: %s",
                key, path);
    *out = number;
    return FKV_OK;
}

static fkv_status get_bool(const json_t *object, const char *key, const char *path, bool *out) {
    const json_t *value = get(object, key);
    if (value == NULL) return FKV_OK;
    FKV_REQUIRE(json_is_boolean(value), FKV_FILE_FORMAT, "%s is neither true nor false: %s", key, path);
    *out = json_is_true(value);
    return FKV_OK;
}

static fkv_status get_text(const json_t *object, const char *key, const char *path, const char **out) {
    const json_t *value = get(object, key);
    if (value == NULL) return FKV_OK;
    FKV_REQUIRE(json_is_string(value), FKV_FILE_FORMAT, "%s is not a string: %s", key, path);
    *out = json_string_value(value);
    return FKV_OK;
}

/* ---- hyperparameters ----------------------------------------------------------------------------------------- */

typedef struct hf_model {
    const char *type;
    const char *architecture;
    const char *activation;
} hf_model;

static const hf_model MODELS[] = {
    {"llama", "llama", "silu"},
    {"qwen2", "qwen2", "silu"},
    {"qwen3", "qwen3", "silu"},
    {"gemma3_text", "gemma3", "gelu_pytorch_tanh"},
};

static fkv_status read_kind(const json_t *root, const char *path, fkv_weights *weights, bool *is_gemma) {
    const char *type = "";
    const char *activation = NULL;
    const hf_model *model = NULL;
    FKV_TRY(get_text(root, "model_type", path, &type));
    for (size_t i = 0; i < sizeof MODELS / sizeof MODELS[0]; i++)
        if (strcmp(type, MODELS[i].type) == 0) model = &MODELS[i];
    FKV_REQUIRE(model != NULL, FKV_UNSUPPORTED, "model_type '%s' is not supported; llama, qwen2, qwen3 and gemma3_text are: %s",
                fkv_show_text(type).text, path);
    FKV_REQUIRE(get(root, "quantization_config") == NULL, FKV_UNSUPPORTED,
                "quantized safetensors are not supported; use GGUF: %s", path);
    FKV_TRY(get_text(root, "hidden_act", path, &activation));
    FKV_TRY(get_text(root, "hidden_activation", path, &activation)); /* gemma's word for it */
    FKV_REQUIRE(activation == NULL || strcmp(activation, model->activation) == 0, FKV_UNSUPPORTED,
                "activation '%s' is not supported for %s, only %s is: %s", fkv_show_text(activation).text, type,
                model->activation, path);
    (void)snprintf(weights->architecture, sizeof weights->architecture, "%s", model->architecture);
    *is_gemma = strcmp(model->architecture, "gemma3") == 0;
    return FKV_OK;
}

/* One description of a RoPE: {"rope_type": ..., "factor": ..., "rope_theta": ...}; old files say "type". */
static fkv_status read_rope_object(const json_t *rope, const char *path, float *base, float *scale) {
    const char *type = "default";
    float factor = 0;
    FKV_REQUIRE(json_is_object(rope), FKV_FILE_FORMAT, "a RoPE scaling that is no object: %s", path);
    FKV_TRY(get_text(rope, "type", path, &type));
    FKV_TRY(get_text(rope, "rope_type", path, &type));
    FKV_TRY(get_f32(rope, "factor", path, &factor));
    FKV_TRY(get_f32(rope, "rope_theta", path, base));
    if (strcmp(type, "default") == 0) return FKV_OK;
    FKV_REQUIRE(strcmp(type, "linear") == 0, FKV_UNSUPPORTED, "RoPE scaling '%s' is not supported, only linear is: %s",
                fkv_show_text(type).text, path);
    FKV_REQUIRE(factor > 0, FKV_FILE_FORMAT, "linear RoPE scaling by a factor of %g: %s", (double)factor, path);
    *scale = factor;
    return FKV_OK;
}

/* rope_theta, rope_scaling and rope_local_base_freq; since 2025 also rope_parameters, for gemma one for each kind of layer. */
static fkv_status read_rope(const json_t *root, const char *path, bool is_gemma, fkv_hparams *hparams) {
    const json_t *scaling = get(root, "rope_scaling");
    const json_t *parameters = get(root, "rope_parameters");
    float rotary = 1;
    float local_scale = 1;
    FKV_TRY(get_f32(root, "rope_theta", path, &hparams->rope_base));
    if (is_gemma) FKV_TRY(get_f32(root, "rope_local_base_freq", path, &hparams->rope_base_local));
    if (scaling != NULL) FKV_TRY(read_rope_object(scaling, path, &hparams->rope_base, &hparams->rope_scale));
    if (parameters != NULL && is_gemma && get(parameters, "full_attention") != NULL) {
        const json_t *local = get(parameters, "sliding_attention");
        FKV_TRY(read_rope_object(get(parameters, "full_attention"), path, &hparams->rope_base, &hparams->rope_scale));
        if (local != NULL) FKV_TRY(read_rope_object(local, path, &hparams->rope_base_local, &local_scale));
        FKV_REQUIRE(local_scale == 1, FKV_UNSUPPORTED, "scaled RoPE in windowed layers is not supported: %s", path);
    } else if (parameters != NULL) {
        FKV_TRY(read_rope_object(parameters, path, &hparams->rope_base, &hparams->rope_scale));
    }
    FKV_TRY(get_f32(root, "partial_rotary_factor", path, &rotary));
    FKV_REQUIRE(rotary == 1, FKV_UNSUPPORTED, "a partial_rotary_factor of %g is not supported: %s", (double)rotary, path);
    return FKV_OK;
}

static fkv_status read_layer_types(const json_t *types, const char *path, fkv_hparams *hparams) {
    fkv_layer_pattern pattern = {0};
    FKV_REQUIRE(json_is_array(types) && json_array_size(types) == hparams->n_layers, FKV_FILE_FORMAT,
                "layer_types is not one word for each of %u layers: %s", hparams->n_layers, path);
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        const bool is_full = type != NULL && strcmp(type, "full_attention") == 0;
        FKV_REQUIRE(is_full || (type != NULL && strcmp(type, "sliding_attention") == 0), FKV_UNSUPPORTED,
                    "layer %zu is of type '%s'; full_attention and sliding_attention are supported: %s", i,
                    fkv_show_text(type == NULL ? "" : type).text, path);
        fkv_layer_pattern_add(&pattern, is_full);
    }
    return fkv_layer_pattern_period(&pattern, path, &hparams->window_pattern);
}

static fkv_status read_window(const json_t *root, const char *path, bool is_gemma, fkv_hparams *hparams) {
    const json_t *types = get(root, "layer_types");
    bool is_used = false;
    if (is_gemma) {
        FKV_TRY(get_u32(root, "sliding_window", path, &hparams->window));
        FKV_TRY(get_u32(root, "_sliding_window_pattern", path, &hparams->window_pattern));
        FKV_TRY(get_u32(root, "sliding_window_pattern", path, &hparams->window_pattern));
        return types == NULL ? FKV_OK : read_layer_types(types, path, hparams);
    }
    /* Qwen configs name a window that their models do not use */
    FKV_TRY(get_bool(root, "use_sliding_window", path, &is_used));
    if (types != NULL) FKV_TRY(read_layer_types(types, path, hparams));
    FKV_REQUIRE(!is_used && hparams->window_pattern <= 1, FKV_UNSUPPORTED, "windowed layers are supported for gemma3 only: %s",
                path);
    hparams->window_pattern = 0;
    return FKV_OK;
}

static fkv_status read_scores(const json_t *root, const char *path, bool is_gemma, fkv_hparams *hparams) {
    float final_softcap = 0;
    float scalar = 0;
    FKV_TRY(get_f32(root, "final_logit_softcapping", path, &final_softcap));
    FKV_REQUIRE(final_softcap == 0, FKV_UNSUPPORTED, "logits capped at %g are not supported: %s", (double)final_softcap, path);
    FKV_TRY(get_f32(root, "attn_logit_softcapping", path, &hparams->softcap));
    if (is_gemma) FKV_TRY(get_f32(root, "query_pre_attn_scalar", path, &scalar));
    if (scalar > 0) hparams->query_scale = 1 / sqrtf(scalar);
    return FKV_OK;
}

static fkv_status read_hparams(const json_t *root, const char *path, fkv_weights *weights) {
    fkv_hparams *hparams = &weights->hparams;
    bool is_gemma = false;
    FKV_TRY(read_kind(root, path, weights, &is_gemma));
    FKV_TRY(get_u32(root, "num_hidden_layers", path, &hparams->n_layers));
    FKV_TRY(get_u32(root, "hidden_size", path, &hparams->dim));
    FKV_TRY(get_u32(root, "intermediate_size", path, &hparams->ffn_dim));
    FKV_TRY(get_u32(root, "max_position_embeddings", path, &hparams->context));
    FKV_TRY(get_u32(root, "vocab_size", path, &hparams->n_vocab));
    FKV_TRY(get_f32(root, "rms_norm_eps", path, &hparams->rms_eps));
    FKV_TRY(get_u32(root, "num_attention_heads", path, &hparams->n_q_heads));
    hparams->n_kv_heads = hparams->n_q_heads;
    FKV_TRY(get_u32(root, "num_key_value_heads", path, &hparams->n_kv_heads));
    if (hparams->n_q_heads > 0 && hparams->dim % hparams->n_q_heads == 0) hparams->head_dim = hparams->dim / hparams->n_q_heads;
    FKV_TRY(get_u32(root, "head_dim", path, &hparams->head_dim));
    hparams->rope_dim = hparams->head_dim;
    hparams->norm_plus_one = is_gemma;
    FKV_TRY(read_rope(root, path, is_gemma, hparams));
    FKV_TRY(read_window(root, path, is_gemma, hparams));
    return read_scores(root, path, is_gemma, hparams);
}

/* ---- vocabulary ---------------------------------------------------------------------------------------------- */

static fkv_status check_token(const fkv_hparams *hparams, const char *key, const char *path, uint32_t token) {
    FKV_REQUIRE(token < hparams->n_vocab, FKV_FILE_FORMAT, "%s is %u, there are %u tokens: %s", key, token, hparams->n_vocab,
                path);
    return FKV_OK;
}

/* eos_token_id may be a list; the second of it is taken for the end of a turn. */
static fkv_status read_tokens(const json_t *root, const char *path, fkv_weights *weights) {
    fkv_vocab_source *vocab = &weights->vocab;
    const json_t *ends = get(root, "eos_token_id");
    FKV_TRY(get_u32(root, "bos_token_id", path, &vocab->bos));
    if (!json_is_array(ends)) FKV_TRY(get_u32(root, "eos_token_id", path, &vocab->eos));
    for (size_t i = 0; i < json_array_size(ends) && i < 2; i++) { /* 0 for anything but an array */
        const json_int_t id = json_integer_value(json_array_get(ends, i));
        FKV_REQUIRE(json_is_integer(json_array_get(ends, i)) && id >= 0 && id < UINT32_MAX, FKV_FILE_FORMAT,
                    "eos_token_id has something else than tokens: %s", path);
        *(i == 0 ? &vocab->eos : &vocab->eot) = (uint32_t)id;
    }
    if (vocab->bos != FKV_NO_TOKEN) FKV_TRY(check_token(&weights->hparams, "bos_token_id", path, vocab->bos));
    if (vocab->eos != FKV_NO_TOKEN) FKV_TRY(check_token(&weights->hparams, "eos_token_id", path, vocab->eos));
    if (vocab->eot != FKV_NO_TOKEN) FKV_TRY(check_token(&weights->hparams, "eos_token_id", path, vocab->eot));
    return FKV_OK;
}

static fkv_status read_all(const json_t *root, const char *path, fkv_weights *weights) {
    FKV_TRY(get_bool(root, "tie_word_embeddings", path, &weights->is_tied));
    weights->says_untied = get(root, "tie_word_embeddings") != NULL && !weights->is_tied;
    FKV_TRY(read_hparams(root, path, weights));
    return read_tokens(root, path, weights);
}

fkv_status fkv_hf_config_read(fkv_weights *weights, const char *json, size_t size, const char *path) {
    json_t *root = NULL;
    FKV_TRY(fkv_json_read(json, size, path, &root));
    const fkv_status status = read_all(root, path, weights);
    json_decref(root);
    return status;
}

/* ---- tensor names -------------------------------------------------------------------------------------------- */

typedef struct name_pair {
    const char *hf;
    const char *gguf;
} name_pair;

static const name_pair OUTER_NAMES[] = {
    {"model.embed_tokens", "token_embd"}, {"model.norm", "output_norm"}, {"lm_head", "output"}};

static const name_pair LAYER_NAMES[] = {{"self_attn.q_proj", "attn_q"},          {"self_attn.k_proj", "attn_k"},
                                        {"self_attn.v_proj", "attn_v"},          {"self_attn.o_proj", "attn_output"},
                                        {"self_attn.q_norm", "attn_q_norm"},     {"self_attn.k_norm", "attn_k_norm"},
                                        {"mlp.gate_proj", "ffn_gate"},           {"mlp.up_proj", "ffn_up"},
                                        {"mlp.down_proj", "ffn_down"},           {"input_layernorm", "attn_norm"},
                                        {"post_attention_layernorm", "ffn_norm"}};

/* Gemma has a norm on both sides of the attention and of the feed-forward part. */
static const name_pair GEMMA_NAMES[] = {{"post_attention_layernorm", "post_attention_norm"},
                                        {"pre_feedforward_layernorm", "ffn_norm"},
                                        {"post_feedforward_layernorm", "post_ffw_norm"}};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* stem: [n] of the name before ".weight" or ".bias". NULL: not in the table. */
static const char *translated(const name_pair *pairs, size_t n_pairs, const char *stem, size_t n) {
    for (size_t i = 0; i < n_pairs; i++)
        if (strlen(pairs[i].hf) == n && memcmp(pairs[i].hf, stem, n) == 0) return pairs[i].gguf;
    return NULL;
}

bool fkv_hf_tensor_name(const char *architecture, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]) {
    static const char layers[] = "model.layers.";
    const char *kind = strrchr(hf_name, '.');
    unsigned layer = 0;
    int n_digits = 0;
    (void)snprintf(name, FKV_MAX_TENSOR_NAME, "%s", hf_name);
    if (kind == NULL || strcmp(kind, ".inv_freq") == 0) return kind == NULL;
    if (strcmp(kind, ".weight") != 0 && strcmp(kind, ".bias") != 0) return true;
    const char *outer = translated(OUTER_NAMES, COUNT(OUTER_NAMES), hf_name, (size_t)(kind - hf_name));
    if (outer != NULL) {
        (void)snprintf(name, FKV_MAX_TENSOR_NAME, "%s%s", outer, kind);
        return true;
    }
    if (strncmp(hf_name, layers, sizeof layers - 1) != 0) return true;
    const char *number = hf_name + sizeof layers - 1;
    while (n_digits < 4 && number[n_digits] >= '0' && number[n_digits] <= '9')
        layer = layer * 10 + (unsigned)(number[n_digits++] - '0');
    const char *stem = number + n_digits + 1;
    if (n_digits == 0 || number[n_digits] != '.' || stem > kind || (number[0] == '0' && n_digits > 1)) return true;
    const char *inner = NULL;
    if (strcmp(architecture, "gemma3") == 0) inner = translated(GEMMA_NAMES, COUNT(GEMMA_NAMES), stem, (size_t)(kind - stem));
    if (inner == NULL) inner = translated(LAYER_NAMES, COUNT(LAYER_NAMES), stem, (size_t)(kind - stem));
    if (inner != NULL) (void)snprintf(name, FKV_MAX_TENSOR_NAME, "blk.%u.%s%s", layer, inner, kind);
    return true;
}
