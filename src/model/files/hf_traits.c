/* Tables of differences between model types; see hf_traits.h. */
#include "hf_traits.h"

#include <string.h>

/* Defaults for fields that the text_config of vision-language models omits. */
static const char QWEN25VL_DEFAULTS[] =
    "{\"vocab_size\": 152064, \"hidden_size\": 8192, \"intermediate_size\": 29568, \"num_hidden_layers\": 80,"
    " \"num_attention_heads\": 64, \"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-5, \"max_position_embeddings\": 32768,"
    " \"sliding_window\": 4096, \"max_window_layers\": 80}";
static const char QWEN3VLMOE_DEFAULTS[] =
    "{\"vocab_size\": 151936, \"hidden_size\": 2048, \"intermediate_size\": 5632, \"num_hidden_layers\": 24,"
    " \"num_attention_heads\": 16, \"num_key_value_heads\": 16, \"rms_norm_eps\": 1e-6, \"max_position_embeddings\": 128000,"
    " \"moe_intermediate_size\": 1408, \"num_experts_per_tok\": 4, \"num_local_experts\": 60}";
static const char GLM4V_DEFAULTS[] =
    "{\"vocab_size\": 151552, \"hidden_size\": 4096, \"intermediate_size\": 13696, \"num_hidden_layers\": 40,"
    " \"num_attention_heads\": 32, \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-5, \"max_position_embeddings\": 32768,"
    " \"partial_rotary_factor\": 1.0}";
static const char GLM4V_MOE_DEFAULTS[] =
    "{\"vocab_size\": 151424, \"hidden_size\": 4096, \"intermediate_size\": 10944, \"num_hidden_layers\": 46,"
    " \"num_attention_heads\": 96, \"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-5, \"max_position_embeddings\": 65536,"
    " \"moe_intermediate_size\": 1408, \"num_experts_per_tok\": 8, \"n_shared_experts\": 1, \"n_routed_experts\": 128,"
    " \"first_k_dense_replace\": 1, \"norm_topk_prob\": true}";
static const char LLAMA4_DEFAULTS[] =
    "{\"vocab_size\": 202048, \"hidden_size\": 5120, \"intermediate_size\": 8192, \"intermediate_size_mlp\": 16384,"
    " \"num_hidden_layers\": 48, \"num_attention_heads\": 40, \"num_key_value_heads\": 8, \"head_dim\": 128,"
    " \"rms_norm_eps\": 1e-5, \"max_position_embeddings\": 131072, \"num_experts_per_tok\": 1, \"num_local_experts\": 16,"
    " \"interleave_moe_layer_step\": 1, \"use_qk_norm\": true, \"attention_chunk_size\": 8192,"
    " \"attn_temperature_tuning\": true, \"floor_scale\": 8192, \"attn_scale\": 0.1}";
static const char ERNIE_MOE_DEFAULTS[] =
    "{\"rms_norm_eps\": 1e-5, \"moe_num_shared_experts\": 2, \"moe_layer_start_index\": 1, \"moe_layer_interval\": 1}";
static const char APERTUS_DEFAULTS[] =
    "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"rope_theta\": 12000000.0, \"factor\": 8.0,"
    " \"original_max_position_embeddings\": 8192, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0}}";
static const char AFMOE_DEFAULTS[] =
    "{\"num_dense_layers\": 1, \"num_shared_experts\": 2, \"head_dim\": 128, \"global_attn_every_n_layers\": 4,"
    " \"sliding_window\": 1024}";

static const char MIMO2_DEFAULTS[] =
    "{\"head_dim\": 192, \"v_head_dim\": 128, \"sliding_window\": 129, \"attention_value_scale\": 0.707,"
    " \"partial_rotary_factor\": 0.334}";

/* Default values, taken from transformers, of fields that published configs may omit. */
static const char DEEPSEEK_V2_DEFAULTS[] =
    "{\"kv_lora_rank\": 512, \"q_lora_rank\": 1536, \"qk_rope_head_dim\": 64, \"qk_nope_head_dim\": 128, \"v_head_dim\": 128, \"n_shared_experts\": 2,"
    " \"n_routed_experts\": 64, \"moe_intermediate_size\": 1407, \"rms_norm_eps\": 1e-6}";
static const char DEEPSEEK_V3_DEFAULTS[] =
    "{\"kv_lora_rank\": 512, \"q_lora_rank\": 1536, \"qk_rope_head_dim\": 64, \"qk_nope_head_dim\": 128, \"v_head_dim\": 128, \"n_shared_experts\": 1,"
    " \"n_routed_experts\": 256, \"num_experts_per_tok\": 8, \"n_group\": 8, \"topk_group\": 4, \"first_k_dense_replace\": 3,"
    " \"moe_intermediate_size\": 2048, \"routed_scaling_factor\": 2.5, \"norm_topk_prob\": true, \"rms_norm_eps\": 1e-6}";
static const char GLM4_LITE_DEFAULTS[] =
    "{\"kv_lora_rank\": 512, \"q_lora_rank\": 768, \"qk_rope_head_dim\": 64, \"qk_nope_head_dim\": 192, \"v_head_dim\": 256,"
    " \"n_shared_experts\": 1, \"n_routed_experts\": 64, \"num_experts_per_tok\": 4, \"n_group\": 1, \"topk_group\": 1,"
    " \"moe_intermediate_size\": 1536, \"routed_scaling_factor\": 1.8, \"norm_topk_prob\": true, \"rms_norm_eps\": 1e-5}";
static const char MINICPM3_DEFAULTS[] =
    "{\"kv_lora_rank\": 256, \"qk_rope_head_dim\": 32, \"qk_nope_head_dim\": 64, \"rms_norm_eps\": 1e-5, \"scale_emb\": 12,"
    " \"scale_depth\": 1.4, \"dim_model_base\": 256, \"tie_word_embeddings\": true}";
static const char MISTRAL4_DEFAULTS[] =
    "{\"kv_lora_rank\": 256, \"q_lora_rank\": 1024, \"qk_rope_head_dim\": 64, \"qk_nope_head_dim\": 64, \"v_head_dim\": 128,"
    " \"n_shared_experts\": 1, \"n_routed_experts\": 128, \"n_group\": 1, \"topk_group\": 1, \"norm_topk_prob\": true,"
    " \"moe_intermediate_size\": 2048, \"rms_norm_eps\": 1e-6}";

static const char KIMI_LINEAR_DEFAULTS[] =
    "{\"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, \"qk_nope_head_dim\": 128, \"v_head_dim\": 128, \"num_shared_experts\": 1,"
    " \"num_experts\": 256, \"num_experts_per_token\": 8, \"num_expert_group\": 1, \"topk_group\": 1,"
    " \"moe_intermediate_size\": 1024, \"routed_scaling_factor\": 2.446, \"moe_renormalize\": true, \"rms_norm_eps\": 1e-5,"
    " \"linear_head_dim\": 128, \"linear_num_heads\": 32, \"linear_conv_kernel_dim\": 4}";

static const fkv_hf_traits TRAITS[] = {
    {.type = "kimi_linear",
     .defaults = KIMI_LINEAR_DEFAULTS,
     .renames = "{\"model_max_length\": \"max_position_embeddings\", \"moe_renormalize\": \"norm_topk_prob\","
                " \"num_expert_group\": \"n_group\", \"num_experts_per_token\": \"num_experts_per_tok\","
                " \"num_shared_experts\": \"n_shared_experts\", \"moe_router_activation_func\": \"scoring_func\"}",
     .fields = "kv_lora_rank q_lora_rank n_shared_experts first_k_dense_replace"},
    {.type = "deepseek_v2",
     .defaults = DEEPSEEK_V2_DEFAULTS,
     .fields = "kv_lora_rank q_lora_rank n_shared_experts first_k_dense_replace"},
    {.type = "deepseek_v3",
     .defaults = DEEPSEEK_V3_DEFAULTS,
     .fields = "kv_lora_rank q_lora_rank n_shared_experts first_k_dense_replace"},
    {.type = "kimi_k2",
     .defaults = DEEPSEEK_V3_DEFAULTS,
     .fields = "kv_lora_rank q_lora_rank n_shared_experts first_k_dense_replace"},
    {.type = "glm4_moe_lite",
     .defaults = GLM4_LITE_DEFAULTS,
     .fields = "kv_lora_rank q_lora_rank n_shared_experts first_k_dense_replace"},
    {.type = "minicpm3", .defaults = MINICPM3_DEFAULTS, .fields = "kv_lora_rank q_lora_rank"},
    {.type = "mistral4",
     .defaults = MISTRAL4_DEFAULTS,
     .fields = "kv_lora_rank q_lora_rank n_shared_experts first_k_dense_replace"},
    {.type = "qwen3_moe", .fields = "mlp_only_layers decoder_sparse_step"},
    {.type = "qwen2_moe", .fields = "mlp_only_layers decoder_sparse_step"},
    {.type = "qwen3_vl_moe_text", .defaults = QWEN3VLMOE_DEFAULTS, .fields = "mlp_only_layers decoder_sparse_step"},
    {.type = "llama4_text",
     .defaults = LLAMA4_DEFAULTS,
     .renames = "{\"intermediate_size\": \"moe_intermediate_size\", \"intermediate_size_mlp\": \"intermediate_size\"}",
     .fields = "use_qk_norm attention_chunk_size",
     .has_shared_expert = true},
    {.type = "minimax_m2", .fields = "use_qk_norm", .rotates_partly = true},
    {.type = "hunyuan_v1_dense", .fields = "use_qk_norm"},
    {.type = "hunyuan_v1_moe",
     .renames = "{\"moe_topk\": \"num_experts_per_tok\", \"num_experts\": \"num_experts\","
                " \"moe_intermediate_size\": \"moe_intermediate_size\", \"num_shared_expert\": \"num_shared_expert\"}",
     .fields = "use_qk_norm",
     .has_list_values = true,
     .has_shared_expert = true},
    {.type = "ernie4_5_moe",
     .defaults = ERNIE_MOE_DEFAULTS,
     .renames = "{\"moe_k\": \"num_experts_per_tok\", \"moe_num_experts\": \"n_routed_experts\","
                " \"moe_num_shared_experts\": \"n_shared_experts\"}",
     .fields = "n_shared_experts"},
    {.type = "mimo_v2_flash", .defaults = MIMO2_DEFAULTS, .rotates_partly = true},
    {.type = "bailing_moe",
     .renames = "{\"num_shared_experts\": \"n_shared_experts\"}",
     .fields = "n_shared_experts first_k_dense_replace use_qk_norm",
     .rotates_partly = true},
    {.type = "bailing_moe_v2",
     .renames = "{\"num_shared_experts\": \"n_shared_experts\"}",
     .fields = "n_shared_experts first_k_dense_replace use_qk_norm",
     .rotates_partly = true},
    {.type = "dots1", .fields = "n_shared_experts first_k_dense_replace"},
    {.type = "starcoder2",
     .defaults = "{\"norm_epsilon\": 1e-5, \"use_bias\": true}",
     .renames = "{\"norm_epsilon\": \"layer_norm_eps\"}"},
    {.type = "afmoe",
     .defaults = AFMOE_DEFAULTS,
     .renames = "{\"num_dense_layers\": \"first_k_dense_replace\", \"num_shared_experts\": \"n_shared_experts\","
                " \"route_scale\": \"routed_scaling_factor\", \"global_attn_every_n_layers\": \"sliding_window_pattern\"}",
     .fields = "n_shared_experts first_k_dense_replace"},
    {.type = "nemotron_h",
     .renames = "{\"layer_norm_epsilon\": \"rms_norm_eps\", \"mlp_hidden_act\": \"hidden_act\","
                " \"attention_head_dim\": \"head_dim\", \"mamba_num_heads\": \"mamba_n_heads\","
                " \"mamba_head_dim\": \"mamba_d_head\", \"n_groups\": \"mamba_n_groups\","
                " \"ssm_state_size\": \"mamba_d_state\", \"conv_kernel\": \"mamba_d_conv\"}",
     .fields = "n_shared_experts"},
    {.type = "qwen2_vl", .defaults = QWEN25VL_DEFAULTS},
    {.type = "qwen2_5_vl", .defaults = QWEN25VL_DEFAULTS},
    {.type = "qwen2_vl_text", .defaults = QWEN25VL_DEFAULTS},
    {.type = "qwen2_5_vl_text", .defaults = QWEN25VL_DEFAULTS},
    {.type = "glm4v_text", .defaults = GLM4V_DEFAULTS},
    {.type = "glm4v_moe_text", .defaults = GLM4V_MOE_DEFAULTS},
    {.type = "apertus", .defaults = APERTUS_DEFAULTS},
    {.type = "phimoe", .defaults = "{\"router_jitter_noise\": 0.01}"},
    {.type = "solar_open", .defaults = "{\"rope_theta\": 1000000.0, \"n_shared_experts\": 1}"},
};

static const fkv_hf_option OPTIONS[] = {
    {"kimi_linear", "mla_use_nope", "true"},
    {"olmoe", "clip_qkv", "null"},
    {"minimax_m2", "use_qk_norm", "true"},
    {"minimax_m2", "qk_norm_type", "\"per_layer\""},
    {"minimax_m2", "scoring_func", "\"sigmoid\""},
    {"minimax_m2", "use_routing_bias", "true"},
    {"minimax_m2", "shared_intermediate_size", "0"},
    {"hunyuan_v1_dense hunyuan_v1_moe", "use_qk_norm", "true"},
    {"hunyuan_v1_dense hunyuan_v1_moe", "use_cla", "false"},
    {"hunyuan_v1_dense hunyuan_v1_moe", "mlp_bias", "false"},
    {"ernie4_5_moe", "use_bias", "false"},
    {"ernie4_5_moe", "moe_use_aux_free", "true"},
    {"ernie4_5_moe", "moe_gate", "\"topk\""},
    {"ernie4_5_moe", "moe_group_experts", "false"},
    {"ernie4_5_moe", "use_rmsnorm", "true"},
    {"afmoe", "score_func", "\"sigmoid\""},
    {"afmoe", "route_norm", "true"},
    {"afmoe", "n_group", "1"},
    {"bailing_moe bailing_moe_v2", "use_bias", "false"},
    {"bailing_moe bailing_moe_v2", "use_rmsnorm", "true"},
    {"bailing_moe bailing_moe_v2", "norm_head", "false"},
    {"bailing_moe bailing_moe_v2", "norm_softmax", "false"},
    {"bailing_moe_v2", "score_function", "\"sigmoid\""},
    {"bailing_moe_v2", "moe_router_enable_expert_bias", "true"},
    {"hunyuan_v1_moe", "num_shared_expert", "1"},
    {"mimo_v2_flash", "hybrid_layer_pattern", "null"}, /* set only in the original config format, which is not supported */
    {"solar_open", "first_k_dense_replace", "0"},
    {"solar_open", "use_qk_norm", "false"},
    {"nemotron_h", "use_bias", "false"},
    {"nemotron_h", "mamba_hidden_act", "\"silu\""},
    {"falcon_h1", "attention_bias", "false"},
    {"falcon_h1", "mlp_bias", "false"},
    {"falcon_h1", "mamba_proj_bias", "false"},
    {"falcon_h1", "projectors_bias", "false"},
};

const fkv_hf_traits *fkv_hf_traits_of(const char *type) {
    static const fkv_hf_traits none = {0};
    for (size_t i = 0; i < sizeof TRAITS / sizeof TRAITS[0]; i++)
        if (strcmp(TRAITS[i].type, type) == 0) return &TRAITS[i];
    return &none;
}

const fkv_hf_option *fkv_hf_options(size_t *n) {
    *n = sizeof OPTIONS / sizeof OPTIONS[0];
    return OPTIONS;
}

bool fkv_hf_has_word(const char *words, const char *word) {
    const size_t n = strlen(word);
    for (const char *at = words; at != NULL && *at != 0; at = strchr(at, ' ') != NULL ? strchr(at, ' ') + 1 : NULL)
        if (strncmp(at, word, n) == 0 && (at[n] == ' ' || at[n] == 0)) return true;
    return false;
}
