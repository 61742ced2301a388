"""Builds a small model of every model type in mlx-lm from a configuration.

SMALL contains sizes under the names that most types use; types ignore names that they do not know. OVERRIDES contains additional or
different values per type. Windows are shorter than the prompt of census.py, so that they take effect. All experts are active, because
selecting a different expert would amplify small errors.
"""
import importlib
import pkgutil
import sys
import types

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 16
ROPE = {"rope_theta": 10000.0, "type": "default", "rope_type": "default"}
ROPES = {FULL: ROPE, SLIDING: ROPE}
EVERY_SECOND = {"layer_types": [SLIDING, FULL, SLIDING, FULL]}

SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 1000, "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "qk_norm": True, "post_norm": True,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    # alternative names of the sizes above
    "n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 2048, "n_ctx": 2048, "n_inner": 256, "rotary_dim": 16, "d_model": 128, "n_layers": 4,
    "n_heads": 4, "num_heads": 4, "num_layers": 4, "num_kv_heads": 2, "n_kv_heads": 2, "hidden_dim": 128, "model_dim": 128, "num_vocab": 1000,
    "hidden_size_per_head": 32, "kv_channels": 32, "mlp_hidden_size": 256, "embedding_size": 1000, "block_size": 2048,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 4, "num_experts_per_token": 4,
    "moe_topk": 4, "moe_top_k": 4, "moe_k": 4, "n_shared_experts": 1, "num_shared_experts": 1, "num_shared_expert": 1, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "shared_intermediate_size": 64, "share_expert_dim": 64,
    "moe_hidden_size": 64, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [],
    # latent attention
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "index_head_dim": 32, "index_n_heads": 4, "index_topk": 16,
    # recurrent and convolutional layers of hybrid models
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3,
    "conv_bias": False, "conv_L_cache": 3, "conv_kernel": 3, "conv_window": 2, "use_conv_bias": True, "state_size": 32, "ssm_state_size": 32,
    "layer_group_size": 2, "group_norm_size": 1, "mamba_d_conv": 4, "mamba_d_state": 32, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 32,
    "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_d_ssm": 256, "mamba_conv_bias": False, "mamba_proj_bias": False,
    "n_groups": 1, "time_step_limit": [0.01, 10.0], "time_step_rank": "auto",
    # scaling factors
    "logits_scaling": 1.0, "attention_multiplier": 0.18, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "dim_model_base": 128,
    "scale_depth": 1.4, "scale_emb": 1.0, "post_norm_eps": 1e-5, "final_logit_softcapping": 30.0, "output_multiplier": 1.0,
}

YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}
LATENT = {"num_key_value_heads": 4}
LFM2 = {"block_dim": 128, "block_ff_dim": 128, "block_multiple_of": 4, "block_ffn_dim_multiplier": 2, "block_auto_adjust_ff_dim": True,
        "layer_types": [FULL, "", FULL, ""]}
GEMMA4 = {"num_hidden_layers": 6, "num_key_value_heads": 1, "global_head_dim": 64, "vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 2,
          "hidden_size_per_layer_input": 32, "sliding_window_pattern": 3, "layer_types": [SLIDING, SLIDING, FULL] * 2,
          "rope_parameters": {FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6}, SLIDING: {"rope_theta": 10000.0}}}
GEMMA3N = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 1000, "rope_local_base_freq": 1.0, "final_logit_softcapping": 1.0,
           "activation_sparsity_pattern": [0.5] * 4, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "altup_coef_clip": 1.0,
           "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8} | EVERY_SECOND
LLAMA4 = {"attention_chunk_size": 8, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128, "num_experts_per_tok": 1, "rope_scaling": None,
          "no_rope_layers": [0, 0, 1, 1]}
LONGCAT = {"attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 128, "expert_ffn_hidden_size": 128, "zero_expert_num": 2,
           "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
KIMI = {"linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1, 2, 3], "full_attn_layers": [4], "short_conv_kernel_size": 4},
        "model_max_length": 1000} | LATENT

OVERRIDES = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": EVERY_SECOND,
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "bailing_hybrid": LATENT,
    "bailing_moe_linear": LATENT,
    "dbrx": {"ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 4},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v3": {"rope_scaling": YARN},
    "deepseek_v32": {"rope_scaling": YARN} | LATENT,
    "deepseek_v41": {"compress_ratios": [0] * 4, "kv_source_layer_ids": [0, 1, 2, 3], "index_source_layer_ids": [0, 1, 2, 3], "o_groups": 2,
                     "o_lora_rank": 32},
    "exaone4": {"sliding_window_pattern": "LLGL", "rope_scaling": None},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]} | EVERY_SECOND,
    "falcon_h1": {"num_hidden_layers": 2},
    "gear": {"layer_types": [SLIDING, "conv_mixer", SLIDING, FULL], "final_logit_softcapping": None},
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3": {"text_config": {"model_type": "gemma3_text", "sliding_window_pattern": 2}},
    "gemma3n": {"text_config": {"model_type": "gemma3n"} | GEMMA3N},
    "gemma4": {"text_config": {"model_type": "gemma4_text"} | GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": {"rope_parameters": ROPE} | LATENT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": EVERY_SECOND,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k25": {"text_config": {"model_type": "kimi_k25"} | LATENT},
    "kimi_k3": {"text_config": {"model_type": "kimi_linear", "attn_res_block_size": 2, "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0}
                | KIMI},
    "kimi_linear": KIMI,
    "kimi_vl": {"text_config": {"model_type": "kimi_vl"} | LATENT},
    "laguna": {"num_attention_heads_per_layer": [4] * 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "rope_parameters": ROPES} | EVERY_SECOND,
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": {"model_type": "lfm2"} | LFM2},
    "lfm2_moe": {"use_expert_bias": True, "num_dense_layers": 1} | LFM2,
    "llama": EVERY_SECOND,
    "llama4": {"text_config": {"model_type": "llama4"} | LLAMA4},
    "llama4_text": LLAMA4,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "mellum": {"rope_parameters": ROPES} | EVERY_SECOND,
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 0, 1], "add_swa_attention_sink_bias": True,
                      "add_full_attention_sink_bias": False, "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                      "head_dim": 64, "v_head_dim": 32, "swa_head_dim": 64, "swa_v_head_dim": 32},
    "minimax_m3_vl": {"text_config": {"model_type": "minimax_m3_vl", "dense_intermediate_size": 128, "moe_layer_freq": None}},
    "minicpm3": {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 2048, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}},
    "ministral3": {"rope_parameters": ROPE | {"original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1}} | EVERY_SECOND,
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": ROPE | {"original_max_position_embeddings": 4096,
                                                                                        "llama_4_scaling_beta": 0.1}} | EVERY_SECOND},
    "mistral4": {"rope_parameters": ROPE | {"original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1}} | LATENT,
    "muse_glimmer": EVERY_SECOND,
    "muse_spark": {"text_config": {"rope_parameters": ROPE, "layer_rope_theta": [10000.0] * 4, "num_shared_experts": 0} | EVERY_SECOND},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"num_attention_heads": 8, "block_configs": [{"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False},
                                        "ffn": {"ffn_mult": 1.3125, "no_op": False, "replace_with_linear": False}}] * 4},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 4, "residual_in_fp32": True, "hybrid_override_pattern": ["*", "M", "*", "M"]},
    "olmo3": {"num_hidden_layers": 8},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {"num_transformer_layers": 4, "ffn_dim_divisor": 32, "num_query_heads": [4, 4, 8, 8], "num_kv_heads": [1, 1, 2, 2],
                "ffn_multipliers": [0.5, 1.0, 2.0, 4.0]},
    "phi3": {"partial_rotary_factor": 1.0},
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "ff_intermediate_size": 256, "gegelu_limit": 20.0, "mup_width_multiplier": 8.0,
                  "mup_attn_multiplier": 1.0, "mup_use_scaling": True, "mup_embedding_multiplier": 10.0, "blocksparse_block_size": 64,
                  "blocksparse_num_local_blocks": 16, "blocksparse_vert_stride": 8, "rope_embedding_base": 10000.0},
    "phimoe": {"rope_scaling": {"long_factor": [1.0] * 16, "short_factor": [1.0] * 16, "long_mscale": 1.2, "short_mscale": 1.2}},
    "pixtral": {"text_config": {"model_type": "llama"} | EVERY_SECOND},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"mamba_num_heads": 4},
    "plamo3": {"sliding_window_pattern": 2},
    "qwen": {"num_key_value_heads": 4},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "block_types": ["recurrent", "recurrent", "attention"],
                        "num_key_value_heads": 1, "num_hidden_layers": 6},
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "spark2_5": {"rope_parameters": ROPES} | EVERY_SECOND,
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"num_attention_groups": 2, "moe_num_experts": 4, "moe_layers_enum": "1,2,3",
                "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2}} | EVERY_SECOND,
    "talkie": {"num_attention_heads": 4},
    "youtu_llm": LATENT,
}
EXCLUDED = {"prism_hadamard_qwen35": "qwen3_5 with packed weights, which can only be built from a manifest of weight files"}


sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))  # mlx-lm's olmo module exits the process if this package is missing


def names():
    """Returns the model types of the installed mlx-lm, which are the modules that define Model and ModelArgs."""
    found = []
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        module = importlib.import_module(f"mlx_lm.models.{info.name}")
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            found.append(info.name)
    return found


def config(name):
    made = SMALL | {"model_type": name} | OVERRIDES.get(name, {})
    if "text_config" in made:
        made["text_config"] = SMALL | made["text_config"]
    return made


def filled(p):
    """Converts a parameter to float32. Zeros become random values, because they would hide the layers before them."""
    if mx.issubdtype(p.dtype, mx.floating):
        return p.astype(mx.float32) if mx.any(p).item() else 0.1 * mx.random.normal(p.shape)
    return p if mx.any(p).item() else mx.random.randint(0, 256, p.shape).astype(p.dtype)


def ternary(layer, x, packed):
    """Approximates bitnet's Metal kernel: a matrix product with four ternary weights per byte."""
    weights = mx.concatenate([(packed >> 2 * i) & 3 for i in range(4)])[:layer.out_features].astype(x.dtype) - 1
    return x @ weights.T / layer.in_features**0.5


def build(name):
    """Returns a model of this type with random weights."""
    if name == "bitnet":
        importlib.import_module("mlx_lm.models.bitlinear_layers").BitLinear.execute_matmul_kernel = ternary
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config(name)))
    model.update(tree_map(filled, model.parameters()))
    return model
