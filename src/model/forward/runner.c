/* Plans, opens and closes runners, and prepares steps for the backend's forward pass; see runner.h.
 *
 * The function that lays out the activations also counts their bytes (carve.h), so the plan always equals the allocation.
 */
#include "runner.h"

#include "../calibration.h"

#include "../../base/cpu.h"
#include "../../base/memory.h"
#include "../../base/prefill_chunk.h"
#include "../files/tensor_rows.h"
#include "../rope_scaling.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

fkv_runner_config fkv_runner_config_default(void) {
    return (fkv_runner_config){.max_seqs = 1,
                               .max_step_tokens = 512,
                               .max_logit_rows = 1,
                               .k = {4, 64, FKV_CODEC_SEALED},
                               .v = {4, 64, FKV_CODEC_SEALED_V},
                               .rotate = FKV_ROTATE_KV,
                               .page_tokens = 64,
                               .max_snapshots = FKV_SNAPSHOTS_AUTO};
}

/* Returns the default number of snapshots: as many as fit in AUTO_BYTES, clamped to a minimum and a maximum. */
static uint32_t auto_snapshots(const fkv_model *model) {
    enum { LEAST = 8, MOST = 64, AUTO_BYTES = 512 << 20 };
    if (model->info.state_bytes == 0) return 0;
    const uint64_t n = AUTO_BYTES / model->info.state_bytes;
    return n < LEAST ? LEAST : n > MOST ? MOST : (uint32_t)n;
}

/* ---- cache configuration ---- */

/* Returns the properties of a codec that configure_runner() has validated. */
static fkv_codec_info codec_info(fkv_codec_config side) {
    fkv_codec_info info;
    fkv_status status = fkv_codec_about(side, &info);
    FKV_ASSERT(status == FKV_OK);
    (void)status;
    return info;
}

/* Returns the padded head dimension used in pages. Each codec requires a multiple of some power of two, so a multiple of the
 * larger power satisfies both codecs. In latent layers, sealed codecs also have groups. */
static uint32_t padded_head(const fkv_hparams *h, uint32_t head_dim, const fkv_runner_config *c) {
    enum { SMALLEST_GROUP = 32 };
    const bool has_groups = fkv_architecture_is_latent(h) && c->k.kind == FKV_CODEC_SEALED;
    const uint32_t multiple = fkv_max_u32(codec_info(c->k).dim_multiple, codec_info(c->v).dim_multiple);
    return (uint32_t)fkv_align_up(head_dim, has_groups ? fkv_max_u32(multiple, SMALLEST_GROUP) : multiple);
}

static void bound_context(const fkv_runner_config *c, fkv_layer_config *layer) {
    if (c->max_kv == 0 || (layer->window != 0 && layer->window <= c->max_kv)) return;
    layer->window = c->max_kv;
    layer->n_sinks = c->n_sinks;
}

/* Returns the requested rotation, adjusted to the capabilities of the codecs. Rotation spreads outliers over a group before
 * quantization. 16-bit codecs never rotate, and codecs with needs_rotation always rotate. Invalid values are returned unchanged,
 * because the cache rejects them. */
static fkv_rotate effective_rotation(const fkv_runner_config *c) {
    if ((unsigned)c->rotate > FKV_ROTATE_KV) return c->rotate;
    unsigned rotates = (codec_info(c->k).rotates ? FKV_ROTATE_K : 0u) | (codec_info(c->v).rotates ? FKV_ROTATE_V : 0u);
    unsigned needed =
        (codec_info(c->k).needs_rotation ? FKV_ROTATE_K : 0u) | (codec_info(c->v).needs_rotation ? FKV_ROTATE_V : 0u);
    return (fkv_rotate)(((unsigned)c->rotate & rotates) | needed);
}

fkv_status fkv_calibration_path(const fkv_model *model, char *path, size_t capacity) {
    FKV_REQUIRE(model != NULL && path != NULL && capacity > 0, FKV_BAD_ARGUMENT,
                "fkv_calibration_path: model or path is NULL, or capacity is 0");
    return fkv_calibration_default_path(model->path, path, capacity);
}

/* Checks that the calibration belongs to this model, and points channel_bits of every layer to the bit widths of that layer. */
static fkv_status apply_calibration(const fkv_model *model, fkv_calibration *calibration, uint32_t average, uint32_t n_layers,
                                    fkv_layer_config *layers, const char *path) {
    FKV_REQUIRE(
        memcmp(calibration->weights_id, model->info.weights_id, sizeof model->info.weights_id) == 0, FKV_FILE_FOREIGN,
        "%s: calibration mismatch: weights_id belongs to another model; create a calibration file for this model with 'flatkv calibrate'",
        path);
    FKV_REQUIRE(calibration->n_layers == n_layers, FKV_FILE_FOREIGN,
                "%s: calibration mismatch: n_layers is %u but the model has %u", path, calibration->n_layers, n_layers);
    fkv_calibration_choose(calibration, average);
    const uint8_t *bits = calibration->both;
    for (uint32_t i = 0; i < n_layers; i++) {
        fkv_calibration_layer l = calibration->layers[i];
        FKV_REQUIRE(
            l.n_kv_heads == layers[i].n_kv_heads && l.head_dim == layers[i].head_dim, FKV_FILE_FOREIGN,
            "%s: calibration mismatch: layer %u has %u KV heads of dimension %u, but with this V codec the model has %u KV heads "
            "of dimension %u",
            path, i, l.n_kv_heads, l.head_dim, layers[i].n_kv_heads, layers[i].head_dim);
        layers[i].channel_bits = bits;
        bits += (size_t)l.n_kv_heads * l.head_dim;
    }
    return FKV_OK;
}

/* Creates a placeholder calibration that is used only for planning. The size of pages depends only on the average number of bits,
 * not on the bits of individual channels. For an average of 4, all channels have 4 bits. For an average of 3, groups of four
 * 2-bit channels alternate with groups of four 4-bit channels. */
static fkv_status assume_calibration(const fkv_model *model, uint32_t average, uint32_t n_layers, fkv_layer_config *layers,
                                     fkv_calibration *calibration) {
    enum { QUAD = 4, BITS_OF_EVEN_QUADS = 2 << 4 | 4, BITS_OF_ODD_QUADS = 4 << 4 | 4 };
    fkv_calibration_layer shapes[FKV_MAX_LAYERS];
    for (uint32_t i = 0; i < n_layers; i++) shapes[i] = (fkv_calibration_layer){layers[i].n_kv_heads, layers[i].head_dim};
    FKV_TRY(fkv_calibration_new(shapes, n_layers, model->info.weights_id, calibration));
    for (uint64_t i = 0; i < calibration->n_channels; i++)
        calibration->both[i] = i / QUAD % 2 == 0 ? BITS_OF_EVEN_QUADS : BITS_OF_ODD_QUADS;
    return apply_calibration(model, calibration, average, n_layers, layers, model->path);
}

/* Reads the calibration file of FKV_CODEC_CALIBRATED keys from the configured or the default path. The caller closes the
 * calibration. */
static fkv_status calibrate_layers(const fkv_model *model, const fkv_runner_config *c, uint32_t n_layers,
                                   fkv_layer_config *layers, fkv_calibration *calibration) {
    char default_path[FKV_PATH_BYTES];
    const char *path = c->calibration;
    if (c->k.kind != FKV_CODEC_CALIBRATED) return FKV_OK;
    if (path == NULL && model->info.config_only) return assume_calibration(model, c->k.bits, n_layers, layers, calibration);
    if (path == NULL) {
        FKV_TRY(fkv_calibration_path(model, default_path, sizeof default_path));
        path = default_path;
        FKV_REQUIRE(
            access(path, F_OK) == 0, FKV_IO,
            "calibration file %s does not exist: calibrated keys require one; create it with 'flatkv calibrate', or pass its path",
            path);
    }
    FKV_TRY(fkv_calibration_open(path, calibration));
    return apply_calibration(model, calibration, c->k.bits, n_layers, layers, path);
}

/* Validates a runner configuration, fills in its defaults and derives the cache configuration. layers: [FKV_MAX_LAYERS],
 * referenced by *cache. calibration: zeroed, referenced by layers; the caller closes the calibration, even after a failure. */
static fkv_status configure_runner(const fkv_model *model, fkv_runner_config *c, fkv_layer_config *layers,
                                   fkv_calibration *calibration, fkv_config *cache) {
    const fkv_hparams *h = model->hparams;
    fkv_codec_info side;
    FKV_REQUIRE(fkv_weights_n_tensors(model->weights) > 0 || model->info.config_only, FKV_UNSUPPORTED,
                "%s contains a vocabulary but no weights: to run the model, load the file that contains the weights",
                model->path);
    FKV_TRY(fkv_codec_about(c->k, &side));
    FKV_TRY(fkv_codec_about(c->v, &side));
    FKV_REQUIRE(c->max_logit_rows > 0 && c->max_logit_rows <= c->max_step_tokens, FKV_BAD_CONFIG,
                "invalid max_logit_rows %u: expected 1 to max_step_tokens (%u)", c->max_logit_rows, c->max_step_tokens);
    FKV_REQUIRE(c->max_kv != 0 || c->n_sinks == 0, FKV_BAD_CONFIG,
                "n_sinks is %u but max_kv is 0: set max_kv, or set n_sinks to 0", c->n_sinks);
    if (c->max_tokens == 0) c->max_tokens = model->info.context;
    if (c->max_snapshots == FKV_SNAPSHOTS_AUTO) c->max_snapshots = auto_snapshots(model);
    FKV_REQUIRE(
        h->attention_chunk == 0 || c->max_tokens <= h->attention_chunk, FKV_UNSUPPORTED,
        "a context of %u tokens is not supported: this model attends within chunks of %u tokens, and only the first chunk is "
        "supported; set max_tokens to at most %u",
        c->max_tokens, h->attention_chunk, h->attention_chunk);
    if (c->isa == FKV_ISA_AUTO) c->isa = model->config.isa;
    if (c->isa == FKV_ISA_AUTO) c->isa = fkv_cpu_best_isa();
    FKV_REQUIRE(fkv_cpu_runs(c->isa), FKV_UNSUPPORTED, "this machine does not support %s kernels: use FKV_ISA_AUTO",
                fkv_isa_name(c->isa));
    FKV_REQUIRE(c->k.kind != FKV_CODEC_CALIBRATED || !fkv_architecture_has_recurrence(h), FKV_UNSUPPORTED,
                "calibrated keys are not supported for models with recurrent layers; use another codec");
    FKV_REQUIRE(c->k.kind != FKV_CODEC_CALIBRATED || !fkv_architecture_is_latent(h), FKV_UNSUPPORTED,
                "calibrated codecs are not supported for models with latent attention; use \"sealed\" or \"8/8\"");
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const fkv_layer_shape *s = &h->shapes[i];
        if (fkv_architecture_is_recurrent(h, i))
            layers[s->state_layer] = (fkv_layer_config){.state_bytes = (uint32_t)fkv_architecture_state_bytes(h)};
        if (!fkv_architecture_has_attention(h, i) || s->kv_layer != i) continue;
        fkv_layer_config *layer = &layers[s->page_layer];
        *layer = (fkv_layer_config){.n_q_heads = h->n_q_heads,
                                    .n_kv_heads = s->n_kv_heads,
                                    .head_dim = padded_head(h, s->head_dim, c),
                                    .rope_dim = fkv_runner_rope_pad(h),
                                    .window = fkv_architecture_window(h, i),
                                    .scale = model->query_scale,
                                    .softcap = h->softcap,
                                    .sink_logits = model->tensors[i].sinks != NULL && model->sinks != NULL
                                                       ? model->sinks + (size_t)i * h->n_q_heads
                                                       : NULL,
                                    .k = c->k,
                                    .v = c->v};
        bound_context(c, layer);
    }
    FKV_TRY(calibrate_layers(model, c, fkv_architecture_n_cache_layers(h), layers, calibration));
    *cache = fkv_config_default();
    cache->n_layers = fkv_architecture_n_cache_layers(h);
    cache->layers = layers;
    cache->rotate = effective_rotation(c);
    cache->rotation_seed = c->rotation_seed;
    cache->page_tokens = c->page_tokens;
    cache->max_tokens = c->max_tokens;
    cache->max_seqs = c->max_seqs;
    cache->max_step_tokens = c->max_step_tokens;
    cache->max_snapshots = c->max_snapshots;
    cache->n_threads = c->n_threads;
    cache->isa = c->isa;
    cache->lazy = c->lazy;
    cache->log = c->log;
    cache->log_user = c->log_user;
    memcpy(cache->weights_id, model->info.weights_id, sizeof cache->weights_id);
    FKV_TRY(model->backend->numerics(c->isa, cache->numerics));
    return fkv_architecture_rope_id(h, fkv_rope_is_long(h, c->max_tokens), cache->rope_id);
}

/* ---- plan ---- */

/* Reserves all buffers of a runner except those of the cache. If `carve` has no memory, only counts their bytes. */
static void layout_runner(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    uint32_t t = r->config.max_step_tokens;
    r->rows = FKV_CARVE(carve, r->config.max_seqs, fkv_row);
    r->saved_from = FKV_CARVE(carve, r->config.max_seqs, uint32_t);
    r->shortened = FKV_CARVE(carve, r->config.max_seqs, uint32_t);
    r->tokens = FKV_CARVE(carve, t, uint32_t);
    r->positions = FKV_CARVE(carve, t, uint32_t);
    r->logit_rows = FKV_CARVE(carve, t, uint32_t);
    for (uint32_t i = 0; i < r->n_ropes; i++) r->frequencies[i] = FKV_CARVE(carve, r->n_pairs[i], double);
    if (fkv_architecture_centers_keys(h)) r->k_centers = FKV_CARVE(carve, (uint64_t)h->n_layers * r->kv_dim, float);
    r->logits = FKV_CARVE(carve, (uint64_t)r->config.max_logit_rows * fkv_runner_row_values(r), float);
    r->model->backend->layout(carve, r);
}

/* Initializes the fields that layout_runner() reads. Allocates nothing. */
static void init_runner(const fkv_model *model, const fkv_runner_config *c, fkv_runner *r) {
    const fkv_hparams *h = model->hparams;
    *r = (fkv_runner){.model = model, .config = *c};
    for (uint32_t i = 0; i < h->n_layers; i++)
        r->kv_dim = fkv_max_u32(r->kv_dim, h->shapes[i].n_kv_heads * h->shapes[i].head_dim);
    r->n_ropes = model->info.window != 0 && h->local_rope.base != 0.0f ? FKV_N_ROPES : 1;
    r->is_long = fkv_rope_is_long(h, c->max_tokens);
    r->n_pairs[FKV_ROPE_GLOBAL] = h->rope.dim / 2;
    r->n_pairs[FKV_ROPE_LOCAL] = h->local_rope.dim / 2;
}

/* Computes the plan. *map_bytes receives the size of the mapping that holds the runner and its host-memory activations. */
static fkv_status make_runner_plan(const fkv_model *model, const fkv_runner_config *c, const fkv_config *cache,
                                   fkv_runner_plan *plan, uint64_t *map_bytes) {
    fkv_runner_plan made = {
        .packed_bytes = model->info.packed_bytes, .mapped_bytes = model->mapped_bytes, .touched_bytes = model->touched_bytes};
    FKV_TRY(model->backend->plan_cache(cache, &made.cache));
    fkv_runner counting;
    fkv_carve carve = {0};
    (void)fkv_carve_take(&carve, 1, sizeof counting);
    init_runner(model, c, &counting);
    layout_runner(&carve, &counting);
    *map_bytes = fkv_align_up(carve.used, fkv_os_page_bytes());
    FKV_REQUIRE(!carve.overflow && *map_bytes >= carve.used &&
                    !fkv_add_overflows(*map_bytes, model->backend->step_bytes(&counting, cache), &made.activations_bytes) &&
                    !fkv_add_overflows(made.cache.total_bytes, made.activations_bytes, &made.total_bytes),
                FKV_BAD_CONFIG, "the plan overflows 64 bits: lower max_step_tokens or max_logit_rows");
    *plan = made;
    return FKV_OK;
}

/* A validated configuration together with its memory plan. */
typedef struct runner_setup {
    fkv_runner_config config; /* the caller's configuration with defaults filled in */
    fkv_layer_config layers[FKV_MAX_LAYERS];
    fkv_config cache;
    fkv_calibration calibration;
    fkv_runner_plan plan;
    uint64_t map_bytes;
} runner_setup;

/* Validates a configuration and computes its memory plan. The caller must call close_setup(), even after a failure. */
static fkv_status open_setup(const fkv_model *model, const fkv_runner_config *config, runner_setup *setup) {
    *setup = (runner_setup){.config = *config};
    FKV_TRY(configure_runner(model, &setup->config, setup->layers, &setup->calibration, &setup->cache));
    setup->config.calibration = NULL; /* owned by the caller */
    return make_runner_plan(model, &setup->config, &setup->cache, &setup->plan, &setup->map_bytes);
}

static void close_setup(runner_setup *setup) { fkv_calibration_close(&setup->calibration); }

fkv_status fkv_runner_plan_make(const fkv_model *model, const fkv_runner_config *config, fkv_runner_plan *plan) {
    FKV_REQUIRE(model != NULL && config != NULL && plan != NULL, FKV_BAD_ARGUMENT,
                "fkv_runner_plan_make: model, config or plan is NULL");
    runner_setup setup;
    fkv_status status = open_setup(model, config, &setup);
    if (status == FKV_OK) *plan = setup.plan;
    close_setup(&setup);
    return status;
}

/* ---- open and close ---- */

/* Returns the total bytes of the plan for a context of `tokens` tokens. For this plan, max_step_tokens and max_logit_rows are
 * limited to `tokens`. Returns UINT64_MAX if the configuration is invalid. */
static uint64_t bytes_of_context(const fkv_model *model, const fkv_runner_config *config, const fkv_config *cache_config,
                                 uint32_t tokens) {
    fkv_runner_config c = *config;
    fkv_config cache = *cache_config;
    fkv_runner_plan plan = {0};
    uint64_t map_bytes = 0;
    c.max_tokens = tokens;
    c.max_step_tokens = fkv_min_u32(c.max_step_tokens, tokens);
    c.max_logit_rows = fkv_min_u32(c.max_logit_rows, c.max_step_tokens);
    cache.max_tokens = c.max_tokens;
    cache.max_step_tokens = c.max_step_tokens;
    return make_runner_plan(model, &c, &cache, &plan, &map_bytes) == FKV_OK ? plan.total_bytes : UINT64_MAX;
}

/* Returns the largest context, a multiple of page_tokens below max_tokens, whose plan fits within the limit. Returns 0 if not
 * even one page fits. Uses a binary search over the number of pages, because plans grow with the context. */
static uint32_t largest_context(const fkv_model *model, const fkv_runner_config *c, const fkv_config *cache, uint64_t limit) {
    uint32_t fits = 0;
    uint32_t exceeds = c->max_tokens / c->page_tokens + 1;
    while (exceeds - fits > 1) {
        uint32_t pages = fits + (exceeds - fits) / 2;
        if (bytes_of_context(model, c, cache, pages * c->page_tokens) <= limit)
            fits = pages;
        else
            exceeds = pages;
    }
    return fits * c->page_tokens;
}

static fkv_status check_runner_fits(const fkv_model *model, const fkv_runner_config *c, const fkv_config *cache,
                                    const fkv_runner_plan *plan) {
    const char *source = NULL;
    uint64_t limit = model->backend->available(&source);
    if (c->memory_limit != 0 && c->memory_limit < limit) {
        limit = c->memory_limit;
        source = "memory_limit";
    }
    if (plan->total_bytes <= limit) return FKV_OK;
    uint32_t tokens = largest_context(model, c, cache, limit);
    char advice[224];
    if (tokens >= c->max_step_tokens)
        (void)snprintf(advice, sizeof advice,
                       "lower max_tokens from %u to %u, use fewer bits per value, or lower max_step_tokens from %u",
                       c->max_tokens, tokens, c->max_step_tokens);
    else if (tokens > 0)
        (void)snprintf(advice, sizeof advice,
                       "lower max_tokens from %u to %u and max_step_tokens to %u, or use fewer bits per value", c->max_tokens,
                       tokens, tokens);
    else
        (void)snprintf(advice, sizeof advice, "a context of %u tokens needs %llu bytes: allow more memory, or lower %s",
                       c->page_tokens, (unsigned long long)bytes_of_context(model, c, cache, c->page_tokens),
                       c->max_seqs > 1 ? "n_threads or max_seqs" : "n_threads");
    return fkv_fail(FKV_NO_MEMORY, "the plan needs %llu bytes (cache %llu, activations %llu) but %s allows %llu: %s",
                    (unsigned long long)plan->total_bytes, (unsigned long long)plan->cache.total_bytes,
                    (unsigned long long)plan->activations_bytes, source, (unsigned long long)limit, advice);
}

static void fill_frequencies(fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    const fkv_rope *ropes[FKV_N_ROPES] = {&h->rope, &h->local_rope};
    FKV_ASSERT(r->n_ropes <= FKV_N_ROPES);
    for (uint32_t i = 0; i < r->n_ropes; i++)
        r->rope_factors[i] = (float)fkv_rope_frequencies(ropes[i], h, r->is_long, r->frequencies[i]);
}

uint32_t fkv_runner_row_values(const fkv_runner *runner) {
    return runner->config.embeddings ? runner->model->hparams->dim : runner->model->hparams->n_vocab;
}

uint32_t fkv_runner_head_pad(const fkv_runner *runner, uint32_t head_dim) {
    return padded_head(runner->model->hparams, head_dim, &runner->config);
}

uint32_t fkv_runner_rope_pad(const fkv_hparams *h) {
    enum { ROPE_MULTIPLE = 16 };
    return fkv_architecture_is_latent(h) ? (uint32_t)fkv_align_up(h->latent.rope_dim, ROPE_MULTIPLE) : 0;
}

uint32_t fkv_runner_rope(const fkv_runner *runner, uint32_t layer) {
    const fkv_hparams *h = runner->model->hparams;
    if ((h->layers[layer] & FKV_LAYER_NO_ROPE) != 0) return FKV_ROPE_NONE;
    return runner->n_ropes > 1 && fkv_architecture_window(h, layer) != 0 ? FKV_ROPE_LOCAL : FKV_ROPE_GLOBAL;
}

float fkv_runner_temperature(const fkv_runner *runner, uint32_t position) {
    const fkv_hparams *h = runner->model->hparams;
    if (h->temperature == 0.0f) return 1.0f;
    /* number of complete blocks of temperature_context tokens that precede the position */
    const uint32_t n_contexts = (position + h->temperature_of_no_rope) / h->temperature_context;
    return 1.0f + h->temperature * logf(1.0f + (float)n_contexts);
}

bool fkv_runner_has_temperature(const fkv_runner *runner, uint32_t layer) {
    const fkv_hparams *h = runner->model->hparams;
    return h->temperature != 0.0f && (!h->temperature_of_no_rope || (h->layers[layer] & FKV_LAYER_NO_ROPE) != 0);
}

const float *fkv_runner_k_center(const fkv_runner *runner, uint32_t layer) {
    return runner->k_centers != NULL ? runner->k_centers + (size_t)layer * runner->kv_dim : NULL;
}

/* Computes the key centers: the K bias after RoPE, averaged over all positions p of the context. For a pair with frequency w, the
 * mean of exp(i w p) over p is sin(a) / a * exp(i a), where a = w * context / 2. This mean is about 1 for pairs that rotate
 * slowly, and about 0 for pairs that rotate fast.
 */
static void fill_centers(fkv_runner *r) {
    const fkv_model *m = r->model;
    const fkv_hparams *h = m->hparams;
    float cosines[FKV_MAX_HEAD_DIM / 2];
    float sines[FKV_MAX_HEAD_DIM / 2];
    for (uint32_t i = 0; i < h->n_layers; i++) {
        uint32_t rope = fkv_runner_rope(r, i);
        const fkv_layer_shape *s = &h->shapes[i];
        if (s->kv_layer != i) continue; /* the layer stores no keys */
        float *center = r->k_centers + (size_t)i * r->kv_dim;
        fkv_tensor_row_floats(m->tensors[i].k_bias, 0, center);
        if (rope == FKV_ROPE_NONE) continue;
        const double *frequencies = r->frequencies[rope];
        for (uint32_t pair = 0; pair < r->n_pairs[rope]; pair++) {
            double a = frequencies[pair] * h->context / 2.0;
            double size = (a > 0.0 ? sin(a) / a : 1.0) * (double)r->rope_factors[rope];
            cosines[pair] = (float)(size * cos(a));
            sines[pair] = (float)(size * sin(a));
        }
        for (uint32_t head = 0; head < s->n_kv_heads; head++)
            fkv_runner_rotate(r, center + (size_t)head * s->head_dim, cosines, sines, r->n_pairs[rope]);
    }
}

static fkv_status open_planned_runner(const fkv_model *model, const runner_setup *setup, fkv_runner **runner) {
    const fkv_runner_config *c = &setup->config;
    void *map = NULL;
    FKV_TRY(check_runner_fits(model, c, &setup->cache, &setup->plan));
    FKV_TRY(fkv_map_open(setup->map_bytes, true, &map));
    fkv_carve carve = {.base = map, .size = setup->map_bytes};
    fkv_runner *r = FKV_CARVE(&carve, 1, fkv_runner);
    init_runner(model, c, r);
    layout_runner(&carve, r);
    r->bytes = setup->map_bytes;
    r->ops = fkv_vector_ops_for(c->isa);
    fill_frequencies(r);
    if (r->k_centers != NULL) fill_centers(r);
    fkv_status status = model->backend->open(r, &setup->cache);
    if (status != FKV_OK) {
        fkv_runner_close(r);
        return status;
    }
    *runner = r;
    return FKV_OK;
}

fkv_status fkv_runner_open(const fkv_model *model, const fkv_runner_config *config, fkv_runner **runner) {
    FKV_REQUIRE(model != NULL && config != NULL && runner != NULL, FKV_BAD_ARGUMENT,
                "fkv_runner_open: model, config or runner is NULL");
    FKV_REQUIRE(!model->config.plan_only, FKV_BAD_STATE,
                "the model was loaded with plan_only: load it again without plan_only to open a runner");
    runner_setup setup;
    fkv_status status = open_setup(model, config, &setup);
    if (status == FKV_OK) status = open_planned_runner(model, &setup, runner);
    close_setup(&setup);
    return status;
}

void fkv_runner_close(fkv_runner *runner) {
    if (runner == NULL) return;
    if (runner->step != NULL) (void)fkv_step_abort(runner->step);
    runner->model->backend->close(runner);
    fkv_map_close(runner, runner->bytes);
}

uint32_t fkv_runner_chunk(const fkv_runner *runner, uint32_t length, uint32_t n_left) {
    if (runner == NULL) return 0;
    return fkv_prefill_chunk(runner->config.page_tokens, length, n_left, runner->config.max_step_tokens);
}

fkv_cache *fkv_runner_cache(fkv_runner *runner) { return runner != NULL ? runner->cache : NULL; }

/* ---- step ---- */

/* Validates one sequence of a step and appends its tokens to the tables of the step. */
static fkv_status append_row(fkv_runner *r, const fkv_tokens *row) {
    uint32_t position = 0;
    FKV_REQUIRE(row->tokens != NULL && row->n_tokens > 0, FKV_BAD_ARGUMENT,
                "the entry of sequence %llu has no tokens: omit this entry", (unsigned long long)row->seq);
    FKV_REQUIRE((unsigned)row->logits <= FKV_LOGITS_ALL, FKV_BAD_ARGUMENT,
                "invalid logits %d: expected FKV_LOGITS_NONE, FKV_LOGITS_LAST or FKV_LOGITS_ALL", (int)row->logits);
    FKV_REQUIRE(row->n_tokens <= r->config.max_step_tokens - r->n_tokens, FKV_STEP_FULL,
                "the step has at least %llu tokens but max_step_tokens is %u: split it into several steps",
                (unsigned long long)r->n_tokens + row->n_tokens, r->config.max_step_tokens);
    FKV_TRY(fkv_seq_length(r->cache, row->seq, &position));
    for (uint32_t i = 0; i < row->n_tokens; i++) {
        FKV_REQUIRE(row->tokens[i] < r->model->hparams->n_vocab, FKV_BAD_ARGUMENT,
                    "the token at index %u of an entry is %u but the vocabulary has %u tokens", i, row->tokens[i],
                    r->model->hparams->n_vocab);
        bool wanted = row->logits == FKV_LOGITS_ALL || (row->logits == FKV_LOGITS_LAST && i + 1 == row->n_tokens);
        if (wanted) r->logit_rows[r->n_logit_rows++] = r->n_tokens;
        r->tokens[r->n_tokens] = row->tokens[i];
        r->positions[r->n_tokens] = position + i;
        r->n_tokens++;
    }
    FKV_REQUIRE(r->n_logit_rows <= r->config.max_logit_rows, FKV_STEP_FULL,
                "at least %u rows request logits but max_logit_rows is %u", r->n_logit_rows, r->config.max_logit_rows);
    return FKV_OK;
}

/* Validates the rows of a step, runs the step and leaves it open. call: name of the calling function, for error messages. */
static fkv_status run_step(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, bool saves_inputs, const float **logits,
                           const char *call, fkv_step **open) {
    FKV_REQUIRE(runner != NULL && rows != NULL && n_rows > 0, FKV_BAD_ARGUMENT, "%s: runner or rows is NULL, or n_rows is 0",
                call);
    FKV_REQUIRE(runner->step == NULL, FKV_BAD_STATE, "%s: a step is open; end it with fkv_runner_accept() first", call);
    FKV_REQUIRE(n_rows <= runner->config.max_seqs, FKV_BAD_ARGUMENT,
                "the step has %u entries but max_seqs is %u: each sequence may have at most one entry", n_rows,
                runner->config.max_seqs);
    runner->n_rows = n_rows;
    runner->n_tokens = 0;
    runner->n_logit_rows = 0;
    uint32_t n_saved = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        FKV_TRY(append_row(runner, &rows[i]));
        runner->rows[i] = (fkv_row){rows[i].seq, rows[i].n_tokens};
        /* all rows whose inputs are saved fit, because each of their tokens has a logit row */
        const bool is_saved = saves_inputs && rows[i].logits == FKV_LOGITS_ALL && rows[i].n_tokens > 1;
        runner->saved_from[i] = is_saved ? n_saved : FKV_NOT_SAVED;
        if (is_saved) n_saved += rows[i].n_tokens;
    }
    FKV_REQUIRE(logits != NULL || runner->n_logit_rows == 0, FKV_BAD_ARGUMENT,
                "rows request logits but the logits pointer is NULL");
    fkv_step *step = NULL;
    FKV_TRY(fkv_step_begin(runner->cache, runner->rows, n_rows, &step));
    fkv_status status = runner->model->backend->forward(runner, step);
    if (status != FKV_OK) {
        (void)fkv_step_abort(step);
        return status;
    }
    if (logits != NULL) *logits = runner->n_logit_rows != 0 ? runner->logits : NULL;
    *open = step;
    return FKV_OK;
}

fkv_status fkv_runner_forward(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    fkv_step *step = NULL;
    FKV_TRY(run_step(runner, rows, n_rows, false, logits, "fkv_runner_forward", &step));
    fkv_status status = fkv_step_commit(step);
    if (status != FKV_OK) (void)fkv_step_abort(step);
    return status;
}

fkv_status fkv_runner_verify(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    fkv_step *step = NULL;
    FKV_TRY(
        run_step(runner, rows, n_rows, runner != NULL && runner->cpu.saved_inputs != NULL, logits, "fkv_runner_verify", &step));
    runner->step = step;
    return FKV_OK;
}
