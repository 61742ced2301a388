/* Plan, open and close of a runner, and its steps up to the backend's forward pass. See runner.h.
 *
 * What the activations take is counted by the walk that lays them out (carve.h), so the plan and what is taken cannot differ.
 */
#include "runner.h"

#include "../calibration.h"

#include "../../base/cpu.h"
#include "../../base/memory.h"
#include "../files/tensor_rows.h"
#include "../rope_scaling.h"

#include <inttypes.h>
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
                               .page_tokens = 64};
}

/* ---- the cache a model needs ---- */

/* Of a side that configure() has checked. */
static fkv_codec_info about(fkv_codec_config side) {
    fkv_codec_info info;
    fkv_status status = fkv_codec_about(side, &info);
    FKV_ASSERT(status == FKV_OK);
    (void)status;
    return info;
}

/* The head dimension inside pages. Multiples are powers of two: the larger one holds for both. */
static uint32_t padded_head(uint32_t head_dim, const fkv_runner_config *c) {
    return (uint32_t)fkv_align_up(head_dim, fkv_max_u32(about(c->k).dim_multiple, about(c->v).dim_multiple));
}

static void bound_context(const fkv_runner_config *c, fkv_layer_config *layer) {
    if (c->max_kv == 0 || (layer->window != 0 && layer->window <= c->max_kv)) return;
    layer->window = c->max_kv;
    layer->n_sinks = c->n_sinks;
}

/* Rotation spreads outliers over a group before it is rounded: where nothing is rounded it is left out,
 * and where a codec is made for it it is always there. A value that is none is
 * left to the cache's check. */
static fkv_rotate rotation_of(const fkv_runner_config *c) {
    if ((unsigned)c->rotate > FKV_ROTATE_KV) return c->rotate;
    unsigned rotates = (about(c->k).rotates ? FKV_ROTATE_K : 0u) | (about(c->v).rotates ? FKV_ROTATE_V : 0u);
    unsigned needed = (about(c->k).needs_rotation ? FKV_ROTATE_K : 0u) | (about(c->v).needs_rotation ? FKV_ROTATE_V : 0u);
    return (fkv_rotate)(((unsigned)c->rotate & rotates) | needed);
}

fkv_status fkv_calibration_path(const fkv_model *model, char *path, size_t room) {
    FKV_REQUIRE(model != NULL && path != NULL && room > 0, FKV_BAD_ARGUMENT, "fkv_calibration_path: model or path is NULL");
    return fkv_calibration_beside(model->path, path, room);
}

/* Gives every layer the bits of its channels, which lie in the calibration. */
static fkv_status apply_calibration(const fkv_model *model, fkv_calibration *calibration, uint32_t average, uint32_t n_layers,
                                    fkv_layer_config *layers, const char *path) {
    FKV_REQUIRE(memcmp(calibration->weights_id, model->info.weights_id, sizeof model->info.weights_id) == 0, FKV_FILE_FOREIGN,
                "foreign calibration: weights_id is of another model; make one with flatkv calibrate: %s", path);
    FKV_REQUIRE(calibration->n_layers == n_layers, FKV_FILE_FOREIGN,
                "foreign calibration: n_layers is %u and the model has %u: %s", calibration->n_layers, n_layers, path);
    fkv_calibration_choose(calibration, average);
    const uint8_t *bits = calibration->both;
    for (uint32_t i = 0; i < n_layers; i++) {
        fkv_calibration_layer l = calibration->layers[i];
        FKV_REQUIRE(
            l.n_kv_heads == layers[i].n_kv_heads && l.head_dim == layers[i].head_dim, FKV_FILE_FOREIGN,
            "foreign calibration: layer %u has %u KV heads of dimension %u, and %u of %u in the pages of this model and V "
            "codec: %s",
            i, l.n_kv_heads, l.head_dim, layers[i].n_kv_heads, layers[i].head_dim, path);
        layers[i].channel_bits = bits;
        bits += (size_t)l.n_kv_heads * l.head_dim;
    }
    return FKV_OK;
}

/* The calibration that is named, or the one beside the model, for K of FKV_CODEC_CALIBRATED. The caller closes it. */
static fkv_status calibrate_layers(const fkv_model *model, const fkv_runner_config *c, uint32_t n_layers,
                                   fkv_layer_config *layers, fkv_calibration *calibration) {
    char beside[FKV_PATH_BYTES];
    const char *path = c->calibration;
    if (c->k.kind != FKV_CODEC_CALIBRATED) return FKV_OK;
    if (path == NULL) {
        FKV_TRY(fkv_calibration_path(model, beside, sizeof beside));
        path = beside;
        FKV_REQUIRE(access(path, F_OK) == 0, FKV_IO,
                    "calibrated keys need a calibration of this model, and there is none: make it with flatkv calibrate, or name "
                    "one: %s",
                    path);
    }
    FKV_TRY(fkv_calibration_open(path, calibration));
    return apply_calibration(model, calibration, c->k.bits, n_layers, layers, path);
}

/* The configuration of the runner with its zeros resolved, and that of its cache. layers: [FKV_MAX_LAYERS], used by *cache;
 * calibration: zeros, used by layers; the caller closes it, after a failure too. */
static fkv_status configure(const fkv_model *model, fkv_runner_config *c, fkv_layer_config *layers, fkv_calibration *calibration,
                            fkv_config *cache) {
    const fkv_hparams *h = model->hparams;
    fkv_codec_info side;
    FKV_REQUIRE(fkv_weights_n_tensors(model->weights) > 0, FKV_UNSUPPORTED,
                "%s has a vocabulary and no weights: it can tokenize, to run takes the file with the tensors", model->path);
    FKV_TRY(fkv_codec_about(c->k, &side));
    FKV_TRY(fkv_codec_about(c->v, &side));
    FKV_REQUIRE(c->max_logit_rows > 0 && c->max_logit_rows <= c->max_step_tokens, FKV_BAD_CONFIG,
                "max_logit_rows %u: 1 to the %u of max_step_tokens", c->max_logit_rows, c->max_step_tokens);
    FKV_REQUIRE(c->max_kv != 0 || c->n_sinks == 0, FKV_BAD_CONFIG,
                "%u sinks without max_kv: nothing is dropped, set n_sinks to 0", c->n_sinks);
    if (c->max_tokens == 0) c->max_tokens = h->context;
    if (c->isa == FKV_ISA_AUTO) c->isa = model->config.isa;
    if (c->isa == FKV_ISA_AUTO) c->isa = fkv_cpu_best_isa();
    FKV_REQUIRE(fkv_cpu_runs(c->isa), FKV_UNSUPPORTED, "this machine does not run %s kernels: choose FKV_ISA_AUTO",
                fkv_isa_name(c->isa));
    for (uint32_t i = 0; i < fkv_architecture_n_kv_layers(h); i++) {
        layers[i] = (fkv_layer_config){.n_q_heads = h->n_q_heads,
                                       .n_kv_heads = h->shapes[i].n_kv_heads,
                                       .head_dim = padded_head(h->shapes[i].head_dim, c),
                                       .window = fkv_architecture_window(h, i),
                                       .scale = model->query_scale,
                                       .softcap = h->softcap,
                                       .sink_logits = model->sinks != NULL ? model->sinks + (size_t)i * h->n_q_heads : NULL,
                                       .k = c->k,
                                       .v = c->v};
        bound_context(c, &layers[i]);
    }
    FKV_TRY(calibrate_layers(model, c, fkv_architecture_n_kv_layers(h), layers, calibration));
    *cache = fkv_config_default();
    cache->n_layers = fkv_architecture_n_kv_layers(h);
    cache->layers = layers;
    cache->rotate = rotation_of(c);
    cache->rotation_seed = c->rotation_seed;
    cache->page_tokens = c->page_tokens;
    cache->max_tokens = c->max_tokens;
    cache->max_seqs = c->max_seqs;
    cache->max_step_tokens = c->max_step_tokens;
    cache->n_threads = c->n_threads;
    cache->isa = c->isa;
    cache->lazy = c->lazy;
    cache->log = c->log;
    cache->log_user = c->log_user;
    memcpy(cache->weights_id, model->info.weights_id, sizeof cache->weights_id);
    return fkv_architecture_rope_id(h, fkv_rope_is_long(h, c->max_tokens), cache->rope_id);
}

/* ---- plan ---- */

/* Everything of a runner but the cache, in one walk that either counts (then *r is the caller's) or places. */
static void layout(fkv_carve *carve, fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    uint32_t t = r->config.max_step_tokens;
    r->rows = FKV_CARVE(carve, r->config.max_seqs, fkv_row);
    r->tokens = FKV_CARVE(carve, t, uint32_t);
    r->positions = FKV_CARVE(carve, t, uint32_t);
    r->asked = FKV_CARVE(carve, t, uint32_t);
    for (uint32_t i = 0; i < r->n_ropes; i++) r->frequencies[i] = FKV_CARVE(carve, r->n_pairs[i], double);
    if (fkv_architecture_centers_keys(h)) r->k_centers = FKV_CARVE(carve, (uint64_t)h->n_layers * r->kv_dim, float);
    r->logits = FKV_CARVE(carve, (uint64_t)r->config.max_logit_rows * h->n_vocab, float);
    r->model->backend->layout(carve, r);
}

/* What layout() needs to know, and no memory. */
static void shape(const fkv_model *model, const fkv_runner_config *c, fkv_runner *r) {
    const fkv_hparams *h = model->hparams;
    *r = (fkv_runner){.model = model, .config = *c};
    for (uint32_t i = 0; i < h->n_layers; i++)
        r->kv_dim = fkv_max_u32(r->kv_dim, h->shapes[i].n_kv_heads * h->shapes[i].head_dim);
    r->n_ropes = model->info.window != 0 && h->local_rope.base != 0.0f ? FKV_N_ROPES : 1;
    r->is_long = fkv_rope_is_long(h, c->max_tokens);
    r->n_pairs[FKV_ROPE_GLOBAL] = h->rope.dim / 2;
    r->n_pairs[FKV_ROPE_LOCAL] = h->local_rope.dim / 2;
}

/* *map_bytes: of the activations in host memory, which are one map. */
static fkv_status make_plan(const fkv_model *model, const fkv_runner_config *c, const fkv_config *cache, fkv_runner_plan *plan,
                            uint64_t *map_bytes) {
    fkv_runner_plan made = {
        .packed_bytes = model->info.packed_bytes, .mapped_bytes = model->mapped_bytes, .touched_bytes = model->touched_bytes};
    FKV_TRY(model->backend->plan_cache(cache, &made.cache));
    fkv_runner counting;
    fkv_carve carve = {0};
    (void)fkv_carve_take(&carve, 1, sizeof counting);
    shape(model, c, &counting);
    layout(&carve, &counting);
    *map_bytes = fkv_align_up(carve.used, fkv_os_page_bytes());
    FKV_REQUIRE(!carve.overflow && *map_bytes >= carve.used &&
                    !fkv_add_overflows(*map_bytes, model->backend->step_bytes(&counting, cache), &made.activations_bytes) &&
                    !fkv_add_overflows(made.cache.total_bytes, made.activations_bytes, &made.total_bytes),
                FKV_BAD_CONFIG, "the plan does not fit 64 bits: lower max_step_tokens or max_logit_rows");
    *plan = made;
    return FKV_OK;
}

fkv_status fkv_runner_plan_make(const fkv_model *model, const fkv_runner_config *config, fkv_runner_plan *plan) {
    FKV_REQUIRE(model != NULL && config != NULL && plan != NULL, FKV_BAD_ARGUMENT,
                "fkv_runner_plan_make: model, config or plan is NULL");
    fkv_layer_config layers[FKV_MAX_LAYERS] = {0};
    fkv_runner_config c = *config;
    fkv_config cache;
    fkv_calibration calibration = {0};
    uint64_t map_bytes = 0;
    fkv_status status = configure(model, &c, layers, &calibration, &cache);
    if (status == FKV_OK) status = make_plan(model, &c, &cache, plan, &map_bytes);
    fkv_calibration_close(&calibration);
    return status;
}

/* ---- open and close ---- */

static fkv_status check_fits(const fkv_model *model, const fkv_runner_config *c, const fkv_runner_plan *plan) {
    const char *source = NULL;
    uint64_t limit = model->backend->available(&source);
    if (c->memory_limit != 0 && c->memory_limit < limit) {
        limit = c->memory_limit;
        source = "memory_limit";
    }
    if (plan->total_bytes <= limit) return FKV_OK;
    uint64_t rest = plan->total_bytes - plan->cache.slab_bytes;
    uint64_t tokens = limit > rest ? (limit - rest) / (plan->cache.token_bytes + 1) : 0;
    char advice[160];
    if (tokens > 0)
        (void)snprintf(advice, sizeof advice,
                       "lower max_tokens from %u to about %" PRIu64 ", store fewer bits, or take smaller steps", c->max_tokens,
                       tokens);
    else
        (void)snprintf(advice, sizeof advice, "%" PRIu64 " bytes are needed before the first token: lower max_step_tokens%s",
                       rest, c->max_seqs > 1 ? ", n_threads or max_seqs" : " or n_threads");
    return fkv_fail(FKV_NO_MEMORY,
                    "the plan needs %" PRIu64 " bytes (cache %" PRIu64 ", activations %" PRIu64 ") and %s allows %" PRIu64 ": %s",
                    plan->total_bytes, plan->cache.total_bytes, plan->activations_bytes, source, limit, advice);
}

static void fill_frequencies(fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    const fkv_rope *ropes[FKV_N_ROPES] = {&h->rope, &h->local_rope};
    FKV_ASSERT(r->n_ropes <= FKV_N_ROPES);
    for (uint32_t i = 0; i < r->n_ropes; i++)
        r->rope_sizes[i] = (float)fkv_rope_frequencies(ropes[i], h, r->is_long, r->frequencies[i]);
}

uint32_t fkv_runner_head_pad(const fkv_runner *runner, uint32_t head_dim) { return padded_head(head_dim, &runner->config); }

uint32_t fkv_runner_rope(const fkv_runner *runner, uint32_t layer) {
    const fkv_hparams *h = runner->model->hparams;
    if ((h->layers[layer] & FKV_LAYER_NO_ROPE) != 0) return FKV_ROPE_NONE;
    return runner->n_ropes > 1 && fkv_architecture_window(h, layer) != 0 ? FKV_ROPE_LOCAL : FKV_ROPE_GLOBAL;
}

float fkv_runner_temperature(const fkv_runner *runner, uint32_t position) {
    const fkv_hparams *h = runner->model->hparams;
    if (h->temperature == 0.0f) return 1.0f;
    const uint32_t n_contexts = position / h->temperature_context; /* whole ones */
    return 1.0f + h->temperature * logf(1.0f + (float)n_contexts);
}

const float *fkv_runner_k_center(const fkv_runner *runner, uint32_t layer) {
    return runner->k_centers != NULL ? runner->k_centers + (size_t)layer * runner->kv_dim : NULL;
}

/* The mean of exp(i w p) over the positions p of the context is sin(a) / a in the direction a, with a = w context / 2: about 1
 * for pairs that hardly turn, about 0 for those that go round. */
static void fill_centers(fkv_runner *r) {
    const fkv_model *m = r->model;
    const fkv_hparams *h = m->hparams;
    float cosines[FKV_MAX_HEAD_DIM / 2];
    float sines[FKV_MAX_HEAD_DIM / 2];
    for (uint32_t i = 0; i < h->n_layers; i++) {
        uint32_t rope = fkv_runner_rope(r, i);
        const fkv_layer_shape *s = &h->shapes[i];
        if (s->kv_layer != i) continue; /* it has no keys of its own */
        float *center = r->k_centers + (size_t)i * r->kv_dim;
        fkv_tensor_row_floats(m->tensors[i].k_bias, 0, center);
        if (rope == FKV_ROPE_NONE) continue;
        const double *frequencies = r->frequencies[rope];
        for (uint32_t pair = 0; pair < r->n_pairs[rope]; pair++) {
            double a = frequencies[pair] * h->context / 2.0;
            double size = (a > 0.0 ? sin(a) / a : 1.0) * (double)r->rope_sizes[rope];
            cosines[pair] = (float)(size * cos(a));
            sines[pair] = (float)(size * sin(a));
        }
        for (uint32_t head = 0; head < s->n_kv_heads; head++)
            (h->rope_interleaved ? r->ops->rope_pairs : r->ops->rope_halves)(center + (size_t)head * s->head_dim, cosines, sines,
                                                                             r->n_pairs[rope]);
    }
}

static fkv_status open_runner(const fkv_model *model, const fkv_runner_config *config, fkv_calibration *calibration,
                              fkv_runner **runner) {
    fkv_layer_config layers[FKV_MAX_LAYERS] = {0};
    fkv_runner_config c = *config;
    fkv_config cache_config;
    fkv_runner_plan plan = {0};
    uint64_t map_bytes = 0;
    FKV_TRY(configure(model, &c, layers, calibration, &cache_config));
    c.calibration = NULL; /* the caller's */
    FKV_TRY(make_plan(model, &c, &cache_config, &plan, &map_bytes));
    FKV_TRY(check_fits(model, &c, &plan));
    void *map = NULL;
    FKV_TRY(fkv_map_open(map_bytes, true, &map));
    fkv_carve carve = {.base = map, .size = map_bytes};
    fkv_runner *r = FKV_CARVE(&carve, 1, fkv_runner);
    shape(model, &c, r);
    layout(&carve, r);
    r->bytes = map_bytes;
    r->ops = fkv_vector_ops_for(c.isa);
    fill_frequencies(r);
    if (r->k_centers != NULL) fill_centers(r);
    fkv_status status = model->backend->open(r, &cache_config);
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
    FKV_REQUIRE(!model->config.plan_only, FKV_BAD_STATE, "the model was loaded to plan with (plan_only): load it again");
    fkv_calibration calibration = {0};
    fkv_status status = open_runner(model, config, &calibration, runner);
    fkv_calibration_close(&calibration);
    return status;
}

void fkv_runner_close(fkv_runner *runner) {
    if (runner == NULL) return;
    runner->model->backend->close(runner);
    fkv_map_close(runner, runner->bytes);
}

fkv_cache *fkv_runner_cache(fkv_runner *runner) { return runner != NULL ? runner->cache : NULL; }

/* ---- the step ---- */

/* The rows of the step, side by side, into the runner's tables; nothing has begun yet. */
static fkv_status list_row(fkv_runner *r, const fkv_tokens *row) {
    uint32_t position = 0;
    FKV_REQUIRE(row->tokens != NULL && row->n_tokens > 0, FKV_BAD_ARGUMENT, "a row of sequence %llu has no tokens: leave it out",
                (unsigned long long)row->seq);
    FKV_REQUIRE((unsigned)row->logits <= FKV_LOGITS_ALL, FKV_BAD_ARGUMENT, "logits %d: FKV_LOGITS_NONE, _LAST or _ALL",
                (int)row->logits);
    FKV_REQUIRE(row->n_tokens <= r->config.max_step_tokens - r->n_tokens, FKV_STEP_FULL,
                "the rows have %llu tokens or more and a step takes %u: split them over several steps",
                (unsigned long long)r->n_tokens + row->n_tokens, r->config.max_step_tokens);
    FKV_TRY(fkv_seq_length(r->cache, row->seq, &position));
    for (uint32_t i = 0; i < row->n_tokens; i++) {
        FKV_REQUIRE(row->tokens[i] < r->model->hparams->n_vocab, FKV_BAD_ARGUMENT,
                    "token %u of a row is %u and the vocabulary ends at %u", i, row->tokens[i], r->model->hparams->n_vocab);
        bool asked = row->logits == FKV_LOGITS_ALL || (row->logits == FKV_LOGITS_LAST && i + 1 == row->n_tokens);
        if (asked) r->asked[r->n_asked++] = r->n_tokens;
        r->tokens[r->n_tokens] = row->tokens[i];
        r->positions[r->n_tokens] = position + i;
        r->n_tokens++;
    }
    FKV_REQUIRE(r->n_asked <= r->config.max_logit_rows, FKV_STEP_FULL,
                "the logits of %u rows or more are asked for and the runner was opened for %u (max_logit_rows)", r->n_asked,
                r->config.max_logit_rows);
    return FKV_OK;
}

fkv_status fkv_runner_forward(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    FKV_REQUIRE(runner != NULL && rows != NULL && n_rows > 0, FKV_BAD_ARGUMENT,
                "fkv_runner_forward: runner or rows is NULL, or no rows");
    FKV_REQUIRE(n_rows <= runner->config.max_seqs, FKV_BAD_ARGUMENT,
                "%u rows and at most %u sequences (max_seqs): each sequence is in a step at most once", n_rows,
                runner->config.max_seqs);
    runner->n_tokens = 0;
    runner->n_asked = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        FKV_TRY(list_row(runner, &rows[i]));
        runner->rows[i] = (fkv_row){rows[i].seq, rows[i].n_tokens};
    }
    FKV_REQUIRE(logits != NULL || runner->n_asked == 0, FKV_BAD_ARGUMENT, "logits are asked for and there is no place for them");
    fkv_step *step = NULL;
    FKV_TRY(fkv_step_begin(runner->cache, runner->rows, n_rows, &step));
    fkv_status status = runner->model->backend->forward(runner, step);
    if (status == FKV_OK) status = fkv_step_commit(step);
    if (status != FKV_OK) {
        (void)fkv_step_abort(step);
        return status;
    }
    if (logits != NULL) *logits = runner->n_asked != 0 ? runner->logits : NULL;
    return FKV_OK;
}
