/* Converts a Hugging Face config.json to hyperparameters.
 *
 * A config that requires an unsupported activation, RoPE scaling or layer type is rejected, and the message names the field.
 * Values in the file override the defaults of the architecture (architecture.h). hf_rope.c and hf_layers.c read the RoPE
 * parameters and the properties of individual layers.
 */
#include "hf_config.h"

#include "hf_latent.h"
#include "hf_reader.h"
#include "hf_recurrence.h"
#include "hf_traits.h"
#include "quantization.h"

#include <math.h>
#include <stdio.h>

/* ---- model types ---- */

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

static const fkv_hf_model_type MODEL_TYPES[] = {
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

static fkv_status find_model_type(fkv_hf_reader *r) {
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

static fkv_status add_defaults(const fkv_hf_reader *r) {
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
static fkv_status rename_fields(const fkv_hf_reader *r) {
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
static bool is_known_field(const fkv_hf_reader *r, const char *key, const json_t *value) {
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
static fkv_status reject_unsupported_options(const fkv_hf_reader *r) {
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
static fkv_status reject_unsupported_fields(const fkv_hf_reader *r) {
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
static fkv_status read_biases(const fkv_hf_reader *r) {
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

static fkv_status read_activation(const fkv_hf_reader *r) {
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

/* ---- experts and scalars ---- */

/* Reads shared experts, dense layers and expert groups. */
static fkv_status read_shared_experts(const fkv_hf_reader *r) {
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

static fkv_status read_experts(const fkv_hf_reader *r) {
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

static fkv_status read_scalars(const fkv_hf_reader *r) {
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
static fkv_status read_gemma4_heads(fkv_hf_reader *r) {
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

static fkv_status read_sizes(fkv_hf_reader *r) {
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
static fkv_status read_declared(const json_t *root, const fkv_hf_model_type *model, const char *path, fkv_weights *weights) {
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
    fkv_hf_reader r = {.root = root, .path = path, .h = &weights->hparams};
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
    FKV_TRY(fkv_hf_read_rope(&r, weights));
    FKV_TRY(fkv_hf_read_layers(&r));
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
