/* See scheduler.h. */
#include "scheduler.h"

#include "../base/prefill_chunk.h"
#include "token_logprobs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    MIN_CHUNK = 16,          /* minimum number of prefill tokens per step, even if decoding alone exceeds the target step time */
    ROW_BLOCK = 16,          /* number of rows in a block of the matrix product; a partial block costs more per row */
    MIN_BLOCK_FILL = 12,     /* a block with at least this many rows is assumed to cost as much as a full block */
    UNIT_PROMPT = 256,       /* number of prompt tokens of a typical request */
    UNIT_NEW = 256,          /* max_new of a typical request, whose expected answer length is max_new * used_fraction */
    MAX_COMPARED = 16,       /* maximum number of queued jobs whose prompts are compared with a new prompt */
    ANSWER_PREFIX = 16,      /* maximum number of tokens between the last message and the answer in a chat template */
    SNAPSHOT_SPACING = 4096, /* distance, in tokens, between additional snapshots in a long prompt */
    MAX_OPEN_PAGES = 7 /* maximum number of open pages that a sequence holds between steps: the first page, the 4 pages of a span,
                          and one page before and after the span */
};
static const double SLOWDOWN_WINDOW_S =
    30.0; /* time constant, in seconds, of the decaying sums of measured and predicted times */
static const double USED_FRACTION_STEP = 0.05; /* minimum weight of the newest answer in the moving average used_fraction */

/* ---- open and validation ---- */

static size_t mask_words(uint32_t n_vocab) { return ((size_t)n_vocab + 31) / 32; }

fkv_status fkv_scheduler_open(fkv_scheduler *s, const fkv_engine_config *config, const fkv_engine_device *device) {
    const fkv_engine_device *d = device;
    memset(s, 0, sizeof *s);
    FKV_REQUIRE(isfinite(config->step_ms) && config->step_ms > 0.0, FKV_BAD_CONFIG, "step_ms is %g, but it must be positive",
                config->step_ms);
    FKV_REQUIRE(config->max_queue > 0 && config->max_tenants > 0 && config->default_new > 0, FKV_BAD_CONFIG,
                "max_queue, max_tenants and default_new must be at least 1");
    FKV_REQUIRE(config->max_wait_s >= 0.0 && config->ageing_s >= 0.0 && config->output_weight >= 0.0, FKV_BAD_CONFIG,
                "max_wait_s, ageing_s and output_weight must not be negative");
    FKV_REQUIRE(
        d->max_step_tokens > d->max_seqs, FKV_BAD_CONFIG,
        "max_step_tokens is %u, which leaves no tokens for prefill in a step that decodes %u sequences: raise max_step_tokens",
        d->max_step_tokens, d->max_seqs);
    s->config = *config;
    s->device = *d;
    s->cost = fkv_step_cost_init();
    s->used_fraction = 1.0;
    s->n_used_samples = 1;
    s->share = (fkv_fair_share){.tenants = calloc(config->max_tenants, sizeof(fkv_tenant)), .capacity = config->max_tenants};
    s->running = calloc(d->max_seqs, sizeof *s->running);
    s->rows = calloc(d->max_seqs, sizeof *s->rows);
    s->owners = calloc(d->max_seqs, sizeof *s->owners);
    s->candidates = calloc(d->max_seqs, sizeof *s->candidates);
    s->n_kept = calloc(d->max_seqs, sizeof *s->n_kept);
    s->masked = calloc(d->n_vocab, sizeof *s->masked);
    s->mask_bits = calloc(mask_words(d->n_vocab), sizeof *s->mask_bits);
    if (s->share.tenants == NULL || s->running == NULL || s->rows == NULL || s->owners == NULL || s->candidates == NULL ||
        s->n_kept == NULL || s->masked == NULL || s->mask_bits == NULL) {
        fkv_scheduler_close(s);
        return fkv_fail(FKV_NO_MEMORY, "out of memory allocating the scheduler");
    }
    for (uint32_t i = 0; i < d->n_vocab; i++) {
        size_t n = 0;
        (void)d->token_text(d->user, i, &n);
        if (n > s->max_token_bytes) s->max_token_bytes = n;
    }
    s->stats.max_request_tokens = fkv_min_u32(d->max_tokens, d->context);
    s->stats.default_new = fkv_min_u32(config->default_new, s->stats.max_request_tokens - 1);
    s->stats.max_tokens = d->max_tokens;
    s->stats.page_tokens = d->page_tokens;
    return FKV_OK;
}

void fkv_scheduler_close(fkv_scheduler *s) {
    FKV_ASSERT(s->n_running == 0 && s->queue.n == 0);
    free(s->share.tenants);
    free(s->running);
    free(s->rows);
    free(s->owners);
    free(s->candidates);
    free(s->n_kept);
    free(s->masked);
    free(s->mask_bits);
}

/* Returns the number of tokens that a fork must reserve: max_new tokens, one page for a private copy of the last prompt page, and
 * one page for the partially filled page at the end of the answer. In a cache with sliding-window layers, a fork shares no pages,
 * so it reserves the whole prompt and answer. Open pages of sealed layers are not shared either, so the fork reserves all of
 * them. */
static uint32_t fork_tokens(const fkv_scheduler *s, uint32_t n_prompt, uint32_t max_new) {
    const uint32_t page = s->device.page_tokens;
    const uint32_t open = s->device.has_sealed ? fkv_min_u32(n_prompt + max_new, MAX_OPEN_PAGES * page) : 0;
    return s->device.windowed ? n_prompt + max_new : fkv_max_u32(max_new + 2 * page, open);
}

fkv_status fkv_scheduler_check(const fkv_scheduler *s, const fkv_request *r, uint32_t *max_new) {
    uint32_t n = r->n != 0 ? r->n : 1;
    uint32_t most = s->stats.max_request_tokens;
    FKV_TRY(fkv_request_check(r, s->device.n_vocab));
    FKV_REQUIRE(r->n_prompt < most, FKV_POOL_FULL,
                "the prompt has %u tokens, but prompt and answer together are limited to %u tokens", r->n_prompt, most);
    uint32_t wanted = r->max_new;
    if (wanted == 0) wanted = fkv_min_u32(s->config.default_new, most - r->n_prompt);
    FKV_REQUIRE(
        wanted <= most - r->n_prompt, FKV_POOL_FULL,
        "%u prompt tokens plus %u new tokens make %llu tokens, but a request is limited to %u tokens: request at most %u new tokens",
        r->n_prompt, wanted, (unsigned long long)r->n_prompt + wanted, most, most - r->n_prompt);
    FKV_REQUIRE(n <= s->device.max_seqs, FKV_POOL_FULL, "n is %u, but the engine generates at most %u answers at the same time",
                n, s->device.max_seqs);
    uint64_t total = (uint64_t)r->n_prompt + wanted + (uint64_t)(n - 1) * fork_tokens(s, r->n_prompt, wanted);
    FKV_REQUIRE(total <= s->device.max_tokens, FKV_POOL_FULL,
                "%u answers of %u tokens each, plus the prompt, need a cache of %llu tokens, but the cache has only %u", n,
                wanted, (unsigned long long)total, s->device.max_tokens);
    *max_new = wanted;
    return FKV_OK;
}

/* ---- predictions and statistics ---- */

fkv_forecast fkv_scheduler_forecast(const fkv_scheduler *s) {
    const bool full = s->pages_limited && s->queue.n > 0 && s->n_seqs > 0;
    return (fkv_forecast){.cost = s->cost,
                          .slowdown = s->predicted_s > 0.0 ? s->taken_s / s->predicted_s : 1.0,
                          .used_fraction = s->used_fraction,
                          .batch = full ? s->n_seqs : s->device.max_seqs};
}

double fkv_forecast_job_seconds(const fkv_forecast *f, const fkv_job *job) {
    uint32_t done = job->phase == FKV_PHASE_WAITING ? fkv_max_u32(job->n_matched, job->n_expected)
                                                    : fkv_min_u32(job->answers[0].n_fed, job->r.n_prompt);
    double rest = 0.0;
    for (uint32_t i = 0; i < job->r.n; i++) {
        const fkv_answer *a = &job->answers[i];
        double left = job->r.max_new * f->used_fraction - a->n_new;
        if (!a->finished && left > 0.0) rest += left;
    }
    return f->slowdown * fkv_step_cost_request(&f->cost, done, job->r.n_prompt - done, rest, f->batch);
}

double fkv_forecast_unit_seconds(const fkv_forecast *f) {
    return f->slowdown * fkv_step_cost_request(&f->cost, 0, UNIT_PROMPT, (double)UNIT_NEW * f->used_fraction, f->batch);
}

double fkv_scheduler_next_start(const fkv_scheduler *s) {
    const fkv_forecast f = fkv_scheduler_forecast(s);
    double running = 0.0;
    double first = INFINITY; /* shortest predicted remaining machine time of all running jobs, in seconds */
    if (s->n_running == 0 || (s->queue.n == 0 && s->n_seqs < s->device.max_seqs)) return 0.0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        double seconds = fkv_forecast_job_seconds(&f, s->running[i]);
        running += seconds;
        if (seconds < first) first = seconds;
    }
    double soon = first * s->n_running; /* running jobs share the machine equally until the first of them ends */
    return soon < running ? soon : running;
}

double fkv_scheduler_wait(const fkv_scheduler *s) {
    const fkv_forecast f = fkv_scheduler_forecast(s);
    double ahead = 0.0;
    if (s->n_running == 0 || (s->queue.n == 0 && s->n_seqs < s->device.max_seqs)) return 0.0;
    for (const fkv_job *j = s->queue.first; j != NULL; j = j->next) ahead += fkv_forecast_job_seconds(&f, j);
    return ahead + fkv_scheduler_next_start(s);
}

uint32_t fkv_scheduler_list(const fkv_scheduler *s, fkv_request_info *list, uint32_t capacity) {
    uint32_t n = 0;
    double now = s->device.seconds(s->device.user);
    const fkv_job *waiting = s->queue.first;
    while (n < capacity && (n < s->n_running || waiting != NULL)) {
        const fkv_job *j = n < s->n_running ? s->running[n] : waiting;
        if (n >= s->n_running) waiting = waiting->next;
        uint32_t n_new = 0;
        for (uint32_t i = 0; i < j->r.n; i++) n_new += j->answers[i].n_new;
        list[n++] = (fkv_request_info){.id = j->id,
                                       .tenant = j->r.tenant,
                                       .phase = j->phase,
                                       .n_prompt = j->r.n_prompt,
                                       .n_cached = j->phase == FKV_PHASE_WAITING ? j->n_matched : j->n_cached,
                                       .n_computed = fkv_min_u32(j->answers[0].n_fed, j->r.n_prompt),
                                       .n_new = n_new,
                                       .max_new = j->r.max_new * j->r.n,
                                       .age_s = now - j->arrived_at};
    }
    return n;
}

/* ---- ending jobs ---- */

static void emit_event(const fkv_job *job, fkv_event event) {
    event.request = job->id;
    event.n_prompt = job->r.n_prompt;
    event.n_cached = job->n_cached;
    event.waited_s = job->admitted_at - job->arrived_at;
    if (event.text == NULL) event.text = "";
    job->r.event(job->r.user, &event);
}

/* Copies a failure message into the job, because the thread-local message may change before the event is emitted. */
static const char *keep_message(fkv_job *job, const char *message) {
    if (message != job->message) (void)snprintf(job->message, sizeof job->message, "%s", message);
    return job->message;
}

static void close_answer(fkv_scheduler *s, fkv_answer *a) {
    if (a->seq == 0) return;
    (void)fkv_seq_close(s->device.cache, a->seq);
    a->seq = 0;
    s->n_seqs--;
}

/* Ends an answer. If a step with drafts is open, its sequence is closed later, after its last pages have been inserted into the
 * prefix tree. */
static void end_answer(fkv_scheduler *s, fkv_job *job, uint32_t i, fkv_event event) {
    fkv_answer *a = &job->answers[i];
    if (event.message != NULL) event.message = keep_message(job, event.message);
    a->finished = true;
    a->reason = event.reason;
    job->n_unfinished--;
    s->stats.finished[event.reason]++;
    if (event.reason == FKV_FINISH_END || event.reason == FKV_FINISH_STOP || event.reason == FKV_FINISH_LENGTH)
        s->used_fraction +=
            fmax(USED_FRACTION_STEP, 1.0 / ++s->n_used_samples) * ((double)a->n_new / job->r.max_new - s->used_fraction);
    if (!s->is_verifying) close_answer(s, a);
    fkv_answer_text_end(&a->text);
    event.kind = FKV_EVENT_ANSWERED;
    event.answer = i;
    event.text = a->text.held;
    event.n_text = a->text.n_shown;
    event.n_new = a->n_new;
    emit_event(job, event);
}

/* Ends all answers and emits the DONE event. The job must already be removed from the queue and from the running list. */
static void end_job(fkv_scheduler *s, fkv_job *job, fkv_finish reason, const char *message) {
    uint32_t n_new = 0;
    if (reason == FKV_FINISH_CANCELLED && s->stats.steps - job->cancelled_at_step > s->stats.max_cancel_steps)
        s->stats.max_cancel_steps = s->stats.steps - job->cancelled_at_step;
    fkv_tier_end_job(&s->tier, job);
    for (uint32_t i = 0; i < job->r.n; i++) {
        if (!job->answers[i].finished) end_answer(s, job, i, (fkv_event){.reason = reason, .message = message});
        close_answer(s, &job->answers[i]);
        n_new += job->answers[i].n_new;
    }
    fkv_fair_share_leave(&s->share, job->tenant_slot);
    fkv_event done = {.kind = FKV_EVENT_DONE, .reason = job->answers[0].reason, .n_new = n_new};
    if (done.reason == FKV_FINISH_FAILED) done.message = job->message;
    emit_event(job, done);
    s->retire(s->retire_user, job);
}

static void end_running(fkv_scheduler *s, uint32_t at, fkv_finish reason, const char *message) {
    fkv_job *job = s->running[at];
    s->n_running--;
    memmove(&s->running[at], &s->running[at + 1], (s->n_running - at) * sizeof(fkv_job *));
    end_job(s, job, reason, message);
}

static bool end_reason(const fkv_job *job, double now, fkv_finish *reason) {
    *reason = FKV_FINISH_CANCELLED;
    if (atomic_load_explicit(&job->cancelled, memory_order_acquire)) return true;
    *reason = FKV_FINISH_DEADLINE;
    return now >= job->deadline_at;
}

static void end_cancelled_and_expired(fkv_scheduler *s, double now) {
    fkv_finish reason;
    for (uint32_t i = s->n_running; i-- > 0;)
        if (end_reason(s->running[i], now, &reason)) end_running(s, i, reason, NULL);
    for (fkv_job *job = s->queue.first; job != NULL;) {
        fkv_job *next = job->next;
        if (end_reason(job, now, &reason)) {
            fkv_request_queue_remove(&s->queue, job);
            job->admitted_at = now;
            end_job(s, job, reason, NULL);
        }
        job = next;
    }
}

/* ---- admission ---- */

/* Returns the configuration of a job's sequence. The last prompt token is excluded from prefix matching, because its logits must
 * be computed. */
static fkv_seq_config prompt_config(const fkv_job *job) {
    return (fkv_seq_config){.max_tokens = job->r.n_prompt + job->r.max_new,
                            .tenant = job->r.tenant,
                            .prompt = job->r.prompt,
                            .n_prompt = job->r.n_prompt - 1};
}

static uint32_t cached_tokens(const fkv_scheduler *s, const fkv_job *job) {
    fkv_seq_config config = prompt_config(job);
    uint32_t n = 0;
    return fkv_prefix_match(s->device.cache, &config, &n) == FKV_OK ? n : 0;
}

/* Returns the length, in tokens, of the longest common prefix of two prompts, rounded down to whole pages. */
static uint32_t common_tokens(const fkv_scheduler *s, const fkv_job *a, const fkv_job *b) {
    uint32_t most = fkv_min_u32(a->r.n_prompt, b->r.n_prompt) - 1;
    uint32_t n = 0;
    while (n < most && a->r.prompt[n] == b->r.prompt[n]) n++;
    return n - n % s->device.page_tokens;
}

/* Returns the number of prompt tokens that this job is expected to reuse, because an earlier job has computed or will compute
 * them. */
static uint32_t expected_tokens(const fkv_scheduler *s, const fkv_job *job) {
    uint32_t most = job->n_matched;
    for (uint32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->phase == FKV_PHASE_PREFILL && s->running[i]->r.tenant == job->r.tenant)
            most = fkv_max_u32(most, common_tokens(s, job, s->running[i]));
    uint32_t n_compared = 0;
    for (const fkv_job *j = s->queue.first; j != NULL && n_compared < MAX_COMPARED; j = j->next, n_compared++)
        if (j->r.tenant == job->r.tenant) most = fkv_max_u32(most, common_tokens(s, job, j));
    return most;
}

void fkv_scheduler_accept(fkv_scheduler *s, fkv_job *job) {
    job->tenant_slot = fkv_fair_share_join(&s->share, job->r.tenant, job->r.weight);
    job->n_matched = cached_tokens(s, job);
    job->n_expected = expected_tokens(s, job);
    fkv_request_queue_add(&s->queue, job);
}

/* Returns true if a running job is computing the next prompt page of this job. In a cache with sealed layers, also makes the
 * prefill of the running job stop at the end of the common prefix, so that the open pages at this position are inserted into the
 * prefix tree. */
static bool shares_pending_page(const fkv_scheduler *s, const fkv_job *job) {
    for (uint32_t i = 0; i < s->n_running; i++) {
        fkv_job *other = s->running[i];
        if (other->phase != FKV_PHASE_PREFILL || other->r.tenant != job->r.tenant) continue;
        uint32_t common = common_tokens(s, job, other);
        if (common <= job->n_matched || other->answers[0].n_fed >= common) continue;
        if (s->device.has_sealed && other->junction <= other->answers[0].n_fed) other->junction = common;
        return true;
    }
    return false;
}

static void close_sequences(fkv_scheduler *s, fkv_job *job) {
    for (uint32_t i = 0; i < job->r.n; i++) close_answer(s, &job->answers[i]);
}

/* Opens a sequence and a sampler for each answer. If this fails with FKV_POOL_FULL or FKV_SEQS_FULL, the job stays queued. */
static fkv_status open_sequences(fkv_scheduler *s, fkv_job *job) {
    fkv_seq_config config = prompt_config(job);
    uint32_t n_shared = 0;
    fkv_status status = FKV_OK;
    job->junction = 0;
    if (s->device.has_states || s->device.has_sealed) {
        (void)fkv_prefix_overlap(s->device.cache, &config, &job->junction);
        job->junction = fkv_max_u32(job->junction, job->store_known * s->device.page_tokens);
    }
    for (uint32_t i = 0; i < job->r.n && status == FKV_OK; i++) {
        status = fkv_seq_open(s->device.cache, &config, &job->answers[i].seq, i == 0 ? &n_shared : NULL);
        if (status == FKV_OK) s->n_seqs++;
        config = (fkv_seq_config){.max_tokens = fork_tokens(s, job->r.n_prompt, job->r.max_new), .tenant = job->r.tenant};
    }
    for (uint32_t i = 0; i < job->r.n && status == FKV_OK; i++) {
        fkv_sampler_config sampler = job->r.sampler;
        sampler.seed += i;
        if (job->answers[i].sampler != NULL) continue;
        status = fkv_sampler_open(&sampler, s->device.n_vocab, &job->answers[i].sampler);
        const bool repeats = sampler.repetition_penalty != 0.0f && sampler.repetition_penalty != 1.0f;
        if (status == FKV_OK && repeats) /* unlike the other penalties, the repetition penalty also applies to prompt tokens */
            status = fkv_sampler_note(job->answers[i].sampler, job->r.prompt, job->r.n_prompt);
    }
    if (status != FKV_OK) {
        (void)keep_message(job, fkv_message());
        close_sequences(s, job);
    }
    job->n_cached = n_shared;
    job->answers[0].n_fed = job->answers[0].n_inserted = n_shared;
    return status;
}

static void start_job(fkv_scheduler *s, fkv_job *job, double now) {
    fkv_request_queue_remove(&s->queue, job);
    job->phase = FKV_PHASE_PREFILL;
    job->admitted_at = now;
    s->running[s->n_running++] = job;
    s->stats.prompt_tokens += job->r.n_prompt;
    s->stats.cached_tokens += job->n_cached;
    s->stats.page_waits += job->waits_for_page;
    fkv_fair_share_serve(&s->share, job->tenant_slot, (double)(job->r.n_prompt - job->n_cached));
    emit_event(job, (fkv_event){.kind = FKV_EVENT_STARTED});
}

static void admit_jobs(fkv_scheduler *s, double now) {
    fkv_job *job;
    s->pages_limited = false;
    while (s->n_seqs < s->device.max_seqs &&
           (job = fkv_request_queue_next(&s->queue, &s->share, now, s->config.ageing_s, s->turn)) != NULL) {
        job->n_matched = cached_tokens(s, job);
        if (shares_pending_page(s, job)) {
            job->waits_for_page = true;
            job->skipped_turn = s->turn;
            continue;
        }
        if (fkv_tier_delays(&s->tier, job, &s->cost)) {
            job->skipped_turn = s->turn;
            continue;
        }
        fkv_status status = s->n_seqs + job->r.n <= s->device.max_seqs ? open_sequences(s, job) : FKV_SEQS_FULL;
        if (status == FKV_OK) {
            start_job(s, job, now);
        } else if (s->n_running > 0 && (status == FKV_POOL_FULL || status == FKV_SEQS_FULL)) {
            s->pages_limited = true;
            break; /* later jobs must not use the memory that this job is waiting for */
        } else {
            fkv_request_queue_remove(&s->queue, job);
            job->admitted_at = now;
            end_job(s, job, FKV_FINISH_FAILED, job->message);
        }
    }
}

/* ---- steps ---- */

static void add_step_row(fkv_scheduler *s, fkv_job *job, uint32_t answer, uint32_t n, fkv_logits logits) {
    const fkv_answer *a = &job->answers[answer];
    s->rows[s->n_rows] = (fkv_tokens){a->seq, a->tokens + a->n_fed, n, logits};
    s->owners[s->n_rows++] = (fkv_row_owner){job, answer};
}

/* Looks up a draft for each decode row. The draft is stored after the tokens of the answer, where sampled tokens overwrite it. In
 * a cache with state layers, drafts end at page boundaries, because a snapshot is possible only if a step ends there. */
static void find_drafts(fkv_scheduler *s) {
    for (uint32_t i = 0; i < s->n_rows; i++) {
        fkv_job *job = s->owners[i].job;
        fkv_answer *a = &job->answers[s->owners[i].answer];
        uint32_t end = job->r.n_prompt + a->n_new;
        uint32_t most = fkv_min_u32(s->device.draft_tokens, job->r.max_new - a->n_new - 1);
        const uint32_t page = s->device.page_tokens;
        if (s->device.has_states) most = fkv_min_u32(most, (page - (a->n_fed + 1) % page) % page);
        uint32_t n = most > 0 ? fkv_draft_find(a->tokens, end, most, a->tokens + end) : 0;
        a->drafts.has_draft = n > 0;
        s->candidates[i] = (fkv_draft_candidate){.acceptance = a->drafts.acceptance, .n_proposed = n};
    }
}

/* Adds draft tokens to decode rows if the expected gain exceeds the cost. Each draft token costs as much as a decode row, because
 * it needs logits. Drafts may fill the last partial row block but never start a new block. */
static void add_drafts(fkv_scheduler *s, fkv_step_work *work) {
    s->n_drafted = 0;
    if (s->device.draft_tokens == 0 || s->n_rows == 0) return;
    find_drafts(s);
    uint32_t most = fkv_min_u32(s->device.draft_rows, fkv_ceil_div(s->n_rows, ROW_BLOCK) * ROW_BLOCK - s->n_rows);
    most = fkv_min_u32(most, s->device.max_step_tokens - s->n_rows);
    const double without = fkv_step_cost_predict(&s->cost, *work);
    double extra[FKV_MAX_STEP_DRAFTS + 1];
    for (uint32_t n = 0; n <= most; n++) {
        fkv_step_work with = {work->n_rows + n, work->n_prefill, work->history * (1.0 + (double)n / s->n_rows)};
        extra[n] = fkv_step_cost_predict(&s->cost, with) - without;
    }
    s->n_drafted = fkv_draft_choose(s->candidates, s->n_rows, extra, most, without / s->n_rows);
    work->n_rows += s->n_drafted;
    for (uint32_t i = 0; i < s->n_rows; i++) {
        const uint32_t n = s->candidates[i].n_chosen;
        if (n == 0) continue;
        const fkv_answer *a = &s->owners[i].job->answers[s->owners[i].answer];
        work->history += fkv_step_history(a->n_fed + 1, n);
        s->rows[i].n_tokens += n;
        s->rows[i].logits = FKV_LOGITS_ALL;
    }
}

/* Returns n rounded so that the total number of rows in the step, before + n, is a multiple of ROW_BLOCK if possible. */
static uint32_t round_to_row_blocks(uint32_t before, uint32_t n, uint32_t most) {
    const uint32_t over = (before + n) % ROW_BLOCK;
    if (over >= MIN_BLOCK_FILL && n + (ROW_BLOCK - over) <= most) return n + (ROW_BLOCK - over);
    return n > over ? n - over : 0;
}

/* Returns true if a snapshot of the recurrent state is kept at position `at` of the prompt, a multiple of page_tokens. Snapshots
 * are kept at the last page boundary before each position that the request lists, and at the end of the pages shared with earlier
 * prompts. Later prompts usually repeat this prompt except for the last tokens, which introduce the answer, so a snapshot is also
 * kept at the last page boundary before those tokens. Long prompts keep an additional snapshot every SNAPSHOT_SPACING tokens.
 */
static bool is_snapshot(const fkv_scheduler *s, const fkv_job *job, uint32_t at) {
    const uint32_t last = job->r.n_prompt > ANSWER_PREFIX ? job->r.n_prompt - ANSWER_PREFIX : 0;
    if (at == job->junction) return true;
    for (uint32_t i = 0; i < job->r.n_snapshots; i++)
        if (at <= job->r.snapshots[i] && job->r.snapshots[i] - at < s->device.page_tokens) return true;
    return at <= last && (at + s->device.page_tokens > last || at % SNAPSHOT_SPACING == 0);
}

/* Returns true if sealed layers no longer hold the open pages before position `at`, a multiple of page_tokens, when the sequence
 * has `length` tokens. If the prefix is inserted at this length, later prompts cannot share it up to `at`. */
static bool is_sealed_over(const fkv_scheduler *s, uint32_t at, uint32_t length) {
    const uint32_t span = FKV_SPAN_PAGES * s->device.page_tokens;
    return at % span != 0 && length >= s->device.page_tokens && at / span < (length - s->device.page_tokens) / span;
}

/* Returns the length of a prefill chunk that starts at prompt position `from`. The length is n tokens, unless the chunk contains
 * a snapshot position; the chunk then ends at the first snapshot position. In a cache with sealed layers, the chunk also ends
 * where the prompt diverges from other prompts if the open pages at this position would otherwise be released too early to be
 * shared. */
static uint32_t cut_at_snapshot(const fkv_scheduler *s, const fkv_job *job, uint32_t from, uint32_t n) {
    const uint32_t page = s->device.page_tokens;
    const bool diverges = s->device.has_sealed && job->junction > from && job->junction < from + n;
    if (diverges && is_sealed_over(s, job->junction, from + n)) n = job->junction - from;
    for (uint32_t at = (from / page + 1) * page; s->device.has_states && at < from + n; at += page)
        if (is_snapshot(s, job, at)) return at - from;
    return n;
}

/* Builds the next step: decode rows first, then prefill in admission order. */
static fkv_step_work build_step(fkv_scheduler *s) {
    fkv_step_work work = {0};
    s->n_rows = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        fkv_job *job = s->running[i];
        for (uint32_t k = 0; job->phase == FKV_PHASE_DECODE && k < job->r.n; k++) {
            if (job->answers[k].finished) continue;
            work.n_rows++;
            work.history += fkv_step_history(job->answers[k].n_fed, 1);
            add_step_row(s, job, k, 1, FKV_LOGITS_LAST);
        }
    }
    add_drafts(s, &work);
    bool first = true;
    uint32_t left = s->device.max_step_tokens - s->n_rows - s->n_drafted;
    for (uint32_t i = 0; i < s->n_running && left > 0; i++) {
        fkv_job *job = s->running[i];
        if (job->phase != FKV_PHASE_PREFILL) continue;
        uint32_t from = job->answers[0].n_fed;
        uint32_t most = fkv_min_u32(left, job->r.n_prompt - from);
        uint32_t n = fkv_step_cost_max_prefill(&s->cost, work, from, most, s->config.step_ms / 1000.0);
        if (n < most)
            n = round_to_row_blocks(s->device.max_step_tokens - left, n, most);
        else
            n = fkv_prefill_chunk(s->device.page_tokens, from, job->r.n_prompt - from, n);
        if (n == 0 && first) n = fkv_min_u32(most, MIN_CHUNK);
        if (n == 0) break;
        n = cut_at_snapshot(s, job, from, n);
        first = false;
        work.n_prefill += n;
        work.history += fkv_step_history(from, n);
        left -= n;
        add_step_row(s, job, 0, n, from + n == job->r.n_prompt ? FKV_LOGITS_LAST : FKV_LOGITS_NONE);
    }
    return work;
}

/* Inserts newly filled pages into the prefix tree. A failure is ignored, because its only effect is that later requests cannot
 * reuse the pages.
 *
 * If the cache has state layers and the last page is full, fkv_prefix_insert() also stores the recurrent state as a snapshot.
 * During prefill, only the states at snapshot positions are stored; at other page boundaries, the insertion of the last page is
 * postponed. During decoding, the newest state at a page boundary is kept as the answer's rolling snapshot and replaces the
 * previous one.
 */
static void insert_prefix(fkv_scheduler *s, fkv_job *job, fkv_answer *a) {
    const uint32_t page = s->device.page_tokens;
    if (a->n_fed / page == a->n_inserted / page) return;
    const bool at_boundary = s->device.has_states && a->n_fed % page == 0;
    const bool is_prefill = a->n_fed <= job->r.n_prompt;
    const bool keeps_state = !is_prefill || is_snapshot(s, job, a->n_fed);
    a->n_inserted = at_boundary && !keeps_state ? a->n_fed - 1 : a->n_fed;
    (void)fkv_prefix_insert(s->device.cache, a->seq, a->tokens, a->n_inserted);
    if (at_boundary && keeps_state && is_prefill) fkv_tier_note_end(&s->tier, job, a->n_fed / page);
    if (!at_boundary || is_prefill) return;
    if (a->rolling != 0) (void)fkv_snapshot_drop(s->device.cache, job->r.tenant, a->tokens, a->rolling);
    a->rolling = a->n_fed;
}

/* Called after a prefill chunk that started at prompt position `from`. Records the prefixes whose open pages should be written to
 * the prefix store: the prefix in common with other prompts, and the longest prefix that a repetition of this prompt can share.
 * In a cache with state layers, insert_prefix() records the prefixes that end at snapshots instead. */
static void note_open_pages(fkv_scheduler *s, fkv_job *job, uint32_t from) {
    const uint32_t page = s->device.page_tokens;
    const uint32_t n_fed = job->answers[0].n_fed;
    if (!s->device.has_sealed || s->device.has_states) return;
    if (job->junction > from && job->junction <= n_fed) fkv_tier_note_end(&s->tier, job, job->junction / page);
    if (n_fed == job->r.n_prompt) fkv_tier_note_end(&s->tier, job, (n_fed - 1) / page);
}

static bool is_end_token(const fkv_scheduler *s, uint32_t token) {
    for (uint32_t i = 0; i < s->device.n_end; i++)
        if (s->device.end[i] == token) return true;
    return false;
}

/* Returns the logits with all masked tokens set to -INFINITY. Returns NULL if no token is allowed or if computing the mask
 * failed. In the second case, *why receives the error message. */
static const float *mask_logits(fkv_scheduler *s, const fkv_job *job, uint32_t i, const float *logits, const char **why) {
    const fkv_answer *a = &job->answers[i];
    uint32_t n_vocab = s->device.n_vocab;
    uint32_t any = 0;
    memset(s->mask_bits, 0, mask_words(n_vocab) * sizeof *s->mask_bits);
    *why = job->r.mask(job->r.mask_user, i, a->tokens + job->r.n_prompt, a->n_new, s->mask_bits, n_vocab);
    for (uint32_t t = 0; t < n_vocab; t++) s->masked[t] = s->mask_bits[t / 32] >> t % 32 & 1 ? logits[t] : -INFINITY;
    for (size_t word = 0; word < mask_words(n_vocab); word++) any |= s->mask_bits[word];
    return *why == NULL && any != 0 ? s->masked : NULL;
}

/* Samples the next token of an answer and emits its event. */
static void sample_token(fkv_scheduler *s, fkv_job *job, uint32_t i, const float *logits) {
    fkv_answer *a = &job->answers[i];
    fkv_logprob top[FKV_MAX_LOGPROBS];
    fkv_event event = {.kind = FKV_EVENT_TOKEN, .answer = i, .top = top};
    const char *why = NULL;
    const float *from = job->r.mask != NULL ? mask_logits(s, job, i, logits, &why) : logits;
    if (from == NULL && why == NULL) {
        end_answer(s, job, i, (fkv_event){.reason = FKV_FINISH_END});
        return;
    }
    if (from == NULL || fkv_sample(a->sampler, from, &event.token) != FKV_OK) {
        end_answer(s, job, i, (fkv_event){.reason = FKV_FINISH_FAILED, .message = why != NULL ? why : fkv_message()});
        return;
    }
    if (!job->r.ignore_end && is_end_token(s, event.token)) {
        end_answer(s, job, i, (fkv_event){.reason = FKV_FINISH_END});
        return;
    }
    a->tokens[job->r.n_prompt + a->n_new++] = event.token;
    s->stats.new_tokens++;
    fkv_fair_share_serve(&s->share, job->tenant_slot, s->config.output_weight);
    if (job->r.logprobs) {
        event.logprob = fkv_token_logprobs(logits, s->device.n_vocab, event.token, top, job->r.n_top);
        event.n_top = fkv_min_u32(job->r.n_top, s->device.n_vocab);
    }
    size_t n_bytes = 0;
    const char *bytes = s->device.token_text(s->device.user, event.token, &n_bytes);
    const char *stop = fkv_answer_text_add(&a->text, job->stops, bytes, n_bytes);
    event.text = a->text.held;
    event.n_text = a->text.n_shown;
    event.n_new = a->n_new;
    emit_event(job, event);
    if (stop != NULL)
        end_answer(s, job, i, (fkv_event){.reason = FKV_FINISH_STOP, .stop = stop});
    else if (a->n_new == job->r.max_new)
        end_answer(s, job, i, (fkv_event){.reason = FKV_FINISH_LENGTH});
}

/* Starts decoding after prefill: replaces the placeholder sequences with forks of answer 0 and samples the first token of each
 * answer. */
static void start_answers(fkv_scheduler *s, fkv_job *job, const float *logits) {
    job->phase = FKV_PHASE_DECODE;
    for (uint32_t i = 1; i < job->r.n; i++) {
        fkv_answer *a = &job->answers[i];
        (void)fkv_seq_close(s->device.cache, a->seq);
        a->seq = 0;
        s->n_seqs--;
        fkv_status status = fkv_seq_fork(s->device.cache, job->answers[0].seq, job->r.n_prompt + job->r.max_new, &a->seq);
        if (status != FKV_OK) {
            end_answer(s, job, i, (fkv_event){.reason = FKV_FINISH_FAILED, .message = fkv_message()});
            continue;
        }
        s->n_seqs++;
        a->n_fed = a->n_inserted = job->r.n_prompt;
    }
    for (uint32_t i = 0; i < job->r.n; i++)
        if (!job->answers[i].finished) sample_token(s, job, i, logits);
}

/* Samples the next tokens of an answer from the logits of its decode row: one token, plus one for each accepted draft token.
 * Returns the number of accepted draft tokens. */
static uint32_t sample_decode_row(fkv_scheduler *s, fkv_job *job, uint32_t answer, const float *logits, uint32_t n_drafted) {
    fkv_answer *a = &job->answers[answer];
    const bool has_draft = a->drafts.has_draft;
    uint32_t n_accepted = 0;
    for (;;) {
        uint32_t at = job->r.n_prompt + a->n_new;
        uint32_t draft_token = n_accepted < n_drafted || (n_drafted == 0 && has_draft) ? a->tokens[at] : 0;
        sample_token(s, job, answer, logits + (size_t)n_accepted * s->device.n_vocab);
        if (n_drafted == 0 && has_draft && !a->finished) fkv_draft_update(&a->drafts, 1, a->tokens[at] == draft_token);
        if (n_accepted == n_drafted || a->finished || a->tokens[at] != draft_token) break;
        n_accepted++;
        a->n_fed++;
    }
    if (n_drafted == 0) return 0;
    s->stats.drafted_tokens += n_drafted;
    s->stats.accepted_tokens += n_accepted;
    fkv_draft_update(&a->drafts, n_drafted, n_accepted);
    return n_accepted;
}

static uint32_t row_drafts(const fkv_tokens *row) { return row->logits == FKV_LOGITS_ALL ? row->n_tokens - 1 : 0; }

/* Samples the tokens of all rows with drafts, then ends the step. Rejected draft tokens are not added to the cache. Adds the time
 * needed to end the step to *seconds. */
static fkv_status accept_drafts(fkv_scheduler *s, const float *logits, double *seconds) {
    s->is_verifying = true;
    for (uint32_t i = 0; i < s->n_rows; i++) {
        fkv_job *job = s->owners[i].job;
        const uint32_t n_drafted = row_drafts(&s->rows[i]);
        s->n_kept[i] = s->rows[i].n_tokens;
        if (n_drafted > 0) {
            job->answers[s->owners[i].answer].n_fed++;
            s->n_kept[i] = 1 + sample_decode_row(s, job, s->owners[i].answer, logits, n_drafted);
        }
        if (s->rows[i].logits != FKV_LOGITS_NONE) logits += (size_t)(1 + n_drafted) * s->device.n_vocab;
    }
    s->is_verifying = false;
    if (s->device.turns != NULL) fkv_step_turns_begin(s->device.turns);
    const double start_at = s->device.seconds(s->device.user);
    const fkv_status status = s->device.accept(s->device.user, s->n_kept);
    *seconds += s->device.seconds(s->device.user) - start_at;
    if (s->device.turns != NULL) fkv_step_turns_end(s->device.turns);
    return status;
}

static void process_logits(fkv_scheduler *s, const float *logits) {
    for (uint32_t i = 0; i < s->n_rows; i++) {
        fkv_job *job = s->owners[i].job;
        fkv_answer *a = &job->answers[s->owners[i].answer];
        const float *row = logits;
        uint32_t n_drafted = row_drafts(&s->rows[i]);
        if (s->rows[i].logits != FKV_LOGITS_NONE) logits += (size_t)(1 + n_drafted) * s->device.n_vocab;
        if (n_drafted == 0) a->n_fed += s->rows[i].n_tokens;
        insert_prefix(s, job, a);
        if (n_drafted > 0) { /* accept_drafts() has already sampled the tokens */
            if (a->finished) close_answer(s, a);
            continue;
        }
        if (job->phase == FKV_PHASE_PREFILL) {
            s->stats.computed_tokens += s->rows[i].n_tokens;
            note_open_pages(s, job, a->n_fed - s->rows[i].n_tokens);
        }
        if (s->rows[i].logits == FKV_LOGITS_NONE) continue;
        if (job->phase == FKV_PHASE_PREFILL)
            start_answers(s, job, row);
        else
            (void)sample_decode_row(s, job, s->owners[i].answer, row, 0);
    }
    for (uint32_t i = s->n_running; i-- > 0;) {
        fkv_tier_send(&s->tier, s->running[i]);
        if (s->running[i]->n_unfinished == 0) end_running(s, i, FKV_FINISH_END, NULL);
    }
}

static void fail_step(fkv_scheduler *s) {
    char message[sizeof s->running[0]->message]; /* copied, because ending a job may overwrite fkv_message() */
    (void)snprintf(message, sizeof message, "%s", fkv_message());
    for (uint32_t i = s->n_running; i-- > 0;) end_running(s, i, FKV_FINISH_FAILED, message);
}

fkv_status fkv_scheduler_step(fkv_scheduler *s, uint32_t n_rows, const float **logits, double *seconds) {
    if (s->device.turns != NULL) fkv_step_turns_begin(s->device.turns);
    const double start_at = s->device.seconds(s->device.user);
    const fkv_status status = s->n_drafted > 0 ? s->device.verify(s->device.user, s->rows, n_rows, logits)
                                               : s->device.forward(s->device.user, s->rows, n_rows, logits);
    *seconds = s->device.seconds(s->device.user) - start_at;
    if (s->device.turns != NULL) fkv_step_turns_end(s->device.turns);
    return status;
}

bool fkv_scheduler_turn(fkv_scheduler *s) {
    const double turn_at = s->device.seconds(s->device.user);
    s->turn++;
    end_cancelled_and_expired(s, turn_at);
    fkv_tier_poll(&s->tier);
    admit_jobs(s, turn_at);
    fkv_step_work work = build_step(s);
    if (s->n_rows == 0) return false;
    const float *logits = NULL;
    double seconds = 0.0;
    if (fkv_scheduler_step(s, s->n_rows, &logits, &seconds) != FKV_OK ||
        (s->n_drafted > 0 && accept_drafts(s, logits, &seconds) != FKV_OK)) {
        fail_step(s);
        return true;
    }
    const double predicted = fkv_step_cost_predict(&s->cost, work);
    s->stats.steps++;
    s->stats.step_seconds += seconds;
    s->stats.predicted_seconds += predicted;
    process_logits(s, logits);
    const double end_at = s->device.seconds(s->device.user);
    end_cancelled_and_expired(s, end_at); /* releases the pages of requests that were cancelled during the step */
    const double taken = fkv_step_cost_clamp(&s->cost, predicted, end_at - turn_at);
    const double keep = exp(-taken / SLOWDOWN_WINDOW_S);
    s->predicted_s = s->predicted_s * keep + predicted;
    s->taken_s = s->taken_s * keep + taken;
    fkv_step_cost_update(&s->cost, work, seconds);
    return true;
}
