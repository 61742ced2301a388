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
    FKV_REQUIRE(interval > 0, FKV_FILE_FORMAT, "full_attention_interval is 0, expected at least 1: %s", path);
    FKV_REQUIRE(full == NULL || json_is_array(full), FKV_FILE_FORMAT, "full_attn_idxs must be a list of layers: %s", path);
    if (h->features.recurrence == FKV_SHORT_CONV && full == NULL) return FKV_OK; /* all layers have attention */
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        bool is_full = full == NULL && (i + 1) % interval == 0;
        for (size_t j = 0; j < json_array_size(full); j++) is_full = is_full || json_integer_value(json_array_get(full, j)) == i;
        if (!is_full) h->layers[i] |= FKV_LAYER_RECURRENT;
    }
    return FKV_OK;
}

/* Reads the limits of Mamba's step size: a list of two numbers, of which the second may be infinite. JSON has no infinite
 * numbers, so transformers writes {"__float__": "Infinity"}. */
static fkv_status read_step_limits(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    const json_t *limits = get_field(root, "time_step_limit");
    if (limits == NULL) return FKV_OK;
    const json_t *least = json_array_get(limits, 0);
    const json_t *most = json_array_get(limits, 1);
    const char *text = json_string_value(json_is_object(most) ? json_object_get(most, "__float__") : most);
    const bool is_infinite = text != NULL && strcmp(text, "Infinity") == 0;
    FKV_REQUIRE(json_array_size(limits) == 2 && json_is_number(least) && (json_is_number(most) || is_infinite), FKV_FILE_FORMAT,
                "time_step_limit must be a list of two numbers: %s", path);
    c->min_step = (float)json_number_value(least);
    c->max_step = is_infinite ? 0 : (float)json_number_value(most);
    FKV_REQUIRE(isfinite(c->min_step) && c->min_step >= 0 && (is_infinite || c->max_step > c->min_step), FKV_UNSUPPORTED,
                "unsupported time_step_limit from %g to %g: %s", (double)c->min_step, (double)c->max_step, path);
    return FKV_OK;
}

/* Reads the head dimension of Mamba-2 layers, which may be "auto". */
static fkv_status read_mamba(const json_t *root, const char *path, fkv_hparams *h) {
    fkv_recurrence *c = &h->recurrence;
    uint32_t expand = 2;
    FKV_TRY(get_u32(root, "mamba_expand", path, &expand));
    const json_t *dim = get_field(root, "mamba_d_head");
    if (json_is_string(dim) || dim == NULL)
        c->v_dim = c->n_v_heads > 0 ? (uint32_t)((uint64_t)expand * h->dim / c->n_v_heads) : 0;
    else
        FKV_TRY(get_u32(root, "mamba_d_head", path, &c->v_dim));
    return read_step_limits(root, path, h);
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
    return get_field(root, "layer_types") == NULL ? read_recurrent_layers(root, path, h) : FKV_OK;
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
                "invalid feed-forward dimension %g or block_multiple_of %u: %s", scaled, multiple, path);
    h->ffn_dim = ((uint32_t)scaled + multiple - 1) / multiple * multiple;
    return FKV_OK;
}
