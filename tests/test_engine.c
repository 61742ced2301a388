/* Tests the scheduling rules of the engine: admission, order, fair shares, use of pages, and the end of answers. A simple
 * arithmetic function replaces the model. The clock is simulated and advances only during steps.
 *
 * The next token is a function of the last token and its position, so the test can predict every answer. Sequences and pages are
 * those of a real cache.
 */
#include "../src/base/prefill_chunk.h"
#include "../src/engine/recent_prefixes.h"
#include "../src/engine/scheduler.h"
#include "cache_fixture.h"
#include "test.h"

#include <math.h>
#include <stdio.h>

#ifdef FKV_HAVE_JEMALLOC
#include <jemalloc/jemalloc.h>
#endif

enum {
    VOCAB = 64,
    PAGE = 16,
    MAX_TOKENS = 2048,
    MAX_SEQS = 8,
    STEP_TOKENS = 128,
    CONTEXT = 1024,
    END_TOKEN = VOCAB - 1,
    DRAFT = 3
};

/* A prefill chunk that does not reach the end of its prompt. */
typedef struct partial_chunk {
    fkv_seq seq;
    uint32_t from;
    uint32_t n;
} partial_chunk;

enum { MAX_PARTIAL_CHUNKS = 512 };

typedef struct fixture {
    fkv_cache *cache;
    fkv_step *step; /* current step */
    fkv_scheduler scheduler;
    double clock;
    double longest; /* duration of the longest step, in seconds */
    uint32_t n_decode;
    float rows[STEP_TOKENS * 16];
    float logits[MAX_SEQS * (1 + DRAFT) * VOCAB];
    uint64_t last_id;
    bool broken;     /* true to make the device fail */
    double stopped;  /* number of seconds by which the clock jumps in the next step, as if the process had been suspended */
    fkv_job *leaves; /* job that is cancelled in the middle of the next step; NULL if there is none */
    partial_chunk partial[MAX_PARTIAL_CHUNKS]; /* the first MAX_PARTIAL_CHUNKS partial chunks, in order of time */
    uint32_t n_partial;
} fixture;

static bool drafts; /* true if fixtures opened from now on use drafts; the model then generates mostly repetitive text */

static bool sealed; /* true if fixtures opened from now on have a sealed layer */

static bool stateful; /* true if fixtures opened from now on have a state layer, whose states are hashes of tokens */

static uint32_t next_token(uint32_t token, uint32_t position) {
    if (drafts) return (token + (position % 11 == 0 ? 2 : 1)) % 7;
    return (token * 7 + position * 3 + 5) % (VOCAB - 1);
}

static uint64_t hash_tokens(uint64_t hash, const uint32_t *tokens, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) hash = (hash ^ (tokens[i] + 1)) * 0x9e3779b97f4a7c15u;
    return hash;
}

/* Checks the states that the step reads, and writes the states after the first n_kept tokens of each row. n_kept: NULL if all
 * tokens are kept. */
static fkv_status write_states(const fixture *w, const fkv_tokens *rows, uint32_t n_rows, const uint32_t *n_kept) {
    fkv_state_row states[MAX_SEQS];
    const fkv_status status = fkv_state_rows(w->step, 1, states);
    for (uint32_t i = 0; status == FKV_OK && i < n_rows; i++) {
        const fkv_row_owner *owner = &w->scheduler.owners[i];
        const uint32_t *tokens = owner->job->answers[owner->answer].tokens;
        const uint32_t n_before = (uint32_t)(rows[i].tokens - tokens);
        uint64_t hash = 0;
        if (states[i].in != NULL) memcpy(&hash, states[i].in, sizeof hash);
        if (hash != hash_tokens(0, tokens, n_before)) abort(); /* the state is not that of the sequence's tokens */
        hash = hash_tokens(hash, rows[i].tokens, n_kept != NULL ? n_kept[i] : rows[i].n_tokens);
        memcpy(states[i].out, &hash, sizeof hash);
    }
    return status;
}

/* Runs a step and leaves it open in w->step. */
static fkv_status fake_verify(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    fixture *w = user;
    fkv_row cache_rows[MAX_SEQS];
    uint32_t n_logits = 0;
    double seconds = 0.002;
    if (w->broken) return fkv_fail(FKV_DEVICE, "the device broke");
    if (w->leaves != NULL) fkv_job_cancel(w->leaves, w->scheduler.stats.steps);
    w->leaves = NULL;
    for (uint32_t i = 0; i < n_rows; i++) {
        uint32_t length = 0;
        if (fkv_seq_length(w->cache, rows[i].seq, &length) != FKV_OK) abort();
        cache_rows[i] = (fkv_row){rows[i].seq, rows[i].n_tokens};
        if (rows[i].logits == FKV_LOGITS_NONE && w->n_partial < MAX_PARTIAL_CHUNKS)
            w->partial[w->n_partial++] = (partial_chunk){rows[i].seq, length, rows[i].n_tokens};
        seconds += (rows[i].n_tokens == 1 || rows[i].logits == FKV_LOGITS_ALL ? 0.0004 : 0.0005) * rows[i].n_tokens;
        uint32_t first = rows[i].logits == FKV_LOGITS_ALL ? 0 : rows[i].n_tokens - 1;
        for (uint32_t k = first; rows[i].logits != FKV_LOGITS_NONE && k < rows[i].n_tokens; k++) {
            float *row = &w->logits[VOCAB * n_logits++];
            for (uint32_t t = 0; t < VOCAB; t++) row[t] = 0.0f;
            row[next_token(rows[i].tokens[k], length + k)] = 10.0f;
        }
    }
    fkv_status status = fkv_step_begin(w->cache, cache_rows, n_rows, &w->step);
    if (status == FKV_OK) status = fkv_write(w->step, 0, w->rows, w->rows);
    if (status == FKV_OK && stateful) status = write_states(w, rows, n_rows, NULL);
    w->clock += seconds + w->stopped;
    w->stopped = 0.0;
    if (seconds > w->longest) w->longest = seconds;
    *logits = w->logits;
    return status;
}

static fkv_status fake_forward(void *user, const fkv_tokens *rows, uint32_t n_rows, const float **logits) {
    const fkv_status status = fake_verify(user, rows, n_rows, logits);
    return status == FKV_OK ? fkv_step_commit(((fixture *)user)->step) : status;
}

static fkv_status fake_accept(void *user, const uint32_t *n_kept) {
    fixture *w = user;
    const fkv_scheduler *s = &w->scheduler;
    fkv_status status = fkv_step_keep(w->step, n_kept);
    bool changed = false;
    for (uint32_t i = 0; i < s->n_rows; i++) changed = changed || n_kept[i] < s->rows[i].n_tokens;
    if (status == FKV_OK && stateful && changed) status = write_states(w, s->rows, s->n_rows, n_kept);
    return status == FKV_OK ? fkv_step_commit(w->step) : status;
}

static double fake_seconds(void *user) { return ((fixture *)user)->clock; }

static const char *fake_text(void *user, uint32_t token, size_t *n_bytes) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.";
    (void)user;
    *n_bytes = 1;
    return letters + token % (sizeof letters - 1);
}

static void free_job(void *user, fkv_job *job) {
    (void)user;
    fkv_job_free(job);
}

static void open_fixture(fixture *w, const fkv_engine_config *config) {
    fkv_config c = fkv_config_default();
    memset(w, 0, sizeof *w);
    c.n_layers = 1;
    c.layer = (fkv_layer_config){.n_q_heads = 1, .n_kv_heads = 1, .head_dim = 16, .k = {16}, .v = {16}};
    if (sealed) c.layer.k = (fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED};
    if (sealed) c.layer.v = (fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED_V};
    const fkv_layer_config layers[] = {c.layer, {.state_bytes = 64}};
    if (stateful) c.n_layers = 2;
    if (stateful) c.layers = layers;
    if (stateful) c.max_snapshots = 32;
    c.page_tokens = PAGE;
    c.max_tokens = MAX_TOKENS;
    c.max_seqs = MAX_SEQS;
    c.max_step_tokens = STEP_TOKENS;
    c.n_threads = 1;
    ck_ok(fkv_cache_open(&c, &w->cache));
    fkv_engine_device d = {.user = w,
                           .forward = fake_forward,
                           .verify = fake_verify,
                           .accept = fake_accept,
                           .seconds = fake_seconds,
                           .token_text = fake_text,
                           .cache = w->cache,
                           .n_vocab = VOCAB,
                           .max_tokens = MAX_TOKENS,
                           .context = CONTEXT,
                           .max_seqs = MAX_SEQS,
                           .max_step_tokens = STEP_TOKENS,
                           .page_tokens = PAGE,
                           .has_sealed = sealed,
                           .has_states = stateful,
                           .windowed = stateful,
                           .draft_tokens = drafts ? DRAFT : 0,
                           .draft_rows = MAX_SEQS * DRAFT,
                           .n_end = 1,
                           .end = {END_TOKEN}};
    ck_ok(fkv_scheduler_open(&w->scheduler, config, &d));
    w->scheduler.retire = free_job;
}

static fkv_engine_config quick_config(void) {
    fkv_engine_config c = fkv_engine_config_default();
    c.step_ms = 30.0;
    c.max_tenants = 4;
    return c;
}

static void close_fixture(fixture *w) {
    fkv_stats stats;
    ck_assert(fkv_cache_consistent(w->cache));
    ck_ok(fkv_cache_stats(w->cache, &stats));
    ck_assert_uint_eq(stats.seqs, 0);
    ck_assert_uint_eq(stats.groups[0].held, 0);
    ck_assert_uint_eq(stats.groups[0].promised, 0);
    ck_assert_uint_eq(stats.groups[0].free + stats.groups[0].cached, stats.groups[0].pages);
    fkv_scheduler_close(&w->scheduler);
    fkv_cache_close(w->cache);
}

/* ---- client events ---- */

enum { MAX_NEW = 48 };

typedef struct client_view {
    fixture *w;
    fkv_job *job; /* NULL once the request is done */
    uint32_t prompt[CONTEXT];
    uint32_t n_prompt;
    uint32_t max_new;
    uint32_t n;
    bool cancelled;
    double deadline_at;
    int started;
    uint32_t n_cached;
    uint32_t n_new[FKV_MAX_ANSWERS];
    bool answered[FKV_MAX_ANSWERS];
    char text[FKV_MAX_ANSWERS][MAX_NEW + 1];
    uint32_t n_text[FKV_MAX_ANSWERS];
    fkv_finish reason;
    double done_at;
    uint32_t order; /* index of the request in the order in which requests started */
} client_view;

static uint32_t n_started;

static uint32_t expected_token(const client_view *s, uint32_t i) {
    uint32_t token = s->prompt[s->n_prompt - 1];
    for (uint32_t k = 0; k <= i; k++) token = next_token(token, s->n_prompt - 1 + k);
    return token;
}

static void on_client_event(void *user, const fkv_event *e) {
    client_view *s = user;
    ck_assert_msg(s->job != NULL, "received an event after the last one");
    ck_assert_uint_eq(e->n_prompt, s->n_prompt);
    if (e->kind == FKV_EVENT_STARTED) {
        ck_assert_int_eq(s->started++, 0);
        s->n_cached = e->n_cached;
        s->order = n_started++;
        return;
    }
    if (e->kind == FKV_EVENT_DONE) {
        for (uint32_t i = 0; i < s->n; i++) ck_assert(s->answered[i]);
        s->reason = e->reason;
        s->done_at = s->w->clock;
        s->job = NULL;
        return;
    }
    ck_assert_uint_lt(e->answer, s->n);
    ck_assert(!s->answered[e->answer]);
    ck_assert_uint_le(s->n_text[e->answer] + e->n_text, MAX_NEW);
    memcpy(s->text[e->answer] + s->n_text[e->answer], e->text, e->n_text);
    s->n_text[e->answer] += (uint32_t)e->n_text;
    if (e->kind == FKV_EVENT_TOKEN) {
        ck_assert_int_eq(s->started, 1);
        ck_assert_uint_eq(e->token, expected_token(s, s->n_new[e->answer]));
        s->n_new[e->answer]++;
        ck_assert_uint_eq(e->n_new, s->n_new[e->answer]);
        return;
    }
    s->answered[e->answer] = true;
    ck_assert_msg(e->reason != FKV_FINISH_FAILED, "an admitted request failed: %s", e->message);
    ck_assert(e->reason != FKV_FINISH_CANCELLED || s->cancelled);
    ck_assert(e->reason != FKV_FINISH_DEADLINE || s->w->clock >= s->deadline_at);
    ck_assert(e->reason != FKV_FINISH_LENGTH || s->n_new[e->answer] == s->max_new);
}

/* Submits a request. The prompt, n_prompt, max_new and n are taken from s, all other fields from r. */
static fkv_status submit(fixture *w, client_view *s, fkv_request r) {
    uint32_t max_new = 0;
    r.prompt = s->prompt;
    r.n_prompt = s->n_prompt;
    r.max_new = s->max_new;
    r.n = s->n;
    r.sampler = fkv_sampler_config_default();
    r.event = on_client_event;
    r.user = s;
    fkv_status status = fkv_scheduler_check(&w->scheduler, &r, &max_new);
    if (status != FKV_OK) return status;
    fkv_job *job = fkv_job_make(&r, max_new, w->scheduler.max_token_bytes, 0);
    ck_assert(job != NULL);
    if (job == NULL) abort();
    job->id = ++w->last_id;
    job->first_attempt_at = job->arrived_at = w->clock;
    job->deadline_at = r.deadline_s > 0 ? w->clock + r.deadline_s : INFINITY;
    s->w = w;
    s->job = job;
    s->deadline_at = job->deadline_at;
    fkv_scheduler_accept(&w->scheduler, job);
    return FKV_OK;
}

static void tokens_of(client_view *s, uint64_t seed, uint32_t from, uint32_t n) {
    cache_tokens(seed, s->prompt + from, n);
    for (uint32_t i = from; i < from + n; i++) s->prompt[i] %= VOCAB - 1;
    s->n_prompt = from + n;
}

static uint32_t run_all(fixture *w) {
    uint32_t turns = 0;
    while (fkv_scheduler_turn(&w->scheduler)) ck_assert_uint_lt(++turns, 100000);
    ck_assert_uint_eq(w->scheduler.queue.n, 0);
    ck_assert_uint_eq(w->scheduler.n_running, 0);
    ck_assert_uint_eq(w->scheduler.n_seqs, 0);
    return turns;
}

static uint32_t random_below(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % n;
}

/* ---- tests ---- */

enum { N_CLIENTS = 400 };
static client_view all[N_CLIENTS];

static void random_request(fixture *w, client_view *s, uint64_t *random) {
    memset(s, 0, sizeof *s);
    tokens_of(s, random_below(random, 3), 0,
              16 * random_below(random, 12)); /* the prompt begins with one of three common prefixes */
    tokens_of(s, random_below(random, 1000) + 10, s->n_prompt, 1 + random_below(random, 60));
    s->max_new = 1 + random_below(random, MAX_NEW - 1);
    s->n = random_below(random, 5) == 0 ? 1 + random_below(random, 4) : 1;
    fkv_request r = {.tenant = random_below(random, 6), .priority = (int32_t)random_below(random, 3)};
    if (random_below(random, 10) == 0) r.deadline_s = 0.01 * (1 + random_below(random, 100));
    ck_ok(submit(w, s, r));
}

static void random_stress(uint64_t seed) {
    enum { N_REQUESTS = TEST_SANITIZED ? 150 : N_CLIENTS };
    static fixture w;
    fkv_engine_config config = quick_config();
    uint64_t random = seed;
    uint32_t n = 0;
    open_fixture(&w, &config);
    printf("seed %llu\n", (unsigned long long)seed);
    while (n < N_REQUESTS) {
        for (uint32_t k = random_below(&random, 4); k > 0 && n < N_REQUESTS; k--) random_request(&w, &all[n++], &random);
        client_view *victim = n > 0 ? &all[random_below(&random, n)] : NULL;
        bool cancels = victim != NULL && victim->job != NULL && random_below(&random, 4) == 0;
        if (cancels && victim != NULL) {
            victim->cancelled = true;
            if (w.scheduler.n_running > 0 && random_below(&random, 2) == 0)
                w.leaves = victim->job;
            else
                fkv_job_cancel(victim->job, w.scheduler.stats.steps);
        }
        (void)fkv_scheduler_turn(&w.scheduler);
        w.leaves = NULL;
        ck_assert(!cancels || victim == NULL ||
                  victim->job == NULL); /* pages of a cancelled request are released after one step */
        if (n % 16 == 0) ck_assert(fkv_cache_consistent(w.cache));
    }
    (void)run_all(&w);
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_msg(all[i].job == NULL, "request %u never finished", i);
        /* not checked for cancelled requests: with drafts, one answer of a request may be complete while another was cut off */
        if (all[i].reason == FKV_FINISH_LENGTH && !all[i].cancelled && isinf(all[i].deadline_at))
            for (uint32_t k = 0; k < all[i].n; k++) ck_assert_uint_eq(all[i].n_new[k], all[i].max_new);
    }
    const fkv_engine_stats *stats = &w.scheduler.stats;
    ck_assert_uint_ge(stats->prompt_tokens,
                      stats->cached_tokens +
                          stats->computed_tokens); /* prompt tokens of a cancelled request may be neither cached nor computed */
    ck_assert_uint_gt(stats->cached_tokens, 0);
    ck_assert_uint_eq(stats->max_cancel_steps, 1); /* requests cancelled during a step are released when the step ends */
    ck_assert_uint_eq(stats->finished[FKV_FINISH_FAILED], 0);
    ck_assert(drafts ? stats->accepted_tokens > 100 && stats->drafted_tokens > stats->accepted_tokens
                     : stats->drafted_tokens == 0);
    close_fixture(&w);
}

START_TEST(random_requests_cancels_and_tenants_keep_all_invariants) {
    const uint64_t distance = TEST_SANITIZED ? 8 : 1;
    for (uint64_t seed = 1; seed <= 12; seed += distance) random_stress(seed);
    drafts = true;
    for (uint64_t seed = 13; seed <= 20; seed += distance) random_stress(seed);
    sealed = true;
    for (uint64_t seed = 21; seed <= 24; seed += distance) random_stress(seed);
    stateful = true;
    for (uint64_t seed = 25; seed <= 28; seed += distance) random_stress(seed);
    sealed = false;
    for (uint64_t seed = 29; seed <= 32; seed += distance) random_stress(seed);
    drafts = stateful = false;
}
END_TEST

START_TEST(shared_prefix_of_32_requests_is_computed_once) {
    static fixture w;
    fkv_engine_config config = quick_config();
    uint64_t computed = 0;
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 32; i++) {
        all[i] = (client_view){.max_new = 8, .n = 1};
        tokens_of(&all[i], 5, 0, 512);
        tokens_of(&all[i], 100 + i, 512, 5);
        ck_ok(submit(&w, &all[i], (fkv_request){.tenant = 1}));
        computed += i == 0 ? 517 : 5;
    }
    (void)run_all(&w);
    ck_assert_uint_eq(w.scheduler.stats.computed_tokens, computed);
    ck_assert_uint_eq(w.scheduler.stats.page_waits, 31);
    all[0] = (client_view){.max_new = 8, .n = 1};
    tokens_of(&all[0], 5, 0, 517);
    ck_ok(submit(&w, &all[0], (fkv_request){.tenant = 2}));
    (void)run_all(&w);
    ck_assert_uint_eq(all[0].n_cached, 0); /* another tenant does not share the prefix */
    close_fixture(&w);
}
END_TEST

/* Submits a request whose prompt is a prefix of n_prefix tokens followed by n_own other tokens. */
static void submit_after_prefix(fixture *w, uint32_t i, uint32_t n_prefix, uint32_t n_own) {
    all[i] = (client_view){.max_new = 8, .n = 1};
    tokens_of(&all[i], 5, 0, n_prefix);
    tokens_of(&all[i], 100 + i, n_prefix, n_own);
    ck_ok(submit(w, &all[i], (fkv_request){.tenant = 1}));
}

/* The common prefix of the prompts ends within a span of a sealed layer. The first prompt seals this span before its pages enter
 * the tree, so the second prompt computes the pages of the span again. Later prompts share all pages before the divergence. */
START_TEST(prompts_with_sealed_layers_share_all_pages_before_they_diverge) {
    static fixture w;
    fkv_engine_config config = quick_config();
    enum { SPAN = 4 * PAGE, PREFIX = 2 * SPAN + 3 * PAGE + 1 };
    config.step_ms = 1000.0; /* large enough for chunks of STEP_TOKENS tokens, each of which seals whole spans */
    sealed = true;
    open_fixture(&w, &config);
    sealed = false;
    for (uint32_t i = 0; i < 4; i++) {
        static const uint32_t expected[] = {0, 2 * SPAN, PREFIX / PAGE * PAGE, PREFIX / PAGE * PAGE};
        submit_after_prefix(&w, i, PREFIX, 3 * SPAN);
        (void)run_all(&w);
        ck_assert_uint_eq(all[i].n_cached, expected[i]);
    }
    close_fixture(&w);

    sealed = true;
    open_fixture(&w, &config);
    sealed = false;
    const uint64_t computed = PREFIX + 3 * SPAN + 7 * (PREFIX % PAGE + 3 * SPAN);
    for (uint32_t i = 0; i < 8; i++)
        submit_after_prefix(&w, i, PREFIX, 3 * SPAN); /* the other requests wait until the first has computed the prefix */
    (void)run_all(&w);
    ck_assert_uint_eq(w.scheduler.stats.computed_tokens, computed);
    close_fixture(&w);
}
END_TEST

/* The predicted wait must count a shared prefix only once, whether the prefix is already cached or will be computed by an earlier
 * request. */
START_TEST(forecast_counts_a_shared_prefix_once) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 64; i++) {
            all[i] = (client_view){.max_new = 8, .n = 1};
            tokens_of(&all[i], round == 0 ? 9 : 5, 0,
                      512); /* round 0 has another prefix and only teaches the scheduler the step costs */
            tokens_of(&all[i], 100 + i, 512, 5);
            ck_ok(submit(&w, &all[i], (fkv_request){.tenant = 1}));
        }
        (void)fkv_scheduler_turn(&w.scheduler);
        const double predicted = fkv_scheduler_wait(&w.scheduler);
        const double start = w.clock;
        (void)run_all(&w);
        const double taken = w.clock - start;
        printf("64 requests with %s prefix: predicted wait %.2f s, all served after %.2f s\n", round == 2 ? "a cached" : "a new",
               predicted, taken);
        if (round > 0) ck_assert(predicted > taken / 2.0 && predicted < 2.0 * taken);
    }
    close_fixture(&w);
}
END_TEST

START_TEST(recent_prompts_predict_the_cached_prefix) {
    static fkv_recent_prefixes recent;
    uint32_t prompt[10 * PAGE + 3];
    uint64_t hashes[3][10];
    for (uint32_t i = 0; i < N_OF(prompt); i++) prompt[i] = i % 7;
    ck_assert_uint_eq(fkv_prefix_hashes(1, prompt, N_OF(prompt), PAGE, hashes[0]), 10);
    ck_assert_uint_eq(fkv_prefix_hashes(2, prompt, N_OF(prompt), PAGE, hashes[1]), 10);
    ck_assert_uint_eq(fkv_recent_match(&recent, hashes[0], 10), 0);
    fkv_recent_add(&recent, hashes[0], 10);
    ck_assert_uint_eq(fkv_recent_match(&recent, hashes[0], 10), 10);
    ck_assert_uint_eq(fkv_recent_match(&recent, hashes[1], 10), 0); /* prefixes are not shared between tenants */
    prompt[4 * PAGE + 5]++;
    (void)fkv_prefix_hashes(1, prompt, N_OF(prompt), PAGE, hashes[2]);
    ck_assert_uint_eq(fkv_recent_match(&recent, hashes[2], 10), 4);
    ck_assert_uint_eq(fkv_prefix_hashes(1, prompt, PAGE - 1, PAGE, hashes[2]), 0);
}
END_TEST

START_TEST(warm_up_measures_the_device_before_the_first_request) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    fkv_scheduler_warm_up(&w.scheduler);
    const double decode =
        fkv_step_cost_predict(&w.scheduler.cost, (fkv_step_work){.n_rows = MAX_SEQS, .history = (double)MAX_SEQS * 20.0});
    const double prefill = fkv_step_cost_predict(&w.scheduler.cost, (fkv_step_work){.n_prefill = 64, .history = 64 * 32.0});
    printf("predicted %.2f ms per decode step and %.2f ms per prefill step\n", decode * 1e3, prefill * 1e3);
    ck_assert_double_eq_tol(decode, 0.002 + 0.0004 * (double)MAX_SEQS, 0.001); /* the costs that fake_forward() simulates */
    ck_assert_double_eq_tol(prefill, 0.002 + 0.0005 * 64, 0.005);
    ck_assert_uint_eq(w.scheduler.stats.steps, 0);
    close_fixture(&w);
}
END_TEST

START_TEST(tenant_with_ten_times_the_load_gets_half) {
    static fixture w;
    fkv_engine_config config = quick_config();
    double served[2] = {0};
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 330; i++) {
        uint32_t tenant = i % 11 == 10;
        all[i] = (client_view){.max_new = 20, .n = 1};
        tokens_of(&all[i], 1000 + i, 0, 40);
        ck_ok(submit(&w, &all[i], (fkv_request){.tenant = tenant}));
    }
    /* stops before all requests of tenant 1, which has fewer requests, are done */
    while (all[10 + 11 * 25].job != NULL) (void)fkv_scheduler_turn(&w.scheduler);
    for (uint32_t i = 0; i < 330; i++)
        if (all[i].started != 0) served[i % 11 == 10] += 40.0 + 2.0 * all[i].n_new[0];
    printf("work served for tenant 0: %.0f, for tenant 1: %.0f\n", served[0], served[1]);
    ck_assert_double_le(served[0] / (served[0] + served[1]), 0.55);
    (void)run_all(&w);
    close_fixture(&w);
}
END_TEST

START_TEST(returning_tenant_has_no_credit) {
    fkv_tenant slots[2] = {{0}};
    fkv_fair_share share = {.tenants = slots, .capacity = 2};
    uint32_t a = fkv_fair_share_join(&share, 1, 1.0);
    fkv_fair_share_serve(&share, a, 1000.0);
    uint32_t b = fkv_fair_share_join(&share, 2, 2.0);
    ck_assert_double_eq(slots[b].counter, 1000.0);
    fkv_fair_share_serve(&share, b, 100.0);
    ck_assert_double_eq(slots[b].counter, 1050.0); /* a tenant with twice the weight is charged half as much */
    ck_assert_uint_lt(fkv_fair_share_join(&share, 3, 1.0),
                      2); /* there are only two slots, so a third tenant shares a slot with another tenant */
}
END_TEST

START_TEST(priority_then_deadline_then_age_order_a_tenants_requests) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    static client_view s[MAX_SEQS + 4];
    for (uint32_t i = 0; i < N_OF(s); i++) {
        s[i] = (client_view){.max_new = 4 + i, .n = 1};
        tokens_of(&s[i], 50 + i, 0, 30);
    }
    fkv_request plain = {.tenant = 1};
    for (uint32_t i = 0; i < MAX_SEQS; i++) ck_ok(submit(&w, &s[i], plain));
    (void)fkv_scheduler_turn(&w.scheduler); /* all sequence slots are now in use */
    ck_ok(submit(&w, &s[MAX_SEQS], plain));
    ck_ok(submit(&w, &s[MAX_SEQS + 1], (fkv_request){.tenant = 1, .deadline_s = 100.0}));
    ck_ok(submit(&w, &s[MAX_SEQS + 2], (fkv_request){.tenant = 1, .priority = 1}));
    ck_ok(submit(&w, &s[MAX_SEQS + 3], (fkv_request){.tenant = 1, .priority = 5}));
    s[MAX_SEQS].job->first_attempt_at -= 20.5; /* the request has waited long enough to gain two priority levels */
    (void)run_all(&w);
    ck_assert_uint_lt(s[MAX_SEQS + 3].order, s[MAX_SEQS].order);
    ck_assert_uint_lt(s[MAX_SEQS].order, s[MAX_SEQS + 2].order);
    ck_assert_uint_lt(s[MAX_SEQS + 2].order, s[MAX_SEQS + 1].order);
    close_fixture(&w);
}
END_TEST

START_TEST(decode_during_prefill_keeps_steps_short) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 6; i++) {
        all[i] = (client_view){.max_new = MAX_NEW, .n = 1};
        tokens_of(&all[i], 20 + i, 0, i < 3 ? 20 : 300);
        ck_ok(submit(&w, &all[i], (fkv_request){0}));
        for (int k = 0; k < 8; k++) (void)fkv_scheduler_turn(&w.scheduler);
        if (i == 3) w.longest = 0.0; /* the scheduler has learned the step costs */
    }
    (void)run_all(&w);
    printf("longest step: %.1f ms, limit %.0f ms\n", w.longest * 1e3, config.step_ms);
    ck_assert_double_le(w.longest * 1e3, 1.25 * config.step_ms);
    close_fixture(&w);
}
END_TEST

START_TEST(suspended_process_does_not_distort_predictions) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 2 * MAX_SEQS; i++) {
        all[i] = (client_view){.max_new = MAX_NEW, .n = 1};
        tokens_of(&all[i], 70 + i, 0, 20 + 5 * i);
        ck_ok(submit(&w, &all[i], (fkv_request){0}));
    }
    for (int k = 0; k < 40; k++) (void)fkv_scheduler_turn(&w.scheduler);
    const double before = fkv_scheduler_wait(&w.scheduler);
    ck_assert_double_gt(before, 0.0);
    w.stopped = 60.0;
    (void)fkv_scheduler_turn(&w.scheduler);
    const double after = fkv_scheduler_wait(&w.scheduler);
    printf("predicted wait %.3f s, after a suspension of one minute %.3f s\n", before, after);
    ck_assert(after > before / 2.0 && after < 2.0 * before);
    (void)run_all(&w);
    close_fixture(&w);
}
END_TEST

START_TEST(request_that_can_never_fit_is_rejected_with_the_sizes) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    client_view *s = &all[0];
    *s = (client_view){.max_new = 30, .n = 1};
    tokens_of(s, 1, 0, CONTEXT - 29);
    ck_status(submit(&w, s, (fkv_request){0}), FKV_POOL_FULL);
    ck_assert(strstr(fkv_message(), "limited to 1024") != NULL);
    s->max_new = 29;
    ck_ok(submit(&w, s, (fkv_request){0}));
    all[1] = (client_view){.max_new = 900, .n = 3};
    tokens_of(&all[1], 1, 0, 30);
    ck_status(submit(&w, &all[1], (fkv_request){0}), FKV_POOL_FULL);
    all[1].prompt[3] = VOCAB;
    all[1].n = 1;
    ck_status(submit(&w, &all[1], (fkv_request){0}), FKV_BAD_ARGUMENT);
    (void)run_all(&w);
    close_fixture(&w);
}
END_TEST

START_TEST(stop_strings_end_the_text_before_them) {
    static fixture w;
    fkv_engine_config config = quick_config();
    open_fixture(&w, &config);
    all[0] = (client_view){.max_new = MAX_NEW - 1, .n = 2};
    tokens_of(&all[0], 3, 0, 33);
    ck_ok(submit(&w, &all[0], (fkv_request){0}));
    (void)run_all(&w);
    ck_assert_str_eq(all[0].text[0], all[0].text[1]);
    char stop[4] = {0};
    memcpy(stop, all[0].text[0] + 20, 3);
    size_t at = (size_t)(strstr(all[0].text[0], stop) - all[0].text[0]);
    const char *stops[] = {"nowhere", stop};
    all[1] = (client_view){.max_new = MAX_NEW - 1, .n = 1};
    tokens_of(&all[1], 3, 0, 33);
    ck_ok(submit(&w, &all[1], (fkv_request){.stops = stops, .n_stops = 2}));
    (void)run_all(&w);
    ck_assert_int_eq(all[1].reason, FKV_FINISH_STOP);
    ck_assert_uint_eq(all[1].n_text[0], at);
    ck_assert(memcmp(all[1].text[0], all[0].text[0], at) == 0);
    close_fixture(&w);
}
END_TEST

/* Feeds random texts of the letters a and b in random parts. The shown text must end where one of two random stop strings first
 * occurs. */
START_TEST(held_text_is_what_could_become_a_stop_string) {
    uint64_t random = 9;
    for (uint32_t round = 0; round < 20000 / TEST_EVERY; round++) {
        char text[32] = {0};
        char shown[64] = {0};
        char held[64];
        char words[2][5] = {{0}};
        const char *stops[2] = {words[0], words[1]};
        uint32_t n = 1 + random_below(&random, 24);
        for (uint32_t i = 0; i < n; i++) text[i] = (char)('a' + random_below(&random, 2));
        for (uint32_t k = 0; k < 2; k++)
            for (uint32_t i = 0, m = 1 + random_below(&random, 4); i < m; i++)
                words[k][i] = (char)('a' + random_below(&random, 2));
        fkv_answer_text t = {.held = held, .capacity = sizeof held};
        const char *found = NULL;
        uint32_t fed = 0;
        while (fed < n && found == NULL) {
            uint32_t take = 1 + random_below(&random, 3);
            if (take > n - fed) take = n - fed;
            found = fkv_answer_text_add(&t, (fkv_stop_list){stops, 2}, text + fed, take);
            strncat(shown, t.held, t.n_shown);
            fed += take;
        }
        fkv_answer_text_end(&t);
        if (found == NULL) strncat(shown, t.held, t.n_shown);
        text[fed] = 0; /* only the text fed so far counts; an incomplete stop string at its end is no stop */
        char *first = NULL;
        for (uint32_t k = 0; k < 2; k++) {
            char *p = strstr(text, words[k]);
            if (p != NULL && (first == NULL || p < first)) first = p;
        }
        ck_assert_int_eq(found != NULL, first != NULL);
        if (first != NULL) *first = 0;
        ck_assert_msg(strcmp(shown, text) == 0, "round %u: \"%s\", expected \"%s\"", round, shown, text);
    }
    fkv_answer_text t = {.held = (char[16]){0}, .capacity = 16};
    fkv_stop_list none = {0};
    (void)fkv_answer_text_add(&t, none, "a\xe2\x82", 3);
    ck_assert_uint_eq(t.n_shown, 1);
    (void)fkv_answer_text_add(&t, none, "\xac", 1);
    ck_assert_uint_eq(t.n_shown, 3);
}
END_TEST

/* ---- masks and failures ---- */

typedef struct masked {
    uint32_t written[2][MAX_NEW]; /* tokens of each answer */
    uint32_t n[2];
    uint32_t n_calls[2]; /* number of calls of the mask callback for each answer */
    uint32_t fail_at;    /* position at which the mask fails; 0 if it never fails */
    uint32_t end_at;     /* position at which the mask allows no token; 0 if it always allows some token */
    uint32_t n_failed;   /* number of failure events with the expected message */
    uint32_t n_done;
} masked;

static bool allows(uint32_t answer, uint32_t n_written, uint32_t token) {
    return token != END_TOKEN && (token + n_written + answer) % 3 != 0;
}

static const char *some_of_them(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                                uint32_t n_vocab) {
    masked *m = user;
    if (n_tokens != m->n_calls[answer]++ || n_tokens != m->n[answer]) abort();
    if (n_tokens > 0 && memcmp(tokens, m->written[answer], n_tokens * sizeof *tokens) != 0) abort();
    if (m->end_at != 0 && n_tokens == m->end_at) return NULL;
    for (uint32_t i = 0; i < n_vocab; i++)
        if (allows(answer, n_tokens, i)) bits[i / 32] |= 1u << i % 32;
    return m->fail_at != 0 && n_tokens == m->fail_at ? "the grammar ends here" : NULL;
}

static void note_masked(void *user, const fkv_event *e) {
    masked *m = user;
    if (e->kind == FKV_EVENT_TOKEN) m->written[e->answer][m->n[e->answer]++] = e->token;
    if (e->kind == FKV_EVENT_DONE) m->n_done++;
    if (e->kind == FKV_EVENT_STARTED || e->reason != FKV_FINISH_FAILED) return;
    m->n_failed += e->message != NULL && strcmp(e->message, m->fail_at != 0 ? "the grammar ends here" : "the device broke") == 0;
    (void)fkv_fail(FKV_BAD_ARGUMENT,
                   "message from an earlier failure"); /* a callback that calls the library may overwrite the message */
}

static void submit_masked(fixture *w, masked *m, uint32_t seed) {
    static client_view s;
    s = (client_view){.max_new = MAX_NEW, .n = 2};
    tokens_of(&s, seed, 0, 40);
    ck_ok(submit(w, &s, (fkv_request){.tenant = seed, .mask = some_of_them, .mask_user = m}));
    s.job->r.event = note_masked;
    s.job->r.user = m;
}

static uint32_t chosen(fkv_draft_candidate *offers, uint32_t n, const double *extra, uint32_t most, double token_s) {
    uint32_t sum = 0;
    uint32_t n_chosen = fkv_draft_choose(offers, n, extra, most, token_s);
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_uint_le(offers[i].n_chosen, offers[i].n_proposed);
        sum += offers[i].n_chosen;
    }
    ck_assert_uint_eq(sum, n_chosen);
    return n_chosen;
}

START_TEST(drafts_are_tried_only_as_far_as_they_pay_off) {
    fkv_draft_record r = fkv_draft_record_init();
    for (int i = 0; i < 40; i++) fkv_draft_update(&r, 3, 3);
    ck_assert_double_gt(r.acceptance, 0.9);
    for (int i = 0; i < 40; i++)
        fkv_draft_update(&r, 3, 1); /* the first of three drafts is accepted, and the second is rejected */
    ck_assert_double_eq_tol(r.acceptance, 0.5, 0.1);
    for (int i = 0; i < 40; i++) fkv_draft_update(&r, 1, 0);
    ck_assert_double_lt(r.acceptance, 0.1);
    for (int i = 0; i < 40; i++)
        fkv_draft_update(&r, 1, 1); /* a draft that was not tried is counted as accepted if it equals the generated token */
    ck_assert_double_gt(r.acceptance, 0.9);

    const double even[] = {0.0, 0.001, 0.002, 0.003, 0.004};
    const double steps[] = {0.0, 0.003, 0.003, 0.003,
                            0.003}; /* the first draft costs 3 ms, and up to three more drafts cost nothing */
    fkv_draft_candidate one[] = {{.acceptance = 0.5, .n_proposed = 4}};
    ck_assert_uint_eq(chosen(one, 1, even, 4, 0.001), 0); /* the expected savings are below the cost */
    ck_assert_uint_eq(chosen(one, 1, even, 4, 0.003), 1);
    ck_assert_uint_eq(chosen(one, 1, even, 4, 0.006), 2);
    ck_assert_uint_eq(chosen(one, 1, even, 1, 0.006), 1);
    fkv_draft_candidate some[] = {{.acceptance = 0.9, .n_proposed = 2},
                                  {.acceptance = 0.1, .n_proposed = 3},
                                  {.acceptance = 0.8, .n_proposed = 1},
                                  {.acceptance = 1.0}};
    ck_assert_uint_eq(chosen(some, 4, even, 4, 0.002), 3); /* only drafts that are likely to be accepted are tried */
    ck_assert(some[0].n_chosen == 2 && some[1].n_chosen == 0 && some[2].n_chosen == 1);
    ck_assert_uint_eq(chosen(some, 4, steps, 2, 0.0018), 0); /* two drafts together save less time than they cost */
    ck_assert_uint_eq(chosen(some, 4, steps, 4, 0.0018), 4); /* all four drafts together save more time than they cost */
    ck_assert_uint_eq(chosen(some, 0, even, 4, 1.0), 0);
}
END_TEST

/* If the time limit of a step determines the length of a prefill chunk, the total number of rows in the step, including decode
 * rows, must be a multiple of the row-block size. */
START_TEST(prefill_chunks_are_multiples_of_the_row_block) {
    static fixture w;
    fkv_engine_config config = quick_config();
    uint32_t n_cut = 0;
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 6; i++) {
        all[i] = (client_view){.max_new = MAX_NEW, .n = 1};
        tokens_of(&all[i], 20 + i, 0, i < 3 ? 20 : 400);
        ck_ok(submit(&w, &all[i], (fkv_request){0}));
    }
    while (w.scheduler.n_running + w.scheduler.queue.n > 0) {
        (void)fkv_scheduler_turn(&w.scheduler);
        uint32_t n = 0;
        for (uint32_t i = 0; i < w.scheduler.n_rows; i++) n += w.scheduler.rows[i].n_tokens;
        if (w.scheduler.n_rows == 0) continue;
        const fkv_tokens *last = &w.scheduler.rows[w.scheduler.n_rows - 1];
        if (last->logits != FKV_LOGITS_NONE || last->n_tokens <= 16) continue;
        ck_assert_uint_eq(n % 16, 0);
        n_cut++;
    }
    ck_assert_uint_gt(n_cut, 5);
    close_fixture(&w);
}
END_TEST

static void submit_prompt(fixture *w, uint32_t i, uint32_t n_prompt, int32_t priority) {
    all[i] = (client_view){.max_new = MAX_NEW, .n = 1};
    tokens_of(&all[i], 20 + i, 0, n_prompt);
    ck_ok(submit(w, &all[i], (fkv_request){.tenant = 1, .priority = priority}));
}

/* A long prompt with a cached prefix starts in the room that another prompt leaves in a step, while other requests decode. Its
 * first chunk is short and ends inside a page. All later chunks except the last end at page boundaries. The next prompt uses the
 * room that these chunks leave in their steps. */
START_TEST(long_prefill_chunks_end_at_page_boundaries) {
    static fixture w;
    fkv_engine_config config = quick_config();
    enum { N_DECODING = 3, PREFIX = 2 * PAGE, LONG_CHUNK = FKV_LONG_CHUNK_PAGES * PAGE };
    config.step_ms = 1000.0; /* large enough for steps of STEP_TOKENS tokens */
    open_fixture(&w, &config);
    submit_after_prefix(&w, N_CLIENTS - 1, PREFIX, 1); /* adds the prefix to the cache */
    (void)run_all(&w);
    for (uint32_t i = 0; i < N_DECODING; i++) submit_prompt(&w, i, 20, 0);
    (void)fkv_scheduler_turn(&w.scheduler);
    w.n_partial = 0;
    submit_prompt(&w, N_DECODING, STEP_TOKENS - N_DECODING - PAGE / 2, 1); /* leaves half a page for the next prompt */
    submit_after_prefix(&w, N_DECODING + 1, PREFIX, 700);
    submit_prompt(&w, N_DECODING + 2, 500, 0);
    uint32_t n_full = 0; /* number of full steps that compute chunks of two prompts */
    while (w.scheduler.n_running + w.scheduler.queue.n > 0) {
        (void)fkv_scheduler_turn(&w.scheduler);
        uint32_t n = 0;
        uint32_t n_chunks = 0;
        for (uint32_t i = 0; i < w.scheduler.n_rows; i++) {
            n += w.scheduler.rows[i].n_tokens;
            n_chunks += w.scheduler.rows[i].n_tokens > 1;
        }
        n_full += n == STEP_TOKENS && n_chunks == 2;
    }
    ck_assert_uint_eq(all[N_DECODING + 1].n_cached, PREFIX);
    ck_assert_uint_eq(w.partial[0].from, PREFIX);
    ck_assert_uint_eq(w.partial[0].n, PAGE / 2);
    uint32_t n_long = 0;
    for (uint32_t i = 0; i < w.n_partial; i++) {
        if (w.partial[i].n < LONG_CHUNK - PAGE) continue;
        ck_assert_uint_eq((w.partial[i].from + w.partial[i].n) % PAGE, 0);
        n_long++;
    }
    ck_assert_uint_ge(n_long, 8);
    ck_assert_uint_ge(n_full, 5);
    close_fixture(&w);
}
END_TEST

/* Chunks are computed in order, without gaps, even if a step has room for only one token. */
START_TEST(prefill_makes_progress_in_steps_of_any_size) {
    static fixture w;
    fkv_engine_config config = quick_config();
    static const double step_ms[] = {0.001, 1000.0};
    for (uint32_t round = 0; round < 12; round++) {
        config.step_ms = step_ms[round % 2]; /* with the first value, decoding alone exceeds the target step time */
        open_fixture(&w, &config);
        w.scheduler.device.max_step_tokens = MAX_SEQS + 1 + round / 2 * (PAGE - 1);
        for (uint32_t i = 0; i < MAX_SEQS; i++) submit_prompt(&w, i, i < MAX_SEQS - 2 ? 20 : 200, 0);
        (void)run_all(&w);
        for (uint32_t i = 0; i < MAX_SEQS; i++) ck_assert_int_eq(all[i].reason, FKV_FINISH_LENGTH);
        for (uint32_t i = 0; i < w.n_partial; i++) {
            uint32_t end = 0; /* end of the previous chunk of the same prompt */
            for (uint32_t k = 0; k < i; k++)
                if (w.partial[k].seq == w.partial[i].seq) end = w.partial[k].from + w.partial[k].n;
            ck_assert_uint_eq(w.partial[i].from, end);
            ck_assert_uint_gt(w.partial[i].n, 0);
        }
        close_fixture(&w);
    }
    for (uint32_t from = 0; from < 3 * PAGE; from++)
        for (uint32_t most = 1; most < 8 * PAGE; most++) {
            const uint32_t n = fkv_prefill_chunk(PAGE, from, 6 * PAGE, most);
            if (most >= 6 * PAGE)
                ck_assert_uint_eq(n, 6 * PAGE);
            else if (most < FKV_LONG_CHUNK_PAGES * PAGE)
                ck_assert_uint_eq(n, most);
            else
                ck_assert(n <= most && n > most - PAGE && (from + n) % PAGE == 0);
        }
}
END_TEST

START_TEST(drafts_and_forks_obey_a_mask) {
    static fixture w;
    fkv_engine_config config = quick_config();
    masked with[2] = {0};
    drafts = true; /* makes the test model generate repetitive text in both rounds, so that drafts are accepted */
    for (uint32_t round = 0; round < 2; round++) {
        masked *m = &with[round];
        open_fixture(&w, &config);
        if (round == 0) w.scheduler.device.draft_tokens = 0;
        w.scheduler.cost.weights[1] = 0.0; /* the cost model charges nothing for rows, so every draft is worth trying */
        submit_masked(&w, m, 3);
        (void)run_all(&w);
        ck_assert_uint_eq(m->n_done, 1);
        for (uint32_t a = 0; a < 2; a++) {
            ck_assert_uint_eq(m->n[a], MAX_NEW);
            for (uint32_t i = 0; i < MAX_NEW; i++) ck_assert(allows(a, i, m->written[a][i]));
        }
        ck_assert_int_eq(w.scheduler.stats.drafted_tokens > 0, round == 1);
        close_fixture(&w);
    }
    ck_assert_mem_eq(with[0].written, with[1].written, sizeof with[0].written);
    drafts = false;
}
END_TEST

START_TEST(every_failed_request_receives_the_reason) {
    static fixture w;
    fkv_engine_config config = quick_config();
    masked m[2] = {{.fail_at = 5}, {.fail_at = 7}};
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 2; i++) submit_masked(&w, &m[i], 3 + i);
    (void)run_all(&w);
    for (uint32_t i = 0; i < 2; i++) {
        ck_assert_uint_eq(m[i].n_failed, 3); /* one event for each of the two answers, and one for the end of the request */
        ck_assert_uint_eq(m[i].n[0], m[i].fail_at);
    }
    m[0] = (masked){.end_at = 6};
    submit_masked(&w, &m[0], 3);
    (void)run_all(&w);
    ck_assert_uint_eq(m[0].n_done, 1);
    ck_assert_uint_eq(m[0].n_failed, 0);
    ck_assert_uint_eq(m[0].n[1], 6); /* a mask that allows nothing ends the answer */
    for (uint32_t i = 0; i < 2; i++) {
        m[i] = (masked){0};
        submit_masked(&w, &m[i], 3 + i);
    }
    for (uint32_t i = 0; i < 6; i++) (void)fkv_scheduler_turn(&w.scheduler);
    w.broken = true;
    (void)run_all(&w);
    for (uint32_t i = 0; i < 2; i++) ck_assert_uint_eq(m[i].n_failed, 3);
    close_fixture(&w);
}
END_TEST

#ifdef FKV_HAVE_JEMALLOC
static const char *everything(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                              uint32_t n_vocab) {
    (void)user, (void)answer, (void)tokens, (void)n_tokens;
    memset(bits, 0xff, n_vocab / 8);
    return NULL;
}

static void quiet_event(void *user, const fkv_event *event) {
    (void)user;
    (void)event;
}
#endif

START_TEST(steps_allocate_nothing) {
#ifdef FKV_HAVE_JEMALLOC
    static fixture w;
    fkv_engine_config config = quick_config();
    uint64_t before = 0;
    uint64_t after = 0;
    size_t size = sizeof before;
    open_fixture(&w, &config);
    for (uint32_t i = 0; i < 4; i++) {
        all[i] = (client_view){.max_new = MAX_NEW, .n = 1};
        tokens_of(&all[i], 20 + i, 0, 100 + 100 * i);
        ck_ok(submit(&w, &all[i], (fkv_request){.logprobs = true, .n_top = 5, .mask = i == 0 ? everything : NULL}));
        all[i].job->r.event =
            quiet_event; /* a callback without assertions, because the assertions of the Check library allocate memory */
    }
    (void)fkv_scheduler_turn(&w.scheduler);
    if (mallctl("thread.allocated", &before, &size, NULL, 0) != 0) abort();
    for (int i = 0; i < 30; i++) (void)fkv_scheduler_turn(&w.scheduler);
    if (mallctl("thread.allocated", &after, &size, NULL, 0) != 0) abort();
    ck_assert_uint_eq(before, after);
    (void)run_all(&w);
    close_fixture(&w);
#endif
}
END_TEST

TEST_MAIN("engine", random_requests_cancels_and_tenants_keep_all_invariants, shared_prefix_of_32_requests_is_computed_once,
          forecast_counts_a_shared_prefix_once, recent_prompts_predict_the_cached_prefix,
          warm_up_measures_the_device_before_the_first_request, tenant_with_ten_times_the_load_gets_half,
          returning_tenant_has_no_credit, priority_then_deadline_then_age_order_a_tenants_requests,
          decode_during_prefill_keeps_steps_short, suspended_process_does_not_distort_predictions,
          request_that_can_never_fit_is_rejected_with_the_sizes, stop_strings_end_the_text_before_them,
          prompts_with_sealed_layers_share_all_pages_before_they_diverge, held_text_is_what_could_become_a_stop_string,
          drafts_are_tried_only_as_far_as_they_pay_off, prefill_chunks_are_multiples_of_the_row_block,
          long_prefill_chunks_end_at_page_boundaries, prefill_makes_progress_in_steps_of_any_size, drafts_and_forks_obey_a_mask,
          every_failed_request_receives_the_reason, steps_allocate_nothing)
