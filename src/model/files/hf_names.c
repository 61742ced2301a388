/* Translates Hugging Face tensor names to GGUF names. Separate expert tensors keep their index: "ffn_up.7". */
#include "hf_config.h"

#include "../architecture.h"

#include <stdio.h>

static const fkv_name_pair OUTER_NAMES[] = {{"embed_tokens", "token_embd"},
                                            {"word_embeddings", "token_embd"},
                                            {"embeddings", "token_embd"},
                                            {"norm", "output_norm"},
                                            {"embedding_norm", "output_norm"},
                                            {"norm_f", "output_norm"},
                                            {"final_layernorm", "output_norm"},
                                            {"lm_head", "output"},
                                            {"embed_tokens_per_layer", "per_layer_token_embd"},
                                            {"per_layer_model_projection", "per_layer_model_proj"},
                                            {"per_layer_projection_norm", "per_layer_proj_norm"}};

static const fkv_name_pair LAYER_NAMES[] = {{"self_attn.q_proj", "attn_q"},
                                            {"self_attn.k_proj", "attn_k"},
                                            {"self_attn.v_proj", "attn_v"},
                                            {"self_attn.qkv_proj", "attn_qkv"},
                                            {"self_attn.o_proj", "attn_output"},
                                            {"self_attn.q_a_proj", "attn_q_a"},
                                            {"self_attn.q_a_layernorm", "attn_q_a_norm"},
                                            {"self_attn.q_b_proj", "attn_q_b"},
                                            {"self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"},
                                            {"self_attn.kv_a_layernorm", "attn_kv_a_norm"},
                                            {"self_attn.kv_b_proj", "attn_kv_b"},
                                            {"self_attn.embed_q", "attn_k_b"},
                                            {"self_attn.unembed_out", "attn_v_b"},
                                            {"self_attn.q_norm", "attn_q_norm"},
                                            {"self_attn.k_norm", "attn_k_norm"},
                                            {"self_attn.sinks", "attn_sinks"},
                                            {"self_attn.attention_sink_bias", "attn_sinks"},
                                            {"mlp.gate_proj", "ffn_gate"},
                                            {"mlp.up_proj", "ffn_up"},
                                            {"mlp.gate_up_proj", "ffn_up"},
                                            {"mlp.down_proj", "ffn_down"},
                                            {"mlp.gate", "ffn_gate_inp"},
                                            {"mlp.router", "ffn_gate_inp"},
                                            {"mlp.gate.e_score_correction_bias", "exp_probs_b"},
                                            {"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
                                            {"mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
                                            {"mlp.shared_expert.up_proj", "ffn_up_shexp"},
                                            {"mlp.shared_expert.down_proj", "ffn_down_shexp"},
                                            {"mlp.shared_experts.gate_proj", "ffn_gate_shexp"},
                                            {"mlp.shared_experts.up_proj", "ffn_up_shexp"},
                                            {"mlp.shared_experts.down_proj", "ffn_down_shexp"},
                                            {"mlp.switch_mlp.gate_proj", "ffn_gate_exps"},
                                            {"mlp.switch_mlp.up_proj", "ffn_up_exps"},
                                            {"mlp.switch_mlp.down_proj", "ffn_down_exps"},
                                            {"mlp.experts.gate_proj", "ffn_gate_exps"},
                                            {"mlp.experts.up_proj", "ffn_up_exps"},
                                            {"mlp.experts.gate_up_proj", "ffn_up_exps"},
                                            {"mlp.experts.down_proj", "ffn_down_exps"},
                                            {"block_sparse_moe.gate", "ffn_gate_inp"},
                                            {"block_sparse_moe.router.layer", "ffn_gate_inp"},
                                            {"block_sparse_moe.input_linear", "ffn_up_exps"},
                                            {"block_sparse_moe.output_linear", "ffn_down_exps"},
                                            {"block_sparse_moe.switch_mlp.gate_proj", "ffn_gate_exps"},
                                            {"block_sparse_moe.switch_mlp.up_proj", "ffn_up_exps"},
                                            {"block_sparse_moe.switch_mlp.down_proj", "ffn_down_exps"},
                                            {"experts.switch_glu.gate_proj", "ffn_gate_exps"},
                                            {"experts.switch_glu.up_proj", "ffn_up_exps"},
                                            {"experts.switch_glu.down_proj", "ffn_down_exps"},
                                            {"input_layernorm", "attn_norm"},
                                            {"post_attention_layernorm", "ffn_norm"}};

static const fkv_name_pair EXPERT_NAMES[] = {{"gate_proj", "ffn_gate"}, {"up_proj", "ffn_up"}, {"down_proj", "ffn_down"},
                                             {"w1", "ffn_gate"},        {"w3", "ffn_up"},      {"w2", "ffn_down"}};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Looks up a name in a table of n_pairs entries, which an empty entry may terminate early. stem: [n], the name without ".weight"
 * or ".bias". Returns NULL if the name is not in the table. */
static const char *look_up_name(const fkv_name_pair *pairs, size_t n_pairs, const char *stem, size_t n) {
    for (size_t i = 0; i < n_pairs && pairs[i].hf != NULL; i++)
        if (strlen(pairs[i].hf) == n && memcmp(pairs[i].hf, stem, n) == 0) return pairs[i].gguf;
    return NULL;
}

/* Parses a number without leading zeros, followed by a dot. Returns the text after the dot, or NULL if the text does not have
 * this form. */
static const char *skip_number(const char *text, unsigned *number) {
    int n = 0;
    *number = 0;
    while (n < 4 && text[n] >= '0' && text[n] <= '9') *number = *number * 10 + (unsigned)(text[n++] - '0');
    return n == 0 || text[n] != '.' || (text[0] == '0' && n > 1) ? NULL : text + n + 1;
}

static const char *skip_prefix(const char *text, const char *prefix) {
    const size_t n = strlen(prefix);
    return strncmp(text, prefix, n) == 0 ? text + n : NULL;
}

/* Returns whether a tensor belongs to the vision or audio part of a multimodal model, or to multi-token prediction layers.
 */
static bool is_unused_tensor(const char *name) {
    static const char *const prefixes[] = {"visual.",      "vision_tower.", "vision_model.", "multi_modal_projector.",
                                           "audio_tower.", "embed_vision.", "embed_audio.",  "vision_embedder.",
                                           "connector.",   "mtp_"};
    const char *inner = skip_prefix(name, "model.");
    for (size_t i = 0; i < COUNT(prefixes); i++)
        if (skip_prefix(inner != NULL ? inner : name, prefixes[i]) != NULL) return true;
    return false;
}

/* Returns the name within the text model, without prefixes such as "model.". */
static const char *inner_name(const char *name) {
    static const char *const prefixes[] = {
        "model.language_model.", "language_model.model.", "language_model.", "model.text_model.", "model.", "backbone."};
    for (size_t i = 0; i < COUNT(prefixes); i++)
        if (skip_prefix(name, prefixes[i]) != NULL) return skip_prefix(name, prefixes[i]);
    return name;
}

/* Returns the GGUF suffix for a tensor name: ".weight", ".bias" or ".scale". Some names in the file have no such suffix. *n
 * receives the length of the name before the suffix. Returns NULL if the suffix is unknown. */
static const char *name_suffix(const char *name, size_t *n) {
    static const struct {
        const char *end;
        const char *kind;
        size_t n_kept;
    } ends[] = {{".weight", ".weight", 0},
                {".bias", ".bias", 0},
                {"_proj_bias", ".bias", 5},
                {"experts.gate_up_proj", ".weight", 20},
                {"experts.down_proj", ".weight", 17},
                {"self_attn.sinks", ".weight", 15},
                {"self_attn.attention_sink_bias", ".weight", 29},
                {"e_score_correction_bias", ".bias", 23},
                {"expert_bias", ".bias", 11},
                {"act_fn.alpha_p", ".weight", 14},
                {"act_fn.alpha_n", ".weight", 14},
                {"act_fn.beta", ".weight", 11},
                {"act_fn.eps", ".weight", 10},
                {".A_log", ".weight", 6},
                {".dt_bias", ".bias", 8},
                {".D", ".weight", 2},
                {"layer_scalar", ".weight", 12},
                {"router.scale", ".scale", 12},
                {"router.per_expert_scale", ".scale", 23}};
    const size_t length = strlen(name);
    for (size_t i = 0; i < COUNT(ends); i++) {
        const size_t end = strlen(ends[i].end);
        if (length < end || strcmp(name + length - end, ends[i].end) != 0) continue;
        *n = length - end + ends[i].n_kept;
        return ends[i].kind;
    }
    return NULL;
}

static const char *layer_tensor_name(const fkv_architecture *architecture, const char *stem, size_t n) {
    const char *own = architecture != NULL ? look_up_name(architecture->hf_names, FKV_MAX_OWN_NAMES, stem, n) : NULL;
    return own != NULL ? own : look_up_name(LAYER_NAMES, COUNT(LAYER_NAMES), stem, n);
}

bool fkv_hf_tensor_name(const char *architecture, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]) {
    unsigned layer = 0;
    unsigned expert = 0;
    size_t n = 0;
    (void)snprintf(name, FKV_MAX_TENSOR_NAME, "%s", hf_name);
    const char *last = strrchr(hf_name, '.');
    if (is_unused_tensor(hf_name) || (last != NULL && strcmp(last, ".inv_freq") == 0)) return false;
    if (skip_prefix(hf_name, "mtp.") != NULL) return false; /* multi-token prediction layers of Qwen models, which are not used */
    const char *inner = inner_name(hf_name);
    const char *kind = name_suffix(inner, &n);
    if (kind == NULL) return true;
    const char *outer = look_up_name(OUTER_NAMES, COUNT(OUTER_NAMES), inner, n);
    if (outer != NULL) {
        (void)snprintf(name, FKV_MAX_TENSOR_NAME, "%s%s", outer, kind);
        return true;
    }
    const char *number = skip_prefix(inner, "layers.");
    const char *stem = number != NULL ? skip_number(number, &layer) : NULL;
    if (stem == NULL || (size_t)(stem - inner) > n) return true;
    n -= (size_t)(stem - inner);
    const char *experts = skip_prefix(stem, "mlp.experts.");
    if (experts == NULL) experts = skip_prefix(stem, "block_sparse_moe.experts.");
    if (experts == NULL) experts = skip_prefix(stem, "feed_forward.experts.");
    if (experts == NULL) experts = skip_prefix(stem, "mixer.experts.");
    const char *expert_stem = experts != NULL ? skip_number(experts, &expert) : NULL;
    if (expert_stem != NULL && (size_t)(expert_stem - stem) <= n) {
        const char *part = look_up_name(EXPERT_NAMES, COUNT(EXPERT_NAMES), expert_stem, n - (size_t)(expert_stem - stem));
        if (part != NULL) (void)snprintf(name, FKV_MAX_TENSOR_NAME, "blk.%u.%s.%u%s", layer, part, expert, kind);
        return true;
    }
    const char *part = layer_tensor_name(fkv_architecture_find(architecture), stem, n);
    if (part != NULL) (void)snprintf(name, FKV_MAX_TENSOR_NAME, "blk.%u.%s%s", layer, part, kind);
    return true;
}
