/* See prefix_tier.h. */
#include "prefix_tier.h"

#include <stdio.h>

static const double START_SECONDS = 10.0;
static const double PAGE_STEP = 0.2;    /* how fast the time of a page follows what is measured */
static const double FORGIVENESS = 0.98; /* a store that was too slow is tried again some time */

fkv_status fkv_tier_name(const fkv_cache *cache, uint32_t page_tokens, const char *tenant_name, fkv_job *job) {
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

/* ---- in ---- */

static void stop(fkv_prefix_tier *t) {
    t->stats.read_seconds += t->seconds(t->seconds_user) - t->started_at;
    t->job->restored = true;
    t->job = NULL;
    fkv_traffic_forget(t->traffic);
}

/* What arrives for nobody was asked for by a job that has left. */
static void take(fkv_prefix_tier *t, const fkv_arrival *a) {
    if (a->removed || t->job == NULL) return;
    const fkv_page_key *key = &t->job->keys[t->got];
    double start = t->seconds(t->seconds_user);
    fkv_status status = a->status;
    if (status == FKV_OK)
        status = fkv_prefix_unpack(t->cache, t->job->r.tenant, t->job->r.prompt, t->got + 1, key, a->packed, a->n_bytes);
    double seconds = a->seconds + t->seconds(t->seconds_user) - start;
    t->page_s = t->page_s > 0.0 ? t->page_s + PAGE_STEP * (seconds - t->page_s) : seconds;
    if (status == FKV_OK) {
        t->got++;
        t->stats.read_pages++;
        t->stats.read_bytes += a->n_bytes;
        return;
    }
    if (status == FKV_FILE_DAMAGED || status == FKV_FILE_FOREIGN) {
        t->stats.damaged_pages++;
        t->bad = *key;
        t->has_bad = true;
    }
    stop(t);
}

bool fkv_tier_busy(const fkv_prefix_tier *t) {
    return t->traffic != NULL && (t->job != NULL || t->has_bad || fkv_traffic_asked(t->traffic) > 0);
}

void fkv_tier_pump(fkv_prefix_tier *t) {
    fkv_arrival a;
    if (t->traffic == NULL) return;
    while (fkv_traffic_arrived(t->traffic, &a)) {
        take(t, &a);
        fkv_traffic_release(t->traffic);
    }
    if (t->has_bad && fkv_traffic_remove(t->traffic, &t->bad)) t->has_bad = false;
    if (t->job == NULL) return;
    while (t->asked < t->until && fkv_traffic_ask(t->traffic, &t->job->keys[t->asked])) t->asked++;
    bool late = t->seconds(t->seconds_user) - t->started_at > t->limit_s;
    if (t->got < t->until && !late) return;
    t->store.used(t->store.self, t->job->keys, t->got);
    if (t->got < t->until) {
        double page_s = (t->seconds(t->seconds_user) - t->started_at) / (t->got - t->first + 1);
        t->stats.late++;
        if (page_s > t->page_s) t->page_s = page_s;
    }
    stop(t);
}

/* There is room for n more pages that nobody was promised. */
static bool room_for(const fkv_prefix_tier *t, uint32_t n) {
    fkv_stats stats;
    if (fkv_cache_stats(t->cache, &stats) != FKV_OK) return false;
    const fkv_group_stats *g = &stats.groups[0];
    return g->free + g->cached >= g->promised + n;
}

/* The store has pages [first, until) of the prompt. It is asked again only where memory has other pages than it had: a page that
 * was lost since is missed when it is read. */
static uint32_t look_until(const fkv_prefix_tier *t, fkv_job *job, uint32_t first) {
    if (job->looked && job->looked_first == first) return job->looked_until;
    uint32_t most = fkv_min_u32(job->n_keys, (job->r.n_prompt - 1) / t->page_tokens);
    uint32_t until = first;
    while (until < most && t->store.look(t->store.self, &job->keys[until])) until++;
    job->looked = true;
    job->looked_first = first;
    return job->looked_until = until;
}

bool fkv_tier_holds(fkv_prefix_tier *t, fkv_job *job, const fkv_step_cost *cost) {
    if (t->traffic == NULL || job->restored) return false;
    if (t->job == job) return true;
    uint32_t first = job->n_known / t->page_tokens;
    uint32_t until = look_until(t, job, first);
    uint32_t n = until - first;
    uint32_t n_tokens = n * t->page_tokens;
    double computing =
        fkv_step_cost_predict(cost, (fkv_step_work){.n_prefill = n_tokens, .history = fkv_step_history(job->n_known, n_tokens)});
    double now = t->seconds(t->seconds_user);
    if (cost->n_seen == 0) computing = START_SECONDS;
    if (n == 0 || n * t->page_s >= computing || (job->held_at > 0.0 && now - job->held_at > computing)) {
        t->stats.declined += n > 0;
        t->page_s *= n > 0 ? FORGIVENESS : 1.0;
        job->restored = true;
        return false;
    }
    if (!room_for(t, n)) return false;
    if (fkv_tier_busy(t)) { /* its turn has not come; a wait for room in memory is no wait for the store */
        if (job->held_at == 0.0) job->held_at = now;
        return true;
    }
    t->job = job;
    t->asked = t->got = t->first = first;
    t->until = until;
    t->started_at = now;
    t->limit_s = computing;
    fkv_tier_pump(t);
    return t->job == job;
}

/* ---- out ---- */

static bool next_key(const fkv_prefix_tier *t, fkv_job *job) {
    uint32_t i = job->n_sent;
    if (i < job->n_keys) return true;
    const uint32_t *tokens = job->answers[0].tokens + (size_t)i * t->page_tokens;
    if (fkv_prefix_key(i > 0 ? &job->keys[i - 1] : &job->root, tokens, t->page_tokens, &job->keys[i]) != FKV_OK) return false;
    job->n_keys = i + 1;
    return true;
}

void fkv_tier_send(fkv_prefix_tier *t, fkv_job *job) {
    if (t->traffic == NULL) return;
    const fkv_answer *a = &job->answers[0];
    uint32_t n_pages = a->n_offered / t->page_tokens;
    for (; job->n_sent < n_pages && next_key(t, job); job->n_sent++) {
        const fkv_page_key *key = &job->keys[job->n_sent];
        if (t->store.look(t->store.self, key)) continue;
        uint64_t n_bytes = 0;
        uint8_t *packed = fkv_traffic_buffer(t->traffic);
        if (packed == NULL) return;
        if (fkv_prefix_pack(t->cache, job->r.tenant, a->tokens, job->n_sent + 1, key, packed, &n_bytes) == FKV_OK)
            fkv_traffic_send(t->traffic, key, n_bytes);
    }
}

void fkv_tier_leave(fkv_prefix_tier *t, fkv_job *job) {
    if (t->traffic == NULL) return;
    if (t->job == job) stop(t);
    fkv_tier_send(t, job);
    t->stats.unsent_pages += job->answers[0].n_offered / t->page_tokens - job->n_sent;
    t->store.used(t->store.self, job->keys, job->n_sent);
}
