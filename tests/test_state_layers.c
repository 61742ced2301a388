/* Tests of state layers through the public header. The test fills the whole state of a layer with values that are derived from a
 * hash of the sequence's tokens, so it detects every state that belongs to other tokens, another layer or another sequence. Each
 * step updates the hash from the state that the cache returns and from the new tokens. The result is compared with a hash of all
 * tokens.
 */
#include "cache_fixture.h"
#include "sanitized.h"
#include "test.h"

#include "../src/base/memory.h"

#include <flatkv/prefix_store.h>

#include <stdio.h>
#include <string.h>

enum { N_LAYERS = 4, PAGE = 16, MAX_LEN = 400, MAX_SEQS = 6, MAX_STEP = 48, N_SNAPSHOTS = 5 };

static const fkv_layer_config ATTENTION = {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 32, .k = {16, 0}, .v = {16, 0}};
static fkv_layer_config layers[N_LAYERS];

/* Layers 0, 2 and 3 are state layers of different sizes; layer 1 stores keys and values. */
static fkv_config state_config(uint32_t max_snapshots) {
    fkv_config config = fkv_config_default();
    layers[0] = (fkv_layer_config){.state_bytes = 64};
    layers[1] = ATTENTION;
    layers[2] = (fkv_layer_config){.state_bytes = 4096};
    layers[3] = (fkv_layer_config){.state_bytes = 192};
    config.n_layers = N_LAYERS;
    config.layers = layers;
    config.page_tokens = PAGE;
    config.max_tokens = 2048;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = MAX_STEP;
    config.max_snapshots = max_snapshots;
    config.n_threads = 1;
    return config;
}

static fkv_cache *open_cache(uint32_t max_snapshots) {
    fkv_config config = state_config(max_snapshots);
    fkv_cache *cache = NULL;
    ck_ok(fkv_cache_open(&config, &cache));
    return cache;
}

/* ---- states ---- */

static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ (x >> 27);
}

static uint64_t hash_tokens(uint64_t hash, const uint32_t *tokens, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) hash = mix(hash ^ tokens[i]);
    return hash;
}

static void put_state(void *out, uint32_t layer, uint64_t hash) {
    uint64_t *words = out;
    for (uint32_t i = 0; i < layers[layer].state_bytes / 8; i++) words[i] = hash + i * (layer + 1);
}

/* Returns the hash that a state contains, after checking every byte of the state. */
static uint64_t get_state(const void *in, uint32_t layer) {
    const uint64_t *words = in;
    for (uint32_t i = 0; i < layers[layer].state_bytes / 8; i++) ck_assert_uint_eq(words[i], words[0] + i * (layer + 1));
    return words[0];
}

typedef struct state_seq {
    fkv_seq seq;
    uint64_t tenant;
    uint32_t n;
    uint32_t tokens[MAX_LEN];
} state_seq;

typedef struct new_tokens {
    state_seq *seq;
    uint32_t n; /* number of new tokens, stored in seq->tokens after the existing tokens */
} new_tokens;

/* Runs one step. Every state that the step reads must be the hash of all tokens of its sequence. */
static void run_step(fkv_cache *cache, const new_tokens *chunks, uint32_t n_chunks, bool commit) {
    static float rows[MAX_STEP * 64];
    fkv_row step_rows[MAX_SEQS];
    fkv_state_row states[MAX_SEQS];
    fkv_step *step = NULL;
    for (uint32_t i = 0; i < n_chunks; i++) step_rows[i] = (fkv_row){chunks[i].seq->seq, chunks[i].n};
    ck_ok(fkv_step_begin(cache, step_rows, n_chunks, &step));
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        if (layer == 1) {
            ck_ok(fkv_write(step, layer, rows, rows));
            continue;
        }
        ck_ok(fkv_state_rows(step, layer, states));
        for (uint32_t i = 0; i < n_chunks; i++) {
            state_seq *s = chunks[i].seq;
            ck_assert_int_eq(states[i].in == NULL, s->n == 0);
            uint64_t hash = states[i].in == NULL ? 0 : get_state(states[i].in, layer);
            ck_assert_uint_eq(hash, hash_tokens(0, s->tokens, s->n));
            ck_assert(states[i].in != states[i].out && (uintptr_t)states[i].out % 64 == 0);
            put_state(states[i].out, layer, hash_tokens(hash, s->tokens + s->n, chunks[i].n));
        }
    }
    if (!commit) {
        ck_ok(fkv_step_abort(step));
        return;
    }
    ck_ok(fkv_step_commit(step));
    for (uint32_t i = 0; i < n_chunks; i++) chunks[i].seq->n += chunks[i].n;
}

static void append(fkv_cache *cache, state_seq *s, uint32_t n) {
    while (n > 0) {
        new_tokens chunk = {s, n < MAX_STEP ? n : MAX_STEP};
        run_step(cache, &chunk, 1, true);
        n -= chunk.n;
    }
}

/* Runs a step and aborts it, which checks the state of the sequence without changing it. */
static void check_state(fkv_cache *cache, state_seq *s) { run_step(cache, &(new_tokens){s, 1}, 1, false); }

static void open_state_seq(fkv_cache *cache, state_seq *s, uint64_t text, uint32_t n_prompt, uint32_t n_expected) {
    cache_tokens(text, s->tokens, MAX_LEN);
    fkv_seq_config config = {.max_tokens = 256, .prompt = s->tokens, .n_prompt = n_prompt};
    s->n = UINT32_MAX;
    ck_ok(fkv_seq_open(cache, &config, &s->seq, &s->n));
    ck_assert_uint_eq(s->n, n_expected);
}

/* ---- plan ---- */

START_TEST(plan_counts_the_states) {
    fkv_config config = state_config(N_SNAPSHOTS);
    fkv_plan plan;
    fkv_plan plain;
    ck_ok(fkv_plan_make(&config, &plan));
    ck_assert_uint_eq(plan.n_groups, 2);
    ck_assert_uint_eq(plan.state_group, 0);
    ck_assert_uint_eq(plan.state_bytes, 64 + 4096 + 192);
    ck_assert_uint_eq(plan.state_slots, 2 * MAX_SEQS + N_SNAPSHOTS);
    ck_assert_uint_eq(plan.group_pages[0], plan.state_slots);
    ck_assert_uint_eq(plan.token_bytes, 2 * 32 * 2);

    fkv_cache *cache = NULL;
    const uint64_t before = fkv_map_live_bytes();
    ck_ok(fkv_cache_open(&config, &cache));
    ck_assert_uint_eq(fkv_map_live_bytes() - before, plan.total_bytes);
    fkv_cache_close(cache);

    /* without state layers, max_snapshots has no effect */
    config.n_layers = 1;
    config.layers = &ATTENTION;
    ck_ok(fkv_plan_make(&config, &plan));
    config.max_snapshots = 0;
    ck_ok(fkv_plan_make(&config, &plain));
    ck_assert_uint_eq(plan.total_bytes, plain.total_bytes);
    ck_assert_uint_eq(plan.state_bytes, 0);
    ck_assert_uint_eq(plan.state_group, plan.n_groups);
}
END_TEST

START_TEST(a_step_with_fewer_tokens_than_sequences_needs_fewer_states) {
    fkv_config config = state_config(0);
    fkv_plan plan;
    config.max_step_tokens = 2;
    ck_ok(fkv_plan_make(&config, &plan));
    ck_assert_uint_eq(plan.state_slots, MAX_SEQS + 2);
}
END_TEST

START_TEST(invalid_state_layers_are_rejected) {
    fkv_plan plan;
    fkv_config config = state_config(0);
    layers[2].state_bytes = 100;
    ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "layer 2: state_bytes is 100 (expected a multiple of 64"));
    layers[2].state_bytes = (1u << 30) + 64;
    ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
    layers[2] = ATTENTION;
    layers[2].state_bytes = 64;
    ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "has no heads, window or sinks"));
    config = state_config(UINT32_MAX);
    ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
}
END_TEST

/* ---- steps ---- */

START_TEST(state_layers_and_page_layers_have_different_calls) {
    static float rows[64];
    static state_seq s;
    fkv_cache *cache = open_cache(0);
    fkv_state_row states[1];
    fkv_step *step = NULL;
    open_state_seq(cache, &s, 1, 0, 0);
    ck_ok(fkv_step_begin(cache, &(fkv_row){s.seq, 1}, 1, &step));
    ck_status(fkv_write(step, 0, rows, rows), FKV_BAD_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "use fkv_state_rows()"));
    ck_status(fkv_attend(step, 0, rows, rows), FKV_BAD_ARGUMENT);
    ck_status(fkv_state_rows(step, 1, states), FKV_BAD_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "use fkv_write() and fkv_attend()"));
    ck_status(fkv_state_rows(step, 4, states), FKV_BAD_ARGUMENT);
    ck_status(fkv_state_rows(step, 0, NULL), FKV_BAD_ARGUMENT);
    ck_ok(fkv_state_rows(step, 0, states));
    ck_status(fkv_state_rows(step, 0, states), FKV_BAD_STATE);
    ck_ok(fkv_write(step, 1, rows, rows));
    ck_ok(fkv_state_rows(step, 2, states));
    ck_status(fkv_step_commit(step), FKV_BAD_STATE);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "only 3 of 4 layers"));
    ck_ok(fkv_state_rows(step, 3, states));
    ck_ok(fkv_step_commit(step));
    ck_status(fkv_state_rows(step, 0, states), FKV_BAD_STATE);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(forks_share_a_state_until_one_of_them_steps) {
    static state_seq a;
    static state_seq b;
    fkv_cache *cache = open_cache(0);
    fkv_stats stats;
    open_state_seq(cache, &a, 1, 0, 0);
    append(cache, &a, 21);
    b = a;
    ck_ok(fkv_seq_fork(cache, a.seq, 256, &b.seq));
    ck_ok(fkv_cache_stats(cache, &stats));
    ck_assert_uint_eq(stats.groups[0].held, 1);
    ck_assert_uint_eq(stats.groups[0].shared, 1);
    b.tokens[21] ^= 1;
    new_tokens both[] = {{&a, 3}, {&b, 5}};
    run_step(cache, both, 2, false);
    run_step(cache, both, 2, true);
    check_state(cache, &a);
    check_state(cache, &b);
    ck_ok(fkv_cache_stats(cache, &stats));
    ck_assert_uint_eq(stats.groups[0].held, 2);
    ck_assert_uint_eq(stats.page_copies, 1); /* only the attention layer has copied a page; states are never copied */
    ck_ok(fkv_seq_close(cache, a.seq));
    check_state(cache, &b);
    fkv_cache_close(cache);
}
END_TEST

/* ---- snapshots ---- */

START_TEST(truncate_reaches_snapshots_and_reports_the_nearest) {
    static state_seq s;
    uint32_t at = 0;
    fkv_cache *cache = open_cache(N_SNAPSHOTS);
    open_state_seq(cache, &s, 1, 0, 0);
    append(cache, &s, 32);
    ck_ok(fkv_prefix_insert(cache, s.seq, s.tokens, 32));
    append(cache, &s, 32);
    ck_ok(fkv_prefix_insert(cache, s.seq, s.tokens, 64));
    append(cache, &s, 37);
    ck_ok(fkv_prefix_insert(cache, s.seq, s.tokens, 101)); /* no snapshot is stored, because the length is not a page boundary */
    ck_status(fkv_seq_truncate(cache, s.seq, 96), FKV_GONE);
    ck_assert_msg(strstr(fkv_message(), "truncate to 64 tokens, the nearest shorter length with a stored state") != NULL, "%s",
                  fkv_message());
    ck_status(fkv_seq_truncate(cache, s.seq, 100), FKV_GONE);
    ck_ok(fkv_seq_reachable(cache, s.seq, 101, &at));
    ck_assert_uint_eq(at, 101);
    ck_ok(fkv_seq_reachable(cache, s.seq, 100, &at));
    ck_assert_uint_eq(at, 64);
    ck_ok(fkv_seq_reachable(cache, s.seq, 63, &at));
    ck_assert_uint_eq(at, 32);
    ck_ok(fkv_seq_reachable(cache, s.seq, 31, &at));
    ck_assert_uint_eq(at, 0);
    ck_status(fkv_seq_reachable(cache, s.seq, 102, &at), FKV_BAD_ARGUMENT);
    ck_ok(fkv_seq_truncate(cache, s.seq, 64));
    s.n = 64;
    for (uint32_t i = 64; i < 128; i++) s.tokens[i] ^= 5;
    append(cache, &s, 30);
    check_state(cache, &s);
    ck_ok(fkv_seq_truncate(cache, s.seq, 32));
    s.n = 32;
    check_state(cache, &s);
    ck_ok(fkv_seq_truncate(cache, s.seq, 0));
    s.n = 0;
    append(cache, &s, 20);
    check_state(cache, &s);
    ck_assert(fkv_cache_consistent(cache));
    fkv_cache_close(cache);
}
END_TEST

START_TEST(prefixes_are_shared_up_to_a_snapshot) {
    static state_seq a;
    static state_seq b;
    static state_seq c;
    fkv_cache *cache = open_cache(N_SNAPSHOTS);
    open_state_seq(cache, &a, 1, 0, 0);
    append(cache, &a, 32);
    ck_ok(fkv_prefix_insert(cache, a.seq, a.tokens, 32));
    append(cache, &a, 48);
    ck_ok(fkv_prefix_insert(cache, a.seq, a.tokens, 64)); /* no snapshot is stored: the state after 64 tokens is gone */
    open_state_seq(cache, &b, 1, 80, 32);
    check_state(cache, &b);
    append(cache, &b, 30);
    ck_ok(fkv_prefix_insert(cache, a.seq, a.tokens, 80));
    open_state_seq(cache, &c, 1, 81, 80);
    check_state(cache, &c);
    ck_ok(fkv_seq_close(cache, a.seq)); /* the snapshot outlives the sequence that made it */
    ck_ok(fkv_seq_close(cache, c.seq));
    open_state_seq(cache, &c, 1, 80, 80);
    append(cache, &c, 5);
    check_state(cache, &c);
    check_state(cache, &b);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(snapshots_are_evicted_in_order_of_use) {
    static state_seq s;
    fkv_cache *cache = open_cache(2);
    for (uint32_t text = 1; text <= 3; text++) {
        open_state_seq(cache, &s, text, 0, 0);
        append(cache, &s, 32);
        ck_ok(fkv_prefix_insert(cache, s.seq, s.tokens, 32));
        ck_ok(fkv_seq_close(cache, s.seq));
    }
    /* the pool has 12 + 2 slots, so all three snapshots fit while no sequence is open; six open sequences leave slots for two */
    static state_seq open[MAX_SEQS];
    for (uint32_t i = 0; i < MAX_SEQS; i++) open_state_seq(cache, &open[i], 10 + i, 0, 0);
    for (uint32_t i = 0; i < MAX_SEQS; i++) append(cache, &open[i], 1);
    for (uint32_t i = 0; i < MAX_SEQS; i++) ck_ok(fkv_seq_close(cache, open[i].seq));
    open_state_seq(cache, &s, 1, 32, 0);
    ck_ok(fkv_seq_close(cache, s.seq));
    open_state_seq(cache, &s, 2, 32, 32);
    check_state(cache, &s);
    ck_ok(fkv_seq_close(cache, s.seq));
    open_state_seq(cache, &s, 3, 32, 32);
    fkv_cache_close(cache);
}
END_TEST

/* A snapshot within a span needs the open pages of the span. They must not be evicted when a long answer, of which only the
 * latest snapshot is kept, fills the pool of open pages. */
START_TEST(open_pages_of_a_snapshot_outlive_those_without_one) {
    enum { SNAPSHOT = 6 * PAGE, END = 24 * PAGE };
    static state_seq s;
    fkv_cache *cache = NULL;
    fkv_config config = state_config(2);
    layers[1].k = (fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED};
    layers[1].v = (fkv_codec_config){.bits = 4, .kind = FKV_CODEC_SEALED_V};
    config.max_seqs = 1;
    config.max_tokens = END;
    ck_ok(fkv_cache_open(&config, &cache));
    cache_tokens(1, s.tokens, MAX_LEN);
    s.n = 0;
    ck_ok(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = END}, &s.seq, NULL));
    append(cache, &s, SNAPSHOT);
    ck_ok(fkv_prefix_insert(cache, s.seq, s.tokens, SNAPSHOT));
    while (s.n < END) {
        append(cache, &s, PAGE);
        ck_ok(fkv_prefix_insert(cache, s.seq, s.tokens, s.n));
        if (s.n > SNAPSHOT + PAGE) ck_ok(fkv_snapshot_drop(cache, 0, s.tokens, s.n - PAGE));
    }
    ck_ok(fkv_seq_close(cache, s.seq));
    open_state_seq(cache, &s, 1, SNAPSHOT + 1, SNAPSHOT);
    check_state(cache, &s);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(dropped_snapshots_are_gone_unless_a_sequence_uses_them) {
    static state_seq a;
    static state_seq b;
    uint32_t at = 0;
    fkv_cache *cache = open_cache(N_SNAPSHOTS);
    open_state_seq(cache, &a, 1, 0, 0);
    append(cache, &a, 32);
    ck_ok(fkv_prefix_insert(cache, a.seq, a.tokens, 32));
    ck_ok(fkv_snapshot_drop(cache, 0, a.tokens, 32)); /* dropping the snapshot does not drop the current state of the sequence */
    open_state_seq(cache, &b, 1, 33, 32);
    ck_ok(fkv_seq_close(cache, b.seq));
    append(cache, &a, 5);
    ck_ok(fkv_snapshot_drop(cache, 1, a.tokens, 32)); /* another tenant */
    ck_ok(fkv_snapshot_drop(cache, 0, a.tokens, 16)); /* no snapshot */
    ck_ok(fkv_seq_reachable(cache, a.seq, 36, &at));
    ck_assert_uint_eq(at, 32);
    ck_ok(fkv_snapshot_drop(cache, 0, a.tokens, 32));
    ck_ok(fkv_seq_reachable(cache, a.seq, 36, &at));
    ck_assert_uint_eq(at, 0);
    open_state_seq(cache, &b, 1, 33, 0);
    check_state(cache, &a);
    ck_status(fkv_snapshot_drop(cache, 0, a.tokens, 33), FKV_BAD_ARGUMENT);
    ck_status(fkv_snapshot_drop(cache, 0, a.tokens, 0), FKV_BAD_ARGUMENT);
    ck_assert(fkv_cache_consistent(cache));
    fkv_cache_close(cache);
}
END_TEST

/* A page file holds the state after its last token. */
START_TEST(page_files_store_the_state) {
    static const uint32_t lengths[] = {1, 15, 16, 17, 40, 48};
    static state_seq s;
    static state_seq t;
    char path[512];
    fkv_cache *from = open_cache(4);
    fkv_cache *to = open_cache(0);
    (void)cache_path(path, "state.fkv");
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        fkv_file_info info;
        const uint32_t n = lengths[i];
        open_state_seq(from, &s, i, 0, 0);
        append(from, &s, n);
        ck_ok(fkv_seq_save(from, s.seq, s.tokens, 0, path));
        if (n > 1) ck_status(fkv_seq_save(from, s.seq, s.tokens, n - 1, path), FKV_GONE);
        ck_ok(fkv_file_inspect(path, true, &info));
        ck_assert(info.n_tokens == n && info.n_layers == N_LAYERS && info.first_layer.head_dim == 32);
        t = s;
        ck_ok(fkv_seq_load(to, &(fkv_seq_config){.max_tokens = 256}, path, &t.seq));
        check_state(to, &t);
        append(to, &t, 20);
        check_state(to, &t);
        ck_assert(fkv_cache_consistent(to));
        ck_ok(fkv_seq_close(to, t.seq));
        ck_ok(fkv_seq_close(from, s.seq));
    }
    fkv_config config = state_config(4);
    fkv_cache *other = NULL;
    layers[2].state_bytes += 64; /* a layer with a different state size */
    ck_ok(fkv_cache_open(&config, &other));
    ck_status(fkv_seq_load(other, &(fkv_seq_config){.max_tokens = 256}, path, &t.seq), FKV_FILE_FOREIGN);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "state_bytes of layer 2"));
    fkv_cache_close(other);
    fkv_cache_close(from);
    fkv_cache_close(to);
}
END_TEST

/* Unpacks pages and states of one cache in another cache. A sequence of that cache then continues from the state. */
START_TEST(packed_states_restore_a_prefix) {
    enum { N_PAGES = 3, PAGE_TOKENS = 16 };
    static state_seq a;
    static state_seq b;
    static uint8_t pages[N_PAGES][1 << 16];
    static uint8_t state[1 << 16];
    uint64_t n_bytes[N_PAGES];
    uint64_t n_state = 0;
    fkv_page_key keys[N_PAGES];
    fkv_page_key root;
    fkv_page_key state_key;
    fkv_cache *from = open_cache(4);
    fkv_cache *to = open_cache(4);
    ck_assert_uint_le(fkv_prefix_packed_bytes(from), sizeof state);
    ck_ok(fkv_prefix_root(from, "x", 1, &root));
    open_state_seq(from, &a, 1, 0, 0);
    append(from, &a, N_PAGES * PAGE_TOKENS);
    ck_ok(fkv_prefix_insert(from, a.seq, a.tokens, a.n));
    for (uint32_t i = 0; i < N_PAGES; i++) {
        ck_ok(fkv_prefix_key(i > 0 ? &keys[i - 1] : &root, a.tokens + (size_t)i * PAGE_TOKENS, PAGE_TOKENS, &keys[i]));
        ck_ok(fkv_prefix_pack(from, 0, a.tokens, i + 1, &keys[i], pages[i], &n_bytes[i]));
    }
    ck_ok(fkv_prefix_state_key(&keys[N_PAGES - 1], &state_key));
    ck_assert_int_ne(memcmp(&state_key, &keys[N_PAGES - 1], sizeof state_key), 0);
    ck_ok(fkv_prefix_pack_state(from, 0, a.tokens, N_PAGES, &state_key, state, &n_state));
    ck_status(fkv_prefix_pack_state(from, 0, a.tokens, 1, &state_key, state, &n_state), FKV_GONE); /* no snapshot there */
    ck_ok(fkv_prefix_pack_state(from, 0, a.tokens, N_PAGES, &state_key, state, &n_state));

    ck_status(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &state_key, state, n_state), FKV_GONE); /* no pages yet */
    for (uint32_t i = 0; i < N_PAGES; i++) ck_ok(fkv_prefix_unpack(to, 0, a.tokens, i + 1, &keys[i], pages[i], n_bytes[i]));
    open_state_seq(to, &b, 1, 2 * N_PAGES * PAGE_TOKENS, 0); /* pages without a state cannot be shared */
    ck_ok(fkv_seq_close(to, b.seq));
    ck_status(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &keys[N_PAGES - 1], state, n_state), FKV_FILE_FOREIGN);
    ck_status(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES - 1, &state_key, state, n_state), FKV_FILE_FOREIGN);
    ck_status(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &keys[N_PAGES - 1], pages[N_PAGES - 1], n_bytes[N_PAGES - 1]),
              FKV_FILE_FOREIGN);
    ck_status(fkv_prefix_unpack(to, 0, a.tokens, N_PAGES, &state_key, state, n_state), FKV_FILE_FOREIGN);
    for (uint64_t at = 0; at < n_state; at += 97) { /* damage must be detected in each of these bytes */
        state[at] ^= 0x20;
        ck_assert_int_ne(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &state_key, state, n_state), FKV_OK);
        state[at] ^= 0x20;
    }
    ck_status(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &state_key, state, n_state - 1), FKV_FILE_FOREIGN);
    ck_ok(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &state_key, state, n_state));
    ck_ok(fkv_prefix_unpack_state(to, 0, a.tokens, N_PAGES, &state_key, state, n_state)); /* already there */
    ck_assert(fkv_cache_consistent(to));
    open_state_seq(to, &b, 1, 2 * N_PAGES * PAGE_TOKENS, N_PAGES * PAGE_TOKENS);
    check_state(to, &b);
    append(to, &b, 40);
    check_state(to, &b);
    fkv_cache_close(from);
    fkv_cache_close(to);
}
END_TEST

/* ---- random operations ---- */

typedef struct fixture {
    fkv_cache *cache;
    uint64_t random;
    state_seq seqs[MAX_SEQS];
    uint32_t n_seqs;
    uint32_t n_shared, n_to_snapshot; /* number of shared prefixes, and number of truncations to a snapshot */
} fixture;

static uint32_t below(fixture *f, uint32_t n) { return (uint32_t)(mix(f->random++) >> 33) % n; }

static void random_open(fixture *f) {
    if (f->n_seqs == MAX_SEQS) return;
    state_seq *s = &f->seqs[f->n_seqs];
    cache_tokens(below(f, 3), s->tokens, MAX_LEN);
    s->tenant = below(f, 2);
    fkv_seq_config config = {
        .max_tokens = 64 + below(f, 150), .tenant = s->tenant, .prompt = s->tokens, .n_prompt = below(f, 128)};
    fkv_status status = fkv_seq_open(f->cache, &config, &s->seq, &s->n);
    ck_assert(status == FKV_OK || status == FKV_POOL_FULL);
    if (status != FKV_OK) return;
    f->n_shared += s->n > 0;
    f->n_seqs++;
}

static void random_fork(fixture *f, state_seq *s) {
    if (f->n_seqs == MAX_SEQS) return;
    state_seq *child = &f->seqs[f->n_seqs];
    *child = *s;
    fkv_status status = fkv_seq_fork(f->cache, s->seq, s->n + 1 + below(f, 64), &child->seq);
    ck_assert(status == FKV_OK || status == FKV_POOL_FULL);
    f->n_seqs += status == FKV_OK;
}

static void random_step(fixture *f) {
    new_tokens chunks[MAX_SEQS];
    uint32_t n_chunks = 0;
    uint32_t left = MAX_STEP;
    for (uint32_t i = 0; i < f->n_seqs; i++) {
        state_seq *s = &f->seqs[i];
        uint32_t n = below(f, 2) == 0 ? PAGE - s->n % PAGE : 1 + below(f, 24);
        if (n > left || s->n + n > MAX_LEN || below(f, 3) == 0) continue;
        if (fkv_seq_reserve(f->cache, s->seq, s->n + n) != FKV_OK) continue;
        if (below(f, 8) == 0) s->tokens[s->n] ^= 7; /* makes the sequence diverge from the text on which it is based */
        chunks[n_chunks++] = (new_tokens){s, n};
        left -= n;
    }
    if (n_chunks > 0) run_step(f->cache, chunks, n_chunks, below(f, 5) != 0);
}

static void random_truncate(fixture *f, state_seq *s) {
    uint32_t at = 0;
    uint32_t n = below(f, s->n + 1);
    ck_ok(fkv_seq_reachable(f->cache, s->seq, n, &at));
    if (at < n) ck_status(fkv_seq_truncate(f->cache, s->seq, n), FKV_GONE);
    fkv_status status = fkv_seq_truncate(f->cache, s->seq, at);
    ck_assert(status == FKV_OK || status == FKV_POOL_FULL);
    if (status != FKV_OK) return;
    f->n_to_snapshot += at > 0 && at < s->n;
    s->n = at;
}

static void random_operation(fixture *f) {
    state_seq *s = f->n_seqs > 0 ? &f->seqs[below(f, f->n_seqs)] : NULL;
    uint32_t kind = below(f, 16);
    if (kind < 7)
        random_step(f);
    else if (kind < 9 || s == NULL)
        random_open(f);
    else if (kind == 9)
        random_fork(f, s);
    else if (kind < 13)
        ck_ok(fkv_prefix_insert(f->cache, s->seq, s->tokens, s->n));
    else if (kind == 13)
        random_truncate(f, s);
    else if (kind == 14 && below(f, 2) == 0) {
        ck_ok(fkv_seq_close(f->cache, s->seq));
        *s = f->seqs[--f->n_seqs];
    } else if (below(f, 40) == 0)
        ck_ok(fkv_prefix_clear(f->cache));
}

START_TEST(random_operations_never_mix_up_states) {
    static fixture f;
    const uint32_t n_operations = TEST_SANITIZED ? 500 : 2500;
    uint32_t n_shared = 0;
    uint32_t n_to_snapshot = 0;
    for (uint32_t round = 0; round < 12; round++) {
        f = (fixture){.cache = open_cache(round % 3 * 4), .random = 1000 * round};
        for (uint32_t i = 0; i < n_operations; i++) {
            random_operation(&f);
            if (i % 16 == 0) ck_assert(fkv_cache_consistent(f.cache));
        }
        n_shared += f.n_shared;
        n_to_snapshot += f.n_to_snapshot;
        fkv_cache_close(f.cache);
    }
    ck_assert_uint_gt(n_shared, n_operations / 60);
    ck_assert_uint_gt(n_to_snapshot, n_operations / 60);
}
END_TEST

TEST_MAIN("state_layers", plan_counts_the_states, a_step_with_fewer_tokens_than_sequences_needs_fewer_states,
          invalid_state_layers_are_rejected, state_layers_and_page_layers_have_different_calls,
          forks_share_a_state_until_one_of_them_steps, truncate_reaches_snapshots_and_reports_the_nearest,
          prefixes_are_shared_up_to_a_snapshot, snapshots_are_evicted_in_order_of_use,
          open_pages_of_a_snapshot_outlive_those_without_one, dropped_snapshots_are_gone_unless_a_sequence_uses_them,
          page_files_store_the_state, packed_states_restore_a_prefix, random_operations_never_mix_up_states)
