/* The table of supported architectures; see architecture.h. A new architecture that the features in the table can describe
 * completely needs only a table entry here and an entry for its model_type in files/hf_config.c. */
#include "architecture.h"

#include "rope_scaling.h"

#include <stdio.h>

/* Names of the norms before and after attention and feed-forward blocks, in safetensors files of Gemma and OLMo. */
#define GEMMA_NORM_NAMES                                                                                                         \
    {{"post_attention_layernorm", "post_attention_norm"},                                                                        \
     {"pre_feedforward_layernorm", "ffn_norm"},                                                                                  \
     {"post_feedforward_layernorm", "post_ffw_norm"}}
#define OLMO_NORM_NAMES {{"post_attention_layernorm", "post_attention_norm"}, {"post_feedforward_layernorm", "post_ffw_norm"}}

#define HUNYUAN_NAMES                                                                                                            \
    {{"self_attn.query_layernorm", "attn_q_norm"},                                                                               \
     {"self_attn.key_layernorm", "attn_k_norm"},                                                                                 \
     {"mlp.gate.wg", "ffn_gate_inp"},                                                                                            \
     {"mlp.shared_mlp.gate_proj", "ffn_gate_shexp"},                                                                             \
     {"mlp.shared_mlp.up_proj", "ffn_up_shexp"},                                                                                 \
     {"mlp.shared_mlp.down_proj", "ffn_down_shexp"}}
#define BAILING_NAMES                                                                                                            \
    {{"attention.query_key_value", "attn_qkv"},    {"attention.dense", "attn_output"},                                           \
     {"attention.query_layernorm", "attn_q_norm"}, {"attention.key_layernorm", "attn_k_norm"},                                   \
     {"mlp.gate.gate_proj", "ffn_gate_inp"},       {"mlp.gate.expert_bias", "exp_probs_b"}}
/* Names of the gated delta net's tensors in safetensors files. A_log gets a separate internal name, because ssm_a in GGUF files
 * means -exp(A_log). */
#define DELTA_NET_NAMES                                                                                                          \
    {{"linear_attn.in_proj_qkv", "attn_qkv"}, {"linear_attn.in_proj_z", "attn_gate"}, {"linear_attn.in_proj_b", "ssm_beta"},     \
     {"linear_attn.in_proj_a", "ssm_alpha"},  {"linear_attn.in_proj_qkvz", "ssm_in"}, {"linear_attn.in_proj_ba", "ssm_ba"},      \
     {"linear_attn.conv1d", "ssm_conv1d"},    {"linear_attn.A_log", "ssm_a_log"},     {"linear_attn.dt_bias", "ssm_dt"},         \
     {"linear_attn.norm", "ssm_norm"},        {"linear_attn.out_proj", "ssm_out"}}
#define MAMBA2_NAMES                                                                                                             \
    {{"mamba.in_proj", "ssm_in"},   {"mamba.conv1d", "ssm_conv1d"},        {"mamba.A_log", "ssm_a_log"},                         \
     {"mamba.D", "ssm_d"},          {"mamba.dt_bias", "ssm_dt"},           {"mamba.norm", "ssm_norm"},                           \
     {"mamba.out_proj", "ssm_out"}, {"shared_mlp.input_linear", "ffn_up"}, {"shared_mlp.output_linear", "ffn_down"}}
#define NEMOTRON_NAMES                                                                                                           \
    {{"norm", "attn_norm"},                                                                                                      \
     {"mixer.in_proj", "ssm_in"},                                                                                                \
     {"mixer.conv1d", "ssm_conv1d"},                                                                                             \
     {"mixer.A_log", "ssm_a_log"},                                                                                               \
     {"mixer.D", "ssm_d"},                                                                                                       \
     {"mixer.dt_bias", "ssm_dt"},                                                                                                \
     {"mixer.norm", "ssm_norm"},                                                                                                 \
     {"mixer.out_proj", "ssm_out"},                                                                                              \
     {"mixer.q_proj", "attn_q"},                                                                                                 \
     {"mixer.k_proj", "attn_k"},                                                                                                 \
     {"mixer.v_proj", "attn_v"},                                                                                                 \
     {"mixer.o_proj", "attn_output"},                                                                                            \
     {"mixer.up_proj", "ffn_up"},                                                                                                \
     {"mixer.down_proj", "ffn_down"},                                                                                            \
     {"mixer.gate", "ffn_gate_inp"},                                                                                             \
     {"mixer.gate.e_score_correction_bias", "exp_probs_b"},                                                                      \
     {"mixer.experts.up_proj", "ffn_up_exps"},                                                                                   \
     {"mixer.experts.down_proj", "ffn_down_exps"},                                                                               \
     {"mixer.switch_mlp.fc1", "ffn_up_exps"},                                                                                    \
     {"mixer.switch_mlp.fc2", "ffn_down_exps"},                                                                                  \
     {"mixer.shared_experts.up_proj", "ffn_up_shexp"},                                                                           \
     {"mixer.shared_experts.down_proj", "ffn_down_shexp"},                                                                       \
     {"mixer.fc1_latent_proj", "ffn_latent_down"},                                                                               \
     {"mixer.fc2_latent_proj", "ffn_latent_up"}}
#define FALCON_NAMES                                                                                                             \
    {{"mamba.in_proj", "ssm_in"},        {"mamba.conv1d", "ssm_conv1d"},                                                         \
     {"mamba.A_log", "ssm_a_log"},       {"mamba.D", "ssm_d"},                                                                   \
     {"mamba.dt_bias", "ssm_dt"},        {"mamba.norm", "ssm_norm"},                                                             \
     {"mamba.out_proj", "ssm_out"},      {"feed_forward.gate_proj", "ffn_gate"},                                                 \
     {"feed_forward.up_proj", "ffn_up"}, {"feed_forward.down_proj", "ffn_down"},                                                 \
     {"pre_ff_layernorm", "ffn_norm"}}
/* Features shared by the Nemotron-H variants with and without experts. */
#define NEMOTRON_FEATURES                                                                                                        \
    {.activation = FKV_RELU2,                                                                                                    \
     .plain_ffn = true,                                                                                                          \
     .single_blocks = true,                                                                                                      \
     .recurrence = FKV_MAMBA2,                                                                                                   \
     .norm_experts = true,                                                                                                       \
     .sigmoid_router = true}
#define KIMI_LINEAR_NAMES                                                                                                        \
    {{"self_attn.q_conv1d", "ssm_conv1d_q"},                                                                                     \
     {"self_attn.k_conv1d", "ssm_conv1d_k"},                                                                                     \
     {"self_attn.v_conv1d", "ssm_conv1d_v"},                                                                                     \
     {"self_attn.q_conv.conv", "ssm_conv1d_q"},                                                                                  \
     {"self_attn.k_conv.conv", "ssm_conv1d_k"},                                                                                  \
     {"self_attn.v_conv.conv", "ssm_conv1d_v"},                                                                                  \
     {"self_attn.f_a_proj", "ssm_f_a"},                                                                                          \
     {"self_attn.f_b_proj", "ssm_f_b"},                                                                                          \
     {"self_attn.g_a_proj", "ssm_g_a"},                                                                                          \
     {"self_attn.g_b_proj", "ssm_g_b"},                                                                                          \
     {"self_attn.b_proj", "ssm_beta"},                                                                                           \
     {"self_attn.A_log", "ssm_a_log"},                                                                                           \
     {"self_attn.dt_bias", "ssm_dt"},                                                                                            \
     {"self_attn.o_norm", "ssm_norm"},                                                                                           \
     {"block_sparse_moe.gate_proj", "ffn_gate"},                                                                                 \
     {"block_sparse_moe.up_proj", "ffn_up"},                                                                                     \
     {"block_sparse_moe.down_proj", "ffn_down"},                                                                                 \
     {"block_sparse_moe.shared_experts.gate_proj", "ffn_gate_shexp"},                                                            \
     {"block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"},                                                                \
     {"block_sparse_moe.shared_experts.down_proj", "ffn_down_shexp"},                                                            \
     {"block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b"},                                                           \
     {"mlp.e_score_correction_bias", "exp_probs_b"}}
#define LFM2_NAMES                                                                                                               \
    {{"operator_norm", "attn_norm"},                                                                                             \
     {"ffn_norm", "ffn_norm"},                                                                                                   \
     {"conv.in_proj", "shortconv.in_proj"},                                                                                      \
     {"conv.conv", "shortconv.conv"},                                                                                            \
     {"conv.out_proj", "shortconv.out_proj"},                                                                                    \
     {"self_attn.out_proj", "attn_output"},                                                                                      \
     {"self_attn.q_layernorm", "attn_q_norm"},                                                                                   \
     {"self_attn.k_layernorm", "attn_k_norm"},                                                                                   \
     {"feed_forward.w1", "ffn_gate"},                                                                                            \
     {"feed_forward.w3", "ffn_up"},                                                                                              \
     {"feed_forward.w2", "ffn_down"},                                                                                            \
     {"feed_forward.gate", "ffn_gate_inp"},                                                                                      \
     {"feed_forward.expert_bias", "exp_probs_b"}}

static const fkv_architecture ARCHITECTURES[] = {
    {.name = "llama", .features = {.norm_experts = true}, .gguf_interleaved = true},
    {.name = "mistral3", .gguf_interleaved = true, .gguf_yarn_log_multiplier = true},
    {.name = "qwen2", .features = {.qkv_bias = true}},
    {.name = "qwen3", .features = {.qk_norm = FKV_QK_NORM_HEADS}},
    {.name = "qwen3vl", .features = {.qk_norm = FKV_QK_NORM_HEADS}},
    {.name = "qwen3moe", .features = {.qk_norm = FKV_QK_NORM_HEADS, .norm_experts = true}},
    {.name = "qwen2moe", .features = {.qkv_bias = true}},
    {.name = "qwen2vl", .features = {.qkv_bias = true}, .rope_base = 1e6f},
    {.name = "qwen3vlmoe", .features = {.qk_norm = FKV_QK_NORM_HEADS, .norm_experts = true}, .rope_base = 5e5f},
    {.name = "glm4moe",
     .features = {.qkv_bias = true, .norm_experts = true, .sigmoid_router = true},
     .gguf_post_attn_is_ffn_norm = true},
    {.name = "gemma", .features = {.activation = FKV_GELU_TANH, .embedding_sqrt_dim = true}, .hf_norm_plus_one = true},
    {.name = "gemma2",
     .features = {.activation = FKV_GELU_TANH, .embedding_sqrt_dim = true, .post_norms = true, .window_period = 2},
     .hf_names = GEMMA_NORM_NAMES,
     .hf_norm_plus_one = true,
     .large_n_layers = 46},
    {.name = "gemma3",
     .features = {.activation = FKV_GELU_TANH,
                  .embedding_sqrt_dim = true,
                  .post_norms = true,
                  .qk_norm = FKV_QK_NORM_HEADS,
                  .separate_local_rope = true,
                  .window_period = 6},
     .hf_names = GEMMA_NORM_NAMES,
     .hf_norm_plus_one = true,
     .rope_base_local = 10000.0f,
     .large_n_layers = 62},
    {.name = "gemma4",
     .features = {.activation = FKV_GELU_TANH,
                  .embedding_sqrt_dim = true,
                  .post_norms = true,
                  .qk_norm = FKV_QK_NORM_HEADS,
                  .v_norm = true,
                  .k_may_be_v = true,
                  .layer_scales = true,
                  .parallel_experts = true,
                  .norm_experts = true,
                  .separate_local_rope = true,
                  .window_period = 6},
     .hf_names = {{"post_attention_layernorm", "post_attention_norm"},
                  {"pre_feedforward_layernorm", "ffn_norm"},
                  {"post_feedforward_layernorm", "post_ffw_norm"},
                  {"layer_scalar", "layer_output_scale"},
                  {"per_layer_input_gate", "inp_gate"},
                  {"per_layer_projection", "proj"},
                  {"post_per_layer_input_norm", "post_norm"},
                  {"post_feedforward_layernorm_1", "post_ffw_norm_1"},
                  {"post_feedforward_layernorm_2", "post_ffw_norm_2"},
                  {"pre_feedforward_layernorm_2", "pre_ffw_norm_2"},
                  {"router.proj", "ffn_gate_inp"},
                  {"router.scale", "ffn_gate_inp"},
                  {"router.per_expert_scale", "ffn_down_exps"},
                  {"experts.gate_up_proj", "ffn_up_exps"},
                  {"experts.down_proj", "ffn_down_exps"}},
     .rope_base = 1e6f,
     .rope_base_local = 10000.0f,
     .query_scale = 1.0f},
    {.name = "deepseek2", .gguf_interleaved = true},
    {.name = "mistral4", .features = {.norm_experts = true}, .gguf_interleaved = true},
    {.name = "minicpm3"},
    {.name = "kimi-linear",
     .features = {.recurrence = FKV_KDA, .norm_experts = true, .sigmoid_router = true},
     .hf_names = KIMI_LINEAR_NAMES},
    {.name = "phi3", .features = {.window_period = FKV_NO_PERIOD}},
    {.name = "smollm3", .features = {.no_rope_period = 4}, .gguf_interleaved = true, .rope_base = 2e6f},
    {.name = "granite",
     .hf_names = {{"shared_mlp.input_linear", "ffn_up"}, {"shared_mlp.output_linear", "ffn_down"}},
     .gguf_interleaved = true,
     .divides_logits = true},
    {.name = "granitemoe", .features = {.norm_experts = true}, .gguf_interleaved = true, .divides_logits = true},
    {.name = "granitehybrid",
     .features = {.recurrence = FKV_MAMBA2, .norm_experts = true},
     .hf_names = MAMBA2_NAMES,
     .gguf_interleaved = true,
     .divides_logits = true},
    {.name = "nemotron_h", .features = NEMOTRON_FEATURES, .hf_names = NEMOTRON_NAMES},
    {.name = "nemotron_h_moe", .features = NEMOTRON_FEATURES, .hf_names = NEMOTRON_NAMES},
    {.name = "falcon-h1", .features = {.recurrence = FKV_MAMBA2, .parallel_mixers = true}, .hf_names = FALCON_NAMES},
    {.name = "olmo2",
     .features =
         {.no_pre_norms = true, .post_norms = true, .qk_norm = FKV_QK_NORM_ROWS, .separate_local_rope = true, .window_period = 4},
     .hf_names = OLMO_NORM_NAMES},
    {.name = "command-r",
     .features = {.norm = FKV_NORM_LAYER, .parallel = true},
     .gguf_interleaved = true,
     .hf_interleaved = true},
    {.name = "cohere2",
     .features = {.norm = FKV_NORM_LAYER, .parallel = true, .no_rope_full = true, .window_period = 4},
     .gguf_interleaved = true,
     .hf_interleaved = true},
    {.name = "chatglm", .features = {.qkv_bias = true}, .gguf_interleaved = true, .hf_interleaved = true},
    {.name = "glm4",
     .features = {.post_norms = true},
     .hf_names = {{"post_self_attn_layernorm", "post_attention_norm"}, {"post_mlp_layernorm", "post_ffw_norm"}},
     .gguf_interleaved = true,
     .hf_interleaved = true},
    {.name = "seed_oss", .gguf_post_attn_is_ffn_norm = true},
    {.name = "ernie4_5", .gguf_interleaved = true, .hf_interleaved = true},
    {.name = "ernie4_5-moe",
     .features = {.norm_experts = true},
     .hf_names = {{"mlp.moe_statics.e_score_correction_bias", "exp_probs_b"},
                  {"mlp.gate.moe_statics.e_score_correction_bias", "exp_probs_b"}},
     .gguf_interleaved = true,
     .hf_interleaved = true,
     .rope_base = 5e5f},
    {.name = "exaone4",
     .features = {.no_pre_norms = true,
                  .post_norms = true,
                  .qk_norm = FKV_QK_NORM_HEADS,
                  .no_rope_full = true,
                  .no_window_ropes_all = true,
                  .window_period = 4},
     .hf_names = OLMO_NORM_NAMES},
    {.name = "olmoe", .features = {.qk_norm = FKV_QK_NORM_ROWS}},
    {.name = "minimax-m2",
     .features = {.qk_norm = FKV_QK_NORM_ROWS, .norm_experts = true, .sigmoid_router = true},
     .hf_names = {{"block_sparse_moe.e_score_correction_bias", "exp_probs_b"}, {"mlp.e_score_correction_bias", "exp_probs_b"}},
     .rope_base = 5e6f},
    {.name = "hunyuan-dense", .features = {.qk_norm = FKV_QK_NORM_HEADS, .qk_norm_after_rope = true}, .hf_names = HUNYUAN_NAMES},
    {.name = "hunyuan-moe",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .qk_norm_after_rope = true, .norm_experts = true},
     .hf_names = HUNYUAN_NAMES},
    {.name = "dots1", .features = {.qk_norm = FKV_QK_NORM_HEADS, .sigmoid_router = true}},
    {.name = "arcee", .features = {.plain_ffn = true, .activation = FKV_RELU2}, .gguf_interleaved = true},
    {.name = "starcoder2",
     .features = {.norm = FKV_NORM_LAYER, .plain_ffn = true, .activation = FKV_GELU_TANH, .window_period = FKV_NO_PERIOD},
     .hf_names = {{"mlp.c_fc", "ffn_up"}, {"mlp.c_proj", "ffn_down"}}},
    {.name = "apertus",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .plain_ffn = true, .activation = FKV_XIELU},
     .hf_names = {{"attention_layernorm", "attn_norm"},
                  {"feedforward_layernorm", "ffn_norm"},
                  {"mlp.act_fn.alpha_p", "xielu_alpha_p"},
                  {"mlp.act_fn.alpha_n", "xielu_alpha_n"},
                  {"mlp.act_fn.beta", "xielu_beta"},
                  {"mlp.act_fn.eps", "xielu_eps"}},
     .rope_base = 12e6f},
    {.name = "phimoe",
     .features = {.norm = FKV_NORM_LAYER, .sparse_mixer = true, .window_period = FKV_NO_PERIOD},
     .hf_names = {{"mlp.router", "ffn_gate_inp"}},
     .rope_base = 1e6f},
    {.name = "afmoe",
     .features = {.embedding_sqrt_dim = true,
                  .post_norms = true,
                  .qk_norm = FKV_QK_NORM_HEADS,
                  .attn_gate = true,
                  .norm_experts = true,
                  .sigmoid_router = true,
                  .no_rope_full = true,
                  .window_period = 4},
     .hf_names = {{"post_attention_layernorm", "post_attention_norm"},
                  {"pre_mlp_layernorm", "ffn_norm"},
                  {"post_mlp_layernorm", "post_ffw_norm"},
                  {"self_attn.gate_proj", "attn_gate"},
                  {"mlp.router.gate", "ffn_gate_inp"},
                  {"mlp.expert_bias", "exp_probs_b"}}},
    {.name = "mimo2",
     .features = {.sinks = true,
                  .window_sinks = true,
                  .norm_experts = true,
                  .sigmoid_router = true,
                  .separate_local_rope = true,
                  .window_period = 6}},
    {.name = "llama4",
     .features = {.qk_norm_after_rope = true, .sigmoid_router = true, .experts_scale_input = true, .no_rope_period = 4},
     .hf_names = {{"feed_forward.gate_proj", "ffn_gate"},
                  {"feed_forward.up_proj", "ffn_up"},
                  {"feed_forward.down_proj", "ffn_down"},
                  {"feed_forward.router", "ffn_gate_inp"},
                  {"feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"},
                  {"feed_forward.shared_expert.up_proj", "ffn_up_shexp"},
                  {"feed_forward.shared_expert.down_proj", "ffn_down_shexp"},
                  {"feed_forward.experts.gate_up_proj", "ffn_up_exps"},
                  {"feed_forward.experts.down_proj", "ffn_down_exps"},
                  {"feed_forward.experts.gate_proj", "ffn_gate_exps"},
                  {"feed_forward.experts.up_proj", "ffn_up_exps"}},
     .gguf_interleaved = true,
     .hf_interleaved = true,
     .rope_base = 5e5f},
    {.name = "bailingmoe", .features = {.norm_experts = true}, .hf_names = BAILING_NAMES, .gguf_interleaved = true},
    {.name = "bailingmoe2",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .norm_experts = true, .sigmoid_router = true},
     .hf_names = BAILING_NAMES},
    {.name = "gpt-oss",
     .features = {.activation = FKV_SWIGLU_CLAMPED,
                  .qkv_bias = true,
                  .sinks = true,
                  .norm_experts = true,
                  .yarn_unrounded = true,
                  .window_period = 2},
     .gguf_post_attn_is_ffn_norm = true},
    {.name = "lfm2",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .recurrence = FKV_SHORT_CONV},
     .hf_names = LFM2_NAMES,
     .rope_base = 1e6f},
    {.name = "lfm2moe",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .recurrence = FKV_SHORT_CONV, .norm_experts = true, .sigmoid_router = true},
     .hf_names = LFM2_NAMES,
     .rope_base = 1e6f},
    {.name = "qwen3next",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .recurrence = FKV_DELTA_NET, .gate_in_q = true, .norm_experts = true},
     .hf_names = DELTA_NET_NAMES,
     .hf_norm_plus_one = true,
     .gguf_post_attn_is_ffn_norm = true},
    {.name = "qwen35",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .recurrence = FKV_DELTA_NET, .gate_in_q = true},
     .hf_names = DELTA_NET_NAMES,
     .hf_norm_plus_one = true,
     .gguf_post_attn_is_ffn_norm = true,
     .gguf_tiled_heads = true},
    {.name = "qwen35moe",
     .features = {.qk_norm = FKV_QK_NORM_HEADS, .recurrence = FKV_DELTA_NET, .gate_in_q = true, .norm_experts = true},
     .hf_names = DELTA_NET_NAMES,
     .hf_norm_plus_one = true,
     .gguf_post_attn_is_ffn_norm = true,
     .gguf_tiled_heads = true},
};

const fkv_architecture *fkv_architecture_find(const char *name) {
    for (size_t i = 0; i < sizeof ARCHITECTURES / sizeof ARCHITECTURES[0]; i++)
        if (strcmp(ARCHITECTURES[i].name, name) == 0) return &ARCHITECTURES[i];
    return NULL;
}

const char *fkv_architecture_names(void) {
    return "llama, mistral3, qwen2, qwen3, qwen3vl, qwen2moe, qwen3moe, glm4moe, gemma, gemma2, gemma3, gemma4, phi3, smollm3, "
           "granite, granitemoe, granitehybrid, nemotron_h, nemotron_h_moe, falcon-h1, olmo2, command-r, cohere2, chatglm, glm4, seed_oss, ernie4_5, gpt-oss, qwen2vl, qwen3vlmoe, "
           "ernie4_5-moe, exaone4, olmoe, minimax-m2, hunyuan-dense, hunyuan-moe, dots1, arcee, starcoder2, apertus, phimoe, afmoe, "
           "llama4, mimo2, bailingmoe, bailingmoe2, lfm2, lfm2moe, qwen3next, qwen35, qwen35moe and kimi-linear";
}

#define RECURRENT "layers with this kind of recurrent state (state space or linear attention) are not supported"
#define ALTUP "multiple residual streams (AltUp), low-rank residuals (LAUREL) and sparse activations are not supported"
#define INDEXED "sparse attention with an indexer is not supported"

const char *fkv_architecture_refusal(const char *name) {
    static const struct {
        const char *name;
        const char *why;
    } refused[] = {
        {"mamba", RECURRENT},           {"mamba2", RECURRENT},         {"falcon_mamba", RECURRENT}, {"jamba", RECURRENT},
        {"bamba", RECURRENT},           {"plamo2", RECURRENT},         {"rwkv6", RECURRENT},        {"rwkv7", RECURRENT},
        {"recurrent_gemma", RECURRENT}, {"bailing_hybrid", RECURRENT}, {"olmo_hybrid", RECURRENT},  {"zamba2", RECURRENT},
        {"minimax", RECURRENT},         {"kimi_k3", RECURRENT},        {"deepseek_v32", INDEXED},   {"deepseek32", INDEXED},
        {"deepseek_v4", INDEXED},       {"deepseek4", INDEXED},        {"glm_moe_dsa", INDEXED},    {"glm-dsa", INDEXED},
        {"glm5_next", INDEXED},         {"qwen4_exp", INDEXED},        {"gemma3n", ALTUP},          {"gemma3n_text", ALTUP},
    };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (strcmp(refused[i].name, name) == 0) return refused[i].why;
    return NULL;
}

static bool is_period_end(uint32_t layer, uint32_t period) {
    return period != 0 && period != FKV_NO_PERIOD && (layer + 1) % period == 0;
}

void fkv_architecture_set_layers(fkv_hparams *h) {
    const fkv_features *f = &h->features;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        bool windowed = h->window != 0 && f->window_period != 0 && !is_period_end(i, f->window_period);
        h->layers[i] =
            (uint8_t)((windowed ? FKV_LAYER_WINDOW : 0) | (is_period_end(i, f->no_rope_period) ? FKV_LAYER_NO_ROPE : 0));
    }
}

/* Fills in missing layer shapes and assigns kv_layer. A layer that stores no keys reads the pages of the last layer of the same
 * kind (windowed or full attention) that stores keys. If there is no such layer, kv_layer is the index of the layer itself, and
 * model.c rejects the model. */
static void complete_layer_shapes(fkv_hparams *h) {
    uint32_t n = fkv_min_u32(h->n_layers, FKV_MAX_LAYERS);
    uint32_t n_kv = fkv_architecture_n_kv_layers(h);
    for (uint32_t i = 0; i < n; i++) {
        fkv_layer_shape *s = &h->shapes[i];
        if (s->n_kv_heads == 0) s->n_kv_heads = h->n_kv_heads;
        if (s->head_dim == 0) s->head_dim = h->head_dim;
        if (s->ffn_dim == 0) s->ffn_dim = h->ffn_dim;
        s->kv_layer = i;
        for (uint32_t j = 0; i >= n_kv && j < n_kv && j < i; j++)
            if ((h->layers[i] & FKV_LAYER_WINDOW) == (h->layers[j] & FKV_LAYER_WINDOW)) s->kv_layer = j;
    }
}

/* Assigns a cache layer number to the pages and to the recurrent state of each model layer, in layer order. */
static void number_cache_layers(fkv_hparams *h) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        fkv_layer_shape *s = &h->shapes[i];
        const bool has_pages = fkv_architecture_has_attention(h, i) && s->kv_layer == i;
        s->page_layer = has_pages ? n++ : h->shapes[s->kv_layer].page_layer;
        s->state_layer = fkv_architecture_is_recurrent(h, i) ? n++ : 0;
    }
}

uint32_t fkv_architecture_v_dim(const fkv_hparams *h, const fkv_layer_shape *s) {
    if (fkv_architecture_is_latent(h)) return h->latent.v_dim;
    return h->v_dim != 0 ? h->v_dim : s->head_dim;
}

bool fkv_architecture_has_experts(const fkv_hparams *h, uint32_t layer) {
    return h->n_experts != 0 && layer >= h->n_dense && (h->layers[layer] & (FKV_LAYER_DENSE | FKV_LAYER_NO_FFN)) == 0;
}

static bool has_dense_layers(const fkv_hparams *h) {
    bool has = h->n_dense != 0;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) has = has || (h->layers[i] & FKV_LAYER_DENSE) != 0;
    return has;
}

/* Fills in missing expert dimensions. In layers with a shared expert, ffn_dim is the dimension of that expert. */
static void complete_expert_dims(fkv_hparams *h) {
    if (h->expert_dim == 0) h->expert_dim = h->ffn_dim;
    if (h->n_experts == 0) return;
    if (!has_dense_layers(h) && !h->features.parallel_experts) h->ffn_dim = h->expert_dim;
    for (uint32_t i = 0; h->shared_dim != 0 && i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        if (fkv_architecture_has_experts(h, i)) h->shapes[i].ffn_dim = h->shared_dim;
}

bool fkv_architecture_is_recurrent(const fkv_hparams *h, uint32_t layer) { return (h->layers[layer] & FKV_LAYER_RECURRENT) != 0; }

bool fkv_architecture_has_attention(const fkv_hparams *h, uint32_t layer) {
    const bool is_other = (h->layers[layer] & (FKV_LAYER_RECURRENT | FKV_LAYER_NO_MIXER)) != 0;
    return !is_other || (h->features.parallel_mixers && fkv_architecture_is_recurrent(h, layer));
}

bool fkv_architecture_has_ffn(const fkv_hparams *h, uint32_t layer) { return (h->layers[layer] & FKV_LAYER_NO_FFN) == 0; }

/* Returns the number of cache layers that a model layer needs: one for its keys and values and one for its recurrent state, if
 * any. */
static uint32_t n_stored(const fkv_hparams *h, uint32_t layer) {
    const bool has_pages = fkv_architecture_has_attention(h, layer) && h->shapes[layer].kv_layer == layer;
    return (has_pages ? 1u : 0u) + (fkv_architecture_is_recurrent(h, layer) ? 1u : 0u);
}

uint32_t fkv_architecture_n_cache_layers(const fkv_hparams *h) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < h->n_layers; i++) n += n_stored(h, i);
    return n;
}

uint32_t fkv_architecture_n_storing_layers(const fkv_hparams *h) {
    uint32_t n = h->n_layers;
    while (n > 0 && n_stored(h, n - 1) == 0) n--;
    return n;
}

bool fkv_architecture_has_recurrence(const fkv_hparams *h) {
    bool has = false;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) has = has || fkv_architecture_is_recurrent(h, i);
    return has;
}

uint32_t fkv_architecture_conv_channels(const fkv_hparams *h) {
    const fkv_recurrence *r = &h->recurrence;
    return h->features.recurrence == FKV_SHORT_CONV ? h->dim : 2 * r->n_k_heads * r->k_dim + r->n_v_heads * r->v_dim;
}

uint64_t fkv_architecture_state_bytes(const fkv_hparams *h) {
    const fkv_recurrence *r = &h->recurrence;
    uint64_t n = (uint64_t)(r->n_taps - 1) * fkv_architecture_conv_channels(h);
    if (h->features.recurrence != FKV_SHORT_CONV) n += (uint64_t)r->n_v_heads * r->v_dim * r->k_dim;
    return fkv_align_up(n * sizeof(float), 64);
}

uint32_t fkv_architecture_n_kv_layers(const fkv_hparams *h) {
    return h->n_shared_kv_layers < h->n_layers ? h->n_layers - h->n_shared_kv_layers : 0;
}

void fkv_architecture_finish(const fkv_architecture *architecture, fkv_hparams *h) {
    const fkv_features *f = &h->features;
    const bool no_rope_full = f->no_rope_full && (h->window != 0 || !f->no_window_ropes_all);
    for (uint32_t i = 0; no_rope_full && i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        if ((h->layers[i] & FKV_LAYER_WINDOW) == 0) h->layers[i] |= FKV_LAYER_NO_ROPE;
    float base = architecture != NULL && architecture->rope_base != 0.0f ? architecture->rope_base : 10000.0f;
    float local = architecture != NULL ? architecture->rope_base_local : 0.0f;
    if (h->rope.base == 0.0f) h->rope.base = base;
    if (f->separate_local_rope && h->local_rope.base == 0.0f) h->local_rope.base = local != 0.0f ? local : h->rope.base;
    if (h->local_rope.dim == 0) h->local_rope.dim = h->rope.dim;
    if (h->query_scale == 0.0f && architecture != NULL) h->query_scale = architecture->query_scale;
    complete_expert_dims(h);
    complete_layer_shapes(h);
    number_cache_layers(h);
    h->rope.yarn_unrounded = h->rope.yarn_unrounded || f->yarn_unrounded;
    if (architecture != NULL && architecture->divides_logits && h->logit_scale != 0.0f) h->logit_scale = 1.0f / h->logit_scale;
}

uint32_t fkv_architecture_window(const fkv_hparams *h, uint32_t layer) {
    return (h->layers[layer] & FKV_LAYER_WINDOW) != 0 ? h->window : 0;
}

static bool has_windows(const fkv_hparams *h) {
    bool has = false;
    for (uint32_t i = 0; i < h->n_layers; i++) has = has || fkv_architecture_window(h, i) != 0;
    return has;
}

/* Keys can be centered only if no norm is applied after the K bias is added, and if the result of the softmax does not change
 * when all scores are shifted by the same amount. Models with QK norms, soft caps or attention sinks do not meet these
 * conditions. */
bool fkv_architecture_centers_keys(const fkv_hparams *h) {
    const fkv_features *f = &h->features;
    return f->qkv_bias && f->qk_norm == FKV_QK_PLAIN && !f->sinks && h->softcap == 0.0f;
}

/* Returns an FNV-1a checksum of the RoPE frequencies, rounded to float, and the attention factor. */
static uint32_t frequencies_checksum(const fkv_hparams *h, bool is_long) {
    double frequencies[FKV_MAX_HEAD_DIM / 2 + 1];
    frequencies[h->rope.dim / 2] = fkv_rope_frequencies(&h->rope, h, is_long, frequencies);
    uint32_t name = 2166136261u;
    for (uint32_t i = 0; i <= h->rope.dim / 2; i++) {
        float rounded = (float)frequencies[i];
        uint8_t bytes[sizeof rounded];
        memcpy(bytes, &rounded, sizeof rounded);
        for (size_t b = 0; b < sizeof bytes; b++) name = (name ^ bytes[b]) * 16777619u;
    }
    return name;
}

fkv_status fkv_architecture_rope_id(const fkv_hparams *h, bool is_long, char rope_id[64]) {
    static const char *const scalings[] = {"factors", "llama3", "yarn", "long"};
    char local[32] = "";
    char scale[32] = "";
    char center[24] = "";
    if (h->local_rope.base != 0.0f && has_windows(h)) {
        int n = snprintf(local, sizeof local, " local=%.9g", (double)h->local_rope.base);
        if (h->local_rope.dim != h->rope.dim) (void)snprintf(local + n, sizeof local - (size_t)n, "/%u", h->local_rope.dim);
    }
    if (h->rope.scaling != FKV_ROPE_LINEAR || h->rope.short_factors != NULL ||
        (h->rope.attention_factor != 0.0f && h->rope.attention_factor != 1.0f))
        (void)snprintf(scale, sizeof scale, " %s=%08x", scalings[h->rope.scaling], frequencies_checksum(h, is_long));
    else if (h->rope.factor != 1.0f)
        (void)snprintf(scale, sizeof scale, " scale=%.9g", (double)h->rope.factor);
    if (fkv_architecture_centers_keys(h)) (void)snprintf(center, sizeof center, " center=%u", h->context);
    int length = snprintf(rope_id, 64, "%s dim=%u base=%.9g%s%s%s", h->rope_interleaved ? "pairs" : "neox", h->rope.dim,
                          (double)h->rope.base, local, scale, center);
    FKV_REQUIRE(length > 0 && length < 64, FKV_UNSUPPORTED,
                "the RoPE description of this model has %d characters; page files store at most 63", length);
    return FKV_OK;
}
