/* The engine's edge: its thread, its inbox, and what others may look at while it works.
 *
 * One lock guards the inbox, the list of all jobs and the published figures. It is held for a few copies and never over a step, a
 * callback or an allocation. The scheduler belongs to the thread alone, but for what fkv_scheduler_check() reads, which is
 * constant.
 */
#include "door.h"
#include "scheduler.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_SHOWN = 256 }; /* requests that fkv_engine_requests() can name */

struct fkv_engine {
    const fkv_model *model;
    fkv_engine_config config;
    fkv_runner *runner;
    fkv_runner_plan plan;
    fkv_scheduler scheduler;
    pthread_t thread;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* there is something new for the thread, or it has become idle */
    fkv_status opened;      /* with `message`, when `ready` */
    char message[512];
    bool ready;
    bool closing;
    bool draining;
    bool arrived; /* a page from the store of prefixes */
    fkv_waiting_line inbox;
    double inbox_s; /* that they take */
    fkv_job *live;  /* every job that was taken and is not done */
    uint32_t n_live;
    uint64_t last_id;
    fkv_engine_stats stats;
    fkv_door door;
    fkv_forecast forecast;
    double base_wait_s;   /* of a request that came after those that were taken */
    uint32_t free_places; /* that need no wait */
    uint32_t n_shown;
    fkv_request_info shown[MAX_SHOWN];
    bool pages_wanted; /* somebody looks at them */
    uint32_t n_pages;
    fkv_page_info pages[FKV_MAX_PAGES_SHOWN]; /* of the first group */
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
    /* Not sealed as a runner's: requests take up the prefixes of others at every page, and not at starts of spans alone. */
    const fkv_layer_config by_page = fkv_config_default().layer;
    c.runner.k = by_page.k;
    c.runner.v = by_page.v;
    c.runner.max_seqs = 8;
    c.runner.max_logit_rows = 8;
    return c;
}

static double now_seconds(void *user) {
    (void)user;
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static fkv_status run_forward(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    return fkv_runner_forward(((fkv_engine *)user)->runner, rows, n_rows, logits);
}

static const char *text_of(void *user, uint32_t token, size_t *n_bytes) {
    return fkv_token_text(((fkv_engine *)user)->model, token, false, n_bytes);
}

/* From a thread of the traffic with the store. */
static void page_arrived(void *user) {
    fkv_engine *e = user;
    (void)pthread_mutex_lock(&e->lock);
    e->arrived = true;
    (void)pthread_cond_broadcast(&e->changed);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- the thread ---- */

/* After the last event of a job. */
static void retire(void *user, fkv_job *job) {
    fkv_engine *e = user;
    (void)pthread_mutex_lock(&e->lock);
    fkv_job **link = &e->live;
    while (*link != job) link = &(*link)->next_live;
    *link = job->next_live;
    e->n_live--;
    (void)pthread_mutex_unlock(&e->lock);
    fkv_job_free(job);
}

static fkv_store_stats store_stats(const fkv_prefix_tier *tier) {
    fkv_store_stats stats = tier->stats;
    if (tier->traffic == NULL) return stats;
    fkv_traffic_figures figures;
    fkv_traffic_figures_now(tier->traffic, &figures);
    tier->store.figures(tier->store.self, &stats.figures);
    stats.written_pages = figures.written;
    stats.failed_writes = figures.failed;
    stats.write_seconds = figures.write_seconds;
    return stats;
}

static void publish(fkv_engine *e) {
    fkv_scheduler *s = &e->scheduler;
    fkv_store_stats store = store_stats(&s->tier);
    if (s->n_running == 0 && s->line.n == 0) s->stats.consistent = fkv_cache_consistent(s->device.cache);
    const double wait = fkv_scheduler_wait(s);
    (void)pthread_mutex_lock(&e->lock);
    uint64_t submitted = e->stats.submitted;
    uint64_t busy = e->stats.refused_busy;
    uint64_t size = e->stats.refused_size;
    e->stats = s->stats;
    e->stats.submitted = submitted;
    e->stats.refused_busy = busy;
    e->stats.refused_size = size;
    e->stats.store = store;
    e->stats.running = s->n_running;
    e->stats.waiting = s->line.n;
    e->forecast = fkv_scheduler_forecast(s);
    e->base_wait_s = wait;
    e->free_places = s->line.n == 0 ? s->device.max_seqs - s->n_seqs : 0;
    e->n_shown = fkv_scheduler_list(s, e->shown, MAX_SHOWN);
    if (e->pages_wanted || (s->n_running == 0 && s->line.n == 0)) { /* then this may be the last look for long */
        e->pages_wanted = false;
        e->n_pages = fkv_cache_pages(fkv_runner_cache(e->runner), 0, e->pages, FKV_MAX_PAGES_SHOWN);
    }
    (void)pthread_mutex_unlock(&e->lock);
}

/* Under the lock. Until the next page arrives; a request may end by itself meanwhile. */
static void wait_for_page(fkv_engine *e) {
    double end = now_seconds(NULL) + 0.02;
    struct timespec at = {.tv_sec = (time_t)end, .tv_nsec = (long)((end - floor(end)) * 1e9)};
    while (e->inbox.n == 0 && !e->closing && !e->arrived && pthread_cond_timedwait(&e->changed, &e->lock, &at) == 0) {
    }
}

/* Takes what came; false: it is time to end. Waits where there is nothing to do. */
static bool take_inbox(fkv_engine *e, bool idle) {
    (void)pthread_mutex_lock(&e->lock);
    while (idle && e->inbox.n == 0 && !e->closing && e->n_live == 0) {
        (void)pthread_cond_broadcast(&e->changed); /* whoever drains */
        (void)pthread_cond_wait(&e->changed, &e->lock);
    }
    if (idle && fkv_tier_busy(&e->scheduler.tier)) wait_for_page(e);
    e->arrived = false;
    fkv_waiting_line came = e->inbox;
    e->stats.waiting += came.n; /* until the next figures are published */
    e->base_wait_s += e->inbox_s;
    e->free_places -= fkv_min_u32(e->free_places, came.n);
    e->inbox = (fkv_waiting_line){0};
    e->inbox_s = 0.0;
    if (e->closing)
        for (fkv_job *j = e->live; j != NULL; j = j->next_live) fkv_job_cancel(j, e->stats.steps);
    bool go_on = !e->closing || e->n_live > 0;
    (void)pthread_mutex_unlock(&e->lock);
    while (came.first != NULL) {
        fkv_job *job = came.first;
        fkv_waiting_line_remove(&came, job);
        fkv_scheduler_accept(&e->scheduler, job);
    }
    return go_on;
}

static fkv_status open_tier(fkv_engine *e) {
    fkv_prefix_tier *tier = &e->scheduler.tier;
    if (e->config.store == NULL) return FKV_OK;
    *tier = (fkv_prefix_tier){.store = *e->config.store,
                              .cache = fkv_runner_cache(e->runner),
                              .page_tokens = e->config.runner.page_tokens,
                              .seconds = now_seconds};
    uint64_t packed_bytes = fkv_prefix_packed_bytes(tier->cache);
    tier->stats.buffer_bytes = fkv_traffic_bytes(packed_bytes);
    return fkv_traffic_open(e->config.store, packed_bytes, page_arrived, e, &tier->traffic);
}

/* Or sealed: its open pages are a window group. */
static bool is_windowed(const fkv_engine *e) {
    return fkv_model_about(e->model)->window != 0 || e->config.runner.max_kv != 0 || e->plan.cache.n_groups != 1;
}

static fkv_status open_inside(fkv_engine *e) {
    const fkv_model_info *about = fkv_model_about(e->model);
    fkv_runner_config c = e->config.runner;
    FKV_TRY(fkv_runner_plan_make(e->model, &c, &e->plan));
    const bool windowed = is_windowed(e); /* then a draft cannot always be taken back */
    if (windowed || e->config.draft_tokens == 0) {
        c.max_logit_rows = c.max_seqs;
        FKV_TRY(fkv_runner_plan_make(e->model, &c, &e->plan));
    }
    FKV_TRY(fkv_runner_open(e->model, &c, &e->runner));
    fkv_engine_device d = {.user = e,
                           .forward = run_forward,
                           .seconds = now_seconds,
                           .token_text = text_of,
                           .cache = fkv_runner_cache(e->runner),
                           .n_vocab = about->n_vocab,
                           .max_tokens = c.max_tokens,
                           .context = c.max_kv != 0 ? c.max_tokens : about->context,
                           .max_seqs = c.max_seqs,
                           .max_step_tokens = c.max_step_tokens,
                           .page_tokens = c.page_tokens,
                           .windowed = windowed,
                           .draft_tokens = windowed ? 0 : e->config.draft_tokens,
                           .draft_rows = c.max_logit_rows - c.max_seqs,
                           .n_end = about->n_end};
    memcpy(d.end, about->end, sizeof d.end);
    FKV_TRY(fkv_scheduler_open(&e->scheduler, &e->config, &d));
    e->scheduler.retire = retire;
    e->scheduler.retire_user = e;
    fkv_status status = open_tier(e);
    if (status != FKV_OK) fkv_scheduler_close(&e->scheduler);
    return status;
}

static void *work(void *user) {
    fkv_engine *e = user;
    fkv_status status = open_inside(e);
    if (status == FKV_OK) publish(e);
    (void)pthread_mutex_lock(&e->lock);
    e->opened = status;
    (void)strncpy(e->message, status != FKV_OK ? fkv_message() : "", sizeof e->message - 1);
    e->ready = true;
    (void)pthread_cond_broadcast(&e->changed);
    (void)pthread_mutex_unlock(&e->lock);
    if (status == FKV_OK) {
        for (bool worked = false; take_inbox(e, !worked);) {
            worked = fkv_scheduler_turn(&e->scheduler);
            publish(e);
        }
        fkv_traffic_close(e->scheduler.tier.traffic);
        fkv_scheduler_close(&e->scheduler);
    }
    fkv_runner_close(e->runner);
    return NULL;
}

/* ---- open, drain, close ---- */

static fkv_status start(fkv_engine *e) {
    FKV_REQUIRE(pthread_create(&e->thread, NULL, work, e) == 0, FKV_NO_MEMORY, "the engine's thread could not be started");
    (void)pthread_mutex_lock(&e->lock);
    while (!e->ready) (void)pthread_cond_wait(&e->changed, &e->lock);
    (void)pthread_mutex_unlock(&e->lock);
    if (e->opened == FKV_OK) return FKV_OK;
    (void)pthread_join(e->thread, NULL);
    return fkv_fail(e->opened, "%s", e->message); /* of the other thread */
}

fkv_status fkv_engine_open(const fkv_model *model, const fkv_engine_config *config, fkv_engine **engine) {
    FKV_REQUIRE(model != NULL && config != NULL && engine != NULL, FKV_BAD_ARGUMENT,
                "fkv_engine_open: model, config or engine is NULL");
    const fkv_runner_config *c = &config->runner;
    FKV_REQUIRE(config->draft_tokens <= FKV_MAX_DRAFT, FKV_BAD_CONFIG, "%u drafted tokens: at most %d", config->draft_tokens,
                FKV_MAX_DRAFT);
    FKV_REQUIRE((uint64_t)c->max_seqs + config->draft_tokens <= c->max_logit_rows, FKV_BAD_CONFIG,
                "%u rows of logits for %u answers at once and %u drafted tokens: raise max_logit_rows", c->max_logit_rows,
                c->max_seqs, config->draft_tokens);
    fkv_engine *e = calloc(1, sizeof *e);
    FKV_REQUIRE(e != NULL, FKV_NO_MEMORY, "no memory for an engine");
    e->model = model;
    e->config = *config;
    if (e->config.runner.max_tokens == 0) e->config.runner.max_tokens = fkv_model_about(model)->context;
    fkv_door_start(&e->door, config->max_queue, config->max_wait_s);
    (void)pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_t monotonic;
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&e->changed, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
    fkv_status status = start(e);
    if (status != FKV_OK) {
        (void)pthread_cond_destroy(&e->changed);
        (void)pthread_mutex_destroy(&e->lock);
        free(e);
        return status;
    }
    *engine = e;
    return FKV_OK;
}

bool fkv_engine_drain(fkv_engine *e, double seconds) {
    double end = now_seconds(NULL) + (seconds > 0.0 ? seconds : 0.0);
    struct timespec at = {.tv_sec = (time_t)end, .tv_nsec = (long)((end - floor(end)) * 1e9)};
    (void)pthread_mutex_lock(&e->lock);
    e->draining = true;
    while (e->n_live > 0 && pthread_cond_timedwait(&e->changed, &e->lock, &at) == 0) {
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
    free(e);
}

/* ---- requests ---- */

/* Under the lock. Seconds that a request would wait that came now. */
static double wait_now(const fkv_engine *e) { return e->inbox.n < e->free_places ? 0.0 : e->base_wait_s + e->inbox_s; }

static fkv_status enter(fkv_engine *e, fkv_job *job, uint64_t what, uint64_t *id, double *retry_s) {
    const fkv_line_state line = {
        .n_waiting = e->stats.waiting + e->inbox.n, .wait_s = wait_now(e), .learned = fkv_step_cost_learned(&e->forecast.cost)};
    const fkv_caller caller = {
        .tenant = job->r.tenant, .what = what, .work_s = fkv_forecast_seconds(&e->forecast, job), .now = job->arrived_at};
    double seconds = 5.0; /* a server may follow */
    const bool ending = e->closing || e->draining;
    const fkv_door_answer answer = ending ? FKV_DOOR_FULL : fkv_door_ask(&e->door, line, caller, &seconds);
    if (answer != FKV_DOOR_OPEN) {
        if (retry_s != NULL) *retry_s = seconds;
        e->stats.refused_busy++;
        if (ending) return fkv_fail(FKV_BUSY, "the engine is shutting down");
        if (answer == FKV_DOOR_FULL)
            return fkv_fail(FKV_BUSY, "%u requests wait already%s; try again in %.0f s", line.n_waiting,
                            line.n_waiting < e->config.max_queue ? ", and others were refused before this one" : "",
                            ceil(seconds));
        return fkv_fail(FKV_BUSY, "a request would wait %.0f s, at most %.0f are allowed; try again in %.0f s", line.wait_s,
                        e->config.max_wait_s, ceil(seconds));
    }
    job->asked_at = caller.now - seconds;
    job->id = *id = ++e->last_id;
    job->next_live = e->live;
    e->live = job;
    e->n_live++;
    e->stats.submitted++;
    e->inbox_s += caller.work_s;
    fkv_waiting_line_add(&e->inbox, job);
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
    FKV_REQUIRE(job != NULL, FKV_NO_MEMORY, "no memory for a request of %u tokens", request->n_prompt);
    if (max_keys > 0 && fkv_tier_name(e->scheduler.tier.cache, page_tokens, request->tenant_name, job) != FKV_OK) {
        fkv_job_free(job);
        return fkv_fail(FKV_UNSUPPORTED, "SHA-256 is not to be had: serve without a store of prefixes");
    }
    job->arrived_at = now_seconds(NULL);
    job->deadline_at = request->deadline_s > 0.0 ? job->arrived_at + request->deadline_s : INFINITY;
    const uint64_t what = fkv_job_hash(job);
    (void)pthread_mutex_lock(&e->lock);
    status = enter(e, job, what, id, retry_s);
    (void)pthread_mutex_unlock(&e->lock);
    if (status != FKV_OK) fkv_job_free(job);
    return status;
}

void fkv_engine_cancel(fkv_engine *e, uint64_t id) {
    (void)pthread_mutex_lock(&e->lock);
    for (fkv_job *j = e->live; j != NULL; j = j->next_live)
        if (j->id == id) fkv_job_cancel(j, e->stats.steps);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- figures ---- */

void fkv_engine_stats_now(fkv_engine *e, fkv_engine_stats *stats) {
    (void)pthread_mutex_lock(&e->lock);
    *stats = e->stats;
    stats->waiting += e->inbox.n;
    stats->predicted_wait_s = wait_now(e);
    (void)pthread_mutex_unlock(&e->lock);
    stats->plan = e->plan;
    (void)fkv_cache_stats(fkv_runner_cache(e->runner), &stats->cache);
}

uint32_t fkv_engine_requests(fkv_engine *e, fkv_request_info *list, uint32_t capacity) {
    (void)pthread_mutex_lock(&e->lock);
    uint32_t n = fkv_min_u32(capacity, e->n_shown);
    memcpy(list, e->shown, n * sizeof *list);
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
