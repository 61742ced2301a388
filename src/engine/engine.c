/* Thread-safe engine API: the engine thread, its inbox of submitted requests, and the published statistics.
 *
 * One lock protects the inbox, the list of all jobs and the published statistics. It is held only for short copies, never during
 * a step, a callback or an allocation. The scheduler is used by the engine thread alone, except for the constants that
 * fkv_scheduler_check() reads.
 */
#include "../base/timed_wait.h"
#include "admission.h"
#include "recent_prefixes.h"
#include "scheduler.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_LISTED = 256 }; /* maximum number of requests that fkv_engine_requests() returns */

struct fkv_engine {
    const fkv_model *model;
    fkv_engine_config config;
    fkv_runner *runner;
    fkv_runner_plan plan;
    fkv_scheduler scheduler;
    fkv_step_turns *turns; /* decides which of the engines that share CPU cores runs the next step */
    pthread_t thread;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* signaled when the engine thread has new work, and when it becomes idle */
    fkv_status opened; /* result of opening the engine on its thread; `opened` and `message` are valid once `ready` is true */
    char message[512];
    bool ready;
    bool closing;
    bool draining;
    bool arrived; /* true if a prefix page has arrived from the store */
    fkv_request_queue inbox;
    double inbox_s; /* estimated machine time, in seconds, of all requests in the inbox */
    fkv_job *live;  /* list of all jobs that are not done */
    uint32_t n_live;
    uint64_t last_id;
    fkv_engine_stats stats;
    fkv_admission admission;
    fkv_recent_prefixes recent;
    fkv_forecast forecast;
    double base_wait_s;  /* predicted queue time, in seconds, of a request that arrives after all jobs of the scheduler */
    double next_start_s; /* predicted time, in seconds, until the next queued request starts */
    uint32_t free_slots; /* number of sequences available to new requests; 0 if requests are queued */
    uint32_t n_listed;
    fkv_request_info listed[MAX_LISTED];
    bool pages_wanted; /* true if fkv_engine_pages() was called since `pages` was last updated */
    uint32_t n_pages;
    fkv_page_info pages[FKV_MAX_LISTED_PAGES]; /* pages of the layer group that page_group() returns */
};

fkv_engine_config fkv_engine_config_default(void) {
    fkv_engine_config c = {.runner = fkv_runner_config_default(),
                           .step_ms = 100.0,
                           .max_queue = 256,
                           .max_wait_s = 120.0,
                           .max_tenants = 64,
                           .default_new = 1024,
                           .ageing_s = 10.0,
                           .output_weight = 2.0};
    c.runner.max_seqs = 8;
    c.runner.max_logit_rows = 8;
    return c;
}

/* Returns the first layer group whose pages hold keys and values. If the first layer is recurrent, group 0 holds states. */
static uint32_t page_group(const fkv_engine *e) {
    const fkv_plan *plan = &e->plan.cache;
    return plan->state_bytes != 0 && plan->state_group == 0 && plan->n_groups > 1 ? 1 : 0;
}

static double engine_seconds(void *user) {
    (void)user;
    return fkv_seconds_now();
}

static fkv_status run_forward(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    return fkv_runner_forward(((fkv_engine *)user)->runner, rows, n_rows, logits);
}

static fkv_status run_verify(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    return fkv_runner_verify(((fkv_engine *)user)->runner, rows, n_rows, logits);
}

static fkv_status run_accept(void *user, const uint32_t *n_kept) {
    return fkv_runner_accept(((fkv_engine *)user)->runner, n_kept);
}

static const char *model_token_text(void *user, uint32_t token, size_t *n_bytes) {
    return fkv_token_text(((fkv_engine *)user)->model, token, false, n_bytes);
}

/* Wakes the engine thread. Called by the read thread of the prefix store. */
static void page_arrived(void *user) {
    fkv_engine *e = user;
    (void)pthread_mutex_lock(&e->lock);
    e->arrived = true;
    (void)pthread_cond_broadcast(&e->changed);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- engine thread ---- */

/* Frees a job after its last event. */
static void retire_job(void *user, fkv_job *job) {
    fkv_engine *e = user;
    (void)pthread_mutex_lock(&e->lock);
    fkv_job **link = &e->live;
    while (*link != job) link = &(*link)->next_live;
    *link = job->next_live;
    e->n_live--;
    (void)pthread_mutex_unlock(&e->lock);
    fkv_job_free(job);
}

/* Fills in the prefix-store statistics, which can change even while the engine is idle. May be called from any thread. */
static void update_store_stats(const fkv_prefix_tier *tier, fkv_store_stats *stats) {
    if (tier->traffic == NULL) return;
    fkv_traffic_stats io;
    fkv_traffic_stats_now(tier->traffic, &io);
    tier->store.stats(tier->store.self, &stats->usage);
    stats->written_pages = io.written;
    stats->failed_writes = io.failed;
    stats->write_seconds = io.write_seconds;
}

static void publish_stats(fkv_engine *e) {
    fkv_scheduler *s = &e->scheduler;
    if (s->n_running == 0 && s->queue.n == 0) s->stats.consistent = fkv_cache_consistent(s->device.cache);
    const double wait = fkv_scheduler_wait(s);
    const double next_start = fkv_scheduler_next_start(s);
    (void)pthread_mutex_lock(&e->lock);
    uint64_t submitted = e->stats.submitted;
    uint64_t busy = e->stats.refused_busy;
    uint64_t size = e->stats.refused_size;
    e->stats = s->stats;
    e->stats.submitted = submitted;
    e->stats.refused_busy = busy;
    e->stats.refused_size = size;
    e->stats.store = s->tier.stats;
    e->stats.running = s->n_running;
    e->stats.waiting = s->queue.n;
    e->forecast = fkv_scheduler_forecast(s);
    e->base_wait_s = wait;
    e->next_start_s = next_start;
    e->free_slots = s->queue.n == 0 ? s->device.max_seqs - s->n_seqs : 0;
    e->n_listed = fkv_scheduler_list(s, e->listed, MAX_LISTED);
    for (uint32_t i = 0; i < s->n_running; i++) s->running[i]->started = true;
    if (e->pages_wanted ||
        (s->n_running == 0 && s->queue.n == 0)) { /* an idle engine runs no further steps in which it could publish the pages */
        e->pages_wanted = false;
        e->n_pages = fkv_cache_pages(fkv_runner_cache(e->runner), page_group(e), e->pages, FKV_MAX_LISTED_PAGES);
    }
    (void)pthread_mutex_unlock(&e->lock);
}

/* Waits until a page arrives from the store, for at most `seconds` seconds. The time limit lets the engine check the deadlines of
 * queued requests. The caller must hold the lock. */
static void wait_for_page(fkv_engine *e, double seconds) {
    const double end = engine_seconds(NULL) + seconds;
    while (e->inbox.n == 0 && !e->closing && !e->arrived && fkv_cond_wait_until(&e->changed, &e->lock, end)) {
    }
}

/* Moves submitted requests to the scheduler. Waits if the engine is idle. Returns false when the engine is closed and no requests
 * are left. */
static bool receive_inbox(fkv_engine *e, bool idle) {
    (void)pthread_mutex_lock(&e->lock);
    while (idle && e->inbox.n == 0 && !e->closing && e->n_live == 0) {
        (void)pthread_cond_broadcast(&e->changed); /* wakes fkv_engine_drain() */
        (void)pthread_cond_wait(&e->changed, &e->lock);
    }
    if (idle && fkv_tier_asks(&e->scheduler.tier))
        wait_for_page(e, 0.0005); /* polls, because the store does not wake the engine when its page lookup finishes */
    else if (idle && fkv_tier_busy(&e->scheduler.tier))
        wait_for_page(e, 0.02);
    e->arrived = false;
    fkv_request_queue received = e->inbox;
    e->stats.waiting += received.n; /* approximate until the next publish_stats() call */
    e->base_wait_s += e->inbox_s;
    e->free_slots -= fkv_min_u32(e->free_slots, received.n);
    e->inbox = (fkv_request_queue){0};
    e->inbox_s = 0.0;
    if (e->closing)
        for (fkv_job *j = e->live; j != NULL; j = j->next_live) fkv_job_cancel(j, e->stats.steps);
    bool running = !e->closing || e->n_live > 0;
    (void)pthread_mutex_unlock(&e->lock);
    while (received.first != NULL) {
        fkv_job *job = received.first;
        fkv_request_queue_remove(&received, job);
        fkv_scheduler_accept(&e->scheduler, job);
    }
    return running;
}

uint64_t fkv_engine_buffer_bytes(const fkv_runner_plan *plan, uint32_t page_tokens) {
    return plan != NULL ? fkv_traffic_bytes(fkv_prefix_plan_bytes(&plan->cache, page_tokens)) : 0;
}

/* Reduces the memory limit of the runner by the size of the I/O buffers. */
static fkv_status reserve_buffers(const fkv_engine *e, fkv_runner_config *c) {
    if (e->config.store == NULL || c->memory_limit == 0) return FKV_OK;
    const uint64_t buffers = fkv_engine_buffer_bytes(&e->plan, c->page_tokens);
    FKV_REQUIRE(buffers < c->memory_limit, FKV_NO_MEMORY,
                "the I/O buffers of the prefix store need %llu bytes, but memory_limit allows %llu in total",
                (unsigned long long)buffers, (unsigned long long)c->memory_limit);
    c->memory_limit -= buffers;
    return FKV_OK;
}

/* Returns true if the codec is sealed and the model has layers with keys and values. */
static bool has_sealed_layers(const fkv_engine *e) {
    const fkv_codec_kind kind = e->config.runner.k.kind;
    const uint32_t n_state_groups = e->plan.cache.state_bytes != 0 ? 1 : 0;
    return (kind == FKV_CODEC_SEALED || kind == FKV_CODEC_CALIBRATED) && e->plan.cache.n_groups > n_state_groups;
}

static fkv_status open_tier(fkv_engine *e) {
    fkv_prefix_tier *tier = &e->scheduler.tier;
    if (e->config.store == NULL) return FKV_OK;
    *tier = (fkv_prefix_tier){.store = *e->config.store,
                              .cache = fkv_runner_cache(e->runner),
                              .page_tokens = e->config.runner.page_tokens,
                              .kinds = {has_sealed_layers(e), e->plan.cache.state_bytes != 0},
                              .first_group = page_group(e),
                              .seconds = engine_seconds};
    uint64_t packed_bytes = fkv_prefix_packed_bytes(tier->cache);
    tier->stats.buffer_bytes = fkv_engine_buffer_bytes(&e->plan, e->config.runner.page_tokens);
    return fkv_traffic_open(e->config.store, packed_bytes, page_arrived, e, &tier->traffic);
}

/* Returns true if the cache has sliding-window layers or states. The group of the open pages of sealed layers does not count. */
static bool is_windowed(const fkv_engine *e) {
    const uint32_t n_groups = has_sealed_layers(e) ? 2 : 1;
    return fkv_model_about(e->model)->window != 0 || e->config.runner.max_kv != 0 || e->plan.cache.n_groups != n_groups;
}

static fkv_status open_on_thread(fkv_engine *e) {
    const fkv_model_info *about = fkv_model_about(e->model);
    fkv_runner_config c = e->config.runner;
    c.drafts = e->config.draft_tokens > 0;
    if (!c.drafts) c.max_logit_rows = c.max_seqs;
    FKV_TRY(fkv_runner_plan_make(e->model, &c, &e->plan));
    FKV_TRY(reserve_buffers(e, &c));
    FKV_TRY(fkv_runner_open(e->model, &c, &e->runner));
    fkv_engine_device d = {.user = e,
                           .forward = run_forward,
                           .verify = run_verify,
                           .accept = run_accept,
                           .turns = e->turns,
                           .seconds = engine_seconds,
                           .token_text = model_token_text,
                           .cache = fkv_runner_cache(e->runner),
                           .n_vocab = about->n_vocab,
                           .max_tokens = c.max_tokens,
                           .context = c.max_kv != 0 ? c.max_tokens : about->context,
                           .max_seqs = c.max_seqs,
                           .max_step_tokens = c.max_step_tokens,
                           .page_tokens = c.page_tokens,
                           .has_states = e->plan.cache.state_bytes != 0,
                           .has_sealed = has_sealed_layers(e),
                           .windowed = is_windowed(e),
                           .draft_tokens = e->config.draft_tokens,
                           .draft_rows = c.max_logit_rows - c.max_seqs,
                           .n_end = about->n_end};
    memcpy(d.end, about->end, sizeof d.end);
    FKV_TRY(fkv_scheduler_open(&e->scheduler, &e->config, &d));
    e->scheduler.retire = retire_job;
    e->scheduler.retire_user = e;
    fkv_status status = open_tier(e);
    if (status != FKV_OK)
        fkv_scheduler_close(&e->scheduler);
    else
        fkv_scheduler_warm_up(&e->scheduler);
    return status;
}

static void *run_engine_thread(void *user) {
    fkv_engine *e = user;
    fkv_status status = open_on_thread(e);
    if (status == FKV_OK) publish_stats(e);
    (void)pthread_mutex_lock(&e->lock);
    e->opened = status;
    (void)strncpy(e->message, status != FKV_OK ? fkv_message() : "", sizeof e->message - 1);
    e->ready = true;
    (void)pthread_cond_broadcast(&e->changed);
    (void)pthread_mutex_unlock(&e->lock);
    if (status == FKV_OK) {
        for (bool worked = false; receive_inbox(e, !worked);) {
            worked = fkv_scheduler_turn(&e->scheduler);
            publish_stats(e);
        }
        fkv_traffic_close(e->scheduler.tier.traffic);
        fkv_scheduler_close(&e->scheduler);
    }
    fkv_runner_close(e->runner);
    return NULL;
}

/* ---- open, drain and close ---- */

static fkv_status start_engine_thread(fkv_engine *e) {
    FKV_REQUIRE(pthread_create(&e->thread, NULL, run_engine_thread, e) == 0, FKV_NO_MEMORY, "cannot start the engine thread");
    (void)pthread_mutex_lock(&e->lock);
    while (!e->ready) (void)pthread_cond_wait(&e->changed, &e->lock);
    (void)pthread_mutex_unlock(&e->lock);
    if (e->opened == FKV_OK) return FKV_OK;
    (void)pthread_join(e->thread, NULL);
    return fkv_fail(e->opened, "%s", e->message); /* run_engine_thread() stored the message in e->message */
}

fkv_status fkv_engine_open(const fkv_model *model, const fkv_engine_config *config, fkv_engine **engine) {
    FKV_REQUIRE(model != NULL && config != NULL && engine != NULL, FKV_BAD_ARGUMENT,
                "fkv_engine_open: model, config or engine is NULL");
    const fkv_runner_config *c = &config->runner;
    FKV_REQUIRE(config->draft_tokens <= FKV_MAX_DRAFT, FKV_BAD_CONFIG, "draft_tokens is %u (maximum %d)", config->draft_tokens,
                FKV_MAX_DRAFT);
    FKV_REQUIRE((uint64_t)c->max_seqs + config->draft_tokens <= c->max_logit_rows, FKV_BAD_CONFIG,
                "max_logit_rows is %u, but it must be at least max_seqs + draft_tokens (%u + %u)", c->max_logit_rows, c->max_seqs,
                config->draft_tokens);
    fkv_engine *e = calloc(1, sizeof *e);
    FKV_REQUIRE(e != NULL, FKV_NO_MEMORY, "out of memory allocating the engine");
    e->turns = config->peer != NULL ? config->peer->turns : fkv_step_turns_open();
    if (e->turns == NULL) {
        free(e);
        return fkv_fail(FKV_NO_MEMORY, "out of memory allocating the engine");
    }
    if (config->peer != NULL) fkv_step_turns_join(e->turns);
    e->model = model;
    e->config = *config;
    e->config.peer = NULL; /* the pointer is not kept, because the peer may be closed before this engine */
    if (e->config.runner.max_tokens == 0) e->config.runner.max_tokens = fkv_model_about(model)->context;
    fkv_admission_init(&e->admission, config->max_queue, config->max_wait_s);
    (void)pthread_mutex_init(&e->lock, NULL);
    fkv_cond_init(&e->changed);
    fkv_status status = start_engine_thread(e);
    if (status != FKV_OK) {
        (void)pthread_cond_destroy(&e->changed);
        (void)pthread_mutex_destroy(&e->lock);
        fkv_step_turns_leave(e->turns);
        free(e);
        return status;
    }
    *engine = e;
    return FKV_OK;
}

bool fkv_engine_drain(fkv_engine *e, double seconds) {
    const double end = engine_seconds(NULL) + (seconds > 0.0 ? seconds : 0.0);
    (void)pthread_mutex_lock(&e->lock);
    e->draining = true;
    while (e->n_live > 0 && fkv_cond_wait_until(&e->changed, &e->lock, end)) {
    }
    bool done = e->n_live == 0;
    (void)pthread_mutex_unlock(&e->lock);
    return done;
}

void fkv_engine_close(fkv_engine *e) {
    if (e == NULL) return;
    (void)pthread_mutex_lock(&e->lock);
    e->closing = true;
    (void)pthread_cond_broadcast(&e->changed);
    (void)pthread_mutex_unlock(&e->lock);
    (void)pthread_join(e->thread, NULL);
    (void)pthread_cond_destroy(&e->changed);
    (void)pthread_mutex_destroy(&e->lock);
    fkv_step_turns_leave(e->turns);
    free(e);
}

/* ---- requests ---- */

/* Returns the predicted queue time, in seconds, of a request submitted now. The caller holds the lock. */
static double predicted_wait(const fkv_engine *e) { return e->inbox.n < e->free_slots ? 0.0 : e->base_wait_s + e->inbox_s; }

/* Returns the queued requests as seen by a tenant. The caller holds the lock. */
static fkv_tenant_load tenant_load(const fkv_engine *e, uint64_t tenant) {
    fkv_tenant_load load = fkv_tenant_load_init(tenant);
    for (const fkv_job *j = e->live; j != NULL; j = j->next_live)
        if (!j->started) fkv_tenant_load_add(&load, j->r.tenant, j->work_s);
    return load;
}

/* Hashes of all full prompt pages of a request that is being submitted. */
typedef struct prompt_pages {
    uint64_t *hashes; /* [n] */
    uint32_t n;
} prompt_pages;

static fkv_status submit_locked(fkv_engine *e, fkv_job *job, uint64_t hash, prompt_pages pages, uint64_t *id, double *retry_s) {
    job->n_expected = fkv_recent_match(&e->recent, pages.hashes, pages.n) * e->config.runner.page_tokens;
    job->work_s = fkv_forecast_job_seconds(&e->forecast, job);
    const fkv_tenant_load load = tenant_load(e, job->r.tenant);
    const fkv_queue_state queue = {.n_waiting = e->stats.waiting + e->inbox.n,
                                   .n_own = load.n_own,
                                   .n_tenants = fkv_tenant_load_tenants(&load),
                                   .wait_s = fkv_tenant_load_wait(&load, predicted_wait(e), e->next_start_s),
                                   .next_start_s = e->next_start_s,
                                   .unit_s = fkv_forecast_unit_seconds(&e->forecast),
                                   .learned = fkv_step_cost_ready(&e->forecast.cost)};
    const fkv_admission_request attempt = {.tenant = job->r.tenant, .hash = hash, .work_s = job->work_s, .now = job->arrived_at};
    double seconds = 5.0; /* retry delay during shutdown, in seconds, which gives another server time to take over */
    const bool ending = e->closing || e->draining;
    const fkv_admission_result result =
        ending ? FKV_ADMISSION_QUEUE_FULL : fkv_admission_decide(&e->admission, queue, attempt, &seconds);
    if (result != FKV_ADMISSION_ADMITTED) {
        if (retry_s != NULL) *retry_s = seconds;
        e->stats.refused_busy++;
        if (ending) return fkv_fail(FKV_BUSY, "the engine is shutting down");
        if (result == FKV_ADMISSION_QUEUE_FULL)
            return fkv_fail(FKV_BUSY, "%u requests are already waiting%s; retry in %.0f s", queue.n_waiting,
                            queue.n_waiting < e->config.max_queue ? " and earlier rejected requests have priority" : "",
                            ceil(seconds));
        return fkv_fail(FKV_BUSY, "the predicted wait of %.0f s exceeds the limit of %.0f s; retry in %.0f s", queue.wait_s,
                        e->config.max_wait_s, ceil(seconds));
    }
    job->first_attempt_at = attempt.now - seconds;
    job->id = *id = ++e->last_id;
    job->next_live = e->live;
    e->live = job;
    e->n_live++;
    e->stats.submitted++;
    e->inbox_s += attempt.work_s;
    fkv_recent_add(&e->recent, pages.hashes, pages.n);
    fkv_request_queue_add(&e->inbox, job);
    (void)pthread_cond_broadcast(&e->changed);
    return FKV_OK;
}

fkv_status fkv_engine_submit(fkv_engine *e, const fkv_request *request, uint64_t *id, double *retry_s) {
    FKV_REQUIRE(e != NULL && request != NULL && id != NULL, FKV_BAD_ARGUMENT, "fkv_engine_submit: engine, request or id is NULL");
    uint32_t max_new = 0;
    if (retry_s != NULL) *retry_s = 0.0;
    fkv_status status = fkv_scheduler_check(&e->scheduler, request, &max_new);
    if (status != FKV_OK) {
        (void)pthread_mutex_lock(&e->lock);
        e->stats.refused_size += status == FKV_POOL_FULL;
        (void)pthread_mutex_unlock(&e->lock);
        return status;
    }
    uint32_t page_tokens = e->config.runner.page_tokens;
    uint32_t max_keys = e->config.store != NULL ? (request->n_prompt + max_new) / page_tokens : 0;
    fkv_job *job = fkv_job_make(request, max_new, e->scheduler.max_token_bytes, max_keys);
    FKV_REQUIRE(job != NULL, FKV_NO_MEMORY, "out of memory allocating a request with %u prompt tokens", request->n_prompt);
    if (max_keys > 0 && fkv_tier_compute_keys(e->scheduler.tier.cache, page_tokens, request->tenant_name, job) != FKV_OK) {
        fkv_job_free(job);
        return fkv_fail(FKV_UNSUPPORTED, "the prefix store requires SHA-256, which is not available: disable the prefix store");
    }
    fkv_tier_announce(&e->scheduler.tier, job);
    job->arrived_at = engine_seconds(NULL);
    job->deadline_at = request->deadline_s > 0.0 ? job->arrived_at + request->deadline_s : INFINITY;
    const uint64_t hash = fkv_job_hash(job);
    prompt_pages pages = {.hashes = malloc(((request->n_prompt - 1) / page_tokens + 1) * sizeof *pages.hashes)};
    if (pages.hashes != NULL) /* excludes the last prompt token, which is always computed to obtain its logits */
        pages.n = fkv_prefix_hashes(request->tenant, request->prompt, request->n_prompt - 1, page_tokens, pages.hashes);
    (void)pthread_mutex_lock(&e->lock);
    status = submit_locked(e, job, hash, pages, id, retry_s);
    (void)pthread_mutex_unlock(&e->lock);
    free(pages.hashes);
    if (status != FKV_OK) fkv_job_free(job);
    return status;
}

void fkv_engine_cancel(fkv_engine *e, uint64_t id) {
    (void)pthread_mutex_lock(&e->lock);
    for (fkv_job *j = e->live; j != NULL; j = j->next_live)
        if (j->id == id) fkv_job_cancel(j, e->stats.steps);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- statistics ---- */

void fkv_engine_stats_now(fkv_engine *e, fkv_engine_stats *stats) {
    (void)pthread_mutex_lock(&e->lock);
    *stats = e->stats;
    stats->waiting += e->inbox.n;
    stats->predicted_wait_s = predicted_wait(e);
    (void)pthread_mutex_unlock(&e->lock);
    stats->plan = e->plan;
    stats->page_group = page_group(e);
    (void)fkv_cache_stats(fkv_runner_cache(e->runner), &stats->cache);
    update_store_stats(&e->scheduler.tier, &stats->store);
}

uint32_t fkv_engine_requests(fkv_engine *e, fkv_request_info *list, uint32_t capacity) {
    (void)pthread_mutex_lock(&e->lock);
    uint32_t n = fkv_min_u32(capacity, e->n_listed);
    memcpy(list, e->listed, n * sizeof *list);
    (void)pthread_mutex_unlock(&e->lock);
    return n;
}

uint32_t fkv_engine_pages(fkv_engine *e, fkv_page_info *list, uint32_t capacity) {
    (void)pthread_mutex_lock(&e->lock);
    uint32_t n = fkv_min_u32(capacity, e->n_pages);
    memcpy(list, e->pages, n * sizeof *list);
    e->pages_wanted = true;
    (void)pthread_mutex_unlock(&e->lock);
    return n;
}
