/* Tests of loading models: the reported properties are correct, and models with missing, misshapen or unused tensors are rejected
 * with a message that names the tensor. */
#include "../src/model/model_backend.h"
#include "cache_fixture.h"
#include "model_fixture.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

static const model_spec SMALL = {
    .type = "llama", .n_layers = 2, .dim = 64, .ffn_dim = 96, .n_q_heads = 4, .n_kv_heads = 2, .head_dim = 16, .tied = true};

static fkv_status load(model_fixture *w, fkv_model **model) {
    fkv_model_config config = fkv_model_config_default();
    return fkv_model_load(model_fixture_write(w), &config, model);
}

START_TEST(needle_model_reports_its_properties) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    ck_ok(fkv_model_load("models/needle", &config, &model));
    const fkv_model_info *info = fkv_model_about(model);
    ck_assert_str_eq(info->architecture, "qwen3");
    ck_assert_str_eq(info->tokenizer, "byte");
    ck_assert_uint_eq(info->n_layers, 4);
    ck_assert_uint_eq(info->head_dim, 128);
    ck_assert_uint_eq(info->n_vocab, 256);
    ck_assert_uint_eq(info->context, 131072);
    ck_assert_uint_eq(info->window, 0);
    ck_assert_uint_eq(info->n_parameters, 3607808);
    ck_assert_str_eq(info->rope_id, "neox dim=128 base=1000000");
    ck_assert_uint_ge(info->packed_bytes, 2 * info->n_parameters); /* n_parameters counts the 16-bit weights and the norms */
    ck_assert_uint_le(info->packed_bytes, 2 * info->n_parameters + 64 * 1024);
    fkv_model_close(model);
}
END_TEST

START_TEST(weights_use_the_reported_memory) {
    fkv_model_config config = fkv_model_config_default();
    config.n_threads = 1;
    fkv_model *model = NULL;
    /* this first load is not measured, because it includes one-time allocations of libraries */
    ck_ok(fkv_model_load("models/needle", &config, &model));
    fkv_model_close(model);
    uint64_t before = cache_anonymous_bytes();
    ck_ok(fkv_model_load("models/needle", &config, &model));
    uint64_t taken = cache_anonymous_bytes() - before;
    uint64_t packed = fkv_model_about(model)->packed_bytes;
    printf("packed %llu bytes, resident %llu bytes\n", (unsigned long long)packed, (unsigned long long)taken);
    if (!TEST_SANITIZED && before != 0) {
        ck_assert_uint_ge(taken + 64 * 1024, packed);
        ck_assert_uint_le(taken, packed + 1024 * 1024);
    }
    fkv_model_close(model);
}
END_TEST

START_TEST(equal_weights_have_the_same_identity) {
    model_fixture a;
    model_fixture b;
    model_fixture c;
    fkv_model *of_a = NULL;
    fkv_model *of_b = NULL;
    fkv_model *of_c = NULL;
    model_fixture_make(&a, &SMALL, 1);
    model_fixture_make(&b, &SMALL, 1);
    model_fixture_make(&c, &SMALL, 2);
    ck_ok(load(&a, &of_a));
    ck_ok(load(&b, &of_b));
    ck_ok(load(&c, &of_c));
    ck_assert_mem_eq(fkv_model_about(of_a)->weights_id, fkv_model_about(of_b)->weights_id, 32);
    ck_assert_mem_ne(fkv_model_about(of_a)->weights_id, fkv_model_about(of_c)->weights_id, 32);
    fkv_model_close(of_a);
    fkv_model_close(of_b);
    fkv_model_close(of_c);
    model_fixture_free(&a);
    model_fixture_free(&b);
    model_fixture_free(&c);
}
END_TEST

static void check_rejected(model_fixture *w, fkv_status expected, const char *words) {
    fkv_model *model = NULL;
    ck_status(load(w, &model), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "\"%s\" does not contain %s", fkv_message(), words);
    ck_assert_ptr_null(model);
    model_fixture_free(w);
}

START_TEST(missing_tensor_is_named) {
    model_fixture w;
    model_fixture_make(&w, &SMALL, 1);
    model_fixture_drop(&w, "model.layers.1.mlp.up_proj.weight");
    check_rejected(&w, FKV_FILE_DAMAGED, "blk.1.ffn_up.weight");
    model_fixture_make(&w, &SMALL, 1);
    model_fixture_drop(&w, "model.norm.weight");
    check_rejected(&w, FKV_FILE_DAMAGED, "output_norm.weight");
    model_spec qwen = SMALL;
    qwen.type = "qwen2";
    model_fixture_make(&w, &qwen, 1);
    model_fixture_drop(&w, "model.layers.0.self_attn.k_proj.bias");
    check_rejected(&w, FKV_FILE_DAMAGED, "blk.0.attn_k.bias");
}
END_TEST

START_TEST(misshapen_tensor_is_named) {
    model_fixture w;
    model_fixture_make(&w, &SMALL, 1);
    model_fixture_tensor(&w, "model.layers.0.self_attn.v_proj.weight")->n_rows -= 1;
    check_rejected(&w, FKV_FILE_DAMAGED, "blk.0.attn_v.weight is 31 x 64");
    model_fixture_make(&w, &SMALL, 1);
    model_fixture_tensor(&w, "model.layers.1.input_layernorm.weight")->n_cols -= 1;
    check_rejected(&w, FKV_FILE_DAMAGED, "blk.1.attn_norm.weight is 1 x 63");
}
END_TEST

/* A llama model with head norms must be rejected, because without the norms it would run and give wrong results. */
START_TEST(unused_tensor_is_named) {
    model_fixture w;
    model_spec spec = SMALL;
    spec.type = "qwen3";
    model_fixture_make(&w, &spec, 1);
    w.spec.type = "llama";
    check_rejected(&w, FKV_UNSUPPORTED, "blk.");
}
END_TEST

START_TEST(unknown_architecture_is_named) {
    model_fixture w;
    model_fixture_make(&w, &SMALL, 1);
    w.spec.type = "mamba";
    check_rejected(&w, FKV_UNSUPPORTED, "mamba");
}
END_TEST

START_TEST(invalid_calls_are_rejected) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    ck_status(fkv_model_load(NULL, &config, &model), FKV_BAD_ARGUMENT);
    ck_status(fkv_model_load("models/needle", NULL, &model), FKV_BAD_ARGUMENT);
    ck_status(fkv_model_load("models/needle", &config, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_model_load("models/no-such-model", &config, &model), FKV_IO);
    config.n_threads = 100000;
    ck_status(fkv_model_load("models/needle", &config, &model), FKV_BAD_CONFIG);
    ck_assert_ptr_null(model);
    fkv_model_close(NULL);
}
END_TEST

/* Requesting MLX must fail, because this program is linked without MLX. */
START_TEST(unavailable_backend_is_rejected) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    fkv_backend_memory now;
    config.backend = FKV_BACKEND_MLX;
    ck_status(fkv_model_load("models/needle", &config, &model), FKV_UNSUPPORTED);
    config.backend = (fkv_backend)7;
    ck_status(fkv_model_load("models/needle", &config, &model), FKV_BAD_CONFIG);
    ck_assert_ptr_null(model);
    ck_status(fkv_backend_memory_now(FKV_BACKEND_CPU, &now), FKV_UNSUPPORTED);
    ck_status(fkv_backend_memory_now(FKV_BACKEND_MLX, &now), FKV_UNSUPPORTED);
    ck_status(fkv_backend_memory_now(FKV_BACKEND_MLX, NULL), FKV_BAD_ARGUMENT);
    ck_assert_uint_eq(fkv_backend_available(FKV_BACKEND_MLX, NULL), 0);
    ck_assert_uint_gt(fkv_backend_available(FKV_BACKEND_CPU, NULL), 0);
    ck_status(fkv_model_backend_register(FKV_BACKEND_MLX, &fkv_cpu_model_backend, "0.0.9"), FKV_UNSUPPORTED);
    ck_status(fkv_model_backend_register(FKV_BACKEND_CPU, &fkv_cpu_model_backend, FKV_VERSION_TEXT), FKV_BAD_CONFIG);
    ck_status(fkv_backend_memory_now(FKV_BACKEND_MLX, &now), FKV_UNSUPPORTED);
}
END_TEST

/* Loads a config.json from tests/data/configs for planning, without weights. */
static fkv_model *load_config(const char *name) {
    char path[256];
    fkv_model *model = NULL;
    fkv_model_config config = fkv_model_config_default();
    config.plan_only = true;
    (void)snprintf(path, sizeof path, "tests/data/configs/%s.json", name);
    ck_ok(fkv_model_load(path, &config, &model));
    return model;
}

/* Exact parameter counts, from the safetensors metadata of the models on Hugging Face. Gemma 3 is counted without its vision
 * tower. */
START_TEST(config_alone_gives_the_shape_of_a_model) {
    static const struct {
        const char *name;
        const char *architecture;
        uint64_t n_parameters;
        uint32_t n_layers, n_kv_heads, head_dim, context, n_vocab;
        uint32_t n_windowed, window;
    } rows[] = {{"gemma-3-27b-it", "gemma3", 27009346304, 62, 16, 128, 131072, 262208, 52, 1024},
                {"gemma-3-4b-it", "gemma3", 3880263168, 34, 4, 256, 131072, 262208, 29, 1024},
                {"qwen2.5-7b-instruct", "qwen2", 7615616512, 28, 4, 128, 32768, 152064, 0, 0},
                {"llama-3-70b", "llama", 70553706496, 80, 8, 128, 8192, 128256, 0, 0},
                {"mixtral-8x7b", "llama", 46702792704, 32, 8, 128, 32768, 32000, 0, 0},
                {"gpt-oss-20b", "gpt-oss", 20914757184, 24, 8, 64, 131072, 201088, 12, 128}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fkv_model *model = load_config(rows[i].name);
        const fkv_model_info *info = fkv_model_about(model);
        uint32_t n_windowed = 0;
        ck_assert_str_eq(info->architecture, rows[i].architecture);
        ck_assert_uint_eq(info->n_parameters, rows[i].n_parameters);
        ck_assert(info->config_only && info->n_layers == rows[i].n_layers && info->context == rows[i].context &&
                  info->n_vocab == rows[i].n_vocab);
        for (uint32_t l = 0; l < info->n_layers; l++) {
            fkv_model_layer layer;
            ck_ok(fkv_model_layer_about(model, l, &layer));
            ck_assert(layer.n_kv_heads == rows[i].n_kv_heads && layer.head_dim == rows[i].head_dim && layer.kv_layer == l);
            ck_assert(layer.window == 0 || layer.window == rows[i].window);
            if (layer.window != 0) n_windowed++;
        }
        ck_assert_uint_eq(n_windowed, rows[i].n_windowed);
        fkv_model_layer layer;
        ck_status(fkv_model_layer_about(model, info->n_layers, &layer), FKV_BAD_ARGUMENT);
        fkv_model_close(model);
    }
}
END_TEST

START_TEST(config_alone_plans_but_does_not_run) {
    fkv_model *model = load_config("gpt-oss-20b");
    fkv_runner_config config = fkv_runner_config_default();
    fkv_runner_plan plan;
    fkv_runner *runner = NULL;
    size_t n = 0;
    config.k = (fkv_codec_config){4, 64, FKV_CODEC_CALIBRATED}; /* planning needs no calibration file */
    ck_ok(fkv_runner_plan_make(model, &config, &plan));
    ck_assert(plan.packed_bytes > 0 && plan.mapped_bytes > plan.touched_bytes && plan.touched_bytes > 0);
    ck_status(fkv_runner_open(model, &config, &runner), FKV_BAD_STATE);
    ck_status(fkv_tokenize(model, "x", 1, 0, NULL, 0, &n), FKV_UNSUPPORTED);
    ck_status(fkv_chat_tokenize(model, "{}", 2, NULL, NULL, 0, &n), FKV_UNSUPPORTED);
    ck_assert_str_eq(fkv_token_text(model, 0, true, &n), "");
    ck_assert_int_eq(fkv_reply_syntax_of(model).tools, FKV_TOOLS_NONE);
    fkv_model_close(model);
    fkv_model_config run = fkv_model_config_default();
    model = NULL;
    ck_status(fkv_model_load("tests/data/configs/gpt-oss-20b.json", &run, &model), FKV_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "plan_only"));
}
END_TEST

TEST_MAIN("model", needle_model_reports_its_properties, weights_use_the_reported_memory, equal_weights_have_the_same_identity,
          missing_tensor_is_named, misshapen_tensor_is_named, unused_tensor_is_named, unknown_architecture_is_named,
          invalid_calls_are_rejected, unavailable_backend_is_rejected, config_alone_gives_the_shape_of_a_model,
          config_alone_plans_but_does_not_run)
