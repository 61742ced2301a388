/* See prefix_tier.h. */
#include "prefix_tier.h"

#include "../base/store_queries.h"

#include <stdio.h>

enum { ANNOUNCED_STATES = 32 }; /* maximum number of snapshot keys that are announced to the store in one call */

static const double MAX_FIRST_WAIT_S = 10.0; /* longest wait for a restore, in seconds, if the compute time is not known yet */
static const double ASK_AGAIN_S = 0.002;     /* polling interval while the store determines which pages it has, in seconds */
static const double PAGE_TIME_STEP = 0.2;    /* weight of the newest measurement in the moving averages of the read times */
static const double PAGE_TIME_DECAY = 0.98; /* each declined restore multiplies the estimated read times by this factor, so that a
                                               slow store is eventually tried again */

fkv_status fkv_tier_compute_keys(const fkv_cache *cache, uint32_t page_tokens, const char *tenant_name, fkv_job *job) {
    char number[32];
    (void)snprintf(number, sizeof number, "%llu", (unsigned long long)job->r.tenant);
    const char *name = tenant_name != NULL ? tenant_name : number;
    FKV_TRY(fkv_prefix_root(cache, name, strlen(name), &job->root));
    for (uint32_t i = 0; i < job->r.n_prompt / page_tokens; i++) {
        FKV_TRY(fkv_prefix_key(i > 0 ? &job->keys[i - 1] : &job->root, job->r.prompt + (size_t)i * page_tokens, page_tokens,
                               &job->keys[i]));
        job->n_keys = i + 1;
    }
    return FKV_OK;
}

/* Returns the maximum number of prompt pages that can be restored. The last prompt token is always computed. */
static uint32_t max_restored(const fkv_prefix_tier *t, const fkv_job *job) {
    return fkv_min_u32(job->n_keys, (job->r.n_prompt - 1) / t->page_tokens);
}

void fkv_tier_announce(const fkv_prefix_tier *t, const fkv_job *job) {
    fkv_page_key states[ANNOUNCED_STATES];
    if (t->store.expect == NULL || job->n_keys == 0) return;
    t->store.expect(t->store.self, job->keys, job->n_keys);
    for (uint32_t i = 0; t->kinds.has_states && i < job->n_keys; i += ANNOUNCED_STATES) {
        uint32_t n = 0;
        for (; n < ANNOUNCED_STATES && i + n < job->n_keys; n++)
            states[n] = fkv_part_key((fkv_prefix_part){FKV_PART_STATE, i + n}, job->keys);
        t->store.expect(t->store.self, states, n);
    }
    const uint32_t most = max_restored(t, job);
    const fkv_part_kinds open_pages = {.has_open_pages = t->kinds.has_open_pages};
    for (uint32_t i = 0; i < fkv_parts_count(open_pages, most); i++) {
        const fkv_page_key key = fkv_part_key(fkv_parts_get(open_pages, most, i), job->keys);
        t->store.expect(t->store.self, &key, 1);
    }
}

/* ---- restores ---- */

/* Returns the number of pages and additional parts of the prefix that is being restored. */
static uint32_t restore_end(const fkv_prefix_tier *t) { return t->end_page + fkv_parts_count(t->kinds, t->end_page); }

/* Returns page i of the prefix that is being restored. Numbers after the last page refer to the additional parts of the prefix.
 */
static fkv_prefix_part restored_part(const fkv_prefix_tier *t, uint32_t i) {
    if (i < t->end_page) return (fkv_prefix_part){FKV_PART_PAGE, i};
    return fkv_parts_get(t->kinds, t->end_page, i - t->end_page);
}

static fkv_page_key restore_key(const fkv_prefix_tier *t, uint32_t i) { return fkv_part_key(restored_part(t, i), t->job->keys); }

static void finish_restore(fkv_prefix_tier *t) {
    t->stats.read_seconds += t->seconds(t->seconds_user) - t->started_at;
    t->job->restore_done = true;
    t->job = NULL;
    t->removing = false;
    fkv_traffic_cancel(t->traffic);
}

/* Inserts a page that was read from the store into the prefix tree. A page that arrives after its job has ended is dropped. */
static void receive_page(fkv_prefix_tier *t, const fkv_arrival *a) {
    if (a->removed || t->job == NULL || t->removing) return;
    const fkv_prefix_part part = restored_part(t, t->n_restored);
    const fkv_page_key key = fkv_part_key(part, t->job->keys);
    double start = t->seconds(t->seconds_user);
    fkv_status status = a->status;
    if (status == FKV_OK)
        status = fkv_part_unpack(t->cache, part, t->job->r.tenant, t->job->r.prompt, &key, a->packed, a->n_bytes);
    double seconds = a->seconds + t->seconds(t->seconds_user) - start;
    double *average = t->n_restored == t->first_page ? &t->first_page_s : &t->page_s;
    *average = *average > 0.0 ? *average + PAGE_TIME_STEP * (seconds - *average) : seconds;
    if (status == FKV_OK) {
        t->n_restored++;
        t->stats.read_pages++;
        t->stats.read_bytes += a->n_bytes;
        return;
    }
    if (status == FKV_FILE_DAMAGED || status == FKV_FILE_FOREIGN) {
        t->stats.damaged_pages++;
        t->removing = true;
        t->n_removed = t->n_restored;
        fkv_traffic_cancel(t->traffic);
        return;
    }
    finish_restore(t);
}

/* Removes the damaged page and all later pages of the prompt from the store. The restore ends when all of them are removed. The
 * job then computes these pages and writes them to the store again. */
static void remove_damaged_pages(fkv_prefix_tier *t, bool late) {
    while (t->n_removed < restore_end(t)) {
        const fkv_page_key key = restore_key(t, t->n_removed);
        if (!fkv_traffic_request_removal(t->traffic, &key)) break;
        t->n_removed++;
    }
    if (late || (t->n_removed == restore_end(t) && fkv_traffic_pending(t->traffic) == 0)) finish_restore(t);
}

bool fkv_tier_busy(const fkv_prefix_tier *t) {
    return t->traffic != NULL && (t->job != NULL || fkv_traffic_pending(t->traffic) > 0);
}

bool fkv_tier_asks(const fkv_prefix_tier *t) {
    return t->traffic != NULL && t->asking_until > 0.0 && t->seconds(t->seconds_user) < t->asking_until;
}

void fkv_tier_poll(fkv_prefix_tier *t) {
    fkv_arrival a;
    if (t->traffic == NULL) return;
    while (fkv_traffic_next_arrival(t->traffic, &a)) {
        receive_page(t, &a);
        fkv_traffic_release(t->traffic);
    }
    if (t->job == NULL) return;
    bool late = t->seconds(t->seconds_user) - t->started_at > t->limit_s;
    if (t->removing) {
        remove_damaged_pages(t, late);
        return;
    }
    while (t->n_requested < restore_end(t)) {
        const fkv_page_key key = restore_key(t, t->n_requested);
        if (!fkv_traffic_request_page(t->traffic, &key)) break;
        t->n_requested++;
    }
    if (t->n_restored < restore_end(t) && !late) return;
    for (uint32_t i = t->end_page; i < t->n_restored; i++) {
        const fkv_page_key key = restore_key(t, i);
        t->store.touch(t->store.self, &key, 1);
    }
    t->store.touch(t->store.self, t->job->keys, fkv_min_u32(t->n_restored, t->end_page));
    if (t->n_restored < restore_end(t)) {
        double page_s = (t->seconds(t->seconds_user) - t->started_at) / (t->n_restored - t->first_page + 1);
        double *average = t->n_restored == t->first_page ? &t->first_page_s : &t->page_s;
        t->stats.late++;
        if (page_s > *average) *average = page_s;
    }
    finish_restore(t);
}

/* Returns true if the layer group first_group has at least n free or cached pages that are not reserved for sequences. */
static bool has_free_pages(const fkv_prefix_tier *t, uint32_t n) {
    fkv_stats stats;
    if (fkv_cache_stats(t->cache, &stats) != FKV_OK) return false;
    const fkv_group_stats *g = &stats.groups[t->first_group];
    return g->free + g->cached >= g->promised + n;
}

/* Returns true if the job should wait until the store knows whether it has the page. When the wait begins, all keys are announced
 * to the store, so that the store looks them up together. A store should limit this time itself. MAX_FIRST_WAIT_S limits it for
 * stores that do not. */
static bool waits_for_answer(fkv_prefix_tier *t, fkv_job *job, const fkv_page_key *key) {
    if (!fkv_store_pending(&t->store, key)) return false;
    const double now = t->seconds(t->seconds_user);
    if (job->store_asked_at == 0.0) {
        job->store_asked_at = now;
        fkv_tier_announce(t, job);
    }
    if (now - job->store_asked_at >= MAX_FIRST_WAIT_S) return false;
    t->asking_until = now + ASK_AGAIN_S;
    return true;
}

/* Lowers *end_page to the end of the longest prefix whose additional parts are in the store, or to first_page if there is no such
 * prefix after first_page. Returns false if the job should wait until the store knows which parts it has. */
static bool find_stored_parts(fkv_prefix_tier *t, fkv_job *job, uint32_t first_page, uint32_t *end_page) {
    bool waits = false;
    for (; *end_page > first_page; (*end_page)--) { /* looks up all parts, even if one of them makes the job wait */
        const uint32_t n_parts = fkv_parts_count(t->kinds, *end_page);
        uint32_t n_found = 0;
        for (uint32_t i = 0; i < n_parts; i++) {
            const fkv_page_key key = fkv_part_key(fkv_parts_get(t->kinds, *end_page, i), job->keys);
            const bool found = t->store.contains(t->store.self, &key);
            n_found += found;
            if (!found) waits = waits_for_answer(t, job, &key) || waits;
        }
        if (n_found == n_parts) break;
    }
    return !waits;
}

/* Computes the largest end_page such that the store holds all prompt pages [first_page, end_page) and the additional parts of
 * this prefix. The result is cached in the job until first_page changes. If the store evicts one of these pages later, reading it
 * fails. Returns false if the job should wait until the store knows which pages it has. */
static bool find_stored_pages(fkv_prefix_tier *t, fkv_job *job, uint32_t first_page) {
    if (job->store_checked && job->store_first == first_page) return true;
    const uint32_t most = max_restored(t, job);
    uint32_t end_page = first_page;
    while (end_page < most && t->store.contains(t->store.self, &job->keys[end_page])) end_page++;
    if (end_page < most && waits_for_answer(t, job, &job->keys[end_page])) return false;
    job->store_known = end_page;
    if (!find_stored_parts(t, job, first_page, &end_page)) return false;
    job->store_checked = true;
    job->store_first = first_page;
    job->store_end = end_page;
    return true;
}

bool fkv_tier_delays(fkv_prefix_tier *t, fkv_job *job, const fkv_step_cost *cost) {
    if (t->traffic == NULL || job->restore_done) return false;
    if (t->job == job) return true;
    uint32_t first_page = job->n_matched / t->page_tokens;
    if (!find_stored_pages(t, job, first_page)) return true;
    uint32_t end_page = job->store_end;
    uint32_t n = end_page - first_page;
    uint32_t n_tokens = n * t->page_tokens;
    double compute_s = fkv_step_cost_predict(
        cost, (fkv_step_work){.n_prefill = n_tokens, .history = fkv_step_history(job->n_matched, n_tokens)});
    double now = t->seconds(t->seconds_user);
    if (cost->n_steps == 0) compute_s = MAX_FIRST_WAIT_S;
    double restore_s = n > 0 ? t->first_page_s + (n - 1 + fkv_parts_count(t->kinds, end_page)) * t->page_s : 0.0;
    if (n == 0 || restore_s >= compute_s || (job->store_wait_since > 0.0 && now - job->store_wait_since > compute_s)) {
        t->stats.declined += n > 0;
        t->first_page_s *= n > 0 ? PAGE_TIME_DECAY : 1.0;
        t->page_s *= n > 0 ? PAGE_TIME_DECAY : 1.0;
        job->restore_done = true;
        return false;
    }
    if (!has_free_pages(t, n)) return false;
    if (fkv_tier_busy(t)) { /* the time that a job waits for the restore of another job counts as waiting for the store */
        if (job->store_wait_since == 0.0) job->store_wait_since = now;
        return true;
    }
    t->job = job;
    t->n_requested = t->n_restored = t->first_page = first_page;
    t->end_page = end_page;
    t->started_at = now;
    t->limit_s = compute_s;
    fkv_tier_poll(t);
    return t->job == job;
}

/* ---- writes ---- */

static bool extend_keys(const fkv_prefix_tier *t, fkv_job *job) {
    uint32_t i = job->n_sent;
    if (i < job->n_keys) return true;
    const uint32_t *tokens = job->answers[0].tokens + (size_t)i * t->page_tokens;
    if (fkv_prefix_key(i > 0 ? &job->keys[i - 1] : &job->root, tokens, t->page_tokens, &job->keys[i]) != FKV_OK) return false;
    job->n_keys = i + 1;
    return true;
}

/* Writes one page or part of the job if the store wants it. Returns false if the write must be retried later. This is the case if
 * no buffer is free or, unless is_last is true, if the store does not know yet whether it has the part. */
static bool send_part(fkv_prefix_tier *t, const fkv_job *job, fkv_prefix_part part, bool is_last) {
    const fkv_page_key key = fkv_part_key(part, job->keys);
    uint64_t n_bytes = 0;
    if (!fkv_store_wants(&t->store, &key)) return true;
    if (!is_last && fkv_store_pending(&t->store, &key)) return false;
    uint8_t *packed = fkv_traffic_buffer(t->traffic);
    if (packed == NULL) return false;
    if (fkv_part_pack(t->cache, part, job->r.tenant, job->answers[0].tokens, &key, packed, &n_bytes) == FKV_OK)
        fkv_traffic_send(t->traffic, &key, n_bytes);
    return true;
}

/* Writes the pages of the job that the store wants, and the additional parts of each prefix whose pages have been sent. */
static void send_pages(fkv_prefix_tier *t, fkv_job *job, bool is_last) {
    const uint32_t n_pages = job->answers[0].n_inserted / t->page_tokens;
    for (; job->n_sent < n_pages && extend_keys(t, job); job->n_sent++)
        if (!send_part(t, job, (fkv_prefix_part){FKV_PART_PAGE, job->n_sent}, is_last)) return;
    while (job->n_ends > 0 && job->ends[0] <= job->n_sent) {
        const uint32_t end = job->ends[0];
        for (; job->n_parts_sent < fkv_parts_count(t->kinds, end); job->n_parts_sent++)
            if (!send_part(t, job, fkv_parts_get(t->kinds, end, job->n_parts_sent), is_last)) return;
        job->n_parts_sent = 0;
        job->n_ends--;
        memmove(job->ends, job->ends + 1, job->n_ends * sizeof job->ends[0]);
    }
}

void fkv_tier_note_end(const fkv_prefix_tier *t, fkv_job *job, uint32_t n_pages) {
    const bool is_known = job->n_ends > 0 && job->ends[job->n_ends - 1] == n_pages;
    if (t->traffic != NULL && !is_known && job->n_ends < FKV_MAX_ENDS_SENT) job->ends[job->n_ends++] = n_pages;
}

void fkv_tier_send(fkv_prefix_tier *t, fkv_job *job) {
    if (t->traffic != NULL) send_pages(t, job, false);
}

void fkv_tier_end_job(fkv_prefix_tier *t, fkv_job *job) {
    if (t->traffic == NULL) return;
    if (t->job == job) finish_restore(t);
    const fkv_answer *a = &job->answers[0];
    const uint32_t end = (t->kinds.has_states ? a->rolling : a->n_inserted) / t->page_tokens;
    if (end > job->r.n_prompt / t->page_tokens) fkv_tier_note_end(t, job, end);
    send_pages(t, job, true);
    t->stats.unsent_pages += job->answers[0].n_inserted / t->page_tokens - job->n_sent;
    t->store.touch(t->store.self, job->keys, job->n_sent);
}
