/* Reads the properties of a Hugging Face config.json that differ between layers: attention windows, recurrent layers, layers
 * without RoPE or without experts, and head shapes. See hf_reader.h.
 */
#include "hf_reader.h"

#include "hf_recurrence.h"

#include <stdio.h>

/* Returns the word that marks a recurrent layer in layer_types, or NULL if the architecture has no recurrent layers. */
static const char *recurrent_layer_type(const fkv_hf_reader *r) {
    switch (r->h->features.recurrence) {
    case FKV_SHORT_CONV: return "conv";
    case FKV_DELTA_NET:
    case FKV_KDA: return "linear_attention";
    case FKV_MAMBA2: return "mamba";
    case FKV_RECURRENCE_NONE: break;
    }
    return NULL;
}

static fkv_status read_layer_types(const fkv_hf_reader *r, const json_t *types) {
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
static fkv_status read_switched_window(const fkv_hf_reader *r) {
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

static fkv_status read_no_rope(const fkv_hf_reader *r) {
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
static fkv_status read_window_pattern(const fkv_hf_reader *r) {
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

static fkv_status read_layer_kinds(const fkv_hf_reader *r) {
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
static fkv_status read_layer_list(const fkv_hf_reader *r, const char *key, bool lists_dense) {
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
static fkv_status read_mlp_types(const fkv_hf_reader *r) {
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
static fkv_status read_dense_layers(const fkv_hf_reader *r) {
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
static fkv_status read_llama4(const fkv_hf_reader *r) {
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
static fkv_status check_per_layer_config(const fkv_hf_reader *r) {
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
static fkv_status read_layer_shapes(const fkv_hf_reader *r) {
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

fkv_status fkv_hf_read_layers(const fkv_hf_reader *r) {
    FKV_TRY(read_llama4(r));
    FKV_TRY(read_layer_kinds(r));
    FKV_TRY(read_dense_layers(r));
    return read_layer_shapes(r);
}
