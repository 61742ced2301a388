/* Models on MLX: plans, opens and closes runners, and defines the function table of the backend. array_forward.c has the
 * forward pass.
 *
 * MLX allocates the intermediate arrays of a step, so they cannot be laid out in advance. Instead, an upper bound on their total
 * size is computed from the number of rows. During a step, the memory limit of MLX enforces the bound: at the limit, MLX waits
 * for running operations. The buffer cache of MLX is limited to half of the bound.
 */
#include "array_runner.h"

#include "../../base/memory.h"

#include <flatkv/mlx.h>

#include <stdio.h>

/* Must be increased by every change to the MLX forward pass or to a flatkv kernel for MLX that changes bits of keys or values. */
enum { ARRAY_NUMERICS_VERSION = 3, CUDA_NUMERICS_VERSION = 5 };

/* ---- plan ---- */

/* Returns the peak memory of the projections, the convolution and the gates of a recurrent layer, in bytes per token. */
static uint64_t recurrent_token_bytes(const fkv_hparams *h) {
    enum { CHANNEL_BYTES = 32, OUTPUT_BYTES = 24 };
    const fkv_recurrence *s = &h->recurrence;
    uint64_t n_outputs = h->features.recurrence == FKV_SHORT_CONV ? 2 * h->dim : (uint64_t)s->n_v_heads * (s->v_dim + 2);
    if (h->features.recurrence == FKV_KDA) n_outputs += (uint64_t)s->n_v_heads * s->k_dim; /* decays per key channel */
    return (uint64_t)CHANNEL_BYTES * fkv_architecture_conv_channels(h) + OUTPUT_BYTES * n_outputs;
}

/* Returns the peak memory of the queries, keys and values of a layer, in bytes per token. */
static uint64_t heads_token_bytes(const fkv_runner *r, const fkv_layer_shape *s) {
    enum { HEADS_BYTES = 12 };
    const fkv_hparams *h = r->model->hparams;
    const fkv_latent *l = &h->latent;
    uint64_t n = (uint64_t)(h->n_q_heads + s->n_kv_heads) * (fkv_runner_head_pad(r, s->head_dim) + fkv_runner_rope_pad(h));
    n += (uint64_t)h->n_q_heads * (l->nope_dim + l->rope_dim + l->v_dim); /* 0 without latent attention */
    if (h->features.gate_in_q) n += (uint64_t)h->n_q_heads * s->head_dim;
    return HEADS_BYTES * n;
}

/* Returns the peak memory of one layer, excluding attention, in bytes per token: x, the inputs of the matrix products, and the
 * larger of the intermediate arrays of the heads and of the feed-forward block. The input and the output of an operation are
 * counted separately. */
static uint64_t array_token_bytes(const fkv_runner *r) {
    enum { X_BYTES = 6, FFN_BYTES = 18, INPUTS_BYTES = 4, INPUTS_MADE_BYTES = 12 };
    const fkv_hparams *h = r->model->hparams;
    const uint64_t n_inputs = (uint64_t)h->n_layers * h->input_dim;
    uint64_t chain = INPUTS_MADE_BYTES * n_inputs;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const fkv_layer_shape *s = &h->shapes[i];
        uint64_t heads = heads_token_bytes(r, s);
        if (fkv_architecture_is_recurrent(h, i)) heads += recurrent_token_bytes(h);
        uint64_t ffn = (uint64_t)FFN_BYTES * s->ffn_dim;
        if (h->n_experts != 0) ffn += (uint64_t)FFN_BYTES * h->n_experts_used * (h->expert_dim + h->dim);
        uint64_t longest = heads > ffn ? heads : ffn;
        if (longest > chain) chain = longest;
    }
    return (uint64_t)X_BYTES * h->dim + INPUTS_BYTES * n_inputs + chain;
}

/* Returns the peak memory of a step, in bytes: one layer, plus the larger of the next layer and attention, plus the logits. The
 * next layer is included because MLX schedules operations in advance. */
static uint64_t active_bytes(const fkv_runner *r, const fkv_config *cache) {
    enum { N_STATES = 8 };
    const fkv_runner_config *c = &r->config;
    const fkv_hparams *h = r->model->hparams;
    uint64_t rows = c->max_step_tokens * array_token_bytes(r);
    uint64_t logits = (uint64_t)c->max_logit_rows * h->n_vocab * (sizeof(uint16_t) + sizeof(float));
    uint64_t attention = 0;
    (void)fkv_mlx_step_bytes(cache, NULL, &attention);
    /* intermediate states of the recurrence; sequences are processed one after the other */
    const uint64_t states = fkv_architecture_has_recurrence(h) ? N_STATES * fkv_architecture_state_bytes(h) : 0;
    return rows + (attention > rows ? attention : rows) + states + logits;
}

/* Returns the size limit of MLX's buffer cache between steps, in bytes. */
static uint64_t cached_bytes(uint64_t active) { return active / 2; }

static uint64_t array_step_bytes(const fkv_runner *r, const fkv_config *cache) {
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
    mlx_array *states = fkv_architecture_has_recurrence(h) ? FKV_CARVE(carve, r->config.max_seqs, mlx_array) : NULL;
    r->arrays = a;
    if (a == NULL) return;
    a->k_centers = k_centers;
    for (uint32_t i = 0; i < r->n_ropes; i++) a->one_turn[i] = one_turn[i];
    a->angles = angles;
    a->numbers = numbers;
    a->states = states;
}

static fkv_status plan_cache(const fkv_config *config, fkv_plan *plan) { return fkv_mlx_plan_make(config, NULL, plan); }

/* Writes the identity of MLX's arithmetic, which depends on the MLX version, the device and the GPU architecture. */
static fkv_status array_numerics(fkv_isa isa, char text[32]) {
    (void)isa;
    mlx_device device;
    bool on_gpu = false;
    bool has_metal = false;
    mlx_string version = mlx_string_new();
    fkv_status status = fkv_array_device(&device, &on_gpu);
    if (status == FKV_OK) status = fkv_mlx_check(mlx_metal_is_available(&has_metal), "querying Metal");
    if (status == FKV_OK) status = fkv_mlx_check(mlx_version(&version), "querying MLX's version");
    if (status == FKV_OK) {
        mlx_device_info info = mlx_device_info_new();
        const char *architecture = "";
        if (on_gpu && mlx_device_info_get(&info, device) == 0)
            if (mlx_device_info_get_string(&architecture, info, "architecture") != 0) architecture = "";
        (void)snprintf(text, 32, "mlx %.9s %s %d%s%.10s", mlx_string_data(version),
                       !on_gpu     ? "cpu"
                       : has_metal ? "metal"
                                   : "cuda",
                       on_gpu && !has_metal ? CUDA_NUMERICS_VERSION : ARRAY_NUMERICS_VERSION, architecture[0] != 0 ? " " : "",
                       architecture);
        (void)mlx_device_info_free(info);
    }
    (void)mlx_string_free(version);
    (void)mlx_device_free(device);
    return status;
}

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

static fkv_status open_array_runner(fkv_runner *r, const fkv_config *cache) {
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
    /* On a GPU, MLX counts its buffer cache towards the memory limit. */
    a->step_bytes = (size_t)(w->on_gpu ? active + cached_bytes(active) : active);
    a->cache_limit_is_set = mlx_set_cache_limit(&a->cache_limit_before, (size_t)cached_bytes(active)) == 0;
    bool is_ready = a->cache_limit_is_set && mlx_clear_cache() == 0 && mlx_reset_peak_memory() == 0;
    return is_ready ? FKV_OK : fkv_mlx_failed("fkv_runner_open");
}

static void close_array_runner(fkv_runner *r) {
    fkv_array_runner *a = r->arrays;
    size_t ours = 0;
    fkv_cache_close(r->cache);
    if (a->cache_limit_is_set) (void)mlx_set_cache_limit(&ours, a->cache_limit_before);
    fkv_mlx_kernel_close(&a->recurrence);
    fkv_mlx_products_close(&a->products);
    (void)mlx_array_free(a->embedding_scale);
    for (uint32_t i = 0; a->k_centers != NULL && i < r->model->hparams->n_layers; i++) (void)mlx_array_free(a->k_centers[i]);
    (void)mlx_stream_free(a->graph.stream);
}

/* ---- the backend ---- */

/* MLX releases the arrays of a step on another thread; synchronizing the stream waits for that thread. */
static void wait_for_releases(void) {
    mlx_device device = mlx_device_new();
    mlx_stream stream = mlx_stream_new();
    if (mlx_get_default_device(&device) == 0 && mlx_get_default_stream(&stream, device) == 0) (void)mlx_synchronize(stream);
    (void)mlx_stream_free(stream);
    (void)mlx_device_free(device);
}

static fkv_status mlx_memory_now(fkv_backend_memory *now) {
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
                                              .numerics = array_numerics,
                                              .plan_cache = plan_cache,
                                              .layout = layout,
                                              .step_bytes = array_step_bytes,
                                              .open = open_array_runner,
                                              .close = close_array_runner,
                                              .forward = fkv_array_forward,
                                              .memory = mlx_memory_now};

fkv_status fkv_mlx_register(void) { return fkv_model_backend_register(FKV_BACKEND_MLX, &MLX_BACKEND, FKV_VERSION_TEXT); }
