/* Plan, open and close of a runner. See runner.h; the forward pass is forward.c.
 *
 * What the activations take is counted by the walk that lays them out (carve.h), so the plan and what is taken cannot differ.
 */
#include "runner.h"

#include "../base/carve.h"
#include "../base/memory.h"

#include <inttypes.h>
#include <math.h>

fkv_runner_config fkv_runner_config_default(void) {
    return (fkv_runner_config){.max_seqs = 1,
                               .max_step_tokens = 512,
                               .max_logit_rows = 1,
                               .k = {8, 64},
                               .v = {4, 64},
                               .rotate = FKV_ROTATE_KV,
                               .page_tokens = 64};
}

/* ---- the cache a model needs ---- */

/* A group that does not exist is left to the cache's check. */
static uint32_t side_align(fkv_codec_config side) {
    enum { ROW_ALIGN = 16 }; /* of the heads of a cache */
    bool grouped = side.bits != 16 && (side.group == 32 || side.group == 64 || side.group == 128);
    return grouped ? side.group : ROW_ALIGN;
}

/* The head dimension inside pages. Alignments are powers of two: the larger one holds for both. */
static uint32_t padded_head(uint32_t head_dim, const fkv_runner_config *c) {
    return (uint32_t)fkv_align_up(head_dim, fkv_max_u32(side_align(c->k), side_align(c->v)));
}

static void bound_context(const fkv_runner_config *c, fkv_layer_config *layer) {
    if (c->max_kv == 0 || (layer->window != 0 && layer->window <= c->max_kv)) return;
    layer->window = c->max_kv;
    layer->n_sinks = c->n_sinks;
}

/* Rotation spreads outliers over a group before it is rounded: 16 bits have no groups. A value that is none is left to the
 * cache's check. */
static fkv_rotate rotation_of(const fkv_runner_config *c) {
    if ((unsigned)c->rotate > FKV_ROTATE_KV) return c->rotate;
    unsigned quantized = (c->k.bits != 16 ? FKV_ROTATE_K : 0u) | (c->v.bits != 16 ? FKV_ROTATE_V : 0u);
    return (fkv_rotate)((unsigned)c->rotate & quantized);
}

/* The configuration of the runner with its zeros resolved, and that of its cache. layers: [FKV_MAX_LAYERS], used by *cache. */
static fkv_status configure(const fkv_model *model, fkv_runner_config *c, fkv_layer_config *layers, fkv_config *cache) {
    const fkv_hparams *h = model->hparams;
    FKV_REQUIRE(c->max_logit_rows > 0 && c->max_logit_rows <= c->max_step_tokens, FKV_BAD_CONFIG,
                "max_logit_rows %u: 1 to the %u of max_step_tokens", c->max_logit_rows, c->max_step_tokens);
    FKV_REQUIRE(c->max_kv != 0 || c->n_sinks == 0, FKV_BAD_CONFIG,
                "%u sinks without max_kv: nothing is dropped, set n_sinks to 0", c->n_sinks);
    if (c->max_tokens == 0) c->max_tokens = h->context;
    if (c->isa == FKV_ISA_AUTO) c->isa = model->config.isa;
    if (c->isa == FKV_ISA_AUTO) c->isa = fkv_cpu_best_isa();
    FKV_REQUIRE(fkv_cpu_runs(c->isa), FKV_UNSUPPORTED, "this machine does not run %s kernels: choose FKV_ISA_AUTO",
                fkv_isa_name(c->isa));
    for (uint32_t i = 0; i < h->n_layers; i++) {
        layers[i] = (fkv_layer_config){.n_q_heads = h->n_q_heads,
                                       .n_kv_heads = h->n_kv_heads,
                                       .head_dim = padded_head(h->head_dim, c),
                                       .window = fkv_architecture_window(model->architecture, h, i),
                                       .scale = model->query_scale,
                                       .softcap = h->softcap,
                                       .k = c->k,
                                       .v = c->v};
        bound_context(c, &layers[i]);
    }
    *cache = fkv_config_default();
    cache->n_layers = h->n_layers;
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
    memcpy(cache->rope_id, model->info.rope_id, sizeof cache->rope_id);
    return FKV_OK;
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
    for (uint32_t i = 0; i < r->n_ropes; i++) {
        r->frequencies[i] = FKV_CARVE(carve, r->n_pairs, double);
        r->cosines[i] = FKV_CARVE(carve, (uint64_t)t * r->n_pairs, float);
        r->sines[i] = FKV_CARVE(carve, (uint64_t)t * r->n_pairs, float);
    }
    if (fkv_architecture_centers_keys(r->model->architecture, h))
        r->k_centers = FKV_CARVE(carve, (uint64_t)h->n_layers * h->n_kv_heads * h->head_dim, float);
    r->x = FKV_CARVE(carve, (uint64_t)t * r->dim_pad, float);
    r->h = FKV_CARVE(carve, (uint64_t)t * r->dim_pad, float);
    r->q = FKV_CARVE(carve, (uint64_t)t * h->n_q_heads * r->head_pad, float);
    r->k = FKV_CARVE(carve, (uint64_t)t * h->n_kv_heads * r->head_pad, float);
    r->v = FKV_CARVE(carve, (uint64_t)t * h->n_kv_heads * r->head_pad, float);
    r->gate = FKV_CARVE(carve, (uint64_t)t * r->ffn_pad, float);
    r->up = FKV_CARVE(carve, (uint64_t)t * r->ffn_pad, float);
    if (r->heads_lie_apart) r->gathered = FKV_CARVE(carve, (uint64_t)t * r->q_pad, float);
    uint32_t widest = fkv_max_u32(r->dim_pad, fkv_max_u32(r->q_pad, r->ffn_pad));
    r->input = fkv_carve_take(carve, 1, fkv_product_input_bytes(t, widest));
    r->logits = FKV_CARVE(carve, (uint64_t)r->config.max_logit_rows * h->n_vocab, float);
}

/* What layout() needs to know, and no memory. */
static void shape(const fkv_model *model, const fkv_runner_config *c, fkv_runner *r) {
    const fkv_hparams *h = model->hparams;
    *r = (fkv_runner){.model = model, .config = *c};
    r->head_pad = padded_head(h->head_dim, c);
    r->n_ropes = model->info.window != 0 ? FKV_N_ROPES : 1;
    r->n_pairs = h->rope_dim / 2;
    r->dim_pad = fkv_model_pad(h->dim);
    r->q_pad = fkv_model_pad(h->n_q_heads * h->head_dim);
    r->ffn_pad = fkv_model_pad(h->ffn_dim);
    r->heads_lie_apart = r->head_pad != h->head_dim || r->q_pad != h->n_q_heads * h->head_dim;
}

static fkv_status make_plan(const fkv_model *model, const fkv_runner_config *c, const fkv_config *cache, fkv_runner_plan *plan) {
    fkv_runner_plan made = {.packed_bytes = model->info.packed_bytes, .mapped_bytes = model->mapped_bytes};
    FKV_TRY(fkv_plan_make(cache, &made.cache));
    fkv_runner counting;
    fkv_carve carve = {0};
    (void)fkv_carve_take(&carve, 1, sizeof counting);
    shape(model, c, &counting);
    layout(&carve, &counting);
    made.activations_bytes = fkv_align_up(carve.used, fkv_os_page_bytes());
    FKV_REQUIRE(!carve.overflow && made.activations_bytes >= carve.used &&
                    !fkv_add_overflows(made.cache.total_bytes, made.activations_bytes, &made.total_bytes),
                FKV_BAD_CONFIG, "the plan does not fit 64 bits: lower max_step_tokens or max_logit_rows");
    *plan = made;
    return FKV_OK;
}

fkv_status fkv_runner_plan_make(const fkv_model *model, const fkv_runner_config *config, fkv_runner_plan *plan) {
    FKV_REQUIRE(model != NULL && config != NULL && plan != NULL, FKV_BAD_ARGUMENT,
                "fkv_runner_plan_make: model, config or plan is NULL");
    fkv_layer_config layers[FKV_MAX_LAYERS];
    fkv_runner_config c = *config;
    fkv_config cache;
    FKV_TRY(configure(model, &c, layers, &cache));
    return make_plan(model, &c, &cache, plan);
}

/* ---- open and close ---- */

static fkv_status check_fits(const fkv_runner_config *c, const fkv_runner_plan *plan) {
    const char *source = NULL;
    uint64_t limit = fkv_memory_available(&source);
    if (c->memory_limit != 0 && c->memory_limit < limit) {
        limit = c->memory_limit;
        source = "memory_limit";
    }
    if (plan->total_bytes <= limit) return FKV_OK;
    uint64_t rest = plan->total_bytes - plan->cache.slab_bytes;
    uint64_t tokens = limit > rest ? (limit - rest) / (plan->cache.token_bytes + 1) : 0;
    return fkv_fail(FKV_NO_MEMORY,
                    "the plan needs %" PRIu64 " bytes (cache %" PRIu64 ", activations %" PRIu64 ") and %s allows %" PRIu64
                    ": lower max_tokens from %u to about %" PRIu64 ", store fewer bits, or take smaller steps",
                    plan->total_bytes, plan->cache.total_bytes, plan->activations_bytes, source, limit, c->max_tokens, tokens);
}

static void fill_frequencies(fkv_runner *r) {
    const fkv_hparams *h = r->model->hparams;
    double local = (double)fkv_architecture_local_base(r->model->architecture, h);
    for (uint32_t i = 0; i < r->n_pairs; i++) {
        double power = -2.0 * i / h->rope_dim;
        r->frequencies[FKV_ROPE_GLOBAL][i] = pow((double)h->rope_base, power) / (double)h->rope_scale;
        if (r->n_ropes > 1) r->frequencies[FKV_ROPE_LOCAL][i] = pow(local, power);
    }
}

/* The mean of exp(i w p) over the positions p of the context is sin(a) / a in the direction a, with a = w context / 2: about 1
 * for pairs that hardly turn, about 0 for those that go round. The rows of cosines and sines are not in use yet. */
static void fill_centers(fkv_runner *r) {
    const fkv_model *m = r->model;
    const fkv_hparams *h = m->hparams;
    uint32_t kv_dim = h->n_kv_heads * h->head_dim;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        uint32_t rope = fkv_architecture_window(m->architecture, h, i) != 0 ? FKV_ROPE_LOCAL : FKV_ROPE_GLOBAL;
        float *cosines = r->cosines[rope];
        float *sines = r->sines[rope];
        for (uint32_t pair = 0; pair < r->n_pairs; pair++) {
            double a = r->frequencies[rope][pair] * h->context / 2.0;
            double size = a > 0.0 ? sin(a) / a : 1.0;
            cosines[pair] = (float)(size * cos(a));
            sines[pair] = (float)(size * sin(a));
        }
        float *center = r->k_centers + (size_t)i * kv_dim;
        memcpy(center, m->layers[i].k_bias, kv_dim * sizeof *center);
        for (uint32_t head = 0; head < h->n_kv_heads; head++)
            (h->rope_interleaved ? r->ops->rope_pairs : r->ops->rope_halves)(center + (size_t)head * h->head_dim, cosines, sines,
                                                                             r->n_pairs);
    }
}

fkv_status fkv_runner_open(const fkv_model *model, const fkv_runner_config *config, fkv_runner **runner) {
    FKV_REQUIRE(model != NULL && config != NULL && runner != NULL, FKV_BAD_ARGUMENT,
                "fkv_runner_open: model, config or runner is NULL");
    FKV_REQUIRE(!model->config.plan_only, FKV_BAD_STATE, "the model was loaded to plan with (plan_only): load it again");
    fkv_layer_config layers[FKV_MAX_LAYERS];
    fkv_runner_config c = *config;
    fkv_config cache_config;
    fkv_runner_plan plan = {0};
    FKV_TRY(configure(model, &c, layers, &cache_config));
    FKV_TRY(make_plan(model, &c, &cache_config, &plan));
    FKV_TRY(check_fits(&c, &plan));
    fkv_cache *cache = NULL;
    void *map = NULL;
    FKV_TRY(fkv_cache_open(&cache_config, &cache));
    fkv_status status = fkv_map_open(plan.activations_bytes, true, &map);
    if (status != FKV_OK) {
        fkv_cache_close(cache);
        return status;
    }
    fkv_carve carve = {.base = map, .size = plan.activations_bytes};
    fkv_runner *r = FKV_CARVE(&carve, 1, fkv_runner);
    shape(model, &c, r);
    layout(&carve, r);
    r->cache = cache;
    r->workers = fkv_cache_workers(cache);
    r->ops = fkv_vector_ops_for(c.isa);
    r->bytes = plan.activations_bytes;
    fill_frequencies(r);
    if (r->k_centers != NULL) fill_centers(r);
    *runner = r;
    return FKV_OK;
}

void fkv_runner_close(fkv_runner *runner) {
    if (runner == NULL) return;
    fkv_cache_close(runner->cache);
    fkv_map_close(runner, runner->bytes);
}

fkv_cache *fkv_runner_cache(fkv_runner *runner) { return runner != NULL ? runner->cache : NULL; }
