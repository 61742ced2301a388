/* Reads the latent-attention fields of a config.json; see hf_latent.h. */
#include "hf_latent.h"

#include "hf_fields.h"

static const char *const LATENT_TYPES[] = {"deepseek_v2", "deepseek_v3", "kimi_k2",    "glm4_moe_lite",
                                           "minicpm3",    "mistral4",    "kimi_linear"};

/* Epsilon for the norms of latent vectors. transformers always uses this value for them, not rms_norm_eps. */
static const float LATENT_NORM_EPS = 1e-6f;

bool fkv_hf_is_latent(const char *type) {
    bool found = false;
    for (size_t i = 0; i < sizeof LATENT_TYPES / sizeof LATENT_TYPES[0]; i++) found = found || strcmp(type, LATENT_TYPES[i]) == 0;
    return found;
}

/* Reads the expert routing. DeepSeek V2 and Mistral 4 select experts by softmax scores, the other models by sigmoid scores.
 * DeepSeek V2 may select groups of experts first. */
static fkv_status read_routing(const json_t *root, const char *type, const char *path, fkv_hparams *h) {
    fkv_features *f = &h->features;
    const bool is_v2 = strcmp(type, "deepseek_v2") == 0;
    const char *method = is_v2 ? "greedy" : "noaux_tc";
    const char *scoring = NULL;
    uint32_t period = 1;
    if (h->n_experts == 0) return FKV_OK;
    const bool has_dense_layer = strcmp(type, "glm4_moe_lite") == 0 || strcmp(type, "kimi_linear") == 0;
    if (has_dense_layer && get_field(root, "mlp_layer_types") == NULL && get_field(root, "first_k_dense_replace") == NULL)
        h->n_dense = 1;
    FKV_TRY(get_text(root, "topk_method", path, &method));
    FKV_TRY(get_text(root, "scoring_func", path, &scoring));
    FKV_TRY(get_u32(root, "moe_layer_freq", path, &period));
    FKV_REQUIRE(period == 1, FKV_UNSUPPORTED, "%s: unsupported moe_layer_freq %u: expected 1", path, period);
    f->sigmoid_router = !is_v2 && strcmp(type, "mistral4") != 0;
    FKV_REQUIRE(scoring == NULL || strcmp(scoring, f->sigmoid_router ? "sigmoid" : "softmax") == 0, FKV_UNSUPPORTED,
                "%s: unsupported scoring_func '%s' for model_type %s", path, fkv_show_text(scoring == NULL ? "" : scoring).text,
                type);
    if (!is_v2) {
        FKV_REQUIRE(strcmp(method, "noaux_tc") == 0, FKV_UNSUPPORTED, "%s: unsupported topk_method '%s': expected noaux_tc", path,
                    fkv_show_text(method).text);
        return FKV_OK;
    }
    const bool has_groups = strcmp(method, "group_limited_greedy") == 0;
    FKV_REQUIRE(has_groups || strcmp(method, "greedy") == 0, FKV_UNSUPPORTED,
                "%s: unsupported topk_method '%s': expected greedy or group_limited_greedy", path, fkv_show_text(method).text);
    f->groups_by_max = has_groups;
    f->norm_experts = false; /* transformers ignores norm_topk_prob of this model type */
    if (!has_groups) h->n_expert_groups = h->n_expert_groups_used = 0;
    return FKV_OK;
}

/* Reads the scale factors of MiniCPM3. */
static fkv_status read_minicpm3(const json_t *root, const char *path, fkv_hparams *h) {
    float depth = 0.0f;
    uint32_t base = h->dim;
    h->embedding_scale = 1.0f;
    FKV_TRY(get_f32(root, "scale_emb", path, &h->embedding_scale));
    FKV_TRY(get_f32(root, "scale_depth", path, &depth));
    FKV_TRY(get_u32(root, "dim_model_base", path, &base));
    FKV_REQUIRE(base > 0 && h->dim > 0 && h->n_layers > 0, FKV_FILE_FORMAT,
                "%s: dim_model_base, hidden_size or num_hidden_layers is 0, expected at least 1", path);
    if (depth != 0.0f) h->residual_scale = depth / sqrtf((float)h->n_layers);
    h->logit_scale = (float)base / (float)h->dim;
    return FKV_OK;
}

/* Returns the factor by which YaRN scales queries and keys. This factor becomes part of the attention scale. It is independent of
 * the factor applied to cosines and sines. */
static double yarn_attention_factor(const fkv_rope *rope) {
    if (rope->mscale_all == 0.0f || !(rope->factor > 1.0f)) return 1.0;
    return 0.1 * (double)rope->mscale_all * log((double)rope->factor) + 1.0;
}

fkv_status fkv_hf_read_latent(const json_t *root, const char *type, const char *path, fkv_hparams *h) {
    fkv_latent *l = &h->latent;
    bool is_interleaved = strcmp(type, "minicpm3") != 0;
    if (!fkv_hf_is_latent(type)) return FKV_OK;
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {{"kv_lora_rank", &l->dim},
                {"q_lora_rank", &l->q_dim},
                {"qk_rope_head_dim", &l->rope_dim},
                {"qk_nope_head_dim", &l->nope_dim},
                {"v_head_dim", &l->v_dim}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) FKV_TRY(get_u32(root, keys[i].key, path, keys[i].out));
    if (l->v_dim == 0 && h->n_q_heads > 0) l->v_dim = h->dim / h->n_q_heads; /* MiniCPM3 */
    FKV_REQUIRE(l->dim > 0 && l->rope_dim > 0 && l->nope_dim > 0 && l->v_dim > 0, FKV_FILE_FORMAT,
                "%s: kv_lora_rank (%u), qk_rope_head_dim (%u), qk_nope_head_dim (%u) and v_head_dim (%u) must not be 0", path,
                l->dim, l->rope_dim, l->nope_dim, l->v_dim);
    FKV_REQUIRE(l->nope_dim <= UINT32_MAX - l->rope_dim, FKV_FILE_FORMAT, "%s: qk_nope_head_dim is %u, which is too large", path,
                l->nope_dim);
    FKV_TRY(get_bool(root, "rope_interleave", path, &is_interleaved));
    l->norm_eps = LATENT_NORM_EPS;
    h->rope_interleaved = is_interleaved;
    h->rope.dim = h->local_rope.dim = l->rope_dim;
    h->head_dim = l->nope_dim + l->rope_dim;
    h->n_kv_heads = 1;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++)
        h->shapes[i] = (fkv_layer_shape){.n_kv_heads = 1, .head_dim = l->dim, .ffn_dim = h->shapes[i].ffn_dim};
    const double factor = yarn_attention_factor(&h->rope);
    h->query_scale = (float)(factor * factor / sqrt((double)h->head_dim));
    FKV_TRY(read_routing(root, type, path, h));
    return strcmp(type, "minicpm3") == 0 ? read_minicpm3(root, path, h) : FKV_OK;
}
