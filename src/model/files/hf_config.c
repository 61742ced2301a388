/* Converts a Hugging Face config.json to hyperparameters.
 *
 * A config that requires an unsupported activation, RoPE scaling or layer type is rejected, and the message names the field.
 * Values in the file override the defaults of the architecture (architecture.h).
 */
#include "hf_config.h"

#include "../architecture.h"
#include "hf_fields.h"
#include "hf_latent.h"
#include "hf_recurrence.h"
#include "hf_traits.h"
#include "quantization.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* ---- model types ---- */

typedef struct hf_model_type {
    const char *type;
    const char *architecture;
    uint32_t window_period; /* replaces window_period of the architecture; 0 means no replacement */
    const char *defaults;   /* JSON object with default values for omitted fields, or NULL */
} hf_model_type;

static const char LLAMA_DEFAULTS[] =
    "{\"vocab_size\": 32000, \"hidden_size\": 4096, \"intermediate_size\": 11008, \"num_hidden_layers\": 32,"
    " \"num_attention_heads\": 32, \"rms_norm_eps\": 1e-6, \"max_position_embeddings\": 2048}";

/* Defaults for fields that the text_config of vision-language models omits. */
static const char GEMMA3_DEFAULTS[] =
    "{\"vocab_size\": 262208, \"num_attention_heads\": 8, \"num_key_value_heads\": 4, \"head_dim\": 256, \"rms_norm_eps\": 1e-6,"
    " \"max_position_embeddings\": 131072, \"rope_theta\": 1e6, \"query_pre_attn_scalar\": 256}";

#define GEMMA4_COMMON                                                                                                               \
    "\"vocab_size\": 262144, \"hidden_size\": 2304, \"intermediate_size\": 9216, \"num_hidden_layers\": 30,"                        \
    " \"num_attention_heads\": 8, \"num_key_value_heads\": 4, \"head_dim\": 256, \"global_head_dim\": 512, \"rms_norm_eps\": 1e-6," \
    " \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"proportional\", \"partial_rotary_factor\": 0.25,"                 \
    " \"rope_theta\": 1e6}, \"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}}"

static const char GEMMA4_DEFAULTS[] = "{" GEMMA4_COMMON ", \"max_position_embeddings\": 131072, \"sliding_window\": 512,"
                                      " \"hidden_size_per_layer_input\": 256}";
static const char GEMMA4_UNIFIED_DEFAULTS[] =
    "{" GEMMA4_COMMON ", \"max_position_embeddings\": 262144, \"sliding_window\": 1024}";

static const char LFM2_DEFAULTS[] =
    "{\"vocab_size\": 65536, \"num_key_value_heads\": 8, \"max_position_embeddings\": 128000, \"norm_eps\": 1e-5,"
    " \"conv_L_cache\": 3, \"block_auto_adjust_ff_dim\": true, \"block_multiple_of\": 256, \"block_ffn_dim_multiplier\": 1.0,"
    " \"tie_word_embeddings\": true}";
static const char LFM2_MOE_DEFAULTS[] =
    "{\"vocab_size\": 65536, \"num_key_value_heads\": 8, \"max_position_embeddings\": 128000, \"norm_eps\": 1e-5,"
    " \"conv_L_cache\": 3, \"num_dense_layers\": 2, \"norm_topk_prob\": true}";

static const char GRANITE_HYBRID_DEFAULTS[] =
    "{\"mamba_n_heads\": 128, \"mamba_n_groups\": 1, \"mamba_d_state\": 256, \"mamba_d_conv\": 4, \"mamba_expand\": 2}";

static const char NEMOTRON_DEFAULTS[] =
    "{\"vocab_size\": 131072, \"hidden_size\": 4096, \"intermediate_size\": 21504, \"num_attention_heads\": 32,"
    " \"num_key_value_heads\": 8, \"head_dim\": 128, \"max_position_embeddings\": 4096, \"layer_norm_epsilon\": 1e-5,"
    " \"ssm_state_size\": 128, \"mamba_num_heads\": 128, \"mamba_head_dim\": 64, \"n_groups\": 8, \"conv_kernel\": 4,"
    " \"n_routed_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 7688,"
    " \"moe_shared_expert_intermediate_size\": 7688}";

static const char FALCON_H1_DEFAULTS[] =
    "{\"vocab_size\": 128000, \"hidden_size\": 4096, \"intermediate_size\": 14336, \"num_hidden_layers\": 32,"
    " \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-5, \"max_position_embeddings\": 8192,"
    " \"mamba_n_heads\": 128, \"mamba_n_groups\": 1, \"mamba_d_state\": 256, \"mamba_d_conv\": 4, \"mamba_expand\": 2,"
    " \"mamba_norm_before_gate\": true}";

static const char DELTA_NET_DEFAULTS[] =
    "{\"rms_norm_eps\": 1e-6, \"head_dim\": 256, \"max_position_embeddings\": 32768, \"linear_conv_kernel_dim\": 4,"
    " \"linear_key_head_dim\": 128, \"linear_value_head_dim\": 128, \"linear_num_key_heads\": 16,"
    " \"linear_num_value_heads\": 32}";

static const hf_model_type MODEL_TYPES[] = {
    {"llama", "llama", 0, LLAMA_DEFAULTS},
    {"mistral", "llama", FKV_NO_PERIOD, NULL},
    {"ministral", "llama", FKV_NO_PERIOD, NULL},
    {"ministral3", "mistral3", FKV_NO_PERIOD, NULL},
    {"mixtral", "llama", FKV_NO_PERIOD, NULL},
    {"qwen2", "qwen2", 0, NULL},
    {"qwen3", "qwen3", 0, NULL},
    {"qwen3_vl_text", "qwen3vl", 0, NULL},
    {"qwen2_moe", "qwen2moe", 0, NULL},
    {"qwen3_moe", "qwen3moe", 0, NULL},
    {"glm4_moe", "glm4moe", 0, NULL},
    {"gemma", "gemma", 0, NULL},
    {"gemma2", "gemma2", 0, NULL},
    {"gemma3_text", "gemma3", 0, GEMMA3_DEFAULTS},
    {"gemma4_text", "gemma4", 0, GEMMA4_DEFAULTS},
    {"gemma4_unified_text", "gemma4", 0, GEMMA4_UNIFIED_DEFAULTS},
    {"phi3", "phi3", 0, NULL},
    {"smollm3", "smollm3", 0, NULL},
    {"granite", "granite", 0, NULL},
    {"granitemoe", "granitemoe", 0, NULL},
    {"granitemoehybrid", "granitehybrid", 0, GRANITE_HYBRID_DEFAULTS},
    {"nemotron_h", "nemotron_h", 0, NEMOTRON_DEFAULTS},
    {"falcon_h1", "falcon-h1", 0, FALCON_H1_DEFAULTS},
    {"olmo2", "olmo2", 0, NULL},
    {"olmo3", "olmo2", 0, NULL},
    {"cohere", "command-r", 0, NULL},
    {"cohere2", "cohere2", 0, NULL},
    {"glm", "chatglm", 0, NULL},
    {"glm4", "glm4", 0, NULL},
    {"seed_oss", "seed_oss", 0, NULL},
    {"ernie4_5", "ernie4_5", 0, NULL},
    {"gpt_oss", "gpt-oss", 0, NULL},
    {"qwen2_vl", "qwen2vl", 0, NULL}, /* the model_type of configs that have no text_config */
    {"qwen2_5_vl", "qwen2vl", 0, NULL},
    {"qwen2_vl_text", "qwen2vl", 0, NULL},
    {"qwen2_5_vl_text", "qwen2vl", 0, NULL},
    {"qwen3_vl_moe_text", "qwen3vlmoe", 0, NULL},
    {"glm4v_text", "glm4", 0, NULL},
    {"glm4v_moe_text", "glm4moe", 0, NULL},
    {"llama4_text", "llama4", 0, NULL},
    {"minimax_m2", "minimax-m2", 0, NULL},
    {"hunyuan_v1_dense", "hunyuan-dense", 0, NULL},
    {"hunyuan_v1_moe", "hunyuan-moe", 0, NULL},
    {"ernie4_5_moe", "ernie4_5-moe", 0, NULL},
    {"exaone4", "exaone4", 0, NULL},
    {"mimo", "qwen2", 0, NULL},
    {"mimo_v2_flash", "mimo2", 0, NULL},
    {"bailing_moe", "bailingmoe", 0, NULL},
    {"bailing_moe_v2", "bailingmoe2", 0, NULL},
    {"dots1", "dots1", 0, NULL},
    {"apertus", "apertus", 0, NULL},
    {"starcoder2", "starcoder2", 0, NULL},
    {"olmoe", "olmoe", 0, NULL},
    {"phimoe", "phimoe", 0, NULL},
    {"solar_open", "glm4moe", 0, NULL},
    {"afmoe", "afmoe", 0, NULL},
    {"arcee", "arcee", 0, NULL},
    {"deepseek_v2", "deepseek2", 0, NULL},
    {"deepseek_v3", "deepseek2", 0, NULL},
    {"kimi_k2", "deepseek2", 0, NULL},
    {"glm4_moe_lite", "deepseek2", 0, NULL},
    {"minicpm3", "minicpm3", 0, NULL},
    {"mistral4", "mistral4", 0, NULL},
    {"kimi_linear", "kimi-linear", 0, NULL},
    {"lfm2", "lfm2", 0, LFM2_DEFAULTS},
    {"lfm2_moe", "lfm2moe", 0, LFM2_MOE_DEFAULTS},
    {"qwen3_next", "qwen3next", 0, DELTA_NET_DEFAULTS},
    {"qwen3_5_text", "qwen35", 0, DELTA_NET_DEFAULTS},
    {"qwen3_5_moe_text", "qwen35moe", 0, DELTA_NET_DEFAULTS},
};

typedef struct config_reader {
    json_t *root; /* config of the text model */
    const char *path;
    const hf_model_type *model;
    const fkv_architecture *architecture;
    fkv_hparams *h;
    fkv_layer_shape local; /* head shape of windowed layers; a field of 0 means the same value as in the other layers */
} config_reader;

static fkv_status find_model_type(config_reader *r) {
    const char *type = "";
    FKV_TRY(get_text(r->root, "model_type", r->path, &type));
    for (size_t i = 0; i < sizeof MODEL_TYPES / sizeof MODEL_TYPES[0]; i++)
        if (strcmp(type, MODEL_TYPES[i].type) == 0) r->model = &MODEL_TYPES[i];
    const char *why = fkv_architecture_refusal(type);
    FKV_REQUIRE(r->model != NULL || why == NULL, FKV_UNSUPPORTED, "%s: unsupported model_type '%s': %s", r->path, type, why);
    /* the list of names comes last, because long messages are truncated */
    FKV_REQUIRE(r->model != NULL, FKV_UNSUPPORTED, "unsupported model_type '%s' in %s; supported architectures are %s",
                fkv_show_text(type).text, r->path, fkv_architecture_names());
    r->architecture = fkv_architecture_find(r->model->architecture);
    FKV_ASSERT(r->architecture != NULL);
    r->h->features = r->architecture->features;
    if (r->model->window_period != 0) r->h->features.window_period = r->model->window_period;
    return FKV_OK;
}

static fkv_status add_defaults(const config_reader *r) {
    const char *text = r->model->defaults != NULL ? r->model->defaults : fkv_hf_traits_of(r->model->type)->defaults;
    if (text == NULL) return FKV_OK;
    json_t *defaults = json_loads(text, 0, NULL);
    /* rope_parameters is the newer name of rope_scaling */
    if (get_field(r->root, "rope_scaling") != NULL) (void)json_object_del(defaults, "rope_parameters");
    const int failed = defaults == NULL ? -1 : json_object_update_missing(r->root, defaults);
    json_decref(defaults);
    FKV_REQUIRE(failed == 0, FKV_NO_MEMORY, "%s: out of memory reading the defaults of %s", r->path, r->model->type);
    return FKV_OK;
}

/* Returns the value itself or, if it is a list whose elements are all equal, the first element. Returns NULL if the elements
 * differ. */
static json_t *uniform_value(json_t *value) {
    for (size_t i = 1; i < json_array_size(value); i++)
        if (!json_equal(json_array_get(value, i), json_array_get(value, 0))) return NULL;
    return json_array_size(value) > 0 ? json_array_get(value, 0) : value;
}

/* Copies fields to their common names. All values are read before any field is set, because the common name of one field may be
 * the original name of another. */
static fkv_status rename_fields(const config_reader *r) {
    const fkv_hf_traits *traits = fkv_hf_traits_of(r->model->type);
    if (traits->renames == NULL) return FKV_OK;
    json_t *renames = json_loads(traits->renames, 0, NULL);
    json_t *renamed = json_object();
    const char *from = NULL;
    json_t *to = NULL;
    int failed = renames == NULL || renamed == NULL ? -1 : 0;
    const char *uneven = NULL;
    json_object_foreach(renames, from, to) {
        json_t *value = json_object_get(r->root, from);
        if (value != NULL && traits->has_list_values) value = uniform_value(value);
        if (json_object_get(r->root, from) != NULL && value == NULL) uneven = from;
        if (failed == 0 && value != NULL) failed = json_object_set(renamed, json_string_value(to), value);
    }
    if (failed == 0) failed = json_object_update(r->root, renamed);
    fkv_status status = FKV_OK;
    if (failed != 0) status = fkv_fail(FKV_NO_MEMORY, "%s: out of memory reading the fields of %s", r->path, r->model->type);
    if (uneven != NULL)
        status = fkv_fail(FKV_UNSUPPORTED, "%s: %s differs between layers, which is not supported", r->path, uneven);
    json_decref(renames);
    json_decref(renamed);
    return status;
}

/* Returns whether the architecture supports a field that is rejected for most other architectures. Bidirectional attention among
 * image tokens is accepted, because images are not processed. */
static bool is_known_field(const config_reader *r, const char *key, const json_t *value) {
    if (fkv_hf_has_word(fkv_hf_traits_of(r->model->type)->fields, key)) return true;
    static const char *const of_glm[] = {"first_k_dense_replace", "n_shared_experts", "use_qk_norm"};
    for (size_t i = 0; strcmp(r->model->architecture, "glm4moe") == 0 && i < sizeof of_glm / sizeof of_glm[0]; i++)
        if (strcmp(key, of_glm[i]) == 0) return true;
    const bool has_shared_expert = strcmp(r->model->architecture, "qwen2moe") == 0 ||
                                   strcmp(r->model->architecture, "qwen3next") == 0 ||
                                   strcmp(r->model->architecture, "qwen35moe") == 0;
    if (has_shared_expert && strcmp(key, "shared_expert_intermediate_size") == 0) return true;
    if (r->h->features.gate_in_q && strcmp(key, "attn_output_gate") == 0) return json_is_true(value);
    if (strcmp(key, "use_qk_norm") == 0) return strcmp(r->model->architecture, "command-r") == 0 && json_is_boolean(value);
    if (strcmp(r->model->architecture, "gemma4") != 0) return false;
    const char *text = json_string_value(value);
    return strcmp(key, "num_kv_shared_layers") == 0 ||
           (strcmp(key, "use_bidirectional_attention") == 0 && text != NULL && strcmp(text, "vision") == 0);
}

/* Rejects unsupported values of options that only some model types have. */
static fkv_status reject_unsupported_options(const config_reader *r) {
    size_t n_options = 0;
    const fkv_hf_option *options = fkv_hf_options(&n_options);
    for (size_t i = 0; i < n_options; i++) {
        const json_t *value = get_field(r->root, options[i].key);
        if (value == NULL || !fkv_hf_has_word(options[i].types, r->model->type)) continue;
        char text[64];
        const size_t n = json_dumpb(value, text, sizeof text - 1, JSON_ENCODE_ANY | JSON_COMPACT);
        text[n < sizeof text ? n : 0] = 0;
        FKV_REQUIRE(strcmp(text, options[i].value) == 0, FKV_UNSUPPORTED, "%s: unsupported value of %s: expected %s", r->path,
                    options[i].key, options[i].value);
    }
    return FKV_OK;
}

/* Rejects configs in which fields of unsupported features are set. */
static fkv_status reject_unsupported_fields(const config_reader *r) {
    static const struct {
        const char *key;
        bool is_flag; /* true if the field is a boolean that must be false; otherwise the field must be 0 or an empty list */
    } fields[] = {{"use_qk_norm", true},       {"add_cross_attention", true},    {"use_bidirectional_attention", true},
                  {"attn_output_gate", true},  {"kv_lora_rank", false},          {"q_lora_rank", false},
                  {"mlp_only_layers", false},  {"first_k_dense_replace", false}, {"num_kv_shared_layers", false},
                  {"n_shared_experts", false}, {"attention_chunk_size", false},  {"shared_expert_intermediate_size", false}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const json_t *value = get_field(r->root, fields[i].key);
        if (is_known_field(r, fields[i].key, value)) continue;
        bool unset = value == NULL || json_is_false(value) || (json_is_number(value) && json_number_value(value) == 0) ||
                     (json_is_array(value) && json_array_size(value) == 0);
        FKV_REQUIRE(unset, FKV_UNSUPPORTED, "%s: unsupported field %s", r->path, fields[i].key);
    }
    const bool is_command_r = strcmp(r->model->architecture, "command-r") == 0;
    if (is_command_r && json_is_true(get_field(r->root, "use_qk_norm"))) r->h->features.qk_norm = FKV_QK_NORM_OWN_HEADS;
    uint32_t step = 1;
    FKV_TRY(get_u32(r->root, "decoder_sparse_step", r->path, &step));
    FKV_REQUIRE(step == 1 || is_known_field(r, "decoder_sparse_step", NULL), FKV_UNSUPPORTED,
                "%s: unsupported decoder_sparse_step %u: expected 1", r->path, step);
    return reject_unsupported_options(r);
}

/* For architectures in which attention biases are optional, reads the field that states whether the model has them:
 * attention_bias, or qkv_bias in Qwen2-MoE. */
static fkv_status read_biases(const config_reader *r) {
    static const struct {
        const char *type;
        const char *key;
        bool is_default;
    } optional[] = {{"glm", "attention_bias", true},
                    {"glm4_moe", "attention_bias", false},
                    {"glm4v_moe_text", "attention_bias", true},
                    {"mimo_v2_flash", "attention_bias", false},
                    {"solar_open", "attention_bias", false},
                    {"gpt_oss", "attention_bias", true},
                    {"qwen2_moe", "qkv_bias", true}};
    for (size_t i = 0; i < sizeof optional / sizeof optional[0]; i++) {
        if (strcmp(r->model->type, optional[i].type) != 0) continue;
        r->h->features.qkv_bias = optional[i].is_default;
        return get_bool(r->root, optional[i].key, r->path, &r->h->features.qkv_bias);
    }
    return FKV_OK;
}

static fkv_status read_activation(const config_reader *r) {
    static const char *const names[] = {[FKV_SILU] = "silu",
                                        [FKV_GELU_TANH] = "gelu_pytorch_tanh",
                                        [FKV_SWIGLU_CLAMPED] = "silu",
                                        [FKV_RELU2] = "relu2",
                                        [FKV_XIELU] = "xielu"};
    const char *word = NULL;
    const char *wanted = names[r->h->features.activation];
    FKV_TRY(get_text(r->root, "hidden_act", r->path, &word));
    FKV_TRY(get_text(r->root, "hidden_activation", r->path, &word)); /* Gemma's name for hidden_act */
    bool is_old_gemma = word != NULL && strcmp(word, "gelu") == 0 && strcmp(r->model->type, "gemma") == 0;
    FKV_REQUIRE(word == NULL || strcmp(word, wanted) == 0 || is_old_gemma, FKV_UNSUPPORTED,
                "%s: unsupported activation '%s' for model_type %s: expected %s", r->path,
                fkv_show_text(word == NULL ? "" : word).text, r->model->type, wanted);
    FKV_TRY(get_f32(r->root, "swiglu_alpha", r->path, &r->h->swiglu_alpha));
    return get_f32(r->root, "swiglu_limit", r->path, &r->h->swiglu_limit);
}

/* ---- RoPE ---- */

/* Reads one factor per RoPE pair into memory that lives as long as the weights. */
static fkv_status read_rope_factors(fkv_weights *weights, const json_t *rope, const char *key, const char *path, uint32_t *n,
                                    const float **out) {
    const json_t *list = get_field(rope, key);
    FKV_REQUIRE(json_is_array(list) && json_array_size(list) > 0 && json_array_size(list) <= FKV_MAX_HEAD_DIM / 2,
                FKV_FILE_FORMAT, "%s: longrope requires %s to be a list of numbers", path, key);
    *n = (uint32_t)json_array_size(list);
    float *numbers = fkv_weights_keep(weights, *n * sizeof *numbers);
    FKV_REQUIRE(numbers != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %u RoPE factors", path, *n);
    for (uint32_t i = 0; i < *n; i++) {
        const json_t *number = json_array_get(list, i);
        numbers[i] = (float)json_number_value(number);
        FKV_REQUIRE(json_is_number(number) && isfinite(numbers[i]) && numbers[i] > 0, FKV_FILE_FORMAT,
                    "%s: %s must contain only numbers above 0", path, key);
    }
    *out = numbers;
    return FKV_OK;
}

/* Reads proportional RoPE: the leading fraction partial_rotary_factor of the pairs rotates at the usual frequencies, and the
 * other pairs do not rotate. As in GGUF, pairs that rotate have a frequency divisor of 1, and pairs that do not rotate have a
 * divisor of 1e30. */
static fkv_status read_proportional_rope(fkv_weights *weights, const json_t *object, const char *path, fkv_rope *rope) {
    const uint32_t n = weights->hparams.head_dim / 2;
    float rotary_share = 1;
    FKV_TRY(get_f32(object, "partial_rotary_factor", path, &rotary_share));
    FKV_TRY(get_f32(object, "factor", path, &rope->factor));
    FKV_REQUIRE(rotary_share > 0 && rotary_share <= 1 && rope->factor > 0 && n > 0 && n <= FKV_MAX_HEAD_DIM / 2, FKV_FILE_FORMAT,
                "%s: invalid proportional RoPE: partial_rotary_factor %g, factor %g", path, (double)rotary_share,
                (double)rope->factor);
    float *factors = fkv_weights_keep(weights, n * sizeof *factors);
    FKV_REQUIRE(factors != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %u RoPE factors", path, n);
    for (uint32_t i = 0; i < n; i++) factors[i] = i < (uint32_t)((double)rotary_share * n) ? 1.0f : 1e30f;
    rope->n_factors = n;
    rope->short_factors = rope->long_factors = factors;
    return FKV_OK;
}

static fkv_status read_rope_scaling(fkv_weights *weights, const json_t *object, const char *type, const char *path,
                                    fkv_rope *rope) {
    static const struct {
        const char *type;
        fkv_rope_scaling scaling;
    } known[] = {{"linear", FKV_ROPE_LINEAR},
                 {"llama3", FKV_ROPE_LLAMA3},
                 {"yarn", FKV_ROPE_YARN},
                 {"longrope", FKV_ROPE_LONG},
                 {"su", FKV_ROPE_LONG}};
    size_t i = 0;
    while (i < sizeof known / sizeof known[0] && strcmp(type, known[i].type) != 0) i++;
    FKV_REQUIRE(i < sizeof known / sizeof known[0], FKV_UNSUPPORTED,
                "%s: unsupported RoPE scaling '%s': expected linear, llama3, yarn or longrope", path, fkv_show_text(type).text);
    rope->scaling = known[i].scaling;
    bool truncate = true;
    float factor = 0;
    uint32_t n_short = 0;
    const struct {
        const char *key;
        float *out;
    } keys[] = {{"factor", &factor},
                {"attention_factor", &rope->attention_factor},
                {"low_freq_factor", &rope->low_freq},
                {"high_freq_factor", &rope->high_freq},
                {"beta_fast", &rope->beta_fast},
                {"beta_slow", &rope->beta_slow},
                {"mscale", &rope->mscale},
                {"mscale_all_dim", &rope->mscale_all}};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) FKV_TRY(get_f32(object, keys[k].key, path, keys[k].out));
    FKV_TRY(get_u32(object, "original_max_position_embeddings", path, &rope->original_context));
    FKV_TRY(get_bool(object, "truncate", path, &truncate));
    rope->yarn_unrounded = !truncate;
    if (rope->scaling == FKV_ROPE_LONG) {
        FKV_TRY(read_rope_factors(weights, object, "short_factor", path, &n_short, &rope->short_factors));
        FKV_TRY(read_rope_factors(weights, object, "long_factor", path, &rope->n_factors, &rope->long_factors));
        FKV_REQUIRE(n_short == rope->n_factors, FKV_FILE_FORMAT, "%s: short_factor and long_factor differ in length", path);
    }
    FKV_REQUIRE(factor > 0 || rope->scaling == FKV_ROPE_LONG || rope->scaling == FKV_ROPE_YARN, FKV_FILE_FORMAT,
                "%s: %s RoPE scaling has an invalid factor of %g", path, type, (double)factor);
    if (get_field(object, "short_mscale") != NULL) {
        float long_mscale = 0;
        FKV_TRY(get_f32(object, "short_mscale", path, &rope->attention_factor));
        FKV_TRY(get_f32(object, "long_mscale", path, &long_mscale));
        FKV_REQUIRE(long_mscale == rope->attention_factor, FKV_UNSUPPORTED,
                    "%s: different values of short_mscale and long_mscale are not supported", path);
    }
    rope->factor = factor; /* if the factor is 0, read_rope() derives it from the context lengths */
    return FKV_OK;
}

/* Returns whether the architecture (Hunyuan) supports RoPE scaling with a fixed factor alpha. */
static bool has_alpha_rope(const fkv_weights *weights) { return strncmp(weights->architecture, "hunyuan", 7) == 0; }

/* Scales the RoPE base by alpha^(dim / (dim - 2)), if the config states alpha. */
static fkv_status read_rope_alpha(const config_reader *r, const fkv_weights *weights) {
    fkv_hparams *h = r->h;
    const json_t *object = get_field(r->root, "rope_parameters");
    if (object == NULL) object = get_field(r->root, "rope_scaling");
    float alpha = 0;
    const char *type = "";
    if (!has_alpha_rope(weights) || object == NULL || h->head_dim <= 2) return FKV_OK;
    FKV_TRY(get_text(object, "type", r->path, &type));
    FKV_TRY(get_text(object, "rope_type", r->path, &type));
    FKV_TRY(get_f32(object, "alpha", r->path, &alpha));
    if (strcmp(type, "dynamic") != 0 || !(alpha > 0)) return FKV_OK;
    const float base = h->rope.base != 0 ? h->rope.base : 10000.0f;
    h->rope.base = (float)((double)base * pow(alpha, (double)h->head_dim / (double)(h->head_dim - 2)));
    return FKV_OK;
}

/* Reads a RoPE object: {"rope_type": ..., "factor": ..., "rope_theta": ...}. Old files use "type" for "rope_type". */
static fkv_status read_rope_object(fkv_weights *weights, const json_t *object, const char *path, fkv_rope *rope, float *rotary) {
    const char *type = "default";
    FKV_REQUIRE(json_is_object(object), FKV_FILE_FORMAT, "%s: the RoPE scaling is not an object", path);
    FKV_TRY(get_text(object, "type", path, &type));
    FKV_TRY(get_text(object, "rope_type", path, &type));
    FKV_TRY(get_f32(object, "rope_theta", path, &rope->base));
    if (strcmp(type, "proportional") == 0) return read_proportional_rope(weights, object, path, rope);
    FKV_TRY(get_f32(object, "partial_rotary_factor", path, rotary));
    FKV_TRY(get_f32(object, "llama_4_scaling_beta", path, &weights->hparams.temperature));
    /* mrope: the three positions of a text token are equal, so the result is the same as with plain RoPE */
    if (strcmp(type, "default") == 0 || strcmp(type, "mrope") == 0) return FKV_OK;
    if (strcmp(type, "dynamic") == 0 && get_field(object, "alpha") != NULL && has_alpha_rope(weights))
        return FKV_OK; /* read_rope() scales the base */
    return read_rope_scaling(weights, object, type, path, rope);
}

/* Reads rope_theta, rope_scaling and rope_local_base_freq, or the newer rope_parameters, which may have one object per layer
 * type. */
static fkv_status read_ropes(const config_reader *r, fkv_weights *weights, float *rotary) {
    const json_t *scaling = get_field(r->root, "rope_scaling");
    const json_t *parameters = get_field(r->root, "rope_parameters");
    fkv_hparams *h = r->h;
    FKV_TRY(get_f32(r->root, "rope_theta", r->path, &h->rope.base));
    FKV_TRY(get_f32(r->root, "partial_rotary_factor", r->path, rotary));
    if (h->features.separate_local_rope) FKV_TRY(get_f32(r->root, "rope_local_base_freq", r->path, &h->local_rope.base));
    if (scaling != NULL) FKV_TRY(read_rope_object(weights, scaling, r->path, &h->rope, rotary));
    if (parameters == NULL) return FKV_OK;
    const json_t *full = get_field(parameters, "full_attention");
    const json_t *local = get_field(parameters, "sliding_attention");
    if (full == NULL) return read_rope_object(weights, parameters, r->path, &h->rope, rotary);
    FKV_REQUIRE(h->features.separate_local_rope, FKV_UNSUPPORTED,
                "%s: rope_parameters per layer type are not supported for model_type %s", r->path, r->model->type);
    FKV_TRY(read_rope_object(weights, full, r->path, &h->rope, rotary));
    if (local == NULL) return FKV_OK;
    const float of_full = *rotary;
    FKV_TRY(read_rope_object(weights, local, r->path, &h->local_rope, rotary));
    FKV_REQUIRE(*rotary == of_full, FKV_UNSUPPORTED,
                "%s: different values of partial_rotary_factor per layer type are not supported", r->path);
    FKV_REQUIRE(h->local_rope.scaling == FKV_ROPE_LINEAR && h->local_rope.factor == 1 && h->local_rope.n_factors == 0,
                FKV_UNSUPPORTED, "%s: scaled RoPE in windowed layers is not supported", r->path);
    return FKV_OK;
}

/* Validates partial_rotary_factor. Partial rotation of a head is supported for GLM, phi3, models with delta nets or latent
 * attention, and model types with the trait rotates_partly. For other model types, transformers ignores partial_rotary_factor if
 * RoPE is not scaled, and so does this function. It rejects other models with scaled RoPE and a factor other than 1, which
 * transformers cannot run either. */
static fkv_status check_partial_rotary(const config_reader *r, float *rotary) {
    const bool is_supported = strncmp(r->model->type, "glm", 3) == 0 || strcmp(r->model->type, "phi3") == 0 ||
                              fkv_hf_traits_of(r->model->type)->rotates_partly || r->h->features.recurrence == FKV_DELTA_NET ||
                              fkv_hf_is_latent(r->model->type); /* qk_rope_head_dim states the number of rotated dimensions */
    FKV_REQUIRE(*rotary > 0 && *rotary <= 1, FKV_FILE_FORMAT,
                "%s: invalid partial_rotary_factor %g: expected a value greater than 0 and at most 1", r->path, (double)*rotary);
    if (is_supported) return FKV_OK;
    const bool is_scaled = r->h->rope.scaling != FKV_ROPE_LINEAR || r->h->rope.factor != 1;
    FKV_REQUIRE(*rotary == 1 || !is_scaled, FKV_UNSUPPORTED,
                "%s: partial_rotary_factor %g with scaled RoPE is not supported for model_type %s", r->path, (double)*rotary,
                r->model->type);
    const bool is_solar =
        strcmp(r->model->type, "solar_open") == 0; /* transformers cannot run solar_open with partial rotation */
    FKV_REQUIRE(*rotary == 1 || !is_solar, FKV_UNSUPPORTED, "%s: partial_rotary_factor %g is not supported for model_type %s",
                r->path, (double)*rotary, r->model->type);
    *rotary = 1;
    return FKV_OK;
}

static fkv_status read_rope(const config_reader *r, fkv_weights *weights) {
    fkv_hparams *h = r->h;
    /* `rotary` is the fraction of each head's dimensions that RoPE rotates; the default values are those of transformers */
    float rotary = strncmp(r->model->type, "glm", 3) == 0 ? 0.5f : r->h->features.recurrence == FKV_DELTA_NET ? 0.25f : 1.0f;
    uint32_t rotary_dim = 0;
    FKV_TRY(get_u32(r->root, "rotary_dim", r->path, &rotary_dim));
    if (rotary_dim != 0 && h->head_dim != 0) rotary = (float)rotary_dim / (float)h->head_dim;
    FKV_TRY(read_ropes(r, weights, &rotary));
    FKV_TRY(check_partial_rotary(r, &rotary));
    FKV_TRY(read_rope_alpha(r, weights));
    h->rope.dim = (uint32_t)((double)h->head_dim * (double)rotary);
    if (r->local.head_dim != 0) h->local_rope.dim = (uint32_t)((double)r->local.head_dim * (double)rotary);
    /* phi3 stores the original context length at the top level of the config */
    FKV_TRY(get_u32(r->root, "original_max_position_embeddings", r->path, &h->rope.original_context));
    uint32_t original = h->rope.original_context != 0 ? h->rope.original_context : h->context;
    /* phi3 configs omit the RoPE factor, which is the ratio of the context length to the original context length. */
    if (h->rope.factor == 0) h->rope.factor = original > 0 ? (float)h->context / (float)original : 1;
    if (fkv_hf_is_latent(r->model->type)) FKV_TRY(get_u32(r->root, "qk_rope_head_dim", r->path, &h->rope.dim));
    FKV_REQUIRE(h->rope.n_factors == 0 || h->rope.n_factors == h->rope.dim / 2, FKV_FILE_FORMAT,
                "%s: the config has %u RoPE factors instead of %u (one per pair of rotated channels)", r->path, h->rope.n_factors,
                h->rope.dim / 2);
    h->temperature_context = original;
    h->rope_interleaved = r->architecture->hf_interleaved;
    return FKV_OK;
}

/* ---- layers ---- */

/* Returns the word that marks a recurrent layer in layer_types, or NULL if the architecture has no recurrent layers. */
static const char *recurrent_layer_type(const config_reader *r) {
    switch (r->h->features.recurrence) {
    case FKV_SHORT_CONV: return "conv";
    case FKV_DELTA_NET:
    case FKV_KDA: return "linear_attention";
    case FKV_MAMBA2: return "mamba";
    case FKV_RECURRENCE_NONE: break;
    }
    return NULL;
}

static fkv_status read_layer_types(const config_reader *r, const json_t *types) {
    fkv_hparams *h = r->h;
    const char *recurrent = recurrent_layer_type(r);
    FKV_REQUIRE(json_is_array(types) && json_array_size(types) == h->n_layers && h->n_layers <= FKV_MAX_LAYERS, FKV_FILE_FORMAT,
                "%s: layer_types must have one entry for each of %u layers", r->path, h->n_layers);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        bool is_full = type != NULL && (strcmp(type, "full_attention") == 0 || strcmp(type, "attention") == 0);
        /* contexts are limited to the first chunk, where chunked attention equals full attention */
        is_full = is_full || (h->attention_chunk != 0 && type != NULL && strcmp(type, "chunked_attention") == 0);
        bool is_windowed = type != NULL && strcmp(type, "sliding_attention") == 0;
        /* transformers 5 writes linear_attention for all kinds of recurrent layers */
        bool is_recurrent =
            type != NULL && recurrent != NULL && (strcmp(type, recurrent) == 0 || strcmp(type, "linear_attention") == 0);
        FKV_REQUIRE(is_full || is_windowed || is_recurrent, FKV_UNSUPPORTED,
                    "%s: layer_types: layer %u has unsupported type '%s': expected full_attention or %s", r->path, i,
                    fkv_show_text(type == NULL ? "" : type).text, recurrent != NULL ? recurrent : "sliding_attention");
        FKV_REQUIRE(!is_windowed || h->window != 0, FKV_FILE_FORMAT,
                    "%s: layer_types: layer %u has sliding attention, but sliding_window is not set", r->path, i);
        h->layers[i] = (uint8_t)((h->layers[i] & ~FKV_LAYER_WINDOW) | (is_windowed ? FKV_LAYER_WINDOW : 0) |
                                 (is_recurrent ? FKV_LAYER_RECURRENT : 0));
    }
    return FKV_OK;
}

/* Reads the sliding window of Qwen models. If use_sliding_window is true, all layers after the first max_window_layers layers
 * have the window. */
static fkv_status read_switched_window(const config_reader *r) {
    fkv_hparams *h = r->h;
    bool is_used = false;
    uint32_t first = 0;
    FKV_TRY(get_bool(r->root, "use_sliding_window", r->path, &is_used));
    if (!is_used) {
        h->window = 0;
        return FKV_OK;
    }
    FKV_TRY(get_u32(r->root, "max_window_layers", r->path, &first));
    for (uint32_t i = first; i < h->n_layers && i < FKV_MAX_LAYERS; i++) h->layers[i] |= FKV_LAYER_WINDOW;
    return FKV_OK;
}

static fkv_status read_no_rope(const config_reader *r) {
    fkv_hparams *h = r->h;
    const json_t *list = get_field(r->root, "no_rope_layers");
    FKV_TRY(get_u32(r->root, "no_rope_layer_interval", r->path, &h->features.no_rope_period));
    fkv_architecture_set_layers(h);
    if (list == NULL || (json_is_array(list) && json_array_size(list) == 0)) return FKV_OK;
    FKV_REQUIRE(json_is_array(list) && json_array_size(list) >= h->n_layers && h->n_layers <= FKV_MAX_LAYERS, FKV_FILE_FORMAT,
                "%s: no_rope_layers must have one entry for each of %u layers", r->path, h->n_layers);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const json_t *rotates = json_array_get(list, i);
        FKV_REQUIRE(json_is_integer(rotates) && json_integer_value(rotates) >= 0 && json_integer_value(rotates) <= 1,
                    FKV_FILE_FORMAT, "%s: no_rope_layers must contain only 0 and 1", r->path);
        h->layers[i] =
            (uint8_t)((h->layers[i] & ~FKV_LAYER_NO_ROPE) | (json_integer_value(rotates) != 0 ? 0 : FKV_LAYER_NO_ROPE));
    }
    return FKV_OK;
}

/* Reads sliding_window_pattern: a number n, or for EXAONE 4 a string of n - 1 letters L (windowed) and one letter G (full
 * attention). Every n-th layer has full attention. layer_types, if present, overrides the pattern. */
static fkv_status read_window_pattern(const config_reader *r) {
    const char *pattern = json_string_value(get_field(r->root, "sliding_window_pattern"));
    if (pattern == NULL) return get_u32(r->root, "sliding_window_pattern", r->path, &r->h->features.window_period);
    const size_t n_local = strspn(pattern, "L");
    const bool is_known = strcmp(pattern + n_local, "G") == 0 && n_local < FKV_MAX_LAYERS;
    FKV_REQUIRE(is_known || get_field(r->root, "layer_types") != NULL, FKV_UNSUPPORTED,
                "%s: unsupported sliding_window_pattern '%s': expected a number or a string such as LLLG", r->path,
                fkv_show_text(pattern).text);
    r->h->features.window_period = (uint32_t)n_local + 1;
    return FKV_OK;
}

static fkv_status read_layer_kinds(const config_reader *r) {
    fkv_hparams *h = r->h;
    const json_t *types = get_field(r->root, "layer_types");
    const char *position = "rope";
    FKV_TRY(get_u32(r->root, "sliding_window", r->path, &h->window));
    FKV_TRY(get_u32(r->root, "_sliding_window_pattern", r->path, &h->features.window_period));
    FKV_TRY(read_window_pattern(r));
    if (strcmp(r->model->type, "olmo2") == 0 || strcmp(r->model->type, "llama") == 0)
        h->window = 0; /* transformers ignores sliding_window for these models */
    FKV_TRY(read_no_rope(r));
    bool is_switched = get_field(r->root, "use_sliding_window") != NULL || strncmp(r->model->type, "qwen", 4) == 0;
    if (is_switched) FKV_TRY(read_switched_window(r));
    uint32_t first_windowed = h->n_layers;
    FKV_TRY(get_u32(r->root, "max_window_layers", r->path, &first_windowed));
    for (uint32_t i = first_windowed; strcmp(r->model->type, "dots1") == 0 && i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        h->layers[i] |= h->window != 0 ? FKV_LAYER_WINDOW : 0;
    if (types != NULL) FKV_TRY(read_layer_types(r, types));
    FKV_TRY(fkv_hf_read_recurrence(r->root, r->path, h));
    FKV_TRY(get_text(r->root, "position_embedding_type", r->path, &position));
    const bool is_nope = h->features.recurrence == FKV_MAMBA2 && !h->features.parallel_mixers &&
                         (strcmp(position, "nope") == 0 || get_field(r->root, "position_embedding_type") == NULL);
    FKV_REQUIRE(is_nope || strcmp(position, "rope") == 0, FKV_UNSUPPORTED,
                "%s: unsupported position_embedding_type '%s': expected rope", r->path, fkv_show_text(position).text);
    for (uint32_t i = 0; is_nope && i < h->n_layers && i < FKV_MAX_LAYERS; i++) h->layers[i] |= FKV_LAYER_NO_ROPE;
    return FKV_OK;
}

static void set_dense_layer(fkv_hparams *h, uint32_t layer, bool is_dense) {
    if (is_dense && layer < FKV_MAX_LAYERS) h->layers[layer] |= FKV_LAYER_DENSE;
}

/* Reads a list of layer indices. If lists_dense is true, the listed layers are those without experts; otherwise, they are those
 * with experts. */
static fkv_status read_layer_list(const config_reader *r, const char *key, bool lists_dense) {
    const json_t *list = get_field(r->root, key);
    const size_t n = json_array_size(list);
    if (list == NULL) return FKV_OK;
    FKV_REQUIRE(json_is_array(list) && n <= FKV_MAX_LAYERS, FKV_FILE_FORMAT, "%s: %s must be a list of layers", r->path, key);
    for (uint32_t i = 0; i < r->h->n_layers && i < FKV_MAX_LAYERS; i++) {
        bool is_listed = false;
        for (size_t k = 0; k < n; k++) {
            FKV_REQUIRE(json_is_integer(json_array_get(list, k)), FKV_FILE_FORMAT, "%s: %s must be a list of layers", r->path,
                        key);
            is_listed = is_listed || json_integer_value(json_array_get(list, k)) == (json_int_t)i;
        }
        set_dense_layer(r->h, i, is_listed == lists_dense);
    }
    return FKV_OK;
}

/* Reads the list mlp_layer_types, in which the entry of a layer is "dense" or "sparse" (with experts). */
static fkv_status read_mlp_types(const config_reader *r) {
    const json_t *types = get_field(r->root, "mlp_layer_types");
    if (types == NULL) return FKV_OK;
    FKV_REQUIRE(json_is_array(types) && json_array_size(types) >= r->h->n_layers, FKV_FILE_FORMAT,
                "%s: mlp_layer_types must have one entry for each of %u layers", r->path, r->h->n_layers);
    for (uint32_t i = 0; i < r->h->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        FKV_REQUIRE(type != NULL && (strcmp(type, "dense") == 0 || strcmp(type, "sparse") == 0), FKV_UNSUPPORTED,
                    "%s: mlp_layer_types: layer %u has unsupported type '%s': expected dense or sparse", r->path, i,
                    fkv_show_text(type == NULL ? "" : type).text);
        set_dense_layer(r->h, i, strcmp(type, "dense") == 0);
    }
    return FKV_OK;
}

/* Marks the layers without experts. Depending on the model type, experts are in every n-th layer, in a range of layers, or in the
 * layers of a list. */
static fkv_status read_dense_layers(const config_reader *r) {
    fkv_hparams *h = r->h;
    uint32_t step = 1;
    uint32_t first = 0;
    uint32_t end = h->n_layers;
    if (h->n_experts == 0) return FKV_OK;
    FKV_TRY(get_u32(r->root, "decoder_sparse_step", r->path, &step));
    if (strcmp(r->model->type, "ernie4_5_moe") == 0) {
        const json_t *last = get_field(r->root, "moe_layer_end_index"); /* -1 means the last layer */
        FKV_TRY(get_u32(r->root, "moe_layer_interval", r->path, &step));
        FKV_TRY(get_u32(r->root, "moe_layer_start_index", r->path, &first));
        if (!json_is_integer(last) || json_integer_value(last) != -1) {
            end = h->n_layers - (h->n_layers > 0);
            FKV_TRY(get_u32(r->root, "moe_layer_end_index", r->path, &end));
            end += end < UINT32_MAX;
        }
    }
    const bool is_listed = strcmp(r->model->type, "llama4_text") == 0 && get_field(r->root, "moe_layers") != NULL;
    if (is_listed) FKV_TRY(read_layer_list(r, "moe_layers", false));
    if (strcmp(r->model->type, "llama4_text") == 0 && !is_listed)
        FKV_TRY(get_u32(r->root, "interleave_moe_layer_step", r->path, &step));
    FKV_REQUIRE(step > 0, FKV_FILE_FORMAT, "%s: the interval between layers with experts is 0, expected at least 1", r->path);
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        set_dense_layer(h, i, (i + 1) % step != 0 || i < first || i >= end);
    FKV_TRY(read_layer_list(r, "mlp_only_layers", true));
    return read_mlp_types(r);
}

/* Reads the attention parameters of Llama 4: chunk size, QK norms, and the query temperature of layers without RoPE. */
static fkv_status read_llama4(const config_reader *r) {
    fkv_hparams *h = r->h;
    bool qk_norm = false;
    const json_t *tuning = get_field(r->root, "attn_temperature_tuning");
    if (strcmp(r->model->type, "llama4_text") != 0) return FKV_OK;
    FKV_TRY(get_u32(r->root, "attention_chunk_size", r->path, &h->attention_chunk));
    FKV_TRY(get_bool(r->root, "use_qk_norm", r->path, &qk_norm));
    if (qk_norm) h->features.qk_norm = FKV_QK_NORM_UNWEIGHTED;
    if (!json_is_true(tuning) && !(json_is_number(tuning) && json_number_value(tuning) != 0)) return FKV_OK;
    h->temperature_of_no_rope = true;
    FKV_TRY(get_f32(r->root, "attn_scale", r->path, &h->temperature));
    return get_u32(r->root, "floor_scale", r->path, &h->temperature_context);
}

/* Validates per_layer_config. All full-attention layers must have the same head shape, and windowed layers must have the head
 * shape that the usual fields state. */
static fkv_status check_per_layer_config(const config_reader *r) {
    const fkv_hparams *h = r->h;
    json_t *list = json_object_get(r->root, "per_layer_config");
    bool is_same = h->n_kv_heads == r->local.n_kv_heads && h->head_dim == r->local.head_dim;
    for (uint32_t i = 0; json_is_object(list) && i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        char key[16];
        uint32_t n_kv_heads = r->local.n_kv_heads;
        uint32_t head_dim = r->local.head_dim;
        (void)snprintf(key, sizeof key, "%u", i);
        const json_t *entry = get_field(list, key);
        bool is_windowed = fkv_architecture_window(h, i) != 0;
        FKV_TRY(get_u32(entry, "num_key_value_heads", r->path, &n_kv_heads));
        FKV_TRY(get_u32(entry, "head_dim", r->path, &head_dim));
        size_t n_known =
            (get_field(entry, "num_key_value_heads") != NULL ? 1u : 0u) + (get_field(entry, "head_dim") != NULL ? 1u : 0u);
        bool is_global = n_kv_heads == h->n_kv_heads && head_dim == h->head_dim;
        FKV_REQUIRE(
            (is_windowed ? entry == NULL || is_same : is_global) && json_object_size(entry) == n_known, FKV_UNSUPPORTED,
            "%s: unsupported per_layer_config of layer %u: it may contain only num_key_value_heads and head_dim, and both must be "
            "equal in all layers of the same type",
            r->path, i);
    }
    return FKV_OK;
}

/* Sets the shapes of windowed layers, of layers that attend to another layer's keys and values, and of layers with a double-width
 * feed-forward block. */
static fkv_status read_layer_shapes(const config_reader *r) {
    fkv_hparams *h = r->h;
    bool wide = false;
    /* the last layer of Gemma 4 has full attention, regardless of layer_types */
    bool last_is_full = strcmp(r->model->architecture, "gemma4") == 0;
    if (last_is_full && h->n_layers > 0 && h->n_layers <= FKV_MAX_LAYERS)
        h->layers[h->n_layers - 1] &= (uint8_t)~FKV_LAYER_WINDOW;
    FKV_TRY(check_per_layer_config(r));
    FKV_TRY(get_u32(r->root, "num_kv_shared_layers", r->path, &h->n_shared_kv_layers));
    FKV_TRY(get_u32(r->root, "hidden_size_per_layer_input", r->path, &h->input_dim));
    FKV_TRY(get_bool(r->root, "use_double_wide_mlp", r->path, &wide));
    FKV_REQUIRE(!wide || h->ffn_dim <= UINT32_MAX / 2, FKV_FILE_FORMAT, "%s: intermediate_size is %u, which is too large",
                r->path, h->ffn_dim);
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        if (fkv_architecture_window(h, i) != 0) h->shapes[i] = r->local;
        if (wide && i >= fkv_architecture_n_kv_layers(h)) h->shapes[i].ffn_dim = 2 * h->ffn_dim;
    }
    return FKV_OK;
}

/* ---- experts and scalars ---- */

/* Reads shared experts, dense layers and expert groups. */
static fkv_status read_shared_experts(const config_reader *r) {
    fkv_hparams *h = r->h;
    uint32_t n_shared = 0;
    bool qk_norm = false;
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {{"shared_expert_intermediate_size", &h->shared_dim},
                {"first_k_dense_replace", &h->n_dense},
                {"num_dense_layers", &h->n_dense},
                {"n_group", &h->n_expert_groups},
                {"topk_group", &h->n_expert_groups_used},
                {"num_nextn_predict_layers", &h->n_next},
                {"n_shared_experts", &n_shared}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) FKV_TRY(get_u32(r->root, keys[i].key, r->path, keys[i].out));
    FKV_TRY(get_f32(r->root, "routed_scaling_factor", r->path, &h->experts_scale));
    FKV_TRY(get_bool(r->root, "use_qk_norm", r->path, &qk_norm));
    if (qk_norm && strcmp(r->model->architecture, "glm4moe") == 0) h->features.qk_norm = FKV_QK_NORM_HEADS;
    FKV_REQUIRE(n_shared == 0 || h->expert_dim <= UINT32_MAX / n_shared, FKV_FILE_FORMAT,
                "%s: n_shared_experts is %u, which is too large", r->path, n_shared);
    if (n_shared != 0) h->shared_dim = n_shared * h->expert_dim;
    const bool is_bailing = strncmp(r->model->architecture, "bailing", 7) == 0;
    if (is_bailing && get_field(r->root, "use_qk_norm") != NULL) h->features.qk_norm = qk_norm ? FKV_QK_NORM_HEADS : FKV_QK_PLAIN;
    if (fkv_hf_traits_of(r->model->type)->has_shared_expert) h->shared_dim = h->expert_dim != 0 ? h->expert_dim : h->ffn_dim;
    return FKV_OK;
}

static fkv_status read_experts(const config_reader *r) {
    fkv_hparams *h = r->h;
    FKV_TRY(get_u32(r->root, "n_routed_experts", r->path, &h->n_experts));
    FKV_TRY(get_u32(r->root, "num_local_experts", r->path, &h->n_experts));
    FKV_TRY(get_u32(r->root, "num_experts", r->path, &h->n_experts));
    FKV_TRY(get_u32(r->root, "num_experts_per_tok", r->path, &h->n_experts_used));
    FKV_TRY(get_u32(r->root, "top_k_experts", r->path, &h->n_experts_used)); /* Gemma's name for num_experts_per_tok */
    bool is_mixture = true;
    FKV_TRY(get_bool(r->root, "enable_moe_block", r->path, &is_mixture));
    if (!is_mixture) h->n_experts = h->n_experts_used = 0;
    FKV_TRY(get_bool(r->root, "norm_topk_prob", r->path, &h->features.norm_experts));
    if (h->n_experts != 0) FKV_TRY(get_u32(r->root, "moe_intermediate_size", r->path, &h->expert_dim));
    FKV_TRY(read_shared_experts(r));
    FKV_TRY(fkv_hf_read_nemotron_experts(r->root, r->path, h));
    if (strcmp(r->model->type, "granitemoehybrid") != 0) return FKV_OK;
    if (h->n_experts == 0) {
        h->n_experts_used = 0;
        return get_u32(r->root, "shared_intermediate_size", r->path, &h->ffn_dim);
    }
    h->expert_dim = h->ffn_dim;
    return get_u32(r->root, "shared_intermediate_size", r->path, &h->shared_dim);
}

static fkv_status read_scalars(const config_reader *r) {
    fkv_hparams *h = r->h;
    float scalar = 0;
    const struct {
        const char *key;
        float *out;
    } keys[] = {{"rms_norm_eps", &h->norm_eps},
                {"layer_norm_eps", &h->norm_eps},
                {"norm_eps", &h->norm_eps},
                {"attn_logit_softcapping", &h->softcap},
                {"final_logit_softcapping", &h->final_softcap},
                {"query_pre_attn_scalar", &scalar},
                {"attention_multiplier", &h->query_scale},
                {"embedding_multiplier", &h->embedding_scale},
                {"residual_multiplier", &h->residual_scale},
                {"logits_scaling", &h->logit_scale},
                {"logit_scale", &h->logit_scale},
                {"router_jitter_noise", &h->mixer_jitter},
                {"attention_value_scale", &h->value_scale}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) FKV_TRY(get_f32(r->root, keys[i].key, r->path, keys[i].out));
    if (scalar > 0) h->query_scale = 1 / sqrtf(scalar);
    h->features.embedding_sqrt_dim = h->features.embedding_sqrt_dim && strcmp(r->model->type, "afmoe") != 0;
    if (strcmp(r->model->type, "afmoe") == 0) FKV_TRY(get_bool(r->root, "mup_enabled", r->path, &h->features.embedding_sqrt_dim));
    return FKV_OK;
}

/* Reads the head shapes of models in which windowed layers and full-attention layers differ (Gemma 4 and MiMo V2). In Gemma 4,
 * the usual fields describe windowed layers, and separate fields describe full-attention layers. */
static fkv_status read_gemma4_heads(config_reader *r) {
    fkv_hparams *h = r->h;
    bool k_is_v = false;
    if (strcmp(r->model->architecture, "mimo2") == 0) { /* windowed layers have twice the number of KV heads */
        FKV_REQUIRE(h->n_kv_heads <= UINT32_MAX / 2, FKV_FILE_FORMAT, "%s: num_key_value_heads is %u, which is too large",
                    r->path, h->n_kv_heads);
        r->local = (fkv_layer_shape){.n_kv_heads = 2 * h->n_kv_heads, .head_dim = h->head_dim};
        return get_u32(r->root, "v_head_dim", r->path, &h->v_dim);
    }
    if (strcmp(r->model->architecture, "gemma4") != 0) return FKV_OK;
    r->local = (fkv_layer_shape){.n_kv_heads = h->n_kv_heads, .head_dim = h->head_dim};
    FKV_TRY(get_bool(r->root, "attention_k_eq_v", r->path, &k_is_v));
    json_t *list = json_object_get(r->root, "per_layer_config");
    if (!json_is_object(list)) { /* the config is in the original format of Gemma 4 */
        if (k_is_v) FKV_TRY(get_u32(r->root, "num_global_key_value_heads", r->path, &h->n_kv_heads));
        return get_u32(r->root, "global_head_dim", r->path, &h->head_dim);
    }
    const char *layer = NULL;
    json_t *entry = NULL;
    json_object_foreach(list, layer, entry) {
        FKV_TRY(get_u32(entry, "num_key_value_heads", r->path, &h->n_kv_heads));
        FKV_TRY(get_u32(entry, "head_dim", r->path, &h->head_dim));
    }
    return FKV_OK;
}

static fkv_status read_sizes(config_reader *r) {
    fkv_hparams *h = r->h;
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {{"num_hidden_layers", &h->n_layers},      {"hidden_size", &h->dim},    {"intermediate_size", &h->ffn_dim},
                {"max_position_embeddings", &h->context}, {"vocab_size", &h->n_vocab}, {"num_attention_heads", &h->n_q_heads}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) FKV_TRY(get_u32(r->root, keys[i].key, r->path, keys[i].out));
    h->n_kv_heads = h->n_q_heads;
    FKV_TRY(get_u32(r->root, "num_key_value_heads", r->path, &h->n_kv_heads));
    if (h->n_q_heads > 0 && h->dim % h->n_q_heads == 0) h->head_dim = h->dim / h->n_q_heads;
    FKV_TRY(get_u32(r->root, "head_dim", r->path, &h->head_dim));
    FKV_TRY(fkv_hf_read_lfm2_ffn(r->root, r->path, h));
    FKV_TRY(fkv_hf_read_blocks(r->root, r->path, h));
    return read_gemma4_heads(r);
}

/* Reads the fields that are used only if there are no weight files: tensor type, tied embeddings and biases. Omitted fields
 * default to the values that transformers uses. */
static fkv_status read_declared(const json_t *root, const hf_model_type *model, const char *path, fkv_weights *weights) {
    static const char *const tied_types[] = {"gemma", "cohere", "smollm3", "ernie4_5", "starcoder2"};
    static const char *const biased_types[] = {"glm", "glm4", "seed_oss", "gpt_oss"};
    fkv_declared *d = &weights->declared;
    const char *dtype = "bfloat16";
    d->is_tied = weights->is_tied;
    for (size_t i = 0; !weights->needs_output && i < sizeof tied_types / sizeof tied_types[0]; i++)
        d->is_tied = d->is_tied || strncmp(model->type, tied_types[i], strlen(tied_types[i])) == 0;
    for (size_t i = 0; i < sizeof biased_types / sizeof biased_types[0]; i++)
        d->qkv_bias = d->qkv_bias || strcmp(model->type, biased_types[i]) == 0;
    FKV_TRY(get_bool(root, "attention_bias", path, &d->qkv_bias));
    FKV_TRY(get_bool(root, "use_bias", path, &d->qkv_bias));
    d->o_bias = d->qkv_bias && strncmp(model->type, "glm", 3) != 0 && strcmp(model->type, "seed_oss") != 0;
    FKV_TRY(get_bool(root, "attention_out_bias", path, &d->o_bias));
    FKV_TRY(get_bool(root, "mlp_bias", path, &d->mlp_bias));
    FKV_TRY(get_bool(root, "use_bias", path, &d->mlp_bias));
    FKV_TRY(get_bool(root, "attention_k_eq_v", path, &d->k_is_v));
    FKV_TRY(get_text(root, "torch_dtype", path, &dtype));
    FKV_TRY(get_text(root, "dtype", path, &dtype));
    d->float_type = strcmp(dtype, "float32") == 0   ? FKV_TENSOR_F32
                    : strcmp(dtype, "float16") == 0 ? FKV_TENSOR_F16
                                                    : FKV_TENSOR_BF16;
    return FKV_OK;
}

static fkv_status read_hparams(json_t *root, const char *path, fkv_weights *weights) {
    config_reader r = {.root = root, .path = path, .h = &weights->hparams};
    FKV_TRY(find_model_type(&r));
    FKV_TRY(fkv_quantization_read(weights, root, path));
    (void)snprintf(weights->architecture, sizeof weights->architecture, "%s", r.model->architecture);
    FKV_TRY(add_defaults(&r));
    FKV_TRY(rename_fields(&r));
    FKV_TRY(reject_unsupported_fields(&r));
    FKV_TRY(read_biases(&r));
    FKV_TRY(read_activation(&r));
    FKV_TRY(read_sizes(&r));
    FKV_TRY(read_scalars(&r));
    FKV_TRY(read_experts(&r));
    FKV_TRY(read_rope(&r, weights));
    FKV_TRY(read_llama4(&r));
    FKV_TRY(read_layer_kinds(&r));
    FKV_TRY(read_dense_layers(&r));
    FKV_TRY(read_layer_shapes(&r));
    FKV_TRY(fkv_hf_read_latent(root, r.model->type, path, r.h));
    if (weights->is_config) FKV_TRY(read_declared(root, r.model, path, weights));
    r.h->norm_plus_one = r.architecture->hf_norm_plus_one;
    fkv_architecture_finish(r.architecture, r.h);
    return FKV_OK;
}

/* ---- special tokens ---- */

static fkv_status check_token(const fkv_hparams *hparams, const char *key, const char *path, uint32_t token) {
    FKV_REQUIRE(token < hparams->n_vocab, FKV_FILE_FORMAT, "%s: %s is %u, but the vocabulary has %u tokens", path, key, token,
                hparams->n_vocab);
    return FKV_OK;
}

/* Reads bos and eos. eos_token_id may be a list of tokens that all end generation. */
static fkv_status read_special_tokens(const json_t *root, const char *path, fkv_weights *weights) {
    fkv_vocab_source *vocab = &weights->vocab;
    const json_t *ends = get_field(root, "eos_token_id");
    FKV_TRY(get_u32(root, "bos_token_id", path, &vocab->bos));
    if (!json_is_array(ends)) FKV_TRY(get_u32(root, "eos_token_id", path, &vocab->eos));
    for (size_t i = 0; i < json_array_size(ends); i++) { /* json_array_size() returns 0 if the value is not an array */
        const json_int_t id = json_integer_value(json_array_get(ends, i));
        FKV_REQUIRE(json_is_integer(json_array_get(ends, i)) && id >= 0 && id < UINT32_MAX, FKV_FILE_FORMAT,
                    "%s: eos_token_id must contain only token ids", path);
        FKV_TRY(check_token(&weights->hparams, "eos_token_id", path, (uint32_t)id));
        if (i == 0) vocab->eos = (uint32_t)id;
        fkv_vocab_add_end(vocab, (uint32_t)id);
    }
    if (vocab->bos != FKV_NO_TOKEN) FKV_TRY(check_token(&weights->hparams, "bos_token_id", path, vocab->bos));
    if (vocab->eos != FKV_NO_TOKEN) FKV_TRY(check_token(&weights->hparams, "eos_token_id", path, vocab->eos));
    return FKV_OK;
}

static fkv_status read_tied(const json_t *root, const char *path, fkv_weights *weights) {
    FKV_TRY(get_bool(root, "tie_word_embeddings", path, &weights->is_tied));
    weights->needs_output = get_field(root, "tie_word_embeddings") != NULL && !weights->is_tied;
    return FKV_OK;
}

/* Reads a config. For multimodal models, reads text_config, which inherits some missing fields from the outer config. As in
 * transformers, tie_word_embeddings is read from the outer config only. If the outer config does not contain tie_word_embeddings,
 * the embeddings are tied unless lm_head is stored. */
static fkv_status read_config(json_t *root, const char *path, fkv_weights *weights) {
    json_t *text = json_object_get(root, "text_config");
    if (json_is_object(text)) {
        static const char *const shared[] = {"torch_dtype",  "dtype",        "bos_token_id",
                                             "eos_token_id", "quantization", "quantization_config"};
        FKV_TRY(read_tied(root, path, weights));
        for (size_t i = 0; i < sizeof shared / sizeof shared[0]; i++) {
            json_t *value = json_object_get(root, shared[i]);
            if (value != NULL && get_field(text, shared[i]) == NULL)
                FKV_REQUIRE(json_object_set(text, shared[i], value) == 0, FKV_NO_MEMORY, "%s: out of memory reading %s", path,
                            shared[i]);
        }
        root = text;
    } else {
        FKV_TRY(read_tied(root, path, weights));
    }
    FKV_TRY(read_hparams(root, path, weights));
    return read_special_tokens(root, path, weights);
}

fkv_status fkv_hf_config_read(fkv_weights *weights, const char *json, size_t size, const char *path) {
    json_t *root = NULL;
    FKV_TRY(fkv_json_read(json, size, path, &root));
    const fkv_status status = read_config(root, path, weights);
    json_decref(root);
    return status;
}
