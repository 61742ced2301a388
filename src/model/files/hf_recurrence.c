/* Reads the fields of recurrent layers from a config.json; see hf_recurrence.h. */
#include "hf_recurrence.h"

#include "../architecture.h"
#include "hf_fields.h"

/* Sets the recurrent layers of configs without layer_types: in LFM2, all layers that are not in full_attn_idxs; in Qwen models,
 * all layers except every full_attention_interval-th layer. */
static fkv_status read_recurrent_layers(const json_t *root, const char *path, fkv_hparams *h) {
    const json_t *full = get_field(root, "full_attn_idxs");
    uint32_t interval = 4;
    FKV_TRY(get_u32(root, "full_attention_interval", path, &interval));
    FKV_REQUIRE(interval > 0, FKV_FILE_FORMAT, "%s: full_attention_interval is 0, expected at least 1", path);
    FKV_REQUIRE(full == NULL || json_is_array(full), FKV_FILE_FORMAT, "%s: full_attn_idxs must be a list of layers", path);
    if (h->features.recurrence == FKV_SHORT_CONV && full == NULL) return FKV_OK; /* all layers have attention */
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        bool is_full = full == NULL && (i + 1) % interval == 0;
        for (size_t j = 0; j < json_array_size(full); j++) is_full = is_full || json_integer_value(json_array_get(full, j)) == i;
        if (!is_full) h->layers[i] |= FKV_LAYER_RECURRENT;
    }
    return FKV_OK;
}

/* Reads the limits of Mamba's step size, a list of two numbers. JSON cannot represent infinity, so transformers writes an
 * infinite upper limit as {"__float__": "Infinity"}. */
static fkv_status read_step_limits(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    const json_t *limits = get_field(root, "time_step_limit");
    if (limits == NULL) return FKV_OK;
    const json_t *least = json_array_get(limits, 0);
    const json_t *most = json_array_get(limits, 1);
    const char *text = json_string_value(json_is_object(most) ? json_object_get(most, "__float__") : most);
    const bool is_infinite = text != NULL && strcmp(text, "Infinity") == 0;
    FKV_REQUIRE(json_array_size(limits) == 2 && json_is_number(least) && (json_is_number(most) || is_infinite), FKV_FILE_FORMAT,
                "%s: time_step_limit must be a list of two numbers", path);
    c->min_step = (float)json_number_value(least);
    c->max_step = is_infinite ? 0 : (float)json_number_value(most);
    FKV_REQUIRE(
        isfinite(c->min_step) && c->min_step >= 0 && (is_infinite || c->max_step > c->min_step), FKV_UNSUPPORTED,
        "%s: invalid time_step_limit (minimum %g, maximum %g): the minimum must be finite and at least 0, and the maximum must be larger",
        path, (double)c->min_step, (double)c->max_step);
    return FKV_OK;
}

/* Reads a list of n factors of at least 0. Leaves `out` unchanged if the field is missing. */
static fkv_status read_factors(const json_t *root, const char *key, const char *path, float *out, size_t n) {
    const json_t *list = get_field(root, key);
    if (list == NULL) return FKV_OK;
    FKV_REQUIRE(json_array_size(list) == n, FKV_FILE_FORMAT, "%s: %s must be a list of %zu numbers", path, key, n);
    for (size_t i = 0; i < n; i++) {
        const json_t *number = json_array_get(list, i);
        out[i] = (float)json_number_value(number);
        FKV_REQUIRE(json_is_number(number) && isfinite(out[i]) && out[i] > 0, FKV_UNSUPPORTED,
                    "%s: %s must contain only numbers above 0", path, key);
    }
    return FKV_OK;
}

/* Reads the scale factors of Falcon-H1. The factors of queries and keys become part of the attention scale. The factors of the
 * attention input and output become part of the value scale. */
static fkv_status read_falcon(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    bool has_norm = false;
    float in[] = {1, 1, 1, 1, 1};
    float ffn[] = {1, 1};
    float of_input = 1;
    float attention_in = 1;
    float attention_out = 1;
    float key = 1;
    const struct {
        const char *key;
        float *out;
    } keys[] = {{"ssm_in_multiplier", &of_input},
                {"ssm_out_multiplier", &c->out_scale},
                {"attention_in_multiplier", &attention_in},
                {"attention_out_multiplier", &attention_out},
                {"key_multiplier", &key},
                {"lm_head_multiplier", &h->logit_scale}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        FKV_TRY(get_f32(root, keys[i].key, path, keys[i].out));
        FKV_REQUIRE(get_field(root, keys[i].key) == NULL || *keys[i].out > 0, FKV_UNSUPPORTED,
                    "%s: %s is 0, which is not supported", path, keys[i].key);
    }
    FKV_TRY(read_factors(root, "ssm_multipliers", path, in, sizeof in / sizeof in[0]));
    FKV_TRY(read_factors(root, "mlp_multipliers", path, ffn, sizeof ffn / sizeof ffn[0]));
    for (size_t i = 0; i < sizeof in / sizeof in[0]; i++) c->in_scales[i] = in[i] * of_input;
    h->gate_scale = ffn[0];
    h->down_scale = ffn[1];
    h->value_scale = attention_in * attention_out;
    h->query_scale = h->head_dim > 0 ? attention_in * attention_in * key / sqrtf((float)h->head_dim) : 0;
    /* in models converted by MLX, the query and key weights are already multiplied by the input factor; queries still need the
     * key factor, and values the input factor */
    h->mlx_scales = (fkv_mlx_scales){.query_scale = h->head_dim > 0 ? key / sqrtf((float)h->head_dim) : 0,
                                     .value_scale = attention_in,
                                     .logit_scale = h->logit_scale};
    if (h->embedding_scale > 0 && h->logit_scale > 0) h->mlx_scales.logit_scale = h->logit_scale / h->embedding_scale;
    FKV_TRY(get_bool(root, "mamba_rms_norm", path, &has_norm));
    FKV_TRY(get_bool(root, "mamba_norm_before_gate", path, &c->norms_before_gate));
    c->n_norm_groups = has_norm ? c->n_k_heads : 0;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) h->layers[i] |= FKV_LAYER_RECURRENT;
    return FKV_OK;
}

/* Returns the JSON list or string that states the kind of each layer of Nemotron-H. *n receives the number of layers. */
static const json_t *single_blocks(const json_t *root, size_t *n) {
    const json_t *kinds = get_field(root, "layers_block_type");
    if (kinds == NULL) kinds = get_field(root, "hybrid_override_pattern");
    *n = json_is_string(kinds) ? json_string_length(kinds) : json_array_size(kinds);
    return kinds;
}

/* Returns the kind of a layer of Nemotron-H as a letter of hybrid_override_pattern: M (recurrent), * (attention), - (dense
 * feed-forward block) or E (experts). Returns 0 if the kind is unknown. */
static char block_kind(const json_t *kinds, size_t layer) {
    static const struct {
        const char *name;
        char kind;
    } names[] = {{"linear_attention", 'M'}, {"mamba", 'M'}, {"full_attention", '*'},
                 {"attention", '*'},        {"mlp", '-'},   {"moe", 'E'}};
    const char *text = json_string_value(json_is_string(kinds) ? kinds : json_array_get(kinds, layer));
    if (text == NULL) return 0;
    if (json_is_string(kinds)) return strchr("M*-E", text[layer]) != NULL ? text[layer] : 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(names[i].name, text) == 0) return names[i].kind;
    return 0;
}

fkv_status fkv_hf_read_blocks(const json_t *root, const char *path, fkv_hparams *h) {
    if (!h->features.single_blocks) return FKV_OK;
    size_t n = 0;
    const json_t *kinds = single_blocks(root, &n);
    FKV_REQUIRE(kinds != NULL && n > 0 && n <= FKV_MAX_LAYERS, FKV_FILE_FORMAT,
                "%s: layers_block_type or hybrid_override_pattern must have 1 to %d layers", path, FKV_MAX_LAYERS);
    h->n_layers = (uint32_t)n;
    bool has_experts = false;
    for (size_t i = 0; i < n; i++) {
        const char kind = block_kind(kinds, i);
        FKV_REQUIRE(kind != 0, FKV_UNSUPPORTED,
                    "%s: layer %zu has an unsupported type: expected linear_attention, full_attention, mlp or moe", path, i);
        has_experts = has_experts || kind == 'E';
    }
    if (!has_experts) h->n_experts = h->n_experts_used = 0;
    return FKV_OK;
}

static void set_single_blocks(const json_t *root, fkv_hparams *h) {
    size_t n = 0;
    const json_t *kinds = single_blocks(root, &n);
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        const char kind = block_kind(kinds, i);
        h->layers[i] |= kind == 'M' || kind == '*' ? FKV_LAYER_NO_FFN : FKV_LAYER_NO_MIXER;
        if (kind == 'M') h->layers[i] |= FKV_LAYER_RECURRENT;
        if (kind == '-') h->layers[i] |= FKV_LAYER_DENSE;
    }
}

/* Reads the head dimension of Mamba-2 layers, which may be "auto", and the fields that only some model families have. */
static fkv_status read_mamba(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    uint32_t expand = 2;
    FKV_TRY(get_u32(root, "mamba_expand", path, &expand));
    uint64_t width = (uint64_t)expand * h->dim;
    uint32_t of_state = 0;
    FKV_TRY(get_u32(root, "mamba_d_ssm", path, &of_state));
    if (of_state != 0) width = of_state;
    const json_t *dim = get_field(root, "mamba_d_head");
    if (json_is_string(dim) || dim == NULL)
        c->v_dim = c->n_v_heads > 0 && width / c->n_v_heads <= UINT32_MAX ? (uint32_t)(width / c->n_v_heads) : 0;
    else
        FKV_TRY(get_u32(root, "mamba_d_head", path, &c->v_dim));
    c->n_norm_groups = 1;
    FKV_TRY(read_step_limits(root, path, h));
    if (h->features.parallel_mixers) return read_falcon(root, path, h);
    if (!h->features.single_blocks) return FKV_OK;
    c->n_norm_groups = c->n_k_heads;
    c->min_step = 0.001f;
    c->max_step = 0; /* transformers also ignores time_step_limit */
    set_single_blocks(root, h);
    return get_f32(root, "time_step_min", path, &c->min_step);
}

/* Marks the layers that linear_attn_config lists as recurrent. The lists number layers from 1. Every layer must be in exactly one
 * list. */
static fkv_status read_kda_layers(const json_t *object, const char *path, fkv_hparams *h) {
    const json_t *recurrent = get_field(object, "kda_layers");
    const json_t *full = get_field(object, "full_attn_layers");
    bool is_good = json_is_array(recurrent) && json_is_array(full) && h->n_layers <= FKV_MAX_LAYERS &&
                   json_array_size(recurrent) <= h->n_layers && json_array_size(full) <= h->n_layers;
    for (uint32_t i = 0; is_good && i < h->n_layers; i++) {
        uint32_t n_recurrent = 0;
        uint32_t n_full = 0;
        for (size_t k = 0; k < json_array_size(recurrent); k++)
            n_recurrent += json_integer_value(json_array_get(recurrent, k)) == (json_int_t)i + 1;
        for (size_t k = 0; k < json_array_size(full); k++)
            n_full += json_integer_value(json_array_get(full, k)) == (json_int_t)i + 1;
        is_good = n_recurrent + n_full == 1;
        if (n_recurrent != 0) h->layers[i] |= FKV_LAYER_RECURRENT;
    }
    FKV_REQUIRE(is_good, FKV_FILE_FORMAT,
                "%s: linear_attn_config must list each of %u layers once, in kda_layers or in full_attn_layers", path,
                h->n_layers);
    return FKV_OK;
}

/* Reads the fields of Kimi Linear. Published configs have them in linear_attn_config; transformers writes them at the top level.
 * No layer has RoPE. */
static fkv_status read_kda(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    const json_t *object = get_field(root, "linear_attn_config");
    FKV_REQUIRE(object == NULL || json_is_object(object), FKV_FILE_FORMAT, "%s: linear_attn_config must be an object", path);
    FKV_TRY(get_u32(root, "linear_head_dim", path, &c->k_dim));
    FKV_TRY(get_u32(root, "linear_num_heads", path, &c->n_k_heads));
    FKV_TRY(get_u32(object, "head_dim", path, &c->k_dim));
    FKV_TRY(get_u32(object, "num_heads", path, &c->n_k_heads));
    FKV_TRY(get_u32(object, "short_conv_kernel_size", path, &c->n_taps));
    c->v_dim = c->k_dim;
    c->n_v_heads = c->n_k_heads;
    const bool has_lists = get_field(object, "kda_layers") != NULL || get_field(object, "full_attn_layers") != NULL;
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        h->layers[i] |= FKV_LAYER_NO_ROPE;
        const bool is_listed = get_field(root, "layer_types") != NULL || has_lists;
        if (!is_listed && (i == 0 || i % 4 != 0)) h->layers[i] |= FKV_LAYER_RECURRENT;
    }
    return has_lists && get_field(root, "layer_types") == NULL ? read_kda_layers(object, path, h) : FKV_OK;
}

fkv_status fkv_hf_read_recurrence(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    const struct {
        const char *key;
        uint32_t *out;
    } keys[] = {{"conv_L_cache", &c->n_taps},
                {"linear_conv_kernel_dim", &c->n_taps},
                {"linear_num_key_heads", &c->n_k_heads},
                {"linear_num_value_heads", &c->n_v_heads},
                {"linear_key_head_dim", &c->k_dim},
                {"linear_value_head_dim", &c->v_dim},
                {"mamba_d_conv", &c->n_taps},
                {"mamba_n_groups", &c->n_k_heads},
                {"mamba_n_heads", &c->n_v_heads},
                {"mamba_d_state", &c->k_dim}};
    if (h->features.recurrence == FKV_RECURRENCE_NONE) return FKV_OK;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) FKV_TRY(get_u32(root, keys[i].key, path, keys[i].out));
    if (h->features.recurrence == FKV_MAMBA2) return read_mamba(root, path, h);
    if (h->features.recurrence == FKV_KDA) return read_kda(root, path, h);
    return get_field(root, "layer_types") == NULL ? read_recurrent_layers(root, path, h) : FKV_OK;
}

/* Reads the dimensions of Nemotron-H's shared expert and of the projections before and after its routed experts. */
fkv_status fkv_hf_read_nemotron_experts(const json_t *root, const char *path, fkv_hparams *h) {
    if (!h->features.single_blocks) return FKV_OK;
    h->shared_dim = 0;
    FKV_TRY(fkv_hf_read_blocks(root, path, h));
    if (h->n_experts == 0) return FKV_OK;
    FKV_TRY(get_u32(root, "moe_latent_size", path, &h->latent_dim));
    return get_u32(root, "moe_shared_expert_intermediate_size", path, &h->shared_dim);
}

fkv_status fkv_hf_read_lfm2_ffn(const json_t *root, const char *path, fkv_hparams *h) {
    bool adjusted = false;
    float factor = 1;
    uint32_t multiple = 1;
    if (h->features.recurrence != FKV_SHORT_CONV) return FKV_OK;
    FKV_TRY(get_u32(root, "block_ff_dim", path, &h->ffn_dim));
    FKV_TRY(get_bool(root, "block_auto_adjust_ff_dim", path, &adjusted));
    FKV_TRY(get_f32(root, "block_ffn_dim_multiplier", path, &factor));
    FKV_TRY(get_u32(root, "block_multiple_of", path, &multiple));
    if (!adjusted) return FKV_OK;
    const double scaled = floor((double)factor * floor(2.0 * h->ffn_dim / 3.0));
    FKV_REQUIRE(multiple > 0 && scaled + multiple < UINT32_MAX, FKV_FILE_FORMAT,
                "%s: invalid feed-forward dimension %g or block_multiple_of %u", path, scaled, multiple);
    h->ffn_dim = ((uint32_t)scaled + multiple - 1) / multiple * multiple;
    return FKV_OK;
}
