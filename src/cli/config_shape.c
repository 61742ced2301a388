/* See config_shape.h. */
#include "config_shape.h"

#include "cli.h"

#include <dirent.h>
#include <jansson.h>
#include <string.h>
#include <unistd.h>

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text);
    size_t n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

static bool has_weights(const char *folder) {
    bool found = false;
    DIR *files = opendir(folder);
    for (const struct dirent *entry = NULL; files != NULL && (entry = readdir(files)) != NULL;)
        found = found || ends_with(entry->d_name, ".safetensors");
    if (files != NULL) (void)closedir(files);
    return found;
}

bool config_shape_is(const char *word, char *path, uint32_t size) {
    if (ends_with(word, ".json")) return snprintf(path, size, "%s", word) < (int)size && access(path, R_OK) == 0;
    if (snprintf(path, size, "%s/config.json", word) >= (int)size) return false;
    return access(path, R_OK) == 0 && !has_weights(word);
}

/* A count by one of two names; `usual` where there is none. Above a billion is no count. */
static uint32_t count_of(const json_t *config, const char *name, const char *other, uint32_t usual) {
    const json_t *value = json_object_get(config, name);
    if (!json_is_integer(value) && other != NULL) value = json_object_get(config, other);
    json_int_t n = json_integer_value(value);
    return json_is_integer(value) && n > 0 && n < 1000000000 ? (uint32_t)n : usual;
}

/* Every so many layers one is full; 0: nothing is said. */
static uint32_t full_every(const json_t *config) {
    const char *type = json_string_value(json_object_get(config, "model_type"));
    if (type != NULL && strcmp(type, "gemma2") == 0) return 2;
    return count_of(config, "sliding_window_pattern", NULL, 0);
}

static bool all_are_windowed(const json_t *config) {
    const char *type = json_string_value(json_object_get(config, "model_type"));
    return type != NULL && (strcmp(type, "mistral") == 0 || strcmp(type, "phi3") == 0);
}

/* Gemma 4: layers without a window have heads of their own. */
static void read_full_heads(json_t *config, config_shape *s) {
    json_t *list = json_object_get(config, "per_layer_config");
    const json_t *of = config;
    const char *layer = NULL;
    json_t *entry = NULL;
    json_object_foreach(list, layer, entry) of = entry; /* all say the same */
    bool k_is_v = json_is_true(json_object_get(config, "attention_k_eq_v"));
    s->full_kv_heads = s->n_kv_heads;
    s->full_head_dim = count_of(of, of == config ? "global_head_dim" : "head_dim", NULL, s->head_dim);
    if (of != config || k_is_v)
        s->full_kv_heads = count_of(of, of == config ? "num_global_key_value_heads" : "num_key_value_heads", NULL, s->n_kv_heads);
}

/* The layers that keep keys and values, and their windows. Recurrent layers keep a state that does not grow; the last ones of
 * some models attend over the pages of others. */
static void read_layers(const json_t *config, uint32_t n, config_shape *s) {
    const json_t *types = json_object_get(config, "layer_types");
    uint32_t window = count_of(config, "sliding_window", NULL, 0);
    uint32_t every = full_every(config);
    uint32_t n_sharing = count_of(config, "num_kv_shared_layers", NULL, 0);
    if (json_is_false(json_object_get(config, "use_sliding_window"))) window = 0;
    n = n_sharing < n ? n - n_sharing : 0;
    for (uint32_t i = 0; i < n; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        bool windowed = every != 0 ? (i + 1) % every != 0 : all_are_windowed(config);
        if (type != NULL && (strstr(type, "linear") != NULL || strstr(type, "mamba") != NULL || strstr(type, "conv") != NULL))
            continue;
        if (type != NULL) windowed = strstr(type, "sliding") != NULL;
        s->windows[s->n_layers++] = windowed ? window : 0;
    }
}

static double bits_of(const json_t *config, const json_t *root) {
    const json_t *q = json_object_get(root, "quantization");
    if (q == NULL) q = json_object_get(root, "quantization_config");
    if (q == NULL) q = json_object_get(config, "quantization_config");
    uint32_t bits = count_of(q, "bits", NULL, 0);
    uint32_t group = count_of(q, "group_size", NULL, 64);
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    const char *type = json_string_value(json_object_get(config, "torch_dtype"));
    if (bits > 0 && bits <= 8) return bits + 32.0 / group;
    if (method != NULL && strcmp(method, "mxfp4") == 0) return 4.25;
    if (method != NULL && strcmp(method, "fp8") == 0) return 8;
    return type != NULL && strcmp(type, "float32") == 0 ? 32 : 16;
}

static void count_parameters(const json_t *config, uint32_t n_layers, config_shape *s) {
    uint64_t dim = s->dim;
    uint64_t experts = count_of(config, "num_local_experts", "num_experts", count_of(config, "n_routed_experts", NULL, 0));
    uint64_t used = count_of(config, "num_experts_per_tok", "top_k_experts", 0);
    uint64_t expert = count_of(config, "moe_intermediate_size", NULL, s->ffn_dim);
    uint64_t shared = count_of(config, "shared_expert_intermediate_size", NULL, 0);
    uint64_t n_dense = count_of(config, "first_k_dense_replace", NULL, 0);
    uint64_t heads = (uint64_t)s->head_dim * (2ull * s->n_q_heads + 2ull * s->n_kv_heads);
    bool is_wide = json_is_true(json_object_get(config, "use_double_wide_mlp"));
    uint64_t wide = is_wide ? count_of(config, "num_kv_shared_layers", NULL, 0) : 0;
    uint64_t inputs = count_of(config, "hidden_size_per_layer_input", NULL, 0);
    if (n_dense > n_layers || experts == 0) n_dense = experts == 0 ? n_layers : 0;
    if (shared == 0) shared = expert * count_of(config, "n_shared_experts", NULL, 0);
    bool beside = json_is_boolean(json_object_get(config, "enable_moe_block")); /* each layer has experts and a feed-forward */
    bool tied = !json_is_false(json_object_get(config, "tie_word_embeddings"));
    uint64_t table = s->n_vocab * dim;
    uint64_t one_expert = (n_layers - n_dense) * dim * 3 * expert; /* in all layers */
    uint64_t ffn = n_dense * s->ffn_dim + (n_layers - n_dense) * (beside ? s->ffn_dim : shared);
    s->n_mapped = one_expert * experts + (tied ? 0 : table) + n_layers * inputs * s->n_vocab;
    s->n_touched = one_expert * used + (tied ? 0 : dim) + n_layers * inputs;
    s->n_parameters =
        s->n_mapped + table + n_layers * dim * heads + 3 * dim * ffn + n_layers * inputs * 3 * dim + wide * dim * 3 * s->ffn_dim;
}

static int read_shape(json_t *root, const char *path, config_shape *s) {
    json_t *config = json_object_get(root, "text_config");
    if (!json_is_object(config)) config = root;
    const char *name = json_string_value(json_object_get(root, "model_type"));
    (void)snprintf(s->architecture, sizeof s->architecture, "%s", name != NULL ? name : "?");
    for (char *c = s->architecture; *c != 0; c++)
        if ((unsigned char)*c < ' ' || (unsigned char)*c > '~') *c = '?';
    uint32_t n = count_of(config, "num_hidden_layers", "n_layer", 0);
    s->dim = count_of(config, "hidden_size", "n_embd", 0);
    s->n_q_heads = count_of(config, "num_attention_heads", "n_head", 0);
    if (json_object_get(config, "kv_lora_rank") != NULL)
        return kit_fail(EXIT_FAILED, "%s: kv_lora_rank: models with latent attention (MLA) are not supported yet", path);
    if (n == 0 || n > CONFIG_MAX_LAYERS || s->dim == 0 || s->n_q_heads == 0)
        return kit_fail(
            EXIT_FAILED,
            "%s: num_hidden_layers (1 to %d), hidden_size and num_attention_heads are needed: this is no model's config", path,
            CONFIG_MAX_LAYERS);
    s->n_kv_heads = count_of(config, "num_key_value_heads", NULL, s->n_q_heads);
    s->head_dim = count_of(config, "head_dim", NULL, s->dim / s->n_q_heads);
    read_full_heads(config, s);
    s->ffn_dim = count_of(config, "intermediate_size", NULL, 4 * s->dim);
    s->n_vocab = count_of(config, "vocab_size", NULL, 32000);
    s->context = count_of(config, "max_position_embeddings", NULL, 4096);
    s->weight_bits = bits_of(config, root);
    count_parameters(config, n, s);
    read_layers(config, n, s);
    return s->n_layers > 0 ? EXIT_GOOD : kit_fail(EXIT_FAILED, "%s: no layer keeps keys and values", path);
}

int config_shape_read(const char *path, config_shape *shape) {
    json_error_t error;
    *shape = (config_shape){0};
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) return kit_fail(EXIT_FAILED, "%s: line %d: %s", path, error.line, error.text);
    int code = read_shape(root, path, shape);
    json_decref(root);
    return code;
}
