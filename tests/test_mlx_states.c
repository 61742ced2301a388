/* Tests the state layers of a cache on MLX. Each state must match the tokens of its sequence after steps, forks, aborts,
 * truncation and reloads. Page files must be identical to those of a host cache, and invalid calls must be rejected. The state of
 * a sequence is computed from a hash of its tokens. Runs on MLX's CPU backend, or on a GPU if FKV_TEST_MLX_GPU is set. */
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/mlx.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_LAYERS = 3, KV_LAYER = 1, PAGE = 16, MAX_LEN = 128, MAX_SEQS = 4, N_ROWS_MAX = 2, DIM = 32, MAX_VALUES = 1024 };

static const fkv_layer_config layers[N_LAYERS] = {{.state_bytes = 64},
                                                  {.n_q_heads = 1, .n_kv_heads = 1, .head_dim = DIM, .k = {16, 0}, .v = {16, 0}},
                                                  {.state_bytes = MAX_VALUES * sizeof(float)}};

typedef struct caches {
    fkv_cache *host;
    fkv_cache *mlx;
} caches;

typedef struct state_seq {
    fkv_seq host, mlx;
    uint32_t n;
    uint32_t tokens[MAX_LEN];
} state_seq;

static fkv_mlx_config device(void) {
    static mlx_stream stream; /* the stream is kept until the program ends */
    if (stream.ctx == NULL)
        stream = getenv("FKV_TEST_MLX_GPU") != NULL ? mlx_default_gpu_stream_new() : mlx_default_cpu_stream_new();
    return (fkv_mlx_config){.stream = stream, .way = FKV_MLX_AUTO};
}

static fkv_config cache_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = N_LAYERS;
    config.layers = layers;
    config.page_tokens = PAGE;
    config.max_tokens = MAX_SEQS * MAX_LEN;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = MAX_LEN;
    config.max_snapshots = 3;
    config.n_threads = 1;
    return config;
}

static caches open_caches(void) {
    const fkv_config config = cache_config();
    const fkv_mlx_config mlx_config = device();
    caches c;
    ck_ok(fkv_cache_open(&config, &c.host));
    ck_ok(fkv_mlx_cache_open(&config, &mlx_config, &c.mlx));
    return c;
}

static void close_caches(caches *c) {
    ck_assert(fkv_cache_consistent(c->host) && fkv_cache_consistent(c->mlx));
    fkv_cache_close(c->host);
    fkv_cache_close(c->mlx);
}

/* Computes the state after n tokens: values in [0, 1) from a hash of the tokens, or zeros for an empty sequence. */
static void state_after(const state_seq *s, uint32_t n, uint32_t layer, float *out) {
    uint32_t hash = 2166136261u + layer;
    for (uint32_t i = 0; i < n; i++) hash = (hash ^ s->tokens[i]) * 16777619u;
    for (uint32_t i = 0; i < layers[layer].state_bytes / sizeof(float); i++) {
        hash = hash * 1664525u + 1013904223u;
        out[i] = n == 0 ? 0.0f : (float)(hash >> 8) / (1 << 24);
    }
}

/* In both caches, checks the state that the step reads and writes the next state. */
static void run_state_layer(fkv_step *on_host, fkv_step *on_mlx, uint32_t layer, state_seq *const *seqs, const uint32_t *n,
                            uint32_t n_rows) {
    static float expected[MAX_VALUES];
    const int n_values = (int)(layers[layer].state_bytes / sizeof(float));
    fkv_state_row rows[N_ROWS_MAX];
    mlx_array next[N_ROWS_MAX];
    ck_ok(fkv_state_rows(on_host, layer, rows));
    for (uint32_t r = 0; r < n_rows; r++) {
        mlx_array before = mlx_array_new();
        ck_ok(fkv_mlx_state_get(on_mlx, layer, r, &before));
        ck_assert_int_eq(mlx_array_eval(before), 0);
        state_after(seqs[r], seqs[r]->n, layer, expected);
        ck_assert_mem_eq(mlx_array_data_float32(before), expected, layers[layer].state_bytes);
        if (rows[r].in != NULL) ck_assert_mem_eq(rows[r].in, expected, layers[layer].state_bytes);
        (void)mlx_array_free(before);
        state_after(seqs[r], seqs[r]->n + n[r], layer, expected);
        memcpy(rows[r].out, expected, layers[layer].state_bytes);
        next[r] = mlx_array_new_data(expected, &n_values, 1, MLX_FLOAT32);
    }
    ck_ok(fkv_mlx_state_put(on_mlx, layer, next));
    for (uint32_t r = 0; r < n_rows; r++) (void)mlx_array_free(next[r]);
}

/* Runs the same step in both caches. */
static void run_step(const caches *c, state_seq *const *seqs, const uint32_t *n, uint32_t n_rows, bool commits) {
    static const float zeros[MAX_LEN * DIM];
    fkv_row host_rows[N_ROWS_MAX];
    fkv_row mlx_rows[N_ROWS_MAX];
    fkv_step *on_host = NULL;
    fkv_step *on_mlx = NULL;
    int n_tokens = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        host_rows[r] = (fkv_row){seqs[r]->host, n[r]};
        mlx_rows[r] = (fkv_row){seqs[r]->mlx, n[r]};
        n_tokens += (int)n[r];
    }
    ck_ok(fkv_step_begin(c->host, host_rows, n_rows, &on_host));
    ck_ok(fkv_step_begin(c->mlx, mlx_rows, n_rows, &on_mlx));
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        if (layer != KV_LAYER) {
            run_state_layer(on_host, on_mlx, layer, seqs, n, n_rows);
            continue;
        }
        mlx_array rows = mlx_array_new_data(zeros, (const int[]){n_tokens, 1, DIM}, 3, MLX_FLOAT32);
        ck_ok(fkv_write(on_host, layer, zeros, zeros));
        ck_ok(fkv_mlx_write(on_mlx, layer, rows, rows));
        (void)mlx_array_free(rows);
    }
    mlx_vector_array pending = mlx_vector_array_new();
    ck_ok(fkv_mlx_step_pending(on_mlx, pending));
    ck_assert_int_eq(mlx_eval(pending), 0);
    (void)mlx_vector_array_free(pending);
    ck_ok(commits ? fkv_step_commit(on_host) : fkv_step_abort(on_host));
    ck_ok(commits ? fkv_step_commit(on_mlx) : fkv_step_abort(on_mlx));
    for (uint32_t r = 0; commits && r < n_rows; r++) seqs[r]->n += n[r];
}

static void append(const caches *c, state_seq *s, uint32_t n) { run_step(c, &s, &n, 1, true); }

/* Checks the state of the sequence with a step that is aborted, so that the state does not change. */
static void check_state(const caches *c, state_seq *s) { run_step(c, &s, &(uint32_t){1}, 1, false); }

static state_seq open_seq(const caches *c, uint64_t text, uint32_t n_prompt, uint32_t n_expected) {
    state_seq s = {0};
    uint32_t n_shared = 0;
    cache_tokens(text, s.tokens, MAX_LEN);
    const fkv_seq_config config = {.max_tokens = MAX_LEN, .prompt = s.tokens, .n_prompt = n_prompt};
    ck_ok(fkv_seq_open(c->host, &config, &s.host, NULL));
    ck_ok(fkv_seq_open(c->mlx, &config, &s.mlx, &n_shared));
    ck_assert_uint_eq(n_shared, n_expected);
    s.n = n_shared;
    return s;
}

static size_t read_file(const char *path, uint8_t *out, size_t size) {
    FILE *file = fopen(path, "rb");
    ck_assert_ptr_nonnull(file);
    const size_t n = fread(out, 1, size, file);
    (void)fclose(file);
    return n;
}

START_TEST(states_follow_steps_forks_aborts_and_snapshots) {
    caches c = open_caches();
    state_seq a = open_seq(&c, 1, 0, 0);
    state_seq b = open_seq(&c, 2, 0, 0);
    run_step(&c, (state_seq *[]){&a, &b}, (const uint32_t[]){20, 5}, 2, true);
    append(&c, &a, 12);
    ck_ok(fkv_prefix_insert(c.host, a.host, a.tokens, a.n));
    ck_ok(fkv_prefix_insert(c.mlx, a.mlx, a.tokens, a.n));
    state_seq fork = a;
    ck_ok(fkv_seq_fork(c.host, a.host, MAX_LEN, &fork.host));
    ck_ok(fkv_seq_fork(c.mlx, a.mlx, MAX_LEN, &fork.mlx));
    fork.tokens[32] ^= 1;
    append(&c, &fork, 9);
    run_step(&c, (state_seq *[]){&b, &a}, (const uint32_t[]){7, 30}, 2, false);
    append(&c, &a, 18);
    check_state(&c, &fork);
    check_state(&c, &b);
    ck_ok(fkv_seq_truncate(c.host, a.host, 32));
    ck_ok(fkv_seq_truncate(c.mlx, a.mlx, 32));
    a.n = 32;
    append(&c, &a, 3);
    ck_ok(fkv_seq_close(c.host, a.host));
    ck_ok(fkv_seq_close(c.mlx, a.mlx));
    state_seq again = open_seq(&c, 1, 50, 32);
    append(&c, &again, 1);
    check_state(&c, &again);
    close_caches(&c);
}
END_TEST

START_TEST(page_files_with_states_move_between_devices) {
    static uint8_t host_bytes[65536];
    static uint8_t mlx_bytes[65536];
    char host_path[512];
    char mlx_path[512];
    caches c = open_caches();
    state_seq a = open_seq(&c, 1, 0, 0);
    append(&c, &a, 37);
    ck_ok(fkv_seq_save(c.host, a.host, a.tokens, 0, cache_path(host_path, "mlx_states_host.fkv")));
    ck_ok(fkv_seq_save(c.mlx, a.mlx, a.tokens, 0, cache_path(mlx_path, "mlx_states_mlx.fkv")));
    const size_t n = read_file(host_path, host_bytes, sizeof host_bytes);
    ck_assert_uint_eq(read_file(mlx_path, mlx_bytes, sizeof mlx_bytes), n);
    ck_assert_uint_gt(n, layers[2].state_bytes);
    ck_assert_uint_lt(n, sizeof host_bytes);
    ck_assert_mem_eq(mlx_bytes, host_bytes, n);
    state_seq loaded = a;
    const fkv_seq_config config = {.max_tokens = MAX_LEN};
    ck_ok(fkv_seq_load(c.host, &config, mlx_path, &loaded.host));
    ck_ok(fkv_seq_load(c.mlx, &config, host_path, &loaded.mlx));
    append(&c, &loaded, 4);
    check_state(&c, &loaded);
    check_state(&c, &a);
    close_caches(&c);
}
END_TEST

START_TEST(wrong_calls_are_rejected) {
    caches c = open_caches();
    state_seq a = open_seq(&c, 1, 0, 0);
    fkv_step *step = NULL;
    fkv_state_row row;
    mlx_array state = mlx_array_new();
    const float values[DIM] = {0};
    mlx_array rows = mlx_array_new_data(values, (const int[]){1, 1, DIM}, 3, MLX_FLOAT32);
    mlx_array flat = mlx_array_new_data(values, (const int[]){16}, 1, MLX_FLOAT32);
    mlx_array small = mlx_array_new_data(values, (const int[]){15}, 1, MLX_FLOAT32);
    mlx_array empty = mlx_array_new();
    mlx_array out = mlx_array_new();
    ck_ok(fkv_step_begin(c.mlx, &(fkv_row){a.mlx, 1}, 1, &step));
    ck_status(fkv_state_rows(step, 0, &row), FKV_UNSUPPORTED);
    ck_status(fkv_mlx_write(step, 0, rows, rows), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_attend(step, 0, rows, &out), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_get(step, KV_LAYER, 0, &state), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_get(step, 0, 1, &state), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_get(step, 0, 0, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_put(step, KV_LAYER, &flat), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_put(step, 0, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_put(step, 0, &small), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_put(step, 0, &rows), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_state_put(step, 0, &empty), FKV_BAD_ARGUMENT);
    ck_status(fkv_step_commit(step), FKV_BAD_STATE);
    ck_ok(fkv_mlx_state_put(step, 0, &flat));
    ck_status(fkv_mlx_state_put(step, 0, &flat), FKV_BAD_STATE);
    ck_status(fkv_mlx_fetch(step, 0, 0, &out, &state), FKV_BAD_ARGUMENT);
    ck_ok(fkv_step_abort(step));
    ck_status(fkv_mlx_state_get(step, 0, 0, &state), FKV_BAD_STATE);
    const mlx_array all[] = {state, rows, flat, small, empty, out};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) (void)mlx_array_free(all[i]);
    close_caches(&c);
}
END_TEST

TEST_MAIN("mlx_states", states_follow_steps_forks_aborts_and_snapshots, page_files_with_states_move_between_devices,
          wrong_calls_are_rejected)
