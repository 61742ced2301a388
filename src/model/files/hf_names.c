/* Hugging Face's names of tensors, turned into GGUF's. Experts that are tensors of their own keep their number: "ffn_up.7". */
#include "hf_config.h"

#include "../architecture.h"

#include <stdio.h>

static const fkv_name_pair OUTER_NAMES[] = {{"embed_tokens", "token_embd"},
                                            {"norm", "output_norm"},
                                            {"lm_head", "output"},
                                            {"embed_tokens_per_layer", "per_layer_token_embd"},
                                            {"per_layer_model_projection", "per_layer_model_proj"},
                                            {"per_layer_projection_norm", "per_layer_proj_norm"}};

static const fkv_name_pair LAYER_NAMES[] = {{"self_attn.q_proj", "attn_q"},
                                            {"self_attn.k_proj", "attn_k"},
                                            {"self_attn.v_proj", "attn_v"},
                                            {"self_attn.qkv_proj", "attn_qkv"},
                                            {"self_attn.o_proj", "attn_output"},
                                            {"self_attn.q_norm", "attn_q_norm"},
                                            {"self_attn.k_norm", "attn_k_norm"},
                                            {"self_attn.sinks", "attn_sinks"},
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

/* stem: [n] of the name before ".weight" or ".bias". NULL: not in the table, which may end with an empty line. */
static const char *translated(const fkv_name_pair *pairs, size_t n_pairs, const char *stem, size_t n) {
    for (size_t i = 0; i < n_pairs && pairs[i].hf != NULL; i++)
        if (strlen(pairs[i].hf) == n && memcmp(pairs[i].hf, stem, n) == 0) return pairs[i].gguf;
    return NULL;
}

/* A number without zeros before it, and a dot behind; NULL: something else. */
static const char *after_number(const char *text, unsigned *number) {
    int n = 0;
    *number = 0;
    while (n < 4 && text[n] >= '0' && text[n] <= '9') *number = *number * 10 + (unsigned)(text[n++] - '0');
    return n == 0 || text[n] != '.' || (text[0] == '0' && n > 1) ? NULL : text + n + 1;
}

static const char *after(const char *text, const char *prefix) {
    const size_t n = strlen(prefix);
    return strncmp(text, prefix, n) == 0 ? text + n : NULL;
}

/* The part of a model that sees or hears. */
static bool is_of_other_senses(const char *name) {
    static const char *const prefixes[] = {"visual.",      "vision_tower.", "vision_model.", "multi_modal_projector.",
                                           "audio_tower.", "embed_vision.", "embed_audio.",  "vision_embedder."};
    const char *inner = after(name, "model.");
    for (size_t i = 0; i < COUNT(prefixes); i++)
        if (after(inner != NULL ? inner : name, prefixes[i]) != NULL) return true;
    return false;
}

/* The name inside the text model: what is behind "model." and the like. */
static const char *inner_name(const char *name) {
    static const char *const prefixes[] = {"model.language_model.", "language_model.model.", "language_model.", "model."};
    for (size_t i = 0; i < COUNT(prefixes); i++)
        if (after(name, prefixes[i]) != NULL) return after(name, prefixes[i]);
    return name;
}

/* The end of a name: ".weight", ".bias", or what stands for them in a tensor that has neither. *n: of the stem before it. */
static const char *kind_of(const char *name, size_t *n) {
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
                {"e_score_correction_bias", ".bias", 23},
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

static const char *layer_part(const fkv_architecture *architecture, const char *stem, size_t n) {
    const char *own = architecture != NULL ? translated(architecture->hf_names, FKV_MAX_OWN_NAMES, stem, n) : NULL;
    return own != NULL ? own : translated(LAYER_NAMES, COUNT(LAYER_NAMES), stem, n);
}

bool fkv_hf_tensor_name(const char *architecture, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]) {
    unsigned layer = 0;
    unsigned expert = 0;
    size_t n = 0;
    (void)snprintf(name, FKV_MAX_TENSOR_NAME, "%s", hf_name);
    const char *last = strrchr(hf_name, '.');
    if (is_of_other_senses(hf_name) || (last != NULL && strcmp(last, ".inv_freq") == 0)) return false;
    const char *inner = inner_name(hf_name);
    const char *kind = kind_of(inner, &n);
    if (kind == NULL) return true;
    const char *outer = translated(OUTER_NAMES, COUNT(OUTER_NAMES), inner, n);
    if (outer != NULL) {
        (void)snprintf(name, FKV_MAX_TENSOR_NAME, "%s%s", outer, kind);
        return true;
    }
    const char *number = after(inner, "layers.");
    const char *stem = number != NULL ? after_number(number, &layer) : NULL;
    if (stem == NULL || (size_t)(stem - inner) > n) return true;
    n -= (size_t)(stem - inner);
    const char *experts = after(stem, "mlp.experts.");
    if (experts == NULL) experts = after(stem, "block_sparse_moe.experts.");
    const char *expert_stem = experts != NULL ? after_number(experts, &expert) : NULL;
    if (expert_stem != NULL && (size_t)(expert_stem - stem) <= n) {
        const char *part = translated(EXPERT_NAMES, COUNT(EXPERT_NAMES), expert_stem, n - (size_t)(expert_stem - stem));
        if (part != NULL) (void)snprintf(name, FKV_MAX_TENSOR_NAME, "blk.%u.%s.%u%s", layer, part, expert, kind);
        return true;
    }
    const char *part = layer_part(fkv_architecture_find(architecture), stem, n);
    if (part != NULL) (void)snprintf(name, FKV_MAX_TENSOR_NAME, "blk.%u.%s%s", layer, part, kind);
    return true;
}
