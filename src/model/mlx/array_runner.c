/* Models on MLX: plan, open and close of a runner, and the backend's table. See array_runner.h; the forward pass is
 * array_forward.c.
 *
 * What a step makes comes and goes inside MLX, so it cannot be laid out; it is bounded instead. The bound is a closed formula of
 * one step's rows, MLX is held to it during a step by its memory limit (MLX waits for what it has begun before it begins more),
 * and half as much again is what MLX may keep in its buffer cache from one step to the next.
 */
#include "array_runner.h"

#include "../../base/memory.h"

#include <flatkv/mlx.h>

/* ---- plan ---- */

/* What a token has alive at once in a layer, outside of attention: x, what products read of it, and the longest chain of
 * operations on heads or on the feed-forward's rows, each operation with its input and its output. */
static uint64_t token_bytes(const fkv_runner *r) {
    enum { X_BYTES = 6, HEADS_BYTES = 12, FFN_BYTES = 18, INPUTS_BYTES = 4, INPUTS_MADE_BYTES = 12 };
    const fkv_hparams *h = r->model->hparams;
    const uint64_t n_inputs = (uint64_t)h->n_layers * h->input_dim;
    uint64_t chain = INPUTS_MADE_BYTES * n_inputs;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const fkv_layer_shape *s = &h->shapes[i];
        uint64_t heads = (uint64_t)HEADS_BYTES * (h->n_q_heads + s->n_kv_heads) * fkv_runner_head_pad(r, s->head_dim);
        uint64_t ffn = (uint64_t)FFN_BYTES * s->ffn_dim;
        if (h->n_experts != 0) ffn += (uint64_t)FFN_BYTES * h->n_experts_used * (h->expert_dim + h->dim);
        uint64_t longest = heads > ffn ? heads : ffn;
        if (longest > chain) chain = longest;
    }
    return (uint64_t)X_BYTES * h->dim + INPUTS_BYTES * n_inputs + chain;
}

/* In use at once: twice that, so that MLX has the next operations ready while some compute, or the same and what attention
 * needs; and the logits. */
static uint64_t active_bytes(const fkv_runner *r, const fkv_config *cache) {
    const fkv_runner_config *c = &r->config;
    uint64_t rows = c->max_step_tokens * token_bytes(r);
    uint64_t logits = (uint64_t)c->max_logit_rows * r->model->hparams->n_vocab * (sizeof(uint16_t) + sizeof(float));
    uint64_t attention = 0;
    (void)fkv_mlx_step_bytes(cache, NULL, &attention);
    return rows + (attention > rows ? attention : rows) + logits;
}

/* What MLX may keep of it from one step to the next. */
static uint64_t cached_bytes(uint64_t active) { return active / 2; }

static uint64_t step_bytes(const fkv_runner *r, const fkv_config *cache) {
    uint64_t active = active_bytes(r, cache);
    return active + cached_bytes(active);
}

static void layout(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    uint32_t t = r->config.max_step_tokens;
    fkv_array_runner *a = FKV_CARVE(carve, 1, fkv_array_runner);
    bool has_centers = fkv_architecture_centers_keys(h);
    mlx_array *k_centers = has_centers ? FKV_CARVE(carve, h->n_layers, mlx_array) : NULL;
    fkv_turn *one_turn[FKV_N_ROPES] = {NULL};
    for (uint32_t i = 0; i < r->n_ropes; i++) one_turn[i] = FKV_CARVE(carve, r->n_pairs[i], fkv_turn);
    const uint32_t most_pairs = fkv_max_u32(r->n_pairs[FKV_ROPE_GLOBAL], r->n_pairs[FKV_ROPE_LOCAL]);
    float *angles = FKV_CARVE(carve, (uint64_t)t * most_pairs * 2, float);
    int32_t *numbers = FKV_CARVE(carve, t, int32_t);
    r->arrays = a;
    if (a == NULL) return;
    a->k_centers = k_centers;
    for (uint32_t i = 0; i < r->n_ropes; i++) a->one_turn[i] = one_turn[i];
    a->angles = angles;
    a->numbers = numbers;
}

static fkv_status plan_cache(const fkv_config *config, fkv_plan *plan) { return fkv_mlx_plan_make(config, NULL, plan); }

/* ---- open and close ---- */

static fkv_status make_constants(fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    fkv_array_runner *a = r->arrays;
    bool made = true;
    if (r->model->embedding_scale != 1.0f) {
        a->embedding_scale = mlx_array_new_float(r->model->embedding_scale);
        made = a->embedding_scale.ctx != NULL;
    }
    for (uint32_t i = 0; made && a->k_centers != NULL && i < h->n_layers; i++) {
        const int shape[] = {(int)h->shapes[i].n_kv_heads, (int)h->shapes[i].head_dim};
        a->k_centers[i] = mlx_array_new_data(fkv_runner_k_center(r, i), shape, 2, MLX_FLOAT32);
        made = a->k_centers[i].ctx != NULL;
    }
    return made ? FKV_OK : fkv_mlx_failed("fkv_runner_open");
}

static fkv_status open_runner(fkv_runner *r, const fkv_config *cache) {
    fkv_array_runner *a = r->arrays;
    const fkv_array_weights *w = r->model->arrays;
    uint64_t active = active_bytes(r, cache);
    fkv_mlx_config config = fkv_mlx_config_default();
    for (uint32_t i = 0; i < r->n_ropes; i++) fkv_array_angles(r, i, 1.0, a->one_turn[i]);
    a->graph.stream = mlx_stream_new();
    FKV_TRY(fkv_mlx_check(mlx_get_default_stream(&a->graph.stream, w->device), "fkv_runner_open"));
    config.stream = a->graph.stream;
    FKV_TRY(fkv_mlx_cache_open(cache, &config, &r->cache));
    FKV_TRY(make_constants(r));
    /* A GPU's allocator counts its buffer cache against the limit too. */
    a->step_bytes = (size_t)(w->on_gpu ? active + cached_bytes(active) : active);
    a->cache_limit_is_set = mlx_set_cache_limit(&a->cache_limit_before, (size_t)cached_bytes(active)) == 0;
    bool is_ready = a->cache_limit_is_set && mlx_clear_cache() == 0 && mlx_reset_peak_memory() == 0;
    return is_ready ? FKV_OK : fkv_mlx_failed("fkv_runner_open");
}

static void close_runner(fkv_runner *r) {
    fkv_array_runner *a = r->arrays;
    size_t ours = 0;
    fkv_cache_close(r->cache);
    if (a->cache_limit_is_set) (void)mlx_set_cache_limit(&ours, a->cache_limit_before);
    (void)mlx_array_free(a->embedding_scale);
    for (uint32_t i = 0; a->k_centers != NULL && i < r->model->hparams->n_layers; i++) (void)mlx_array_free(a->k_centers[i]);
    (void)mlx_stream_free(a->graph.stream);
}

/* ---- the backend ---- */

/* MLX lets go of what a step used on a thread of its own: waiting for the stream is waiting for that too. */
static void wait_for_releases(void) {
    mlx_device device = mlx_device_new();
    mlx_stream stream = mlx_stream_new();
    if (mlx_get_default_device(&device) == 0 && mlx_get_default_stream(&stream, device) == 0) (void)mlx_synchronize(stream);
    (void)mlx_stream_free(stream);
    (void)mlx_device_free(device);
}

static fkv_status memory(fkv_backend_memory *now) {
    size_t active = 0;
    size_t cached = 0;
    size_t peak = 0;
    fkv_mlx_catch_errors();
    wait_for_releases();
    bool said = mlx_get_active_memory(&active) == 0 && mlx_get_cache_memory(&cached) == 0 && mlx_get_peak_memory(&peak) == 0;
    *now = (fkv_backend_memory){active, cached, peak};
    return said ? FKV_OK : fkv_mlx_failed("fkv_backend_memory_now");
}

static const fkv_model_backend MLX_BACKEND = {.count_weights = fkv_array_weights_count,
                                              .load_weights = fkv_array_weights_load,
                                              .unload_weights = fkv_array_weights_unload,
                                              .available = fkv_array_available,
                                              .plan_cache = plan_cache,
                                              .layout = layout,
                                              .step_bytes = step_bytes,
                                              .open = open_runner,
                                              .close = close_runner,
                                              .forward = fkv_array_forward,
                                              .memory = memory};

fkv_status fkv_mlx_register(void) { return fkv_model_backend_register(FKV_BACKEND_MLX, &MLX_BACKEND, FKV_VERSION_TEXT); }
