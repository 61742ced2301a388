/* Tests folders with config.json and safetensors files: the bundled model, GGUF tensor names, shards, and rejected folders. */
#include "page_file_fixture.h"
#include "test.h"

#include "../src/model/architecture.h"
#include "../src/model/files/hf_config.h"
#include "../src/model/files/safetensors.h"
#include "../src/model/files/tensor_rows.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

enum { MAX_FILE = 16 * 1024 };

#define QWEN3                                                                                                                    \
    "\"model_type\": \"qwen3\", \"vocab_size\": 256, \"num_hidden_layers\": 6, \"hidden_size\": 8, \"num_attention_heads\": 2"
#define GEMMA3                                                                                                                   \
    "\"model_type\": \"gemma3_text\", \"vocab_size\": 256, \"num_hidden_layers\": 6, \"hidden_size\": 8, \"num_attention_heads\": 2"

#define GEMMA4                                                                                                                         \
    "\"model_type\": \"gemma4_text\", \"vocab_size\": 256, \"num_hidden_layers\": 6, \"hidden_size\": 8, \"num_attention_heads\": 2, " \
    "\"num_key_value_heads\": 2, \"head_dim\": 16, \"intermediate_size\": 96, \"attention_k_eq_v\": true, \"layer_types\": "           \
    "[\"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_attention\"]"

/* ---- files in memory ---- */

static fkv_status read_config(const char *inner, fkv_weights **weights) {
    char json[2048];
    const int n = snprintf(json, sizeof json, "{%s}", inner);
    ck_assert_int_lt(n, (int)sizeof json);
    *weights = fkv_weights_new();
    return fkv_hf_config_read(*weights, json, (size_t)n, "config.json");
}

static void ck_config_rejected(const char *inner, fkv_status expected, const char *words) {
    fkv_weights *weights = NULL;
    ck_status(read_config(inner, &weights), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not contain '%s'", fkv_message(), words);
    fkv_weights_close(weights);
}

static fkv_weights *config_of(const char *inner) {
    fkv_weights *weights = NULL;
    ck_ok(read_config(inner, &weights));
    return weights;
}

/* Builds a file that consists of the header length, the header (padded with spaces to a multiple of 8 bytes) and data_bytes
 * zeros. */
static size_t make_file(const char *header, size_t data_bytes, uint8_t file[MAX_FILE]) {
    const uint64_t n = (strlen(header) + 7) / 8 * 8;
    ck_assert_uint_le(8 + n + data_bytes, MAX_FILE);
    memset(file, 0, MAX_FILE);
    memset(file + 8, ' ', n);
    memcpy(file, &n, 8);
    memcpy(file + 8, header, strlen(header));
    return 8 + n + data_bytes;
}

/* Reads the file from a block of exactly its size, so that a sanitizer detects reads past the end. */
static fkv_status read_file(const uint8_t *file, size_t n, fkv_weights **weights, uint8_t **block) {
    *block = malloc(n == 0 ? 1 : n);
    ck_assert_ptr_nonnull(*block);
    if (n > 0) memcpy(*block, file, n);
    *weights = fkv_weights_new();
    FKV_TRY(fkv_safetensors_read(*weights, *block, n, "made.safetensors"));
    return fkv_weights_finish(*weights, "made.safetensors");
}

static void ck_file_rejected(const char *header, size_t data_bytes, fkv_status expected, const char *words) {
    static uint8_t file[MAX_FILE];
    uint8_t *block = NULL;
    fkv_weights *weights = NULL;
    const size_t n = make_file(header, data_bytes, file);
    ck_status(read_file(file, n, &weights, &block), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not contain '%s'", fkv_message(), words);
    fkv_weights_close(weights);
    free(block);
}

/* ---- config.json ---- */

START_TEST(config_gives_hyperparameters) {
    fkv_weights *weights = config_of(
        "\"model_type\": \"llama\", \"hidden_size\": 2048, \"num_hidden_layers\": 16, \"num_attention_heads\": 32, "
        "\"num_key_value_heads\": 8, \"intermediate_size\": 8192, \"rope_theta\": 500000.0, \"rms_norm_eps\": 1e-05, "
        "\"max_position_embeddings\": 4096, \"vocab_size\": 128256, \"hidden_act\": \"silu\", \"bos_token_id\": 128000, "
        "\"eos_token_id\": [128001, 128008, 128009], \"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}");
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert_str_eq(h->architecture, "llama");
    ck_assert(h->dim == 2048 && h->n_layers == 16 && h->n_q_heads == 32 && h->n_kv_heads == 8 && h->head_dim == 64);
    ck_assert(h->ffn_dim == 8192 && h->context == 4096 && h->n_vocab == 128256 && h->rope.dim == 64);
    ck_assert(h->rope.base == 5e5f && h->norm_eps == 1e-5f && h->rope.factor == 4 && h->local_rope.base == 0);
    ck_assert(!h->rope_interleaved && !h->norm_plus_one && h->window == 0 && h->layers[0] == 0);
    const fkv_vocab_source *v = fkv_weights_vocab(weights);
    ck_assert(v->bos == 128000 && v->eos == 128001 && v->eot == FKV_NO_TOKEN && v->unk == FKV_NO_TOKEN);
    ck_assert(v->n_ends == 3 && v->ends[0] == 128001 && v->ends[1] == 128008 && v->ends[2] == 128009);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(gemma_has_windows_scales_and_two_ropes) {
    fkv_weights *weights = config_of(
        GEMMA3 ", \"head_dim\": 256, \"sliding_window\": 512, \"_sliding_window_pattern\": 6, \"query_pre_attn_scalar\": 256, "
               "\"rope_theta\": 1000000.0, \"rope_local_base_freq\": 10000.0, \"attn_logit_softcapping\": null, "
               "\"final_logit_softcapping\": null, \"rope_scaling\": null, \"hidden_activation\": \"gelu_pytorch_tanh\"");
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert_str_eq(h->architecture, "gemma3");
    ck_assert(h->head_dim == 256 && h->window == 512 && h->norm_plus_one);
    for (uint32_t i = 0; i < 6; i++) ck_assert_uint_eq(h->layers[i], i == 5 ? 0 : FKV_LAYER_WINDOW);
    ck_assert(h->rope.base == 1e6f && h->local_rope.base == 1e4f && h->rope.factor == 1 && h->softcap == 0);
    ck_assert_float_eq(h->query_scale, 0.0625f);
    fkv_weights_close(weights);

    weights = config_of(GEMMA3 ", \"sliding_window\": 4, \"layer_types\": [\"sliding_attention\", \"full_attention\", "
                               "\"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_attention\"], "
                               "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 8.0, "
                               "\"rope_theta\": 1e6}, \"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}}");
    h = fkv_weights_hparams(weights);
    ck_assert(h->layers[0] == FKV_LAYER_WINDOW && h->layers[1] == 0 && h->rope.base == 1e6f && h->local_rope.base == 1e4f &&
              h->rope.factor == 8);
    fkv_weights_close(weights);
}
END_TEST

static void ck_shape(const fkv_hparams *h, uint32_t layer, uint32_t n_kv_heads, uint32_t head_dim, uint32_t ffn_dim,
                     uint32_t kv_layer) {
    const fkv_layer_shape *s = &h->shapes[layer];
    ck_assert_uint_eq(s->n_kv_heads, n_kv_heads);
    ck_assert_uint_eq(s->head_dim, head_dim);
    ck_assert_uint_eq(s->ffn_dim, ffn_dim);
    ck_assert_uint_eq(s->kv_layer, kv_layer);
}

START_TEST(gemma_4_layers_have_individual_shapes_in_both_spellings) {
    static const char *const heads[] = {
        "\"global_head_dim\": 32, \"num_global_key_value_heads\": 1",
        "\"per_layer_config\": {\"1\": {\"head_dim\": 32, \"num_key_value_heads\": 1}, \"3\": {\"head_dim\": 32, "
        "\"num_key_value_heads\": 1}, \"5\": {\"head_dim\": 32, \"num_key_value_heads\": 1}}"};
    for (size_t i = 0; i < 2; i++) {
        char inner[1024];
        (void)snprintf(inner, sizeof inner, GEMMA4 ", \"num_kv_shared_layers\": 2, \"use_double_wide_mlp\": true, %s", heads[i]);
        fkv_weights *weights = config_of(inner);
        const fkv_hparams *h = fkv_weights_hparams(weights);
        ck_assert(h->query_scale == 1 && h->input_dim == 256 && h->n_experts == 0 && !h->norm_plus_one);
        ck_shape(h, 0, 2, 16, 96, 0);
        ck_shape(h, 1, 1, 32, 96, 1);
        ck_shape(h, 4, 2, 16, 192, 2);
        ck_shape(h, 5, 1, 32, 192, 3);
        ck_assert(h->rope.dim == 32 && h->local_rope.dim == 16 && h->rope.n_factors == 16);
        ck_assert(h->rope.short_factors[3] == 1 && h->rope.short_factors[4] == 1e30f);
        fkv_weights_close(weights);
    }
    ck_config_rejected(GEMMA4 ", \"per_layer_config\": {\"1\": {\"head_dim\": 32}}", FKV_UNSUPPORTED,
                       "per_layer_config of layer 3");
    ck_config_rejected(GEMMA4
                       ", \"per_layer_config\": {\"0\": {\"head_dim\": 32}, \"1\": {\"head_dim\": 32}, \"3\": {\"head_dim\": "
                       "32}, \"5\": {\"head_dim\": 32}}",
                       FKV_UNSUPPORTED, "per_layer_config of layer 0");
    ck_config_rejected(GEMMA4 ", \"per_layer_config\": {\"1\": {\"head_dim\": 16, \"x\": 1}}", FKV_UNSUPPORTED,
                       "may contain only");
    ck_config_rejected(GEMMA4 ", \"use_bidirectional_attention\": \"all\"", FKV_UNSUPPORTED, "use_bidirectional_attention");
    ck_config_rejected(GEMMA4 ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"proportional\", \"factor\": 0}}",
                       FKV_FILE_FORMAT, "factor 0");
}
END_TEST

/* As in transformers, a Llama model with partial_rotary_factor is rejected if its RoPE is scaled; otherwise the factor is
 * ignored. The default for GLM is 0.5. */
START_TEST(partial_rotary_factor_is_model_specific) {
    static const struct {
        const char *inner;
        uint32_t dim;
    } rows[] = {{"\"model_type\": \"llama\", \"head_dim\": 64, \"partial_rotary_factor\": 0.5", 64},
                {"\"model_type\": \"qwen2\", \"head_dim\": 64, \"rope_parameters\": {\"partial_rotary_factor\": 0.5}", 64},
                {"\"model_type\": \"glm4\", \"head_dim\": 64, \"partial_rotary_factor\": 0.25", 16},
                {"\"model_type\": \"glm4_moe\", \"head_dim\": 64", 32},
                {"\"model_type\": \"phi3\", \"head_dim\": 64, \"partial_rotary_factor\": 0.75", 48}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fkv_weights *weights = config_of(rows[i].inner);
        ck_assert_uint_eq(fkv_weights_hparams(weights)->rope.dim, rows[i].dim);
        fkv_weights_close(weights);
    }
    ck_config_rejected(
        "\"model_type\": \"llama\", \"head_dim\": 64, \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2, "
        "\"partial_rotary_factor\": 0.5}",
        FKV_UNSUPPORTED, "partial_rotary_factor 0.5 with scaled RoPE");
}
END_TEST

START_TEST(unused_window_of_qwen_is_ignored) {
    fkv_weights *weights = config_of("\"model_type\": \"qwen2\", \"sliding_window\": 32768, \"use_sliding_window\": false, "
                                     "\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", \"full_attention\"]");
    ck_assert_uint_eq(fkv_weights_hparams(weights)->window, 0);
    ck_assert_uint_eq(fkv_weights_hparams(weights)->layers[0], 0);
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"qwen2\", \"sliding_window\": 64, \"use_sliding_window\": true, "
                        "\"max_window_layers\": 1, \"num_hidden_layers\": 2");
    ck_assert_uint_eq(fkv_weights_hparams(weights)->window, 64);
    ck_assert(fkv_weights_hparams(weights)->layers[0] == 0 && fkv_weights_hparams(weights)->layers[1] == FKV_LAYER_WINDOW);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(layers_without_experts_are_marked) {
    static const struct {
        const char *inner;
        uint8_t dense[4]; /* expected FKV_LAYER_DENSE flags */
    } cases[] = {
        {"\"model_type\": \"qwen3_moe\", \"num_experts\": 4, \"mlp_only_layers\": [1, 9]", {0, 4, 0, 0}},
        {"\"model_type\": \"qwen3_moe\", \"num_experts\": 4, \"decoder_sparse_step\": 2", {4, 0, 4, 0}},
        {"\"model_type\": \"ernie4_5_moe\", \"moe_num_experts\": 4, \"moe_layer_end_index\": 2", {4, 0, 0, 4}},
        {"\"model_type\": \"ernie4_5_moe\", \"moe_num_experts\": 4, \"moe_layer_interval\": 2, \"moe_layer_end_index\": -1",
         {4, 0, 4, 0}},
        {"\"model_type\": \"llama4_text\", \"no_rope_layers\": [1, 1, 1, 1], \"moe_layers\": [0, 2]", {0, 4, 0, 4}},
        {"\"model_type\": \"llama4_text\", \"no_rope_layers\": [1, 1, 1, 1], \"interleave_moe_layer_step\": 2", {4, 0, 4, 0}},
        {"\"model_type\": \"dots1\", \"n_routed_experts\": 4, \"mlp_layer_types\": [\"dense\", \"sparse\", \"sparse\", \"dense\"]",
         {4, 0, 0, 4}},
        {"\"model_type\": \"qwen3\", \"decoder_sparse_step\": 1", {0, 0, 0, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char inner[512];
        (void)snprintf(inner, sizeof inner, "%s, \"num_hidden_layers\": 4", cases[i].inner);
        fkv_weights *weights = config_of(inner);
        for (size_t k = 0; k < 4; k++)
            ck_assert_uint_eq(fkv_weights_hparams(weights)->layers[k] & FKV_LAYER_DENSE, cases[i].dense[k]);
        fkv_weights_close(weights);
    }
}
END_TEST

START_TEST(fields_of_a_model_type_have_common_meanings) {
    fkv_weights *weights = config_of("\"model_type\": \"hunyuan_v1_moe\", \"num_experts\": 8, \"moe_topk\": [3, 3, 3], "
                                     "\"intermediate_size\": 48, \"num_shared_expert\": [1, 1]");
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert(h->n_experts == 8 && h->n_experts_used == 3 && h->shared_dim == 48);
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"hunyuan_v1_dense\", \"head_dim\": 64, \"rope_theta\": 100.0, "
                        "\"rope_scaling\": {\"type\": \"dynamic\", \"alpha\": 2.0, \"factor\": 1.0}");
    ck_assert_float_eq_tol(fkv_weights_hparams(weights)->rope.base, 204.522f, 0.01f); /* NTK scaling: 100 * 2^(64 / 62) */
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"minimax_m2\", \"head_dim\": 64, \"rotary_dim\": 48");
    ck_assert_uint_eq(fkv_weights_hparams(weights)->rope.dim, 48);
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"exaone4\", \"num_hidden_layers\": 3, \"sliding_window\": 16, "
                        "\"sliding_window_pattern\": \"LG\"");
    h = fkv_weights_hparams(weights);
    ck_assert(h->layers[0] == FKV_LAYER_WINDOW && h->layers[1] == FKV_LAYER_NO_ROPE && h->layers[2] == FKV_LAYER_WINDOW);
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"exaone4\", \"num_hidden_layers\": 1, \"sliding_window\": null");
    ck_assert_uint_eq(fkv_weights_hparams(weights)->layers[0], 0); /* without windows, all layers have RoPE */
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"llama4_text\", \"num_hidden_layers\": 4, \"intermediate_size\": 24, "
                        "\"intermediate_size_mlp\": 40, \"attention_chunk_size\": 128, \"floor_scale\": 64");
    h = fkv_weights_hparams(weights);
    ck_assert(h->ffn_dim == 24 && h->expert_dim == 24 && h->shared_dim == 24 && h->attention_chunk == 128);
    ck_assert(h->temperature_of_no_rope && h->temperature_context == 64 && h->layers[3] == FKV_LAYER_NO_ROPE);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(layers_are_mixers_or_feed_forwards) {
    fkv_weights *weights = config_of("\"model_type\": \"nemotron_h\", \"hybrid_override_pattern\": \"-M*EM-\", "
                                     "\"num_hidden_layers\": 9, \"moe_latent_size\": 24");
    const fkv_hparams *h = fkv_weights_hparams(weights);
    static const uint8_t attention[] = {0, 0, 1, 0, 0, 0};
    static const uint8_t recurrent[] = {0, 1, 0, 0, 1, 0};
    static const uint8_t experts[] = {0, 0, 0, 1, 0, 0};
    ck_assert(h->n_layers == 6 && h->latent_dim == 24);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        ck_assert_uint_eq(fkv_architecture_has_attention(h, i), attention[i]);
        ck_assert_uint_eq(fkv_architecture_is_recurrent(h, i), recurrent[i]);
        ck_assert_uint_eq(fkv_architecture_has_ffn(h, i), !attention[i] && !recurrent[i]);
        ck_assert_uint_eq(fkv_architecture_has_experts(h, i), experts[i]);
    }
    ck_assert(h->shapes[1].state_layer == 0 && h->shapes[2].page_layer == 1 && h->shapes[4].state_layer == 2);
    ck_assert(fkv_architecture_n_cache_layers(h) == 3 && fkv_architecture_n_storing_layers(h) == 5);
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"nemotron_h\", \"layers_block_type\": [\"mamba\", \"attention\", \"mlp\"]");
    ck_assert_uint_eq(fkv_weights_hparams(weights)->n_experts, 0); /* no layer has experts */
    fkv_weights_close(weights);
    weights = config_of("\"model_type\": \"falcon_h1\", \"num_hidden_layers\": 2");
    h = fkv_weights_hparams(weights);
    ck_assert(h->shapes[1].page_layer == 2 && h->shapes[1].state_layer == 3 && fkv_architecture_n_cache_layers(h) == 4);
    fkv_weights_close(weights);
}
END_TEST

START_TEST(unsupported_configs_are_rejected) {
    static const struct {
        const char *inner;
        fkv_status status;
        const char *words;
    } bad[] = {
        {"", FKV_UNSUPPORTED, "model_type ''"},
        {"\"model_type\": \"other\\u001b\"", FKV_UNSUPPORTED, "model_type 'other\\x1b'"},
        {"\"model_type\": \"mamba\"", FKV_UNSUPPORTED, "recurrent state"},
        {"\"model_type\": \"jamba\"", FKV_UNSUPPORTED, "recurrent state"},
        {"\"model_type\": \"nemotron_h\"", FKV_FILE_FORMAT, "layers_block_type or hybrid_override_pattern"},
        {"\"model_type\": \"nemotron_h\", \"layers_block_type\": [\"mlp\", 7]", FKV_UNSUPPORTED,
         "layer 1 has an unsupported type"},
        {"\"model_type\": \"nemotron_h\", \"layers_block_type\": {}", FKV_FILE_FORMAT, "1 to 512 layers"},
        {"\"model_type\": \"nemotron_h\", \"hybrid_override_pattern\": \"M-x\"", FKV_UNSUPPORTED,
         "layer 2 has an unsupported type"},
        {"\"model_type\": \"nemotron_h\", \"hybrid_override_pattern\": \"M-\", \"use_bias\": true", FKV_UNSUPPORTED, "use_bias"},
        {"\"model_type\": \"falcon_h1\", \"ssm_multipliers\": [1, 1, 1, 1]", FKV_FILE_FORMAT, "list of 5 numbers"},
        {"\"model_type\": \"falcon_h1\", \"mlp_multipliers\": [1, 0]", FKV_UNSUPPORTED,
         "mlp_multipliers must contain only numbers above 0"},
        {"\"model_type\": \"falcon_h1\", \"key_multiplier\": 0", FKV_UNSUPPORTED, "key_multiplier is 0"},
        {"\"model_type\": \"falcon_h1\", \"attention_bias\": true", FKV_UNSUPPORTED, "attention_bias"},
        {"\"model_type\": \"deepseek_v32\"", FKV_UNSUPPORTED, "indexer"},
        {"\"model_type\": \"deepseek_v3\", \"kv_lora_rank\": 0", FKV_FILE_FORMAT, "kv_lora_rank (0)"},
        {"\"model_type\": \"deepseek_v3\", \"qk_nope_head_dim\": 4294967295", FKV_FILE_FORMAT, "qk_nope_head_dim"},
        {"\"model_type\": \"deepseek_v3\", \"scoring_func\": \"softmax\"", FKV_UNSUPPORTED, "scoring_func 'softmax'"},
        {"\"model_type\": \"deepseek_v3\", \"moe_layer_freq\": 2", FKV_UNSUPPORTED, "moe_layer_freq 2"},
        {"\"model_type\": \"deepseek_v2\", \"topk_method\": \"noaux_tc\"", FKV_UNSUPPORTED, "topk_method 'noaux_tc'"},
        {"\"model_type\": \"minicpm3\", \"v_head_dim\": 64, \"dim_model_base\": 0", FKV_FILE_FORMAT, "dim_model_base"},
        {"\"model_type\": \"kimi_k3\"", FKV_UNSUPPORTED, "recurrent state"},
        {"\"model_type\": \"kimi_linear\"", FKV_OK, ""},
        {"\"model_type\": \"kimi_linear\", \"mla_use_nope\": false", FKV_UNSUPPORTED, "mla_use_nope"},
        {"\"model_type\": \"kimi_linear\", \"linear_attn_config\": []", FKV_FILE_FORMAT, "linear_attn_config must be an object"},
        {"\"model_type\": \"kimi_linear\", \"linear_attn_config\": {\"kda_layers\": [1], \"full_attn_layers\": [1]}",
         FKV_FILE_FORMAT, "linear_attn_config must list each"},
        {"\"model_type\": \"kimi_linear\", \"linear_attn_config\": {\"kda_layers\": [1]}", FKV_FILE_FORMAT,
         "linear_attn_config must list each"},
        {"\"model_type\": \"kimi_linear\", \"moe_router_activation_func\": \"softmax\"", FKV_UNSUPPORTED,
         "scoring_func 'softmax'"},
        {"\"model_type\": \"gemma3n_text\"", FKV_UNSUPPORTED, "AltUp"},
        {"\"model_type\": \"gemma4_text\", \"num_hidden_layers\": 4000000000, \"num_kv_shared_layers\": 3999999999", FKV_OK, ""},
        {"\"model_type\": \"gemma3\", \"text_config\": {\"model_type\": \"gemma9\"}", FKV_UNSUPPORTED, "'gemma9'"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 8}", FKV_UNSUPPORTED, "'dynamic'"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"llama3\"}", FKV_FILE_FORMAT, "factor of 0"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"linear\"}", FKV_FILE_FORMAT, "factor of 0"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"beta_fast\": []}", FKV_FILE_FORMAT, "beta_fast"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"longrope\"}", FKV_FILE_FORMAT, "short_factor"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"longrope\", \"short_factor\": [1, 1], \"long_factor\": [1, \"2\"]}",
         FKV_FILE_FORMAT, "long_factor must contain only numbers above 0"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"longrope\", \"short_factor\": [1, 1, 1], \"long_factor\": [1, 1]}",
         FKV_FILE_FORMAT, "differ in length"},
        {QWEN3 ", \"rope_scaling\": {\"rope_type\": \"longrope\", \"short_factor\": [1], \"long_factor\": [1]}", FKV_FILE_FORMAT,
         "1 RoPE factors instead of 2"},
        {QWEN3 ", \"rope_scaling\": 8", FKV_FILE_FORMAT, "not an object"},
        {QWEN3 ", \"rope_parameters\": {\"full_attention\": {}}", FKV_UNSUPPORTED, "per layer type"},
        {QWEN3 ", \"quantization_config\": {}", FKV_UNSUPPORTED, "quantization with 0 bits in groups of 0"},
        {QWEN3 ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\"}", FKV_UNSUPPORTED,
         "unsupported quant_method 'bitsandbytes'"},
        {QWEN3 ", \"quantization\": {\"bits\": 8, \"group_size\": 32, \"mode\": \"mxfp6\"}", FKV_UNSUPPORTED, "mode 'mxfp6'"},
        {QWEN3 ", \"quantization\": {\"bits\": 4, \"group_size\": 64, \"mode\": \"mxfp4\"}", FKV_FILE_FORMAT,
         "expected 4 bits in groups of 32"},
        {QWEN3 ", \"quantization\": 4, \"quantization_config\": 4", FKV_FILE_FORMAT, "not an object"},
        {QWEN3 ", \"hidden_act\": \"relu\"", FKV_UNSUPPORTED, "'relu'"},
        {QWEN3 ", \"partial_rotary_factor\": 0", FKV_FILE_FORMAT, "partial_rotary_factor 0"},
        {QWEN3 ", \"partial_rotary_factor\": 1.5", FKV_FILE_FORMAT, "partial_rotary_factor 1.5"},
        {QWEN3 ", \"kv_lora_rank\": 512", FKV_UNSUPPORTED, "kv_lora_rank"},
        {QWEN3 ", \"mlp_only_layers\": [0]", FKV_UNSUPPORTED, "mlp_only_layers"},
        {QWEN3 ", \"decoder_sparse_step\": 2", FKV_UNSUPPORTED, "decoder_sparse_step"},
        {QWEN3 ", \"layer_types\": [\"full_attention\"]", FKV_FILE_FORMAT, "each of 6 layers"},
        {QWEN3 ", \"no_rope_layers\": [1]", FKV_FILE_FORMAT, "no_rope_layers"},
        {QWEN3 ", \"no_rope_layers\": [1, 1, 1, 2, 1, 1]", FKV_FILE_FORMAT, "no_rope_layers"},
        {"\"model_type\": \"cohere2\", \"use_qk_norm\": true", FKV_UNSUPPORTED, "use_qk_norm"},
        {"\"model_type\": \"qwen3_moe\", \"num_experts\": 4, \"mlp_only_layers\": [\"0\"], \"num_hidden_layers\": 2",
         FKV_FILE_FORMAT, "mlp_only_layers must be a list of layers"},
        {"\"model_type\": \"qwen3_moe\", \"num_experts\": 4, \"decoder_sparse_step\": 0", FKV_FILE_FORMAT, "is 0"},
        {"\"model_type\": \"dots1\", \"n_routed_experts\": 4, \"num_hidden_layers\": 1, \"mlp_layer_types\": [\"moe\"]",
         FKV_UNSUPPORTED, "'moe'"},
        {"\"model_type\": \"olmoe\", \"clip_qkv\": 8.0", FKV_UNSUPPORTED, "clip_qkv"},
        {"\"model_type\": \"minimax_m2\", \"use_qk_norm\": false", FKV_UNSUPPORTED, "use_qk_norm"},
        {"\"model_type\": \"minimax_m2\", \"scoring_func\": \"softmax\"", FKV_UNSUPPORTED, "scoring_func"},
        {"\"model_type\": \"hunyuan_v1_dense\", \"use_cla\": true", FKV_UNSUPPORTED, "use_cla"},
        {"\"model_type\": \"hunyuan_v1_dense\", \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}", FKV_UNSUPPORTED,
         "'dynamic'"},
        {"\"model_type\": \"hunyuan_v1_moe\", \"num_experts\": 8, \"moe_topk\": [1, 2]", FKV_UNSUPPORTED,
         "moe_topk differs between layers"},
        {"\"model_type\": \"ernie4_5_moe\", \"use_bias\": true", FKV_UNSUPPORTED, "use_bias"},
        {"\"model_type\": \"afmoe\", \"score_func\": \"softmax\"", FKV_UNSUPPORTED, "score_func"},
        {"\"model_type\": \"solar_open\", \"partial_rotary_factor\": 0.5", FKV_UNSUPPORTED, "partial_rotary_factor"},
        {"\"model_type\": \"exaone4\", \"sliding_window_pattern\": \"LGL\"", FKV_UNSUPPORTED, "sliding_window_pattern"},
        {"\"model_type\": \"starcoder2\", \"hidden_act\": \"gelu\"", FKV_UNSUPPORTED, "'gelu'"},
        {"\"model_type\": \"phimoe\", \"num_attention_heads\": 2, \"hidden_size\": 8, \"rope_scaling\": {\"type\": \"longrope\", "
         "\"short_factor\": [1, 1], \"long_factor\": [1, 1], \"short_mscale\": 1.2, \"long_mscale\": 1.3}",
         FKV_UNSUPPORTED, "short_mscale"},
        {"\"model_type\": \"ernie4_5_moe\", \"moe_num_experts\": 4, \"num_hidden_layers\": 4000000000", FKV_OK, ""},
        {"\"model_type\": \"granitemoehybrid\", \"num_hidden_layers\": 1, \"layer_types\": [\"conv\"]", FKV_UNSUPPORTED,
         "expected full_attention or mamba"},
        {"\"model_type\": \"granitemoehybrid\", \"position_embedding_type\": \"alibi\"", FKV_UNSUPPORTED, "'alibi'"},
        {"\"model_type\": \"granitemoehybrid\", \"time_step_limit\": [1, 0.5]", FKV_UNSUPPORTED, "time_step_limit"},
        {"\"model_type\": \"granitemoehybrid\", \"time_step_limit\": 3", FKV_FILE_FORMAT, "time_step_limit"},
        {"\"model_type\": \"lfm2\", \"block_multiple_of\": 0", FKV_FILE_FORMAT, "block_multiple_of 0"},
        {"\"model_type\": \"lfm2\", \"full_attn_idxs\": 3", FKV_FILE_FORMAT, "full_attn_idxs"},
        {"\"model_type\": \"qwen3_next\", \"full_attention_interval\": 0", FKV_FILE_FORMAT, "full_attention_interval"},
        {"\"model_type\": \"qwen3_5_text\", \"attn_output_gate\": false", FKV_OK, ""},
        {"\"model_type\": \"qwen3\", \"num_hidden_layers\": 1, \"layer_types\": [\"linear_attention\"]", FKV_UNSUPPORTED,
         "'linear_attention'"},
        {"\"model_type\": \"gemma3_text\", \"num_hidden_layers\": 1, \"layer_types\": [\"sliding_attention\"]", FKV_FILE_FORMAT,
         "sliding_window is not set"},
        /* the safetensors reader accepts the value, and model.c rejects it */
        {"\"model_type\": \"gemma3_text\", \"num_hidden_layers\": 4000000000", FKV_OK, ""},
        {"\"model_type\": \"smollm3\", \"num_hidden_layers\": 4000000000, \"no_rope_layers\": [1]", FKV_FILE_FORMAT,
         "no_rope_layers"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (bad[i].status != FKV_OK)
            ck_config_rejected(bad[i].inner, bad[i].status, bad[i].words);
        else
            fkv_weights_close(config_of(bad[i].inner));
    }
}
END_TEST

START_TEST(config_value_of_the_wrong_type_is_named) {
    static const char *const whole[] = {"intermediate_size", "head_dim", "num_key_value_heads", "max_position_embeddings"};
    static const char *const wrong[] = {"-1", "4294967296", "1.5", "\"8\"", "true", "[8]"};
    char inner[512];
    for (size_t k = 0; k < 4; k++)
        for (size_t w = 0; w < 6; w++) {
            (void)snprintf(inner, sizeof inner, QWEN3 ", \"%s\": %s", whole[k], wrong[w]);
            ck_config_rejected(inner, FKV_FILE_FORMAT, whole[k]);
        }
    ck_config_rejected(QWEN3 ", \"rms_norm_eps\": \"1e-6\"", FKV_FILE_FORMAT, "rms_norm_eps");
    ck_config_rejected(QWEN3 ", \"rms_norm_eps\": -1e-6", FKV_FILE_FORMAT, "rms_norm_eps");
    ck_config_rejected(QWEN3 ", \"rope_theta\": 1e300", FKV_FILE_FORMAT, "rope_theta");
    ck_config_rejected(QWEN3 ", \"tie_word_embeddings\": 1", FKV_FILE_FORMAT, "tie_word_embeddings");
    ck_config_rejected("\"model_type\": 3", FKV_FILE_FORMAT, "model_type");
    ck_config_rejected(QWEN3 ", \"bos_token_id\": 256", FKV_FILE_FORMAT,
                       "bos_token_id is 256, but the vocabulary has 256 tokens");
    ck_config_rejected(QWEN3 ", \"eos_token_id\": [3, -1]", FKV_FILE_FORMAT, "eos_token_id");
}
END_TEST

START_TEST(invalid_json_is_rejected) {
    ck_config_rejected("\"a\": 1, \"a\": 2", FKV_FILE_FORMAT, "not valid JSON: duplicate");
    ck_config_rejected("\"a\": \"\xff\"", FKV_FILE_FORMAT, "not valid JSON");
    ck_config_rejected("\"a\": 99999999999999999999", FKV_FILE_FORMAT, "not valid JSON");
    ck_config_rejected("\"a\": \"b\\u0000\"", FKV_FILE_FORMAT, "not valid JSON");
    static char deep[1 << 20];
    memset(deep, '[', sizeof deep);
    fkv_weights *weights = fkv_weights_new();
    ck_status(fkv_hf_config_read(weights, deep, sizeof deep, "config.json"), FKV_FILE_FORMAT);
    ck_status(fkv_hf_config_read(weights, "[]", 2, "config.json"), FKV_FILE_FORMAT);
    ck_status(fkv_hf_config_read(weights, "", 0, "config.json"), FKV_FILE_FORMAT);
    fkv_weights_close(weights);
}
END_TEST

/* ---- names ---- */

static void ck_name(const char *architecture, const char *hf, const char *expected) {
    char name[FKV_MAX_TENSOR_NAME];
    ck_assert(fkv_hf_tensor_name(architecture, hf, name));
    ck_assert_str_eq(name, expected);
}

START_TEST(tensors_get_gguf_names) {
    char name[FKV_MAX_TENSOR_NAME];
    ck_name("llama", "model.embed_tokens.weight", "token_embd.weight");
    ck_name("llama", "model.norm.weight", "output_norm.weight");
    ck_name("llama", "lm_head.weight", "output.weight");
    ck_name("llama", "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight");
    ck_name("qwen2", "model.layers.10.self_attn.k_proj.bias", "blk.10.attn_k.bias");
    ck_name("qwen2", "model.layers.511.self_attn.v_proj.weight", "blk.511.attn_v.weight");
    ck_name("llama", "model.layers.7.self_attn.o_proj.weight", "blk.7.attn_output.weight");
    ck_name("qwen3", "model.layers.7.self_attn.q_norm.weight", "blk.7.attn_q_norm.weight");
    ck_name("qwen3", "model.layers.7.self_attn.k_norm.weight", "blk.7.attn_k_norm.weight");
    ck_name("llama", "model.layers.7.mlp.gate_proj.weight", "blk.7.ffn_gate.weight");
    ck_name("llama", "model.layers.7.mlp.up_proj.weight", "blk.7.ffn_up.weight");
    ck_name("llama", "model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight");
    ck_name("llama", "model.layers.7.input_layernorm.weight", "blk.7.attn_norm.weight");
    ck_name("llama", "model.layers.7.post_attention_layernorm.weight", "blk.7.ffn_norm.weight");
    ck_name("gemma3", "model.layers.7.input_layernorm.weight", "blk.7.attn_norm.weight");
    ck_name("gemma3", "model.layers.7.post_attention_layernorm.weight", "blk.7.post_attention_norm.weight");
    ck_name("gemma3", "model.layers.7.pre_feedforward_layernorm.weight", "blk.7.ffn_norm.weight");
    ck_name("gemma3", "model.layers.7.post_feedforward_layernorm.weight", "blk.7.post_ffw_norm.weight");
    ck_name("gemma4", "model.language_model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight");
    ck_name("gemma4", "model.language_model.layers.7.layer_scalar", "blk.7.layer_output_scale.weight");
    ck_name("gemma4", "model.language_model.layers.7.router.per_expert_scale", "blk.7.ffn_down_exps.scale");
    ck_name("gemma4", "language_model.model.layers.7.experts.switch_glu.up_proj.weight", "blk.7.ffn_up_exps.weight");
    ck_assert(!fkv_hf_tensor_name("gemma4", "model.vision_tower.encoder.layers.0.layer_scalar", name));
    ck_assert(!fkv_hf_tensor_name("gemma4", "model.embed_vision.embedding_projection.weight", name));
    ck_assert(!fkv_hf_tensor_name("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", name));
    static const char *const kept[] = {"other",
                                       "model.layers.",
                                       "model.layers.weight",
                                       "model.layers.1.weight",
                                       "model.layers.01.mlp.up_proj.weight",
                                       "model.layers.12345.mlp.up_proj.weight",
                                       "model.layers.-1.mlp.up_proj.weight",
                                       "model.layers.1.mlp.up_proj.scale",
                                       "model.layers.1.pre_feedforward_layernorm.weight",
                                       ".weight",
                                       "."};
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) ck_name("llama", kept[i], kept[i]);
}
END_TEST

/* ---- one file ---- */

START_TEST(file_gives_its_tensors) {
    static uint8_t file[MAX_FILE];
    uint8_t *block = NULL;
    fkv_weights *weights = NULL;
    const size_t n =
        make_file("{\"__metadata__\": {\"format\": \"pt\"}, \"a\": {\"dtype\": \"F32\", \"shape\": [3], "
                  "\"data_offsets\": [0, 12]}, \"b\": {\"dtype\": \"BF16\", \"shape\": [2, 3], \"data_offsets\": [12, 24]}, "
                  "\"c\": {\"dtype\": \"F16\", \"shape\": [2, 2, 3], \"data_offsets\": [24, 48]}, "
                  "\"d\": {\"dtype\": \"F32\", \"shape\": [], \"data_offsets\": [48, 52]}}",
                  52, file);
    ck_ok(read_file(file, n, &weights, &block));
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 4);
    const fkv_tensor *a = fkv_weights_find(weights, "a");
    const fkv_tensor *b = fkv_weights_find(weights, "b");
    const fkv_tensor *c = fkv_weights_find(weights, "c");
    const fkv_tensor *d = fkv_weights_find(weights, "d");
    ck_assert(a->type == FKV_TENSOR_F32 && a->n_rows == 1 && a->n_cols == 3 && a->data == block + n - 52);
    ck_assert(b->type == FKV_TENSOR_BF16 && b->n_rows == 2 && b->n_cols == 3 && b->row_bytes == 6 && b->data == a->data + 12);
    ck_assert(c->type == FKV_TENSOR_F16 && c->n_rows == 4 && c->n_cols == 3);
    ck_assert(d->n_rows == 1 && d->n_cols == 1);
    fkv_weights_close(weights);
    free(block);
}
END_TEST

#define ONE(dtype, shape, offsets) "{\"x\": {\"dtype\": \"" dtype "\", \"shape\": " shape ", \"data_offsets\": " offsets "}}"

START_TEST(tensor_that_does_not_fit_its_file_is_rejected) {
    ck_file_rejected(ONE("F32", "[2]", "[0, 8]"), 7, FKV_FILE_DAMAGED, "offsets 0 to 8, but the file has only 7 bytes");
    ck_file_rejected(ONE("F32", "[2]", "[8, 0]"), 8, FKV_FILE_DAMAGED, "offsets 8 to 0");
    ck_file_rejected(ONE("F32", "[2]", "[0, 4]"), 8, FKV_FILE_DAMAGED, "is 4 bytes long, but its type and shape require 8");
    ck_file_rejected(ONE("F16", "[2]", "[0, 8]"), 8, FKV_FILE_DAMAGED, "is 8 bytes long, but its type and shape require 4");
    ck_file_rejected(ONE("F32", "[9223372036854775807]", "[0, 8]"), 8, FKV_FILE_DAMAGED, "dimension of 9223372036854775807");
    ck_file_rejected(ONE("F32", "[65536, 65536, 2]", "[0, 8]"), 8, FKV_FILE_DAMAGED, "more than 2^32 - 1 rows");
    ck_file_rejected(ONE("F32", "[4294967295, 4294967295]", "[0, 8]"), 8, FKV_FILE_DAMAGED, "overflows 64 bits");
    ck_file_rejected(ONE("F32", "[0]", "[0, 0]"), 8, FKV_FILE_DAMAGED, "dimension of 0");
    ck_file_rejected(ONE("F32", "[1,1,1,1,1,1,1,1,1]", "[0, 4]"), 8, FKV_FILE_FORMAT, "at most 8 integers");
    ck_file_rejected(ONE("F32", "[-1]", "[0, 4]"), 8, FKV_FILE_FORMAT, "non-negative integers");
    ck_file_rejected(ONE("F32", "[1.0]", "[0, 4]"), 8, FKV_FILE_FORMAT, "non-negative integers");
    ck_file_rejected(ONE("F32", "2", "[0, 8]"), 8, FKV_FILE_FORMAT, "shape");
    ck_file_rejected(ONE("F32", "[2]", "[8]"), 8, FKV_FILE_DAMAGED, "offsets 8 to 0");
    ck_file_rejected(ONE("F32", "[2]", "[0, 8, 8]"), 8, FKV_FILE_FORMAT, "data_offsets");
    ck_file_rejected(ONE("I8", "[8]", "[0, 8]"), 8, FKV_UNSUPPORTED, "x has unsupported type I8");
    ck_file_rejected("{\"x\": {\"shape\": [2], \"data_offsets\": [0, 8]}}", 8, FKV_FILE_FORMAT, "no dtype");
    ck_file_rejected("{\"x\": 1}", 8, FKV_FILE_FORMAT, "x is not a JSON object");
    ck_file_rejected("{\"x\": {}, \"x\": {}}", 8, FKV_FILE_FORMAT, "duplicate");
    ck_file_rejected("{\"a\": {\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": [0, 8]}, "
                     "\"b\": {\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": [4, 12]}}",
                     12, FKV_FILE_DAMAGED, "a and b overlap");
    ck_file_rejected("[]", 8, FKV_FILE_FORMAT, "not an object");
}
END_TEST

START_TEST(header_beyond_the_file_is_rejected) {
    static const uint64_t lengths[] = {9, 1000, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        uint8_t file[16] = {0};
        uint8_t *block = NULL;
        fkv_weights *weights = NULL;
        memcpy(file, &lengths[i], 8);
        ck_status(read_file(file, sizeof file, &weights, &block), FKV_FILE_DAMAGED);
        fkv_weights_close(weights);
        free(block);
    }
    for (size_t n = 0; n < 8; n++) {
        const uint8_t file[8] = {0};
        uint8_t *block = NULL;
        fkv_weights *weights = NULL;
        ck_status(read_file(file, n, &weights, &block), FKV_FILE_FORMAT);
        fkv_weights_close(weights);
        free(block);
    }
}
END_TEST

/* ---- folders ---- */

static void write_text(const char *name, const char *text) {
    file_fixture_write_file(file_fixture_path(name), (const uint8_t *)text, strlen(text));
}

static void write_shard(const char *name, const char *header, size_t data_bytes) {
    static uint8_t file[MAX_FILE];
    const size_t n = make_file(header, data_bytes, file);
    file_fixture_write_file(file_fixture_path(name), file, n);
}

static void clear_folder(void) {
    static const char *const names[] = {"config.json",   "tokenizer.json", "model.safetensors.index.json",
                                        "a.safetensors", "b.safetensors",  "model.safetensors"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) (void)unlink(file_fixture_path(names[i]));
}

#define EMBD "{\"model.embed_tokens.weight\": {\"dtype\": \"F32\", \"shape\": [1, 4], \"data_offsets\": [0, 16]}}"
#define NORM "{\"model.norm.weight\": {\"dtype\": \"F32\", \"shape\": [4], \"data_offsets\": [0, 16]}}"
#define HEAD "{\"lm_head.weight\": {\"dtype\": \"F32\", \"shape\": [1, 4], \"data_offsets\": [0, 16]}}"

static void ck_folder(fkv_status expected, const char *words) {
    fkv_weights *weights = NULL;
    ck_status(fkv_weights_open(file_fixture_folder(), &weights), expected);
    ck_assert_ptr_null(weights);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "'%s' does not contain '%s'", fkv_message(), words);
}

static fkv_weights *open_folder(void) {
    fkv_weights *weights = NULL;
    ck_ok(fkv_weights_open(file_fixture_folder(), &weights));
    return weights;
}

START_TEST(all_files_of_a_folder_form_one_model) {
    clear_folder();
    write_text("config.json", "{" QWEN3 "}");
    write_shard("a.safetensors", EMBD, 16);
    write_shard("b.safetensors", NORM, 16);
    fkv_weights *weights = open_folder();
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 2);
    ck_assert_ptr_nonnull(fkv_weights_find(weights, "token_embd.weight"));
    ck_assert_ptr_nonnull(fkv_weights_find(weights, "output_norm.weight"));
    const fkv_vocab_source *v = fkv_weights_vocab(weights);
    ck_assert(v->n_tokens == 256 && v->tokens == NULL && v->model.size == 4 && memcmp(v->model.data, "byte", 4) == 0);
    fkv_weights_close(weights);
    write_shard("b.safetensors", EMBD, 16);
    ck_folder(FKV_FILE_DAMAGED, "duplicate tensor token_embd.weight");
    write_shard("model.safetensors", NORM, 16); /* model.safetensors takes precedence, so files a and b are ignored */
    weights = open_folder();
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 1);
    ck_assert_ptr_nonnull(fkv_weights_find(weights, "output_norm.weight"));
    fkv_weights_close(weights);
    write_text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n");
    ck_folder(FKV_FILE_FORMAT, "git lfs pull");
}
END_TEST

#define CODES "{\"model.embed_tokens.weight\": {\"dtype\": \"U32\", \"shape\": [2, 8], \"data_offsets\": [0, 64]}}"
#define SCALES                                                                                                                   \
    "{\"model.embed_tokens.scales\": {\"dtype\": \"F16\", \"shape\": [2, 1], \"data_offsets\": [0, 4]},"                         \
    " \"model.embed_tokens.biases\": {\"dtype\": \"F16\", \"shape\": [2, 1], \"data_offsets\": [4, 8]}}"

START_TEST(codes_and_scales_from_different_files_form_one_tensor) {
    clear_folder();
    write_text("config.json", "{" QWEN3 ", \"quantization\": {\"bits\": 4, \"group_size\": 64}}");
    write_shard("a.safetensors", CODES, 64);
    write_shard("b.safetensors", SCALES, 8);
    fkv_weights *weights = open_folder();
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 1);
    const fkv_tensor *t = fkv_weights_find(weights, "token_embd.weight");
    ck_assert(t != NULL && t->type == FKV_TENSOR_MLX_AFFINE && t->n_rows == 2 && t->n_cols == 64 && t->row_bytes == 32);
    ck_assert(t->bits == 4 && t->group == 64 && t->scale_type == FKV_TENSOR_F16 && t->biases == t->scales + 4);
    const fkv_tensor second = fkv_tensor_rows(t, 1, 1);
    ck_assert(second.n_rows == 1 && second.data == t->data + 32 && second.scales == t->scales + 2 &&
              second.biases == t->biases + 2);
    fkv_weights_close(weights);
    (void)unlink(file_fixture_path("b.safetensors"));
    ck_folder(FKV_FILE_DAMAGED, "token_embd.weight is quantized, but its scales or biases are missing");
    write_text("config.json", "{" QWEN3 ", \"quantization\": {\"bits\": 4, \"group_size\": 32}}");
    write_shard("b.safetensors", SCALES, 8);
    ck_folder(FKV_FILE_DAMAGED, "token_embd.scales is 2 x 1, expected 2 x 2 (one value per group)");
    write_text("config.json", "{" QWEN3 ", \"quantization\": {\"bits\": 4, \"group_size\": 32, \"model.embed_tokens\":"
                              " {\"bits\": 4, \"group_size\": 64}}}");
    fkv_weights_close(open_folder());
    write_text("config.json", "{" QWEN3 "}");
    ck_folder(FKV_UNSUPPORTED, "model.embed_tokens.weight has type U32");
}
END_TEST

START_TEST(index_selects_the_files_and_must_match_them) {
    clear_folder();
    write_text("config.json", "{" QWEN3 "}");
    write_shard("a.safetensors", EMBD, 16);
    write_shard("b.safetensors", NORM, 16);
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"model.embed_tokens.weight\": \"a.safetensors\"}}");
    fkv_weights *weights = open_folder(); /* file b is not read */
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 1);
    fkv_weights_close(weights);
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"model.embed_tokens.weight\": \"a.safetensors\", "
                                               "\"model.norm.weight\": \"b.safetensors\"}}");
    weights = open_folder();
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 2);
    fkv_weights_close(weights);
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"model.embed_tokens.weight\": \"a.safetensors\", "
                                               "\"lm_head.weight\": \"b.safetensors\"}}");
    ck_folder(FKV_FILE_DAMAGED, "lm_head.weight is listed in the index but missing from the files");
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"x\": \"c.safetensors\"}}");
    ck_folder(FKV_IO, "c.safetensors");
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"x\": \"../a.safetensors\"}}");
    ck_folder(FKV_FILE_FORMAT, "'../a.safetensors', which is not the name");
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"x\": \"/etc/passwd\"}}");
    ck_folder(FKV_FILE_FORMAT, "not the name of a safetensors file");
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"x\": 3}}");
    ck_folder(FKV_FILE_FORMAT, "not the name of a safetensors file");
    write_text("model.safetensors.index.json", "{}");
    ck_folder(FKV_FILE_FORMAT, "weight_map is missing");
}
END_TEST

START_TEST(tied_and_untied_outputs_follow_the_config) {
    clear_folder();
    write_shard("a.safetensors", EMBD, 16);
    write_text("config.json", "{" QWEN3 ", \"tie_word_embeddings\": false}");
    ck_folder(FKV_FILE_DAMAGED, "lm_head.weight is missing");
    write_shard("b.safetensors", HEAD, 16);
    fkv_weights *weights = open_folder();
    ck_assert_ptr_nonnull(fkv_weights_find(weights, "output.weight"));
    fkv_weights_close(weights);
    write_text("config.json", "{" QWEN3 ", \"tie_word_embeddings\": true}");
    weights = open_folder();
    ck_assert_ptr_null(fkv_weights_find(weights, "output.weight"));
    fkv_weights_close(weights);
}
END_TEST

START_TEST(missing_files_of_a_folder_are_reported) {
    clear_folder();
    ck_folder(FKV_FILE_FORMAT, "config.json");
    write_text("config.json", "{" QWEN3 "}");
    ck_folder(FKV_FILE_FORMAT, "contains no .safetensors files");
    write_shard("a.safetensors", EMBD, 16);
    write_text("tokenizer.json", "{}");
    ck_folder(FKV_FILE_FORMAT, "\"model\" is missing");
    clear_folder();
    write_text("config.json", "{\"model_type\": \"qwen3\", \"vocab_size\": 151936}");
    write_shard("a.safetensors", EMBD, 16);
    ck_folder(FKV_UNSUPPORTED, "this model has 151936");
    file_fixture_remove_folder();
}
END_TEST

/* ---- bundled model ---- */

START_TEST(needle_model_is_read) {
    fkv_weights *weights = NULL;
    ck_ok(fkv_weights_open("models/needle/", &weights));
    const fkv_hparams *h = fkv_weights_hparams(weights);
    ck_assert_str_eq(h->architecture, "qwen3");
    ck_assert_str_eq(h->name, "needle");
    ck_assert(h->n_layers == 4 && h->dim == 256 && h->ffn_dim == 640 && h->n_q_heads == 4 && h->n_kv_heads == 2);
    ck_assert(h->head_dim == 128 && h->n_vocab == 256 && h->context == 131072 && h->rope.base == 1e6f && h->norm_eps == 1e-6f);
    ck_assert_uint_eq(fkv_weights_n_tensors(weights), 46);
    const fkv_tensor *q = fkv_weights_find(weights, "blk.3.attn_q.weight");
    ck_assert(q != NULL && q->type == FKV_TENSOR_F16 && q->n_rows == 512 && q->n_cols == 256);
    float row[256];
    double norm = 0;
    fkv_tensor_row_floats(fkv_weights_find(weights, "output_norm.weight"), 0, row);
    for (uint32_t i = 0; i < 256; i++) norm += fabs((double)row[i]);
    ck_assert(norm > 1 && norm < 1e4);
    fkv_weights_close(weights);
}
END_TEST

TEST_MAIN("safetensors", config_gives_hyperparameters, gemma_has_windows_scales_and_two_ropes,
          gemma_4_layers_have_individual_shapes_in_both_spellings, partial_rotary_factor_is_model_specific,
          unused_window_of_qwen_is_ignored, layers_without_experts_are_marked, fields_of_a_model_type_have_common_meanings,
          layers_are_mixers_or_feed_forwards, unsupported_configs_are_rejected, config_value_of_the_wrong_type_is_named,
          invalid_json_is_rejected, tensors_get_gguf_names, file_gives_its_tensors, tensor_that_does_not_fit_its_file_is_rejected,
          header_beyond_the_file_is_rejected, all_files_of_a_folder_form_one_model,
          codes_and_scales_from_different_files_form_one_tensor, index_selects_the_files_and_must_match_them,
          tied_and_untied_outputs_follow_the_config, missing_files_of_a_folder_are_reported, needle_model_is_read)
