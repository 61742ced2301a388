/* The public cache API. Validates arguments and calls the other modules: plan, slab, pager, codecs and device.
 *
 * fkv_cache_open() allocates all memory: one block for the tables (including this struct), one block of scratch memory, the slab
 * (allocated by the device), and the stacks of the workers. plan.total_bytes is the total size of these four allocations.
 */
#include "device.h"

#include "../base/cpu.h"
#include "../base/float16.h"
#include "../base/memory.h"
#include "../store/prefix_pack.h"
#include "cache_workers.h"

#include <stdatomic.h>
#include <stdio.h>

struct fkv_step {
    fkv_cache *cache;
    bool open;
    uint32_t n_rows;
    uint32_t n_written;
    bool *written;      /* [n_layers] */
    fkv_attn_row *rows; /* [n_groups, max_seqs] */
};

struct fkv_cache {
    fkv_shape shape;
    fkv_plan plan;
    fkv_shape_layers layers;
    fkv_pager *pager;
    fkv_step step;
    const fkv_device *device;
    void *device_state;
    const fkv_cpu_kernels *kernels; /* NULL unless the device is the host */
    fkv_workers *workers;
    uint8_t *scratch; /* scratch memory for attention, followed by file_buffer and workers_place */
    uint8_t *file_buffer;
    void *workers_place;
    fkv_pack_identity pack_identity;
    _Atomic uint64_t packed_bytes_read;
};

/* ---- plan ---- */

/* Computes the total size of the cache's tables or, in the second pass, assigns their addresses in one block of memory (carve.h).
 */
static void layout_tables(fkv_carve *carve, const fkv_shape *shape, const fkv_device *device, fkv_cache **cache) {
    fkv_cache *c = FKV_CARVE(carve, 1, fkv_cache);
    fkv_cache counting;
    if (c == NULL) c = &counting;
    fkv_shape_carve_layers(carve, shape, &c->layers);
    c->step.written = FKV_CARVE(carve, shape->n_layers, bool);
    c->step.rows = FKV_CARVE(carve, (uint64_t)shape->pager.n_groups * shape->pager.max_seqs, fkv_attn_row);
    fkv_pager_layout(carve, &shape->pager, &c->pager);
    c->device_state = fkv_carve_take(carve, 1, device->state_bytes(shape));
    *cache = c == &counting ? NULL : c;
}

static void layout_scratch(fkv_carve *carve, const fkv_shape *shape, fkv_cache *cache) {
    uint8_t *attention = fkv_carve_take(carve, 1, shape->scratch_bytes);
    uint8_t *file_buffer = fkv_carve_take(carve, 1, FKV_FILE_BUFFER_BYTES);
    void *workers = fkv_carve_take(carve, 1, fkv_workers_bytes(shape->n_threads));
    if (cache == NULL) return;
    cache->scratch = attention;
    cache->file_buffer = file_buffer;
    cache->workers_place = workers;
}

static fkv_status make_cache_plan(const fkv_shape *shape, const fkv_device *device, const void *options, fkv_plan *plan) {
    fkv_carve tables = {0};
    fkv_carve scratch = {0};
    fkv_cache *none = NULL;
    layout_tables(&tables, shape, device, &none);
    layout_scratch(&scratch, shape, NULL);
    const uint64_t extra = device->extra_bytes != NULL ? device->extra_bytes(shape, options) : 0;
    fkv_plan made = {.slab_bytes = fkv_map_rounded(shape->slab.bytes + extra),
                     .tables_bytes = fkv_map_rounded(tables.used),
                     .scratch_bytes = fkv_map_rounded(scratch.used),
                     .stacks_bytes = (uint64_t)(shape->n_threads - 1) * FKV_WORKER_STACK_BYTES,
                     .token_bytes = shape->token_bytes,
                     .n_groups = shape->slab.n_groups,
                     .n_threads = shape->n_threads,
                     .state_group = fkv_min_u32(shape->state_group, shape->slab.n_groups)};
    bool too_large = tables.overflow || scratch.overflow || made.slab_bytes == UINT64_MAX || made.tables_bytes == UINT64_MAX ||
                     made.scratch_bytes == UINT64_MAX ||
                     fkv_add_overflows(made.slab_bytes, made.tables_bytes, &made.total_bytes) ||
                     fkv_add_overflows(made.total_bytes, made.scratch_bytes + made.stacks_bytes, &made.total_bytes);
    FKV_REQUIRE(!too_large, FKV_BAD_CONFIG, "the plan overflows 64 bits; lower max_tokens, max_seqs or max_step_tokens");
    for (uint32_t g = 0; g < made.n_groups; g++) {
        made.group_pages[g] = shape->slab.group_pages[g];
        made.group_page_bytes[g] = shape->slab.group_page_bytes[g];
    }
    if (made.state_group < made.n_groups) {
        made.state_bytes = made.group_page_bytes[made.state_group];
        made.state_slots = made.group_pages[made.state_group];
    }
    *plan = made;
    return FKV_OK;
}

fkv_config fkv_config_default(void) {
    return (fkv_config){.layer = {.k = {4, 64, FKV_CODEC_SEALED}, .v = {4, 64, FKV_CODEC_SEALED_V}},
                        .row_type = FKV_F32,
                        .page_type = FKV_F16,
                        .rotate = FKV_ROTATE_V,
                        .page_tokens = 64,
                        .max_seqs = 1,
                        .max_step_tokens = 512};
}

/* Computes the shape of the cache. Devices other than the host need no workers and no scratch memory for attention. */
static fkv_status make_cache_shape(const fkv_device *device, const fkv_config *config, fkv_shape *shape) {
    fkv_config used = *config;
    if (!device->on_host) used.n_threads = 1;
    FKV_TRY(fkv_shape_make(&used, shape));
    if (!device->on_host) shape->scratch_bytes = 0;
    return FKV_OK;
}

fkv_status fkv_plan_make_on(const fkv_device *device, const void *options, const fkv_config *config, fkv_plan *plan) {
    fkv_shape shape;
    FKV_TRY(make_cache_shape(device, config, &shape));
    return make_cache_plan(&shape, device, options, plan);
}

fkv_status fkv_plan_make(const fkv_config *config, fkv_plan *plan) {
    FKV_REQUIRE(config != NULL && plan != NULL, FKV_BAD_ARGUMENT, "fkv_plan_make: config or plan is NULL");
    return fkv_plan_make_on(&fkv_device_host, NULL, config, plan);
}

/* ---- open and close ---- */

/* Returns the name of the kernels in use. */
static const char *kernels_name(const fkv_cache *cache) {
    return cache->kernels != NULL ? fkv_cpu_kernels_name(cache->kernels) : cache->device->name(cache->device_state);
}

/* Logs that the cache was opened or closed, with the sizes in its plan. what: "opened" or "closed". */
static void log_plan(const fkv_cache *cache, const char *what) {
    const fkv_config *c = &cache->shape.config;
    if (c->log == NULL) return;
    char line[256];
    (void)snprintf(line, sizeof line,
                   "flatkv %s: %s %llu bytes (slab %llu, tables %llu, scratch %llu, stacks %llu), %u threads, %s", fkv_version(),
                   what, (unsigned long long)cache->plan.total_bytes, (unsigned long long)cache->plan.slab_bytes,
                   (unsigned long long)cache->plan.tables_bytes, (unsigned long long)cache->plan.scratch_bytes,
                   (unsigned long long)cache->plan.stacks_bytes, cache->plan.n_threads, kernels_name(cache));
    c->log(c->log_user, line);
}

/* Returns total_bytes of a configuration's plan, or UINT64_MAX if the configuration is invalid. */
static uint64_t planned_bytes(const fkv_device *device, const void *options, const fkv_config *config) {
    fkv_plan plan;
    return fkv_plan_make_on(device, options, config, &plan) == FKV_OK ? plan.total_bytes : UINT64_MAX;
}

/* Returns the largest value of max_tokens for which the plan fits within the limit, or 0 if there is none. The plan of the
 * unchanged configuration must exceed the limit. */
static uint32_t max_fitting_tokens(const fkv_device *device, const void *options, const fkv_config *config, uint64_t limit) {
    fkv_config tried = *config;
    uint32_t fits = 0;
    uint32_t exceeds = config->max_tokens;
    while (exceeds - fits > 1) {
        tried.max_tokens = fits + (exceeds - fits) / 2;
        if (planned_bytes(device, options, &tried) <= limit)
            fits = tried.max_tokens;
        else
            exceeds = tried.max_tokens;
    }
    return fits;
}

/* Suggests configuration changes that make the plan fit within the limit. words: [n_words], output */
static void suggest_config(const fkv_shape *shape, const fkv_device *device, const void *options, uint64_t limit, char *words,
                           size_t n_words) {
    const fkv_config *c = &shape->config;
    uint32_t n_tokens = max_fitting_tokens(device, options, c, limit);
    fkv_config least = *c;
    least.max_tokens = 1;
    uint64_t one_token = planned_bytes(device, options, &least);
    least.n_threads = 1;
    least.max_seqs = 1;
    least.max_step_tokens = 1;
    uint64_t all_least = planned_bytes(device, options, &least);
    char seqs[32] = ""; /* part of the suggestion about max_seqs; empty if max_seqs is already 1 */
    if (c->max_seqs > 1) (void)snprintf(seqs, sizeof seqs, ", max_seqs from %u", c->max_seqs);
    if (n_tokens > 0)
        (void)snprintf(words, n_words, "lower max_tokens from %u to %u, or use a codec with fewer bits", c->max_tokens, n_tokens);
    else if (all_least <= limit)
        (void)snprintf(
            words, n_words,
            "lowering max_tokens to 1 is not enough (the plan then needs %llu bytes); also lower n_threads from %u%s or "
            "max_step_tokens from %u (with 1 for each of them, it needs %llu bytes)",
            (unsigned long long)one_token, shape->n_threads, seqs, c->max_step_tokens, (unsigned long long)all_least);
    else
        (void)snprintf(words, n_words,
                       "the smallest plan for these layers (max_tokens, n_threads%s and max_step_tokens all 1) needs %llu bytes; "
                       "raise the limit",
                       c->max_seqs > 1 ? ", max_seqs" : "", (unsigned long long)all_least);
}

static fkv_status check_plan_fits(const fkv_shape *shape, const fkv_device *device, const void *options, const fkv_plan *plan) {
    const char *source = NULL;
    uint64_t limit = device->available(options, &source);
    if (shape->config.memory_limit != 0 && shape->config.memory_limit < limit) {
        limit = shape->config.memory_limit;
        source = "memory_limit";
    }
    if (plan->total_bytes <= limit) return FKV_OK;
    char words[256];
    suggest_config(shape, device, options, limit, words, sizeof words);
    return fkv_fail(FKV_NO_MEMORY,
                    "the plan needs %llu bytes (slab %llu, tables %llu, scratch %llu, stacks %llu) but %s allows only %llu: %s",
                    (unsigned long long)plan->total_bytes, (unsigned long long)plan->slab_bytes,
                    (unsigned long long)plan->tables_bytes, (unsigned long long)plan->scratch_bytes,
                    (unsigned long long)plan->stacks_bytes, source, (unsigned long long)limit, words);
}

/* Releases the tables and the scratch memory. Either pointer may be NULL. */
static void release_blocks(void *tables, void *scratch, fkv_plan plan) {
    fkv_map_close(scratch, plan.scratch_bytes);
    fkv_map_close(tables, plan.tables_bytes);
}

/* Allocates the tables and the scratch memory. If `lazy` is true, the operating system commits each page of the tables when it is
 * first used. */
static fkv_status allocate_blocks(const fkv_plan *plan, bool lazy, void **tables, void **scratch) {
    FKV_TRY(fkv_map_open(plan->tables_bytes, !lazy, tables));
    return fkv_map_open(plan->scratch_bytes, true, scratch);
}

static fkv_file_identity file_identity(const fkv_cache *cache) {
    const fkv_config *c = &cache->shape.config;
    fkv_file_identity identity = {.page_tokens = c->page_tokens,
                                  .n_layers = cache->shape.n_layers,
                                  .layers = cache->layers.file,
                                  .page_type = c->page_type,
                                  .rotate = c->rotate,
                                  .rotation_seed = c->rotation_seed};
    memcpy(identity.weights_id, c->weights_id, sizeof identity.weights_id);
    memcpy(identity.calibration, cache->shape.calibration, sizeof identity.calibration);
    memcpy(identity.rope_id, c->rope_id, sizeof identity.rope_id);
    memcpy(identity.numerics, c->numerics, sizeof identity.numerics);
    return identity;
}

static fkv_status init_cache(fkv_cache *cache, const fkv_shape *shape, const fkv_plan *plan) {
    cache->shape = *shape;
    cache->plan = *plan;
    fkv_shape_fill_layers(&cache->shape, &cache->layers);
    cache->shape.config.layers = NULL; /* the caller owns this array; its contents were copied above */
    cache->shape.config.layer.sink_logits = NULL;
    cache->shape.config.layer.channel_bits = NULL;
    cache->step.cache = cache;
    fkv_file_identity identity = file_identity(cache);
    return fkv_pack_identity_make(&identity, &cache->pack_identity);
}

/* Allocates the device's pages and starts the workers. Releases the pages if the workers cannot be started. */
static fkv_status open_device(fkv_cache *cache, const void *options) {
    const fkv_device_place place = {.state = cache->device_state,
                                    .options = options,
                                    .slab = &cache->shape.slab,
                                    .layers = cache->layers.attn,
                                    .config = &cache->shape.config,
                                    .slab_bytes = cache->plan.slab_bytes};
    FKV_TRY(cache->device->open(&place));
    fkv_status status = fkv_workers_open(cache->workers_place, cache->shape.n_threads, &cache->workers);
    if (status != FKV_OK) cache->device->close(cache->device_state);
    return status;
}

fkv_status fkv_cache_open_on(const fkv_device *device, const void *options, const fkv_config *config, fkv_cache **out) {
    fkv_shape shape;
    fkv_plan plan = {0};
    FKV_TRY(make_cache_shape(device, config, &shape));
    FKV_TRY(make_cache_plan(&shape, device, options, &plan));
    const fkv_cpu_kernels *kernels = device->on_host ? fkv_cpu_kernels_for(config->isa) : NULL;
    FKV_REQUIRE(kernels != NULL || !device->on_host, FKV_UNSUPPORTED,
                "this machine does not support %s kernels; use FKV_ISA_AUTO", fkv_isa_name(config->isa));
    FKV_TRY(check_plan_fits(&shape, device, options, &plan));

    void *tables = NULL;
    void *scratch = NULL;
    fkv_cache *cache = NULL;
    fkv_status status = allocate_blocks(&plan, config->lazy && device->on_host, &tables, &scratch);
    if (status == FKV_OK) {
        fkv_carve in_tables = {.base = tables, .size = plan.tables_bytes};
        fkv_carve in_scratch = {.base = scratch, .size = plan.scratch_bytes};
        layout_tables(&in_tables, &shape, device, &cache);
        FKV_ASSERT(cache != NULL);
        layout_scratch(&in_scratch, &shape, cache);
        cache->device = device;
        status = init_cache(cache, &shape, &plan);
        if (status == FKV_OK) status = open_device(cache, options);
    }
    if (status != FKV_OK) {
        release_blocks(tables, scratch, plan);
        return status;
    }
    cache->kernels = kernels;
    log_plan(cache, "opened");
    *out = cache;
    return FKV_OK;
}

fkv_status fkv_cache_open(const fkv_config *config, fkv_cache **out) {
    FKV_REQUIRE(config != NULL && out != NULL, FKV_BAD_ARGUMENT, "fkv_cache_open: config or cache is NULL");
    return fkv_cache_open_on(&fkv_device_host, NULL, config, out);
}

void fkv_cache_close(fkv_cache *cache) {
    if (cache == NULL) return;
    log_plan(cache, "closed");
    fkv_workers_close(cache->workers);
    if (cache->step.open) cache->device->step_end(cache->device_state);
    cache->device->close(cache->device_state);
    release_blocks(cache, cache->scratch, cache->plan);
}

void *fkv_cache_device_state(const fkv_cache *cache, const fkv_device *device) {
    return cache->device == device ? cache->device_state : NULL;
}

fkv_workers *fkv_cache_workers(fkv_cache *cache) { return cache->workers; }

fkv_status fkv_cache_stats(const fkv_cache *cache, fkv_stats *stats) {
    FKV_REQUIRE(cache != NULL && stats != NULL, FKV_BAD_ARGUMENT, "fkv_cache_stats: cache or stats is NULL");
    *stats = (fkv_stats){.planned_bytes = cache->plan.total_bytes,
                         .n_groups = cache->plan.n_groups,
                         .packed_bytes_read = atomic_load_explicit(&cache->packed_bytes_read, memory_order_relaxed),
                         .isa = kernels_name(cache),
                         .numerics = cache->shape.config.numerics};
    fkv_pager_stats(cache->pager, stats);
    return FKV_OK;
}

uint32_t fkv_cache_pages(const fkv_cache *cache, uint32_t group, fkv_page_info *list, uint32_t capacity) {
    if (cache == NULL || list == NULL || group >= cache->plan.n_groups) return 0;
    return fkv_pager_pages(cache->pager, group, list, capacity);
}

bool fkv_cache_consistent(const fkv_cache *cache) { return cache != NULL && fkv_pager_consistent(cache->pager); }

/* ---- sequences ---- */

fkv_status fkv_seq_open(fkv_cache *cache, const fkv_seq_config *config, fkv_seq *seq, uint32_t *n_shared) {
    FKV_REQUIRE(cache != NULL && config != NULL && seq != NULL, FKV_BAD_ARGUMENT, "fkv_seq_open: cache, config or seq is NULL");
    return fkv_pager_open(cache->pager, config, seq, n_shared);
}

fkv_status fkv_seq_fork(fkv_cache *cache, fkv_seq seq, uint32_t max_tokens, fkv_seq *child) {
    FKV_REQUIRE(cache != NULL && child != NULL, FKV_BAD_ARGUMENT, "fkv_seq_fork: cache or child is NULL");
    return fkv_pager_fork(cache->pager, seq, max_tokens, child);
}

fkv_status fkv_seq_reserve(fkv_cache *cache, fkv_seq seq, uint32_t max_tokens) {
    FKV_REQUIRE(cache != NULL, FKV_BAD_ARGUMENT, "fkv_seq_reserve: cache is NULL");
    return fkv_pager_reserve(cache->pager, seq, max_tokens);
}

fkv_status fkv_seq_truncate(fkv_cache *cache, fkv_seq seq, uint32_t n_tokens) {
    FKV_REQUIRE(cache != NULL, FKV_BAD_ARGUMENT, "fkv_seq_truncate: cache is NULL");
    return fkv_pager_truncate(cache->pager, seq, n_tokens);
}

fkv_status fkv_seq_reachable(const fkv_cache *cache, fkv_seq seq, uint32_t n_tokens, uint32_t *length) {
    FKV_REQUIRE(cache != NULL && length != NULL, FKV_BAD_ARGUMENT, "fkv_seq_reachable: cache or length is NULL");
    return fkv_pager_reachable(cache->pager, seq, n_tokens, length);
}

fkv_status fkv_seq_close(fkv_cache *cache, fkv_seq seq) {
    FKV_REQUIRE(cache != NULL, FKV_BAD_ARGUMENT, "fkv_seq_close: cache is NULL");
    return fkv_pager_close(cache->pager, seq);
}

fkv_status fkv_seq_length(const fkv_cache *cache, fkv_seq seq, uint32_t *n_tokens) {
    FKV_REQUIRE(cache != NULL && n_tokens != NULL, FKV_BAD_ARGUMENT, "fkv_seq_length: cache or n_tokens is NULL");
    return fkv_pager_length(cache->pager, seq, n_tokens);
}

fkv_status fkv_prefix_insert(fkv_cache *cache, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens) {
    FKV_REQUIRE(cache != NULL && tokens != NULL, FKV_BAD_ARGUMENT, "fkv_prefix_insert: cache or tokens is NULL");
    return fkv_pager_insert(cache->pager, seq, tokens, n_tokens);
}

fkv_status fkv_prefix_match(const fkv_cache *cache, const fkv_seq_config *config, uint32_t *n_shared) {
    FKV_REQUIRE(cache != NULL && config != NULL && n_shared != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_match: cache, config or n_shared is NULL");
    return fkv_pager_match(cache->pager, config, n_shared);
}

fkv_status fkv_prefix_overlap(const fkv_cache *cache, const fkv_seq_config *config, uint32_t *n_tokens) {
    FKV_REQUIRE(cache != NULL && config != NULL && n_tokens != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_overlap: cache, config or n_tokens is NULL");
    return fkv_pager_overlap(cache->pager, config, n_tokens);
}

fkv_status fkv_snapshot_drop(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens) {
    FKV_REQUIRE(cache != NULL && tokens != NULL, FKV_BAD_ARGUMENT, "fkv_snapshot_drop: cache or tokens is NULL");
    const uint32_t page_tokens = cache->shape.config.page_tokens;
    FKV_REQUIRE(n_tokens > 0 && n_tokens % page_tokens == 0, FKV_BAD_ARGUMENT,
                "fkv_snapshot_drop: n_tokens is %u (expected a multiple of page_tokens, %u)", n_tokens, page_tokens);
    return fkv_pager_drop_state(cache->pager, tenant, tokens, n_tokens / page_tokens);
}

fkv_status fkv_prefix_clear(fkv_cache *cache) {
    FKV_REQUIRE(cache != NULL, FKV_BAD_ARGUMENT, "fkv_prefix_clear: cache is NULL");
    return fkv_pager_clear(cache->pager);
}

/* ---- steps ---- */

/* Makes private copies of the shared pages that the step will write, and passes the step's rows to the device. */
static fkv_status prepare_device(fkv_cache *cache) {
    uint32_t n_copies = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(cache->pager, &n_copies);
    for (uint32_t i = 0; i < n_copies; i++)
        FKV_TRY(fkv_slab_copy_page(&cache->shape.slab, copies[i].group, copies[i].from, copies[i].to));

    fkv_step *step = &cache->step;
    const uint32_t stride = cache->shape.pager.max_seqs;
    const uint32_t open_group = cache->shape.open_group;
    const fkv_step_row *assigned = fkv_pager_step_rows(cache->pager, &step->n_rows);
    uint32_t n_tokens = 0;
    for (uint32_t g = 0; g < cache->plan.n_groups; g++) {
        n_tokens = 0;
        for (uint32_t r = 0; r < step->n_rows; r++) {
            fkv_attn_row *row = &step->rows[(size_t)g * stride + r];
            *row = (fkv_attn_row){.view = fkv_pager_view(cache->pager, g, assigned[r].slot),
                                  .start = assigned[r].start,
                                  .n_tokens = assigned[r].n_tokens,
                                  .first = n_tokens};
            if (open_group < cache->plan.n_groups) row->open = fkv_pager_view(cache->pager, open_group, assigned[r].slot);
            n_tokens += assigned[r].n_tokens;
        }
    }
    const fkv_device_step rows = {.rows = step->rows,
                                  .stride = stride,
                                  .n_rows = step->n_rows,
                                  .n_tokens = n_tokens,
                                  .states = fkv_pager_step_states(cache->pager)};
    return cache->device->step_begin(cache->device_state, &rows);
}

fkv_status fkv_step_begin(fkv_cache *cache, const fkv_row *rows, uint32_t n_rows, fkv_step **out) {
    FKV_REQUIRE(cache != NULL && rows != NULL && out != NULL, FKV_BAD_ARGUMENT, "fkv_step_begin: cache, rows or step is NULL");
    FKV_TRY(fkv_pager_step_begin(cache->pager, rows, n_rows));
    fkv_status status = prepare_device(cache);
    if (status != FKV_OK) {
        (void)fkv_pager_step_abort(cache->pager);
        return status;
    }
    fkv_step *step = &cache->step;
    memset(step->written, 0, cache->shape.n_layers * sizeof *step->written);
    step->n_written = 0;
    step->open = true;
    *out = step;
    return FKV_OK;
}

static fkv_status check_step(const fkv_step *step, const char *call) {
    FKV_REQUIRE(step != NULL, FKV_BAD_ARGUMENT, "%s: step is NULL", call);
    FKV_REQUIRE(step->open, FKV_BAD_STATE, "%s: the step was already committed or aborted; begin a new one", call);
    return FKV_OK;
}

fkv_status fkv_step_check(const fkv_step *step, const fkv_device *device, uint32_t layer, fkv_layer_state required,
                          const char *call) {
    FKV_TRY(check_step(step, call));
    const fkv_cache *cache = step->cache;
    FKV_REQUIRE(cache->device == device, FKV_UNSUPPORTED, "%s: the pages of this cache are on another device (%s); use %s", call,
                kernels_name(cache), cache->device->calls);
    FKV_REQUIRE(layer < cache->shape.n_layers, FKV_BAD_ARGUMENT, "%s: layer is %u but the cache has %u layers", call, layer,
                cache->shape.n_layers);
    FKV_REQUIRE(required != FKV_LAYER_UNWRITTEN || !step->written[layer], FKV_BAD_STATE,
                "%s: layer %u was already written in this step", call, layer);
    FKV_REQUIRE(required != FKV_LAYER_WRITTEN || step->written[layer], FKV_BAD_STATE,
                "%s: layer %u has not been written in this step; write it first, because each query attends to its own token",
                call, layer);
    return FKV_OK;
}

void *fkv_step_device_state(const fkv_step *step) { return step->cache->device_state; }

void fkv_step_wrote(fkv_step *step, uint32_t layer) {
    step->written[layer] = true;
    step->n_written++;
}

void fkv_step_attended(fkv_step *step, uint64_t bytes) {
    _Atomic uint64_t *total = &step->cache->packed_bytes_read;
    atomic_store_explicit(total, atomic_load_explicit(total, memory_order_relaxed) + bytes, memory_order_relaxed);
}

/* Checks that the layer is of the kind that a function requires: a state layer, or a layer with keys and values. */
static fkv_status check_layer_kind(const fkv_step *step, uint32_t layer, bool is_state, const char *call) {
    const fkv_cache *cache = step->cache;
    const bool found = cache->shape.slab.layers[layer].group == cache->shape.state_group;
    FKV_REQUIRE(found == is_state, FKV_BAD_ARGUMENT, "%s: layer %u %s", call, layer,
                found ? "has a recurrent state and no keys and values; use fkv_state_rows()"
                      : "stores keys and values; use fkv_write() and fkv_attend()");
    return FKV_OK;
}

static const fkv_attn_row *layer_rows(const fkv_step *step, uint32_t layer) {
    const fkv_shape *shape = &step->cache->shape;
    return step->rows + (size_t)shape->slab.layers[layer].group * shape->pager.max_seqs;
}

fkv_status fkv_write(fkv_step *step, uint32_t layer, const void *k, const void *v) {
    FKV_TRY(fkv_step_check(step, &fkv_device_host, layer, FKV_LAYER_UNWRITTEN, "fkv_write"));
    FKV_TRY(check_layer_kind(step, layer, false, "fkv_write"));
    fkv_cache *cache = step->cache;
    const bool is_latent = cache->layers.attn[layer].rope_dim != 0;
    FKV_REQUIRE(k != NULL && (v != NULL || is_latent), FKV_BAD_ARGUMENT, "fkv_write: k or v is NULL for layer %u", layer);
    FKV_REQUIRE(v == NULL || !is_latent, FKV_BAD_ARGUMENT,
                "fkv_write: v of layer %u is not NULL, but a latent layer has no separate values", layer);
    fkv_attn_write(cache->kernels, &cache->layers.attn[layer], layer_rows(step, layer), step->n_rows, k, v, cache->workers);
    fkv_step_wrote(step, layer);
    return FKV_OK;
}

/* Returns whether the queries and the outputs of a layer overlap in memory. */
static bool overlaps(const fkv_step *step, uint32_t layer, const void *q, const void *out) {
    const fkv_attn_layer *l = &step->cache->layers.attn[layer];
    const fkv_attn_row *rows = layer_rows(step, layer);
    const fkv_attn_row *last = &rows[step->n_rows - 1];
    const size_t n_heads = (size_t)(last->first + last->n_tokens - rows[0].first) * l->n_q_heads;
    const size_t bytes = fkv_type_bytes(l->row_type);
    const uintptr_t q_begin = (uintptr_t)q;
    const uintptr_t out_begin = (uintptr_t)out;
    return q_begin < out_begin + n_heads * l->head_dim * bytes && out_begin < q_begin + n_heads * fkv_attn_key_dim(l) * bytes;
}

fkv_status fkv_attend(fkv_step *step, uint32_t layer, const void *q, void *out) {
    FKV_TRY(fkv_step_check(step, &fkv_device_host, layer, FKV_LAYER_ANY, "fkv_attend"));
    FKV_TRY(check_layer_kind(step, layer, false, "fkv_attend"));
    FKV_TRY(fkv_step_check(step, &fkv_device_host, layer, FKV_LAYER_WRITTEN, "fkv_attend"));
    FKV_REQUIRE(q != NULL && out != NULL, FKV_BAD_ARGUMENT, "fkv_attend: q or out is NULL for layer %u", layer);
    fkv_cache *cache = step->cache;
    FKV_REQUIRE(
        cache->layers.attn[layer].rope_dim == 0 || !overlaps(step, layer, q, out), FKV_BAD_ARGUMENT,
        "fkv_attend: out overlaps q, which is not allowed in latent layer %u, because output rows are shorter than query rows",
        layer);
    uint64_t bytes = fkv_attn_attend(cache->kernels, &cache->layers.attn[layer], layer_rows(step, layer), step->n_rows, q, out,
                                     cache->scratch, cache->workers);
    fkv_step_attended(step, bytes);
    return FKV_OK;
}

fkv_status fkv_state_rows(fkv_step *step, uint32_t layer, fkv_state_row *rows) {
    FKV_TRY(fkv_step_check(step, &fkv_device_host, layer, FKV_LAYER_UNWRITTEN, "fkv_state_rows"));
    FKV_TRY(check_layer_kind(step, layer, true, "fkv_state_rows"));
    FKV_REQUIRE(rows != NULL, FKV_BAD_ARGUMENT, "fkv_state_rows: rows is NULL");
    const fkv_slab *slab = &step->cache->shape.slab;
    const fkv_state_move *states = fkv_pager_step_states(step->cache->pager);
    for (uint32_t r = 0; r < step->n_rows; r++)
        rows[r] = (fkv_state_row){.in = states[r].from == FKV_NO_PAGE ? NULL : fkv_slab_run(slab, layer, states[r].from),
                                  .out = fkv_slab_run(slab, layer, states[r].to)};
    fkv_step_wrote(step, layer);
    return FKV_OK;
}

/* Ends the step on the device. Must be called before the pager ends the step, because the pager then releases the page tables
 * that the device uses. */
static void finish_device_step(fkv_step *step) {
    step->open = false;
    step->cache->device->step_end(step->cache->device_state);
}

fkv_status fkv_step_keep(fkv_step *step, const uint32_t *n_tokens) {
    FKV_TRY(check_step(step, "fkv_step_keep"));
    FKV_REQUIRE(n_tokens != NULL, FKV_BAD_ARGUMENT, "fkv_step_keep: n_tokens is NULL");
    const fkv_shape *shape = &step->cache->shape;
    bool changed = false;
    FKV_TRY(fkv_pager_step_keep(step->cache->pager, n_tokens, &changed));
    for (uint32_t l = 0; changed && l < shape->n_layers; l++) {
        if (shape->slab.layers[l].group != shape->state_group || !step->written[l]) continue;
        step->written[l] = false;
        step->n_written--;
    }
    return FKV_OK;
}

fkv_status fkv_step_commit(fkv_step *step) {
    FKV_TRY(check_step(step, "fkv_step_commit"));
    FKV_REQUIRE(step->n_written == step->cache->shape.n_layers, FKV_BAD_STATE,
                "fkv_step_commit: only %u of %u layers have been written; write the others or abort the step", step->n_written,
                step->cache->shape.n_layers);
    finish_device_step(step);
    return fkv_pager_step_commit(step->cache->pager);
}

fkv_status fkv_step_abort(fkv_step *step) {
    FKV_TRY(check_step(step, "fkv_step_abort"));
    finish_device_step(step);
    return fkv_pager_step_abort(step->cache->pager);
}

/* ---- page files ---- */

fkv_status fkv_seq_save(fkv_cache *cache, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, const char *path) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && path != NULL, FKV_BAD_ARGUMENT, "fkv_seq_save: cache, tokens or path is NULL");
    FKV_REQUIRE(!cache->step.open, FKV_BAD_STATE, "fkv_seq_save: a step is open; commit or abort it first");
    uint32_t slot = 0;
    uint32_t length = 0;
    FKV_TRY(fkv_pager_slot(cache->pager, seq, &slot));
    FKV_TRY(fkv_pager_length(cache->pager, seq, &length));
    if (n_tokens == 0) n_tokens = length;
    FKV_REQUIRE(n_tokens > 0 && n_tokens <= length, FKV_BAD_ARGUMENT,
                "fkv_seq_save: n_tokens is %u, but it must not exceed the length of the sequence, which is %u tokens", n_tokens,
                length);
    FKV_REQUIRE(
        fkv_pager_covers(cache->pager, slot, n_tokens), FKV_GONE,
        "fkv_seq_save: the token at position %u attends to pages that a sliding-window layer has dropped or that are already sealed; save all %u tokens",
        n_tokens, length);
    FKV_REQUIRE(cache->plan.state_bytes == 0 || n_tokens == length, FKV_GONE,
                "fkv_seq_save: the recurrent state after %u tokens no longer exists; save all %u tokens", n_tokens, length);
    fkv_file_identity identity = file_identity(cache);
    return fkv_page_file_save(&identity, &cache->shape.slab, cache->pager, slot, tokens, n_tokens, path, cache->file_buffer);
}

fkv_status fkv_seq_load(fkv_cache *cache, const fkv_seq_config *config, const char *path, fkv_seq *seq) {
    FKV_REQUIRE(cache != NULL && config != NULL && path != NULL && seq != NULL, FKV_BAD_ARGUMENT,
                "fkv_seq_load: cache, config, path or seq is NULL");
    FKV_REQUIRE(!cache->step.open, FKV_BAD_STATE, "fkv_seq_load: a step is open; commit or abort it first");
    fkv_file_identity identity = file_identity(cache);
    return fkv_page_file_load(&identity, &cache->shape.slab, cache->pager, config, path, cache->file_buffer, seq);
}

/* ---- packed prefix pages ---- */

fkv_status fkv_prefix_root(const fkv_cache *cache, const void *name, size_t n_bytes, fkv_page_key *root) {
    FKV_REQUIRE(cache != NULL && root != NULL && (name != NULL || n_bytes == 0), FKV_BAD_ARGUMENT,
                "fkv_prefix_root: cache, name or root is NULL");
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, cache->pack_identity.digest, sizeof cache->pack_identity.digest);
    if (n_bytes > 0) fkv_sha256_add(&sha, name, n_bytes);
    return fkv_sha256_close(&sha, root->bytes);
}

/* Returns a bit mask with only the bit of the state group set, or 0 if there are no state layers. */
static uint32_t state_bit(const fkv_cache *cache) {
    return cache->plan.state_bytes != 0 ? UINT32_C(1) << cache->plan.state_group : 0;
}

/* Returns a bit mask with only the bit of the group of open pages set. Returns 0 if there are no sealed layers or if n_pages is
 * 1, because the first page is packed together with its open form. */
static uint32_t open_bit(const fkv_cache *cache, uint32_t n_pages) {
    return cache->shape.open_group < cache->plan.n_groups && n_pages > 1 ? UINT32_C(1) << cache->shape.open_group : 0;
}

uint64_t fkv_prefix_plan_bytes(const fkv_plan *plan, uint32_t page_tokens) {
    if (plan == NULL || plan->n_groups > FKV_MAX_GROUPS) return 0;
    fkv_slab slab = {.page_tokens = page_tokens, .n_groups = plan->n_groups};
    memcpy(slab.group_page_bytes, plan->group_page_bytes, sizeof slab.group_page_bytes);
    const uint32_t state = plan->state_bytes != 0 ? UINT32_C(1) << plan->state_group : 0;
    const uint64_t page = fkv_pack_bytes(&slab, ((UINT32_C(1) << FKV_MAX_GROUPS) - 1) & ~state);
    const uint64_t of_state = state != 0 ? fkv_pack_bytes(&slab, state) : 0;
    return page > of_state ? page : of_state;
}

uint64_t fkv_prefix_packed_bytes(const fkv_cache *cache) {
    return cache != NULL ? fkv_prefix_plan_bytes(&cache->plan, cache->shape.config.page_tokens) : 0;
}

static fkv_pack_place packed_page_place(const fkv_cache *cache, const uint32_t *tokens, uint32_t n_pages,
                                        const fkv_page_key *key) {
    return (fkv_pack_place){.identity = &cache->pack_identity,
                            .key = key,
                            .tokens = tokens + (uint64_t)(n_pages - 1) * cache->shape.config.page_tokens,
                            .logical = n_pages - 1};
}

/* Checks that n_pages does not exceed the maximum number of pages of a sequence. */
static fkv_status check_prefix_pages(const fkv_cache *cache, uint32_t n_pages) {
    uint32_t most = cache->shape.pager.max_seq_tokens / cache->shape.config.page_tokens;
    FKV_REQUIRE(n_pages > 0 && n_pages <= most, FKV_BAD_ARGUMENT, "n_pages is %u (expected 1 to %u)", n_pages, most);
    return FKV_OK;
}

/* Packs one logical page of the prefix tree: the pages of all layer groups in the bit mask `wanted` for which the tree has a
 * page. Returns FKV_GONE if the tree has a page for none of these groups. */
static fkv_status pack_groups(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                              const fkv_page_key *key, uint32_t wanted, uint8_t *packed, uint64_t *n_bytes) {
    FKV_TRY(check_prefix_pages(cache, n_pages));
    FKV_REQUIRE(!cache->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    uint32_t pages[FKV_MAX_GROUPS];
    FKV_REQUIRE(fkv_pager_prefix_page(cache->pager, tenant, tokens, n_pages, pages), FKV_GONE,
                "logical page %u of these tokens is not in the prefix tree", n_pages - 1);
    uint32_t groups = 0;
    for (uint32_t g = 0; g < cache->plan.n_groups; g++) {
        if ((wanted >> g & 1) == 0) pages[g] = FKV_NO_PAGE;
        groups |= (uint32_t)(pages[g] != FKV_NO_PAGE) << g;
    }
    FKV_REQUIRE(groups != 0, FKV_GONE,
                "logical page %u of these tokens is in the prefix tree, but without the requested snapshot or open form",
                n_pages - 1);
    fkv_pack_place place = packed_page_place(cache, tokens, n_pages, key);
    *n_bytes = fkv_pack_bytes(&cache->shape.slab, groups);
    return fkv_pack_write(&cache->shape.slab, &place, pages, packed);
}

fkv_status fkv_prefix_pack(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                           const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && key != NULL && packed != NULL && n_bytes != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_pack: cache, tokens, key, packed or n_bytes is NULL");
    FKV_TRY(check_prefix_pages(cache, n_pages));
    return pack_groups(cache, tenant, tokens, n_pages, key, fkv_pager_page_groups(cache->pager, n_pages - 1), packed, n_bytes);
}

fkv_status fkv_prefix_pack_state(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                 const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && key != NULL && packed != NULL && n_bytes != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_pack_state: cache, tokens, key, packed or n_bytes is NULL");
    return pack_groups(cache, tenant, tokens, n_pages, key, state_bit(cache), packed, n_bytes);
}

fkv_status fkv_prefix_pack_open(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && key != NULL && packed != NULL && n_bytes != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_pack_open: cache, tokens, key, packed or n_bytes is NULL");
    return pack_groups(cache, tenant, tokens, n_pages, key, open_bit(cache, n_pages), packed, n_bytes);
}

/* Verifies a packed page. *groups receives the bit mask of the layer groups that the packed page contains. */
static fkv_status check_packed_page(const fkv_cache *cache, const uint32_t *tokens, uint32_t n_pages, const fkv_page_key *key,
                                    const uint8_t *packed, uint64_t n_bytes, uint32_t *groups) {
    FKV_TRY(check_prefix_pages(cache, n_pages));
    fkv_pack_place place = packed_page_place(cache, tokens, n_pages, key);
    return fkv_pack_check(&cache->shape.slab, &place, packed, n_bytes, groups);
}

/* Copies a packed page into the pool pages that the pager has allocated for it. If copying fails, the prefix tree drops these
 * pages. */
static fkv_status read_packed_page(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, uint32_t groups,
                                   const uint8_t *packed, const uint32_t *pages) {
    fkv_status status = fkv_pack_read(&cache->shape.slab, groups, packed, pages);
    fkv_pager_prefix_end(cache->pager, tenant, tokens, n_pages, pages, status == FKV_OK);
    return status;
}

fkv_status fkv_prefix_unpack(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages, const fkv_page_key *key,
                             const uint8_t *packed, uint64_t n_bytes) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && key != NULL && packed != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_unpack: cache, tokens, key or packed is NULL");
    uint32_t groups = 0;
    uint32_t pages[FKV_MAX_GROUPS];
    FKV_TRY(check_packed_page(cache, tokens, n_pages, key, packed, n_bytes, &groups));
    FKV_REQUIRE(fkv_pager_prefix_groups(cache->pager, n_pages - 1, groups), FKV_FILE_FOREIGN,
                "packed page mismatch: the page contains layer groups that logical page %u of a prefix cannot have", n_pages - 1);
    FKV_TRY(fkv_pager_prefix_begin(cache->pager, tenant, tokens, n_pages, groups, pages));
    return read_packed_page(cache, tenant, tokens, n_pages, groups, packed, pages);
}

/* Verifies a packed page that contains only one layer group, then inserts it into its prefix-tree node. bit: bit mask with only
 * the bit of this group set. */
static fkv_status unpack_part(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                              const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes, uint32_t bit) {
    uint32_t groups = 0;
    uint32_t pages[FKV_MAX_GROUPS];
    FKV_TRY(check_packed_page(cache, tokens, n_pages, key, packed, n_bytes, &groups));
    FKV_REQUIRE(groups == bit && bit != 0, FKV_FILE_FOREIGN,
                "packed page mismatch: expected a snapshot or the open form of logical page %u", n_pages - 1);
    FKV_TRY(fkv_pager_part_begin(cache->pager, tenant, tokens, n_pages, (uint32_t)__builtin_ctz(bit), pages));
    return read_packed_page(cache, tenant, tokens, n_pages, groups, packed, pages);
}

fkv_status fkv_prefix_unpack_state(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                   const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && key != NULL && packed != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_unpack_state: cache, tokens, key or packed is NULL");
    return unpack_part(cache, tenant, tokens, n_pages, key, packed, n_bytes, state_bit(cache));
}

fkv_status fkv_prefix_unpack_open(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                  const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    FKV_REQUIRE(cache != NULL && tokens != NULL && key != NULL && packed != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_unpack_open: cache, tokens, key or packed is NULL");
    return unpack_part(cache, tenant, tokens, n_pages, key, packed, n_bytes, open_bit(cache, n_pages));
}
