/* Tests of the engine with models that have recurrent layers: in a conversation, a new turn, a regenerated turn and a turn after
 * a shortened answer compute only their new tokens and at most 80 others. Answers are the same with and without cached tokens.
 */
#include "golden_models.h"
#include "model_fixture.h"
#include "sanitized.h"
#include "test.h"

#include <flatkv/engine.h>

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* MAX_REPEATED is the largest number of cached tokens that a turn may compute again. A turn continues from a snapshot at the last
 * page boundary before the tokens that introduce the answer. */
enum {
    PAGE = 64,
    MAX_REPEATED = 80,
    MAX_NEW = TEST_SANITIZED ? 70 : 90,
    N_USER = 40,
    N_TURNS = TEST_SANITIZED ? 2 : 6,
    MAX_PROMPT = 4000
};

static const char *const NAMES[] = {"lfm2", "qwen35"};

typedef struct reply {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
    fkv_finish reason;
    uint32_t tokens[MAX_NEW];
    uint32_t n;
    uint32_t n_cached;
} reply;

static void on_event(void *user, const fkv_event *e) {
    reply *r = user;
    (void)pthread_mutex_lock(&r->lock);
    if (e->kind == FKV_EVENT_TOKEN && r->n < MAX_NEW) r->tokens[r->n++] = e->token;
    if (e->kind == FKV_EVENT_STARTED) r->n_cached = e->n_cached;
    if (e->kind == FKV_EVENT_DONE) {
        r->reason = e->reason;
        r->done = true;
        (void)pthread_cond_signal(&r->changed);
    }
    (void)pthread_mutex_unlock(&r->lock);
}

static uint32_t n_drafts; /* maximum number of draft tokens per answer in engines opened from now on */

static bool is_half; /* true: engines store 16-bit keys and values; false: engines use the default codec, which is sealed */

static fkv_engine_config engine_config(uint32_t max_snapshots) {
    fkv_engine_config c = fkv_engine_config_default();
    c.runner.max_tokens = 4 * MAX_PROMPT;
    c.runner.max_seqs = 3;
    c.draft_tokens = n_drafts;
    c.runner.max_logit_rows = c.runner.max_seqs * (1 + n_drafts);
    c.runner.max_step_tokens = 256;
    c.runner.page_tokens = PAGE;
    c.runner.n_threads = 2;
    c.runner.max_snapshots = max_snapshots;
    if (is_half) c.runner.k = c.runner.v = (fkv_codec_config){16, 32};
    return c;
}

static fkv_engine *open_engine(const fkv_model *model, uint32_t max_snapshots) {
    const fkv_engine_config c = engine_config(max_snapshots);
    fkv_engine *engine = NULL;
    ck_ok(fkv_engine_open(model, &c, &engine));
    return engine;
}

/* Submits a request and waits for its answer. mark: number of prompt tokens before the last user message; 0 if unknown */
static void ask_marked(fkv_engine *engine, const uint32_t *prompt, uint32_t n_prompt, uint32_t mark, reply *r) {
    memset(r, 0, sizeof *r);
    (void)pthread_mutex_init(&r->lock, NULL);
    (void)pthread_cond_init(&r->changed, NULL);
    fkv_request request = {.prompt = prompt,
                           .n_prompt = n_prompt,
                           .max_new = MAX_NEW,
                           .sampler = fkv_sampler_config_default(),
                           .ignore_end = true,
                           .event = on_event,
                           .user = r};
    request.sampler.temperature = 0.0f;
    request.snapshots[0] = mark;
    request.n_snapshots = mark > 0 ? 1 : 0;
    uint64_t id = 0;
    ck_ok(fkv_engine_submit(engine, &request, &id, NULL));
    (void)pthread_mutex_lock(&r->lock);
    while (!r->done) (void)pthread_cond_wait(&r->changed, &r->lock);
    (void)pthread_mutex_unlock(&r->lock);
    (void)pthread_cond_destroy(&r->changed);
    (void)pthread_mutex_destroy(&r->lock);
    ck_assert_int_eq(r->reason, FKV_FINISH_LENGTH);
    ck_assert_uint_eq(r->n, MAX_NEW);
}

static void ask(fkv_engine *engine, const uint32_t *prompt, uint32_t n_prompt, reply *r) {
    ask_marked(engine, prompt, n_prompt, 0, r);
}

typedef struct chat {
    uint32_t tokens[MAX_PROMPT];
    uint32_t n;
    uint32_t seed;
} chat;

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void add_random(chat *c, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        c->seed = c->seed * 1664525u + 1013904223u;
        c->tokens[c->n++] = (c->seed >> 16) % GOLDEN_VOCAB;
    }
}

/* Runs a conversation. kept: number of tokens at the end of each answer that stay in the history, as if a chat template removed
 * the reasoning before them. Each turn begins with N_USER tokens and ends with `n_intro` tokens that introduce the answer. If
 * reasoning is removed, the history omits the last of the introducing tokens. */
static void run_chat(const char *name, const fkv_model *model, uint32_t kept, uint32_t n_intro) {
    static chat c;
    static reply r;
    static reply again;
    static reply fresh;
    fkv_engine *engine = open_engine(model, 8);
    c = (chat){.seed = kept + n_intro};
    uint32_t n_known = 0; /* number of prompt tokens that the engine has already computed, in a prompt or in an answer */
    add_random(&c, 300);  /* system prompt */
    for (uint32_t turn = 0; turn < N_TURNS; turn++) {
        add_random(&c, N_USER);
        const uint32_t n_history = c.n;
        add_random(&c, n_intro);
        ask(engine, c.tokens, c.n, &r);
        const uint32_t n_new = c.n - n_known;
        ck_assert_msg(turn == 0 || c.n - r.n_cached <= n_new + MAX_REPEATED, "%s, turn %u: %u of %u tokens computed, %u new",
                      name, turn, c.n - r.n_cached, c.n, n_new);
        ask(engine, c.tokens, c.n, &again); /* the turn is regenerated */
        ck_assert_uint_le(c.n - again.n_cached, MAX_REPEATED);
        ck_assert_int_eq(memcmp(r.tokens, again.tokens, sizeof r.tokens), 0);
        if (kept < MAX_NEW) c.n = n_known = n_history + n_intro - 1;
        memcpy(c.tokens + c.n, r.tokens + MAX_NEW - kept, kept * sizeof *r.tokens);
        c.n += kept;
        if (kept == MAX_NEW) n_known = c.n - 1; /* the last token of an answer is not in the cache */
    }
    c.n -= kept;
    fkv_engine *other = open_engine(model, 0);
    ask(other, c.tokens, c.n, &fresh);
    ask(engine, c.tokens, c.n, &r);
    ck_assert_int_eq(memcmp(r.tokens, fresh.tokens, sizeof r.tokens), 0);
    fkv_engine_close(other);
    fkv_engine_close(engine);
}

static void with_model(const char *name, void (*run)(const char *name, const fkv_model *model)) {
    static golden_model golden;
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    golden_model_open(&golden, name);
    ck_ok(fkv_model_load(golden.folder, &config, &model));
    run(name, model);
    fkv_model_close(model);
    golden_model_close(&golden);
}

static void with_models(void (*run)(const char *name, const fkv_model *model)) {
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) with_model(NAMES[i], run);
}

static void run_with_answers(const char *name, const fkv_model *model) { run_chat(name, model, MAX_NEW, 5); }
static void run_without_reasoning(const char *name, const fkv_model *model) { run_chat(name, model, 30, 6); }

START_TEST(an_added_turn_computes_only_its_new_tokens) { with_models(run_with_answers); }
END_TEST

START_TEST(a_turn_whose_reasoning_is_removed_computes_only_its_new_tokens) { with_models(run_without_reasoning); }
END_TEST

/* Drafts change neither the answers nor the number of computed tokens. The prompt repeats a text, so most answers contain drafts.
 */
static void run_with_drafts(const char *name, const fkv_model *model) {
    static chat c;
    static reply plain;
    static reply drafted;
    fkv_engine_stats stats;
    c = (chat){.seed = 3};
    add_random(&c, 50);
    for (uint32_t i = 0; i < 4; i++, c.n += 50) memcpy(c.tokens + c.n, c.tokens, 50 * sizeof *c.tokens);
    fkv_engine *engine = open_engine(model, 8);
    ask(engine, c.tokens, c.n, &plain);
    fkv_engine_close(engine);
    n_drafts = 3;
    engine = open_engine(model, 8);
    ask(engine, c.tokens, c.n, &drafted);
    ck_assert_int_eq(memcmp(plain.tokens, drafted.tokens, sizeof plain.tokens), 0);
    fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_ge(stats.drafted_tokens, stats.accepted_tokens); /* the numbers depend on measured times */
    printf("%s: %u of %u draft tokens were accepted\n", name, (unsigned)stats.accepted_tokens, (unsigned)stats.drafted_tokens);
    fkv_engine_close(engine);
    run_chat(name, model, MAX_NEW, 5);
    n_drafts = 0;
}

START_TEST(drafts_change_neither_answers_nor_snapshots) { with_models(run_with_drafts); }
END_TEST

/* Tests edits of every earlier user message after a conversation whose reasoning was removed. */
static void run_edits(const char *name, const fkv_model *model) {
    static chat c;
    static reply r;
    enum { KEPT = 30, INTRO = 6 };
    uint32_t starts[N_TURNS];
    fkv_engine *engine = open_engine(model, 4 * N_TURNS);
    c = (chat){.seed = 5};
    add_random(&c, 300);
    for (uint32_t turn = 0; turn < N_TURNS; turn++) {
        starts[turn] = c.n;
        add_random(&c, N_USER + INTRO);
        ask_marked(engine, c.tokens, c.n, starts[turn], &r);
        c.n--;
        memcpy(c.tokens + c.n, r.tokens + MAX_NEW - KEPT, KEPT * sizeof *r.tokens);
        c.n += KEPT;
    }
    for (uint32_t turn = N_TURNS; turn-- > 0;) {
        c.n = starts[turn];
        add_random(&c, N_USER + INTRO);
        ask_marked(engine, c.tokens, c.n, starts[turn], &r);
        ck_assert_msg(c.n - r.n_cached <= N_USER + INTRO + MAX_REPEATED, "%s, edited turn %u: %u of %u tokens computed", name,
                      turn, c.n - r.n_cached, c.n);
    }
    fkv_engine_close(engine);
}

START_TEST(an_edited_turn_computes_only_its_new_tokens) { with_models(run_edits); }
END_TEST

/* Each of many long answers keeps only its latest snapshot, so the snapshot of their shared prompt must not be evicted. */
static void run_branches(const char *name, const fkv_model *model) {
    static chat c;
    static reply r;
    enum { N_SNAPSHOTS = 4, N_BRANCHES = TEST_SANITIZED ? N_SNAPSHOTS + 2 : 2 * N_SNAPSHOTS };
    fkv_engine *engine = open_engine(model, N_SNAPSHOTS);
    c = (chat){.seed = 77};
    add_random(&c, TEST_SANITIZED ? 200 : 500);
    const uint32_t n_shared = c.n;
    for (uint32_t branch = 0; branch < N_BRANCHES; branch++) {
        c.n = n_shared;
        c.seed = branch;
        add_random(&c, 20);
        ask(engine, c.tokens, c.n, &r);
        /* the first branch computes the whole prompt; later branches recompute at most MAX_REPEATED shared tokens */
        if (branch > 0)
            ck_assert_msg(c.n - r.n_cached <= 20 + MAX_REPEATED, "%s, branch %u: %u cached", name, branch, r.n_cached);
    }
    fkv_engine_stats stats;
    fkv_engine_stats_now(engine, &stats);
    ck_assert_uint_le(stats.cache.groups[stats.plan.cache.state_group].cached, stats.plan.cache.state_slots);
    fkv_engine_close(engine);
}

/* The second of several prompts with a common beginning leaves a snapshot at the point where they diverge. The third prompt
 * therefore recomputes no shared tokens, although all prompts continue with many different tokens. */
static void run_junction(const char *name, const fkv_model *model) {
    static chat c;
    static reply r;
    fkv_engine *engine = open_engine(model, 4);
    for (uint32_t branch = 0; branch < 3; branch++) {
        c = (chat){.seed = 3};
        add_random(&c, 700);
        c.seed = 100 + branch;
        add_random(&c, 400);
        ask(engine, c.tokens, c.n, &r);
        if (branch == 2) ck_assert_msg(r.n_cached == 640, "%s: %u cached", name, r.n_cached);
    }
    fkv_engine_close(engine);
}

START_TEST(prompts_share_the_snapshot_of_their_junction) { with_model("falcon_h1", run_junction); }
END_TEST

START_TEST(branches_share_the_snapshot_of_their_prompt) { with_models(run_branches); }
END_TEST

/* Runs a conversation of LONG_TURNS turns whose reasoning is removed. Then edits a message in the middle, regenerates the edited
 * turn, and starts several branches at that message. Returns the largest number of tokens that a turn computes in addition to its
 * new tokens. */
static uint32_t run_long_chat(const fkv_model *model, uint32_t max_snapshots) {
    static chat c;
    static reply r;
    enum { USER = 100, KEPT = 60, INTRO = 6 };
    enum { LONG_TURNS = TEST_SANITIZED ? 8 : 20, EDITED = LONG_TURNS / 2, BRANCHES = TEST_SANITIZED ? 2 : 8 };
    uint32_t starts[LONG_TURNS];
    uint32_t worst = 0;
    fkv_engine *engine = open_engine(model, max_snapshots);
    c = (chat){.seed = 11};
    add_random(&c, 300);
    for (uint32_t turn = 0; turn < LONG_TURNS; turn++) {
        const uint32_t n_known = c.n - (turn > 0 ? KEPT : 0);
        starts[turn] = c.n;
        add_random(&c, USER + INTRO);
        ask_marked(engine, c.tokens, c.n, starts[turn], &r);
        if (turn > 0) worst = larger(worst, n_known - smaller(n_known, r.n_cached));
        c.n--;
        memcpy(c.tokens + c.n, r.tokens + MAX_NEW - KEPT, KEPT * sizeof *r.tokens);
        c.n += KEPT;
    }
    for (uint32_t branch = 0; branch <= BRANCHES; branch++) {
        c.n = starts[EDITED];
        c.seed = branch;
        add_random(&c, USER + INTRO);
        for (uint32_t again = 0; again < (branch == 0 ? 2 : 1); again++) {
            ask_marked(engine, c.tokens, c.n, starts[EDITED], &r);
            worst = larger(worst, starts[EDITED] - smaller(starts[EDITED], r.n_cached));
        }
    }
    fkv_engine_close(engine);
    return worst;
}

static void run_long_chats(const char *name, const fkv_model *model) {
    (void)name;
    if (!TEST_SANITIZED) ck_assert_uint_le(run_long_chat(model, 40), MAX_REPEATED);
    /* with few snapshots, the distances between older snapshots are larger, but some must remain, or the edited turn would
     * compute its whole prompt */
    ck_assert_uint_le(run_long_chat(model, 11), 2 * MAX_REPEATED);
}

START_TEST(a_long_conversation_computes_only_new_tokens) { with_model("nemotron_h", run_long_chats); }
END_TEST

static const char *store_path(void) {
    static char path[200];
    const char *root = getenv("TMPDIR");
    (void)snprintf(path, sizeof path, "%s/flatkv_states_test_%d", root != NULL ? root : "/tmp", (int)getpid());
    return path;
}

static void remove_store(void) {
    char name[600];
    DIR *dir = opendir(store_path());
    ck_assert_ptr_nonnull(dir);
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        (void)snprintf(name, sizeof name, "%s/%s", store_path(), d->d_name);
        (void)unlink(name);
    }
    (void)closedir(dir);
    (void)rmdir(store_path());
}

static fkv_engine *open_stored_engine(const fkv_model *model, const fkv_prefix_store *store) {
    fkv_engine_config c = engine_config(8);
    fkv_engine *engine = NULL;
    c.store = store;
    ck_ok(fkv_engine_open(model, &c, &engine));
    return engine;
}

/* After a restart, the engine restores pages and snapshots from a prefix folder. The next turn of a conversation and a
 * regenerated turn compute only their new tokens, and their answers equal the answers of an engine without a store. */
static void run_restart(const char *name, const fkv_model *model) {
    static chat c;
    static reply r;
    static reply fresh;
    enum { KEPT = 30, INTRO = 6, TURNS = 4 };
    fkv_prefix_store store;
    for (uint32_t drops_reasoning = 0; drops_reasoning < 2; drops_reasoning++) {
        c = (chat){.seed = 21 + drops_reasoning};
        is_half = drops_reasoning == 1;
        ck_ok(fkv_prefix_folder_open(store_path(), 64 << 20, &store));
        fkv_engine *engine = open_stored_engine(model, &store);
        add_random(&c, 300);
        uint32_t n_known = 0;
        for (uint32_t turn = 0; turn < TURNS; turn++) {
            add_random(&c, N_USER + INTRO);
            ask(engine, c.tokens, c.n, &r);
            n_known = c.n - 1;
            const uint32_t kept = drops_reasoning ? KEPT : MAX_NEW;
            if (drops_reasoning) c.n--;
            memcpy(c.tokens + c.n, r.tokens + MAX_NEW - kept, kept * sizeof *r.tokens);
            c.n += kept;
            if (!drops_reasoning) n_known = c.n - 1;
        }
        fkv_engine_close(engine);
        store.close(store.self);
        ck_ok(fkv_prefix_folder_open(store_path(), 64 << 20, &store));
        engine = open_stored_engine(model, &store);
        add_random(&c, N_USER + INTRO);
        ask(engine, c.tokens, c.n, &r);
        ck_assert_msg(r.n_cached + MAX_REPEATED >= n_known, "%s: %u of %u known tokens cached after a restart", name, r.n_cached,
                      n_known);
        fkv_engine_stats stats;
        fkv_engine_stats_now(engine, &stats);
        ck_assert(stats.store.read_pages > 0 && stats.store.damaged_pages == 0);
        fkv_engine_close(engine);
        store.close(store.self);
        engine = open_engine(model, 0);
        ask(engine, c.tokens, c.n, &fresh);
        ck_assert_int_eq(memcmp(r.tokens, fresh.tokens, sizeof r.tokens), 0);
        fkv_engine_close(engine);
    }
    is_half = false;
    remove_store();
}

START_TEST(a_restarted_engine_computes_only_new_tokens) { with_model("qwen35", run_restart); }
END_TEST

/* The first layers of both models are recurrent, so group 0 holds states. */
static void check_page_map(const char *name, const fkv_model *model) {
    static chat c;
    static reply r;
    static fkv_page_info pages[FKV_MAX_LISTED_PAGES];
    fkv_engine_stats stats;
    fkv_engine *engine = open_engine(model, 4);
    c = (chat){.seed = 6};
    add_random(&c, 300);
    ask(engine, c.tokens, c.n, &r);
    do /* waits for the statistics, which the engine publishes together with the page map after the last event of the request */
        fkv_engine_stats_now(engine, &stats);
    while (stats.finished[FKV_FINISH_LENGTH] == 0 && usleep(1000) == 0);
    ck_assert_uint_eq(stats.plan.cache.state_group, 0);
    ck_assert_uint_eq(stats.page_group, 1);
    const fkv_group_stats *g = &stats.cache.groups[stats.page_group];
    const uint32_t n = fkv_engine_pages(engine, pages, FKV_MAX_LISTED_PAGES);
    uint32_t n_cached = 0;
    for (uint32_t i = 0; i < n; i++) n_cached += pages[i].state == FKV_PAGE_CACHED;
    ck_assert_msg(n == g->pages && n_cached == g->cached, "%s: %u pages, %u cached; expected %u and %u", name, n, n_cached,
                  g->pages, g->cached);
    ck_assert_uint_eq(n_cached, (300 + MAX_NEW - 1) / PAGE); /* the last token of the answer is not in the cache */
    fkv_engine_close(engine);
}

START_TEST(page_map_lists_keys_and_values_instead_of_states) { with_models(check_page_map); }
END_TEST

TEST_MAIN("engine_states", an_added_turn_computes_only_its_new_tokens, drafts_change_neither_answers_nor_snapshots,
          a_turn_whose_reasoning_is_removed_computes_only_its_new_tokens, an_edited_turn_computes_only_its_new_tokens,
          branches_share_the_snapshot_of_their_prompt, prompts_share_the_snapshot_of_their_junction,
          a_long_conversation_computes_only_new_tokens, a_restarted_engine_computes_only_new_tokens,
          page_map_lists_keys_and_values_instead_of_states)
