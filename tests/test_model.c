/* Loading: what a model says of itself, and that a file with a tensor missing, misshapen or too many is refused with its name. */
#include "../src/model/model_backend.h"
#include "cache_world.h"
#include "model_world.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

static const model_spec SMALL = {
    .type = "llama", .n_layers = 2, .dim = 64, .ffn_dim = 96, .n_q_heads = 4, .n_kv_heads = 2, .head_dim = 16, .tied = true};

static fkv_status load(model_world *w, fkv_model **model) {
    fkv_model_config config = fkv_model_config_default();
    return fkv_model_load(model_world_write(w), &config, model);
}

START_TEST(needle_says_what_it_is) {
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
    ck_assert_uint_ge(info->packed_bytes, 2 * info->n_parameters); /* 16-bit weights and the norms */
    ck_assert_uint_le(info->packed_bytes, 2 * info->n_parameters + 64 * 1024);
    fkv_model_close(model);
}
END_TEST

START_TEST(weights_take_the_bytes_they_say) {
    fkv_model_config config = fkv_model_config_default();
    config.n_threads = 1;
    fkv_model *model = NULL;
    ck_ok(fkv_model_load("models/needle", &config, &model)); /* what libraries set up at their first use */
    fkv_model_close(model);
    uint64_t before = cache_anonymous_bytes();
    ck_ok(fkv_model_load("models/needle", &config, &model));
    uint64_t taken = cache_anonymous_bytes() - before;
    uint64_t packed = fkv_model_about(model)->packed_bytes;
    printf("packed %llu, resident %llu\n", (unsigned long long)packed, (unsigned long long)taken);
    if (!CACHE_WORLD_SANITIZED && before != 0) {
        ck_assert_uint_ge(taken + 64 * 1024, packed);
        ck_assert_uint_le(taken, packed + 1024 * 1024);
    }
    fkv_model_close(model);
}
END_TEST

START_TEST(the_same_weights_have_the_same_identity) {
    model_world a;
    model_world b;
    model_world c;
    fkv_model *of_a = NULL;
    fkv_model *of_b = NULL;
    fkv_model *of_c = NULL;
    model_world_make(&a, &SMALL, 1);
    model_world_make(&b, &SMALL, 1);
    model_world_make(&c, &SMALL, 2);
    ck_ok(load(&a, &of_a));
    ck_ok(load(&b, &of_b));
    ck_ok(load(&c, &of_c));
    ck_assert_mem_eq(fkv_model_about(of_a)->weights_id, fkv_model_about(of_b)->weights_id, 32);
    ck_assert_mem_ne(fkv_model_about(of_a)->weights_id, fkv_model_about(of_c)->weights_id, 32);
    fkv_model_close(of_a);
    fkv_model_close(of_b);
    fkv_model_close(of_c);
    model_world_free(&a);
    model_world_free(&b);
    model_world_free(&c);
}
END_TEST

static void check_refused(model_world *w, fkv_status expected, const char *words) {
    fkv_model *model = NULL;
    ck_status(load(w, &model), expected);
    ck_assert_msg(strstr(fkv_message(), words) != NULL, "\"%s\" says nothing of %s", fkv_message(), words);
    ck_assert_ptr_null(model);
    model_world_free(w);
}

START_TEST(a_missing_tensor_is_named) {
    model_world w;
    model_world_make(&w, &SMALL, 1);
    model_world_drop(&w, "model.layers.1.mlp.up_proj.weight");
    check_refused(&w, FKV_FILE_DAMAGED, "blk.1.ffn_up.weight");
    model_world_make(&w, &SMALL, 1);
    model_world_drop(&w, "model.norm.weight");
    check_refused(&w, FKV_FILE_DAMAGED, "output_norm.weight");
    model_spec qwen = SMALL;
    qwen.type = "qwen2";
    model_world_make(&w, &qwen, 1);
    model_world_drop(&w, "model.layers.0.self_attn.k_proj.bias");
    check_refused(&w, FKV_FILE_DAMAGED, "blk.0.attn_k.bias");
}
END_TEST

START_TEST(a_misshapen_tensor_is_named) {
    model_world w;
    model_world_make(&w, &SMALL, 1);
    model_world_tensor(&w, "model.layers.0.self_attn.v_proj.weight")->n_rows -= 1;
    check_refused(&w, FKV_FILE_DAMAGED, "blk.0.attn_v.weight is 31 x 64");
    model_world_make(&w, &SMALL, 1);
    model_world_tensor(&w, "model.layers.1.input_layernorm.weight")->n_cols -= 1;
    check_refused(&w, FKV_FILE_DAMAGED, "blk.1.attn_norm.weight is 1 x 63");
}
END_TEST

/* A llama whose heads were trained with norms would run without them and be wrong. */
START_TEST(a_tensor_that_would_not_be_used_is_named) {
    model_world w;
    model_spec spec = SMALL;
    spec.type = "qwen3";
    model_world_make(&w, &spec, 1);
    w.spec.type = "llama";
    check_refused(&w, FKV_UNSUPPORTED, "blk.");
}
END_TEST

START_TEST(an_unknown_architecture_is_named) {
    model_world w;
    model_world_make(&w, &SMALL, 1);
    w.spec.type = "mamba";
    check_refused(&w, FKV_UNSUPPORTED, "mamba");
}
END_TEST

START_TEST(bad_calls_are_refused) {
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

/* This program is linked without MLX. */
START_TEST(a_backend_that_is_not_there_is_refused) {
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

TEST_MAIN("model", needle_says_what_it_is, weights_take_the_bytes_they_say, the_same_weights_have_the_same_identity,
          a_missing_tensor_is_named, a_misshapen_tensor_is_named, a_tensor_that_would_not_be_used_is_named,
          an_unknown_architecture_is_named, bad_calls_are_refused, a_backend_that_is_not_there_is_refused)
